"""Asking a running job to stop: a signal to any rank, honoured by all ranks at the next step boundary."""

import signal
import time

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_MISUSE = 2
EXIT_SAVED_AND_STOPPED = 75
"""A signal asked the job to stop: it saved a checkpoint and can be started again (EX_TEMPFAIL)."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Remembers the first signal.  The trainer reads it once a step and shares it with all ranks.

    A second SIGINT interrupts at once, for the user who does not want to wait for the checkpoint; one that follows
    within a second is the same key press, passed on by a launcher as well.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._since = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *unused: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: object) -> None:
        if not self.signal:
            self.signal, self._since = number, time.monotonic()
        elif number == self.signal == signal.SIGINT and time.monotonic() - self._since > 1:
            raise KeyboardInterrupt


def name(number: int) -> str:
    return signal.Signals(number).name
