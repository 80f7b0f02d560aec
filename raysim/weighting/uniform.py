"""Uniform: every client of the cohort counts the same.

    w_k = 1 / C

The comparison that separates "not by size" from "by gradient".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from raysim.vector import VectorLayout
from raysim.weighting.base import Report, Sums, Weighting, Weights


@dataclass(frozen=True)
class Uniform(Weighting):
    """Each client counts the same."""

    name: Literal["uniform"] = "uniform"

    def weights(self, reports: Sequence[Report], reference: Sums | None, layout: VectorLayout) -> Weights:
        """w_k = 1 / C."""
        return Weights(np.full(len(reports), 1.0 / len(reports)))
