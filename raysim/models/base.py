"""What a model's configuration says, what building it needs to know of the data, and how the registry describes it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raysim.errors import ConfigError
from raysim.fields import Section

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModelSettings(Section):
    """Which network.

    Attributes:
        name: mlp, lenet5, cnn, resnet18 or `timm:<name>`.
        pretrained: Start from the library's pretrained weights (resnet18, timm); never silently replaced by random
            ones.
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


@dataclass(frozen=True)
class Sizes:
    """The image sides, in pixels, that a network takes.

    Attributes:
        smallest: Smallest side.
        largest: Largest side; None: no limit.
        default: Side for images whose own size is not taken.
    """

    smallest: int
    default: int
    largest: int | None = None

    def __contains__(self, side: int) -> bool:
        return self.smallest <= side and (self.largest is None or side <= self.largest)

    def __str__(self) -> str:
        return f"{self.smallest} and more" if self.largest is None else f"{self.smallest} only"


@dataclass(frozen=True)
class Architecture:
    """A network of the registry.

    Attributes:
        build: Builds it with random parameters, drawn from torch's global generator.
        sizes: Image sides that it takes.
        build_pretrained: Builds it with pretrained weights or raises `ConfigError`; None: it has none.
    """

    build: Callable[[InputSpec], nn.Module]
    sizes: Sizes
    build_pretrained: Callable[[InputSpec], nn.Module] | None = None


def did_you_mean(given: str, known: Iterable[str], prefix: str = "") -> str:
    """Up to three known names that resemble the given one, as part of a message; empty if there are none."""
    close = difflib.get_close_matches(given, list(known), n=3)
    return f" (did you mean {' or '.join(prefix + name for name in close)}?)" if close else ""


def weights_error(name: str, cache: str, error: Exception) -> ConfigError:
    """What to say when pretrained weights cannot be had."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return ConfigError(
        f"model.pretrained: the pretrained weights of {name} can neither be loaded from the cache folder {cache} nor "
        f"be downloaded ({reason}); put them there from a machine with network, or set model.pretrained to false"
    )
