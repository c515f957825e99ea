"""The OpenRLHF functions that the plugin wraps or replaces, as they were when it was tested."""

from __future__ import annotations

from collections.abc import Callable

from kl_plugins.drift import Wrapped


def _kl_probe(function: Callable) -> str | None:
    """The call of training_step, by keyword: 0.11.1 moved log_probs_old to the third place."""
    import torch

    logp = torch.tensor([[-1.0, -2.0]])
    got = function(logp, logp - 1, log_probs_old=logp, kl_estimator="k2", unbiased_gradient=False)
    if got.shape != logp.shape or not torch.allclose(got, torch.full_like(logp, 0.5)):
        return f"returned {got} for k2 of a log ratio of 1, not 0.5 everywhere"
    return None


PPO_ACTOR = (
    Wrapped(
        "openrlhf.models.utils:compute_approx_kl",
        signature="log_probs, log_probs_base, log_probs_old=None, kl_estimator='k1', unbiased_gradient=False",
        returns="per-token KL, the shape of log_probs",
        sources={"0.11.2": "1aa20ac441228e967a1c918c9efa0e693f09f9ee7cb4cd9e882c8f6a5a58b593"},
        probe=_kl_probe,
    ),
    Wrapped(
        "openrlhf.models.loss:PolicyLoss.forward",
        signature="self, log_probs, old_log_probs, advantages, action_mask=None, rollout_log_probs=None, dp_size=1, "
        "batch_num_tokens=None, global_batch_size=None",
        returns="loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio",
        sources={"0.11.2": "207b2f9506c3bea6360ca95a8df4fb7438ecb284695876c74c15154afd1ed8f9"},
    ),
    Wrapped(
        "openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer.training_step",
        signature="self, experience, kl_ctl, step, loss_batch_info=None",
        returns="dict of metrics, weights, num_samples, num_action_tokens",
        sources={"0.11.2": "ffa1acd4a5a21e377be2bab4abd30c3f069fe7a620daa3b446625de3cc630a6a"},
    ),
    Wrapped(
        "openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer.ppo_train",
        signature="self, kl_ctl",
        returns="dict of metrics, means over micro-batches and ranks",
        sources={"0.11.2": "589ff8a5f9c34ad52f280b55d4a97755c7b275824a9d93fd5fd63629b67a748a"},
    ),
)

EXPERIENCE_MAKER = (
    PPO_ACTOR[0],
    Wrapped(
        "openrlhf.trainer.ppo_utils.length_penalty:apply_length_penalties",
        signature="experiences, args",
        returns="None; the rewards are changed in place",
        sources={"0.11.2": "ad9556ae3e6d4be399f88c8b77d19c622614b3f373d7436d199601b7051cf6c3"},
    ),
    Wrapped(
        "openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker.__init__",
        signature="self, actor_model_group, critic_model_group, reward_model_group, initial_model_group, "
        "kl_controller, strategy, tokenizer, **kwargs",
        returns="None",
        sources={"0.11.2": "71047508ccbdc2b30a5edfc458a1b2b47a2104b618521c95d1a4f14c6a198055"},
    ),
    Wrapped(
        "openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker.make_experience",
        signature="self, samples_list",
        returns="the samples, with log-probabilities, values, rewards and KL",
        sources={"0.11.2": "85db1fe426dec3e6e9bb740e663f4cee8f1bfdedd3fc0f5d61a4c68fee0b8f67"},
    ),
    Wrapped(
        "openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker.compute_advantages_and_returns",
        signature="self, experiences",
        returns="the experiences, with advantages and returns",
        sources={"0.11.2": "43a58ae8e1c4aea23791886472b6bbc23aefbdc85b0088da2d7f6638d4ec85c6"},
    ),
)

PPO_TRAINER = (
    Wrapped(
        "openrlhf.trainer.ppo_trainer:BasePPOTrainer.__init__",
        signature="self, strategy, actor_model_group, critic_model_group, reward_model_group, reference_model_group, "
        "vllm_engines, tokenizer",
        returns="None",
        sources={"0.11.2": "87e9cd9475b4b91fbc7107cd9446d2a11526b5a45a242966ce0cec4a2310e0b1"},
    ),
    Wrapped(
        "openrlhf.trainer.ppo_trainer:BasePPOTrainer.train_step",
        signature="self, rollout_samples, global_step",
        returns="status, global_step; status has the actor's means, kl/sampled among them",
        sources={"0.11.2": "82f2cc733e64f4a44727a3c116e999b6d516805476c30549621d840d4e3ba762"},
    ),
    Wrapped(
        "openrlhf.trainer.ppo_trainer:BasePPOTrainer.save_logs_and_checkpoints",
        signature="self, global_step, logs_dict=None, client_states=None",
        returns="None",
        sources={"0.11.2": "0ea42915023820ea4d98178002e8345e27507fc345215ed3b920837c99b101cf"},
    ),
    Wrapped(
        "openrlhf.trainer.ppo_trainer:BasePPOTrainer.init_checkpoint_states",
        signature="self",
        returns="client state of the checkpoint, or zeros",
        sources={"0.11.2": "a4040b46b5ffd2835ab88890a24bdb4d320a753a1ca82f5f5874a8e2930e8314"},
    ),
)
