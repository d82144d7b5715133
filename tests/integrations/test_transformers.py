"""The integration of transformers: its models through our attention compared with the host's eager attention, the mask function
compared with the host's dense masks, what is refused, and the check of the command line."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from torch import nn

from flash_online import _self_check
from flash_online.__main__ import main

transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402

from flash_online.attention import try_fast_sparse  # noqa: E402
from flash_online.integrations import _check_transformers as checks  # noqa: E402
from flash_online.integrations import _transformers_masks  # noqa: E402
from flash_online.integrations import transformers as integration  # noqa: E402
from flash_online.integrations._check_transformers import MODELS, difference, generated, passes  # noqa: E402
from flash_online.integrations._transformers_masks import VisibleKeys, visible_keys  # noqa: E402
from flash_online.spans import to_mask  # noqa: E402

NAME = "online_attention"
BY_NAME = {model.name: model for model in MODELS}
DECODERS = [model for model in MODELS if model.kind == "decoder"]


@pytest.fixture(autouse=True)
def registered():
    transformers.utils.logging.set_verbosity_error()
    assert integration.register() == NAME


def named(models, usual=None):
    """One case per model; those that `usual` does not name are slow."""
    marks = {model.name: () if usual is None or model.name in usual else (pytest.mark.slow,) for model in models}
    return pytest.mark.parametrize("spec", [pytest.param(m, marks=marks[m.name], id=m.name) for m in models])


def beside_eager(model, inputs):
    """(difference of outputs, of gradients) between our attention and the host's."""
    found = []
    for name in ("eager", NAME):
        model.set_attn_implementation(name)
        outputs, gradients = passes(model, inputs)
        found.append((outputs, list(gradients.values())))
    (theirs, their_gradients), (ours, our_gradients) = found
    return difference(ours, theirs), difference(our_gradients, their_gradients)


# --- Models ------------------------------------------------------------------------------------------------------------------


@named(MODELS)
@pytest.mark.parametrize(
    "batch, length, padded",
    [
        (3, 45, True),
        (1, 67, False),
        pytest.param(2, 1, False, marks=pytest.mark.slow),
        pytest.param(1, 24, True, marks=pytest.mark.slow),
    ],
)
def test_models_agree_with_eager(device, spec, batch, length, padded):
    inputs = spec.inputs(padded=padded, length=length, batch=batch, device=device)
    of_output, of_gradient = beside_eager(spec.build().to(device), inputs)
    assert of_output <= checks.ALLOWED and of_gradient <= checks.ALLOWED


@named(MODELS, ("Llama", "Gemma 2", "gpt-oss", "T5"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_models_in_sixteen_bits(device, spec, dtype):
    """Our error from the float32 model is at most one and a half times that of the host's eager attention in the same dtype.
    Every token asks every expert: which ones it chose would hang on rounding."""
    experts = {"num_experts_per_tok": spec.words["num_local_experts"]} if "num_local_experts" in spec.words else {}
    model, inputs = spec.build(**experts).to(device), spec.inputs(device=device)
    if "input_features" in inputs:
        inputs["input_features"] = inputs["input_features"].to(dtype).float()
    model = model.to(dtype).float()  # weights that both dtypes have
    model.set_attn_implementation("eager")
    truth, _ = passes(model, inputs)
    model = model.to(dtype)
    if "input_features" in inputs:
        inputs["input_features"] = inputs["input_features"].to(dtype)
    errors = []
    for name in ("eager", NAME):
        model.set_attn_implementation(name)
        outputs, gradients = passes(model, inputs)
        assert all(g.isfinite().all() for g in gradients.values())
        errors.append(max((a.float() - b).square().mean().sqrt().item() for a, b in zip(outputs, truth, strict=True)))
    assert errors[1] <= 1.5 * errors[0]


@named(DECODERS, ("GPT-2", "Mistral", "Llama 4"))
def test_padding_on_the_right(spec):
    inputs = spec.inputs()
    inputs["attention_mask"] = inputs["attention_mask"].flip(1)
    assert max(beside_eager(spec.build(), inputs)) <= checks.ALLOWED


def test_holes_in_the_padding():
    """Chunks with a hole in them are no run of tokens: spans of keys and of queries hold them."""
    for name in ("Llama", "Mistral", "Llama 4", "BERT"):
        inputs = BY_NAME[name].inputs()
        inputs["attention_mask"][1, 20:27] = 0
        assert max(beside_eager(BY_NAME[name].build(), inputs)) <= checks.ALLOWED


@named([BY_NAME["Llama"], BY_NAME["BERT"]])
@pytest.mark.parametrize("side", ["left", "right", "hole", "a row of padding"])
def test_padding_as_spans(spec, side, monkeypatch):
    """As on Hopper in long sequences: padding in one run becomes spans, with gradients too."""
    monkeypatch.setattr(_transformers_masks, "_prefers_spans", lambda tokens: True)
    monkeypatch.setattr(integration, "SIXTEEN_BITS", (torch.float32,))
    calls = []

    def watched(*arguments):
        calls.append(arguments[3].shape)
        return try_fast_sparse(*arguments)

    monkeypatch.setattr(integration, "try_fast_sparse", watched)
    inputs = spec.inputs()
    mask = inputs["attention_mask"]
    if side == "right":
        inputs["attention_mask"] = mask.flip(1)
    elif side == "hole":
        mask[1, 20:27] = 0
    elif side == "a row of padding":
        mask[1] = 0
    if side == "a row of padding":  # eager attention gives such tokens the mean of all values
        model = spec.build()
        model.set_attn_implementation(NAME)
        outputs, gradients = passes(model, inputs)
        assert all(t.isfinite().all() for t in (*outputs, *gradients.values()))
    else:
        assert max(beside_eager(spec.build(), inputs)) <= checks.ALLOWED
    assert bool(calls) == (side != "hole") and all(shape == (*mask.shape[:1], 1, mask.shape[1], 2) for shape in calls)


def test_a_row_of_nothing_but_padding():
    """Its tokens see nothing and get 0 from attention; the other rows do not change, and every gradient is finite."""
    model, inputs = BY_NAME["Llama"].build(), BY_NAME["Llama"].inputs()
    model.set_attn_implementation(NAME)
    alone = model(input_ids=inputs["input_ids"][:1], attention_mask=inputs["attention_mask"][:1]).logits
    inputs["attention_mask"][1] = 0
    outputs, gradients = passes(model, inputs)
    torch.testing.assert_close(outputs[0][: alone.shape[1]], alone[0], rtol=1e-5, atol=1e-6)
    assert all(g.isfinite().all() for g in gradients.values())
    out, _ = integration.attend(
        model.model.layers[0].self_attn, *torch.randn(3, 1, 2, 5, 8), visible_keys(1, 5, 5, attention_mask=torch.zeros(1, 5))
    )
    assert not out.any()


@named(DECODERS + [BY_NAME["Whisper"], BY_NAME["T5"]], ("Llama", "Gemma 3", "Llama 4", "T5"))
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_is_equal(device, spec, cache):
    model, inputs = spec.build().to(device), spec.inputs(device=device)
    expected = checks.generated_eagerly(model, inputs, cache)
    if expected is None:
        pytest.skip(f"transformers {transformers.__version__} fails with its own eager attention")
    model.set_attn_implementation(NAME)
    assert torch.equal(generated(model, inputs, cache), expected)


@named([BY_NAME[name] for name in ("Llama", "Mistral", "Gemma 3", "gpt-oss", "Llama 4")])
def test_a_prompt_in_parts(spec):
    """Several tokens after a cache, as in chunked prefill and in speculative decoding, padding on the left."""
    model, inputs, outputs = spec.build(), spec.inputs(), []
    for name in ("eager", NAME):
        model.set_attn_implementation(name)
        cache, parts = transformers.DynamicCache(config=model.config), []
        for first, last in ((0, 20), (20, 21), (21, 45)):
            tokens, mask = inputs["input_ids"][:, first:last], inputs["attention_mask"][:, :last]
            with torch.no_grad():
                parts.append(model(input_ids=tokens, attention_mask=mask, past_key_values=cache).logits)
        outputs.append(torch.cat(parts, 1)[inputs["attention_mask"].bool()])
    assert difference(outputs[1:], outputs[:1]) <= checks.ALLOWED


@named(MODELS)
def test_no_mask_of_queries_times_keys_is_made(spec):
    """Forward and backward, by all operators: no tensor has as many elements as there are queries times keys in a row of the
    batch. The position bias of T5 has, and no row of the batch gets one of its own."""
    length = 300
    longest = {"GPT-2": "n_positions", "Whisper": "max_target_positions", "T5": "n_positions"}
    model = spec.build(**{longest.get(spec.name, "max_position_embeddings"): length})
    inputs = spec.inputs(length=length, batch=2 if spec.name == "T5" else 1)
    for name in inputs:
        if name.endswith("mask"):
            inputs[name][0, 0 if spec.kind == "decoder" else -1] = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            results = function(*args, **(kwargs or {}))
            for tensor in results if isinstance(results, (tuple, list)) else (results,):
                if isinstance(tensor, torch.Tensor) and tensor.shape[-2:] == (length, length):
                    Largest.most = max(Largest.most, tensor.untyped_storage().nbytes() // tensor.element_size())
            return results

    for name in ("eager", NAME):
        model.set_attn_implementation(name)
        Largest.most = 0
        with Largest():
            passes(model, inputs)
        allowed = 6 * length * length if spec.name == "T5" else length * length - 1
        assert (Largest.most > allowed) == (name == "eager"), Largest.most


@named([BY_NAME[name] for name in ("Llama", "Mistral", "Llama 4")])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(spec, reentrant):
    model, inputs = spec.build(), spec.inputs()
    model.set_attn_implementation(NAME)
    expected = passes(model, inputs)[1]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.train()
    model.enable_input_require_grads()
    found = passes(model, inputs)[1]
    assert difference(list(found.values()), list(expected.values())) <= 1e-6


def test_dropout():
    model, inputs = BY_NAME["Llama"].build(attention_dropout=0.5), BY_NAME["Llama"].inputs()
    model.set_attn_implementation(NAME)
    evaluated = passes(model, inputs)[0][0]
    model.train()
    torch.manual_seed(1)
    first, gradients = passes(model, inputs)
    torch.manual_seed(1)
    again, same_gradients = passes(model, inputs)
    other, _ = passes(model, inputs)
    assert torch.equal(first[0], again[0]) and all(torch.equal(gradients[n], same_gradients[n]) for n in gradients)
    assert not torch.equal(first[0], other[0]) and not torch.equal(first[0], evaluated)
    # What is kept is scaled by 1 / (1 - p): a constant value comes out as itself on the average.
    module = model.model.layers[0].self_attn
    query, key, value = torch.randn(1, 2, 64, 8), torch.randn(1, 2, 64, 8), torch.ones(1, 2, 64, 8)
    out, _ = integration.attend(module, query, key, value, visible_keys(1, 64, 64), dropout=0.5)
    assert out.std() > 0.05 and abs(out.mean() - 1) < 0.1
    module.eval()
    torch.testing.assert_close(
        integration.attend(module, query, key, value, visible_keys(1, 64, 64), dropout=0.5)[0], torch.ones(1, 64, 2, 8)
    )


@pytest.mark.nightly
@named(MODELS)
def test_compiled_models(spec):
    """One graph without a break, with and without padding; results as without torch.compile."""
    model = spec.build()
    if spec.name in ("gpt-oss", "DeepSeek-V3"):  # torch.compile fails in the host's grouped products, with eager attention too
        model.set_experts_implementation("batched_mm")
    model.set_attn_implementation(NAME)
    for padded in (True, False):
        torch._dynamo.reset()
        inputs = spec.inputs(padded=padded)
        expected = passes(model, inputs)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

        if spec.kind != "encoder":
            inputs["use_cache"] = False
        found = passes(compiled, inputs)
        assert difference(found[0], expected[0]) <= 1e-6
        gradients = [found[1][f"_orig_mod.{name}"] for name in expected[1]]
        assert difference(gradients, list(expected[1].values())) <= 1e-5


@named([BY_NAME[name] for name in ("Mistral", "Llama", "Gemma 2", "BERT", "ModernBERT")], ("Mistral",))
def test_a_compiled_model_makes_no_mask_of_queries_times_keys(spec):
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(
            [node.meta["example_value"].shape for node in graph.graph.nodes if hasattr(node.meta.get("example_value"), "shape")]
        )
        return graph

    torch._dynamo.reset()
    model, inputs = spec.build(num_hidden_layers=1), spec.inputs()
    model.set_attn_implementation(NAME)
    torch.compile(model, fullgraph=True, backend=backend)(**inputs)
    assert len(graphs) == 1 and len(graphs[0]) > 20
    assert not [shape for shape in graphs[0] if tuple(shape[-2:]) == (45, 45)]


@pytest.mark.slow
@named([BY_NAME[name] for name in ("Mistral", "Llama 4")])
def test_compiled_decoding_with_a_static_cache(spec):
    """generate() makes the masks before the compiled pass, those of chunks too."""
    model, inputs = spec.build(), spec.inputs()
    model.set_attn_implementation("eager")
    expected = generated(model, inputs, "static")
    model.set_attn_implementation(NAME)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(generated(model, inputs, "static"), expected)


def test_lengths_of_chunks_are_read_with_the_mask():
    """Not in the first layer, which a compiled pass could not."""
    function = masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64))
    visible = visible_keys(2, 9, 9, mask_function=function, local_size=4)
    bounds, longest = visible.packed
    assert bounds.tolist() == [0, 4, 8, 9, 13, 17, 18] and longest == 4 and visible.cu_seqlens()[0] is bounds
    moved = visible.to("meta")
    assert moved.packed[0].device.type == "meta" and moved.packed[1] == 4


@pytest.mark.slow
def test_a_trainer_has_the_losses_of_eager(tmp_path):
    pytest.importorskip("accelerate")
    spec, losses = BY_NAME["Mistral"], []
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in range(9, 41)]
    rows = [{"input_ids": t + [0] * (40 - len(t)), "attention_mask": [1] * len(t) + [0] * (40 - len(t))} for t in texts]
    rows = [
        row | {"labels": [t if m else -100 for t, m in zip(row["input_ids"], row["attention_mask"], strict=True)]}
        for row in rows
    ]
    for name in ("eager", NAME):
        model = spec.build()
        model.set_attn_implementation(name)
        words = {
            "max_steps": 20,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "report_to": "none",
        }
        words |= {"output_dir": str(tmp_path), "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "seed": 5}
        trainer = transformers.Trainer(model, transformers.TrainingArguments(**words), train_dataset=rows)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 20 and losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)  # the log has four digits


# --- Documents ---------------------------------------------------------------------------------------------------------------

DOCUMENTS = (20, 1, 19, 5)


def packed(spec, batch=1):
    """(inputs of documents one after another, the tokens of each document)"""
    tokens = spec.inputs(padded=False, length=sum(DOCUMENTS), batch=batch)["input_ids"]
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS])[None].expand(batch, -1)
    return {"input_ids": tokens, "position_ids": positions, "use_cache": False}, tokens.split(DOCUMENTS, 1)


def lengths_of(batch=1):
    bounds = torch.tensor([0, *itertools.accumulate(DOCUMENTS * batch)], dtype=torch.int32)
    longest = max(DOCUMENTS)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


@named([BY_NAME[name] for name in ("Llama", "Mistral", "Gemma 2", "gpt-oss", "DeepSeek-V3", "Llama 4")])
@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens", "cu_seq_lens and a cache"])
@pytest.mark.parametrize("batch", [1, 2])
def test_documents_are_as_if_alone(spec, by, batch, monkeypatch):
    if spec.name == "Llama 4" and by == "cu_seq_lens and a cache":
        pytest.skip("with a cache the host's masks begin chunks at the row, not at the document")
    if spec.name == "gpt-oss" and by == "position_ids":
        pytest.skip("the host hands no position_ids to this model's mask function")
    model = spec.build()
    inputs, documents = packed(spec, batch)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = torch.cat([model(input_ids=tokens).logits for tokens in documents], 1)
    model.set_attn_implementation(NAME)
    monkeypatch.setattr(integration, "attention", None)  # all of it goes through varlen_attention
    if by != "position_ids":
        inputs |= lengths_of(batch)
    if by.endswith("cache"):
        inputs["use_cache"] = True
    found, gradients = passes(model, inputs)
    chunks_by_row = spec.name == "Llama 4" and not hasattr(masking_utils, "remap_positions_for_packed_sequence")
    if chunks_by_row:  # transformers before 5.21 counts chunks from the row's first token
        model.set_attn_implementation("eager")
        expected = passes(model, inputs)[0][0]
    assert difference(found, [expected]) <= checks.ALLOWED
    assert all(g.isfinite().all() for g in gradients.values())


def test_documents_have_the_gradients_of_eager():
    for name in ("Gemma 2", "gpt-oss"):
        assert max(beside_eager(BY_NAME[name].build(), packed(BY_NAME[name], 2)[0])) <= checks.ALLOWED


@pytest.mark.slow
@named([BY_NAME[name] for name in ("Mistral", "Gemma 2", "Llama 4")])
def test_compiled_documents(spec, monkeypatch):
    """Tracing sees no values: documents by position_ids alone are spans then, which are in the graph. No mask is dense."""
    model, (inputs, _) = spec.build(), packed(spec)
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        expected = model(**inputs).logits
        monkeypatch.setattr(masking_utils, "sdpa_mask", None)
        for more in ({}, lengths_of()):
            torch._dynamo.reset()
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(**inputs, **more).logits, expected, rtol=1e-5, atol=1e-5)


# --- The mask function -------------------------------------------------------------------------------------------------------


def seen_by(visible, batch, queries, keys):
    """bool [B, L, S]: which keys have a weight, by the attention function with scores of 0 and the values an identity."""
    module = nn.Module().eval()
    query, key = torch.zeros(batch, 1, queries, 8), torch.zeros(batch, 1, keys, 8)
    value = torch.eye(keys).expand(batch, 1, keys, keys)
    return integration.attend(module, query, key, value, visible)[0][:, :, 0] > 0


def host_rules():
    size = masking_utils
    left = torch.tensor([0, 3])
    yield "causal", size.causal_mask_function, {}
    yield "bidirectional", size.bidirectional_mask_function, {"bidirectional": True}
    for window in (1, 2, 5, 40):
        yield f"window {window}", size.sliding_window_causal_mask_function(window), {"local_size": window}
        function = size.sliding_window_bidirectional_mask_function(window)
        yield f"window {window} both sides", function, {"local_size": window, "bidirectional": True}
    for chunk in (1, 4, 40):
        yield f"chunk {chunk}", size.chunked_causal_mask_function(chunk, torch.zeros(2, dtype=int)), {"local_size": chunk}
        yield f"chunk {chunk} after padding", size.chunked_causal_mask_function(chunk, left), {"local_size": chunk, "left": 3}


PASSES = [
    (0, 0, 9, 9),
    (0, 0, 9, 16),
    (7, 0, 9, 16),
    (7, 0, 1, 16),
    (7, 3, 9, 13),
    (15, 0, 1, 16),
    (4, 0, 5, 16),
    (0, 0, 1, 1),
    (2, 0, 7, 5),
    (3, 5, 4, 9),
]


@pytest.mark.parametrize("q_offset, kv_offset, queries, keys", PASSES)
@pytest.mark.parametrize("padding", ["none", "ones", "left", "right", "hole", "short"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_mask_function_shows_what_the_host_shows(q_offset, kv_offset, queries, keys, padding, as_tensor):
    total, few = kv_offset + keys, 0
    mask = torch.ones(2, total, dtype=torch.bool)
    if padding in ("left", "hole"):
        mask[1, :3] = False
    if padding in ("right", "hole"):
        mask[1, total // 2 : -1 if padding == "hole" else None] = False
    if padding == "short":
        mask = mask[:, : max(1, total - 2)]
    for name, function, words in host_rules():
        words = dict(words)
        bidirectional, left = words.pop("bidirectional", False), words.pop("left", 0)
        if left and padding != "left":
            continue
        skips = {"allow_is_causal_skip": not bidirectional, "allow_is_bidirectional_skip": bidirectional}
        where = {"q_offset": torch.tensor(q_offset) if as_tensor else q_offset, "kv_offset": kv_offset}
        where |= {"mask_function": function, "attention_mask": None if padding == "none" else mask}
        expected = masking_utils.sdpa_mask(2, queries, keys, **where, allow_is_causal_skip=False)
        visible = visible_keys(2, queries, keys, **where, **words, **skips)
        expected = expected.expand(2, 1, queries, keys)[:, 0]
        found = seen_by(visible, 2, queries, keys)
        # A token of padding may see others of its own chunk; nothing reads its row.
        real = torch.ones(2, queries, dtype=torch.bool)
        if isinstance(visible, VisibleKeys) and visible.chunked and padding != "none":
            real = torch.nn.functional.pad(mask, (0, total))[:, q_offset : q_offset + queries]
        assert torch.equal(found[real], expected[real]), name
        few += isinstance(visible, VisibleKeys)
    assert few >= 6 or (q_offset, queries, keys) in ((2, 7, 5), (3, 4, 9))


def image_masks():
    """What models make of blocks of images: (name, mask function by the blocks' ids)."""
    size = masking_utils
    yield "causal", lambda ids: size.or_masks(size.causal_mask_function, size.blockwise_overlay(ids))
    window = size.sliding_window_causal_mask_function(5)
    yield "window, or blocks", lambda ids: size.or_masks(window, size.blockwise_overlay(ids))
    yield (
        "window of causal or blocks",  # Gemma 3 and 4
        lambda ids: size.and_masks(
            size.or_masks(size.causal_mask_function, size.blockwise_overlay(ids)), size.sliding_window_overlay(5)
        ),
    )


@pytest.mark.parametrize("form, make", list(image_masks()), ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("padding", ["none", "left", "right", "hole"])
@pytest.mark.parametrize("q_offset, kv_offset, queries, keys", [(0, 0, 16, 16), (0, 0, 16, 20), (6, 0, 10, 16), (6, 3, 10, 13)])
def test_blocks_of_images_are_spans(form, make, padding, q_offset, kv_offset, queries, keys):
    total = kv_offset + keys
    ids = torch.full((3, total), -1)
    ids[0, 2:6], ids[0, 6:7], ids[0, 9:15], ids[1, 5:9], ids[1, 9:11] = 0, 1, 2, 4, 3
    mask = torch.ones(3, total, dtype=torch.bool)
    if padding in ("left", "hole"):
        mask[0, :4], mask[2] = False, False
    if padding in ("right", "hole"):
        mask[1, 10:13] = False
        mask[1, 13:] &= padding == "hole"
    where = {"q_offset": q_offset, "kv_offset": kv_offset, "mask_function": make(ids)}
    where["attention_mask"] = None if padding == "none" else mask
    expected = masking_utils.sdpa_mask(3, queries, keys, **where, allow_is_causal_skip=False).expand(3, 1, queries, keys)
    for vmap in (False, True):
        visible = visible_keys(3, queries, keys, **where, use_vmap=vmap, allow_is_causal_skip=False)
        assert isinstance(visible, VisibleKeys) and visible.numel() <= 2 * 3 * queries + 3 * keys
        assert torch.equal(seen_by(visible, 3, queries, keys), expected[:, 0])


def test_a_model_with_images_has_the_gradients_of_eager():
    """Gemma 3 over masks for images, padded on the left, with the windows of half of the layers."""
    from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model

    spec = BY_NAME["Gemma 3"]
    model, inputs = spec.build(), spec.inputs()
    ids = torch.full_like(inputs["input_ids"], -1)
    ids[0, 3:20], ids[0, 20:31], ids[1, 10:40], ids[2, 21:25] = 0, 1, 0, 5
    found = []
    for name in ("eager", NAME):
        model.set_attn_implementation(name)
        embeds = model.get_input_embeddings()(inputs["input_ids"])
        masks = create_masks_for_vision_model(model.config, embeds, inputs["attention_mask"], None, None, ids)
        assert all(isinstance(mask, VisibleKeys) == (name == NAME) for mask in masks.values())
        model.zero_grad()
        out = model.model(input_ids=inputs["input_ids"], attention_mask=masks, use_cache=False).last_hidden_state
        out = out[inputs["attention_mask"].bool()]
        (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(5))).mean().backward()
        found.append([out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert difference(found[1][:1], found[0][:1]) <= checks.ALLOWED and difference(found[1][1:], found[0][1:]) <= checks.ALLOWED


def images_in_two_parts(config, tokens, **words):
    blocks = torch.full((2, 12), -1)
    blocks[0, 2:6], blocks[0, 8:10], blocks[1, 5:9] = 0, 0, 1
    return masking_utils.create_causal_mask(config, tokens, None, None, block_sequence_ids=blocks, **words)


def test_what_has_no_rule_is_dense_and_the_hosts():
    config = transformers.LlamaConfig(num_hidden_layers=1, sliding_window=5, attention_chunk_size=5)
    tokens = torch.zeros(2, 12, 4)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]]).expand(2, -1)

    def odd(batch, head, query, key):
        return (key % 2 == 0) | (key == query)

    makers = {
        "images in two parts": images_in_two_parts,
        "a function of the caller's": lambda *a: masking_utils.create_causal_mask(*a, None, None, and_mask_function=odd),
        "either": lambda *a: masking_utils.create_sliding_window_causal_mask(*a, None, None, or_mask_function=odd),
        "asked for": lambda *a: masking_utils.create_causal_mask(*a, None, None, allow_is_causal_skip=False),
    }
    for what, make in makers.items():
        masks = []
        for name in ("sdpa", NAME):
            config._attn_implementation = name
            masks.append(make(config, tokens))
        assert masks[1].shape == (2, 1, 12, 12) and torch.equal(*masks), what
        assert torch.equal(seen_by(masks[1], 2, 12, 12), masks[0][:, 0]), what
    for make in (masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask):
        config._attn_implementation = "sdpa"
        expected = make(config, tokens, None, None, position_ids=positions)
        config._attn_implementation = NAME
        visible = make(config, tokens, None, None, position_ids=positions)
        assert visible.numel() == 24 and torch.equal(seen_by(visible, 2, 12, 12), expected[:, 0])
        spans = visible.spans()  # which a position bias takes, in place of packed rows
        assert visible.spans() is spans, "spans are made once for all layers"
        assert torch.equal(to_mask(12, 12, **spans), expected)
    custom = torch.rand(2, 1, 12, 12) > 0.5
    assert masking_utils.create_causal_mask(config, tokens, custom, None) is custom


def test_models_that_compute_with_their_masks_are_told():
    visible = visible_keys(2, 5, 5, attention_mask=torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]))
    uses = {
        "and": lambda: visible & torch.ones(2, 1, 5, 5, dtype=torch.bool),
        "and from the left": lambda: torch.ones(2, 1, 5, 5, dtype=torch.bool) & visible,
        "compared": lambda: visible == 0,
        "cut": lambda: visible[:, :, :, :3],
        "added": lambda: torch.zeros(2, 1, 5, 5) + visible,
        "where": lambda: torch.where(visible, 0.0, 1.0),
    }
    for use in uses.values():
        with pytest.raises(TypeError, match="computes with its masks.*eager"):
            use()
    with pytest.raises(AttributeError, match="eager"):
        visible.dtype  # noqa: B018
    with pytest.raises(TypeError, match="eager"):
        visible[..., :3]
    assert visible.shape == (2, 1, 1, 5) and visible.ndim == visible.dim() == 4 and visible.contiguous() is visible
    assert visible.to("cpu") is visible and visible.numel() == 10
    assert visible.to(torch.float16) is visible  # float16 would round bounds over 2,048
    moved = visible.to("meta", torch.float16)
    assert moved.padding.device.type == "meta" and moved.padding.dtype is torch.bool
    assert moved.causal and visible.padding.device.type == "cpu"
    spans = blocks().to("meta", torch.float16).query_spans
    assert spans.device.type == "meta" and spans.dtype is torch.int32


def test_a_model_that_combines_its_mask_is_refused():
    spec = BY_NAME["Llama"]
    model = spec.build()
    model.set_attn_implementation(NAME)
    inner = model.model.layers[0].forward
    model.model.layers[0].forward = lambda *a, attention_mask, **w: inner(*a, attention_mask=attention_mask[..., :7], **w)
    with pytest.raises(TypeError, match="computes with its masks"):
        model(**spec.inputs())


# --- The attention function --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads, batch_of_bias, scaling", [(4, 1, 1.0), (2, 3, None), (1, 1, 0.02)])
def test_position_bias_with_padding(device, dtype, heads, batch_of_bias, scaling):
    """The bias keeps its shape, its gradient too, and hidden keys get nothing."""
    batch, queries, keys, width = 3, 13, 21, 8
    module = nn.Module().eval()
    tensors = [torch.randn(batch, h, n, width) for h, n in ((4, queries), (heads, keys), (heads, keys))]
    bias = 3 * torch.randn(batch_of_bias, 4, queries, keys)
    hidden = torch.arange(keys) < torch.tensor([21, 5, 14])[:, None]
    visible = visible_keys(
        batch, queries, keys, mask_function=masking_utils.bidirectional_mask_function, attention_mask=hidden.to(device)
    )
    results = []
    for kind, ours in ((torch.float64, False), (dtype, False), (dtype, True)):
        query, key, value, own_bias = (t.to(device, dtype).to(kind).detach().requires_grad_() for t in (*tensors, bias))
        if ours:
            out, _ = integration.attend(module, query, key, value, visible, scaling=scaling, position_bias=own_bias)
        else:
            scores = query @ key.repeat_interleave(4 // heads, 1).mT * (width**-0.5 if scaling is None else scaling) + own_bias
            scores = scores.masked_fill(~hidden[:, None, None].to(device), float("-inf"))
            out = (scores.softmax(-1) @ value.repeat_interleave(4 // heads, 1)).transpose(1, 2)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device)
        (out.to(kind) * weights.to(kind)).sum().backward()
        assert own_bias.grad.shape == bias.shape
        results.append([out.detach().double(), *(t.grad.double() for t in (query, key, value, own_bias))])
    truth, plain, found = results
    eps = torch.finfo(dtype).eps
    for t, p, f in zip(truth, plain, found, strict=True):
        assert (f - t).abs().max() <= 2 * (p - t).abs().max() + 4 * eps * t.abs().max()
    assert not found[2][1, :, 5:].any() and not found[3][1, :, 5:].any()  # no gradient reaches hidden keys


@pytest.mark.parametrize("causal", [False, True])
def test_position_bias_where_a_query_sees_no_key(causal):
    """It gets 0, as without a bias, and no gradient reaches the keys that padding hides."""
    query, key, value = (torch.randn(3, 2, 5, 8, requires_grad=True) for _ in range(3))
    seen = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]])
    rule = masking_utils.causal_mask_function if causal else masking_utils.bidirectional_mask_function
    visible = visible_keys(3, 5, 5, mask_function=rule, attention_mask=seen.bool())
    bias, module = torch.randn(1, 2, 5, 5, requires_grad=True), nn.Module().eval()
    out, _ = integration.attend(module, query, key, value, visible, position_bias=bias)
    assert out.is_contiguous() and not out[2].any() and (not out[1, :2].any() or not causal)
    out.sum().backward()
    assert not value.grad[1, :, :2].any() and not value.grad[2].any() and not query.grad[2].any()
    for zero in (torch.zeros_like(bias), torch.zeros(3, 2, 5, 5)):
        found, _ = integration.attend(module, query, key, value, visible, position_bias=zero)
        torch.testing.assert_close(found, integration.attend(module, query, key, value, visible)[0])


def test_position_bias_with_other_masks():
    """Causal rule, softcap, documents and dense masks with a bias."""
    module, (query, key, value) = nn.Module().eval(), torch.randn(3, 2, 2, 12, 8)
    bias, padding = torch.randn(1, 2, 12, 12), torch.ones(2, 12, dtype=torch.bool)
    padding[1, :4] = False
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]]).expand(2, -1)
    config = transformers.LlamaConfig(num_hidden_layers=1, attn_implementation=NAME)
    documents = masking_utils.create_causal_mask(config, query[:, 0], None, None, position_ids=positions)
    assert documents.starts is not None
    causal = torch.ones(12, 12, dtype=torch.bool).tril()
    cases = [
        (visible_keys(2, 12, 12, attention_mask=padding), causal & padding[:, None, None], {}),
        (visible_keys(2, 12, 12, attention_mask=padding), causal & padding[:, None, None], {"softcap": 1.5}),
        (visible_keys(2, 12, 12), causal, {"softcap": 1.5}),
        (documents, to_mask(12, 12, **documents.spans()), {}),
        (padding[:, None, None], padding[:, None, None], {}),
        (torch.where(causal, 0.0, torch.finfo().min)[None, None], causal, {}),
    ]
    for visible, seen, options in cases:
        out, _ = integration.attend(module, query, key, value, visible, position_bias=bias, **options)
        scores = query @ key.mT / 8**0.5
        scores = options["softcap"] * (scores / options["softcap"]).tanh() if options else scores
        weights = (scores + bias).masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num()
        rows = padding[:, None, :, None] if visible is not documents else torch.ones(())
        torch.testing.assert_close(out.transpose(1, 2) * rows, (weights @ value) * rows, rtol=1e-5, atol=1e-6)


class Layer(nn.Module):
    """What the attention function reads of a layer of the host."""

    def __init__(self, name=NAME, **attributes):
        super().__init__()
        self.config = transformers.PretrainedConfig()
        self.config._attn_implementation_internal = name
        for attribute, value in attributes.items():
            setattr(self, attribute, value)


def call(mask=None, module=None, shape=(2, 2, 6, 8), keys=None, **options):
    query = torch.randn(shape)
    key, value = torch.randn(2, 2, 2, 6 if keys is None else keys, 8)
    return integration.attend(module or Layer(), query, key, value, mask, **options)


def blocks():
    ids = torch.tensor([[0, 0, -1, -1, -1, 1]] * 2)
    size = masking_utils
    return visible_keys(2, 6, 6, mask_function=size.or_masks(size.causal_mask_function, size.blockwise_overlay(ids)))


def test_without_a_mask_the_layer_says_whether_it_is_causal():
    query, key, value = torch.randn(3, 2, 2, 6, 8)
    for attributes, options, causal in (({}, {}, True), ({"is_causal": False}, {}, False), ({}, {"is_causal": False}, False)):
        out, weights = integration.attend(Layer(**attributes), query, key, value, None, **options)
        expected = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        torch.testing.assert_close(out, expected.transpose(1, 2))
        assert weights is None and out.is_contiguous()
    out, _ = integration.attend(Layer(), query[:, :, :1], key, value, None)  # a step of decoding sees every key
    torch.testing.assert_close(out, nn.functional.scaled_dot_product_attention(query[:, :, :1], key, value).transpose(1, 2))


BOUNDS = torch.tensor([0, 6, 12], dtype=torch.int32)
FOUR = {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS, "max_length_q": 6, "max_length_k": 6}
REFUSED = {
    "a mask of two dimensions": (ValueError, "register", lambda: call(torch.ones(2, 6, dtype=torch.bool))),
    "a mask of integers": (ValueError, "got torch.int64", lambda: call(torch.ones(2, 1, 6, 6, dtype=torch.int64))),
    "a mask that is no tensor": (ValueError, "got list", lambda: call([1, 2])),
    "no mask function": (ValueError, "makes no masks", lambda: call(None, Layer("of_another_library"))),
    "no place for the queries": (ValueError, "alignment is unknown", lambda: call(keys=9)),
    "a window without a mask": (ValueError, "sliding_window=3", lambda: call(sliding_window=3)),
    "a mask for other keys": (ValueError, "6 queries and 6 keys", lambda: call(visible_keys(2, 6, 6), keys=9)),
    "attention weights": (NotImplementedError, "output_attentions", lambda: call(output_attentions=True)),
    "a paged cache": (NotImplementedError, r"\"paged\|eager\"", lambda: call(cache=object())),
    "keys by indices": (NotImplementedError, "indices", lambda: call(indices=torch.zeros(2, 6, 3, dtype=torch.int64))),
    "sinks per query": (NotImplementedError, "sinks", lambda: call(sinks=torch.zeros(2, 2, 6, 1))),
    "sinks that are not passed": (NotImplementedError, "s_aux", lambda: call(module=Layer(sinks=torch.zeros(2)))),
    "five dimensions": (ValueError, "query", lambda: call(shape=(2, 2, 2, 6, 8))),
    "half of cu_seq_lens": (ValueError, "max_length_q", lambda: call(cu_seq_lens_q=BOUNDS, cu_seq_lens_k=BOUNDS)),
    "padding and cu_seq_lens": (
        ValueError,
        "got padding",
        lambda: call(visible_keys(2, 6, 6, attention_mask=torch.tensor([[1] * 6, [0] + [1] * 5])), **FOUR),
    ),
    "a dense mask and cu_seq_lens": (
        ValueError,
        "got a dense mask",
        lambda: call(torch.ones(2, 1, 6, 6, dtype=torch.bool), **FOUR),
    ),
    "blocks and cu_seq_lens": (
        ValueError,
        "got blocks",
        lambda: call(blocks(), **FOUR),
    ),
    "blocks for other queries": (
        ValueError,
        "6 queries and 6 keys",
        lambda: call(blocks(), shape=(2, 2, 5, 8)),
    ),
    "a bias and cu_seq_lens": (
        NotImplementedError,
        "position_bias",
        lambda: call(visible_keys(2, 6, 6), position_bias=torch.zeros(1, 2, 6, 6), **FOUR),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name(what):
    error, words, refused = REFUSED[what]
    with pytest.raises(error, match=words):
        refused()


def test_output_attentions_of_a_model():
    """The host refuses it in a config, and we in a call."""
    model = BY_NAME["Llama"].build()
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match="output_attentions"):
        model.config.output_attentions = True
    with pytest.raises(NotImplementedError, match="eager"):
        model(**BY_NAME["Llama"].inputs(), output_attentions=True)


# --- Registering -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flash_online", "my_Flash", "sdpa", "eager", "flex_attention", "paged|x", "a/b", "", "2b"])
def test_names_that_the_host_reads_otherwise(name):
    with pytest.raises(ValueError, match="name: expected .*, got"):
        integration.register(name)
    with pytest.raises(TypeError, match="expected a str"):
        integration.register(None)


def test_registering_again_and_over_another(monkeypatch):
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    before = dict(transformers.AttentionInterface._global_mapping), dict(transformers.AttentionMaskInterface._global_mapping)
    assert integration.register() == integration.register(NAME) == NAME
    assert before == (transformers.AttentionInterface._global_mapping, transformers.AttentionMaskInterface._global_mapping)
    assert integration.register("another_name") == "another_name"
    assert transformers.AttentionMaskInterface._global_mapping["another_name"] is visible_keys
    transformers.AttentionMaskInterface.register("taken", masking_utils.sdpa_mask)
    with pytest.raises(ValueError, match="sdpa_mask"):
        integration.register("taken")
    assert "taken" not in transformers.AttentionInterface._global_mapping


def test_nothing_is_imported_or_registered_before():
    program = """
import sys, flash_online, flash_online.integrations.transformers
assert not [name for name in sys.modules if name.partition(".")[0] == "transformers"]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="5.20 or newer"):
        integration.register()


# --- The command -------------------------------------------------------------------------------------------------------------


def dropped(option):
    """Our attention without one of its options."""
    true = integration.attention
    return lambda *tensors, **options: true(*tensors, **{n: v for n, v in options.items() if n != option})


# Each fault and a model that has what it breaks.
FAULTS = [
    ("mask", "Llama"),
    ("causal", "Qwen3"),
    ("window", "Mistral"),
    ("softcap", "Gemma 2"),
    ("sinks", "gpt-oss"),
    ("scale", "T5"),
    (None, "Mistral"),
]


@pytest.mark.parametrize("option, name", FAULTS)
def test_the_check_sees_what_is_missing(capsys, monkeypatch, option, name):
    monkeypatch.setattr(checks, "MODELS", (BY_NAME[name],))
    monkeypatch.setattr(_self_check, "devices", lambda: ("cpu",))
    monkeypatch.setattr(integration, "attention", dropped(option))
    assert main(["check", "transformers"]) == (1 if option else 0)
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith(name))
    assert ("WRONG" in line or "FAILED" in line) == bool(option) and (out.splitlines()[-1] == "ok: transformers") == (
        not option
    )


def test_the_check_sees_a_dense_mask_and_an_error(capsys, monkeypatch):
    monkeypatch.setattr(checks, "MODELS", (BY_NAME["Llama"],))
    monkeypatch.setattr(_self_check, "devices", lambda: ("cpu",))
    with monkeypatch.context() as patch:
        patch.setitem(transformers.AttentionMaskInterface._global_mapping, NAME, masking_utils.sdpa_mask)
        patch.setattr(integration, "register", lambda: NAME)
        assert main(["check", "transformers"]) == 1
        assert capsys.readouterr().out.splitlines()[-3].endswith("expected no dense mask, got one of 6075 elements")
    monkeypatch.setattr(integration, "attention", lambda *a, **o: 1 / 0)
    assert main(["check", "transformers"]) == 1
    assert "FAILED: ZeroDivisionError" in capsys.readouterr().out


def test_the_check_of_a_host_that_is_absent(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["check", "transformers"]) == 1
    assert "not checked: transformers (5.20 or newer) is needed" in capsys.readouterr().out


def test_the_check_of_an_unknown_door(capsys):
    assert main(["check", "transformers", "nowhere"]) == 2
    captured = capsys.readouterr()
    assert "'nowhere' is not one of" in captured.err and not captured.out
