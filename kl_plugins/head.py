"""The loss head: one per-token matrix, value going forward, coefficient going backward.

Shapes: ``[B, T]`` throughout; ``mask`` is bool or 0/1, True where a token counts.
Equation numbers: https://arxiv.org/abs/2510.01555.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kl_plugins.config import KLConfig
from kl_plugins.credit import assign_credit
from kl_plugins.estimators import get_estimator, upcast
from kl_plugins.ratios import clip_active, importance_ratio


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
    return _ValueForward.apply(logp, terms.weight * terms.value, terms.gradient)


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
    """What the head is made of, each ``[B, T]``, detached, 0 (weight: 1, active: True) at masked tokens."""

    value: Tensor
    coefficient: Tensor  # C, after bound and credit
    ratio: Tensor  # rho, capped
    weight: Tensor  # w
    active: Tensor

    @property
    def gradient(self) -> Tensor:
        """``w * C * active * mask`` (69), (70)."""
        return torch.where(self.active, self.weight * self.coefficient, 0.0)


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
    """The parts of :func:`kl_head`, same arguments and errors, without autograd."""
    corrected = config.correction != "none" and config.form == "decoupled" and config.placement == "loss"
    if corrected and old_logp is None:
        raise ValueError(f"kl.correction={config.correction!r} needs old_logp, the log-probabilities of the old policy")
    if logp.dim() < 1 or not logp.is_floating_point():
        raise ValueError(f"logp must be a float tensor [B, T], got {logp.dtype} of shape {tuple(logp.shape)}")
    inputs = dict(ref_logp=ref_logp, old_logp=old_logp, rollout_weights=rollout_weights)
    inputs = {name: x for name, x in inputs.items() if x is not None}
    _same_shape(logp, mask=mask, **inputs)
    mask = mask if mask.dtype == torch.bool else mask != 0
    if config.check_finite:
        _check_finite(mask, logp=logp, **inputs)

    # Select before any nonlinearity: what a masked place holds (NaN, -1e10) never enters a formula.
    logp = torch.where(mask, upcast(logp), 0.0)
    ref_logp = logp if ref_logp is None else torch.where(mask, upcast(ref_logp), 0.0)
    estimator = get_estimator(config.estimator)
    value = get_estimator(config.report or config.estimator).value(logp, ref_logp)
    # A penalty in the reward is blamed on logp with its detached value (5), a loss with its derivative (71).
    blame = estimator.value if config.placement == "reward" else estimator.coefficient
    coefficient = blame(logp, ref_logp)
    if "ref_logp" not in inputs:  # no reference, no regulariser: k1's coefficient would be 1 even so
        coefficient = torch.zeros_like(coefficient)
    if config.coefficient_bound is not None:
        coefficient = config.coefficient_bound * torch.tanh(coefficient / config.coefficient_bound)
    coefficient = assign_credit(coefficient, mask, config.credit)

    ratio = weight = torch.ones_like(logp)
    active = torch.ones_like(mask)
    if old_logp is not None:
        old_logp = torch.where(mask, upcast(old_logp), 0.0)
        ratio = importance_ratio(logp, old_logp, mask, level=config.ratio, cap=config.ratio_cap)
    if corrected:
        weight = ratio
        if config.correction == "clip":
            active = clip_active(ratio, coefficient, config.clip_low, config.clip_high)
    if rollout_weights is not None:
        weight = weight * torch.where(mask, upcast(rollout_weights), 1.0)
    return HeadTerms(torch.where(mask, value, 0.0), coefficient, ratio, weight, active)


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


def _check_finite(mask: Tensor, **inputs: Tensor) -> None:
    bad = torch.zeros_like(mask)
    for x in inputs.values():
        bad |= ~torch.isfinite(x)
    bad &= mask
    if torch.compiler.is_compiling():  # a compiled graph cannot branch on data; it can still refuse
        torch._assert_async(~bad.any(), "kl_head: non-finite input at an unmasked token; run uncompiled to see where")
        return
    if not bad.any():
        return
    for name, x in inputs.items():
        places = (~torch.isfinite(x) & mask).nonzero()
        if len(places):
            first = tuple(places[0].tolist())
            raise ValueError(
                f"{name} is not finite at {len(places)} of {int(mask.sum())} unmasked tokens, first at {list(first)}: "
                f"{x[first].item()}. Mask those tokens, or mend what produced them (kl.check_finite=false skips this)"
            )
