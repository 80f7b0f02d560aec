"""What the benchmark found: rows for people, raw repeats for files, and what follows from them. Plain arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysim.bench import PARTS
from raysim.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = 1
"""Version of the JSON file's shape."""


@dataclass(frozen=True)
class Row:
    """One number of the table.

    Attributes:
        what: What was measured.
        value: The median of its repeats; None if this version cannot tell.
        unit: Its unit.
        least: The smallest repeat.
        most: The largest repeat.
        detail: What it was measured with.
    """

    what: str
    value: float | None
    unit: str
    least: float | None = None
    most: float | None = None
    detail: str = ""

    @classmethod
    def of(cls, what: str, values: Sequence[float], unit: str, detail: str = "") -> Row:
        """The row of one or more repeats."""
        return cls(what, statistics.median(values), unit, min(values), max(values), detail)


@dataclass(frozen=True)
class Finding:
    """What one part found.

    Attributes:
        part: Its name in `PARTS`.
        rows: For the table; none if the part was skipped.
        raw: Every repeat, for the file.
        notes: What has to be known to read the rows: why something was skipped, what a number stands for.
    """

    part: str
    rows: Sequence[Row] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()


@dataclass(frozen=True, order=True)
class Split:
    """Seconds that a round is predicted to take with so many actors of each kind."""

    seconds: float
    clients: int
    scorers: int


def splits(train_s: float, score_s: float, actors: int, cohort: int, cores: float | None) -> list[Split]:
    """All ways to divide actors between clients and scorers, the fastest first.

    Both pools work at the same time, so a round takes as long as the one with more to do: max(T / c, S / s). Actors that
    share cores are not faster than these: (T + S) / cores. More actors than the cohort has clients do not help. Among equals,
    the split with the evener load comes first.

    Args:
        train_s: T, seconds that the cohort's training takes on one actor with a core (or its share of a GPU) of its own.
        score_s: S, the same of its scoring; 0 without scoring, which leaves one scorer for testing the global model.
        actors: c + s, at least 2.
        cohort: Clients per round.
        cores: Of the cluster; None where actors compute on GPUs.
    """
    floor = (train_s + score_s) / cores if cores else 0.0
    found = []
    for clients in range(1, actors) if score_s else [actors - 1]:
        scorers = actors - clients
        slower = max(train_s / min(clients, cohort), score_s / min(scorers, cohort))
        found.append((max(slower, floor), slower, Split(max(slower, floor), clients, scorers)))
    return [split for *_, split in sorted(found)]


def config_lines(split: Split, gpu_share: str | None = None) -> list[str]:
    """A split as a section to paste into a configuration, and as overrides of a command."""
    keys = {"client_actors": str(split.clients), "scorer_actors": str(split.scorers)}
    overrides = [f"execution.{key}={value}" for key, value in keys.items()]
    if gpu_share is not None:
        keys |= dict.fromkeys(("client", "scorer"), f"{{num_gpus: {gpu_share}}}")
        overrides += [f"execution.{role}.num_gpus={gpu_share}" for role in ("client", "scorer")]
    inner = ", ".join(f"{key}: {value}" for key, value in keys.items())
    return [f"execution: {{{inner}}}", " ".join(overrides)]


def sort_words(words: Sequence[str], only: Sequence[str]) -> tuple[Path | None, list[str], list[str]]:
    """The configuration file, the overrides and the parts among a command's words.

    A shell's `--only a b` reaches the program as an option `a` and a word `b`: names of parts are parts once there is an
    `--only`.

    Raises:
        ConfigError: A part that does not exist, or a second file.
    """
    parts = [name for text in only for name in text.split(",") if name]
    overrides = [word for word in words if "=" in word]
    files = []
    for word in words:
        if only and word in PARTS:
            parts.append(word)
        elif "=" not in word:
            files.append(word)
    problems = [f"--only: {name} is no part; parts are {', '.join(PARTS)}" for name in parts if name not in PARTS]
    if len(files) > 1:
        problems.append(f"{files[1]} is neither KEY=VALUE nor, after --only, one of {', '.join(PARTS)}")
    if problems:
        raise ConfigError(problems)
    chosen = [name for name in PARTS if name in parts] or list(PARTS)
    return Path(files[0]) if files else None, overrides, chosen


def table_of(findings: Sequence[Finding], title: str) -> Table:
    """Everything that was found, for a terminal."""
    from rich.table import Table

    table = Table(title=title)
    for heading in ("part", "what", "median", "least to most", "with"):
        table.add_column(heading, justify="right" if heading in ("median", "least to most") else "left")
    for finding in findings:
        for i, row in enumerate(finding.rows):
            spread = "" if row.least is None else f"{shown(row.least)} to {shown(row.most)}"
            table.add_row(
                finding.part if i == 0 else "", row.what, f"{shown(row.value)} {row.unit}", spread, row.detail
            )
        if not finding.rows:
            table.add_row(finding.part, "skipped, see below")
        table.add_section()
    return table


def shown(number: float | None) -> str:
    """Three digits that count, without an exponent."""
    if number is None:
        return "-"
    size = abs(number)
    return f"{number:,.0f}" if size >= 100 else f"{number:.1f}" if size >= 10 else f"{number:.3g}"


def document(manifest: Mapping[str, Any], findings: Sequence[Finding]) -> dict[str, Any]:
    """The JSON file: the manifest with machine, versions, date and configuration, then the parts."""
    parts = {finding.part: {"rows": finding.rows, "notes": finding.notes, "raw": finding.raw} for finding in findings}
    return {"schema": SCHEMA, **manifest, "parts": parts}
