"""What a run asks of the plugin, read where it is needed: from OpenRLHF's arguments, or from one variable.

`kl-openrlhf` puts its flags into ``args.algo.kl.plugin`` and ``args.algo.advantage.std_min/std_max``, which OpenRLHF
carries to every actor. OpenRLHF started without it takes ``KL_PLUGINS_CONFIG``, a JSON object with the keys of KLConfig
and, if wanted, ``std_min`` and ``std_max``: ``{"estimator": "k2", "correction": "clip"}``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kl_plugins.config import KLConfig
from kl_plugins.openrlhf.hook import CONFIG, read_config


@dataclass(frozen=True)
class Settings:
    """``kl`` is None where OpenRLHF's own KL is to stay; ``std_min``, ``std_max`` bound group_norm's std (79)."""

    kl: KLConfig | None = None
    std_min: float | None = None
    std_max: float | None = None

    @property
    def clipped_norm(self) -> bool:
        return self.std_min is not None or self.std_max is not None

    @classmethod
    def of(cls, args: Any) -> Settings:
        """The settings of one run.

        Args:
            args: OpenRLHF's nested namespace.

        Raises:
            ValueError: they contradict themselves, or what OpenRLHF is told to do.
        """
        plugin = getattr(args.algo.kl, "plugin", None)
        mapping = vars(plugin) if plugin is not None else read_config()
        where = "the --kl_* flags" if plugin is not None else CONFIG
        std = {name: getattr(args.algo.advantage, name, None) for name in ("std_min", "std_max")}
        if plugin is None:
            std = {name: mapping.pop(name, value) for name, value in std.items()}
        settings = cls(kl=KLConfig.from_mapping(mapping) if mapping else None, **std)
        settings._check(args, where)
        return settings

    def _check(self, args: Any, where: str) -> None:
        if self.clipped_norm and args.algo.advantage.estimator != "group_norm":
            raise ValueError(
                f"std_min={self.std_min}, std_max={self.std_max} bound the standard deviation of "
                "--algo.advantage.estimator group_norm, and would do nothing with "
                f"{args.algo.advantage.estimator!r}: drop them, or choose group_norm"
            )
        if self.kl is None:
            return
        use_loss = args.algo.kl.use_loss
        if use_loss != (self.kl.placement == "loss"):
            told = "as loss (--algo.kl.use_loss)" if use_loss else "in the reward (no --algo.kl.use_loss)"
            raise ValueError(
                f"OpenRLHF is told to put the KL {told}, {where} say placement={self.kl.placement}: "
                "add or drop --algo.kl.use_loss, or change the placement"
            )
        if args.algo.kl.unbiased_gradient:
            raise ValueError(
                f"--algo.kl.unbiased_gradient replaces the gradient of OpenRLHF's own KL, and {where} replace that KL: "
                "drop it; its like is correction=is with estimator k2"
            )
        if not args.algo.kl.init_coef > 0 and self.kl.estimator != "none":
            raise ValueError(
                f"--algo.kl.init_coef={args.algo.kl.init_coef} starts no reference model, so {where} would regularise "
                "nothing: give a positive coefficient, or drop the KL settings"
            )
