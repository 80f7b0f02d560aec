"""The tables of several runs as one data set, read again by others."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML
from test_imports import loaded
from typer.testing import CliRunner

from raysim.cli import app
from raysim.errors import ConfigError
from raysim.export import export, varied
from raysim.fields import flatten
from runs import TINY, run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three real runs: FedVG, by size with another seed, and one that failed in its second round."""
    folder = tmp_path_factory.mktemp("exported runs")
    run(folder / "a", "one", *TINY, "evaluation.validation=true", rounds=2, backend="serial")
    run(folder / "b", "one", *TINY, "weighting={name: size}", "seed=1", rounds=2, backend="serial")
    run(folder, "zwei ü", *TINY, "partition.alpha=0.5", rounds=2, backend="serial")
    (folder / "zwei ü" / "result.json").unlink()
    return folder


@pytest.fixture(scope="module")
def exported(runs: Path) -> Path:
    out = runs.with_name("data set")
    assert export([runs, runs / "a"], out) == ["a/one", "b/one", "zwei ü"]
    return out


def test_one_row_per_run_with_the_settings_that_differ(runs: Path, exported: Path):
    rows = pq.read_table(exported / "runs.parquet").to_pylist()
    assert [row["run"] for row in rows] == ["a/one", "b/one", "zwei ü"]
    assert [row["status"] for row in rows] == ["finished", "finished", "running"]
    assert [row["weighting.name"] for row in rows] == ["fedvg", "size", "fedvg"]
    assert [row["weighting.norm"] for row in rows] == ["l1", None, "l1"]
    assert [row["partition.alpha"] for row in rows] == [0.1, 0.1, 0.5]
    assert [row["seed"] for row in rows] == [0, 1, 0]
    assert {"name", "output.dir", "rounds", "client.batch_size"}.isdisjoint(rows[0])
    result = json.loads((runs / "a" / "one" / "result.json").read_text(encoding="utf-8"))
    assert rows[0]["final_accuracy"] == result["final"]["accuracy"]
    assert rows[0]["best_round"] == result["best"]["round"]
    assert rows[0]["chosen_round"] == result["best_validation"]["round"]
    assert rows[0]["chosen_validation_accuracy"] == result["best_validation"]["validation_accuracy"]
    assert rows[1]["chosen_accuracy"] is None
    assert rows[0]["params_checksum"] == result["checksums"]["params"]
    assert json.loads(rows[2]["config"])["partition"]["alpha"] == 0.5


@pytest.mark.parametrize(("table", "length"), [("rounds", 2), ("clients", 8)])
def test_the_tables_are_those_of_the_runs(runs: Path, exported: Path, table: str, length: int):
    whole = pq.read_table(exported / f"{table}.parquet")
    assert whole.num_rows == 3 * length
    own = whole.slice(length, length)
    assert set(own["run"].to_pylist()) == {"b/one"}
    parts = [pq.ParquetFile(path).read() for path in sorted((runs / "b" / "one" / table).iterdir())]
    rows = sorted(
        (row for part in parts for row in part.to_pylist()), key=lambda row: (row["round_num"], row.get("client_id"))
    )
    assert own.drop_columns(["run"]).to_pylist() == rows


def test_the_card_names_the_subsets_and_every_column(exported: Path):
    text = (exported / "README.md").read_text(encoding="utf-8")
    front = text.split("---\n")[1]
    configs = YAML(typ="safe", pure=True).load(front)["configs"]
    assert {config["config_name"]: config["data_files"] for config in configs} == {
        table: f"{table}.parquet" for table in ("runs", "rounds", "clients")
    }
    assert [config["config_name"] for config in configs if config.get("default")] == ["runs"]
    for config in configs:
        section = text.split(f"## {config['config_name']}\n")[1].split("\n## ")[0]
        columns = pq.read_schema(exported / config["data_files"]).names
        assert set(re.findall(r"^\| `(.*?)` \|", section, re.MULTILINE)) == set(columns)


def test_hugging_face_datasets_loads_it(exported: Path, tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    for table, length in (("runs", 3), ("rounds", 6), ("clients", 24)):
        loaded_set = datasets.load_dataset(str(exported), table, split="train", cache_dir=str(tmp_path))
        assert loaded_set.num_rows == length
        assert set(loaded_set["run"]) == {"a/one", "b/one", "zwei ü"}


def test_what_cannot_be_exported_is_said(runs: Path, exported: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="not an empty folder"):
        export([runs], exported)
    with pytest.raises(ConfigError, match="holds no run"):
        export([runs, tmp_path / "nothing"], tmp_path / "out")
    broken = tmp_path / "broken"
    shutil.copytree(runs / "a" / "one", broken)
    (broken / "rounds" / "00002.parquet").write_bytes(b"half")
    with pytest.raises(ConfigError, match="rounds: cannot be read"):
        export([broken], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (broken / "config.yaml").write_text("a: [", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.yaml: cannot be read"):
        export([broken], tmp_path / "out2")
    assert not (tmp_path / "out2").exists()


def test_the_command(runs: Path, tmp_path: Path):
    done = CliRunner().invoke(app, ["export", str(runs / "a"), "--out", str(tmp_path / "out")])
    assert (done.exit_code, done.stdout) == (
        0,
        f"wrote 1 run to {tmp_path / 'out'}: runs, rounds, clients, README.md\n",
    )
    assert pq.read_table(tmp_path / "out" / "runs.parquet")["run"].to_pylist() == ["one"]


def test_exporting_loads_neither_torch_nor_ray(runs: Path, tmp_path: Path):
    arguments = ["export", str(runs / "a"), "--out", str(tmp_path / "out")]
    code = f"import raysim.cli\nraysim.cli.app({arguments!r}, standalone_mode=False)"
    assert loaded(code, ("torch", "ray")) == []


def test_flat_settings_and_which_of_them_differ():
    first = flatten({"a": {"b": 1, "c": {"d": [1, 2]}}, "e": {}, "name": "x"})
    assert first == {"a.b": 1, "a.c.d": [1, 2], "e": {}, "name": "x"}
    assert varied([first, {**first, "a.c.d": [2, 1], "name": "y"}]) == ["a.c.d"]
    assert varied([{"a": None}, {}]) == ["a"]
    assert varied([{"a": 1}, {"a": True}]) == ["a"]
