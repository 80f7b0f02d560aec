"""Where the numbers of a run go besides its tables: TensorBoard, MLflow, Weights & Biases.

A logger gets everything it needs to know of the run when it is made, then every round, then the result. The tables in the
run folder are the record; a logger is a copy for people to look at. So one that fails in the middle of a run is reported
once and left out from then on, and the run goes on. What can be known before round 1 (a package that is not installed, a
server that does not answer) is an error before round 1.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from raysim.errors import ConfigError, RaysimError
from raysim.recording.hparams import Value
from raysim.recording.records import ClientRecord, RoundRecord

FINISH_LIMIT_S = 60.0
"""Longest time that the end of a run waits for a remote logger to deliver what is left."""

logger = logging.getLogger("raysim")


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


def check_installed(names: Sequence[str]) -> None:
    """Refuse loggers whose package is missing.

    Raises:
        ConfigError: Says what to install.
    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ConfigError(
            [f'output.loggers: {name} is not installed; run: pip install "raysim[{name}]"' for name in missing]
        )


def open_loggers(info: RunInfo, names: Sequence[str], say: Callable[[str], None]) -> Loggers:
    """The loggers of a run.

    Args:
        info: The run.
        names: `tensorboard`, `mlflow`, `wandb`; their packages load only here.
        say: Tells the user, once, that a logger failed.

    Raises:
        ConfigError: A logger cannot start.
    """
    check_installed(names)
    opened: list[_Guarded] = []
    try:
        for name in names:
            if name == "tensorboard":
                from raysim.recording.tensorboard import TensorBoardWriter

                opened.append(_Guarded("TensorBoard", TensorBoardWriter(info), say))
            elif name == "mlflow":
                from raysim.recording.mlflow_logger import MlflowLogger

                opened.append(_InBackground("MLflow", MlflowLogger(info), say))
            else:
                from raysim.recording.wandb_logger import WandbLogger

                opened.append(_InBackground("Weights & Biases", WandbLogger(info), say))
    except BaseException:
        Loggers(opened).finish(None)
        raise
    return Loggers(opened)


class Loggers:
    """Several loggers as one; none of them can stop a run."""

    def __init__(self, members: Sequence[_Guarded]) -> None:
        self._members = list(members)

    def write_round(self, round_record: RoundRecord, client_records: Sequence[ClientRecord]) -> None:
        """Hand one round to all of them."""
        for member in self._members:
            member.write_round(round_record, client_records)

    def finish(self, result: Mapping[str, Any] | None) -> None:
        """End all of them; a second call does nothing."""
        members, self._members = self._members, []
        for member in members:
            member.finish(result)


class _Guarded:
    """A logger whose failure is told once, and ends it."""

    def __init__(self, title: str, inner: Logger, say: Callable[[str], None]) -> None:
        self._title, self._inner, self._say = title, inner, say
        self._failed = False

    def write_round(self, round_record: RoundRecord, client_records: Sequence[ClientRecord]) -> None:
        self._attempt(lambda: self._inner.write_round(round_record, client_records))

    def finish(self, result: Mapping[str, Any] | None) -> None:
        self._attempt(lambda: self._inner.finish(result))

    def _attempt(self, action: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            action()
        except Exception as error:  # Whatever a foreign package raises, the run does not depend on it.
            self._fail(_one_line(error))
            with contextlib.suppress(Exception):
                self._inner.finish(None)

    def _fail(self, reason: str) -> None:
        self._failed = True
        text = f"{self._title} is not written any more: {reason} The run goes on; its tables are complete."
        logger.warning(text)
        self._say(text)


class _InBackground(_Guarded):
    """A logger that may have to wait for a server: it works in a thread of its own, and no round waits for it."""

    def __init__(self, title: str, inner: Logger, say: Callable[[str], None]) -> None:
        super().__init__(title, inner, say)
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon: a server that never answers does not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"raysim {title}", daemon=True)
        self._thread.start()

    def write_round(self, round_record: RoundRecord, client_records: Sequence[ClientRecord]) -> None:
        self._waiting.put(lambda: self._inner.write_round(round_record, client_records))

    def finish(self, result: Mapping[str, Any] | None) -> None:
        self._waiting.put(lambda: self._inner.finish(result))
        self._waiting.put(None)
        self._thread.join(FINISH_LIMIT_S)
        if self._thread.is_alive() and not self._failed:
            self._fail(f"it did not take what was left within {FINISH_LIMIT_S:.0f} s.")

    def _work(self) -> None:
        while (action := self._waiting.get()) is not None:
            self._attempt(action)


def _one_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    first = text.splitlines()[0][:300].rstrip(".")
    return f"{first}." if isinstance(error, RaysimError) else f"{type(error).__name__}: {first}."
