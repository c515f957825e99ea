"""The head once more, in slow Python floats, one token at a time: what tests of `kl_head` compare with.

Written from the definitions of arXiv 2510.01555 (https://arxiv.org/abs/2510.01555), not from the package: it imports
nothing of it. Only the decoupled loss is here, (8), (69), (70). Exponents are bounded by 20 as in the head, rho's from
above alone; beyond that bound mse is not specified and not to be compared.
"""

import math

import torch

BOUND = 20.0


def _exp(x):
    return math.exp(min(BOUND, x))


def _expm1(x):
    return math.expm1(max(-BOUND, min(BOUND, x)))


def value_of(estimator, logp, ref_logp):
    """k_n of one token, nats; `none` reports k1."""
    ell = logp - ref_logp
    if estimator in ("k1", "none"):
        return ell
    if estimator == "k2":
        return 0.5 * ell * ell
    if estimator == "k3":
        return _expm1(-ell) + max(ell, -BOUND)  # the bound holds outside exp too, or far values would be negative
    if estimator == "mse":
        root = math.exp(min(BOUND, logp / 2)) - math.exp(min(BOUND, ref_logp - logp / 2))
        return 0.5 * root * root
    raise ValueError(f"the oracle knows no estimator {estimator!r}")


def coefficient_of(estimator, logp, ref_logp):
    """dk_n/dlogp of one token (71)."""
    ell = logp - ref_logp
    if estimator == "none":
        return 0.0
    if estimator == "k1":
        return 1.0
    if estimator == "k2":
        return ell
    if estimator == "k3":
        return -_expm1(-ell)
    if estimator == "mse":
        return math.exp(min(BOUND, logp)) - math.exp(min(BOUND, ref_logp))
    raise ValueError(f"the oracle knows no estimator {estimator!r}")


def head_reference(
    logp,
    ref_logp,
    mask=None,
    old_logp=None,
    rollout_weights=None,
    *,
    estimator="k2",
    report=None,
    correction="none",
    clip_low=0.2,
    clip_high=0.2,
    ratio="token",
    ratio_cap=10.0,
    credit="token",
    coefficient_bound=None,
):
    """(value, gradient), each a float64 tensor [B, T]; inputs are tensors or nested lists [B][T], or None.

    `mask` None counts every token, `ref_logp` None is no reference (all zero), `old_logp` None makes ρ 1 and
    `rollout_weights` None makes v 1. The gradient is that of the sum of the matrix to each logp.
    """
    logp, ref_logp, mask, old_logp, rollout_weights = (
        x.detach().double().tolist() if isinstance(x, torch.Tensor) else x
        for x in (logp, ref_logp, mask, old_logp, rollout_weights)
    )
    values, gradients = [], []
    for b, row in enumerate(logp):
        counted = [t for t in range(len(row)) if mask is None or mask[b][t]]
        value, gradient = [0.0] * len(row), [0.0] * len(row)
        values.append(value)
        gradients.append(gradient)
        if ref_logp is None:
            continue

        coefficient = {}
        for t in counted:
            coefficient[t] = coefficient_of(estimator, row[t], ref_logp[b][t])
            if coefficient_bound is not None:
                coefficient[t] = coefficient_bound * math.tanh(coefficient[t] / coefficient_bound)
        log_rho = {t: 0.0 if old_logp is None else row[t] - old_logp[b][t] for t in counted}

        for t in counted:
            if credit == "token":
                blamed = [t]
            elif credit == "return":
                blamed = [s for s in counted if s >= t]
            elif credit == "sequence":
                blamed = counted
            else:
                raise ValueError(f"the oracle knows no credit {credit!r}")
            credited = math.fsum(coefficient[s] for s in blamed)

            if ratio == "token":
                rho = _exp(log_rho[t])
            elif ratio == "sequence":
                rho = _exp(math.fsum(log_rho.values()))
            else:
                raise ValueError(f"the oracle knows no ratio {ratio!r}")

            weight, active = 1.0, True
            if correction in ("is", "clip"):
                weight = min(rho, ratio_cap)
                if correction == "clip":
                    if credited > 0 and rho < 1 - clip_low:
                        active = False
                    if credited < 0 and rho > 1 + clip_high:
                        active = False
            elif correction != "none":
                raise ValueError(f"the oracle knows no correction {correction!r}")
            if rollout_weights is not None:
                weight *= rollout_weights[b][t]

            value[t] = weight * value_of(report or estimator, row[t], ref_logp[b][t])
            gradient[t] = weight * credited if active else 0.0
    return torch.tensor(values, dtype=torch.float64), torch.tensor(gradients, dtype=torch.float64)
