"""Distributed pretraining for language models whose attention heads have unequal context."""

__version__ = "0.1.0"
