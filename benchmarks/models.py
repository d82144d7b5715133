"""Models of transformers with each of their attention implementations: python -m flash_online bench models

Decoders with random weights in bfloat16, of published sizes but with few layers: gpt-oss (sinks; a window of 128 keys in every
other layer; two experts, both used by every token, so that no choice depends on rounding) and Gemma 3 (head dim 256, a window
of 1024 keys in five of six layers). One sequence of 8192 or 32768 tokens, without padding: a prefill, which is a forward pass
without gradients, and a training step, which is the forward and backward pass of all layers, without an LM head. CUDA events
time them; memory is the allocator's peak in addition to model and input.

Generation: Llama 3's sizes, 1 or 16 prompts of 1024 to 32768 tokens, a dynamic and a static cache; the prompt and a token
apart, until the device has finished, so that the host's part counts: in these few layers it is most of a token's time. A
token of a static cache is also replayed from a CUDA graph, where no host counts. In the place of 16 prompts of 32768 tokens
the cache gets random keys, untimed. sdpa is torch's choice of a backend, and each backend that takes the calls; ours is
`override()` of torch's function, and the implementation that `register()` adds.

First, the output and a gradient, or a generated step's output, of every implementation are compared with the model in float32
with eager attention, at a length for which it fits: the error may be at most 1.5 times the error of eager attention in
bfloat16.
"""

from __future__ import annotations

import copy
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

import flash_online
from flash_online.testing import peak_extra_bytes

from . import harness
from .attention.summary import CUDNN, EFFICIENT
from .attention_pages import models_page
from .case import Case
from .decode.peers import only
from .summary import FLASH, OURS
from .timing import Timer, call_timer, interleave

LENGTHS, CHECKED_LENGTH = (8192, 32768), 1024
DYNAMIC, STATIC, GRAPH = "dynamic", "static", "static, in a graph"
PROMPTS, BATCHES, CACHES = (1024, 8192, 32768), (1, 16), (DYNAMIC, STATIC, GRAPH)
NEW_TOKENS = 8  # of a sample
MOST_PROMPT_TOKENS = 1 << 17  # of a batch; with more, the cache is filled with random keys and no prompt is timed
PROMPT_ROUNDS, TOKEN_ROUNDS = 2, 3  # the former at most; the latter times as many as of other calls, since hosts vary
MAX_DISTANCE, MAX_FLOAT32_DISTANCE = 1.5, 1e-5  # relative to eager attention's distance; relative, for float32 models
IMPLEMENTATIONS = {"eager": "eager", "sdpa": "sdpa", OURS: "online_attention"}
OVERRIDE = f"{OURS} by override"
# Of generation: the implementation, and the setting around its calls.
GENERATORS = {
    "sdpa": ("sdpa", nullcontext),
    CUDNN: ("sdpa", lambda: only(SDPBackend.CUDNN_ATTENTION)),
    FLASH: ("sdpa", lambda: only(SDPBackend.FLASH_ATTENTION)),
    EFFICIENT: ("sdpa", lambda: only(SDPBackend.EFFICIENT_ATTENTION)),
    OVERRIDE: ("sdpa", flash_online.override),
    OURS: ("online_attention", nullcontext),
}
NO_MEMORY, REFUSED, REFUSAL = "out of memory", "refused by transformers", "does not support"


@dataclass(frozen=True)
class ModelCase(Case):
    """A model at one length; `options` has its name."""

    @property
    def kind(self) -> str:
        return self.options["model"]


def config_of(name: str, tiny: bool):
    """The configuration of a model; `tiny` shrinks all but its structure, for a run without a GPU."""
    import transformers

    if name == "Llama 3":
        sizes = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
        small = dict(hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
        return transformers.LlamaConfig(
            **(small if tiny else sizes), num_hidden_layers=2 if tiny else 4, vocab_size=1024, max_position_embeddings=131072
        )
    if name == "gpt-oss":
        sizes = dict(hidden_size=2880, intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8, head_dim=64)
        small = dict(hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
        return transformers.GptOssConfig(
            **(small if tiny else sizes), num_hidden_layers=2 if tiny else 4, sliding_window=16 if tiny else 128,
            vocab_size=1024, num_local_experts=2, num_experts_per_tok=2, max_position_embeddings=131072,
        )  # fmt: skip
    sizes = dict(hidden_size=2560, intermediate_size=10240, num_attention_heads=8, num_key_value_heads=4, head_dim=256)
    small = dict(hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    return transformers.Gemma3TextConfig(
        **(small if tiny else sizes), num_hidden_layers=6, sliding_window=16 if tiny else 1024, vocab_size=1024,
        layer_types=["sliding_attention"] * 5 + ["full_attention"], max_position_embeddings=131072,
    )  # fmt: skip


def make_model(name: str, device: str, dtype: torch.dtype) -> nn.Module:
    import transformers

    from flash_online.integrations.transformers import register

    register()
    torch.manual_seed(0)
    config = config_of(name, tiny=device == "cpu")
    config.dtype = dtype
    with torch.device(device):
        model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    return model.to(dtype)


def prefill(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False).last_hidden_state


def step(model: nn.Module, tokens: Tensor, grad: Tensor) -> Tensor:
    model.zero_grad(set_to_none=True)
    out = model(tokens, use_cache=False).last_hidden_state
    out.backward(grad)
    return out.detach()


def takes(model: nn.Module, implementation: str) -> bool:
    """Sets a model's attention implementation; False if transformers rejects it for the model."""
    try:
        model.set_attn_implementation(implementation)
    except ValueError as refusal:  # gpt-oss has no sdpa, which takes no sinks
        if REFUSAL not in str(refusal):
            raise
        return False
    return True


def distances(model: nn.Module, wide: nn.Module, tokens: Tensor) -> dict[str, float]:
    """Relative distance of each implementation from `wide` with eager attention: the larger one of output and gradient."""
    grad = torch.randn(*tokens.shape, model.config.hidden_size, device=tokens.device)
    found = {}
    ran = {"float32": (wide, "eager")} | {name: (model, own) for name, own in IMPLEMENTATIONS.items()}
    for name, (one, implementation) in ran.items():
        if not takes(one, implementation):
            continue
        out = step(one, tokens, grad.to(one.dtype))
        found[name] = [out.float(), one.layers[0].self_attn.q_proj.weight.grad.float()]
        one.zero_grad(set_to_none=True)
    truth = found.pop("float32")
    return {
        name: max(((mine - right).norm() / right.norm()).item() for mine, right in zip(own, truth, strict=True))
        for name, own in found.items()
    }


def check(case: ModelCase, model: nn.Module, device: str) -> None:
    tokens = torch.randint(0, 1024, (1, CHECKED_LENGTH if device == "cuda" else case.sizes["L"]), device=device)
    found = distances(model, copy.deepcopy(model).float(), tokens)
    most = max(MAX_DISTANCE * found["eager"], MAX_FLOAT32_DISTANCE)
    for name, distance in found.items():
        assert distance <= most, f"{name}, {case.title}: {distance:.3g} from float32, eager attention {found['eager']:.3g}"


def measure(case: ModelCase, rounds: int, device: str) -> dict:
    """Implementations that the model refuses, or that run out of memory, are `unavailable`."""
    model, result = make_model(case.kind, device, case.dtype), case.head() | {"rounds": rounds}
    check(case, model, device)
    tokens = torch.randint(0, 1024, (case.sizes["B"], case.sizes["L"]), device=device)
    grad = torch.randn(*tokens.shape, model.config.hidden_size, device=device, dtype=case.dtype)
    calls = {"prefill": lambda: prefill(model, tokens), "step": lambda: step(model, tokens, grad)}
    timers = {}
    for name, implementation in IMPLEMENTATIONS.items():
        if not takes(model, implementation):
            result["unavailable"][name] = REFUSED
            continue

        @contextmanager
        def setting(implementation=implementation):
            model.set_attn_implementation(implementation)
            yield

        entry = {}
        for what, call in calls.items():
            try:
                call()  # allocates persistent memory, such as the first step's gradients
                entry[f"{what}_bytes"] = peak_extra_bytes(call, device=device)
                timers[name, what] = call_timer(call, setting, device)
            except torch.OutOfMemoryError:
                result["unavailable"].setdefault(name, NO_MEMORY)
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        if entry:
            result["providers"][name] = entry
    interleave(list(timers.values()), 0, rounds)
    for (name, what), timer in timers.items():
        result["providers"][name][f"{what}_ms"] = 1e3 * timer.median
    return result


# --- Generation --------------------------------------------------------------------------------------------------------------


class Generation:
    """A model, its cache after a prompt, and the steps that follow; the cache is rewound before each sample."""

    def __init__(self, model: nn.Module, prompt: Tensor, cache: str, implementation: str):
        self.model, self.prompt, self.kind, self.implementation = model, prompt, cache, implementation
        self.token = prompt[:, :1].clone()
        self.cache = self.graph = None

    def read_prompt(self) -> Tensor:
        self.model.set_attn_implementation(self.implementation)
        self._empty_cache()
        return self._forward(self.prompt)

    def fill_cache(self) -> None:
        """Random keys and values in the place of a prompt's."""
        config, (batch, length) = self.model.config, self.prompt.shape
        self._empty_cache()
        for layer in range(config.num_hidden_layers):
            shape = (batch, config.num_key_value_heads, length, config.head_dim)
            key, value = (torch.randn(shape, device=self.prompt.device, dtype=self.model.dtype) for _ in range(2))
            self.cache.update(key, value, layer)

    def _empty_cache(self) -> None:
        import transformers

        self.graph = None
        if self.kind != DYNAMIC:
            length = self.prompt.shape[1] + NEW_TOKENS
            self.cache = transformers.StaticCache(config=self.model.config, max_cache_len=length)
        else:
            self.cache = transformers.DynamicCache()

    def generate(self) -> Tensor:
        """The last of NEW_TOKENS steps' output."""
        self.model.set_attn_implementation(self.implementation)
        if self.kind == GRAPH and self.graph is None:
            self._capture()
        self._rewind()
        for _ in range(NEW_TOKENS):
            if self.graph:
                self.graph.replay()
            else:
                self.out = self._forward(self.token)
        return self.out

    def _rewind(self) -> None:
        length = self.prompt.shape[1]
        for layer in self.cache.layers:
            if self.kind != DYNAMIC:
                layer.cumulative_length.fill_(length)
            elif layer.get_seq_length() > length:
                layer.crop(length - layer.get_seq_length())

    def _capture(self) -> None:
        """Captures the step of one token, which the static cache's own length moves on."""
        self._rewind()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(self.token)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.out = self._forward(self.token)
        self.graph = graph

    def _forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return self.model(tokens, past_key_values=self.cache, use_cache=True).last_hidden_state


class WholeTimer(Timer):
    """Seconds of one call until the device has finished."""

    def _on_cuda(self) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.call()
        torch.cuda.synchronize()
        return time.perf_counter() - start


def check_generation(case: ModelCase, model: nn.Module, device: str) -> None:
    """Compares the last step's output after a short prompt, as `check` does. Eager attention is in no graph:
    some versions of transformers copy a constant of its mask from the host, which no capture allows."""
    prompt = torch.randint(0, 1024, (2, CHECKED_LENGTH if device == "cuda" else case.sizes["L"]), device=device)
    wide, found = copy.deepcopy(model).float(), {}
    for name, (implementation, setting) in {"eager": ("eager", nullcontext), **GENERATORS}.items():
        cache = STATIC if name == "eager" and case.options["cache"] == GRAPH else case.options["cache"]
        generation = Generation(model, prompt, cache, implementation)
        try:
            with setting():
                generation.read_prompt()
                found[name] = generation.generate().float()
        except RuntimeError:  # a backend that does not take the calls; `measure_generation` says so
            continue
    generation = Generation(wide, prompt, DYNAMIC, "eager")
    generation.read_prompt()
    truth = generation.generate()
    distance = {name: ((out - truth).norm() / truth.norm()).item() for name, out in found.items()}
    most = max(MAX_DISTANCE * distance["eager"], MAX_FLOAT32_DISTANCE)
    for name, own in distance.items():
        assert own <= most, f"{name}, {case.title}: {own:.3g} from float32, eager attention {distance['eager']:.3g}"


def measure_generation(case: ModelCase, rounds: int, device: str) -> dict:
    model, result = make_model(case.options["model"], device, case.dtype).eval(), case.head() | {"rounds": rounds}
    check_generation(case, model, device)
    prompt = torch.randint(0, 1024, (case.sizes["B"], case.sizes["L"]), device=device)
    prompts, tokens = {}, {}
    for name, (implementation, setting) in GENERATORS.items():
        generation, reads = (
            Generation(model, prompt, case.options["cache"], implementation),
            prompt.numel() <= MOST_PROMPT_TOKENS,
        )
        try:
            with setting():
                generation.read_prompt() if reads else generation.fill_cache()
                generation.generate()
        except torch.OutOfMemoryError:
            result["unavailable"][name] = NO_MEMORY
        except RuntimeError as refusal:
            result["unavailable"][name] = str(refusal).splitlines()[0][:60]
        else:
            if reads and case.options["cache"] != GRAPH:  # the same prompt as with a static cache
                prompts[name] = WholeTimer(generation.read_prompt, setting, device)
            tokens[name] = WholeTimer(generation.generate, setting, device)
    interleave(list(tokens.values()), 0, TOKEN_ROUNDS * rounds)
    interleave(list(prompts.values()), 0, min(rounds, PROMPT_ROUNDS))
    for name, timer in tokens.items():
        of_prompt = {"prompt_ms": 1e3 * prompts[name].median} if name in prompts else {}
        result["providers"][name] = of_prompt | {"token_ms": 1e3 * timer.median / NEW_TOKENS}
    return result


def line(result: dict) -> str:
    return f"{result['case']}: " + "; ".join(
        f"{name} " + " ".join(f"{k} {v:.4g}" for k, v in entry.items()) for name, entry in result["providers"].items()
    )


def cases_of(device: str) -> list[ModelCase]:
    dtype, lengths = (torch.bfloat16, LENGTHS) if device == "cuda" else (torch.float32, (64,))
    prompts, batches, caches = (PROMPTS, BATCHES, CACHES) if device == "cuda" else ((64,), (2,), (DYNAMIC, STATIC))
    models = [ModelCase("models", {"B": 1, "L": n}, {"model": m}, dtype) for m in ("gpt-oss", "Gemma 3") for n in lengths]
    return models + [
        ModelCase("generation", {"B": batch, "L": length}, {"model": "Llama 3", "cache": cache}, dtype)
        for cache in caches
        for batch in batches
        for length in prompts
    ]


def run(device: str, facts: dict, path: Path) -> int:
    """Measures on a GPU; on the CPU it checks itself with tiny float32 models."""
    import transformers

    def of_case(case: ModelCase) -> dict:
        return (measure_generation if case.family == "generation" else measure)(case, facts["rounds"], device)

    facts = facts | {"transformers": transformers.__version__, "implementations": list(IMPLEMENTATIONS)}
    return harness.run("models", cases_of(device), of_case, line, facts, path, summary=models_page)
