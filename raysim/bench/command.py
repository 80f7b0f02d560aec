"""All parts, one after the other, and the file that grows with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from raysim.bench.findings import Finding, document
from raysim.bench.stand_ins import overhead
from raysim.bench.workload import Bench, efficiency, overlap, scoring, startup, suggestion, traffic
from raysim.config import RunConfig, load_config, resolve
from raysim.configfile import KeyPath, apply_overrides
from raysim.errors import ConfigError
from raysim.recording.manifest import build_manifest, write_json

MEASURES: dict[str, Callable[[Bench], Finding]] = {
    measure.__name__: measure for measure in (startup, efficiency, overlap, traffic, suggestion, scoring, overhead)
}


def bench_config(file: Path | None, overrides: Sequence[str]) -> RunConfig:
    """The configuration to measure with; without a file, LeNet-5 on scikit-learn's digits, which need no download.

    Raises:
        ConfigError: All problems.
    """
    if file is not None:
        return load_config(file, overrides)
    values: dict[str, Any] = {
        "name": "digits",
        "data": {"name": "digits"},
        "partition": {"clients": 20, "alpha": 0.1},
        "client": {"per_round": 10, "local_epochs": 5, "batch_size": 16},
        "weighting": {"name": "fedvg"},
    }
    places: dict[KeyPath, str] = {}
    apply_overrides(values, places, overrides)
    return resolve(values, places=places)


def run_bench(
    config: RunConfig,
    parts: Sequence[str],
    repeats: int,
    path: Path,
    say: Callable[[str], None],
    command: Sequence[str] | None = None,
) -> list[Finding]:
    """Measure parts and write what is found, after each of them.

    Args:
        config: The run to measure with.
        parts: Names in `MEASURES`.
        repeats: How often each measurement is repeated.
        path: The JSON file; its folder is made.
        say: Told how it goes, line by line.
        command: The command line, for the file.

    Raises:
        ConfigError: The configuration cannot run.
        RunError: Something failed while it was measured; what was found before is in the file.
    """
    manifest = build_manifest(command=command, started=datetime.now(UTC), repeats=repeats, config=config.as_dict())
    findings = []
    with contextlib.closing(Bench(config, repeats, say)) as bench:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{path.parent}: cannot be created: {error.strerror}") from None
        for part in parts:
            say(f"{part} ...")
            findings.append(MEASURES[part](bench))
            write_json(path, document(manifest, findings))
    return findings
