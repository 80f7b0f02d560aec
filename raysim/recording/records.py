"""What is recorded of a round and of a client's part in it: plain numbers that cost nothing to import or send."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

Status = Literal["ok", "skipped", "excluded", "failed"]
"""What became of a client in a round: its update was used; it had nothing to train on; its update was not usable (not
finite); its work did not end."""


def _check_zones(*times: datetime | None) -> None:
    for time in times:
        if time is not None and time.utcoffset() is None:
            raise ValueError(f"A time stamp needs a time zone, got {time!r}; use datetime.now(UTC).")


@dataclass(frozen=True, kw_only=True)
class ClientRecord:
    """A client's part in one round. What did not happen is None.

    Attributes:
        round_num: The round, 1 = first.
        client_id: The client.
        position: Its place in the sampled cohort, from 0.
        status: What became of it.
        reason: Why it was not used.
        num_examples: n_k, its training examples.
        num_steps: Optimizer steps really taken.
        train_loss: Mean training loss over the examples seen.
        score: Its score; larger = farther from stationary.
        score_age: Rounds since that score was taken; 0 = of this round's model.
        weight: Its aggregation weight; the weights of a round sum to 1.
        validation_loss: Mean loss of its model on the validation set.
        validation_accuracy: Accuracy of its model on the validation set.
        train_s: Seconds of local work.
        score_s: Seconds of scoring.
        queue_s: Seconds between its update being ready and scoring begun.
        peak_memory: Most GPU memory, in bytes, that its local work held.
        actor: Name of the actor that trained it.
        pid: Process id of that actor.
        node: Id of the node of that actor.
        attempt: Number of the attempt that ended, 1 = first.
        scorer: Name of the actor that scored it.
        scorer_pid: Process id of that actor.
        scorer_attempt: Number of the scoring attempt that ended, 1 = first.
        started: Begin of local work, with time zone.
        finished: End of its part (scoring, or local work without scoring), with time zone.
        unit_norms: Norm of its validation gradient per unit, [U]; for TensorBoard, not in the tables.
    """

    round_num: int
    client_id: int
    position: int
    status: Status
    reason: str | None = None
    num_examples: int | None = None
    num_steps: int | None = None
    train_loss: float | None = None
    score: float | None = None
    score_age: int | None = None
    weight: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    train_s: float | None = None
    score_s: float | None = None
    queue_s: float | None = None
    peak_memory: int | None = None
    actor: str | None = None
    pid: int | None = None
    node: str | None = None
    attempt: int | None = None
    scorer: str | None = None
    scorer_pid: int | None = None
    scorer_attempt: int | None = None
    started: datetime | None = None
    finished: datetime | None = None
    unit_norms: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _check_zones(self.started, self.finished)


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One round. What did not happen is None; round 0 is the evaluation of the initial model.

    Attributes:
        round_num: The round, 1 = first.
        started: Begin of the round, with time zone.
        finished: End of the round, with time zone.
        round_s: Seconds from its begin to that of the next round; of the last one, to its checkpoint.
        sampled: Clients of the cohort.
        ok: Clients whose update was used.
        skipped: Clients without anything to train on.
        excluded: Clients whose update was not usable.
        failed: Clients whose work did not end.
        updated: Whether the global model changed; False if no client's update was usable.
        loss: Mean loss of the global model on the test set.
        accuracy: Its accuracy, 0 to 1.
        macro_f1: Its F1 score, averaged over the classes.
        recall: Its recall per class, [K]; None for a class that the test set lacks.
        classes_present: Number of classes that the test set has.
        validation_loss: Mean loss of the global model on the validation set, if `evaluation.validation` asks for it.
        validation_accuracy: Its accuracy there.
        weight_max: Largest client weight.
        weight_entropy: Entropy of the client weights, natural logarithm.
        weight_error: Estimate of the total variation between the weights and those from the whole validation set; None
            when all of it was scored.
        scored_images: Validation images that models were scored on; None when none was.
        train_s: Seconds from the first dispatch to the last update.
        score_tail_s: Seconds from the last update being ready to the last score.
        aggregate_s: Seconds of weighting and summing.
        evaluate_s: Seconds of evaluating the global model; the next round may have begun in the meantime.
        commit_s: Seconds of writing the checkpoint; the rows and events of the round follow it.
        client_utilisation: Share of the client actors' time spent training while the cohort was trained and scored.
        scorer_utilisation: The same for the scorers.
        retries: Units of work that were run again.
        driver_bytes: Bytes of vectors that the driver sent to other nodes and got from them.
        params_checksum: Checksum of the global parameters after the round.
        buffers_checksum: Checksum of the global buffers.
        server_checksum: Checksum of the server state.
        clients_checksum: Checksum of the cohort's client states.
        notes: What else is worth knowing, one sentence each.
    """

    round_num: int
    started: datetime
    finished: datetime
    round_s: float
    sampled: int = 0
    ok: int = 0
    skipped: int = 0
    excluded: int = 0
    failed: int = 0
    updated: bool = False
    loss: float | None = None
    accuracy: float | None = None
    macro_f1: float | None = None
    recall: tuple[float | None, ...] | None = None
    classes_present: int | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    weight_max: float | None = None
    weight_entropy: float | None = None
    weight_error: float | None = None
    scored_images: int | None = None
    train_s: float | None = None
    score_tail_s: float | None = None
    aggregate_s: float | None = None
    evaluate_s: float | None = None
    commit_s: float | None = None
    client_utilisation: float | None = None
    scorer_utilisation: float | None = None
    retries: int = 0
    driver_bytes: int = 0
    params_checksum: str
    buffers_checksum: str
    server_checksum: str
    clients_checksum: str
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_zones(self.started, self.finished)
