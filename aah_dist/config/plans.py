"""Plans: windows read from a file, and two controls that do the same work without the plan's choice of heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, List, Optional

import numpy as np
import yaml

from aah_dist.config.errors import ConfigError
from aah_dist.config.pairs import pairs, tokens


def read_plan(path: str, step: Optional[int], layers: int, heads: int, length: int) -> np.ndarray:
    """The windows of a file, int64 [layers, heads] in tokens, each in 1..length.

    path: a run's policy.jsonl, of which the windows in force at `step` are taken (None: the last); or a JSON or YAML
    file {windows: [[...] per layer]} of token counts or fractions of `length`.  A relative path starts at the working
    directory.  Raises ConfigError for a file that is not one of these, or a plan of another shape.
    """
    text = _text(path)
    rows = _recorded(path, text, step) if path.endswith(".jsonl") else _listed(path, text, step)
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ConfigError(f"aah.plan {path} does not hold its windows as one list per layer ([[...], [...]]).")
    if len(rows) != layers:
        raise ConfigError(f"aah.plan {path} has windows for {len(rows)} layers; the model has {layers} "
                          "(model.num_layers).")
    for layer, row in enumerate(rows):
        if len(row) != heads:
            raise ConfigError(f"aah.plan {path} has {len(row)} windows in layer {layer}; the model has {heads} heads "
                              "(model.num_heads).")
    return np.array([[tokens(w, length, f"aah.plan {path}: window") for w in row] for row in rows], dtype=np.int64)


def uniform_matched(plan: np.ndarray, length: int) -> np.ndarray:
    """One window for all heads, int64 of the plan's shape, whose query-key pairs come nearest to the plan's in total;
    of two equally near, the smaller."""
    total = sum(pairs(window, length) for window in plan.flat)
    windows = np.arange(1, length + 1)
    one_head = windows * length - windows * (windows - 1) // 2
    return np.full(plan.shape, windows[np.abs(one_head * plan.size - total).argmin()], dtype=np.int64)


def random_heads_matched(plan: np.ndarray, seed: int) -> np.ndarray:
    """The plan, int64 [layers, heads], with the heads of each layer permuted once; drawn from (seed, layer)."""
    return np.stack([np.random.Generator(np.random.PCG64([seed, layer])).permutation(row)
                     for layer, row in enumerate(plan)])


def _text(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"aah.plan {path} does not exist, seen from {Path.cwd()}.") from None
    except IsADirectoryError:
        raise ConfigError(f"aah.plan {path} is a folder; give a file, for example "
                          f"{Path(path) / 'policy.jsonl'}.") from None
    except OSError as error:
        raise ConfigError(f"aah.plan {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"aah.plan {path} is not a text file.") from None
    if not text.strip():
        raise ConfigError(f"aah.plan {path} is empty; it must hold windows.")
    return text


def _recorded(path: str, text: str, step: Optional[int]) -> Any:
    records: List[dict] = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise ConfigError(f"aah.plan {path} line {number} is not a record of a policy.jsonl "
                              '({"step": ..., "windows": ...}).')
        records.append(record)
    in_force = [record for record in records if step is None or record["step"] <= step]
    if not in_force:
        raise ConfigError(f"aah.plan_step {step} is before the first record of aah.plan {path}; give at least "
                          f"{records[0]['step']}.")
    if "windows" not in in_force[-1]:
        raise ConfigError(f"aah.plan {path} has no windows at step {in_force[-1]['step']}: that run redrew them every "
                          f"step ({in_force[-1].get('ablation', 'no windows recorded')}); give an earlier "
                          "aah.plan_step, or another run's plan.")
    return in_force[-1]["windows"]


def _listed(path: str, text: str, step: Optional[int]) -> Any:
    if step is not None:
        raise ConfigError(f"aah.plan_step {step} needs a policy.jsonl; aah.plan {path} holds one set of windows, so "
                          "leave it out.")
    try:
        # Not every JSON file is YAML: tabs.
        content = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"aah.plan {path} is not valid JSON or YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict) or "windows" not in content:
        raise ConfigError(f"aah.plan {path} has no entry windows; it must hold windows: [[...] per layer].")
    return content["windows"]
