"""Direction: weigh clients by how well their updates agree with a descent direction of the server.

    c_k = cos(delta_k, -grad L_val(theta))        L_val: mean validation loss, theta: the model the round began with
    w_k = max(c_k, 0) / sum_j max(c_j, 0)

Where no update points downhill, the weights are those by size, with a note. A zero vector has cosine 0.

Reference: after Cao et al., FLTrust, NDSS 2021, Eq. 2 to 4.
Differs from FLTrust: the server's direction is one gradient instead of an update trained on its data, and updates keep their
lengths instead of being scaled to the server's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from raysim.vector import Unit, VectorLayout
from raysim.weighting.base import Needs, Probe, Report, Scored, Sums, Weighting, Weights, by_size, normalised, probes_of


@dataclass(frozen=True)
class Direction(Weighting):
    """Each client counts by the cosine of its update and the negative validation gradient."""

    name: Literal["direction"] = "direction"

    @property
    def needs(self) -> Needs:
        """Only the vectors of a client's model."""
        return "vectors"

    @property
    def reference_needs(self) -> Needs:
        """The gradient at the global model."""
        return "gradient"

    def scored_units(self, layout: VectorLayout) -> tuple[Unit, ...]:
        """One: the whole model."""
        return (Unit("cosine", (slice(0, layout.size),)),)

    def finish(self, sums: Sums, model: Scored) -> Probe:
        """c_k; the score is 1 - c_k."""
        assert model.reference is not None
        downhill = -model.reference["gradient"]
        delta = (model.params - model.global_params).cpu().numpy().astype(np.float64)
        lengths = np.sqrt(np.square(downhill).sum() * np.square(delta).sum())
        cosine = float((downhill * delta).sum() / lengths) if lengths > 0 else 0.0
        return Probe.of(sums, values=np.array([cosine]), score=1 - cosine)

    def weights(self, reports: Sequence[Report], reference: Sums | None, layout: VectorLayout) -> Weights:
        """w_k = max(c_k, 0) / sum_j max(c_j, 0)."""
        agreement = np.maximum([probe.values[0] for probe in probes_of(reports)], 0.0)
        if not agreement.any():
            return Weights(by_size(reports), notes=("no update points down the validation loss: weights by size",))
        return Weights(normalised(agreement))
