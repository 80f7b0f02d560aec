"""SCAFFOLD on the quadratic problem: option II, server_lr 1, uniform weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quadratic import TRAINING, Federation, Quadratic, assert_differs, assert_example, clients, validation
from raysim.algorithms.fedavg import FedAvg
from raysim.algorithms.scaffold import Scaffold, ScaffoldClient
from raysim.local import LocalTraining, OptimizerSettings
from raysim.weighting.fedvg import FedVG
from raysim.weighting.uniform import Uniform


def federation(algorithm=None, weighting=None, **others) -> Federation:
    return Federation(algorithm or Scaffold(), weighting or Uniform(), clients(), validation(), **others)


def test_two_rounds():
    run = federation()
    for number in (1, 2):
        assert_example(run.round(), f"scaffold.round{number}.x")
        assert_example(run.server.control, f"scaffold.round{number}.c")
        for k in (0, 1):
            assert_example(run.states[k].control, f"scaffold.round{number}.c{k + 1}")
    assert_differs(run.params, "scaffold.fork_bug_ci_not_stored.round2.x")


def test_without_client_state_it_is_the_published_behaviour():
    run = federation(Scaffold(stateless=True))
    run.round()
    assert_example(run.server.control, "scaffold.round1.c")
    assert_example(run.round(), "scaffold.fork_bug_ci_not_stored.round2.x")
    assert all(not run.states[k].control.any() for k in (0, 1))


def test_the_server_control_moves_by_the_share_of_all_clients():
    run = federation(num_clients=4)
    run.round()
    assert_example(run.server.control, "scaffold.N4.round1.c")


def test_c_is_the_mean_of_all_c_k_after_every_round():
    run = federation(num_clients=4)
    for _ in range(5):
        run.round()
        total = sum((run.states[k].control for k in (0, 1)), torch.zeros(3, dtype=torch.float64))
        np.testing.assert_allclose(run.server.control, total / 4, rtol=1e-12, atol=1e-14)


def test_fedvg_weighs_the_step_of_x_only():
    run = federation(weighting=FedVG())
    assert_example(run.round(), "fedvg+scaffold.round1.x")
    assert_example(run.server.control, "scaffold.round1.c")
    assert_example(run.round(), "fedvg+scaffold.round2.x")


def test_round_one_is_fedavg_with_uniform_weights_exactly():
    assert federation().round().tobytes() == federation(FedAvg()).round().tobytes()


def test_the_step_count_is_that_of_optimizer_steps():
    """x = 1, gradient 1, lr 0.1, 3 batches, 2 epochs: y = 0.4, c_k = 1 (2 is the known mistake); N = 4, one sampled: c = 0.25,
    x = 0.4; then a client with c_k = 0 in the next round: y = 0.4 - 6 * 0.1 * 1.25 = -0.35, c_k = -0.25 + 0.75 / 0.6 = 1.
    """

    class Slope(Quadratic):
        def batches(self, batch_size, rng, *, last_batch="auto"):
            for _ in range(3):
                yield self.everything()

        def gradient(self, batch):
            self.grad.fill_(1.0)
            return self.params.sum()

    slope = Slope([0, 0, 0], [0, 0, 0])
    run = Federation(Scaffold(), Uniform(), [slope], validation(), start=(1.0, 1.0, 1.0), num_clients=4)
    updates, states = run.train()
    np.testing.assert_allclose(1 + updates[0].delta.numpy(), 0.4, rtol=1e-12)
    np.testing.assert_allclose(states[0].control, 1.0, rtol=1e-12)
    run.round()
    np.testing.assert_allclose(run.server.control, 0.25, rtol=1e-12)
    np.testing.assert_allclose(run.params, 0.4, rtol=1e-12)
    update, state = Scaffold().client_update(
        run.server, ScaffoldClient(torch.zeros(3, dtype=torch.float64)), slope, TRAINING, np.random.default_rng(0)
    )
    np.testing.assert_allclose(run.params + update.delta.numpy(), -0.35, rtol=1e-12)
    np.testing.assert_allclose(state.control, 1.0, rtol=1e-12)


def test_uneven_steps_each_divide_by_their_own():
    run = federation()
    training = replace(TRAINING, local_epochs=5)
    update, state = Scaffold().client_update(
        run.server, run.algorithm.init_client(run.server.params), run.objectives[0], training, np.random.default_rng(0)
    )
    assert update.num_steps == 5
    np.testing.assert_allclose(state.control, -update.delta / (5 * 0.1), rtol=1e-12)


def test_two_clients_with_uneven_steps_in_one_round():
    """Both control variates are mean gradients over the client's own steps, 2 and 6."""

    class Thrice(Quadratic):
        def batches(self, batch_size, rng, *, last_batch="auto"):
            yield from (self.everything() for _ in range(3))

    a, b = clients()[1].a.tolist(), clients()[1].b.tolist()
    run = Federation(Scaffold(), Uniform(), [clients()[0], Thrice(a, b, 10)], validation())
    for _ in range(2):
        before, server = dict(run.states), run.server
        run.round()
        for k, steps in ((0, 2), (1, 6)):
            y, total, objective = server.params, 0, clients()[k]
            c_k = before[k].control if before else 0
            for _ in range(steps):
                gradient = objective.a * (y - objective.b)
                y, total = y - 0.1 * (gradient + server.control - c_k), total + gradient
            np.testing.assert_allclose(run.states[k].control, total / steps, rtol=1e-12)


def test_option_one_is_the_gradient_at_x():
    run = federation(Scaffold(option="I"))
    x = run.server.params.clone()
    run.round()
    for k, objective in enumerate(clients()):
        np.testing.assert_allclose(run.states[k].control, objective.a * (x - objective.b), rtol=1e-12)


def test_it_reaches_the_optimum_that_fedavg_misses():
    optimum = (sum(c.a * c.b for c in clients()) / sum(c.a for c in clients())).numpy()
    scaffold, fedavg = federation(), federation(FedAvg())
    for _ in range(400):
        scaffold.round()
        fedavg.round()
    np.testing.assert_allclose(scaffold.params, optimum, atol=1e-6)
    assert np.abs(fedavg.params - optimum).max() > 0.01


@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerSettings(momentum=0.9),
        OptimizerSettings(weight_decay=1e-4),
        OptimizerSettings("adam"),
        OptimizerSettings("adamw"),
    ],
)
def test_other_optimizers_are_refused(optimizer):
    with pytest.raises(ValueError, match="scaffold needs"):
        Scaffold().check(LocalTraining(optimizer=optimizer))
    Scaffold(option="I").check(LocalTraining(optimizer=optimizer))


def test_a_client_that_took_no_step_keeps_its_control():
    class Nothing(Quadratic):
        def batches(self, batch_size, rng, *, last_batch="auto"):
            return iter(())

    run = federation()
    mine = ScaffoldClient(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    _, state = Scaffold().client_update(
        run.server, mine, Nothing([1, 1, 1], [0, 0, 0]), TRAINING, np.random.default_rng(0)
    )
    assert torch.equal(state.control, mine.control)
