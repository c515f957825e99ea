"""`kl-plugins audit` without a framework's configuration: axes, refusals, output; nothing read is executed."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from kl_plugins.audit import frameworks, read
from kl_plugins.launch.plan import LaunchError


def test_axes_alone(kl_plugins):
    text = kl_plugins("audit --strict --kl_estimator k3 --kl_correction clip")
    assert "forward KL, KL(pi_ref || pi)" in text
    assert "The gradient is the one named." in text
    assert kl_plugins("audit --kl-estimator k3 --kl-correction=clip --strict") == text  # either spelling


def test_readable_at_80_columns(kl_plugins):
    text = kl_plugins("audit --kl_estimator k2")
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert "…" not in text


@pytest.mark.parametrize("framework", ["verl", "openrlhf"])
def test_says_what_is_not_installed(kl_plugins, framework):
    text = kl_plugins("audit --kl_estimator k2")
    shown = {"verl": "verl", "openrlhf": "OpenRLHF"}[framework]
    if frameworks.version(framework) is None:
        assert f"Not installed here, so its own KL is not compared: {shown}" in text
    else:
        assert f"{shown}'s k2" in text


def test_vacuous_strict(kl_plugins):
    assert "pure noise (10)" in kl_plugins("audit --kl_estimator k1", expect=2)
    text = kl_plugins("audit --strict --kl_estimator k1 --kl_allow_vacuous true", expect=1)
    assert "k1 as loss does not regularise" in text
    assert kl_plugins("audit --kl_estimator k1 --kl_allow_vacuous true") == text


def test_k3_in_the_reward(kl_plugins):
    line = "audit --kl_estimator k3 --kl_placement reward"
    assert "collapses" in kl_plugins(line, expect=2)
    text = kl_plugins(f"{line} --kl_allow_vacuous true --strict", expect=1)
    assert "k3 in the reward is never negative" in text


def test_combined(kl_plugins):
    text = " ".join(kl_plugins("audit --kl_form combined --kl_estimator k2").split())
    assert "whose ratio reached 1.5 gets 0 from the KL, beside the policy loss it would get 0.75" in text


def test_json(kl_plugins):
    data = json.loads(kl_plugins("audit --json --kl_estimator k1 --kl_allow_vacuous true"))
    assert data["gradient_is_the_one_named"] is False
    (part,) = data["parts"]
    assert part["descends"] == "nothing"
    assert part["plugin"]["estimator"] == "k1"
    assert data["on_policy"]["this one"]["noise"]["median"] == "inf"  # JSON has no infinity
    assert data["on_policy"]["k2, credit return"]["response_error"]["high"] < 1e-9
    assert data["tails"]["log_ratio"][0] == -20
    assert {f["severity"] for f in data["findings"]} >= {"wrong"}
    assert json.loads(kl_plugins("audit --json --kl_estimator k2"))["gradient_is_the_one_named"] is True


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("audit", "nothing to audit"),
        ("audit --kl_estimator k4", "unknown KL estimator 'k4'"),
        ("audit --kl_credit retrun", "did you mean 'return'"),
        ("audit grpo_k4", "did you mean"),
        ("audit verl/grpo_k2 --kl_estimater=k2", "did you mean --kl_estimator"),
        ("audit --kl_estimator k2 -- algo=1", "write a whole command line after --"),
        ("audit -- k2", "unknown recipe 'k2'"),
    ],
)
def test_refusals(kl_plugins, line, words):
    assert words in " ".join(kl_plugins(line, expect=2).split())


def test_custom_estimator(tmp_path):
    """A user's own estimator is judged by the same command, named in the variable that verl reads as well."""
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from kl_plugins import KLEstimator, get_estimator, register_estimator\n"
        "@register_estimator('bounded_k2')\n"
        "class BoundedK2(KLEstimator):\n"
        "    def value(self, logp, ref_logp):\n"
        "        return get_estimator('k2').value(logp, ref_logp)\n"
        "    def coefficient(self, logp, ref_logp):\n"
        "        return torch.tanh(get_estimator('k2').coefficient(logp, ref_logp))\n"
    )
    command = "from kl_plugins.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", command, "audit", "--json", "--kl_estimator", "bounded_k2"],
        cwd=tmp_path,
        env={**os.environ, "VERL_USE_EXTERNAL_MODULES": "mine"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)  # nothing an import prints gets in
    assert data["parts"][0]["descends"] == "other"
    assert data["tails"]["this one"][0] == pytest.approx(-1)
    assert 0.9 < data["on_policy"]["this one"]["reverse_cosine"]["median"] < 1


HOSTILE = "!!python/object/apply:os.mkdir ['{mark}']"


def test_nothing_read_is_executed(tmp_path):
    mark = tmp_path / "executed"
    yaml = HOSTILE.format(mark=mark)
    for name, text in {
        "tag.yaml": f"algo: {yaml}\n",
        "target.yaml": f"defaults: [ppo_trainer, _self_]\nkl: {{_target_: pathlib.Path.touch, self: {mark}}}\n"
        "actor_rollout_ref: {actor: {use_kl_loss: true, policy_loss: {_target_: os.mkdir, path: " + str(mark) + "}}}\n",
    }.items():
        (tmp_path / name).write_text(text)
        with contextlib.suppress(LaunchError):
            read.read(str(tmp_path / name))
    for words in (
        ["actor_rollout_ref.actor.kl_loss_type=__import__('os')"],
        ["--algo.kl.init_coef", "__import__('os')"],
    ):
        with pytest.raises(LaunchError):
            read.read(None, words)
    assert read.scalar(yaml) == yaml
    assert not mark.exists()


@pytest.mark.parametrize("temperature", [0.5])
def test_temperature(temperature):
    """Case 19."""
    assert read.temperature_mismatch(temperature) == pytest.approx(0.2646743, abs=1e-7)
    (finding,) = read.check_sampler(temperature, 1.0, -1)
    assert "+0.2647 instead of 0" in finding.text
    assert read.check_sampler(1.0, 1.0, -1) == []
    assert [f.severity for f in read.check_sampler(0.0, 1.0, -1)] == [read.WRONG]
    assert [f.code for f in read.check_sampler(1.0, 0.9, -1)] == ["sampler"]
    assert [f.code for f in read.check_sampler(1.0, 1.0, 50)] == ["sampler"]
