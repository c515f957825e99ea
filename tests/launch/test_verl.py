"""The plan for verl: composed by the real Hydra from verl's real configuration, nothing started."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kl_plugins import estimators
from kl_plugins.launch.plan import LaunchError
from kl_plugins.launch.recipes import find_recipe, recipes_dir
from kl_plugins.launch.run import make_plan

pytestmark = pytest.mark.usefixtures("verl")


@pytest.fixture
def plan(tmp_path):
    def make(recipe="verl/grpo_k2", *native, profile="cpu", **more):
        return make_plan(find_recipe(str(recipe)), profile=profile, native=native, out=tmp_path / "out", **more)

    return make


def test_axes_steps_and_folders_reach_the_configuration(plan, tmp_path):
    made, sentence = plan("verl/grpo_k3", kl={"estimator": "k2", "correction": "clip", "credit": "return"}, steps=4)
    config = yaml.safe_load(made.config)
    assert made.kl == config["actor_rollout_ref"]["actor"]["policy_loss"]["kl"] == config["kl"]
    assert (made.kl["estimator"], made.kl["correction"], made.kl["credit"]) == ("k2", "clip", "return")
    assert made.steps == config["trainer"]["total_training_steps"] == 4
    assert config["trainer"]["default_local_dir"] == str(tmp_path / "out" / "checkpoints")
    assert config["data"]["train_files"].startswith(str(tmp_path / "cache"))
    assert "(70)" in sentence
    assert "return credit" in sentence


def test_the_command_is_verls_own(plan):
    made, _ = plan(steps=4)
    assert made.argv[:3] == [sys.executable, "-m", "verl.trainer.main_ppo"]
    folder = made.argv[made.argv.index("--config-dir") + 1]
    assert (Path(folder) / f"{made.argv[made.argv.index('--config-name') + 1]}.yaml").is_file()
    assert {"+profile=cpu", "trainer.total_training_steps=4"} <= set(made.argv)


def test_the_native_override_wins(plan):
    made, _ = plan(
        "verl/grpo_k2", "trainer.total_training_steps=7", "kl.estimator=k3", kl={"estimator": "mse"}, steps=4
    )
    assert made.steps == 7
    assert made.kl["estimator"] == "k3"


def test_checkpoints_and_resume(plan, tmp_path):
    with pytest.raises(LaunchError, match="no checkpoint in .*out/checkpoints: check --out"):
        plan(resume=True)
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    (tmp_path / "out" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")
    made, _ = plan(resume=True, save_every=2)
    trainer = yaml.safe_load(made.config)["trainer"]
    assert (trainer["resume_mode"], trainer["save_freq"]) == ("auto", 2)


def test_the_schedule_is_checked_before_anything_starts(plan):
    made, sentence = plan("verl/grpo_k2", "kl.controller.kind=log", "kl.controller.target=0.1")
    assert made.kl["controller"]["kind"] == "log"
    assert sentence.endswith("Beta is moved to a KL of 0.1 nats a token (log-space, gain 0.1).")
    with pytest.raises(LaunchError, match="kl.controller.target=0 must be > 0"):
        plan("verl/grpo_k2", "kl.controller.kind=log", "kl.controller.target=0")
    with pytest.raises(LaunchError, match="did you mean kl.reference.reset_every"):
        plan("verl/grpo_k2", "kl.reference.reset_each=3")


def test_verl_composes_the_same(plan, tmp_path):
    """What verl's entry point prints for the command is what config.yaml says."""
    made, _ = plan("verl/grpo_k2", "trainer.project_name='a b'", kl={"report": "k3"}, steps=4)
    env = {"PATH": "", "HOME": str(tmp_path), **made.env}
    printed = subprocess.run(
        [*made.argv, "--cfg", "job", "--resolve"], env=env, capture_output=True, text=True, timeout=240
    )
    assert printed.returncode == 0, printed.stderr
    shown = printed.stdout[printed.stdout.index("model_engine:") :]
    assert yaml.safe_load(shown) == yaml.safe_load(made.config)


@pytest.mark.parametrize(
    ("native", "says"),
    [
        ("actor.kl_estimator=k2", r"actor\.kl_estimator: no such key.*did you mean kl\.estimator"),
        ("kl.estimater=k2", r"did you mean kl\.estimator"),
        ("actor_rollout_ref.actor.ki_loss_coef=1", r"did you mean actor_rollout_ref\.actor\.kl_loss_coef\?"),
        ("model_engine=megatro", "model_engine=megatro: did you mean megatron"),
        ("a=b=c", "a=b=c: .*KEY=VALUE"),
        ("--trainer.nnodes", "--trainer.nnodes: no option"),
        ("data.train_files=/no/such.parquet", "data.train_files: no file /no/such.parquet"),
        ("trainer.nnodes=${no.such}", "no.such"),
        ("actor_rollout_ref.actor.policy_loss.kl=null", "verl's own KL would train"),
    ],
)
def test_refused(plan, native, says):
    with pytest.raises(LaunchError, match=says) as refusal:
        plan("verl/grpo_k2", native)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("kl", "says"),
    [
        ({"estimator": "k22"}, "did you mean.*k2"),
        ({"estimator": "k1"}, "allow_vacuous"),
        ({"correction": "clipp"}, "did you mean 'clip'"),
        ({"clip_low": "much"}, "clip_low"),
    ],
)
def test_refused_by_the_rules_of_the_kl(plan, kl, says):
    with pytest.raises(LaunchError, match=says):
        plan(kl=kl)


def test_node_profile_wants_data(plan):
    with pytest.raises(LaunchError, match=r"data\.train_files"):
        plan(profile="node")
    made, _ = plan(profile="node", dry_run=True)  # the command may be for another machine
    assert made.env["VERL_USE_EXTERNAL_MODULES"] == "kl_plugins.verl"
    assert made.prepare is None


def test_the_step_file_is_always_asked_for(plan):
    made, _ = plan("verl/grpo_k2", "trainer.logger=[console,wandb]")
    assert made.argv[-1] == "trainer.logger=[console,wandb,file]"
    assert yaml.safe_load(made.config)["trainer"]["logger"] == ["console", "wandb", "file"]


def test_a_recipe_of_ones_own(plan, tmp_path):
    mine = tmp_path / "my recipe.yaml"
    mine.write_text("# mine\ndefaults: [grpo_k2, _self_]\nkl: {credit: sequence}\n")
    made, _ = plan(mine)
    assert made.kl["credit"] == "sequence"
    assert f"file://{recipes_dir() / 'verl'}" in " ".join(made.argv)


def test_modules_of_the_users_own_stay(plan, monkeypatch, tmp_path):
    (tmp_path / "my_kl.py").write_text(
        "from kl_plugins import KLEstimator, register_estimator\n"
        "@register_estimator('mine')\n"
        "class Mine(KLEstimator):\n"
        "    objective = 'something of mine'\n"
        "    citation = 'me'\n"
        "    value = coefficient = lambda self, logp, ref_logp: logp - ref_logp\n"
    )
    monkeypatch.setattr(estimators, "_REGISTRY", dict(estimators._REGISTRY))
    with pytest.raises(LaunchError, match="mine"):
        plan(kl={"estimator": "mine"})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "my_kl")
    made, sentence = plan(kl={"estimator": "mine"})
    assert made.env["VERL_USE_EXTERNAL_MODULES"] == "kl_plugins.cpu.verl,kl_plugins.verl,my_kl"
    assert "something of mine" in sentence
