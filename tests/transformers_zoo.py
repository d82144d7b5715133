"""Tiny random models of the model types that the installed transformers knows, through our attention against the host's eager
attention. Nothing is downloaded.

    python tests/transformers_zoo.py [type ...]      a line for each model, and how many there are of each verdict

A config starts as its class's default, and every size in it that has a known name is cut down; the few types whose sizes hang
together in another way have words of their own in `_WORDS`. A type that fails with eager attention is one that cannot be built
tiny here, and the line says why.
"""

from __future__ import annotations

import collections
import copy
import inspect
import itertools
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY, BATCH, LENGTH = 99, 2, 21
LAYERS, HEADS, KEY_HEADS, WIDTH = 2, 4, 2, 16  # WIDTH of a head
HIDDEN, INNER, IMAGE, PATCH, WINDOW, POSITIONS = HEADS * WIDTH, 48, 32, 8, 8, 128
ALLOWED = 1e-4  # of the largest element of an output, in float32; a mask that is read in another way is off by 0.1 and more
LARGEST = 20_000_000  # parameters

MAPPINGS = ("MODEL_FOR_CAUSAL_LM", "MODEL_FOR_MASKED_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL_FOR_TEXT_ENCODING", "MODEL")

# What a number becomes, by the first pattern that its name has.
_SIZES = tuple(
    (re.compile(pattern), number)
    for pattern, number in (
        (r"vocab_size|hash_byte_group_vocab", VOCABULARY),
        (r"^(image_)?patch_size$", PATCH),
        (r"^(image|input|img)_size$", IMAGE),
        (r"(key_value_heads|kv_heads|head_kv)$", KEY_HEADS),
        (r"(_heads|n_head|attn_heads)$", HEADS),
        (r"^qk_head_dim$", 2 * WIDTH),
        (r"(head_dim|d_kv|d_head|dim_head|head_size|kv_channels|rotary_dim)$", WIDTH),
        (r"^(kv_lora_rank|q_lora_rank|o_lora_rank|hidden_size_per_layer_input|embedding_rank|hc_lowrank)$", 16),
        (r"(sliding_window|attention_window|local_attention|window_size|attention_chunk_size|local_radius)$", WINDOW),
        (r"(num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts|num_selected_experts|topk)$", 2),
        (r"^((moe_)?num_experts|num_local_experts|n_routed_experts|num_routed_experts)$", 4),
        (r"^(n_group|num_expert_group|topk_group|n_shared_experts|(moe_)?num_shared_experts)$", 1),
        (r"(position_embeddings|n_positions|max_seq_len|max_sequence_length|n_ctx|max_position|_positions)$", POSITIONS),
        (r"(intermediate_size|ffn_dim|d_ff|dff|dim_ff|ffn_hidden_size|d_inner|feed_forward_size|mlp_dim|size_mlp)$", INNER),
        (r"^(num_hidden_layers|n_layers?|num_layers|num_(en|de)coder_layers|depth|num_blocks)$", LAYERS),
        (r"(^|_)(encoder|decoder)_layers$", LAYERS),
        (r"^(d_model|n_embd|embed_dim|emb_dim|hidden_dim|dim|width|d_latents|output_dim|projection_dim|lru_width)$", HIDDEN),
        (r"^(|\w+_)hidden_sizes?$|^(|\w+_)embedding_size$|^(embedding_dim|word_embed_proj_dim|text_embed_dim)$", HIDDEN),
    )
)
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_TOKENS |= {"unk_index": 3, "mask_index": 4, "mask_token_id": 4}
_IF_NONE = {"head_dim": WIDTH, "num_key_value_heads": KEY_HEADS, "num_experts_per_tok": 2}

_ONE_OF_EACH = ["sliding_attention", "full_attention"]
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": WIDTH, "mamba_d_ssm": 2 * HIDDEN, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8}
_WORDS: dict[str, dict[str, Any]] = {
    "afmoe": {"num_dense_layers": 1},
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 4},
    "falcon_h1": _MAMBA,
    "gemma3n_text": {"layer_types": _ONE_OF_EACH * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 0}
    | {"activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [INNER] * 4},
    "granitemoehybrid": _MAMBA | {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": _JAMBA,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": WIDTH, "n_groups": 1, "chunk_size": 16},
    "mobilebert": {"true_hidden_size": 32, "intra_bottleneck_size": 32, "embedding_size": 32, "hidden_size": 64},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": WIDTH, "n_groups": 1, "chunk_size": 16, "n_group": 1},
    "qwen2_5_vl_vision": {"window_size": 2 * PATCH * 2},
    "reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (4, 8), "attn_layers": ["local", "lsh"], "num_buckets": 4}
    | {"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "is_decoder": True},
    "wav2vec2-bert": {"feature_projection_input_dim": 80},
    "xlstm": {"qk_dim_factor": 1.0, "v_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
}


class Unbuilt(Exception):
    """A model type that this file cannot build tiny, or that fails with the host's eager attention."""


class Verdict(NamedTuple):
    word: str  # equal, refused, wrong, failed (an error of neither kind), unbuilt
    kind: str
    name: str  # of the model's class
    detail: str


def model_types() -> list[str]:
    """All causal, masked, sequence-to-sequence and encoder types."""
    return sorted({kind for mapping in MAPPINGS for kind in getattr(modeling_auto, f"{mapping}_MAPPING_NAMES")})


def classes_of(kind: str) -> list[str]:
    """The names of the classes that the mappings have for a type, each once."""
    names: dict[str, None] = {}
    for mapping in MAPPINGS:
        name = getattr(modeling_auto, f"{mapping}_MAPPING_NAMES").get(kind)
        if name is not None:
            names[name[0] if isinstance(name, (tuple, list)) else name] = None
    return [name for name in names if hasattr(transformers, name)]


# --- Configs -----------------------------------------------------------------------------------------------------------------


def _size(name: str) -> int | None:
    return next((number for pattern, number in _SIZES if pattern.search(name)), None)


def _layers_to_keep(values: dict[str, Any], per_layer: list[str], layers: int) -> list[int]:
    """One layer of each kind, four at most and two at least."""
    kept: dict[tuple[str, ...], int] = {}
    for i in range(layers):
        kept.setdefault(tuple(str(values[name][i]) for name in per_layer), i)
    chosen = sorted(kept.values())[:4]
    rest = (i for i in range(layers) if i not in chosen)
    return sorted(chosen + list(itertools.islice(rest, max(0, LAYERS - len(chosen)))))


def _number(name: str, value: Any, layers: int | None, kept: int) -> Any:
    """A number or a list of numbers, cut down; None where it stays."""
    size = _size(name)
    if size is None:
        return None
    if isinstance(value, int):
        if value in (0, 1) and size != HIDDEN:
            return value
        return kept if size == LAYERS and value == layers else min(size, value) if size in (HEADS, KEY_HEADS) else size
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
        return type(value)(min(size, v) for v in value)
    return None


def _rope(config: PretrainedConfig, rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters whose three sections fit into a head."""
    rope = copy.deepcopy(rope)
    source = sys.modules[type(config).__module__.replace("configuration_", "modeling_")] if _has_sections(config) else None
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if "mrope_section" in part or (part is rope and source is not None and "rope_theta" in part):
            half = int(WIDTH // 2 * part.get("partial_rotary_factor", 1.0))
            part["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return rope


def _has_sections(config: PretrainedConfig) -> bool:
    module = type(config).__module__.replace("configuration_", "modeling_")
    try:
        __import__(module)
        return "mrope_section" in inspect.getsource(sys.modules[module])
    except (ImportError, OSError, KeyError):
        return False


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """A small config of the same class."""
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    counts = (values.get(name) for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"))
    layers = next((count for count in counts if isinstance(count, int)), None)
    per_layer = [n for n, v in values.items() if isinstance(v, (list, tuple)) and layers and layers > 1 and len(v) == layers]
    kept = _layers_to_keep(values, per_layer, layers) if per_layer else list(range(LAYERS))
    special, words = iter(range(VOCABULARY - 1, VOCABULARY - 20, -1)), {}
    for name, value in values.items():
        if name in per_layer:
            words[name] = type(value)(value[i] for i in kept)
        elif isinstance(value, PretrainedConfig):
            words[name] = shrunk(value)
        elif value is None and name in _IF_NONE:
            words[name] = _IF_NONE[name]
        elif name in _TOKENS and value is not None:
            words[name] = _TOKENS[name]
        elif name.endswith(("_token_id", "_token_index")):
            if isinstance(value, int) and value >= VOCABULARY - 20:
                words[name] = next(special)
        elif name == "rope_parameters" and value:
            words[name] = _rope(config, value)
        elif value is not None and not isinstance(value, bool):
            number = _number(name, value, layers, len(kept))
            words |= {} if number is None else {name: number}
    for heads, key_heads in itertools.product(("num_attention_heads", "n_head", "n_heads"), ("num_key_value_heads",)):
        if isinstance(values.get(heads), int) and values.get(key_heads) == values[heads]:
            words[key_heads] = words[heads]
    return type(config)(**(words | _WORDS.get(type(config).model_type, {})))


def _config_for(kind: str, model: type) -> PretrainedConfig:
    """The tiny config of a type, or that of its part which the model's class takes."""
    config = shrunk(CONFIG_MAPPING[kind]())
    wanted = model.config_class
    if wanted is None or isinstance(config, wanted):
        return config
    return next((part for part in vars(config).values() if isinstance(part, wanted)), config)


# --- Inputs ------------------------------------------------------------------------------------------------------------------


def _found(config: PretrainedConfig, name: str, default: int) -> int:
    """A number of a config or of its parts."""
    value = getattr(config, name, None)
    if isinstance(value, (list, tuple)):
        value = value[0]
    if isinstance(value, int):
        return value
    parts = (part for part in vars(config).values() if isinstance(part, PretrainedConfig))
    return next((found for part in parts if (found := _found(part, name, 0))), default)


def _texts(names: Any, padded: bool, generator: torch.Generator) -> dict[str, Tensor]:
    def tokens() -> Tensor:
        return torch.randint(5, VOCABULARY - 25, (BATCH, LENGTH), generator=generator)

    padding = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if padded:
        padding[1, -6:] = 0
    inputs = {}
    if "input_ids" in names:
        inputs |= {"input_ids": tokens()} | ({"attention_mask": padding} if "attention_mask" in names else {})
    if "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = tokens()
        if "input_ids" in names and "decoder_attention_mask" in names:
            inputs["decoder_attention_mask"] = padding
    return inputs


def _patches(config: PretrainedConfig, draw: Any) -> dict[str, Tensor]:
    """Two images of 16 patches, one after another, as the encoders of vision-language models take them."""
    frames, side = _found(config, "temporal_patch_size", 1), _found(config, "patch_size", PATCH)
    channels = _found(config, "in_channels", 0) or _found(config, "num_channels", 3)
    return {"hidden_states": draw(32, channels * frames * side * side), "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}


def inputs_of(model: torch.nn.Module, padded: bool) -> Iterator[dict[str, Tensor]]:
    """Inputs that the model may take, of which the first that it does take is the one: the shape of images and sounds differs
    from type to type."""
    names, config = inspect.signature(type(model).forward).parameters, model.config
    generator = torch.Generator().manual_seed(2023)
    texts = _texts(names, padded, generator)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    channels, side = _found(config, "num_channels", 3), _found(config, "image_size", IMAGE)
    bands = _found(config, "num_mel_bins", 80)
    images = [draw(BATCH, channels, side, side), draw(BATCH, 2, channels, side, side), draw(BATCH, 2, channels, 224, 224)]
    media: dict[str, list[Tensor]] = {
        "pixel_values": [*images, draw(BATCH, channels, 224, 224)],
        "pixel_values_videos": [draw(BATCH, _found(config, "num_frames", 2), channels, side, side)],
        "input_features": [draw(BATCH, bands, n) for n in (60, 256)] + [draw(BATCH, n, bands) for n in (60, 256)],
        "input_values": [draw(BATCH, 4000), draw(BATCH, 1, 4000), draw(BATCH, 60, bands), draw(BATCH, bands, 60)],
        "bbox": [torch.ones(BATCH, LENGTH, 4, dtype=torch.long), torch.rand(BATCH, LENGTH, 4, generator=generator)],
        "query_embeds": [draw(BATCH, 5, HIDDEN)],
        "past_values": [draw(BATCH, _found(config, "context_length", 32))],
    }
    if "input_features_mask" in names:
        texts["input_features_mask"] = torch.ones(BATCH, 60, dtype=torch.long)
    if "grid_thw" in names:
        yield _patches(config, draw)
    present = [name for name in media if name in names]
    needed = [name for name in present if names[name].default is inspect.Parameter.empty]
    alternatives = [needed, *([name] for name in present), present] if "input_ids" not in names else [needed, present]
    for chosen in alternatives:
        for values in itertools.product(*(media[name] for name in chosen)):
            yield texts | dict(zip(chosen, values, strict=True))


# --- Models ------------------------------------------------------------------------------------------------------------------


def _randomise(model: torch.nn.Module) -> None:
    """Weights that are large enough for scores of several units, so that a key too many is seen."""
    generator = torch.Generator().manual_seed(2017)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_floating_point():
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(weight + 0.1 * noise if weight.dim() < 2 else noise * 1.2 / max(1, weight[0].numel()) ** 0.5)


def _tensors(output: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """The floating tensors of a model's output, but for its cache, with their names."""
    if isinstance(output, Tensor):
        return [(name, output)] if output.is_floating_point() else []
    if isinstance(output, dict):
        return [t for key, value in output.items() if key != "past_key_values" for t in _tensors(value, f"{name}.{key}")]
    if isinstance(output, (tuple, list)):
        return [t for i, value in enumerate(output) for t in _tensors(value, f"{name}.{i}")]
    return []


def _outputs(model: torch.nn.Module, inputs: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    torch.manual_seed(3)  # of models that draw while they evaluate
    with torch.no_grad():
        return _tensors(model(**inputs))


def _last_frame(error: BaseException) -> traceback.FrameSummary:
    return traceback.extract_tb(error.__traceback__)[-1]


def _where(error: BaseException) -> str:
    last = _last_frame(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]} [{last.filename.rpartition('/')[2]}:{last.lineno}]"


def _text(model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor | None:
    """Three tokens after the inputs, padded on the left; None of a model that does not write."""
    if not model.can_generate():
        return None
    inputs = {name: tensor for name, tensor in inputs.items() if not name.startswith("decoder")}
    if "attention_mask" in inputs:
        inputs["attention_mask"] = inputs["attention_mask"].flip(1)
    torch.manual_seed(3)
    return model.generate(**inputs, max_new_tokens=3, do_sample=False, num_beams=1, eos_token_id=None, disable_compile=True)


class Built(NamedTuple):
    model: torch.nn.Module  # with eager attention
    inputs: dict[bool, dict[str, Tensor]]  # without and with padding
    outputs: dict[bool, list[tuple[str, Tensor]]]
    text: Tensor | None


def build(kind: str, name: str) -> Built:
    """Raises Unbuilt."""
    model_class = getattr(transformers, name)
    try:
        config = _config_for(kind, model_class)
        with torch.device("meta"):
            shell = model_class._from_config(copy.deepcopy(config), attn_implementation="eager")
        size = sum(weight.numel() for weight in shell.parameters())
        if size > LARGEST:
            raise Unbuilt(f"{size / 1e6:.0f} million parameters")
        model = model_class._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    except Unbuilt:
        raise
    except Exception as error:
        raise Unbuilt(_where(error)) from error
    _randomise(model)
    inputs, outputs = {}, {}
    for padded in (False, True):
        first: Exception | None = None
        for attempt in inputs_of(model, padded):
            try:
                inputs[padded], outputs[padded] = attempt, _outputs(model, attempt)
                break
            except Exception as error:
                first = first or error
        else:
            raise Unbuilt(f"forward: {_where(first) if first else 'no inputs'}") from first
    if not outputs[False] or not all(t.isfinite().all() for _, t in outputs[False]):
        raise Unbuilt("no finite output with eager attention")
    try:
        text = _text(model, inputs[True])
    except Exception:  # with the host's own attention: it has other wishes
        text = None
    return Built(model, inputs, outputs, text)


def _difference(theirs: Tensor, ours: Tensor, padding: Tensor | None) -> float:
    """The largest difference of what is no padding, in parts of the largest element."""
    if padding is not None and theirs.shape[:2] == padding.shape:
        theirs, ours = theirs[padding.bool()], ours[padding.bool()]
    if theirs.numel() == 0:
        return 0.0
    return ((theirs - ours).abs().max() / theirs.abs().max().clamp_min(1e-6)).item()


def compare(kind: str, name: str, ours: str) -> Verdict:
    """What becomes of a model with our attention, which `ours` names: loaded by that name with the weights of the eager one,
    and again by `set_attn_implementation`."""

    def verdict(word: str, detail: str) -> Verdict:
        return Verdict(word, kind, name, detail)

    try:
        eager, inputs, outputs, text = build(kind, name)
    except Unbuilt as reason:
        return verdict("unbuilt", str(reason))
    registered, calls = AttentionInterface._global_mapping[ours], 0

    def counted(*args: Any, **words: Any) -> Any:
        nonlocal calls
        calls += 1
        return registered(*args, **words)

    AttentionInterface._global_mapping[ours] = counted
    try:
        model = type(eager)._from_config(copy.deepcopy(eager.config), attn_implementation=ours).eval()
        model.load_state_dict(eager.state_dict())
        for mine, other in zip(model.buffers(), eager.buffers(), strict=True):
            mine.copy_(other)
        worst = 0.0
        for way in ("by name", "set"):
            if way == "set":
                model = eager
                model.set_attn_implementation(ours)
            for padded in (False, True):
                padding = inputs[padded].get("attention_mask") if padded else None
                found = _outputs(model, inputs[padded])
                for (what, theirs), (_, mine) in zip(outputs[padded], found, strict=True):
                    if padded and theirs.dim() == 4 and LENGTH in theirs.shape:
                        continue  # attention weights or the like, of tokens of padding too
                    off = _difference(theirs, mine, padding)
                    if not off <= ALLOWED:
                        return verdict("wrong", f"{what} off by {off:.1e} of the largest ({way}, padded: {padded})")
                    worst = max(worst, off)
        if text is not None and not torch.equal(_text(model, inputs[True]), text):
            return verdict("wrong", "another text")
        return verdict("equal", f"{worst:.1e}, {calls} calls{'' if text is None else ', the same text'}")
    except Exception as error:
        refused = 'attn_implementation="eager"' in str(error) and "/flash_online/" in _last_frame(error).filename
        return verdict("refused" if refused else "failed", _where(error))
    finally:
        AttentionInterface._global_mapping[ours] = registered


def verdicts(kinds: list[str], ours: str) -> Iterator[Verdict]:
    for kind in kinds:
        for name in classes_of(kind):
            yield compare(kind, name, ours)


def main(kinds: list[str]) -> None:
    from flash_online.integrations.transformers import register

    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity(50)
    counts: dict[str, set[str]] = collections.defaultdict(set)
    for word, kind, name, detail in verdicts(kinds or model_types(), register()):
        counts[word].add(kind)
        print(f"{word:8} {kind:28} {name:44} {detail}", flush=True)
    print(", ".join(f"{word}: {len(found)} types" for word, found in sorted(counts.items())))


if __name__ == "__main__":
    main(sys.argv[1:])
