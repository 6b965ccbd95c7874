"""A first report of a run: summary.md and pictures of its losses, its context and its windows.

    python aah_dist/report.py runs/demo

Reads the run's records only, so it may look at a run that is still training; writes into the run's folder.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: it would shadow packages named like ours

from aah_dist.training.entry import run_main  # noqa: E402


def parse_args():
    import argparse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, such as runs/demo")
    return parser.parse_args()


def main() -> int:
    arguments = parse_args()
    from aah_dist.training.report import write_report
    from aah_dist.training.run_records import read_run

    for path in write_report(read_run(arguments.run)):
        print(path)
    return 0


if __name__ == "__main__":
    run_main(main)
