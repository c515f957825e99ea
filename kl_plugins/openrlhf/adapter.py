"""What the plugin puts into OpenRLHF 0.11.2: the head in place of its KL, everything else left to it.

OpenRLHF aggregates (its KL is always a token mean), scales by its controller, logs, distributes. Per place:

- decoupled loss: inside ``ActorPPOTrainer.training_step`` the name ``compute_approx_kl`` gives `kl_head`'s matrix;
- combined loss: ``PolicyLoss`` gets `combined_advantages`, and ``compute_approx_kl`` the value alone, without gradient;
- reward: inside ``RemoteExperienceMaker.make_experience`` it gives the estimator's value;
- ``group_norm`` with bounds: `kl_plugins.shaping.group_norm` (79) in place of OpenRLHF's division by std + 1e-9.

Methods are wrapped in place, and in workers only: Ray pickles an actor class by value with its methods by reference to
their names, and in the driver a wrapped method would no longer be what its name refers to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kl_plugins.config import KLConfig
from kl_plugins.drift import check
from kl_plugins.openrlhf.known import EXPERIENCE_MAKER, PPO_ACTOR, PPO_TRAINER
from kl_plugins.openrlhf.settings import Settings, version
from kl_plugins.openrlhf.terms import StepKL, normalised, reward_config, reward_kl, take_largest
from kl_plugins.schedule import describe


@dataclass
class _Rollout:
    """`make_experience` asks for the KL of one batch of samples after the other."""

    config: KLConfig
    waiting: list[Any]


# What compute_approx_kl and its like are called within, and cannot see themselves.
_step: ContextVar[StepKL | None] = ContextVar("kl_plugins_step", default=None)
_rollout: ContextVar[_Rollout | None] = ContextVar("kl_plugins_rollout", default=None)
_norm: ContextVar[Callable[[list[Any]], None] | None] = ContextVar("kl_plugins_norm", default=None)


def check_all() -> None:
    """Raise DriftError if any function that the plugin wraps is not a known one. Imports OpenRLHF, changes nothing."""
    from openrlhf.trainer.ray import ppo_actor

    _refuse_patched(ppo_actor)
    check("openrlhf", version(), [*PPO_ACTOR, *EXPERIENCE_MAKER, *PPO_TRAINER])


def _refuse_patched(ppo_actor: ModuleType) -> None:
    if hasattr(ppo_actor, "StepKL"):
        raise RuntimeError(
            f"{ppo_actor.__file__} carries the source patch of kl_plugins, so the hook must not act on it: run it as "
            "python -m openrlhf.cli.train_ppo_ray, which takes the same flags, or `kl-plugins patch revert` it"
        )


def into_ppo_actor(module: ModuleType) -> None:
    """Put the head into ``openrlhf.trainer.ray.ppo_actor``, which holds the KL loss."""
    _refuse_patched(module)
    check("openrlhf", version(), PPO_ACTOR)
    wrap(module, "compute_approx_kl", _kl_loss)
    wrap(module.PolicyLoss, "forward", _policy_loss)
    wrap(module.ActorPPOTrainer, "training_step", _training_step)
    wrap(module.ActorPPOTrainer, "ppo_train", _ppo_train)


def into_experience_maker(module: ModuleType) -> None:
    """Put estimator and norm into ``openrlhf.trainer.ppo_utils.experience_maker``, which makes the advantages."""
    check("openrlhf", version(), EXPERIENCE_MAKER)
    wrap(module, "compute_approx_kl", _kl_reward)
    wrap(module, "apply_length_penalties", _penalties)
    maker = module.RemoteExperienceMaker
    wrap(maker, "__init__", _maker_init)
    wrap(maker, "make_experience", _make_experience)
    wrap(maker, "compute_advantages_and_returns", _advantages)


def wrap(owner: Any, name: str, make: Callable[[Callable], Callable]) -> None:
    """Put ``make(stock)`` in place of ``owner.name``, once."""
    stock = getattr(owner, name)
    if not getattr(stock, "_kl_plugins", False):
        wrapper = functools.wraps(stock)(make(stock))
        wrapper._kl_plugins = True
        setattr(owner, name, wrapper)


@contextmanager
def _within(variable: ContextVar, value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _training_step(stock: Callable) -> Callable:
    def training_step(self: Any, experience: Any, kl_ctl: float, step: int, loss_batch_info: Any = None) -> Any:
        ours = StepKL.of(self, experience, kl_ctl)
        with _within(_step, ours):
            status = stock(self, experience, kl_ctl, step, loss_batch_info)
        if ours is not None and not ours.used and self.args.algo.kl.init_coef > 0:
            raise RuntimeError(
                f"OpenRLHF {version()} made a training step without asking kl_plugins for its KL: the run would train "
                "with another KL than configured. Was ppo_actor.compute_approx_kl replaced by something else?"
            )
        return status

    return training_step


def _ppo_train(stock: Callable) -> Callable:
    def ppo_train(self: Any, kl_ctl: float) -> dict[str, Any]:
        return {**stock(self, kl_ctl), **take_largest(self)}

    return ppo_train


def _kl_loss(stock: Callable) -> Callable:
    def compute_approx_kl(
        log_probs: Tensor, log_probs_base: Tensor, log_probs_old: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        step = _step.get()
        if step is None:
            return stock(log_probs, log_probs_base, log_probs_old, *args, **kwargs)
        return step.matrix(log_probs, log_probs_base, log_probs_old)

    return compute_approx_kl


def _policy_loss(stock: Callable) -> Callable:
    def forward(
        self: Any, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        step = _step.get()
        if step is not None:
            advantages = step.advantages(advantages, log_probs)
        return stock(self, log_probs, old_log_probs, advantages, *args, **kwargs)

    return forward


def _maker_init(stock: Callable) -> Callable:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        settings = Settings.of(self.args)  # refused here, because the models are loaded after this
        if settings.kl is not None:
            print(f"kl_plugins: {describe(settings.kl, settings.schedule)}", flush=True)

    return __init__


def _make_experience(stock: Callable) -> Callable:
    def make_experience(self: Any, samples_list: list[Any]) -> list[Any]:
        config = reward_config(self.args)
        if config is None or self.initial_model_group is None:
            return stock(self, samples_list)
        rollout = _Rollout(config, list(samples_list))
        with _within(_rollout, rollout):
            result = stock(self, samples_list)
        if rollout.waiting:
            raise RuntimeError(
                f"OpenRLHF {version()} did not ask kl_plugins for the KL of {len(rollout.waiting)} of "
                f"{len(samples_list)} batches: the run would train with another KL than configured"
            )
        return result

    return make_experience


def _kl_reward(stock: Callable) -> Callable:
    def compute_approx_kl(log_probs: Tensor, log_probs_base: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rollout = _rollout.get()
        if rollout is None:
            return stock(log_probs, log_probs_base, *args, **kwargs)
        return reward_kl(rollout.config, rollout.waiting.pop(0), log_probs, log_probs_base)

    return compute_approx_kl


def _penalties(stock: Callable) -> Callable:
    def apply_length_penalties(experiences: list[Any], args: Any) -> None:
        stock(experiences, args)
        norm = _norm.get()
        if norm is not None:
            norm(experiences)

    return apply_length_penalties


def _advantages(stock: Callable) -> Callable:
    def compute_advantages_and_returns(self: Any, experiences: list[Any]) -> list[Any]:
        settings = Settings.of(self.args)
        if not settings.clipped_norm:
            return stock(self, experiences)
        size = self.args.rollout.n_samples_per_prompt
        raw: list[Tensor] = []
        std: list[Tensor] = []

        def norm(experiences: list[Any]) -> None:
            """Normalise the rewards where OpenRLHF has just applied its length penalties to them."""
            raw.extend(e.rewards for e in experiences)
            place = torch.tensor([i for e in experiences for i in e.index])
            by_prompt = torch.empty_like(torch.cat(raw))
            by_prompt[place] = torch.cat(raw)
            by_prompt = by_prompt.view(-1, size)
            shaped = normalised(settings, by_prompt).flatten()[place].split([len(r) for r in raw])
            spread = by_prompt.std(-1).repeat_interleave(size)[place].split([len(r) for r in raw])
            for experience, rewards in zip(experiences, shaped, strict=True):
                experience.rewards = rewards
            std.extend(spread)

        # OpenRLHF's dr_grpo goes on as its group_norm does, after subtracting a group mean that is 0 by then.
        with _within(_norm, norm), _pretending(self, "dr_grpo"):
            experiences = stock(self, experiences)
        for experience, rewards, spread in zip(experiences, raw, std, strict=True):
            experience.rewards = rewards
            experience.info["group_reward_std"] = spread
        return experiences

    return compute_advantages_and_returns


@contextmanager
def _pretending(maker: Any, estimator: str) -> Iterator[None]:
    """OpenRLHF reads its advantage estimator in two places."""
    before = maker.advantage_estimator
    maker.advantage_estimator = maker.args.algo.advantage.estimator = estimator
    try:
        yield
    finally:
        maker.advantage_estimator = maker.args.algo.advantage.estimator = before
