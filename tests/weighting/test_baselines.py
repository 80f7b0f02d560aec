"""Weightings that FedVG is compared with: hand-checked numbers and edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quadratic import EXAMPLES, LAYOUT, START, Federation, assert_example, clients, validation
from raysim.algorithms.fedavg import FedAvg
from raysim.vector import VectorLayout
from raysim.weighting.accuracy import Accuracy
from raysim.weighting.base import Probe, Report, Scored
from raysim.weighting.direction import Direction
from raysim.weighting.feddisco import FedDisco
from raysim.weighting.fedvg import FedVG
from raysim.weighting.loss import Loss
from raysim.weighting.mix import Mix
from raysim.weighting.size import Size
from raysim.weighting.uniform import Uniform

ONE = VectorLayout(("w",), ((1,),))


def probed(*probes: Probe | None, num_examples=(30, 10, 10), class_counts=None) -> list[Report]:
    counts = class_counts or [None] * len(probes)
    return [Report(k, n, 1, 0.0, p, c) for k, (n, p, c) in enumerate(zip(num_examples, probes, counts, strict=False))]


def test_loss_is_a_softmax_of_the_negative_loss():
    given = probed(Probe(loss=1.0), Probe(loss=1.0 + np.log(2)), Probe(loss=1.0 + np.log(4)))
    np.testing.assert_allclose(Loss().weights(given, None, ONE).client, np.array([4, 2, 1]) / 7, rtol=1e-12)
    cold = Loss(temperature=1e-3).weights(given, None, ONE).client
    np.testing.assert_allclose(cold, [1, 0, 0], atol=1e-12)
    far = probed(Probe(loss=5000.0), Probe(loss=5000.0))
    np.testing.assert_array_equal(Loss().weights(far, None, ONE).client, [0.5, 0.5])


def accurate(*shares: float) -> list[Report]:
    return probed(*(Probe(loss=1.0, correct=round(10 * share), count=10) for share in shares))


def test_accuracy():
    assert_example(Accuracy().weights(accurate(0.6, 0.2), None, ONE).client, "fedacc.weights")


def test_no_accuracy_at_all_is_uniform_and_said():
    weights = Accuracy().weights(accurate(0, 0, 0), None, ONE)
    np.testing.assert_array_equal(weights.client, [1 / 3] * 3)
    assert weights.notes == ("no model predicts anything right: uniform",)


@pytest.mark.parametrize(("fields", "key"), [({}, "feddisco.weights"), ({"discrepancy": "l2"}, "feddisco.weights_l2")])
def test_feddisco(fields, key):
    given = probed(None, None, class_counts=[np.array([27, 3]), np.array([5, 5])])
    assert_example(FedDisco(**fields).weights(given, None, ONE).client, key)


def test_feddisco_discrepancies():
    from raysim.weighting.feddisco import distances_to_uniform

    counts = np.array([[9, 1], [5, 5], [10, 0]])
    assert_example(distances_to_uniform(counts, "kl")[:2], "feddisco.kl")
    assert_example(distances_to_uniform(counts, "l2")[:2], "feddisco.l2")
    np.testing.assert_allclose(distances_to_uniform(counts, "kl")[2], np.log(2), rtol=1e-12)
    np.testing.assert_allclose(distances_to_uniform(counts, "l1"), [0.8, 0, 1], rtol=1e-12)
    cosines = [1 / np.sqrt(2 * 0.82), 1, np.sqrt(0.5)]
    np.testing.assert_allclose(distances_to_uniform(counts, "cosine"), 1 - np.array(cosines), atol=1e-15)


def test_feddisco_with_nothing_left_falls_back_to_size():
    given = probed(None, None, class_counts=[np.array([30, 0]), np.array([10, 0])])
    weights = FedDisco(a=100.0, b=0.0, discrepancy="l2").weights(given, None, ONE)
    np.testing.assert_array_equal(weights.client, [0.75, 0.25])
    assert "weights by size" in weights.notes[0]


class TestDirection:
    """Updates along, across and against the negative validation gradient [0, 2, 1] at the start."""

    def probes(self, *deltas) -> list[Probe]:
        objective = validation()
        start = torch.tensor(START, dtype=torch.float64)
        objective.params.copy_(start)
        reference = Direction().reference(objective, [[objective.everything()], [objective.everything()]])
        np.testing.assert_array_equal(reference["gradient"] / reference["count"], [0, -2, -1])
        return [Direction().finish({}, Scored(start + torch.tensor(d), start, LAYOUT, reference)) for d in deltas]

    def test_cosines_and_weights(self):
        probes = self.probes([0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [0.0, -1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0])
        cosines = [1, 0, -2 / np.sqrt(5), 2 / np.sqrt(5), 0]
        np.testing.assert_allclose([p.values[0] for p in probes], cosines, rtol=1e-12, atol=1e-15)
        weights = Direction().weights(probed(*probes, num_examples=[1] * 5), None, LAYOUT).client
        total = 1 + 2 / np.sqrt(5)
        np.testing.assert_allclose(weights, [1 / total, 0, 0, 1 - 1 / total, 0], rtol=1e-12, atol=1e-15)

    def test_nobody_downhill_is_size_and_said(self):
        probes = self.probes([0.0, -2.0, -1.0], [1.0, 0.0, 0.0])
        weights = Direction().weights(probed(*probes), None, LAYOUT)
        np.testing.assert_array_equal(weights.client, [0.75, 0.25])
        assert "weights by size" in weights.notes[0]


class TestMix:
    def reports(self) -> list[Report]:
        norms = EXAMPLES["fedvg.L1.tensor_norms"]
        counts = {"loss": 1.0, "count": 10}
        return probed(
            *(Probe(np.array(n), np.mean(n), correct=c, **counts) for n, c in zip(norms, (6, 2), strict=True))
        )

    def weights(self, mix: Mix):
        given = self.reports()
        own = [Report(r.client_id, r.num_examples, 1, 0.0, Probe(parts=(r.probe, r.probe))) for r in given]
        return mix.weights(own, None, LAYOUT)

    def test_averaged_with_size(self):
        assert_example(self.weights(Mix()).client, "fedvg+fedavg(mean of s and p).weights")

    def test_a_round_of_the_averaged_variant(self):
        run = Federation(FedAvg(), Mix(), clients(), validation())
        assert_example(run.round(), "fedvg+fedavg.round1")

    def test_averaged_with_accuracy(self):
        assert_example(self.weights(Mix(second=Accuracy())).client, "fedgradacc.weights")

    @pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
    def test_shares(self, share):
        expected = (1 - share) * np.array(EXAMPLES["fedvg.L1.s"]) + share * 0.5
        np.testing.assert_allclose(self.weights(Mix(second=Uniform(), share=share)).client, expected, rtol=1e-12)

    def test_per_unit_with_per_client(self):
        weights = self.weights(Mix(first=FedVG(granularity="tensor")))
        layerwise = np.array(EXAMPLES["fedvg.L1.layerwise.s[k][tensor]"])
        np.testing.assert_allclose(weights.unit, 0.5 * layerwise + 0.5 * np.array([[0.75], [0.25]]), rtol=1e-12)
        assert_example(weights.client, "fedvg+fedavg(mean of s and p).weights")
        assert weights.granularity == "tensor"

    def test_models_are_scored_once_with_what_the_dearer_part_needs(self):
        mix = Mix(first=Loss(), second=FedVG(norm="l2"))
        assert mix.needs == "gradient"
        assert Mix(first=Loss(), second=Size()).needs == "losses"
        assert Mix(first=Size(), second=Uniform()).needs_probe is False
        objective = validation()
        objective.params.copy_(torch.tensor(EXAMPLES["local.theta1"], dtype=torch.float64))
        sums = mix.accumulate(objective, [objective.everything()])
        probe = mix.finish(sums, Scored(objective.params, objective.params, LAYOUT))
        np.testing.assert_allclose(probe.values, EXAMPLES["fedvg.L2.tensor_norms"][0], rtol=1e-12)
        assert probe.parts[0].score == probe.loss == pytest.approx(objective.loss().item())

    def test_two_granularities_are_refused(self):
        with pytest.raises(ValueError, match="weights per block cannot be mixed with weights per tensor"):
            Mix(first=FedVG(granularity="tensor"), second=FedVG(granularity="block"))

    def test_sums_of_ones_own_are_refused(self):
        class Own(Loss):
            def accumulate(self, objective, shard):
                return {}

        with pytest.raises(ValueError, match="gathers sums of its own"):
            Mix(first=Own())
