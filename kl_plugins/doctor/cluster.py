"""Asks every node of a Ray cluster: one fresh worker each, pinned to its node."""

from __future__ import annotations

import importlib.metadata
import os
import socket
from collections.abc import Iterator

from kl_plugins.doctor import probe
from kl_plugins.doctor.checks import Finding, judge_node

SECONDS = 120.0  # a node's time to answer: importing verl on a busy machine takes a while


def nodes(address: str | None) -> Iterator[Finding]:
    """Findings of every node of the cluster at ``address`` (None: ``RAY_ADDRESS``, else a local Ray of our own)."""
    try:
        import ray
    except ImportError:
        yield Finding("warn", "Ray is not installed: no nodes to ask", "pip install ray, or run on the cluster's head")
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if silent := _silent(address):
        yield Finding("fail", f"no Ray cluster at {address}: {silent}", _remedy(silent))
        return
    own = {"num_cpus": 1, "include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR", **own)
    except Exception as error:  # Ray raises many kinds here, all of them mean the same to the user
        yield Finding("fail", f"no Ray cluster at {address}: {type(error).__name__}: {error}", _remedy(str(error)))
        return
    try:
        yield from _ask(ray)
    finally:
        ray.shutdown()


def _silent(address: str) -> str:
    """Why nothing listens at ``HOST:PORT`` ("" if something does): ray.init would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():  # "local", "auto"
        return ""
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        return str(error)
    return ""


def _ask(ray) -> Iterator[Finding]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # By value: a node without kl_plugins must be able to unpickle the question.
    ray.cloudpickle.register_pickle_by_value(probe)
    frameworks = [_installed("verl"), _installed("openrlhf")]
    alive = [n for n in ray.nodes() if n["Alive"]]
    asked = {}
    for node in alive:
        pinned = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=pinned)(probe.probe)
        asked[f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"] = task.remote(*frameworks)
    for name, answer in asked.items():
        try:
            report = ray.get(answer, timeout=SECONDS)
        except ray.exceptions.RayError as error:
            yield Finding(
                "fail",
                f"node {name} gave no answer: {str(error).strip().splitlines()[-1]}",
                "look at that node's Ray logs; its Python and Ray versions must be the driver's",
            )
            continue
        yield from judge_node(name, report)
    yield Finding("ok", f"{len(alive)} node{'s' if len(alive) != 1 else ''} asked")


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _remedy(message: str) -> str:
    if "Token" in message or "auth" in message.lower():
        return "the cluster wants a token: set RAY_AUTH_MODE=token and have its token file in your home directory"
    return "start the cluster, or correct --address (HOST:PORT of the head, not the dashboard's http:// address)"
