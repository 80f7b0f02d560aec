"""The numbers of a report: results, rounds to an accuracy, comparisons, rank correlations and costs of a study.

Every function returns plain rows (dictionaries), which go into `report.json` as they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

from raysim.report.collect import Participation, Run
from raysim.report.statistics import (
    ALPHA,
    Interval,
    MeanRanks,
    SignedRank,
    association,
    bootstrap_mean,
    holm,
    mean_ranks,
    pairs_needed,
    signed_rank,
    smallest_p,
)
from raysim.report.study import Study

Row = dict[str, Any]

MIN_BLOCKS = 5
"""Fewest blocks for mean ranks; below ten Friedman's chi-squared is rough, which is said."""
ACCURACIES = ("last", "last_five", "best", "at_best_validation")


def run_row(run: Run) -> Row:
    """The accuracies of one run: last tested round, mean of the last five, best on the test set, at the best validation."""
    curve = run.curve
    tested = np.flatnonzero(np.isfinite(curve.accuracy))
    accuracy, rounds = curve.accuracy[tested], curve.round_num[tested]
    best = int(np.argmax(accuracy))
    row: Row = {
        "folder": str(run.folder),
        "seed": run.seed,
        "rounds": run.rounds,
        "tested": len(tested),
        "last": float(accuracy[-1]),
        "last_round": int(rounds[-1]),
        "last_five": float(accuracy[-5:].mean()),
        "best": float(accuracy[best]),
        "best_round": int(rounds[best]),
        "at_best_validation": None,
        "best_validation_round": None,
        "seconds": run.seconds,
    }
    validated = tested[np.isfinite(curve.validation_accuracy[tested])]
    if len(validated):
        chosen = validated[int(np.argmax(curve.validation_accuracy[validated]))]
        row |= {
            "at_best_validation": float(curve.accuracy[chosen]),
            "best_validation_round": int(curve.round_num[chosen]),
        }
    return row


def run_rows(study: Study) -> list[Row]:
    """One row per run."""
    return [{"condition": condition, "method": method, **run_row(run)} for condition, method, run in _in_order(study)]


def result_rows(study: Study, runs: Sequence[Row]) -> list[Row]:
    """Mean, standard deviation (n - 1), least and most over the seeds of each setting."""
    rows = []
    for condition, method, mine in _settings(study, runs):
        row: Row = {"condition": condition, "method": method, "n": len(mine), "seeds": [one["seed"] for one in mine]}
        for name in ACCURACIES:
            row[name] = spread([one[name] for one in mine])
        row["best_rounds"] = [one["best_round"] for one in mine]
        rows.append(row)
    return rows


def spread(values: Sequence[float | None]) -> Row | None:
    """Mean, sd, least and most; None unless all are known."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    sd = float(np.std(known, ddof=1)) if len(known) > 1 else None
    return {"mean": float(np.mean(known)), "sd": sd, "min": min(known), "max": max(known)}


def chosen_targets(study: Study, runs: Sequence[Row]) -> dict[str, list[float]]:
    """Accuracies to reach, by condition, chosen from the data: what every run reaches and what half of them reach.

    The least and the median of the runs' best accuracies, rounded down to whole per cent.
    """
    found = {}
    for condition in study.conditions:
        best = [row["best"] for row in runs if row["condition"] == condition]
        levels = {math.floor(100 * level + 1e-9) / 100 for level in (min(best), float(np.median(best)))}
        found[condition] = sorted(level for level in levels if level > 0)
    return found


def target_rows(study: Study, targets: Mapping[str, Sequence[float]]) -> list[Row]:
    """Rounds until an accuracy is first reached, by setting; a run that never reaches it is censored.

    The median counts a censored run as later than all others, which is all that is known of it: with half of the runs or
    more censored there is no median.
    """
    rows = []
    for condition, target in ((c, t) for c in study.conditions for t in targets.get(c, ())):
        for method in study.methods:
            mine = study.of(condition, method)
            if not mine:
                continue
            reached = [first_reached(run, target) for run in mine]
            ordered = sorted(math.inf if number is None else number for number in reached)
            middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
            known = [number for number in reached if number is not None]
            rows.append(
                {
                    "condition": condition,
                    "target": target,
                    "method": method,
                    "n": len(mine),
                    "reached": len(known),
                    "median": middle if math.isfinite(middle) else None,
                    "min": min(known, default=None),
                    "max": max(known) if len(known) == len(mine) else None,
                    "rounds": min(run.rounds for run in mine),
                    "by_seed": {str(run.seed): number for run, number in zip(mine, reached, strict=True)},
                }
            )
    return rows


def first_reached(run: Run, target: float) -> int | None:
    """The first tested round with at least this accuracy."""
    hits = run.curve.round_num[run.curve.accuracy >= target - 1e-12]
    return int(hits[0]) if len(hits) else None


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


def association_rows(study: Study) -> list[Row]:
    """How a client's score and weight go with its data, by setting.

    A client's value is its mean rank among the clients of its rounds, from 0 (lowest) to 1, so that rounds of different
    scale count alike. Clients of different seeds are different clients.
    """
    rows = []
    for condition, method, runs in _grouped(study):
        known = [run for run in runs if run.entropy is not None and run.examples is not None]
        for quantity in ("score", "weight"):
            means = [mean_rank_of(run.clients, getattr(run.clients, quantity)) for run in known]
            values = np.concatenate([mean for _, mean in means]) if means else np.zeros(0)
            if not len(values):
                continue
            row: Row = {"condition": condition, "method": method, "quantity": quantity, "n": len(values)}
            for name in ("entropy", "examples"):
                data = [getattr(run, name)[ids] for run, (ids, _) in zip(known, means, strict=True)]
                row[name] = asdict(association(values, np.concatenate(data)))
            rows.append(row)
    return rows


def mean_rank_of(clients: Participation, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Clients that have a value in some round, and the mean of their ranks within the rounds, (rank - 1/2) / size."""
    known = np.isfinite(values)
    round_num, client_id, value = clients.round_num[known], clients.client_id[known], values[known]
    place = np.zeros(len(value))
    for number in np.unique(round_num):
        here = round_num == number
        place[here] = (stats.rankdata(np.round(value[here], 12)) - 0.5) / here.sum()
    ids = np.unique(client_id)
    return ids, np.array([place[client_id == one].mean() for one in ids])


def cost_rows(study: Study) -> list[Row]:
    """What a round cost, by setting: medians over all rounds of all seeds; whole runs as mean over seeds."""
    rows = []
    for condition, method, runs in _grouped(study):
        row: Row = {"condition": condition, "method": method, "n": len(runs)}
        row["round_count"] = sum(len(run.curve.round_num) for run in runs)
        for name in runs[0].curve.costs:
            values = np.concatenate([run.curve.costs[name] for run in runs])
            values = values[np.isfinite(values)]
            if name in ("failed", "excluded", "retries"):
                row[name] = int(values.sum())
            else:
                row[name] = float(np.median(values)) if len(values) else None
        row["seconds"] = spread([run.seconds for run in runs])
        rows.append(row)
    return rows


def _in_order(study: Study) -> list[tuple[str, str, Run]]:
    return [(condition, method, run) for condition, method, runs in _grouped(study) for run in runs]


def _grouped(study: Study) -> list[tuple[str, str, list[Run]]]:
    every = [(c, m, study.of(c, m)) for c in study.conditions for m in study.methods]
    return [group for group in every if group[2]]


def _settings(study: Study, rows: Sequence[Row]) -> list[tuple[str, str, list[Row]]]:
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row["condition"], row["method"]), []).append(row)
    return [(c, m, grouped[c, m]) for c in study.conditions for m in study.methods if (c, m) in grouped]
