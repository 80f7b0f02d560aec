"""Commands for many runs: sweep, point, watch, report, export."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from raysim.cli.base import Debug, app, explained
from raysim.report import MEASURES


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
    with explained(debug, kept):
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
    with explained(debug):
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
    with Ctrl-C. Exit status: 0 finished, left with Ctrl-C, or not ended yet (--once); 2 no run; 3 a run failed; 130 one was
    interrupted.

    Example: raysim watch runs/quickstart
    """
    with explained(debug, "the run goes on"):
        from contextlib import suppress

        from rich.console import Console

        from raysim.watch.command import watch as watch_folder

        status = 0
        with suppress(KeyboardInterrupt):
            status = watch_folder(folder, Console(), once=once, interval_s=interval, wait_s=wait, record=record)
    raise typer.Exit(status)


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
    with explained(debug, "the report is not complete"):
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
    with explained(debug, "nothing of the runs was changed"):
        from raysim.export import export as export_runs

        names = export_runs(folders, out)
        typer.echo(f"wrote {len(names)} run{'s' if len(names) > 1 else ''} to {out}: runs, rounds, clients, README.md")
