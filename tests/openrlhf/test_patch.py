"""The source patch: it applies, reverts, refuses what it does not know, and does what the hook does."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kl_plugins.openrlhf import patch


@pytest.fixture
def target(tmp_path):
    """A copy of the installed OpenRLHF as someone would vendor it."""
    import openrlhf

    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(openrlhf.__file__).parent, tmp_path / "vendored" / "openrlhf", ignore=skip)
    return tmp_path / "vendored"


def files(target):
    return {path.relative_to(target): path.read_bytes() for path in target.rglob("*.py")}


def test_apply_check_revert(target):
    before = files(target)
    assert "not patched" in patch.check(target)
    assert "is now patched" in patch.apply(target)
    after = files(target)
    assert sum(before[path] != after[path] for path in before) == 4
    assert patch.check(target).endswith("0.11.2, patched")
    assert "nothing done" in patch.apply(target)
    assert files(target) == after
    assert "as released" in patch.revert(target)
    assert files(target) == before
    assert "nothing done" in patch.revert(target)


@pytest.mark.parametrize("step", [patch.apply, patch.check, patch.revert])
def test_unknown_files_are_left_alone(target, step):
    changed = target / "openrlhf" / "trainer" / "ray" / "ppo_actor.py"
    changed.write_text(changed.read_text() + "\n# mine\n")
    (target / "version.txt").write_text("0.11.3\n")
    before = files(target)
    with pytest.raises(patch.PatchError, match=r"OpenRLHF 0\.11\.3, neither .*ppo_actor\.py is unknown"):
        step(target)
    assert files(target) == before


def test_not_openrlhf(tmp_path):
    with pytest.raises(patch.PatchError, match="holds no package openrlhf"):
        patch.check(tmp_path)


def test_patched_source_gives_the_hooks_numbers(target, runs, model, tmp_path, monkeypatch):
    import harness
    from openrlhf.trainer.ppo_utils import experience_maker

    monkeypatch.setattr(experience_maker, "ray", experience_maker.ray)
    patch.apply(target)
    command = [sys.executable, str(Path(__file__).with_name("patched.py")), str(model), str(tmp_path / "n.pt")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), str(Path(__file__).parents[1] / "support")])}
    subprocess.run(command, env=environ, check=True, timeout=300)
    patched = torch.load(tmp_path / "n.pt", weights_only=False)
    assert patched.pop("from").startswith(str(target))
    hooked = harness.numbers(lambda *flags: harness.Run(model, *flags))
    # The norm rounds once more in the hook's way through dr_grpo: hence not bit for bit.
    torch.testing.assert_close(hooked, patched, rtol=1e-5, atol=1e-7)
    assert "kl/k2" in hooked["decoupled"][1]
    assert "kl/k2" not in hooked["stock"][1]


def test_the_hook_refuses_a_patched_source(target):
    patch.apply(target)
    code = "from kl_plugins.openrlhf import hook\nhook.setup()\nimport openrlhf.trainer.ray.ppo_actor\n"
    environ = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "carries the source patch of kl_plugins" in done.stderr


def test_the_patched_trainer_has_the_schedule(target):
    patch.apply(target)
    code = (
        "from kl_plugins.cpu import openrlhf\nopenrlhf.install()\n"
        "from openrlhf.trainer import ppo_trainer as m\n"
        "print(m.__file__, m.BasePPOTrainer.train_step._kl_plugins)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1].split() == [str(target / "openrlhf" / "trainer" / "ppo_trainer.py"), "True"], (
        done.stderr
    )
