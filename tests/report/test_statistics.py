from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from raysim.report.statistics import (
    Interval,
    association,
    bootstrap_mean,
    critical_difference,
    holm,
    mean_ranks,
    pairs_needed,
    signed_rank,
    smallest_p,
)


def by_hand(differences: np.ndarray) -> float:
    """Two-sided p from all signs of the ranks, one by one."""
    d = differences[differences != 0]
    ranks = stats.rankdata(np.abs(d))
    sums = [
        sum(r for r, sign in zip(ranks, signs, strict=True) if sign)
        for signs in itertools.product((0, 1), repeat=len(d))
    ]
    seen = min(ranks[d > 0].sum(), ranks[d < 0].sum())
    return min(1.0, 2 * sum(total <= seen for total in sums) / len(sums))


@pytest.mark.parametrize("n", [5, 6, 7, 8, 15, 40])
def test_signed_rank_is_scipys_exact_test(n):
    differences = np.random.default_rng(n).normal(0.4, 1, n)
    expected = stats.wilcoxon(differences, method="exact")
    found = signed_rank(differences)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-12)
    assert min(found.plus, found.minus) == expected.statistic
    assert found.plus + found.minus == n * (n + 1) / 2


@pytest.mark.parametrize("n", [5, 6, 7, 8])
def test_the_smallest_p_is_that_of_one_sign(n):
    """2 / 2^n: 0.0625, 0.03125, 0.015625, 0.0078125."""
    assert signed_rank(np.arange(1, n + 1)).p == smallest_p(n) == 2.0 / 2**n
    assert signed_rank(-np.ones(n)).p == smallest_p(n)


def test_signed_rank_is_exact_with_ties_and_without_zeros():
    """|d| = 1, 1, 2, 2, 2, 3 have ranks 1.5, 1.5, 4, 4, 4, 6: W+ = 17, W- = 4 and r = 13 / 21."""
    differences = np.array([1.0, 1, 2, 2, -2, 3, 0, 0])
    found = signed_rank(differences)
    assert (found.n, found.zeros, found.ties) == (8, 2, 5)
    assert (found.plus, found.minus) == (17, 4)
    assert found.effect == pytest.approx(13 / 21, rel=1e-15)
    assert found.p == pytest.approx(by_hand(differences), rel=1e-12)
    assert found.smallest_p == 2 ** (1 - 6)


def test_a_tie_does_not_depend_on_the_last_bit():
    assert 0.3 - 0.2 != 0.2 - 0.1
    assert signed_rank([0.3 - 0.2, 0.2 - 0.1]).ties == 2


def test_signed_rank_of_equal_methods():
    found = signed_rank(np.zeros(6))
    assert (found.p, found.effect, found.zeros) == (1.0, 0.0, 6)


def test_swapping_the_methods_mirrors_everything():
    differences = np.round(np.random.default_rng(3).normal(0.2, 1, 9), 1)
    one, other = signed_rank(differences), signed_rank(-differences)
    assert one.p == other.p
    assert one.effect == -other.effect != 0
    a, b = bootstrap_mean(differences), bootstrap_mean(-differences)
    assert (a.value, a.low, a.high) == pytest.approx((-b.value, -b.high, -b.low), rel=1e-9)


def test_holm_by_hand():
    """Sorted: 0.01 * 4, 0.02 * 3, 0.03 * 2 (raised to the 0.06 before), 0.5 * 1."""
    assert holm([0.5, 0.01, 0.03, 0.02]) == pytest.approx([0.5, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_counts_refused_tests():
    assert holm([0.01, None, 0.02]) == [pytest.approx(0.03), None, pytest.approx(0.04)]


@pytest.mark.parametrize(("comparisons", "pairs"), [(1, 6), (3, 7), (4, 8), (6, 8), (10, 9)])
def test_pairs_needed(comparisons, pairs):
    """2^-5 <= 0.05; 3 * 2^-6 = 0.047; 4 * 2^-6 = 0.0625, so 8; 6 * 2^-7 = 0.047; 10 * 2^-8 = 0.039."""
    assert pairs_needed(comparisons) == pairs


def test_bootstrap_interval():
    values = np.random.default_rng(1).normal(2, 1, 30)
    found = bootstrap_mean(values)
    assert found == bootstrap_mean(values), "the same resamples in every call"
    half = stats.t.ppf(0.975, 29) * values.std(ddof=1) / math.sqrt(30)
    assert found.low == pytest.approx(values.mean() - half, abs=0.1)
    assert found.high == pytest.approx(values.mean() + half, abs=0.1)


def test_no_interval_of_few_values_and_none_of_width_for_equal_ones():
    assert bootstrap_mean([1.0, 2, 3, 4]) == Interval(2.5)
    assert bootstrap_mean([0.25] * 6) == Interval(0.25, 0.25, 0.25)


@pytest.mark.parametrize(("k", "q"), [(2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728), (6, 2.850), (10, 3.164)])
def test_critical_difference_has_the_quantiles_of_demsars_table_5(k, q):
    """The table cuts off or rounds the third decimal, hence 1e-3."""
    assert critical_difference(k, 1) / math.sqrt(k * (k + 1) / 6) == pytest.approx(q, abs=1e-3)


def test_critical_difference_of_demsars_example():
    """Four methods on 14 data sets: 2.569 * sqrt(4 * 5 / (6 * 14)) = 1.25 (his section 3.2.2)."""
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)


def test_mean_ranks_by_hand():
    """Blocks (1, 2, 3), (1, 1, 0): ranks (3, 2, 1), (1.5, 1.5, 3)."""
    found = mean_ranks(np.array([[1.0, 2, 3], [1, 1, 0]]))
    assert found.ranks == (2.25, 1.75, 2.0)
    values = np.random.default_rng(0).normal(size=(12, 4)) + np.arange(4)
    expected = stats.friedmanchisquare(*values.T)
    assert mean_ranks(values).p == pytest.approx(expected.pvalue)
    assert mean_ranks(np.ones((6, 3))).p == 1.0


def test_association():
    x = np.arange(20.0)
    y = np.array([1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14, 17, 16, 19, 18], dtype=float)
    found = association(x, y)
    # 10 swapped neighbours: rho = 1 - 6 * 20 / (20 * 399), tau = 1 - 2 * 10 / 190.
    assert found.spearman.value == pytest.approx(1 - 120 / 7980)
    assert found.kendall.value == pytest.approx(1 - 20 / 190)
    rho = found.spearman.value
    reach = 1.959963984540054 * math.sqrt((1 + rho**2 / 2) / 17)
    assert found.spearman.low == pytest.approx(math.tanh(math.atanh(rho) - reach))
    reach = 1.959963984540054 * math.sqrt(0.437 / 16)
    assert found.kendall.high == pytest.approx(math.tanh(math.atanh(found.kendall.value) + reach))
    mirrored = association(-x, y).spearman
    assert (mirrored.value, mirrored.low) == pytest.approx((-rho, -found.spearman.high))


def test_association_that_says_nothing():
    assert association(np.ones(5), np.arange(5.0)).spearman is None
    assert association([1.0, 2], [1.0, 2]).kendall is None
    assert association(np.arange(9.0), np.arange(9.0)).spearman == Interval(pytest.approx(1.0))
    assert association(np.arange(10.0), np.arange(10.0)).spearman.low == pytest.approx(1.0)
