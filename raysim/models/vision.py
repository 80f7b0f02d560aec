"""Networks of torchvision."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from raysim.errors import ConfigError
from raysim.models.base import InputSpec, weights_error

_NETWORK_TIMEOUT_S = 20.0


def resnet18(spec: InputSpec) -> nn.Module:
    """ResNet-18 with random parameters: torchvision's, for C channels and K classes."""
    from torchvision.models import resnet18 as torchvision_resnet18

    model: nn.Module = torchvision_resnet18(weights=None, num_classes=spec.num_classes)
    if spec.channels != 3:
        model.conv1 = nn.Conv2d(spec.channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    return model


def pretrained_resnet18(spec: InputSpec) -> nn.Module:
    """ResNet-18 with torchvision's ImageNet weights and a random last layer for K classes.

    Raises:
        ConfigError: The images do not have 3 channels, or the weights are neither in the cache folder nor to be had
            from the network.
    """
    from torchvision.models import ResNet18_Weights
    from torchvision.models import resnet18 as torchvision_resnet18

    if spec.channels != 3:
        raise ConfigError(
            f"model.pretrained: the weights of resnet18 are for 3 channels, the images of the data set have "
            f"{spec.channels}; set model.pretrained to false"
        )
    try:
        with _limited_network_wait():
            weights = ResNet18_Weights.DEFAULT.get_state_dict(progress=False, check_hash=True)
    except Exception as error:  # whatever network, disk and unpickling have to say
        raise weights_error("resnet18", str(Path(torch.hub.get_dir()) / "checkpoints"), error) from error
    model: nn.Module = torchvision_resnet18(weights=None)
    model.load_state_dict(weights)
    model.fc = nn.Linear(512, spec.num_classes)
    return model


@contextmanager
def _limited_network_wait() -> Iterator[None]:
    """Let no connection of torch.hub, which sets no limit itself, wait without end."""
    previous = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_NETWORK_TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(previous)
