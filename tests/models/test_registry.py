import itertools

import numpy as np
import pytest
import torch
from torch import nn

from raysim.errors import ConfigError
from raysim.models import MODELS, build_model, choose_size, has_batch_norm
from raysim.models.base import InputSpec, ModelSettings

LENET_SHAPES = {
    "conv1.weight": (6, 1, 5, 5),
    "conv1.bias": (6,),
    "bn1.weight": (6,),
    "bn1.bias": (6,),
    "bn1.running_mean": (6,),
    "bn1.running_var": (6,),
    "bn1.num_batches_tracked": (),
    "conv2.weight": (16, 6, 5, 5),
    "conv2.bias": (16,),
    "bn2.weight": (16,),
    "bn2.bias": (16,),
    "bn2.running_mean": (16,),
    "bn2.running_var": (16,),
    "bn2.num_batches_tracked": (),
    "fc1.weight": (120, 256),
    "fc1.bias": (120,),
    "fc2.weight": (84, 120),
    "fc2.bias": (84,),
    "classifier.weight": (10, 84),
    "classifier.bias": (10,),
}


def build(name: str, *, channels: int = 1, side: int = 28, num_classes: int = 10, seed: int = 0) -> nn.Module:
    spec = InputSpec(channels, side, side, num_classes)
    return build_model(ModelSettings(name=name), spec, np.random.default_rng(seed))


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "side", "channels"),
    [*itertools.product(["mlp", "lenet5", "cnn"], [28, 32], [1, 3]), ("resnet18", 28, 1), ("resnet18", 32, 3)],
)
def test_forward_and_backward(name, side, channels):
    model = build(name, channels=channels, side=side, num_classes=7)
    logits = model(torch.zeros(2, channels, side, side))
    assert logits.shape == (2, 7)
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_smallest_size_works_and_one_less_is_refused(name):
    sizes = MODELS[name].sizes
    assert build(name, side=sizes.smallest)(torch.zeros(2, 1, sizes.smallest, sizes.smallest)).shape == (2, 10)
    assert sizes.default in sizes
    if sizes.smallest > 1:
        with pytest.raises(ConfigError, match=rf"data\.image_size: .* but {name} takes {sizes.smallest} and more"):
            build(name, side=sizes.smallest - 1)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_a_function_of_the_generator_only(name):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, same, other = build(name), build(name), build(name, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = build(name)
    for key, value in first.state_dict().items():
        assert torch.equal(value, same.state_dict()[key])
        assert torch.equal(value, again.state_dict()[key])
    assert any(not torch.equal(value, other.state_dict()[key]) for key, value in first.state_dict().items())


def test_lenet5_has_the_published_names_and_shapes():
    state = build("lenet5").state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == LENET_SHAPES
    assert list(state) == list(LENET_SHAPES)


def test_lenet5_computes_what_it_says():
    """The same layers written as functions, on the parameters of the network."""
    model = build("lenet5", channels=3, side=32).eval()
    state = model.state_dict()
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    x = images
    for number in ("1", "2"):
        x = nn.functional.conv2d(x, state[f"conv{number}.weight"], state[f"conv{number}.bias"])
        x = x / (1 + 1e-5) ** 0.5
        x = nn.functional.max_pool2d(x.relu(), 2)
    x = x.flatten(1)
    for name in ("fc1", "fc2"):
        x = (x @ state[f"{name}.weight"].T + state[f"{name}.bias"]).relu()
    x = x @ state["classifier.weight"].T + state["classifier.bias"]
    torch.testing.assert_close(model(images), x)


def test_numbers_of_parameters_are_those_of_the_papers():
    """McMahan et al., 2017: the 2NN has 199,210 parameters, the CNN 1,663,370, both on MNIST."""
    assert num_parameters(build("mlp")) == 199_210
    assert num_parameters(build("cnn")) == 1_663_370
    # torchvision's 11,689,512 for 3 channels and 1000 classes, less two channels of conv1 and 990 rows of fc.
    assert num_parameters(build("resnet18", side=32)) == 11_689_512 - 2 * 64 * 49 - 990 * 513


@pytest.mark.parametrize(("name", "expected"), [("mlp", False), ("cnn", False), ("lenet5", True), ("resnet18", True)])
def test_has_batch_norm(name, expected):
    assert has_batch_norm(build(name, side=32)) is expected


def test_has_batch_norm_goes_by_type():
    model = nn.Sequential(nn.Sequential(nn.SyncBatchNorm(3)))
    assert has_batch_norm(model)
    assert not has_batch_norm(nn.Sequential(nn.GroupNorm(1, 3), nn.LayerNorm(3)))


@pytest.mark.parametrize(
    ("name", "native", "requested", "chosen"),
    [
        ("lenet5", 8, None, 28),
        ("lenet5", 28, None, 28),
        ("lenet5", 20, None, 20),
        ("lenet5", 28, 64, 64),
        ("cnn", 8, None, 28),
        ("cnn", 16, None, 16),
        ("mlp", 8, None, 8),
        ("mlp", 8, 3, 3),
        ("resnet18", 8, None, 32),
        ("resnet18", 28, None, 28),
        ("resnet18", 224, None, 224),
    ],
)
def test_choose_size(name, native, requested, chosen):
    assert choose_size(ModelSettings(name=name), native, requested) == chosen


def test_choose_size_refuses():
    with pytest.raises(ConfigError, match=r"data\.image_size: 12 pixels, but lenet5 takes 20 and more"):
        choose_size(ModelSettings(name="lenet5"), 28, 12)


def test_unknown_name():
    spec = InputSpec(1, 28, 28, 10)
    with pytest.raises(
        ConfigError, match=r"model\.name: unknown network 'lenet' \(did you mean lenet5\b.*\?\)"
    ) as info:
        build_model(ModelSettings(name="lenet"), spec, np.random.default_rng(0))
    assert all(name in str(info.value) for name in (*MODELS, "timm:<name"))
    with pytest.raises(ConfigError, match="unknown network 'vit'"):
        choose_size(ModelSettings(name="vit"), 28, None)


@pytest.mark.parametrize("name", ["mlp", "cnn", "lenet5"])
def test_small_networks_have_no_pretrained_weights(name):
    with pytest.raises(ConfigError, match=rf"{name} has no pretrained weights; resnet18 and timm:<name> have"):
        build_model(ModelSettings(name=name, pretrained=True), InputSpec(1, 28, 28, 10), np.random.default_rng(0))
