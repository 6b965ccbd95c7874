"""What the controller costs: python -m aah_dist.bench.controller

1. One decision (decide, adopt and the next step's windows) for 16 layers x 12 heads, from random statistics that differ
   from head to head and from call to call.  To reach: 10 ms on one core for full_adaptive.
2. Statistics and control as a share of training at interval 5, (statistics + control) / (5 x step): for the demo in one
   process and for one layer of the 1B model at T 4096.  To reach: 1 %.

Steps are the trainer's own: forward, backward and update.  The demo measures every other step; its step time is that of
the steps between.  The 1B layer (fp32, no dropout, 512 tokens of vocabulary) measures every step, and what measuring
took is subtracted.  Shares are of CPU time, which other jobs on the machine change less than they change the clock.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from aah_dist.config.load import load_config
from aah_dist.config.statistics import COLUMNS

REGIMES = ("full_adaptive", "shallow_freeze", "grouping_off", "deep_practical_reuse")
DECISION_MS, SHARE = 10.0, 0.01
INTERVAL = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of decisions and of the demo (default: 3)")
    parser.add_argument("--quick", action="store_true", help="one round of decisions and of the demo, no 1B layer")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rounds = 1 if args.quick else args.rounds
    if args.part:
        print(json.dumps(PARTS[args.part](args.rounds)))
        return
    from aah_dist.bench.environment import describe

    print(describe("torch", "numpy", "deepspeed", "megatron-core"))
    print(f"method    one thread, {args.rounds} rounds, medians, CPU time unless it says wall clock")
    print(f"\n{'one decision, 16 x 12':<24}{'levels':>8}{'CPU ms':>9}{'wall ms':>9}   to reach")
    for regime, found in in_new_process("decision", args).items():
        goal = f"{DECISION_MS:g} ms" if regime == "full_adaptive" else ""
        print(f"{regime:<24}{found['levels']:>8.2f}{found['cpu']:>9.2f}{found['wall']:>9.2f}   {goal}".rstrip())
    print(f"\n{'ms':<24}{'step':>10}{'statistics':>12}{'control':>9}{f'share at interval {INTERVAL}':>22}   to reach")
    for part in ("demo",) if args.quick else ("demo", "layer"):
        for name, found in in_new_process(part, args).items():
            share = (found["statistics"] + found["control"]) / (INTERVAL * found["step"])
            print(f"{name:<24}{found['step']:>10,.0f}{found['statistics']:>12.1f}{found['control']:>9.2f}{share:>22.2%}"
                  f"   {SHARE:.0%}")


def in_new_process(part: str, args: argparse.Namespace) -> dict:
    """A part's figures: {row: {column: milliseconds or levels}}."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
                   "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "aah_dist.bench.controller", "--rounds", str(args.rounds), "--part", part]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"{part} failed:\n{run.stderr[-3000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def random_sums(rng: np.random.Generator, layers: int, heads: int, length: int, size: int) -> np.ndarray:
    """Statistics as of one sample: float64 [layers, heads, columns].  Scale, entropy and output norm vary over heads by
    about a fifth, as after some training, so that most layers get all levels of groups."""
    def varied(mean: float) -> np.ndarray:
        return mean * np.exp(0.2 * rng.standard_normal((layers, heads)))

    columns = {"rows": np.full((layers, heads), length), "values": np.full((layers, heads), length * size),
               "entropy": length * varied(5.0), "norm": length * varied(3.0),
               "last_mass": rng.uniform(0, 0.01, (layers, heads))}
    for name in "qkv":
        std = varied(0.6)
        columns[f"{name}_sum"] = length * size * 0.05 * std * rng.standard_normal((layers, heads))
        columns[f"{name}_square"] = length * size * std**2
        columns[f"{name}_abs"] = length * size * np.sqrt(2 / np.pi) * std
    return np.stack([columns[name] for name in COLUMNS], -1)


def decision(rounds: int, updates: int = 40) -> dict:
    """Regimes in turn; each round makes `updates` decisions."""
    from aah_dist.control.controller import Controller
    from aah_dist.control.settings import settings_from_config

    rng = np.random.default_rng(0)
    controllers, steps, found = {}, {}, {}
    for regime in REGIMES:
        config = load_config("1b_4096", regime)
        model = config.model
        shape = model.num_layers, model.num_heads, model.seq_length, model.head_dim
        controllers[regime] = Controller(settings_from_config(config))
        controllers[regime].decide(1, random_sums(rng, *shape))  # the first map
        steps[regime], found[regime] = config.aah.warmup_steps, {"cpu": [], "wall": [], "levels": []}
    for _ in range(rounds):
        for regime, controller in controllers.items():
            for _ in range(updates):
                step, sums = steps[regime], random_sums(rng, *shape)
                cpu, wall = time.process_time(), time.perf_counter()
                made = controller.decide(step, sums)
                controller.adopt(step, made.choice)
                controller.execute(step)
                found[regime]["cpu"].append(1e3 * (time.process_time() - cpu))
                found[regime]["wall"].append(1e3 * (time.perf_counter() - wall))
                found[regime]["levels"].append(float(np.mean([len(layer.levels) for layer in made.layers])))
                steps[regime] += controller.settings.aah.interval
    return {regime: {name: statistics.median(values) for name, values in columns.items()}
            for regime, columns in found.items()}


class Steps:
    """A trainer of one process on random tokens, and what its steps spend, in milliseconds of CPU time."""

    def __init__(self, preset: str, overrides: dict, ds: str | dict) -> None:
        from aah_dist.bench.training import RandomData
        from aah_dist.config.deepspeed import build_ds_config, read_ds_config
        from aah_dist.config.validate import resolve_layout
        from aah_dist.parallel import device as devices
        from aah_dist.parallel import launch
        from aah_dist.training import start
        from aah_dist.training.trainer import Trainer

        config = load_config(preset, "full_adaptive", {"aah.head_blocks": 1, **overrides})
        launch.discover()
        layout = resolve_layout(config, 1)
        ds_config = build_ds_config(read_ds_config(ds) if isinstance(ds, str) else ds, config, layout)
        device = devices.select_device("cpu", 0)
        mpu = start.join_job(config, ds_config, 1, device)
        data = RandomData(config.model.vocab_size or 1024)
        self.trainer = Trainer(config, layout, ds_config, data, mpu, device, Path(tempfile.gettempdir()), None)
        self.measuring = 0.0
        buffer = self.trainer.policy.buffer
        buffer.write = self._counted(buffer.write)

    def _counted(self, write: Callable) -> Callable:
        def counted(*arguments: object) -> None:
            began = time.process_time()
            write(*arguments)
            self.measuring += 1e3 * (time.process_time() - began)
        return counted

    def run(self, step: int) -> dict[str, float]:
        """step: without statistics; statistics: 0 where none were wanted; control: reduction, decision, broadcast."""
        self.measuring = 0.0
        self.trainer.policy.begin(step, shown=False)
        began = time.process_time()
        self.trainer.train_step(step)
        ended = time.process_time()
        self.trainer.policy.end(step)
        return {"step": 1e3 * (ended - began) - self.measuring, "statistics": self.measuring,
                "control": 1e3 * (time.process_time() - ended)}


def demo(rounds: int) -> dict:
    """Each round: one step with statistics, one without."""
    steps = Steps("demo", {"aah.warmup_steps": 2, "aah.interval": 2}, "ds_configs/zero2.json")
    found = [steps.run(number) for number in range(3 + 2 * rounds)][3:]
    with_statistics = [row for row in found if row["statistics"]]
    without = [row["step"] for row in found if not row["statistics"]]
    return {"demo": {"step": statistics.median(without)} | {
        name: statistics.median([row[name] for row in with_statistics]) for name in ("statistics", "control")}}


def layer(rounds: int) -> dict:
    """One step a policy, whatever the rounds: it takes long enough."""
    model = {"num_layers": 1, "vocab_size": 512, "dropout": 0.0, "attention_dropout": 0.0}
    steps = Steps("1b_4096", {**{f"model.{name}": value for name, value in model.items()}, "aah.warmup_steps": 1,
                              "aah.interval": 1}, {})
    windows = {"all full": [4096] * 12, "windows 6/2/2/2": [512] * 6 + [1024] * 2 + [2048] * 2 + [4096] * 2}
    found = {}
    for number, (name, row) in enumerate(windows.items()):
        steps.trainer.context.windows = np.array([row])
        found[f"1B layer, {name}"] = steps.run(number)
    return found


PARTS = {"decision": decision, "demo": demo, "layer": layer}

if __name__ == "__main__":
    main()
