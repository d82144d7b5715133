"""The lists that tests are parametrised by, each with its reason."""

from __future__ import annotations

import torch

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

# Lengths on and next to every power of two that a tile, a vector or a thread's share may have, and 1. Pairs rather than the
# whole square: a query block's edge and a key block's edge are met separately and once together.
EDGES = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257]
EDGE_LENGTHS = [(n, 33) for n in EDGES] + [(33, n) for n in EDGES if n != 33] + [(n, n) for n in (1, 64, 65, 128, 129, 257)]

# Head dims (of queries and keys, of values): 0 and 1; below, on and past a vector of 16 and of 32 floats; those of real models;
# one past the largest of these.
HEAD_DIMS = [(0, 4), (1, 1), (3, 5), (8, 8), (15, 17), (16, 33), (32, 32), (40, 24), (64, 64), (80, 96), (128, 128), (192, 128)]
HEAD_DIMS += [(256, 256), (257, 300)]

# Heads (query, key, value): one; equal; grouped; one key head for all; key and value heads that differ; an odd ratio.
HEADS = [(1, 1, 1), (3, 3, 3), (6, 2, 2), (4, 1, 1), (6, 3, 2), (6, 1, 3), (5, 5, 1)]

# Dimensions before the heads: none, one, one of size 1, two.
BATCHES = [(), (2,), (1,), (2, 3)]

# Masks by shape: what each dimension (batch, heads, queries, keys) may be, full (1) or broadcast (0), that real models use:
# padding, a bias shared by batch or heads, all of it, a scalar; then ranks below 4 as torch broadcasts them.
MASK_SHAPES = [(1, 0, 0, 1), (0, 1, 1, 1), (0, 0, 1, 1), (1, 0, 1, 1), (1, 1, 1, 1), (1, 1, 1, 0), (0, 1, 0, 0), (0, 0, 0, 0)]
MASK_RANKS = [4, 3, 2, 1]

# Options that change a score or which keys are seen, alone and in the combinations that meet in one code path: every rule of
# position with both alignments; every transformation of the score before and after the softcap; sinks with rows without
# keys; windows that no key falls into.
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "causal lower right": {"causal": True, "alignment": "lower_right"},
    "window": {"window": (3, 2)},
    "window left": {"window": (4, None)},
    "window right": {"window": (None, 0)},
    "window of one key": {"window": (0, 0)},
    "window lower right": {"window": (5, 1), "alignment": "lower_right"},
    "causal window": {"causal": True, "window": (7, 9), "alignment": "lower_right"},
    "softcap": {"softcap": 2.0},
    "negative scale": {"scale": -0.3},
    "zero scale": {"scale": 0.0},
    "large scale": {"scale": 30.0},
    "alibi": {"alibi": 1},
    "alibi per batch": {"alibi": 2, "causal": True},
    "alibi lower right": {"alibi": 1, "alignment": "lower_right"},
    "sinks": {"sinks": True},
    "sinks causal lower right": {"sinks": True, "causal": True, "alignment": "lower_right"},
    "bool mask": {"mask": "bool"},
    "float mask": {"mask": "float"},
    "float mask with -inf": {"mask": "-inf"},
    "mask and window": {"mask": "bool", "window": (6, 4)},
    "all options": {
        "mask": "float",
        "causal": True,
        "window": (9, None),
        "alignment": "lower_right",
        "softcap": 3.0,
        "alibi": 2,
        "sinks": True,
        "scale": 0.7,
    },
}

# Row functions: (shape, dim). A short and a long last dimension around vector widths, dimensions before and after the rows
# (inner > 1 walks memory across rows), size 1, scalars and sizes of 0.
ROW_SHAPES = [
    ((5, 1), -1),
    ((3, 7), 1),
    ((4, 15), -1),
    ((4, 16), -1),
    ((4, 17), -1),
    ((2, 33), 0),
    ((2, 1000), 1),
    ((2, 4099), 1),
    ((3, 5, 7), 1),
    ((2, 130, 3), 1),
    ((2, 3, 4, 5), 2),
    ((2, 3, 4, 5), 0),
    ((19,), 0),
    ((), 0),
    ((), -1),
]
EMPTY_ROW_SHAPES = [((0, 4), 1), ((3, 0), 1), ((0,), 0), ((2, 0, 3), 2)]

# Class counts for losses: one class, a vector's edge, a vocabulary's size in miniature.
CLASSES = [1, 2, 17, 64, 1031]


# --- linear_cross_entropy ---


def leaf(*shape, dtype=torch.float32, scale=1.0, device="cpu"):
    return (torch.randn(shape, device=device) * scale).to(dtype).requires_grad_()


def linear_problem(
    rows=13, hidden=6, classes=7, dtype=torch.float32, positions=(), soft=False, bias=True, ignored=True, device="cpu"
):
    """(input, linear_weight) and keywords: target, linear_bias."""
    input, linear_weight = (
        leaf(rows, hidden, dtype=dtype, device=device),
        leaf(classes, *positions, hidden, dtype=dtype, device=device),
    )
    if soft:
        target = torch.rand(rows, classes, *positions, device=device).softmax(1).to(dtype).requires_grad_()
    else:
        target = torch.randint(0, classes, (rows, *positions), device=device)
        if ignored and target.numel() > 1:
            target.view(-1)[1] = -100
    return (input, linear_weight), {
        "target": target,
        "linear_bias": leaf(classes, *positions, dtype=dtype, device=device) if bias else None,
    }


# Which keys a query sees by position, with windows for lengths of several tiles.
POSITIONS = {
    "full": {},
    "causal": {"causal": True},
    "lower right": {"causal": True, "alignment": "lower_right"},
    "window": {"causal": True, "window": (130, 0)},
    "both sides": {"window": (70, 33)},
}

# Head dims of one of each kernel on CUDA that takes sparsity (spans, lists of blocks), and one that is padded.
SPARSE_HEAD_DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (512, 512), (72, 40)]

# Arguments of `oracle.Attention` that sparsity meets in a kernel.
SPARSE_OPTIONS = {
    "causal": {"options": {"causal": True}},
    "window": {"options": {"window": (70, 40), "alignment": "lower_right"}},
    "sinks": {"sinks": True},
    "softcap": {"options": {"softcap": 4.0}},
    "ALiBi": {"alibi": 2},
    "dropout": {"options": {"dropout_p": 0.3}},
    "bool mask": {"mask": "bool"},
    "bias": {"mask": "float", "mask_shape": (0, 1, 1, 1)},
    "scale": {"options": {"scale": -0.5}},
}
