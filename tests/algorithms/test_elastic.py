"""Elastic aggregation on the quadratic problem; sensitivities of a linear output on two one-sample batches a client."""

from __future__ import annotations

import numpy as np
import torch

from quadratic import LAYOUT, Federation, Quadratic, assert_example, validation
from raysim.algorithms.elastic import Elastic, elasticity
from raysim.objective import Batch
from raysim.weighting.fedvg import FedVG
from raysim.weighting.size import Size

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


def test_edges():
    assert elasticity(torch.zeros(3), 0.5, LAYOUT).tolist() == [1, 1, 1], "no sensitivity: FedAvg's step"
    assert elasticity(torch.tensor([1.0, 0.5, 2.0]), 0.5, LAYOUT).tolist() == [0.5, 1.0, 0.5]
    zeta = elasticity(torch.rand(3), 0.5, LAYOUT)
    assert ((zeta >= 0.5) & (zeta <= 1.5)).all()
    assert np.isfinite(federation(Size()).round()).all()
