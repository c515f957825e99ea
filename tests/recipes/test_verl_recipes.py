"""Every verl recipe under every profile, through Hydra and verl's own configuration classes and checks."""

import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from kl_plugins.launch.plan import package_folder
from kl_plugins.launch.recipes import recipes_dir

if package_folder("verl") is None:
    pytest.skip("needs verl's environment", allow_module_level=True)

import kl_plugins.verl  # noqa: F401  (its checks are part of validate_config from here on)
from kl_plugins.launch.verl import compose

FOLDER = recipes_dir() / "verl"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
PROFILES = [None, *sorted(path.stem for path in (FOLDER / "profile").glob("*.yaml")), "[cluster,megatron]"]
PAPER = ["paper_1p5b", "paper_7b"]


@pytest.fixture
def load(tiny, monkeypatch):
    """``load(recipe, profile, *overrides)``: the configuration that verl's entry point gets, with a model at hand."""
    monkeypatch.setenv("KL_PLUGINS_CPU_DATA", str(tiny))

    def load(recipe, profile, *overrides, model=True):
        words = [f"actor_rollout_ref.model.path={tiny}/model", f"critic.model.path={tiny}/model"] if model else []
        words += [f"+profile={profile}"] if profile else []
        return compose(FOLDER / f"{recipe}.yaml", [*words, *overrides])

    return load


def accept(config):
    """What verl's driver and workers make of it before a GPU is touched; returns actor, rollout and model."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils import config as verl_config

    OmegaConf.to_container(config, resolve=True)
    verl_config.validate_config(config, need_reference_policy(config), need_critic(config))
    part = config.actor_rollout_ref
    return [verl_config.omega_conf_to_dataclass(node) for node in (part.actor, part.rollout, part.model)]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_accepted(load, recipe, profile):
    config = load(recipe, profile)
    actor, rollout, _ = accept(config)
    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    of_one_model = actor.engine.tensor_model_parallel_size if actor.strategy == "megatron" else 1
    assert actor.ppo_mini_batch_size * rollout.n % (gpus // of_one_model) == 0
    assert gpus % rollout.tensor_model_parallel_size == 0
    assert config.actor_rollout_ref.ref.strategy == config.critic.strategy == actor.strategy
    if recipe in PAPER:
        check_paper_setting(config, actor, rollout, sizes=profile != "cpu")


def check_paper_setting(config, actor, rollout, sizes):
    """The paper's numbers; the cpu profile has its own sizes of batch and text."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    assert (actor.kl_loss_coef, actor.use_kl_loss, actor.kl_loss_type) == (0.5, True, "kl_plugins")
    assert not config.algorithm.use_kl_in_reward
    assert (config.algorithm.adv_estimator, rollout.n) == ("grpo", 8)
    assert (rollout.temperature, rollout.top_p, rollout.top_k, actor.entropy_coeff) == (1.0, 1.0, -1, 0)
    kl = actor.policy_loss.kl
    assert (kl.estimator, kl.placement, kl.form) == ("k2", "loss", "decoupled")
    assert (kl.correction, kl.credit) == ("none", "token")
    assert need_reference_policy(config)
    assert not need_critic(config)
    if sizes:
        assert config.data.train_batch_size == 32
        assert (actor.ppo_mini_batch_size * rollout.n, actor.ppo_epochs) == (256, 1)
        assert rollout.prompt_length + rollout.response_length == 4096


@pytest.mark.parametrize("recipe", PAPER)
def test_models(load, recipe):
    config = load(recipe, "cluster", model=False)
    size = {"paper_1p5b": "1.5B", "paper_7b": "7B"}[recipe]
    assert config.actor_rollout_ref.model.path == f"Qwen/Qwen2.5-Math-{size}"
    assert config.trainer.experiment_name == f"{recipe}_k2"


@pytest.mark.parametrize("estimator", ["none", "k1", "k2", "k3"])
def test_one_flag_chooses_the_estimator(load, estimator):
    from verl.trainer.ppo.utils import need_reference_policy

    config = load("paper_1p5b", "node", f"kl.estimator={estimator}")
    actor, _, _ = accept(config)
    assert actor.policy_loss.kl.estimator == estimator
    assert need_reference_policy(config)  # also without a pull, to log the KL


def test_the_command_has_the_flag():
    from kl_plugins.cli import app

    words = ["run", "verl/paper_1p5b", "--profile", "megatron", "--kl_estimator", "k1", "--dry-run"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "kl.estimator=k1" in result.output
    assert "+profile=megatron" in result.output


@pytest.mark.parametrize("profile", ["node", "cluster"])
def test_fsdp2_engines(load, profile):
    config = load("paper_7b", profile)
    actor, rollout, model = accept(config)
    assert (actor.strategy, actor.engine.strategy, config.critic.strategy) == ("fsdp2", "fsdp2", "fsdp2")
    assert model.hf_config._attn_implementation == "flash_attention_2"
    assert model.use_remove_padding
    assert (rollout.name, rollout.tensor_model_parallel_size) == ("vllm", 2)
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == ({"node": 1, "cluster": 2}[profile], 8)


@pytest.mark.parametrize(("profile", "nodes"), [("megatron", 1), ("[cluster,megatron]", 2)])
def test_megatron_engine(load, profile, nodes):
    config = load("paper_7b", profile)
    actor, rollout, _ = accept(config)
    assert type(actor).__name__ == "McoreActorConfig"
    assert actor.engine.tensor_model_parallel_size == 2
    assert config.actor_rollout_ref.ref.megatron.tensor_model_parallel_size == 2
    assert actor.engine.override_transformer_config["attention_backend"] == "flash"
    assert rollout.tensor_model_parallel_size == 2
    assert config.trainer.nnodes == nodes


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.use_kl_in_reward=true", "use_kl_in_reward"),
        ("actor_rollout_ref.actor.loss_agg_mode=token-men", "loss_agg_mode"),
    ],
)
def test_checks_are_alive(load, override, message):
    from hydra.errors import InstantiationException

    with pytest.raises((ValueError, InstantiationException), match=message):
        accept(load("paper_1p5b", "node", override))


def test_native_entry_point_composes_the_same(load):
    """verl's own command, given the folder and the name, sees what the other tests see."""
    from omegaconf import OmegaConf

    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-dir", str(FOLDER), "--config-name", "paper_7b"]
    command += ["+profile=[cluster,megatron]", "kl.estimator=k3", "--cfg", "job", "--resolve"]
    native = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert native.returncode == 0, native.stderr[-3000:]
    printed = native.stdout[native.stdout.index("model_engine:") :]
    config = load("paper_7b", "[cluster,megatron]", "kl.estimator=k3", model=False)
    assert yaml.safe_load(printed) == yaml.safe_load(OmegaConf.to_yaml(config, resolve=True))


def test_reward_is_found_by_verl(load):
    pytest.importorskip("math_verify")
    from verl.trainer.ppo.reward import get_custom_reward_fn

    score = get_custom_reward_fn(load("paper_1p5b", "node"))
    answer = "<think>twice 21</think> \\boxed{42}"
    assert score(data_source="any", solution_str=answer, ground_truth="42", extra_info={})["score"] == 2.0
