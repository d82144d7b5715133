"""The general forward kernels, for GPUs before Hopper, thread by thread on the host, against float64: results, the data of each
thread, and that a thread waits for its copies. device_on_host/ has the fibers that stand for threads."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from flash_online import reference, testing

HERE = Path(__file__).parent / "device_on_host"
ROOT = Path(__file__).parents[2]
NVCC = shutil.which("nvcc")  # for CUDA's headers and the 16-bit types in them
if not (ROOT / "csrc").is_dir():
    pytest.skip("the sources are part of a checkout", allow_module_level=True)
if NVCC is None:
    pytest.skip("needs nvcc", allow_module_level=True)

PLAIN, ALL_OPTIONS, SMALL_TILE = range(3)  # Variant
DTYPES = {torch.bool: 0, torch.float16: 1, torch.bfloat16: 2, torch.float32: 3, torch.float8_e4m3fn: 6, torch.float8_e5m2: 7}


def structure(name: str, fields: str) -> type[ctypes.Structure]:
    """A struct of csrc/core/problem.h: `fields` has the type's letter before each name, and after it * n for an array."""
    types = {"b": ctypes.c_int8, "q": ctypes.c_int64, "d": ctypes.c_double, "p": ctypes.c_void_p}
    types |= {one: globals()[one] for one in ("View4", "CacheView", "Visibility") if one in globals()}
    pairs = []
    for field in fields.split(", "):
        kind, name_of, *count = field.split()
        pairs.append((name_of, types[kind] * int(count[1]) if count else types[kind]))
    return type(name, (ctypes.Structure,), {"_fields_": pairs})


View4 = structure("View4", "p data, q stride * 4")
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
    "d softcap, d dropout, View4 out, p lse, p lse_low, q lse_stride * 2",
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """kernels(head dim): the library of its forward kernels."""
    folder = tmp_path_factory.mktemp("forward_sm80")
    for part in ("core", "cuda"):
        shutil.copytree(ROOT / "csrc" / part, folder / part)
    shutil.copytree(HERE / "hw", folder / "cuda" / "hw", dirs_exist_ok=True)
    libraries = {}

    def compiled(head_dim: int):
        if head_dim not in libraries:
            path = folder / f"{head_dim}.so"
            options = [
                "-x",
                "c++",
                "-std=c++20",
                "-O1",
                "-shared",
                "-Xcompiler=-fPIC,-w,-fno-gnu-unique",
                f"-DHEAD_DIM={head_dim}",
            ]
            folders = (folder, HERE, folder / "cuda" / "attention")
            command = [NVCC, *options, *(f"-I{one}" for one in folders), HERE / "forward_sm80.cpp", "-o", path]
            subprocess.run(command, check=True)
            library = ctypes.CDLL(str(path))
            library.last_error.restype = ctypes.c_char_p
            library.size_of_problem.restype = ctypes.c_int64
            assert library.size_of_problem() == ctypes.sizeof(AttentionProblem)
            libraries[head_dim] = library
        return libraries[head_dim]

    return compiled


def view(tensor: torch.Tensor | None, shape=None) -> View4:
    if tensor is None:
        return View4()
    if shape is not None:
        tensor = tensor.expand(shape)
    if tensor.dim() == 3:  # packed: [total, heads, columns]
        return View4(tensor.data_ptr(), (0, tensor.stride(1), tensor.stride(0), tensor.stride(2)))
    return View4(tensor.data_ptr(), tuple(tensor.stride()))


def run(library, query, key, value, *, window=(-1, -1), offset=0, mask=None, softcap=0.0, slopes=None, starts=None, room=None):
    """(out, lse, variant). Tensors are [B, H, L, E], or packed [T, H, E] with `starts` of queries and keys alike."""
    packed = starts is not None
    batch = len(starts) - 1 if packed else query.shape[0]
    heads, key_heads = (query.shape[1], key.shape[1])
    queries, keys = (max(b - a for a, b in itertools.pairwise(starts)),) * 2 if packed else (query.shape[2], key.shape[2])
    out = torch.full((*query.shape[:-1], value.shape[-1]), float("nan"), dtype=query.dtype)
    lse = torch.full((1, heads, query.shape[0]) if packed else query.shape[:-1], float("nan"))
    begins = torch.tensor(starts, dtype=torch.int32) if packed else None
    problem = AttentionProblem(
        dtype=DTYPES[query.dtype], batch=batch, heads=heads, key_heads=key_heads, value_heads=value.shape[1], queries=queries,
        keys=keys, head_dim=query.shape[-1], head_dim_v=value.shape[-1], query=view(query), key=view(key), value=view(value),
        out=view(out), visible=Visibility(*window, offset), scale=query.shape[-1] ** -0.5, softcap=softcap, lse=lse.data_ptr(),
    )  # fmt: skip
    problem.cache.entries = 1
    problem.lse_stride[0], problem.lse_stride[1] = (0, query.shape[0]) if packed else lse.stride()[:2]
    if packed:
        problem.query_starts = problem.key_starts = begins.data_ptr()
        problem.total_queries = problem.total_keys = query.shape[0]
    if mask is not None:
        problem.mask, problem.mask_dtype = view(mask, (batch, heads, queries, keys)), DTYPES[mask.dtype]
    if slopes is not None:
        problem.alibi_slopes = slopes.data_ptr()
        problem.alibi_stride[1] = 1
    library.set_shared_bytes(room or 227 << 10)
    variant = library.attention_forward(ctypes.byref(problem))
    assert variant >= 0, library.last_error().decode()
    return out, lse, variant


def draw(lengths=(200, 210), head_dim=64, heads=(2, 2), dtype=torch.bfloat16, batch=1, head_dim_v=None, size=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads[0], lengths[0], head_dim), (batch, heads[1], lengths[1], head_dim)]
    shapes.append((batch, heads[1], lengths[1], head_dim_v or head_dim))
    query, key, value = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    return query * size, key, value


def check(got, inputs, name="out", **options):
    """Compares (out, lse, ...) with float64; `options` are the reference's."""
    out, lse, *_ = got
    plain, truth = (
        reference.attention(*(t.to(kind) for t in inputs), return_lse=True, **options) for kind in (out.dtype, torch.float64)
    )
    testing.assert_close_to_float64(out, plain[0], truth[0], name=name)
    torch.testing.assert_close(lse.double(), truth[1], rtol=2e-6, atol=2e-5)


def tile_of(head_dim: int) -> int:
    return next(tile for tile in (32, 64, 96, 128, 192, 256, 512) if head_dim <= tile)


def slow(*cell):
    return pytest.param(*cell, marks=pytest.mark.slow)  # the kernels of another head dim take five seconds to compile


LENGTHS = [(1, 1), (5, 7), (64, 48), (129, 65), (77, 300), (300, 77), (260, 200), (3, 0)]


@pytest.mark.thin(8)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, *map(slow, (32, 96, 192, 256))])
def test_plain(kernels, head_dim, causal, lengths):
    dtype = torch.float16 if sum(lengths) % 2 else torch.bfloat16
    inputs = draw(lengths, head_dim, (4, 2), dtype, size=3)
    got = run(kernels(head_dim), *inputs, window=(-1, 0 if causal else -1))
    assert got[2] == PLAIN
    check(got, inputs, causal=causal)


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    "head_dim, head_dim_v",
    [(40, 40), (100, 36), slow(72, 72), slow(80, 64), slow(7, 7), slow(192, 128), slow(400, 392)],
    ids=str,
)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (50, 20)], ids=str)
def test_columns_within_a_tile(kernels, head_dim, head_dim_v, window):
    """Head dims that fill no tile, among them some whose rows are not whole vectors."""
    inputs = draw((150, 170), head_dim, head_dim_v=head_dim_v, size=2)
    got = run(kernels(tile_of(head_dim)), *inputs, window=window)
    check(got, inputs, window=tuple(None if w < 0 else w for w in window))


@pytest.mark.thin(3)
@pytest.mark.parametrize("window, offset", [((-1, 0), 90), ((-1, 0), -40), ((70, 20), 0), ((30, -1), 7), ((0, 0), 0)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_windows_and_offsets(kernels, head_dim, window, offset):
    inputs = draw((180, 260), head_dim, (4, 1), size=3)
    out, lse, _ = run(kernels(head_dim), *inputs, window=window, offset=offset)
    position = torch.arange(180)[:, None] + offset
    keys = torch.arange(260)[None]
    seen = torch.ones(180, 260, dtype=torch.bool)
    if window[0] >= 0:
        seen &= keys >= position - window[0]
    if window[1] >= 0:
        seen &= keys <= position + window[1]
    check((out, lse), inputs, mask=seen)


@pytest.mark.thin(3)
@pytest.mark.parametrize("layout", ["rows of heads", "fused", "columns off 16 bytes", "rows off 16 bytes", "columns apart"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_layouts(kernels, head_dim, layout):
    """The same bits wherever rows lie in memory."""
    inputs = draw((140, 200), head_dim)
    expected = run(kernels(head_dim), *inputs, window=(-1, 0))

    def moved(t):
        if layout == "rows of heads":
            return t.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "fused":
            return torch.stack([t, t], 3).unbind(3)[1]
        if layout == "columns off 16 bytes":
            return torch.cat([t[..., :3], t], -1)[..., 3:]
        if layout == "rows off 16 bytes":
            return torch.cat([t, t[..., :4]], -1)[..., : t.shape[-1]]
        return torch.stack([t, t], -1)[..., 0]

    out, lse, _ = run(kernels(head_dim), *(moved(t) for t in inputs), window=(-1, 0))
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.thin(4)
@pytest.mark.parametrize("head_dim", [64, *map(slow, (96, 192))])
@pytest.mark.parametrize("window", [(-1, 0), (60, 20)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_cuts_of_the_sequence(kernels, head_dim, window, dtype):
    """A row has the same bits wherever it is in a tile, and whatever rows are in its tile."""
    query, key, value = draw((230, 230), head_dim, dtype=dtype)
    key = (key.float() * torch.linspace(0.2, 6, 230).square()[:, None]).to(dtype)  # maxima rise along the keys
    expected = run(kernels(head_dim), query, key, value, window=window)
    for begin, end in [(0, 1), (4, 21), (100, 201)]:
        keys = min(end + window[1], 230)
        got = run(kernels(head_dim), query[:, :, begin:end], key[:, :, :keys], value[:, :, :keys], window=window, offset=begin)
        for one, whole in zip(got[:2], expected[:2], strict=True):
            assert torch.equal(one, whole[:, :, begin:end]), f"rows {begin} to {end}"


@pytest.mark.thin(4)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_packed(kernels, head_dim, causal):
    starts = [0, 70, 70, 71, 300]
    query, key, value = (t[0].transpose(0, 1).contiguous() for t in draw((310, 310), head_dim, (4, 2)))
    out, lse, _ = run(kernels(head_dim), query, key, value, starts=starts, window=(-1, 0 if causal else -1))
    assert torch.equal(out[300:], torch.zeros_like(out[300:])) and (lse[:, :, 300:] == -torch.inf).all()
    for begin, end in itertools.pairwise(starts):
        if end > begin:
            inputs = [t[begin:end].transpose(0, 1)[None] for t in (query, key, value)]
            check((out[begin:end].transpose(0, 1)[None], lse[:, :, begin:end]), inputs, causal=causal)


@pytest.mark.thin(6)
@pytest.mark.parametrize("kind", ["bool", "float", "float32", "softcap", "alibi"])
@pytest.mark.parametrize("head_dim", [64, *map(slow, (96, 256))])
@pytest.mark.parametrize("room", [227, 99])
def test_options(kernels, head_dim, kind, room):
    """With a GPU's shared memory of 99 KiB too, where a wide head dim has a smaller tile."""
    inputs = draw((150, 170), head_dim, dtype=torch.bfloat16, size=2)
    g = torch.Generator().manual_seed(3)
    given, options = {"room": room << 10}, {}
    if kind == "bool":
        given["mask"] = torch.rand(1, 1, 150, 170, generator=g) > 0.4
        given["mask"][..., 3] = True
    elif kind.startswith("float"):
        given["mask"] = torch.randn(1, 2, 150, 170, generator=g).to(torch.float32 if kind == "float32" else torch.bfloat16)
    elif kind == "softcap":
        given["softcap"] = options["softcap"] = 4.0
    else:
        given["slopes"] = options["alibi_slopes"] = torch.tensor([0.3, 0.02])
    if "mask" in given:
        options["mask"] = given["mask"]
    got = run(kernels(head_dim), *inputs, window=(-1, 0), **given)
    assert got[2] == (SMALL_TILE if room == 99 and head_dim == 256 and "mask" in given else ALL_OPTIONS)
    if kind.startswith("float"):
        options["mask"] = options["mask"].double()
    check(got, inputs, causal=True, **options)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_large_scores_in_some_rows(kernels, head_dim):
    """Scores past 2^26, where a maximum's rounding is more than one, in a warp whose other rows have small ones."""
    query, key, value = draw((100, 130), head_dim)
    query[:, :, 5] *= 1e8
    query[:, :, 40:44] *= 1e9
    check(run(kernels(head_dim), query, key, value), (query, key, value))
    check(run(kernels(head_dim), query, key, value, window=(-1, 0)), (query, key, value), causal=True)


def test_nan_stays_in_its_row(kernels):
    query, key, value = draw((70, 90), 64)
    query[:, :, 9, 3] = torch.nan
    out, lse, _ = run(kernels(64), query, key, value)
    assert out[:, :, 9].isnan().all() and lse[:, :, 9].isnan().all()
    rest = torch.arange(70) != 9
    check((out[:, :, rest], lse[:, :, rest]), (query[:, :, rest], key, value))


@pytest.mark.thin(4)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("page, head_dim", [(16, 64), (7, 64), (16, 40), (64, 128)], ids=str)
@pytest.mark.parametrize("queries", [1, 20])
def test_cached_keys(kernels, cache_dtype, page, head_dim, queries):
    """Pages of a pool, float8 ones too, which wait in shared memory to be widened."""
    g = torch.Generator().manual_seed(1)
    lengths, heads, key_heads = (150, 0, 70), 4, 2
    entries = -(-max(lengths) // page)
    table = torch.randperm(entries * len(lengths), generator=g).to(torch.int32).view(len(lengths), entries)
    query = torch.randn(len(lengths), heads, queries, head_dim, generator=g).bfloat16()
    key, value = (
        torch.randn(table.numel(), key_heads, page, head_dim, generator=g).bfloat16().to(cache_dtype) for _ in range(2)
    )
    counts = torch.tensor(lengths, dtype=torch.int32)
    scales = [torch.rand(len(lengths), key_heads, generator=g) + 0.5 for _ in range(2)]
    out, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:-1], torch.nan)
    problem = AttentionProblem(
        dtype=DTYPES[torch.bfloat16], batch=len(lengths), heads=heads, key_heads=key_heads, value_heads=key_heads,
        queries=queries, keys=entries * page, head_dim=head_dim, head_dim_v=head_dim, query=view(query), key=view(key),
        value=view(value), out=view(out), visible=Visibility(-1, -1, 0), scale=head_dim**-0.5, lse=lse.data_ptr(),
    )  # fmt: skip
    problem.lse_stride[0], problem.lse_stride[1] = lse.stride()[:2]
    cache = problem.cache
    cache.page, cache.blocks, cache.entries, cache.dtype, cache.kv_splits = page, table.numel(), entries, DTYPES[cache_dtype], 1
    cache.table, cache.table_rows, cache.table_stride = table.data_ptr(), len(lengths), entries
    cache.lengths = counts.data_ptr()
    if cache_dtype.itemsize == 1:
        cache.key_scale, cache.value_scale = (x.data_ptr() for x in scales)
        cache.key_scale_stride[:] = cache.value_scale_stride[:] = scales[0].stride()
    library = kernels(tile_of(head_dim))
    library.set_shared_bytes(227 << 10)
    assert library.attention_cached(ctypes.byref(problem)) == 0, library.last_error().decode()
    for n, length in enumerate(lengths):
        rows = []
        for pool, scale in zip((key, value), scales, strict=True):
            keys = pool[table[n].long()].float().transpose(0, 1).flatten(1, 2)[:, :length]
            rows.append((keys * scale[n, :, None, None] if cache_dtype.itemsize == 1 else keys)[None])
        inputs = (query[n : n + 1].float(), *rows)
        check((out[n : n + 1], lse[n : n + 1]), inputs, name=f"sequence {n}")


def at_the_end_of_a_page(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose last byte is the last that may be read: the page after it may not."""
    page, size = mmap.PAGESIZE, tensor.numel() * tensor.element_size()
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(base + pages * page), page, 0) == 0
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=pages * page - size).view(tensor.shape)
    return copy.copy_(tensor)


@pytest.mark.parametrize(
    "head_dim, lengths", [(64, (130, 200)), (128, (70, 129)), slow(96, (300, 77)), slow(392, (64, 80))], ids=str
)
def test_reads_stay_within_the_tensors(kernels, head_dim, lengths):
    library, inputs = kernels(tile_of(head_dim)), draw(lengths, head_dim)
    child = os.fork()
    if child == 0:
        try:
            run(library, *(at_the_end_of_a_page(t) for t in inputs))
            os._exit(0)
        finally:  # the child of a failed call must not go on with the tests
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0  # -11: a read past the end
