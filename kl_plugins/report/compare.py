"""Several runs side by side: reads their metrics, and aligns them by step and by KL.

A run's name and everything in its files may be someone else's: nothing of it is trusted, numbers that are none become
gaps, and each finding about a run is a note for the reader. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_DOWN, Decimal
from pathlib import Path
from typing import Any

import yaml

from kl_plugins.report.events import EVENTS, event_files, read_events
from kl_plugins.report.figure import running_mean

MOST_RUNS = 26
LARGEST = 1e30  # beyond it a number is a broken one, and charts cannot be scaled to it


class ReportError(ValueError):
    """Runs that cannot be reported: one line a run, with its folder and what was expected there."""


@dataclass(frozen=True)
class Quantity:
    """Something that runs log at each step.

    Attributes:
        slug: its name in file names and anchors.
        name: its name for people.
        unit: what one is, and over what it is a mean.
        keys: the names it has in rows, in order of preference: ours, verl's, OpenRLHF's.
        about: how to read it, in a sentence.
        group: the part of the page it stands in.
        by_kl: whether it is worth showing against KL too.
    """

    slug: str
    name: str
    unit: str
    keys: tuple[str, ...]
    about: str
    group: str
    by_kl: bool = True

    @property
    def title(self) -> str:
        """Its name as it begins a line: k1 and β stay as they are."""
        return self.name if len(self.name) <= 2 else self.name[0].upper() + self.name[1:]


KL, PULL, POLICY, COURSE = "KL to the reference", "The KL gradient", "The policy", "Control and time"
BETA_IN_CONFIG = "config.yaml: beta"

REWARD = Quantity("reward", "reward", "mean of the responses", ("reward",), "As the framework scores it.", "Reward")
SAMPLED = Quantity(
    "kl_sampled",
    "KL of the sampling policy",
    "nats a token",
    ("kl/sampled",),
    "k1 of the policy that sampled, on its own samples: unbiased, 0 at step 1 if policy and reference are the same.",
    KL,
)
K1 = Quantity("k1", "k1", "nats a token", ("kl/k1", "logprobs_diff"), "log π/π_ref of the policy being updated.", KL)
K2 = Quantity("k2", "k2", "nats² a token", ("kl/k2",), "½ (log π/π_ref)²: as loss, it descends reverse KL.", KL)
K3 = Quantity(
    "k3", "k3", "nats a token", ("kl/k3",), "π_ref/π − 1 + log π/π_ref: heavy where π falls far below π_ref.", KL
)
LOGGED = Quantity(
    "kl", "KL as logged", "nats a token", ("kl",), "By the estimator of the run's own loss or reward penalty.", KL
)
QUANTITIES = (
    REWARD,
    SAMPLED,
    K1,
    K2,
    K3,
    LOGGED,
    Quantity("coef_mean", "coefficient, mean", "|C| a token", ("kl/coef_mean",), "How hard KL pulls, before β.", PULL),
    Quantity("coef_max", "coefficient, largest", "|C|", ("kl/coef_max",), "The one token pulled hardest.", PULL),
    Quantity("tail_up", "upper tail", "share of tokens", ("kl/tail_up",), "Tokens with π/π_ref above e².", PULL),
    Quantity("tail_down", "lower tail", "share of tokens", ("kl/tail_down",), "Tokens with π/π_ref below e⁻².", PULL),
    Quantity(
        "clip_removed",
        "KL gradient removed by clipping",
        "share of Σ|wC|",
        ("kl/clip_removed",),
        "0 without correction: clip.",
        PULL,
    ),
    Quantity(
        "clip_share",
        "policy loss clipped",
        "share of tokens",
        ("actor/pg_clipfrac", "ppo_clip_ratio"),
        "PPO's own clip.",
        POLICY,
    ),
    Quantity(
        "entropy",
        "entropy",
        "nats a token",
        ("actor/entropy", "actor/entropy_loss", "entropy_loss"),
        "How undecided the policy is. OpenRLHF logs it if actor.entropy_coef is given, be it 0.",
        POLICY,
    ),
    Quantity(
        "length",
        "response length",
        "tokens, mean",
        ("response_length/mean", "rollout/response_length_mean", "response_length"),
        "A reward that grows with the length alone shows here.",
        POLICY,
    ),
    Quantity(
        "beta",
        "β",
        "weight of the KL term",
        ("kl/beta", "actor/kl_coef", "actor/reward_kl_penalty_coeff", BETA_IN_CONFIG),
        "Moves only under a controller.",
        COURSE,
    ),
    Quantity(
        "seconds",
        "seconds a step",
        "wall-clock",
        ("seconds", "timing_s/step", "timing/step_total"),
        "The whole step: sampling, scoring, update.",
        COURSE,
        by_kl=False,
    ),
)
AXES = (SAMPLED, K3, K1, LOGGED)  # what KL is measured by, the first that all runs have


@dataclass
class Run:
    """One run: ``rows`` are its training steps in order, as in ``metrics.jsonl``, one for each of ``steps``."""

    path: Path
    steps: list[int]
    rows: list[Mapping[str, Any]]
    setting: str = ""
    name: str = ""
    letter: str = ""
    notes: list[str] = field(default_factory=list)
    _series: dict[Quantity, list[float]] = field(default_factory=dict, repr=False)
    _smooth: dict[Quantity, list[float]] = field(default_factory=dict, repr=False)

    @property
    def reach(self) -> int:
        """Neighbours on either side that a running mean takes in, at most 25; 0 (no smoothing) below 10 steps."""
        return min(25, max(1, len(self.steps) // 40)) if len(self.steps) >= 10 else 0

    def series(self, quantity: Quantity) -> list[float]:
        """Its value at each step, NaN where there is no finite one."""
        if quantity not in self._series:
            self._series[quantity] = [_value(row, quantity.keys) for row in self.rows]
        return self._series[quantity]

    def smooth(self, quantity: Quantity) -> list[float]:
        """`series` as running means over ``2 reach + 1`` steps; gaps that are narrower close."""
        if quantity not in self._smooth:
            self._smooth[quantity] = running_mean(self.series(quantity), self.reach)
        return self._smooth[quantity]

    def has(self, quantity: Quantity) -> bool:
        return not all(map(math.isnan, self.series(quantity)))

    def ends(self, quantity: Quantity) -> tuple[float, float]:
        """Means over the first and the last fifth of the steps, NaN where no step of the fifth has a value."""
        values, span = self.series(quantity), max(1, len(self.steps) // 5)
        return _mean(values[:span]), _mean(values[-span:])


def _value(row: Mapping[str, Any], keys: Iterable[str]) -> float:
    return next((v for v in (_number(row.get(key)) for key in keys) if not math.isnan(v)), math.nan)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < LARGEST:
        return math.nan
    return float(value)


def _mean(values: list[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return sum(known) / len(known) if known else math.nan


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs at `paths`, lettered A, B, … and named by as much of their path as tells them apart.

    A path is a run's folder (``metrics.jsonl`` in it, else TensorBoard's event files) or such a file.

    Raises:
        ReportError: no path, too many, one twice, or some that are no runs: all of these at once.
    """
    if not paths:
        raise ReportError("no run given: name at least one run folder")
    if len(paths) > MOST_RUNS:
        raise ReportError(f"{len(paths)} runs in one report: nobody can tell more than {MOST_RUNS} apart; give fewer")
    runs, problems = [], []
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            problems.append(f"{path} is given twice: name each run once")
            continue
        seen.add(path.resolve())
        try:
            runs.append(_load(path))
        except ReportError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror or error}")
    if problems:
        raise ReportError("\n".join(problems))
    for i, (run, name) in enumerate(zip(runs, distinct_names([run.path for run in runs]), strict=True)):
        run.letter, run.name = chr(ord("A") + i), name
    return runs


def _load(path: Path) -> Run:
    if not path.exists():
        raise ReportError(f"{path} does not exist: expected a run folder with metrics.jsonl")
    lines = path / "metrics.jsonl" if path.is_dir() else path
    events = [] if path.is_dir() and lines.is_file() else event_files(path)
    notes: list[str] = []
    if lines.is_file() and not events:
        rows, source = _read_lines(lines, notes), "metrics.jsonl"
    elif events:
        folders = sorted({file.parent for file in events})
        if len(folders) > 1:
            some = ", ".join(str(folder) for folder in folders[:3]) + (", …" if len(folders) > 3 else "")
            raise ReportError(f"{path} holds event files of {len(folders)} runs: name each by its own folder: {some}")
        try:
            rows, source = read_events(path if path.is_file() else folders[0]), "TensorBoard"
        except (ImportError, ValueError) as error:
            raise ReportError(str(error)) from error
    else:
        raise ReportError(
            f"{path} holds no run: expected metrics.jsonl, as kl-plugins run writes it, or TensorBoard's {EVENTS} files"
        )
    steps = {row["step"]: row for row in rows if any(row.get(k) is not None for k in ("reward", "kl", "pg_loss"))}
    if len(steps) < len(rows):
        notes.append(f"{_count(len(rows) - len(steps), 'row')} that are no training step, or of a step written again")
    if not steps:
        raise ReportError(f"{path}: no training step in {source}; expected rows with step and reward, kl or pg_loss")
    if source == "TensorBoard":
        notes.append("read from TensorBoard's event files")
    config = _read_config(lines.parent / "config.yaml", notes)
    order = sorted(steps)
    kept = [_monitored(steps[step]) for step in order]
    beta = _constant_beta(config)
    if beta is not None:
        kept = [{**row, BETA_IN_CONFIG: beta} for row in kept]
    return Run(path.parent if path.is_file() else path, order, kept, setting_of(config), notes=notes)


def _read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    rows, bad = [], []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.append({**row, "step": _step(row["step"])})
        except (ValueError, TypeError, KeyError, RecursionError):
            bad.append(number)
    if bad == [len(lines)]:  # the file does not end in a line feed: it was cut, or is being written
        notes.append("the last line is cut and left out")
    elif bad:
        notes.append(f"left out as no step: line {', '.join(map(str, bad[:5]))}{', …' if len(bad) > 5 else ''}")
    return rows


def _step(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise ValueError(f"step {value!r} is no whole number")
    if not 0 <= value < 1e12:
        raise ValueError(f"step {value!r} is out of range")
    return int(value)


def _monitored(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """OpenRLHF logs a KL of exactly 0 where beta is 0, since it has no reference then: that is no measurement."""
    if row.get("kl") == 0 and row.get("logprobs_diff") == 0 and "kl/k1" not in row:
        return {**row, "kl": None, "logprobs_diff": None}
    return row


def _read_config(path: Path, notes: list[str]) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError):
        notes.append("config.yaml is no readable YAML: the setting is left out")
        return {}
    return config if isinstance(config, Mapping) else {}


def _pick(node: Any, *path: str) -> Any:
    for key in path:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def setting_of(config: Mapping[str, Any]) -> str:
    """The kl block of a run's ``config.yaml`` in a few words, as in "k2 in the loss, clip, return"; "" without one."""
    block = _pick(config, "kl")
    estimator = _pick(block, "estimator")
    if not isinstance(estimator, str):
        return ""
    place = "advantage" if _pick(block, "form") == "combined" else _pick(block, "placement") or "loss"
    plain = {"correction": "none", "credit": "token", "ratio": "token"}
    others = [_pick(block, axis) for axis in plain if _pick(block, axis) not in (None, plain[axis])]
    return ", ".join([f"{estimator} in the {place}", *(str(other) for other in others)])


def _constant_beta(config: Mapping[str, Any]) -> float | None:
    """OpenRLHF logs no beta: it is init_coef throughout, unless its controller has a target."""
    block = _pick(config, "algo", "kl")
    value = _number(_pick(block, "init_coef"))
    return None if math.isnan(value) or _pick(block, "target") else value


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """For each path the last of its parts, or as many as it takes to differ from the others; safe to print."""
    parts = [path.resolve().parts for path in paths]
    names = []
    for own in parts:
        others = [other for other in parts if other != own]
        depth = 1
        while depth < len(own) and any(other[-depth:] == own[-depth:] for other in others):
            depth += 1
        name = "/".join(part.strip("/") for part in own[-depth:])
        names.append("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name) or "/")
    return names


@dataclass(frozen=True)
class Comparison:
    """Runs and the KL that they are aligned by: `axis` is None where no run has any."""

    runs: list[Run]
    axis: Quantity | None
    notes: list[str]

    @property
    def with_kl(self) -> list[Run]:
        return [run for run in self.runs if self.axis and run.has(self.axis)]

    @property
    def quantities(self) -> list[Quantity]:
        """Those that at least one run has; KL as logged only where the sampled KL does not stand for it."""
        sampled = all(run.has(SAMPLED) for run in self.runs)
        return [q for q in QUANTITIES if any(map_has(self.runs, q)) and not (q is LOGGED and sampled)]

    def step_levels(self) -> list[int]:
        """Steps to compare at: a quarter, half and all of the way to the last step that half of the runs have."""
        first, last = min(run.steps[0] for run in self.runs), _half_have([run.steps[-1] for run in self.runs])
        return sorted({first + round((last - first) * part) for part in (0.25, 0.5, 1)}) if first <= last else []

    def kl_levels(self) -> list[float]:
        """KLs to compare at, to two digits: a quarter, half and all of what half of the runs that have KL reach."""
        reached = [max(kl for kl in run.smooth(self.axis) if not math.isnan(kl)) for run in self.with_kl]
        last = _half_have(reached) if reached else 0
        return sorted({_two_digits(last * part) for part in (0.25, 0.5, 1)}) if last > 0 else []

    def at_step(self, run: Run, quantity: Quantity, step: int) -> float:
        """`quantity` of `run`, smoothed, at `step`, between two logged steps in proportion; NaN outside of the run."""
        return _crossing([float(s) for s in run.steps], run.smooth(quantity), step)

    def at_kl(self, run: Run, quantity: Quantity, level: float) -> float:
        """`quantity` of `run`, smoothed, when its smoothed KL gets to `level`; NaN if it starts above or never does."""
        return _crossing(run.smooth(self.axis), run.smooth(quantity), level) if self.axis else math.nan


def _half_have(ends: list[Any]) -> Any:
    """The largest number that at least half of `ends`, and two if there are two, get to."""
    return sorted(ends, reverse=True)[min(len(ends), max(2, (len(ends) + 1) // 2)) - 1]


def map_has(runs: Iterable[Run], quantity: Quantity) -> list[bool]:
    return [run.has(quantity) for run in runs]


def _crossing(xs: list[float], ys: list[float], level: float) -> float:
    """y where x first comes from below (or equal) to `level`, linear between points; NaN if it never does."""
    known = [(x, y) for x, y in zip(xs, ys, strict=True) if not math.isnan(x) and not math.isnan(y)]
    before = None
    for x, y in known:
        if x == level:
            return y
        if x > level:
            if before is None:
                return math.nan
            return before[1] + (y - before[1]) * (level - before[0]) / (x - before[0])
        before = x, y
    return math.nan


def _two_digits(x: float) -> float:
    """`x` > 0 rounded down to two digits, so that what reaches `x` reaches it too."""
    exact = Decimal(repr(x))
    return float(exact.quantize(Decimal((0, (1,), exact.adjusted() - 1)), rounding=ROUND_DOWN))


def compare(runs: list[Run]) -> Comparison:
    """Chooses the KL that `runs` are aligned by, and says what a reader has to know before comparing them."""
    axis = next((q for q in AXES if all(map_has(runs, q))), None)
    notes = []
    if axis is None and any(run.has(q) for run in runs for q in AXES):
        axis = next(q for q in AXES if sum(map_has(runs, q)) == max(sum(map_has(runs, a)) for a in AXES))
    if axis is None:
        notes.append("No run has a KL, so there is nothing to align by but the step.")
    elif axis is LOGGED and len(runs) > 1:
        notes.append(
            "The runs share no estimator of KL: the KL axis is what each logged, and these may be different estimators."
        )
    elif axis in (K1, K3) and len(runs) > 1:
        notes.append(
            f"Not every run has kl/sampled: the KL axis is {axis.name}, of the policy as it is updated, on samples of "
            "the one before."
        )
    for run in runs:
        if axis and not run.has(axis):
            run.notes.append(f"no {axis.name} ({' or '.join(axis.keys)}): not in what is aligned by KL")
        for quantity in QUANTITIES:
            gaps = sum(map(math.isnan, run.series(quantity)))
            if 0 < gaps < len(run.steps):
                run.notes.append(f"{quantity.name}: no finite number at {gaps} of {_count(len(run.steps), 'step')}")
        missing = [q.name for q in QUANTITIES if q not in AXES and not run.has(q) and any(map_has(runs, q))]
        if missing:
            run.notes.append(f"has no {', '.join(missing)}")
    return Comparison(runs, axis, notes)


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
