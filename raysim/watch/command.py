"""The loop of `raysim watch`: look at the folders, show them, until the runs have ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from raysim.errors import ConfigError
from raysim.recording.runfolder import find_runs
from raysim.watch.follow import ENDED, Follower
from raysim.watch.view import headline, many, round_line, screen, status_text

STATUS = {"finished": 0, "failed": 3, "interrupted": 130}
"""Exit status by the end of a run; of several runs the first of failed, interrupted, finished that occurs counts."""
PLAIN_HEIGHT = 24
"""Rows of a screen that is printed where there is no terminal."""
SEARCH_S = 5.0
"""Seconds between two searches for new runs below the folder."""


class Watcher:
    """The runs at or below a folder.

    Args:
        folder: A run folder, or one that holds run folders. It need not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[Path, Follower] = {}
        self.arrived = time.monotonic()
        self._searched = -SEARCH_S

    @property
    def one(self) -> Follower | None:
        """The run, if the folder is one; None for a folder of runs, or as long as there is nothing."""
        return self.runs.get(self.folder)

    @property
    def ended(self) -> bool:
        """Whether there are runs and all of them have ended."""
        return bool(self.runs) and all(run.state in ENDED and run.complete for run in self.runs.values())

    @property
    def exit_status(self) -> int:
        """By how the runs ended; 0 for those that have not."""
        states = {run.state for run in self.runs.values()}
        return next((STATUS[state] for state in ("failed", "interrupted") if state in states), 0)

    def look(self, limit_s: float = 1.0) -> bool:
        """Search for runs and read what is new in them; whether anything changed.

        Raises:
            ConfigError: A run folder that was there has vanished.
        """
        changed, deadline = False, time.monotonic() + limit_s
        if self.one is None and time.monotonic() - self._searched >= SEARCH_S:
            for path in find_runs(self.folder):
                if path not in self.runs:
                    self.runs[path] = Follower(path, clients=path == self.folder)
                    self.arrived, changed = time.monotonic(), True
            self._searched = time.monotonic()
        if not self.runs and self.folder.is_dir():
            self._searched = -SEARCH_S  # Nothing costs little to search.
        for path, run in list(self.runs.items()):
            # At least one file of each, however many there are.
            changed |= run.look(max(0.0, deadline - time.monotonic()) if not run.complete else 0.1)
            if not path.is_dir():
                del self.runs[path]
                changed = True
                if path == self.folder:
                    raise ConfigError(
                        f"{path}: the run folder was removed; a run that cannot begin takes its folder back"
                    )
        return changed

    def picture(self, height: int) -> RenderableType:
        """What there is to see, on so many rows."""
        if self.one is not None:
            return screen(self.one, height)
        if not self.runs:
            return f"waiting for a run in {self.folder}"
        return many([(str(path.relative_to(self.folder)), run) for path, run in self._newest_first()], height)

    def _newest_first(self) -> Sequence[tuple[Path, Follower]]:
        """By the begin of their first round that is known; those without one have just begun."""

        def begin(item: tuple[Path, Follower]) -> float:
            run = item[1]
            return float(run.rows[0]["started"]) if run.rounds else time.time() - run.age

        return sorted(self.runs.items(), key=begin, reverse=True)


def watch(
    folder: Path,
    console: Console,
    *,
    once: bool = False,
    interval_s: float = 1.0,
    wait_s: float = 60.0,
    record: Path | None = None,
) -> int:
    """Show the runs at or below a folder until they have ended.

    Args:
        folder: A run folder, or one that holds run folders.
        console: Where to show them: on a terminal a screen that is drawn again and again, elsewhere a line per round.
        once: Show the present state and leave.
        interval_s: Seconds between two looks.
        wait_s: How long to wait for a run that is not there yet, and after the last run of a folder has ended for another one.
        record: A text file that every screen with something new is appended to.

    Returns:
        0 all finished (or, with `once`, not ended yet), 3 one failed, 130 one was interrupted.

    Raises:
        ConfigError: There is no run within `wait_s`, or its folder was removed.
    """
    watcher = Watcher(folder)
    if once:
        while watcher.look(10.0):
            continue
        if not watcher.runs:
            raise ConfigError(f"{folder}: holds no run (no config.yaml, there or in the folders below)")
        console.print(watcher.picture(_height(console)), height=_height(console) if watcher.one else None)
        return watcher.exit_status
    with ExitStack() as stack:
        recorder = None
        if record is not None:
            recorder = Console(
                file=stack.enter_context(record.open("a", encoding="utf-8")), width=console.width, force_terminal=False
            )
        live = None
        if console.is_terminal and not console.is_dumb_terminal:
            live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        lines = _Lines(console)
        last_seen = time.monotonic()
        found_ended: bool | None = None
        while True:
            changed = watcher.look()
            if live is not None:
                live.update(watcher.picture(console.height), refresh=True)
            else:
                lines.show(watcher)
            if changed and recorder is not None and watcher.runs:
                _append(recorder, watcher, console)
            if watcher.ended:
                found_ended = True if found_ended is None else found_ended
                # A sweep may begin its next run; runs that had all ended before nobody waits for.
                if watcher.one or found_ended or time.monotonic() - watcher.arrived > wait_s:
                    break
            elif watcher.runs:
                found_ended, last_seen = False, time.monotonic()
            elif time.monotonic() - last_seen > wait_s:
                raise ConfigError(
                    f"{folder}: no run within {wait_s:g} s (--wait); give the folder of a run or one with runs"
                )
            time.sleep(interval_s)
    if live is not None:
        console.print(watcher.picture(_height(console)), height=_height(console) if watcher.one else None)
    return watcher.exit_status


def _height(console: Console) -> int:
    """One row is left for the prompt."""
    return max(12, console.height - 1) if console.is_terminal else PLAIN_HEIGHT


def _append(recorder: Console, watcher: Watcher, console: Console) -> None:
    height = console.height if console.is_terminal else PLAIN_HEIGHT
    recorder.print(f"--- {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC")
    recorder.print(watcher.picture(height), height=height if watcher.one else None)
    recorder.file.flush()


class _Lines:
    """A line per run, round and end; nothing twice."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: dict[Path, int] = {}
        self._states: dict[Path, str] = {}

    def show(self, watcher: Watcher) -> None:
        """What is new since the last call."""
        if not watcher.runs and not self._states:
            self._states[watcher.folder] = "waiting"
            self._print(f"waiting for a run in {watcher.folder}")
        for path, run in watcher.runs.items():
            prefix = "" if path == watcher.folder else f"{path.relative_to(watcher.folder)}: "
            if path not in self._shown and run.config:
                self._shown[path] = 0
                self._print(f"{prefix}{headline(run)}")
            if run.complete and path in self._shown:
                for number in sorted(number for number in run.rounds if number > self._shown[path]):
                    self._print(prefix + round_line(run, number))
                self._shown[path] = max(run.rounds, default=0)
            state = run.state
            if state != self._states.get(path) and state in ("no news", *ENDED):
                self._print(f"{prefix}{status_text(run).plain}")
            self._states[path] = state

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
