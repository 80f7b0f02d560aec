"""The numbers of a round under the names that every logger uses; `raysim.recording.tensorboard` lists and explains them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from raysim.recording.logger import RunInfo
from raysim.recording.records import ClientRecord, RoundRecord
from raysim.recording.tables import read_table

MAX_CLIENT_CURVES = 50
"""The largest number of clients that have a curve each."""

QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}
"""What is shown of the scores and weights of a cohort, by name."""

ROUNDS_TO = (50, 60, 70, 80, 90, 95)
"""Test accuracies, in per cent, of which the first round that has them is told."""

SIZES = ("small", "medium", "large")
"""The thirds of all clients, by training examples."""


class RoundMetrics:
    """Names and numbers of the rounds of one run.

    Args:
        info: The run. Of one that is resumed, the rounds so far are read from its table.
    """

    def __init__(self, info: RunInfo) -> None:
        self._recall_tags = [f"global/recall/{escape(name)}" for name in info.class_names]
        self.unit_tags = [f"layer/{escape(name)}/norm_median" for name in info.unit_names]
        self.each_client = len(info.client_sizes) <= MAX_CLIENT_CURVES
        bounds = size_bounds(info.client_sizes)
        self._third = None if bounds is None else np.searchsorted(bounds, info.client_sizes, side="left")
        self._best = -1.0
        self._remote = False
        if info.resume_round is not None:
            done = read_table(info.folder, "rounds").select(["round_num", "accuracy", "driver_bytes"]).to_pylist()
            done = [row for row in done if row["round_num"] < info.resume_round]
            self._best = max((row["accuracy"] for row in done if row["accuracy"] is not None), default=-1.0)
            self._remote = any(row["driver_bytes"] for row in done)

    def of_round(self, round_record: RoundRecord, client_records: Sequence[ClientRecord]) -> dict[str, float]:
        """Every number that the round has, by tag. Called once per round, in order."""
        return {tag: value for tag, value in self._scalars(round_record, client_records) if value is not None}

    def _scalars(
        self, round_record: RoundRecord, client_records: Sequence[ClientRecord]
    ) -> Iterator[tuple[str, float | None]]:
        yield "global/loss", round_record.loss
        yield "global/accuracy", round_record.accuracy
        yield "global/macro_f1", round_record.macro_f1
        yield "global/validation_loss", round_record.validation_loss
        yield "global/validation_accuracy", round_record.validation_accuracy
        if round_record.accuracy is not None:
            before, self._best = self._best, max(self._best, round_record.accuracy)
            yield "global/best_accuracy", self._best
            for percent in ROUNDS_TO:
                if before < percent / 100 <= self._best:
                    yield f"rounds_to/{percent}", round_record.round_num
        if round_record.recall is not None:
            yield from zip(self._recall_tags, round_record.recall, strict=True)
        for name in ("score", "weight"):
            yield from self._of_clients(name, client_records)
        yield "weight/entropy", round_record.weight_entropy
        yield "weight/max", round_record.weight_max
        yield "weight/error", round_record.weight_error
        yield "validation/loss_median", _median(record.validation_loss for record in client_records)
        yield "validation/accuracy_median", _median(record.validation_accuracy for record in client_records)
        norms = unit_norms(client_records)
        if norms is not None:
            yield from zip(self.unit_tags, norms.tolist(), strict=True)
        for name in ("train", "score_tail", "aggregate", "evaluate", "commit", "round"):
            yield f"time/{name}", getattr(round_record, f"{name}_s")
        yield "pool/client/utilisation", round_record.client_utilisation
        yield "pool/scorer/utilisation", round_record.scorer_utilisation
        self._remote |= round_record.driver_bytes > 0
        if self._remote:  # On one node it would be a line at zero.
            yield "pool/driver_bytes", round_record.driver_bytes
        for name in ("retries", "failed", "excluded", "skipped"):
            yield f"fault/{name}", getattr(round_record, name)

    def _of_clients(self, name: str, client_records: Sequence[ClientRecord]) -> Iterator[tuple[str, float | None]]:
        values = np.array([getattr(record, name) for record in client_records], dtype=np.float64)  # None is NaN.
        present = np.isfinite(values)
        if self._third is not None:
            third = self._third[[record.client_id for record in client_records]]
            for number, size in enumerate(SIZES):
                if (chosen := present & (third == number)).any():
                    yield f"{name}/size_{size}", float(np.median(values[chosen]))
        if self.each_client:
            for record in client_records:
                yield f"{name}/client_{record.client_id:03d}", getattr(record, name)
        elif present.any():
            found = np.quantile(values[present], list(QUANTILES.values())).tolist()
            for label, value in zip(QUANTILES, found, strict=True):
                # weight/max is also a scalar of the round, the same number.
                if (name, label) != ("weight", "max"):
                    yield f"{name}/{label}", value


def escape(name: str) -> str:
    """A name as one part of a tag; `urllib.parse.unquote` undoes it.

    Example:
        >>> escape("pneumonia a/b")
        'pneumonia a%2Fb'
    """
    return name.replace("%", "%25").replace("/", "%2F")


def size_bounds(client_sizes: Sequence[int]) -> tuple[int, int] | None:
    """Training examples up to which a client is small and up to which it is medium: thirds of those that have any.

    None if two thirds or more have as many as the largest.
    """
    sizes = np.sort([size for size in client_sizes if size > 0])
    if not len(sizes):
        return None
    low, high = (int(sizes[(number * len(sizes) - 1) // 3]) for number in (1, 2))
    return (low, high) if low < sizes[-1] else None


def unit_norms(client_records: Sequence[ClientRecord]) -> np.ndarray | None:
    """[U], the median over the clients of the norm of the validation gradient; None if nothing was measured."""
    norms = [record.unit_norms for record in client_records if record.unit_norms is not None]
    return np.median(np.array(norms), axis=0) if norms else None


def finite(values: Iterable[float | None]) -> np.ndarray:
    """The values that are there and finite."""
    present = np.array([value for value in values if value is not None], dtype=np.float64)
    return present[np.isfinite(present)]


def _median(values: Iterable[float | None]) -> float | None:
    present = finite(values)
    return float(np.median(present)) if len(present) else None
