"""linear_cross_entropy: softcap and scale of the logits, their argmax, the z term on its own, a loss in float32."""

from __future__ import annotations

import math

import pytest
import torch
from cases import leaf
from cases import linear_problem as problem
from oracle import Operators
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jvp, vmap

import flash_online
from flash_online import _linear_cross_entropy_ops, reference
from flash_online.testing import assert_close_to_float64, error, peak_extra_bytes

DOUBLE = torch.float64
NAN, INF = math.nan, math.inf
LOGITS = {
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.25},
    "both": {"softcap": 1.5, "scale": 3.0},
    "negative scale": {"softcap": 3.0, "scale": -0.7},
    "scale 0": {"scale": 0.0},
}
every_logits = pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS.keys())


@pytest.fixture(params=["one chunk", "chunks of 4 rows, blocks of 3"])
def chunks(request, monkeypatch):
    if request.param != "one chunk":
        small(monkeypatch, 4, 3)


def small(monkeypatch, rows, block):
    """Chunks of `rows` rows, of which `block` at a time are capped; on the CPU with a pitch that most rows do not fill."""
    monkeypatch.setattr(_linear_cross_entropy_ops, "_ROW_UNIT", rows)
    monkeypatch.setattr(_linear_cross_entropy_ops, "_CHUNK_BYTES", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr(_linear_cross_entropy_ops, "_PITCH_BYTES", {"cpu": 64, "cuda": 128})
    monkeypatch.setattr(_linear_cross_entropy_ops, "_CAP_BYTES", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr(_linear_cross_entropy_ops, "_CAP_ROWS", {"cpu": block, "cuda": block})


def results_of(module, leaves, target, **options):
    """Loss, lse, entropy and z term, the gradients of the first three under different incoming gradients, the loss's alone; and
    the argmax."""
    input, linear_weight, *bias = leaves
    options["linear_bias"] = bias[0] if bias else None
    wanted = [*leaves, *([target] if target.requires_grad else [])]
    more = {"return_lse": True, "return_z_loss": True, "return_argmax": True, "return_entropy": True}
    loss, lse, z_term, argmax, entropy = module.linear_cross_entropy(input, linear_weight, target, **more, **options)
    alone = module.linear_cross_entropy(input, linear_weight, target, **options)
    generator = torch.Generator().manual_seed(3)
    outputs = (loss, lse, entropy)
    cotangents = [torch.randn(t.shape, generator=generator, dtype=DOUBLE).to(t.device, t.dtype) for t in outputs]
    together = torch.autograd.grad(outputs, wanted, cotangents)
    return [*outputs, z_term, alone, *together, *torch.autograd.grad(alone, wanted, cotangents[0])], argmax


def test_a_scale_per_row_is_a_scale_of_each_row(chunks, device):
    """Values and gradients of rows of their own, in 16 bits too, for powers of 2."""
    scales = torch.tensor([0.5, 1.0, 2.0, 0.25, -1.0] * 3)[:13].to(device)
    for dtype in (torch.float32, torch.bfloat16):
        (x, w), kwargs = problem(dtype=dtype, device=device)
        for options in ({}, {"softcap": 2.0}, {"label_smoothing": 0.1, "z_loss": 0.1}):
            options = options | {"reduction": "none", "dtype": torch.float32}
            loss = flash_online.linear_cross_entropy(x, w, **kwargs, scale=scales, **options)
            (grad,) = torch.autograd.grad(loss.sum(), x)
            for row, scale in enumerate(scales.tolist()):
                alone = x[row : row + 1].detach().requires_grad_()
                one = {"target": kwargs["target"][row : row + 1], "linear_bias": kwargs["linear_bias"], "scale": scale}
                expected = flash_online.linear_cross_entropy(alone, w, **one, **options)
                torch.testing.assert_close(loss[row : row + 1], expected)
                torch.testing.assert_close(grad[row : row + 1], torch.autograd.grad(expected.sum(), alone)[0])


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_scale_per_row_beside_the_reference(soft, reduction, chunks, device):
    for positions, shape in (((), (13,)), ((3,), (13,))):
        (x, w), kwargs = problem(positions=positions, soft=soft, device=device)
        bias, target = kwargs["linear_bias"], kwargs["target"]
        options = {"scale": torch.rand(shape, device=device) + 0.5, "reduction": reduction, "z_loss": 0.1, "softcap": 3.0}
        ours, expected = (results_of(m, (x, w, bias), target, **options)[0] for m in (flash_online, reference))
        torch.testing.assert_close(ours, expected)
    x, w, target = leaf(2, 5, 6, device=device), leaf(7, 6, device=device), torch.randint(0, 7, (2, 5), device=device)
    scale = torch.rand(2, 5, device=device)
    ours, expected = (results_of(m, (x, w), target, scale=scale)[0] for m in (flash_online, reference))
    torch.testing.assert_close(ours, expected)
    results = [flash_online.linear_cross_entropy(x, w, target, scale=s) for s in (scale, scale.flatten(), scale.double())]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("top", [1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, DOUBLE], ids=str)
def test_top_log_probs(top, dtype, chunks, device):
    for positions, soft in (((), False), ((3,), False), ((), True)):
        (x, w), kwargs = problem(dtype=dtype, positions=positions, soft=soft, device=device)
        for options in ({}, {"softcap": 2.0, "scale": torch.rand(13, device=device)}, {"z_loss": 0.1, "reduction": "none"}):
            options = options | {"top_log_probs": top, "return_lse": True, "return_entropy": True}
            loss, lse, entropy, values, classes = flash_online.linear_cross_entropy(x, w, **kwargs, **options)
            plain = flash_online.linear_cross_entropy(x, w, **kwargs, **{**options, "top_log_probs": 0})
            assert all(torch.equal(a, b) for a, b in zip((loss, lse, entropy), plain, strict=True))
            assert values.dtype == lse.dtype and classes.dtype == torch.int64 and not values.requires_grad
            assert values.shape == classes.shape == (13, *positions, top)
            assert (classes.sort(-1).values.diff(dim=-1) > 0).all() and (values.diff(dim=-1) <= 0).all()
            _, _, _, expected, _ = reference.linear_cross_entropy(
                *(t.detach().double() for t in (x, w)), **{**kwargs, "linear_bias": kwargs["linear_bias"].detach().double()},
                **options,
            )  # fmt: skip
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(values.double(), expected, rtol=16 * eps, atol=16 * eps)
            if top == 7:
                torch.testing.assert_close(values.exp().sum(-1), torch.ones_like(lse))
            torch.autograd.grad(loss.sum() + entropy.sum(), x)


def test_wrong_scales_and_counts(device):
    (x, w), kwargs = problem(device=device)
    for wrong in (
        torch.ones(12, device=device),
        torch.ones(13, 1, device=device),
        torch.ones(13, dtype=torch.int64, device=device),
    ):
        with pytest.raises(flash_online.InvalidArgument, match=r"scale: expected a number, or a floating \[13\]"):
            flash_online.linear_cross_entropy(x, w, **kwargs, scale=wrong)
    with pytest.raises(flash_online.InvalidArgument, match="scale: expected a number without a gradient"):
        flash_online.linear_cross_entropy(x, w, **kwargs, scale=torch.ones(13, device=device, requires_grad=True))
    for wrong in (-1, 8):
        with pytest.raises(flash_online.InvalidArgument, match="top_log_probs: expected 0 to the number of classes, 7"):
            flash_online.linear_cross_entropy(x, w, **kwargs, top_log_probs=wrong)
    with pytest.raises(TypeError, match="top_log_probs: expected an int"):
        flash_online.linear_cross_entropy(x, w, **kwargs, top_log_probs=True)


# --- against the reference ---------------------------------------------------------------------------------------------------


@every_logits
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=str)
def test_beside_the_reference(logits, soft, reduction, dtype, chunks, device):
    for positions in ((), (3,)):
        (x, w), kwargs = problem(dtype=dtype, positions=positions, soft=soft, device=device)
        bias, target = kwargs["linear_bias"], kwargs["target"]
        options = logits | {"reduction": reduction, "z_loss": 0.1, "label_smoothing": 0.2}
        options["weight"] = torch.rand(7, dtype=dtype, device=device) if positions else None
        (ours, argmax), (expected, _) = (results_of(m, (x, w, bias), target, **options) for m in (flash_online, reference))
        torch.testing.assert_close(ours, expected)
        with torch.no_grad():
            flat = torch.nn.functional.linear(x, w.flatten(0, -2), bias.flatten()).unflatten(1, (7, *positions))
            flat = flat * options.get("scale", 1.0)
        torch.testing.assert_close(flat.gather(1, argmax.unsqueeze(1)).squeeze(1), flat.amax(1))
        assert argmax.dtype == torch.int64 and argmax.shape == (13, *positions)


@pytest.mark.parametrize("lead", [(), (5,), (2, 1, 3), (2, 0)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_leading_dimensions(lead, reduction, device):
    x, w, target = leaf(*lead, 6, device=device), leaf(7, 6, device=device), torch.randint(0, 7, lead, device=device)
    options = {"softcap": 1.5, "scale": 0.5, "z_loss": 0.1, "reduction": reduction}
    (ours, argmax), (expected, other) = (results_of(m, (x, w), target, **options) for m in (flash_online, reference))
    torch.testing.assert_close(ours, expected, equal_nan=True)
    assert argmax.shape == other.shape == lead


@pytest.mark.parametrize("classes", [1, 17, 1031])
@pytest.mark.parametrize(
    "logits", [{"softcap": 20.0}, {"softcap": 5.0, "scale": 0.25}, {"scale": 0.0625}, {"scale": "per row"}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_accuracy(logits, dtype, classes, device):
    """By the rule of the tolerance, and no farther off than plain torch, which rounds after each of its operations."""
    leaves = (
        leaf(300, 64, dtype=dtype, device=device),
        leaf(classes, 64, dtype=dtype, device=device),
        leaf(classes, dtype=dtype, device=device),
    )
    target = torch.randint(0, classes, (300,), device=device)
    target[7] = -100
    if "per row" in logits.values():  # numbers that 16 bits have not
        logits = {"scale": torch.linspace(0.3, 1.7, 300, device=device)}

    def run(module, convert):
        made = [convert(t.detach()).requires_grad_() for t in leaves]
        x, w, b = made
        loss, lse = module.linear_cross_entropy(x, w, target, linear_bias=b, return_lse=True, **logits)
        return loss, lse, *torch.autograd.grad(loss, made)

    ours, plain = (run(module, torch.clone) for module in (flash_online, reference))
    truth = run(reference, torch.Tensor.double)
    for name, found, other, exact in zip(("loss", "lse", "x", "w", "b"), ours, plain, truth, strict=True):
        size = 1 / 300 if name in ("x", "w", "b") else 1.0  # of one class: the gradient is a difference of equal numbers
        assert_close_to_float64(found, other, exact, name=name, magnitude=size)
        if found.numel() > 64 and dtype != torch.float32 and classes > 1:
            assert error(found, exact).rms <= 1.02 * error(other, exact).rms, name


def test_a_loss_in_float32_beside_16_bits(device):
    """It is that of the 16-bit logits, to float32's last digits, with class weights in 16 or 32 bits."""
    for dtype in (torch.float16, torch.bfloat16):
        (x, w), kwargs = problem(rows=300, hidden=64, classes=50, dtype=dtype, bias=False, device=device)
        for weight in (None, torch.rand(50, device=device), torch.rand(50, device=device).to(dtype)):
            for logits in ({}, {"scale": 0.5}, {"softcap": 16.0}):  # powers of 2: what is rounded has the same digits
                loss = flash_online.linear_cross_entropy(x, w, **kwargs, **logits, weight=weight, dtype=torch.float32)
                with torch.no_grad():
                    table = (x @ w.t() * logits.get("scale", 1.0)).double()
                    cap = logits.get("softcap", 0.0)
                    table = cap * torch.tanh(table / cap) if cap else table
                    wide = None if weight is None else weight.double()
                    truth = torch.nn.functional.cross_entropy(table, kwargs["target"], wide)
                assert loss.dtype == torch.float32
                assert abs(loss.item() / truth.item() - 1) < 5e-7
                grads = torch.autograd.grad(loss, (x, w))
                assert all(g.dtype == dtype for g in grads)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_ignored_rows_may_hold_anything(bad, reduction, dtype, chunks, device):
    (x, w), kwargs = problem(ignored=False, dtype=dtype, device=device)
    bias, target, kept = kwargs["linear_bias"], kwargs["target"], torch.ones(13, dtype=torch.bool, device=device)
    kept[[1, 5, 12]] = False
    target[~kept] = -100
    with torch.no_grad():
        x[~kept] = bad
    for options in (
        {"softcap": 2.0},
        {"scale": 0.5},
        {"softcap": 2.0, "scale": 0.5, "label_smoothing": 0.1},
        {"softcap": 2.0, "z_loss": 0.1, "return_z_loss": True},
    ):
        options = options | {"reduction": reduction, "linear_bias": bias}
        found, expected = (
            flash_online.linear_cross_entropy(rows, w, t, **options) for rows, t in ((x, target), (x[kept], target[kept]))
        )
        if options.get("return_z_loss"):
            (found, found_z), (expected, expected_z) = found, expected
            torch.testing.assert_close(found_z[kept] if reduction == "none" else found_z, expected_z)
        torch.testing.assert_close(found[kept] if reduction == "none" else found, expected)
        for create_graph in (False, True):
            ours, others = (
                torch.autograd.grad(loss.sum(), (x, w, bias), retain_graph=True, create_graph=create_graph)
                for loss in (found, expected)
            )
            assert (ours[0][~kept] == 0).all()
            if create_graph:  # plain products, in which the gradient 0 meets the row itself
                continue
            if dtype == torch.float32:
                torch.testing.assert_close(ours[1:], others[1:])
            else:  # other chunks round otherwise
                assert all(g.isfinite().all() for g in ours)


@pytest.mark.parametrize("sizes", [(0, 6, 7), (3, 0, 7), (0, 0, 7)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_sizes_of_zero(sizes, reduction, device):
    rows, hidden, classes = sizes
    (x, w), kwargs = problem(rows, hidden, classes, ignored=False, device=device)
    options = {"softcap": 1.0, "scale": 2.0, "z_loss": 0.1, "reduction": reduction}
    ours, expected = (
        results_of(m, (x, w, kwargs["linear_bias"]), kwargs["target"], **options)[0] for m in (flash_online, reference)
    )
    torch.testing.assert_close(ours, expected, equal_nan=True)


def test_large_logits_are_capped(device):
    """Logits of 1e30, and the loss of a capped row is at most twice the cap and the logarithm of the classes."""
    x, w = (torch.ones(5, 2, device=device) * 1e15).requires_grad_(), (torch.randn(7, 2, device=device) * 1e15).requires_grad_()
    target = torch.arange(5, device=device)
    loss = flash_online.linear_cross_entropy(x, w, target, softcap=30.0, reduction="none")
    assert loss.isfinite().all() and (loss <= 60 + math.log(7)).all()
    assert all((g == 0).all() for g in torch.autograd.grad(loss.sum(), (x, w)))


# --- argmax and the z term --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, DOUBLE], ids=str)
def test_argmax_is_that_of_the_logits(dtype, chunks, device):
    """For ignored rows too; with and without a gradient; under every reduction. Logits that are distinct in 16 bits."""
    w = torch.eye(7, device=device).to(dtype)
    x = torch.stack([torch.randperm(7) for _ in range(13)]).to(device, dtype)
    target = x.argmax(1)
    target[::3] = (target[::3] + 1) % 7
    target[5] = -100
    for options in ({}, {"softcap": 20.0}, {"scale": 0.5}, {"reduction": "none"}, {"softcap": 20.0, "z_loss": 0.1}):
        for leaves in ((x, w), (x.clone().requires_grad_(), w.clone().requires_grad_())):
            _, argmax = flash_online.linear_cross_entropy(*leaves, target, return_argmax=True, **options)
            assert torch.equal(argmax, x.argmax(1)) and not argmax.requires_grad
            assert int((argmax == target).sum()) == 7  # of 13 rows one is ignored, and every third has another target
    least = flash_online.linear_cross_entropy(x, w, target, return_argmax=True, scale=-1.0)[1]
    assert torch.equal(least, x.argmin(1))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_z_term(reduction, dtype, device):
    (x, w), kwargs = problem(dtype=dtype, device=device)
    options = kwargs | {"reduction": reduction, "softcap": 3.0, "dtype": torch.float32}
    loss, z_term = flash_online.linear_cross_entropy(x, w, **options, z_loss=0.1, return_z_loss=True)
    without, zero = flash_online.linear_cross_entropy(x, w, **options, return_z_loss=True)
    torch.testing.assert_close(loss - z_term, without)
    assert z_term.dtype == loss.dtype and z_term.shape == loss.shape and not z_term.requires_grad
    assert (zero == 0).all() and zero.shape == loss.shape
    with Operators() as seen:
        flash_online.linear_cross_entropy(x, w, **options, z_loss=0.1, return_z_loss=True, return_argmax=True)
    assert seen.names == [f"linear_cross_entropy_{'forward' if reduction == 'none' else 'step'}"]


def test_results_come_in_one_order(device):
    (x, w), kwargs = problem(device=device)
    flags = ("return_lse", "return_z_loss", "return_argmax")
    every = flash_online.linear_cross_entropy(x, w, **kwargs, z_loss=0.1, **dict.fromkeys(flags, True))
    for bits in range(8):
        chosen = [i for i in range(3) if bits >> i & 1]
        some = flash_online.linear_cross_entropy(x, w, **kwargs, z_loss=0.1, **{flags[i]: True for i in chosen})
        some = some if chosen else (some,)
        torch.testing.assert_close(some, (every[0], *(every[1 + i] for i in chosen)))


# --- derivatives, compilers, what runs --------------------------------------------------------------------------------------

TARGET = torch.tensor([2, -100, 5, 0, 1, 1, -100])
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.1, 1.5, 0.7], dtype=DOUBLE)
DERIVED = {
    "capped": {"softcap": 2.0},
    "scaled": {"scale": 0.3, "reduction": "sum"},
    "capped rows": {"softcap": 2.0, "scale": 0.7, "reduction": "none"},
    "options": {"weight": WEIGHT, "label_smoothing": 0.2, "z_loss": 0.1, "return_lse": True, "softcap": 1.5, "scale": -0.5},
}
derived = pytest.mark.parametrize("options", DERIVED.values(), ids=DERIVED.keys())


@pytest.mark.thin(2)
@pytest.mark.parametrize("soft", [False, True])
@derived
def test_first_and_second_derivatives(options, soft, monkeypatch):
    small(monkeypatch, 2, 1)
    inputs = [leaf(7, 3, dtype=DOUBLE), leaf(6, 3, dtype=DOUBLE), leaf(6, dtype=DOUBLE)]
    if soft:
        inputs.append(torch.rand(7, 6, dtype=DOUBLE).requires_grad_())

    def call(x, w, b, target=TARGET):
        return flash_online.linear_cross_entropy(x, w, target, linear_bias=b, **options)

    assert gradcheck(call, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(call, inputs, check_fwd_over_rev=True, fast_mode=True)


def test_torch_func():
    def scalar(module, **more):
        options = {"linear_bias": torch.ones(6, dtype=DOUBLE), "softcap": 1.5, "scale": 0.5, **more}
        return lambda x, w: module.linear_cross_entropy(x, w, TARGET, **options)

    ours, plain = scalar(flash_online), scalar(reference)
    inputs = tuple(torch.randn(s, dtype=DOUBLE) for s in ((7, 3), (6, 3)))
    tangents = tuple(torch.randn_like(t) for t in inputs)
    torch.testing.assert_close(grad(ours, (0, 1))(*inputs), grad(plain, (0, 1))(*inputs))
    torch.testing.assert_close(jvp(ours, inputs, tangents), jvp(plain, inputs, tangents))
    torch.testing.assert_close(hessian(ours)(*inputs), hessian(plain)(*inputs))
    batch, (_, w) = torch.randn(4, 7, 3, dtype=DOUBLE), inputs
    torch.testing.assert_close(vmap(ours, (0, None))(batch, w), torch.stack([plain(x, w) for x in batch]))
    found, argmax = vmap(grad(scalar(flash_online, return_argmax=True), has_aux=True), (0, None))(batch, w)
    torch.testing.assert_close(found, torch.stack([grad(plain)(x, w) for x in batch]))
    assert torch.equal(argmax, torch.stack([scalar(reference, return_argmax=True)(x, w)[1] for x in batch]))


@pytest.mark.thin(3)
@pytest.mark.parametrize("dynamic", [False, True])
@derived
@pytest.mark.parametrize("dtype", [torch.bfloat16, DOUBLE], ids=str)
def test_compile(options, dtype, dynamic):
    inputs = [leaf(7, 3, dtype=dtype), leaf(6, 3, dtype=dtype), leaf(6, dtype=dtype)]

    def call(x, w, b):
        return flash_online.linear_cross_entropy(x, w, TARGET, linear_bias=b, return_argmax=True, return_z_loss=True, **options)

    torch._dynamo.reset()
    results = []
    for function in (torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager"), call):
        made = function(*inputs)
        results.append((*made, *torch.autograd.grad([t.sum() for t in made if t.requires_grad], inputs)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, check_stride=True)


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
def test_autocast(lower, device):
    (x, w), kwargs = problem(rows=64, hidden=32, device=device)
    leaves, results = (x, w, kwargs["linear_bias"]), []
    for module in (flash_online, reference):
        with torch.autocast(device, lower):
            loss = module.linear_cross_entropy(x, w, **kwargs, softcap=5.0, scale=0.5)
        results.append((loss.float(), *torch.autograd.grad(loss, leaves)))
        assert loss.dtype == torch.float32 or module is reference
    for ours, others in zip(*results, strict=True):
        assert ours.dtype == others.dtype == torch.float32
        torch.testing.assert_close(ours, others, rtol=0.02, atol=0.02 * others.abs().max().item())


def test_a_call_without_options_makes_no_pass_more():
    """No scale, tanh or argmax of a table runs where none is asked for."""
    (x, w), kwargs = problem(rows=300, hidden=16, classes=50)

    def names(**options):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            result = flash_online.linear_cross_entropy(x, w, **kwargs, **options)
            loss = result[0] if isinstance(result, tuple) else result
            torch.autograd.grad(loss, (x, w))
        return {event.name for event in profile.events()}

    passes = {"aten::tanh", "aten::argmax", "aten::tanh_backward"}
    assert not passes & names() and not passes & names(scale=0.5)
    assert passes <= names(softcap=2.0, return_argmax=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_of_a_softcap(dtype, monkeypatch):
    """A chunk of 4 MiB and blocks of 512 KiB, two in 16 bits and one in 32, where all logits in float32 are 32 MiB."""
    monkeypatch.setattr(_linear_cross_entropy_ops, "_CHUNK_BYTES", {"cpu": 4 << 20})
    monkeypatch.setattr(_linear_cross_entropy_ops, "_CAP_BYTES", {"cpu": 512 << 10})
    x, w, target = leaf(4096, 32, dtype=dtype), leaf(2048, 32, dtype=dtype), torch.randint(0, 2048, (4096,))
    blocks = (512 << 10) * (1 if dtype == torch.float32 else 2)
    others = 30 * 4096 * 4 + (1 << 20)

    def call(softcap):
        return flash_online.linear_cross_entropy(x, w, target, softcap=softcap)

    with torch.no_grad():
        call(30.0)
        with_cap, without = (peak_extra_bytes(lambda c=c: call(c)) for c in (30.0, 0.0))
        assert with_cap - without < blocks + (64 << 10)
        assert with_cap < (4 << 20) + blocks + others
    plans = [flash_online.explain(flash_online.linear_cross_entropy, x, w, target, softcap=c) for c in (30.0, 0.0)]
    assert plans[0].extra["chunk of logits"] - plans[1].extra["chunk of logits"] == blocks

    def step():
        x.grad = w.grad = None
        call(30.0).backward()
        return x.grad, w.grad

    gradients = (x.numel() + w.numel()) * dtype.itemsize
    assert peak_extra_bytes(step) < gradients + 2 * (4 << 20) + blocks + others + 6 * w.numel()


def test_explain_counts_probabilities_in_another_dtype():
    x, w, target = torch.randn(9, 4).bfloat16(), torch.randn(5, 4).bfloat16(), torch.rand(9, 5).bfloat16()
    plan = flash_online.explain(flash_online.linear_cross_entropy, x, w, target, softcap=1.0)
    assert plan.operators == ("linear_cross_entropy_forward",)
    assert plan.extra["chunk of logits"] == 9 * 5 * 2 + 3 * 9 * 5 * 4  # logits; tanh, capped logits and targets in float32


BAD = {
    "softcap below 0": ({"softcap": -1.0}, "softcap"),
    "softcap inf": ({"softcap": INF}, "softcap"),
    "softcap NaN": ({"softcap": NAN}, "softcap"),
    "softcap a word": ({"softcap": "30"}, "softcap"),
    "softcap learned": ({"softcap": torch.ones((), requires_grad=True)}, "softcap.*requires_grad"),
    "scale inf": ({"scale": INF}, "scale"),
    "scale NaN": ({"scale": NAN}, "scale"),
    "scale None": ({"scale": None}, "scale"),
    "scale learned": ({"scale": torch.ones((), requires_grad=True)}, "scale.*requires_grad"),
    "return_argmax": ({"return_argmax": 1}, "return_argmax"),
    "return_z_loss": ({"return_z_loss": None}, "return_z_loss"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_the_argument(name):
    options, words = BAD[name]
    (x, w), kwargs = problem()
    with pytest.raises((flash_online.InvalidArgument, TypeError), match=words):
        flash_online.linear_cross_entropy(x, w, **kwargs, **options)


def test_no_class_has_no_argmax():
    x, w, target = torch.randn(3, 6), torch.randn(0, 6), torch.full((3,), -100)
    with pytest.raises(flash_online.InvalidArgument, match="return_argmax"):
        flash_online.linear_cross_entropy(x, w, target, return_argmax=True)
