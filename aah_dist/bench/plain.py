"""The same model and optimizer step in plain PyTorch: the baseline of bench/training.py and the reference of the tests.

One device, no parallelism, no windows skipped: attention is the library's causal one, or a masked one where a head has
a window.  Written to be read, not to be fast by tricks.
"""

import torch
import torch.nn.functional as F
from torch import nn

from aah_dist.config.schema import ModelConfig


class PlainAttention(nn.Module):
    """Causal self-attention with separate q, k, v matrices; windows int [H] or None for full attention."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        n, d = model.hidden_size, model.head_dim
        self.heads, self.kv_heads, self.d, self.rope_base = model.num_heads, model.kv_heads, d, model.rope_base
        self.rope = model.position == "rope"
        self.q, self.k, self.v = nn.Linear(n, n, False), nn.Linear(n, self.kv_heads * d, False), \
            nn.Linear(n, self.kv_heads * d, False)
        self.proj = nn.Linear(n, n, False)
        norm = nn.RMSNorm if model.norm == "rmsnorm" else nn.LayerNorm
        options = {} if model.norm == "rmsnorm" else {"bias": False}
        self.q_norm = norm(d, eps=model.norm_eps, **options) if model.qk_norm else nn.Identity()
        self.k_norm = norm(d, eps=model.norm_eps, **options) if model.qk_norm else nn.Identity()

    def forward(self, x_BTN: torch.Tensor, windows: torch.Tensor | None) -> torch.Tensor:
        b, t, n = x_BTN.shape
        q = self.q_norm(self.q(x_BTN).view(b, t, self.heads, self.d)).transpose(1, 2)
        k = self.k_norm(self.k(x_BTN).view(b, t, self.kv_heads, self.d)).transpose(1, 2)
        v = self.v(x_BTN).view(b, t, self.kv_heads, self.d).transpose(1, 2)
        if self.rope:
            q, k = rotate(q, self.rope_base), rotate(k, self.rope_base)
        if windows is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        else:
            i = torch.arange(t)
            back = i[:, None] - i[None, :]
            mask = (back >= 0) & (back < windows[:, None, None])
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.heads != self.kv_heads)
        return self.proj(y.transpose(1, 2).reshape(b, t, n))


def rotate(x_BHTD: torch.Tensor, base: float) -> torch.Tensor:
    """Rotary position encoding over halves (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
    t, d = x_BHTD.shape[-2:]
    frequencies = base ** (-torch.arange(0, d, 2) / d)
    angles = torch.arange(t)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    x1, x2 = x_BHTD.chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


class PlainBlock(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        n, f = model.hidden_size, model.ffn_size
        norm = nn.RMSNorm if model.norm == "rmsnorm" else nn.LayerNorm
        self.norm1, self.norm2 = norm(n, eps=model.norm_eps), norm(n, eps=model.norm_eps)
        self.attention = PlainAttention(model)
        self.gated = model.activation == "swiglu"
        self.fc1 = nn.Linear(n, 2 * f if self.gated else f, model.mlp_bias)
        self.fc2 = nn.Linear(f, n, model.mlp_bias)

    def forward(self, x: torch.Tensor, windows: torch.Tensor | None) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), windows)
        inner = self.fc1(self.norm2(x))
        if self.gated:
            gate, up = inner.chunk(2, -1)
            return x + self.fc2(F.silu(gate) * up)
        return x + self.fc2(F.gelu(inner))


class PlainGPT(nn.Module):
    """forward(tokens [B, T], labels [B, T], windows [L, H] or None) -> loss per token [B, T] in nats."""

    def __init__(self, model: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, model.hidden_size)
        self.positions = nn.Embedding(model.positions, model.hidden_size) if model.position == "learned" else None
        self.blocks = nn.ModuleList(PlainBlock(model) for _ in range(model.num_layers))
        norm = nn.RMSNorm if model.norm == "rmsnorm" else nn.LayerNorm
        self.norm = norm(model.hidden_size, eps=model.norm_eps)
        self.output = None if model.tied_embeddings else nn.Linear(model.hidden_size, vocab_size, False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 0.02)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, windows: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[:tokens.shape[1]]
        for layer, block in enumerate(self.blocks):
            x = block(x, None if windows is None else windows[layer])
        weight = self.tokens.weight if self.output is None else self.output.weight
        logits = F.linear(self.norm(x), weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
