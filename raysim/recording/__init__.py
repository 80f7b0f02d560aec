"""What a run leaves behind: tables, TensorBoard events, manifest, checkpoints, progress lines and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from raysim.fields import NonNegativeInt, Section


@dataclass(frozen=True)
class OutputSettings(Section):
    """Where the results go and what is kept.

    Attributes:
        dir: Folder that holds the run folders; a run writes to `dir/name`.
        tensorboard: Write TensorBoard events.
        loggers: Where else the numbers go: `mlflow`, `wandb`. Each needs its extra, as in `pip install "raysim[mlflow]"`.
        hparams: Configuration keys that tell the runs of a study apart, as `[client.optimizer.lr, seed]`, for TensorBoard's
            table of runs; or with all values of the study, `{client.optimizer.lr: [0.1, 0.01], seed: [0, 1]}`, which become
            boxes to tick there; null: the usual keys.
        checkpoint_every: Rounds between checkpoints; 0 = never, the run cannot be resumed.
    """

    dir: Path = Path("runs")
    tensorboard: bool = True
    loggers: tuple[Literal["mlflow", "wandb"], ...] = ()
    hparams: tuple[str, ...] | Mapping[str, tuple[bool | int | float | str | None, ...]] | None = None
    checkpoint_every: NonNegativeInt = 1

    def __post_init__(self) -> None:
        for key in ("loggers", "hparams"):
            given = tuple(getattr(self, key) or ())
            if len(set(given)) < len(given):
                raise ValueError(f"{key} names one twice: {', '.join(given)}")
