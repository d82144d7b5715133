"""torch's flash attention operators run by our kernels: integrations.torch_sdpa."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
import warnings

import pytest
import torch
from float8_cases import skip_without_kernel, to_e4m3
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as by_name
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flash_online
from flash_online import reference
from flash_online.integrations import _check_torch, _torch_float8, torch_sdpa
from flash_online.testing import assert_close_to_float64

TF = torch.nn.functional
nn_attention = torch.nn.attention
SDPA = torch.ops.aten._scaled_dot_product_flash_attention.default
FLASH = torch.ops.aten._flash_attention_forward.default


@pytest.fixture
def active():
    """Our kernels under torch's flash operators, which alone are allowed."""
    torch_sdpa.activate()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield
    torch_sdpa.restore()


def inputs(heads=(4, 4), lengths=(150, 150), head_dim=64, dtype=torch.bfloat16, batch=2, layout="BHLE", grad=True):
    """query, key and value [B, H, L, E]; with the layout BLHE they are transposed views, as a projection makes them."""
    made = []
    for count, length in zip((heads[0], heads[1], heads[1]), (lengths[0], lengths[1], lengths[1]), strict=True):
        size = (batch, length, count, head_dim) if layout == "BLHE" else (batch, count, length, head_dim)
        tensor = torch.randn(size, device="cuda", dtype=dtype)
        made.append((tensor.transpose(1, 2) if layout == "BLHE" else tensor).detach().requires_grad_(grad))
    return made


def forward_and_gradients(function, tensors, grad_out=None):
    out = function(*tensors)
    grad_out = torch.ones_like(out) if grad_out is None else grad_out
    return [out.detach(), *torch.autograd.grad(out, tensors, grad_out)]


def assert_right(function, exact, theirs, tensors):
    """The results and gradients of `function` are as close to those of `exact` in float64 as `theirs` are."""
    grad_out = torch.randn_like(theirs(*tensors))
    results = forward_and_gradients(function, tensors, grad_out)
    by_torch = forward_and_gradients(theirs, tensors, grad_out)
    truth = forward_and_gradients(exact, [t.detach().double().requires_grad_() for t in tensors], grad_out.double())
    for name, ours, other, true in zip(("out", "query", "key", "value"), results, by_torch, truth, strict=True):
        assert ours.dtype == other.dtype and ours.shape == other.shape, name
        assert_close_to_float64(ours, other, true)


def math(function):
    """The function by torch's math backend."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        with sdpa_kernel(SDPBackend.MATH):
            return function(*args, **kwargs)

    return run


# --- the switch -------------------------------------------------------------------------------------------------------------


def test_an_import_registers_nothing():
    code = (
        "import torch, flash_online, flash_online.integrations.torch_sdpa as integration\n"
        "from torch.nn.attention import list_flash_attention_impls as names, current_flash_attention_impl as current\n"
        "assert 'flash_online' not in names() and current() is None, names()\n"
        "integration.register(); integration.register()\n"
        "assert names().count('flash_online') == 1 and current() is None\n"
        "integration.restore()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has CUDA")
def test_a_torch_without_cuda_is_refused():
    before = nn_attention.current_flash_attention_impl()
    with pytest.raises(RuntimeError, match="torch_sdpa: torch .* has no CUDA"):
        torch_sdpa.activate()
    assert nn_attention.current_flash_attention_impl() == before


def test_the_check_of_this_door(capsys):
    if torch.cuda.is_available():
        assert _check_torch.check(print)
    else:
        with pytest.raises(ImportError, match="torch_sdpa replaces operators on CUDA, and no GPU is visible"):
            _check_torch.check(print)
    # PyTorch's own kernel on the CPU has other bits than ours: the check sees that in each of four calls and two dtypes.
    assert not _check_torch.compare(print, "cpu")
    assert capsys.readouterr().out.count("expected the bits of flash_online.attention, got others") == 8


@pytest.mark.gpu
def test_restore_leaves_torch_as_it_was():
    tensors = inputs(head_dim=64)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        before = forward_and_gradients(functools.partial(by_name, is_causal=True), tensors)
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch_sdpa.activate()
            torch_sdpa.activate()
        assert nn_attention.current_flash_attention_impl() == "flash_online"
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        torch_sdpa.restore()
        torch_sdpa.restore()
        assert nn_attention.current_flash_attention_impl() is None
        assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn
    torch_sdpa.activate(prefer=False)
    assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn
    nn_attention.restore_flash_attention_impl()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        after = forward_and_gradients(functools.partial(by_name, is_causal=True), tensors)
    assert torch.equal(before[0], after[0])
    assert all(torch.equal(a, b) for a, b in zip(before[2:], after[2:], strict=True))  # torch's dQ need not repeat


@pytest.mark.gpu
def test_a_host_that_activates_a_name_by_itself_gets_ours():
    torch_sdpa.register("FA3")
    nn_attention.activate_flash_attention_impl("FA3")
    try:
        tensors = inputs()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            assert torch.equal(by_name(*tensors), flash_online.attention(*tensors))
    finally:
        torch_sdpa.restore()
    assert nn_attention.current_flash_attention_impl() is None


# --- scaled_dot_product_attention ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["BHLE", "BLHE"])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({}, {}),
        ({"lengths": (130, 257)}, {}),
        ({"head_dim": 128, "lengths": (1, 77)}, {"scale": 0.3}),
        ({"head_dim": 256}, {"is_causal": True}),
        ({"head_dim": 72}, {"is_causal": True}),  # torch pads it to 80
        ({"head_dim": 33}, {}),
        ({"heads": (8, 2)}, {"is_causal": True, "enable_gqa": True}),
        ({"heads": (4, 1), "lengths": (64, 300)}, {"enable_gqa": True}),
    ],
    ids=str,
)
def test_sdpa(active, dtype, layout, shape, options):
    tensors = inputs(**shape, dtype=dtype, layout=layout)
    function = functools.partial(by_name, **options)
    assert_right(function, math(function), math(function), tensors)
    if tensors[0].shape[-1] % 8 == 0:
        causal = options.get("is_causal", False)
        same = flash_online.attention(*tensors, causal=causal, scale=options.get("scale"))
        assert torch.equal(function(*tensors), same)  # it was our kernel that ran
        assert function(*tensors).stride() == same.stride()


@pytest.mark.gpu
def test_results_have_the_metadata_that_torch_promises(active):
    """Inductor asserts sizes and strides of these nine results."""
    for layout in ("BHLE", "BLHE"):
        tensors = [t.detach() for t in inputs((4, 2), (70, 90), layout=layout)]
        results = SDPA(*tensors)
        promised = SDPA(*(t.to("meta") for t in tensors))
        for real, meta in zip(results, promised, strict=True):
            if isinstance(meta, torch.Tensor):
                assert (real.shape, real.stride(), real.dtype) == (meta.shape, meta.stride(), meta.dtype)
            else:
                assert real == meta
        assert results[1].is_contiguous() and results[1].dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(0, 2, 5, 64), (2, 2, 0, 64)])
def test_no_queries(active, shape):
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    out, lse, *_ = SDPA(*tensors)
    assert out.shape == shape and lse.shape == shape[:3]
    assert all(g.shape == shape for g in torch.autograd.grad(out, tensors, torch.ones_like(out)))


@pytest.mark.gpu
def test_dropout_is_ours_and_its_seed_travels(active):
    tensors = inputs(lengths=(130, 190))
    grad_out = torch.randn(2, 4, 130, 64, device="cuda", dtype=torch.bfloat16)
    results = []
    for function in (functools.partial(by_name, dropout_p=0.3), functools.partial(flash_online.attention, dropout_p=0.3)):
        torch.manual_seed(7)
        results.append(forward_and_gradients(function, tensors, grad_out))
    through_torch, ours = results
    assert torch.equal(through_torch[0], ours[0])
    for a, b in zip(through_torch[1:], ours[1:], strict=True):  # torch's lse has one float where ours has two
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    torch.manual_seed(8)
    assert not torch.equal(by_name(*tensors, dropout_p=0.3), ours[0])


@pytest.mark.gpu
def test_deterministic_algorithms_are_obeyed(active):
    tensors = inputs((2, 2), (700, 700), head_dim=64)
    torch.use_deterministic_algorithms(True)
    causal = functools.partial(by_name, is_causal=True)
    first = forward_and_gradients(causal, tensors)
    for _ in range(5):
        again = forward_and_gradients(causal, tensors)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    ours = forward_and_gradients(functools.partial(flash_online.attention, causal=True, deterministic=True), tensors)
    assert_close = functools.partial(torch.testing.assert_close, rtol=1e-2, atol=1e-2)
    for a, b in zip(first, ours, strict=True):
        assert_close(a, b)


@pytest.mark.gpu
def test_modules_compile_and_checkpoints(active):
    attention = torch.nn.MultiheadAttention(128, 4, batch_first=True, device="cuda", dtype=torch.bfloat16)
    tokens = torch.randn(3, 100, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    plain = attention(tokens, tokens, tokens, need_weights=False)[0]
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(plain, attention(tokens, tokens, tokens, need_weights=False)[0], rtol=2e-2, atol=2e-2)

    tensors = inputs((4, 2), head_dim=64, layout="BLHE")
    function = functools.partial(by_name, is_causal=True, enable_gqa=True)
    eager = forward_and_gradients(function, tensors)
    compiled = torch.compile(function, fullgraph=True)
    torch.testing.assert_close(forward_and_gradients(compiled, tensors), eager, rtol=1e-2, atol=1e-2)

    def save_attention(_, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is SDPA else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, save_attention)
    checkpointed = functools.partial(checkpoint, function, use_reentrant=False, context_fn=contexts)
    torch.testing.assert_close(forward_and_gradients(checkpointed, tensors), eager, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_cuda_graph(active):
    tensors = inputs(head_dim=128)
    grad_out = torch.randn(2, 4, 150, 128, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward_and_gradients(by_name, tensors, grad_out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_and_gradients(by_name, tensors, grad_out)
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    now = forward_and_gradients(by_name, tensors, grad_out)
    assert torch.equal(captured[0], now[0])
    torch.testing.assert_close(captured[1:], now[1:], rtol=1e-2, atol=1e-2)


# --- _flash_attention_forward and varlen_attn ---------------------------------------------------------------------------------


def packed(heads=(4, 4), head_dim=64, dtype=torch.bfloat16, lengths=((40, 60), (0, 9), (129, 129), (3, 1))):
    """query, key, value [total, H, E], the two cumulative lengths and the two longest."""
    queries, keys = zip(*lengths, strict=True)
    starts = [torch.tensor([0, *n], device="cuda").cumsum(0).to(torch.int32) for n in (queries, keys)]
    tensors = [
        torch.randn(sum(n), h, head_dim, device="cuda", dtype=dtype, requires_grad=True)
        for n, h in ((queries, heads[0]), (keys, heads[1]), (keys, heads[1]))
    ]
    return tensors, (*starts, max(queries), max(keys))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "window"), [((4, 4), (-1, -1)), ((4, 2), (-1, 0)), ((4, 1), (20, 0)), ((2, 2), (7, 30))])
def test_varlen_attn(active, dtype, heads, window):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    parameters = inspect.signature(varlen.varlen_attn).parameters
    options = {"window_size": window} if "window_size" in parameters else {"is_causal": window == (-1, 0)}
    if window not in ((-1, -1), (-1, 0)) and "window_size" not in parameters:
        pytest.skip("this torch's varlen_attn has no window")
    if heads[0] != heads[1]:
        if "enable_gqa" not in parameters:
            pytest.skip("this torch's varlen_attn has no grouped queries")
        options["enable_gqa"] = True
    tensors, layout = packed(heads, dtype=dtype)
    bounds = tuple(None if n < 0 else n for n in window)

    def exact(*tensors):
        return reference.varlen_attention(*tensors, *layout, window=bounds)

    def ours(*tensors):
        return varlen.varlen_attn(*tensors, *layout, **options)

    assert_right(ours, exact, exact, tensors)
    assert torch.equal(ours(*tensors), flash_online.varlen_attention(*tensors, *layout, window=bounds))


@pytest.mark.gpu
def test_flash_attention_forward_dense(active):
    """[batch, length, heads, head_dim], ALiBi and a window, aligned at the lower right."""
    tensors = [t.detach().transpose(1, 2).contiguous() for t in inputs((4, 2), (70, 90))]
    slopes = torch.rand(4, device="cuda")
    for given in (slopes, torch.rand(2, 4, device="cuda")):
        out, lse, *_ = FLASH(
            *tensors, None, None, 70, 90, 0.0, False, False, window_size_left=30, window_size_right=5, alibi_slopes=given
        )
        ours, ours_lse = flash_online.attention(
            *(t.transpose(1, 2) for t in tensors),
            window=(30, 5),
            alignment="lower_right",
            alibi_slopes=given,
            return_lse=True,
        )
        assert torch.equal(out, ours.transpose(1, 2)) and torch.equal(lse, ours_lse)
        assert out.is_contiguous()
    hidden_lse = FLASH(tensors[0], *(t[:, :9] for t in tensors[1:]), None, None, 70, 9, 0.0, True, False)[1]
    assert torch.equal(hidden_lse == -torch.inf, torch.arange(70, device="cuda").expand(2, 4, 70) < 61)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1, 1), (1e4, 10)], ids=["", "large"])
@pytest.mark.parametrize("parts", [(40, 64, 24), (128, 200)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_backward_over_a_part_of_the_keys(active, parts, dtype, sizes):
    """A ring calls it with the out and lse of all keys: the parts' dQ add up, dK and dV are theirs. Of large scores one key has
    all of the weight, in one of the parts."""
    query, key, value = (t.detach() for t in inputs(lengths=(90, sum(parts)), dtype=dtype))
    query, key = query * sizes[0], key * sizes[1]
    out, lse, *_ = SDPA(query, key, value)
    grad_out = torch.randn_like(out)
    seed = torch.zeros(2, dtype=torch.uint64, device="cuda")
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default

    def gradients(key, value):
        lengths = query.shape[2], key.shape[2]
        return backward(grad_out, query, key, value, out, lse, None, None, *lengths, 0.0, False, seed, seed[0])

    whole = gradients(key, value)
    pieces = [gradients(k, v) for k, v in zip(key.split(parts, 2), value.split(parts, 2), strict=True)]
    dq = sum(grads[0].float() for grads in pieces)
    dk, dv = (torch.cat([grads[i] for grads in pieces], 2) for i in (1, 2))
    for ours, expected, size in zip((dq, dk, dv), whole, (*sizes[::-1], 1), strict=True):
        torch.testing.assert_close(ours.to(dtype), expected, rtol=2e-2, atol=2e-2 * size)


@pytest.mark.gpu
def test_what_we_do_not_have_runs_torchs_own_kernel(active):
    """return_debug_mask asks for the weights that dropout kept."""
    tensors = [t.detach() for t in inputs(lengths=(128, 128))]
    torch_sdpa.restore()
    torch.manual_seed(3)
    before = SDPA(*tensors, 0.2, False, True)
    torch_sdpa.activate()
    torch.manual_seed(3)
    after = SDPA(*tensors, 0.2, False, True)
    assert after[8].numel() > 0
    for i in (0, 1, 6, 8):  # output, logsumexp, rng_state, debug_attn_mask; what `unused` holds is no result
        assert torch.equal(before[i], after[i]), i
    assert before[2:6] == after[2:6] == (None, None, 128, 128)


@pytest.mark.gpu
def test_out_of_varlen_attn_is_written_in_place(active):
    name = "_flash_attention_forward_no_dropout_inplace"
    if not hasattr(torch.ops.aten, name):
        pytest.skip(f"this torch has no {name}")
    (query, key, value), layout = packed()
    out = torch.empty_like(query)
    with torch.no_grad():
        lse = getattr(torch.ops.aten, name).default(out, query, key, value, *layout, 0.0, True, False)
        ours, ours_lse = flash_online.varlen_attention(query, key, value, *layout, causal=True, return_lse=True)
    assert torch.equal(out, ours) and torch.equal(lse, ours_lse)


PAGED = """
import torch
import flash_online
from flash_online.integrations import torch_sdpa

NAME = "_flash_attention_forward_no_dropout_inplace"
if not hasattr(torch.ops.aten, NAME):  # torch before 2.12: the operator as later ones define it
    library = torch.library.Library("aten", "FRAGMENT")
    library.define(
        NAME + "(Tensor(a!) out, Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, "
        "SymInt max_k, float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, "
        "SymInt? window_size_left=None, SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None, "
        "Tensor? block_table=None, SymInt? num_splits=None) -> Tensor"
    )
    library.impl(NAME, lambda out, *args, **kwargs: out.fill_(5), "CUDA")
torch_sdpa.activate()
operator = getattr(torch.ops.aten, NAME).default

torch.manual_seed(1)
starts = torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32, device="cuda")
used = torch.tensor([500, 7, 0, 33], dtype=torch.int32, device="cuda")
table = torch.randperm(128, device="cuda").view(4, 32).to(torch.int32)
table[1:, 3:] = -1
for dtype in (torch.bfloat16, torch.float16):
    query = torch.randn(9, 6, 64, device="cuda", dtype=dtype)
    key, value = (torch.randn(128, 16, 2, 64, device="cuda", dtype=dtype) for _ in range(2))
    slopes = torch.rand(6, device="cuda")
    for splits, window, given in ((None, (-1, -1), None), (1, (20, 0), slopes), (3, (-1, 4), slopes.expand(4, 6))):
        out = torch.empty_like(query)
        lse = operator(
            out, query, key, value, starts, None, 5, 512, 0.0, window == (20, 0), False, scale=0.2, window_size_left=window[0],
            window_size_right=window[1], seqused_k=used, alibi_slopes=given, block_table=table, num_splits=splits,
        )
        ours, ours_lse = flash_online.varlen_attention(
            query, key, value, starts, None, 5, 512, window=tuple(None if n < 0 else n for n in window), scale=0.2,
            seqused_k=used, alibi_slopes=given, block_table=table, num_splits=splits, return_lse=True,
        )
        assert torch.equal(out, ours) and torch.equal(lse, ours_lse), (dtype, splits)
if torch.__version__ < "2.12":  # what has no pages goes to the kernel that was there
    out = torch.empty_like(query)
    operator(out, query, key.flatten(0, 1), value.flatten(0, 1), starts, starts, 5, 5, 0.0, False, False, seqused_k=used)
    assert (out == 5).all()
"""


@pytest.mark.gpu
def test_keys_in_pages():
    """In a process of its own, since it may have to define an operator of torch."""
    done = subprocess.run([sys.executable, "-c", PAGED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- The overloads for float8 -------------------------------------------------------------------------------------------------

SDPA8 = torch.ops.aten._scaled_dot_product_flash_attention.quantized
FLASH8 = torch.ops.aten._flash_attention_forward.quantized
SCALES = ("query_scale", "key_scale", "value_scale")


@pytest.fixture
def float8():
    """Our kernels under the overloads, on the device that it returns: by the switch, or on the CPU, where torch has none."""
    if torch.cuda.is_available():
        skip_without_kernel("cuda")
        torch_sdpa.activate()
        yield "cuda"
        torch_sdpa.restore()
    else:
        library = _torch_float8.register("CPU")
        yield "cpu"
        library._destroy()


def float8_inputs(device, lengths=(70, 90), layout="BHLE", width=64, width_v=64):
    """query, key and value [B, H, L, E] in e4m3, and the scales by float8_attention's names."""
    shapes = ((4, lengths[0], width), (2, lengths[1], width), (2, lengths[1], width_v))
    made = [to_e4m3(2 * torch.randn(2, *shape)).to(device) for shape in shapes]
    if layout == "BLHE":
        made = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in made]
    return made, {name: torch.rand(2, 2, device=device) + 0.5 for name in SCALES}


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has CUDA, where the tests below use the switch")
def test_the_switch_registers_the_overloads(monkeypatch):
    monkeypatch.setattr(torch_sdpa, "_register_kernels", lambda active: None)
    names = (SDPA8.name(), FLASH8.name())
    for _ in range(2):
        handle = torch_sdpa._Handle(prefer=False)
        assert all(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA") for name in names)
        handle.remove()
        handle.remove()
        assert not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA") for name in names)


def assert_as_promised(results, promised):
    for real, meta in zip(results, promised, strict=True):
        if isinstance(meta, torch.Tensor):
            assert (real.shape, real.stride(), real.dtype) == (meta.shape, meta.stride(), meta.dtype)
        else:
            assert real == meta


@pytest.mark.parametrize("layout", ["BHLE", "BLHE"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "scale": 0.03}], ids=str)
def test_sdpa_of_float8(float8, layout, options):
    tensors, scales = float8_inputs(float8, layout=layout)
    results = SDPA8(*tensors, *scales.values(), **options)
    causal, scale = options.get("is_causal", False), options.get("scale")
    rule = {"causal": causal, "alignment": "lower_right", "scale": scale, "return_lse": True}
    out, lse = flash_online.float8_attention(*tensors, **scales, **rule)
    assert torch.equal(results[0], out) and torch.equal(results[1], lse)
    assert_as_promised(results, SDPA8(*(t.to("meta") for t in (*tensors, *scales.values())), **options))
    without = SDPA8(*tensors, None, scales["key_scale"], None)[0]
    assert torch.equal(without, flash_online.float8_attention(*tensors, key_scale=scales["key_scale"]))


def test_torchs_function_for_float8(float8):
    module = pytest.importorskip("torch.nn.attention.experimental._scaled_dot_product_attention_quantized")
    function = module._scaled_dot_product_attention_quantized
    tensors, scales = float8_inputs(float8, (80, 80))
    given = dict(zip(("q_descale", "k_descale", "v_descale"), scales.values(), strict=True)) if float8 == "cuda" else {}
    expected = flash_online.float8_attention(*tensors, **(scales if given else {}), causal=True)
    assert torch.equal(function(*tensors, is_causal=True, **given), expected)
    torch._dynamo.reset()
    compiled = torch.compile(functools.partial(function, is_causal=True), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors, **given), expected)


@pytest.mark.parametrize(
    ("bounds", "causal"), [((None, None), False), ((-1, -1), True), ((20, 0), False), ((7, 30), True)], ids=str
)
def test_flash_attention_forward_of_float8(float8, bounds, causal):
    """[batch, length, heads, head_dim], and windows."""
    tensors, scales = float8_inputs(float8, layout="BLHE")
    window = tuple(None if bound in (None, -1) else bound for bound in bounds)
    rule = {"causal": causal, "window": window, "alignment": "lower_right", "scale": 0.02}
    out, lse = flash_online.float8_attention(*tensors, **scales, **rule, return_lse=True)
    turned = [t.transpose(1, 2) for t in tensors]
    options = {"scale": 0.02, "window_size_left": bounds[0], "window_size_right": bounds[1]}
    given = (None, None, 70, 90, 0.0, causal, False, *scales.values())
    results = FLASH8(*turned, *given, **options)
    assert torch.equal(results[0], out.transpose(1, 2)) and torch.equal(results[1], lse)
    meta = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in (*turned, *given)]
    assert_as_promised(results, FLASH8(*meta, **options))


def test_float8_has_no_backward_pass(float8):
    (query, key, value), _ = float8_inputs(float8)
    out = SDPA8(query.requires_grad_(), key, value, None, None, None)[0]
    with pytest.raises(RuntimeError, match="derivative for aten::_scaled_dot_product_flash_attention is not implemented"):
        out.sum().backward()


def test_what_float8_does_not_have_is_an_error(float8):
    tensors, _ = float8_inputs(float8)
    turned, starts = [t.transpose(1, 2) for t in tensors], torch.tensor([0, 70], dtype=torch.int32, device=float8)
    for name, wrong in {
        "dropout_p": lambda: SDPA8(*tensors, None, None, None, 0.1),
        "return_debug_mask": lambda: SDPA8(*tensors, None, None, None, 0.0, False, True),
        "cum_seq_q": lambda: FLASH8(*(t[0] for t in turned), starts, starts, 70, 70, 0.0, False, False, None, None, None),
        "seqused_k": lambda: FLASH8(*turned, None, None, 70, 90, 0.0, False, False, None, None, None, seqused_k=starts),
        "alibi_slopes": lambda: FLASH8(*turned, None, None, 70, 90, 0.0, False, False, None, None, None, alibi_slopes=starts),
    }.items():
        with pytest.raises(NotImplementedError, match=f"{name}: expected none with float8 tensors, got"):
            wrong()
    tensors, _ = float8_inputs(float8, width_v=32)
    with pytest.raises(ValueError, match="value: expected query's width 64, got 32"):
        SDPA8(*tensors, None, None, None)


def test_other_dtypes_run_torchs_own_kernel_of_the_overload():
    """On the CPU, where torch has none, with one of this test."""
    tensors, _ = float8_inputs("cpu")
    with pytest.raises(NotImplementedError, match="quantized"):
        SDPA8(*tensors, None, None, None)
    wide = [t.bfloat16() for t in tensors]
    library = _torch_float8.register("CPU")
    with pytest.raises(NotImplementedError, match="query: expected dtype float8_e4m3fn, got torch.bfloat16"):
        SDPA8(*wide, None, None, None)
    library._destroy()
    theirs = torch.library.Library("aten", "IMPL", "CPU")
    empty = torch.empty(0)
    theirs.impl(
        "_scaled_dot_product_flash_attention.quantized",
        lambda query, *_, **__: (query + 1, empty, None, None, 1, 2, empty, empty, empty),
        "CPU",
    )
    kept = torch.library.get_kernel(SDPA8, "CPU")
    run = functools.partial(_torch_float8._ours_or_kept, None, kept, torch._C.DispatchKeySet(torch._C.DispatchKey.CPU))
    out, *rest = run(wide[0], *wide[1:], None, None, None)
    assert torch.equal(out, wide[0] + 1) and rest[1:5] == [None, None, 1, 2]
    theirs._destroy()
