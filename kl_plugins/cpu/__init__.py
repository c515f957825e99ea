"""Lets verl and OpenRLHF train on a machine without a GPU: off unless KL_PLUGINS_CPU=1. This module imports nothing.

Both dictionaries are environment variables that have to be in place before the framework's first process starts: Ray's
local workers and vLLM's own processes inherit them.
"""

_SHARED = {
    "KL_PLUGINS_CPU": "1",
    # vLLM on the CPU: GiB of KV cache, and no pinning of threads to cores, which would pile all processes on core 0.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The demo's matrices are 64 wide: threads and compiled kernels cost more than they give (3 to 20 s of start-up).
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Nothing of the demo comes from a hub, and nothing of it goes to a statistics server.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
}

VERL_ENV: dict[str, str] = {
    **_SHARED,
    "VERL_PLATFORM": "cpu",
    # verl registers its FSDP engine for the device "cuda" only; its code runs on the CPU as it is.
    "VERL_ENGINE_DEVICE": "cuda",
    # In this order: the platform has to exist before the plugin imports verl's losses.
    "VERL_USE_EXTERNAL_MODULES": "kl_plugins.cpu.verl,kl_plugins.verl",
    # TransferQueue's default of 8 threads makes it warn at every message on a smaller machine: 500 lines a step.
    "TQ_NUM_THREADS": "1",
}

OPENRLHF_ENV: dict[str, str] = {
    # OpenRLHF passes TOKENIZERS_PARALLELISM to ray.init itself, and Ray refuses a key that the job sets as well.
    **{name: value for name, value in _SHARED.items() if name != "TOKENIZERS_PARALLELISM"},
    "DS_ACCELERATOR": "cpu",
    # OpenRLHF's placement groups ask Ray for GPUs: Ray believes a declared count.
    "RAY_OVERRIDE_RESOURCES": '{"CPU": 16, "GPU": 8}',
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
