"""CUDA kernels on the host, where fibers stand for threads (tests/unit/device_on_host): their libraries, the structs that they
take, and tensors that end where memory does."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent / "unit" / "device_on_host"
ROOT = Path(__file__).parents[1]
NVCC = shutil.which("nvcc")  # for CUDA's headers and the 16-bit types in them

DTYPES = {torch.bool: 0, torch.float16: 1, torch.bfloat16: 2, torch.float32: 3, torch.float8_e4m3fn: 6, torch.float8_e5m2: 7}
PLAIN, ALL_OPTIONS, SMALL_TILE = range(3)  # kinds of a Variant


def require_sources() -> None:
    """Skips the module that calls it where there is nothing to compile, or no compiler."""
    if not (ROOT / "csrc").is_dir():
        pytest.skip("the sources are part of a checkout", allow_module_level=True)
    if NVCC is None:
        pytest.skip("needs nvcc", allow_module_level=True)


def copy_sources(folder: Path) -> None:
    """Puts a copy of csrc into `folder` in which hw/ has the host's headers."""
    for part in ("core", "cuda"):
        shutil.copytree(ROOT / "csrc" / part, folder / part)
    shutil.copytree(HERE / "hw", folder / "cuda" / "hw", dirs_exist_ok=True)


def compile_library(folder: Path, source: str, name: str, *options: str) -> Path:
    """Compiles a source of device_on_host with the copy of csrc in `folder`."""
    path = folder / name
    host = "-Xcompiler=-fPIC,-w,-fno-gnu-unique,-fno-extern-tls-init"
    common = ["-x", "c++", "-std=c++20", "-O1", "-shared", host, f"-I{folder}", f"-I{HERE}"]
    subprocess.run([NVCC, *common, *options, HERE / source, "-o", path], check=True)
    return path


# --- The structs of csrc/core/problem.h ------------------------------------------------------------------------------------


def structure(name: str, fields: str) -> type[ctypes.Structure]:
    """A struct: `fields` has the type's letter before each name, and after it * n for an array."""
    types = {"b": ctypes.c_int8, "i": ctypes.c_int32, "q": ctypes.c_int64, "d": ctypes.c_double, "p": ctypes.c_void_p}
    types |= {one: globals()[one] for one in ("View4", "SpanView", "CacheView", "Visibility") if one in globals()}
    pairs = []
    for field in fields.split(", "):
        kind, name_of, *count = field.split()
        pairs.append((name_of, types[kind] * int(count[1]) if count else types[kind]))
    return type(name, (ctypes.Structure,), {"_fields_": pairs})


View4 = structure("View4", "p data, q stride * 4")
SpanView = structure("SpanView", "p data, q stride * 3, i intervals")
Visibility = structure("Visibility", "q left, q right, q offset")
CacheView = structure(
    "CacheView",
    "q page, q blocks, q entries, p table, q table_rows, q table_stride, p rows, p lengths, p left, p new_starts, q new_keys, "
    "p query_lengths, b dtype, p key_scale, p value_scale, q key_scale_stride * 2, q value_scale_stride * 2, q kv_splits",
)
AttentionProblem = structure(
    "AttentionProblem",
    "b dtype, b mask_dtype, b tf32, q batch, q heads, q key_heads, q value_heads, q queries, q keys, q head_dim, q head_dim_v, "
    "q batch_begin, View4 query, View4 key, View4 value, View4 mask, p alibi_slopes, q alibi_stride * 2, p sinks, p rng, "
    "p query_starts, p key_starts, q total_queries, q total_keys, CacheView cache, Visibility visible, b lower_right, d scale, "
    "d softcap, d dropout, View4 out, p lse, p lse_low, q lse_stride * 2, p max_logit, View4 tiles, i tile_keys, "
    "SpanView query_spans, SpanView key_spans",
)
AttentionGradients = structure(
    "AttentionGradients",
    "View4 grad_out, p grad_lse, View4 grad_query, View4 grad_key, View4 grad_value, View4 grad_mask, b grad_mask_dtype, "
    "b add_to_grad_mask, q mask_size * 4, q kv_grad_heads, p grad_sinks, p delta, p wide_delta, p row_max, p row_log_sum",
)


def view(tensor: torch.Tensor | None, shape=None) -> View4:
    if tensor is None:
        return View4()
    if shape is not None:
        tensor = tensor.expand(shape)
    if tensor.dim() == 3:  # packed: [total, heads, columns]
        return View4(tensor.data_ptr(), (0, tensor.stride(1), tensor.stride(0), tensor.stride(2)))
    return View4(tensor.data_ptr(), tuple(tensor.stride()))


def problem_of(
    query,
    key,
    value,
    out,
    lse,
    *,
    window=(-1, -1),
    offset=0,
    mask=None,
    softcap=0.0,
    slopes=None,
    starts=None,
    tf32=False,
    query_spans=None,
    key_spans=None,
    blocks=None,
) -> AttentionProblem:
    """Tensors are [B, H, L, E], or packed [T, H, E] with the int32 `starts` of queries and keys alike. Spans are [H, rows, 2 or
    4]. `blocks`: bool tiles [H, tiles of 64 queries, tiles], and the keys of a tile. All must outlive it."""
    packed = starts is not None
    heads, key_heads = query.shape[1], key.shape[1]
    batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
    if packed:
        batch, queries = len(starts) - 1, max(b - a for a, b in itertools.pairwise(starts.tolist()))
        keys = queries
    problem = AttentionProblem(
        dtype=DTYPES[query.dtype], tf32=tf32, batch=batch, heads=heads, key_heads=key_heads, value_heads=value.shape[1],
        queries=queries, keys=keys, head_dim=query.shape[-1], head_dim_v=value.shape[-1], query=view(query), key=view(key),
        value=view(value), out=view(out), visible=Visibility(*window, offset), scale=query.shape[-1] ** -0.5, softcap=softcap,
        lse=lse.data_ptr(),
    )  # fmt: skip
    problem.cache.entries = 1
    problem.lse_stride[0], problem.lse_stride[1] = (0, query.shape[0]) if packed else lse.stride()[:2]
    if packed:
        problem.query_starts = problem.key_starts = starts.data_ptr()
        problem.total_queries = problem.total_keys = query.shape[0]
    if mask is not None:
        problem.mask, problem.mask_dtype = view(mask, (batch, heads, queries, keys)), DTYPES[mask.dtype]
    for name, spans in (("query_spans", query_spans), ("key_spans", key_spans)):
        if spans is not None:
            setattr(problem, name, SpanView(spans.data_ptr(), (0, *spans.stride()[:2]), spans.shape[-1] // 2))
    if blocks is not None:
        tiles, problem.tile_keys = blocks
        problem.tiles = View4(tiles.data_ptr(), (0, *tiles.stride()))
    if slopes is not None:
        problem.alibi_slopes = slopes.data_ptr()
        problem.alibi_stride[1] = 1
    return problem


def attention_kernels(folder: Path, source: str) -> Callable[[int], ctypes.CDLL]:
    """compiled(head dim): the library of `source` for it."""
    copy_sources(folder)
    libraries = {}

    def compiled(head_dim: int) -> ctypes.CDLL:
        if head_dim not in libraries:
            options = f"-I{folder / 'cuda' / 'attention'}", f"-DHEAD_DIM={head_dim}"
            path = compile_library(folder, source, f"{head_dim}.so", *options)
            library = ctypes.CDLL(str(path))
            library.last_error.restype = ctypes.c_char_p
            library.size_of_problem.restype = ctypes.c_int64
            assert library.size_of_problem() == ctypes.sizeof(AttentionProblem)
            libraries[head_dim] = library
        return libraries[head_dim]

    return compiled


def tile_of(head_dim: int) -> int:
    """The head dim of the kernels that take it."""
    return next(tile for tile in (32, 64, 96, 128, 192, 256, 512) if head_dim <= tile)


# --- Tensors ---------------------------------------------------------------------------------------------------------------


def draw(lengths=(200, 210), head_dim=64, heads=(2, 2), dtype=torch.bfloat16, batch=1, head_dim_v=None, size=1.0, seed=0):
    """Query, key and value of (query heads, key heads) `heads`; queries are `size` times as large."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads[0], lengths[0], head_dim), (batch, heads[1], lengths[1], head_dim)]
    shapes.append((batch, heads[1], lengths[1], head_dim_v or head_dim))
    query, key, value = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    return query * size, key, value


ROW_LAYOUTS = ["rows of heads", "fused", "columns off 16 bytes", "rows off 16 bytes", "columns apart"]


def moved(t: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers elsewhere in memory."""
    if layout == "rows of heads":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "fused":
        return torch.stack([t, t], 3).unbind(3)[1]
    if layout == "columns off 16 bytes":
        return torch.cat([t[..., :3], t], -1)[..., 3:]
    if layout == "rows off 16 bytes":
        return torch.cat([t, t[..., :4]], -1)[..., : t.shape[-1]]
    return torch.stack([t, t], -1)[..., 0]


def apart(t: torch.Tensor) -> torch.Tensor:
    """The same numbers with NaN between the rows; rows that start at multiples of 16 bytes still do."""
    return torch.cat([t, torch.full_like(t[..., :8], torch.nan)], -1)[..., : t.shape[-1]]


def seen_keys(queries: int, keys: int, window: tuple[int, int], offset: int) -> torch.Tensor:
    """bool [queries, keys]: what the window's bounds, of which negative ones are none, let the query at i + offset see."""
    position, key = torch.arange(queries)[:, None] + offset, torch.arange(keys)[None]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if window[0] >= 0:
        seen &= key >= position - window[0]
    if window[1] >= 0:
        seen &= key <= position + window[1]
    return seen


def at_the_end_of_a_page(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose last byte is the last that may be read: the page after it may not."""
    page, size = mmap.PAGESIZE, tensor.numel() * tensor.element_size()
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(base + pages * page), page, 0) == 0
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=pages * page - size).view(tensor.shape)
    return copy.copy_(tensor)


def assert_runs_in_a_child(call: Callable[[], object]) -> None:
    """Calls it in a process of its own, which a read or a write past the end of memory ends."""
    child = os.fork()
    if child == 0:
        try:
            call()
            os._exit(0)
        finally:  # the child of a failed call must not go on with the tests
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0  # -11: an access past the end
