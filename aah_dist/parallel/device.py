"""The one file that knows which device the job runs on.

Megatron-core asks CUDA for its current device and keeps CUDA random states; on a CPU-only job those calls get an
answer here, through public names, so that the rest of the project has one code path.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from aah_dist.config.schema import ConfigError, RankError


def select_device(choice: str, local_rank: int) -> torch.device:
    """The rank's device for `parallel.device` auto, cpu or cuda.

    DeepSpeed picks its accelerator at import, so this runs before the first import of deepspeed.

    Raises: ConfigError if cuda is asked for and absent, or this machine has fewer GPUs than ranks.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if choice == "cuda" and not gpus:
        raise ConfigError("parallel.device is cuda, but this machine has no usable GPU; "
                          "use --parallel.device cpu or auto.")
    if choice == "cpu" or not gpus:
        os.environ["DS_ACCELERATOR"] = "cpu"
        return torch.device("cpu")
    if local_rank >= gpus:
        raise RankError(f"rank {local_rank} of this machine has no GPU: {gpus} found; start at most {gpus} ranks here.")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def has_gpu() -> bool:
    return torch.cuda.is_available()


def make_portable(device: torch.device, seed: int) -> None:
    """Let Megatron-core run on `device`; called once a process, after its process groups exist."""
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random as megatron_random

    if device.type == "cpu":
        torch.cuda.current_device = lambda: torch.device("cpu")
        # Forks of the CUDA random state become no-ops: every dropout of this project is stateless (model/dropout.py).
        megatron_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    else:
        tensor_parallel.model_parallel_cuda_manual_seed(seed)


def communication_backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def set_threads(device: torch.device, ranks_on_machine: int) -> None:
    """Share the cores between the ranks of a machine, unless the user has set OMP_NUM_THREADS."""
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // max(1, ranks_on_machine)))


def has_bf16_products(device: torch.device) -> bool:
    """Whether bf16 matrix products run in hardware; without it they are 14 to 46 times slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    return "avx512_bf16" in flags or "amx_bf16" in flags or "bf16" in flags


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU ({torch.backends.cpu.get_cpu_capability()}, {threads} thread{'s' if threads > 1 else ''} a rank)"


# Dense bf16 tensor-core peaks, in FLOP/s, from the vendors' data sheets (without sparsity).
_PEAK_BF16 = {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "L40S": 362e12,
              "RTX 4090": 165e12}


def peak_flops(device: torch.device) -> float | None:
    """Peak bf16 FLOP/s of the device, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in _PEAK_BF16.items() if key in name), None)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def annotate(name: str, device: torch.device) -> Iterator[None]:
    """A range of that name for NVIDIA's profilers, which ends when its kernels have; nothing on CPU.

    It is an NVTX start/end range: a push/pop range holds for one thread, and backward passes run in another.
    """
    if device.type != "cuda":
        yield
        return
    synchronize(device)
    number = torch.cuda.nvtx.range_start(name)
    try:
        yield
        synchronize(device)
    finally:
        torch.cuda.nvtx.range_end(number)


def memory(device: torch.device) -> dict[str, float]:
    """Memory of this rank in MiB under the paper's key names."""
    info = {"perf/cpu_rss_mb": psutil.Process().memory_info().rss / 2**20}
    if device.type == "cuda":
        info["perf/gpu_alloc_mb"] = torch.cuda.memory_allocated(device) / 2**20
        info["perf/gpu_alloc_max_mb"] = torch.cuda.max_memory_allocated(device) / 2**20
        info["perf/gpu_reserved_max_mb"] = torch.cuda.max_memory_reserved(device) / 2**20
    return info


def generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device=device)
