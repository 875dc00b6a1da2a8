"""One start, timed from inside: a process that is asked by JSON and answers with a JSON line."""

import time

BEGUN = time.perf_counter()  # before anything large is imported

import json  # noqa: E402
import sys  # noqa: E402
from typing import Any  # noqa: E402


def main(text: str) -> None:
    """Load the model that `text` (JSON) names, make two tokens, and print the times."""
    job: dict[str, Any] = json.loads(text)
    from ds4flow.bench.engine import Engine
    from ds4flow.bench.machine import peak_memory
    from ds4flow.cache import KVCache
    from ds4flow.gguf import GgufFile

    if job.get("compile_folder"):
        import numba

        numba.config.CACHE_DIR = job["compile_folder"]  # type: ignore[attr-defined]
    imported = time.perf_counter()
    main_file = GgufFile.open(job["main"])
    mtp_file = None if job["mtp"] is None else GgufFile.open(job["mtp"])
    engine = Engine.load(
        main_file,
        mtp_file,
        kernels=job["kernels"],
        profile=job["profile"],
        threads=job["threads"],
    )
    cache = KVCache(engine.model.config, context=8, draft_max=1, device=engine.model.device)
    loaded = time.perf_counter()
    times = []
    for token in (0, 1):
        begun = time.perf_counter()
        engine.model.logits(engine.model.forward([token], cache))
        cache.commit(1)
        times.append(time.perf_counter() - begun)
    answer = {
        "imports": imported - BEGUN,
        "load": loaded - imported,
        "first": times[0],
        "second": times[1],
        "peak_bytes": peak_memory(),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
