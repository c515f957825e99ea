"""The loss head: one per-token matrix, value going forward, coefficient going backward.

Shapes: ``[B, T]`` throughout; ``mask`` is bool or 0/1, True where a token counts.
Equation numbers: https://arxiv.org/abs/2510.01555.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from kl_plugins.config import KLConfig
from kl_plugins.credit import assign_credit
from kl_plugins.estimators import LogRatioEstimator, get_estimator, log_ratio, select, upcast
from kl_plugins.ratios import clip_active, ratio_of

# Elements of a matrix that a CPU takes at a time, whole rows: all steps but the first find them in cache, and their
# temporaries are not given back to the system, to be faulted in again.
TILE = 2**17


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
    batch = check_batch(logp, ref_logp, mask=mask, config=config, old_logp=old_logp, rollout_weights=rollout_weights)
    return make_head(batch, config)[0]


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
    config = dataclasses.replace(config, correction="none")
    terms = head_terms(check_batch(logp, ref_logp, mask=mask, config=config), config)
    return upcast(advantages) - beta * terms.coefficient


@dataclasses.dataclass(frozen=True)
class Batch:
    """Inputs of :func:`kl_head` that fit together, ``[B, T]`` each."""

    logp: Tensor
    ref_logp: Tensor | None
    mask: Tensor  # bool
    old_logp: Tensor | None
    rollout_weights: Tensor | None
    finite: bool  # known to be, masked entries too

    def rows(self, rows: slice) -> Batch:
        """Some of the responses."""
        columns = (self.logp, self.ref_logp, self.mask, self.old_logp, self.rollout_weights)
        return Batch(*(None if x is None else x[rows] for x in columns), finite=self.finite)


def check_batch(
    logp: Tensor,
    ref_logp: Tensor | None,
    *,
    mask: Tensor,
    config: KLConfig,
    old_logp: Tensor | None = None,
    rollout_weights: Tensor | None = None,
) -> Batch:
    """Arguments and errors of :func:`kl_head`."""
    if _corrected(config) and old_logp is None:
        raise ValueError(f"kl.correction={config.correction!r} needs old_logp, the log-probabilities of the old policy")
    if logp.dim() < 1 or not logp.is_floating_point():
        raise ValueError(f"logp must be a float tensor [B, T], got {logp.dtype} of shape {tuple(logp.shape)}")
    inputs = dict(ref_logp=ref_logp, old_logp=old_logp, rollout_weights=rollout_weights)
    inputs = {name: x for name, x in inputs.items() if x is not None}
    _same_shape(logp, mask=mask, **inputs)
    mask = mask if mask.dtype == torch.bool else mask != 0
    finite = config.check_finite and _check_finite(mask, logp=logp, **inputs)
    return Batch(logp, ref_logp, mask, old_logp, rollout_weights, finite)


def make_head(batch: Batch, config: KLConfig, measure: Callable[[HeadTerms], Tensor] | None = None):
    """:func:`kl_head`'s matrix, and what ``measure`` makes of the terms of some rows at a time, stacked."""
    logp, measured = batch.logp, []
    tile = max(1, TILE // max(1, logp.shape[-1]))
    if logp.dim() != 2 or logp.shape[0] <= tile or not logp.is_cpu or torch.compiler.is_compiling():
        terms = head_terms(batch, config)
        value, gradient = terms.value, terms.gradient
        if measure is not None:
            measured.append(measure(terms))
    else:
        value, gradient = (torch.empty_like(logp, dtype=upcast(logp[:0]).dtype) for _ in range(2))
        for start in range(0, len(logp), tile):
            rows = slice(start, start + tile)
            terms = head_terms(batch.rows(rows), config)
            value[rows], gradient[rows] = terms.value, terms.gradient
            if measure is not None:
                measured.append(measure(terms))
    return _ValueForward.apply(logp, value, gradient), measured


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


@torch.no_grad()
def head_terms(batch: Batch, config: KLConfig) -> HeadTerms:
    """The parts of :func:`kl_head` and of :func:`kl_plugins.kl_metrics`."""
    logp, ref_logp, mask = batch.logp, batch.ref_logp, batch.mask
    if batch.finite:
        mask = mask.view(torch.uint8).to(upcast(logp).dtype)  # as bytes: ten times as fast as from bool

    # Select before any nonlinearity: what a masked place holds (NaN, -1e10) never enters a formula.
    no_reference = ref_logp is None
    ref_logp = logp if no_reference else ref_logp
    r = select(log_ratio(logp, ref_logp), mask)

    def pair(name: str) -> list[Tensor]:
        """Value and coefficient, 0 at masked tokens."""
        estimator = get_estimator(name)
        if isinstance(estimator, LogRatioEstimator):
            return [x if x is r else select(x, mask) for x in estimator.pair(r)]
        columns = [select(upcast(x).clone(), mask) for x in (logp, ref_logp)]
        return [select(function(*columns).clone(), mask) for function in (estimator.value, estimator.coefficient)]

    value, coefficient = pair(config.estimator)
    if config.placement == "reward":  # blamed on logp with the detached value (5), a loss with its derivative (71)
        coefficient = value
    if config.report not in (None, config.estimator):
        value, _ = pair(config.report)
    if no_reference:  # no regulariser: k1's coefficient would be 1 even so
        coefficient = torch.zeros_like(r)
    if config.coefficient_bound is not None:
        coefficient = config.coefficient_bound * torch.tanh(coefficient / config.coefficient_bound)
    coefficient = assign_credit(coefficient, mask, config.credit)

    pull, log_rho, ratio = coefficient, None, None
    if batch.old_logp is not None:
        log_rho = select(log_ratio(logp, batch.old_logp), mask)
        ratio = select(ratio_of(log_rho, config.ratio), mask)
    if _corrected(config):
        weight = ratio.clamp(max=config.ratio_cap)
        value, pull = weight * value, weight * pull
    if batch.rollout_weights is not None:
        value, pull = (select(upcast(batch.rollout_weights) * x, mask) for x in (value, pull))
    gradient = pull
    if _corrected(config) and config.correction == "clip":
        gradient = pull * clip_active(weight, coefficient, config.clip_low, config.clip_high)
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


def _corrected(config: KLConfig) -> bool:
    return config.correction != "none" and config.form == "decoupled" and config.placement == "loss"


def _same_shape(logp: Tensor, **others: Tensor) -> None:
    for name, x in others.items():
        if x.shape != logp.shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, logp {tuple(logp.shape)}: all must be the same [B, T]"
            )


def _check_finite(mask: Tensor, **inputs: Tensor) -> bool:
    """Whether all entries are finite, masked ones too; an unmasked one that is not is an error that names it."""
    if torch.compiler.is_compiling():  # a compiled graph cannot branch on data; it can still refuse
        zero = sum(torch.where(mask, x.detach() * 0, 0).sum() for x in inputs.values())  # or NaN: fuses, unlike any()
        torch._assert_async(zero == 0, "kl_head: non-finite input at an unmasked token; run uncompiled to see where")
        return False
    # NaN and infinity survive a sum, which is the cheapest way to look at everything once.
    if math.isfinite(sum(x.detach().sum(dtype=torch.promote_types(x.dtype, torch.float32)) for x in inputs.values())):
        return True
    for name, x in inputs.items():
        places = (~torch.isfinite(x) & mask).nonzero()
        if len(places):
            first = tuple(places[0].tolist())
            raise ValueError(
                f"{name} is not finite at {len(places)} of {int(mask.sum())} unmasked tokens, first at {list(first)}: "
                f"{x[first].item()}. Mask those tokens, or mend what produced them (kl.check_finite=false skips this)"
            )
    return False
