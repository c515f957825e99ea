"""One chart with a curve for each run: told apart by dashes, markers and a name at the end, in colour or without.

Charts are SVG in two palettes that differ in nothing but colours, and PNG.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

DASHES = ("-", (0, (5, 2)), (0, (1.2, 1.6)), (0, (8, 2, 1.5, 2)), (0, (3, 1.2, 1, 1.2, 1, 1.2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "*", "X", "<", "p", ">", "h")
# Ground, ink, faint ink, grid, then the curves. All differ, so that one palette can be put in place of the other.
LIGHT = ("#fffffe", "#1b1f24", "#6a7280", "#e4e7eb", "#0b62a4", "#b8460b", "#0b7a53", "#7d3fb2", "#ad2468", "#6b5d00")
DARK = ("#171b21", "#e6e9ee", "#98a1ae", "#2d343e", "#6cb4f0", "#f59a5c", "#54c996", "#c39bf0", "#f083b4", "#d3c35a")
GROUND, INK, FAINT, GRID, *COLOURS = LIGHT
NARROW, WIDE = (3.35, 2.6), (7.6, 4.2)  # inches: 322 and 730 pixels in a browser
POINTS = 400  # no more are drawn of a curve
LOG = " (log scale)"
FEW = 4  # up to so many runs, the single steps show behind the running means


@dataclass(frozen=True)
class Curve:
    """A run's points ``(xs[i], ys[i])`` in the order of its steps, NaN for gaps.

    `number` chooses dashes, marker and colour; `dots` are the single steps that `xs`, `ys` are means of, if they are.
    """

    number: int
    letter: str
    name: str
    xs: list[float]
    ys: list[float]
    dots: tuple[list[float], list[float]] | None = None

    @cached_property
    def points(self) -> list[tuple[float, float]]:
        """Those that are known, thinned to about `POINTS`, the last kept."""
        known = [(x, y) for x, y in zip(self.xs, self.ys, strict=True) if not math.isnan(x) and not math.isnan(y)]
        stride = max(1, math.ceil(len(known) / POINTS))
        return known[::-1][::stride][::-1]  # counted from the end


def draw(curves: Sequence[Curve], x_name: str, y_name: str, size: tuple[float, float], whole_x: bool = False) -> Any:
    """A matplotlib figure of `curves` of `size` inches; `whole_x` for steps. Curves without a point are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, facecolor=GROUND)
    FigureCanvasAgg(figure)
    curves = [curve for curve in curves if curve.points]
    labels = end_labels(curves, room=9 if size == NARROW else 24)
    left, right, top, bottom = 0.5, 0.32 + 0.075 * max(map(len, labels), default=0), 0.32, 0.46
    width, height = size
    box = (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    axes = figure.add_axes(box, facecolor=GROUND)
    for curve in curves:
        _draw_curve(axes, curve, few=len(curves) <= FEW)
    _finish_axes(axes, curves, x_name, y_name, whole_x)
    _name_ends(axes, curves, labels)
    return figure


def _draw_curve(axes: Any, curve: Curve, few: bool) -> None:
    look, xs, ys = style(curve.number), *zip(*curve.points, strict=True)
    if few and curve.dots and len(curve.xs) <= POINTS:
        axes.plot(*curve.dots, ls="none", marker=".", markersize=2.5, color=look["color"], alpha=0.35, zorder=1)
    every = max(1, len(xs) // (7 if few else 4))
    look |= {} if few else {"linewidth": 1.1, "markersize": 0.85 * look["markersize"]}
    axes.plot(xs, ys, **look, markevery=slice(curve.number % every, None, every), zorder=3)
    axes.plot(xs[-1], ys[-1], **look | {"markerfacecolor": look["color"]}, zorder=4)


def style(number: int) -> dict[str, Any]:
    """How the curve of run `number` is drawn: 60 that differ without colour."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number % len(DASHES)],
        "linewidth": 1.5,
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 5.5 if MARKERS[number % len(MARKERS)] in "*PX" else 4.5,
        "markerfacecolor": GROUND,
        "markeredgewidth": 1.1,
    }


def _finish_axes(axes: Any, curves: Sequence[Curve], x_name: str, y_name: str, whole_x: bool) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    points = [point for curve in curves for point in curve.points]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    for axis, set_scale, values in ((axes.xaxis, axes.set_xscale, xs), (axes.yaxis, axes.set_yscale, ys)):
        steps = whole_x and values is xs
        threshold = None if steps else log_threshold(values)
        if threshold:
            decades = math.log10(max(map(abs, values)) / threshold)
            set_scale("symlog", linthresh=threshold, linscale=max(1, decades / 4))
            axis.get_major_locator().set_params(numticks=5)
        else:
            axis.set_major_locator(MaxNLocator(5 if values is xs else 4, integer=steps))
        axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.set_xlabel(x_name + LOG * (axes.get_xscale() == "symlog"), fontsize=9, color=INK, labelpad=3)
    y_name += LOG * (axes.get_yscale() == "symlog")
    width, height = axes.figure.get_size_inches()
    above = (0.06 / width, 1 - 0.06 / height)
    axes.figure.text(*above, y_name, fontsize=9.5, fontweight="bold", color=INK, va="top", parse_math=False)
    axes.minorticks_off()
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8.5, colors=INK, length=0, pad=4)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.margins(x=0.03, y=0.08)


def log_threshold(values: Sequence[float]) -> float | None:
    """Where a log scale is to begin; None if `values` are near enough to one another for a linear one to show them."""
    sizes = sorted(abs(v) for v in values if v)
    if not sizes or sizes[-1] < 100 * sizes[len(sizes) // 2]:
        return None
    return 10.0 ** math.floor(math.log10(sizes[len(sizes) // 2]))


def short(value: float) -> str:
    """A number in few characters: three digits, thousands without an exponent up to a million."""
    if abs(value) >= 1000 and abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e").replace("-", "\N{MINUS SIGN}")


def _name_ends(axes: Any, curves: Sequence[Curve], labels: Sequence[str]) -> None:
    """Marker and name of each run beside the chart, as near to the height of its curve's end as the others let it."""
    axes.get_xlim(), axes.get_ylim()  # settles the scales, so that data have a place
    where, point = axes.get_window_extent(), axes.figure.dpi / 72
    ends = [axes.transData.transform(curve.points[-1]) for curve in curves]
    heights = spread([y for _, y in ends], 11 * point, where.y0, where.y1)

    def place(*points: tuple[float, float]) -> Any:  # in parts of the axes, which hold at any resolution
        return axes.transAxes.inverted().transform(points).T

    for curve, label, (x, y), height in zip(curves, labels, ends, heights, strict=True):
        beside = where.x1 + 10 * point
        free = {"transform": axes.transAxes, "clip_on": False}
        if len(curves) <= FEW:  # more of these lines would only confuse
            corners = place((x + 4 * point, y), (where.x1, y), (beside - 4 * point, height))
            axes.plot(*corners, color=FAINT, linewidth=0.6, linestyle=(0, (1, 2)), zorder=2, **free)
        look = style(curve.number)
        axes.plot(*place((beside, height)), **look | {"markerfacecolor": look["color"], **free})
        (left,), (middle,) = place((beside + 6 * point, height))
        axes.text(left, middle, label, fontsize=8.5, color=INK, va="center", parse_math=False, transform=axes.transAxes)


def end_labels(curves: Sequence[Curve], room: int) -> list[str]:
    """For each curve its letter and, if that fits into `room` characters for all, what sets its name apart."""
    names = without_common([curve.name for curve in curves])
    fits = room >= 20 or all(2 + len(name) <= room for name in names)
    return [f"{c.letter} {elide(name, room - 2)}" if fits else c.letter for c, name in zip(curves, names, strict=True)]


def without_common(names: Sequence[str]) -> list[str]:
    """`names` without the words that all begin or end with; words are parted by - _ / or a space."""
    words = [re.split(r"(?<=[-_/ ])|(?=[-_/ ])", name) for name in names]
    if len(words) < 2:
        return list(names)
    start = _alike(words)
    end = _alike([own[start:][::-1] for own in words])
    cut = ["".join(own[start : len(own) - end]).strip("-_/ ") for own in words]
    return cut if all(cut) and len(set(cut)) == len(set(names)) else list(names)


def _alike(words: Sequence[Sequence[str]]) -> int:
    """How many words all have alike at their beginning."""
    count = 0
    for same in zip(*words, strict=False):
        if len(set(same)) > 1:
            break
        count += 1
    return count


def spread(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """`heights`, moved as little as it takes for each to be `gap` from the next, between `low` and `high`.

    Where there is no room for that, the gaps get smaller.
    """
    if len(heights) > 1:
        gap = min(gap, (high - low) / (len(heights) - 1))
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed: list[float] = []
    for i in order:
        placed.append(max(heights[i], placed[-1] + gap if placed else low))
    ceiling = high
    for k in range(len(placed) - 1, -1, -1):
        placed[k] = min(placed[k], ceiling)
        ceiling = placed[k] - gap
    result = [0.0] * len(heights)
    for i, height in zip(order, placed, strict=True):
        result[i] = height
    return result


def elide(text: str, room: int) -> str:
    """`text` in at most `room` characters, its end kept rather than its middle: names of runs often begin alike."""
    if len(text) <= room:
        return text
    head = max(2, room // 2 - 1)
    return text[:head].rstrip() + "…" + text[len(text) - (room - head - 1) :]


def to_png(figure: Any) -> bytes:
    """`figure` in the light palette, as PNG, two pixels to a browser's one."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=192)
    return buffer.getvalue()


def to_svg(figure: Any) -> tuple[str, str]:
    """`figure` as SVG in the light and in the dark palette; the same figure gives the same text every time."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "kl_plugins"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    light = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", buffer.getvalue())
    dark = light
    for ours, other in zip(LIGHT, DARK, strict=True):
        dark = dark.replace(ours, other)
    return light, dark


def key(number: int) -> Any:
    """A small figure with a piece of run `number`'s curve, for tables."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.5, 0.17), facecolor=GROUND)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), facecolor=GROUND)
    axes.plot([0, 1, 2], [0, 0, 0], **style(number), markevery=[1])
    axes.set_xlim(0.1, 1.9)
    axes.set_axis_off()
    return figure
