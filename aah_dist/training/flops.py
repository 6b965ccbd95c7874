"""Model FLOPs of training, from the exact causal pairs of the live windows.

Convention: a multiply-add is 2 FLOPs; the backward pass costs twice the forward; recomputation, softmax and norms are
not counted; attention counts only the query-key pairs its windows keep (causal halving included).
"""

import numpy as np

from aah_dist.config.pairs import pairs
from aah_dist.config.schema import ModelConfig


def forward_flops_per_sample(model: ModelConfig, vocab_size: int, windows: np.ndarray) -> float:
    """FLOPs of one forward pass over one sample of seq_length tokens; windows int [layers, heads]."""
    n, t, d = model.hidden_size, model.seq_length, model.head_dim
    kv = model.kv_heads * d
    mlp_matrices = 3 if model.activation == "swiglu" else 2
    linear = model.num_layers * (n * (n + 2 * kv) + n * n + mlp_matrices * n * model.ffn_size) + n * vocab_size
    attention = 4 * d * sum(pairs(int(w), t) for w in windows.flat)
    return 2.0 * t * linear + attention


def training_flops_per_token(model: ModelConfig, vocab_size: int, windows: np.ndarray) -> float:
    """Forward and backward."""
    return 3.0 * forward_flops_per_sample(model, vocab_size, windows) / model.seq_length
