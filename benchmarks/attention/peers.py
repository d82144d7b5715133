"""The providers of attention. Each is a function that returns the Call to time for a Problem, or raises Unavailable."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import inspect
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as torch_functional
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_online
import flash_online.functional as our_functional
from flash_online.integrations import torch_sdpa

from ..peers import MAX_SCORE_BYTES, Unavailable
from ..summary import BY_REGISTRY, FLASH, MATH, OURS, TORCH
from .cases import Problem
from .summary import BY_MASK, BY_OVERRIDE, CUDNN, DEFAULT, DENSE, DROP_IN, EFFICIENT, FA3, FA4, FLEX, PACKED, PLAIN, VARLEN

FA3_VARIABLE = "FLASH_ATTENTION_3"  # path of the library that registers torch.ops.flash_attn_3
KERNEL_VARIABLE = "FLASH_ONLINE_KERNEL"  # the family of CUDA kernels; the library reads it in its first call
MAX_MASK_BYTES = 4 << 30  # of a bool mask that takes the place of lists
NOT_IN_SDPA = ("window", "band", "softcap", "alibi")


@dataclass(frozen=True)
class Call:
    """`run` returns the output for `leaves`, both in the provider's layout; `view` converts from it to the problem's layout.
    `setting` is entered around samples, so that choosing a backend is not timed.
    """

    problem: Problem  # the solved problem: the cell's, except in `ours_all_visible` and `ours_by_default`
    run: Callable[[], Tensor]
    leaves: list[Tensor]
    grad: Tensor
    setting: Callable[[], AbstractContextManager] = nullcontext
    view: Callable[[Tensor], Tensor] = lambda t: t


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:160].rstrip('. ')}"


def _our_options(problem: Problem) -> dict:
    options = {name: problem.options[name] for name in ("causal", "softcap", "deterministic") if name in problem.options}
    if window := problem.options.get("window"):
        options["window"] = (window, 0)
    if band := problem.options.get("band"):
        options["window"] = (band, band)
    if dropout := problem.options.get("dropout"):
        options["dropout_p"] = dropout
    if problem.mask is not None:
        options["mask"] = problem.mask
    if problem.slopes is not None:
        options["alibi_slopes"] = problem.slopes
    if problem.pattern is not None:
        options |= problem.pattern.spans
    if problem.list is not None:
        options["blocks"] = problem.list
    return options


def ours(problem: Problem) -> Call:
    """Under strict(), so that calls forwarded to torch are never timed as ours."""
    tensors, options = (problem.query, problem.key, problem.value), _our_options(problem)
    if problem.starts is not None:
        packed = (problem.starts, problem.starts, problem.longest, problem.longest)
        run = functools.partial(flash_online.varlen_attention, *tensors, *packed, **options)
    else:
        run = functools.partial(flash_online.attention, *tensors, **options)
    return Call(problem, run, problem.leaves, problem.grad, flash_online.strict)


def ours_dropped_in(problem: Problem) -> Call:
    run = functools.partial(our_functional.scaled_dot_product_attention, *problem.leaves)
    return Call(problem, run, problem.leaves, problem.grad, flash_online.strict)


@contextmanager
def overridden():
    """Under strict(), like `ours`."""
    with flash_online.override(), flash_online.strict():
        yield


@contextmanager
def registered():
    torch_sdpa.activate()
    try:
        yield
    finally:
        torch_sdpa.restore()


def as_called(setting: Callable[[], AbstractContextManager], on_cuda_alone: bool = False) -> Callable[[Problem], Call]:
    """torch's function as a program calls it, looked up in every call; `setting` may put ours in its place."""

    def provider(problem: Problem) -> Call:
        if on_cuda_alone and problem.device != "cuda":
            raise Unavailable("it replaces operators on CUDA alone")
        causal = problem.options.get("causal", False)

        def run() -> Tensor:
            return torch_functional.scaled_dot_product_attention(*problem.leaves, is_causal=causal)

        return Call(problem, run, problem.leaves, problem.grad, setting)

    return provider


def ours_by_default(problem: Problem) -> Call:
    """Without the option, for comparison with the deterministic gradients."""
    return ours(problem.without("deterministic"))


def ours_without_list(problem: Problem) -> Call:
    """The plain call, for comparison with a list of all blocks."""
    if not bool(problem.listed.all()):
        raise Unavailable("the list hides blocks")
    plain = problem.without()
    plain.list = None
    return ours(plain)


def ours_all_visible(problem: Problem) -> Call:
    """With a mask that hides nothing, for comparison with a mask of hidden blocks of the same size."""
    dense = problem.without()
    dense.mask = torch.ones_like(problem.mask)
    return ours(dense)


def ours_by_mask(problem: Problem) -> Call:
    """Spans, or lists of blocks, as a bool mask of L x L."""
    if problem.listed is not None and problem.listed.numel() * problem.options["size"] ** 2 > MAX_MASK_BYTES:
        raise Unavailable(f"the mask takes more than {MAX_MASK_BYTES >> 30} GiB")
    dense = problem.without()
    dense.mask = problem.dense_mask()
    dense.pattern = dense.list = None
    return dataclasses.replace(ours(dense), problem=problem)


def packed(provider: Callable[[Problem], Call]) -> Callable[[Problem], Call]:
    """Documents as packed sequences."""

    def of_documents(problem: Problem) -> Call:
        pattern = problem.pattern
        if pattern is None:
            return provider(problem)
        if pattern.starts is None:
            raise Unavailable("packed sequences do not say this")
        rows = problem.without()
        rows.query, rows.key, rows.value = (
            t.detach()[0].transpose(0, 1).contiguous().requires_grad_() for t in (problem.query, problem.key, problem.value)
        )
        rows.grad, rows.pattern, rows.starts = problem.grad[0].transpose(0, 1).contiguous(), None, pattern.starts
        rows.longest, rows.options = int(pattern.starts.diff().max()), {"causal": True}
        return dataclasses.replace(provider(rows), problem=problem, view=lambda t: t.transpose(0, 1)[None])

    return of_documents


def load_fa3() -> None:
    """Registers torch.ops.flash_attn_3: from the binary that is named, else by importing FlashAttention-3's own package."""
    if path := os.environ.get(FA3_VARIABLE):
        _load_library(str(Path(path).resolve()))
        return
    with suppress(Exception):  # it loads a library, which may not fit this torch
        importlib.import_module("flash_attn_interface")
    if not hasattr(torch.ops.flash_attn_3, "fwd"):
        raise Unavailable(f"{FA3_VARIABLE} (or --fa3) names no binary of it, and it is not installed")


@functools.cache
def _load_library(path: str) -> None:
    runtime = Path(path).with_name("libcudart.so.12")  # for a binary built for CUDA 12, if the process has another CUDA
    if runtime.is_file():
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(path)


class FA3Attention(torch.autograd.Function):
    """FA3's two registered operators, after load_fa3(); query, key and value [B, L, H, E] or packed [T, H, E]."""

    @staticmethod
    def forward(ctx, query, key, value, options, deterministic):
        out, lse, *_ = torch.ops.flash_attn_3.fwd(query, key, value, **options, num_splits=1)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.options, ctx.deterministic = options, deterministic
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(t) for t in (query, key, value)]
        results = dict(zip(("dq", "dk", "dv"), grads, strict=True))
        torch.ops.flash_attn_3.bwd(grad, query, key, value, out, lse, **results, **ctx.options, deterministic=ctx.deterministic)
        return *grads, None, None


def fa3(problem: Problem) -> Call:
    _refuse_masks(problem)
    load_fa3()
    options = {
        "softmax_scale": problem.query.shape[-1] ** -0.5,
        "is_causal": problem.options.get("causal", False),
        "softcap": problem.options.get("softcap", 0.0),
    }
    if window := problem.options.get("window"):
        options |= {"window_size_left": window, "window_size_right": 0}
    if band := problem.options.get("band"):
        options |= dict.fromkeys(("window_size_left", "window_size_right"), band)
    if problem.starts is not None:
        options |= _packed_options(problem)
    leaves, grad, view = _rows_first(problem)
    deterministic = problem.options.get("deterministic", False)
    return Call(problem, lambda: FA3Attention.apply(*leaves, options, deterministic), leaves, grad, view=view)


def load_fa4() -> ModuleType:
    """FlashAttention-4's module, of the package flash-attn-4."""
    try:
        return importlib.import_module("flash_attn.cute")
    except Exception as error:  # it loads libraries, which may not fit this torch
        raise Unavailable(f"the package flash-attn-4 does not load: {reason(error)}") from error


def fa4(problem: Problem) -> Call:
    """The first call with new options, dtypes or head dims compiles kernels, outside the clock. Only what no argument of its
    functions can say is refused here: it refuses by itself what it has no kernel for."""
    _refuse_masks(problem)
    module = load_fa4()
    options = {name: problem.options[name] for name in ("causal", "softcap", "deterministic") if name in problem.options}
    if window := problem.options.get("window"):
        options["window_size"] = (window, 0)
    if band := problem.options.get("band"):
        options["window_size"] = (band, band)
    function = module.flash_attn_func
    if problem.starts is not None:
        function, options = module.flash_attn_varlen_func, options | _packed_options(problem)
    leaves, grad, view = _rows_first(problem)

    def run() -> Tensor:
        result = function(*leaves, **options)
        return result[0] if isinstance(result, tuple) else result  # most versions return the log-sum-exp, too

    return Call(problem, run, leaves, grad, view=view)


def fa4_version() -> str | None:
    """The package's version, as pre-releases differ in speed; None where it is not installed."""
    with suppress(PackageNotFoundError):
        return version("flash-attn-4")
    return None


def _refuse_masks(problem: Problem) -> None:
    if problem.mask is not None or problem.slopes is not None or "dropout" in problem.options:
        raise Unavailable("it has no masks, biases, slopes or dropout")


def _packed_options(problem: Problem) -> dict:
    """FlashAttention's arguments for packed sequences."""
    starts = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), problem.starts)
    return starts | dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), problem.longest)


def _rows_first(problem: Problem) -> tuple[list[Tensor], Tensor, Callable[[Tensor], Tensor]]:
    """Query, key and value, the output's gradient and the Call's view, in FlashAttention's own layout: [B, L, H, E] or packed
    [T, H, E]."""
    leaves = [problem.query, problem.key, problem.value]
    if problem.starts is not None:
        return leaves, problem.grad, Call.view
    leaves = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in leaves]
    return leaves, problem.grad.transpose(1, 2).contiguous(), _heads_first


def _heads_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2)


def sdpa(backend: SDPBackend, max_score_bytes: int = MAX_SCORE_BYTES) -> Callable[[Problem], Call]:
    """torch's function with one backend; the math backend only if its float32 scores take at most `max_score_bytes`."""

    def provider(problem: Problem) -> Call:
        if problem.starts is not None or any(name in problem.options for name in NOT_IN_SDPA):
            raise Unavailable("torch's function has no such option")
        deterministic = problem.options.get("deterministic")
        if deterministic and backend != SDPBackend.FLASH_ATTENTION:
            raise Unavailable("this backend has no deterministic backward pass")
        scores = 4 * problem.query.shape[:-1].numel() * problem.key.shape[-2]
        if backend == SDPBackend.MATH and scores > max_score_bytes:
            raise Unavailable(f"its scores take more than {max_score_bytes >> 20} MiB")
        options = {"is_causal": problem.options.get("causal", False), "dropout_p": problem.options.get("dropout", 0.0)}
        if problem.mask is not None:
            options["attn_mask"] = problem.mask
        if problem.cell.group_size > 1:
            options["enable_gqa"] = True
        run = functools.partial(
            torch_functional.scaled_dot_product_attention, problem.query, problem.key, problem.value, **options
        )
        return Call(problem, run, problem.leaves, problem.grad, lambda: _backend(backend, deterministic))

    return provider


@contextmanager
def _backend(backend: SDPBackend, deterministic: bool | None):
    filled = torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings(), sdpa_kernel(backend):
        warnings.simplefilter("ignore")  # torch warns of each reason for refusing
        if deterministic:
            torch.utils.deterministic.fill_uninitialized_memory = False  # filling every result would count in the time
            torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            if deterministic:
                torch.use_deterministic_algorithms(False)
                torch.utils.deterministic.fill_uninitialized_memory = filled


def flex(problem: Problem) -> Call:
    """FlexAttention, compiled again for every cell."""
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    if problem.device != "cuda":
        raise Unavailable("it is compiled for CUDA alone here")
    cap, slopes, blocks = problem.options.get("softcap"), problem.slopes, problem.blocks
    window = problem.options.get("window", problem.query.shape[-2])
    pattern = problem.pattern

    def score(s, b, h, i, j):
        s = cap * torch.tanh(s / cap) if cap else s
        return s if slopes is None else s - slopes[h] * (i - j).abs()

    def visible(b, h, i, j):
        if pattern is not None:
            return pattern.visible(b, h, i, j)
        if blocks is not None:
            return blocks[i // (problem.mask.shape[-2] // len(blocks)), j // (problem.mask.shape[-1] // len(blocks))]
        return (i >= j) & (i - j <= window)

    torch.compiler.reset()
    torch._functorch.config.donated_buffer = False  # the timer reuses a step's graph for its next sample
    length = problem.query.shape[-2]
    if problem.list is not None:
        counts, indices, size = problem.list
        indices = indices.clamp(max=indices.shape[-1] - 1)  # what stands after a count has to be a block, too
        whole = counts[None], indices[None]
        block_mask = BlockMask.from_kv_blocks(torch.zeros_like(whole[0]), whole[1], *whole, BLOCK_SIZE=size)
    elif blocks is not None or pattern is not None or problem.options.get("causal", False):
        block_mask = create_block_mask(visible, None, None, length, length, device=problem.query.device)
    else:
        block_mask = None
    options = {
        "block_mask": block_mask,
        "score_mod": score if cap or slopes is not None else None,
        "enable_gqa": problem.cell.group_size > 1,
    }
    compiled = torch.compile(flex_attention, dynamic=False)

    def run() -> Tensor:
        with torch.enable_grad():  # otherwise it would be compiled a second time
            return compiled(problem.query, problem.key, problem.value, **options)

    return Call(problem, run, problem.leaves, problem.grad)


def torch_varlen(problem: Problem) -> Call:
    from torch.nn.attention.varlen import varlen_attn

    known, window = inspect.signature(varlen_attn).parameters, problem.options.get("window", -1)
    if window >= 0 and "window_size" not in known:
        raise Unavailable("this torch's varlen_attn has no window")
    options = {"window_size": (window, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = problem.cell.group_size > 1
    packed = (problem.starts, problem.starts, problem.longest, problem.longest)
    run = functools.partial(varlen_attn, problem.query, problem.key, problem.value, *packed, **options)
    return Call(problem, run, problem.leaves, problem.grad)


PROVIDERS: dict[str, Callable[[Problem], Call]] = {
    OURS: ours,
    DROP_IN: ours_dropped_in,
    DEFAULT: ours_by_default,
    DENSE: ours_all_visible,
    PLAIN: ours_without_list,
    BY_MASK: ours_by_mask,
    PACKED: packed(ours),
    FA3: packed(fa3),
    FA4: packed(fa4),
    CUDNN: sdpa(SDPBackend.CUDNN_ATTENTION),
    FLASH: sdpa(SDPBackend.FLASH_ATTENTION),
    EFFICIENT: sdpa(SDPBackend.EFFICIENT_ATTENTION),
    MATH: sdpa(SDPBackend.MATH),
    FLEX: flex,
    VARLEN: torch_varlen,
    TORCH: as_called(nullcontext),
    BY_OVERRIDE: as_called(overridden),
    BY_REGISTRY: as_called(registered, on_cuda_alone=True),
}
# The memory-efficient backend is far slower on plain cells and FlexAttention takes seconds to compile, so each is timed only
# where it competes.
IN_GROUP = {
    "plain": (OURS, FA3, FA4, CUDNN, FLASH),
    "features": (OURS, FA3, FA4, CUDNN, FLASH, EFFICIENT, MATH),
    "between": (OURS, FA3, FA4, CUDNN, FLASH, EFFICIENT, MATH),
    "packed": (OURS, FA3, FA4, VARLEN),
    "spans": (OURS, BY_MASK, PACKED, FA3, FA4, FLEX),
    "blocks": (OURS, BY_MASK, PLAIN, FLEX),
    "short": (OURS, FA3, FA4, CUDNN, FLASH, EFFICIENT),
    "host": (OURS, DROP_IN, FA3, FA4, CUDNN, FLASH, EFFICIENT, MATH),
    "calls": (TORCH, BY_OVERRIDE, BY_REGISTRY),
}
IN_KIND = {
    "deterministic": (DEFAULT,),
    "block-sparse mask": (DENSE, FLEX),
    "GQA": (FLEX,),
    "window": (FLEX,),
    "softcap": (FLEX,),
    "softcap, E 256": (FLEX,),
    "ALiBi": (FLEX,),
}
PEERS = [name for name in PROVIDERS if not name.startswith(OURS)]
# What one kernel family is compared with: FlashAttention-2, which both are, and what torch runs by itself.
KERNEL_PEERS = [FLASH, VARLEN, TORCH]
SPARSE_PEERS = [FLEX]  # and with spans and lists


def providers(cell, wanted: list[str] | None = None) -> dict[str, Callable[[Problem], Call]]:
    """The providers of a cell, ours first; if `wanted` names peers, only those."""
    names = (*IN_GROUP[cell.family], *(IN_KIND.get(cell.kind, ()) if cell.family in ("features", "between") else ()))
    return {n: c for n, c in PROVIDERS.items() if n in names and (n not in PEERS or not wanted or n in wanted)}
