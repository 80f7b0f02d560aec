"""raysim from Python: what a notebook uses."""

from __future__ import annotations

import runpy
from pathlib import Path

import matplotlib
import pytest

import raysim
from raysim.config import load_config
from raysim.errors import ConfigError
from runs import checksums

EXAMPLE = Path(__file__).parent / "examples" / "weights_and_labels.py"
TINY = {
    "name": "tiny",
    "rounds": 1,
    "data": {"train_images": 120},
    "model": {"name": "mlp"},
    "partition": {"clients": 3, "alpha": 10},
    "client": {"per_round": 2, "local_epochs": 1},
    "execution": {"backend": "serial"},
    "output": {"tensorboard": False},
}


def test_a_configuration_may_be_a_mapping_a_file_or_checked(tmp_path):
    overrides = [f"output.dir={tmp_path}", "seed=3"]
    before = repr(TINY)
    from_mapping = raysim.run(TINY, [*overrides, "name=a"])
    assert repr(TINY) == before, "the caller's mapping is not changed"
    (tmp_path / "b.yaml").write_text(from_mapping.config.as_yaml(), encoding="utf-8")
    from_file = raysim.run(tmp_path / "b.yaml", ["name=b"])
    checked = load_config(tmp_path / "b.yaml")
    again = raysim.run(checked, ["name=c"])
    assert [r.config.seed for r in (from_mapping, from_file, again)] == [3, 3, 3]
    assert [r.folder.name for r in (from_mapping, from_file, again)] == ["a", "b", "c"]
    assert checksums(from_mapping) == checksums(from_file) == checksums(again)


def test_the_defaults_are_those_of_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("{}", encoding="utf-8")
    asked_for = []
    monkeypatch.setattr("raysim.simulation.prepare", lambda config: asked_for.append(config) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        raysim.run({})
    assert asked_for == [load_config("run.yaml")]


def test_mistakes_are_listed_like_those_of_a_file():
    with pytest.raises(ConfigError, match=r"client\.local_epoch: unknown key; did you mean client\.local_epochs\?"):
        raysim.run({"client": {"local_epoch": 5}})
    with pytest.raises(ConfigError, match=r"'seed' is not key\.path=value"):
        raysim.run(TINY, ["seed"])


def test_progress_is_shown_when_asked_for(tmp_path, capsys):
    raysim.run(TINY, [f"output.dir={tmp_path}"])
    assert capsys.readouterr() == ("", "")
    raysim.run(TINY, [f"output.dir={tmp_path}", "name=shown"], progress=True)
    assert "round 1/1" in capsys.readouterr().err


def test_a_record_shows_itself_in_one_line(tmp_path):
    record = raysim.run(TINY, [f"output.dir={tmp_path}"])
    accuracy = record.result["final"]["accuracy"]
    assert repr(record) == (
        f"RunRecord('tiny', finished, 1 of 1 rounds, accuracy {accuracy:.4f}, best {accuracy:.4f} in round 1, "
        f"{tmp_path / 'tiny'})"
    )
    (record.folder / "result.json").unlink()
    assert repr(raysim.load(record.folder)) == f"RunRecord('tiny', running, {record.folder})"


def test_tables_are_arrow_and_become_pandas(tmp_path):
    record = raysim.run(TINY, [f"output.dir={tmp_path}"])
    frame = record.clients.to_pandas()
    assert frame.weight.sum() == pytest.approx(1)
    assert frame.shape == (2, record.clients.num_columns)


@pytest.mark.ray
def test_the_example_runs_as_written(tmp_path, monkeypatch, local_ray, capsys):
    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    found = runpy.run_path(str(EXAMPLE))
    assert found["accuracy"].shape == (4, 4)
    assert -1 <= found["tau"].statistic <= 1
    assert (tmp_path / "weights.png").stat().st_size > 10_000
    assert "6 of 6 rounds" in capsys.readouterr().out
    assert checksums(found["longer"])[:4] == checksums(found["records"][2])[:4]
