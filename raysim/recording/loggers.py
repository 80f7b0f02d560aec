"""The loggers of a run together: opening them before round 1, and what happens when one of them fails later.

The tables in the run folder are the record; a logger is a copy for people to look at. So one that fails in the middle of a
run is reported once and left out from then on, and the run goes on. What can be known before round 1 (a package that is not
installed, a server that does not answer) is an error before round 1.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from raysim.errors import ConfigError, RaysimError
from raysim.recording.logger import Logger, RunInfo
from raysim.recording.records import ClientRecord, RoundRecord

FINISH_LIMIT_S = 60.0
"""Longest time that the end of a run waits for a remote logger to deliver what is left."""

logger = logging.getLogger("raysim")


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
