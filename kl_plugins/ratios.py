"""Importance ratios, their caps, and PPO's clip as an activity mask.

Shapes: ``[B, T]`` throughout; nothing here carries a gradient.
Equation numbers: https://arxiv.org/abs/2510.01555.
"""

from __future__ import annotations

from torch import Tensor

from kl_plugins.estimators import EXP_BOUND, log_ratio, select


def importance_ratio(
    logp: Tensor, old_logp: Tensor, mask: Tensor, *, level: str = "token", cap: float | None = None
) -> Tensor:
    """``rho = min(pi_theta / pi_old, cap)``, ``[B, T]`` float32 or float64 (69), of log-probabilities."""
    rho = ratio_of(select(log_ratio(logp, old_logp), mask), level)
    return rho if cap is None else rho.clamp(max=cap)


def ratio_of(log_rho: Tensor, level: str) -> Tensor:
    """rho of each token's log pi_theta / pi_old, which is 0 at masked tokens; finite by ``EXP_BOUND`` alone.

    ``level="token"``: exp of each token, PPO's. ``level="sequence"``: exp of the sum over the response's tokens, summed
    in log space, the same number at each of its tokens.
    """
    if level == "sequence":
        log_rho = log_rho.sum(-1, keepdim=True).expand_as(log_rho)
    return log_rho.clamp(max=EXP_BOUND).exp_()


def clip_active(ratio: Tensor, coefficient: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Where max(rho c, clip(rho) c) still depends on rho (70), ``[B, T]``, 0/1 in the dtype of the ratio.

    The penalty is minimised, so its pessimistic bound is a max: a token that already moved towards the reference by
    more than the clip range is left alone; one that moved away never is.
    """
    # rho below the range and c > 0, or above it and c < 0.
    return ratio.clamp(1 - clip_low, 1 + clip_high).sub_(ratio).mul_(coefficient).le_(0)
