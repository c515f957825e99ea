"""What is about to be run, and the error for what must not be."""

from __future__ import annotations

import difflib
import importlib.util
import itertools
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it for the command of a job, and for nothing else


class LaunchError(ValueError):
    """Refused before anything was started: the message names the thing, the value and the way out."""


@dataclass(frozen=True)
class Plan:
    """One run of a framework, complete but not started.

    Attributes:
        argv: the framework's own command.
        env: environment variables to set for it, on top of the caller's.
        config: the resolved configuration as YAML.
        kl: the KL block of that configuration.
        poll: gives the metric records that appeared since its last call, each ``{"step": n, name: scalar, ...}``.
        names: the framework's names for reward, kl, pg_loss and seconds, in order of preference.
        latest: the file in which the framework names its last checkpoint, once there is one.
        steps: how many steps the run should make, or None if only the framework knows.
        prepare: command to run first, or None; it must be safe to repeat.
    """

    argv: list[str]
    env: dict[str, str]
    config: str
    kl: dict[str, Any]
    poll: Callable[[], list[dict[str, Any]]]
    names: dict[str, tuple[str, ...]]
    latest: Path
    steps: int | None = None
    prepare: list[str] | None = None

    def shell(self) -> str:
        """The native command as one would type it, one line for each command."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        lines = [shlex.join(self.prepare)] if self.prepare else []
        return "\n".join([*lines, " ".join([*words, shlex.join(self.argv)])])


def ray_to_use() -> dict[str, str]:
    """The environment for a Ray of the run's own, whatever else runs on this machine; in a Ray job, that job's Ray."""
    return {} if JOB in os.environ else {"RAY_ADDRESS": "local"}


def package_folder(name: str) -> Path | None:
    """Where the package `name` is installed, found without importing it; None if it is not."""
    spec = importlib.util.find_spec(name)
    # A mere folder of that name on the path (tests/verl) has no origin.
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def fresh(path: Path) -> Path:
    """`path`, or where there is such a file already, the first of ``name.1.ext``, ``name.2.ext``, … that is free."""
    names = (path.with_suffix(f".{n}{path.suffix}") for n in itertools.count(1))
    return next(name for name in itertools.chain([path], names) if not name.exists())


@contextmanager
def environ(extra: Mapping[str, str]) -> Iterator[None]:
    """Recipes read the environment (oc.env): resolve them under the one that the run will have."""
    before = dict(os.environ)
    os.environ.update(extra)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def nearest(word: str, known: Iterable[str], n: int = 3, cutoff: float = 0.5) -> str:
    """``"did you mean a, b?"``, or ``""`` if nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=n, cutoff=cutoff)
    return f"did you mean {', '.join(near)}?" if near else ""


def nearest_key(key: str, known: Iterable[str]) -> str:
    """``"did you mean a.b?"``: the known dotted keys whose whole path, or the end of it, reads like `key`."""
    word = key.replace(".", "_")
    scored = []
    for candidate in set(known):
        parts = candidate.split(".")
        tails = ("_".join(parts[start:]) for start in range(len(parts)))
        score = max(difflib.SequenceMatcher(None, word, tail).ratio() for tail in tails)
        scored.append((-score, len(parts), candidate))
    best = min(scored, default=(0,))[0]
    near = [candidate for score, _, candidate in sorted(scored)[:3] if score <= min(-0.6, best + 0.08)]
    return f"did you mean {', '.join(near)}?" if near else ""
