"""``kl-plugins prepare``: the function that the command line registers. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from kl_plugins.data.openr1_math import Settings
from kl_plugins.data.openr1_math import prepare as prepare_openr1_math

DATASETS = {"openr1-math": prepare_openr1_math}
DEFAULT = Settings()


def prepare(
    dataset: Annotated[str, typer.Argument(help=f"Which data set: {', '.join(DATASETS)}.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write, empty or new.", metavar="DIR")],
    source: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--from", help="A local copy (.parquet, .jsonl, .json) instead of the hub.", metavar="FILE"),
    ] = None,
    limit: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--limit", help="Stop at so many kept problems.", min=1, metavar="N"),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", help="Path or hub name; its code is never run.", metavar="NAME")
    ] = DEFAULT.tokenizer,
    trace_tokens: Annotated[
        int, typer.Option("--trace-tokens", help="Longest trace.", min=1, metavar="N")
    ] = DEFAULT.trace_tokens,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", help="Longest prompt, chat template included.", min=1, metavar="N")
    ] = DEFAULT.prompt_tokens,
    val_rows: Annotated[
        int, typer.Option("--val-rows", help="Problems held out for validation.", min=0, metavar="N")
    ] = DEFAULT.val_rows,
    revision: Annotated[
        str, typer.Option("--revision", help="Of the data set on the hub.", metavar="REV")
    ] = DEFAULT.revision,
) -> None:
    """Make prompts for the real-model recipes: train and val, as .parquet for verl and .jsonl for OpenRLHF.

    openr1-math keeps the problems of OpenR1-Math-220k that have a verified trace of at most --trace-tokens tokens. The
    same source and options give the same files. Exit codes: 0 done; 2 refused.
    """
    from kl_plugins.launch.run import REFUSED

    try:
        if dataset not in DATASETS:
            raise ValueError(f"unknown data set {dataset!r}: known: {', '.join(DATASETS)}")
        settings = Settings(tokenizer, trace_tokens, prompt_tokens, val_rows, limit, revision)
        summary = DATASETS[dataset](out, settings, source)
    except (OSError, ValueError) as error:
        typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(REFUSED) from error
    dropped = "".join(f", {count} {reason}" for reason, count in summary["rows"].items() if reason != "read")
    typer.echo(f"{out}: {summary['train']} problems to train on, {summary['val']} to validate on")
    typer.echo(f"of {summary['rows']['read']} read{dropped}")
    typer.echo(f"verl:     data.train_files={out}/train.parquet data.val_files={out}/val.parquet")
    typer.echo(f"OpenRLHF: data.prompt_dataset={out}/train.jsonl")
