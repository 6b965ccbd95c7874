"""Windows do not depend on the layout: every layer, head and step under the controller, at every TP, DP, sequence
parallelism, accumulation, recomputation and ZeRO stage.

One launch a number of ranks and TP size trains all its cases (tests/layouts_worker.py); the reference is one rank.
Ten layouts at most cover every pair of settings; LAYOUTS=full (make layouts) trains the whole product.
"""

import json
import os
from collections.abc import Iterable
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

import layouts_worker as worker
import numpy as np
import pytest
from ranks import REPOSITORY, run_ranks

from aah_dist.config.statistics import COLUMNS

LAYERS, HEADS = worker.BASE["model.num_layers"], worker.BASE["model.num_heads"]
STEPS, BATCH = worker.BASE["train.steps"], worker.BASE["train.global_batch_size"]
WARMUP, INTERVAL = worker.BASE["aah.warmup_steps"], worker.BASE["aah.interval"]
UPDATES = 1 + (STEPS - WARMUP) // INTERVAL
DECISIONS = 1 + UPDATES  # step 0 starts the maps
MARGIN_OVER_NOISE = 10


class Setup(NamedTuple):
    """accumulation: micro batches a step.  sp: sequence parallelism."""

    tp: int
    dp: int
    sp: bool
    accumulation: int
    recompute: bool
    zero: int

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    @property
    def name(self) -> str:
        return (f"tp{self.tp}-dp{self.dp}{'-sp' * self.sp}-acc{self.accumulation}{'-recompute' * self.recompute}"
                f"-zero{self.zero}")

    def case(self, head_blocks: int, mutant: str | None = None) -> dict:
        return {"zero": self.zero, "mutant": mutant, "overrides": {
            "aah.head_blocks": head_blocks, "parallel.sequence_parallel": self.sp, "train.recompute": self.recompute,
            "train.micro_batch_size": BATCH // self.dp // self.accumulation}}


EVERY = [s for s in map(Setup._make, product((1, 2, 4), (1, 2), (False, True), (1, 4), (False, True), (1, 2, 3)))
         if s.ranks <= 4 and (s.tp > 1 or not s.sp)]
REFERENCE = Setup(1, 1, False, 1, False, 1)
TP2 = Setup(2, 1, True, 4, False, 2)
CHOSEN = [
    REFERENCE, Setup(1, 1, False, 4, True, 3), Setup(1, 2, False, 4, False, 2), TP2,
    Setup(2, 2, False, 1, False, 3), Setup(2, 2, True, 1, True, 1),
    Setup(4, 1, True, 1, False, 3), Setup(4, 1, True, 1, True, 2), Setup(4, 1, False, 4, False, 1),
]
TRAINED = EVERY if os.environ.get("LAYOUTS") == "full" else CHOSEN
# head_blocks: the setups that are trained with it.
BY_BLOCKS = {4: TRAINED, 1: [s for s in TRAINED if s.tp <= 2] if TRAINED is EVERY else [REFERENCE, TP2]}
MUTANTS = {"no_dp_sum": Setup(2, 2, False, 1, False, 1), "every_rank_decides": Setup(1, 2, False, 1, False, 1)}
# A mutant that has once decided differently has been noticed.
MUTANT_STEPS = 11


def cases_of(ranks: int, tp: int) -> dict[str, dict]:
    """All that one launch trains."""
    here = {f"{s.name}-blocks{blocks}": s.case(blocks) for blocks, setups in BY_BLOCKS.items() for s in setups
            if (s.ranks, s.tp) == (ranks, tp)}
    for mutant, s in MUTANTS.items():
        if (s.ranks, s.tp) == (ranks, tp):
            here[mutant] = s.case(4, mutant)
            here[mutant]["overrides"]["train.steps"] = MUTANT_STEPS
    return here


@pytest.fixture(scope="module")
def launched(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory):
    """(ranks, tp) -> {case: [arrays of each rank]}; each launch runs at first use."""
    done: dict[tuple[int, int], dict] = {}

    def results(ranks: int, tp: int) -> dict[str, list[dict]]:
        if (ranks, tp) not in done:
            folder = tmp_path_factory.mktemp(f"layouts-{ranks}-{tp}")
            cases = cases_of(ranks, tp)
            job = {"tp": tp, "data": str(tiny_data), "out": str(folder), "cases": cases}
            (folder / "job.json").write_text(json.dumps(job))
            argv = [str(REPOSITORY / "tests" / "layouts_worker.py"), str(folder / "job.json")]
            for code, output in run_ranks(ranks, argv, folder, timeout=3600):
                assert code == 0, output[-4000:]
            done[ranks, tp] = {name: [dict(np.load(folder / f"{name}-{rank}.npz")) for rank in range(ranks)]
                               for name in cases}
        return done[ranks, tp]
    return results


@pytest.fixture(scope="module")
def trained(launched):
    """(setup, head_blocks) -> arrays of each rank."""
    return lambda s, blocks: launched(s.ranks, s.tp)[f"{s.name}-blocks{blocks}"]


def covered(setups: Iterable[Setup]) -> set[tuple]:
    """Pairs of settings that occur together: (field, value, field, value)."""
    return {(f, s[f], g, s[g]) for s in setups for f, g in combinations(range(len(Setup._fields)), 2)}


def test_layouts_cover_every_pair_of_settings():
    assert covered(CHOSEN) == covered(EVERY) and len(CHOSEN) <= 10 and set(CHOSEN) <= set(EVERY)
    assert len(covered(EVERY)) == 79 and len(EVERY) == 96


@pytest.mark.ranks
@pytest.mark.parametrize("blocks", BY_BLOCKS)
def test_windows_of_the_reference_differ_between_heads_and_over_time(trained, blocks: int):
    """Else it would be easy to agree on them."""
    [reference] = trained(REFERENCE, blocks)
    windows = reference["windows"]
    assert windows.shape == (STEPS + 1, LAYERS, HEADS)
    assert (windows[:WARMUP] == worker.BASE["model.seq_length"]).all()
    decided = windows[WARMUP:]
    distinct = [max(len(np.unique(step[layer])) for step in decided) for layer in range(LAYERS)]
    assert sum(count >= 2 for count in distinct) >= LAYERS / 2, distinct
    changes = [step + 1 for step in range(STEPS) if (windows[step + 1] != windows[step]).any()]
    assert len(changes) >= 4 and changes[0] == WARMUP, "the first decision and three changes of it"
    assert reference["losses"][-1] < reference["losses"][0] - 0.5


@pytest.mark.ranks
@pytest.mark.parametrize("setup, blocks", [pytest.param(s, blocks, id=f"{s.name}-blocks{blocks}")
                                           for blocks, setups in BY_BLOCKS.items() for s in setups])
def test_layout_changes_no_window(trained, setup: Setup, blocks: int):
    ours, [reference] = trained(setup, blocks), trained(REFERENCE, blocks)
    for rank in ours:
        assert np.array_equal(rank["windows"], reference["windows"])
    first = ours[0]
    assert np.array_equal(first["choices"], reference["choices"])
    assert np.max(np.abs(first["losses"] / reference["losses"] - 1)) < 1e-5
    # One all-reduce a measured step and one broadcast an update are all that passes between steps.
    calls = {name: int(first[f"calls/{name}"]) for name in worker.COLLECTIVES}
    assert calls == {**dict.fromkeys(worker.COLLECTIVES, 0), "all_reduce": DECISIONS, "broadcast": UPDATES}
    assert first["reductions"] == DECISIONS == len(first["features"])
    assert first["bytes"] == DECISIONS * LAYERS * HEADS * len(COLUMNS) * 8


@pytest.mark.ranks
@pytest.mark.parametrize("blocks", BY_BLOCKS)
def test_decisions_are_far_from_turning(trained, blocks: int):
    """Equal windows are no accident: what layouts do to the features is small against what would turn a decision."""
    [reference] = trained(REFERENCE, blocks)
    noise = {s.name: float(np.abs(trained(s, blocks)[0]["features"] - reference["features"]).max())
             for s in BY_BLOCKS[blocks] if s != REFERENCE}
    worst, smallest = max(noise.values()), float(reference["margins"].min())
    figures = f"head_blocks {blocks}: smallest margin {smallest:.2e}, largest difference of a feature {worst:.2e}"
    print(figures)
    assert smallest >= MARGIN_OVER_NOISE * worst, f"{figures}, by layout: {noise}"
    assert worst > 0, "layouts sum in another order"


@pytest.mark.ranks
@pytest.mark.parametrize("mutant", MUTANTS)
def test_windows_notice_statistics_that_are_not_summed(launched, trained, mutant: str):
    """The comparison above, of runs that miss the sum over DP, must fail."""
    setup = MUTANTS[mutant]
    ours, [reference] = launched(setup.ranks, setup.tp)[mutant], trained(REFERENCE, 4)
    expected = reference["windows"][: MUTANT_STEPS + 1]
    different = [not np.array_equal(rank["windows"], expected) for rank in ours]
    assert any(different)
    apart = any(not np.array_equal(rank["windows"], ours[0]["windows"]) for rank in ours)
    assert apart == (mutant == "every_rank_decides"), "a broadcast makes one rank's mistake everybody's"
