"""What a comparison of a few runs can say: paired tests, effect sizes, intervals, rank correlations. Pure functions.

References:
    Wilcoxon, "Individual comparisons by ranking methods", Biometrics Bulletin 1 (1945).
    Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6 (1979).
    Kerby, "The simple difference formula", Comprehensive Psychology 3 (2014), for the matched rank-biserial correlation.
    Efron, "Better bootstrap confidence intervals", JASA 82 (1987).
    Friedman, "The use of ranks to avoid the assumption of normality", JASA 32 (1937).
    Demsar, "Statistical comparisons of classifiers over multiple data sets", JMLR 7 (2006), for Nemenyi's test.
    Bonett and Wright, "Sample size requirements for estimating Pearson, Kendall and Spearman correlations",
    Psychometrika 65 (2000); Fieller, Hartley and Pearson, "Tests for rank correlation coefficients", Biometrika 44 (1957).

Shapes: N pairs or blocks, K methods, M tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

ALPHA = 0.05
"""Level of all tests; intervals hold 1 - ALPHA."""
MIN_FOR_INTERVAL = 5
"""Fewest values whose resamples say anything of the spread of their mean; fewer have too few different ones."""
_RESAMPLES = 9999
_ROUNDED = 12
"""Decimals to which differences are compared: 0.3 - 0.2 and 0.2 - 0.1 are a tie and not a matter of the last bit."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval; the ends are None where there is none.

    Attributes:
        value: The estimate.
        low: Lower end.
        high: Upper end.
    """

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class SignedRank:
    """Wilcoxon's signed-rank test of paired differences.

    Attributes:
        n: Pairs.
        zeros: Pairs without a difference, which are left out of the ranks.
        ties: Pairs that share the size of their difference with another one; they share their mean rank.
        plus: Sum of the ranks of the positive differences, W+.
        minus: Sum of the ranks of the negative ones, W-.
        p: Exact two-sided p, given zeros and ties; 1 if no pair differs.
        smallest_p: What p would be if all pairs that differ had the same sign.
        effect: Matched rank-biserial correlation (W+ - W-) / (W+ + W-), -1 to 1; 0 if no pair differs.
    """

    n: int
    zeros: int
    ties: int
    plus: float
    minus: float
    p: float
    smallest_p: float
    effect: float


def signed_rank(differences: Sequence[float] | np.ndarray) -> SignedRank:
    """Wilcoxon's signed-rank test, exact for every number of pairs, with ties too.

    Under the null hypothesis every difference has either sign with probability 1/2, independently. The distribution of W+ is
    then that of a sum of ranks each of which is in it or not; it is built up rank by rank. Mean ranks of ties are multiples
    of 1/2, so twice the ranks are whole numbers.

    Args:
        differences: [N], finite.
    """
    rounded = np.round(np.asarray(differences, dtype=np.float64), _ROUNDED)
    d = rounded[rounded != 0]
    n, zeros = len(rounded), len(rounded) - len(d)
    if not len(d):
        return SignedRank(n, zeros, 0, 0.0, 0.0, 1.0, 1.0, 0.0)
    ranks = stats.rankdata(np.abs(d))
    doubled = np.rint(2 * ranks).astype(int)
    total = int(doubled.sum())
    probability = np.zeros(total + 1)
    probability[0] = 1.0
    for rank in doubled:
        moved = np.zeros_like(probability)
        moved[rank:] = probability[: total + 1 - rank]
        probability = 0.5 * (probability + moved)
    smaller = int(min(doubled[d > 0].sum(), doubled[d < 0].sum()))
    p = min(1.0, 2 * float(probability[: smaller + 1].sum()))
    _, counts = np.unique(np.abs(d), return_counts=True)
    plus, minus = float(ranks[d > 0].sum()), float(ranks[d < 0].sum())
    ties = int(counts[counts > 1].sum())
    return SignedRank(n, zeros, ties, plus, minus, p, smallest_p(len(d)), (plus - minus) / (plus + minus))


def smallest_p(n: int) -> float:
    """The smallest two-sided p that n pairs that differ can give: all have the same sign, 2 / 2^n = 2^(1 - n)."""
    return min(1.0, 2.0 ** (1 - n))


def pairs_needed(comparisons: int, alpha: float = ALPHA) -> int:
    """Fewest pairs with which one of several comparisons can survive Holm's correction: comparisons * 2^(1-n) <= alpha."""
    n = 1 + math.ceil(math.log2(comparisons / alpha))
    return n if comparisons * smallest_p(n) <= alpha else n + 1


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment: the i-th smallest p times (M - i + 1), made monotone, at most 1.

    Args:
        p_values: [M]; None for a test of the family that was refused. It counts in M (as a p of 1) and stays None.
    """
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for step, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, p * (len(p_values) - step)))
        adjusted[index] = largest
    return adjusted


def bootstrap_mean(values: Sequence[float] | np.ndarray) -> Interval:
    """The mean and its bootstrap interval (BCa), from resamples that are the same in every call.

    Below `MIN_FOR_INTERVAL` values there is no interval; if all values are equal, it is that value.
    """
    data = np.asarray(values, dtype=np.float64)
    mean = float(data.mean())
    if len(data) < MIN_FOR_INTERVAL:
        return Interval(mean)
    if np.ptp(data) <= 10.0**-_ROUNDED:
        return Interval(mean, mean, mean)
    found = stats.bootstrap(
        (data,), _rounded_mean, n_resamples=_RESAMPLES, confidence_level=1 - ALPHA, rng=np.random.default_rng(0)
    ).confidence_interval
    return Interval(mean, float(found.low), float(found.high))


def _rounded_mean(values: np.ndarray, axis: int) -> np.ndarray:
    """BCa counts resamples whose mean is that of the data, and accuracies on one test set make many of them."""
    return np.asarray(np.round(np.mean(values, axis=axis), _ROUNDED))


@dataclass(frozen=True)
class MeanRanks:
    """Friedman's test and Nemenyi's critical difference.

    Attributes:
        blocks: N, in each of which all methods are ranked.
        ranks: [K], mean rank of each method; 1 is best.
        p: Of Friedman's test (chi-squared with K - 1 degrees of freedom); 1 if all blocks are ties.
        statistic: Friedman's chi-squared.
        critical: Mean ranks that differ by more are different at level ALPHA.
    """

    blocks: int
    ranks: tuple[float, ...]
    p: float
    statistic: float
    critical: float


def mean_ranks(values_NK: np.ndarray) -> MeanRanks:
    """Rank the methods in every block, larger is better, and compare mean ranks.

    Args:
        values_NK: [N, K], K >= 3.
    """
    blocks, k = values_NK.shape
    rounded = np.round(values_NK, _ROUNDED)
    ranks_NK = stats.rankdata(-rounded, axis=1)
    statistic, p = 0.0, 1.0
    if (np.ptp(rounded, axis=1) > 0).any():
        statistic, p = (float(number) for number in stats.friedmanchisquare(*rounded.T))
    return MeanRanks(blocks, tuple(ranks_NK.mean(axis=0).tolist()), p, statistic, critical_difference(k, blocks))


def critical_difference(k: int, blocks: int, alpha: float = ALPHA) -> float:
    """Nemenyi's critical difference of mean ranks, q * sqrt(k (k + 1) / (6 N)).

    q is the upper quantile of the studentized range of k values with infinitely many degrees of freedom, over sqrt(2)
    (Demsar 2006, section 3.2.2; his table 5 holds 2.343 for k = 3 and 2.569 for k = 4 at 0.05).
    """
    q = float(stats.studentized_range.ppf(1 - alpha, k, np.inf)) / math.sqrt(2)
    return q * math.sqrt(k * (k + 1) / (6 * blocks))


@dataclass(frozen=True)
class Association:
    """Rank correlation of two quantities.

    Attributes:
        n: Pairs of values.
        spearman: Spearman's rho with its interval; None if a quantity is constant or n < 3.
        kendall: Kendall's tau-b with its interval; None likewise.
    """

    n: int
    spearman: Interval | None
    kendall: Interval | None


def association(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> Association:
    """Rank correlations with intervals on Fisher's scale.

    The standard error of artanh is sqrt((1 + rho^2 / 2) / (n - 3)) for rho (Bonett and Wright 2000) and
    sqrt(0.437 / (n - 4)) for tau (Fieller et al. 1957). Below 10 values there is no interval.

    Args:
        x: [n], finite.
        y: [n], finite.
    """
    a, b = (np.round(np.asarray(values, dtype=np.float64), _ROUNDED) for values in (x, y))
    n = len(a)
    if n < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return Association(n, None, None)
    rho, tau = float(stats.spearmanr(a, b).statistic), float(stats.kendalltau(a, b).statistic)
    if n < 10:
        return Association(n, Interval(rho), Interval(tau))
    return Association(n, _fisher(rho, math.sqrt((1 + rho**2 / 2) / (n - 3))), _fisher(tau, math.sqrt(0.437 / (n - 4))))


def _fisher(value: float, error: float) -> Interval:
    if abs(value) >= 1:
        return Interval(value, value, value)
    reach = float(stats.norm.ppf(1 - ALPHA / 2)) * error
    return Interval(value, math.tanh(math.atanh(value) - reach), math.tanh(math.atanh(value) + reach))
