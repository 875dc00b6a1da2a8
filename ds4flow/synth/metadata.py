"""The metadata of synthetic files: every key that the architecture defines, and the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping

from gguf import GGUFWriter
from gguf.constants import GGUFValueType

from ds4flow.model.config import ARCHITECTURE, SQRT_SOFTPLUS, SUPPORT_ARCHITECTURE
from ds4flow.synth.presets import Recipe
from ds4flow.synth.vocabulary import make_vocabulary
from ds4flow.synth.weights import generator

_KINDS = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
}


def trunk_values(recipe: Recipe) -> dict[str, object]:
    """The keys `deepseek4.*` of a main file, without their prefix."""
    c = recipe.config
    return {
        "block_count": c.layers,
        "context_length": c.context_length,
        "embedding_length": c.dim,
        "embedding_length_out": c.streams * c.dim,
        "vocab_size": c.vocab,
        "attention.head_count": c.heads,
        "attention.head_count_kv": 1,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.q_lora_rank": c.q_rank,
        "attention.output_group_count": c.groups,
        "attention.output_lora_rank": c.o_rank,
        "attention.sliding_window": c.window,
        "attention.layer_norm_rms_epsilon": c.eps,
        "attention.compress_ratios": list(c.ratios),
        "attention.compress_rope_freq_base": c.rope_base_compress,
        "attention.indexer.head_count": c.index_heads,
        "attention.indexer.key_length": c.index_dim,
        "attention.indexer.top_k": c.top_k,
        "rope.dimension_count": c.rope_dim,
        "rope.freq_base": c.rope_base,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": c.yarn_factor,
        "rope.scaling.original_context_length": c.yarn_original,
        "rope.scaling.yarn_beta_fast": c.yarn_beta_fast,
        "rope.scaling.yarn_beta_slow": c.yarn_beta_slow,
        "expert_count": c.experts,
        "expert_used_count": c.experts_used,
        "expert_shared_count": c.experts_shared,
        "expert_feed_forward_length": c.expert_dim,
        "expert_gating_func": SQRT_SOFTPLUS,
        "expert_weights_norm": c.expert_norm,
        "expert_weights_scale": c.expert_scale,
        "swiglu_clamp_exp": list(c.clamp[: c.layers]),
        "swiglu_clamp_shexp": list(c.clamp_shared[: c.layers]),
        "hyper_connection.count": c.streams,
        "hyper_connection.sinkhorn_iterations": c.sinkhorn,
        "hyper_connection.epsilon": c.eps_hc,
        "hash_layer_count": c.hash_layers,
    }


def trunk_writer(recipe: Recipe, seed: int) -> GGUFWriter:
    """A writer that holds the metadata of a main file."""
    writer = GGUFWriter(None, ARCHITECTURE)
    writer.add_name(f"synthetic {recipe.name}, seed {seed}")
    writer.add_description("random weights; for tests and measurements only")
    writer.add_quantization_version(2)
    _add(writer, trunk_values(recipe))
    vocabulary = make_vocabulary(recipe.config.vocab, generator(seed, "vocabulary"))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("joyai-llm")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(vocabulary.pad)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    return writer


def mtp_writer(recipe: Recipe, seed: int) -> GGUFWriter:
    """A writer that holds the metadata of an MTP support file."""
    writer = GGUFWriter(None, SUPPORT_ARCHITECTURE)
    writer.add_name(f"synthetic {recipe.name} MTP support, seed {seed}")
    c = recipe.config
    values = {"expert_count": c.experts, "mtp_layer_count": 1, "nextn_predict_layers": 1}
    _add(writer, values)
    return writer


def _add(writer: GGUFWriter, values: Mapping[str, object]) -> None:
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(f"{ARCHITECTURE}.{key}", value)
        else:
            writer.add_key_value(f"{ARCHITECTURE}.{key}", value, _KINDS[type(value)])
