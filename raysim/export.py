"""`raysim export`: the tables of many runs as one data set, in the layout that Hugging Face `datasets` loads.

    FOLDER/README.md         a card; its `configs:` name the three subsets
    FOLDER/runs.parquet      one row per run: how it ended, its metrics, the settings in which the runs differ
    FOLDER/rounds.parquet    one row per run and round
    FOLDER/clients.parquet   one row per run, round and client

`load_dataset("FOLDER", "rounds")` and `pandas.read_parquet("FOLDER/rounds.parquet")` read it. Every table has a column `run`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from raysim.errors import ConfigError
from raysim.fields import flatten
from raysim.recording.files import write_atomic
from raysim.recording.runfolder import find_runs
from raysim.recording.tables import COLUMNS, TableName, read_table

ALWAYS = ("seed", "data.name", "model.name", "algorithm.name", "weighting.name")
"""Settings that the table of runs has even if they are the same in all runs."""
_NAMES = ("name", "output.dir")
"""Settings that differ between any two runs and mean nothing."""
_ROUNDS = {
    "final": "the last round that was evaluated",
    "best": "the round with the best test accuracy, which was chosen by looking at the test set",
    "chosen": "the round with the best validation accuracy",
}
"""Rounds of a run that its row tells the metrics of."""
_METRICS = {
    "round": (pa.int32(), "Number of {}."),
    "accuracy": (pa.float64(), "Test accuracy of {}."),
    "macro_f1": (pa.float64(), "Test macro-F1 of {}."),
    "loss": (pa.float64(), "Test loss of {}."),
    "validation_accuracy": (pa.float64(), "Validation accuracy of {}; null unless asked for."),
}
_RUNS: Mapping[str, tuple[Any, str]] = {
    "run": (pa.string(), "Name of the run; unique."),
    "status": (pa.string(), "finished, failed, interrupted, or running if it has not ended yet."),
    "reason": (pa.string(), "Why it did not finish."),
    "rounds_done": (pa.int32(), "Rounds that were done; null while it runs."),
    "seconds": (pa.float64(), "From its begin to its end."),
    "finished": (pa.string(), "When it ended, UTC."),
    **{
        f"{which}_{name}": (kind, text.format(described))
        for which, described in _ROUNDS.items()
        for name, (kind, text) in _METRICS.items()
    },
    "params_checksum": (pa.string(), "Of the final global parameters."),
    "config": (pa.string(), "The whole resolved configuration, JSON."),
}


def export(folders: Sequence[Path], out: Path) -> list[str]:
    """Write the tables of all runs at or below some folders.

    Args:
        folders: Run folders, or folders that hold run folders.
        out: Where to; not there yet, or empty.

    Returns:
        The names of the runs.

    Raises:
        ConfigError: There is no run, a run cannot be read, or `out` has something in it.
    """
    runs = _named(folders)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out: {out} exists and is not an empty folder; give another one, or remove it")
    configs = {name: _config(folder) for name, folder in runs.items()}
    summary = _runs_table(runs, configs)
    out.mkdir(parents=True, exist_ok=True)
    try:
        _write(runs, summary, out)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)  # Nothing was in it before.
        raise
    return list(runs)


def _write(runs: Mapping[str, Path], summary: Any, out: Path) -> None:
    with write_atomic(out / "runs.parquet") as handle:
        pq.write_table(summary, handle)
    for table in COLUMNS:
        schema = read_table(out, table).schema.insert(
            0, pa.field("run", pa.string())
        )  # Of a folder without rounds: empty.
        with write_atomic(out / f"{table}.parquet") as handle, pq.ParquetWriter(handle, schema) as writer:
            for name, folder in runs.items():
                rows = _read(folder, table)
                writer.write_table(rows.add_column(0, "run", pa.array([name] * len(rows), pa.string())))
    with write_atomic(out / "README.md") as handle:
        handle.write(_card(summary).encode())


def _named(folders: Sequence[Path]) -> dict[str, Path]:
    """The runs, each once, called like its folder; by its path below the folder that all have in common if two are alike."""
    found: dict[Path, Path] = {}
    for folder in folders:
        below = find_runs(folder)
        if not below:
            raise ConfigError(f"{folder}: holds no run (no config.yaml, there or in the folders below)")
        found |= {path.resolve(): path for path in below}
    paths = sorted(found)
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        common = Path(os.path.commonpath(paths))
        names = [path.relative_to(common).as_posix() for path in paths]
    return dict(zip(names, paths, strict=True))


def _read(folder: Path, table: TableName) -> Any:
    try:
        return read_table(folder, table)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{folder / table}: cannot be read: {str(error).splitlines()[0]}") from error


def _config(folder: Path) -> dict[str, Any]:
    yaml: Any = YAML(typ="safe", pure=True)
    try:
        config = yaml.load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, YAMLError) as error:
        raise ConfigError(f"{folder / 'config.yaml'}: cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{folder / 'config.yaml'}: is not a configuration")
    return config


def varied(flat: Sequence[Mapping[str, Any]]) -> list[str]:
    """Key paths in whose values the configurations differ, in order; a key that one of them lacks differs."""
    keys = dict.fromkeys(key for config in flat for key in config)
    shown = [key for key in keys if len({json.dumps(config.get(key, ...), default=str) for config in flat}) > 1]
    return [key for key in shown if key not in _NAMES]


def _runs_table(runs: Mapping[str, Path], configs: Mapping[str, Mapping[str, Any]]) -> Any:
    flat = {name: flatten(config) for name, config in configs.items()}
    keys = dict.fromkeys([*ALWAYS, *varied(list(flat.values()))])
    rows = [_row(name, folder, configs[name]) for name, folder in runs.items()]
    table = pa.Table.from_pylist(rows, schema=pa.schema([(name, kind) for name, (kind, _) in _RUNS.items()]))
    for position, key in enumerate(keys, start=1):
        table = table.add_column(position, key, _column([config.get(key) for config in flat.values()]))
    return table


def _column(values: Sequence[Any]) -> Any:
    """Values of one type as they are, whole numbers beside others as such; a mixture as JSON."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return pa.array(values, pa.float64())
    if len(kinds) <= 1 and kinds <= {bool, int, float, str}:
        return pa.array(values, None if kinds else pa.string())
    return pa.array(
        [None if v is None else json.dumps(v, ensure_ascii=False, default=str) for v in values], pa.string()
    )


def _row(name: str, folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    path = folder / "result.json"
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else '{"status": "running"}'
        result: dict[str, Any] = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    row = {key: result.get(key) for key in ("status", "reason", "rounds_done", "seconds", "finished")}
    for which in _ROUNDS:
        metrics = result.get("best_validation" if which == "chosen" else which) or {}
        row |= {f"{which}_{name}": metrics.get(name) for name in _METRICS}
    checksum = (result.get("checksums") or {}).get("params")
    plain = json.dumps(config, ensure_ascii=False, default=str)
    return {**row, "run": name, "params_checksum": checksum, "config": plain}


def _card(runs: Any) -> str:
    """The data set's card: what `datasets` reads in front, for people below."""
    settings = [name for name in runs.schema.names if name not in _RUNS]
    run = {"run": _RUNS["run"][1]}
    described: dict[str, dict[str, str]] = {
        "runs": {name: text for name, (_, text) in _RUNS.items()} | {name: f"Setting `{name}`." for name in settings}
    }
    for table, columns in COLUMNS.items():
        described[table] = run | {name: text for name, (_, text) in columns.items()}
    lines = ["---", "configs:"]
    for name in described:
        lines += [f"- config_name: {name}", f"  data_files: {name}.parquet"]
        lines += ["  default: true"] if name == "runs" else []
    lines += [
        "---",
        "",
        "# Results of federated-learning simulations",
        "",
        f"{len(runs)} runs of raysim, three tables that share the column `run`:",
        "",
        "```python",
        "from datasets import load_dataset",
        "",
        'rounds = load_dataset("path/of/this/folder", "rounds", split="train").to_pandas()',
        "```",
    ]
    for name, texts in described.items():
        lines += ["", f"## {name}", "", "| column | is |", "|---|---|"]
        lines += [f"| `{column}` | {text} |" for column, text in texts.items()]
    return "\n".join(lines) + "\n"
