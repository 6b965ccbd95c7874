"""Start the demo with the ranks this machine can carry, and report the finished run: `make demo`.

Runs the deepspeed launcher in a process group of its own and passes SIGINT, SIGTERM and SIGUSR1 on to the ranks, so
that they save a checkpoint and leave together; the launcher by itself would leave them behind.  Extra arguments go to
pretrain.py.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from aah_dist.config.parser import last_value
from aah_dist.parallel.launch import free_port

CPU_RANKS = 4
REPOSITORY = Path(__file__).resolve().parents[1]


def command(extra: list[str]) -> tuple[list[str], dict[str, str]]:
    """The launcher's command line, and what to set in its environment."""
    from aah_dist.parallel.device import has_gpu

    deepspeed = str(Path(sys.executable).parent / "deepspeed")
    launcher = [deepspeed, "--log_level", "critical", "--master_port", str(free_port())]
    job = [str(REPOSITORY / "aah_dist" / "pretrain.py"), "--ds_config", "ds_configs/zero2.json", *extra]
    quiet = {"PYTHONWARNINGS": "ignore"}
    if has_gpu():
        return launcher + job, quiet
    return [*launcher, "--num_accelerators", str(CPU_RANKS), *job], {**quiet, "DS_ACCELERATOR": "cpu"}


def ranks_of(launcher: int) -> list[psutil.Process]:
    """The job's ranks: the launcher gives each the argument --local_rank=N."""
    found = []
    for process in psutil.Process(launcher).children(recursive=True):
        try:
            if any(argument.startswith("--local_rank=") for argument in process.cmdline()):
                found.append(process)
        except psutil.Error:  # it ended in the meantime
            continue
    return found


def run(argv: list[str], environment: dict[str, str]) -> int:
    """The command's exit code; signals to this process reach the command's ranks."""
    launcher = subprocess.Popen(argv, env={**os.environ, **environment}, start_new_session=True)

    def forward(number: int, frame: object) -> None:
        ranks = ranks_of(launcher.pid)
        for rank in ranks:
            rank.send_signal(number)
        if not ranks:
            os.killpg(launcher.pid, signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    code = launcher.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    return code


def finished_runs(extra: list[str]) -> dict[Path, int]:
    """The finished runs that a job with these options may have written, and when each was marked so (ns)."""
    folders = list(Path("runs").glob("*"))
    output_dir = last_value(extra, "--output_dir")
    if output_dir:
        folders.append(Path(output_dir))
    marks = [folder / "finished.json" for folder in folders]
    return {mark.parent: mark.stat().st_mtime_ns for mark in marks if mark.is_file()}


def report(folder: Path) -> int:
    """Report a run; returns the exit code, after saying what a failure leaves intact."""
    code = subprocess.run([sys.executable, str(REPOSITORY / "aah_dist" / "report.py"), str(folder)],
                          check=False).returncode
    if code:
        print(f"the run in {folder} is finished and intact; its report failed with exit code {code}", file=sys.stderr)
    return code


def main() -> int:
    argv, environment = command(sys.argv[1:])
    shown = [Path(argv[0]).name, *(str(Path(a).relative_to(REPOSITORY)) if a.startswith(str(REPOSITORY)) else a
                                   for a in argv[1:])]
    print(" ".join([f"{key}={value}" for key, value in environment.items()] + shown), flush=True)
    before = finished_runs(sys.argv[1:])
    code = run(argv, environment)
    # A folder marked since the start is this job's; none is after --help, --dry_run, or for a run finished before.
    new = {folder: mark for folder, mark in finished_runs(sys.argv[1:]).items() if before.get(folder) != mark}
    return report(max(new, key=new.get)) if code == 0 and new else code


if __name__ == "__main__":
    sys.exit(main())
