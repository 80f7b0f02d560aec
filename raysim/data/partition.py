"""Who holds what: the partition of the training data over the clients.

Three schemes:

    iid        every class dealt out in turn: client sizes differ by at most one, and so do the counts of each class
    dirichlet  per class c, p_c ~ Dir(alpha, ..., alpha) over the clients; the class is cut by the cumulated p_c
    file       a partition made elsewhere

A Dirichlet draw is repeated until every client has `min_examples`, at most `max_tries` times. After that the draw with
the largest minimum is repaired: as long as a client has too few, the largest client gives the smallest one an example
of the giver's most frequent class (the first of equals in each case).

Shapes: N clients, K classes.

Reference: Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks, ICML 2019, arXiv:1905.12022
(the draw over clients for each class).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from raysim.data.arrays import listing
from raysim.errors import ConfigError
from raysim.fields import Count, NonNegativeInt, Positive, Section
from raysim.seeding import Purpose, rng_for
from raysim.vector import checksum

Scheme = Literal["iid", "dirichlet", "file"]

_ALPHA_RANGE = (1e-12, 1e12)
"""Beyond these, one client has all of a class or all have equal shares, up to rounding, and numbers would overflow."""


@dataclass(frozen=True)
class PartitionSettings(Section):
    """How the training examples are dealt out to clients.

    Attributes:
        scheme: `iid`, `dirichlet` (label skew) or `file`.
        clients: Number of clients N.
        alpha: Concentration of `dirichlet`: small is skewed, large is even (0.1 as in the FedVG paper).
        min_examples: Fewest examples of a client; 2, so that BatchNorm has a statistic. A file is taken as it is.
        path: The file of scheme `file`: Parquet as written by raysim, or JSON with one list of example numbers for each
            client.
        max_tries: Dirichlet draws before the best one is repaired.
    """

    scheme: Scheme = "dirichlet"
    clients: Count = 20
    alpha: Positive = 0.1
    min_examples: NonNegativeInt = 2
    path: Path | None = None
    max_tries: Count = 100

    def __post_init__(self) -> None:
        if self.scheme == "file" and self.path is None:
            raise ValueError("partition.path is required with partition.scheme file")
        if self.scheme != "file" and self.path is not None:
            raise ValueError(f"partition.path is only used with partition.scheme file, and the scheme is {self.scheme}")


@dataclass(frozen=True, eq=False)
class Partition:
    """Which training example belongs to which client; no example to more than one.

    Attributes:
        indices: Positions in the training data, int64, client by client, ascending for each client.
        offsets: Where each client's part of `indices` begins and the last one ends, int64 [N+1].
        scheme: How it was made.
        tries: Dirichlet draws made; 0 with other schemes.
        repaired: Examples that the repair moved.
    """

    indices: np.ndarray
    offsets: np.ndarray
    scheme: Scheme
    tries: int = 0
    repaired: int = 0

    @classmethod
    def from_lists(
        cls, clients: Sequence[np.ndarray], scheme: Scheme, *, tries: int = 0, repaired: int = 0
    ) -> Partition:
        """The partition that gives each client the examples listed for it, in any order."""
        parts = [np.sort(np.asarray(client, dtype=np.int64)) for client in clients]
        offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return cls(np.concatenate([np.empty(0, dtype=np.int64), *parts]), offsets, scheme, tries, repaired)

    @property
    def num_clients(self) -> int:
        """N, clients without examples included."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Examples of each client, int64 [N]."""
        return np.diff(self.offsets)

    @property
    def content_hash(self) -> str:
        """Hash of who holds what, and of nothing else."""
        return checksum(self.indices, self.offsets)

    def of(self, client_id: int) -> np.ndarray:
        """The client's examples: positions in the training data, ascending."""
        return self.indices[self.offsets[client_id] : self.offsets[client_id + 1]]

    def class_counts(self, labels: np.ndarray, num_classes: int) -> np.ndarray:
        """How many examples of each class each client has.

        Args:
            labels: Labels of the whole training data.
            num_classes: K.

        Returns:
            int64 [N, K].
        """
        owners = np.repeat(np.arange(self.num_clients), self.sizes)
        cells = owners * num_classes + labels[self.indices]
        return np.bincount(cells, minlength=self.num_clients * num_classes).reshape(self.num_clients, num_classes)

    def write(self, path: Path, *, labels: np.ndarray | None = None) -> None:
        """Write a Parquet file, one row for each example (client int32, example int64); whole or not at all.

        With `labels` of the whole training data there is a third column, label int64, for readers of the results. The
        schema's metadata holds the number of clients (some may have no row), the content hash, the scheme, tries
        and repaired.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        metadata = {
            "num_clients": str(self.num_clients),
            "content_hash": self.content_hash,
            "scheme": self.scheme,
            "tries": str(self.tries),
            "repaired": str(self.repaired),
        }
        fields = [pa.field("client", pa.int32(), nullable=False), pa.field("example", pa.int64(), nullable=False)]
        owners = np.repeat(np.arange(self.num_clients, dtype=np.int32), self.sizes)
        columns = [owners, self.indices]
        if labels is not None:
            fields.append(pa.field("label", pa.int64(), nullable=False))
            columns.append(labels[self.indices])
        table = pa.table(columns, schema=pa.schema(fields, metadata=metadata))
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with unfinished.open("wb") as file:
                pq.write_table(table, file, compression="zstd")
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: Path) -> Partition:
        """Read what `write` has written.

        Raises:
            ConfigError: The file is absent, not such a file, or its content does not fit its hash.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            # Through Python's own open, which takes any path.
            with path.open("rb") as file:
                table = pq.read_table(file)
            metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
            owners = table["client"].cast(pa.int64()).to_numpy()
            sizes = np.bincount(owners, minlength=int(metadata["num_clients"]))
            partition = cls(
                table["example"].cast(pa.int64()).to_numpy(),
                np.cumsum([0, *sizes], dtype=np.int64),
                metadata["scheme"],
                int(metadata["tries"]),
                int(metadata["repaired"]),
            )
            content_hash = metadata["content_hash"]
        except (OSError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ConfigError(f"{_describe(path)} cannot be read as a partition written by raysim: {reason}") from error
        if partition.content_hash != content_hash:
            raise ConfigError(
                f"{_describe(path)} is damaged or was changed: its content has hash {partition.content_hash}, it says "
                f"{content_hash}"
            )
        return partition


def make_partition(settings: PartitionSettings, labels: np.ndarray, available: np.ndarray, seed: int) -> Partition:
    """Deal the available training examples out to the clients.

    Args:
        settings: Scheme and sizes.
        labels: Labels of the whole training data.
        available: The positions in it that clients may hold, in any order (the others are the validation set's).
        seed: The run's seed.

    Returns:
        The partition. Of `iid` and `dirichlet` every available example belongs to exactly one client, and every client
        has at least `min_examples`.

    Raises:
        ConfigError: There are too few examples, or the file does not fit.
    """
    available = np.sort(available)
    if settings.scheme == "file":
        assert settings.path is not None
        return _from_file(settings.path.absolute(), settings.clients, len(labels), available)
    needed = settings.clients * settings.min_examples
    if needed > len(available):
        raise ConfigError(
            f"partition: {settings.clients} clients with min_examples {settings.min_examples} need {needed} examples, "
            f"but only {len(available)} are available; lower partition.clients or partition.min_examples"
        )
    rng = rng_for(seed, Purpose.PARTITION)
    if settings.scheme == "iid":
        return _iid(settings.clients, labels, available, rng)
    return _dirichlet(settings, labels, available, rng)


def _iid(num_clients: int, labels: np.ndarray, available: np.ndarray, rng: np.random.Generator) -> Partition:
    """Deal the examples, class after class and shuffled inside a class, to the clients in turn."""
    order = available[np.lexsort((rng.permutation(len(available)), labels[available]))]
    return Partition.from_lists([order[turn::num_clients] for turn in rng.permutation(num_clients)], "iid")


def _dirichlet(
    settings: PartitionSettings, labels: np.ndarray, available: np.ndarray, rng: np.random.Generator
) -> Partition:
    _, classes, class_sizes = np.unique(labels[available], return_inverse=True, return_counts=True)
    best = _draw_counts(class_sizes, settings.clients, settings.alpha, rng)
    tries = 1
    while _smallest(best) < settings.min_examples and tries < settings.max_tries:
        counts = _draw_counts(class_sizes, settings.clients, settings.alpha, rng)
        tries += 1
        if _smallest(counts) > _smallest(best):
            best = counts
    repaired = _repair(best, settings.min_examples)
    order = available[np.lexsort((rng.permutation(len(available)), classes))]
    # In `order`, class by class, the first best[0, 0] examples are client 0's, the next best[0, 1] client 1's, ...
    owners = np.repeat(np.tile(np.arange(settings.clients), len(class_sizes)), best.reshape(-1))
    by_owner = order[np.argsort(owners, kind="stable")]
    clients = np.split(by_owner, np.cumsum(best.sum(axis=0))[:-1])
    return Partition.from_lists(clients, "dirichlet", tries=tries, repaired=repaired)


def _draw_counts(class_sizes: np.ndarray, num_clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """One Dirichlet draw: how many examples of each class each client gets, int64 [K, N]."""
    proportions = _dirichlet_rows(len(class_sizes), num_clients, alpha, rng)
    cuts = np.rint(np.cumsum(proportions, axis=1) * class_sizes[:, np.newaxis]).astype(np.int64)
    cuts[:, -1] = class_sizes
    counts = np.diff(cuts, axis=1, prepend=0)
    # The clients are exchangeable. Shuffling them keeps the rounding of nearly equal proportions from favouring the
    # same clients in every class.
    return rng.permuted(counts, axis=1)


def _dirichlet_rows(num_rows: int, num_columns: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Independent rows from the symmetric Dirichlet distribution, each with sum 1.

    Gamma variates divided by their sum, in logarithms: with G(a) ~ G(a+1) * U**(1/a), log G(a) is `log G(a+1) - E/a`
    with E exponential. The plain variates underflow, all of a row at once, when alpha is small.
    """
    alpha = min(max(alpha, _ALPHA_RANGE[0]), _ALPHA_RANGE[1])
    shape = (num_rows, num_columns)
    scaled_logs = alpha * np.log(rng.standard_gamma(alpha + 1, shape)) - rng.standard_exponential(shape)
    gammas = np.exp((scaled_logs - scaled_logs.max(axis=1, keepdims=True)) / alpha)
    rows: np.ndarray = gammas / gammas.sum(axis=1, keepdims=True)
    return rows


def _smallest(counts: np.ndarray) -> int:
    return int(counts.sum(axis=0).min())


def _repair(counts: np.ndarray, min_examples: int) -> int:
    """Move examples in `counts` [K, N], in place, until every client has enough; the number moved."""
    sizes = counts.sum(axis=0)
    moved = 0
    while sizes[receiver := int(sizes.argmin())] < min_examples:
        giver = int(sizes.argmax())
        given = int(counts[:, giver].argmax())
        counts[given, giver] -= 1
        counts[given, receiver] += 1
        sizes[giver] -= 1
        sizes[receiver] += 1
        moved += 1
    return moved


def _from_file(path: Path, num_clients: int, num_examples: int, available: np.ndarray) -> Partition:
    """The partition in a file, if it fits the run."""
    if not path.is_file():
        raise ConfigError(f"partition.path: {path} {'is a folder' if path.is_dir() else 'does not exist'}")
    with path.open("rb") as file:
        is_parquet = file.read(4) == b"PAR1"
    partition = replace(Partition.read(path), scheme="file") if is_parquet else _read_json(path)
    problems = []
    if partition.num_clients != num_clients:
        problems.append(f"partition.clients: {num_clients} given, but {path} has {partition.num_clients} clients")
    found, repeats = np.unique(partition.indices, return_counts=True)
    if (repeats > 1).any():
        problems.append(f"partition.path: {path} lists examples more than once: {listing(found[repeats > 1])}")
    outside = (found < 0) | (found >= num_examples)
    if outside.any():
        problems.append(
            f"partition.path: {path} lists examples outside the training data, 0..{num_examples - 1}: "
            f"{listing(found[outside])}"
        )
    closed = np.setdiff1d(found[~outside], available)
    if len(closed):
        owners = np.repeat(np.arange(partition.num_clients), partition.sizes)[np.isin(partition.indices, closed)]
        problems.append(
            f"partition.path: {path} gives {len(closed)} examples of the validation set to clients (client "
            f"{listing(np.unique(owners))}): {listing(closed)}; make it from the examples that data.validation leaves"
        )
    if problems:
        raise ConfigError(problems)
    return partition


def _read_json(path: Path) -> Partition:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{_describe(path)} is neither Parquet nor JSON: {error}") from error
    if not isinstance(content, list) or not all(
        isinstance(client, list) and all(type(example) is int and abs(example) < 2**63 for example in client)
        for client in content
    ):
        raise ConfigError(
            f"{_describe(path)} is not a JSON list that holds one list of example numbers for each client"
        )
    return Partition.from_lists(content, "file")


def _describe(path: Path) -> str:
    size = f" ({path.stat().st_size} bytes)" if path.is_file() else ""
    return f"partition: {path.absolute()}{size}"
