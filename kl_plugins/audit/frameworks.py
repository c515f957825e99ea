"""The installed framework's own KL: the very function it trains with, imported here and called by the audit.

A framework's own setting becomes a `Loss`: (logp, ref_logp, old_logp), each ``[B, T]``, to the ``[B, T]`` matrix that
the framework aggregates and scales by beta. Importing kl_plugins.verl wraps verl's function; its own is taken out.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType

from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

# The names each framework's function takes that have a setting of ours by the same or nearly the same name.
OWN_NAMES = {
    "verl": {"k1": ("k1",), "k2": ("k2",), "k3": ("low_var_kl", "k3+"), "mse": ("mse",)},
    "openrlhf": {"k1": ("k1",), "k2": ("k2",), "k3": ("k3", "k3 unbiased_gradient")},
}
UNBIASED = " unbiased_gradient"


def version(framework: str) -> str | None:
    """The installed version of ``verl`` or ``openrlhf``; None where it is not installed."""
    try:
        return importlib.metadata.version(framework)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def own_loss(framework: str, name: str) -> Loss:
    """The KL that `framework` computes for its setting `name`; for OpenRLHF ``"k3 unbiased_gradient"`` adds that flag.

    Raises:
        ValueError: the framework refuses the name, or is not installed.
    """
    if version(framework) is None:
        raise ValueError(f"{framework} is not installed beside {sys.executable}: its own KL cannot be judged here")
    if framework == "verl":
        kl_penalty = _verl_kl_penalty()

        def loss(logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
            return kl_penalty(logp, ref_logp, kl_penalty=name)
    else:
        compute_approx_kl = _openrlhf_approx_kl()
        estimator, unbiased = name.removesuffix(UNBIASED), name.endswith(UNBIASED)

        def loss(logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
            return compute_approx_kl(
                logp, ref_logp, log_probs_old=old_logp, kl_estimator=estimator, unbiased_gradient=unbiased
            )

    import torch

    one = torch.zeros(1, 1)
    try:
        loss(one, one, one)
    except (NotImplementedError, ValueError) as error:
        raise ValueError(f"{framework} {version(framework)} knows no KL named {name!r}") from error
    return loss


@functools.cache
def _verl_kl_penalty() -> Callable:
    from kl_plugins.drift import resolve

    with _quiet():
        return resolve("verl.trainer.ppo.core_algos:kl_penalty")


@functools.cache
def _openrlhf_approx_kl() -> Callable:
    with _quiet():
        return load_alone("openrlhf.models.utils").compute_approx_kl


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what imports say about accelerators off the report; errors still come through."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def source_file(module: str) -> Path:
    """Where a module's source lies; imports nothing."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{top} is not installed beside {sys.executable}")
    return Path(spec.submodule_search_locations[0]).joinpath(*rest).with_suffix(".py")


def load_alone(module: str) -> ModuleType:
    """A module of OpenRLHF without the packages around it, whose imports want ray, vLLM and flash-attn.

    It is not left in ``sys.modules``: what imports it later gets it the usual way.
    """
    spec = importlib.util.spec_from_file_location(module, source_file(module))
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@contextmanager
def standing_in(module: str) -> Iterator[None]:
    """Within the block, an import of `module` finds it loaded alone."""
    before = sys.modules.get(module)
    if before is None:
        sys.modules[module] = load_alone(module)
    try:
        yield
    finally:
        if before is None:
            del sys.modules[module]
