from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from raysim.recording.progress import LiveProgress, PlainProgress, make_progress, summary_table


@pytest.fixture
def plain():
    return Console(file=io.StringIO(), width=40)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    return Console(file=io.StringIO(), force_terminal=True, width=100, height=30, _environ={"TERM": "xterm-256color"})


@pytest.fixture
def clock():
    now = [100.0]

    def read() -> float:
        return now[0]

    read.now = now
    return read


def test_one_line_per_round(plain, clock, make_round):
    with PlainProgress(30, plain, clock) as progress:
        progress.round_finished(make_round(0, accuracy=0.1, loss=2.302585, updated=False))
        for round_num in (1, 2):
            progress.round_started(round_num, 10, scored=True)
            for client_id in range(10):
                progress.client_trained(client_id)
                progress.client_scored(client_id)
            clock.now[0] += 1.8
            fields = {"accuracy": 0.8125, "loss": 0.61} if round_num == 2 else {}
            progress.round_finished(make_round(round_num, sampled=10, ok=10, updated=True, **fields))
        progress.message("[bold]client 3[/] failed: a sentence longer than the console is wide")
    # Lines are not wrapped to the console's width of 40; brackets are text. Remaining: 29 and 28 rounds of 1.8 s.
    assert plain.file.getvalue().splitlines() == [
        "round 0/30  accuracy 0.1000  loss 2.303  1.8 s",
        "round 1/30  clients 10/10  1.8 s  eta 0:52",
        "round 2/30  accuracy 0.8125  loss 0.61  clients 10/10  1.8 s  eta 0:50",
        "[bold]client 3[/] failed: a sentence longer than the console is wide",
    ]


def test_faults_and_the_last_round(plain, clock, make_round):
    progress = PlainProgress(30, plain, clock)
    progress.round_started(29, 4, scored=False)
    progress.client_trained(0)
    clock.now[0] += 3723
    progress.round_finished(make_round(29, sampled=4, failed=3, excluded=1, round_s=3723.0))
    progress.round_started(30, 2, scored=False)
    progress.client_trained(0)
    progress.round_finished(make_round(30, sampled=2, ok=1, skipped=1, updated=True))
    assert plain.file.getvalue().splitlines() == [
        "round 29/30  clients 0/4  excluded 1  failed 3  no usable update  3723.0 s  eta 1:02:03",
        "round 30/30  clients 1/2  skipped 1  1.8 s",
    ]


def test_live_display(terminal, clock, make_round):
    with LiveProgress(3, terminal, clock) as progress:
        progress.round_finished(make_round(0, accuracy=0.1, loss=2.3))
        progress.round_started(1, 10, scored=True)
        progress.client_trained(4)
        progress.client_trained(5)
        progress.client_scored(4)
        progress._live.refresh()
        progress.message("client [3] failed")
        clock.now[0] += 61
        progress.round_finished(make_round(1, sampled=10, ok=9, failed=1, updated=True, accuracy=0.8125))
        progress._live.refresh()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.file.getvalue())
    assert "round 1: trained 2/10, scored 1/10" in shown
    assert "client [3] failed" in shown
    assert "round 1: failed 1" in shown
    assert "accuracy 0.8125  1.8 s/round  eta 2:02" in shown
    assert terminal.file.getvalue().endswith("\x1b[?25h")  # The cursor is back.


def test_live_display_ends_after_an_error(terminal):
    def fail() -> None:
        with LiveProgress(3, terminal) as progress:
            progress.round_started(1, 10, scored=False)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert terminal.file.getvalue().endswith("\x1b[?25h")


def test_live_only_on_a_terminal(terminal, plain):
    assert isinstance(make_progress(3, terminal), LiveProgress)
    assert isinstance(make_progress(3, plain), PlainProgress)
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(make_progress(3, dumb), PlainProgress)


def test_summary(make_round, tmp_path):
    used = {"sampled": 10, "updated": True, "train_s": 1.0, "client_utilisation": 0.9, "scorer_utilisation": 0.8}
    records = [
        make_round(0, accuracy=0.1, loss=2.3),
        make_round(1, **used, ok=10, accuracy=0.875, macro_f1=0.5, loss=0.6, evaluate_s=0.5, retries=2),
        make_round(2, **used, ok=8, failed=1, excluded=1, accuracy=0.75, macro_f1=0.25, loss=0.7, evaluate_s=0.25),
        make_round(3, **{**used, "updated": False, "client_utilisation": 0.6}, skipped=10),
    ]
    console = Console(file=io.StringIO(), width=200)
    console.print(summary_table(records, folder=tmp_path / "[run]"))
    rows = dict(line.split("  ", 1) for line in console.file.getvalue().splitlines())
    assert {key.strip(): text.strip() for key, text in rows.items()} == {
        "rounds": "3 (1 left the global model as it was)",
        "accuracy": "0.7500 (best 0.8750 in round 1)",
        "macro-F1": "0.2500",
        "loss": "0.7000",
        "time per round": "1.80 s (train 1.00, evaluate 0.25)",
        "pools": "client actors busy 80%, scorer actors busy 80%",
        "clients": "18 of 30 updates used, 10 skipped, 1 excluded, 1 failed",
        "retries": "2",
        "results": str(tmp_path / "[run]"),
    }


def test_summary_of_a_run_without_evaluation(make_round, tmp_path):
    console = Console(file=io.StringIO(), width=200)
    console.print(summary_table([make_round(0)], folder=tmp_path))
    assert console.file.getvalue().split() == ["rounds", "0", "results", str(tmp_path)]
