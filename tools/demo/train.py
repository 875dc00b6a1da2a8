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


def _require_grad(params: Params, prefix: str = "") -> None:
    for name, tensor in params.items():
        if is_trained(name) and name.startswith(prefix):
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
        text = " ".join(
            f"{k}={v:.4g}" if k != "step" else f"step={int(v)}" for k, v in entry.items()
        )
        line = f"{time.strftime('%H:%M:%S')} {phase} {text}"
        print(line, flush=True)
        if self.log is not None:
            with self.log.open("a") as out:
                out.write(line + "\n")


Settings = dict[str, float]
Job = Callable[[DemoConfig, Params, Tensor, Settings], tuple[dict[str, float], Trace]]
DTYPES = (torch.float32, torch.bfloat16)


def trunk_job(
    cfg: DemoConfig, params: Params, tokens: Tensor, settings: Settings
) -> tuple[dict[str, float], Trace]:
    """Next-token loss plus indexer loss on tokens (B, T + 1); leaves gradients in the tensors."""
    mode = Mode(
        DTYPES[int(settings["low"])],
        settings["select"] > 0,
        settings["index"] > 0,
        fake_q4 if settings["quant"] > 0 else None,
    )
    trace = Trace([], {})
    _, head = model.trunk_forward(cfg, params, tokens[:, :-1], mode, trace)
    target = tokens[:, 1:].flatten()
    valid = torch.ones_like(target, dtype=torch.bool)
    loss = ChunkedLoss.apply(head, params["output.weight"], target, valid, None, 1.0)
    total = loss + sum(trace.index_losses) if trace.index_losses else loss
    total.backward()
    values = {"loss": float(loss.detach())}
    if trace.index_losses:
        values["index_kl"] = float(torch.stack([g.detach() for g in trace.index_losses]).mean())
    return values, trace


DEPTH_WEIGHTS = (1.0, 0.7, 0.5)


def mtp_job(
    cfg: DemoConfig, params: Params, tokens: Tensor, settings: Settings
) -> tuple[dict[str, float], Trace]:
    """Distillation of the frozen trunk into the MTP block over chained depths 1..3.

    Depth k at position q starts from trunk streams of q - k and reads the true tokens up to q.
    """
    mode = Mode(DTYPES[int(settings["low"])])
    quantised = settings["quant"] > 0
    batch = tokens.shape[0]
    ids, target = tokens[:, :-1], tokens[:, 1:].flatten()
    position = torch.arange(ids.shape[1]).repeat(batch)
    with torch.no_grad():
        streams, teacher = model.trunk_forward(cfg, params, ids, mode)
    state = model.previous(streams, batch)
    mode.weight_filter = fake_q4 if quantised else None
    older: list[Tensor] = []
    trace, values = Trace([], {}), {}
    total = torch.zeros(())
    for depth, weight in enumerate(DEPTH_WEIGHTS[: int(settings["depths"])]):
        part = Trace([], {})
        state, head, rows = model.mtp_forward(cfg, params, state, ids, mode, part, older or None)
        loss = ChunkedLoss.apply(
            head, params["output.weight"], target, position >= depth, teacher, 0.1
        )
        total = total + weight * loss
        values[f"loss{depth + 1}"] = float(loss.detach())
        for name, load in part.loads.items():
            trace.loads[name] = trace.loads.get(name, torch.zeros_like(load)) + load
        older.append(rows)
        state = model.previous(state, batch)
    total.backward()
    values["loss"] = values["loss1"]
    return values, trace


JOBS: dict[str, Job] = {"trunk": trunk_job, "mtp": mtp_job}


def _worker(
    job: str, cfg: DemoConfig, params: Params, grads: Params, pipe: Any, compiled: bool
) -> None:
    """Body of a second process: gradients of its share of every batch into shared memory."""
    torch.set_num_threads(1)
    if compiled:
        model.compile_pieces()
    for name in grads:
        params[name].requires_grad_(True)
    while True:
        message = pipe.recv()
        if message is None:
            return
        tokens, settings = message
        values, trace = JOBS[job](cfg, params, tokens, settings)
        for name, buffer in grads.items():
            grad = params[name].grad
            if grad is None:
                buffer.zero_()
            else:
                buffer.copy_(grad)
            params[name].grad = None
        pipe.send((values, {n: t.tolist() for n, t in trace.loads.items()}))


class Team:
    """One or two single-threaded processes that share parameters and split each batch.

    Two processes meet once per step; two threads would meet in every operation, which is slow on
    a machine that is shared with other work.
    """

    def __init__(
        self,
        job: str,
        cfg: DemoConfig,
        params: Params,
        trained: list[str],
        workers: int,
        compiled: bool,
    ) -> None:
        self.job, self.cfg, self.params, self.trained = JOBS[job], cfg, params, trained
        self.pipe: Any = None
        self.process: Any = None
        self.grads: Params = {}
        if workers > 1:
            for tensor in params.values():
                tensor.share_memory_()
            self.grads = {n: torch.zeros_like(params[n]).share_memory_() for n in trained}
            context = torch.multiprocessing.get_context("spawn")
            self.pipe, other = context.Pipe()
            self.process = context.Process(
                target=_worker,
                args=(job, cfg, dict(params), self.grads, other, compiled),
                daemon=True,
            )
            self.process.start()

    def step(self, tokens: Tensor, settings: Settings) -> tuple[dict[str, float], Trace]:
        """Gradients of the whole batch in ``params[...].grad``; mean values, summed loads."""
        if self.pipe is None or len(tokens) < 2:
            return self.job(self.cfg, self.params, tokens, settings)
        half = len(tokens) // 2
        self.pipe.send((tokens[half:].clone(), settings))
        values, trace = self.job(self.cfg, self.params, tokens[:half], settings)
        other, loads = self.pipe.recv()
        with torch.no_grad():
            for name, buffer in self.grads.items():
                grad = self.params[name].grad
                if grad is None:
                    self.params[name].grad = buffer * 0.5
                else:
                    grad.add_(buffer).mul_(0.5)
        for name, load in loads.items():
            trace.loads[name] = trace.loads[name] + torch.tensor(load)
        return {k: (v + other[k]) / 2 for k, v in values.items()}, trace

    def close(self) -> None:
        """Stop the second process."""
        if self.pipe is not None:
            self.pipe.send(None)
            self.process.join(timeout=30)


def train(
    job: str,
    cfg: DemoConfig,
    params: Params,
    corpus: Corpus,
    sched: Schedule,
    checkpoint: Path,
    evaluate: Callable[[Params], dict[str, float]],
    log: Path | None = None,
    stop_after: int = 0,
    low: bool = True,
    workers: int = 1,
    compiled: bool = False,
) -> tuple[Params, float]:
    """Train (or continue from the checkpoint) until the budget ends; parameters and last loss.

    ``params`` holds everything the job reads; for job "mtp" only ``mtp.*`` is trained and saved.
    ``stop_after`` ends early after that many steps in total (a checkpoint is written).
    """
    prefix = "mtp." if job == "mtp" else ""
    own = {n: t for n, t in params.items() if n.startswith(prefix)}
    optimizer = DemoOptimizer(own, sched.muon_lr, sched.adam_lr)
    step, elapsed, seen = 0, 0.0, 0
    history: list[dict[str, float]] = []
    if checkpoint.exists():
        saved = load_checkpoint(checkpoint)
        for name, tensor in own.items():
            tensor.copy_(saved["params"][name])
        optimizer.load_state_dict(saved["optimizer"])
        step, elapsed, seen = saved["step"], saved["elapsed"], saved["tokens"]
        history = saved["history"]
    team = Team(job, cfg, params, list(optimizer.params), workers, compiled)
    _require_grad(params, prefix)
    recorder = Recorder(log, history)
    loss, smooth, index_gap = float("nan"), float("nan"), 0.0
    start = time.monotonic() - elapsed
    saved_at = time.monotonic()

    def save() -> None:
        save_checkpoint(
            checkpoint,
            {
                "config": cfg.to_dict(),
                "schedule": asdict(sched),
                "step": step,
                "elapsed": time.monotonic() - start,
                "tokens": seen,
                "history": history,
                "params": {n: t.detach().clone() for n, t in own.items()},
                "optimizer": optimizer.state_dict(),
            },
        )

    while True:
        progress = sched.progress(step, time.monotonic() - start)
        if progress >= 1.0 or (stop_after and step >= stop_after):
            break
        length = sched.long_length if progress >= sched.long_from else sched.length
        rows = max(1, sched.tokens_per_step // length)
        stage = {"trunk": 1, "mtp": 2}[job]
        tokens = corpus.batch(np.random.default_rng([sched.seed, stage, step]), rows, length)
        values, trace = team.step(
            tokens,
            {
                "low": float(low),
                "select": float(progress >= sched.select_from),
                "index": float(step % 2 == 0),
                # One step in three trains the whole chain; the depths share all weights.
                "depths": 3.0 if step % 3 == 0 else 1.0,
                "quant": float(progress >= sched.quant_from),
            },
        )
        loss = values["loss"]
        if not np.isfinite(loss):
            raise FloatingPointError(f"loss is {loss} at step {step}")
        factor = sched.factor(step, progress)
        optimizer.step(factor)
        with torch.no_grad():
            update_bias(params, trace, sched.bias_rate * factor)
        step, seen = step + 1, seen + rows * length
        smooth = loss if np.isnan(smooth) else 0.98 * smooth + 0.02 * loss
        index_gap = values.pop("index_kl", index_gap)
        del values["loss"]
        recorder.tick(
            job,
            {
                "step": step,
                "tokens": seen,
                "loss": smooth,
                **values,
                "index_kl": index_gap,
                "lr": factor,
                "progress": progress,
            },
            rows * length,
        )
        if time.monotonic() - saved_at > sched.save_every:
            saved_at = time.monotonic()
            worst = max(float(v.max() / v.float().mean()) for v in trace.loads.values())
            recorder.tick(
                job + "-eval", {"step": step, "max_load": worst, **evaluate(params)}, 0, True
            )
            save()
    recorder.tick(job + "-end", {"step": step, "tokens": seen, **evaluate(params)}, 0, True)
    save()
    team.close()
    return {n: t.detach() for n, t in own.items()}, loss


@torch.no_grad()
def agreement(
    cfg: DemoConfig, params: Params, tokens: Tensor, mode: Mode, depths: int = 3, rows: int = 4
) -> dict[str, float]:
    """Share of positions where depth k's argmax equals the trunk's, teacher-forced (B, T)."""
    hits = torch.zeros(depths)
    count = torch.zeros(depths)
    for begin in range(0, len(tokens), rows):
        ids = tokens[begin : begin + rows]
        batch = len(ids)
        streams, head = model.trunk_forward(cfg, params, ids, mode)
        weight = params["output.weight"]
        wanted = model.linear(head, weight, mode).argmax(-1)
        state, older = model.previous(streams, batch), list[Tensor]()
        position = torch.arange(ids.shape[1]).repeat(batch)
        for depth in range(depths):
            state, out, kv = model.mtp_forward(cfg, params, state, ids, mode, None, older or None)
            good = (model.linear(out, weight, mode).argmax(-1) == wanted) & (position > depth)
            hits[depth] += good.sum()
            count[depth] += (position > depth).sum()
            older.append(kv)
            state = model.previous(state, batch)
    return {f"agree{k + 1}": float(hits[k] / count[k]) for k in range(depths)}
