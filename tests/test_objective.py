from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from raysim.data.arrays import ImageSet
from raysim.models import build_model
from raysim.models.base import InputSpec, ModelSettings
from raysim.objective import _COPIES, Batch, ModelObjective, _resident, cut_batches
from raysim.seeding import Purpose, rng_for
from raysim.vector import checksum

SPEC = InputSpec(channels=1, height=28, width=28, num_classes=10)


def lenet() -> nn.Module:
    return build_model(ModelSettings("lenet5"), SPEC, rng_for(0, Purpose.INIT))


@pytest.fixture
def objective(images):
    return ModelObjective(lenet(), images)


def state_hash(objective: ModelObjective) -> str:
    arrays = (objective.params, objective.buffers.floats, objective.buffers.ints)
    modules = [tensor.detach().numpy() for tensor in objective.module.state_dict().values()]
    return checksum(*(array.numpy() for array in arrays), *modules)


def test_the_flat_gradient_is_the_one_of_plain_autograd(objective, images):
    plain = lenet().train()
    batch = objective.take(np.arange(16))
    loss = F.cross_entropy(plain(batch.inputs), batch.labels)
    loss.backward()
    with objective.training():
        assert objective.gradient(batch).item() == loss.item()
    for name, param in plain.named_parameters():
        assert torch.equal(objective.layout.view(objective.grad, name), param.grad), name


def test_parameters_and_buffers_are_views_of_the_flat_vectors(objective):
    objective.params.fill_(0.5)
    assert all((param == 0.5).all() for param in objective.module.parameters())
    objective.buffers.floats.fill_(2.0)
    objective.buffers.ints.fill_(3)
    assert (objective.module.bn1.running_var == 2).all()
    assert objective.module.bn2.num_batches_tracked.item() == 3
    assert objective.module.bn2.num_batches_tracked.shape == ()
    with objective.training():
        objective.gradient(objective.take(np.arange(8)))
    assert objective.buffers.ints.tolist() == [4, 4], "training moves the counters in the flat vector"
    assert not (objective.buffers.floats == 2.0).any()


def test_the_state_dict_still_loads_strictly(objective):
    other = lenet()
    other.load_state_dict(objective.module.state_dict(), strict=True)
    assert other.bn1.num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize("mode", ["batch", "running"])
def test_scoring_leaves_the_model_unchanged(objective, mode):
    before = state_hash(objective)
    with objective.scoring(mode):
        objective.grad.zero_()
        objective.add_gradient(objective.take(np.arange(20)))
    assert state_hash(objective) == before
    assert objective.grad.abs().sum() > 0
    assert objective.module.training, "as before"
    assert all(m.track_running_stats for m in objective.module.modules() if isinstance(m, nn.BatchNorm2d))


def test_batch_statistics_ignore_the_running_ones_and_running_ones_do_not(objective):
    batch = objective.take(np.arange(20))
    losses = {}
    for scale in (0.01, 0.02):
        objective.buffers.floats.fill_(scale)
        for mode in ("batch", "running"):
            with objective.scoring(mode):
                losses[mode, scale] = objective.add_gradient(batch).loss
    assert losses["batch", 0.01] == losses["batch", 0.02]
    assert losses["running", 0.01] != losses["running", 0.02]


def test_dropout_is_off_while_scoring_and_on_while_training(images):
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(784, 10))
    objective = ModelObjective(model, images)
    batch = objective.take(np.arange(20))
    with objective.scoring("batch"):
        assert objective.add_gradient(batch) == objective.add_gradient(batch)
    with objective.training():
        assert objective.gradient(batch).item() != objective.gradient(batch).item()


def test_summed_gradients_add_to_the_mean_gradient(objective):
    with objective.scoring("running"):
        mean = objective.gradient(objective.take(np.arange(40)))
        gradient = objective.grad.clone()
        objective.grad.zero_()
        sums = [objective.add_gradient(objective.take(part)) for part in np.array_split(np.arange(40), 3)]
    torch.testing.assert_close(objective.grad / 40, gradient, rtol=1e-4, atol=1e-7)
    assert sum(s.count for s in sums) == 40
    assert sum(s.loss for s in sums).item() / 40 == pytest.approx(mean.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("count", "size", "rule", "batch_norm", "sizes"),
    [
        (33, 16, "auto", True, [16, 17]),
        (33, 16, "auto", False, [16, 16, 1]),
        (34, 16, "auto", True, [16, 16, 2]),
        (17, 16, "auto", True, [17]),
        (1, 16, "auto", True, []),
        (1, 16, "auto", False, [1]),
        (0, 16, "auto", True, []),
        (33, 16, "drop", True, [16, 16]),
        (34, 16, "merge", False, [16, 18]),
        (3, 16, "merge", False, [3]),
        (33, 16, "keep", True, [16, 16, 1]),
        (32, 16, "drop", True, [16, 16]),
        (5, None, "auto", True, [5]),
        (3, 1, "auto", False, [1, 1, 1]),
        (3, 1, "drop", False, [1, 1, 1]),
        (3, 1, "merge", False, [1, 1, 1]),
        (20, 32, "merge", True, [20]),
        (1, 32, "merge", True, []),
        (1, None, "auto", True, []),
        (33, 16, "merge", True, [16, 17]),
    ],
)
def test_last_batch(count, size, rule, batch_norm, sizes):
    batches = cut_batches(np.arange(count), size, last_batch=rule, has_batch_norm=batch_norm)
    assert [len(batch) for batch in batches] == sizes
    flat = np.concatenate([*batches, np.arange(0)])
    assert flat.tolist() == list(range(len(flat))), "in order, each once"


def test_an_epoch_is_a_function_of_the_generator(objective):
    def epoch(seed):
        return [batch.labels.tolist() for batch in objective.batches(16, np.random.default_rng(seed))]

    assert epoch(1) == epoch(1)
    assert epoch(1) != epoch(2)
    assert sorted(label for batch in epoch(1) for label in batch) == objective.examples.labels.tolist()


def test_images_are_scaled_by_their_type(images):
    objective = ModelObjective(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), images)
    dark = replace(images, images=np.minimum(images.images, 10))
    assert objective.on(dark).take(np.arange(40)).inputs.max() == np.float32(10) / np.float32(255)
    wide = replace(images, images=images.images.astype(np.uint16) * 257)
    torch.testing.assert_close(objective.on(wide).take(np.arange(4)).inputs, objective.take(np.arange(4)).inputs)


def test_float64_stays_float64(images):
    objective = ModelObjective(lenet().double(), images)
    assert objective.params.dtype == objective.grad.dtype == objective.buffers.floats.dtype == torch.float64
    with objective.scoring("batch"):
        objective.add_gradient(objective.take(np.arange(8)))
    assert objective.grad.dtype == torch.float64


def test_frozen_parameters_are_outside_the_vector_and_mixed_types_are_refused(images):
    model = lenet()
    model.conv1.weight.requires_grad_(False)
    frozen = model.conv1.weight.clone()
    objective = ModelObjective(model, images)
    assert "conv1.weight" not in objective.layout.names
    objective.params.zero_()
    assert torch.equal(objective.module.conv1.weight, frozen)
    mixed = lenet()
    mixed.fc1.double()
    with pytest.raises(ValueError, match="of one type"):
        ModelObjective(mixed, images)


def test_every_load_overwrites_everything(objective):
    twin = ModelObjective(copy.deepcopy(objective.module), objective.examples)
    with objective.training():
        objective.gradient(objective.take(np.arange(8)))
    objective.params.add_(1.0)
    objective.load(twin.params, twin.buffers)
    assert state_hash(objective) == state_hash(twin)


def test_binding_other_data_shares_the_model(objective):
    few = ImageSet(objective.examples.images[:3], objective.examples.labels[:3])
    other = objective.on(few)
    assert (other.num_examples, objective.num_examples) == (3, 40)
    assert other.params is objective.params


def test_recalibrated_statistics_are_those_of_the_bound_data(objective):
    """By hand from the first layer's output; with one batch of everything, scores under them are those of batch statistics."""
    batch = objective.take(np.arange(40))
    objective.buffers.floats.uniform_(0.5, 1.5)
    momentum = objective.module.bn1.momentum
    objective.recalibrate([objective.take(np.arange(32)), objective.take(np.arange(32, 40))])
    outputs = objective.module.conv1(batch.inputs).detach().transpose(0, 1)
    parts = outputs[:, :32].flatten(1), outputs[:, 32:].flatten(1)
    bn1 = objective.module.bn1
    torch.testing.assert_close(bn1.running_mean, 0.8 * parts[0].mean(dim=1) + 0.2 * parts[1].mean(dim=1))
    torch.testing.assert_close(bn1.running_var, 0.8 * parts[0].var(dim=1) + 0.2 * parts[1].var(dim=1))
    assert (bn1.momentum, bn1.training) == (momentum, False)
    assert bn1.running_mean.data_ptr() == objective.buffers.floats.data_ptr(), "still a view of the flat vector"
    objective.recalibrate([batch])
    with objective.scoring("recalibrate"):
        recalibrated = objective.losses(batch).loss.item()
    with objective.scoring("batch"):
        assert recalibrated == pytest.approx(objective.losses(batch).loss.item(), rel=1e-3)


def test_a_parameter_that_a_batch_does_not_use_has_a_gradient_of_zero(images):
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(784, 10), nn.Linear(784, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.a if len(x) == 4 else self.b)(x.flatten(1))

    objective = ModelObjective(Choosing(), images)
    small, large = objective.take(np.arange(4)), objective.take(np.arange(10))
    half = objective.layout.size // 2
    objective.gradient(large)
    objective.gradient(small)
    assert objective.grad[:half].abs().sum() > 0
    assert (objective.grad[half:] == 0).all(), "nothing of the batch before is left"
    objective.grad.zero_()
    objective.add_gradient(small)
    alone = objective.grad.clone()
    objective.add_gradient(large)
    assert torch.equal(objective.grad[:half], alone[:half])
    assert objective.grad[half:].abs().sum() > 0


def test_recalibration_is_without_dropout(images):
    net = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.BatchNorm1d(784), nn.Linear(784, 10))
    objective = ModelObjective(net, images)
    objective.recalibrate([objective.take(np.arange(40))])
    pixels = torch.from_numpy(images.images).float().flatten(1) / 255
    torch.testing.assert_close(net[2].running_mean, pixels.mean(dim=0))


@pytest.mark.parametrize("mode", ["batch", "running"])
def test_bfloat16_is_close_and_keeps_the_types(objective, images, mode):
    half, batch = objective.on(images, "bfloat16"), objective.take(np.arange(40))
    before, found = state_hash(objective), []
    for bound in (objective, half):
        bound.grad.zero_()
        with bound.scoring(mode):
            sums = bound.add_gradient(batch)
        found.append((sums.loss.item(), bound.grad.double().abs().sum().item()))
        assert bound.params.dtype == bound.grad.dtype == bound.buffers.floats.dtype == torch.float32
        assert sums.loss.dtype == torch.float64
    assert state_hash(objective) == before
    assert found[0] != found[1]
    np.testing.assert_allclose(found[1], found[0], rtol=0.03)
    assert half.predict(batch).dtype == torch.float32
    with half.training():
        loss = half.gradient(batch)
    assert loss.dtype == torch.float32
    assert objective.on(images).precision == "float32", "every binding says its own"


def test_a_resident_image_set_gives_the_same_batches(objective, images, monkeypatch):
    indices = np.array([3, 1, 7])
    indices.flags.writeable = False  # As they come out of an object store.
    sent = objective.take(indices)
    kept = Batch(torch.from_numpy(images.images), torch.from_numpy(images.labels))
    monkeypatch.setattr("raysim.objective._resident", lambda examples, device: kept)
    taken = objective.take(indices)
    assert torch.equal(taken.inputs, sent.inputs)
    assert torch.equal(taken.labels, sent.labels)
    assert kept.inputs.dtype == torch.uint8


def test_an_image_set_has_one_copy_per_device_as_long_as_it_lives(images, monkeypatch):
    """On a device that holds nothing."""
    meta = torch.device("meta")
    assert _resident(images, torch.device("cpu")) is None
    own = images.take(np.arange(40))
    copy = _resident(own, meta)
    assert copy is _resident(own, meta)
    assert (copy.inputs.shape, copy.inputs.dtype, copy.inputs.device) == ((40, 1, 28, 28), torch.uint8, meta)
    assert len(_COPIES) == 1
    del own
    assert not _COPIES
    assert _resident(replace(images, images=images.images.astype(np.uint16)), meta) is None
    monkeypatch.setattr("raysim.objective.RESIDENT_BYTES", images.images.nbytes - 1)
    assert _resident(images, meta) is None
