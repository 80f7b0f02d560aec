"""What holds over rounds in which some clients take part, and for the buffers under every algorithm."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import nn

from quadratic import LAYOUT, START, Federation, Quadratic, clients, server_of, validation
from raysim.algorithms import ALGORITHMS
from raysim.algorithms.elastic import Elastic
from raysim.algorithms.feddyn import FedDyn
from raysim.algorithms.fednova import FedNova
from raysim.algorithms.fedprox import FedProx
from raysim.algorithms.scaffold import Scaffold
from raysim.config import load_config
from raysim.execution import work
from raysim.execution.serial import SerialExecutor
from raysim.preparation import prepare
from raysim.recording.progress import Silent
from raysim.simulation import run_round
from raysim.state import Population, RoundState, record_checksum
from raysim.weighting import WEIGHTINGS
from raysim.weighting.uniform import Uniform
from runs import QUICKSTART, settings

METHODS = [
    *(kind() for kind in ALGORITHMS.values()),
    Elastic(variant="flbench"),
    Elastic(when="after"),
    FedDyn(clip=1.0, eval_model="active_average"),
    FedNova(server_momentum=0.9),
    Scaffold(option="I"),
    Scaffold(stateless=True),
]
COHORTS = ([0, 2, 4], [3, 1, 0], [2, 3, 4], [0, 1, 2])
"""Three of five clients."""


def title(method) -> str:
    """The method's name with what is not at its default."""
    return "-".join([method.name, *(f.name for f in fields(method) if getattr(method, f.name) != f.default)])


def five(algorithm, weighting=None) -> Federation:
    rng = np.random.default_rng(0)
    objectives = [Quadratic(rng.uniform(0.5, 2, 3), rng.normal(size=3), n) for n in (30, 10, 5, 20, 15)]
    return Federation(algorithm, weighting or Uniform(), objectives, validation())


def mean_over_all(run: Federation, field: str) -> torch.Tensor:
    return sum((getattr(state, field) for state in run.states.values()), torch.zeros(3, dtype=torch.float64)) / 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", METHODS, ids=title)
def test_every_variant_is_pure_and_keeps_the_type(method, dtype):
    objectives = [Quadratic(c.a.tolist(), c.b.tolist(), c.num_examples, dtype) for c in clients()]
    run = Federation(method, Uniform(), objectives, validation())
    for _ in range(2):
        before = record_checksum(run.server)
        updates, _ = run.train()
        again, _ = run.train()
        assert record_checksum(run.server) == before
        assert all(record_checksum(updates[k]) == record_checksum(again[k]) for k in updates)
        run.round()
        assert run.server.params.dtype == method.evaluated(run.server).dtype == dtype
        assert np.isfinite(run.params).all()


@pytest.mark.parametrize("option", ["I", "II"])
def test_the_server_control_stays_the_mean_of_all_controls(option):
    run = five(Scaffold(option=option))
    for cohort in COHORTS:
        run.round(cohort)
        np.testing.assert_allclose(run.server.control, mean_over_all(run, "control"), rtol=1e-12, atol=1e-15)


def test_h_stays_minus_alpha_times_the_mean_accumulated_delta():
    run = five(FedDyn(alpha=0.1, alpha_scaling="none"))
    for cohort in COHORTS:
        run.round(cohort)
        np.testing.assert_allclose(run.server.h, -0.1 * mean_over_all(run, "accumulated"), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("method", METHODS, ids=title)
def test_with_some_of_the_clients_the_model_stays_where_they_all_stay(method):
    """Weights over all clients would shrink it."""
    stay = [Quadratic([1, 2, 3], START, n) for n in (30, 10)]
    run = Federation(method, WEIGHTINGS[method.default_weighting](), stay, validation(), num_clients=7)
    for _ in range(2):
        np.testing.assert_allclose(run.round(), START, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", METHODS, ids=title)
def test_every_method_takes_the_steps_it_was_given(method):
    """Local epochs are passes over the data, also where sensitivities and full gradients look at it besides."""

    class Thrice(Quadratic):
        def batches(self, batch_size, rng, *, last_batch="auto"):
            yield from (self.everything() for _ in range(3))

    run = Federation(method, Uniform(), [Thrice([1, 2, 3], [0, 1, 2], 9)], validation())
    updates, _ = run.train()
    assert updates[0].num_steps == 2 * 3


@pytest.mark.parametrize("method", [FedProx(mu=0.5), FedDyn(alpha=0.5, alpha_scaling="none")], ids=title)
def test_the_penalty_pulls_twice_as_hard_at_twice_the_distance(method):
    """With a constant gradient s the first step is 0.1 s long, and the second is pulled back by half of that."""

    class Slope(Quadratic):
        def gradient(self, batch):
            self.grad.copy_(self.a)
            return self.loss()

    def pull(slope: float) -> float:
        run = Federation(method, Uniform(), [Slope([slope] * 3, [0, 0, 0])], validation())
        updates, _ = run.train()
        return updates[0].delta[0].item() + 2 * 0.1 * slope

    assert pull(1.0) == pytest.approx(0.1 * 0.5 * 0.1, rel=1e-12)
    assert pull(2.0) == pytest.approx(2 * pull(1.0), rel=1e-12)


class Normed(nn.Module):
    """The smallest network with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(nn.functional.adaptive_avg_pool2d(x, 4)).flatten(1))


class Told(SerialExecutor):
    """Two clients that really train, but report 1 and 3 examples and running variances of 0.2 and 0.4."""

    def run_cohort(self, *args, **kwargs):
        outcomes, *others = super().run_cohort(*args, **kwargs)
        for outcome, variance, count in zip(outcomes, (0.2, 0.4), (1, 3), strict=True):
            outcome.update[work.BUFFER_FLOATS] = np.array([0.0, variance], np.float32)
            outcome.train = replace(outcome.train, scalars={**outcome.train.scalars, "num_examples": count})
        return outcomes, *others


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Two clients of the digits, one step a round, weights by size."""
    overrides = ["partition.scheme=iid", "partition.clients=2", "client.per_round=2", "client.local_epochs=1"]
    overrides += ["client.batch_size=null", "weighting.name=size", "data.image_size=8", "model.name=mlp"]
    with pytest.MonkeyPatch.context() as patch:
        for module in ("raysim.preparation", "raysim.execution.work"):
            patch.setattr(f"{module}.build_model", lambda *args: Normed())
        folder = tmp_path_factory.mktemp("buffers")
        yield prepare(load_config(QUICKSTART, settings(folder, "b", *overrides, backend="serial")))


@pytest.mark.parametrize("method", METHODS, ids=title)
def test_buffers_are_the_weighted_mean_and_nothing_else(prepared, method):
    """0.2 / 4 + 0.4 * 3 / 4 = 0.35 in every round, wherever the global model was; momentum would make it negative."""
    setup, before = replace(prepared.setup, algorithm=method), prepared.initial
    prepared = replace(prepared, setup=setup)
    state = RoundState(0, method.init_server(before.server.params, prepared.population), before.buffers)
    assert before.buffers.floats.tolist() == [0, 1]
    for counter in (1, 2):
        state = run_round(prepared, state, Told(setup), Silent()).state
        assert state.buffers.floats.tolist() == [0, np.float32(0.35)]
        assert (state.buffers.ints.dtype, state.buffers.ints.tolist()) == (torch.int64, [counter])
        assert not torch.equal(state.server.params, before.server.params)


def test_only_a_method_that_says_so_is_tested_elsewhere_than_at_the_deployed_model():
    population = Population((30, 10), LAYOUT)
    for method in METHODS:
        server = method.init_server(server_of(START).params, population)
        assert torch.equal(method.evaluated(server), server.params)
