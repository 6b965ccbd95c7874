"""Pretrain a GPT whose attention heads each read their own window.

    deepspeed aah_dist/pretrain.py --ds_config ds_configs/zero2.json
    python aah_dist/pretrain.py --help
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: it would shadow packages named like ours

from aah_dist.training.entry import run_main  # noqa: E402


def main() -> int:
    from aah_dist.config.cli import parse_args
    from aah_dist.config.deepspeed import build_ds_config, read_ds_config
    from aah_dist.config.validate import resolve_head_blocks, resolve_layout
    from aah_dist.config.windows import policy_from_config
    from aah_dist.parallel import launch

    config, flags = parse_args()
    ranks = launch.discover()
    layout = resolve_layout(config, ranks.world_size)
    ds_config = build_ds_config(read_ds_config(config.ds_config), config, layout)
    policy_from_config(config)
    resolve_head_blocks(config, layout)

    # Only now the slow imports: a mistake in the arguments is answered at once.
    print(f"starting {ranks.world_size} rank{'s' if ranks.world_size > 1 else ''} ...", flush=True)
    from aah_dist.parallel import device as devices
    from aah_dist.training import signals, start
    from aah_dist.training.checkpoint import open_checkpoint
    from aah_dist.training.describe import dry_run, plan, what_next
    from aah_dist.training.engine import check_engine_config
    from aah_dist.training.trainer import Trainer, run_facts

    device = devices.select_device(config.parallel.device, ranks.local_rank)
    devices.set_threads(device, ranks.local_size)
    check_engine_config(ds_config)
    start.check_attention(config, ds_config, device)
    if flags.dry_run:
        return dry_run(config, layout, ds_config)
    start.prepare_data(config, ranks)
    mpu = start.join_job(config, ds_config, layout.tp, device)
    data = start.open_data(config)
    facts = run_facts(ds_config, data, config.model.vocab_size or data.vocab_size)
    decision = start.on_rank0(lambda: start.open_run(config, layout, facts), device)
    config.train.decay_steps, config.aah.head_blocks = decision.decay_steps, decision.head_blocks
    print("\n".join(plan(config, layout, ds_config, config.model.vocab_size or data.vocab_size)
                    + start.facts(decision, data, device, ds_config) + decision.remarks), flush=True)

    checkpoint = open_checkpoint(Path(decision.checkpoint)) if decision.checkpoint else None
    if checkpoint and checkpoint.step == config.train.steps:
        print(f"{decision.folder} is finished at step {checkpoint.step}; a larger --train.steps extends it")
        return signals.EXIT_OK
    code = Trainer(config, layout, ds_config, data, mpu, device, Path(decision.folder), checkpoint).fit()
    if code == signals.EXIT_OK:
        print("\n".join(what_next(Path(decision.folder))), flush=True)
    return code


if __name__ == "__main__":
    run_main(main)
