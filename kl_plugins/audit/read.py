"""A recipe or a command line as a `Setting`: where a KL acts, which one, how strongly, beside what.

Text is only read: YAML is loaded safely, Hydra composes without instantiating, OpenRLHF's parser is rebuilt from its
source. The one thing imported on a user's word is what VERL_USE_EXTERNAL_MODULES names, which verl imports as well.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import yaml

from kl_plugins.audit.frameworks import Loss, own_loss
from kl_plugins.audit.judge import own_in_reward, plugin_loss
from kl_plugins.config import KLConfig
from kl_plugins.launch.plan import LaunchError
from kl_plugins.launch.recipes import Recipe, find_recipe
from kl_plugins.schedule import read_block

# Group rewards are divided by their group's standard deviation, all advantages by the batch's, or nothing is.
NORMS = {"group": "of its group's rewards", "batch": "of the batch's advantages", "none": ""}
WRONG, WARNING, NOTE = "wrong", "warning", "note"


@dataclass(frozen=True)
class Finding:
    """One thing to know: ``wrong`` (the gradient is not the one named), ``warning`` or ``note``."""

    severity: str
    code: str
    text: str


@dataclass(frozen=True)
class Part:
    """One KL that acts: ours (`config`) or the framework's own (`own`, as it is called there)."""

    place: str
    key: str  # the setting that chose it
    beta: float | None
    config: KLConfig | None = None
    own: str = ""
    credit: str = "token"
    adaptive: str = ""

    @property
    def name(self) -> str:
        """The estimator's name, as its owner calls it."""
        return self.own or self.config.estimator


@dataclass(frozen=True)
class Setting:
    """What a run does about the KL.

    Attributes:
        title: what was read.
        framework: ``verl``, ``openrlhf`` or None for bare axes.
        parts: the KLs that act.
        advantage: the advantage estimator's name.
        norm: what rewards or advantages are divided by, a key of `NORMS`.
        norm_covers_kl: whether a KL in the reward is divided as well.
        aggregation: of the policy loss, in the framework's words.
        kl_aggregation: of the KL loss.
        updates: optimiser steps a batch of responses; None where unknown.
        clip: the policy loss's lower and upper clip.
        temperature: the sampler's, None where unknown.
        findings: what the reading itself found.
    """

    title: str
    framework: str | None
    parts: tuple[Part, ...]
    advantage: str = ""
    norm: str = "none"
    norm_covers_kl: bool = True
    aggregation: str = ""
    kl_aggregation: str = ""
    updates: float | None = None
    clip: tuple[float, float] = (0.2, 0.2)
    temperature: float | None = None
    findings: tuple[Finding, ...] = field(default=())

    def loss(self, part: Part) -> Loss:
        """What `part` descends, by the function that will run."""
        if part.config is not None:
            return plugin_loss(part.config, part.credit, self.clip)
        loss = own_loss(self.framework, part.own)
        if part.place == "loss":
            return loss
        return own_in_reward(loss, part.credit, self.clip)


def read(
    recipe: str | None, native: Sequence[str] = (), *, profile: str | None = None, kl: Mapping[str, str] | None = None
) -> Setting:
    """The setting that a recipe, a framework's command line, or axes alone describe.

    Args:
        recipe: a name, a path or None.
        native: a verl override list or OpenRLHF flags, also as a whole pasted command.
        profile: laid over the recipe.
        kl: axes of the ``kl`` block as typed; they win.

    Raises:
        LaunchError: it cannot be read, or the plugin or the framework would refuse to start with it.
    """
    with _from_here():
        axes = {axis: scalar(value) for axis, value in (kl or {}).items()}
        native = list(native)
        if recipe is None and not native:
            if not axes:
                raise LaunchError("nothing to audit: give a recipe, --kl_* axes, or a command line after --")
            config = make_config(axes)
            credit = config.credit if config.placement == "loss" else "return"
            part = Part(config.placement, f"kl.estimator={config.estimator}", None, config, credit=credit)
            return Setting("the plugin's own KL, by its axes alone", None, (part,))
        if recipe is None and axes:
            raise LaunchError("--kl_* options change a recipe; write a whole command line after --")
        found = find_recipe(recipe) if recipe is not None else None
        framework, words = _framework(found, native)
        if framework == "verl":
            from kl_plugins.audit.read_verl import read_verl

            return read_verl(found, words, profile=profile, axes=axes)
        from kl_plugins.audit.read_openrlhf import read_openrlhf

        return read_openrlhf(found, words, profile=profile, axes=axes)


def _framework(recipe: Recipe | None, native: list[str]) -> tuple[str, list[str]]:
    """Whose command line it is, and its settings without the program's name."""
    programs = {"verl.trainer.main_ppo": "verl", "openrlhf.cli.train_ppo_ray": "openrlhf", "kl-openrlhf": "openrlhf"}
    for i, word in enumerate(native):
        if program := next((p for p in programs if word == p or word.endswith("/" + p)), None):
            if recipe is not None and programs[program] != recipe.framework:
                raise LaunchError(f"{recipe.name} is a recipe of {recipe.framework}, {word} is not")
            return programs[program], native[i + 1 :]
    if recipe is not None:
        return recipe.framework, native
    for word in native:
        if word.startswith("--config-"):
            return "verl", native
        if word.startswith("--"):
            return "openrlhf", native
        if "=" in word:
            return "verl", native
    raise LaunchError(
        f"{native[0]!r} is neither a verl override (a.b=c) nor an OpenRLHF flag (--a.b c); "
        "a recipe's name comes before --"
    )


def make_config(mapping: Mapping[str, Any]) -> KLConfig:
    """The KLConfig of a ``kl`` block, its refusals as the audit's."""
    try:
        return read_block(mapping)[0]
    except (TypeError, ValueError) as error:
        raise LaunchError(str(error)) from error


def scalar(word: str) -> Any:
    """A word of the command line as YAML reads it; ``1e-6`` is a number here."""
    try:
        return float(word) if word[:1].isdigit() and "e" in word.lower() else yaml.safe_load(word)
    except (ValueError, yaml.YAMLError):
        return word


def check_controller(key: str, target: float | None, horizon: float) -> Finding | None:
    """An adaptive controller that divides by nothing."""
    if target is None or (target > 0 and horizon > 0):
        return None
    return Finding(
        WARNING,
        "controller",
        f"{key}: an adaptive controller with target {target:g} and horizon {horizon:g} cannot adapt; both must be > 0",
    )


def check_sampler(temperature: float, top_p: float, top_k: int) -> list[Finding]:
    """What the sampler does that the log-probabilities do not know."""
    findings = []
    if temperature <= 0:
        findings.append(
            Finding(
                WRONG,
                "temperature",
                f"the sampler's temperature is {temperature:g}: greedy responses are no sample of the policy, over "
                "which every expectation here is taken",
            )
        )
    elif temperature != 1:
        findings.append(
            Finding(
                NOTE,
                "temperature",
                f"sampler, policy and reference are all divided by T = {temperature:g}, so the KL is between the "
                "tempered policies. A reference scored elsewhere at T = 1 would not fit: on logits (2, 1, 0) for both "
                f"models the first token's k1 would read {temperature_mismatch(temperature):+.4f} instead of 0",
            )
        )
    if top_p < 1 or top_k > 0:
        cut = f"top_p {top_p:g}" if top_p < 1 else f"top_k {top_k}"
        findings.append(
            Finding(
                WARNING,
                "sampler",
                f"the sampler cuts its distribution ({cut}), the trainer's log-probabilities are of the uncut one: "
                "responses are not samples of the policy, and no importance weight knows of it",
            )
        )
    return findings


def temperature_mismatch(temperature: float) -> float:
    """k1 of the first token for equal logits (2, 1, 0) when only the policy is divided by `temperature`."""
    import torch

    logits = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
    return float((logits / temperature).log_softmax(-1)[0] - logits.log_softmax(-1)[0])


@contextmanager
def _from_here() -> Iterator[None]:
    """Import the user's plugin modules, as `python -m` in this folder would find them."""
    sys.path.insert(0, os.getcwd())
    try:
        for module in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
            if module.strip() and not module.strip().startswith("kl_plugins"):
                importlib.import_module(module.strip())
        yield
    finally:
        sys.path.remove(os.getcwd())
