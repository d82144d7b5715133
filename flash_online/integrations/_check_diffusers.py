"""`python -m flash_online check diffusers`: compares our backend with diffusers' native one on tiny random models of the
installed diffusers. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .._check_install import why_no_cuda
from .diffusers import NAME, register

ALLOWED = 1e-6  # relative to the largest element of the output, and of the gradients, in float32
BATCH, IMAGE, TEXT = 2, 16, 8  # tokens; each is divisible by two ranks


def _seeded(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def _built(name: str, **words: Any) -> Any:
    """A model of diffusers with random weights, of two blocks."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2022)
        return getattr(diffusers, name)(**words).eval()


def flux() -> tuple[Any, dict[str, Any]]:
    """FluxTransformer2DModel: one block with separate and one with joint weights of text and image; no masks."""
    words = {"in_channels": 4, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)}
    model = _built(
        "FluxTransformer2DModel", num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, **words
    )
    normal, places = _seeded(1), torch.zeros(IMAGE, 3)
    places[:, 1], places[:, 2] = torch.arange(IMAGE) // 4, torch.arange(IMAGE) % 4
    return model, {
        "hidden_states": normal(BATCH, IMAGE, 4),
        "encoder_hidden_states": normal(BATCH, TEXT, 32),
        "pooled_projections": normal(BATCH, 32),
        "timestep": torch.ones(BATCH),
        "img_ids": places,
        "txt_ids": torch.zeros(TEXT, 3),
    }


def wan() -> tuple[Any, dict[str, Any]]:
    """WanTransformer3DModel: self-attention of a video and cross-attention to a text; no masks."""
    words = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 256, "ffn_dim": 32, "rope_max_seq_len": 32}
    model = _built(
        "WanTransformer3DModel", num_layers=2, num_attention_heads=2, attention_head_dim=12, patch_size=(1, 2, 2), **words
    )
    normal = _seeded(2)
    inputs = {"hidden_states": normal(BATCH, 4, 2, 8, 8), "encoder_hidden_states": normal(BATCH, 12, 16)}
    return model, inputs | {"timestep": torch.tensor([3] * BATCH)}


def qwen_image() -> tuple[Any, dict[str, Any]]:
    """QwenImageTransformer2DModel: joint attention with a bool mask [B, 1, 1, S] over padded text."""
    words = {"in_channels": 16, "out_channels": 4, "joint_attention_dim": 16, "axes_dims_rope": (8, 4, 4)}
    model = _built("QwenImageTransformer2DModel", num_layers=2, attention_head_dim=16, num_attention_heads=2, **words)
    normal, mask = _seeded(3), torch.ones(BATCH, TEXT, dtype=torch.bool)
    mask[1, 5:] = False
    return model, {
        "hidden_states": normal(BATCH, IMAGE, 16),
        "encoder_hidden_states": normal(BATCH, TEXT, 16),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.ones(BATCH),
        "img_shapes": [(1, 4, 4)] * BATCH,
    }


def ltx() -> tuple[Any, dict[str, Any]]:
    """LTXVideoTransformer3DModel: cross-attention with an additive mask [B, H, 1, S] over padded text."""
    words = {"in_channels": 8, "out_channels": 8, "cross_attention_dim": 32, "caption_channels": 16}
    model = _built("LTXVideoTransformer3DModel", num_layers=2, num_attention_heads=2, attention_head_dim=16, **words)
    normal, mask = _seeded(4), torch.ones(BATCH, TEXT)
    mask[0, 6:] = 0
    return model, {
        "hidden_states": normal(BATCH, IMAGE, 8),
        "encoder_hidden_states": normal(BATCH, TEXT, 16),
        "encoder_attention_mask": mask,
        "timestep": torch.ones(BATCH),
        **{"num_frames": 1, "height": 4, "width": 4},
    }


MODELS = {"Flux": flux, "Wan": wan, "QwenImage": qwen_image, "LTX": ltx}


class MaskMeter(TorchDispatchMode):
    """The elements in memory of the largest mask that reaches one of our operators, and the number of calls that do."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == NAME and "attention" in function.__name__ and "backward" not in function.__name__:
            self.calls += 1
            for argument, tensor in zip(function._schema.arguments, args, strict=False):
                if argument.name == "mask" and tensor is not None:
                    sizes = zip(tensor.shape, tensor.stride(), strict=True)
                    self.most = max(self.most, torch.Size(size for size, stride in sizes if stride).numel())
        return function(*args, **(kwargs or {}))


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


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference, relative to the largest element."""
    largest = max(t.abs().max().item() for t in theirs)
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)) / largest


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
    say(f"diffusers {diffusers.__version__}, set_attention_backend({NAME!r}) compared with 'native', float32")
    say(f"Errors relative to the largest element, {ALLOWED:g} allowed; the largest mask in elements.\n")
    say(f"{'model':10} {'where':5} {'error of output':16} {'error of gradient':18} largest mask")
    right, logging = True, diffusers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it logs once per model that backends are experimental
    try:
        for device in ("cpu",) if why_no_cuda() else ("cpu", "cuda"):
            for name, make in MODELS.items():
                try:
                    line, good = _check_model(make, device)
                except Exception as problem:  # report a failing model and go on
                    line, good = f"FAILED: {type(problem).__name__}: {problem}", False
                say(f"{name:10} {device:5} {line}")
                right = right and good
    finally:
        logging.set_verbosity(verbosity)
        registry._active_backend = active  # set_active_backend is newer than the registry
    return right


def _check_model(make: Callable[[], tuple[Any, dict[str, Any]]], device: str) -> tuple[str, bool]:
    """The text of a model's line, and whether the model is right."""
    model, inputs = make()
    model = model.to(device)
    inputs = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    out, grads = run(model, inputs, "native")
    with MaskMeter() as meter:
        our_out, our_grads = run(model, inputs, NAME)
    errors = difference([our_out], [out]), difference(our_grads, grads)
    good = meter.calls > 0 and max(errors) <= ALLOWED
    said = "" if good else "  WRONG" if meter.calls else "  WRONG: no call reached our kernels"
    return f"{errors[0]:<16.1e} {errors[1]:<18.1e} {meter.most}{said}", good
