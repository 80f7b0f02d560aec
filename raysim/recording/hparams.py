"""Which configuration keys tell the runs of a study apart, and the tables that compare runs by them."""

from __future__ import annotations

import dataclasses
import difflib
import json
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

DEFAULT_HPARAMS = (
    "algorithm.name",
    "weighting.name",
    "model.name",
    "data.name",
    "partition.scheme",
    "partition.alpha",
    "partition.clients",
    "client.local_epochs",
    "client.optimizer.lr",
    "seed",
)
"""The keys that are shown when a configuration names none."""

Value = bool | float | str
"""A value of a key, as tables of hyper-parameters take it."""


def path_problems(root: type, paths: Sequence[str]) -> list[str]:
    """What is wrong with key paths: one sentence each that no configuration has, or that is a whole section.

    A key of any algorithm or weighting is fine, whichever the run has: in a study of several it tells them apart.

    Args:
        root: The dataclass of the whole configuration.
        paths: As `client.optimizer.lr`.
    """
    return [problem for path in paths if (problem := _problem(root, path))]


def pick(plain: Mapping[str, Any], paths: Iterable[str] | None) -> dict[str, Value]:
    """The values at the paths, without those that are null or that this run does not have.

    Args:
        plain: The resolved configuration as plain values.
        paths: None: `DEFAULT_HPARAMS`.

    Example:
        >>> pick({"seed": 1, "client": {"optimizer": {"lr": 0.5}}}, ["client.optimizer.lr", "algorithm.mu"])
        {'client.optimizer.lr': 0.5}
    """
    found: dict[str, Value] = {}
    for path in DEFAULT_HPARAMS if paths is None else paths:
        value: Any = plain
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            found[path] = value if isinstance(value, bool | int | float | str) else json.dumps(value)
    return found


def _problem(root: type, path: str) -> str | None:
    sections, keys = [root], path.split(".")
    for depth, key in enumerate(keys):
        known = {field.name for section in sections for field in dataclasses.fields(section)}
        if key not in known:
            close = difflib.get_close_matches(key, sorted(known), n=1)
            hint = f"; did you mean {'.'.join([*keys[:depth], *close])}?" if close else _list(keys[:depth], known)
            return f"unknown key {path}{hint}"
        sections = [kind for section in sections for kind in _sections_below(section, key)]
    known = {field.name for section in sections for field in dataclasses.fields(section)}
    return f"{path} is a section{_list(keys, known)}" if known else None


def _list(keys: Sequence[str], known: set[str]) -> str:
    return f"; the keys of {'.'.join(keys) or 'a configuration'} are {', '.join(sorted(known))}" if known else ""


def _sections_below(section: type, key: str) -> list[type]:
    """Every dataclass that a key of a section may hold; where there is a choice by `name`, all of them."""
    hint = typing.get_type_hints(section).get(key)
    kinds = [
        kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    ]
    return [family for kind in kinds for family in (kind, *_descendants(kind))]


def _descendants(kind: type) -> list[type]:
    children: list[type] = kind.__subclasses__()
    return [below for child in children for below in (child, *_descendants(child))]
