"""The `kl-plugins` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

import kl_plugins.audit.cli
import kl_plugins.data.cli
import kl_plugins.doctor.cli
import kl_plugins.report.cli

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


def _axis(name: str, help_text: str):
    return typer.Option(f"--kl_{name}", help=help_text, rich_help_panel="Axes of the recipe's kl block", metavar="X")


# typer reads these annotations at run time, on 3.10 as well: Optional, not "| None".
Axis = Optional[str]  # noqa: UP045


@app.command(
    help=RUN_HELP,
    context_settings={
        "ignore_unknown_options": True,
        "token_normalize_func": lambda word: word.replace("_", "-"),
    },
)
def run(
    recipe: Annotated[str, typer.Argument(help="A name such as verl/grpo_k2, or a path.")],
    native: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(help="Passed to the framework as they are.", metavar="NATIVE"),
    ] = None,
    profile: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--profile", help="Laid over the recipe: cpu (no GPU needed) or node.", metavar="NAME"),
    ] = None,
    steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--steps", help="Training steps, instead of the recipe's number.", min=1, metavar="N"),
    ] = None,
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the framework's own command and stop.")] = False,
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
    from kl_plugins.launch.plan import LaunchError, nearest
    from kl_plugins.launch.recipes import find_recipe
    from kl_plugins.launch.run import REFUSED, default_out, execute, make_plan, stdout_console

    axes = {name.removeprefix("kl_"): value for name, value in locals().items() if name.startswith("kl_")}
    kl = {axis: value for axis, value in axes.items() if value is not None}
    try:
        found = find_recipe(recipe)
        for word in native or []:
            option = word.split("=")[0].replace("-", "_").lstrip("_")
            if word.startswith("--") and option.startswith("kl_"):
                near = nearest(f"--{option}", [f"--kl_{axis}" for axis in axes], n=1)
                raise LaunchError(f"--{option}: no such option; {near or 'see kl-plugins run --help'}")
        folder = (out or default_out(found)).absolute()
        plan, sentence = make_plan(
            found, profile=profile, kl=kl, steps=steps, out=folder, native=native, dry_run=dry_run
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
        code = execute(plan, title, folder, timeout=timeout, stall=stall, console=console)
    except LaunchError as error:
        typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(REFUSED) from error
    raise typer.Exit(code)


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
