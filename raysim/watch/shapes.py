"""Numbers as characters: a curve in braille dots, bars, a histogram. All of them fill the room they get."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

_BLOCKS = " ▏▎▍▌▋▊▉█"
_HEIGHTS = "▁▂▃▄▅▆▇█"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character, [4 rows, 2 columns]."""
_FILLS = "█▓▒░▞"
"""Parts of a stacked bar, told apart without colour."""


class Curve:
    """Values over rounds as a line of braille dots, with the largest and the smallest value at its left.

    Args:
        points: Round and value, in order.
        last: The round at the right edge.
        style: Of the line.
    """

    def __init__(self, points: Sequence[tuple[int, float]], last: int, style: str) -> None:
        self._points = [(number, value) for number, value in points if math.isfinite(value)]
        self._last, self._style = max([last, *(number for number, _ in self._points)]), style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or 5
        if not self._points:
            yield Text("no round was evaluated yet", style="dim")
            return
        values = [value for _, value in self._points]
        low, high = min(values), max(values)
        labels = [short(high), *[""] * (height - 2), short(low)] if height > 1 and high > low else [short(high)]
        margin = max(map(len, labels))
        rows = self._dots(max(4, options.max_width - margin - 1), height, low, high)
        style = Style.parse(self._style)
        for row, line in enumerate(rows):
            label = labels[row] if row < len(labels) else ""
            yield Segment(f"{label:>{margin}} ", Style(dim=True))
            yield Segment(line, style)
            yield Segment.line()

    def _dots(self, width: int, height: int, low: float, high: float) -> list[str]:
        cells = [[0] * width for _ in range(height)]
        columns, rows = 2 * width - 1, 4 * height - 1
        begin = min(self._points[0][0], self._last)

        def place(number: float, value: float) -> tuple[int, int]:
            x = round((number - begin) / max(1, self._last - begin) * columns)
            return x, round((high - value) / (high - low) * rows) if high > low else rows // 2

        before: tuple[int, int] | None = None
        for point in self._points:
            x, y = place(*point)
            from_x, from_y = before or (x, y)
            steps = max(abs(x - from_x), abs(y - from_y), 1)
            for step in range(steps + 1):
                dot_x, dot_y = from_x + (x - from_x) * step // steps, from_y + (y - from_y) * step // steps
                cells[dot_y // 4][dot_x // 2] |= _DOTS[dot_y % 4][dot_x % 2]
            before = x, y
        return ["".join(chr(0x2800 + bits) if bits else " " for bits in row) for row in cells]


def bar(share: float, width: int) -> str:
    """A bar of `share` (0 to 1) of `width` characters, in steps of an eighth; something is seen of every share above 0."""
    eighths = max(round(min(share, 1.0) * width * 8), 1 if share > 0 else 0)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_BLOCKS[rest] if rest else "")).ljust(width)


class Stacked:
    """A bar whose sections are the parts' shares of their sum, and below it each part with its fill and seconds.

    Args:
        parts: Name and seconds, at most five.
        styles: One for each.
    """

    def __init__(self, parts: Sequence[tuple[str, float]], styles: Sequence[str]) -> None:
        self._parts, self._styles = parts, styles

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        total = sum(seconds for _, seconds in self._parts)
        bar_text, legend, done, edge = Text(no_wrap=True), Text(no_wrap=True, overflow="ellipsis"), 0.0, 0
        for fill, style, (name, seconds) in zip(_FILLS, self._styles, self._parts, strict=False):
            done += seconds
            right = round(options.max_width * done / total) if total else 0
            bar_text.append(fill * (right - edge), style)
            edge = right
            legend.append("  " if legend else "").append(fill, style)
            legend.append(f"{name} {seconds:.{2 if seconds < 10 else 1}f}")
        yield bar_text
        yield legend


def histogram(values: Sequence[float], bins: int) -> str:
    """How many values lie in each of `bins` equal intervals from the least to the largest."""
    low, high = min(values), max(values)
    counts = [0] * bins
    for value in values:
        counts[min(int((value - low) / (high - low) * bins), bins - 1) if high > low else 0] += 1
    return "".join(_HEIGHTS[math.ceil(count / max(counts) * 8) - 1] if count else " " for count in counts)


def short(value: float | None) -> str:
    """A number in at most five or seven characters."""
    if value is None:
        return "-"
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.{max(0, 4 - max(0, int(math.log10(abs(value) or 1.0))))}f}"
