"""Policy's weights into the reference and back from a file, in OpenRLHF's real DeepSpeed engines, whole and by ZeRO-3.

One process here; several ranks, Ray and the trainer around it are in tests/e2e/test_resume.py.
"""

from types import SimpleNamespace

import pytest
import torch
from harness import Run

from kl_plugins.openrlhf import trainer


def process(**models):
    """What the functions use of OpenRLHF's Ray actors."""
    run = next(iter(models.values()))
    return SimpleNamespace(strategy=run.strategy, **{name: each.actor for name, each in models.items()})


def weights(run):
    return trainer.policy_weights(process(actor=run))


def differ(a, b):
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_reference_takes_the_policys_weights(runs, model, tmp_path, stage):
    policy, reference = (Run(model, "--ds.zero_stage", stage) for _ in range(2))
    loaded = weights(reference)
    assert not differ(weights(policy), loaded)
    for _ in range(2):
        policy.step(policy.experience())
    moved = weights(policy)
    assert differ(moved, loaded)

    file = tmp_path / "reference" / "reset_1.pt"
    trainer.set_reference(process(model=reference), moved, str(file))
    assert not differ(weights(reference), moved)
    trainer.set_reference(process(model=reference), loaded, None)
    trainer.load_reference(process(model=reference), str(file))
    assert not differ(weights(reference), moved)
    with pytest.raises(FileNotFoundError, match="its weights are not there: resume with the ckpt.path"):
        trainer.load_reference(process(model=reference), str(tmp_path / "none.pt"))
    with pytest.raises(ValueError, match="different parameters"):
        trainer.set_reference(process(model=reference), {**moved, "more": torch.zeros(1)}, None)


@pytest.mark.parametrize("stage", ["2", "3"])
def test_the_optimiser_forgets(runs, model, stage):
    """After it, a step is what the first step of a fresh optimiser would be: Adam's is lr in every coordinate."""
    run = Run(model, "--ds.zero_stage", stage)
    for _ in range(3):
        run.step(run.experience())
    before = weights(run)
    trainer.reset_optimizer(process(actor=run))
    run.step(run.experience())
    steps = torch.cat([(weights(run)[name].float() - before[name].float()).abs().flatten() for name in before])
    rate = run.args.actor.adam.lr
    assert (steps[steps > 0] / rate).quantile(0.9) == pytest.approx(1, rel=0.1)
    state = next(iter(run.actor.model.optimizer.optimizer.state.values()))
    assert float(state["step"]) == 1
