"""The records of a run read back: configuration, metrics, policy, newest checkpoint.  Imports no torch.

A run that is still training may be read: the last line of a .jsonl file may be cut, and nothing is locked or changed.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aah_dist.config.load import read_config
from aah_dist.config.pairs import acr, exact_pair_ratio
from aah_dist.config.schema import ConfigError, RunConfig


@dataclass(frozen=True)
class PolicyHistory:
    """What policy.jsonl says, line by line, of the steps done (a line for a step that has not run yet is left out).

    steps: int64 [lines]; a line holds from that 0-based step on.  windows: int64 [lines, layers, heads] in tokens.
    ablation: the redraw the executed windows went through, which a line does not show: `windows` are then the
    controller's raw choices.  None: `windows` are those in force.
    """

    steps: np.ndarray
    windows: np.ndarray
    ablation: str | None


@dataclass(frozen=True)
class RunRecords:
    """One run as its folder tells it.

    metrics: the lines of metrics.jsonl.  manifest: that of the newest complete checkpoint, {} without one.
    finished: finished.json, None while the run is not finished.  data_meta: metadata.json of the prepared text, {} if
    it is not there or the text is another than the run's.
    """

    folder: Path
    config: RunConfig
    metrics: list[dict]
    policy: PolicyHistory
    manifest: dict
    finished: dict | None
    data_meta: dict

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps done, int64 [n], and values, float64 [n], of the lines where `key` is a finite number."""
        found = [(line["step"], line[key]) for line in self.metrics if _is_number(line.get(key))]
        return (np.array([step for step, _ in found], dtype=np.int64),
                np.array([value for _, value in found], dtype=np.float64))

    def fact(self, key: str) -> object | None:
        """What the run wrote down once, when it started; None if it did not."""
        return next((line[key] for line in self.metrics if key in line), None)

    def context_ratio(self, key: str) -> tuple[np.ndarray, np.ndarray, bool]:
        """aah/ACR or aah/exact_pair_ratio as a step function: 0-based steps it starts to hold at, values, and whether
        it is that of every step (from the policy); of redrawn windows only the logged values are known."""
        if self.policy.ablation is not None:
            steps, values = self.series(key)
            return steps - 1, values, False
        ratio = {"aah/ACR": acr, "aah/exact_pair_ratio": exact_pair_ratio}[key]
        values = [ratio(windows, self.config.model.seq_length) for windows in self.policy.windows]
        return self.policy.steps, np.array(values), True

    @property
    def steps_done(self) -> int:
        """Optimizer steps done at the last line of metrics.jsonl."""
        return self.metrics[-1]["step"]

    @property
    def unigram_entropy(self) -> tuple[float | None, str]:
        """Unigram entropy of the held-out text in nats a token, and where it was found."""
        sources = (("finished.json", self.finished or {}), (f"{self.config.data.path}/metadata.json", self.data_meta))
        for source, values in sources:
            if _is_number(values.get("valid_unigram_entropy")):
                return values["valid_unigram_entropy"], source
        return None, "neither finished.json nor data.path has it"

    @property
    def vocab_size(self) -> int | None:
        known = (self.config.model.vocab_size, self.manifest.get("vocab_size"),
                 self.data_meta.get("tokenizer", {}).get("vocab_size"))
        return next((size for size in known if size), None)


def read_run(folder: Path) -> RunRecords:
    """The records of the run in `folder`.

    Raises: ConfigError if it is not a run's folder, nothing has been logged yet, or a line before the last is broken.
    """
    for name in ("config.yaml", "metrics.jsonl", "policy.jsonl"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} is not a run's folder: it has no {name}; give a folder that pretrain.py "
                              "wrote, such as runs/demo.")
    config = read_config(folder / "config.yaml")
    metrics = [record for _, record in _lines(folder / "metrics.jsonl")]
    if not any("train/loss" in line for line in metrics):
        raise ConfigError(f"{folder} has no logged step yet (metrics.jsonl holds no train/loss); report it after its "
                          "first log line.")
    manifest = _newest_manifest(folder / "checkpoints")
    return RunRecords(folder, config, metrics, _policy(folder / "policy.jsonl", config, metrics[-1]["step"]),
                      manifest, _object(folder / "finished.json"), _data_meta(config, manifest))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _lines(path: Path) -> list[tuple[int, dict]]:
    """(line number, record) of a .jsonl file; a last line that is not whole is left out."""
    lines = path.read_text(encoding="utf-8", errors="replace").rstrip().split("\n")
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            found.append((number, record))
        elif number < len(lines):
            raise ConfigError(f"{path} line {number} is not a JSON object with a step; restore the file, or delete "
                              "that line.")
    return found


def _policy(path: Path, config: RunConfig, steps_done: int) -> PolicyHistory:
    steps, windows, ablation = [], [], None
    for number, record in _lines(path):
        if record["step"] >= steps_done:
            break
        ablation = record.get("ablation", ablation)
        steps.append(record["step"])
        windows.append(_windows(record, config.model.num_layers, config.model.num_heads, f"{path} line {number}"))
    if not steps:
        raise ConfigError(f"{path} holds no policy; report the run after its first log line.")
    return PolicyHistory(np.array(steps, dtype=np.int64), np.stack(windows), ablation)


def _windows(record: dict, layers: int, heads: int, where: str) -> np.ndarray:
    """int64 [layers, heads]"""
    try:
        array = np.array(record.get("raw", record.get("windows")))
    except ValueError:  # rows of unequal length
        array = np.empty(0)
    if array.shape != (layers, heads) or array.dtype.kind != "i" or array.min() < 1:
        raise ConfigError(f"{where} does not hold one window for each of the {layers} layers x {heads} heads of "
                          "config.yaml; restore the file, or delete that line.")
    return array.astype(np.int64)


def _object(path: Path) -> dict | None:
    """The JSON object in a file; None if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _newest_manifest(folder: Path) -> dict:
    # A checkpoint gets its final name when it is complete.
    for path in sorted(folder.glob("step_*"), reverse=True):
        if path.suffix != ".partial" and (manifest := _object(path / "manifest.json")):
            return manifest
    return {}


def _data_meta(config: RunConfig, manifest: dict) -> dict:
    meta = _object(Path(config.data.path) / "metadata.json") or {}
    fingerprint = manifest.get("text_fingerprint")
    if fingerprint and meta.get("text", {}).get("fingerprint") != fingerprint:
        return {}
    return meta
