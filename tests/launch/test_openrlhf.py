"""The plan for OpenRLHF: checked by its real parser, nothing started."""

import pytest
import yaml

from kl_plugins.launch.openrlhf import _nested
from kl_plugins.launch.plan import LaunchError
from kl_plugins.launch.recipes import find_recipe
from kl_plugins.launch.run import make_plan


@pytest.fixture
def plan(openrlhf, tmp_path):
    def make(*native, **more):
        recipe = find_recipe("openrlhf/grpo_k2")
        return make_plan(recipe, profile="cpu", native=list(native), out=tmp_path / "out", **more)

    return make


def test_axes_steps_and_overrides_reach_the_command(plan, tmp_path):
    made, sentence = plan("actor.adam.lr=2e-6", kl={"correction": "clip", "clip_low": "1e-1"}, steps=3)
    config = yaml.safe_load(made.config)
    assert config["actor"]["adam"]["lr"] == 2e-6
    assert config["ckpt"]["output_dir"] == str(tmp_path / "out" / "model")
    assert (made.kl["estimator"], made.kl["correction"], made.kl["clip_low"]) == ("k2", "clip", 0.1)
    assert made.argv[1:3] == ["-m", "kl_plugins.openrlhf.main"]
    assert made.steps == 3
    assert "(70)" in sentence


def test_checkpoints_and_resume(plan, tmp_path):
    with pytest.raises(LaunchError, match="no checkpoint in .*out/checkpoints/_actor: check --out"):
        plan(resume=True)
    (tmp_path / "out" / "checkpoints" / "_actor").mkdir(parents=True)
    (tmp_path / "out" / "checkpoints" / "_actor" / "latest").write_text("global_step4")
    made, _ = plan(resume=True, save_every=2)
    ckpt = yaml.safe_load(made.config)["ckpt"]
    assert (ckpt["load_enable"], ckpt["save_steps"]) == (True, 2)


@pytest.mark.parametrize(
    ("native", "says"),
    [
        (["actor.adam.lrr=1"], "did you mean.*actor.adam.lr"),
        (["--actor.adam.lrr", "1"], "did you mean.*--actor.adam.lr"),
        (["kl.estimater=k2"], "did you mean.*kl.estimator"),
        (["kl.estimator=k22"], "did you mean.*k2"),
        (["kl.controller.kind=log"], "kl.controller.target=None must be > 0"),
    ],
)
def test_refused(plan, native, says):
    with pytest.raises(LaunchError, match=says):
        plan(*native)


def test_words_as_a_recipe():
    words = ["--a.b", "1", "--a.c", "x", "y", "--d", "--kl_clip_low", "1e-1", "--kl_estimator", "k2", "--e.f=-2"]
    assert _nested(words) == {
        "a": {"b": 1, "c": ["x", "y"]},
        "d": True,
        "kl": {"clip_low": 0.1, "estimator": "k2"},
        "e": {"f": -2},
    }
