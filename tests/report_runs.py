"""Run folders written by hand, as training leaves them, for the report's tests."""

import json
from pathlib import Path

import numpy as np

from aah_dist.config.load import load_config, save_config


def write_run(folder: Path, steps: int, policy: list[dict], *, log: int = 10, evaluate: int = 110,
              finished: bool = True, lines: dict[int, dict] | None = None, **options: object) -> Path:
    """A run of `steps` done steps whose losses fall smoothly.

    policy: the lines of policy.jsonl.  lines: {step: values} put over those of a metrics line.  options: of the
    configuration, over the demo preset with full attention, named section__field.
    """
    folder.mkdir(parents=True)
    overrides = {"data.path": str(folder / "no_data"), "train.steps": steps,
                 **{name.replace("__", "."): value for name, value in options.items()}}
    config = load_config("demo", "full_attention", overrides)
    save_config(config, folder / "config.yaml")
    metrics = [{"step": 0, "run/started": 1, "run/config_hash": "0" * 64, "run/git_commit": "c0ffee", "run/seed": 7}]
    noise = np.random.default_rng(0).normal(0, 0.05, steps + 1)
    for step in range(1, steps + 1):
        values = {}
        if step in (1, steps) or step % log == 0:
            ratio = mean_ratio(policy, step - 1, config.model.seq_length)
            values = {"train/loss": 3 + 4 * np.exp(-4 * step / steps) + noise[step], "perf/tok_s": 1000.0 + step,
                      "perf/cpu_rss_mb": 400.0 + step, "aah/ACR": ratio, "aah/exact_pair_ratio": 2 * ratio - ratio**2}
        if evaluate and (step == steps or step % evaluate == 0):
            values |= {"val/loss": 3.1 + 4 * np.exp(-4 * step / steps), "val/ppl": 30.0}
        values |= (lines or {}).get(step, {})
        if values:
            metrics.append({"step": step, **values})
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "policy.jsonl", policy)
    if finished:
        (folder / "finished.json").write_text(json.dumps({"steps": steps, "val_loss": 3.17,
                                                          "valid_unigram_entropy": 5.0}))
    return folder


def mean_ratio(policy: list[dict], step: int, length: int) -> float:
    line = [line for line in policy if line["step"] <= step][-1]
    return float(np.mean(line.get("windows", line.get("raw")))) / length


def write_lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def changing_windows(layers: int, heads: int, steps: int, changes: int, windows: list[int]) -> list[dict]:
    """Lines of policy.jsonl: full attention, then `changes` lines that each move a few heads by one window."""
    draw = np.random.default_rng(1)
    lines = [{"step": 0, "windows": [[windows[-1]] * heads] * layers}]
    index = draw.integers(0, len(windows), (layers, heads))
    at = np.sort(draw.choice(np.arange(20, steps), changes, replace=False))
    for step in at:
        moved = draw.random((layers, heads)) < 0.1
        index = np.clip(index + moved * draw.choice([-1, 1], (layers, heads)), 0, len(windows) - 1)
        lines.append({"step": int(step), "windows": np.array(windows)[index].tolist()})
    return lines
