"""The golden data: arrays that pin the published algorithm, read by their manifest.

Folders: tests/golden, or the one named by AAH_GOLDEN_DIR (same layout).
"""

import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import torch
from ranks import REPOSITORY

from aah_dist.attention import window_attention
from aah_dist.attention.statistics import measure, sample_rows
from aah_dist.config.schema import AahConfig
from aah_dist.config.statistics import COLUMNS
from aah_dist.control.settings import Settings
from aah_dist.control.weights import ScorerWeights

FOLDER = Path(os.environ.get("AAH_GOLDEN_DIR", REPOSITORY / "tests" / "golden"))
KNIFE_EDGE = 1e-5  # margins below this are decided by rounding

# The published names of the fields of AahConfig.
FIELDS = {
    "aah_v3_control_dim": "scorer_hidden", "aah_v3_control_interval": "interval",
    "aah_v3_sim_threshold": "similarity_threshold", "aah_v3_super_threshold": "upper_threshold",
    "aah_v3_max_depth": "max_depth", "aah_v3_ema_alpha": "feature_ema", "aah_v3_churn_penalty": "churn_bonus",
    "aah_v3_min_group_size": "min_group_size", "aah_v3_warmup_steps": "warmup_steps",
    "aah_v3_resolution_ema_alpha": "resolution_ema", "aah_v3_post_warmup_ramp_steps": "ramp_steps",
    "aah_v3_upper_cluster_metric": "upper_metric", "aah_v3_upper_l2_threshold": "upper_l2_threshold",
    "aah_v3_cosine_normdiff_scale": "norm_difference_scale", "aah_v3_controller_logit_scale": "logit_scale",
    "aah_v3_joint_output_scale": "joint_scale", "aah_v3_joint_hidden_dim": "joint_hidden",
    "aah_v3_grouping_enabled": "grouping", "aah_v3_apply_window_control": "window_control",
    "aah_v3_parent_constraint": "parent_constraint", "aah_v3_windows": "windows",
}
TOPOLOGIES = {"adaptive": "adaptive", "freeze_learned_topology": "freeze_learned", "fixed_random": "fixed_random",
              "freeze_after_warmup": "freeze_after_warmup", "fixed_deterministic": "fixed_alternating"}
ABLATIONS = {"shuffle_post_select": "shuffle", "random_uniform": "random_uniform"}


@cache
def manifest() -> dict:
    return json.loads((FOLDER / "manifest.json").read_text())


def cases(file: str) -> list[dict]:
    return manifest()["files"][file]["cases"]


@cache
def arrays(file: str) -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / file, allow_pickle=False))


def read_json(file: str) -> dict:
    return json.loads((FOLDER / file).read_text())


def settings(overrides: dict | None = None, precision: str = "fp32", **resolved: object) -> Settings:
    """Settings of a case: the manifest's base configuration with the case's overrides, in published names."""
    published = {**manifest()["base_config"], **(overrides or {})}
    values = {ours: published[theirs] for theirs, ours in FIELDS.items()}
    joint = published["aah_v3_controller_pairwise_mode"] == "joint_sibling"
    if not joint:
        del values["joint_scale"], values["joint_hidden"]
    mode = published["aah_v3_hierarchy_ablation_mode"]
    aah = AahConfig(policy="adaptive", control_precision=precision, entropy_rows=0,
                    topology="reuse" if published["aah_v3_reuse_group_hierarchy"] else TOPOLOGIES[mode],
                    scorer="joint" if joint else "independent",
                    ablation=ABLATIONS.get(published.get("aah_v3_window_ablation_mode"), "none"), **values)
    heads = resolved.pop("heads", published["n_head"])
    return Settings(**{"aah": aah, "layers": published["n_layer"], "heads": heads, "units": heads,
                       "length": published["seq_len"], "windows": tuple(published["aah_v3_windows"]),
                       "head_blocks": 1, "seed": published["aah_v3_fixed_hierarchy_seed"], **resolved})


def scorer_weights(data: dict[str, np.ndarray], prefix: str) -> ScorerWeights:
    def mlp(name: str) -> tuple[np.ndarray, ...]:
        return tuple(data[f"{prefix}/{name}.mlp.{layer}.{kind}"] for layer in (0, 2) for kind in ("weight", "bias"))

    # A case without the joint scorer never asks for its weights.
    joint = mlp("joint_sibling_scorer") if f"{prefix}/joint_sibling_scorer.mlp.0.weight" in data else ()
    return ScorerWeights(mlp("controller"), joint)


def sums_of(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The statistics of q, k, v [B, H, T, D] as the controller gets them, history columns 0: float64 [H, columns]."""
    out = np.zeros((q.shape[1], len(COLUMNS)))
    out[:, COLUMNS.index("rows")] = q.shape[0] * q.shape[2]
    out[:, COLUMNS.index("values")] = q.size / q.shape[1]
    for name, x in zip("qkv", (q, k, v), strict=True):
        x = x.astype(np.float64)
        for kind, value in (("sum", x), ("square", x * x), ("abs", np.abs(x))):
            out[:, COLUMNS.index(f"{name}_{kind}")] = value.sum((0, 2, 3))
    return out


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One call of a layer, q, k, v [B, H, T, D] and windows [H] in tokens: output [B, H, T, D], and its statistics as
    the layers take them, with every query row, float64 [H, columns]."""
    q, k, v = (torch.from_numpy(np.ascontiguousarray(x)) for x in (q, k, v))
    out = window_attention(q, k, v, windows, backend="dense")
    sample = sample_rows(q.shape[2], 0, seed=0, step=0, layer=0)
    return out.numpy(), measure(q, k, v, out, windows, q.shape[-1] ** -0.5, sample).numpy()


def no_history(units: int) -> np.ndarray:
    return np.zeros((units, 3))
