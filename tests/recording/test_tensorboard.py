from __future__ import annotations

from urllib.parse import unquote

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from raysim.errors import RunError
from raysim.recording.tensorboard import TensorBoardWriter, escape

ROUND = {
    **{"sampled": 3, "ok": 2, "failed": 1, "updated": True, "retries": 2},
    **{"loss": 1.5, "accuracy": 0.5, "macro_f1": 0.4, "recall": (0.5, None)},
    **{"weight_max": 0.75, "weight_entropy": 0.5, "client_utilisation": 0.9, "scorer_utilisation": 0.8},
    **{"train_s": 1.0, "score_tail_s": 0.25, "aggregate_s": 0.1, "evaluate_s": 0.2, "commit_s": 0.05},
}
PARTS = ("train", "score_tail", "aggregate", "evaluate", "commit", "round")
ROUND_TAGS = {
    *("global/loss", "global/accuracy", "global/macro_f1", "global/recall/a%2Fb"),
    *("weight/entropy", "weight/max", "validation/loss_median", "validation/accuracy_median"),
    *(
        "layer/conv1/norm_median",
        "layer/fc/norm_median",
        "pool/client/utilisation",
        "pool/scorer/utilisation",
        "pool/driver_bytes",
    ),
    *(f"time/{part}" for part in PARTS),
    *(f"fault/{kind}" for kind in ("retries", "failed", "excluded", "skipped")),
}


@pytest.fixture
def make_writer(tmp_path):
    def make(**options):
        defaults = {"class_names": ["a/b", "Pneumonie \u00e0 virus"], "unit_names": ["conv1", "fc"], "num_clients": 20}
        return TensorBoardWriter(tmp_path, **{**defaults, **options})

    return make


@pytest.fixture
def events(tmp_path):
    def read():
        accumulator = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
        return accumulator.Reload()

    return read


@pytest.fixture
def clients(make_client):
    def make(round_num=1, count=2):
        scored = [
            make_client(
                *(one, round_num), score=one + 1.0, weight=(one + 1) / 10, unit_norms=(one + 1.0, 2.0),
                validation_loss=float(one), validation_accuracy=0.5,
            )
            for one in range(count)
        ]  # fmt: skip
        return [*scored, make_client(count, round_num, status="failed", reason="timed out")]

    return make


def test_tags_steps_and_values(make_writer, events, make_round, clients):
    writer = make_writer()
    writer.write_round(make_round(0, accuracy=0.125), [])
    writer.write_round(make_round(1, **ROUND), clients(1))
    writer.write_round(make_round(2, **{**ROUND, "accuracy": None, "recall": None}), clients(2))
    writer.close()
    seen = events()
    each_client = {f"{name}/client_00{one}" for name in ("score", "weight") for one in (0, 1)}
    assert set(seen.Tags()["scalars"]) == ROUND_TAGS | each_client
    assert set(seen.Tags()["histograms"]) == {"score/dist", "weight/dist"}
    assert [event.step for event in seen.Scalars("global/accuracy")] == [0, 1]  # Not evaluated: no point.
    assert [event.step for event in seen.Scalars("score/client_001")] == [1, 2]
    assert [event.value for event in seen.Scalars("score/client_001")] == [2.0, 2.0]
    assert seen.Scalars("layer/conv1/norm_median")[0].value == 1.5
    assert seen.Scalars("validation/loss_median")[0].value == 0.5
    assert seen.Scalars("fault/retries")[1].value == 2.0
    assert seen.Scalars("global/loss")[0].wall_time == pytest.approx(make_round(1).finished.timestamp())


def test_flushed_after_each_round(make_writer, events, make_round, clients):
    writer = make_writer()
    writer.write_round(make_round(1, **ROUND), clients())
    assert len(events().Scalars("global/loss")) == 1
    writer.close()


def test_many_clients_are_quantiles(make_writer, events, make_round, clients):
    writer = make_writer(num_clients=60)
    writer.write_round(make_round(1, **ROUND), clients(count=11))
    writer.close()
    seen = events()
    labels = ("min", "p10", "median", "p90", "max")
    quantiles = {f"{name}/{label}" for name in ("score", "weight") for label in labels}
    assert set(seen.Tags()["scalars"]) == ROUND_TAGS | quantiles
    assert [seen.Scalars(f"score/{label}")[0].value for label in labels] == [1.0, 2.0, 6.0, 10.0, 11.0]
    # One tag, one point: the largest weight is the round's.
    assert [event.value for event in seen.Scalars("weight/max")] == [0.75]


def test_one_event_file(make_writer, tmp_path, make_round, clients):
    writer = make_writer()
    writer.write_config("name: essai-\u00e9\n")
    for round_num in range(1, 5):
        writer.write_round(make_round(round_num, **ROUND), clients(round_num))
    writer.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_names_of_classes(make_writer, events, make_round):
    names = ["a/b", "a%2Fb", "Viral Pneumonia", "Pneumonie \u00e0 virus", "\u80ba\u708e"]
    writer = make_writer(class_names=names)
    writer.write_round(make_round(1, recall=(0.0, 0.25, 0.5, 0.75, 1.0)), [])
    writer.close()
    seen = events()
    prefix = "global/recall/"
    tags = [tag.removeprefix(prefix) for tag in seen.Tags()["scalars"] if tag.startswith(prefix)]
    assert sorted(tags) == sorted(["a%2Fb", "a%252Fb", *names[2:]])
    assert sorted(unquote(tag) for tag in tags) == sorted(names)
    assert [seen.Scalars(prefix + escape(name))[0].value for name in names] == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_configuration_card(make_writer, events):
    writer = make_writer()
    writer.write_config("name: essai\nclient:\n  local_epochs: 5\n")
    writer.close()
    (event,) = events().Tensors("config/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert text == "    name: essai\n    client:\n      local_epochs: 5\n"


def test_scores_that_are_not_finite(make_writer, events, make_round, make_client):
    writer = make_writer()
    scores = (float("inf"), float("nan"), 1.0)
    writer.write_round(make_round(1), [make_client(one, score=score) for one, score in enumerate(scores)])
    writer.close()
    seen = events()
    assert seen.Scalars("score/client_000")[0].value == np.inf
    assert seen.Histograms("score/dist")[0].histogram_value.num == 1


def test_resumed_run_shows_each_step_once(make_writer, events, make_round):
    writer = make_writer()
    for round_num in (1, 2, 3):
        writer.write_round(make_round(round_num, loss=9.0), [])
    writer.close()
    writer = make_writer(resume_round=2)
    for round_num in (2, 3, 4):
        writer.write_round(make_round(round_num, loss=1.0), [])
    writer.close()
    assert [(event.step, event.value) for event in events().Scalars("global/loss")] == [(1, 9), (2, 1), (3, 1), (4, 1)]


def test_a_full_disk_is_explained(make_writer, make_round, tmp_path, monkeypatch):
    def full() -> None:
        raise OSError(28, "No space left on device")

    writer = make_writer()
    with monkeypatch.context() as patch:
        patch.setattr(writer._writer, "flush", full)
        with pytest.raises(RunError, match=f"{tmp_path / 'tensorboard'}: No space left on device"):
            writer.write_round(make_round(1), [])
    writer.close()


def test_recall_of_other_classes_is_refused(make_writer, make_round):
    writer = make_writer()
    with pytest.raises(ValueError, match=r"shorter|longer"):
        writer.write_round(make_round(1, recall=(0.5,)), [])
    writer.close()
