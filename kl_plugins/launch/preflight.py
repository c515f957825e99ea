"""Everything that would stop a run on a cluster, said before a GPU is booked, all at once.

`check` looks at the resolved configuration, `ask` at the live cluster: a small job with the run's runtime env looks at
each node and replies (`kl_plugins.launch.ask`). Failures stop a submission, warnings don't.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import yaml

from kl_plugins.doctor.checks import Finding, judge_node, ok
from kl_plugins.drift import SWITCH
from kl_plugins.launch import ask as cluster
from kl_plugins.launch.needs import Needs, Pool, parameters
from kl_plugins.launch.plan import LaunchError
from kl_plugins.launch.submit import ENDS, HOOK, OURS, Job, asked, ending

GIB = 2**30
FLOOR = 1 * GIB  # logs and metrics
BLIND = 10 * GIB  # a checkpoint of a model of unknown size
WAIT = 300.0  # seconds for the question to come back: a busy cluster starts workers slowly
MODULES = "VERL_USE_EXTERNAL_MODULES"


def check(job: Job) -> list[Finding]:
    """Findings of the configuration alone."""
    rules, config = _rules(job), yaml.safe_load(job.plan.config)
    return [*rules.findings(config), *collisions(job, rules.needs(config))]


def _rules(job: Job) -> ModuleType:
    return importlib.import_module(f"kl_plugins.launch.needs_{job.framework}")


def _needs(job: Job) -> Needs:
    return _rules(job).needs(yaml.safe_load(job.plan.config))


def collisions(job: Job, needs: Needs) -> Iterator[Finding]:
    """Keys that the job's runtime env and the framework's ray.init both set, which Ray refuses, even if equal."""
    theirs = {key: value for key, value in needs.passed.items() if key != "env_vars"}
    both = sorted(job.runtime_env.keys() & theirs.keys())
    both += [
        f"env_vars.{name}"
        for name in sorted(job.runtime_env["env_vars"].keys() & needs.passed.get("env_vars", {}).keys())
    ]
    for key in both:
        yield Finding(
            "fail",
            f"{key} is in the job's runtime env and in what {job.framework} itself gives to ray.init: Ray refuses that",
            f"take {key} out of one of the two (--runtime-env, or ray_kwargs.ray_init.runtime_env)",
        )
    hook = job.runtime_env.get(HOOK, OURS)
    if job.framework == "openrlhf" and hook != OURS:
        yield Finding(
            "fail",
            f"{HOOK} is {hook} in --runtime-env: Ray takes one, and the KL comes with {OURS}",
            f"call {OURS}() from it and leave {HOOK} out, or do without",
        )
    elif not both:
        yield ok("no key of the job's runtime env is set twice")


def ask(client: Any, job: Job, address: str) -> list[Finding]:
    """Findings of the live cluster."""
    reply = question(client, job, address)
    return [reply] if isinstance(reply, Finding) else list(judge(reply, job))


def question(client: Any, job: Job, address: str) -> dict[str, Any] | Finding:
    """The reply of a job that looks at every node, or why there is none."""
    needs = _needs(job)
    wanted = cluster.request(
        framework=job.framework,
        paths=_on_nodes(job, needs).values(),
        modules={*needs.modules, *job.packaged.values(), *_external(job)},
        model=needs.model,
        folders=(job.out, *job.fresh),
    )
    words = [job.words[0], "-m", "kl_plugins.launch.ask", json.dumps(wanted)]
    with asked(address):
        asking = client.submit_job(entrypoint=shlex.join(words), runtime_env=job.runtime_env)
        deadline = time.monotonic() + WAIT
        while client.get_job_status(asking).value not in ENDS:
            if time.monotonic() > deadline:
                client.stop_job(asking)
                return Finding("fail", f"the cluster did not answer in {WAIT:.0f} s", f"see the log of job {asking}")
            time.sleep(0.5)
        log = client.get_job_logs(asking)
    replies = [line for line in log.splitlines() if line.startswith(cluster.MARK)]
    if not replies:
        return _no_reply(client, asking, address, log, job)
    return json.loads(replies[-1].removeprefix(cluster.MARK))


def _no_reply(client: Any, asking: str, address: str, log: str, job: Job) -> Finding:
    said = [line.strip() for line in log.splitlines() if line.strip()]
    text = f"{ending(client, asking, address)}; {said[-1] if said else 'its log is empty'}"
    remedy = f"--python: {job.words[0]} has to be, on the head, the interpreter of the environment with {job.framework}"
    return Finding("fail", f"the head did not look at its nodes: {text[-600:]}", remedy)


def _on_nodes(job: Job, needs: Needs) -> dict[str, str]:
    """Paths to look for: not those that the run makes itself, nor what is found in an installed package (pkg://)."""
    made = tuple(map(str, job.fresh))
    return {key: path for key, path in needs.paths.items() if not path.startswith(made) and path not in job.packaged}


def _external(job: Job) -> list[str]:
    return [name for name in job.runtime_env["env_vars"].get(MODULES, "").split(",") if name]


def judge(reply: Mapping[str, Any], job: Job) -> Iterator[Finding]:
    """Findings from the cluster's reply (`kl_plugins.launch.ask.main`)."""
    needs = _needs(job)
    nodes = reply["nodes"]
    well = {name: node for name, node in nodes.items() if "failed" not in node}
    for name, node in nodes.items():
        if "failed" in node:
            yield Finding(
                "fail",
                f"node {name} gave no answer: {node['failed']}",
                "look at that node's Ray logs; its Python and Ray have to be the head's",
            )
        else:
            yield from judge_node(name, node["plugin"])
    if missing := reply["not importable"]:
        yield Finding(
            "fail",
            f"the head's {reply['executable']} lacks {', '.join(missing)}, which `kl-plugins run` needs",
            "pip install typer rich PyYAML psutil matplotlib Jinja2 there, or name another interpreter with --python",
        )
    workers = {node["executable"] for node in well.values()}
    if well and reply["executable"] not in workers:
        yield Finding(
            "warn",
            f"the job's command runs under {reply['executable']}, Ray's workers under {', '.join(sorted(workers))}",
            f"--python {sorted(workers)[0]}, if that is the environment with {job.framework}",
        )
    yield from _versions(well, job)
    yield from _gpus(reply, needs, job)
    yield from _paths(well, job, needs)
    yield from _folders(reply, well, job)
    yield from _disk(reply, needs, job)


def _versions(nodes: Mapping[str, Any], job: Job) -> Iterator[Finding]:
    known = _rules(job).VERSIONS
    found = {name: node["version"] for name, node in nodes.items()}
    allowed = job.runtime_env["env_vars"].get(SWITCH) == "1"
    for name, version in found.items():
        if version is None:
            yield Finding("fail", f"node {name} has no {job.framework}", f"install {job.framework} {known[-1]} there")
        elif version not in known:
            yield Finding(
                "warn" if allowed else "fail",
                f"node {name} has {job.framework} {version}; this package was tested with {', '.join(known)}",
                f"install {known[-1]} there, or set {SWITCH}=1",
            )
    if len(set(found.values())) > 1:
        yield Finding(
            "fail",
            f"{job.framework} differs between nodes: {', '.join(f'{v} on {n}' for n, v in found.items())}",
            "install one version everywhere",
        )
    elif found and set(found.values()) <= set(known):
        yield ok(f"{job.framework} {next(iter(found.values()))} on {len(found)} node{'s' if len(found) > 1 else ''}")


def _gpus(reply: Mapping[str, Any], needs: Needs, job: Job) -> Iterator[Finding]:
    has = {name: (int(node["GPU"]), int(node["CPU"])) for name, node in reply["nodes"].items()}
    there = sum(gpus for gpus, _ in has.values())
    asked_for = " + ".join(
        f"{p.what} {p.nodes} x {p.gpus}" if p.gpus > 1 else f"{p.what} {p.nodes}" for p in needs.pools
    )
    each = ", ".join(f"{gpus} on {name}" for name, (gpus, _) in has.items())
    fewer = "ask for fewer, or start more nodes"
    if needs.gpus > there:
        yield Finding("fail", f"{needs.gpus} GPUs asked for ({asked_for}), {there} there: {each}", fewer)
    elif (pool := _unplaced(needs.pools, {name: (gpus, 10**9) for name, (gpus, _) in has.items()})) is not None:
        yield Finding(
            "fail",
            f"{pool.what}: no {pool.nodes} x {pool.gpus} GPUs, {pool.gpus} of them on one node each; there: {each}",
            "change the number of nodes and of GPUs on each",
        )
    elif (pool := _unplaced(needs.pools, has)) is not None:
        cores = ", ".join(f"{cpus} on {name}" for name, (_, cpus) in has.items())
        yield Finding(
            "fail",
            f"{pool.what}: {job.framework} asks Ray for {pool.cpus} CPU cores beside each GPU; there: {cores}",
            "start the nodes with more (ray start --num-cpus), or ask for fewer GPUs",
        )
    elif needs.gpus > reply["free GPUs"]:
        yield Finding(
            "warn" if needs.waits else "fail",
            f"{needs.gpus} GPUs asked for, {reply['free GPUs']:g} of {there} free now: {job.framework} "
            + ("waits for them" if needs.waits else "gives up at once"),
            "submit again when other jobs have ended (`ray job list`)",
        )
    else:
        yield ok(f"GPUs: {needs.gpus} asked for ({asked_for}), {there} there")


def _unplaced(pools: Iterable[Pool], has: Mapping[str, tuple[int, int]]) -> Pool | None:
    """The first pool that does not fit, largest first, on the nodes' (GPUs, CPUs)."""
    left = dict(has)
    for pool in sorted(pools, key=lambda pool: -pool.gpus):
        for _ in range(pool.nodes):
            fits = [n for n, (gpus, cpus) in left.items() if gpus >= pool.gpus and cpus >= pool.gpus * pool.cpus]
            if not fits:
                return pool
            name = max(fits, key=lambda n: left[n])
            left[name] = (left[name][0] - pool.gpus, left[name][1] - pool.gpus * pool.cpus)
    return None


def _paths(nodes: Mapping[str, Any], job: Job, needs: Needs) -> Iterator[Finding]:
    wanted = _on_nodes(job, needs)
    well = True
    for key, path in wanted.items():
        if blind := [name for name, node in nodes.items() if path in node["no paths"]]:
            well = False
            where = "any node" if len(blind) == len(nodes) else f"node {', '.join(blind)}"
            relative = "" if path.startswith(("/", "~")) else " (relative: from the folder where Ray was started)"
            yield Finding("fail", f"{key}={path}: not visible from {where}{relative}", "a path that all nodes share")
    for name in sorted({name for node in nodes.values() for name in node["no modules"]}):
        well = False
        lacking = ", ".join(node for node, said in nodes.items() if name in said["no modules"])
        yield Finding(
            "fail",
            f"Python module {name} cannot be imported on node {lacking}",
            "install it there, or send it along: py_modules in a file for --runtime-env",
        )
    if well and wanted:
        yield ok(f"visible from every node: {', '.join(wanted)}")


def _folders(reply: Mapping[str, Any], nodes: Mapping[str, Any], job: Job) -> Iterator[Finding]:
    for folder in map(str, (job.out, *job.fresh)):
        what = "--out" if folder == str(job.out) else "KL_PLUGINS_CACHE"
        if error := reply["unwritable"].get(folder):
            yield Finding("fail", f"the head cannot write {folder} ({error})", f"{what}: a folder that all nodes share")
        elif strange := [name for name, node in nodes.items() if folder in node["strange folders"]]:
            yield Finding(
                "fail",
                f"{folder} on node {', '.join(strange)} is not the head's folder of that name: steps and checkpoints "
                "written there would not be found",
                f"{what}: a folder that all nodes share",
            )
        else:
            yield ok(f"{folder} is one folder on every node")


def _disk(reply: Mapping[str, Any], needs: Needs, job: Job) -> Iterator[Finding]:
    count = parameters(reply["sizes"])
    named = re.search(r"(\d+(?:\.\d+)?)[Bb]\b", needs.model)
    source = "its config.json"
    if count is None and named:
        count, source = int(float(named[1]) * 1e9), "its name"
    if count is None:
        one = BLIND if needs.copies or needs.at_end else 0
        need, what = FLOOR + one, f"the size of {needs.model} is not known here; at least"
    else:
        need = FLOOR + count * (needs.saved * needs.copies + needs.at_end)
        what = f"{needs.model}: {count / 1e9:.2g} billion parameters by {source}; {needs.copies} checkpoints take about"
    free, text = reply["free"], f"{job.out}: {reply['free'] / GIB:.1f} GiB free; {what} {need / GIB:.1f} GiB"
    if free < need:
        yield Finding("fail", text, "free space, keep fewer checkpoints or save less often, or another --out")
    else:
        yield ok(text)


def require(findings: Iterable[Finding]) -> None:
    """Stop where something failed.

    Raises:
        LaunchError: with the number of failures.
    """
    count = sum(finding.level == "fail" for finding in findings)
    if count:
        raise LaunchError(f"{count} problem{'s' if count > 1 else ''} above; nothing was submitted")
