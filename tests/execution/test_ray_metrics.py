"""A run's metrics, scraped from Ray's own agent as Prometheus does it."""

from __future__ import annotations

import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from raysim.config import resolve
from raysim.errors import ConfigError
from runs import TINY, run


def scraped(port: int, name: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples of raysim's metrics with the tag `run`, by metric."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("ray_raysim_") and sample.labels.get("run") == name:
                found.setdefault(sample.name.removeprefix("ray_raysim_"), []).append((sample.labels, sample.value))
    return found


@pytest.mark.ray
@pytest.mark.slow
def test_prometheus_gets_what_the_tables_say(local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import ray

    monkeypatch.setenv("RAYSIM_FAULT", "kind=nan,client=1;kind=kill,client=2,round=2,attempt=1")
    name = 'ein Lauf "ü"'
    settings = (
        "client.per_round=6",
        "execution.prometheus=true",
        "evaluation.validation=true",
        "execution.client_actors=1",
        "execution.scorer_actors=1",
    )
    record = run(tmp_path, name, *TINY, *settings, rounds=3)
    rows = record.rounds.to_pylist()
    port = next(node["MetricsExportPort"] for node in ray.nodes() if node["Alive"])
    deadline, found = time.monotonic() + 60, {}
    while time.monotonic() < deadline:  # Processes report every few seconds.
        found = scraped(port, r'ein Lauf "\xfc"')
        if found.get("round", [({}, 0.0)])[0][1] == 3:
            break
        time.sleep(1)
    values = {key: samples[0][1] for key, samples in found.items() if key != "utilisation"}
    last = rows[-1]
    assert values == pytest.approx(
        {
            "round": 3,
            "rounds": 3,
            "accuracy": last["accuracy"],
            "loss": last["loss"],
            "validation_accuracy": last["validation_accuracy"],
            "round_seconds": last["round_s"],
            "clients_ok_total": 15,
            "clients_lost_total": 3,
            "retries_total": 1,
        }
    )
    busy = {labels["role"]: value for labels, value in found["utilisation"]}
    assert busy == pytest.approx({role: last[f"{role}_utilisation"] for role in ("client", "scorer")})


def test_serial_runs_have_no_agent(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"execution\.prometheus: true needs backend: ray"):
        resolve({"execution": {"backend": "serial", "prometheus": True}, "output": {"dir": str(tmp_path)}})
