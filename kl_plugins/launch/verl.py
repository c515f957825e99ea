"""verl's own command for a recipe: Hydra overrides, environment, the resolved configuration.

The configuration is composed here as verl's entry point will compose it, so that a key that does not exist is refused
in a second, not after Ray has started. Imports Hydra (verl brings it), neither verl nor torch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from kl_plugins.launch.metrics import JsonLines
from kl_plugins.launch.plan import (
    LaunchError,
    Plan,
    environ,
    fresh,
    nearest,
    nearest_key,
    package_folder,
    ray_to_use,
)
from kl_plugins.launch.recipes import Recipe, recipes_dir

MODULES = "VERL_USE_EXTERNAL_MODULES"
NAMES = {
    "reward": ("critic/score/mean", "critic/rewards/mean"),
    "kl": ("actor/kl_loss", "actor/reward_kl_penalty"),  # in the loss, in the reward
    "pg_loss": ("actor/pg_loss",),
    "seconds": ("timing_s/step",),
}


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
    """The run of `recipe` under verl, with its files in `out`; the caller's `native` overrides come last and win.

    Args:
        recipe: a Hydra config on verl's ``ppo_trainer``.
        profile: name of the profile to lay over it.
        kl: axes of the ``kl`` block, as typed.
        steps: how many steps to train, instead of the recipe's number.
        out: the run's folder, absolute.
        native: Hydra overrides.
        data: where the CPU profile's model and data are, or are to be made.
        dry_run: nothing will be started here; the data files may be elsewhere.
        save_every: write a checkpoint after every so many steps.
        resume: go on from the last checkpoint in `out`.

    Raises:
        LaunchError: verl is not installed, or the configuration does not compose.
    """
    if package_folder("verl") is None:
        raise LaunchError(f"verl is not installed beside {sys.executable}: pip install 'kl-plugins[verl]'")
    for word in native:
        if word.startswith("-"):
            raise LaunchError(f"{word}: no option of `kl-plugins run`; verl takes overrides, as in trainer.nnodes=2")
    env = {}
    overrides = []
    if recipe.path.parent != recipes_dir() / "verl":
        overrides.append(_search_path(recipe))
    if profile:
        recipe.profile(profile)
        overrides.append(f"+profile={profile}")
    if profile == "cpu":
        from kl_plugins.cpu import VERL_ENV

        env |= VERL_ENV | {"KL_PLUGINS_CPU_DATA": str(data)}
    env[MODULES] = _modules(env.get(MODULES, "kl_plugins.verl"))
    lines = fresh(out / "verl_metrics.jsonl")
    env |= ray_to_use() | {"VERL_FILE_LOGGER_PATH": str(lines)}
    if "RAY_ADDRESS" not in env:  # Ray refuses these where there is nothing to start
        overrides += ["++ray_kwargs.ray_init.num_cpus=null", "++ray_kwargs.ray_init.num_gpus=null"]
    overrides += [f"kl.{axis}={_value(value)}" for axis, value in kl.items()]
    if steps:
        overrides.append(f"trainer.total_training_steps={steps}")
    if save_every:
        overrides.append(f"trainer.save_freq={save_every}")
    if resume:
        overrides.append("trainer.resume_mode=auto")
    overrides += [f"trainer.default_local_dir={_value(out / 'checkpoints')}", f"hydra.run.dir={_value(out / 'hydra')}"]

    text, block, steps, extra = _resolve(recipe, [*overrides, *native], env, None if dry_run else data)
    argv = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-dir", str(recipe.path.parent)]
    return Plan(
        argv=[*argv, "--config-name", recipe.path.stem, *overrides, *native, *extra],
        env=env,
        config=text,
        kl=block,
        poll=_records(JsonLines(lines)),
        names=NAMES,
        latest=Path(yaml.safe_load(text)["trainer"]["default_local_dir"]) / "latest_checkpointed_iteration.txt",
        steps=steps,
        prepare=[sys.executable, "-m", "kl_plugins.cpu.addition", str(data)] if profile == "cpu" else None,
    )


def compose(recipe: Path, overrides: list[str]) -> Any:
    """The configuration that verl's entry point gets for `recipe` with `overrides` (an OmegaConf DictConfig).

    Raises:
        LaunchError: a key, a value or a group does not exist, in one sentence with the nearest that do.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException, OverrideParseException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    folders = [f"file://{package_folder('verl') / 'trainer' / 'config'}"]
    given = [o for o in overrides if o.startswith("hydra.searchpath=")]
    for override in given:
        folders += yaml.safe_load(override.split("=", 1)[1])
    ours = [o for o in overrides if not o.startswith(("hydra.searchpath=", "hydra.run."))]
    search = f"hydra.searchpath=[{','.join(_value(f) for f in folders)}]"
    with initialize_config_dir(str(recipe.parent), version_base=None):
        try:
            return hydra_compose(recipe.stem, [search, *ours])
        except (HydraException, OmegaConfBaseException) as error:
            message, cause = str(error), str(error.__cause__)
            if isinstance(error, OverrideParseException):
                raise LaunchError(f"{error.override}: {_one_line(message)}; verl takes KEY=VALUE") from error
        refused = re.search(r"Could not (?:override|append to config|delete from config)[^']*'([^']+)'", message)
        if refused and "defaults list" not in message:
            key = refused[1]
            try:
                rest = hydra_compose(recipe.stem, [search, *(o for o in ours if key not in o)])
                known = list(_keys(OmegaConf.to_container(rest)))
            except (HydraException, OmegaConfBaseException):
                known = []  # another override is wrong as well: say what is known of this one
            hint = nearest_key(key, known)
            if "is not in struct" in cause:
                new = f"(+{key}=… adds a new one)"
                raise LaunchError(
                    f"{key}: no such key in the configuration of {recipe.stem}; {hint and hint + ' '}{new}"
                )
        raise LaunchError(_one_line(message))


def _keys(node: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from _keys(value, f"{prefix}{key}.")


def _one_line(message: str) -> str:
    """Hydra's error without the search path and the pointer to its manual."""
    found = re.search(r"Could not find '(?P<what>[^']+)'", message)
    if found and "Available options" in message:
        group, _, option = found["what"].rpartition("/")
        known = re.findall(r"^\t(\w+)$", message, re.MULTILINE)
        near = nearest(option, known, n=1)
        return f"{group}={option}: {near and near + ' '}known: {', '.join(known)}"
    kept = [line.strip() for line in message.split("Config search path:")[0].splitlines() if "hydra.cc" not in line]
    return " ".join(line for line in kept if line)


def _resolve(
    recipe: Recipe, overrides: list[str], env: Mapping[str, str], data: Path | None
) -> tuple[str, dict[str, Any], int | None, list[str]]:
    """YAML of the whole configuration, its KL block, the number of steps, and overrides to add to the command."""
    from omegaconf.errors import OmegaConfBaseException

    with environ(env):
        config = compose(recipe.path, overrides)
        try:
            if data is not None:
                _check_files(config, data)
            extra = _add_file_logger(config)
            return *_read(config, recipe), extra
        except OmegaConfBaseException as error:
            raise LaunchError(f"{recipe.name}: a value does not resolve: {' '.join(str(error).split())}") from error


def _check_files(config: Any, data: Path) -> None:
    """Refuse data files that are not there, which verl would notice after a minute; those in `data` are to come."""
    from omegaconf import OmegaConf

    for key in ("data.train_files", "data.val_files"):
        files = OmegaConf.select(config, key) or []
        for file in [files] if isinstance(files, str) else files:
            local = "://" not in file and not Path(file).is_relative_to(data)
            if local and not Path(file).expanduser().exists():
                raise LaunchError(f"{key}: no file {file}; give {key}=PATH.parquet")


def _add_file_logger(config: Any) -> list[str]:
    """Add "file" to the loggers of `config`, from which the steps are read; returns the override that does the same."""
    loggers = config.trainer.logger
    loggers = [loggers] if isinstance(loggers, str) else list(loggers)
    if "file" in loggers:
        return []
    config.trainer.logger = [*loggers, "file"]
    return [f"trainer.logger=[{','.join(config.trainer.logger)}]"]


def _read(config: Any, recipe: Recipe) -> tuple[str, dict[str, Any], int | None]:
    """YAML of the resolved configuration, its kl block, the number of steps."""
    from omegaconf import OmegaConf

    missing = [key for key in sorted(OmegaConf.missing_keys(config)) if key.startswith(("data.", "kl."))]
    if missing:
        example = " ".join(f"{key}=…" for key in missing)
        raise LaunchError(f"{recipe.name} leaves {', '.join(missing)} to you: add {example}")
    text = OmegaConf.to_yaml(config, resolve=True)
    block = OmegaConf.select(config, "actor_rollout_ref.actor.policy_loss.kl")
    if block is None:
        raise LaunchError(
            f"{recipe.name} has no actor_rollout_ref.actor.policy_loss.kl, so verl's own KL would train; "
            "recipes/verl shows the block"
        )
    block = OmegaConf.to_container(block, resolve=True)
    return text, block, config.trainer.total_training_steps


def _records(lines: JsonLines):
    """Records of verl's file logger, which writes ``{"step": n, "data": {...}}``."""
    return lambda: [{"step": record["step"], **record["data"]} for record in lines.poll()]


def _modules(needed: str) -> str:
    """The caller's own plugin modules after ours; verl imports them in this order."""
    theirs = [m for m in os.environ.get(MODULES, "").split(",") if m and m not in needed.split(",")]
    return ",".join([needed, *theirs])


def _search_path(recipe: Recipe) -> str:
    """Lets a recipe of the user's own build on the package's and use its profiles."""
    content = yaml.safe_load(recipe.path.read_text()) or {}
    own = (content.get("hydra") or {}).get("searchpath") or []
    folders = [*own, f"file://{recipes_dir() / 'verl'}"]
    return f"hydra.searchpath=[{','.join(_value(folder) for folder in folders)}]"


def _value(value: object) -> str:
    """`value` as Hydra's override grammar takes it: quoted unless it is a plain word, number or path."""
    text = str(value)
    if re.fullmatch(r"[\w./:+-]+", text):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
