"""Random weights in the stored formats."""

import gguf
import numpy as np
import torch

from ds4flow.quants import QTensor

HALVES = {"Q8_0": (0,), "Q4_K": (0, 2), "Q2_K": (80, 82), "IQ2_XXS": (0,)}


def stored_weight(type_name: str, rows: int, columns: int, seed: int = 0) -> QTensor:
    """Random stored weights: every code and sub-scale occurs, block scales are moderate halves."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, columns)).astype(np.float32)
    if type_name in ("F32", "F16", "BF16"):
        kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[type_name]
        return QTensor("w", type_name, (rows, columns), torch.from_numpy(values).to(kind))
    size, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    blocks = rng.integers(0, 256, (rows, columns // size, width), dtype=np.uint8)
    for at in HALVES.get(type_name, ()):
        scales = (0.1 * rng.standard_normal(blocks.shape[:2])).astype(np.float16)
        blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    if type_name == "MXFP4":
        blocks[:, :, 0] = rng.integers(118, 130, blocks.shape[:2])
    return QTensor("w", type_name, (rows, columns), torch.from_numpy(blocks.reshape(rows, -1)))
