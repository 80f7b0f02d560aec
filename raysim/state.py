"""The records that travel between driver, clients and scorers, and the complete state of a run between two rounds.

A record is a frozen dataclass of tensors and plain numbers. On the wire and on disk it is a dict of numpy arrays
(`to_arrays`, `from_arrays`), which Ray's object store hands out without copying.

Shapes: P trainable scalars, B float buffer scalars, I integer buffer scalars, N clients.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from raysim.vector import Vector, VectorLayout, checksum

Arrays = dict[str, np.ndarray]
Record = TypeVar("Record")


@dataclass(frozen=True)
class Population:
    """All clients of the run: their number N, their training examples n_k (by client id) and the model's layout."""

    num_examples: tuple[int, ...]
    layout: VectorLayout

    @property
    def num_clients(self) -> int:
        """N, whether or not a client ever takes part."""
        return len(self.num_examples)


@dataclass(frozen=True)
class Buffers:
    """A model's non-trained state (BatchNorm statistics), kept apart from the parameters.

    Attributes:
        floats: [B], averaged with the client weights.
        ints: int64 [I] (`num_batches_tracked`), the maximum over the cohort.
    """

    floats: Vector
    ints: torch.Tensor

    def copied(self) -> Buffers:
        """The same values in memory of their own, on the CPU."""
        return Buffers(self.floats.detach().cpu().clone(), self.ints.cpu().clone())


@dataclass(frozen=True)
class ServerState:
    """What the server keeps between rounds. Algorithms extend it with their own vectors (control variate, momentum, ...)."""

    params: Vector


@dataclass(frozen=True)
class ClientUpdate:
    """What a client sends after local work. Algorithms extend it with further vectors and plain numbers (or tuples of them).

    Attributes:
        delta: `params_end - params_start`, [P].
        num_examples: n_k, the client's training examples.
        num_steps: Optimizer steps really taken.
        loss: Mean training loss over the examples seen, each at the parameters it was seen with.
    """

    delta: Vector
    num_examples: int
    num_steps: int
    loss: float


@dataclass(frozen=True)
class RoundState:
    """Everything the next round depends on; a checkpoint holds exactly this.

    Attributes:
        round_num: Rounds done; 0 is the initial model.
        server: The algorithm's server state.
        buffers: Buffers of the global model.
        clients: By client id, a handle of the executor to the client's state, or where it is stored; those that changed last
            come last. A client that never took part has none.
        client_checksums: By client id, the checksum of that state.
        probes: By client id, the last probe and its round, where scores are kept for some rounds.
    """

    round_num: int
    server: ServerState
    buffers: Buffers
    clients: Mapping[int, Any] = field(default_factory=dict)
    client_checksums: Mapping[int, str] = field(default_factory=dict)
    probes: Mapping[int, Any] = field(default_factory=dict)


def to_arrays(record: Any) -> Arrays:
    """The fields of a record as numpy arrays; tensors come to the CPU, numbers become 0-dimensional arrays."""
    if record is None:
        return {}
    values = {item.name: getattr(record, item.name) for item in dataclasses.fields(record)}
    return {
        name: value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        for name, value in values.items()
    }


def from_arrays(kind: type[Record], arrays: Mapping[str, np.ndarray], device: torch.device | str = "cpu") -> Record:
    """The inverse of `to_arrays`. On the CPU the tensors share memory with `arrays`: read them, never write them."""
    return kind(**{name: as_tensor(a, device) if a.ndim else a.item() for name, a in arrays.items()})


def vectors_and_numbers(update: ClientUpdate) -> tuple[Arrays, dict[str, Any]]:
    """The two ways an update's fields travel: tensors as vectors, plain numbers and tuples of numbers as what they are."""
    vectors, numbers = {}, {}
    for name, array in to_arrays(update).items():
        if isinstance(getattr(update, name), torch.Tensor) and array.ndim:
            vectors[name] = array
        else:
            numbers[name] = tuple(array.tolist()) if array.ndim else array.item()
    return vectors, numbers


def as_tensor(array: np.ndarray, device: torch.device | str = "cpu") -> torch.Tensor:
    """The array as a tensor, without a copy on the CPU, even when the array is read-only."""
    with warnings.catch_warnings():
        # Arrays out of the object store are read-only and torch cannot express that; nobody writes to records.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array).to(device)


def num_bytes(value: Any) -> int:
    """Bytes of the arrays and tensors in a record, a mapping or a sequence."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(num_bytes, value.values()))
    if isinstance(value, tuple | list):
        return sum(map(num_bytes, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return sum(num_bytes(getattr(value, item.name)) for item in dataclasses.fields(value))
    return 0


def record_checksum(record: Any) -> str:
    """Checksum of a record's fields in the order of their names."""
    arrays = to_arrays(record)
    return checksum(*(arrays[name] for name in sorted(arrays)))
