"""The numbers of a report: results, rounds to an accuracy, rank correlations and costs of a study.

Every function returns plain rows (dictionaries), which go into `report.json` as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from scipy import stats

from raysim.report.collect import Participation, Run
from raysim.report.statistics import association
from raysim.report.study import Study

Row = dict[str, Any]

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
