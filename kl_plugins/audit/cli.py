"""`kl-plugins audit`; registered by kl_plugins.cli."""

from __future__ import annotations

import json
import warnings
from typing import Annotated, Optional

import typer

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

Axis = Optional[str]  # noqa: UP045  typer reads annotations at run time, on 3.10 as well


def _axis(name: str, help_text: str):
    return typer.Option(f"--kl_{name}", help=help_text, rich_help_panel="Axes of the kl block", metavar="X")


def audit(
    words: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(help="A recipe, then the framework's own words.", metavar="WORDS"),
    ] = None,
    profile: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--profile", help="Laid over the recipe: cpu or node.", metavar="NAME"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 when the gradient is not the one named.")] = False,
    kl_estimator: Annotated[Axis, _axis("estimator", "k1, k2, k3, mse, none, or one of your own.")] = None,
    kl_report: Annotated[Axis, _axis("report", "Estimator whose value is logged, if another.")] = None,
    kl_placement: Annotated[Axis, _axis("placement", "loss or reward.")] = None,
    kl_form: Annotated[Axis, _axis("form", "decoupled or combined.")] = None,
    kl_correction: Annotated[Axis, _axis("correction", "none, is or clip: the off-policy weight.")] = None,
    kl_clip_low: Annotated[Axis, _axis("clip_low", "Lower clip of the ratio, as 0.2.")] = None,
    kl_clip_high: Annotated[Axis, _axis("clip_high", "Upper clip of the ratio, as 0.2.")] = None,
    kl_ratio: Annotated[Axis, _axis("ratio", "token or sequence.")] = None,
    kl_ratio_cap: Annotated[Axis, _axis("ratio_cap", "Largest ratio.")] = None,
    kl_credit: Annotated[Axis, _axis("credit", "token, return or sequence.")] = None,
    kl_coefficient_bound: Annotated[Axis, _axis("coefficient_bound", "Smooth bound of |coefficient|, or null.")] = None,
    kl_check_finite: Annotated[Axis, _axis("check_finite", "true or false.")] = None,
    kl_allow_vacuous: Annotated[Axis, _axis("allow_vacuous", "true or false.")] = None,
) -> None:
    axes = {name.removeprefix("kl_"): value for name, value in locals().items() if name.startswith("kl_")}
    axes = {axis: value for axis, value in axes.items() if value is not None}
    from kl_plugins.launch.plan import LaunchError, nearest

    native = list(words or [])
    recipe = native.pop(0) if native and not native[0].startswith("-") and "=" not in native[0] else None
    if recipe is not None and recipe.split("/")[-1] in ("python", "python3", "kl-openrlhf"):  # a pasted command
        native.insert(0, recipe)
        recipe = None
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's remarks about packages beside it
    try:
        for word in native:
            option = word.split("=")[0].replace("-", "_").lstrip("_")
            if recipe is not None and word.startswith("--") and option.startswith("kl_"):
                near = nearest(f"--{option}", [f"--kl_{axis}" for axis in _axes()], n=1)
                raise LaunchError(f"--{option}: no such option; {near or 'see kl-plugins audit --help'}")
        import torch

        torch.set_num_threads(1)  # tiny tensors
        from kl_plugins.audit import report
        from kl_plugins.audit.read import read

        result = report.audit(read(recipe, native, profile=profile, kl=axes))
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


def _axes() -> tuple[str, ...]:
    import dataclasses

    from kl_plugins.config import KLConfig

    return tuple(field.name for field in dataclasses.fields(KLConfig))


def _console():
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(80, min(console.width, 120))
    return console
