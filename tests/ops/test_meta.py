"""Tensors on meta: every function gives the shape, dtype and strides that it gives of numbers, as torch's do."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_map_only

import flash_online
import flash_online.functional as F
from flash_online.compat import flash_attn

Q, K, V = torch.randn(2, 5, 4, 8).transpose(1, 2), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)
ROWS, KEYS = torch.randn(5, 4, 8), torch.randn(6, 2, 8)
STARTS_Q, STARTS_K = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([0, 2, 6], dtype=torch.int32)
LENGTHS, TABLE = torch.tensor([3, 4], dtype=torch.int32), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
POOL = torch.randn(4, 2, 16, 8)
PAGES, ANGLES = POOL.transpose(1, 2), torch.ones(9, 4)
HIDDEN, WEIGHT, TARGET = torch.randn(5, 8), torch.randn(9, 8), torch.tensor([0, 8, -100, 2, 3])
LOGITS = HIDDEN @ WEIGHT.mT

CALLS = {
    "sdpa": lambda q=Q, k=K, v=V: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    "sdpa, dropout": lambda q=Q, k=K, v=V: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True),
    "attention": lambda q=Q, k=K, v=V: flash_online.attention(q, k, v),
    "attention, options": lambda q=Q, k=K, v=V: flash_online.attention(q, k, v, causal=True, softcap=2.0, return_lse=True),
    "varlen": lambda q=ROWS, k=KEYS, s=STARTS_Q, t=STARTS_K: flash_online.varlen_attention(
        q, k, k, s, t, 3, 4, return_lse=True
    ),
    "varlen, pages": lambda q=ROWS, p=PAGES, s=STARTS_Q, n=LENGTHS, t=TABLE: flash_online.varlen_attention(
        q, p, p, s, None, 3, 16, block_table=t, seqused_k=n, return_lse=True
    ),
    "cached": lambda q=Q, k=K, v=V, n=LENGTHS: flash_online.kvcache_attention(q, k, v, n),
    "cached, an int": lambda q=Q, k=K, v=V: flash_online.kvcache_attention(q, k, v, 3, return_lse=True),
    "cached, new keys": lambda q=Q, k=K, v=V, n=LENGTHS: flash_online.kvcache_attention(
        q, k, v, n, key=k[:, :, :2].clone(), value=v[:, :, :2].clone(), return_lse=True
    ),
    "append": lambda k=K, v=V, n=LENGTHS, q=Q, c=ANGLES: flash_online.cache_append(
        k[:, :, :1].clone(), v[:, :, :1].clone(), k, v, cache_seqlens=n, query=q, rotary=(c, c)
    ),
    "cascade": lambda q=ROWS, p=POOL, s=STARTS_Q, t=TABLE, n=LENGTHS: flash_online.cascade_attention(
        q, p, p, [(s, t, n), (s, t, n)], return_lse=True
    ),
    "merge": lambda q=ROWS: flash_online.merge_attention([q, q], [q[..., 0], q[..., 0]]),
    "softmax": lambda x=LOGITS: flash_online.softmax(x, 0, torch.float64),
    "the drop-in's softmax": lambda x=LOGITS: F.log_softmax(x, -1),
    "logsumexp": lambda x=LOGITS: flash_online.logsumexp(x, (0, 1), keepdim=True),
    "top k": lambda x=LOGITS: flash_online.topk_softmax(x, 3),
    "cross_entropy": lambda x=LOGITS, t=TARGET: F.cross_entropy(x, t),
    "cross_entropy, rows": lambda x=LOGITS, t=TARGET: flash_online.cross_entropy(x, t, reduction="none", return_lse=True),
    "linear_cross_entropy": lambda x=HIDDEN, w=WEIGHT, t=TARGET: F.linear_cross_entropy(x, w, t),
    "linear_cross_entropy, options": lambda x=HIDDEN, w=WEIGHT, t=TARGET: flash_online.linear_cross_entropy(
        x, w, t, reduction="none", return_lse=True, return_argmax=True, softcap=3.0
    ),
    "compat": lambda q=Q, k=K: flash_attn.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, k)), causal=True),
}


def on_meta(call):
    """The call with its tensors on meta."""
    return call(*tree_map_only(torch.Tensor, lambda t: t.to("meta"), call.__defaults__))


def described(result):
    tensors = result if isinstance(result, tuple) else (result,)
    return [(t.shape, t.dtype, t.stride()) for t in tensors]


@pytest.mark.parametrize("name", CALLS)
def test_results_are_as_those_of_numbers(name):
    call = CALLS[name]
    with flash_online.strict():
        found = on_meta(call)
    assert all(tensor.is_meta for tensor in (found if isinstance(found, tuple) else (found,)))
    assert described(found) == described(call())


DIFFERENTIABLE = [name for name in CALLS if not name.startswith(("cached", "append", "cascade", "varlen, pages"))]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_as_those_of_numbers(name):
    call, kinds = CALLS[name], []
    for device in ("cpu", "meta"):
        given = [t.to(device) if torch.is_tensor(t) else t for t in call.__defaults__]
        leaves = [t.detach().requires_grad_() for t in given if t.is_floating_point()]
        result = call(*leaves, *given[len(leaves) :])
        first = result[0] if isinstance(result, tuple) else result
        kinds.append(described(torch.autograd.grad(first.sum(), leaves)))
        if name == "linear_cross_entropy, options":  # second derivatives go through plain operations
            again = call(*leaves, *given[len(leaves) :])[0]
            grads = torch.autograd.grad(again.square().sum(), leaves, create_graph=True)
            kinds[-1] += described(torch.autograd.grad(grads[0].square().sum(), leaves))
    assert kinds[0] == kinds[1]


def test_explain_says_that_there_are_no_numbers():
    query = Q.to("meta")
    plan = flash_online.explain(flash_online.attention, query, query, query)
    assert plan.ours and "meta" in plan.kernel and plan.operators == ("attention_inference",)


@pytest.mark.parametrize("moved", ["q", "k", "v"])
def test_tensors_on_meta_beside_others_are_an_error(moved):
    given = {"q": Q, "k": K, "v": V}
    given[moved] = given[moved].to("meta")
    for call in (CALLS["sdpa"], CALLS["attention"], CALLS["cached, an int"]):
        with pytest.raises(RuntimeError, match="expected .*device"):
            call(**given)
