"""These checks ask whether a model trains through attention over several ranks: derivatives, those of heads computed in groups
too, the losses of a model, and a compiled graph."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from context_parallel_cases import LAYOUTS, METHODS, slopes, small
from torch.utils.checkpoint import checkpoint

import flash_online
from flash_online.distributed import context_parallel_attention, context_parallel_varlen_attention, shard, unshard


def check_derivatives(rank, ranks):
    """gradcheck in float64: a rank's rows are inputs and results of a function of the whole, whose other parts stay."""
    torch.manual_seed(0)
    starts = torch.tensor([0, 3, 3, 2 * ranks], dtype=torch.int32)
    for method in METHODS:
        wholes = [torch.randn(2, 2 * ranks, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

        def dense(*tensors, method=method):
            # Each rank gives its rows of the same whole, and gets those of the result: gradients summed over the ranks.
            q, k, v, sinks = (_Same.apply(tensor) for tensor in tensors)
            results = context_parallel_attention(
                *shard([q, k, v], 1), causal=True, sinks=sinks, softcap=2.0, return_lse=True, method=method
            )
            return tuple(unshard(results, 1))

        def packed(*tensors, method=method):
            q, k, v, sinks = (_Same.apply(tensor) for tensor in tensors)
            q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
            parts = shard([q, k, v], 0, None, "contiguous")
            results = context_parallel_varlen_attention(
                *parts, starts, window=(2, 1), sinks=sinks, return_lse=True, method=method
            )
            return tuple(unshard(results, [0, 1], None, "contiguous"))

        for function in (dense, packed):
            torch.autograd.gradcheck(function, (*wholes, sinks), fast_mode=True)

    # Second derivatives: by Ulysses those of one process, by gathered keys an error that names the other method.
    wholes, local = small(ranks)

    def second(attend, tensors):
        out = attend(*tensors, causal=True)
        grads = torch.autograd.grad(out.pow(3).sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(grad.pow(2).sum() for grad in grads), tensors)

    def ours(*tensors, **options):
        return context_parallel_attention(*tensors, method="ulysses", **options)

    for found, whole in zip(second(ours, local), second(flash_online.attention, wholes), strict=True):
        torch.testing.assert_close(found, shard([whole], 2)[0], rtol=1e-9, atol=1e-9)
    with pytest.raises(NotImplementedError, match="'gathered' has no second derivatives.*'ulysses'"):
        second(lambda *tensors, **options: context_parallel_attention(*tensors, method="gathered", **options), local)


class _Same(torch.autograd.Function):
    """A tensor that all ranks have alike, as a loss that all have alike: the gradient is the mean of what each rank finds."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad / dist.get_world_size()


def check_groups_of_heads(rank, ranks):
    """Keys gathered in several groups of heads give the same as in one."""
    from flash_online.distributed import _gathered

    wholes, local = small(ranks, heads=6, dtype=torch.float32, batch=2)
    sinks, alibi = torch.randn(6, requires_grad=True), slopes(2, 6)
    options = {"causal": True, "sinks": sinks, "alibi_slopes": alibi, "method": "gathered", "return_lse": True}
    kept, results = _gathered.GROUP_BYTES, []
    for size in (kept, wholes[0].numel() * 4, 1):
        _gathered.GROUP_BYTES = size
        out = context_parallel_attention(*local, **options)
        results.append([*out, *torch.autograd.grad([out[0].sin().sum(), out[1].sum()], [*local, sinks])])
    _gathered.GROUP_BYTES = kept
    rows_first = [tensor.permute(2, 0, 1, 3) for tensor in local[1:]]
    assert _gathered.groups_of(*rows_first, wholes[1].shape[2]) == 1
    for one, two, six in zip(*results, strict=True):
        assert torch.equal(one, two) and torch.equal(one, six)


def check_groups_of_heads_by_ulysses(rank, ranks):
    """A rank's heads exchanged and computed in two groups, also by the kernels of packed sequences, give what one gives: out,
    lse, gradients, second derivatives, and those of some of the tensors alone."""
    from flash_online.distributed import _context_parallel, _ulysses

    for dtype, width, batch in ((torch.float64, 6, 1), (torch.bfloat16, 16, 1), (torch.float32, 16, 2)):
        shapes = [(batch, heads, 8 * ranks, width) for heads in (4 * ranks, 2 * ranks, 2 * ranks)]
        whole = [torch.randn(shape).to(dtype) for shape in shapes]
        options = {"causal": True, "sinks": torch.randn(4 * ranks, requires_grad=True), "alibi_slopes": slopes(4 * ranks)}
        options |= {"softcap": 9.0, "return_lse": True, "deterministic": True}
        for layout in LAYOUTS:
            for frozen in ((), (0,), (1, 2)):
                local = [t.requires_grad_(n not in frozen) for n, t in enumerate(shard(whole, 2, layout=layout))]
                wanted, results = [*(t for t in local if t.requires_grad), options["sinks"]], []
                for scores, claimed in ((_ulysses.GROUPED_SCORES, False), (0, False), (0, batch == 1)):
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(_ulysses, "GROUPED_SCORES", scores)
                        patch.setattr(_context_parallel, "_is_static", lambda query, left, claimed=claimed: claimed)
                        out, lse = context_parallel_attention(*local, method="ulysses", layout=layout, **options)
                        grads = torch.autograd.grad([out.sin().sum(), lse.sum()], wanted, create_graph=dtype is torch.float64)
                        results.append([out, lse, *grads])
                        if dtype is torch.float64:
                            results[-1] += torch.autograd.grad(sum(grad.pow(2).sum() for grad in grads), wanted)
                for one, two, claimed in zip(*results, strict=True):
                    assert torch.equal(one, two) and torch.equal(one, claimed), (dtype, layout, frozen)


def check_model(rank, ranks):
    """20 steps of a model of two layers with the losses of one process, also under activation checkpointing."""

    class Layer(torch.nn.Module):
        def __init__(self, method):
            super().__init__()
            self.method = method
            self.qkv, self.out = torch.nn.Linear(32, 32 + 2 * 16), torch.nn.Linear(32, 32)
            self.sinks = torch.nn.Parameter(torch.zeros(4))

        def forward(self, x):
            q, k, v = self.qkv(x).split([32, 16, 16], -1)
            q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (q, k, v))
            options = {"causal": True, "window": (40, None), "sinks": self.sinks}
            if self.method == "one process":
                out = flash_online.attention(q, k, v, **options)
            else:
                out = context_parallel_attention(q, k, v, method=self.method, **options)
            return x + self.out(out.transpose(1, 2).flatten(2))

    def losses(method, checkpointed=False):
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Embedding(50, 32), Layer(method), Layer(method), torch.nn.Linear(32, 50)])
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.3), []
        tokens = torch.randint(0, 50, (1, 16 * ranks + 1), generator=torch.Generator().manual_seed(3))
        batch = tokens[:, :-1], tokens[:, 1:]  # labels are shifted before they are cut
        if method != "one process":
            batch = shard(batch, 1)
        for _ in range(20):
            optimizer.zero_grad()
            x = model[0](batch[0])
            for layer in list(model)[1:3]:
                x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
            loss = torch.nn.functional.cross_entropy(model[3](x).flatten(0, 1), batch[1].flatten(), reduction="sum")
            loss = loss / (16 * ranks)
            loss.backward()
            total = loss.detach().clone()
            if method != "one process":
                dist.all_reduce(total)
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            found.append(total.item())
        return found

    expected = losses("one process")
    assert expected[-1] < 0.8 * expected[0]
    for method in ("auto", *METHODS):
        assert losses(method) == pytest.approx(expected, abs=2e-5)
    for method in METHODS:
        assert losses(method, checkpointed=True) == losses(method)


def check_compiled(rank, ranks):
    """torch.compile makes one graph of a call and its backward pass, whose results are those without it."""
    from flash_online.distributed import _ulysses

    starts, grouped_scores = torch.tensor([0, 5, 8 * ranks], dtype=torch.int32), _ulysses.GROUPED_SCORES
    for method in METHODS:

        def dense(q, k, v, method=method):
            return context_parallel_attention(q, k, v, causal=True, window=(9, None), method=method)

        def packed(q, k, v, method=method):
            return context_parallel_varlen_attention(q, k, v, starts, causal=True, method=method)

        for call, shape in ((dense, (1, 4, 8, 8)), (packed, (8, 4, 8))):
            tensors = [torch.randn(shape, requires_grad=True) for _ in range(3)]
            torch._dynamo.reset()
            _ulysses.GROUPED_SCORES = 0  # two groups of heads
            for one, other in zip(
                *((out, *torch.autograd.grad(out.sum(), tensors)) for out in (
                    call(*tensors), torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors))),
                strict=True,
            ):  # fmt: skip
                assert torch.equal(one, other), method
    _ulysses.GROUPED_SCORES = grouped_scores
