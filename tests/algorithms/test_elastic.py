"""Elastic aggregation on the quadratic problem; sensitivities of a linear output on two one-sample batches a client."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from quadratic import LAYOUT, START, TRAINING, Federation, Quadratic, assert_example, clients, example, validation
from raysim.algorithms.elastic import Elastic, elasticity, tensor_elasticity
from raysim.algorithms.fedavg import FedAvg
from raysim.local import LocalTraining
from raysim.objective import Batch, ModelObjective
from raysim.weighting.base import Weights
from raysim.weighting.fedvg import FedVG
from raysim.weighting.size import Size

ONE_EPOCH = replace(TRAINING, local_epochs=1)
INPUTS = {30: ([1, 0, 1], [0, 1, 1]), 10: ([1, 1, 0], [2, 0, 1])}


class WithInputs(Quadratic):
    """Gives its two inputs, one a batch, when asked for the sensitivity, and everything at once for training."""

    asked = 0

    def batches(self, batch_size, rng, *, last_batch="auto"):
        self.asked += 1
        if self.asked % 3 == 1:
            for x in INPUTS[self.num_examples]:
                yield Batch(torch.tensor([x], dtype=torch.float64), torch.zeros(1, dtype=torch.int64))
        else:
            yield self.everything()


def federation(weighting) -> Federation:
    objectives = [WithInputs([1, 2, 0.5], [0, 1, 2], 30), WithInputs([0.5, 1, 4], [3, -1, 0], 10)]
    return Federation(Elastic(), weighting, objectives, validation())


def test_sensitivities_and_one_round_by_size():
    run = federation(Size())
    updates, _ = run.train()
    for k in (0, 1):
        assert_example(updates[k].sensitivity, f"elastic.omega{k + 1}")
    cohort = run.cohort(updates, Size().weights([run.report(k, updates[k]) for k in (0, 1)], None, LAYOUT))
    omega = cohort.sums(sensitivity=cohort.delta_weights)["sensitivity"]
    assert_example(omega, "elastic.omega")
    assert_example(elasticity(omega, 0.5, LAYOUT), "elastic.zeta")
    assert_example(federation(Size()).round(), "elastic.round1")


def test_unit_weights_act_on_deltas_and_sensitivities():
    """Two tensors, each averaged with its own weights: zeta and step by hand."""
    run = federation(FedVG(granularity="tensor"))
    updates, _ = run.train()
    moved = run.round() - np.array([1, -2, 0.5])
    unit = run.weights.unit[:, [0, 0, 1]]
    assert not np.allclose(unit[:, 0], unit[:, 2])
    omega = sum(unit[k] * updates[k].sensitivity.numpy() for k in updates)
    zeta = 1.5 - omega / np.array([omega[:2].max(), omega[:2].max(), omega[2]])
    np.testing.assert_allclose(moved, zeta * sum(unit[k] * updates[k].delta.numpy() for k in updates), rtol=1e-12)


def test_clipping_shortens_deltas_and_leaves_sensitivities_whole():
    run = federation(Size())
    updates, _ = run.train()
    clipped = Weights(np.array([0.75, 0.25]), factors=np.array([0.1, 1.0]))
    after = run.algorithm.server_update(run.server, run.cohort(updates, clipped)).params.numpy()
    deltas = 0.075 * updates[0].delta.numpy() + 0.25 * updates[1].delta.numpy()
    np.testing.assert_allclose(after, np.array(START) + example("elastic.zeta") * deltas, rtol=1e-12)


def test_with_fedvg_weights():
    run = federation(FedVG())
    updates, _ = run.train()
    weights = FedVG().weights([run.report(k, updates[k]) for k in (0, 1)], None, LAYOUT)
    omega = run.cohort(updates, weights).sums(sensitivity=weights.client)["sensitivity"]
    assert_example(elasticity(omega, 0.5, LAYOUT), "fedvg+elastic.zeta")
    assert_example(federation(FedVG()).round(), "fedvg+elastic.round1")


def test_the_same_client_twice_has_the_same_sensitivity():
    run = federation(Size())
    first, _ = run.train()
    second, _ = run.train()
    assert torch.equal(first[0].sensitivity, second[0].sensitivity)


def test_the_published_form_with_given_sensitivities():
    """T1 = [4, 1], T2 = [2, 3]: zeta = 1.5 - (0.75 * [4, 1] + 0.25 * [2, 3]) / [4, 3] = [0.625, 1]."""
    given = np.array([[4.0, 1.0], [2.0, 3.0]])
    assert_example(
        tensor_elasticity(given, np.array([0.75, 0.25]), 0.5), "elastic.flbench.zeta(given T1=[4,1],T2=[2,3])"
    )
    run = Federation(Elastic(variant="flbench"), Size(), clients(), validation())
    updates, _ = run.train()
    updates = {k: replace(update, sensitivity=tuple(given[k])) for k, update in updates.items()}
    weights = Size().weights([run.report(k, updates[k]) for k in (0, 1)], None, LAYOUT)
    server = run.algorithm.server_update(run.server, run.cohort(updates, weights))
    assert_example(server.params, "elastic.flbench.round1")
    by_unit = Weights(weights.client, np.array([[0.5, 0.5], [0.5, 0.5]]), "tensor")
    server = run.algorithm.server_update(run.server, run.cohort(updates, by_unit))
    zeta, mean = np.array([0.625, 0.625, 1]), (updates[0].delta + updates[1].delta).numpy() / 2
    np.testing.assert_allclose(server.params, START + zeta * mean, rtol=1e-12, err_msg="the clients' weights make zeta")


@pytest.mark.parametrize(("when", "at"), [("before", "theta0"), ("after", "theta1")])
def test_the_published_form_measures_squared_gradients_of_the_loss(when, at):
    """At theta0 client 1 has gradient [1, -6, -0.75]: squares 37 and 0.5625; two batches with mu = 0.5 leave 3/4 of them."""

    class Twice(Quadratic):
        def batches(self, batch_size, rng, *, last_batch="auto"):
            yield from (self.everything(), self.everything())

    algorithm = Elastic(variant="flbench", mu=0.5, when=when)
    run = Federation(algorithm, Size(), [Twice([1, 2, 0.5], [0, 1, 2], 30)], validation(), training=ONE_EPOCH)
    updates, _ = run.train()
    gradient = (
        np.array([1, -6, -0.75]) if at == "theta0" else np.array([1, 2, 0.5]) * (example("local.theta1") - [0, 1, 2])
    )
    assert updates[0].sensitivity == pytest.approx(
        0.75 * np.array([gradient[0] ** 2 + gradient[1] ** 2, gradient[2] ** 2])
    )
    np.testing.assert_allclose(START + updates[0].delta.numpy(), example("local.theta1"), rtol=1e-12)


def test_the_official_form_after_training():
    run = Federation(Elastic(when="after", batches=1), Size(), [WithOneInput([1, 2, 0.5], [0, 1, 2])], validation())
    updates, _ = run.train()
    output = float(example("local.theta1").sum())
    np.testing.assert_allclose(updates[0].sensitivity, 0.05 * 2 * abs(output), rtol=1e-12)


class WithOneInput(Quadratic):
    def everything(self):
        return Batch(torch.ones(1, 3, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("variant", ["official", "flbench"])
def test_without_sensitivity_it_is_fedavg_bit_for_bit(variant):
    """The inputs of the quadratic clients are 0, so the output energy has no gradient; the loss has one, so T is given as 0."""
    run = Federation(Elastic(variant=variant), Size(), clients(), validation())
    fedavg = Federation(FedAvg(), Size(), clients(), validation())
    for _ in range(3):
        updates, _ = run.train()
        if variant == "flbench":
            updates = {k: replace(update, sensitivity=(0.0, 0.0)) for k, update in updates.items()}
        assert not np.any([np.asarray(update.sensitivity) for update in updates.values()])
        weights = Size().weights([run.report(k, updates[k]) for k in (0, 1)], None, LAYOUT)
        run.server = run.algorithm.server_update(run.server, run.cohort(updates, weights))
        assert run.params.tobytes() == fedavg.round().tobytes()


def test_two_clients_alike_take_a_full_step_where_the_maximum_is_taken_over_clients_a_half_step():
    same = [WithInputs([1, 2, 0.5], [0, 1, 2], 30) for _ in range(2)]
    updates, _ = Federation(Elastic(), Size(), same, validation()).train()
    assert torch.equal(updates[0].sensitivity, updates[1].sensitivity)
    zeta = elasticity(updates[0].sensitivity, 0.5, LAYOUT)
    assert zeta.max() > 0.5, "not tau everywhere"
    half = tensor_elasticity(np.array([[4.0, 1.0], [4.0, 1.0]]), np.array([0.5, 0.5]), 0.5)
    assert half.tolist() == [0.5, 0.5], "as published"


@pytest.mark.parametrize("variant", ["official", "flbench"])
def test_a_client_between_two_visits_leaves_no_trace(images, variant):
    """On one bound model: no gradient and no average of another client is in it, and BatchNorm's statistics stay."""
    network = nn.Sequential(nn.AvgPool2d(7), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(16, 10))
    objective = ModelObjective(network, images)
    algorithm, buffers = Elastic(variant=variant), objective.buffers.floats.clone()
    first, other, again = (
        algorithm.sensitivity(objective.on(images.take(part)), LocalTraining(batch_size=8), np.random.default_rng(3))
        for part in (np.arange(20), np.arange(20, 40), np.arange(20))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(objective.buffers.floats, buffers)


def test_edges():
    assert elasticity(torch.zeros(3), 0.5, LAYOUT).tolist() == [1, 1, 1], "no sensitivity: FedAvg's step"
    assert elasticity(torch.tensor([1.0, 0.5, 2.0]), 0.5, LAYOUT).tolist() == [0.5, 1.0, 0.5]
    zeta = elasticity(torch.rand(3), 0.5, LAYOUT)
    assert ((zeta >= 0.5) & (zeta <= 1.5)).all()
    assert np.isfinite(federation(Size()).round()).all()
