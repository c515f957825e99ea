"""Exact against sampled losses of one state: appendix D of arXiv 2510.01555 (https://arxiv.org/abs/2510.01555).

The last dimension is the vocabulary (V) or the drawn tokens (K); leading dimensions are states. `coefficient` is what
multiplies the score of something to be *maximised*: A - βk_n', or -k_n' for a penalty on its own, so that the
surrogate is a loss to be minimised. It and the probabilities beside it are detached.
"""

from __future__ import annotations

import torch
from torch import Tensor


def full_surrogate(logits: Tensor, coefficient: Tensor, baseline: Tensor | float = 0.0) -> Tensor:
    """Full-vocabulary surrogate (51): -Σ_y π(y)(c(y) - b)·logp(y), [..., V] to [...], no sampling variance."""
    logp = logits.log_softmax(-1)
    return -(logp.detach().exp() * (coefficient.detach() - baseline) * logp).sum(-1)


def sampled_surrogate(logits: Tensor, tokens: Tensor, coefficient: Tensor, baseline: Tensor | float = 0.0) -> Tensor:
    """Monte-Carlo twin (52): -mean over the drawn `tokens` [..., K] of (c(y) - b)·logp(y), [...].

    `coefficient` is [..., V], for the whole vocabulary, so that both twins take the same argument.
    """
    logp = logits.log_softmax(-1).gather(-1, tokens)
    return -((coefficient.detach().gather(-1, tokens) - baseline) * logp).mean(-1)


def sampled_gradients(logits: Tensor, coefficient: Tensor, baseline: Tensor | float = 0.0) -> Tensor:
    """Gradient of (52) to `logits` [V] for each token that could be drawn, [V, V], the drawn token first."""
    logits = logits.detach().requires_grad_(True)
    rows = []
    for token in range(logits.shape[-1]):
        loss = sampled_surrogate(logits, torch.tensor([token]), coefficient, baseline)
        rows.append(torch.autograd.grad(loss, logits)[0])
    return torch.stack(rows)


def unbiasedness_gap(logits: Tensor, coefficient: Tensor, baseline: Tensor | float = 0.0) -> float:
    """Check (53): largest |E over y of ∇(52) - ∇(51)| at one state, `logits` [V]; 0 to rounding for any baseline."""
    leaf = logits.detach().requires_grad_(True)
    exact = torch.autograd.grad(full_surrogate(leaf, coefficient, baseline), leaf)[0]
    expected = leaf.detach().softmax(-1) @ sampled_gradients(logits, coefficient, baseline)
    return float((expected - exact).abs().max())


def sampling_variance(logits: Tensor, coefficient: Tensor, draws: int = 1, baseline: Tensor | float = 0.0) -> float:
    """Trace of the covariance of ∇(52) from `draws` tokens at one state, `logits` [V]; that of ∇(51) is 0."""
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    gradients = sampled_gradients(logits, coefficient, baseline)
    probabilities = logits.detach().softmax(-1)
    mean = probabilities @ gradients
    return float(probabilities @ ((gradients - mean) ** 2).sum(-1)) / draws


def best_baseline(logits: Tensor, coefficient: Tensor) -> float:
    """The constant b that makes `sampling_variance` least: c weighted by π(y)‖∇logp(y)‖², at one state."""
    probabilities = logits.detach().softmax(-1)
    weight = probabilities * (1 - 2 * probabilities + (probabilities**2).sum())
    return float((weight * coefficient).sum() / weight.sum())
