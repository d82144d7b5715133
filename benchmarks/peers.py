"""Who is measured: for each function of cases.py its contestants, ours first, each a function of (inputs, extras, options)."""

from __future__ import annotations

import torch
import torch.nn.functional as torch_functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_online
import flash_online.functional as our_functional

OURS = "flash_online"


class Absent(Exception):
    """This contestant cannot run here; the message says why."""


def _ours(function):
    """Under strict(), so that nothing forwarded to torch is ever timed as ours."""

    def call(inputs, extras, options):
        try:
            with flash_online.strict():
                return function(inputs, extras, options)
        except NotImplementedError as missing:
            raise Absent(str(missing)) from None

    return call


def _torch_attention(backend: SDPBackend):
    def call(inputs, extras, options):
        try:
            with sdpa_kernel(backend):
                return torch_functional.scaled_dot_product_attention(*inputs, is_causal=options["causal"])
        except RuntimeError as error:
            if "No available kernel" in str(error):
                raise Absent(f"{backend.name} takes no such problem") from None
            raise

    return call


PEERS = {
    "attention": {
        OURS: _ours(lambda x, _, o: our_functional.scaled_dot_product_attention(*x, is_causal=o["causal"])),
        "torch flash": _torch_attention(SDPBackend.FLASH_ATTENTION),
        "torch math": _torch_attention(SDPBackend.MATH),
    },
    "softmax": {
        OURS: _ours(lambda x, _, o: our_functional.softmax(x[0], -1)),
        "torch": lambda x, _, o: torch_functional.softmax(x[0], -1),
    },
    "log_softmax": {
        OURS: _ours(lambda x, _, o: our_functional.log_softmax(x[0], -1)),
        "torch": lambda x, _, o: torch_functional.log_softmax(x[0], -1),
    },
    "cross_entropy": {
        OURS: _ours(lambda x, t, o: our_functional.cross_entropy(x[0], t[0])),
        "torch": lambda x, t, o: torch_functional.cross_entropy(x[0], t[0]),
    },
    "topk_softmax": {
        OURS: _ours(lambda x, _, o: flash_online.topk_softmax(x[0], o["k"])[0]),
        "torch softmax, topk": lambda x, _, o: torch.topk(torch.softmax(x[0], -1), o["k"])[0],
    },
}
