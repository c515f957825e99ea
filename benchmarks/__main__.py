"""Run benchmarks and print one table: ``python -m benchmarks [head linear step exact] [--json FILE]``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import time
from pathlib import Path

import torch

from benchmarks import exact, head, linear, measure, step
from benchmarks.measure import release, table

SCRIPTS = {"head": head.run, "linear": linear.run, "step": step.run, "exact": exact.run}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SCRIPTS)}; default: all")
    parser.add_argument("--repeats", type=int, default=15, help="turns after the warm-up (default: 15)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds, not the wall clock's: for a busy machine")
    parser.add_argument("--json", type=Path, help="write the results there too")
    options = parser.parse_args()
    unknown = set(options.names) - set(SCRIPTS)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}: choose from {', '.join(SCRIPTS)}")
    torch.set_num_threads(options.threads)
    if options.cpu_time:
        measure.clock = time.process_time
    machine = {
        "processor": _processor(),
        "threads": options.threads,
        "clock": "CPU" if options.cpu_time else "wall",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kl-plugins": release("kl-plugins"),
    }
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    results = []
    for name in options.names or SCRIPTS:
        results += SCRIPTS[name](options.repeats)
    print(table(results))
    if options.json:
        document = {"machine": machine, "results": [dataclasses.asdict(r) for r in results]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
