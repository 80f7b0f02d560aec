from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from raysim.cli import app
from raysim.errors import ConfigError
from raysim.report.command import write_report

FIGURES = {"learning-curves", "mean-ranks", "weights-1"}


def report(*arguments: object):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def numbers(folder) -> dict:
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_study(tmp_path, make_run):
    rng = np.random.default_rng(0)
    for better, weighting in enumerate(("size", "fedvg", "uniform")):
        for seed in range(6):
            values = (0.1, 0.3 + 0.2 * better + 0.05 * rng.uniform())
            make_run(tmp_path / "ünder score" / f"{weighting}{seed}", values, seed=seed, weighting=weighting, clients=3)
    make_run(tmp_path / "ünder score" / "failed", seed=9, status="failed")
    done = report(tmp_path / "ünder score", "--target", "0.5")
    assert done.exit_code == 0, done.output
    assert "left out: " in done.output
    assert "No p can survive the correction: with 6 pairs" in done.output
    out = tmp_path / "ünder score" / "report"
    assert {path.name for path in out.iterdir()} == {f"report.{kind}" for kind in ("md", "html", "tex", "json")} | {
        "figures"
    }
    assert {path.stem for path in (out / "figures").iterdir()} == FIGURES
    found = numbers(out)
    assert found["left_out"][0]["reason"] == "failed after 3 of 3 rounds"
    assert [row["n"] for row in found["results"]] == [6, 6, 6]
    assert found["rounds_to"]["rows"][0]["target"] == 0.5
    for one in found["comparisons"]:
        assert (one["p"], one["p_holm"], one["significant"]) == (0.03125, 0.09375, False)
    assert [one["test"]["effect"] for one in found["comparisons"]] == [1.0, -1.0, -1.0]
    text = (out / "report.md").read_text(encoding="utf-8")
    assert "| fedvg | 6 |" in text
    assert "not decided" in text
    before = {path.name: path.read_bytes() for path in out.rglob("*.*") if path.is_file()}
    assert report(tmp_path / "ünder score", "--target", "0.5").exit_code == 0
    assert {path.name: path.read_bytes() for path in out.rglob("*.*") if path.is_file()} == before


def test_a_single_run(tmp_path, make_run):
    run = make_run(tmp_path / "one", (None, 0.4))
    done = report(run, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "one seed only" in done.output
    assert numbers(tmp_path / "out")["comparisons"] == []
    assert "Comparison of methods" not in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")


def test_a_run_of_an_older_version(tmp_path, make_run):
    """Without partition, manifest, table of clients, and most columns."""
    run = make_run(tmp_path / "old", (0.1, 0.2))
    (run / "partition.parquet").unlink()
    (run / "manifest.json").unlink()
    for path in (run / "clients").iterdir():
        path.unlink()
    for path in (run / "rounds").iterdir():
        pq.write_table(pq.ParquetFile(path).read().select(["round_num", "accuracy"]), path)
    done = report(tmp_path)
    assert done.exit_code == 0, done.output
    assert "did not record a hash of the data" in done.output
    assert numbers(tmp_path / "report")["results"][0]["last"]["mean"] == 0.2


@pytest.mark.slow
def test_nasty_names(tmp_path, make_run):
    names = (r"a_b & <script> | 50% \x", "é {$y$} [red]", "_hidden")
    for index, name in enumerate(names):
        make_run(tmp_path / str(index), (0.1 * index + 0.1,), weighting={"name": "mix", "share": name}, clients=2)
    done = report(tmp_path)
    assert done.exit_code == 0, done.output
    assert "[red]" in done.output
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "a_b &amp; &lt;script&gt; | 50% \\x" in page


def test_nothing_readable(tmp_path):
    done = report(tmp_path, tmp_path / "absent")
    assert done.exit_code == 2
    assert f"raysim: {tmp_path / 'absent'}: is not a folder" in done.output
    assert not (tmp_path / "report").exists()


def test_wrong_arguments_are_listed(tmp_path, make_run):
    make_run(tmp_path / "one", (0.1,), clients=2)
    with pytest.raises(ConfigError) as error:
        write_report([tmp_path], measure="best", targets=[90])
    assert len(error.value.problems) == 2
    with pytest.raises(ConfigError, match="at_best_validation: no run has it"):
        write_report([tmp_path], measure="at_best_validation")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out: cannot create"):
        write_report([tmp_path], tmp_path / "file")


@pytest.mark.slow
def test_sixty_settings_and_three_hundred_clients(tmp_path, make_run):
    rng = np.random.default_rng(0)
    for method in range(15):
        for alpha in (0.1, 0.2, 0.5, 1.0):
            for seed in range(2):
                folder = tmp_path / f"{method}-{alpha}-{seed}"
                weighting = {"name": "fedvg", "eps": 10.0**-method}
                clients = 300 if method < 2 else 3
                make_run(folder, rng.uniform(size=2), seed=seed, alpha=alpha, weighting=weighting, clients=clients)
    done = report(tmp_path)
    assert done.exit_code == 0, done.output
    found = numbers(tmp_path / "report")
    assert len(found["results"]) == 60
    assert len(found["comparisons"]) == 105
    assert "Grey: the means of the 7 methods" in found["figures"]["learning-curves"]
