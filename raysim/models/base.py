"""What a model's configuration says, and what building one needs to know of the data."""

from __future__ import annotations

from dataclasses import dataclass

from raysim.fields import Section


@dataclass(frozen=True)
class ModelSettings(Section):
    """Which network.

    Attributes:
        name: mlp, lenet5, cnn, resnet18 or `timm:<name>`.
        pretrained: Start from the library's pretrained weights (resnet18, timm); never replaced by random ones silently.
    """

    name: str = "lenet5"
    pretrained: bool = False


@dataclass(frozen=True)
class InputSpec:
    """Shape of a model's task: C x H x W images, K classes."""

    channels: int
    height: int
    width: int
    num_classes: int
