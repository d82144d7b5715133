"""The calls of `python -m flash_online check`: a smoke test of an installed package, which needs neither pytest nor a compiler.

Every public function runs forward and backward on the CPU, and on a GPU that this build's kernels support, in float32, bfloat16
and float16. The results are compared with flash_online.reference in float64, within the tolerance of flash_online.testing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import flash_online

from . import _info, _self_check, reference
from ._self_check import Call, require

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Without gradients.
INFERENCE = ("kvcache_attention", "cascade_attention", "cache_append", "attention_weight_sums", "block_scores")
INFERENCE += ("float8_attention",)


def own(name: str, **arguments: Any) -> Call:
    """A call of flash_online.<name>, which is looked up when it is called, as a user's program does."""

    def ours(**given: Any) -> Any:
        return getattr(flash_online, name)(**given)

    plain = getattr(reference, name)
    return Call(name, f"flash_online.{name}", ours, plain, arguments, differentiable=name not in INFERENCE)


def replaced(name: str, plain: Callable[..., Any], **arguments: Any) -> Call:
    """A call of torch.nn.functional.<name> inside override()."""

    def ours(**given: Any) -> Any:
        before = getattr(torch.nn.functional, name)
        with flash_online.override():
            function = getattr(torch.nn.functional, name)
            results = function(**given)
        require(function is getattr(flash_online.functional, name), "override() did not replace the function")
        require(getattr(torch.nn.functional, name) is before, "override() did not restore the function")
        return results

    return Call("override", f"inside override(), torch.nn.functional.{name}", ours, plain, arguments)


def float8_call(generator: torch.Generator, head_dim: int) -> Call:
    """A call of float8_attention with numbers that e4m3 holds: those of query and key, of which a key's negative is another
    one, so that they have the mean 0; values; and weights, which are powers of 2. It runs in 16 bits for float32."""

    def whole(most: int, *shape: int) -> Tensor:
        return torch.randint(-most, most + 1, shape, generator=generator).float()

    def ours(**given: Any) -> Any:
        single = {name for name, t in given.items() if isinstance(t, Tensor) and t.dim() == 4 and t.dtype == torch.float32}
        return flash_online.float8_attention(**{n: t.bfloat16() if n in single else t for n, t in given.items()})

    half, value = whole(1, 2, 2, 45, head_dim), whole(7, 2, 2, 90, head_dim)
    value[..., 0] = 7  # the largest, which the scale is chosen by
    operands = {"query": whole(1, 2, 4, 70, head_dim), "key": torch.cat([half, -half], -2), "value": value}
    options = {"sinks": torch.randn(4, generator=generator), "causal": True, "scale": math.log(2), "return_lse": True}
    return replace(own("float8_attention", **operands, **options, alignment="lower_right"), ours=ours)


def row_calls(generator: torch.Generator) -> Iterator[Call]:
    """The calls of softmax, log_softmax, logsumexp, topk_softmax and the two losses."""

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    rows, cube = normal(48, 1000, scale=3), normal(3, 40, 7, scale=3)
    for name in ("softmax", "log_softmax", "logsumexp"):
        yield own(name, input=rows, dim=-1)
        yield own(name, input=cube, dim=1)
    # Every row has distinct numbers that each dtype can hold, so that there is one right order.
    order = torch.stack([torch.randperm(256, generator=generator) for _ in range(48)]) / 16 - 8
    yield own("topk_softmax", input=order, k=5)
    yield own("topk_softmax", input=order, k=8, renormalize=True)

    target = torch.randint(1000, (48,), generator=generator)
    target[5] = -100
    probabilities, weight = normal(48, 1000).softmax(-1), normal(1000).abs() + 0.5
    smoothed = {"label_smoothing": 0.1, "z_loss": 1e-3, "return_lse": True}
    yield own("cross_entropy", input=rows, target=target)
    yield own("cross_entropy", input=rows, target=target, weight=weight, reduction="none", **smoothed)
    yield own("cross_entropy", input=rows, target=probabilities)

    losses = {"input": normal(48, 64), "linear_weight": normal(1000, 64, scale=0.3), "target": target}
    biased = losses | {"linear_bias": normal(1000)}
    yield own("linear_cross_entropy", **losses)
    yield own("linear_cross_entropy", **biased, reduction="sum", **smoothed)
    yield own("linear_cross_entropy", **biased, softcap=15.0, scale=0.5)


def attention_calls(generator: torch.Generator, head_dim: int) -> Iterator[Call]:
    """The calls of attention, varlen_attention, kvcache_attention, cascade_attention, cache_append, merge_attention,
    attention_weight_sums, float8_attention and block_scores."""

    def heads(*shape: int) -> dict[str, Tensor]:
        """query, key and value, of [batch, heads of query, heads of key and value, queries, keys] or without the batch."""
        *batch, query_heads, key_heads, queries, keys = shape
        sizes = {"query": (query_heads, queries), "key": (key_heads, keys), "value": (key_heads, keys)}
        return {name: torch.randn(*batch, *size, head_dim, generator=generator) for name, size in sizes.items()}

    slopes, sinks = torch.tensor([0.5, 0.25, 0.125, 0.0625]), torch.randn(4, generator=generator)
    seen, bias = torch.rand(2, 1, 70, 90, generator=generator) > 0.4, torch.randn(1, 4, 70, 90, generator=generator)
    yield own("attention", **heads(2, 4, 4, 80, 80), causal=True)
    yield own("attention", **heads(2, 4, 2, 70, 90), mask=seen, return_lse=True)
    yield own("attention", **heads(2, 4, 4, 70, 90), mask=bias, softcap=10.0, scale=0.2)
    yield own("attention", **heads(2, 4, 2, 70, 90), causal=True, return_max_logit=True)
    options = {"causal": True, "window": (33, 0), "alignment": "lower_right", "return_lse": True}
    yield own("attention", **heads(2, 4, 1, 70, 90), alibi_slopes=slopes, sinks=sinks, **options)

    starts = torch.tensor([0, 40, 40, 45, 112], dtype=torch.int32)
    packed: dict[str, Any] = {name: t.transpose(0, 1).contiguous() for name, t in heads(4, 2, 112, 112).items()}
    packed |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 67, "max_seqlen_k": 67}
    yield own("varlen_attention", **packed, causal=True, return_lse=True)
    yield own("varlen_attention", **packed, sinks=sinks, window=(20, 10), softcap=10.0)

    cached = heads(2, 4, 2, 3, 90)
    cached |= {"key_cache": cached.pop("key"), "value_cache": cached.pop("value")}
    cached |= {"cache_seqlens": torch.tensor([70, 13], dtype=torch.int32)}
    yield own("kvcache_attention", **cached, window=(40, None), return_lse=True)
    new, angles = heads(2, 4, 2, 3, 3), torch.rand(100, head_dim // 2, generator=generator) * 6
    yield own("cache_append", **(cached | new), rotary=(angles.cos(), angles.sin()))
    pools = {name: torch.randn(9, 2, 16, head_dim, generator=generator) for name in ("key_cache", "value_cache")}
    pages = torch.randperm(9, generator=generator, dtype=torch.int32)
    rows = torch.tensor([0, 5, 0, 3, 5, 70, 20, 19], dtype=torch.int32)  # starts of the prefix, of own keys; numbers of keys
    prefix = flash_online.CascadeLevel(rows[:2], pages[None, :5], rows[5:6])
    last = flash_online.CascadeLevel(rows[2:5], pages[5:].view(2, 2), rows[6:])
    query = torch.randn(5, 4, head_dim, generator=generator)
    yield own("cascade_attention", query=query, **pools, levels=(prefix, last), sinks=sinks, return_lse=True)

    outs, lses = torch.randn(3, 2, 4, 50, head_dim, generator=generator), torch.randn(3, 2, 4, 50, generator=generator)
    yield own("merge_attention", outs=outs, lses=lses)

    scored = heads(2, 4, 2, 150, 170)
    del scored["value"]
    lse = torch.rand(2, 4, 150, generator=generator) + 5
    yield own("attention_weight_sums", **scored, lse=lse, causal=True, last=64)
    yield float8_call(generator, head_dim)
    yield own("block_scores", **scored, size=(64, 64))
    yield own("block_scores", **scored, size=(128, 64), reduce="max", causal=True)


def override_calls(generator: torch.Generator, head_dim: int) -> Iterator[Call]:
    """The calls of the functions of torch.nn.functional that override() replaces, if this torch has them."""

    def attention(is_causal: bool, **given: Any) -> Any:
        return reference.attention(**given, causal=is_causal)

    rows, target = torch.randn(48, 500, generator=generator), torch.randint(500, (48,), generator=generator)
    attended = dict(zip(("query", "key", "value"), torch.randn(3, 2, 4, 60, head_dim, generator=generator), strict=True))
    hidden, head = torch.randn(48, 64, generator=generator), torch.randn(500, 64, generator=generator) * 0.3
    yield replaced("scaled_dot_product_attention", attention, **attended, is_causal=True)
    yield replaced("softmax", reference.softmax, input=rows, dim=-1)
    yield replaced("log_softmax", reference.log_softmax, input=rows, dim=-1)
    yield replaced("cross_entropy", reference.cross_entropy, input=rows, target=target)
    if "linear_cross_entropy" in flash_online.functional.ORIGINALS:
        losses = {"input": hidden, "linear_weight": head, "target": target}
        yield replaced("linear_cross_entropy", reference.linear_cross_entropy, **losses)


def _head_dim() -> int:
    """The head dim of the calls: 64, or the largest one that the CUDA kernels of this build were compiled for."""
    try:
        return min(64, max(_info.build_info()["head_dims"], default=64))
    except ImportError:
        return 64


def check(say: Callable[[str], None]) -> bool:
    """Compares every function with float64, a line per function and device. Returns whether all are right."""
    start, generator, head_dim = time.perf_counter(), torch.Generator().manual_seed(1805_02867), _head_dim()
    calls = [*row_calls(generator), *attention_calls(generator, head_dim), *override_calls(generator, head_dim)]
    no_cuda = _self_check.why_no_cuda()
    say(f"flash_online {_info.version()}, torch {torch.__version__}, {_info.processor()}")
    say("Each function, forward and backward, compared with float64: the error closest to its limit, and the limit.\n")
    right = _self_check.compare_calls(say, calls, DTYPES, _self_check.devices())
    if no_cuda:
        say(f"\nnot checked on CUDA: {no_cuda}")
    if right:
        where = "the CPU" if no_cuda else f"the CPU and {torch.cuda.get_device_name()}"
        say(f"\nok: {len({call.name for call in calls})} functions on {where}, in {time.perf_counter() - start:.1f} s")
    return right
