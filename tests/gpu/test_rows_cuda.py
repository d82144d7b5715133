"""logsumexp, cross_entropy and topk_softmax on CUDA against float64, and properties of all row kernels: every kind of row
(register rows of lanes, of a CTA and of a cluster; split rows; rows of any strides), any alignment, equal bits in every run and
in any batch, CUDA graphs."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from test_cuda import INF, NAN, gpu, missing

import flash_online
from flash_online.testing import LAYOUTS, assert_close_to_float64, lay_out

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
TF = torch.nn.functional

# On both sides of every change of the row group, in vectors of 4 and of 8 elements; lengths after which the next row is not
# aligned to 16 bytes; the longest row kept in registers or shared memory, and the first split row.
CLASSES = [1, 3, 64, 65, 127, 130, 256, 257, 513, 1024, 1031, 2048, 2049, 4099, 8192, 8195, 16384, 16390, 32771, 65537, 131073]
LONG = [262143, 524288, 524299, 1_000_003]


@pytest.fixture(autouse=True)
def ours_alone():
    with flash_online.strict():
        yield


def gradients(outputs, inputs, grads):
    return torch.autograd.grad(outputs, inputs, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)])


def leaf(x, convert):
    return convert(x.detach()).requires_grad_() if x.is_floating_point() else x


def wide_as_possible(x):
    return x.double() if x.is_floating_point() else x


def compare_logsumexp(x, dim):
    grad = torch.randn([n for i, n in enumerate(x.shape) if i != dim % x.dim()], device="cuda").to(x.dtype)

    def run(function, convert):
        y = leaf(x, convert)
        out = function(y, dim)
        return out, gradients([out], [y], [grad])[0]

    ours = run(flash_online.logsumexp, lambda t: t)
    theirs, truth = run(torch.logsumexp, lambda t: t), run(torch.logsumexp, wide_as_possible)
    assert ours[0].dtype == x.dtype and ours[1].dtype == x.dtype
    for what, a, b, c in zip(("lse", "gradient"), ours, theirs, truth, strict=True):
        assert_close_to_float64(a, b, c, name=f"{what} of {x.dtype}{list(x.shape)} {x.stride()}, {dim}", magnitude=1.0)


def reference_loss(x, target, weight, options, z_loss=0.0):
    """torch's loss, lse and z-loss."""
    weight = None if weight is None else weight.to(x.dtype)
    target = target.to(x.dtype) if target.is_floating_point() else target
    loss = TF.cross_entropy(x, target, weight, **options)
    lse = torch.logsumexp(x, 1)
    if z_loss:
        kept = lse if target.is_floating_point() else lse[target != options.get("ignore_index", -100)]
        if options.get("reduction") == "none":
            keep = torch.ones_like(lse, dtype=torch.bool) if target.is_floating_point() else target != -100
            loss = loss + z_loss * torch.where(keep, lse, 0).square()
        else:
            loss = loss + z_loss * (kept.square().mean() if options.get("reduction", "mean") == "mean" else kept.square().sum())
    return loss, lse


def compare_loss(x, target, weight=None, z_loss=0.0, **options):
    """Loss, lse and every gradient beside torch's and float64's; compared in float32, whatever the logits are."""
    given = [x, target] if target.is_floating_point() else [x]
    grads = None
    results = []
    for name, convert in (("ours", lambda t: t), ("torch", lambda t: t), ("truth", wide_as_possible)):
        leaves = [leaf(t, convert) for t in given]
        y, t = leaves[0], leaves[1] if len(leaves) > 1 else target
        if name == "ours":
            outputs = flash_online.cross_entropy(y, t, weight, z_loss=z_loss, return_lse=True, dtype=torch.float32, **options)
        else:
            outputs = reference_loss(y, t, weight, options, z_loss)
        if grads is None:
            grads = [torch.randn(o.shape, device="cuda") for o in outputs]
        results.append([*outputs, *gradients(outputs, leaves, grads)])
    ours, theirs, truth = results
    rows = x.numel() / max(x.shape[1], 1)
    size = x.detach().double()
    size = size[size.isfinite()].abs().max().item() if size.isfinite().any() else 0.0
    mean = options.get("reduction", "mean") == "mean"
    for i, (a, b, c) in enumerate(zip(ours, theirs, truth, strict=True)):
        label = f"result {i} (loss, lse, gradients) of {x.dtype}{list(x.shape)} {x.stride()} {options} z {z_loss}"
        magnitude = size if i < 2 else max(1 / rows if mean else 1.0, *(g.abs().max().item() for g in grads[1:]))
        assert_close_to_float64(a, b.to(a.dtype), c, name=label, magnitude=magnitude)


def indices(x, ignored=True):
    target = torch.randint(0, x.shape[1], x.shape[:1] + x.shape[2:], device="cuda")
    if ignored and target.numel() > 2:
        target.view(-1)[1] = -100
    return target


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", CLASSES)
def test_lengths(classes, dtype):
    x = gpu(5, classes, dtype=dtype)
    compare_logsumexp(x, 1)
    compare_loss(x, indices(x), reduction="none")
    compare_loss(x, indices(x), torch.rand(classes, device="cuda"), label_smoothing=0.1, reduction="none")
    compare_loss(x, torch.rand(x.shape, device="cuda").to(dtype), reduction="none", label_smoothing=0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", LONG)
def test_long_rows(classes, dtype):
    x = gpu(2, classes, dtype=dtype)
    compare_logsumexp(x, 1)
    compare_loss(x, indices(x), reduction="none")
    compare_loss(x, indices(x), torch.rand(classes, device="cuda"), label_smoothing=0.1, reduction="none")
    compare_loss(x, torch.rand(x.shape, device="cuda").to(dtype) / classes, reduction="none")
    for function in (flash_online.softmax, flash_online.log_softmax):
        y = leaf(x, lambda t: t)
        out = function(y, 1)
        exact = getattr(torch, function.__name__)(x.double(), 1)
        theirs = getattr(torch, function.__name__)(x, 1)
        assert_close_to_float64(out, theirs, exact, name=function.__name__)
        grad = torch.randn_like(out)
        z = leaf(x, wide_as_possible)
        (exact,) = gradients([getattr(torch, function.__name__)(z, 1)], [z], [grad])
        w = leaf(x, lambda t: t)
        (theirs,) = gradients([getattr(torch, function.__name__)(w, 1)], [w], [grad])
        assert_close_to_float64(gradients([out], [y], [grad])[0], theirs, exact, name=f"gradient of {function.__name__}")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["indices", "probabilities"])
def test_loss_options(reduction, z_loss, smoothing, weighted, kind):
    for shape in ((90, 130), (4, 130, 5), (3, 7001)):
        x = gpu(*shape)
        target = indices(x) if kind == "indices" else torch.rand(shape, device="cuda")
        weight = torch.rand(shape[1], device="cuda") if weighted else None
        compare_loss(x, target, weight, z_loss, reduction=reduction, label_smoothing=smoothing)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(layout, dtype):
    for shape in ((6, 1100), (3, 40, 70), (3, 11, 2, 5)):
        x = lay_out(gpu(*shape, dtype=dtype), layout)
        for dim in range(len(shape)):
            compare_logsumexp(x, dim)
        compare_loss(x, indices(x), reduction="none")
        compare_loss(x, lay_out(torch.rand(shape, device="cuda").to(dtype), layout), reduction="none", label_smoothing=0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_alignment(dtype):
    """Rows that start at each element of 16 bytes and of 32."""
    storage = gpu(9000, dtype=dtype)
    for function in (flash_online.softmax, flash_online.log_softmax):
        for classes in (1, 5, 31, 200, 1500, 4100):
            for start in range(17):
                x = storage[start : start + 2 * classes].view(2, classes)
                assert torch.equal(function(x, 1), function(x.clone(), 1)), (classes, start)
    for start in range(17):
        x = storage[start : start + 8400].view(2, 4200)
        assert torch.equal(flash_online.logsumexp(x, 1), flash_online.logsumexp(x.clone(), 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [4, 3000, 40000, 600000])
def test_not_finite(classes, dtype):
    rows = torch.full((6, classes), -3.0, device="cuda")
    rows[0] = -INF
    rows[1, 2] = INF
    rows[2, [1, 3]] = torch.tensor([INF, NAN], device="cuda")
    rows[3, 0] = NAN
    rows[4, 1:] = -INF
    for x in (rows.to(dtype), rows.to(dtype).t().contiguous().t()):
        torch.testing.assert_close(flash_online.logsumexp(x, 1), torch.logsumexp(x.float(), 1).to(dtype), equal_nan=True)
        for name in ("softmax", "log_softmax"):
            torch.testing.assert_close(getattr(flash_online, name)(x, 1), getattr(torch, name)(x, 1), equal_nan=True)
        target = torch.zeros(6, dtype=torch.int64, device="cuda")
        loss, lse = flash_online.cross_entropy(x, target, reduction="none", return_lse=True)
        torch.testing.assert_close(loss, TF.cross_entropy(x, target, reduction="none"), equal_nan=True)
        torch.testing.assert_close(lse, torch.logsumexp(x.float(), 1), equal_nan=True)


def test_ignored_rows_have_no_gradient():
    for classes in (7, 5000):
        x, target = gpu(5, classes), torch.tensor([1, -100, 2, -100, 6], device="cuda")
        x[1], x[3] = NAN, INF
        x.requires_grad_()
        loss = flash_online.cross_entropy(x, target, torch.rand(classes, device="cuda"), label_smoothing=0.1, z_loss=0.1)
        (grad,) = torch.autograd.grad(loss, x)
        assert loss.isfinite() and (grad[[1, 3]] == 0).all() and grad.isfinite().all()


def test_target_out_of_range_is_a_device_assert():
    program = (
        "import torch, flash_online\n"
        "x = torch.randn(4, 10, device='cuda')\n"
        "flash_online.cross_entropy(x, torch.tensor([0, 1, 10, 2], device='cuda'))\n"
        "torch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "out of bounds" in done.stderr and "device-side assert" in done.stderr, done.stderr[-500:]


OPERATORS = {
    "logsumexp": lambda x, t: [flash_online.logsumexp(x, 1)],
    "cross_entropy": lambda x, t: list(flash_online.cross_entropy(x, t, reduction="none", return_lse=True)),
    "softmax": lambda x, t: [flash_online.softmax(x, 1)],
}


def forward_and_backward(function, x, target):
    x = x.detach().requires_grad_()
    outputs = function(x, target)
    outputs = [o for o in outputs if o.is_floating_point()]
    return [*(o.detach() for o in outputs), *torch.autograd.grad([o.sum() for o in outputs], x)]


@pytest.mark.parametrize("function", OPERATORS.values(), ids=OPERATORS)
@pytest.mark.parametrize("classes", [100, 1001, 4001, 40001, 300000, 1_000_001])
def test_same_bits_in_every_run_and_any_batch(function, classes):
    x = gpu(5, classes)
    target = indices(x, ignored=False)
    first = forward_and_backward(function, x, target)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, forward_and_backward(function, x, target), strict=True))
    for row in range(5):
        alone = forward_and_backward(function, x[row : row + 1].clone(), target[row : row + 1])
        assert all(torch.equal(a[row : row + 1], b) for a, b in zip(first, alone, strict=True))


@pytest.mark.parametrize("classes", [33, 4000, 20000])
def test_zeros_are_equal(classes):
    """-0 and 0 are found in the order of their indices."""
    x = torch.full((1, classes), -1.0, device="cuda")
    x[0, 5:25] = torch.tensor([-0.0, 0.0], device="cuda").repeat(10)
    assert flash_online.topk_softmax(x, 20)[1].tolist() == [list(range(5, 25))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, classes", [(700, 40000), (500, 70001), (150, 200_000)], ids=str)
def test_more_rows_than_room(rows, classes, dtype):
    """A cluster that takes several rows one after another gives each the result that it has alone; aligned and unaligned rows
    alternate."""
    x, grad, target = gpu(rows, classes, dtype=dtype), gpu(rows, classes, dtype=dtype), torch.arange(rows, device="cuda")

    def run(x, grad, target):
        y, z = leaf(x, lambda t: t), leaf(x, lambda t: t)
        out, loss = flash_online.softmax(y, 1), flash_online.cross_entropy(z, target, reduction="none")
        return out.detach(), *gradients([out], [y], [grad]), loss.detach(), *gradients([loss], [z], [torch.ones_like(loss)])

    few = 8
    parts = [run(*tensors) for tensors in zip(x.split(few), grad.split(few), target.split(few), strict=True)]
    for name, whole, pieces in zip(("y", "its", "loss", "its"), run(x, grad, target), zip(*parts, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(pieces)), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["indices", "weighted", "smoothed", "probabilities"])
def test_reduced_losses(kind, reduction, dtype):
    """The loss that is one operator in each direction: rows for one CTA and for several, with a gradient other than 1."""
    for shape in ((90, 130), (4, 130, 5), (3, 40000), (40000, 17)):
        x = gpu(*shape, dtype=dtype)
        target = torch.rand(shape, device="cuda").to(dtype) if kind == "probabilities" else indices(x)
        weight = torch.rand(shape[1], device="cuda").to(dtype) if kind == "weighted" else None
        options = {"reduction": reduction, "label_smoothing": 0.1 if kind == "smoothed" else 0.0}
        results = []
        for function, convert in (
            (flash_online.cross_entropy, lambda t: t),
            (TF.cross_entropy, lambda t: t),
            (TF.cross_entropy, wide_as_possible),
        ):
            y = leaf(x, convert)
            loss = function(y, convert(target), None if weight is None else convert(weight), **options)
            results.append((loss.detach(), *gradients([loss], [y], [torch.full_like(loss, 0.75)])))
        rows = x.numel() / shape[1]
        for i, (a, b, c) in enumerate(zip(*results, strict=True)):
            magnitude = c.abs().max().item() if i == 0 else 1 / rows if reduction == "mean" else 1.0
            assert_close_to_float64(a, b, c, name=f"{('loss', 'gradient')[i]} of {dtype}{list(shape)}", magnitude=magnitude)


@pytest.mark.parametrize("function", OPERATORS.values(), ids=OPERATORS)
@pytest.mark.parametrize("classes", [200, 5000, 100_000, 1_200_000])
def test_cuda_graph(function, classes):
    x, target = torch.zeros(4, classes, device="cuda", requires_grad=True), torch.zeros(4, dtype=torch.int64, device="cuda")
    forward_and_backward(function, x, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [o for o in function(x, target) if o.is_floating_point()]
        (grad,) = torch.autograd.grad([o.sum() for o in outputs], x)
    for _ in range(2):
        with torch.no_grad():
            x.copy_(gpu(4, classes))
        target.copy_(indices(x, ignored=False))
        graph.replay()
        expected = forward_and_backward(function, x, target)
        assert all(torch.equal(a, b) for a, b in zip([*outputs, grad], expected, strict=True))


def test_second_derivatives():
    x = gpu(3, 40).requires_grad_()
    target = indices(x, ignored=False)
    for function in (lambda x: flash_online.cross_entropy(x, target), lambda x: flash_online.logsumexp(x, 1).sum()):
        (grad,) = torch.autograd.grad(function(x), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), x)
        y = x.detach().double().requires_grad_()
        other = TF.cross_entropy(y, target) if "cross_entropy" in function.__code__.co_names else torch.logsumexp(y, 1).sum()
        (grad,) = torch.autograd.grad(other, y, create_graph=True)
        (expected,) = torch.autograd.grad(grad.square().sum(), y)
        torch.testing.assert_close(second.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(4, 9), (3, 2000)], ids=str)
def test_opcheck(shape):
    ops, x = torch.ops.flash_online, gpu(*shape, dtype=torch.bfloat16)
    target = indices(x)
    torch.library.opcheck(ops.logsumexp_forward.default, (x, 1))
    torch.library.opcheck(ops.logsumexp_backward.default, (torch.randn(shape[0], device="cuda"), x, 1))
    torch.library.opcheck(ops.cross_entropy_forward.default, (x, target, None, -100, 0.1))
    grads = torch.randn(shape[0], device="cuda")
    torch.library.opcheck(ops.cross_entropy_backward.default, (grads, grads, x, target, None, -100, 0.1, False))
    torch.library.opcheck(ops.cross_entropy_loss.default, (x, target, None, -100, 0.1, True, torch.bfloat16))
    number = torch.ones([], device="cuda")
    torch.library.opcheck(ops.cross_entropy_loss_backward.default, (number, 3 * number, x, target, None, -100, 0.1))


def test_more_elements_than_31_bits_count():
    shape = ((1 << 21) + 3, 1025)
    if torch.cuda.mem_get_info()[0] < 4 * math.prod(shape) * 2:
        pytest.skip("needs more free GPU memory")
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target = indices(x, ignored=False)
    loss = flash_online.cross_entropy(x, target, reduction="none", dtype=torch.float32)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    for rows in (slice(0, 3), slice(-3, None)):
        y = x[rows].detach().float().requires_grad_()
        expected = TF.cross_entropy(y, target[rows], reduction="none")
        torch.testing.assert_close(loss[rows], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(grad[rows].float(), torch.autograd.grad(expected.sum(), y)[0], rtol=1e-2, atol=1e-4)


# --- topk_softmax ------------------------------------------------------------------------------------------------------------


def compare_topk(x, k, dim=-1, **options):
    """Values, indices and gradient beside float64's; equal elements in any order."""
    y = x.detach().requires_grad_()
    probabilities, at = flash_online.topk_softmax(y, k, dim, **options)
    exact = torch.softmax(x.double(), dim)
    largest = exact.topk(k, dim).values
    assert at.dtype == torch.int64 and probabilities.dtype == options.get("dtype", x.dtype)
    label = f"{x.dtype}{list(x.shape)} {x.stride()} {k} {dim} {options}"
    assert k < 2 or (at.sort(dim).values.diff(dim=dim) > 0).all(), f"an index twice: {label}"
    z = x.detach().double().requires_grad_()
    chosen = torch.softmax(z, dim).gather(dim, at)
    torch.testing.assert_close(chosen, largest, rtol=1e-9, atol=0.0, msg=lambda m: f"{label}: {m}")
    theirs = torch.softmax(x, dim, dtype=probabilities.dtype).gather(dim, at)
    if options.get("renormalize"):
        chosen, theirs = chosen / chosen.sum(dim, keepdim=True), theirs / theirs.sum(dim, keepdim=True)
    assert_close_to_float64(probabilities, theirs, chosen, name=label)
    grad = torch.randn_like(probabilities)
    (ours,) = torch.autograd.grad(probabilities, y, grad)
    (truth,) = torch.autograd.grad(chosen, z, grad.double())
    w = x.detach().requires_grad_()
    plain = torch.softmax(w, dim, dtype=probabilities.dtype).gather(dim, at)
    plain = plain / plain.sum(dim, keepdim=True) if options.get("renormalize") else plain
    (theirs,) = torch.autograd.grad(plain, w, grad)
    rounding = max(x.dtype, probabilities.dtype, key=lambda d: torch.finfo(d).eps)
    assert_close_to_float64(ours, theirs, truth, rounding, name=f"gradient, {label}", magnitude=1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [1, 5, 33, 127, 1000, 4001, 8192, 8200, 16385, 50257, 100_000, 1_000_003])
def test_topk_lengths(classes, dtype):
    x = gpu(5, classes, dtype=dtype)
    for k in {1, min(5, classes), min(30, classes), min(32, classes)}:
        compare_topk(x, k)
    compare_topk(x, min(7, classes), renormalize=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [0, 2, 33, 40])
@pytest.mark.parametrize("renormalize", [False, True])
def test_topk(k, renormalize, dtype):
    for shape, dim in (((4, 40), -1), ((40, 3), 0), ((2, 40, 3), 1)):
        compare_topk(gpu(*shape, dtype=dtype), k, dim, renormalize=renormalize)


@pytest.mark.parametrize("k", [50, 1000, 2048, 2049, 5000])
@pytest.mark.parametrize("renormalize", [False, True])
def test_topk_of_many(k, renormalize):
    compare_topk(gpu(3, 50257), k, renormalize=renormalize)
    compare_topk(gpu(3, 5000), k, renormalize=renormalize)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_topk_layouts(layout):
    x = lay_out(gpu(6, 35, 20), layout)
    for dim in range(3):
        compare_topk(x, 4, dim)
    compare_topk(lay_out(gpu(5, 3001, dtype=torch.float16), layout), 9, dtype=torch.float32)


@pytest.mark.parametrize("classes", [100, 3000, 40000])
def test_topk_of_awkward_orders(classes):
    """Ascending rows, where every element is a candidate; equal elements; all candidates in one lane, or in the last vector."""
    x = torch.arange(2 * classes, device="cuda", dtype=torch.float32).view(2, classes) / classes
    for k in (1, 5, 32, 60):
        compare_topk(x, k)
        compare_topk(x.flip(1), k)
        compare_topk(torch.zeros_like(x), k)
        compare_topk((x * 3).floor(), k)
        spikes = torch.zeros_like(x)
        spikes[:, :: classes // 60] += 3
        compare_topk(spikes, k)
        spikes[:, -3:] = torch.arange(3.0, 6.0, device="cuda")
        compare_topk(spikes, k)


@pytest.mark.parametrize("classes", [4, 300, 9000, 40000])
@pytest.mark.parametrize("k", [3, 4])
def test_topk_not_finite(classes, k):
    x = torch.full((6, classes), -INF, device="cuda")
    x[0, 1], x[0, 3] = 2.0, 1.0
    x[2, 0], x[2, 1], x[2, 2] = NAN, 1.0, 2.0
    x[3, 0], x[3, 2] = INF, 5.0
    x[4] = NAN
    x[5] = INF
    probabilities, at = flash_online.topk_softmax(x, k)
    torch.testing.assert_close(probabilities[0], torch.softmax(x[0], 0).topk(k).values)
    assert probabilities[1:].isnan().all()
    assert ((at >= 0) & (at < classes)).all() and all(len(set(row)) == k for row in at.tolist())
    assert at[2, 0] == 0 and at[3, 0] == 0


@pytest.mark.parametrize("classes", [1000, 20000, 300_000])
def test_topk_same_bits_in_every_run_and_any_batch(classes):
    x = gpu(5, classes)
    for k in (5, 32, 100):
        first = flash_online.topk_softmax(x, k)
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(first, flash_online.topk_softmax(x, k), strict=True))
        for row in range(5):
            alone = flash_online.topk_softmax(x[row : row + 1].clone(), k)
            assert all(torch.equal(a[row : row + 1], b) for a, b in zip(first, alone, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, classes", [(4000, 1700), (1500, 17001), (40, 300_003)], ids=str)
def test_topk_of_more_rows_than_room(rows, classes, dtype):
    """A CTA that takes several rows, or pieces of them, gives each the result that it has alone; aligned and unaligned rows
    alternate, and between others there are rows of equal elements, which have far too many candidates."""
    x = gpu(rows, classes, dtype=dtype)
    x[3::7, : classes // 2] = 2.0
    for k in (5, 31):
        whole = flash_online.topk_softmax(x, k)
        assert torch.equal(x.gather(1, whole[1]), x.topk(k, 1).values)
        assert (whole[1].sort(1).values.diff(dim=1) > 0).all()
        for some in (slice(0, 8), slice(rows // 2, rows // 2 + 8), slice(rows - 8, rows)):
            alone = flash_online.topk_softmax(x[some].clone(), k)
            assert all(torch.equal(a[some], b) for a, b in zip(whole, alone, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_topk_of_any_alignment(dtype):
    storage = gpu(70000, dtype=dtype)
    for classes in (300, 3001, 17003, 34001):
        for start in range(17):
            x = storage[start : start + 2 * classes].view(2, classes)
            for a, b in zip(flash_online.topk_softmax(x, 9), flash_online.topk_softmax(x.clone(), 9), strict=True):
                assert torch.equal(a, b), (classes, start)


@pytest.mark.parametrize("in_graph", [False, True])
def test_kernels_that_start_early_wait_for_what_they_read(in_graph):
    """One buffer, written and read again and again without a pause, by our kernels and by torch's."""
    for rows, classes in ((3000, 1000), (2000, 4000), (500, 40000)):
        x, target = gpu(rows, classes), torch.arange(rows, device="cuda") % classes

        def chain(x=x, target=target):
            y, results = x.clone(), []
            for _ in range(8):
                results += [*flash_online.topk_softmax(y, 5), flash_online.cross_entropy(y, target)]
                y.copy_(flash_online.log_softmax(y, 1) * 1.5)
                results += [flash_online.logsumexp(y, 1), flash_online.topk_softmax(y, 5)[0]]
                y = flash_online.softmax(flash_online.log_softmax(y, 1), 1).mul_(3)
            return [*results, y]

        with pytest.MonkeyPatch.context() as patch:
            for name in ("topk_softmax", "cross_entropy", "log_softmax", "logsumexp", "softmax"):
                function = getattr(flash_online, name)

                def waiting(*args, function=function):
                    torch.cuda.synchronize()
                    result = function(*args)
                    torch.cuda.synchronize()
                    return result

                patch.setattr(flash_online, name, waiting)
            expected = chain()
        got = chain()
        if in_graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = chain()
            graph.replay()
            graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), (rows, classes)


def test_topk_in_a_graph_and_opcheck():
    ops, x = torch.ops.flash_online, gpu(4, 100_000)
    flash_online.topk_softmax(x, 5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = flash_online.topk_softmax(x, 5)
    for _ in range(2):
        x.copy_(gpu(4, 100_000))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(result, flash_online.topk_softmax(x, 5), strict=True))
    for k in (3, 40):
        x = gpu(4, 50, dtype=torch.bfloat16)
        torch.library.opcheck(ops.topk_softmax_forward.default, (x, k, 1, False, torch.float32))
        p, at = ops.topk_softmax_forward(x, k, 1, False, torch.float32)
        torch.library.opcheck(ops.topk_softmax_backward.default, (torch.randn_like(p), p, at, x, 1, False))
