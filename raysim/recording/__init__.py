"""What a run leaves behind: tables, TensorBoard events, manifest, checkpoints, progress lines and pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from raysim.fields import NonNegativeInt, Section


@dataclass(frozen=True)
class OutputSettings(Section):
    """Where the results go and what is kept.

    Attributes:
        dir: Folder that holds the run folders; a run writes to `dir/name`.
        tensorboard: Write TensorBoard events.
        checkpoint_every: Rounds between checkpoints; 0 = never, the run cannot be resumed.
    """

    dir: Path = Path("runs")
    tensorboard: bool = True
    checkpoint_every: NonNegativeInt = 1
