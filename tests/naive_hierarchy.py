"""Features, clustering and controller of a plain, slow AAH-v3: one head, one group, one pair at a time.

Source: AAH-v3 sections 1-3. cfg is a dictionary of the reference's field names (naive_aah.config). Precision is "fp32",
"fp64", or "bf16" (features and norms fp32; similarity products and controller Linears in bfloat16).
"""
import math

import torch
import torch.nn.functional as F

# ---- features (section 1) ----

def pooled_features(qkv, hist, groups, dtype=torch.float32):
    """[G, 9] features of groups of heads: q, k, v [B, H, T, D]; hist [H, 3] or None; groups lists of head ids."""
    rows = []
    for members in groups:
        row = []
        for tensor in qkv:
            values = tensor.detach().to(dtype)[:, members]
            row += [values.abs().mean(), values.std(unbiased=True)]
        past = torch.zeros(3, dtype=dtype) if hist is None else hist.to(dtype)[members].mean(0)
        rows.append(torch.cat([torch.stack(row), past]))
    return torch.stack(rows)


def head_features(qkv, hist, dtype=torch.float32):
    return pooled_features(qkv, hist, [[head] for head in range(qkv[0].shape[1])], dtype)


def aggregate(features, groups):
    return torch.stack([features[members].mean(0) for members in groups])


def enriched(levels):
    """The [G, 29] controller input of every level; levels: bottom to top (groups, features [G, 9])."""
    inputs = []
    for number, (groups, features) in enumerate(levels):
        sizes = [len(members) for members in groups]
        parents = parent_map(levels, number)
        rows = []
        for g in range(len(groups)):
            up = torch.zeros_like(features[g]) if parents is None else features[g] - levels[number + 1][1][parents[g]]
            height, size = number / max(1, len(levels) - 1), sizes[g] / sum(sizes)
            rows.append(torch.cat([features[g], features.new_tensor([height]), up, features[g] - features.mean(0),
                                   features.new_tensor([size])]))
        inputs.append(torch.stack(rows))
    return inputs


def parent_map(levels, number):
    """Parent of each group of a level, or None at the top."""
    if number + 1 == len(levels):
        return None
    upper = levels[number + 1][0]
    return [next(p for p, members in enumerate(upper) if g in members) for g in range(len(levels[number][0]))]


# ---- clustering (section 2) ----

def product(a, b, precision):
    return (a.bfloat16() @ b.bfloat16()).to(a.dtype) if precision == "bf16" else a @ b


def unit(rows):
    return rows / rows.norm(dim=-1, keepdim=True).clamp_min(1e-6)


def similarity(x, z, metric, cfg, precision):
    """S [n, n] of rows x [n, 9] with unit rows z."""
    if metric == "l2":
        return -torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    s = product(z, z.T, precision)
    if metric == "cosine_normdiff":
        r, c = x.norm(dim=1), cfg["cosine_normdiff_scale"]
        s = s - c * (r[:, None] - r[None]).abs() / torch.maximum(r[:, None], r[None]).clamp_min(1e-6)
    return (s + s.T) / 2 if cfg["symmetric"] else s


def cluster(x, threshold, metric, allow_force, cfg, prev=None, precision="fp32", info=None):
    """Ordered lists of the rows of x [n, 9] that belong together; info, a dict, receives what was measured."""
    n, scale = len(x), cfg["cosine_normdiff_scale"]
    z = x if metric == "l2" else unit(x - x.mean(0) if metric == "centered_cosine" else x)
    info = {} if info is None else info
    info.update(n_items=n, threshold=threshold, cluster_metric=metric, margin=math.inf)
    if n == 1:
        return [[0]]
    s = similarity(x, z, metric, cfg, precision)
    if metric == "cosine" and prev is not None:
        same = torch.tensor([[float(prev[i] == prev[j]) for j in range(n)] for i in range(n)], dtype=s.dtype)
        s = (s + cfg["churn_penalty"] * same).clamp_max(1.0)
    info["sim"] = s
    groups, centroids = [[0]], [z[0]]
    for i in range(1, n):
        scores = []
        for members, c in zip(groups, centroids, strict=True):
            if metric == "l2":
                score = -(c - z[i]).norm()
            else:
                score = product(c, z[i], precision)
            if metric == "cosine_normdiff":
                big, own = x[members].mean(0).norm(), x[i].norm()
                score = score - scale * (big - own).abs() / torch.maximum(big, own).clamp_min(1e-6)
            scores.append(float(score))
        best = max(range(len(scores)), key=scores.__getitem__)
        info["margin"] = min(info["margin"], abs(scores[best] - threshold))
        if scores[best] >= threshold:
            groups[best].append(i)
            mean = z[groups[best]].mean(0)
            centroids[best] = mean if metric == "l2" else unit(mean)
        else:
            groups.append([i])
            centroids.append(z[i])
    info.update(groups_before_force=len(groups), forced_bipartition=False, force_split_anchor_similarity=None)
    if allow_force and len(groups) == 1:
        groups = bipartition(s, z, info, precision)
    else:
        info.update(groups_before_merge=len(groups), small=[len(g) for g in groups])
        if cfg["min_group_size"] > 1 and len(groups) > 1:
            groups = merge(groups, z, threshold, cfg["min_group_size"], precision, info)
    info["groups_after_merge"] = len(groups)
    return groups


def bipartition(s, z, info, precision):
    n = len(z)
    off = s.clone()
    off.fill_diagonal_(2.0)
    i0, i1 = divmod(int(torch.argmin(off)), n)
    s0, s1 = product(z, z[i0], precision), product(z, z[i1], precision)
    g0, g1 = [i0], [i1]
    for j in range(n):
        if j in (i0, i1):
            continue
        d = float(s0[j] - s1[j])
        if d > 1e-8 or (d >= -1e-8 and len(g0) <= len(g1)):
            g0.append(j)
        else:
            g1.append(j)
    info.update(forced_bipartition=True, force_split_anchor_similarity=float(s[i0, i1]), groups_before_merge=2,
                small=[len(g0), len(g1)])
    return [g0, g1]


def merge(groups, z, threshold, min_size, precision, info):
    groups = [list(g) for g in groups]
    means = torch.stack([z[g].mean(0) for g in groups])
    for gi in [g for g, members in enumerate(groups) if len(members) < min_size]:
        if len(groups[gi]) >= min_size:
            continue
        scores = product(means, means[gi], precision).clone()
        scores[gi] = -1.0
        best = int(torch.argmax(scores))
        info["margin"] = min(info["margin"], abs(float(scores[best]) - threshold))
        if scores[best] < threshold or sum(bool(g) for g in groups) <= 2:
            continue
        groups[best] += groups[gi]
        groups[gi] = []
        means[best] = z[groups[best]].mean(0)
    return [g for g in groups if g]


def grow(groups, features, cfg, precision="fp32", infos=None):
    """The levels over level 0 (section 2.2)."""
    levels = [(groups, features)]
    metric = cfg["upper_cluster_metric"]
    threshold = cfg["upper_l2_threshold"] if metric == "l2" else cfg["super_threshold"]
    while len(levels) < cfg["max_depth"] and len(groups) > 1:
        info = {}
        upper = cluster(levels[-1][1], threshold, metric, False, cfg, None, precision, info)
        if infos is not None:
            infos.append(info)
        if len(upper) == 1:
            break
        levels.append((upper, aggregate(levels[-1][1], upper)))
    return levels


def build(features, cfg, prev=None, precision="fp32", infos=None):
    info = {}
    groups = cluster(features, cfg["sim_threshold"], "cosine", True, cfg, prev, precision, info)
    if infos is not None:
        infos.append(info)
    return grow(groups, aggregate(features, groups), cfg, precision, infos)


def fixed_groups(mode, heads, seed):
    """Group of each head for fixed_random and fixed_deterministic."""
    if mode == "fixed_deterministic":
        return [head % 2 for head in range(heads)]
    order = torch.randperm(heads, generator=torch.Generator().manual_seed(seed)).tolist()
    return [0 if head in order[:heads // 2] else 1 for head in range(heads)]


# ---- controller (section 3) ----

def mlp(weights, name, x, precision):
    w = [weights[f"{name}.mlp.{part}"].to(torch.bfloat16 if precision == "bf16" else x.dtype)
         for part in ("0.weight", "0.bias", "2.weight", "2.bias")]
    return F.linear(F.gelu(F.linear(x.to(w[0].dtype), w[0], w[1])), w[2], w[3]).to(x.dtype)


def select(levels, weights, cfg, precision="fp32"):
    """Per level a dict of input, base, logits, raw, parent, post, margin, pairs (section 3)."""
    out = []
    for number, x in enumerate(enriched(levels)):
        base = mlp(weights, "controller", x, precision) * cfg["controller_logit_scale"]
        logits, families, pairs = base.clone(), {}, 0
        for g, parent in enumerate(parent_map(levels, number) or [0] * len(x)):
            families.setdefault(parent, []).append(g)
        if cfg["controller_pairwise_mode"] == "joint_sibling":
            for family in families.values():
                for a, b in zip(family[::2], family[1::2], strict=False):
                    pair = torch.cat([x[a], x[b], x[a] - x[b], x[b] - x[a]])
                    rows = mlp(weights, "joint_sibling_scorer", pair, precision).view(2, -1) * cfg["joint_output_scale"]
                    logits[a], logits[b], pairs = rows[0], rows[1], pairs + 1
        top = logits.topk(2, dim=1).values
        out.append({"input": x, "base": base, "logits": logits, "raw": logits.argmax(1).tolist(), "pairs": pairs,
                    "margin": float((top[:, 0] - top[:, 1]).min())})
    for number in reversed(range(len(out))):
        level, parents = out[number], parent_map(levels, number)
        level["parent"] = None if parents is None else [out[number + 1]["post"][p] for p in parents]
        level["post"] = list(level["raw"])
        if parents is not None and cfg["parent_constraint"]:
            level["post"] = [min(own, up) for own, up in zip(level["raw"], level["parent"], strict=True)]
    return out


def select_ungrouped(features, weights, cfg, precision="fp32"):
    """Input [H, 29] and logits [H, K] when every head decides for itself."""
    x = enriched([([[head] for head in range(len(features))], features)])[0]
    return x, mlp(weights, "controller", x, precision) * cfg["controller_logit_scale"]


def head_map(groups):
    """Group of each head, from lists of heads."""
    return [group for _, group in sorted((head, g) for g, members in enumerate(groups) for head in members)]


def members_of(h2g):
    return [[head for head, g in enumerate(h2g) if g == group] for group in range(max(h2g) + 1)]
