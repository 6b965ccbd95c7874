"""The compiled kernels of native.cpp: built for this processor at first use, in seconds, and kept in the cache."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch

from aah_dist.parallel.ops import extensions_dir

SOURCE = Path(__file__).with_name("native.cpp")
# Not -ffast-math: it would let NaN vanish, and linking with it makes a whole process flush denormal numbers to zero.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-fPIC",
         "-shared")
COMPILERS = ("c++", "g++", "clang++")


class Matrices(ctypes.Structure):
    """[B, heads, T, D] with unit stride along D; strides in elements."""

    _fields_ = [("data", ctypes.c_void_p), ("batch", ctypes.c_int64), ("head", ctypes.c_int64), ("row", ctypes.c_int64)]


class Call(ctypes.Structure):
    """As in native.cpp."""

    _fields_ = [
        *((name, Matrices) for name in ("q", "k", "v", "out", "grad", "dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("log_sum_exp", "windows", "seeds")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "length", "size")),
        *((name, ctypes.c_double) for name in ("scale", "keep_scale")),
        ("threshold", ctypes.c_int64),
        ("units", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_units", "next")),
        *((name, ctypes.c_void_p) for name in ("gemm", "set_threads")),
    ]


class Missing(Exception):
    """Why there are no kernels here, without a full stop."""


class Kernels:
    """The loaded library, and the BLAS of torch that it computes with.  Raises Missing."""

    def __init__(self) -> None:
        try:
            blas = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
            self.gemm = {torch.float32: _address(blas.sgemm_), torch.float64: _address(blas.dgemm_)}
            self.set_threads = _address(blas.MKL_Set_Num_Threads_Local)
        except (OSError, AttributeError) as error:
            raise Missing("the native backend needs a torch for Linux that is built with MKL") from error
        path = _built()
        try:
            library = ctypes.CDLL(str(path))
            self.run, self.cells = library.attention_run, library.attention_cells
        except (OSError, AttributeError) as error:
            raise Missing(f"the native backend cannot load its library; delete {path}, it is built again "
                          f"({error})") from error
        self.run.restype, self.run.argtypes = None, [ctypes.POINTER(Call), ctypes.c_int, ctypes.c_int]
        self.cells.restype, self.cells.argtypes = ctypes.c_int64, []


def _address(function: ctypes._CFuncPtr) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value


@cache
def load() -> Kernels | str:
    """The kernels, or why there are none, without a full stop."""
    try:
        return Kernels()
    except Missing as error:
        return str(error)
    except (OSError, RuntimeError) as error:  # of the cache: a folder that cannot be written, no home folder
        return f"the native backend cannot keep its library ({error})"


def _processor() -> str:
    """What -march=native depends on; a shared cache may serve machines that differ."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith("flags")), "")


def _compiler() -> list[str]:
    """The command: $CXX if set, else what is there."""
    asked = shlex.split(os.environ.get("CXX", ""))
    found = shutil.which(asked[0]) if asked else next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        what = f"CXX names {asked[0]}, which is not there" if asked else "it finds none (install g++)"
        raise Missing(f"the native backend needs a C++ compiler, and {what}")
    return [found, *asked[1:]]


def _built() -> Path:
    what = "\n".join([SOURCE.read_text(encoding="utf-8"), *FLAGS, _processor(), os.environ.get("CXX", "")])
    folder = extensions_dir() / "aah_dist_attention"
    library = folder / f"native-{hashlib.sha256(what.encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    compiler = _compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as mutex:  # one process of a job builds; the lock dies with it
        fcntl.flock(mutex, fcntl.LOCK_EX)
        if not library.exists():
            unfinished = library.with_suffix(".unfinished")
            done = subprocess.run([*compiler, *FLAGS, str(SOURCE), "-o", str(unfinished)], capture_output=True,
                                  encoding="utf-8", errors="replace", check=False)
            if done.returncode or not unfinished.exists():
                print(done.stderr, end="", file=sys.stderr)
                printed = ", as printed above" if done.stderr else ""
                raise Missing(f"the native backend was not built: {shlex.join(compiler)} ended with code "
                              f"{done.returncode}{printed}")
            with open(unfinished, "rb") as file:
                os.fsync(file)
            unfinished.rename(library)
    return library
