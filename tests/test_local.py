from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from quadratic import START, TRAINING, Quadratic, assert_example, clients
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


@pytest.mark.parametrize("settings", [(0.1, 0.0, 0.0), (0.05, 0.9, 0.0), (0.05, 0.9, 1e-2)])
def test_the_same_bits_as_a_plain_pytorch_loop(images, settings):
    lr, momentum, decay = settings
    optimizer = OptimizerSettings(lr=lr, momentum=momentum, weight_decay=decay)
    training = LocalTraining(local_epochs=3, batch_size=13, optimizer=optimizer)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        objective = ModelObjective(build_model(ModelSettings("lenet5"), SPEC, rng_for(0, Purpose.INIT)), images)
        plain = build_model(ModelSettings("lenet5"), SPEC, rng_for(0, Purpose.INIT)).train()
        with objective.training():
            local = local_sgd(objective, objective.params.clone(), training, np.random.default_rng(3))
        rng = np.random.default_rng(3)
        reference = torch.optim.SGD(plain.parameters(), lr=lr, momentum=momentum, weight_decay=decay)
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


def test_no_batch_no_step(images):
    objective = ModelObjective(build_model(ModelSettings("lenet5"), SPEC, rng_for(0, Purpose.INIT)), images)
    lone = objective.on(images.take(np.array([3])))
    start = lone.params.clone()
    local = local_sgd(lone, start, LocalTraining(), np.random.default_rng(0))
    assert (local.num_steps, local.loss) == (0, 0.0)
    assert torch.equal(local.params, start)
