"""slurm/train_1b.sh with srun and scontrol replaced by recorders: arguments, tasks, signals, requeue."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SCRIPT = REPOSITORY / "slurm/train_1b.sh"
RECORDED = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]

# srun: records its arguments, starts the tasks of all nodes, passes USR1 on to them, and ends with the highest code.
SRUN = """
import json, os, signal, subprocess, sys
options = [a for a in sys.argv[1:sys.argv.index("bash")]]
json.dump(sys.argv[1:], open(os.environ["RECORDS"] + "/srun.json", "w"))
value = {o.partition("=")[0]: o.partition("=")[2] for o in options}
total, per_node = int(value["--ntasks"]), int(value["--ntasks-per-node"])
tasks = []
signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
for rank in range(total):
    environment = {**os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % per_node),
                   "SLURM_NTASKS": str(total)}
    tasks.append(subprocess.Popen(sys.argv[len(options) + 1:], env=environment))
open(os.environ["RECORDS"] + "/srun.ready", "w").close()
sys.exit(max(task.wait() for task in tasks))
"""

# The rank's python: records its environment, waits for USR1 where asked to, ends with the code asked for.
RANK = f"""
import json, os, signal, sys, time
RECORDED = {RECORDED!r}
""" + """
def record(name):
    json.dump({"argv": sys.argv[1:], "cwd": os.getcwd(), **{k: os.environ.get(k) for k in RECORDED}},
              open(os.environ["RECORDS"] + "/" + name + os.environ["RANK"] + ".json", "w"))
got = []
signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
record("rank")
deadline = time.monotonic() + 60
while os.environ.get("WAIT_FOR_SIGNAL") and not got and time.monotonic() < deadline:
    time.sleep(0.01)
if got:
    time.sleep(0.3)
    record("saved")
sys.exit(int(os.environ.get("CODE_" + os.environ["RANK"], os.environ.get("CODE", "0"))))
"""

SCONTROL = """
import os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    prefix, _, span = sys.argv[3].rstrip("]").partition("[")
    first, _, last = span.partition("-")
    print("\\n".join(f"{prefix}{i}" for i in range(int(first), int(last) + 1)))
elif sys.argv[1] == "requeue":
    open(os.environ["RECORDS"] + "/requeue", "a").write(" ".join(sys.argv[2:]) + "\\n")
    sys.exit(int(os.environ.get("REQUEUE_CODE", "0")))
"""


@pytest.fixture
def job(tmp_path):
    """Starts the script as a job of 2 nodes x 3 GPUs; keyword arguments change the environment (None removes)."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, code in {"srun": SRUN, "scontrol": SCONTROL, "rank": RANK}.items():
        (tools / name).write_text(f"#!{sys.executable}\n{code}")
        (tools / name).chmod(0o755)
    folder = tmp_path / "repository"
    (folder / "aah_dist").mkdir(parents=True)
    (folder / "aah_dist/pretrain.py").touch()
    spooled = tmp_path / "slurm_script"
    shutil.copy(SCRIPT, spooled)
    started = []

    def start(*arguments, **environment):
        full = {"PATH": f"{tools}:{os.environ['PATH']}", "RECORDS": str(tmp_path), "PYTHON": str(tools / "rank"),
                "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node[7-8]",
                "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "3", "SLURM_CPUS_PER_TASK": "4", **environment}
        process = subprocess.Popen(["bash", str(spooled), *arguments], cwd=tmp_path, text=True,
                                   env={k: v for k, v in full.items() if v is not None},
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started.append(process)
        return process

    start.records = tmp_path
    start.folder = folder
    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ended(process):
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def ranks(job, name="rank"):
    return [json.loads(path.read_text()) for path in sorted(job.records.glob(f"{name}*.json"))]


def requeued(job):
    path = job.records / "requeue"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def wait_until_ranks_run(job, count):
    deadline = time.monotonic() + 60
    while not ((job.records / "srun.ready").exists() and len(list(job.records.glob("rank*.json"))) == count):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.2)


def test_shellcheck():
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    assert shellcheck, "shellcheck is not installed: pip install -e '.[dev]'"
    result = subprocess.run([shellcheck, "--severity=style", str(SCRIPT)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_one_task_a_gpu_with_its_environment(job):
    code, _, err = ended(job("--train.steps", "20", "--data.path", "two words"))
    assert (code, err) == (0, "")
    arguments = json.loads((job.records / "srun.json").read_text())
    assert arguments[:arguments.index("bash")] == [
        "--nodes=2", "--ntasks=6", "--ntasks-per-node=3", "--kill-on-bad-exit=0", "--wait=60", "--cpus-per-task=4"]
    found = ranks(job)
    assert [(r["RANK"], r["LOCAL_RANK"], r["WORLD_SIZE"]) for r in found] == [
        (str(rank), str(rank % 3), "6") for rank in range(6)]
    for rank in found:
        assert rank["MASTER_ADDR"] == "node7" and rank["MASTER_PORT"] == str(20000 + 123456 % 20000)
        assert rank["OMP_NUM_THREADS"] == "4" and rank["cwd"] == str(job.folder)
        assert rank["argv"] == ["-u", "aah_dist/pretrain.py", "--preset", "1b_4096", "--output_dir",
                                "runs/1b_4096-123456", "--train.global_batch_size", "6", "--train.steps", "20",
                                "--data.path", "two words"]
    assert requeued(job) == []


@pytest.mark.parametrize("nodes, hosts, gpus, tasks", [("1", "a[3-3]", "1", 1), ("3", "a[0-2]", "2", 6)])
def test_any_number_of_nodes_and_gpus(job, nodes, hosts, gpus, tasks):
    code, _, _ = ended(job(SLURM_JOB_NUM_NODES=nodes, SLURM_JOB_NODELIST=hosts, SLURM_GPUS_ON_NODE=gpus,
                           SLURM_CPUS_PER_TASK=None))
    assert code == 0 and len(ranks(job)) == tasks
    assert ranks(job)[0]["MASTER_ADDR"] == "a" + hosts[2] and ranks(job)[0]["OMP_NUM_THREADS"] == "1"
    assert not any("cpus-per-task" in a for a in json.loads((job.records / "srun.json").read_text()))


def test_gpus_of_a_named_type(job):
    assert ended(job(SLURM_GPUS_ON_NODE=None, SLURM_GPUS_PER_NODE="h100:2"))[0] == 0
    assert len(ranks(job)) == 4


def test_two_jobs_get_two_ports(job):
    ended(job(SLURM_JOB_ID="20001"))
    first = ranks(job)[0]["MASTER_PORT"]
    ended(job(SLURM_JOB_ID="20002"))
    assert (first, ranks(job)[0]["MASTER_PORT"]) == ("20001", "20002")


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_the_batch_shell_reaches_every_rank_and_75_requeues(job, number):
    process = job(WAIT_FOR_SIGNAL="1", CODE="75")
    wait_until_ranks_run(job, 6)
    process.send_signal(number)
    code, out, _ = ended(process)
    assert len(ranks(job, "saved")) == 6, "the script must wait until the ranks have saved"
    assert code == 0 and requeued(job) == ["123456"] and "requeueing job 123456" in out


def test_repeated_signals_do_not_lose_the_exit_code(job):
    process = job(WAIT_FOR_SIGNAL="1", CODE="75")
    wait_until_ranks_run(job, 6)
    for _ in range(3):
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
    code, _, _ = ended(process)
    assert code == 0 and requeued(job) == ["123456"]


def test_a_failure_after_a_signal_is_passed_on(job):
    process = job(WAIT_FOR_SIGNAL="1", CODE="9")
    wait_until_ranks_run(job, 6)
    process.send_signal(signal.SIGUSR1)
    assert ended(process)[0] == 9 and requeued(job) == []


@pytest.mark.parametrize("environment, code", [({"CODE": "1"}, 1), ({"CODE": "2"}, 2), ({"CODE_4": "137"}, 137),
                                               ({"CODE": "75", "CODE_0": "76"}, 76)])
def test_other_failures_are_passed_on(job, environment, code):
    assert ended(job(**environment))[0] == code
    assert requeued(job) == []


def test_a_requeue_that_fails_is_said(job):
    code, _, err = ended(job(CODE="75", REQUEUE_CODE="1"))
    assert code == 75 and requeued(job) == ["123456"]
    assert "could not be requeued" in err and "--output_dir runs/1b_4096-123456" in err


@pytest.mark.parametrize("environment, message", [
    ({"SLURM_GPUS_ON_NODE": None}, "the job has no GPUs"),
    ({"SLURM_GPUS_ON_NODE": "0"}, "the job has no GPUs"),
    ({"SLURM_SUBMIT_DIR": "/"}, "run sbatch from the repository's folder"),
    ({"SLURM_SUBMIT_DIR": None}, "start this script with sbatch"),
])
def test_jobs_that_cannot_start_say_why(job, environment, message):
    code, _, err = ended(job(**environment))
    assert code != 0 and message in err and not (job.records / "srun.json").exists()


def test_the_directives():
    lines = [line for line in SCRIPT.read_text().split("\n") if line.startswith("#SBATCH")]
    assert "#SBATCH --signal=B:USR1@120" in lines and "#SBATCH --requeue" in lines
    assert "29500" not in SCRIPT.read_text()
