"""A small model, with random weights, of any architecture that Hugging Face's auto classes know, and a batch for it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import configuration_auto, modeling_auto

__all__ = ["TASKS", "architectures", "small_batch", "small_model"]

TASKS = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM"),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM"),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM"),
    "image": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "AutoModelForImageClassification"),
}
"""By task: the mapping of its architectures, and the class that builds one from a configuration."""

_VOCABULARY = 128
_MOST_PARAMETERS = 40_000_000

_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "emb_dim", "word_embed_proj_dim")
_INNER = ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx", "max_target_positions")

_SMALL: dict[str, Any] = {
    **dict.fromkeys(_WIDTHS, 32),
    **dict.fromkeys(_INNER, 64),
    **dict.fromkeys((*_LAYERS, "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys((*_LENGTHS, "max_source_positions"), 64),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), 2),
    **dict.fromkeys(("d_kv", "head_dim", "rotary_dim", "qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "lru_width"), 32),
    **dict.fromkeys(("n_shared_experts", "first_k_dense_replace", "n_group", "topk_group", "n_groups"), 1),
    **dict.fromkeys(("state_size", "mamba_d_state", "sliding_window", "attention_window"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "patch_size"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "mamba_d_head"), 16),
    "vocab_size": _VOCABULARY,
    "ffn_hidden_size": 64,
    "num_experts_per_tok": 2,
    "time_step_rank": 4,
    "conv_kernel": 4,
    "expand": 2,
    "mamba_expand": 2,
    "mamba_n_heads": 4,
    "mamba_n_groups": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "use_cache": False,
    "image_size": 32,
    "num_labels": 5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_OWN = ("sliding_window", "q_lora_rank", "bos_token_id", "eos_token_id")
"""Left as they are where an architecture does without."""

_WINDOWED: dict[str, Any] = {
    "image_size": 64,
    "patch_size": 4,
    "num_layers": 4,
    "hidden_size": 128,
    "embed_dim": 16,
    "num_heads": [1, 2, 4, 8],
    "window_size": 2,
}

_PARTICULAR: dict[str, dict[str, Any]] = {
    "convnext": {"patch_size": 4, "hidden_sizes": [8, 16, 32, 64]},
    "convnextv2": {"patch_size": 4, "hidden_sizes": [8, 16, 32, 64]},
    "deit": {"architectures": ["DeiTForImageClassification"]},
    "donut-swin": _WINDOWED,
    "efficientnet": {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280},
    "esmc": {"head_dim": 8, "num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma4_text": {"vocab_size_per_layer_input": _VOCABULARY, "hidden_size_per_layer_input": 8},
    "hiera": {"embed_dim": 16, "image_size": [64, 64], "num_heads": [1, 2, 4, 8], "masked_unit_size": [8, 8]},
    "levit": {"architectures": ["LevitForImageClassification"], "image_size": 64, "patch_size": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"n_routed_experts": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 32, "moe_topk": 2},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 16},
    "mamba2": {"head_dim": 8, "num_heads": 8},
    "marian": {"decoder_start_token_id": 1, "decoder_vocab_size": _VOCABULARY},
    "mobilevitv2": {"patch_size": 2, "image_size": 64},
    "swin": _WINDOWED,
    "swinv2": _WINDOWED,
    "xlstm": {"embedding_dim": 32, "chunk_size": 8, "mode": "train"},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 4,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
    },
    "zamba2": {
        "mamba_headdim": 8,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid"],
        "hybrid_layer_ids": [1],
    },
}
"""What else must be set for an architecture to be small."""

_PARTS = ("text_config", "vision_config", "encoder", "decoder", "audio_config")


def architectures(task: str) -> list[str]:
    """Names of the architectures for a task."""
    return list(getattr(modeling_auto, TASKS[task][0]))


def small_model(task: str, architecture: str) -> tuple[nn.Module, Any]:
    """A small model, training, and its configuration; the same weights each time.

    Raises:
        Exception: whatever the architecture has against being small.
    """
    torch.manual_seed(0)
    config = configuration_auto.CONFIG_MAPPING[architecture]()
    _shrink(config)
    for name in _PARTS:
        if hasattr(getattr(config, name, None), "to_dict"):
            _shrink(getattr(config, name))
    for name, value in _PARTICULAR.get(architecture, {}).items():
        setattr(config, name, value)
    with torch.device("meta"):
        count = sum(value.numel() for value in _build(task, config).parameters())
    if count > _MOST_PARAMETERS:
        raise ValueError(f"{count} parameters, which is not small")
    torch.manual_seed(0)
    return _build(task, config).train(), config


def _build(task: str, config: Any) -> nn.Module:
    model: nn.Module = getattr(transformers, TASKS[task][1]).from_config(config)
    return model


def _shrink(config: Any) -> None:
    known = {*vars(config), *getattr(config, "attribute_map", {})}
    for name, value in _SMALL.items():
        before = vars(config)[name] if name in vars(config) else getattr(config, name, None)
        if name not in known or isinstance(before, (list, tuple)) or (before is None and name in _OWN):
            continue
        with contextlib.suppress(Exception):  # some are derived from others, or checked
            setattr(config, name, value)
    if hasattr(config, "kv_lora_rank"):  # heads of latent attention have two parts
        for name, value in {
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "head_dim": 4,
            "num_key_value_heads": 4,
        }.items():
            setattr(config, name, value)
        with contextlib.suppress(Exception):
            config.qk_head_dim = 8
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    kinds = vars(config).get("layer_types")
    if isinstance(kinds, list):  # one layer of each kind
        layers = max(2, len(set(kinds)))
        config.layer_types = (list(dict.fromkeys(kinds)) * 2)[:layers]
        config.num_hidden_layers = layers


def small_batch(task: str, config: Any) -> dict[str, Any]:
    """Inputs with labels; the same each time."""
    torch.manual_seed(1)
    if task == "image":
        size = getattr(getattr(config, "vision_config", config), "image_size", 64)
        size = size if isinstance(size, int) and size <= 64 else 64
        images = torch.randn(2, getattr(config, "num_channels", 3), size, size)
        return {"pixel_values": images, "labels": torch.randint(2, (2,))}
    tokens = torch.randint(3, _VOCABULARY, (2, 16))
    return {"input_ids": tokens, "labels": tokens.clone()}
