"""The loss head: one per-token matrix, value going forward, coefficient going backward.

Shapes: ``[B, T]`` throughout; ``mask`` is bool or 0/1, True where a token counts.
Equation numbers: https://arxiv.org/abs/2510.01555.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from kl_plugins.config import KLConfig
from kl_plugins.credit import assign_credit
from kl_plugins.estimators import LogRatioEstimator, bound_, get_estimator, select, upcast
from kl_plugins.ratios import clip_active, ratio_of


def kl_head(
    logp: Tensor,
    ref_logp: Tensor | None,
    *,
    mask: Tensor,
    config: KLConfig,
    old_logp: Tensor | None = None,
    rollout_weights: Tensor | None = None,
) -> Tensor:
    """The regulariser as a ``[B, T]`` matrix m for the framework to aggregate and scale by beta.

    Forward: w * value, 0 at masked tokens. Backward: d(m.sum())/d(logp) = w * C * active * mask, in closed form, with

    - C: the estimator's coefficient (71), or its value for ``placement="reward"`` (5), bounded if asked, under the
      configured credit;
    - w: 1, or min(rho, cap) (69), times ``rollout_weights`` (pi_old / pi_rollout, capped by the caller) if given;
    - active: PPO's clip (70) as an activity mask, under ``correction="clip"``.

    Args:
        logp: log pi_theta, carries the gradient; any float dtype. The arithmetic is float32 (float64 stays).
        ref_logp: log pi_ref, or None when no reference runs (beta = 0): the matrix is 0.
        mask: True where a token counts; masked tokens may hold anything.
        config: the regulariser.
        old_logp: log pi_old, required by ``correction="is"`` and ``"clip"``.
        rollout_weights: sampler-mismatch weights.

    Raises:
        ValueError: shapes differ, ``old_logp`` is missing, or an unmasked entry is not finite.
        RuntimeError: from backward, if a second derivative is asked for.
    """
    terms = head_terms(logp, ref_logp, mask=mask, config=config, old_logp=old_logp, rollout_weights=rollout_weights)
    return terms.matrix(logp)


def combined_advantages(
    advantages: Tensor,
    logp: Tensor,
    ref_logp: Tensor | None,
    *,
    beta: float,
    mask: Tensor,
    config: KLConfig,
) -> Tensor:
    """A - beta C, ``[B, T]``, detached: the combined form (7), for the framework's own policy loss to weight and clip.

    Masked entries are the advantages unchanged.

    Raises:
        ValueError: shapes differ, or an unmasked entry is not finite.
    """
    _same_shape(logp, advantages=advantages)
    terms = head_terms(logp, ref_logp, mask=mask, config=dataclasses.replace(config, correction="none"))
    return upcast(advantages) - beta * terms.coefficient


@dataclasses.dataclass(frozen=True)
class HeadTerms:
    """What the head is made of, each ``[B, T]``, detached, 0 at masked tokens."""

    mask: Tensor  # as `select` takes it: bool, or 0/1 in the dtype of the rest
    log_ratio: Tensor
    value: Tensor  # w * value, what the matrix reports
    coefficient: Tensor  # C, after bound and credit
    pull: Tensor  # w * C
    gradient: Tensor  # w * C * active (69), (70)
    log_rho: Tensor | None  # log pi_theta / pi_old of each token; None without old_logp
    ratio: Tensor | None  # rho before its cap

    def matrix(self, logp: Tensor) -> Tensor:
        """:func:`kl_head`'s matrix, for the ``logp`` that the terms were made of."""
        return _ValueForward.apply(logp, self.value, self.gradient)


@torch.no_grad()
def head_terms(
    logp: Tensor,
    ref_logp: Tensor | None,
    *,
    mask: Tensor,
    config: KLConfig,
    old_logp: Tensor | None = None,
    rollout_weights: Tensor | None = None,
) -> HeadTerms:
    """The parts of :func:`kl_head` and of :func:`kl_plugins.kl_metrics`: same arguments and errors, no autograd."""
    corrected = config.correction != "none" and config.form == "decoupled" and config.placement == "loss"
    if corrected and old_logp is None:
        raise ValueError(f"kl.correction={config.correction!r} needs old_logp, the log-probabilities of the old policy")
    if logp.dim() < 1 or not logp.is_floating_point():
        raise ValueError(f"logp must be a float tensor [B, T], got {logp.dtype} of shape {tuple(logp.shape)}")
    inputs = dict(ref_logp=ref_logp, old_logp=old_logp, rollout_weights=rollout_weights)
    inputs = {name: x for name, x in inputs.items() if x is not None}
    _same_shape(logp, mask=mask, **inputs)
    mask = mask if mask.dtype == torch.bool else mask != 0
    reference = logp if ref_logp is None else ref_logp
    differences = [upcast(logp) - upcast(x) for x in (reference, old_logp) if x is not None]
    if config.check_finite and _all_finite(*differences, rollout_weights):
        mask = mask.view(torch.uint8).to(upcast(logp).dtype)  # as bytes: ten times as fast as from bool
    else:
        if config.check_finite:
            _check_finite(mask, logp=logp, **inputs)
        differences = [bound_(x) for x in differences]
    # Select before any nonlinearity: what a masked place holds (NaN, -1e10) never enters a formula.
    r, *others = [select(x, mask) for x in differences]

    def pair(name: str) -> list[Tensor]:
        """Value and coefficient, 0 at masked tokens."""
        estimator = get_estimator(name)
        if isinstance(estimator, LogRatioEstimator):
            value, coefficient = estimator.pair(r)
            return [value, coefficient if coefficient is r else select(coefficient, mask)]
        columns = [select(upcast(x).clone(), mask) for x in (logp, reference)]
        return [select(function(*columns).clone(), mask) for function in (estimator.value, estimator.coefficient)]

    value, coefficient = pair(config.estimator)
    if config.placement == "reward":  # blamed on logp with the detached value (5), a loss with its derivative (71)
        coefficient = value
    if config.report not in (None, config.estimator):
        value, _ = pair(config.report)
    if ref_logp is None:  # no regulariser: k1's coefficient would be 1 even so
        coefficient = torch.zeros_like(r)
    if config.coefficient_bound is not None:
        coefficient = config.coefficient_bound * torch.tanh(coefficient / config.coefficient_bound)
    coefficient = assign_credit(coefficient, mask, config.credit)

    pull, log_rho, ratio = coefficient, None, None
    if old_logp is not None:
        (log_rho,) = others
        ratio = select(ratio_of(log_rho, config.ratio), mask)
    if corrected:
        weight = ratio.clamp(max=config.ratio_cap)
        value, pull = weight * value, weight * pull
    if rollout_weights is not None:
        value, pull = (select(upcast(rollout_weights) * x, mask) for x in (value, pull))
    gradient = pull
    if corrected and config.correction == "clip":
        gradient = pull * clip_active(weight, coefficient, config.clip_low, config.clip_high)
    if value is gradient:  # k1 in the reward: what the framework does to the one must not reach the other
        value = value.clone()
    return HeadTerms(mask, r, value, coefficient, pull, gradient, log_rho, ratio)


class _ValueForward(torch.autograd.Function):
    """Identity on ``value`` whose gradient with respect to ``logp`` is the given matrix."""

    @staticmethod
    def forward(logp, value, gradient):
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx, inputs, output):
        logp, _, gradient = inputs
        ctx.dtype = logp.dtype
        ctx.save_for_backward(gradient)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "kl_head has no second derivative: its coefficient is detached by definition. "
                "Call backward without create_graph=True"
            )
        (gradient,) = ctx.saved_tensors
        return (grad * gradient).to(ctx.dtype), None, None


def _same_shape(logp: Tensor, **others: Tensor) -> None:
    for name, x in others.items():
        if x.shape != logp.shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, logp {tuple(logp.shape)}: all must be the same [B, T]"
            )


def _all_finite(*inputs: Tensor | None) -> bool:
    """Whether nothing is NaN, infinite or too large to be squared, masked or not, seen in one cheap pass each."""
    if torch.compiler.is_compiling():  # a compiled graph cannot branch on data
        return False
    flat = [upcast(x).flatten() for x in inputs if x is not None]
    return math.isfinite(sum(torch.dot(x, x) for x in flat))


def _check_finite(mask: Tensor, **inputs: Tensor) -> None:
    """An unmasked entry that is not finite is an error that names it."""
    if torch.compiler.is_compiling():  # it can still refuse
        zero = sum(torch.where(mask, x.detach() * 0, 0).sum() for x in inputs.values())  # or NaN: fuses, unlike any()
        torch._assert_async(zero == 0, "kl_head: non-finite input at an unmasked token; run uncompiled to see where")
        return
    for name, x in inputs.items():
        places = (~torch.isfinite(x) & mask).nonzero()
        if len(places):
            first = tuple(places[0].tolist())
            raise ValueError(
                f"{name} is not finite at {len(places)} of {int(mask.sum())} unmasked tokens, first at {list(first)}: "
                f"{x[first].item()}. Mask those tokens, or mend what produced them (kl.check_finite=false skips this)"
            )
