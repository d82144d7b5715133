"""The providers of each function of cases.py, ours first."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as torch_functional
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_online
import flash_online.functional as our_functional

from .summary import FLASH, MATH, OURS

PEER_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}  # of max|truth|
MAX_SCORE_BYTES = 2**28  # bytes of float32 scores for torch math, which holds several tensors of that size and takes seconds


class Unavailable(Exception):
    """This provider cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Provider:
    """`call`: (inputs, extras, options) -> output. `setting` is entered around samples, so that choosing or forbidding a
    backend is not timed. `waits`: its calls sync, so that no CUDA graph can capture them."""

    call: Callable[[list[Tensor], list[Tensor], dict], Tensor]
    setting: Callable[[], AbstractContextManager]
    refuses: Callable[[list[Tensor], list[Tensor], dict], str | None] = lambda inputs, extras, options: None
    waits: bool = False

    def first_call(self, inputs, extras, options) -> Tensor:
        """Raises Unavailable if this provider refuses the problem."""
        if reason := self.refuses(inputs, extras, options):
            raise Unavailable(reason)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of each reason for refusing; on the CPU there are none
                return self.call(inputs, extras, options)
        except NotImplementedError as missing:  # ours, under strict()
            raise Unavailable(str(missing)) from None
        except RuntimeError as error:
            if "strict() forbids" in str(error):
                raise Unavailable(str(error)) from None
            if "No available kernel" not in str(error):
                raise
            why = "an attn_mask that requires grad" if len(inputs) > 3 else "such a problem"
            raise Unavailable(f"torch has no kernel of this backend for {why}") from None


def _ours(call) -> Provider:
    """Under strict(), so that calls forwarded to torch are never timed as ours."""
    return Provider(call, flash_online.strict)


def _torch(call) -> Provider:
    return Provider(call, nullcontext)


def _mask_of(inputs, extras, options) -> dict:
    if options.get("causal"):
        return {"is_causal": True}
    return {"attn_mask": next(iter([*inputs[3:], *extras]), None)}


def _our_attention(inputs, extras, options):
    if window := options.get("window"):
        return flash_online.attention(*inputs[:3], causal=True, window=(window - 1, 0))
    return our_functional.scaled_dot_product_attention(*inputs[:3], **_mask_of(inputs, extras, options))


def _torch_attention(inputs, extras, options):
    return torch_functional.scaled_dot_product_attention(*inputs[:3], **_mask_of(inputs, extras, options))


def _too_many_scores(inputs, extras, options) -> str | None:
    query, key = inputs[:2]
    scores = 4 * query.shape[:-1].numel() * key.shape[-2]
    return f"its scores alone take {scores >> 20} MiB" if scores > MAX_SCORE_BYTES else None


PEERS = {
    "attention": {
        OURS: _ours(_our_attention),
        FLASH: Provider(_torch_attention, lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
        MATH: Provider(_torch_attention, lambda: sdpa_kernel(SDPBackend.MATH), refuses=_too_many_scores),
    },
    "softmax": {
        OURS: _ours(lambda x, _, o: our_functional.softmax(x[0], -1)),
        "torch": _torch(lambda x, _, o: torch_functional.softmax(x[0], -1)),
    },
    "log_softmax": {
        OURS: _ours(lambda x, _, o: our_functional.log_softmax(x[0], -1)),
        "torch": _torch(lambda x, _, o: torch_functional.log_softmax(x[0], -1)),
    },
    "cross_entropy": {
        OURS: _ours(lambda x, t, o: our_functional.cross_entropy(x[0], t[0])),
        "torch": _torch(lambda x, t, o: torch_functional.cross_entropy(x[0], t[0])),
    },
    "logsumexp": {
        OURS: _ours(lambda x, _, o: flash_online.logsumexp(x[0], -1)),
        "torch": _torch(lambda x, _, o: torch.logsumexp(x[0], -1)),
    },
    "topk_softmax": {
        OURS: _ours(lambda x, _, o: flash_online.topk_softmax(x[0], o["k"])[0]),
        "torch softmax, topk": _torch(lambda x, _, o: torch.topk(torch.softmax(x[0], -1), o["k"])[0]),
    },
}
