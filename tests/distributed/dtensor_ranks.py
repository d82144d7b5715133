"""What test_dtensor.py runs on 2 ranks, a mesh of one dimension, and on 4, a mesh of 2 x 2: our functions on DTensors against
the same on plain tensors, bit for bit, without communication."""

from __future__ import annotations

import pytest
import torch
from ranks import end_process, joined
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel

import flash_online
import flash_online.functional as F
from flash_online.distributed import register_dtensor, vocab_parallel_linear_cross_entropy

TF = torch.nn.functional
WHOLE = Replicate()


def everywhere(mesh, placement):
    """That placement on the first dimension of the mesh, whole on the others."""
    return [placement, *[WHOLE] * (mesh.ndim - 1)]


class Compared:
    def __init__(self, mesh):
        self.mesh = mesh

    def check(self, function, tensors, placements, exact=True, quiet=True, reduced=()):
        """function(*tensors) on DTensors placed so, against plain ones: results and gradients. `quiet`: no communication.
        `reduced`: the numbers of tensors whose gradient is a pending sum, or is summed in another order."""
        plain = [None if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        expected = function(*plain)
        expected = expected if isinstance(expected, tuple) else (expected,)
        torch.manual_seed(3)
        grads = [torch.randn_like(r) if r.requires_grad else None for r in expected]
        placed = [
            None if t is None else distribute_tensor(t.detach(), self.mesh, p).requires_grad_(t.requires_grad)
            for t, p in zip(tensors, placements, strict=True)
        ]
        with CommDebugMode() as traffic:
            results = function(*placed)
            results = results if isinstance(results, tuple) else (results,)
        assert all(isinstance(result, DTensor) for result in results)
        forward = traffic.get_total_counts()
        cotangents = [
            None if g is None else distribute_tensor(g, self.mesh, r.placements) for g, r in zip(grads, results, strict=True)
        ]
        for got, want in zip(results, expected, strict=True):
            same(got.full_tensor(), want, exact)
        assert forward == 0 or not quiet
        differentiable = [i for i, g in enumerate(grads) if g is not None]
        if differentiable:
            leaves = [i for i, t in enumerate(plain) if t is not None and t.requires_grad]
            wanted = torch.autograd.grad([expected[i] for i in differentiable], [plain[i] for i in leaves], _present(grads))
            with CommDebugMode() as traffic:  # backward() would also sum what is pending, as it stores the gradients
                found = torch.autograd.grad(
                    [results[i] for i in differentiable], [placed[i] for i in leaves], _present(cotangents)
                )
            assert traffic.get_total_counts() == 0 or not quiet, traffic.get_comm_counts()
            for i, got, want in zip(leaves, found, wanted, strict=True):
                same(got.full_tensor(), want, exact and i not in reduced)
        return results


def _present(values):
    return [value for value in values if value is not None]


def same(got, want, exact):
    if exact:
        assert torch.equal(got, want), (got - want).abs().max()
    else:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def attention(us: Compared) -> None:
    mesh = us.mesh
    q, k, v = leaf(4, 8, 20, 16), leaf(4, 4, 20, 16), leaf(4, 4, 20, 8)
    layouts = [everywhere(mesh, Shard(0)), everywhere(mesh, Shard(1)), everywhere(mesh, WHOLE)]
    if mesh.ndim == 2:
        layouts += [[Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(1), Shard(1)], [WHOLE, Shard(1)]]
    for layout in layouts:
        us.check(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True, enable_gqa=True), (q, k, v), [layout] * 3)
        us.check(lambda *t: flash_online.attention(*t, window=(5, 2), softcap=3.0, return_lse=True), (q, k, v), [layout] * 3)
        with torch.no_grad():
            us.check(lambda *t: flash_online.attention(*t, causal=True), (q, k, v), [layout] * 3)
        results = us.check(flash_online.attention, (q, k, v), [layout] * 3)
        assert list(results[0].placements) == layout
    # Uneven batches and heads; a mask per batch, per head and for all; slopes; sinks.
    q, k, v = leaf(3, 5, 20, 16), leaf(3, 5, 20, 16), leaf(3, 5, 20, 16)
    slopes, sinks = torch.rand(5), leaf(5)
    for cut in (Shard(0), Shard(1)):
        layout = everywhere(mesh, cut)
        heads = everywhere(mesh, Shard(0) if cut.dim == 1 else WHOLE)
        for shape in ((3, 5, 20, 20), (3, 1, 1, 20), (1, 5, 20, 1), (1, 1, 20, 20)):
            mask = leaf(*shape)
            placement = cut if shape[cut.dim] != 1 else WHOLE
            us.check(
                lambda q, k, v, m: flash_online.attention(q, k, v, mask=m), (q, k, v, mask),
                [layout] * 3 + [everywhere(mesh, placement)], reduced=() if shape[cut.dim] != 1 else (3,),
            )  # fmt: skip
            with torch.no_grad():
                us.check(
                    lambda q, k, v, m: flash_online.attention(q, k, v, mask=m, return_lse=True), (q, k, v, mask),
                    [layout] * 3 + [everywhere(mesh, placement)],
                )  # fmt: skip
        us.check(
            lambda q, k, v, a, s: flash_online.attention(q, k, v, alibi_slopes=a, sinks=s, causal=True),
            (q, k, v, slopes, sinks), [layout] * 3 + [heads] * 2, reduced=(4,),
        )  # fmt: skip
        with torch.no_grad():
            us.check(
                lambda q, k, v, a, s: flash_online.attention(q, k, v, alibi_slopes=a, sinks=s, softcap=2.0),
                (q, k, v, slopes, sinks), [layout] * 3 + [heads] * 2,
            )  # fmt: skip
    # Spans: of each head and sequence, and one for all.
    q, k, v = leaf(4, 8, 20, 16), leaf(4, 4, 20, 16), leaf(4, 4, 20, 16)
    each, one = torch.randint(0, 22, (4, 8, 20, 4), dtype=torch.int32), torch.randint(0, 22, (20, 2), dtype=torch.int32)
    for cut in (Shard(0), Shard(1)):
        us.check(
            lambda q, k, v, s, t: flash_online.attention(q, k, v, query_spans=s, key_spans=t, return_lse=True),
            (q, k, v, each, one), [everywhere(mesh, cut)] * 4 + [everywhere(mesh, WHOLE)],
        )  # fmt: skip
    # The maximum logit: of each head and sequence.
    for cut in (Shard(0), Shard(1)):
        us.check(
            lambda q, k, v: flash_online.attention(q, k, v, causal=True, return_lse=True, return_max_logit=True),
            (q, k, v), [everywhere(mesh, cut)] * 3,
        )  # fmt: skip
    # Heads that cannot be cut so: 3 key heads over 2 ranks. DTensor gathers them; results are the same.
    q, k, v = leaf(2, 6, 20, 16), leaf(2, 3, 20, 16), leaf(2, 3, 20, 16)
    us.check(flash_online.attention, (q, k, v), [everywhere(mesh, Shard(1))] * 3, quiet=False)
    # A second derivative.
    q, k, v = (leaf(2, 2, 6, 4, dtype=torch.float64) for _ in range(3))

    def twice(*tensors):
        out = flash_online.attention(*tensors)
        return torch.autograd.grad((out * out).sum(), tensors, create_graph=True)

    us.check(twice, (q, k, v), [everywhere(mesh, Shard(0))] * 3, exact=False, quiet=False)
    # Packed sequences: the heads.
    q, k, v, starts = leaf(30, 8, 16), leaf(30, 4, 16), leaf(30, 4, 16), torch.tensor([0, 11, 11, 26], dtype=torch.int32)
    heads, whole = everywhere(mesh, Shard(1)), everywhere(mesh, WHOLE)
    us.check(
        lambda q, k, v, c: flash_online.varlen_attention(q, k, v, c, c, 15, 15, causal=True, return_lse=True),
        (q, k, v, starts), [heads] * 3 + [whole],
    )  # fmt: skip
    us.check(
        lambda q, k, v, c: flash_online.varlen_attention(q, k, v, c, c, 15, 15, return_max_logit=True),
        (q, k, v, starts), [heads] * 3 + [whole],
    )  # fmt: skip
    slopes, sinks = torch.rand(3, 8), leaf(8)
    us.check(
        lambda q, k, v, c, a, s: flash_online.varlen_attention(q, k, v, c, c, 15, 15, alibi_slopes=a, sinks=s),
        (q, k, v, starts, slopes, sinks), [heads] * 3 + [whole, heads, everywhere(mesh, Shard(0))],
    )  # fmt: skip
    by_head, by_key = torch.randint(0, 12, (8, 30, 4), dtype=torch.int32), torch.randint(0, 12, (30, 2), dtype=torch.int32)
    us.check(
        lambda q, k, v, c, s, t: flash_online.varlen_attention(q, k, v, c, c, 15, 15, query_spans=s, key_spans=t),
        (q, k, v, starts, by_head, by_key), [heads] * 3 + [whole, everywhere(mesh, Shard(0)), whole],
    )  # fmt: skip
    # Partial results over disjoint keys.
    outs, lses = [leaf(4, 6, 5, 8) for _ in range(3)], [leaf(4, 6, 5) for _ in range(3)]
    for cut in (Shard(0), Shard(1), Shard(2)):
        us.check(
            lambda *t: flash_online.merge_attention(t[:3], t[3:]), (*outs, *lses), [everywhere(mesh, cut)] * 6, exact=False
        )
        us.check(
            lambda *t: flash_online.merge_attention(t[:3], t[3:])[0], (*outs, *lses), [everywhere(mesh, cut)] * 6, exact=False
        )


def rows(us: Compared) -> None:
    mesh = us.mesh
    x = leaf(4, 6, 37)
    for cut in (Shard(0), Shard(1), Shard(2)):
        layout = everywhere(mesh, cut)
        for dim in range(3):
            if dim == cut.dim:
                continue
            for function in (F.softmax, F.log_softmax, flash_online.logsumexp):
                us.check(lambda t, f=function, d=dim: f(t, d), (x,), [layout])
            us.check(lambda t, d=dim: flash_online.topk_softmax(t, 3, d, renormalize=True), (x,), [layout])
    us.check(lambda t: flash_online.logsumexp(t, (1, 2)), (x,), [everywhere(mesh, Shard(0))])
    us.check(lambda t: flash_online.softmax(t, -1, torch.float64), (x,), [everywhere(mesh, Shard(1))])
    logits, target, weight = leaf(8, 11, 5), torch.randint(0, 11, (8, 5)), torch.rand(11)
    target[3, 2] = -100
    whole = everywhere(mesh, WHOLE)
    for cut, rest in ((Shard(0), Shard(0)), (Shard(2), Shard(1))):
        layouts = [everywhere(mesh, cut), everywhere(mesh, rest), whole]
        us.check(
            lambda x, t, w: flash_online.cross_entropy(
                x, t, w, reduction="none", label_smoothing=0.1, z_loss=0.1, return_lse=True, return_entropy=True
            ),
            (logits, target, weight), layouts,
        )  # fmt: skip
        for reduction in ("mean", "sum"):  # the sum over the ranks is torch's
            us.check(
                lambda x, t, w, r=reduction: F.cross_entropy(x, t, w, reduction=r), (logits, target, weight), layouts,
                exact=False, quiet=False,
            )  # fmt: skip
        probabilities = torch.softmax(torch.randn(8, 11, 5), 1).requires_grad_()
        for options in ({}, {"return_entropy": True}):
            us.check(
                lambda x, t, o=options: flash_online.cross_entropy(x, t, reduction="none", **o), (logits, probabilities),
                [layouts[0]] * 2,
            )  # fmt: skip
    hidden, head, bias, target = leaf(8, 16), leaf(11, 16), leaf(11), torch.randint(0, 11, (8,))
    layouts = [everywhere(mesh, Shard(0)), whole, whole, everywhere(mesh, Shard(0))]
    for options in ({"reduction": "none"}, {"softcap": 3.0, "label_smoothing": 0.1}, {"reduction": "sum", "z_loss": 0.1}):
        results = us.check(
            lambda x, w, b, t, o=options: flash_online.linear_cross_entropy(x, w, t, linear_bias=b, **o),
            (hidden, head, bias, target), layouts, exact=False, quiet=options == {"reduction": "none"},
        )  # fmt: skip
        assert results[0].shape == ((8,) if options == {"reduction": "none"} else ())
    us.check(
        lambda x, w, b, t, s: flash_online.linear_cross_entropy(
            x, w, t, linear_bias=b, scale=s, reduction="none", return_entropy=True, return_lse=True, top_log_probs=3
        ),
        (hidden, head, bias, target, torch.rand(8)), [*layouts, everywhere(mesh, Shard(0))], exact=False,
    )  # fmt: skip


def refused(us: Compared) -> None:
    """What would take communication is named, and under functional goes to torch."""
    mesh = us.mesh

    def placed(tensor, placement):
        return distribute_tensor(tensor, mesh, everywhere(mesh, placement))

    error = NotImplementedError
    x = torch.randn(4, 4, 8, 16)
    for placement, function, message in (
        (Shard(2), lambda t: flash_online.attention(t, t, t), r"query: .*along dimension 2.*context_parallel_attention"),
        (Shard(3), lambda t: flash_online.attention(t, t, t), r"query: .*along dimension 3"),
        (Shard(0), lambda t: flash_online.attention(t, t, t, dropout_p=0.1), "dropout_p"),
        (Shard(0), lambda t: flash_online.varlen_attention(t[0], t[0], t[0], None, None, 8, 8), None),
        (Shard(3), lambda t: flash_online.softmax(t, -1), "along dimension 3.*redistribute"),
        (Shard(1), lambda t: flash_online.logsumexp(t, (0, 1)), "along dimension 1"),
        (Shard(3), lambda t: flash_online.topk_softmax(t, 2), "along dimension 3"),
        (Shard(3), lambda t: flash_online.merge_attention([t, t], [t[..., 0]] * 2), "along dimension 3"),
        (Shard(1), lambda t: flash_online.cross_entropy(t, t), "input: .*along dimension 1.*vocab_parallel"),
    ):
        if message is not None:
            with pytest.raises(error, match=message):
                function(placed(x, placement))
    packed, starts = placed(x[0].transpose(0, 1).contiguous(), Shard(0)), placed(torch.tensor([0, 8], dtype=torch.int32), WHOLE)
    with pytest.raises(error, match="context_parallel_varlen_attention"):
        flash_online.varlen_attention(packed, packed, packed, starts, starts, 8, 8)
    with pytest.raises(error, match=r"kvcache_attention: .*to_local"):
        flash_online.kvcache_attention(*[placed(x, Shard(0))] * 3, None)
    hidden, head, target = placed(x[0, 0], WHOLE), placed(torch.randn(12, 16), Shard(0)), placed(torch.zeros(8).long(), WHOLE)
    with pytest.raises(error, match="linear_weight: .*FSDP.*vocab_parallel"):
        flash_online.linear_cross_entropy(hidden, head, target)
    with pytest.raises(error, match="weight_shard: a DTensor.*to_local"):
        vocab_parallel_linear_cross_entropy(x[0, 0], head, target.to_local(), first_class=0)
    pending = DTensor.from_local(x, mesh, everywhere(mesh, Partial()))
    with pytest.raises(error, match="Partial.*redistribute"):
        flash_online.softmax(pending, -1)
    # torch's function takes it where there is one, and explain says why; ours is planned as on this rank's part.
    classes = placed(x[0, 0], Shard(1))
    same(F.log_softmax(classes, 1).full_tensor(), TF.log_softmax(x[0, 0], 1), False)
    plan = flash_online.explain(F.log_softmax, classes, 1)
    assert not plan.ours and "along dimension 1" in plan.refused["flash_online"]
    plan = flash_online.explain(F.scaled_dot_product_attention, *[placed(x, Shard(1))] * 3)
    assert plan.ours and plan.operators == ("attention_inference",)
    with flash_online.strict(), pytest.raises(RuntimeError, match="along dimension 1"):
        F.log_softmax(classes, 1)
    # loss_parallel is torch's own, also while its function is ours.
    logits, targets = x[0, 0].clone().requires_grad_(), torch.randint(0, 16, (8,))
    loss = TF.cross_entropy(logits, targets)
    loss.backward()
    if mesh.ndim == 1:
        sharded = distribute_tensor(logits.detach(), mesh, [Shard(1)]).requires_grad_()
        with loss_parallel(), flash_online.override():
            assert TF.cross_entropy is F.cross_entropy
            parallel = TF.cross_entropy(sharded, distribute_tensor(targets, mesh, [WHOLE]))
            parallel.backward()
        same(parallel.full_tensor(), loss.detach(), False)
        assert list(sharded.grad.placements) == [Shard(1)]
        same(sharded.grad.full_tensor(), logits.grad, False)


def main() -> None:
    with joined() as (rank, ranks):
        mesh = init_device_mesh("cpu", (ranks,) if ranks == 2 else (2, 2))
        x = distribute_tensor(torch.randn(4, 6), mesh, everywhere(mesh, Shard(0)))
        with pytest.raises(NotImplementedError, match=r"register_dtensor\(\)"):
            flash_online.softmax(x, 1)
        register_dtensor()
        register_dtensor()
        torch.manual_seed(0)
        us = Compared(mesh)
        attention(us)
        rows(us)
        refused(us)
        print(f"all agree {rank}")


main()
end_process()
