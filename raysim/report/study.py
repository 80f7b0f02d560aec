"""From runs to a study: what was compared (methods), under what (conditions), and how often (seeds).

What varies is found by comparing the stored configurations. Runs that differ in nothing but the seed are replicates.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysim.errors import ConfigError
from raysim.report.collect import Run, below

METHOD_SECTIONS = ("algorithm", "weighting", "fusion")
"""What makes a method unless told otherwise."""
_ABSENT = "none"


@dataclass(frozen=True)
class Study:
    """Runs in a grid.

    Attributes:
        methods: Their names, sorted.
        conditions: Their names, sorted; one empty name if nothing but method and seed varies.
        seeds: All seeds, ascending.
        runs: By condition, method and seed; not every combination need be there.
        method_keys: The keys that were compared.
        condition_keys: The other keys that vary.
        common: Settings that are the same in all runs.
        warnings: What makes the comparison weaker than it looks, one sentence each.
    """

    methods: tuple[str, ...]
    conditions: tuple[str, ...]
    seeds: tuple[int, ...]
    runs: Mapping[tuple[str, str, int], Run]
    method_keys: tuple[str, ...]
    condition_keys: tuple[str, ...]
    common: Mapping[str, Any]
    warnings: tuple[str, ...]

    def of(self, condition: str, method: str) -> list[Run]:
        """The replicates of a setting, by seed."""
        found = (self.runs.get((condition, method, seed)) for seed in self.seeds)
        return [run for run in found if run is not None]


def study_of(runs: Sequence[Run], method_keys: Sequence[str] = ()) -> Study:
    """Sort runs into methods, conditions and seeds.

    Args:
        runs: Finished runs, no two of the same settings and seed.
        method_keys: Dotted keys or sections that make a method; none: algorithm, weighting and fusion.

    Raises:
        ConfigError: A given key does not vary.
    """
    varying, vague = _varying(runs)
    keys = tuple(method_keys) or METHOD_SECTIONS
    idle = [key for key in method_keys if not any(below(name, [key]) for name in varying)]
    if idle:
        known = sorted({section for name in varying for section in (name, name.split(".")[0])})
        what = f"what varies is {', '.join(known)}" if known else "nothing but the seed varies"
        raise ConfigError([f"--methods: {key} is the same in all {len(runs)} runs; {what}" for key in idle])
    of_method = [name for name in varying if below(name, keys)]
    of_condition = [name for name in varying if not below(name, keys)]
    settings = [_known(run) for run in runs]
    names = _method_names(settings, of_method, keys)
    places = _condition_names(settings, of_condition)
    grid: dict[tuple[str, str, int], Run] = {}
    for place, name, run in zip(places, names, runs, strict=True):
        other = grid.setdefault((place, name, run.seed), run)
        if other is not run:
            raise ConfigError(
                f"{other.folder} and {run.folder}: the same setting and seed, as far as their configurations say; leave one out"
            )
    study = Study(
        methods=tuple(sorted(set(names), key=_natural)),
        conditions=tuple(sorted(set(places), key=_natural)),
        seeds=tuple(sorted({run.seed for run in runs})),
        runs=dict(sorted(grid.items())),
        method_keys=keys,
        condition_keys=tuple(of_condition),
        common={name: value for name, value in settings[0].items() if name not in varying},
        warnings=(),
    )
    return Study(**{**vars(study), "warnings": (*vague, *_warnings(study))})


def _known(run: Run) -> dict[str, Any]:
    """The settings without those that are null: a key that says nothing and one that is absent are the same."""
    return {name: value for name, value in run.settings.items() if value is not None}


def _varying(runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    """Keys that vary, and warnings about those that only some runs state."""
    settings = [_known(run) for run in runs]
    varying: list[str] = []
    vague: list[str] = []
    # The kind of a section first: its settings are compared among those of one kind.
    for name in sorted({name for one in settings for name in one}, key=lambda name: (not name.endswith(".name"), name)):
        values = {_text(one[name]) for one in settings if name in one}
        if len(values) > 1:
            varying.append(name)
        elif count := sum(not _states(run, name, varying) for run in runs):
            vague.append(
                f"{_count(count, 'run')} of another version of raysim did not store {name}; taken to be {values.pop()}, as "
                "in the other runs."
            )
        elif any(name not in one for one in settings):
            varying.append(name)
    return sorted(varying), vague


def _states(run: Run, name: str, varying: Sequence[str]) -> bool:
    """Whether a run says something about a key: its value, that a section around it is empty, or that it is of another kind."""
    around = [name[:end] for end in (i for i, letter in enumerate(f"{name}.") if letter == ".")]
    return any(part in run.settings or f"{part}.name" in varying for part in around)


def _method_names(settings: Sequence[Mapping[str, Any]], varying: Sequence[str], keys: Sequence[str]) -> list[str]:
    """One name per run: of each section its `name`, and of what else differs among those of the same name."""
    if not varying:
        shown = [key for key in keys if any(f"{key}.name" in one for one in settings)]
        return [
            " + ".join(str(one[f"{key}.name"]) for key in shown if f"{key}.name" in one) or "all" for one in settings
        ]
    parts: list[list[str]] = [[] for _ in settings]
    for section in keys:
        inside = [name for name in varying if below(name, [section])]
        if not inside:
            continue
        title = f"{section}.name"
        for index, one in enumerate(settings):
            peers = [other for other in settings if other.get(title) == one.get(title)]
            differing = [
                name
                for name in inside
                if name != title and len({_text(other.get(name, _ABSENT)) for other in peers}) > 1 and name in one
            ]
            head = [str(one[title])] if title in one else []
            details = [f"{_short(name, section)}={_text(one[name])}" for name in differing]
            if head and details:
                parts[index].append(f"{head[0]} ({', '.join(details)})")
            else:
                parts[index].extend(head or details)
    names = [" + ".join(part) or "default" for part in parts]
    # Settings that only one of two has, or nested names, may leave two methods with one name: then everything is said.
    identity = [tuple(_text(one.get(name, _ABSENT)) for name in varying) for one in settings]
    owners: dict[str, set[tuple[str, ...]]] = {}
    for name, who in zip(names, identity, strict=True):
        owners.setdefault(name, set()).add(who)
    return [
        name if len(owners[name]) == 1 else ", ".join(f"{k}={v}" for k, v in zip(varying, who, strict=True))
        for name, who in zip(names, identity, strict=True)
    ]


def _condition_names(settings: Sequence[Mapping[str, Any]], varying: Sequence[str]) -> list[str]:
    last = Counter(name.rpartition(".")[2] for name in varying)
    titles = {name: (name if last[name.rpartition(".")[2]] > 1 else name.rpartition(".")[2]) for name in varying}
    titles |= {name: name for name in varying if name.endswith(".name")}
    return [", ".join(f"{titles[name]}={_text(one.get(name, _ABSENT))}" for name in varying) for one in settings]


def _warnings(study: Study) -> list[str]:
    found = []
    full = len(study.methods) * len(study.conditions) * len(study.seeds)
    if len(study.runs) < full:
        found.append(
            f"The grid has holes: {len(study.runs)} runs for {full} combinations of method, condition and seed. A "
            "comparison of two methods uses the pairs that both have."
        )
    runs = list(study.runs.values())
    lengths = sorted({run.rounds for run in runs})
    if len(lengths) > 1:
        found.append(
            f"Runs have different lengths ({', '.join(map(str, lengths))} rounds); `rounds` is a condition, so that runs of "
            "different length are not compared with each other."
        )
    late = sum(run.curve.round_num[-1] > _last_tested(run) for run in runs)
    if late:
        found.append(f"{_count(late, 'run')} did not test the last round; the last tested round stands for it.")
    for what, name in (("data_hash", "data"), ("partition_hash", "partition")):
        mixed, unknown = _mixed(study, what)
        if mixed:
            found.append(
                f"Not the same {name} in all runs that are compared as a pair ({'; '.join(mixed[:3])}"
                f"{', ...' if len(mixed) > 3 else ''}): hashes differ, so a difference may be one of {name}."
            )
        if unknown:
            found.append(f"{_count(unknown, 'run')} did not record a hash of the {name}: it cannot be checked.")
    if len(study.seeds) == 1:
        found.append("There is one seed only: nothing here says how much a result depends on it.")
    return found


def _last_tested(run: Run) -> int:
    return int(run.curve.round_num[run.curve.accuracy == run.curve.accuracy][-1])


def _mixed(study: Study, what: str) -> tuple[list[str], int]:
    """Conditions and seeds whose runs differ in a hash, and how many runs have none."""
    groups: dict[str, set[str]] = {}
    unknown = 0
    for (condition, _, seed), run in study.runs.items():
        value = getattr(run, what)
        unknown += value is None
        if value is not None:
            groups.setdefault(f"{condition + ', ' if condition else ''}seed {seed}", set()).add(value)
    return [name for name, values in groups.items() if len(values) > 1], unknown


def _short(name: str, section: str) -> str:
    """A key for people: without its section, or its last part if it is the section."""
    return name.removeprefix(f"{section}.") if name != section else name.rpartition(".")[2]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _natural(text: str) -> tuple[tuple[bool, float, str], ...]:
    """Sorts 2 before 10, and 0.05 before 0.1."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)", text)
    return tuple((False, float(part), "") if index % 2 else (True, 0.0, part) for index, part in enumerate(parts))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
