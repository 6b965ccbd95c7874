"""The training loop and what surrounds it: engine, checkpoints, evaluation, signals, metrics."""
