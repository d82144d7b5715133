"""Cached keys: autocast, what may be written to, and derivatives that would be lost in silence."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import flash_online
from flash_online import InvalidArgument
from flash_online.compat import flash_attn, flash_attn_interface

LENGTHS = torch.tensor([3, 0], dtype=torch.int32)


def problem(device, dtype=torch.float32, cache_dtype=None):
    """Query, new keys, new values; caches."""
    rows = [torch.randn(2, heads, 2, 16, device=device).to(dtype) for heads in (4, 2, 2)]
    return rows, [torch.randn(2, 2, 9, 16, device=device).to(cache_dtype or dtype) for _ in range(2)]


# --- autocast ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_queries_and_new_keys_are_cast_to_the_caches_dtype(cache_device, cache, given, lower):
    """With a float8 cache to autocast's. The bits are those of a call with tensors that were cast before."""
    (query, key, value), caches = problem(cache_device, given, cache)
    dtype = lower if cache.itemsize == 1 else cache
    lengths, angles = LENGTHS.to(cache_device), torch.rand(20, 8, device=cache_device)
    options = {"rotary": (angles.cos(), angles.sin()), "return_lse": True}
    own = [cache.clone() for cache in caches]
    wanted = flash_online.kvcache_attention(query.to(dtype), *own, lengths, key=key.to(dtype), value=value.to(dtype), **options)
    with torch.autocast(cache_device, lower):
        options["rotary"] = tuple(table.to(given) for table in options["rotary"]) if given == dtype else options["rotary"]
        written = [cache.clone() for cache in caches]
        found = flash_online.kvcache_attention(query, *written, lengths, key=key, value=value, **options)
        appended = [cache.clone() for cache in caches]
        rotated = flash_online.cache_append(key, value, *appended, cache_seqlens=lengths, query=query, rotary=options["rotary"])
        assert rotated.dtype == dtype
        flash_online.cache_append(key, value, *[cache.clone() for cache in caches], cache_seqlens=lengths)
    assert found[0].dtype == dtype
    if given == dtype and given != torch.float32:
        return  # the rotary table was rounded
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    for one, two, three in zip(own, written, appended, strict=True):
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))
        assert torch.equal(one.view(torch.uint8), three.view(torch.uint8))


def test_a_plain_step_of_decoding_is_cast(cache_device):
    (query, *_), caches = problem(cache_device, torch.float32, torch.bfloat16)
    lengths = LENGTHS.to(cache_device)
    wanted = flash_online.kvcache_attention(query.bfloat16(), *caches, lengths)
    with torch.autocast(cache_device, torch.bfloat16):
        assert torch.equal(flash_online.kvcache_attention(query, *caches, lengths), wanted)
        assert flash_online.explain(flash_online.kvcache_attention, query, *caches, lengths).ours


def test_packed_queries_a_cascade_and_compat_are_cast(cache_device):
    pool = torch.randn(3, 4, 2, 16, device=cache_device, dtype=torch.bfloat16)
    rows = torch.randn(5, 4, 16, device=cache_device)
    starts, ends = (torch.tensor(s, dtype=torch.int32, device=cache_device) for s in ([0, 2, 5], [0, 7, 9]))
    table = torch.tensor([[0, 2], [1, 1]], dtype=torch.int32, device=cache_device)
    level = (starts, table, ends.diff())
    packed = (starts, ends, 3, 8)
    calls = (
        lambda q: flash_online.varlen_attention(q, pool, pool, *packed, block_table=table),
        lambda q: flash_online.cascade_attention(q, pool.transpose(1, 2), pool.transpose(1, 2), [level, level]),
        lambda q: flash_attn.flash_attn_varlen_func(q, pool, pool, *packed, block_table=table),
        lambda q: flash_attn_interface.flash_attn_with_kvcache(
            q, pool, pool, cache_seqlens=ends.diff(), page_table=table, cu_seqlens_q=starts, max_seqlen_q=3
        ),
    )
    for call in calls:
        wanted = call(rows.bfloat16())
        with torch.autocast(cache_device, torch.bfloat16):
            assert torch.equal(call(rows), wanted)
    with torch.autocast(cache_device, torch.bfloat16):  # packed keys are no cache: they are cast too
        found = flash_online.varlen_attention(rows, rows, rows, starts, starts, 3, 3, num_splits=1)
    assert found.dtype == torch.bfloat16


def test_float64_stays_an_error():
    (query, *_), caches = problem("cpu", torch.float64, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InvalidArgument, match="^key_cache: expected .*dtype.*, got"):
        flash_online.kvcache_attention(query, *caches, 3)


def test_compiled_under_autocast(cache_device):
    (query, key, value), caches = problem(cache_device, torch.float32, torch.bfloat16)
    lengths = LENGTHS.to(cache_device)

    def step(query, key, value, *caches):
        with torch.autocast(cache_device, torch.bfloat16):
            return flash_online.kvcache_attention(query, *caches, lengths, key=key, value=value)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    ours, eager = ([cache.clone() for cache in caches] for _ in range(2))
    assert torch.equal(compiled(query, key, value, *ours), step(query, key, value, *eager))
    assert all(torch.equal(*pair) for pair in zip(ours, eager, strict=True))


# --- what may be written to -------------------------------------------------------------------------------------------------


def writes(key, value, caches, lengths):
    """Each way to write these rows to the caches."""
    slots = torch.arange(2, device=key.device)
    angles = torch.rand(20, 8, device=key.device)
    return (
        lambda: flash_online.cache_append(key, value, *caches, cache_seqlens=lengths),
        lambda: flash_online.cache_append(key, value, *caches, cache_seqlens=2),
        lambda: flash_online.cache_append(key[:, :, 0], value[:, :, 0], *caches, slots=slots),
        lambda: flash_online.cache_append(key, value, *caches, cache_seqlens=lengths, rotary=(angles, angles)),
        lambda: flash_online.kvcache_attention(key, *caches, lengths, key=key, value=value),
        lambda: flash_attn.flash_attn_with_kvcache(
            *(t.transpose(1, 2) for t in (key, *caches, key, value)), cache_seqlens=lengths
        ),
    )


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_rows_of_an_expanded_cache_would_overwrite_each_other(cache_device, dim, which):
    (_, key, value), caches = problem(cache_device)
    caches[which] = caches[which].narrow(dim, 0, 1).expand_as(caches[which])
    for call in writes(key, value, caches, LENGTHS.to(cache_device)):
        with pytest.raises(InvalidArgument, match=rf"^({('key', 'value')[which]}|{'kv'[which]})_cache: expected .*got strides"):
            call()
    read = flash_online.kvcache_attention(key, *caches, LENGTHS.to(cache_device))  # reading is right
    assert torch.equal(read, flash_online.kvcache_attention(key, *(c.contiguous() for c in caches), LENGTHS.to(cache_device)))


def test_what_only_looks_expanded_is_written_to(cache_device):
    """Dimensions of size 1, and a cache without elements."""
    (_, key, value), caches = problem(cache_device)
    one = [cache[:1].as_strided((1, 2, 9, 16), (0, *cache.stride()[1:])) for cache in caches]
    flash_online.cache_append(key[:1], value[:1], *one, cache_seqlens=0)
    assert torch.equal(one[0][:, :, :2], key[:1])
    empty = [cache[:, :, :1].expand(2, 2, 9, 16)[:, :, :0] for cache in caches]
    flash_online.cache_append(key[:, :, :0], value[:, :, :0], *empty, cache_seqlens=0)


@pytest.mark.parametrize("which", [0, 1])
def test_views_that_negate(cache_device, which):
    """New rows may be such views; a cache may not."""
    (query, key, value), caches = problem(cache_device)
    lengths = LENGTHS.to(cache_device)
    negated = [torch._neg_view(t) for t in (query, key, value)]
    wanted, found = ([cache.clone() for cache in caches] for _ in range(2))
    out = flash_online.kvcache_attention(-query, *wanted, lengths, key=-key, value=-value)
    assert torch.equal(flash_online.kvcache_attention(negated[0], *found, lengths, key=negated[1], value=negated[2]), out)
    assert all(torch.equal(*pair) for pair in zip(wanted, found, strict=True))
    caches[which] = torch._neg_view(caches[which])
    kept = [cache.clone() for cache in caches]
    for call in writes(key, value, caches, lengths):
        with pytest.raises(InvalidArgument, match=rf"^({('key', 'value')[which]}|{'kv'[which]})_cache: expected .*got a view"):
            call()
    assert all(torch.equal(*pair) for pair in zip(kept, caches, strict=True))
    assert torch.equal(
        flash_online.kvcache_attention(query, *caches, lengths), flash_online.kvcache_attention(query, *kept, lengths)
    )


def test_out_is_memory_of_its_own(cache_device):
    (query, *_), caches = problem(cache_device)
    lengths, memory = LENGTHS.to(cache_device), torch.zeros(2, 4, 5, 16, device=cache_device)
    wanted = flash_online.kvcache_attention(query, *caches, lengths)
    dense = query.clone()
    for out, what in (
        (memory[:1, :, :2].expand(2, 4, 2, 16), "strides"),
        (torch._neg_view(memory[:, :, :2]), "a view"),
        (dense, "query's memory"),
    ):
        with pytest.raises(InvalidArgument, match=f"^out: expected .*got {what}"):
            flash_online.kvcache_attention(dense, *caches, lengths, out=out)
    memory[:, :, :2] = query
    flash_online.kvcache_attention(memory[:, :, :2], *caches, lengths, out=memory[:, :, 3:])  # next to it in one storage
    assert torch.equal(memory[:, :, 3:], wanted) and torch.equal(memory[:, :, :2], query)


# --- derivatives ------------------------------------------------------------------------------------------------------------


def test_a_cache_that_a_backward_pass_saved_is_not_written_to_unseen(cache_device):
    """As after any operation of torch in place: the backward pass raises instead of a gradient of other keys."""
    (query, key, value), caches = problem(cache_device)
    query.requires_grad_()
    lengths = LENGTHS.to(cache_device)
    with torch.no_grad():
        calls = writes(key, value, caches, lengths)
    for call in calls:
        out = flash_online.attention(query, *caches)
        with torch.no_grad():
            call()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    out = flash_online.attention(query, *caches)
    with torch.no_grad():
        target = caches[0][:, :, :2].clone().repeat(1, 2, 1, 1)
        version = target._version
        flash_online.kvcache_attention(query, *caches, lengths, out=target)
    assert target._version > version
    out.sum().backward()  # attention without new keys wrote nothing


def test_caches_made_in_inference_mode_are_written_to(cache_device):
    (_, key, value), caches = problem(cache_device)
    with torch.inference_mode():
        made = caches[0].clone()
        for call in writes(key, value, [made, caches[1]], LENGTHS.to(cache_device)):
            call()
    version = caches[1]._version
    for call in writes(key, value, [made, caches[1]], LENGTHS.to(cache_device)):
        call()
    assert caches[1]._version >= version + 6


def test_tangents_are_not_lost(cache_device):
    (query, key, value), caches = problem(cache_device)
    lengths = LENGTHS.to(cache_device)
    starts, rows = torch.tensor([0, 2], dtype=torch.int32, device=cache_device), key[0].transpose(0, 1)
    calls = {
        "query": lambda t: flash_online.kvcache_attention(t, *caches, lengths),
        "key": lambda t: flash_online.cache_append(t, t, *caches, cache_seqlens=lengths),
        "query, packed": lambda t: flash_online.varlen_attention(
            t[0].transpose(0, 1), rows, rows, starts, starts, 2, 2, num_splits=1
        ),
    }
    for name, call in calls.items():
        given = key if name == "key" else query
        with pytest.raises(InvalidArgument, match=f"^{name.split(',')[0]}: expected .*without a tangent"):
            torch.func.jvp(lambda t, call=call: call(t), (given,), (given,))
        with forward_ad.dual_level(), torch.no_grad():
            with pytest.raises(InvalidArgument, match=f"^{name.split(',')[0]}: expected .*without a tangent"):
                call(forward_ad.make_dual(given, given))
            call(given)


def test_rotary_tables_have_no_gradient(cache_device):
    (query, key, value), caches = problem(cache_device)
    cos = torch.rand(20, 8, device=cache_device, requires_grad=True)
    sin = cos.detach()
    for n, rotary in enumerate(((cos, sin), (sin, cos))):
        with pytest.raises(InvalidArgument, match=rf"^rotary\[{n}\]: expected .*without a gradient"):
            flash_online.kvcache_attention(query, *caches, 3, rotary=rotary)
        with pytest.raises(InvalidArgument, match=rf"^rotary\[{n}\]: expected .*without a gradient"):
            flash_online.cache_append(key, value, *caches, cache_seqlens=3, rotary=rotary)
    with torch.no_grad():
        flash_online.kvcache_attention(query, *caches, 3, rotary=(cos, sin))


def test_lengths_of_packed_queries_are_called_by_their_names(cache_device):
    rows, pool = torch.randn(3, 2, 16, device=cache_device), torch.randn(2, 4, 2, 16, device=cache_device)
    starts, table = torch.tensor([0, 3]).int().to(cache_device), torch.zeros(1, 2, dtype=torch.int32, device=cache_device)
    for used in (torch.tensor([3], device=cache_device), starts):
        with pytest.raises(InvalidArgument, match="^seqused_k: "):
            flash_online.varlen_attention(rows, pool, pool, starts, None, 3, 8, block_table=table, seqused_k=used)
        with pytest.raises(InvalidArgument, match="^seqused_k: "):
            flash_online.varlen_attention(rows, rows, rows, starts, starts, 3, 3, seqused_k=used)


def test_the_append_operator_checks_how_many_rows_its_arrays_have():
    """Raw operators must not read beyond an array, whatever they are called with."""
    append = torch.ops.flash_online.cache_append_
    cache, new, angles = torch.zeros(2, 2, 16, 8), torch.randn(5, 2, 8), torch.rand(5, 4)
    tail, slots = (angles, angles, None, None, None, False, True), torch.arange(5)
    with pytest.raises(RuntimeError, match="query: expected 5 rows, one per slot, got"):
        append(cache, cache.clone(), new, new, torch.randn(9, 2, 8), *(None,) * 4, slots, None, None, *tail)
    starts = torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="cu_seqlens_q, cu_seqlens_new: expected None with slots"):
        append(cache, cache.clone(), new, new, new, *(None,) * 4, slots, None, starts, *tail)
    lengths, rows = torch.zeros(2, dtype=torch.int32), torch.randn(2, 2, 1, 8)
    with pytest.raises(RuntimeError, match=r"cu_seqlens_q: expected \[3\], got"):
        append(cache, cache.clone(), rows, rows, torch.randn(6, 2, 8), lengths, *(None,) * 5, starts, *tail)
