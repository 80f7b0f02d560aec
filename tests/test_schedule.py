"""Learning rates over the rounds, and who has to know of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quadratic import TRAINING, Federation, clients, validation
from raysim.algorithms.fednova import FedNova, local_work
from raysim.algorithms.scaffold import Scaffold
from raysim.config import ClientSettings
from raysim.local import LocalTraining, OptimizerSettings, Schedule
from raysim.weighting.size import Size
from raysim.weighting.uniform import Uniform
from runs import run

HALVED = OptimizerSettings(lr=0.1, schedule=Schedule("step", factor=0.5))


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (Schedule(), [0.8, 0.8, 0.8, 0.8]),
        (Schedule("step", every=2, factor=0.5), [0.8, 0.8, 0.4, 0.4, 0.2]),
        (Schedule("step", factor=0.5), [0.8, 0.4, 0.2, 0.1]),
        # With four rounds the cosine is 1, 1/sqrt(2), 0, -1/sqrt(2).
        (Schedule("cosine"), [0.8, 0.4 + 0.4 / 2**0.5, 0.4, 0.4 - 0.4 / 2**0.5]),
        (Schedule("cosine", final=0.25), [0.8, 0.5 + 0.3 / 2**0.5, 0.5, 0.5 - 0.3 / 2**0.5]),
    ],
)
def test_rates_by_hand(schedule, rates):
    optimizer = OptimizerSettings(lr=0.8, schedule=schedule)
    found = [optimizer.at(t, 4).lr for t in range(1, len(rates) + 1)]
    np.testing.assert_allclose(found, rates, rtol=1e-12)


def test_a_constant_rate_is_the_same_object():
    training = LocalTraining()
    assert training.at(7, 10) is training
    assert training.optimizer.at(7, 10) is training.optimizer


def test_only_the_rate_changes_and_only_once():
    client = ClientSettings(local_epochs=3, timeout_s=5.0, optimizer=replace(HALVED, momentum=0.9))
    third = client.at(3, 10)
    assert third == replace(client, optimizer=OptimizerSettings(lr=0.025, momentum=0.9))
    assert third.at(3, 10) is third


@pytest.mark.parametrize("schedule", [Schedule("step", factor=0.5), Schedule("cosine", final=0.3)])
def test_scaffold_divides_by_the_rates_of_its_own_round(schedule):
    """The new control variate is the mean of the gradients on the way, whatever the rate; with the first round's it is not."""
    training = replace(TRAINING, optimizer=OptimizerSettings(lr=0.1, schedule=schedule))
    federation = Federation(Scaffold(), Uniform(), clients(), validation(), training=training, rounds=3)
    for t in (1, 2, 3):
        rate, before, server = training.optimizer.at(t, 3).lr, dict(federation.states), federation.server
        federation.round()
        for k, objective in enumerate(clients()):
            y, c_k = server.params, before[k].control if before else 0
            gradients = []
            for _ in range(2):
                gradients.append(objective.a * (y - objective.b))
                y = y - rate * (gradients[-1] + server.control - c_k)
            np.testing.assert_allclose(federation.states[k].control, sum(gradients) / 2, rtol=1e-12)
            ignoring = c_k - server.control + (server.params - y) / (2 * 0.1)
            assert t == 1 or not np.allclose(federation.states[k].control, ignoring, rtol=1e-3)


def test_fednova_counts_proximal_work_at_the_rates_of_its_own_round():
    federation = Federation(
        FedNova(mu=0.5), Size(), clients(), validation(), training=replace(TRAINING, optimizer=HALVED)
    )
    federation.round()
    federation.round_num = 2
    updates, _ = federation.train()
    assert updates[0].local_work == pytest.approx(local_work(2, lr_mu=0.05 * 0.5), rel=1e-12)


def test_a_run_follows_its_schedule(tmp_path):
    """Three rounds on the digits: the first is that of a constant rate, the others are not."""
    few = [
        "partition.clients=3",
        "client.per_round=2",
        "client.local_epochs=1",
        "weighting.name=size",
        "model.name=mlp",
    ]
    plain = ["output.tensorboard=false", "output.checkpoint_every=0", "evaluation.every=3"]
    constant, stepped = (
        run(tmp_path, name, *few, *plain, f"client.optimizer.schedule.name={name}", rounds=3, backend="serial")
        for name in ("constant", "step")
    )
    same = [
        a == b for a, b in zip(*(r.rounds["params_checksum"].to_pylist() for r in (constant, stepped)), strict=True)
    ]
    assert same == [True, False, False]
