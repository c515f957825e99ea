"""What changes over a run: beta, by a controller, and the reference, by resets.

A schedule is the configuration, its state a value that `Schedule.advance` maps to the next; the frameworks' trainers
hold it, save it in their checkpoints, and do what it says. KL is always ``kl/sampled``, the on-policy KL of the policy
that sampled the batch, in nats a token, before the update.

- Ziegler et al., https://arxiv.org/abs/1909.08593, section 2.2:
  ``beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon)``, n responses, as both frameworks count;
- log: ``log beta <- log beta + gain clip(log(average KL / target), -1, 1)``, an exponential moving average. The first
  step, and the first after a reset, do not count: policy and reference are one there, and the KL is 0 whatever beta is;
- reference reset: ProRL, https://arxiv.org/abs/2505.24864, section 3.2: the reference becomes the current policy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from kl_plugins.config import KLConfig, nearest

KINDS = ("fixed", "ziegler", "log")
ABOUT_0 = 0.02  # nats a token; bf16 alone makes some 1e-3


@dataclasses.dataclass(frozen=True)
class Controller:
    """How beta moves from the value that the framework's own key gives it.

    Attributes:
        kind: "fixed", "ziegler" or "log".
        target: KL that beta is moved towards, nats a token, > 0.
        horizon: "ziegler": responses over which an error of 20 % moves beta by 20 %, > 0.
        gain: "log": largest change of log beta in a step, > 0.
        decay: "log": what the moving average of the KL keeps of itself each step, in [0, 1).
        beta_min, beta_max: beta stays between them, 0 < beta_min <= beta_max.
    """

    kind: str = "fixed"
    target: float | None = None
    horizon: float | None = None
    gain: float = 0.1
    decay: float = 0.9
    beta_min: float = 1e-4
    beta_max: float = 10.0

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kl.controller.kind={self.kind!r}: {nearest(self.kind, KINDS)}one of {', '.join(KINDS)}")
        for name in ("target", "horizon", "gain", "decay", "beta_min", "beta_max"):
            _refuse_unless_number("controller", name, getattr(self, name))
        needed = {"fixed": (), "ziegler": ("target", "horizon"), "log": ("target",)}[self.kind]
        for name in ("target", "horizon"):
            value = getattr(self, name)
            if name in needed and not (value is not None and value > 0):
                raise ValueError(f"kl.controller.{name}={value} must be > 0 for kl.controller.kind={self.kind}")
            if name not in needed and value is not None:
                raise ValueError(
                    f"kl.controller.{name}={value} would do nothing with kl.controller.kind={self.kind}: "
                    f"drop it, or choose kind {'log or ziegler' if name == 'target' else 'ziegler'}"
                )
        if not self.gain > 0:
            raise ValueError(f"kl.controller.gain={self.gain} must be > 0")
        if not 0 <= self.decay < 1:
            raise ValueError(f"kl.controller.decay={self.decay} must be in [0, 1)")
        if not 0 < self.beta_min <= self.beta_max:
            raise ValueError(
                f"kl.controller.beta_min={self.beta_min}, beta_max={self.beta_max}: must be 0 < beta_min <= beta_max"
            )


@dataclasses.dataclass(frozen=True)
class Reference:
    """When the reference becomes the current policy.

    Attributes:
        reset_every: after every so many steps, >= 1; None: never.
        reset_when_kl_above: after a step whose KL was above this, nats a token, > 0; None: never.
        reset_optimizer: forget the policy's optimiser moments as well, as ProRL does.
    """

    reset_every: int | None = None
    reset_when_kl_above: float | None = None
    reset_optimizer: bool = False

    def __post_init__(self):
        every, above = self.reset_every, self.reset_when_kl_above
        _refuse_unless_number("reference", "reset_every", every)
        _refuse_unless_number("reference", "reset_when_kl_above", above)
        if every is not None and (every != int(every) or every < 1):
            raise ValueError(f"kl.reference.reset_every={every} must be a whole number of steps, at least 1, or null")
        if above is not None and above <= 0:
            raise ValueError(f"kl.reference.reset_when_kl_above={above} must be > 0, or null")
        if not isinstance(self.reset_optimizer, bool):
            raise TypeError(f"kl.reference.reset_optimizer={self.reset_optimizer!r} must be true or false")
        if self.reset_optimizer and not self.resets:
            raise ValueError(
                "kl.reference.reset_optimizer=true without reset_every or reset_when_kl_above would do nothing"
            )

    @property
    def resets(self) -> bool:
        return self.reset_every is not None or self.reset_when_kl_above is not None


@dataclasses.dataclass(frozen=True)
class State:
    """Where a run is.

    Attributes:
        beta: the coefficient of the next update.
        kl_average: moving average of the KL, and the weight it has gathered (1 - decay^n).
        since_reset: steps since the reference was last replaced, or since the start.
        resets: how often it was.
    """

    beta: float
    kl_average: float = 0.0
    kl_weight: float = 0.0
    since_reset: int = 0
    resets: int = 0

    def to_mapping(self) -> dict[str, Any]:
        """Plain numbers by name, for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> State:
        """The inverse of :meth:`to_mapping`.

        Raises:
            ValueError: a name is missing or unknown, or a value is no number.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        wrong = names.symmetric_difference(mapping)
        if wrong or not all(isinstance(v, (int, float)) and math.isfinite(v) for v in mapping.values()):
            raise ValueError(f"the saved state of the KL schedule is {dict(mapping)}: {sorted(names)} are its numbers")
        return cls(**mapping)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The controller of beta and the resets of the reference."""

    controller: Controller = dataclasses.field(default_factory=Controller)
    reference: Reference = dataclasses.field(default_factory=Reference)

    @property
    def constant(self) -> bool:
        """Whether nothing ever changes."""
        return self.controller.kind == "fixed" and not self.reference.resets

    def start(self, beta: float) -> State:
        """The state before the first step.

        Raises:
            ValueError: the controller cannot move this ``beta``, or may not have it.
        """
        c = self.controller
        if c.kind != "fixed" and not c.beta_min <= beta <= c.beta_max:
            raise ValueError(
                f"beta starts at {beta}, outside kl.controller's beta_min={c.beta_min}, beta_max={c.beta_max}: "
                "start it inside, or move the bounds"
            )
        return State(beta)

    def advance(self, state: State, kl: float, responses: int) -> State:
        """The state after a step whose batch of ``responses`` had the mean KL ``kl``, nats a token.

        If ``resets`` has grown, the reference is to become the current policy now, before the next step.

        Raises:
            ValueError: ``kl`` is not finite.
        """
        if not math.isfinite(kl):
            raise ValueError(f"the KL of the step is {kl}: no controller or reset can act on it")
        c, r = self.controller, self.reference
        beta, average, weight = state.beta, state.kl_average, state.kl_weight
        if c.kind == "ziegler":
            beta *= 1 + _clip(kl / c.target - 1, 0.2) * responses / c.horizon
        elif c.kind == "log" and state.since_reset:
            average = c.decay * average + (1 - c.decay) * kl
            weight = c.decay * weight + (1 - c.decay)
            beta *= math.exp(c.gain * _clip(_log(average / weight / c.target), 1))
        if c.kind != "fixed":
            beta = min(max(beta, c.beta_min), c.beta_max)
        since = state.since_reset + 1
        due = r.reset_every is not None and since >= r.reset_every
        if due or (r.reset_when_kl_above is not None and kl > r.reset_when_kl_above):
            return State(beta, resets=state.resets + 1)  # the KL starts from 0 again, and so does its average
        return State(beta, average, weight, since, state.resets)

    def describe(self) -> str:
        """One sentence on what changes; "" where nothing does."""
        c, r = self.controller, self.reference
        parts = []
        if c.kind == "ziegler":
            parts.append(f"beta is moved to a KL of {c.target:g} nats a token (Ziegler, horizon {c.horizon:g})")
        elif c.kind == "log":
            parts.append(f"beta is moved to a KL of {c.target:g} nats a token (log-space, gain {c.gain:g})")
        when = [f"every {r.reset_every} steps"] if r.reset_every is not None else []
        if r.reset_when_kl_above is not None:
            when.append(f"when the KL is above {r.reset_when_kl_above:g}")
        if when:
            optimiser = ", the optimiser with it" if r.reset_optimizer else ""
            parts.append(f"the reference becomes the policy {' and '.join(when)}{optimiser}")
        return "; ".join(parts) and f"{'; '.join(parts)}."


class Run:
    """A schedule under way, held by a framework's trainer.

    It has the face of both frameworks' KL controllers, ``value`` and ``update``; but beta moves once a step, after the
    update, wherever the KL is, so that ``update`` does nothing.
    """

    def __init__(self, schedule: Schedule, beta: float):
        self.schedule, self.state = schedule, schedule.start(beta)

    @property
    def value(self) -> float:
        return self.state.beta

    def update(self, current_kl: float, n_steps: int) -> None:
        """See the class."""

    def metrics(self) -> dict[str, float]:
        """What the step that is about to be made logs."""
        return {"kl/beta": self.state.beta, "kl/reference_resets": float(self.state.resets)}

    def step(self, kl: float, responses: int) -> bool:
        """After a step: move on; True if the reference is to become the current policy, before the next step."""
        before, self.state = self.state, self.schedule.advance(self.state, kl, responses)
        return self.state.resets > before.resets

    def warning(self, kl: float) -> str:
        """A sentence where the KL of the first step, or the first after a reset, is not about 0; else ""."""
        if self.state.since_reset or abs(kl) < ABOUT_0:
            return ""
        return (
            f"policy and reference were one when this step's batch was sampled, and its KL is {kl:.4g} nats a token, "
            "not about 0: they differ in weights, temperature, precision or attention kernels"
        )

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. Where the controller is fixed, beta stays what the configuration says now."""
        state = State.from_mapping(saved)
        fixed = self.schedule.controller.kind == "fixed"
        self.state = dataclasses.replace(state, beta=self.state.beta) if fixed else state


def forget_moments(optimizer: Any) -> None:
    """Set what an Adam-like torch optimiser remembers to 0, in place: its buffers may be views that others hold."""
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.zero_() if hasattr(value, "zero_") else type(value)(0)
    for group in optimizer.param_groups:
        if "step" in group:  # DeepSpeed's and Apex' FusedAdam count here
            group["step"] = 0


def read_block(block: Mapping[str, Any]) -> tuple[KLConfig, Schedule]:
    """A ``kl`` block: KLConfig's axes, and the mappings ``controller`` and ``reference``, which may be absent or None.

    Raises:
        ValueError, TypeError: a key is unknown, a value is refused, or the two contradict each other.
    """
    axes = dict(block)
    schedule = Schedule(**{name: _build(name, cls, axes.pop(name, None)) for name, cls in PARTS.items()})
    config = KLConfig.from_mapping(axes)
    if config.estimator == "none" and schedule.controller.kind != "fixed":
        raise ValueError(
            f"kl.controller.kind={schedule.controller.kind} moves a beta that kl.estimator=none does not use: "
            "choose an estimator, or kind fixed"
        )
    return config, schedule


def describe(config: KLConfig, schedule: Schedule) -> str:
    """What a run descends and what changes over it, in a sentence or two."""
    later = schedule.describe()
    return f"{config.describe()} {later[:1].upper()}{later[1:]}".rstrip()


PARTS = {"controller": Controller, "reference": Reference}


def _build(part: str, cls: type, mapping: Any) -> Any:
    if mapping is None:
        return cls()
    names = [field.name for field in dataclasses.fields(cls)]
    if not isinstance(mapping, Mapping):
        raise ValueError(f"kl.{part}={mapping!r} must be a mapping with {', '.join(names)}")
    for key in mapping:
        if key not in names:
            raise ValueError(f"unknown key kl.{part}.{key}: {nearest(key, names)}known: {', '.join(names)}")
    return cls(**mapping)


def _refuse_unless_number(part: str, name: str, value: Any) -> None:
    if value is None and name in ("target", "horizon", "reset_every", "reset_when_kl_above"):
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"kl.{part}.{name}={value!r} must be a finite number")


def _clip(x: float, bound: float) -> float:
    return min(max(x, -bound), bound)


def _log(x: float) -> float:
    """The logarithm, -inf where a sampled KL came out at 0 or below."""
    return math.log(x) if x > 0 else -math.inf
