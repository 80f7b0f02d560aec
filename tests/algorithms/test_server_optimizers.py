"""FedAvgM, FedAdagrad, FedAdam, FedYogi on the quadratic problem, by size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quadratic import Federation, assert_example, clients, server_of, validation
from raysim.algorithms.fedavg import FedAvg
from raysim.algorithms.fedavgm import FedAvgM, MomentumServer
from raysim.algorithms.fedopt import FedAdagrad, FedAdam, FedYogi
from raysim.state import ClientUpdate
from raysim.weighting.base import Weights
from raysim.weighting.fedvg import FedVG
from raysim.weighting.size import Size


def federation(algorithm, weighting=None) -> Federation:
    return Federation(algorithm, weighting or Size(), clients(), validation())


@pytest.mark.parametrize(("nesterov", "name"), [(False, "heavyball"), (True, "nesterov")])
def test_three_rounds_of_momentum(nesterov, name):
    run = federation(FedAvgM(nesterov=nesterov))
    for number in (1, 2, 3):
        assert_example(run.round(), f"fedavgm.{name}.round{number}")


@pytest.mark.parametrize(("nesterov", "name"), [(False, "heavyball"), (True, "nesterov")])
def test_momentum_with_fedvg_weights(nesterov, name):
    run = federation(FedAvgM(nesterov=nesterov), FedVG())
    run.round()
    assert_example(run.round(), f"fedvg+fedavgm.{name}.round2")


@pytest.mark.parametrize(("nesterov", "first"), [(False, 1.0), (True, 1.9)])
def test_momentum_by_hand(nesterov, first):
    """w = 0, beta 0.9, the clients' mean model is 1, then 2.

    Heavy ball: v = 1, w = 1; then v = 0.9 + (2 - 1) = 1.9, w = 2.9. Nesterov: w = 1 + 0.9 = 1.9; then v = 0.9 + (2 - 1.9) = 1,
    w = 1.9 + 0.1 + 0.9 = 2.9. A damped momentum would give 0.1 after round one.
    """
    algorithm = FedAvgM(nesterov=nesterov)
    run = federation(algorithm)
    server = MomentumServer(torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
    for mean, expected in ((1.0, first), (2.0, 2.9)):
        updates = {0: ClientUpdate(mean - server.params, 1, 1, 0.0)}
        server = algorithm.server_update(server, run.cohort(updates, Weights(np.array([1.0]))))
        np.testing.assert_allclose(server.params, expected, rtol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_without_momentum_it_is_fedavg_bit_for_bit(nesterov):
    momentum, plain = federation(FedAvgM(momentum=0.0, nesterov=nesterov)), federation(FedAvg())
    for _ in range(3):
        assert momentum.round().tobytes() == plain.round().tobytes()


@pytest.mark.parametrize("v0", [0.0, 1e-06])
@pytest.mark.parametrize(("kind", "name"), [(FedAdagrad, "adagrad"), (FedAdam, "adam"), (FedYogi, "yogi")])
def test_adaptive_rounds(kind, name, v0):
    run = federation(kind(v0=v0))
    key = "0" if v0 == 0 else "1e-06"
    assert_example(run.round(), f"fedopt.{name}.v0={key}.round1")
    assert_example(run.round(), f"fedopt.{name}.v0={key}.round2")


def test_bias_correction_is_that_of_adam():
    """Against torch's Adam fed with the negative mean delta; its eps is added to the corrected root, as tau is."""
    run = federation(FedAdam(bias_correction=True))
    params = torch.nn.Parameter(server_of((1.0, -2.0, 0.5)).params)
    adam = torch.optim.Adam([params], lr=0.1, betas=(0.9, 0.99), eps=1e-3)
    for _ in range(3):
        updates, _ = run.train()
        params.grad = -run.cohort(updates, Weights(np.array([0.75, 0.25]))).mean_delta()
        adam.step()
        np.testing.assert_allclose(run.round(), params.detach(), rtol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_without_momentum_the_model_moves_by_the_delta(nesterov):
    """All deltas +1: +1, not -1."""
    algorithm = FedAvgM(momentum=0.0, nesterov=nesterov)
    run = federation(algorithm)
    updates = {k: ClientUpdate(torch.ones(3, dtype=torch.float64), 1, 1, 0.0) for k in (0, 1)}
    server = algorithm.server_update(run.server, run.cohort(updates, Weights(np.array([0.5, 0.5]))))
    assert torch.equal(server.params, run.server.params + 1)


def test_every_delta_up_moves_the_model_up():
    for algorithm in (FedAvgM(), FedAdagrad(), FedAdam(), FedYogi()):
        run = federation(algorithm)
        updates = {0: ClientUpdate(torch.ones(3, dtype=torch.float64), 1, 1, 0.0)}
        server = algorithm.server_update(run.server, run.cohort(updates, Weights(np.array([1.0]))))
        assert (server.params > run.server.params).all(), algorithm.name
