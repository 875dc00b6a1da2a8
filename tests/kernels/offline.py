"""Compiles every kernel launch of a step of DeepSeek-V4-Flash for a GPU that is not there.

Run as a script in its own process: `offline.py ARCH [NAME[:MOST] ...]`, with ARCH as 90 (CUDA) or
gfx942 (ROCm). The model has the published dimensions and lies on torch's `meta` device; launches
are compiled instead of run, with the arguments, constants and options that a GPU would get. Prints
one line per kernel and a JSON summary last.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ds4flow.cache import KVCache
from ds4flow.kernels.gpu.backend import GpuKernels
from ds4flow.kernels.gpu.launch import Options
from ds4flow.kernels.gpu.pack import TYPES as PACKED
from ds4flow.model.layer import layer_forward
from ds4flow.model.profile import find_profile
from ds4flow.model.rope import Rope
from ds4flow.quants import QTensor
from ds4flow.synth.presets import FLASH
from ds4flow.synth.rehearsal import Synthesis, shortened

SHARED_LIMIT = {"cuda": 232448, "hip": 65536}  # bytes that one block may use: sm_90, gfx942
MATRIX_INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma", "v_mfma")
ASSEMBLY = {"cuda": ("ptx", "cubin"), "hip": ("amdgcn", "hsaco")}
TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Compiler:
    """A launcher that compiles each distinct launch once."""

    def __init__(self, arch: str, wanted: list[str]) -> None:
        rocm = arch.startswith("gfx")
        self.target = GPUTarget("hip", arch, 64) if rocm else GPUTarget("cuda", int(arch), 32)
        parts = [item.partition(":") for item in wanted]
        self.wanted = {name: int(count or 1000) for name, _, count in parts}
        self.results: dict[str, dict[str, Any]] = {}
        self.failures: list[str] = []
        self.seen: set[str] = set()

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: tuple,
        constants: Mapping[str, Any],
        options: Options,
    ) -> None:
        assert len(grid) <= 3
        assert all(g >= 1 for g in grid)
        assert all(g <= 65535 for g in grid[1:])
        name = kernel.fn.__name__
        if self.wanted and self.wanted.get(name, 0) <= 0:
            return
        signature, attrs = {}, {}
        assert (
            "M" not in kernel.arg_names
            or kernel.params[kernel.arg_names.index("M")].do_not_specialize
        ), f"{name} would be compiled for each number of rows"
        for i, (key, value) in enumerate(zip(kernel.arg_names, args, strict=False)):
            if isinstance(value, torch.Tensor):
                signature[key] = TYPES[value.dtype]
                attrs[(i,)] = [["tt.divisibility", 16]]
            elif isinstance(value, float):
                signature[key] = "fp32"
            elif kernel.params[i].do_not_specialize:
                signature[key] = "i32"
            elif value == 1:
                signature[key], constants = "constexpr", {**constants, key: 1}
            else:
                signature[key] = "i32"
                if value % 16 == 0:
                    attrs[(i,)] = [["tt.divisibility", 16]]
        assert len(args) + len([k for k in constants if k not in signature]) == len(
            kernel.arg_names
        )
        signature |= {key: "constexpr" for key in constants}
        signature = {key: signature[key] for key in kernel.arg_names}
        label = f"{name} {signature} {dict(constants)}"
        if label in self.seen:
            return
        self.seen.add(label)
        if self.wanted:
            self.wanted[name] -= 1
        source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants), attrs=attrs)
        try:
            built = triton.compile(source, target=self.target, options=options._asdict())
        except Exception:  # go on, so that one run shows all failures
            self.failures.append(f"{label}\n{traceback.format_exc()}")
            return
        text, binary = (built.asm[name] for name in ASSEMBLY[self.target.backend])
        self.results[label] = {
            "kernel": name,
            "shared": built.metadata.shared,
            "mma": sum(text.count(op) for op in MATRIX_INSTRUCTIONS),
            "binary": len(binary),
            "constants": {k: v for k, v in constants.items() if isinstance(v, int | str)},
        }
        if built.metadata.shared > SHARED_LIMIT[self.target.backend]:
            self.failures.append(f"{label}\n{built.metadata.shared} bytes of shared memory")
        print(name, self.results[label], flush=True)


def step(compiler: Compiler, mix: str, profile: str, count: int) -> None:
    """Every launch of a pass of `count` rows, and of a draft step."""
    meta = torch.device("meta")
    config = shortened(FLASH, 4)  # window only (hashed), ratio 4 (hashed), ratio 128 (by score)
    kernels = GpuKernels(config, find_profile(profile), device=meta, launcher=compiler)
    synth = Synthesis(config, mix, meta)
    trunk, mtp = synth.trunk(), synth.mtp()
    cache = KVCache(config, context=32768, draft_max=4, device=meta)
    ropes = {flag: Rope(config, compressed=flag, exact=False) for flag in (False, True)}
    for rope in ropes.values():
        kernels.reserve(rope, 1024)
    tokens = torch.zeros(count, dtype=torch.int64, device=meta)
    start = torch.zeros(1, dtype=torch.int64, device=meta)
    embedded = kernels.embed(trunk.embed, tokens)
    streams = embedded[:, None, :].expand(-1, config.streams, -1).contiguous()
    for layer, rows in zip(trunk.layers, cache.layers, strict=True):
        rope = ropes[bool(layer.ratio)]
        streams = layer_forward(kernels, streams, tokens, layer, rows, rope, start)
    head = trunk.head
    kernels.top2(kernels.linear(kernels.hc_head(streams, head.hc, head.norm), trunk.output))
    kernels.rms_norm(streams, mtp.hnorm)
    kernels.rms_norm(streams, None)
    kernels.linear(embedded, mtp.e_proj)
    layer_forward(kernels, streams, tokens, mtp.layer, cache.mtp, ropes[False], start)
    kernels.linear(kernels.hc_head(streams, mtp.head.hc, mtp.head.norm), trunk.output)


def products(compiler: Compiler) -> None:
    """A product with a weight of every type."""
    meta = torch.device("meta")
    config = shortened(FLASH, 1)
    kernels = GpuKernels(config, find_profile("plain"), device=meta, launcher=compiler)
    synth = Synthesis(config, "q2", meta)
    x = torch.zeros(3, config.dim, device=meta)
    for kind in PACKED:
        if kind == "BF16":
            data = torch.zeros(512, config.dim, dtype=torch.bfloat16, device=meta)
            weight = QTensor("bf16", kind, (512, config.dim), data)
        else:
            weight = synth.matrix(kind, 512, config.dim)
        kernels.linear(x, weight)


def main() -> None:
    """Compile for the architecture on the command line, all kernels or those named."""
    compiler = Compiler(sys.argv[1], sys.argv[2:])
    if compiler.target.backend == "hip":
        torch.version.hip = "of the test"  # what the kernels ask for the products they may use
    step(compiler, "q2", "official", 3)
    step(compiler, "q4", "plain", 1)
    step(compiler, "mxfp4", "plain", 1)
    products(compiler)
    for failure in compiler.failures:
        print(failure, file=sys.stderr)
    print(json.dumps(list(compiler.results.values())))
    sys.exit(bool(compiler.failures))


if __name__ == "__main__":
    main()
