"""A model bound to flat vectors: the one view of a network that algorithms and weightings see.

The parameters of the module are views of one flat vector and their gradients views of another, so a backward pass fills a flat
gradient without copying, an optimizer step is one operation on one tensor, and a unit's gradient is a slice.

Shapes: B batch, C x H x W image, P trainable scalars, M models, K classes.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from raysim.data.arrays import ImageSet
from raysim.errors import RunError
from raysim.models import has_batch_norm
from raysim.state import Buffers, as_tensor
from raysim.vector import Unit, Vector, VectorLayout

LastBatch = Literal["auto", "keep", "drop", "merge"]
BatchNormMode = Literal["batch", "running", "recalibrate"]
Precision = Literal["float32", "tf32", "bfloat16"]
"""What a model computes in: float32; float32 whose products are rounded to TF32 by GPUs; bfloat16 in its forward pass, by
torch's autocast. Parameters, buffers, gradients and losses are float32 in all of them."""

RESIDENT_BYTES = 2**29
"""Largest image set that is kept in a GPU's memory; of a larger one each batch is sent."""


class Batch(NamedTuple):
    """Inputs [B, C, H, W] in [0, 1] and labels int64 [B], on the objective's device."""

    inputs: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class BatchSums:
    """Sums over the examples of a batch.

    Numbers of the model stay on its device: reading one makes the process wait for everything that it has asked of a GPU.

    Attributes:
        loss: float64, 0-dimensional; of several models [M].
        correct: int64, right predictions, of the same shape.
        count: Examples.
    """

    loss: torch.Tensor
    correct: torch.Tensor
    count: int

    def __add__(self, other: BatchSums) -> BatchSums:
        return BatchSums(self.loss + other.loss, self.correct + other.correct, self.count + other.count)


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
        self.precision: Precision = "float32"
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
        self.buffer_layouts = VectorLayout.of(floats), VectorLayout.of(ints)
        for group, layout, dtype in zip((floats, ints), self.buffer_layouts, (self.dtype, torch.int64), strict=True):
            flat = torch.empty(layout.size, dtype=dtype, device=self.device)
            for (name, buffer), part in zip(group, layout.slices, strict=True):
                flat[part] = buffer.reshape(-1).to(dtype)
                owner, _, attribute = name.rpartition(".")
                self.module.get_submodule(owner)._buffers[attribute] = flat[part].view(buffer.shape)
            flats.append(flat)
        return Buffers(flats[0], flats[1])

    def on(self, examples: ImageSet, precision: Precision = "float32") -> ModelObjective:
        """The same model (same vectors) with other data, computing in a precision."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.examples, other.precision = examples, precision
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
        resident = _resident(self.examples, self.device)
        if resident is None:
            images = _sent(torch.from_numpy(self.examples.images[indices]), self.device)
            labels = _sent(torch.from_numpy(self.examples.labels[indices]), self.device)
        else:
            chosen = _sent(as_tensor(indices), self.device)
            images, labels = resident.inputs[chosen], resident.labels[chosen]
        return Batch(images.to(self.dtype).div_(float(np.iinfo(self.examples.images.dtype).max)), labels)

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
        loss = F.cross_entropy(self._logits(batch), batch.labels)
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
        logits = self._logits(batch)
        loss = F.cross_entropy(logits, batch.labels, reduction="sum")
        correct = (logits.detach().argmax(dim=1) == batch.labels).sum()
        return loss, BatchSums(loss.detach().double(), correct, len(batch.labels))

    def _logits(self, batch: Batch) -> torch.Tensor:
        """The model's outputs [B, K], in its own type whatever they were computed in."""
        with self.autocast():
            outputs: torch.Tensor = self.module(batch.inputs)
        return outputs.to(self.dtype)

    def autocast(self) -> AbstractContextManager[None]:
        """Around a forward pass: bfloat16 if that is the precision. TF32 is a switch of the process."""
        if self.precision != "bfloat16":
            return nullcontext()
        autocast: AbstractContextManager[None] = torch.autocast(self.device.type, dtype=torch.bfloat16)
        return autocast

    def output_energy_gradient(self, batch: Batch) -> Vector:
        """Gradient [P] of the mean squared output over the batch at `params`; needs no labels, buffers do not move."""
        self.grad.zero_()
        with self.scoring("batch"):
            self._logits(batch).square().mean().backward()  # type: ignore[no-untyped-call]
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
                self._logits(batch)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.training, norm.momentum = False, momentum

    def _tracking_norms(self) -> list[_BatchNorm]:
        return [m for m in self.module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]

    @torch.no_grad()
    def predict(self, batch: Batch) -> torch.Tensor:
        """Logits [B, K] in evaluation mode."""
        self.module.eval()
        return self._logits(batch)


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """It on a device. A GPU gets it out of pinned memory, or the process would wait for all that the GPU has to do."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


_COPIES: dict[tuple[int, str], Batch] = {}
"""By image set and device: what `_resident` made, unscaled."""


def _resident(examples: ImageSet, device: torch.device) -> Batch | None:
    """An image set's copy in the memory of a GPU, one per process for as long as the set lives; None: batches are sent."""
    if device.type == "cpu" or examples.images.dtype != np.uint8 or examples.images.nbytes > RESIDENT_BYTES:
        return None
    key = id(examples), str(device)
    if key not in _COPIES:
        _COPIES[key] = Batch(as_tensor(examples.images, device), as_tensor(examples.labels, device))
        weakref.finalize(examples, _COPIES.pop, key, None)
    return _COPIES[key]


def stacked_sums(
    objective: ModelObjective, params: torch.Tensor, buffers: Buffers, batches: Iterable[Batch], *, gradient: bool
) -> tuple[torch.Tensor | None, BatchSums]:
    """What `add_gradient` or `losses` sum up over batches, for several models in one call; inside `scoring`.

    Equal to one model after the other up to rounding. Nothing of the bound model but its frozen parameters is read.

    Args:
        objective: The bound model.
        params: [M, P], a row per model.
        buffers: Of the models: [M, B] and [M, I].
        batches: They may not be empty.
        gradient: Whether gradients are wanted.

    Returns:
        Summed gradients [M, P] or None, and sums of shape [M].

    Raises:
        RunError: The network cannot be vectorised, or the models do not fit into memory together.
    """
    leaves = _stacked_tensors(objective.layout, params.detach())
    for leaf in leaves.values():
        leaf.requires_grad_(gradient)
    floats, ints = objective.buffer_layouts
    tensors = leaves | _stacked_tensors(floats, buffers.floats) | _stacked_tensors(ints, buffers.ints)

    def forward(own: dict[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = functional_call(objective.module, own, (inputs,))
        return outputs

    call = torch.vmap(forward, in_dims=(0, None), randomness="error")
    sums: list[BatchSums] = []
    try:
        with torch.set_grad_enabled(gradient):
            for batch in batches:
                with objective.autocast():
                    outputs: torch.Tensor = call(tensors, batch.inputs)
                logits = outputs.to(objective.dtype)
                labels = batch.labels.expand(len(params), -1)
                losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
                losses = losses.view(labels.shape).sum(dim=1)
                correct = (logits.detach().argmax(dim=2) == labels).sum(dim=1)
                if gradient:
                    losses.sum().backward()  # type: ignore[no-untyped-call]
                sums.append(BatchSums(losses.detach().double(), correct, len(batch.labels)))
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"execution.clients_per_call: {len(params)} models do not fit into the GPU's memory together, use less: {error}"
        ) from error
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise RunError(
            f"execution.clients_per_call: the network cannot compute several models in one call, use 1: {reason}"
        ) from error
    grads = None
    if gradient:
        found = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves.values())
        grads = torch.cat([grad.reshape(len(params), -1) for grad in found], dim=1)
    return grads, functools.reduce(operator.add, sums)


def _stacked_tensors(layout: VectorLayout, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of several models by name, each [M, ...], copied out of their vectors [M, P]."""
    return {
        name: rows[:, part].reshape(len(rows), *shape).contiguous()
        for name, part, shape in zip(layout.names, layout.slices, layout.shapes, strict=True)
    }


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
