"""llama.cpp in a process of its own: JSON lines in, JSON lines out.

Two engines in one process would share and disturb each other's threads, and an assertion in the
peer would end the measurement.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any, TextIO

import numpy as np

from ds4flow.bench.samples import CLOCKS


def main() -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library may print; answers stay alone on the real stdout
    llama_cpp: Any = importlib.import_module("llama_cpp")
    llama: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        asked = request.pop("op")
        if asked == "load":
            llama, answer = _load(llama_cpp, request)
        elif asked == "run":
            answer = _run(llama, **request)
        else:
            answer = {"error": f"unknown request {asked}"}
        _say(answers, answer)


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _load(llama_cpp: Any, request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    begun = time.perf_counter()
    if not request["repack"]:
        _without_repacking(llama_cpp)
    try:
        llama = llama_cpp.Llama(
            model_path=request["path"],
            n_ctx=request["context"],
            n_threads=request["threads"],
            n_threads_batch=request["threads"],
            n_gpu_layers=0,
            verbose=False,
        )
    except (ValueError, RuntimeError, OSError) as error:
        return None, {"error": str(error)}
    seconds = time.perf_counter() - begun
    return llama, {"version": llama_cpp.__version__, "seconds": seconds}


def _without_repacking(llama_cpp: Any) -> None:
    """Make weights stay as they are in the file; the wrapper has no argument for it."""
    core = getattr(llama_cpp, "llama_cpp", llama_cpp)
    defaults = core.llama_model_default_params

    def changed() -> Any:
        parameters = defaults()
        parameters.use_extra_bufts = False
        return parameters

    core.llama_model_default_params = changed


def _run(llama: Any, prompt: list[int], count: int, clock: str) -> dict[str, Any]:
    """Prefill and `count` greedy steps, each timed as a whole; ties go to the lowest id."""
    now = CLOCKS[clock]
    llama.reset()
    begun = now()
    llama.eval(prompt)
    token = _choice(llama)
    prefilled = now()
    tokens = []
    for _ in range(count):
        tokens.append(token)
        llama.eval([token])
        token = _choice(llama)
    done = now()
    return {"prefill": prefilled - begun, "decode": done - prefilled, "tokens": tokens}


def _choice(llama: Any) -> int:
    """The argmax of the last row of logits."""
    llama_cpp: Any = sys.modules["llama_cpp"]
    rows = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
    return int(np.argmax(np.ctypeslib.as_array(rows, shape=(llama.n_vocab(),))))


if __name__ == "__main__":
    main()
