"""What test_diffusers.py runs on several ranks: diffusers' context parallelism with our backend, against one process."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from ranks import end_process, joined
from torch.distributed.device_mesh import init_device_mesh

import flash_online
from flash_online.integrations import _check_diffusers as check
from flash_online.integrations import diffusers as integration


def parallel(mesh, ring, ulysses, **options):
    config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, **options)
    config.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh)
    return SimpleNamespace(context_parallel_config=config)


def main(ring: int, ulysses: int) -> None:
    with joined() as (rank, ranks):
        assert ranks == ring * ulysses
        integration.register()
        backend = AttentionBackendName("flash_online")
        mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
        alone = ring == 1

        def compare(dtype, atol, *, keys=48, width=16, mask=None, shard=None, scale=None, config=None, grad=True, lse=False):
            """The call on shards of rows against flash_online.attention on all of them; `mask` is the whole one."""
            config = config or parallel(mesh, ring, ulysses)
            torch.manual_seed(0)
            shapes = ((2, 48, 4, 16), (2, keys, 4, 16), (2, keys, 4, width))
            whole = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
            own = [t.tensor_split(ranks, 1)[rank].clone().requires_grad_(grad) for t in whole]
            options = {"scale": scale, "attention_kwargs": {"return_lse": lse}}
            own_mask = None if mask is None else mask.tensor_split(ranks, -1)[rank].contiguous() if shard else mask
            result = dispatch_attention_fn(*own, own_mask, backend=backend, parallel_config=config, **options)
            whole = [t.transpose(1, 2).detach().requires_grad_(grad) for t in whole]
            if mask is not None and mask.dim() == 2:
                mask = mask[:, None, None, :]
            expected, expected_lse = flash_online.attention(*whole, mask=mask, scale=scale, return_lse=True)
            if lse:
                result, own_lse = result
                assert not own_lse.requires_grad
                # A ring's lse is float32 also of float64, unless convert_to_fp32=False.
                expected_lse = expected_lse.transpose(1, 2).tensor_split(ranks, 1)[rank].to(own_lse.dtype)
                torch.testing.assert_close(own_lse, expected_lse, atol=atol, rtol=0)
            expected = expected.transpose(1, 2)
            torch.testing.assert_close(result, expected.tensor_split(ranks, 1)[rank], atol=atol, rtol=0)
            if not grad:
                return
            weight = torch.randn(expected.shape, dtype=torch.float64).to(dtype)
            result.backward(weight.tensor_split(ranks, 1)[rank])
            expected.backward(weight)
            for ours, theirs in zip(own, whole, strict=True):
                theirs = theirs.grad.transpose(1, 2).tensor_split(ranks, 1)[rank]
                torch.testing.assert_close(ours.grad, theirs, atol=atol, rtol=0)

        # Ulysses makes the call of one process; a ring merges partial results, in float32 unless told otherwise.
        exact = parallel(mesh, ring, ulysses, convert_to_fp32=False)
        compare(torch.float64, 1e-13, config=exact, lse=True)
        for dtype, atol in ((torch.float32, 1e-6), (torch.float64, 1e-6), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
            compare(dtype, 2 * atol, lse=dtype is not torch.bfloat16)
            compare(dtype, 2 * atol, scale=0.5)
        compare(torch.float32, 2e-6, keys=16 * ranks, grad=False)
        seen = torch.rand(2, 48) > 0.3
        seen[1, :40] = False
        per_head = torch.randn(2, 4, 1, 48)
        if alone:
            compare(torch.float32, 2e-6, mask=seen, shard=True)  # as diffusers' plans cut masks: gathered by diffusers
            compare(torch.float32, 2e-6, mask=seen)
            compare(torch.float32, 2e-6, mask=torch.zeros(2, 48, dtype=torch.bool), shard=True)  # rows without a key
            compare(torch.float32, 2e-6, mask=per_head)
            compare(torch.float32, 2e-6, mask=per_head.bfloat16().float(), shard=True)
            compare(torch.float32, 2e-6, mask=torch.randn(1, 1, 48, 48))
            compare(
                torch.float32,
                2e-6,
                config=parallel(mesh, 1, ulysses, ulysses_anything=True),
                grad=False,
                mask=per_head,
                lse=True,
            )
        elif ulysses == 1:
            compare(torch.float32, 2e-6, width=8, grad=False)
            compare(torch.float32, 2e-6, config=parallel(mesh, ring, 1, ring_anything=True), keys=45, grad=False)

        # What it cannot do, by name and on every rank before anything is sent.
        q = torch.randn(2, 4, 4, 16)
        call = {"backend": backend, "parallel_config": parallel(mesh, ring, ulysses)}
        with pytest.raises(NotImplementedError, match="dropout_p: expected 0 under context parallelism .*, got 0.1"):
            dispatch_attention_fn(q, q, q, dropout_p=0.1, **call)
        with pytest.raises(NotImplementedError, match="key, value: expected query's 4 heads under context .*, got 1 and 1"):
            dispatch_attention_fn(q, q[:, :, :1], q[:, :, :1], **call)
        with pytest.raises(ValueError, match="GQA"):  # diffusers' own
            dispatch_attention_fn(q, q, q, enable_gqa=True, **call)
        with pytest.raises(ValueError, match="Causal"):
            dispatch_attention_fn(q, q, q, is_causal=True, **call)
        if not alone:
            with pytest.raises(NotImplementedError, match="attn_mask: expected None under context parallelism .*ring"):
                dispatch_attention_fn(q, q, q, seen[:, :4], **call)
            with pytest.raises(NotImplementedError, match="value: expected query's width 16 .*, got 8"):
                dispatch_attention_fn(q.clone().requires_grad_(), q, q[..., :8], **call)
        else:
            with pytest.raises(NotImplementedError, match="attn_mask: expected requires_grad=False"):
                dispatch_attention_fn(q, q, q, torch.zeros(1, 1, 1, 8, requires_grad=True), **call)
            with pytest.raises(NotImplementedError, match="query: expected a multiple of ulysses_degree heads.*, got 3"):
                dispatch_attention_fn(*(t[:, :, :3] for t in (q, q, q)), **call)
            with pytest.raises(NotImplementedError, match="value: expected query's width 16 .*, got 8"):
                dispatch_attention_fn(q, q, q[..., :8], **call)
            with pytest.raises(NotImplementedError, match="key: expected query's length 4 .*, got 2"):
                dispatch_attention_fn(q.clone().requires_grad_(), q[:, :2], q[:, :2], **call)
        leaf = q.clone().requires_grad_()
        out = dispatch_attention_fn(leaf, q, q, **call)
        with pytest.raises(NotImplementedError, match="second derivatives"):
            torch.autograd.grad(out.sum(), leaf, create_graph=True)
        dist.barrier()

        for name, spec in check.MODELS.items() if ranks == 2 else ():
            model, inputs = spec.make()
            with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
                model.set_attention_backend("native")
                expected = model(**inputs, return_dict=False)[0]
                model.set_attention_backend("flash_online")
                patch.setattr(torch.accelerator, "device_count", lambda: 1)  # diffusers divides by it, also on a CPU
                model.enable_parallelism(config=ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses))
                if not alone and name in ("QwenImage", "LTX"):
                    with pytest.raises(NotImplementedError, match="attn_mask: expected None under context parallelism"):
                        model(**inputs, return_dict=False)
                    continue
                found = model(**inputs, return_dict=False)[0]
            torch.testing.assert_close(found, expected, atol=2e-6, rtol=0, msg=lambda said, name=name: f"{name}: {said}")
        print(f"ok {rank}")


main(*map(int, sys.argv[1:]))
end_process()
