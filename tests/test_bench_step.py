"""The step benchmark: its frozen plans are what they say, every variant runs under its own windows, and the table holds
medians of ratios."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from ranks import REPOSITORY

from aah_dist.bench.step import table
from aah_dist.bench.step_run import HEADS, INTERVAL, LAYERS, PLANS, REGIMES, VARIANTS, plan_windows
from aah_dist.config.load import load_config
from aah_dist.config.pairs import acr, exact_pair_ratio
from aah_dist.config.windows import policy_from_config

PAPER_ACR = {"full_adaptive": 0.3066, "shallow_freeze": 0.3724, "deep_practical_reuse": 0.2891, "grouping_off": 0.5814}
TINY = ["--quick", "--lengths", "40", "--hidden", "48"]
# Runs the timed part and prints, after each record, the windows that attention was given meanwhile.
RECORDER = """
import json, sys
from aah_dist.bench import step
from aah_dist.model import core_attention
given, run = [], core_attention.window_attention

def record(q, k, v, windows, **named):
    given.append(windows.tolist())
    return run(q, k, v, windows, **named)

core_attention.window_attention = record
args = step.parse()
for found in step.Run(args, args.lengths[0]).records(args.rounds):
    print(json.dumps(found | {"given": given}))
    given.clear()
"""


@pytest.mark.parametrize("length", [4096, 16384])
@pytest.mark.parametrize("regime", REGIMES)
def test_the_plans_have_the_papers_acr(regime, length):
    config = load_config("1b_4096", "frozen_policy", {"aah.plan": str(PLANS / f"{regime}.yaml"),
                                                      "model.seq_length": length, "model.max_positions": length,
                                                      "aah.windows": [0.125, 0.25, 0.5, 1.0]})
    plan = policy_from_config(config)
    assert plan.shape == (LAYERS, HEADS) and np.isin(plan * 8 // length, [1, 2, 4, 8]).all()
    assert round(acr(plan, length), 4) == PAPER_ACR[regime]
    for layers in (1, 2, 4, 8):
        first = plan_windows(regime, layers, length)
        assert (first == plan[:layers]).all()
        assert abs(acr(first, length) - PAPER_ACR[regime]) < 0.01
        # The work, too, is that of the whole plan.
        assert abs(exact_pair_ratio(first, length) - exact_pair_ratio(plan, length)) < 0.02
    assert min(len(set(layer)) for layer in plan.tolist()) > 1, "a layer without unequal heads"
    assert len({tuple(np.sort(layer)) for layer in plan}) > LAYERS // 2, "layers differ"


def test_the_table_holds_medians_of_ratios():
    """Full attention 4, 6, 8 s; the variant half of that but for one round; one round reads the parts alone."""
    shape = {"layers": 2, "vocabulary": 100, "parameters": 12345, "pairs": 0.5, "evaluation": 1.0}
    records = []
    for number, (full, half) in enumerate([(4.0, 2.0), (6.0, 6.0), (8.0, 4.0)], start=1):
        unread = {"attention": None, "optimizer": None, "control": None, "evaluation_attention": None,
                  "kind": "timed", "round": number}
        records.append(shape | unread | {"variant": "full_attention", "acr": 1.0, "flops": 30.0, "training": full})
        records.append(shape | unread | {"variant": "plan:full_adaptive", "acr": 0.25, "flops": 20.0, "training": half})
    parts = {"kind": "parts", "round": 4, "training": 10.0, "attention": 2.5, "optimizer": 1.0, "control": 0.0,
             "evaluation_attention": 0.5}
    records += [records[0] | parts, records[1] | parts | {"attention": 0.5, "control": 0.01}]
    warm = records[1] | {"kind": "warm-up", "round": 0, "training": 99.0}
    text = table(4096, [warm, *records], {"full_attention": 200.0, "plan:full_adaptive": 210.0})
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    assert "12,345 parameters" in text and "682.7 tokens/s" in text  # 4096 / 6
    assert rows["full_attention"] == ["1.0000", "0.5000", "1.000", "1.000", "(1.00-1.00)", "1.000", "(1.00-1.00)",
                                      "1.000", "25.0%", "50.0%", "10.0%", "0.00%"]
    assert rows["plan:full_adaptive"] == ["0.2500", "0.5000", "1.500", "2.000", "(1.00-2.00)", "1.000", "(1.00-1.00)",
                                          "1.050", "5.0%", "50.0%", "10.0%", "0.10%"]
    assert rows["to"][-3:] == ["1.10", "1.08", "1.02"]
    assert "to reach" not in table(512, records, {}) and table(512, records, {}).count(" - ") == 2


def run(command: list[str]) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=600)


def test_every_variant_runs_under_its_own_windows():
    """Six rounds: after the step of the fifth the live regimes decide again."""
    rounds = INTERVAL + 1
    made = run(["-c", RECORDER, *TINY, "--rounds", str(rounds), "--dropout", "0.1"])
    assert made.returncode == 0, made.stderr[-3000:]
    records = [json.loads(line) for line in made.stdout.splitlines() if line.startswith('{"variant"')]
    assert [(r["round"], r["variant"]) for r in records] == [(n, v) for n in range(1, rounds + 1) for v in VARIANTS]
    windows = {}
    for record in records:
        # Two layers each for the evaluation and for the step; before the first record comes the first step.
        *first, a, b, c, d = record["given"]
        assert len(first) == (2 if record is records[0] else 0) and [a, b] == [c, d]
        assert np.isclose(acr([a, b], 40), record["acr"]) and np.isclose(exact_pair_ratio([a, b], 40), record["pairs"])
        windows[record["round"], record["variant"]] = [a, b]
        assert 0 < record["attention"] < record["training"] and 0 < record["optimizer"] < record["training"]
        assert 0 < record["evaluation_attention"] < record["evaluation"]
        assert (record["control"] > 0) == record["variant"].startswith("live:")
        assert (record["flops"] == records[0]["flops"]) == (record["acr"] == 1)
    for number in range(1, rounds + 1):
        assert windows[number, "full_attention"] == [[40] * HEADS] * 2
        for regime in REGIMES:
            assert windows[number, f"plan:{regime}"] == plan_windows(regime, 2, 40).tolist()
            live = windows[number, f"live:{regime}"]
            assert np.isin(live, [5, 10, 20, 40]).all() and (np.array(live) < 40).any()
            if number <= INTERVAL:
                assert live == windows[1, f"live:{regime}"]
    assert len({str(windows[1, f"live:{regime}"]) for regime in REGIMES}) > 1
    assert any(windows[rounds, variant] != windows[1, variant] for variant in VARIANTS), "no second decision"


def test_the_command_prints_its_table():
    made = run(["-m", "aah_dist.bench.step", *TINY, "--variants", "plan:grouping_off"])
    assert made.returncode == 0, made.stderr[-3000:]
    rows = {line.split()[0]: line.split()[1:] for line in made.stdout.splitlines() if line}
    assert {"commit", "versions", "hardware", "method", "load"} <= set(rows) and "attention backend: " in made.stdout
    assert {name for name in rows if name in VARIANTS} == {"full_attention", "plan:grouping_off"}
    assert rows["full_attention"][3:8] == ["1.000", "(1.00-1.00)"] * 2 + ["1.000"]
    plan = plan_windows("grouping_off", 2, 40)
    assert rows["plan:grouping_off"][:2] == [f"{acr(plan, 40):.4f}", f"{exact_pair_ratio(plan, 40):.4f}"]
    assert float(rows["plan:grouping_off"][7]) == pytest.approx(1, abs=0.3)  # memory; most of it is not attention's


@pytest.mark.parametrize("arguments, said", [
    (["--hidden", "50"], "50 is not a multiple of model.num_heads 12"),
    (["--layers", "17"], "--layers 17 is above 16"),
    (["--lengths", "2"], "aah.windows 0.125 is 0 tokens"),
    (["--rounds", "0"], "0 is not a whole number"),
    (["--variants", "plan:all"], "invalid choice: 'plan:all'"),
])
def test_sizes_that_do_not_fit_are_refused_before_anything_runs(arguments, said):
    made = run(["-m", "aah_dist.bench.step", *TINY, *arguments])
    assert made.returncode == 2 and said in made.stderr.splitlines()[-1] and not made.stdout
