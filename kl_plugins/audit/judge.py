"""Measurements of a KL as it is run: what it descends, how far off, how noisy, and what it does in the tails.

Everything is a `Loss`, (logp, ref_logp, old_logp) to a penalty ``[B, T]``, so that the framework's functions, the
plugin's head and a user's own estimator are judged alike. Gradients are exact: every response of a small policy is
enumerated (`kl_plugins.lab`). Equation numbers: https://arxiv.org/abs/2510.01555.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kl_plugins import KLConfig, combined_advantages, get_estimator, kl_head
from kl_plugins.audit.frameworks import Loss
from kl_plugins.lab import TabularPolicy, exact_kl_gradient, loss_coefficients, token_credit
from kl_plugins.lab.gradients import DIRECTIONS, GradientReport, compare_gradient, gradient_moments

PROBLEMS = 20
# What float32 arithmetic leaves of an exact gradient (OpenRLHF casts to it).
ROUNDING = 1e-4


# -- a setting as a loss ---------------------------------------------------------------------------------------------


@functools.cache
def plugin_loss(config: KLConfig, credit: str = "return", clip: tuple[float, float] = (0.2, 0.2)) -> Loss:
    """What `config` descends: the head's own matrix, or the policy loss's share of it.

    Args:
        config: the regulariser.
        credit: where a KL in the reward ends up, ``return`` (summed from a token on) or ``sequence``.
        clip: the policy loss's clip, which is what weights a KL inside the advantage.
    """
    if config.placement == "reward":
        return reward_loss(get_estimator(config.estimator).value, credit, clip)

    def decoupled(logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
        mask = torch.ones_like(logp, dtype=torch.bool)
        return kl_head(logp, ref_logp, mask=mask, config=config, old_logp=old_logp)

    def combined(logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
        mask = torch.ones_like(logp, dtype=torch.bool)
        advantages = combined_advantages(torch.zeros_like(logp), logp, ref_logp, beta=1.0, mask=mask, config=config)
        return policy_loss(advantages, logp, old_logp, clip)

    return combined if config.form == "combined" else decoupled


def reward_loss(value: Callable[[Tensor, Tensor], Tensor], credit: str, clip: tuple[float, float]) -> Loss:
    """A penalty in the reward: its value for the policy that wrote the batch, through the clipped policy loss."""

    def loss(logp: Tensor, ref_logp: Tensor, old_logp: Tensor) -> Tensor:
        return policy_loss(-token_credit(value(old_logp, ref_logp).detach(), credit), logp, old_logp, clip)

    return loss


def own_in_reward(own: Loss, credit: str, clip: tuple[float, float]) -> Loss:
    """A framework's own KL in the reward."""
    return reward_loss(lambda logp, ref_logp: own(logp, ref_logp, logp), credit, clip)


def policy_loss(advantages: Tensor, logp: Tensor, old_logp: Tensor, clip: tuple[float, float]) -> Tensor:
    """PPO's -min(rho A, clip(rho) A), ``[B, T]``."""
    ratio = (logp - old_logp).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip[0], 1 + clip[1]) * advantages)


# -- gradients on small problems -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A policy, its reference, the policy that wrote the batch, and the gradients of the two KLs and of mse."""

    policy: TabularPolicy
    reference: TabularPolicy
    behaviour: TabularPolicy | None
    targets: Mapping[str, Tensor]


@functools.cache
def problems(length: int, off_policy: bool, distance: float = 0.7) -> tuple[Problem, ...]:
    """Seeded random problems of `length` tokens from a vocabulary of 4 (one token) or 3.

    The logits of the reference differ from the policy's by N(0, `distance`^2), those of the behaviour by N(0, 0.3^2).
    """
    made = []
    for seed in range(PROBLEMS):
        policy = TabularPolicy.random(4 if length == 1 else 3, length, seed)
        reference = policy.near(distance, seed + 100)
        targets = {d: exact_kl_gradient(policy, reference, d) for d in DIRECTIONS}
        made.append(Problem(policy, reference, policy.near(0.3, seed + 200) if off_policy else None, targets))
    return tuple(made)


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest over the problems."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """How one loss's gradient stands to reverse KL and to forward KL, over `problems`.

    ``error`` is the distance to the KL's gradient over the size of that gradient, ``noise`` the standard deviation of
    one response's gradient over the size of its mean; infinite for pure noise. One token unless said otherwise.
    """

    reverse_error: Spread
    reverse_cosine: Spread
    forward_error: Spread
    forward_cosine: Spread
    noise: Spread
    response_error: Spread  # three tokens, to the reverse KL of whole responses
    response_cosine: Spread
    response_noise: Spread
    drift: Spread  # one token, to the loss's own on-policy gradient


@functools.cache
def measure(loss: Loss, off_policy: bool) -> Row:
    """The row of `loss`, with responses drawn from the policy or, `off_policy`, from an earlier one."""
    short = _compare(loss, 1, off_policy, ("reverse", "forward", "own"))
    long = _compare(loss, 3, off_policy, ("reverse",))

    def spread(reports: list, direction: str, attribute: str) -> Spread:
        return Spread.of([getattr(report[direction], attribute) for report in reports])

    return Row(
        reverse_error=spread(short, "reverse", "relative_error"),
        reverse_cosine=spread(short, "reverse", "cosine"),
        forward_error=spread(short, "forward", "relative_error"),
        forward_cosine=spread(short, "forward", "cosine"),
        noise=spread(short, "reverse", "noise"),
        response_error=spread(long, "reverse", "relative_error"),
        response_cosine=spread(long, "reverse", "cosine"),
        response_noise=spread(long, "reverse", "noise"),
        drift=Spread.of([report["own"].relative_error for report in short]),
    )


def _compare(
    loss: Loss, length: int, off_policy: bool, against: tuple[str, ...], distance: float = 0.7
) -> list[dict[str, GradientReport]]:
    """For each problem a report against each target: a KL's gradient, or ``own``, the loss's own on-policy one."""
    reports = []
    for problem in problems(length, off_policy, distance):
        policy, reference, sampler = problem.policy, problem.reference, problem.behaviour
        a = loss_coefficients(loss, policy, reference, sampler).double()
        targets = dict(problem.targets)
        if "own" in against:
            targets["own"] = gradient_moments(loss_coefficients(loss, policy, reference).double(), policy)[0]
        reports.append({name: compare_gradient(a, targets[name], policy, sampler) for name in against})
    return reports


def descends(loss: Loss) -> str:
    """``reverse``, ``forward``, ``mse``, ``nothing`` or ``other``: the expected gradient of one on-policy token.

    Measured close to the reference, where no clamp acts: what happens farther out is for `dead_zones`.
    """
    reports = _compare(loss, 1, False, DIRECTIONS, distance=0.2)
    if all(report["reverse"].noise > 1 / ROUNDING or report["reverse"].norm == 0 for report in reports):
        return "nothing"
    for direction in DIRECTIONS:
        if all(report[direction].relative_error < ROUNDING for report in reports):
            return direction
    return "other"


# -- one token at a time ---------------------------------------------------------------------------------------------


def coefficients(loss: Loss, log_ratios: Tensor, rho: float = 1.0) -> Tensor:
    """The factor of grad logp at log ratios ``[K]``, float64, with pi_theta / pi_old = `rho`.

    The likelier of the two has log-probability -1, so both are probabilities; only mse depends on that choice.
    """
    ratios = log_ratios.double()[:, None]
    logp = (ratios.clamp(max=0) - 1).requires_grad_(True)
    ref_logp = -ratios.clamp(min=0) - 1
    with torch.enable_grad():
        total = loss(logp, ref_logp, logp.detach() - math.log(rho)).sum()
    if not total.requires_grad:
        return torch.zeros_like(log_ratios.double())
    return torch.autograd.grad(total, logp)[0][:, 0]


def dead_zones(loss: Loss, reach: float = 40.0, step: float = 0.01) -> list[tuple[float, float]]:
    """Intervals of the log ratio on which the gradient is exactly 0; an end beyond `reach` is given as infinite.

    The point where the policies agree is none, nor is a loss with no gradient anywhere.
    """
    grid = torch.arange(round(-reach / step), round(reach / step) + 1, dtype=torch.float64) * step
    zero = (coefficients(loss, grid) == 0).tolist()
    zones, start = [], None
    for i, dead in enumerate([*zero, False]):
        if dead and start is None:
            start = i
        elif not dead and start is not None:
            if i - start > 2:
                low = -math.inf if start == 0 else _edge(loss, float(grid[start - 1]), float(grid[start]))
                high = math.inf if i == len(zero) else _edge(loss, float(grid[i]), float(grid[i - 1]))
                zones.append((low, high))
            start = None
    return [] if zones == [(-math.inf, math.inf)] else zones


def _edge(loss: Loss, alive: float, dead: float) -> float:
    for _ in range(30):
        middle = (alive + dead) / 2
        if float(coefficients(loss, torch.tensor([middle]))) == 0:
            dead = middle
        else:
            alive = middle
    return (alive + dead) / 2


def weighted(loss: Loss) -> bool:
    """Whether the gradient carries the importance ratio: 1.5 times as large where pi_theta / pi_old is 1.5."""
    plain, at = (float(coefficients(loss, torch.tensor([0.5]), rho)) for rho in (1.0, 1.5))
    return plain != 0 and abs(at / plain - 1.5) < ROUNDING


def pushes_away(loss: Loss) -> bool:
    """Whether a token that the policy already gives too little is pushed down further."""
    return bool(coefficients(loss, torch.tensor([-1.0])) > 0)


def pull_when_clipped(config: KLConfig, clip: tuple[float, float]) -> tuple[float, float]:
    """What the KL adds to the gradient at a token with advantage 1 and beta c = 0.5 whose ratio passed the upper clip.

    Returns:
        At ratio 1.3 + clip: combined with the advantage (7), and beside it with its importance weight (8), (70).
    """
    logp = torch.full((1, 1), -1.0, dtype=torch.float64, requires_grad=True)
    ref_logp, mask = logp.detach() - 1, torch.ones(1, 1, dtype=torch.bool)
    rho = 1.3 + clip[1]
    old_logp = logp.detach() - math.log(rho)
    advantage = torch.ones_like(ref_logp)
    beta = 0.5 / float(coefficients(plugin_loss(config), torch.tensor([1.0])))
    with_kl = combined_advantages(advantage, logp, ref_logp, beta=beta, mask=mask, config=config)
    without, combined = (
        float(torch.autograd.grad(policy_loss(a, logp, old_logp, clip).sum(), logp)[0]) for a in (advantage, with_kl)
    )
    return combined - without, rho * 0.5
