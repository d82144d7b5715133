"""transformers models by float8_attention, under the name "online_attention_float8": compared with their 16-bit attention, call
by call with float8_attention itself, and what is refused."""

from __future__ import annotations

import pytest
import torch

import flash_online
from flash_online import spans
from flash_online.spans import to_mask

transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402

from flash_online.integrations import _check_transformers as checks  # noqa: E402
from flash_online.integrations import transformers as integration  # noqa: E402
from flash_online.integrations._transformers_masks import visible_keys  # noqa: E402

NAME = "online_attention_float8"
BY_NAME = {model.name: model for model in checks.MODELS}
# Relative root mean square of the difference from the 16-bit attention of the same model, whose three layers have weights large
# enough for scores of several units. Measured on the CPU: 0.017 (BERT) to 0.125 (gpt-oss).
ALLOWED = 0.15


@pytest.fixture(autouse=True)
def registered():
    transformers.utils.logging.set_verbosity_error()
    assert integration.register(NAME) == NAME and integration.register() == "online_attention"


@pytest.fixture
def calls(monkeypatch):
    """The tensors' shapes and the options of each call of float8_attention."""
    made = []

    def recorded(query, key, value, **options):
        made.append((query.shape, key.shape, options))
        return flash_online.float8_attention(query, key, value, **options)

    monkeypatch.setattr(integration, "float8_attention", recorded)
    return made


def outputs(model, inputs, name):
    """The outputs of a model at tokens that are no padding, in float32."""
    model.set_attn_implementation(name)
    with torch.no_grad():
        results = model(**inputs)
    padding = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    out = results["logits" if "logits" in results else "last_hidden_state"].float()
    return out if padding is None else out[padding.bool()]


def difference(ours, theirs):
    return ((ours - theirs).square().mean() / theirs.square().mean()).sqrt().item()


MODELS = ("Llama", "Qwen3", "GPT-2", "Mistral", "Gemma 2", "Gemma 3", "Gemma 3, images", "DeepSeek-V3", "Llama 4")
MODELS += ("gpt-oss", "BERT", "ModernBERT", "Whisper")
# Every token asks every expert: which ones it chose would hang on rounding.
EXPERTS = dict.fromkeys(("gpt-oss", "Llama 4"), {"num_experts_per_tok": 4})
EXPERTS |= {"DeepSeek-V3": {"num_experts_per_tok": 4, "topk_group": 2}}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "plain"])
def test_models_are_near_their_16_bit_attention(name, padded, calls):
    spec = BY_NAME[name]
    model, inputs = spec.build(**EXPERTS.get(name, {})).to(torch.bfloat16), spec.inputs(padded=padded)
    if "input_features" in inputs:
        inputs["input_features"] = inputs["input_features"].to(torch.bfloat16)
    wide = outputs(model, inputs, "online_attention")
    assert not calls
    narrow = outputs(model, inputs, NAME)
    assert calls and 0 < difference(narrow, wide) <= ALLOWED


def test_float16_and_autocast():
    model, inputs = BY_NAME["Llama"].build(), BY_NAME["Llama"].inputs()
    with pytest.raises(NotImplementedError, match="query: expected dtype float16, bfloat16 .*got torch.float32"):
        outputs(model, inputs, NAME)
    with torch.autocast("cpu", torch.bfloat16):
        assert 0 < difference(outputs(model, inputs, NAME), outputs(model, inputs, "online_attention")) <= ALLOWED
    model = model.to(torch.float16)
    assert 0 < difference(outputs(model, inputs, NAME), outputs(model, inputs, "online_attention")) <= ALLOWED


@pytest.mark.parametrize("cache", [None, "static"])
def test_a_prompt_is_in_float8_and_steps_in_16_bits(calls, cache):
    spec = BY_NAME["Mistral"]
    model, inputs = spec.build().to(torch.bfloat16), spec.inputs()
    model.set_attn_implementation(NAME)
    text = checks.generated(model, inputs, cache)
    assert text.shape == (checks.BATCH, checks.LENGTH + checks.NEW_TOKENS)
    assert [query[2] for query, *_ in calls] == [checks.LENGTH] * 3  # a call for each layer
    assert all(key[2] == checks.LENGTH for _, key, _ in calls)  # the unused room of a static cache is left out


def test_a_prompt_in_parts(calls):
    """Queries stand at the end of the keys."""
    model, inputs = BY_NAME["Mistral"].build().to(torch.bfloat16), BY_NAME["Mistral"].inputs()
    found = []
    for name in ("online_attention", NAME):
        model.set_attn_implementation(name)
        cache, parts = transformers.DynamicCache(config=model.config), []
        for first, last in ((0, 20), (20, 45)):
            tokens, mask = inputs["input_ids"][:, first:last], inputs["attention_mask"][:, :last]
            with torch.no_grad():
                parts.append(model(input_ids=tokens, attention_mask=mask, past_key_values=cache).logits)
        found.append(torch.cat(parts, 1)[inputs["attention_mask"].bool()].float())
    assert len(calls) == 6 and 0 < difference(found[1], found[0]) <= ALLOWED


@pytest.mark.slow
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "plain"])
def test_a_compiled_model(padded):
    spec = BY_NAME["Mistral"]
    model, inputs = spec.build().to(torch.bfloat16), spec.inputs(padded=padded) | {"use_cache": False}
    expected = outputs(model, inputs, NAME)
    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).logits.float()
    out = out[inputs["attention_mask"].bool()] if padded else out
    assert difference(out, expected) <= 1e-2  # spans instead of a causal rule, and the compiler's roundings


# --- Calls -------------------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self, is_causal=True, training=False):
        super().__init__()
        self.is_causal = is_causal
        self.train(training)


def tensors(queries=21, keys=21, heads=4, key_heads=2, width=32, grad=False):
    shapes = ((2, heads, queries, width), (2, key_heads, keys, width), (2, key_heads, keys, width))
    return [torch.randn(shape, dtype=torch.bfloat16, requires_grad=grad) for shape in shapes]


def call(given, mask, module=None, **options):
    return integration.attend_in_float8(module or Layer(), *given, mask, **options)[0]


LENGTHS = torch.tensor([21, 13])
RIGHT = (torch.arange(21) < LENGTHS[:, None]).long()
PADDED = spans.padding(LENGTHS, 21)
FUNCTIONS = masking_utils
WINDOW = FUNCTIONS.and_masks(FUNCTIONS.sliding_window_overlay(5), FUNCTIONS.causal_mask_function)
CASES = {
    "causal": ({}, lambda: visible_keys(2, 21, 21), {"causal": True}),
    "causal, padded": ({}, lambda: visible_keys(2, 21, 21, attention_mask=RIGHT), {"causal": True} | PADDED),
    "window": ({}, lambda: visible_keys(2, 21, 21, mask_function=WINDOW), {"causal": True, "window": (4, None)}),
    "both sides, padded": (
        {},
        lambda: visible_keys(2, 21, 21, mask_function=FUNCTIONS.bidirectional_mask_function, attention_mask=RIGHT),
        PADDED,
    ),
    "other queries, padded": (
        {"queries": 9},
        lambda: visible_keys(2, 9, 21, mask_function=FUNCTIONS.bidirectional_mask_function, attention_mask=RIGHT),
        spans.padding(LENGTHS, 9),
    ),
    "after a cache": (
        {"queries": 9},
        lambda: visible_keys(2, 9, 21, q_offset=12),
        {"causal": True, "alignment": "lower_right"},
    ),
    "a bool mask of keys": ({}, lambda: RIGHT.bool()[:, None, None], PADDED),
    "no mask": ({}, lambda: None, {"causal": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_call_has_the_bits_of_float8_attention(case):
    shape, mask, options = CASES[case]
    given = tensors(**shape)
    out = call(given, mask(), scaling=0.3)
    assert out.is_contiguous()
    assert torch.equal(out.transpose(1, 2), flash_online.float8_attention(*given, scale=0.3, **options))


def test_options_of_a_call():
    given, sinks = tensors(), torch.randn(4)
    out = call(given, visible_keys(2, 21, 21), softcap=5.0, s_aux=sinks, dropout=0.5)  # no dropout outside of training
    expected = flash_online.float8_attention(*given, causal=True, softcap=5.0, sinks=sinks)
    assert torch.equal(out.transpose(1, 2), expected)


def test_documents_are_spans():
    ids = torch.tensor([[0] * 8 + [1] * 13, [0] * 20 + [1]])
    given = tensors()
    together = FUNCTIONS.and_masks(FUNCTIONS.packed_sequence_mask_function(ids), FUNCTIONS.causal_mask_function)
    visible = visible_keys(2, 21, 21, mask_function=together)
    out = call(given, visible)
    documents = spans.documents(ids)
    assert torch.equal(
        to_mask(21, 21, **visible.spans()).expand(2, 1, 21, 21), to_mask(21, 21, **documents).expand(2, 1, 21, 21)
    )
    assert torch.equal(out.transpose(1, 2), flash_online.float8_attention(*given, query_spans=visible.spans()["query_spans"]))


def test_one_query_runs_in_16_bits(calls):
    given = tensors(queries=1)
    out, _ = integration.attend(Layer(), *given, visible_keys(2, 1, 21, q_offset=20))
    assert torch.equal(call(given, visible_keys(2, 1, 21, q_offset=20)), out) and not calls
    with pytest.raises(ValueError, match="query: expected a tensor without a gradient"):
        call(tensors(queries=1, grad=True), visible_keys(2, 1, 21, q_offset=20))


BOUNDS = torch.tensor([0, 42], dtype=torch.int32)
REFUSED = {
    "a gradient": (ValueError, f"query: expected a tensor without a gradient, .*{NAME}", {"grad": True}, {}, None),
    "dropout in training": (NotImplementedError, f"dropout: expected 0 with {NAME}, .*got 0.1", {}, {"dropout": 0.1}, None),
    "a dense mask": (
        NotImplementedError,
        r'attention_mask: expected .*got a dense mask, torch.bool \[2, 1, 21, 21\].*"online_attention"',
        {},
        {},
        lambda: torch.ones(2, 1, 21, 21, dtype=torch.bool),
    ),
    "an added mask": (NotImplementedError, "got a dense mask, torch.float32", {}, {}, lambda: torch.zeros(2, 1, 1, 21)),
    "a mask of integers": (ValueError, "got torch.int64", {}, {}, lambda: torch.ones(2, 1, 1, 21, dtype=torch.int64)),
    "a position bias": (
        NotImplementedError,
        f'position_bias: expected None with {NAME}.*"online_attention"',
        {},
        {"position_bias": torch.zeros(1, 4, 21, 21)},
        None,
    ),
    "cu_seq_lens": (NotImplementedError, "cu_seq_lens_q: expected None", {}, {"cu_seq_lens_q": BOUNDS}, None),
    "attention weights": (NotImplementedError, "output_attentions", {}, {"output_attentions": True}, None),
    "a mask for other keys": (ValueError, "21 queries and 21 keys", {"keys": 9}, {}, None),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name(what):
    error, words, shape, options, mask = REFUSED[what]
    with pytest.raises(error, match=words):
        call(tensors(**shape), visible_keys(2, 21, 21) if mask is None else mask(), Layer(training=True), **options)


def test_training_is_refused():
    model, inputs = BY_NAME["Llama"].build(attention_dropout=0.1).to(torch.bfloat16), BY_NAME["Llama"].inputs()
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match="requires_grad=True"):
        model(**inputs)
    model.train()
    with torch.no_grad(), pytest.raises(NotImplementedError, match="dropout: expected 0"):
        model(**inputs)


def test_registering():
    registered = transformers.AttentionInterface._global_mapping
    assert registered[NAME] is integration.attend_in_float8 and registered["online_attention"] is integration.attend
    integration.register("another_float8")
    assert registered["another_float8"] is integration.attend  # the one name alone is in float8
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        del interface._global_mapping["another_float8"]
    model = BY_NAME["T5"].build().to(torch.bfloat16)
    model.set_attn_implementation(NAME)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="position_bias"):
        model(**BY_NAME["T5"].inputs())
