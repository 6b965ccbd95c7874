"""Windows read from a file, and the controls matched to them."""

import json
from pathlib import Path

import numpy as np
import pytest
from refusals import error_of

from aah_dist.config.load import load_config
from aah_dist.config.pairs import pairs, tokens
from aah_dist.config.plans import random_heads_matched, read_plan, uniform_matched
from aah_dist.config.windows import policy_from_config

LAYERS, HEADS, LENGTH = 2, 3, 40
RECORDS = [{"step": 0, "windows": [[40, 40, 40], [40, 40, 40]]},
           {"step": 7, "windows": [[1, 2, 3], [4, 5, 6]]},
           {"step": 9, "windows": [[9, 9, 9], [8, 8, 8]]}]
REDRAWN = {"step": 12, "ablation": "shuffle", "seed": 3, "raw": [[9, 9, 9], [8, 8, 8]]}


def record_file(folder: Path, *records: dict) -> str:
    path = folder / "policy.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def plan_file(folder: Path, text: str, name: str = "plan.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize("step, record", [(None, 2), (0, 0), (6, 0), (7, 1), (8, 1), (9, 2), (10**9, 2)])
def test_a_record_gives_what_was_in_force(tmp_path, step, record):
    plan = read_plan(record_file(tmp_path, *RECORDS), step, LAYERS, HEADS, LENGTH)
    assert plan.dtype == np.int64 and plan.tolist() == RECORDS[record]["windows"]


def test_a_record_of_redraws_still_has_its_earlier_windows(tmp_path):
    path = record_file(tmp_path, *RECORDS, REDRAWN)
    assert read_plan(path, 11, LAYERS, HEADS, LENGTH).tolist() == RECORDS[2]["windows"]
    for step in (None, 12, 20):
        text = error_of(read_plan, path, step, LAYERS, HEADS, LENGTH)
        assert "no windows at step 12" in text and "shuffle" in text and "plan_step" in text


@pytest.mark.parametrize("name, text", [
    ("plan.yaml", "windows: [[1, 0.25, 1.0], [40, 20.0, 0.0125]]"),
    ("plan.yml", "windows:\n- [1, 0.25, 1.0]\n- [40, 20.0, 0.0125]\n"),
    ("plan.json", '{\n\t"windows": [[1, 0.25, 1.0], [40, 20.0, 0.0125]]\n}'),
])
def test_a_list_holds_token_counts_and_fractions(tmp_path, name, text):
    plan = read_plan(plan_file(tmp_path, text, name), None, LAYERS, HEADS, LENGTH)
    assert plan.dtype == np.int64 and plan.tolist() == [[1, 10, 40], [40, 20, 1]]


def test_a_relative_path_starts_at_the_working_directory(tmp_path, monkeypatch):
    record_file(tmp_path, *RECORDS)
    monkeypatch.chdir(tmp_path)
    assert read_plan("policy.jsonl", 7, LAYERS, HEADS, LENGTH)[0, 0] == 1


@pytest.mark.parametrize("text, parts", [
    ("", ["is empty"]),
    ("  \n", ["is empty"]),
    ("windows: [[1, 2, 3]]", ["1 layers", "2 (model.num_layers)"]),
    ("windows: [[1, 2, 3], [1, 2]]", ["2 windows in layer 1", "3 heads (model.num_heads)"]),
    ("windows: [[1, 2, 3, 4], [1, 2, 3]]", ["4 windows in layer 0"]),
    ("windows: [[1, 2, 41], [1, 2, 3]]", ["window 41 is above model.seq_length 40"]),
    ("windows: [[1, 2, 0], [1, 2, 3]]", ["window 0 is 0 tokens", "at least 1"]),
    ("windows: [[1, 2, -4], [1, 2, 3]]", ["window -4"]),
    ("windows: [[1, 2, 2.5], [1, 2, 3]]", ["window 2.5 is neither"]),
    ("windows: [[1, 2, .nan], [1, 2, 3]]", ["window nan is neither"]),
    ("windows: [[1, 2, .inf], [1, 2, 3]]", ["window inf is neither"]),
    ("windows: [[1, 2, -.inf], [1, 2, 3]]", ["window -inf is neither"]),
    ("windows: [[1, 2, true], [1, 2, 3]]", ["window True is neither"]),
    ("windows: [[1, 2, wide], [1, 2, 3]]", ["window wide is neither"]),
    ("windows: [[1, 2, [3]], [1, 2, 3]]", ["window [3] is neither"]),
    (f"windows: [[1, 2, 1{'0' * 400}], [1, 2, 3]]", ["is above model.seq_length 40"]),
    ("windows: [1, 2]", ["one list per layer"]),
    ("windows: 3", ["one list per layer"]),
    ("windows:", ["one list per layer"]),
    ("- [1, 2, 3]", ["no entry windows"]),
    ("window: [[1]]", ["no entry windows"]),
    ("{", ["not valid JSON or YAML"]),
    ("windows: !!python/object/apply:os.getcwd []", ["not valid JSON or YAML"]),
])
def test_a_list_that_cannot_be_a_plan(tmp_path, text, parts):
    path = plan_file(tmp_path, text)
    found = error_of(read_plan, path, None, LAYERS, HEADS, LENGTH)
    for part in [path, *parts]:
        assert part in found


@pytest.mark.parametrize("text, step, parts", [
    ("\n", None, ["is empty"]),
    ('{"step": 0, "windows": [[1, 2, 3], [1, 2, 3]]}\n{"step": 1, "win', None, ["line 2 is not a record"]),
    ('{"windows": [[1, 2, 3], [1, 2, 3]]}', None, ["line 1 is not a record"]),
    ("[]", None, ["line 1 is not a record"]),
    (json.dumps(RECORDS[1]), 6, ["aah.plan_step 6 is before", "at least 7"]),
    ('{"step": 0}', None, ["no windows at step 0"]),
    ('{"step": 0, "windows": [[64, 64, 64], [64, 64, 64]]}', None, ["window 64 is above model.seq_length 40"]),
    ('{"step": 0, "windows": [[1, 2, 3]]}', None, ["1 layers"]),
])
def test_a_record_that_cannot_be_a_plan(tmp_path, text, step, parts):
    found = error_of(read_plan, plan_file(tmp_path, text, "policy.jsonl"), step, LAYERS, HEADS, LENGTH)
    for part in ["policy.jsonl", *parts]:
        assert part in found


def test_files_that_cannot_be_read(tmp_path):
    missing = error_of(read_plan, "runs/none/policy.jsonl", None, LAYERS, HEADS, LENGTH)
    assert "runs/none/policy.jsonl does not exist" in missing and str(Path.cwd()) in missing
    folder = error_of(read_plan, str(tmp_path), None, LAYERS, HEADS, LENGTH)
    assert "is a folder" in folder and f"{tmp_path}/policy.jsonl" in folder
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not a text file" in error_of(read_plan, str(tmp_path / "a.yaml"), None, LAYERS, HEADS, LENGTH)
    assert "plan_step 3 needs a policy.jsonl" in error_of(
        read_plan, plan_file(tmp_path, "windows: [[1]]"), 3, LAYERS, HEADS, LENGTH)


@pytest.mark.parametrize("length", [1, 2, 37, 512])
def test_uniform_matched_comes_as_near_as_one_window_can(length):
    draw = np.random.default_rng(length)
    for shape in ((1, 1), (3, 5), (4, 12)):
        plan = draw.integers(1, length + 1, shape)
        matched = uniform_matched(plan, length)
        assert matched.shape == shape and matched.dtype == np.int64 and len(set(matched.flat)) == 1
        window, total = int(matched[0, 0]), sum(pairs(w, length) for w in plan.flat)
        gaps = [abs(pairs(w, length) * plan.size - total) for w in range(1, length + 1)]
        assert gaps[window - 1] == min(gaps) and gaps.index(min(gaps)) == window - 1
        # Half of what the next window, or the one before, would change.
        near = [w for w in (window - 1, window + 1) if 1 <= w <= length]
        steps = [abs(pairs(w, length) - pairs(window, length)) * plan.size for w in near]
        assert 2 * gaps[window - 1] <= max(steps, default=0)


def test_uniform_matched_matches_pairs_and_not_the_mean_of_windows():
    plan = np.array([[512] * 6 + [4096] * 6])
    assert uniform_matched(np.full((2, 3), 17), 64).tolist() == [[17] * 3] * 2
    assert plan.mean() == 2304 and uniform_matched(plan, 4096)[0, 0] == 1562


def test_uniform_matched_does_not_overflow():
    plan = np.full((128, 128), 2**20)
    assert uniform_matched(plan, 2**20)[0, 0] == 2**20


def test_random_heads_keep_each_layers_windows_and_follow_the_seed():
    plan = np.stack([np.arange(1, 33), np.arange(1, 33), np.arange(33, 65)])
    matched = random_heads_matched(plan, 5)
    assert matched.dtype == np.int64 and (np.sort(matched) == plan).all() and (matched != plan).any(1).all()
    assert (matched[0] != matched[1]).any(), "layers are permuted independently"
    assert (random_heads_matched(plan, 5) == matched).all() and (random_heads_matched(plan, 6) != matched).any()
    assert (random_heads_matched(plan[:1], 5) == matched[:1]).all(), "a layer's order depends on seed and layer alone"
    assert (plan[2] == np.arange(33, 65)).all(), "the plan itself is left alone"


@pytest.mark.parametrize("regime", ["frozen_policy", "uniform_matched", "random_heads_matched"])
def test_the_regimes_read_the_plan(tmp_path, regime):
    draw = np.random.default_rng(0).integers(1, 513, (3, 8))
    path = record_file(tmp_path, {"step": 0, "windows": draw.tolist()}, {"step": 4, "windows": [[1] * 8] * 3})
    config = load_config("demo", regime, {"aah.plan": path, "aah.plan_step": 3, "model.num_layers": 3,
                                          "model.num_heads": 8, "model.seq_length": 512, "train.seed": 11})
    expected = {"frozen_policy": draw, "uniform_matched": uniform_matched(draw, 512),
                "random_heads_matched": random_heads_matched(draw, 11)}[regime]
    policy = policy_from_config(config)
    assert policy.dtype == np.int64 and (policy == expected).all()


@pytest.mark.parametrize("window, count", [(0.5, 6), (1, 1), (1.0, 11), (11, 11), (7.0, 7), (0.1, 1), (0.0455, 1)])
def test_tokens(window, count):
    assert tokens(window, 11, "w") == count
