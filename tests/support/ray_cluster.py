"""A real Ray cluster of two nodes on this machine, neither of which has kl_plugins installed."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import psutil

from kl_plugins.cpu import OPENRLHF_ENV, VERL_ENV

# A driver or a worker of ours must get its variables from the job, not from the shell that started Ray.
JOBS_OWN = {*VERL_ENV, *OPENRLHF_ENV, "RAY_ADDRESS", "RAY_AUTH_MODE"}
START = "from ray.scripts.scripts import main; main()"


@dataclass(frozen=True)
class Cluster:
    """`address` of the dashboard; `env` for whoever talks to it; `folder` of its own; `python` of the nodes."""

    address: str
    env: dict[str, str]
    folder: Path
    python: Path

    def command(self, *words, **env):
        """Run `kl-plugins WORDS` (or another program, if the first is a path); returns the ended process."""
        program = [] if isinstance(words[0], Path) else [sys.executable, "-m", "kl_plugins.cli"]
        return subprocess.run(
            [*program, *map(str, words)],
            env={**self.env, **env},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=600,
        )


def bare_python(folder):
    """A Python with everything of this environment except kl_plugins; without pip, whatever is on the PATH else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "kl_plugins" not in entry.name.lower():
            (site / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


@contextlib.contextmanager
def two_nodes(gpus, cpus=16):
    """A head and a second node, `gpus` made-up GPUs each, with token authentication; ended by process id."""
    # Short, since Ray's sockets lie in it; Ray's current folder is on its workers' path, so nothing of ours is in it.
    folder = Path(tempfile.mkdtemp(prefix="kl-ray-"))
    python = bare_python(folder / "bare")
    (folder / "token").write_text("0123456789abcdef" * 4)
    env = {name: value for name, value in os.environ.items() if name not in JOBS_OWN and not name.startswith("KL_PLUG")}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token"), "RAY_USAGE_STATS_ENABLED": "0"}
    nodes = env | {"PATH": f"{python.parent}:{env['PATH']}"}
    client = env | {"KL_PLUGINS_CACHE": str(folder / "cache")}
    common = ["--block", f"--num-gpus={gpus}", f"--num-cpus={cpus}", "--disable-usage-stats"]
    agents = ("metrics-export-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port")
    head, dashboard, client_server, *rest = free_ports(3 + 2 * len(agents))
    starts = (
        ["--head", f"--port={head}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client_server}"]
        + [f"--temp-dir={folder}/ray"]
        + [f"--{name}={port}" for name, port in zip(agents, rest[:3], strict=True)],
        [f"--address=127.0.0.1:{head}"] + [f"--{name}={port}" for name, port in zip(agents, rest[3:], strict=True)],
    )
    address = f"http://127.0.0.1:{dashboard}"
    (folder / "work").mkdir()
    processes = []
    try:
        for count, words in enumerate(starts, start=1):
            command = [python, "-c", START, "start", *words, *common]
            processes.append(start(command, nodes, folder, lambda count=count: living(address, client) >= count))
        yield Cluster(address, client, folder, python)
    finally:
        for process in reversed(processes):
            end(process)
        sweep(folder)
        shutil.rmtree(folder)


def start(command, env, folder, there, tries=3):
    """A node's process, once `there`; on a busy machine Ray itself gives a node up after 30 s."""
    log = folder / "node.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=env, cwd=folder / "work", start_new_session=True
        )
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if there():
            return process
        time.sleep(0.5)
    end(process)
    shown = log.read_text()[-2000:]
    assert tries > 1, shown
    assert process.returncode is not None
    assert "timed out during startup" in shown, shown
    return start(command, env, folder, there, tries - 1)


def living(address, env):
    """How many nodes the cluster has; 0 before there is one."""
    token = Path(env["RAY_AUTH_TOKEN_PATH"]).read_text()
    request = urllib.request.Request(f"{address}/nodes?view=summary", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.read().decode().count('"ALIVE"')
    except OSError:  # also urllib's own errors
        return 0


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def end(process):
    """End a process of ours and its descendants, which Ray puts into sessions of their own."""
    try:
        parent = psutil.Process(process.pid)
        finish([parent, *parent.children(recursive=True)])
    except psutil.NoSuchProcess:
        pass
    process.wait(timeout=20)


def sweep(folder):
    """End what a node that gave up at its start has left: its command line names the cluster's own folder."""
    left = [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]
    finish(left)


def finish(processes):
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=20)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def title(process):
    """Its command line, which Ray's workers rewrite; "" once it is gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
