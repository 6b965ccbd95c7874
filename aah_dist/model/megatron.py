"""The names this project uses of Megatron-core, and the only file to change when they move between its versions."""

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

__all__ = [
           "MLP",
           "AttnMaskType",
           "GPTModel",
           "IdentityOp",
           "MLPSubmodules",
           "ModuleSpec",
           "SelfAttention",
           "SelfAttentionSubmodules",
           "TransformerBlockSubmodules",
           "TransformerConfig",
           "TransformerLayer",
           "TransformerLayerSubmodules",
]
