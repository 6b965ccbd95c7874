"""Checks across sections: the layout of a run over its ranks, and what a resume may change."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import List, Optional, Tuple

from aah_dist.config.schema import ConfigError, RunConfig
from aah_dist.config.windows import candidate_windows

MAY_CHANGE = {
    "train": {"steps", "decay_steps", "eval_interval", "eval_samples"},
    "aah": {"backend", "collapse_fraction"},
}
LAYOUT_FIELDS = {"train": ("micro_batch_size", "recompute"), "parallel": ("sequence_parallel",)}


@dataclass(frozen=True)
class Layout:
    """How ranks share the work: world_size = tp x dp, global batch = micro batch x dp x accumulation."""

    tp: int
    dp: int
    accumulation: int
    world_size: int


def resolve_layout(config: RunConfig, world_size: int) -> Layout:
    """The layout of `config` on `world_size` ranks.  Raises ConfigError where it does not divide."""
    model, train = config.model, config.train
    tp = config.parallel.tensor_parallel_size
    if tp == "auto":
        sizes = (world_size, model.num_heads, model.kv_heads, model.ffn_size)
        tp = 1 if any(size % 2 for size in sizes) else 2
    _check_tensor_parallel(config, tp, world_size)
    dp = world_size // tp
    per_pass = train.micro_batch_size * dp
    if train.global_batch_size % per_pass:
        low = train.global_batch_size // per_pass * per_pass
        near = f"{low} and {low + per_pass}" if low else str(per_pass)
        raise ConfigError(
            f"train.global_batch_size {train.global_batch_size} is not a multiple of train.micro_batch_size "
            f"{train.micro_batch_size} x {dp} data-parallel ranks ({world_size} ranks / TP {tp}); nearest valid: "
            f"{near}.")
    return Layout(tp=tp, dp=dp, accumulation=train.global_batch_size // per_pass, world_size=world_size)


def _check_tensor_parallel(config: RunConfig, tp: int, world_size: int) -> None:
    model = config.model
    if world_size % tp:
        raise ConfigError(f"parallel.tensor_parallel_size {tp} does not divide the {world_size} ranks of this job; "
                          f"start a multiple of {tp} ranks or choose from {_divisors(world_size)}.")
    shared = {"model.num_heads": model.num_heads, "model.num_kv_heads": model.kv_heads,
              "the MLP width model.ffn_hidden_size": model.ffn_size}
    for name, size in shared.items():
        if size % tp:
            raise ConfigError(f"{name} {size} is not divisible by parallel.tensor_parallel_size {tp}; "
                              f"choose from {_divisors(math.gcd(*shared.values()))}.")
    if model.vocab_multiple % tp:
        raise ConfigError(f"model.vocab_multiple {model.vocab_multiple} is not divisible by "
                          f"parallel.tensor_parallel_size {tp}; give {math.lcm(model.vocab_multiple, tp)}.")
    if config.parallel.sequence_parallel and model.seq_length % tp:
        raise ConfigError(f"model.seq_length {model.seq_length} is not divisible by parallel.tensor_parallel_size "
                          f"{tp}, which parallel.sequence_parallel needs; nearest: "
                          f"{max(1, model.seq_length // tp) * tp}.")


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def resolve_head_blocks(config: RunConfig, layout: Layout, old: Optional[RunConfig] = None) -> int:
    """aah.head_blocks as a number S: auto is the TP size.

    `old` is the configuration stored with the run being resumed: its number stays, at any TP.  The result belongs into
    the stored configuration.  Raises ConfigError unless S divides the units and is 1 or a multiple of TP.
    """
    if old is not None and old.aah.head_blocks != "auto":
        return old.aah.head_blocks
    if config.aah.control_unit == "kv_group":
        name, units = "model.num_kv_heads", config.model.kv_heads
    else:
        name, units = "model.num_heads", config.model.num_heads
    given = config.aah.head_blocks
    blocks = layout.tp if given == "auto" else given
    valid = [s for s in range(1, units + 1) if units % s == 0 and (s == 1 or s % layout.tp == 0)]
    if blocks not in valid:
        fits = f" and be 1 or a multiple of TP {layout.tp}" if layout.tp > 1 else ""
        raise ConfigError(f"aah.head_blocks {given} must divide {name} {units}{fits}; give "
                          f"{' or '.join(map(str, valid))}.")
    return blocks


def notes(config: RunConfig, layout: Layout) -> List[str]:
    """Sentences worth printing: settings that are valid but do not do what they seem to."""
    found = []
    if config.parallel.sequence_parallel and layout.tp == 1:
        found.append("parallel.sequence_parallel has no effect at TP 1.")
    if config.train.warmup_steps >= config.train.steps:
        found.append(f"train.warmup_steps {config.train.warmup_steps} is not below train.steps {config.train.steps}: "
                     "the learning rate never reaches train.lr.")
    late = [step for step in config.checkpoint.steps if step > config.train.steps]
    if late:
        found.append(f"checkpoint.steps {late} lie beyond train.steps {config.train.steps}.")
    pattern = config.aah.layer_pattern or []
    if len(pattern) > config.model.num_layers:
        found.append(f"aah.layer_pattern has {len(pattern)} windows, the model {config.model.num_layers} layers: "
                     f"{pattern[config.model.num_layers:]} is not used.")
    return found + _controller_notes(config, layout)


def _controller_notes(config: RunConfig, layout: Layout) -> List[str]:
    aah, found = config.aah, []
    if not aah.decides or not aah.window_control:
        return found
    if aah.warmup_steps >= config.train.steps:
        found.append(f"aah.warmup_steps {aah.warmup_steps} is not below train.steps {config.train.steps}: no window is "
                     "ever decided, the whole run is full attention.")
    if config.model.seq_length not in candidate_windows(config):
        found.append(f"aah.windows {aah.windows} leaves out model.seq_length {config.model.seq_length}: the warm-up's "
                     "full attention is no choice after it.")
    if aah.head_blocks != "auto" and aah.head_blocks % layout.tp:
        found.append(f"aah.head_blocks {aah.head_blocks} at TP {layout.tp}: groups of heads may span ranks, whose work "
                     "then differs.")
    return found


def check_resume(old: RunConfig, new: RunConfig) -> None:
    """Raises ConfigError unless `new` only extends `old`: model, recipe, seed and regime must be the same.

    Steps, intervals, evaluation, logging, checkpoint settings, devices and time limits may differ.  data is not
    compared: its folder may move, and the fingerprints of text and tokenizer are checked against the checkpoint's.
    """
    for section, names in LAYOUT_FIELDS.items():
        for name in names:
            before, after = getattr(getattr(old, section), name), getattr(getattr(new, section), name)
            if before != after:
                raise ConfigError(f"{section}.{name} was {before} in this run and is {after} now; a run resumes in the "
                                  "layout it was started in.")
    for section in ("model", "aah", "train"):
        before, after = (dataclasses.asdict(getattr(config, section)) for config in (old, new))
        for name in before:
            # auto was resolved when the run was started.
            again = (section, name, after[name]) == ("aah", "head_blocks", "auto")
            if before[name] != after[name] and not again and name not in MAY_CHANGE.get(section, ()):
                raise ConfigError(f"{section}.{name} was {before[name]} in this run and is {after[name]} now; a resume "
                                  "may not change it: put it back, or choose another --output_dir.")


def resolve_decay_steps(new: RunConfig, old: Optional[RunConfig] = None) -> Tuple[int, str]:
    """The step at which the cosine ends, and a sentence that says so.

    `old` is the configuration stored with the run being resumed.  The result belongs into the stored configuration
    (train.decay_steps): a second extension then still finds the first start's value.
    """
    if new.train.decay_steps is not None:
        end, reason = new.train.decay_steps, "train.decay_steps"
    elif old is not None:
        end, reason = old.train.decay_steps or old.train.steps, "as the run was started"
    else:
        end, reason = new.train.steps, "train.steps"
    sentence = f"The learning rate's cosine ends at step {end} ({reason})."
    before = old.train.decay_steps or old.train.steps if old is not None else end
    if before != end:
        sentence = f"The learning rate's cosine is stretched from step {before} to step {end} ({reason})."
    elif new.train.steps > end:
        sentence += f" Steps {end} to {new.train.steps} run at train.min_lr; --train.decay_steps stretches it."
    return end, sentence
