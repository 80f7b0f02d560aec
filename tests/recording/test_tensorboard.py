from __future__ import annotations

import io
import re
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from raysim.errors import RunError
from raysim.recording.heatmap import PUOR, Heatmap
from raysim.recording.logger import RunInfo
from raysim.recording.metrics import escape
from raysim.recording.tables import TableWriter
from raysim.recording.tensorboard import TensorBoardWriter

ROUND = {
    **{"sampled": 3, "ok": 2, "failed": 1, "updated": True, "retries": 2},
    **{"loss": 1.5, "accuracy": 0.5, "macro_f1": 0.4, "recall": (0.5, None)},
    **{"weight_max": 0.75, "weight_entropy": 0.5, "client_utilisation": 0.9, "scorer_utilisation": 0.8},
    **{"train_s": 1.0, "score_tail_s": 0.25, "aggregate_s": 0.1, "evaluate_s": 0.2, "commit_s": 0.05},
}
PARTS = ("train", "score_tail", "aggregate", "evaluate", "commit", "round")
ROUND_TAGS = {
    *(
        "global/loss",
        "global/accuracy",
        "global/best_accuracy",
        "global/macro_f1",
        "global/recall/a%2Fb",
        "rounds_to/50",
    ),
    *(f"{name}/size_{size}" for name in ("score", "weight") for size in ("small", "medium")),
    *("weight/entropy", "weight/max", "validation/loss_median", "validation/accuracy_median"),
    *(
        "layer/conv1/norm_median",
        "layer/fc/norm_median",
        "pool/client/utilisation",
        "pool/scorer/utilisation",
    ),
    *(f"time/{part}" for part in PARTS),
    *(f"fault/{kind}" for kind in ("retries", "failed", "excluded", "skipped")),
}


@pytest.fixture
def make_writer(tmp_path):
    def make(**options):
        names = {"class_names": ["a/b", "Pneumonie \u00e0 virus"], "unit_names": ["conv1", "fc"]}
        sizes = range(1, options.pop("num_clients", 3) + 1)
        run = {"folder": tmp_path, "name": "run", "rounds": 4, "client_sizes": sizes}
        return TensorBoardWriter(RunInfo(**{**names, **run, **options}))

    return make


@pytest.fixture
def events(tmp_path):
    def read():
        accumulator = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0, "images": 0})
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
    writer.finish(None)
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
    writer.finish(None)


def test_many_clients_are_quantiles(make_writer, events, make_round, clients):
    writer = make_writer(num_clients=60)
    writer.write_round(make_round(1, **ROUND), clients(count=11))
    writer.finish(None)
    seen = events()
    labels = ("min", "p10", "median", "p90", "max")
    quantiles = {f"{name}/{label}" for name in ("score", "weight") for label in labels}
    medium = {"score/size_medium", "weight/size_medium"}  # Clients 0 to 10 are small ones.
    assert set(seen.Tags()["scalars"]) == ROUND_TAGS - medium | quantiles
    assert [seen.Scalars(f"score/{label}")[0].value for label in labels] == [1.0, 2.0, 6.0, 10.0, 11.0]
    # One tag, one point: the largest weight is the round's.
    assert [event.value for event in seen.Scalars("weight/max")] == [0.75]


def test_one_event_file(make_writer, tmp_path, make_round, clients):
    writer = make_writer(config_yaml="name: essai-\u00e9\n")
    for round_num in range(1, 5):
        writer.write_round(make_round(round_num, **ROUND), clients(round_num))
    writer.finish(None)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_names_of_classes(make_writer, events, make_round):
    names = ["a/b", "a%2Fb", "Viral Pneumonia", "Pneumonie \u00e0 virus", "\u80ba\u708e"]
    writer = make_writer(class_names=names)
    writer.write_round(make_round(1, recall=(0.0, 0.25, 0.5, 0.75, 1.0)), [])
    writer.finish(None)
    seen = events()
    prefix = "global/recall/"
    tags = [tag.removeprefix(prefix) for tag in seen.Tags()["scalars"] if tag.startswith(prefix)]
    assert sorted(tags) == sorted(["a%2Fb", "a%252Fb", *names[2:]])
    assert sorted(unquote(tag) for tag in tags) == sorted(names)
    assert [seen.Scalars(prefix + escape(name))[0].value for name in names] == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_configuration_card(make_writer, events):
    writer = make_writer(config_yaml="name: essai\nclient:\n  local_epochs: 5\n")
    writer.finish(None)
    (event,) = events().Tensors("config/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert text == "    name: essai\n    client:\n      local_epochs: 5\n"


def test_scores_that_are_not_finite(make_writer, events, make_round, make_client):
    writer = make_writer()
    scores = (float("inf"), float("nan"), 1.0)
    writer.write_round(make_round(1), [make_client(one, score=score) for one, score in enumerate(scores)])
    writer.finish(None)
    seen = events()
    assert seen.Scalars("score/client_000")[0].value == np.inf
    assert seen.Histograms("score/dist")[0].histogram_value.num == 1


def test_a_resumed_run_keeps_one_file_with_each_step_once(make_writer, events, make_round, clients, tmp_path):
    tables = TableWriter(tmp_path)
    writer = make_writer()
    for round_num in (1, 2, 3):
        record = make_round(round_num, loss=9.0, accuracy=0.8)
        tables.write_round(record, clients(round_num))
        writer.write_round(record, clients(round_num))
    writer.finish({"status": "failed", "seconds_per_round": 1.0})
    writer = make_writer(resume_round=2)
    for round_num in (2, 3, 4):
        writer.write_round(make_round(round_num, loss=1.0, accuracy=0.6), clients(round_num))
    writer.finish({"status": "finished", "seconds_per_round": 2.0})
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    seen = events()
    assert [(event.step, event.value) for event in seen.Scalars("global/loss")] == [(1, 9), (2, 1), (3, 1), (4, 1)]
    assert [event.value for event in seen.Scalars("global/best_accuracy")] == pytest.approx([0.8] * 4)
    assert [event.step for event in seen.Scalars("rounds_to/80")] == [1]
    assert [event.value for event in seen.Scalars("result/seconds_per_round")] == [2.0]
    assert len(seen.Tensors("config/text_summary")) == 1
    assert hparams_data(seen, "_hparams_/session_end_info").session_end_info.status == api_pb2.STATUS_SUCCESS
    # The pictures have round 1 too.
    assert np.isfinite(writer._weight_map()[1].values).any(axis=0).tolist() == [True] * 4
    assert np.isfinite(writer._norm_map()[1].values).all()


def test_a_full_disk_is_explained(make_writer, make_round, tmp_path, monkeypatch):
    def full() -> None:
        raise OSError(28, "No space left on device")

    writer = make_writer()
    with monkeypatch.context() as patch:
        patch.setattr(writer._file, "flush", full)
        with pytest.raises(RunError, match=f"{tmp_path / 'tensorboard'}: No space left on device"):
            writer.write_round(make_round(1), [])
    writer.finish(None)


def test_recall_of_other_classes_is_refused(make_writer, make_round):
    writer = make_writer()
    with pytest.raises(ValueError, match=r"shorter|longer"):
        writer.write_round(make_round(1, recall=(0.5,)), [])
    writer.finish(None)


def hparams_data(seen, tag):
    return HParamsPluginData.FromString(seen.SummaryMetadata(tag).plugin_data.content)


def test_medians_by_size_of_the_client(make_writer, events, make_round, make_client):
    writer = make_writer(client_sizes=[10, 20, 30, 40, 50, 60])
    scores = [1.0, 3.0, 4.0, None, 7.0, float("nan")]
    writer.write_round(make_round(1), [make_client(one, score=score) for one, score in enumerate(scores)])
    writer.finish(None)
    seen = events()
    assert [seen.Scalars(f"score/size_{size}")[0].value for size in ("small", "medium", "large")] == [2.0, 4.0, 7.0]


def test_clients_of_one_size_have_no_medians_by_size(make_writer, events, make_round, make_client):
    writer = make_writer(client_sizes=[5, 5, 5])
    writer.write_round(make_round(1), [make_client(one, score=1.0) for one in range(3)])
    writer.finish(None)
    assert not [tag for tag in events().Tags()["scalars"] if "size_" in tag]


def test_bytes_over_the_network_are_shown_once_there_are_any(make_writer, events, make_round):
    writer = make_writer()
    for round_num, sent in ((1, 0), (2, 7), (3, 0)):
        writer.write_round(make_round(round_num, driver_bytes=sent), [])
    writer.finish(None)
    assert [(event.step, event.value) for event in events().Scalars("pool/driver_bytes")] == [(2, 7), (3, 0)]


def test_best_round_and_rounds_to(make_writer, events, make_round):
    writer = make_writer()
    for round_num, accuracy in enumerate((0.1, 0.72, 0.5, None, 0.9)):
        writer.write_round(make_round(round_num, accuracy=accuracy), [])
    writer.finish(None)
    seen = events()
    assert [event.value for event in seen.Scalars("global/best_accuracy")] == pytest.approx([0.1, 0.72, 0.72, 0.9])
    reached = {tag: seen.Scalars(tag)[0].value for tag in seen.Tags()["scalars"] if tag.startswith("rounds_to/")}
    assert reached == {"rounds_to/50": 1, "rounds_to/60": 1, "rounds_to/70": 1, "rounds_to/80": 4, "rounds_to/90": 4}


@pytest.mark.parametrize("count", [3, 60])
def test_every_chart_of_the_layout_finds_its_curves(make_writer, events, make_round, clients, count):
    writer = make_writer(num_clients=count)
    writer.write_round(make_round(1, **ROUND, weight_error=0.1), clients())
    writer.finish(None)
    seen = events()
    tags = set(seen.Tags()["scalars"])
    (event,) = seen.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    groups = ["global", "scores", "weights", "layers", "time", "pools", "faults"]
    assert [one.title for one in layout.category] == groups
    covered = set()
    for chart in (chart for category in layout.category for chart in category.chart):
        for expression in chart.multiline.tag:  # As TensorBoard's page finds them.
            found = {tag for tag in tags if re.match(expression, tag)}
            assert found, f"{chart.title}: {expression}"
            covered |= found
        covered |= {tag for one in chart.margin.series for tag in (one.value, one.lower, one.upper)}
    assert {tag for tag in tags if not tag.startswith("rounds_to/")} == covered


def test_pictures_at_first_rounds_then_every_tenth_of_the_run_and_at_the_end(make_writer, events, make_round, clients):
    writer = make_writer(rounds=100)
    for round_num in range(1, 46):
        writer.write_round(make_round(round_num, **ROUND), clients(round_num))
    writer.finish(None)
    steps = [1, 2, 4, 8, 10, 20, 30, 40, 45]
    seen = events()
    assert seen.Tags()["images"] == ["heatmap/weight", "heatmap/layer_norm"]
    for tag in seen.Tags()["images"]:
        assert [event.step for event in seen.Images(tag)] == steps
    (*_, last) = seen.Images("heatmap/weight")
    assert Image.open(io.BytesIO(last.encoded_image_string)).size == (last.width, last.height)


def test_weights_in_the_picture_are_relative_and_largest_clients_come_first(make_writer, make_round, make_client):
    writer = make_writer(client_sizes=[10, 30, 20])
    writer.write_round(make_round(1), [make_client(0, weight=0.25), make_client(1, weight=0.75)])
    writer.finish(None)
    _, picture = writer._weight_map()
    assert picture.names == ["1 (30)", "2 (20)", "0 (10)"]
    np.testing.assert_allclose(picture.values, [[np.log2(1.5)], [np.nan], [-1.0]], rtol=1e-6)


def pixels(picture):
    return np.asarray(Image.open(io.BytesIO(picture.png()[0])))


def test_colours_of_a_heat_map():
    values = np.array([[-3.0, 0.0, 3.0, np.nan]])
    found = {
        tuple(colour) for colour in pixels(Heatmap(values, 1, ["row"], "", "", PUOR, -3, 3, [])).reshape(-1, 3).tolist()
    }
    assert {(0x2D, 0x00, 0x4B), (0x7F, 0x3B, 0x08), (208, 208, 208)} <= found


def test_a_heat_map_of_any_size_fits_a_page():
    for shape in ((1, 1), (3, 2), (1000, 1), (1, 700), (5000, 200)):
        values = np.full(shape, np.nan, dtype=np.float32)
        values[::7, ::3] = 1.0
        _, width, height = Heatmap(
            values, 1, [f"client {n}" for n in range(len(values))], "t", "r", PUOR, 0, 1, []
        ).png()
        assert width <= 800
        assert height <= 520


def test_table_of_runs(make_writer, events, make_round):
    hparams = {"weighting.name": "fedvg", "partition.alpha": 1, "seed": 3, "deterministic": True}
    writer = make_writer(
        hparams=hparams, study={"partition.alpha": [0.1, 1], "seed": [3, 4], "client.per_round": [None, 5]}
    )
    writer.write_round(make_round(1, **ROUND), [])
    writer.finish({"status": "failed", "seconds_per_round": 1.5})
    seen = events()
    start = hparams_data(seen, "_hparams_/session_start_info").session_start_info
    shown = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
    assert shown == {"weighting.name": "fedvg", "partition.alpha": 1.0, "seed": "3", "deterministic": True}
    experiment = hparams_data(seen, "_hparams_/experiment").experiment
    columns = {one.name: (one.type, list(one.domain_discrete)) for one in experiment.hparam_infos}
    assert columns == {
        "partition.alpha": (api_pb2.DATA_TYPE_FLOAT64, [0.1, 1.0]),
        "seed": (api_pb2.DATA_TYPE_STRING, ["3", "4"]),
        "client.per_round": (api_pb2.DATA_TYPE_FLOAT64, [5.0]),
        "weighting.name": (api_pb2.DATA_TYPE_STRING, []),
        "deterministic": (api_pb2.DATA_TYPE_BOOL, []),
    }
    assert hparams_data(seen, "_hparams_/session_end_info").session_end_info.status == api_pb2.STATUS_FAILURE
    listed = [one.name.tag for one in experiment.metric_infos]
    assert {"global/accuracy", "global/best_accuracy", "global/macro_f1", "global/loss", "rounds_to/50"} <= set(listed)
    assert {tag for tag in listed if not tag.startswith("rounds_to/")} <= set(seen.Tags()["scalars"])


def test_an_interrupted_run_has_not_ended(make_writer, events):
    make_writer().finish({"status": "interrupted", "seconds_per_round": None})
    assert "_hparams_/session_end_info" not in events().Tags()["tensors"]


def test_card_about_the_tags(make_writer, events):
    make_writer(name="a|b_c*d").finish(None)
    (event,) = events().Tensors("about/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert text.startswith(r"**a\|b\_c\*d**")
    assert "`small`, up to 1" in text
