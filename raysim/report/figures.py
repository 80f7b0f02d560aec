"""The figures of a report: learning curves, a critical-difference diagram, weights by client and round, costs.

Drawn with matplotlib's `Figure` alone, as PDF (letters stay letters), PNG (300 dpi) and SVG; the same numbers give the same
bytes. Colours are those of Okabe and Ito ("Color Universal Design", 2008) and PuOr, which are distinguishable with every common
kind of colour blindness; lines differ in their dashes too.

Shapes: N clients, R rounds, K methods.
"""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raysim.recording.files import write_atomic
from raysim.report.collect import Run
from raysim.report.statistics import MeanRanks
from raysim.report.study import Study

WIDTH = 7.2
"""Inches; the width of a page with two columns."""
MAX_PANELS = 9
MAX_LINES = 8
MAX_MAPS = 4
_OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#B8A800")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
_RC = {
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.labelsize": 8.5,
    "legend.fontsize": 8,
    "pdf.fonttype": 42,
    "svg.hashsalt": "raysim",
    "axes.unicode_minus": True,
}


@dataclass(frozen=True)
class Drawing:
    """What was drawn, in three formats.

    Attributes:
        pdf: For papers.
        png: For everything else.
        svg: For web pages.
    """

    pdf: bytes
    png: bytes
    svg: bytes

    def write(self, folder: Path, name: str) -> None:
        """Write `NAME.pdf` and `NAME.png`."""
        for suffix, content in (("pdf", self.pdf), ("png", self.png)):
            with write_atomic(folder / f"{name}.{suffix}") as handle:
                handle.write(content)


def draw_curves(study: Study, order: Sequence[str]) -> tuple[Drawing, str]:
    """Test accuracy by round, one panel per condition: mean over seeds, band of one standard deviation (n - 1).

    Args:
        study: What to draw.
        order: The methods, best first; those after the eighth are drawn in grey.

    Returns:
        The drawing, and what its caption has to say beyond that.
    """
    panels = study.conditions[:MAX_PANELS]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    with _style():
        figure = _figure(WIDTH if columns > 1 else 4.8, 2.35 * rows + 0.5 if columns > 1 else 3.4)
        axes = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
        handles: dict[str, Any] = {}
        for axis, condition in zip(axes, panels, strict=False):
            for place, method in reversed(list(enumerate(order))):
                line = _draw_curve(axis, study.of(condition, method), place)
                if line is not None:
                    handles[method if place < MAX_LINES else "other methods"] = line
            axis.set_title(_short(condition or "all runs", 44), parse_math=False)
            axis.grid(color="0.92")
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
            _whole_numbers(axis.xaxis)
            axis.set_xlabel("round")
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        for axis in axes[::columns]:
            axis.set_ylabel("test accuracy in %")
        _legend(figure, handles, [*order[:MAX_LINES], "other methods"])
        drawing = _saved(figure)
    extra = ""
    if len(study.conditions) > len(panels):
        extra += f" The first {len(panels)} of {len(study.conditions)} conditions."
    if len(order) > MAX_LINES:
        extra += (
            f" Grey: the means of the {len(order) - MAX_LINES} methods after the first {MAX_LINES} by mean accuracy."
        )
    return drawing, extra


def _draw_curve(axis: Any, runs: Sequence[Run], place: int) -> Any:
    if not runs:
        return None
    rounds = np.unique(np.concatenate([run.curve.round_num[np.isfinite(run.curve.accuracy)] for run in runs]))
    table = np.full((len(runs), len(rounds)), np.nan)
    for row, run in zip(table, runs, strict=True):
        known = np.isfinite(run.curve.accuracy)
        row[np.searchsorted(rounds, run.curve.round_num[known])] = 100 * run.curve.accuracy[known]
    complete = np.isfinite(table).all(axis=0)  # A mean over other seeds than its neighbour's would jump.
    rounds, table = rounds[complete], table[:, complete]
    if not len(rounds):
        return None
    mean = table.mean(axis=0)
    if place >= MAX_LINES:
        return axis.plot(rounds, mean, color="0.75", linewidth=0.7, zorder=1)[0]
    colour, dash = _OKABE_ITO[place], _DASHES[place % len(_DASHES)]
    if len(runs) > 1:
        sd = table.std(axis=0, ddof=1)
        axis.fill_between(rounds, mean - sd, mean + sd, color=colour, alpha=0.15, linewidth=0, zorder=2)
    marker = "o" if len(rounds) <= 12 else ""
    return axis.plot(rounds, mean, color=colour, linestyle=dash, linewidth=1.6, marker=marker, markersize=3, zorder=3)[
        0
    ]


def draw_ranks(found: MeanRanks, methods: Sequence[str]) -> Drawing:
    """Mean ranks on a line, best on the left; one bar joins what Nemenyi's test does not tell apart (Demsar 2006, figure 1)."""
    k = len(methods)
    order = np.argsort(found.ranks, kind="stable")
    groups = cliques([found.ranks[i] for i in order], found.critical)
    left = (k + 1) // 2
    names = [_wrapped(method, 26) for method in methods]
    step, top = 0.34 if any("\n" in name for name in names) else 0.24, 0.62
    bars = 0.11 * len(groups)
    height = top + 0.35 + bars + step * left
    with _style():
        figure = _figure(WIDTH, max(1.6, height), constrained=False)
        axis = figure.add_axes((0, 0, 1, 1))
        low, high = 2.35, WIDTH - 2.35  # The names stand left and right of the line.

        def x(rank: float) -> float:
            return low + (rank - 1) / (k - 1) * (high - low)

        axis.set(xlim=(0, WIDTH), ylim=(max(1.6, height), 0))
        axis.axis("off")
        axis.plot([x(1), x(k)], [top, top], color="black", linewidth=1)
        for rank in range(1, k + 1, -(-k // 12)):
            axis.plot([x(rank)] * 2, [top - 0.06, top], color="black", linewidth=1)
            axis.text(x(rank), top - 0.09, f"{rank}", ha="center", va="bottom")
        width = min(found.critical / (k - 1) * (high - low), WIDTH - low - 0.1)
        axis.plot([low, low + width], [0.24, 0.24], color="black", linewidth=1, marker="|", markersize=6)
        axis.text(
            low + width / 2, 0.19, f"critical difference {found.critical:.2f}", ha="center", va="bottom", fontsize=8
        )
        for place, (first, last) in enumerate(groups):
            y = top + 0.12 + 0.11 * place
            ends = (x(found.ranks[order[first]]) - 0.04, x(found.ranks[order[last]]) + 0.04)
            axis.plot(ends, [y, y], color=_OKABE_ITO[1], linewidth=3.2, solid_capstyle="butt")
        for place, index in enumerate(order):
            on_left = place < left
            y = top + bars + 0.3 + step * (place if on_left else k - 1 - place)
            edge, side = (low - 0.15, "right") if on_left else (high + 0.15, "left")
            mean = found.ranks[index]
            axis.plot([x(mean), x(mean), edge], [top, y, y], color="0.25", linewidth=0.8)
            sign = -1 if on_left else 1
            axis.text(edge + sign * 0.05, y, f"{mean:.2f}", ha=side, va="center")
            axis.text(edge + sign * 0.45, y, names[index], ha=side, va="center", parse_math=False)
        return _saved(figure)


def cliques(ranks: Sequence[float], critical: float) -> list[tuple[int, int]]:
    """Largest stretches (first, last) of ascending mean ranks that span no more than the critical difference."""
    found: list[tuple[int, int]] = []
    for first in range(len(ranks)):
        last = max(i for i in range(first, len(ranks)) if ranks[i] - ranks[first] <= critical)
        if last > first and (not found or last > found[-1][1]):
            found.append((first, last))
    return found


def draw_weights(runs: Sequence[tuple[str, Run]]) -> Drawing:
    """Weights of one condition and seed, a map of clients x rounds per method, beside the labels and size of each client.

    Clients are sorted by the entropy of their labels, then by size. Weights are relative to equal weights.

    Args:
        runs: Method and run, at most four; they share the partition.
    """
    first = runs[0][1]
    assert first.entropy is not None and first.examples is not None  # noqa: PT018
    order = np.lexsort((first.examples, first.entropy))
    count = len(order)
    with _style():
        figure = _figure(WIDTH, float(np.clip(0.1 * count + 1.4, 3.0, 6.0)))
        ratios = [0.55, 0.55, *[1.6] * len(runs)]
        axes = figure.subplots(1, len(ratios), width_ratios=ratios, sharey=True)
        edges = np.arange(count + 1) - 0.5
        for axis, values, title in (
            (axes[0], first.entropy[order], "entropy\n(nats)"),
            (axes[1], first.examples[order], "examples"),
        ):
            axis.stairs(values, edges, orientation="horizontal", fill=True, color="0.45", linewidth=0)
            axis.set_xlabel(title)
            axis.spines[["top", "right"]].set_visible(False)
            # The largest value alone: more numbers than one do not fit below a narrow bar.
            largest = float(f"{max(float(values.max()), 1e-9):.2g}")
            axis.set(xlim=(0, max(float(values.max()), largest) * 1.02))
            axis.set_xticks([0, largest], labels=["0", f"{largest:g}"])
        axes[0].set_ylabel(f"clients, sorted by label entropy ({count})")
        for axis, (method, run) in zip(axes[2:], runs, strict=True):
            image = _draw_map(axis, run, order)
            axis.set_title(_wrapped(method, 60 // len(runs)), parse_math=False)
            axis.set_xlabel("round")
            _whole_numbers(axis.xaxis, 6)
        axes[0].set_ylim(count - 0.5, -0.5)
        axes[0].set_yticks([])
        bar = figure.colorbar(image, ax=axes.tolist(), pad=0.01, extend="both", aspect=30)
        bar.set_ticks([-3, -2, -1, 0, 1, 2, 3], labels=["1/8", "1/4", "1/2", "1", "2", "4", "8"])
        bar.set_label("weight, times equal weight")
        return _saved(figure)


def _draw_map(axis: Any, run: Run, order: np.ndarray) -> Any:
    from matplotlib import colormaps

    clients = run.clients
    first, last = int(run.curve.round_num.min()), int(run.curve.round_num.max())
    picture = np.full((len(order), last - first + 1), np.nan)
    place = np.empty(len(order), dtype=int)
    place[order] = np.arange(len(order))
    used = np.isfinite(clients.weight)
    sizes = np.bincount(clients.round_num[used], minlength=last + 1)
    relative = clients.weight[used] * sizes[clients.round_num[used]]
    picture[place[clients.client_id[used]], clients.round_num[used] - first] = np.log2(np.maximum(relative, 2.0**-9))
    extent = (first - 0.5, last + 0.5, len(order) - 0.5, -0.5)
    colours = colormaps["PuOr_r"].with_extremes(bad="0.82")
    return axis.imshow(picture, cmap=colours, vmin=-3, vmax=3, extent=extent, aspect="auto", interpolation="nearest")


def _figure(width: float, height: float, *, constrained: bool = True) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained" if constrained else None)


def _style() -> Any:
    from matplotlib import rc_context

    return rc_context(_RC)


def _saved(figure: Any) -> Drawing:
    contents = []
    with warnings.catch_warnings():
        # A name in a script that the font lacks is drawn as boxes; that is no reason to stop or to complain.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # Once for all formats.
        for kind, dates in (("pdf", {"CreationDate": None}), ("png", {}), ("svg", {"Date": None})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=300, metadata=dates)
            contents.append(buffer.getvalue())
    return Drawing(*contents)


def _legend(figure: Any, handles: dict[str, Any], order: Sequence[str]) -> None:
    shown = [name for name in order if name in handles]
    longest = max(len(_short(name, 60)) for name in shown)
    columns = min(len(shown), 4 if longest <= 18 else 3 if longest <= 28 else 2 if longest <= 46 else 1)
    # Made of lines without labels: matplotlib hides a label that begins with "_" and takes $ for mathematics.
    legend = figure.legend(
        [handles[name] for name in shown], ["-"] * len(shown), loc="outside lower center", ncols=columns, frameon=False
    )
    for text, name in zip(legend.get_texts(), shown, strict=True):
        text.set(text=_short(name, 60), parse_math=False)


def _short(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 3]}..."


def _wrapped(name: str, width: int) -> str:
    """A name on at most two lines."""
    lines = textwrap.wrap(name, width) or [""]
    return "\n".join([lines[0], _short(" ".join(lines[1:]), width)]) if len(lines) > 1 else lines[0]


def _whole_numbers(axis: Any, most: int = 7) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=most, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
