"""A sweep, fully stated: from a YAML file to its points, each a checked `RunConfig` with a stable id.

A point's id is a hash of what can change its numbers and differs from its default, so it stays when the file is rearranged,
when points are added, when results or data move, and when raysim gets new settings.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen
from pydantic import AfterValidator

from raysim.config import RunConfig, folder_name, resolve, validated
from raysim.configfile import KeyPath, apply_overrides, put, read_yaml
from raysim.errors import ConfigError
from raysim.execution.settings import NUMERIC
from raysim.fields import Count, NonNegativeInt, Section, flatten
from raysim.recording.hparams import path_problems

SLUG_LENGTH = 60
"""Most characters of a point's readable name before its id."""


@dataclass(frozen=True)
class SweepOutput(Section):
    """Where the results go.

    Attributes:
        dir: Folder that holds the sweep's folder; null: `output.dir` of the base.
    """

    dir: Path | None = None


@dataclass(frozen=True)
class SweepConfig(Section):
    """A sweep file.

    Attributes:
        name: Name of the sweep and of its folder.
        base: Configuration of a run, a path relative to the sweep file; null: all defaults.
        run: Settings of every point, put over the base: a configuration itself, or key paths.
        grid: Key paths and the values of each; every combination is a point.
        list: Sets of settings, by key paths; each is crossed with the grid.
        seeds: Of every point: a number n for 0 to n - 1, or the seeds themselves; null: the base's.
        max_concurrent: Points that run at the same time, each on an equal part of the cluster.
        output: Results.
    """

    name: Annotated[str, AfterValidator(folder_name)] = "sweep"
    base: str | None = None
    run: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, Annotated[Sequence[Any], MinLen(1)]] = field(default_factory=dict)
    list: Annotated[Sequence[Mapping[str, Any]], MinLen(1)] | None = None
    seeds: Count | Annotated[Sequence[NonNegativeInt], MinLen(1)] | None = None
    max_concurrent: Count = 1
    output: SweepOutput = field(default_factory=SweepOutput)

    def varied(self) -> dict[str, str]:
        """Key paths that the points set, each with the key of the sweep file that says so."""
        keys = {key: f"grid.{key}" for key in self.grid} | {key: "list" for entry in self.list or () for key in entry}
        return keys | ({"seed": "seeds"} if self.seeds is not None else {})

    def combinations(self) -> Iterator[dict[str, Any]]:
        """The settings of every point, in order: list entries, then the grid, its last key changing fastest, then seeds."""
        seeds = range(self.seeds) if isinstance(self.seeds, int) else self.seeds or (None,)
        for entry in self.list or ({},):
            for values in itertools.product(*self.grid.values()):
                settings = {**entry, **dict(zip(self.grid, values, strict=True))}
                for seed in seeds:
                    yield settings if seed is None else {**settings, "seed": seed}


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
        id: Eight hexadecimal digits, see `point_id`.
        settings: What the sweep sets, by key paths.
        config: The run; its name is that of the point.
    """

    id: str
    settings: Mapping[str, Any]
    config: RunConfig

    @property
    def name(self) -> str:
        """Readable values and the id: the name of the run and its folder, safe in shells and URLs."""
        return self.config.name


@dataclass(frozen=True)
class Sweep:
    """A checked sweep.

    Attributes:
        name: Its name.
        folder: Where everything of it lies.
        points: Its runs.
        max_concurrent: Points that run at the same time.
    """

    name: str
    folder: Path
    points: tuple[Point, ...]
    max_concurrent: int


def load_sweep(path: Path | str, overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep file and check all its points.

    Args:
        path: YAML file. Without a `name` in it, the sweep is named like the file.
        overrides: `key.path=value` settings that replace those of the base; `name` is the sweep's.

    Raises:
        ConfigError: All problems, each with its place and the points that have it.
    """
    path = Path(path)
    values, places = read_yaml(path)
    values.setdefault("name", path.stem)
    sweep = validated(SweepConfig, values, places=places, source=str(path))
    base, base_places, source = _base(sweep, path, places)
    apply_overrides(base, base_places, overrides)
    _check_keys(sweep, places, base_places, str(path))

    if base_places.get(("name",)) == "command line":
        named = validated(SweepConfig, {"name": base["name"]}, places=base_places, source="command line")
        sweep = dataclasses.replace(sweep, name=named.name)
    base["name"] = "point"
    if sweep.output.dir is not None and base_places.get(("output", "dir")) != "command line":
        put(base, base_places, ("output", "dir"), str(sweep.output.dir), places.get(("output", "dir"), str(path)))
    points = _points(sweep, base, base_places, places, source)
    return Sweep(sweep.name, points[0].config.output.dir, points, sweep.max_concurrent)


def point_id(config: RunConfig) -> str:
    """Eight hexadecimal digits of a hash of what can change a number of the run.

    All settings that are not their default count, without `name`, `output`, `execution` (but its `threads` and
    `clients_per_call`), and `data.root`: a named data set is the same wherever it lies. `data.path` and `partition.path` count
    as text: nothing else names what is in those files.
    """
    return _digest(_departures(_numerics(config)))[:8]


def same_numerics(one: RunConfig, other: RunConfig) -> bool:
    """Whether two runs would give the same numbers, defaults included."""
    first, second = _numerics(one), _numerics(other)
    return first == second


def _numerics(config: RunConfig) -> RunConfig:
    """The configuration with everything that changes no number at its default."""
    plain = RunConfig()
    names = [key.removeprefix("execution.") for key in NUMERIC]
    kept = {name: getattr(config.execution, name) for name in names}
    return dataclasses.replace(
        config,
        name=plain.name,
        output=plain.output,
        execution=dataclasses.replace(plain.execution, **kept),
        data=dataclasses.replace(config.data, root=plain.data.root),
    )


def _departures(section: Any) -> dict[str, Any]:
    """What differs from the defaults of a section's type; the `name` that picks a type always counts."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
        if dataclasses.is_dataclass(value):
            inner = _departures(value)
            if inner or type(default) is not type(value):
                found[item.name] = inner
        elif item.name == "name" or value != default:
            found[item.name] = value
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()


def _base(
    sweep: SweepConfig, path: Path, places: Mapping[KeyPath, str]
) -> tuple[dict[str, Any], dict[KeyPath, str], str]:
    """The values every point starts from, where they stand, and what they are called where no place is known."""
    values: dict[str, Any] = {}
    inner: dict[KeyPath, str] = {}
    source = str(path)
    if sweep.base is not None:
        file = path.parent / Path(sweep.base).expanduser()
        try:
            values, inner = read_yaml(file)
        except ConfigError as error:
            place = places.get(("base",), source)
            raise ConfigError([f"{place}: base: {problem}" for problem in error.problems]) from None
        source = str(file)
    problems = []
    for keys, value in sorted(_leaves(sweep.run), key=lambda leaf: leaf[0][-1] != "name"):
        place = next(
            (places[("run", *keys[:n])] for n in range(len(keys), -1, -1) if ("run", *keys[:n]) in places), source
        )
        path_ = tuple(part for key in keys for part in key.split("."))
        if problem := put(values, inner, path_, value, place):
            problems.append(f"{place}: {'.'.join(path_)}: {problem}")
    if problems:
        raise ConfigError(problems)
    return values, inner, source


def _leaves(section: Mapping[str, Any], above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _check_keys(
    sweep: SweepConfig, places: Mapping[KeyPath, str], base_places: Mapping[KeyPath, str], source: str
) -> None:
    """Refuse settings that would be lost: set twice, given by the command line too, or not the points' to choose."""
    problems = []

    def place(key: str) -> str:
        return places.get(tuple(key.split(".", 1)), places.get((key.partition(".")[0],), source))

    varied = sweep.varied()
    said_twice = [key for key in sweep.grid if any(key in entry for entry in sweep.list or ())]
    problems += [
        f"{place(f'grid.{key}')}: {key} is set by grid and by list; leave it in one of them" for key in said_twice
    ]
    if sweep.seeds is not None:
        also = [key for key in ("grid", "list") if "seed" in (sweep.grid if key == "grid" else _listed(sweep))]
        problems += [f"{place(key)}: seed is set by {key} and by seeds; leave it in one of them" for key in also]
    for key, origin in varied.items():
        keys = tuple(key.split("."))
        if not all(keys):
            problems.append(f"{place(origin)}: {key!r} is not a key path like partition.alpha")
        if keys[0] in ("name", "output"):
            problems.append(f"{place(origin)}: {key}: points get names and folders of their own; leave it out")
        together = [{*entry, *sweep.grid} for entry in sweep.list or ({},)]
        problems += [
            f"{place(varied[other])}: {other} is a part of {key}, which {origin} sets; spell the parts out"
            for other in varied
            if other.startswith(f"{key}.") and any({key, other} <= point for point in together)
        ]
        for given, where in base_places.items():
            if where == "command line" and (given[: len(keys)] == keys or keys[: len(given)] == given):
                problems.append(f"command line: {'.'.join(given)}: the sweep sets {key} itself ({origin})")
    if sweep.seeds is not None and not isinstance(sweep.seeds, int) and len(set(sweep.seeds)) < len(sweep.seeds):
        problems.append(f"{place('seeds')}: seeds: each may be given once, got {list(sweep.seeds)}")
    if problems:
        raise ConfigError(problems)


def _listed(sweep: SweepConfig) -> set[str]:
    return {key for entry in sweep.list or () for key in entry}


def _points(
    sweep: SweepConfig,
    base: Mapping[str, Any],
    base_places: Mapping[KeyPath, str],
    places: Mapping[KeyPath, str],
    source: str,
) -> tuple[Point, ...]:
    varied = sweep.varied()
    points: list[Point] = []
    problems: dict[str, list[str]] = {}
    for settings in sweep.combinations():
        values, where = copy.deepcopy(dict(base)), dict(base_places)
        # Names first: a method's new name drops the settings of the old one.
        for key in sorted(settings, key=lambda key: not key.endswith(".name")):
            origin = varied[key]
            place = places.get(tuple(origin.split(".", 1)), places.get((origin,), source))
            problem = put(values, where, tuple(key.split(".")), copy.deepcopy(settings[key]), place)
            if problem:
                problems.setdefault(f"{place}: {key}: {problem}", []).append(slug(settings))
        try:
            config = resolve(values, places=where, source=source)
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).append(slug(settings))
            continue
        digest = point_id(config)
        output = dataclasses.replace(config.output, dir=config.output.dir / sweep.name)
        config = dataclasses.replace(config, name="-".join(filter(None, [slug(settings), digest])), output=output)
        points.append(Point(digest, settings, config))
    count = len(points) + len({point for names in problems.values() for point in names})
    found = [f"{problem} ({_of(names, count)})" for problem, names in problems.items()]
    by_id: dict[str, Point] = {}
    for point in points:
        first = by_id.setdefault(point.id, point)
        if first is not point:
            found.append(
                f"points {_shown(first.settings)} and {_shown(point.settings)} are the same run (id {point.id}); leave one out"
            )
    if found:
        raise ConfigError(found)
    return _compared(points)


def _compared(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points with the study's keys and all their values in `output.hparams`, by which pages compare its runs."""
    plain = [flatten(point.config.as_dict()) for point in points]
    named = dict.fromkeys(key for point in points for key in flatten(point.settings))
    keys = [key for key in named if not path_problems(RunConfig, [key])]  # A section that is null is none.
    hparams = {key: tuple(dict.fromkeys(_shown_value(values.get(key)) for values in plain)) for key in keys}
    return tuple(
        dataclasses.replace(
            point,
            config=dataclasses.replace(
                point.config, output=dataclasses.replace(point.config.output, hparams=hparams or None)
            ),
        )
        for point in points
    )


def _shown_value(value: Any) -> bool | int | float | str | None:
    """A list is no value that such pages can show."""
    return value if isinstance(value, bool | int | float | str | None) else json.dumps(value)


def _of(names: Sequence[str], count: int) -> str:
    distinct = list(dict.fromkeys(names))
    if len(distinct) == count and count > 1:
        return f"all {count} points"
    also = f" and {len(distinct) - 1} more" if len(distinct) > 1 else ""
    return f"point {distinct[0] or 'of the base'}{also}"


def _shown(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, ensure_ascii=False, default=str)


def slug(settings: Mapping[str, Any]) -> str:
    """Settings in a few words of letters, digits, `.`, `_` and `-`: values of names, else the last key and the value."""
    parts = []
    for key, value in settings.items():
        last = key.rpartition(".")[2]
        if isinstance(value, Mapping):
            parts.append(slug(value))
        elif last == "name":
            parts.append(_ascii(value))
        else:
            parts.append(f"{_ascii(last)}{_ascii(value)}")
    return "-".join(filter(None, parts))[:SLUG_LENGTH].strip("-.")


def _ascii(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9.]+", "_", plain).strip("_.")
