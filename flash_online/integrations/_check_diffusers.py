"""`python -m flash_online check diffusers`: compares our backend with diffusers' native one on tiny random models of the
installed diffusers. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._self_check import MaskMeter, compare_models, difference, require
from .diffusers import NAME, register

ALLOWED = 1e-6  # relative to the largest element of the output, and of the gradients, in float32
BATCH, IMAGE, TEXT = 2, 16, 8  # tokens; each is divisible by two ranks


@dataclass(frozen=True)
class Model:
    """A tiny model of diffusers with random weights: its class, its config arguments, and what its forward pass takes."""

    name: str
    words: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]

    def make(self) -> tuple[Any, dict[str, Any]]:
        import diffusers

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2022)
            return getattr(diffusers, self.name)(num_attention_heads=2, **self.words).eval(), self.inputs()


def _flux() -> dict[str, Any]:
    places = torch.stack([torch.zeros(IMAGE), torch.arange(IMAGE) // 4, torch.arange(IMAGE) % 4], dim=1)
    text = {"encoder_hidden_states": torch.randn(BATCH, TEXT, 32), "txt_ids": torch.zeros(TEXT, 3)}
    image = {"hidden_states": torch.randn(BATCH, IMAGE, 4), "img_ids": places}
    return image | text | {"pooled_projections": torch.randn(BATCH, 32), "timestep": torch.ones(BATCH)}


def _wan() -> dict[str, Any]:
    inputs = {"hidden_states": torch.randn(BATCH, 4, 2, 8, 8), "encoder_hidden_states": torch.randn(BATCH, 12, 16)}
    return inputs | {"timestep": torch.tensor([3] * BATCH)}


def _qwen_image() -> dict[str, Any]:
    """With a bool mask [B, 1, 1, S] over padded text."""
    text = {"encoder_hidden_states": torch.randn(BATCH, TEXT, 16), "encoder_hidden_states_mask": _text_mask(1, 5).bool()}
    image = {"hidden_states": torch.randn(BATCH, IMAGE, 16), "img_shapes": [(1, 4, 4)] * BATCH}
    return text | image | {"timestep": torch.ones(BATCH)}


def _ltx() -> dict[str, Any]:
    """With an additive mask [B, H, 1, S] over padded text."""
    text = {"encoder_hidden_states": torch.randn(BATCH, TEXT, 16), "encoder_attention_mask": _text_mask(0, 6)}
    video = {"hidden_states": torch.randn(BATCH, IMAGE, 8), "num_frames": 1, "height": 4, "width": 4}
    return text | video | {"timestep": torch.ones(BATCH)}


def _text_mask(sequence: int, length: int) -> Tensor:
    mask = torch.ones(BATCH, TEXT)
    mask[sequence, length:] = 0
    return mask


_FLUX = {"in_channels": 4, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)}
_FLUX |= {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16}  # blocks with separate and with joint weights
_WAN = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 256, "ffn_dim": 32, "rope_max_seq_len": 32}
_WAN |= {"num_layers": 2, "attention_head_dim": 12, "patch_size": (1, 2, 2)}
_QWEN = {"in_channels": 16, "out_channels": 4, "joint_attention_dim": 16, "axes_dims_rope": (8, 4, 4)}
_LTX = {"in_channels": 8, "out_channels": 8, "cross_attention_dim": 32, "caption_channels": 16}
_TWO_BLOCKS = {"num_layers": 2, "attention_head_dim": 16}
MODELS = {
    "Flux": Model("FluxTransformer2DModel", _FLUX, _flux),
    "Wan": Model("WanTransformer3DModel", _WAN, _wan),
    "QwenImage": Model("QwenImageTransformer2DModel", _QWEN | _TWO_BLOCKS, _qwen_image),
    "LTX": Model("LTXVideoTransformer3DModel", _LTX | _TWO_BLOCKS, _ltx),
}


def run(model: Any, inputs: dict[str, Any], backend: str) -> tuple[Tensor, list[Tensor]]:
    """The output of a model with a backend, then the gradients of its inputs and weights."""
    leaves = {n: t.detach().requires_grad_() if n.endswith("hidden_states") else t for n, t in inputs.items()}
    model.set_attention_backend(backend)
    try:
        out = model(**leaves, return_dict=False)[0]
    finally:
        model.reset_attention_backend()
    wanted = [t for t in (*leaves.values(), *model.parameters()) if isinstance(t, Tensor) and t.requires_grad]
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view_as(out)
    grads = torch.autograd.grad((out * weights).sum(), wanted, allow_unused=True)
    return out.detach(), [grad for grad in grads if grad is not None]


def measure(model: Model, device: str) -> tuple[float, float, int, str]:
    """The differences of output and gradients between our backend and diffusers' native one, and the largest mask of ours."""
    module, inputs = model.make()
    inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    out, grads = run(module.to(device), inputs, "native")
    with MaskMeter() as meter:
        our_out, our_grads = run(module, inputs, NAME)
    require(meter.calls > 0, "no call reached our kernels")
    return difference([our_out], [out]), difference(our_grads, grads), meter.most, ""


def check(say: Callable[[str], None]) -> bool:
    """Compares tiny models with diffusers' native backend, a line per model. Returns whether all are right.

    Raises:
        ImportError: diffusers is not installed.
        NotImplementedError: diffusers has no registry of backends that we know.
    """
    register()
    import diffusers
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    active = registry._active_backend
    try:
        return compare_models(
            say, diffusers, f"set_attention_backend({NAME!r}) compared with 'native'", MODELS, measure, ALLOWED
        )
    finally:
        registry._active_backend = active  # set_active_backend is newer than the registry
