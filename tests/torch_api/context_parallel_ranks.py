"""What test_override.py runs on two ranks: override() and torch's context_parallel, in both orders."""

from __future__ import annotations

import pytest
import torch
from ranks import end_process, joined
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel

import flash_online
import flash_online.functional as F

TF = torch.nn.functional
TORCHS = TF.scaled_dot_product_attention


def ring(query, key, value, *args, enable_gqa=False, **kwargs):
    """Stands for torch's ring, which has no handler for the CPU's operators: the same result from gathered tensors."""
    assert type(query) is type(key) is type(value) is DTensor
    out = TORCHS(*(tensor.full_tensor() for tensor in (query, key, value)), *args, **kwargs)
    return DTensor.from_local(out, query.device_mesh, [Replicate()]).redistribute(placements=[Shard(2)])


def main() -> None:
    with joined() as (rank, ranks), pytest.MonkeyPatch.context() as patch:
        mesh = init_device_mesh("cpu", (ranks,))
        torch.manual_seed(0)
        whole = [torch.randn(1, 2, 64, 8) for _ in range(3)]
        patch.setitem(F.ORIGINALS, "scaled_dot_product_attention", ring)

        def sharded():
            shards = [tensor.clone() for tensor in whole]
            return shards, context_parallel(mesh, buffers=shards, buffer_seq_dims=[2, 2, 2])

        for causal in (False, True):
            # The shards are the rows that context_parallel's balancer picks: their own positions say which.
            positions = torch.arange(64.0).view(1, 1, 64, 1)
            with context_parallel(mesh, buffers=[positions], buffer_seq_dims=[2]):
                rows = positions.flatten().long()
            whole_out = TORCHS(*whole, is_causal=causal)

            # The right order. The stand-in for the ring takes the rows in their order on the ranks, hence no causal rule.
            if not causal:
                shards, block = sharded()
                with flash_online.override(), block:
                    out = TF.scaled_dot_product_attention(*shards)
                torch.testing.assert_close(out, whole_out[:, :, rows], rtol=0, atol=1e-6)
                with flash_online.override(), sharded()[1], flash_online.override():
                    pass  # a nested block changes nothing
                assert TF.scaled_dot_product_attention is TORCHS

            # The wrong order, and a direct call: errors, and nothing of theirs is left.
            shards, block = sharded()
            with block:
                wrapper = TF.scaled_dot_product_attention
                with pytest.raises(RuntimeError, match=r"context_parallel is active.*override\(\) first"):
                    flash_online.enable()
                with pytest.raises(RuntimeError, match="context_parallel"), flash_online.override():
                    raise AssertionError("not reached")
                assert TF.scaled_dot_product_attention is wrapper
                assert TF.softmax is F.ORIGINALS["softmax"]
                with pytest.raises(RuntimeError, match=r"directly inside.*flash_online\.attention"):
                    F.scaled_dot_product_attention(*shards, is_causal=causal)
                with pytest.raises(RuntimeError, match="directly inside"):
                    torch.compile(F.scaled_dot_product_attention, backend="eager")(*shards, is_causal=causal)
                alone = flash_online.attention(*shards, causal=causal)
                torch.testing.assert_close(alone, TORCHS(*shards, is_causal=causal))
            assert TF.scaled_dot_product_attention is TORCHS
            torch.testing.assert_close(F.scaled_dot_product_attention(*whole, is_causal=causal), whole_out)

        # disable() inside the block leaves context_parallel's wrapper alone; once that has gone, another one finishes.
        shards, block = sharded()
        flash_online.enable()
        with block:
            with pytest.warns(RuntimeWarning, match="inner_fn of torch.distributed.*stays"):
                flash_online.disable()
            out = TF.scaled_dot_product_attention(*shards)
            torch.testing.assert_close(out, TORCHS(*whole)[:, :, rows], rtol=0, atol=1e-6)
        assert TF.scaled_dot_product_attention is F.scaled_dot_product_attention
        flash_online.disable()
        assert TF.scaled_dot_product_attention is TORCHS
        print(f"ok {rank}")


main()
end_process()
