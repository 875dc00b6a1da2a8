"""Make the embedded demo model from nothing: corpus, tokenizer, trunk, MTP block, GGUF files.

Run ``python tools/train_demo.py all --work DIR``; every phase continues from its checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tokenizers import Tokenizer

from demo import data, model, train
from demo.model import DemoConfig
from demo.train import Schedule


def load_corpus(work: Path, cfg: DemoConfig, seed: int) -> tuple[Tokenizer, data.Corpus]:
    """Tokenizer (trained on first use, then kept in the work folder) and token streams."""
    docs = data.read_corpus()
    file = work / "tokenizer.json"
    if file.exists():
        tok = Tokenizer.from_file(str(file))
    else:
        tok = data.train_tokenizer(docs, cfg.vocab)
        tok.save(str(file))
    return tok, data.build_corpus(tok, docs, seed)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phase", choices=("trunk", "mtp", "export", "all"))
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--minutes", type=float, default=45.0, help="trunk training time")
    parser.add_argument("--log", type=Path, default=None)
    parser.add_argument("--threads", type=int, default=2, help="threads if --workers is 1")
    parser.add_argument("--workers", type=int, default=2, help="1 or 2 processes")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    cfg, sched = DemoConfig(), Schedule(seconds=60 * args.minutes)
    tok, corpus = load_corpus(args.work, cfg, sched.seed)
    model.compile_pieces()
    torch.set_num_threads(1 if args.workers > 1 else args.threads)
    if args.phase in ("trunk", "all"):
        params = model.init_trunk(cfg, sched.seed, corpus.counts(cfg.vocab))
        held = corpus.held_out_batch(16, 512)
        train.train(
            "trunk", cfg, params, corpus, sched, args.work / "trunk.pt",
            lambda p: {"held_out": train.held_out_loss(cfg, p, held, model.Mode(torch.bfloat16))},
            args.log, workers=args.workers, compiled=True,
        )


if __name__ == "__main__":
    main()
