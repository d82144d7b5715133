"""The general backward kernels, for GPUs before Hopper, thread by thread on the host, against float64: gradients, the data of
each thread, and that a thread waits for its copies. The pre-pass and the post-pass of a backward pass run with them."""

from __future__ import annotations

import ctypes
import itertools
from typing import NamedTuple

import kernels_on_host
import pytest
import torch
from block_cases import random_tiles
from kernels_on_host import (
    ALL_OPTIONS,
    PLAIN,
    ROW_LAYOUTS,
    SMALL_TILE,
    AttentionGradients,
    apart,
    at_the_end_of_a_page,
    draw,
    moved,
    problem_of,
    seen_keys,
    tile_of,
    view,
)
from span_cases import far_spans, random_spans

from flash_online import reference, testing

kernels_on_host.require_sources()

ACCUMULATE, DIRECT, NONE = range(3)  # DqMode


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """kernels(head dim): the library of its backward kernels."""
    compiled = kernels_on_host.attention_kernels(tmp_path_factory.mktemp("backward_sm80"), "backward_sm80.cpp")

    def checked(head_dim: int):
        library = compiled(head_dim)
        library.size_of_gradients.restype = ctypes.c_int64
        assert library.size_of_gradients() == ctypes.sizeof(AttentionGradients)
        return library

    return checked


class Pass(NamedTuple):
    """What a backward pass takes and should give."""

    inputs: list[torch.Tensor]  # query, key, value
    grads: list[torch.Tensor]  # of out and lse
    results: list[torch.Tensor]  # out, lse and, of float32, what its rounding drops
    truth: dict[str, torch.Tensor]  # the gradients


class Made(NamedTuple):
    """The gradients that the kernels make, and which kernels they were."""

    grads: dict[str, torch.Tensor]
    kind: int
    tile_keys: int
    dq_mode: int


def backward_pass(inputs, **options) -> Pass:
    """A pass with random gradients of out and lse, and its gradients in float64; `options` are the reference's."""
    leaves = {name: t.double().requires_grad_() for name, t in zip(("query", "key", "value"), inputs, strict=True)}
    if options.get("sinks") is not None:
        leaves["sinks"] = options["sinks"].double().requires_grad_()
    out, lse = reference.attention(**options | leaves, return_lse=True)
    g, dtype = torch.Generator().manual_seed(1), inputs[0].dtype
    grads = [torch.randn(out.shape, generator=g).to(dtype), torch.randn(lse.shape, generator=g)]
    found = torch.autograd.grad((out, lse), list(leaves.values()), [t.double() for t in grads])
    results = [out.detach().to(dtype), lse.detach().float()]
    if dtype == torch.float32:
        results.append((lse.detach() - results[1]).nan_to_num().float())
    return Pass(list(inputs), grads, results, dict(zip(leaves, found, strict=True)))


def amid_nan(t: torch.Tensor) -> torch.Tensor:
    """A copy with NaN before and after it, as much as a tile's rows."""
    margin = 128 * t.shape[-1]
    whole = torch.full((t.numel() + 2 * margin,), torch.nan, dtype=t.dtype)
    return whole[margin : margin + t.numel()].view(t.shape).copy_(t)


def run(
    library,
    one: Pass,
    *,
    grad_heads=None,
    deterministic=False,
    room=227,
    place=amid_nan,
    asks=False,
    sinks=None,
    rng=None,
    dropout=0.0,
    **given,
) -> Made:
    """Makes the gradients. A CTA has `room` KiB of shared memory, a gradient lies at place(tensor), `given` is problem_of's.

    With `asks` there is no GPU: this only asks whether one with `room` KiB could do it.
    """
    query, key, value = one.inputs
    problem = problem_of(*one.inputs, *one.results[:2], **given)
    if len(one.results) > 2:
        problem.lse_low = one.results[2].data_ptr()
    if rng is not None:
        problem.rng, problem.dropout = rng.data_ptr(), dropout
    grad_heads = grad_heads or key.shape[1]
    made = {"query": query.shape}
    made |= {name: (t.shape[0], grad_heads, *t.shape[2:]) for name, t in (("key", key), ("value", value))}
    made = {name: place(torch.full(shape, torch.nan, dtype=query.dtype)) for name, shape in made.items()}
    gradients = AttentionGradients(
        grad_out=view(one.grads[0]), grad_lse=one.grads[1].data_ptr(), kv_grad_heads=grad_heads,
        **{f"grad_{name}": view(t) for name, t in made.items()},
    )  # fmt: skip
    if sinks is not None:
        made["sinks"] = torch.full(query.shape[:2], torch.nan)
        problem.sinks, gradients.grad_sinks = sinks.data_ptr(), made["sinks"].data_ptr()
    ran = (ctypes.c_int * 3)()
    call = ctypes.byref(problem), ctypes.byref(gradients), int(deterministic)
    if asks:
        status = library.ask_attention_backward(*call, room << 10)
    else:
        library.set_shared_bytes(room << 10)
        status = library.attention_backward(*call, ran)
    if status < 0:
        raise RuntimeError(library.last_error().decode())
    for name, gradient in made.items():
        whole = gradient if gradient._base is None else gradient._base
        assert whole.isfinite().sum() == gradient.isfinite().sum(), f"{name}: a write next to it"
    return Made(made, *ran)


def check(made: Made, one: Pass, *, units: float | None = None) -> None:
    """No element of a gradient is further from float64 than `units` times the unit of its largest element.

    Of 16-bit elements, half a unit is the rounding of the gradient, and less than the other half that of the weights and their
    gradients, whose roundings average out. The rounding of a float32 is the least of its errors: sums are made in float32, too.
    The gradient of a sink has the errors of the 16-bit output in it, four units where they do not average out.
    """
    dtype = one.inputs[0].dtype
    allowed = units or (8 if dtype == torch.float32 else 1)
    for name, truth in one.truth.items():
        got = made.grads[name]
        if name == "sinks":
            got = got.double().sum(0)
        elif got.shape != truth.shape:
            got = got.double().unflatten(1, (truth.shape[1], -1)).sum(2)
        assert got.isfinite().all(), f"{name}: {int((~got.isfinite()).sum())} of {got.numel()} elements are not finite"
        error = testing.error(got, truth).max / testing.unit_in_last_place(truth, dtype)
        assert error <= (max(allowed, 4) if name == "sinks" else allowed), f"{name}: {error:.3g} units"


def slow(*cell):
    return pytest.param(*cell, marks=pytest.mark.slow)  # the kernels of another head dim take ten seconds to compile


LENGTHS = [(129, 65), (197, 197), (300, 77), (77, 300), (64, 640), (512, 512)]


@pytest.mark.thin(8)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("room", [227, 163, 99])
@pytest.mark.parametrize("head_dim", [64, 128, *map(slow, (32, 96, 192, 256))])
def test_plain(kernels, head_dim, room, deterministic, causal, lengths):
    """With the shared memory of three kinds of GPU, where a wide head dim has smaller tiles."""
    dtype = torch.float16 if sum(lengths) % 2 else torch.bfloat16
    one = backward_pass(draw(lengths, head_dim, (2, 1), dtype), causal=causal)
    made = run(kernels(head_dim), one, window=(-1, 0 if causal else -1), deterministic=deterministic, room=room)
    assert made.kind == PLAIN
    assert made.dq_mode == (DIRECT if lengths[1] <= made.tile_keys else NONE if deterministic else ACCUMULATE)
    check(made, one)


@pytest.mark.thin(4)
@pytest.mark.parametrize("lengths", [(1, 1), (5, 7), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_few_rows(kernels, head_dim, dtype, deterministic, lengths):
    one = backward_pass(draw(lengths, head_dim, dtype=dtype))
    made = run(kernels(head_dim), one, deterministic=deterministic)
    assert made.dq_mode == (DIRECT if lengths[1] > 0 else ACCUMULATE)
    check(made, one)


@pytest.mark.thin(2)
@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_low_scores(kernels, head_dim, dtype, deterministic):
    """All scores are far below 0: the weight of a key that does not exist would be infinite, and lse takes two floats."""
    query, key, value = draw((80, 150), head_dim, dtype=dtype)
    one = backward_pass((-8 * query.abs(), 8 * key.abs(), value))
    # Three digits leave out 2^-25 of a score of 500, which makes the exponent 2^-16 wrong.
    check(run(kernels(head_dim), one, deterministic=deterministic), one, units=2.0**10 if dtype == torch.float32 else None)


@pytest.mark.thin(4)
@pytest.mark.parametrize("lengths", [(40, 30), (129, 65), (77, 300), (197, 197)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("tf32", [False, True], ids=["three digits", "two digits"])
@pytest.mark.parametrize("head_dim", [64, *map(slow, (40, 128, 192, 256))])
def test_float32(kernels, head_dim, tf32, deterministic, causal, lengths):
    one = backward_pass(draw(lengths, head_dim, dtype=torch.float32), causal=causal)
    made = run(kernels(tile_of(head_dim)), one, window=(-1, 0 if causal else -1), deterministic=deterministic, tf32=tf32)
    check(made, one, units=2.0**9 if tf32 else None)  # 2^-14: two digits leave out 2^-16 of each product


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    "head_dim, head_dim_v",
    [(40, 40), (100, 36), (100, 100), slow(80, 64), slow(80, 80), slow(7, 7), slow(192, 128), slow(400, 392)],
    ids=str,
)
@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (50, 20)], ids=str)
def test_columns_within_a_tile(kernels, head_dim, head_dim_v, deterministic, window):
    """Head dims that fill no tile, among them some whose rows are not whole vectors."""
    options = {"window": tuple(None if w < 0 else w for w in window)}
    one = backward_pass([apart(t) for t in draw((150, 170), head_dim, head_dim_v=head_dim_v)], **options)
    one.grads[0] = apart(one.grads[0])
    check(run(kernels(tile_of(head_dim)), one, window=window, deterministic=deterministic), one)


@pytest.mark.thin(5)
@pytest.mark.parametrize("window, offset", [((-1, 0), 90), ((-1, 0), -40), ((70, 20), 0), ((30, -1), 7), ((0, 0), 0)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("lengths", [(180, 260), (320, 200)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_windows_and_offsets(kernels, head_dim, lengths, deterministic, window, offset):
    one = backward_pass(draw(lengths, head_dim, (2, 1)), mask=seen_keys(*lengths, window, offset))
    check(run(kernels(head_dim), one, window=window, offset=offset, deterministic=deterministic), one)


@pytest.mark.thin(4)
@pytest.mark.parametrize("layout", ROW_LAYOUTS)
@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_layouts(kernels, head_dim, deterministic, layout):
    """The same bits wherever rows lie in memory."""
    one = backward_pass(draw((140, 200), head_dim), causal=True)
    options = {"window": (-1, 0), "deterministic": deterministic}
    expected = run(kernels(head_dim), one, **options)
    elsewhere = one._replace(
        inputs=[moved(t, layout) for t in one.inputs],
        results=[moved(one.results[0], layout), one.results[1]],
        grads=[moved(one.grads[0], layout), one.grads[1]],
    )
    made = run(kernels(head_dim), elsewhere, place=lambda t: moved(t, layout), **options)
    for name, gradient in made.grads.items():
        assert torch.equal(gradient, expected.grads[name]), name


@pytest.mark.thin(4)
@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("grad_heads", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_shared_keys(kernels, head_dim, grad_heads, causal, deterministic):
    """Gradients of keys per head of the keys, or of the queries, which the caller sums."""
    one = backward_pass(draw((150, 170), head_dim, (4, 2), batch=2), causal=causal)
    window = (-1, 0 if causal else -1)
    check(run(kernels(head_dim), one, window=window, grad_heads=grad_heads, deterministic=deterministic), one, units=1.5)


@pytest.mark.thin(3)
@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed(kernels, head_dim, causal, deterministic):
    starts = [3, 70, 70, 71, 300]
    whole = draw((310, 310), head_dim, (4, 2))
    between = list(itertools.pairwise(starts))
    parts = [backward_pass([t[:, :, a:b] for t in whole], causal=causal) for a, b in between]

    def packed(tensors, rows_at=2):
        """Of the parts' tensors, in one of 310 rows; NaN in those of no sequence."""
        shape = list(tensors[0].shape)
        shape[rows_at] = 310
        joined = torch.full(shape, torch.nan, dtype=tensors[0].dtype)
        for (a, b), part in zip(between, tensors, strict=True):
            joined.narrow(rows_at, a, b - a).copy_(part)
        return joined

    def rows_first(t):
        return t[0].transpose(0, 1).contiguous()

    for t in whole:
        t[:, :, : starts[0]] = t[:, :, starts[-1] :] = torch.nan
    one = Pass(
        inputs=[rows_first(t) for t in whole],
        grads=[rows_first(packed([p.grads[0] for p in parts])), packed([p.grads[1] for p in parts])],
        results=[rows_first(packed([p.results[0] for p in parts])), packed([p.results[1] for p in parts])],
        truth={name: rows_first(packed([p.truth[name] for p in parts]).nan_to_num(0)) for name in parts[0].truth},
    )
    window = (-1, 0 if causal else -1)
    given = {"starts": torch.tensor(starts, dtype=torch.int32), "window": window, "deterministic": deterministic}
    made = run(kernels(head_dim), one, grad_heads=2, **given)
    check(made, one)
    for gradient in made.grads.values():
        assert not gradient[: starts[0]].any() and not gradient[starts[-1] :].any()


@pytest.mark.thin(7)
@pytest.mark.parametrize("kind", ["bool", "blocks", "row", "float", "float32", "softcap", "dropout", "spans", "tiles", "all"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("room", [227, 99])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, *map(slow, (32, 96, 128, 192, 256))])
def test_options(kernels, head_dim, dtype, room, deterministic, kind):
    lengths, g = (150, 170), torch.Generator().manual_seed(3)
    given, options = {"room": room, "deterministic": deterministic, "window": (-1, 0)}, {"causal": True}
    if kind in ("bool", "all"):
        given["mask"] = options["mask"] = torch.rand(1, 1, *lengths, generator=g) > 0.4
    elif kind == "blocks":  # the mask hides all keys of some blocks, none of others
        seen = torch.ones(1, 2, *lengths, dtype=torch.bool)
        seen[:, 0, :64, 64:128] = seen[:, 1, 64:128, :64] = seen[:, 1, :, 128:] = False
        given["mask"] = options["mask"] = seen
    elif kind == "row":
        given["mask"] = options["mask"] = torch.rand(1, 1, 1, lengths[1], generator=g) > 0.4
    elif kind.startswith("float"):
        given["mask"] = torch.randn(1, 2, *lengths, generator=g).to(torch.float32 if kind == "float32" else torch.bfloat16)
        options["mask"] = given["mask"].double()
    if kind in ("spans", "all"):
        given["query_spans"] = options["query_spans"] = random_spans(g, (2,), 150, 170, 1)
        given["key_spans"] = options["key_spans"] = random_spans(g, (2,), 170, 150, 2)
    if kind in ("tiles", "all"):
        tile_keys, density = (128, 0.8) if kind == "all" else (64, 0.5)  # where much is hidden too, errors do not average out
        tiles, shown = random_tiles(g, 2, lengths, tile_keys, density)
        given["blocks"] = tiles, tile_keys
        options["mask"] = options["mask"] & shown if "mask" in options else shown
    if kind in ("softcap", "all"):
        given["softcap"] = options["softcap"] = 4.0
    if kind == "all":
        given["slopes"] = options["alibi_slopes"] = torch.tensor([0.3, 0.02])
        given["sinks"] = options["sinks"] = torch.tensor([0.5, -1.0])
    if kind in ("dropout", "all"):
        given["rng"] = options["rng"] = torch.tensor([5, 9])
        given["dropout"] = options["dropout_p"] = 0.3
    one = backward_pass(draw(lengths, head_dim, dtype=dtype), **options)
    try:
        made = run(kernels(head_dim), one, **given)
    except RuntimeError as refused:
        assert (room, head_dim, dtype) == (99, 256, torch.float32) and "too little shared memory" in str(refused)
        return
    assert made.kind in (ALL_OPTIONS, SMALL_TILE)
    check(made, one, units=None if dtype == torch.bfloat16 else 16)


@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("side", ["query_spans", "key_spans"])
def test_far_rows(kernels, side, deterministic):
    """Groups of 32 tiles before and after those that are seen are passed over, in dQ too."""
    lengths = (4600, 70) if side == "query_spans" else (70, 4600)
    spans = {side: far_spans(torch.Generator().manual_seed(1), (2,), 4600, 70, 2)}
    one = backward_pass(draw(lengths, 64), **spans)
    check(run(kernels(64), one, deterministic=deterministic, **spans), one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
def test_what_fits_no_tile_is_refused(kernels, deterministic, dtype):
    one = backward_pass(draw((70, 130), 128, dtype=dtype))
    with pytest.raises(RuntimeError, match="too little shared memory"):
        run(kernels(128), one, room=48, deterministic=deterministic)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
def test_questions_about_a_gpu_that_is_not_there(kernels, deterministic, dtype):
    """explain() asks what another machine's GPU would do."""
    one = backward_pass(draw((70, 130), 128, dtype=dtype))
    run(kernels(128), one, room=99, deterministic=deterministic, asks=True)
    with pytest.raises(RuntimeError, match="too little shared memory"):
        run(kernels(128), one, room=48, deterministic=deterministic, asks=True)


@pytest.mark.thin(2)
@pytest.mark.parametrize("deterministic", [False, True], ids=["sums", "deterministic"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "head_dim, lengths", [(64, (130, 200)), (128, (70, 129)), slow(96, (300, 77)), slow(392, (64, 80))], ids=str
)
def test_accesses_stay_within_the_tensors(kernels, head_dim, lengths, dtype, deterministic):
    library, one = kernels(tile_of(head_dim)), backward_pass(draw(lengths, head_dim, dtype=dtype))
    at_ends = one._replace(
        **{part: [at_the_end_of_a_page(t) for t in getattr(one, part)] for part in ("inputs", "grads", "results")}
    )
    kernels_on_host.assert_runs_in_a_child(
        lambda: run(library, at_ends, place=at_the_end_of_a_page, deterministic=deterministic)
    )
