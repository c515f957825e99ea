"""These tests need OpenRLHF's environment; in verl's they are not collected."""

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

collect_ignore_glob = [] if importlib.util.find_spec("openrlhf") else ["*"]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    import harness

    return harness.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def runs(model):
    """``runs(config, rollout=False, *native_flags)``: a fresh trainer; config None is OpenRLHF without the plugin's."""
    import harness

    from kl_plugins.openrlhf import hook

    hook.setup()
    harness.one_process()

    def make(config, rollout=False, *native):
        flags = harness.as_flags(config or {})
        if rollout:
            flags += ["--algo.advantage.is_correction_level", "token"]
        return harness.Run(model, *flags, *native)

    return make
