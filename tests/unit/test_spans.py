"""flash_online.spans: each function against a mask that loops write down; spans in the reference against the same mask."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_online import InvalidArgument, reference, spans
from flash_online._span_arguments import check_spans

INTEGERS = [torch.int32, torch.int64]
LENGTHS = [1, 2, 3, 7, 16, 33, 40]


def mask_of(shape: tuple, sees) -> Tensor:
    """bool, True where sees(*indices)."""
    mask = torch.zeros(shape, dtype=torch.bool)
    for index in torch.cartesian_prod(*map(torch.arange, shape)).tolist():
        mask[tuple(index)] = sees(*index)
    return mask


def check(made: dict, names: set, shape: list, expected: Tensor) -> None:
    """Compares the mask of a dict of spans, [B, H, L, S], with the expected one, and looks at the dict itself."""
    assert made.keys() == names and made.get("causal", True) is True
    (tensor,) = (value for value in made.values() if isinstance(value, Tensor))
    assert list(tensor.shape) == shape and tensor.dtype == torch.int32 and tensor.device.type == "cpu"
    torch.testing.assert_close(spans.to_mask(*expected.shape[-2:], **made), expected)


def random_starts(L: int, segments: int, generator: random.Random) -> list[int]:
    """Starts of segments in a row of L, empty ones and padding at the end among them."""
    return [0, *sorted(generator.randint(0, L) for _ in range(segments))]


def segment_of(starts: list[int], position: int) -> int:
    """The index of a position's segment, len(starts) - 1 for padding."""
    return next((n for n, end in enumerate(starts[1:]) if position < end), len(starts) - 1)


class TestDocuments:
    @pytest.mark.parametrize("dtype", [*INTEGERS, torch.uint8, torch.int16])
    @pytest.mark.parametrize("L", LENGTHS)
    def test_ids(self, L, dtype):
        ids = torch.randint(0, 3, (3, L)).sort(0).values.to(dtype)  # with ids that come again
        first = [[max(k for k in range(j + 1) if k == 0 or row[k] != row[k - 1]) for j in range(L)] for row in ids.tolist()]
        expected = mask_of((3, 1, L, L), lambda b, h, i, j: j <= i and first[b][i] == first[b][j])
        check(spans.documents(ids), {"key_spans", "causal"}, [3, 1, L, 2], expected)

    def test_a_repeated_id_is_a_new_document(self):
        made = spans.documents(torch.tensor([[5, 5, 2, 5, 5]]))
        assert made["key_spans"].tolist() == [[[[0, 2], [1, 2], [2, 3], [3, 5], [4, 5]]]]

    @pytest.mark.parametrize("L", LENGTHS)
    @pytest.mark.parametrize("count", [0, 1, 4])
    def test_starts(self, L, count):
        starts = random_starts(L, count, random.Random(L))
        expected = mask_of((1, 1, L, L), lambda b, h, i, j: j <= i and segment_of(starts, i) == segment_of(starts, j))
        made = spans.documents(cu_seqlens=torch.tensor(starts, dtype=torch.int32), L=L)
        check(made, {"key_spans", "causal"}, [1, 1, L, 2], expected)

    def test_starts_past_the_end(self):
        made = spans.documents(cu_seqlens=torch.tensor([0, 2, 9], dtype=torch.int32), L=4)
        assert made["key_spans"].tolist() == [[[[0, 2], [1, 2], [2, 4], [3, 4]]]]

    def test_any_strides(self):
        ids = torch.randint(0, 2, (9, 4), dtype=torch.int32)
        parents = (torch.arange(9)[:, None] - 1).expand(9, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # searchsorted warns of a copy
            for function, tensor in ((spans.documents, ids), (spans.tree, parents)):
                found, expected = function(tensor.t()), function(tensor.t().contiguous())
                torch.testing.assert_close(found["key_spans"], expected["key_spans"])


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("L", LENGTHS)
def test_prefix(L, dtype):
    lengths = [0, L, random.Random(L).randint(0, L), L + 3, -2]
    expected = mask_of((5, 1, L, L), lambda b, h, i, j: j < max(i + 1, lengths[b]))
    check(spans.prefix(torch.tensor(lengths, dtype=dtype), L), {"query_spans"}, [5, 1, L, 2], expected)


def random_forest(L: int, generator: random.Random) -> list[int]:
    """Parents of nodes in depth-first order: each node is a child of one on the path from a root to the node before it."""
    parents: list[int] = []
    for _ in range(L):
        path = [-1]
        node = len(parents) - 1
        while node >= 0:
            path.append(node)
            node = parents[node]
        parents.append(generator.choice(path))
    return parents


def ancestors(parents: list[int], node: int) -> set[int]:
    """The node and all nodes above it."""
    return set() if node < 0 else {node} | ancestors(parents, parents[node])


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize("kind", ["chain", "star", "roots", "comb", "random"])
def test_tree(kind, L, dtype):
    rows = {
        "chain": [list(range(-1, L - 1))],
        "star": [[-1] + [0] * (L - 1)],
        "roots": [[-1] * L],
        "comb": [[-1] + [n - 1 - (n > 1 and n % 2 == 0) for n in range(1, L)]],  # a leaf next to each node of a chain
        "random": [random_forest(L, random.Random(seed)) for seed in range(3)],
    }[kind]
    seen = [[ancestors(parents, node) for node in range(L)] for parents in rows]
    expected = mask_of((len(rows), 1, L, L), lambda b, h, i, j: j in seen[b][i])
    check(spans.tree(torch.tensor(rows, dtype=dtype)), {"key_spans", "causal"}, [len(rows), 1, L, 2], expected)


def test_a_deep_tree():
    """A chain with leaves in front of its links: the end of a leaf's subtree is near, that of a link is the end."""
    L = 2000
    parents = [-1] + [
        n - 1 if n % 2 else max(n - 2, 0) for n in range(1, L)
    ]  # node n even: its own parent is n - 2, n odd a leaf
    ends = spans.tree(torch.tensor([parents]))["key_spans"][0, 0, :, 1]
    assert ends.tolist() == [n + 1 if n % 2 else L for n in range(L)]


def test_parents_that_are_no_forest_read_nothing_outside():
    parents = torch.tensor([[5, 700, -(2**40), 3, 2**60]])
    ends = spans.tree(parents)["key_spans"][..., 1]
    assert ((ends >= 0) & (ends <= 5)).all()


@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize("segments", [1, 2, 5])
def test_shared_prefix(L, segments):
    for seed in range(3):
        starts = random_starts(L, segments, random.Random(seed))

        def sees(b, h, i, j, starts=starts):
            own, other = segment_of(starts, i), segment_of(starts, j)
            return j <= i and (own == other or (other == 0 and i < starts[-1]))

        made = spans.shared_prefix(torch.tensor(starts, dtype=torch.int32), L)
        check(made, {"key_spans", "causal"}, [1, 1, L, 2], mask_of((1, 1, L, L), sees))


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("L", LENGTHS)
def test_padding(L, dtype):
    lengths = [0, L, random.Random(L).randint(0, L), L + 2]
    made = spans.padding(torch.tensor(lengths, dtype=dtype), L)
    assert made["query_spans"].stride(2) == 0 or L == 1
    for S in (L, L + 4):
        expected = mask_of((4, 1, L, S), lambda b, h, i, j: j < lengths[b])
        check(made, {"query_spans"}, [4, 1, L, 2], expected)


def test_lengths_of_64_bits_do_not_wrap():
    lengths = torch.tensor([2**32 + 1, -(2**32) + 1, 2**31])
    assert spans.padding(lengths, 1)["query_spans"][:, 0, 0, 1].tolist() == [2**31 - 1, 0, 2**31 - 1]
    assert spans.prefix(lengths, 4)["query_spans"][:, 0, 0, 1].tolist() == [4, 1, 4]


@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize(("sinks", "left"), [(0, 0), (1, 0), (4, 3), (0, 5), (50, 2), (2, 2**31 - 1)])
def test_sink_window(L, sinks, left):
    expected = mask_of((1, 1, L, L), lambda b, h, i, j: j <= i and (j < sinks or j >= i - left))
    check(spans.sink_window(sinks, left, L), {"key_spans", "causal"}, [1, 1, L, 2], expected)


class TestFlashMask:
    @staticmethod
    def hidden(indices: Tensor, causal: bool, L: int) -> Tensor:
        """FlashMask's own definition, as a bool mask of what it hides."""
        rows = indices.tolist()

        def hides(b, h, i, j):
            bounds = rows[b][h][j]
            if causal:
                return i < j or bounds[0] <= i < (bounds[1] if len(bounds) == 2 else L)
            if len(bounds) == 2:
                return i >= bounds[0] or i < bounds[1]
            return bounds[0] <= i < bounds[1] or bounds[2] <= i < bounds[3]

        return mask_of((indices.shape[0], indices.shape[1], L, indices.shape[2]), hides)

    def compare(self, indices: Tensor, causal: bool, queries: int, **options) -> None:
        made = spans.from_flashmask(indices, causal, **options)
        columns = {(True, 1): 2, (True, 2): 4, (False, 2): 2, (False, 4): 4}[causal, indices.shape[-1]]
        assert made.keys() == {"key_spans", "causal"} and made["causal"] is causal
        assert made["key_spans"].dtype == torch.int32 and made["key_spans"].shape == (*indices.shape[:-1], columns)
        torch.testing.assert_close(spans.to_mask(queries, indices.shape[-2], **made), ~self.hidden(indices, causal, queries))

    @pytest.mark.parametrize(("causal", "columns"), [(True, 1), (True, 2), (False, 2)])
    @pytest.mark.parametrize("L", [1, 5, 24])
    def test_one_interval_is_hidden(self, L, causal, columns):
        indices = torch.randint(0, L + 1, (2, 3, L, columns), dtype=torch.int32)
        self.compare(indices, causal, L)
        made = spans.from_flashmask(indices, causal)
        squeezed = spans.from_flashmask(indices[..., None, :], causal)
        torch.testing.assert_close(made["key_spans"], squeezed["key_spans"])

    @pytest.mark.parametrize("L", [3, 9])
    @pytest.mark.parametrize(("causal", "columns"), [(True, 1), (True, 2), (False, 2)])
    def test_another_number_of_queries(self, L, causal, columns):
        indices = torch.randint(0, L + 1, (1, 1, 6, columns), dtype=torch.int32)
        self.compare(indices, causal, L)
        self.compare(indices, causal, L, L=L)

    def test_two_hidden_intervals(self):
        L = 7
        bounds = torch.cartesian_prod(*[torch.arange(L + 1, dtype=torch.int32)] * 4)
        left = ~self.hidden(bounds[None, None], False, L)[0, 0].t()
        intervals = (torch.nn.functional.pad(left.int(), (1, 0)).diff(dim=-1) == 1).sum(-1)
        assert (intervals == 3).any()
        legal = bounds[intervals <= 2][None, None]
        made = spans.from_flashmask(legal, False, L=L)["key_spans"]
        positions = torch.arange(L)
        inside = [(made[0, 0, :, n, None] <= positions) & (positions < made[0, 0, :, n + 1, None]) for n in (0, 2)]
        torch.testing.assert_close(inside[0] | inside[1], left[intervals <= 2])
        assert not (inside[0] & inside[1]).any()  # they are disjoint

    @pytest.mark.parametrize("L", [6, 11])
    def test_two_hidden_intervals_of_another_number_of_queries(self, L):
        S = 8  # a global column of 1 and a window of 2 to each side
        rows = [[min(j + 3, L), L, 1, min(max(j - 2, 1), L)] for j in range(S)]
        self.compare(torch.tensor([[rows]], dtype=torch.int32), False, L, L=L)

    def test_three_intervals_are_refused(self):
        indices = torch.tensor([[[[2, 4, 6, 7]] * 8]], dtype=torch.int32)
        with pytest.raises(InvalidArgument, match=r"^startend_row_indices: expected at most two .*, got a key with three"):
            spans.from_flashmask(indices, False)
        self.compare(indices, False, 7, L=7)


class TestHostReads:
    """Nothing but from_flashmask with 4 columns reads a value: a fake tensor and one on the device "meta" have none."""

    @staticmethod
    def made(device) -> list[tuple[dict, tuple]]:
        def zeros(*sizes, dtype=torch.int32):
            return torch.zeros(sizes, dtype=dtype, device=device)

        return [
            (spans.documents(zeros(2, 9)), (2, 1, 9, 2)),
            (spans.documents(cu_seqlens=zeros(4), L=9), (1, 1, 9, 2)),
            (spans.prefix(zeros(2), 9), (2, 1, 9, 2)),
            (spans.tree(zeros(2, 9, dtype=torch.int64)), (2, 1, 9, 2)),
            (spans.shared_prefix(zeros(4), 9), (1, 1, 9, 2)),
            (spans.padding(zeros(2, dtype=torch.int64), 9), (2, 1, 9, 2)),
            (spans.sink_window(2, 3, 9, device=device), (1, 1, 9, 2)),
            (spans.from_flashmask(zeros(2, 3, 9, 1), True), (2, 3, 9, 2)),
            (spans.from_flashmask(zeros(2, 3, 9, 2), True), (2, 3, 9, 4)),
            (spans.from_flashmask(zeros(2, 3, 9, 2), False), (2, 3, 9, 2)),
        ]

    def check(self, device):
        for made, shape in self.made(device):
            (tensor,) = (value for value in made.values() if isinstance(value, Tensor))
            assert tensor.shape == shape and tensor.dtype == torch.int32 and tensor.device.type == device
            assert spans.to_mask(9, 9, **made).shape == (*shape[:2], 9, 9)

    def test_fake_tensors(self):
        with FakeTensorMode():
            self.check("cpu")

    def test_meta_tensors(self):
        self.check("meta")

    def test_four_columns_read(self):
        with FakeTensorMode(), pytest.raises(Exception, match="data-dependent|DataDependent|_local_scalar_dense"):
            spans.from_flashmask(torch.zeros(1, 1, 5, 4, dtype=torch.int32), False)

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_compiled_without_a_break(self, dynamic):
        def masks(ids, parents, lengths):
            return spans.documents(ids), spans.tree(parents), spans.padding(lengths, ids.shape[1])

        compiled = torch.compile(masks, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for L in (12, 17):
            inputs = torch.randint(0, 3, (2, L)), torch.tensor([random_forest(L, random.Random(L))]), torch.tensor([3, L])
            for found, expected in zip(compiled(*inputs), masks(*inputs), strict=True):
                torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("L", [0, 1])
def test_empty_batches_and_rows(L):
    for B in (0, 2):
        ids, lengths = torch.zeros(B, L, dtype=torch.int32), torch.zeros(B, dtype=torch.int32)
        for made in (spans.documents(ids), spans.tree(ids - 1), spans.prefix(lengths, L), spans.padding(lengths, L)):
            assert spans.to_mask(L, L, **made).shape == (B, 1, L, L)
    starts = torch.zeros(2, dtype=torch.int32)
    made = spans.documents(cu_seqlens=starts, L=L), spans.shared_prefix(starts, L), spans.sink_window(1, 1, L)
    for one in made:
        assert spans.to_mask(L, L, **one).shape == (1, 1, L, L)


def int32(*sizes) -> Tensor:
    return torch.zeros(sizes, dtype=torch.int32)


WRONG = [
    (lambda: spans.documents(), "ids, cu_seqlens: expected one of the two, got none"),
    (lambda: spans.documents(int32(1, 4), cu_seqlens=int32(2), L=4), "ids, cu_seqlens: expected one of the two, got both"),
    (lambda: spans.documents(int32(4)), r"ids: expected integers \[B, L\], got torch.int32 \[4\]"),
    (lambda: spans.documents(torch.zeros(1, 4)), "ids: expected integers"),
    (lambda: spans.documents(int32(1, 4), L=4), "L: expected None with ids"),
    (lambda: spans.documents(cu_seqlens=int32(2)), "L: expected an int >= 0 with cu_seqlens, got None"),
    (lambda: spans.documents(cu_seqlens=int32(2), L=-1), "L: expected an int from 0 to .*, got -1"),
    (lambda: spans.documents(cu_seqlens=int32(2).long(), L=4), "cu_seqlens: expected an int32 tensor of starts"),
    (lambda: spans.documents(cu_seqlens=int32(0), L=4), "cu_seqlens: expected an int32 tensor of starts, at least 1"),
    (lambda: spans.prefix(int32(2, 1), 4), r"lengths: expected integers \[B\]"),
    (lambda: spans.prefix(torch.zeros(2), 4), "lengths: expected integers"),
    (lambda: spans.prefix(int32(2), -4), "L: expected an int from 0"),
    (lambda: spans.tree(int32(3)), r"parents: expected integers \[B, L\]"),
    (lambda: spans.tree(torch.zeros(1, 3, dtype=torch.bool)), "parents: expected integers"),
    (lambda: spans.shared_prefix(int32(1), 3), "cu_seqlens: expected an int32 tensor of starts, at least 2"),
    (lambda: spans.shared_prefix(int32(2), -3), "L: expected an int from 0"),
    (lambda: spans.padding(int32(), 3), "lengths: expected integers"),
    (lambda: spans.padding(int32(2), 2**31), "L: expected an int from 0"),
    (lambda: spans.sink_window(-1, 2, 5), "sinks: expected an int from 0"),
    (lambda: spans.sink_window(1, -2, 5), "left: expected an int from 0"),
    (lambda: spans.sink_window(1, 2, -5), "L: expected an int from 0"),
    (lambda: spans.from_flashmask(int32(1, 1, 4, 4), True), r"startend_row_indices: expected int32 \[B, H, S, 1 or 2\]"),
    (lambda: spans.from_flashmask(int32(1, 1, 4, 1), False), r"startend_row_indices: expected int32 \[B, H, S, 2 or 4\]"),
    (lambda: spans.from_flashmask(int32(1, 4, 1), True), "startend_row_indices: expected int32"),
    (lambda: spans.from_flashmask(int32(1, 1, 4, 1).long(), True), "startend_row_indices: expected int32"),
    (lambda: spans.from_flashmask(int32(1, 1, 4, 1), True, L=-1), "L: expected an int from 0"),
    (lambda: spans.to_mask(-1, 4), "L: expected an int from 0"),
    (lambda: spans.to_mask(4, 4, query_spans=int32(4, 2).long()), "query_spans: expected dtype int32"),
    (lambda: spans.to_mask(4, 4, key_spans=int32(2)), "key_spans: expected .* at least 2 dimensions"),
    (lambda: spans.to_mask(4, 4, key_spans=int32(4, 3)), "key_spans: expected 2 or 4 bounds .*, got 3"),
    (lambda: spans.to_mask(4, 5, key_spans=int32(4, 2)), "key_spans: expected the length 5 .*, got 4"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_errors(call, message):
    with pytest.raises(InvalidArgument, match="^" + message):
        call()


def test_errors_of_types():
    for call, name in [
        (lambda: spans.documents([[0, 1]]), "ids"),
        (lambda: spans.tree([[0]]), "parents"),
        (lambda: spans.prefix(3, 4), "lengths"),
        (lambda: spans.padding(torch.zeros(1, dtype=torch.int32), 4.0), "L"),
        (lambda: spans.from_flashmask(int32(1, 1, 4, 1), 1), "causal"),
        (lambda: spans.to_mask(4, 4, query_spans=[0, 1]), "query_spans"),
        (lambda: check_spans("key_spans", None, (2, 3), 4), "key_spans"),
    ]:
        with pytest.raises(TypeError, match=f"^{name}: expected"):
            call()


class TestCheckSpans:
    @pytest.mark.parametrize("shape", [(7, 2), (7, 4), (1, 7, 2), (3, 7, 2), (2, 1, 7, 2), (2, 3, 7, 4), (1, 3, 7, 4)])
    def test_accepted(self, shape):
        check_spans("query_spans", int32(*shape), (2, 3), 7)

    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            ((7,), "at least 2 dimensions"),
            ((7, 3), "2 or 4 bounds"),
            ((6, 2), "the length 7"),
            ((2, 7, 2), "1 or query's 3 heads"),
            ((5, 1, 7, 2), r"leading dimensions that broadcast to \[2, 3\]"),
            ((1, 2, 3, 7, 2), r"leading dimensions that broadcast to \[2, 3\]"),
        ],
    )
    def test_refused(self, shape, message):
        with pytest.raises(InvalidArgument, match=f"^query_spans: expected .*{message}"):
            check_spans("query_spans", int32(*shape), (2, 3), 7)

    def test_another_dtype_is_refused(self):
        with pytest.raises(InvalidArgument, match=r"^key_spans: expected dtype int32, got torch\.int64"):
            check_spans("key_spans", int32(7, 2).long(), (2, 3), 7)


def random_spans(*sizes: int, length: int) -> Tensor:
    """Spans with bounds beyond [0, length] and empty intervals among them."""
    return torch.randint(-3, length + 4, sizes, dtype=torch.int32)


class TestToMask:
    @pytest.mark.parametrize("columns", [2, 4])
    def test_both_combine(self, columns):
        L, S = 6, 9
        query_spans, key_spans = random_spans(2, 1, L, columns, length=S), random_spans(3, S, columns, length=L)
        q, k = query_spans.tolist(), key_spans.tolist()

        def inside(bounds, n):
            return any(b <= n < e for b, e in zip(bounds[::2], bounds[1::2], strict=True))

        expected = mask_of((2, 3, L, S), lambda b, h, i, j: j <= i and inside(q[b][0][i], j) and inside(k[h][j], i))
        found = spans.to_mask(L, S, query_spans=query_spans, key_spans=key_spans, causal=True)
        torch.testing.assert_close(found, expected)

    def test_without_spans(self):
        assert torch.equal(spans.to_mask(2, 3), torch.ones(2, 3, dtype=torch.bool))
        assert torch.equal(spans.to_mask(2, 3, causal=True), torch.ones(2, 3, dtype=torch.bool).tril())


class TestReference:
    """reference.attention with spans against the same with the mask that they stand for."""

    @staticmethod
    def inputs(L: int, S: int) -> tuple[Tensor, Tensor, Tensor]:
        query = torch.randn(2, 4, L, 8, dtype=torch.float64)
        return query, torch.randn(2, 2, S, 8, dtype=torch.float64), torch.randn(2, 2, S, 5, dtype=torch.float64)

    @pytest.mark.parametrize("columns", [2, 4])
    @pytest.mark.parametrize("leading", [(), (4,), (2, 1), (2, 4)])
    @pytest.mark.parametrize("names", [("query_spans",), ("key_spans",), ("query_spans", "key_spans")])
    def test_equals_a_mask(self, names, leading, columns):
        L, S = 7, 11
        lengths = {"query_spans": (L, S), "key_spans": (S, L)}
        made = {n: random_spans(*leading, lengths[n][0], columns, length=lengths[n][1]) for n in names}
        mask = torch.rand(2, 1, L, S) < 0.8
        options = {"causal": True, "window": (5, None), "alignment": "lower_right", "softcap": 3.0, "return_lse": True}
        inputs = self.inputs(L, S)
        found = reference.attention(*inputs, mask=mask, **made, **options)
        expected = reference.attention(*inputs, mask=mask & spans.to_mask(L, S, **made), **options)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)

    def test_empty_rows(self):
        query_spans = torch.tensor([[0, 3], [2, 2], [3, 1], [5, 9]], dtype=torch.int32)
        out, lse = reference.attention(*self.inputs(4, 5), query_spans=query_spans, return_lse=True)
        assert (out[:, :, 1:] == 0).all() and (lse[:, :, 1:] == -torch.inf).all()
        assert lse[:, :, 0].isfinite().all()

    def test_without_heads(self):
        query, key, value = (t[0, 0] for t in self.inputs(4, 5))
        key_spans = random_spans(5, 4, length=4)
        found = reference.attention(query, key, value, key_spans=key_spans)
        expected = reference.attention(query, key, value, mask=spans.to_mask(4, 5, key_spans=key_spans))
        assert found.shape == (4, 5) and torch.equal(found, expected)

    def test_gradients(self):
        inputs = [t.requires_grad_() for t in self.inputs(6, 6)]
        made = spans.documents(torch.randint(0, 2, (2, 6)))
        found = torch.autograd.grad(reference.attention(*inputs, **made).sum(), inputs)
        expected = torch.autograd.grad(reference.attention(*inputs, mask=spans.to_mask(6, 6, **made)).sum(), inputs)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)

    @pytest.mark.parametrize("heads", [None, 1, 4])
    @pytest.mark.parametrize("cached", [False, True])
    def test_packed(self, heads, cached):
        """Positions are those inside the sequence, also where a window hides its first keys, which are then not read."""
        query_starts, key_starts = [0, 3, 3, 9], [0, 4, 6, 16]
        query = torch.randn(10, 4, 8, dtype=torch.float64)  # one row of padding
        key, value = (torch.randn(16, 2, 8, dtype=torch.float64) for _ in range(2))
        leading = [] if heads is None else [heads]
        query_spans, key_spans = (random_spans(*leading, n, 4, length=8) for n in (10, 16))
        starts = [torch.tensor(one, dtype=torch.int32) for one in (query_starts, key_starts)]
        options = {"window": (2, 4), "return_lse": True}
        used = {"seqused_k": torch.tensor([4, 2, 10], dtype=torch.int32)} if cached else {}
        out, lse = reference.varlen_attention(
            *(query, key, value, *starts, 6, 10), query_spans=query_spans, key_spans=key_spans, **used, **options
        )
        for n in range(3):
            rows, keys = (slice(one[n], one[n + 1]) for one in (query_starts, key_starts))
            dense = (tensor[part].transpose(0, 1) for tensor, part in ((query, rows), (key, keys), (value, keys)))
            made = {"query_spans": query_spans[..., rows, :], "key_spans": key_spans[..., keys, :]}
            own, own_lse = reference.attention(*dense, alignment="lower_right", **made, **options)
            torch.testing.assert_close(out[rows], own.transpose(0, 1))
            torch.testing.assert_close(lse[:, rows], own_lse)
        assert (out[9:] == 0).all() and (lse[:, 9:] == -torch.inf).all()
