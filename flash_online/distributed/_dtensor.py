"""register_dtensor: sharding rules of our operators for DTensor, which run on local shards of batches and heads.

A rule gives, for one mesh dimension, the placement of the results for given placements of the arguments. DTensor combines the
rules of several dimensions, and redistributes arguments where no rule fits. `refusal` rejects calls that would need a
communication that the caller may not expect (a sharded sequence, class dimension or weight), and names the alternative.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from .. import _policy
from .._ops import ops

_SEQUENCE = "attention over ranks is flash_online.distributed.context_parallel_attention"
_PACKED = "packed sequences over ranks are flash_online.distributed.context_parallel_varlen_attention"
_CLASSES = "classes over ranks are flash_online.distributed.vocab_parallel_linear_cross_entropy, or torch's loss_parallel"


def refusal(function: str, position: int, tensor, dim) -> str | None:
    """Why the function does not accept this DTensor as argument number `position`, or None. `dim` is the dimension that the
    function reduces."""
    from torch.distributed.tensor import Shard

    rank, dims = tensor.dim(), []
    for placement in tensor.placements:
        if type(placement) is Shard:
            dims.append(placement.dim % max(rank, 1))
        elif not placement.is_replicate():
            return f"a DTensor placed {placement!r}: rules are for Shard and Replicate; redistribute it"
    found = next((d for d in dims if d in _whole_dims(function, position, tensor, dim)), None)
    if function in ("kvcache_attention", "cascade_attention", "cache_append"):
        return "a DTensor: there are no rules for cached keys; call it on each rank's part, tensor.to_local()"
    if function == "float8_attention":
        return "a DTensor: there are no rules for products in float8; call it on each rank's part, tensor.to_local()"
    if found is None:
        return None
    reason = f"a DTensor sharded along dimension {found}, which has to be whole"
    if function in ("attention", "scaled_dot_product_attention", "merge_attention") and found == rank - 2:
        return f"{reason}; {_SEQUENCE}"
    if function == "varlen_attention" and found == 0:
        return f"{reason}; {_PACKED}"
    if function in ("cross_entropy", "linear_cross_entropy"):
        if function == "linear_cross_entropy" and position == 1:
            return (
                f"{reason}: the weight of a module that FSDP or tensor parallelism shards; compute the loss inside that "
                f"module's forward, where FSDP has it whole; {_CLASSES}"
            )
        return f"{reason}; {_CLASSES}"
    return f"{reason}; redistribute it"


def _whole_dims(function: str, position: int, tensor: Tensor, dim) -> list[int]:
    """The dimensions, counted from 0, that must not be sharded."""
    rank = tensor.dim()
    if function in ("attention", "scaled_dot_product_attention"):
        return [rank - 2, rank - 1]
    if function == "merge_attention":
        return [rank - 1]
    if function == "varlen_attention":
        return [0, 2]
    if function == "cross_entropy":
        if position == 2:
            return [0]
        return [min(1, rank - 1)] if tensor.is_floating_point() else []
    if function == "linear_cross_entropy":
        if position == 0:
            return [rank - 1]
        return [] if position == 2 and not tensor.is_floating_point() else list(range(1 if position == 2 else 0, rank))
    if dim is None:
        return []
    return [d % max(rank, 1) for d in (dim if isinstance(dim, (tuple, list)) else (dim,))]


def _placements(specs, placement) -> list:
    """`placement` for each tensor argument, None for other arguments."""
    return [placement if hasattr(spec, "placements") else None for spec in specs]


def _cut_spans(specs, dim: int, cut) -> list:
    """Placements of the arguments after an operator's tensors and results: spans, if there are any, are whole where they are
    broadcast."""
    from torch.distributed.tensor import Replicate

    return [None if not hasattr(s, "placements") else cut if s.shape[dim] != 1 else Replicate() for s in specs]


def _heads_can_be_cut(head_dim: int, *specs) -> bool:
    """Whether equal shards of the heads of query, key and value keep each group of query heads with its key head."""
    from torch.distributed.tensor import Shard

    heads = [spec.shape[head_dim] for spec in specs]
    mesh, placed = specs[0].mesh, zip(*(spec.placements for spec in specs), strict=True)
    shards = prod(mesh.size(i) for i, placements in enumerate(placed) if Shard(head_dim) in placements)
    return len(set(heads)) == 1 or all(count % shards == 0 for count in heads)


def _attention(outputs: int, backward: bool):
    """Rules of attention_forward (3 results, 4 with max_logit), attention_inference (1), attention_inference_with_options (2)
    and attention_backward (5): each batch dimension, and heads.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    def rules(*arguments):
        grads, tensors, rest = (), arguments[:7], arguments[7:]
        if backward:
            grads, tensors, rest = arguments[:2], arguments[2:9], arguments[9:]
        elif outputs < 3:  # attention_inference has none of the optional tensors, attention_inference_with_options has no rng
            count = {1: 3, 2: 6}[outputs]
            tensors, rest = (*arguments[:count], *[None] * (7 - count)), arguments[count:]
        query, key, value, mask, alibi_slopes, sinks, rng = tensors
        head_dim = len(query.shape) - 3
        found = [([Replicate()] * outputs, _placements(arguments, Replicate()))]
        for dim in range(head_dim + 1) if rng is None else ():  # the dropout mask depends on the batch and head index
            if dim == head_dim and not _heads_can_be_cut(head_dim, query, key, value):
                continue
            cut = Shard(dim)
            masks = [None] if mask is None else [cut if mask.shape[dim] != 1 else Replicate()]
            sink = Shard(0) if dim == head_dim else Replicate()
            others = [*masks, *_placements([alibi_slopes], cut), *_placements([sinks], sink), None]
            others = others[: {1: 0, 2: 3}.get(outputs)]
            inputs = [*_placements(grads, cut), *_placements(tensors[:3], cut), *others]
            results = [cut] * outputs
            if backward:
                mask_grad = rest[9]  # after out, lse, lse_low and six options
                results[3] = (cut if mask.shape[dim] != 1 else Partial()) if mask_grad else Replicate()
                results[4] = Replicate() if sinks is None else sink if dim == head_dim else Partial()
            of_results = 3 if backward else 0  # out, lse, lse_low
            rest_cut = [*_placements(rest[:of_results], cut), *_cut_spans(rest[of_results:], dim, cut)]
            found.append((results, [*inputs, *rest_cut]))
        return found

    return rules


def _varlen(outputs: int, backward: bool):
    """Rules of attention_varlen_forward (3 results, 4 with max_logit) and _backward (4): heads."""
    from torch.distributed.tensor import Replicate, Shard

    def rules(*arguments):
        grads, tensors, rest = ((), arguments[:8], arguments[8:])
        if backward:
            grads, tensors, rest = arguments[:2], arguments[2:10], arguments[10:]
        query, key, value, _, _, alibi_slopes, sinks, rng = tensors
        found = [([Replicate()] * outputs, _placements(arguments, Replicate()))]
        if rng is None and _heads_can_be_cut(1, query, key, value):
            slopes = None if alibi_slopes is None else Shard(len(alibi_slopes.shape) - 1)
            lse = Shard(0)
            inputs = [Shard(1)] * 3 + [Replicate()] * 2 + [slopes, *_placements([sinks], Shard(0)), None]
            if backward:  # out, lse, lse_low
                inputs = [Shard(1), *_placements(grads[1:], lse), *inputs, Shard(1), lse, lse]
                results = [Shard(1)] * 3 + [Replicate() if sinks is None else Shard(0)]
                rest = rest[3:]
            else:
                results = [Shard(1), lse, lse, Shard(1)][:outputs]
            found.append((results, [*inputs, *_cut_spans(rest, 0, Shard(0))]))
        return found

    return rules


def _merge(outs, lses):
    from torch.distributed.tensor import Replicate, Shard

    count = len(outs) + len(lses)
    cuts = [Replicate(), *(Shard(dim) for dim in range(len(outs[0].shape) - 1))]
    return [([cut] * 2, [cut] * count) for cut in cuts]


def _rows(tensors: int, outputs: int, lacking: tuple[int, ...] = (), dim_at: int = 0):
    """Rules of row operators: every dimension but the reduced one, which is option number `dim_at`. `lacking`: indices of the
    arguments, then results, without that dimension."""
    from torch.distributed.tensor import Replicate, Shard

    def rules(*arguments):
        options = arguments[tensors:]
        dim = options[dim_at]
        rank = max(len(spec.shape) for spec in arguments[:tensors])
        found = [[Replicate()] * (tensors + outputs)]
        for cut in range(rank):
            if cut != dim:
                shorter = Shard(cut if cut < dim else cut - 1)
                found.append([shorter if i in lacking else Shard(cut) for i in range(tensors + outputs)])
        return [(placed[tensors:], [*placed[:tensors], *(None for _ in options)]) for placed in found]

    return rules


def _cross_entropy(backward: bool):
    """Rules of cross_entropy_forward and _backward: every dimension but the class dimension 1."""
    from torch.distributed.tensor import Replicate, Shard

    def rules(*arguments):
        grads, entropy = (
            (arguments[:2], arguments[8:]) if backward else ((), ())
        )  # entropy: its gradient and the entropy itself
        input, target, weight, *options = arguments[len(grads) : len(arguments) - len(entropy)]
        found = [([Replicate()] * (2 if backward else 4), _placements(arguments, Replicate()))]
        for dim in range(len(input.shape)):
            if dim == 1:
                continue
            row = Shard(max(dim - 1, 0))
            targets = Shard(dim) if len(target.shape) == len(input.shape) else row
            if backward:
                results = [Shard(dim), targets if options[2] else Replicate()]
            else:
                results = [*[row] * 3, row if options[2:] == [True] else Replicate()]
            inputs = [*_placements(grads, row), Shard(dim), targets, *_placements([weight], Replicate())]
            found.append((results, [*inputs, *(None for _ in options), *_placements(entropy, row)]))
        return found

    return rules


def _linear_cross_entropy(backward: bool):
    """Rules of linear_cross_entropy_forward and _backward: the rows of input. Gradients of weight and bias are then Partial
    sums."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    def rules(input, linear_weight, linear_bias, target, weight, row_scale, *others):
        whole, cut = Replicate(), Shard(0)
        tensors = (input, linear_weight, linear_bias, target, weight, row_scale)
        found = [([whole] * (4 if backward else 7), [*_placements(tensors, whole), *_placements(others, whole)])]
        inputs = [cut, whole, *_placements([linear_bias], whole), cut, *_placements([weight], whole)]
        inputs += _placements([row_scale], cut)
        given = others[5:]  # after the options that all operators have
        if backward:
            each = zip((cut, Partial(), Partial(), cut), given[3], strict=True)
            results = [placement if wanted else whole for placement, wanted in each]
        else:
            argmax, entropy, top = (*given, *(False, False, 0)[len(given) :])
            results = [cut, cut, cut, *(cut if wanted else whole for wanted in (entropy, argmax, top, top))]
        found.append((results, [*inputs, *_placements(others, cut)]))
        return found

    return rules


_registered = False


def register_dtensor() -> None:
    """Registers sharding rules of our operators with DTensor; functions then accept DTensors.

    Computed on local shards, forward and backward, without communication:

    - attention and scaled_dot_product_attention: sharded batch dimensions, and sharded heads if each group of query heads
      stays with its key head (the shards divide the key heads, or key and query heads are equal in number), with mask, slopes
      and sinks sharded alike; varlen_attention: sharded heads;
    - merge_attention, softmax, log_softmax, logsumexp, topk_softmax: every dimension but the reduced one;
    - cross_entropy: every dimension but the classes; linear_cross_entropy: the rows, if the weight is whole; its gradient is
      then a pending sum (Partial). A mean or sum of losses is a sum over ranks, as usual in torch.

    Placements that need another communication are refused by name: a sharded sequence, class dimension or weight, a pending
    sum, dropout, cached keys. flash_online.functional, and thus override(), forwards these to torch, so that torch's
    context_parallel and loss_parallel keep working. DTensor redistributes arguments with different placements, and heads that
    cannot be sharded this way. All tensors of a call are DTensors on one mesh.

    Registration is per process; a second call does nothing. DTensor's interface for it,
    torch.distributed.tensor.experimental.register_sharding, is experimental.

    Raises:
        RuntimeError: torch is built without torch.distributed.
    """
    global _registered
    if _registered:
        return
    import torch.distributed

    if not torch.distributed.is_available():
        raise RuntimeError("register_dtensor: this torch is built without torch.distributed")
    from torch.distributed.tensor.experimental import register_sharding

    table = {
        ops.attention_forward: _attention(3, False),
        ops.attention_forward_with_max_logit: _attention(4, False),
        ops.attention_inference: _attention(1, False),
        ops.attention_inference_with_options: _attention(2, False),
        ops.attention_backward: _attention(5, True),
        ops.attention_varlen_forward: _varlen(3, False),
        ops.attention_varlen_forward_with_max_logit: _varlen(4, False),
        ops.attention_varlen_backward: _varlen(4, True),
        ops.attention_merge: _merge,
        ops.softmax_forward: _rows(1, 1),
        ops.softmax_backward: _rows(2, 1),
        ops.logsumexp_forward: _rows(1, 1, lacking=(1,)),
        ops.logsumexp_backward: _rows(2, 1, lacking=(0,)),
        ops.topk_softmax_forward: _rows(1, 2, dim_at=1),
        ops.topk_softmax_backward: _rows(4, 1),
        ops.cross_entropy_forward: _cross_entropy(False),
        ops.cross_entropy_backward: _cross_entropy(True),
        ops.linear_cross_entropy_forward: _linear_cross_entropy(False),
        ops.linear_cross_entropy_backward: _linear_cross_entropy(True),
    }
    for packet, rules in table.items():
        register_sharding(packet.default)(rules)
    _policy.dtensor_refusal = refusal
    _registered = True
