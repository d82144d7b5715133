"""Every model type of the installed transformers with our attention: equal to the host's eager one, or refused by name."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

import transformers_zoo as zoo  # noqa: E402

from flash_online.integrations import transformers as integration  # noqa: E402

NAME = "online_attention"


@pytest.fixture(autouse=True)
def registered():
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity(50)
    assert integration.register() == NAME
    yield
    transformers.utils.logging.set_verbosity(verbosity)


# Wrong numbers before, an error of the host's or of torch's, or one of ours in the first pass.
OWN = ["longformer", "visual_bert", "bridgetower", "mpt", "falcon", "git", "gptj", "sam_vision_model", "bloom", "led", "vits"]


@pytest.mark.parametrize("kind", OWN)
def test_models_with_attention_of_their_own_are_refused_while_they_are_loaded(kind):
    for name in zoo.classes_of(kind):
        model_class = getattr(transformers, name)
        with pytest.raises(ValueError, match=f'for {name}, got.*"eager"') as error:
            model_class._from_config(zoo._config_for(kind, model_class), attn_implementation=NAME)
        assert repr(NAME) in str(error.value)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "bert", "t5", "mamba", "switch_transformers", "qwen2_5_vl_vision"])
def test_models_that_ask_for_it_are_equal(kind):
    for name in zoo.classes_of(kind):
        verdict = zoo.compare(kind, name, NAME)
        assert verdict.word == "equal", verdict
        assert (" 0 calls" in verdict.detail) == (kind == "mamba"), verdict


def test_a_part_with_attention_of_its_own_is_refused():
    """An image encoder of SAM's inside of another model, whose text part asks for its attention."""
    model_class = transformers.DeepseekVLHybridModel
    with pytest.raises(ValueError, match="for SamVisionModel, got"):
        model_class._from_config(zoo._config_for("deepseek_vl_hybrid", model_class), attn_implementation=NAME)
    parts = {"text_config": NAME, "": "eager", "vision_config": "eager", "high_res_vision_config": "eager"}
    model = model_class._from_config(zoo._config_for("deepseek_vl_hybrid", model_class), attn_implementation=parts)
    assert model.config.text_config._attn_implementation == NAME


def test_a_model_that_keeps_the_hosts_attention():
    """set_attn_implementation warns of such a model and changes nothing, whatever the name is."""
    model, inputs, outputs, _ = zoo.build("longformer", "LongformerModel")
    model.set_attn_implementation(NAME)
    assert model.config._attn_implementation == "eager"
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(zoo._outputs(model, inputs[True]), outputs[True], strict=True))


class Attention(nn.Module):
    """A layer of its own, for the source of this module."""


class Own(transformers.PreTrainedModel):
    config_class = transformers.LlamaConfig


class Declared(Own):
    _supports_attention_backend = True


def test_classes_of_a_user():
    config = transformers.LlamaConfig(num_hidden_layers=1)
    with pytest.raises(ValueError, match="for Own, got.*_supports_attention_backend"):
        Own._from_config(config, attn_implementation=NAME)
    assert Declared._from_config(config, attn_implementation=NAME).config._attn_implementation == NAME
    assert Own._from_config(config, attn_implementation="eager").config._attn_implementation == "eager"


def test_the_host_is_asked_through_one_wrapper(monkeypatch):
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    before = transformers.PreTrainedModel.get_correct_attn_implementation
    assert integration.register("another_name_of_ours") == "another_name_of_ours"
    assert transformers.PreTrainedModel.get_correct_attn_implementation is before
    with pytest.raises(ValueError, match="'another_name_of_ours'"):
        Own._from_config(transformers.LlamaConfig(num_hidden_layers=1), attn_implementation="another_name_of_ours")


@pytest.mark.nightly
def test_every_type_is_equal_to_eager_or_refused():
    """Some 420 types in a minute and a half of one core; what cannot be built tiny is listed by `transformers_zoo.py`."""
    found = collections.defaultdict(list)
    for verdict in zoo.verdicts(zoo.model_types(), NAME):
        found[verdict.word].append(verdict)
    assert not found["wrong"] and not found["failed"], found["wrong"] + found["failed"]
    equal, refused = ({verdict.kind for verdict in found[word]} for word in ("equal", "refused"))
    counts = {word: len({verdict.kind for verdict in verdicts}) for word, verdicts in found.items()}
    print(counts)
    assert len(equal) >= 300 and len(refused) >= 50, counts
    causal = {k for k in zoo.model_types() if k in zoo.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    masked = {k for k in zoo.model_types() if k in zoo.modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
    assert len((causal | masked) & (equal | refused)) >= 190, sorted((causal | masked) - equal - refused)
    ours = [verdict for verdict in found["equal"] if " 0 calls" not in verdict.detail]
    assert len({verdict.kind for verdict in ours}) >= 280
