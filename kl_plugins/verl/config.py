"""Typed configuration: verl's PolicyLossConfig with a nested ``kl`` block, selected by ``_target_``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import PolicyLossConfig

from kl_plugins.config import KLConfig
from kl_plugins.schedule import read_block

COMBINED_LOSS = "kl_plugins_combined"
KL_TYPE = "kl_plugins"  # the kl_loss_type of a configured actor; verl alone refuses it


@dataclass
class KLPolicyLossConfig(PolicyLossConfig):
    """verl's policy loss configuration plus one regulariser.

    Attributes:
        kl: a mapping of :class:`kl_plugins.KLConfig`'s axes, kept as a KLConfig, and of its ``controller`` and
            ``reference``, which are verl's trainer's business (:mod:`kl_plugins.verl.trainer`).
        combined_loss_mode: the policy loss that receives the combined advantages; filled from ``loss_mode``.
        scheduled: whether the trainer has a schedule to follow; filled from ``kl``.

    Raises:
        ValueError: a key of ``kl`` is unknown or the combination is refused.
    """

    kl: Any = field(default_factory=dict)
    combined_loss_mode: str = ""
    scheduled: bool = False

    def __post_init__(self):
        # verl freezes its fields after construction; these are derived while constructing.
        if not isinstance(self.kl, KLConfig):
            if not isinstance(self.kl, Mapping):
                raise ValueError(f"policy_loss.kl={self.kl!r} must be a mapping such as {{estimator: k2}}")
            config, schedule = read_block(self.kl)
            object.__setattr__(self, "kl", config)
            object.__setattr__(self, "scheduled", not schedule.constant)
        if self.kl.form == "combined" and self.kl.placement == "loss" and self.loss_mode != COMBINED_LOSS:
            object.__setattr__(self, "combined_loss_mode", self.loss_mode)
            object.__setattr__(self, "loss_mode", COMBINED_LOSS)
        from kl_plugins.verl.adapter import guard_worker

        guard_worker()
