"""Runs a function of flash_online and the reference, the latter in float64 and in the own dtype of the problem, forward and
backward, and compares the results."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import torch
from block_cases import mask_of_list, random_blocks
from devices import skip_without_room
from span_cases import random_spans
from torch.utils._python_dispatch import TorchDispatchMode

import flash_online
from flash_online import reference
from flash_online._span_arguments import in_spans
from flash_online.testing import assert_close_to_float64, lay_out, random_tensor

RAW = torch.ops.flash_online


def to_device(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Moves the tensor to the device together with the storage around its elements; keeps its strides and its offset."""
    if device == "cpu":
        return tensor
    storage = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return storage.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def whole_numbers(normal: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    """Whole numbers of -3 to 3 next to `factor` times these; in the same layout, the storage around them included."""
    storage = normal.as_strided((normal.untyped_storage().nbytes() // normal.element_size(),), (1,), 0)
    return (factor * storage).round_().clamp_(-3, 3).as_strided(normal.shape, normal.stride(), normal.storage_offset())


def rng_state(device: str) -> torch.Tensor:
    """The state of the device's default generator."""
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()


class Operators(TorchDispatchMode):
    """The names of our operators that run inside it."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "flash_online":
            self.names.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


class CaptureRng(TorchDispatchMode):
    """Remembers the (seed, offset) pair that attention drew, so that the reference can drop the same weights."""

    rng = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (RAW.attention_forward.default, RAW.attention_forward_with_max_logit.default):
            self.rng = args[6]
        if func in (RAW.attention_varlen_forward.default, RAW.attention_varlen_forward_with_max_logit.default):
            self.rng = args[7]
        return func(*args, **(kwargs or {}))


def gradients_of_ones(function, *inputs, **options) -> tuple[torch.Tensor, ...]:
    """The function's result, and the gradients of its inputs for a gradient of ones."""
    out = function(*inputs, **options)
    return out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))


@dataclass
class Attention:
    """A problem of attention that is small enough to print: its repr() is all that is needed to reproduce a failure."""

    dtype: torch.dtype = torch.float32
    batch: tuple = (2,)
    heads: tuple = (2, 2, 2)  # of query, key, value
    lengths: tuple = (13, 17)  # queries, keys
    head_dims: tuple = (8, 8)  # of query and key, of value
    layouts: tuple = ("contiguous",) * 4  # of query, key, value, mask
    mask: str | None = None  # bool, blocks (bool, three quarters of the blocks of 64 x 64 hidden), float, -inf
    mask_shape: tuple = (1, 1, 1, 1)  # of the dimensions before the last three, the heads, queries, keys: 1 full, 0 broadcast
    mask_rank: int = 9  # the mask keeps at most this many dimensions
    mask_dtype: torch.dtype | None = None  # of a float mask
    mask_offset: float = 0.0  # added to a float mask
    options: dict = field(default_factory=dict)
    alibi: int = 0  # the rank of the slopes, 0 for none
    sinks: bool = False
    spans: tuple = (0, 0)  # the intervals of query_spans and of key_spans, 0 for none
    head_spans: bool = False  # whether each head, and each batch, has spans, and a list of blocks, of its own
    blocks: tuple | None = None  # the size of the blocks of a list
    size: float = 1.0  # standard deviation of query, key and value
    level: float = 1.0  # that of the products of query and key is this many times as large
    wanted: str = "qkvms"  # the inputs that a gradient is wanted for
    grad_lse: bool = True
    max_logit: bool = False
    seed: int = 0
    whole: bool = False  # query and key are small whole numbers, so that their products are exact however large the scale is

    name = "attention"  # of the function, here and in the reference

    def __repr__(self):
        default = type(self)()
        said = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in said)})"

    @classmethod
    def of(cls, options: dict, **others) -> Attention:
        """Splits a line of cases.OPTIONS into tensors to make and options to hand on."""
        options = dict(options)
        made = {name: options.pop(name) for name in ("mask", "alibi", "sinks") if name in options}
        return cls(options=options, **made, **others)

    def rows(self) -> tuple[int, int]:
        """How many queries and keys the tensors have."""
        return self.lengths

    def out_shape(self) -> tuple:
        return (*self.batch, self.heads[0], self.lengths[0], self.head_dims[1])

    def lse_shape(self) -> tuple:
        return self.out_shape()[:-1]

    def arguments(self, device: str = "cpu") -> tuple:
        """The positional arguments after query, key and value."""
        return ()

    def sizes(self) -> tuple[float, float, float]:
        """The standard deviations of query, key and value."""
        return self.size * math.sqrt(self.level), self.size * math.sqrt(self.level), self.size

    def inputs(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """query, key, value and those of mask, alibi_slopes and sinks that the problem has; equal numbers on every device."""
        made = self._inputs()
        if self.whole:
            made |= {name: whole_numbers(made[name], 2 / self.size) for name in ("query", "key")}
        return {name: to_device(tensor, device) for name, tensor in made.items()}

    def _inputs(self) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(self.seed)
        (queries, keys), (head_dim, head_dim_v) = self.lengths, self.head_dims
        widths, sizes = (head_dim, head_dim, head_dim_v), self.sizes()
        shapes = zip(self.heads, (queries, keys, keys), widths, self.layouts, sizes, strict=False)
        made = {
            name: random_tensor(*self.batch, h, n, e, dtype=self.dtype, layout=layout, scale=size, generator=g)
            for name, (h, n, e, layout, size) in zip(("query", "key", "value"), shapes, strict=True)
        }
        if self.mask:
            full = (*self.batch, self.heads[0], queries, keys)
            kept = (self.mask_shape[0],) * len(self.batch) + self.mask_shape[1:]
            shape = [n if keep else 1 for n, keep in zip(full, kept, strict=True)][-self.mask_rank :]
            if self.mask == "bool":
                mask = torch.rand(shape, generator=g) > 0.4
            elif self.mask == "blocks":
                seen = torch.rand([*shape[:-2], -(-shape[-2] // 64), -(-shape[-1] // 64)], generator=g) > 0.75
                mask = seen.repeat_interleave(64, -2).repeat_interleave(64, -1)[..., : shape[-2], : shape[-1]].contiguous()
            else:
                mask = (torch.randn(shape, generator=g) + self.mask_offset).to(self.mask_dtype or self.dtype)
                if self.mask == "-inf":
                    mask = torch.where(torch.rand(shape, generator=g) > 0.4, mask, -math.inf)
            made["mask"] = lay_out(mask, self.layouts[3])
        return made | self._head_inputs(g, self.batch) | self._spans(self.lengths)

    def _spans(self, places: tuple[int, int]) -> dict[str, torch.Tensor]:
        """`places`: the queries and keys of a sequence, at most."""
        g = torch.Generator().manual_seed(self.seed + 2)
        leading = (*self.batch, self.heads[0]) if self.head_spans else ()
        sides = zip(("query_spans", "key_spans"), self.spans, self.rows(), places[::-1], strict=True)
        return {name: random_spans(g, leading, own, other, n) for name, n, own, other in sides if n}

    def lists(self, device: str) -> dict:
        """A list of blocks as an argument, if the problem has one."""
        if self.blocks is None:
            return {}
        g = torch.Generator().manual_seed(self.seed + 3)
        leading = (*self.batch, self.heads[0]) if self.head_spans else ()
        density = (0.1, 0.5, 0.9)[self.seed % 3]
        return {"blocks": random_blocks(g, leading, self.lengths, self.blocks, density, device)[0]}

    def _head_inputs(self, g, batch) -> dict[str, torch.Tensor]:
        made = {}
        accumulator = torch.float64 if self.dtype == torch.float64 else torch.float32
        if self.alibi:
            shape = [self.heads[0]] if self.alibi == 1 else [*batch, self.heads[0]]
            made["alibi_slopes"] = torch.rand(shape, generator=g).to(accumulator) * 0.5
        if self.sinks:
            made["sinks"] = torch.randn(self.heads[0], generator=g).to(accumulator)
        return made

    def check(self, device: str = "cpu") -> None:
        """Compares out, lse and every wanted gradient with float64."""
        skip_without_room(device, self.dtype, *self.head_dims)
        inputs = self.inputs(device)
        names = [n for n in inputs if n[0] in self.wanted and inputs[n].is_floating_point()]
        g = torch.Generator().manual_seed(self.seed + 1)
        grad_out = torch.randn(self.out_shape(), generator=g).to(device, self.dtype)
        accumulator = torch.float64 if self.dtype == torch.float64 else torch.float32
        grad_lse = torch.randn(self.lse_shape(), generator=g).to(device, accumulator) if self.grad_lse else None

        def run(function, convert, narrow, inputs=inputs, **more):
            leaves = {n: convert(t).detach() for n, t in inputs.items()}
            for n in names:
                leaves[n].requires_grad_()
            positional = [*(leaves[n] for n in ("query", "key", "value")), *self.arguments(device)]
            rest = {n: t for n, t in leaves.items() if n not in ("query", "key", "value")}
            more |= {"return_max_logit": True} if self.max_logit else {}
            out, lse, *largest = function(*positional, **rest, **self.lists(device), **self.options, **more, return_lse=True)
            results = {"out": out, "lse": lse}
            if largest:
                assert not largest[0].requires_grad
                results["max logit"] = largest[0]
            if names:
                pairs = [(out, grad_out.to(out.dtype))]
                if grad_lse is not None:
                    pairs.append((lse, grad_lse.to(lse.dtype)))
                # The reference's lse does not depend on the value, and without sequences its results depend on no input.
                pairs = [pair for pair in pairs if not narrow or pair[0].requires_grad]
                outputs, grads = zip(*pairs, strict=True) if pairs else ((), ())
                found = [None] * len(names)
                if pairs:
                    found = torch.autograd.grad(outputs, [leaves[n] for n in names], grads, allow_unused=narrow)
                results |= {"grad " + n: x for n, x in zip(names, found, strict=True)}
            return results

        dropout = self.options.get("dropout_p", 0.0) > 0
        with CaptureRng() as capture:
            ours = run(getattr(flash_online, self.name), lambda t: t, False)
        more = {"rng": capture.rng} if dropout else {}
        oracle = getattr(reference, self.name)
        truth = run(oracle, lambda t: t.double() if t.is_floating_point() else t, True, **more)
        plain = run(oracle, lambda t: t.clone(), True, **more)
        wide = plain
        if self.dtype in (torch.float16, torch.bfloat16):
            wide = run(oracle, lambda t: t.float() if t.is_floating_point() else t, True, **more)

        # Where scores are large, the order of a product's sum decides about weights: more samples of it.
        reordered = []
        if self.level != 1 and self.dtype == torch.float32:
            for shift in (1, self.head_dims[0] // 2):
                moved = inputs | {n: inputs[n].roll(shift, -1).flip(-1) for n in ("query", "key")}
                again = run(oracle, lambda t: t.clone(), True, inputs=moved, **more)
                for name in ("grad query", "grad key"):
                    if again.get(name) is not None:
                        again[name] = again[name].flip(-1).roll(-shift, -1)
                reordered.append(again)

        fused = [run(torch_attention, lambda t: t.clone(), True)] if self._torch_has(names, grad_lse, device) else []

        assert ours["out"].dtype == self.dtype and ours["lse"].dtype == accumulator
        magnitude = self._magnitudes(inputs, grad_out)
        for name, result in ours.items():
            rounding = accumulator if name == "lse" else torch.float32 if name == "max logit" else self.dtype
            theirs = [wide[name]] if name in ("lse", "max logit") else [plain[name], *(f[name] for f in fused)]
            theirs += [r[name] for r in reordered]
            if self.level != 1 or self.mask_offset:  # torch's math backend widens 16 bits, where they overflow
                theirs.append(wide[name])
            expected = truth[name] if truth[name] is not None else torch.zeros_like(result)
            theirs = [t if t is not None else torch.zeros_like(result) for t in theirs]
            if self.dtype == torch.float16 and name.startswith("grad") and not theirs[0].isfinite().all():
                # A head's own part of a sum over heads is beyond float16 in torch too: what the sum is, is a matter of chance.
                either = theirs[0].isfinite() | (expected.to(result.dtype) == result)
                result = torch.where(either, result, expected.to(result.dtype))
            if name.startswith("grad"):
                source = inputs[name.removeprefix("grad ")]
                assert result.dtype == source.dtype and result.shape == source.shape, name
                # Gradients of a float32 mask or sink are of the problem's products, or of a float64 problem.
                rounding = max(rounding, source.dtype, key=lambda dtype: torch.finfo(dtype).eps)
            assert_close_to_float64(result, theirs, expected, rounding, name=f"{name} of {self}", magnitude=magnitude[name])

    def _torch_has(self, names, grad_lse, device) -> bool:
        """Whether torch's own function can be asked for the same results: with a mask for what it has no option for."""
        if device != "cpu" and names == ["mask"]:  # its backward kernel then reads an lse that its forward did not make
            return False
        beyond = (
            self.sinks or self.max_logit or grad_lse is not None or self.options.get("softcap") or self.options.get("dropout_p")
        )
        return not (beyond or 0 in (*self.rows(), *self.head_dims) or self.dtype == torch.float64)

    def _magnitudes(self, inputs, grad_out) -> dict[str, float]:
        """The size of the terms that each result is summed from. The sum of n random terms has sqrt(n) times their size."""
        (queries, keys), (head_dim, head_dim_v) = self.rows(), self.head_dims
        score = _rms(inputs["value"]) * _rms(grad_out) * math.sqrt(max(head_dim_v, 1))
        dropout_p = self.options.get("dropout_p", 0.0)
        score = score / (1 - dropout_p if dropout_p < 1 else 1) + self.grad_lse
        scale = self.options.get("scale")
        scale = abs(scale if scale is not None else 1 / math.sqrt(head_dim or 1))
        batch, rows = math.prod(self.batch), math.prod(self.batch) * self.heads[0] * queries
        seen_by = [math.sqrt(self.heads[0] // h * queries / max(keys, 1)) + 1 for h in self.heads]
        mask = inputs.get("mask")
        shared = math.sqrt(rows * keys / max(mask.numel(), 1)) if mask is not None else 1.0
        return {
            "out": _rms(inputs["value"]),
            "lse": 1.0,
            "max logit": 1.0,
            "grad query": score * scale * _rms(inputs["key"]),
            "grad key": score * scale * _rms(inputs["query"]) * seen_by[1],
            "grad value": _rms(grad_out) * seen_by[2],
            "grad mask": score * shared,
            "grad sinks": score * math.sqrt(batch * queries),
        }


@dataclass(repr=False)
class Packed(Attention):
    """A problem of packed sequences: an Attention whose `lengths` are a pair for each sequence."""

    lengths: tuple = ((13, 17), (5, 5), (0, 3), (40, 21), (4, 0))
    batch: tuple = ()
    spare: tuple = (2, 3)  # queries and keys past the last sequence, which are NaN

    name = "varlen_attention"

    def rows(self):
        return tuple(sum(pair[i] for pair in self.lengths) + self.spare[i] for i in range(2))

    def out_shape(self):
        return self.rows()[0], self.heads[0], self.head_dims[1]

    def lse_shape(self):
        return self.heads[0], self.rows()[0]

    def starts(self, device: str = "cpu") -> list[torch.Tensor]:
        """cu_seqlens_q, cu_seqlens_k."""
        return [torch.tensor([0, *(pair[i] for pair in self.lengths)]).cumsum(0).to(device, torch.int32) for i in range(2)]

    def arguments(self, device: str = "cpu"):
        longest = [max((pair[i] for pair in self.lengths), default=0) for i in range(2)]
        return *self.starts(device), *longest

    def _inputs(self):
        g = torch.Generator().manual_seed(self.seed)
        (queries, keys), (head_dim, head_dim_v) = self.rows(), self.head_dims
        widths, sizes = (head_dim, head_dim, head_dim_v), self.sizes()
        shapes = zip(self.heads, (queries, keys, keys), widths, self.layouts, (0, 1, 1), sizes, strict=False)
        made = {}
        for name, (h, n, e, layout, side, size) in zip(("query", "key", "value"), shapes, strict=True):
            tensor = random_tensor(n, h, e, dtype=self.dtype, scale=size, generator=g)
            tensor[n - self.spare[side] :] = math.nan
            # The layout "expanded" expands the heads, as it expands the batch of a dense problem: equal rows would be another
            # problem, not another layout.
            swap = (0, 1) if layout == "expanded" else (0, 0)
            made[name] = lay_out(tensor.transpose(*swap), layout).transpose(*swap)
        longest = tuple(max((pair[i] for pair in self.lengths), default=0) for i in range(2))
        return made | self._head_inputs(g, [len(self.lengths)]) | self._spans(longest)

    def _torch_has(self, names, grad_lse, device):
        return False  # not for a comparison in one call


def torch_attention(
    query, key, value, mask=None, alibi_slopes=None, *, query_spans=None, key_spans=None, blocks=None, scale=None,
    return_lse=True, **visibility,
):  # fmt: skip
    """torch's scaled_dot_product_attention, by its fused kernel where that takes the call; no lse."""
    heads, (queries, keys) = query.shape[-3], (query.shape[-2], key.shape[-2])
    hidden = ~reference.visible(queries, keys, **visibility).to(query.device)
    if query_spans is not None:
        hidden = hidden | ~in_spans(torch.arange(keys, device=query.device), query_spans.unsqueeze(-2))
    if key_spans is not None:
        hidden = hidden | ~in_spans(torch.arange(queries, device=query.device).unsqueeze(-1), key_spans.unsqueeze(-3))
    if blocks is not None:
        hidden = hidden | ~mask_of_list(blocks, queries, keys)
    bias = query.new_zeros(queries, keys)
    if alibi_slopes is not None:
        shift = keys - queries if visibility.get("alignment") == "lower_right" else 0
        distance = (torch.arange(queries).unsqueeze(1) + shift - torch.arange(keys)).abs().to(query.device)
        bias = bias - alibi_slopes.to(query.dtype)[..., None, None] * distance
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    elif mask is not None:
        bias = bias + mask.to(query.dtype)
    bias = bias.masked_fill(hidden, -math.inf)
    bias = bias.expand(*query.shape[:-2], queries, keys).reshape(-1, heads, queries, keys)
    q, k, v = (t.reshape(-1, *t.shape[-3:]) for t in (query, key, value))
    k, v = k.repeat_interleave(heads // k.shape[1], 1), v.repeat_interleave(heads // v.shape[1], 1)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    return out.view(*query.shape[:-1], value.shape[-1]), out.new_zeros(())


def _rms(tensor: torch.Tensor) -> float:
    numbers = tensor[~tensor.isnan()].double()
    return numbers.square().mean().sqrt().item() if numbers.numel() else 0.0


def compare_with_reference(name: str, *args, **kwargs) -> None:
    """flash_online.<name>(*args, **kwargs), its results and gradients, against the reference of the same name."""
    g = torch.Generator().manual_seed(1)

    def run(module, convert, grads, indices=None):
        def leaf(t):
            if not isinstance(t, torch.Tensor) or not t.is_floating_point():
                return t
            return convert(t.detach()).requires_grad_(t.requires_grad)

        arguments, options = [leaf(t) for t in args], {k: leaf(t) for k, t in kwargs.items()}
        if convert is torch.Tensor.double and "dtype" in options:
            options["dtype"] = torch.float64
        leaves = [t for t in (*arguments, *options.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
        if indices is None:
            results = getattr(module, name)(*arguments, **options)
        else:
            results = _topk_at(indices, *arguments, **options)
        results = list(results) if isinstance(results, tuple) else [results]
        outputs = [t for t in results if t.is_floating_point()]
        if not grads:
            grads += [torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.device, t.dtype) for t in outputs]
        # The gradient of a row that is ignored or not finite has no meaning, but 0 times it must be 0.
        found = torch.autograd.grad(outputs, leaves, [x.to(t.dtype) for x, t in zip(grads, outputs, strict=True)])
        return results, list(found), leaves

    grads: list[torch.Tensor] = []
    ours, our_grads, leaves = run(flash_online, lambda t: t, grads)
    indices = ours[1] if name == "topk_softmax" else None
    plain, plain_grads, _ = run(reference, torch.Tensor.clone, grads, indices)
    truth, truth_grads, _ = run(reference, torch.Tensor.double, grads, indices)
    dtype = kwargs.get("dtype") or leaves[0].dtype
    said = f"{name}({', '.join(_describe(a) for a in (*args, *kwargs.items()))})"
    for i, (result, theirs, expected) in enumerate(zip(ours, plain, truth, strict=True)):
        if not result.is_floating_point():
            continue
        if name == "cross_entropy" and i == 0 and "dtype" not in kwargs:
            assert result.dtype == leaves[0].dtype, said
        size = 0.0 if name == "softmax" else _terms_of_logarithms(leaves[0], i == 0 and name != "logsumexp")
        assert_close_to_float64(result, theirs, expected, result.dtype, name=f"result {i} of {said}", magnitude=size)
    for i, (result, theirs, expected) in enumerate(zip(our_grads, plain_grads, truth_grads, strict=True)):
        assert result.dtype == leaves[i].dtype and result.shape == leaves[i].shape, said
        rounding = max(dtype, result.dtype, key=lambda d: torch.finfo(d).eps)
        # A gradient is a probability times a difference of numbers near 1, divided by the rows under a mean; an entropy's is
        # not divided.
        mean = name == "cross_entropy" and kwargs.get("reduction", "mean") == "mean" and not kwargs.get("return_entropy")
        size = 1 / max(leaves[0].numel() // leaves[0].shape[min(1, leaves[0].dim() - 1)], 1) if mean else 1.0
        assert_close_to_float64(result, theirs, expected, rounding, name=f"gradient {i} of {said}", magnitude=size)


def _terms_of_logarithms(logits: torch.Tensor, differences: bool) -> float:
    """How large the numbers are that an lse, or a difference of it and a score, is made of: in a difference an offset that all
    scores share has no part, as long as both are measured from the row's largest."""
    finite = logits.detach().double()
    finite = finite[finite.isfinite()]
    if finite.numel() == 0:
        return 0.0
    return (finite.max() - finite.min() if differences else finite.abs().max()).item()


def _topk_at(indices, input, k, dim=-1, *, renormalize=False, dtype=None):
    """reference.topk_softmax with equal probabilities in the order that ours chose: any is right."""
    probabilities = reference.softmax(input, dim, dtype).gather(dim, indices)
    largest = reference.topk_softmax(input, k, dim, dtype=dtype)[0]
    close = 1e-12 if probabilities.dtype == torch.float64 else torch.finfo(probabilities.dtype).eps
    torch.testing.assert_close(probabilities, largest, rtol=close, atol=0.0)  # these are the largest, in descending order
    assert (indices.sort(dim).values.diff(dim=dim) > 0).all(), "an index comes twice"
    if renormalize:
        probabilities = probabilities / probabilities.sum(dim, keepdim=True)
    return probabilities, indices


def _describe(argument) -> str:
    if isinstance(argument, tuple) and argument and isinstance(argument[0], str):
        return f"{argument[0]}={_describe(argument[1])}"
    if isinstance(argument, torch.Tensor):
        return f"{str(argument.dtype).removeprefix('torch.')}{list(argument.shape)} strides {list(argument.stride())}"
    return repr(argument)
