"""FedProx on the quadratic problem with mu = 0.1."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quadratic import START, TRAINING, Federation, Quadratic, assert_example, clients, server_of, validation
from raysim.algorithms.fedavg import FedAvg
from raysim.algorithms.fedprox import FedProx
from raysim.config import resolve
from raysim.errors import ConfigError
from raysim.local import LocalTraining
from raysim.weighting.fedvg import FedVG
from raysim.weighting.size import Size


@pytest.mark.parametrize("k", [1, 2])
def test_local_models(k):
    update, _ = FedProx(mu=0.1).client_update(
        server_of(START), None, clients()[k - 1], TRAINING, np.random.default_rng(0)
    )
    assert_example(update.delta + torch.tensor(START), f"fedprox.theta{k}")


def test_rounds():
    assert_example(Federation(FedProx(mu=0.1), Size(), clients(), validation()).round(), "fedprox.round1")
    assert_example(Federation(FedProx(mu=0.1), FedVG(), clients(), validation()).round(), "fedvg+fedprox.round1")


def test_by_hand():
    """w = 1, gradient 1, lr 0.1, mu 0.5: 1 -> 0.9 -> 0.9 - 0.1 (1 - 0.05) = 0.805; 0.8 lacks the term, 0.825 its square."""

    class Slope(Quadratic):
        def gradient(self, batch):
            self.grad.fill_(1.0)
            return self.params.sum()

    update, _ = FedProx(mu=0.5).client_update(
        server_of([1, 1, 1]), None, Slope([0, 0, 0], [0, 0, 0]), TRAINING, np.random.default_rng(0)
    )
    np.testing.assert_allclose(1 + update.delta.numpy(), 0.805, rtol=1e-12)


def test_without_the_term_it_is_fedavg_bit_for_bit():
    prox, avg = (Federation(a, Size(), clients(), validation()) for a in (FedProx(mu=0.0), FedAvg()))
    for _ in range(3):
        assert prox.round().tobytes() == avg.round().tobytes()


def steps_of(algorithm, seed):
    """Epochs, one step each, that a client runs out of four."""
    training = replace(TRAINING, local_epochs=4)
    update, _ = algorithm.client_update(server_of(START), None, clients()[0], training, np.random.default_rng(seed))
    assert np.any(update.delta.numpy()), "a straggler's work is kept"
    return update.num_steps


def test_stragglers_run_fewer_epochs_at_the_chance_given():
    steps = np.array([steps_of(FedProx(stragglers=0.6), seed) for seed in range(500)])
    shares = np.bincount(steps, minlength=5) / 500
    np.testing.assert_allclose(shares, [0, 0.2, 0.2, 0.2, 0.4], atol=0.06)
    assert steps_of(FedProx(stragglers=0.6), 5) == steps[5]


def test_without_stragglers_nothing_is_drawn():
    rng = np.random.default_rng(0)
    FedProx().client_update(server_of(START), None, clients()[0], TRAINING, rng)
    assert rng.bit_generator.state == np.random.default_rng(0).bit_generator.state


def test_stragglers_need_two_epochs():
    with pytest.raises(ConfigError, match=r"algorithm\.stragglers: 0\.5 needs client\.local_epochs of at least 2"):
        resolve({"algorithm": {"name": "fedprox", "stragglers": 0.5}, "client": {"local_epochs": 1}})
    FedProx().check(LocalTraining(local_epochs=1))
