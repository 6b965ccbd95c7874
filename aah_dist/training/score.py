"""Scoring a checkpoint on validation text, outside of a run."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from aah_dist.attention import check_backend
from aah_dist.config.load import read_config
from aah_dist.config.pairs import acr, exact_pair_ratio
from aah_dist.config.schema import ConfigError
from aah_dist.config.validate import resolve_layout
from aah_dist.data.dataset import PreparedData
from aah_dist.model.context import StepContext
from aah_dist.model.gpt import build_gpt
from aah_dist.parallel import device as devices
from aah_dist.parallel import launch, topology
from aah_dist.training import checkpoint as checkpoints
from aah_dist.training.adapt import AdaptingForward
from aah_dist.training.evaluation import perplexity, validation_loss


@dataclass(frozen=True)
class Settings:
    """What evaluate.py was asked for; data and samples None mean the run's data and all of its validation split."""

    checkpoint: Path
    data: Path | None
    samples: int | None
    micro_batch_size: int
    tensor_parallel_size: int
    device: str
    policy: str = "frozen"
    backend: str | None = None  # None: the run's


def score(settings: Settings) -> dict[str, object]:
    """Validation loss and what it cost, under the policy in force at the checkpoint (frozen), or decided for each batch
    from its own statistics, from an empty state (adapt).

    Raises: ConfigError for a folder without a checkpoint, data made with another tokenizer, a layout that does not
    divide, or adapt without a controller.
    """
    for name in ("samples", "micro_batch_size", "tensor_parallel_size"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} is {value}; it must be at least 1.")
    checkpoint = checkpoints.find(settings.checkpoint)
    config = read_config(checkpoint.path / "config.yaml")
    data = PreparedData(settings.data or Path(config.data.path))
    if data.meta["tokenizer"]["fingerprint"] != checkpoint.manifest["tokenizer_fingerprint"]:
        raise ConfigError(f"--data {data.path} was made with another tokenizer than checkpoint {checkpoint.path}; "
                          "prepare the text with the run's tokenizer (prepare_data.py --tokenizer).")
    ranks = launch.discover()
    config.parallel.tensor_parallel_size = settings.tensor_parallel_size
    config.train.micro_batch_size = settings.micro_batch_size
    config.train.global_batch_size = settings.micro_batch_size * ranks.world_size
    layout = resolve_layout(config, ranks.world_size)
    device = devices.select_device(settings.device, ranks.local_rank)
    devices.set_threads(device, ranks.local_size)
    dtype = torch.bfloat16 if checkpoint.manifest["precision"] == "bf16" else torch.float32
    backend = settings.backend or config.aah.backend
    check_backend(backend, device, dtype, config.model.seq_length, config.model.head_dim, dropout_p=0.0,
                  training=False, field="--backend")
    launch.form_process_group(devices.communication_backend(device), config.parallel.timeout_minutes)
    mpu = topology.form_groups(layout.tp, config.parallel.timeout_minutes)
    devices.make_portable(device, config.train.seed)

    context = StepContext(config.train.seed, checkpoint.windows, backend)
    tp_rank = mpu.get_tensor_model_parallel_rank()
    model = build_gpt(config.model, checkpoint.manifest["vocab_size"], context, tp_rank=tp_rank, tp_size=layout.tp,
                      sequence_parallel=False, recompute=False, seed=config.train.seed, device=device, dtype=dtype)
    checkpoints.load_weights(model, checkpoint, tp_rank, layout.tp)
    forward, windows = model, [checkpoint.windows]
    if settings.policy == "adapt":
        forward = AdaptingForward(model, config, layout, context, tp_rank, device, checkpoint)
        windows = forward.windows
    rows = data.split("valid", config.model.seq_length)
    dist.barrier()
    began = time.monotonic()
    loss, tokens = validation_loss(forward, model, rows, settings.samples or len(rows),
                                   micro_batch_size=settings.micro_batch_size, dp_rank=mpu.get_data_parallel_rank(),
                                   dp_size=layout.dp, dp_group=mpu.get_data_parallel_group(), device=device)
    devices.synchronize(device)
    length = config.model.seq_length
    return {"checkpoint": str(checkpoint.path), "checkpoint_step": checkpoint.step, "val_loss": loss,
            "val_ppl": perplexity(loss), "valid_unigram_entropy": data.valid_unigram_entropy, "tokens": tokens,
            "samples": tokens // length, "policy": settings.policy, "ACR": acr(np.stack(windows), length),
            "exact_pair_ratio": exact_pair_ratio(np.stack(windows), length),
            "tok_s": tokens / (time.monotonic() - began), "layout": f"TP {layout.tp} x DP {layout.dp}"}


def show(result: dict[str, object], as_json: bool) -> str:
    if as_json:
        return json.dumps(result)
    return "\n".join([
        f"checkpoint        {result['checkpoint']} (step {result['checkpoint_step']})",
        f"validation loss   {result['val_loss']:.4f} nats a token over {result['samples']} samples, "
        f"{result['tokens']:,} tokens",
        f"perplexity        {result['val_ppl']:.4g}",
        f"unigram entropy   {result['valid_unigram_entropy']:.4f} nats a token, whole validation split",
        f"policy            {result['policy']}",
        f"ACR               {result['ACR']:.4f} (mean window / T)",
        f"exact pair ratio  {result['exact_pair_ratio']:.4f} (causal query-key pairs kept)",
        f"speed             {result['tok_s']:,.0f} tokens/s, {result['layout']}",
    ])
