"""The same run at every layout: losses, gradient norms, every tensor's gradient, parameters.

One launch a number of ranks and TP size trains all its cases (tests/parity_worker.py); the reference is one rank.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from ranks import REPOSITORY, run_ranks

SP = {"parallel.sequence_parallel": True}
QK = {"model.qk_norm": True}
STANDARD = {"model.position": "rope", "model.norm": "rmsnorm", "model.activation": "swiglu", "model.mlp_bias": False,
            "model.num_kv_heads": 2, "model.tied_embeddings": False, "model.qk_norm": True}
PAPER = {"model.init": "paper", "train.decay": "all", "train.clip": 0.0, "train.lr": 3e-4}
DROPOUT = {"model.dropout": 0.1, "train.recompute": True}
ODD_VOCABULARY = {"model.vocab_multiple": 2}

LAUNCHES = {
    "tp1-dp1": (1, 1, {
        "base": {"zero": 1}, "zero0": {"zero": 0}, "zero2": {"zero": 2}, "zero3": {"zero": 3},
        "qk": {"zero": 1, "overrides": QK}, "standard": {"zero": 1, "overrides": STANDARD},
        "paper": {"zero": 1, "overrides": PAPER},
        "dropout": {"zero": 1, "overrides": {"model.dropout": 0.1}},
        "recompute": {"zero": 2, "overrides": {"train.recompute": True}},
        "micro4": {"zero": 1, "overrides": {"train.micro_batch_size": 4}},
        "bf16": {"zero": 2, "precision": "bf16"},
    }),
    "tp2-dp1": (2, 2, {
        "zero0": {"zero": 0}, "zero1": {"zero": 1}, "zero2": {"zero": 2}, "zero3": {"zero": 3},
        "sp-zero1": {"zero": 1, "overrides": SP}, "sp-zero2": {"zero": 2, "overrides": SP},
        "sp-zero3": {"zero": 3, "overrides": SP},
        "qk": {"zero": 2, "overrides": QK}, "sp-qk": {"zero": 2, "overrides": {**QK, **SP}},
        "standard": {"zero": 2, "overrides": STANDARD}, "sp-standard": {"zero": 3, "overrides": {**STANDARD, **SP}},
        "paper": {"zero": 2, "overrides": PAPER},
        "dropout-recompute": {"zero": 2, "overrides": DROPOUT},
        "sp-dropout-recompute": {"zero": 2, "overrides": {**DROPOUT, **SP}},
        "dropout-recompute-zero3": {"zero": 3, "overrides": DROPOUT},
        "bf16": {"zero": 2, "precision": "bf16"},
        "no-sum": {"zero": 2, "mutant": "no_tp_gradient_sum", "overrides": SP},
        "no-sum-qk": {"zero": 2, "mutant": "no_tp_gradient_sum", "overrides": QK},
    }),
    "tp1-dp2": (2, 1, {
        "zero0": {"zero": 0}, "zero1": {"zero": 1}, "zero2": {"zero": 2}, "zero3": {"zero": 3},
        "dropout": {"zero": 2, "overrides": {"model.dropout": 0.1}}, "standard": {"zero": 3, "overrides": STANDARD},
        "bf16": {"zero": 2, "precision": "bf16"},
    }),
    "tp2-dp2": (4, 2, {
        "zero1": {"zero": 1}, "zero2": {"zero": 2}, "zero3": {"zero": 3},
        "sp-zero2": {"zero": 2, "overrides": SP}, "sp-dropout": {"zero": 2, "overrides": {"model.dropout": 0.1, **SP}},
        "sp-standard": {"zero": 3, "overrides": {**STANDARD, **SP}}, "bf16": {"zero": 2, "precision": "bf16"},
    }),
}
MUTANTS = {"no-sum", "no-sum-qk"}


def reference_of(case: str) -> str:
    for name in ("qk", "standard", "paper", "dropout", "bf16"):
        if name in case:
            return name
    return "base"


@pytest.fixture(scope="session")
def launched(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory):
    """name of launch -> {case: arrays}; each launch runs at first use."""
    done: dict[str, dict] = {}

    def results(launch: str) -> dict:
        if launch not in done:
            ranks, tp, cases = LAUNCHES[launch]
            folder = tmp_path_factory.mktemp(launch)
            job = {"tp": tp, "data": str(tiny_data), "out": str(folder), "cases": cases}
            (folder / "job.json").write_text(json.dumps(job))
            worker = str(REPOSITORY / "tests" / "parity_worker.py")
            for code, output in run_ranks(ranks, [worker, str(folder / "job.json")], folder):
                assert code == 0, output[-4000:]
            done[launch] = {case: dict(np.load(folder / f"{case}.npz")) for case in cases}
        return done[launch]
    return results


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def worst(kind: str, ours: dict, theirs: dict) -> float:
    names = [name for name in theirs if name.startswith(kind)]
    assert names and {name for name in ours if name.startswith(kind)} == set(names)
    return max(relative(ours[name], theirs[name]) for name in names)


def pairs(precision: str) -> list:
    return [pytest.param(launch, case, id=f"{launch}-{case}") for launch, (_, _, cases) in LAUNCHES.items()
            for case, settings in cases.items()
            if case not in MUTANTS and settings.get("precision", "fp32") == precision]


@pytest.mark.ranks
@pytest.mark.parametrize("launch, case", pairs("fp32"))
def test_layout_changes_nothing(launched, launch: str, case: str):
    ours, theirs = launched(launch)[case], launched("tp1-dp1")[reference_of(case)]
    assert np.max(np.abs(ours["losses"] / theirs["losses"] - 1)) < 1e-5
    assert abs(ours["norms"][0] / theirs["norms"][0] - 1) < 1e-5
    assert abs(ours["norms"][-1] / theirs["norms"][-1] - 1) < 1e-4
    assert worst("grad/", ours, theirs) < 1e-4
    assert worst("param/", ours, theirs) < 1e-4


@pytest.mark.ranks
@pytest.mark.parametrize("launch, case", pairs("bf16"))
def test_bf16_follows_fp32_at_every_layout(launched, launch: str, case: str):
    ours, theirs = launched(launch)[case], launched("tp1-dp1")["base"]
    assert np.max(np.abs(ours["losses"] / theirs["losses"] - 1)) < 1e-2
    assert abs(ours["norms"][0] / theirs["norms"][0] - 1) < 2e-2
    assert worst("grad/", ours, theirs) < 5e-2


@pytest.mark.ranks
@pytest.mark.parametrize("case, reference", [("no-sum", "base"), ("no-sum-qk", "qk")])
def test_parity_notices_a_missing_tp_gradient_sum(launched, case: str, reference: str):
    """The loss of the first steps would not: gradients have to be compared."""
    ours, theirs = launched("tp2-dp1")[case], launched("tp1-dp1")[reference]
    assert worst("grad/", ours, theirs) > 0.1
    assert abs(ours["losses"][0] / theirs["losses"][0] - 1) < 1e-5


@pytest.mark.ranks
def test_training_lowers_the_loss(launched):
    """Guards the comparisons above against a run in which nothing is learned."""
    losses = launched("tp1-dp1")["base"]["losses"]
    assert losses[-1] < losses[0] - 0.5
