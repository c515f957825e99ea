"""How the benchmarks measure: variants in turn in one process, medians; peak memory in a process of its own."""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

clock = time.perf_counter  # `--cpu-time` takes time.process_time
LARGE = 2**23 - 2**10  # floats: as much as glibc's allocator adapts to


@dataclasses.dataclass
class Result:
    """One line of the table. ``ratio`` is to the first line of its group, unless a script says otherwise."""

    operation: str
    name: str
    milliseconds: float
    fastest: float
    ratio: float
    mebibytes: float | None = None
    note: str = ""


def release(package: str) -> str:
    """``name version``, for the table."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package}, not installed"


def in_turn(
    operation: str, variants: dict[str, Callable[[], object]], repeats: int, against: str | None = None
) -> list[Result]:
    """All variants, then all again in the other direction, ``repeats`` times after a warm-up.

    A slow spell of the machine hits them all: the ratio is the median over turns of the ratio within a turn.
    """
    # As in any training process: once a large block was freed, glibc keeps smaller ones instead of giving them back.
    torch.ones(LARGE)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(repeats + 1):
        for name in list(variants)[:: 1 if turn % 2 else -1]:
            start = clock()
            variants[name]()
            if turn:
                seconds[name].append(clock() - start)
    base = seconds[against or next(iter(variants))]
    return [
        Result(
            operation,
            name,
            1e3 * statistics.median(s),
            1e3 * min(s),
            statistics.median(mine / theirs for mine, theirs in zip(s, base, strict=True)),
        )
        for name, s in seconds.items()
    ]


def peak_of(run: Callable[[], object]) -> int:
    """Bytes of resident memory that one call takes at its peak, beyond what the process holds. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def peak_in_a_process(module: str, *arguments: str) -> float:
    """MiB that ``python -m module --peak arguments`` prints."""
    command = [sys.executable, "-m", module, "--peak", *arguments]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]) / 2**20


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: peak memory is measured on Linux")


def table(results: list[Result]) -> str:
    """Markdown."""
    lines = ["| operation | variant | ms | fastest | ratio | MiB | |", "|---|---|---:|---:|---:|---:|---|"]
    for r in results:
        memory = "" if r.mebibytes is None else f"{r.mebibytes:.0f}"
        figures = f"{r.milliseconds:.4g} | {r.fastest:.4g} | {r.ratio:.2f} | {memory}"
        lines.append(f"| {r.operation} | {r.name} | {figures} | {r.note} |")
    return "\n".join(lines)
