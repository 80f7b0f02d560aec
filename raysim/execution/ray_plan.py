"""How many client and scorer actors fit, and which resource says so. Plain arithmetic; nothing here imports ray."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from raysim.errors import ConfigError
from raysim.execution.settings import ExecutionSettings, gpu_share

ACTOR_MEMORY = 350 * 2**20
"""Private memory of an actor that imported torch, in bytes (measured: about 320 MB), before its model."""
STORE_SHARE = 0.3
"""Share of the memory that Ray gives its object store."""
STORE_FULL = 0.8
"""Share of an object store at which Ray begins to move objects to disk."""
ACTORS_PER_GPU = 8
"""Most actors that `num_gpus: auto` puts on one GPU: each costs a CUDA context."""
CONTEXT_MEMORY = 600 * 2**20
"""GPU memory of a process beside torch's tensors, in bytes: a CUDA context takes 0.3 to 0.6 GB."""


@dataclass(frozen=True)
class Node:
    """What one node of the cluster offers in all (not what is free at the moment); memory and object store in bytes.

    Labels are those that the node was started with and those that Ray gives it.
    """

    name: str
    cpus: float
    gpus: float
    memory: float
    store: float = math.inf
    labels: Mapping[str, str] = field(default_factory=dict)


def parts_of(nodes: Sequence[Node], parts: int) -> list[Node]:
    """The k-th part of every node, for one of k runs that share the cluster."""
    shared = ("cpus", "gpus", "memory", "store")
    return [replace(node, **{name: getattr(node, name) / parts for name in shared}) for node in nodes]


def starts_ray(settings: ExecutionSettings) -> bool:
    """Whether a run would start a Ray of its own: no cluster is named, and this process is not connected to one."""
    ray = sys.modules.get("ray")  # A process that has not imported it is not connected.
    named = settings.address or os.environ.get("RAY_ADDRESS")
    return settings.backend == "ray" and not named and not (ray is not None and ray.is_initialized())


def local_nodes(settings: ExecutionSettings, store_bytes: float = 0.0) -> list[Node]:
    """This machine as the one node of a Ray that raysim would start itself, for a run that keeps `store_bytes`.

    Unless told otherwise, the object store gets the share of the free memory that Ray gives it, or up to half of it if the run
    needs as much.
    """
    import torch

    cpus = settings.num_cpus if settings.num_cpus is not None else os.cpu_count() or 1
    gpus = settings.num_gpus if settings.num_gpus is not None else torch.cuda.device_count()
    memory = _available_memory()
    given = settings.object_store_memory_mb
    store = given * 2**20 if given is not None else max(STORE_SHARE * memory, min(store_bytes, 0.5 * memory))
    return [Node("this machine", float(cpus), float(gpus), memory - store, store)]


def _available_memory() -> float:
    """Bytes that processes can still get: what is free or only caches files; on systems that do not say, all memory."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    sizes = dict(line.split(":") for line in lines)
    return 1024.0 * int(sizes["MemAvailable"].split()[0])


@dataclass(frozen=True)
class Demand:
    """What the run would keep busy.

    Attributes:
        cohort: Clients per round.
        clients: Clients of the run.
        scoring_ratio: Images scored over images trained on, per client and round; 0 without scoring.
        model_bytes: Size of the model's vector.
        store_bytes: What a round keeps in the object store: updates of the whole cohort, which are summed when the last one is
            scored, the clients' states, and the data.
    """

    cohort: int
    clients: int
    scoring_ratio: float
    model_bytes: int
    store_bytes: float = 0.0


@dataclass(frozen=True)
class Plan:
    """The pools that will be started.

    Attributes:
        client_actors: Number of client actors.
        scorer_actors: Number of scorer actors.
        client_gpus: Share of a GPU of each client actor.
        scorer_gpus: Share of a GPU of each scorer actor.
        client_cpus: CPUs of each client actor.
        scorer_cpus: CPUs of each scorer actor.
        client_label: Labels of the nodes that may have client actors; empty: all.
        scorer_label: Labels of the nodes that may have scorer actors; empty: all.
        binding: What keeps the client pool from being larger.
        per_client: Whether every client of the run has its own actor.
        nodes: The cluster.
        store_bytes: What the run keeps in the object stores.
    """

    client_actors: int
    scorer_actors: int
    client_gpus: Fraction
    scorer_gpus: Fraction
    client_cpus: float
    scorer_cpus: float
    binding: str
    per_client: bool
    nodes: tuple[Node, ...]
    store_bytes: float = field(default=0.0, compare=False)
    client_label: Mapping[str, str] = field(default_factory=dict)
    scorer_label: Mapping[str, str] = field(default_factory=dict)

    @property
    def warning(self) -> str | None:
        """What will go wrong, though not fail."""
        store = sum(n.store for n in self.nodes)
        if self.store_bytes <= STORE_FULL * store:
            return None
        return (
            f"a round keeps {self.store_bytes / 2**30:.1f} GiB in object stores of {store / 2**30:.1f} GiB: Ray will move "
            "objects to disk and back; raise execution.object_store_memory_mb (or that of the cluster), or lower "
            "client.per_round"
        )

    def lines(self) -> list[str]:
        """The plan in words: the cluster, the pools, the object store."""
        cpus, gpus = sum(n.cpus for n in self.nodes), sum(n.gpus for n in self.nodes)
        memory = sum(n.memory for n in self.nodes) / 2**30
        return [
            f"cluster: {len(self.nodes)} node(s), {cpus:g} CPUs, {gpus:g} GPUs, {memory:.1f} GiB",
            f"client actors: {self.client_actors} x {_share(self.client_cpus, self.client_gpus)}{_on(self.client_label)} "
            f"({self.binding})",
            f"scorer actors: {self.scorer_actors} x {_share(self.scorer_cpus, self.scorer_gpus)}{_on(self.scorer_label)}",
            f"object store: {sum(n.store for n in self.nodes) / 2**30:.1f} GiB, a round keeps "
            f"{self.store_bytes / 2**30:.2g} GiB there",
        ]

    def as_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "backend": "ray",
            "client_actors": self.client_actors,
            "scorer_actors": self.scorer_actors,
            "client": {"num_cpus": self.client_cpus, "num_gpus": str(self.client_gpus)},
            "scorer": {"num_cpus": self.scorer_cpus, "num_gpus": str(self.scorer_gpus)},
            "binding": self.binding,
            "store_bytes": self.store_bytes,
            "nodes": [asdict(node) for node in self.nodes],
        }


def make_plan(settings: ExecutionSettings, nodes: Sequence[Node], demand: Demand) -> Plan:
    """Sizes of both pools for a cluster.

    On CPUs, `auto` fills the reservable CPUs with actors, never with fewer scorers than cores while scoring is the larger
    part of the work; otherwise the split follows the work. On GPUs, `num_gpus: auto` is an equal 1/k for all actors.

    Raises:
        ConfigError: The resources asked for do not exist; says what was asked, what exists and which key to change.
    """
    per_client = settings.client_actors == "per_client"
    clients_given = settings.client_actors if isinstance(settings.client_actors, int) else None
    limit = clients_given or (demand.clients if per_client else demand.cohort)
    gpus = sum(sum(_devices(node)) for node in nodes)
    client_gpus, scorer_gpus = gpu_share(settings.client.num_gpus), gpu_share(settings.scorer.num_gpus)
    auto_share = Fraction(0)
    if gpus and None in (client_gpus, scorer_gpus):
        scored = max(1, math.ceil(demand.cohort * min(demand.scoring_ratio, 1.0)))
        wanted = limit + (scored if settings.scorer_actors == "auto" else settings.scorer_actors)
        by_cpu = sum(node.cpus for node in nodes) / max(settings.client.num_cpus, settings.scorer.num_cpus, 1e-9)
        actors = max(2, min(wanted, int(ACTORS_PER_GPU * gpus), int(by_cpu)))
        auto_share = Fraction(1, math.ceil(actors / gpus))
    client_label, scorer_label = settings.client.label or {}, settings.scorer.label or {}
    client = _Actor(
        "client", settings.client.num_cpus, auto_share if client_gpus is None else client_gpus, client_label
    )
    scorer = _Actor(
        "scorer", settings.scorer.num_cpus, auto_share if scorer_gpus is None else scorer_gpus, scorer_label
    )
    memory = ACTOR_MEMORY + 4 * demand.model_bytes

    problems = [problem for actor in (client, scorer) if (problem := actor.impossible(nodes))]
    if problems:
        raise ConfigError(problems)

    if settings.scorer_actors == "auto":
        scorers = _auto_scorers(nodes, client, scorer, demand, memory)
    else:
        scorers = settings.scorer_actors
    free = _Packing(nodes, memory)
    if (placed := free.place(scorer, scorers)) < scorers:
        raise ConfigError(
            f"execution.scorer_actors: {settings.scorer_actors} needs {scorers} x {scorer} and "
            f"{memory * scorers / 2**30:.1f} GiB, but only {placed} fit on {_offer(nodes)} ({free.binding}-bound); lower "
            "execution.scorer_actors, execution.scorer.num_cpus or execution.scorer.num_gpus"
        )
    placed = free.place(client, limit)
    needed = 1 if settings.client_actors == "auto" else limit
    if placed < needed:
        raise ConfigError(
            f"execution.client_actors: {settings.client_actors} needs {needed} x {client} and "
            f"{memory * needed / 2**30:.1f} GiB, but beside {scorers} x {scorer} for scorers only {placed} fit on "
            f"{_offer(nodes)} ({free.binding}-bound); use fewer client or scorer actors, or smaller ones "
            "(execution.client, execution.scorer)"
        )
    if placed == limit:
        binding = "as configured" if clients_given is not None else "one per client" if per_client else "cohort-bound"
    else:
        binding = f"{free.binding}-bound"
    return Plan(
        client_actors=placed,
        scorer_actors=scorers,
        client_gpus=client.gpus,
        scorer_gpus=scorer.gpus,
        client_cpus=client.cpus,
        scorer_cpus=scorer.cpus,
        binding=binding,
        per_client=per_client,
        nodes=tuple(nodes),
        store_bytes=demand.store_bytes,
        client_label=client_label,
        scorer_label=scorer_label,
    )


def fixed_plan(settings: ExecutionSettings, nodes: Sequence[Node], demand: Demand) -> Plan:
    """The plan of a run whose resources somebody has reserved already: exactly the actors of the configuration.

    Raises:
        ConfigError: It leaves their number open.
    """
    clients, scorers = settings.client_actors, settings.scorer_actors
    if not isinstance(clients, int) or not isinstance(scorers, int):
        raise ConfigError("execution: client_actors and scorer_actors have to be numbers inside a placement group")
    return Plan(
        client_actors=clients,
        scorer_actors=scorers,
        client_gpus=gpu_share(settings.client.num_gpus) or Fraction(0),
        scorer_gpus=gpu_share(settings.scorer.num_gpus) or Fraction(0),
        client_cpus=settings.client.num_cpus,
        scorer_cpus=settings.scorer.num_cpus,
        binding="as reserved",
        per_client=False,
        nodes=tuple(nodes),
        store_bytes=demand.store_bytes,
    )


def round_seconds(train: float, score: float, clients: int, scorers: int) -> float:
    """Seconds of a pipelined round, from the seconds of all training and all scoring of a round: that of the slower pool."""
    return max(train / clients, score / scorers)


def better_split(
    plan: Plan, train: float, score: float, elapsed: float, cohort: int, gain: float = 0.1
) -> tuple[int, int] | None:
    """Another division of the same number of actors that would make rounds shorter, if there is one.

    Args:
        plan: The pools as they are.
        train: Busy seconds of all client actors in some rounds.
        score: Busy seconds of all scorer actors in the same rounds.
        elapsed: Seconds that these rounds took until the last score.
        cohort: Clients per round; more actors than that in a pool have nothing to do.
        gain: Least share of the round's time that it is worth speaking of.

    Returns:
        Client and scorer actors; None if the division is good, if the cores are busy anyway, or if clients and scorers reserve
        different resources or have different nodes and cannot take each other's place.
    """
    client, scorer = (
        (plan.client_cpus, plan.client_gpus, plan.client_label),
        (plan.scorer_cpus, plan.scorer_gpus, plan.scorer_label),
    )
    if client != scorer or not train or not score:
        return None
    actors = plan.client_actors + plan.scorer_actors
    cores = min(actors, sum(node.cpus for node in plan.nodes) if not plan.client_gpus else actors)
    if train + score > (1 - gain) * cores * elapsed:
        return None
    splits = [(c, actors - c) for c in range(1, actors) if c <= cohort and actors - c <= cohort]
    best = min(splits, key=lambda split: round_seconds(train, score, *split), default=None)
    now = round_seconds(train, score, plan.client_actors, plan.scorer_actors)
    return best if best is not None and round_seconds(train, score, *best) < (1 - gain) * now else None


@dataclass(frozen=True)
class _Actor:
    role: str
    cpus: float
    gpus: Fraction
    label: Mapping[str, str]

    def __str__(self) -> str:
        return _share(self.cpus, self.gpus) + _on(self.label)

    def may_use(self, node: Node) -> bool:
        """Whether the node has the labels asked for."""
        return all(node.labels.get(key) == value for key, value in self.label.items())

    def impossible(self, nodes: Sequence[Node]) -> str | None:
        """Why not even one fits, or None."""
        problems = []
        usable = [node for node in nodes if self.may_use(node)]
        if self.label and not usable:
            have = sorted({f"{key}={node.labels[key]}" for node in nodes for key in self.label if key in node.labels})
            return (
                f"execution.{self.role}.label: no node has {_words(self.label)}, {', '.join(have) or 'nothing'} of that kind "
                f"on {len(nodes)} node(s); start a node with: ray start --labels {_words(self.label)}"
            )
        where = f"what is{_on(self.label)}" if self.label else "the cluster"
        for what, asked, amounts in (
            ("num_cpus", self.cpus, [node.cpus for node in usable]),
            ("num_gpus", float(self.gpus), [node.gpus for node in usable]),
        ):
            if asked > max(amounts, default=0):
                problems.append(
                    f"execution.{self.role}.{what}: {asked:g} asked for, but {where} has {sum(amounts):g} in all and the "
                    f"largest node {max(amounts, default=0):g}; lower execution.{self.role}.{what} or add nodes"
                )
        return "; ".join(problems) or None


def _devices(node: Node) -> list[Fraction]:
    """The node's GPUs; of one that is shared with other runs, the part that is ours."""
    whole, part = divmod(Fraction(node.gpus).limit_denominator(1000), 1)
    return [Fraction(1)] * int(whole) + ([part] if part else [])


class _Packing:
    """What is left on each node while actors are placed one by one, fullest choice first (largest free node)."""

    def __init__(self, nodes: Sequence[Node], memory: float) -> None:
        self._nodes = nodes
        self._cpus = [node.cpus for node in nodes]
        self._memory = [node.memory for node in nodes]
        self._gpus = [_devices(node) for node in nodes]
        self._each = memory
        self.binding = "cohort"

    def place(self, actor: _Actor, count: int, *, beside: _Actor | None = None) -> int:
        """Place up to `count` actors, leaving room for one of `beside`; returns how many fit and notes what was short."""
        for placed in range(count):
            node = max((i for i in range(len(self._cpus)) if not self._short(i, actor)), key=self._room, default=None)
            if node is None:
                short = [self._short(i, actor) for i in range(len(self._cpus)) if actor.may_use(self._nodes[i])]
                self.binding = next((s for s in ("GPU", "CPU", "memory") if s in short), "resource")
                return placed
            before = self._cpus[node], self._memory[node], list(self._gpus[node])
            self._cpus[node] -= actor.cpus
            self._memory[node] -= self._each
            self._take_gpus(node, actor.gpus)
            if beside is not None and all(self._short(i, beside) for i in range(len(self._cpus))):
                self._cpus[node], self._memory[node], self._gpus[node] = before
                return placed
        return count

    def _room(self, node: int) -> float:
        return self._cpus[node]

    def _short(self, node: int, actor: _Actor) -> str | None:
        if not actor.may_use(self._nodes[node]):
            return "label"
        if self._cpus[node] + 1e-9 < actor.cpus:
            return "CPU"
        if actor.gpus >= 1 and sum(free == 1 for free in self._gpus[node]) < actor.gpus:
            return "GPU"
        if 0 < actor.gpus < 1 and max(self._gpus[node], default=Fraction(0)) < actor.gpus:
            return "GPU"
        return "memory" if self._memory[node] < self._each else None

    def _take_gpus(self, node: int, share: Fraction) -> None:
        devices = self._gpus[node]
        if share >= 1:
            for _ in range(int(share)):
                devices[devices.index(Fraction(1))] = Fraction(0)
        elif share > 0:
            fitting = [free for free in devices if free >= share]
            devices[devices.index(min(fitting))] -= share


def _auto_scorers(nodes: Sequence[Node], client: _Actor, scorer: _Actor, demand: Demand, memory: float) -> int:
    capacity = _Packing(nodes, memory).place(scorer, 4096)
    cores = max(1, int(sum(node.cpus for node in nodes if scorer.may_use(node))))
    ratio = demand.scoring_ratio
    if ratio >= 1:
        wanted = cores if scorer.gpus == 0 else round(capacity * ratio / (1 + ratio))
    elif ratio > 0:
        wanted = round(capacity * ratio / (1 + ratio))
    else:
        wanted = min(cores, capacity // 2)
    # More scorers than models in a round have nothing to do, and room for a client is left.
    wanted = min(wanted, demand.cohort)
    return max(1, _Packing(nodes, memory).place(scorer, wanted, beside=client))


def proposed_share(peak_bytes: int, total_bytes: int, context_bytes: int = CONTEXT_MEMORY) -> int:
    """Largest k for which k such processes take no more than 0.9 of a GPU; at least 1.

    Args:
        peak_bytes: Most that torch held in a process.
        total_bytes: The GPU's memory.
        context_bytes: What a process takes beside that.
    """
    return max(1, int(0.9 * total_bytes / (peak_bytes + context_bytes)))


def memory_line(peak_bytes: int, total_bytes: int, share: Fraction) -> str | None:
    """What share of a GPU client actors need, in words; None if it is the one that they have.

    Args:
        peak_bytes: Most that torch held in any of them.
        total_bytes: The GPU's memory.
        share: What each of them has of a GPU.
    """
    fitting = Fraction(1, proposed_share(peak_bytes, total_bytes))
    if share == fitting:
        return None
    peak, total = peak_bytes / 2**30, total_bytes / 2**30
    return f"client actors peak at {peak:.1f} GiB of {total:.0f} GiB: execution.client.num_gpus: {fitting} would fit"


def _share(cpus: float, gpus: Fraction) -> str:
    return f"{cpus:g} CPU" + (f" + {gpus} GPU" if gpus else "")


def _words(label: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in label.items())


def _on(label: Mapping[str, str]) -> str:
    return f" on nodes with {_words(label)}" if label else ""


def _offer(nodes: Sequence[Node]) -> str:
    cpus, gpus = sum(n.cpus for n in nodes), sum(n.gpus for n in nodes)
    return f"{len(nodes)} node(s) with {cpus:g} CPUs, {gpus:g} GPUs and {sum(n.memory for n in nodes) / 2**30:.1f} GiB"
