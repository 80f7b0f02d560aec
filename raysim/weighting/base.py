"""What a weighting is: how much each client counts when the server averages.

Shapes: C clients of the cohort that returned a usable update, U units, P trainable scalars, K classes.
"""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Union

import numpy as np

from raysim.errors import RunError
from raysim.fields import Count, Section
from raysim.objective import Batch, BatchNormMode, BatchSums, Objective, Precision
from raysim.subset import SubsetSettings
from raysim.vector import Granularity, Unit, Vector, VectorLayout

Sums = Mapping[str, np.ndarray]
"""What a scorer gathers over validation examples: arrays that add over shards."""

Needs = Literal["nothing", "vectors", "losses", "gradient"]
"""What is computed of a model on a scorer: nothing; its vectors are looked at; a forward pass over the validation set; a
forward and a backward pass."""

_NEEDS: tuple[Needs, ...] = ("nothing", "vectors", "losses", "gradient")


@dataclass(frozen=True)
class ScoringSettings(Section):
    """How client models are scored on the validation set. All of it is part of the numerics.

    Attributes:
        batch_norm: `batch`: BatchNorm uses the statistics of the scoring batch (as published); `running`: the client's
            running statistics; `recalibrate`: statistics of the whole validation set, computed for each model before it is
            scored (a third more work). They can rank clients in opposite order.
        batch_size: Validation images per pass. Batches are fixed for the run and class-stratified.
        shards: Fixed parts of whole batches; their gradient sums are added in shard order.
        precision: `float32`; `tf32`: products on GPUs are rounded to TF32 (no effect on CPUs); `bfloat16`: the forward pass
            is computed in bfloat16, parameters and gradients stay float32. The faster ones repeat as well, to other bits.
        subset: Score on part of the validation set, with the error that this makes of the weights; null: exact. Under
            `batch_norm: recalibrate` the statistics are those of the round's first `images`.
        rescore_every: A client keeps its score until it is this many rounds old; what a guard's gate sees of it is as old.
            1: every model is scored.
    """

    batch_norm: BatchNormMode = "batch"
    batch_size: Count = 256
    shards: Count = 1
    precision: Precision = "float32"
    subset: SubsetSettings | None = None
    rescore_every: Count = 1

    @property
    def grows(self) -> bool:
        """Whether images may be added to those that were scored."""
        return self.subset is not None and self.subset.settle is not None

    def __post_init__(self) -> None:
        if self.subset is None:
            return
        if self.shards != 1:
            raise ValueError(f"shards: {self.shards} should be 1 with scoring.subset, which has parts of its own")
        if self.subset.settle is not None and self.rescore_every != 1:
            raise ValueError(
                f"rescore_every: {self.rescore_every} should be 1 with scoring.subset.settle, which adds images to the "
                "scores of all clients"
            )


@dataclass(frozen=True)
class Scored:
    """The vectors that a scorer has at hand when it turns sums into a probe.

    Attributes:
        params: [P] of the client's model.
        global_params: [P] of the model that the round began with.
        layout: Of both.
        reference: The weighting's own sums at the global model, if it wants any.
    """

    params: Vector
    global_params: Vector
    layout: VectorLayout
    reference: Sums | None = None


@dataclass(frozen=True)
class Probe:
    """What a scorer found out about one client's model.

    Attributes:
        values: float64 [U], what the weighting measured of each unit (FedVG: norms of the validation gradient).
        score: One number for people; larger = farther from stationary, or worse.
        loss: Mean validation loss; None if the data was not looked at.
        correct: Validation examples predicted right.
        count: Validation examples; 0 if the data was not looked at.
        parts: The probes of the weightings that a combination is made of.
        halves: The same of each of the two parts of a subset of the validation set; None when all of it was scored.
    """

    values: np.ndarray = field(default_factory=lambda: np.empty(0))
    score: float | None = None
    loss: float | None = None
    correct: int = 0
    count: int = 0
    parts: tuple[Probe | None, ...] = ()
    halves: tuple[Probe, Probe] | None = None

    @classmethod
    def of(cls, sums: Sums, **fields: Any) -> Probe:
        """A probe with the loss and the predictions that the sums hold, if any."""
        if "count" not in sums:
            return cls(**fields)
        count = int(sums["count"])
        return cls(loss=float(sums["loss"] / sums["count"]), correct=int(sums["correct"]), count=count, **fields)

    @property
    def accuracy(self) -> float | None:
        """Share of validation examples predicted right."""
        return self.correct / self.count if self.count else None

    @property
    def finite(self) -> bool:
        """Whether all of its numbers are."""
        numbers = [*self.values, *(x for x in (self.score, self.loss) if x is not None)]
        inner = (*self.parts, *(self.halves or ()))
        return bool(np.isfinite(numbers).all()) and all(part is None or part.finite for part in inner)

    def as_plain(self) -> dict[str, Any]:
        """Plain values for JSON, whose text keeps every bit of finite numbers."""

        def plain(probes: Sequence[Probe | None]) -> list[dict[str, Any] | None]:
            return [None if probe is None else probe.as_plain() for probe in probes]

        return {
            **{name: getattr(self, name) for name in ("score", "loss", "correct", "count")},
            "values": self.values.tolist(),
            "parts": plain(self.parts),
            "halves": self.halves and plain(self.halves),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Probe:
        """The inverse of `as_plain`."""
        halves = plain["halves"] and tuple(cls.from_plain(half) for half in plain["halves"])
        parts = tuple(part and cls.from_plain(part) for part in plain["parts"])
        values = np.array(plain["values"], dtype=np.float64)
        return cls(**{**plain, "values": values, "parts": parts, "halves": halves})


@dataclass(frozen=True)
class KeptProbe:
    """A probe of an earlier round, `round_num`, that still counts."""

    round_num: int
    probe: Probe

    def as_plain(self) -> dict[str, Any]:
        """In JSON's own types, for a checkpoint."""
        return {"round_num": self.round_num, **self.probe.as_plain()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> KeptProbe:
        """The inverse of `as_plain`, bit for bit."""
        return cls(plain["round_num"], Probe.from_plain({k: v for k, v in plain.items() if k != "round_num"}))


@dataclass(frozen=True)
class Tally:
    """What was gathered at one model.

    Attributes:
        total: Sums over all images that were looked at.
        parts: Sums over each of the two parts of a subset; None when all of the validation set was looked at.
    """

    total: Sums
    parts: tuple[Sums, Sums] | None = None

    @classmethod
    def of(cls, first: Sums, second: Sums) -> Tally:
        """The tally of two parts."""
        return cls(add_sums((first, second)), (first, second))


@dataclass(frozen=True)
class Report:
    """What the driver knows of one client's update when it decides on weights; no vector of the model's size.

    Attributes:
        client_id: Who.
        num_examples: n_k.
        num_steps: Optimizer steps taken.
        loss: Mean training loss.
        probe: The scorer's findings; None if the weighting needs nothing.
        class_counts: int64 [K], the client's training examples of each class.
    """

    client_id: int
    num_examples: int
    num_steps: int
    loss: float
    probe: Probe | None = None
    class_counts: np.ndarray | None = None

    def of_half(self, index: int) -> Report:
        """The same with the findings on one part of the subset that was scored."""
        halves = self.probe and self.probe.halves
        return replace(self, probe=halves[index]) if halves else self


@dataclass(frozen=True)
class Weights:
    """Aggregation weights of the cohort, in the order of the reports.

    Attributes:
        client: float64 [C], >= 0, sums to 1.
        unit: float64 [C, U] whose columns sum to 1, or None when all units share `client`.
        granularity: The units of `unit`.
        notes: What a user should know: a fallback taken, a client that dominates.
        factors: What deltas are shortened to, in [0, 1], [C] or [C, U]; None: they are not.
        rejected: Index of a client -> why it has no part in the round at all; its weight is 0.

    Raises:
        RunError: They are no distribution over clients, because something overflowed.
    """

    client: np.ndarray
    unit: np.ndarray | None = None
    granularity: Granularity | Literal["model"] = "model"
    notes: tuple[str, ...] = ()
    factors: np.ndarray | None = None
    rejected: Mapping[int, str] = field(default_factory=dict)

    @property
    def parameters(self) -> np.ndarray:
        """The weights of the parameters: [C, U] if they are given per unit, else [C]."""
        return self.client if self.unit is None else self.unit

    @property
    def deltas(self) -> np.ndarray:
        """What the deltas are multiplied by, [C] or [C, U]; may sum to less than 1."""
        if self.factors is None:
            return self.parameters
        wide = self.parameters.ndim > self.factors.ndim
        deltas: np.ndarray = self.parameters * (self.factors[:, None] if wide else self.factors)
        return deltas

    def of(self, members: Sequence[int]) -> Weights:
        """The same for some of the clients, among them all with any weight."""
        rows = list(members)
        unit = None if self.unit is None else self.unit[rows]
        factors = None if self.factors is None else self.factors[rows]
        return Weights(self.client[rows], unit, self.granularity, self.notes, factors)

    def __post_init__(self) -> None:
        for array in (self.client, self.parameters):
            if not (np.all(array >= 0) and np.allclose(array.sum(axis=0), 1.0, rtol=0, atol=1e-6)):
                raise RunError(
                    f"the weights {array.tolist()} are no shares that sum to 1: something in them overflowed"
                )


class Weighting(Section, ABC):
    """Base of all weightings: a frozen dataclass whose fields are its hyper-parameters.

    `accumulate` and `finish` run on a scorer, `reference` once per round at the global model, `weights` on the driver.
    A weighting that needs nothing of the models implements `weights` only and costs no scoring.
    """

    name: str

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """A configuration's field of type `Weighting` takes any registered one, picked by its `name`."""
        if cls is not Weighting:
            return handler(source)
        from pydantic import Field

        members = tuple(WEIGHTINGS.values())
        return handler.generate_schema(Annotated[Union[members], Field(discriminator="name")])  # noqa: UP007

    @property
    def needs(self) -> Needs:
        """What a scorer computes of every client's model."""
        return "nothing"

    @property
    def reference_needs(self) -> Needs:
        """What a scorer computes of the global model, once per round, before it scores clients."""
        return "nothing"

    @property
    def clips(self) -> bool:
        """Whether it may shorten updates."""
        return False

    @property
    def needs_probe(self) -> bool:
        """Whether clients are scored at all."""
        return self.needs != "nothing"

    @property
    def stackable(self) -> bool:
        """Whether several models can be scored in one call: it wants the plain sums over the validation set."""
        return type(self).accumulate is Weighting.accumulate and self.needs in ("losses", "gradient")

    @property
    def needs_images(self) -> bool:
        """Whether any model is run on the validation set."""
        return most([self.needs, self.reference_needs]) in ("losses", "gradient")

    @property
    def granularity(self) -> Granularity | Literal["model"]:
        """The units that get weights of their own."""
        return "model"

    @property
    def needs_edges(self) -> bool:
        """Whether the layout has to know which module feeds which."""
        return False

    def scored_units(self, layout: VectorLayout) -> tuple[Unit, ...]:
        """The units of its probe's values."""
        return ()

    def gradient_units(self, layout: VectorLayout) -> tuple[Unit, ...] | None:
        """The units whose gradient at a client's model is wanted, if there is a need of gradients; None: all."""
        return None

    def reference(self, objective: Objective, shards: Iterable[Iterable[Batch]]) -> Sums | None:
        """Sums at the *global* model, which is loaded; None if nothing is needed."""
        if self.reference_needs == "nothing":
            return None
        return add_sums(validation_sums(objective, shard, self.reference_needs) for shard in shards)

    def accumulate(self, objective: Objective, shard: Iterable[Batch]) -> Sums:
        """Gather sums over the batches of one shard at the client's model, which is loaded. Leaves the model unchanged."""
        return validation_sums(objective, shard, self.needs, self.gradient_units(objective.layout))

    def finish(self, sums: Sums, model: Scored) -> Probe:
        """Turn sums over the whole validation set into a probe."""
        return Probe.of(sums)

    @abstractmethod
    def weights(self, reports: Sequence[Report], reference: Sums | None, layout: VectorLayout) -> Weights:
        """Weights of the cohort. `reports` is not empty, in client-id order, and all numbers in it are finite."""


WEIGHTINGS: dict[str, type[Weighting]] = {}
"""All weightings by name; filled by the package, so that a combination finds its parts."""


class Combination(Weighting):
    """A weighting made of others, whose models are scored once for all of them."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Weighting, ...]:
        """The weightings that it is made of."""

    def __post_init__(self) -> None:
        for part in self.parts:
            own = type(part).accumulate, type(part).reference
            if own != (Weighting.accumulate, Weighting.reference):
                raise ValueError(f"{part.name} gathers sums of its own and cannot be combined with others")

    @property
    def needs(self) -> Needs:
        """What any part needs."""
        return most(part.needs for part in self.parts)

    @property
    def reference_needs(self) -> Needs:
        """What any part needs of the global model."""
        return most(part.reference_needs for part in self.parts)

    @property
    def clips(self) -> bool:
        """Whether any part does."""
        return any(part.clips for part in self.parts)

    @property
    def granularity(self) -> Granularity | Literal["model"]:
        """That of the first part with weights per unit."""
        return next((part.granularity for part in self.parts if part.granularity != "model"), "model")

    @property
    def needs_edges(self) -> bool:
        """Whether any part does."""
        return any(part.needs_edges for part in self.parts)

    def scored_units(self, layout: VectorLayout) -> tuple[Unit, ...]:
        """The units of the first part that has some."""
        return next((units for part in self.parts if (units := part.scored_units(layout))), ())

    def gradient_units(self, layout: VectorLayout) -> tuple[Unit, ...] | None:
        """Those of all parts that need a gradient."""
        wanted = [part.gradient_units(layout) for part in self.parts if part.needs == "gradient"]
        some = [units for units in wanted if units is not None]
        return tuple(unit for units in some for unit in units) if some and len(some) == len(wanted) else None

    def finish(self, sums: Sums, model: Scored) -> Probe:
        """The parts' probes; values and score are those of the first part that has units, or else a score."""
        parts = tuple(part.finish(sums, model) if part.needs_probe else None for part in self.parts)
        scored = [probe for probe in parts if probe is not None and probe.score is not None]
        first = next((probe for probe in scored if probe.values.size), scored[0] if scored else Probe())
        return Probe.of(sums, values=first.values, score=first.score, parts=parts)

    def of_part(self, index: int, reports: Sequence[Report], reference: Sums | None, layout: VectorLayout) -> Weights:
        """The weights of one part."""
        own = [replace(report, probe=report.probe and report.probe.parts[index]) for report in reports]
        return self.parts[index].weights(own, reference, layout)


def validation_sums(
    objective: Objective, batches: Iterable[Batch], needs: Needs, units: Sequence[Unit] | None = None
) -> Sums:
    """Summed gradient [P] if it is needed, summed loss, correct predictions and examples over the batches.

    Given `units`, the gradient is that of these units, and zero elsewhere.
    """
    if needs in ("nothing", "vectors"):
        return {}
    gradient = needs == "gradient"
    objective.grad.zero_()
    with objective.limited_to(units) if gradient and units is not None else nullcontext():
        sums = [objective.add_gradient(batch) if gradient else objective.losses(batch) for batch in batches]
    return sums_of(objective.grad if gradient else None, functools.reduce(operator.add, sums))


def sums_of(gradient: Vector | None, sums: BatchSums) -> Sums:
    """One model's sums as arrays, fetched from its device."""
    return {
        **({} if gradient is None else {"gradient": gradient.cpu().numpy().astype(np.float64)}),
        "loss": np.array(float(sums.loss), dtype=np.float64),
        "correct": np.array(int(sums.correct)),
        "count": np.array(sums.count),
    }


def most(needs: Iterable[Needs]) -> Needs:
    """The need that covers all others."""
    return max(needs, key=_NEEDS.index)


def registered(name: str, **fields: Any) -> Weighting:
    """A weighting by its name in the registry."""
    return WEIGHTINGS[name](**fields)


def add_sums(shards: Iterable[Sums]) -> Sums:
    """The sums of shards, added in their order."""
    iterator = iter(shards)
    total = dict(next(iterator))
    for sums in iterator:
        total = {name: total[name] + value for name, value in sums.items()}
    return total


def normalised(values: np.ndarray) -> np.ndarray:
    """Non-negative values over clients [C] or [C, U], divided by their sum over clients."""
    result: np.ndarray = values / values.sum(axis=0)
    return result


def by_size(reports: Sequence[Report]) -> np.ndarray:
    """p_k = n_k / sum_j n_j, [C]: FedAvg's weights, and what other weightings fall back to."""
    return normalised(np.array([report.num_examples for report in reports], dtype=np.float64))


def probes_of(reports: Sequence[Report]) -> list[Probe]:
    """The probe of every report."""
    probes = [report.probe for report in reports if report.probe is not None]
    assert len(probes) == len(reports), "every report has a probe"
    return probes
