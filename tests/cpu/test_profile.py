"""The cpu profile over each recipe, composed by Hydra: sizes that divide, and an algorithm left as it was."""

import dataclasses

import pytest

from kl_plugins import KLConfig
from kl_plugins.launch.plan import package_folder
from kl_plugins.launch.recipes import recipes_dir
from kl_plugins.schedule import PARTS, Schedule, read_block

pytestmark = pytest.mark.skipif(package_folder("verl") is None, reason="needs verl's environment")

RECIPES = ("grpo_k2", "grpo_k3", "ppo_k1_in_reward")


@pytest.fixture
def compose(monkeypatch):
    import hydra
    from omegaconf import OmegaConf

    monkeypatch.setenv("KL_PLUGINS_CPU_DATA", "/demo")
    folder = package_folder("verl") / "trainer" / "config"

    def make(recipe, *overrides):
        with hydra.initialize_config_dir(str(recipes_dir() / "verl"), version_base=None):
            config = hydra.compose(recipe, [f"hydra.searchpath=[file://{folder}]", *overrides])
        return OmegaConf.to_container(config, resolve=True)

    return make


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("profile", ["cpu", "node"])
def test_a_profile_leaves_the_algorithm_alone(compose, recipe, profile):
    plain, laid_over = compose(recipe), compose(recipe, f"+profile={profile}")
    assert laid_over["kl"] == plain["kl"]
    assert laid_over["algorithm"] == plain["algorithm"]
    for key in ("policy_loss", "use_kl_loss", "kl_loss_type", "kl_loss_coef", "entropy_coeff", "clip_ratio"):
        assert laid_over["actor_rollout_ref"]["actor"][key] == plain["actor_rollout_ref"]["actor"][key]
    assert laid_over["actor_rollout_ref"]["rollout"]["temperature"] == 1.0


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_micro_batch_of_the_cpu_profile_divides(compose, recipe):
    config = compose(recipe, "+profile=cpu")
    actor, ref, rollout = (config["actor_rollout_ref"][k] for k in ("actor", "ref", "rollout"))
    batch = config["data"]["train_batch_size"] * rollout["n"]
    mini_batch = actor["ppo_mini_batch_size"] * rollout["n"]
    assert batch % mini_batch == 0
    assert batch // mini_batch > 1  # the demo is off-policy within a step
    for whole, micro in (
        (mini_batch, actor["ppo_micro_batch_size_per_gpu"]),
        (batch, ref["log_prob_micro_batch_size_per_gpu"]),
        (batch, rollout["log_prob_micro_batch_size_per_gpu"]),
        (mini_batch, config["critic"]["ppo_micro_batch_size_per_gpu"]),
        (batch, config["critic"]["forward_micro_batch_size_per_gpu"]),
    ):
        assert whole % micro == 0
    assert rollout["max_model_len"] >= config["data"]["max_prompt_length"] + config["data"]["max_response_length"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_kl_block_has_every_axis(compose, recipe):
    """So that each is an ordinary override, without Hydra's plus sign."""
    config = compose(recipe)
    assert set(config["kl"]) == {f.name for f in dataclasses.fields(KLConfig)} | set(PARTS)
    for part, cls in PARTS.items():
        assert set(config["kl"][part]) == {f.name for f in dataclasses.fields(cls)}
    kl, schedule = read_block(config["kl"])
    assert schedule == Schedule()  # the values written out are the defaults
    assert config["actor_rollout_ref"]["actor"]["policy_loss"]["kl"] == config["kl"]
    if recipe == "ppo_k1_in_reward":
        expected = KLConfig(estimator="k1", placement="reward")
    else:
        expected = KLConfig(estimator=recipe.removeprefix("grpo_"), correction="clip")
    assert kl == expected


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_papers_settings(compose, recipe):
    config = compose(recipe)
    actor, rollout = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]
    assert (config["data"]["train_batch_size"], rollout["n"]) == (32, 8)
    assert actor["ppo_mini_batch_size"] * rollout["n"] == 256
    assert (rollout["temperature"], actor["entropy_coeff"]) == (1.0, 0)
    if recipe.startswith("grpo"):
        assert actor["kl_loss_coef"] == 0.5
