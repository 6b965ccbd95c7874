"""Validation loss, perplexity, ACR and tokens/s of a checkpoint.

    python aah_dist/evaluate.py --checkpoint runs/demo

Reads the weights at any tensor-parallel size; changes nothing in the run.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: it would shadow packages named like ours

from aah_dist.training.entry import run_main  # noqa: E402


def parse_args():
    import argparse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, type=Path, metavar="DIR",
                        help="a run's folder (its newest checkpoint) or one of its checkpoints/step_* folders")
    parser.add_argument("--data", type=Path, metavar="DIR",
                        help="prepared data, made with the run's tokenizer (default: the run's)")
    parser.add_argument("--samples", type=int, metavar="N", help="validation samples to read (default: all)")
    parser.add_argument("--micro_batch_size", type=int, default=4, metavar="N", help="samples a forward (default: 4)")
    parser.add_argument("--tensor_parallel_size", type=int, default=1, metavar="N", help="TP size (default: 1)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--policy", choices=("frozen", "adapt"), default="frozen",
                        help="windows: as in force at the checkpoint, or decided for each batch by the run's "
                             "controller from an empty state, as the paper's inference table does (default: frozen)")
    parser.add_argument("--backend", metavar="NAME", help="attention code, as aah.backend (default: the run's own)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # the launcher appends it
    return parser.parse_args()


def main() -> int:
    arguments = parse_args()
    from aah_dist.training.score import Settings, score, show

    settings = Settings(arguments.checkpoint, arguments.data, arguments.samples, arguments.micro_batch_size,
                        arguments.tensor_parallel_size, arguments.device, arguments.policy,
                        arguments.backend)
    print(show(score(settings), as_json=arguments.json))
    return 0


if __name__ == "__main__":
    run_main(main)
