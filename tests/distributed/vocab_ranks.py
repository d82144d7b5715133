"""What test_vocab.py runs on 2 and 4 ranks: the loss over a vocabulary that is cut, against one process and float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from ranks import joined
from torch.utils.checkpoint import checkpoint

import flash_online
from flash_online import linear_cross_entropy
from flash_online.distributed import _vocab, _vocab_rows, vocab_parallel_linear_cross_entropy
from flash_online.testing import assert_close_to_float64

TF = torch.nn.functional
WIDTH = 24


def cuts(classes, ranks, kind="even"):
    """(first class, count) of each rank."""
    if kind == "even":  # 101 over 4: 26, 26, 26, 23; 3 over 4: 1, 1, 1, 0
        count = -(-classes // ranks)
        return [(min(r * count, classes), max(0, min(count, classes - r * count))) for r in range(ranks)]
    counts = [classes // 2, 0, classes - classes // 2 - 1, 1] if ranks == 4 else [classes - 3, 3]
    firsts = [sum(counts[:r]) for r in range(ranks)]
    if kind == "reversed":
        return list(zip(firsts, counts, strict=True))[::-1]
    assert kind == "uneven"
    return list(zip(firsts, counts, strict=True))


def plain(input, weight, target, bias, options):
    """(loss, lse, entropy, z term) in plain torch, for float64."""
    logits, scale = TF.linear(input, weight.flatten(0, -2), None if bias is None else bias.flatten()), options.get("scale", 1.0)
    logits = logits * (scale.to(logits.dtype).unsqueeze(-1) if isinstance(scale, torch.Tensor) else scale)
    if options.get("softcap"):
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    logits = logits.unflatten(-1, weight.shape[:-1])
    logits = logits.flatten(0, input.dim() - 2) if input.dim() > 1 else logits.unsqueeze(0)
    t = target.long().reshape(logits[:, 0].shape)
    ignore_index, reduction = options.get("ignore_index", -100), options.get("reduction", "mean")
    class_weights = options.get("weight")
    loss = TF.cross_entropy(
        logits, t, None if class_weights is None else class_weights.to(logits.dtype), ignore_index=ignore_index,
        label_smoothing=options.get("label_smoothing", 0.0), reduction=reduction,
    )  # fmt: skip
    lse = torch.logsumexp(logits, 1)
    term = options.get("z_loss", 0.0) * torch.where(t == ignore_index, 0, lse).square()
    if reduction != "none":
        term = term.sum() / ((t != ignore_index).sum() if reduction == "mean" else 1)
    shape = target.shape if reduction == "none" else ()
    log_p = torch.log_softmax(logits, 1)
    entropy = torch.where(t == ignore_index, 0, -(log_p.exp() * log_p.masked_fill(log_p == -math.inf, 0)).sum(1))
    return (loss + term).reshape(shape), lse.reshape(target.shape), entropy.reshape(target.shape), term.reshape(shape)


class Ranks:
    def __init__(self, rank, ranks):
        self.rank, self.ranks = rank, ranks

    def call(self, tensors, target, cut, group=None, **options):
        """(results, leaves): of this rank's shards."""
        first, count = cut[dist.get_rank(group)]
        input, weight, bias = tensors
        shards = (input, weight[first : first + count], None if bias is None else bias[first : first + count])
        leaves = [None if t is None else t.detach().clone().requires_grad_() for t in shards]
        results = vocab_parallel_linear_cross_entropy(
            leaves[0], leaves[1], target, group=group, first_class=first, linear_bias=leaves[2], **options
        )
        return results if isinstance(results, tuple) else (results,), leaves

    def compare(self, tensors, target, cut, group=None, **options):
        """Every result and gradient against float64, within what one process's error allows; equal on all ranks to the bit."""
        first, count = cut[dist.get_rank(group)]
        input, _, bias = tensors
        everything = {f"return_{name}": True for name in ("lse", "z_loss", "argmax", "entropy")} | {"dtype": torch.float32}
        if input.dtype == torch.float64:
            everything["dtype"] = torch.float64
        (loss, lse, term, argmax, entropy), leaves = self.call(tensors, target, cut, group, **options, **everything)
        ours = loss, lse, entropy, term
        whole = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
        loss, lse, term, one_argmax, entropy = linear_cross_entropy(
            whole[0], whole[1], target, linear_bias=whole[2], **options, **everything
        )
        one = loss, lse, entropy, term
        wide = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
        truth = plain(wide[0], wide[1], target, wide[2], options)
        torch.manual_seed(7)
        grads = [torch.randn(result.shape, dtype=torch.float64) for result in truth[:3]]
        found = []
        for results, given in ((ours, leaves), (one, whole), (truth, wide)):
            outputs = [(r.double() * g).sum() for r, g in zip(results[:3], grads, strict=True)]
            inputs = [t for t in given if t is not None]
            of_loss = torch.autograd.grad(outputs[0] + outputs[1], inputs, retain_graph=True)
            found.append([*results, *of_loss, *torch.autograd.grad(outputs[2], inputs)])
        label = f"{input.dtype} {list(tensors[1].shape)} cut {cut} {options}"
        leaves = [t for t in leaves if t is not None]
        for i, (got, single, exact) in enumerate(zip(*found, strict=True)):
            if i > 3 and (i - 4) % len(leaves):  # of weight and bias, of which a rank has its rows
                single, exact = single[first : first + count], exact[first : first + count]
            dtype = input.dtype if i > 3 else got.dtype
            assert got.dtype == (dtype if i > 3 else everything["dtype"] if i not in (1, 2) else got.dtype)
            # The gradient of an entropy is a difference of logarithms of probabilities.
            magnitude = 4.0 if i < 4 + len(leaves) else 8.0
            assert_close_to_float64(got, single, exact, dtype, name=f"result {i} of {label}", magnitude=magnitude)
        assert argmax.dtype == torch.int64 and torch.equal(argmax, one_argmax), label
        whole = (*ours, argmax, found[0][4], found[0][4 + len(leaves)])
        for shared in whole:  # is the same on every rank, bit for bit
            everyones = _gathered(shared.detach(), group)
            assert all(torch.equal(_bits(shared.detach()), _bits(other)) for other in everyones), label


def _gathered(tensor, group):
    everyones = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, tensor.contiguous(), group=group)
    return everyones


def _bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def made(classes, dtype, rows=(37,), bias=True, positions=()):
    torch.manual_seed(classes)
    input, weight = torch.randn(*rows, WIDTH), torch.randn(classes, *positions, WIDTH) * 0.7
    tensors = [input.to(dtype), weight.to(dtype), torch.randn(classes, *positions).to(dtype) if bias else None]
    target = torch.randint(0, classes, (*rows, *positions))
    if target.numel() > 4:
        target.view(-1)[::5] = -100
    return tensors, target


def results(us: Ranks) -> None:
    class_weights = torch.rand(101, generator=torch.Generator().manual_seed(0)) + 0.1
    cases = [
        {}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"label_smoothing": 1.0},
        {"softcap": 2.0}, {"scale": 0.3, "softcap": 1.5, "label_smoothing": 0.2, "reduction": "none"},
        {"z_loss": 0.01, "scale": -1.7}, {"weight": class_weights}, {"weight": class_weights, "label_smoothing": 0.3},
        {"weight": class_weights, "reduction": "none", "z_loss": 0.1, "softcap": 5.0, "label_smoothing": 0.1},
        {"ignore_index": 7, "reduction": "sum", "z_loss": 0.1},
        {"scale": torch.linspace(0.25, 1, 37)}, {"scale": torch.linspace(-1, 1, 37), "softcap": 1.5, "label_smoothing": 0.2},
    ]  # fmt: skip
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for kind in ("even", "uneven", "reversed"):
            for options in cases if kind == "even" else cases[6:13:2]:
                options = dict(options)
                tensors, target = made(101, dtype)
                if "ignore_index" in options:
                    target[target == -100] = 7
                if "weight" in options and dtype == torch.float64:
                    options["weight"] = options["weight"].double()
                us.compare(tensors, target, cuts(101, us.ranks, kind), **options)
        tensors, target = made(3, dtype)
        for options in ({}, {"label_smoothing": 0.1, "softcap": 3.0}):  # over 4 ranks the last has no class
            us.compare(tensors, target, cuts(3, us.ranks), **options)
        us.compare([tensors[0].unflatten(0, (1, 37)), tensors[1], None], target.unsqueeze(0), cuts(3, us.ranks))
    tensors, target = made(11, torch.float32, rows=(2, 5), positions=(3,))
    us.compare(tensors, target, cuts(11, us.ranks), label_smoothing=0.1, softcap=4.0)
    tensors, target = made(11, torch.float32, rows=())
    us.compare(tensors, target, cuts(11, us.ranks))
    us.compare(tensors, target.to(torch.uint8), cuts(11, us.ranks), reduction="none")


def chunks(us: Ranks, patch: pytest.MonkeyPatch) -> None:
    """Many chunks and blocks of rows, an accumulator of 16-bit gradients."""
    from flash_online import _linear_cross_entropy_ops as chunked

    for name, value in (("_CHUNK_BYTES", 1), ("_CAP_BYTES", 1 << 14)):
        patch.setitem(getattr(chunked, name), "cpu", value)
    for dtype in (torch.float32, torch.bfloat16):
        tensors, target = made(101, dtype, rows=(1500,))
        for options in ({}, {"label_smoothing": 0.1}, {"softcap": 2.0, "scale": 0.5, "label_smoothing": 0.1}):
            us.compare(tensors, target, cuts(101, us.ranks), reduction="sum", **options)
    patch.undo()


def edges(us: Ranks) -> None:
    # No row is left: a mean of nothing is NaN, a sum 0, and gradients are 0 whatever the rows hold.
    cut = cuts(101, us.ranks)
    tensors, target = made(101, torch.float32)
    target.fill_(-100)
    tensors[0][3] = math.nan
    for options in ({}, {"label_smoothing": 0.1}, {"softcap": 2.0, "z_loss": 0.1, "label_smoothing": 0.1}):
        (loss,), leaves = us.call(tensors, target, cut, **options)
        assert loss.isnan()
        (loss,), leaves = us.call(tensors, target, cut, reduction="sum", **options)
        loss.backward()
        assert loss.item() == 0 and all(not t.grad.any() for t in leaves), options
    # One ignored row of NaN with others leaves their gradients finite.
    tensors, target = made(101, torch.float32)
    target[3] = -100
    clean, expected = us.call(tensors, target, cut, label_smoothing=0.1)
    tensors[0][3] = math.nan
    loss, leaves = us.call(tensors, target, cut, label_smoothing=0.1)
    loss[0].backward(), clean[0].backward()
    assert torch.equal(loss[0], clean[0]) and all(torch.equal(a.grad, b.grad) for a, b in zip(leaves, expected, strict=True))
    # A row of NaN that counts is NaN in every gradient that it reaches.
    target[3] = 1
    loss, leaves = us.call(tensors, target, cut, reduction="none")
    loss[0].sum().backward()
    assert loss[0][3].isnan() and loss[0].isnan().sum() == 1
    assert leaves[0].grad.isnan().any(1).nonzero().flatten().tolist() == [3]
    # No rows, and no classes at all.
    tensors, target = made(101, torch.float32, rows=(0,))
    (loss,), leaves = us.call(tensors, target, cut, reduction="sum")
    loss.backward()
    assert loss.item() == 0 and leaves[0].grad.shape == (0, WIDTH) and not leaves[1].grad.any()
    assert us.call(tensors, target, cut)[0][0].isnan()
    tensors, target = made(101, torch.float32)
    none = [tensors[0], tensors[1][:0], None]
    (loss, lse), _ = us.call(none, target.fill_(-100), [(0, 0)] * us.ranks, reduction="sum", return_lse=True)
    assert loss.item() == 0 and (lse == -math.inf).all()
    # Equal logits: the lowest class, in whatever order the ranks hold them.
    for kind in ("even", "reversed"):
        (_, predicted), _ = us.call([tensors[0], tensors[1] * 0, None], target, cuts(101, us.ranks, kind), return_argmax=True)
        assert not predicted.any()
    # The most likely classes, of shards with fewer classes than are wanted too.
    for classes, kind in ((101, "even"), (101, "reversed"), (3, "even")):
        (input, weight, _), target = made(classes, torch.float32)
        for top in (1, min(classes, 40)):
            options = {"top_log_probs": top, "scale": torch.linspace(0.5, 2, 37), "softcap": 3.0, "return_entropy": True}
            (_, _, values, found), _ = us.call([input, weight, None], target, cuts(classes, us.ranks, kind), **options)
            _, _, expected, _ = linear_cross_entropy(input, weight, target, **options)
            torch.testing.assert_close(values, expected)
            assert found.shape == (37, top) and (top == 1 or (found.sort(1).values.diff(dim=1) > 0).all())
            scores = torch.log_softmax(3 * torch.tanh((input @ weight.T) * options["scale"][:, None] / 3), 1)
            torch.testing.assert_close(scores.gather(1, found), values)
    with pytest.raises(flash_online.InvalidArgument, match="top_log_probs: expected 0 to the classes of all ranks, 3, got 4"):
        us.call([input, weight, None], target, cuts(3, us.ranks), top_log_probs=4)
    # Very large logits, of which one rank has all.
    far = [tensors[0], tensors[1].clone(), None]
    far[1][:5] *= 3e4
    us.compare(far, torch.zeros_like(target), cut, reduction="none")
    with torch.no_grad():
        assert not us.call(tensors, target, cut)[0][0].requires_grad
    # Autocast: products in bfloat16, a float32 loss.
    tensors, target = made(101, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        (loss,), leaves = us.call(tensors, target, cut)
        one = linear_cross_entropy(*tensors[:2], target, linear_bias=tensors[2])
    loss.backward()
    assert loss.dtype == torch.float32 and abs(loss - one) < 1e-5 and leaves[0].grad.dtype == torch.float32


def derivatives(us: Ranks) -> None:
    """Second derivatives, against one process's in float64."""
    for classes in (11, 3):
        cut = cuts(classes, us.ranks)
        first, count = cut[us.rank]
        scales = torch.linspace(0.5, 1, 6, dtype=torch.float64)
        for options in ({}, {"softcap": 2.0, "scale": 0.7, "label_smoothing": 0.2, "z_loss": 0.1}, {"scale": scales}):
            tensors, target = made(classes, torch.float64, rows=(6,))
            whole = [t.clone().requires_grad_() for t in tensors]
            options |= {"return_lse": True, "return_entropy": True}
            ours, leaves = us.call(tensors, target, cut, **options)
            one = linear_cross_entropy(whole[0], whole[1], target, linear_bias=whole[2], **options)
            found = []
            for (a, b, c), given, part in ((ours, leaves, slice(None)), (one, whole, slice(first, first + count))):
                value = a + b.sin().sum() + c.square().sum()
                grads = torch.autograd.grad(value, given, create_graph=True)
                # A function of whole values; what is a rank's own is summed over the ranks.
                torch.manual_seed(1)
                v = torch.randn(grads[0].shape, dtype=torch.float64)
                mixed = (grads[0] * v).square().sum() + grads[0].sin().sum()
                found.append([g[part] if i else g for i, g in enumerate(torch.autograd.grad(mixed, given))])
            for got, exact in zip(*found, strict=True):
                torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-11)


def wrapped(us: Ranks) -> None:
    """Checkpointed, and around a break of torch.compile's graph."""
    tensors, target = made(11, torch.float32)
    first, count = cuts(11, us.ranks)[us.rank]

    def loss(input, weight):
        return vocab_parallel_linear_cross_entropy(input * 1.5, weight, target, first_class=first)

    found = []
    for function in (loss, lambda *t: checkpoint(loss, *t, use_reentrant=False), torch.compile(loss, backend="eager")):
        leaves = [t.clone().requires_grad_() for t in (tensors[0], tensors[1][first : first + count])]
        value = function(*leaves)
        value.backward()
        found.append([value.detach(), *(t.grad for t in leaves)])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(others, found[0], strict=True))


def memory(us: Ranks, patch: pytest.MonkeyPatch) -> None:
    """No rank has more than a chunk of its own logits."""
    from flash_online import _linear_cross_entropy_ops as chunked

    sizes = []
    patch.setitem(chunked._CHUNK_BYTES, "cpu", 1 << 16)
    product = _vocab_rows._product

    def spy(out, *others):
        sizes.append(out.shape)
        product(out, *others)

    patch.setattr(_vocab_rows, "_product", spy)
    tensors, target = made(2048, torch.float32, rows=(1024,))
    (loss,), _ = us.call(tensors, target, cuts(2048, us.ranks))
    loss.backward()
    patch.undo()
    assert {shape[1] for shape in sizes} <= {2048 // us.ranks, WIDTH}
    assert max(shape[0] for shape in sizes) == 128


def traffic(us: Ranks, patch: pytest.MonkeyPatch) -> None:
    """How many numbers a row are exchanged."""
    gathered, summed = [], []

    def spied(function, seen):
        def spy(tensor, group):
            seen.append((tensor.numel(), tensor.dtype))
            return function(tensor, group)

        return spy

    patch.setattr(_vocab, "start_all_gather", spied(_vocab.start_all_gather, gathered))
    patch.setattr(_vocab, "all_reduce_", spied(_vocab.all_reduce_, summed))
    tensors, target = made(101, torch.bfloat16, rows=(50,))
    for options, numbers in (
        ({"z_loss": 0.1}, 2), ({"label_smoothing": 0.1}, 3), ({"return_argmax": True}, 4),
        ({"label_smoothing": 0.1, "return_argmax": True, "return_lse": True, "return_z_loss": True}, 5),
    ):  # fmt: skip
        (loss, *_), _ = us.call(tensors, target, cuts(101, us.ranks), **options)
        loss.backward()
        assert gathered == [(numbers * 50, torch.float32)], gathered
        assert summed == [(50 * WIDTH, torch.float32)], summed
        gathered.clear(), summed.clear()
    patch.undo()


def failures(us: Ranks) -> None:
    """Every rank raises, and the group can go on."""
    tensors, target = made(101, torch.float32)
    cut = cuts(101, us.ranks)
    first, count = cut[us.rank]
    odd = us.rank == us.ranks - 1  # the rank that is different
    call = vocab_parallel_linear_cross_entropy
    x, w, weights = tensors[0], tensors[1][first : first + count], torch.rand(101)
    learned = torch.rand(101, requires_grad=True)
    wrong = flash_online.InvalidArgument
    for message, error, arguments, options in (
        ("^input: ", wrong, (x[:30] if odd else x, w, target[:30] if odd else target), {}),
        ("^input: ", wrong, (x.double() if odd else x, w.double() if odd else w, target), {}),
        (
            "^label_smoothing: the ranks differ: 0.0 on rank 0.*0.1 on",
            wrong,
            (x, w, target),
            {"label_smoothing": 0.1 if odd else 0.0},
        ),
        ("^reduction", wrong, (x, w, target), {"reduction": "sum" if odd else "mean"}),
        ("^ignore_index.*softcap", wrong, (x, w, target), {"softcap": odd * 1.0, "ignore_index": -1 - odd}),
        ("^linear_bias", wrong, (x, w, target), {"linear_bias": w[:, 0] if odd else None}),
        ("^weight: ", wrong, (x, w, target), {"weight": weights if odd else None}),
        ("^grad mode, requires_grad", wrong, (x.clone().requires_grad_() if odd else x, w, target), {}),
        ("^return_argmax", wrong, (x, w, target), {"return_argmax": odd}),
        ("^target: the ranks differ.*checksum", wrong, (x, w, target.roll(1) if odd else target), {}),
        ("first_class: .*leaves out classes.*ranks hold", wrong, (x, w, target), {"first_class": first + odd}),
        ("first_class: .*begins before class", wrong, (x, w, target), {"first_class": first - odd}),
        ("weight: expected \\[101\\]", wrong, (x, w, target), {"weight": weights[:7]}),
        ("target: expected .*, got 101, .*out of bounds", IndexError, (x, w, torch.where(target == -100, 101, target)), {}),
        ("target: .*not probabilities", wrong, (x, w, torch.rand(37, 101)), {}),
        ("weight: expected requires_grad=False", wrong, (x, w, target), {"weight": learned}),
    ):
        options = {"first_class": first, **options}
        with pytest.raises(error, match=message):
            call(*arguments, **options)
    # What one rank refuses, the others hear of, in words.
    for message, own, arguments, options in (
        ("weight_shard: expected input's width", wrong, (x, w[:, :5], target), {}),
        ("target: expected a Tensor", TypeError, (x, w, None), {}),
        ("reduction: expected .*got 'average'", wrong, (x, w, target), {"reduction": "average"}),
        ("first_class: expected 0 or more, got -1", wrong, (x, w, target), {"first_class": -1}),
        ("softcap: expected .*got -1", wrong, (x, w, target), {"softcap": -1.0}),
        ("first_class: expected an int, got float", TypeError, (x, w, target), {"first_class": 0.5}),
    ):
        said = rf"^group: rank {us.ranks - 1} refuses its call: {own.__name__}: .*{message}"
        with pytest.raises(wrong, match=said):
            call(*(arguments if odd else (x, w, target)), **{"first_class": first, **(options if odd else {})})
        with pytest.raises(own, match=message):
            call(*arguments, **{"first_class": first, **options})
    with pytest.raises(TypeError, match="group: expected a ProcessGroup"):
        call(x, w, target, group="tensor", first_class=first)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda t: call(t, w, target, first_class=first))(x)
    us.compare(tensors, target, cut)


def groups(us: Ranks) -> None:
    """Groups of two ranks, each with a vocabulary and rows of its own."""
    pairs = [dist.new_group([r, r + 1]) for r in range(0, us.ranks, 2)]
    mine = us.rank // 2
    tensors, target = made(50 + mine, torch.float32, rows=(20 + mine,))
    us.compare(tensors, target, cuts(50 + mine, 2), pairs[mine], label_smoothing=0.1)
    mesh = dist.init_device_mesh("cpu", (us.ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    cut = cuts(50 + mine, 2)
    first, count = cut[us.rank % 2]
    (by_group,), (input, *_) = us.call((*tensors[:2], None), target, cut, pairs[mine])
    shard = tensors[1][first : first + count].requires_grad_()
    assert torch.equal(by_group, vocab_parallel_linear_cross_entropy(input, shard, target, group=mesh["tp"], first_class=first))
    if us.ranks > 2:
        others = pairs[1 - mine]
        with pytest.raises((ValueError, TypeError, RuntimeError), match="group"):
            us.call(tensors, target, [(0, 1)] * 4, others)


def main() -> None:
    with joined() as (rank, ranks), pytest.MonkeyPatch.context() as patch, flash_online.strict():
        us = Ranks(rank, ranks)
        results(us)
        chunks(us, patch)
        edges(us)
        derivatives(us)
        wrapped(us)
        memory(us, patch)
        traffic(us, patch)
        failures(us)
        groups(us)
        print(f"all agree {rank}")


main()
