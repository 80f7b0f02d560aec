"""Networks of timm, as `timm:<name>`; the name may carry a tag of pretrained weights (`timm:resnet18.a1_in1k`)."""

from __future__ import annotations

from functools import partial

from torch import nn

from raysim.errors import ConfigError
from raysim.models.base import Architecture, InputSpec, Sizes, did_you_mean, weights_error

PREFIX = "timm:"
_SMALLEST_SIDE = 32


def timm_architecture(name: str) -> Architecture:
    """The network that timm calls `name`, and the image sizes that it takes.

    A network of fixed input size (most transformers: their position embeddings depend on it) takes that size only.
    Others take 32 pixels and more, or what timm states as their minimum.

    Raises:
        ConfigError: timm has no such network or tag.
    """
    import timm

    try:
        if not timm.is_model(name):
            raise RuntimeError("no such model")
        config = timm.get_pretrained_cfg(name)
    except RuntimeError as error:
        hint = did_you_mean(name, [*timm.list_models(), *timm.list_pretrained()], PREFIX)
        raise ConfigError(
            f"model.name: timm has no '{name}' ({error}){hint}; timm.list_models() lists the names"
        ) from error
    if config is not None and config.fixed_input_size:
        side = config.input_size[-1]
        sizes = Sizes(smallest=side, largest=side, default=side)
    else:
        stated = (config.min_input_size if config is not None else None) or ()
        least = max(_SMALLEST_SIDE, *stated[1:], 0)
        sizes = Sizes(smallest=least, default=least)
    return Architecture(partial(_build, name), sizes, partial(_build_pretrained, name))


def _build(name: str, spec: InputSpec) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=spec.num_classes, in_chans=spec.channels)
    return model


def _build_pretrained(name: str, spec: InputSpec) -> nn.Module:
    """Timm adapts the first layer to C channels by summing or repeating its weights; the last layer is random."""
    import timm
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        model: nn.Module = timm.create_model(
            name, pretrained=True, num_classes=spec.num_classes, in_chans=spec.channels
        )
    except Exception as error:  # whatever network, disk and the hub's client have to say
        raise weights_error(f"{PREFIX}{name}", HF_HUB_CACHE, error) from error
    return model
