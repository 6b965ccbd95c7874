"""The triton backend: its kernels in Triton's interpreter, and what it decides on the host.

The interpreter runs the kernels' own code on the CPU, so it proves their mathematics and the bounds of their loops, in
fp32 and fp16, and in bf16 with products as a device forms them.  It does not prove the rounding of a device's tensor
cores, the absence of races, nor speed.
"""

import subprocess
import sys

import torch
from ranks import REPOSITORY, environment

from aah_dist.attention import triton_attention as module
from aah_dist.attention.backends import BACKENDS


def test_kernels_in_the_interpreter():
    """In a process of its own: TRITON_INTERPRET must be set before the first import of triton, by whomever."""
    cases = str(REPOSITORY / "tests" / "triton_cases.py")
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cases]
    done = subprocess.run(argv, env=environment(TRITON_INTERPRET="1"), cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-8000:] + done.stderr[-2000:]
    print(done.stdout.splitlines()[-1])


def test_plan_orders_heads_by_work():
    """Windows, then heads widest first, then key/value heads by the sum of their query heads' windows."""
    plan = module._plan((5, 9, 9, 2), 2, torch.device("cpu"))
    assert plan.dtype == torch.int32 and plan.tolist() == [5, 9, 9, 2, 1, 2, 0, 3, 0, 1]
    assert module._plan((1, 1, 2, 5), 2, torch.device("cpu")).tolist() == [1, 1, 2, 5, 3, 2, 0, 1, 1, 0]


def test_plans_are_cached_within_bounds():
    assert module._plan((5, 9), 1, torch.device("cpu")) is module._plan((5, 9), 1, torch.device("cpu"))
    for window in range(1, 600):
        module._plan((window, 3), 2, torch.device("cpu"))
    info = module._plan.cache_info()
    assert info.maxsize is not None and info.currsize <= info.maxsize


def test_launch_table_is_complete():
    triton = BACKENDS["triton"]
    for kernel in ("forward", "backward_q", "backward_kv"):
        for dtype in triton.dtypes:
            launches = {size: module.launch_of(kernel, dtype, size) for size in triton.head_sizes}
            assert launches[1] == launches[64] and launches[65] == launches[128]
    assert max(max(launch[:2]) for launch in module.LAUNCHES.values()) * module.MAX_STRIDE < 1 << 31


def test_padded_sizes_are_powers_of_two():
    assert [module.padded(size) for size in (1, 16, 17, 64, 65, 96, 128)] == [16, 16, 32, 64, 128, 128, 128]


def test_only_unreachable_strides_are_copied():
    def shaped(*stride):
        return torch.empty_strided((2, 3, 40, 64), stride, device="meta")

    for stride in ((7680, 2560, 64, 1), (192, 64, 384, 1), (1 << 40, 1 << 33, module.MAX_STRIDE, 1)):
        x = shaped(*stride)
        assert module._readable(x) is x
    for stride in ((7680, 2560, 1, 40), (7680, 2560, module.MAX_STRIDE + 1, 1), (0, 0, 0, 0)):
        assert module._readable(shaped(*stride)).is_contiguous()


def test_missing_says_why(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(module, "has_gpu", lambda: True)
    assert module.missing() is None
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    assert "needs a CUDA device" in module.missing() and "TRITON_INTERPRET=1" in module.missing()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert module.missing() is None
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert "package triton, which is not installed" in module.missing()
