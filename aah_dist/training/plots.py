"""Pictures of a run: losses, context, and the windows of its heads.  Drawn by Agg, without a display.

Steps on the x axes are optimizer steps done; a policy line of 0-based step s is drawn from x = s on.
"""

import textwrap
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from aah_dist.config.windows import candidate_windows
from aah_dist.training.run_records import RunRecords

DPI = 130
INK, BLUE, ORANGE, GREY = "#222222", "#0072b2", "#d55e00", "#8a8a8a"  # blue and orange of Okabe and Ito
_STYLE = {"font.size": 11, "figure.titlesize": 12.5, "axes.spines.top": False,
          "axes.spines.right": False, "axes.edgecolor": GREY, "text.color": INK, "axes.labelcolor": INK,
          "legend.frameon": False, "axes.grid": False}
_MAX_COLUMNS = 2000  # of the picture over time: more steps are sampled, as the pixels would


def draw_all(run: RunRecords) -> list[Path]:
    """Write the four PNGs into the run's folder; returns their paths."""
    paths = []
    with matplotlib.rc_context(_STYLE):
        for name, draw in (("losses", losses), ("context", context), ("windows_end", windows_end),
                           ("windows_over_time", windows_over_time)):
            path = run.folder / f"{name}.png"
            draw(run).savefig(path, dpi=DPI, format="png")
            paths.append(path)
    return paths


def losses(run: RunRecords) -> Figure:
    """Training loss, validation loss and the unigram entropy of the held-out text, over steps and tokens."""
    steps, loss = run.series("train/loss")
    val_steps, val_loss = run.series("val/loss")
    entropy, _ = run.unigram_entropy
    figure, axes = _figure(8.2, 4.6)
    # Few points are themselves the curve.
    few = len(steps) < 20
    axes.plot(steps, loss, color=BLUE, lw=1.6 if few else 0.8, alpha=1 if few else 0.45, marker="o" if few else None,
              ms=3, label="training, as logged (one batch a point)")
    if not few:
        reach = max(2, len(loss) // 40)
        axes.plot(steps, smooth(loss, reach), color=BLUE, lw=2, label=f"training, mean of {2 * reach + 1} log lines")
    if len(val_steps):
        axes.plot(val_steps, val_loss, color=ORANGE, marker="D", ms=6, lw=1.2, label="validation", clip_on=False,
                  zorder=3)
    if entropy is not None:
        axes.axhline(entropy, color=INK, lw=1.2, ls="--", label=f"unigram entropy of the held-out text ({entropy:.2f})")
    shown = np.concatenate([loss, val_loss])
    scale = ""
    if len(shown) and shown.min() > 0 and shown.max() > 8 * shown.min():
        axes.set_yscale("log")
        scale = ", log scale"
    axes.set_ylabel(f"loss (nats a token{scale})")
    axes.legend(loc="upper right", fontsize=10)
    axes.grid(axis="y", color="#e6e6e6", lw=0.8)
    _steps_axis(axes, run.steps_done)
    _tokens_axis(axes, run)
    if len(val_steps):
        title = f"Validation loss is {val_loss[-1]:.3f} nats a token at step {val_steps[-1]:,}"
        title += f", {val_loss[-1] / entropy:.3f} of the unigram entropy" if entropy else ""
    elif len(steps):
        title = f"Training loss is {loss[-1]:.3f} nats a token at step {steps[-1]:,}; no validation yet"
    else:
        title = "No finite loss was logged"
    _title(axes, title)
    return figure


def context(run: RunRecords) -> Figure:
    """ACR and exact pair ratio over steps; the warm-up shaded."""
    figure, axes = _figure(8.2, 4.4)
    lines = (("aah/ACR", BLUE, "-", "ACR: mean of window / T over heads"),
             ("aah/exact_pair_ratio", ORANGE, "--", "exact pair ratio: causal query-key pairs computed / all"))
    last = {}
    for key, color, style, label in lines:
        steps, values, every_step = run.context_ratio(key)
        if not len(values):
            continue
        if every_step:
            steps, values = np.append(steps, run.steps_done), np.append(values, values[-1])
        axes.plot(steps, values, color=color, ls=style, lw=2, drawstyle="steps-post" if every_step else "default",
                  label=label, clip_on=False)
        last[key] = values[-1]
    warmup = run.config.aah.warmup_steps if run.config.aah.decides and run.config.aah.window_control else 0
    if warmup:
        axes.axvspan(0, min(warmup, run.steps_done), color="#ececec", lw=0,
                     label=f"warm-up: {warmup:,} steps before the first decision")
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("share of full attention (1 = all)")
    axes.grid(axis="y", color="#e6e6e6", lw=0.8)
    axes.set_axisbelow(True)
    _steps_axis(axes, run.steps_done)
    figure.legend(loc="outside lower center", fontsize=10)
    if len(last) == 2:
        _title(axes, f"At the end heads read {100 * last['aah/ACR']:.0f} % of T on average; "
                     f"{100 * last['aah/exact_pair_ratio']:.0f} % of causal pairs are computed")
    else:
        _title(axes, "ACR or exact pair ratio was not logged")
    return figure


def windows_end(run: RunRecords) -> Figure:
    """Head x layer map of the windows at the end, one colour a window."""
    policy, (layers, heads) = run.policy, run.policy.windows.shape[1:]
    windows, length = policy.windows[-1], run.config.model.seq_length
    palette = Palette(run)
    figure, axes = _figure(np.clip(0.42 * heads + 3.2, 7.2, 13), np.clip(0.38 * layers + 1.7, 3.2, 11))
    axes.imshow(palette.image(windows), origin="lower", aspect="auto", interpolation="nearest")
    for x in range(1, heads):
        axes.axvline(x - 0.5, color="white", lw=1.2 if heads <= 32 else 0.4)
    for y in range(1, layers):
        axes.axhline(y - 0.5, color="white", lw=1.2 if layers <= 32 else 0.4)
    blocks = run.config.aah.head_blocks
    block_label = ""
    if isinstance(blocks, int) and blocks > 1:
        for x in range(heads // blocks, heads, heads // blocks):
            axes.axvline(x - 0.5, color="white", lw=6)
        block_label = f" (gaps: {blocks} head blocks)"
    axes.set_xlabel(f"head{block_label}")
    axes.set_ylabel("layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    shares = {window: np.mean(windows == window) for window in palette.windows}
    palette.legend(axes, {window: f"{_tokens(window, length)}: {100 * share:.0f} % of heads"
                          for window, share in shares.items()})
    top = max(shares, key=shares.get)
    what = f"Raw choices at step {run.steps_done:,}, before {policy.ablation} redraws them each step" \
        if policy.ablation else f"Windows in force at step {run.steps_done:,}"
    _title(axes, f"{what}: the most common is {_tokens(top, length)}, {100 * shares[top]:.0f} % of heads")
    return figure


def windows_over_time(run: RunRecords) -> Figure:
    """The windows of every head over the steps: rows are heads, grouped by layer from the bottom up."""
    policy = run.policy
    lines, layers, heads = policy.windows.shape
    begin, end = int(policy.steps[0]), run.steps_done  # a run that starts from another's checkpoint begins late
    columns = min(end - begin, _MAX_COLUMNS)
    centres = begin + (np.arange(columns) + 0.5) * (end - begin) / columns
    in_force = np.searchsorted(policy.steps, centres, side="right") - 1
    rows = policy.windows[in_force].reshape(columns, layers * heads).T
    palette = Palette(run)
    figure, axes = _figure(10, np.clip(0.085 * layers * heads + 1.8, 3.6, 12))
    axes.imshow(palette.image(rows), origin="lower", aspect="auto", interpolation="nearest",
                extent=(begin, end, 0, layers * heads))
    for layer in range(1, layers):
        axes.axhline(layer * heads, color="white", lw=2.2 if layers <= 32 else 0.8)
    labelled = range(0, layers, -(-layers // 24))
    axes.set_yticks([(layer + 0.5) * heads for layer in labelled], [str(layer) for layer in labelled])
    axes.set_ylabel("layer (a row a head, head 0 lowest)" if heads > 1 else "layer")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    _steps_axis(axes, end)
    palette.legend(axes, {window: _tokens(window, run.config.model.seq_length) for window in palette.windows})
    if policy.ablation:
        _title(axes, f"Raw choices of every head, before {policy.ablation} redraws them each step: "
                     f"{lines - 1:,} records after the first")
    elif lines > 1:
        _title(axes, f"Windows of every head: {lines - 1:,} change{'s' if lines > 2 else ''} in {end - begin:,} steps")
    else:
        _title(axes, f"Windows of every head: the same in all {end - begin:,} steps")
    return figure


def smooth(values: np.ndarray, reach: int) -> np.ndarray:
    """Mean over `reach` values to either side, over fewer near the ends, as many on one side as on the other."""
    n = len(values)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(n)
    half = np.minimum(reach, np.minimum(at, n - 1 - at))
    return (sums[at + half + 1] - sums[at - half]) / (2 * half + 1)


class Palette:
    """One colour a window, light to dark with its size: the candidate windows and whatever the run used besides."""

    def __init__(self, run: RunRecords) -> None:
        used = {int(window) for window in np.unique(run.policy.windows)}
        self.windows = sorted(used | set(candidate_windows(run.config)))
        # From the dark end, which a full window always has; the brightest yellow is left out.
        shades = matplotlib.colormaps["viridis"](np.linspace(0.95, 0.0, max(2, len(self.windows))))
        self.colors = np.round(255 * shades[-len(self.windows):, :3]).astype(np.uint8)

    def image(self, windows: np.ndarray) -> np.ndarray:
        """uint8 [..., 3]"""
        return self.colors[np.searchsorted(self.windows, windows)]

    def legend(self, axes: Axes, labels: dict[int, str]) -> None:
        patches = [Patch(facecolor=color / 255, label=labels[window])
                   for window, color in zip(self.windows, self.colors, strict=True)]
        axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1, 1), title="window", alignment="left",
                    fontsize=10, handlelength=1.2, handleheight=1.2)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _title(axes: Axes, text: str) -> None:
    characters = int(axes.figure.get_figwidth() * 10.5)
    axes.figure.suptitle(textwrap.fill(text, characters), x=0.01, ha="left")


def _tokens(window: int, length: int) -> str:
    return f"{window:,} token{'' if window == 1 else 's'}{' (all)' if window >= length else ''}"


def _steps_axis(axes: Axes, end: int) -> None:
    axes.set_xlim(0, end)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("optimizer steps")


def _tokens_axis(axes: Axes, run: RunRecords) -> None:
    a_step = run.config.train.global_batch_size * run.config.model.seq_length
    unit, name = next((u, n) for u, n in ((1e9, "billion "), (1e6, "million "), (1e3, "thousand "), (1, ""))
                      if a_step * run.steps_done >= 2 * u or u == 1)
    top = axes.secondary_xaxis("top", functions=(lambda steps: steps * a_step / unit, lambda x: x * unit / a_step))
    top.set_xlabel(f"training tokens ({name.strip()})" if name else "training tokens")
