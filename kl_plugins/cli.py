"""The `kl-plugins` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

import kl_plugins.audit.cli
import kl_plugins.data.cli
import kl_plugins.doctor.cli
import kl_plugins.launch.cli
import kl_plugins.report.cli
from kl_plugins.launch import options

app = typer.Typer(
    name="kl-plugins",
    help="KL regularisation for RLHF with the gradient you meant.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

RUN_HELP = """Train a recipe, with this package's KL, under the recipe's own framework.

Words that are not options of this command go to the framework as they are: Hydra overrides for verl
(trainer.n_gpus_per_node=4), flags for OpenRLHF. Options can be spelt with dashes or underscores.

Exit codes: 0 trained; 1 the framework failed; 2 refused, nothing was started; 3 ended well, but without this package's
KL or before the last step; 124 --timeout or --stall; 130 Ctrl-C; 143 terminated.
"""


@app.callback()
def _root() -> None:
    pass


@app.command()
def recipes() -> None:
    """List the recipes that come with the package."""
    from kl_plugins.launch.recipes import list_recipes

    known = list_recipes()
    width = max(len(recipe.name) for recipe in known)
    for recipe in known:
        typer.echo(f"{recipe.name:<{width}}  {recipe.summary}")


@app.command(
    help=RUN_HELP,
    context_settings={
        "ignore_unknown_options": True,
        "token_normalize_func": lambda word: word.replace("_", "-"),
    },
)
def run(
    recipe: Annotated[str, typer.Argument(help="A name such as verl/grpo_k2, or a path.")],
    native: options.Native = None,
    profile: options.Profile = None,
    steps: options.Steps = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", help="Folder of the run; default: runs/<recipe>-<time>.", metavar="DIR"),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", help="End the run after so many seconds; 0: never.", min=0, metavar="SECONDS")
    ] = 0,
    stall: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--stall",
            help="End it after so many seconds without a new step, start-up included; 0: never. "
            "Default: 600 with --profile cpu, else 3600.",
            min=0,
            metavar="SECONDS",
        ),
    ] = None,
    save_every: options.SaveEvery = None,
    resume: options.Resume = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the framework's own command and stop.")] = False,
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
    from kl_plugins.launch.plan import LaunchError
    from kl_plugins.launch.recipes import find_recipe
    from kl_plugins.launch.run import REFUSED, default_out, execute, make_plan, stdout_console

    try:
        found = find_recipe(recipe)
        options.refuse_misspelt(native or [], "run")
        if resume and out is None:
            raise LaunchError("--resume needs --out, the folder of the run that is to go on")
        folder = (out or default_out(found)).absolute()
        plan, sentence = make_plan(
            found,
            profile=profile,
            kl=kl,
            steps=steps,
            out=folder,
            native=native,
            dry_run=dry_run,
            save_every=save_every,
            resume=resume,
        )
        if dry_run:
            typer.echo(plan.shell())
            return
        console = stdout_console()
        title = f"{found.name}{f', profile {profile}' if profile else ''}: {sentence}"
        console.print(title, highlight=False, markup=False)
        console.print(f"log: {folder / 'log.txt'}", highlight=False, markup=False, soft_wrap=True)
        if stall is None:
            stall = 600 if profile == "cpu" else 3600
        code = execute(plan, title, folder, timeout=timeout, stall=stall, console=console, resume=resume)
    except LaunchError as error:
        typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(REFUSED) from error
    raise typer.Exit(code)


kl_plugins.launch.cli.register(app)
kl_plugins.audit.cli.register(app)
app.command()(kl_plugins.data.cli.prepare)
app.command()(kl_plugins.doctor.cli.doctor)
kl_plugins.report.cli.register(app)


patches = typer.Typer(help="The plugin as a change to a vendored OpenRLHF's source.", no_args_is_help=True)
app.add_typer(patches, name="patch")
Target = Annotated[Path, typer.Option("--target", help="The folder that holds the package openrlhf.", metavar="DIR")]


@patches.command()
def apply(target: Target) -> None:
    """Patch it; refused unless every file is as released."""
    _patch("apply", target)


@patches.command()
def check(target: Target) -> None:
    """Say whether it is patched."""
    _patch("check", target)


@patches.command()
def revert(target: Target) -> None:
    """Undo apply, byte for byte."""
    _patch("revert", target)


def _patch(action: str, target: Path) -> None:
    from kl_plugins.openrlhf import patch

    try:
        typer.echo(getattr(patch, action)(target))
    except patch.PatchError as error:
        typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(2) from error


def main() -> None:
    """Entry point of the `kl-plugins` command."""
    app()


if __name__ == "__main__":
    main()
