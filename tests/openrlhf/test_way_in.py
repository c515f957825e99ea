"""The hook, the runtime env, the import machinery, the drift check: everything before a training step."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kl_plugins.openrlhf import hook
from kl_plugins.openrlhf.main import merged_runtime_env

OPENRLHFS = {"env_vars": {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN"}}


def python(code, **environ):
    """Run ``code`` in a fresh interpreter with the CPU profile's variables."""
    from kl_plugins.cpu import OPENRLHF_ENV

    environ = {**os.environ, **OPENRLHF_ENV, **environ}
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300)


def test_hook_is_light():
    code = f"import sys; from {hook.HOOK.rpartition('.')[0]} import setup; setup(); print(*sys.modules)"
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "deepspeed", "ray", "vllm", "openrlhf"} & set(done.stdout.split())


@pytest.mark.parametrize("text", ["{estimator: k2}", "[1]"])
def test_hook_refuses_a_config_that_is_none(monkeypatch, text):
    monkeypatch.setenv(hook.CONFIG, text)
    with pytest.raises(ValueError, match=r'expected such as \{"estimator": "k2"\}'):
        hook.setup()


def test_hook_twice_wraps_once(runs):
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
    from openrlhf.trainer.ray import ppo_actor

    hook.setup()
    hook.setup()
    step = ppo_actor.ActorPPOTrainer.training_step
    assert not hasattr(step.__wrapped__, "__wrapped__")
    assert RemoteExperienceMaker.make_experience._kl_plugins


def test_runtime_env_outside_a_job():
    merged = merged_runtime_env(OPENRLHFS, {}, {"KL_PLUGINS_METRICS": "m", "HOME": "/"})
    assert merged == {
        "env_vars": {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN", "KL_PLUGINS_METRICS": "m"},
        "worker_process_setup_hook": hook.HOOK,
    }
    assert OPENRLHFS["env_vars"].keys() == {"TOKENIZERS_PARALLELISM", "NCCL_DEBUG"}


def test_runtime_env_gives_way_to_the_jobs():
    job = {
        "env_vars": {"TOKENIZERS_PARALLELISM": "false", "KL_PLUGINS_METRICS": "m"},
        "worker_process_setup_hook": hook.HOOK,
    }
    merged = merged_runtime_env(OPENRLHFS, job, {"KL_PLUGINS_METRICS": "m"})
    assert merged == {"env_vars": {"NCCL_DEBUG": "WARN"}}


def test_another_hook_is_refused():
    with pytest.raises(RuntimeError, match=rf"already mine.setup: .* Call {hook.HOOK}\(\) from it"):
        merged_runtime_env(OPENRLHFS, {"worker_process_setup_hook": "mine.setup"}, {})


def test_after_import_runs_late_and_once(tmp_path, monkeypatch):
    from kl_plugins.post_import import after_import

    (tmp_path / "kl_late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []

    def action(module):
        seen.append(module.value)
        module.value += 1

    after_import("kl_late", action)
    after_import("kl_late", action)
    assert seen == []
    import kl_late

    after_import("kl_late", action)
    assert (seen, kl_late.value) == ([1], 2)
    monkeypatch.delitem(sys.modules, "kl_late")


def test_a_failing_action_fails_the_import(tmp_path, monkeypatch):
    from kl_plugins.post_import import after_import

    def action(module):
        raise ImportError("not with me")

    (tmp_path / "kl_refused.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    after_import("kl_refused", action)
    with pytest.raises(ImportError, match="not with me"):
        __import__("kl_refused")
    assert "kl_refused" not in sys.modules


def test_a_changed_openrlhf_fails_the_import():
    """The real module with one function's body changed: refused by name, unless the switch is on."""
    code = """
import openrlhf.models.utils as utils
from kl_plugins.openrlhf import hook
def compute_approx_kl(log_probs, log_probs_base, log_probs_old=None, kl_estimator="k1", unbiased_gradient=False):
    return (log_probs - log_probs_base) ** 2 / 2
utils.compute_approx_kl = compute_approx_kl
hook.setup()
import openrlhf.trainer.ray.ppo_actor
print("imported")
"""
    prelude = "from kl_plugins.cpu import openrlhf; openrlhf.install()\n"
    done = python(prelude + code)
    assert done.returncode == 1
    for part in ("DriftError", "0.11.2", "openrlhf.models.utils:compute_approx_kl", "KL_PLUGINS_ALLOW_UNKNOWN=1"):
        assert part in done.stderr
    done = python(prelude + code, KL_PLUGINS_ALLOW_UNKNOWN="1")
    assert done.stdout.endswith("imported\n"), done.stderr[-2000:]


def arguments(**kl):
    native = dict(use_loss=True, unbiased_gradient=False, init_coef=0.1, target=None, horizon=10000) | kl
    ds = SimpleNamespace(lora=SimpleNamespace(rank=kl.get("lora", 0)), tensor_parallel_size=1, load_in_4bit=False)
    advantage = SimpleNamespace(estimator="group_norm")
    return SimpleNamespace(algo=SimpleNamespace(kl=SimpleNamespace(**native), advantage=advantage), ds=ds)


LOG = {"kind": "log", "target": 0.1}


@pytest.mark.parametrize(
    ("config", "native", "says"),
    [
        ({"estimator": "k2"}, {"use_loss": False}, "add or drop --algo.kl.use_loss"),
        ({"estimator": "k1", "placement": "reward"}, {}, "add or drop --algo.kl.use_loss"),
        ({"estimator": "k2"}, {"unbiased_gradient": True}, "unbiased_gradient replaces the gradient"),
        ({"estimator": "k2"}, {"init_coef": 0.0}, "starts no reference model"),
        ({"estimater": "k2"}, {}, "did you mean 'estimator'"),
        ({"estimator": "k1"}, {}, "pure noise"),
        ({"estimator": "k2"}, {"target": 0.0}, "algo.kl.target=0.0, .* takes a target of 0 for none"),  # case 22
        ({"estimator": "k2"}, {"target": 0.1, "horizon": 0}, "algo.kl.horizon=0"),
        ({"estimator": "k2", "controller": LOG}, {"target": 0.1}, "two controllers of one coefficient"),
        ({"estimator": "k2", "controller": LOG}, {"init_coef": 11.0}, "beta starts at 11.0, outside"),
        ({"estimator": "none", "reference": {"reset_every": 2}}, {"init_coef": 0.0}, "starts no reference model"),
        ({"estimator": "k2", "reference": {"reset_every": 2}}, {"lora": 8}, "--ds.lora.rank 8 rules out"),
        ({"estimator": "k2", "reference": {"reset_each": 2}}, {}, "did you mean 'reset_every'"),
    ],
)
def test_variable_that_contradicts_openrlhf(monkeypatch, config, native, says):
    from kl_plugins.openrlhf.settings import Settings

    monkeypatch.setenv(hook.CONFIG, json.dumps(config))
    with pytest.raises(ValueError, match=says):
        Settings.of(arguments(**native))


def test_variable(monkeypatch):
    from kl_plugins.openrlhf.settings import Settings
    from kl_plugins.schedule import Controller, Reference, Schedule

    assert Settings.of(arguments()) == Settings()
    monkeypatch.setenv(hook.CONFIG, '{"estimator": "k3", "std_min": 0.1}')
    settings = Settings.of(arguments())
    assert (settings.kl.estimator, settings.std_min, settings.std_max) == ("k3", 0.1, None)
    block = {"estimator": "k2", "controller": LOG, "reference": {"reset_every": 3}}
    monkeypatch.setenv(hook.CONFIG, json.dumps(block))
    assert Settings.of(arguments()).schedule == Schedule(Controller("log", 0.1), Reference(3))
    monkeypatch.setenv(hook.CONFIG, '{"std_max": 2.0}')
    assert Settings.of(arguments()) == Settings(std_max=2.0)
    wrong = arguments()
    wrong.algo.advantage.estimator = "rloo"
    with pytest.raises(ValueError, match="choose group_norm"):
        Settings.of(wrong)
