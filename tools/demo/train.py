"""Training loops of the demo model: trunk, then MTP block on the frozen quantised trunk.

Promise: a checkpoint is written atomically every few minutes and training continues from it; with
a step budget the continuation is bit-identical to an uninterrupted run on the same machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demo import model
from demo.data import Corpus
from demo.model import DemoConfig, Mode, Params, Trace
from demo.optim import ChunkedLoss, DemoOptimizer, is_trained


@dataclass
class Schedule:
    """Budget and knobs of one phase. Progress is steps/max_steps, or elapsed/seconds if 0."""

    seconds: float = 2700.0
    max_steps: int = 0
    tokens_per_step: int = 4096
    length: int = 512
    long_length: int = 2048
    long_from: float = 0.9
    select_from: float = 0.3
    quant_from: float = 0.8
    decay_from: float = 0.35
    warmup: int = 60
    muon_lr: float = 0.02
    adam_lr: float = 0.004
    bias_rate: float = 0.001
    seed: int = 20261130
    save_every: float = 180.0
    eval_rows: int = 16

    def progress(self, step: int, elapsed: float) -> float:
        """Fraction of the budget used, 0..1."""
        used = step / self.max_steps if self.max_steps else elapsed / self.seconds
        return min(1.0, used)

    def factor(self, step: int, progress: float) -> float:
        """Learning-rate multiplier: linear warm-up, plateau, linear decay to zero."""
        down = min(1.0, (1.0 - progress) / (1.0 - self.decay_from))
        return min(1.0, (step + 1) / self.warmup) * max(down, 0.0)


def save_checkpoint(path: Path, payload: dict[str, Any]) -> None:
    """Write atomically: a reader sees the old file or the new one, never a part."""
    part = path.with_suffix(".part")
    torch.save(payload, part)
    os.replace(part, path)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint written by :func:`save_checkpoint`."""
    loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return loaded


def fake_q4(weight: Tensor) -> Tensor:
    """Straight-through image of the 4-bit block format: 32-blocks, 15 steps between min and max."""
    blocks = weight.detach().unflatten(-1, (-1, 32))
    low = blocks.amin(-1, keepdim=True).clamp(max=0)
    step = ((blocks.amax(-1, keepdim=True) - low) / 15).clamp_min(1e-8)
    image = ((blocks - low) / step).round().clamp(0, 15) * step + low
    return weight + (image.flatten(-2) - weight.detach())


def update_bias(params: Params, trace: Trace, rate: float) -> None:
    """Loss-free balancing: raise the selection bias of underloaded experts, lower the others'."""
    for prefix, load in trace.loads.items():
        bias = params.get(prefix + "exp_probs_b.bias")
        if bias is not None:
            share = load.float()
            bias += rate * torch.sign(share.mean() - share)


@torch.no_grad()
def held_out_loss(
    cfg: DemoConfig, params: Params, tokens: Tensor, mode: Mode, rows: int = 4
) -> float:
    """Mean next-token loss (nats) over crops (B, T + 1)."""
    total, parts = 0.0, 0
    for begin in range(0, len(tokens), rows):
        part = tokens[begin : begin + rows]
        _, head = model.trunk_forward(cfg, params, part[:, :-1], mode)
        target = part[:, 1:].flatten()
        valid = torch.ones_like(target, dtype=torch.bool)
        loss = ChunkedLoss.apply(head, params["output.weight"], target, valid, None, 1.0)
        total += float(loss) * len(part)
        parts += len(part)
    return total / parts


def _require_grad(params: Params) -> None:
    for name, tensor in params.items():
        if is_trained(name):
            tensor.requires_grad_(True)


class Recorder:
    """Appends one line a minute to the log and keeps the history for the model card."""

    def __init__(self, log: Path | None, history: list[dict[str, float]]) -> None:
        self.log, self.history = log, history
        self.last = time.monotonic()
        self.tokens = 0

    def tick(self, phase: str, values: dict[str, float], tokens: int, force: bool = False) -> None:
        """Count tokens; every minute (or when forced) write the values."""
        self.tokens += tokens
        now = time.monotonic()
        if not force and now - self.last < 60:
            return
        rate = self.tokens / max(now - self.last, 1e-9)
        self.last, self.tokens = now, 0
        entry = {**values, "tokens_per_s": round(rate)}
        self.history.append(entry)
        text = " ".join(f"{k}={v:.4g}" if k != "step" else f"step={int(v)}"
                        for k, v in entry.items())
        line = f"{time.strftime('%H:%M:%S')} {phase} {text}"
        print(line, flush=True)
        if self.log is not None:
            with self.log.open("a") as out:
                out.write(line + "\n")


def train_trunk(
    cfg: DemoConfig,
    corpus: Corpus,
    sched: Schedule,
    checkpoint: Path,
    log: Path | None = None,
    stop_after: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Params, float]:
    """Train (or continue) the trunk until the budget ends; returns parameters and last loss.

    ``stop_after`` ends early after that many steps in total (a checkpoint is written).
    """
    params = model.init_trunk(cfg, sched.seed, corpus.counts(cfg.vocab))
    optimizer = DemoOptimizer(params, sched.muon_lr, sched.adam_lr)
    step, elapsed, seen = 0, 0.0, 0
    history: list[dict[str, float]] = []
    if checkpoint.exists():
        saved = load_checkpoint(checkpoint)
        for name, tensor in params.items():
            tensor.copy_(saved["params"][name])
        optimizer.load_state_dict(saved["optimizer"])
        step, elapsed, seen = saved["step"], saved["elapsed"], saved["tokens"]
        history = saved["history"]
    _require_grad(params)
    recorder = Recorder(log, history)
    held = corpus.held_out_batch(sched.eval_rows, sched.length)
    last_loss, smooth, index_gap = float("nan"), float("nan"), 0.0
    start = time.monotonic() - elapsed
    saved_at = time.monotonic()

    def save() -> None:
        save_checkpoint(checkpoint, {
            "config": cfg.to_dict(), "schedule": asdict(sched), "step": step,
            "elapsed": time.monotonic() - start, "tokens": seen, "history": history,
            "params": {n: t.detach() for n, t in params.items()},
            "optimizer": optimizer.state_dict(),
        })

    while True:
        progress = sched.progress(step, time.monotonic() - start)
        if progress >= 1.0 or (stop_after and step >= stop_after):
            break
        length = sched.long_length if progress >= sched.long_from else sched.length
        rows = max(1, sched.tokens_per_step // length)
        tokens = corpus.batch(np.random.default_rng([sched.seed, 1, step]), rows, length)
        mode = Mode(dtype, progress >= sched.select_from, True,
                    fake_q4 if progress >= sched.quant_from else None)
        trace = Trace([], {})
        _, head = model.trunk_forward(cfg, params, tokens[:, :-1], mode, trace)
        target = tokens[:, 1:].flatten()
        valid = torch.ones_like(target, dtype=torch.bool)
        loss = ChunkedLoss.apply(head, params["output.weight"], target, valid, None, 1.0)
        total = loss + sum(trace.index_losses) if trace.index_losses else loss
        total.backward()
        factor = sched.factor(step, progress)
        optimizer.step(factor)
        with torch.no_grad():
            update_bias(params, trace, sched.bias_rate * factor)
        step, seen = step + 1, seen + target.numel()
        last_loss = float(loss.detach())
        if not np.isfinite(last_loss):
            raise FloatingPointError(f"loss is {last_loss} at step {step}")
        smooth = last_loss if not smooth == smooth else 0.98 * smooth + 0.02 * last_loss
        if trace.index_losses:
            index_gap = float(torch.stack([g.detach() for g in trace.index_losses]).mean())
        recorder.tick("trunk", {
            "step": step, "tokens": seen, "loss": smooth, "index_kl": index_gap,
            "lr": factor, "progress": progress,
        }, target.numel())
        if time.monotonic() - saved_at > sched.save_every:
            saved_at = time.monotonic()
            value = held_out_loss(cfg, params, held, Mode(dtype))
            worst = max(float(v.max() / v.float().mean()) for v in trace.loads.values())
            recorder.tick("trunk-eval", {"step": step, "held_out": value, "max_load": worst},
                          0, True)
            save()
    save()
    if sched.eval_rows:
        value = held_out_loss(cfg, params, held, Mode(dtype))
        recorder.tick("trunk-end", {"step": step, "tokens": seen, "held_out": value}, 0, True)
    return {n: t.detach() for n, t in params.items()}, last_loss


Progress = Callable[[str], None]
