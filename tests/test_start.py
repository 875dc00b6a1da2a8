"""What a run does before its first token, held by counts and by what is imported: no timing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.command import ds4flow

# Imported by nothing that a plain run on the CPU needs; each takes from 0.05 to 1 second.
UNNEEDED = (
    "IPython",
    "huggingface_hub",
    "matplotlib",
    "pandas",
    "requests",
    "rich",
    "scipy.linalg",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "triton",
)

CODE = """
import io, json, sys
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from ds4flow import preload
from ds4flow.cli import main

composed, at_first_text = [], []
compose = ConfigLoaderImpl.load_configuration

def counted(*arguments, **named):
    composed.append("torch" in sys.modules)
    return compose(*arguments, **named)

class Output(io.BytesIO):
    def write(self, data):
        if not at_first_text:
            at_first_text.extend(sys.modules)
        return super().write(data)

ConfigLoaderImpl.load_configuration = counted
main(["run", "--cfg", "job"], standalone_mode=False)
shown = [name for name in ("torch", "numba", "tokenizers") if name in sys.modules]
composed.clear()
loading = preload.begin()
if loading is not None:
    loading.join()
shown += ["torch"] if "torch" in sys.modules else []
mapped = loading is None or "libtorch_cpu" in open("/proc/self/maps").read()
output, sys.stdout = sys.stdout, io.TextIOWrapper(Output())
main(["run", "-n", "2"], standalone_mode=False)
found = {"shown": shown, "mapped": mapped, "composed": composed, "modules": at_first_text}
print(json.dumps(found), file=output)
"""


@pytest.mark.usefixtures("alone")
def test_a_run_composes_once_and_imports_what_it_needs() -> None:
    ds4flow("run", "-n", "2", code=0)  # compiles the kernels where they are not yet
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["shown"] == []
    assert found["mapped"]
    assert found["composed"] == [False]  # once, before torch is imported
    modules = set(found["modules"])
    assert {"torch", "ds4flow.kernels.cpu.linking"} <= modules
    assert modules.isdisjoint(UNNEEDED)
    assert "compiling" not in done.stderr
