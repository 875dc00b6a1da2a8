"""Block formats: the bits of the reference decoder, for random blocks and extreme scales."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ds4flow.errors import ModelFileError
from ds4flow.gguf import PLAIN_TYPES, GgufFile
from ds4flow.quants import QTensor, can_decode, dequantize, from_gguf
from tests.gguf_files import Raw, bfloat16, tensor, write

OURS = ("Q8_0", "Q2_K", "Q4_K", "IQ2_XXS", "MXFP4")
OTHERS = ("Q4_0", "Q5_1", "Q3_K", "Q6_K", "IQ2_XS", "IQ3_XXS", "IQ4_XS", "TQ1_0", "NVFP4")
SCALES = {"Q8_0": (0,), "Q2_K": (80, 82), "Q4_K": (0, 2), "IQ2_XXS": (0,)}  # offsets of halves
HALVES = {
    "zero": 0x0000,
    "negative zero": 0x8000,
    "smallest subnormal": 0x0001,
    "negative subnormal": 0x83FF,
    "smallest normal": 0x0400,
    "one": 0x3C00,
    "largest": 0x7BFF,
    "negative largest": 0xFBFF,
    "infinite": 0x7C00,
}


def blocks_of(type_name: str, count: int, seed: int = 0) -> np.ndarray:
    size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]][1]
    return np.random.default_rng(seed).integers(0, 256, (count, size), dtype=np.uint8)


def with_scale(blocks: np.ndarray, type_name: str, *halves: int) -> np.ndarray:
    blocks = blocks.copy()
    for at, half in zip(SCALES[type_name], halves, strict=False):
        blocks[:, at : at + 2] = np.frombuffer(struct.pack("<H", half), np.uint8)
    return blocks


def finite_scales(blocks: np.ndarray, type_name: str) -> np.ndarray:
    """Clear one exponent bit of every half, so that no scale is Inf or NaN."""
    blocks = blocks.copy()
    for at in SCALES.get(type_name, ()):
        blocks[:, at + 1] &= 0xBF
    return blocks


def assert_same_bits(blocks: np.ndarray, type_name: str) -> None:
    kind = GGMLQuantizationType[type_name]
    with np.errstate(all="ignore"):  # infinite scales give NaN on purpose
        expected = gguf.quants.dequantize(blocks, kind)
    width = GGML_QUANT_SIZES[kind][0]
    ours = dequantize(torch.from_numpy(blocks), type_name, (len(blocks), width)).numpy()
    assert ours.dtype == np.float32
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(ours), nan)
    np.testing.assert_array_equal(ours.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


@pytest.mark.parametrize("type_name", OURS)
def test_random_blocks(type_name: str):
    blocks = blocks_of(type_name, 2000)
    assert_same_bits(blocks, type_name)
    assert_same_bits(finite_scales(blocks, type_name), type_name)


@pytest.mark.parametrize("type_name", OTHERS)
def test_types_outside_the_published_files(type_name: str):
    assert can_decode(type_name)
    assert_same_bits(blocks_of(type_name, 50), type_name)


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES.keys())
@pytest.mark.parametrize("type_name", SCALES)
def test_edges_of_the_scales(type_name: str, half: int):
    blocks = blocks_of(type_name, 40, seed=half)
    assert_same_bits(with_scale(blocks, type_name, half), type_name)
    for other in HALVES.values():
        assert_same_bits(with_scale(blocks[:4], type_name, half, other), type_name)
        assert_same_bits(with_scale(blocks[:4], type_name, other, half), type_name)


@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x80, 0x7F])
@pytest.mark.parametrize("type_name", OURS)
def test_extreme_codes(type_name: str, fill: int):
    assert_same_bits(np.full_like(blocks_of(type_name, 2), fill), type_name)


def test_every_mxfp4_exponent_and_code():
    blocks = np.zeros((256, 17), np.uint8)
    blocks[:, 0] = np.arange(256)
    blocks[:, 1:] = np.arange(16) * 16 + np.arange(16)[::-1]
    assert_same_bits(blocks, "MXFP4")


def test_every_iq2_xxs_codebook_entry_and_sign_pattern():
    blocks = np.zeros((512, 66), np.uint8)
    blocks[:, :2] = np.frombuffer(struct.pack("<H", 0x3C00), np.uint8)
    words = np.zeros((512, 8, 2), np.uint32)
    index = np.arange(512 * 8).reshape(512, 8)
    for octet in range(4):
        words[..., 0] |= ((index + 61 * octet) % 256).astype(np.uint32) << np.uint32(8 * octet)
        words[..., 1] |= ((index + 37 * octet) % 128).astype(np.uint32) << np.uint32(7 * octet)
    words[..., 1] |= (index % 16).astype(np.uint32) << np.uint32(28)
    blocks[:, 2:] = words.reshape(512, 16).view(np.uint8)
    assert_same_bits(blocks, "IQ2_XXS")


def test_plain_types():
    values = torch.tensor([[1.0, -0.0, 3.0e-5], [65504.0, 0.1, -2.0]])
    for kind, dtype in (("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)):
        ours = dequantize(values.to(dtype), kind, (2, 3))
        assert ours.dtype == torch.float32
        assert torch.equal(ours, values.to(dtype).float())


@pytest.mark.parametrize("type_name", OURS)
def test_no_step_depends_on_the_device(type_name: str):
    """The meta device computes nothing, but refuses mixed devices and copies to numpy."""
    kind = GGMLQuantizationType[type_name]
    blocks = torch.from_numpy(blocks_of(type_name, 6)).to("meta")
    shape = (2, 3, GGML_QUANT_SIZES[kind][0])
    assert dequantize(blocks, type_name, shape).shape == shape


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_name", [*OURS, "Q6_K"])
def test_rows_that_are_not_whole_blocks_are_refused(type_name: str):
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    for width in (block - 1, block + 1, block // 2, 1, 0):
        with pytest.raises(ModelFileError, match=f"not whole {type_name} blocks of {block}"):
            dequantize(torch.zeros(2, size, dtype=torch.uint8), type_name, (2, width))
    # two halves of a block make a block, but not rows of blocks
    with pytest.raises(ModelFileError, match="not whole"):
        dequantize(torch.zeros(1, size, dtype=torch.uint8), type_name, (2, block // 2))


def test_wrong_amounts_of_bytes_are_refused():
    with pytest.raises(ModelFileError, match="need 68 bytes"):
        dequantize(torch.zeros(1, 34, dtype=torch.uint8), "Q8_0", (2, 32))
    with pytest.raises(ModelFileError, match="int8"):
        dequantize(torch.zeros(2, 34, dtype=torch.int8), "Q8_0", (2, 32))


@pytest.mark.parametrize("type_name", ["Q8_1", "Q8_K", "Q9_9", "QK_K", "np", "Q1_0"])
def test_types_without_a_decoder_are_refused(type_name: str):
    assert not can_decode(type_name)
    with pytest.raises(ModelFileError, match=type_name):
        dequantize(torch.zeros(1, 32, dtype=torch.uint8), type_name, (1, 32))


# --- tensors of files -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-f32", "tiny-iq2", "tiny-q4k"])
def test_every_tensor_of_the_golden_files(golden_dir: Path, name: str):
    file = GgufFile.open(golden_dir / f"{name}.gguf")
    for tensor_name, info in file.tensors.items():
        ours = from_gguf(file, tensor_name)
        array = file.array(tensor_name)
        assert (ours.type, ours.shape, ours.nbytes) == (info.type, info.shape, info.nbytes)
        assert np.shares_memory(ours.data.numpy(), array)
        if info.type == "I32":
            np.testing.assert_array_equal(ours.data.numpy(), array)
            continue
        expected = gguf.quants.dequantize(array, GGMLQuantizationType[info.type])
        np.testing.assert_array_equal(
            ours.float().numpy().view(np.uint32), expected.view(np.uint32).reshape(info.shape)
        )


def test_stored_types_of_a_file(tmp_path: Path):
    values = np.array([[1.0, -2.5], [0.125, 3.0]], np.float32)
    path = write(
        tmp_path / "types.gguf",
        {},
        {
            "f32": tensor(values),
            "f16": tensor(values.astype(np.float16)),
            "bf16": bfloat16(values),
            "i64": tensor(np.array([[1, 2]], np.int64)),
        },
    )
    file = GgufFile.open(path)
    dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    for name, dtype in dtypes.items():
        weight = from_gguf(file, name)
        assert weight.data.dtype == dtype
        assert torch.equal(weight.float(), torch.from_numpy(values))
    assert from_gguf(file, "i64").data.tolist() == [[1, 2]]
    assert set(dtypes) | {"i64"} <= {name.lower() for name in PLAIN_TYPES}


@pytest.fixture
def stack(tmp_path: Path) -> QTensor:
    """Four experts of three rows of two Q8_0 blocks."""
    blocks = finite_scales(blocks_of("Q8_0", 4 * 3 * 2, seed=5), "Q8_0")
    raw = Raw("Q8_0", (4, 3, 64), blocks.tobytes())
    return from_gguf(GgufFile.open(write(tmp_path / "stack.gguf", {}, {"w": raw})), "w")


def test_an_expert_is_a_view(stack: QTensor):
    whole = stack.float()
    assert stack.nbytes == 4 * 3 * 68
    for number in range(4):
        one = stack.expert(number)
        assert one.shape == (3, 64)
        assert one.nbytes == 3 * 68
        assert torch.equal(one.float(), whole[number])
        assert one.data.data_ptr() == stack.data.data_ptr() + number * one.nbytes


def test_rows_decode_only_the_rows_asked_for(stack: QTensor):
    matrix = stack.expert(2)
    whole = matrix.float()
    for index in ([0], [2, 0, 2], [1, 1], []):
        assert torch.equal(matrix.rows(index), whole[index].reshape(-1, 64))
        assert torch.equal(matrix.rows(torch.tensor(index, dtype=torch.long)), matrix.rows(index))
    with pytest.raises(IndexError):
        matrix.rows([3])


def test_moving_keeps_the_stored_form(stack: QTensor):
    moved = stack.to("meta")
    assert moved.data.device.type == "meta"
    assert (moved.type, moved.shape, moved.nbytes) == (stack.type, stack.shape, stack.nbytes)
