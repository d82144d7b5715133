"""linear_cross_entropy: against torch's and the reference, in one chunk and in many, differentiated once, twice and again."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from cases import DTYPES, leaf
from cases import linear_problem as problem
from drop_in import compare
from oracle import Operators
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jvp, vmap
from torch.utils.checkpoint import checkpoint

import flash_online
import flash_online.functional as F
from flash_online import _linear_cross_entropy_ops, reference
from flash_online.testing import assert_close_to_float64, error, peak_extra_bytes

TF = torch.nn.functional
DOUBLE = torch.float64
NAN, INF = math.nan, math.inf
NARROW_DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def plain(
    input, linear_weight, target, *, linear_bias=None, weight=None, reduction="mean", ignore_index=None, label_smoothing=0.0
):
    """Torch's own, or what it is defined as where torch has none."""
    options = {"weight": weight, "reduction": reduction, "label_smoothing": label_smoothing}
    if hasattr(TF, "linear_cross_entropy"):
        original = F.ORIGINALS["linear_cross_entropy"]
        return original(input, linear_weight, target, linear_bias=linear_bias, ignore_index=ignore_index, **options)
    classes, *positions, _ = linear_weight.shape
    bias = None if linear_bias is None else linear_bias.flatten()
    logits = TF.linear(input, linear_weight.flatten(0, -2), bias).reshape(*input.shape[:-1], classes, *positions)
    return TF.cross_entropy(logits, target, ignore_index=-100 if ignore_index is None else ignore_index, **options)


needs_torchs = pytest.mark.skipif(not hasattr(TF, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy")


def of_rows(monkeypatch, rows, pitch=1):
    """Makes every chunk one of `rows` rows, whose pitch on the CPU is a multiple of `pitch` bytes."""
    monkeypatch.setattr(_linear_cross_entropy_ops, "_ROW_UNIT", rows)
    monkeypatch.setattr(_linear_cross_entropy_ops, "_CHUNK_BYTES", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr(_linear_cross_entropy_ops, "_PITCH_BYTES", {"cpu": pitch, "cuda": 128})


@pytest.fixture(params=["one chunk", "chunks of 4 rows", "chunks of 4 rows, padded"])
def chunks(request, monkeypatch):
    if request.param != "one chunk":
        of_rows(monkeypatch, 4, 64 if "padded" in request.param else 1)


# --- the drop-in ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_options(reduction, smoothing, weighted, dtype, chunks, device):
    options = {
        "reduction": reduction,
        "label_smoothing": smoothing,
        "weight": torch.rand(7, device=device).to(dtype) if weighted else None,
    }
    for soft in (False, True):
        for positions in ((), (3,)):
            args, kwargs = problem(dtype=dtype, positions=positions, soft=soft, bias=weighted, device=device)
            compare(F.linear_cross_entropy, plain, args, kwargs | options)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=str)
def test_edges_of_chunks(rows, reduction, dtype, monkeypatch, device):
    of_rows(monkeypatch, 4)
    args, kwargs = problem(rows, dtype=dtype, ignored=False, device=device)
    compare(F.linear_cross_entropy, plain, args, kwargs | {"reduction": reduction})


@pytest.mark.parametrize("classes", [1, 2, 17, 64, 1031])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_class_counts(classes, dtype, device):
    args, kwargs = problem(rows=150, hidden=33, classes=classes, dtype=dtype, device=device)
    compare(F.linear_cross_entropy, plain, args, kwargs)


@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 6, 1000])
def test_ignore_index_may_be_any_number(ignore_index, device):
    for reduction in ("mean", "sum", "none"):
        args, kwargs = problem(ignored=False, device=device)
        kwargs["target"][2] = ignore_index
        compare(F.linear_cross_entropy, plain, args, kwargs | {"ignore_index": ignore_index, "reduction": reduction})


def test_one_row_without_a_batch(device):
    x, w = leaf(6, device=device), leaf(7, 6, device=device)
    for reduction in ("mean", "none"):
        for target in (torch.tensor(3, device=device), torch.rand(7, requires_grad=True, device=device)):
            compare(F.linear_cross_entropy, plain, (x, w), {"target": target, "reduction": reduction})
        # Of a target [1] torch takes the loss, and fails on the way back.
        ours, torchs = (f(x, w, torch.tensor([3], device=device), reduction=reduction) for f in (F.linear_cross_entropy, plain))
        torch.testing.assert_close(ours, torchs)
        expected = torch.autograd.grad(
            F.linear_cross_entropy(x, w, torch.tensor(3, device=device), reduction=reduction), (x, w)
        )
        torch.testing.assert_close(torch.autograd.grad(ours, (x, w)), expected)


@pytest.mark.parametrize("sizes", [(0, 6, 7), (3, 0, 7), (0, 0, 7)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_sizes_of_zero(sizes, reduction, device):
    rows, hidden, classes = sizes
    args, kwargs = problem(rows, hidden, classes, ignored=False, device=device)
    compare(F.linear_cross_entropy, plain, args, kwargs | {"reduction": reduction})


@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided"])
def test_strides(layout, device):
    (x, w), kwargs = problem(rows=8, hidden=6, classes=6, device=device)
    made = {
        "transposed": lambda t: t.detach().t().contiguous().t(),
        "expanded": lambda t: t.detach()[:1].expand(t.shape),
        "strided": lambda t: t.detach().repeat_interleave(2, -1)[:, ::2],
    }[layout]
    x, w = made(x).requires_grad_(), made(w).requires_grad_()
    compare(F.linear_cross_entropy, plain, (x, w), kwargs)


def test_gradients_of_a_part(device):
    """Each combination of tensors that want a gradient."""
    for bits in range(1, 8):
        (x, w), kwargs = problem(device=device)
        tensors = (x, w, kwargs["linear_bias"])
        for i, tensor in enumerate(tensors):
            tensor.requires_grad_(bool(bits >> i & 1))
        for reduction in ("mean", "none"):
            compare(F.linear_cross_entropy, plain, (x, w), kwargs | {"reduction": reduction})


def test_torchs_options_are_taken(device):
    args, kwargs = problem(device=device)
    made = torch.nn.LinearCrossEntropyOptions() if hasattr(torch.nn, "LinearCrossEntropyOptions") else object()
    assert torch.equal(F.linear_cross_entropy(*args, **kwargs, options=made), F.linear_cross_entropy(*args, **kwargs))


def test_all_targets_ignored(device):
    (x, w), kwargs = problem(device=device)
    kwargs["target"].fill_(-100)
    for options in ({}, {"weight": torch.rand(7, device=device)}):
        loss = F.linear_cross_entropy(x, w, **kwargs, **options)
        assert loss.isnan()
        assert all((g == 0).all() for g in torch.autograd.grad(loss, (x, w)))
        assert flash_online.linear_cross_entropy(x, w, **kwargs, **options, reduction="sum", z_loss=0.5) == 0


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_rows_may_hold_anything(bad, reduction, chunks, device):
    (x, w), kwargs = problem(ignored=False, device=device)
    target, kept = kwargs["target"], torch.ones(13, dtype=torch.bool, device=device)
    kept[[1, 5, 12]] = False
    target[~kept] = -100
    with torch.no_grad():
        x[~kept] = bad
    for options in ({}, {"label_smoothing": 0.1}, {"z_loss": 0.1}):
        options = options | {"reduction": reduction, "linear_bias": kwargs["linear_bias"]}
        found = flash_online.linear_cross_entropy(x, w, target, **options)
        expected = flash_online.linear_cross_entropy(x[kept], w, target[kept], **options)
        torch.testing.assert_close(found[kept] if reduction == "none" else found, expected)
        ours, others = (torch.autograd.grad(loss.sum(), (x, w)) for loss in (found, expected))
        assert (ours[0][~kept] == 0).all()
        torch.testing.assert_close(ours, others)


def test_target_out_of_range():
    (x, w), _ = problem(rows=3)
    for bad in (7, -1, 10**12):
        for reduction in ("mean", "none"):
            for weight in (None, torch.rand(7)):
                with pytest.raises(IndexError, match="target"):
                    F.linear_cross_entropy(x, w, torch.tensor([0, bad, 1]), reduction=reduction, weight=weight)
        with pytest.raises(IndexError, match="target"), torch.no_grad():
            F.linear_cross_entropy(x, w, torch.tensor([0, bad, 1]))


WRONG = {
    "input of 3 dimensions": (lambda x, w, t: ((x[None], w, t[None]), {}), "input"),
    "input of none": (lambda x, w, t: ((x[0, 0], w, t), {}), "input"),
    "weight of 1 dimension": (lambda x, w, t: ((x, w[0], t), {}), "linear_weight"),
    "hidden sizes": (lambda x, w, t: ((x, w[:, :5], t), {}), "linear_weight"),
    "bias": (lambda x, w, t: ((x, w, t), {"linear_bias": torch.zeros(6)}), "linear_bias"),
    "positions without a batch": (lambda x, w, t: ((x[0], w[:, None], t[0]), {}), "input"),
    "dtypes": (lambda x, w, t: ((x, w.half(), t), {}), "linear_weight"),
    "bias's dtype": (lambda x, w, t: ((x, w, t), {"linear_bias": torch.zeros(7).half()}), "linear_bias"),
    "integers": (lambda x, w, t: ((x.long(), w.long(), t), {}), "input"),
    "target's shape": (lambda x, w, t: ((x, w, t[:2]), {}), "target"),
    "target's dtype": (lambda x, w, t: ((x, w, t.float()), {}), "target"),
    "probabilities of integers": (lambda x, w, t: ((x, w, torch.ones(3, 7, dtype=torch.long)), {}), "target"),
    "ignored probabilities": (lambda x, w, t: ((x, w, torch.rand(3, 7)), {"ignore_index": 2}), "ignore_index"),
    "ignored probabilities by default": (lambda x, w, t: ((x, w, torch.rand(3, 7)), {"ignore_index": -100}), "ignore_index"),
    "class weights": (lambda x, w, t: ((x, w, t), {"weight": torch.ones(6)}), "weight"),
    "class weights' dtype": (lambda x, w, t: ((x, w, t), {"weight": torch.ones(7).half()}), "weight"),
    "reduction": (lambda x, w, t: ((x, w, t), {"reduction": "average"}), "reduction"),
    "smoothing": (lambda x, w, t: ((x, w, t), {"label_smoothing": 1.5}), "label_smoothing"),
    "class weights that want a gradient": (lambda x, w, t: ((x, w, t), {"weight": torch.ones(7).requires_grad_()}), "weight"),
    "no tensor": (lambda x, w, t: (([1.0], w, t), {}), "input"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_torchs(name, device):
    make, word = WRONG[name]
    with torch.device(device):
        args, kwargs = make(torch.randn(3, 6), torch.randn(7, 6), torch.tensor([0, 1, 6]))
    with pytest.raises(Exception, match=word) as ours:
        F.linear_cross_entropy(*args, **kwargs)
    if hasattr(TF, "linear_cross_entropy"):
        with pytest.raises(Exception) as theirs:
            F.ORIGINALS["linear_cross_entropy"](*args, **kwargs)
        assert isinstance(ours.value, theirs.type) or theirs.type is AttributeError


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast(dtype, lower, device):
    """Dtypes and values of the result and of the gradients as torch's; products in the lower precision."""
    for soft in (False, True):
        for reduction in ("mean", "none"):
            (x, w), kwargs = problem(rows=64, hidden=32, dtype=dtype, soft=soft, device=device)
            leaves, results = (x, w, kwargs["linear_bias"]), []
            for function in (F.linear_cross_entropy, plain):
                with torch.autocast(device, lower):
                    result = function(x, w, **kwargs, reduction=reduction)
                results.append((result, *torch.autograd.grad(result.sum(), leaves)))
            for ours, torchs in zip(*results, strict=True):
                assert ours.dtype == torchs.dtype
                torch.testing.assert_close(ours.float(), torchs.float(), rtol=0.02, atol=0.02 * torchs.abs().max().item())
            if dtype == torch.float32:  # the products did run in the lower precision
                exact = plain(x, w, **kwargs, reduction=reduction)
                assert not torch.equal(results[0][0], exact)


# --- at the size of vocabularies, against two functions of torch -------------------------------------------------------------


def unfused(x, w, target, linear_bias=None, **options):
    return TF.cross_entropy(TF.linear(x, w, linear_bias), target, **options)


def compare_with_unfused(x, w, target, linear_bias=None, **options):
    """Loss and gradients against those of two functions of torch in the same dtype, and in float64."""
    leaves = [t for t in (x, w, linear_bias, target) if t is not None and t.requires_grad]

    def run(function, convert):
        made = {id(t): convert(t.detach()).requires_grad_() for t in leaves}
        given = [made.get(id(t), t) for t in (x, w, target)]
        more = {k: convert(v) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        bias = None if linear_bias is None else made[id(linear_bias)]
        loss = function(*given, linear_bias=bias, **more)
        torch.manual_seed(7)
        cotangent = torch.randn(loss.shape, device=x.device).to(x.dtype).to(loss.dtype)
        return loss, *torch.autograd.grad(loss, list(made.values()), cotangent)

    ours, torchs = (run(f, lambda t: t.clone()) for f in (F.linear_cross_entropy, unfused))
    truth = run(unfused, lambda t: t.double())
    for i, (found, other, exact) in enumerate(zip(ours, torchs, truth, strict=True)):
        assert found.dtype == other.dtype
        assert_close_to_float64(found, other, exact, name=f"result {i}")


@pytest.fixture(params=["one chunk", "chunks of 128 rows"])
def long_chunks(request, monkeypatch):
    if request.param != "one chunk":
        monkeypatch.setattr(_linear_cross_entropy_ops, "_CHUNK_BYTES", {"cpu": 1, "cuda": 1})
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)
@pytest.mark.parametrize("classes", [7, 1000, 50257])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_vocabularies(classes, reduction, dtype, long_chunks, device):
    """A class count that no alignment likes among them; ignored rows; a bias; class weights and smoothing."""
    few = classes > 1000 and device == "cpu"  # torch's products in float16 would take most of a minute there
    if few and long_chunks != "one chunk":
        pytest.skip("so few rows are one chunk")
    for rows in (1, 9) if few else (1, 128, 300):
        x, w, b = (
            leaf(rows, 96, dtype=dtype, device=device),
            leaf(classes, 96, dtype=dtype, scale=0.1, device=device),
            leaf(classes, dtype=dtype, device=device),
        )
        target = torch.randint(0, classes, (rows,), device=device)
        compare_with_unfused(x, w, target, reduction=reduction)
        target[rows // 2 :: 7] = -100
        weight = torch.rand(classes, device=device).to(dtype)
        compare_with_unfused(
            x, w, target, linear_bias=b, weight=weight, label_smoothing=0.1, reduction="none" if rows == 1 else reduction
        )


@pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)
def test_probabilities(dtype, long_chunks, device):
    x, w = leaf(300, 64, dtype=dtype, device=device), leaf(1003, 64, dtype=dtype, scale=0.1, device=device)
    target = torch.randn(300, 1003, device=device).softmax(1).to(dtype).requires_grad_()
    for reduction in ("mean", "none"):
        compare_with_unfused(x, w, target, reduction=reduction, label_smoothing=0.1)


@pytest.mark.parametrize("dtype", NARROW_DTYPES, ids=str)
def test_positions(dtype, long_chunks, device):
    """The K-dimensional loss, against the reference."""
    made = (
        leaf(260, 32, dtype=dtype, device=device),
        leaf(17, 3, 32, dtype=dtype, device=device),
        leaf(17, 3, dtype=dtype, device=device),
    )
    target = torch.randint(0, 17, (260, 3), device=device)
    target[5, 1] = -100

    def run(module, convert):
        x, w, b = (convert(t.detach()).requires_grad_() for t in made)
        loss, lse = module.linear_cross_entropy(x, w, target, linear_bias=b, z_loss=0.01, return_lse=True)
        return loss, lse, *torch.autograd.grad(loss, (x, w, b))

    ours, plain = (run(module, torch.clone) for module in (flash_online, flash_online.reference))
    truth = run(flash_online.reference, torch.Tensor.double)
    for name, found, other, exact in zip(("loss", "lse", "x", "w", "b"), ours, plain, truth, strict=True):
        assert_close_to_float64(found, other, exact, name=name)


def test_an_accumulator_in_float32(monkeypatch, device):
    """More chunks than a 16-bit gradient may be rounded over: products that add to a float32 one."""
    monkeypatch.setattr(_linear_cross_entropy_ops, "_CHUNK_BYTES", {"cpu": 1, "cuda": 1})
    for dtype in (torch.bfloat16, torch.float16):
        x, w, target = (
            leaf(4096, 16, dtype=dtype, device=device),
            leaf(512, 16, dtype=dtype, device=device),
            torch.randint(0, 512, (4096,), device=device),
        )
        assert _linear_cross_entropy_ops.chunk_plan(4096, 512, 16, dtype, device, True) == (128, True)
        truth = torch.autograd.grad(unfused(x.double(), w.double(), target, reduction="sum"), w)[0]
        torchs = torch.autograd.grad(unfused(x, w, target, reduction="sum"), w)[0]
        ours = torch.autograd.grad(F.linear_cross_entropy(x, w, target, reduction="sum"), w)[0]
        assert_close_to_float64(ours, torchs, truth)
        assert error(ours, truth).rms < 1.5 * error(torchs, truth).rms


# --- the full function ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("lead", [(), (5,), (2, 5), (2, 1, 3), (2, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=str)
def test_everything_beside_the_reference(dtype, lead, reduction, soft, chunks, device):
    """Any leading dimensions, lse and z-loss; all incoming gradients differ."""
    for positions in ((),) if not lead else ((), (2, 3)):
        x, w, b = (leaf(*s, dtype=dtype, device=device) for s in ((*lead, 6), (7, *positions, 6), (7, *positions)))
        if soft:
            target = torch.rand(*lead, 7, *positions, dtype=dtype, device=device).requires_grad_()
        else:
            target = torch.randint(0, 7, (*lead, *positions), device=device)
            if target.numel() > 2:
                target.view(-1)[2] = -100
        leaves = (x, w, b, *([target] if soft else []))
        options = {
            "linear_bias": b,
            "weight": torch.rand(7, dtype=dtype, device=device),
            "reduction": reduction,
            "label_smoothing": 0.2,
        }
        results = []
        for module in (flash_online, reference):
            torch.manual_seed(3)
            both = module.linear_cross_entropy(x, w, target, **options, z_loss=0.1, return_lse=True)
            alone = module.linear_cross_entropy(x, w, target, **options, z_loss=0.1)
            cotangents = [torch.randn_like(t) for t in both]
            results.append(
                (
                    *both,
                    alone,
                    *torch.autograd.grad(both, leaves, cotangents, retain_graph=True),
                    *torch.autograd.grad(both[1], leaves[:3], cotangents[1], retain_graph=True),
                    *torch.autograd.grad(both[0], leaves, cotangents[0]),
                    *torch.autograd.grad(alone, leaves, cotangents[0]),
                )
            )
        for ours, expected in zip(*results, strict=True):
            torch.testing.assert_close(ours, expected, equal_nan=True)


def test_dtype_and_lse_are_the_accumulators(device):
    for dtype in (torch.float16, torch.bfloat16):
        (x, w), kwargs = problem(rows=300, hidden=64, classes=50, dtype=dtype, device=device)
        loss, lse = flash_online.linear_cross_entropy(
            x, w, **kwargs, return_lse=True, dtype=torch.float32, weight=torch.rand(50, device=device)
        )
        assert loss.dtype == lse.dtype == torch.float32 and lse.shape == (300,)
        logits = TF.linear(x, w, kwargs["linear_bias"])
        torch.testing.assert_close(lse, logits.float().logsumexp(1), rtol=1e-6, atol=1e-6)
        assert flash_online.linear_cross_entropy(x, w, **kwargs).dtype == dtype


def test_second_use_and_other_incoming_gradients(device):
    """Gradients that were returned do not change later, and those of the next backward pass are right."""
    for dtype in (torch.bfloat16, torch.float32):
        (x, w), kwargs = problem(dtype=dtype, device=device)
        loss = flash_online.linear_cross_entropy(x, w, **kwargs, dtype=torch.float32)
        first = torch.autograd.grad(loss, (x, w), retain_graph=True)
        kept = [g.clone() for g in first]
        second = torch.autograd.grad(loss * 4, (x, w), retain_graph=True)
        first[0].zero_()
        third = torch.autograd.grad(loss * -2, (x, w), retain_graph=True)
        last = torch.autograd.grad(loss, (x, w))
        for once, four, minus_two, again in zip(kept, second, third, last, strict=True):
            assert torch.equal(four, once * 4) and torch.equal(minus_two, once * -2) and torch.equal(again, once)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_an_incoming_gradient_is_not_rounded(device):
    """0.3 is 0.26% off in bfloat16, and every gradient would be if it were rounded."""
    (x, w), kwargs = problem(rows=64, hidden=64, classes=33, dtype=torch.bfloat16, device=device)
    truth = torch.autograd.grad(
        plain(x.double(), w.double(), kwargs["target"], linear_bias=kwargs["linear_bias"].double()), (x, w)
    )
    for keep in (False, True):
        loss = flash_online.linear_cross_entropy(x, w, **kwargs, dtype=torch.float32)
        for found, exact in zip(torch.autograd.grad(loss * 0.3, (x, w), retain_graph=keep), truth, strict=True):
            found, exact = found.double(), exact.double()
            assert abs((found * exact).sum() / exact.square().sum() - 0.3) < 0.3 * 0.001


def test_a_loss_scale_saves_float16(device):
    """In the mean of 4096 rows the gradient of each logit is below float16's smallest number, unless the loss is scaled."""
    torch.manual_seed(1)
    x, w, target = (
        leaf(4096, 8, dtype=torch.float16, device=device),
        leaf(512, 8, dtype=torch.float16, scale=0.02, device=device),
        torch.randint(0, 512, (4096,), device=device),
    )
    truth = torch.autograd.grad(plain(x.double(), w.double(), target), (x, w))
    scale = 2.0**14
    ours = torch.autograd.grad(flash_online.linear_cross_entropy(x, w, target, dtype=torch.float32) * scale, (x, w))
    torchs = torch.autograd.grad(plain(x, w, target).float() * scale, (x, w))
    for found, other, exact in zip(ours, torchs, truth, strict=True):
        assert_close_to_float64(found, other, exact * scale)


@pytest.mark.parametrize("scale", [0.25, 30.0])
def test_the_sum_over_chunks_keeps_its_accuracy(scale, monkeypatch, device):
    """A 16-bit gradient of linear_weight over 8 chunks in its own dtype, over more in float32."""
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        x, w, target = (
            leaf(2048, 48, dtype=dtype, device=device),
            leaf(160, 48, dtype=dtype, scale=0.1, device=device),
            torch.randint(0, 160, (2048,), device=device),
        )
        wide_x, wide_w = (t.detach().double().requires_grad_() for t in (x, w))
        truth = torch.autograd.grad(plain(wide_x, wide_w, target, reduction="sum") * scale, (wide_x, wide_w))
        torchs = torch.autograd.grad(plain(x, w, target, reduction="sum").float() * scale, (x, w))
        for rows, accumulator in ((2048, False), (256, False), (16, True)):
            of_rows(monkeypatch, rows)
            assert _linear_cross_entropy_ops.chunk_plan(2048, 160, 48, dtype, device, True) == (rows, accumulator)
            loss = flash_online.linear_cross_entropy(x, w, target, reduction="sum", dtype=torch.float32)
            ours = torch.autograd.grad(loss * scale, (x, w))
            for found, other, exact in zip(ours, torchs, truth, strict=True):
                assert_close_to_float64(found, other, exact, name=f"{rows} rows per chunk")
                # Rounding the sum after each of n chunks, k / n of the whole each time, and once for the scale, gives
                # sqrt((n + 1) / 2 + 1) times the error of one rounding.
                roundings = (2048 // rows + 1) / 2 if not accumulator else 1
                assert error(found, exact).rms < max(2.0, 1.1 * (roundings + 1) ** 0.5) * error(other, exact).rms


def test_plans_of_chunks():
    """Rows per chunk and the need for an accumulator, at the sizes that performance targets are set for and at the edges."""
    bfloat16, plan = torch.bfloat16, _linear_cross_entropy_ops.chunk_plan
    assert plan(4096, 128256, 4096, bfloat16, "cuda", True) == (2048, False)
    assert plan(16384, 128256, 4096, bfloat16, "cuda", True) == (2048, False)
    assert 2048 * 128256 * 2 < 512 << 20
    assert plan(32768, 128256, 4096, bfloat16, "cuda", True) == (4096, False)  # a longer chunk is less than an accumulator
    assert plan(1 << 20, 128256, 4096, bfloat16, "cuda", True) == (2048, True)
    assert plan(1 << 20, 128256, 4096, bfloat16, "cuda", False) == (2048, False)
    assert plan(1 << 20, 128256, 4096, torch.float32, "cuda", False) == (1024, False)
    assert plan(5000, 128256, 4096, bfloat16, "cuda", True) == (1792, False)  # three even chunks
    assert plan(100, 128256, 4096, bfloat16, "cuda", True) == (100, False)
    assert plan(100, 1 << 30, 4096, bfloat16, "cuda", True) == (100, False)
    assert plan(1000, 1 << 30, 1, bfloat16, "cuda", False) == (128, False)
    assert plan(0, 7, 4, bfloat16, "cpu", True)[0] == plan(3, 0, 4, bfloat16, "cpu", True)[0] // 3 == 1


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_of_a_chunk(reduction, dtype, monkeypatch):
    """Forward and backward hold the gradients and a chunk: 4 MiB here, where all logits were 64."""
    budget, size = 4 << 20, dtype.itemsize
    monkeypatch.setattr(_linear_cross_entropy_ops, "_CHUNK_BYTES", {"cpu": budget})
    x, w, target = leaf(4096, 32, dtype=dtype), leaf((16 << 10) // size, 32, dtype=dtype), torch.randint(0, 4096, (4096,))
    assert x.shape[0] * w.shape[0] * size == 64 << 20

    def call():
        x.grad = w.grad = None
        flash_online.linear_cross_entropy(x, w, target, reduction=reduction).sum().backward()
        return x.grad, w.grad

    gradients = (x.numel() + w.numel()) * size
    # In addition: some numbers per row; on the CPU a second copy of some rows; in 16 bits the accumulator and a product.
    others = 20 * 4096 * 4 + 2 * (1 << 20) + (0 if size == 4 else 6 * w.numel())
    call()
    x.grad = w.grad = None
    assert peak_extra_bytes(call) < gradients + 2 * budget + others
    with torch.no_grad():
        assert peak_extra_bytes(lambda: flash_online.linear_cross_entropy(x, w, target)) < budget + others


def test_same_bits_in_every_run(device):
    args, kwargs = problem(rows=600, hidden=40, classes=101, dtype=torch.bfloat16, device=device)
    runs = []
    for _ in range(2):
        loss = F.linear_cross_entropy(*args, **kwargs)
        runs.append((loss, *torch.autograd.grad(loss, (*args, kwargs["linear_bias"]))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


# --- derivatives ------------------------------------------------------------------------------------------------------------

TARGET = torch.tensor([2, -100, 5, 0, 1, 1, -100])
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.1, 1.5, 0.7], dtype=DOUBLE)
DERIVED = {
    "plain": {},
    "none": {"reduction": "none"},
    "options": {"weight": WEIGHT, "label_smoothing": 0.2, "z_loss": 0.1, "return_lse": True, "reduction": "sum"},
    "mean options": {"weight": WEIGHT, "label_smoothing": 0.2, "z_loss": 0.1},
    "none options": {"weight": WEIGHT, "label_smoothing": 0.2, "z_loss": 0.1, "return_lse": True, "reduction": "none"},
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("options", DERIVED.values(), ids=DERIVED.keys())
def test_first_and_second_derivatives(options, soft, monkeypatch):
    of_rows(monkeypatch, 2)
    inputs = [leaf(7, 3, dtype=DOUBLE), leaf(6, 3, dtype=DOUBLE), leaf(6, dtype=DOUBLE)]
    if soft:
        inputs.append(torch.rand(7, 6, dtype=DOUBLE).requires_grad_())

    def call(x, w, b, target=TARGET):
        return flash_online.linear_cross_entropy(x, w, target, linear_bias=b, **options)

    assert gradcheck(call, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(call, inputs, check_fwd_over_rev=True, fast_mode=True)


def test_class_weights_have_a_gradient_beside_probabilities():
    x, w, p, c = (
        leaf(7, 3, dtype=DOUBLE),
        leaf(6, 3, dtype=DOUBLE),
        torch.rand(7, 6, dtype=DOUBLE),
        WEIGHT.clone().requires_grad_(),
    )
    assert gradcheck(lambda x, w, c: flash_online.linear_cross_entropy(x, w, p, weight=c, label_smoothing=0.1), (x, w, c))


def test_torch_func():
    def scalar(module):
        return lambda x, w, b: module.linear_cross_entropy(x, w, TARGET, linear_bias=b, weight=WEIGHT, label_smoothing=0.1)

    ours, plain = scalar(flash_online), scalar(reference)
    inputs = tuple(torch.randn(s, dtype=DOUBLE) for s in ((7, 3), (6, 3), (6,)))
    tangents = tuple(torch.randn_like(t) for t in inputs)
    every = (0, 1, 2)
    torch.testing.assert_close(grad(ours, every)(*inputs), grad(plain, every)(*inputs))
    torch.testing.assert_close(jvp(ours, inputs, tangents), jvp(plain, inputs, tangents))
    torch.testing.assert_close(hessian(ours)(*inputs), hessian(plain)(*inputs))
    batch = torch.randn(4, 7, 3, dtype=DOUBLE)
    expected = torch.stack([grad(plain, 1)(x, *inputs[1:]) for x in batch])
    torch.testing.assert_close(vmap(grad(ours, 1), (0, None, None))(batch, *inputs[1:]), expected)
    expected = torch.stack([plain(x, *inputs[1:]) for x in batch])
    torch.testing.assert_close(vmap(ours, (0, None, None))(batch, *inputs[1:]), expected)


# --- torch.compile, export, override, explain --------------------------------------------------------------------------------


@pytest.mark.thin(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("options", DERIVED.values(), ids=DERIVED.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, DOUBLE], ids=str)
def test_compile(options, dtype, dynamic):
    inputs = [leaf(7, 3, dtype=dtype), leaf(6, 3, dtype=dtype), leaf(6, dtype=dtype)]

    def call(x, w, b):
        return flash_online.linear_cross_entropy(x, w, TARGET, linear_bias=b, **options)

    torch._dynamo.reset()
    results = []
    for function in (torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager"), call):
        made = function(*inputs)
        made = made if isinstance(made, tuple) else (made,)
        results.append((*made, *torch.autograd.grad([t.sum() for t in made], inputs)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, check_stride=True)


def test_dynamic_shapes_compile_once(device):
    count = 0

    def backend(graph, inputs):
        nonlocal count
        count += 1
        return graph.forward

    torch._dynamo.reset()
    loss = torch.compile(F.linear_cross_entropy, fullgraph=True, dynamic=True, backend=backend)
    for rows in (300, 500, 800):
        x, w, target = (
            torch.randn(rows, 4, device=device),
            torch.randn(rows + 3, 4, device=device),
            torch.arange(rows, device=device),
        )
        torch.testing.assert_close(loss(x, w, target), F.linear_cross_entropy(x, w, target))
    assert count == 1


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="Inductor needs a C++ compiler")
def test_inductor(device):
    leaves = leaf(30, 8, device=device), leaf(11, 8, device=device)
    target = torch.arange(30, device=device) % 11

    def step(x, w):
        return F.linear_cross_entropy(x * 2, w, target, label_smoothing=0.1) * 0.3

    torch._dynamo.reset()
    results = [f(*leaves) for f in (torch.compile(step, fullgraph=True), step)]
    torch.testing.assert_close(*((loss, *torch.autograd.grad(loss, leaves)) for loss in results))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_checkpoints_and_saved_tensors_elsewhere(reduction, device):
    """Tensors that the forward pass saves may be recomputed or lie in other memory until the backward pass."""
    leaves, target = (leaf(30, 8, device=device), leaf(11, 8, device=device)), torch.arange(30, device=device) % 11

    def step(x, w):
        return F.linear_cross_entropy(x, w, target, reduction=reduction).sum() * 2

    expected = torch.autograd.grad(step(*leaves), leaves)
    torch.testing.assert_close(torch.autograd.grad(checkpoint(step, *leaves, use_reentrant=False), leaves), expected)
    with torch.autograd.graph.save_on_cpu():
        loss = step(*leaves)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), expected)


def test_gradients_of_several_steps_add_up(device):
    """.grad takes the tensor that the backward pass returns, without a copy, and shares it with no other tensor."""
    x, w, target = leaf(30, 8, device=device), leaf(11, 8, device=device), torch.arange(30, device=device) % 11
    for _ in range(3):
        F.linear_cross_entropy(x, w, target).backward()
    expected = torch.autograd.grad(F.linear_cross_entropy(x, w, target), (x, w))
    torch.testing.assert_close([x.grad, w.grad], [3 * g for g in expected])


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(7, 6))

        def forward(self, x, target):
            return F.linear_cross_entropy(x, self.weight, target)

    head, length = Head(), torch.export.Dim("length", min=2, max=64)
    arguments = torch.randn(5, 6), torch.randint(0, 7, (5,))
    program = torch.export.export(head, arguments, dynamic_shapes=({0: length}, {0: length}), strict=strict)
    called = {str(node.target) for node in program.run_decompositions().graph.nodes}
    assert "flash_online.linear_cross_entropy_forward.default" in called
    x, target = torch.randn(9, 6), torch.randint(0, 7, (9,))
    torch.testing.assert_close(program.module()(x, target), head(x, target))


@needs_torchs
def test_override_and_torchs_module(device):
    module = torch.nn.LinearCrossEntropyLoss(6, 7, bias=True, label_smoothing=0.1, device=device)
    x, target = leaf(5, 6, device=device), torch.tensor([0, 6, -100, 2, 2], device=device)
    results = []
    for ours in (False, True):
        with flash_online.override() if ours else torch.enable_grad(), Operators() as seen:
            loss = module(x, target)
        assert seen.names == (["linear_cross_entropy_step"] if ours else [])
        results.append((loss, *torch.autograd.grad(loss, (x, *module.parameters()))))
    torch.testing.assert_close(*results)


def test_which_operators_run(device):
    """The forward pass computes the gradients where it may, and computes none where no tensor requires grad."""
    for dtype, options, wanted in (
        (torch.float32, {}, "step"),
        (torch.float32, {"return_lse": True}, "step"),
        (torch.float32, {"reduction": "none"}, "forward"),
        (torch.float16, {}, "forward"),
    ):
        args, kwargs = problem(dtype=dtype, device=device)
        with Operators() as seen:
            flash_online.linear_cross_entropy(*args, **kwargs, **options)
        assert seen.names == [f"linear_cross_entropy_{wanted}"]
        with Operators() as seen, torch.no_grad():
            flash_online.linear_cross_entropy(*args, **kwargs, **options)
        assert seen.names == ["linear_cross_entropy_forward"]


def test_explain_and_strict():
    (x, w), kwargs = problem()
    for function in (F.linear_cross_entropy, flash_online.linear_cross_entropy):
        found = flash_online.explain(function, x, w, **kwargs)
        assert found.ours and found.operators == ("linear_cross_entropy_forward",)
        assert found.extra["chunk of logits"] == 13 * 7 * 4
    vocabulary = torch.empty(1).expand(128256, 4096)
    big = flash_online.explain(
        F.linear_cross_entropy, torch.empty(1).expand(16384, 4096), vocabulary, torch.zeros(16384).long()
    )
    assert big.extra["chunk of logits"] <= _linear_cross_entropy_ops._CHUNK_BYTES["cpu"] + (128 * 128256 * 4)
    with flash_online.strict(), pytest.raises(RuntimeError, match="strict.*complex"):
        F.linear_cross_entropy(x.to(torch.complex64), w, **kwargs)
    with pytest.raises(NotImplementedError, match="linear_cross_entropy: input: expected dtype .*got torch.complex64"):
        flash_online.linear_cross_entropy(x.to(torch.complex64), w.to(torch.complex64), **kwargs)


@pytest.mark.forwards
def test_where_torch_has_none(monkeypatch, device):
    """As before torch 2.13: our function runs, override() does not add one to torch, and no call is forwarded to torch."""
    (x, w), kwargs = problem(device=device)
    monkeypatch.delitem(F.ORIGINALS, "linear_cross_entropy", raising=False)
    monkeypatch.delattr(TF, "linear_cross_entropy", raising=False)
    loss = F.linear_cross_entropy(x, w, **kwargs)
    torch.testing.assert_close(loss, reference.linear_cross_entropy(x, w, **kwargs))
    with flash_online.override():
        assert not hasattr(TF, "linear_cross_entropy")
    assert flash_online.explain(F.linear_cross_entropy, x, w, **kwargs).ours
    with pytest.raises(NotImplementedError):
        F.linear_cross_entropy(x.to_sparse(), w, **kwargs)
