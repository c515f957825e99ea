"""Lets OpenRLHF 0.11.2 (Ray, DeepSpeed, vLLM) train on the CPU; does nothing unless KL_PLUGINS_CPU=1.

`install` runs in the driver (`kl-openrlhf`, or ``python -m kl_plugins.cpu.openrlhf`` for OpenRLHF without our flags),
in every Ray worker (`kl_plugins.openrlhf.hook`) and in every vLLM process (`kl_plugins.cpu.vllm`). It imports nothing
by itself: each replacement is made right after the module that it belongs to has been imported. The variables that go
with it are `kl_plugins.cpu.OPENRLHF_ENV`.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import runpy
import sys
from types import ModuleType
from typing import Any

from kl_plugins.post_import import after_import

FLASH_ATTN = ("flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed")


def install() -> None:
    """Arrange for every replacement in this process; harmless when repeated, nothing without KL_PLUGINS_CPU=1."""
    if os.environ.get("KL_PLUGINS_CPU") != "1":
        return
    for name in FLASH_ATTN:
        if name not in sys.modules:
            sys.modules[name] = _FlashAttention(name)
    for module, action in {
        "torch": _no_cuda,
        "torch.distributed.device_mesh": _mesh_on_cpu,
        "deepspeed.comm.torch": _no_shm_extension,
        "deepspeed.ops.adam": _adam_of_torch,
        "vllm.distributed.device_communicators.pynccl": _broadcast_through_store,
        "openrlhf.trainer.ppo_utils.replay_buffer": _buffer_on_cpu,
        "openrlhf.trainer.ray.vllm_worker_wrap": _update_on_cpu,
    }.items():
        after_import(module, action)


def _replace(owner: Any, name: str, replacement: Any) -> None:
    """Put ``replacement`` in place of ``owner.name``, which has to be there."""
    if not hasattr(owner, name):
        raise ImportError(
            f"kl_plugins.cpu.openrlhf: {owner.__name__}.{name} is gone. Install the versions of "
            "constraints/openrlhf.txt, or unset KL_PLUGINS_CPU where there is a GPU."
        )
    setattr(owner, name, replacement)


class _FlashAttention(ModuleType):
    """What OpenRLHF's ring_attn_utils imports by name at its top, and calls only for packed samples."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"

        def absent(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(f"{full} needs a GPU: on the CPU leave --ds.packing_samples and ring attention off")

        return absent


def _no_cuda(torch: ModuleType) -> None:
    """OpenRLHF moves tensors to ``torch.cuda.current_device()`` and synchronises CUDA in some twenty places."""
    cuda = torch.cuda
    _replace(cuda, "set_device", lambda device: None)
    _replace(cuda, "current_device", lambda: "cpu")
    _replace(cuda, "synchronize", lambda device=None: None)
    _replace(cuda, "current_stream", lambda device=None: None)


def _mesh_on_cpu(device_mesh: ModuleType) -> None:
    """DeepspeedStrategy builds its mesh of "cuda"."""
    original = device_mesh.init_device_mesh

    @functools.wraps(original)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    _replace(device_mesh, "init_device_mesh", init_device_mesh)


def _no_shm_extension(comm: ModuleType) -> None:
    """DeepSpeed would compile its shared-memory communication with g++ at first use: minutes, and gloo does it."""
    _replace(comm, "build_shm_op", lambda: None)


def _adam_of_torch(adam: ModuleType) -> None:
    """DeepSpeed would compile its fused Adam with g++ at first use."""
    import torch

    class FusedAdam(torch.optim.AdamW):
        def __init__(self, params: Any, adam_w_mode: bool = True, **kwargs: Any) -> None:
            super().__init__(params, **kwargs)

    _replace(adam, "FusedAdam", FusedAdam)


def _broadcast_through_store(pynccl: ModuleType) -> None:
    """OpenRLHF sends weights to vLLM through NCCL; vLLM's StatelessProcessGroup can broadcast by itself, over TCP."""

    class StoreCommunicator:
        def __init__(self, group: Any, device: Any, library_path: Any = None) -> None:
            self.group = group

        def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
            received = self.group.broadcast(tensor.detach(), src)
            if self.group.rank != src:
                tensor.copy_(received)

    _replace(pynccl, "PyNcclCommunicator", StoreCommunicator)


def _buffer_on_cpu(replay_buffer: ModuleType) -> None:
    """NaiveReplayBuffer makes a device from the text ``cuda:{torch.cuda.current_device()}``."""
    import torch

    buffer = replay_buffer.NaiveReplayBuffer
    original = buffer.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        here, torch.cuda.current_device = torch.cuda.current_device, lambda: 0
        try:
            original(self, *args, **kwargs)
        finally:
            torch.cuda.current_device = here
        self.target_device = torch.device("cpu")

    buffer.__init__ = init


def _update_on_cpu(vllm_worker_wrap: ModuleType) -> None:
    """WorkerWrap receives each weight into a tensor on "cuda"."""
    import torch

    def update_weight(self: Any, name: str, dtype: Any, shape: Any, empty_cache: bool = False) -> None:
        weight = torch.empty(shape, dtype=dtype)
        self._model_update_group.broadcast(weight, src=0)
        self.model_runner.model.load_weights(weights=[(name, weight)])

    _replace(vllm_worker_wrap.WorkerWrap, "update_weight", update_weight)


if __name__ == "__main__":
    install()
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
