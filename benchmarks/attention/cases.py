"""The measured cells, in groups, and their tensors."""

from __future__ import annotations

import copy
import dataclasses
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_online import BlockList, spans

from ..case import Case
from . import block_patterns
from .span_patterns import PATTERNS, Pattern, count_pairs

TOKENS, HIDDEN = 16384, 2048  # of every plain cell
BLOCK, HIDDEN_BLOCKS = 64, 0.75  # the block-sparse mask: block size, share of hidden blocks
CHECKED_SEQUENCES = 3  # of a packed cell: the longest, the first and the last


@dataclass(frozen=True)
class Cell(Case):
    """A problem of attention on a GPU; its family is its group, and `kind` is given. `sizes` and `options` form the label.

    Sizes: B, H, Hkv (if not H), L, S (keys, if not L; only without options), E, Ev (if not E). Options: `causal`; `window` W
    (with causal: a query sees itself and the W keys before it); `band` W (it also sees the W keys after it); `softcap`;
    `alibi`; `mask` "random" ([1, 1, L, L], half of it visible), "heads" ([1, H, L, L], likewise), "padding" ([B, 1, 1, L]) or
    "blocks" (a quarter of the blocks of 64 x 64 visible); `bias` "frozen" or "learned" ([1, H, L, L]); `dropout` p;
    `deterministic`; `tf32`, which lets every provider round float32 factors; `spans`, a name of span_patterns.PATTERNS;
    `blocks`, a name of block_patterns.PATTERNS, with `size`, queries and keys of a block, and `density`, the share of blocks
    that are listed.
    `lengths`: lengths of packed sequences, instead of B and L.
    """

    kind: str = ""
    lengths: tuple[int, ...] = ()

    @property
    def group_size(self) -> int:
        """Query heads that share a key head."""
        return self.sizes["H"] // self.sizes.get("Hkv", self.sizes["H"])


def causal_pairs(length: int, window: int | None = None) -> int:
    """Number of visible pairs of a causal sequence; with a window a query sees that many keys before its own."""
    before = length - 1 if window is None else min(window, length - 1)  # keys that the last query sees before its own
    return length * (before + 1) - before * (before + 1) // 2


class Problem:
    """A cell's tensors, the same numbers in every run: query, key, value, grad (the output's) [B, H, L, E], packed [T, H, E];
    `mask` of four dimensions, `blocks` (bool, its blocks), `slopes` [H], `starts` int32 and `longest`, `pattern` (of spans),
    `listed` (bool [H, blocks, blocks]) and `list`, a BlockList of it, if the cell has them.
    """

    def __init__(self, cell: Cell, device: str):
        self.cell, self.device, self.options = cell, device, dict(cell.options)
        self.mask = self.blocks = self.slopes = self.starts = self.longest = None
        self.pattern: Pattern | None = None
        self.listed: Tensor | None = None
        self.list: BlockList | None = None
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(cell.dtype)

        heads, head_dim = cell.sizes["H"], cell.sizes["E"]
        key_heads, head_dim_v = cell.sizes.get("Hkv", heads), cell.sizes.get("Ev", head_dim)
        if cell.lengths:
            ends = torch.tensor([0, *cell.lengths]).cumsum(0)
            self.starts, self.longest = ends.int().to(device), max(cell.lengths)
            rows, key_rows = (int(ends[-1]), heads), (int(ends[-1]), key_heads)
        else:
            batch, length = cell.sizes["B"], cell.sizes["L"]
            rows, key_rows = (batch, heads, length), (batch, key_heads, cell.sizes.get("S", length))
        self.query, self.key = normal(*rows, head_dim).requires_grad_(), normal(*key_rows, head_dim).requires_grad_()
        self.value, self.grad = normal(*key_rows, head_dim_v).requires_grad_(), normal(*rows, head_dim_v)
        if self.options.get("alibi"):
            self.slopes = torch.exp2(-8 * torch.arange(1, heads + 1, device=device) / heads)
        if name := self.options.get("spans"):
            self.pattern = PATTERNS[name](cell.sizes["L"], device)
        if name := self.options.get("blocks"):
            size, density = self.options["size"], self.options["density"]
            blocks = length // size
            self.listed = block_patterns.PATTERNS[name](heads, blocks, max(1, round(density * blocks)), generator)
            self.list = BlockList.from_mask(self.listed, (size, size))
        if bias := self.options.get("bias"):
            self.mask = normal(1, heads, length, length).requires_grad_(bias == "learned")
        elif (kind := self.options.get("mask")) == "random":
            self.mask = torch.rand(1, 1, length, length, generator=generator, device=device) < 0.5
        elif kind == "heads":
            self.mask = torch.rand(1, heads, length, length, generator=generator, device=device) < 0.5
        elif kind == "padding":  # sequences fill from just over half to all of the length
            lengths = torch.tensor([length * (batch + n + 1) // (2 * batch) for n in range(batch)], device=device)
            self.mask = (torch.arange(length, device=device) < lengths[:, None])[:, None, None]
        elif kind == "blocks":
            side = length // BLOCK
            order = torch.randperm(side * side, generator=generator, device=device)
            self.blocks = (order >= HIDDEN_BLOCKS * side * side).view(side, side)
            self.mask = self.blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[None, None]

    def without(self, *names: str) -> Problem:
        """The same tensors, without these options."""
        other = copy.copy(self)
        other.options = {name: value for name, value in self.options.items() if name not in names}
        return other

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that get gradients."""
        learned = self.options.get("bias") == "learned"
        return [self.query, self.key, self.value, *([self.mask] if learned else [])]

    def visible_pairs(self) -> int:
        """Number of visible pairs of query and key, over all heads."""
        heads = self.cell.sizes["H"]
        if self.cell.lengths:
            return heads * sum(causal_pairs(n, self.options.get("window")) for n in self.cell.lengths)
        batch, length = self.cell.sizes["B"], self.cell.sizes["L"]
        if self.pattern is not None:
            return batch * heads * count_pairs(length, **self.pattern.spans)
        if self.listed is not None:
            return batch * int(self.listed.sum()) * self.options["size"] ** 2
        if self.mask is not None and self.mask.dtype == torch.bool:
            return int(self.mask.sum()) * (batch * heads * length**2 // self.mask.numel())
        if band := self.options.get("band"):
            band = min(band, length - 1)
            return batch * heads * (length * (2 * band + 1) - band * (band + 1))
        if self.options.get("causal"):
            return batch * heads * causal_pairs(length, self.options.get("window"))
        return batch * heads * length * self.cell.sizes.get("S", length)

    def flops(self, direction: str) -> int:
        """Floating-point operations of the matrix products: forward QK', PV; backward QK' again, dV, dP, dQ, dK."""
        head_dim = self.cell.sizes["E"]
        head_dim_v = self.cell.sizes.get("Ev", head_dim)
        return self.visible_pairs() * (2 * (head_dim + head_dim_v) if direction == "forward" else 6 * head_dim + 4 * head_dim_v)

    def dense_mask(self, heads: slice = slice(None)) -> Tensor | None:
        """`mask`, or the bool mask that the cell's spans, or some heads' lists of blocks, stand for, [1, 1 or H, L, L]."""
        length = self.cell.sizes.get("L")
        if self.pattern is not None:
            return spans.to_mask(length, length, **self.pattern.spans).view(1, 1, length, length)
        if self.listed is not None:
            size = self.options["size"]
            return self.listed[heads].repeat_interleave(size, -2).repeat_interleave(size, -1)[None]
        return self.mask

    # --- What is checked: the query heads of the first key head, in one batch entry or in some packed sequences ---------------

    def pieces(self) -> list[slice]:
        """The checked slices of the first dimension. A learned bias gets its gradient from the whole batch."""
        if not self.cell.lengths:
            return [slice(None) if self.options.get("bias") == "learned" else slice(0, 1)]
        lengths, starts = self.cell.lengths, self.starts.tolist()
        chosen = dict.fromkeys([lengths.index(self.longest), 0, len(lengths) - 1])
        return [slice(starts[n], starts[n + 1]) for n in list(chosen)[:CHECKED_SEQUENCES]]

    def part(self, tensor: Tensor, piece: slice, of_query: bool) -> Tensor:
        """A slice of a tensor as [B, H, L, E]."""
        heads = slice(0, self.cell.group_size if of_query else 1)
        return tensor[piece, heads].transpose(0, 1)[None] if self.cell.lengths else tensor[piece, heads]

    def parts(self, results: list[Tensor]) -> list[Tensor]:
        """The checked parts of [out, gradients...], slice by slice."""
        return [self.part(t, piece, n < 2) for piece in self.pieces() for n, t in enumerate(results)]


def _plain(head_dims: tuple[int, ...] = (64, 128, 256), lengths=tuple(512 << n for n in range(6))) -> list[Cell]:
    return [
        Cell(
            "plain",
            {"B": TOKENS // length, "H": HIDDEN // head_dim, "L": length, "E": head_dim},
            {"causal": True} if causal else {},
            kind=f"E {head_dim}, {'causal' if causal else 'full'}",
        )
        for head_dim in head_dims
        for causal in (False, True)
        for length in lengths
    ]


def _features() -> list[Cell]:
    def cell(kind: str, head_dim: int = 128, *, dtype=torch.bfloat16, sizes: dict | None = None, **options) -> Cell:
        sizes = {"B": 4, "H": 16, "L": 4096, "E": head_dim} | (sizes or {})
        return Cell("features", sizes, options, dtype, kind)

    return [
        cell("bool mask", mask="random"),
        cell("padding mask", mask="padding"),
        cell("block-sparse mask", mask="blocks"),
        cell("bias", 64, bias="frozen"),
        cell("bias with gradient", 64, bias="learned"),
        cell("bool mask, GQA", sizes={"Hkv": 4}, mask="random"),
        cell("dropout", dropout=0.1),
        *(cell("float32", head_dim, dtype=torch.float32, sizes={"B": 2, "L": 2048}) for head_dim in (64, 128)),
        *(
            cell("tf32", head_dim, dtype=torch.float32, sizes={"B": 1, "L": 2048}, **options)
            for head_dim in (64, 128, 256)
            for options in ({"tf32": True}, {"causal": True, "tf32": True})
        ),
        *(cell("other head dims", head_dim) for head_dim in (80, 96, 160)),
        cell("other head dims", 192, sizes={"Ev": 128}),
        cell("E 512", 512, sizes={"B": 1, "H": 4}),
        cell("GQA", sizes={"B": 2, "H": 32, "Hkv": 8}, causal=True),
        cell("GQA", sizes={"B": 1, "H": 64, "Hkv": 8, "L": 8192}, causal=True),
        cell("GQA", 64, sizes={"H": 32, "Hkv": 4, "L": 2048}, causal=True),
        cell("window", sizes={"B": 2, "L": 8192}, causal=True, window=1024),
        cell("window", sizes={"B": 1, "L": 32768}, causal=True, window=4096),
        cell("window", 64, sizes={"B": 2, "H": 32, "L": 8192}, causal=True, window=128),
        cell("softcap", causal=True, softcap=50.0),
        cell("ALiBi", causal=True, alibi=True),
        cell("deterministic", 64, sizes={"H": 32}, causal=True, deterministic=True),
        cell("deterministic", causal=True, deterministic=True),
        cell("deterministic", deterministic=True),
        cell("deterministic", 256, sizes={"H": 8}, causal=True, deterministic=True),
    ]


def _between() -> list[Cell]:
    def cell(kind: str, *sizes: int, key_heads: int | None = None, dtype=torch.bfloat16, **options) -> Cell:
        named = dict(zip("BHLE", sizes, strict=True))
        return Cell("between", named | ({"Hkv": key_heads} if key_heads else {}), options, dtype, kind)

    odd = ((7, 13, 577, 64), (5, 9, 1536, 128), (3, 11, 3000, 64), (1, 13, 5555, 128))
    return [
        *(cell("lengths", *sizes, **options) for sizes in odd for options in ({}, {"causal": True})),
        cell("E 192", 4, 16, 4096, 192),
        cell("MQA", 8, 16, 2048, 128, key_heads=1, causal=True),
        *(cell("band", 2, 2048 // head_dim, 8192, head_dim, band=300) for head_dim in (64, 128)),
        cell("dropout, E 64", 4, 32, 4096, 64, causal=True, dropout=0.1),
        cell("softcap, E 256", 2, 16, 4096, 256, key_heads=8, causal=True, softcap=50.0),  # Gemma 2, alternating layers
        cell("softcap, E 256", 2, 16, 8192, 256, key_heads=8, causal=True, window=4095, softcap=50.0),
        cell("mask, E 256", 4, 8, 4096, 256, mask="random"),
        cell("mask per head", 4, 16, 2048, 96, mask="heads"),
        cell("E 320", 2, 8, 2048, 320),
        *(cell("many heads", 4, 48, length, 128, causal=True) for length in (1024, 2048, 4096)),
        cell("few CTAs", 1, 16, 2048, 128),
        *(cell("vision windows", 4096, 4, length, 32) for length in (49, 64)),
        cell("vision windows", 4096, 6, 49, 16),
    ]


def _packed() -> list[Cell]:
    numbers = random.Random(0)
    mixes = {
        "128 to 4096": tuple(numbers.randint(128, 4096) for _ in range(28)),
        "one of 16384, 64 of 256": (16384, *[256] * 64),
        "512 of 64": (64,) * 512,
        "8 of 4096": (4096,) * 8,
    }
    return [
        Cell(
            "packed",
            {"sequences": len(lengths), "T": sum(lengths), "H": 16 if heads == 16 else 32, "Hkv": heads, "E": 128},
            {"causal": True},
            kind=kind,
            lengths=lengths,
        )
        for kind, lengths in mixes.items()
        for heads in (16, 8)
    ]


def _spans() -> list[Cell]:
    def cell(pattern: str, head_dim: int, length: int) -> Cell:
        sizes = {"B": 1, "H": HIDDEN // head_dim, "L": length, "E": head_dim}
        return Cell("spans", sizes, {"spans": pattern}, kind=f"E {head_dim}")

    return [
        *(cell(pattern, 128, length) for length in (8192, 32768) for pattern in PATTERNS),
        *(cell(pattern, head_dim, 32768) for head_dim in (64, 256) for pattern in PATTERNS),
    ]


def _blocks() -> list[Cell]:
    def cell(pattern: str, size: int, density: float, length: int) -> Cell:
        sizes = {"B": 1, "H": 16, "L": length, "E": 128}
        return Cell("blocks", sizes, {"blocks": pattern, "size": size, "density": density}, kind=f"size {size}")

    at_both_lengths = {"random": (0.25, 0.1), "everything": (1.0,)}
    at_one = {"random": (0.5, 0.25, 0.1, 0.05), "local": (0.25, 0.1), "everything": (1.0,)}
    patterns = {
        (16384, 128): at_one,
        (16384, 64): at_one | {"video": (0.25, 0.1)},
        (32768, 128): at_both_lengths,
        (32768, 64): at_both_lengths,
    }
    return [
        cell(pattern, size, density, length)
        for (length, size), of_size in patterns.items()
        for pattern, densities in of_size.items()
        for density in densities
    ]


def _float8() -> list[Cell]:
    return [dataclasses.replace(cell, family="float8") for cell in _plain(lengths=(1024, 4096, 16384))]


def _short() -> list[Cell]:
    shapes = ((1, 128, 16, 64), (8, 128, 16, 64), (64, 128, 12, 64), (64, 256, 16, 64), (16, 577, 16, 64), (8, 1024, 16, 80))
    shapes += ((128, 64, 8, 32),)
    plain = [dataclasses.replace(cell, family="short", kind="plain, L <= 1024") for cell in _plain() if cell.sizes["L"] <= 1024]
    return [Cell("short", dict(zip("BLHE", shape, strict=True)), kind="short") for shape in shapes] + plain


def _general() -> list[Cell]:
    """The cells of one kernel family, compared with FlashAttention-2: shapes of language, vision and diffusion models."""

    def cell(kind: str, *, dtype=torch.bfloat16, causal: bool = False, **sizes: int) -> Cell:
        return Cell("between", sizes, {"causal": True} if causal else {}, dtype, kind)

    def window(head_dim: int, width: int) -> Cell:  # packed, as torch's function has no window
        heads, lengths = HIDDEN // head_dim, (4096,) * 4
        sizes = {"sequences": len(lengths), "T": sum(lengths), "H": heads, "E": head_dim}
        return Cell("packed", sizes, {"causal": True, "window": width}, kind="window", lengths=lengths)

    return [
        *_plain((64, 96, 128, 256), (512, 2048, 4096, 8192)),
        cell("E 32", B=16, H=64, L=1024, E=32),
        cell("vision", B=64, H=16, L=197, E=64),
        cell("diffusion, cross attention", B=4, H=10, L=4096, S=77, E=64),
        cell("diffusion, E 40", B=4, H=8, L=4096, E=40),
        cell("E 80", B=8, H=25, L=2048, E=80),
        cell("GQA", B=8, H=32, Hkv=8, L=2048, E=128, causal=True),
        cell("float16", B=5, H=32, L=3000, E=64, dtype=torch.float16),
        window(64, 128),
        window(128, 1024),
        *(Cell("calls", {"B": 8, "H": 16, "L": length, "E": 64}, kind="calls") for length in (197, 512, 1024)),
    ]


CELLS = {
    "plain": _plain(),
    "features": _features(),
    "between": _between(),
    "packed": _packed(),
    "short": _short(),
    "host": [Cell("host", {"B": 1, "H": 8, "L": 128, "E": 64}, kind="host")],
}
SPARSE = {"spans": _spans(), "blocks": _blocks()}  # what --sparse measures
IN_FLOAT8 = {"float8": _float8()}  # only measured if named
GENERAL = _general()  # what --kernel sm80 measures
# A check of the benchmark itself: seconds in total, on any device.
QUICK = [
    Cell("plain", {"B": 2, "H": 2, "L": 128, "E": 64}, {"causal": True}, torch.float32, "E 64, causal"),
    Cell("plain", {"B": 2, "H": 2, "L": 128, "E": 64}, kind="E 64, full"),
    *(
        Cell("features", {"B": 2, "H": 4, "Hkv": heads, "L": 128, "E": 32}, options, torch.float32, kind)
        for kind, heads, options in (
            ("bool mask", 4, {"mask": "random"}),
            ("block-sparse mask", 4, {"mask": "blocks"}),
            ("padding mask", 2, {"mask": "padding"}),
            ("bias with gradient", 4, {"bias": "learned"}),
            ("window", 2, {"causal": True, "window": 17}),
            ("band", 2, {"band": 17}),
            ("mask per head", 4, {"mask": "heads"}),
            ("ALiBi", 2, {"causal": True, "alibi": True, "softcap": 5.0}),
            ("dropout", 4, {"dropout": 0.25}),
            ("deterministic", 4, {"deterministic": True}),
        )
    ),
    *(
        Cell("spans", {"B": 1, "H": 2, "L": 128, "E": 32}, {"spans": pattern}, torch.float32, "E 128")
        for pattern in ("documents", "prefix", "4 sinks, window 1024")
    ),
    *(
        Cell(
            "blocks",
            {"B": 1, "H": 2, "L": 512, "E": 32},
            {"blocks": pattern, "size": 64, "density": density},
            torch.float32,
            "size 64",
        )
        for pattern, density in (("random", 0.25), ("video", 0.5), ("everything", 1.0))
    ),
    *(
        Cell("float8", {"B": 2, "H": 2, "L": 256, "E": 64}, options, kind=f"E 64, {'causal' if options else 'full'}")
        for options in ({}, {"causal": True})
    ),
    Cell(
        "packed",
        {"sequences": 3, "T": 100, "H": 4, "Hkv": 2, "E": 32},
        {"causal": True},
        torch.float32,
        "128 to 4096",
        (20, 1, 79),
    ),
]
GENERAL_QUICK = [
    Cell("plain", {"B": 2, "H": 2, "L": 128, "E": 64}, {"causal": True}, kind="E 64, causal"),
    Cell("between", {"B": 2, "H": 2, "L": 128, "S": 77, "E": 40}, kind="diffusion, cross attention"),
    Cell(
        "packed", {"sequences": 3, "T": 100, "H": 2, "E": 64}, {"causal": True, "window": 5}, kind="window", lengths=(20, 1, 79)
    ),
    Cell("calls", {"B": 2, "H": 2, "L": 33, "E": 64}, kind="calls"),
]
