"""KL estimators: a value to report and a coefficient to descend.

Shapes: every tensor is ``[B, T]`` (responses x tokens); all logarithms are natural (nats).
Equation numbers are those of "Rethinking KL Regularization in RLHF", https://arxiv.org/abs/2510.01555.

With ``log_ratio`` = logp - ref_logp, an estimator k_n is the *value* k_n and the *coefficient* k_n' = dk_n/dlogp (71)
(mse: the coefficient of its objective's gradient; its value is importance-weighted and not what is differentiated).
The gradient of "k_n as loss" is E[k_n' * grad logp]; "k_n in the reward" has the value as its coefficient (5).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

ENTRY_POINT_GROUP = "kl_plugins.estimators"

# exp(20) = 4.9e8: its square, and sums of many of those, still fit in float32.
EXP_BOUND = 20.0
# The largest log ratio whose square fits in float32; only sentinels such as -1e38 ever get there.
LOG_RATIO_BOUND = 1e18


def upcast(x: Tensor) -> Tensor:
    """``x`` detached, in float32 (float64 stays): half precision cannot hold exp(log ratio)."""
    x = x.detach()
    return x if x.dtype == torch.float64 else x.float()


def log_ratio(logp: Tensor, other_logp: Tensor) -> Tensor:
    """``logp - other_logp``, ``[B, T]``, detached, float32 or float64, finite for finite inputs."""
    return bound_(upcast(logp) - upcast(other_logp))


def bound_(log_ratio: Tensor) -> Tensor:
    """A difference of log-probabilities, in place, such that its square is finite."""
    return log_ratio.clamp_(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def select(x: Tensor, mask: Tensor) -> Tensor:
    """``x`` at unmasked tokens, 0 elsewhere, ``[B, T]``; ``x`` is the caller's own, and may be overwritten.

    A bool mask drops whatever ``x`` holds, NaN too. A 0/1 mask in the dtype of ``x`` is for a finite ``x``: a product
    in place, which a CPU does 15 times as fast as a choice.
    """
    return torch.where(mask, x, 0.0) if mask.dtype == torch.bool else x.mul_(mask)


class KLEstimator:
    """Base of all estimators: subclass, give both functions, register.

    ``value`` and ``coefficient`` take ``logp`` and ``ref_logp`` ``[B, T]`` in any float dtype and return ``[B, T]`` in
    float32 (float64 if the input is), without gradient, finite for any finite input.

    Attributes:
        objective: what "as loss" descends in expectation, on-policy, at sequence level.
        citation: where the estimator and the claim come from.
        vacuous: True if "as loss" has no expected gradient.
        unsafe_in_reward: why the value must not be a reward penalty, or "" if it may.
    """

    name: ClassVar[str] = ""
    objective: ClassVar[str] = "an objective that its class does not state (kl-plugins audit measures it)"
    citation: ClassVar[str] = ""
    vacuous: ClassVar[bool] = False
    unsafe_in_reward: ClassVar[str] = ""

    def value(self, logp: Tensor, ref_logp: Tensor) -> Tensor:
        """Per-token estimate to report, nats."""
        raise TypeError(f"{type(self).__name__} does not define value(logp, ref_logp)")

    def coefficient(self, logp: Tensor, ref_logp: Tensor) -> Tensor:
        """Per-token factor of grad logp in the gradient that "as loss" descends (71)."""
        raise TypeError(f"{type(self).__name__} does not define coefficient(logp, ref_logp)")


class LogRatioEstimator(KLEstimator):
    """An estimator of the log ratio alone: whoever has that already asks for both of its functions at once."""

    def pair(self, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
        """Value and coefficient, ``[B, T]`` each, new or the argument itself, of what :func:`log_ratio` makes.

        The value at 0 has to be 0: that is the log ratio of a masked token.
        """
        raise TypeError(f"{type(self).__name__} does not define pair(log_ratio)")

    def value(self, logp, ref_logp):
        return self.pair(log_ratio(logp, ref_logp))[0]

    def coefficient(self, logp, ref_logp):
        return self.pair(log_ratio(logp, ref_logp))[1]


_REGISTRY: dict[str, KLEstimator] = {}
_entry_points_loaded = False

E_ = TypeVar("E_", bound=type[KLEstimator])


def register_estimator(name: str) -> Callable[[E_], E_]:
    """Class decorator: make a :class:`KLEstimator` available under ``name`` (lower case, as verl needs it).

    Raises:
        ValueError: the name is empty, not lower case, or taken by another class.
        TypeError: the class does not override both ``value`` and ``coefficient``.
    """

    def register(cls: E_) -> E_:
        if not name or name != name.lower() or not name.replace("_", "").isalnum():
            raise ValueError(f"estimator name {name!r} must be lower-case letters, digits and underscores")
        for method in ("value", "coefficient"):
            if getattr(cls, method, None) in (None, getattr(KLEstimator, method)):
                raise TypeError(f"estimator {name!r}: {cls.__name__} does not define {method}(logp, ref_logp)")
        known = _REGISTRY.get(name)
        same = known and (type(known).__module__, type(known).__qualname__) == (cls.__module__, cls.__qualname__)
        if known and not same:  # the same class again is a module imported twice: harmless
            raise ValueError(
                f"estimator {name!r} is already registered by {type(known).__module__}.{type(known).__qualname__}; "
                "choose another name"
            )
        cls.name = name
        _REGISTRY[name] = cls()
        return cls

    return register


def registered_estimators() -> tuple[str, ...]:
    """Names of all estimators, third-party entry points included."""
    _load_entry_points()
    return tuple(_REGISTRY)


def get_estimator(name: str) -> KLEstimator:
    """The estimator registered under ``name``.

    Raises:
        ValueError: no such estimator; the message lists the nearest names.
    """
    if name not in _REGISTRY:
        _load_entry_points()
    if name not in _REGISTRY:
        near = difflib.get_close_matches(str(name), _REGISTRY, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ValueError(
            f"unknown KL estimator {name!r}: {hint}Registered: {', '.join(_REGISTRY)}. "
            "Add your own with @kl_plugins.register_estimator, in a module that every worker imports."
        )
    return _REGISTRY[name]


def _load_entry_points() -> None:
    """Load the group ``kl_plugins.estimators`` once; a broken entry is an error that names it."""
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            loaded = entry.load()
        except Exception as error:
            raise ImportError(
                f"entry point {entry.name!r} = {entry.value!r} of group {ENTRY_POINT_GROUP} does not load: {error!r}; "
                "mend or uninstall the package that declares it"
            ) from error
        if isinstance(loaded, type) and issubclass(loaded, KLEstimator) and entry.name not in _REGISTRY:
            register_estimator(entry.name)(loaded)
    _entry_points_loaded = True


@register_estimator("k1")
class K1(LogRatioEstimator):
    """k1 = log_ratio, coefficient 1 (10): unbiased as a value, pure noise as a loss."""

    objective = "nothing: E[grad logp] = 0, pure noise (10)"
    citation = "Schulman 2020, http://joschu.net/blog/kl-approx.html; arXiv 2510.01555 (10), (13)"
    vacuous = True

    def pair(self, log_ratio):
        return log_ratio, torch.ones_like(log_ratio)


@register_estimator("k2")
class K2(LogRatioEstimator):
    """k2 = log_ratio^2 / 2, coefficient log_ratio (12), (14), (45)."""

    objective = "reverse KL, KL(pi || pi_ref), exactly (12), (14), (45)"
    citation = "Schulman 2020, http://joschu.net/blog/kl-approx.html; arXiv 2510.01555 (14), (45)"

    def pair(self, log_ratio):
        return log_ratio.square().mul_(0.5), log_ratio


@register_estimator("k3")
class K3(LogRatioEstimator):
    """k3 = exp(-log_ratio) - 1 + log_ratio, coefficient 1 - exp(-log_ratio) (16), (59).

    The log ratio is bounded by ``EXP_BOUND`` inside exp, and the coefficient is evaluated at the bound: a far token
    still pulls back.
    """

    objective = "forward KL, KL(pi_ref || pi), exactly; a first-order proxy of reverse KL (16), (59)"
    citation = "Schulman 2020; GRPO, arXiv 2402.03300; arXiv 2510.01555 (16), (59), (62)"
    unsafe_in_reward = (
        "its detached value as a penalty collapses: the reward gradient is E[k3 grad logp], not of any KL"
    )

    def pair(self, log_ratio):
        growth = (-log_ratio).clamp_(-EXP_BOUND, EXP_BOUND).expm1_()
        return log_ratio.clamp(min=-EXP_BOUND).add_(growth), growth.neg_()


@register_estimator("mse")
class MSE(KLEstimator):
    """mse = (pi - pi_ref)^2 / (2 pi), coefficient pi - pi_ref in [-1, 1] (65)-(67), MiniMax-01's."""

    objective = "half the squared distance of the probabilities, 1/2 sum_y (pi - pi_ref)^2 (65)-(67)"
    citation = "MiniMax-01, arXiv 2501.08313; arXiv 2510.01555 (65)-(67)"

    def value(self, logp, ref_logp):
        return self._scaled_difference(logp, ref_logp, power=0.5).square() / 2

    def coefficient(self, logp, ref_logp):
        return self._scaled_difference(logp, ref_logp, power=1.0)

    @staticmethod
    def _scaled_difference(logp, ref_logp, power):
        """(pi - pi_ref) * pi^(power - 1), by expm1 so that near-equal probabilities keep their digits."""
        r = log_ratio(logp, ref_logp)
        beyond = (-r - EXP_BOUND).clamp(min=0)  # what the bound inside expm1 left out, put back in log space
        return (
            -torch.expm1(-r.clamp(-EXP_BOUND, EXP_BOUND)) * (power * upcast(logp) + beyond).clamp(max=EXP_BOUND).exp()
        )


@register_estimator("none")
class Unregularised(LogRatioEstimator):
    """Coefficient 0: the KL (k1's value) is monitored, not regularised."""

    objective = "nothing, on purpose: the KL is monitored, not regularised"
    citation = "the unregularised baseline of arXiv 2510.01555"
    unsafe_in_reward = "'none' regularises nothing; switch the framework's KL reward off instead"

    def pair(self, log_ratio):
        return log_ratio, torch.zeros_like(log_ratio)
