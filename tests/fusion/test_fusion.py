"""Fusions: hand-checked numbers on the quadratic problem, and real runs."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

from quadratic import EXAMPLES, START, assert_example, validation
from raysim.config import resolve
from raysim.errors import ConfigError, RunError
from raysim.fusion import FUSIONS
from raysim.fusion.base import Candidates
from raysim.fusion.fedlaw import FedLAW
from raysim.fusion.finetune import Finetune
from raysim.local import LocalTraining, OptimizerSettings
from runs import run

SGD = LocalTraining(local_epochs=1, batch_size=None, optimizer=OptimizerSettings(lr=0.1))


def candidates(weights=(0.75, 0.25)) -> Candidates:
    start = torch.tensor(START, dtype=torch.float64)
    deltas = [torch.tensor(EXAMPLES[f"local.theta{k}"], dtype=torch.float64) - start for k in (1, 2)]
    merged = start + sum(w * delta for w, delta in zip(weights, deltas, strict=True))
    return Candidates(start, merged, deltas, np.array(weights))


def fused(fusion, given, training=SGD):
    return fusion.fuse(validation(), given, training, np.random.default_rng(0))


def test_fedlaw_takes_one_gradient_step():
    found = fused(FedLAW(), candidates())
    assert_example(found.weights, "fedlaw.lambda")
    assert_example(found.params.numpy(), "fedlaw.theta")
    models = np.array([EXAMPLES["local.theta1"], EXAMPLES["local.theta2"]])
    gamma = found.params.numpy() / (found.weights[:, None] * models).sum(axis=0)
    np.testing.assert_allclose(gamma, gamma[0], rtol=1e-12)
    assert_example(gamma[0], "fedlaw.gamma")


def test_fedlaw_gradients(monkeypatch):
    """The gradient that reaches the optimizer."""
    seen = []
    settings = OptimizerSettings(lr=0.1)
    start = OptimizerSettings.start
    monkeypatch.setattr(OptimizerSettings, "start", lambda self, xy, grad: seen.append(grad) or start(self, xy, grad))
    fused(FedLAW(), candidates(), LocalTraining(local_epochs=1, batch_size=None, optimizer=settings))
    assert_example(seen[0][:2], "fedlaw.dL/dlogit")
    assert_example(seen[0][2], "fedlaw.dL/dloggamma")


def test_fedlaw_finds_the_best_point_between_the_models():
    """The validation optimum [1, 0, 1] lies a quarter of the way from the first model to the second."""
    first, second = torch.tensor([[0.5, 0.0, 1.0], [2.5, 0.0, 1.0]], dtype=torch.float64)
    start = torch.zeros(3, dtype=torch.float64)
    long = LocalTraining(local_epochs=200, batch_size=None, optimizer=OptimizerSettings(lr=0.5))
    found = fused(FedLAW(), Candidates(start, start, [first, second], np.array([0.1, 0.9])), long)
    np.testing.assert_allclose(found.weights, [0.75, 0.25], rtol=1e-6)
    np.testing.assert_allclose(found.params, [1, 0, 1], rtol=1e-6, atol=1e-9)
    held = fused(FedLAW(shrink=False), Candidates(start, start, [second, 3 * second], np.array([0.5, 0.5])), long)
    assert held.params[2] == pytest.approx(held.weights[0] + 3 * held.weights[1]), "gamma stays 1"


def test_a_client_without_weight_can_be_fused():
    assert np.isfinite(fused(FedLAW(), candidates((1.0, 0.0))).params.numpy()).all()


def test_finetune_is_gradient_descent_from_the_merged_model():
    given = candidates()
    merged = given.merged.numpy()
    found = fused(Finetune(), given)
    np.testing.assert_allclose(found.params, merged - 0.1 * np.array([1, 1, 2]) * (merged - [1, 0, 1]), rtol=1e-12)
    assert found.weights is None


def test_fedlaw_refuses_a_server_step_of_its_own(tmp_path):
    with pytest.raises(ConfigError, match="fedlaw replaces the weighted mean, but fedavgm's server step is more"):
        run(tmp_path, "x", "fusion.name=fedlaw", "algorithm.name=fedavgm", backend="serial")


@pytest.mark.parametrize("weighting", ["{name: fedvg, granularity: tensor}", "{name: guarded, clip: 1}"])
def test_fedlaw_refuses_weights_that_it_would_not_heed(tmp_path, weighting):
    with pytest.raises(ConfigError, match="fedlaw learns one weight per client"):
        run(tmp_path, "x", "fusion.name=fedlaw", f"weighting={weighting}", backend="serial")


def test_one_setting_leaves_a_fusions_other_defaults_alone():
    def training(**given):
        return resolve({"fusion": given}).fusion.training

    law = training(name="fedlaw", training={"optimizer": {"lr": 0.005}})
    assert (law.optimizer.name, law.optimizer.beta1, law.optimizer.lr) == ("adam", 0.5, 0.005)
    assert (law.local_epochs, law.batch_size) == (20, 128)
    assert training(name="finetune", training={"batch_size": 8}).local_epochs == 1
    config = resolve({"fusion": {"name": "fedlaw", "training": {"local_epochs": 3}}})
    assert resolve(config.as_dict()) == config


def test_a_fusion_that_could_not_train_is_found_before_it_is_tried(tmp_path):
    for given, problem in (
        ("{name: finetune, training: {batch_size: 1}}", "fusion.training.batch_size: 1, but lenet5 has BatchNorm"),
        ("{name: finetune, training: {batch_size: 999, last_batch: drop}}", "leaves no batch of 144 images"),
    ):
        with pytest.raises(ConfigError, match=problem):
            run(tmp_path, "x", f"fusion={given}", backend="serial")


def test_a_fusion_that_diverges_ends_the_run_with_its_name(tmp_path):
    far = "{name: finetune, training: {optimizer: {lr: 1.0e+30}}}"
    with pytest.raises(RunError, match="the fusion made the global model non-finite"):
        run(tmp_path, "x", f"fusion={far}", "client.per_round=2", "client.local_epochs=1", rounds=2, backend="serial")


@pytest.mark.parametrize("name", FUSIONS)
def test_a_run_ends_below_the_loss_of_one_without(tmp_path, name):
    few = ["weighting={name: size}", "client.per_round=3", "client.local_epochs=1", "output.checkpoint_every=0"]
    plain = run(tmp_path, "plain", *few, rounds=2, backend="serial")
    with_it = run(
        tmp_path, name, f"fusion={{name: {name}, training: {{local_epochs: 4}}}}", *few, rounds=2, backend="serial"
    )
    assert with_it.result["final"]["loss"] < plain.result["final"]["loss"]
    assert f"{name}: " in (with_it.folder / "run.log").read_text()
    if name == "fedlaw":
        learned = re.findall(r"largest weight (\S+)", (with_it.folder / "run.log").read_text())
        assert [f"{weight:.3f}" for weight in with_it.rounds["weight_max"].to_pylist()] == learned
    config = (with_it.folder / "config.yaml").read_text()
    assert f"name: {name}" in config
    assert json.loads((with_it.folder / "result.json").read_text())["status"] == "finished"
