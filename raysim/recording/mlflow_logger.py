"""MLflow: one MLflow run per run, with the whole configuration as parameters and TensorBoard's tags as names of metrics.

Where it goes is said as everywhere with MLflow: `MLFLOW_TRACKING_URI` (without it the database `mlflow.db` beside the run
folders: `mlflow ui --backend-store-uri sqlite:///runs/mlflow.db`) and `MLFLOW_EXPERIMENT_NAME` (without it `raysim`).

MLflow takes letters, digits, "_", "-", ".", ":", " " and "/" in a name. Any other character becomes "_" and the hexadecimal
digits of its code, as "_25" for "%"; so does "." where a part of a name is nothing but dots.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from raysim.errors import ConfigError
from raysim.fields import flatten
from raysim.recording.logger import RunInfo
from raysim.recording.manifest import write_json
from raysim.recording.metrics import RoundMetrics
from raysim.recording.records import ClientRecord, RoundRecord

_METRICS_PER_CALL, _PARAMS_PER_CALL, _LONGEST_PARAM = 1000, 100, 6000  # MLflow's own limits.


class MlflowLogger:
    """Logs one run.

    Args:
        info: The run. One that is resumed goes on in its MLflow run, which `mlflow.json` in the run folder names.

    Raises:
        ConfigError: The tracking server or database does not answer.
    """

    def __init__(self, info: RunInfo) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric: Any = Metric
        self._metrics = RoundMetrics(info)
        local = None if os.environ.get("MLFLOW_TRACKING_URI") else info.folder.parent
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{info.folder.parent / 'mlflow.db'}"
        try:
            with _impatient(), _one_at_a_time(local):
                self._client: Any = MlflowClient(tracking_uri=uri)
                experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or "raysim", local)
                self._run_id = self._open(info, experiment)
                settings = flatten(info.config) if info.resume_round is None else {}
                params = [Param(key, _text(value)[:_LONGEST_PARAM]) for key, value in settings.items()]
                for start in range(0, len(params), _PARAMS_PER_CALL):
                    self._client.log_batch(self._run_id, params=params[start : start + _PARAMS_PER_CALL])
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            raise ConfigError(
                f"output.loggers: mlflow: {uri} cannot be used ({first}); set MLFLOW_TRACKING_URI, or leave mlflow out"
            ) from error

    def write_round(self, round_record: RoundRecord, client_records: Sequence[ClientRecord]) -> None:
        """Log one round; step = round."""
        when, step = int(round_record.finished.timestamp() * 1000), round_record.round_num
        values = self._metrics.of_round(round_record, client_records)
        self._log([self._metric(metric_name(tag), float(value), when, step) for tag, value in values.items()])

    def finish(self, result: Mapping[str, Any] | None) -> None:
        """Log the seconds per round, and end the MLflow run as finished, failed or killed."""
        result = result or {"status": "interrupted", "seconds_per_round": None, "rounds_done": 0}
        if result["seconds_per_round"] is not None:
            now, step = int(time.time() * 1000), result["rounds_done"]
            self._log([self._metric("result/seconds_per_round", result["seconds_per_round"], now, step)])
        status = {"finished": "FINISHED", "failed": "FAILED"}.get(result["status"], "KILLED")
        self._client.set_terminated(self._run_id, status)

    def _log(self, metrics: Sequence[Any]) -> None:
        for start in range(0, len(metrics), _METRICS_PER_CALL):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _METRICS_PER_CALL])

    def _experiment(self, name: str, local: Path | None) -> str:
        known = self._client.get_experiment_by_name(name)
        place = None if local is None else (local / "mlflow-artifacts").absolute().as_uri()
        return str(known.experiment_id if known else self._client.create_experiment(name, artifact_location=place))

    def _open(self, info: RunInfo, experiment: str) -> str:
        note = info.folder / "mlflow.json"
        if info.resume_round is not None and note.is_file():
            run_id = str(json.loads(note.read_text(encoding="utf-8"))["run_id"])
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        tags = {"raysim.folder": str(info.folder), "raysim.study": info.folder.parent.name}
        run_id = str(self._client.create_run(experiment, run_name=info.name, tags=tags).info.run_id)
        write_json(note, {"run_id": run_id})
        return run_id


def metric_name(tag: str) -> str:
    """A tag with the characters that MLflow takes.

    Example:
        >>> metric_name("global/recall/a%2Fb (c)")
        'global/recall/a_252Fb _28c_29'
    """
    legal = re.sub(r"[^\w\-.: /]", lambda found: f"_{ord(found[0]):02X}", tag)
    return "/".join(part.replace(".", "_2E") if part.strip(".") == "" else part for part in legal.split("/"))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@contextlib.contextmanager
def _impatient() -> Iterator[None]:
    """Before round 1 a server that is away is not waited for as long as MLflow would (minutes), unless the user says so."""
    limits = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
    own = [name for name in limits if name not in os.environ]
    os.environ.update({name: limits[name] for name in own})
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _one_at_a_time(folder: Path | None) -> Iterator[None]:
    """Runs that start at the same moment must not both create the tables of one database."""
    if folder is None:
        yield
        return
    from filelock import FileLock

    log = logging.getLogger("mlflow")
    level = log.level
    log.setLevel(logging.WARNING)  # What it does to create a database is not news.
    try:
        with FileLock(folder / ".mlflow.lock", timeout=60):
            yield
    finally:
        log.setLevel(level)
