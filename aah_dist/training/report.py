"""summary.md of a run: what it is, what came out, and how each number was obtained.  Imports no torch."""

import math
from pathlib import Path

import numpy as np

from aah_dist.config.schema import ConfigError
from aah_dist.config.size import count_parameters
from aah_dist.training import plots
from aah_dist.training.run_records import RunRecords

Row = tuple[str, str, str]
_UNKNOWN = "not recorded"
_CAPTIONS = {
    "losses": "Training loss as logged and smoothed, validation loss, and the unigram entropy of the held-out text.",
    "context": "ACR (mean of window / T over heads, the paper's routing diagnostic) and exact pair ratio (causal "
               "query-key pairs computed / all, which is what attention costs).",
    "windows_end": "The window of each head of each layer at the end; layer 0 is the first.",
    "windows_over_time": "The window of each head over the run; the layers from the bottom up, and in each its heads.",
}


def write_report(run: RunRecords) -> list[Path]:
    """Write summary.md and the PNGs into the run's folder; returns their paths, the summary first.

    Raises: ConfigError if the folder cannot be written.
    """
    path = run.folder / "summary.md"
    try:
        pictures = plots.draw_all(run)
        path.write_text(summary(run), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the report of {run.folder} cannot be written ({error.strerror}); it belongs into the run's "
                          "folder, so make that writable or report a copy of it.") from None
    return [path, *pictures]


def summary(run: RunRecords) -> str:
    """The text of summary.md (GitHub Markdown)."""
    planned = run.config.train.steps
    state = f"Finished: {planned:,} steps." if run.finished else \
        f"Not finished: {run.steps_done:,} of {planned:,} steps recorded; every number is as of then."
    parts = [f"# {run.folder.resolve().name}", state,
             "## The run", _table(("", "value", "source"), _what_it_is(run)),
             "## Results", _table(("", "value", "source"), _loss_rows(run) + _context_rows(run) + _speed_rows(run)),
             f"## Windows at step {run.steps_done:,}", _windows_sentence(run),
             _table(("window (tokens)", "heads", "share"), _window_rows(run)),
             "## Pictures"]
    parts += [f"![{caption}]({name}.png)\n\n{caption}" for name, caption in _CAPTIONS.items()]
    return "\n\n".join(parts) + "\n"


def _table(header: Row, rows: list[Row]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _what_it_is(run: RunRecords) -> list[Row]:
    config, manifest = run.config, run.manifest
    model, train, aah = config.model, config.train, config.aah
    heads = f"{model.num_heads} heads" + (f" ({model.kv_heads} kv)" if model.kv_heads != model.num_heads else "")
    size, size_source = "not known", "no vocabulary size in config.yaml, a checkpoint or data.path"
    if run.vocab_size:
        size = f"{count_parameters(model, run.vocab_size):,}"
        size_source = f"counted from the shapes in config.yaml, vocabulary {run.vocab_size:,}"
    layout, layout_source = _UNKNOWN, "no complete checkpoint yet"
    if manifest:
        layout = (f"TP {manifest['tp']} x DP {manifest['dp']}, ZeRO {manifest['zero_stage']}, "
                  f"{manifest['precision']}")
        layout_source = f"manifest.json of the checkpoint of step {manifest['step']:,}"
    seed = run.fact("run/seed")
    redrawn = f", redrawn each step by {run.policy.ablation}" if run.policy.ablation else ""
    return [
        ("regime", f"{config.regime} (policy {aah.policy}{redrawn})", "config.yaml"),
        ("preset", config.preset, "config.yaml"),
        ("model", f"{model.num_layers} layers, hidden {model.hidden_size}, {heads}, T {model.seq_length:,}",
         "config.yaml"),
        ("parameters", size, size_source),
        ("layout", layout, layout_source),
        ("batch", f"{train.global_batch_size} samples, {train.global_batch_size * model.seq_length:,} tokens a step",
         "config.yaml"),
        ("steps done / planned", f"{run.steps_done:,} / {train.steps:,}", "metrics.jsonl, last line; config.yaml"),
        ("data", config.data.path, "config.yaml"),
        ("seed", str(train.seed if seed is None else seed),
         f"{'config.yaml' if seed is None else 'metrics.jsonl, first line'}; weights, data order, dropout"),
        ("commit", str(run.fact("run/git_commit") or _UNKNOWN), "metrics.jsonl, first line"),
    ]


def _loss_rows(run: RunRecords) -> list[Row]:
    steps, train_loss = run.series("train/loss")
    val_steps, val_loss = run.series("val/loss")
    entropy, entropy_source = run.unigram_entropy
    rows = [("training loss", *_last(steps, train_loss, "train/loss", "mean over that step's batch", " nats a token")),
            ("validation loss", *_last(val_steps, val_loss, "val/loss", "mean over the held-out text's first "
                                       f"{run.config.train.eval_samples} samples, or all if it has fewer",
                                       " nats a token"))]
    if len(val_loss):
        loss = val_loss[-1]
        rows.append(("validation perplexity", f"{math.exp(loss):.4g}" if loss < 709 else "above 1e308",
                     "exp of the validation loss"))
    rows.append(("unigram entropy of the held-out text", _UNKNOWN if entropy is None else
                 f"{entropy:.4f} nats a token", entropy_source))
    if len(val_loss) and entropy:
        rows.append(("validation loss / unigram entropy", f"{val_loss[-1] / entropy:.3f}",
                     "the validation loss over the entropy, both above"))
    return rows


def _context_rows(run: RunRecords) -> list[Row]:
    rows = []
    for name, key, meaning in (("ACR", "aah/ACR", "mean of window / T over heads"),
                               ("exact pair ratio", "aah/exact_pair_ratio", "causal query-key pairs computed / all")):
        steps, values = run.series(key)
        rows.append((f"{name}, end", *_last(steps, values, key, meaning)))
        begins, values, every_step = run.context_ratio(key)
        weights = np.diff(np.append(begins, run.steps_done)) if every_step else np.ones(len(values))
        mean = f"{np.average(values, weights=weights):.4f}" if len(values) else _UNKNOWN
        source = "policy.jsonl: mean over all steps done" if every_step else \
            f"metrics.jsonl, {key}: mean of {len(values)} logged values"
        rows.append((f"{name}, mean over the run", mean, source))
    aah = run.config.aah
    if aah.decides:
        decisions = len(range(max(1, aah.warmup_steps), run.steps_done, aah.interval))
        rows.append(("decisions", f"{decisions:,}", f"the schedule of config.yaml up to the steps done: every "
                     f"{aah.interval} steps after a warm-up of {aah.warmup_steps:,}"))
    name = "raw choices recorded after the first" if run.policy.ablation else "changes of policy"
    return [*rows, (name, f"{len(run.policy.steps) - 1:,}", "policy.jsonl: lines after the first, of the steps done")]


def _speed_rows(run: RunRecords) -> list[Row]:
    _, rates = run.series("perf/tok_s")
    rows = [("speed", f"{np.median(rates):,.0f} tokens/s" if len(rates) else _UNKNOWN,
             f"metrics.jsonl, perf/tok_s: median of {len(rates)} log lines; all ranks, without evaluations and "
             "checkpoints")]
    key, what = "perf/gpu_alloc_max_mb", "GPU memory, highest ever allocated"
    _, memory = run.series(key)
    if not len(memory):
        key, what = "perf/cpu_rss_mb", "resident memory of the process, highest at a log line"
        _, memory = run.series(key)
    return [*rows, ("peak memory", f"{memory.max():,.0f} MiB" if len(memory) else _UNKNOWN,
                    f"metrics.jsonl, {key}: {what}; rank 0")]


def _windows_sentence(run: RunRecords) -> str:
    since = f"the line of policy.jsonl that was in force at the last step done, from 0-based step " \
            f"{int(run.policy.steps[-1]):,} on"
    if run.policy.ablation:
        return (f"The controller's raw choices ({since}); {run.policy.ablation} redraws the executed windows at every "
                "step, so no single map is in force.")
    return f"Counted over all layers and heads of {since}."


def _window_rows(run: RunRecords) -> list[Row]:
    windows, counts = np.unique(run.policy.windows[-1], return_counts=True)
    return [(f"{window:,}", f"{count:,}", f"{100 * count / counts.sum():.1f} %")
            for window, count in zip(windows.tolist(), counts.tolist(), strict=True)]


def _last(steps: np.ndarray, values: np.ndarray, key: str, meaning: str, unit: str = "") -> tuple[str, str]:
    """Value and source of a series' last entry."""
    if not len(values):
        return _UNKNOWN, f"metrics.jsonl, {key}"
    return f"{values[-1]:.4f}{unit}", f"metrics.jsonl, {key} at step {int(steps[-1]):,}: {meaning}"
