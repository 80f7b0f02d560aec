"""All numbers of a report, and `report.json`, which holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raysim import __version__
from raysim.errors import ConfigError
from raysim.report import comparison, measures
from raysim.report.collect import LeftOut
from raysim.report.comparison import Comparison
from raysim.report.measures import Row
from raysim.report.statistics import MeanRanks
from raysim.report.study import Study

SCHEMA = 1
"""Version of the shape of `report.json`."""


@dataclass(frozen=True)
class Numbers:
    """All numbers of a report.

    Attributes:
        study: The runs.
        left_out: Runs that are not in it.
        measure: What methods are compared by, a key of `MEASURES`.
        runs: One row per run.
        results: One row per setting.
        targets: Rounds to an accuracy.
        chosen: Whether these accuracies were chosen from the data.
        comparisons: Pairs of methods.
        power: What their number of pairs allows, in words.
        ranks: Mean ranks; None if there are none.
        no_ranks: Why there are none.
        associations: Scores, weights and data of clients.
        costs: What a round cost.
    """

    study: Study
    left_out: Sequence[LeftOut]
    measure: str
    runs: Sequence[Row]
    results: Sequence[Row]
    targets: Sequence[Row]
    chosen: bool
    comparisons: Sequence[Comparison]
    power: Sequence[str]
    ranks: MeanRanks | None
    no_ranks: str
    associations: Sequence[Row]
    costs: Sequence[Row]


def numbers_of(study: Study, left_out: Sequence[LeftOut], measure: str, targets: Sequence[float]) -> Numbers:
    """Everything that is computed from a study.

    Args:
        study: The runs.
        left_out: Runs that are not in it.
        measure: What methods are compared by, a key of `MEASURES`.
        targets: Accuracies to reach; none: chosen from the data.

    Raises:
        ConfigError: No run has the measure.
    """
    rows = measures.run_rows(study)
    values = comparison.values_of(rows, measure)
    if not any(values.values()):
        raise ConfigError(f"--measure: {measure}: no run has it (there is no validation accuracy of the global model)")
    wanted = {condition: sorted(set(targets)) for condition in study.conditions}
    compared = comparison.comparisons(study, values)
    ranks, _, no_ranks = comparison.ranks_of(study, values)
    return Numbers(
        study=study,
        left_out=left_out,
        measure=measure,
        runs=rows,
        results=measures.result_rows(study, rows),
        targets=measures.target_rows(study, wanted if targets else measures.chosen_targets(study, rows)),
        chosen=not targets,
        comparisons=compared,
        power=comparison.power_words(compared),
        ranks=ranks,
        no_ranks=no_ranks,
        associations=measures.association_rows(study),
        costs=measures.cost_rows(study),
    )


def document_of(numbers: Numbers, captions: Mapping[str, str]) -> dict[str, Any]:
    """The content of `report.json`."""
    study = numbers.study
    curves = [
        {
            "condition": condition,
            "method": method,
            "seed": seed,
            "round": run.curve.round_num,
            "accuracy": run.curve.accuracy,
            "validation_accuracy": run.curve.validation_accuracy,
            "costs": run.curve.costs,
        }
        for (condition, method, seed), run in study.runs.items()
    ]
    return {
        "schema": SCHEMA,
        "raysim": __version__,
        "measure": numbers.measure,
        "methods": study.methods,
        "conditions": study.conditions,
        "seeds": study.seeds,
        "method_keys": study.method_keys,
        "condition_keys": study.condition_keys,
        "common": study.common,
        "warnings": [*study.warnings, *numbers.power],
        "left_out": numbers.left_out,
        "runs": numbers.runs,
        "results": numbers.results,
        "rounds_to": {"chosen_from_the_data": numbers.chosen, "rows": numbers.targets},
        "comparisons": [one.row() for one in numbers.comparisons],
        "ranks": None if numbers.ranks is None else {"methods": study.methods, **asdict(numbers.ranks)},
        "correlations": numbers.associations,
        "costs": numbers.costs,
        "figures": captions,
        "curves": curves,
    }
