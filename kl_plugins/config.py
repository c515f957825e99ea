"""KLConfig: every axis of a KL regulariser, and the rules between them.

Equation numbers: https://arxiv.org/abs/2510.01555.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any

from kl_plugins.estimators import get_estimator

CHOICES = {
    "placement": ("loss", "reward"),
    "form": ("decoupled", "combined"),
    "correction": ("none", "is", "clip"),
    "ratio": ("token", "sequence"),
    "credit": ("token", "return", "sequence"),
}


@dataclasses.dataclass(frozen=True)
class KLConfig:
    """One regulariser, checked on construction.

    Attributes:
        estimator: registered name whose coefficient is descended.
        report: registered name whose value is reported; None: the estimator's own.
        placement: "loss" (coefficient k_n', (71)) or "reward" (the detached value is the penalty, (5)).
        form: "decoupled" (8), a term beside the policy loss, or "combined" (7), inside the advantage.
        correction: off-policy weight of the decoupled term: "none", "is" (69) or "clip" (70).
        clip_low: rho < 1 - clip_low is clipped where the coefficient is positive; in [0, 1).
        clip_high: rho > 1 + clip_high is clipped where it is negative; >= 0.
        ratio: rho of each token, or of the whole response.
        ratio_cap: upper bound of rho; >= 1, and >= 1 + clip_high under "clip".
        credit: which later penalties a token is blamed for; "return" and "sequence" give the exact gradient of the
            response's reverse KL for k2, "token" drops the future.
        coefficient_bound: b > 0 turns c into b tanh(c / b), smooth and sign-preserving; None: unbounded.
        check_finite: non-finite log-probabilities at unmasked positions are an error (one device-to-host sync a call).
        allow_vacuous: accept a combination known not to regularise, such as k1 as loss or k3 in the reward.

    Raises:
        ValueError, TypeError: an axis has an unknown value, or the combination is not what its words say.
    """

    estimator: str = "k2"
    report: str | None = None
    placement: str = "loss"
    form: str = "decoupled"
    correction: str = "none"
    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio: str = "token"
    ratio_cap: float = 10.0
    credit: str = "token"
    coefficient_bound: float | None = None
    check_finite: bool = True
    allow_vacuous: bool = False

    def __post_init__(self):
        self._check_values()
        self._check_combination()

    def _check_values(self) -> None:
        for axis, allowed in CHOICES.items():
            value = getattr(self, axis)
            if value not in allowed:
                raise ValueError(f"kl.{axis}={value!r}: {nearest(value, allowed)}one of {', '.join(allowed)}")
        get_estimator(self.estimator)
        if self.report is not None:
            get_estimator(self.report)
        for axis in ("check_finite", "allow_vacuous"):
            if not isinstance(getattr(self, axis), bool):
                raise TypeError(f"kl.{axis}={getattr(self, axis)!r} must be true or false")
        for axis in ("clip_low", "clip_high", "ratio_cap", "coefficient_bound"):
            value = getattr(self, axis)
            if value is None and axis == "coefficient_bound":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise TypeError(f"kl.{axis}={value!r} must be a finite number")
        if not 0 <= self.clip_low < 1:
            raise ValueError(
                f"kl.clip_low={self.clip_low} must be in [0, 1): the lower edge of the clip is 1 - clip_low"
            )
        if self.clip_high < 0:
            raise ValueError(f"kl.clip_high={self.clip_high} must be >= 0: the upper edge of the clip is 1 + clip_high")
        if self.ratio_cap < 1:
            raise ValueError(f"kl.ratio_cap={self.ratio_cap} must be >= 1, or on-policy tokens would be scaled down")
        if self.coefficient_bound is not None and self.coefficient_bound <= 0:
            raise ValueError(f"kl.coefficient_bound={self.coefficient_bound} must be > 0, or null for no bound")

    def _check_combination(self) -> None:
        estimator = get_estimator(self.estimator)
        opt_in = "set kl.allow_vacuous=true if you want exactly that"
        if self.placement == "loss" and estimator.vacuous and not self.allow_vacuous:
            raise ValueError(
                f"kl.estimator={self.estimator!r} as loss descends {estimator.objective}. Use k2 for reverse KL, "
                f"or kl.placement=reward for {self.estimator}; {opt_in}"
            )
        if self.placement == "reward":
            if estimator.unsafe_in_reward and not self.allow_vacuous:
                raise ValueError(
                    f"kl.estimator={self.estimator!r} in the reward: {estimator.unsafe_in_reward}. "
                    f"Use k1 for reverse KL (13); {opt_in}"
                )
            for axis in ("report", "coefficient_bound"):
                if getattr(self, axis) is not None:
                    raise ValueError(f"kl.{axis} acts on the loss term; with kl.placement=reward it would do nothing")
        if self.placement == "reward" or self.form == "combined":
            where = "kl.placement=reward" if self.placement == "reward" else "kl.form=combined"
            if self.correction == "is" or (self.correction == "clip" and self.ratio == "sequence"):
                raise ValueError(
                    f"{where} puts the KL into the advantage, which the framework's policy loss weights and clips "
                    f"by its own token ratio: kl.correction={self.correction}, kl.ratio={self.ratio} would not happen. "
                    "Use kl.correction=none or clip with kl.ratio=token, or kl.form=decoupled"
                )
        elif self.correction == "clip" and self.ratio_cap < 1 + self.clip_high:
            raise ValueError(
                f"kl.ratio_cap={self.ratio_cap} lies below the clip's upper edge 1 + clip_high={1 + self.clip_high}: "
                "the clip would never act there; raise the cap or lower clip_high"
            )

    def describe(self) -> str:
        """One sentence: what the configuration descends, with its equation number."""
        estimator = get_estimator(self.estimator)
        if self.placement == "reward":
            what = (
                "reverse KL, as KL reward (13), equal to k2 as loss (14) under full-return credit"
                if self.estimator == "k1"
                else f"E[{self.estimator} grad logp] with the detached value as penalty (5), the gradient of no KL"
            )
            return f"{self.estimator} in the reward descends {what}; ratio and clip are the policy loss's own."
        if self.estimator == "none":
            return "none: the KL is monitored, not regularised."
        what = f"{self.estimator} as loss descends {estimator.objective}"
        if self.credit == "token":
            what += ", per token: what a token does to later tokens' KL is not counted"
        else:
            what += f", over whole responses ({self.credit} credit)"
        if self.form == "combined":
            tail = "combined with the advantage (7); ratio and clip are the policy loss's own"
        else:
            level = f"{self.ratio} ratio, capped at {self.ratio_cap:g}"
            tail = {
                "none": "decoupled (8), on-policy form without importance weight",
                "is": f"decoupled (8) with the importance weight (69), {level}",
                "clip": f"decoupled (8), importance-weighted and clipped (70) to [{1 - self.clip_low:g}, "
                f"{1 + self.clip_high:g}], {level}",
            }[self.correction]
        if self.coefficient_bound is not None:
            tail += f"; coefficient bounded by {self.coefficient_bound:g} (tanh)"
        if self.report not in (None, self.estimator):
            tail += f"; the reported value is {self.report}'s"
        return f"{what}; {tail}."

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> KLConfig:
        """The inverse of :meth:`to_mapping`; unknown keys are errors that name the nearest key."""
        names = [f.name for f in dataclasses.fields(cls)]
        for key in mapping:
            if key not in names:
                raise ValueError(f"unknown key kl.{key}: {nearest(key, names)}known: {', '.join(names)}")
        return cls(**{str(k): v for k, v in mapping.items()})

    def to_mapping(self) -> dict[str, Any]:
        """Plain scalars by axis name, for YAML."""
        return dataclasses.asdict(self)


def nearest(value: object, names) -> str:
    """``"did you mean 'x'? "``, or ``""`` if none of the names is near."""
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.4)
    return f"did you mean {near[0]!r}? " if near else ""
