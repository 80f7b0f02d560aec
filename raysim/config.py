"""A run, fully stated: from a YAML file and `key.path=value` overrides to a checked `RunConfig`.

Everything wrong is listed at once, each with file, line, key path, what was given and what is accepted.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import io
import json
import math
import os
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from ruamel.yaml import YAML

from raysim.algorithms import ALGORITHMS
from raysim.algorithms.base import Algorithm, AnyAlgorithm
from raysim.configfile import KeyPath, apply_overrides, read_yaml
from raysim.data import SOURCES
from raysim.data.arrays import DataSettings
from raysim.data.partition import PartitionSettings
from raysim.errors import ConfigError
from raysim.evaluation import EvaluationSettings
from raysim.execution.settings import ExecutionSettings
from raysim.fields import Count, Fraction, NonNegativeInt, Positive, Section
from raysim.fusion import FUSIONS
from raysim.fusion.base import Fusion
from raysim.local import LocalTraining
from raysim.models import MODELS
from raysim.models.base import ModelSettings
from raysim.objective import Precision
from raysim.recording import OutputSettings
from raysim.recording.hparams import path_problems
from raysim.weighting import WEIGHTINGS
from raysim.weighting.base import ScoringSettings, Weighting

DEFAULT_FRACTION = 0.1
"""Share of the clients per round when a configuration gives neither `per_round` nor `fraction` (FedAvg's and FedVG's 0.1)."""


def folder_name(name: str) -> str:
    """The name, if it can be that of a folder; else a ValueError."""
    if "/" in name or name in ("", ".", "..") or name != name.strip() or not name.isprintable():
        raise ValueError(f"{name!r} cannot be the name of a folder")
    return name


def _one_of(registry: Mapping[str, type]) -> Any:
    """The type of a section whose `name` picks a member of a registry."""
    members = tuple(registry.values())
    return members[0] if len(members) == 1 else Annotated[Union[members], Field(discriminator="name")]  # noqa: UP007


if TYPE_CHECKING:
    AlgorithmSection = AnyAlgorithm
    FusionSection = Fusion
else:
    AlgorithmSection = _one_of(ALGORITHMS)
    FusionSection = _one_of(FUSIONS)


@dataclass(frozen=True)
class ClientSettings(LocalTraining):
    """Participation and local training.

    Attributes:
        per_round: Clients per round; or
        fraction: their share of all clients, `max(1, floor(N * fraction + 1/2))`. Neither: 0.1.
        timeout_s: Longest time a client may train in one round; null: no limit.
        precision: Of local training: `float32`, `tf32` (products on GPUs are rounded to TF32; no effect on CPUs) or
            `bfloat16` (the forward pass only). Part of the numerics; each repeats, to bits of its own.
    """

    per_round: Count | None = None
    fraction: Fraction | None = None
    timeout_s: Positive | None = None
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        if self.per_round is not None and self.fraction is not None:
            raise ValueError("give per_round or fraction, not both")

    def cohort_size(self, num_clients: int) -> int:
        """Clients per round out of `num_clients`."""
        if self.per_round is not None:
            return self.per_round
        fraction = DEFAULT_FRACTION if self.fraction is None else self.fraction
        return max(1, math.floor(num_clients * fraction + 0.5))


@dataclass(frozen=True)
class RunConfig(Section):
    """One run.

    Attributes:
        name: Name of the run and of its folder below `output.dir`.
        seed: All randomness is a function of it.
        rounds: Communication rounds.
        data: Images and validation set.
        partition: Which client holds which example.
        model: Network.
        client: Participation and local training.
        algorithm: How clients train and the server steps.
        weighting: How much each client counts; null: that of the algorithm's paper.
        fusion: What the server trains on its own data at the end of a round; null: nothing.
        scoring: How client models are scored.
        evaluation: When the global model is tested.
        execution: Where the work runs.
        deterministic: Deterministic kernels on GPUs (the CPU always repeats).
        output: Results.
    """

    name: Annotated[str, AfterValidator(folder_name)] = "run"
    seed: NonNegativeInt = 0
    rounds: Count = 30
    data: DataSettings = field(default_factory=DataSettings)
    partition: PartitionSettings = field(default_factory=PartitionSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    client: ClientSettings = field(default_factory=ClientSettings)
    algorithm: AlgorithmSection = field(default_factory=ALGORITHMS["fedavg"])
    weighting: Weighting | None = None
    fusion: FusionSection | None = None
    scoring: ScoringSettings = field(default_factory=ScoringSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    execution: ExecutionSettings = field(default_factory=ExecutionSettings)
    deterministic: bool = True
    output: OutputSettings = field(default_factory=OutputSettings)

    def __post_init__(self) -> None:
        if self.weighting is None:
            object.__setattr__(self, "weighting", WEIGHTINGS[self.algorithm.default_weighting]())
        if self.client.per_round is not None and self.client.per_round > self.partition.clients:
            raise ValueError(
                f"client.per_round: {self.client.per_round} exceeds partition.clients: {self.partition.clients}"
            )
        if problems := path_problems(type(self), tuple(self.output.hparams or ())):
            raise ValueError(f"output.hparams: {'; '.join(problems)}")
        self.algorithm.check(self.client)
        assert self.weighting is not None
        if self.weighting.clips and type(self.algorithm).init_client is not Algorithm.init_client:
            raise ValueError(
                f"weighting: clip shortens updates in the mean only; {self.algorithm.name} keeps sums of whole ones too"
            )
        if self.weighting.clips and self.scoring.rescore_every > 1:
            raise ValueError(
                f"scoring.rescore_every: {self.scoring.rescore_every} keeps lengths of earlier updates, but weighting: clip "
                "needs those of this round; use 1"
            )
        if self.fusion is not None:
            self.fusion.check(self.algorithm, self.weighting)

    @property
    def cohort_size(self) -> int:
        """Clients per round."""
        return self.client.cohort_size(self.partition.clients)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.output.dir / self.name

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for YAML or JSON; reads back as an equal configuration."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self), default=str))
        return plain

    def as_yaml(self) -> str:
        """The resolved configuration as YAML."""
        stream = io.StringIO()
        yaml: Any = YAML(typ="safe", pure=True)
        yaml.default_flow_style = False
        yaml.allow_unicode = True
        yaml.sort_base_mapping_type_on_output = False
        yaml.dump(self.as_dict(), stream)
        return stream.getvalue()


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, override and check a configuration file; relative paths become absolute.

    Args:
        path: YAML file. Without a `name` in it, the run is named like the file.
        overrides: `key.path=value`, the value in YAML.

    Raises:
        ConfigError: All problems, each with its place.
    """
    path = Path(path)
    values, places = read_yaml(path)
    values.setdefault("name", path.stem)
    apply_overrides(values, places, overrides)
    return resolve(values, places=places, source=str(path))


def resolve(
    values: Mapping[str, Any], *, places: Mapping[KeyPath, str] | None = None, source: str = "configuration"
) -> RunConfig:
    """Check plain values and make their paths absolute.

    Args:
        values: Nested mappings, as read from YAML.
        places: Where each key path stands, for messages.
        source: Used where no place is known.

    Raises:
        ConfigError: All problems.
    """
    places = places or {}
    problems = _unknown_names(values, places, source)
    try:
        config = validated(RunConfig, values, places=places, source=source)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from None
    if problems:
        raise ConfigError(problems)
    return _absolute(config, source)


def _unknown_names(values: Mapping[str, Any], places: Mapping[KeyPath, str], source: str) -> list[str]:
    """A data set or a network that no registry has; only timm knows its own names."""
    problems = []
    for section, registry in (("data", SOURCES), ("model", MODELS)):
        given = values.get(section)
        name = given.get("name") if isinstance(given, Mapping) else None
        if isinstance(name, str) and name not in registry and not (section == "model" and name.startswith("timm:")):
            place = places.get((section, "name"), source)
            also = " or timm:<name>" if section == "model" else ""
            problems.append(f"{place}: {section}.name: {_accepted(registry, name)}{also}, got {_show(name)}")
    return problems


Kind = TypeVar("Kind", bound=Section)


def validated(kind: type[Kind], values: Mapping[str, Any], *, places: Mapping[KeyPath, str], source: str) -> Kind:
    """Plain values as the configuration that they state.

    Args:
        kind: The dataclass behind the outermost keys.
        values: Nested mappings, as read from YAML.
        places: Where each key path stands, for messages.
        source: Used where no place is known.

    Raises:
        ConfigError: All problems.
    """
    try:
        checked: Kind = _validator(kind).validate_json(json.dumps(values, default=str))  # type: ignore[arg-type]
        return checked
    except ValidationError as error:
        raise ConfigError(_explain(error, values, places, source, kind)) from None


@functools.cache
def _validator(kind: type[Section]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _explain(
    error: ValidationError,
    values: Mapping[str, Any],
    places: Mapping[KeyPath, str],
    source: str,
    root: type[Section] = RunConfig,
) -> list[str]:
    """Pydantic's findings about a configuration of type `root` in the words of a user, one per key."""
    found: dict[KeyPath, list[str]] = {}
    shown: dict[KeyPath, str] = {}
    for item in error.errors():
        path, section = _walk(item["loc"], values, root)
        kind, given, context = item["type"], item["input"], item.get("ctx", {})
        if kind == "unexpected_keyword_argument":
            path = (*path, str(item["loc"][-1]))
            text = f"unknown key{_suggest(path, section)}"
        elif kind in ("union_tag_invalid", "union_tag_not_found"):
            path = (*path, "name")
            given = given.get("name") if isinstance(given, Mapping) else given
            text = _accepted(_registry(path[0]), given)
            shown[path] = _show(given)
        elif kind == "literal_error":
            text = _accepted(re.findall(r"'([^']*)'", context["expected"]), given)
            shown[path] = _show(given)
        elif kind == "value_error":
            text = str(context.get("error", item["msg"]))
            path, text = _blame(path, section, text)
        else:
            text = item["msg"].removeprefix("Input ").replace("valid ", "").replace("an object", "a section of keys")
            text = text.replace("a integer", "a whole number").replace("a array", "a list")
            shown[path] = _show(given)
        texts = found.setdefault(path, [])
        if text not in texts:
            texts.append(text)
    problems = []
    for path, texts in found.items():
        place = next((places[path[:n]] for n in range(len(path), 0, -1) if path[:n] in places), source)
        got = f", got {shown[path]}" if path in shown else ""
        problems.append(f"{place}: {'.'.join(path)}{': ' if path else ''}{' or '.join(texts)}{got}")
    return problems


def _walk(loc: Sequence[int | str], values: Mapping[str, Any], root: type[Section]) -> tuple[KeyPath, Any]:
    """The keys of a pydantic location, without the tags of alternatives in it, and the section they lead to."""
    path: list[str] = []
    here: Any = values
    section: Any = root
    for part in loc:
        if dataclasses.is_dataclass(section) and part in {f.name for f in dataclasses.fields(section)}:
            here = here.get(part) if isinstance(here, Mapping) else None
            section = _section_at(section, str(part), here)
            path.append(str(part))
        elif section is None and isinstance(here, Mapping) and part in here:  # A mapping whose keys are the user's.
            here = here[part]
            path.append(str(part))
    return tuple(path), section


def _section_at(section: Any, key: str, given: Any) -> Any:
    """The dataclass behind a key of a section, picked by `name` where there are several; None for a plain value."""
    hint = typing.get_type_hints(section)[key]
    if hint in (Weighting, Weighting | None) or (section is RunConfig and key in ("algorithm", "fusion")):
        registry = _registry(key)
        name = given.get("name") if isinstance(given, Mapping) else None
        return registry.get(str(name), next(iter(registry.values())))
    # A section that may be left out is a union with None.
    return next((kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)), None)


def _blame(path: KeyPath, section: Any, text: str) -> tuple[KeyPath, str]:
    """The key that a section's own complaint begins with, if it does, and the rest of the complaint."""
    first, _, rest = text.partition(" ")
    keys = tuple(first.removesuffix(":").split("."))
    if dataclasses.is_dataclass(section) and keys[0] in {f.name for f in dataclasses.fields(section)}:
        return (*path, *keys), rest
    return path, text


def _registry(key: str) -> Mapping[str, type]:
    registries: dict[str, Mapping[str, type]] = {"algorithm": ALGORITHMS, "fusion": FUSIONS}
    return registries.get(key, WEIGHTINGS)


def _suggest(path: KeyPath, section: Any) -> str:
    keys = [f.name for f in dataclasses.fields(section)] if dataclasses.is_dataclass(section) else []
    if close := difflib.get_close_matches(path[-1], keys, n=1):
        return f"; did you mean {'.'.join((*path[:-1], close[0]))}?"
    return f"; valid keys: {', '.join(keys)}" if keys else ""


def _accepted(names: Sequence[str] | Mapping[str, Any], given: Any) -> str:
    close = difflib.get_close_matches(str(given).lower(), list(names), n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"should be {' or '.join(names)}{hint}"


def _absolute(config: RunConfig, source: str) -> RunConfig:
    """Relative paths become absolute, against the environment's folders if given, else the current one."""
    in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    problems = []

    def settle(path: Path, key: str, variable: str, *, below: str = "", used: bool = True) -> Path:
        path = Path(os.path.expanduser(path))
        if path.is_absolute():
            return path
        if folder := os.environ.get(variable):
            return Path(folder, below).absolute()
        if in_job and used:
            problems.append(
                f"{source}: {key}: {path} is relative, but a submitted job runs in a copy of the folder that Ray deletes; "
                f"give an absolute path or set {variable}"
            )
        return path.absolute()

    data, partition = config.data, config.partition
    needs_root = data.name in ("fashion_mnist", "cifar10")
    data = dataclasses.replace(data, root=settle(data.root, "data.root", "RAYSIM_DATA_ROOT", used=needs_root))
    if data.path is not None:
        path = settle(data.path, "data.path", "RAYSIM_DATA_ROOT", below=data.path.name)
        data = dataclasses.replace(data, path=path)
    if partition.path is not None:
        partition = dataclasses.replace(partition, path=Path(os.path.expanduser(partition.path)).absolute())
    output = dataclasses.replace(config.output, dir=settle(config.output.dir, "output.dir", "RAYSIM_OUTPUT_DIR"))
    if problems:
        raise ConfigError(problems)
    return dataclasses.replace(config, data=data, partition=partition, output=output)


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
