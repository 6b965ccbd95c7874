"""A NaN or Inf anywhere ends the run before the update."""

from pathlib import Path

import pytest
from ranks import REPOSITORY, run_ranks
from small_runs import command_line, records

from aah_dist.training.checkpoint import newest_complete

CASES = ["zero0-fp32", "zero1-fp32", "zero1-bf16", "zero2-fp32", "zero2-bf16", "zero3-fp32", "zero3-bf16"]


@pytest.mark.ranks
@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("case", CASES)
def test_every_rank_stops_and_names_step_rank_and_rows(resilience: list[dict], case: str, what: str) -> None:
    for report in resilience:
        found = report[f"non-finite {case}"][what]
        named = "the loss" if what == "loss" else "a gradient"
        assert found["problem"].startswith(f"step 3: {named} of rank 1 is NaN or Inf (training rows {found['rows']})")
        assert found["same"], "parameters moved"


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_what_only_the_norm_shows_stops_the_run_too(resilience: list[dict], case: str) -> None:
    for report in resilience:
        found = report[f"non-finite {case}"]["unwatched"]
        assert found["problem"].startswith("step 3: ") and "their norm is inf" in found["problem"]
        assert found["same"], "parameters moved"


@pytest.mark.ranks
def test_job_ends_with_one_sentence_and_code_1(tiny_data: Path, tmp_path: Path) -> None:
    options = command_line(tiny_data, tmp_path / "run", checkpoint__interval=1)
    worker = str(REPOSITORY / "tests" / "entry_worker.py")
    outputs = run_ranks(2, [worker, *options], tmp_path, FAULT="nan", FAULT_RANK="1")
    assert [code for code, _ in outputs] == [1, 1], outputs
    assert outputs[0][1].splitlines()[-1].startswith("error: step 2: the loss of rank 1 is NaN or Inf")
    assert outputs[1][1] == "" and "Traceback" not in outputs[0][1]
    assert newest_complete(tmp_path / "run" / "checkpoints")[0].step == 1
    assert records(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 1
