"""Every way to start the job that the README names, and signals through the demo's launcher."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import REPOSITORY, environment

PRETRAIN = str(REPOSITORY / "aah_dist" / "pretrain.py")
BIN = Path(sys.executable).parent
OPTIONS = ["--ds_config", "ds_configs/zero2_fp32.json", "--data.text", "null", "--data.tokenizer", "null",
           "--model.num_layers", "2", "--model.hidden_size", "48", "--model.num_heads", "4", "--model.seq_length", "40",
           "--train.micro_batch_size", "1", "--train.global_batch_size", "4", "--train.warmup_steps", "0",
           "--log.interval", "1", "--train.eval_samples", "4"]
LAUNCHERS = {
    "python": [sys.executable],
    "deepspeed": [str(BIN / "deepspeed"), "--num_accelerators", "2", "--master_port", "{port}"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "{port}"],
    "mpiexec": [str(BIN / "mpiexec"), "-n", "2", sys.executable],
}


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.fixture(scope="module")
def runs(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """launcher -> (the run's folder, what was printed)."""
    from aah_dist.parallel.launch import free_port

    base = tmp_path_factory.mktemp("launchers")
    found = {}
    for name, launcher in LAUNCHERS.items():
        argv = [part.format(port=free_port()) for part in launcher]
        argv += [PRETRAIN, *OPTIONS, "--train.steps", "3", "--data.path", str(tiny_data)]
        argv += ["--output_dir", str(base / name)]
        done = subprocess.run(argv, cwd=base, env=environment(), capture_output=True, text=True, timeout=300,
                              check=False)
        assert done.returncode == 0, f"{name}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        found[name] = (base / name, done.stdout)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_starts_the_same_job(runs, launcher: str):
    folder, printed = runs[launcher]
    assert losses(folder) == pytest.approx(losses(runs["python"][0]), rel=1e-5)
    assert printed.count("step 3/3") == 1, "one rank prints"
    assert ("2 ranks = TP 2 x DP 1" in printed) == (launcher != "python")


def evaluate(folder: Path, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(REPOSITORY / "aah_dist" / "evaluate.py"), "--checkpoint", str(folder),
                           "--samples", "4", "--json", *options], env=environment(), capture_output=True, text=True,
                          timeout=120, check=False)


@pytest.mark.ranks
def test_evaluation_reads_a_tp2_checkpoint_with_one_process(runs):
    folder, _ = runs["torchrun"]
    done = evaluate(folder)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert result["val_loss"] == pytest.approx(last["val/loss"], rel=1e-6)
    assert result["ACR"] == last["aah/ACR"] and result["checkpoint_step"] == 3


@pytest.mark.ranks
def test_evaluation_by_another_backend_than_the_runs(runs):
    """A run trained by a GPU's backend can be scored where there is none."""
    folder, _ = runs["python"]
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    done = evaluate(folder, "--backend", "dense")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["val_loss"] == pytest.approx(last["val/loss"], rel=1e-3)
    refused = evaluate(folder, "--backend", "flash", "--device", "cpu")
    assert refused.returncode == 2 and refused.stderr.strip().splitlines()[-1] == (
        "error: --backend is flash, but the flash backend runs on cuda, not on cpu; use --backend native.")


@pytest.mark.ranks
def test_the_demo_passes_a_signal_to_its_ranks_and_goes_on_afterwards(tiny_data: Path, tmp_path: Path):
    argv = [sys.executable, "-m", "aah_dist.demo", *OPTIONS, "--train.steps", "100000", "--data.path", str(tiny_data),
            "--output_dir", str(tmp_path / "run"), "--train.eval_interval", "0"]
    log = open(tmp_path / "log", "w")
    job = subprocess.Popen(argv, cwd=REPOSITORY, env=environment(), stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while "step      3/" not in (tmp_path / "log").read_text() and time.monotonic() < deadline:
            time.sleep(0.2)
        job.send_signal(signal.SIGINT)
        assert job.wait(timeout=90) == 75, (tmp_path / "log").read_text()[-3000:]
    finally:
        job.kill()
    printed = (tmp_path / "log").read_text()
    assert "stopped by SIGINT after step" in printed and "Traceback" not in printed
    assert len(list((tmp_path / "run" / "checkpoints").glob("step_*/manifest.json"))) == 1
