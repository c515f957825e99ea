"""Exact KL the long way: all logits, autograd."""

import torch


def naive(hidden, weight, ref_hidden, ref_weight, direction, temperature=1.0, bias=None, ref_bias=None, softcap=None):
    """(kl [...], logp [..., V], ref_logp [..., V])."""
    logp = log_probabilities(hidden @ weight.T, temperature, bias, softcap)
    ref_logp = log_probabilities(ref_hidden @ ref_weight.T, temperature, ref_bias, softcap)
    return divergence(logp, ref_logp, direction), logp, ref_logp


def log_probabilities(logits, temperature=1.0, bias=None, softcap=None):
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (logits / temperature).log_softmax(-1)


def divergence(logp, ref_logp, direction):
    p, q = logp.exp(), ref_logp.exp()
    if direction == "mse":
        return (p - q).square().sum(-1) / 2
    # Excluded by one: select before the product, or 0 * inf makes the gradient NaN.
    kept = (logp > -torch.inf) & (ref_logp > -torch.inf)
    difference = torch.where(kept, logp, 0.0) - torch.where(kept, ref_logp, 0.0)
    return (p * difference).sum(-1) if direction == "reverse" else -(q * difference).sum(-1)
