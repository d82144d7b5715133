"""A small serving loop: a Llama of transformers, a paged cache, continuous batching. python examples/serving_loop.py

Requests come and go while others run. Each step makes one packed call with the prompts of new requests and one token of each
older request; their keys go to slots of a pool of pages, and attention reads them through tables. The texts equal generate()'s.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
import transformers

import flash_online

PAGE, BLOCKS, MOST_RUNNING = 16, 64, 4  # keys per page; pages of the pool; requests at a time
NAME = "serving_loop"  # of the attention implementation


@dataclass
class Request:
    """A prompt, the tokens generated so far, and the pages that hold the keys of both."""

    tokens: list[int]
    wanted: int  # new tokens
    prompt: int = 0  # tokens of the prompt
    cached: int = 0  # tokens whose keys are in the cache
    pages: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.prompt = len(self.tokens)

    @property
    def done(self) -> bool:
        return len(self.tokens) - self.prompt >= self.wanted


@dataclass
class Step:
    """The locations of a packed call's tokens; the attention function gets it through the model's keyword arguments."""

    pools: list[tuple[torch.Tensor, torch.Tensor]]  # of each layer: keys and values [blocks, heads, page, head dim]
    slots: torch.Tensor  # [tokens]: the row of the pool of each new key
    starts: torch.Tensor  # [sequences + 1]: the first token of each sequence
    lengths: torch.Tensor  # [sequences]: keys, the new ones included
    table: torch.Tensor  # [sequences, entries]: pages
    longest: int


def attend(module, query, key, value, attention_mask, scaling, step: Step, **_):
    """The attention function of each layer: query [1, H, tokens, E], key and value [1, Hk, tokens, E]."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    keys, values = step.pools[module.layer_idx]
    flash_online.cache_append(key, value, keys, values, slots=step.slots)
    pools = keys.transpose(1, 2), values.transpose(1, 2)  # [blocks, page, heads, head dim], in varlen_attention's layout
    most = step.table.shape[1] * PAGE
    options = {"block_table": step.table, "seqused_k": step.lengths, "causal": True, "scale": scaling}
    return flash_online.varlen_attention(query, *pools, step.starts, None, step.longest, most, **options)[None], None


def plan(running: list[Request], free: list[int], pools) -> tuple[torch.Tensor, torch.Tensor, Step]:
    """The new tokens of all running requests, their positions, and the step; pages are allocated on demand."""
    tokens, positions, slots, starts = [], [], [], [0]
    for request in running:
        while len(request.pages) * PAGE < len(request.tokens):
            request.pages.append(free.pop())
        for place in range(request.cached, len(request.tokens)):
            tokens.append(request.tokens[place])
            positions.append(place)
            slots.append(request.pages[place // PAGE] * PAGE + place % PAGE)
        starts.append(len(tokens))
        request.cached = len(request.tokens)
    entries = max(len(request.pages) for request in running)
    table = torch.tensor([r.pages + [-1] * (entries - len(r.pages)) for r in running], dtype=torch.int32)
    lengths = torch.tensor([r.cached for r in running], dtype=torch.int32)
    longest = max(last - first for first, last in zip(starts, starts[1:], strict=False))
    step = Step(pools, torch.tensor(slots), torch.tensor(starts, dtype=torch.int32), lengths, table, longest)
    return torch.tensor([tokens]), torch.tensor([positions]), step


@torch.no_grad()
def serve(model, requests: list[Request]) -> int:
    """Runs all requests to their ends; returns the number of steps."""
    config, free, steps = model.config, list(range(BLOCKS)), 0
    shape = (BLOCKS, config.num_key_value_heads, PAGE, config.head_dim)
    pools = [(torch.empty(shape), torch.empty(shape)) for _ in range(config.num_hidden_layers)]
    waiting, running = list(requests), []
    while waiting or running:
        while waiting and len(running) < MOST_RUNNING:
            running.append(waiting.pop(0))
        tokens, positions, step = plan(running, free, pools)
        logits = model(tokens, position_ids=positions, use_cache=False, step=step).logits[0]
        for request, last in zip(running, step.starts[1:].tolist(), strict=True):
            request.tokens.append(int(logits[last - 1].argmax()))
        for request in [request for request in running if request.done]:
            running.remove(request)
            free += request.pages
        steps += 1
    return steps


def main() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    prompts = [torch.randint(3, 300, (length,)).tolist() for length in (5, 40, 17, 1, 33, 64, 8, 21)]
    pad = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = [model.generate(torch.tensor([p]), max_new_tokens=24, **pad)[0].tolist() for p in prompts]

    transformers.AttentionInterface.register(NAME, attend)
    transformers.AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    model.set_attn_implementation(NAME)
    requests = [Request(list(prompt), wanted=24) for prompt in prompts]
    began = time.perf_counter()
    steps = serve(model, requests)
    made = sum(len(request.tokens) - request.prompt for request in requests)
    print(f"{made} tokens in {steps} steps, {made / (time.perf_counter() - began):.0f} tokens per second")
    same = sum(request.tokens == wanted for request, wanted in zip(requests, expected, strict=True))
    print(f"{same} of {len(requests)} texts are those of generate()")
    if same < len(requests):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
