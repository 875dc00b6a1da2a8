"""Metadata to configuration: what producers vary is read, what would change results is refused."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4flow.errors import ModelFileError
from ds4flow.gguf import GgufFile, TensorInfo
from ds4flow.model.config import ModelConfig
from ds4flow.model.slots import layer_slots, trunk_slots
from ds4flow.synth.presets import FLASH
from tests.gguf_files import As, write

PRE = "deepseek4."
LAYERS = 4


def small() -> dict[str, object]:
    """Keys of a small model, as a converter writes them."""
    keys: dict[str, object] = {
        "block_count": LAYERS,
        "context_length": 4096,
        "embedding_length": 256,
        "vocab_size": 512,
        "attention.head_count": 8,
        "attention.head_count_kv": 1,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.q_lora_rank": 128,
        "attention.output_group_count": 2,
        "attention.output_lora_rank": 64,
        "attention.sliding_window": 32,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.compress_ratios": [0, 4, 128, 4, 0],
        "attention.compress_rope_freq_base": 160000.0,
        "attention.indexer.head_count": 4,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 8,
        "rope.dimension_count": 64,
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 16.0,
        "rope.scaling.original_context_length": 65536,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "expert_count": 8,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 256,
        "expert_gating_func": 4,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "swiglu_clamp_exp": [10.0, 9.0, 8.0, 7.0],
        "swiglu_clamp_shexp": [6.0, 5.0, 4.0, 3.0],
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
        "hash_layer_count": 1,
        "nextn_predict_layers": 1,
    }
    return {"general.architecture": "deepseek4", **{PRE + k: v for k, v in keys.items()}}


OPTIONAL = (
    "attention.head_count_kv",
    "attention.value_length",
    "expert_gating_func",
    "nextn_predict_layers",
    "swiglu_clamp_shexp",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)


class HeaderOnly(GgufFile):
    """A file that has metadata and tensor entries and no bytes."""

    def __init__(self, metadata: dict[str, object], tensors: tuple[str, ...] = ()) -> None:
        self.path = Path("model.gguf")
        self.metadata = metadata
        self.tensors = {name: TensorInfo(name, "F32", (1,), 0, 4) for name in tensors}


def read(changes: dict[str, object] | None = None, *tensors: str) -> ModelConfig:
    """The configuration of the small model with some keys changed (None removes a key)."""
    keys = small()
    for key, value in (changes or {}).items():
        full = key if "." in key and key.split(".")[0] in ("general", "tokenizer") else PRE + key
        keys[full] = value
        if value is None:
            del keys[full]
    return ModelConfig.from_gguf(HeaderOnly(keys, tensors))


def problem(changes: dict[str, object], *tensors: str) -> str:
    with pytest.raises(ModelFileError) as caught:
        read(changes, *tensors)
    assert "model.gguf" in caught.value.what
    assert caught.value.fix
    return caught.value.what


def test_all_values_of_the_small_model():
    assert read() == ModelConfig(
        layers=4,
        dim=256,
        vocab=512,
        streams=4,
        sinkhorn=20,
        heads=8,
        head_dim=128,
        rope_dim=64,
        q_rank=128,
        groups=2,
        o_rank=64,
        window=32,
        ratios=(0, 4, 128, 4, 0),
        index_heads=4,
        index_dim=128,
        top_k=8,
        experts=8,
        experts_used=2,
        experts_shared=1,
        expert_dim=256,
        hash_layers=1,
        expert_scale=1.5,
        expert_norm=True,
        clamp=(10.0, 9.0, 8.0, 7.0, 7.0),
        clamp_shared=(6.0, 5.0, 4.0, 3.0, 3.0),
        eps=1e-6,
        eps_hc=1e-6,
        rope_base=10000.0,
        rope_base_compress=160000.0,
        yarn_factor=16.0,
        yarn_original=65536,
        yarn_beta_fast=32.0,
        yarn_beta_slow=1.0,
        context_length=4096,
    )


GOLDEN: dict[str, dict[str, Any]] = {
    "tiny-f32": {"dim": 128, "heads": 4, "window": 32, "top_k": 8, "yarn_original": 4096},
    "tiny-iq2": {"dim": 256, "heads": 4, "window": 128, "top_k": 16, "yarn_original": 65536},
    "tiny-q4k": {"dim": 256, "heads": 8, "window": 64, "top_k": 12, "yarn_factor": 8.0},
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_models(golden_dir: Path, name: str):
    config = ModelConfig.from_gguf(GgufFile.open(golden_dir / f"{name}.gguf"))
    assert {k: getattr(config, k) for k in GOLDEN[name]} == GOLDEN[name]
    assert config.ratios == (0, 0, 4, 128, 4, 128, 0)
    assert (config.layers, config.hash_layers, config.vocab) == (6, 3, 320)
    assert config.clamp == config.clamp_shared == (10.0,) * 7
    # the sidecar repeats all keys, with one block more
    sidecar = ModelConfig.from_gguf(GgufFile.open(golden_dir / f"{name}.llama-mtp.gguf"))
    assert sidecar == config


def flash() -> ModelConfig:
    """The published sizes of DeepSeek-V4-Flash."""
    return read(
        {
            "block_count": 43,
            "context_length": 1048576,
            "embedding_length": 4096,
            "vocab_size": 129280,
            "attention.head_count": 64,
            "attention.key_length": 512,
            "attention.value_length": 512,
            "attention.q_lora_rank": 1024,
            "attention.output_group_count": 8,
            "attention.output_lora_rank": 1024,
            "attention.sliding_window": 128,
            "attention.compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
            "attention.indexer.head_count": 64,
            "attention.indexer.top_k": 512,
            "expert_count": 256,
            "expert_used_count": 6,
            "expert_feed_forward_length": 2048,
            "swiglu_clamp_exp": [10.0] * 43,
            "swiglu_clamp_shexp": None,
            "hash_layer_count": 3,
        }
    )


def test_the_flash_that_synth_makes_is_that_of_the_metadata():
    assert flash() == FLASH


def test_flash_needs_exactly_the_published_tensors():
    config = flash()
    counts = [config.ratios[:43].count(r) for r in (0, 4, 128)]
    assert counts == [2, 21, 20]
    assert config.mtp_ratio == 0
    slots = trunk_slots(config)
    assert len(slots) == len({slot.name for slot in slots}) == 1328
    experts = [s for s in slots if "_exps." in s.name]
    assert sum(math.prod(s.shape) for s in experts) == 43 * 3 * 256 * 2048 * 4096
    assert round(sum(math.prod(s.shape) for s in slots) / 1e9, 2) == 284.33
    assert len(layer_slots("mtp.0.", config, 0, hashed=False)) == 24


# --- traps ----------------------------------------------------------------------------------------


def test_nextn_predict_layers_does_not_shorten_the_trunk():
    assert read({"nextn_predict_layers": 1}).layers == LAYERS
    assert read({"nextn_predict_layers": None}).layers == LAYERS
    assert read({"nextn_predict_layers": 3}).layers == LAYERS


def test_a_real_nextn_block_does_shorten_it():
    changes = {"block_count": 5, "nextn_predict_layers": None}
    config = read(changes, "blk.4.nextn.eh_proj.weight")
    assert config.layers == LAYERS
    assert config == read()
    # only the last block can be it
    assert read({}, "blk.1.nextn.eh_proj.weight").layers == LAYERS


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("UINT64", "rope.scaling.original_context_length", 65536),
        ("INT32", "block_count", 4),
        ("UINT8", "attention.sliding_window", 32),
        ("FLOAT64", "rope.freq_base", 10000.0),
        ("UINT32", "rope.freq_base", 10000),
        ("FLOAT32", "expert_count", 8.0),
        ("UINT8", "expert_weights_norm", 1),
        ("INT64", "attention.compress_ratios", [0, 4, 128, 4, 0]),
        ("FLOAT32", "attention.compress_ratios", [0.0, 4.0, 128.0, 4.0, 0.0]),
        ("UINT32", "expert_feed_forward_length", [256] * 4),
        ("FLOAT64", "swiglu_clamp_exp", [10.0, 9.0, 8.0, 7.0]),
        ("INT32", "attention.head_count", [8, 8, 8, 8]),
    ],
)
def test_number_widths_and_arrays_vary(tmp_path: Path, kind: str, key: str, value: object):
    path = write(tmp_path / "m.gguf", {**small(), PRE + key: As(kind, value)}, {})
    plain = write(tmp_path / "plain.gguf", small(), {})
    assert ModelConfig.from_gguf(GgufFile.open(path)) == ModelConfig.from_gguf(GgufFile.open(plain))


def test_vocabulary_from_the_token_list():
    tokens = {"tokenizer.ggml.tokens": ["a"] * 777}
    assert read({"vocab_size": None, **tokens}).vocab == 777
    assert read(tokens).vocab == 512
    assert "deepseek4.vocab_size" in problem({"vocab_size": None})


def test_ratios_of_trunk_and_mtp():
    assert read({"attention.compress_ratios": [0, 4, 128, 4]}).mtp_ratio == 0
    longer = read({"attention.compress_ratios": [128, 128, 4, 128, 4, 0, 0]})
    assert longer.ratios == (128, 128, 4, 128, 4)
    assert longer.mtp_ratio == 4  # its own entry, whatever the trunk's first layers have
    assert [longer.ratio(i) for i in range(4)] == [128, 128, 4, 128]
    assert "3 entries for 4 blocks" in problem({"attention.compress_ratios": [0, 4, 128]})
    assert "[7]; known ratios" in problem({"attention.compress_ratios": [0, 7, 128, 7, 0]})


def test_clamps():
    assert read({"swiglu_clamp_shexp": None}).clamp_shared == (10.0, 9.0, 8.0, 7.0, 7.0)
    assert read({"swiglu_clamp_exp": 3.0}).clamp == (3.0,) * 5
    assert read({"swiglu_clamp_exp": [1.0] * 4 + [2.0]}).clamp == (1.0, 1.0, 1.0, 1.0, 2.0)
    assert read({"swiglu_clamp_exp": 0}).clamp == (0.0,) * 5
    assert "2 entries for 4 layers" in problem({"swiglu_clamp_exp": [1.0, 2.0]})
    assert "empty" in problem({"swiglu_clamp_exp": []})
    assert "negative" in problem({"swiglu_clamp_exp": [1.0, -1.0, 1.0, 1.0]})


def test_yarn_is_never_guessed():
    off = read(
        {
            "rope.scaling.type": "none",
            "rope.scaling.factor": None,
            "rope.scaling.original_context_length": None,
        }
    )
    assert off.yarn_factor == 1.0
    absent = {f"rope.scaling.{k}": None for k in ("type", "factor", "original_context_length")}
    for key in absent:
        assert key in problem({key: None})
        assert key in problem(absent)
    assert "'linear', not 'yarn' or 'none'" in problem({"rope.scaling.type": "linear"})
    betas = {"rope.scaling.yarn_beta_fast": None, "rope.scaling.yarn_beta_slow": None}
    assert read(betas) == read()


@pytest.mark.parametrize(
    "key", [k.removeprefix(PRE) for k in small() if k.startswith(PRE)]
)  # fmt: skip
def test_each_key_is_required_or_has_a_stated_meaning_when_absent(key: str):
    if key in OPTIONAL:
        read({key: None})
    else:
        assert PRE + key in problem({key: None})


def test_all_missing_keys_are_named_at_once():
    gone = ("attention.compress_ratios", "attention.compress_rope_freq_base", "expert_count")
    text = problem({key: None for key in gone})
    assert all(PRE + key in text for key in gone)
    # an old spelling of the base is not taken for it
    old = {"attention.compress_rope_freq_base": None, "rope.freq_base_swa": 160000.0}
    assert "compress_rope_freq_base" in problem(old)


def test_indexer_keys_are_needed_only_with_ratio_4():
    gone = {f"attention.indexer.{k}": None for k in ("head_count", "key_length", "top_k")}
    config = read({"attention.compress_ratios": [0, 0, 128, 128, 0], **gone})
    assert (config.index_heads, config.index_dim, config.top_k) == (0, 0, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expert_gating_func": 2}, "expert_gating_func is 2"),
        ({"expert_group_count": 8}, "expert_group_count is 8"),
        ({"leading_dense_block_count": 3}, "leading_dense_block_count is 3"),
        ({"attention.head_count_kv": 8}, "head_count_kv is 8"),
        ({"attention.value_length": 64}, "value_length is 64"),
        ({"attention.output_group_count": 3}, "8 heads do not divide into 3"),
        ({"rope.dimension_count": 63}, "63 rotary channels"),
        ({"rope.dimension_count": 130}, "130 rotary channels"),
        ({"attention.indexer.key_length": 32}, "indexer rows of 32"),
        ({"expert_used_count": 9}, "9 experts used of 8"),
        ({"hash_layer_count": 5}, "5 hash-routed layers of 4"),
        ({"rope.scaling.factor": 0.5}, "factor 0.5"),
        ({"rope.freq_base": 0.0}, "rotary bases"),
        ({"attention.layer_norm_rms_epsilon": -1e-6}, "epsilons"),
        ({"block_count": 0}, "block_count is 0, not an integer from 1"),
        ({"block_count": 100000}, "block_count is 100000"),
        ({"embedding_length": 1 << 40}, "embedding_length"),
        ({"embedding_length": "256"}, "embedding_length is '256'"),
        ({"embedding_length": 256.5}, "embedding_length is 256.5"),
        ({"expert_weights_scale": math.nan}, "expert_weights_scale is nan"),
        ({"expert_weights_scale": math.inf}, "expert_weights_scale is inf"),
        ({"expert_weights_norm": 2}, "expert_weights_norm is 2"),
        ({"expert_feed_forward_length": [256, 128]}, "without one common value"),
        ({"expert_feed_forward_length": []}, "without one common value"),
        ({"attention.compress_ratios": "0,4"}, "not a list of numbers"),
    ],
)
def test_values_that_are_not_covered(changes: dict[str, object], words: str):
    assert words in problem(changes)


def test_several_wrong_values_are_named_at_once():
    text = problem({"expert_gating_func": 2, "embedding_length": "x", "block_count": None})
    assert all(word in text for word in ("gating_func is 2", "embedding_length", "block_count"))


# --- other files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "deepseek2", "", 7])
def test_other_architectures_are_named(name: object):
    assert f"architecture {name!r}, not 'deepseek4'" in problem({"general.architecture": name})


def test_files_that_are_not_main_models():
    assert "no key general.architecture" in problem({"general.architecture": None})
    assert "DSpark" in problem({"general.architecture": "dflash"})
    assert "support file" in problem({"general.architecture": "deepseek4_mtp_support"})


def test_a_support_file_is_not_reported_as_thirty_missing_keys(golden_dir: Path):
    with pytest.raises(ModelFileError, match="MTP support file, not a main model"):
        ModelConfig.from_gguf(GgufFile.open(golden_dir / "tiny-f32.mtp-support.gguf"))


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.sampled_from([0, 1, 2, 4, 128, 4096, 1e-6, 0.5]),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(-2, 200), st.floats(), st.text(max_size=2)), max_size=6),
    st.lists(st.lists(st.integers(0, 3), max_size=2), max_size=2),
)


@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(st.dictionaries(st.sampled_from(sorted(small())), VALUES, min_size=1, max_size=4))
def test_any_values_give_a_configuration_or_an_error(changes: dict[str, object]):
    keys = {**small(), **changes}
    keys = {key: value for key, value in keys.items() if value is not None}
    try:
        config = ModelConfig.from_gguf(HeaderOnly(keys))
    except ModelFileError:
        return
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        wanted = {"int": int, "float": float, "bool": bool}.get(str(field.type), tuple)
        assert type(value) is wanted, field.name
    assert len(config.ratios) >= config.layers
    assert len(config.clamp) == len(config.clamp_shared) == config.layers + 1
