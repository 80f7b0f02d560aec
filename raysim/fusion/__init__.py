"""Fusions by the name that a configuration gives them. A new one is one file and one line here."""

from __future__ import annotations

from raysim.fusion.base import Fusion
from raysim.fusion.fedlaw import FedLAW
from raysim.fusion.finetune import Finetune

FUSIONS: dict[str, type[Fusion]] = {
    "fedlaw": FedLAW,
    "finetune": Finetune,
}
