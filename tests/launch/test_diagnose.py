"""Causes from logs. The logs are shortened from real runs of verl 0.9.1, OpenRLHF 0.11.2 and Ray."""

import pytest

from kl_plugins.launch.diagnose import diagnose

HYDRA = "Error executing job with overrides: ['+profile=cpu']\nTraceback (most recent call last):\n"
WRAPPED = (
    HYDRA
    + '  File "main_ppo.py", line 80, in run_ppo\n    ray.get(runner.run.remote(config))\n'
    + "ray.exceptions.RayTaskError(ValueError): ray::TaskRunnerV1.run() (pid=12, ip=10.0.0.1, actor_id=ab)\n"
    + '  File "losses.py", line 3, in f\n'
    + "ValueError: kl.estimator='k9': did you mean 'k2'?\n"
    + "\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n"
)
WORKER_DIED = (
    "\x1b[36m(WorkerDict pid=31)\x1b[0m Traceback (most recent call last):\n"
    "\x1b[36m(WorkerDict pid=31)\x1b[0m RuntimeError: kl_head was never called\n"
    "\x1b[36m(WorkerDict pid=31, ip=10.0.0.1)\x1b[0m bye\n" + HYDRA + "ray.exceptions.ActorDiedError: The actor died "
    "unexpectedly before finishing this task.\n"
)
# A reward file that is not there, under OpenRLHF: the trainer then waits for its vLLM until it fails of something else.
UNBORN = (
    "(RolloutRayActor pid=23) Exception raised in creation task: The actor died because of an error raised in its "
    "creation task, ray::RolloutRayActor.__init__() (pid=23, ip=10.0.0.1)\n"
    "(RolloutRayActor pid=23)     spec.loader.exec_module(reward_module)\n"
    "(RolloutRayActor pid=23) FileNotFoundError: [Errno 2] No such file or directory: '/no/such/reward.py'\n"
    "Traceback (most recent call last):\n"
    "ray.exceptions.RayTaskError(OSError): ray::PolicyModelActor.init_model_from_pretrained() (pid=24)\n"
    "torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 1/2 clients joined.\n"
    "OSError: [Errno 9] Bad file descriptor\n"
)


@pytest.mark.parametrize(
    ("log", "code", "line", "remedy"),
    [
        (WRAPPED, 1, "ValueError: kl.estimator='k9': did you mean 'k2'?", "kl block"),
        (WORKER_DIED, 1, "RuntimeError: kl_head was never called", "log"),
        (
            "(WorkerDict pid=3) RuntimeError: verl 0.9.1 computed its loss without calling kl_plugins' KL head\n"
            + WRAPPED,
            1,
            "without calling kl_plugins' KL head",
            "not active in the worker",
        ),
        (
            "(WorkerDict pid=3) ValueError: logp is not finite at 2 of 6 unmasked tokens, first at [0, 3]: nan\n"
            + WRAPPED,
            1,
            "first at [0, 3]",
            "learning rate",
        ),
        (UNBORN, 1, "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/reward.py'", "path"),
        (
            "(TaskRunnerV1 pid=9) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.\n" + WORKER_DIED,
            1,
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.",
            "micro-batch",
        ),
        (
            "OSError: [Errno 98] Address already in use\n" + WRAPPED,
            1,
            "OSError: [Errno 98] Address already in use",
            "port",
        ),
        (
            HYDRA + "ValueError: Total available GPUs 0 is less than total desired GPUs 8\n",
            1,
            "ValueError: Total available GPUs 0 is less than total desired GPUs 8",
            "--profile cpu",
        ),
        (
            "(autoscaler +1m) Error: No available node types can fulfill resource request {'GPU': 8.0}.\n",
            None,
            "Error: No available node types can fulfill resource request {'GPU': 8.0}.",
            "no more devices",
        ),
        (
            "\x1b[33m(raylet)\x1b[0m The node has been marked dead because it missed too many heartbeats\n",
            None,
            "The node has been marked dead",
            "other work",
        ),
        (
            HYDRA + "Exception: The current node timed out during startup. This could happen because …\n\nSet the …\n",
            1,
            "Exception: The current node timed out during startup.",
            "other work",
        ),
        (HYDRA + "Exception: something else\n\nSet the …\n", 1, "Exception: something else", "log"),
        (
            HYDRA + "hydra.errors.InstantiationException: Error in call to target 'verl.workers.config.X':\n"
            "TypeError(\"X.__init__() got an unexpected keyword argument 'ki'\")\nfull_key: a\n",
            1,
            "unexpected keyword argument 'ki'",
            "not known to the framework",
        ),
        (
            "Traceback (most recent call last):\nModuleNotFoundError: No module named 'mathruler'\n",
            1,
            "ModuleNotFoundError: No module named 'mathruler'",
            "Install",
        ),
        ("step 1\n", -9, "signal 9", "memory"),
        ("one\ntwo\n\n", None, "last line of the log: two", "log"),
        ("", None, "empty", "log"),
    ],
)
def test_cause(tmp_path, log, code, line, remedy):
    path = tmp_path / "log.txt"
    path.write_text(log)
    cause = diagnose(path, code)
    assert line in cause.line
    assert remedy in cause.remedy
    assert "\x1b" not in cause.line
    assert not cause.line.startswith("(")


def test_only_the_end_of_a_long_log_is_read(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("KeyError: 'old'\n" + "x" * (5 << 20) + "\nValueError: new\n")
    assert diagnose(path, 1).line == "ValueError: new"


def test_what_was_logged_while_being_ended_is_no_cause(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("waiting for vLLM\n")
    size = path.stat().st_size
    with open(path, "a") as file:
        file.write("RuntimeError: raylet is gone\n")
    assert diagnose(path, None, size).line == "last line of the log: waiting for vLLM"


def test_the_first_error_is_told_if_it_is_another(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("(A pid=1) ValueError: first\n" + HYDRA + "KeyError: 'second'\n")
    cause = diagnose(path, 1)
    assert (cause.line, cause.first) == ("KeyError: 'second'", "ValueError: first")
    path.write_text(HYDRA + "KeyError: 'second'\n")
    assert diagnose(path, 1).first == ""
