"""fuse_loss: models of transformers with the loss by linear_cross_entropy, against the same models without it."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import types
import warnings
from pathlib import Path

import pytest
import torch
from ranks import run_on_ranks
from torch import nn

import flash_online
from flash_online import _linear_cross_entropy_ops
from flash_online.testing import peak_extra_bytes

transformers = pytest.importorskip("transformers")

from flash_online.integrations._fused_loss import UnsupportedLogits  # noqa: E402
from flash_online.integrations.transformers import fuse_loss  # noqa: E402

LOSS, GRADIENT = 5e-6, 1e-6  # of float32
CLASSES = 101
SMALL = dict(
    vocab_size=CLASSES, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
MODELS = {
    "Llama": ("Llama", SMALL),
    "Llama with a bias": ("Llama", SMALL),
    "Llama, tied": ("Llama", SMALL | {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3", SMALL | {"head_dim": 8}),
    "Mistral": ("Mistral", SMALL),
    "gpt-oss": ("GptOss", SMALL | EXPERTS | {"head_dim": 8, "output_router_logits": True}),
    "Mixtral": ("Mixtral", SMALL | EXPERTS | {"output_router_logits": True}),
    "Phi3": ("Phi3", SMALL),
    "Gemma2": ("Gemma2", SMALL | {"head_dim": 8, "final_logit_softcapping": 1.5}),
    "Gemma3": ("Gemma3", SMALL | {"head_dim": 8}),
    "Gemma4": ("Gemma4", SMALL | {"head_dim": 8, "global_head_dim": 8, "final_logit_softcapping": 1.5,
                                  "vocab_size_per_layer_input": CLASSES, "hidden_size_per_layer_input": 8}),
    "Granite": ("Granite", SMALL | {"logits_scaling": 4.0}),
    "Cohere": ("Cohere", SMALL | {"logit_scale": 0.25}),
    "GPT-2": ("GPT2", dict(vocab_size=CLASSES, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet():
    transformers.utils.logging.set_verbosity_error()


def made(name: str, device: str = "cpu"):
    """A small random model in training mode, without dropout."""
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    model_class = getattr(transformers, f"{kind}ForCausalLM", None) or getattr(transformers, f"{kind}LMHeadModel")
    torch.manual_seed(0)
    model = model_class._from_config(config(**options), attn_implementation="eager")
    if "bias" in name:
        model.lm_head.bias = nn.Parameter(torch.randn(CLASSES))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.to(device).train()


def batch(device: str = "cpu", rows: int = 3, length: int = 17):
    """input_ids, and labels of which some are ignored."""
    tokens = torch.randint(3, CLASSES, (rows, length), generator=torch.Generator().manual_seed(1)).to(device)
    labels = tokens.clone()
    labels[0, :5] = -100
    return {"input_ids": tokens, "labels": labels}


def step(model, **inputs):
    """(output, gradients by name) of one pass in each direction."""
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_agree(ours, plain, loss: float = LOSS, gradient: float = GRADIENT):
    (our_output, our_gradients), (output, gradients) = ours, plain
    assert our_output.logits is None and output.logits is not None
    torch.testing.assert_close(our_output.loss, output.loss, rtol=0, atol=loss)
    torch.testing.assert_close(our_gradients, gradients, rtol=0, atol=gradient)


# --- models -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_models(name, device):
    """Loss and gradients, with and without num_items_in_batch; eval mode and calls without labels; undone."""
    model, inputs = made(name, device), batch(device)
    logits = model(input_ids=inputs["input_ids"]).logits
    counted = inputs | {"num_items_in_batch": torch.tensor(40, device=device)}
    plain, plain_counted = step(model, **inputs), step(model, **counted)
    handle = fuse_loss(model)
    ours = step(model, **inputs)
    assert_agree(ours, plain)
    assert type(ours[0]) is type(plain[0]) and set(ours[0]) == set(plain[0]) - {"logits"}
    assert_agree(step(model, **counted), plain_counted)
    torch.testing.assert_close(model(input_ids=inputs["input_ids"]).logits, logits, rtol=0, atol=0)
    model.eval()
    torch.testing.assert_close(model(**inputs).logits, logits, rtol=0, atol=0)
    model.train()
    handle.remove()
    again = step(model, **inputs)
    assert again[0].logits is not None and torch.equal(again[0].loss, plain[0].loss)
    assert "forward" not in model.__dict__ and "forward" not in model.get_output_embeddings().__dict__


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Granite"])
def test_entropy_of_each_target(name, device):
    """That of the logits as the loss takes them, with its gradient; ignored targets have 0; copies have none."""
    model, inputs = made(name, device), batch(device)
    inputs["labels"] = inputs["labels"].clone()
    inputs["labels"][0, :7] = -100
    logits = model(input_ids=inputs["input_ids"]).logits[:, :-1].float()
    kept = inputs["labels"][:, 1:] != -100
    log_p = logits.log_softmax(-1)
    expected = torch.where(kept, -(log_p.exp() * log_p).sum(-1), 0)
    weight = model.get_output_embeddings().weight
    (truth,) = torch.autograd.grad(expected.square().sum(), weight)

    handle = fuse_loss(model, return_entropy=True)
    output = model(**inputs)
    assert output.logits is None
    found = handle.entropy.view(len(kept), -1)[:, : kept.shape[1]]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    (grad,) = torch.autograd.grad(found.square().sum() + 0 * output.loss, weight)
    torch.testing.assert_close(grad, truth, rtol=1e-3, atol=1e-5)
    assert copy.deepcopy(model).__dict__["_flash_online_fused_loss"].entropy is None
    assert fuse_loss(model) is handle
    assert model(**inputs).loss.isfinite() and handle.entropy is None
    handle.remove()
    assert handle.entropy is None


def test_no_table_of_logits_is_made(monkeypatch):
    """In chunks of 1 MiB, a pass takes less memory than without fuse_loss: by one and a half tables of logits."""
    monkeypatch.setattr(_linear_cross_entropy_ops, "_CHUNK_BYTES", {"cpu": 1 << 20})
    wide = made("Llama")
    wide.resize_token_embeddings(8192)
    inputs = batch(rows=8, length=64)
    table = 8 * 64 * 8192 * 4

    def run():
        wide.zero_grad()
        wide(**inputs).loss.backward()

    run()
    without = peak_extra_bytes(run)
    fuse_loss(wide)
    run()
    assert without - peak_extra_bytes(run) > table + table // 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_16_bits(name, autocast, dtype):
    """The loss is float32's, as where logits are upcast. Gemma's cap rounds each of its operations to 16 bits, ours none."""
    model, inputs = made(name), batch()
    model = model if autocast else model.to(dtype)
    found = []
    for fused in (False, True):
        if fused:
            fuse_loss(model)
        with torch.autocast("cpu", dtype, enabled=autocast):
            output = model(**inputs)
        assert output.loss.dtype == torch.float32
        found.append((output.loss.item(), *torch.autograd.grad(output.loss, model.get_output_embeddings().weight)))
    (plain, gradient), (ours, our_gradient) = found
    eps = torch.finfo(dtype).eps
    assert abs(plain - ours) < (5e-6 if name == "Llama" else eps)
    assert our_gradient.dtype == gradient.dtype
    torch.testing.assert_close(our_gradient, gradient, rtol=0, atol=8 * eps * gradient.abs().max().item())


def test_labels_in_other_places():
    """shift_labels, labels by position, a tuple for an output, a weighted sum over accumulated steps."""
    model, inputs = made("Llama"), batch()
    shifted = {"shift_labels": nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()}
    first = next(i for i, name in enumerate(inspect.signature(model.forward).parameters) if name == "labels")
    position = [inputs["input_ids"], *[None] * (first - 1), inputs["labels"]]

    def results():
        model.zero_grad()
        by_position = model(*position)
        tupled = model(**inputs, return_dict=False)
        for rows in (slice(0, 1), slice(1, 3)):
            part = {name: tensor[rows] for name, tensor in inputs.items()}
            model(**part, num_items_in_batch=torch.tensor(43)).loss.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        return [model(**inputs, **shifted).loss, by_position.loss, tupled[0], *gradients], by_position.logits, tupled

    plain, _, plain_tuple = results()
    fuse_loss(model)
    ours, logits, ours_tuple = results()
    torch.testing.assert_close(ours, plain, rtol=0, atol=GRADIENT)
    assert logits is None and ours_tuple[1] is None and len(ours_tuple) == len(plain_tuple)


def test_a_loss_of_its_own():
    """A loss function that a user gives the model, with class weights and smoothing; logits in float32, rows cut by a mask."""
    model, inputs = made("Gemma2"), batch()
    weight = torch.rand(CLASSES)

    def smoothed(logits, labels, vocab_size, **kwargs):
        rows, kept = logits[..., :-1, :].float(), labels[:, 1:] != -100
        assert rows.shape == (3, 16, CLASSES) and rows.size(-1) == vocab_size and len(rows) == 3 and rows.dim() == 3
        cut = rows[kept].contiguous()
        loss = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)(cut, labels[:, 1:][kept].to(cut.device))
        return loss + nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 100

    model.loss_function = smoothed
    plain = step(model, **inputs)
    fuse_loss(model)
    assert_agree(step(model, **inputs), plain)


def test_under_override_and_strict():
    model, inputs = made("Gemma2"), batch()
    plain = step(model, **inputs)
    fuse_loss(model)
    with flash_online.override(), flash_online.strict():
        ours = model(**inputs)
    assert ours.logits is None
    torch.testing.assert_close(ours.loss, plain[0].loss, rtol=0, atol=LOSS)


# --- what happens to the model ----------------------------------------------------------------------------------------------


def test_twice_removed_and_again():
    model, inputs = made("Llama"), batch()
    handle = fuse_loss(model)
    assert fuse_loss(model) is handle and handle.model is model
    handle.remove()
    handle.remove()
    assert model(**inputs).logits is not None
    other = fuse_loss(model)
    handle.remove()  # of what is over already
    assert model(**inputs).logits is None
    other.remove()
    assert model(**inputs).logits is not None


def test_a_forward_that_was_replaced_before_and_one_after():
    model, inputs, calls = made("Llama"), batch(), []
    plain = step(model, **inputs)

    def wrapped(forward, name):
        def call(*args, **kwargs):
            calls.append(name)
            return forward(*args, **kwargs)

        return call

    model.forward = before = wrapped(model.forward, "before")
    handle = fuse_loss(model)
    assert model(**inputs).logits is None and calls == ["before"]
    handle.remove()
    assert model.forward is before
    handle = fuse_loss(model)
    model.forward = wrapped(model.forward, "after")
    assert_agree(step(model, **inputs), plain)
    handle.remove()
    calls.clear()
    assert model(**inputs).logits is not None and calls == ["after", "before"]
    assert fuse_loss(model) is handle
    assert model(**inputs).logits is None


def test_a_copy_has_its_own_weights():
    model, inputs = made("Llama"), batch()
    handle = fuse_loss(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    output = other(**inputs)
    assert output.logits is None
    assert output.loss.item() == pytest.approx(torch.tensor(float(CLASSES)).log().item())
    handle.remove()
    assert model(**inputs).logits is not None and other(**inputs).logits is None
    fuse_loss(other).remove()
    assert other(**inputs).logits is not None


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"torch.save": through_torch_save, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["Llama", "Llama, tied", "Gemma2"])
def test_a_model_that_was_saved_whole_is_fused_when_loaded(name, way):
    model, inputs = made(name), batch()
    plain = step(model, **inputs)
    handle = fuse_loss(model)
    model(**inputs)
    loaded = WAYS[way](model)
    assert_agree(step(loaded, **inputs), plain)
    assert inspect.signature(loaded.forward) == inspect.signature(made(name).forward)
    with torch.no_grad():  # its weights are its own
        loaded.get_output_embeddings().weight.zero_()
    assert loaded(**inputs).loss.item() != pytest.approx(plain[0].loss.item())
    other = fuse_loss(loaded)
    assert other is not handle and other.model is loaded
    other.remove()
    assert loaded(**inputs).logits is not None and "forward" not in loaded.get_output_embeddings().__dict__
    assert not loaded.base_model._forward_pre_hooks and model.base_model._forward_pre_hooks
    assert_agree(step(model, **inputs), plain)
    handle.remove()
    assert not model.base_model._forward_pre_hooks
    assert WAYS[way](model)(**inputs).logits is not None


def test_an_output_layer_that_was_saved_alone():
    model = made("Llama")
    fuse_loss(model)
    hidden = torch.randn(2, 32)
    loaded = through_torch_save(model.lm_head)
    assert torch.equal(loaded(hidden), model.lm_head(hidden))


def test_parameters_hooks_and_files_stay(tmp_path):
    model, inputs, plain = made("Llama"), batch(), made("Llama")
    head, seen = model.lm_head, []
    head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    fuse_loss(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    model(**inputs)
    assert model.lm_head is head and seen == [torch.Size([])]  # the hook ran, once, on the loss
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path).train()
    assert loaded(**inputs).logits is not None


def test_another_vocabulary():
    model, inputs = made("Llama"), batch()
    fuse_loss(model)
    model.resize_token_embeddings(CLASSES + 19)
    ours = step(model, **inputs)
    fuse_loss(model).remove()
    assert_agree(ours, step(model, **inputs))


def test_generate_after_training():
    model = made("Llama")
    tokens = batch()["input_ids"][:, :5]
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = model.eval().generate(tokens, **options)
    fuse_loss(model.train())
    model(**batch())
    assert torch.equal(model.eval().generate(tokens, **options), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_compiles_without_a_break(name):
    model, inputs = made(name), batch() | {"use_cache": False}
    plain = step(model, **inputs)
    fuse_loss(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    output = compiled(**inputs)
    output.loss.backward()
    assert_agree((output, {name: p.grad for name, p in model.named_parameters()}), plain)
    assert compiled(input_ids=inputs["input_ids"], use_cache=False).logits.shape == (3, 17, CLASSES)
    assert isinstance(model.lm_head, nn.Linear)


@pytest.mark.slow
def test_fsdp2_on_two_ranks():
    program = Path(__file__).with_name("fused_loss_ranks.py")
    assert all("all agree" in said for said in run_on_ranks(program))


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_trainer(name, tmp_path):
    """20 steps of two accumulated batches with the losses of the plain model."""
    pytest.importorskip("accelerate")
    torch.manual_seed(2)
    rows = [{"input_ids": t, "labels": t} for t in torch.randint(3, CLASSES, (80, 12))]

    def losses(fused):
        model = made(name)
        if fused:
            fuse_loss(model)
        arguments = transformers.TrainingArguments(
            tmp_path, max_steps=20, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
            report_to=[], save_strategy="no", use_cpu=True, learning_rate=1e-3, seed=0, disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4])
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], evaluated

    (plain, plain_eval), (ours, ours_eval) = losses(False), losses(True)
    assert len(plain) == 20 and plain[-1] < plain[0]
    assert ours == pytest.approx(plain, abs=2e-4)  # they drift apart step by step, and are logged to four digits
    assert ours[0] == pytest.approx(plain[0], abs=LOSS)
    assert ours_eval == pytest.approx(plain_eval, abs=2e-4)


# --- refusals ---------------------------------------------------------------------------------------------------------------


def refused_by(loss_function, words):
    model = made("Llama")
    fuse_loss(model)
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: loss_function(logits, labels)
    with pytest.raises(UnsupportedLogits, match=words) as error:
        model(**batch())
    assert "remove()" in str(error.value)
    assert "lm_head" not in model.__dict__  # the model is as before
    fuse_loss(model).remove()
    assert model(input_ids=batch()["input_ids"]).logits is not None


CE = nn.functional.cross_entropy
REFUSED = {
    "softmax": (lambda z, y: z.softmax(-1).sum(), r"logits\.softmax"),
    "a z-loss": (lambda z, y: CE(z.view(-1, CLASSES), y.view(-1)) + z.logsumexp(-1).square().mean(), r"logits\.logsumexp"),
    "a bias": (lambda z, y: CE((z + torch.ones(CLASSES)).view(-1, CLASSES), y.view(-1)), "adds"),
    "a function of torch": (lambda z, y: torch.sigmoid(z).sum(), "sigmoid"),
    "another loss": (lambda z, y: nn.functional.mse_loss(z, z), "mse_loss"),
    "a learned scale": (lambda z, y: CE((z * torch.ones(())).view(-1, CLASSES), y.view(-1)), "multiplies.*a tensor"),
    "two caps": (lambda z, y: CE(torch.tanh(torch.tanh(z)).view(-1, CLASSES), y.view(-1)), "tanh.*twice"),
    "some classes": (lambda z, y: CE(z[..., :50].view(-1, 50), y.view(-1)), "a part of its classes"),
    "other classes": (lambda z, y: CE(z.view(-1, 3 * CLASSES), y.view(-1)), "views its logits"),
    "the class dimension in the middle": (lambda z, y: CE(z, y), "dimension 1"),
    "a write": (lambda z, y: z.__setitem__((0, 0, 0), 1.0), "writes"),
    "fewer digits": (lambda z, y: CE(z.to(torch.bfloat16).view(-1, CLASSES), y.view(-1)), "rounds"),
    "no loss of the logits": (lambda z, y: torch.zeros((), requires_grad=True), "computed no cross-entropy"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_all_logits_is_refused_by_name(name):
    refused_by(*REFUSED[name])


def test_models_without_such_a_loss_are_refused():
    config = transformers.LlamaConfig(**SMALL)
    for model, error, words in (
        (nn.Linear(2, 2), TypeError, "PreTrainedModel, got Linear"),
        (transformers.LlamaModel(config), UnsupportedLogits, "LlamaModel takes no labels"),
        (transformers.LlamaForSequenceClassification(config), UnsupportedLogits, "no output layer"),
    ):
        with pytest.raises(error, match=words):
            fuse_loss(model)


def test_another_output_layer_is_refused():
    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    model = made("Llama")
    fuse_loss(model)
    model.set_output_embeddings(Doubled(32, CLASSES, bias=False))
    with pytest.raises(UnsupportedLogits, match="expected a torch.nn.Linear.*Doubled"):
        model(**batch())
    with pytest.raises(UnsupportedLogits, match="Doubled"):
        fuse_loss(model)
    model = made("Llama")
    model.lm_head.forward = lambda input: input
    with pytest.raises(UnsupportedLogits, match="a replaced forward"):
        fuse_loss(model)


def in_place(module, args, output):
    output.mul_(0.5)


AFTER = {
    "another tensor": lambda module, args, output: output / 2,
    "a copy": lambda module, args, output: output.clone(),
    "a view of something else": lambda module, args, output: torch.stack([output * 2, output])[0],
    "a tuple": lambda module, args, output: (output,),
    "a change in place": in_place,
}


@pytest.mark.parametrize("hook", AFTER)
@pytest.mark.parametrize("where", ["before fuse_loss", "after it", "of all modules", "with keywords, always called"])
def test_a_hook_that_changes_the_outputs_is_refused(hook, where):
    model, inputs = made("Llama"), batch()
    head, function = model.lm_head, AFTER[hook]
    if where == "of all modules":
        handle = nn.modules.module.register_module_forward_hook(lambda m, *rest: function(m, *rest) if m is head else None)
    elif where.startswith("with"):
        keywords = {"with_kwargs": True, "always_call": True}
        handle = head.register_forward_hook(lambda m, args, kwargs, output: function(m, args, output), **keywords)
    elif where.startswith("before"):
        handle = head.register_forward_hook(function)
    fuse_loss(model)
    if where == "after it":
        handle = head.register_forward_hook(function)
    try:
        with torch.no_grad() if hook == "a change in place" else torch.enable_grad():
            with pytest.raises(UnsupportedLogits, match="hook on the output layer"):
                model(**inputs)
    finally:
        handle.remove()
    assert model(**inputs).logits is None


def test_hooks_that_look_or_hand_on_what_they_got():
    model, inputs, seen = made("Llama"), batch(), []
    plain = step(model, **inputs)
    fuse_loss(model)
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(args[0].shape))
    model.lm_head.register_forward_hook(lambda module, args, output: output)
    model.lm_head.register_forward_hook(lambda module, args, output: output.view_as(output))  # an alias, as of DeepSpeed's
    assert_agree(step(model, **inputs), plain)
    assert seen == [torch.Size([3, 17, 32])]  # the input is the one of the plain model


def less_its_mean(module, args):
    return (args[0] - args[0].mean(1, keepdim=True),)


BEFORE = {
    "each number": lambda module, args: (args[0] / 2,),
    "over the tokens": less_its_mean,
    "a tensor alone": lambda module, args: args[0].flip(1),
}


@pytest.mark.parametrize("hook", BEFORE)
@pytest.mark.parametrize("where", ["before fuse_loss", "after it", "of all modules", "with keywords"])
def test_a_hook_before_the_output_layer_sees_its_input(hook, where):
    """Rows that the loss takes out and flattens are those of what the hook returns."""
    model, inputs = made("Gemma2"), batch()
    head, function = model.lm_head, BEFORE[hook]
    keep = inputs["labels"][:, 1:] != -100

    def some_rows(logits, labels, vocab_size, **kwargs):
        rows = logits[:, :-1][keep]
        return CE(rows.float(), labels[:, 1:][keep]) + CE(logits.view(-1, vocab_size), labels.flatten(), reduction="sum") / 50

    model.loss_function = some_rows
    without = model(**inputs).loss

    def register():
        if where == "of all modules":
            hook_of_all = nn.modules.module.register_module_forward_pre_hook
            return hook_of_all(lambda m, args: function(m, args) if m is head else None)
        if where == "with keywords":

            def with_keywords(module, args, kwargs):
                changed = function(module, args)
                return changed if isinstance(changed, tuple) else (changed,), kwargs

            return head.register_forward_pre_hook(with_keywords, with_kwargs=True)
        return head.register_forward_pre_hook(function)

    handle = register()
    try:
        plain = step(model, **inputs)
        if where == "after it":
            handle.remove()
        fuse_loss(model)
        handle = register() if where == "after it" else handle
        assert_agree(step(model, **inputs), plain, gradient=2e-6)
    finally:
        handle.remove()
    assert abs(without.item() - plain[0].loss.item()) > 1e-3


@pytest.mark.parametrize("before", [False, True])
def test_backward_hooks_on_the_output_layer_are_refused(before):
    """They would get the gradient of the loss in the place of that of the logits."""
    modules = nn.modules.module
    ways = [
        lambda head: head.register_full_backward_hook(lambda *a: None),
        lambda head: head.register_full_backward_pre_hook(lambda *a: None),
        lambda head: modules.register_module_full_backward_hook(lambda *a: None),
        lambda head: modules.register_module_full_backward_pre_hook(lambda *a: None),
    ]
    for register in ways:
        model, inputs = made("Llama"), batch()
        if not before:
            fuse_loss(model)
        handle = register(model.lm_head)
        try:
            with pytest.raises(UnsupportedLogits, match="backward hook"):
                fuse_loss(model)
                model(**inputs)
        finally:
            handle.remove()
        fuse_loss(model)
        assert model(**inputs).logits is None


@pytest.mark.parametrize("hook", ["another tensor", "a change in place"])
def test_a_hook_is_seen_while_compiling(hook):
    model, inputs = made("Llama"), batch() | {"use_cache": False}
    fuse_loss(model)
    model.lm_head.register_forward_hook(AFTER[hook])
    torch._dynamo.reset()
    with pytest.raises(Exception, match="hook on the output layer|UnsupportedLogits|is a view and is being modified inplace"):
        torch.compile(model, fullgraph=True, backend="eager")(**inputs)


def test_a_hook_that_looks_while_compiling():
    model, inputs, seen = made("Llama"), batch() | {"use_cache": False}, []
    plain = step(model, **inputs)
    fuse_loss(model)
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(len(args)))
    torch._dynamo.reset()
    model.zero_grad()
    output = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs)
    output.loss.backward()
    assert seen == [1]
    assert_agree((output, {name: p.grad for name, p in model.named_parameters()}), plain)


def test_another_forward_of_the_output_layer_afterwards_is_refused():
    model, inputs = made("Llama"), batch()
    fuse_loss(model)
    model.lm_head.forward = lambda input, **kwargs: input @ model.lm_head.weight.mT
    with pytest.raises(UnsupportedLogits, match="a replaced forward"):
        model(**inputs)


# --- TRL's fused head, which its SFTTrainer gives every model ---


def add_fused_lm_head(model, outputs=()):
    """As trl.trainer.utils.add_fused_lm_head of trl 1.16 does it: the same names, in the same order."""
    original_forward = model.forward

    @functools.wraps(type(model).forward)
    def _fused_forward(self, *args, fused_lm_head=False, labels=None, **kwargs):
        if not fused_lm_head:
            return original_forward(*args, labels=labels, **kwargs)
        hidden = self.base_model(*args, **kwargs).last_hidden_state[:, :-1]
        head = self.get_output_embeddings()
        logits = hidden @ head.weight.mT
        return types.SimpleNamespace(loss=CE(logits.flatten(0, 1), labels[:, 1:].flatten()), log_probs=logits.log_softmax(-1))

    model.forward = types.MethodType(_fused_forward, model)


@pytest.mark.parametrize("add", [add_fused_lm_head, None], ids=["its interface", "trl"])
@pytest.mark.parametrize("first", ["fuse_loss", "trl"])
def test_trls_fused_head_wins_and_a_warning_says_so(add, first):
    add = add or pytest.importorskip("trl.trainer.utils").add_fused_lm_head
    model, inputs = made("Llama"), batch()
    plain = step(model, **inputs)
    if first == "trl":
        add(model)
    handle = fuse_loss(model)
    if first == "fuse_loss":
        add(model)
    for call in (model, model.forward):  # PEFT calls the latter
        with pytest.warns(UserWarning, match="fuse_loss: TRL's fused LM head"):
            output = call(**inputs, fused_lm_head=True)
        assert output.log_probs is not None
        torch.testing.assert_close(output.loss, plain[0].loss, rtol=0, atol=LOSS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_agree(step(model, **inputs), plain)  # without its keyword ours is in effect
        model.eval()(input_ids=inputs["input_ids"])
        handle.remove()
        assert model.train()(**inputs, fused_lm_head=True).log_probs is not None


def test_an_sft_trainer_has_the_losses_of_a_plain_model(tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    table = datasets.table.InMemoryTable.from_pydict({"input_ids": torch.randint(3, CLASSES, (16, 12)).tolist()})
    rows = datasets.Dataset(table, fingerprint="rows")

    def losses(fused=""):
        model = made("Llama")
        if fused == "before":
            fuse_loss(model)
        words = {"max_steps": 4, "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": "none", "seed": 0}
        words |= {"output_dir": str(tmp_path), "save_strategy": "no", "use_cpu": True, "bf16": False, "disable_tqdm": True}
        words |= {"gradient_checkpointing": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
        tokens = transformers.PreTrainedTokenizerFast(tokenizer_object=_words(), pad_token="0", eos_token="2")
        trainer = trl.SFTTrainer(model, trl.SFTConfig(**words), train_dataset=rows, processing_class=tokens)
        if fused == "after":
            fuse_loss(model)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    plain = losses()
    for order in ("before", "after"):
        with pytest.warns(UserWarning, match="TRL's fused LM head"):
            assert losses(order) == plain and len(plain) == 4


def _words():
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(CLASSES)}, unk_token="3"))


class Quantised(torch.Tensor):
    """A tensor of a library's own, as torchao's are: it has no memory of its elements, and a dispatch of its own."""

    @staticmethod
    def __new__(cls, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(function)


@pytest.mark.parametrize("before", [False, True])
def test_a_quantised_output_layer_is_refused(before):
    model = made("Llama")
    if not before:
        fuse_loss(model)
    model.lm_head.weight = nn.Parameter(Quantised((CLASSES, 32)), requires_grad=False)
    with pytest.raises(UnsupportedLogits, match="fuse_loss: output layer: .*, got a Linear with a weight of type .*Quantised"):
        fuse_loss(model)
        model(**batch())


def test_torchao_on_the_output_layer_is_refused():
    quantization = pytest.importorskip("torchao.quantization")
    for before in (False, True):
        model = made("Llama")
        if not before:
            fuse_loss(model)
        only = {"filter_fn": lambda module, name: name == "lm_head"}
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig(), **only)
        with pytest.raises(UnsupportedLogits, match="fuse_loss: output layer: .*, got a Linear with a weight.*torchao"):
            fuse_loss(model)
            model(**batch())


def test_a_hook_that_rounds_the_loss_is_refused():
    model = made("Llama")
    fuse_loss(model)
    model.lm_head.register_forward_hook(lambda module, args, output: output.bfloat16())
    with pytest.raises(UnsupportedLogits, match="hook.*bfloat16"):
        model(**batch())


def test_peft_leaves_or_changes_the_output_layer():
    peft = pytest.importorskip("peft")
    inputs = batch()
    for targets, fits in ((["q_proj"], True), (["q_proj", "lm_head"], False)):
        model = made("Llama")
        fuse_loss(model)
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM")).train()
        with pytest.raises(TypeError, match="get_base_model"):
            fuse_loss(adapted)
        if fits:
            output = adapted(**inputs)
            output.loss.backward()
            assert output.logits is None
        else:
            with pytest.raises(UnsupportedLogits, match="lora"):
                adapted(**inputs)


def test_accelerate_before_and_after():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, inputs = accelerate.Accelerator(cpu=True, mixed_precision="bf16"), batch()
    prepared = accelerator.prepare(made("Llama"))
    expected = prepared(**inputs).loss
    handle = fuse_loss(prepared)
    model = made("Llama")
    fuse_loss(model)
    for each in (prepared, accelerator.prepare(model)):
        output = each(**inputs)
        assert output.logits is None
        torch.testing.assert_close(output.loss, expected, rtol=0, atol=LOSS)
    handle.remove()
    torch.testing.assert_close(prepared(**inputs).loss, expected, rtol=0, atol=0)
