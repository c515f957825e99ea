"""What the preflight asks of a live cluster, as a small Ray job with the run's runtime env: ``python -m … REQUEST``.

Being such a job, it also shows that the package arrives on every node. One fresh worker a node answers, and the last
line of the log is the reply: `MARK` and JSON.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MARK = "KL_PLUGINS_PREFLIGHT "
SECONDS = 120.0  # a node's time to unpack the package and import torch
# What `kl-plugins run` imports beside torch; the package brings none of it.
NEEDED = ("typer", "rich", "yaml", "psutil", "matplotlib", "jinja2")


def request(
    framework: str, paths: Iterable[str], modules: Iterable[str], model: str, folders: Iterable[Path]
) -> dict[str, Any]:
    """The question: which version of `framework`; do `paths` and importable `modules` exist; the sizes that the model's
    configuration tells; are `folders`, the first of which is the run's, one and the same on every node.
    """
    return {
        "framework": framework,
        "paths": sorted(paths),
        "modules": sorted(modules),
        "model": model,
        "folders": [str(folder) for folder in folders],
        "mark": f".kl-plugins-{os.getpid()}-{time.time_ns()}",
    }


def look(wanted: dict[str, Any]) -> dict[str, Any]:
    """One node's answer, from a worker process there."""
    from kl_plugins.doctor.probe import probe

    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "version": installed(wanted["framework"]),
        "plugin": probe(False, False),
        "no paths": [path for path in wanted["paths"] if not Path(path).expanduser().exists()],
        "no modules": [name for name in wanted["modules"] if importlib.util.find_spec(name.partition(".")[0]) is None],
        "strange folders": [folder for folder in wanted["folders"] if not (Path(folder) / wanted["mark"]).exists()],
    }


def installed(distribution: str) -> str | None:
    """Its version here, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def sizes(model: str) -> dict[str, int] | None:
    """The numbers in a model's config.json: of a folder, or of a hub's name that has been downloaded here before."""
    file = Path(model).expanduser() / "config.json"
    if not file.exists():
        try:
            from huggingface_hub import try_to_load_from_cache

            file = try_to_load_from_cache(model, "config.json")
        except (ImportError, ValueError):  # no such library, or no name of a hub: nothing can be said
            return None
        if not isinstance(file, str):
            return None
    content = json.loads(Path(file).read_text())
    return {name: value for name, value in content.items() if isinstance(value, int)}


def main() -> None:
    """Ask every node, print the reply."""
    import ray

    wanted = json.loads(sys.argv[1])
    reply: dict[str, Any] = {
        "executable": sys.executable,
        "not importable": [name for name in NEEDED if importlib.util.find_spec(name) is None],
        "sizes": sizes(wanted["model"]),
        "unwritable": {},
        "nodes": {},
    }
    made, marked = [], []
    for folder in map(Path, wanted["folders"]):
        try:
            made += [parent for parent in (folder, *folder.parents) if not parent.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / wanted["mark"]).touch()
            marked.append(folder / wanted["mark"])
        except OSError as error:
            reply["unwritable"][str(folder)] = str(error)
    out = Path(wanted["folders"][0])
    reply["free"] = shutil.disk_usage(next(p for p in (out, *out.parents) if p.exists())).free
    try:
        ray.init(log_to_driver=False)
        reply["free GPUs"] = ray.available_resources().get("GPU", 0)
        nodes = {f"{n['NodeManagerAddress']} ({n['NodeID'][:8]})": n for n in ray.nodes() if n["Alive"]}
        said = _answers(ray, {name: node["NodeID"] for name, node in nodes.items()}, wanted)
        for name, node in nodes.items():
            has = node["Resources"]
            reply["nodes"][name] = {"GPU": has.get("GPU", 0), "CPU": has.get("CPU", 0), **said[name]}
        ray.shutdown()
    finally:
        for mark in marked:
            mark.unlink()
        for folder in made:  # innermost first; what is empty is ours
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
    print(MARK + json.dumps(reply), flush=True)


def _answers(ray: Any, nodes: dict[str, str], wanted: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a new worker on each node, name -> id, says; where there is none, why."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = {}
    for name, node in nodes.items():
        pinned = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=pinned)(look)
        asked[name] = task.remote(wanted)
    said, deadline = {}, time.monotonic() + SECONDS
    for name, answer in asked.items():
        try:
            said[name] = ray.get(answer, timeout=max(1.0, deadline - time.monotonic()))
        except ray.exceptions.RayError as error:
            said[name] = {"failed": _last_line(error)}
    return said


def _last_line(error: BaseException) -> str:
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in str(error).splitlines()]
    return next((line for line in reversed(lines) if line), type(error).__name__)


if __name__ == "__main__":
    main()
