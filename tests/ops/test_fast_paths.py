"""The fast paths of attention, softmax, log_softmax and cross_entropy: which calls take one operator, that these have the bits
of the long way, and that an error of the operator surfaces once. test_decode_path.py has the fast paths over cached keys."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

import flash_online
import flash_online.functional as F
from flash_online import BlockList, _policy
from flash_online._plain import are_plain
from flash_online.cross_entropy import try_fast_cross_entropy
from flash_online.softmax import try_fast_softmax

attention_module = importlib.import_module("flash_online.attention")  # the package's attribute is the function
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TARGET = torch.tensor([0, 3, 1])


# --- Plain tensors, for all fast paths ---------------------------------------------------------------------------------------

# name -> (a fast path as a function of one tensor, the tensor's shape)
PATHS = {
    "attention": (lambda x: attention_module.try_fast_path(x, x, x, False, None, False), (2, 4, 3, 8)),
    "scaled_dot_product_attention": (
        lambda x: attention_module.try_fast_masked(x, x, x, torch.ones(2, 1, 1, 3, dtype=torch.bool), False, None, False),
        (2, 4, 3, 8),
    ),
    "attention with spans": (
        lambda x: attention_module.try_fast_sparse(
            x, x, x, torch.zeros(1, 1, 3, 2, dtype=torch.int32), None, None, False, None
        ),
        (2, 4, 3, 8),
    ),
    "attention with blocks": (
        lambda x: attention_module.try_fast_sparse(x, x, x, None, None, BlockList.dense(3, 3, (64, 64)), False, None),
        (2, 4, 3, 8),
    ),
    "softmax": (lambda x: try_fast_softmax("softmax", x, -1, False), (3, 4)),
    "cross_entropy": (lambda x: try_fast_cross_entropy(x, TARGET, None, -100, "mean", 0.0), (3, 4)),
}
NOT_PLAIN = {
    "a subclass": Parameter,
    "integers": Tensor.long,
    "complex": Tensor.cfloat,
    "float8": lambda x: x.to(torch.float8_e5m2),
    "sparse": Tensor.to_sparse,
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "meta": lambda x: x.to("meta"),
    "a list": Tensor.tolist,
    "nothing": lambda x: None,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", NOT_PLAIN)
@pytest.mark.parametrize("path", PATHS)
def test_tensors_that_are_not_plain(path, kind):
    function, shape = PATHS[path]
    x = torch.randn(shape)
    assert function(x) is not None and function(NOT_PLAIN[kind](x)) is None
    name = path.partition(" ")[0]
    assert are_plain(name, x, (x, x)) and not are_plain(name, x, (x, NOT_PLAIN[kind](x)))


@pytest.mark.parametrize("mode", ["torch.func", "torch.jit.trace", "autocast", "forward mode", "TorchFunctionMode"])
@pytest.mark.parametrize("path", PATHS)
def test_modes_that_need_the_long_way(path, mode):
    (function, shape), seen = PATHS[path], []

    def look(x):
        seen.append(function(x))
        return x.sum()

    x = torch.randn(shape)
    if mode == "torch.func":
        torch.func.grad(look)(x)
    elif mode == "torch.jit.trace":
        torch.jit.trace(look, x, check_trace=False)  # the check calls it without a tracer
    else:
        contexts = {"autocast": torch.autocast("cpu", torch.bfloat16), "forward mode": forward_ad.dual_level()}
        with contexts.get(mode, torch.device("cpu")):  # a device is a TorchFunctionMode
            look(x)
    assert seen and all(result is None for result in seen)


def test_dtypes_of_softmax_and_cross_entropy_under_autocast():
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.softmax(x, -1).dtype == torch.bfloat16 and F.cross_entropy(x, TARGET).dtype == torch.float32


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_plain_tensors_are_those_that_kernels_take(dtype, device):
    x = torch.randn(2, 3, device=device).to(dtype)
    for name in _policy.OPERATORS:
        assert are_plain(name, x) == (_policy.refusal(name, x) is None)


def test_plain_calls_over_cached_keys():
    """A gradient is refused there; autocast and TorchFunctionModes change nothing."""
    x, leaf = torch.randn(2, 3), torch.randn(2, 3, requires_grad=True)
    for context in (torch.autocast("cpu", torch.bfloat16), torch.device("cpu")):
        with context:
            assert are_plain("kvcache_attention", x, (x,), True) and not are_plain("attention", x, (x,))
    for call in ((leaf, (x,)), (x, (leaf,))):
        assert are_plain("attention", *call) and not are_plain("kvcache_attention", *call, True)
        with torch.no_grad():
            assert are_plain("kvcache_attention", *call, True)


# --- Attention ---------------------------------------------------------------------------------------------------------------

Q = torch.randn(2, 4, 3, 8)
PLAIN_ATTENTION = {
    "equal shapes": (Q, Q, Q),
    "other lengths and widths": (Q, torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 6)),
    "strides": (Q.transpose(1, 2).contiguous().transpose(1, 2), Q, Q),
    "no keys": (Q, Q[:, :, :0], Q[:, :, :0]),
    "rank 5": (Q[None], Q[None], Q[None]),
}
OTHER_ATTENTION = {
    "rank 3": (Q[0], Q[0], Q[0]),
    "a batch to broadcast": (Q, Q[:1], Q[:1]),
    "dtypes": (Q, Q.double(), Q),
    "widths": (Q, Q[..., :5], Q),
    "lengths": (Q, Q, Q[:, :, :2]),
    "heads that do not divide": (Q, Q[:, :3], Q[:, :3]),
}


@pytest.mark.parametrize("call", PLAIN_ATTENTION.values(), ids=PLAIN_ATTENTION)
def test_attention_of_plain_tensors(call):
    assert attention_module.try_fast_path(*call, False, None, False) is not None


@pytest.mark.parametrize("call", OTHER_ATTENTION.values(), ids=OTHER_ATTENTION)
def test_attention_of_other_calls(call):
    assert attention_module.try_fast_path(*call, False, None, True) is None


def test_attention_of_groups_of_heads():
    """The callers say whether they allow groups."""
    call = (Q, Q[:, :2], Q[:, :1], False, None)
    assert attention_module.try_fast_path(*call, False) is None
    assert attention_module.try_fast_path(*call, True) is not None


MASKS = {
    "bool": torch.rand(2, 1, 1, 5) < 0.6,
    "float": torch.randn(2, 4, 3, 5),
    "of one number": torch.zeros(1, 1, 1, 1),
    "strides": torch.randn(1, 4, 5, 3).mT,
}
OTHER_MASKS = {
    "rank 2": torch.ones(3, 5, dtype=torch.bool),
    "another dtype": torch.zeros(1, 1, 1, 5, dtype=torch.float64),
    "integers": torch.zeros(1, 1, 1, 5, dtype=torch.int64),
    "another length": torch.zeros(1, 1, 1, 4),
    "more heads": torch.zeros(1, 8, 1, 5),
    "a gradient": torch.zeros(1, 1, 1, 5, requires_grad=True),
    "a subclass": Parameter(torch.zeros(1, 1, 1, 5), requires_grad=False),
    "sparse": torch.zeros(1, 1, 1, 5).to_sparse(),
    "meta": torch.zeros(1, 1, 1, 5, device="meta"),
    "a list": [[[[0.0] * 5]]],
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_attention_under_a_mask(mask, causal):
    """The results have the bits of the long way, which a call with an lse takes."""
    key, value = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 6)
    found = attention_module.try_fast_masked(Q, key, value, mask, causal, 0.3, True)
    expected, _ = flash_online.attention(Q, key, value, mask=mask, causal=causal, scale=0.3, return_lse=True)
    assert torch.equal(found, expected)
    assert torch.equal(flash_online.attention(Q, key, value, mask=mask, causal=causal, scale=0.3), expected)
    if not causal:
        found = F.scaled_dot_product_attention(Q, key, value, mask, scale=0.3, enable_gqa=True)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("mask", OTHER_MASKS.values(), ids=OTHER_MASKS)
def test_attention_under_other_masks(mask):
    key = torch.randn(2, 4, 5, 8)
    assert attention_module.try_fast_masked(Q, key, key, mask, False, None, False) is None


@pytest.mark.parametrize("call", [*OTHER_ATTENTION.values(), (Q, Q[:, :, :0], Q[:, :, :0]), (Q[:, :, :0], Q, Q)])
def test_other_attention_under_a_mask(call):
    mask = torch.zeros(1, 1, 1, 1)
    assert attention_module.try_fast_masked(*call, mask, False, None, True) is None
    leaf = Q.clone().requires_grad_()
    assert attention_module.try_fast_masked(leaf, Q, Q, mask, False, None, True) is None
    with torch.no_grad():
        assert attention_module.try_fast_masked(leaf, Q, Q, mask, False, None, True) is not None


SPANS = {
    "queries": {"query_spans": torch.randint(0, 6, (2, 4, 3, 4), dtype=torch.int32)},
    "keys": {"key_spans": torch.randint(0, 4, (1, 1, 5, 2), dtype=torch.int32).sort(-1).values},
    "both": {
        "query_spans": torch.tensor([0, 5], dtype=torch.int32).expand(2, 1, 3, 2),
        "key_spans": torch.tensor([0, 2, 2, 3], dtype=torch.int32).expand(1, 4, 5, 4),
    },
    "of one head": {"query_spans": torch.randint(0, 6, (3, 2), dtype=torch.int32)},
    "of heads": {"key_spans": torch.randint(0, 4, (4, 5, 4), dtype=torch.int32)},
}
OTHER_SPANS = {
    "rank 1": torch.zeros(2, dtype=torch.int32),
    "rank 5": torch.zeros(1, 1, 1, 3, 2, dtype=torch.int32),
    "other heads": torch.zeros(3, 3, 2, dtype=torch.int32),
    "int64": torch.zeros(1, 1, 3, 2, dtype=torch.int64),
    "another length": torch.zeros(1, 1, 4, 2, dtype=torch.int32),
    "three bounds": torch.zeros(1, 1, 3, 3, dtype=torch.int32),
    "heads of keys": torch.zeros(1, 2, 3, 2, dtype=torch.int32),
    "a larger batch": torch.zeros(4, 1, 3, 2, dtype=torch.int32),
    "bounds apart in memory": torch.zeros(1, 1, 2, 3, dtype=torch.int32).mT,
    "a subclass": Parameter(torch.zeros(1, 1, 3, 2, dtype=torch.int32), requires_grad=False),
    "meta": torch.zeros(1, 1, 3, 2, dtype=torch.int32, device="meta"),
    "a list": [[[[0, 1]] * 3]],
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("given", SPANS.values(), ids=SPANS)
def test_attention_with_spans(given, causal):
    """The results and gradients have the bits of the long way, which a call with an lse takes."""
    key, value = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 6)
    spans = given.get("query_spans"), given.get("key_spans")
    with torch.no_grad():
        assert attention_module.try_fast_sparse(Q, key, value, *spans, None, causal, 0.3) is not None
    results = []
    for lse in (False, True):
        leaves = [t.clone().requires_grad_() for t in (Q, key, value)]
        out = flash_online.attention(*leaves, **given, causal=causal, scale=0.3, return_lse=lse)
        out = out[0] if lse else out
        with torch.no_grad():
            assert torch.equal(flash_online.attention(*leaves, **given, causal=causal, scale=0.3), out)
        out.square().sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("spans", OTHER_SPANS.values(), ids=OTHER_SPANS)
def test_attention_with_other_spans(spans):
    key = torch.randn(2, 4, 5, 8)
    assert attention_module.try_fast_sparse(Q, key, key, spans, None, None, False, None) is None
    long = torch.zeros(1, 1, 5, 2, dtype=torch.int32)
    assert attention_module.try_fast_sparse(Q, key, key, spans, long, None, False, None) is None


@pytest.mark.parametrize(
    "call", [*OTHER_ATTENTION.values(), (Q, Q[:, :, :0], Q[:, :, :0]), (Q[:, :, :0], Q, Q), (Q[None],) * 3]
)
def test_other_attention_with_spans(call):
    spans = torch.zeros(1, 1, call[0].shape[-2], 2, dtype=torch.int32)
    assert attention_module.try_fast_sparse(*call, spans, None, None, False, None) is None


def lists(*leading, dtype=torch.int32, capacity=2):
    """Counts and indices for three queries and five keys: one block of each."""
    return torch.ones(*leading, 1, dtype=dtype), torch.zeros(*leading, 1, capacity, dtype=dtype)


LISTS = {
    "for all heads": BlockList(*lists(1), (64, 64)),
    "per head": BlockList(*lists(4), (128, 64)),
    "per batch and head": BlockList(*lists(2, 4), (64, 128)),
    "empty": BlockList(*lists(2, 1, capacity=0), (128, 128)),
    "columns apart in memory": BlockList(lists(1)[0], torch.zeros(1, 1, 4, dtype=torch.int32)[..., ::2], (64, 64)),
}
OTHER_LISTS = {
    "without a size": BlockList(*lists(1)),
    "of five dimensions": BlockList(*lists(1, 1, 1), (64, 64)),
    "of int64": BlockList(*lists(1, dtype=torch.int64), (64, 64)),
    "of other heads": BlockList(*lists(3), (64, 64)),
    "of other batches": BlockList(*lists(3, 4), (64, 64)),
    "broadcast apart": BlockList(lists(4)[0], lists(1)[1], (64, 64)),
    "of other blocks": BlockList(*lists(1), (64, 32)),
    "a subclass": BlockList(Parameter(lists(1)[0], requires_grad=False), lists(1)[1], (64, 64)),
    "meta": BlockList(*(t.to("meta") for t in lists(1)), (64, 64)),
}


@pytest.mark.parametrize("blocks", LISTS.values(), ids=LISTS)
def test_attention_with_lists(blocks):
    key = torch.randn(2, 4, 5, 8)
    with torch.no_grad():
        fast = attention_module.try_fast_sparse(Q, key, key, None, None, blocks, True, 0.3)
    if blocks.indices.stride(-1) == 2:
        assert fast is None
        return
    assert torch.equal(fast, flash_online.attention(Q, key, key, blocks=blocks, causal=True, scale=0.3, return_lse=True)[0])


@pytest.mark.parametrize("blocks", OTHER_LISTS.values(), ids=OTHER_LISTS)
def test_attention_with_other_lists(blocks):
    key = torch.randn(2, 4, 5, 8)
    assert attention_module.try_fast_sparse(Q, key, key, None, None, blocks, False, None) is None


ATTENTIONS = (F.scaled_dot_product_attention, flash_online.attention)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("a launch failed")], ids=repr)
@pytest.mark.parametrize("function", ATTENTIONS)
@pytest.mark.parametrize(
    "operator", ["_run_inference", "_run_inference_with_options", "_run_training", "_run_training_backward"]
)
def test_attention_raises_an_error_of_the_operator_once(operator, function, error, monkeypatch):
    calls = []

    def fail(*args):
        calls.append(args)
        raise error

    query = torch.randn(1, 2, 3, 4, requires_grad=operator.startswith("_run_training"))
    mask = torch.zeros(1, 1, 3, 3) if operator == "_run_inference_with_options" else None
    name = "mask" if function is flash_online.attention else "attn_mask"
    out = function(query, query, query) if operator == "_run_training_backward" else None
    if operator == "_run_training_backward":  # in a cell of the Function that `lean` has built
        backward = attention_module._lean_attention.__self__.backward
        cell = backward.__closure__[backward.__code__.co_freevars.index("run_backward")]
        monkeypatch.setattr(cell, "cell_contents", fail)
    else:
        monkeypatch.setattr(attention_module, operator, fail)
    with pytest.raises(type(error), match=str(error)):
        function(query, query, query, **{name: mask}) if out is None else out.sum().backward()
    assert len(calls) == 1


def test_attention_with_spans_raises_an_error_of_the_operator_once(monkeypatch):
    calls = []

    def fail(*args):
        calls.append(args)
        raise RuntimeError("a launch failed")

    monkeypatch.setattr(attention_module, "_run_inference_with_options", fail)
    with pytest.raises(RuntimeError, match="a launch failed"):
        flash_online.attention(Q, Q, Q, query_spans=torch.zeros(1, 1, 3, 2, dtype=torch.int32))
    assert len(calls) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("function", ATTENTIONS)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("options", [{}, {"return_lse": True}], ids=repr)
def test_attention_without_enough_gpu_memory(function, requires_grad, options):
    """The output alone would take 2^44 bytes; the inputs are views of a few."""
    if options and function is not flash_online.attention:
        pytest.skip("an option of flash_online.attention")
    row = torch.randn(1, 1, 1, 64, device="cuda", dtype=torch.bfloat16, requires_grad=requires_grad)
    query, key = row.expand(1 << 17, 16, 1 << 16, 64), row.expand(1 << 17, 16, 1, 64)
    before = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        function(query, key, key, **options)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


# --- Softmax and log_softmax -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("shape, dim", [((7,), 0), ((3, 5), -1), ((3, 5), 0), ((2, 0, 3), 2), ((2, 3, 0), -1), ((4, 1, 6), -2)])
def test_softmax_of_plain_tensors(shape, dim, dtype, log):
    """The results and gradients have the bits of the long way, which calls with a dtype take."""
    name = "log_softmax" if log else "softmax"
    x = torch.randn(shape, dtype=dtype)
    fast = try_fast_softmax(name, x, dim, log)
    assert torch.equal(fast, getattr(flash_online, name)(x, dim, dtype))
    grads = []
    for call in (lambda t: try_fast_softmax(name, t, dim, log), lambda t: getattr(flash_online, name)(t, dim, dtype)):
        leaf = x.clone().requires_grad_()
        out = call(leaf)
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=torch.float64).to(dtype).view(out.shape))
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("log", [False, True])
def test_second_derivatives_of_softmax(log):
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: try_fast_softmax("softmax", t, -1, log), x)


OTHER_ROWS = {
    "dim too large": (torch.ones(3, 4), 2),
    "dim too small": (torch.ones(3, 4), -3),
    "a scalar": (torch.ones(()), 0),
    "no dim": (torch.ones(3, 4), None),
    "a bool": (torch.ones(3, 4), True),
}


@pytest.mark.parametrize("x, dim", OTHER_ROWS.values(), ids=OTHER_ROWS)
def test_softmax_of_other_calls(x, dim):
    assert try_fast_softmax("softmax", x, dim, False) is None


# --- Cross-entropy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("rows, classes", [(1, 1), (5, 7), (33, 300)])
def test_cross_entropy_of_plain_rows(rows, classes, dtype, reduction, smoothing):
    """Compared with torch in float64. The bits are the same as for [N, C, 1], which takes the long way."""
    x, target = torch.randn(rows, classes, dtype=dtype), torch.randint(classes, (rows,))
    target[rows // 2] = -100 if rows > 1 else target[0]
    leaves = [x.clone().requires_grad_() for _ in range(2)] + [x.double().requires_grad_()]
    options = {"reduction": reduction, "label_smoothing": smoothing}
    losses = [
        try_fast_cross_entropy(leaves[0], target, None, -100, reduction, smoothing),
        flash_online.cross_entropy(leaves[1].unsqueeze(2), target.unsqueeze(1), **options),
        torch.nn.functional.cross_entropy(leaves[2], target, **options),
    ]
    for loss in losses:
        loss.backward()
    assert torch.equal(losses[0], losses[1]) and torch.equal(leaves[0].grad, leaves[1].grad)
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(losses[0].double(), losses[2], **tolerance)
    torch.testing.assert_close(leaves[0].grad.double(), leaves[2].grad, **tolerance)


OTHER_LOSSES = {
    "no reduction": {"reduction": "none"},
    "an unknown reduction": {"reduction": "median"},
    "smoothing above 1": {"label_smoothing": 1.5},
    "smoothing of NaN": {"label_smoothing": float("nan")},
    "smoothing by an int": {"label_smoothing": 0},
    "ignore_index by a bool": {"ignore_index": True},
    "weights": {"weight": torch.ones(4)},
    "float targets": {"target": torch.tensor([0.0, 1.0, 2.0])},
    "two targets": {"target": torch.tensor([0, 1])},
    "uint8 targets": {"target": torch.tensor([0, 1, 2], dtype=torch.uint8)},
    "one row": {"input": torch.ones(4)},
    "three dimensions": {"input": torch.ones(3, 4, 2)},
    "no classes": {"input": torch.ones(3, 0)},
    "no target": {"target": None},
}


@pytest.mark.parametrize("change", OTHER_LOSSES.values(), ids=OTHER_LOSSES)
def test_cross_entropy_of_other_calls(change):
    call = {"input": torch.randn(3, 4), "target": torch.tensor([0, 1, 2]), "weight": None, "ignore_index": -100,
            "reduction": "mean", "label_smoothing": 0.0} | change  # fmt: skip
    assert try_fast_cross_entropy(**call) is None


def test_cross_entropy_of_targets_out_of_range():
    for function in (flash_online.cross_entropy, F.cross_entropy):
        with pytest.raises(IndexError, match="^target: expected 0 to 2 .*got 9, which is out of bounds"):
            function(torch.randn(2, 3), torch.tensor([1, 9]))
