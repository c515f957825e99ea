"""The `doctor` command."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


def doctor(
    address: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--address", help="HOST:PORT of a Ray head; default: RAY_ADDRESS, else a Ray of its own."),
    ] = None,
) -> None:
    """Say whether every worker has the plugin, and whether its gradient is right there. Exit code 1 if not."""
    from kl_plugins.doctor.checks import here
    from kl_plugins.doctor.cluster import nodes

    failed = 0
    for part in (here(), nodes(address)):
        for finding in part:
            failed += finding.level == "fail"
            typer.echo(f"{MARKS[finding.level]} {finding.text}")
            if finding.remedy:
                typer.echo(f"     -> {finding.remedy}")
    typer.echo(f"{failed} problem{'s' if failed != 1 else ''}" if failed else "all well")
    raise typer.Exit(bool(failed))
