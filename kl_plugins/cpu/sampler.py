"""verl's replay buffer for steps of a second or two."""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class QuickReplayBuffer(ReplayBuffer):
    """Looks for finished responses every 0.1 s; verl's 2 s is longer than the rest of a step of the demo."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"poll_interval": 0.1, **kwargs})
