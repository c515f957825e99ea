"""The comparison of several runs as one static page: no script, nothing loaded from anywhere, PNG files beside it."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from kl_plugins import __version__
from kl_plugins.report.compare import QUANTITIES, REWARD, Comparison, Quantity, ReportError, Run, compare, load_runs
from kl_plugins.report.overlay import NARROW, WIDE, Curve, draw, key, short, to_png, to_svg

BY_STEP, BY_KL = "step", "kl"


def write_report(paths: Sequence[Path], out: Path, title: str = "") -> tuple[Path, Comparison]:
    """Compares the runs at `paths` in the folder `out`: ``index.html`` and a PNG file for each of its charts.

    A report that is there already is replaced; other files are left alone.

    Raises:
        ReportError: as :func:`~kl_plugins.report.compare.load_runs`, or `out` is no folder.
    """
    comparison = compare(load_runs(paths))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ReportError(f"{out} is not a folder: name another with -o") from error
    for quantity in QUANTITIES:
        for by in (BY_STEP, BY_KL):
            (out / _file_name(quantity, by)).unlink(missing_ok=True)
    page = out / "index.html"
    page.write_text(render(comparison, out, title), encoding="utf-8")
    return page, comparison


def render(comparison: Comparison, out: Path, title: str = "") -> str:
    """The page as text; its charts as PNG files go to the folder `out`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # Names of runs, their settings and all that is made of them come from elsewhere: autoescape is what holds them.
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    runs = comparison.runs
    shown = comparison.quantities
    charts = {q.slug: [_chart(comparison, q, by, out) for by in _views(comparison, q)] for q in shown}
    return templates.get_template("page.html").render(
        title=title or (f"{len(runs)} runs compared" if len(runs) > 1 else runs[0].name),
        version=__version__,
        runs=runs,
        axis=comparison.axis,
        with_kl=comparison.with_kl,
        reward=sorted(charts.pop(REWARD.slug, []), key=lambda chart: chart["by"] != BY_KL),
        keys=[_images(key(i)) for i in range(len(runs))],
        summary=[_summary(comparison, run) for run in runs],
        summary_names=[q.title for q in _summarised(comparison)],
        levels=_levels(comparison),
        groups=[(name, list(members)) for name, members in groupby(shown, lambda q: q.group) if name != REWARD.group],
        charts=charts,
        notes=comparison.notes,
        smoothing=[(run, 2 * run.reach + 1) for run in runs if run.reach],
    )


def _views(comparison: Comparison, quantity: Quantity) -> list[str]:
    aligned = quantity.by_kl and quantity is not comparison.axis and any(r.has(quantity) for r in comparison.with_kl)
    return [BY_STEP, BY_KL] if aligned else [BY_STEP]


def _file_name(quantity: Quantity, by: str) -> str:
    return f"{quantity.slug}_by_{by}.png"


def _chart(comparison: Comparison, quantity: Quantity, by: str, out: Path) -> dict[str, Any]:
    """One chart: its images as data URIs, what it shows in words, its PNG file (written here)."""
    axis = comparison.axis
    x_name = f"{axis.name}, {axis.unit}" if by == BY_KL else "step"
    curves = [_curve(run, axis if by == BY_KL else None, quantity) for run in comparison.runs]
    sizes = (NARROW, WIDE) if quantity is REWARD and by == BY_KL else (NARROW,)
    y_name = f"{quantity.title}, {quantity.unit}"
    figures = [draw(curves, x_name, y_name, size, whole_x=by == BY_STEP) for size in sizes]
    file = _file_name(quantity, by)
    (out / file).write_bytes(to_png(figures[-1]))
    return {
        "by": by,
        "file": file,
        "images": [_images(figure) for figure in figures],
        "caption": f"{quantity.title} against {axis.name if by == BY_KL else 'step'}",
        "alt": f"Line chart of {quantity.name} ({quantity.unit}) against {x_name}. {_in_words(curves)}",
        "width": round(96 * NARROW[0]),
        "height": round(96 * NARROW[1]),
    }


def _curve(run: Run, axis: Quantity | None, quantity: Quantity) -> Curve:
    steps = [float(step) for step in run.steps]
    dots = (run.series(axis) if axis else steps, run.series(quantity))
    smooth = (run.smooth(axis) if axis else steps, run.smooth(quantity))
    return Curve(ord(run.letter) - ord("A"), run.letter, run.name, *smooth, dots=dots if run.reach else None)


def _in_words(curves: Sequence[Curve]) -> str:
    sentences = []
    for curve in curves:
        if curve.points:
            (x0, y0), (x1, y1) = curve.points[0], curve.points[-1]
            ends = f"from {short(y0)} at {short(x0)} to {short(y1)} at {short(x1)}"
            sentences.append(f"{curve.letter}, {curve.name}: {ends}.")
    return " ".join(sentences)


def _images(figure: Any) -> dict[str, str]:
    light, dark = (base64.b64encode(svg.encode()).decode() for svg in to_svg(figure))
    return {"light": f"data:image/svg+xml;base64,{light}", "dark": f"data:image/svg+xml;base64,{dark}"}


def _summarised(comparison: Comparison) -> list[Quantity]:
    wanted = ["reward", comparison.axis.slug if comparison.axis else "", "entropy", "length", "beta", "seconds"]
    return [q for q in QUANTITIES if q.slug in wanted and any(run.has(q) for run in comparison.runs)]


def _summary(comparison: Comparison, run: Run) -> list[str]:
    """First → last fifth of the run, for each quantity of the table."""
    cells = []
    for quantity in _summarised(comparison):
        first, last = (_text(value) for value in run.ends(quantity))
        cells.append(last if first == last or not quantity.by_kl else f"{first} → {last}")
    return cells


def _levels(comparison: Comparison) -> list[dict[str, Any]]:
    """Columns of the table of rewards at the same step and at the same KL; the highest of several is marked."""
    columns = [
        (BY_STEP, f"{step:,}", [comparison.at_step(run, REWARD, step) for run in comparison.runs])
        for step in comparison.step_levels()
    ] + [
        (BY_KL, short(level), [comparison.at_kl(run, REWARD, level) for run in comparison.runs])
        for level in comparison.kl_levels()
    ]
    table = []
    for by, name, values in columns:
        known = [value for value in values if not math.isnan(value)]
        best = _text(max(known)) if len(known) > 1 else ""
        if len(known) >= min(2, len(comparison.runs)):
            table.append({"by": by, "name": name, "cells": [(_text(v), _text(v) == best) for v in values]})
    return table


def _text(value: float) -> str:
    return "–" if math.isnan(value) else short(value)
