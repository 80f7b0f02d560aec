"""What `raysim watch` shows: a screen for one run, one line per run for many, and plain lines where there is no terminal."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.layout import Layout
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from raysim.recording.progress import duration
from raysim.watch.follow import RECENT, Follower, Row, State, quantiles
from raysim.watch.shapes import Curve, Stacked, bar, histogram, short

STYLES: dict[State, str] = {
    "starting": "bold cyan",
    "running": "bold green",
    "no news": "bold yellow",
    "finished": "bold green",
    "failed": "bold red",
    "interrupted": "bold yellow",
}
_PARTS = ("train", "score_tail", "aggregate", "evaluate", "commit")
_PART_STYLES = ("cyan", "magenta", "yellow", "green", "blue")
_QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}
_OF_CLIENTS = {
    "weight": "weight",
    "score": "score",
    "train_loss": "train loss",
    "validation_accuracy": "val. acc.",
    "train_s": "train s",
    "score_s": "score s",
}
"""Columns of the clients table that quantiles are shown of."""
_LOG_TIME = re.compile(r"^\S+ (\d\d:\d\d:\d\d),\d+ (?:INFO )?")
MIN_HEIGHT = 20
"""Rows of a terminal below which the clients are left out."""


def screen(run: Follower, height: int) -> Layout:
    """One run on a whole screen.

    Args:
        run: What is known of it.
        height: Rows of the screen.
    """
    faults = _fault_lines(run)
    foot = 5 + min(len(faults), max(1, height // 8))
    curves = max(6, height // 4)
    layout = Layout()
    parts = [Layout(_header(run), size=3), Layout(name="curves", size=curves)]
    if height >= MIN_HEIGHT:
        rows = height - 3 - curves - foot - 2
        parts.append(Layout(Panel(_cohort(run, rows), title=_cohort_title(run), title_align="left")))
    parts.append(Layout(_foot(run, faults[: foot - 5]), size=foot))
    layout.split_column(*parts)
    last = run.total or 1
    layout["curves"].split_row(
        Layout(
            Panel(Curve(run.curve("accuracy"), last, "green"), title=_metric_title(run, "accuracy"), title_align="left")
        ),
        Layout(Panel(Curve(run.curve("loss"), last, "magenta"), title=_metric_title(run, "loss"), title_align="left")),
    )
    return layout


def status_text(run: Follower) -> Text:
    """The state of a run in words, with what makes it doubtful."""
    state = run.state
    text = Text(state if state != "no news" else f"no news for {ago(run.age)}", style=STYLES[state])
    usual = run.usual_s
    if state == "no news":
        why = f"a round takes {usual:.1f} s" if usual else "no round is done"
        text.append(f" ({why}): killed?", style="not bold")
    elif state == "running" and usual and run.age > 2 * max(usual, 5.0):
        text.append(f", last news {ago(run.age)} ago", style="not bold")
    elif run.result is not None and run.result.get("reason"):
        text.append(f": {run.result['reason']}", style="not bold")
    return text


def ago(seconds: float) -> str:
    """A time span in one unit: 40 s, 12 min, 3 h, 2 days."""
    for limit, unit, name in ((100, 1, "s"), (5400, 60, "min"), (129_600, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86_400:.0f} days"


def round_line(run: Follower, number: int) -> str:
    """A round in one plain line, as `raysim run` prints it."""
    row = run.rounds[number]
    parts = [f"round {number}/{run.total or '?'}"]
    parts += [f"{name} {row[name]:.4f}" for name in ("accuracy", "loss") if row.get(name) is not None]
    parts.append(f"clients {row.get('ok')}/{row.get('sampled')}")
    parts += [f"{name} {row[name]}" for name in ("skipped", "excluded", "failed", "retries") if row.get(name)]
    parts.append(f"{row['round_s']:.1f} s")
    if number == max(run.rounds) and run.eta_s is not None:
        parts.append(f"eta {duration(run.eta_s)}")
    return "  ".join(parts)


def headline(run: Follower) -> str:
    """The run's method and data in one plain line."""
    parts = ("data", "model", "algorithm", "weighting", "partition", "execution")
    data, model, algorithm, weighting, partition, execution = (run.config.get(part) or {} for part in parts)
    if not run.config:
        return "no config.yaml yet: data are read and processes start"
    cohort = run.newest["sampled"] if run.newest else None
    pools = ""
    if execution.get("backend") == "serial":
        pools = ", serial"
    elif run.plan:
        pools = f", {run.plan.get('client_actors')}+{run.plan.get('scorer_actors')} actors"
    return (
        f"{algorithm.get('name')} + {weighting.get('name')}, {model.get('name')} on {data.get('name')}, "
        f"{partition.get('clients')} clients" + (f", {cohort} per round" if cohort else "") + pools
    )


def many(runs: Sequence[tuple[str, Follower]], height: int) -> RenderableType:
    """Several runs, one line each, the newest first.

    Args:
        runs: Name and state of each, newest first.
        height: Rows of the screen.
    """
    states = Counter(run.state for _, run in runs)
    title = f"{len(runs)} runs: " + ", ".join(f"{states[state]} {state}" for state in STYLES if states[state])
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, expand=True)
    table.add_column("state", no_wrap=True)
    table.add_column("run", ratio=2, no_wrap=True, overflow="ellipsis")
    for heading in ("round", "accuracy", "best", "s/round", "eta", "news"):
        table.add_column(heading, justify="right", no_wrap=True)
    shown = runs if len(runs) <= height - 2 else runs[: max(1, height - 3)]
    for name, run in shown:
        state, usual, accuracy = run.state, run.usual_s, run.curve("accuracy")
        done = max(run.rounds, default=0)
        table.add_row(
            Text(state, style=STYLES[state]),
            Text(name),
            f"{done}/{run.total or '?'}",
            f"{accuracy[-1][1]:.4f}" if accuracy else "-",
            f"{max(value for _, value in accuracy):.4f}" if accuracy and run.complete else "-",
            f"{usual:.1f}" if usual else "-",
            duration(run.eta_s) if run.eta_s is not None else "-",
            ago(run.age),
        )
    left = Counter(run.state for _, run in runs[len(shown) :])
    if not left:
        return table
    more = ", ".join(f"{count} {state}" for state, count in left.items())
    return Group(table, Text(f"... and {sum(left.values())} older: {more}", style="dim"))


def _header(run: Follower) -> RenderableType:
    first = Table.grid(expand=True, padding=(0, 1))
    first.add_column(no_wrap=True, overflow="ellipsis")
    done, total = max(run.rounds, default=0), run.total
    times = [f"round {done}/{total or '?'}"]
    if run.elapsed_s is not None:
        times.append(duration(run.elapsed_s))
    if run.eta_s is not None:
        times.append(f"eta {duration(run.eta_s)}")
    first.add_column(justify="right", no_wrap=True, min_width=len("  ".join(times)))
    first.add_row(Text(run.name, style="bold").append("  ").append_text(status_text(run)), "  ".join(times))
    return Group(first, Text(headline(run), no_wrap=True, overflow="ellipsis"), _Bar(done, total or 0))


class _Bar:
    """Progress over the whole width."""

    def __init__(self, done: int, total: int) -> None:
        self._share = done / total if total else 0.0

    def __rich_console__(self, console: Any, options: Any) -> Any:
        width = options.max_width - 6
        filled = int(self._share * width)
        yield (
            Text("━" * filled, style="green").append("─" * (width - filled), style="dim").append(f" {self._share:4.0%}")
        )


def _metric_title(run: Follower, column: str) -> str:
    points = run.curve(column)
    if not points:
        return column
    best = (max if column == "accuracy" else min)(points, key=lambda point: point[1])
    return f"{column} {points[-1][1]:.4f} [dim]best {best[1]:.4f} in {best[0]}[/dim]"


def _cohort_title(run: Follower) -> str:
    row = run.newest
    if row is None:
        return "no round is done yet; the run's log"
    text = f"round {row['round_num']}: {row.get('ok')} of {row.get('sampled')} clients"
    if row.get("weight_entropy") is not None:
        # That of equal weights is the most there can be.
        text += f", weight entropy {row['weight_entropy']:.2f} of {math.log(max(1, row['ok'])):.2f}"
    return text + (f", largest {row['weight_max']:.3f}" if row.get("weight_max") is not None else "")


def _cohort(run: Follower, rows: int) -> RenderableType:
    if run.rounds and not run.clients:
        return Text("the clients of this round cannot be read yet", style="dim")
    if not run.clients:
        lines = [_LOG_TIME.sub(r"\1 ", line) for line in run.log[-rows:]]
        return Group(*(Text(line, no_wrap=True, overflow="ellipsis", style="dim") for line in lines))
    ordered = sorted(run.clients, key=lambda row: (row.get("weight") is None, -(row.get("weight") or 0.0)))
    if len(ordered) + 1 <= rows:
        return _each(ordered)
    grid = Table.grid(expand=True, padding=(0, 2))
    grid.add_column()
    grid.add_column(ratio=1)
    grid.add_row(_quantile_table(ordered, rows), _extremes(ordered, rows))
    return grid


def _each(clients: Sequence[Row]) -> Table:
    """One line per client, the heaviest first."""
    columns = {
        "client_id": "client",
        "num_examples": "n",
        "num_steps": "steps",
        "train_loss": "train loss",
        "validation_accuracy": "val. acc.",
        "score": "score",
    }
    present = {key: label for key, label in columns.items() if any(row.get(key) is not None for row in clients)}
    table = Table(box=None, pad_edge=False, expand=True, padding=(0, 1, 0, 0))
    for label in present.values():
        table.add_column(label, justify="right", no_wrap=True)
    table.add_column("weight", ratio=1, no_wrap=True, overflow="ellipsis")
    largest = max((row["weight"] for row in clients if row.get("weight") is not None), default=1.0)
    for row in clients:
        cells = [short(v) if isinstance(v := row.get(key), float) else "-" if v is None else str(v) for key in present]
        table.add_row(*cells, _weight(row, largest))
    return table


def _weight(row: Row, largest: float) -> Text:
    if row.get("weight") is None:
        return Text(f"{row.get('status')}: {row.get('reason')}", style="yellow")
    return Text(f"{row['weight']:.3f} ").append(bar(row["weight"] / largest, 20).rstrip(), style="cyan")


def _quantile_table(clients: Sequence[Row], rows: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    for heading in _QUANTILES:
        table.add_column(heading, justify="right", no_wrap=True)
    shown = 0
    for key, label in _OF_CLIENTS.items():
        values = [row[key] for row in clients if row.get(key) is not None and math.isfinite(row[key])]
        if values and shown < rows - 2:
            table.add_row(label, *map(short, quantiles(values, list(_QUANTILES.values()))))
            shown += 1
    return table


def _extremes(clients: Sequence[Row], rows: int) -> RenderableType:
    """The clients that count most and least, and how the weights are spread in between."""
    weighted = [row for row in clients if row.get("weight") is not None]
    if not weighted:
        return Text("no update was usable", style="yellow")
    count = max(1, min((rows - 2) // 2, len(weighted) // 2))
    largest = weighted[0]["weight"]
    table = Table(box=None, pad_edge=False, expand=True, padding=(0, 1, 0, 0))
    table.add_column("client", justify="right", no_wrap=True)
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("weight", ratio=1, no_wrap=True, overflow="crop")
    for row in weighted[:count]:
        table.add_row(str(row["client_id"]), str(row.get("num_examples")), _weight(row, largest))
    spread = histogram([row["weight"] for row in weighted], 16)
    table.add_row("...", "", Text(spread, style="cyan"))
    for row in weighted[-count:]:
        table.add_row(str(row["client_id"]), str(row.get("num_examples")), _weight(row, largest))
    return table


def _foot(run: Follower, faults: Sequence[Text]) -> RenderableType:
    """Where the time goes, how busy the pools are, what went wrong."""
    recent = run.rows[-RECENT:]
    if not recent:
        return Panel(Group(*faults))
    parts = [(name.replace("_", " "), _mean([row.get(f"{name}_s") or 0.0 for row in recent])) for name in _PARTS]
    round_s = _mean([row["round_s"] for row in recent])
    busy = [
        f"{role}s {_mean(values):.0%}"
        for role in ("client", "scorer")
        if (values := [v for row in recent if (v := row.get(f"{role}_utilisation")) is not None])
    ]
    line = [f"busy: {', '.join(busy)}"] if busy else []
    if any(row.get("driver_bytes") for row in recent):
        line.append(f"network {_mean([row.get('driver_bytes') or 0 for row in recent]) / 1e6:.1f} MB/round")
    names = ("retries", "failed", "excluded", "skipped")
    totals = {name: sum(row.get(name) or 0 for row in run.rounds.values()) for name in names}
    line += [f"{name} {count}" for name, count in totals.items() if count] or ["no faults"]
    counts = Text("  ".join(line), no_wrap=True, overflow="ellipsis")
    counts.highlight_regex(r"(failed|excluded) \d+", "bold yellow")
    title = f"{round_s:.2f} s per round (mean of the last {len(recent)})"
    return Panel(Group(Stacked(parts, _PART_STYLES), counts, *faults), title=title, title_align="left")


def _fault_lines(run: Follower) -> list[Text]:
    lines = [
        Text(f"cannot be read now: {text}", style="yellow", no_wrap=True, overflow="ellipsis")
        for text in run.unreadable
    ]
    for row in run.faults:
        text = f"round {row['round_num']}: client {row['client_id']} {row['status']}: {row['reason']}"
        lines.append(Text(text, style="yellow", no_wrap=True, overflow="ellipsis"))
    newest = run.newest
    lines += [Text(note, no_wrap=True, overflow="ellipsis") for note in (newest or {}).get("notes") or ()]
    if newest is not None and newest.get("updated") is False:
        lines.insert(0, Text("no update was usable: the global model stays", style="bold yellow", no_wrap=True))
    return lines


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
