"""The options that the commands share: a run's, and ``--kl_*``, one for each axis of KLConfig."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Optional

import typer

from kl_plugins.launch.plan import LaunchError, nearest

# Optional: typer reads these at run time, on 3.10 as well.
Native = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Argument(help="Passed to the framework as they are.", metavar="NATIVE"),
]
Profile = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--profile", help="Laid over the recipe: cpu (no GPU needed), node, cluster or megatron.", metavar="NAME"
    ),
]
Steps = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--steps", help="Training steps, instead of the recipe's number.", min=1, metavar="N"),
]
SaveEvery = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--save-every", help="Write a checkpoint after every so many steps.", min=1, metavar="N"),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the last checkpoint in --out, with the KL's own state.")
]


def _axis(name: str, help_text: str) -> Any:
    # Text: whether a value is right is KLConfig's to say.
    option = typer.Option(f"--kl_{name}", help=help_text, rich_help_panel="Axes of the kl block", metavar="X")
    return Annotated[Optional[str], option]  # noqa: UP045


Estimator = _axis("estimator", "k1, k2, k3, mse, none, or one of your own.")
Report = _axis("report", "Estimator whose value is logged, if another.")
Placement = _axis("placement", "loss or reward.")
Form = _axis("form", "decoupled or combined.")
Correction = _axis("correction", "none, is or clip: the off-policy weight.")
ClipLow = _axis("clip_low", "Lower clip of the ratio, as 0.2.")
ClipHigh = _axis("clip_high", "Upper clip of the ratio, as 0.2.")
Ratio = _axis("ratio", "token or sequence.")
RatioCap = _axis("ratio_cap", "Largest ratio.")
Credit = _axis("credit", "token, return or sequence.")
CoefficientBound = _axis("coefficient_bound", "Smooth bound of |coefficient|, or null.")
CheckFinite = _axis("check_finite", "true or false.")
AllowVacuous = _axis("allow_vacuous", "true or false.")


def given(parameters: Mapping[str, Any]) -> dict[str, str]:
    """The axes that were typed, by name, from a command's parameters."""
    axes = {name.removeprefix("kl_"): value for name, value in parameters.items() if name.startswith("kl_")}
    return {axis: value for axis, value in axes.items() if value is not None}


def refuse_misspelt(words: Iterable[str], command: str) -> None:
    """Refuse ``--kl_…`` among the framework's own words: it was meant for us and is no axis.

    Raises:
        LaunchError: with the nearest option.
    """
    for word in words:
        option = word.split("=")[0].replace("-", "_").lstrip("_")
        if word.startswith("--") and option.startswith(("kl_controller.", "kl_reference.")):
            raise LaunchError(f"--{option}: here it is written {option.replace('kl_', 'kl.', 1)}=VALUE")
        if word.startswith("--") and option.startswith("kl_"):
            from dataclasses import fields

            from kl_plugins.config import KLConfig  # torch comes with it: only when there is something to look up

            near = nearest(f"--{option}", [f"--kl_{field.name}" for field in fields(KLConfig)], n=1)
            raise LaunchError(f"--{option}: no such option; {near or f'see kl-plugins {command} --help'}")
