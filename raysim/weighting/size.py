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

from raysim.vector import VectorLayout
from raysim.weighting.base import Report, Sums, Weighting, Weights, by_size


@dataclass(frozen=True)
class Size(Weighting):
    """Each client counts by its number of training examples."""

    name: Literal["size"] = "size"

    def weights(self, reports: Sequence[Report], reference: Sums | None, layout: VectorLayout) -> Weights:
        """w_k = n_k / sum_j n_j."""
        return Weights(by_size(reports))
