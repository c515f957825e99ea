"""What replaces OpenRLHF's KL, in OpenRLHF's terms; the runtime adapter and the source patch both call this.

Shapes are OpenRLHF's: ``[B, T-1]`` over the whole sequence, off-mask log-probabilities exactly 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kl_plugins.config import KLConfig
from kl_plugins.head import combined_advantages, head_terms
from kl_plugins.metrics import measure
from kl_plugins.openrlhf.settings import Settings
from kl_plugins.ratios import importance_ratio
from kl_plugins.shaping import group_norm

# Means over micro-batches and ranks are OpenRLHF's business; a largest value has to stay one.
LARGEST = ("kl/coef_max", "kl/rho_max")


class StepKL:
    """The KL loss of one micro-batch of ``ActorPPOTrainer.training_step``."""

    def __init__(self, trainer: Any, config: KLConfig, experience: Any, beta: float):
        self.trainer, self.config, self.experience, self.beta = trainer, config, experience, beta
        self.mask = experience.action_mask.bool()
        self.used = False

    @classmethod
    def of(cls, trainer: Any, experience: Any, beta: float) -> StepKL | None:
        """The plugin's KL loss, or None where OpenRLHF's own is to stay."""
        config = Settings.of(trainer.args).kl
        return cls(trainer, config, experience, beta) if config and config.placement == "loss" else None

    def advantages(self, advantages: Tensor, logp: Tensor) -> Tensor:
        """A - beta C (7) in the combined form, else A."""
        if self.config.form != "combined":
            return advantages
        ref_logp = self.experience.base_action_log_probs
        return combined_advantages(advantages, logp, ref_logp, beta=self.beta, mask=self.mask, config=self.config)

    def matrix(self, logp: Tensor, ref_logp: Tensor, old_logp: Tensor | None) -> Tensor:
        """`kl_head`'s matrix for OpenRLHF to aggregate, without gradient in the combined form; notes the metrics."""
        batch: dict[str, Any] = dict(mask=self.mask, config=self.config, old_logp=old_logp)
        rollout_logp = self.experience.rollout_log_probs
        if rollout_logp is not None:  # is_correction is on, and what vLLM sampled from is not quite pi_old
            batch["rollout_weights"] = importance_ratio(old_logp, rollout_logp, self.mask, cap=self.config.ratio_cap)
        terms = head_terms(logp, ref_logp, **batch)
        metrics = {f"kl/{name}": value for name, value in measure(terms).items()}
        self.experience.info.update({name: torch.tensor(value) for name, value in metrics.items()})
        largest = self.trainer.__dict__.setdefault("_kl_largest", {})
        largest.update({name: max(largest.get(name, metrics[name]), metrics[name]) for name in LARGEST})
        self.used = True
        return terms.value if self.config.form == "combined" else terms.matrix(logp)


def take_largest(trainer: Any) -> dict[str, float]:
    """The largest values since the last call, over all ranks."""
    return trainer.strategy.all_reduce(trainer.__dict__.pop("_kl_largest", {}), op="max")


def reward_kl(config: KLConfig, samples: Any, logp: Tensor, ref_logp: Tensor) -> Tensor:
    """The penalty that OpenRLHF subtracts from the rewards, ``[B, T-1]``, detached; notes the metrics."""
    terms = head_terms(logp, ref_logp, mask=samples.action_mask.bool(), config=config)
    for name, value in measure(terms).items():
        samples.info[f"kl/{name}"] = torch.full((len(logp),), value)  # OpenRLHF splits info by sample
    return terms.value


def reward_config(args: Any) -> KLConfig | None:
    """The plugin's KL for the reward, or None where OpenRLHF's own is to stay."""
    config = Settings.of(args).kl
    return config if config and config.placement == "reward" else None


def clipped_group_norm(args: Any, rewards: Tensor) -> Tensor | None:
    """Rewards ``[groups, n]`` normalised by the clipped std (79), or None where no bound is set."""
    settings = Settings.of(args)
    return normalised(settings, rewards) if settings.clipped_norm else None


def normalised(settings: Settings, rewards: Tensor) -> Tensor:
    """`group_norm` of rewards ``[groups, n]`` with the settings' bounds."""
    groups = torch.arange(len(rewards)).repeat_interleave(rewards.shape[1])
    return group_norm(rewards.flatten(), groups, settings.std_min, settings.std_max).view_as(rewards)
