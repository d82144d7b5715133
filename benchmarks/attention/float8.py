"""Cells of float8: the providers of a forward pass with products in float8, and their check.

Every provider makes its own e4m3 tensors and scales of the cell's numbers, before the clock starts, unless quantising is what
it is timed for. Some rows of its result are compared with float64 attention of the numbers that it multiplies. The error is
relative: the root mean square of the difference over that of float64's rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import flash_online
from flash_online import reference, testing

from ..peers import Unavailable
from ..summary import OURS
from .cases import Problem
from .peers import Call, load_fa3, reason
from .summary import CUDNN_FLOAT8, FA3_FLOAT8, IN_BFLOAT16, QUANTISING

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
CHECKED_ROWS = 128  # queries of a sequence, the same ones for all heads
MOST_ERROR, MOST_PEER_ERROR = 0.05, 0.1  # a larger one is a wrong result
CUDNN_WEIGHT_SCALE = 256.0  # weights from 0 to 1 are multiplied by it, so that small ones are not lost
CUDNN_OUT_SHARE = 0.5  # of e4m3's largest number, for the largest of the results


# --- Quantising, and what the results should be ----------------------------------------------------------------------------


def quantised(tensor: Tensor, dims: int = 2) -> tuple[Tensor, Tensor]:
    """(e4m3 numbers, their float32 scale), one scale for the last `dims` dimensions, which the scale keeps as ones."""
    wide = tensor.float()
    scale = wide.abs().amax(tuple(range(-dims, 0)), keepdim=True) / LARGEST
    return (wide / torch.where(scale == 0, 1, scale)).clamp(-LARGEST, LARGEST).to(E4M3), scale


def widened(numbers: Tensor, scale: Tensor) -> Tensor:
    """What e4m3 numbers and their scale stand for, in float64."""
    return numbers.float().double() * scale.double()


def without_mean(key: Tensor) -> Tensor:
    """Keys less their mean over the sequence, which the softmax does not see, in float32."""
    return key.float() - key.double().mean(-2, keepdim=True).float()


def checked_rows(length: int, count: int = CHECKED_ROWS) -> Tensor:
    """Indices of random queries and of the last, in order, on the CPU; all of a short sequence."""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(1))[:count]
    return torch.cat([order[: count - 1], torch.tensor([length - 1])]).unique()


def exact_rows(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, causal: bool) -> Tensor:
    """Attention in float64 of the queries at `rows`, [B, H, rows, E], head by head, as scores take memory. Query, key and value
    are [B, H, L, E] of any dtype that float64 holds."""
    rows = rows.to(query.device)
    seen = torch.arange(key.shape[-2], device=query.device) <= rows[:, None] if causal else None
    heads = [
        reference.attention(query[:, h, rows].double(), key[:, h].double(), value[:, h].double(), mask=seen)
        for h in range(query.shape[1])
    ]
    return torch.stack(heads, 1)


def relative_error(result: Tensor, truth: Tensor) -> float:
    """Root mean square of the error over that of the truth; nan if the result has one."""
    return ((result.double() - truth).square().sum() / truth.square().sum()).sqrt().item()


# --- Providers -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Float8Call(Call):
    """`operands`: query, key and value as the provider multiplies them, in float64 or bfloat16, [B, H, L, E]."""

    operands: tuple[Tensor, Tensor, Tensor] = ()


def _call(problem: Problem, run: Callable[[], Tensor], operands: tuple[Tensor, ...], **others) -> Float8Call:
    return Float8Call(problem, run, [], problem.grad, operands=operands, **others)


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    return problem.query.detach(), problem.key.detach(), problem.value.detach()


def ours(problem: Problem) -> Float8Call:
    """On e4m3 tensors, with a scale for each batch and head."""
    made = [quantised(t) for t in _tensors(problem)]
    scales = {f"{n}_scale": s[..., 0, 0] for n, (_, s) in zip(("query", "key", "value"), made, strict=True)}
    causal = problem.options.get("causal", False)
    run = functools.partial(flash_online.float8_attention, *(t for t, _ in made), causal=causal, **scales)
    return _call(problem, run, tuple(widened(*pair) for pair in made), setting=flash_online.strict)


def ours_quantising(problem: Problem) -> Float8Call:
    """On 16-bit tensors, keys less their mean: the whole call."""
    query, key, value = _tensors(problem)
    run = functools.partial(flash_online.float8_attention, query, key, value, causal=problem.options.get("causal", False))
    operands = tuple(widened(*quantised(t)) for t in (query, without_mean(key), value))
    return _call(problem, run, operands, setting=flash_online.strict)


def ours_in_bfloat16(problem: Problem) -> Float8Call:
    tensors = _tensors(problem)
    run = functools.partial(flash_online.attention, *tensors, causal=problem.options.get("causal", False))
    return _call(problem, run, tensors, setting=flash_online.strict)


def fa3(problem: Problem) -> Float8Call:
    """On e4m3 tensors [B, L, H, E], its native order, with a scale for each batch and head; without gradients."""
    load_fa3()
    made = [quantised(t) for t in _tensors(problem)]
    rows = [t.transpose(1, 2).contiguous() for t, _ in made]
    scales = {f"{n}_descale": s[..., 0, 0].contiguous() for n, (_, s) in zip("qkv", made, strict=True)}
    options = {"softmax_scale": problem.query.shape[-1] ** -0.5, "is_causal": problem.options.get("causal", False)}

    def run() -> Tensor:
        return torch.ops.flash_attn_3.fwd(*rows, **scales, **options, num_splits=1)[0]

    return _call(problem, run, tuple(widened(*pair) for pair in made), view=lambda t: t.transpose(1, 2))


@functools.cache
def _cudnn():
    """cuDNN's Python frontend and a handle of it."""
    try:
        import cudnn

        return cudnn, cudnn.create_handle()
    except Exception as error:  # it loads libcudnn when it is imported
        raise Unavailable(f"nvidia-cudnn-frontend, cuDNN's frontend, cannot be used: {reason(error)}") from error


class CudnnGraph:
    """cuDNN's forward pass in float8 of tensors of these shapes and strides: one scale for each tensor, results in e4m3 too."""

    SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, causal: bool):
        cudnn, self.handle = _cudnn()
        narrow, wide = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
        types = {"io_data_type": narrow, "intermediate_data_type": wide, "compute_data_type": wide}
        self.graph = cudnn.pygraph(**types, handle=self.handle)
        inputs = {
            name: self.graph.tensor(name=name, dim=list(t.shape), stride=list(t.stride()), data_type=narrow)
            for name, t in zip("qkv", (query, key, value), strict=True)
        }
        one = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1]}
        self.scales = {name: self.graph.tensor(name=name, **one, data_type=wide) for name in self.SCALES}
        self.inputs = list(inputs.values())
        self.out, *self.largest = self._attend(inputs, query.shape[-1] ** -0.5, causal)
        self.out.set_output(True).set_dim(list(query.shape)).set_stride(list(query.stride())).set_data_type(narrow)
        for tensor in self.largest:
            tensor.set_output(True).set_dim(one["dim"]).set_stride(one["stride"]).set_data_type(wide)
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()

    def _attend(self, inputs: dict, scale: float, causal: bool) -> list:
        """The graph's [out, largest weight, largest result]; older frontends know `is_inference` alone."""
        options = self.scales | {"attn_scale": scale} | ({"use_causal_mask": True} if causal else {})
        try:
            out, _, *largest = self.graph.sdpa_fp8(**inputs, **options, generate_stats=False)
        except TypeError:
            out, _, *largest = self.graph.sdpa_fp8(**inputs, **options, is_inference=True)
        return [out, *largest]

    def run(self, tensors: list[Tensor], scales: dict[str, Tensor]) -> Tensor:
        """The result in e4m3, in query's strides, times `scale_o`."""
        out = torch.empty_like(tensors[0])
        space = torch.empty(max(1, self.graph.get_workspace_size()), dtype=torch.uint8, device=out.device)
        largest = [torch.empty(1, device=out.device) for _ in self.largest]
        given = dict(zip(self.inputs, (t.view(torch.uint8) for t in tensors), strict=True))
        given |= {self.scales[name]: scale for name, scale in scales.items()} | {self.out: out.view(torch.uint8)}
        self.graph.execute(given | dict(zip(self.largest, largest, strict=True)), space, handle=self.handle)
        return out


def cudnn(problem: Problem) -> Float8Call:
    """In the first order of dimensions that it takes: [B, H, L, E], as ours, or [B, L, H, E]."""
    if problem.device != "cuda":
        raise Unavailable("it runs on CUDA alone")
    module, handle = _cudnn()
    module.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    made = [quantised(t, 4) for t in _tensors(problem)]
    heads_first = [t for t, _ in made]
    heads_last = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in heads_first]
    causal, refused = problem.options.get("causal", False), None
    for tensors in (heads_first, heads_last):
        try:
            graph = CudnnGraph(*tensors, causal)
            break
        except Exception as error:  # the frontend raises its own for what cuDNN has no kernel for
            refused = error
    else:
        raise Unavailable(f"refused: {reason(refused)}")
    one = torch.ones(1, 1, 1, 1, device=problem.device)
    scales = {f"descale_{name}": s.contiguous() for name, (_, s) in zip("qkv", made, strict=True)}
    scales |= {"scale_s": CUDNN_WEIGHT_SCALE * one, "descale_s": one / CUDNN_WEIGHT_SCALE, "scale_o": one}
    largest = graph.run(tensors, scales).float().abs().max().item()
    if not (math.isfinite(largest) and largest > 0):
        raise Unavailable(f"wrong here, its largest result is {largest}")
    out_scale = CUDNN_OUT_SHARE * LARGEST / largest
    scales["scale_o"] = out_scale * one
    operands = tuple(widened(*pair) for pair in made)
    return _call(problem, lambda: graph.run(tensors, scales), operands, view=lambda t: t.float() / out_scale)


PROVIDERS: dict[str, Callable[[Problem], Float8Call]] = {
    OURS: ours,
    QUANTISING: ours_quantising,
    IN_BFLOAT16: ours_in_bfloat16,
    CUDNN_FLOAT8: cudnn,
    FA3_FLOAT8: fa3,
}
PEERS = [name for name in PROVIDERS if not name.startswith(OURS)]


def providers(wanted: list[str] | None = None) -> dict[str, Callable[[Problem], Float8Call]]:
    """Ours first; if `wanted` names peers, only those."""
    return {name: make for name, make in PROVIDERS.items() if name not in PEERS or not wanted or name in wanted}


def versions() -> dict[str, str]:
    """What cuDNN's providers run, for the record; empty without the frontend."""
    try:
        module, _ = _cudnn()
    except Unavailable:
        return {}
    backend = getattr(module, "backend_version_string", getattr(module, "backend_version", lambda: "unknown"))
    return {"cudnn": str(backend()), "cudnn_frontend": str(getattr(module, "__version__", "unknown"))}


def product_dtype(device: str) -> torch.dtype:
    """The dtype of the baseline's product: float8 where the GPU multiplies it."""
    narrow = device == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
    return E4M3 if narrow else torch.bfloat16


# --- The check -------------------------------------------------------------------------------------------------------------


def check(problem: Problem, makers: dict, result: dict) -> dict[str, tuple[Float8Call, dict]]:
    """Checks a call of every provider. Returns the call, its error and its memory. Peers that fail or are wrong, and ours where
    it has no kernel, are entered under `unavailable`; raises AssertionError if ours is wrong."""
    cell, checked = problem.cell, {}
    rows = checked_rows(cell.sizes["L"])
    for name, make in makers.items():
        own, taken = name.startswith(OURS), []
        try:
            call = make(problem)
            with call.setting(), torch.no_grad():
                call.run()  # excludes a first call's plans and caches from the memory of the next
                run = lambda call=call, taken=taken: taken.append(call.run())  # noqa: E731
                extra = testing.peak_extra_bytes(run, device=problem.device)
        except Unavailable as why:
            result["unavailable"][name] = str(why)
            continue
        except Exception as error:  # peers may raise anything, ours only NotImplementedError
            if own and not isinstance(error, NotImplementedError):
                raise AssertionError(f"{cell.kind} ({cell.label}), {name}: {reason(error)}") from error
            result["unavailable"][name] = reason(error)
            continue
        out = taken.pop()
        truth = exact_rows(*call.operands, rows, problem.options.get("causal", False))
        error = relative_error(call.view(out)[:, :, rows.to(out.device)], truth)
        if not error <= (MOST_ERROR if own else MOST_PEER_ERROR):  # nan, too
            if own:
                raise AssertionError(f"{cell.kind} ({cell.label}), {name}: a relative error of {error:.2g}")
            result["unavailable"][name] = f"wrong here, its relative error is {error:.2g}"
            continue
        checked[name] = (call, {"error": error, "beyond_results_bytes": extra - out.numel() * out.element_size()})
    return checked
