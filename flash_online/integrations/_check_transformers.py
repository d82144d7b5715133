"""`python -m flash_online check transformers`: compares our attention with the host's eager attention on tiny random models of
the installed transformers. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._self_check import MaskMeter, compare_models, difference, require

BATCH, LENGTH = 3, 45  # of the inputs, in tokens; no width equals this length, so dense masks are recognisable by shape
ENCODED = 30  # frames from Whisper's encoder
ALLOWED = 1e-5  # relative to the largest output, and to the largest gradient, in float32
NEW_TOKENS = 10

_VOCABULARY, _HIDDEN, _HEADS, _LAYERS = 97, 48, 6, 3
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_PLAIN = {"vocab_size": _VOCABULARY, "hidden_size": _HIDDEN, "intermediate_size": 64, "max_position_embeddings": 128}
_PLAIN |= {"num_hidden_layers": _LAYERS, "num_attention_heads": _HEADS}
_DECODER, _ENCODER = _PLAIN | {"num_key_value_heads": 2}, _PLAIN | _TOKENS
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Model:
    """A tiny model: the names of its classes in transformers and its config arguments."""

    name: str
    config: str
    model: str
    words: dict[str, Any] = field(default_factory=dict)
    kind: str = "decoder"  # decoder: left padding, generates; encoder: right padding; t5, whisper: encoder and decoder
    token_types: Callable[[Tensor], Tensor] | None = None  # from positions, for models in which images see themselves

    def build(self, **others: Any) -> torch.nn.Module:
        """The model with random weights, in eval mode. Large weights give scores of several units, so that a missing softcap or
        sink, or an extra key, shows."""
        import transformers

        generator = torch.Generator().manual_seed(2017)
        config = getattr(transformers, self.config)(**(self.words | others))
        model = getattr(transformers, self.model)(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                noise = torch.randn(weight.shape, generator=generator)
                if "sinks" in name:
                    weight.copy_(noise)
                elif weight.dim() < 2:
                    weight.add_(0.1 * noise)
                elif "relative_attention_bias" in name:
                    weight.copy_(2 * noise)
                else:
                    weight.copy_(noise * (1.2 / weight.shape[-1] ** 0.5))
        return model.eval()

    def inputs(
        self, *, padded: bool = True, length: int = LENGTH, batch: int = BATCH, device: str = "cpu"
    ) -> dict[str, Tensor]:
        """Inputs of a forward pass. Decoders are padded on the left, other models on the right."""
        generator = torch.Generator().manual_seed(2023)
        real = torch.arange(length) >= (torch.arange(batch) * length // (2 * batch))[:, None]
        right = real.flip(1).long()

        def tokens() -> Tensor:
            return torch.randint(3, _VOCABULARY, (batch, length), generator=generator)

        if self.kind == "whisper":  # the encoder takes no padding
            frames = torch.randn(batch, 16, 2 * ENCODED, generator=generator)
            found = {"input_features": frames, "decoder_input_ids": tokens(), "decoder_attention_mask": right}
        elif self.kind == "t5":
            found = {"input_ids": tokens(), "decoder_input_ids": tokens()}
            found |= {"attention_mask": right, "decoder_attention_mask": right}
        else:
            found = {"input_ids": tokens(), "attention_mask": real.long() if self.kind == "decoder" else right}
        if self.token_types is not None:
            found["token_type_ids"] = self.token_types(torch.arange(length)).long().expand(batch, -1).contiguous()
        return {name: tensor.to(device) for name, tensor in found.items() if padded or not name.endswith("mask")}


_T5 = _TOKENS | {"d_model": _HIDDEN, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": _HEADS, "vocab_size": _VOCABULARY}
_T5 |= {"decoder_start_token_id": 0, "dropout_rate": 0.0, "relative_attention_num_buckets": 8}
_WHISPER = _TOKENS | {"vocab_size": _VOCABULARY, "num_mel_bins": 16, "d_model": _HIDDEN, "max_source_positions": ENCODED}
_WHISPER |= {f"{half}_{what}": n for half in ("encoder", "decoder") for what, n in (("layers", 2), ("attention_heads", 4))}
_WHISPER |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 1, "max_target_positions": 128}
_WHISPER |= {"suppress_tokens": None, "begin_suppress_tokens": None}
_MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_MLA |= {"num_key_value_heads": _HEADS, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
_MLA |= {"first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_shared_experts": 1}
_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA = _DECODER | {"head_dim": 16, "sliding_window": 12}
_GEMMA2 = _GEMMA | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}
_GEMMA4 = _GEMMA | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "global_head_dim": 32}
_GEMMA4 |= {"vocab_size_per_layer_input": _VOCABULARY, "hidden_size_per_layer_input": 8}
_LLAMA4 = _DECODER | _EXPERTS | {"head_dim": 8, "intermediate_size_mlp": 64, "attention_chunk_size": 16}
_LLAMA4 |= {"layer_types": ["chunked_attention", "full_attention", "chunked_attention"], "num_hidden_layers": 3}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
_VISION |= {"patch_size": 4}
_GEMMA3 = _GEMMA | {"layer_types": _LAYER_TYPES}
_GEMMA3_IMAGES = {"text_config": _GEMMA3 | {"model_type": "gemma3_text"}, "vision_config": _VISION, "mm_tokens_per_image": 4}
_GEMMA3_IMAGES |= {"image_token_index": 96, "boi_token_index": 94, "eoi_token_index": 95}
_PALIGEMMA = {"text_config": _DECODER | {"head_dim": 16, "model_type": "gemma"}, "image_token_index": 96}
_PALIGEMMA |= {"vision_config": _VISION | {"model_type": "siglip_vision_model"}, "projection_dim": _HIDDEN}
_GPT_OSS = _DECODER | _EXPERTS | {"head_dim": 8, "sliding_window": 12, "layer_types": _LAYER_TYPES}
_GPT2 = {"vocab_size": _VOCABULARY, "n_embd": _HIDDEN, "n_layer": _LAYERS, "n_head": _HEADS, "n_positions": 128}
_MODERN = _ENCODER | {"local_attention": 16, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}

MODELS = (
    Model("Llama", "LlamaConfig", "LlamaForCausalLM", _DECODER),
    Model("Qwen3", "Qwen3Config", "Qwen3ForCausalLM", _DECODER | {"head_dim": 16}),
    Model("GPT-2", "GPT2Config", "GPT2LMHeadModel", _GPT2),
    Model("Mistral", "MistralConfig", "MistralForCausalLM", _DECODER | {"sliding_window": 12}),
    Model("Gemma 2", "Gemma2Config", "Gemma2ForCausalLM", _GEMMA2),
    Model("Gemma 3", "Gemma3TextConfig", "Gemma3ForCausalLM", _GEMMA3),
    Model(
        "Gemma 3, images",
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        _GEMMA3_IMAGES,
        token_types=lambda position: position // 9 % 2,
    ),
    Model(
        "PaliGemma",
        "PaliGemmaConfig",
        "PaliGemmaForConditionalGeneration",
        _PALIGEMMA,
        token_types=lambda position: position >= 25,  # 0: the image and the prompt, which are one block
    ),
    Model("Gemma 4", "Gemma4TextConfig", "Gemma4ForCausalLM", _GEMMA4),
    Model("gpt-oss", "GptOssConfig", "GptOssForCausalLM", _GPT_OSS),
    Model("DeepSeek-V3", "DeepseekV3Config", "DeepseekV3ForCausalLM", _DECODER | _MLA),
    Model("Llama 4", "Llama4TextConfig", "Llama4ForCausalLM", _LLAMA4),
    Model("BERT", "BertConfig", "BertModel", _ENCODER, "encoder"),
    Model("ModernBERT", "ModernBertConfig", "ModernBertModel", _MODERN, "encoder"),
    Model("Whisper", "WhisperConfig", "WhisperForConditionalGeneration", _WHISPER, "whisper"),
    Model("T5", "T5Config", "T5ForConditionalGeneration", _T5, "t5"),
)


def passes(model: torch.nn.Module, inputs: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The outputs of a forward pass at non-padding tokens, and the gradients of the parameters."""
    model.zero_grad()
    results = model(**inputs)
    found = [results[name] for name in ("logits", "last_hidden_state", "encoder_last_hidden_state") if name in results]
    paddings = [inputs.get("decoder_attention_mask", inputs.get("attention_mask")), inputs.get("attention_mask")]
    outputs = [out if pad is None else out[pad.bool()] for out, pad in zip(found, paddings, strict=False)]
    generator = torch.Generator().manual_seed(7)
    total = torch.zeros((), device=outputs[0].device)
    for out in outputs:
        total = total + (out.float() * torch.randn(out.shape, generator=generator).to(out.device)).mean()
    total.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return [out.detach() for out in outputs], gradients


def generated(model: Any, inputs: dict[str, Tensor], cache: str | None) -> Tensor:
    """Greedy generation after the (padded) prompts."""
    inputs = {name: tensor for name, tensor in inputs.items() if not name.startswith("decoder")}
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    # Compiled decoding has its own test; here it would only take minutes.
    return model.generate(**inputs, **options, cache_implementation=cache, disable_compile=True)


def generated_eagerly(model: Any, inputs: dict[str, Tensor], cache: str | None) -> Tensor | None:
    """`generated` with the host's eager attention. None if the host itself fails, as transformers 5.17 does with a static cache
    for chunked attention: it passes one of its mask functions an argument that the function lacks."""
    model.set_attn_implementation("eager")
    try:
        return generated(model, inputs, cache)
    except TypeError:
        return None


def _measure(name: str, model: Model, device: str) -> tuple[float, float, int, str]:
    """The differences of outputs and gradients between the attention registered under `name` and the host's eager attention,
    the largest mask of ours, and a note on generated text."""
    module, inputs = model.build().to(device), model.inputs(device=device)
    module.set_attn_implementation("eager")
    outputs, gradients = passes(module, inputs)
    texts = {cache: generated_eagerly(module, inputs, cache) for cache in (None, "static") if model.kind != "encoder"}
    module.set_attn_implementation(name)
    with MaskMeter((LENGTH, LENGTH)) as meter:
        ours, our_gradients = passes(module, inputs)
    # T5's position bias is a mask of all queries and keys, which the batch shares.
    most = _HEADS * LENGTH**2 if model.kind == "t5" else min(LENGTH, ENCODED) ** 2 - 1
    require(meter.calls > 0, "no call reached our kernels")
    require(meter.most <= most, f"expected no dense mask, got one of {meter.most} elements")
    for cache, text in texts.items():
        require(text is None or torch.equal(generated(module, inputs, cache), text), f"DIFFERENT text, cache: {cache}")
    note = "" if not texts else "equal text" if None not in texts.values() else "equal text (a static cache fails in eager too)"
    of_gradients = difference([our_gradients[n] for n in gradients], list(gradients.values()))
    return difference(ours, outputs), of_gradients, meter.most, note


def check(say: Callable[[str], None]) -> bool:
    """Compares every model with the host's eager attention, a line per model. Returns whether all are right.

    Raises:
        ImportError: transformers is not installed, or too old.
    """
    from .transformers import register

    name = register()
    import transformers

    setting = (
        f"attn_implementation={name!r} compared with 'eager', padded batches (a dense mask has {BATCH * LENGTH**2} elements)"
    )
    models = {model.name: model for model in MODELS}
    return compare_models(say, transformers, setting, models, partial(_measure, name), ALLOWED)
