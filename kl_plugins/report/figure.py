"""The figure of one run: reward, KL, and the size of the KL gradient over the steps."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PANELS = (
    ("reward", "reward", "mean over the responses"),
    ("kl/sampled", "KL to the reference", "nats a token"),
    ("kl/coef_mean", "KL gradient", "mean |coefficient|"),
)
INK, FAINT, GRID = "#1a1a1a", "#8c8c8c", "#e3e3e3"


def save_figure(rows: list[Mapping[str, Any]], path: Path, title: str = "") -> None:
    """Draw `rows` (one a step, as in ``metrics.jsonl``) into the PNG `path`.

    Each panel has one quantity, named above it with its first and last value: nothing depends on colour. Runs of more
    than 40 steps get a running mean (solid) over the single steps (faint). A quantity that no row has is left out.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError(f"no step to draw in {path.name}")
    # The object interface, not pyplot: no display is looked for and no global state is left.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = [p for p in PANELS if any(row.get(p[0]) is not None for row in rows)]
    figure = Figure(figsize=(7.2, 1.0 + 1.9 * max(len(panels), 1)), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(textwrap.fill(title, 92), x=0.01, ha="left", fontsize=9, color=INK)
    all_axes = figure.subplots(max(len(panels), 1), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (key, name, unit) in zip(all_axes, panels, strict=False):
        steps = [row["step"] for row in rows]
        values = [math.nan if row.get(key) is None else row[key] for row in rows]
        _draw(axes, steps, values)
        axes.set_title(name, loc="left", fontsize=10, fontweight="bold", color=INK, pad=4)
        axes.set_ylabel(unit, fontsize=8, color=INK)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8, colors=INK, length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)
        axes.margins(x=0.02, y=0.15)
    all_axes[-1].set_xlabel("step", fontsize=9, color=INK)
    all_axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path)


def _draw(axes: Any, steps: list[int], values: list[float]) -> None:
    drawn = values
    if len(steps) <= 40:
        axes.plot(steps, values, color=INK, linewidth=1.6, marker="o", markersize=3.5, markerfacecolor="white")
    else:
        axes.plot(steps, values, color=FAINT, linewidth=0.7)
        drawn = running_mean(values, max(2, len(values) // 40))
        axes.plot(steps, drawn, color=INK, linewidth=2.0)
    known = [value for value in drawn if not math.isnan(value)]
    axes.set_title(f"{known[0]:.3g} → {known[-1]:.3g}", loc="right", fontsize=9, color=INK, pad=4)


def running_mean(values: list[float], reach: int) -> list[float]:
    """Mean over the numbers among each value and its `reach` neighbours on either side; NaN where there is none."""
    means = []
    for i in range(len(values)):
        known = [v for v in values[max(0, i - reach) : i + reach + 1] if not math.isnan(v)]
        means.append(sum(known) / len(known) if known else math.nan)
    return means
