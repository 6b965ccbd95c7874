"""Writes golden data for AAH-v3 in the layout of the published set, from the oracle and other random inputs.

    python tests/make_golden.py OUT_DIR --seed N

Every case is recomputed in float64 and with a symmetrised similarity; cases whose decisions depend on that are flagged
(f64_groups_agree) or drawn again. Source: AAH-v3 sections 1-7; the layout is that of the published manifest.json.
"""
import argparse
import json

import golden_hierarchy
import golden_training
import naive_aah as aah
import naive_hierarchy as nh
import numpy as np
import torch
from golden_base import BASE, Folder, wide_weights


def make_features(folder):
    arrays, cases = {}, []
    shapes = [(1, 12, 16, 8), (2, 12, 8, 4), (1, 16, 8, 8), (2, 2, 8, 4)]
    for number, (batch, heads, time, dim) in enumerate(shapes):
        s = f"s{number}"
        qkv = [folder.randn(10 * number + i, batch, heads, time, dim) * (0.5 + i) for i in range(3)]
        hist = folder.randn(10 * number + 5, heads, 3).abs()
        count = min(3, heads)
        groups = [list(range(first, heads, count)) for first in range(count)]
        cases.append({"seed": number, "B": batch, "H": heads, "T": time, "D": dim, "groups": groups})
        for kind, dtype in (("f32", torch.float32), ("f64", torch.float64)):
            heads_now = nh.head_features(qkv, hist, dtype)
            arrays |= {
                f"{s}/head_feats_nohist_{kind}": (nh.head_features(qkv, None, dtype), "[H,9] before any forward"),
                f"{s}/head_feats_{kind}": (heads_now, "[H,9] features with the history vectors"),
                f"{s}/group_feats_pooled_{kind}": (nh.pooled_features(qkv, hist, groups, dtype), "[G,9] pooled"),
                f"{s}/group_feats_meanagg_{kind}": (nh.aggregate(heads_now, groups), "[G,9] mean of head features")}
        member = [head % count for head in range(heads)]
        arrays |= {f"{s}/{part}": (value, "[B,H,T,D] input") for part, value in zip("qkv", qkv, strict=True)}
        arrays |= {f"{s}/hist": (hist, "[H,3] entropy, norm, usage history"),
                   f"{s}/head_to_group": (np.array(member, np.int64), "[H] group id of each head")}
    folder.write("a_features.npz", arrays, cases)


def make_feature_ema(folder):
    arrays, cases, windows = {}, [], [1, 2, 4, 8]
    for number, alpha in enumerate((0.9, 0.9, 0.0, 0.5)):
        cfg = aah.config(BASE, {"windows": windows, "control_interval": 1, "warmup_steps": 0, "ema_alpha": alpha})
        layer = aah.NaiveLayer(cfg, wide_weights(folder, 200 + number), 12)
        inputs = folder.randn(100 + number, 6, 3, 1, 12, 8, 4) * (0.5 + torch.arange(12).view(12, 1, 1) / 6)
        rows = {"feats": [], "ema": [], "hist_after": []}
        for step, qkv in enumerate(inputs):
            rows["feats"].append(nh.head_features(list(qkv), layer.hist))
            layer.call(*qkv, step)
            rows["ema"].append(layer.ema_feats)
            rows["hist_after"].append(layer.hist)
        arrays[f"s{number}/qkv"] = (inputs, "[S,3,B,H,T,D] inputs per update")
        arrays |= {f"s{number}/{key}": (torch.stack(value), f"[S,H,...] {key}") for key, value in rows.items()}
        cases.append({"seed": number, "alpha": alpha, "steps": 6, "windows": windows,
                      "note": "control_interval 1, warmup 0; executed windows from regime full_adaptive"})
    folder.write("b_feature_ema.npz", arrays, cases)


def make_init(folder):
    arrays, cases = {}, []
    for name, overrides in (
            ("joint", {}), ("independent", {"aah_v3_controller_pairwise_mode": "none"}),
            ("base9", {"aah_v3_controller_input_mode": "base", "aah_v3_controller_pairwise_mode": "none"})):
        torch.manual_seed(0)
        made = aah.init_layer(24, aah.config(BASE, overrides)) | {"next_rand4": torch.rand(4)}
        arrays |= {f"{name}/{key}": (value, "after torch.manual_seed(0), then construction")
                   for key, value in made.items()}
        cases.append({"name": name, "n_head": 12, "n_embd": 24, "overrides": overrides})
    folder.write("d_init.npz", arrays, cases)


class Scripted(aah.NaiveLayer):
    """A layer whose control updates return the scripted choice."""

    def update(self, qkv, out):
        return self.script, "grouped_control_update"


def make_resolution(folder):
    arrays, cases, x = {}, [], torch.zeros(1, 12, 8, 2)
    settings = [(alpha, *rest) for alpha in (0.15, 0.3, 0.5, 0.85, 0.0) for rest in ((0, 0), (0, 2), (4, 2))]
    for number, (alpha, ramp, warmup) in enumerate(settings):
        for interval in (1, 5):
            cfg = aah.config(BASE, {"windows": [1, 2, 4, 8], "resolution_ema_alpha": alpha, "warmup_steps": warmup,
                                    "post_warmup_ramp_steps": ramp, "control_interval": interval})
            layer, label = Scripted(cfg, {}, 12), f"c{number}_i{interval}"
            raw = torch.randint(0, 4, (12, 12), generator=folder.generator(5000 + number))
            final, ema, updated = [], [], []
            for step, script in enumerate(raw.tolist()):
                layer.script = script
                _, out = layer.call(x, x, x, step)
                final.append(out["idx_after"])
                updated.append(out["path"].endswith("_update"))
                ema.append(torch.full((12,), torch.nan) if layer.ema_idx is None else layer.ema_idx)
            arrays |= {f"{label}/raw": (raw.numpy().astype(np.int8), "[S,H] what the controller would pick"),
                       f"{label}/final": (np.array(final, np.int8), "[S,H] executed index"),
                       f"{label}/ema": (torch.stack(ema), "[S,H] EMA state (nan = not initialised)")}
            cases.append({"name": label, "alpha": alpha, "ramp_steps": ramp, "warmup_steps": warmup,
                          "control_interval": interval, "windows": [1, 2, 4, 8], "T": 8, "updated": updated})
    folder.write("d_resolution_ema.npz", arrays, cases)


def make_attention(folder):
    arrays, cases = {}, []
    for number in range(2):
        s, m = f"s{number}", f"mixed{number}"
        inputs = folder.randn(6000 + number, 4, 2, 32, 8)
        arrays |= {f"{s}/{part}": (inputs[i], "[N,T,D]") for i, part in enumerate(("q", "k", "v", "grad_out"))}
        for window in (4, 8, 16, 32) + ((1, 33) if number == 0 else ()):
            for kind, dtype in (("f32", torch.float32), ("f64", torch.float64))[:2 if window in (8, 32) else 1]:
                q, k, v = (part[:, None].to(dtype).requires_grad_() for part in inputs[:3])
                y, _ = aah.attend(q, k, v, [window])
                y.backward(inputs[3][:, None].to(dtype))
                arrays |= {f"{s}/w{window}/{key}_{kind}": (value.detach()[:, 0], "[N,T,D]") for key, value in
                           (("y", y), ("dq", q.grad), ("dk", k.grad), ("dv", v.grad))}
        qkv = folder.randn(6010 + number, 3, 2, 12, 32, 4)
        idx = torch.randint(0, 4, (12,), generator=folder.generator(6020 + number))
        windows = [[4, 8, 16, 32][i] for i in idx]
        y, hist = aah.attend(*qkv, windows)
        arrays |= {f"{m}/qkv": (qkv, "[3,B,H,T,D]"), f"{m}/idx": (idx, "[H] window index into [4,8,16,32]"),
                   f"{m}/y": (y.transpose(1, 2).flatten(2), "[B,T,H*D]")}
        arrays |= {f"{m}/head_{key}": (hist[:, i], "[H]") for i, key in enumerate(("entropy", "norms", "usage"))}
        w = np.array(windows, np.float32)
        shares = {key: float((w == value).mean()) for key, value in (("min", w.min()), ("max", w.max()))}
        cases.append({"name": m, "stats": {
            "total_elements": float(32 * w.sum()), "baseline_elements": float(12 * 32 * 32),
            "avg_window": float(w.mean()), "lk_mean": float(w.mean()), "lk_p90": float(np.quantile(w, 0.9)),
            "w_mean": float(w.mean()), "w_min": float(w.min()), "w_max": float(w.max()),
            "resolution_std": float(w.std()), "resolution_min_frac": shares["min"],
            "resolution_max_frac": shares["max"],
            "resolution_collapse_min": shares["min"] >= 0.98, "resolution_collapse_max": shares["max"] >= 0.98,
            "branch_usage_freq": {str(value): windows.count(value) / 12 for value in dict.fromkeys(windows)},
            "path_mode": "ungrouped_control_update"}})
    folder.write("e_window_attention.npz", arrays, cases)


def metrics(model, time, batch, windows, clamp):
    """Rectangular elements and the FLOPs proxy (section 7)."""
    layers, heads, width, hidden = (model[key] for key in ("n_layer", "n_head", "n_embd", "n_ff"))
    total = sum(time * min(max(w, clamp), time) for row in windows for w in row)
    full = layers * heads * time * time
    other = layers * (8.0 * batch * time * width**2 + 4.0 * batch * time * width * hidden)
    attention, dense = 4.0 * batch * (width // heads) * total, 4.0 * batch * time**2 * width * layers
    ratio = (attention + other) / (dense + other)
    return {"total_elements": total, "baseline_elements": full, "attn_ratio": total / full, "flops_attn_est": attention,
            "flops_total_est": attention + other, "flops_ratio": ratio, "flops_reduction_pct": 100 * (1 - ratio)}


def make_metrics(folder):
    large = {"n_layer": 16, "n_head": 12, "n_embd": 1536, "n_ff": 6144}
    tiny = {"n_layer": 2, "n_head": 12, "n_embd": 96, "n_ff": 192}
    cases = []

    def add(model, time, batch, clamp, windows, **extra):
        rows = [[windows] * 12] * model["n_layer"] if isinstance(windows, int) else windows
        key = "windows_uniform" if isinstance(windows, int) else "windows"
        cases.append({"model": model, "T": time, "B": batch, key: windows, "W_min_gpu": clamp, **extra,
                      **metrics(model, time, batch, rows, clamp)})

    def draw(offset, model, choices):
        idx = torch.randint(0, 4, (model["n_layer"], 12), generator=folder.generator(offset))
        return [[choices[i] for i in row] for row in idx.tolist()]

    for number in range(4):
        add(large, 4096, 1, 64, draw(7000 + number, large, (512, 1024, 2048, 4096)))
    for window in (512, 1024, 2048, 4096):
        add(large, 4096, 1, 64, window)
    for number in range(3):
        add(tiny, 64, 2, 1, draw(7010 + number, tiny, (8, 16, 32, 64)))
    add(tiny, 64, 2, 64, [[8] * 12] * 2, note="W_min_gpu 64 clamps only the reported window")
    full = metrics(large, 4096, 1, [[4096] * 12] * 16, 64)
    rates = {str(s): 3e-4 * (s / 100 if s < 100 else 0.5 * (1 + np.cos(np.pi * (s - 100) / 9900)))
             for s in (0, 1, 2, 50, 99, 100, 101, 1000, 5000, 9999, 10000)}
    shares = {"512": 0.5, "1024": 0.25, "2048": 0.15, "4096": 0.1}
    folder.write_json("f_metrics.json", {
        "cases": cases, "full_attention_1b": {key: full[key] for key in ("flops_attn_est", "flops_total_est",
                                                                         "flops_ratio")},
        "lr_schedule_3e-4_warm100_total10000": rates,
        "fractions_to_ratio": {"note": "sum_W f_W*W/T", "example": shares,
                               "ACR": sum(f * int(w) / 4096 for w, f in shares.items())}},
        "window assignments -> attn_ratio and flops proxies; LR schedule points")


def make_draws(folder):
    cases = [{"seed": seed, "layer": layer, "step": step,
              "shuffle_of_arange12": aah.ablation_draw("shuffle_post_select", 12, 4, seed, layer, step),
              "random_uniform4": aah.ablation_draw("random_uniform", 12, 4, seed, layer, step)}
             for seed in (folder.seed, folder.seed + 123) for layer in (0, 1, 15) for step in (None, 0, 7, 100, 2999)]
    formula = ("cpu generator seeded with (seed + 1000003*layer + 97409*step) mod (2^31-1), step None -> 0; shuffle: "
               "after = before[randperm(H)]; random_uniform: randint(0, n_windows, (H,))")
    folder.write_json("h_window_ablation.json", {"formula": formula, "cases": cases},
                      "post-selection ablation permutations / draws")


def make(path, seed):
    folder = Folder(path, seed)
    for step in (make_features, make_feature_ema, golden_hierarchy.make_hierarchy, golden_hierarchy.make_controller,
                 make_init, make_resolution, make_attention, make_metrics, make_draws):
        step(folder)
    recipe = golden_training.make_end_to_end(folder) | golden_training.RECIPE
    manifest = {"format": 1, "reference": {"generator": "tests/make_golden.py", "seed": seed},
                "torch": torch.__version__, "device": "cpu", "files": folder.files, "base_config": BASE,
                "base_config_note": "every case uses this configuration unless the case says otherwise",
                "end_to_end_recipe": recipe}
    (folder.path / "manifest.json").write_text(json.dumps(manifest))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir")
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    make(arguments.out_dir, arguments.seed)
