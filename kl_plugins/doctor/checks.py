"""What is installed here, and whether it fits. Every finding that is not good says what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import kl_plugins
from kl_plugins import drift

# Of the probe's fixed input: w * log_ratio by hand, exp(.5) * .2 and exp(-.1) * .4.
GRADIENT = (0.3297443, 0.3619350)


@dataclass(frozen=True)
class Finding:
    """One thing looked at: ``level`` is "ok", "warn" or "fail"; ``remedy`` is empty when all is well."""

    level: str
    text: str
    remedy: str = ""


def ok(text: str) -> Finding:
    return Finding("ok", text)


def here() -> list[Finding]:
    """Everything about this process's environment; imports the frameworks that are installed (some 10 s each)."""
    return [*copies(), *entry_point(), *estimators(), *framework("verl"), *framework("openrlhf")]


def copies() -> Iterator[Finding]:
    """One distribution, whose files are there, and which is what ``import kl_plugins`` finds."""
    found = [d for d in importlib.metadata.distributions() if _normal(d.metadata["Name"]) == "kl-plugins"]
    # The same folder can be reached twice through sys.path; that is one copy.
    folders = {str(Path(d.locate_file("")).resolve() / str(getattr(d, "_path", d.version))): d for d in found}
    path = Path(kl_plugins.__path__[0])
    yield ok(f"kl_plugins {kl_plugins.__version__} at {path}")
    if not folders:
        yield Finding(
            "fail",
            "kl_plugins is importable but not installed: its entry points are invisible, so verl will not load it",
            "pip install it, or ship its wheel (not its folder) in Ray's runtime env; else set "
            "VERL_USE_EXTERNAL_MODULES=kl_plugins.verl in every process",
        )
    for dist in folders.values():
        where = getattr(dist, "_path", dist.locate_file(""))
        gone = [f for f in dist.files or [] if f.suffix == ".py" and not Path(dist.locate_file(f)).exists()]
        if dist.files is None or gone:
            yield Finding(
                "fail",
                f"stale metadata: {where} describes kl-plugins {dist.version}, but "
                + (f"{len(gone)} of its files are gone" if gone else "it lists no files"),
                f"remove the folder {where}, then pip install kl-plugins again",
            )
        elif dist.version != kl_plugins.__version__:
            yield Finding(
                "fail",
                f"{where} says kl-plugins {dist.version}, the imported one is {kl_plugins.__version__} at {path}",
                "pip uninstall kl-plugins until nothing is left, then install one",
            )
    if len(folders) > 1:
        yield Finding(
            "fail",
            "kl-plugins is installed more than once: " + ", ".join(sorted(folders)),
            "pip uninstall kl-plugins until nothing is left, then install one",
        )


def entry_point() -> Iterator[Finding]:
    """The entry point through which verl finds the plugin, and what may hide it."""
    found = {e.value for e in importlib.metadata.entry_points(group="verl.plugins") if e.value.startswith("kl_plugins")}
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    modules = os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
    named = "kl_plugins.verl" in modules
    if found != {"kl_plugins.verl"}:
        yield Finding(
            "fail",
            f"entry points of group verl.plugins: {sorted(found) or 'none'}, expected kl_plugins.verl",
            "reinstall kl-plugins; an old metadata folder can hide the entry point",
        )
    elif policy != "auto" and "kl_plugins" not in policy.split(",") and not named:
        yield Finding(
            "fail",
            f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading kl_plugins",
            "unset it, add kl_plugins to it, or set VERL_USE_EXTERNAL_MODULES=kl_plugins.verl",
        )
    else:
        yield ok("verl finds the plugin: entry point verl.plugins" + (", VERL_USE_EXTERNAL_MODULES" if named else ""))


def estimators() -> Iterator[Finding]:
    """The registry, third-party entry points included."""
    try:
        yield ok(f"estimators: {', '.join(kl_plugins.registered_estimators())}")
    except ImportError as error:
        yield Finding("fail", str(error), "mend or uninstall that package")


def framework(name: str) -> Iterator[Finding]:
    """Version, signatures, bodies and probes of the functions that the adapter wraps."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        yield Finding("ok", f"{name}: not installed here")
        return
    try:
        if name == "verl":
            import verl

            from kl_plugins.verl import adapter

            drift.check("verl", verl.__version__, adapter.WRAPPED)
        else:
            if os.environ.get("KL_PLUGINS_CPU") == "1":
                from kl_plugins.cpu import openrlhf as cpu

                cpu.install()
            from kl_plugins.openrlhf import adapter

            adapter.check_all()
    except drift.DriftError as error:
        yield Finding("fail", str(error), f"install a version of {name} that kl_plugins was tested against")
    except ImportError as error:
        yield Finding(
            "fail",
            f"{name} {version} does not import: {error}",
            "install what is missing (on a machine without a GPU: KL_PLUGINS_CPU=1 puts stand-ins in place)",
        )
    else:
        yield ok(f"{name} {version}: every wrapped function is the one kl_plugins was tested against")


def judge_node(node: str, report: dict) -> Iterator[Finding]:
    """What a node's probe said, compared with this process."""
    if "version" not in report:
        yield Finding(
            "fail",
            f"node {node}: kl_plugins does not load ({report['error']}) in Python {report['python']}",
            "pip install the same kl-plugins on that node, or ship its wheel: "
            'runtime_env={"py_modules": ["kl_plugins-….whl"]}',
        )
        return
    if report["version"] != kl_plugins.__version__:
        yield Finding(
            "fail",
            f"node {node}: kl_plugins {report['version']} at {report['path']}, here {kl_plugins.__version__}",
            "install one version everywhere",
        )
    if "error" in report:
        yield Finding("fail", f"node {node}: {report['error']}", "mend that environment: the head does not run there")
        return
    gradient = report["gradient"]
    well = report["version"] == kl_plugins.__version__
    if any(abs(a - b) > 1e-6 for a, b in zip(gradient, GRADIENT, strict=True)):
        well = False
        yield Finding(
            "fail",
            f"node {node}: the head's gradient on a fixed input is {gradient}, not {list(GRADIENT)}",
            f"reinstall kl-plugins and torch there ({report['path']}, torch {report['torch']})",
        )
    for name in ("verl", "openrlhf"):
        if report.get(name, "ok") != "ok":
            well = False
            yield Finding("fail", f"node {node}: {name}: {report[name]}", "see the log of that worker; reinstall there")
    if well:
        yield ok(f"node {node}: kl_plugins {report['version']} at {report['path']}, gradient {gradient}")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name or "").lower()
