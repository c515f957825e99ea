"""OpenRLHF's command line, read by its own parser, which is rebuilt from its source instead of importing its script."""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from kl_plugins.audit import frameworks
from kl_plugins.audit.frameworks import UNBIASED, source_file, standing_in
from kl_plugins.audit.read import WARNING, Finding, Part, Setting, check_controller, check_sampler, scalar
from kl_plugins.launch.plan import LaunchError
from kl_plugins.launch.recipes import Recipe

SCRIPT = "openrlhf.cli.train_ppo_ray"
BUILTINS = {"int": int, "float": float, "str": str}
# A KL in the reward is summed from a token on, and never divided by a group's deviation: only these divide, by the
# batch's. group_norm divides the task's reward before the KL is added.
WHITENED = ("gae", "reinforce", "reinforce_baseline")


def read_openrlhf(recipe: Recipe | None, words: list[str], *, profile: str | None, axes: Mapping[str, Any]) -> Setting:
    """The setting of an OpenRLHF recipe with overrides, or of a command line."""
    version = frameworks.version("openrlhf")
    if version is None:
        raise LaunchError(
            f"OpenRLHF is not installed beside {sys.executable}, and its flags and KL are what is to be read; "
            "run the audit where it is (the plugin's axes alone, --kl_estimator …, can be audited anywhere)"
        )
    args = _parse(recipe, words, profile, axes)
    from kl_plugins.openrlhf.settings import Settings

    try:
        settings = Settings.of(args)
    except (TypeError, ValueError) as error:
        raise LaunchError(str(error)) from error
    kl, advantage, findings = args.algo.kl, args.algo.advantage, []
    parts = []
    if kl.init_coef > 0:
        parts.append(_part(kl, settings.kl, findings))
    elif kl.use_loss:
        text = f"--algo.kl.use_loss with --algo.kl.init_coef {kl.init_coef:g}: no reference runs, the KL loss is 0"
        findings.append(Finding(WARNING, "no_kl", text))
    in_reward = bool(parts) and parts[0].place == "reward"
    if in_reward and advantage.estimator == "gae" and (advantage.gamma, advantage.lambd) != (1, 1):
        text = (
            f"gamma {advantage.gamma:g}, lambd {advantage.lambd:g}: a token is blamed for later tokens' KL as far as "
            "these and the critic let it; with both at 1 the gradient is exact"
        )
        findings.append(Finding(WARNING, "credit", text))
    findings += check_sampler(args.rollout.temperature, args.rollout.top_p, 0)
    whitened = advantage.estimator in WHITENED and not advantage.no_std_norm
    name = recipe.name if recipe else "command line"
    return Setting(
        title=f"{name}{f', profile {profile}' if profile else ''}, OpenRLHF {version}",
        framework="openrlhf",
        parts=tuple(parts),
        advantage=advantage.estimator,
        norm="batch" if whitened else "group" if advantage.estimator == "group_norm" else "none",
        norm_covers_kl=advantage.estimator != "group_norm",
        aggregation=args.actor.loss_agg_mode,
        kl_aggregation="token-mean",
        updates=max(1.0, args.rollout.batch_size * args.rollout.n_samples_per_prompt / args.train.batch_size)
        * args.train.max_epochs,
        clip=tuple(args.actor.eps_clip_low_high or (args.actor.eps_clip,) * 2),
        temperature=args.rollout.temperature,
        findings=tuple(findings),
    )


def _part(kl: argparse.Namespace, config, findings: list[Finding]) -> Part:
    adaptive = ""
    if kl.target is not None:
        if kl.target == 0:
            text = "--algo.kl.target 0 is taken as no target: the coefficient stays at --algo.kl.init_coef"
            findings.append(Finding(WARNING, "controller", text))
        else:
            adaptive = f"adapted every batch towards a logged KL of {kl.target:g}"
            if finding := check_controller("--algo.kl", kl.target, kl.horizon):
                findings.append(finding)
    if config is not None:
        credit = config.credit if config.placement == "loss" else "return"
        return Part(config.placement, f"--kl_estimator {config.estimator}", kl.init_coef, config, "", credit, adaptive)
    place = "loss" if kl.use_loss else "reward"
    unbiased = kl.unbiased_gradient and kl.use_loss
    if kl.unbiased_gradient and not kl.use_loss:
        text = "--algo.kl.unbiased_gradient does nothing without --algo.kl.use_loss: there is no gradient in a reward"
        findings.append(Finding(WARNING, "ignored_flag", text))
    key = f"--algo.kl.estimator {kl.estimator}" + (" --algo.kl.unbiased_gradient" if unbiased else "")
    own = kl.estimator + (UNBIASED if unbiased else "")
    return Part(place, key, kl.init_coef, own=own, credit="return" if place == "reward" else "token", adaptive=adaptive)


def _parse(recipe: Recipe | None, words: list[str], profile: str | None, axes: Mapping[str, Any]) -> argparse.Namespace:
    """OpenRLHF's nested namespace, by its flags and the plugin's, with the plugin's own checks."""
    from kl_plugins.openrlhf import command, flags

    settings: dict[str, Any] = {}
    if recipe is not None:
        settings = _load(recipe.path)
        if profile:
            settings = command.merge(settings, _load(recipe.profile(profile)))
        settings = command.merge(settings, {"kl": dict(axes)})
    parser = rebuilt_parser()
    flags.add(parser)
    parser.error = _refuse
    flat = {path: value for path, value in _leaves(settings) if value not in (None, "???")}
    line, overrides = [], True
    for word in words:
        key, equals, value = word.partition("=")
        overrides = overrides and not word.startswith("-")
        if overrides and not equals:
            raise LaunchError(f"{word!r} is neither KEY=VALUE nor a flag of OpenRLHF's")
        if overrides:
            flat[key] = scalar(value)
        else:
            line.append(word)
    try:
        line = [*command.words(flat, parser), *line]
    except ValueError as error:
        raise LaunchError(str(error)) from error
    with standing_in("openrlhf.utils.config"):
        from openrlhf.utils.config import hierarchize

        return hierarchize(flags.parse(parser, line))


def rebuilt_parser() -> argparse.ArgumentParser:
    """The parser of `SCRIPT`, from the ``add_argument`` calls in its source: names, defaults, types and choices.

    A default that is computed is left out (None).
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=True)
    for names, keywords in _add_arguments(ast.parse(source_file(SCRIPT).read_text()), {}):
        if keywords.get("type") is not None:
            keywords["type"] = BUILTINS.get(keywords["type"], str)
        parser.add_argument(*names, **keywords)
    return parser


def _add_arguments(node: ast.AST, names: dict[str, str]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Flags and keywords of each ``parser.add_argument`` below `node`; a for loop over literals is unrolled."""
    if isinstance(node, ast.For) and isinstance(node.target, ast.Name) and isinstance(node.iter, ast.Tuple):
        for value in ast.literal_eval(node.iter):
            for statement in node.body:
                yield from _add_arguments(statement, {**names, node.target.id: value})
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
        words = [_literal(word, names) for word in node.args]
        keywords = {k.arg: _literal(k.value, names) for k in node.keywords if k.arg != "help"}
        yield words, keywords
    else:
        for child in ast.iter_child_nodes(node):
            yield from _add_arguments(child, names)


def _literal(node: ast.AST, names: Mapping[str, str]) -> Any:
    """The value of a literal, an f-string of known names, ``int(1e8)`` or a type's name; None for anything else."""
    if isinstance(node, ast.JoinedStr):
        parts = (v.value if isinstance(v, ast.Constant) else names[v.value.id] for v in node.values)
        return "".join(parts)
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
        return BUILTINS[node.func.id](*(ast.literal_eval(a) for a in node.args))
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _load(path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text()) or {}
    if not isinstance(content, dict):
        raise LaunchError(f"{path} is not a mapping of OpenRLHF's settings")
    return content


def _refuse(message: str):
    raise LaunchError(message)
