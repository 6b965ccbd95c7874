"""The run configuration: one typed dataclass a section, one docstring a field.

A field's docstring is its `--help` text.  Values that are wrong by themselves are refused here, in
`__post_init__`; values that contradict each other across sections, the DeepSpeed JSON or the number of
ranks are refused in `config/validate.py`.  The aah section stands in `config/aah.py`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import List, Literal, Optional, Union

from aah_dist.config.aah import AahConfig, Window
from aah_dist.config.errors import ConfigError, RankError, at_least, fraction

__all__ = ["AahConfig", "CheckpointConfig", "ConfigError", "DataConfig", "LogConfig", "ModelConfig", "ParallelConfig",
           "RankError", "RunConfig", "TrainConfig", "Window"]


@dataclass
class ModelConfig:
    """The transformer: a Megatron-core GPT whose attention heads each have a window."""

    num_layers: int = 4
    """Transformer layers."""
    hidden_size: int = 192
    """Width of the residual stream; a multiple of num_heads."""
    num_heads: int = 12
    """Query heads."""
    num_kv_heads: Optional[int] = None
    """Key/value heads (GQA); a divisor of num_heads. Unset: one per query head."""
    ffn_hidden_size: Optional[int] = None
    """Inner width of the MLP. Unset: 4 x hidden_size (gelu), or 8/3 x hidden_size rounded up to 64 (swiglu)."""
    seq_length: int = 512
    """Tokens of context a sample is trained on (T)."""
    max_positions: Optional[int] = None
    """Rows of the learned position table. Unset: seq_length."""
    vocab_size: Optional[int] = None
    """Tokens the model knows. Unset: the tokenizer's."""
    vocab_multiple: int = 128
    """Embedding rows are padded to a multiple of this; padding is masked and not counted."""
    position: Literal["learned", "rope"] = "learned"
    """Position encoding."""
    rope_base: int = 10000
    """Base of the rotary frequencies."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation."""
    norm_eps: float = 1e-5
    """Epsilon inside the normalisation."""
    activation: Literal["gelu", "swiglu"] = "gelu"
    """MLP activation; gelu is the exact (erf) one."""
    mlp_bias: bool = True
    """Biases in the MLP's two layers (attention projections never have one)."""
    qk_norm: bool = False
    """Normalise each head's queries and keys."""
    tied_embeddings: bool = True
    """Use the token embedding as the output matrix."""
    dropout: float = 0.0
    """Dropout on embeddings, attention output and MLP output."""
    attention_dropout: Optional[float] = None
    """Dropout on attention probabilities. Unset: the value of dropout."""
    init: Literal["paper", "standard"] = "standard"
    """Initial weights: paper (PyTorch defaults, N(0,1) embeddings) or standard (normal 0.02, scaled residual
    output)."""

    def __post_init__(self) -> None:
        at_least("model", self, 1, "num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_hidden_size",
                 "seq_length", "max_positions", "vocab_size", "vocab_multiple")
        at_least("model", self, 2, "rope_base")
        fraction("model", self, "dropout", "attention_dropout")
        if self.hidden_size % self.num_heads:
            raise ConfigError(f"model.hidden_size {self.hidden_size} is not a multiple of model.num_heads "
                              f"{self.num_heads}; the nearest that is: "
                              f"{_nearest_multiple(self.hidden_size, self.num_heads)}.")
        if self.num_heads % self.kv_heads:
            raise ConfigError(f"model.num_kv_heads {self.kv_heads} does not divide model.num_heads {self.num_heads}.")
        if self.position == "rope" and self.head_dim % 2:
            raise ConfigError(f"model.position rope needs an even head size; model.hidden_size / model.num_heads is "
                              f"{self.head_dim}.")
        if self.position == "learned" and self.seq_length > self.positions:
            raise ConfigError(f"model.seq_length {self.seq_length} is above the position table, "
                              f"model.max_positions {self.positions}; raise the table or shorten the samples.")

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def ffn_size(self) -> int:
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        return 4 * self.hidden_size if self.activation == "gelu" else -(-8 * self.hidden_size // 3 // 64) * 64

    @property
    def positions(self) -> int:
        return self.max_positions or self.seq_length

    @property
    def attention_dropout_p(self) -> float:
        return self.dropout if self.attention_dropout is None else self.attention_dropout


@dataclass
class DataConfig:
    """Prepared text (see prepare_data.py)."""

    path: str = "data/stdlib"
    """Folder written by prepare_data.py."""
    text: Optional[List[str]] = None
    """Text to prepare when `path` does not exist yet: files, folders, globs, or stdlib (the running Python's own
    source). Unset: `path` must exist."""
    tokenizer: Optional[str] = None
    """Tokenizer. When preparing: sentencepiece-unigram:SIZE, sentencepiece-bpe:SIZE, a .model file or a Hugging Face
    folder. When `path` exists and this is a file or folder, it must be the one the data was made with."""
    valid_fraction: float = 0.03
    """Share of the documents held out for validation when preparing."""

    def __post_init__(self) -> None:
        if not 0 < self.valid_fraction < 1:
            raise ConfigError(f"data.valid_fraction is {self.valid_fraction}; it must lie between 0 and 1.")


@dataclass
class TrainConfig:
    """The optimizer and the loop."""

    steps: int = 200
    """Optimizer steps of the whole run."""
    micro_batch_size: int = 4
    """Samples a rank takes forward and backward at once."""
    global_batch_size: int = 16
    """Samples per optimizer step over all ranks; a multiple of micro_batch_size x data-parallel size."""
    seed: int = 0
    """Seed of weights, data order and dropout."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the cosine."""
    warmup_steps: int = 100
    """Linear warm-up; the first update has learning rate 0, as in the paper."""
    decay_steps: Optional[int] = None
    """Step at which the cosine ends. Unset: the `steps` the run was started with; a longer resume keeps it unless
    set."""
    beta1: float = 0.9
    """AdamW beta 1."""
    beta2: float = 0.95
    """AdamW beta 2."""
    eps: float = 1e-8
    """AdamW epsilon."""
    weight_decay: float = 0.1
    """AdamW decoupled weight decay."""
    decay: Literal["matrices", "all"] = "matrices"
    """Which parameters decay: matrices (not biases and norms) or all (the paper's)."""
    clip: float = 1.0
    """Gradient norm clipping; 0 is off."""
    recompute: bool = False
    """Recompute each layer's activations in the backward pass to save memory."""
    eval_interval: int = 100
    """Steps between evaluations on the validation split; 0 is only at the end."""
    eval_samples: int = 64
    """Validation samples an evaluation reads, from the first on."""

    def __post_init__(self) -> None:
        at_least("train", self, 1, "steps", "micro_batch_size", "global_batch_size", "eval_samples", "decay_steps")
        at_least("train", self, 0, "seed", "lr", "min_lr", "warmup_steps", "weight_decay", "clip", "eval_interval")
        fraction("train", self, "beta1", "beta2")
        if self.min_lr > self.lr:
            raise ConfigError(f"train.min_lr {self.min_lr} is above train.lr {self.lr}; the cosine falls from lr to "
                              "min_lr, so lower min_lr as well.")
        if self.eps <= 0:
            raise ConfigError(f"train.eps is {self.eps}; it must be above 0.")


@dataclass
class ParallelConfig:
    """How the work is spread over ranks."""

    tensor_parallel_size: Union[Literal["auto"], int] = "auto"
    """Ranks that share each layer (TP). auto: 2 if the ranks and the heads divide by it, else 1."""
    sequence_parallel: bool = False
    """Split activations between the TP ranks along the sequence as well."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU where there is one."""
    timeout_minutes: float = 30.0
    """How long a rank waits for the others before the job ends with an error."""

    def __post_init__(self) -> None:
        if self.tensor_parallel_size != "auto" and self.tensor_parallel_size < 1:
            raise ConfigError(f"parallel.tensor_parallel_size is {self.tensor_parallel_size}; "
                              "give auto or a number of at least 1.")
        if self.timeout_minutes <= 0:
            raise ConfigError(f"parallel.timeout_minutes is {self.timeout_minutes}; it must be above 0.")


@dataclass
class CheckpointConfig:
    """When the run is saved and what it starts from."""

    interval: int = 100
    """Steps between checkpoints; 0 saves only the listed steps and the end."""
    steps: List[int] = field(default_factory=list)
    """Further steps to save at; these are never deleted."""
    keep: int = 2
    """Newest checkpoints kept besides the listed steps."""
    resume: str = "auto"
    """auto (the newest complete checkpoint of output_dir, if any), none (refuses to overwrite one), or a checkpoint
    folder."""

    def __post_init__(self) -> None:
        at_least("checkpoint", self, 0, "interval")
        at_least("checkpoint", self, 1, "keep")


@dataclass
class LogConfig:
    """What is printed and recorded."""

    interval: int = 10
    """Steps between log lines."""
    progress_bar: Literal["auto", "on", "off"] = "auto"
    """auto: on a terminal."""
    wandb_project: str = "aah_dist"
    """W&B project; W&B is used when WANDB_API_KEY or WANDB_MODE is set."""
    tensorboard: bool = False
    """Write TensorBoard events into the run folder as well (pip install tensorboard)."""

    def __post_init__(self) -> None:
        at_least("log", self, 1, "interval")


@dataclass
class RunConfig:
    """One run, fully resolved."""

    model: ModelConfig = field(default_factory=ModelConfig)
    aah: AahConfig = field(default_factory=AahConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    preset: str = "demo"
    regime: str = "full_attention"
    ds_config: str = "ds_configs/zero2.json"
    output_dir: Optional[str] = None

    def __post_init__(self) -> None:
        if self.output_dir is not None and not self.output_dir.strip():
            raise ConfigError("output_dir is empty; name a folder, or leave it out for runs/PRESET.")

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)


def _nearest_multiple(value: int, of: int) -> str:
    low = value // of * of
    return f"{low} or {low + of}" if low else str(of)
