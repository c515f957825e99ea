"""`kl-plugins audit`; registered by kl_plugins.cli."""

from __future__ import annotations

import json
import warnings
from typing import Annotated, Optional

import typer

from kl_plugins.launch import options
from kl_plugins.launch.plan import LaunchError

HELP = """Tell what gradient a configuration descends, with numbers; a few seconds, nothing is started.

RECIPE is a name or a path; words after it, or a whole command after --, are the framework's own:
`kl-plugins audit -- actor_rollout_ref.actor.use_kl_loss=True` or `kl-plugins audit -- --algo.kl.use_loss`.
--kl_* options alone audit those axes without a framework.

Exit codes: 0; 1 with --strict when the gradient is not the one named; 2 refused: it cannot be read, or would not start.
"""
SETTINGS = {
    "ignore_unknown_options": True,
    "token_normalize_func": lambda word: word.replace("_", "-"),
}
REFUSED = 2


def audit(
    words: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(help="A recipe, then the framework's own words.", metavar="WORDS"),
    ] = None,
    profile: options.Profile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 when the gradient is not the one named.")] = False,
    kl_estimator: options.Estimator = None,
    kl_report: options.Report = None,
    kl_placement: options.Placement = None,
    kl_form: options.Form = None,
    kl_correction: options.Correction = None,
    kl_clip_low: options.ClipLow = None,
    kl_clip_high: options.ClipHigh = None,
    kl_ratio: options.Ratio = None,
    kl_ratio_cap: options.RatioCap = None,
    kl_credit: options.Credit = None,
    kl_coefficient_bound: options.CoefficientBound = None,
    kl_check_finite: options.CheckFinite = None,
    kl_allow_vacuous: options.AllowVacuous = None,
) -> None:
    kl = options.given(locals())
    native = list(words or [])
    recipe = native.pop(0) if native and not native[0].startswith("-") and "=" not in native[0] else None
    if recipe is not None and recipe.split("/")[-1] in ("python", "python3", "kl-openrlhf"):  # a pasted command
        native.insert(0, recipe)
        recipe = None
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's remarks about packages beside it
    try:
        if recipe is not None:
            options.refuse_misspelt(native, "audit")
        import torch

        torch.set_num_threads(1)  # tiny tensors
        from kl_plugins.audit import report
        from kl_plugins.audit.read import read

        result = report.audit(read(recipe, native, profile=profile, kl=kl))
    except LaunchError as error:
        typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(REFUSED) from error
    if as_json:
        typer.echo(json.dumps(report.to_mapping(result), indent=2, allow_nan=False))
    else:
        report.show(result, _console())
    raise typer.Exit(1 if strict and result.wrong else 0)


def register(app: typer.Typer) -> None:
    """Add `audit` to the command."""
    app.command(help=HELP, context_settings=SETTINGS)(audit)


def _console():
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(80, min(console.width, 120))
    return console
