"""Problems of float8_attention, and its definition step by step: in float64, but for the numbers that it rounds."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields

import pytest
import torch
from oracle import random_spans, to_device
from torch import Tensor

import flash_online
from flash_online import _policy, reference
from flash_online._span_arguments import in_spans
from flash_online.testing import lay_out, random_tensor

INF = math.inf
E4M3 = torch.float8_e4m3fn
BLOCK = 128  # keys whose weights are rounded with one maximum
WEIGHT = 256.0  # weights are multiples of 1 / WEIGHT in e4m3
# The error of a score in units of the largest that its row could have, and of a weight's exponential: float32 on the CPU. The
# tensor cores of compute capability 9.0 add products of float8 with 14 bits.
SCORE_ERROR = {"cpu": 2.0**-21, "cuda": 2.0**-11}
ROOT_ERROR = 0.01  # on CUDA, relative root mean square of many results: half of what rounding the weights alone makes


def skip_without_kernel(device: str) -> None:
    if device == "cuda" and "float8_attention" not in _policy.ON_CUDA:
        pytest.skip("this build has no CUDA kernels for float8_attention")
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("float8_attention's CUDA kernels need compute capability 9.0")
    if device == "cuda" and os.environ.get("FLASH_ONLINE_KERNEL") not in (None, "", "sm90"):
        pytest.skip("FLASH_ONLINE_KERNEL names a family that has no float8")


def to_e4m3(x: Tensor) -> Tensor:
    """The nearest numbers of e4m3, ties to even, saturating; NaN stays NaN. float32 in, e4m3 out."""
    return x.clamp(-448, 448).to(E4M3)


def quantised(x: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """(e4m3, float32 scale) of a float32 tensor, with a scale for its last `dims` dimensions; the scale lacks them."""
    largest = torch.where(x.isfinite(), x.abs(), 0).flatten(-dims)
    largest = largest.amax(-1) if largest.shape[-1] else largest.sum(-1)
    scale = largest / 448
    wide = scale.view(*scale.shape, *[1] * dims)
    divided = torch.where(wide == 0, 0, x / torch.where(wide == 0, 1, wide))
    return to_e4m3(torch.where(x.isnan(), x, divided)), scale


@dataclass
class Operands:
    """What float8 leaves of query, key and value: e4m3 numbers in float64, a scale per key head, and each row's term, which
    belongs to all of its scores but for their scale."""

    query: Tensor
    key: Tensor
    value: Tensor
    scales: list[Tensor]  # [..., Hkv]
    term: Tensor  # [..., Hq, L]
    term_size: Tensor  # the sum of its products' magnitudes


def operands_of(query: Tensor, key: Tensor, value: Tensor, scales: list[Tensor | None], smooth_keys: bool) -> Operands:
    """Of query [..., Hq, L, E], key and value [..., Hkv, S, *]."""
    heads, groups = key.shape[-3], query.shape[-3] // key.shape[-3]
    term = size = torch.zeros(query.shape[:-1], dtype=torch.float64)
    if query.dtype == E4M3:
        given = [torch.ones(()) if s is None else s.cpu() for s in scales]
        tensors = (query, key, value)
        return Operands(*(t.float().double() for t in tensors), [s.expand(key.shape[:-2]) for s in given], term, size)
    k = key.float()
    if smooth_keys and key.shape[-2]:
        mean = (torch.where(k.isfinite(), k, 0).double().sum(-2, keepdim=True) / key.shape[-2]).float()
        products = query.double() * mean.double().repeat_interleave(groups, -3)
        term, size, k = products.sum(-1), products.abs().sum(-1), k - mean
    q, query_scale = quantised(query.float().unflatten(-3, (heads, groups)), 3)
    (k, key_scale), (v, value_scale) = quantised(k, 2), quantised(value.float(), 2)
    wide = (q.float().double().flatten(-4, -3), k.float().double(), v.float().double())
    return Operands(*wide, [query_scale, key_scale, value_scale], term, size)


@dataclass
class Emulation:
    out: Tensor  # float64 [..., Hq, L, Ev]
    lse: Tensor  # float64 [..., Hq, L]
    doubt: Tensor  # of out: what it may be off by, as scores have an error and weights round
    score_error: Tensor  # [..., Hq, L]


def emulate(operands: Operands, seen: Tensor, scale: float, softcap: float, sinks: Tensor | None, device: str) -> Emulation:
    """The result block by block."""
    groups = operands.query.shape[-3] // operands.key.shape[-3]
    key, value = (t.repeat_interleave(groups, -3) for t in (operands.key, operands.value))
    each = [s.double().repeat_interleave(groups, -1)[..., None] for s in operands.scales]
    factor, term = each[0] * each[1] * scale, operands.term * scale
    exact = operands.query @ key.mT * factor[..., None] + term[..., None]
    scores = (softcap * torch.tanh(exact / softcap) if softcap else exact).float().double()
    size = (operands.query.abs() @ key.abs().mT * factor.abs()[..., None]).nan_to_num(0)
    largest = size.amax(-1) if size.shape[-1] else size.sum(-1)
    error = SCORE_ERROR[device] * (2 + largest + operands.term_size.nan_to_num(0) * abs(scale) + softcap)

    seen = seen.expand(scores.shape)
    most = torch.full(scores.shape[:-1], -INF, dtype=torch.float64)
    total, doubt, out = torch.zeros_like(most), *(torch.zeros(*most.shape, value.shape[-1], dtype=torch.float64) for _ in "ab")
    for begin in range(0, scores.shape[-1], BLOCK):
        s, v, shown = scores[..., begin : begin + BLOCK], value[..., begin : begin + BLOCK, :], seen[..., begin : begin + BLOCK]
        new = torch.maximum(most, torch.where(shown & ~s.isnan(), s, -INF).amax(-1))
        pivot = torch.where(new == -INF, 0, new)
        kept, most = torch.exp(most - pivot), new
        weights = torch.where(shown, torch.exp(s - pivot[..., None]) * WEIGHT, 0)
        low, rounded, high = (
            to_e4m3((weights * (1 + sign * error[..., None])).clamp(0, WEIGHT).float()).double() for sign in (-1, 0, 1)
        )
        total = total * kept + weights.sum(-1)
        out = out * kept[..., None] + rounded @ v
        doubt = doubt * kept[..., None] + ((high - low) + rounded * (error[..., None] + 2.0**-20)).nan_to_num(0) @ v.abs()
    lse = most + torch.log(total / WEIGHT)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double()[:, None].expand(lse.shape))
    share = torch.exp(most - torch.where(lse == -INF, 0, lse))[..., None] * each[2][..., None] / WEIGHT
    share = torch.where(most[..., None] == -INF, torch.where(total[..., None].isnan(), math.nan, 0.0), share)
    return Emulation(out * share, lse, (doubt * share.abs()).nan_to_num(0), error)


@dataclass
class Float8:
    """A problem of float8_attention that is small enough to print."""

    dtype: torch.dtype = torch.bfloat16
    batch: tuple = (2,)
    heads: tuple = (4, 2)  # of query, of key and value
    lengths: tuple = (70, 150)
    head_dims: tuple = (64, 64)
    layouts: tuple = ("contiguous",) * 3
    options: dict = field(default_factory=dict)
    smooth_keys: bool = True
    scales: bool = True  # of e4m3 inputs
    sinks: bool = False
    spans: tuple = (0, 0)  # the intervals of query_spans and of key_spans, 0 for none
    head_spans: bool = False
    out_dtype: torch.dtype | None = torch.float16
    size: float = 1.0  # standard deviation of query, key and value
    mean: float = 0.0  # of the keys
    seed: int = 0

    def __repr__(self):
        default = type(self)()
        said = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in said)})"

    def arguments(self) -> dict:
        """The tensors of the call, and its options."""
        g = torch.Generator().manual_seed(self.seed)
        (queries, keys), (width, width_v) = self.lengths, self.head_dims
        shapes = [(self.heads[0], queries, width), (self.heads[1], keys, width), (self.heads[1], keys, width_v)]
        plain = [random_tensor(*self.batch, *shape, scale=self.size, generator=g) for shape in shapes]
        plain[1] += self.mean
        made = dict(zip(("query", "key", "value"), plain, strict=True))
        names = ("query_scale", "key_scale", "value_scale")
        if self.dtype == E4M3:
            made = {name: to_e4m3(t * 100) for name, t in made.items()}
            if self.scales:
                made |= {n: (torch.rand(*self.batch, self.heads[1], generator=g) + 0.5) / 100 for n in names}
        else:
            made = {name: t.to(self.dtype) for name, t in made.items()}
        for name, layout in zip(("query", "key", "value"), self.layouts, strict=True):
            made[name] = lay_out(made[name], layout)
        if self.sinks:
            made["sinks"] = torch.randn(self.heads[0], generator=g)
        leading = (*self.batch, self.heads[0]) if self.head_spans else ()
        sides = zip(("query_spans", "key_spans"), self.spans, self.lengths, self.lengths[::-1], strict=True)
        made |= {name: random_spans(g, leading, own, other, n) for name, n, own, other in sides if n}
        scale = {"scale": 0.02} if self.dtype == E4M3 and not self.scales and "scale" not in self.options else {}
        return made | self.options | scale | {"smooth_keys": self.smooth_keys, "out_dtype": self.out_dtype}

    def check(self, device: str = "cpu") -> tuple[Tensor, Tensor]:
        """Compares out and lse with the emulation; returns them."""
        skip_without_kernel(device)
        arguments = self.arguments()
        on_device = {n: to_device(t, device) if isinstance(t, Tensor) else t for n, t in arguments.items()}
        out, lse = flash_online.float8_attention(**on_device, return_lse=True)
        assert torch.equal(out, flash_online.float8_attention(**on_device)) or out.isnan().any()
        check_results(out, lse, arguments, device, repr(self))
        return out, lse


def emulation_of(arguments: dict, device: str) -> Emulation:
    given = dict(arguments)
    query, key, value = (given[n].cpu() for n in ("query", "key", "value"))
    scales = [given.get(n) for n in ("query_scale", "key_scale", "value_scale")]
    operands = operands_of(query, key, value, scales, given.get("smooth_keys", True))
    queries, keys = query.shape[-2], key.shape[-2]
    rules = {n: given[n] for n in ("causal", "window", "alignment") if n in given}
    seen = reference.visible(queries, keys, **rules)
    if given.get("query_spans") is not None:
        seen = seen & in_spans(torch.arange(keys), given["query_spans"].cpu()[..., None, :])
    if given.get("key_spans") is not None:
        seen = seen & in_spans(torch.arange(queries), given["key_spans"].cpu()[..., None, :]).mT
    scale, sinks = given.get("scale"), given.get("sinks")
    scale = scale if scale is not None else query.shape[-1] ** -0.5 if query.shape[-1] else 1.0
    return emulate(operands, seen, scale, given.get("softcap", 0.0), None if sinks is None else sinks.cpu(), device)


def check_results(out: Tensor, lse: Tensor, arguments: dict, device: str, said: str = "") -> None:
    """Compares the results of a call with the emulation, element by element."""
    wanted = emulation_of(arguments, device)
    default = torch.bfloat16 if arguments["query"].dtype == E4M3 else arguments["query"].dtype
    assert out.dtype == (arguments.get("out_dtype") or default) and lse.dtype == torch.float32
    assert out.shape == wanted.out.shape and lse.shape == wanted.lse.shape
    ours, truth = out.double().cpu(), wanted.out
    unit, least = {torch.float16: (2.0**-11, 2.0**-24), torch.bfloat16: (2.0**-8, 2.0**-126)}[out.dtype]
    allowed = truth.abs() * (unit + 2.0**-18) + wanted.doubt + least
    if device == "cuda":  # sums in another order may have moved a key's mean, and with it a digit of float8
        root = truth[truth.isfinite()].square().mean().sqrt().nan_to_num(0)
        allowed = allowed + root / 10
        error = (ours - truth)[truth.isfinite()].square().mean().sqrt().nan_to_num(0)
        most = (ROOT_ERROR + wanted.score_error.mean()) * root + least
        assert error <= most or truth.numel() < 4096, f"{said}: out is off by {error / root:.3g}"
    over = compare(ours, truth, allowed)
    assert not over.any(), f"{said}: out is off by {((ours - truth).abs() / allowed)[over].max():.3g} of what is allowed"
    ours, truth = lse.double().cpu(), wanted.lse
    over = compare(ours, truth, wanted.score_error + truth.abs() * 2.0**-20 + 2.0**-18)
    assert not over.any(), f"{said}: lse is off by {(ours - truth).abs()[over].max():.3g}"


def compare(ours: Tensor, truth: Tensor, allowed: Tensor) -> Tensor:
    """Where two results differ by more than is allowed; NaN equals NaN, and infinity itself."""
    same = (ours == truth) | (ours.isnan() & truth.isnan())
    return ~(same | ((ours - truth).abs() <= allowed))
