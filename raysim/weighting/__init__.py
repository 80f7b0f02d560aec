"""Weightings by the name that a configuration gives them. A new one is one file and one line here."""

from __future__ import annotations

from raysim.weighting.accuracy import Accuracy
from raysim.weighting.base import WEIGHTINGS
from raysim.weighting.direction import Direction
from raysim.weighting.feddisco import FedDisco
from raysim.weighting.fedvg import FedVG
from raysim.weighting.guarded import Guarded
from raysim.weighting.loss import Loss
from raysim.weighting.mix import Mix
from raysim.weighting.size import Size
from raysim.weighting.uniform import Uniform

__all__ = ["WEIGHTINGS"]

WEIGHTINGS |= {
    "size": Size,
    "uniform": Uniform,
    "fedvg": FedVG,
    "loss": Loss,
    "accuracy": Accuracy,
    "direction": Direction,
    "feddisco": FedDisco,
    "mix": Mix,
    "guarded": Guarded,
}
