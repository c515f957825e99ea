"""Runs at the start of every Ray worker: ``worker_process_setup_hook = "kl_plugins.openrlhf.hook.setup"``.

It imports neither torch nor OpenRLHF: what it arranges happens right after OpenRLHF's own modules are imported, and a
refusal there fails that import, before a model is loaded. `kl-openrlhf` sets it; with OpenRLHF as it is, put it into
the job's runtime env beside ``KL_PLUGINS_CONFIG``. Ray runs it in workers only, not in the driver.
"""

from __future__ import annotations

import json
import os
from types import ModuleType
from typing import Any

from kl_plugins.post_import import after_import

HOOK = "kl_plugins.openrlhf.hook.setup"
CONFIG = "KL_PLUGINS_CONFIG"
METRICS = "KL_PLUGINS_METRICS"

installed = False


def setup() -> None:
    """Arrange for the adapter in this process; harmless when repeated.

    Raises:
        ValueError: KL_PLUGINS_CONFIG is not a JSON object.
    """
    global installed
    read_config()
    if os.environ.get("KL_PLUGINS_CPU") == "1":
        from kl_plugins.cpu import openrlhf as cpu

        cpu.install()
    after_import("openrlhf.trainer.ray.ppo_actor", _into_ppo_actor)
    after_import("openrlhf.trainer.ppo_utils.experience_maker", _into_experience_maker)
    after_import("openrlhf.trainer.ppo_trainer", _into_ppo_trainer)
    installed = True


def read_config() -> dict[str, Any]:
    """The JSON object in KL_PLUGINS_CONFIG; empty when it is not set.

    Raises:
        ValueError: it is something else.
    """
    text = os.environ.get(CONFIG) or "{}"
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f'{CONFIG}={text!r} is not JSON ({error}); expected such as {{"estimator": "k2"}}') from error
    if not isinstance(config, dict):
        raise ValueError(f'{CONFIG}={text!r} is not a JSON object; expected such as {{"estimator": "k2"}}')
    return config


def _into_ppo_actor(module: ModuleType) -> None:
    from kl_plugins.openrlhf import adapter

    adapter.into_ppo_actor(module)


def _into_experience_maker(module: ModuleType) -> None:
    from kl_plugins.openrlhf import adapter

    adapter.into_experience_maker(module)


def _into_ppo_trainer(module: ModuleType) -> None:
    from kl_plugins.openrlhf import trainer

    trainer.into_ppo_trainer(module)


def worker_report() -> dict[str, Any]:
    """Whether the hook has run in this process, and from which installation."""
    import kl_plugins

    return {"installed": installed, "version": kl_plugins.__version__, "path": kl_plugins.__path__[0]}
