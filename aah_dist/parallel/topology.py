"""Megatron's tensor-parallel groups, and the view of them that DeepSpeed asks for."""

import torch
import torch.distributed as dist


def form_groups(tensor_parallel_size: int, timeout_minutes: float) -> "DeepSpeedMPU":
    """Create Megatron's process groups (once a process: forming them again leaks gloo threads)."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel_size, create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, round(timeout_minutes)))
    return DeepSpeedMPU()


class DeepSpeedMPU:
    """DeepSpeed's `mpu` over Megatron's parallel_state.

    DeepSpeed still asks for the names get_model_parallel_*, which Megatron-core dropped; without pipeline parallelism
    the model-parallel group is the tensor-parallel group.
    """

    def __init__(self) -> None:
        from megatron.core import parallel_state

        self._state = parallel_state

    def get_tensor_model_parallel_rank(self) -> int:
        return self._state.get_tensor_model_parallel_rank()

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._state.get_tensor_model_parallel_world_size()

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self._state.get_tensor_model_parallel_group()

    def get_tensor_model_parallel_src_rank(self) -> int:
        return self._state.get_tensor_model_parallel_src_rank()

    get_model_parallel_rank = get_tensor_model_parallel_rank
    get_model_parallel_world_size = get_tensor_model_parallel_world_size
    get_model_parallel_group = get_tensor_model_parallel_group

    def get_pipeline_model_parallel_rank(self) -> int:
        return 0

    def get_pipeline_model_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_rank(self) -> int:
        return self._state.get_data_parallel_rank()

    def get_data_parallel_world_size(self) -> int:
        return self._state.get_data_parallel_world_size()

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._state.get_data_parallel_group()

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._state.get_data_parallel_group())


def broadcast_object(value: object, device: torch.device) -> object:
    """Rank 0's value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=device)
    return box[0]
