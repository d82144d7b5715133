"""Modules written for torch.nn.functional give the same numbers under flash_online.override(), gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import flash_online
from flash_online import reference

TF = torch.nn.functional


def both(module, call):
    """Results and parameter gradients with torch's functions and with ours."""
    results = []
    for ours in (False, True):
        module.zero_grad()
        torch.manual_seed(0)
        if ours:
            with flash_online.override():
                out = call()
                out.square().mean().backward()
        else:
            with sdpa_kernel(SDPBackend.MATH):
                out = call()
                out.square().mean().backward()
        results.append([out.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1])
    for theirs, found in zip(*results, strict=True):
        torch.testing.assert_close(found, theirs)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("mask", [None, "padding", "causal", "both"])
def test_multihead_attention(mask, need_weights):
    module = nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(3, 10, 32)
    options = {"need_weights": need_weights}
    if mask in ("padding", "both"):
        options["key_padding_mask"] = torch.arange(10) >= torch.tensor([10, 7, 4])[:, None]
    if mask in ("causal", "both"):
        options["attn_mask"] = torch.ones(10, 10, dtype=torch.bool).triu(1)
        options["is_causal"] = mask == "causal"
    both(module, lambda: module(x, x, x, **options)[0])


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_transformer_encoder_layer(norm_first, causal):
    module = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first)
    x = torch.randn(2, 12, 32)
    mask = nn.Transformer.generate_square_subsequent_mask(12) if causal else None
    both(module, lambda: module(x, src_mask=mask, is_causal=causal))
    module.eval()
    both(module, lambda: module(x, src_mask=mask, is_causal=causal))


def test_transformer_decoder_and_loss():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(50, 32)
            self.decoder = nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
            self.head = nn.Linear(32, 50)
            self.loss = nn.CrossEntropyLoss(label_smoothing=0.1)

        def forward(self, tokens, memory):
            length = tokens.shape[1]
            mask = nn.Transformer.generate_square_subsequent_mask(length)
            hidden = self.decoder(self.embedding(tokens), memory, tgt_mask=mask, tgt_is_causal=True)
            return self.loss(self.head(hidden).flatten(0, 1), tokens.flatten())

    model = Model()
    tokens, memory = torch.randint(0, 50, (2, 9)), torch.randn(2, 5, 32)
    both(model, lambda: model(tokens, memory))


def test_dropout_in_a_module_is_reproducible():
    module = nn.MultiheadAttention(32, 4, dropout=0.5, batch_first=True)
    x = torch.randn(2, 6, 32)
    with flash_online.override():
        torch.manual_seed(1)
        first = module(x, x, x, need_weights=False)[0]
        torch.manual_seed(1)
        assert torch.equal(module(x, x, x, need_weights=False)[0], first)


def test_override_reaches_the_modules_and_is_undone():
    original = TF.scaled_dot_product_attention
    module, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 3, 8)
    seen = []
    real = torch.ops.flash_online.attention_training.default

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func is real)
            return func(*args, **(kwargs or {}))

    with flash_online.override(), Watch():
        module(x, x, x, need_weights=False)
    assert any(seen)
    assert TF.scaled_dot_product_attention is original


@pytest.fixture(scope="module")
def llama():
    """Two layers, grouped heads, random weights: nothing is downloaded."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("padded", [False, True])
def test_llama(llama, padded):
    tokens = torch.randint(0, 97, (2, 17))
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, :6] = 0
    both(llama, lambda: llama(input_ids=tokens, attention_mask=mask, labels=tokens).logits)
    both(llama, lambda: llama(input_ids=tokens, attention_mask=mask, labels=tokens).loss)


def test_llama_generates_the_same_text(llama):
    tokens = torch.randint(0, 97, (2, 5))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        expected = llama.generate(tokens, **options)
        with flash_online.override():
            assert torch.equal(llama.generate(tokens, **options), expected)


def test_llama_beside_the_reference(llama, monkeypatch):
    """The same model on the reference's attention in place of torch's: the oracle and the product agree on a real model."""

    def plain(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        return reference.attention(query, key, value, mask=attn_mask, causal=is_causal, scale=scale)

    tokens = torch.randint(0, 97, (2, 17))
    with torch.no_grad():
        with flash_online.override():
            found = llama(tokens).logits
        monkeypatch.setattr(TF, "scaled_dot_product_attention", plain)
        torch.testing.assert_close(found, llama(tokens).logits)
