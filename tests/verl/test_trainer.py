"""The schedule in verl: what is refused in the driver, beta on its way to the loss, shards from policy to reference."""

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kl_plugins.launch.recipes import recipes_dir
from kl_plugins.launch.verl import compose
from kl_plugins.verl import trainer

LOG = ["kl.controller.kind=log", "kl.controller.target=0.1"]
RESET = ["kl.reference.reset_every=2"]


def config(*overrides, recipe="grpo_k2"):
    made = compose(recipes_dir() / "verl" / f"{recipe}.yaml", list(overrides))
    OmegaConf.resolve(made)
    return made


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([*LOG, "trainer.use_v1=false"], "set trainer.use_v1=True"),
        ([*LOG, "actor_rollout_ref.actor.kl_loss_coef=11"], "beta starts at 11, outside kl.controller"),
        ([*RESET], "one strategy of fsdp2, megatron; actor_rollout_ref.actor.strategy=fsdp"),
        ([*RESET, "actor_rollout_ref.model.lora_rank=8"], "with LoRA the reference is the policy's own base model"),
        ([*RESET, "trainer.v1.trainer_mode=separate_async"], "choose sync or colocate_async"),
    ],
)
def test_refused(overrides, words):
    with pytest.raises(ValueError, match=words):
        trainer.check(config(*overrides))


def test_two_controllers_of_one_beta_are_refused():
    adaptive = ["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=10"]
    trainer.check(config(*adaptive, recipe="ppo_k1_in_reward"))
    with pytest.raises(ValueError, match="are two controllers of one beta"):
        trainer.check(config(*adaptive, *LOG, recipe="ppo_k1_in_reward"))


def test_accepted():
    trainer.check(config())
    trainer.check(config(*LOG))
    trainer.check(config(*RESET, "actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.ref.strategy=fsdp2"))


@pytest.mark.parametrize(("recipe", "key"), [("grpo_k2", 0.5), ("ppo_k1_in_reward", 0.01)])
def test_beta_starts_at_the_frameworks_key(recipe, key):
    assert trainer.start(config(recipe=recipe)).value == key


@pytest.mark.timeout(240)
def test_shards_on_two_ranks(tmp_path):
    script = Path(__file__).with_name("shards_rank.py")
    words = [str(tmp_path / "rendezvous"), str(tmp_path / "reference")]
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    for rank in ranks:
        said, _ = rank.communicate(timeout=200)
        assert rank.returncode == 0, said
        assert said.endswith("well\n")
    names = {file.name for file in (tmp_path / "reference").iterdir()}
    assert names == {"world_size_2_rank_0.pt", "world_size_2_rank_1.pt"}
