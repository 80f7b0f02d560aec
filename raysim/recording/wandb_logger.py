"""Weights & Biases: one W&B run per run, with the configuration as config and TensorBoard's tags as names of metrics.

Where it goes is said as everywhere with W&B: `wandb login` or `WANDB_API_KEY`, `WANDB_PROJECT` (without it `raysim`),
`WANDB_RUN_GROUP` (without it the name of the folder that holds the run folders). With `WANDB_MODE=offline` nothing is sent;
`wandb sync runs/NAME/wandb/offline-run-*` does it later. Local files lie in the run folder, below `wandb/`.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raysim.errors import ConfigError
from raysim.recording.logger import RunInfo
from raysim.recording.manifest import write_json
from raysim.recording.metrics import RoundMetrics, finite
from raysim.recording.records import ClientRecord, RoundRecord

START_LIMIT_S, UPLOAD_LIMIT_S = 60.0, 45.0
"""Longest waits: for W&B's answer before round 1, and for what is left to be sent at the end."""

_BINS = 30


class WandbLogger:
    """Logs one run.

    Args:
        info: The run. One that is resumed goes on in its W&B run, which `wandb.json` in the run folder names.

    Raises:
        ConfigError: Nobody is logged in, or W&B does not answer.
    """

    def __init__(self, info: RunInfo) -> None:
        import wandb

        self._wandb: Any = wandb
        self._metrics = RoundMetrics(info)
        advice = "run `wandb login`, set WANDB_MODE=offline, or leave wandb out"
        settings = {
            # The run's own log has the output; W&B's threads and lines would disturb the display.
            **{"console": "off", "silent": True},
            **{"init_timeout": START_LIMIT_S, "finish_timeout": UPLOAD_LIMIT_S, "finish_timeout_raises": True},
        }
        try:
            online = os.environ.get("WANDB_MODE", "online") == "online"
            known = not online or self._wandb.login(prompt=False, timeout=int(START_LIMIT_S))
            if known:
                self._run: Any = self._wandb.init(
                    project=os.environ.get("WANDB_PROJECT") or "raysim",
                    group=os.environ.get("WANDB_RUN_GROUP") or info.folder.parent.name,
                    name=info.name,
                    id=self._id(info),
                    resume="allow" if info.resume_round is not None else None,
                    dir=str(info.folder),
                    config=dict(info.config),
                    reinit="create_new",
                    settings=self._wandb.Settings(**settings),
                )
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            raise ConfigError(f"output.loggers: wandb: cannot start ({first}); {advice}") from error
        if not known:
            raise ConfigError(f"output.loggers: wandb: nobody is logged in; {advice}")

    def write_round(self, round_record: RoundRecord, client_records: Sequence[ClientRecord]) -> None:
        """Log one round; step = round."""
        values: dict[str, Any] = dict(self._metrics.of_round(round_record, client_records))
        for name in ("score", "weight"):
            found = finite(getattr(record, name) for record in client_records)
            if len(found):
                values[f"{name}/dist"] = self._wandb.Histogram(np_histogram=np.histogram(found, _BINS))
        self._run.log({"round": round_record.round_num, **values}, step=round_record.round_num)

    def finish(self, result: Mapping[str, Any] | None) -> None:
        """Put the result into the summary, and wait a while until everything is sent."""
        if result is not None:
            self._run.summary.update({"status": result["status"], "reason": result["reason"]})
            if result["seconds_per_round"] is not None:
                self._run.summary["result/seconds_per_round"] = result["seconds_per_round"]
        failed = result is None or result["status"] != "finished"
        self._run.finish(exit_code=int(failed))

    @staticmethod
    def _id(info: RunInfo) -> str:
        note = info.folder / "wandb.json"
        if info.resume_round is not None and note.is_file():
            return str(json.loads(note.read_text(encoding="utf-8"))["run_id"])
        run_id = secrets.token_hex(6)
        write_json(note, {"run_id": run_id})
        return run_id
