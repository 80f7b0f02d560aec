r"""A run's progress as Prometheus metrics, through the agents that Ray has on every node anyway.

Ray serves what its processes report at each node's metrics port (`ray.nodes()[0]["MetricsExportPort"]`) and writes the targets
for Prometheus to `/tmp/ray/prom_metrics_service_discovery.json`. The names there begin with `ray_`:

    ray_raysim_round  ray_raysim_rounds                        the last round that was committed; how many there will be
    ray_raysim_accuracy  ray_raysim_loss                       the global model on the test set
    ray_raysim_validation_accuracy                             and on the validation set, if asked for
    ray_raysim_round_seconds                                   of the last round
    ray_raysim_utilisation{role="client" | "scorer"}           busy share of a pool, 0 to 1
    ray_raysim_clients_ok_total  ray_raysim_clients_lost_total updates used; clients that failed or were excluded
    ray_raysim_retries_total                                   units of work that were run again

Each has the tag `run`, the name of the run (`ü` as `\xfc`); none has one per client or actor, which would be too many series.
"""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge

from raysim.recording.records import RoundRecord

_GAUGES = {
    "round": "Last round that was committed.",
    "rounds": "Rounds of the run.",
    "accuracy": "Accuracy of the global model on the test set, 0 to 1.",
    "loss": "Loss of the global model on the test set.",
    "validation_accuracy": "Accuracy of the global model on the validation set, 0 to 1.",
    "round_seconds": "Seconds of the last round.",
}
_COUNTERS = {
    "clients_ok": "Clients whose update was used.",
    "clients_lost": "Clients that failed or were excluded.",
    "retries": "Units of work that were run again.",
}


class RunMetrics:
    """The metrics of one run.

    Args:
        run: Its name.
        rounds: Its last round.
    """

    def __init__(self, run: str, rounds: int) -> None:
        self._tags = {"run": run.encode("ascii", "backslashreplace").decode()}  # Ray takes no other characters.
        self._gauges = {name: Gauge(f"raysim_{name}", text, tag_keys=("run",)) for name, text in _GAUGES.items()}
        self._counters = {name: Counter(f"raysim_{name}", text, tag_keys=("run",)) for name, text in _COUNTERS.items()}
        self._utilisation = Gauge("raysim_utilisation", "Busy share of a pool of actors.", tag_keys=("run", "role"))
        self._set("rounds", rounds)

    def round_finished(self, record: RoundRecord) -> None:
        """A round is committed. What it has no value of keeps its last one."""
        self._set("round", record.round_num)
        self._set("accuracy", record.accuracy)
        self._set("loss", record.loss)
        self._set("validation_accuracy", record.validation_accuracy)
        self._set("round_seconds", record.round_s)
        for role, value in (("client", record.client_utilisation), ("scorer", record.scorer_utilisation)):
            if value is not None:
                self._utilisation.set(value, {**self._tags, "role": role})
        counts = {
            "clients_ok": record.ok,
            "clients_lost": record.failed + record.excluded,
            "retries": record.retries,
        }
        for name, count in counts.items():
            if count:  # Ray refuses to count nothing.
                self._counters[name].inc(count, self._tags)

    def _set(self, name: str, value: float | None) -> None:
        if value is not None:
            self._gauges[name].set(value, self._tags)
