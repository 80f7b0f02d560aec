"""A model as one flat vector, and the units that scores are taken over.

Shapes: P trainable scalars, U units.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch

Vector = torch.Tensor
"""One contiguous tensor of shape [P]: float32, or float64 where a test asks for it."""

Granularity = Literal["tensor", "module", "block"]

# Repeated blocks by the names that the model families give them: ResNet stages, Swin and VGG features, ViT encoder layers.
_BLOCK = re.compile(r"(layer\d+|blocks\.\d+|features\.\d+|layers\.\d+|encoder\.layers\.encoder_layer_\d+)\.")
_HEAD = re.compile(r"(fc|head|heads|classifier)\.")


@dataclass(frozen=True)
class Unit:
    """A group of parameter tensors that gets one score.

    Attributes:
        name: `conv1.weight` (tensor), `conv1` (module), `layer1` (block).
        slices: Where its scalars lie in the flat vector; more than one slice when its tensors are not neighbours.
    """

    name: str
    slices: tuple[slice, ...]

    @property
    def size(self) -> int:
        """Number of scalars."""
        return sum(part.stop - part.start for part in self.slices)


@dataclass(frozen=True)
class VectorLayout:
    """Where each named parameter tensor lies in the flat vector.

    Attributes:
        names: Dotted parameter names in module order.
        shapes: Shape of each tensor.
        edges: Pairs of modules of which the first feeds the second; empty where nobody asked for them.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, named: Iterable[tuple[str, torch.Tensor]]) -> VectorLayout:
        """Layout of named tensors, in the order given."""
        pairs = [(name, tuple(tensor.shape)) for name, tensor in named]
        return cls(tuple(name for name, _ in pairs), tuple(shape for _, shape in pairs))

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """The slice of each tensor, in order."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes]).tolist()
        return tuple(slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)) if ends else ()

    @property
    def size(self) -> int:
        """Number of scalars P."""
        return self.slices[-1].stop if self.slices else 0

    def view(self, vector: Vector, name: str) -> torch.Tensor:
        """The named tensor as a view of `vector`."""
        position = self.names.index(name)
        return vector[self.slices[position]].view(self.shapes[position])

    def tensor_at(self, index: int) -> str:
        """Name of the tensor that holds the scalar at `index`."""
        return next(name for name, part in zip(self.names, self.slices, strict=True) if index < part.stop)

    def units(self, granularity: Granularity | Literal["model"]) -> tuple[Unit, ...]:
        """The units at one granularity, in order of their first tensor; `model` is a single one of everything.

        `tensor`: every parameter tensor. `module`: the tensors of one module (weight and bias) together. `block`: the
        repeated blocks of a family (`layer1`, `blocks.3`, `encoder_layer_2`), the head as `classifier` and everything else
        as `base`; a network without repeated blocks has one block per top-level module.
        """
        groups: dict[str, list[slice]] = {}
        for label, part in zip(self._labels(granularity), self.slices, strict=True):
            parts = groups.setdefault(label, [])
            if parts and parts[-1].stop == part.start:
                parts[-1] = slice(parts[-1].start, part.stop)
            else:
                parts.append(part)
        return tuple(Unit(label, tuple(parts)) for label, parts in groups.items())

    def neighbours(self, granularity: Granularity) -> tuple[tuple[int, ...], ...]:
        """For each unit, the units that share a module with it or an edge; without edges, the units before and after it."""
        labels = self._labels(granularity)
        order = {label: index for index, label in enumerate(dict.fromkeys(labels))}
        count = len(order)
        if not self.edges:
            return tuple(tuple(v for v in (u - 1, u + 1) if 0 <= v < count) for u in range(count))
        units_of: dict[str, set[int]] = {}
        for name, label in zip(self.names, labels, strict=True):
            units_of.setdefault(_module(name), set()).add(order[label])
        near: list[set[int]] = [set() for _ in range(count)]
        for first, second in [*self.edges, *((module, module) for module in units_of)]:
            for u in units_of.get(first, ()):
                for v in units_of.get(second, set()) - {u}:
                    near[u].add(v)
                    near[v].add(u)
        return tuple(tuple(sorted(units)) for units in near)

    def _labels(self, granularity: Granularity | Literal["model"]) -> Sequence[str]:
        """The unit that each tensor belongs to."""
        if granularity in ("tensor", "model"):
            return self.names if granularity == "tensor" else ["model"] * len(self.names)
        return [_module(name) for name in self.names] if granularity == "module" else self._block_labels()

    def _block_labels(self) -> list[str]:
        matches = [_BLOCK.match(name) for name in self.names]
        if not any(matches):
            return [name.partition(".")[0] for name in self.names]
        return [
            match[1] if match else "classifier" if _HEAD.match(name) else "base"
            for name, match in zip(self.names, matches, strict=True)
        ]


def _module(name: str) -> str:
    return name.rpartition(".")[0] or name


def add_scaled(
    total: np.ndarray, vectors: Sequence[np.ndarray], coefficients: Sequence[float] | np.ndarray, *, chunk: int = 32768
) -> None:
    """`total += coefficient * vector` for each vector in turn, in float64, in chunks that stay in the processor's cache.

    Args:
        total: float64 [P], changed in place.
        vectors: Each [P], of any float type.
        coefficients: One for each vector, applied in float64.
        chunk: Scalars per step; it does not change the result.
    """
    scratch = np.empty(min(chunk, len(total)), dtype=np.float64)
    for start in range(0, len(total), chunk):
        stop = min(start + chunk, len(total))
        part, sums = scratch[: stop - start], total[start:stop]
        for vector, coefficient in zip(vectors, coefficients, strict=True):
            part[:] = vector[start:stop]
            part *= coefficient
            sums += part


def first_nonfinite(vector: np.ndarray) -> int | None:
    """Index of the first NaN or infinity in `vector` [P], or None."""
    # The sum is finite unless an entry is not (or it overflows): one cheap pass in the usual case.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(vector.sum(dtype=np.float64)):
            return None
    finite = np.isfinite(vector)
    return None if finite.all() else int(np.argmin(finite))


def checksum(*arrays: np.ndarray) -> str:
    """Hash (blake2b, 16 hexadecimal digits) of the types, shapes and bytes of arrays; the oracle of bit equality."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
