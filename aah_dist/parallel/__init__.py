"""Ranks, process groups and devices: Megatron-core's tensor parallelism under DeepSpeed's data parallelism."""
