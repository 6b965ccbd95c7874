"""One process with full attention against a plain PyTorch loop of the same model: python -m aah_dist.bench.training

The variants run in turn, each round in a fresh process with one thread: the plain loop (fp32), and this project's
trainer in fp32 without ZeRO, in fp32 with ds_configs/zero2_fp32.json, and in bf16 with ds_configs/zero2.json.
Tokens/s is the median over a process's timed steps, then over the rounds.  Memory is the growth of the resident size
from before the model is built (libraries loaded, ranks met) to the peak: what weights, gradients, optimizer,
activations and buffers take.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

VARIANTS = {"plain PyTorch fp32": None, "fp32, ZeRO 0": {}, "fp32, ZeRO 2": "ds_configs/zero2_fp32.json",
            "bf16, ZeRO 2": "ds_configs/zero2.json"}
BASE = "plain PyTorch fp32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (("layers", 4, "layers"), ("hidden", 384, "hidden size"), ("heads", 6, "heads"),
                                ("length", 512, "T"), ("vocabulary", 4096, "vocabulary size"),
                                ("batch", 4, "samples a step"), ("steps", 6, "timed steps a round"),
                                ("rounds", 3, "rounds")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        print(json.dumps(measure(args)))
        return
    from aah_dist.bench.environment import describe

    print(describe("torch", "deepspeed", "megatron-core"))
    print(f"model     {args.layers} layers, hidden {args.hidden}, {args.heads} heads, T {args.length}, vocabulary "
          f"{args.vocabulary}, {args.batch} samples a step, AdamW, clipping, full attention")
    print(f"method    one thread, {args.rounds} interleaved rounds of new processes, {args.steps} timed steps after 2 "
          "others; medians")
    found = {name: [] for name in VARIANTS}
    for _ in range(args.rounds):
        for name in VARIANTS:
            found[name].append(in_new_process(name, sys.argv[1:]))
    speed = {name: statistics.median(r["tok_s"] for r in rounds) for name, rounds in found.items()}
    memory = {name: statistics.median(r["mib"] for r in rounds) for name, rounds in found.items()}
    print(f"{'variant':<20}{'tokens/s':>10}{'ratio':>8}{'peak MiB':>10}{'ratio':>8}{'last loss':>11}")
    for name in VARIANTS:
        print(f"{name:<20}{speed[name]:>10,.0f}{speed[name] / speed[BASE]:>8.3f}{memory[name]:>10,.0f}"
              f"{memory[name] / memory[BASE]:>8.3f}{found[name][-1]['loss']:>11.4f}")


def in_new_process(variant: str, argv: list[str]) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "aah_dist.bench.training", *argv, "--variant", variant]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"{variant} failed:\n{run.stderr[-3000:]}")
    return json.loads(run.stdout.splitlines()[-1])


class RandomRows:
    """Stands in for prepared text: rows of random tokens."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.tokens = np.random.default_rng(0).integers(0, vocabulary, (64, length + 1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> np.ndarray:
        return self.tokens[row]


class RandomData:
    """The part of PreparedData that the trainer reads."""

    def __init__(self, vocabulary: int) -> None:
        self.vocab_size = vocabulary
        self.meta = {"text": {"fingerprint": "random"}, "tokenizer": {"fingerprint": "none"}}

    def split(self, name: str, length: int) -> RandomRows:
        return RandomRows(self.vocab_size, length)


def measure(args: argparse.Namespace) -> dict:
    """Tokens/s and peak memory of one variant in this process."""
    from aah_dist.config.load import load_config

    config = load_config("demo", "full_attention", {
        "model.num_layers": args.layers, "model.hidden_size": args.hidden, "model.num_heads": args.heads,
        "model.seq_length": args.length, "model.position": "learned", "model.norm": "layernorm",
        "train.micro_batch_size": args.batch, "train.global_batch_size": args.batch, "train.warmup_steps": 2,
        "train.steps": 2 + args.steps, "train.lr": 1e-3, "parallel.tensor_parallel_size": 1})
    build = plain_builder(config, args) if VARIANTS[args.variant] is None else trainer_builder(config, args)
    gc.collect()
    before = reset_peak()
    step = build()
    seconds, loss = [], 0.0
    for number in range(2 + args.steps):
        began = time.perf_counter()
        loss = step(number)
        seconds.append(time.perf_counter() - began)
    return {"tok_s": args.batch * args.length / statistics.median(seconds[2:]), "mib": (peak() - before) / 1024,
            "loss": loss}


def plain_builder(config, args: argparse.Namespace):
    import torch

    from aah_dist.bench.plain import PlainGPT
    from aah_dist.data.sampler import SampleOrder, micro_batch_ids
    from aah_dist.training.engine import parameter_groups
    from aah_dist.training.schedule import learning_rate

    train = config.train

    def build():
        model = PlainGPT(config.model, args.vocabulary)
        optimizer = torch.optim.AdamW(parameter_groups(model, train), betas=(train.beta1, train.beta2), eps=train.eps)
        rows = RandomRows(args.vocabulary, args.length)
        order = SampleOrder(len(rows), train.seed)

        def step(number: int) -> float:
            ids = micro_batch_ids(number, 0, 0, 1, args.batch, args.batch)
            block = torch.from_numpy(np.stack([rows[order.row(k)] for k in ids]))
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(number, train, train.steps)
            loss = model(block[:, :-1], block[:, 1:]).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.detach())
        return step
    return build


def trainer_builder(config, args: argparse.Namespace):
    from aah_dist.config.deepspeed import build_ds_config, read_ds_config
    from aah_dist.config.validate import resolve_layout
    from aah_dist.parallel import device as devices
    from aah_dist.parallel import launch
    from aah_dist.training import start
    from aah_dist.training.trainer import Trainer

    launch.discover()
    layout = resolve_layout(config, 1)
    ds = VARIANTS[args.variant]
    ds_config = build_ds_config(read_ds_config(ds) if isinstance(ds, str) else ds, config, layout)
    device = devices.select_device("cpu", 0)
    mpu = start.join_job(config, ds_config, 1, device)

    def build():
        folder = Path(tempfile.gettempdir())
        trainer = Trainer(config, layout, ds_config, RandomData(args.vocabulary), mpu, device, folder, None)
        return lambda number: trainer.train_step(number).loss
    return build


def reset_peak() -> float:
    """Resident KiB now, from which a new peak is counted."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> float:
    """Peak resident KiB since reset_peak."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return float(line.split()[1])


if __name__ == "__main__":
    main()
