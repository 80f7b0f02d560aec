"""What a sweep shows while it goes on: a live table on a terminal, else one line per event; and the same for programs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from raysim.recording.manifest import write_json
from raysim.recording.records import RoundRecord
from raysim.sweep.folder import progressed
from raysim.sweep.settings import Point

STYLES = {"finished": "green", "running": "bold", "failed": "red", "interrupted": "yellow", "waiting": "dim"}
SHOWN = 40
"""Most rows of the live table; beyond, those at work and those that failed are shown."""


@dataclass
class Row:
    """A point as it is now.

    Attributes:
        name: Of the point.
        id: Of the point.
        settings: What the sweep sets.
        rounds: Rounds of the run.
        folder: The run folder.
        status: `waiting`, `running`, `finished`, `failed` or `interrupted`.
        skipped: Whether it was finished before this call.
        round_num: Rounds done.
        accuracy: The last one.
        seconds: What the run took.
        reason: Why it failed.
        attempts: How often this call has begun it.
        job: The Ray job that runs or ran it.
    """

    name: str
    id: str
    settings: Mapping[str, Any]
    rounds: int
    folder: str
    status: str = "waiting"
    skipped: bool = False
    round_num: int = 0
    accuracy: float | None = None
    seconds: float | None = None
    reason: str | None = None
    attempts: int = 0
    job: str | None = None
    began: float | None = field(default=None, repr=False)

    def take(self, result: Mapping[str, Any]) -> None:
        """Fill in what `result.json` says."""
        self.round_num, self.seconds = int(result["rounds_done"]), float(result["seconds"])
        final = result.get("final") or {}
        self.accuracy = final.get("accuracy")


class Board:
    """All points of a sweep, shown and written to `state.json` whenever one's status changes.

    Args:
        name: Of the sweep.
        points: Its points.
        console: Where to show them; None: nowhere.
        state_file: For programs; None: none.
    """

    def __init__(
        self, name: str, points: Sequence[Point], console: Console | None, state_file: Path | None = None
    ) -> None:
        self._name, self._console, self._state_file = name, console, state_file
        self.rows: dict[str, Row] = {}
        for point in points:
            row = Row(point.name, point.id, point.settings, point.config.rounds, str(point.config.folder))
            found = progressed(point.config)
            if found.status == "finished" and found.result is not None:
                row.status, row.skipped = "finished", True
                row.take(found.result)
            self.rows[point.name] = row
        self._live: Live | None = None
        if console is not None and console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(
                console=console, get_renderable=lambda: self.table(SHOWN), refresh_per_second=2, transient=True
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start(refresh=True)
        self._write()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
        self._write()

    def begin(self, name: str, job: str | None = None) -> None:
        """A point is begun."""
        row = self.rows[name]
        row.status, row.began, row.job, row.reason, row.round_num = "running", time.monotonic(), job, None, 0
        row.attempts += 1
        again = f" (attempt {row.attempts})" if row.attempts > 1 else ""
        self._tell(f"{name}: begun{f' as job {job}' if job else ''}{again}")

    def round_done(self, name: str, round_num: int, accuracy: float | None) -> None:
        """A round of a point is committed."""
        row = self.rows[name]
        if round_num > row.round_num:
            row.round_num = round_num
            row.accuracy = row.accuracy if accuracy is None else accuracy

    def end(self, name: str, status: str, reason: str | None, result: Mapping[str, Any] | None) -> None:
        """A point is finished, failed or interrupted."""
        row = self.rows[name]
        row.status, row.reason = status, reason
        row.seconds = None if row.began is None else time.monotonic() - row.began
        if result is not None:
            row.take(result)
        accuracy = "" if row.accuracy is None else f", accuracy {row.accuracy:.4f}"
        took = "" if row.seconds is None else f" after {row.seconds:.1f} s"
        done = Counter(other.status for other in self.rows.values())["finished"]
        detail = f": {reason}" if reason else accuracy
        self._tell(f"{name}: {status}{took}{detail} [{done}/{len(self.rows)}]")

    def message(self, text: str) -> None:
        """Something that should be seen."""
        if self._console is not None:
            self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    @property
    def unfinished(self) -> list[Row]:
        """The points that are not finished."""
        return [row for row in self.rows.values() if row.status != "finished"]

    def table(self, limit: int | None = None) -> Table:
        """All points, or those that matter most."""
        rows = list(self.rows.values())
        counts = Counter(row.status for row in rows)
        title = f"{self._name}: {len(rows)} points, {', '.join(f'{n} {status}' for status, n in counts.items())}"
        table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False, header_style="bold")
        keys = list(dict.fromkeys(key for row in rows for key in row.settings))
        for key in (*keys, "id", "status"):
            table.add_column(Text(key.removesuffix(".name")), overflow="fold")
        for heading in ("round", "accuracy", "seconds"):
            table.add_column(heading, justify="right")
        if limit is not None and len(rows) > limit:
            rows = [row for row in rows if row.status in ("running", "failed", "interrupted")][:limit]
        for row in rows:
            seconds = time.monotonic() - row.began if row.status == "running" and row.began else row.seconds
            table.add_row(
                *(Text(_brief(row.settings[key])) if key in row.settings else Text("-") for key in keys),
                row.id,
                Text(f"{row.status}{' before' if row.skipped else ''}", style=STYLES[row.status]),
                f"{row.round_num}/{row.rounds}",
                "-" if row.accuracy is None else f"{row.accuracy:.4f}",
                "-" if seconds is None else f"{seconds:.1f}",
            )
        return table

    def _tell(self, line: str) -> None:
        if self._live is None or ": failed" in line:
            self.message(line)
        self._write()

    def _write(self) -> None:
        if self._state_file is None:
            return
        points = {
            name: {k: v for k, v in asdict(row).items() if k not in ("name", "began")}
            for name, row in self.rows.items()
        }
        write_json(self._state_file, {"sweep": self._name, "updated": datetime.now(UTC), "points": points})


def _brief(value: Any) -> str:
    text = " ".join(f"{key}={item}" for key, item in value.items()) if isinstance(value, Mapping) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


class PointProgress:
    """Tells a function of a point's rounds.

    Args:
        tell: Given the number of a committed round and its accuracy.
    """

    def __init__(self, tell: Callable[[int, float | None], None]) -> None:
        self._tell = tell

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def round_started(self, round_num: int, cohort_size: int, *, scored: bool) -> None:
        """Nothing."""

    def client_trained(self, client_id: int) -> None:
        """Nothing."""

    def client_scored(self, client_id: int) -> None:
        """Nothing."""

    def round_finished(self, record: RoundRecord) -> None:
        """A round is committed."""
        self._tell(record.round_num, record.accuracy)

    def message(self, text: str) -> None:
        """Nothing; it is in the run's log."""
