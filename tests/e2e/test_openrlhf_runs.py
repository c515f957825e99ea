"""OpenRLHF for real on the CPU: Ray actors, DeepSpeed, vLLM with a weight sync every step; a minute to start each."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml
from ray_cluster import end, free_ports

from kl_plugins.cpu import OPENRLHF_ENV

if importlib.util.find_spec("openrlhf") is None:
    pytest.skip("OpenRLHF's environment is another one", allow_module_level=True)

from kl_plugins.launch.recipes import find_recipe, recipes_dir
from kl_plugins.openrlhf.command import merge, native_command
from kl_plugins.openrlhf.hook import CONFIG, HOOK, METRICS

LIMIT = 600  # seconds for one run; a dead worker must end it long before
STEPS = 3
VALUES, SHAPE = ("sampled", "k1", "k2", "k3", "chi2"), ("tail_up", "tail_down", "coef_mean", "coef_max")
KL = {f"kl/{name}" for name in (*VALUES, *SHAPE, "clip_removed", "ess", "rho_max")}


@pytest.fixture(scope="session")
def data():
    """The demo's model and questions, made once for this machine."""
    folder = Path(os.environ.get("KL_PLUGINS_CPU_DATA") or Path.home() / ".cache" / "kl_plugins" / "addition")
    prepare = [sys.executable, "-m", "kl_plugins.cpu.addition", str(folder)]
    subprocess.run(prepare, check=True, timeout=LIMIT, env={**os.environ, **OPENRLHF_ENV})
    os.environ["KL_PLUGINS_CPU_DATA"] = str(folder)
    return folder


def command(recipe, out, *overrides, steps=STEPS):
    """The flags of one run of ``recipe`` on the CPU."""
    texts = [find_recipe(f"openrlhf/{recipe}").path, recipes_dir() / "openrlhf" / "profile" / "cpu.yaml"]
    settings = merge(*(yaml.safe_load(path.read_text()) for path in texts))
    places = {"ckpt.output_dir": "model", "ckpt.path": "checkpoints", "logger.tensorboard_dir": "tensorboard"}
    where = [f"{flag}={out / name}" for flag, name in places.items()]
    return native_command(settings, [*where, *overrides], steps)[1:]


def run(module, flags, out, **environ):
    """Run ``python -m module flags`` with a Ray of its own; returns exit code and log."""
    log = out / "log.txt"
    environ = {**os.environ, **OPENRLHF_ENV, "RAY_ADDRESS": "local", METRICS: str(out / "metrics.jsonl"), **environ}
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *flags],
            env=environ,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=out,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=LIMIT)
        finally:
            end(process)
    return code, log.read_text()


def steps_of(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def check_steps(steps, count=STEPS):
    """KL about 0 at the first step and growing after, our metrics there, OpenRLHF's own beside them."""
    assert [s["step"] for s in steps] == list(range(1, count + 1))
    for step in steps:
        assert step.keys() >= KL | {"step", "reward", "kl", "pg_loss", "seconds", "actor_grad_norm"}
        assert step["rollout/num_samples"] == 256
    assert abs(steps[0]["kl/sampled"]) < 1e-3
    assert max(step["kl/sampled"] for step in steps) > 0.01


def test_grpo_k2(data, tmp_path):
    flags = command("grpo_k2", tmp_path, "kl.correction=clip", "algo.advantage.std_min=0.1")
    code, log = run("kl_plugins.openrlhf.main", flags, tmp_path)
    assert code == 0, log[-3000:]
    steps = steps_of(tmp_path)
    check_steps(steps)
    assert steps[-1]["kl/rho_max"] > 1  # the second update of a batch is off-policy
    assert "kl_plugins: k2 as loss descends reverse KL" in log
    assert tensorboard_names(tmp_path) >= {f"train/{name}" for name in KL}


def tensorboard_names(out):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (out / "tensorboard").iterdir()
    return set(EventAccumulator(str(folder)).Reload().Tags()["scalars"])


def test_ppo_k1_in_reward(data, tmp_path):
    controller = ["kl.controller.kind=log", "kl.controller.target=0.001"]
    code, log = run("kl_plugins.openrlhf.main", command("ppo_k1_in_reward", tmp_path, *controller), tmp_path)
    assert code == 0, log[-3000:]
    steps = steps_of(tmp_path)
    check_steps(steps)
    assert abs(steps[0]["kl"]) < 1e-3  # of the rollout, before the updates
    assert steps[-1]["kl/coef_mean"] > 0  # in the reward the coefficient is the value
    assert all("critic_loss" in step for step in steps)
    betas = [step["kl/beta"] for step in steps]
    assert betas[0] == betas[1] < betas[2]


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """A Ray head with made-up GPUs, started and ended by its own process id; gives the dashboard's address."""
    folder = tempfile.mkdtemp(prefix="kl-ray-")  # short: Ray's sockets lie in it; its own: no other Ray finds this one
    names = ("port", "dashboard-port", "ray-client-server-port", "metrics-export-port")
    names += ("dashboard-agent-listen-port", "dashboard-agent-grpc-port")
    flags = dict(zip(names, free_ports(len(names)), strict=True))
    words = [f"--{name}={port}" for name, port in flags.items()]
    ray = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", f"--temp-dir={folder}", *words]
    environ = {k: v for k, v in {**os.environ, **OPENRLHF_ENV}.items() if k not in ("RAY_ADDRESS", "KL_PLUGINS_CPU")}
    with open(tmp_path_factory.mktemp("ray") / "log.txt", "w") as log:
        process = subprocess.Popen(ray, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    address = f"http://127.0.0.1:{flags['dashboard-port']}"
    try:
        wait_for(lambda: answers(address), 120, process)
        yield address
    finally:
        end(process)
        shutil.rmtree(folder)


def answers(address):
    from ray.job_submission import JobSubmissionClient

    try:
        JobSubmissionClient(address).list_jobs()
    except (ConnectionError, RuntimeError):
        return False
    return True


def wait_for(condition, seconds, process):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "ray start ended"
        assert time.monotonic() < deadline, f"nothing after {seconds} s"
        time.sleep(1)


def submit(address, module, flags, **runtime_env):
    """Run ``python -m module flags`` as a Ray job; returns its status and log."""
    from ray.job_submission import JobSubmissionClient

    client = JobSubmissionClient(address)
    entry = " ".join([sys.executable, "-m", module, *flags])
    job = client.submit_job(entrypoint=entry, runtime_env=runtime_env)
    deadline = time.monotonic() + LIMIT
    while not client.get_job_status(job).is_terminal():
        if time.monotonic() > deadline:
            client.stop_job(job)
            pytest.fail(f"no end after {LIMIT} s:\n{client.get_job_logs(job)[-3000:]}")
        time.sleep(1)
    return client.get_job_status(job).value, client.get_job_logs(job)


def without_ours(flags):
    """The flags of a command that OpenRLHF knows by itself: those of the kl block come first."""
    first = next(i for i, word in enumerate(flags) if word.startswith("--") and not word.startswith("--kl_"))
    return flags[first:]


def test_grpo_k3_of_vanilla_openrlhf_under_a_job(data, head, tmp_path):
    """Neither kl-openrlhf nor its flags: the hook in the job's runtime env, the configuration in one variable."""
    flags = without_ours(command("grpo_k3", tmp_path, "algo.kl.use_loss=true"))
    variables = {
        **OPENRLHF_ENV,
        CONFIG: json.dumps({"estimator": "k3", "correction": "clip", "std_min": 0.1}),
        METRICS: str(tmp_path / "metrics.jsonl"),
    }
    runtime_env = dict(env_vars=variables, worker_process_setup_hook=HOOK)
    status, log = submit(head, "kl_plugins.cpu.openrlhf", flags, **runtime_env)
    assert status == "SUCCEEDED", log[-3000:]
    assert "kl_plugins: k3 as loss descends forward KL" in log
    check_steps(steps_of(tmp_path))


def test_colliding_variable_and_hook(data, head, tmp_path):
    """Ray refuses a key that both the job and ray.init set: OpenRLHF alone dies of it, kl-openrlhf merges."""
    variables = {**OPENRLHF_ENV, "TOKENIZERS_PARALLELISM": "false", METRICS: str(tmp_path / "metrics.jsonl")}
    runtime_env = dict(env_vars=variables, worker_process_setup_hook=HOOK)
    flags = command("grpo_k2", tmp_path, steps=1)
    status, log = submit(head, "kl_plugins.cpu.openrlhf", without_ours(flags), **runtime_env)
    assert status == "FAILED"
    assert "TOKENIZERS_PARALLELISM" in log
    status, log = submit(head, "kl_plugins.openrlhf.main", flags, **runtime_env)
    assert status == "SUCCEEDED", log[-3000:]
    check_one(steps_of(tmp_path))


def check_one(steps):
    assert len(steps) == 1
    assert steps[0].keys() >= KL


def test_failing_hook_stops_the_job(data, head, tmp_path):
    """A worker that cannot install the plugin ends the job before a model is loaded."""
    variables = {**OPENRLHF_ENV, CONFIG: "{estimator: k2}"}
    flags = without_ours(command("grpo_k2", tmp_path))
    runtime_env = dict(env_vars=variables, worker_process_setup_hook=HOOK)
    status, log = submit(head, "kl_plugins.cpu.openrlhf", flags, **runtime_env)
    assert status == "FAILED"
    assert f"{CONFIG}='{{estimator: k2}}' is not JSON" in log
    assert "Loading weights" not in log
