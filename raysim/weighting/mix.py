"""Mix: a weighted mean of two weightings, which score each model once for both.

    w = (1 - share) a + share b

The default, FedVG and size with equal shares, is the "averaged" variant of the FedVG paper; FedVG and accuracy are its
gradient-with-accuracy baseline.

Reference: Devkota et al., FedVG, CVPR 2026 Findings, arXiv:2602.21399 ("replace the weights or average them with the original
weights").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Le

from raysim.vector import VectorLayout
from raysim.weighting.base import Combination, Report, Sums, Weighting, Weights, registered


@dataclass(frozen=True)
class Mix(Combination):
    """The mean of two weightings.

    Attributes:
        first: One weighting.
        second: The other. If both have weights per unit, they need the same granularity.
        share: Of the second.
    """

    name: Literal["mix"] = "mix"
    first: Weighting = field(default_factory=lambda: registered("fedvg"))
    second: Weighting = field(default_factory=lambda: registered("size"))
    share: Annotated[float, Ge(0), Le(1)] = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {part.granularity for part in self.parts} - {"model"}
        if len(given) > 1:
            raise ValueError(f"weights per {' cannot be mixed with weights per '.join(sorted(given))}")

    @property
    def parts(self) -> tuple[Weighting, ...]:
        """Both."""
        return self.first, self.second

    def weights(self, reports: Sequence[Report], reference: Sums | None, layout: VectorLayout) -> Weights:
        """(1 - share) a + share b, for clients, units and shortened updates; only what both reject is rejected."""
        a, b = (self.of_part(i, reports, reference, layout) for i in (0, 1))

        def mean(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            if x.ndim != y.ndim:
                x, y = (z if z.ndim == 2 else z[:, None] for z in (x, y))
            return (1 - self.share) * x + self.share * y

        client, parameters = mean(a.client, b.client), mean(a.parameters, b.parameters)
        factors = None
        if a.factors is not None or b.factors is not None:
            mixed = mean(a.deltas, b.deltas)
            factors = np.divide(mixed, parameters, out=np.ones_like(parameters), where=parameters > 0)
        rejected = {i: a.rejected[i] for i in a.rejected.keys() & b.rejected.keys()}
        unit = None if parameters.ndim == 1 else parameters
        return Weights(client, unit, self.granularity, (*a.notes, *b.notes), factors, rejected)
