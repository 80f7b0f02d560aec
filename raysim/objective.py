"""A model bound to flat vectors: the one view of a network that algorithms and weightings see.

The parameters of the module are views of one flat vector and their gradients views of another, so a backward pass fills a flat
gradient without copying, an optimizer step is one operation on one tensor, and a unit's gradient is a slice.

Shapes: B batch, C x H x W image, P trainable scalars.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from raysim.data.arrays import ImageSet
from raysim.models import has_batch_norm
from raysim.state import Buffers
from raysim.vector import Unit, Vector, VectorLayout

LastBatch = Literal["auto", "keep", "drop", "merge"]
BatchNormMode = Literal["batch", "running", "recalibrate"]


class Batch(NamedTuple):
    """Inputs [B, C, H, W] in [0, 1] and labels int64 [B], on the objective's device."""

    inputs: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class BatchSums:
    """Sums over the examples of a batch: losses, correct predictions, examples."""

    loss: float
    correct: int
    count: int


class Objective(Protocol):
    """What algorithms and weightings may ask of a model with data; `params` and `grad` are flat and bound to the model."""

    layout: VectorLayout
    params: Vector
    grad: Vector

    @property
    def num_examples(self) -> int:
        """Examples it is bound to."""

    def batches(
        self, batch_size: int | None, rng: np.random.Generator, *, last_batch: LastBatch = "auto"
    ) -> Iterable[Batch]:
        """One epoch in random order; `batch_size` None is one batch of everything."""

    def gradient(self, batch: Batch) -> torch.Tensor:
        """Fill `grad` with the gradient of the batch's mean loss at `params`; returns that loss."""

    def add_gradient(self, batch: Batch) -> BatchSums:
        """Add the gradient of the batch's *summed* loss at `params` to `grad`."""

    def losses(self, batch: Batch) -> BatchSums:
        """The same sums without a gradient."""

    def output_energy_gradient(self, batch: Batch) -> Vector:
        """Gradient [P] of the mean squared output over the batch at `params`; needs no labels, buffers do not move."""

    def scoring(self, batch_norm: BatchNormMode) -> AbstractContextManager[None]:
        """Inside, nothing of the model changes but `grad`."""

    def limited_to(self, units: Iterable[Unit]) -> AbstractContextManager[None]:
        """Inside, gradients are taken of these units only."""


class ModelObjective:
    """The objective of a `torch.nn.Module` with cross-entropy loss.

    Binding changes where the module's tensors live, not their values; frozen parameters stay outside the vector.

    Args:
        module: Bound in place.
        examples: The data; `on` binds the same module to other data.
        device: Where the model lives and computes.

    Raises:
        ValueError: Trainable parameters of different types.
    """

    def __init__(self, module: nn.Module, examples: ImageSet, *, device: torch.device | str = "cpu") -> None:
        self.module = module.to(device)
        self.device = torch.device(device)
        self.examples = examples
        trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        dtypes = {p.dtype for _, p in trainable}
        if len(dtypes) != 1:
            raise ValueError(f"a model needs trainable parameters of one type, got {sorted(map(str, dtypes))}")
        self.dtype = dtypes.pop()
        self.layout = VectorLayout.of(trainable)
        self._trainable = [param for _, param in trainable]
        self.params = torch.empty(self.layout.size, dtype=self.dtype, device=self.device)
        self.grad = torch.zeros_like(self.params)
        for (_, param), part in zip(trainable, self.layout.slices, strict=True):
            self.params[part] = param.detach().reshape(-1)
            param.data = self.params[part].view(param.shape)
            param.grad = self.grad[part].view(param.shape)
        self.buffers = self._bind_buffers()
        self.has_batch_norm = has_batch_norm(module)

    def _bind_buffers(self) -> Buffers:
        persistent = self.module.state_dict(keep_vars=True).keys()
        named = [(name, b) for name, b in self.module.named_buffers() if name in persistent]
        floats = [(name, b) for name, b in named if b.is_floating_point()]
        ints = [(name, b) for name, b in named if not b.is_floating_point()]
        flats = []
        for group, dtype in ((floats, self.dtype), (ints, torch.int64)):
            layout = VectorLayout.of(group)
            flat = torch.empty(layout.size, dtype=dtype, device=self.device)
            for (name, buffer), part in zip(group, layout.slices, strict=True):
                flat[part] = buffer.reshape(-1).to(dtype)
                owner, _, attribute = name.rpartition(".")
                self.module.get_submodule(owner)._buffers[attribute] = flat[part].view(buffer.shape)
            flats.append(flat)
        return Buffers(flats[0], flats[1])

    def on(self, examples: ImageSet) -> ModelObjective:
        """The same model (same vectors) with other data."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.examples = examples
        return other

    @property
    def num_examples(self) -> int:
        """Examples it is bound to."""
        return len(self.examples)

    def load(self, params: Vector, buffers: Buffers) -> None:
        """Set every parameter and buffer; nothing of an earlier unit of work survives."""
        self.params.copy_(params)
        self.buffers.floats.copy_(buffers.floats)
        self.buffers.ints.copy_(buffers.ints)

    def take(self, indices: np.ndarray) -> Batch:
        """The examples at `indices` [B] as a batch: scaled to [0, 1] by the range of their type."""
        images = self.examples.images[indices]
        inputs = torch.from_numpy(images).to(self.device).to(self.dtype).div_(float(np.iinfo(images.dtype).max))
        return Batch(inputs, torch.from_numpy(self.examples.labels[indices]).to(self.device))

    def batches(
        self, batch_size: int | None, rng: np.random.Generator, *, last_batch: LastBatch = "auto"
    ) -> Iterator[Batch]:
        """One epoch in random order.

        `last_batch` says what becomes of an incomplete last batch: `keep`, `drop`, `merge` into the one before, or `auto`:
        merge when it holds a single example and the model has BatchNorm, whose batch statistics need two, else keep. Under
        `auto` a client with one example and a BatchNorm model has no batch at all and takes no step.
        """
        order = rng.permutation(self.num_examples)
        for indices in cut_batches(order, batch_size, last_batch=last_batch, has_batch_norm=self.has_batch_norm):
            yield self.take(indices)

    def gradient(self, batch: Batch) -> torch.Tensor:
        """Fill `grad` with the gradient of the batch's mean loss at `params`; returns that loss."""
        self.grad.zero_()
        loss = F.cross_entropy(self.module(batch.inputs), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def add_gradient(self, batch: Batch) -> BatchSums:
        """Add the gradient of the batch's *summed* loss at `params` to `grad`."""
        loss, sums = self._summed(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return sums

    @torch.no_grad()
    def losses(self, batch: Batch) -> BatchSums:
        """The same sums without a gradient."""
        return self._summed(batch)[1]

    def _summed(self, batch: Batch) -> tuple[torch.Tensor, BatchSums]:
        logits = self.module(batch.inputs)
        loss = F.cross_entropy(logits, batch.labels, reduction="sum")
        correct = (logits.detach().argmax(dim=1) == batch.labels).sum()
        return loss, BatchSums(loss.item(), int(correct.item()), len(batch.labels))

    def output_energy_gradient(self, batch: Batch) -> Vector:
        """Gradient [P] of the mean squared output over the batch at `params`; needs no labels, buffers do not move."""
        self.grad.zero_()
        with self.scoring("batch"):
            self.module(batch.inputs).square().mean().backward()
        return self.grad.clone()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Local training: batch statistics, running statistics move, dropout on."""
        self.module.train()
        try:
            yield
        finally:
            self.module.eval()

    @contextmanager
    def scoring(self, batch_norm: BatchNormMode) -> Iterator[None]:
        """Scoring: dropout off, nothing of the model changes.

        Args:
            batch_norm: `batch`: BatchNorm normalises by the statistics of the scoring batch; `running`: by the model's own
                running statistics; `recalibrate`: by those that `recalibrate` has put in their place.
        """
        was_training = self.module.training
        self.module.eval()
        norms = self._tracking_norms()
        try:
            if batch_norm == "batch":
                for norm in norms:
                    # Training mode without tracking: batch statistics, and the running ones are not even read.
                    norm.training, norm.track_running_stats = True, False
            yield
        finally:
            for norm in norms:
                norm.track_running_stats = True
            self.module.train(was_training)

    @contextmanager
    def limited_to(self, units: Iterable[Unit]) -> Iterator[None]:
        """Gradients of these units only: a backward pass ends at the first of them, and leaves `grad` alone elsewhere."""
        parts = [part for unit in units for part in unit.slices]
        others = [
            param
            for param, own in zip(self._trainable, self.layout.slices, strict=True)
            if not any(part.start <= own.start < part.stop for part in parts)
        ]
        try:
            for param in others:
                param.requires_grad_(False)
            yield
        finally:
            for param in others:
                param.requires_grad_(True)

    @torch.no_grad()
    def recalibrate(self, batches: Iterable[Batch]) -> None:
        """Replace the running statistics by the means of those of the batches, weighted by their sizes, in one pass."""
        self.module.eval()
        norms = self._tracking_norms()
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.training = True
        num_seen = 0
        try:
            for batch in batches:
                num_seen += len(batch.labels)
                for norm in norms:
                    norm.momentum = len(batch.labels) / num_seen
                self.module(batch.inputs)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.training, norm.momentum = False, momentum

    def _tracking_norms(self) -> list[_BatchNorm]:
        return [m for m in self.module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]

    @torch.no_grad()
    def predict(self, batch: Batch) -> torch.Tensor:
        """Logits [B, K] in evaluation mode."""
        self.module.eval()
        logits: torch.Tensor = self.module(batch.inputs)
        return logits


def cut_batches(
    order: np.ndarray, batch_size: int | None, *, last_batch: LastBatch, has_batch_norm: bool
) -> Sequence[np.ndarray]:
    """Cut an order of examples into batches under the rule of `ModelObjective.batches`."""
    count = len(order)
    size = count if batch_size is None else batch_size
    batches = [order[start : start + size] for start in range(0, count, size)] if count else []
    if not batches:
        return []
    *whole, last = batches
    alone = len(last) == 1 and has_batch_norm
    if len(last) == size and not alone:
        return batches
    rule = last_batch if last_batch != "auto" else "merge" if alone else "keep"
    if rule == "keep":
        return batches
    if rule == "drop":
        return whole
    if whole:
        return [*whole[:-1], np.concatenate([whole[-1], last])]
    return [] if alone else batches
