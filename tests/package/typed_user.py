"""A program that calls every public function, as a user with a type checker writes it. test_typing.py hands it to mypy --strict
and runs it; pyright takes it as well. An `ignore` that a checker does not need is an error too, so each stands for a refusal.
"""

import torch
from torch import Tensor
from typing_extensions import assert_type

import flash_online
import flash_online.functional as F
from flash_online import compat
from flash_online.integrations import diffusers


def attentions(query: Tensor, key: Tensor, value: Tensor, return_lse: bool) -> None:
    out = flash_online.attention(query, key, value, causal=True, window=(2, None), softcap=30, scale=0.5)
    assert_type(out, Tensor)
    first, lse = flash_online.attention(query, key, value, mask=None, sinks=None, deterministic=True, return_lse=True)
    either = flash_online.attention(query, key, value, dropout_p=0.0, alibi_slopes=None, return_lse=return_lse)
    assert_type(either, Tensor | tuple[Tensor, Tensor])
    _, logit = flash_online.attention(query, key, value, return_max_logit=True)
    assert_type(logit, Tensor)
    three = flash_online.attention(query, key, value, return_lse=True, return_max_logit=True)
    assert_type(three, tuple[Tensor, Tensor, Tensor])
    assert_type(flash_online.attention_weight_sums(query, key, lse, causal=True, last=2), Tensor)
    narrow = (query.half(), key.half(), value.half())
    assert_type(flash_online.float8_attention(*narrow, causal=True, out_dtype=torch.bfloat16), Tensor)
    assert_type(flash_online.float8_attention(*narrow, smooth_keys=False, return_lse=True), tuple[Tensor, Tensor])
    assert_type(flash_online.reference.float8_attention(*narrow), Tensor)
    assert_type(flash_online.merge_attention([first, first], [lse, lse]), tuple[Tensor, Tensor])
    merged, _ = flash_online.merge_attention(torch.stack([first, first]), torch.stack([lse, lse]))
    assert_type(F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True), Tensor)
    assert_type(flash_online.reference.attention(query, key, value, causal=True), Tensor)
    flash_online.testing.assert_close_to_float64(merged, first, first.double(), name="merged")


def packed(query: Tensor, key: Tensor, value: Tensor) -> None:
    starts = torch.tensor([0, 3, 7], dtype=torch.int32)
    out = flash_online.varlen_attention(query, key, value, starts, starts, 4, 4, causal=True, alignment="upper_left")
    assert_type(out, Tensor)
    pair = flash_online.varlen_attention(query, key, value, starts, starts, 4, 4, window=(2, 0), return_lse=True)
    assert_type(pair, tuple[Tensor, Tensor])
    both = flash_online.varlen_attention(query, key, value, starts, starts, 4, 4, return_max_logit=True)
    assert_type(both, tuple[Tensor, Tensor])
    truth = flash_online.reference.varlen_attention(query, key, value, starts, starts, 4, 4, window=(2, 0), return_lse=True)
    assert_type(truth, tuple[Tensor, Tensor])


def spanned(query: Tensor, key: Tensor, value: Tensor) -> None:
    length = query.shape[-2]
    ids = torch.zeros(query.shape[0], length, dtype=torch.int64)
    assert_type(flash_online.attention(query, key, value, **flash_online.spans.documents(ids)), Tensor)
    pair = flash_online.attention(query, key, value, **flash_online.spans.sink_window(1, 2, length), return_lse=True)
    assert_type(pair, tuple[Tensor, Tensor])
    blocks = flash_online.BlockList.topk(flash_online.block_scores(query, key, (64, 64)), 2, causal=True)
    assert_type(flash_online.attention(query, key, value, blocks=blocks), Tensor)
    assert_type(flash_online.spans.to_mask(length, length, **flash_online.spans.prefix(ids[:, 0], length)), Tensor)
    bounds = torch.tensor([[0, 2]] * length, dtype=torch.int32)
    lengths = torch.tensor([length] * query.shape[0], dtype=torch.int32)
    assert_type(flash_online.kvcache_attention(query, key, value, lengths, query_spans=bounds, causal=False), Tensor)


def cached(query: Tensor, cache: Tensor, lengths: Tensor) -> None:
    out = flash_online.kvcache_attention(query, cache, cache, lengths, window=(9, None), num_splits=2)
    assert_type(out, Tensor)
    assert_type(flash_online.kvcache_attention(query, cache, cache, 3, return_lse=True), tuple[Tensor, Tensor])
    narrow = cache.to(torch.float8_e4m3fn)
    assert_type(flash_online.kvcache_attention(query.half(), narrow, narrow, lengths, float8_products=True), Tensor)
    starts, table = lengths.new_tensor([0, 2]), lengths.new_tensor([[0]])
    levels = [flash_online.CascadeLevel(starts, table, 3), flash_online.CascadeLevel(starts, table, table[0], max_seqlen_q=2)]
    assert_type(flash_online.cascade_attention(query[0].transpose(0, 1), cache, cache, levels, softcap=30), Tensor)
    shared = flash_online.cascade_attention(query[0].transpose(0, 1), cache, cache, levels, return_lse=True)
    assert_type(shared, tuple[Tensor, Tensor])
    assert_type(flash_online.cache_append(query, query, cache, cache, cache_seqlens=lengths, query=query), Tensor)
    flash_online.cache_append(query, query, cache, cache, cache_seqlens=0)


def rows(logits: Tensor) -> None:
    assert_type(flash_online.softmax(logits, -1, torch.float32), Tensor)
    assert_type(flash_online.log_softmax(logits, dim=-1, dtype=None), Tensor)
    assert_type(flash_online.logsumexp(logits, (0, 1), keepdim=True), Tensor)
    probabilities, classes = flash_online.topk_softmax(logits, 2, renormalize=True)
    assert_type(probabilities, Tensor)
    assert_type(classes, Tensor)
    assert_type(F.softmax(logits, dim=-1), Tensor)
    assert_type(F.log_softmax(logits, -1, dtype=torch.float32), Tensor)
    assert_type(F.relu(logits), Tensor)  # torch's


def losses(logits: Tensor, hidden: Tensor, weight: Tensor, target: Tensor) -> None:
    assert_type(flash_online.cross_entropy(logits, target, None, reduction="sum", z_loss=1e-4), Tensor)
    assert_type(flash_online.cross_entropy(logits, target, return_lse=True), tuple[Tensor, Tensor])
    assert_type(
        flash_online.cross_entropy(logits, target, None, return_lse=True, return_entropy=True), tuple[Tensor, Tensor, Tensor]
    )
    assert_type(flash_online.linear_cross_entropy(hidden, weight, target, label_smoothing=0.1), Tensor)
    loss, _ = flash_online.linear_cross_entropy(hidden, weight, target, linear_bias=None, ignore_index=1, return_lse=True)
    assert_type(loss, Tensor)
    capped = flash_online.linear_cross_entropy(hidden, weight, target, softcap=30, scale=0.5, return_argmax=True)
    assert_type(capped, tuple[Tensor, Tensor])
    logged = flash_online.linear_cross_entropy(hidden, weight, target, z_loss=1e-4, return_z_loss=True, return_argmax=True)
    assert_type(logged, tuple[Tensor, Tensor, Tensor])
    entropy = flash_online.linear_cross_entropy(hidden, weight, target, scale=logits[:, 0], return_entropy=True)
    assert_type(entropy, tuple[Tensor, Tensor])
    likely = flash_online.linear_cross_entropy(hidden, weight, target, top_log_probs=5)
    assert_type(likely, Tensor | tuple[Tensor, ...])
    assert_type(flash_online.reference.linear_cross_entropy(hidden, weight, target, softcap=30.0), Tensor)
    assert_type(F.cross_entropy(logits, target, ignore_index=1), Tensor)
    assert_type(F.linear_cross_entropy(hidden, weight, target, reduction="none"), Tensor)


def replaced(logits: Tensor) -> None:
    with flash_online.override(), flash_online.strict(), flash_online.checked():
        torch.nn.functional.softmax(logits, -1)
    flash_online.enable()
    flash_online.disable()


def explained(query: Tensor, logits: Tensor) -> None:
    plan = flash_online.explain(flash_online.attention, query, query, query, causal=True, return_lse=True)
    assert_type(plan, flash_online.Plan)
    assert_type(plan.ours, bool)
    assert_type(plan.extra_bytes, int | None)
    flash_online.explain(F.softmax, logits, -1)
    flash_online.explain(torch.nn.functional.softmax, logits, dim=-1)
    assert_type(flash_online.__version__, str)
    assert len(flash_online.SAC_SAVE_OPS) == 7


def as_in_flash_attention(query: Tensor) -> None:
    out: Tensor = compat.flash_attn.flash_attn_func(query, query, query, 0.0, causal=True, window_size=(3, None))
    _, lse, _ = compat.flash_attn.flash_attn_qkvpacked_func(torch.stack([query] * 3, 2), return_attn_probs=True)
    assert_type(compat.flash_attn_cute.flash_attn_func(query, query, query, return_lse=True), tuple[Tensor, Tensor | None])
    ends = torch.full((query.shape[0], 1, query.shape[1], 1), 2, dtype=torch.int32)
    masked = compat.flashmask_attention(query, query, query, ends, causal=True, window_size=None, return_softmax_lse=True)
    assert_type(masked, Tensor | tuple[Tensor, Tensor])
    tokens, indices, _, longest, _ = compat.bert_padding.unpad_input(out, torch.ones(out.shape[:2]))
    assert_type(longest, int)
    assert_type(compat.bert_padding.pad_input(tokens, indices, *out.shape[:2]), Tensor)
    assert lse.shape == (1, 7, 2)


def installed() -> None:  # not called: FlashAttention itself may be there
    with compat.install("flash_attn") as installation:
        assert_type(installation, compat.Installation)
    installation.remove()


def registered() -> None:  # not called: diffusers may not be there
    registration = diffusers.register()
    assert_type(registration, diffusers.Registration)
    registration.remove()


def refused(query: Tensor) -> None:
    try:
        flash_online.attention(query, query, query, window=3)  # type: ignore[call-overload]
    except flash_online.InvalidArgument as error:
        assert str(error).startswith("window")
    try:
        flash_online.explain(flash_online.softmax, query, -1, width=1)  # type: ignore[call-arg]
    except TypeError as error:
        assert "width" in str(error)


def main() -> None:
    query, hidden, weight = torch.randn(1, 2, 7, 8), torch.randn(5, 8), torch.randn(6, 8)
    logits, target = hidden @ weight.t(), torch.tensor([0, 1, 2, 3, 4])
    attentions(query, query, query, return_lse=True)
    spanned(query, query, query)
    packed(*[query[0].transpose(0, 1)] * 3)
    rows(logits)
    losses(logits, hidden, weight, target)
    replaced(logits)
    explained(query, logits)
    as_in_flash_attention(query)
    refused(query)


if __name__ == "__main__":
    main()
