"""What every configuration section shares: the strict base class and the constrained types of its fields.

The constraints are plain `annotated_types`, so that defining a section loads neither pydantic nor anything heavy;
`config.py` hands the sections to pydantic, which reads `__pydantic_config__` and lists every violated constraint at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le, Lt

Count = Annotated[int, Ge(1)]
"""A whole number, at least 1."""
NonNegativeInt = Annotated[int, Ge(0)]
"""A whole number, at least 0."""
Positive = Annotated[float, Gt(0)]
"""A finite number above 0."""
NonNegative = Annotated[float, Ge(0)]
"""A finite number, at least 0."""
Fraction = Annotated[float, Gt(0), Le(1)]
"""A share in (0, 1]."""
ProperFraction = Annotated[float, Gt(0), Lt(1)]
"""A share strictly between 0 and 1."""
BelowOne = Annotated[float, Ge(0), Lt(1)]
"""A number in [0, 1): a momentum, the decay of a moving average, a share that leaves something over."""


@dataclass(frozen=True)
class Section:
    """Base of all configuration sections: unknown keys, text for numbers, NaN and infinity are refused."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted key paths and their values, in order; lists and empty sections are values.

    Example:
        >>> flatten({"seed": 1, "client": {"optimizer": {"lr": 0.5}}})
        {'seed': 1, 'client.optimizer.lr': 0.5}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
