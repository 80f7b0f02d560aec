from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch

from raysim.execution.base import Packed
from raysim.state import (
    ClientUpdate,
    ServerState,
    from_arrays,
    num_bytes,
    record_checksum,
    to_arrays,
    vectors_and_numbers,
)


@dataclass(frozen=True)
class Momentum(ServerState):
    velocity: torch.Tensor
    steps: int


def test_records_survive_the_wire():
    record = Momentum(torch.arange(3.0), torch.ones(3, dtype=torch.float64), 7)
    packed = Packed.of(record)
    back = packed.unpack()
    assert type(back) is Momentum
    assert torch.equal(back.params, record.params)
    assert back.velocity.dtype == torch.float64
    assert back.steps == 7
    assert Packed.of(None).unpack() is None


@dataclass(frozen=True)
class Measured(ClientUpdate):
    work: float
    per_tensor: tuple[float, ...]
    none: tuple[float, ...] = ()


def test_tensors_travel_as_vectors_and_tuples_as_numbers():
    vectors, numbers = vectors_and_numbers(Measured(torch.ones(3), 5, 2, 0.5, 1.5, (0.1, 0.2)))
    assert vectors.keys() == {"delta"}
    assert vectors["delta"].tolist() == [1, 1, 1]
    assert numbers == {
        "num_examples": 5,
        "num_steps": 2,
        "loss": 0.5,
        "work": 1.5,
        "per_tensor": (0.1, 0.2),
        "none": (),
    }
    assert {type(value) for value in numbers.values()} == {int, float, tuple}


def test_read_only_arrays_are_taken_without_a_warning_or_a_copy():
    array = np.arange(4, dtype=np.float32)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = from_arrays(ServerState, {"params": array})
    assert state.params.data_ptr() == array.ctypes.data


def test_checksums_depend_on_every_field():
    record = Momentum(torch.zeros(2), torch.zeros(2), 1)
    assert record_checksum(record) == record_checksum(Momentum(torch.zeros(2), torch.zeros(2), 1))
    assert record_checksum(record) != record_checksum(Momentum(torch.zeros(2), torch.ones(2), 1))
    assert record_checksum(record) != record_checksum(Momentum(torch.zeros(2), torch.zeros(2), 2))


def test_updates_split_into_vectors_and_numbers():
    arrays = to_arrays(ClientUpdate(torch.ones(3), 10, 2, 0.5))
    assert {name: array.ndim for name, array in arrays.items()} == {
        "delta": 1,
        "num_examples": 0,
        "num_steps": 0,
        "loss": 0,
    }


def test_bytes_of_records_and_what_they_are_in():
    record = Momentum(torch.zeros(3), torch.zeros(2, dtype=torch.float64), 7)
    assert num_bytes(record) == 12 + 16
    assert num_bytes(Packed.of(record)) == 12 + 16 + 8  # The number is an array on the wire.
    assert num_bytes([record, {"a": np.zeros(5, np.int16)}, (None, 3.0, "text")]) == 28 + 10
