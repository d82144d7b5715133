"""Which kernel or function runs a call: explain() and strict() report the decision that the call itself makes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
import torch
from oracle import rng_state
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import flash_online
import flash_online.functional as F
from flash_online import _policy, explain
from flash_online._ops import LIBRARY

TF = torch.nn.functional
dense = importlib.import_module("flash_online.attention")  # the module: the package's attribute is the function
packed = importlib.import_module("flash_online.varlen")
Q, K, V = (torch.randn(2, 4, 5, 8) for _ in range(3))
LOGITS, TARGET = torch.randn(3, 6), torch.tensor([0, 5, 2])


def on(device, argument):
    """The argument with its tensors on the device; those of other devices and quantized ones stay."""
    if isinstance(argument, (tuple, list)):
        return type(argument)(on(device, item) for item in argument)
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument if argument.device.type != "cpu" or argument.is_quantized else argument.to(device)


def nested(layout):
    return torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=layout)


class Named(torch.Tensor):
    """A subclass without any method: torch's functions take and return it, and so do ours."""


with FakeTensorMode():
    ELSEWHERE = torch.empty(3, 6, device="xpu")


# Calls that go to torch: the function, its arguments, a word of the reason.
FORWARDED = {
    "nested": (F.softmax, (nested(torch.strided), -1), "nested"),
    "jagged": (F.log_softmax, (nested(torch.jagged), -1), "NestedTensor"),
    "sparse": (F.softmax, (LOGITS.to_sparse(), 1), "sparse"),
    "complex": (F.softmax, (LOGITS.to(torch.complex64), 1), "complex"),
    "complex result": (F.softmax, (LOGITS, 1, 3, torch.complex64), "complex"),
    "quantized": (F.softmax, (torch.quantize_per_tensor(LOGITS, 0.1, 0, torch.qint8), 1), "quantized"),
    "another device": (F.softmax, (ELSEWHERE, 1), "device xpu"),
    "subclass": (F.softmax, (LOGITS.as_subclass(Named), 1), "Named"),
    "mask of a subclass": (F.scaled_dot_product_attention, (Q, K, V, torch.ones(5, 5).as_subclass(Named)), "Named"),
    "complex attention": (F.scaled_dot_product_attention, (Q.to(torch.complex64),) * 3, "complex"),
    "complex target": (F.cross_entropy, (LOGITS, LOGITS.to(torch.complex64)), "complex"),
}
SPARSE = (F.linear_cross_entropy, (LOGITS, LOGITS.to_sparse(), TARGET), "sparse")
if "linear_cross_entropy" in F.ORIGINALS:
    FORWARDED["sparse linear weight"] = SPARSE


@pytest.mark.forwards
@pytest.mark.parametrize("name", FORWARDED)
def test_forwarded_with_a_reason(name, monkeypatch, device):
    """explain gives the reason, strict forbids the call, and the call goes where explain says."""
    function, arguments, word = FORWARDED[name]
    arguments = on(device, arguments)
    plain = explain(function, *arguments)
    assert not plain.ours and plain.kernel == f"torch.nn.functional.{function.__name__}" and plain.extra_bytes is None
    assert word in plain.refused["flash_online"] and word in str(plain)

    with flash_online.strict():
        with pytest.raises(RuntimeError, match="strict"):
            function(*arguments)
        assert "strict" in str(explain(function, *arguments))

    reached = []
    monkeypatch.setitem(F.ORIGINALS, function.__name__, lambda *args, **kwargs: reached.append(args) or LOGITS)
    function(*arguments)
    assert len(reached) == 1 and reached[0][0] is arguments[0]


@pytest.mark.forwards
def test_nowhere_to_forward_to(monkeypatch, device):
    """A torch without the function: call and explain raise the same, with the reason."""
    monkeypatch.delitem(F.ORIGINALS, "linear_cross_entropy", raising=False)
    function, arguments, word = SPARSE
    arguments = on(device, arguments)
    for call in (function, lambda *args: explain(function, *args)):
        with pytest.raises(NotImplementedError, match=f"linear_cross_entropy: .*{word}"):
            call(*arguments)


FLOAT64 = {
    "softmax": (F.softmax, (LOGITS.double(), 1)),
    "a result in float64": (F.log_softmax, (LOGITS, 1, 3, torch.float64)),
    "cross_entropy": (F.cross_entropy, (LOGITS.double(), TARGET)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", FLOAT64)
def test_float64_on_cuda_is_ours(name):
    function, arguments = FLOAT64[name][0], on("cuda", FLOAT64[name][1])
    assert explain(function, *arguments).ours
    with flash_online.strict():
        found, expected = function(*arguments), getattr(TF, function.__name__)(*arguments)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
def test_attention_in_float64_on_cuda_goes_to_torch():
    """From the drop-in, where torch's backward pass is faster; flash_online.attention computes it."""
    query, key, value = (tensor.cuda().double() for tensor in (Q, K, V))
    found = explain(F.scaled_dot_product_attention, query, key, value)
    assert not found.ours and "float64" in found.refused["flash_online"]
    expected = TF.scaled_dot_product_attention(query, key, value)
    assert torch.equal(F.scaled_dot_product_attention(query, key, value), expected)
    with flash_online.strict(), pytest.raises(RuntimeError, match="float64"):
        F.scaled_dot_product_attention(query, key, value)
    assert explain(flash_online.attention, query, key, value).ours
    torch.testing.assert_close(flash_online.attention(query, key, value), expected)


@pytest.mark.gpu
def test_float64_on_cuda_is_refused_over_cached_keys():
    query = Q.cuda().double()
    with pytest.raises(NotImplementedError, match="float64"):
        flash_online.kvcache_attention(query, query, query, None)


@pytest.mark.forwards
def test_forwarded_results_are_torchs(device):
    for name in ("jagged", "subclass", "mask of a subclass"):
        function, arguments, _ = FORWARDED[name]
        arguments = on(device, arguments)
        ours, torchs = (f(*arguments) for f in (function, getattr(TF, function.__name__)))
        assert type(ours) is type(torchs)
        if name != "jagged":
            torch.testing.assert_close(ours, torchs)


# Calls that are ours: the function, its arguments, the operators, and the bytes in addition to the results.
ROWS = 2 * 4 * 5 * 4
OURS = {
    "attention": (flash_online.attention, (Q, K, V), {}, ["attention_inference"], 0),
    "with its lse": (flash_online.attention, (Q, K, V), {"return_lse": True}, ["attention_inference_with_options"], 0),
    "drop-in": (F.scaled_dot_product_attention, (Q, K, V), {"is_causal": True}, ["attention_inference"], 0),
    "torch's function": (TF.scaled_dot_product_attention, (Q, K, V), {}, ["attention_inference"], 0),
    "a parameter": (F.softmax, (torch.nn.Parameter(LOGITS), 1), {}, ["softmax_forward"], 0),
    "softmax": (flash_online.softmax, (LOGITS, 1), {}, ["softmax_forward"], 0),
    "a result that the kernel casts": (flash_online.softmax, (LOGITS.half(), 1, torch.float32), {}, ["softmax_forward"], 0),
    "an input that is cast first": (F.softmax, (LOGITS, 1), {"dtype": torch.float64}, ["softmax_forward"], 3 * 6 * 8),
    "log_softmax": (TF.log_softmax, (LOGITS, 1), {}, ["softmax_forward"], 0),
    "logsumexp": (flash_online.logsumexp, (LOGITS, 1), {}, ["logsumexp_forward"], 0),
    "top k": (flash_online.topk_softmax, (LOGITS, 2), {}, ["topk_softmax_forward"], 0),
    "packed": (
        flash_online.varlen_attention,
        (Q[0], K[0], V[0], torch.tensor([0, 4], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32), 4, 4),
        {},
        ["attention_varlen_forward"],
        2 * ROWS // 2,
    ),
    "merge": (flash_online.merge_attention, ([Q, K], [Q[..., 0], K[..., 0]]), {}, ["attention_merge"], 0),
    "cross_entropy": (F.cross_entropy, (LOGITS, TARGET), {"reduction": "none"}, ["cross_entropy_forward"], 2 * 3 * 4),
    "cross_entropy, reduced": (F.cross_entropy, (LOGITS, TARGET), {}, ["cross_entropy_loss"], 3 * 3 * 4 + 4),
    "linear_cross_entropy": (
        flash_online.linear_cross_entropy,
        (Q[0, 0, :3], K[0, 0], TARGET.clamp(max=4)),
        {"reduction": "none", "return_lse": True},
        ["linear_cross_entropy_forward"],
        3 * 4 + 4 + 3 * 5 * 4,  # weights of rows, the one number under the expanded logits of the checks, a chunk of logits
    ),
}


@pytest.mark.parametrize("name", OURS)
def test_ours(name, device):
    function, arguments, options, operators, extra = OURS[name]
    arguments = on(device, arguments)
    result = explain(function, *arguments, **options)
    assert result.ours and list(result.operators) == operators and result.device.startswith(device)
    scratch = result.extra.get("scratch", 0)
    if device == "cpu":  # on CUDA what an operator allocates in addition to its results depends on the kernel
        assert result.extra_bytes - scratch == extra
    assert scratch < torch.get_num_threads() * (1 << 20)
    for word in (operators[0], device, "extra memory"):
        assert word in str(result)
    with flash_online.strict():
        function(*arguments, **options)


def test_explain_runs_nothing(device):
    """A call whose scores would be 4 TB is explained at once, and the state of the random generator does not change."""
    query = torch.randn(1, 1, 1, 8, device=device).expand(1, 1, 1 << 20, 8)
    state = rng_state(device)
    result = explain(flash_online.attention, query, query, query, dropout_p=0.5)
    extra = {name: size for name, size in result.extra.items() if name != "scratch"}
    if device == "cpu":
        assert sum(extra.values()) == 2 * 4 * (1 << 20) + 16  # lse, what its rounding dropped, and dropout's (seed, offset)
    assert sum(extra.values()) < 1 << 30
    assert torch.equal(rng_state(device), state)


def test_explain_raises_what_the_call_raises(device):
    query, key, value, logits = on(device, (Q, K, V, LOGITS))
    with pytest.raises(RuntimeError, match="key"):
        explain(F.scaled_dot_product_attention, query, key[..., :3], value)
    with pytest.raises(IndexError, match="dim"):
        explain(flash_online.softmax, logits, 5)
    with pytest.raises(flash_online.InvalidArgument, match="relu"):
        explain(TF.relu, logits)


def test_explain_under_override_and_autograd(device):
    with flash_online.override():
        assert explain(TF.softmax, LOGITS.clone().to(device).requires_grad_(), 1).ours


def test_the_cpu_kernel_is_named():
    introspect = pytest.importorskip("flash_online._introspect")
    facts = introspect.build_info(str(LIBRARY))
    result = explain(F.softmax, LOGITS, 1)
    assert facts["cpu"] in result.kernel
    assert len(result.refused) == ("amx", "avx512_bf16", "avx512", "avx2", "portable").index(facts["cpu"])


def test_scratch_grows_with_the_width_and_not_with_the_lengths():
    pytest.importorskip("flash_online._introspect")
    narrow, long, wide = (
        explain(flash_online.attention, x, x, x).extra["scratch"]
        for x in (torch.randn(1, 1, 5, 8), torch.randn(1, 1, 5000, 8), torch.randn(1, 1, 5, 128))
    )
    assert 0 < narrow == long < wide


def test_what_has_no_equal_in_torch_does_not_fall_back():
    with FakeTensorMode():
        elsewhere = torch.empty(2, 4, 5, 8, device="xpu")
    for call in (
        lambda: flash_online.softmax(nested(torch.strided), -1),
        lambda: flash_online.attention(*(t.to_sparse() for t in (Q, K, V))),
        lambda: flash_online.attention(elsewhere, elsewhere, elsewhere),
        lambda: flash_online.cross_entropy(LOGITS.to(torch.complex64), TARGET),
    ):
        with pytest.raises(NotImplementedError, match="nested|sparse|xpu|complex"):
            call()


def test_strict_nests_and_ends():
    function, arguments, _ = FORWARDED["jagged"]
    with flash_online.strict():
        with flash_online.strict():
            pass
        with pytest.raises(RuntimeError):
            function(*arguments)
    function(*arguments)


@pytest.mark.parametrize("value, raises", [("1", True), ("0", False), pytest.param("", False, marks=pytest.mark.slow)])
def test_strict_from_the_environment(value, raises):
    """Read once, on import."""
    program = "import torch, flash_online.functional as F; F.softmax(torch.eye(2).to_sparse(), 1)"
    environment = {**os.environ, "FLASH_ONLINE_STRICT": value}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert ("strict() forbids" in result.stderr) == raises, result.stderr


def test_compiled_calls_are_forwarded_too():
    torch._dynamo.reset()
    function = torch.compile(lambda x: F.softmax(x, 1), fullgraph=True, backend="aot_eager")
    x = LOGITS.to(torch.float32).to("meta")
    assert function(x).shape == x.shape


@pytest.mark.parametrize("major, dtype, word", [(9, torch.float64, None), (7, torch.float32, "8.0"), (9, torch.half, None)])
def test_decisions_for_gpus(major, dtype, word, monkeypatch):
    """Without a GPU: on tensors that have a device but no data."""
    monkeypatch.setitem(_policy._majors, 0, major)
    monkeypatch.setattr(_policy, "ON_CUDA", frozenset({"softmax", "log_softmax"}))
    with FakeTensorMode():
        x = torch.empty(2, 3, device="cuda:0", dtype=dtype)
        assert "cross_entropy" in _policy.refusal("cross_entropy", x)
        reason = _policy.refusal("softmax", x)
        assert reason is None if word is None else word in reason
        if word is None:
            assert _policy.refusal("softmax", x, dtype=torch.float64) is None


def test_where_float64_on_cuda_is_ours(monkeypatch):
    """Likewise."""
    monkeypatch.setitem(_policy._majors, 0, 9)
    monkeypatch.setattr(_policy, "ON_CUDA", frozenset(_policy.OPERATORS))
    forwarded = {"scaled_dot_product_attention", "kvcache_attention", "cascade_attention", "cache_append"}
    with FakeTensorMode():
        x = torch.empty(2, 3, device="cuda:0", dtype=torch.float64)
        assert {name for name in _policy.OPERATORS if _policy.refusal(name, x)} == forwarded & set(_policy.OPERATORS)


def candidates(
    dtype="bfloat16",
    mask=None,
    gpu=(9, 0, 227 << 10),
    head_dim=64,
    packed=None,
    backward=False,
    deterministic=False,
    softcap=0.0,
    dropout=0.0,
    tf32=False,
):
    """(name, reason to refuse) of the CUDA kernels for a call of attention, the best first."""
    introspect = pytest.importorskip("flash_online._introspect")
    if not introspect.build_info(str(LIBRARY))["architectures"]:
        pytest.skip("a build without CUDA has no kernels to choose among")
    tensor = ((2, 4, 512, head_dim), (2048 * head_dim, 512 * head_dim, head_dim, 1), 0)
    lines = introspect.attention_candidates(
        str(LIBRARY),
        dtype,
        *(tensor,) * 4,
        mask,
        False,
        False,
        False,
        packed,
        -1,
        0,
        False,
        0.125,
        softcap,
        dropout,
        tf32,
        gpu,
        (tensor, deterministic) if backward else None,
    )
    return dict(line.split(" ", 1) for line in lines.splitlines())


def test_the_general_attention_kernel_takes_what_the_others_refuse():
    mask = ((1, 1, 512, 512), (0, 0, 512, 1), 0)
    for options, reason in (
        ({"dtype": "float32"}, "dtype"),
        ({"mask": ("float32", mask)}, "float32"),
        ({"mask": ("bfloat16", ((1, 1, 512, 512), (0, 0, 1, 512), 0))}, "mask's rows"),
        ({"dropout": 0.1, "head_dim": 256}, "192"),
        ({"mask": ("bool", mask), "head_dim": 512}, "256"),
        ({"packed": (2, 512, 512), "mask": ("bool", mask)}, "packed"),
        ({"packed": (2, 512, 512), "head_dim": 264}, "packed"),
        ({"head_dim": 36}, "multiple of 8"),
        ({"gpu": (8, 0, 163 << 10)}, "compute capability"),
    ):
        found = candidates(**options)
        assert found["sm80"] == "" and reason in found["sm90"]
    assert "head dim" in candidates(head_dim=1024)["sm80"]


@pytest.mark.parametrize("head_dim", [136, 192, 256])
def test_attention_with_softcap_or_bool_mask_on_hopper_over_head_dim_128(head_dim):
    capped, mask = {"head_dim": head_dim, "softcap": 50.0}, ((1, 1, 512, 512), (0, 0, 512, 1), 0)
    assert candidates(**capped)["sm90"] == candidates(**capped, backward=True, deterministic=True)["sm90"] == ""
    assert candidates(**capped, mask=("bool", mask), backward=True)["sm90"] == ""
    assert "over 128" in candidates(**capped, mask=("bfloat16", mask), backward=True)["sm90"]
    assert "over 128" in candidates(**capped, dropout=0.1, backward=True)["sm90"]


OF_HOPPER = {"sm90": "", "sm80": "", "float64": "it takes float64 alone"}
NOT_BF16X2 = {"bf16x2_sm90": "it takes float32 where torch allows tf32"}


@pytest.mark.parametrize("backward", [False, True])
def test_float64_has_attention_kernels_of_its_own(backward):
    others = "it does not take float64"
    mask = ((1, 1, 512, 512), (0, 0, 512, 1), 0)
    for options in ({}, {"head_dim": 36}, {"head_dim": 512}, {"mask": ("float64", mask)}, {"gpu": (8, 0, 163 << 10)}):
        expected = {"sm90": others, "sm80": others, "float64": ""} | ({"bf16x2_sm90": others} if backward else {})
        assert candidates(dtype="float64", backward=backward, **options) == expected
    assert "head dim" in candidates(dtype="float64", backward=backward, head_dim=1024)["float64"]


def test_what_hoppers_attention_forward_pass_takes():
    mask = ((1, 1, 512, 512), (0, 0, 512, 1), 0)
    for options in (
        {},
        {"head_dim": 264},
        {"head_dim": 512},
        {"packed": (2, 512, 512)},
        {"packed": (2, 512, 512), "head_dim": 256},
        {"mask": ("bool", mask)},
        {"mask": ("bool", ((1, 1, 512, 512), (0, 0, 1, 512), 0))},
        {"mask": ("bfloat16", mask)},
    ):
        assert candidates(**options) == OF_HOPPER


def test_what_hoppers_attention_backward_pass_takes():
    for options in (
        {},
        {"mask": ("bool", ((1, 1, 512, 512), (0, 0, 512, 1), 0))},
        {"head_dim": 128},
        {"head_dim": 40},
    ):
        assert candidates(backward=True, **options) == OF_HOPPER | NOT_BF16X2
    assert candidates(backward=True, head_dim=256)["sm90"] == ""
    for options, reason in (
        ({"dtype": "float32"}, "dtype"),
        ({"head_dim": 36}, "16 bytes"),
        ({"head_dim": 264}, "head dim"),
        ({"gpu": (8, 0, 163 << 10)}, "compute capability"),
        ({"mask": ("bool", ((1, 1, 512, 512), (0, 0, 512, 1), 0)), "deterministic": True}, "deterministic"),
    ):
        found = candidates(backward=True, **options)
        assert found["sm80"] == "" and reason in found["sm90"]


def test_which_attention_backward_passes_of_float32_run_in_pieces():
    mask = ((1, 1, 512, 512), (0, 0, 512, 1), 0)
    for options in ({}, {"head_dim": 128}, {"head_dim": 33}, {"packed": (2, 512, 512)}):
        found = candidates("float32", backward=True, tf32=True, **options)
        assert found["bf16x2_sm90"] == "" and "dtype" in found["sm90"]
    for options, reason in (
        ({"tf32": False}, "tf32"),
        ({"mask": ("bool", mask)}, "mask"),
        ({"dropout": 0.1}, "dropout"),
        ({"softcap": 5.0}, "softcap"),
        ({"deterministic": True}, "deterministic"),
        ({"head_dim": 129}, "head dim"),
        ({"gpu": (8, 0, 163 << 10)}, "compute capability"),
    ):
        found = candidates("float32", backward=True, **{"tf32": True, **options})
        assert found["sm80"] == "" and reason in found["bf16x2_sm90"]


# --- fewer digits for float32, where torch allows them ------------------------------------------------------------------------

MATMUL = torch.backends.cuda.matmul


@pytest.fixture
def allow():
    """Sets torch's precision of float32 products on CUDA, and restores it."""
    before = MATMUL.fp32_precision

    def set_precision(allowed: bool):
        MATMUL.fp32_precision = "tf32" if allowed else "ieee"

    yield set_precision
    MATMUL.fp32_precision = before


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Makes float32 calls on the CPU pass on torch's setting, which the CPU kernels ignore."""
    for module in (dense, packed):
        monkeypatch.setattr(module, "tf32_for", lambda query: query.dtype is torch.float32 and dense.tf32_allowed())


class Handed(TorchDispatchMode):
    """The attention operators that run, each with its argument tf32."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.startswith("flash_online::attention"):
            index = [argument.name for argument in func._schema.arguments].index("tf32")
            self.calls.append((func._schema.name.removeprefix("flash_online::attention_"), args[index:] == (True,)))
        return func(*args, **(kwargs or {}))


def varlen(query, key, value):
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    return flash_online.varlen_attention(query, key, value, starts, starts, 3, 3)


def test_fewer_digits_are_for_float32_on_cuda_alone(allow):
    with FakeTensorMode():
        tensors = [torch.empty(2, dtype=dtype, device="cuda") for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    for allowed in (False, True, False):
        allow(allowed)
        assert [dense.tf32_for(x) for x in (*tensors, Q)] == [allowed, False, False, False]
    try:
        for allowed in (True, False):
            MATMUL.allow_tf32 = allowed  # the setting's older name
            assert dense.tf32_for(tensors[0]) is allowed
    finally:
        MATMUL.allow_tf32 = False


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("allowed", [False, True])
def test_torchs_setting_reaches_every_operator_and_its_backward_pass(allowed, dtype, allow, as_on_cuda):
    """The backward pass uses the setting that was active when the forward pass was called."""
    wanted = allowed and dtype == torch.float32
    inputs = [t.to(dtype) for t in (Q, K, V)]
    packed_inputs = [t[0].transpose(0, 1).contiguous() for t in inputs]
    for function, of, names in (
        (flash_online.attention, inputs, ("training", "training_backward")),
        (F.scaled_dot_product_attention, inputs, ("training", "training_backward")),
        (lambda q, k, v: flash_online.attention(q, k, v, softcap=3.0), inputs, ("forward", "backward")),
        (lambda q, k, v: flash_online.attention(q[0, 0], k[0, 0], v[0, 0]), inputs, ("forward", "backward")),
        (varlen, packed_inputs, ("varlen_forward", "varlen_backward")),
    ):
        leaves = [t.detach().requires_grad_() for t in of]
        allow(allowed)
        with Handed() as handed:
            out = function(*leaves)
            allow(not allowed)
            out.sum().backward()
        assert handed.calls == [(name, wanted) for name in names]
        allow(allowed)
        with Handed() as handed, torch.no_grad():
            function(*leaves)
        assert [tf32 for _, tf32 in handed.calls] == [wanted]


def test_torchs_setting_under_transforms(allow, as_on_cuda):
    allow(True)
    gradient = torch.func.grad(lambda q, k, v: flash_online.attention(q, k, v).sum())
    with Handed() as handed:
        torch.func.vmap(gradient)(*(t[None] for t in (Q, K, V)))
    assert handed.calls == [("forward", True), ("backward", True)]


def test_compiled_calls_follow_torchs_setting(allow, as_on_cuda):
    """One graph per setting, without a break; a change of the setting compiles again."""
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.args[-1] for node in graph.graph.nodes if "flash_online.attention" in str(node.target)])
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: flash_online.attention(q, k, v), fullgraph=True, backend=backend)
    for allowed in (False, True, False, True):
        allow(allowed)
        torch.testing.assert_close(compiled(Q, K, V), flash_online.attention(Q, K, V))
    assert graphs == [[False], [True]]


def test_explain_reads_calls_with_and_without_it_alike(allow, as_on_cuda):
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed_inputs = (*(t[0].transpose(0, 1).contiguous() for t in (Q, K, V)), starts, starts, 3, 3)

    def plans():
        yield explain(flash_online.attention, Q, K, V)
        yield explain(flash_online.attention, Q, K, V, return_lse=True, dropout_p=0.5)
        yield explain(flash_online.varlen_attention, *packed_inputs)

    allow(False)
    without = list(plans())
    allow(True)
    assert list(plans()) == without
