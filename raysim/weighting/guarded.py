"""Guarded: a weighting whose clients are checked, capped and clipped, against models that only look good to it.

    gate   a client takes part only if L_k <= min(L(theta) + loss_margin, (1 - chance_margin) log K)
    cap    w_k <= cap / C: what is above goes to the clients below in proportion to their weights, until all are
    clip   an update longer than clip times the cohort's median length is shortened to it in the weighted mean

L: mean validation loss; theta: the model the round began with; K: classes of the data; C: clients with any weight.
A client that the gate stops is excluded from the round: the weighting, the algorithm and its states see the others only. If it
stops every client, the weights are those by size, with a note. Each guard is off unless its field is given. Algorithms that
keep sums of updates in clients' states (SCAFFOLD, FedDyn) would see whole updates beside clipped ones; they refuse `clip`.

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
    normalised,
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
        clip: Longest update, in multiples of the median.
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

    @property
    def clips(self) -> bool:
        """If told to, or if its part does."""
        return self.clip is not None or super().clips

    def finish(self, sums: Sums, model: Scored) -> Probe:
        """The weighting's probe, and beside it one with the length of the delta."""
        probe = super().finish(sums, model)
        if self.clip is None:
            return probe
        delta = (model.params - model.global_params).cpu().numpy().astype(np.float64)
        return replace(probe, parts=(*probe.parts, Probe(np.sqrt([np.square(delta).sum()]))))

    def weights(self, reports: Sequence[Report], reference: Sums | None, layout: VectorLayout) -> Weights:
        """The weighting's weights of those that pass the gate, under the cap; shortened updates."""
        rejected = self._rejected(reports, reference)
        passing = [i for i in range(len(reports)) if i not in rejected]
        if passing:
            kept = [reports[i] for i in passing]
            weights = self.of_part(0, kept, reference, layout)
        else:
            kept, passing, rejected = list(reports), list(range(len(reports))), {}
            weights = Weights(by_size(reports), notes=("the gate stops every client: weights by size",))
        client, unit, factors, notes = weights.client, weights.unit, weights.factors, list(weights.notes)
        if self.cap is not None:
            notes = [f"before the cap: {note}" for note in notes]
            client = water_filled(client, self.cap)
            unit = None if unit is None else np.stack([water_filled(column, self.cap) for column in unit.T], axis=1)
        if self.clip is not None:
            lengths = np.array([probe.parts[-1].values[0] for probe in probes_of(kept) if probe.parts[-1] is not None])
            shorter = clip_factors(lengths, self.clip)
            factors = shorter if factors is None else (factors.T * shorter).T
            short = [f"{r.client_id} to {f:.2g}" for r, f in zip(kept, shorter, strict=True) if f < 1]
            if short:
                notes.append(f"updates shortened: client {', '.join(short)} of their length")

        def spread(values: np.ndarray | None) -> np.ndarray | None:
            if values is None:
                return None
            whole = np.zeros((len(reports), *values.shape[1:]))
            whole[passing] = values
            return whole

        whole = spread(client)
        assert whole is not None
        return Weights(whole, spread(unit), weights.granularity, tuple(notes), spread(factors), rejected)

    def _rejected(self, reports: Sequence[Report], reference: Sums | None) -> dict[int, str]:
        limits = []
        if self.loss_margin is not None:
            assert reference is not None
            limits.append(float(reference["loss"] / reference["count"]) + self.loss_margin)
        if self.chance_margin is not None:
            assert reports[0].class_counts is not None
            limits.append((1 - self.chance_margin) * np.log(len(reports[0].class_counts)))
        if not limits:
            return {}
        limit, losses = min(limits), [probe.loss for probe in probes_of(reports)]
        return {
            i: f"validation loss {loss:.4g} above the gate's {limit:.4g}"
            for i, loss in enumerate(losses)
            if loss is not None and loss > limit
        }


def water_filled(weights: np.ndarray, cap: float) -> np.ndarray:
    """Weights [C] that sum to 1 and are at most `cap` over the number of positive ones, in the proportions given below that.

    Clients without any weight get none.
    """
    positive = weights > 0
    limit = cap / positive.sum()
    full = np.zeros(len(weights), dtype=bool)
    while (over := (weights > limit) & ~full).any() and (positive & ~(full | over)).any():
        full |= over
        free = positive & ~full
        weights = np.where(free, weights, 0.0)
        weights = np.where(full, limit, weights / weights.sum() * (1 - limit * full.sum()))
    return normalised(weights)


def clip_factors(lengths: np.ndarray, clip: float) -> np.ndarray:
    """What each update is multiplied by so that none is longer than `clip` times the median: [C]; 1 if the median is 0."""
    longest = clip * np.median(lengths)
    if longest == 0:
        return np.ones_like(lengths)
    factors: np.ndarray = longest / np.maximum(lengths, longest)
    return factors
