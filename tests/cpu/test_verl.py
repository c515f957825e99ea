"""verl on the CPU, each case in a process of its own: what is replaced, when, and what is said when it cannot be."""

import os
import subprocess
import sys

import pytest

from kl_plugins.cpu import VERL_ENV
from kl_plugins.launch.plan import package_folder

pytestmark = pytest.mark.skipif(package_folder("verl") is None, reason="needs verl's environment")

# The CPU support alone: the KL plugin has tests of its own.
ENV = {**VERL_ENV, "VERL_USE_EXTERNAL_MODULES": "kl_plugins.cpu.verl", "VERL_USE_EXTERNAL_PLUGINS": "none"}

REPLACED = """
import importlib, importlib.metadata, torch.distributed.fsdp as fsdp
import verl, verl.utils.distributed as distributed, verl.utils.model as model
from verl.plugin.platform import PlatformRegistry
names = [
    (distributed, "initialize_global_process_group_ray"),
    (fsdp, "CPUOffloadPolicy"),
    (model, "load_valuehead_model"),
    (importlib.metadata, "version"),
]
"""


def python(code: str, env: dict[str, str]) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VERL_", "KL_PLUGINS_"))}
    return subprocess.run([sys.executable, "-c", code], env={**clean, **env}, capture_output=True, text=True)


def test_everything_is_in_place_and_a_second_load_changes_nothing(tmp_path):
    ended = python(
        REPLACED
        + """
from verl.utils.device import get_device_name, get_nccl_backend, get_resource_name
assert (get_device_name(), get_nccl_backend(), get_resource_name()) == ("cpu", "gloo", "GPU")
before = [getattr(*n) for n in names] + [PlatformRegistry.get("cpu")]
assert all(f._kl_plugins_cpu for f in before[:-1]), before
import kl_plugins.cpu.verl as ours
ours.install()
assert [getattr(*n) for n in names] + [PlatformRegistry.get("cpu")] == before
importlib.reload(ours)
assert [getattr(*n) for n in names] + [PlatformRegistry.get("cpu")] == before

assert fsdp.CPUOffloadPolicy(pin_memory=True).pin_memory is False
assert importlib.metadata.version("vllm").endswith("+cpu")
try:
    importlib.metadata.version("no-such-distribution")
except importlib.metadata.PackageNotFoundError:
    pass
else:
    raise AssertionError("a version for what is not there")

import os, torch
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
distributed.initialize_global_process_group_ray()
x = torch.ones(1)
torch.distributed.all_reduce(x)
assert x.item() == 1
torch.distributed.destroy_process_group()

from transformers import Qwen2Config, Qwen2ForCausalLM
config = Qwen2Config(vocab_size=8, hidden_size=64, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=2, num_labels=1)
Qwen2ForCausalLM(config).save_pretrained(os.environ["CRITIC"])
critic = model.load_valuehead_model(os.environ["CRITIC"], torch.float32, config, False)
assert critic.config._attn_implementation == "sdpa"
assert critic(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 1)
""",
        {**ENV, "CRITIC": str(tmp_path)},
    )
    assert ended.returncode == 0, ended.stderr


def test_off_unless_asked_for():
    ended = python(
        REPLACED
        + """
import kl_plugins.cpu.verl
assert PlatformRegistry.get("cpu") is None
assert not any(hasattr(getattr(*n), "_kl_plugins_cpu") for n in names)
""",
        {"VERL_USE_EXTERNAL_PLUGINS": "none"},
    )
    assert ended.returncode == 0, ended.stderr


def test_half_an_environment_is_an_error_that_names_the_rest():
    ended = python("import verl", {k: v for k, v in ENV.items() if k != "VERL_ENGINE_DEVICE"})
    assert ended.returncode != 0
    assert "KL_PLUGINS_CPU=1 needs the variables of kl_plugins.cpu.VERL_ENV as well" in ended.stderr
    assert "'VERL_ENGINE_DEVICE': None" in ended.stderr


def test_a_verl_without_the_function_is_refused_by_name():
    ended = python(
        """
import verl, verl.utils.model
del verl.utils.model.load_valuehead_model
import kl_plugins.cpu.verl as ours
ours.install()
""",
        ENV,
    )
    assert ended.returncode != 0
    assert "ImportError: kl_plugins.cpu.verl: verl.utils.model.load_valuehead_model is missing in verl" in ended.stderr
    assert "flash_attention_2" in ended.stderr
    assert "unset KL_PLUGINS_CPU" in ended.stderr
