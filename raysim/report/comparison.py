"""What the comparison of methods found: every pair of methods over the pairs of condition and seed that both have."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from raysim.report.measures import Row
from raysim.report.statistics import (
    ALPHA,
    Interval,
    MeanRanks,
    SignedRank,
    bootstrap_mean,
    holm,
    mean_ranks,
    pairs_needed,
    signed_rank,
    smallest_p,
)
from raysim.report.study import Study

MIN_BLOCKS = 5
"""Fewest blocks for mean ranks; below ten Friedman's chi-squared is rough, which is said."""


@dataclass(frozen=True)
class Comparison:
    """Two methods over the pairs of condition and seed that both have; differences are first minus second.

    Attributes:
        first: A method.
        second: Another.
        pairs: Condition and seed of each pair.
        differences: [N], of the measure.
        wins: Pairs in which the first is better.
        losses: Pairs in which the second is better.
        mean: Mean difference and its bootstrap interval; None without a pair.
        test: Wilcoxon's signed-rank test; None without a pair.
        refused: Why there is no p; None if there is one.
        p: Its two-sided p.
        p_holm: The same after Holm's correction over all pairs of methods.
    """

    first: str
    second: str
    pairs: tuple[tuple[str, int], ...]
    differences: tuple[float, ...]
    wins: int
    losses: int
    mean: Interval | None
    test: SignedRank | None
    refused: str | None
    p: float | None
    p_holm: float | None = None

    def row(self) -> Row:
        """For `report.json`."""
        return {**asdict(self), "significant": self.p_holm is not None and self.p_holm <= ALPHA}


def compare(first: str, second: str, values: Mapping[str, Mapping[tuple[str, int], float]]) -> Comparison:
    """Compare two methods.

    Args:
        first: A method.
        second: Another.
        values: The measure by method, then by condition and seed.
    """
    pairs = tuple(sorted(values[first].keys() & values[second].keys()))
    differences = tuple(values[first][pair] - values[second][pair] for pair in pairs)
    if not pairs:
        return Comparison(first, second, (), (), 0, 0, None, None, "no pair of the same condition and seed", None)
    test = signed_rank(differences)
    left = test.n - test.zeros
    refused = None
    if smallest_p(left) > ALPHA and left:
        refused = f"{left} pairs that differ cannot give p <= {ALPHA:g}: the smallest is {smallest_p(left):.3g}"
    elif not left:
        refused = "no pair differs"
    signs = np.sign(np.round(differences, 12))
    return Comparison(
        first,
        second,
        pairs,
        differences,
        int((signs > 0).sum()),
        int((signs < 0).sum()),
        bootstrap_mean(differences),
        test,
        refused,
        None if refused else test.p,
    )


def comparisons(study: Study, values: Mapping[str, Mapping[tuple[str, int], float]]) -> list[Comparison]:
    """All pairs of methods, corrected together. A refused test counts in the correction."""
    found = [compare(first, second, values) for first, second in itertools.combinations(study.methods, 2)]
    adjusted = holm([one.p for one in found])
    return [Comparison(**{**vars(one), "p_holm": p}) for one, p in zip(found, adjusted, strict=True)]


def values_of(runs: Sequence[Row], measure: str) -> dict[str, dict[tuple[str, int], float]]:
    """A measure by method, then by condition and seed; runs without it are left out."""
    found: dict[str, dict[tuple[str, int], float]] = {}
    for row in runs:
        mine = found.setdefault(row["method"], {})
        if row[measure] is not None:
            mine[row["condition"], row["seed"]] = row[measure]
    return found


def power_words(found: Sequence[Comparison]) -> list[str]:
    """What the number of pairs allows, in words: whether any p could survive the correction, and what would be needed."""
    if not found:
        return []
    m = len(found)
    most = max((one.test.n - one.test.zeros for one in found if one.test), default=0)
    seeds = {seed for one in found for _, seed in one.pairs}
    conditions = {condition for one in found for condition, _ in one.pairs}
    least = smallest_p(most) if most else 1.0
    tests = "comparison" if m == 1 else "comparisons"
    words = []
    if most and least > ALPHA:
        words.append(
            f"Too few pairs for a test: with {most} pairs that differ the smallest two-sided p is 2^(1-{most}) = {least:.3g}, "
            f"above {ALPHA:g} even without a correction. No p is given; {pairs_needed(m)} pairs that all agree are the fewest "
            f"that could decide one of {m} {tests}."
        )
    elif most and m * least > ALPHA:
        words.append(
            f"No p can survive the correction: with {most} pairs that differ the smallest two-sided p is "
            f"2^(1-{most}) = {least:.3g}, times {m} {tests} {m * least:.3g}, above {ALPHA:g}. That nothing is significant here "
            f"says nothing about the methods; at least {pairs_needed(m)} pairs are needed."
        )
    elif most:
        words.append(
            f"With {most} pairs the smallest two-sided p is 2^(1-{most}) = {least:.3g}; times {m} {tests} it is "
            f"{m * least:.3g}, so that a difference can survive the correction if all or nearly all pairs agree."
        )
    if len(conditions) > 1 and seeds:
        by_seed = smallest_p(len(seeds))
        words.append(
            f"The pairs are {len(seeds)} seed{'s' * (len(seeds) != 1)} under {len(conditions)} conditions. Pairs of one seed "
            "share the initial model and the sampled clients and are not independent, which makes p and the intervals too "
            f"small; were only the seeds counted, the smallest p would be 2^(1-{len(seeds)}) = {by_seed:.3g}."
        )
    return words


def ranks_of(
    study: Study, values: Mapping[str, Mapping[tuple[str, int], float]]
) -> tuple[MeanRanks | None, list[tuple[str, int]], str]:
    """Mean ranks over the blocks that all methods have, these blocks, and why there are none."""
    blocks = sorted(set.intersection(*(set(values.get(method, {})) for method in study.methods)))
    if len(study.methods) < 3:
        return None, blocks, "Mean ranks need at least three methods."
    if len(blocks) < MIN_BLOCKS:
        return (
            None,
            blocks,
            f"Mean ranks need at least {MIN_BLOCKS} blocks (condition and seed) with all methods; there are {len(blocks)}.",
        )
    return mean_ranks(np.array([[values[method][block] for method in study.methods] for block in blocks])), blocks, ""
