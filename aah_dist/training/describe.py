"""The plan of a run in words: what `--dry_run` prints and what every run prints first."""

from collections import Counter
from pathlib import Path

from aah_dist.config.deepspeed import offloads_optimizer, precision, zero_stage
from aah_dist.config.schema import ConfigError, RunConfig
from aah_dist.config.size import count_parameters, memory_per_rank
from aah_dist.config.validate import Layout, notes
from aah_dist.config.windows import candidate_windows, policy_from_config
from aah_dist.training.checkpoint import find
from aah_dist.training.start import open_data


def plan(config: RunConfig, layout: Layout, ds_config: dict, vocab_size: int | None) -> list[str]:
    """Lines on model, policy, layout, batch and precision; vocab_size None where only the data would tell."""
    model, train = config.model, config.train
    stage, kind = zero_stage(ds_config), precision(ds_config)
    size = f"{count_parameters(model, vocab_size):,} parameters, vocabulary {vocab_size:,}" if vocab_size else \
        "parameters: known once the data is prepared (vocabulary)"
    lines = [
        f"model     {model.num_layers} layers, hidden {model.hidden_size}, {model.num_heads} heads"
        f"{f' ({model.kv_heads} kv)' if model.kv_heads != model.num_heads else ''}, T {model.seq_length}; {size}",
        f"windows   {config.aah.policy}: {windows_in_words(config)}",
        f"layout    {layout.world_size} rank{'s' if layout.world_size > 1 else ''} = TP {layout.tp} x DP {layout.dp}, "
        f"ZeRO {stage}, {kind}"
        f"{', sequence parallel' if config.parallel.sequence_parallel and layout.tp > 1 else ''}"
        f"{', optimizer on the CPU' if offloads_optimizer(ds_config) else ''}",
        f"batch     {train.global_batch_size} samples = micro {train.micro_batch_size} x DP {layout.dp} x accumulation "
        f"{layout.accumulation}; {train.global_batch_size * model.seq_length:,} tokens a step, {train.steps} steps",
    ]
    return lines + [f"note      {note}" for note in notes(config, layout)]


def windows_in_words(config: RunConfig) -> str:
    """The windows in force, or how the controller chooses them; aah.head_blocks must be resolved."""
    aah = config.aah
    if not aah.decides:
        counts = Counter(policy_from_config(config).flat)
        used = ", ".join(f"{count} x {window}" for window, count in sorted(counts.items()))
        return f"{used} (heads x keys, over all layers)"
    if not aah.window_control:
        return "full attention for the whole run; decisions are recorded, none is executed"
    keys = ", ".join(map(str, candidate_windows(config)))
    rule = f"one of {keys} keys a {'KV group' if aah.control_unit == 'kv_group' else 'head'}"
    if aah.policy == "simple":
        shares = "equal shares" if aah.quotas is None else f"shares of {', '.join(map(str, aah.quotas))}"
        rule = f"{keys} keys in {shares}, heads sorted by entropy"
    decided = "decided every " + ("step" if aah.interval == 1 else f"{aah.interval} steps")
    how = decided if aah.ablation == "none" else f"{decided}, shuffled every step"
    if aah.ablation == "random_uniform":
        return f"{rule}, drawn at random every step from step 0 on; decisions are recorded, none is executed"
    first = max(1, aah.warmup_steps)
    start = f"full attention for {first} step{'s' if first > 1 else ''}, then "
    if aah.ramp_steps:
        start += f"narrowing over {aah.ramp_steps} steps to "
    groups = ""
    if aah.policy == "adaptive":
        blocks = f"; {aah.head_blocks} head block{'' if aah.head_blocks == 1 else 's'}"
        groups = blocks if aah.grouping else "; no groups"
    return f"{start}{rule}, {how}{groups}"


def memory_lines(config: RunConfig, layout: Layout, ds_config: dict, vocab_size: int) -> list[str]:
    parts = memory_per_rank(config, layout, zero_stage(ds_config), precision(ds_config), offloads_optimizer(ds_config),
                            vocab_size)
    lines = [f"  {name:<28}{size / 2**20:>12,.1f} MiB" for name, size in parts.items()]
    return ["memory    a rank, estimated:", *lines]


def dry_run(config: RunConfig, layout: Layout, ds_config: dict) -> int:
    """Print the plan and the memory; returns the exit code.

    Raises: ConfigError for data that cannot be used; data that the run would prepare itself may still be missing.
    """
    data, missing = None, None
    try:
        data = open_data(config)
    except ConfigError as error:
        missing = error
    vocab_size = config.model.vocab_size or (data.vocab_size if data else None)
    print("\n".join(plan(config, layout, ds_config, vocab_size)))
    if vocab_size:
        print("\n".join(memory_lines(config, layout, ds_config, vocab_size)))
    if missing and (config.data.text is None or Path(config.data.path).exists()):
        raise missing
    print(f"data      {config.data.path}" + (", prepared when the run starts" if missing else ""))
    print("dry run: everything checked, nothing trained")
    return 0


def what_next(folder: Path) -> list[str]:
    return [f"run         {folder}",
            f"metrics     {folder}/metrics.jsonl, windows in {folder}/policy.jsonl",
            f"checkpoint  {find(folder).path}",
            f"next        python aah_dist/evaluate.py --checkpoint {folder}",
            f"            python aah_dist/report.py {folder}"]
