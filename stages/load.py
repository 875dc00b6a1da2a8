"""From files to a model that can run: tokenizer, prompt ids, cache, weights.

What can be wrong with the request is found before the weights are touched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds4flow import chat
from ds4flow.cache import KVCache
from ds4flow.depth import draft_max
from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.model.config import ModelConfig
from ds4flow.model.trunk import BACKENDS, Model
from ds4flow.pipeline import Stage, State
from ds4flow.sampling import Sampling
from ds4flow.tokenizer import ASSISTANT, THINK, USER, Tokenizer

LARGEST_DEFAULT_CONTEXT = 8192
"""Context when none is asked for and the model's own is larger."""


@dataclass
class LoadGguf(Stage):
    """Binds the weights of GGUF files and makes a cache for them.

    The MTP block is loaded only when the run will draft with it.
    """

    profile: str
    kernels: str
    threads: int
    no_gpu: bool
    uses_mtp: bool
    draft: int | str
    chunk: int
    context: int | None
    chat: str
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    lossless: bool
    system: str

    reads = ("files", "prompt")
    writes = ("tokenizer", "tokens", "model", "cache", "sampling", "mtp_off", "identity")

    def run(self, state: State) -> None:
        """Set the model, an empty cache, and `tokens` to the ids of the prompt."""
        main, mtp = state.files
        config = ModelConfig.from_gguf(main)
        state.tokenizer = Tokenizer.from_metadata(main.metadata)
        mode = self._chat_mode(state.tokenizer)
        state.tokens = chat.prompt_ids(state.tokenizer, state.prompt, chat=mode, system=self.system)
        context = self._context(config, len(state.tokens))
        if self.no_gpu and self.draft != 0:
            state.switch_mtp_off("DS4_NO_GPU (runtime.no_gpu) asks for plain greedy decoding")
        self._choose_sampling(state)
        if self.threads:
            torch.set_num_threads(self.threads)
        wanted = self.uses_mtp and self.draft != 0 and not state.mtp_off
        kernels = self._kernels()
        state.model = Model.load(
            main, mtp if wanted else None, profile=self.profile, kernels=kernels
        )
        state.cache = KVCache(
            config, context=context, draft_max=draft_max(self.draft), chunk=self.chunk
        )
        state.run.record(
            chat=mode, kernels=kernels, context_limit=context, threads=torch.get_num_threads()
        )

    def _choose_sampling(self, state: State) -> None:
        sampling = Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)
        if sampling.greedy:
            return
        state.sampling, state.identity = sampling, "sampled"
        state.run.record(identity="sampled")
        if self.draft != 0 and self.uses_mtp and not self.lossless and not state.mtp_off:
            state.switch_mtp_off(
                "sampling (temperature above 0); sampling.lossless=true drafts and keeps the "
                "distribution"
            )

    def _chat_mode(self, tokenizer: Tokenizer) -> str:
        if self.chat != "auto":
            return self.chat
        return "think" if {USER, ASSISTANT, THINK} <= set(tokenizer.specials) else "raw"

    def _kernels(self) -> str:
        if self.kernels != "auto":
            return self.kernels
        return next(name for name in ("cpu", "reference") if name in BACKENDS)

    def _context(self, config: ModelConfig, prompt: int) -> int:
        if self.context is not None and self.context > config.context_length:
            raise UsageError(
                f"runtime.context={self.context} exceeds the model's {config.context_length}",
                f"use at most {config.context_length}",
            )
        context = self.context or min(config.context_length, LARGEST_DEFAULT_CONTEXT)
        if prompt >= context:
            raise Ds4FlowError(
                f"the prompt has {prompt} tokens; with a context of {context} that leaves no room "
                "to generate",
                f"shorten the prompt, or set runtime.context (at most {config.context_length})",
            )
        return context
