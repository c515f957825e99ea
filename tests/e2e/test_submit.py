"""`kl-plugins submit` on a real two-node Ray cluster whose nodes have the framework and not this package."""

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import psutil
import pytest
from ray_cluster import two_nodes

from kl_plugins.launch.plan import package_folder
from kl_plugins.launch.recipes import recipes_dir

FRAMEWORK = "verl" if package_folder("verl") else "openrlhf"
# Two data-parallel ranks, each with half of the batch: on two nodes with one GPU each for verl, which has policy,
# reference and vLLM share it; OpenRLHF's policy takes two of four, its reference and vLLM the others.
RANKS = {
    "verl": [
        "trainer.nnodes=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=64",
    ],
    "openrlhf": ["actor.num_nodes=2", "rollout.micro_batch_size=128", "train.micro_batch_size=64"],
}[FRAMEWORK]
# Known to the framework's parser, refused when it starts.
BROKEN = {"verl": "actor_rollout_ref.actor.loss_agg_mode=nonsense", "openrlhf": "train.partial_rollout_enable=true"}
ACTOR = {"verl": "WorkerDict", "openrlhf": "PolicyModelActor"}[FRAMEWORK]

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def cluster():
    with two_nodes(gpus=1 if FRAMEWORK == "verl" else 2) as nodes:
        yield nodes


def submit(cluster, *words, recipe=f"{FRAMEWORK}/grpo_k2", **env):
    return cluster.command("submit", recipe, "--address", cluster.address, "--profile", "cpu", *words, **env)


def job_of(shown):
    return re.search(r"^job (\S+);", shown, re.MULTILINE)[1]


def check_run(out, steps):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert abs(rows[0]["kl/sampled"]) < 1e-3
    assert all(isinstance(row["kl/coef_mean"], float) for row in rows)
    return rows


def nodes_of(cluster, kind):
    """Each living or dead actor of a class, by job, with the node that it was on."""
    token = Path(cluster.env["RAY_AUTH_TOKEN_PATH"]).read_text()
    url = f"{cluster.address}/api/v0/actors?detail=1&limit=1000"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        actors = json.load(reply)["data"]["result"]["result"]
    return [actor["node_id"] for actor in actors if kind in actor["class_name"]]


def test_two_ranks_on_two_nodes_without_the_package(cluster):
    lacking = subprocess.run([cluster.python, "-c", "import kl_plugins"], capture_output=True, text=True, cwd="/")
    assert "No module named 'kl_plugins'" in lacking.stderr
    out = cluster.folder / "two"
    done = submit(cluster, "--steps", 2, "--out", out, "--wait", *RANKS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok   node ") == 2  # the package was there, with the right gradient
    assert re.search(r"^ +2/2 ", done.stdout, re.MULTILINE)
    assert f"job {job_of(done.stdout)}: SUCCEEDED" in done.stdout
    rows = check_run(out, 2)
    assert abs(rows[1]["kl/sampled"]) > 1e-5  # of 128 responses: within some .01 of its mean, either side
    ranks = nodes_of(cluster, ACTOR)
    assert len(ranks) == 2
    if FRAMEWORK == "verl":
        assert len(set(ranks)) == 2
    status = cluster.command("status", job_of(done.stdout), "--address", cluster.address)
    assert (status.returncode, status.stdout) == (0, f"job {job_of(done.stdout)}: SUCCEEDED\n")


def test_pasted_line_with_a_recipe_of_ones_own(cluster):
    """What --dry-run prints, run by a shell: the recipe and the one it builds on are known to the client alone."""
    own = cluster.folder / "mine" / "my own.yaml"
    (own.parent / "profile").mkdir(parents=True)
    if FRAMEWORK == "verl":
        own.write_text("defaults:\n  - base\n  - _self_\nkl:\n  correction: none\n")
        (own.parent / "base.yaml").write_text("defaults:\n  - grpo_k2\n  - _self_\n")
        words = ['+trainer.note="it\'s $HOME; [a] & more"']
    else:
        shutil.copy(recipes_dir() / "openrlhf" / "grpo_k2.yaml", own)
        words = ["kl.correction=none", "--logger.wandb.run_name", "it's $HOME; [a] & more"]
    out = cluster.folder / "pasted run"
    dry = submit(cluster, "--steps", 1, "--out", out, "--dry-run", *words, recipe=own)
    assert dry.returncode == 0, dry.stderr
    assert dry.stdout.startswith("ray job submit --address ")
    shell = {"PATH": f"{Path(sys.executable).parent}:{cluster.env['PATH']}"}
    done = cluster.command(Path("/bin/sh"), "-c", dry.stdout, **shell)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "succeeded" in done.stdout
    check_run(out, 1)
    config = (out / "config.yaml").read_text()
    assert "correction: none" in config
    assert "$HOME; " in config


def test_failing_job(cluster):
    out = cluster.folder / "broken"
    done = submit(cluster, "--steps", 1, "--out", out, "--wait", BROKEN[FRAMEWORK])
    assert done.returncode == 1, done.stdout + done.stderr
    job = job_of(done.stdout)
    assert f"job {job}: FAILED, the run ended with code 1" in done.stdout
    assert "to do:" in done.stdout  # the run's own diagnosis, in the job's log
    status = cluster.command("status", job, "--address", cluster.address)
    assert status.returncode == 1
    assert "code 1" in status.stdout


@contextlib.contextmanager
def cable(port):
    """A TCP connection to `port` that can be cut; gives its own port and the function that cuts."""
    server, open_ends = socket.create_server(("127.0.0.1", 0)), []

    def pump(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                near = server.accept()[0]
                far = socket.create_connection(("127.0.0.1", port))
                open_ends.extend((near, far))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=pump, args=ends, daemon=True).start()

    def cut():
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        for end in open_ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield server.getsockname()[1], cut
    finally:
        with contextlib.suppress(OSError):
            cut()


def test_a_cut_cable_ctrl_c_and_stop(cluster):
    out = cluster.folder / "long"
    with cable(int(cluster.address.rpartition(":")[2])) as (port, cut):
        through = f"http://127.0.0.1:{port}"
        words = [
            "submit",
            f"{FRAMEWORK}/grpo_k2",
            "--address",
            through,
            "--profile",
            "cpu",
            "--out",
            str(out),
            "--wait",
        ]
        waiting = start(cluster, *words)
        shown = read_until(waiting, "log: ")
        cut()
        rest, error = waiting.communicate(timeout=120)
    assert waiting.returncode == 4, rest + error
    assert f"lost: the connection to {through} broke" in error
    job = job_of(shown)
    assert f"kl-plugins logs {job} --address {through} --follow" in error

    following = start(cluster, "logs", job, "--address", cluster.address, "--follow")
    assert "reverse KL" in read_until(following, "log: ")
    following.send_signal(signal.SIGINT)
    _, error = following.communicate(timeout=60)
    assert following.returncode == 130
    assert "The job goes on." in error
    assert f"kl-plugins stop {job}" in error
    running = cluster.command("status", job, "--address", cluster.address)
    assert (running.returncode, running.stdout) == (0, f"job {job}: RUNNING\n")

    stopped = cluster.command("stop", job, "--address", cluster.address)
    assert (stopped.returncode, stopped.stdout) == (0, f"job {job}: STOPPED\n"), stopped.stderr
    assert cluster.command("status", job, "--address", cluster.address).returncode == 3
    again = cluster.command("stop", job, "--address", cluster.address)
    assert "had ended already: STOPPED" in again.stdout
    assert [
        p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if str(out) in " ".join(p.info["cmdline"] or [])
    ] == []


def start(cluster, *words):
    command = [sys.executable, "-u", "-m", "kl_plugins.cli", *words]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, env=cluster.env, cwd=cluster.folder, start_new_session=True, **pipes)


def read_until(process, word):
    """Its output, up to the line that holds `word`."""
    shown = ""
    for line in process.stdout:
        shown += line
        if word in line:
            return shown
    pytest.fail(f"ended without {word!r}: {shown}{process.stderr.read()}")


def test_no_token_no_cluster_no_job(cluster):
    for command in (["submit", f"{FRAMEWORK}/grpo_k2"], ["status", "j"], ["logs", "j"], ["stop", "j"]):
        without = cluster.command(*command, "--address", cluster.address, RAY_AUTH_MODE="disabled")
        assert without.returncode == 2
        assert "wants a token: set RAY_AUTH_MODE=token" in without.stderr
    nobody = cluster.command("status", "j", "--address", "http://127.0.0.1:1")
    assert nobody.returncode == 2
    assert "nobody answers at http://127.0.0.1:1 (Connection refused)" in nobody.stderr
    # The address that is typed counts, not one from the environment.
    unknown = cluster.command("logs", "no-such-job", "--address", cluster.address, RAY_ADDRESS="http://127.0.0.1:1")
    assert unknown.returncode == 2
    assert f"no job no-such-job at {cluster.address}" in unknown.stderr
    (cluster.folder / "env.yaml").write_text("working_dir: /no/such/folder\n")
    refused = submit(cluster, "--runtime-env", cluster.folder / "env.yaml")
    assert refused.returncode == 2
    assert "refused: Ray refuses the job's runtime env: " in refused.stderr
    assert "/no/such/folder" in refused.stderr
    wrong = cluster.command("stop", "j", "--address", "ray://127.0.0.1:10001")
    assert "the dashboard's address, as http://HEAD:8265" in wrong.stderr
