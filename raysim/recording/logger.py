"""What a place that the numbers of a run go to besides its tables has to offer: `Logger`, made from a `RunInfo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from raysim.recording.hparams import Value
from raysim.recording.records import ClientRecord, RoundRecord


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a logger knows of a run before its first round.

    Attributes:
        folder: The run folder.
        name: Name of the run.
        rounds: Rounds that are asked for.
        config: The resolved configuration as plain values.
        config_yaml: The same as YAML.
        hparams: The values that tell the runs of a study apart, by key path.
        study: All values in the study of the keys that tell its runs apart, where they are known.
        class_names: Name of each class, [K].
        unit_names: Name of each unit that scores are taken over, [U].
        client_sizes: Training examples of each client, [N].
        resume_round: The first round that will be written when a run is resumed; None: the run is new.
    """

    folder: Path
    name: str
    rounds: int
    class_names: Sequence[str]
    unit_names: Sequence[str]
    client_sizes: Sequence[int]
    config: Mapping[str, Any] = field(default_factory=dict)
    config_yaml: str = ""
    hparams: Mapping[str, Value] = field(default_factory=dict)
    study: Mapping[str, Sequence[Value | None]] = field(default_factory=dict)
    resume_round: int | None = None


class Logger(Protocol):
    """A place that the numbers of a run go to; made from a `RunInfo` before round 1."""

    def write_round(self, round_record: RoundRecord, client_records: Sequence[ClientRecord]) -> None:
        """Write one round.

        Args:
            round_record: The round.
            client_records: The clients of its cohort; empty for round 0, the evaluation of the initial model.
        """

    def finish(self, result: Mapping[str, Any] | None) -> None:
        """Write how the run ended, and let go.

        Args:
            result: Content of `result.json`; None if there is none.
        """
