"""Guarded: a weighting whose clients are checked, capped and clipped, against models that only look good to it.

    gate   a client counts only if L_k <= min(L(theta) + loss_margin, (1 - chance_margin) log K); the rest share its weight
    cap    w_k <= cap / C: what is above goes to the clients below in proportion to their weights, until all are
    clip   a delta longer than clip times the cohort's median length is shortened to it

L: mean validation loss; theta: the model the round began with; K: classes of the data; C: clients that pass the gate.
Each guard is off unless its field is given. If the gate stops every client, the weights are those by size, with a note.

Why: a gradient norm can be had small by rescaling a layer, by a shrunken classifier or by a dead model; a finite score is
checked always. FedVG's `scale_free`, `relative_eps` and `exponent` guard its score itself.
Shapes: C cohort, U units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge

from raysim.fields import NonNegative, Positive, ProperFraction
from raysim.vector import VectorLayout
from raysim.weighting.base import (
    Combination,
    Needs,
    Probe,
    Report,
    Scored,
    Sums,
    Weighting,
    Weights,
    by_size,
    most,
    probes_of,
    registered,
)


@dataclass(frozen=True)
class Guarded(Combination):
    """A weighting with guards.

    Attributes:
        of: The weighting.
        loss_margin: How far a model's validation loss may lie above the global model's.
        chance_margin: How far it has to lie below log K, as a share of it.
        cap: Largest weight, in multiples of 1 / C; at least 1.
        clip: Longest delta, in multiples of the median.
    """

    name: Literal["guarded"] = "guarded"
    of: Weighting = field(default_factory=lambda: registered("fedvg"))
    loss_margin: NonNegative | None = None
    chance_margin: ProperFraction | None = None
    cap: Annotated[float, Ge(1)] | None = None
    clip: Positive | None = None

    @property
    def parts(self) -> tuple[Weighting, ...]:
        """The one."""
        return (self.of,)

    @property
    def needs(self) -> Needs:
        """Losses for the gate, lengths for clipping."""
        gate: Needs = "nothing" if self.loss_margin is None and self.chance_margin is None else "losses"
        return most([super().needs, gate, "nothing" if self.clip is None else "vectors"])

    @property
    def reference_needs(self) -> Needs:
        """The global model's loss."""
        return most([super().reference_needs, "nothing" if self.loss_margin is None else "losses"])

    def finish(self, sums: Sums, model: Scored) -> Probe:
        """The weighting's probe, and beside it one with the length of the delta."""
        probe = super().finish(sums, model)
        if self.clip is None:
            return probe
        delta = (model.params - model.global_params).cpu().numpy().astype(np.float64)
        return replace(probe, parts=(*probe.parts, Probe(np.sqrt([np.square(delta).sum()]))))

    def weights(self, reports: Sequence[Report], reference: Sums | None, layout: VectorLayout) -> Weights:
        """The weighting's weights behind the gate, under the cap; shortened deltas."""
        weights = self.of_part(0, reports, reference, layout)
        notes = list(weights.notes)
        kept = self._passing(reports, reference, notes)
        if not kept.any():
            notes.append("the gate stops every client: weights by size")
            weights, kept = Weights(by_size(reports)), ~kept
        limit = np.inf if self.cap is None else self.cap / kept.sum()
        client = water_filled(np.where(kept, weights.client, 0), kept, limit)
        unit = weights.unit
        if unit is not None:
            unit = np.stack([water_filled(np.where(kept, column, 0), kept, limit) for column in unit.T], axis=1)
        guarded = Weights(client, unit, weights.granularity, tuple(notes))
        if self.clip is None:
            return guarded
        lengths = np.array([probe.parts[-1].values[0] for probe in probes_of(reports) if probe.parts[-1] is not None])
        factors = clip_factors(lengths, self.clip)
        return replace(guarded, delta=(guarded.parameters.T * factors).T)

    def _passing(self, reports: Sequence[Report], reference: Sums | None, notes: list[str]) -> np.ndarray:
        limits = []
        if self.loss_margin is not None:
            assert reference is not None
            limits.append(float(reference["loss"] / reference["count"]) + self.loss_margin)
        if self.chance_margin is not None:
            assert reports[0].class_counts is not None
            limits.append((1 - self.chance_margin) * np.log(len(reports[0].class_counts)))
        kept = np.ones(len(reports), dtype=bool)
        if limits:
            losses = np.array([probe.loss for probe in probes_of(reports)], dtype=np.float64)
            kept = losses <= min(limits)
            stopped = [
                f"{report.client_id} ({loss:.3g})"
                for report, loss, ok in zip(reports, losses, kept, strict=True)
                if not ok
            ]
            if stopped:
                notes.append(f"validation loss above {min(limits):.3g}, weight 0: client {', '.join(stopped)}")
        return kept


def water_filled(weights: np.ndarray, kept: np.ndarray, limit: float) -> np.ndarray:
    """Weights [C] that sum to 1 and are at most `limit`, 0 where not `kept`, else in the proportions given where below it.

    Clients without any weight to be proportional to share equally. `limit` is at least one over the number kept.
    """
    weights = weights / weights.sum() if weights.any() else kept / kept.sum()
    full = np.zeros(len(weights), dtype=bool)
    while (over := (weights > limit) & ~full).any():
        full |= over
        free = kept & ~full
        rest = max(1 - limit * full.sum(), 0.0)
        base = weights[free] if weights[free].any() else np.ones(free.sum())
        weights = np.where(full, limit, 0.0)
        weights[free] = rest * base / base.sum()
    return weights


def clip_factors(lengths: np.ndarray, clip: float) -> np.ndarray:
    """What each delta is multiplied by so that none is longer than `clip` times the median: [C]."""
    longest = clip * np.median(lengths)
    factors: np.ndarray = np.minimum(1.0, np.divide(longest, lengths, out=np.ones_like(lengths), where=lengths > 0))
    return factors
