"""Golden data of clustering and controller: c_hierarchy.npz and d_controller.npz (AAH-v3 sections 2 and 3)."""
import naive_aah as aah
import naive_hierarchy as nh
import torch
from golden_base import BASE, SAFE, wide_weights

ROUNDING = 7e-6    # float32 logits of every stored case are this close to float64


def clusters(folder, offset, sizes, noise=0.05, shuffle=False):
    centers = folder.randn(offset, len(sizes), 9)
    rows = torch.cat([centers[i].repeat(size, 1) for i, size in enumerate(sizes)])
    rows = rows + noise * folder.randn(offset + 1, *rows.shape)
    return rows[torch.randperm(len(rows), generator=folder.generator(offset + 2))] if shuffle else rows


def sturdy(draw):
    """The first of draw(0), draw(1), ... whose groups do not depend on the precision."""
    for attempt in range(1000):
        rows = draw(100000 * attempt)
        if all(robust(rows, aah.config(BASE, {"min_group_size": size}), None) for size in (1, 3)):
            return rows
    raise RuntimeError("no rows away from ties")


def feature_sets(folder):
    """Rows to cluster, by name."""
    out = {}
    for heads, spread, count in ((12, 0.08, 3), (16, 0.12, 2), (2, 0.1, 2)):
        for i in range(count):
            def draw(offset, heads=heads, spread=spread, i=i):
                return 0.65 + spread * folder.randn(1000 + 10 * heads + i + offset, heads, 9)
            out[f"pos{heads}_{i}"] = sturdy(draw) if i == 0 else draw(0)
    for heads, count in ((12, 3), (16, 2)):
        for i in range(count):
            out[f"randn{heads}_{i}"] = sturdy(lambda offset, heads=heads, i=i: folder.randn(
                2000 + 10 * heads + i + offset, heads, 9))
    for name, sizes, shuffle in (("clusters3x4", [4, 4, 4], False), ("clusters_5_4_2_1", [5, 4, 2, 1], False),
                                 ("clusters5_perm16", [4, 4, 3, 3, 2], True)):
        out[name] = sturdy(lambda offset, sizes=sizes, shuffle=shuffle: clusters(
            folder, 3000 + 10 * len(sizes) + offset, sizes, shuffle=shuffle))
    near = folder.randn(3030, 9) + 0.02 * folder.randn(3031, 12, 9)
    out["near_parallel_norms"] = near * torch.linspace(1, 1.4, 12)[:, None]
    for heads, merges in ((12, 1), (16, 1), (12, 2), (16, 2)):
        out |= merging(folder, heads, merges)
    line = torch.arange(1, 10) / 10
    ones = torch.ones(12, 9)
    return out | {
        "all_equal12": ones, "all_equal2": ones[:2], "all_zero12": 0 * ones, "onehot9": torch.eye(9),
        "scaled_copies12": line * torch.linspace(1, 3, 12)[:, None], "single1": ones[:1],
        "plusminus12": ones * torch.where(torch.arange(12) % 4 < 2, 1.0, -1.0)[:, None]}


def merging(folder, heads, merges):
    """The first random rows for which exactly `merges` small groups join another one."""
    for trial in range(5000):
        rows = clusters(folder, 10000 + 4 * trial, [heads // 4] * 4, noise=0.55)
        info = {}
        nh.cluster(rows, 0.72, "cosine", True, aah.config(BASE), info=info)
        if info["groups_before_merge"] - info["groups_after_merge"] == merges and info["margin"] > SAFE:
            return {f"merge{heads}_{merges}_{trial}": rows}
    raise RuntimeError(f"no rows of {heads} heads with {merges} merges")


def groups_of(rows, cfg, prev, precision="fp32"):
    """Ordered groups per level, level features, infos."""
    infos = []
    levels = nh.build(rows, cfg, prev, precision, infos)
    return [groups for groups, _ in levels], [features for _, features in levels], infos


def robust(rows, cfg, prev):
    """Whether float32 and float64, with S as computed or symmetrised, give the same ordered groups, off the edges."""
    expected, _, infos = groups_of(rows, cfg, prev)
    return all(info["margin"] > SAFE / 10 for info in infos) and all(
        groups_of(rows.to(dtype), cfg | {"symmetric": symmetric}, prev)[0] == expected
        for dtype in (torch.float32, torch.float64) for symmetric in (False, True))


def debug(info, rows, number, added):
    """The measurements of one clustering."""
    n, x = len(rows), rows.double()
    off = ~torch.eye(n, dtype=torch.bool)
    z = nh.unit(x)
    spread = torch.linalg.svdvals(x - x.mean(0)).square()

    def stats(values):
        values = values[off] if n > 1 else torch.ones(1)
        return values.mean().item(), values.std(unbiased=False).item(), values.min().item(), values.max().item()

    mean, std, low, high = stats(info.get("sim", torch.ones(1, 1)).double())
    small = info.get("small", [])
    origin = ("single_item" if n == 1 else "forced_bipartition" if info["forced_bipartition"]
              else "collapsed" if info["groups_after_merge"] == 1 else "natural")
    stop = "" if added and n > 1 else "level0_collapsed" if number == 0 else "upper_level_collapsed"
    return {
        "n_items": n, "threshold": info["threshold"], "cluster_metric": info["cluster_metric"], "sim_mean": mean,
        "sim_std": std, "sim_min": low, "sim_max": high, "groups_before_force": info.get("groups_before_force", 1),
        "groups_before_merge": info.get("groups_before_merge", 1), "groups_after_merge": info["groups_after_merge"],
        "small_groups_before_merge": sum(size < info["min_group_size"] for size in small),
        "singleton_groups_before_merge": sum(size == 1 for size in small),
        "forced_bipartition": info.get("forced_bipartition", False),
        "force_split_anchor_similarity": info.get("force_split_anchor_similarity"), "cluster_origin": origin,
        "level_idx": number, "hierarchy_level_added": added, "hierarchy_growth_stopped": bool(stop),
        "hierarchy_stop_reason": stop, "feature_dim_var_mean": x.var(0, unbiased=False).mean().item(),
        "feature_cos_sim_mean": stats(z @ z.T)[0],
        "feature_l2_dist_mean": stats(torch.cdist(x, x))[0] if n > 1 else 0.0,
        "feature_norm_mean": x.norm(dim=1).mean().item(), "feature_norm_std": x.norm(dim=1).std(unbiased=False).item(),
        "feature_top_singular_ratio": (spread[0] / spread.sum()).item() if spread.sum() > 0 else 1.0}


def debugs(rows, groups, features, infos, cfg):
    rows = [rows, *features]
    return [debug({"groups_after_merge": 1, "min_group_size": cfg["min_group_size"]} | info, rows[number], number,
                  number < len(groups)) for number, info in enumerate(infos)]


def make_hierarchy(folder):
    sets, arrays, cases = feature_sets(folder), {}, []
    for name, rows in sets.items():
        arrays[f"{name}/feats"] = (rows, "[n,9] head features (already EMA-smoothed in real use)")
        n = len(rows)
        half = [int(i >= n // 2) for i in range(n)]
        for size, depth, prev in ((3, 4, None), (3, 4, half), (1, 4, None), (3, 1, None)):
            label = f"{name}/mgs{size}_d{depth}_{'none' if prev is None else 'half'}"
            cfg = aah.config(BASE, {"min_group_size": size, "max_depth": depth})
            groups, features, infos = groups_of(rows, cfg, prev)
            case = {"name": label, "feats": f"{name}/feats", "n": n, "min_group_size": size, "max_depth": depth,
                    "prev_head_groups": prev, "groups_per_level": groups,
                    "level_counts": [len(level) for level in groups], "f64_groups_agree": robust(rows, cfg, prev),
                    "groups_per_level_autocast_bf16": groups_of(rows, cfg, prev, "bf16")[0]}
            if label.endswith("mgs3_d4_none"):
                case["debug"] = debugs(rows, groups, features, infos, cfg)
                arrays |= {f"{label}/level{i}_feats": (value, "[G_l,9] group features at this level")
                           for i, value in enumerate(features)}
            cases.append(case)
    for metric in ("cosine", "centered_cosine", "l2"):
        for name in ("clusters5_perm16", "randn12_0", "pos12_0"):
            cfg = aah.config(BASE, {"min_group_size": 1, "upper_cluster_metric": metric})
            groups, features, infos = groups_of(sets[name], cfg, None)
            case = {"name": f"{name}/metric_{metric}", "feats": f"{name}/feats", "n": len(sets[name]),
                    "min_group_size": 1, "max_depth": 4, "prev_head_groups": None, "upper_metric": metric,
                    "groups_per_level": groups, "level_counts": [len(level) for level in groups],
                    "debug": debugs(sets[name], groups, features, infos, cfg),
                    "note": "upper metric variant (l2 uses upper_l2_threshold 0.0)"}
            if not robust(sets[name], cfg, None):
                case["f64_groups_agree"] = False
            cases.append(case)
    cases.append({"name": "fixed_groupings", "head_to_group": {
        f"{mode}/H{heads}/seed{seed}": nh.fixed_groups(mode, heads, seed)
        for mode in ("fixed_random", "fixed_deterministic") for heads in (2, 12, 16)
        for seed in (folder.seed, folder.seed + 1, folder.seed + 1337)}})
    folder.write("c_hierarchy.npz", arrays, cases)


def make_controller(folder):
    arrays, cases = {}, []
    source = folder.arrays["c_hierarchy.npz"]
    scales = [(1.0, 1.0), (1.0, 1.0), (2.0, 1.0), (1.0, 0.5)]
    names = ("pos12_0", "randn12_1", "clusters5_perm16", "pos2_0", "clusters_5_4_2_1", "all_equal12")
    for number, scale in enumerate(scales):
        for attempt in range(100):
            weights = wide_weights(folder, 4000 + 100 * number + attempt)
            made = [controller_case(source, name, f"s{number}", weights, scale, pairwise, parents)
                    for pairwise in ("joint_sibling", "none") for parents in (True, False) for name in names]
            off = [ungrouped_case(source, name, f"s{number}", weights) for name in ("pos12_1", "pos16_0", "pos2_0")]
            if all(case["safe"] for case, _ in made + off):
                break
        else:
            raise RuntimeError(f"no weights s{number} away from ties")
        arrays |= {f"s{number}/{key}": (value, "controller weight [out,in]") for key, value in weights.items()}
        for case, extra in made + (off if number < 3 else []):
            keep = (number < 2 and case.get("parent_constraint", True)) or "grouping_off" in case
            arrays |= extra if keep else {}
            cases.append({key: value for key, value in case.items() if key != "safe"})
    folder.write("d_controller.npz", arrays, sorted(cases, key=lambda case: "grouping_off" in case))


def controller_case(source, name, weights_name, weights, scale, pairwise, parents):
    rows = torch.from_numpy(source[f"{name}/feats"])
    cfg = aah.config(BASE, {"min_group_size": 1, "controller_pairwise_mode": pairwise, "parent_constraint": parents,
                            "controller_logit_scale": scale[0], "joint_output_scale": scale[1]})

    def decide(x, precision="fp32"):
        levels = nh.build(x, cfg, None, precision)
        chosen = nh.select(levels, weights, cfg, precision)
        return levels, chosen, [chosen[0]["post"][g] for g in nh.head_map(levels[0][0])]

    levels, chosen, heads = decide(rows)
    exact = decide(rows.double())
    groups = [level for level, _ in levels]
    agree = exact[2] == heads and [level for level, _ in exact[0]] == groups
    rounding = max(float((a["logits"] - b["logits"]).abs().max()) for a, b in zip(chosen, exact[1], strict=True))
    label = f"{weights_name}/{pairwise}/pc{int(parents)}/{name}"
    case = {"name": label, "weights": weights_name, "feats_from": f"c_hierarchy.npz:{name}/feats", "n_head": len(rows),
            "pairwise_mode": pairwise, "parent_constraint": parents, "min_group_size": 1, "max_depth": 4,
            "aah_v3_controller_logit_scale": scale[0], "aah_v3_joint_output_scale": scale[1],
            "groups_per_level": groups, "parent_maps": [nh.parent_map(levels, i) for i in range(len(levels) - 1)],
            "raw_idx": [level["raw"] for level in chosen], "parent_idx": [level["parent"] for level in chosen],
            "post_parent_idx": [level["post"] for level in chosen],
            "margins_min": [level["margin"] for level in chosen],
            "pair_count": [level["pairs"] for level in chosen], "head_window_idx": heads,
            "head_window_idx_autocast_bf16": decide(rows, "bf16")[2], "f64_agree": agree,
            "safe": agree and rounding < ROUNDING and min(level["margin"] for level in chosen) > 10 * SAFE}
    arrays = {f"{label}/level{i}_{key}": (level[part], "[G,...] of this level") for i, level in enumerate(chosen)
              for key, part in (("input", "input"), ("base_logits", "base"), ("logits", "logits"))}
    return case, arrays


def ungrouped_case(source, name, weights_name, weights):
    rows = torch.from_numpy(source[f"{name}/feats"])
    x, logits = nh.select_ungrouped(rows, weights, aah.config(BASE))
    top = logits.topk(2).values
    label = f"off/{weights_name}/{name}"
    case = {"name": label, "weights": weights_name, "feats_from": f"c_hierarchy.npz:{name}/feats", "grouping_off": True,
            "idx": logits.argmax(1).tolist(), "safe": float((top[:, 0] - top[:, 1]).min()) > 10 * SAFE}
    return case, {f"{label}/input": (x, "[H,29]"), f"{label}/logits": (logits, "[H,W]")}
