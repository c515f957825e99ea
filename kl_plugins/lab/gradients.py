"""Exact gradients by enumeration, and what a configuration's gradient is compared with them.

This module judges `kl_plugins.head`, so it shares no code with it: the closed forms of k1, k2, k3 and mse below, the
ratios and the credit are written again from the equations of arXiv 2510.01555 (https://arxiv.org/abs/2510.01555).
Only estimators that the package does not ship come from the registry. Nothing is bounded here (the head bounds the
log ratio inside exp at 20): policies whose log ratios pass that bound are judged by the unbounded mathematics.

Every gradient is taken with respect to the logits of a `TabularPolicy`, flattened to one float64 vector of P = S·V
numbers, and is that of a penalty to be *minimised*. Sums run over tokens and are averaged over responses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kl_plugins.lab.policy import TabularPolicy

DIRECTIONS = ("reverse", "forward", "mse")
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def estimator_value(estimator: Any, logp: Tensor, ref_logp: Tensor) -> Tensor:
    """k_n itself, detached, in the shape of `logp`; `estimator` is a name or an object with `value`.

    k1 (10), k2 (12), k3 (16), mse (65); `none` reports k1.
    """
    log_ratio = logp - ref_logp
    if estimator in ("k1", "none"):
        return log_ratio
    if estimator == "k2":
        return log_ratio**2 / 2
    if estimator == "k3":
        return torch.expm1(-log_ratio) + log_ratio
    if estimator == "mse":
        return (logp.exp() - ref_logp.exp()) ** 2 / (2 * logp.exp())
    return _registered(estimator).value(logp, ref_logp).detach()


def estimator_coefficient(estimator: Any, logp: Tensor, ref_logp: Tensor) -> Tensor:
    """k_n' = dk_n/dlogp (71), detached, in the shape of `logp`; `estimator` is a name or an object."""
    log_ratio = logp - ref_logp
    if estimator == "none":
        return torch.zeros_like(logp)
    if estimator == "k1":
        return torch.ones_like(logp)
    if estimator == "k2":
        return log_ratio
    if estimator == "k3":
        return -torch.expm1(-log_ratio)
    if estimator == "mse":
        return logp.exp() - ref_logp.exp()
    return _registered(estimator).coefficient(logp, ref_logp).detach()


def _registered(estimator: Any) -> Any:
    if not isinstance(estimator, str):
        return estimator
    from kl_plugins import get_estimator  # a user's own estimator can only come from the registry

    return get_estimator(estimator)


def token_credit(coefficient: Tensor, credit: str) -> Tensor:
    """C_t from c_t along the last dimension: c_t (`token`), the sum from t on (`return`) or all of it (`sequence`)."""
    if credit == "token":
        return coefficient
    if credit == "return":
        return coefficient.flip(-1).cumsum(-1).flip(-1)
    if credit == "sequence":
        return coefficient.sum(-1, keepdim=True).expand_as(coefficient)
    raise ValueError(f"credit {credit!r} is not one of token, return, sequence")


def importance_ratio(logp: Tensor, old_logp: Tensor, level: str) -> Tensor:
    """ρ at every token: of the token, of the whole response (`sequence`), or of the response so far (`prefix`).

    `prefix` is not a setting of `KLConfig`; with token credit it is the weight that is exact off-policy.
    """
    difference = logp - old_logp
    if level == "token":
        return difference.exp()
    if level == "sequence":
        return difference.sum(-1, keepdim=True).exp().expand_as(difference)
    if level == "prefix":
        return difference.cumsum(-1).exp()
    raise ValueError(f"ratio {level!r} is not one of token, sequence, prefix")


@torch.no_grad()
def token_coefficients(
    config: Any,
    policy: TabularPolicy,
    reference: TabularPolicy,
    behaviour: TabularPolicy | None = None,
    *,
    sampler: TabularPolicy | None = None,
    advantage: Tensor | None = None,
    beta: float = 1.0,
    bandit: bool = False,
) -> Tensor:
    """Weights a [N, T] of the scores: a response's penalty gradient is Σ_t a_t ∇logp_t.

    Arguments and errors are those of `expected_gradient`.
    """
    responses = policy.responses()
    logp, ref_logp = policy.logp(responses), reference.logp(responses)
    old_logp = logp if behaviour is None else behaviour.logp(responses)
    rollout_logp = old_logp if sampler is None else sampler.logp(responses)
    if bandit:  # one action: its log-probability is the sum, and its score the sum of the tokens' scores
        logp, ref_logp, old_logp, rollout_logp = (
            x.sum(-1, keepdim=True) for x in (logp, ref_logp, old_logp, rollout_logp)
        )
    if config.placement not in ("loss", "reward"):
        raise ValueError(f"placement {config.placement!r} is not one of loss, reward")
    in_reward = config.placement == "reward"
    if in_reward:
        coefficient = estimator_value(config.estimator, logp, ref_logp)
    else:
        coefficient = _bounded(estimator_coefficient(config.estimator, logp, ref_logp), config)
    penalty = beta * token_credit(coefficient, config.credit)
    ratio = importance_ratio(logp, old_logp, config.ratio)
    mismatch = (old_logp - rollout_logp).exp().clamp(max=config.ratio_cap)

    if config.form not in ("decoupled", "combined"):
        raise ValueError(f"form {config.form!r} is not one of decoupled, combined")
    if in_reward or config.form == "combined":
        plain = torch.zeros_like(penalty) if advantage is None else _advantage(advantage, penalty)
        # (7), (70): what the penalty adds to the gradient of the policy loss, -w(A)A, when A becomes A - βC.
        correction = "clip" if config.correction == "none" else config.correction
        with_penalty = _weight(config, correction, ratio, penalty - plain) * (penalty - plain)
        coefficients = with_penalty + _weight(config, correction, ratio, -plain) * plain
    else:
        ratio = ratio.clamp(max=config.ratio_cap)
        coefficients = _weight(config, config.correction, ratio, penalty) * penalty  # (8), (69), (70)
    return (mismatch * coefficients).expand(-1, policy.length)


def _weight(config: Any, correction: str, ratio: Tensor, penalty: Tensor) -> Tensor:
    """Importance weight of a term that is minimised; clipping (max, not min) drops it where it is low enough."""
    if correction == "none":
        return torch.ones_like(ratio)
    if correction == "is":
        return ratio
    if correction == "clip":
        too_low = (penalty > 0) & (ratio < 1 - config.clip_low)
        too_high = (penalty < 0) & (ratio > 1 + config.clip_high)
        return ratio.masked_fill(too_low | too_high, 0)
    raise ValueError(f"correction {correction!r} is not one of none, is, clip")


def _bounded(coefficient: Tensor, config: Any) -> Tensor:
    bound = getattr(config, "coefficient_bound", None)
    return coefficient if bound is None else bound * torch.tanh(coefficient / bound)


def _advantage(advantage: Tensor, like: Tensor) -> Tensor:
    advantage = torch.as_tensor(advantage, dtype=torch.float64)
    advantage = advantage[:, None] if advantage.ndim == 1 else advantage
    if advantage.shape[0] != like.shape[0] or advantage.shape[1] not in (1, like.shape[1]):
        raise ValueError(f"advantage must be [N] or [N, T] with [N, T] = {tuple(like.shape)}, got {advantage.shape}")
    return advantage.expand_as(like)


def loss_coefficients(
    loss: Loss, policy: TabularPolicy, reference: TabularPolicy, behaviour: TabularPolicy | None = None
) -> Tensor:
    """The same a [N, T] for any code at all: the gradient that autograd finds in it.

    `loss` is called once with (logp, ref_logp, old_logp), each [N, T] and `logp` requiring grad, and returns a penalty
    [N, T] or [N] in which no response depends on another (in a mean over the batch it would).
    """
    with torch.no_grad():
        responses = policy.responses()
        logp, ref_logp = policy.logp(responses), reference.logp(responses)
        old_logp = logp.clone() if behaviour is None else behaviour.logp(responses)
    logp.requires_grad_(True)
    with torch.enable_grad():
        total = loss(logp, ref_logp, old_logp).sum()
    if not total.requires_grad:
        return torch.zeros_like(logp)
    return torch.autograd.grad(total, logp)[0]


@torch.no_grad()
def gradient_moments(
    coefficients: Tensor, policy: TabularPolicy, sampler: TabularPolicy | None = None
) -> tuple[Tensor, float]:
    """Mean [P] and variance (trace of the covariance) of a one-response gradient Σ_t a_t ∇logp_t, both exact.

    Args:
        coefficients: a [N, T], as given by `token_coefficients` or `loss_coefficients`.
        policy: π_θ, whose scores they weight.
        sampler: the policy that responses come from; `policy` itself when None.
    """
    responses = policy.responses()
    states = policy.states(responses)
    probabilities = (sampler or policy).response_probabilities()
    next_token = policy.logits.softmax(-1)

    # ∇logp_t is (one-hot of y_t) - π(.|s_t) in the row of s_t and zero elsewhere.
    weighted = (probabilities[:, None] * coefficients).flatten()
    mean = torch.zeros_like(policy.logits).flatten()
    mean.index_add_(0, (states * policy.vocabulary + responses).flatten(), weighted)
    row = torch.zeros(policy.logits.shape[0], dtype=torch.float64).index_add_(0, states.flatten(), weighted)
    mean = mean.reshape(policy.logits.shape) - row[:, None] * next_token

    # A response meets T different states, so the squared norm of its gradient is a sum over tokens.
    score_norm = 1 - 2 * next_token[states, responses] + (next_token**2).sum(-1)[states]
    second = (probabilities * (coefficients**2 * score_norm).sum(-1)).sum()
    return mean.flatten(), max(0.0, float(second - (mean**2).sum()))


def expected_gradient(
    config: Any,
    policy: TabularPolicy,
    reference: TabularPolicy,
    behaviour: TabularPolicy | None = None,
    *,
    sampler: TabularPolicy | None = None,
    advantage: Tensor | None = None,
    beta: float = 1.0,
    bandit: bool = False,
) -> Tensor:
    """Expected gradient [P] of the regulariser that a configuration descends, over all V^T responses.

    Args:
        config: a `KLConfig` or anything with its attributes estimator, placement, form, correction, clip_low,
            clip_high, ratio, ratio_cap and credit; coefficient_bound where there is one. In reward the coefficient is
            the *value* k_n (5), and the form is combined whatever the configuration says, since a reward reaches the
            policy through the advantage; which credit it gets there is for the advantage estimator to say (γ = λ = 1
            is `return`, a group's outcome reward `sequence`), so set `credit` to match. The combined form is weighted
            and clipped by the policy loss itself (PPO's min, no cap): `correction="none"` means "clip" there.
        policy: π_θ, whose logits the gradient is taken to.
        reference: π_ref.
        behaviour: π_old, which responses come from; on-policy when None.
        sampler: π_rollout where it differs from π_old: responses come from it, and every term is weighted by
            min(π_old/π_rollout, ratio_cap) per token.
        advantage: [N] or [N, T], zero when None. The combined form depends on it: the result is what the penalty adds
            to the gradient of the policy loss, nothing at all where A - βC is clipped and A is too.
        beta: scales the penalty.
        bandit: treat the response as one action, ℓ = Σ_t ℓ_t (the paper's setting), not token by token.

    Raises:
        ValueError: an axis of `config` holds an unknown value.
    """
    coefficients = token_coefficients(
        config, policy, reference, behaviour, sampler=sampler, advantage=advantage, beta=beta, bandit=bandit
    )
    return gradient_moments(coefficients, policy, sampler or behaviour)[0]


def exact_kl(
    policy: TabularPolicy,
    reference: TabularPolicy,
    direction: str = "reverse",
    per_state: bool = False,
    states: TabularPolicy | None = None,
) -> Tensor:
    """The objective itself, a scalar with gradient to the policy's logits. Arguments as in `exact_kl_gradient`."""
    if direction not in DIRECTIONS:
        raise ValueError(f"direction {direction!r} is not one of {', '.join(DIRECTIONS)}")
    if per_state:
        logp, ref_logp = policy.logits.log_softmax(-1), reference.logits.detach().log_softmax(-1)
        weight = (states or policy).state_probabilities()[:, None]
    else:
        responses = policy.responses()
        logp, ref_logp = policy.logp(responses).sum(-1), reference.logp(responses).sum(-1).detach()
        weight = 1.0
    if direction == "reverse":
        terms = logp.exp() * (logp - ref_logp)
    elif direction == "forward":
        terms = ref_logp.exp() * (ref_logp - logp)
    else:
        terms = (logp.exp() - ref_logp.exp()) ** 2 / 2
    return (weight * terms).sum()


def exact_kl_gradient(
    policy: TabularPolicy,
    reference: TabularPolicy,
    direction: str = "reverse",
    per_state: bool = False,
    states: TabularPolicy | None = None,
) -> Tensor:
    """Gradient [P] of the objective a regulariser claims to descend, by autograd through the enumeration.

    Args:
        policy: π_θ, whose logits the gradient is taken to.
        reference: π_ref.
        direction: `reverse` KL(π‖π_ref) (12), `forward` KL(π_ref‖π) (16), or `mse`, ½Σ(π - π_ref)² (65).
        per_state: sum the divergence of the next-token distributions over the states, each weighted by the
            probability of being visited, *which is held fixed*: what token credit descends.
        states: the policy whose visits weight the states when `per_state`; `policy` itself when None.
    """
    objective = exact_kl(policy, reference, direction, per_state, states)
    return torch.autograd.grad(objective, policy.logits)[0].flatten()


@dataclass(frozen=True, eq=False)
class GradientReport:
    """How a gradient estimator stands to the gradient it should have.

    Attributes:
        expected: [P] expected gradient.
        target: [P] gradient it is compared with.
        norm: ‖expected‖.
        target_norm: ‖target‖.
        bias: ‖expected - target‖.
        relative_error: bias / ‖target‖; infinite when the target is zero and the bias is not.
        cosine: between the two; 0 where either is zero to rounding, since then it points nowhere.
        variance: trace of the covariance of the gradient of one response.
        noise: standard deviation of one response's gradient over ‖expected‖; infinite for pure noise.
    """

    expected: Tensor
    target: Tensor
    norm: float
    target_norm: float
    bias: float
    relative_error: float
    cosine: float
    variance: float
    noise: float


def compare_gradient(
    coefficients: Tensor, target: Tensor, policy: TabularPolicy, sampler: TabularPolicy | None = None
) -> GradientReport:
    """Report on per-token coefficients a [N, T] drawn under `sampler`, against a target gradient [P]."""
    expected, variance = gradient_moments(coefficients, policy, sampler)
    norm, target_norm, bias = float(expected.norm()), float(target.norm()), float((expected - target).norm())
    # An exact zero comes out of the sums as rounding of the size of what was summed.
    tiny = 1e-12 * max(1.0, math.sqrt(variance), target_norm)
    vanishes = norm <= tiny or target_norm <= tiny
    return GradientReport(
        expected=expected,
        target=target,
        norm=norm,
        target_norm=target_norm,
        bias=bias,
        relative_error=_over(bias, target_norm, tiny),
        cosine=0.0 if vanishes else float(expected @ target) / (norm * target_norm),
        variance=variance,
        noise=_over(math.sqrt(variance), norm, tiny),
    )


def _over(numerator: float, denominator: float, tiny: float) -> float:
    if denominator > tiny:
        return numerator / denominator
    return 0.0 if numerator <= tiny else math.inf


def gradient_report(
    config: Any,
    policy: TabularPolicy,
    reference: TabularPolicy,
    behaviour: TabularPolicy | None = None,
    *,
    direction: str = "reverse",
    per_state: bool = False,
    states: TabularPolicy | None = None,
    sampler: TabularPolicy | None = None,
    advantage: Tensor | None = None,
    beta: float = 1.0,
    bandit: bool = False,
) -> GradientReport:
    """Bias, variance and cosine of one configuration; arguments of `expected_gradient` and `exact_kl_gradient`.

    `config` may also be a function as in `loss_coefficients` (then `sampler`, `advantage` and `bandit` do not apply
    and must be left alone), so that a framework's own code is judged by the same numbers. The target is scaled by
    `beta` as the penalty is.
    """
    target = beta * exact_kl_gradient(policy, reference, direction, per_state, states)
    if callable(config):
        if sampler is not None or advantage is not None or bandit:
            raise ValueError("sampler, advantage and bandit apply to a configuration, not to a loss function")
        coefficients = beta * loss_coefficients(config, policy, reference, behaviour)
    else:
        coefficients = token_coefficients(
            config, policy, reference, behaviour, sampler=sampler, advantage=advantage, beta=beta, bandit=bandit
        )
    return compare_gradient(coefficients, target, policy, sampler or behaviour)


def estimator_curve(estimator: Any, log_ratio: Tensor, ref_logp: float = -1.0) -> tuple[Tensor, Tensor]:
    """Value and coefficient, each [K], along log ratios ℓ [K] at a fixed log π_ref (which only mse depends on)."""
    log_ratio = torch.as_tensor(log_ratio, dtype=torch.float64)
    reference = torch.full_like(log_ratio, ref_logp)
    logp = reference + log_ratio
    return estimator_value(estimator, logp, reference), estimator_coefficient(estimator, logp, reference)
