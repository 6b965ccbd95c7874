"""A plain, slow AAH-v3 used as a test oracle, sharing nothing with aah_dist: state machine and attention of one layer.

Source: AAH-v3 sections 3.1-6 (1-3 are in naive_hierarchy.py). Configuration keys are the reference's field names
without the aah_v3_ prefix. Precision is "fp32", "fp64", or "bf16" (the reference under bfloat16 autocast).
"""
import math

import torch
from naive_hierarchy import (
    aggregate,
    build,
    fixed_groups,
    grow,
    head_features,
    head_map,
    members_of,
    pooled_features,
    select,
    select_ungrouped,
)

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.float32}
DEFAULTS = {
    "windows": [512, 1024, 2048, 4096], "control_dim": 16, "control_interval": 5, "sim_threshold": 0.72,
    "super_threshold": 0.76, "max_depth": 4, "ema_alpha": 0.9, "churn_penalty": 0.02, "min_group_size": 3,
    "warmup_steps": 100, "W_min_gpu": 64, "resolution_ema_alpha": 0.15, "post_warmup_ramp_steps": 0,
    "upper_cluster_metric": "cosine_normdiff", "upper_l2_threshold": 0.0, "cosine_normdiff_scale": 16.0,
    "controller_input_mode": "enriched", "controller_logit_scale": 1.0, "controller_pairwise_mode": "joint_sibling",
    "joint_output_scale": 1.0, "joint_hidden_dim": 64, "controller_rng_reference_dim": 16, "build_hierarchy": True,
    "apply_window_control": True, "grouping_enabled": True, "control_enabled": True, "reuse_group_hierarchy": False,
    "hierarchy_ablation_mode": "adaptive", "fixed_hierarchy_seed": 0, "parent_constraint": True,
    "window_ablation_mode": "none", "fixed_window": None, "ablation_seed": 0,
    "symmetric": False,    # average S with its transpose, against last-bit differences of sim_ij and sim_ji (N2)
}


def config(*overrides):
    """DEFAULTS with the given dictionaries on top; keys may carry the aah_v3_ prefix; unknown keys are left out."""
    out = dict(DEFAULTS)
    for override in overrides:
        named = {key.removeprefix("aah_v3_"): value for key, value in override.items()}
        out.update({key: value for key, value in named.items() if key in DEFAULTS})
    return out


# ---- attention (section 6) and ablation draws (section 5) ----

def attend(q, k, v, windows):
    """Dense windowed attention of q, k, v [B, H, T, D], one window a head: y [B, H, T, D] and the history [H, 3]."""
    time = q.shape[2]
    i, j = torch.arange(time)[:, None], torch.arange(time)[None]
    ys, history = [], []
    for head, window in enumerate(windows):
        window = min(max(window, 1), time)
        scores = q[:, head] @ k[:, head].transpose(1, 2) / math.sqrt(q.shape[3])
        a = scores.masked_fill((j > i) | (j <= i - window), -math.inf).softmax(-1)
        ys.append(a @ v[:, head])
        with torch.no_grad():
            entropy = -(a * (a + 1e-9).log()).sum(-1).mean() / max(1.0, math.log(time))
            history.append(torch.stack([entropy, ys[-1].norm(dim=-1).mean(), a[:, :, -1].mean()]))
    return torch.stack(ys, 1), torch.stack(history)


def ablation_draw(mode, heads, count, seed, layer, step):
    """The permutation (shuffle_post_select) or the indices (random_uniform) of one call."""
    generator = torch.Generator().manual_seed((seed + 1000003 * layer + 97409 * (step or 0)) % (2**31 - 1))
    if mode == "shuffle_post_select":
        return torch.randperm(heads, generator=generator).tolist()
    return torch.randint(0, count, (heads,), generator=generator).tolist()


# ---- the layer (section 4) ----

class NaiveLayer:
    """Controller state of one attention layer; call() runs one forward."""

    def __init__(self, cfg, weights, heads, layer=0, precision="fp32"):
        self.cfg, self.weights, self.heads, self.layer, self.precision = cfg, weights, heads, layer, precision
        self.hist = self.ema_feats = self.h2g = self.topo = self.cache = self.last_step = self.ema_idx = None
        self.seen = {"head_groups": [], "group_counts": [], "raw": [], "post": []}

    def call(self, q, k, v, step, training=True):
        """One forward of q, k, v [B, H, T, D] at optimizer step `step` (None: unset). Returns the output y and what
        was decided: idx_before, idx_after, windows (reported), path, head_groups, group_counts, raw, post, hist..."""
        cfg, time = self.cfg, q.shape[2]
        if training and not cfg["control_enabled"]:
            self.h2g = self.cache = None
        warm = step is not None and step < cfg["warmup_steps"]
        full = cfg["windows"].index(time) if time in cfg["windows"] else 0
        out = {"group_change_rate": None, "resolution_delta": None, "margin": math.inf}
        hierarchy = cfg["build_hierarchy"] and cfg["grouping_enabled"]
        if cfg["apply_window_control"] and not warm:
            due = (cfg["control_interval"] <= 1 or step is None or self.last_step is None
                   or step - self.last_step >= cfg["control_interval"])
            name = "grouped" if hierarchy else "ungrouped"
            if self.cache is not None and not due:
                idx, out["path"] = self.cache, f"{name}_control_cached"
                out["group_change_rate"] = out["resolution_delta"] = 0.0
            else:
                idx, out["path"] = self.update((q, k, v), out) if hierarchy else self.update_ungrouped((q, k, v), out)
                if self.cache is not None:
                    moved = [abs(a - b) for a, b in zip(idx, self.cache, strict=True)]
                    out["resolution_delta"] = sum(moved) / self.heads
                self.cache, self.last_step = idx, step
        else:
            idx, out["path"] = [full] * self.heads, "full_attention_fastpath"
            if hierarchy:
                self.observe((q, k, v), out)
            if hierarchy or cfg["apply_window_control"]:
                out["path"] = ("warmup_or_disabled_control" if cfg["apply_window_control"]
                               else "grouping_only_full_attention")
        before, idx = idx, self.smooth(idx, step, warm, full)
        out["idx_before"] = before if out["path"].endswith("_update") else idx
        out["idx_after"] = self.ablate(idx, step)
        out["abl"] = sum(a != b for a, b in zip(out["idx_after"], idx, strict=True)) / self.heads
        windows = [cfg["windows"][i] for i in out["idx_after"]]
        out["windows"] = [min(max(w, cfg["W_min_gpu"]), time) for w in windows]
        out["hist_before"] = self.hist
        y, self.hist = attend(q, k, v, windows)
        out["hist"] = self.hist
        return y, out | self.seen

    def update(self, qkv, out):
        """A control update of the grouped paths: the index of each head and the path's name."""
        cfg, mode = self.cfg, self.cfg["hierarchy_ablation_mode"]
        dtype = DTYPES[self.precision]
        fixed = mode in ("fixed_random", "fixed_deterministic")
        frozen = mode == "freeze_after_warmup" and self.h2g is not None
        learned = mode == "freeze_learned_topology" and self.topo is not None
        reuse = cfg["reuse_group_hierarchy"] and self.h2g is not None
        if fixed or frozen or learned or reuse:
            h2g = fixed_groups(mode, self.heads, cfg["fixed_hierarchy_seed"]) if fixed else self.h2g
            groups = self.topo[0] if learned else members_of(h2g)
            levels = [(groups, pooled_features(qkv, self.hist, [sorted(g) for g in groups], dtype))]
            if learned:
                levels += [(upper, None) for upper in self.topo[1:]]
            elif fixed or frozen:
                levels += [([[g] for g in range(len(groups))], None)] * (cfg["max_depth"] - 1)
            else:
                levels = grow(*levels[0], cfg, self.precision)
            for number in range(1, len(levels)):
                levels[number] = (levels[number][0], aggregate(levels[number - 1][1], levels[number][0]))
            path = (f"grouped_control_{mode}_update" if fixed else "grouped_control_frozen_learned_topology_update"
                    if learned else "grouped_control_frozen_update" if frozen else "grouped_control_reuse_update")
        else:
            levels, path = self.adaptive(qkv), "grouped_control_update"
            if mode == "freeze_learned_topology":
                self.topo = [groups for groups, _ in levels]
        chosen = select(levels, self.weights, cfg, self.precision)
        self.remember(levels, out)
        self.seen.update(raw=[c["raw"] for c in chosen], post=[c["post"] for c in chosen])
        out["margin"] = min(c["margin"] for c in chosen)
        return [chosen[0]["post"][g] for g in self.h2g], path

    def update_ungrouped(self, qkv, out):
        features = head_features(qkv, self.hist, DTYPES[self.precision])
        _, logits = select_ungrouped(features, self.weights, self.cfg, self.precision)
        top = logits.topk(2, dim=1).values
        out["margin"] = float((top[:, 0] - top[:, 1]).min())
        self.seen.update(group_counts=[self.heads])
        return logits.argmax(1).tolist(), "ungrouped_control_update"

    def observe(self, qkv, out):
        """Warm-up, or window control off: the hierarchy is kept, nothing is narrowed."""
        if self.h2g is None:
            levels = self.adaptive(qkv)
        else:
            groups = members_of(self.h2g)
            levels = grow(groups, pooled_features(qkv, self.hist, groups, DTYPES[self.precision]), self.cfg,
                          self.precision)
        self.remember(levels, out)

    def adaptive(self, qkv):
        now, alpha = head_features(qkv, self.hist, DTYPES[self.precision]), self.cfg["ema_alpha"]
        self.ema_feats = now if self.ema_feats is None else alpha * self.ema_feats + (1 - alpha) * now
        return build(self.ema_feats, self.cfg, self.h2g, self.precision)

    def remember(self, levels, out):
        h2g = head_map(levels[0][0])
        out["group_change_rate"] = sum(a != b for a, b in zip(h2g, self.h2g or h2g, strict=True)) / self.heads
        self.h2g = h2g
        self.seen.update(head_groups=h2g, group_counts=[len(groups) for groups, _ in levels])

    def smooth(self, idx, step, warm, full):
        """Resolution EMA and the ramp after warm-up, both on indices (float32, rounded half to even)."""
        cfg, alpha, count = self.cfg, self.cfg["resolution_ema_alpha"], len(self.cfg["windows"])
        now = torch.tensor(idx, dtype=torch.float32)
        if not warm and cfg["control_enabled"] and alpha > 0:
            old = now if self.ema_idx is None else self.ema_idx
            self.ema_idx = alpha * old + (1 - alpha) * now
            now = self.ema_idx.round().clamp(0, count - 1)
        if cfg["control_enabled"] and cfg["post_warmup_ramp_steps"] > 0 and step is not None:
            p = min(max((step - cfg["warmup_steps"] + 1) / cfg["post_warmup_ramp_steps"], 0.0), 1.0)
            if p < 1:
                now = (p * now + (1 - p) * full).round()
        return [int(i) for i in now]

    def ablate(self, idx, step):
        cfg, mode = self.cfg, self.cfg["window_ablation_mode"]
        if mode == "none":
            return idx
        if mode == "fixed_window":
            return [cfg["windows"].index(cfg["fixed_window"])] * self.heads
        draw = ablation_draw(mode, self.heads, len(cfg["windows"]), cfg["ablation_seed"], self.layer, step)
        return [idx[i] for i in draw] if mode == "shuffle_post_select" else draw


# ---- initialisation (section 3.1) ----

def init_layer(width, cfg, controllers=True):
    """Parameters of one attention layer by name, drawn from the global CPU generator in the documented order; without
    controllers, the layer of the pure baseline."""
    def draw(name, sizes, bias=True):
        made = torch.nn.Linear(sizes[0], sizes[1], bias=bias)
        return {f"{name}.{key}": value.detach() for key, value in made.named_parameters()}

    def draw_mlp(name, inputs, hidden, outputs):
        return draw(f"{name}.mlp.0", (inputs, hidden)) | draw(f"{name}.mlp.2", (hidden, outputs))

    count, hidden, reference = len(cfg["windows"]), cfg["control_dim"], cfg["controller_rng_reference_dim"]
    base = cfg["controller_input_mode"] == "base"
    out = draw("qkv", (width, 3 * width), bias=False) | draw("proj", (width, width), bias=False)
    if not controllers:
        return out
    if base and hidden == reference:
        out |= draw_mlp("controller", 9, hidden, count)
    else:
        with torch.random.fork_rng(devices=[]):
            out |= draw_mlp("controller", 9 if base else 29, hidden, count)
        draw_mlp("thrown_away", 9, reference, count)
    if cfg["controller_pairwise_mode"] == "joint_sibling":
        with torch.random.fork_rng(devices=[]):
            out |= draw_mlp("joint_sibling_scorer", 4 * 29, cfg["joint_hidden_dim"], 2 * count)
    return out
