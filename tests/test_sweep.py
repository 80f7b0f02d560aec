from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from typer.testing import CliRunner

import raysim
from raysim.cli import app
from raysim.config import load_config, resolve
from raysim.errors import ConfigError
from raysim.execution.jobs import Driver, Job, Unreachable
from raysim.sweep import jobs
from raysim.sweep.board import Board
from raysim.sweep.folder import SweepFolder, progressed, reclaim, run_point
from raysim.sweep.package import package
from raysim.sweep.settings import Sweep, load_sweep, point_id, same_numerics, slug

CONFIGS = Path(__file__).parents[1] / "configs"
TINY = """
run:
  rounds: 1
  data: {name: digits, train_images: 200}
  partition: {clients: 4, alpha: 0.5}
  model: {name: mlp}
  client: {per_round: 2, local_epochs: 1}
  execution: {backend: serial}
  output: {tensorboard: false}
"""
NASTY = [
    "two words",
    'it\'s "quoted"',
    "$HOME and ${PATH} `id` $(id)",
    "100% %20 %s",
    '{"json": [1, null]}',
    "line one\nline two\ttab",
    "données été 試験 é",
    "back\\slash; rm & | > < * ? ! # ~",
    "- : yes",
]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path):
    for name in ("RAYSIM_OUTPUT_DIR", "RAYSIM_DATA_ROOT", "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "study.yaml") -> Path:
    path = Path.cwd() / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def sweep(text: str, *overrides: str) -> Sweep:
    return load_sweep(write(text), overrides)


def problems(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        sweep(text, *overrides)
    return "\n".join(caught.value.problems)


def call(*arguments: object):
    return CliRunner().invoke(app, ["sweep", *map(str, arguments)])


def state(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "state.json").read_text(encoding="utf-8"))["points"]
    return {name: row["status"] for name, row in content.items()}


def results(folder: Path) -> dict[str, Any]:
    """Checksums of each finished point."""
    found = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/result.json")}
    return {name: result["checksums"] for name, result in found.items() if result["status"] == "finished"}


# ---- points ----


def test_the_example_has_twelve_points_of_five_rounds():
    loaded = load_sweep(CONFIGS / "sweep.yaml")
    assert len(loaded.points) == 12
    assert {point.config.rounds for point in loaded.points} == {5}
    assert {point.config.folder.parent for point in loaded.points} == {Path.cwd() / "runs" / "sweep"}
    assert loaded.points[1].settings == {"weighting.name": "size", "partition.alpha": 0.1, "seed": 1}
    assert loaded.points[1].name == "size-alpha0.1-seed1-3fa0af66"


def test_points_are_list_times_grid_times_seeds_and_names_come_before_settings():
    loaded = sweep(
        """
        run: {partition.clients: 8, client: {per_round: 4}}
        list:
          - {algorithm.mu: 0.3, algorithm.name: fedprox}
          - {algorithm: {name: fedavgm, momentum: 0.5}}
        grid: {partition.alpha: [0.1, 1], weighting.name: [uniform]}
        seeds: [7, 3]
        """
    )
    assert [(p.config.algorithm.name, p.config.partition.alpha, p.config.seed) for p in loaded.points] == [
        (name, alpha, seed) for name in ("fedprox", "fedavgm") for alpha in (0.1, 1.0) for seed in (7, 3)
    ]
    assert loaded.points[0].config.algorithm.mu == 0.3
    assert loaded.points[4].config.algorithm.momentum == 0.5
    assert loaded.points[0].config.partition.clients == 8


def test_the_base_is_relative_to_the_sweep_and_results_to_the_current_folder():
    write("rounds: 9\n", "elsewhere/base.yaml")
    path = write("base: base.yaml\n", "elsewhere/study.yaml")
    (point,) = load_sweep(path).points
    assert point.config.rounds == 9
    assert point.config.output.dir == Path.cwd() / "runs" / "study"


def test_the_command_line_sets_the_base_and_the_name_and_folder_of_the_sweep():
    text = "run: {rounds: 3}\noutput: {dir: mine}\nname: given\nseeds: 2\n"
    assert sweep(text).folder == Path.cwd() / "mine" / "given"
    loaded = sweep(text, "rounds=4", "name=other", "output.dir=/there")
    assert loaded.folder == Path("/there/other")
    assert {point.config.rounds for point in loaded.points} == {4}


def test_all_problems_are_listed_with_place_and_points():
    found = problems(
        """
        run: {rounds: x}
        seeds: 2
        grid:
          partition.alpha: [1, 0]
          wieghting.name: [size]
        """
    )
    assert "study.yaml:2: rounds: should be a whole number" in found
    assert "(all 4 points)" in found
    assert (
        "study.yaml:5: partition.alpha: should be greater than 0, got 0 (point alpha0-size-seed0 and 1 more)" in found
    )
    assert "study.yaml:6: wieghting: unknown key; did you mean weighting?" in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grd: {}\n", "study.yaml:1: grd: unknown key; did you mean grid?"),
        ("grid:\n  rounds: 3\n", "study.yaml:2: grid.rounds: should be a list, got 3"),
        ("grid: {rounds: []}\n", "should have at least 1 item"),
        ("seeds: 0\n", "study.yaml:1: seeds: should be greater than or equal to 1"),
        ("seeds: [1, 1]\n", "seeds: each may be given once"),
        ("name: a/b\n", "study.yaml:1: name: 'a/b' cannot be the name of a folder"),
        ("base: none.yaml\n", "study.yaml:1: base: "),
        ("grid: {name: [a]}\n", "name: points get names and folders of their own"),
        ("grid: {rounds: [1]}\nlist: [{rounds: 2}]\n", "rounds is set by grid and by list"),
        ("grid: {seed: [1]}\nseeds: 2\n", "seed is set by grid and by seeds"),
        ("grid: {algorithm: [{name: fedavg}], algorithm.name: [fedprox]}\n", "algorithm.name is a part of algorithm"),
        ("grid: {seed.x: [1]}\nrun: {seed: 1}\n", "seed.x: seed is not a section"),
        ("grid: {rounds..x: [1]}\n", "'rounds..x' is not a key path"),
        ("grid: {rounds: [1, 2, 1]}\n", 'points {"rounds": 1} and {"rounds": 1} are the same run'),
        ("list: [{algorithm.name: fedavg}, {weighting.name: size}]\n", "are the same run"),
    ],
)
def test_what_is_wrong_is_said(text, message):
    assert message in problems(text)


def test_a_setting_that_the_sweep_varies_is_refused_on_the_command_line():
    assert "the sweep sets partition.alpha itself (grid.partition.alpha)" in problems(
        "grid: {partition.alpha: [1]}\n", "partition.alpha=2"
    )


# ---- ids ----


def test_an_id_is_what_it_was():
    config = resolve({"data": {"name": "digits"}, "algorithm": {"name": "fedprox", "mu": 0.01}, "seed": 3})
    assert point_id(config) == "1ece9730"


def test_ids_depend_on_settings_and_on_nothing_else():
    first = sweep(
        "run: {rounds: 3, partition: {alpha: 0.5, clients: 10}}\ngrid: {seed: [1, 2], client.local_epochs: [1, 2]}\n"
    )
    other = sweep(
        """
        name: renamed
        run: {partition: {clients: 10}, execution: {backend: serial, retries: 9}, data: {root: /x}, output: {dir: y}}
        grid: {client.local_epochs: [3, 2, 1], rounds: [3], partition.alpha: [0.5], seed: [2, 1, 5]}
        """
    )

    def ids(loaded: Sweep) -> dict[tuple[int, int], str]:
        return {(point.config.seed, point.config.client.local_epochs): point.id for point in loaded.points}

    assert ids(first).items() <= ids(other).items()
    assert len(set(ids(other).values())) == 9


@pytest.mark.parametrize(
    ("values", "same"),
    [
        ({"rounds": 30, "deterministic": True, "algorithm": {"name": "fedavg"}}, True),
        ({"weighting": {"name": "size"}}, True),  # FedAvg's own.
        ({"execution": {"client_actors": 3, "address": "auto"}}, True),
        ({"execution": {"threads": 2}}, False),
        ({"execution": {"clients_per_call": 2}}, False),
        ({"data": {"path": "/a.npz"}}, False),
        ({"scoring": {"subset": {"images": 8}}}, False),
        ({"fusion": {"name": "fedlaw"}}, False),
        ({"seed": 1}, False),
    ],
)
def test_a_default_spelled_out_keeps_the_id_and_what_changes_numbers_changes_it(values, same):
    assert (point_id(resolve(values)) == point_id(resolve({}))) == same
    assert same_numerics(resolve(values), resolve({})) == same


def test_slugs_are_safe_and_short():
    assert slug({"weighting.name": "fedvg", "partition.alpha": 0.1}) == "fedvg-alpha0.1"
    assert slug({"algorithm": {"name": "fedprox", "mu": 0.1}}) == "fedprox-mu0.1"
    for text in NASTY:
        made = slug({"data.path": text * 20})
        assert len(made) <= 60
        assert shlex.quote(made) == made


# ---- running ----


def test_finished_points_are_skipped_failed_ones_tried_again_and_broken_off_ones_go_on():
    file = write(f"{TINY}grid: {{seed: [0, 1], data.train_images: [200, 99999]}}\n")
    first = call(file)
    assert first.exit_code == 3, first.output
    folder = Path("runs/study")
    (good, other) = sorted(results(folder))
    assert good.startswith("seed0-train_images200-")
    assert "2 of 4 points are not finished" in first.output
    assert "data.train_images: 99999, but digits has" in first.output
    assert sorted(state(folder).values()) == ["failed", "failed", "finished", "finished"]

    checksums = results(folder)
    before = (folder / good / "result.json").stat().st_mtime_ns
    # As a killed process leaves it.
    (folder / other / "result.json").unlink()
    assert progressed(load_config(folder / other / "config.yaml")).status == "unfinished"
    second = call(file)
    assert second.exit_code == 3
    assert "4 points, 1 finished before" in second.output
    assert results(folder) == checksums
    assert not (folder / "attempts").exists()
    assert raysim.load(folder / other).result["resumed_after"] == [raysim.load(folder / other).config.rounds]
    assert (folder / good / "result.json").stat().st_mtime_ns == before

    # A point is an ordinary run: its file gives the same numbers alone.
    alone = raysim.run(folder / "points" / f"{good}.yaml", ["output.dir=alone"])
    assert alone.result["checksums"] == checksums[good]
    stored = load_config(folder / good / "config.yaml")
    assert stored == load_config(folder / "points" / f"{good}.yaml")


def test_two_sweeps_in_one_folder_and_a_folder_of_something_else_are_refused():
    file = write(f"{TINY}seeds: 1\n")
    (Path("runs/study/.locks")).mkdir(parents=True)
    with FileLock("runs/study/.locks/sweep.lock"):
        refused = call(file)
    assert refused.exit_code == 2
    assert "another raysim sweep is at work in" in refused.output
    Path("runs/other/rounds").mkdir(parents=True)
    refused = call(file, "name=other")
    assert refused.exit_code == 2
    assert "exists and is no sweep" in refused.output


def test_a_point_that_was_another_run_begins_again_and_nothing_is_lost():
    file = write(f"{TINY}seeds: 1\n")
    assert call(file).exit_code == 0
    (point,) = load_sweep(file).points
    folder, checksums = point.config.folder, results(Path("runs/study"))
    stored = (folder / "config.yaml").read_text(encoding="utf-8")
    (folder / "config.yaml").write_text(stored.replace("batch_size: 32", "batch_size: 16", 1), encoding="utf-8")
    again = call(file)
    assert again.exit_code == 0, again.output
    assert f"{point.name} begins again, what was there is now" in again.output
    assert "batch_size: 32, but the run in" in again.output
    assert (folder.parent / "attempts" / f"{point.name}.1" / "result.json").is_file()
    assert results(Path("runs/study")) == checksums
    assert [record.folder.name for record in raysim.load_all("runs/study")] == [point.name], "attempts are no runs"


def test_points_carry_the_values_of_the_study():
    file = write(
        f"{TINY}seeds: 2\nlist: [{{algorithm: {{name: fedavg}}}}, {{algorithm: {{name: fedprox, mu: 0.5}}, fusion: null}}]\n"
    )
    shown = [point.config.output.hparams for point in load_sweep(file).points]
    assert shown == [{"seed": (0, 1), "algorithm.name": ("fedavg", "fedprox"), "algorithm.mu": (None, 0.5)}] * 4


def test_attempts_are_numbered(tmp_path):
    folder = tmp_path / "sweep" / "point"
    for number in (1, 2):
        folder.mkdir(parents=True)
        assert reclaim(folder) == tmp_path / "sweep" / "attempts" / f"point.{number}"
    assert reclaim(folder) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--entrypoint-cpus", "1"], "--entrypoint-cpus is for jobs"),
        (["--stop"], "--stop ends jobs"),
        (["--print", "--entrypoint-resource", "disk"], "'disk' is not NAME=AMOUNT"),
        (["--print", "--working-dir", "nowhere"], "nowhere is no folder"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    refused = call(write(f"{TINY}seeds: 1\n"), *options)
    assert refused.exit_code == 2, refused.output
    assert message in refused.output


# ---- quoting ----


def nasty_sweep(folder: Path) -> Path:
    """Texts that shells, YAML or URLs would spoil, as settings and in every path."""
    place = folder / 'it\'s 100% "here" $HOME é'
    place.mkdir(parents=True)
    file = place / "étude $1 'q'.yaml"
    content = {
        "name": 'my "study" $HOME 100% été\'s',
        "run": {
            "rounds": 1,
            "data": {"name": "digits", "train_images": 200},
            "partition": {"clients": 4},
            "model": {"name": "mlp"},
            "client": {"per_round": 2, "local_epochs": 1},
            "execution": {"backend": "serial"},
            "output": {"dir": str(place / "out $(x)"), "tensorboard": False},
        },
        "list": [{"data.root": str(place / text), "seed": seed} for seed, text in enumerate(NASTY)],
    }
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return file


def test_texts_reach_the_points_and_a_run_unchanged(tmp_path):
    file = nasty_sweep(tmp_path)
    loaded = load_sweep(file)
    folder = SweepFolder(loaded.folder)
    folder.create()
    folder.write(loaded)
    for point, text in zip(loaded.points, NASTY, strict=True):
        assert point.config.data.root == file.parent / text
        assert load_config(folder.point_file(point.name)) == point.config
    ran = raysim.run(folder.point_file(loaded.points[2].name))
    assert ran.config.data.root == file.parent / NASTY[2]
    assert raysim.load(ran.folder).config == loaded.points[2].config


def test_printed_lines_mean_the_same_to_bash(tmp_path):
    file = nasty_sweep(tmp_path)
    printed = call(
        file, "--print", "--max-concurrent", 2, "--entrypoint-resource", "it's=0.5", "--entrypoint-cpus", 0.25
    )
    assert printed.exit_code == 0, printed.output
    lines = printed.stdout.splitlines()
    assert len(lines) == len(NASTY)
    # `ray job submit` joins what comes after `--` with shlex.join, and the node hands that to a shell.
    script = 'ray() { printf "%s\\0" "$@"; printf "\\0"; }\n' + printed.stdout
    said = subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout.decode()
    for words, point in zip(said.split("\0\0")[:-1], load_sweep(file).points, strict=True):
        *options, _, python, _, _, command, url, _, parts = words.split("\0")
        assert options[:3] == ["job", "submit", "--submission-id"]
        assert options[3] == f"my_study_HOME_100_ete_s-{point.id}"
        assert options[4:] == ["--entrypoint-num-cpus", "0.25", "--entrypoint-resources", '{"it\'s": 0.5}']
        assert (python, command, parts) == ("python", "point", "2")
        assert shlex.quote(url) == url
        assert load_config(jobs.path_of(url)) == point.config


def test_printed_lines_leave_finished_points_out_and_count_attempts():
    file = write(f"{TINY}seeds: 3\n")
    assert len(call(file, "--print").stdout.splitlines()) == 3
    folder = SweepFolder(Path.cwd() / "runs" / "study")
    first, second, _ = load_sweep(file).points
    raysim.run(folder.point_file(first.name))
    # What a job does that is begun although its point is finished: nothing.
    written = (first.config.folder / "result.json").stat().st_mtime_ns
    again = CliRunner().invoke(app, ["point", folder.point_file(first.name).as_uri()])
    assert again.exit_code == 0, again.output
    assert (first.config.folder / "result.json").stat().st_mtime_ns == written
    second.config.folder.mkdir()
    lines = call(file, "--print").stdout.splitlines()
    assert [line.split()[4] for line in lines] == [
        f"study-{second.id}-2",
        f"study-{load_sweep(file).points[2].id}",
    ]


class LosingJobs:
    """A server that takes a job and whose answer is lost; the job runs, and has ended at the third look."""

    address = "http://head:8265"

    def __init__(self) -> None:
        self.entrypoints: dict[str, str] = {}
        self.looks = 0

    def submit(self, name: str, entrypoint: str, *_: object) -> None:
        self.entrypoints[name] = entrypoint
        if len(self.entrypoints) == 1:
            raise Unreachable("read timed out")

    def list(self) -> list[Job]:
        self.looks += bool(self.entrypoints)
        for entrypoint in self.entrypoints.values():
            run_point(jobs.path_of(entrypoint.split()[-1]))
        status = "RUNNING" if self.looks < 3 else "SUCCEEDED"
        return [Job(name, status, entrypoint, "", 0) for name, entrypoint in self.entrypoints.items()]

    def log(self, name: str) -> str:
        return ""


def test_a_submission_whose_answer_is_lost_is_not_made_twice():
    sweep = load_sweep(write(f"{TINY}seeds: 1\n"))
    folder = SweepFolder(sweep.folder)
    folder.create()
    folder.write(sweep)
    server, board = LosingJobs(), Board(sweep.name, sweep.points, None)
    jobs.JobSweep(sweep, folder, server, Driver(), {}, 1).run(sweep.points, board, 0)
    assert list(server.entrypoints) == [f"study-{sweep.points[0].id}"]
    assert board.rows[sweep.points[0].name].status == "finished"


# ---- the source that jobs are sent ----


def test_a_package_leaves_data_results_and_caches_at_home(tmp_path):
    source = tmp_path / "my project é"
    for name in (
        "raysim/data/idx.py",
        "main.py",
        "data/big.bin",
        "out/x",
        ".git/config",
        "a/__pycache__/x.pyc",
        "deep/toy/ten.npz",
        "deep/run/manifest.json",
        "deep/run/config.yaml",
        "deep/run/rounds/1.parquet",
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("x" * 10)
    target = tmp_path / "source.zip"
    assert package(source, target, [source / "deep" / "toy"], 100)[0] == 2
    with zipfile.ZipFile(target) as archive:
        assert sorted(archive.namelist()) == ["main.py", "raysim/data/idx.py"]
    first = target.read_bytes()
    (source / "main.py").touch()
    package(source, target, [source / "deep" / "toy"], 100)
    assert target.read_bytes() == first

    (source / "heavy").mkdir()
    np.zeros(2**20, dtype=np.uint8).tofile(source / "heavy" / "x.bin")
    with pytest.raises(ConfigError, match=r"has 1 MiB in 3 files, Ray takes 0; the largest folders: heavy/ \(1 MiB\)"):
        package(source, target, [source / "deep" / "toy"], 2**19)


# ---- lanes, signals ----


@pytest.mark.slow
def test_lanes_give_the_same_numbers_and_survive_the_death_of_one():
    file = write(f"{TINY}seeds: 4\n")
    assert call(file, "output.dir=one").exit_code == 0
    command = [
        sys.executable,
        "-m",
        "raysim",
        "sweep",
        str(file),
        "output.dir=two",
        "rounds=1",
        "--max-concurrent",
        "2",
    ]
    with subprocess.Popen(
        [*command, "--retries", "1"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while not (lanes := children(process.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(lanes[0], signal.SIGKILL)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert results(Path("two/study")) == results(Path("one/study"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lanes", "sent", "status"),
    [(1, signal.SIGINT, 130), (2, signal.SIGTERM, 143), (1, signal.SIGKILL, -9), (2, signal.SIGKILL, -9)],
)
def test_a_sweep_that_is_ended_goes_on_later_with_what_is_missing(lanes, sent, status):
    file = write(f"{TINY}grid: {{rounds: [1, 100000]}}\n")
    options = ["--max-concurrent", str(lanes)]
    command = [sys.executable, "-m", "raysim", "sweep", str(file), *options]
    folder = Path("runs/study")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        deadline = time.monotonic() + 120
        while not list(folder.glob("rounds1-*/result.json")) or not list(
            folder.glob("rounds100000-*/rounds/*.parquet")
        ):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        left = children(process.pid)
        process.send_signal(sent)
        try:
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == status, said
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in left):
        assert time.monotonic() < deadline, "a lane goes on"
        time.sleep(0.1)
    (long,) = folder.glob("rounds100000-*")
    recorded = long / "result.json"
    if sent != signal.SIGKILL or lanes > 1:
        assert json.loads(recorded.read_text())["status"] == "interrupted"
    else:
        assert not recorded.exists()
    if sent != signal.SIGKILL:
        assert sorted(state(folder).values()) == ["finished", "interrupted"]
        assert "the same command goes on with the others" in said
    # What is missing, and nothing else: the same points by shorter runs would be other ones.
    assert [line.split("rounds100000")[1][:1] for line in call(file, "--print").stdout.splitlines()] == ["-"]


def children(pid: int) -> list[int]:
    """The lanes of a sweep; multiprocessing's own helper process is none."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in task.read_text().split()]
    return [child for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
