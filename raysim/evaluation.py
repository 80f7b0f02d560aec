"""Evaluation of the global model, its images cut into fixed shards so that any number of processes gives the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from raysim.fields import Count, Section
from raysim.objective import ModelObjective

SHARD_BATCHES = 8
"""Batches per shard: the unit in which evaluation is spread over processes. Part of the numerics."""


@dataclass(frozen=True)
class EvaluationSettings(Section):
    """When and how the global model is evaluated on the test set.

    Attributes:
        every: Evaluate after every so many rounds; the last round always is.
        batch_size: Test images per forward pass.
        validation: Also evaluate it on the validation set, to choose a round or a setting without a look at the test set. A
            weighting or fusion that uses the validation set has seen it: compare such runs with care.
    """

    every: Count = 1
    batch_size: Count = 256
    validation: bool = False


@dataclass(frozen=True)
class ShardPredictions:
    """A shard's summed loss (float64) and predicted labels [n]."""

    loss: float
    labels: np.ndarray


@dataclass(frozen=True)
class Metrics:
    """How good a model is on the test set.

    Attributes:
        loss: Mean cross-entropy.
        accuracy: Share of correct predictions.
        macro_f1: Mean F1 over the classes present in the test set.
        recall: Per class; None where the test set has no example of it.
        classes_present: Classes with at least one test example.
        validation_loss: Mean cross-entropy on the validation set; None without `evaluation.validation`.
        validation_accuracy: Share of correct predictions there.
    """

    loss: float
    accuracy: float
    macro_f1: float
    recall: tuple[float | None, ...]
    classes_present: int
    validation_loss: float | None = None
    validation_accuracy: float | None = None


def evaluation_shards(num_examples: int, batch_size: int) -> list[np.ndarray]:
    """Positions of the test examples of each shard, in order."""
    size = batch_size * SHARD_BATCHES
    return [np.arange(start, min(start + size, num_examples)) for start in range(0, num_examples, size)]


def predict_shard(objective: ModelObjective, shard: np.ndarray, batch_size: int) -> ShardPredictions:
    """Loss sum and predictions of the loaded model on the test examples at `shard`."""
    loss = torch.zeros((), dtype=torch.float64, device=objective.device)
    predicted = []
    for start in range(0, len(shard), batch_size):
        batch = objective.take(shard[start : start + batch_size])
        logits = objective.predict(batch)
        loss += F.cross_entropy(logits, batch.labels, reduction="sum").double()
        predicted.append(logits.argmax(dim=1).to(torch.int32))
    return ShardPredictions(loss.item(), torch.cat(predicted).cpu().numpy())


def metrics_of(labels: np.ndarray, shards: Sequence[ShardPredictions], num_classes: int) -> Metrics:
    """Metrics from the shards' predictions, in shard order.

    Args:
        labels: True labels [n].
        shards: Cover the test set in order.
        num_classes: K.
    """
    from sklearn.metrics import precision_recall_fscore_support

    predicted = np.concatenate([shard.labels for shard in shards])
    _, recall, f1, support = precision_recall_fscore_support(
        labels, predicted, labels=np.arange(num_classes), average=None, zero_division=0.0
    )
    present = support > 0
    return Metrics(
        loss=sum(shard.loss for shard in shards) / len(labels),
        accuracy=float(np.mean(predicted == labels)),
        macro_f1=float(np.mean(f1[present])),
        recall=tuple(float(r) if p else None for r, p in zip(recall, present, strict=True)),
        classes_present=int(present.sum()),
    )
