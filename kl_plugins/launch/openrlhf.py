"""OpenRLHF's own command for a recipe: the flags of `kl-openrlhf`, environment, the resolved configuration."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kl_plugins.launch.metrics import JsonLines
from kl_plugins.launch.plan import LaunchError, Plan, environ, fresh, package_folder, ray_to_use
from kl_plugins.launch.recipes import Recipe

NAMES = {name: (name,) for name in ("reward", "kl", "pg_loss", "seconds")}  # the adapter writes them so


def plan(
    recipe: Recipe,
    *,
    profile: str | None,
    kl: Mapping[str, str],
    steps: int | None,
    out: Path,
    native: list[str],
    data: Path,
    dry_run: bool = False,
    save_every: int | None = None,
    resume: bool = False,
) -> Plan:
    """The run of `recipe` under OpenRLHF; arguments as for verl, but `native` are flags, or ``a.b.c=value``.

    Raises:
        LaunchError: OpenRLHF is not installed, or its parser refuses the command.
    """
    if package_folder("openrlhf") is None:
        raise LaunchError(f"OpenRLHF is not installed beside {sys.executable}: pip install 'kl-plugins[openrlhf]'")
    from kl_plugins.openrlhf.command import merge, native_command

    env = {}
    settings = _load(recipe.path)
    if profile:
        settings = merge(settings, _load(recipe.profile(profile)))
    if profile == "cpu":
        from kl_plugins.cpu import OPENRLHF_ENV

        env |= OPENRLHF_ENV | {"KL_PLUGINS_CPU_DATA": str(data)}
    lines = fresh(out / "openrlhf_metrics.jsonl")
    env |= ray_to_use() | {"KL_PLUGINS_METRICS": str(lines)}
    typed = {axis: _scalar(value) for axis, value in kl.items()}
    places = {"output_dir": str(out / "model"), "path": str(out / "checkpoints")}
    saving = {"save_steps": save_every} if save_every else {}
    settings = merge(settings, {"kl": typed, "ckpt": places | saving | ({"load_enable": True} if resume else {})})
    if not any(value is not None for value in settings["kl"].values()):
        raise LaunchError(f"{recipe.name} has no `kl` block, so OpenRLHF's own KL would train; see recipes/openrlhf")
    try:
        with environ(env):
            command = native_command(settings, native, steps)
    except ValueError as error:
        raise LaunchError(str(error)) from error
    resolved = _nested(command[1:])
    resolved["kl"].setdefault("estimator", "k1" if resolved["kl"].get("placement") == "reward" else "k2")
    return Plan(
        argv=[sys.executable, "-m", "kl_plugins.openrlhf.main", *command[1:]],
        env=env,
        config=yaml.safe_dump(resolved, sort_keys=False),
        kl=resolved["kl"],
        poll=JsonLines(lines).poll,
        names=NAMES,
        latest=Path(resolved["ckpt"]["path"]) / "_actor" / "latest",
        steps=steps,
        prepare=[sys.executable, "-m", "kl_plugins.cpu.addition", str(data)] if profile == "cpu" else None,
    )


def _scalar(word: str) -> Any:
    try:
        value = yaml.safe_load(word)
        return float(word) if isinstance(value, str) else value  # 1e-6 is text to YAML
    except (ValueError, yaml.YAMLError):
        return word


def _load(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text()) or {}
    if not isinstance(content, dict):
        raise LaunchError(f"{path} is not a mapping of OpenRLHF's settings")
    return content


def _nested(words: list[str]) -> dict[str, Any]:
    """A recipe that gives the same command: ``["--a.b", "1", "--c"]`` is ``{"a": {"b": 1}, "c": True}``."""
    flat: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            last = flat[key.replace("kl_", "kl.", 1) if key.startswith("kl_") else key] = [value] if equals else []
        else:
            last.append(word)
    nested: dict[str, Any] = {}
    for key, values in flat.items():
        *path, name = key.split(".")
        node = nested
        for part in path:
            node = node.setdefault(part, {})
        read = [_scalar(value) for value in values]
        node[name] = True if not read else read[0] if len(read) == 1 else read
    return nested
