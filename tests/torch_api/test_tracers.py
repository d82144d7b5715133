"""What torch's tracers make of our functions: sizes stay symbolic, who watches torch's functions sees the calls, modules
can be traced, scripted and compiled under override(). test_matrix.py differentiates what the tracers make."""

from __future__ import annotations

import io
import subprocess
import sys
import traceback

import pytest
import torch
from oracle import Operators
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import flash_online
import flash_online.functional as F
from flash_online import spans

TF = torch.nn.functional
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:The .grad attribute")

# --- lengths that a caller takes from shapes --------------------------------------------------------------------------------


def two_sequences(rows):
    """Starts of two packed sequences of rows."""
    return torch.tensor([0, 1, rows], dtype=torch.int32)


def packed_like(x, starts, longest):
    rows = x[0].transpose(0, 1)
    return flash_online.varlen_attention(rows, rows, rows, starts, starts, longest, longest)


def float8_attention(x):
    x = x.half()
    return flash_online.float8_attention(x[:, :, 1:], x, x, causal=True, alignment="lower_right").float()


def weight_sums(x, last):
    lse = flash_online.attention(x[:, :, 1:], x, x, causal=True, alignment="lower_right", return_lse=True)[1]
    return flash_online.attention_weight_sums(x[:, :, 1:], x, lse, causal=True, alignment="lower_right", last=last)


# Calls on x [1, 2, L, 8] and starts [3] of two sequences of L rows in all.
FROM_SHAPES = {
    "spans.padding": lambda x, starts: flash_online.attention(x, x, x, **spans.padding(starts[1:2], x.shape[2])),
    "spans.prefix": lambda x, starts: flash_online.attention(x, x, x, causal=True, **spans.prefix(starts[1:2], x.shape[2])),
    "spans.documents": lambda x, starts: flash_online.attention(x, x, x, **spans.documents(cu_seqlens=starts, L=x.shape[2])),
    "spans.shared_prefix": lambda x, starts: flash_online.attention(x, x, x, **spans.shared_prefix(starts, x.shape[2])),
    "spans.sink_window": lambda x, starts: flash_online.attention(x, x, x, **spans.sink_window(1, 2, x.shape[2])),
    "spans.tree": lambda x, starts: flash_online.attention(
        x, x, x, **spans.tree(torch.arange(-1, x.shape[2] - 1, device=x.device)[None])
    ),
    "spans.to_mask": lambda x, starts: spans.to_mask(x.shape[2], x.shape[2] + 1, causal=True).float(),
    "packed": lambda x, starts: packed_like(x, starts, x.shape[2]),
    "float8": lambda x, starts: float8_attention(x),
    "weight sums": lambda x, starts: weight_sums(x, None),
    "weight sums of the last": lambda x, starts: weight_sums(x, 3),
    "cached keys": lambda x, starts: flash_online.kvcache_attention(x, x, x, None),
    "packed queries over cached keys": lambda x, starts: flash_online.kvcache_attention(
        x[0].transpose(0, 1), x.expand(2, -1, -1, -1), x.expand(2, -1, -1, -1), None, cu_seqlens_q=starts
    ),
}


@pytest.mark.parametrize("tracer", ["jit.trace", "make_fx symbolic", "export", "export strict"])
@pytest.mark.parametrize("name", FROM_SHAPES)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.script_method")
def test_a_length_from_a_shape_is_not_the_examples(name, tracer):
    class Module(torch.nn.Module):
        def forward(self, x, starts):
            return FROM_SHAPES[name](x, starts)

    def given(length):
        return torch.randn(1, 2, length, 8), two_sequences(length)

    with torch.no_grad():
        if tracer == "jit.trace":
            made = torch.jit.trace(Module(), given(9), check_trace=False)
        elif tracer == "make_fx symbolic":
            made = make_fx(Module(), tracing_mode="symbolic")(*given(9))
        else:
            dims = ({2: Dim("length", min=4, max=64)}, None)
            made = torch.export.export(Module(), given(9), dynamic_shapes=dims, strict=tracer.endswith("strict")).module()
        for length in (9, 20, 5):
            inputs = given(length)
            torch.testing.assert_close(made(*inputs), Module()(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_second_derivatives_of_a_compiled_linear_loss(reduction, backend):
    """A mean's gradients come from the forward pass, but their derivatives do not: with create_graph after a graph of backend
    eager, and where all of it is one graph."""
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    table, targets = torch.randn(5, 4, dtype=torch.float64), torch.arange(6) % 5

    def loss(x):
        return F.linear_cross_entropy(x * x, table, targets, reduction=reduction).sum()

    def twice(loss, x):
        (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0].detach()

    expected = twice(loss, x)
    torch._dynamo.reset()
    if backend == "eager":
        torch.testing.assert_close(twice(torch.compile(loss, backend=backend, fullgraph=True), x), expected)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        whole = torch.compile(lambda x: twice(loss, x), backend=backend, fullgraph=True)
        torch.testing.assert_close(whole(x), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_forward_mode_of_transposed_queries_of_any_length(backend):
    """A tangent has the strides of its result: torch makes another one from the storage offset, which is symbolic here."""

    def attend(x):
        return F.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3)

    def attend_with_options(x):
        x = x.transpose(1, 2)
        return flash_online.attention(x, x, x, window=(3, 1), return_lse=True)

    for function in (attend, attend_with_options):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, f=function: torch.func.jvp(f, (x,), (torch.ones_like(x),)), backend=backend)
        for length in (5, 6, 9):
            x = torch.randn(2, length, 3, 4)
            torch.testing.assert_close(compiled(x), torch.func.jvp(function, (x,), (torch.ones_like(x),)))


def test_a_trace_refuses_a_size_that_it_would_keep():
    x, bad = torch.randn(1, 2, 8, 8), {}
    bad["window"] = lambda x: flash_online.attention(x, x, x, window=(x.shape[2] // 4, 0))
    bad["last"] = lambda x: weight_sums(x, x.shape[2] // 2)
    for name, call in bad.items():
        with pytest.raises((TypeError, flash_online.InvalidArgument), match=f"^{name}: expected .* got "):
            torch.jit.trace(call, (x,), check_trace=False)


# --- symbolic sizes ---------------------------------------------------------------------------------------------------------

SIZES = {"B": 3, "H": 4, "L": 5, "S": 6, "E": 8, "V": 7, "N": 9, "C": 11, "P": 2, "D": 10}
OTHERS = [
    {"B": 2, "H": 3, "L": 7, "S": 9, "E": 5, "V": 6, "N": 13, "C": 4, "P": 3, "D": 4},
    {"B": 5, "H": 2, "L": 11, "S": 4, "E": 16, "V": 3, "N": 4, "C": 17, "P": 5, "D": 6},
]


def target_of(*names):
    return lambda s: torch.arange(torch.Size([s[n] for n in names]).numel()).view([s[n] for n in names]) % s["C"]


def starts(s):
    return torch.tensor([0, s["L"], s["N"] + s["L"]], dtype=torch.int32)


# name: (the function of a module, its inputs: the sizes of a floating one by letters (digits are sizes), or a function of the
# sizes that makes an integer one).
DYNAMIC = {
    "sdpa": (lambda m, q, k, v: m.scaled_dot_product_attention(q, k, v, is_causal=True), ["BHLE", "BHSE", "BHSV"]),
    "sdpa gqa": (
        lambda m, q, k, v: m.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [("B", 4, "L", "E"), ("B", 2, "S", "E"), ("B", 2, "S", "V")],
    ),
    "sdpa mask": (
        lambda m, q, k, v, a: m.scaled_dot_product_attention(q, k, v, a),
        ["BHLE", "BHSE", "BHSV", ("B", 1, "L", "S")],
    ),
    "sdpa broadcast": (lambda m, q, k, v: m.scaled_dot_product_attention(q, k, v), ["BHLE", "HSE", (1, "H", "S", "V")]),
    "sdpa matrices": (lambda m, q, k, v: m.scaled_dot_product_attention(q, k, v), ["LE", "SE", "SV"]),
    "softmax": (lambda m, x: m.softmax(x, 1), ["NCP"]),
    "log_softmax": (lambda m, x: m.log_softmax(x, -1), ["NC"]),
    "cross_entropy": (lambda m, x, t: m.cross_entropy(x, t), ["NC", target_of("N")]),
    "cross_entropy weights": (lambda m, x, t, w: m.cross_entropy(x, t, w.detach()), ["NC", target_of("N"), "C"]),
    "cross_entropy positions": (
        lambda m, x, t: m.cross_entropy(x, t, label_smoothing=0.1, reduction="none"),
        ["NCP", target_of("N", "P")],
    ),
    "cross_entropy probabilities": (lambda m, x, t: m.cross_entropy(x, t.softmax(1)), ["NC", "NC"]),
    "linear_cross_entropy": (
        lambda m, x, w, t, b: m.linear_cross_entropy(x, w, t, linear_bias=b, reduction="sum"),
        ["ND", "CD", target_of("N"), "C"],
    ),
}
if not hasattr(TF, "linear_cross_entropy"):  # before torch 2.13
    del DYNAMIC["linear_cross_entropy"]
# Of functions that torch has not: our own, uncompiled, is what the results are compared with.
DYNAMIC_OURS = {
    "attention": (
        lambda m, q, k, v, s: m.attention(q, k, v, causal=True, window=(3, 1), alignment="lower_right", softcap=3.0, sinks=s),
        ["BHLE", "BHSE", "BHSV", "H"],
    ),
    "attention lse": (
        lambda m, q, k, v, a: m.attention(q, k, v, mask=a, return_lse=True),
        ["BHLE", "BHSE", "BHSV", "LS"],
    ),
    "varlen": (
        lambda m, q, k, v, a: m.varlen_attention(q, k, v, a, a, q.shape[0], k.shape[0], causal=True, return_lse=True),
        [("N+L", 2, "E"), ("N+L", 2, "E"), ("N+L", 2, "V"), starts],
    ),
    "merge": (lambda m, a, b, c, d: m.merge_attention([a, b], [c, d]), ["BHLE", "BHLE", "BHL", "BHL"]),
    "logsumexp": (lambda m, x: m.logsumexp(x, 1), ["NCP"]),
    "topk_softmax": (lambda m, x: m.topk_softmax(x, 2)[0], ["NC"]),
    "z_loss": (lambda m, x, t: m.cross_entropy(x, t, z_loss=0.1, return_lse=True), ["NC", target_of("N")]),
    "linear_cross_entropy softcap": (
        lambda m, x, w, t: m.linear_cross_entropy(x, w, t, softcap=3.0, reduction="none"),
        ["ND", "CD", target_of("N")],
    ),
}


def size(letter, sizes):
    return letter if isinstance(letter, int) else sum(sizes[one] for one in letter.split("+"))


def make_inputs(kinds, sizes):
    g = torch.Generator().manual_seed(sizes["N"])
    made = []
    for kind in kinds:
        made.append(kind(sizes) if callable(kind) else torch.randn([size(c, sizes) for c in kind], generator=g))
    return [t.requires_grad_() if t.is_floating_point() else t for t in made]


def open_dims(kinds, inputs, fixed):
    """The dimensions of each input that may have another size, with their letters."""
    found = []
    for kind, tensor in zip(kinds, inputs, strict=True):
        letters = "NP"[: tensor.dim()] if callable(kind) else kind
        found.append(
            {} if kind is starts else {i: c for i, c in enumerate(letters) if not isinstance(c, int) and c not in fixed}
        )
    return found


def results_and_gradients(function, inputs):
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    leaves = [t for t in inputs if t.requires_grad]
    grads = torch.autograd.grad([r.cos().sum() for r in results], leaves, allow_unused=True)
    return [*results, *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True))]


def dynamic_cases():
    for name, (call, kinds) in DYNAMIC.items():
        yield pytest.param(call, F, TF, kinds, id=name)
    for name, (call, kinds) in DYNAMIC_OURS.items():
        yield pytest.param(call, flash_online, flash_online, kinds, id=name)


class Call(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


# Where no scale is given it comes from the width of query and key, E, and torch's kernels compare E and V: a case of their own.
WIDTH_TOO = pytest.mark.parametrize(
    "fixed", [pytest.param("EV", id="lengths"), pytest.param("", id="widths too", marks=pytest.mark.slow)]
)


def sizes_of(fixed):
    return [SIZES, *({**sizes, **{c: SIZES[c] for c in fixed}} for sizes in OTHERS)]


@pytest.mark.thin(2)
@WIDTH_TOO
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("call, ours, theirs, kinds", [*dynamic_cases()])
def test_export_leaves_every_dimension_open(call, ours, theirs, kinds, strict, fixed, ours_alone):
    """One program holds for all sizes, values and gradients."""
    inputs = make_inputs(kinds, SIZES)
    names = open_dims(kinds, inputs, fixed)
    dims = {c: Dim(c.replace("+", "_"), min=2, max=64) for letters in names for c in letters.values()}
    shapes = tuple({i: dims[c] for i, c in letters.items()} for letters in names)
    model = Call(lambda *given: call(ours, *given))
    program = torch.export.export(model, tuple(inputs), dynamic_shapes={"inputs": shapes}, strict=strict).module()
    for sizes in sizes_of(fixed):
        given = make_inputs(kinds, sizes)
        expected = results_and_gradients(lambda *t: call(theirs, *t), given)
        for found, right in zip(results_and_gradients(program, given), expected, strict=True):
            torch.testing.assert_close(found, right)


@pytest.mark.thin(2)
@WIDTH_TOO
@pytest.mark.parametrize("call, ours, theirs, kinds", [*dynamic_cases()])
def test_compile_makes_one_graph_for_all_sizes(call, ours, theirs, kinds, fixed, ours_alone):
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]  # a backend may be asked twice for one
    compiled = torch.compile(lambda *given: call(ours, *given), fullgraph=True, dynamic=True, backend="aot_eager")
    for sizes in sizes_of(fixed):
        given = make_inputs(kinds, sizes)
        for tensor, names in zip(given, open_dims(kinds, given, fixed), strict=True):
            for dim in names:
                torch._dynamo.mark_dynamic(tensor, dim)
        expected = results_and_gradients(lambda *t: call(theirs, *t), make_inputs(kinds, sizes))
        for found, right in zip(results_and_gradients(compiled, given), expected, strict=True):
            torch.testing.assert_close(found, right)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1


# The dimensions (input, dim) that torch's function takes without knowing their size, all of one size.
UNBACKED = {
    "softmax rows": (lambda m, x: m.softmax(x, 1), ["NC"], [(0, 0)]),
    "softmax classes": (lambda m, x: m.softmax(x, 1), ["NC"], [(0, 1)]),
    "log_softmax": (lambda m, x: m.log_softmax(x, 1), ["NC"], [(0, 0), (0, 1)]),
    "cross_entropy rows": (lambda m, x, t: m.cross_entropy(x, t), ["NC", target_of("N")], [(0, 0), (1, 0)]),
    "cross_entropy classes": (lambda m, x, t: m.cross_entropy(x, t), ["NC", target_of("N")], [(0, 1)]),
    "sdpa queries": (
        lambda m, q, k, v: m.scaled_dot_product_attention(q, k, v, is_causal=True),
        ["BHLE", "BHSE", "BHSV"],
        [(0, 2)],
    ),
    "sdpa keys": (
        lambda m, q, k, v: m.scaled_dot_product_attention(q, k, v),
        ["BHLE", "BHSE", "BHSV"],
        [(1, 2), (2, 2)],
    ),
    "sdpa batch": (lambda m, q: m.scaled_dot_product_attention(q, q, q), ["BHLE"], [(0, 0)]),
    "linear_cross_entropy": (
        lambda m, x, w, t: m.linear_cross_entropy(x, w, t),
        ["ND", "CD", target_of("N")],
        [(0, 0), (2, 0)],
    ),
}
FROM_NONZERO = [name for name, (*_, dims) in UNBACKED.items() if all(dim == 0 for _, dim in dims)]
if not hasattr(TF, "linear_cross_entropy"):
    del UNBACKED["linear_cross_entropy"]
    FROM_NONZERO.remove("linear_cross_entropy")


def compiled_by_both(function_of):
    """The results of what `function_of` makes of ours, which is compiled, and of torch's."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        return torch.compile(function_of(F), fullgraph=True, backend="aot_eager"), function_of(TF)


@pytest.mark.parametrize("name", UNBACKED)
def test_sizes_that_are_unknown(name, ours_alone):
    call, kinds, dims = UNBACKED[name]
    compiled, torchs = compiled_by_both(lambda module: lambda *given: call(module, *given))
    inputs = [t.detach() for t in make_inputs(kinds, SIZES)]
    for i, dim in dims:
        torch._dynamo.decorators.mark_unbacked(inputs[i], dim)
    torch.testing.assert_close(compiled(*inputs), torchs(*inputs))


@pytest.mark.parametrize("name", FROM_NONZERO)
def test_sizes_from_nonzero(name, ours_alone):
    """Rows chosen by a mask inside the compiled function, gradients included."""
    call, kinds, dims = UNBACKED[name]
    chosen = {i for i, _ in dims}

    def function_of(module):
        def call_on_chosen_rows(keep, *given):
            rows = keep.nonzero().squeeze(1)
            return call(module, *(t.index_select(0, rows) if i in chosen else t for i, t in enumerate(given)))

        return call_on_chosen_rows

    inputs = make_inputs(kinds, SIZES)
    keep = torch.arange(len(inputs[0])) != 1
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function_of(F), fullgraph=True, backend="aot_eager")
        found = results_and_gradients(lambda *given: compiled(keep, *given), inputs)
    expected = results_and_gradients(lambda *given: function_of(TF)(keep, *given), inputs)
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right)


def test_the_longest_sequence_is_read_inside_of_what_is_compiled(ours_alone):
    """max_seqlen is a number that only the data knows."""
    query, key = torch.randn(9, 2, 8, requires_grad=True), torch.randn(9, 2, 8, requires_grad=True)

    def attend(query, key, cu_seqlens):
        longest = cu_seqlens.diff().max().item()
        return flash_online.varlen_attention(query, key, key, cu_seqlens, cu_seqlens, longest, longest, causal=True)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        for bounds in ([0, 4, 9], [0, 2, 9]):
            cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
            found = results_and_gradients(lambda *given, c=cu_seqlens: compiled(*given, c), [query, key])
            expected = results_and_gradients(lambda *given, c=cu_seqlens: attend(*given, c), [query, key])
            for ours, right in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, right)


# --- those who watch torch's functions --------------------------------------------------------------------------------------

CALLS = {
    "scaled_dot_product_attention": lambda m, x: m.scaled_dot_product_attention(x, x, x),
    "softmax": lambda m, x: m.softmax(x, -1),
    "log_softmax": lambda m, x: m.log_softmax(x, -1),
    "cross_entropy": lambda m, x: m.cross_entropy(x.flatten(0, 2), torch.zeros(12, dtype=torch.int64)),
    "linear_cross_entropy": lambda m, x: m.linear_cross_entropy(
        x.flatten(0, 2), x.flatten(0, 2), torch.zeros(12, dtype=torch.int64)
    ),
}
CALLS = {name: call for name, call in CALLS.items() if hasattr(TF, name)}
X = torch.randn(1, 3, 4, 8)


class Watch(TorchFunctionMode):
    """The functions that are called inside it, which run as they are."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("overridden", [False, True], ids=["functional", "override"])
@pytest.mark.parametrize("name", CALLS)
def test_a_mode_sees_the_call(name, overridden):
    """Under torch's name or ours; and what it then calls is ours."""
    before = getattr(TF, name)
    with flash_online.override() if overridden else flash_online.strict(), Watch() as watch, Operators() as operators:
        result = CALLS[name](TF if overridden else F, X)
    assert any(function in (before, getattr(F, name)) for function in watch.seen), watch.seen
    assert operators.names
    torch.testing.assert_close(result, CALLS[name](TF, X))


@pytest.mark.parametrize("name", CALLS)
def test_a_mode_may_answer_itself(name):
    class Answer(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if getattr(function, "__name__", "") == name:
                return "answered"
            return function(*args, **(kwargs or {}))

    for module in (F, TF):
        with Answer():
            assert CALLS[name](module, X) == "answered"


@pytest.mark.parametrize("name", CALLS)
def test_an_object_with_torch_function_gets_the_call(name):
    class Other:
        shape, ndim = X.shape, X.dim()

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return function.__name__

        def flatten(self, *dims):
            return self

    for module in (F, TF):
        assert CALLS[name](module, Other()) == name


class CallOfOne(torch.nn.Module):
    """Without *, which a Proxy is not unpacked by."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("overridden", [False, True], ids=["functional", "override"])
@pytest.mark.parametrize("name", CALLS)
def test_symbolic_trace(name, overridden):
    """Of fx: a function and a module, with a call node that runs as the function that it stands for."""
    module = TF if overridden else F
    call = CALLS[name]
    with flash_online.override() if overridden else flash_online.strict():
        for traced in (
            torch.fx.symbolic_trace(lambda x: call(module, x)),
            torch.fx.symbolic_trace(CallOfOne(lambda x: call(module, x))),
        ):
            called = {getattr(node.target, "__name__", node.target) for node in traced.graph.nodes}
            assert name in called
            torch.testing.assert_close(traced(X), call(TF, X))


@pytest.mark.parametrize("make", [lambda: torch.nn.Softmax(-1), lambda: torch.nn.LogSoftmax(1)], ids=["Softmax", "LogSoftmax"])
def test_symbolic_trace_of_torchs_modules(make):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), make())
    expected = model(X)
    with flash_online.override():
        traced = torch.fx.symbolic_trace(model)
        torch.testing.assert_close(traced(X), expected)
    torch.testing.assert_close(traced(X), expected)


# --- compile, script and trace under override() -----------------------------------------------------------------------------


@pytest.mark.parametrize("block", [flash_online.override, flash_online.strict], ids=["override", "strict"])
def test_blocks_inside_of_what_is_compiled(block):
    def step(x):
        with block():
            attended = TF.scaled_dot_product_attention(x, x, x) + F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return TF.softmax(attended, -1)

    expected, graphs = step(X), []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if "flash_online" in str(node.target)])
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(compiled(X), expected)
    assert [len(graph) for graph in graphs] == [2 if block is flash_online.override else 1]
    assert TF.scaled_dot_product_attention is F.ORIGINALS["scaled_dot_product_attention"]


def test_strict_inside_of_what_is_compiled_still_forbids():
    def call(x):
        with flash_online.strict():
            return F.softmax(x, -1)

    torch._dynamo.reset()
    x = X.to(torch.complex64)
    with pytest.raises(torch._dynamo.exc.Unsupported) as raised:
        torch.compile(call, fullgraph=True, backend="aot_eager")(x)
    assert "strict() forbids" in "".join(traceback.format_exception(raised.value))
    with pytest.raises(NotImplementedError, match="Complex"):  # torch's own error: the block is over
        F.softmax(x, -1)


TOKENS = torch.randn(2, 5, 8)
TARGET = torch.tensor([[0, 1, 2, 3, 4], [7, 6, -100, 4, 3]])
MODULES = {
    "Softmax": (lambda: torch.nn.Softmax(-1), (TOKENS,)),
    "LogSoftmax": (lambda: torch.nn.LogSoftmax(-1), (TOKENS,)),
    "CrossEntropyLoss": (lambda: torch.nn.CrossEntropyLoss(label_smoothing=0.1), (TOKENS.flatten(0, 1), TARGET.flatten())),
    "MultiheadAttention": (lambda: torch.nn.MultiheadAttention(8, 2, batch_first=True), (TOKENS, TOKENS, TOKENS)),
    "TransformerEncoderLayer": (
        lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        (TOKENS,),
    ),
}


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)


def first(results):
    return results[0] if isinstance(results, tuple) else results


def gradients_of(module, inputs):
    module.zero_grad()
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    result = first(module(*leaves))
    result.cos().sum().backward()
    grads = [t.grad for t in leaves if t.requires_grad]
    return [result.detach(), *grads, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", MODULES)
def test_script_under_override(name, training):
    """TorchScript compiles torch's own functions, which these modules name."""
    make, inputs = MODULES[name]
    module = make().train(training)
    expected = gradients_of(module, inputs)
    with flash_online.override():
        scripted = saved_and_loaded(torch.jit.script(module))
        found = gradients_of(scripted, inputs)
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right)
    torch.testing.assert_close(gradients_of(torch.jit.script(make().train(training)), inputs)[0].shape, expected[0].shape)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", MODULES)
def test_jit_trace_under_override(name, training):
    """With parameters that require grad; saved, loaded and trained. The graph holds our operators."""
    make, inputs = MODULES[name]
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), make()).train(training) if len(inputs) == 1 else make().train(training)
    expected = gradients_of(model, inputs)
    # By an operator of torch's for the whole layer; of whose graph torch's own check says that it names an input differently.
    fused_by_torch = name == "TransformerEncoderLayer" and not training
    with flash_online.override():
        traced = torch.jit.trace(model, inputs, check_trace=not fused_by_torch)
    assert "flash_online::" in str(traced.inlined_graph) or fused_by_torch
    loaded = saved_and_loaded(traced)
    for _ in range(3):  # TorchScript looks at the first calls before it compiles the next
        for ours, right in zip(gradients_of(loaded, inputs), expected, strict=True):
            torch.testing.assert_close(ours, right)


RELOAD = """
import importlib, torch, torch.nn.functional as TF
import flash_online, flash_online.functional, flash_online.override
names = [n for n in flash_online.functional.NAMES if hasattr(TF, n)]
torchs = {n: getattr(TF, n) for n in names}
x = torch.randn(2, 6)
flash_online.enable()
importlib.reload(importlib.import_module("MODULE"))
assert torch.allclose(TF.softmax(x, -1), torch.softmax(x, -1))
assert torch.allclose(importlib.import_module("flash_online.functional").softmax(x, -1), torch.softmax(x, -1))
flash_online.disable()
assert all(getattr(TF, n) is f for n, f in torchs.items()), [n for n, f in torchs.items() if getattr(TF, n) is not f]
functional = importlib.import_module("flash_online.functional")
assert all(functional.ORIGINALS[n] is f for n, f in torchs.items())
with flash_online.override():
    assert all(getattr(TF, n) is getattr(importlib.import_module("flash_online.functional"), n) for n in names)
    TF.softmax(x, -1)
assert all(getattr(TF, n) is f for n, f in torchs.items())
"""


SLOW_RELOADS = [pytest.param(name, marks=pytest.mark.slow) for name in ("flash_online", "flash_online.override")]


@pytest.mark.parametrize("module", ["flash_online.functional", *SLOW_RELOADS])
def test_reload_while_enabled(module):
    program = RELOAD.replace("MODULE", module)
    result = subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
