"""Server fine-tuning: train the merged model on the server's data before it is deployed.

    theta <- SGD on L_val from the model after the server's step

The plainest way to use the data that FedVG scores on, and so the baseline to beat. What is tested then was trained on the
validation set: scores and losses on it say little afterwards.

Reference: a baseline in the code of Li et al., Revisiting Weighted Aggregation in Federated Learning with Neural Networks,
ICML 2023. The defaults are those of the clients in the FedVG experiments, for one epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from raysim.fields import Count
from raysim.fusion.base import Candidates, Fused, Fusion
from raysim.local import LocalTraining, local_sgd
from raysim.objective import Objective


@dataclass(frozen=True)
class FinetuneTraining(LocalTraining):
    """One epoch, unless told otherwise."""

    local_epochs: Count = 1


@dataclass(frozen=True)
class Finetune(Fusion):
    """Local training, by the server.

    Attributes:
        training: Epochs over the validation set, batches and optimizer.
    """

    name: Literal["finetune"] = "finetune"
    training: FinetuneTraining = field(default_factory=FinetuneTraining)

    needs_updates = False

    def fuse(
        self, objective: Objective, candidates: Candidates, training: LocalTraining, rng: np.random.Generator
    ) -> Fused:
        """Where local training from the merged model ends."""
        local = local_sgd(objective, candidates.merged, training, rng)
        return Fused(local.params, note=f"finetune: loss {local.loss:.4f} over {local.num_steps} steps")
