"""A run as a Ray job: what is sent, how it is followed, how it ended.

The job's command is `kl-plugins run` itself, on the cluster's head: it joins the job's Ray, resolves paths and
``pkg://`` where they are used, shows the steps in the job's log and explains a failure there. The package travels
in the job's runtime env (`kl_plugins.launch.wheel`), and so do environment variables: workers of a running cluster
inherit none.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kl_plugins.drift import SWITCH
from kl_plugins.launch.plan import JOB, LaunchError, Plan, environ
from kl_plugins.launch.recipes import OWN, Recipe, recipes_dir
from kl_plugins.launch.run import cache_dir, make_plan
from kl_plugins.launch.wheel import build
from kl_plugins.openrlhf.hook import HOOK as OURS

# Exit codes of what follows a job, beside those of kl_plugins.launch.run.
STOPPED = 3
LOST = 4  # the connection broke; the job may well go on
ENDS = {"SUCCEEDED": 0, "FAILED": 1, "STOPPED": STOPPED}

HOOK = "worker_process_setup_hook"
SERVER = "RAY_API_SERVER_ADDRESS"
# Declares the GPUs of a Ray that is about to be started; a job finds one that has.
NOT_FOR_A_JOB = ("RAY_OVERRIDE_RESOURCES",)
ANSWER = (5, 30)  # seconds to connect and to answer; Ray's own client would wait without end
SILENCE = 20.0  # seconds without a line before the connection is looked at


class Lost(RuntimeError):
    """The connection to the cluster broke."""


@dataclass(frozen=True)
class Job:
    """One run, ready to be submitted.

    Attributes:
        words: the job's command.
        runtime_env: Ray's, with local paths that are uploaded on submission.
        plan: the run as it will be composed in the job.
        framework: "verl" or "openrlhf".
        out: the run's folder on the cluster.
        fresh: folders whose content the run makes itself, and that every node has to see, `out` aside.
        packaged: file -> Python module, of what the recipe names as ``pkg://`` and is found here at that path.
    """

    words: list[str]
    runtime_env: dict[str, Any]
    plan: Plan
    framework: str
    out: Path
    fresh: tuple[Path, ...] = ()
    packaged: Mapping[str, str] = field(default_factory=dict)


def make_job(
    recipe: Recipe,
    *,
    profile: str | None = None,
    kl: Mapping[str, str] | None = None,
    steps: int | None = None,
    out: Path,
    native: list[str] | None = None,
    save_every: int | None = None,
    resume: bool = False,
    limits: Mapping[str, float] | None = None,
    python: str = "python",
    given: Mapping[str, Any] | None = None,
) -> tuple[Job, str]:
    """The job of one run, and one sentence on what it descends.

    Args:
        recipe: as for a run; one that is no part of the package travels along.
        profile: as for a run.
        kl: as for a run.
        steps: as for a run.
        out: as for a run; a folder that every node sees.
        native: as for a run.
        save_every: as for a run.
        resume: as for a run; whether there is a checkpoint is seen where the job runs.
        limits: options of `kl-plugins run` that take seconds: timeout, stall.
        python: the interpreter on the head, a name on its PATH or a path.
        given: the user's own runtime env; ours is added to it.

    Raises:
        LaunchError: the recipe, an override or the KL configuration is wrong.
    """
    given, out = dict(given or {}), out.absolute()
    theirs = {str(name): str(value) for name, value in (given.get("env_vars") or {}).items()}
    home = {"KL_PLUGINS_CACHE": str(cache_dir())} if profile == "cpu" else {}
    home |= {SWITCH: os.environ[SWITCH]} if SWITCH in os.environ else {}
    with environ({JOB: "{}", **theirs, **home}):
        plan, sentence = make_plan(
            recipe,
            profile=profile,
            kl=kl,
            steps=steps,
            out=out,
            native=native,
            dry_run=True,
            save_every=save_every,
            resume=resume,
        )
    own = not recipe.path.is_relative_to(recipes_dir())
    package = [str(folder) for folder in build(cache_dir() / "package", recipe if own else None)]
    ours = {name: value for name, value in plan.env.items() if name not in NOT_FOR_A_JOB}
    env = {**given, "env_vars": {**theirs, **home, **ours}, "py_modules": [*package, *given.get("py_modules", [])]}
    if recipe.framework == "openrlhf":
        env.setdefault(HOOK, OURS)
    words = [python, "-m", "kl_plugins.cli", "run"]
    words.append(f"{OWN}/{recipe.framework}/{recipe.path.name}" if own else recipe.name)
    options = {"profile": profile, "steps": steps, "out": out, "save-every": save_every, **(limits or {})}
    options |= {f"kl_{axis}": value for axis, value in (kl or {}).items()}
    for name, value in options.items():
        if value is not None:
            words += [f"--{name}", str(value)]
    words += ["--resume"] if resume else []
    words += ["--", *native] if native else []
    fresh = (cache_dir() / "addition",) if profile == "cpu" else ()
    texts = [recipe.path.read_text(), *([recipe.profile(profile).read_text()] if profile else []), *(native or [])]
    return Job(words, env, plan, recipe.framework, out, fresh, _packaged(texts)), sentence


def _packaged(texts: list[str]) -> dict[str, str]:
    found = {}
    for name in {name for text in texts for name in re.findall(r"pkg://([\w.]+)", text)}:
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # a package that only the nodes have; the preflight asks them
            continue
        if spec is not None and spec.origin:
            found[spec.origin] = name
    return found


def read_runtime_env(path: Path | None) -> dict[str, Any]:
    """The user's own runtime env, a YAML file as for ``ray job submit --runtime-env``.

    Raises:
        LaunchError: no such file, or no mapping in it.
    """
    if path is None:
        return {}
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise LaunchError(f"--runtime-env {path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise LaunchError(f"--runtime-env {path} is not a mapping such as {{env_vars: {{NAME: value}}}}")
    return content


def shell(job: Job, address: str) -> str:
    """The ``ray job submit`` line that does the same, to be pasted into a shell.

    Raises:
        LaunchError: Ray's command cannot carry one of the words.
    """
    import ray.dashboard.modules.job.cli as ray_cli

    words = job.words
    if not hasattr(ray_cli, "shlex"):  # until Ray 2.55 it quotes the command for Windows, and a Unix shell reads it
        words = [_through_list2cmdline(word) for word in words]
    line = ["ray", "job", "submit", "--address", address, "--runtime-env-json", json.dumps(job.runtime_env), "--"]
    # Ray lets these two win over --address.
    other = any(os.environ.get(name, address) != address for name in ("RAY_ADDRESS", SERVER))
    return (f"{SERVER}={shlex.quote(address)} " if other else "") + shlex.join([*line, *words])


def _through_list2cmdline(word: str) -> str:
    """What comes out as `word` when ``subprocess.list2cmdline`` has quoted it and a Unix shell has read it."""
    blank = " " in word or "\t" in word
    if '\\"' in word or "\n" in word or (blank and word.endswith("\\")):
        raise LaunchError(f"`ray job submit` of this Ray cannot carry the word {word!r}: submit without --dry-run")
    if blank:  # it will stand in double quotes
        return "".join(f"\\{c}" if c in "$`\\" else c for c in word)
    return "".join(c if c.isalnum() or c in '"_@%+=:,./-' else f"\\{c}" for c in word)


def connect(address: str) -> Any:
    """A JobSubmissionClient whose requests end, if need be in an error.

    Raises:
        LaunchError: nobody there, a token is wanted, or Ray is not installed here.
    """
    try:
        import requests
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise LaunchError(f"jobs need Ray's client here: pip install 'ray[default]' ({error})") from error

    for module in ("dashboard.modules.job.sdk", "dashboard.modules.dashboard_sdk", "_private.runtime_env.packaging"):
        logging.getLogger(f"ray.{module}").setLevel(logging.WARNING)  # they tell of uploads and closed sockets

    class Client(JobSubmissionClient):
        def _do_request(self, *args: Any, **kwargs: Any) -> Any:
            return super()._do_request(*args, **{"timeout": ANSWER, **kwargs})

    address = address.rstrip("/") if "://" in address else f"http://{address.rstrip('/')}"
    if not address.startswith(("http://", "https://")):
        raise LaunchError(f"--address {address}: give the dashboard's address, as http://HEAD:8265")
    try:
        requests.get(f"{address}/api/version", timeout=ANSWER)
    except requests.RequestException as error:
        raise LaunchError(
            f"nobody answers at {address} ({_reason(error)}): start the cluster, or correct --address; it is the "
            "dashboard's, http://HEAD:8265, not the port that nodes join"
        ) from error
    # RAY_ADDRESS in the environment would win over the address given.
    with environ({SERVER: address}), asked(address):
        return Client(address)


@contextmanager
def asked(address: str, job: str = "") -> Iterator[None]:
    """Ray's and the network's exceptions of a request, as a LaunchError or, where the connection broke, `Lost`."""
    import aiohttp
    import requests
    from ray.exceptions import AuthenticationError

    try:
        yield
    except (LaunchError, Lost):
        raise
    except AuthenticationError as error:
        raise LaunchError(
            f"the cluster at {address} wants a token: set RAY_AUTH_MODE=token, and have the cluster's token in "
            "~/.ray/auth_token, RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN"
        ) from error
    except (requests.RequestException, aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        raise Lost(f"the connection to {address} broke ({_reason(error)})") from error
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if "WebSocket" in text:
            raise Lost(f"the connection to {address} broke ({text})") from error
        if job and "does not exist" in text:
            raise LaunchError(f"no job {job} at {address}; `ray job list --address {address}` shows those") from error
        raise LaunchError(f"{address}: {text}") from error
    except (ValueError, TypeError) as error:  # Ray looks at the runtime env before it sends anything
        raise LaunchError(f"Ray refuses the job's runtime env: {' '.join(str(error).split())}") from error


def _reason(error: BaseException) -> str:
    """The innermost reason, which is the one that says something: "Connection refused"."""
    text = str(error)
    if "Errno" in text:
        text = text[text.rindex("Errno") :].partition("] ")[2].partition("'")[0].rstrip('")')
    return " ".join(text.split())[:200] or type(error).__name__


def send(client: Any, job: Job, address: str) -> str:
    """Submit it; returns the job's id."""
    with asked(address):
        return client.submit_job(entrypoint=shlex.join(job.words), runtime_env=job.runtime_env)


def follow(client: Any, job: str, address: str, show: Callable[[str], None]) -> str:
    """Hand the log to `show` piece by piece until the job has ended; returns its status.

    Raises:
        Lost: the connection broke.
        LaunchError: there is no such job.
    """
    with asked(address, job):
        status(client, job, address)
        asyncio.run(_tail(client, job, show))
    deadline = time.monotonic() + 60  # the log may end before the status says so
    while (ended := status(client, job, address)) not in ENDS:
        if time.monotonic() > deadline:
            raise Lost(f"the log of {job} ended, and its status is still {ended}")
        time.sleep(0.5)
    return ended


async def _tail(client: Any, job: str, show: Callable[[str], None]) -> None:
    lines = aiter(client.tail_job_logs(job))
    while True:
        piece = asyncio.ensure_future(anext(lines))
        while not (await asyncio.wait({piece}, timeout=SILENCE))[0]:
            await asyncio.to_thread(client.get_job_status, job)  # fails if nobody is there any more
        try:
            show(piece.result())
        except StopAsyncIteration:
            return


def status(client: Any, job: str, address: str) -> str:
    """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""
    with asked(address, job):
        return client.get_job_status(job).value


def ending(client: Any, job: str, address: str) -> str:
    """One sentence on a job's state, with the command's exit code and Ray's message where it failed."""
    with asked(address, job):
        info = client.get_job_info(job)
    if info.status.value != "FAILED":
        return f"job {job}: {info.status.value}"
    if info.driver_exit_code is not None:
        return f"job {job}: FAILED, the run ended with code {info.driver_exit_code}"
    said = [line.strip() for line in (info.message or "").splitlines() if line.strip()]
    return f"job {job}: FAILED before the run began: {said[-1] if said else 'Ray gives no reason'}"


def stop(client: Any, job: str, address: str) -> str:
    """Stop it and wait until it has ended; returns its status."""
    with asked(address, job):
        status(client, job, address)
        client.stop_job(job)
    deadline = time.monotonic() + 60  # Ray kills what does not end in some seconds
    while (ended := status(client, job, address)) not in ENDS and time.monotonic() < deadline:
        time.sleep(0.5)
    return ended
