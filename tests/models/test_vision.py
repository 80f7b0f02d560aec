import socket

import numpy as np
import pytest
import torch
import torchvision.models

from raysim.errors import ConfigError
from raysim.models import build_model
from raysim.models.base import InputSpec, ModelSettings

PRETRAINED = ModelSettings(name="resnet18", pretrained=True)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache folder, and no network."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))

    def refuse(*args, **kwargs):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tmp_path


def build(channels: int, seed: int = 0) -> torch.nn.Module:
    return build_model(PRETRAINED, InputSpec(channels, 32, 32, 4), np.random.default_rng(seed))


def test_without_network_and_cache(hub):
    with pytest.raises(
        ConfigError, match=r"model\.pretrained: the pretrained weights of resnet18 .*unreachable"
    ) as info:
        build(3)
    assert str(hub / "checkpoints") in str(info.value)
    assert socket.getdefaulttimeout() is None


def test_a_damaged_cache_is_no_reason_for_random_weights(hub):
    name = torchvision.models.ResNet18_Weights.DEFAULT.url.rpartition("/")[2]
    (hub / "checkpoints").mkdir()
    (hub / "checkpoints" / name).write_bytes(b"half a file")
    with pytest.raises(ConfigError, match="pretrained weights of resnet18"):
        build(3)


def test_other_channels(hub):
    with pytest.raises(ConfigError, match="are for 3 channels, the images of the data set have 1"):
        build(1)


def test_weights_from_the_cache(hub):
    stored = torchvision.models.resnet18(weights=None).state_dict()
    name = torchvision.models.ResNet18_Weights.DEFAULT.url.rpartition("/")[2]
    (hub / "checkpoints").mkdir()
    torch.save(stored, hub / "checkpoints" / name)
    first, same, other = (build(3, seed).state_dict() for seed in (0, 0, 1))
    assert first["fc.weight"].shape == (4, 512)
    for key in stored:
        if not key.startswith("fc."):
            assert torch.equal(first[key], stored[key])
    assert torch.equal(first["fc.weight"], same["fc.weight"])
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
