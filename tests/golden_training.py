"""A tiny GPT over the oracle's attention layer, trained for a few steps: g_end_to_end.npz, g2_ablation_replay.json.

Source: AAH-v3 section 8 (model and its initialisation order) and the golden manifest's end_to_end_recipe.
"""
import math

import naive_aah as aah
import numpy as np
import torch
from golden_base import ABLATIONS, BASE, REGIMES, SAFE
from torch import nn

LAYERS, HEADS, WIDTH, HIDDEN, VOCAB, TIME = 2, 12, 96, 192, 64, 64
EVAL_AFTER, TRAIN_CALLS = 8, 13
VARIANTS = [("fp64", False), ("fp32", True), ("fp64", True)]    # precision, symmetrised similarity
RECIPE = {
    "optimizer": "AdamW lr 3e-3, weight_decay 0.1, default betas, no schedule, no clip", "batch": 1, "T": TIME,
    "qkv_rounding": "qkv output rounded through fp16, straight-through gradient",
    "calls": "13 train calls (step 0..12); after step 8 two eval calls with the step number still 8",
}


class Attention(nn.Module):
    def __init__(self, cfg, enabled, number, seed):
        super().__init__()
        self.control = aah.init_layer(WIDTH, cfg, controllers=enabled)
        self.qkv, self.proj = (
            nn.utils.skip_init(nn.Linear, WIDTH, rows * WIDTH, bias=False) for rows in (3, 1))
        self.qkv.weight.data, self.proj.weight.data = self.control.pop("qkv.weight"), self.control.pop("proj.weight")
        self.seed, self.number = seed, number
        self.layer = aah.NaiveLayer(cfg, self.control, HEADS, number) if enabled else None

    def widen(self):
        """Wide controller weights and per-head gains, so that choices differ between heads."""
        generator = torch.Generator().manual_seed(7000 + self.number + self.seed)
        for name in sorted(self.control):
            scale = 0.3 if name.endswith("bias") else 2.0 if ".0." in name else 1.5
            self.control[name] = torch.randn(self.control[name].shape, generator=generator) * scale
        generator = torch.Generator().manual_seed(8000 + self.number + self.seed)
        gain = 0.4 + 2.2 * torch.rand(3, HEADS, 1, 1, generator=generator)
        self.qkv.weight.data = (self.qkv.weight.data.view(3, HEADS, -1, WIDTH) * gain).reshape(3 * WIDTH, WIDTH)

    def forward(self, x, step, training, seen):
        qkv = self.qkv(x)
        qkv = (qkv + (qkv.half().float() - qkv).detach()).view(1, -1, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.transpose(1, 3).unbind(2)
        if self.layer is None:
            y, _ = aah.attend(q, k, v, [x.shape[1]] * HEADS)
            seen.append(None)
        else:
            y, out = self.layer.call(q, k, v, step, training)
            seen.append(out | {"qkv": qkv.detach().half().numpy()})
        return self.proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, cfg, enabled, number, seed):
        super().__init__()
        self.ln1 = nn.LayerNorm(WIDTH)
        self.attn = Attention(cfg, enabled, number, seed)
        self.ln2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(WIDTH, HIDDEN), "fc2": nn.Linear(HIDDEN, WIDTH)})

    def forward(self, x, *call):
        x = x + self.attn(self.ln1(x), *call)
        return x + self.mlp["fc2"](nn.functional.gelu(self.mlp["fc1"](self.ln2(x))))


class Gpt(nn.Module):
    def __init__(self, cfg, enabled, seed):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TIME, WIDTH)
        self.blocks = nn.ModuleList(Block(cfg, enabled, number, seed) for number in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        for block in self.blocks:
            block.attn.widen()

    def forward(self, tokens, step, training):
        """Loss of tokens [1, T + 1] and what every layer decided."""
        seen, x = [], self.wte(tokens[:, :-1]) + self.wpe.weight
        for block in self.blocks:
            x = block(x, step, training, seen)
        logits = self.ln_f(x) @ self.wte.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), seen


def digits(values):
    return "".join(str(value) for value in values)


def call_record(out):
    keys = ("group_counts", "path", "raw", "post", "group_change_rate", "resolution_delta")
    return {"idx_before": digits(out["idx_before"]), "idx_after": digits(out["idx_after"]),
            "head_groups": digits(out["head_groups"]), **{key: out[key] for key in keys}, "lq": TIME,
            "attn_elements": float(TIME * sum(out["windows"]))}


def train(tokens, base, overrides, seed, recipe_seed):
    """Trains on tokens uint8 [15, 1, 65]; returns the case, losses, hist_before, qkv of updates, control weights and
    the smallest margin (top1 - top2 or |similarity - threshold|) of any decision."""
    cfg = aah.config(base, overrides)
    torch.manual_seed(seed)
    model = Gpt(cfg, overrides.get("aah_v3_enabled", True), recipe_seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    train_tokens, eval_tokens = torch.from_numpy(tokens[:TRAIN_CALLS]).long(), torch.from_numpy(tokens[TRAIN_CALLS:])
    case = {"calls": []}
    losses, hist, qkv, steps, margin = [], [], [], [], math.inf

    def record(loss, seen, step, mode):
        nonlocal margin
        losses.append(loss.item())
        case["calls"].append({"step": step, "mode": mode, "layers": [out and call_record(out) for out in seen]})
        if seen[0] is None:
            return
        margin = min(margin, *(out["margin"] for out in seen))
        hist.append([torch.zeros(HEADS, 3) if out["hist_before"] is None else out["hist_before"] for out in seen])
        if step == 0 or seen[0]["path"].endswith("_update"):
            steps.append(step)
            qkv.append([out["qkv"] for out in seen])

    for step in range(TRAIN_CALLS):
        loss, seen = model(train_tokens[step], step, True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(loss, seen, step, "train")
        for block in eval_tokens if step == EVAL_AFTER else ():
            with torch.no_grad():
                record(*model(block.long(), step, False), step, "eval")
    named = {name.replace("attn.qkv", "attn.qkv.lin"): value for name, value in model.named_parameters()}
    for number, block in enumerate(model.blocks):
        named |= {f"blocks.{number}.attn.{name}": value for name, value in block.attn.control.items()}
    case["final_param_sums"] = {name: value.double().sum().item() for name, value in named.items()}
    arrays = {"losses": np.array(losses, np.float32)}
    if steps:
        case["qkv_steps"] = steps
        arrays["hist_before"] = torch.stack([torch.stack(rows) for rows in hist]).float().numpy()
        arrays["qkv"] = np.array(qkv)
    return case, arrays, [block.attn.control for block in model.blocks], margin


def replay(qkv, weights, overrides, steps, precision="fp32"):
    """One call of every layer per stored update; per layer the records, and the smallest margin."""
    layers, margin = [], np.inf
    for number, control in enumerate(weights):
        layer = aah.NaiveLayer(aah.config(BASE, overrides), control, qkv.shape[5], number, precision)
        records = []
        for u, step in enumerate(steps):
            q, k, v = (torch.from_numpy(qkv[u, number, :, :, part]).float().transpose(1, 2) for part in range(3))
            _, out = layer.call(q, k, v, step)
            margin = min(margin, out["margin"])
            keys = ("windows", "idx_before", "idx_after", "head_groups", "group_counts", "path", "raw", "post")
            hist = None if number else [[round(value, 7) for value in row] for row in out["hist"].T.tolist()]
            records.append({"step": step, **{key: out[key] for key in keys}, "hist": hist, "abl": out["abl"]})
        layers.append(records)
    return layers, margin


def regimes_agree(qkv, weights, steps):
    """The records of every ablation, or None where float32 and float64 differ or a choice is close to a tie."""
    out = {}
    for name, overrides in ABLATIONS.items():
        layers, margin = replay(qkv, weights, overrides, steps)
        others = [replay(qkv, weights, overrides | {"symmetric": symmetric}, steps, precision)[0]
                  for precision, symmetric in VARIANTS]
        if margin < SAFE or any(other != layers for other in others):
            return None
        out[name] = {"overrides": overrides, "layers": layers}
    return out


def make_end_to_end(folder):
    for attempt in range(50):
        seed = 1000 * folder.seed + 10 * attempt
        tokens = torch.randint(0, 64, (15, 1, 65), generator=folder.generator(8000 + attempt)).to(torch.uint8).numpy()
        arrays, cases, smallest = {"tokens": (tokens, "[S+2,1,65] token blocks; the last two are eval")}, [], np.inf
        for name, overrides in ({"pure_baseline": {"aah_v3_enabled": False}} | REGIMES).items():
            case, extra, weights, margin = train(tokens, BASE, overrides, seed, seed)
            cases.append({"name": name, "overrides": overrides} | case)
            arrays |= {f"{name}/{key}": (value, f"{key} in call order") for key, value in extra.items()}
            smallest = min(smallest, margin)
            if name == "full_adaptive":
                qkv, steps, shared = extra["qkv"], case["qkv_steps"], weights
        arrays |= {f"ctrl/layer{number}/{key}": (value, "controller weights shared by all regimes")
                   for number, control in enumerate(shared) for key, value in control.items()}
        regimes = regimes_agree(qkv, shared, steps) if smallest > SAFE else None
        if regimes and all(same_decisions(case, arrays, shared, *variant)
                           for case in cases[1:] for variant in VARIANTS):
            break
    else:
        raise RuntimeError("no end-to-end run away from ties")
    folder.write("g_end_to_end.npz", arrays, cases)
    folder.write_json("g2_ablation_replay.json", {
        "note": "one call per stored update step of g_end_to_end.npz full_adaptive/qkv", "regimes": regimes},
        "every regime/ablation driven on the qkv of full_adaptive; the module runs its own attention")
    return {"seed": seed, "weights": (
        f"torch.manual_seed({seed}), build model, then per layer l: controller/joint parameters in sorted-name order, "
        f"generator seed {7000 + seed}+l: randn * (2.0 first-layer weight, 1.5 second-layer weight, 0.3 biases); qkv "
        f"weight rows viewed (3,12,8,96) multiplied by 0.4+2.2*rand(3,12,1,1), generator seed {8000 + seed}+l")}


def same_decisions(case, arrays, weights, precision, symmetric):
    """Whether another precision decides the stored calls alike, from the stored qkv and history."""
    qkv, hist = (arrays[f"{case['name']}/{key}"][0] for key in ("qkv", "hist_before"))
    for number, control in enumerate(weights):
        layer = aah.NaiveLayer(aah.config(BASE, case["overrides"], {"symmetric": symmetric}), control, 12, number,
                               precision)
        for at, call in enumerate(case["calls"]):
            if call["mode"] != "train" or call["step"] not in case["qkv_steps"]:
                continue
            u = case["qkv_steps"].index(call["step"])
            layer.hist = torch.from_numpy(hist[at, number]) if at else None
            q, k, v = (torch.from_numpy(qkv[u, number, :, :, part]).float().transpose(1, 2) for part in range(3))
            _, out = layer.call(q, k, v, call["step"])
            kept = call["layers"][number]
            if any(digits(out[key]) != kept[key] for key in ("idx_after", "head_groups")) or any(
                    out[key] != kept[key] for key in ("group_counts", "raw", "post")):
                return False
    return True
