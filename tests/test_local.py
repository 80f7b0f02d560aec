from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from quadratic import START, TRAINING, Quadratic, assert_example, clients
from raysim.config import resolve
from raysim.errors import ConfigError
from raysim.local import LocalTraining, OptimizerSettings, local_sgd
from raysim.models import build_model
from raysim.models.base import InputSpec, ModelSettings
from raysim.objective import ModelObjective, cut_batches
from raysim.seeding import Purpose, rng_for

SPEC = InputSpec(channels=1, height=28, width=28, num_classes=10)


@pytest.mark.parametrize("k", [1, 2])
def test_two_steps_on_the_quadratics(k):
    local = local_sgd(clients()[k - 1], torch.tensor(START, dtype=torch.float64), TRAINING, np.random.default_rng(0))
    assert_example(local.params, f"local.theta{k}")
    assert local.num_steps == 2


@pytest.mark.parametrize(
    ("optimizer", "of_torch"),
    [
        (OptimizerSettings(lr=0.1), partial(torch.optim.SGD, lr=0.1)),
        (OptimizerSettings(lr=0.05, momentum=0.9), partial(torch.optim.SGD, lr=0.05, momentum=0.9)),
        (
            OptimizerSettings(lr=0.05, momentum=0.9, weight_decay=0.01),
            partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
        ),
        (
            OptimizerSettings("adam", lr=0.01, weight_decay=0.1, beta1=0.8, beta2=0.95, eps=1e-4),
            partial(torch.optim.Adam, lr=0.01, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-4),
        ),
        (
            OptimizerSettings("adamw", lr=0.01, weight_decay=0.1),
            partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
        ),
    ],
    ids=["sgd", "momentum", "weight_decay", "adam", "adamw"],
)
def test_the_same_bits_as_a_plain_pytorch_loop(images, optimizer, of_torch):
    training = LocalTraining(local_epochs=3, batch_size=13, optimizer=optimizer)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        objective = ModelObjective(build_model(ModelSettings("lenet5"), SPEC, rng_for(0, Purpose.INIT)), images)
        plain = build_model(ModelSettings("lenet5"), SPEC, rng_for(0, Purpose.INIT)).train()
        with objective.training():
            local = local_sgd(objective, objective.params.clone(), training, np.random.default_rng(3))
        rng = np.random.default_rng(3)
        reference = of_torch(plain.parameters())
        losses = []
        for _ in range(3):
            for batch in cut_batches(rng.permutation(40), 13, last_batch="auto", has_batch_norm=True):
                reference.zero_grad()
                inputs = torch.from_numpy(images.images[batch]).float() / 255
                loss = F.cross_entropy(plain(inputs), torch.from_numpy(images.labels[batch]))
                loss.backward()
                reference.step()
                losses += [loss.item()] * len(batch)
    finally:
        torch.set_num_threads(threads)
    for name, param in plain.named_parameters():
        assert torch.equal(objective.layout.view(local.params, name), param.detach()), name
    assert local.num_steps == 9, "40 examples by 13: 13, 13, 14"
    assert local.loss == pytest.approx(np.mean(losses), rel=1e-9)


def test_the_correction_is_part_of_the_gradient():
    """One weight of 1, constant gradient 1, lr 0.1, pull 0.5 (w - 1): 1 -> 0.9 -> 0.9 - 0.1 (1 - 0.05) = 0.805."""
    objective = Quadratic([0, 0, 0], [0, 0, 0])
    start = torch.ones(3, dtype=torch.float64)
    local = local_sgd(
        objective, start, TRAINING, np.random.default_rng(0), correct=lambda grad, w: grad + 1 + 0.5 * (w - start)
    )
    np.testing.assert_allclose(local.params, 0.805, rtol=1e-12)
    assert (start == 1).all()


@pytest.mark.parametrize(("name", "end"), [("sgd", 0.85), ("adam", 0.9), ("adamw", 0.85)])
def test_weight_decay_by_hand(name, end):
    """w = 1, gradient 1, lr 0.1, decay 0.5: sgd 1 - 0.1 * 1.5; adam's first step is lr for any gradient; adamw 0.95 - 0.1."""
    w, grad = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    OptimizerSettings(name, lr=0.1, weight_decay=0.5).start(w, grad)()
    assert w.item() == pytest.approx(end, rel=1e-8), "eps moves adam by 1e-9"


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_three_steps_of_adam_in_float64(name):
    optimizer = OptimizerSettings(name, lr=0.1, weight_decay=0.2)
    params = torch.nn.Parameter(torch.tensor(START, dtype=torch.float64))
    reference = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]([params], lr=0.1, weight_decay=0.2)
    mine, grad = params.detach().clone(), torch.zeros(3, dtype=torch.float64)
    step = optimizer.start(mine, grad)
    for power in range(3):
        grad.copy_(mine**power - 0.3)
        params.grad = grad.clone()
        step()
        reference.step()
        assert torch.equal(mine, params.detach())


def test_every_round_starts_with_a_fresh_optimizer():
    training = LocalTraining(local_epochs=2, batch_size=None, optimizer=OptimizerSettings("adam", lr=0.1))
    start = torch.tensor(START, dtype=torch.float64)
    first, second = (local_sgd(clients()[0], start, training, np.random.default_rng(0)) for _ in range(2))
    assert torch.equal(first.params, second.params)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"name": "adam", "momentum": 0.9}, "momentum: 0.9 has no effect with adam; leave it out or use sgd"),
        ({"beta2": 0.9}, "beta2: 0.9 has no effect with sgd; leave it out or use adam or adamw"),
        (
            {"schedule": {"name": "cosine", "every": 5}},
            "schedule.every: 5 has no effect with cosine; leave it out or use step",
        ),
        ({"schedule": {"final": 0.1}}, "schedule.final: 0.1 has no effect with constant; leave it out or use cosine"),
    ],
)
def test_a_setting_that_would_not_be_read_is_refused(values, problem):
    with pytest.raises(ConfigError) as caught:
        resolve({"client": {"optimizer": values}})
    assert caught.value.problems == (f"configuration: client.optimizer.{problem}",)


def test_no_batch_no_step(images):
    objective = ModelObjective(build_model(ModelSettings("lenet5"), SPEC, rng_for(0, Purpose.INIT)), images)
    lone = objective.on(images.take(np.array([3])))
    start = lone.params.clone()
    local = local_sgd(lone, start, LocalTraining(), np.random.default_rng(0))
    assert (local.num_steps, local.loss) == (0, 0.0)
    assert torch.equal(local.params, start)


def test_momentum_sees_the_correction():
    """w = 1, gradient 1 + 0.5 (w - 1), momentum 0.9: v = 1, 1.85, 2.5225 and w = 0.9, 0.715, 0.46275."""
    objective = Quadratic([0, 0, 0], [0, 0, 0])
    start = torch.ones(3, dtype=torch.float64)
    training = LocalTraining(local_epochs=3, batch_size=None, optimizer=OptimizerSettings(lr=0.1, momentum=0.9))
    local = local_sgd(
        objective, start, training, np.random.default_rng(0), correct=lambda grad, w: grad + 1 + 0.5 * (w - start)
    )
    np.testing.assert_allclose(local.params, 0.46275, rtol=1e-12)
