"""Algorithms by the name that a configuration gives them. A new one is one file and one line here."""

from __future__ import annotations

from raysim.algorithms.base import AnyAlgorithm
from raysim.algorithms.fedavg import FedAvg

ALGORITHMS: dict[str, type[AnyAlgorithm]] = {
    "fedavg": FedAvg,
}
