"""Follows a run from the files in its folder: every file is read once, whatever is half written is read later.

Nothing here talks to the run. What it is doing is concluded from its tables, and how sure that is from the age of its files.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

State = Literal["starting", "running", "no news", "finished", "failed", "interrupted"]
"""How a run stands. The first three are conclusions: only a run that ends says so itself."""
ENDED: tuple[State, ...] = ("finished", "failed", "interrupted")
RECENT = 10
"""Rounds that say how long a round usually takes."""
QUIET_ROUNDS = 5
"""Usual round times without any file having changed after which a run has given no news."""
QUIET_S = 30.0
"""The least such time, in seconds, whatever a round takes."""
STARTING_S = 300.0
"""The same before the first round: hundreds of actors take minutes to start."""
READ_S = 0.5
"""Seconds that one look may spend on reading; the rest is read at the next ones, newest rounds first."""
FAULTY_ROUNDS = 5
"""Latest rounds with faults whose reasons are read."""

_ROUND_FILE = re.compile(r"(\d+)\.parquet")
Row = Mapping[str, Any]


class Follower:
    """What is known of one run.

    Args:
        folder: The run folder; it need not exist yet, and may vanish.
        clients: Also read what became of the newest round's clients.
        now: The clock, seconds since 1970.

    Attributes:
        config: The resolved configuration; empty while there is none.
        plan: The resource plan of the manifest; empty while there is none.
        rounds: Rows of the rounds table that are read, by round.
        clients: Rows of the clients table of the newest round.
        faults: Rows of clients that failed or were excluded, of the latest rounds that have any, newest first.
        result: `result.json`, once the run has ended.
        unreadable: Files that could not be read at the last look.
        log: The last lines of the run's log, as long as no round is done.
        complete: Whether all rounds there are were read.
    """

    def __init__(self, folder: Path, *, clients: bool = True, now: Callable[[], float] = time.time) -> None:
        self.folder, self._with_clients, self._now = folder, clients, now
        self.config: dict[str, Any] = {}
        self.plan: dict[str, Any] = {}
        self.rounds: dict[int, Row] = {}
        self.clients: list[Row] = []
        self.faults: list[Row] = []
        self.result: dict[str, Any] | None = None
        self.unreadable: list[str] = []
        self.log: list[str] = []
        self.complete = False
        self._cohorts: dict[int, list[Row]] = {}
        self._result_time: int | None = None
        self._changed = 0.0
        self._noticed = now()

    @property
    def name(self) -> str:
        """Of the run."""
        return str(self.config.get("name", self.folder.name))

    @property
    def total(self) -> int | None:
        """Rounds that the run is to have; None while that is not known."""
        rounds = self.config.get("rounds")
        return rounds if isinstance(rounds, int) else None

    @property
    def rows(self) -> list[Row]:
        """The rounds that are read, in order."""
        return [self.rounds[number] for number in sorted(self.rounds)]

    @property
    def newest(self) -> Row | None:
        """The latest round."""
        return self.rounds[max(self.rounds)] if self.rounds else None

    @property
    def age(self) -> float:
        """Seconds since one of the run's files changed, by the clocks of the files and of this process, whichever is less."""
        now = self._now()
        return max(0.0, min(now - self._changed, now - self._noticed if self._noticed else now))

    @property
    def usual_s(self) -> float | None:
        """Seconds that a round took lately; None before the first."""
        times = [row["round_s"] for row in self.rows[-RECENT:] if row.get("round_s")]
        return statistics.median(times) if times else None

    @property
    def state(self) -> State:
        """How the run stands."""
        if self.result is not None and self.result.get("status") in ENDED:
            ended: State = self.result["status"]
            return ended
        usual = self.usual_s
        if self.age > (STARTING_S if usual is None else max(QUIET_S, QUIET_ROUNDS * usual)):
            return "no news"
        return "running" if self.rounds else "starting"

    @property
    def eta_s(self) -> float | None:
        """Seconds that the remaining rounds will take; None when that is not known, or nothing to go by."""
        if self.state != "running" or not self.total or not self.rounds or not self.usual_s:
            return None
        return max(0.0, (self.total - max(self.rounds)) * self.usual_s - self.age)

    @property
    def elapsed_s(self) -> float | None:
        """Seconds from the begin of the first round that is read to the end of the newest."""
        rows = self.rows
        return float(rows[-1]["finished"] - rows[0]["started"]) if rows else None

    def curve(self, column: str) -> list[tuple[int, float]]:
        """Round and value of a column of the rounds table, where it has one."""
        return [(number, row[column]) for number, row in sorted(self.rounds.items()) if row.get(column) is not None]

    def look(self, limit_s: float = READ_S) -> bool:
        """Read what is new, for about `limit_s` seconds at most; whether anything changed."""
        deadline = time.monotonic() + limit_s
        before = (len(self.rounds), bool(self.config), self.result, self.complete, max(self.rounds, default=0))
        self.unreadable = []
        if not self.config:
            self.config = self._read("config.yaml", _yaml) or {}
        if not self.plan:
            self.plan = (self._read("manifest.json", _json) or {}).get("plan") or {}
        files = self._round_files()
        for number in self.rounds.keys() - files.keys():  # A run that is resumed begins again after its checkpoint.
            del self.rounds[number]
        for number in sorted(files.keys() - self.rounds.keys(), reverse=True):
            if (rows := self._read(f"rounds/{files[number]}", _table)) is not None and rows:
                self.rounds[number] = rows[0]
            if time.monotonic() > deadline:
                break
        self.complete = len(self.rounds) == len(files)
        if self._with_clients:
            self._look_at_clients(files)
            self.log = [] if self.rounds else (self._read("run.log", _lines) or [])
        self._look_at_result()
        self._look_at_times()
        return before != (len(self.rounds), bool(self.config), self.result, self.complete, max(self.rounds, default=0))

    def _round_files(self) -> dict[int, str]:
        try:
            names = os.listdir(self.folder / "rounds")
        except OSError:
            return {}
        return {int(match[1]): name for name in names if (match := _ROUND_FILE.fullmatch(name))}

    def _look_at_clients(self, files: Mapping[int, str]) -> None:
        """The cohorts of the newest round and of the latest ones with faults."""
        faulty = [n for n, row in sorted(self.rounds.items()) if (row.get("excluded") or 0) + (row.get("failed") or 0)]
        wanted = {*faulty[-FAULTY_ROUNDS:], *([max(self.rounds)] if self.rounds else [])}
        self._cohorts = {number: rows for number, rows in self._cohorts.items() if number in wanted}
        for number in wanted - self._cohorts.keys():
            if (rows := self._read(f"clients/{files[number]}", _table)) is not None:
                self._cohorts[number] = rows
        self.clients = self._cohorts.get(max(self.rounds, default=0), [])
        self.faults = [
            row
            for number in sorted(self._cohorts, reverse=True)
            for row in self._cohorts[number]
            if row.get("status") in ("failed", "excluded")
        ]

    def _look_at_result(self) -> None:
        """The end of the run, unless it has gone on since: a resumed run may leave the old result for a while."""
        try:
            changed = (self.folder / "result.json").stat().st_mtime_ns
        except OSError:
            self.result = self._result_time = None
            return
        if changed != self._result_time and (content := self._read("result.json", _json)) is not None:
            self.result, self._result_time = content, changed
        newest = max(self.rounds, default=0)
        if self.result is not None and newest > int(self.result.get("rounds_done") or 0):
            try:
                later = (self.folder / "rounds" / f"{newest:05d}.parquet").stat().st_mtime_ns > changed
            except OSError:
                later = False
            if later:
                self.result = self._result_time = None

    def _look_at_times(self) -> None:
        changed = self._changed
        for name in ("rounds", "clients", "run.log", "config.yaml", ""):
            try:
                changed = max(changed, (self.folder / name).stat().st_mtime)
            except OSError:
                continue
        if changed != self._changed:
            self._noticed = 0.0 if self._changed == 0.0 else self._now()
            self._changed = changed

    def _read(self, name: str, reader: Callable[[Path], Any]) -> Any:
        """A file's content; None if it is not there, or not whole yet."""
        try:
            return reader(self.folder / name)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, YAMLError, pa.ArrowException) as error:
            self.unreadable.append(f"{name}: {(str(error).splitlines() or [type(error).__name__])[0]}")
            return None


def quantiles(values: Sequence[float], at: Sequence[float]) -> list[float]:
    """Quantiles with linear interpolation; of at least one value."""
    ordered = sorted(values)
    found = []
    for share in at:
        low, rest = divmod(share * (len(ordered) - 1), 1.0)
        high = min(int(low) + 1, len(ordered) - 1)
        found.append(ordered[int(low)] + rest * (ordered[high] - ordered[int(low)]))
    return found


def _table(path: Path) -> list[Row]:
    """The rows of a table, times as seconds since 1970: pyarrow loads pandas to make times of them."""
    table = pq.ParquetFile(path).read(use_threads=False)
    times = [field.name for field in table.schema if pa.types.is_timestamp(field.type)]
    for name in times:
        table = table.set_column(
            table.schema.get_field_index(name), name, table[name].cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        )
    rows: list[Row] = table.to_pylist()
    return [{**row, **{name: row[name] / 1e6 for name in times if row[name] is not None}} for row in rows]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()[-40:]


def _json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("is not a mapping")
    return content


def _yaml(path: Path) -> dict[str, Any]:
    yaml: Any = YAML(typ="safe", pure=True)
    content = yaml.load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("is not a mapping")
    return content
