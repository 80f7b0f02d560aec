"""The screens, as text of a fixed size."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from raysim.watch.follow import Follower
from raysim.watch.shapes import Curve, Stacked, bar, histogram, short
from raysim.watch.view import ago, headline, many, round_line, screen, status_text
from runs import TINY, run


def lines_of(renderable: object, width: int, height: int | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, legacy_windows=False)
    console.print(renderable, height=height)
    return console.file.getvalue().splitlines()


def seen(folder: Path, **options: object) -> Follower:
    follower = Follower(folder, **options)
    follower.look(10)
    return follower


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (60, 16), (200, 60)])
def test_a_screen_is_as_large_as_the_terminal(finished: Path, width: int, height: int):
    lines = lines_of(screen(seen(finished), height), width, height)
    assert len(lines) == height
    assert {len(line) for line in lines} <= set(range(width + 1))


def test_a_screen_says_what_the_tables_say(finished: Path):
    follower = seen(finished)
    text = "\n".join(lines_of(screen(follower, 24), 80, 24))
    newest = follower.newest
    best = max(follower.rows, key=lambda row: row["accuracy"])
    assert "tiny  finished" in text
    assert "round 3/3" in text
    assert "fedavg + fedvg, mlp on digits, 6 clients, 4 per round, serial" in text
    assert f"accuracy {newest['accuracy']:.4f} best {best['accuracy']:.4f} in {best['round_num']}" in text
    least = min(follower.rows, key=lambda row: row["loss"])
    assert f"loss {newest['loss']:.4f} best {least['loss']:.4f} in {least['round_num']}" in text
    assert f"round 3: 4 of 4 clients, weight entropy {newest['weight_entropy']:.2f} of 1.39" in text
    for row in follower.clients:
        assert f"{row['weight']:.3f} █" in text
        assert f" {row['client_id']} " in text
    heaviest_first = sorted(follower.clients, key=lambda row: -row["weight"])
    shown = [line.split()[1] for line in text.splitlines() if " █" in line and " 0." in line and line.startswith("│")]
    assert shown[:4] == [str(row["client_id"]) for row in heaviest_first]
    mean = sum(row["round_s"] for row in follower.rows) / 3
    assert f"{mean:.2f} s per round (mean of the last 3)" in text
    assert f"train {sum(row['train_s'] for row in follower.rows) / 3:.2f}" in text
    assert "no faults" in text
    assert "100%" in text


def test_many_clients_are_shown_by_quantiles_and_extremes(tmp_path: Path):
    settings = ("partition.clients=40", "partition.min_examples=1", "client.per_round=40", "weighting.name=size")
    follower = seen(run(tmp_path, "many", *TINY, *settings, rounds=1, backend="serial").folder)
    weights = sorted(row["weight"] for row in follower.clients if row["weight"] is not None)
    lines = lines_of(screen(follower, 24), 80, 24)
    (row,) = [line for line in lines if line.startswith("│ weight ")]
    shown = row.split()[2:7]
    assert (shown[0], shown[2], shown[4]) == (
        short(weights[0]),
        short((weights[19] + weights[20]) / 2),
        short(weights[-1]),
    )
    heaviest = max(follower.clients, key=lambda row: row["weight"])
    assert any(f" {heaviest['client_id']} {heaviest['num_examples']} {weights[-1]:.3f} ███" in line for line in lines)
    assert not any("│ score " in line for line in lines), "weights by size score nothing"


def test_faults_are_counted_and_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAYSIM_FAULT", "kind=nan,client=2,round=1;kind=nan,round=2")
    follower = seen(run(tmp_path, "faulty", *TINY, "client.per_round=6", rounds=2, backend="serial").folder)
    text = "\n".join(lines_of(screen(follower, 32), 100, 32))
    assert "excluded 7" in text
    assert "no update was usable: the global model stays" in text
    assert "round 2: client 0 excluded: non-finite update" in text


def test_a_run_without_news_says_so_and_has_no_eta(folder: Path):
    (folder / "result.json").unlink()
    follower = seen(folder)
    ahead = follower._now() + 720
    follower._now = lambda: ahead
    assert status_text(follower).plain.startswith("no news for 12 min (a round takes ")
    assert "eta" not in "\n".join(lines_of(screen(follower, 24), 80, 24))


def test_before_the_first_round_the_log_is_shown(folder: Path):
    for name in ("rounds", "clients"):
        shutil.rmtree(folder / name)
    (folder / "result.json").unlink()
    text = "\n".join(lines_of(screen(seen(folder), 24), 80, 24))
    assert "starting" in text
    assert "ready for round 1 after" in text
    (folder / "config.yaml").unlink()
    assert headline(seen(folder)) == "no config.yaml yet: data are read and processes start"


def test_markup_in_names_is_text(folder: Path):
    path = folder / "config.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("name: tiny", "name: '[red]x[/red] %s'"), encoding="utf-8")
    follower = seen(folder)
    assert "[red]x[/red] %s  finished" in lines_of(screen(follower, 24), 80, 24)[0]
    assert "[red]x[/red] %s" in lines_of(many([("[red]x[/red] %s", follower)], 24), 100)[2]


def test_one_line_for_each_of_many_runs(folder: Path, tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "result.json").unlink()
    runs = [("running one", seen(other)), *((f"old {i}", seen(folder)) for i in range(30))]
    lines = lines_of(many(runs, 10), 100)
    assert len(lines) == 10
    assert lines[0].strip() == "31 runs: 1 running, 30 finished"
    assert lines[2].split()[:4] == ["running", "running", "one", "3/3"]
    assert lines[-1].strip() == "... and 24 older: 24 finished"


def test_a_round_as_a_line(finished: Path):
    follower = seen(finished)
    row = follower.rounds[2]
    assert round_line(follower, 2) == (
        f"round 2/3  accuracy {row['accuracy']:.4f}  loss {row['loss']:.4f}  clients 4/4  {row['round_s']:.1f} s"
    )


def test_a_rising_curve_goes_from_the_lower_left_to_the_upper_right():
    lines = lines_of(Curve([(1, 0.0), (5, 0.5), (9, 1.0)], 9, "green"), 14, 4)
    assert [line[7:] for line in lines[0:4]] == ["     ⡠⠊"[:7], *(line[7:] for line in lines[1:4])]
    dots = [[i for i, char in enumerate(line[7:]) if char not in " ⠀"] for line in lines]
    assert dots[0][-1] > dots[1][-1] > dots[2][-1] > dots[3][-1]
    assert dots[3][0] == 0
    assert lines[0].startswith("1.0000 ")
    assert lines[3].startswith("0.0000 ")


def test_a_curve_ends_where_the_run_is():
    (line,) = lines_of(Curve([(1, 0.3), (2, 0.3)], 11, "green"), 18, 1)
    assert len(line.rstrip()) == 7 + 2  # A tenth of eleven cells.
    assert lines_of(Curve([], 11, "green"), 40, 2)[0] == "no round was evaluated yet"
    assert lines_of(Curve([(1, float("nan")), (2, 0.5)], 3, "green"), 18, 1)[0].startswith("0.5000 ")


def test_bars():
    assert bar(0.5, 4) == "██  "
    assert bar(1.0, 4) == "████"
    assert bar(0.3, 4) == "█▎  "
    assert bar(1e-9, 4) == "▏   "
    assert bar(0.0, 4) == "    "


def test_sections_of_a_stacked_bar_add_up():
    first, second = lines_of(Stacked([("train", 3.0), ("score", 1.0), ("rest", 0.0)], ["red", "blue", "green"]), 40)
    assert first == "█" * 30 + "▓" * 10
    assert second == "█train 3.00  ▓score 1.00  ▒rest 0.00"


def test_a_histogram_counts():
    assert histogram([0, 0, 0, 0, 1, 1, 3], 4) == "█▄ ▂"
    assert histogram([2.0], 3) == "█  "


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0.0000"), (0.12345, "0.1235"), (64.928, "64.928"), (123.456, "123.46"), (12345.6, "12346")],
)
def test_numbers_are_short(value: float | None, text: str):
    assert short(value) == text


def test_small_and_large_numbers_are_short():
    assert (short(1.234e-5), short(-2.5e7)) == ("1.2e-5", "-2.5e7")


def test_spans():
    assert [ago(s) for s in (4.4, 720, 7200, 260_000)] == ["4 s", "12 min", "2 h", "3 days"]
