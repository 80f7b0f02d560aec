"""What both executors agree on: the setup that every process holds, work items and their outcomes.

An executor runs the pure functions of `work.py` for a cohort. `serial` runs them here, one after the other; `ray` runs
them in actors, scoring overlapped with training. Their numbers are equal bit for bit on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from raysim.algorithms.base import AnyAlgorithm
from raysim.cohort import Coefficients
from raysim.data.arrays import ImageSet
from raysim.data.partition import Partition
from raysim.errors import RunError
from raysim.evaluation import Metrics
from raysim.execution.faults import Fault
from raysim.execution.ray_plan import Demand
from raysim.execution.settings import ExecutionSettings
from raysim.fusion.base import Fusion
from raysim.local import LocalTraining
from raysim.models.base import InputSpec, ModelSettings
from raysim.objective import Precision
from raysim.recording.checkpoint import ClientFile, read_client_state
from raysim.state import Arrays, Buffers, ServerState, from_arrays, to_arrays
from raysim.vector import Vector, checksum
from raysim.weighting.base import KeptProbe, Probe, Report, ScoringSettings, Tally, Weighting

GROUP = 16
"""Positions of the sampled cohort that are summed together before groups are added. Part of the numerics."""


@dataclass(frozen=True)
class Setup:
    """Everything about a run that does not change from round to round; every process holds it, the arrays once per node.

    Attributes:
        seed: Of the run.
        rounds: Of the run; learning-rate schedules look at it.
        algorithm: How clients train and the server steps.
        weighting: How much each client counts.
        fusion: What the server trains at the end of a round, if anything.
        training: Local training.
        scoring: How validation passes are made.
        model: Which network.
        input_spec: Its input and number of classes.
        train: Training images; clients hold index lists into it.
        validation: The server's validation set.
        test: The test set.
        partition: Which training example belongs to which client.
        scoring_shards: The validation set's fixed batches (index arrays), by shard; a subset has its own every round.
        evaluation_shards: Test examples by shard.
        evaluation_batch_size: Test images per pass.
        threads: Torch threads per process.
        deterministic: Deterministic kernels on GPUs.
        client_precision: What local training computes in.
        client_timeout_s: Longest time a client may train in one round (Ray only).
        faults: For tests.
    """

    seed: int
    rounds: int
    algorithm: AnyAlgorithm
    weighting: Weighting
    fusion: Fusion | None
    training: LocalTraining
    scoring: ScoringSettings
    model: ModelSettings
    input_spec: InputSpec
    train: ImageSet
    validation: ImageSet
    test: ImageSet
    partition: Partition
    scoring_shards: tuple[tuple[np.ndarray, ...], ...]
    evaluation_shards: tuple[np.ndarray, ...]
    evaluation_batch_size: int
    threads: int = 1
    deterministic: bool = True
    client_precision: Precision = "float32"
    client_timeout_s: float | None = None
    faults: tuple[Fault, ...] = ()

    @property
    def data_hash(self) -> str:
        """Checksum of the training and test images and their labels."""
        return checksum(self.train.images, self.train.labels, self.test.images, self.test.labels)


@dataclass(frozen=True)
class Packed:
    """A record on the wire: its type and its arrays. An absent record has no type."""

    kind: type | None
    arrays: Arrays

    @classmethod
    def of(cls, record: Any) -> Packed:
        """Pack a record (or None)."""
        return cls(None if record is None else type(record), to_arrays(record))

    def unpack(self, device: Any = "cpu") -> Any:
        """The record, its tensors sharing memory with the arrays on the CPU."""
        return None if self.kind is None else from_arrays(self.kind, self.arrays, device)


@dataclass(frozen=True)
class StoredState:
    """A client's state that lies in a file of the run's checkpoints, and nowhere else.

    Attributes:
        kind: Its type.
        folder: The run folder.
        file: Where it is, with its checksum.
    """

    kind: type
    folder: Path
    file: ClientFile

    def load(self) -> Packed:
        """Read it.

        Raises:
            RunError: The file is gone or damaged.
        """
        try:
            return Packed(self.kind, read_client_state(self.folder, self.file))
        except (OSError, ValueError) as error:
            raise RunError(f"a client's state cannot be read: {error}") from error


@dataclass(frozen=True)
class Broadcast:
    """What every client and scorer of a round receives, put once."""

    round_num: int
    server: Packed
    buffers: Packed

    @classmethod
    def of(cls, round_num: int, server: ServerState, buffers: Buffers) -> Broadcast:
        """The broadcast of a round."""
        return cls(round_num, Packed.of(server), Packed.of(buffers))


@dataclass(frozen=True)
class WorkItem:
    """One client's part in one round.

    Attributes:
        client_id: Who.
        position: Its place in the sampled cohort; decides its group in sums.
        state: The executor's handle to its state, or where it is stored; None before its first part.
        num_examples: n_k, the expected work.
        kept: An earlier probe that still counts: the client's model is not scored.
    """

    client_id: int
    position: int
    state: Any
    num_examples: int
    kept: KeptProbe | None = None


@dataclass(frozen=True)
class GpuMemory:
    """What a unit of work needed of its GPU, in bytes.

    Attributes:
        peak: Most that torch held in its process, without the CUDA context.
        total: The GPU's memory, whatever part of it is the process's share.
    """

    peak: int
    total: int


@dataclass(frozen=True)
class TrainReport:
    """What comes back beside the vectors of an update.

    Attributes:
        scalars: The plain numbers of the update (num_examples, num_steps, loss, ...), or tuples of them.
        buffer_ints: int64 [I], the model's integer buffers after local work.
        nonfinite: Name of the first tensor, state or number of the update with a NaN or infinity, or None.
        state_checksum: Of the client's new state; None for stateless methods.
        seconds: Time the unit took in its process.
        gpu_memory: What it needed of its GPU; None on the CPU.
    """

    scalars: Mapping[str, Any]
    buffer_ints: np.ndarray
    nonfinite: str | None
    state_checksum: str | None
    seconds: float
    gpu_memory: GpuMemory | None = None


@dataclass
class Outcome:
    """What became of one work item. Filled as the round goes on.

    Attributes:
        client_id: Who.
        position: Its place in the sampled cohort.
        status: ok; skipped (no example); excluded (not finite); failed (error, time-out, actor died).
        reason: Why, unless ok.
        update: The executor's handle to the update's vectors.
        state: The executor's handle to the client's new state.
        train: The training report.
        probe: The scorer's findings, if the weighting wants any.
        sums: The executor's handle to the sums behind the probe, where more images may be added to them.
        score_age: Rounds since the probe was made.
        score_seconds: Time the probe took in its process.
        queue_seconds: Time between the update being there and its scoring.
        actor: Name, process, node and attempt of the training.
        scorer: The same of the scoring.
        started: When training was handed out.
        finished: When the last unit came back.
    """

    client_id: int
    position: int
    status: Literal["ok", "skipped", "excluded", "failed"] = "ok"
    reason: str | None = None
    update: Any = None
    state: Any = None
    train: TrainReport | None = None
    probe: Probe | None = None
    sums: Any = None
    score_age: int | None = None
    score_seconds: float | None = None
    queue_seconds: float | None = None
    actor: Place | None = None
    scorer: Place | None = None
    started: datetime | None = None
    finished: datetime | None = None

    def report(self, class_counts: np.ndarray) -> Report:
        """What the weighting is told; `class_counts` [K] are the client's examples of each class."""
        assert self.train is not None
        numbers = self.train.scalars
        return Report(
            client_id=self.client_id,
            num_examples=int(numbers["num_examples"]),
            num_steps=int(numbers["num_steps"]),
            loss=float(numbers["loss"]),
            probe=self.probe,
            class_counts=class_counts,
        )

    def drop(self, status: Literal["skipped", "excluded", "failed"], reason: str) -> None:
        """Take the client out of the round: its vectors are released."""
        self.status, self.reason = status, reason
        self.update = self.state = self.sums = None
        self.finished = datetime.now(UTC)

    def check_update(self) -> None:
        """Take the client out if its update is not finite, or if there is none: without a step it learnt nothing."""
        if self.train is not None and self.train.nonfinite is not None:
            self.drop("excluded", f"non-finite update ({self.train.nonfinite})")
        elif self.train is not None and self.train.scalars["num_steps"] == 0:
            self.drop("skipped", "took no step: too few examples for a batch")

    def keep_probe(self, kept: KeptProbe, round_num: int) -> None:
        """Let an earlier probe count in place of a new one."""
        self.probe, self.score_age = kept.probe, round_num - kept.round_num

    def check_probe(self) -> None:
        """Exclude the client if its score is not finite, which weights could not survive."""
        if self.probe is not None and not self.probe.finite:
            self.drop("excluded", "non-finite validation gradient or loss")


@dataclass(frozen=True)
class Place:
    """Where a unit ran."""

    actor: str
    pid: int
    node: str
    attempt: int


@dataclass(frozen=True)
class PoolUse:
    """What a cohort cost the pools.

    Attributes:
        train_seconds: From the first hand-out to the last update.
        score_tail_seconds: From the last update to the last score.
        client_utilisation: Busy share of the client actors until the last update.
        scorer_utilisation: Busy share of the scorer actors until the last score.
        retries: Units run again because their actor died.
        client_seconds: Busy seconds of all client actors.
        scorer_seconds: Busy seconds of all scorer actors.
    """

    train_seconds: float = 0.0
    score_tail_seconds: float = 0.0
    client_utilisation: float | None = None
    scorer_utilisation: float | None = None
    retries: int = 0
    client_seconds: float = 0.0
    scorer_seconds: float = 0.0


@dataclass(frozen=True)
class FusedModel:
    """What a fusion made of a cohort, on the wire: the global model's vectors, and `Fused.weights` and `.note`."""

    params: np.ndarray
    buffers: Packed
    weights: np.ndarray | None
    note: str


class Observer(Protocol):
    """Who is told how a round goes on."""

    def client_trained(self, client_id: int) -> None:
        """Its training ended, well or not."""

    def client_scored(self, client_id: int) -> None:
        """Its scoring ended, well or not."""


class Executor(Protocol):
    """Runs the work of rounds, in processes that `close` ends."""

    def run_cohort(
        self, broadcast: Broadcast, items: Sequence[WorkItem], observer: Observer
    ) -> tuple[list[Outcome], Tally | None, PoolUse]:
        """Train and probe a cohort; outcomes in client-id order, and the weighting's reference at the global model."""

    def score_more(
        self, broadcast: Broadcast, outcomes: Sequence[Outcome], level: int, reference: Tally | None
    ) -> Tally | None:
        """Score the images that a level adds to a subset of the validation set, for all of the outcomes.

        Their sums are added to those that the level before left in `outcome.sums`; probe, sums and seconds of each outcome are
        replaced, and one whose probe is not finite any more is excluded.

        Args:
            broadcast: Of the round.
            outcomes: With updates; what weights are wanted for.
            level: 1 after `run_cohort`, then one more with every call.
            reference: Of the level before.

        Returns:
            The reference at this level.
        """

    def sums(self, outcomes: Sequence[Outcome], coefficients: Mapping[str, Coefficients]) -> dict[str, np.ndarray]:
        """float64 sums of update fields over `outcomes`, in the fixed groups, the updates of one group at a time."""

    def fuse(
        self,
        outcomes: Sequence[Outcome],
        broadcast: Broadcast,
        merged: Packed,
        buffers: Packed,
        weights: np.ndarray,
    ) -> FusedModel:
        """The fusion of a cohort's models after the server's step, on one scorer."""

    def evaluate(self, params: Vector, buffers: Buffers, then: Callable[[Metrics], None]) -> None:
        """Test a global model on the test set. `then` is told its metrics: at once, or while later work goes on."""

    def drain(self, limit_s: float = math.inf) -> None:
        """Wait for every test that was begun, at most `limit_s`."""

    def end_round(self) -> int:
        """Drop what was kept to make lost updates again; bytes of vectors that went over the network from or to the driver."""

    def adopt(self, setup: Setup, settings: ExecutionSettings, demand: Demand) -> bool:
        """Take over another run with the processes as they are; False, and nothing is changed, if it needs other ones."""

    def fetch(self, handle: Any) -> Any:
        """The object behind a handle (a client's state, for a checkpoint)."""

    def describe(self) -> dict[str, Any]:
        """The resource plan, for the manifest."""

    def close(self) -> None:
        """End every process it started."""
