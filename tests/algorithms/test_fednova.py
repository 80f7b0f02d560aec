"""FedNova on the quadratic problem: client 1 takes 2 steps, client 2 takes 5."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quadratic import LAYOUT, TRAINING, Federation, assert_example, clients, validation
from raysim.algorithms.fedavg import FedAvg
from raysim.algorithms.fednova import FedNova, NovaUpdate, local_work
from raysim.algorithms.fedprox import FedProx
from raysim.local import LocalTraining, OptimizerSettings
from raysim.state import ServerState
from raysim.weighting.base import Weights
from raysim.weighting.fedvg import FedVG
from raysim.weighting.size import Size
from raysim.weighting.uniform import Uniform


def uneven(algorithm, weighting):
    run = Federation(algorithm, weighting, clients(), validation())
    updates = {}
    for k, epochs in ((0, 2), (1, 5)):
        training = replace(TRAINING, local_epochs=epochs)
        updates[k], _ = algorithm.client_update(run.server, None, run.objectives[k], training, np.random.default_rng(0))
    weights = weighting.weights([run.report(k, updates[k]) for k in (0, 1)], None, LAYOUT)
    return run, updates, run.cohort(updates, weights)


def test_two_and_five_steps():
    run, updates, cohort = uneven(FedNova(), Size())
    assert [update.num_steps for update in updates.values()] == [2, 5]
    assert_example(cohort.weights.client @ cohort.values("local_work"), "fednova.tau_eff")
    assert_example(run.algorithm.server_update(run.server, cohort).params, "fednova.round1")
    assert_example(FedAvg().server_update(run.server, cohort).params, "fednova.fedavg_same_updates")


def test_with_fedvg_weights():
    run, _, cohort = uneven(FedNova(), FedVG())
    assert_example(
        run.algorithm.server_update(run.server, cohort).params, "fedvg+fednova(s from 2/5-step models).round1"
    )


def test_local_work():
    assert_example(local_work(3, momentum=0.9), "fednova.a_norm1(momentum rho=.9,tau=3)")
    assert_example(local_work(3, lr_mu=0.01), "fednova.a_norm1(prox eta*mu=.01,tau=3)")
    assert local_work(7) == 7


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equal_work_is_fedavg(momentum):
    training = replace(TRAINING, optimizer=OptimizerSettings(lr=0.1, momentum=momentum))
    nova, avg = (Federation(a, Size(), clients(), validation(), training=training) for a in (FedNova(), FedAvg()))
    for _ in range(3):
        np.testing.assert_allclose(nova.round(), avg.round(), rtol=1e-12)


def test_two_rounds_of_server_momentum_by_hand():
    """Weights 1/2; 1 and 3 steps; deltas 1 and 3: tau_eff 2, D = 2 (1/2 + 1/2) = 2. Doubled deltas: D = 4, v = 2/2 + 4 = 5."""
    algorithm = FedNova(server_momentum=0.5)
    run = Federation(algorithm, Uniform(), clients(), validation(), start=(0.0, 0.0, 0.0))
    for delta, end in ((1.0, 2.0), (2.0, 7.0)):
        updates = {
            k: NovaUpdate(torch.full((3,), delta * work, dtype=torch.float64), 1, work, 0.0, float(work))
            for k, work in enumerate((1, 3))
        }
        run.server = algorithm.server_update(run.server, run.cohort(updates, Weights(np.array([0.5, 0.5]))))
        np.testing.assert_allclose(run.params, end, rtol=1e-12)
    assert run.server.velocity.tolist() == [5, 5, 5]


def test_local_work_with_a_weak_proximal_term_is_the_number_of_steps():
    assert local_work(7, lr_mu=1e-17) == pytest.approx(7, rel=1e-12)
    assert local_work(4, lr_mu=0.5) == pytest.approx(1 + 0.5 + 0.25 + 0.125, rel=1e-12)


def test_without_server_momentum_the_server_keeps_the_model_only():
    run = Federation(FedNova(), Size(), clients(), validation())
    run.round()
    assert type(run.server) is ServerState


@pytest.mark.parametrize(
    ("mu", "optimizer"),
    [
        (0.1, OptimizerSettings(momentum=0.9)),
        (0.0, OptimizerSettings(weight_decay=0.1)),
        (0.0, OptimizerSettings("adam")),
        (0.0, OptimizerSettings("adamw")),
        (0.0, OptimizerSettings(momentum=1.0)),
        (40.0, OptimizerSettings(lr=0.05)),
    ],
)
def test_what_has_no_closed_form_is_refused(mu, optimizer):
    with pytest.raises(ValueError, match="fednova needs"):
        FedNova(mu=mu).check(LocalTraining(optimizer=optimizer))


@pytest.mark.parametrize(("momentum", "steps", "work"), [(0.9, 3, 5.61), (0.0, 3, 3.0)])
def test_clients_report_the_work_of_their_optimizer(momentum, steps, work):
    optimizer = OptimizerSettings(lr=0.1, momentum=momentum)
    training = LocalTraining(local_epochs=steps, batch_size=None, optimizer=optimizer)
    updates, _ = Federation(FedNova(), Size(), clients(), validation(), training).train()
    assert updates[0].local_work == pytest.approx(work, rel=1e-12)


def test_its_proximal_clients_are_those_of_fedprox():
    """The penalty is the squared distance: one stronger than the norm far away, weaker nearby."""
    nova, prox = (Federation(kind(mu=0.1), Size(), clients(), validation()).train()[0] for kind in (FedNova, FedProx))
    for k in nova:
        np.testing.assert_allclose(nova[k].delta, prox[k].delta, rtol=1e-12)
