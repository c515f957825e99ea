"""The command itself: spelling, listing, refusals and their exit codes."""

import dataclasses
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kl_plugins.cli import app
from kl_plugins.config import KLConfig
from kl_plugins.launch.recipes import list_recipes


def command(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_starts_without_torch():
    """Help and listing are instant; nothing heavy is imported before a configuration is checked."""
    code = (
        "import sys; from kl_plugins.cli import app; from kl_plugins.launch import run, verl, openrlhf;"
        "from kl_plugins.launch.recipes import list_recipes; list_recipes();"
        "print(sorted({'torch', 'ray', 'verl', 'openrlhf', 'hydra', 'matplotlib', 'vllm'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_recipes_lists_each_on_a_line():
    lines = command("recipes").stdout.splitlines()
    assert len(lines) == len(list_recipes())
    for line, recipe in zip(lines, list_recipes(), strict=True):
        assert line.split(maxsplit=1) == [recipe.name, recipe.summary]


def test_every_axis_is_an_option():
    helped = command("run", "--help").stdout
    for field in dataclasses.fields(KLConfig):
        assert f"--kl_{field.name} " in helped


@pytest.mark.parametrize("spelt", ["--kl_ratio_cap", "--kl-ratio-cap", "--kl_ratio-cap"])
def test_dashes_and_underscores(verl, spelt, tmp_path):
    for words in ((spelt, "7"), (f"{spelt}=7",)):
        result = command("run", "verl/grpo_k2", "--profile", "cpu", *words, "--dry_run", "--out", tmp_path)
        assert result.exit_code == 0, result.output
        assert "kl.ratio_cap=7" in result.stdout


def test_keys_of_the_schedule_are_words(verl, tmp_path):
    result = command("run", "verl/grpo_k2", "--profile", "cpu", "--kl_controller.kind=log", "--out", tmp_path)
    assert result.exit_code == 2
    assert "--kl_controller.kind: here it is written kl.controller.kind=VALUE" in result.output


def test_dry_run_prints_a_command_and_does_nothing(verl, tmp_path):
    out = tmp_path / "out"
    result = command("run", "verl/grpo_k2", "--profile", "cpu", "--dry-run", "--out", out, "trainer.project_name='a b'")
    prepare, train = result.stdout.splitlines()
    assert "kl_plugins.cpu.addition" in prepare
    assert "VERL_USE_EXTERNAL_MODULES=kl_plugins.cpu.verl,kl_plugins.verl " in train
    assert not out.exists()
    words = subprocess.run(["bash", "-c", f"set -- {train}; printf '%s\\n' \"$@\""], capture_output=True, text=True)
    assert "trainer.project_name='a b'" in words.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["verl/grpo_k22"], "did you mean verl/grpo_k"),
        (["verl/grpo_k2", "--kl_estimater", "k2"], "--kl_estimater: no such option; did you mean --kl_estimator?"),
        (["verl/grpo_k2", "--kl-corection=clip"], "did you mean --kl_correction?"),
        (["verl/grpo_k2", "--profile", "gpu"], "unknown profile 'gpu'"),
    ],
)
def test_refused(verl, words, says, tmp_path):
    result = command("run", *words, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert says in result.stderr
    assert not (tmp_path / "out").exists()


def test_wrong_values_of_options():
    assert command("run", "verl/grpo_k2", "--steps", "0").exit_code == 2
    assert command("run").exit_code == 2
