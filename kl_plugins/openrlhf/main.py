"""`kl-openrlhf`: OpenRLHF's own ``openrlhf.cli.train_ppo_ray`` in this process, with the plugin's flags and hook."""

from __future__ import annotations

import argparse
import functools
import json
import os
import runpy
import sys
from collections.abc import Mapping
from typing import Any

from kl_plugins.openrlhf.hook import HOOK

ENTRY = "openrlhf.cli.train_ppo_ray"
SETUP_HOOK = "worker_process_setup_hook"


def main() -> None:
    """Run OpenRLHF with ``sys.argv``; everything it accepts is accepted."""
    if os.environ.get("KL_PLUGINS_CPU") == "1":
        from kl_plugins.cpu import openrlhf as cpu

        cpu.install()
    _extend_parser()
    _extend_ray_init()
    sys.argv[0] = "kl-openrlhf"
    runpy.run_module(ENTRY, run_name="__main__", alter_sys=True)


def _extend_parser() -> None:
    """Give OpenRLHF's parser, which it builds in its script, the plugin's flags just before it parses."""
    original = argparse.ArgumentParser.parse_args

    def parse_args(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> argparse.Namespace:
        if "--algo.kl.estimator" not in parser._option_string_actions:
            return original(parser, args, namespace)
        argparse.ArgumentParser.parse_args = original
        from kl_plugins.openrlhf import flags

        flags.add(parser)
        return flags.parse(parser, args)

    argparse.ArgumentParser.parse_args = parse_args


def _extend_ray_init() -> None:
    """Check OpenRLHF, add the hook to the runtime env that it gives to ray.init, and see that a worker has it."""
    import ray

    original = ray.init

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        from kl_plugins.openrlhf import adapter

        adapter.check_all()
        job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}").get("runtime_env") or {}
        kwargs["runtime_env"] = merged_runtime_env(kwargs.get("runtime_env") or {}, job, os.environ)
        ray.init = original
        context = original(*args, **kwargs)
        _probe_worker()
        return context

    ray.init = init


def merged_runtime_env(given: Mapping[str, Any], job: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """What to pass to ray.init beside a job's own runtime env; Ray refuses a key that both have, even if equal.

    Args:
        given: what OpenRLHF passes.
        job: the runtime env that the job was submitted with; empty outside a job.
        environ: this process's environment; its KL_PLUGINS_* variables go to the workers.

    Raises:
        RuntimeError: another worker_process_setup_hook is in the way.
    """
    hooks = {env[SETUP_HOOK] for env in (given, job) if env.get(SETUP_HOOK)}
    if hooks - {HOOK}:
        raise RuntimeError(
            f"{SETUP_HOOK} is already {', '.join(sorted(map(str, hooks - {HOOK})))}: Ray takes one. "
            f"Call {HOOK}() from it and name {HOOK} no more, or leave it out of the runtime env"
        )
    ours = {name: value for name, value in environ.items() if name.startswith("KL_PLUGINS_")}
    variables = {**(given.get("env_vars") or {}), **ours}
    merged = {**given, "env_vars": {k: v for k, v in variables.items() if k not in (job.get("env_vars") or {})}}
    if job.get(SETUP_HOOK):
        merged.pop(SETUP_HOOK, None)
    else:
        merged[SETUP_HOOK] = HOOK
    return merged


def _probe_worker() -> None:
    """Ask one worker whether it has the hook, and this version of it, before any model is loaded.

    Raises:
        RuntimeError: it has not.
    """
    import ray

    from kl_plugins.openrlhf.hook import worker_report

    here = worker_report()
    there = ray.get(ray.remote(num_cpus=0, max_retries=0)(worker_report).remote())
    if not there["installed"] or there["version"] != here["version"]:
        raise RuntimeError(
            f"a Ray worker reports kl_plugins {there['version']} at {there['path']}, hook "
            f"{'installed' if there['installed'] else 'not installed'}; the driver has {here['version']} at "
            f"{here['path']}. Install the same kl-plugins on every node, or ship its wheel in the job's runtime env"
        )


if __name__ == "__main__":
    main()
