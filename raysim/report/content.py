"""What a report says, in which order: the blocks made from a study's numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raysim.report import MEASURES
from raysim.report.comparison import Comparison
from raysim.report.document import (
    Block,
    Heading,
    Items,
    Picture,
    Text,
    interval,
    mean_sd,
    number,
    p_text,
    percent,
    seconds,
    size,
    table,
)
from raysim.report.numbers import Numbers
from raysim.report.statistics import ALPHA, MIN_FOR_INTERVAL

_MAIN_SETTINGS = (
    "data.name",
    "model.name",
    "partition.scheme",
    "partition.clients",
    "partition.alpha",
    "client.per_round",
    "client.fraction",
    "client.local_epochs",
    "client.local_steps",
    "client.batch_size",
    "client.optimizer.name",
    "client.optimizer.lr",
    "rounds",
    "algorithm.name",
    "weighting.name",
    "fusion.name",
)


def blocks_of(numbers: Numbers, figures: Mapping[str, str]) -> list[Block]:
    """The report.

    Args:
        numbers: Its numbers.
        figures: Captions of the figures that were drawn, by name.
    """
    return [
        *_overview(numbers),
        *_results(numbers, figures),
        *_rounds_to(numbers),
        *_comparisons(numbers, figures),
        *_clients(numbers, figures),
        *_costs(numbers),
        *_method(numbers),
    ]


def _overview(numbers: Numbers) -> Iterable[Block]:
    study = numbers.study
    seeds = ", ".join(str(seed) for seed in study.seeds[:20]) + (", ..." if len(study.seeds) > 20 else "")
    yield Text(
        f"{_count(len(study.runs), 'finished run')}: {_count(len(study.methods), 'method')} ({_some(study.methods)}), "
        f"{_count(len(study.conditions), 'condition')}{f' ({_some(study.conditions)})' if any(study.conditions) else ''}, "
        f"{_count(len(study.seeds), 'seed')} ({seeds})."
    )
    common = [f"{name} {study.common[name]}" for name in _MAIN_SETTINGS if name in study.common]
    if common:
        yield Text(f"The same in all runs: {', '.join(common)}.")
    if len(study.methods) == 1 and study.condition_keys:
        keys = ", ".join(study.condition_keys)
        yield Text(
            f"There is one method, so nothing is compared; --methods KEY compares by another key ({keys}).", True
        )
    for warning in study.warnings:
        yield Text(warning, warning=True)
    if numbers.left_out:
        yield Text(f"{_count(len(numbers.left_out), 'run')} left out:", warning=True)
        yield Items(tuple(f"{item.folder}: {item.reason}" for item in numbers.left_out))


def _results(numbers: Numbers, figures: Mapping[str, str]) -> Iterable[Block]:
    yield Heading("Accuracy")
    validated = (
        " At best validation: test accuracy in the round with the highest validation accuracy (the first of equals)."
        if any(row["at_best_validation"] for row in numbers.results)
        else ""
    )
    yield table(
        "results",
        "Test accuracy of the global model in %, mean ± standard deviation (n - 1) over the seeds of a setting; n is their "
        "number. Last: last tested round. Last five: mean of the last five tested rounds of each run. Best: highest of all "
        "tested rounds of each run, which is chosen on the test set and therefore too optimistic; it is not compared."
        f"{validated}",
        [
            "condition",
            "method",
            "n",
            "last",
            "last five",
            "at best validation",
            "best on test (optimistic)",
            "its round",
        ],
        [
            [
                row["condition"],
                row["method"],
                str(row["n"]),
                mean_sd(row["last"]),
                mean_sd(row["last_five"]),
                mean_sd(row["at_best_validation"]),
                mean_sd(row["best"]),
                _range(row["best_rounds"]),
            ]
            for row in numbers.results
        ],
    )
    yield from _pictures(figures, "learning-curves")


def _rounds_to(numbers: Numbers) -> Iterable[Block]:
    if not numbers.targets:
        return
    yield Heading("Rounds to an accuracy")
    origin = (
        "The targets were chosen from these runs (what the weakest run reaches at its best, and what half of the runs reach, "
        "rounded down); targets fixed beforehand are better evidence: --target."
        if numbers.chosen
        else "The targets were given."
    )
    yield table(
        "rounds",
        "First tested round with at least this test accuracy: median over seeds, least to most. A run that never reaches it is "
        "censored: it counts as later than the others, and where half of the runs or more do not reach the target the median "
        f"is beyond the last round. {origin}",
        ["condition", "method", "target in %", "reached", "median", "least to most"],
        [
            [
                row["condition"],
                row["method"],
                percent(row["target"], 0 if round(100 * row["target"], 6).is_integer() else 1),
                f"{row['reached']} of {row['n']}",
                f"> {row['rounds']}" if row["median"] is None else f"{row['median']:g}",
                "-" if row["min"] is None else f"{row['min']} to {_most(row)}",
            ]
            for row in numbers.targets
        ],
    )


def _comparisons(numbers: Numbers, figures: Mapping[str, str]) -> Iterable[Block]:
    if not numbers.comparisons:
        return
    yield Heading("Comparison of methods")
    for words in numbers.power:
        yield Text(words, warning=True)
    yield table(
        "comparisons",
        f"Paired differences in percentage points of {MEASURES[numbers.measure]}, first minus second, over the pairs of same "
        f"condition and seed. In brackets a 95 % bootstrap interval (BCa, over pairs, none below {MIN_FOR_INTERVAL}). "
        "Rank-biserial: 1 if the first is better in every pair, -1 if the second is. p: exact two-sided Wilcoxon signed-rank "
        f"test; Holm: the same corrected for {_count(len(numbers.comparisons), 'pair')} of methods. "
        f"{_zeros(numbers.comparisons)}",
        [
            "first",
            "second",
            "pairs",
            "better/equal/worse",
            "mean difference",
            "rank-biserial",
            "p",
            "p (Holm)",
            "verdict",
        ],
        [
            [
                one.first,
                one.second,
                str(len(one.pairs)),
                f"{one.wins}/{len(one.pairs) - one.wins - one.losses}/{one.losses}",
                interval(None if one.mean is None else vars(one.mean), 100, 1, signed=True),
                "-" if one.test is None else f"{one.test.effect:+.2f}",
                p_text(one.p) or "none",
                p_text(one.p_holm) or "none",
                _verdict(one),
            ]
            for one in numbers.comparisons
        ],
    )
    ranks = numbers.ranks
    if ranks is None:
        yield Text(numbers.no_ranks)
        return
    rough = (
        " With fewer than ten blocks the chi-squared distribution is a rough approximation."
        if ranks.blocks < 10
        else ""
    )
    yield Text(
        f"Friedman's test over {ranks.blocks} blocks (condition and seed) of {len(ranks.ranks)} methods: chi-squared "
        f"{ranks.statistic:.2f}, p {_p(ranks.p)}.{rough}"
        + ("" if ranks.p <= ALPHA else " The methods' ranks do not differ; the diagram below decides nothing.")
    )
    yield from _pictures(figures, "mean-ranks")


def _clients(numbers: Numbers, figures: Mapping[str, str]) -> Iterable[Block]:
    pictures = list(_pictures(figures, "weights"))
    if not pictures and not numbers.associations:
        return
    yield Heading("Weights and the clients' data")
    yield from pictures
    if numbers.associations:
        yield table(
            "correlations",
            "Rank correlation of a client's score or weight with the entropy of its labels (low = skewed) and with its number "
            "of training examples: Spearman's rho and Kendall's tau-b with approximate 95 % intervals. A client's value is its "
            "mean rank within the cohorts it was in; n counts clients of all seeds together. A dash: one of both is constant.",
            ["condition", "method", "of", "n", "rho, entropy", "tau, entropy", "rho, examples", "tau, examples"],
            [
                [
                    row["condition"],
                    row["method"],
                    row["quantity"],
                    str(row["n"]),
                    *(
                        interval(row[data][kind])
                        for data in ("entropy", "examples")
                        for kind in ("spearman", "kendall")
                    ),
                ]
                for row in numbers.associations
            ],
            words=3,
        )


def _costs(numbers: Numbers) -> Iterable[Block]:
    yield Heading("Costs")
    machines = sorted({run.machine for run in numbers.study.runs.values()})
    if len(machines) > 1:
        yield Text(
            f"The runs were made on {len(machines)} different machines or backends ({_some(machines)}); their seconds do not "
            "compare.",
            warning=True,
        )
    yield table(
        "seconds",
        "Seconds per round, medians over all rounds of all seeds. Round: from its begin to that of the next. Training: wall "
        "time from the first dispatch to the last update; scoring runs beside it. Scoring tail: wall time from there to the "
        "last score. Sum: weighting and summing. Test: of the global model, which may overlap the next round. Clients and "
        "scorers: time spent inside units of work, summed over the cohort, as if one after the other. Whole run: mean ± "
        "standard deviation over seeds, with preparation and start-up. What else the machine did is in all of them.",
        ["condition", "method", "round", "training", "scoring tail", "sum", "test", "clients", "scorers", "whole run"],
        [
            [
                row["condition"],
                row["method"],
                *(
                    seconds(row[name])
                    for name in ("round_s", "train_s", "score_tail_s", "aggregate_s", "evaluate_s", "client_train_s")
                ),
                seconds(row["client_score_s"]),
                mean_sd(row["seconds"], 1.0),
            ]
            for row in numbers.costs
        ],
    )
    yield table(
        "work",
        "Per round, medians as above. Models scored: clients whose model was scored; images: validation images each of them "
        "was scored on. Bytes: vectors between the driver and other nodes (0 on one node). Busy: share of the time that client "
        "and scorer actors worked (not measured without Ray). Lost: clients that failed or were excluded, of all rounds "
        "together; retries: units of work that were run again.",
        [
            "condition",
            "method",
            "models scored",
            "images",
            "bytes",
            "clients busy in %",
            "scorers busy in %",
            "lost",
            "retries",
        ],
        [
            [
                row["condition"],
                row["method"],
                number(row["scored_clients"]),
                number(row["scored_images"], 6),
                size(row["driver_bytes"]),
                percent(row["client_utilisation"], 0),
                percent(row["scorer_utilisation"], 0),
                str(row["failed"] + row["excluded"]),
                str(row["retries"]),
            ]
            for row in numbers.costs
        ],
    )


def _method(numbers: Numbers) -> Iterable[Block]:
    yield Heading("How the numbers are made")
    items = [
        "A setting is all that the stored configuration holds but seed, name, output and execution. Runs that differ in the "
        f"seed alone are replicates. What is compared: {', '.join(numbers.study.method_keys)}; everything else that varies "
        f"is a condition{': ' + ', '.join(numbers.study.condition_keys) if numbers.study.condition_keys else ''}.",
    ]
    if numbers.comparisons:
        items += [
            "Wilcoxon (1945): pairs without a difference are dropped, pairs of equal difference share their mean rank, and p "
            "comes from all 2^n signs of the ranks, so it is exact with ties too. Holm (1979): the i-th smallest of m p values "
            "times m - i + 1, never below the one before; tests that were refused count in m.",
            "Matched rank-biserial correlation: (W+ - W-) / (W+ + W-) (Kerby 2014). Bootstrap: 9,999 resamples of the pairs, "
            "bias corrected and accelerated (Efron 1987), from a fixed seed.",
        ]
    if numbers.ranks is not None:
        items.append(
            "Mean ranks: Friedman (1937); critical difference q sqrt(k (k + 1) / (6 N)) with q from the studentized range of k "
            "values over sqrt(2) (Nemenyi; Demsar, JMLR 2006)."
        )
    if numbers.associations:
        items.append(
            "Intervals of rank correlations on Fisher's scale, with standard error sqrt((1 + rho^2 / 2) / (n - 3)) (Bonett and "
            "Wright 2000) and sqrt(0.437 / (n - 4)) (Fieller et al. 1957); none below ten clients."
        )
    yield Items(tuple(items))


def _pictures(figures: Mapping[str, str], prefix: str) -> Iterable[Picture]:
    for name, caption in figures.items():
        if name.startswith(prefix):
            yield Picture(name, caption, caption.partition(". ")[0])


def _verdict(one: Comparison) -> str:
    if one.refused:
        return "not tested"
    if one.p_holm is None or one.p_holm > ALPHA:
        return "not decided"
    return "first better" if one.test is not None and one.test.effect > 0 else "second better"


def _zeros(found: Sequence[Comparison]) -> str:
    zeros, ties = sum(one.test.zeros for one in found if one.test), sum(one.test.ties for one in found if one.test)
    refused = sum(one.refused is not None for one in found)
    parts = [f"{_count(zeros, 'pair')} without a difference dropped, {ties} tied."]
    if refused:
        parts.append(f"{_count(refused, 'comparison')} without p: too few pairs that differ.")
    return " ".join(parts)


def _p(p: float) -> str:
    return p_text(p) if p < 0.0001 else f"= {p_text(p)}"


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _most(row: Mapping[str, Any]) -> str:
    return "never" if row["max"] is None else str(row["max"])


def _some(names: Sequence[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f", ... {len(names) - most} more" if len(names) > most else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
