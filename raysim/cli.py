"""The command line: one function per command. Commands import what they need, so that `--help` answers at once.

Exit status: 0 done, 2 found before round 1, 3 failed during the run, 130 or 143 interrupted.
"""

from __future__ import annotations

import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysim import __version__
from raysim.bench import PARTS
from raysim.report import MEASURES

if TYPE_CHECKING:
    from raysim.config import RunConfig
    from raysim.runrecord import RunRecord

app = typer.Typer(
    name="raysim",
    help="Federated learning simulated on Ray: clients train while scorers weigh them (FedVG).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="YAML configuration of the run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace those of the file.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Federated learning simulated on Ray: clients train while scorers weigh them (FedVG)."""
    if show:
        typer.echo(f"raysim {__version__}")
        raise typer.Exit


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
    with _explained(debug):
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
    with _explained(debug):
        from raysim.resuming import stored_config

        _run(stored_config(folder, overrides or []), resume=True)


@app.command()
def check(file: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Validate a configuration and plan its resources; trains nothing.

    Example: raysim check configs/fashion_mnist.yaml data.root=/usr/share/datasets/fashion-mnist
    """
    with _explained(debug):
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
    with _explained(debug):
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
def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file of the sweep.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace those of the base.")
    ] = None,
    submit: Annotated[
        str | None, typer.Option(metavar="URL", help="Run the points as jobs of the cluster with this dashboard.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--print", help="Print the `ray job submit` lines of the points that are left, and end.")
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End the sweep's jobs (with --submit).")] = False,
    max_concurrent: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Points at the same time, each on 1/N of the cluster.")
    ] = None,
    retries: Annotated[int, typer.Option(min=0, metavar="N", help="How often a failed point is run again.")] = 0,
    working_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Source to send to the jobs; without it raysim is installed on the cluster."),
    ] = None,
    entrypoint_cpus: Annotated[
        float | None,
        typer.Option(min=0, metavar="X", help="CPUs that a job's driver reserves; it may then leave the head."),
    ] = None,
    entrypoint_memory: Annotated[
        int | None, typer.Option(min=1, metavar="BYTES", help="Memory that a job's driver reserves.")
    ] = None,
    entrypoint_resource: Annotated[
        list[str] | None, typer.Option(metavar="NAME=X", help="Custom resource that a job's driver reserves.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Run every point of a sweep that is not finished: here, as Ray jobs (--submit), or as printed lines (--print).

    Points that are finished are skipped, others are begun again. Exit status 0: all points are finished; 3: some are not.

    Example: raysim sweep configs/sweep.yaml rounds=3 output.dir=/tmp/runs --max-concurrent 2
    """
    kept = "finished points are kept, the same command goes on with the others"
    if submit and not stop:
        kept = "submitted jobs go on; the same command waits for them, with --stop it ends them"
    with _explained(debug, kept):
        from rich.console import Console

        from raysim.sweep.command import Options, run_sweep

        options = Options(
            submit,
            show,
            stop,
            max_concurrent,
            retries,
            working_dir,
            entrypoint_cpus,
            entrypoint_memory,
            tuple(entrypoint_resource or ()),
        )
        out = Console()
        if not out.is_terminal:
            out.width = max(out.width, 160)
        run_sweep(file, overrides or [], options, out, Console(stderr=True), sys.argv)


@app.command(hidden=True)
def point(
    url: Annotated[str, typer.Argument(metavar="URL", help="The point's file in the folder of its sweep.")],
    parts: Annotated[int, typer.Option(min=1, metavar="N", help="Use 1/N of the cluster.")] = 1,
    debug: Debug = False,
) -> None:
    """Run one point of a sweep, unless it is finished; this is what the jobs of `raysim sweep` do.

    Example: raysim point file:///results/alpha-study/points/fedvg-alpha0.1-a4b538b6.yaml
    """
    with _explained(debug):
        from rich.console import Console

        from raysim.config import load_config
        from raysim.errors import ConfigError
        from raysim.recording.progress import make_progress
        from raysim.simulation import Session
        from raysim.sweep.folder import run_point
        from raysim.sweep.jobs import path_of

        file = path_of(url)
        rounds = load_config(file).rounds if file.is_file() else 0
        progress = make_progress(rounds, Console(stderr=True))
        try:
            with Session(parts) as session:
                record = run_point(file, progress=progress, session=session, command=sys.argv, say=progress.message)
        except ConfigError as error:
            # A path may be missing on one node only.
            raise ConfigError([f"node {socket.gethostname()}: {problem}" for problem in error.problems]) from None
        typer.echo(f"{record.result['status']}: {record.folder}")


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
    with _explained(debug, "the parts that were measured are kept"):
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


@app.command()
def watch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder, or a folder that holds run folders.")],
    once: Annotated[bool, typer.Option("--once", help="Print the present state and leave.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a run to begin, and for another one of a folder of runs.")
    ] = 60.0,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append every screen with something new to a text file.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Watch runs from their folders: progress, metrics, weights of the clients, times, faults.

    Reads the tables only, so it works beside a run, after it, and on another machine that sees the folder, and nothing that
    happens to it touches the run. On a terminal a screen, elsewhere a line per round. Leaves when the runs have ended, or
    with Ctrl-C. Exit status: 0 finished, left with Ctrl-C, or --once; 2 no run; 3 a run failed; 130 a run was interrupted.

    Example: raysim watch runs/quickstart
    """
    with _explained(debug, "the run goes on"):
        from contextlib import suppress

        from rich.console import Console

        from raysim.watch.command import watch as watch_folder

        status = 0
        with suppress(KeyboardInterrupt):
            status = watch_folder(folder, Console(), once=once, interval_s=interval, wait_s=wait, record=record)
    raise typer.Exit(status)


@app.command()
def export(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run folders, or folders that hold run folders.")
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to; a folder that is not there yet.")],
    debug: Debug = False,
) -> None:
    """Put the tables of runs into one data set: runs.parquet, rounds.parquet, clients.parquet and a card.

    The layout is that of Hugging Face datasets: load_dataset("FOLDER", "rounds"). The table of runs has the settings in which
    they differ.

    Example: raysim export runs/seed-0 runs/seed-1 --out results
    """
    with _explained(debug, "nothing of the runs was changed"):
        from raysim.export import export as export_runs

        names = export_runs(folders, out)
        typer.echo(f"wrote {len(names)} run{'s' if len(names) > 1 else ''} to {out}: runs, rounds, clients, README.md")


@app.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run folders, or folders with run folders in them.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the report goes; default: report/ in DIR.")
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", help="What is compared, a configuration key; default: algorithm, weighting, fusion."
        ),
    ] = None,
    measure: Annotated[
        str, typer.Option(metavar="NAME", help=f"What it is compared by: {', '.join(MEASURES)}.")
    ] = "last",
    target: Annotated[
        list[float] | None, typer.Option(metavar="ACCURACY", help="An accuracy to reach, such as 0.9; default: chosen.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Compare finished runs: tables, figures and tests as Markdown, HTML, LaTeX and JSON.

    Runs that differ in nothing but the seed are replicates. What else varies is found by comparing their configurations:
    methods (algorithm, weighting, fusion) are compared under the same conditions (everything else) and seeds. Says so where
    there are too few pairs for a test.

    Example: raysim report runs/alpha-study --target 0.8 --target 0.9
    """
    with _explained(debug, "the report is not complete"):
        from rich.console import Console

        from raysim.report.command import summary, write_report

        done = write_report(folders, out, method_keys=methods or (), measure=measure, targets=target or ())
        numbers = done.numbers
        console = Console()
        if not console.is_terminal:
            console.width = max(console.width, 120)
        console.print(summary(numbers))
        for note in (*numbers.study.warnings, *numbers.power):
            typer.echo(f"note: {note}")
        for item in numbers.left_out:
            typer.echo(f"left out: {item.folder}: {item.reason}")
        typer.echo(f"wrote {done.folder}: report.html, report.md, report.tex, report.json, figures/")


def main() -> None:
    """Entry point of the `raysim` command."""
    app()


class Terminated(BaseException):
    """SIGTERM arrived."""


@contextmanager
def _explained(debug: bool, kept: str = "the finished rounds are kept") -> Iterator[None]:
    """Turn errors into a message and an exit status; a user sees a traceback only when asking for it."""
    from raysim.errors import ConfigError, RaysimError

    _on_sigterm()
    try:
        yield
    except RaysimError as error:
        if debug:
            traceback.print_exc()
        problems = error.problems if isinstance(error, ConfigError) else (str(error),)
        if len(problems) > 1:
            typer.echo(f"raysim: {len(problems)} problems", err=True)
        for problem in problems:
            typer.echo(f"raysim: {problem}" if len(problems) == 1 else f"  {problem}", err=True)
        raise typer.Exit(error.exit_status) from None
    except KeyboardInterrupt:
        typer.echo(f"raysim: interrupted; {kept}", err=True)
        raise typer.Exit(130) from None
    except Terminated:
        typer.echo(f"raysim: terminated; {kept}", err=True)
        raise typer.Exit(143) from None
    except Exception as error:
        if debug:
            traceback.print_exc()
        hint = "" if debug else " (run again with --debug for the traceback)"
        typer.echo(f"raysim: unexpected {type(error).__name__}: {error}{hint}", err=True)
        raise typer.Exit(3) from None


def _on_sigterm() -> None:
    def terminate(signum: int, frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)


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
