"""Weightings by the name that a configuration gives them. A new one is one file and one line here."""

from __future__ import annotations

from raysim.weighting.base import Weighting
from raysim.weighting.fedvg import FedVG
from raysim.weighting.size import Size
from raysim.weighting.uniform import Uniform

WEIGHTINGS: dict[str, type[Weighting]] = {
    "size": Size,
    "uniform": Uniform,
    "fedvg": FedVG,
}
