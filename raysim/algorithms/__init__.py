"""Algorithms by the name that a configuration gives them. A new one is one file and one line here."""

from __future__ import annotations

from raysim.algorithms.base import AnyAlgorithm
from raysim.algorithms.elastic import Elastic
from raysim.algorithms.fedavg import FedAvg
from raysim.algorithms.fedavgm import FedAvgM
from raysim.algorithms.feddyn import FedDyn
from raysim.algorithms.fednova import FedNova
from raysim.algorithms.fedopt import FedAdagrad, FedAdam, FedYogi
from raysim.algorithms.fedprox import FedProx
from raysim.algorithms.scaffold import Scaffold

ALGORITHMS: dict[str, type[AnyAlgorithm]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "feddyn": FedDyn,
    "fedavgm": FedAvgM,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "elastic": Elastic,
    "fednova": FedNova,
}
