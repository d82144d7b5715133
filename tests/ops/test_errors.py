"""Bad input: the error names the argument, what was got and what is accepted; nothing is written; the process survives."""

from __future__ import annotations

import functools

import pytest
import torch

import flash_online
import flash_online.functional as F

RAW = torch.ops.flash_online
PACKED_NOTHING = (None, None, None, 5, 5, -1, -1, False, 1.0, 0.0, 0.0)
NO_OPTIONS = (None, None, None, None, -1, -1, False, 1.0, 0.0, 0.0)
SHAPES = {"Q": (2, 4, 5, 8), "K": (2, 4, 7, 8), "V": (2, 4, 7, 8), "LOGITS": (3, 6), "PACKED": (9, 4, 8)}


class Calls:
    """Calls with bad input on one device, by name: what is called, then words that the message must hold, the argument's name
    first. `bad` are those of public functions, `raw` those of operators. Calls run with that device as torch's default."""

    def __init__(self, device):
        self.inputs = {name: torch.randn(shape, device=device) for name, shape in SHAPES.items()}
        self.targets = torch.tensor([0, 1, 2], device=device), torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
        self.bad, self.raw = public_calls(device, *self.targets, **self.inputs), raw_calls(*self.targets, **self.inputs)


@functools.cache
def calls_on(device) -> Calls:
    return Calls(device)


def public_calls(device, TARGET, STARTS, Q, K, V, LOGITS, PACKED):
    def pack(q=PACKED, k=PACKED, v=PACKED, starts=STARTS, key_starts=STARTS, longest=5, longest_key=5, **options):
        return flash_online.varlen_attention(q, k, v, starts, key_starts, longest, longest_key, **options)

    def attend(q=Q, k=K, v=V, **options):
        return flash_online.attention(q, k, v, **options)

    return {
        "key of another dtype": (lambda: attend(k=K.half()), "key", "float16", "float32"),
        "value of another dtype": (lambda: attend(v=V.half()), "value", "float16", "float32"),
        "integers": (lambda: attend(Q.int(), K.int(), V.int()), "query", "int32", "float"),
        "complex numbers": (lambda: attend(Q.cfloat(), K.cfloat(), V.cfloat()), "query", "complex64"),
        "key on another device": (lambda: attend(k=K.to("meta")), "key", "meta", device),
        "value on another device": (lambda: attend(v=V.to("meta")), "value", "meta", device),
        "mask on another device": (lambda: attend(mask=torch.ones(5, 7, device="meta")), "mask", "meta", device),
        "query of one dimension": (lambda: attend(Q[0, 0, 0]), "query", "[8]"),
        "key of one dimension": (lambda: attend(k=K[0, 0, 0]), "key", "[8]"),
        "head dims that differ": (lambda: attend(k=K[..., :6]), "key", "6", "8"),
        "lengths that differ": (lambda: attend(v=V[:, :, :6]), "value", "6", "7"),
        "key heads that do not divide": (lambda: attend(k=K[:, :3], v=V[:, :3]), "key", "3", "4"),
        "value heads that do not divide": (lambda: attend(v=V[:, :3]), "value", "3", "4"),
        "batches that differ": (lambda: attend(k=torch.randn(3, 4, 7, 8)), "key", "3", "2"),
        "padding mask": (lambda: attend(mask=torch.ones(2, 7, dtype=torch.bool)), "mask", "mask[:, None, None, :]"),
        "torch's causal": (lambda: attend(is_causal=True), "attention()", "'is_causal'", "`causal`"),
        "torch's mask": (lambda: attend(attn_mask=torch.zeros(5, 7)), "attention()", "'attn_mask'", "`mask`"),
        "torch's grouped heads": (lambda: attend(enable_gqa=True), "attention()", "'enable_gqa'", "no argument"),
        "flash_attn's scale": (lambda: attend(softmax_scale=1.0), "attention()", "'softmax_scale'", "`scale`"),
        "no name at all": (lambda: attend(colour=1), "attention()", "'colour'"),
        "mask too long": (lambda: attend(mask=torch.zeros(5, 8)), "mask", "[5, 8]", "7"),
        "mask of too many heads": (lambda: attend(mask=torch.zeros(3, 5, 7)), "mask", "[3, 5, 7]", "4"),
        "mask of too many batches": (lambda: attend(mask=torch.zeros(3, 1, 5, 7)), "mask", "[3, 1, 5, 7]", "2"),
        "mask of too many dimensions": (lambda: attend(mask=torch.zeros(1, 1, 1, 5, 7)), "mask", "[1, 1, 1, 5, 7]"),
        "mask of integers": (lambda: attend(mask=torch.zeros(5, 7, dtype=torch.long)), "mask", "int64", "bool"),
        "mask wider than the query": (
            lambda: attend(mask=torch.zeros(5, 7, dtype=torch.float64)),
            "mask",
            "float64",
            "float32",
        ),
        "mask narrower than the query": (
            lambda: attend(mask=torch.zeros(5, 7, dtype=torch.half)),
            "mask",
            "float16",
            "float32",
        ),
        "negative window on the left": (lambda: attend(window=(-1, 2)), "window", "-1"),
        "negative window on the right": (lambda: attend(window=(2, -3)), "window", "-3"),
        "window of one number": (lambda: attend(window=3), "window", "3"),
        "window of three": (lambda: attend(window=(1, 2, 3)), "window", "(1, 2, 3)"),
        "window of fractions": (lambda: attend(window=(1.5, 2)), "window", "1.5"),
        "unknown alignment": (lambda: attend(alignment="center"), "alignment", "center", "upper_left", "lower_right"),
        "negative softcap": (lambda: attend(softcap=-1.0), "softcap", "-1"),
        "softcap that is no number": (lambda: attend(softcap=float("nan")), "softcap", "nan"),
        "dropout above 1": (lambda: attend(dropout_p=1.5), "dropout_p", "1.5"),
        "negative dropout": (lambda: attend(dropout_p=-0.1), "dropout_p", "-0.1"),
        "dropout that is no number": (lambda: attend(dropout_p=float("nan")), "dropout_p", "nan"),
        "sinks of another count": (lambda: attend(sinks=torch.zeros(3)), "sinks", "[3]", "4"),
        "sinks of two dimensions": (lambda: attend(sinks=torch.zeros(2, 4)), "sinks", "[2, 4]"),
        "sinks of integers": (lambda: attend(sinks=torch.zeros(4, dtype=torch.long)), "sinks", "int64"),
        "slopes of another count": (lambda: attend(alibi_slopes=torch.zeros(3)), "alibi_slopes", "[3]", "4"),
        "slopes of another batch": (lambda: attend(alibi_slopes=torch.zeros(3, 4)), "alibi_slopes", "[3, 4]", "2"),
        "slopes that want a gradient": (
            lambda: attend(alibi_slopes=torch.zeros(4, requires_grad=True)),
            "alibi_slopes",
            "grad",
        ),
        "packed: four dimensions": (lambda: pack(Q, Q, Q), "query", "[2, 4, 5, 8]", "[total length, heads, width]"),
        "packed: key of two dimensions": (lambda: pack(k=PACKED[0]), "key", "[4, 8]"),
        "packed: key of another dtype": (lambda: pack(k=PACKED.half()), "key", "float16", "float32"),
        "packed: value on another device": (lambda: pack(v=PACKED.to("meta")), "value", "meta", device),
        "packed: integers": (lambda: pack(PACKED.int(), PACKED.int(), PACKED.int()), "query", "int32"),
        "packed: head dims that differ": (lambda: pack(k=PACKED[..., :6]), "key", "6", "8"),
        "packed: lengths that differ": (lambda: pack(v=PACKED[:7]), "value", "7", "9"),
        "packed: key heads that do not divide": (lambda: pack(k=PACKED[:, :3]), "key", "3", "4"),
        "packed: value heads that do not divide": (lambda: pack(v=PACKED[:, :3]), "value", "3", "4"),
        "packed: no key heads": (lambda: pack(k=PACKED[:, :0]), "key", "0", "4"),
        "packed: starts of another dtype": (lambda: pack(starts=STARTS.long()), "cu_seqlens_q", "int64", "int32"),
        "packed: starts in a list": (lambda: pack(key_starts=[0, 4, 9]), "cu_seqlens_k", "[0, 4, 9]", "int32"),
        "packed: starts of two dimensions": (lambda: pack(key_starts=STARTS[None]), "cu_seqlens_k", "[1, 3]"),
        "packed: no starts": (lambda: pack(starts=STARTS[:0]), "cu_seqlens_q", "[0]", "[sequences + 1]"),
        "packed: starts on another device": (lambda: pack(starts=STARTS.to("meta")), "cu_seqlens_q", "meta", device),
        "packed: fewer starts of keys": (lambda: pack(key_starts=STARTS[:2]), "cu_seqlens_k", "2", "3"),
        "packed: negative longest": (lambda: pack(longest=-1), "max_seqlen_q", "-1"),
        "packed: a longest that is no int": (lambda: pack(longest_key=torch.tensor(5)), "max_seqlen_k", "tensor(5", "int"),
        "packed: unknown alignment": (lambda: pack(alignment="left"), "alignment", "left", "upper_left"),
        "packed: negative window": (lambda: pack(window=(0, -1)), "window", "-1"),
        "packed: sinks of another count": (lambda: pack(sinks=torch.zeros(9)), "sinks", "[9]", "4"),
        "packed: slopes of another count": (lambda: pack(alibi_slopes=torch.zeros(9)), "alibi_slopes", "[9]", "4"),
        "packed: slopes of other sequences": (lambda: pack(alibi_slopes=torch.zeros(3, 4)), "alibi_slopes", "[3, 4]", "2"),
        "packed: slopes of three dimensions": (lambda: pack(alibi_slopes=torch.zeros(1, 2, 4)), "alibi_slopes", "[1, 2, 4]"),
        "no parts": (lambda: flash_online.merge_attention([], []), "outs"),
        "parts without lse": (lambda: flash_online.merge_attention([Q, Q], [Q[..., 0]]), "lses"),
        "parts of two shapes": (lambda: flash_online.merge_attention([Q, K], [Q[..., 0], K[..., 0]]), "outs", "[2, 4, 7, 8]"),
        "parts of two dtypes": (lambda: flash_online.merge_attention([Q, Q.half()], [Q[..., 0]] * 2), "outs", "float16"),
        "lse of another shape": (lambda: flash_online.merge_attention([Q, Q], [Q[..., 0], Q[0, ..., 0]]), "lses", "[4, 5]"),
        "lse of another dtype": (lambda: flash_online.merge_attention([Q], [Q[..., 0].double()]), "lses", "float64", "float32"),
        "more classes than there are": (lambda: flash_online.topk_softmax(LOGITS, 7), "k", "7", "6"),
        "a negative k": (lambda: flash_online.topk_softmax(LOGITS, -1), "k", "-1"),
        "top-k of a missing dimension": (lambda: flash_online.topk_softmax(LOGITS, 1, 2), "dim", "2"),
        "softmax of a missing dimension": (lambda: flash_online.softmax(LOGITS, 2), "dim", "2"),
        "softmax of integers": (lambda: flash_online.softmax(TARGET, 0), "input", "int64"),
        "logsumexp of a missing dimension": (lambda: flash_online.logsumexp(LOGITS, -3), "dim", "-3"),
        "target too large": (lambda: flash_online.cross_entropy(LOGITS, TARGET + 4), "target", "6"),
        "target below zero": (lambda: flash_online.cross_entropy(LOGITS, TARGET - 1), "target", "-1"),
        "target of another length": (lambda: flash_online.cross_entropy(LOGITS, TARGET[:2]), "target", "[2]", "[3]"),
        "target of bytes": (lambda: flash_online.cross_entropy(LOGITS, TARGET.to(torch.int16)), "target", "int16"),
        "probabilities of another shape": (lambda: flash_online.cross_entropy(LOGITS, torch.rand(3, 5)), "target", "[3, 5]"),
        "weights of another count": (lambda: flash_online.cross_entropy(LOGITS, TARGET, torch.ones(5)), "weight", "[5]", "6"),
        "smoothing above 1": (
            lambda: flash_online.cross_entropy(LOGITS, TARGET, label_smoothing=1.1),
            "label_smoothing",
            "1.1",
        ),
        "unknown reduction": (lambda: flash_online.cross_entropy(LOGITS, TARGET, reduction="avg"), "reduction", "avg", "mean"),
        "ignored probabilities": (
            lambda: flash_online.cross_entropy(LOGITS, LOGITS.softmax(1), ignore_index=2),
            "ignore_index",
        ),
        "loss of integers": (lambda: flash_online.cross_entropy(LOGITS, TARGET, dtype=torch.int32), "dtype", "int32"),
        "a scalar's loss": (lambda: flash_online.cross_entropy(torch.tensor(1.0), torch.tensor(0)), "input"),
        "drop-in: mask with is_causal": (
            lambda: F.scaled_dot_product_attention(Q, K, V, torch.zeros(5, 7), is_causal=True),
            "attn_mask",
            "is_causal",
        ),
        "drop-in: heads without enable_gqa": (lambda: F.scaled_dot_product_attention(Q, K[:, :2], V[:, :2]), "2", "4"),
        "drop-in: heads that do not divide": (
            lambda: F.scaled_dot_product_attention(Q, K[:, :3], V[:, :3], enable_gqa=True),
            "3",
            "4",
        ),
        "drop-in: mask shape": (lambda: F.scaled_dot_product_attention(Q, K, V, torch.zeros(4, 7)), "mask", "[4, 7]"),
        "drop-in: target too large": (lambda: F.cross_entropy(LOGITS, TARGET + 4), "target", "6"),
    }


def raw_calls(TARGET, STARTS, Q, K, V, LOGITS, PACKED):
    """The operators check for themselves: C++ programs call them without Python in front."""
    return {
        "rank": (lambda: RAW.attention_forward(Q[0], K[0], V[0], *NO_OPTIONS), "query"),
        "ranks that differ": (lambda: RAW.attention_forward(Q, K[0], V, *NO_OPTIONS), "key"),
        "head dims": (lambda: RAW.attention_forward(Q, K[..., :4], V, *NO_OPTIONS), "key"),
        "lengths": (lambda: RAW.attention_forward(Q, K, V[:, :, :3], *NO_OPTIONS), "value"),
        "heads": (lambda: RAW.attention_forward(Q, K[:, :3], V, *NO_OPTIONS), "key"),
        "batches": (lambda: RAW.attention_forward(Q, K[:1], V, *NO_OPTIONS), "key"),
        "dtypes": (lambda: RAW.attention_forward(Q, K.half(), V, *NO_OPTIONS), "key"),
        "mask": (lambda: RAW.attention_forward(Q, K, V, torch.zeros(1, 1, 5, 6), *NO_OPTIONS[1:]), "mask"),
        "mask rank": (lambda: RAW.attention_forward(Q, K, V, torch.zeros(5, 7), *NO_OPTIONS[1:]), "mask"),
        "dropout without rng": (lambda: RAW.attention_forward(Q, K, V, *NO_OPTIONS[:-1], 0.5), "rng"),
        "rng": (
            lambda: RAW.attention_forward(Q, K, V, None, None, None, torch.zeros(1), *NO_OPTIONS[4:-1], 0.5),
            "rng",
        ),
        "sinks": (lambda: RAW.attention_forward(Q, K, V, None, None, torch.zeros(3), None, *NO_OPTIONS[4:]), "sinks"),
        "slopes": (lambda: RAW.attention_forward(Q, K, V, None, torch.zeros(4), None, None, *NO_OPTIONS[4:]), "alibi_slopes"),
        "gradient's shape": (
            lambda: RAW.attention_backward(
                Q[:, :, :4], None, Q, K, V, None, None, None, None, Q, Q[..., 0], Q[..., 0], *NO_OPTIONS[4:], False, False
            ),
            "grad_out",
        ),
        "packed rank": (lambda: RAW.attention_varlen_forward(Q, Q, Q, STARTS, STARTS, *PACKED_NOTHING), "query"),
        "packed heads": (
            lambda: RAW.attention_varlen_forward(PACKED, PACKED[:, :3], PACKED, STARTS, STARTS, *PACKED_NOTHING),
            "key",
        ),
        "packed starts' dtype": (
            lambda: RAW.attention_varlen_forward(PACKED, PACKED, PACKED, STARTS.long(), STARTS, *PACKED_NOTHING),
            "cu_seqlens_q",
            "int32",
        ),
        "packed starts' strides": (
            lambda: RAW.attention_varlen_forward(PACKED, PACKED, PACKED, STARTS, STARTS.repeat(2)[::2], *PACKED_NOTHING),
            "cu_seqlens_k",
            "contiguous",
        ),
        "packed starts' number": (
            lambda: RAW.attention_varlen_forward(PACKED, PACKED, PACKED, STARTS, STARTS[:2], *PACKED_NOTHING),
            "cu_seqlens_k",
        ),
        "packed longest": (
            lambda: RAW.attention_varlen_forward(
                PACKED, PACKED, PACKED, STARTS, STARTS, None, None, None, -1, *PACKED_NOTHING[4:]
            ),
            "max_seqlen_q",
        ),
        "packed slopes": (
            lambda: RAW.attention_varlen_forward(PACKED, PACKED, PACKED, STARTS, STARTS, torch.zeros(4), *PACKED_NOTHING[1:]),
            "alibi_slopes",
            "[sequences, heads]",
        ),
        "packed gradient's shape": (
            lambda: RAW.attention_varlen_backward(
                *(PACKED[:8], None, PACKED, PACKED, PACKED, STARTS, STARTS, None, None, None),
                *(PACKED, PACKED[..., 0].t().contiguous(), PACKED[..., 0].t().contiguous(), *PACKED_NOTHING[3:], False),
            ),
            "grad_out",
        ),
        "softmax dim": (lambda: RAW.softmax_forward(LOGITS, 2, False, torch.float32), "dim"),
        "softmax negative dim": (lambda: RAW.softmax_forward(LOGITS, -1, False, torch.float32), "dim"),
        "softmax gradient": (lambda: RAW.softmax_backward(LOGITS[:2], LOGITS, 1, False, torch.float32), "grad"),
        "logsumexp dim": (lambda: RAW.logsumexp_forward(LOGITS, 5), "dim"),
        "k": (lambda: RAW.topk_softmax_forward(LOGITS, 7, 1, False, torch.float32), "k"),
        "target shape": (lambda: RAW.cross_entropy_forward(LOGITS, TARGET[:1], None, -100, 0.0), "target"),
        "target dtype": (lambda: RAW.cross_entropy_forward(LOGITS, TARGET.int(), None, -100, 0.0), "target"),
        "target range": (lambda: RAW.cross_entropy_forward(LOGITS, TARGET + 9, None, -100, 0.0), "out of bounds"),
        "weight": (lambda: RAW.cross_entropy_forward(LOGITS, TARGET, torch.ones(2), -100, 0.0), "weight"),
        "merge": (lambda: RAW.attention_merge([Q, K], [Q[..., 0], K[..., 0]]), "outs"),
    }


ACCEPTED = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)


# A target out of range is a device assert on CUDA.
CPU_ONLY = {
    "target too large",
    "target below zero",
    "drop-in: target too large",
    "target range",
}


def calls_for(device, of_operators=False):
    calls = calls_on(device)
    return {n: call for n, call in (calls.raw if of_operators else calls.bad).items() if device == "cpu" or n not in CPU_ONLY}


def explained(name, device, of_operators=False):
    if device == "cuda" and name in CPU_ONLY:
        pytest.skip("a device assert")
    call, *words = calls_for(device, of_operators)[name]
    with pytest.raises(ACCEPTED) as raised, torch.device(device):
        call()
    message = str(raised.value)
    for word in words:
        assert word in message, f"{word!r} is missing in: {message}"


@pytest.mark.parametrize("name", calls_on("cpu").bad)
def test_message(name, device):
    explained(name, device)


@pytest.mark.parametrize("name", calls_on("cpu").raw)
def test_raw_operator(name, device):
    explained(name, device, of_operators=True)


def every_bad_call(device):
    for call, *_ in (*calls_for(device).values(), *calls_for(device, of_operators=True).values()):
        with pytest.raises(ACCEPTED), torch.device(device):
            call()


def test_the_process_survives_all_of_them_in_a_row(device):
    inputs = [calls_on(device).inputs[name] for name in ("Q", "K", "V")]
    expected = flash_online.attention(*inputs)
    for _ in range(3):
        every_bad_call(device)
    assert torch.equal(flash_online.attention(*inputs), expected)


def test_own_errors_are_of_both_kinds(device):
    q, logits = torch.randn(2, 4, 5, 8, device=device), torch.randn(3, 6, device=device)
    for call in (lambda: flash_online.attention(q, q, q, window=(-1, 0)), lambda: flash_online.topk_softmax(logits, 7)):
        with pytest.raises(RuntimeError):
            call()
        with pytest.raises(ValueError):
            call()


def test_cross_entropy_target_out_of_range_is_an_index_error():
    with pytest.raises(IndexError):
        flash_online.cross_entropy(torch.randn(3, 6), torch.tensor([9, 1, 2]))


def test_inputs_are_never_written(device):
    tensors = [*calls_on(device).inputs.values(), *calls_on(device).targets]
    before = [t.clone() for t in tensors]
    every_bad_call(device)
    query, key, value, logits, _ = calls_on(device).inputs.values()
    leaf = query.detach().requires_grad_()
    torch.autograd.grad(flash_online.attention(leaf, key, value, causal=True).sum(), leaf)
    flash_online.softmax(logits, 1)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_none_is_no_softcap_and_no_z_loss():
    """As a model's config leaves them out."""
    x, target, weight = torch.randn(5, 8), torch.arange(5), torch.randn(7, 8)
    q, starts = torch.randn(1, 2, 4, 8), torch.tensor([0, 4], dtype=torch.int32)
    packed = q[0].transpose(0, 1)
    for call, name in (
        (lambda **option: flash_online.attention(q, q, q, causal=True, **option), "softcap"),
        (lambda **option: flash_online.varlen_attention(packed, packed, packed, starts, starts, 4, 4, **option), "softcap"),
        (lambda **option: flash_online.kvcache_attention(q, q, q, 3, **option), "softcap"),
        (lambda **option: flash_online.linear_cross_entropy(x, weight, target, **option), "softcap"),
        (lambda **option: flash_online.linear_cross_entropy(x, weight, target, **option), "z_loss"),
        (lambda **option: flash_online.cross_entropy(x, target, **option), "z_loss"),
    ):
        torch.testing.assert_close(call(**{name: None}), call(), rtol=0, atol=0)
