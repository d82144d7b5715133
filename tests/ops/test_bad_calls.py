"""Ten thousand calls with one random fault or more in one process: each works, or raises an error that names an argument."""

from __future__ import annotations

import inspect
import random
import re
import traceback
import warnings

import pytest
import torch

import flash_online
import flash_online.functional as F

CALLS = 10_000

NUMBERS = (0.5, -0.5, 1.5, 0, 1, -1, 7, float("nan"), float("inf"), -float("inf"))
OTHERS = ("x", "0.5", None, True, [0.5], (1,), (1, 2, 3), (-1, 0), ("a", "b"), object(), 0.5j, torch.float32, torch.int32)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64, torch.uint8)


class Bad:
    """Draws calls: the arguments of a sound one, of which one to three are spoilt."""

    def __init__(self, seed: int, device: str):
        self.random, self.device = random.Random(seed), device

    def tensor(self, *shape, dtype=torch.float32):
        return torch.ones(shape, device=self.device, dtype=dtype)

    def sound(self):
        """A function, its name and sound arguments by name."""
        q, k = self.tensor(2, 4, 3, 8), self.tensor(2, 2, 5, 8)
        starts = torch.tensor([0, 1, 3], dtype=torch.int32, device=self.device)
        packed = {"query": self.tensor(3, 4, 8), "key": self.tensor(3, 2, 8), "value": self.tensor(3, 2, 8)}
        options = {"softcap": 1.0, "alibi_slopes": self.tensor(4), "sinks": self.tensor(4), "dropout_p": 0.1, "scale": 0.5}
        options |= {"causal": True, "window": (2, None), "alignment": "upper_left", "return_lse": False, "deterministic": None}
        logits, target = self.tensor(3, 5), torch.tensor([0, 4, 2], device=self.device)
        loss = {"target": target, "weight": self.tensor(5), "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.1}
        own_loss = loss | {"z_loss": 0.1, "dtype": None, "return_lse": False}
        own_linear = own_loss | {"softcap": 1.0, "scale": 0.5, "return_z_loss": False, "return_argmax": False}
        linear = {"input": self.tensor(3, 6), "linear_weight": self.tensor(5, 6), "linear_bias": self.tensor(5)}
        drop_in = {"query": q, "key": k, "value": k, "attn_mask": self.tensor(3, 5), "dropout_p": 0.1, "is_causal": False}
        lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 2, "max_seqlen_k": 2}
        return self.random.choice(
            [
                (flash_online.attention, {"query": q, "key": k, "value": k, "mask": self.tensor(3, 5)} | options),
                (flash_online.varlen_attention, packed | lengths | options),
                (flash_online.merge_attention, {"outs": [q, q], "lses": [q[..., 0], q[..., 0]]}),
                (flash_online.softmax, {"input": logits, "dim": 1, "dtype": None}),
                (flash_online.log_softmax, {"input": logits, "dim": 1, "dtype": None}),
                (flash_online.logsumexp, {"input": logits, "dim": 1, "keepdim": False}),
                (flash_online.topk_softmax, {"input": logits, "k": 2, "dim": 1, "renormalize": True, "dtype": None}),
                (flash_online.cross_entropy, {"input": logits} | own_loss),
                (flash_online.linear_cross_entropy, linear | own_linear),
                (F.scaled_dot_product_attention, drop_in | {"scale": 0.5, "enable_gqa": True}),
                (F.softmax, {"input": logits, "dim": 1, "dtype": None}),
                (F.log_softmax, {"input": logits, "dim": 1, "dtype": None}),
                (F.cross_entropy, {"input": logits} | loss),
                (F.linear_cross_entropy, linear | loss),
            ]
        )

    def spoil(self, value):
        if isinstance(value, list):
            return self.random.choice([[], value[:1], [self.spoil(value[0]), *value[1:]], None, 3, self.spoil(value[0])])
        if not isinstance(value, torch.Tensor) or self.random.random() < 0.15:
            return self.random.choice(self.random.choice((NUMBERS, OTHERS)))
        kind = self.random.choice(("shape", "rank", "dtype", "meta", "empty", "strides", "values"))
        if kind == "shape":
            return self.tensor(*(self.random.choice((size, 0, 1, 3, 7)) for size in value.shape)).to(value.dtype)
        if kind == "rank":
            return value[None] if self.random.random() < 0.5 or not value.dim() else value[0]
        if kind == "dtype":
            return value.to(self.random.choice(DTYPES))
        if kind == "meta":
            return value.to("meta")
        if kind == "empty":
            return value.narrow(0, 0, 0) if value.dim() else value
        if kind == "strides":
            return value.mT if value.dim() > 1 else value[:1].expand(value.shape[0])
        return torch.full_like(value, self.random.choice((0, 1) if not value.is_floating_point() else NUMBERS))

    def call(self):
        function, arguments = self.sound()
        names = self.random.sample(list(arguments), min(len(arguments), self.random.choice((1, 1, 2, 3))))
        spoilt = {name: self.spoil(arguments[name]) for name in names}
        return function, arguments | spoilt, spoilt


def described(arguments) -> str:
    def text(value):
        if isinstance(value, torch.Tensor):
            return f"{value.dtype} {list(value.shape)} {value.stride()} {value.device}"
        return f"[{', '.join(map(text, value))}]" if isinstance(value, list) else repr(value)

    return ", ".join(f"{name}={text(value)}" for name, value in arguments.items())


@pytest.mark.slow
def test_ten_thousand_bad_calls(device):
    bad, faults, raised = Bad(19, device), [], 0
    allocated = torch.cuda.memory_allocated() if device == "cuda" else 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(CALLS):
            function, arguments, spoilt = bad.call()
            try:
                function(**arguments)
            except Exception as error:
                raised += 1
                names = inspect.signature(function).parameters
                named = any(re.search(rf"\b{name}\b", str(error)) for name in names)
                internal = isinstance(error, (AssertionError, UnboundLocalError, KeyError)) or "has no attribute" in str(error)
                # A call that is forwarded raises torch's own error.
                forwarded = any(frame.name == "forward_to_torch" for frame in traceback.extract_tb(error.__traceback__))
                if not forwarded and (internal or not named):
                    faults.append(f"{function.__module__}.{function.__name__}({described(spoilt)}): {error!r}"[:400])
    if device == "cuda":
        torch.cuda.synchronize()
        del bad, arguments, spoilt
        assert torch.cuda.memory_allocated() == allocated
    assert raised > CALLS // 3
    assert not faults, f"{len(faults)} calls:\n" + "\n".join(faults[:40])
