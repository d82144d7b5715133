"""Every differentiable function and raw operator as a case: a call of ours, the same mathematics in torch's own operations, and
the sizes of its inputs. `transforms.py` differentiates both.

A case's leaves are the inputs that gradients are wanted of; its `rest` are integer and bool tensors, and constants. Every size
that a model may leave open follows from one number n, so that a graph traced at one n can be called at another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import flash_online
import flash_online.functional as F
from flash_online import reference
from flash_online._ops import accumulator_of

RAW = torch.ops.flash_online


@dataclass(frozen=True)
class Case:
    """ours(*leaves, *rest) and plain(*leaves, *rest) -> a tensor, or a tuple of floating ones."""

    ours: Callable[..., Tensor | tuple[Tensor, ...]]
    plain: Callable[..., Tensor | tuple[Tensor, ...]]
    shapes: Callable[[int], list[tuple[int, ...]]]
    rest: Callable[[int], list[Tensor]] = lambda n: []
    wide: tuple[int, ...] = ()  # the leaves that are float32 with 16-bit ones: statistics, sinks, slopes

    def inputs(self, n: int, dtype: torch.dtype, device: str) -> tuple[list[Tensor], list[Tensor]]:
        """The leaves and the rest at this n, equal numbers on every device."""
        g = torch.Generator().manual_seed(n)
        leaves = []
        for i, shape in enumerate(self.shapes(n)):
            kind = accumulator_of(dtype) if i in self.wide else dtype
            leaves.append(torch.randn(shape, generator=g).to(device, kind))
        rest = [t.to(device) for t in self.rest(n)]
        return leaves, [t.to(accumulator_of(dtype)) if t.is_floating_point() else t for t in rest]


CASES: dict[str, Case] = {}


# --- attention --------------------------------------------------------------------------------------------------------------


def qkv(n: int, heads: tuple[int, int] = (2, 2)) -> list[tuple[int, ...]]:
    return [(2, heads[0], n, 4), (2, heads[1], n + 1, 4), (2, heads[1], n + 1, 3)]


def dense(query, key, value, **options):
    return reference.attention(query, key, value, **options)


CASES["sdpa"] = Case(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), dense, qkv)
CASES["sdpa causal"] = Case(
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), lambda q, k, v: dense(q, k, v, causal=True), qkv
)
CASES["sdpa float mask"] = Case(
    lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
    lambda q, k, v, m: dense(q, k, v, mask=m),
    lambda n: [*qkv(n), (2, 1, n, n + 1)],
)
CASES["sdpa bool mask"] = Case(
    lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
    lambda q, k, v, m: dense(q, k, v, mask=m),
    qkv,
    lambda n: [(torch.arange(n * (n + 1)).view(n, n + 1) % 3) > 0],
)
CASES["sdpa gqa"] = Case(
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), dense, lambda n: qkv(n, (4, 2))
)
CASES["sdpa broadcast"] = Case(
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v), dense, lambda n: [(2, 1, n, 4), (3, n + 1, 4), (2, 3, n + 1, 3)]
)


def attention_case(name: str, options: dict, more: list | None = None, *, wide: bool = True, plain: dict | None = None):
    """A case of flash_online.attention with constant options, and one more leaf: (its option, its shape at n)."""
    option, shape = more or (None, None)

    def call(module, given):
        def attend(q, k, v, *extra):
            extra = {option: extra[0]} if extra else {}
            return module.attention(q, k, v, **extra, **given)

        return attend

    shapes = qkv if shape is None else lambda n: [*qkv(n), shape(n)]
    given = {**options, **(plain or {})}
    given.pop("deterministic", None)
    CASES[name] = Case(call(flash_online, options), call(reference, given), shapes, wide=(3,) if shape and wide else ())


attention_case("attention window", {"window": (2, 1), "alignment": "lower_right"})
attention_case("attention softcap", {"softcap": 2.0})
attention_case("attention sinks", {"causal": True}, ["sinks", lambda n: (2,)])
attention_case("attention lse", {"return_lse": True, "causal": True, "alignment": "lower_right"})
attention_case("attention deterministic", {"deterministic": True, "causal": True})
attention_case("attention mask of a row", {"softcap": 3.0}, ["mask", lambda n: (1, 1, 1, n + 1)], wide=False)
CASES["attention alibi"] = Case(
    lambda q, k, v, s: flash_online.attention(q, k, v, alibi_slopes=s, causal=True),
    lambda q, k, v, s: dense(q, k, v, alibi_slopes=s, causal=True),
    qkv,
    lambda n: [torch.tensor([0.5, 0.25])],
)


def spans_of_queries(n: int) -> Tensor:
    """Two intervals of keys per query, some of them empty, for both heads."""
    begin = torch.arange(n) // 2
    return torch.stack([begin, begin + 2, torch.full_like(begin, n - 1), torch.arange(n) % 3 + n - 1], -1).int()[None, None]


def spans_of_keys(n: int) -> Tensor:
    """An interval of queries per key and head."""
    begin = torch.arange(n + 1) // 3
    return torch.stack([torch.stack([begin, begin + n - h], -1) for h in range(2)])[None].int()


CASES["attention spans"] = Case(
    lambda q, k, v, a, b: flash_online.attention(q, k, v, query_spans=a, key_spans=b),
    lambda q, k, v, a, b: dense(q, k, v, query_spans=a, key_spans=b),
    qkv,
    lambda n: [spans_of_queries(n), spans_of_keys(n)],
)


def rows_of_blocks(n: int) -> list[tuple[int, ...]]:
    """A few rows more than a block has, and little else: hessians have all pairs of numbers."""
    return [(1, 1, n + 61, 2), (1, 1, n + 62, 2), (1, 1, n + 62, 1)]


def lists_of_blocks(n: int) -> list[Tensor]:
    """Counts and indices: the first block of queries sees the first block of keys, the second one both."""
    return [torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([[[0, 1], [0, 1]]], dtype=torch.int32)]


CASES["attention blocks"] = Case(
    lambda q, k, v, c, i: flash_online.attention(q, k, v, causal=True, blocks=flash_online.BlockList(c, i, (64, 64))),
    lambda q, k, v, c, i: dense(q, k, v, causal=True, blocks=(c, i, (64, 64))),
    rows_of_blocks,
    lists_of_blocks,
)


# --- packed sequences -------------------------------------------------------------------------------------------------------


LONGEST = 16  # of the sequences, for every n: a number that no tracer has to follow


def packed(n: int) -> list[tuple[int, ...]]:
    return [(n + 4, 2, 4), (n + 5, 2, 4), (n + 5, 2, 3)]


def starts(n: int) -> list[Tensor]:
    """Three sequences: n + 1 queries and n keys, none and one, 3 and 4."""
    return [torch.tensor([0, n + 1, n + 1, n + 4], dtype=torch.int32), torch.tensor([0, n, n + 1, n + 5], dtype=torch.int32)]


def dense_of_packed(query, key, value, starts_q, starts_k, sinks=None, causal=False):
    """Packed attention as one dense call with a mask: the number of a row's sequence and its place in it, compared."""
    (at_q, sequence_q), (at_k, sequence_k) = (places(t.shape[0], s) for t, s in ((query, starts_q), (key, starts_k)))
    seen = sequence_q[:, None] == sequence_k[None]
    if causal:
        lengths_q, lengths_k = starts_q.diff(), starts_k.diff()
        shift = (lengths_k - lengths_q)[sequence_q.clamp(0, len(lengths_q) - 1)]
        seen = seen & (at_k[None] <= (at_q + shift)[:, None])
    out, lse = reference.attention(*(t.transpose(0, 1) for t in (query, key, value)), mask=seen, sinks=sinks, return_lse=True)
    return out.transpose(0, 1), lse


def places(rows: int, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    index = torch.arange(rows, device=cu_seqlens.device)
    sequence = (index[:, None] >= cu_seqlens[None]).sum(1) - 1
    return index - cu_seqlens[sequence.clamp(min=0)], sequence


CASES["varlen"] = Case(
    lambda q, k, v, a, b: flash_online.varlen_attention(q, k, v, a, b, LONGEST, LONGEST),
    lambda q, k, v, a, b: dense_of_packed(q, k, v, a, b)[0],
    packed,
    starts,
)


CASES["varlen spans"] = Case(
    lambda q, k, v, a, b, s: flash_online.varlen_attention(q, k, v, a, b, LONGEST, LONGEST, query_spans=s),
    lambda q, k, v, a, b, s: reference.varlen_attention(q, k, v, a, b, LONGEST, LONGEST, query_spans=s),
    packed,
    lambda n: [*starts(n), torch.arange(n + 4).unsqueeze(-1).int() // 2 + torch.tensor([0, 2], dtype=torch.int32)],
)


def finite(out, lse):
    return out, torch.where(lse.isinf(), 0, lse)


CASES["varlen causal sinks lse"] = Case(
    lambda q, k, v, s, a, b: finite(
        *flash_online.varlen_attention(q, k, v, a, b, LONGEST, LONGEST, causal=True, sinks=s, return_lse=True)
    ),
    lambda q, k, v, s, a, b: finite(*dense_of_packed(q, k, v, a, b, s, causal=True)),
    lambda n: [*packed(n), (2,)],
    starts,
    wide=(3,),
)


# --- merge ------------------------------------------------------------------------------------------------------------------


def merged(n: int) -> list[tuple[int, ...]]:
    return [(n, 2, 3), (n, 2, 3), (n, 2), (n, 2)]


def plain_merge(a, b, la, lb):
    return reference.merge_attention([a, b], [la, lb])


CASES["merge"] = Case(lambda a, b, la, lb: flash_online.merge_attention([a, b], [la, lb]), plain_merge, merged, wide=(2, 3))


# --- rows -------------------------------------------------------------------------------------------------------------------


def rows(n: int) -> list[tuple[int, ...]]:
    return [(n, 6)]


def chosen(x, indices, dim, renormalize=False):
    """The probabilities at these indices; which they are does not depend on the input, for a derivative."""
    taken = torch.softmax(x, dim).gather(dim, indices)
    return taken / taken.sum(dim, keepdim=True) if renormalize else taken


def plain_topk(x, renormalize=False):
    return chosen(x, x.topk(3, -1).indices, -1, renormalize)


CASES["softmax"] = Case(lambda x: F.softmax(x, 1), lambda x: reference.softmax(x, 1), rows)
CASES["softmax of columns"] = Case(lambda x: flash_online.softmax(x, 0), lambda x: reference.softmax(x, 0), rows)
CASES["log_softmax"] = Case(lambda x: F.log_softmax(x, 1), lambda x: reference.log_softmax(x, 1), rows)
CASES["logsumexp"] = Case(lambda x: flash_online.logsumexp(x, 1), lambda x: reference.logsumexp(x, 1), rows)
CASES["topk_softmax"] = Case(
    lambda x: flash_online.topk_softmax(x, 3, renormalize=True)[0], lambda x: plain_topk(x, True), rows
)


# --- losses -----------------------------------------------------------------------------------------------------------------


def plain_loss(
    x, target, weight=None, reduction="mean", label_smoothing=0.0, z_loss=0.0, return_lse=False, return_entropy=False
):
    """Cross-entropy in operations that every transform of torch takes; targets of -100 are ignored."""
    classes = x.shape[1]
    w = torch.ones(classes, dtype=x.dtype, device=x.device) if weight is None else weight.to(x.dtype)
    lse = torch.logsumexp(x, 1)
    kept = torch.ones_like(lse, dtype=torch.bool)
    if target.is_floating_point():
        wanted, row_weight = target, torch.ones_like(lse)
    else:
        kept = target != -100
        hit = torch.arange(classes, device=x.device) == target.clamp(min=0)[:, None]
        wanted = hit.to(x.dtype)
        row_weight = torch.where(kept, (wanted * w).sum(1), 0)
    a = w * ((1 - label_smoothing) * wanted + label_smoothing / classes)
    loss = torch.where(kept, (a * (lse[:, None] - x)).sum(1), 0)
    penalty = z_loss * torch.where(kept, lse, 0).square()
    if reduction == "mean":
        loss = loss.sum() / row_weight.sum() + penalty.sum() / kept.sum()
    else:
        loss = loss + penalty if reduction == "none" else (loss + penalty).sum()
    results = [loss, *([lse] if return_lse else [])]
    if return_entropy:
        p = (x - lse[:, None]).exp()
        results.append(torch.where(kept, lse - (p * x).sum(1), 0))
    return tuple(results) if len(results) > 1 else loss


def targets(n: int) -> list[Tensor]:
    target = torch.arange(n) * 5 % 6
    target[1] = -100
    return [target]


WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.25, 1.5, 0.75])


def loss_case(name: str, module, *, weighted: bool = False, soft: bool = False, **options):
    """A case of a module's cross_entropy. Class weights with logits of 16 bits are float32, which flash_online's takes."""

    def call(function):
        def loss(x, *rest):
            target, *weight = reversed(rest) if soft else rest
            return function(x, target, *(reversed(weight) if soft else weight), **options)

        return loss

    def soft_call(function):
        return lambda x, t, *weight: function(x, t, *weight, **options)

    constants = [WEIGHT] if weighted else []
    if soft:
        CASES[name] = Case(
            soft_call(module.cross_entropy), soft_call(plain_loss), lambda n: [(n, 6), (n, 6)], lambda n: constants
        )
    else:
        CASES[name] = Case(soft_call(module.cross_entropy), soft_call(plain_loss), rows, lambda n: [*targets(n), *constants])


for reduction in ("mean", "sum", "none"):
    loss_case(f"cross_entropy {reduction}", F, reduction=reduction)
loss_case("cross_entropy weights", flash_online, weighted=True)
loss_case("cross_entropy smoothing", F, label_smoothing=0.2)
loss_case("cross_entropy probabilities", F, soft=True)
loss_case("cross_entropy weighted probabilities", flash_online, soft=True, weighted=True, label_smoothing=0.1, reduction="sum")
loss_case("cross_entropy z_loss", flash_online, z_loss=0.1)
loss_case("cross_entropy entropy", flash_online, return_entropy=True)
loss_case("cross_entropy probabilities entropy", flash_online, soft=True, return_entropy=True)
loss_case("cross_entropy weighted entropy", flash_online, soft=True, weighted=True, return_entropy=True, reduction="sum")
ALL = {"z_loss": 0.1, "label_smoothing": 0.1, "return_lse": True, "return_entropy": True, "reduction": "none"}
loss_case("cross_entropy all", flash_online, weighted=True, **ALL)


def linear_call(function, **options):
    return lambda x, w, b, *rest: function(x, w, rest[0], linear_bias=b, **options)


def plain_linear(x, w, target, *, linear_bias, **options):
    return plain_loss(x @ w.t() + linear_bias, target, **options)


def linear(n: int) -> list[tuple[int, ...]]:
    return [(n, 3), (6, 3), (6,)]


CASES["linear_cross_entropy"] = Case(
    linear_call(F.linear_cross_entropy, label_smoothing=0.1), linear_call(plain_linear, label_smoothing=0.1), linear, targets
)
CASES["linear_cross_entropy none"] = Case(
    linear_call(flash_online.linear_cross_entropy, reduction="none", z_loss=0.1, return_lse=True, return_entropy=True),
    linear_call(plain_linear, reduction="none", z_loss=0.1, return_lse=True, return_entropy=True),
    linear,
    targets,
)
CASES["linear_cross_entropy scale per row"] = Case(
    lambda x, w, b, t, s: flash_online.linear_cross_entropy(x, w, t, linear_bias=b, scale=s, softcap=2.0, reduction="sum"),
    lambda x, w, b, t, s: plain_loss(2 * torch.tanh((x @ w.t() + b) * s.to(x.dtype)[:, None] / 2), t, reduction="sum"),
    linear,
    lambda n: [*targets(n), torch.linspace(0.5, 1.5, n)],
)
CASES["linear_cross_entropy probabilities"] = Case(
    lambda x, w, b, t: flash_online.linear_cross_entropy(x, w, t, linear_bias=b),
    lambda x, w, b, t: plain_linear(x, w, t, linear_bias=b),
    lambda n: [*linear(n), (n, 6)],
)


# --- raw operators: the forward ones -----------------------------------------------------------------------------------------

NO_OPTIONS = (-1, -1, False, 0.5, 0.0, 0.0)  # window, alignment, scale, softcap, dropout_p
OPTIONS = (2, 1, True, 0.5, 2.0, 0.0)
PLAIN_OPTIONS = {"window": (2, 1), "alignment": "lower_right", "scale": 0.5, "softcap": 2.0}


def raw_attention(operator):
    return lambda q, k, v, mask, sinks: finite(*operator(q, k, v, mask, None, sinks, None, *OPTIONS)[:2])


def plain_attention(q, k, v, mask, sinks):
    return finite(*dense(q, k, v, mask=mask, sinks=sinks, return_lse=True, **PLAIN_OPTIONS))


def masked(n: int) -> list[tuple[int, ...]]:
    return [*qkv(n), (2, 1, n, n + 1), (2,)]


def raw_varlen(operator):
    return lambda q, k, v, sinks, a, b: finite(
        *operator(q, k, v, a, b, None, sinks, None, q.shape[0], k.shape[0], *NO_OPTIONS)[:2]
    )


def plain_varlen(q, k, v, sinks, a, b):
    return finite(*dense_of_packed(q, k, v, a, b, sinks))


def raw_loss(x, target, weight):
    return RAW.cross_entropy_forward(x, target, weight, -100, 0.1)[:2]


def plain_rows(x, target, weight):
    return plain_loss(x, target, weight, "none", 0.1, return_lse=True)


def raw_entropy(x, target, weight):
    loss, lse, _, entropy = RAW.cross_entropy_forward(x, target, weight, -100, 0.1, True)
    return loss, lse, entropy.masked_fill(target == -100, 0)


def plain_entropy(x, target, weight):
    return plain_loss(x, target, weight, "none", 0.1, return_lse=True, return_entropy=True)


def raw_linear(x, w, b, target):
    """The operator takes [N, H], [C, P, H], [C, P] and [N, P]."""
    arguments = (x, w.unsqueeze(1), b.unsqueeze(1), target.unsqueeze(1), None, None, -100, 0.1, x.dtype, 1.0, 0.0)
    loss, lse, _, entropy, *_ = RAW.linear_cross_entropy_forward(*arguments, False, True)
    return loss.squeeze(1), lse.squeeze(1), entropy.squeeze(1).masked_fill(target == -100, 0)


def plain_linear_rows(x, w, b, target, **options):
    return plain_linear(x, w, target, linear_bias=b, reduction="none", label_smoothing=0.1, return_lse=True, **options)


def raw_linear_step(x, w, b, target, grad_loss):
    """Its loss and lse; the gradients that it also returns are for the gradient grad_loss of the loss, and have none."""
    arguments = (x, w.unsqueeze(1), b.unsqueeze(1), target.unsqueeze(1), None, None, -100, 0.1, x.dtype, 1.0, 0.0)
    wanted = [True, True, True, False]
    loss, lse, *_ = RAW.linear_cross_entropy_step(*arguments, grad_loss.unsqueeze(1), None, wanted)
    return loss.squeeze(1), lse.squeeze(1)


def raw_linear_reduced(x, w, b, target):
    arguments = (x, w.unsqueeze(1), b.unsqueeze(1), target.unsqueeze(1), None, None, -100, 0.1, x.dtype, 1.0, 0.0)
    loss, lse, *_ = RAW.linear_cross_entropy_reduced(*arguments, 1, 0.0)
    return loss, lse.squeeze(1)


CASES["raw attention_forward"] = Case(raw_attention(RAW.attention_forward), plain_attention, masked, wide=(4,))
CASES["raw attention_forward_with_max_logit"] = Case(
    raw_attention(RAW.attention_forward_with_max_logit), plain_attention, masked, wide=(4,)
)
CASES["raw attention_inference_with_options"] = Case(
    lambda q, k, v, mask, sinks: finite(*RAW.attention_inference_with_options(q, k, v, mask, None, sinks, *OPTIONS[:5])),
    plain_attention,
    masked,
    wide=(4,),
)
CASES["raw attention_inference"] = Case(
    lambda q, k, v: RAW.attention_inference(q, k, v, True, 0.5), lambda q, k, v: dense(q, k, v, causal=True, scale=0.5), qkv
)
CASES["raw attention_training"] = Case(
    lambda q, k, v: RAW.attention_training(q, k, v, True, 0.5)[0], lambda q, k, v: dense(q, k, v, causal=True, scale=0.5), qkv
)
CASES["raw attention_varlen_forward"] = Case(
    raw_varlen(RAW.attention_varlen_forward),
    lambda q, k, v, s, a, b: finite(*dense_of_packed(q * (0.5 * q.shape[-1] ** 0.5), k, v, a, b, s)),
    lambda n: [*packed(n), (2,)],
    starts,
    wide=(3,),
)
CASES["raw attention_varlen_forward_with_max_logit"] = replace(
    CASES["raw attention_varlen_forward"],
    ours=raw_varlen(RAW.attention_varlen_forward_with_max_logit),
)
CASES["raw attention_merge"] = Case(
    lambda a, b, la, lb: RAW.attention_merge([a, b], [la, lb]), plain_merge, merged, wide=(2, 3)
)
CASES["raw softmax_forward"] = Case(
    lambda x: RAW.softmax_forward(x, 1, False, x.dtype), lambda x: reference.softmax(x, 1), rows
)
CASES["raw softmax_forward log"] = Case(
    lambda x: RAW.softmax_forward(x, 1, True, x.dtype), lambda x: reference.log_softmax(x, 1), rows
)
CASES["raw logsumexp_forward"] = Case(
    lambda x: RAW.logsumexp_forward(x, 1), lambda x: reference.logsumexp(x.to(accumulator_of(x.dtype)), 1), rows
)
CASES["raw topk_softmax_forward"] = Case(lambda x: RAW.topk_softmax_forward(x, 3, 1, False, x.dtype)[0], plain_topk, rows)
CASES["raw cross_entropy_forward"] = Case(raw_loss, plain_rows, rows, lambda n: [*targets(n), WEIGHT])
CASES["raw cross_entropy_forward probabilities"] = Case(raw_loss, plain_rows, lambda n: [(n, 6), (n, 6)], lambda n: [WEIGHT])
CASES["raw cross_entropy_forward entropy"] = Case(raw_entropy, plain_entropy, rows, lambda n: [*targets(n), WEIGHT])
CASES["raw cross_entropy_loss"] = Case(
    lambda x, t, w: RAW.cross_entropy_loss(x, t, w, -100, 0.1, True, x.dtype)[0],
    lambda x, t, w: plain_loss(x, t, w, "mean", 0.1),
    rows,
    lambda n: [*targets(n), WEIGHT],
)
CASES["raw linear_cross_entropy_forward"] = Case(
    raw_linear,
    lambda x, w, b, t: plain_linear_rows(x, w, b, t, return_entropy=True),
    linear,
    targets,
)
CASES["raw linear_cross_entropy_reduced"] = Case(
    raw_linear_reduced,
    lambda x, w, b, t: plain_linear(x, w, t, linear_bias=b, label_smoothing=0.1, return_lse=True),
    linear,
    targets,
)
CASES["raw linear_cross_entropy_step"] = Case(
    raw_linear_step,
    lambda x, w, b, t, _: plain_linear_rows(x, w, b, t),
    linear,
    lambda n: [*targets(n), torch.full((n,), 0.5)],
)


# --- raw operators: the backward ones, as functions of the gradient and of what was differentiated ----------------------------


def pulled(function, count: int):
    """The gradients of `function`'s first `count` inputs, for the gradients of its results: a function of both."""

    def backward(*arguments):
        inputs, grads, rest = arguments[:count], arguments[count:-1], arguments[-1]
        results, pull = torch.func.vjp(lambda *leaves: function(*leaves, *rest), *inputs)
        return pull(grads if isinstance(results, tuple) else grads[0])

    return backward


def backward_case(name, ours, forward, shapes, grads, rest=lambda n: [], wide=()):
    """A case of a backward operator: `ours` gets the leaves of the forward one, the gradients of its results and the rest."""
    count = len(shapes(5))
    total = count + len(grads(5))

    def plain(*arguments):
        return pulled(forward, count)(*arguments[:total], arguments[total:])

    CASES[name] = Case(ours, plain, lambda n: [*shapes(n), *grads(n)], rest, wide)


def raw_attention_backward(q, k, v, mask, sinks, grad_out, grad_lse):
    forward = RAW.attention_forward(q, k, v, mask, None, sinks, None, *OPTIONS)
    return RAW.attention_backward(grad_out, grad_lse, q, k, v, mask, None, sinks, None, *forward, *OPTIONS, True, False)


def raw_training_backward(q, k, v, grad_out):
    out, stats = RAW.attention_training(q, k, v, True, 0.5)
    return RAW.attention_training_backward(grad_out, q, k, v, out, stats, True, 0.5, False)


def raw_varlen_backward(q, k, v, sinks, grad_out, grad_lse, a, b):
    longest = LONGEST, LONGEST
    forward = RAW.attention_varlen_forward(q, k, v, a, b, None, sinks, None, *longest, *NO_OPTIONS)
    return RAW.attention_varlen_backward(
        grad_out, grad_lse, q, k, v, a, b, None, sinks, None, *forward, *longest, *NO_OPTIONS, False
    )


def raw_merge_backward(a, b, la, lb, grad_out, grad_lse):
    outs, lses = RAW.attention_merge_backward(grad_out, grad_lse, [a, b], [la, lb])
    return *outs, *lses


def raw_topk_backward(x, grad):
    probabilities, indices = RAW.topk_softmax_forward(x, 3, 1, True, x.dtype)
    return RAW.topk_softmax_backward(grad, probabilities, indices, x, 1, True)


def raw_loss_backward(x, target, grad_loss, grad_lse, weight):
    return RAW.cross_entropy_backward(grad_loss, grad_lse, x, target, weight, -100, 0.1, True)


def raw_entropy_backward(x, target, grad_loss, grad_lse, grad_entropy, weight):
    *_, entropy = RAW.cross_entropy_forward(x, target, weight, -100, 0.1, True)
    arguments = (grad_loss, grad_lse, x, target, weight, -100, 0.1, True, grad_entropy, entropy)
    return RAW.cross_entropy_backward(*arguments)


def raw_reduced_backward(x, grad, target, weight):
    loss, numbers = RAW.cross_entropy_loss(x, target, weight, -100, 0.1, True, x.dtype)
    return RAW.cross_entropy_loss_backward(grad, numbers, x, target, weight, -100, 0.1)


def raw_linear_backward(x, w, b, grad_loss, grad_lse, grad_entropy, target):
    arguments = (x, w.unsqueeze(1), b.unsqueeze(1), target.unsqueeze(1), None, None, -100, 0.1, x.dtype, 1.0, 0.0)
    grads = grad_loss.unsqueeze(1), grad_lse.unsqueeze(1)
    _, _, _, entropy, *_ = RAW.linear_cross_entropy_forward(*arguments, False, True)
    of_entropy = grad_entropy.masked_fill(target == -100, 0).unsqueeze(1), entropy
    found = RAW.linear_cross_entropy_backward(*arguments, *grads, None, [True, True, True, False], *of_entropy)
    return found[0], found[1].squeeze(1), found[2].squeeze(1)


backward_case(
    "raw attention_backward",
    raw_attention_backward,
    lambda *leaves: plain_attention(*leaves),
    masked,
    lambda n: [(2, 2, n, 3), (2, 2, n)],
    wide=(4, 6),
)
backward_case(
    "raw attention_training_backward",
    raw_training_backward,
    lambda q, k, v: dense(q, k, v, causal=True, scale=0.5),
    qkv,
    lambda n: [(2, 2, n, 3)],
)
backward_case(
    "raw attention_varlen_backward",
    raw_varlen_backward,
    lambda q, k, v, s, a, b: finite(*dense_of_packed(q * (0.5 * q.shape[-1] ** 0.5), k, v, a, b, s)),
    lambda n: [*packed(n), (2,)],
    lambda n: [(n + 4, 2, 3), (2, n + 4)],
    starts,
    wide=(3, 5),
)
backward_case(
    "raw attention_merge_backward",
    raw_merge_backward,
    plain_merge,
    merged,
    lambda n: [(n, 2, 3), (n, 2)],
    wide=(2, 3, 5),
)
backward_case(
    "raw softmax_backward",
    lambda x, g: RAW.softmax_backward(g, RAW.softmax_forward(x, 1, False, x.dtype), 1, False, x.dtype),
    lambda x: reference.softmax(x, 1),
    rows,
    rows,
)
backward_case(
    "raw softmax_backward log",
    lambda x, g: RAW.softmax_backward(g, RAW.softmax_forward(x, 1, True, x.dtype), 1, True, x.dtype),
    lambda x: reference.log_softmax(x, 1),
    rows,
    rows,
)
backward_case(
    "raw logsumexp_backward",
    lambda x, g: RAW.logsumexp_backward(g, x, 1),
    lambda x: reference.logsumexp(x.to(accumulator_of(x.dtype)), 1),
    rows,
    lambda n: [(n,)],
    wide=(1,),
)
backward_case(
    "raw topk_softmax_backward",
    raw_topk_backward,
    lambda x: plain_topk(x, True),
    rows,
    lambda n: [(n, 3)],
)
backward_case(
    "raw cross_entropy_backward",
    raw_loss_backward,
    plain_rows,
    lambda n: [(n, 6), (n, 6)],
    lambda n: [(n,), (n,)],
    lambda n: [WEIGHT],
    wide=(2, 3),
)
backward_case(
    "raw cross_entropy_backward entropy",
    raw_entropy_backward,
    plain_entropy,
    lambda n: [(n, 6), (n, 6)],
    lambda n: [(n,), (n,), (n,)],
    lambda n: [WEIGHT],
    wide=(2, 3, 4),
)
backward_case(
    "raw cross_entropy_loss_backward",
    raw_reduced_backward,
    lambda x, t, w: plain_loss(x, t, w, "mean", 0.1),
    rows,
    lambda n: [()],
    lambda n: [*targets(n), WEIGHT],
)
backward_case(
    "raw linear_cross_entropy_backward",
    raw_linear_backward,
    lambda x, w, b, t: plain_linear_rows(x, w, b, t, return_entropy=True),
    linear,
    lambda n: [(n,), (n,), (n,)],
    targets,
    wide=(3, 4, 5),
)
