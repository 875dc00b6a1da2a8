"""The model card: how the demo model was made and what was measured.

Promise: every number is computed from the shipped files or read from the training checkpoints.
"""

# ruff: noqa: E501  (lines of the card)
from __future__ import annotations

from pathlib import Path
from typing import Any

from demo import export
from demo.data import HELD_OUT_OF, Document, corpus_hash
from demo.model import DemoConfig


def _table(rows: list[tuple[str, str]], head: tuple[str, str]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "| --- | ---: |"]
    return "\n".join(lines + [f"| {a} | {b} |" for a, b in rows])


def _bytes(path: Path, cfg: DemoConfig) -> str:
    totals = export.bytes_per_token(path, cfg)
    whole = sum(totals.values())
    rows = [
        (name, f"{size:,} ({100 * size / whole:.1f}%)")
        for name, size in sorted(totals.items(), key=lambda item: -item[1])
    ]
    return _table([*rows, ("total", f"{whole:,}")], ("group", "bytes per token"))


def write_card(
    path: Path,
    cfg: DemoConfig,
    facts: dict[str, float],
    samples: list[tuple[str, str]],
    trunk: dict[str, Any],
    mtp: dict[str, Any] | None,
    docs: list[Document],
    files: tuple[Path, Path],
    python: str,
) -> None:
    """Write the card in Markdown."""
    trunk_size = sum(t.numel() for n, t in trunk["params"].items() if "tid2eid" not in n)
    mtp_size = sum(t.numel() for t in mtp["params"].values()) if mtp else 0
    held = [d.path for d in docs if d.held_out and not d.is_test]
    library = [d for d in docs if not d.is_test]
    main_file, mtp_file = files
    size = main_file.stat().st_size + mtp_file.stat().st_size
    sched = trunk["schedule"]
    mtp_line = (
        f"{mtp['tokens']:,} tokens in {mtp['step']} steps"
        if mtp
        else "not trained (initial values)"
    )
    quality = [
        ("held-out loss, float32 weights (nats per token)", f"{facts['float_loss']:.4f}"),
        ("held-out loss, shipped file", f"{facts['gguf_loss']:.4f}"),
        *[
            (
                f"draft depth {k}: argmax equals the trunk's, held-out text",
                f"{100 * facts[f'agree{k}']:.1f}%",
            )
            for k in (1, 2, 3)
        ],
        *[
            (
                f"draft {k} right in greedy continuations"
                + (", given the earlier ones" if k > 1 else ""),
                f"{100 * facts[f'greedy_{k}']:.1f}%",
            )
            for k in (1, 2, 3)
        ],
        *[
            (
                f"drafts 1..{k} all right in greedy continuations",
                f"{100 * facts[f'greedy_chain_{k}']:.1f}%",
            )
            for k in (2, 3)
        ],
    ]
    shown = "\n\n".join(f"```python\n{text}\n```" for _, text in samples)
    path.write_text(f"""# ds4flow demo model

A DeepSeek-V4-shaped model with {trunk_size / 1e6:.2f} million trunk parameters and an MTP block of
{
        mtp_size
        / 1e6:.2f} million, trained on Python source so that `ds4flow run` has real work to do without a
network. It writes text that looks like Python; it is not useful as a programmer.

## Shape
Width {cfg.embedding}, vocabulary {cfg.vocab}, {cfg.layers} layers with compression ratios
{list(cfg.ratios)} (MTP: 0), {cfg.streams} hyper-connection streams, {cfg.heads} heads of {
        cfg.head_dim
    }
({cfg.rope_dim} rotary), window {cfg.window}, indexer {cfg.index_heads} heads of {
        cfg.index_dim
    } with top-k
{cfg.top_k}, {cfg.experts} experts of {cfg.ffn} (top {cfg.experts_used}) plus one shared, {
        cfg.hash_layers
    } hash-routed
layer, context {cfg.context}. Numerics: profile `plain` (no simulated cache rounding).

## Files
`{main_file.name}` ({main_file.stat().st_size:,} bytes) and `{mtp_file.name}`
({mtp_file.stat().st_size:,} bytes), together {size:,} bytes. Routed experts Q4_K; attention, shared
expert, head, compressors and indexer Q8_0; embedding, router and hyper-connection matrices F16
(F32 in the MTP file); the rest F32.

Main file, weight bytes read per decoded token:

{_bytes(main_file, cfg)}

MTP file, per draft (plus the head of the main file):

{_bytes(mtp_file, cfg)}

## Training data
Source files of the Python {python} standard library as installed (PSF-2.0 licence): {
        len(library)
    } library
files with {sum(len(d.text) for d in library):,} characters and {
        len(docs) - len(library)
    } test files, the latter with
15% of the batches. Left out: `encodings`, `pydoc_data`, third-party packages, non-UTF-8 files, files
above 200 kB and tables of numbers. SHA-256 over sorted paths and contents: `{corpus_hash(docs)}`.

Held out (never trained on, neither model nor tokenizer): every path whose SHA-256 starts with a 32-bit
number divisible by {HELD_OUT_OF}. Library files among them: {", ".join(f"`{p}`" for p in held)}.

## Training
    python tools/train_demo.py all --work WORK --out ds4flow/demo

Seed {sched["seed"]}. Trunk: {trunk["tokens"]:,} tokens in {
        trunk["step"]
    } steps, next-token loss; the indexer learns the
attention mass on the compressed rows by KL divergence; the last fifth sees 4-bit images of the experts;
the last tenth has length {sched["long_length"]}. Router bias: loss-free balancing. MTP block: {
        mtp_line
    },
distilled from the frozen shipped trunk over chained depths 1 to 3. Schedules follow the clock, and the
amount of work done by then decides the result: trunk {trunk["elapsed"] / 60:.0f} minutes{
        f", MTP block {mtp['elapsed'] / 60:.0f} minutes" if mtp else ""
    } on two shared processor
cores. Another run gives other weights of similar quality, not these bits. The shipped trunk began with
float32 streams and two threads and was continued from its checkpoint at step 436 with bfloat16 streams
in two processes; the MTP block was continued from its checkpoint at step 178 with a new schedule.

## Measured
Held-out crops of 512 tokens, float32 arithmetic on the shipped (dequantised) weights.

{_table(quality, ("what", "value"))}

## Samples
Greedy, {len(samples)} prompts:

{shown}
""")
