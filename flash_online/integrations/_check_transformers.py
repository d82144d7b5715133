"""`python -m flash_online check transformers`: compares our attention with the host's eager attention on tiny random models of
the installed transformers. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .._check_install import why_no_cuda

BATCH, LENGTH = 3, 45  # of the inputs, in tokens
ENCODED = 30  # frames from Whisper's encoder; no width equals these lengths, so masks are recognisable by shape
ALLOWED = 1e-5  # relative to the largest output, and to the largest gradient, in float32
NEW_TOKENS = 10

_VOCABULARY, _HIDDEN, _HEADS, _LAYERS = 97, 48, 6, 3
_DECODER = {
    "vocab_size": _VOCABULARY,
    "hidden_size": _HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER = {name: _DECODER[name] for name in _DECODER if name != "num_key_value_heads"} | _TOKENS
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Model:
    """A tiny model: the names of its classes in transformers and its config arguments."""

    name: str
    config: str
    model: str
    words: dict[str, Any] = field(default_factory=dict)
    kind: str = "decoder"  # decoder: left padding, generates; encoder: right padding; t5, whisper: encoder and decoder

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

        def tokens() -> Tensor:
            return torch.randint(3, _VOCABULARY, (batch, length), generator=generator)

        def padding(left: bool) -> Tensor:
            hidden = (torch.arange(batch) * length // (2 * batch))[:, None]
            real = torch.arange(length) >= hidden
            return (real if left else real.flip(1)).long()

        found = {"input_ids": tokens()}
        if padded:
            found["attention_mask"] = padding(left=self.kind == "decoder")
        if self.kind == "t5":
            found |= {"decoder_input_ids": tokens()}
            found |= {"decoder_attention_mask": padding(left=False)} if padded else {}
        if self.kind == "whisper":  # the encoder takes no padding
            frames = torch.randn(batch, 16, 2 * ENCODED, generator=generator)
            found = {"input_features": frames, "decoder_input_ids": found["input_ids"]}
            found |= {"decoder_attention_mask": padding(left=False)} if padded else {}
        return {name: tensor.to(device) for name, tensor in found.items()}


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
_GPT_OSS = _DECODER | _EXPERTS | {"head_dim": 8, "sliding_window": 12, "layer_types": _LAYER_TYPES}
_GPT2 = {"vocab_size": _VOCABULARY, "n_embd": _HIDDEN, "n_layer": _LAYERS, "n_head": _HEADS, "n_positions": 128}
_MODERN = _ENCODER | {"local_attention": 16, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}

MODELS = (
    Model("Llama", "LlamaConfig", "LlamaForCausalLM", _DECODER),
    Model("Qwen3", "Qwen3Config", "Qwen3ForCausalLM", _DECODER | {"head_dim": 16}),
    Model("GPT-2", "GPT2Config", "GPT2LMHeadModel", _GPT2),
    Model("Mistral", "MistralConfig", "MistralForCausalLM", _DECODER | {"sliding_window": 12}),
    Model("Gemma 2", "Gemma2Config", "Gemma2ForCausalLM", _GEMMA2),
    Model("Gemma 3", "Gemma3TextConfig", "Gemma3ForCausalLM", _GEMMA | {"layer_types": _LAYER_TYPES}),
    Model("Gemma 4", "Gemma4TextConfig", "Gemma4ForCausalLM", _GEMMA4),
    Model("gpt-oss", "GptOssConfig", "GptOssForCausalLM", _GPT_OSS),
    Model("DeepSeek-V3", "DeepseekV3Config", "DeepseekV3ForCausalLM", _DECODER | _MLA),
    Model("Llama 4", "Llama4TextConfig", "Llama4ForCausalLM", _LLAMA4),
    Model("BERT", "BertConfig", "BertModel", _ENCODER, "encoder"),
    Model("ModernBERT", "ModernBertConfig", "ModernBertModel", _MODERN, "encoder"),
    Model("Whisper", "WhisperConfig", "WhisperForConditionalGeneration", _WHISPER, "whisper"),
    Model("T5", "T5Config", "T5ForConditionalGeneration", _T5, "t5"),
)


class _MaskMeter(TorchDispatchMode):
    """The elements of the largest mask that an operator makes: tensors with a last dimension in `keys`, bool or of four
    dimensions (an lse has three)."""

    def __init__(self, keys: set[int]) -> None:
        super().__init__()
        self.keys, self.most = keys, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for tensor in results if isinstance(results, (tuple, list)) else (results,):
            if not isinstance(tensor, Tensor) or tensor.dim() == 0 or tensor.shape[-1] not in self.keys:
                continue
            if tensor.dtype is torch.bool or tensor.dim() == 4:
                # Views share storage: expanded masks take no memory.
                self.most = max(self.most, tensor.untyped_storage().nbytes() // tensor.element_size())
        return results


@contextlib.contextmanager
def measured(name: str, keys: set[int]) -> Iterator[_MaskMeter]:
    """Measures the masks that the two functions registered under `name` allocate."""
    from transformers import AttentionInterface, AttentionMaskInterface

    meter = _MaskMeter(keys)
    mappings = [interface._global_mapping for interface in (AttentionInterface, AttentionMaskInterface)]
    before = [mapping[name] for mapping in mappings]

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def watching(*arguments: Any, **options: Any) -> Any:
            with meter:
                return function(*arguments, **options)

        return watching

    for mapping, function in zip(mappings, before, strict=True):
        mapping[name] = watched(function)
    try:
        yield meter
    finally:
        for mapping, function in zip(mappings, before, strict=True):
            mapping[name] = function


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


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference, relative to the largest element."""
    largest = max(t.abs().max().item() for t in theirs)
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)) / largest


def generated(model: Any, spec: Model, inputs: dict[str, Tensor], cache: str | None) -> Tensor:
    """Greedy generation after the (padded) prompts."""
    inputs = {name: tensor for name, tensor in inputs.items() if not name.startswith("decoder")}
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    # Compiled decoding has its own test; here it would only take minutes.
    return model.generate(**inputs, **options, cache_implementation=cache, disable_compile=True)


def generated_eagerly(model: Any, spec: Model, inputs: dict[str, Tensor], cache: str | None) -> Tensor | None:
    """`generated` with the host's eager attention. None if the host itself fails, as transformers 5.17 does with a static cache
    for chunked attention: it passes one of its mask functions an argument that the function lacks."""
    model.set_attn_implementation("eager")
    try:
        return generated(model, spec, inputs, cache)
    except TypeError:
        return None


def _check_model(spec: Model, name: str, device: str) -> tuple[str, bool]:
    """The line of a model, and whether the model is right."""
    model, inputs = spec.build().to(device), spec.inputs(device=device)
    model.set_attn_implementation("eager")
    outputs, gradients = passes(model, inputs)
    caches = () if spec.kind == "encoder" else (None, "static")
    texts = {cache: generated_eagerly(model, spec, inputs, cache) for cache in caches}
    model.set_attn_implementation(name)
    with measured(name, {LENGTH, ENCODED}) as meter:
        ours, our_gradients = passes(model, inputs)
    of_output = difference(ours, outputs)
    of_gradient = difference([our_gradients[n] for n in gradients], list(gradients.values()))
    right = of_output <= ALLOWED and of_gradient <= ALLOWED and meter.most < min(LENGTH, ENCODED) ** 2
    word = "-"
    if texts:
        same = [torch.equal(generated(model, spec, inputs, cache), t) for cache, t in texts.items() if t is not None]
        right, word = right and all(same), "equal" if all(same) else "DIFFERENT"
        word += " (a static cache fails in eager too)" if texts["static"] is None else ""
    line = f"{spec.name:12} {device:5} {of_output:<16.1e} {of_gradient:<18.1e} {meter.most:<13} {word:10}"
    return f"{line} {'' if right else 'WRONG'}".rstrip(), right


def check(say: Callable[[str], None]) -> bool:
    """Compares every model with the host's eager attention, a line per model. Returns whether all are right.

    Raises:
        ImportError: transformers is not installed, or too old.
    """
    from .transformers import register

    name = register()
    import transformers

    dense = BATCH * LENGTH * LENGTH
    say(f"transformers {transformers.__version__}, attn_implementation={name!r} compared with 'eager', float32, padded batches")
    say(f"Errors relative to the largest element, {ALLOWED:g} allowed; masks in elements (a dense one has {dense}).\n")
    say(f"{'model':12} {'where':5} {'error of output':16} {'error of gradient':18} {'largest mask':13} generate")
    right = True
    quiet = transformers.utils.logging
    verbosity = quiet.get_verbosity()
    quiet.set_verbosity_error()
    try:
        for device in ("cpu",) if why_no_cuda() else ("cpu", "cuda"):
            for spec in MODELS:
                try:
                    line, good = _check_model(spec, name, device)
                except Exception as problem:  # report a failing model and go on
                    line, good = f"{spec.name:12} {device:5} FAILED: {type(problem).__name__}: {problem}", False
                right = right and good
                say(line)
    finally:
        quiet.set_verbosity(verbosity)
    return right
