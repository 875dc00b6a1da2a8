"""Optimisers and chunked losses of the demo training.

Promise: same seed and same thread count give the same updates; optimiser state is plain tensors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_NS = (3.4445, -4.7750, 2.0315)
_VECTOR_LEAVES = ("token_embd", "output", "ffn_gate_inp", "proj")


def uses_muon(name: str, tensor: Tensor) -> bool:
    """Whether a parameter is a hidden matrix (or stack of them) to be orthogonalised."""
    leaf = name.removesuffix(".weight").split(".")[-1]
    if tensor.ndim < 2 or leaf in _VECTOR_LEAVES or "hc_" in leaf or leaf.endswith("ape"):
        return False
    return tensor.is_floating_point()


def is_trained(name: str) -> bool:
    """Parameters that receive gradients: all but the router bias and the hash table."""
    return not name.endswith((".bias", "tid2eid.weight"))


def orthogonalise(stack: Tensor, rounds: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrix; (K, rows, cols), bfloat16."""
    a, b, c = _NS
    flip = stack.shape[1] > stack.shape[2]
    x = stack.transpose(1, 2) if flip else stack
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(rounds):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = a * x + torch.bmm(torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x)
    return (x.transpose(1, 2) if flip else x).float()


class DemoOptimizer:
    """Muon (batched over equal shapes) for hidden matrices, AdamW for everything else."""

    def __init__(self, params: dict[str, Tensor], muon_lr: float, adam_lr: float) -> None:
        self.params = {n: t for n, t in params.items() if is_trained(n)}
        self.muon_lr, self.adam_lr = muon_lr, adam_lr
        self.steps = 0
        self.state: dict[str, Tensor] = {}
        self.groups: dict[tuple[int, int], list[str]] = {}
        for name, tensor in self.params.items():
            self.state[f"m.{name}"] = torch.zeros_like(tensor)
            if uses_muon(name, tensor):
                self.groups.setdefault((tensor.shape[-2], tensor.shape[-1]), []).append(name)
            else:
                self.state[f"v.{name}"] = torch.zeros_like(tensor)

    def _adam_rate(self, name: str) -> float:
        if "hc_" in name and name.endswith("fn.weight"):
            return 0.3 * self.adam_lr
        return self.adam_lr

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Apply gradients with all learning rates multiplied by ``factor``, then clear them."""
        self.steps += 1
        momentum = min(0.95, 0.85 + 0.1 * self.steps / 300)
        for (rows, cols), names in self.groups.items():
            updates = []
            for name in names:
                grad = self.params[name].grad
                buf = self.state[f"m.{name}"]
                if grad is None:
                    grad = torch.zeros_like(buf)
                buf.lerp_(grad, 1 - momentum)
                updates.append(torch.lerp(grad, buf, momentum).view(-1, rows, cols))
            # Parts of 16 matrices stay in the cache during the iteration.
            stack = torch.cat(updates)
            done = torch.cat([orthogonalise(part) for part in stack.split(16)])
            rate = self.muon_lr * factor * max(1.0, rows / cols) ** 0.5
            begin = 0
            for name, update in zip(names, updates, strict=True):
                part = done[begin : begin + len(update)]
                begin += len(update)
                tensor = self.params[name]
                tensor.mul_(1 - 0.02 * self.muon_lr * factor)
                tensor.add_(part.view_as(tensor), alpha=-rate)
        beta1, beta2 = 0.9, 0.98
        for name, tensor in self.params.items():
            if f"v.{name}" not in self.state or tensor.grad is None:
                continue
            m, v = self.state[f"m.{name}"], self.state[f"v.{name}"]
            m.lerp_(tensor.grad, 1 - beta1)
            v.lerp_(tensor.grad.square(), 1 - beta2)
            root = (v / (1 - beta2**self.steps)).sqrt_().add_(1e-9)
            rate = self._adam_rate(name) * factor / (1 - beta1**self.steps)
            tensor.addcdiv_(m, root, value=-rate)
        for tensor in self.params.values():
            tensor.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Tensors and the step counter."""
        return {"state": self.state, "steps": self.steps}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.steps = saved["steps"]
        for key, value in saved["state"].items():
            self.state[key].copy_(value)


class ChunkedLoss(torch.autograd.Function):
    """Cross entropy of a linear head, chunk by chunk, with gradients made on the way forward.

    Target per row: ``true_share`` on the given token, the rest on softmax of the teacher's
    logits ``teacher @ weight.T`` (KL up to the teacher's entropy, which is subtracted).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        valid: Tensor,
        teacher: Tensor | None,
        true_share: float,
    ) -> Tensor:
        """Mean loss over valid rows."""
        low = weight.to(torch.bfloat16)
        grad_h = torch.empty_like(hidden, dtype=torch.float32)
        train_head = ctx.needs_input_grad[1]
        grad_w = torch.zeros_like(weight) if train_head else None
        count = valid.sum().clamp_min(1)
        total = torch.zeros((), dtype=torch.float64)
        for begin in range(0, hidden.shape[0], 256):
            cut = slice(begin, begin + 256)
            rows = hidden[cut].to(torch.bfloat16)
            logp = torch.log_softmax(F.linear(rows, low).float(), -1)
            mask = valid[cut].float()
            picked = logp.gather(1, target[cut, None])[:, 0]
            loss = -picked * true_share
            grad = logp.exp()
            grad.scatter_add_(1, target[cut, None], torch.full_like(picked, -true_share)[:, None])
            if teacher is not None:
                tlog = torch.log_softmax(F.linear(teacher[cut].to(torch.bfloat16), low).float(), -1)
                tprob = tlog.exp()
                loss = loss + (1 - true_share) * (tprob * (tlog - logp)).sum(-1)
                grad.sub_(tprob, alpha=1 - true_share)
            total += (loss * mask).sum().double()
            grad = (grad * (mask / count)[:, None]).to(torch.bfloat16)
            grad_h[cut] = torch.mm(grad, low).float()
            if grad_w is not None:
                grad_w += torch.mm(grad.t(), rows).float()
        ctx.save_for_backward(grad_h, *([grad_w] if grad_w is not None else []))
        ctx.hidden_dtype = hidden.dtype
        return (total / count).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Scale the stored gradients."""
        grad_h, *rest = ctx.saved_tensors
        grad_w = rest[0] * grads[0] if rest else None
        return (grad_h * grads[0]).to(ctx.hidden_dtype), grad_w, None, None, None, None
