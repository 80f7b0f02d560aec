"""A report as a list of blocks, said once and written as Markdown, HTML and LaTeX by `pages`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Heading:
    """A section begins.

    Attributes:
        text: Its title.
    """

    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph.

    Attributes:
        text: Plain text.
        warning: Whether it is something that weakens the results.
    """

    text: str
    warning: bool = False


@dataclass(frozen=True)
class Items:
    """A list.

    Attributes:
        items: Plain text each.
    """

    items: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: Its name in references.
        caption: What it shows and how its numbers are made.
        columns: Headings.
        rows: Cells as text.
        words: How many of the first columns hold words; the others are numbers.
    """

    name: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 2


@dataclass(frozen=True)
class Picture:
    """A figure; its files are `figures/NAME.pdf`, `.png` and `.svg`.

    Attributes:
        name: Its name.
        caption: What it shows.
        alt: The same for those who cannot see it.
    """

    name: str
    caption: str
    alt: str


Block = Heading | Text | Items | Table | Picture


def table(
    name: str, caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 2, most: int = 120
) -> Table:
    """A table of at most so many rows, without columns in which no row says anything."""
    kept = (
        [i for i in range(len(columns)) if any(row[i] not in ("", "-") for row in rows)]
        if rows
        else list(range(len(columns)))
    )
    shown = rows[:most]
    if len(rows) > most:
        caption += f" The first {most} of {len(rows)} rows; report.json has all."
    return Table(
        name,
        caption,
        tuple(columns[i] for i in kept),
        tuple(tuple(row[i] for i in kept) for row in shown),
        sum(i < words for i in kept),
    )


def percent(value: float | None, digits: int = 1) -> str:
    """A share in per cent, without the sign."""
    return "-" if value is None else f"{100 * value:.{digits}f}"


def mean_sd(spread: dict[str, Any] | None, scale: float = 100.0, digits: int = 1) -> str:
    """Mean and standard deviation; the mean alone of one value."""
    if spread is None:
        return ""
    mean = f"{scale * spread['mean']:.{digits}f}"
    return mean if spread["sd"] is None else f"{mean} ± {scale * spread['sd']:.{digits}f}"


def p_text(p: float | None) -> str:
    """A p value as papers print it."""
    return "" if p is None else "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def number(value: float | None, digits: int = 3) -> str:
    """A number to so many significant digits, without exponent up to a million."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    text = f"{value:.{digits}g}"
    return text if "e" not in text else f"{value:,.0f}" if abs(value) >= 1 else f"{value:.6f}".rstrip("0.") or "0"


def seconds(value: float | None) -> str:
    """Seconds to a millisecond, from ten on to a tenth."""
    return "-" if value is None else f"{value:.{3 if value < 10 else 1}f}"


def size(num_bytes: float | None) -> str:
    """Bytes for people."""
    if num_bytes is None:
        return "-"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def interval(found: dict[str, Any] | None, scale: float = 1.0, digits: int = 2, *, signed: bool = False) -> str:
    """An estimate with its interval in brackets."""
    if found is None:
        return "-"
    sign = "+" if signed else ""
    value = f"{scale * found['value']:{sign}.{digits}f}"
    if found["low"] is None:
        return value
    return f"{value} [{scale * found['low']:.{digits}f}, {scale * found['high']:.{digits}f}]"
