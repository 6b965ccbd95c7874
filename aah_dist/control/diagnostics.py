"""What a log line says of a decision, under the paper's names (its definitions, averaged over all layers)."""

from collections import Counter

import numpy as np

from aah_dist.control.controller import Decision
from aah_dist.control.decision import LayerDecision
from aah_dist.control.metrics import branch_usage, group_overlap
from aah_dist.control.settings import Settings


def decision_figures(decision: Decision, settings: Settings) -> dict[str, float]:
    """Groups, levels, choices and margins of the newest decision.

    A choice that is not executed (warm-up, window control off) is shown under aah/shadow_*.
    """
    windows = np.array(settings.windows)[decision.choice]
    paths = Counter(layer.path for layer in decision.layers)
    figures = {f"aah/path_mode_freq/{path}": n / len(decision.layers) for path, n in paths.items()}
    if decision.update and settings.aah.window_control:
        figures |= {"aah/resolution_delta": decision.windows_changed,
                    "aah/choice_change_rate": decision.choices_changed}
    else:
        figures |= {"aah/shadow_W_mean": float(windows.mean())}
        figures |= branch_usage(windows, settings.windows, "aah/shadow_")
    if settings.aah.policy == "simple":
        return figures
    figures["aah/decision_margin_min"] = min(layer.margin for layer in decision.layers)
    figures |= _logit_figures(decision.layers)
    if settings.aah.grouping:
        figures |= {"aah/group_change_rate": decision.groups_changed} | _level_figures(decision.layers)
        figures |= _cluster_figures(decision.layers)
    return figures | _feature_figures(decision.layers)


def _level_figures(layers: list[LayerDecision]) -> dict[str, float]:
    """group_count_level{i}: mean over the layers that have the level; group_count_total: their sum."""
    depth = max(len(layer.levels) for layer in layers)
    counts = {f"aah/group_count_level{i}": float(np.mean([len(layer.levels[i].groups) for layer in layers
                                                          if i < len(layer.levels)])) for i in range(depth)}
    return {"aah/hierarchy_levels_used": float(np.mean([len(layer.levels) for layer in layers])),
            "aah/group_count_total": sum(counts.values()), **counts}


def _logit_figures(layers: list[LayerDecision]) -> dict[str, float]:
    """Spread of the logits over groups and windows, by level."""
    depth = max(len(layer.levels) for layer in layers)
    return {f"aah/controller_logits_std_level{i}": float(np.mean([layer.selection.logits[i].std() for layer in layers
                                                                  if i < len(layer.levels)])) for i in range(depth)}


def _cluster_figures(layers: list[LayerDecision]) -> dict[str, float]:
    """How level 0 was clustered; absent where its groups were known."""
    found = [c for layer in layers for c in layer.levels[0].clustering if len(c.similarity) > 1]
    if not found:
        return {}
    between = np.concatenate([c.similarity[~np.eye(len(c.similarity), dtype=bool)] for c in found])
    figures = {"aah/forced_bipartition": float(np.mean([c.anchor is not None for c in found])),
               "aah/cluster_groups_before_merge_level0": float(np.mean([c.before_merge for c in found])),
               "aah/cluster_groups_after_merge_level0": float(np.mean([len(c.groups) for c in found])),
               "aah/cluster_sim_mean_level0": float(between.mean()), "aah/cluster_sim_std_level0": float(between.std()),
               "aah/cluster_sim_min_level0": float(between.min()), "aah/cluster_sim_max_level0": float(between.max())}
    anchors = [c.similarity[c.anchor] for c in found if c.anchor is not None]
    if anchors:
        figures["aah/force_split_anchor_similarity"] = float(np.mean(anchors))
    return figures


def _feature_figures(layers: list[LayerDecision]) -> dict[str, float]:
    """Spread of the rows that were clustered or scored: norms, variance of each column, pairwise cosine and distance,
    and the share of the largest singular direction of the centred rows."""
    norms, variances, cosines, distances, top = [], [], [], [], []
    for layer in layers:
        x = layer.features.astype(np.float64)
        norm = np.linalg.norm(x, axis=1)
        norms.append((norm.mean(), norm.std()))
        variances.append(x.var(0).mean())
        singular = np.linalg.svd(x - x.mean(0), compute_uv=False) ** 2
        top.append(singular[0] / singular.sum() if singular.sum() > 0 else 1.0)
        if len(x) > 1:
            between = ~np.eye(len(x), dtype=bool)
            z = x / np.maximum(norm, 1e-6)[:, None]
            cosines.append((z @ z.T)[between].mean())
            distances.append(np.linalg.norm(x[:, None] - x[None], axis=-1)[between].mean())
    mean_norm, std_norm = np.mean(norms, axis=0)
    figures = {"aah/feature_norm_mean": mean_norm, "aah/feature_norm_std": std_norm,
               "aah/feature_dim_var_mean": np.mean(variances), "aah/feature_top_singular_ratio": np.mean(top)}
    if cosines:
        figures |= {"aah/feature_cos_sim_mean": np.mean(cosines), "aah/feature_l2_dist_mean": np.mean(distances)}
    return {name: float(value) for name, value in figures.items()}


class GroupHistory:
    """How groups persist from one log line to the next; a record of the log, not part of the run's state."""

    def __init__(self) -> None:
        self._maps: np.ndarray | None = None
        self._lifespan: float | None = None

    def figures(self, maps: np.ndarray) -> dict[str, float]:
        """maps: int [layers, units].  Overlap is the Jaccard index of co-grouped pairs; the lifespan an EMA (0.9 old)
        of 1 - the share of units that changed their group's number.  Nothing on the first line."""
        before, self._maps = self._maps, maps
        if before is None:
            return {}
        reassigned = float((before != maps).mean())
        self._lifespan = 1 - reassigned if self._lifespan is None else 0.9 * self._lifespan + 0.1 * (1 - reassigned)
        overlap = np.mean([group_overlap(b, a) for b, a in zip(before, maps, strict=True)])
        return {"aah/group_overlap": float(overlap), "aah/head_reassign_rate": reassigned,
                "aah/group_lifespan_ema": self._lifespan}
