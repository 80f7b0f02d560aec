"""What work will cost, learnt from what it has cost."""

from __future__ import annotations

from collections import deque


class CostModel:
    """Expected seconds of a unit: base + slope x examples, the least-squares line through the last units measured.

    Before there are two different sizes to draw a line through, the cost is the number of examples itself: all that the order
    of hand-out needs.
    """

    def __init__(self, memory: int = 512) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=memory)

    def add(self, examples: float, seconds: float) -> None:
        """Learn from a unit."""
        self._seen.append((float(examples), seconds))

    @property
    def line(self) -> tuple[float, float] | None:
        """Base and slope, neither below zero; None while there is no line."""
        count = len(self._seen)
        mean_x = sum(x for x, _ in self._seen) / max(count, 1)
        mean_y = sum(y for _, y in self._seen) / max(count, 1)
        spread = sum((x - mean_x) ** 2 for x, _ in self._seen)
        if spread == 0:
            return None
        slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in self._seen) / spread)
        if (base := mean_y - slope * mean_x) < 0:  # A line through the origin, then.
            return 0.0, mean_y / mean_x
        return base, slope

    def costs(self, examples: list[int]) -> list[float]:
        """The expected cost of each of some units; larger for more examples."""
        line = self.line
        if line is None or line[1] == 0.0:
            return [float(count) for count in examples]
        return [line[0] + line[1] * count for count in examples]
