"""Configuration, regimes and output folder shared by the generators of golden data.

Source: AAH-v3 section 5 (regimes) and the field names of the published manifest.json.
"""
import json
from pathlib import Path

import naive_aah as aah
import numpy as np
import torch

BASE = {
    "vocab_size": 64, "seq_len": 64, "n_layer": 2, "n_head": 12, "n_embd": 96, "n_ff": 192, "dropout": 0.0,
    "aah_v3_enabled": True,
    **{f"aah_v3_{key}": value for key, value in aah.DEFAULTS.items()
       if key not in ("window_ablation_mode", "fixed_window", "ablation_seed", "symmetric")},
    "aah_v3_windows": [8, 16, 32, 64], "aah_v3_control_interval": 3, "aah_v3_warmup_steps": 3, "aah_v3_W_min_gpu": 1,
    "aah_v3_group_feature_mode": "mean", "aah_v3_controller_arch": "mlp",
    "aah_v3_controller_choice_mode": "learned", "aah_v3_pairwise_bias_scale": 1.0,
    "aah_v3_diagnostic_detail": "light", "aah_v3_resolution_collapse_min_frac": 0.98,
    "aah_v3_resolution_collapse_max_frac": 0.98,
}
FREEZE = {"aah_v3_max_depth": 1, "aah_v3_hierarchy_ablation_mode": "freeze_learned_topology"}
REGIMES = {
    "full_adaptive": {},
    "grouping_off": {"aah_v3_build_hierarchy": False, "aah_v3_grouping_enabled": False,
                     "aah_v3_controller_pairwise_mode": "none"},
    "shallow_freeze": FREEZE,
    "deep_practical_reuse": {"aah_v3_reuse_group_hierarchy": True},
}
ABLATIONS = {
    **REGIMES,
    "control_off": {"aah_v3_control_enabled": False, "aah_v3_apply_window_control": False},
    "fixed_random_grouping": {"aah_v3_hierarchy_ablation_mode": "fixed_random"},
    "freeze_after_warmup_passthrough": {"aah_v3_hierarchy_ablation_mode": "freeze_after_warmup"},
    "independent_scoring": {"aah_v3_controller_pairwise_mode": "none"},
    "no_parent_constraint": {"aah_v3_parent_constraint": False},
    "no_feature_ema": {"aah_v3_ema_alpha": 0.0},
    "shallow_control_interval6": {**FREEZE, "aah_v3_control_interval": 6},
    "shallow_shuffle_post_select": {**FREEZE, "aah_v3_window_ablation_mode": "shuffle_post_select"},
    "full_adaptive_shuffle_post_select": {"aah_v3_window_ablation_mode": "shuffle_post_select"},
    "fixed_16": {**FREEZE, "aah_v3_window_ablation_mode": "fixed_window", "aah_v3_fixed_window": 16},
    "shallow_random_uniform": {**FREEZE, "aah_v3_window_ablation_mode": "random_uniform"},
}
SAFE = 1e-4


class Folder:
    """The files being made and their manifest entries."""

    def __init__(self, path, seed):
        self.path, self.seed, self.files, self.arrays = Path(path), seed, {}, {}
        self.path.mkdir(parents=True, exist_ok=True)

    def generator(self, offset):
        return torch.Generator().manual_seed(1_000_003 * self.seed + offset)

    def randn(self, offset, *shape):
        return torch.randn(*shape, generator=self.generator(offset))

    def write(self, name, arrays, cases):
        """An .npz of {key: (array, meaning)}."""
        arrays = {key: (np.asarray(value), meaning) for key, (value, meaning) in arrays.items()}
        np.savez_compressed(self.path / name, **{key: value for key, (value, _) in arrays.items()})
        self.arrays[name] = {key: value for key, (value, _) in arrays.items()}
        self.files[name] = {"arrays": {key: {"shape": list(value.shape), "dtype": str(value.dtype), "meaning": meaning}
                                       for key, (value, meaning) in arrays.items()}, "cases": cases}

    def write_json(self, name, content, meaning):
        (self.path / name).write_text(json.dumps(content))
        self.files[name] = {"arrays": {}, "cases": [], "meaning": meaning}


def wide_weights(folder, offset, windows=4):
    """Controller weights large enough for choices to differ between heads."""
    generator, out = folder.generator(offset), {}
    for name, sizes in (("controller", (29, 16, windows)), ("joint_sibling_scorer", (116, 64, 2 * windows))):
        for part, (inputs, outputs) in (("0", sizes[:2]), ("2", sizes[1:])):
            out[f"{name}.mlp.{part}.bias"] = 0.3 * torch.randn(outputs, generator=generator)
            out[f"{name}.mlp.{part}.weight"] = 0.6 * torch.randn(outputs, inputs, generator=generator)
    return out
