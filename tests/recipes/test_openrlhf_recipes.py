"""Every OpenRLHF recipe under every profile, through OpenRLHF's own parser and the checks of its script."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from kl_plugins.launch.plan import package_folder
from kl_plugins.launch.recipes import recipes_dir
from kl_plugins.openrlhf.command import merge, native_command

if package_folder("openrlhf") is None:
    pytest.skip("needs OpenRLHF's environment", allow_module_level=True)

FOLDER = recipes_dir() / "openrlhf"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
PROFILES = [None, *sorted(path.stem for path in (FOLDER / "profile").glob("*.yaml"))]
PAPER = ["paper_1p5b", "paper_7b"]
# What the other recipes leave to the user.
GIVEN = {"data": {"prompt_dataset": "PROMPTS.jsonl"}, "reward": {"remote_url": "REWARD.py"}}


def settings(recipe, profile=None, **kl):
    merged = yaml.safe_load((FOLDER / f"{recipe}.yaml").read_text())
    if recipe not in PAPER:
        merged = merge(merged, GIVEN)
    if profile:
        merged = merge(merged, yaml.safe_load((FOLDER / "profile" / f"{profile}.yaml").read_text()))
    return merge(merged, {"kl": kl})


CASES = {(recipe, profile): settings(recipe, profile) for recipe in RECIPES for profile in PROFILES}
CASES |= {("paper_1p5b", e): settings("paper_1p5b", "node", estimator=e) for e in ("none", "k1", "k3")}
CASES["broken", "engines"] = merge(
    settings("paper_1p5b"), {"ds": {"packing_samples": True}, "vllm": {"num_engines": 0}}
)


@pytest.fixture(scope="module")
def reached(tmp_path_factory):
    """What OpenRLHF's script makes of each case: {"words": command line, "args": nested} or {"error": ...}."""
    folder = tmp_path_factory.mktemp("data")
    script = Path(__file__).with_name("openrlhf_script.py")
    child = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(list(CASES.values())),
        env=os.environ | {"KL_PLUGINS_CPU_DATA": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return dict(zip(CASES, json.loads(child.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_accepted(reached, recipe, profile):
    result = reached[recipe, profile]
    assert "error" not in result, result["error"]
    args = result["args"]
    gpus = args["actor"]["num_nodes"] * args["actor"]["num_gpus_per_node"]
    assert args["train"]["batch_size"] % (args["train"]["micro_batch_size"] * gpus) == 0
    assert args["rollout"]["batch_size"] * args["rollout"]["n_samples_per_prompt"] % args["train"]["batch_size"] == 0
    if args["train"]["colocate_all"]:
        # OpenRLHF asserts both once Ray runs.
        assert args["vllm"]["num_engines"] * args["vllm"]["tensor_parallel_size"] == gpus
        for role in ("ref", "critic", "reward"):
            assert args[role]["num_nodes"] * args[role]["num_gpus_per_node"] == gpus
    if recipe in PAPER:
        check_paper_setting(args, sizes=profile != "cpu")


def check_paper_setting(args, sizes):
    """The paper's numbers; the cpu profile has its own sizes of batch and text."""
    algo, kl = args["algo"], args["algo"]["kl"]["plugin"]
    assert (algo["kl"]["init_coef"], algo["kl"]["use_loss"]) == (0.5, True)
    assert (algo["advantage"]["estimator"], args["critic"]["model_name_or_path"]) == ("group_norm", None)
    rollout = args["rollout"]
    assert (rollout["batch_size"], rollout["n_samples_per_prompt"]) == (32, 8)
    assert (rollout["temperature"], rollout["top_p"], args["actor"]["entropy_coef"]) == (1.0, 1.0, 0.0)
    assert (kl["placement"], kl["form"], kl["correction"], kl["credit"]) == ("loss", "decoupled", "none", "token")
    if sizes:
        assert (args["train"]["batch_size"], args["train"]["max_epochs"]) == (256, 1)
        assert (args["data"]["max_len"], rollout["max_new_tokens"]) == (4096, 3072)


@pytest.mark.parametrize("recipe", PAPER)
def test_models(reached, recipe):
    args = reached[recipe, "cluster"]["args"]
    size = {"paper_1p5b": "1.5B", "paper_7b": "7B"}[recipe]
    assert args["actor"]["model_name_or_path"] == f"Qwen/Qwen2.5-Math-{size}"
    [reward] = args["reward"]["remote_url"]
    assert Path(reward).is_file()
    assert Path(reward).parts[-3:] == ("kl_plugins", "data", "reward.py")


def test_the_two_sizes_differ_in_the_model_alone():
    small, large = (settings(recipe) for recipe in PAPER)
    changed = {"actor": {"model_name_or_path": "Qwen/Qwen2.5-Math-7B"}, "rollout": {"micro_batch_size": 2}}
    assert merge(small, changed) == large


@pytest.mark.parametrize("estimator", ["none", "k1", "k3"])
def test_one_flag_chooses_the_estimator(reached, estimator):
    result = reached["paper_1p5b", estimator]
    assert "error" not in result, result["error"]
    check_paper_setting(result["args"], sizes=True)
    assert result["args"]["algo"]["kl"]["plugin"]["estimator"] == estimator
    assert reached["paper_1p5b", "node"]["args"]["algo"]["kl"]["plugin"]["estimator"] == "k2"


@pytest.mark.parametrize(("profile", "nodes"), [("node", 1), ("cluster", 2)])
def test_engines(reached, profile, nodes):
    args = reached["paper_7b", profile]["args"]
    ds, vllm = args["ds"], args["vllm"]
    assert (ds["zero_stage"], ds["attn_implementation"], ds["packing_samples"]) == (3, "flash_attention_2", True)
    assert (vllm["tensor_parallel_size"], vllm["enable_sleep"], args["train"]["colocate_all"]) == (2, True, True)
    assert (args["actor"]["num_nodes"], args["actor"]["num_gpus_per_node"]) == (nodes, 8)


def test_checks_are_alive(reached):
    assert "Only support `--packing_samples` with vLLM" in reached["broken", "engines"]["error"]


def test_native_command_is_what_was_checked(reached):
    command = native_command(settings("paper_7b"), ["--kl_estimator", "k3"])
    assert command == ["kl-openrlhf", *reached["paper_7b", None]["words"], "--kl_estimator", "k3"]


def test_the_command_has_the_flag():
    from kl_plugins.cli import app

    words = ["run", "openrlhf/paper_7b", "--profile", "cluster", "--kl_estimator", "k1", "--dry-run"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "--kl_estimator k1" in result.output
    assert "--vllm.num_engines 8" in result.output
