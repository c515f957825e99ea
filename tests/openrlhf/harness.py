"""OpenRLHF's own Actor, DeepspeedStrategy and ActorPPOTrainer in this process: no Ray, no vLLM, exact numbers.

The batch is hand-made (`tests/crossframework.py` uses the same); what is looked at is the gradient that OpenRLHF's real
`training_step` sends into the action log-probabilities, and what it reports.
"""

import functools
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kl_plugins.cpu import OPENRLHF_ENV

os.environ.update(OPENRLHF_ENV)

from kl_plugins.cpu import openrlhf as cpu

cpu.install()

import torch  # noqa: E402
from crossframework import BETA, LOGP, MASK, OLD, REF, ROLLOUT  # noqa: E402

from kl_plugins.openrlhf import flags  # noqa: E402
from kl_plugins.openrlhf.command import openrlhf_parser  # noqa: E402

VOCAB, LENGTH, PROMPT = 48, 14, 4


@functools.cache
def _parser() -> Any:
    return openrlhf_parser()


def arguments(model: Path, *extra: str, micro: str = "4") -> Any:
    """OpenRLHF's nested namespace for one process, by its own parser, with the plugin's flags."""
    from openrlhf.utils.config import hierarchize

    argv = [
        *("--actor.model_name_or_path", str(model), "--ds.attn_implementation", "eager"),
        *("--train.batch_size", "4", "--train.micro_batch_size", micro, "--actor.lr_scheduler", "constant"),
        *("--actor.adam.lr", "1e-2", "--actor.max_norm", "0", "--rollout.n_samples_per_prompt", "2"),
        *("--algo.advantage.estimator", "group_norm", "--algo.kl.init_coef", str(BETA), *extra),
    ]
    args = hierarchize(flags.parse(_parser(), argv))
    args.actor.eps_clip_low_high = args.actor.eps_clip_low_high or (args.actor.eps_clip, args.actor.eps_clip)
    return args


def as_flags(config: dict[str, Any]) -> list[str]:
    """A KLConfig mapping as the plugin's flags."""
    return [word for axis, value in config.items() for word in (f"--kl_{axis}", str(value))]


def same(got: Any, wanted: Any) -> None:
    """Equal to float32 rounding, which is what OpenRLHF computes in."""
    got, wanted = (torch.as_tensor(x, dtype=torch.float64) for x in (got, wanted))
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=1e-7)


def samples(rows: slice, rewards: list[float], index: list[int]) -> Any:
    """A batch of the shared responses as `make_experience` gets it, rewards there already."""
    from openrlhf.trainer.ppo_utils.experience import Experience

    mask, rewards = MASK[rows], torch.tensor(rewards)
    return Experience(
        sequences=torch.ones(len(mask), MASK.shape[1] + 1, dtype=torch.long),
        attention_mask=torch.ones(len(mask), MASK.shape[1] + 1, dtype=torch.long),
        action_mask=mask,
        rewards=rewards,
        response_length=mask.sum(-1),
        truncated=torch.zeros(len(mask)),
        index=index,
        info={"reward": rewards.clone()},
    )


def maker(args: Any, policy: list[torch.Tensor], reference: list[torch.Tensor], beta: float = BETA) -> Any:
    """OpenRLHF's experience maker over models that answer with these log-probabilities, without Ray in between."""
    from openrlhf.trainer.ppo_utils import experience_maker
    from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController

    experience_maker.ray = SimpleNamespace(put=lambda x: x, get=lambda x: x)
    groups = [SimpleNamespace(async_run_method_batch=lambda x=x, **_: [[t] for t in x]) for x in (policy, reference)]
    strategy = SimpleNamespace(args=args)
    controller = FixedKLController(beta)
    return experience_maker.RemoteExperienceMaker(groups[0], None, None, groups[1], controller, strategy, None)


def numbers(make: Any) -> dict[str, Any]:
    """What one OpenRLHF makes of a few settings: gradients, metrics, KL rewards, advantages. ``make`` gives a `Run`."""
    result: dict[str, Any] = {}
    advantages = torch.tensor([[1.0], [-2.0], [0.5]]).expand(3, 5) * MASK
    clip = {"estimator": "k2", "correction": "clip", "credit": "return"}
    for name, config, rollout in (
        ("decoupled", clip, False),
        ("sampler", clip, True),
        ("combined", {"estimator": "k3", "form": "combined"}, False),
        ("stock", {}, False),
    ):
        native = [] if config else ["--algo.kl.use_loss", "--algo.kl.estimator", "k3"]
        native += ["--algo.advantage.is_correction_level", "token"] if rollout else []
        run = make(*as_flags(config), *native)
        metrics = run.step(run.shared_experience(rollout, advantages))
        result[name] = run.gradient(), {k: float(torch.as_tensor(v).float().mean()) for k, v in metrics.items()}
        if not rollout:
            result[f"{name}, whole"] = run.train(run.experience()), run.weights()
    for name, config in {"reward": {"estimator": "k1", "placement": "reward"}, "native reward": {}}.items():
        run = make(*as_flags(config), "--algo.advantage.std_min", "0.1")
        local = maker(run.args, [(LOGP * MASK)[:2]], [(REF * MASK)[:2]])
        (batch,) = local.make_experience([samples(slice(0, 2), [0.99999, 1.00001], [1, 0])])
        kl = batch.kl.clone()
        (batch,) = local.compute_advantages_and_returns([batch])
        result[name] = kl, batch.advantages, batch.info
    return result


def make_model(directory: Path) -> Path:
    """A random two-layer Qwen2, seeded."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=32, **sizes))
    for parameter in model.parameters():
        parameter.data.mul_(4)  # log-probabilities that differ between tokens by more than rounding
    model.save_pretrained(directory)
    return directory


def one_process(rank: int = 0, world: int = 1, port: int | None = None) -> None:
    """The rendezvous that a Ray actor would have set up."""
    if port is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ["LOCAL_RANK"] = "0"


@dataclass
class Seen:
    """What one micro-batch looked like inside `training_step`."""

    sequences: torch.Tensor  # [B, T]
    logp: torch.Tensor  # [B, T-1], with its gradient after the step


class Run:
    """One trainer over one freshly loaded model."""

    def __init__(self, model: Path, *extra: str, micro: str = "4"):
        from openrlhf.models import Actor
        from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
        from openrlhf.utils import get_strategy

        self.args = args = arguments(model, *extra, micro=micro)
        self.strategy = get_strategy(args)
        self.strategy.setup_distributed()
        torch.manual_seed(1)
        actor = Actor(str(model), attn_implementation="eager", ds_config=self.strategy.get_ds_train_config())
        optimizer = dict(optim="adam", muon=vars(args.actor.muon), adam=vars(args.actor.adam), max_norm=0.0)
        schedule = dict(lr_scheduler="constant", lr_warmup_ratio=0.0, min_lr_ratio=0.1, scheduler_steps=100)
        self.actor, optim, scheduler = self.strategy.prepare((actor, {**optimizer, **schedule}))
        self.trainer = ActorPPOTrainer(
            self.strategy,
            self.actor,
            ema_model=None,
            actor_optim=optim,
            actor_scheduler=scheduler,
            micro_train_batch_size=args.train.micro_batch_size,
            dataloader_pin_memory=False,
        )
        self.seen: list[Seen] = []
        self.forced: torch.Tensor | None = None
        self.last_status: dict[str, Any] = {}
        self.actor.register_forward_hook(self._watch)

    def _watch(self, module: Any, inputs: Any, output: Any) -> Any:
        """Keep the action log-probabilities of a training forward; put `forced` in their place where it is set."""
        if not (isinstance(output, tuple) and output[0].requires_grad):
            return None
        logp = output[0]
        if self.forced is not None:
            logp = self.forced + 0 * logp  # the model still gets a gradient, of 0
        logp.retain_grad()
        self.seen.append(Seen(inputs[0], logp))
        return logp, output[1]

    @torch.no_grad()
    def experience(self, rows: slice = slice(None), on_policy: bool = False) -> Any:
        """Four responses of unequal length, old and reference log-probabilities near the policy's own."""
        self.forced = None
        draw = torch.Generator().manual_seed(2)
        sequences = torch.randint(1, VOCAB, (4, LENGTH), generator=draw)
        action = torch.zeros(4, LENGTH - 1, dtype=torch.long)
        for row, length in enumerate((10, 7, 3, 5)):
            action[row, PROMPT - 1 : PROMPT - 1 + length] = 1
        action[0, PROMPT + 2] = 0  # a tool's token in the middle
        attention = torch.ones(4, LENGTH, dtype=torch.long)
        noise = [torch.randn(4, LENGTH - 1, generator=draw) for _ in range(2)]
        advantages = torch.randn(4, 1, generator=draw) * action
        self.actor.eval()
        logp = self.actor(sequences, action, attention_mask=attention)
        old = logp if on_policy else logp + 0.3 * noise[0] * action
        ref = logp + noise[1] * action
        batch = dict(
            sequences=sequences,
            attention_mask=attention,
            action_mask=action,
            action_log_probs=old,
            base_action_log_probs=ref,
            advantages=advantages,
        )
        batch = {name: value[rows].clone() for name, value in batch.items()}
        return self._experience(batch)

    def shared_experience(self, rollout: bool = False, advantages: torch.Tensor | None = None) -> Any:
        """The batch of `tests/crossframework.py`, its log-probabilities in place of the model's."""
        self.forced = (LOGP * MASK).requires_grad_()  # OpenRLHF's are 0 off the mask
        batch = dict(
            sequences=torch.ones(3, MASK.shape[1] + 1, dtype=torch.long),
            attention_mask=torch.ones(3, MASK.shape[1] + 1, dtype=torch.long),
            action_mask=MASK,
            action_log_probs=OLD * MASK,
            base_action_log_probs=REF * MASK,
            rollout_log_probs=ROLLOUT * MASK if rollout else None,
            advantages=torch.zeros(MASK.shape) if advantages is None else advantages,
        )
        return self._experience(batch)

    def _experience(self, batch: dict[str, Any]) -> Any:
        from openrlhf.trainer.ppo_utils.experience import Experience

        count = len(batch["sequences"])
        return Experience(
            **batch,
            response_length=batch["action_mask"].sum(-1),
            total_length=batch["attention_mask"].sum(-1),
            index=list(range(count)),
            info={"reward": torch.zeros(count)},
        )

    def step(self, experience: Any) -> dict[str, Any]:
        """OpenRLHF's own training step on one micro-batch; returns the metrics it reports."""
        self.seen.clear()
        return self.trainer.training_step(experience, self.args.algo.kl.init_coef, 0)["metrics"]

    def gradient(self) -> torch.Tensor:
        """d(loss)/d(logp) of the last `step`, ``[B, T-1]``."""
        return self.seen[-1].logp.grad

    def train(self, *experiences: Any) -> dict[str, Any]:
        """OpenRLHF's `ppo_train` over a replay buffer; returns its status."""
        self.seen.clear()
        for experience in experiences:
            self.trainer.replay_buffer.append(experience)
        self.last_status = self.trainer.ppo_train(self.args.algo.kl.init_coef)
        self.trainer.replay_buffer.clear()
        return self.last_status

    def gradients_by_row(self) -> dict[tuple[int, ...], torch.Tensor]:
        """d(loss)/d(logp) of each response of the last `train`: OpenRLHF shuffles them."""
        rows = [pair for s in self.seen for pair in zip(s.sequences.tolist(), s.logp.grad, strict=True)]
        return {tuple(tokens): gradient for tokens, gradient in rows}

    def weights(self) -> torch.Tensor:
        """All parameters, flat, in float32."""
        return torch.cat([p.detach().float().flatten() for p in self.actor.model.module.parameters()])
