"""flash_online.varlen_attention against the float64 reference and against dense calls, forward and backward."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from cases import DTYPES, HEAD_DIMS, HEADS, OPTIONS
from oracle import CaptureRng, Packed, rng_state

import flash_online
from flash_online import reference
from flash_online.testing import LAYOUTS, lay_out, peak_extra_bytes

INF = math.inf
RAW = torch.ops.flash_online
MASKLESS = {name: options for name, options in OPTIONS.items() if "mask" not in options}

# Lengths (queries, keys) of sequences: one; equal ones; empty on either side and on both, also first and last; on and next to
# the edges of tiles and spans; one long among short ones; none at all.
LENGTHS = {
    "one": ((37, 41),),
    "equal": ((20, 20),) * 5,
    "empty ones": ((0, 0), (5, 0), (0, 7), (9, 11), (0, 0), (3, 4), (6, 0)),
    "edges": ((64, 64), (63, 65), (1, 1), (65, 63), (128, 127), (1, 129), (129, 1)),
    "mixed": ((3, 5), (1, 1), (300, 290), (7, 2), (70, 90)),
    "only empty ones": ((0, 0), (0, 0)),
    "none": (),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", MASKLESS.values(), ids=MASKLESS.keys())
def test_options(options, dtype, device):
    Packed.of(options, dtype=dtype, heads=(4, 2, 2)).check(device)
    Packed.of(options, dtype=dtype, heads=(2, 2, 2), lengths=((37, 19), (0, 4), (70, 90)), head_dims=(16, 12)).check(device)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(lengths, dtype, causal, device):
    for spare in ((0, 0), (70, 3)):
        Packed(dtype=dtype, heads=(2, 1, 1), lengths=lengths, spare=spare, options={"causal": causal}, sinks=True).check(device)


# One of each kind of thing that a kernel does to a score or a weight.
FEATURES = {
    "causal": {"causal": True},
    "window": {"window": (9, 5)},
    "upper left": {"alignment": "upper_left"},
    "softcap": {"softcap": 2.0},
    "slopes": {"alibi": 1},
    "slopes per sequence": {"alibi": 2},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.3},
    "scale": {"scale": 0.7},
}
PAIRS = [pair for pair in itertools.combinations(FEATURES, 2) if pair != ("slopes", "slopes per sequence")]


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_options_in_pairs(pair, device):
    """Every two options together, each pair in one dtype and with one grouping of heads."""
    options, number = FEATURES[pair[0]] | FEATURES[pair[1]], PAIRS.index(pair)
    lengths = ((33, 40), (0, 5), (80, 70), (6, 3))
    heads = [(4, 2, 2), (3, 3, 3), (6, 2, 3)][number % 3]
    Packed.of(options, dtype=DTYPES[number % len(DTYPES)], heads=heads, lengths=lengths, seed=number).check(device)


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_widths(head_dims, dtype, device):
    Packed(dtype=dtype, heads=(2, 2, 2), lengths=((19, 35), (4, 4)), head_dims=head_dims).check(device)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_heads(heads, device):
    Packed(heads=heads, head_dims=(8, 6), options={"causal": True}, sinks=True).check(device)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(layout, dtype, device):
    """Strides of every kind, with NaN in the memory between and around the elements."""
    for which in range(3):
        layouts = tuple(layout if i == which else "contiguous" for i in range(3))
        Packed(dtype=dtype, heads=(4, 2, 2), layouts=layouts).check(device)
    Packed(dtype=dtype, lengths=((65, 70), (3, 3)), layouts=(layout,) * 3, options={"causal": True}).check(device)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "s", "kv", ""], ids=lambda w: w or "nothing")
@pytest.mark.parametrize("grad_lse", [False, True])
def test_subsets_of_gradients(wanted, grad_lse, device):
    Packed(sinks=True, wanted=wanted, grad_lse=grad_lse).check(device)


# --- Against dense calls ------------------------------------------------------------------------------------------------------


def forward_and_backward(call, tensors, cotangents):
    """(out, lse) and the gradients of those of `tensors` that are floating."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    results = call(*leaves)
    return [*results, *torch.autograd.grad(results, leaves, cotangents, allow_unused=True)]


@pytest.mark.parametrize("other", ["dense", "packed"])
@pytest.mark.parametrize("lengths", ["edges", "mixed", "empty ones"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "sinks": True},
        {"window": (40, 9), "alignment": "upper_left", "alibi": 2, "softcap": 3.0},
    ],
    ids=str,
)
def test_same_bits_as_a_call_on_each_sequence(lengths, dtype, options, other, device):
    """A sequence's results and gradients do not depend on what it is packed with: compared with a call on the sequence
    alone, packed too or dense. On CUDA other kernels sum the gradients of a dense call."""
    problem = Packed.of(options, dtype=dtype, heads=(4, 2, 1), lengths=LENGTHS[lengths], head_dims=(24, 17), size=2.0)
    inputs = problem.inputs(device)
    tensors, slopes, sinks = [inputs[n] for n in ("query", "key", "value")], inputs.get("alibi_slopes"), inputs.get("sinks")
    tensors += [] if sinks is None else [sinks]
    options = {"alignment": "lower_right"} | problem.options | {"return_lse": True, "deterministic": True}
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    cotangents = [
        torch.randn(problem.out_shape(), device=device).to(dtype),
        torch.randn(problem.lse_shape(), dtype=accumulator, device=device),
    ]

    def packed(query, key, value, sinks=None):
        starts = problem.arguments(device)
        return flash_online.varlen_attention(query, key, value, *starts, alibi_slopes=slopes, sinks=sinks, **options)

    together = forward_and_backward(packed, tensors, cotangents)
    query_starts, key_starts = (t.tolist() for t in problem.starts(device))
    sink_grads = []
    for n in range(len(problem.lengths)):
        rows, keys = slice(*query_starts[n : n + 2]), slice(*key_starts[n : n + 2])

        def dense(query, key, value, sinks=None, n=n):
            own = None if slopes is None else slopes[n]
            return flash_online.attention(query, key, value, alibi_slopes=own, sinks=sinks, **options)

        def packed_alone(query, key, value, sinks=None, n=n):
            tensors, longest = [t.transpose(0, 1) for t in (query, key, value)], problem.arguments(device)[2:]
            starts = [torch.tensor([0, len(t)], dtype=torch.int32, device=device) for t in tensors[:2]]
            own = None if slopes is None or slopes.dim() == 1 else slopes[n : n + 1]
            out, lse = flash_online.varlen_attention(*tensors, *starts, *longest, alibi_slopes=own, sinks=sinks, **options)
            return out.transpose(0, 1), lse

        of = (rows, keys, keys)
        apart = [t[part].transpose(0, 1) for t, part in zip(tensors, of, strict=False)] + tensors[3:]
        call = dense if other == "dense" else packed_alone
        alone = forward_and_backward(call, apart, [cotangents[0][rows].transpose(0, 1), cotangents[1][:, rows]])
        found = [together[0][rows].transpose(0, 1), together[1][:, rows]]
        found += [grad[part].transpose(0, 1) for grad, part in zip(together[2:5], of, strict=True)]
        compared = ("out", "lse") if other == "dense" and device == "cuda" else ("out", "lse", "query", "key", "value")
        for name, a, b in zip(compared, found, alone, strict=False):
            assert torch.equal(a, b), f"{name} of sequence {n}"
        sink_grads += alone[5:]
    if sinks is not None:
        exact = {"rtol": 0, "atol": 0} if device == "cpu" else {}  # sequences are summed in any order of theirs on CUDA
        torch.testing.assert_close(together[5], torch.stack(sink_grads).sum(0), **exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_drops_what_a_dense_batch_drops(dtype, device):
    """Batch, query and key of dropout's counter are the sequence and the positions inside it."""
    problem = Packed(dtype=dtype, heads=(2, 2, 2), lengths=((40, 70), (0, 3), (66, 33)), options={"dropout_p": 0.4})
    query, key, value = problem.inputs(device).values()
    with CaptureRng() as capture:
        out = flash_online.varlen_attention(query, key, value, *problem.arguments(device), **problem.options)
    query_starts, key_starts = (t.tolist() for t in problem.starts(device))
    for n in range(3):
        rows, keys = slice(*query_starts[n : n + 2]), slice(*key_starts[n : n + 2])
        batch = [t[of].transpose(0, 1).expand(n + 1, -1, -1, -1) for t, of in ((query, rows), (key, keys), (value, keys))]
        options = (None, None, None, capture.rng, -1, -1, True, 1 / math.sqrt(8), 0.0, 0.4)
        expected = RAW.attention_forward(*batch, *options)[0][n]
        exact = {"rtol": 0, "atol": 0} if device == "cpu" else {}
        torch.testing.assert_close(out[rows].transpose(0, 1), expected, **exact)


def test_dropout_mask_of_later_batches(device):
    rng = torch.tensor([3, 4], device=device)
    whole = RAW.attention_dropout_mask(rng, 0, 5, 2, 0, 6, 7, 0.5)
    assert torch.equal(RAW.attention_dropout_mask(rng, 2, 3, 2, 1, 4, 7, 0.5), whole[2:, :, 1:5])
    assert torch.equal(whole, reference.dropout_keep(rng, 0.5, (5, 2, 6, 7)))


# --- Rows of no sequence, and lengths that are not what they should be -------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_past_the_end(dtype, device):
    """Results of padding rows are 0, lse -inf, gradients 0. Their contents and their incoming gradients, here NaN, affect no
    other result."""
    problem = Packed(dtype=dtype, heads=(4, 2, 2), spare=(130, 70), sinks=True)
    inputs = problem.inputs(device)
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    cotangents = [
        torch.randn(problem.out_shape(), device=device).to(dtype),
        torch.randn(problem.lse_shape(), dtype=accumulator, device=device),
    ]
    last_query, last_key = (int(t[-1]) for t in problem.starts(device))
    for t in (cotangents[0], cotangents[1].t()):
        t[last_query:] = math.nan

    def call(query, key, value, sinks):
        return flash_online.varlen_attention(query, key, value, *problem.arguments(device), sinks=sinks, return_lse=True)

    out, lse, *grads = forward_and_backward(call, inputs.values(), cotangents)
    assert (out[last_query:] == 0).all() and (lse[:, last_query:] == -INF).all()
    for grad, last in zip(grads, (last_query, last_key, last_key), strict=False):
        assert (grad[last:] == 0).all() and not grad.isnan().any()
    assert out[:last_query].isfinite().all() and grads[3].isfinite().all()


def test_nan_in_one_sequence_does_not_reach_its_neighbours(device):
    problem = Packed(lengths=((20, 30), (40, 33), (10, 10)), spare=(0, 0), options={"causal": True})
    tensors = list(problem.inputs(device).values())
    cotangents = [torch.randn(problem.out_shape(), device=device), torch.randn(problem.lse_shape(), device=device)]

    def call(*tensors):
        options = {"causal": True, "deterministic": True, "return_lse": True}
        return flash_online.varlen_attention(*tensors, *problem.arguments(device), **options)

    clean = forward_and_backward(call, tensors, cotangents)
    spoilt = [t.clone() for t in tensors]
    for t, (first, last) in zip(spoilt, ((20, 60), (30, 63), (30, 63)), strict=True):
        t[first:last] = math.nan
    for i, (a, b) in enumerate(zip(clean, forward_and_backward(call, spoilt, cotangents), strict=True)):
        first, last = (30, 63) if i >= 3 else (20, 60)
        a, b = (a.t(), b.t()) if i == 1 else (a, b)
        assert torch.equal(a[:first], b[:first]) and torch.equal(a[last:], b[last:])
        assert b[first:last].isnan().any()


def test_rows_before_the_first_sequence(device):
    """A first start above 0: the rows before it are padding rows, as are those past the end."""
    query, key, value = (torch.randn(n, 2, 8, requires_grad=True, device=device) for n in (9, 12, 12))
    starts = (
        torch.tensor([2, 5, 9], dtype=torch.int32, device=device),
        torch.tensor([3, 4, 12], dtype=torch.int32, device=device),
    )
    results = []
    for module in (flash_online, reference):
        out, lse = module.varlen_attention(query, key, value, *starts, 4, 8, return_lse=True)
        grads = torch.autograd.grad(out.square().sum() + lse[:, 2:].sum(), (query, key, value))
        results.append((out, lse, *grads))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)
    assert (results[0][0][:2] == 0).all() and (results[0][2][:2] == 0).all() and (results[0][3][:3] == 0).all()


def test_sequences_longer_than_the_longest_are_cut(device):
    problem = Packed(lengths=((13, 17), (70, 90), (4, 5)))
    tensors = [t.requires_grad_() for t in problem.inputs(device).values()]
    results = []
    for module in (flash_online, reference):
        out, lse = module.varlen_attention(*tensors, *problem.starts(device), 9, 11, return_lse=True)
        grads = torch.autograd.grad(out.square().sum() + lse.nan_to_num(neginf=0).sum(), tensors)
        results.append((out, lse, *grads))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)
    assert (results[0][0][9:13] == 0).all() and (results[0][3][11:17] == 0).all()


@pytest.mark.parametrize(
    "starts", [[-5, 3, 7], [0, 100, 120], [0, 2**31 - 1, -(2**31)], [7, 5, 0], [0, 12, 4, 12, 4, 12]], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_starts_that_are_not_starts(starts, dtype, device):
    """No error and no access out of bounds: the memory around the tensors is NaN, which reaches no result."""
    query, key, value = (lay_out(torch.randn(12, 2, 8, device=device).to(dtype), "sliced").requires_grad_() for _ in range(3))
    starts = torch.tensor(starts, dtype=torch.int32, device=device)
    out, lse = flash_online.varlen_attention(query, key, value, starts, starts, 12, 12, return_lse=True)
    grads = torch.autograd.grad(out.sum(), (query, key, value))
    assert all(t.isfinite().all() for t in (out, *grads)) and not lse.isnan().any()


def test_no_rows_and_no_heads(device):
    starts = torch.zeros(4, dtype=torch.int32, device=device)
    for queries, keys, heads in ((0, 0, 2), (5, 0, 2), (0, 5, 2), (5, 5, 0)):
        tensors = [torch.randn(n, heads, 8, requires_grad=True, device=device) for n in (queries, keys, keys)]
        out, lse = flash_online.varlen_attention(*tensors, starts, starts, 0, 0, return_lse=True)
        assert out.shape == (queries, heads, 8) and (out == 0).all() and (lse == -INF).all()
        assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), tensors))


# --- Layout of results, determinism, memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1)], ids=str)
def test_out_and_gradients_keep_the_order_of_strides(order, device):
    def make(*shape):
        inverse = sorted(range(3), key=order.__getitem__)
        return torch.randn([shape[i] for i in order], device=device).permute(inverse).requires_grad_()

    tensors = make(9, 4, 8), make(11, 2, 8), make(11, 2, 6)
    starts = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    out, lse = flash_online.varlen_attention(*tensors, starts, starts, 5, 5, return_lse=True)
    assert out.permute(order).is_contiguous() and lse.is_contiguous()
    for grad in torch.autograd.grad(out.sum(), tensors):
        assert grad.permute(order).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_for_any_number_of_threads(dtype):
    problem = Packed(dtype=dtype, heads=(4, 2, 2), lengths=((300, 600), (3, 5), (0, 2), (150, 140)), spare=(9, 70), sinks=True)
    inputs = problem.inputs()
    accumulator = torch.float32
    cotangents = [torch.randn(problem.out_shape()).to(dtype), torch.randn(problem.lse_shape(), dtype=accumulator)]

    def call(query, key, value, sinks):
        options = {"causal": True, "sinks": sinks, "deterministic": True, "return_lse": True}
        return flash_online.varlen_attention(query, key, value, *problem.arguments(), **options)

    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        results.append(forward_and_backward(call, inputs.values(), cotangents))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_extra_memory_is_linear_and_explained():
    """In addition to the results: lse, and the tiles of each thread; the bound that explain gives holds and is close."""
    pytest.importorskip("flash_online._introspect")
    for dtype in (torch.float32, torch.bfloat16):
        for lengths in (((2000, 2000),), ((65, 65),) * 30, ((1, 2000), (2000, 1))):
            problem = Packed(dtype=dtype, heads=(2, 2, 2), lengths=lengths, spare=(0, 0), head_dims=(64, 64))
            arguments = (*problem.inputs().values(), *problem.arguments())
            explained = flash_online.explain(flash_online.varlen_attention, *arguments).extra
            out = arguments[0].numel() * dtype.itemsize
            measured = peak_extra_bytes(lambda arguments=arguments: flash_online.varlen_attention(*arguments)) - out
            said, block = sum(explained.values()), 64 * 2 * 2 * 64 * 4  # keys and values of two heads, copied as floats at most
            assert measured <= said + 4096 and said <= measured + block * (len(lengths) + 2) + 4096


def test_backward_memory_is_linear():
    """Some numbers per row, also in the backward pass: a square of 4096 x 4096 would be 64 MiB per head."""
    problem = Packed(heads=(2, 2, 2), lengths=((4096, 4096), (3, 4096), (0, 0)), head_dims=(16, 16), spare=(0, 0))
    tensors = [t.requires_grad_() for t in problem.inputs().values()]

    def step():
        return torch.autograd.grad(flash_online.varlen_attention(*tensors, *problem.arguments(), causal=True).sum(), tensors)

    assert peak_extra_bytes(step) < 16 << 20


def test_autocast_casts_query_key_and_value(device):
    problem = Packed()
    tensors = [t.requires_grad_() for t in problem.inputs(device).values()]
    with torch.autocast(device, torch.bfloat16):
        out, lse = flash_online.varlen_attention(*tensors, *problem.arguments(device), return_lse=True)
    lower = flash_online.varlen_attention(*(t.bfloat16() for t in tensors), *problem.arguments(device))
    assert torch.equal(out, lower) and lse.dtype == torch.float32
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.sum(), tensors))


def test_starts_of_any_strides(device):
    problem = Packed(spare=(0, 0))
    tensors, (starts, key_starts, *longest) = problem.inputs(device).values(), problem.arguments(device)
    expected = flash_online.varlen_attention(*tensors, starts, key_starts, *longest)
    given = [lay_out(t, "strided") for t in (starts, key_starts)]
    assert torch.equal(flash_online.varlen_attention(*tensors, *given, *longest), expected)


def test_deterministic_and_the_generator(device):
    problem = Packed()
    tensors = list(problem.inputs(device).values())
    before = rng_state(device)
    flash_online.varlen_attention(*tensors, *problem.arguments(device))
    assert torch.equal(before, rng_state(device)), "a call without dropout must not draw"
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        results.append(flash_online.varlen_attention(*tensors, *problem.arguments(device), dropout_p=0.5))
    assert torch.equal(*results)
    assert not torch.equal(results[0], flash_online.varlen_attention(*tensors, *problem.arguments(device), dropout_p=0.5))
