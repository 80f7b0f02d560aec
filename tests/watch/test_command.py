"""The loop: what it prints where there is no terminal, and how it ends."""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from test_imports import loaded
from typer.testing import CliRunner

from raysim.cli import app
from raysim.errors import ConfigError
from raysim.watch.command import watch


def watched(folder: Path, **options: object) -> tuple[int, list[str]]:
    console = Console(file=io.StringIO(), width=80)
    status = watch(folder, console, interval_s=0.02, **options)
    return status, console.file.getvalue().splitlines()


def with_result(folder: Path, **changes: object) -> None:
    path = folder / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def test_without_a_terminal_a_line_per_round(finished: Path):
    status, lines = watched(finished)
    assert status == 0
    assert lines[0].startswith("fedavg + fedvg, mlp on digits")
    assert [line.split("  ")[0] for line in lines[1:4]] == ["round 1/3", "round 2/3", "round 3/3"]
    assert lines[4:] == ["finished"]


@pytest.mark.parametrize(("end", "status"), [("failed", 3), ("interrupted", 130)])
def test_the_exit_status_tells_the_end(folder: Path, end: str, status: int):
    with_result(folder, status=end, reason="disk full")
    assert watched(folder)[0] == status
    done = CliRunner().invoke(app, ["watch", "--once", str(folder)])
    assert done.exit_code == status
    assert f"{end}: disk full" in done.stdout


def test_a_run_that_goes_on_is_followed_to_its_end(folder: Path):
    """Rounds and result arrive while somebody watches; the folder is not there at first."""
    source = folder.with_name("source")
    folder.rename(source)

    def write() -> None:
        time.sleep(0.2)
        folder.mkdir()
        shutil.copy(source / "run.log", folder)
        time.sleep(0.1)
        shutil.copy(source / "config.yaml", folder)
        (folder / "rounds").mkdir()
        for number in (1, 2, 3):
            time.sleep(0.1)
            shutil.copy(source / "rounds" / f"{number:05d}.parquet", folder / "rounds")
        shutil.copy(source / "result.json", folder)

    thread = threading.Thread(target=write)
    thread.start()
    status, lines = watched(folder, wait_s=5)
    thread.join()
    assert status == 0
    assert lines[0] == f"waiting for a run in {folder}"[:200]
    assert [line.split("  ")[0] for line in lines[2:5]] == ["round 1/3", "round 2/3", "round 3/3"]
    assert lines[5:] == ["finished"]


def test_nothing_is_waited_for_for_ever(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no run within 0\.1 s"):
        watched(tmp_path / "nothing", wait_s=0.1)
    with pytest.raises(ConfigError, match="holds no run"):
        watched(tmp_path, once=True)


def test_a_folder_that_is_taken_back_is_told(folder: Path):
    (folder / "result.json").unlink()
    threading.Timer(0.2, shutil.rmtree, [folder]).start()
    with pytest.raises(ConfigError, match="was removed"):
        watched(folder, wait_s=5)


def test_several_runs(folder: Path, tmp_path: Path):
    shutil.copytree(folder, tmp_path / "sweep" / "b")
    shutil.copytree(folder, tmp_path / "sweep" / "a")
    with_result(tmp_path / "sweep" / "a", status="failed", reason="disk full")
    status, lines = watched(tmp_path / "sweep")
    assert status == 3
    assert {"a: failed: disk full", "b: finished"} <= set(lines)
    status, lines = watched(tmp_path / "sweep", once=True)
    assert status == 3
    assert lines[0].strip() == "2 runs: 1 finished, 1 failed"


def test_a_record_has_every_screen_with_something_new(finished: Path, tmp_path: Path):
    record = tmp_path / "record.txt"
    watched(finished, record=record)
    lines = record.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("--- 20")
    assert lines[1].startswith("tiny  finished")
    assert len(lines) % 25 == 0
    assert "\x1b" not in "".join(lines)


def test_on_a_terminal_ctrl_c_leaves_with_status_0_and_the_screen_as_it_was(folder: Path):
    (folder / "result.json").unlink()
    main, other = pty.openpty()
    command = [sys.executable, "-m", "raysim", "watch", str(folder), "--interval", "0.1"]
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=environment)
    os.close(other)
    text = b""
    while b"round 3/3" not in text:
        text += os.read(main, 65536)
    process.send_signal(signal.SIGINT)
    try:
        while chunk := os.read(main, 65536):
            text += chunk
    except OSError:  # Linux's way to say that the other end is closed.
        pass
    os.close(main)
    assert process.wait(10) == 0
    assert text.index(b"\x1b[?1049h") < text.index(b"\x1b[?1049l"), "leaves the alternate screen"
    assert (folder / "rounds" / "00003.parquet").is_file()


def test_watching_loads_neither_torch_nor_ray(finished: Path):
    code = f"import raysim.cli\nraysim.cli.app(['watch', '--once', {str(finished)!r}], standalone_mode=False)"
    assert loaded(code, ("torch", "ray", "pandas", "raysim.config")) == []
