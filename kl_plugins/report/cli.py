"""`kl-plugins plot` and `kl-plugins report`; registered by kl_plugins.cli."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import typer

HELP = """Draw a figure of the mathematics, and print its numbers.

KIND is coefficients (value and coefficient of every registered estimator), tails (the Taylor trap; k3 far out, the
installed frameworks' own included), values (k3's heavy tail in repeated samples), variance (noise against the distance
to the reference) or credit (error and noise against the response's length).

Exit codes: 0 drawn; 2 refused.
"""
REPORT_HELP = """Compare runs on one page: reward against KL first, then all else by step and by KL, and tables.

RUN is a run's folder with metrics.jsonl, as kl-plugins run leaves it, or one with TensorBoard's event files, as verl
or OpenRLHF write them without this package (needs tensorboard). The page is a static file that loads nothing.

Exit codes: 0 written; 2 refused.
"""
REFUSED = 2


def plot(
    kind: Annotated[str, typer.Argument(help="coefficients, tails, values, variance or credit.", metavar="KIND")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The file: .png, .svg or .pdf.", metavar="FILE")],
) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's remarks about packages beside it
    import torch

    from kl_plugins.report import curves

    torch.set_num_threads(1)  # tiny tensors
    try:
        drawn = curves.panels(kind)
        curves.save(drawn, out)
    except ValueError as error:
        typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(REFUSED) from error
    typer.echo(curves.table(drawn))
    typer.echo(f"\n{out}")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.", metavar="RUN")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the page and its PNG files.", metavar="DIR")],
    title: Annotated[str, typer.Option("--title", help="Heading of the page.", metavar="TEXT")] = "",
) -> None:
    from kl_plugins.report.compare import ReportError
    from kl_plugins.report.page import write_report

    try:
        page, comparison = write_report(runs, out, title)
    except (ReportError, OSError) as error:
        typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(REFUSED) from error
    for note in comparison.notes:
        typer.echo(note)
    for run in comparison.runs:
        for line in [f"{len(run.steps)} steps", *run.notes]:
            typer.echo(f"{run.letter} {run.name}: {line}")
    typer.echo(page)


def register(app: typer.Typer) -> None:
    """Add `plot` and `report` to the command."""
    app.command(help=HELP)(plot)
    app.command(help=REPORT_HELP)(report)
