"""What a run shows while it goes on, and the summary at its end.

On a terminal a live display of two lines; anywhere else one plain line per round, which reads well in a job's log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from raysim.recording.records import RoundRecord


class Progress(Protocol):
    """What the round loop reports, in this order; a context manager around the whole run."""

    def __enter__(self) -> Self:
        """Begin to show."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the terminal as it was."""

    def round_started(self, round_num: int, cohort_size: int, *, scored: bool) -> None:
        """A round begins.

        Args:
            round_num: The round.
            cohort_size: Clients of the cohort.
            scored: Whether the clients' models are scored.
        """

    def client_trained(self, client_id: int) -> None:
        """A client's update is ready."""

    def client_scored(self, client_id: int) -> None:
        """A client's model is scored."""

    def round_finished(self, record: RoundRecord) -> None:
        """A round is committed. Round 0 is the evaluation of the initial model and was not started."""

    def message(self, text: str) -> None:
        """Show a sentence that should be seen: a failed client, a better plan."""


class Silent:
    """Progress for callers that do not want any."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def round_started(self, round_num: int, cohort_size: int, *, scored: bool) -> None:
        """Nothing."""

    def client_trained(self, client_id: int) -> None:
        """Nothing."""

    def client_scored(self, client_id: int) -> None:
        """Nothing."""

    def round_finished(self, record: RoundRecord) -> None:
        """Nothing."""

    def message(self, text: str) -> None:
        """Nothing."""


def make_progress(rounds: int, console: Console) -> Progress:
    """The live display if the console is a terminal that can move its cursor, else plain lines.

    Args:
        rounds: The last round of the run.
        console: Where to write, usually the standard error stream.
    """
    return (LiveProgress if console.is_terminal and not console.is_dumb_terminal else PlainProgress)(rounds, console)


class _Cohort:
    """The current round, and the time the remaining ones will take."""

    def __init__(self, rounds: int, clock: Callable[[], float]) -> None:
        self.rounds = rounds
        self._clock = clock
        self._begin: float | None = None
        self._done = 0
        self.start(0, 0, scored=False)

    def start(self, round_num: int, size: int, *, scored: bool) -> None:
        self._begin = self._clock() if self._begin is None and round_num else self._begin
        self.round_num, self.size, self.is_scored = round_num, size, scored
        self.num_trained = self.num_scored = 0

    def finish(self, record: RoundRecord) -> str | None:
        """The remaining time as text; None where it is not known. The next round may have begun."""
        if self._begin is None:
            return None
        self._done += 1
        left = (self.rounds - record.round_num) * (self._clock() - self._begin) / self._done
        return duration(left) if record.round_num < self.rounds else None


class PlainProgress:
    """One line per round.

    Args:
        rounds: The last round of the run.
        console: Where to write.
        clock: Seconds, for the remaining time.
    """

    def __init__(self, rounds: int, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._cohort = _Cohort(rounds, clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def round_started(self, round_num: int, cohort_size: int, *, scored: bool) -> None:
        """See `Progress`."""
        self._cohort.start(round_num, cohort_size, scored=scored)

    def client_trained(self, client_id: int) -> None:
        """See `Progress`."""
        self._cohort.num_trained += 1

    def client_scored(self, client_id: int) -> None:
        """See `Progress`."""
        self._cohort.num_scored += 1

    def round_finished(self, record: RoundRecord) -> None:
        """See `Progress`."""
        cohort = self._cohort
        left = cohort.finish(record)
        parts = [f"round {record.round_num}/{cohort.rounds}", *_metrics(record)]
        if record.sampled:
            parts += [f"clients {record.ok}/{record.sampled}", *_faults(record)]
        parts += [f"{record.round_s:.1f} s", *([f"eta {left}"] if left else [])]
        self._print("  ".join(parts))

    def message(self, text: str) -> None:
        """See `Progress`."""
        self._print(text)

    def _print(self, text: str) -> None:
        # A line stays a line, whatever width the console believes to have.
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


class LiveProgress:
    """A bar for the rounds and a line for the clients of the current one; messages scroll by above.

    Args:
        rounds: The last round of the run.
        console: A terminal.
        clock: Seconds, for the remaining time.
    """

    def __init__(self, rounds: int, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._cohort = _Cohort(rounds, clock)
        self._bars = Bars(
            TextColumn("round {task.completed:.0f}/{task.total:.0f}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[text]}", markup=False),
            console=console,
        )
        self._task = self._bars.add_task("", total=rounds, text="")
        self._metrics: list[str] = []
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=5)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cohort.size = 0
        self._live.stop()

    def round_started(self, round_num: int, cohort_size: int, *, scored: bool) -> None:
        """See `Progress`."""
        self._cohort.start(round_num, cohort_size, scored=scored)
        self._bars.update(self._task, completed=round_num - 1)

    def client_trained(self, client_id: int) -> None:
        """See `Progress`."""
        self._cohort.num_trained += 1

    def client_scored(self, client_id: int) -> None:
        """See `Progress`."""
        self._cohort.num_scored += 1

    def round_finished(self, record: RoundRecord) -> None:
        """See `Progress`."""
        left = self._cohort.finish(record)
        # A round without evaluation leaves the last accuracy on the screen.
        self._metrics = _metrics(record) or self._metrics
        text = "  ".join([*self._metrics, f"{record.round_s:.1f} s/round", *([f"eta {left}"] if left else [])])
        self._bars.update(self._task, completed=record.round_num, text=text)
        faults = _faults(record)
        if faults:
            self.message(f"round {record.round_num}: {', '.join(faults)}")

    def message(self, text: str) -> None:
        """See `Progress`."""
        self._live.console.print(text, markup=False, highlight=False, emoji=False)

    def _render(self) -> Group:
        cohort = self._cohort
        if not cohort.size:
            return Group(self._bars)
        counts = f"  round {cohort.round_num}: trained {cohort.num_trained}/{cohort.size}"
        if cohort.is_scored:
            counts += f", scored {cohort.num_scored}/{cohort.size}"
        return Group(self._bars, Text(counts, style="dim"))


def summary_table(records: Sequence[RoundRecord], *, folder: Path) -> Table:
    """The summary of a run.

    Args:
        records: Its rounds in order, with or without round 0; at least one.
        folder: The run folder.

    Returns:
        A table of two columns without heading.
    """
    rounds = [record for record in records if record.round_num]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    unchanged = sum(not record.updated for record in rounds)
    table.add_row("rounds", f"{len(rounds)}" + (f" ({unchanged} left the global model as it was)" if unchanged else ""))
    evaluated = [record for record in records if record.accuracy is not None]
    if evaluated:
        last, best = evaluated[-1], max(evaluated, key=lambda record: record.accuracy or 0.0)
        table.add_row("accuracy", f"{last.accuracy:.4f} (best {best.accuracy:.4f} in round {best.round_num})")
        for label, value in (("macro-F1", last.macro_f1), ("loss", last.loss)):
            if value is not None:
                table.add_row(label, f"{value:.4f}")
        chosen = [record for record in evaluated if record.validation_accuracy is not None]
        if chosen:
            # The one accuracy of a run that was not picked by looking at it.
            best = max(chosen, key=lambda record: record.validation_accuracy or 0.0)
            text = (
                f"{best.validation_accuracy:.4f} at best, in round {best.round_num}: test accuracy {best.accuracy:.4f}"
            )
            table.add_row("validation", text)
    if rounds:
        table.add_row("time per round", _times(rounds))
        table.add_row("pools", _pools(rounds))
        counts = {name: sum(getattr(record, name) for record in rounds) for name in ("sampled", "ok", *_FAULTS)}
        text = f"{counts['ok']} of {counts['sampled']} updates used"
        table.add_row("clients", ", ".join([text, *(f"{counts[name]} {name}" for name in _FAULTS if counts[name])]))
        retries = sum(record.retries for record in rounds)
        if retries:
            table.add_row("retries", f"{retries}")
    table.add_row("results", Text(str(folder)))
    return table


_FAULTS = ("skipped", "excluded", "failed")


def _metrics(record: RoundRecord) -> list[str]:
    accuracy = [] if record.accuracy is None else [f"accuracy {record.accuracy:.4f}"]
    return accuracy + ([] if record.loss is None else [f"loss {record.loss:.4g}"])


def _faults(record: RoundRecord) -> list[str]:
    counts = [(name, getattr(record, name)) for name in _FAULTS]
    faults = [f"{name} {count}" for name, count in counts if count]
    return faults + ([] if record.updated or not record.round_num else ["no usable update"])


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def _times(rounds: Sequence[RoundRecord]) -> str:
    parts = []
    for name in ("train", "score_tail", "aggregate", "evaluate", "commit"):
        # A part that was not done every round (evaluation) counts 0 s where it was not, so the parts add up.
        mean = _mean([getattr(record, f"{name}_s") or 0.0 for record in rounds])
        parts += [f"{name.replace('_', ' ')} {mean:.2f}"] if mean else []
    text = f"{_mean([record.round_s for record in rounds]):.2f} s"
    return f"{text} ({', '.join(parts)})" if parts else text


def _pools(rounds: Sequence[RoundRecord]) -> str:
    parts = []
    for name in ("client", "scorer"):
        mean = _mean([getattr(record, f"{name}_utilisation") for record in rounds])
        parts += [] if mean is None else [f"{name} actors busy {mean:.0%}"]
    return ", ".join(parts) or "-"


def duration(seconds: float) -> str:
    """Seconds as `m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
