"""Reward shaping: baselines and norms of appendix A and J, https://arxiv.org/abs/2510.01555.

Shapes: ``rewards`` ``[N]``, one a response; ``groups`` N arbitrary ids (tensor, array, list of strings), equal for the
responses to one prompt. Results are ``[N]`` in the rewards' dtype. Standard deviations divide by n - 1, as verl's and
OpenRLHF's do. A group of one, or of equal rewards, gives exactly 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor


def group_baseline(rewards: Tensor, groups: Iterable[Hashable]) -> Tensor:
    """Reward minus the mean of the response's group (18): Dr. GRPO."""
    return _deviation(rewards, _group_ids(rewards, groups)).to(rewards.dtype)


def batch_baseline(rewards: Tensor) -> Tensor:
    """Reward minus the mean of the batch (19)."""
    return group_baseline(rewards, [0] * len(rewards))


def batch_norm(rewards: Tensor) -> Tensor:
    """(r - mean) / std over the batch (20): REINFORCE, PPO, REINFORCE++."""
    return group_norm(rewards, [0] * len(rewards))


def group_norm(
    rewards: Tensor, groups: Iterable[Hashable], std_min: float | None = None, std_max: float | None = None
) -> Tensor:
    """(r - mean) / std over the response's group (21): GRPO; with bounds, std clipped to [std_min, std_max] (79).

    Without ``std_min`` a group that differs only by noise gets advantages of order 1; 0.1 suits rewards of order 1.

    Raises:
        ValueError: shapes differ, a reward is not finite, a bound is not positive, or std_min > std_max.
    """
    for name, bound in (("std_min", std_min), ("std_max", std_max)):
        if bound is not None and not bound > 0:
            raise ValueError(f"{name}={bound} must be > 0, or None for no bound")
    if std_min is not None and std_max is not None and std_min > std_max:
        raise ValueError(f"std_min={std_min} is larger than std_max={std_max}")
    ids = _group_ids(rewards, groups)
    deviation = _deviation(rewards, ids)
    variance = _group_mean(deviation.square(), ids, ddof=1)
    std = variance.sqrt().clamp(min=std_min or 0.0, max=std_max)
    return torch.where(deviation == 0, 0.0, deviation / std).to(rewards.dtype)


def _group_ids(rewards: Tensor, groups: Iterable[Hashable]) -> Tensor:
    """For each response the position of its group's first one, int64 ``[N]``."""
    if rewards.dim() != 1:
        raise ValueError(f"rewards must be [N], one a response, got shape {tuple(rewards.shape)}")
    bad = (~torch.isfinite(rewards)).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"{len(bad)} of {len(rewards)} rewards are not finite, first at {bad[0]}: {rewards[bad[0]]}")
    groups = groups.tolist() if hasattr(groups, "tolist") else list(groups)
    if len(groups) != len(rewards):
        raise ValueError(f"{len(groups)} group ids for {len(rewards)} rewards")
    first: dict[Hashable, int] = {}
    return torch.tensor([first.setdefault(g, i) for i, g in enumerate(groups)], dtype=torch.int64).to(rewards.device)


def _group_mean(x: Tensor, ids: Tensor, ddof: int = 0) -> Tensor:
    """Each response's group mean (sum / (n - ddof)), spread back to ``[N]``."""
    total = torch.zeros_like(x).index_add(0, ids, x)
    count = torch.zeros_like(x).index_add(0, ids, torch.ones_like(x))
    return (total / (count - ddof).clamp(min=1))[ids]


def _deviation(rewards: Tensor, ids: Tensor) -> Tensor:
    """Reward minus group mean, in float64.

    Measured from the group's first reward, so that equal rewards give exactly 0 whatever their mean rounds to.
    """
    r = rewards.detach().double()
    offset = r - r[ids]
    return offset - _group_mean(offset, ids)
