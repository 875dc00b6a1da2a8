"""Every kernel launch of a Flash step compiles to machine code for GPUs of NVIDIA and AMD, without
one, within its shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="pip install 'ds4flow[gpu]' for the Triton kernels")

HERE = Path(__file__).parent
KERNELS = {
    "add_experts",
    "add_splits",
    "attend_join",
    "attend_parts",
    "compress_write",
    "embed",
    "experts_in",
    "experts_out",
    "hc_in",
    "hc_out",
    "index_queries",
    "index_rows",
    "index_scores",
    "kv_rows",
    "linear",
    "pool_blocks",
    "pooled_rows",
    "queries",
    "rms_norm",
    "route",
    "select_blocks",
    "swiglu",
    "top2_join",
    "top2_parts",
}


def compiled(arch: int | str, tmp_path: Path, *selection: str) -> list[dict]:
    """Results of `offline.py`, with an empty cache, so that everything is really compiled."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(HERE / "offline.py"), str(arch), *selection],
        env=environment,
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
    )
    print(done.stderr[-4000:])
    assert done.returncode == 0
    return json.loads(done.stdout.splitlines()[-1])


def test_some_kernels_compile_for_sm_90(tmp_path):
    """A product, an attention tile and a row kernel; the tensor cores are used where they should
    be."""
    results = compiled(90, tmp_path, "linear:2", "hc_out:1", "select_blocks:1", "top2_parts:1")
    by_name = {result["kernel"]: result for result in results}
    assert set(by_name) == {"linear", "hc_out", "select_blocks", "top2_parts"}
    assert by_name["linear"]["mma"] > 0
    assert by_name["linear"]["constants"]["TYPE"] == "Q8_0"  # the second one; the first is F16
    assert all(result["binary"] > 0 for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100, "gfx942"])
def test_every_launch_of_a_flash_step_compiles(arch, tmp_path):
    results = compiled(arch, tmp_path)
    assert {result["kernel"] for result in results} == KERNELS
    types = {r["constants"]["TYPE"] for r in results if r["kernel"] == "linear"}
    assert types == {"F32", "F16", "BF16", "Q8_0", "Q4_K", "Q2_K", "IQ2_XXS", "MXFP4"}
    experts = {r["constants"]["GATE"] for r in results if r["kernel"] == "experts_in"}
    assert experts == {"IQ2_XXS", "Q4_K", "MXFP4"}
    for result in results:
        if result["kernel"] in ("linear", "experts_in", "experts_out", "attend_parts"):
            assert result["mma"] > 0
