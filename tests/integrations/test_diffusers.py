"""The backend of diffusers: models and single calls against its native backend and flash_online.attention, the registration,
and diffusers' context parallelism."""

from __future__ import annotations

import copy
import functools
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drop_in import compare
from float8_cases import skip_without_kernel
from ranks import run_on_ranks

import flash_online

diffusers = pytest.importorskip("diffusers")

from diffusers.models import attention_dispatch as host  # noqa: E402

from flash_online._self_check import MaskMeter, difference  # noqa: E402
from flash_online.integrations import _check_diffusers as check  # noqa: E402
from flash_online.integrations import diffusers as integration  # noqa: E402

NATIVE = host.AttentionBackendName.NATIVE


def state():
    """Everything of the enum and of the registry that register() touches."""
    enum, registry = host.AttentionBackendName, host._AttentionBackendRegistry
    tables = (registry._backends, registry._constraints, registry._supported_arg_names)
    return (
        set(dir(enum)) | set(vars(enum)),
        *(copy.copy(part) for part in (enum._member_map_, enum._value2member_map_, enum._member_names_)),
        *(copy.copy(table) for table in tables),
        set(registry._supports_context_parallel),
        registry._active_backend,
        list(enum),
    )


@pytest.fixture
def backend():
    """The member of the enum, for a test; diffusers is then as before."""
    before = state()
    registration = integration.register()
    yield host.AttentionBackendName(integration.NAME)
    registration.remove()
    assert state() == before


def call(query, key, value, mask=None, *, backend, **options):
    return host.dispatch_attention_fn(query, key, value, mask, backend=backend, **options)


def heads_first(*tensors):
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


# --- The registration -------------------------------------------------------------------------------------------------------


def test_register_is_idempotent_and_remove_leaves_diffusers_as_before():
    before = state()
    first = integration.register()
    enum = host.AttentionBackendName
    assert integration.register() is first
    member = enum("flash_online")
    assert member is enum.FLASH_ONLINE is enum["FLASH_ONLINE"] is list(enum)[-1]
    assert (member.name, member.value, str.__str__(member)) == ("FLASH_ONLINE", "flash_online", "flash_online")
    assert pickle.loads(pickle.dumps(member)) is copy.deepcopy(member) is member
    assert len(enum) == len(before[-1]) + 1 and host._AttentionBackendRegistry.list_backends()[-1] is member
    first.remove()
    assert state() == before
    first.remove()
    second = integration.register()
    assert second is not first
    first.remove()  # spent: the second registration stays
    assert enum("flash_online") is enum.FLASH_ONLINE
    second.remove()
    assert state() == before
    with pytest.raises(ValueError, match="flash_online"):
        enum("flash_online")


def test_remove_gives_up_the_active_backend():
    before = state()
    registration = integration.register()
    model, _ = check.MODELS["Flux"].make()
    model.set_attention_backend("flash_online")
    assert host._AttentionBackendRegistry._active_backend == "flash_online"
    registration.remove()
    assert state() == before and host._AttentionBackendRegistry._active_backend is NATIVE


def test_another_backend_of_this_name_is_an_error(monkeypatch):
    monkeypatch.setitem(host.AttentionBackendName._value2member_map_, "flash_online", NATIVE)
    with pytest.raises(RuntimeError, match="has a backend 'flash_online' already"):
        integration.register()


def test_a_diffusers_without_the_registry_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(host, "_templated_context_parallel_attention")
    with pytest.raises(NotImplementedError, match=rf"diffusers {diffusers.__version__} has no registry.*override\(\)"):
        integration.register()


def test_nothing_is_imported_or_registered_unasked():
    program = """
import sys
import flash_online.integrations.diffusers as integration
assert "diffusers" not in sys.modules and not integration._registrations
sys.modules["diffusers"] = None
try:
    integration.register()
except ImportError as error:
    assert "not installed" in str(error)
else:
    raise SystemExit(1)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- Models -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", check.MODELS)
def test_models_agree_with_the_native_backend(name, backend):
    output, gradients, *_ = check.measure(check.MODELS[name], "cpu")
    assert max(output, gradients) <= check.ALLOWED


def test_check_says_a_line_per_model_and_finds_a_fault(monkeypatch, capsys):
    before = state()
    lines: list[str] = []
    assert check.check(lines.append)
    assert [line.split()[0] for line in lines[3:]] == list(check.MODELS) and not capsys.readouterr().out
    assert "WRONG" not in "".join(lines)
    monkeypatch.setattr(
        integration, "attention", lambda query, *args, **options: flash_online.attention(query * 1.001, *args, **options)
    )
    assert not check.check(lines.append) and "WRONG" in lines[-1]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(integration, "attention", lambda *args, mask, **options: sdpa(*args, mask))
    assert not check.check(lines.append) and "no call reached our kernels" in lines[-1]
    integration.register().remove()
    assert state() == before


@pytest.mark.parametrize("name", [n if n == "Flux" else pytest.param(n, marks=pytest.mark.slow) for n in check.MODELS])
def test_models_compile_without_a_break(name, backend):
    model, inputs = check.MODELS[name].make()
    model.set_attention_backend("flash_online")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    results = []
    for function in (compiled, model):
        out = function(**inputs, return_dict=False)[0]
        grads = torch.autograd.grad(out.square().mean(), weights, allow_unused=True)
        results.append([out.detach(), *(grad for grad in grads if grad is not None)])
    assert difference(*results) < check.ALLOWED


def test_the_context_manager_and_the_reset(backend):
    model, inputs = check.MODELS["Flux"].make()

    def calls():
        with torch.no_grad(), MaskMeter() as meter:
            model(**inputs)
        return meter.calls

    assert calls() == 0
    with diffusers.attention_backend("flash_online"):
        assert calls() == 2
    assert calls() == 0
    model.set_attention_backend("flash_online")
    assert calls() == 2
    model.reset_attention_backend()
    host._AttentionBackendRegistry.set_active_backend(NATIVE)
    assert calls() == 0


def test_the_code_of_its_page_runs():
    page = Path(__file__).parents[2] / "docs" / "integrations" / "diffusers.md"
    before = state()
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        names: dict = {}
        exec(block, names)
        assert names["out"].shape == names["video"].shape
    assert state() == before


# --- Single calls -----------------------------------------------------------------------------------------------------------


def tensors(device, dtype, *, queries=21, keys=33, heads=4, key_heads=4, width=16, value_width=16, grad=()):
    shapes = ((2, queries, heads, width), (2, keys, key_heads, width), (2, keys, key_heads, value_width))
    made = [torch.randn(shape).to(device, dtype) for shape in shapes]
    return [t.requires_grad_(n in grad) for n, t in zip("qkv", made, strict=True)]


MASKS = {
    "padding": lambda: torch.rand(2, 33) > 0.4,
    "padding to add": lambda: torch.randn(2, 33),
    "a row": lambda: torch.rand(33) > 0.4,
    "scores": lambda: torch.rand(21, 33) > 0.4,
    "per head": lambda: torch.randn(1, 4, 21, 33),
    "per head, three dimensions": lambda: torch.randn(1, 21, 33),
    "per query": lambda: torch.rand(2, 1, 21, 1) > 0.4,
    "nothing seen": lambda: torch.zeros(2, 33, dtype=torch.bool),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, dtype, backend, device):
    """As attention has them; and, where torch's math takes them, as the native backend."""
    query, key, value = tensors(device, dtype, grad="qkv")
    mask = MASKS[name]().to(device)
    mask = mask if mask.dtype is torch.bool else mask.to(dtype)
    out = call(query, key, value, mask, backend=backend)
    whole = mask[:, None, None] if mask.shape == (2, 33) else mask
    expected = flash_online.attention(*heads_first(query, key, value), mask=whole).transpose(1, 2)
    assert torch.equal(out, expected) and out.any() == (name != "nothing seen")
    if mask.dim() > 1 and name != "nothing seen":
        compare(*(functools.partial(call, backend=b) for b in (backend, NATIVE)), (query, key, value, mask), {})


def test_a_padding_mask_is_never_expanded(backend, device):
    query, key, value = tensors(device, torch.float32)
    with MaskMeter() as meter:
        call(query, key, value, torch.rand(2, 33, device=device) > 0.4, backend=backend)
        assert (meter.calls, meter.most) == (1, 66)
        call(query, key, value, (torch.rand(33, device=device) > 0.4).expand(2, 4, 21, 33), backend=backend)
        assert (meter.calls, meter.most) == (2, 66)


def test_a_mask_gets_its_gradient(backend, device):
    query, key, value = tensors(device, torch.float32)
    mask = torch.randn(2, 33, device=device, requires_grad=True)
    grads = [torch.autograd.grad(call(query, key, value, mask, backend=b).square().sum(), mask)[0] for b in (backend, NATIVE)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"scale": 0.3}, {"dropout_p": 1.0}, {"is_causal": True, "scale": 2.0}]
)
@pytest.mark.parametrize(
    "shape", [{}, {"key_heads": 2}, {"value_width": 24}, {"queries": 0}, {"keys": 0}, {"width": 5, "queries": 1}]
)
@pytest.mark.parametrize("grad", ["", "q", "kv"])
def test_options(options, shape, grad, backend, device):
    query, key, value = tensors(device, torch.float32, grad=grad, **shape)
    grouped = {"enable_gqa": "key_heads" in shape}
    functions = (functools.partial(call, backend=b, **options, **grouped) for b in (backend, NATIVE))
    compare(*functions, (query, key, value), {})
    assert call(query, key, value, backend=backend, **options, **grouped).shape == (2, query.shape[1], 4, value.shape[3])


def test_causal_rule_and_mask_together(backend, device):
    """The native backend refuses both; here they combine, as in flash_online.attention."""
    query, key, value = tensors(device, torch.float32)
    mask = torch.rand(2, 33, device=device) > 0.4
    out = call(query, key, value, mask, backend=backend, is_causal=True)
    expected = flash_online.attention(*heads_first(query, key, value), mask=mask[:, None, None], causal=True)
    assert torch.equal(out, expected.transpose(1, 2))


def test_lse(backend, device):
    query, key, value = tensors(device, torch.float32, grad="q")
    options = {"attention_kwargs": {"return_lse": True}}
    out, lse = call(query, key, value, backend=backend, **options)
    expected, expected_lse = flash_online.attention(*heads_first(query, key, value), return_lse=True)
    assert (
        lse.shape == (2, 21, 4)
        and torch.equal(lse, expected_lse.transpose(1, 2))
        and torch.equal(out, expected.transpose(1, 2))
    )
    (grad,) = torch.autograd.grad(lse.sum(), query, retain_graph=True)
    assert grad.any()


def test_layouts_and_autocast(backend, device):
    """Views of one product, as models make them, and tensors that autocast casts."""
    packed = torch.randn(2, 21, 3, 4, 16, device=device)
    query, key, value = packed.unbind(2)
    torch.testing.assert_close(
        call(query, key, value, backend=backend), call(query, key, value, backend=NATIVE), atol=1e-6, rtol=0
    )
    with torch.autocast(device, torch.bfloat16):
        ours, native = (call(query, key, value, backend=b) for b in (backend, NATIVE))
    assert ours.dtype is native.dtype is torch.bfloat16
    torch.testing.assert_close(ours, native, atol=2e-2, rtol=0)


def test_refusals_have_names(backend, device):
    query, key, value = tensors(device, torch.float32)
    with pytest.raises(ValueError, match=r"attn_mask: expected \[B, 1, L, S\] or \[1, H, L, S\], got \[2, 21, 33\]"):
        call(query, key, value, torch.randn(2, 21, 33, device=device), backend=backend)
    with pytest.raises(ValueError, match=r"key, value: expected query's 4 heads .*enable_gqa=True\), got .*2"):
        call(query, key[:, :, :2], value[:, :, :2], backend=backend)
    with pytest.raises(ValueError, match="mask: expected dtype .*got torch.int64"):
        call(query, key, value, torch.ones(2, 33, dtype=torch.int64, device=device), backend=backend)
    with pytest.raises(ValueError, match="mask: expected a shape"):
        call(query, key, value, torch.ones(2, 34, dtype=torch.bool, device=device), backend=backend)
    with pytest.raises(ValueError, match="value: expected query's dtype"):
        call(query, key, value.half(), backend=backend)
    with pytest.raises(NotImplementedError, match="query: expected dtype .*got torch.complex64"):
        call(*(t.to(torch.complex64) for t in (query, key, value)), backend=backend)


def test_diffusers_own_checks_pass_what_is_right(backend, device, monkeypatch):
    monkeypatch.setattr(host._AttentionBackendRegistry, "_checks_enabled", True)
    query, key, value = tensors(device, torch.float32)
    call(query, key, value, torch.rand(2, 33, device=device) > 0.4, backend=backend)
    with pytest.raises(ValueError, match="same dtype"):
        call(query, key, value.half(), backend=backend)


# --- float8 -----------------------------------------------------------------------------------------------------------------

FLOAT8 = "online_attention_float8"


@pytest.fixture
def float8():
    before = state()
    registration = integration.register(FLOAT8)
    yield host.AttentionBackendName(FLOAT8)
    registration.remove()
    assert state() == before


def test_each_name_has_a_registration_of_its_own():
    before = state()
    wide, narrow = integration.register(), integration.register(FLOAT8)
    assert integration.register(FLOAT8) is narrow is not wide
    assert host.AttentionBackendName.ONLINE_ATTENTION_FLOAT8 == FLOAT8
    wide.remove()
    assert host.AttentionBackendName(FLOAT8).name == "ONLINE_ATTENTION_FLOAT8"
    narrow.remove()
    assert state() == before
    with pytest.raises(ValueError, match="name: expected 'flash_online' or 'online_attention_float8', got 'float8'"):
        integration.register("float8")


# Relative root mean square of the difference from the 16-bit backend. Measured on the CPU: 0.0035 (Flux) to 0.0067 (Wan). Small
# random weights make scores near 0, and attention is a part of the output.
FLOAT8_ALLOWED = 0.015


@pytest.mark.parametrize("name", ["Flux", "Wan", "QwenImage"])
def test_models_in_float8_are_near_16_bits(name, backend, float8):
    model, inputs = check.MODELS[name].make()
    model = model.to(torch.bfloat16)
    inputs = {n: t.bfloat16() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in inputs.items()}
    results = []
    for used in ("flash_online", FLOAT8):
        model.set_attention_backend(used)
        with torch.no_grad():
            results.append(model(**inputs, return_dict=False)[0].float())
    model.reset_attention_backend()
    wide, narrow = results
    assert 0 < (narrow - wide).square().mean().sqrt() <= FLOAT8_ALLOWED * wide.square().mean().sqrt()


FLOAT8_CASES = {
    "plain": ({}, None, {}),
    "causal": ({}, None, {"is_causal": True, "scale": 0.3}),
    "grouped": ({"key_heads": 2}, None, {"enable_gqa": True}),
    "padding": ({}, lambda: torch.arange(33) < torch.tensor([[33], [9]]), {}),
    "padding, four dimensions": ({}, lambda: (torch.arange(33) < torch.tensor([[33], [9]]))[:, None, None], {}),
    "a row": ({}, lambda: torch.rand(33) > 0.4, {}),
    "per head": ({}, lambda: torch.rand(2, 4, 1, 33) > 0.4, {}),
    "one for all": ({}, lambda: torch.ones(2, 1, 1, 1, dtype=torch.bool), {}),
}


@pytest.mark.parametrize("case", FLOAT8_CASES)
def test_a_call_has_the_bits_of_float8_attention(case, float8, device):
    skip_without_kernel(device)
    shape, mask, options = FLOAT8_CASES[case]
    query, key, value = tensors(device, torch.bfloat16, **shape)
    mask = None if mask is None else mask().to(device)
    spans = None
    if mask is not None:
        shown = mask[:, None] if mask.dim() == 2 else mask[..., 0, :] if mask.dim() == 4 else mask[None, None]
        shown = shown.expand(*shown.shape[:-1], 33).int()
        spans = torch.stack([torch.zeros_like(shown), 21 * shown], -1)
    rule = {"causal": options.get("is_causal", False), "scale": options.get("scale"), "key_spans": spans}
    expected, expected_lse = flash_online.float8_attention(*heads_first(query, key, value), **rule, return_lse=True)
    out = call(query, key, value, mask, backend=float8, **options)
    assert torch.equal(out, expected.transpose(1, 2))
    options = options | {"attention_kwargs": {"return_lse": True}}
    again, lse = call(query, key, value, mask, backend=float8, **options)
    assert torch.equal(again, out) and torch.equal(lse, expected_lse.transpose(1, 2))


def test_float8_refusals_have_names(float8):
    query, key, value = tensors("cpu", torch.bfloat16)
    for mask in (torch.ones(2, 1, 21, 33, dtype=torch.bool), torch.zeros(2, 33), torch.ones(21, 33, dtype=torch.bool)):
        with pytest.raises(NotImplementedError, match=r"attn_mask: expected a bool mask of keys.*'flash_online'"):
            call(query, key, value, mask, backend=float8)
    with pytest.raises(NotImplementedError, match=f"dropout_p: expected 0 with {FLOAT8}.*got 0.1"):
        call(query, key, value, backend=float8, dropout_p=0.1)
    with pytest.raises(ValueError, match="key, value: expected query's 4 heads"):
        call(query, key[:, :, :2], value[:, :, :2], backend=float8)
    with pytest.raises(NotImplementedError, match="query: expected dtype float16, bfloat16"):
        call(query.float(), key.float(), value.float(), backend=float8)
    with pytest.raises(ValueError, match=f"query: expected a tensor without a gradient, .*{FLOAT8}"):
        call(query.requires_grad_(), key, value, backend=float8)
    parallel = diffusers.ContextParallelConfig(ulysses_degree=2)
    config = diffusers.ParallelConfig(context_parallel_config=parallel)
    with torch.no_grad(), pytest.raises((NotImplementedError, ValueError), match="(?i)context parallel"):
        call(query, key, value, backend=float8, parallel_config=config)


# --- Several ranks ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ring, ulysses", [(1, 2), (2, 1), (2, 2)], ids=["ulysses", "ring", "both"])
def test_context_parallelism_agrees_with_one_process(ring, ulysses):
    program = Path(__file__).with_name("diffusers_ranks.py")
    printed = run_on_ranks(program, str(ring), str(ulysses), ranks=ring * ulysses)
    assert all(f"ok {rank}" in said.splitlines() for rank, said in enumerate(printed)), printed
