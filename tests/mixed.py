"""Calls of every raw operator, by tensor argument, for the tests of calls whose tensors are on several devices."""

from __future__ import annotations

from collections.abc import Callable

import torch

import flash_online

ops = flash_online._ops.ops
DENSE = (-1, 0, False, 0.125, 0.0, 0.5)  # window, alignment, scale, softcap, dropout_p


def _calls() -> dict[str, dict[str, torch.Tensor | list[torch.Tensor]]]:
    """The tensors of each operator by the names of its arguments."""
    query, key, value = (torch.randn(2, 4, 20, 64) for _ in range(3))
    lse = torch.randn(2, 4, 20)
    extras = {"mask": torch.randn(2, 4, 20, 20), "alibi_slopes": torch.rand(2, 4), "sinks": torch.rand(4)}
    rng = torch.tensor([1, 2])
    dense = {"query": query, "key": key, "value": value}
    grads = {"grad_out": query.clone(), "grad_lse": lse.clone()}
    results = {"out": query.clone(), "lse": lse, "lse_low": torch.zeros_like(lse)}
    starts = torch.tensor([0, 8, 20], dtype=torch.int32)
    rows, packed_lse = torch.randn(20, 4, 64), torch.randn(4, 20)
    packed = {"query": rows, "key": rows.clone(), "value": rows.clone(), "cu_seqlens_q": starts, "cu_seqlens_k": starts.clone()}
    packed_extras = {"alibi_slopes": torch.rand(2, 4), "sinks": torch.rand(4), "rng": rng.clone()}
    packed_grads = {"grad_out": rows.clone(), "grad_lse": packed_lse.clone()}
    packed_results = {"out": rows.clone(), "lse": packed_lse, "lse_low": torch.zeros_like(packed_lse)}
    x, loss = torch.randn(6, 9), torch.randn(6)
    classes = {"target": torch.arange(6), "weight": torch.rand(9)}
    loss_grads = {name: loss.clone() for name in ("grad_loss", "grad_lse", "grad_entropy", "entropy")}
    topk = {"grad": torch.randn(6, 3), "probabilities": torch.rand(6, 3), "indices": torch.zeros(6, 3, dtype=torch.int64)}
    decode = {"query": query, "key_cache": key, "value_cache": value, "lengths": torch.tensor([20, 7], dtype=torch.int32)}
    parts = {"outs": [torch.randn(6, 8) for _ in range(3)], "lses": [torch.randn(6) for _ in range(3)]}
    return {
        "attention_forward": {**dense, **extras, "rng": rng},
        "attention_inference": dense,
        "attention_inference_with_options": {**dense, **extras},
        "attention_training": dense,
        "attention_training_backward": {
            "grad_out": query.clone(),
            **dense,
            "out": query.clone(),
            "stats": torch.randn(4, 4, 20),
        },
        "attention_backward": {**grads, **dense, **extras, "rng": rng, **results},
        "attention_varlen_forward": {**packed, **packed_extras},
        "attention_varlen_backward": {**packed_grads, **packed, **packed_extras, **packed_results},
        "attention_decode": {**decode, "block_table": torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)},
        "attention_merge": parts,
        "attention_merge_backward": {"grad_out": torch.randn(6, 8), "grad_lse": torch.randn(6), **parts},
        "softmax_backward": {"grad": x.clone(), "output": x},
        "logsumexp_backward": {"grad": loss.clone(), "input": x},
        "cross_entropy_forward": {"input": x, **classes},
        "cross_entropy_backward": {**loss_grads, "input": x, **classes},
        "cross_entropy_backward_": {**loss_grads, "input": x, **classes},
        "cross_entropy_loss": {"input": x, **classes},
        "cross_entropy_loss_backward": {"grad": torch.tensor(1.0), "numbers": torch.tensor([6.0]), "input": x, **classes},
        "topk_softmax_backward": {**topk, "input": x},
    }


OPTIONS = {
    "window_left": -1, "window_right": 0, "lower_right": False, "scale": 0.125, "softcap": 0.0, "dropout_p": 0.5,
    "causal": True, "max_seqlen_q": 12, "max_seqlen_k": 12, "mask_grad": False, "deterministic": False, "dim": 1, "log": False,
    "input_dtype": torch.float32, "dtype": torch.float32, "ignore_index": -100, "label_smoothing": 0.0, "target_grad": False,
    "forward": True, "mean": True, "renormalize": False, "splits": 2,
}  # fmt: skip
FIRST = ("query", "input", "outs")  # the tensors that the others must be with
PUBLIC_NAMES = {"lengths": "cache_seqlens"}  # what messages call an argument by
CALLS = _calls()


def first_of(operator: str) -> str:
    """The name of the tensor that an operator compares the others with."""
    return next((name for name in FIRST if name in CALLS[operator]), "output")


def others() -> list[tuple[str, str]]:
    """(operator, name of a tensor argument that is not its first one); of a list, of one of its tensors."""
    within = {"outs": "outs[1]", "lses": "lses[2]"}
    return [
        (operator, within.get(name, name))
        for operator, tensors in CALLS.items()
        for name in tensors
        if name != first_of(operator) or name == "outs"
    ]


def arguments(operator: str, place: Callable[[str, torch.Tensor], torch.Tensor]) -> dict:
    """The arguments of a call in which place(name, tensor) says where each tensor is: of a list, the last one's name is
    name[1] and so on."""
    tensors = {}
    for name, value in CALLS[operator].items():
        if isinstance(value, list):
            tensors[name] = [place(f"{name}[{n}]" if n else name, tensor.clone()) for n, tensor in enumerate(value)]
        else:
            tensors[name] = place(name, value.clone())
    options = {a.name: OPTIONS[a.name] for a in getattr(ops, operator).default._schema.arguments if a.name in OPTIONS}
    return {**tensors, **options}
