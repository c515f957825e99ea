"""The plugin's flags on OpenRLHF's own parser, and what they mean together with OpenRLHF's.

Dests are dotted, so that OpenRLHF's `hierarchize` makes ``args.algo.kl.plugin.*`` of them and carries them to every
actor. Without a --kl_* flag OpenRLHF's own KL stays as it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
from collections.abc import Iterable, Sequence

from kl_plugins.config import CHOICES, KLConfig
from kl_plugins.openrlhf.hook import CONFIG
from kl_plugins.openrlhf.settings import Settings
from kl_plugins.schedule import KINDS, PARTS, read_block

PLUGIN = "algo.kl.plugin."
ESTIMATOR, USE_LOSS = "algo.kl.estimator", "algo.kl.use_loss"

HELP = {
    "estimator": "k1, k2, k3, mse, none or a registered name; default k2, in the reward k1",
    "report": "report this estimator's value, descend --kl_estimator's coefficient",
    "placement": "KL as loss (default; sets --algo.kl.use_loss) or in the reward",
    "form": "a term beside the policy loss, or inside the advantage",
    "correction": "off-policy weight: none, importance weight, or PPO-clipped importance weight",
    "clip_low": "lower clip range of the KL term",
    "clip_high": "upper clip range of the KL term",
    "ratio": "importance ratio per token or per response",
    "ratio_cap": "upper bound of the importance ratio",
    "credit": "which later tokens' KL a token is blamed for",
    "coefficient_bound": "smooth bound of the coefficient",
    "check_finite": "refuse non-finite log-probabilities",
    "allow_vacuous": "accept a combination that is known not to regularise",
    "controller.kind": "how the coefficient moves from --algo.kl.init_coef",
    "controller.target": "KL it is moved towards, nats a token",
    "controller.horizon": "ziegler: responses over which an error of 20 %% moves it by 20 %%",
    "controller.gain": "log: largest change of its logarithm in a step",
    "controller.decay": "log: what the KL's moving average keeps of itself each step",
    "controller.beta_min": "its lower bound",
    "controller.beta_max": "its upper bound",
    "reference.reset_every": "the reference becomes the policy after every so many steps",
    "reference.reset_when_kl_above": "and after a step with more KL, nats a token",
    "reference.reset_optimizer": "the optimiser's moments are forgotten then",
}


def add(parser: argparse.ArgumentParser) -> None:
    """Add the group ``kl_plugins`` and OpenRLHF's old spellings to its parser, if they are not there yet."""
    if "--kl_estimator" in parser._option_string_actions:
        return
    group = parser.add_argument_group("kl_plugins", "KL regularisation with the gradient you meant")
    for field in dataclasses.fields(KLConfig):
        name, dest = field.name, PLUGIN + field.name
        spellings = dict.fromkeys((f"--kl_{name}", f"--kl-{name.replace('_', '-')}"))
        text = HELP[name] if "default" in HELP[name] else f"{HELP[name]} ({field.default})"
        options = dict(dest=dest, default=argparse.SUPPRESS, help=text)
        if isinstance(field.default, bool):
            group.add_argument(*spellings, type=_boolean, nargs="?", const=True, metavar="true|false", **options)
        elif name in ("estimator", "report"):
            group.add_argument(*spellings, metavar="NAME", **options)
        elif name in CHOICES:
            group.add_argument(*spellings, choices=CHOICES[name], **options)
        else:
            group.add_argument(*spellings, type=float, metavar="X", **options)
    for part, cls in PARTS.items():
        for field in dataclasses.fields(cls):
            name = f"{part}.{field.name}"
            options = dict(dest=PLUGIN + name, default=argparse.SUPPRESS, help=f"{HELP[name]} ({field.default})")
            if isinstance(field.default, bool):
                options |= dict(type=_boolean, nargs="?", const=True, metavar="true|false")
            elif field.name == "kind":
                options |= dict(choices=KINDS)
            else:
                options |= dict(type=int if field.name == "reset_every" else float, metavar="X")
            group.add_argument(f"--kl_{name}", **options)
    for bound in ("std_min", "std_max"):
        group.add_argument(
            f"--algo.advantage.{bound}", type=float, metavar="X", help="bound of group_norm's standard deviation (79)"
        )
    for old, dest, kind in (
        ("--use_kl_loss", USE_LOSS, dict(action="store_true")),
        ("--init_kl_coef", "algo.kl.init_coef", dict(type=float, metavar="X")),
    ):
        group.add_argument(old, dest=dest, default=argparse.SUPPRESS, help=f"old name of --{dest}", **kind)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """OpenRLHF's flat namespace, the plugin's settings resolved and checked.

    Unknown flags, and settings that contradict each other or OpenRLHF's, end in the parser's usage error.
    """
    theirs = parser.get_default(ESTIMATOR)
    parser.set_defaults(**{ESTIMATOR: None})  # to tell a typed estimator from the default
    try:
        namespace, unknown = parser.parse_known_args(argv)
    finally:
        parser.set_defaults(**{ESTIMATOR: theirs})
    if unknown:
        parser.error(unknown_flags(unknown, parser._option_string_actions))
    try:
        _settle(namespace, theirs)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return namespace


def unknown_flags(unknown: Iterable[str], known: Iterable[str]) -> str:
    """A sentence for each unknown flag, with the nearest known ones."""
    unknown = [word for word in unknown if word.startswith("-")] or list(unknown)  # without the values after a flag
    return "; ".join(f"unknown argument {word!r}{_nearest(word.split('=')[0], known)}" for word in unknown)


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=2, cutoff=0.6)
    return f": did you mean {' or '.join(near)}?" if near else ""


def _settle(namespace: argparse.Namespace, their_default: str) -> None:
    from openrlhf.utils.config import hierarchize

    typed, use_loss = getattr(namespace, ESTIMATOR), getattr(namespace, USE_LOSS)
    given = {dest.removeprefix(PLUGIN): v for dest, v in vars(namespace).items() if dest.startswith(PLUGIN)}
    if given and os.environ.get(CONFIG):
        raise ValueError(f"both {CONFIG} and --kl_{next(iter(given))} are given: use one of the two")
    if given:
        ours = given.get("estimator")
        if ours and typed and ours != typed:
            raise ValueError(f"--kl_estimator {ours} and --{ESTIMATOR} {typed} differ: give one of them")
        in_reward = given.get("placement") == "reward"
        if in_reward and use_loss:
            raise ValueError(
                f"--kl_placement reward and --{USE_LOSS} put the KL in two places: drop one. KL in both is refused"
            )
        block = {name: value for name, value in given.items() if "." not in name}
        block["estimator"] = ours or typed or ("k1" if in_reward else "k2")
        for name, value in given.items():
            part, dot, key = name.partition(".")
            if dot:
                block.setdefault(part, {})[key] = value
        config, _ = read_block(block)
        for name, value in config.to_mapping().items():
            setattr(namespace, PLUGIN + name, value)
        setattr(namespace, USE_LOSS, not in_reward)
        typed = config.estimator if config.estimator in ("k1", "k2", "k3") else None
    setattr(namespace, ESTIMATOR, typed or their_default)
    Settings.of(hierarchize(namespace))


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"
