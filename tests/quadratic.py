"""Quadratic clients: a federated problem whose every number can be computed by hand, through raysim's public classes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raysim.algorithms.base import AnyAlgorithm, Cohort
from raysim.execution.work import sum_updates
from raysim.local import LocalTraining, OptimizerSettings
from raysim.objective import Batch, BatchSums
from raysim.seeding import Purpose, rng_for
from raysim.state import ClientUpdate, Population, ServerState, vectors_and_numbers
from raysim.vector import VectorLayout
from raysim.weighting.base import Report, Scored, Sums, Weighting, Weights

REFERENCE = Path(__file__).parent / "reference"
EXAMPLES = json.loads((REFERENCE / "examples.json").read_text())

LAYOUT = VectorLayout(("A", "B"), ((2,), (1,)))
START = (1.0, -2.0, 0.5)
TRAINING = LocalTraining(local_epochs=2, batch_size=None, optimizer=OptimizerSettings(lr=0.1))


class Quadratic:
    """f(theta) = 1/2 sum_j a_j (theta_j - b_j)^2, as the mean loss of `num_examples` equal examples."""

    def __init__(
        self, a: Sequence[float], b: Sequence[float], num_examples: int = 1, dtype: torch.dtype = torch.float64
    ):
        self.layout = LAYOUT
        self.a, self.b = torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype)
        self.params = torch.zeros(3, dtype=dtype)
        self.grad = torch.zeros(3, dtype=dtype)
        self.num_examples = num_examples

    def batches(self, batch_size: int | None, rng: np.random.Generator, *, last_batch: str = "auto") -> Iterator[Batch]:
        assert batch_size is None
        yield self.everything()

    def everything(self) -> Batch:
        return Batch(
            torch.zeros(self.num_examples, 3, dtype=self.params.dtype),
            torch.zeros(self.num_examples, dtype=torch.int64),
        )

    def loss(self) -> torch.Tensor:
        return 0.5 * (self.a * (self.params - self.b) ** 2).sum()

    def gradient(self, batch: Batch) -> torch.Tensor:
        self.grad.copy_(self.a * (self.params - self.b))
        return self.loss()

    def losses(self, batch: Batch) -> BatchSums:
        count = len(batch.labels)
        return BatchSums(count * self.loss(), torch.tensor(0), count)

    def scoring(self, batch_norm: str) -> AbstractContextManager[None]:
        return nullcontext()

    def output_energy_gradient(self, batch: Batch) -> torch.Tensor:
        """Of the linear output `params . x` of the batch's inputs [B, 3]."""
        outputs = batch.inputs @ self.params
        return 2 * (outputs[:, None] * batch.inputs).mean(dim=0)

    def add_gradient(self, batch: Batch) -> BatchSums:
        self.grad.add_(len(batch.labels) * self.a * (self.params - self.b))
        return self.losses(batch)


def clients() -> list[Quadratic]:
    return [Quadratic([1, 2, 0.5], [0, 1, 2], 30), Quadratic([0.5, 1, 4], [3, -1, 0], 10)]


def validation() -> Quadratic:
    return Quadratic([1, 1, 2], [1, 0, 1])


@dataclass
class Federation:
    """A server and clients that run rounds of any algorithm and weighting, all clients in every round unless told."""

    algorithm: AnyAlgorithm
    weighting: Weighting
    objectives: Sequence[Quadratic]
    validation: Quadratic
    training: LocalTraining = TRAINING
    start: Sequence[float] = START
    num_clients: int | None = None
    rounds: int = 10
    round_num: int = 0

    def __post_init__(self) -> None:
        counts = [objective.num_examples for objective in self.objectives]
        counts += [1] * ((self.num_clients or len(counts)) - len(counts))
        self.population = Population(tuple(counts), LAYOUT)
        dtype = self.objectives[0].params.dtype
        self.server: Any = self.algorithm.init_server(torch.tensor(self.start, dtype=dtype), self.population)
        self.states: dict[int, Any] = {}
        self.weights: Weights | None = None

    @property
    def params(self) -> np.ndarray:
        return self.server.params.numpy()

    def train(self, order: Sequence[int] | None = None) -> tuple[dict[int, ClientUpdate], dict[int, Any]]:
        """Local work of all clients or of some, in any order; the results do not depend on it."""
        updates, states = {}, {}
        training = self.training.at(max(self.round_num, 1), self.rounds)
        for k in order if order is not None else range(len(self.objectives)):
            rng = rng_for(0, Purpose.LOCAL, round_num=self.round_num, client_id=k)
            state = self.states.get(k, self.algorithm.init_client(self.server.params))
            updates[k], states[k] = self.algorithm.client_update(self.server, state, self.objectives[k], training, rng)
        return updates, states

    def report(self, k: int, update: ClientUpdate) -> Report:
        """What the driver would know, with a third of each client's examples in a class that is another one's rarest."""
        probe, count = None, update.num_examples
        if self.weighting.needs_probe:
            objective = self.validation
            params = self.server.params + update.delta
            objective.params.copy_(params)
            sums = self.weighting.accumulate(objective, [objective.everything()])
            probe = self.weighting.finish(sums, Scored(params, self.server.params, LAYOUT, self.reference()))
        counts = np.roll([count - count // 3, count // 3, 0], k)
        return Report(k, count, update.num_steps, update.loss, probe, counts)

    def reference(self) -> Sums | None:
        """The weighting's reference at the global model."""
        self.validation.params.copy_(self.server.params)
        return self.weighting.reference(self.validation, [[self.validation.everything()]])

    def round(self, order: Sequence[int] | None = None) -> np.ndarray:
        """One round; returns the new parameters."""
        self.round_num += 1
        updates, states = self.train(order)
        ids = sorted(updates)
        reports = [self.report(k, updates[k]) for k in ids]
        weights = self.weighting.weights(reports, self.reference(), LAYOUT)
        kept = [i for i in range(len(ids)) if i not in weights.rejected]
        self.weights = weights.of(kept)
        updates, states = ({ids[i]: found[ids[i]] for i in kept} for found in (updates, states))
        self.server = self.algorithm.server_update(self.server, self.cohort(updates, self.weights))
        self.states.update(states)
        return self.params

    def cohort(self, updates: Mapping[int, ClientUpdate], weights: Weights) -> Cohort[Any]:
        ids = sorted(updates)
        sent = [vectors_and_numbers(updates[k]) for k in ids]
        return Cohort(
            client_ids=tuple(ids),
            weights=weights,
            population=self.population,
            scalars=[numbers for _, numbers in sent],
            summation=lambda coefficients: sum_updates(ids, lambda i: sent[i][0], coefficients),
            dtype=self.server.params.dtype,
        )


def example(key: str) -> np.ndarray:
    return np.array(EXAMPLES[key])


MET: dict[str, tuple[str, float]] = {}
"""Reference key -> the test that met it and the largest relative difference; printed by `pytest --reference-table`."""


def assert_example(actual: Any, key: str) -> None:
    """The reference number, to rounding in float64."""
    found, wanted = np.asarray(actual), example(key)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-15, err_msg=key)
    difference = float(np.max(np.abs(found - wanted) / np.where(wanted == 0, 1.0, np.abs(wanted))))
    test = os.environ["PYTEST_CURRENT_TEST"].partition("::")
    MET[key] = max(
        MET.get(key, ("", -1.0)), (f"{Path(test[0]).name}::{test[2].split()[0]}", difference), key=lambda m: m[1]
    )


def assert_differs(actual: Any, key: str) -> None:
    """The reference number is what a known mistake gives."""
    found, wanted = np.asarray(actual), example(key)
    assert not np.allclose(found, wanted, rtol=1e-3), key
    MET[key] = (f"must differ: {os.environ['PYTEST_CURRENT_TEST'].rpartition('/')[2].split()[0]}", float("nan"))


def server_of(params: Sequence[float]) -> ServerState:
    return ServerState(torch.tensor(params, dtype=torch.float64))
