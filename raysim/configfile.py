"""Reading configuration files: YAML 1.2 with the line of every key, and `key.path=value` overrides.

`1e-3` is a number, `010` is ten, `no` is text, and a key given twice is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError
from ruamel.yaml.scalarbool import ScalarBoolean

from raysim.errors import ConfigError

KeyPath = tuple[str, ...]

_UNREADABLE = (YAMLError, ValueError)
"""What the parser raises; values that look like a date or a number and are none give plain ValueErrors."""


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """The file's values as plain Python, and where each key path stands (`file:line`).

    Raises:
        ConfigError: It cannot be read, is not YAML, or is no mapping; with the line where known.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from None
    try:
        tree = YAML(typ="rt", pure=True).load(text)
    except _UNREADABLE as error:
        mark = getattr(error, "problem_mark", None)
        place = str(path) if mark is None else f"{path}:{mark.line + 1}"
        hint = " (YAML indents with spaces, not tabs)" if "\t" in text else ""
        raise ConfigError(f"{place}: not YAML: {_why(error)}{hint}") from None
    if not isinstance(tree, CommentedMap):
        what = "empty" if tree is None else "a list" if isinstance(tree, CommentedSeq) else "a single value"
        raise ConfigError(f"{path}: a configuration is a mapping of sections (data, client, ...), this file is {what}")
    places: dict[KeyPath, str] = {}
    _collect_places(tree, (), path, places)
    return _plain(tree), places


def apply_overrides(values: dict[str, Any], places: dict[KeyPath, str], overrides: Sequence[str]) -> None:
    """Put `key.path=value` settings over the file's values, in place; another method's name drops the settings of the old one.

    Raises:
        ConfigError: All overrides that cannot be read or do not fit.
    """
    problems = []
    for text in overrides:
        key, equals, value = text.partition("=")
        keys = tuple(key.split("."))
        if not equals or not all(keys):
            problems.append(f"command line: {text!r} is not key.path=value")
            continue
        try:
            parsed = _plain(YAML(typ="rt", pure=True).load(value)) if value.strip() else None
        except _UNREADABLE as error:
            problems.append(f"command line: {key}: {value!r} is not a YAML value: {_why(error)}")
            continue
        if problem := put(values, places, keys, parsed, "command line"):
            problems.append(f"command line: {key}: {problem}")
    if problems:
        raise ConfigError(problems)


def put(values: dict[str, Any], places: dict[KeyPath, str], keys: KeyPath, value: Any, place: str) -> str | None:
    """Set one key path, in place; what is wrong with it, if anything."""
    section: Any = values
    for depth, part in enumerate(keys[:-1], 1):
        if section.get(part) is None:
            section[part] = {}
            places[keys[:depth]] = place
        section = section[part]
        if not isinstance(section, dict):
            return f"{part} is not a section"
    # Another method's settings make no sense beside a new name, nor do those the new one does not know.
    if keys in (("algorithm", "name"), ("weighting", "name")) and section.get("name") != value:
        section.clear()
    section[keys[-1]] = value
    for below in [path for path in places if path[: len(keys)] == keys]:
        del places[below]
    places[keys] = place
    return None


def _plain(node: Any) -> Any:
    """Ruamel's tree as plain Python values."""
    if isinstance(node, CommentedMap):
        return {str(key): _plain(value) for key, value in node.items()}
    if isinstance(node, CommentedSeq):
        return [_plain(value) for value in node]
    if isinstance(node, ScalarBoolean):  # One with an anchor, which is an int.
        return bool(node)
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node if node is None else str(node)


def _collect_places(tree: CommentedMap, path: KeyPath, file: Path, places: dict[KeyPath, str]) -> None:
    for key, value in tree.items():
        here = (*path, str(key))
        if key in (tree.lc.data or {}):  # Not those merged in by `<<`, which have no line of their own.
            places[here] = f"{file}:{tree.lc.key(key)[0] + 1}"
        if isinstance(value, CommentedMap):
            _collect_places(value, here, file, places)


def _why(error: Exception) -> str:
    """What the parser has against a text, in one line."""
    text = (getattr(error, "problem", None) or str(error)).strip().splitlines()[0].strip()
    if isinstance(error, DuplicateKeyError):
        return f"{text} (a key may be given once)"
    return text if isinstance(error, YAMLError) else f"{text}; text that looks like a date or a number needs quotes"
