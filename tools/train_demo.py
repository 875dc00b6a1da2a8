"""Make the embedded demo model from nothing: corpus, tokenizer, trunk, MTP block, GGUF files.

Run ``python tools/train_demo.py all --work DIR --out ds4flow/demo``; every phase continues from
its checkpoint in DIR, and ``export`` works from whatever checkpoints exist.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from demo import data, export, model, quantize, train
from demo.card import write_card
from demo.generate import greedy, greedy_agreement
from demo.model import DemoConfig, Mode, Params
from demo.train import Schedule
from tokenizers import Tokenizer

PROMPTS = (
    'def read_lines(path):\n    """Return the lines of a text file."""\n',
    "def read_lines(path):",
    "class Stack:\n",
    "import os\nimport sys\n\n\ndef main(",
)


def load_corpus(
    work: Path, cfg: DemoConfig, seed: int
) -> tuple[Tokenizer, list[data.Document], data.Corpus]:
    """Tokenizer (trained on first use, then kept in the work folder) and token streams."""
    docs = data.read_corpus()
    file = work / "tokenizer.json"
    if file.exists():
        tok = Tokenizer.from_file(str(file))
    else:
        tok = data.train_tokenizer(docs, cfg.vocab)
        tok.save(str(file))
    return tok, docs, data.build_corpus(tok, docs, seed)


def run_trunk(args: argparse.Namespace, cfg: DemoConfig, corpus: data.Corpus) -> None:
    """Phase 1: the trunk by next-token loss."""
    sched = Schedule(seconds=60 * args.minutes)
    params = model.init_trunk(cfg, sched.seed, corpus.counts(cfg.vocab))
    held = corpus.held_out_batch(16, 512)

    def evaluate(now: Params) -> dict[str, float]:
        return {"held_out": train.held_out_loss(cfg, now, held, Mode(torch.bfloat16))}

    train.train(
        "trunk",
        cfg,
        params,
        corpus,
        sched,
        args.work / "trunk.pt",
        evaluate,
        args.log,
        workers=args.workers,
        compiled=True,
    )


def shipped_trunk(work: Path, cfg: DemoConfig) -> Params:
    """The newest trunk checkpoint as it will be shipped: quantised and decoded again."""
    saved = train.load_checkpoint(work / "trunk.pt")
    if DemoConfig.from_dict(saved["config"]) != cfg:
        raise ValueError(f"{work / 'trunk.pt'} has other dimensions; use an empty work folder")
    return quantize.shipped(saved["params"])


def mtp_schedule(minutes: float) -> Schedule:
    """Budget of phase 2: copied weights need smaller steps than fresh ones."""
    return Schedule(
        seconds=60 * minutes,
        length=512,
        long_from=2.0,
        quant_from=0.7,
        decay_from=0.3,
        warmup=30,
        muon_lr=0.015,
        adam_lr=0.003,
    )


def run_mtp(args: argparse.Namespace, cfg: DemoConfig, corpus: data.Corpus) -> None:
    """Phase 2: the MTP block by distillation from the frozen, dequantised trunk."""
    sched = mtp_schedule(args.mtp_minutes)
    trunk = shipped_trunk(args.work, cfg)
    params = {**trunk, **model.init_mtp(cfg, trunk, sched.seed)}
    held = corpus.held_out_batch(8, 512)[:, :-1]

    def evaluate(now: Params) -> dict[str, float]:
        return train.agreement(cfg, now, held, Mode(torch.bfloat16))

    train.train(
        "mtp",
        cfg,
        params,
        corpus,
        sched,
        args.work / "mtp.pt",
        evaluate,
        args.log,
        workers=args.workers,
        compiled=True,
    )


def run_export(
    args: argparse.Namespace,
    cfg: DemoConfig,
    tok: Tokenizer,
    docs: list[data.Document],
    corpus: data.Corpus,
) -> None:
    """Write both files, hashes, the model card and the reference logits; measure what they do."""
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    saved = train.load_checkpoint(args.work / "trunk.pt")
    trunk: Params = saved["params"]
    main_file, mtp_file = out / export.MAIN_NAME, out / export.MTP_NAME
    export.write_main(main_file, cfg, trunk, tok)
    mtp_path = args.work / "mtp.pt"
    mtp_saved = train.load_checkpoint(mtp_path) if mtp_path.exists() else None
    mtp = mtp_saved["params"] if mtp_saved else model.init_mtp(cfg, trunk, Schedule().seed)
    export.write_mtp(mtp_file, cfg, mtp)
    params = {**export.read_params(main_file), **export.read_params(mtp_file)}
    sums = "".join(f"{export.sha256(f)}  {f.name}\n" for f in (main_file, mtp_file))
    (out / "SHA256SUMS").write_text(sums)
    if args.provisional:
        text = tok.decode(greedy(cfg, params, [0, *tok.encode(PROMPTS[0]).ids], 48))
        print(text)
        return
    if args.reference:
        prompts = [
            ids[:n] for (_, ids), n in zip(corpus.held_out[3:12:4], (96, 97, 95), strict=True)
        ]
        peaks = export.save_reference(args.reference, cfg, params, prompts)
        print("reference logits, largest magnitude:", json.dumps(peaks))
    held = corpus.held_out_batch(24, 512, seed=11)
    facts = {
        "float_loss": train.held_out_loss(cfg, trunk, held, Mode()),
        "gguf_loss": train.held_out_loss(cfg, params, held, Mode()),
        **train.agreement(cfg, params, held[:, :-1], Mode()),
        **greedy_agreement(cfg, params, held[:10, :64], 64),
    }
    samples = [(p, tok.decode(greedy(cfg, params, [0, *tok.encode(p).ids], 96))) for p in PROMPTS]
    write_card(
        out / "MODEL_CARD.md",
        cfg,
        facts,
        samples,
        saved,
        mtp_saved,
        docs,
        (main_file, mtp_file),
        platform.python_version(),
    )
    print(json.dumps(facts, indent=1))
    print(samples[0])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", choices=("trunk", "mtp", "export", "all"))
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--out", type=Path, default=Path("ds4flow/demo"), help="GGUF folder")
    parser.add_argument("--reference", type=Path, help="also write reference logits (.npz) here")
    parser.add_argument("--provisional", action="store_true", help="files only, no measurements")
    parser.add_argument("--minutes", type=float, default=45.0, help="trunk training time")
    parser.add_argument("--mtp-minutes", type=float, default=14.0, help="MTP training time")
    parser.add_argument("--log", type=Path, default=None)
    parser.add_argument("--workers", type=int, default=2, help="1 or 2 processes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    cfg = DemoConfig()
    tok, docs, corpus = load_corpus(args.work, cfg, Schedule().seed)
    if args.phase != "export":
        model.compile_pieces()
    if args.phase in ("trunk", "all"):
        run_trunk(args, cfg, corpus)
    if args.phase in ("mtp", "all"):
        run_mtp(args, cfg, corpus)
    if args.phase in ("export", "all"):
        run_export(args, cfg, tok, docs, corpus)


if __name__ == "__main__":
    main()
