"""Networks: the registry, and how one is chosen and built."""

from __future__ import annotations

import numpy as np
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from raysim.errors import ConfigError
from raysim.models import small, vision
from raysim.models.base import Architecture, InputSpec, ModelSettings, Sizes, did_you_mean
from raysim.models.timm_models import PREFIX, timm_architecture
from raysim.seeding import torch_seeded_from

__all__ = ["MODELS", "build_model", "choose_size", "has_batch_norm"]

MODELS: dict[str, Architecture] = {
    "mlp": Architecture(small.mlp, Sizes(smallest=1, default=28)),
    "lenet5": Architecture(small.lenet5, Sizes(smallest=20, default=28)),
    "cnn": Architecture(small.cnn, Sizes(smallest=16, default=28)),
    "resnet18": Architecture(vision.resnet18, Sizes(smallest=28, default=32), vision.pretrained_resnet18),
}
"""Every network that `model.name` can name, besides those of timm."""


def build_model(settings: ModelSettings, spec: InputSpec, rng: np.random.Generator) -> nn.Module:
    """Build a network on the CPU.

    Args:
        settings: Which one.
        spec: Shape of the images, of a size that `choose_size` gave, and number of classes.
        rng: Its next draw, and nothing else, decides the random parameters; torch's own generators stay as they are.

    Raises:
        ConfigError: Unknown network, an image size that it does not take, or pretrained weights that do not exist,
            cannot be had or do not fit.
    """
    architecture = _architecture(settings.name)
    if spec.height not in architecture.sizes or spec.width not in architecture.sizes:
        raise ConfigError(_wrong_size(settings.name, f"{spec.height} x {spec.width}", architecture.sizes))
    build = architecture.build_pretrained if settings.pretrained else architecture.build
    if build is None:
        having = [name for name, other in MODELS.items() if other.build_pretrained is not None]
        raise ConfigError(
            f"model.pretrained: {settings.name} has no pretrained weights; {', '.join(having)} and {PREFIX}<name> have"
        )
    with torch_seeded_from(rng):
        return build(spec)


def choose_size(settings: ModelSettings, native: int, requested: int | None) -> int:
    """The side in pixels that images are brought to.

    Args:
        settings: The network.
        native: The images' own side.
        requested: `data.image_size`.

    Returns:
        The requested size; if there is none, the images' own if the network takes it, else the network's default.

    Raises:
        ConfigError: Unknown network, or one that does not take the requested size.
    """
    sizes = _architecture(settings.name).sizes
    if requested is None:
        return native if native in sizes else sizes.default
    if requested not in sizes:
        raise ConfigError(_wrong_size(settings.name, str(requested), sizes))
    return requested


def has_batch_norm(module: nn.Module) -> bool:
    """Whether the network holds a BatchNorm layer of any kind."""
    return any(isinstance(part, _BatchNorm) for part in module.modules())


def _architecture(name: str) -> Architecture:
    if name.startswith(PREFIX):
        return timm_architecture(name.removeprefix(PREFIX))
    if name not in MODELS:
        raise ConfigError(
            f"model.name: unknown network '{name}'{did_you_mean(name, MODELS)}; accepted are {', '.join(MODELS)} and "
            f"{PREFIX}<name of a timm model>"
        )
    return MODELS[name]


def _wrong_size(name: str, given: str, sizes: Sizes) -> str:
    return f"data.image_size: {given} pixels, but {name} takes {sizes}; null chooses a size that it takes"
