"""First and second derivatives, forward mode and torch.func, in float64 by finite differences and against the reference."""

from __future__ import annotations

import functools

import pytest
import torch
from cases import OPTIONS
from oracle import Attention, Packed
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import flash_online
import flash_online.functional as F
from flash_online import _attention_derivatives, reference

DOUBLE = torch.float64
ATTENTION = {**OPTIONS, "dropout": {"dropout_p": 0.4}, "dropout with sinks": {"dropout_p": 0.4, "sinks": True}}


def randn(*shape, requires_grad=True, device="cpu"):
    return torch.randn(shape, dtype=DOUBLE, requires_grad=requires_grad, device=device)


def small(options, device="cpu"):
    """An attention of five keys as a function of its differentiable tensors, and these tensors."""
    problem = Attention.of(options, dtype=DOUBLE, batch=(1,), heads=(2, 1, 1), lengths=(4, 5), head_dims=(2, 3))
    inputs = problem.inputs(device)
    names = [n for n, t in inputs.items() if t.is_floating_point() and n != "alibi_slopes"]
    rest = {n: t for n, t in inputs.items() if n not in names}

    def function(*tensors, module=flash_online, **more):
        torch.manual_seed(7)  # dropout draws the same weights every time
        given = dict(zip(names, tensors, strict=True)) | rest
        positional = [given.pop(n) for n in ("query", "key", "value")]
        out, lse = module.attention(*positional, **given, **problem.options, **more, return_lse=True)
        return out, torch.where(lse.isinf(), 0, lse)

    return function, [inputs[n].requires_grad_() for n in names]


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION.keys())
def test_attention_first_derivatives(options, device):
    function, inputs = small(options, device)
    draws = "dropout_p" in options  # and vmap over the forward pass refuses whatever draws
    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=not draws)


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION.keys())
def test_attention_second_derivatives(options, device):
    function, inputs = small(options, device)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("options", ["plain", "all options"])
def test_attention_second_derivatives_entry_by_entry(options):
    function, inputs = small(OPTIONS[options])
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, check_rev_over_rev=True)


def test_attention_second_derivatives_of_a_part():
    """A gradient of one input differentiated by another, with what is unwanted left out."""
    query, key, value = randn(1, 2, 4, 3), randn(1, 2, 5, 3), randn(1, 2, 5, 3)
    for wanted in ([query], [key], [value], [query, value]):
        for then in (query, key, value):
            results = []
            for module in (flash_online, reference):
                out = module.attention(query, key, value, causal=True)
                first = torch.autograd.grad(out.square().sum(), wanted, create_graph=True)
                results.append(torch.autograd.grad(sum(g.square().sum() for g in first), then))
            torch.testing.assert_close(*results)


def small_packed(options, device="cpu"):
    """small() of packed sequences, one of them empty, with rows of no sequence between and after them."""
    problem = Packed.of(
        options, dtype=DOUBLE, heads=(2, 1, 1), lengths=((2, 3), (0, 1), (3, 2)), head_dims=(2, 3), spare=(0, 0)
    )
    inputs = problem.inputs(device)
    names = [n for n, t in inputs.items() if n != "alibi_slopes"]
    starts = [
        torch.tensor(s, dtype=torch.int32, device=device) for s in ([0, 2, 2, 5], [1, 3, 4, 5])
    ]  # the key at 0 is a padding row
    slopes = inputs.get("alibi_slopes")

    def function(*tensors, module=flash_online, **more):
        torch.manual_seed(7)
        sinks = tensors[3] if len(tensors) > 3 else None
        out, lse = module.varlen_attention(
            *(*tensors[:3], *starts, 2, 2), alibi_slopes=slopes, sinks=sinks, **problem.options, **more, return_lse=True
        )
        return out, torch.where(lse.isinf(), 0, lse)

    return function, [inputs[n].requires_grad_() for n in names]


PACKED = {
    "plain": {},
    "causal with sinks": {"causal": True, "sinks": True},
    "all options": {"window": (1, 1), "alignment": "upper_left", "softcap": 2.0, "alibi": 2, "sinks": True, "scale": 0.7},
    "dropout": {"dropout_p": 0.4, "causal": True},
}


@pytest.mark.parametrize("options", PACKED.values(), ids=PACKED.keys())
def test_varlen_attention_derivatives(options, device):
    """With a longest query of 2, so that a row inside is left out."""
    function, inputs = small_packed(options, device)
    draws = "dropout_p" in options
    assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=not draws)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True)


ROWS = {
    "softmax": lambda m, x: m.softmax(x, 1),
    "softmax first dim": lambda m, x: m.softmax(x, 0),
    "softmax float64 of float64": lambda m, x: m.softmax(x, -1, dtype=DOUBLE),
    "log_softmax": lambda m, x: m.log_softmax(x, 1),
    "logsumexp": lambda m, x: m.logsumexp(x, 1),
    "logsumexp keepdim": lambda m, x: m.logsumexp(x, 0, keepdim=True),
    "topk_softmax": lambda m, x: m.topk_softmax(x, 3)[0],
    "topk_softmax renormalized": lambda m, x: m.topk_softmax(x, 3, renormalize=True)[0],
    "cross_entropy": lambda m, x: m.cross_entropy(x, TARGET.to(x.device)),
    "cross_entropy none": lambda m, x: m.cross_entropy(x, TARGET.to(x.device), reduction="none"),
    "cross_entropy options": lambda m, x: m.cross_entropy(
        x, TARGET.to(x.device), WEIGHT.to(x.device), label_smoothing=0.2, z_loss=0.1, return_lse=True, reduction="sum"
    ),
    "cross_entropy mean options": lambda m, x: m.cross_entropy(
        x, TARGET.to(x.device), WEIGHT.to(x.device), label_smoothing=0.2, z_loss=0.1
    ),
    "cross_entropy probabilities": lambda m, x: m.cross_entropy(
        x, PROBABILITIES.to(x.device), WEIGHT.to(x.device), label_smoothing=0.2, z_loss=0.1
    ),
}
TARGET = torch.tensor([2, -100, 5, 0])
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.1, 1.5, 0.7], dtype=DOUBLE)
PROBABILITIES = torch.linspace(0.1, 2, 24, dtype=DOUBLE).view(4, 6)


@pytest.mark.parametrize("function", ROWS.values(), ids=ROWS.keys())
def test_rows_first_and_second_derivatives(function, device):
    x = randn(4, 6, device=device)
    call = functools.partial(function, flash_online)
    assert gradcheck(call, (x,), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(call, (x,), check_fwd_over_rev=True)


def test_cross_entropy_derivatives_by_target_probabilities(device):
    def call(x, t):
        return flash_online.cross_entropy(
            x, t, WEIGHT.to(device), label_smoothing=0.2, z_loss=0.1, reduction="none", return_lse=True
        )

    assert gradcheck(
        call, (randn(4, 6, device=device), PROBABILITIES.to(device).clone().requires_grad_()), check_forward_ad=True
    )
    assert gradgradcheck(
        call, (randn(4, 6, device=device), PROBABILITIES.to(device).clone().requires_grad_()), check_fwd_over_rev=True
    )


def test_merge_derivatives(device):
    def call(*parts):
        return flash_online.merge_attention(parts[:3], parts[3:])

    parts = [*(randn(2, 3, 2, device=device) for _ in range(3)), *(randn(2, 3, device=device) for _ in range(3))]
    assert gradcheck(call, parts, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(call, parts, check_fwd_over_rev=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, torch.linspace(0, 1, 20, dtype=DOUBLE, device=q.device).view(4, 5)
        ),
        lambda q, k, v: F.softmax(q, -1) + F.log_softmax(q, -2),
        lambda q, k, v: F.cross_entropy(q.flatten(0, -2), torch.tensor([0, 1] * 4, device=q.device)),
    ],
    ids=["causal", "mask", "softmax", "cross_entropy"],
)
def test_drop_in_derivatives(call, device, request):
    if device == "cuda" and request.node.callspec.id.rpartition("-")[2] in ("causal", "mask"):
        pytest.skip("attention in float64 on CUDA goes to torch")
    inputs = tuple(randn(2, n, 3, device=device) for n in (4, 5, 5))
    assert gradcheck(call, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(call, inputs, check_fwd_over_rev=True, fast_mode=True)


# --- torch.func, against the reference under the same transforms -----------------------------------------------------------


def attentions():
    """(scalar of the result, inputs) for a few options; `module` is flash_online or reference."""
    for name in ("plain", "causal lower right", "softcap", "sinks", "float mask", "all options"):
        function, inputs = small(OPTIONS[name])

        def scalar(*tensors, function=function, module=flash_online):
            out, lse = function(*tensors, module=module)
            return out.sin().sum() + lse.cos().sum()

        yield pytest.param(scalar, [t.detach() for t in inputs], id=name)


ROW_SCALARS = {
    "softmax": lambda m, x: m.softmax(x, 1).sin().sum(),
    "log_softmax": lambda m, x: m.log_softmax(x, 0).sin().sum(),
    "logsumexp": lambda m, x: m.logsumexp(x, 1).sin().sum(),
    "cross_entropy": lambda m, x: m.cross_entropy(x, TARGET, WEIGHT, label_smoothing=0.1),
    "cross_entropy probabilities": lambda m, x: m.cross_entropy(x, PROBABILITIES),
}


def rows():
    for name, function in ROW_SCALARS.items():

        def scalar(x, function=function, module=flash_online):
            return function(module, x)

        yield pytest.param(scalar, [torch.randn(4, 6, dtype=DOUBLE)], id=name)


ALL_FUNCTIONS = [*attentions(), *rows()]


@pytest.mark.parametrize("scalar, inputs", ALL_FUNCTIONS)
def test_func_grad_vjp_jvp(scalar, inputs):
    plain = functools.partial(scalar, module=reference)
    every = tuple(range(len(inputs)))
    torch.testing.assert_close(grad(scalar, every)(*inputs), grad(plain, every)(*inputs))
    out, pull = vjp(scalar, *inputs)
    expected, pull_expected = vjp(plain, *inputs)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(pull(torch.ones_like(out)), pull_expected(torch.ones_like(out)))
    tangents = tuple(torch.randn_like(t) for t in inputs)
    torch.testing.assert_close(jvp(scalar, tuple(inputs), tangents), jvp(plain, tuple(inputs), tangents))


@pytest.mark.parametrize("scalar, inputs", ALL_FUNCTIONS)
def test_func_hessian_vector_products(scalar, inputs):
    """Forward over reverse, reverse over reverse, reverse over forward."""
    plain = functools.partial(scalar, module=reference)
    tangents = tuple(torch.randn_like(t) for t in inputs)
    every = tuple(range(len(inputs)))

    def forward_over_reverse(f):
        return jvp(grad(f, every), tuple(inputs), tangents)[1]

    def reverse_over_reverse(f):
        return vjp(grad(f, every), *inputs)[1](tangents)

    def reverse_over_forward(f):
        return grad(lambda *ts: jvp(f, ts, tangents)[1], every)(*inputs)

    for product in (forward_over_reverse, reverse_over_reverse, reverse_over_forward):
        torch.testing.assert_close(product(scalar), product(plain), msg=lambda m, p=product: f"{p.__name__}: {m}")


@pytest.mark.parametrize("scalar, inputs", ALL_FUNCTIONS)
def test_func_jacobians(scalar, inputs):
    plain = functools.partial(scalar, module=reference)
    torch.testing.assert_close(hessian(scalar)(*inputs), hessian(plain)(*inputs))
    torch.testing.assert_close(jacrev(jacrev(scalar))(*inputs), hessian(plain)(*inputs))
    torch.testing.assert_close(jacfwd(scalar)(*inputs), jacrev(plain)(*inputs))


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (1, 0, 2), (-1, None, 0)], ids=str)
@pytest.mark.parametrize("mask_dim", [None, 0])
def test_vmap_of_attention(in_dims, mask_dim):
    def make(shape, dim):
        shape = list(shape)
        if dim is not None:
            shape.insert(dim if dim >= 0 else len(shape) + 1 + dim, 3)
        return torch.randn(shape, dtype=DOUBLE)

    shapes = ((2, 4, 3), (2, 5, 3), (2, 5, 2))
    inputs = [make(s, d) for s, d in zip(shapes, in_dims, strict=True)]
    mask = make((4, 5), mask_dim)

    def scalar(q, k, v, m, module):
        return module.attention(q, k, v, mask=m, causal=True, alignment="lower_right").sin().sum()

    for transform in (lambda f: f, lambda f: grad(f, (0, 1, 2, 3)), lambda f: jacrev(grad(f))):
        results = [
            vmap(transform(functools.partial(scalar, module=module)), (*in_dims, mask_dim))(*inputs, mask)
            for module in (flash_online, reference)
        ]
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("in_dim", [0, 1, 2, -1])
def test_vmap_of_softmax_and_logsumexp(in_dim):
    x = torch.randn(4, 4, 6, dtype=DOUBLE).movedim(-1, 1) if in_dim == 1 else torch.randn(5, 4, 4, dtype=DOUBLE)
    for function in (
        lambda m, t: m.softmax(t, 0),
        lambda m, t: m.log_softmax(t, -1),
        lambda m, t: m.logsumexp(t, 0),
        lambda m, t: m.topk_softmax(t, 2, 0)[0],
    ):
        for transform in (lambda f: f, lambda f: jacrev(f), lambda f: jacfwd(f)):
            results = [vmap(transform(functools.partial(function, m)), in_dim)(x) for m in (flash_online, reference)]
            torch.testing.assert_close(*results)


def test_vmap_of_cross_entropy():
    """Against a loop: torch's own cross_entropy has no vmap for every option."""
    logits, targets = torch.randn(3, 4, 6, dtype=DOUBLE), torch.randint(0, 6, (3, 4))
    for options in ({}, {"reduction": "sum", "label_smoothing": 0.1}, {"reduction": "none", "weight": WEIGHT}):

        def ours(x, t, options=options):
            return F.cross_entropy(x, t, **options)

        def total(x, t, options=options):
            return F.cross_entropy(x, t, **options).sum()

        for dims in ((0, 0), (0, None), (None, 0)):
            pairs = [(logits[i if dims[0] == 0 else 0], targets[i if dims[1] == 0 else 0]) for i in range(3)]
            given = (logits if dims[0] == 0 else logits[0], targets if dims[1] == 0 else targets[0])
            expected = torch.stack([torch.nn.functional.cross_entropy(x, t, **options) for x, t in pairs])
            torch.testing.assert_close(vmap(ours, dims)(*given), expected)
            expected = torch.stack([grad(total)(x, t) for x, t in pairs])
            torch.testing.assert_close(vmap(grad(total), dims)(*given), expected)


def test_vmap_over_no_samples():
    """Shapes and dtypes of the results, where a rule calls the operator once per sample too."""
    table, targets, weight = torch.randn(5, 4), torch.arange(3), torch.rand(4)
    for function in (
        lambda x: F.cross_entropy(x, targets, reduction="none"),
        lambda x: F.cross_entropy(x, targets),
        lambda x: F.cross_entropy(x, targets, weight=weight, label_smoothing=0.1),
        lambda x: F.linear_cross_entropy(x, table, targets),
        lambda x: flash_online.attention(x[None], x[None], x[None], sinks=weight[:1]),
    ):
        for transform in (lambda f: f, lambda f: grad(lambda x: f(x).sum())):
            one, none = (vmap(transform(function))(torch.randn(n, 3, 4)) for n in (1, 0))
            assert none.shape == (0, *one.shape[1:]) and none.dtype == one.dtype
    assert jacrev(lambda x: F.cross_entropy(x, targets[:0], reduction="none"))(torch.randn(0, 4)).shape == (0, 0, 4)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_batched_gradients_of_the_linear_loss(reduction):
    """is_grads_batched without create_graph: the gradients of the forward pass must not be scaled in place."""
    input, table, targets = torch.randn(4, 5, requires_grad=True), torch.randn(7, 5, requires_grad=True), torch.arange(4)
    loss = F.linear_cross_entropy(input, table, targets, reduction=reduction)
    grads = torch.randn(3, *loss.shape)
    found = torch.autograd.grad(loss, (input, table), grads, is_grads_batched=True)
    plain = torch.nn.functional.cross_entropy(input @ table.T, targets, reduction=reduction)
    expected = torch.autograd.grad(plain, (input, table), grads, is_grads_batched=True)
    torch.testing.assert_close(found, expected)


def test_vmap_of_varlen_attention():
    """Mapped inputs, shared ones, and starts of each sample's own."""
    starts = torch.tensor([[0, 2, 5], [0, 4, 4], [1, 2, 3]], dtype=torch.int32)
    tensors = [torch.randn(3, 5, h, 4, dtype=DOUBLE) for h in (4, 2, 2)]
    sinks = torch.randn(4, dtype=DOUBLE)

    def call(q, k, v, s, sinks):
        return flash_online.varlen_attention(q, k, v, s, s, 5, 5, causal=True, sinks=sinks)

    def total(*args):
        return call(*args).square().sum()

    for dims in ((0, 0, 0, 0, None), (0, None, 0, None, None), (0, 0, 0, 1, None)):
        given = [t if d is not None else t[0] for t, d in zip((*tensors, starts), dims, strict=False)]
        if dims[3] == 1:
            given[3] = starts.t()
        rows = [[t[i] if d == 0 else t[:, i] if d == 1 else t for t, d in zip(given, dims, strict=False)] for i in range(3)]
        expected = torch.stack([call(*row, sinks) for row in rows])
        torch.testing.assert_close(vmap(call, dims)(*given, sinks), expected)
        expected = torch.stack([grad(total)(*row, sinks) for row in rows])
        torch.testing.assert_close(vmap(grad(total), dims)(*given, sinks), expected)


def test_vmap_of_vmap_of_attention():
    query, key, value = (torch.randn(2, 3, n, 4, dtype=DOUBLE) for n in (5, 6, 6))
    expected = reference.attention(query, key, value)
    call = vmap(vmap(lambda q, k, v: flash_online.attention(q, k, v)))
    torch.testing.assert_close(call(query, key, value), expected)


def test_per_sample_gradients_of_a_model():
    """The main use of torch.func: one gradient per sample, here through an attention layer under override()."""
    model = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=DOUBLE)
    parameters = dict(model.named_parameters())
    x = torch.randn(3, 1, 5, 8, dtype=DOUBLE)

    def loss(parameters, sample):
        return functional_call(model, parameters, (sample, sample, sample), {"need_weights": False})[0].square().sum()

    expected = vmap(grad(loss), (None, 0))(parameters, x)
    with flash_online.override():
        found = vmap(grad(loss), (None, 0))(parameters, x)
    torch.testing.assert_close(found, expected)


def test_checkpoint_keeps_the_dropout_mask_of_attention():
    query, key, value = randn(1, 2, 4, 3), randn(1, 2, 5, 3), randn(1, 2, 5, 3)

    def call(q, k, v):
        return flash_online.attention(q, k, v, dropout_p=0.5)

    torch.manual_seed(0)
    expected = torch.autograd.grad(call(query, key, value).square().sum(), (query, key, value))
    torch.manual_seed(0)
    out = checkpoint(call, query, key, value, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (query, key, value)), expected)


def test_second_derivative_of_attention_in_chunks(monkeypatch):
    """A chunk of one query at a time gives what one chunk of all gives."""
    inputs = [randn(1, 2, 7, 3), randn(1, 2, 5, 3), randn(1, 2, 5, 3), randn(7, 5)]

    def call():
        out = flash_online.attention(*inputs[:3], mask=inputs[3], causal=True, alignment="lower_right")
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    expected = call()
    monkeypatch.setattr(_attention_derivatives, "_CHUNK_SCORES", 1)
    torch.testing.assert_close(call(), expected)


@pytest.mark.parametrize("derivative", ["jvp", "second"])
def test_attention_derivatives_are_exact_under_autocast(derivative):
    """Tensors are cast once; the products of forward mode and of second derivatives are not rounded to 16 bits again."""
    q, k, v = (torch.randn(1, 2, 33, 16).bfloat16() for _ in range(3))
    tangent = torch.randn_like(q)

    def call(q):
        return flash_online.attention(q, k, v, softcap=3.0)

    def found():
        if derivative == "jvp":
            return torch.func.jvp(call, (q,), (tangent,))[1]
        gradient = torch.func.grad(lambda q: call(q).float().square().sum())
        return torch.func.grad(lambda q: (gradient(q) * tangent).float().sum())(q)

    with torch.autocast("cpu", torch.bfloat16):
        under = found()
    torch.testing.assert_close(under, found(), rtol=0, atol=0)
