"""The golden tests once more, on a data set with other seeds.

It is made by an independent implementation, written from the published description alone (naive_aah.py), in the layout
of tests/golden.
"""

import os
import subprocess
import sys
from pathlib import Path

from ranks import REPOSITORY

TESTS = REPOSITORY / "tests"


def test_golden_tests_hold_on_other_seeds(tmp_path: Path):
    folder = tmp_path / "golden"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "AAH_GOLDEN_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(TESTS / "make_golden.py"), str(folder), "--seed", "3"], env=environment,
                   check=True, timeout=900)
    files = sorted(str(path) for path in TESTS.glob("test_golden_*.py") if path != Path(__file__))
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files], cwd=REPOSITORY,
                          env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout and "failed" not in done.stdout
