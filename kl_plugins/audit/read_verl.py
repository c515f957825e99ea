"""verl's configuration, composed as its entry point composes it, read for the KL."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kl_plugins.audit import frameworks
from kl_plugins.audit.read import (
    NOTE,
    WARNING,
    WRONG,
    Finding,
    Part,
    Setting,
    check_controller,
    check_sampler,
    make_config,
)
from kl_plugins.launch.plan import LaunchError, environ, nearest
from kl_plugins.launch.recipes import Recipe, recipes_dir

TARGET = "kl_plugins.verl.KLPolicyLossConfig"
KL_TYPE = "kl_plugins"
TYPES = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1+", "k3+", "low_var_kl+", KL_TYPE)

# Where a KL in the reward ends up (summed over the response, or from a token on), and what divides advantages.
ADVANTAGES = {
    "gae": ("return", "batch"),
    "grpo": ("sequence", "group"),
    "grpo_vectorized": ("sequence", "group"),
    "grpo_passk": ("sequence", "group"),
    "kl_group_norm": ("sequence", "group"),
    "reinforce_plus_plus": ("return", "batch"),
    "reinforce_plus_plus_baseline": ("sequence", "batch"),
    "rloo": ("sequence", "none"),
    "rloo_vectorized": ("sequence", "none"),
    "opo": ("sequence", "none"),
    "remax": ("return", "none"),
    "gpg": ("sequence", "none"),
}


def read_verl(recipe: Recipe | None, words: list[str], *, profile: str | None, axes: Mapping[str, Any]) -> Setting:
    """The setting of a verl recipe with overrides, or of an override list on verl's own ``ppo_trainer``."""
    version = frameworks.version("verl")
    if version is None:
        raise LaunchError(
            f"verl is not installed beside {sys.executable}, and its configuration and KL are what is to be read; "
            "run the audit where verl is (its axes alone, --kl_estimator …, can be audited anywhere)"
        )
    path, overrides = _config_file(recipe, words)
    config = _compose(path, overrides, profile)
    get = _getter(config)
    actor = "actor_rollout_ref.actor"
    advantage = str(get("algorithm.adv_estimator"))
    credit, norm = ADVANTAGES.get(advantage, ("sequence", "none"))
    if norm == "group" and not get("algorithm.norm_adv_by_std_in_grpo", True):
        norm = "none"
    findings = []
    kl = _plugin_block(get, axes, findings)
    parts = []
    if get(f"{actor}.use_kl_loss"):
        parts.append(_loss_part(get, kl, findings))
    if get("algorithm.use_kl_in_reward"):
        parts.append(_reward_part(get, kl, credit, findings))
        if advantage not in ADVANTAGES:
            text = f"adv_estimator={advantage} is not known here; the KL reward is taken as summed over the response"
            findings.append(Finding(NOTE, "advantage", text))
    elif kl is not None and kl.placement == "reward":
        findings.append(
            Finding(WRONG, "no_kl", "kl.placement=reward, but algorithm.use_kl_in_reward is off: no KL acts; set it")
        )
    if kl is not None and kl.placement == "loss" and not get(f"{actor}.use_kl_loss"):
        findings.append(Finding(WRONG, "no_kl", f"kl.placement=loss, but {actor}.use_kl_loss is off; set it"))
    findings += check_sampler(
        float(get("actor_rollout_ref.rollout.temperature", 1.0)),
        float(get("actor_rollout_ref.rollout.top_p", 1.0)),
        int(get("actor_rollout_ref.rollout.top_k", -1)),
    )
    low, high, both = (get(f"{actor}.clip_ratio{end}") for end in ("_low", "_high", ""))
    batch, mini = get("data.train_batch_size"), get(f"{actor}.ppo_mini_batch_size")
    aggregation = str(get(f"{actor}.loss_agg_mode"))
    return Setting(
        title=f"{recipe.name if recipe else 'command line'}{f', profile {profile}' if profile else ''}, verl {version}",
        framework="verl",
        parts=tuple(parts),
        advantage=advantage,
        norm=norm,
        aggregation=aggregation,
        kl_aggregation=aggregation,
        updates=max(1.0, batch / mini) * get(f"{actor}.ppo_epochs", 1) if batch and mini else None,
        clip=(both if low is None else low, both if high is None else high),
        temperature=float(get("actor_rollout_ref.rollout.temperature", 1.0)),
        findings=tuple(findings),
    )


def _config_file(recipe: Recipe | None, words: list[str]) -> tuple[Path, list[str]]:
    """The main configuration file, and the overrides; Hydra's own options of a pasted command are understood."""
    folder, name, overrides = None, None, []
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option in ("--config-dir", "--config-path", "-cd", "-cp"):
            folder = value if equals else next(rest, None)
        elif option in ("--config-name", "-cn"):
            name = value if equals else next(rest, None)
        elif word.startswith("-"):
            raise LaunchError(f"{word}: no option of verl's command; it takes overrides, as in trainer.nnodes=2")
        else:
            overrides.append(word)
    if recipe is not None:
        return recipe.path, overrides
    verl = Path(importlib.util.find_spec("verl").submodule_search_locations[0]) / "trainer" / "config"
    folder = Path(folder).expanduser().resolve() if folder else verl
    path = folder / f"{(name or 'ppo_trainer').split('.yaml')[0]}.yaml"
    if not path.is_file():
        raise LaunchError(f"--config-name {name}: no file {path}")
    return path, overrides


def _compose(path: Path, overrides: list[str], profile: str | None) -> Any:
    from kl_plugins.launch.verl import compose

    ours = recipes_dir() / "verl"
    more = []
    if path.parent != ours:
        own = (yaml.safe_load(path.read_text()) or {}).get("hydra") or {}
        folders = [*(own.get("searchpath") or []), f"file://{ours}"]
        more.append(f"hydra.searchpath=[{','.join(folders)}]")
    if profile:
        more.append(f"+profile={profile}")
    try:
        with environ({"KL_PLUGINS_CPU_DATA": os.environ.get("KL_PLUGINS_CPU_DATA", "cpu-data")}):
            return compose(path, [*more, *overrides])
    except LaunchError as error:
        meant = any(o.split("=")[0].endswith(("kl_estimator", "kl.estimator", "kl_type")) for o in overrides)
        if not meant or "no such key" not in str(error):
            raise
        own = "verl's own key for the KL loss is actor_rollout_ref.actor.kl_loss_type, the plugin's is kl.estimator"
        raise LaunchError(f"{str(error).split(';')[0]}; {own}") from error


def _getter(config: Any):
    from omegaconf import OmegaConf

    def get(key: str, default: Any = None) -> Any:
        value = OmegaConf.select(config, key, default=default)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value

    return get


def _plugin_block(get, axes: Mapping[str, Any], findings: list[Finding]):
    """The plugin's configuration, or None where verl's own KL stays; says so if a ``kl`` block is there for nothing."""
    policy_loss = get("actor_rollout_ref.actor.policy_loss") or {}
    block, root = policy_loss.get("kl"), get("kl")
    if policy_loss.get("_target_") == TARGET:
        return make_config({**(block or {}), **axes})
    way_out = f"set actor_rollout_ref.actor.policy_loss._target_={TARGET} and policy_loss.kl=${{kl}}"
    if axes:
        raise LaunchError(f"--kl_{next(iter(axes))} acts on nothing: the plugin is not in this recipe; {way_out}")
    if block is not None:
        findings.append(
            Finding(
                WRONG,
                "ignored_block",
                f"policy_loss.kl is there but policy_loss._target_ is {policy_loss.get('_target_')}: verl refuses the "
                f"unknown key, or trains its own KL; {way_out}",
            )
        )
    elif root is not None:
        findings.append(
            Finding(WRONG, "ignored_block", f"nothing reads the root kl block: verl's own KL trains; {way_out}")
        )
    return None


def _loss_part(get, kl, findings: list[Finding]) -> Part:
    actor = "actor_rollout_ref.actor"
    kind, beta = str(get(f"{actor}.kl_loss_type")), float(get(f"{actor}.kl_loss_coef"))
    if kl is not None:
        if kl.placement == "reward":
            findings.append(
                Finding(
                    WRONG,
                    "contradiction",
                    f"kl.placement=reward with {actor}.use_kl_loss=True: the plugin refuses to start; switch it off",
                )
            )
        elif kind not in (KL_TYPE, "low_var_kl"):
            findings.append(
                Finding(
                    WRONG,
                    "contradiction",
                    f"{actor}.kl_loss_type={kind} beside kl.estimator={kl.estimator}: the plugin refuses to start; "
                    f"set kl_loss_type={KL_TYPE}",
                )
            )
        return Part("loss", f"policy_loss.kl.estimator={kl.estimator}", beta, kl, credit=kl.credit)
    if kind.startswith(KL_TYPE):
        raise LaunchError(
            f"{actor}.kl_loss_type={kind} needs the plugin's block: verl stops at the first step without "
            f"policy_loss._target_={TARGET}"
        )
    _check_name(f"{actor}.kl_loss_type", kind)
    return Part("loss", f"{actor}.kl_loss_type={kind}", beta, own=kind)


def _reward_part(get, kl, credit: str, findings: list[Finding]) -> Part:
    kind, beta = str(get("algorithm.kl_penalty")), float(get("algorithm.kl_ctrl.kl_coef"))
    adaptive = ""
    if get("algorithm.kl_ctrl.type") == "adaptive":
        target, horizon = float(get("algorithm.kl_ctrl.target_kl")), float(get("algorithm.kl_ctrl.horizon"))
        adaptive = f"adapted every batch towards a KL of {target:g}"
        if finding := check_controller("algorithm.kl_ctrl", target, horizon):
            findings.append(finding)
    if get("algorithm.adv_estimator") == "gae":
        gamma, lam = float(get("algorithm.gamma")), float(get("algorithm.lam"))
        if (gamma, lam) != (1, 1):
            text = (
                f"gamma={gamma:g}, lam={lam:g}: a token is blamed for later tokens' KL as far as these and the critic "
                "let it; with both at 1 the gradient is exact"
            )
            findings.append(Finding(WARNING, "credit", text))
    ours = kind.removeprefix(f"{KL_TYPE}:") if kind.startswith(f"{KL_TYPE}:") else None
    if kl is not None and kl.placement == "reward":
        if kl.estimator not in (ours, kind) and not (kl.estimator == "k1" and kind == "kl"):
            findings.append(
                Finding(
                    WRONG,
                    "contradiction",
                    f"algorithm.kl_penalty={kind} beside kl.estimator={kl.estimator}: the plugin refuses to start; "
                    f"set algorithm.kl_penalty={KL_TYPE}:{kl.estimator}",
                )
            )
        return Part("reward", f"kl.estimator={kl.estimator}", beta, kl, credit=credit, adaptive=adaptive)
    key = f"algorithm.kl_penalty={kind}"
    if ours is not None:
        config = make_config({"estimator": ours, "placement": "reward", "allow_vacuous": True})
        return Part("reward", key, beta, config, credit=credit, adaptive=adaptive)
    _check_name("algorithm.kl_penalty", kind)
    return Part("reward", key, beta, own=kind, credit=credit, adaptive=adaptive)


def _check_name(key: str, kind: str) -> None:
    try:
        frameworks.own_loss("verl", kind)
    except ValueError as error:
        raise LaunchError(f"{key}={kind}: {error}. {nearest(kind, TYPES) or 'known: ' + ', '.join(TYPES)}") from error
