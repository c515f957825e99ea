"""One batch for both adapters, and what each framework must make of it, by `oracle`.

verl and OpenRLHF live in two environments, so their adapters are not compared with each other but each with this file:
the same tensors, the same configurations, the same per-token matrix and gradient. Where the aggregation differs, so
does the gradient, by exactly `FACTORS`.
"""

import torch
from oracle import head_reference

BETA = 0.5

# [B, T] = [3, 5]; rows of 5, 3 and 2 counted tokens, one with a hole; the rest is padding.
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 1, 0], [0, 1, 1, 0, 0]])
LOGP = torch.tensor([[-1.0, -2.0, -0.5, -3.0, -0.1], [-0.7, -1.5, -9.0, -2.2, 0.0], [-8.0, -1.1, -0.4, 0.0, 0.0]]) * 1.0
OLD = torch.tensor([[-1.5, -1.9, -0.4, -2.5, -0.1], [-0.9, -1.5, -9.0, -2.0, 0.0], [-8.0, -0.6, -0.9, 0.0, 0.0]])
REF = torch.tensor([[-1.2, -2.4, -0.9, -1.0, -2.3], [-1.6, -1.4, -2.0, -2.9, 0.0], [-3.0, -1.3, -0.2, 0.0, 0.0]])
ROLLOUT = torch.tensor([[-1.4, -2.0, -0.4, -2.6, -0.2], [-0.9, -1.3, -9.0, -2.1, 0.0], [-8.0, -0.7, -0.8, 0.0, 0.0]])
CAP = 10.0
ROLLOUT_WEIGHTS = (OLD - ROLLOUT).exp().clamp(max=CAP)

CONFIGS = {
    "k2": {"estimator": "k2"},
    "k3": {"estimator": "k3"},
    "mse": {"estimator": "mse"},
    "none": {"estimator": "none"},
    "k3 reported, k2 descended": {"estimator": "k2", "report": "k3"},
    "k2 is": {"estimator": "k2", "correction": "is"},
    "k2 clip": {"estimator": "k2", "correction": "clip"},
    "k3 clip": {"estimator": "k3", "correction": "clip"},
    "k2 clip, sequence ratio": {"estimator": "k2", "correction": "clip", "ratio": "sequence", "ratio_cap": 2.0},
    "k2 return": {"estimator": "k2", "credit": "return"},
    "k2 sequence clip": {"estimator": "k2", "credit": "sequence", "correction": "clip"},
    "k2 bounded": {"estimator": "k2", "coefficient_bound": 0.5},
}


def expected(name: str, rollout: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Value matrix and d(sum)/d(logp) of a configuration, float64 ``[3, 5]``; with or without sampler weights."""
    weights = ROLLOUT_WEIGHTS if rollout else None
    return head_reference(LOGP, REF, MASK, OLD, weights, **CONFIGS[name])


def token_mean() -> torch.Tensor:
    """The weight of each token under OpenRLHF's KL aggregation, always, and verl's "token-mean": 1 / all tokens."""
    return MASK.double() / MASK.sum()


def seq_mean_token_mean() -> torch.Tensor:
    """The weight of each token under verl's "seq-mean-token-mean", GRPO's own: 1 / (responses x tokens of its own)."""
    return MASK.double() / (len(MASK) * MASK.sum(-1, keepdim=True))


# seq-mean-token-mean over token-mean: n / (B n_b). A short response counts for more, a long one for less.
FACTORS = MASK.sum() / (len(MASK) * MASK.sum(-1, keepdim=True))
