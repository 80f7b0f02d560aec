"""Commands for one run: run, resume, check, partition, bench."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysim.bench import PARTS
from raysim.cli.base import ConfigFile, Debug, Overrides, app, explained

if TYPE_CHECKING:
    from raysim.config import RunConfig
    from raysim.runrecord import RunRecord


@app.command()
def run(
    file: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run if its folder exists; a finished one stays as it is.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Run a configuration to its end.

    Example: raysim run configs/quickstart.yaml rounds=5 weighting.name=size name=fedavg
    """
    with explained(debug):
        from raysim.config import load_config

        _run(load_config(file, overrides or []), resume=resume)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run that was stopped.")],
    overrides: Overrides = None,
    debug: Debug = False,
) -> None:
    """Go on with a run that was stopped, from its last checkpoint, to the bits of a run that never was.

    Of the settings only rounds, evaluation.every, execution.*, output.* and the paths of data may be changed. A finished run is
    left as it is, unless more rounds are asked for.

    Example: raysim resume runs/quickstart rounds=60
    """
    with explained(debug):
        from raysim.resuming import stored_config

        _run(stored_config(folder, overrides or []), resume=True)


@app.command()
def check(file: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Validate a configuration and plan its resources; trains nothing.

    Example: raysim check configs/fashion_mnist.yaml data.root=/usr/share/datasets/fashion-mnist
    """
    with explained(debug):
        from raysim.config import load_config
        from raysim.preparation import prepare

        config = load_config(file, overrides or [])
        prepared = prepare(config)
        setup, sizes = prepared.setup, prepared.setup.partition.sizes
        typer.echo(_headline(config))
        typer.echo(
            f"data: {config.data.name}, {sizes.sum()} training, {len(setup.validation)} validation and "
            f"{len(setup.test)} test images of {' x '.join(map(str, setup.train.images.shape[1:]))}, "
            f"{len(prepared.class_names)} classes"
        )
        typer.echo(
            f"partition: {config.partition.scheme}, {len(sizes)} clients with {sizes.min()} to {sizes.max()} examples, hash "
            f"{setup.partition.content_hash}; {config.cohort_size} clients per round"
        )
        typer.echo(f"model: {config.model.name}, {prepared.population.layout.size:,} parameters")
        if prepared.demand.scoring_ratio:
            typer.echo(f"scoring: {prepared.demand.scoring_ratio:.2f} images scored per image trained on")
        for note in prepared.notes:
            typer.echo(f"note: {note}")
        for line in _plan_lines(config, prepared):
            typer.echo(line)
        if config.folder.exists():
            typer.echo(f"note: {config.folder} exists already; a run would refuse it")
        typer.echo("ok")


@app.command()
def partition(file: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Deal the data out to the clients: writes the partition, prints its statistics and draws it.

    Writes NAME.partition.parquet and NAME.partition.png into the configuration's output folder.

    Example: raysim partition configs/quickstart.yaml partition.alpha=0.5
    """
    with explained(debug):
        from rich.console import Console

        from raysim.config import load_config
        from raysim.preparation import prepare_data
        from raysim.recording.figures import draw_partition

        config = load_config(file, overrides or [])
        data = prepare_data(config)
        config.output.dir.mkdir(parents=True, exist_ok=True)
        path = config.output.dir / f"{config.name}.partition.parquet"
        data.partition.write(path, labels=data.dataset.train.labels)
        draw_partition(data.class_counts, data.dataset.class_names, path.with_suffix(".png"))
        for note in data.notes:
            typer.echo(f"note: {note}")
        Console().print(_partition_table(data.class_counts))
        typer.echo(f"hash {data.partition.content_hash}")
        typer.echo(f"wrote {path} and {path.with_suffix('.png').name}")


@app.command()
def bench(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE] [KEY=VALUE]...", help="YAML configuration and settings that replace its own."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="PART ...", help=f"Of these parts only: {', '.join(PARTS)}.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each measurement is repeated.")] = 5,
    json: Annotated[Path | None, typer.Option(metavar="PATH", help="Where the JSON file goes.")] = None,
    debug: Debug = False,
) -> None:
    """Measure this machine, or the cluster that a configuration names, with the configuration's own work.

    Rounds against bare PyTorch, scoring while others train against scoring afterwards, start-up, traffic, scaling of the
    scorers and the cost of a client without training; and which number of actors suits the configuration. Takes minutes
    and wants the machine to itself. Without FILE: LeNet-5 on scikit-learn's digits. Prints a table and writes JSON with every
    repeat, by default into the configuration's output folder.

    Example: raysim bench configs/quickstart.yaml --only efficiency overlap --repeats 3
    """
    with explained(debug, "the parts that were measured are kept"):
        from datetime import UTC, datetime

        from rich.console import Console

        from raysim.bench.findings import sort_words, table_of

        file, overrides, parts = sort_words(words or [], only or [])
        from raysim.bench.command import bench_config, run_bench

        config = bench_config(file, overrides)
        path = json or config.output.dir / f"{config.name}.bench-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
        findings = run_bench(config, parts, repeats, path, lambda line: typer.echo(line, err=True), sys.argv)
        console = Console()
        if not console.is_terminal:
            console.width = max(console.width, 140)
        console.print(table_of(findings, f"{config.name}: {config.model.name} on {config.data.name}"))
        for note in (note for finding in findings for note in finding.notes):
            typer.echo(note)
        typer.echo(f"wrote {path}")


def _run(config: RunConfig, *, resume: bool) -> None:
    from rich.console import Console

    from raysim.recording.progress import make_progress
    from raysim.simulation import run as run_config

    typer.echo(_headline(config), err=True)
    progress = make_progress(config.rounds, Console(stderr=True))
    _print_summary(run_config(config, progress=progress, command=sys.argv, resume=resume))


def _headline(config: RunConfig) -> str:
    assert config.weighting is not None
    return (
        f"{config.name}: {config.algorithm.name} with {config.weighting.name} weights, {config.model.name} on "
        f"{config.data.name}, {config.partition.clients} clients, {config.cohort_size} per round, {config.rounds} rounds "
        f"-> {config.folder}"
    )


def _plan_lines(config: RunConfig, prepared: Any) -> list[str]:
    """The resource plan: of the cluster that is named, else of this machine, without starting anything."""
    if config.execution.backend == "serial":
        return ["backend: serial, everything in one process"]
    from raysim.execution.ray_plan import local_nodes, make_plan, starts_ray

    if starts_ray(config.execution):
        nodes = local_nodes(config.execution, prepared.demand.store_bytes)
        return make_plan(config.execution, nodes, prepared.demand).lines()
    from raysim.execution.ray_connection import cluster_nodes, connect

    connection = connect(config.execution)
    try:
        return make_plan(config.execution, cluster_nodes(), prepared.demand).lines()
    finally:
        connection.close()


def _partition_table(class_counts: Any) -> Any:
    """Statistics of a partition [N, K]: how unequal the clients are in size and in labels."""
    import numpy as np
    from rich.table import Table

    sizes = class_counts.sum(axis=1)
    shares = class_counts / np.maximum(sizes, 1)[:, None]
    entropy = np.abs((shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=1))
    table = Table(title=f"{len(sizes)} clients, {sizes.sum()} examples, {class_counts.shape[1]} classes")
    for heading in ("per client", "min", "median", "mean", "max"):
        table.add_column(heading, justify="left" if heading == "per client" else "right")
    for name, values, digits in (
        ("examples", sizes, 0),
        ("classes", (class_counts > 0).sum(axis=1), 0),
        ("share of the largest class", shares.max(axis=1), 2),
        ("label entropy (nats)", entropy, 2),
    ):
        numbers = (values.min(), np.median(values), values.mean(), values.max())
        table.add_row(name, *(f"{number:.{digits if i != 2 else max(digits, 1)}f}" for i, number in enumerate(numbers)))
    return table


def _print_summary(record: RunRecord) -> None:
    from rich.console import Console

    from raysim.recording.figures import draw_partition, draw_run
    from raysim.recording.progress import summary_table

    counts, folder = record.class_counts, record.folder
    draw_partition(counts, record.class_names, folder / "partition.png")
    if record.result["rounds_done"]:
        draw_run(folder, folder / "run.png", class_counts=counts)
    Console().print(summary_table(record.round_records, folder=record.folder))
