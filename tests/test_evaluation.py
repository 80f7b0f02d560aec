from __future__ import annotations

import numpy as np
import pytest

from raysim.evaluation import ShardPredictions, evaluation_shards, metrics_of


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
