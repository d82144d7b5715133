"""The laws of core/online_softmax.h, the one algebra under every kernel, on plain numbers against float64 (numpy.longdouble for
float64 itself)."""

import importlib.machinery
import math
import subprocess
import sys
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_online import _introspect

STATES = {"Float32": np.float32, "Float64": np.float64, "Float32Binary": np.float32, "Float64Binary": np.float64}
INF, NAN = math.inf, math.nan


@pytest.fixture(params=STATES)
def algebra(request):
    return Algebra(request.param)


class Algebra:
    """One instance of the header's template, and the same quantities in higher precision."""

    def __init__(self, name):
        self.name, self.dtype, self.State = name, STATES[name], getattr(_introspect, name)
        self.eps = float(np.finfo(self.dtype).eps)
        self.wide = np.float64 if self.dtype == np.float32 else np.longdouble
        self.exp, self.log = (np.exp2, np.log2) if name.endswith("Binary") else (np.exp, np.log)

    def row(self, values):
        return np.asarray(values, self.dtype)

    def reference(self, row):
        """(max, sum, lse) in the wide type; (-inf, 0, -inf) where no element is finite."""
        wide = np.asarray(row, self.wide)
        top = wide.max(initial=-INF)
        total = self.exp(wide - top).sum() if top > -INF else self.wide(0)
        with np.errstate(divide="ignore"):
            return top, total, top + self.log(total)

    def tolerance(self, additions):
        """The relative tolerance of a sum of positive terms by that many additions in a row, with errors as good as random."""
        return self.eps * (8 + 4 * math.sqrt(additions))

    def check(self, state, row, tolerance=None):
        tolerance = tolerance or self.tolerance(len(row))
        top, total, lse = self.reference(row)
        assert state.max == top
        assert state.sum == pytest.approx(float(total), rel=tolerance, abs=0)
        if len(row) and top > -INF:
            spread = tolerance * 1.5 + self.eps * (abs(float(top)) + abs(float(lse)))
            assert abs(float(state.lse() - lse)) <= spread
        else:
            assert state.lse() == -INF


def same(a, b):
    return (a.max, a.sum) == (b.max, b.sum) or (a.max == b.max and math.isnan(a.sum) and math.isnan(b.sum))


def merged(*states):
    result = type(states[0])()
    for state in states:
        result.merge(state)
    return result


# One row of every kind that has a meaningful sum.
ROWS = {
    "one score": [0.5],
    "ascending, so that every score raises the maximum": np.arange(9) / 2.0,
    "descending, so that only the first does": -np.arange(9) / 2.0,
    "equal": [3.25] * 9,
    "random": np.random.default_rng(0).standard_normal(9) * 4,
    "past the overflow of exp in float32": [88.8, 89.0, 700.0, 710.0, -90.0],
    "with masked scores": [-INF, 1.0, -INF, 2.0, -INF],
    "masked at the front": [-INF, -INF, -5.0, -6.0],
    "masked at the end": [-5.0, -6.0, -INF, -INF],
    "+-1e38, whose difference overflows float32": [1e38, -1e38, 1e38, 0.0],
    "+-3e38": [-3e38, 3e38, -3e38],
    "all -inf": [-INF] * 4,
    "empty": [],
}


@pytest.fixture(params=ROWS.values(), ids=ROWS)
def row(request, algebra):
    return algebra.row(request.param)


def test_matches_the_wide_reference(algebra, row):
    algebra.check(algebra.State(row), row)


def test_identity(algebra, row):
    state = algebra.State(row)
    assert same(merged(algebra.State(), state), state)
    assert same(merged(state, algebra.State()), state)


def test_the_empty_row_is_empty(algebra):
    for state in (algebra.State(), algebra.State([]), algebra.State([-INF] * 3), merged(algebra.State(), algebra.State())):
        assert (state.max, state.sum, state.lse(), state.lse_low()) == (-INF, 0, -INF, 0)
        assert state.inverse_sum() == INF  # softmax: 0 * inf, NaN as in torch
        assert state.inverse_sum_or_zero() == 0  # attention: nothing to attend to gives 0
        assert state.weight(-INF) == 0


def test_every_split_into_two_and_into_three_gives_the_same(algebra, row):
    size = len(row)
    for i in range(size + 1):
        algebra.check(merged(algebra.State(row[:i]), algebra.State(row[i:])), row)
        for j in range(i, size + 1):
            algebra.check(merged(*(algebra.State(part) for part in (row[:i], row[i:j], row[j:]))), row)


def test_merge_is_commutative_and_associative_up_to_rounding(algebra, row):
    a, b, c = (algebra.State(row[i::3].copy()) for i in range(3))
    for state in (merged(a, b, c), merged(c, b, a), merged(b, a, c), merged(a, merged(b, c)), merged(merged(a, b), c)):
        algebra.check(state, row)


def test_commutative_exactly_when_no_sum_is_rescaled_twice(algebra):
    a, b = algebra.State([1.5, -2.0]), algebra.State([3.0, 2.5])
    assert same(merged(a, b), merged(b, a))


def test_a_block_is_absorbed_like_its_scores(algebra, row):
    for block in (1, 2, 4, 64):
        state = algebra.State()
        for begin in range(0, len(row), block):
            before, factor = state.max, state.absorb_block(row[begin : begin + block])
            expected = 0.0 if before == -INF else float(algebra.exp(algebra.wide(before) - algebra.wide(state.max)))
            assert factor == pytest.approx(expected, rel=4 * algebra.eps, abs=1e-37)
        algebra.check(state, row)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 15, 16, 17, 1000, 4095, 4096, 4097, 1_000_000])
@pytest.mark.parametrize("kind", ["random", "ascending", "descending", "equal"])
def test_lengths(algebra, size, kind):
    ramp = np.linspace(-30, 30, size)
    values = {"ascending": ramp, "descending": -ramp, "equal": np.full(size, 7.0)}.get(kind)
    row = algebra.row(np.random.default_rng(size).standard_normal(size) * 5 if values is None else values)
    # One by one, all errors may have one sign, once the terms are small compared with the sum; by blocks they cannot.
    algebra.check(algebra.State(row), row, tolerance=algebra.eps * (8 + size))
    state = algebra.State()
    for begin in range(0, size, 1024):
        state.absorb_block(row[begin : begin + 1024])
    algebra.check(state, row, tolerance=algebra.eps * (8 + 2 * math.sqrt(size)))


def test_random_splits_of_long_rows(algebra):
    random = np.random.default_rng(1)
    for scale in (0.1, 10.0, 1000.0):
        row = algebra.row(random.standard_normal(20_000) * scale)
        for parts in (2, 7, 100, 1000):
            cuts = np.sort(random.integers(0, len(row) + 1, parts - 1))
            states = [algebra.State(part) for part in np.split(row, cuts)]
            random.shuffle(states)
            algebra.check(merged(*states), row)


def test_merging_in_a_tree_is_merging_in_a_row(algebra):
    row = algebra.row(np.random.default_rng(2).standard_normal(4096) * 20)
    states = [algebra.State(part) for part in np.split(row, 256)]
    while len(states) > 1:
        states = [merged(a, b) for a, b in zip(states[::2], states[1::2], strict=True)]
    algebra.check(states[0], row)


def entropy_of(algebra, row):
    """In units of the base, in the wide type."""
    top, total, _ = algebra.reference(row)
    below = np.maximum(np.asarray(row, algebra.wide) - (top if top > -INF else 0), -10_000)
    weights = algebra.exp(below)
    return algebra.log(total) - (weights * below).sum() / total if total else NAN


def check_entropy(algebra, state, row):
    """Of the state and of its three numbers; the sum of products has the sign of its terms, none of which is positive."""
    expected, (top, total, _) = entropy_of(algebra, row), algebra.reference(row)
    assert state.max == top and state.sum == pytest.approx(float(total), rel=algebra.tolerance(len(row)), abs=0)
    if not total:
        assert state.products == 0 and math.isnan(state.entropy())
        return
    assert state.products <= 0
    spread = float(algebra.log(total)) + abs(float(state.products / state.sum))
    assert state.entropy() == pytest.approx(float(expected), rel=0, abs=algebra.tolerance(len(row)) * (1 + spread))


def test_entropy_of_scores_one_by_one_in_blocks_and_merged(algebra, row):
    Entropy = getattr(_introspect, f"{algebra.name}Entropy")
    check_entropy(algebra, Entropy(row), row)
    for block in (1, 2, 4, 64):
        state = Entropy()
        for begin in range(0, len(row), block):
            state.absorb_block(row[begin : begin + block])
        check_entropy(algebra, state, row)
    for i in range(len(row) + 1):
        for j in range(i, len(row) + 1):
            parts = [Entropy(part) for part in (row[:i], row[i:j], row[j:])]
            check_entropy(algebra, merged(*parts), row)
            check_entropy(algebra, merged(*parts[::-1]), row)
            check_entropy(algebra, merged(parts[0], merged(*parts[1:])), row)
    assert merged(Entropy(), Entropy(row)).products == merged(Entropy(row), Entropy()).products == Entropy(row).products


def test_entropy_of_known_rows(algebra):
    Entropy = getattr(_introspect, f"{algebra.name}Entropy")
    for count in (1, 2, 100):
        uniform = algebra.row([7.0] * count)
        assert Entropy(uniform).entropy() == pytest.approx(float(algebra.log(algebra.wide(count))), abs=8 * algebra.eps)
        assert Entropy(algebra.row([*uniform, -INF])).entropy() == Entropy(uniform).entropy()
    assert Entropy(algebra.row([1e4, 0.0, -5.0])).entropy() == 0  # all but one weight vanish
    for special in (NAN, INF):
        assert math.isnan(Entropy(algebra.row([0.0, special, 1.0])).entropy())


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e8])
def test_entropy_does_not_depend_on_what_scores_have_in_common(algebra, offset):
    Entropy = getattr(_introspect, f"{algebra.name}Entropy")
    random = np.random.default_rng(4)
    for scale in (0.1, 3.0, 50.0):
        row = algebra.row(random.standard_normal(500) * scale + offset)
        states = [Entropy(part) for part in np.split(row, [1, 7, 200])]
        check_entropy(algebra, merged(*states), row)


SCORES = st.lists(st.one_of(st.floats(-200, 200, width=32), st.just(-INF)), max_size=24)


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(SCORES, max_size=6))
def test_any_parts(parts):
    for name in STATES:
        algebra = Algebra(name)
        rows = [algebra.row(part) for part in parts]
        whole = np.concatenate([algebra.row([]), *rows])
        algebra.check(merged(algebra.State(), *map(algebra.State, rows)), whole)
        Entropy = getattr(_introspect, f"{name}Entropy")
        check_entropy(algebra, merged(Entropy(), *map(Entropy, rows)), whole)


@pytest.mark.parametrize("special", [NAN, INF], ids=["nan", "+inf"])
@pytest.mark.parametrize("others", [[0.0, 1.0, -2.0], [-INF] * 3, [500.0] * 3, []], ids=["finite", "-inf", "large", "alone"])
def test_nan_and_inf_reach_the_sum_from_each_position_and_through_each_split(algebra, special, others):
    for position in range(len(others) + 1):
        row = algebra.row([*others[:position], special, *others[position:]])
        for split in range(len(row) + 1):
            state = merged(algebra.State(row[:split]), algebra.State(row[split:]))
            assert math.isnan(state.sum) and math.isnan(state.lse())
            assert state.lse_low() == 0
            assert state.max == (INF if special == INF else max(others, default=-INF))
        block = algebra.State()
        block.absorb_block(row)
        assert math.isnan(block.sum)


def test_log_probability_keeps_what_a_large_lse_rounds_away(algebra):
    offset = 2.0**20 if algebra.dtype == np.float32 else 2.0**50
    row = algebra.row([offset, offset + 1, offset + 3])
    state = algebra.State(row)
    _, total, _ = algebra.reference(row)
    for score in row:
        exact = float((algebra.wide(score) - algebra.wide(state.max)) - algebra.log(total))
        assert state.log_probability(score) == pytest.approx(exact, abs=8 * algebra.eps * max(1.0, abs(exact)))
    from_lse = [float(score - algebra.dtype(state.lse())) for score in row]
    assert max(abs(a - state.log_probability(s)) for a, s in zip(from_lse, row, strict=True)) > 0.01, (
        "this row does not need it"
    )


def test_lse_low_carries_the_rounding_of_lse(algebra):
    """lse + lse_low errs by the rounding of log(sum), lse alone by that of the maximum: thousands of times more."""
    worst = worst_alone = 0.0
    random = np.random.default_rng(3)
    for magnitude in (1e3, 1e4, 1e5, 1e6):
        for _ in range(50):
            state = algebra.State(algebra.row(magnitude * random.uniform(-1, 1) + random.standard_normal(8)))
            # The large terms first: their difference is exact.
            error = algebra.wide(state.lse()) - algebra.wide(state.max) - algebra.log(algebra.wide(state.sum))
            worst = max(worst, abs(float(error + algebra.wide(state.lse_low()))))
            worst_alone = max(worst_alone, abs(float(error)))
    assert worst <= 8 * algebra.eps
    assert worst_alone >= 1e4 * algebra.eps


def test_weights_from_lse_and_lse_low(algebra):
    """What a backward pass does with the two: exp((score - lse) - lse_low) sums to 1 wherever the scores lie."""
    for offset in (0.0, 1e3, -1e4, 1e6):
        row = algebra.row(offset + np.arange(6) / 4)
        state = algebra.State(row)
        lse, low = algebra.dtype(state.lse()), algebra.dtype(state.lse_low())
        assert float(algebra.exp((row - lse) - low).sum(dtype=algebra.wide)) == pytest.approx(1, abs=16 * algebra.eps)


def test_the_walks_of_the_books():
    """[1, 3, 2] and [2, 1, 3] by hand: x, m, d and the factor that moves the old d to the new maximum."""
    e = math.exp
    walk = _introspect.Float64.walk([1, 3, 2])
    expected = [(1, 1, 1, 0), (3, 3, 1 + e(-2), e(-2)), (2, 3, 1 + e(-2) + e(-1), 1)]
    assert [s[2] for s in walk] == pytest.approx([1, 1.135335, 1.503215], abs=1e-6)
    assert np.allclose(walk, expected, rtol=1e-15, atol=0)

    walk = _introspect.Float64.walk([2, 1, 3])
    expected = [(2, 2, 1, 0), (1, 2, 1 + e(-1), 1), (3, 3, (1 + e(-1)) * e(-1) + 1, e(-1))]
    assert np.allclose(walk, expected, rtol=1e-15, atol=0)
    assert walk[-1][2] == pytest.approx(1.503215, abs=1e-6)


def test_the_recurrence_starts_from_the_empty_set_not_from_the_first_score():
    """Some sources start d at x[0]; the first step's d is exp(x[0] - x[0]), 1, whatever x[0] is."""
    for first in (-7.0, 0.0, 2.0, 1e30):
        assert _introspect.Float64.walk([first])[0] == (first, first, 1.0, 0.0)


# ---- the three softmaxes -----------------------------------------------------------------------------------------------------
def softmaxes(algebra, row):
    results = {}
    for name in ("naive", "safe", "online"):
        out = np.full(len(row), -7, algebra.dtype)
        getattr(algebra.State, f"{name}_softmax")(row, out)
        results[name] = out
    return results


@pytest.mark.parametrize("size", [0, 1, 3, 1000])
def test_three_softmaxes_agree_where_nothing_overflows(algebra, size):
    row = algebra.row(np.random.default_rng(size).standard_normal(size) * 3)
    top, total, _ = algebra.reference(row)
    expected = algebra.exp(row.astype(algebra.wide) - top) / total
    for name, got in softmaxes(algebra, row).items():
        np.testing.assert_allclose(got.astype(algebra.wide), expected, rtol=algebra.tolerance(size), atol=0, err_msg=name)


def test_naive_overflows_past_88_7_and_the_others_do_not():
    algebra = Algebra("Float32")
    below, above = softmaxes(algebra, algebra.row([88.0, 0.0])), softmaxes(algebra, algebra.row([88.8, 0.0]))
    assert np.isfinite(below["naive"]).all()
    assert math.isnan(above["naive"][0])  # inf / inf
    for name in ("safe", "online"):
        assert above[name] == pytest.approx([1, math.exp(-88.8)], rel=1e-5, abs=1e-44)
    small = softmaxes(algebra, algebra.row([-110.0, -110.0]))
    assert np.isnan(small["naive"]).all()  # 0 / 0
    assert (small["safe"] == 0.5).all() and (small["online"] == 0.5).all()


def test_safe_and_online_treat_extremes_alike(algebra):
    for values in ([-INF, -INF], [-INF, 0.0], [INF, 0.0], [NAN, 0.0], [0.0, NAN], [1e38, -1e38], [-1e38, -1e38]):
        results = softmaxes(algebra, algebra.row(values))
        np.testing.assert_array_equal(results["safe"], results["online"], err_msg=str(values))


def test_safe_and_online_need_not_agree_to_the_last_bit():
    """Rounding forbids what some sources promise: the online sum was rescaled on its way, the safe one was not."""
    algebra = Algebra("Float32")
    row = algebra.row(np.linspace(-3, 3, 1000))
    results = softmaxes(algebra, row)
    assert (results["safe"] != results["online"]).any()
    np.testing.assert_allclose(results["safe"], results["online"], rtol=algebra.tolerance(1000))


# ---- the module itself -----------------------------------------------------------------------------------------------------
def test_rows_are_buffers_used_in_place_or_plain_sequences():
    assert same(_introspect.Float64(array("d", [1, 2])), _introspect.Float64([1, 2]))
    assert same(_introspect.Float32(np.float32([1, 2])), _introspect.Float32((1, 2)))
    for wrong in (np.float64([1, 2]), np.float32([[1, 2]]), np.float32([1, 2, 3, 4])[::2], "12", None):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            _introspect.Float32(wrong)
    with pytest.raises(ValueError, match="out: expected 2 elements, as many as scores has, got 3"):
        _introspect.Float32.safe_softmax([1, 2], np.zeros(3, np.float32))
    with pytest.raises(TypeError, match="out"):
        _introspect.Float32.safe_softmax([1, 2], [0, 0])


def test_the_module_needs_no_torch():
    code = f"""
import importlib.machinery, importlib.util, sys
loader = importlib.machinery.ExtensionFileLoader("_introspect", {_introspect.__file__!r})
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_introspect", loader))
loader.exec_module(module)
assert module.Float64.walk([2.0])[0] == (2.0, 2.0, 1.0, 0.0)
assert "torch" not in sys.modules
"""
    assert _introspect.__file__.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES))
    subprocess.run([sys.executable, "-c", code], check=True)


@given(st.data())
def test_visibility_ranges(data):
    """core/mask.h: which keys a query sees by arithmetic, and the inverse, against the rule itself; bounds up to int64."""
    count = data.draw(st.integers(0, 12))
    bound = st.integers(-1, 14) | st.just(2**63 - 1)
    left, right, offset = data.draw(bound), data.draw(bound), data.draw(st.integers(-14, 14))
    first = data.draw(st.integers(0, 12))
    last = data.draw(st.integers(first + 1, 13))

    def sees(query, key):
        position = query + offset
        return (left < 0 or key >= position - left) and (right < 0 or key <= position + right)

    keys, some, every = (list(range(*pair)) for pair in _introspect.ranges(left, right, offset, first, last, count))
    assert keys == [key for key in range(count) if sees(first, key)]
    assert some == [query for query in range(count) if any(sees(query, key) for key in range(first, last))]
    assert every == [query for query in range(count) if all(sees(query, key) for key in range(first, last))]
