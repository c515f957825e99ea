"""What a run asks of the plugin, read where it is needed: from OpenRLHF's arguments, or from one variable.

`kl-openrlhf` puts its flags into ``args.algo.kl.plugin`` and ``args.algo.advantage.std_min/std_max``, which OpenRLHF
carries to every actor. OpenRLHF started without it takes ``KL_PLUGINS_CONFIG``, a JSON object with the keys of KLConfig
(``controller`` and ``reference`` among them) and, if wanted, ``std_min`` and ``std_max``:
``{"estimator": "k2", "correction": "clip"}``.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kl_plugins.config import KLConfig
from kl_plugins.openrlhf.hook import CONFIG, read_config
from kl_plugins.schedule import Schedule, read_block


def version() -> str:
    """The installed OpenRLHF's version."""
    return importlib.metadata.version("openrlhf")


def as_mapping(namespace: Any) -> dict[str, Any]:
    """OpenRLHF's nested namespace as nested dictionaries."""
    return {k: as_mapping(v) if isinstance(v, SimpleNamespace) else v for k, v in vars(namespace).items()}


@dataclass(frozen=True)
class Settings:
    """``kl`` is None where OpenRLHF's own KL is to stay; ``std_min``, ``std_max`` bound group_norm's std (79)."""

    kl: KLConfig | None = None
    schedule: Schedule = field(default_factory=Schedule)
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
        mapping = as_mapping(plugin) if plugin is not None else read_config()
        where = "the --kl_* flags" if plugin is not None else CONFIG
        std = {name: getattr(args.algo.advantage, name, None) for name in ("std_min", "std_max")}
        if plugin is None:
            std = {name: mapping.pop(name, value) for name, value in std.items()}
        settings = cls(*read_block(mapping), **std) if mapping else cls(**std)
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
        self._check_schedule(args, where)

    def _check_schedule(self, args: Any, where: str) -> None:
        native = args.algo.kl
        if native.target is not None and not (native.target > 0 and native.horizon > 0):
            raise ValueError(
                f"--algo.kl.target={native.target}, --algo.kl.horizon={native.horizon}: OpenRLHF's adaptive controller "
                "divides by both, and takes a target of 0 for none: give positive ones, or leave the target out"
            )
        if self.schedule.constant:
            return
        if not native.init_coef > 0:
            raise ValueError(
                f"--algo.kl.init_coef={native.init_coef} starts no reference model, so the controller and reference "
                f"resets of {where} would do nothing: give a positive coefficient, or drop them"
            )
        self.schedule.start(native.init_coef)
        if self.schedule.controller.kind != "fixed" and native.target is not None:
            raise ValueError(
                f"--algo.kl.target={native.target} and kl.controller.kind={self.schedule.controller.kind} are two "
                "controllers of one coefficient: drop one"
            )
        if not self.schedule.reference.resets:
            return
        for flag, value, least in (
            ("ds.lora.rank", args.ds.lora.rank, 0),
            ("ds.tensor_parallel_size", args.ds.tensor_parallel_size, 1),
            ("ds.load_in_4bit", args.ds.load_in_4bit, 0),
        ):
            if value > least:
                raise ValueError(
                    f"kl.reference resets copy the policy's weights into the reference one to one, which --{flag} "
                    f"{value} rules out: drop one of the two"
                )
