"""`raysim.tune`: search for settings with Ray Tune's ASHA, chosen by the validation accuracy of the global model.

    from ray import tune

    trials = raysim.tune(
        "configs/quickstart.yaml",
        {"client.optimizer.lr": tune.loguniform(1e-3, 1.0), "weighting.name": ["fedvg", "size"]},
        num_samples=20,
    )
    print(trials[0].settings, trials[0].accuracy)

Needs `pip install "raysim[tune]"`. Every trial is an ordinary run with a folder of its own; one that is stopped early is
`interrupted` there. A weighting that looks at the validation set (FedVG) has an advantage on it over one that does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from raysim.config import RunConfig, resolve
from raysim.configfile import apply_overrides, read_yaml
from raysim.errors import ConfigError
from raysim.execution.settings import ActorSettings, gpu_share
from raysim.recording.progress import Silent
from raysim.recording.records import RoundRecord
from raysim.runrecord import load
from raysim.simulation import run


@dataclass(frozen=True)
class Trial:
    """What became of one trial.

    Attributes:
        name: Of its run.
        folder: The run folder.
        settings: Key -> value that was drawn.
        status: `finished`; `interrupted`: stopped early; `failed`.
        reason: Why, unless finished.
        rounds: Rounds that were done.
        best_round: The one with the best validation accuracy.
        validation_accuracy: Of the global model in that round.
        accuracy: Its test accuracy there, which had no part in the search.
    """

    name: str
    folder: Path
    settings: Mapping[str, Any]
    status: str
    reason: str | None
    rounds: int
    best_round: int | None
    validation_accuracy: float | None
    accuracy: float | None


def tune(
    config: str | Path,
    space: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    num_samples: int = 16,
    grace: int = 3,
    reduction: int = 3,
    max_concurrent: int | None = None,
    driver_cpus: float = 0.5,
) -> list[Trial]:
    """Search for settings with ASHA, each trial a run in a placement group of its own.

    Args:
        config: YAML file of what all trials have in common; `rounds` is the length of one that is not stopped, `seed` also
            that of the search. `execution.client_actors` and `scorer_actors` are those of a trial, `auto` is one;
            `num_gpus: auto` is none.
        space: `key.path` -> a domain of `ray.tune` (`tune.loguniform(1e-3, 1)`), or a list to draw from. With
            `tune.grid_search` every value is tried `num_samples` times.
        overrides: `key.path=value`.
        num_samples: Trials.
        grace: Rounds before a trial may be stopped.
        reduction: At each rung, one of so many trials goes on.
        max_concurrent: Trials at a time; None: as many as the cluster has room for.
        driver_cpus: CPUs reserved for the driver of each trial, which adds up updates.

    Returns:
        The trials, the best validation accuracy first; those without any last.

    Raises:
        ConfigError: Ray Tune is not installed, a setting is wrong, or a trial does not fit on the cluster.
    """
    try:
        from raysim.execution.ray_tune import domains_of, example_of, search
    except ImportError as error:
        raise ConfigError(f'raysim.tune needs Ray Tune ({error}); run: pip install "raysim[tune]"') from error
    from raysim.execution.ray_connection import connect

    values, places = read_yaml(Path(config))
    values.setdefault("name", Path(config).stem)
    apply_overrides(values, places, [*overrides, "evaluation.validation=true"])
    base = resolve(values, places=places, source=str(config))
    if base.execution.backend != "ray":
        raise ConfigError("execution.backend: raysim.tune needs ray")
    if base.execution.client_actors == "per_client":
        raise ConfigError(
            "execution.client_actors: per_client, but a trial has a fixed number; give it, or auto for one"
        )
    values = _settled(values, base)
    domains = domains_of(space)
    examples = {key: example_of(domain) for key, domain in domains.items()}
    with_settings(values, examples, "trial")  # For its errors, before anything starts.
    folder = base.output.dir / base.name
    if folder.exists():
        raise ConfigError(
            f"output.dir, name: {folder} exists. Give another `name` or `output.dir`, or remove the folder."
        )
    connection = connect(base.execution)
    try:
        errors = search(
            partial(_run_trial, values),
            domains,
            _bundles(base, driver_cpus),
            name=".tune",
            storage=folder,
            rounds=base.rounds,
            grace=grace,
            reduction=reduction,
            num_samples=num_samples,
            max_concurrent=max_concurrent,
            seed=base.seed,
        )
    finally:
        connection.close()
    trials = [_read(path, space) for path in sorted(folder.iterdir()) if (path / "config.yaml").is_file()]
    if not trials:
        raise ConfigError(f"raysim.tune: no trial began: {next((text for text in errors if text), 'nothing is known')}")
    return sorted(
        trials, key=lambda trial: -1.0 if trial.validation_accuracy is None else trial.validation_accuracy, reverse=True
    )


def with_settings(values: Mapping[str, Any], settings: Mapping[str, Any], name: str) -> RunConfig:
    """The configuration of a trial.

    Raises:
        ConfigError: The settings are not those of a run.
    """
    copy: dict[str, Any] = json.loads(json.dumps(values, default=str))
    plain = {key: value.item() if hasattr(value, "item") else value for key, value in settings.items()}
    apply_overrides(copy, {}, [f"{key}={json.dumps(value)}" for key, value in {**plain, "name": name}.items()])
    return resolve(copy, source="trial")


def _settled(values: Mapping[str, Any], base: RunConfig) -> dict[str, Any]:
    """The values with what every trial has to have: absolute paths, a fixed number of actors, a folder of the search."""
    execution = base.execution
    settled: dict[str, Any] = {
        "output.dir": str(base.output.dir / base.name),
        "data.root": str(base.data.root),
        "data.path": None if base.data.path is None else str(base.data.path),
        "partition.path": None if base.partition.path is None else str(base.partition.path),
        "execution.client_actors": execution.client_actors if isinstance(execution.client_actors, int) else 1,
        "execution.scorer_actors": execution.scorer_actors if isinstance(execution.scorer_actors, int) else 1,
        "execution.client.num_gpus": str(gpu_share(execution.client.num_gpus) or 0),
        "execution.scorer.num_gpus": str(gpu_share(execution.scorer.num_gpus) or 0),
    }
    copy: dict[str, Any] = json.loads(json.dumps(values, default=str))
    apply_overrides(copy, {}, [f"{key}={json.dumps(value)}" for key, value in settled.items() if value is not None])
    return copy


def _bundles(base: RunConfig, driver_cpus: float) -> list[dict[str, float]]:
    """Driver, scorers, client actors."""
    execution = base.execution
    bundles = [{"CPU": driver_cpus}]
    for role, count in (("scorer", execution.scorer_actors), ("client", execution.client_actors)):
        actor: ActorSettings = getattr(execution, role)
        if actor.label:
            raise ConfigError(
                f"execution.{role}.label: {dict(actor.label)}, but a trial goes where there is room; leave it out"
            )
        gpus = gpu_share(actor.num_gpus) or 0
        if not actor.num_cpus and not gpus:
            raise ConfigError(f"execution.{role}.num_cpus: 0 reserves nothing in a trial; give more than 0")
        bundle = {"CPU": actor.num_cpus, "GPU": float(gpus)}
        bundles += [{key: amount for key, amount in bundle.items() if amount}] * (
            count if isinstance(count, int) else 1
        )
    return bundles


class _Reporting(Silent):
    """Progress that hands every committed round to Tune, which may end the run there."""

    def __init__(self, report: Any) -> None:
        self._report = report

    def round_finished(self, record: RoundRecord) -> None:
        """See `Progress`."""
        self._report(record)


def _run_trial(values: Mapping[str, Any], settings: Mapping[str, Any], trial_id: str, report: Any) -> None:
    run(with_settings(values, settings, f"trial-{trial_id}"), progress=_Reporting(report))


def _read(folder: Path, space: Mapping[str, Any]) -> Trial:
    record = load(folder)
    flat: dict[str, Any] = {}
    for key in space:
        value: Any = record.config.as_dict()
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        flat[key] = value
    result = record.result
    best = result.get("best_validation") or {}
    return Trial(
        name=folder.name,
        folder=folder,
        settings=flat,
        status=result["status"],
        reason=result.get("reason"),
        rounds=int(result.get("rounds_done") or 0),
        best_round=best.get("round"),
        validation_accuracy=best.get("validation_accuracy"),
        accuracy=best.get("accuracy"),
    )
