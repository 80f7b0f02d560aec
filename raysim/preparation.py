"""From a configuration to everything a run needs, checked: data, partition, model, setup. Trains nothing, starts no process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from raysim.config import RunConfig
from raysim.data import load_dataset
from raysim.data.arrays import Dataset, ImageSet, stratified_sample
from raysim.data.partition import Partition, make_partition
from raysim.data.resizing import resize
from raysim.data.validation import split_validation, stratified_batches
from raysim.errors import ConfigError, RunError
from raysim.evaluation import evaluation_shards
from raysim.execution.base import Setup
from raysim.execution.faults import Fault
from raysim.execution.ray_plan import Demand, local_nodes, make_plan, starts_ray
from raysim.models import build_model, choose_size
from raysim.models.base import InputSpec
from raysim.models.graph import module_edges
from raysim.objective import ModelObjective, stacked_sums
from raysim.recording.loggers import check_installed
from raysim.seeding import Purpose, rng_for
from raysim.state import Buffers, Population, RoundState, num_bytes
from raysim.weighting.base import Needs

PASSES: dict[Needs, float] = {"nothing": 0.0, "vectors": 0.0, "losses": 1 / 3, "gradient": 1.0}
"""Cost of scoring an image, in forward and backward passes: a forward pass is about a third of both."""


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start.

    Attributes:
        config: What was asked for.
        setup: What every process holds.
        population: All clients.
        initial: The state before round 1.
        class_counts: [N, K], training examples of each class at each client.
        class_names: Names of the classes.
        origin: Where the data came from.
        notes: What a user should know before the run begins.
    """

    config: RunConfig
    setup: Setup
    population: Population
    initial: RoundState
    class_counts: np.ndarray
    class_names: tuple[str, ...]
    origin: str
    notes: tuple[str, ...]

    @property
    def demand(self) -> Demand:
        """Expected work, for the resource plan."""
        setup = self.setup
        trained = setup.training.local_epochs * float(np.mean(setup.partition.sizes))
        return Demand(
            cohort=self.config.cohort_size,
            clients=self.population.num_clients,
            scoring_ratio=self._scored / max(trained, 1.0),
            model_bytes=4 * self.population.layout.size,
            store_bytes=self._store_bytes(),
        )

    @property
    def _scored(self) -> float:
        """Images that are scored per client and round, in forward and backward passes."""
        setup, layout = self.setup, self.population.layout
        needs = setup.weighting.needs
        if needs == "gradient" and setup.weighting.gradient_units(layout) is not None:
            needs = "losses"  # The backward pass ends in the last layers.
        images = len(setup.validation) if setup.scoring.subset is None else setup.scoring.subset.images
        # A client that takes part in a share of all rounds does so once when it is scored, and then for r - 1 rounds without.
        share = self.config.cohort_size / self.population.num_clients
        return PASSES[needs] * images / (1 + (setup.scoring.rescore_every - 1) * share)

    def _store_bytes(self) -> float:
        """Of a round: the updates of the cohort; of the run: the clients' states up to their budget, and the data."""
        setup, params = self.setup, self.initial.server.params
        vector, buffers = num_bytes(params), num_bytes(self.initial.buffers)
        updates = self.config.cohort_size * (setup.algorithm.update_vectors * vector + buffers)
        states = self.population.num_clients * num_bytes(setup.algorithm.init_client(params))
        images = num_bytes([setup.train.images, setup.validation.images, setup.test.images])
        return updates + min(states, self.config.execution.state_cache_mb * 2**20) + images + 4 * vector


@dataclass(frozen=True)
class PreparedData:
    """The data of a run: training images, validation set, test set and partition, resized to the model's size."""

    dataset: Dataset
    validation: ImageSet
    partition: Partition
    notes: tuple[str, ...]

    @property
    def class_counts(self) -> np.ndarray:
        """[N, K], examples of each class at each client."""
        return self.partition.class_counts(self.dataset.train.labels, self.dataset.num_classes)


def prepare_data(config: RunConfig) -> PreparedData:
    """Read the images, take the validation set out and deal the rest out to the clients.

    Raises:
        ConfigError: Files, labels, sizes or the partition do not work out.
    """
    dataset = _sampled(load_dataset(config.data), config)
    height, width = dataset.train.images.shape[2:]
    size = choose_size(config.model, max(height, width), config.data.image_size)
    notes = list(dataset.notes)
    if (height, width) != (size, size):
        dataset = resize(dataset, size)
        notes.append(f"images resized from {height} x {width} to {size} x {size} for {config.model.name}")
    validation, available = split_validation(dataset, config.data.validation, config.seed)
    partition = make_partition(config.partition, dataset.train.labels, available, config.seed)
    if not np.isin(partition.indices, available).all():
        raise ConfigError("partition: a client holds an example of the validation set")
    empty = int((partition.sizes == 0).sum())
    if empty:
        notes.append(f"{empty} of {partition.num_clients} clients have no example; they are skipped when sampled")
    if partition.repaired:
        notes.append(
            f"partition: no draw out of {partition.tries} gave every client {config.partition.min_examples} examples; "
            f"{partition.repaired} examples were moved to the smallest clients"
        )
    missing = [dataset.class_names[k] for k in np.setdiff1d(np.arange(dataset.num_classes), validation.labels)]
    if missing:
        notes.append(f"the validation set has no example of: {', '.join(missing)}")
    return PreparedData(dataset, validation, partition, tuple(notes))


def _sampled(dataset: Dataset, config: RunConfig) -> Dataset:
    """The data set with `data.train_images` of its training images."""
    wanted, labels = config.data.train_images, dataset.train.labels
    if wanted is None:
        return dataset
    if wanted > len(labels):
        raise ConfigError(f"data.train_images: {wanted}, but {config.data.name} has {len(labels)} training images")
    chosen = stratified_sample(labels, wanted, rng_for(config.seed, Purpose.SUBSET))
    return replace(dataset, train=dataset.train.take(chosen)).with_notes()


def prepare(config: RunConfig) -> Prepared:
    """Check everything that can be checked before processes start.

    Raises:
        ConfigError: What does not work, and which key to change.
    """
    check_installed(config.output.loggers)
    data = prepare_data(config)
    dataset = data.dataset
    channels, height, width = dataset.train.images.shape[1:]
    spec = InputSpec(channels, height, width, dataset.num_classes)
    model = build_model(config.model, spec, rng_for(config.seed, Purpose.INIT))
    objective = ModelObjective(model, data.validation)
    notes = [
        *data.notes,
        *_check_training(config, data, objective),
        *_check_stacking(config, objective),
        *_precision_notes(config),
    ]
    assert config.weighting is not None
    layout = objective.layout
    if config.weighting.needs_edges:
        layout = replace(layout, edges=module_edges(model))
        if not layout.edges:
            notes.append(f"{config.model.name} cannot be traced: units next to each other in its order are neighbours")
    setup = Setup(
        seed=config.seed,
        rounds=config.rounds,
        algorithm=config.algorithm,
        weighting=config.weighting,
        fusion=config.fusion,
        training=config.client,
        scoring=config.scoring,
        model=config.model,
        input_spec=spec,
        train=dataset.train,
        validation=data.validation,
        test=dataset.test,
        partition=data.partition,
        scoring_shards=_scoring_shards(config, data.validation),
        evaluation_shards=tuple(evaluation_shards(len(dataset.test), config.evaluation.batch_size)),
        evaluation_batch_size=config.evaluation.batch_size,
        validation_shards=tuple(evaluation_shards(len(data.validation), config.evaluation.batch_size))
        if config.evaluation.validation
        else (),
        threads=config.execution.threads,
        deterministic=config.deterministic,
        client_precision=config.client.precision,
        client_timeout_s=config.client.timeout_s,
        faults=Fault.from_environment(),
    )
    population = Population(tuple(data.partition.sizes.tolist()), layout)
    server = config.algorithm.init_server(objective.params.clone(), population)
    buffers = Buffers(objective.buffers.floats.clone(), objective.buffers.ints.clone())
    prepared = Prepared(
        config=config,
        setup=setup,
        population=population,
        initial=RoundState(0, server, buffers),
        class_counts=data.class_counts,
        class_names=dataset.class_names,
        origin=dataset.origin,
        notes=tuple(notes),
    )
    if starts_ray(config.execution):
        make_plan(
            config.execution, local_nodes(config.execution, prepared.demand.store_bytes), prepared.demand
        )  # For its errors.
    return prepared


def _check_batch_norm(config: RunConfig, data: PreparedData) -> None:
    """Batch statistics need two examples: refuse what would give a batch of one."""
    why = f"but {config.model.name} has BatchNorm, which needs at least 2 examples per batch"
    client, sizes, fusion = config.client, data.partition.sizes, config.fusion
    assert config.weighting is not None
    scored = max(PASSES[config.weighting.needs], PASSES[config.weighting.reference_needs]) > 0
    problems = []
    if fusion is not None and fusion.training.batch_size == 1:
        problems.append(f"fusion.training.batch_size: 1, {why}")
    if client.batch_size == 1:
        problems.append(f"client.batch_size: 1, {why}")
    elif client.last_batch == "keep":
        alone = int((sizes % client.batch_size == 1).sum() if client.batch_size else (sizes == 1).sum())
        if alone:
            problems.append(f"client.last_batch: keep leaves {alone} clients with a last batch of one, {why}; use auto")
    if scored and config.scoring.batch_norm != "running":
        if config.scoring.batch_size == 1:
            problems.append(f"scoring.batch_size: 1, {why}")
        if len(data.validation) == 1:
            problems.append(f"data.validation: 1 image, {why}")
    if problems:
        raise ConfigError(problems)


def _check_training(config: RunConfig, data: PreparedData, objective: ModelObjective) -> list[str]:
    notes = []
    client, fusion = config.client, config.fusion
    if fusion is not None and fusion.training.last_batch == "drop":
        size = fusion.training.batch_size
        if size is not None and size > len(data.validation):
            raise ConfigError(
                f"fusion.training.batch_size: {size} with last_batch: drop leaves no batch of {len(data.validation)} images"
            )
    subset = config.scoring.subset
    if subset is not None and subset.images > len(data.validation):
        raise ConfigError(
            f"scoring.subset.images: {subset.images}, but the validation set has {len(data.validation)}; give 4 to "
            f"{len(data.validation)}, or subset: null for all of them"
        )
    if objective.has_batch_norm:
        _check_batch_norm(config, data)
    if config.execution.backend == "serial" and client.timeout_s is not None:
        notes.append("client.timeout_s has no effect with execution.backend: serial")
    if client.per_round is None and client.fraction is not None and config.partition.clients * client.fraction < 1:
        notes.append(
            f"client.fraction: {client.fraction:g} of {config.partition.clients} clients is less than one; 1 is sampled"
        )
    return notes


def _check_stacking(config: RunConfig, objective: ModelObjective) -> list[str]:
    """Under `execution.clients_per_call`, refuse a network that cannot be vectorised, and say what the setting means."""
    count, weighting = config.execution.clients_per_call, config.weighting
    assert weighting is not None
    key = f"execution.clients_per_call: {count}"
    if count == 1:
        return []
    if config.execution.backend == "serial":
        return [f"{key} has no effect with execution.backend: serial"]
    if not weighting.stackable:
        return [f"{key} has no effect with weighting.name: {weighting.name}"]
    params, buffers = objective.params.repeat(2, 1), objective.buffers
    buffers = Buffers(buffers.floats.repeat(2, 1), buffers.ints.repeat(2, 1))
    batch = objective.take(np.arange(min(2, objective.num_examples)))
    try:
        with objective.scoring(config.scoring.batch_norm):
            stacked_sums(objective, params, buffers, [batch], gradient=weighting.needs == "gradient")
    except RunError as error:
        raise ConfigError(str(error)) from error
    return [f"{key}: scores depend on which updates wait at the same time; results repeat to about 1e-5 only"]


def _precision_notes(config: RunConfig) -> list[str]:
    """TF32 is a mode of GPUs; on a cluster only its nodes know whether there are any."""
    execution = config.execution
    no_gpu = execution.backend == "serial" or (
        starts_ray(execution) and not any(node.gpus for node in local_nodes(execution))
    )
    asked = {"client.precision": config.client.precision, "scoring.precision": config.scoring.precision}
    return [f"{key}: tf32 has no effect on CPUs" for key, value in asked.items() if value == "tf32" and no_gpu]


def _scoring_shards(config: RunConfig, validation: ImageSet) -> tuple[tuple[np.ndarray, ...], ...]:
    """The validation set's batches, dealt out to shards of whole, neighbouring batches."""
    rng = rng_for(config.seed, Purpose.SCORING)
    batches = stratified_batches(validation.labels, config.scoring.batch_size, rng)
    count = config.scoring.shards
    if count > len(batches):
        raise ConfigError(
            f"scoring.shards: {count}, but the validation set of {len(validation)} images has only {len(batches)} batches of "
            f"{config.scoring.batch_size} (scoring.batch_size)"
        )
    bounds = [shard * len(batches) // count for shard in range(count + 1)]
    return tuple(tuple(batches[start:stop]) for start, stop in pairwise(bounds))
