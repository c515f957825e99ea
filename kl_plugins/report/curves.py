"""Figures of the mathematics, from the registry and the lab: `kl-plugins plot KIND -o FILE`.

- ``coefficients``: value and coefficient of every registered estimator (figure 1 of the paper);
- ``tails``: the Taylor trap of k3 (62), and the coefficients far out, the installed frameworks' own k3 included;
- ``values``: KL as it would be reported, in repeated samples; k3's heavy tail (appendix I);
- ``variance``: noise of a gradient against the distance to the reference: sampled, top-k and exact, with and without a
  leave-one-out baseline, on enumerated policies and on the demo's language model; variance of a coefficient (63);
- ``credit``: error and noise of the gradient against the length of the response, by credit.

Data first (`panels`), drawing second (`save`). Equation numbers: https://arxiv.org/abs/2510.01555.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kl_plugins import KLConfig, registered_estimators
from kl_plugins.lab import (
    TabularPolicy,
    estimator_coefficient,
    estimator_value,
    exact_kl,
    gaussian,
    gaussian_chi2,
    gaussian_kl,
    gaussian_moments,
    gaussian_sample_means,
    gradient_report,
    leave_one_out_moments,
    moments,
    taylor_bias,
    token_coefficients,
    topk_gradients,
)
from kl_plugins.report import tiny
from kl_plugins.report.figure import FAINT, GRID, INK

FORMATS = (".png", ".svg", ".pdf")
SEEDS = range(10)
COLUMNS = 3
# Each series has its own dash, so that a figure survives a printer; the colours are told apart by the colour-blind.
LINES = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (7, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (10, 3)))
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a5c00", "#1a1a1a")


@dataclass(frozen=True)
class Series:
    """One line: `x` and `y` of equal length."""

    name: str
    x: list[float]
    y: list[float]


@dataclass(frozen=True)
class Panel:
    """One pair of axes; `level` is a horizontal line (value, name) to hold the series against."""

    title: str
    x: str
    y: str
    series: list[Series]
    y_scale: str = "linear"
    x_scale: str = "linear"
    y_range: tuple[float, float] | None = None
    level: tuple[float, str] | None = None
    marker: str = field(default="")


def panels(kind: str) -> list[Panel]:
    """The data of one figure.

    Raises:
        ValueError: no such figure.
    """
    if kind not in FIGURES:
        raise ValueError(f"no figure {kind!r}; there are {', '.join(FIGURES)}")
    return FIGURES[kind]()


def save(drawn: list[Panel], path: Path) -> None:
    """Draw the panels side by side, `COLUMNS` in a row, into `path`; its suffix (.png, .svg, .pdf) is the format.

    Raises:
        ValueError: another suffix.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path}: a figure is written as {', '.join(FORMATS)}, by the file's suffix")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(len(drawn), COLUMNS)
    rows = math.ceil(len(drawn) / columns)
    figure = Figure(figsize=(5.2 * columns, 3.9 * rows), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for i, panel in enumerate(drawn):
        _draw(figure.add_subplot(rows, columns, i + 1), panel)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def table(drawn: list[Panel], columns: int = 7) -> str:
    """The data as text, at up to `columns` points of each series."""
    lines = []
    for panel in drawn:
        lines += ["", f"{panel.title}: {panel.y}"]
        width = max(len(panel.x), *(len(series.name) for series in panel.series))
        shown = None
        for series in panel.series:
            count = len(series.x)
            picks = [round(i * (count - 1) / (min(columns, count) - 1)) for i in range(min(columns, count))]
            if series.x != shown:
                lines.append(f"{panel.x:<{width}}" + "".join(f" {_number(series.x[i])}" for i in picks))
                shown = series.x
            lines.append(f"{series.name:<{width}}" + "".join(f" {_number(series.y[i])}" for i in picks))
        if panel.level is not None:
            lines.append(f"{panel.level[1]}: {panel.level[0]:.4g}")
    return "\n".join(lines[1:])


def _number(value: float) -> str:
    """Three digits; what rounding left of a zero is 0."""
    return f"{0.0 if abs(value) < 1e-9 else value:>9.3g}"


def _draw(axes: Any, panel: Panel) -> None:
    for i, series in enumerate(panel.series):
        axes.plot(
            series.x, series.y, label=series.name, color=COLOURS[i % len(COLOURS)], linestyle=LINES[i % len(LINES)],
            linewidth=1.8, marker=panel.marker or None, markersize=4, markerfacecolor="white",
        )  # fmt: skip
    if panel.level is not None:
        axes.axhline(panel.level[0], color=FAINT, linewidth=1.2, zorder=1)
        axes.annotate(
            panel.level[1], (0.01, panel.level[0]), xycoords=("axes fraction", "data"), xytext=(0, 3),
            textcoords="offset points", fontsize=8, color=INK,
        )  # fmt: skip
    axes.set_xscale(panel.x_scale)
    axes.set_yscale(panel.y_scale, **({"linthresh": 1} if panel.y_scale == "symlog" else {}))
    if panel.y_range is not None:
        axes.set_ylim(*panel.y_range)
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold", color=INK)
    axes.set_xlabel(panel.x, fontsize=9, color=INK)
    axes.set_ylabel(panel.y, fontsize=9, color=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=INK, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.legend(fontsize=8, frameon=False, handlelength=3.5, labelcolor=INK)


# -- data ------------------------------------------------------------------------------------------------------------


def _two_probabilities(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """logp and ref_logp ``[K]``, the likelier of the two at -1, so that both are probabilities (mse depends on it)."""
    return log_ratio.clamp(max=0) - 1, -log_ratio.clamp(min=0) - 1


def _coefficients() -> list[Panel]:
    log_ratio = torch.linspace(-3, 3, 121, dtype=torch.float64)
    pair, x = _two_probabilities(log_ratio), log_ratio.tolist()

    def series(function: Callable) -> list[Series]:
        return [Series(name, x, function(name, *pair).tolist()) for name in registered_estimators()]

    return [
        Panel("What is reported", "log(π/π_ref)", "value", series(estimator_value), y_range=(-3, 6)),
        Panel(
            "What is descended", "log(π/π_ref)", "coefficient of ∇log π", series(estimator_coefficient),
            y_range=(-6, 3),
        ),
    ]  # fmt: skip


def _tails() -> list[Panel]:
    delta = torch.logspace(-2, 1, 121, dtype=torch.float64)
    x = delta.tolist()
    trap = [
        Series("k2: −log δ", x, (-delta.log()).tolist()),
        Series("k3: 1 − δ", x, (1 - delta).tolist()),
        Series("k2 − k3 (62)", x, taylor_bias(delta).tolist()),
    ]
    far = torch.linspace(-15, 15, 301, dtype=torch.float64)
    pair, x = _two_probabilities(far), far.tolist()
    tails = [Series(name, x, estimator_coefficient(name, *pair).tolist()) for name in ("k2", "k3")]
    tails += [Series(name, x, y) for name, y in _installed_k3(far).items()]
    return [
        Panel("The Taylor trap", "δ = π_ref/π", "coefficient of ∇log π", trap, x_scale="log"),
        Panel("Far from the reference", "log(π/π_ref)", "coefficient of ∇log π", tails, y_scale="symlog"),
    ]


def _installed_k3(log_ratio: Tensor) -> dict[str, list[float]]:
    from kl_plugins.audit import frameworks, judge

    own = {"verl": "low_var_kl", "openrlhf": "k3"}
    present = [framework for framework in own if frameworks.version(framework)]
    return {
        f"{framework}'s {own[framework]}": judge.coefficients(
            frameworks.own_loss(framework, own[framework]), log_ratio
        ).tolist()
        for framework in present
    }


def _values() -> list[Panel]:
    p, repeats, drawn = gaussian(0.0, 1.0), 400, []
    for spread, title in ((0.2, "σ_q = 0.2: k3's variance is infinite"), (0.9, "σ_q = 0.9: finite")):
        q = gaussian(0.1, spread)
        means = gaussian_sample_means(q, p, samples=1000, repeats=repeats)
        share = [100 * (i + 0.5) / repeats for i in range(repeats)]
        series = [Series(name, share, means[name].sort().values.tolist()) for name in ("k1", "k3")]
        truth = (gaussian_kl(q, p), "true KL")
        scale = "log" if spread < 0.5 else "linear"
        drawn.append(Panel(title, "% of 400 repeats", "mean over 1000 samples, nats", series, scale, level=truth))
    return drawn


def _median(values: list[float]) -> float:
    return statistics.median(values)


def _pairs(vocabulary: int, length: int, scale: float = 0.7) -> list[tuple[TabularPolicy, TabularPolicy]]:
    policies = [TabularPolicy.random(vocabulary, length, seed) for seed in SEEDS]
    return [(policy, policy.near(scale, seed + 100)) for policy, seed in zip(policies, SEEDS, strict=True)]


def _variance() -> list[Panel]:
    token = {
        "k2": KLConfig("k2"),
        "k3": KLConfig("k3"),
        "mse": KLConfig("mse"),
    }
    response = {
        "k1 in reward, return": KLConfig("k1", placement="reward", credit="return"),
        "k2, sequence": KLConfig("k2", credit="sequence"),
    }
    x, noise, baselined = [], defaultdict(list), defaultdict(list)
    for scale in (0.1, 0.2, 0.4, 0.8, 1.2, 1.6, 2.4):
        pairs = _pairs(3, 3, scale)
        x.append(_median([float(exact_kl(*pair).detach()) for pair in pairs]))
        for name, config in token.items():
            noise[name].append(_median([gradient_report(config, *pair).noise for pair in pairs]))
        for name, k in {"top 1": 1, "exact": 3}.items():
            noise[name].append(_median([_noise(moments(topk_gradients(*pair, k), pair[0])) for pair in pairs]))
        for name, config in response.items():
            baselined[name].append(_median([gradient_report(config, *pair).noise for pair in pairs]))
            pulls = [token_coefficients(config, *pair) for pair in pairs]
            baselined[name + tiny.BASELINE].append(
                _median(
                    [
                        _noise(leave_one_out_moments(pull, pair[0], tiny.GROUP))
                        for pull, pair in zip(pulls, pairs, strict=True)
                    ]
                )
            )
    spreads = [0.5 + 0.05 * i for i in range(21)]
    policies, reference = [gaussian(0.1, spread) for spread in spreads], gaussian(0.0, 1.0)
    coefficient = {
        "k2": [gaussian_moments(policy, reference)["k1"].variance for policy in policies],  # of log(π/π_ref)
        "k3: χ²(π_ref‖π) (63)": [gaussian_chi2(reference, policy) for policy in policies],
    }
    lab, y = "KL(π‖π_ref), nats, three tokens", "standard deviation / mean, one response"
    drawn = [
        Panel("Per token: enumerated policies", lab, y, _all(noise, x), x_scale="log", marker="o"),
        Panel("Per response: enumerated policies", lab, y, _all(baselined, x), x_scale="log", marker="o"),
        Panel(
            "π = N(0.1, σ), π_ref = N(0, 1)", "σ (k3: infinite up to √½)", "variance of the coefficient",
            _all(coefficient, spreads), y_scale="log",
        ),
    ]  # fmt: skip
    if importlib.util.find_spec("transformers") is None:
        warnings.warn("the language model's panels are left out: they need transformers", stacklevel=2)
        return drawn
    from kl_plugins.launch.run import cache_dir

    x, measured = zip(*[tiny.noise(cache_dir() / "addition", s) for s in (0.05, 0.1, 0.2, 0.4)], strict=True)
    model = "KL(π‖π_ref), nats a token"
    for title, names in {"Per token: a language model": tiny.TOKEN, "Per response: the model": tiny.RESPONSE}.items():
        series = _all({name: [m[name] for m in measured] for name in names}, list(x))
        drawn.append(Panel(title, model, y, series, x_scale="log", marker="o"))
    return drawn


def _all(data: dict[str, list[float]], x: list[float]) -> list[Series]:
    return [Series(name, x, y) for name, y in data.items()]


def _noise(mean_and_variance: tuple[Tensor, float]) -> float:
    mean, variance = mean_and_variance
    return math.sqrt(variance) / float(mean.norm())


def _credit() -> list[Panel]:
    lengths = list(range(1, 7))
    credits = ("token", "return", "sequence")
    error, noise = {c: [] for c in credits}, {c: [] for c in credits}
    for length in lengths:
        pairs = _pairs(3, length)
        for credit in credits:
            reports = [gradient_report(KLConfig("k2", credit=credit), *pair) for pair in pairs]
            error[credit].append(100 * _median([report.relative_error for report in reports]))
            noise[credit].append(_median([report.noise for report in reports]))
    x = [float(length) for length in lengths]

    def series(data: dict[str, list[float]]) -> list[Series]:
        return [Series(f"k2, {credit}", x, y) for credit, y in data.items()]

    return [
        Panel("Error to the response's reverse KL", "tokens T", "% of its gradient", series(error), marker="o"),
        Panel("Noise of one response's gradient", "tokens T", "standard deviation / mean", series(noise), marker="o"),
    ]


FIGURES: dict[str, Callable[[], list[Panel]]] = {
    "coefficients": _coefficients,
    "tails": _tails,
    "values": _values,
    "variance": _variance,
    "credit": _credit,
}
