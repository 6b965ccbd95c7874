"""The triton backend's kernels compile for NVIDIA GPUs, with the launch table's own tiles, and keep to their registers.

Needs no GPU: Triton brings its assembler.  What the assembler reports is proven here; that the result is right and
fast on a device is not.
"""

import json
import subprocess
import sys

from ranks import REPOSITORY, environment

MAX_SPILL = 64
"""Bytes a thread; a few spilled registers outside the loops cost nothing that matters."""
MAX_SHARED = 99 << 10
"""Bytes of shared memory a program; what consumer GPUs (sm_86, sm_89) have, the least since sm_80."""


def test_kernels_compile_and_keep_to_their_registers(tmp_path):
    compiler = environment(TRITON_CACHE_DIR=str(tmp_path / "cache"))
    compiler.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, str(REPOSITORY / "tests" / "triton_compile_worker.py")], env=compiler,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    rows = json.loads(done.stdout)
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(map(str, row.values())) + " |" for row in rows]
    (tmp_path / "registers.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    assert len(rows) == 27
    for row in rows:
        assert row["spilled"] <= MAX_SPILL and row["shared"] <= MAX_SHARED, row
