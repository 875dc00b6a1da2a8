"""Binding tensors: both MTP layouts agree bit for bit, and every misfit is named, all at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds4flow.errors import ModelFileError, TruncatedFileError
from ds4flow.gguf import GgufFile
from ds4flow.model.config import ModelConfig
from ds4flow.model.mtp_weights import find_mtp_layout, load_mtp
from ds4flow.model.slots import layer_slots, trunk_slots
from ds4flow.model.weights import MtpWeights, TrunkWeights, load_trunk
from ds4flow.quants import QTensor
from tests.gguf_files import Raw, bfloat16, contents, split, tensor, write

NAMES = ("tiny-f32", "tiny-iq2", "tiny-q4k")
Tensors = dict[str, Raw]
Metadata = dict[str, object]
Change = Callable[[Metadata, Tensors], None]


def open_main(golden_dir: Path, name: str = "tiny-f32") -> tuple[GgufFile, ModelConfig]:
    file = GgufFile.open(golden_dir / f"{name}.gguf")
    return file, ModelConfig.from_gguf(file)


def changed(source: Path, target: Path, change: Change) -> GgufFile:
    """A copy of a file after `change(metadata, tensors)`."""
    metadata, tensors = contents(source)
    change(metadata, tensors)
    return GgufFile.open(write(target, metadata, tensors))


def load(file: GgufFile) -> TrunkWeights:
    return load_trunk(file, ModelConfig.from_gguf(file))


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(ModelFileError) as caught:
        action()
    assert not isinstance(caught.value, TruncatedFileError)
    assert caught.value.fix
    return caught.value.what


def assert_equal(a: Any, b: Any, where: str = "weights") -> None:
    """Same structure, same stored bytes; names of matrices and the layout's own name may differ."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), (
            where
        )
    elif isinstance(a, QTensor):
        assert (a.type, a.shape) == (b.type, b.shape), where
        assert_equal(a.data, b.data, where)
    elif dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            if field.name != "layout":
                place = f"{where}.{field.name}"
                assert_equal(getattr(a, field.name), getattr(b, field.name), place)
    elif isinstance(a, tuple):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{where}[{i}]")
    else:
        assert a == b, where


def leaves(part: Any) -> list[QTensor | torch.Tensor]:
    if isinstance(part, QTensor | torch.Tensor):
        return [part]
    if isinstance(part, tuple):
        return [leaf for one in part for leaf in leaves(one)]
    if dataclasses.is_dataclass(part):
        return [x for f in dataclasses.fields(part) for x in leaves(getattr(part, f.name))]
    return []


# --- the trunk ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_of_a_main_file_is_used_once(golden_dir: Path, name: str):
    file, config = open_main(golden_dir, name)
    assert {slot.name for slot in trunk_slots(config)} == set(file.tensors)
    weights = load_trunk(file, config)
    parts = leaves(weights)
    assert len(parts) == len(file.tensors)
    stored = {p.name for p in parts if isinstance(p, QTensor)}
    assert len(stored) == sum(isinstance(p, QTensor) for p in parts)
    for part in parts:
        if isinstance(part, QTensor):
            assert np.shares_memory(_bytes(part.data), file.array(part.name))
        else:
            assert part.dtype == (torch.int32 if part.shape[0] == config.vocab else torch.float32)
            # a copy: a write into the mapping would end the process
            assert not any(np.may_share_memory(part.numpy(), data) for data in file._data)


def _bytes(data: torch.Tensor) -> np.ndarray:
    return data.view(torch.uint8).numpy()


def test_shapes_and_values_land_where_they_belong(golden_dir: Path):
    file, c = open_main(golden_dir, "tiny-iq2")
    weights = load_trunk(file, c)
    assert [layer.ratio for layer in weights.layers] == [0, 0, 4, 128, 4, 128]
    assert [layer.index for layer in weights.layers] == list(range(6))
    for layer in weights.layers:
        stem = f"blk.{layer.index}."
        hashed = layer.index < c.hash_layers
        assert (layer.moe.table is not None, layer.moe.bias is None) == (hashed, hashed)
        assert (layer.compressor is not None) == (layer.ratio != 0)
        assert (layer.indexer is not None) == (layer.ratio == 4)
        assert layer.out_a.shape == (c.groups * c.o_rank, c.head_dim * c.heads // c.groups)
        assert layer.moe.down.shape == (c.experts, c.dim, c.expert_dim)
        np.testing.assert_array_equal(layer.sinks, file.array(f"{stem}attn_sinks.weight"))
        np.testing.assert_array_equal(layer.kv_norm, file.array(f"{stem}attn_kv_a_norm.weight"))
        np.testing.assert_array_equal(layer.hc_ffn.base, file.array(f"{stem}hc_ffn_base.weight"))
        if layer.moe.table is not None:
            table = file.array(f"{stem}ffn_gate_tid2eid.weight")
            np.testing.assert_array_equal(layer.moe.table, table)
        if layer.compressor is not None:
            ape = file.array(f"{stem}attn_compressor_ape.weight")
            assert ape.dtype == np.float16
            np.testing.assert_array_equal(layer.compressor.ape, ape.astype(np.float32))
            assert layer.compressor.ape.shape[0] == layer.ratio
    assert weights.layers[2].indexer is not None
    assert weights.layers[2].indexer.compressor.norm.shape == (c.index_dim,)


def test_clamps_follow_their_layer(golden_dir: Path, tmp_path: Path):
    def change(metadata: Metadata, tensors: Tensors) -> None:
        metadata["deepseek4.swiglu_clamp_exp"] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        metadata["deepseek4.swiglu_clamp_shexp"] = [7.0] * 5 + [8.0]

    layers = load(changed(golden_dir / "tiny-f32.gguf", tmp_path / "m.gguf", change)).layers
    assert [layer.clamp for layer in layers] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert [layer.clamp_shared for layer in layers] == [7.0] * 5 + [8.0]


def test_a_split_model_gives_the_same_weights(golden_dir: Path, tmp_path: Path):
    metadata, tensors = contents(golden_dir / "tiny-q4k.gguf")
    paths = split(tmp_path, "tiny", metadata, tensors, 3)
    whole = load(GgufFile.open(golden_dir / "tiny-q4k.gguf"))
    for path in (paths[1], tmp_path):
        assert_equal(load(GgufFile.open(path)), whole)


def test_wide_tables_become_int32(golden_dir: Path, tmp_path: Path):
    name = "blk.0.ffn_gate_tid2eid.weight"

    def widen(metadata: Metadata, tensors: Tensors) -> None:
        ids = np.frombuffer(tensors[name].data, np.int32).reshape(tensors[name].shape)
        tensors[name] = tensor(ids.astype(np.int64))

    wide = load(changed(golden_dir / "tiny-f32.gguf", tmp_path / "m.gguf", widen))
    assert_equal(wide, load(GgufFile.open(golden_dir / "tiny-f32.gguf")))


@pytest.mark.parametrize("wrong", [-1, 8, 1 << 20])
def test_expert_ids_outside_the_experts_are_refused(golden_dir: Path, tmp_path: Path, wrong: int):
    name = "blk.1.ffn_gate_tid2eid.weight"

    def spoil(metadata: Metadata, tensors: Tensors) -> None:
        ids = np.frombuffer(tensors[name].data, np.int32).reshape(tensors[name].shape).copy()
        ids[319, 1] = wrong
        tensors[name] = tensor(ids)

    file = changed(golden_dir / "tiny-f32.gguf", tmp_path / "m.gguf", spoil)
    text = refused(lambda: load(file))
    assert name in text
    assert str(wrong) in text
    assert "8 experts" in text


# --- misfits --------------------------------------------------------------------------------------


def test_everything_wrong_is_reported_at_once(golden_dir: Path, tmp_path: Path):
    def spoil(metadata: Metadata, tensors: Tensors) -> None:
        del tensors["output_norm.weight"]
        tensors["blk.2.attn_norms.weight"] = tensors.pop("blk.2.attn_norm.weight")
        tensors["blk.3.attn_kv.weight"] = tensor(np.zeros((192, 64), np.float32))
        tensors["blk.4.attn_sinks.weight"] = tensor(np.zeros(4, np.int32))
        tensors["blk.1.ffn_gate_tid2eid.weight"] = tensor(np.zeros((320, 2), np.float32))
        tensors["blk.5.attn_q_a.weight"] = tensor(np.zeros((64, 128), np.int32))

    file = changed(golden_dir / "tiny-f32.gguf", tmp_path / "spoilt.gguf", spoil)
    text = refused(lambda: load(file))
    for words in (
        "spoilt.gguf",
        "tensors missing: output_norm.weight, blk.2.attn_norm.weight",
        "blk.3.attn_kv.weight has shape (192, 64), the metadata ask for (192, 128)",
        "blk.4.attn_sinks.weight is of type I32, allowed: F32, F16, BF16",
        "blk.1.ffn_gate_tid2eid.weight is of type F32, allowed: I32 or I64",
        "blk.5.attn_q_a.weight is of type I32, allowed: F32, F16, BF16 or a block type",
    ):
        assert words in text


@pytest.mark.parametrize(("count", "covered"), [(7, 6), (5, 6)])
def test_metadata_and_tensors_disagree_about_blocks(
    golden_dir: Path, tmp_path: Path, count: int, covered: int
):
    def change(metadata: Metadata, tensors: Tensors) -> None:
        metadata["deepseek4.block_count"] = count
        metadata["deepseek4.nextn_predict_layers"] = 1
        for key in ("exp", "shexp"):
            metadata[f"deepseek4.swiglu_clamp_{key}"] = [10.0] * 7

    file = changed(golden_dir / "tiny-f32.gguf", tmp_path / "m.gguf", change)
    text = refused(lambda: load(file))
    assert f"metadata says {count} blocks, tensors cover {covered}" in text
    assert ("blk.6.* (all 24)" in text) == (count == 7)


def test_a_pruned_layer_is_named(golden_dir: Path, tmp_path: Path):
    def prune(metadata: Metadata, tensors: Tensors) -> None:
        old = tensors["blk.3.ffn_up_exps.weight"]
        tensors["blk.3.ffn_up_exps.weight"] = Raw(
            old.type, (6, *old.shape[1:]), old.data[: len(old.data) // 8 * 6]
        )

    file = changed(golden_dir / "tiny-iq2.gguf", tmp_path / "m.gguf", prune)
    assert "blk.3.ffn_up_exps.weight has shape (6, 256, 256)" in refused(lambda: load(file))


def test_an_mtp_file_given_as_the_model(golden_dir: Path):
    file = GgufFile.open(golden_dir / "tiny-f32.llama-mtp.gguf")
    text = refused(lambda: load(file))
    assert "is an MTP sidecar" in text
    assert "blk.6" in text


# --- both MTP layouts -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_both_layouts_give_the_same_bits(golden_dir: Path, name: str):
    main, config = open_main(golden_dir, name)
    support = GgufFile.open(golden_dir / f"{name}.mtp-support.gguf")
    sidecar = GgufFile.open(golden_dir / f"{name}.llama-mtp.gguf")
    layouts = [find_mtp_layout(f) for f in (support, sidecar, main)]
    assert layouts == ["mtp.0", "nextn", None]
    first, second = load_mtp(support, config, main), load_mtp(sidecar, config, main)
    assert_equal(first, second)
    assert (first.layout, second.layout) == ("mtp.0", "nextn")
    assert first.degraded is None
    assert first.layer.index == config.layers
    assert first.layer.moe.bias is not None
    # eh_proj is [e_proj | h_proj]: the half for the embedding comes first
    joined = QTensor("eh", second.e_proj.type, (config.dim, 2 * config.dim), torch.empty(0))
    stored = torch.cat((first.e_proj.data, first.h_proj.data), dim=-1)
    whole = dataclasses.replace(joined, data=stored.contiguous())
    array = sidecar.array("blk.6.nextn.eh_proj.weight")
    np.testing.assert_array_equal(_bytes(whole.data), array.view(np.uint8))
    assert second.e_proj.data.is_contiguous()
    assert second.h_proj.data.is_contiguous()
    # without the trunk file the same
    assert_equal(load_mtp(sidecar, config), second)


@pytest.mark.parametrize("store", [np.float16, "bf16", np.float32])
def test_vectors_and_small_matrices_of_any_float_type(golden_dir: Path, tmp_path: Path, store: Any):
    """The same values, whatever their type in the file; the router and the vectors of published
    MTP files are float32 where the main file has half."""
    rough = {".norm.", "norm.", "sinks", "hc_", "gate_inp", "probs_b"}

    def convert(metadata: Metadata, tensors: Tensors) -> None:
        for name, raw in tensors.items():
            if any(word in name for word in rough):
                values = np.frombuffer(raw.data, np.float32).reshape(raw.shape)
                coarse = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
                coarse = coarse.astype(np.float16).astype(np.float32)
                coarse = (coarse.view(np.uint32) & 0xFFFF0000).view(np.float32)
                tensors[name] = (
                    bfloat16(coarse) if store == "bf16" else tensor(coarse.astype(store))
                )

    main, config = open_main(golden_dir)
    source = golden_dir / "tiny-f32.mtp-support.gguf"
    weights = load_mtp(changed(source, tmp_path / "m.gguf", convert), config, main)
    exact = load_mtp(GgufFile.open(source), config, main)
    wanted = {np.float16: "F16", "bf16": "BF16", np.float32: "F32"}[store]
    assert weights.layer.moe.router.type == weights.head.hc.fn.type == wanted
    for ours, theirs in zip(leaves(weights), leaves(exact), strict=True):
        if isinstance(ours, QTensor):
            assert isinstance(theirs, QTensor)
            ours, theirs = ours.float(), theirs.float()
        assert isinstance(theirs, torch.Tensor)
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-14)


def merge(golden_dir: Path, target: Path, name: str, layout: str) -> GgufFile:
    """Trunk and MTP block in one file, as a careless merge makes it."""
    metadata, tensors = contents(golden_dir / f"{name}.gguf")
    sidecar, block = contents(golden_dir / f"{name}.{layout}.gguf")
    if layout == "llama-mtp":
        metadata = sidecar
    for key, raw in block.items():
        tensors.setdefault(key, raw)
    return GgufFile.open(write(target, metadata, tensors))


@pytest.mark.parametrize("name", ["tiny-f32", "tiny-q4k"])
def test_nextn_tensors_beside_the_trunk_are_degraded(golden_dir: Path, tmp_path: Path, name: str):
    file = merge(golden_dir, tmp_path / "both.gguf", name, "llama-mtp")
    main, main_config = open_main(golden_dir, name)
    config = ModelConfig.from_gguf(file)
    assert config == main_config
    trunk = load_trunk(file, config)
    assert_equal(trunk, load_trunk(main, main_config))
    merged = load_mtp(file, config, file)
    assert merged.degraded is not None
    assert "trunk's hyper-connection head" in merged.degraded
    assert_equal(merged.head.hc, trunk.head.hc)
    apart = load_mtp(GgufFile.open(golden_dir / f"{name}.mtp-support.gguf"), config)
    assert not torch.equal(merged.head.hc.fn.data, apart.head.hc.fn.data)
    same = dataclasses.replace(apart.head, hc=merged.head.hc)
    assert_equal(merged, dataclasses.replace(apart, head=same, degraded=merged.degraded))


def test_a_support_block_beside_the_trunk_keeps_its_own_head(golden_dir: Path, tmp_path: Path):
    file = merge(golden_dir, tmp_path / "both.gguf", "tiny-f32", "mtp-support")
    config = ModelConfig.from_gguf(file)
    load_trunk(file, config)
    apart = load_mtp(GgufFile.open(golden_dir / "tiny-f32.mtp-support.gguf"), config)
    assert apart.degraded is None
    assert_equal(load_mtp(file, config, file), apart)


def sidecar_with(golden_dir: Path, target: Path, change: Change, name: str = "tiny-f32") -> Any:
    """Main file, its configuration, and a changed sidecar."""
    main, config = open_main(golden_dir, name)
    return main, config, changed(golden_dir / f"{name}.llama-mtp.gguf", target, change)


def test_without_its_own_norm_the_final_norm_serves(golden_dir: Path, tmp_path: Path):
    def drop(metadata: Metadata, tensors: Tensors) -> None:
        del tensors["blk.6.nextn.shared_head_norm.weight"]

    def drop_both(metadata: Metadata, tensors: Tensors) -> None:
        drop(metadata, tensors)
        del tensors["output_norm.weight"]

    for change in (drop, drop_both):
        main, config, file = sidecar_with(golden_dir, tmp_path / "m.gguf", change)
        norm = load_mtp(file, config, main).head.norm
        np.testing.assert_array_equal(norm, main.array("output_norm.weight"))
    assert "missing: output_norm.weight" in refused(lambda: load_mtp(file, config))


def test_own_embedding_and_output_are_taken(golden_dir: Path, tmp_path: Path):
    embed = np.random.default_rng(1).standard_normal((320, 128)).astype(np.float32)

    def add(metadata: Metadata, tensors: Tensors) -> None:
        tensors["blk.6.nextn.embed_tokens.weight"] = tensor(embed)
        tensors["blk.6.nextn.shared_head_head.weight"] = tensor(2 * embed)

    main, config, file = sidecar_with(golden_dir, tmp_path / "m.gguf", add)
    weights = load_mtp(file, config, main)
    assert weights.embed is not None
    assert weights.output is not None
    np.testing.assert_array_equal(weights.embed.float(), embed)
    np.testing.assert_array_equal(weights.output.float(), 2 * embed)
    plain = load_mtp(GgufFile.open(golden_dir / "tiny-f32.llama-mtp.gguf"), config, main)
    assert plain.embed is plain.output is None


def test_a_block_across_the_middle_is_decoded(golden_dir: Path, tmp_path: Path):
    """D = 128: a joined row of 256 is one Q4_K block, which has no byte to split it at."""
    data = np.random.default_rng(2).integers(0, 256, (128, 144), dtype=np.uint8)
    data[:, [1, 3]] &= 0x3B  # small finite scales

    def quantise(metadata: Metadata, tensors: Tensors) -> None:
        tensors["blk.6.nextn.eh_proj.weight"] = Raw("Q4_K", (128, 256), data.tobytes())

    main, config, file = sidecar_with(golden_dir, tmp_path / "m.gguf", quantise)
    weights = load_mtp(file, config, main)
    whole = QTensor("eh", "Q4_K", (128, 256), torch.from_numpy(data)).float()
    assert torch.equal(weights.e_proj.float(), whole[:, :128])
    assert torch.equal(weights.h_proj.float(), whole[:, 128:])
    assert weights.e_proj.shape == weights.h_proj.shape == (128, 128)


def test_the_block_takes_its_own_ratio(golden_dir: Path, tmp_path: Path):
    """Layer 1 compressed and the block not; then the block itself compressed."""

    def compress(ratio: int) -> Change:
        def change(metadata: Metadata, tensors: Tensors) -> None:
            metadata["deepseek4.attention.compress_ratios"] = [128, 128, 4, 128, 4, 128, ratio]

        return change

    main = golden_dir / "tiny-f32.gguf"
    support = GgufFile.open(golden_dir / "tiny-f32.mtp-support.gguf")
    config = ModelConfig.from_gguf(changed(main, tmp_path / "m.gguf", compress(0)))
    weights = load_mtp(support, config)
    assert weights.layer.ratio == 0
    assert weights.layer.compressor is None
    config = ModelConfig.from_gguf(changed(main, tmp_path / "m.gguf", compress(4)))
    text = refused(lambda: load_mtp(support, config))
    assert "mtp.0.attn_compressor_kv.weight" in text
    assert "mtp.0.indexer.proj.weight" in text

    def add_compressor(metadata: Metadata, tensors: Tensors) -> None:
        for slot in layer_slots("mtp.0.", config, 4, hashed=False):
            tensors.setdefault(slot.name, tensor(np.ones(slot.shape, np.float32)))

    file = changed(support.path, tmp_path / "support.gguf", add_compressor)
    layer = load_mtp(file, config).layer
    assert layer.ratio == 4
    assert layer.compressor is not None
    assert layer.indexer is not None


# --- MTP files that do not fit --------------------------------------------------------------------


def test_a_file_with_neither_layout_says_what_was_looked_for(golden_dir: Path):
    main, config = open_main(golden_dir)
    text = refused(lambda: load_mtp(main, config, main))
    assert "mtp.0.e_proj.weight" in text
    assert "blk.N.nextn.eh_proj.weight" in text


@pytest.mark.parametrize(
    "name", ["mtp.0.main_proj.weight", "mtp.2.attn_norm.weight", "dspark.w", "mtp.0.markov_head.w"]
)
def test_the_later_drafter_is_named(golden_dir: Path, tmp_path: Path, name: str):
    _, config = open_main(golden_dir)
    keys = {"general.architecture": "deepseek4"}
    file = GgufFile.open(write(tmp_path / "m.gguf", keys, {name: tensor(np.ones(4, np.float32))}))
    assert "DSpark" in refused(lambda: load_mtp(file, config))
    keys = {"general.architecture": "dflash"}
    file = GgufFile.open(write(tmp_path / "n.gguf", keys, {}))
    assert "DSpark" in refused(lambda: load_mtp(file, config))


def test_another_architecture_is_named(golden_dir: Path, tmp_path: Path):
    def rename(metadata: Metadata, tensors: Tensors) -> None:
        metadata["general.architecture"] = "deepseek2"

    main, config, file = sidecar_with(golden_dir, tmp_path / "m.gguf", rename)
    assert "'deepseek2'" in refused(lambda: load_mtp(file, config, main))


def test_the_published_architecture_of_support_files_is_accepted(golden_dir: Path, tmp_path: Path):
    def rename(metadata: Metadata, tensors: Tensors) -> None:
        metadata["general.architecture"] = "deepseek4_mtp_support"
        metadata["deepseek4.expert_count"] = 8

    source = golden_dir / "tiny-f32.mtp-support.gguf"
    main, config = open_main(golden_dir)
    file = changed(source, tmp_path / "m.gguf", rename)
    assert_equal(load_mtp(file, config, main), load_mtp(GgufFile.open(source), config, main))


@pytest.mark.parametrize("layout", ["mtp-support", "llama-mtp"])
def test_the_block_of_another_model(golden_dir: Path, layout: str):
    main, config = open_main(golden_dir, "tiny-f32")
    file = GgufFile.open(golden_dir / f"tiny-q4k.{layout}.gguf")
    text = refused(lambda: load_mtp(file, config, main))
    assert "was made for another model than tiny-f32.gguf" in text
    assert "is 256" in text
    assert "128" in text


def _set(key: str, value: object) -> Change:
    def change(metadata: Metadata, tensors: Tensors) -> None:
        metadata[key] = value

    return change


def _vocabulary(change: Callable[[list[str]], object]) -> Change:
    def apply(metadata: Metadata, tensors: Tensors) -> None:
        tokens = metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, list)
        change(tokens)

    return apply


def _rows(metadata: Metadata, tensors: Tensors) -> None:
    del metadata["deepseek4.vocab_size"]
    tensors["token_embd.weight"] = tensor(np.zeros((321, 128), np.float32))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("deepseek4.expert_count", 16), "expert_count is 16, the model's 8"),
        (_set("deepseek4.attention.sliding_window", 64), "sliding_window is 64"),
        (_set("deepseek4.attention.compress_ratios", [0] * 6 + [128]), "has the ratio 128"),
        (_vocabulary(lambda tokens: tokens.append("extra")), "321 tokens, the model's 320"),
        (_vocabulary(lambda tokens: tokens.__setitem__(7, "other")), "token 7 is 'other'"),
        (_rows, "vocabulary (token_embd.weight) is 321, the model's 320"),
    ],
)
def test_small_differences_are_noticed(
    golden_dir: Path, tmp_path: Path, change: Change, words: str
):
    main, config, file = sidecar_with(golden_dir, tmp_path / "m.gguf", change)
    text = refused(lambda: load_mtp(file, config, main))
    assert "another model than tiny-f32.gguf" in text
    assert words in text


def test_a_block_for_another_depth(golden_dir: Path, tmp_path: Path):
    def shift(metadata: Metadata, tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith("blk.6.")]:
            tensors[name.replace("blk.6.", "blk.9.")] = tensors.pop(name)

    main, config, file = sidecar_with(golden_dir, tmp_path / "m.gguf", shift)
    text = refused(lambda: load_mtp(file, config, main))
    assert "its MTP block is blk.9, after 6 layers it is blk.6" in text


def test_an_incomplete_block_lists_all_that_is_missing(golden_dir: Path, tmp_path: Path):
    def spoil(metadata: Metadata, tensors: Tensors) -> None:
        del tensors["mtp.0.h_proj.weight"]
        del tensors["mtp.0.hc_head_base.weight"]
        tensors["mtp.0.enorm.weight"] = tensor(np.zeros(128, np.int32))

    main, config = open_main(golden_dir)
    file = changed(golden_dir / "tiny-f32.mtp-support.gguf", tmp_path / "m.gguf", spoil)
    text = refused(lambda: load_mtp(file, config, main))
    assert "tensors missing: mtp.0.h_proj.weight, mtp.0.hc_head_base.weight" in text
    assert "mtp.0.enorm.weight is of type I32" in text


@pytest.mark.parametrize("name", NAMES)
def test_a_support_file_has_the_32_published_tensors(golden_dir: Path, name: str):
    main, config = open_main(golden_dir, name)
    file = GgufFile.open(golden_dir / f"{name}.mtp-support.gguf")
    weights: MtpWeights = load_mtp(file, config, main)
    assert len(leaves(weights)) == len(file.tensors) == 32
