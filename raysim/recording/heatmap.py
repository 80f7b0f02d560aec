"""Heat maps over the rounds of a run, as PNG bytes: a table of numbers with an axis, names and a colour bar.

Drawn with numpy and Pillow in a few milliseconds, as this happens while a run goes on; `figures` draws for print. The colours
are those of ColorBrewer's PuOr (diverging) and of viridis (sequential), both distinguishable with every common kind of
colour blindness, interpolated between a few anchors.

Shapes: M rows, R rounds.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

PUOR = "2d004b 542788 8073ac b2abd2 d8daeb f7f7f7 fee0b6 fdb863 e08214 b35806 7f3b08"
"""From purple (little) over white to orange and brown (much)."""
VIRIDIS = "440154 482475 414487 355f8d 2a788e 21908d 22a884 44bf70 7ad151 bddf26 fde725"
"""From dark blue to yellow."""

_BLANK = (208, 208, 208)
_INK, _GREY = (30, 30, 30), (110, 110, 110)
_WIDTH, _HEIGHT = 420, 420  # Of the table, in pixels, at most.
_CELL = 4  # Width and height of the smallest cell that an eye finds among blank ones, in pixels.
_FONT = 15
_MAX_NAME = 26


@dataclass(frozen=True)
class Heatmap:
    """One picture.

    Attributes:
        values: [M, R]; NaN is left blank. Where there are more rows or columns than can be told apart, a cell is the mean
            of neighbours.
        first: Round of the first column.
        names: Name of each row, [M].
        title: What the colours mean.
        rows: What the rows are.
        colours: `PUOR` or `VIRIDIS`.
        low: The value of the first colour; smaller values have it too.
        high: The value of the last colour.
        ticks: Values marked at the colour bar, with their names.
    """

    values: np.ndarray
    first: int
    names: Sequence[str]
    title: str
    rows: str
    colours: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]

    def png(self) -> tuple[bytes, int, int]:
        """The file, and its width and height in pixels."""
        from PIL import Image, ImageDraw

        table, per_row = _shrunk(self.values, 0, _HEIGHT // _CELL)
        table, per_column = _shrunk(table, 1, _WIDTH // _CELL)
        rows = self.rows if per_row == 1 else f"{self.rows}, {per_row} per row"
        columns = "round" if per_column == 1 else f"round, {per_column} per column"
        cell_y = max(1, min(24, _HEIGHT // table.shape[0]))
        cell_x = max(1, min(40, _WIDTH // table.shape[1]))
        colours = self._coloured(table).repeat(cell_y, axis=0).repeat(cell_x, axis=1)
        height, width = colours.shape[:2]
        shown = _spread(len(self.names), max(1, height // (_FONT + 3)))
        named = [(row, _short(self.names[row])) for row in shown]
        left = 20 + _FONT + max((int(_font().getlength(text)) for _, text in named), default=0)
        top, bar_x = 34, left + width + 16
        size = (max(bar_x + 84, left + int(_font().getlength(self.title)) + 12), top + max(height, 150) + 48)
        picture = Image.new("RGB", size, (255, 255, 255))
        picture.paste(Image.fromarray(colours), (left, top))
        draw = ImageDraw.Draw(picture)
        draw.rectangle((left - 1, top - 1, left + width, top + height), outline=_GREY)
        draw.text((left, top - 12), self.title, _INK, _font(), anchor="ls")
        for row, text in named:
            y = top + (row / per_row + 0.5 / max(per_row, 1)) * cell_y
            draw.text((left - 7, y), text, _INK, _font(), anchor="rm")
        for column in _ticks(self.first, self.values.shape[1], max(2, width // 40)):
            x = left + ((column - self.first) / per_column + 0.5 / per_column) * cell_x
            draw.line((x, top + height, x, top + height + 4), _GREY)
            draw.text((x, top + height + 6), str(column), _INK, _font(), anchor="mt")
        draw.text((left + width / 2, top + height + 26), columns, _INK, _font(), anchor="mt")
        _write_upwards(picture, rows, (2, top), height)
        self._draw_bar(picture, draw, (bar_x, top), max(height, 150))
        buffer = io.BytesIO()
        picture.save(buffer, "PNG", compress_level=1)
        return buffer.getvalue(), *picture.size

    def _coloured(self, table: np.ndarray) -> np.ndarray:
        place = np.clip((table - self.low) / (self.high - self.low), 0, 1)
        colours = _palette(self.colours)[np.nan_to_num(place * 255).astype(np.uint8)]
        colours[np.isnan(table)] = _BLANK
        return colours

    def _draw_bar(self, picture: Any, draw: Any, corner: tuple[int, int], height: int) -> None:
        from PIL import Image

        x, y = corner
        picture.paste(
            Image.fromarray(self._coloured(np.linspace(self.high, self.low, height)[:, None].repeat(14, 1))), corner
        )
        draw.rectangle((x - 1, y - 1, x + 14, y + height), outline=_GREY)
        for value, text in self.ticks:
            at = y + (self.high - value) / (self.high - self.low) * (height - 1)
            draw.line((x + 14, at, x + 18, at), _GREY)
            draw.text((x + 22, at), text, _INK, _font(), anchor="lm")


def log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Marks for a scale of decimal logarithms: the powers of ten in it, and its ends where there are fewer than two."""
    whole = [float(power) for power in range(int(np.ceil(low)), int(np.floor(high)) + 1)]
    step = 1 + len(whole) // 8
    chosen = whole[::step] if len(whole) > 1 else [low, high]
    return [(power, f"{10.0**power:.3g}") for power in chosen]


@cache
def _font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(_FONT)


@cache
def _palette(anchors: str) -> np.ndarray:
    """[256, 3], uint8."""
    known = np.array(
        [[int(colour[at : at + 2], 16) for at in (0, 2, 4)] for colour in anchors.split()], dtype=np.float64
    )
    place = np.linspace(0, len(known) - 1, 256)
    channels = [np.interp(place, np.arange(len(known)), channel) for channel in known.T]
    return np.stack(channels, axis=1).round().astype(np.uint8)


def _shrunk(table: np.ndarray, axis: int, most: int) -> tuple[np.ndarray, int]:
    """At most `most` rows or columns: means of that many neighbours each, blank ones left out."""
    count = table.shape[axis]
    group = -(-count // most)
    if group == 1:
        return table, 1
    starts = np.arange(0, count, group)
    there = np.isfinite(table)
    total = np.add.reduceat(np.where(there, table, 0.0), starts, axis=axis)
    number = np.add.reduceat(there, starts, axis=axis, dtype=np.int64)
    return np.where(number > 0, total / np.maximum(number, 1), np.nan), group


def _spread(count: int, most: int) -> list[int]:
    """Indices at equal distances."""
    return list(range(0, count, -(-count // most)))


def _ticks(first: int, count: int, most: int) -> list[int]:
    """Round numbers at steps of 1, 2 or 5 times a power of ten."""
    step = next(s for s in (m * 10**e for e in range(9) for m in (1, 2, 5)) if count / s <= most)
    return [n for n in range(first, first + count) if n % step == 0] or [first]


def _short(name: str) -> str:
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 3]}..."


def _write_upwards(picture: Any, text: str, corner: tuple[int, int], height: int) -> None:
    from PIL import Image, ImageDraw

    width = int(_font().getlength(text)) + 2
    label = Image.new("RGB", (width, _FONT + 5), (255, 255, 255))
    ImageDraw.Draw(label).text((0, 0), text, _INK, _font())
    turned = label.rotate(90, expand=True)
    picture.paste(turned, (corner[0], corner[1] + max(0, (height - width) // 2)))
