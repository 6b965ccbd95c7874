"""Find this process's rank under whatever started it, and form the process group.

Launchers that set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (deepspeed, torchrun, srun through our script) are
taken at their word; under mpiexec the ranks are found through mpi4py; a bare `python` is one rank.
"""

import contextlib
import io
import logging
import os
import socket
from dataclasses import dataclass
from datetime import timedelta

from aah_dist.config.schema import ConfigError

_MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")


@dataclass(frozen=True)
class Ranks:
    """This process's place in the job."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    launcher: str


def discover() -> Ranks:
    """Read or make the rendezvous variables; they are in os.environ afterwards.

    Raises: ConfigError if only a part of them is set, or if MPI started us and mpi4py is missing.
    """
    wanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    present = [name for name in wanted if name in os.environ]
    if len(present) == len(wanted):
        return _from_environment()
    if any(name in os.environ for name in _MPI_VARIABLES):
        return _from_mpi()
    if "RANK" in present or "WORLD_SIZE" in present:
        missing = ", ".join(sorted(set(wanted) - set(present)))
        raise ConfigError(f"the launcher set {', '.join(present)} but not {missing}; "
                          "set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or none.")
    _export(0, 1, 0, 1, "127.0.0.1", free_port())
    return Ranks(0, 1, 0, 1, "one process")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _from_environment() -> Ranks:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", rank))
    size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", world)))
    os.environ["LOCAL_RANK"] = str(local)
    return Ranks(rank, world, local, size, "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "launcher")


def _from_mpi() -> Ranks:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"started under mpiexec, but mpi4py cannot be used ({error}); "
                          "pip install 'aah_dist[mpi]'.") from error
    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    one_machine = node.size == world.size
    address = "127.0.0.1" if one_machine else world.bcast(socket.gethostname(), root=0)
    port = world.bcast(free_port(), root=0)
    _export(world.rank, world.size, node.rank, node.size, address, port)
    return Ranks(world.rank, world.size, node.rank, node.size, "mpiexec")


def _export(rank: int, world: int, local: int, local_size: int, address: str, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(local_size),
                      MASTER_ADDR=address, MASTER_PORT=str(port))


def form_process_group(backend: str, timeout_minutes: float) -> None:
    """Meet the other ranks in torch.distributed.

    Raises: ConfigError if the rendezvous port is taken.
    """
    import torch.distributed as dist

    try:
        dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
    except (dist.DistNetworkError, RuntimeError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise ConfigError(f"port {os.environ['MASTER_PORT']} of {os.environ['MASTER_ADDR']} (MASTER_PORT) is in "
                              "use by another program; choose another, for example deepspeed --master_port "
                              f"{free_port()}.") from error
        raise


def attach_deepspeed(backend: str, timeout_minutes: float) -> None:
    """DeepSpeed's view of the process group that exists, with the same timeout."""
    os.environ["DEEPSPEED_TIMEOUT"] = str(max(1, round(timeout_minutes)))
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints that its op was built, at every start
        deepspeed.init_distributed(dist_backend=backend, timeout=timedelta(minutes=timeout_minutes), verbose=False)
