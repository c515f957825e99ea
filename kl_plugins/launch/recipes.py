"""Recipes: where they are, what they say of themselves, which framework one belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kl_plugins.launch.plan import LaunchError, nearest

FRAMEWORKS = ("verl", "openrlhf")
OWN = "own"  # folder for a recipe of the user's that `kl-plugins submit` sends along


@dataclass(frozen=True)
class Recipe:
    """One recipe file; `name` is what the command line calls it."""

    name: str
    framework: str
    path: Path

    @property
    def summary(self) -> str:
        """The file's first comment line."""
        for line in self.path.read_text().splitlines():
            if line.startswith("#"):
                return line.lstrip("# ").rstrip()
        return ""

    def profiles(self) -> dict[str, Path]:
        """Profiles that can be laid over it: the package's, and those in a `profile` folder beside it."""
        folders = (recipes_dir() / self.framework / "profile", self.path.parent / "profile")
        return {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}

    def profile(self, name: str) -> Path:
        """The file of profile `name`.

        Raises:
            LaunchError: there is none.
        """
        known = self.profiles()
        if name not in known:
            near = nearest(name, known, n=1)
            raise LaunchError(f"unknown profile {name!r}: {near and near + ' '}known: {', '.join(sorted(known))}")
        return known[name]


def recipes_dir() -> Path:
    """The folder of recipes: inside an installed package, or at the top of the repository of an editable one."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "recipes", package.parent / "recipes"):
        if folder.is_dir():
            return folder
    raise LaunchError(f"no recipes in {package} or beside it: reinstall kl-plugins, or give a recipe's path")


def list_recipes() -> list[Recipe]:
    """All recipes that come with the package, by name."""
    root = recipes_dir()
    return [Recipe(f"{f}/{path.stem}", f, path) for f in FRAMEWORKS for path in sorted((root / f).glob("*.yaml"))]


def find_recipe(text: str) -> Recipe:
    """The recipe that `text` names: a path, or a name such as ``verl/grpo_k2``.

    Raises:
        LaunchError: neither; the message has the nearest names.
    """
    known = {recipe.name: recipe for recipe in list_recipes()}
    if text in known:
        return known[text]
    if text.startswith(f"{OWN}/"):
        text = str(recipes_dir() / text)
    path = Path(text).expanduser()
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise LaunchError(f"recipe {text}: no such file. Names that come with the package: {', '.join(known)}")
        return Recipe(path.stem, framework_of(path), path.resolve())
    short = [name for name in known if name.split("/")[1] == text]
    if short:
        raise LaunchError(f"recipe {text!r}: say of which framework: {' or '.join(short)}")
    near = nearest(text, known, cutoff=0.4)
    raise LaunchError(f"unknown recipe {text!r}: {near or 'known: ' + ', '.join(known)} (see `kl-plugins recipes`)")


def framework_of(path: Path) -> str:
    """The framework whose recipe this file is: by its content, or else by its folder's name.

    Raises:
        LaunchError: nothing says which.
    """
    try:
        content: Any = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise LaunchError(f"recipe {path} is not YAML: {' '.join(str(error).split())}") from error
    if isinstance(content, dict):
        if "defaults" in content or "actor_rollout_ref" in content:
            return "verl"
        if isinstance(content.get("algo"), dict) or "ds" in content or "vllm" in content:
            return "openrlhf"
    if path.resolve().parent.name in FRAMEWORKS:
        return path.resolve().parent.name
    raise LaunchError(
        f"recipe {path} is of neither framework: verl's has a Hydra `defaults` list, OpenRLHF's an `algo` block"
    )
