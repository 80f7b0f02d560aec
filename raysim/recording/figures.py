"""Pictures: how the data lies on the clients, and one run at a glance.

Drawn with matplotlib's `Figure` alone: no window system, no state that another part of the program could see.
Colours are distinguishable with every common kind of colour blindness (Petroff's ten, cividis, PuOr).

Shapes: N clients, K classes, R rounds.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raysim.recording.files import write_atomic
from raysim.recording.tables import read_table

MAX_BUBBLES = 40
"""The largest number of clients, and of classes, drawn as bubbles."""

_COLOURS = [
    "#3f90da",
    "#ffa90e",
    "#bd1f01",
    "#94a4a2",
    "#832db6",
    "#a96b59",
    "#e76300",
    "#b9ac70",
    "#717581",
    "#92dadd",
]
_MAX_NAMED = 24
_DPI = 130


def draw_partition(class_counts: np.ndarray, class_names: Sequence[str], path: Path) -> None:
    """Draw how many examples of each class each client has.

    Up to 40 clients and classes every pair of them is a bubble whose area is the count; beyond, the clients are bars,
    stacked by class.

    Args:
        class_counts: Examples, [N, K].
        class_names: Name of each class, [K].
        path: The PNG file to write.
    """
    num_clients, num_classes = class_counts.shape
    if len(class_names) != num_classes:
        raise ValueError(f"{len(class_names)} class names for {num_classes} classes.")
    draw = _draw_bubbles if max(num_clients, num_classes) <= MAX_BUBBLES else _draw_bars
    _save(draw(class_counts, class_names), path)


def draw_run(folder: Path, path: Path, *, class_counts: np.ndarray | None = None) -> None:
    """Draw one run from its tables: accuracy by round, the clients' weights by round, and what the weights go with.

    The weights are drawn relative to equal weights: 1 is a client that counts as much as the others of its cohort.

    Args:
        folder: The run folder.
        path: The PNG file to write.
        class_counts: Training examples, [N, K]. With them the last panel is coloured by how many classes a client's
            labels amount to (the exponential of their entropy), and clients that never took part are in the picture.

    Raises:
        ValueError: If no round is done.
    """
    rounds, clients = read_table(folder, "rounds"), read_table(folder, "clients")
    if not len(clients):
        raise ValueError(f"{folder} holds no round with clients.")
    figure = _figure(15.5, 4.3)
    axes = figure.subplots(1, 3, width_ratios=(1.0, 1.25, 1.0))
    _draw_accuracy(axes[0], rounds, clients)
    _draw_weights(figure, axes[1], clients, None if class_counts is None else len(class_counts))
    _draw_relation(figure, axes[2], clients, class_counts)
    _save(figure, path)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DPI, layout="constrained")


def _save(figure: Any, path: Path) -> None:
    with warnings.catch_warnings(), write_atomic(path) as handle:
        # A class name in a script that the font lacks is drawn as boxes; that is no reason to stop or to complain.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(handle, format="png")


def _colours(num_classes: int) -> list[Any]:
    if num_classes <= len(_COLOURS):
        return list(_COLOURS[:num_classes])
    from matplotlib import colormaps

    return list(colormaps["cividis"](np.linspace(0, 1, num_classes)))


def _style(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_axisbelow(True)


def _whole_numbers(axis: Any, most: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=most, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))


def _short(name: str, most: int = 24) -> str:
    return name if len(name) <= most else f"{name[: most - 3]}..."


def _draw_bubbles(counts_NK: np.ndarray, class_names: Sequence[str]) -> Any:
    num_clients, num_classes = counts_NK.shape
    figure = _figure(max(6.0, 0.3 * num_clients + 3.2), max(2.6, 0.3 * num_classes + 1.2))
    axis = figure.subplots()
    largest = max(int(counts_NK.max()), 1)
    area = 16.0**2  # In square points; a cell is about 20 points wide.
    client, label = np.nonzero(counts_NK)
    axis.grid(color="0.92")
    axis.scatter(client, label, s=counts_NK[client, label] / largest * area, color=_COLOURS[0], linewidths=0)
    for step in sorted({max(1, round(largest * share)) for share in (0.1, 0.5, 1.0)}):
        axis.scatter([], [], s=step / largest * area, color=_COLOURS[0], linewidths=0, label=f"{step}")
    axis.legend(title="examples", loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, labelspacing=0.9)
    axis.set(xlim=(-0.7, num_clients - 0.3), ylim=(num_classes - 0.3, -0.7), xlabel="client")
    axis.set_xticks(range(0, num_clients, 1 if num_clients <= 25 else 2))
    axis.set_yticks(range(num_classes), [_short(name) for name in class_names], parse_math=False)
    _style(axis)
    return figure


def _draw_bars(counts_NK: np.ndarray, class_names: Sequence[str]) -> Any:
    num_clients, num_classes = counts_NK.shape
    figure = _figure(float(np.clip(0.085 * num_clients + 3.0, 7.0, 24.0)), 4.2 if num_classes <= 14 else 6.0)
    axis = figure.subplots()
    axis.grid(axis="y", color="0.92")
    # One outline per class, zero in the gaps between the clients: a thousand clients are not a thousand artists.
    edges = (np.arange(num_clients)[:, None] + np.array([-0.4, 0.4])).ravel()
    tops_NK = np.cumsum(counts_NK, axis=1)
    bottom = np.zeros(2 * num_clients - 1)
    colours = _colours(num_classes)
    bars = []
    for label, colour in enumerate(colours):
        top = np.zeros(2 * num_clients - 1)
        top[::2] = tops_NK[:, label]
        bars.append(axis.stairs(top, edges, baseline=bottom, fill=True, color=colour, linewidth=0))
        bottom = top
    axis.set(xlim=(-1, num_clients - 0.4), ylim=(0, None), xlabel="client", ylabel="training examples")
    _whole_numbers(axis.xaxis, most=20)
    _style(axis)
    if num_classes <= _MAX_NAMED:
        legend = axis.legend(
            bars[::-1], ["-"] * num_classes, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False
        )
        # As labels given to legend(), names that begin with "_" would be left out.
        for text, name in zip(legend.get_texts(), reversed(class_names), strict=True):
            text.set(text=_short(name), parse_math=False)
    else:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        scale = ScalarMappable(Normalize(0, num_classes - 1), "cividis")
        figure.colorbar(scale, ax=axis, label="class", pad=0.01)
    return figure


def _columns(table: Any, *names: str) -> list[np.ndarray]:
    """Columns as float64, nulls as NaN."""
    return [np.array(table[name].to_pylist(), dtype=np.float64) for name in names]


def _draw_accuracy(axis: Any, rounds: Any, clients: Any) -> None:
    round_num, accuracy = _columns(rounds, "round_num", "accuracy")
    at, of_client = _columns(clients, "round_num", "validation_accuracy")
    known = np.isfinite(of_client)
    if known.any():
        numbers = np.unique(at[known])
        low, mid, high = np.array(
            [np.quantile(of_client[known & (at == number)], (0.1, 0.5, 0.9)) for number in numbers]
        ).T
        band = {"color": _COLOURS[1], "linewidth": 0, "alpha": 0.25}
        axis.fill_between(numbers, low, high, label="client models, 10-90 %", **band)
        axis.plot(numbers, mid, color=_COLOURS[1], linewidth=1.2, label="client models, median (validation)")
    known = np.isfinite(accuracy)
    marker = "o" if known.sum() <= 40 else ""
    axis.plot(round_num[known], accuracy[known], color=_COLOURS[0], linewidth=2, marker=marker, markersize=3.5)
    axis.lines[-1].set_label("global model (test)")
    axis.grid(color="0.92")
    axis.set(xlabel="round", ylabel="accuracy", title="accuracy", ylim=(0, 1))
    axis.legend(loc="best", fontsize="small", framealpha=0.8)
    _whole_numbers(axis.xaxis, most=8)
    _style(axis)


def _relative_weights(clients: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Round, client and weight over equal weight, of every client whose update was used."""
    round_num, client_id, weight = _columns(clients, "round_num", "client_id", "weight")
    used = np.isfinite(weight)
    round_num, client_id, weight = round_num[used].astype(int), client_id[used].astype(int), weight[used]
    sizes = np.bincount(round_num) if len(round_num) else np.zeros(1, dtype=int)
    return round_num, client_id, weight * sizes[round_num]


def _draw_weights(figure: Any, axis: Any, clients: Any, num_clients: int | None) -> None:
    from matplotlib import colormaps

    round_num, client_id, relative = _relative_weights(clients)
    sampled_round, sampled_client = (column.astype(int) for column in _columns(clients, "round_num", "client_id"))
    first, last = int(sampled_round.min()), int(sampled_round.max())
    count = max(num_clients or 0, int(sampled_client.max()) + 1)
    picture_NR = np.full((count, last - first + 1), np.nan)
    picture_NR[client_id, round_num - first] = np.log2(np.maximum(relative, 2.0**-3))
    extent = (first - 0.5, last + 0.5, count - 0.5, -0.5)
    colours = colormaps["PuOr_r"].with_extremes(bad="0.82")
    style = {"aspect": "auto", "interpolation": "nearest"}
    image = axis.imshow(picture_NR, cmap=colours, vmin=-3, vmax=3, extent=extent, **style)
    used = set(zip(round_num.tolist(), client_id.tolist(), strict=True))
    pairs = zip(sampled_round.tolist(), sampled_client.tolist(), strict=True)
    lost = [pair for pair in pairs if pair not in used]
    key = "grey: not sampled"
    if lost:
        axis.scatter(*zip(*lost, strict=True), marker="x", s=9, color="#bd1f01", linewidths=0.9)
        key += ", x: not used"
    axis.set(xlabel=f"round  ({key})", ylabel="client", title="client weight, times equal weight")
    bar = figure.colorbar(image, ax=axis, pad=0.02, extend="both")
    bar.set_ticks([-3, -2, -1, 0, 1, 2, 3], labels=["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    _whole_numbers(axis.xaxis, most=8)
    _whole_numbers(axis.yaxis, most=10)


def _draw_relation(figure: Any, axis: Any, clients: Any, class_counts: np.ndarray | None) -> None:
    """Mean weight of each client by its number of examples, coloured by its labels when they are known."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    _, client_id, relative = _relative_weights(clients)
    all_ids, all_examples = _columns(clients, "client_id", "num_examples")
    examples_of = dict(zip(all_ids.astype(int).tolist(), all_examples.tolist(), strict=True))
    ids = np.unique(client_id)
    # The mean of logarithms: twice and half the equal weight cancel.
    weight = np.array([np.exp(np.log(np.maximum(relative[client_id == one], 2.0**-10)).mean()) for one in ids])
    examples = np.array([examples_of[int(one)] for one in ids])
    style: dict[str, Any] = {"s": 34, "edgecolors": "0.3", "linewidths": 0.5}
    axis.grid(color="0.92")
    axis.axhline(1, color="0.5", linewidth=1, linestyle="--")
    if class_counts is None:
        axis.scatter(examples, weight, color=_COLOURS[0], **style)
    else:
        shares = class_counts[ids] / np.maximum(class_counts[ids].sum(axis=1, keepdims=True), 1)
        entropy = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=1)
        effective = np.exp(entropy)
        scale = {"cmap": "cividis", "vmin": 1, "vmax": max(2.0, float(effective.max(initial=0.0)))}
        points = axis.scatter(examples, weight, c=effective, **scale, **style)
        figure.colorbar(points, ax=axis, pad=0.02).set_label("effective number of classes")
    axis.set(xscale="log", yscale="log", xlabel="training examples of the client")
    axis.set(ylabel="mean weight, times equal weight", title="weight and data of each client")
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter(plain)
        side.set_minor_formatter(NullFormatter())
    low, high = min(float(weight.min(initial=1.0)), 0.5), max(float(weight.max(initial=1.0)), 2.0)
    axis.set_yticks(2.0 ** np.arange(np.floor(np.log2(low)), np.ceil(np.log2(high)) + 1))
    axis.set_yticks([], minor=True)
    axis.set_ylim(low / 1.3, high * 1.3)
    _style(axis)
