"""Size: weigh clients by their number of training examples.

    w_k = n_k / sum_j n_j

The sum runs over the cohort, never over all clients: otherwise partial participation shrinks the model.

Reference: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from raysim.vector import VectorLayout
from raysim.weighting.base import Report, Sums, Weighting, Weights, normalised


@dataclass(frozen=True)
class Size(Weighting):
    """Each client counts by its number of training examples."""

    name: Literal["size"] = "size"

    def weights(self, reports: Sequence[Report], reference: Sums | None, layout: VectorLayout) -> Weights:
        """w_k = n_k / sum_j n_j."""
        return Weights(normalised(np.array([report.num_examples for report in reports], dtype=np.float64)))
