from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysim.config import RunConfig, resolve
from raysim.data import load_dataset
from raysim.data.arrays import ImageSet
from raysim.data.partition import Partition
from raysim.data.validation import split_validation
from raysim.errors import ConfigError
from raysim.preparation import prepare, prepare_data
from raysim.vector import checksum

SERIAL: dict[str, Any] = {"backend": "serial"}


def config(**sections: Any) -> RunConfig:
    """The digits with the small network `mlp`, changed by the given sections."""
    values: dict[str, Any] = {
        "model": {"name": "mlp"},
        "client": {"fraction": 0.5},
        "partition": {"clients": 8, "alpha": 0.5},
        "weighting": {"name": "fedvg"},
        "execution": SERIAL,
    }
    return resolve(values | sections)


def npz_file(path: Path, labels: np.ndarray, parts: tuple[str, ...] = ("train", "test", "val")) -> Path:
    """A file in MedMNIST's layout whose parts all have these labels."""
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
    np.savez(path, **{f"{p}_images": images for p in parts}, **{f"{p}_labels": labels[:, None] for p in parts})
    return path


def rows(images: ImageSet) -> set[bytes]:
    return {image.tobytes() for image in images.images}


# ---- precision ----


def test_tf32_without_a_gpu_is_noted():
    prepared = prepare(config(client={"fraction": 0.5, "precision": "tf32"}, scoring={"precision": "tf32"}))
    assert [note for note in prepared.notes if "tf32" in note] == [
        "client.precision: tf32 has no effect on CPUs",
        "scoring.precision: tf32 has no effect on CPUs",
    ]
    assert (prepared.setup.client_precision, prepared.setup.scoring.precision) == ("tf32", "tf32")
    assert not any("precision" in note for note in prepare(config()).notes)


# ---- training images ----


def test_part_of_the_training_images_is_a_stratified_sample_of_the_seed():
    whole = load_dataset(config().data).train
    first, again, other = (
        prepare_data(config(data={"train_images": 500}, seed=seed)).dataset.train for seed in (0, 0, 1)
    )
    assert len(first) == 500
    assert rows(first) <= {image.tobytes() for image in prepare_data(config()).dataset.train.images}
    assert checksum(first.images) == checksum(again.images) != checksum(other.images)
    shares = np.bincount(whole.labels) * 500 / len(whole)
    assert np.abs(np.bincount(first.labels) - shares).max() < 1


def test_a_class_that_the_sample_lacks_is_noted():
    assert any(
        "no training example" in note
        for note in prepare_data(config(data={"train_images": 7}, partition={"clients": 2, "min_examples": 0})).notes
    )


def test_more_training_images_than_there_are_are_refused():
    with pytest.raises(ConfigError, match=r"data.train_images: 99999, but digits has \d+ training images"):
        prepare_data(config(data={"train_images": 99999}))


# ---- validation set and partition ----


def test_no_client_holds_an_example_of_the_validation_set():
    data = prepare_data(config())
    train = data.dataset.train
    held_out, available = split_validation(load_dataset(config().data), config().data.validation, 0)
    clients = data.partition.indices
    assert len(np.unique(clients)) == len(clients) == len(train) - len(data.validation)
    assert set(clients.tolist()) == set(available.tolist())
    np.testing.assert_array_equal(held_out.images, data.validation.images)
    assert not rows(data.validation) & rows(train.take(clients))


@pytest.mark.parametrize("scheme", ["iid", "dirichlet"])
def test_the_seed_decides_who_holds_what(scheme):
    partition = {"clients": 8, "scheme": scheme}
    first, again, other = (prepare_data(config(partition=partition, seed=seed)) for seed in (1, 1, 2))
    assert first.partition.content_hash == again.partition.content_hash != other.partition.content_hash
    assert checksum(first.validation.images) == checksum(again.validation.images) != checksum(other.validation.images)


def test_a_file_that_gives_validation_examples_to_clients_is_refused(tmp_path):
    _, available = split_validation(load_dataset(config().data), config().data.validation, 0)
    held_out = np.setdiff1d(np.arange(len(available)), available)
    path = tmp_path / "partition.json"
    path.write_text(json.dumps([available[:20].tolist(), [*available[20:40].tolist(), int(held_out[0])]]))
    with pytest.raises(ConfigError, match=r"partition\.path.*\b" + str(held_out[0])):
        prepare_data(config(partition={"scheme": "file", "path": str(path), "clients": 2}))


def test_a_partition_with_validation_examples_never_gets_through(monkeypatch):
    everything = Partition.from_lists([np.arange(1000), np.arange(1000, 1400)], "iid")
    monkeypatch.setattr("raysim.preparation.make_partition", lambda *_: everything)
    with pytest.raises(ConfigError, match="a client holds an example of the validation set"):
        prepare_data(config())


def test_clients_without_examples_are_noted():
    data = prepare_data(config(partition={"clients": 30, "alpha": 0.01, "min_examples": 0}))
    empty = int((data.partition.sizes == 0).sum())
    assert empty > 0
    assert f"{empty} of 30 clients have no example; they are skipped when sampled" in data.notes


def test_a_repaired_draw_is_noted():
    data = prepare_data(config(partition={"clients": 40, "alpha": 0.01, "min_examples": 2, "max_tries": 3}))
    assert data.partition.sizes.min() >= 2
    (note,) = [note for note in data.notes if note.startswith("partition:")]
    assert f"no draw out of 3 gave every client 2 examples; {data.partition.repaired} examples were moved" in note


def test_impossible_sizes_are_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"partition.*100.*40.*4000.*1294"):
        prepare_data(config(partition={"clients": 100, "min_examples": 40}))


# ---- classes and images ----


def test_the_network_gets_as_many_outputs_as_the_data_has_classes(tmp_path):
    path = npz_file(tmp_path / "four.npz", np.arange(80) % 4)
    prepared = prepare(config(data={"name": "npz", "path": str(path)}))
    assert prepared.setup.input_spec.num_classes == len(prepared.class_names) == 4
    assert prepared.population.layout.shapes[-1] == (4,)
    counts = prepared.setup.partition.class_counts(prepared.setup.train.labels, 4)
    assert counts.sum(axis=0).tolist() == [18, 18, 18, 18]


def test_a_class_that_nobody_can_learn_or_score_is_noted(tmp_path):
    labels = np.arange(80) % 10 + (np.arange(80) % 10 >= 5)  # No 5.
    path = npz_file(tmp_path / "organamnist.npz", labels)
    prepared = prepare(config(data={"name": "npz", "path": str(path), "validation": {"source": "split"}}))
    assert len(prepared.class_names) == 11
    assert "class 5 has no training example" in prepared.notes
    assert f"the validation set has no example of: {prepared.class_names[5]}" in prepared.notes


@pytest.mark.parametrize("label", [11, 255])
def test_labels_beyond_the_classes_are_refused_before_anything_is_trained(tmp_path, label):
    labels = np.arange(88) % 11
    labels[3] = label
    path = npz_file(tmp_path / "organamnist.npz", labels)
    with pytest.raises(ConfigError, match=rf"labels outside 0\.\.10: {label}") as info:
        prepare(config(data={"name": "npz", "path": str(path)}))
    assert len(info.value.problems) == 3


def test_images_are_brought_to_the_size_of_the_network():
    prepared = prepare(config(model={"name": "lenet5"}))
    for part in (prepared.setup.train, prepared.setup.validation, prepared.setup.test):
        assert part.images.shape[1:] == (1, 28, 28)
    assert "images resized from 8 x 8 to 28 x 28 for lenet5" in prepared.notes
    with pytest.raises(ConfigError, match=r"data\.image_size: 8 pixels, but lenet5 takes 20 and more"):
        prepare(config(model={"name": "lenet5"}, data={"image_size": 8}))


def test_a_missing_validation_part_is_refused():
    with pytest.raises(ConfigError, match=r"data\.validation\.source: split needs"):
        prepare(config(data={"validation": {"source": "split"}}))


# ---- training and scoring ----


def test_batches_of_one_are_refused_for_batch_norm_only():
    with pytest.raises(ConfigError, match=r"client\.batch_size: 1, but lenet5 has BatchNorm"):
        prepare(config(model={"name": "lenet5"}, client={"batch_size": 1}))
    assert prepare(config(client={"batch_size": 1})).setup.training.batch_size == 1
    single = {"model": {"name": "lenet5"}, "scoring": {"batch_size": 1}}
    for name in ("fedvg", "loss", "direction"):
        with pytest.raises(ConfigError, match=r"scoring\.batch_size: 1, but lenet5 has BatchNorm"):
            prepare(config(**single, weighting={"name": name}))
    assert prepare(config(**single, weighting={"name": "size"})).setup.scoring.batch_size == 1


def test_a_fraction_of_less_than_one_client_is_noted():
    prepared = prepare(config(client={"fraction": 0.05}))
    assert "client.fraction: 0.05 of 8 clients is less than one; 1 is sampled" in prepared.notes
    assert prepared.demand.cohort == 1
    assert not prepare(config(client={"fraction": 0.5})).notes


@pytest.mark.parametrize(("batch_size", "shards"), [(256, 1), (32, 1), (32, 2), (32, 3), (32, 4), (10, 14), (143, 1)])
def test_shards_cover_the_validation_set_once_in_whole_batches(batch_size, shards):
    prepared = prepare(config(scoring={"batch_size": batch_size, "shards": shards}))
    dealt = prepared.setup.scoring_shards
    batches = [batch for shard in dealt for batch in shard]
    size = len(prepared.setup.validation)
    assert np.array_equal(np.sort(np.concatenate(batches)), np.arange(size))
    assert len(dealt) == shards
    assert all(dealt)
    assert {len(batch) for batch in batches[:-1]} <= {batch_size}
    whole = prepare(config(scoring={"batch_size": batch_size, "shards": 1})).setup.scoring_shards
    for batch, same in zip(batches, whole[0], strict=True):  # Shards cut the row of batches and change none.
        np.testing.assert_array_equal(batch, same)


def test_every_shard_asked_for_has_a_batch():
    prepared = prepare(config(scoring={"batch_size": 30, "shards": 4}))  # 144 images, 5 batches
    assert [len(shard) for shard in prepared.setup.scoring_shards] == [1, 1, 1, 2]


def test_more_shards_than_batches_are_refused():
    with pytest.raises(ConfigError, match=r"scoring\.shards: 6, but .* 144 images has only 5 batches of 32"):
        prepare(config(scoring={"batch_size": 32, "shards": 6}))


def test_the_demand_weighs_scoring_against_training():
    prepared = prepare(config(client={"per_round": 3, "local_epochs": 4}))
    demand = prepared.demand
    assert (demand.cohort, demand.clients) == (3, 8)
    mean = (1438 - 144) / 8
    assert len(prepared.setup.validation) == 144
    assert demand.scoring_ratio == pytest.approx(144 / (4 * mean))
    assert demand.model_bytes == 4 * prepared.population.layout.size
    assert prepare(config(weighting={"name": "size"})).demand.scoring_ratio == 0.0


def test_the_initial_state_is_the_network_of_the_seed():
    first, again, other = (prepare(config(seed=seed)).initial for seed in (3, 3, 4))
    assert first.round_num == 0
    assert first.server.params.equal(again.server.params)
    assert not first.server.params.equal(other.server.params)
    assert not first.clients


# ---- resources ----


def ray_config(**client: Any) -> RunConfig:
    return config(execution={"backend": "ray", "num_cpus": 2, "num_gpus": 0, "client": client})


@pytest.fixture
def no_ray(monkeypatch):
    monkeypatch.setattr("raysim.preparation.starts_ray", lambda _: True)


@pytest.mark.usefixtures("no_ray")
def test_resources_that_this_machine_lacks_are_found_before_ray_starts():
    with pytest.raises(ConfigError, match=r"execution\.client\.num_cpus: 4 asked for, but the cluster has 2"):
        prepare(ray_config(num_cpus=4))
    with pytest.raises(ConfigError, match=r"execution\.client\.num_gpus: 1 asked for, but the cluster has 0"):
        prepare(ray_config(num_gpus=1))
    prepare(ray_config(num_cpus=1))


def test_the_resources_of_a_named_cluster_are_its_own_affair():
    named = ray_config(num_cpus=4)
    execution = dataclasses.replace(named.execution, address="10.0.0.1:6379")
    prepare(dataclasses.replace(named, execution=execution))
