import pytest

from kl_plugins.launch.plan import LaunchError, nearest_key
from kl_plugins.launch.recipes import find_recipe, framework_of, list_recipes, recipes_dir


def test_the_list_is_complete_and_says_what_each_is():
    recipes = list_recipes()
    names = [recipe.name for recipe in recipes]
    files = sorted(p for framework in ("verl", "openrlhf") for p in (recipes_dir() / framework).glob("*.yaml"))
    assert len(names) == len(set(names)) == len(files) > 0
    for recipe in recipes:
        assert len(recipe.summary) > 20, recipe.name
        assert {"cpu", "node"} <= recipe.profiles().keys()


def test_by_name_and_by_path():
    by_name = find_recipe("verl/grpo_k2")
    assert by_name.framework == "verl"
    assert find_recipe(str(by_name.path)).path == by_name.path


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("verl/grpo_k22", "verl/grpo_k2"),
        ("verl/gpro_k2", "did you mean verl/grpo_k2"),
        ("grpo_k2", "verl/grpo_k2"),
        ("nothing/like/it", "known: "),
        ("no/such/file.yaml", "no such file"),
    ],
)
def test_unknown(text, hint):
    with pytest.raises(LaunchError, match=hint):
        find_recipe(text)


def test_unknown_profile():
    with pytest.raises(LaunchError, match="did you mean cpu"):
        find_recipe("verl/grpo_k2").profile("gpu")


@pytest.mark.parametrize(
    ("content", "framework"),
    [
        ("defaults: [grpo_k2, _self_]", "verl"),
        ("actor_rollout_ref: {rollout: {n: 4}}", "verl"),
        ("algo: {kl: {use_loss: true}}", "openrlhf"),
    ],
)
def test_framework_by_content(tmp_path, content, framework):
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    assert framework_of(path) == framework


@pytest.mark.parametrize(("content", "says"), [("a: 1", "neither"), ("a: [", "not YAML")])
def test_framework_unknown(tmp_path, content, says):
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(LaunchError, match=says):
        framework_of(path)


@pytest.mark.parametrize(
    ("key", "best"),
    [
        ("actor.kl_estimator", "kl.estimator"),
        ("kl.estimater", "kl.estimator"),
        ("actor_rollout_ref.actor.ki_loss_coef", "actor_rollout_ref.actor.kl_loss_coef"),
        ("actor.kl_loss_coef", "actor_rollout_ref.actor.kl_loss_coef"),
        ("trainer.total_steps", "trainer.total_training_steps"),
    ],
)
def test_nearest_key(key, best):
    known = [
        "kl.estimator",
        "kl.correction",
        "actor_rollout_ref.actor.kl_loss_coef",
        "actor_rollout_ref.actor.use_kl_loss",
        "trainer.total_training_steps",
        "trainer.nnodes",
    ]
    assert nearest_key(key, known).startswith(f"did you mean {best}")


def test_nothing_near():
    assert nearest_key("zzz", ["kl.estimator"]) == ""
