"""How every entry script begins and ends: quiet libraries, one-sentence errors, documented exit codes."""

import errno
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable

from aah_dist.config.schema import ConfigError, RankError
from aah_dist.training import signals

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PEER_LEFT = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Timed out")
_TIME_TO_SPEAK = 3.0  # launchers end the other ranks when one leaves: rank 0, which prints, has to be first
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def this_rank() -> int:
    """The rank as the launcher gave it, before anything is initialised; 0 without a launcher."""
    return int(next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), 0))


def quiet_libraries() -> None:
    """Keep the libraries' chatter out of the log; runs before they are imported.

    Errors still show; what is silenced are notices about CUDA, Apex and Transformer Engine being absent.
    """
    warnings.filterwarnings("ignore")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    for name in ("DeepSpeed", "megatron", "torch.distributed", "deepspeed"):
        logging.getLogger(name).setLevel(logging.ERROR)


def run_main(main: Callable[[], int]) -> None:
    """Run `main` and exit with its code.

    Misuse ends in `error: SENTENCE` on rank 0 and code 2.  A rank that fails prints what happened and exits with code
    1 at once, which makes the launcher end the others; they fall out of their collectives and say only that.
    """
    quiet_libraries()
    rank = this_rank()
    if rank > 0:
        sys.stdout = open(os.devnull, "w")
    # Until the trainer listens there is nothing to save.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = main()
    except ConfigError as error:
        if rank > 0 and not isinstance(error, RankError):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(_TIME_TO_SPEAK)
        _leave(f"error: {error}" if rank == 0 or isinstance(error, RankError) else "", signals.EXIT_MISUSE)
    except KeyboardInterrupt:
        _leave("interrupted" if rank == 0 else "", 130)
    except Exception as error:
        _leave(_explain(error, rank), signals.EXIT_FAILED)
    else:
        _leave("", code)


def _explain(error: Exception, rank: int) -> str:
    from torch.distributed import DistError

    from aah_dist.training.checkpoint import CheckpointError
    from aah_dist.training.trainer import NonFiniteError

    if isinstance(error, NonFiniteError):  # raised on every rank with the same text
        return f"error: {error}" if rank == 0 else ""
    if isinstance(error, CheckpointError):
        return f"error: rank {rank}: {error}"
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        return f"error: rank {rank}: {error}; free space and start again, the run continues from its newest checkpoint."
    if isinstance(error, DistError) or (isinstance(error, RuntimeError) and any(t in str(error) for t in _PEER_LEFT)):
        reason = (str(error).splitlines() or ["no reason given"])[0].partition(". This is typically")[0]
        return f"rank {rank}: stopped, because another rank ended or did not answer ({reason})"
    return f"error: rank {rank} failed:\n{traceback.format_exc()}"


def _leave(text: str, code: int) -> None:
    """Exit without the destructors of process groups, which wait for ranks that may be gone."""
    if text:
        print(text, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
