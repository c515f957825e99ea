"""What a submission sends: the package, the command, the environment; the cluster is in tests/e2e/test_submit.py."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from kl_plugins.cli import app
from kl_plugins.launch import submit, wheel
from kl_plugins.launch.plan import JOB, LaunchError, package_folder
from kl_plugins.launch.recipes import find_recipe, list_recipes
from kl_plugins.launch.run import make_plan

FRAMEWORK = "verl" if package_folder("verl") else "openrlhf"
OWN = {
    "verl": "defaults:\n  - grpo_k2\n  - extra\n  - _self_\n",
    "openrlhf": "kl: {estimator: k3}\nalgo: {kl: {init_coef: 0.1}, advantage: {estimator: group_norm}}\n"
    "actor: {model_name_or_path: some/model}\ndata: {prompt_dataset: p.jsonl}\nreward: {remote_url: r.py}\n"
    "rollout: {n_samples_per_prompt: 8}\n",
}[FRAMEWORK]
LOOK = """
import importlib.metadata as m, json, kl_plugins
from kl_plugins.launch.recipes import find_recipe, list_recipes
own = find_recipe("own/FRAMEWORK/mine.yaml")
print(json.dumps({
    "path": kl_plugins.__file__, "version": m.version("kl-plugins"), "names": [r.name for r in list_recipes()],
    "groups": sorted(e.group for e in m.distribution("kl-plugins").entry_points),
    "own": [own.framework, own.path.read_text(), sorted(own.profiles())],
}))
"""


@pytest.fixture
def own(tmp_path):
    recipe = tmp_path / "mine" / "mine.yaml"
    (recipe.parent / "profile").mkdir(parents=True)
    recipe.write_text(OWN)
    (recipe.parent / "extra.yaml").write_text("trainer: {project_name: extra}\n")
    (recipe.parent / "profile" / "small.yaml").write_text("# @package _global_\n{}\n")
    (recipe.parent / "notes.txt").write_text("stay")
    return recipe


def test_the_package_is_whole_where_ray_puts_it(own, tmp_path):
    """Ray unpacks either folder somewhere else, and puts both places on the path."""
    code, info = wheel.build(tmp_path / "cache", find_recipe(str(own)))
    for folder, place in ((code, tmp_path / "a"), (info, tmp_path / "b")):
        shutil.copytree(folder, place / folder.name)
    assert [path.name for path in (tmp_path / "a").rglob("notes.txt")] == []
    program = f"import sys; sys.path[:0] = {[str(tmp_path / 'a'), str(tmp_path / 'b')]}\n"
    look = LOOK.replace("FRAMEWORK", FRAMEWORK)
    # -S: nothing of this environment's site-packages, where the package is installed, too; torch is not needed.
    packages = f"sys.path.append({str(Path(yaml.__file__).parents[1])!r})\n"
    done = subprocess.run([sys.executable, "-S", "-c", program + packages + look], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["path"].startswith(str(tmp_path / "a"))
    assert {"verl.plugins", "vllm.general_plugins", "console_scripts"} <= set(said["groups"])
    assert said["names"] == [recipe.name for recipe in list_recipes()]
    assert said["own"][:2] == [FRAMEWORK, OWN]
    assert {"small", "cpu", "cluster"} <= set(said["own"][2])


def test_the_packages_name_is_its_content(own, tmp_path):
    plain = wheel.build(tmp_path / "cache")
    assert wheel.build(tmp_path / "cache") == plain
    before = wheel.build(tmp_path / "cache", find_recipe(str(own)))
    own.write_text(OWN + "# changed\n")
    after = wheel.build(tmp_path / "cache", find_recipe(str(own)))
    assert len({path.parent for path in (plain[0], before[0], after[0])}) == 3
    (own.parent / "huge.yaml").write_bytes(b"#" * (wheel.LIMIT + 1))
    with pytest.raises(LaunchError, match="give the recipe its own folder"):
        wheel.build(tmp_path / "cache", find_recipe(str(own)))


def test_the_command_composes_in_the_job_as_here(own, tmp_path, monkeypatch):
    """The job's words, read by `run` under the job's variables, give the configuration that the preflight looked at."""
    env = tmp_path / "env.yaml"
    env.write_text("env_vars: {MINE: 1}\nworking_dir: /somewhere\n")
    given = submit.read_runtime_env(env)
    job, _ = submit.make_job(
        find_recipe(f"{FRAMEWORK}/grpo_k2"),
        profile="cpu",
        kl={"credit": "return"},
        steps=3,
        out=tmp_path / "out",
        save_every=2,
        resume=True,
        limits={"timeout": None, "stall": 60.0},
        python="/a/python",
        given=given,
    )
    words = f"/a/python -m kl_plugins.cli run {FRAMEWORK}/grpo_k2 --profile cpu --steps 3 --out {tmp_path}/out"
    assert shlex.join(job.words) == f"{words} --save-every 2 --stall 60.0 --kl_credit return --resume"
    variables = job.runtime_env["env_vars"]
    assert job.runtime_env["working_dir"] == "/somewhere"
    assert variables["MINE"] == "1"
    assert variables["KL_PLUGINS_CPU"] == "1"
    assert "RAY_ADDRESS" not in variables
    assert "RAY_OVERRIDE_RESOURCES" not in variables
    if FRAMEWORK == "verl":
        assert variables["VERL_USE_EXTERNAL_MODULES"] == "kl_plugins.cpu.verl,kl_plugins.verl"
        assert "worker_process_setup_hook" not in job.runtime_env
    else:
        assert job.runtime_env["worker_process_setup_hook"] == "kl_plugins.openrlhf.hook.setup"
    for name, value in {**variables, JOB: "{}"}.items():
        monkeypatch.setenv(name, value)
    dry = CliRunner().invoke(app, [*job.words[3:], "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert dry.output.splitlines()[-1] == job.plan.shell().splitlines()[-1]
    assert "RAY_ADDRESS=" not in dry.output


def test_a_run_joins_the_ray_of_its_job_and_starts_its_own_elsewhere(tmp_path, monkeypatch):
    recipe = find_recipe(f"{FRAMEWORK}/grpo_k2")
    alone, _ = make_plan(recipe, profile="cpu", out=tmp_path, dry_run=True)
    assert alone.env["RAY_ADDRESS"] == "local"
    monkeypatch.setenv(JOB, "{}")
    joining, _ = make_plan(recipe, profile="cpu", out=tmp_path, dry_run=True)
    assert "RAY_ADDRESS" not in joining.env
    if FRAMEWORK == "verl":  # Ray refuses a number of GPUs where there is a cluster already
        told = [yaml.safe_load(plan.config)["ray_kwargs"]["ray_init"] for plan in (alone, joining)]
        assert [(ray["num_cpus"], ray["num_gpus"]) for ray in told] == [(16, 1), (None, None)]


def test_a_pasted_line_goes_where_it_says(tmp_path, monkeypatch):
    """RAY_ADDRESS in the shell would win over the line's --address."""
    job, _ = submit.make_job(find_recipe(f"{FRAMEWORK}/grpo_k2"), profile="cpu", out=tmp_path / "out")
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    line = submit.shell(job, "http://head:8265")
    assert line.startswith("ray job submit --address http://head:8265 --runtime-env-json ")
    assert json.loads(shlex.split(line)[6]) == job.runtime_env
    monkeypatch.setenv("RAY_ADDRESS", "http://elsewhere:8265")
    assert submit.shell(job, "http://head:8265") == f"RAY_API_SERVER_ADDRESS=http://head:8265 {line}"


@pytest.mark.parametrize("content", ["[1]", "{", None])
def test_a_runtime_env_that_is_none(tmp_path, content):
    file = tmp_path / "env.yaml"
    if content:
        file.write_text(content)
    with pytest.raises(LaunchError, match="--runtime-env"):
        submit.read_runtime_env(file)


def test_refused_before_the_cluster_is_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nowhere = ["--address", "http://127.0.0.1:1", "--dry-run"]
    for words, says in (
        ([f"{FRAMEWORK}/grpo_k9"], "unknown recipe"),
        ([f"{FRAMEWORK}/grpo_k2", "--profile", "cpu", "--kl_estimator", "k9"], "k9"),
        ([f"{FRAMEWORK}/grpo_k2", "--profile", "cpu", "--kl_estimatr", "k2"], "--kl_estimator"),
    ):
        done = CliRunner().invoke(app, ["submit", *words, *nowhere])
        assert done.exit_code == 2, done.output
        assert says in done.output
