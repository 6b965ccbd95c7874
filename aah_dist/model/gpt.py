"""GPTModel from Megatron-core's specs, with this project's attention, norms, linear layers and dropout."""

import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from aah_dist.config.schema import ModelConfig
from aah_dist.config.size import padded_vocab_size
from aah_dist.model.context import ATTENTION_OUTPUT, EMBEDDING, MLP_OUTPUT, StepContext
from aah_dist.model.core_attention import WindowCoreAttention
from aah_dist.model.dropout import BiasDropoutAdd, StatelessDropout
from aah_dist.model.init import initialize
from aah_dist.model.linear import BiaslessColumnLinear, BiaslessRowLinear, ColumnLinear, RowLinear
from aah_dist.model.megatron import (
    MLP,
    AttnMaskType,
    GPTModel,
    IdentityOp,
    MLPSubmodules,
    ModuleSpec,
    SelfAttention,
    SelfAttentionSubmodules,
    TransformerBlockSubmodules,
    TransformerConfig,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from aah_dist.model.norm import HeadNorm, Norm
from aah_dist.model.shards import mark_shards


def transformer_config(model: ModelConfig, tp_size: int, sequence_parallel: bool,
                       dtype: torch.dtype) -> TransformerConfig:
    return TransformerConfig(
        num_layers=model.num_layers, hidden_size=model.hidden_size, num_attention_heads=model.num_heads,
        num_query_groups=model.kv_heads, kv_channels=model.head_dim, ffn_hidden_size=model.ffn_size,
        gated_linear_unit=model.activation == "swiglu",
        activation_func=F.silu if model.activation == "swiglu" else F.gelu,
        normalization="RMSNorm" if model.norm == "rmsnorm" else "LayerNorm", layernorm_epsilon=model.norm_eps,
        qk_layernorm=model.qk_norm, add_bias_linear=model.mlp_bias, add_qkv_bias=False,
        hidden_dropout=model.dropout, attention_dropout=model.attention_dropout_p,
        tensor_model_parallel_size=tp_size, sequence_parallel=sequence_parallel and tp_size > 1,
        params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype == torch.bfloat16,
        # Weights are drawn by model/init.py; the fusions below are CUDA-, Apex- or compiler-only, and Megatron's fused
        # gelu is the tanh approximation.
        use_cpu_initialization=True, perform_initialization=False, gradient_accumulation_fusion=False,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        persist_layer_norm=False, cross_entropy_loss_fusion=False, tp_comm_overlap=False,
        deallocate_pipeline_outputs=False)


class RecomputedLayer(TransformerLayer):
    """A layer whose activations are recomputed in the backward pass.

    Megatron's own recomputation saves CUDA random states; dropout here is stateless and needs none.
    """

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object):
        if not self.training:
            return super().forward(hidden_states, *args, **kwargs)
        run = super().forward
        return checkpoint(lambda x: run(x, *args, **kwargs), hidden_states, use_reentrant=False,
                          preserve_rng_state=False)


class WindowGPT(GPTModel):
    """GPT whose padded vocabulary rows get no probability and which leaves no empty entries in its state dict."""

    def __init__(self, *args: object, true_vocab_size: int, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.true_vocab_size = true_vocab_size
        # GPTModel names the class of its output layer itself; ours differs only in how the product is formed.
        self.output_layer.__class__ = ColumnLinear
        # Megatron's linear layers put `_extra_state: None` into the state dict for Transformer Engine's sake, which
        # DeepSpeed's checkpoint tools cannot read.
        self._empty_keys = [f"{name}._extra_state" for name, module in self.named_modules()
                            if type(module).get_extra_state is not nn.Module.get_extra_state]
        self.register_state_dict_post_hook(self._drop_empty)
        self.register_load_state_dict_pre_hook(self._restore_empty)

    @staticmethod
    def _drop_empty(module: "WindowGPT", state: dict, prefix: str, metadata: object) -> None:
        for name in module._empty_keys:
            if state.get(prefix + name, 0) is None:
                del state[prefix + name]

    @staticmethod
    def _restore_empty(module: "WindowGPT", state: dict, prefix: str, *unused: object) -> None:
        for name in module._empty_keys:
            state.setdefault(prefix + name, None)

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """labels [B, T], logits of this rank's vocabulary rows [T, B, V / TP] -> loss per token [B, T], nats, fp32."""
        return super().compute_language_model_loss(labels, self.mask_padding(logits))

    def mask_padding(self, logits: torch.Tensor) -> torch.Tensor:
        first = self.pg_collection.tp.rank() * logits.shape[-1]
        valid = min(max(self.true_vocab_size - first, 0), logits.shape[-1])
        if valid == logits.shape[-1]:
            return logits
        # In place: no copy of the largest activation, and the product's backward does not need its output.
        logits[..., valid:] = torch.finfo(logits.dtype).min
        return logits


def layer_spec(model: ModelConfig, layer: int, context: StepContext, tp_rank: int, tp_shards: int,
               recompute: bool) -> ModuleSpec:
    """Layer `layer` (0-based); `tp_shards` is how many ranks the sequence is split over (1 without SP)."""
    norm_of_heads = HeadNorm if model.qk_norm else IdentityOp
    shard = {"shard": tp_rank if tp_shards > 1 else 0, "shards": tp_shards}

    def bias_dropout_add(site: int) -> ModuleSpec:
        return ModuleSpec(BiasDropoutAdd, params={"p": model.dropout, "context": context, "layer": layer, "site": site,
                                                  **shard})

    attention = SelfAttentionSubmodules(
        linear_qkv=BiaslessColumnLinear, linear_proj=BiaslessRowLinear, q_layernorm=norm_of_heads,
        k_layernorm=norm_of_heads,
        core_attention=ModuleSpec(WindowCoreAttention, params={"context": context, "tp_rank": tp_rank}))
    return ModuleSpec(
        module=RecomputedLayer if recompute else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm, pre_mlp_layernorm=Norm,
            self_attention=ModuleSpec(SelfAttention, params={"attn_mask_type": AttnMaskType.causal},
                                      submodules=attention),
            self_attn_bda=bias_dropout_add(ATTENTION_OUTPUT), mlp_bda=bias_dropout_add(MLP_OUTPUT),
            mlp=ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear))))


def build_gpt(model: ModelConfig, vocab_size: int, context: StepContext, *, tp_rank: int, tp_size: int,
              sequence_parallel: bool, recompute: bool, dtype: torch.dtype, seed: int,
              device: torch.device) -> WindowGPT:
    """This rank's shard of the model, on `device`, with layout-independent initial weights.

    Megatron's process groups must exist.  forward(tokens [B, T], positions [B, T], None, labels=[B, T]) gives the loss
    of each token [B, T] in nats; without labels, the logits [B, T, V / TP].
    """
    config = transformer_config(model, tp_size, sequence_parallel, dtype)
    shards = tp_size if config.sequence_parallel else 1
    layers = [layer_spec(model, index, context, tp_rank, shards, recompute) for index in range(model.num_layers)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        gpt = WindowGPT(
            config, TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm),
            vocab_size=padded_vocab_size(model, vocab_size), max_sequence_length=model.positions,
            parallel_output=True, share_embeddings_and_output_weights=model.tied_embeddings,
            position_embedding_type="rope" if model.position == "rope" else "learned_absolute",
            rotary_base=model.rope_base, true_vocab_size=vocab_size)
    gpt.embedding.embedding_dropout = StatelessDropout(
        model.dropout, context, 0, EMBEDDING, shard=tp_rank if shards > 1 else 0, shards=shards)
    mark_shards(gpt, gated=config.gated_linear_unit)
    initialize(gpt, model, vocab_size, seed, tp_rank, tp_size)
    return gpt.to(device=device, dtype=dtype)
