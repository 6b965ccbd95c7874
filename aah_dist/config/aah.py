"""The aah section: which window each head reads, and the AAH-v3 controller's knobs."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import List, Literal, Optional, Union

from aah_dist.config.errors import ConfigError, at_least

Window = Union[int, float]
CONTROLLERS = ("adaptive", "simple")
PLANNED = ("frozen", "uniform_matched", "random_heads_matched")
# What a policy cannot do without, and an example.
_NEEDS = {
    "fixed_window": ("fixed_window", "", "128"),
    "layer_pattern": ("layer_pattern", "", "'[0.25, 0.25, 0.25, 1.0]'"),
    **{policy: ("plan", ", a file of windows", "runs/demo/policy.jsonl") for policy in PLANNED},
}
# Fields, the field that decides whether they do anything, and the values under which they do.
_ONLY_WITH = (
    ("fixed_window", "policy", ("fixed_window",)),
    ("layer_pattern", "policy", ("layer_pattern",)),
    ("plan plan_step", "policy", PLANNED),
    ("quotas", "policy", ("simple",)),
    ("grouping topology max_depth min_group_size similarity_threshold upper_threshold norm_difference_scale "
     "churn_bonus upper_metric upper_l2_threshold scorer scorer_hidden joint_hidden logit_scale joint_scale "
     "parent_constraint", "policy", ("adaptive",)),
    ("control_unit feature_ema window_control resolution_ema ramp_steps ablation control_precision collapse_fraction",
     "policy", CONTROLLERS),
    ("topology max_depth min_group_size similarity_threshold upper_threshold norm_difference_scale churn_bonus "
     "upper_metric upper_l2_threshold joint_hidden joint_scale parent_constraint feature_ema", "grouping", (True,)),
    ("resolution_ema ramp_steps ablation", "window_control", (True,)),
    ("joint_hidden joint_scale", "scorer", ("joint",)),
    ("norm_difference_scale", "upper_metric", ("cosine_normdiff",)),
    ("upper_threshold", "upper_metric", ("cosine_normdiff", "cosine", "centered_cosine")),
    ("upper_l2_threshold", "upper_metric", ("l2",)),
)


@dataclass
class AahConfig:
    """Asymmetric attention heads: which window each head reads. A window W is W keys, the query's own included."""

    policy: Literal["full_attention", "fixed_window", "layer_pattern", "frozen", "uniform_matched",
                    "random_heads_matched", "adaptive", "simple"] = "full_attention"
    """Where the windows come from: full_attention (every head reads everything), fixed_window, layer_pattern (whole
    layers local or full), frozen (those of aah.plan), uniform_matched (one window with the plan's query-key pairs),
    random_heads_matched (the plan's windows, heads of a layer permuted once), adaptive (the AAH-v3 controller), simple
    (heads sorted by attention entropy, quotas)."""
    windows: List[Window] = field(default_factory=lambda: [0.125, 0.25, 0.5, 1.0])
    """The windows a head may have, ascending: token counts (64) or fractions of seq_length (0.125)."""
    fixed_window: Optional[Union[Window, List[Window], List[List[Window]]]] = None
    """For fixed_window: one window for all heads, one per head, or one list per layer. A list shorter than the
    heads is repeated."""
    layer_pattern: Optional[List[Window]] = None
    """For layer_pattern: one window a layer, repeated over the layers."""
    plan: Optional[str] = None
    """For frozen, uniform_matched and random_heads_matched: a run's policy.jsonl, or JSON/YAML with one list of windows
    per layer ({windows: [[...], ...]})."""
    plan_step: Optional[int] = None
    """Which windows of a policy.jsonl: those in force at this step (from 0). Unset: the last."""
    backend: Literal["auto", "dense", "native", "banded", "flash", "flex", "triton"] = "auto"
    """Attention code that executes the windows: dense (reference, short sequences), native (CPU, compiled), banded (any
    device), flash, flex or triton (GPU; with attention dropout only triton); auto picks one and prints why."""
    warmup_steps: int = 100
    """Steps of full attention before the controller's first decision."""
    interval: int = 5
    """Steps between decisions."""
    grouping: bool = True
    """Decide for groups of heads; false: every head for itself."""
    window_control: bool = True
    """Execute what is decided; false: groups are built and recorded, every head reads everything."""
    topology: Literal["adaptive", "reuse", "freeze_learned", "freeze_after_warmup", "fixed_random",
                      "fixed_alternating"] = "adaptive"
    """The groups: adaptive (rebuilt at each decision), reuse (those of step 0, upper levels rebuilt), freeze_learned
    (all levels as first decided), freeze_after_warmup (those of step 0 at every level), fixed_random or
    fixed_alternating (two groups that do not depend on the heads)."""
    max_depth: int = 4
    """Levels of groups at most."""
    min_group_size: int = 3
    """Smaller groups are merged where one similar enough exists."""
    similarity_threshold: float = 0.72
    """Cosine from which heads share a group."""
    upper_threshold: float = 0.76
    """Similarity from which groups share a group of the next level."""
    upper_metric: Literal["cosine_normdiff", "cosine", "centered_cosine", "l2"] = "cosine_normdiff"
    """Similarity of groups: cosine minus the relative difference of norms, cosine, cosine of what differs from the
    mean, or distance."""
    norm_difference_scale: float = 16.0
    """Weight of the difference of norms in cosine_normdiff."""
    upper_l2_threshold: float = 0.0
    """For l2: the distance up to which groups share a group."""
    churn_bonus: float = 0.02
    """Added to the similarity of heads that were in one group before, where a group is split by force."""
    scorer: Literal["joint", "independent"] = "joint"
    """Windows are scored for pairs of sibling groups together, or for each group alone."""
    scorer_hidden: int = 16
    """Hidden width of the scorer of one group."""
    joint_hidden: int = 64
    """Hidden width of the scorer of a pair."""
    logit_scale: float = 1.0
    """Factor on the scores of one group."""
    joint_scale: float = 1.0
    """Factor on the scores of a pair."""
    parent_constraint: bool = True
    """No group has a larger window than the group above it."""
    feature_ema: float = 0.9
    """Weight of the old value in the moving average of the heads' features; 0 is off."""
    resolution_ema: float = 0.15
    """Weight of the past in the moving average of the chosen windows' indices; 0 is off."""
    ramp_steps: int = 0
    """Steps after the warm-up over which windows go from full attention to what is decided."""
    ablation: Literal["none", "shuffle", "random_uniform"] = "none"
    """Redrawn every step after the decision: shuffle (windows over the heads of a layer) or random_uniform (any
    window)."""
    quotas: Optional[List[float]] = None
    """For simple: share of the heads for each of aah.windows, summing to 1. Unset: equal shares."""
    control_unit: Literal["head", "kv_group"] = "head"
    """What gets a window of its own: a query head, or the query heads that share a key/value head."""
    head_blocks: Union[Literal["auto"], int] = "auto"
    """Equal runs of neighbouring heads that groups stay inside: 1 (the paper's), or a multiple of TP so that no group
    spans ranks. auto: the TP size the run was started with."""
    control_precision: Literal["fp64", "fp32", "reference_bf16"] = "fp64"
    """Arithmetic of decisions; reference_bf16 rounds where the paper's runs did."""
    entropy_rows: int = 64
    """Query rows a layer samples for the entropy of its heads; 0: all."""
    collapse_fraction: float = 0.98
    """Share of heads at one extreme window from which a collapse is recorded."""

    def __post_init__(self) -> None:
        at_least("aah", self, 0, "plan_step", "warmup_steps", "ramp_steps", "entropy_rows", "norm_difference_scale",
                 "upper_l2_threshold", "churn_bonus")
        at_least("aah", self, 1, "interval", "max_depth", "min_group_size", "scorer_hidden", "joint_hidden")
        for name in ("feature_ema", "resolution_ema", "collapse_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"aah.{name} is {getattr(self, name)}; it must lie in [0, 1].")
        if not -1 <= self.similarity_threshold <= 1:
            raise ConfigError(f"aah.similarity_threshold is {self.similarity_threshold}; a cosine lies in [-1, 1].")
        if self.head_blocks != "auto" and self.head_blocks < 1:
            raise ConfigError(f"aah.head_blocks is {self.head_blocks}; give auto or a number of at least 1.")
        self._check_windows()
        self._check_quotas()
        self._check_effect()

    @property
    def decides(self) -> bool:
        """Whether a controller sets windows while the run goes on."""
        return self.policy in CONTROLLERS

    def _check_windows(self) -> None:
        if not self.windows:
            raise ConfigError("aah.windows is empty; give at least one window, for example [64, 128, 256, 512].")
        if not all(w > 0 and (w <= 1 or isinstance(w, int) or w.is_integer()) for w in self.windows):
            raise ConfigError(f"aah.windows {self.windows} holds a value that is neither a token count of at least 1 "
                              "nor a fraction of seq_length in (0, 1].")
        if self.layer_pattern == []:
            raise ConfigError("aah.layer_pattern is empty; give at least one window, for example [0.25, 1.0].")

    def _check_quotas(self) -> None:
        if self.quotas is None:
            return
        if len(self.quotas) != len(self.windows):
            raise ConfigError(f"aah.quotas {self.quotas} has {len(self.quotas)} shares; give one for each of the "
                              f"{len(self.windows)} aah.windows {self.windows}.")
        if not all(share >= 0 for share in self.quotas) or not math.isclose(sum(self.quotas), 1, abs_tol=1e-6):
            raise ConfigError(f"aah.quotas {self.quotas} must be shares of at least 0 that sum to 1; the smallest is "
                              f"{min(self.quotas):g}, the sum {sum(self.quotas):g}.")

    def _check_effect(self) -> None:
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for names, deciding, values in _ONLY_WITH:
            now = getattr(self, deciding)
            for name in names.split():
                value = getattr(self, name)
                if value != defaults[name] and now not in values:
                    *most, last = (_word(v) for v in values)
                    options = f"{', '.join(most)} or {last}, or" if most else f"{last} or"
                    raise ConfigError(f"aah.{name} {_word(value)} has no effect under aah.{deciding} {_word(now)}; add "
                                      f"--aah.{deciding} {options} leave it out.")
        if self.policy in _NEEDS and getattr(self, _NEEDS[self.policy][0]) is None:
            name, what, example = _NEEDS[self.policy]
            raise ConfigError(f"aah.policy {self.policy} needs aah.{name}{what}, for example --aah.{name} {example}.")


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
