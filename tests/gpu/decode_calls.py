"""This file makes the tensors and the calls over cached keys that the tests of decoding on CUDA share."""

from __future__ import annotations

import torch

import flash_online

DEVICE = "cuda"
HALF, BFLOAT16, E4M3, E5M2 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


def randn(*shape, dtype=BFLOAT16, scale=1.0):
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def integers(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def attend(*arguments, **options):
    return flash_online.kvcache_attention(*arguments, **options)
