"""`raysim bench`: what follows from measurements, and small real ones through the command line."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from ruamel.yaml import YAML
from typer.testing import CliRunner

from raysim.bench import PARTS
from raysim.bench.findings import Finding, Row, Split, config_lines, document, shown, sort_words, splits, table_of
from raysim.cli import app
from raysim.config import resolve
from raysim.errors import ConfigError
from raysim.recording.manifest import write_json

TINY = """\
rounds: 1
data: {name: digits}
partition: {clients: 6, alpha: 0.5}
model: {name: mlp}
client: {per_round: 3, local_epochs: 1}
weighting: {name: fedvg}
execution: {num_cpus: 2, num_gpus: 0, object_store_memory_mb: 100, client_actors: 1, scorer_actors: 1}
"""


# ---- splits ----


def pairs(found: list[Split]) -> list[tuple[int, int]]:
    return [(split.clients, split.scorers) for split in found]


def test_the_best_split_follows_the_work():
    found = splits(2.0, 6.0, 8, 10, None)
    assert pairs(found)[0] == (2, 6)
    assert found[0].seconds == pytest.approx(1.0)
    assert found == sorted(found, key=lambda split: split.seconds)
    assert sorted(pairs(found)) == [(clients, 8 - clients) for clients in range(1, 8)]


def test_the_slower_pool_decides():
    (split,) = splits(3.0, 5.0, 2, 10, None)
    assert split == Split(5.0, 1, 1)


def test_actors_that_share_cores_are_no_faster_than_the_cores():
    found = {(s.clients, s.scorers): s.seconds for s in splits(4.0, 4.0, 8, 10, 2)}
    assert found[4, 4] == found[2, 6] == pytest.approx(4.0)
    assert found[1, 7] == pytest.approx(4.0)
    assert pairs(splits(4.0, 4.0, 8, 10, 2))[0] == (4, 4), "among equals the evener load"


def test_more_actors_than_clients_do_not_help():
    assert pairs(splits(8.0, 4.0, 8, 4, None))[0] == (4, 4)


def test_without_scoring_all_actors_but_one_train():
    assert splits(3.0, 0.0, 4, 10, None) == [Split(1.0, 3, 1)]


@pytest.mark.parametrize("gpu_share", [None, "1/3"])
def test_the_suggestion_can_be_pasted(gpu_share):
    section, overrides = config_lines(Split(1.0, 2, 3), gpu_share)
    config = resolve(YAML(typ="safe").load(section))
    assert (config.execution.client_actors, config.execution.scorer_actors) == (2, 3)
    assert config.execution.client.num_gpus == config.execution.scorer.num_gpus == (gpu_share or "auto")
    from raysim.bench.command import bench_config

    assert bench_config(None, overrides.split()).execution == config.execution


# ---- words of the command ----


@pytest.mark.parametrize(
    ("words", "only", "expected"),
    [
        ([], [], (None, [], list(PARTS))),
        (["a.yaml", "rounds=2"], [], (Path("a.yaml"), ["rounds=2"], list(PARTS))),
        (["rounds=2"], [], (None, ["rounds=2"], list(PARTS))),
        (["overlap", "a=b"], ["efficiency"], (None, ["a=b"], ["efficiency", "overlap"])),
        (["a.yaml", "overlap"], ["traffic"], (Path("a.yaml"), [], ["overlap", "traffic"])),
        ([], ["scoring,startup"], (None, [], ["startup", "scoring"])),
        (["overlap"], [], (Path("overlap"), [], list(PARTS))),
    ],
)
def test_words_are_sorted(words, only, expected):
    assert sort_words(words, only) == expected


def test_wrong_words_are_explained():
    with pytest.raises(ConfigError, match="--only: speed is no part; parts are startup, efficiency"):
        sort_words([], ["speed"])
    with pytest.raises(ConfigError, match=r"b\.yaml is neither KEY=VALUE nor"):
        sort_words(["a.yaml", "b.yaml"], [])


def test_the_parts_have_measures():
    from raysim.bench.command import MEASURES

    assert list(MEASURES) == list(PARTS)


# ---- table and file ----


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, "-"), (0.01234, "0.0123"), (1.5, "1.5"), (12.345, "12.3"), (1234.5, "1,234"), (-13.24, "-13.2"), (0, "0")],
)
def test_numbers_are_short(number, text):
    assert shown(number) == text


def test_the_table_shows_every_row_and_what_was_skipped():
    rows = [Row.of("round", [3.0, 1.0, 2.0], "s", "two"), Row("size", 4.0, "MiB")]
    assert (rows[0].value, rows[0].least, rows[0].most) == (2.0, 1.0, 3.0)
    console = Console(file=io.StringIO(), width=120)
    console.print(table_of([Finding("traffic", rows), Finding("overlap", notes=["no"])], "digits"))
    text = console.file.getvalue()
    assert "2 s" in text
    assert "1 to 3" in text
    assert "4 MiB" in text
    assert "skipped, see below" in text


def test_the_file_holds_every_repeat(tmp_path):
    finding = Finding("overlap", [Row.of("round", [1.0, 2.0], "s")], {"splits": [Split(1.0, 2, 3)]}, ["note"])
    path = tmp_path / "bench.json"
    write_json(path, document({"started": "now"}, [finding]))
    read = json.loads(path.read_text(encoding="utf-8"))
    row = {"what": "round", "value": 1.5, "unit": "s", "least": 1.0, "most": 2.0, "detail": ""}
    assert read == {
        "schema": 1,
        "started": "now",
        "parts": {
            "overlap": {
                "rows": [row],
                "notes": ["note"],
                "raw": {"splits": [{"seconds": 1.0, "clients": 2, "scorers": 3}]},
            }
        },
    }


# ---- what the bare loop can do ----


def test_a_configuration_of_the_bare_loop_stays_as_it_is():
    from raysim.bench.bare import mirrored

    for weighting in ("fedvg", "size"):
        config = resolve({"weighting": {"name": weighting}, "client": {"optimizer": {"momentum": 0.9}}})
        assert mirrored(config) == (config, [])


def test_other_methods_are_measured_as_the_nearest_and_it_is_said():
    from raysim.bench.bare import mirrored

    config, notes = mirrored(
        resolve(
            {
                "algorithm": {"name": "scaffold"},
                "weighting": {"name": "loss"},
                "client": {"optimizer": {"name": "sgd", "lr": 0.5}},
                "scoring": {"batch_norm": "recalibrate"},
            }
        )
    )
    assert (config.algorithm.name, config.weighting.name, config.scoring.batch_norm) == ("fedavg", "fedvg", "batch")
    assert config.client.optimizer.lr == 0.5
    assert len(notes) == 3
    config, (note,) = mirrored(resolve({"client": {"optimizer": {"name": "adam", "lr": 0.1}}}))
    assert (config.client.optimizer.name, config.client.optimizer.lr) == ("sgd", 0.1)
    assert note == "optimizer adam is measured as sgd"


# ---- the command ----


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAYSIM_OUTPUT_DIR", str(tmp_path / "runs"))
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY, encoding="utf-8")
    return path


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "raysim", "bench", *map(str, arguments)]
    # A shell starts its background jobs with SIGINT ignored, and so would be this process in one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    finally:
        signal.signal(signal.SIGINT, before)


def measure(file: Path, path: Path, *parts: str) -> tuple[str, dict]:
    running = start(file, "--only", *parts, "--repeats", 1, "--json", path)
    try:
        out, errors = running.communicate(timeout=240)
    finally:
        running.kill()
    assert running.returncode == 0, errors
    assert all(f"{part} ..." in errors for part in parts)
    assert f"wrote {path}" in out
    return out, json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "speed"], "--only: speed is no part"),
        (["nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["execution.backend=serial"], "execution.backend: serial, but what is measured are actors on Ray"),
        (["client.local_epoch=1"], "command line: client.local_epoch: unknown key"),
    ],
)
def test_what_cannot_be_measured_is_explained(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.ray
def test_bench_measures_rounds(file, tmp_path):
    out, read = measure(file, tmp_path / "bench.json", "efficiency", "overhead", "traffic", "suggestion")
    assert read["schema"] == 1
    assert read["versions"]["raysim"]
    assert read["hardware"]["logical_cores"]
    assert read["started"].endswith("+00:00")
    assert read["config"]["model"]["name"] == "mlp"
    parts = read["parts"]
    assert list(parts) == ["efficiency", "traffic", "suggestion", "overhead"]
    raw = parts["efficiency"]["raw"]
    assert raw["processes"] == 2
    ratio = next(row for row in parts["efficiency"]["rows"] if row["what"] == "ratio")
    assert ratio["value"] == pytest.approx(raw["raysim_s"][0] / raw["bare_s"][0])
    assert len(parts["overhead"]["raw"]["LeNet-5"]["ms_per_client"]) == 1
    assert sum("object store is too small" in note for note in parts["overhead"]["notes"]) == 2
    assert parts["traffic"]["raw"]["model_bytes"] > 0
    assert parts["suggestion"]["raw"]["best"]["seconds"] > 0
    assert parts["suggestion"]["raw"]["paste"] in out


@pytest.mark.ray
@pytest.mark.slow
def test_bench_measures_pools(file, tmp_path):
    _, read = measure(file, tmp_path / "bench.json", "startup", "overlap", "scoring")
    parts = read["parts"]
    first, everything, round_1 = (row["value"] for row in parts["startup"]["rows"])
    assert 0 < first <= everything < round_1
    raw = parts["overlap"]["raw"]
    assert raw["overlapped"][0] > 0
    assert raw["train_then_score"][0] > 0
    assert 0 <= raw["idle_scorers"][0] <= 100
    for name in ("images_per_s", "bare_images_per_s"):
        assert {count: len(values) for count, values in parts["scoring"]["raw"][name].items()} == {"1": 1, "2": 1}
    slept = parts["scoring"]["raw"]["sleeping_s"]
    assert list(slept)[:4] == ["1", "2", "4", "8"]
    assert all(seconds > 1.0 for times in slept.values() for seconds in times)


@pytest.mark.ray
@pytest.mark.slow
def test_an_interrupted_bench_leaves_no_process(file, tmp_path):
    running = start(file, "--only", "traffic", "efficiency", "--json", tmp_path / "bench.json", "rounds=100")
    assert running.stderr is not None
    assert any(line.startswith("efficiency, 1 of") for line in running.stderr)
    os.killpg(running.pid, signal.SIGINT)
    out, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    assert "raysim: interrupted; the parts that were measured are kept" in errors
    assert "Traceback" not in out + errors
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(running.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.2)
    pytest.fail("processes are left")
