"""Small runs for the resume tests: command-line options, and folders of checkpoints written without training."""

import json
from pathlib import Path

import numpy as np

from aah_dist.config.load import load_config, save_config
from aah_dist.config.schema import RunConfig
from aah_dist.config.validate import Layout
from aah_dist.training import checkpoint as checkpoints
from aah_dist.training.policy import PolicyState

OPTIONS = {
    "ds_config": "ds_configs/zero2_fp32.json", "data.text": None, "model.num_layers": 2, "model.hidden_size": 48,
    "model.num_heads": 4, "model.seq_length": 40, "model.dropout": 0.1, "model.position": "learned",
    "model.norm": "layernorm", "aah.head_blocks": 1, "train.steps": 8, "train.micro_batch_size": 14,
    "train.global_batch_size": 28, "train.warmup_steps": 2, "train.eval_interval": 4, "train.eval_samples": 4,
    "checkpoint.interval": 2, "log.interval": 1, "log.progress_bar": "off",
}
LAYOUT = Layout(tp=1, dp=1, accumulation=2, world_size=1)
FACTS = {"zero_stage": 2, "precision": "fp32", "grad_accum_dtype": "fp32", "offload": "none", "vocab_size": 300,
         "text_fingerprint": "text", "tokenizer_fingerprint": "tokenizer"}


def command_line(data: Path, output_dir: Path, **changes: object) -> list[str]:
    """Options of pretrain.py; `changes` are named section__field."""
    options = {**OPTIONS, "data.path": data, "output_dir": output_dir,
               **{name.replace("__", "."): value for name, value in changes.items()}}
    return [text for name, value in options.items() for text in (f"--{name}", "null" if value is None else str(value))]


def small_config(folder: Path, **changes: object) -> RunConfig:
    return load_config("demo", overrides={**OPTIONS, "output_dir": str(folder),
                                          **{name.replace("__", "."): value for name, value in changes.items()}})


def fake_checkpoint(config: RunConfig, step: int, layout: Layout = LAYOUT, facts: dict | None = None) -> Path:
    """A complete checkpoint whose tensors are a few bytes; the run's folder as training leaves it."""
    folder = Path(config.output_dir)
    final = folder / "checkpoints" / f"step_{step:08d}"
    partial = final.with_name(final.name + ".partial")
    partial.mkdir(parents=True)
    (partial / "state.pt").write_bytes(b"tensors")
    policy = PolicyState(np.full((2, 4), 40), {}, {})
    checkpoints._seal(partial, final, step, config, layout, policy, facts or FACTS)
    save_config(config, folder / "config.yaml")
    return final


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def curve(metrics: list[dict]) -> list[tuple]:
    """Step, loss, gradient norm, learning rate and validation loss of each line."""
    keys = ("step", "train/loss", "train/grad_norm", "train/lr", "val/loss")
    return [tuple(line.get(key) for key in keys) for line in metrics]
