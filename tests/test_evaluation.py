from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from raysim.evaluation import ShardPredictions, evaluation_shards, metrics_of
from raysim.models import build_model
from raysim.preparation import prepare
from raysim.recording.checkpoint import read_latest
from raysim.seeding import Purpose, rng_for
from runs import TINY, run


def test_macro_f1_is_over_the_classes_present():
    """Truth [0,0,1,1], predicted [0,0,1,0], 3 classes: F1 is 0.8 and 2/3 for the two present, so 0.7333 (not 0.4889)."""
    metrics = metrics_of(np.array([0, 0, 1, 1]), [ShardPredictions(2.0, np.array([0, 0, 1, 0]))], 3)
    assert metrics.accuracy == 0.75
    assert metrics.macro_f1 == pytest.approx((0.8 + 2 / 3) / 2)
    assert metrics.recall == (1.0, 0.5, None)
    assert metrics.classes_present == 2
    assert metrics.loss == 0.5


def test_a_class_that_is_predicted_but_absent_does_not_break_it():
    metrics = metrics_of(np.array([0, 0]), [ShardPredictions(1.0, np.array([2, 2]))], 3)
    assert (metrics.accuracy, metrics.macro_f1, metrics.recall) == (0.0, 0.0, (0.0, None, None))


def test_shards_cover_the_test_set_in_order_and_depend_on_its_size_only():
    shards = evaluation_shards(5000, 256)
    assert np.concatenate(shards).tolist() == list(range(5000))
    assert [len(shard) for shard in shards] == [2048, 2048, 904]
    whole = [ShardPredictions(1.0, np.arange(5000) % 10)]
    parts = [ShardPredictions(1 / 3, shard % 10) for shard in shards]
    labels = np.arange(5000) % 7
    assert metrics_of(labels, whole, 10).recall == metrics_of(labels, parts, 10).recall


def test_the_global_model_on_the_validation_set_and_the_round_it_chooses(tmp_path):
    """Beside a plain forward pass of the network that the checkpoint holds; nothing else of the run changes."""
    settings = ["evaluation={validation: true, batch_size: 8}", "client.optimizer.lr=1.0"]
    record = run(tmp_path, "validated", *TINY, *settings, rounds=4, backend="serial")
    rows = record.rounds.to_pylist()
    prepared = prepare(record.config)
    setup, validation = prepared.setup, prepared.setup.validation
    model = build_model(record.config.model, setup.input_spec, rng_for(record.config.seed, Purpose.INIT))
    params = torch.from_numpy(read_latest(record.folder).arrays["server.params"])
    torch.nn.utils.vector_to_parameters(params, model.parameters())
    logits = model(torch.from_numpy(validation.images).float() / 255)
    labels = torch.from_numpy(validation.labels)
    assert rows[-1]["validation_accuracy"] == (logits.argmax(dim=1) == labels).double().mean().item()
    assert rows[-1]["validation_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)

    chosen = max(rows, key=lambda row: row["validation_accuracy"])
    assert record.result["best_validation"] == {
        "round": chosen["round_num"],
        **{name: chosen[name] for name in ("accuracy", "macro_f1", "loss", "validation_accuracy", "validation_loss")},
    }
    plain = run(
        tmp_path, "plain", *TINY, "evaluation.batch_size=8", "client.optimizer.lr=1.0", rounds=4, backend="serial"
    )
    assert plain.result["best_validation"] is None
    assert plain.rounds["validation_accuracy"].null_count == 4
    for column in ("params_checksum", "accuracy", "loss"):
        assert plain.rounds[column].equals(record.rounds[column])
