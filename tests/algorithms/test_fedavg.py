"""FedAvg on the quadratic problem; the reference numbers are in tests/reference/README.md."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quadratic import LAYOUT, Federation, Quadratic, assert_example, clients, validation
from raysim.algorithms.fedavg import FedAvg
from raysim.state import ClientUpdate
from raysim.weighting import WEIGHTINGS
from raysim.weighting.base import Weights
from raysim.weighting.fedvg import FedVG
from raysim.weighting.size import Size
from raysim.weighting.uniform import Uniform


def federation(weighting, **others) -> Federation:
    return Federation(FedAvg(), weighting, clients(), validation(), **others)


def test_two_rounds_by_size():
    run = federation(Size())
    assert_example(run.round(), "fedavg.round1")
    assert_example(run.round(), "fedavg.round2")


def test_weights_are_shares_of_the_cohort_not_of_all_clients():
    """With two more clients that do not take part, the round is the same."""
    assert_example(federation(Size(), num_clients=4).round(), "fedavg.round1")


def test_one_round_with_uniform_weights():
    assert_example(federation(Uniform()).round(), "fedavg.uniform.round1")


@pytest.mark.parametrize(("norm", "key"), [("l1", "L1"), ("l2", "L2")])
def test_one_round_with_fedvg_weights(norm, key):
    run = federation(FedVG(norm=norm))
    assert_example(run.round(), f"fedvg.{key}.round1")
    assert_example(run.weights.client, f"fedvg.{key}.s")


@pytest.mark.parametrize(("norm", "key"), [("l1", "L1"), ("l2", "L2")])
def test_one_round_with_layerwise_fedvg_weights(norm, key):
    run = federation(FedVG(norm=norm, granularity="tensor"))
    assert_example(run.round(), f"fedvg.{key}.layerwise.round1")
    assert_example(run.weights.unit, f"fedvg.{key}.layerwise.s[k][tensor]")
    assert_example(run.weights.client, f"fedvg.{key}.s")


def test_partial_participation_does_not_shrink_the_model():
    """All deltas zero with 2 of 4 clients: the model stays (it would shrink with weights over all clients)."""
    objectives = [Quadratic([1, 1, 1], [1, -2, 0.5], 30), Quadratic([2, 2, 2], [1, -2, 0.5], 10)]
    run = Federation(FedAvg(), Size(), objectives, validation(), num_clients=4)
    assert run.round().tolist() == [1, -2, 0.5]


def test_a_weighted_mean_by_hand():
    """Models 1 (n = 10) and 4 (n = 30): (10 * 1 + 30 * 4) / 40 = 3.25 exactly."""
    run = federation(Size(), start=(0.0, 0.0, 0.0))
    updates = {
        0: ClientUpdate(torch.full((3,), 1.0, dtype=torch.float64), 10, 1, 0.0),
        1: ClientUpdate(torch.full((3,), 4.0, dtype=torch.float64), 30, 1, 0.0),
    }
    weights = run.weighting.weights([run.report(k, update) for k, update in updates.items()], None, LAYOUT)
    server = run.algorithm.server_update(run.server, run.cohort(updates, weights))
    assert server.params.tolist() == [3.25] * 3


def test_client_drift_keeps_fedavg_from_the_optimum():
    """On heterogeneous quadratics with uniform weights the optimum is sum a b / sum a; FedAvg ends beside it."""
    run = federation(Uniform())
    for _ in range(300):
        end = run.round()
    optimum = sum(c.a * c.b for c in clients()) / sum(c.a for c in clients())
    distance = float(np.abs(end - optimum.numpy()).max())
    assert 0.01 < distance < 0.5


def test_every_weighting_works_with_it():
    for weighting in WEIGHTINGS.values():
        assert np.isfinite(federation(weighting()).round()).all()


def test_unit_weights_apply_to_their_slices():
    run = federation(Uniform())
    updates, _ = run.train()
    weights = Weights(np.array([0.5, 0.5]), np.array([[1.0, 0.0], [0.0, 1.0]]), "tensor")
    mean = run.cohort(updates, weights).mean_delta()
    assert torch.equal(mean[:2], updates[0].delta[:2])
    assert torch.equal(mean[2:], updates[1].delta[2:])
