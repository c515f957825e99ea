"""Notice when a framework has moved under the functions that an adapter wraps.

An adapter declares each function once, and calls :func:`check` before it wraps anything::

    WRAPPED = [
        Wrapped(
            "openrlhf.models.utils:compute_approx_kl",          # "module:qualified.name"
            signature="log_probs, log_probs_base, ..., unbiased_gradient=False",
            returns="[B, T] per-token KL",
            sources={"0.11.2": "5c0e..."},                      # version -> sha256 of the source text
            probe=lambda f: None if f(x, y).shape == x.shape else "does not return [B, T]",
        ),
    ]
    check("openrlhf", version, WRAPPED)

An unknown version, a changed signature or a changed body raise :class:`DriftError`, which names version, function
and the switch ``KL_PLUGINS_ALLOW_UNKNOWN=1``; with the switch on they are logged as warnings. A probe that fails is
an error in any case: the numbers would be wrong. ``python -m kl_plugins.drift MODULE:NAME ...`` prints what to
declare for a new version. Nothing here imports torch; what ``check`` imports is the framework's own module.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

SWITCH = "KL_PLUGINS_ALLOW_UNKNOWN"

log = logging.getLogger("kl_plugins")


class DriftError(RuntimeError):
    """A framework's function is not the one this package was written and tested against."""


@dataclass(frozen=True)
class Wrapped:
    """One framework function that an adapter wraps or replaces, as it was when the adapter was tested.

    ``name`` is ``module:qualified.name``; ``signature`` what :func:`signature` prints; ``returns`` says in words what
    comes back; ``sources`` maps each supported framework version to :func:`source_hash`; ``probe`` takes the
    function, calls it on a small input and returns None, or a sentence that says what is wrong.
    """

    name: str
    signature: str
    returns: str
    sources: Mapping[str, str]
    probe: Callable[[Callable], str | None] | None = None


def resolve(name: str) -> Callable:
    """The function that ``module:qualified.name`` names, as the framework wrote it (our own wrappers taken off)."""
    module, _, qualname = name.partition(":")
    found = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return inspect.unwrap(found)


def signature(function: Callable) -> str:
    """Parameter names, kinds and defaults without annotations: ``"a, b=None, *, c"``."""
    parameters = inspect.signature(function).parameters.values()
    # Ray adds _ray_trace_ctx to every method of a class that an actor class inherits from.
    bare = [p.replace(annotation=p.empty) for p in parameters if p.name != "_ray_trace_ctx"]
    return str(inspect.Signature(bare))[1:-1]


def source_hash(function: Callable) -> str:
    """The sha256 of a function's source text; ``""`` when there is no source to read."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()
    except OSError:
        return ""


def check(framework: str, version: str, wrapped: Iterable[Wrapped]) -> None:
    """Compare each declared function with the installed one.

    Raises:
        DriftError: for the first function that is missing, whose probe fails, or, unless
            ``KL_PLUGINS_ALLOW_UNKNOWN=1`` is set, whose version, signature or source is not a known one.
    """
    for entry in wrapped:
        try:
            function = resolve(entry.name)
        except AttributeError as error:
            raise DriftError(
                f"{framework} {version} has no {entry.name}, which kl_plugins wraps. Known: {_known(entry)}."
            ) from error
        if change := _change(entry, function, version):
            _refuse(f"{framework} {version}: {entry.name} {change}. Known: {_known(entry)}.")
        if entry.probe is not None and (wrong := entry.probe(function)):
            raise DriftError(
                f"{framework} {version}: {entry.name} {wrong} (expected: {entry.returns}); the KL would be wrong. "
                f"Known: {_known(entry)}."
            )


def _change(entry: Wrapped, function: Callable, version: str) -> str | None:
    if (now := signature(function)) != entry.signature:
        return f"takes ({now}), not ({entry.signature})"
    if version not in entry.sources:
        return "is of a version that kl_plugins was not tested against"
    if source_hash(function) != entry.sources[version]:
        return "has another body than that version was released with"
    return None


def _known(entry: Wrapped) -> str:
    return ", ".join(sorted(entry.sources))


def _refuse(message: str) -> None:
    if os.environ.get(SWITCH) == "1":
        log.warning("%s Going on because %s=1.", message, SWITCH)
        return
    raise DriftError(
        f"{message} Install a known version, update kl_plugins, or set {SWITCH}=1 in every process (for Ray: in the "
        f"runtime env's env_vars) to train with it all the same."
    )


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        target = resolve(argument)
        print(f"{argument}\n  signature: {signature(target)}\n  sha256:    {source_hash(target)}")
