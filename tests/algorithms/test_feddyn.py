"""FedDyn on the quadratic problem: alpha = 0.1, no scaling by size, uniform weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from quadratic import (
    LAYOUT,
    TRAINING,
    Federation,
    Quadratic,
    assert_differs,
    assert_example,
    clients,
    validation,
)
from raysim.algorithms.feddyn import FedDyn
from raysim.state import ClientUpdate
from raysim.weighting import WEIGHTINGS
from raysim.weighting.base import Weights
from raysim.weighting.fedvg import FedVG
from raysim.weighting.uniform import Uniform

PLAIN = FedDyn(alpha=0.1, alpha_scaling="none")


def federation(algorithm=PLAIN, weighting=None, **others) -> Federation:
    """With the weighting of the method's paper, uniform, though the clients have 30 and 10 examples."""
    return Federation(algorithm, weighting or WEIGHTINGS[FedDyn.default_weighting](), clients(), validation(), **others)


def test_two_rounds():
    run = federation()
    assert_example(run.round(), "feddyn.round1.theta")
    assert_example(run.server.h, "feddyn.round1.h(=-alpha*mean nabla)")
    assert_differs(run.params, "feddyn.fork_bug_no_quadratic.round1.theta")
    for k in (0, 1):
        assert_example(run.states[k].accumulated, f"feddyn.round1.nabla{k + 1}")
    assert_example(run.round(), "feddyn.round2.theta")
    for k in (0, 1):
        assert_example(run.states[k].accumulated, f"feddyn.round2.nabla{k + 1}")


def test_two_rounds_with_fedvg_weights():
    run = federation(weighting=FedVG())
    assert_example(run.round(), "fedvg+feddyn.round1")
    assert_example(run.round(), "fedvg+feddyn.round2")


def test_h_divides_by_all_clients_and_the_mean_by_the_cohort():
    """theta = h = 0, alpha 0.1, 4 clients, two return 1 and 3: h = -0.1, theta = 2 + 1 = 3 (-0.2 and 4 are the mistake)."""
    run = federation(start=(0.0, 0.0, 0.0), num_clients=4)
    updates = {
        k: ClientUpdate(torch.full((3,), value, dtype=torch.float64), 10, 1, 0.0) for k, value in ((0, 1.0), (1, 3.0))
    }
    server = PLAIN.server_update(run.server, run.cohort(updates, Weights(np.array([0.5, 0.5]))))
    np.testing.assert_allclose(server.h, -0.1, rtol=1e-12)
    np.testing.assert_allclose(server.params, 3.0, rtol=1e-12)


def test_h_is_the_mean_accumulated_delta_over_all_clients():
    run = federation(num_clients=5)
    for _ in range(4):
        run.round()
        total = sum((run.states[k].accumulated for k in (0, 1)), torch.zeros(3, dtype=torch.float64))
        np.testing.assert_allclose(run.server.h, -0.1 * total / 5, rtol=1e-10)


def test_the_extra_gradient_vanishes_at_the_start_of_the_first_round():
    """At w = theta with nothing accumulated it adds exactly 0; without the quadratic part it would add -alpha theta."""
    run = federation()
    one_step = TRAINING.__class__(local_epochs=1, batch_size=None, optimizer=TRAINING.optimizer)
    client = PLAIN.init_client(run.server.params)
    update, _ = PLAIN.client_update(run.server, client, run.objectives[0], one_step, np.random.default_rng(0))
    gradient = run.objectives[0].a * (run.server.params - run.objectives[0].b)
    np.testing.assert_allclose(update.delta, -0.1 * gradient, rtol=1e-12)


def test_alpha_is_scaled_by_size():
    """Sizes 30 and 10, mean 20: alpha_1 = 0.1 * 2/3, alpha_2 = 0.2; the second step feels it."""
    run = federation(FedDyn(alpha=0.1))
    updates, _ = run.train()
    for k, alpha in ((0, 0.1 * 20 / 30), (1, 0.1 * 20 / 10)):
        c, theta = run.objectives[k], run.server.params
        w = theta - 0.1 * c.a * (theta - c.b)
        w = w - 0.1 * (c.a * (w - c.b) + alpha * (w - theta))
        np.testing.assert_allclose(updates[k].delta, w - theta, rtol=1e-12)


def test_the_clip_bounds_loss_and_linear_term_before_the_rest_is_added():
    """Gradient g = [1, -6, -0.75] at theta = [1, -2, 0.5]; g - 0.1 theta is scaled to norm 2, then 0.1 w is added."""
    algorithm = FedDyn(alpha=0.1, alpha_scaling="none", clip=2.0)
    run = federation(algorithm, training=replace(TRAINING, local_epochs=1))
    updates, _ = run.train()
    theta, linear = np.array([1, -2, 0.5]), np.array([0.9, -5.8, -0.8])
    step = 2 * linear / np.sqrt((linear**2).sum()) + 0.1 * theta
    np.testing.assert_allclose(updates[0].delta, -0.1 * step, rtol=1e-12)


def test_a_clip_that_is_never_reached_changes_nothing():
    free, clipped = federation(), federation(replace(PLAIN, clip=100.0))
    for _ in range(2):
        np.testing.assert_allclose(clipped.round(), free.round(), rtol=1e-12)


def test_the_clip_is_at_ease_with_a_gradient_of_zero():
    run = Federation(
        replace(PLAIN, clip=1.0), Uniform(), [Quadratic([1, 1, 1], [0, 0, 0])], validation(), start=(0, 0, 0.0)
    )
    assert run.round().tolist() == [0, 0, 0]


def test_the_active_average_is_the_weighted_mean_of_the_models():
    run = federation(replace(PLAIN, eval_model="active_average"), FedVG())
    assert torch.equal(run.algorithm.evaluated(run.server), run.server.params)
    for _ in range(2):
        start = run.server.params
        updates, _ = run.train()
        run.round()
        mean = sum(w * (start + updates[k].delta) for k, w in enumerate(run.weights.client))
        np.testing.assert_allclose(run.algorithm.evaluated(run.server), mean, rtol=1e-12)
        assert not np.allclose(run.params, mean, rtol=1e-3)
        assert torch.equal(PLAIN.evaluated(run.server), run.server.params)


def test_it_reaches_the_optimum():
    run = federation(FedDyn(alpha=0.5, alpha_scaling="none"))
    for _ in range(600):
        run.round()
    optimum = sum(c.a * c.b for c in clients()) / sum(c.a for c in clients())
    np.testing.assert_allclose(run.params, optimum, atol=1e-6)
    assert LAYOUT.size == 3
