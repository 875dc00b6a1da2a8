"""GGUF writers and readers of the two shipped files, and their accounting.

Promise: metadata keys and tensor shapes are those of published deepseek4 files, so that other
GGUF readers can load the model; what is written is what :func:`read_params` returns.
"""

# ruff: noqa: RUF001  (the special tokens contain U+FF5C)
from __future__ import annotations

import hashlib
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer

from demo import quantize
from demo.data import TAIL_SPECIALS
from demo.model import DemoConfig, Params

MAIN_NAME = "ds4flow-demo.gguf"
MTP_NAME = "ds4flow-demo-mtp.gguf"

# Non-thinking and thinking turns as in the model family's prompt format; raw prompts need none.
CHAT_TEMPLATE = (
    "{{ '<｜begin▁of▁sentence｜>' }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}"
    "{{ '<｜Assistant｜></think>' + m['content'] + '<｜end▁of▁sentence｜>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}"
    "{{ '<think>' if thinking else '</think>' }}{% endif %}"
)


def _add_architecture(writer: gguf.GGUFWriter, cfg: DemoConfig) -> None:
    """Keys of the architecture with the usual value types."""
    key = "deepseek4."
    ints = {
        "block_count": cfg.layers,
        "context_length": cfg.context,
        "embedding_length": cfg.embedding,
        "embedding_length_out": cfg.streams * cfg.embedding,
        "vocab_size": cfg.vocab,
        "feed_forward_length": cfg.ffn,
        "attention.head_count": cfg.heads,
        "attention.head_count_kv": 1,
        "attention.key_length": cfg.head_dim,
        "attention.value_length": cfg.head_dim,
        "attention.q_lora_rank": cfg.q_rank,
        "attention.output_lora_rank": cfg.o_rank,
        "attention.output_group_count": cfg.groups,
        "attention.sliding_window": cfg.window,
        "attention.indexer.head_count": cfg.index_heads,
        "attention.indexer.key_length": cfg.index_dim,
        "attention.indexer.top_k": cfg.top_k,
        "rope.dimension_count": cfg.rope_dim,
        "rope.scaling.original_context_length": cfg.yarn_context,
        "expert_count": cfg.experts,
        "expert_used_count": cfg.experts_used,
        "expert_feed_forward_length": cfg.ffn,
        "expert_shared_count": 1,
        "expert_gating_func": 4,
        "hyper_connection.count": cfg.streams,
        "hyper_connection.sinkhorn_iterations": cfg.sinkhorn,
        "hash_layer_count": cfg.hash_layers,
    }
    for name, number in ints.items():
        writer.add_uint32(key + name, number)
    floats = {
        "attention.layer_norm_rms_epsilon": cfg.eps,
        "attention.compress_rope_freq_base": cfg.compress_rope_base,
        "rope.freq_base": cfg.rope_base,
        "rope.scaling.factor": cfg.yarn_factor,
        "rope.scaling.yarn_beta_fast": cfg.yarn_fast,
        "rope.scaling.yarn_beta_slow": cfg.yarn_slow,
        "expert_weights_scale": cfg.route_scale,
        "hyper_connection.epsilon": cfg.eps,
    }
    for name, value in floats.items():
        writer.add_float32(key + name, value)
    writer.add_string(key + "rope.scaling.type", "yarn")
    writer.add_bool(key + "expert_weights_norm", True)
    writer.add_key_value(
        key + "attention.compress_ratios",
        [*cfg.ratios, 0],
        gguf.GGUFValueType.ARRAY,
        gguf.GGUFValueType.UINT32,
    )
    for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        writer.add_array(key + name, [float(cfg.clamp)] * cfg.layers)


def _add_tokenizer(writer: gguf.GGUFWriter, tok: Tokenizer) -> None:
    """Byte-level BPE tables; specials are control tokens, the think pair user-defined."""
    import json

    vocab = tok.get_vocab()
    names = sorted(vocab, key=vocab.__getitem__)
    merges = json.loads(tok.to_str())["model"]["merges"]
    kinds = [int(gguf.TokenType.NORMAL)] * len(names)
    for index in range(3):
        kinds[index] = int(gguf.TokenType.CONTROL)
    for name in TAIL_SPECIALS:
        user = name in ("<think>", "</think>")
        kind = gguf.TokenType.USER_DEFINED if user else gguf.TokenType.CONTROL
        kinds[vocab[name]] = int(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("joyai-llm")
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _write(writer: gguf.GGUFWriter, params: Params) -> None:
    for name, tensor in params.items():
        array, kind = quantize.encode(name, tensor)
        raw = None if kind in (Kind.F16, Kind.F32, Kind.I32) else kind
        writer.add_tensor(name, np.ascontiguousarray(array), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_main(path: Path, cfg: DemoConfig, params: Params, tok: Tokenizer) -> None:
    """The main file: trunk tensors, architecture and tokenizer."""
    writer = gguf.GGUFWriter(path, "deepseek4")
    writer.add_name("ds4flow demo")
    writer.add_description("Tiny DeepSeek-V4-shaped model of Python source, for ds4flow")
    writer.add_license("PSF-2.0")
    writer.add_quantization_version(2)
    writer.add_file_type(15)
    _add_architecture(writer, cfg)
    _add_tokenizer(writer, tok)
    _write(writer, params)


def write_mtp(path: Path, cfg: DemoConfig, params: Params) -> None:
    """The MTP support file: 32 tensors ``mtp.0.*``, everything else comes from the main file."""
    writer = gguf.GGUFWriter(path, "deepseek4_mtp_support")
    writer.add_name("ds4flow demo MTP support")
    writer.add_uint32("deepseek4.expert_count", cfg.experts)
    writer.add_uint32("deepseek4.mtp_layer_count", 1)
    writer.add_uint32("deepseek4.nextn_predict_layers", 1)
    _write(writer, params)


def read_params(path: Path) -> Params:
    """Dequantised tensors of a GGUF file by name, torch shapes."""
    params: Params = {}
    for tensor in gguf.GGUFReader(path).tensors:
        shape = [int(n) for n in reversed(tensor.shape.tolist())]
        params[tensor.name] = quantize.decode(tensor.data, tensor.tensor_type).reshape(shape)
    return params


def group_of(name: str) -> str:
    """Accounting group of a tensor."""
    leaf = name.split(".", 2)[-1] if name.startswith(("blk.", "mtp.")) else name
    if "_exps" in leaf:
        return "routed experts"
    if "_shexp" in leaf:
        return "shared expert"
    if "compressor" in leaf or leaf.startswith("indexer"):
        return "compressors and indexer"
    if leaf.startswith("output.") or leaf == "output.weight":
        return "output head"
    if leaf.startswith("token_embd"):
        return "embedding"
    if leaf.startswith("attn_") and "norm" not in leaf and "sinks" not in leaf:
        return "attention projections"
    if leaf in ("e_proj.weight", "h_proj.weight"):
        return "e/h projections"
    return "router, hyper-connections, norms"


def bytes_per_token(path: Path, cfg: DemoConfig) -> dict[str, int]:
    """Weight bytes that one decoded token reads, by group (one embedding and one table row)."""
    totals: dict[str, int] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        size = int(tensor.n_bytes)
        if "_exps" in tensor.name:
            size = size * cfg.experts_used // cfg.experts
        if tensor.name.startswith("token_embd") or "tid2eid" in tensor.name:
            size //= cfg.vocab
        group = group_of(tensor.name)
        totals[group] = totals.get(group, 0) + size
    return totals


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def save_reference(
    path: Path, cfg: DemoConfig, params: Params, prompts: list[np.ndarray]
) -> dict[str, float]:
    """Float32 logits of the last 8 positions of each prompt, trunk and teacher-forced MTP.

    Keys: ``tokens_K`` (n), ``logits_K`` (8, V), ``mtp_logits_K`` (8, V); MTP row p reads the
    trunk streams of p - 1 (zeros before the start) and the token at p.
    """
    from demo import model

    arrays: dict[str, np.ndarray] = {}
    for index, ids in enumerate(prompts):
        count = len(ids)
        pad = -count % cfg.window
        tokens = torch.from_numpy(np.pad(ids.astype(np.int64), (0, pad)))[None]
        with torch.no_grad():
            streams, head = model.trunk_forward(cfg, params, tokens, model.Mode())
            before = model.previous(streams, 1)
            _, draft, _ = model.mtp_forward(cfg, params, before, tokens, model.Mode())
        weight = params["output.weight"]
        arrays[f"tokens_{index}"] = ids.astype(np.int32)
        for key, rows in (("logits", head), ("mtp_logits", draft)):
            arrays[f"{key}_{index}"] = (rows[count - 8 : count] @ weight.T).numpy()
    np.savez_compressed(path, allow_pickle=False, **arrays)
    return {k: float(np.abs(v).max()) for k, v in arrays.items() if "logits" in k}
