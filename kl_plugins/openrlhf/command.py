"""OpenRLHF's native command for a recipe: nested YAML that mirrors its dotted flags, and a root ``kl`` block.

A word is checked by OpenRLHF's own parser with the plugin's flags, in a process of its own (this module imports neither
torch nor OpenRLHF): an unknown flag, a value of the wrong type or a contradiction is refused before Ray starts.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

PROGRAM = "kl-openrlhf"


def native_command(recipe: Mapping[str, Any], overrides: Sequence[str] = (), steps: int | None = None) -> list[str]:
    """``["kl-openrlhf", "--actor.adam.lr", "1e-06", ...]`` for one run.

    Args:
        recipe: nested settings, a profile already laid over them (`merge`). A leaf ``a.b.c`` is the flag ``--a.b.c``,
            a leaf of the root ``kl`` block the flag ``--kl_*``; None leaves OpenRLHF's default and ``???`` has to be
            given. In strings, ``${oc.env:NAME}`` is an environment variable, ``pkg://a.b`` the file of a Python module.
        overrides: ``a.b.c=value`` (also ``kl.estimator=k3``), or OpenRLHF's own ``--a.b.c value``, which come last.
        steps: stop after this many steps, by the number of prompts.

    Raises:
        ValueError: something of it is not OpenRLHF's, not the plugin's, or contradicts itself.
    """
    wanted = request(recipe, overrides, steps)
    with tempfile.TemporaryDirectory() as folder:
        reply = Path(folder) / "reply.json"
        child = subprocess.run(
            [sys.executable, "-m", __name__, str(reply)],
            input=json.dumps(wanted),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if not reply.exists():
            tail = "\n".join(child.stdout.splitlines()[-15:])
            raise ValueError(f"OpenRLHF's parser could not be had from {sys.executable}:\n{tail}")
        result = json.loads(reply.read_text())
    if "error" in result:
        raise ValueError(result["error"])
    return [PROGRAM, *result["words"]]


def request(recipe: Mapping[str, Any], overrides: Sequence[str], steps: int | None) -> dict[str, Any]:
    """The flat settings and native words that `native_command`, same arguments, gives to OpenRLHF's parser."""
    settings = {path: value for path, value in _leaves(recipe) if value is not None}
    native: list[str] = []
    for word in overrides:
        key, equals, value = word.partition("=")
        if native or word.startswith("-"):
            native.append(word)
        elif equals:
            settings[key] = yaml.safe_load(value)
        else:
            raise ValueError(f"override {word!r} is neither KEY=VALUE nor a flag of OpenRLHF's")
    missing = [key for key, value in settings.items() if value == "???"]
    if missing:
        example = " ".join(f"{key}=…" for key in missing)
        raise ValueError(f"the recipe leaves {', '.join(missing)} to you: add {example}")
    if steps is not None:
        prompts = settings.get("rollout.batch_size", 1024)  # OpenRLHF's default
        settings |= {"data.max_samples": steps * prompts, "train.num_episodes": 1}
    return {"settings": {key: _expand(value) for key, value in settings.items()}, "native": native}


def merge(recipe: Mapping[str, Any], profile: Mapping[str, Any]) -> dict[str, Any]:
    """``recipe`` with ``profile`` laid over it, mapping by mapping."""
    merged = dict(recipe)
    for key, value in profile.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _expand(value: Any) -> Any:
    if isinstance(value, list):
        return [_expand(v) for v in value]
    if not isinstance(value, str):
        return value

    def variable(match: re.Match) -> str:
        if match[1] not in os.environ:
            raise ValueError(f"{value}: the environment variable {match[1]} is not set")
        return os.environ[match[1]]

    value = re.sub(r"\$\{oc\.env:(\w+)\}", variable, value)
    if value.startswith("pkg://"):
        spec = importlib.util.find_spec(value.removeprefix("pkg://"))
        if spec is None or spec.origin is None:
            raise ValueError(f"{value}: no such Python module")
        return spec.origin
    return value


class _Stop(BaseException):
    """Leaves OpenRLHF's script once its parser is complete; not an Exception, so that nothing on the way catches it."""


def openrlhf_parser() -> argparse.ArgumentParser:
    """The parser that OpenRLHF builds in its script, with the plugin's flags. Imports OpenRLHF.

    Raises:
        RuntimeError: the script did not get to its parser.
    """
    from kl_plugins.openrlhf import flags

    original, found = argparse.ArgumentParser.parse_known_args, []

    def parse_known_args(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        if "--algo.kl.estimator" not in parser._option_string_actions:
            return original(parser, *args, **kwargs)
        found.append(parser)
        raise _Stop

    argparse.ArgumentParser.parse_known_args = parse_known_args
    try:
        runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
    except _Stop:
        pass
    finally:
        argparse.ArgumentParser.parse_known_args = original
    if not found:
        raise RuntimeError("openrlhf.cli.train_ppo_ray ended without parsing --algo.kl.estimator; is it 0.11.2?")
    flags.add(found[0])
    return found[0]


def words(settings: Mapping[str, Any], parser: argparse.ArgumentParser) -> list[str]:
    """The command line of flat settings, ``{"actor.adam.lr": 1e-6}``.

    Raises:
        ValueError: a key is no flag; the message names the nearest.
    """
    line: list[str] = []
    actions = parser._option_string_actions
    for path, value in settings.items():
        flag = f"--kl_{path.removeprefix('kl.')}" if path.startswith("kl.") else f"--{path}"
        if flag not in actions:
            known = [a for a in actions if not a.startswith("--kl-")]  # the dashed spelling of --kl_*
            near = difflib.get_close_matches(flag, known, n=2, cutoff=0.5)
            near = [n.removeprefix("--").replace("kl_", "kl.", 1) for n in near]
            raise ValueError(f"{path}: no such flag of OpenRLHF{': did you mean ' + ' or '.join(near) if near else ''}")
        if actions[flag].nargs == 0:
            if not isinstance(value, bool):
                raise ValueError(f"{path}={value!r}: --{path} is a switch, true or false")
            line += [flag] if value else []
        else:
            line += [flag, *(_word(v) for v in (value if isinstance(value, list) else [value]))]
    return line


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def answer(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """``{"words": [...]}`` or ``{"error": ...}`` for one `request`. Imports OpenRLHF."""
    if importlib.util.find_spec("flash_attn") is None:  # a parser needs no GPU
        os.environ.setdefault("KL_PLUGINS_CPU", "1")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from kl_plugins.cpu import openrlhf as cpu

        cpu.install()
    from kl_plugins.openrlhf import flags

    parser = openrlhf_parser()
    parser.error = _refuse
    try:
        line = [*words(wanted["settings"], parser), *wanted["native"]]
        flags.parse(parser, line)
    except ValueError as error:
        return {"error": str(error)}
    return {"words": line}


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(answer(json.load(sys.stdin))))
