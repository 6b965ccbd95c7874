"""pretrain.py with one fault, named in FAULT, in the rank named in FAULT_RANK."""

import os
import resource

import pytest

from aah_dist.training.entry import run_main


def inject(fault: str) -> None:
    from aah_dist.parallel import device as devices

    devices.select_device("cpu", 0)
    from aah_dist.training.trainer import Trainer

    step_of, save = Trainer.train_step, Trainer._save
    patch = pytest.MonkeyPatch()

    def failing(self: Trainer, step: int, request: object = None) -> object:
        if step == self.start_step + 1:
            raise ZeroDivisionError("an unforeseen fault")
        return step_of(self, step, request)

    def not_a_number(self: Trainer, step: int, request: object = None) -> object:
        if step == self.start_step + 1:
            self.engine.module.register_forward_hook(lambda module, inputs, loss: loss * float("nan"))
        return step_of(self, step, request)

    def failing_save(self: Trainer, done: int, since_log: object) -> None:
        if done == 2 * self.config.checkpoint.interval:
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
        save(self, done, since_log)

    if fault == "raise":
        patch.setattr(Trainer, "train_step", failing)
    elif fault == "nan":
        patch.setattr(Trainer, "train_step", not_a_number)
    elif fault == "raise-while-starting":
        patch.setattr("aah_dist.parallel.topology.form_groups", lambda *unused: 1 // 0)
    elif fault == "full-disk-at-second-save":
        patch.setattr(Trainer, "_save", failing_save)


def main() -> int:
    from aah_dist import pretrain

    if os.environ["RANK"] == os.environ["FAULT_RANK"]:
        inject(os.environ["FAULT"])
    return pretrain.main()


if __name__ == "__main__":
    run_main(main)
