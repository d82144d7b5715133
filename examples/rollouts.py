"""Policy gradients of N sampled answers to one prompt, in one row: the prompt is computed once, and answers do not see each
other.

python examples/rollouts.py                                               # a tiny Llama, on the GPU if there is one
python examples/rollouts.py --prompt 4096 --answers 16 --longest 512 --width 1024 --layers 8

The row is the prompt and then the answers; `flash_online.spans.shared_prefix` says who sees whom in memory that is linear in
the row's length, and an answer's positions continue the prompt's. The program compares loss and gradients with N rows that each
repeat the prompt, prints tokens per second and memory of both, and with --out writes them to a file; the docs' figure is drawn
from benchmarks/results/rollouts.json. It needs transformers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

import flash_online
from flash_online import spans, testing
from flash_online.integrations import transformers as integration

SCHEMA = 3  # of the records in benchmarks/results
SHARED = "shared_prefix"  # the attention function's name in transformers


def options(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--prompt", type=int, default=384, help="tokens of the prompt")
    parser.add_argument("--answers", type=int, default=8, help="2 or more, as rewards are compared with their mean")
    parser.add_argument("--longest", type=int, default=64, help="tokens of the longest answer; the others have at least half")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4, help="query heads; two share a key head")
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--out", type=Path, help="a JSON file for what was measured")
    words = parser.parse_args(given)
    if words.answers < 2:
        parser.error(f"--answers: expected 2 or more, got {words.answers}")
    return words


# --- Attention --------------------------------------------------------------------------------------------------------------


def register() -> None:
    """Adds attention over a shared prompt to transformers, for `model.set_attn_implementation(SHARED)`: the model passes on
    `visible`, the keywords of flash_online.attention that say who sees whom."""

    def attend(module, query, key, value, mask, scaling=None, visible=None, **others):
        return flash_online.attention(query, key, value, scale=scaling, **visible).transpose(1, 2), None

    AttentionInterface.register(SHARED, attend)
    AttentionMaskInterface.register(SHARED, lambda *words, **others: None)  # transformers makes no mask of its own


# --- Rollouts ---------------------------------------------------------------------------------------------------------------


class Rollouts(NamedTuple):
    """A prompt, its answers, and how much better than their mean each of them was."""

    prompt: Tensor
    answers: list[Tensor]
    advantages: Tensor

    @classmethod
    def draw(cls, words: argparse.Namespace, device: str) -> Rollouts:
        g = torch.Generator().manual_seed(2018)
        lengths = torch.randint((words.longest + 1) // 2, words.longest + 1, (words.answers,), generator=g)
        lengths[0] = words.longest
        prompt, *answers = (
            torch.randint(words.vocabulary, (n,), generator=g).to(device) for n in (words.prompt, *lengths.tolist())
        )
        rewards = torch.randn(words.answers, generator=g).to(device)
        return cls(prompt, answers, rewards - rewards.mean())


class Batch(NamedTuple):
    """What a model computes, and the loss's terms: an answer's token `label` is predicted at `row`, `column`."""

    inputs: dict
    row: Tensor
    column: Tensor
    labels: Tensor
    weights: Tensor  # of a term: its answer's advantage


def terms(rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """Labels and weights, answer after answer."""
    lengths = torch.tensor([len(answer) for answer in rollouts.answers], device=rollouts.prompt.device)
    return torch.cat(rollouts.answers), rollouts.advantages.repeat_interleave(lengths)


def in_one_row(rollouts: Rollouts) -> Batch:
    """The prompt and then the answers. The last token of the prompt predicts the first one of every answer."""
    device, prompt = rollouts.prompt.device, len(rollouts.prompt)
    tokens = torch.cat([rollouts.prompt, *rollouts.answers])
    starts, position, column = [0, prompt], [torch.arange(prompt)], []
    for answer in rollouts.answers:
        inside = torch.arange(len(answer))
        position.append(prompt + inside)
        column.append(torch.where(inside == 0, prompt - 1, starts[-1] + inside - 1))
        starts.append(starts[-1] + len(answer))
    visible: dict = {**spans.shared_prefix(torch.tensor(starts, dtype=torch.int32, device=device), len(tokens))}
    inputs = {"input_ids": tokens[None], "position_ids": torch.cat(position)[None].to(device), "visible": visible}
    columns = torch.cat(column).to(device)
    return Batch(inputs, torch.zeros_like(columns), columns, *terms(rollouts))


def in_separate_rows(rollouts: Rollouts) -> Batch:
    """A row for each answer, after a copy of the prompt. Padding comes last, where no answer sees it."""
    device, prompt = rollouts.prompt.device, len(rollouts.prompt)
    rows = [torch.cat([rollouts.prompt, answer]) for answer in rollouts.answers]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    row = torch.cat([torch.full((len(answer),), n) for n, answer in enumerate(rollouts.answers)])
    column = torch.cat([prompt - 1 + torch.arange(len(answer)) for answer in rollouts.answers])
    return Batch({"input_ids": tokens}, row.to(device), column.to(device), *terms(rollouts))


def step(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """The loss of REINFORCE, minus the mean of advantage times log-probability, after its backward pass."""
    model.zero_grad()
    hidden = model.model(**batch.inputs, use_cache=False).last_hidden_state[batch.row, batch.column]
    surprise = flash_online.linear_cross_entropy(hidden, model.lm_head.weight, batch.labels, reduction="none")
    loss = (batch.weights * surprise).mean()
    loss.backward()
    return loss.detach()


# --- The comparison ---------------------------------------------------------------------------------------------------------


def measure(call: Callable[[], object], tokens: int, device: str) -> dict:
    timing, extra = testing.time_call(call, device=device), testing.peak_extra_bytes(call, device=device)
    return {"ms": 1e3 * timing.median, "answer_tokens_per_s": tokens / timing.median, "extra_bytes": extra}


def compare(words: argparse.Namespace) -> dict:
    """Figures of both forms, and how far apart their losses and gradients are."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words.vocabulary,
        hidden_size=words.width,
        intermediate_size=3 * words.width,
        num_hidden_layers=words.layers,
        num_attention_heads=words.heads,
        num_key_value_heads=max(words.heads // 2, 1),
        max_position_embeddings=words.prompt + words.longest,
    )
    model = LlamaForCausalLM(config).to(device)
    rollouts = Rollouts.draw(words, device)
    tokens = sum(map(len, rollouts.answers))
    register()
    of_machine = {"device": torch.cuda.get_device_name() if device == "cuda" else device, "torch": torch.__version__}
    record: dict = {"schema": SCHEMA, **of_machine, "tokens": tokens + len(rollouts.prompt), "forms": {}}
    losses, gradients = [], []
    for name, batch, attention in (
        ("one row", in_one_row(rollouts), SHARED),
        ("separate rows", in_separate_rows(rollouts), integration.register()),
    ):
        model.set_attn_implementation(attention)
        losses.append(step(model, batch))
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        record["forms"][name] = measure(lambda batch=batch: step(model, batch), tokens, device)
    pairs = list(zip(*gradients, strict=True))
    record["loss"] = losses[0].item()
    record["loss_apart"] = (losses[0] - losses[1]).abs().item()
    record["gradients_apart"] = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
    return record


def main(given: list[str] | None = None) -> None:
    words = options(given)
    record = compare(words)
    if words.out:
        words.out.write_text(json.dumps(record, indent=1) + "\n")
    for name, form in record["forms"].items():
        print(
            f"{name}: {form['ms']:.1f} ms a step, {form['answer_tokens_per_s']:,.0f} tokens of answers per second, "
            f"{form['extra_bytes'] / 2**20:.0f} MiB"
        )
    print(f"loss {record['loss']:.6f}, {record['loss_apart']:.1g} apart; gradients {record['gradients_apart']:.1g} apart")


if __name__ == "__main__":
    main()
