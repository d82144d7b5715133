"""`python -m flash_online check`: a smoke test of an installed package, which needs neither pytest nor a compiler.

Every public function runs forward and backward on the CPU, and on a GPU that this build's kernels support, in float32, bfloat16
and float16. The results are compared with flash_online.reference in float64, within the tolerance of flash_online.testing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import flash_online

from . import _info, _policy, reference, testing
from ._policy import strict

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SINGLE = ("sinks", "alibi_slopes", "lses")  # stay float32 with 16-bit inputs
CONSTANT = ("weight", "alibi_slopes")  # no gradient is computed
INFERENCE = ("kvcache_attention", "cascade_attention", "cache_append")  # without gradients


@dataclass(frozen=True)
class Call:
    """A call of flash_online.<function>, or of torch.nn.functional.<replaced> inside override()."""

    function: str  # also the name of the reference
    inputs: dict[str, Any]  # tensors, the floating ones in float32; or tuples of integer tensors
    options: dict = field(default_factory=dict)
    replaced: str | None = None
    torch_options: dict = field(default_factory=dict)

    @property
    def group(self) -> str:
        """The public name that the call tests."""
        return "override" if self.replaced else self.function

    def ours(self, **inputs):
        # The functions are looked up by name when they are called, as a user's program does.
        if self.replaced is None:
            return getattr(flash_online, self.function)(**inputs, **self.options)
        before = getattr(torch.nn.functional, self.replaced)
        with flash_online.override():
            function = getattr(torch.nn.functional, self.replaced)
            results = function(**inputs, **self.torch_options)
        assert function is getattr(flash_online.functional, self.replaced), "override() did not replace the function"
        assert getattr(torch.nn.functional, self.replaced) is before, "override() did not restore the function"
        return results

    def reference(self, **inputs):
        return getattr(reference, self.function)(**inputs, **self.options)

    def describe(self, dtype: torch.dtype, device: str) -> str:
        module, name = ("torch.nn.functional", self.replaced) if self.replaced else ("flash_online", self.function)
        options = self.torch_options if self.replaced else self.options
        tensors = {n: _narrow(n, t, dtype) for n, t in self.inputs.items() if isinstance(t, Tensor)}
        tensors = [f"{n}={str(t.dtype)[6:]}{list(t.shape)}" for n, t in tensors.items()]
        said = f"{module}.{name}({', '.join([*tensors, *(f'{n}={value!r}' for n, value in options.items())])}) on {device}"
        return f"{said}, inside override()" if self.replaced else said


def row_calls(generator: torch.Generator) -> Iterator[Call]:
    """The calls of softmax, log_softmax, logsumexp, topk_softmax and the two losses."""

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    rows, cube = normal(48, 1000, scale=3), normal(3, 40, 7, scale=3)
    for name in ("softmax", "log_softmax", "logsumexp"):
        yield Call(name, {"input": rows}, {"dim": -1})
        yield Call(name, {"input": cube}, {"dim": 1})
    # Every row has distinct numbers that each dtype can hold, so that there is one right order.
    order = torch.stack([torch.randperm(256, generator=generator) for _ in range(48)])
    yield Call("topk_softmax", {"input": order / 16 - 8}, {"k": 5})
    yield Call("topk_softmax", {"input": order / 16 - 8}, {"k": 8, "renormalize": True})

    target = torch.randint(1000, (48,), generator=generator)
    target[5] = -100
    probabilities, weight = normal(48, 1000).softmax(-1), normal(1000).abs() + 0.5
    yield Call("cross_entropy", {"input": rows, "target": target})
    options = {"reduction": "none", "label_smoothing": 0.1, "z_loss": 1e-3, "return_lse": True}
    yield Call("cross_entropy", {"input": rows, "target": target, "weight": weight}, options)
    yield Call("cross_entropy", {"input": rows, "target": probabilities})

    hidden, head, bias = normal(48, 64), normal(1000, 64, scale=0.3), normal(1000)
    yield Call("linear_cross_entropy", {"input": hidden, "linear_weight": head, "target": target})
    inputs = {"input": hidden, "linear_weight": head, "target": target, "linear_bias": bias}
    yield Call("linear_cross_entropy", inputs, {"z_loss": 1e-3, "label_smoothing": 0.1, "reduction": "sum", "return_lse": True})
    yield Call("linear_cross_entropy", inputs, {"softcap": 15.0, "scale": 0.5})


def attention_calls(generator: torch.Generator, head_dim: int) -> Iterator[Call]:
    """The calls of attention, varlen_attention, kvcache_attention, cascade_attention, cache_append and merge_attention."""

    def heads(*shape: int) -> dict[str, Tensor]:
        """query, key and value, of [batch, heads of query, heads of key and value, queries, keys] or without the batch."""
        *batch, query_heads, key_heads, queries, keys = shape
        sizes = {"query": (query_heads, queries), "key": (key_heads, keys), "value": (key_heads, keys)}
        return {name: torch.randn(*batch, *size, head_dim, generator=generator) for name, size in sizes.items()}

    slopes, sinks = torch.tensor([0.5, 0.25, 0.125, 0.0625]), torch.randn(4, generator=generator)
    seen = torch.rand(2, 1, 70, 90, generator=generator) > 0.4
    yield Call("attention", heads(2, 4, 4, 80, 80), {"causal": True})
    yield Call("attention", heads(2, 4, 2, 70, 90) | {"mask": seen}, {"return_lse": True})
    bias = torch.randn(1, 4, 70, 90, generator=generator)
    yield Call("attention", heads(2, 4, 4, 70, 90) | {"mask": bias}, {"softcap": 10.0, "scale": 0.2})
    options = {"causal": True, "window": (33, 0), "alignment": "lower_right", "return_lse": True}
    yield Call("attention", heads(2, 4, 1, 70, 90) | {"alibi_slopes": slopes, "sinks": sinks}, options)

    starts = torch.tensor([0, 40, 40, 45, 112], dtype=torch.int32)
    packed = {name: tensor.transpose(0, 1).contiguous() for name, tensor in heads(4, 2, 112, 112).items()}
    packed |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    longest = {"max_seqlen_q": 67, "max_seqlen_k": 67}
    yield Call("varlen_attention", packed, longest | {"causal": True, "return_lse": True})
    yield Call("varlen_attention", packed | {"sinks": sinks}, longest | {"window": (20, 10), "softcap": 10.0})

    cached = heads(2, 4, 2, 3, 90)
    cached |= {"key_cache": cached.pop("key"), "value_cache": cached.pop("value")}
    lengths = {"cache_seqlens": torch.tensor([70, 13], dtype=torch.int32)}
    yield Call("kvcache_attention", cached | lengths, {"window": (40, None), "return_lse": True})
    pools = {name: torch.randn(9, 2, 16, head_dim, generator=generator) for name in ("key_cache", "value_cache")}
    pages = torch.randperm(9, generator=generator, dtype=torch.int32)
    rows = torch.tensor([0, 5, 0, 3, 5, 70, 20, 19], dtype=torch.int32)  # starts of the prefix, of own keys; numbers of keys
    prefix = flash_online.CascadeLevel(rows[:2], pages[None, :5], rows[5:6])
    own = flash_online.CascadeLevel(rows[2:5], pages[5:].view(2, 2), rows[6:])
    cascade = {"query": torch.randn(5, 4, head_dim, generator=generator), **pools, "levels": (prefix, own)}
    yield Call("cascade_attention", cascade | {"sinks": sinks}, {"return_lse": True})
    new, angles = heads(2, 4, 2, 3, 3), torch.rand(100, head_dim // 2, generator=generator) * 6
    yield Call("cache_append", cached | new | lengths, {"rotary": (angles.cos(), angles.sin())})

    outs, lses = torch.randn(3, 2, 4, 50, head_dim, generator=generator), torch.randn(3, 2, 4, 50, generator=generator)
    yield Call("merge_attention", {"outs": outs, "lses": lses})


def override_calls(generator: torch.Generator, head_dim: int) -> Iterator[Call]:
    """The calls of the functions of torch.nn.functional that override() replaces, if this torch has them."""
    rows, target = torch.randn(48, 500, generator=generator), torch.randint(500, (48,), generator=generator)
    query, key, value = torch.randn(3, 2, 4, 60, head_dim, generator=generator)
    hidden, head = torch.randn(48, 64, generator=generator), torch.randn(500, 64, generator=generator) * 0.3
    attended = {"query": query, "key": key, "value": value}
    losses = {"input": hidden, "linear_weight": head, "target": target}
    calls = [
        Call("attention", attended, {"causal": True}, "scaled_dot_product_attention", {"is_causal": True}),
        *(Call(name, {"input": rows}, {"dim": -1}, name, {"dim": -1}) for name in ("softmax", "log_softmax")),
        Call("cross_entropy", {"input": rows, "target": target}, {}, "cross_entropy"),
        Call("linear_cross_entropy", losses, {}, "linear_cross_entropy"),
    ]
    yield from (call for call in calls if call.replaced in flash_online.functional.ORIGINALS)


# --- One call compared with the reference -----------------------------------------------------------------------------------


def _is_floating(value) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _narrow(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and name not in SINGLE else tensor


def _run(
    function: Callable, inputs: dict[str, Any], dtype: torch.dtype | None, seed: int, gradients: bool = True
) -> dict[str, Tensor]:
    """The results of a function and, with `gradients`, the gradients of its inputs, by name. Floating inputs are cast to
    `dtype` unless it is None. Equal seeds give equal gradients of the results."""
    leaves = {n: t if dtype is None or not _is_floating(t) else t.to(dtype) for n, t in inputs.items()}
    wanted = [n for n, t in leaves.items() if _is_floating(t) and n not in CONSTANT and gradients]
    leaves |= {n: leaves[n].detach().requires_grad_() for n in wanted}
    results = function(**leaves)
    results = list(results) if isinstance(results, tuple) else [results]
    outputs = [t for t in results if t.is_floating_point()]
    generator = torch.Generator().manual_seed(seed)
    # Multiples of 1/16 below 8 in magnitude are exact in every dtype.
    grads = [(torch.randn(t.shape, generator=generator).clamp(-7, 7) * 16).round() / 16 for t in outputs]
    found = (
        ()
        if not wanted
        else torch.autograd.grad(outputs, [leaves[n] for n in wanted], [g.to(t) for g, t in zip(grads, outputs, strict=True)])
    )
    named = {f"result {i}": t.detach() for i, t in enumerate(results)}
    return named | {f"gradient of {n}": t for n, t in zip(wanted, found, strict=True)}


@dataclass(frozen=True)
class Deviation:
    """The error of a result and the error that is allowed."""

    error: float
    allowed: float

    @property
    def share(self) -> float:
        return self.error / self.allowed


def compare(call: Call, dtype: torch.dtype, device: str) -> Deviation:
    """The deviation closest to its limit, among a call's results and gradients. Raises AssertionError if one exceeds its
    limit."""
    inputs = {
        n: tree_map_only(Tensor, lambda t, n=n: _narrow(n, t, dtype).to(device), value) for n, value in call.inputs.items()
    }
    threads = torch.get_num_threads()
    with strict():
        ours = _run(call.ours, inputs, None, 1, call.function not in INFERENCE)
    # The reference runs many small torch operations, and on a busy processor their threads would wait for each other.
    torch.set_num_threads(1)
    try:
        return _worst_deviation(call, inputs, ours, dtype)
    finally:
        torch.set_num_threads(threads)


def _worst_deviation(call: Call, inputs: dict[str, Any], ours: dict[str, Tensor], dtype: torch.dtype) -> Deviation:
    gradients = call.function not in INFERENCE
    truth = _run(call.reference, inputs, torch.float64, 1, gradients)
    plain = _run(call.reference, inputs, None, 1, gradients)
    single = plain if dtype == torch.float32 else _run(call.reference, inputs, torch.float32, 1, gradients)
    worst = Deviation(0.0, 1.0)
    for name, result in ours.items():
        if not result.is_floating_point():
            assert torch.equal(result, truth[name]), f"{name}: expected the reference's indices, got others"
            continue
        # With 16-bit inputs an lse has the precision of float32, unless its logits were rounded. The gradient of a float32
        # input does not: it is a sum of 16-bit products.
        rounding = result.dtype if name.startswith("result") else dtype
        theirs = single if rounding == torch.float32 and call.function != "linear_cross_entropy" else plain
        # The terms of a loss are about 1. The gradient of a sink is a sum of 140 such terms, and may be near 0.
        magnitude = 1.0 if result.numel() < 64 else 0.0
        magnitude = 12.0 if name == "gradient of sinks" else magnitude
        testing.assert_close_to_float64(result, theirs[name], truth[name], rounding, name=name, magnitude=magnitude)
        theirs = testing.error(theirs[name], truth[name])
        allowed = testing.allowed_error(theirs, truth[name], rounding, magnitude=magnitude)
        worst = max(worst, Deviation(testing.error(result, truth[name]).max, allowed.max), key=lambda d: d.share)
    return worst


# --- The command ------------------------------------------------------------------------------------------------------------


def why_no_cuda() -> str | None:
    """Returns why the GPU is skipped, or None if it is not."""
    if not torch.cuda.is_available():
        return "no GPU is visible to torch"
    if not _policy.ON_CUDA:
        return "this build has no CUDA kernels"
    try:
        architectures = _info.build_info()["architectures"]
    except ImportError:  # without the introspection module the kernels report it
        return None
    return _info.why_not_on(torch.cuda.get_device_capability(), architectures)


def _head_dim() -> int:
    """The head dim of the calls: 64, or the largest one that the CUDA kernels of this build were compiled for."""
    try:
        return min(64, max(_info.build_info()["head_dims"], default=64))
    except ImportError:
        return 64


def main() -> int:
    """Runs the check. Returns the exit code of the process: 1 if a call fails."""
    start = time.perf_counter()
    print(f"flash_online {_info.version()}, torch {torch.__version__}, {_info.processor()}")
    print("Each function, forward and backward, compared with float64: the error closest to its limit, and the limit.\n")
    print(f"{'function':21} {'device':7}" + "".join(f"{str(dtype)[6:]:22}" for dtype in DTYPES))
    generator = torch.Generator().manual_seed(1805_02867)
    groups: dict[str, list[Call]] = {}
    head_dim = _head_dim()
    for call in (*row_calls(generator), *attention_calls(generator, head_dim), *override_calls(generator, head_dim)):
        groups.setdefault(call.group, []).append(call)
    no_cuda = why_no_cuda()
    failures = []
    for device in ("cpu",) if no_cuda else ("cpu", "cuda"):
        for name, calls in groups.items():
            if device == "cuda" and name in _policy.OPERATORS and name not in _policy.ON_CUDA:
                print(f"{name:21} {device:7}no kernel")
                continue
            cells = []
            for dtype in DTYPES:
                deviations, before = [], len(failures)
                for call in calls:
                    try:
                        deviations.append(compare(call, dtype, device))
                    except Exception as problem:  # a broken installation may raise anything: go on with the other functions
                        failures.append(f"{call.describe(dtype, device)}\n  {type(problem).__name__}: {problem}")
                worst = max(deviations, key=lambda d: d.share, default=None)
                cells.append("FAILED" if len(failures) > before else f"{worst.error:.1e} of {worst.allowed:.1e}")
            print(f"{name:21} {device:7}" + "".join(f"{cell:22}" for cell in cells).rstrip(), flush=True)
    if no_cuda:
        print(f"{'every function':21} cuda   not checked: {no_cuda}")
    seconds = time.perf_counter() - start
    if failures:
        print("\n" + "\n".join(f"FAILED: {failure}" for failure in failures))
        return 1
    where = "the CPU" if no_cuda else f"the CPU and {torch.cuda.get_device_name()}"
    print(f"\nok: {len(groups)} functions on {where}, in {seconds:.1f} s")
    return 0
