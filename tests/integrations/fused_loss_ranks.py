"""What test_fused_loss.py runs on two ranks: models under FSDP2 with fuse_loss, against the same ones without it."""

from __future__ import annotations

import torch
import transformers
from ranks import end_process, joined
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from flash_online.integrations.transformers import fuse_loss

SMALL = dict(vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
LLAMA = transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
GEMMA = transformers.Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, final_logit_softcapping=1.0)  # tied weights


def trained(config, fuse, own_head, dtype, mesh, rows):
    """The losses of two steps and the gradients of the second, whole."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if fuse == "before":
        fuse_loss(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    if own_head:
        fully_shard(model.lm_head, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if fuse == "after":
        fuse_loss(model)
    losses = []
    for _ in range(2):
        model.zero_grad()
        output = model(input_ids=rows, labels=rows)
        assert (output.logits is None) == bool(fuse)
        output.loss.backward()
        losses.append(output.loss.detach())
    gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    model.eval()
    assert model(input_ids=rows, labels=rows).logits.shape == (*rows.shape, 101)
    return losses, gradients


def main() -> None:
    with joined() as (rank, ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        torch.manual_seed(5)
        rows = torch.randint(3, 101, (2 * ranks, 17))[2 * rank : 2 * rank + 2]
        for config, own_head, dtype in (
            (LLAMA, True, torch.float32),
            (LLAMA, False, torch.float32),
            (GEMMA, False, torch.float32),
            (LLAMA, True, torch.bfloat16),
            (LLAMA, True, torch.float16),  # its gradients are made in the backward pass, for which the weight is gathered again
        ):
            losses, gradients = trained(config, "", own_head, dtype, mesh, rows)
            for fuse in ("before", "after"):
                found, ours = trained(config, fuse, own_head, dtype, mesh, rows)
                close = 1e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps * max(
                    g.abs().max().item() for g in gradients.values()
                )  # fmt: skip
                torch.testing.assert_close(found, losses, rtol=0, atol=5e-6)
                torch.testing.assert_close(ours, gradients, rtol=0, atol=close)
        print("all agree")


if __name__ == "__main__":
    main()
    end_process()
