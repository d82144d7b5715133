"""What test_batch.py runs on two ranks: batches of a small Llama, cut over the ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import joined
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

from flash_online import InvalidArgument
from flash_online.distributed import (
    context_parallel_attention,
    context_parallel_varlen_attention,
    positions,
    shard,
    shard_batch,
)
from flash_online.integrations import transformers as integration

LENGTH = 32


def attend(module, query, key, value, mask, scaling=None, cu_seq_lens_q=None, **others):
    if cu_seq_lens_q is None:
        out = context_parallel_attention(query, key, value, causal=True, scale=scaling)
        return out.transpose(1, 2), None
    packed = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return context_parallel_varlen_attention(*packed, cu_seq_lens_q, causal=True, scale=scaling).unsqueeze(0), None


def loss_and_gradients(model, batch, implementation):
    model.set_attn_implementation(implementation)
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def losses(ranks):
    """The sums over ranks of a model's loss and gradients are those of the whole batch."""
    AttentionInterface.register("over_ranks", attend)
    AttentionMaskInterface.register("over_ranks", lambda *words, **others: None)
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, use_cache=False)
    )  # fmt: skip
    tokens = torch.randint(0, 50, (2, LENGTH))
    labels = tokens.clone()
    labels[:, :3] = -100  # a prompt
    labels[1, -5:] = -100  # padding: fewer labels on the last rows
    one = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    starts = torch.tensor([0, 5, 21, LENGTH], dtype=torch.int32)
    packed = {"input_ids": tokens[:1], "labels": labels[:1].index_fill(1, starts[:-1].long(), -100)}
    packed["position_ids"] = torch.cat([torch.arange(n) for n in starts.diff().tolist()])[None]
    packed |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 16, "max_length_k": 16}
    for batch, layout in ((one, "zigzag"), (packed, "contiguous")):
        expected = loss_and_gradients(model, batch, integration.register())
        part = shard_batch(batch, layout=layout)
        assert part["input_ids"].shape[1] == part["position_ids"].shape[-1] == LENGTH // ranks
        found = loss_and_gradients(model, part, "over_ranks")
        for ours, wanted in zip(found, expected, strict=True):
            dist.all_reduce(ours)
            torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-6)


def parts(ranks):
    """What is cut, made, dropped and passed on."""
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH)
    other, table = torch.rand(2, LENGTH, 3), torch.rand(4, LENGTH)
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones(2, LENGTH), "more": other, "table": table}
    part = shard_batch(batch | {"name": "a", "inputs_embeds": None}, ignore_index=-1)
    assert list(batch) == ["input_ids", "labels", "attention_mask", "more", "table"]
    shifted = torch.cat([tokens[:, 1:], torch.full((2, 1), -1)], 1)
    for name, whole in (("input_ids", tokens), ("labels", shifted), ("shift_labels", shifted), ("more", other)):
        assert torch.equal(part[name], shard([whole], 1)[0]), name
    assert torch.equal(part["position_ids"], positions(LENGTH).expand(2, -1))
    assert part["num_items_in_batch"] == 2 * LENGTH - 2 and part["table"] is table and part["name"] == "a"
    assert not {"attention_mask", "inputs_embeds"} & set(part)
    several = torch.arange(3 * LENGTH).view(3, 1, LENGTH)  # of text, height and width
    part = shard_batch({"inputs_embeds": other, "position_ids": several}, layout="contiguous")
    assert torch.equal(part["position_ids"], shard([several], 2, layout="contiguous")[0])
    assert set(part) == {"inputs_embeds", "position_ids"} and part["inputs_embeds"].shape == (2, LENGTH // ranks, 3)


def failures():
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    padded = torch.ones_like(tokens).index_fill(1, torch.tensor([0]), 0)
    for message, error, batch, words in (
        ("batch: expected a mapping", TypeError, [tokens], {}),
        ("batch: expected 'input_ids' or 'inputs_embeds', got labels", InvalidArgument, {"labels": tokens}, {}),
        ("input_ids: expected a Tensor", TypeError, {"input_ids": tokens.tolist()}, {}),
        ("input_ids: expected .*, got \\[32\\]", InvalidArgument, {"input_ids": tokens[0]}, {}),
        ("attention_mask: expected", InvalidArgument, {"input_ids": tokens, "attention_mask": padded}, {}),
        ("attention_mask: expected", InvalidArgument, {"input_ids": tokens, "attention_mask": padded[:, None]}, {}),
        ("labels: expected", InvalidArgument, {"input_ids": tokens, "labels": tokens[:, 1:]}, {}),
        ("position_ids: expected", InvalidArgument, {"input_ids": tokens, "position_ids": tokens[:, 1:]}, {}),
        ("expected a multiple of .*, got length 31", InvalidArgument, {"input_ids": tokens[:, 1:]}, {}),
        ("layout: expected", InvalidArgument, {"input_ids": tokens}, {"layout": "striped"}),
        ("ignore_index: expected an int", TypeError, {"input_ids": tokens, "labels": tokens}, {"ignore_index": 0.5}),
    ):
        with pytest.raises(error, match=message):
            shard_batch(batch, **words)


def main():
    with joined() as (rank, ranks):
        losses(ranks)
        parts(ranks)
        failures()
        print(f"all agree {rank}")


main()
