"""A whole training step under unequal windows against full attention: python -m aah_dist.bench.step

A model of a few layers with the 1B model's layer (hidden 1536, 12 heads of 128, MLP 6144) and a vocabulary in
proportion, so that the output layer has the share it has beside 16 layers.  One sample a step; fp32 on CPU, bf16 on a
GPU.  Steps (forward, backward, ZeRO-2 update) and evaluations (forward of one sample) are the trainer's own.

Variants: full_attention; plan:REGIME, the first layers of bench/plans/REGIME.yaml, which were made to have the ACR that
the paper reports for that regime; live:REGIME, what the regime's controller decides here (warm-up 1, interval 5).  The
live regimes decide from the statistics of one first step; what that cost, over the interval, is added to their steps.

One process runs all variants on one model, of which only the windows change.  Each round runs every variant once; a
ratio is the median over rounds of full attention's time over the variant's in the same round, followed by the least
and the greatest.  Time is CPU time at one thread, else wall clock.  `FLOPs` is the ratio that a step's model FLOPs
alone would give.  The last columns are shares: of a step and of an evaluation, core attention's; of a step, the
optimizer's update, and statistics and control.  On a GPU these come from a round of its own, because reading them
stops the device.

Memory comes from a new process for each variant, two at a time, over two steps, as the second has more buffers: on CPU
the growth of the resident size, from before the model is built to its peak; on a GPU the most that torch allocated.
Both steps of live regimes gather statistics; the first is under full attention.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from aah_dist.bench.environment import describe, positive
from aah_dist.bench.step_run import BASE, HEADS, LAYERS, VARIANTS, Run, peak_memory, variant_config
from aah_dist.config.schema import ConfigError
from aah_dist.config.windows import policy_from_config
from aah_dist.parallel.device import has_gpu

# For plan:full_adaptive: training and evaluation at least this much faster, peak memory at most this much larger.
GOALS = {4096: (1.10, 1.08, 1.02), 16384: (1.30, 1.30, 1.02)}


def main() -> None:
    args = parse()
    if args.part == "time":
        for record in Run(args, args.lengths[0]).records(args.rounds):
            print(json.dumps(record), flush=True)
        return
    if args.part == "memory":
        print(json.dumps(peak_memory(args, args.lengths[0])))
        return
    print(describe("torch", "deepspeed", "megatron-core"))
    print(f"method    {args.threads} thread{'s' if args.threads > 1 else ''}, {args.rounds} interleaved rounds in one "
          f"process, medians of ratios; dropout {args.dropout:g}, 1 sample a step, AdamW, device {args.device}")
    for length in args.lengths:
        records = in_new_process("time", length)
        memory = {}
        if not args.skip_memory:
            with ThreadPoolExecutor(2) as pool:
                runs = [pool.submit(in_new_process, "memory", length, variant) for variant in args.variants]
            memory = {record["variant"]: record["mib"] for run in runs for record in run.result()}
        print(table(length, records, memory), flush=True)
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=positive, nargs="+", metavar="T", help="default: 4096 16384")
    parser.add_argument("--layers", type=positive, help=f"at most {LAYERS} (default: 2 up to T 8192, 1 above)")
    parser.add_argument("--hidden", type=positive, help=f"hidden size of {HEADS} heads (default: 1536)")
    parser.add_argument("--rounds", type=positive, help="default: 3")
    parser.add_argument("--threads", type=positive, default=1, help="default: 1")
    parser.add_argument("--dropout", type=float, default=0.0, help="hidden and attention dropout (default: 0)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, metavar="VARIANT",
                        help=f"some of {', '.join(VARIANTS)} (default: all); {BASE} always runs")
    parser.add_argument("--skip-memory", action="store_true", help="time only")
    parser.add_argument("--quick", action="store_true", help="a smoke run: T 512, hidden 192, 1 round, unless given")
    parser.add_argument("--part", choices=("time", "memory"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.lengths = args.lengths or ([512] if args.quick else [4096, 16384])
    args.hidden = args.hidden or (192 if args.quick else 1536)
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.variants = [name for name in VARIANTS if name == BASE or name in args.variants]
    if args.device == "cuda" and not has_gpu():
        parser.error("--device is cuda, but this machine or torch build has no CUDA device; give cpu or auto")
    try:
        for length in args.lengths:
            for variant in args.variants:
                policy_from_config(variant_config(variant, args, length))
    except ConfigError as error:
        parser.error(str(error))
    return args


def in_new_process(part: str, length: int, variant: str | None = None) -> list[dict]:
    """The records that a part prints; they go to stderr as they come, because a run takes long."""
    records = []
    threads = str(parse().threads)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads,
                   "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "aah_dist.bench.step", *sys.argv[1:], "--part", part, "--lengths", str(length)]
    command += ["--variants", variant] if variant else []
    with tempfile.TemporaryFile("w+") as errors:
        run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        for line in run.stdout:
            if line.startswith('{"variant"'):
                record = json.loads(line)
                print(f"T {length}, {part}: " + ", ".join(f"{name} {value:.5g}" if isinstance(value, float) else
                      f"{name} {value}" for name, value in record.items()), file=sys.stderr, flush=True)
                records.append(record)
        code = run.wait()
        errors.seek(0)
        said = errors.read()
    if code:
        raise SystemExit(f"{part} at T {length} failed:\n{said[-3000:]}")
    if part == "time":
        print(next((line for line in said.splitlines() if line.startswith("attention backend")), ""))
    return records


def table(length: int, records: list[dict], memory: dict[str, float]) -> str:
    """The table of one length.  memory: MiB by variant, empty where it was not measured."""
    timed = [record for record in records if record["kind"] == "timed"]
    shares = [record for record in records if record["attention"] is not None]
    base = {record["round"]: record for record in timed if record["variant"] == BASE}
    full = timed[0]
    lines = [f"\nT {length}: {full['layers']} layer{'s' if full['layers'] > 1 else ''}, vocabulary "
             f"{full['vocabulary']:,}, {full['parameters']:,} parameters; full attention "
             f"{length / statistics.median(r['training'] for r in base.values()):,.1f} tokens/s",
             f"{'':<27}{'ACR':>7}{'pairs':>7}{'FLOPs':>7}{'training':>20}{'evaluation':>20}{'memory':>8}"
             f"{'attention':>11}{'in eval.':>10}{'optimizer':>11}{'control':>9}"]
    for variant in dict.fromkeys(record["variant"] for record in timed):
        mine = [record for record in timed if record["variant"] == variant]
        split = [record for record in shares if record["variant"] == variant]
        acr_, pairs, flops = (statistics.fmean(r[name] for r in mine) for name in ("acr", "pairs", "flops"))
        ratios = "".join(f"{spread([base[r['round']][name] / r[name] for r in mine]):>20}"
                         for name in ("training", "evaluation"))
        attention, in_evaluation, optimizer, control = (
            statistics.median(r[part] / r[whole] for r in split)
            for part, whole in (("attention", "training"), ("evaluation_attention", "evaluation"),
                                ("optimizer", "training"), ("control", "training")))
        peak = f"{memory[variant] / memory[BASE]:.3f}" if memory else "-"
        lines.append(f"{variant:<27}{acr_:>7.4f}{pairs:>7.4f}{full['flops'] / flops:>7.3f}{ratios}{peak:>8}"
                     f"{attention:>11.1%}{in_evaluation:>10.1%}{optimizer:>11.1%}{control:>9.2%}")
    if length in GOALS:
        training, evaluation, peak = GOALS[length]
        lines.append(f"{'to reach, plan:full_adaptive':<48}{training:>8.2f}{evaluation:>20.2f}{peak:>20.2f}")
    return "\n".join(lines)


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.2f}-{max(ratios):.2f})"


if __name__ == "__main__":
    main()
