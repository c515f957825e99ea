"""Importance ratios, their caps, and PPO's clip as an activity mask.

Shapes: ``[B, T]`` throughout; nothing here carries a gradient.
Equation numbers: https://arxiv.org/abs/2510.01555.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kl_plugins.estimators import EXP_BOUND, log_ratio


def importance_ratio(
    logp: Tensor, old_logp: Tensor, mask: Tensor, *, level: str = "token", cap: float | None = None
) -> Tensor:
    """``rho = min(pi_theta / pi_old, cap)``, ``[B, T]`` float32 or float64 (69).

    ``level="token"``: exp(logp - old_logp) of each token, PPO's. ``level="sequence"``: exp of the sum over the
    response's unmasked tokens, summed in log space, the same number at each of its tokens. ``cap=None`` bounds the
    exponent by ``EXP_BOUND`` alone, to stay finite.
    """
    log_rho = torch.where(mask, log_ratio(logp, old_logp), 0.0)
    if level == "sequence":
        log_rho = log_rho.sum(-1, keepdim=True).expand_as(log_rho)
    # Cap in log space: exp never overflows.
    return log_rho.clamp(max=EXP_BOUND if cap is None else min(math.log(cap), EXP_BOUND)).exp()


def clip_active(ratio: Tensor, coefficient: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Where max(rho c, clip(rho) c) still depends on rho, bool ``[B, T]`` (70).

    The penalty is minimised, so its pessimistic bound is a max: a token that already moved towards the reference by
    more than the clip range is left alone; one that moved away never is.
    """
    return ~((coefficient > 0) & (ratio < 1 - clip_low)) & ~((coefficient < 0) & (ratio > 1 + clip_high))
