"""The variants of bench/step.py on one model in one process: their policies, steps and times."""

import argparse
import gc
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from aah_dist.config.load import load_config
from aah_dist.config.pairs import acr, exact_pair_ratio
from aah_dist.config.plans import read_plan
from aah_dist.config.schema import ConfigError, RunConfig

PLANS = Path(__file__).parent / "plans"
REGIMES = ("full_adaptive", "shallow_freeze", "deep_practical_reuse", "grouping_off")
BASE = "full_attention"
VARIANTS = (BASE, *(f"plan:{name}" for name in REGIMES), *(f"live:{name}" for name in REGIMES))
LAYERS, HEADS, VOCABULARY = 16, 12, 50257  # of the whole model
INTERVAL = 5


def variant_config(variant: str, args: argparse.Namespace, length: int) -> RunConfig:
    """The 1B preset at args' size under a variant's policy.  Raises ConfigError for sizes that do not fit."""
    layers = args.layers or (2 if length <= 8192 else 1)
    if layers > LAYERS:
        raise ConfigError(f"--layers {layers} is above {LAYERS}, the layers of the frozen plans; give at most that.")
    overrides = {"model.num_layers": layers, "model.hidden_size": args.hidden, "model.ffn_hidden_size": 4 * args.hidden,
                 "model.num_heads": HEADS, "model.seq_length": length, "model.max_positions": length,
                 "model.vocab_size": round(VOCABULARY * layers / LAYERS), "model.dropout": args.dropout,
                 "model.attention_dropout": args.dropout, "aah.windows": [0.125, 0.25, 0.5, 1.0],
                 "aah.warmup_steps": 1, "aah.interval": INTERVAL}
    kind, _, regime = variant.partition(":")
    if kind == "plan":
        plan = plan_windows(regime, layers, length).tolist()
        return load_config("1b_4096", "fixed_window", overrides | {"aah.fixed_window": plan})
    return load_config("1b_4096", regime or variant, overrides)


def plan_windows(regime: str, layers: int, length: int) -> np.ndarray:
    """The frozen plan of a regime for a model of at most 16 layers: int64 [layers, 12], tokens."""
    return read_plan(str(PLANS / f"{regime}.yaml"), None, LAYERS, HEADS, length)[:layers]


class Parts:
    """Seconds spent in parts of a step, while `on`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.on, self.seconds = clock, True, defaultdict(float)

    def begin(self, part: str) -> None:
        if self.on:
            self.seconds[part] -= self.clock()

    def end(self, part: str) -> None:
        if self.on:
            self.seconds[part] += self.clock()

    def around(self, part: str, function: Callable) -> Callable:
        def timed(*arguments: object) -> None:
            self.begin(part)
            function(*arguments)
            self.end(part)
        return timed


class Run:
    """One trainer on random tokens, and a policy for each variant."""

    def __init__(self, args: argparse.Namespace, length: int) -> None:
        """args: threads, device, variants, layers, hidden and dropout of bench/step.py."""
        from aah_dist.bench.training import RandomData, reset_peak
        from aah_dist.config.deepspeed import build_ds_config, read_ds_config
        from aah_dist.config.validate import resolve_layout
        from aah_dist.parallel import device as devices
        from aah_dist.parallel import launch
        from aah_dist.training import start
        from aah_dist.training.policy import Policy
        from aah_dist.training.trainer import Trainer

        configs = {variant: variant_config(variant, args, length) for variant in args.variants}
        self.config = configs[BASE]
        launch.discover()
        self.device = devices.select_device(args.device, 0)
        self.on_gpu = self.device.type == "cuda"
        layout = resolve_layout(self.config, 1)
        recipe = "ds_configs/zero2.json" if self.on_gpu else "ds_configs/zero2_fp32.json"
        ds_config = build_ds_config(read_ds_config(recipe), self.config, layout)
        mpu = start.join_job(self.config, ds_config, 1, self.device)
        gc.collect()
        self.resident_before = 0.0 if self.on_gpu else reset_peak()
        self.trainer = Trainer(self.config, layout, ds_config, RandomData(self.config.model.vocab_size), mpu,
                               self.device, Path(tempfile.gettempdir()), None)
        self.context, self.policies, self.windows = self.trainer.context, {}, {}
        for variant, config in configs.items():
            self.policies[variant] = Policy(config, layout, self.context, 0, self.device, None)
            self.windows[variant] = self.context.windows
        self.live = [variant for variant, policy in self.policies.items() if policy.controller]
        read_clock = time.process_time if args.threads == 1 and not self.on_gpu else time.perf_counter

        def clock() -> float:
            devices.synchronize(self.device)
            return read_clock()
        self.clock, self.measuring, self.parts = clock, Parts(clock), Parts(clock)
        if self.live:
            buffer = self.policies[self.live[0]].buffer
            buffer.write = self.measuring.around("statistics", buffer.write)
            for variant in self.live:
                self.policies[variant].buffer = buffer

    def records(self, rounds: int) -> Iterator[dict]:
        """One a round and variant: its windows' figures, seconds of a step and an evaluation, and seconds of the
        step's parts, or None where they were not read."""
        self._read_parts()
        control = self.first_step() / INTERVAL
        kinds = ["warm-up"] * self.on_gpu + ["timed"] * rounds + ["parts"] * self.on_gpu
        for number, kind in enumerate(kinds, start=1):
            self.parts.on = kind == "parts" or not self.on_gpu
            for variant in self.policies:
                figures = self._figures(variant)
                seconds = self.measure(variant, number, control if variant in self.live else 0.0)
                yield {"variant": variant, "round": number, "kind": kind} | figures | seconds

    def first_step(self) -> float:
        """Full attention with the statistics from which all live regimes then decide; seconds of statistics and of
        one decision, 0 without live regimes."""
        policies = [self.policies[variant] for variant in self.live]
        self.select(BASE)
        for policy in policies:
            policy.begin(0, shown=False)
        if policies:
            self.trainer.policy = policies[0]
        self.trainer.train_step(0)
        deciding = []
        for variant, policy in zip(self.live, policies, strict=True):
            began = self.clock()
            policy.end(0)
            deciding.append(self.clock() - began)
            self.windows[variant] = self.context.windows
        return self.measuring.seconds["statistics"] + statistics.median(deciding) if deciding else 0.0

    def measure(self, variant: str, step: int, control: float) -> dict:
        """Seconds of an evaluation and a step.  control: seconds of statistics and decisions that a step has on
        average, which are added; those that this step happens to spend are left out."""
        self.select(variant)
        policy, parts = self.trainer.policy, self.parts.seconds
        parts.clear()
        self.measuring.seconds.clear()
        evaluation = self._evaluate()
        in_evaluation = parts.pop("attention", None)
        policy.begin(step, shown=False)
        began = self.clock()
        self.trainer.train_step(step)
        measuring = self.measuring.seconds["statistics"]
        training = self.clock() - began - measuring + control
        found = dict.fromkeys(("attention", "optimizer", "control"))
        if self.parts.on:  # statistics are written within core attention's forward
            found = {"attention": parts["attention"] - measuring, "optimizer": parts["optimizer"], "control": control}
        policy.end(step)
        if policy.controller:
            self.windows[variant] = self.context.windows
        return {"training": training, "evaluation": evaluation, "evaluation_attention": in_evaluation} | found

    def select(self, variant: str) -> None:
        self.trainer.policy, self.context.windows = self.policies[variant], self.windows[variant]

    def _evaluate(self) -> float:
        from aah_dist.training.evaluation import validation_loss

        trainer, began = self.trainer, self.clock()
        validation_loss(trainer.engine, trainer.engine.module, trainer.valid_rows, 1, micro_batch_size=1, dp_rank=0,
                        dp_size=1, dp_group=trainer.mpu.get_data_parallel_group(), device=self.device)
        return self.clock() - began

    def _figures(self, variant: str) -> dict:
        from aah_dist.training.flops import training_flops_per_token

        model, windows = self.config.model, self.windows[variant]
        return {"layers": model.num_layers, "vocabulary": model.vocab_size,
                "parameters": sum(p.numel() for p in self.trainer.engine.module.parameters()),
                "acr": acr(windows, model.seq_length), "pairs": exact_pair_ratio(windows, model.seq_length),
                "flops": training_flops_per_token(model, model.vocab_size, windows)}

    def _read_parts(self) -> None:
        from aah_dist.model.core_attention import WindowCoreAttention

        engine, parts = self.trainer.engine, self.parts
        for module in engine.module.modules():
            if isinstance(module, WindowCoreAttention):
                module.register_forward_pre_hook(lambda *_: parts.begin("attention"))
                module.register_forward_hook(lambda *_: parts.end("attention"))
                module.register_full_backward_pre_hook(lambda *_: parts.begin("attention"))
                module.register_full_backward_hook(lambda *_: parts.end("attention"))
        engine.step = parts.around("optimizer", engine.step)


def peak_memory(args: argparse.Namespace, length: int) -> dict:
    """MiB at the peak of two steps of the last variant."""
    from aah_dist.bench.training import peak
    from aah_dist.parallel import device as devices

    run, variant = Run(args, length), args.variants[-1]
    if variant in run.live:
        run.first_step()
    run.select(variant)
    if variant not in run.live:
        run.trainer.train_step(0)
    run.trainer.policy.begin(INTERVAL, shown=False)  # a live regime's second decision follows this step
    run.trainer.train_step(INTERVAL)
    if run.on_gpu:
        return {"variant": variant, "mib": devices.memory(run.device)["perf/gpu_alloc_max_mb"]}
    return {"variant": variant, "mib": (peak() - run.resident_before) / 1024}
