"""Noise of gradients beyond one score per token, by enumeration: exact and top-k KL, and a leave-one-out baseline.

Written from the definitions, like the rest of the lab: it shares no code with `kl_plugins.exact`. Shapes: N = V^T
responses of T tokens, P = S * V logits, flattened.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kl_plugins.lab.policy import TabularPolicy


@torch.no_grad()
def scores(policy: TabularPolicy) -> Tensor:
    """∇logp_t of every token of every response, [N, T, P]."""
    responses = policy.responses()
    states = policy.states(responses)
    tokens = torch.eye(policy.vocabulary, dtype=torch.float64)[responses] - policy.logits.softmax(-1)[states]
    out = torch.zeros(*states.shape, *policy.logits.shape, dtype=torch.float64)
    out.scatter_(2, states[..., None, None].expand(-1, -1, 1, policy.vocabulary), tokens[:, :, None])
    return out.flatten(2)


@torch.no_grad()
def topk_gradients(policy: TabularPolicy, reference: TabularPolicy, k: int) -> Tensor:
    """Gradient [N, P] of each response's per-state reverse KL, exact on the policy's k likeliest tokens of each state.

    The rest is sampled by the response's own token, as k2 does: Σ_t Σ_{y in top k} π(y) ℓ(y) ∇logπ(y), plus
    ℓ(y_t) ∇logπ(y_t) where y_t is not among them. k = V is exact KL, k = 0 is k2.

    Raises:
        ValueError: k is not in [0, V].
    """
    if not 0 <= k <= policy.vocabulary:
        raise ValueError(f"k={k} must be between 0 and the vocabulary, {policy.vocabulary}")
    responses = policy.responses()
    states = policy.states(responses)
    logp, ref_logp = policy.logits.log_softmax(-1), reference.logits.log_softmax(-1)
    p, log_ratio = logp.exp(), logp - ref_logp
    inside = torch.zeros_like(p, dtype=torch.bool).scatter_(1, p.topk(k, dim=-1).indices, True)
    exact = torch.where(inside, p * log_ratio, 0.0)
    weights = exact[states]  # [N, T, V]: what each token's ∇logπ weighs
    drawn = torch.where(inside, 0.0, log_ratio)[states, responses]
    weights.scatter_add_(2, responses[..., None], drawn[..., None])
    rows = weights - weights.sum(-1, keepdim=True) * p[states]  # ∇logπ(y) is one-hot - π
    out = torch.zeros(len(responses), *policy.logits.shape, dtype=torch.float64)
    out.scatter_add_(1, states[..., None].expand(-1, -1, policy.vocabulary), rows)
    return out.flatten(1)


@torch.no_grad()
def moments(gradients: Tensor, policy: TabularPolicy) -> tuple[Tensor, float]:
    """Mean [P] and variance (trace of the covariance) of responses' gradients [N, P], drawn from `policy`."""
    probabilities = policy.response_probabilities()
    mean = probabilities @ gradients
    return mean, float(probabilities @ ((gradients - mean) ** 2).sum(-1))


@torch.no_grad()
def leave_one_out_moments(coefficients: Tensor, policy: TabularPolicy, group: int) -> tuple[Tensor, float]:
    """Mean [P] and variance a response of a group's mean gradient, each a_t less what the others' have on average.

    A group is `group` independent responses; from response i's coefficient at token t the mean of the others' at t is
    subtracted. That is a U-statistic with the kernel h = ½ Σ_t (a_t - a'_t)(∇logp_t - ∇logp'_t), so its mean is the
    gradient without a baseline and its variance, times `group` to compare with one response's, is
    2 (2 (n - 2) Var E[h | y] + Var h) / (n - 1) (Hoeffding).

    Args:
        coefficients: a [N, T] as `token_coefficients` gives it.
        policy: the policy that responses come from and are scored by.
        group: n, at least 2.
    """
    if group < 2:
        raise ValueError(f"group={group}: leaving one out needs at least 2 responses")
    p, score = policy.response_probabilities(), scores(policy)
    mean = torch.einsum("n,nt,ntp->p", p, coefficients, score)
    average = p @ coefficients
    # The score has mean 0, so E[h | y] = ½ (Σ_t (a_t - E a_t) ∇logp_t + mean).
    given = (torch.einsum("nt,ntp->np", coefficients - average, score) + mean) / 2
    first = float(p @ ((given - mean) ** 2).sum(-1))
    second = -float((mean**2).sum())
    for probability, a, s in zip(p, coefficients, score, strict=True):
        h = torch.einsum("nt,ntp->np", coefficients - a, score - s) / 2
        second += float(probability * (p @ (h**2).sum(-1)))
    return mean, 2 * (2 * (group - 2) * first + second) / (group - 1)
