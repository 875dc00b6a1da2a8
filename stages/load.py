"""From files to a model that can run: tokenizer, prompt ids, cache, weights.

What can be wrong with the request is found before the weights are touched.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch

from ds4flow import chat
from ds4flow.cache import KVCache
from ds4flow.depth import draft_max
from ds4flow.device import DeviceChoice, choose
from ds4flow.errors import Ds4FlowError, UsageError
from ds4flow.gguf import GgufFile
from ds4flow.kept import Kept
from ds4flow.memory import GIB, available_bytes, check_memory, size
from ds4flow.model.config import ModelConfig
from ds4flow.model.trunk import Model
from ds4flow.parallel import Group, join
from ds4flow.pipeline import Stage, State
from ds4flow.sampling import Sampling
from ds4flow.tokenizer import ASSISTANT, THINK, USER, Tokenizer

LARGEST_DEFAULT_CONTEXT = 8192
"""Context when none is asked for and the model's own is larger."""
SAMPLING_KEYS = tuple(item.name for item in fields(Sampling))
"""Keys of the group `sampling` that say how a token is chosen."""

MEANINGLESS = "the weights are random (model=synth-flash), so the text means nothing"

_PER_PROMPT = {"draft", "chunk", "context", "memory", "chat", "sampling", "system"}
"""Keys that the loaded model does not depend on."""


@dataclass
class LoadGguf(Stage):
    """Binds the weights of GGUF files and makes a cache for them.

    The MTP block is loaded only when the run will draft with it.
    """

    profile: str
    device: str
    kernels: str
    graph: bool
    tensor_parallel: int
    threads: int
    no_gpu: bool
    uses_mtp: bool
    draft: int | str
    chunk: int
    context: int | None
    memory: float | None
    chat: str
    sampling: dict[str, Any]
    system: str
    choice: DeviceChoice = field(init=False)
    group: Group | None = field(init=False)

    reads = ("files", "prompt")
    writes = ("tokenizer", "tokens", "model", "cache", "kept", "sampling", "mtp_off", "identity",
              "runs_on")  # fmt: skip

    def __post_init__(self) -> None:
        # before anything is downloaded or read
        self.choice = choose(
            self.device,
            self.kernels,
            no_gpu=self.no_gpu,
            graph=self.graph,
            processes=self.tensor_parallel,
        )
        self.group = None
        if self.tensor_parallel > 1:
            self.group = join(self.tensor_parallel, self.choice.name)

    def share(self, state: State) -> None:
        """Set tokenizer and model, for any number of prompts."""
        self._switch_mtp(state)
        self._choose_sampling(state)
        self._read_vocabulary(state)
        self._load(state)
        state.kept = Kept()

    def share_key(self) -> object:
        """What the model depends on: not on the prompt, nor on how many drafts if there are any."""
        keys = [item.name for item in fields(self) if item.init]
        kept = [name for name in keys if name not in _PER_PROMPT]
        drafts = (self.draft != 0, self.sampling["lossless"] or self._sampling().greedy)
        return type(self), *drafts, *(repr(getattr(self, name)) for name in kept)

    def run(self, state: State) -> None:
        """Set the model, an empty cache, and `tokens` to the ids of the prompt."""
        config = ModelConfig.from_gguf(state.files.main)
        self._read_vocabulary(state)
        mode = self._chat_mode(state.tokenizer)
        state.tokens = self._prompt_ids(state, mode)
        context = self._context(config, len(state.tokens))
        self._switch_mtp(state)
        self._choose_sampling(state)
        self._load(state)
        state.cache = self._empty_cache(state, config)
        template = state.tokenizer.chat_template
        state.runs_on = f"{self.choice.name}, {self.choice.kernels} kernels ({self.choice.why})"
        if self.tensor_parallel > 1:
            state.runs_on += f", {self.tensor_parallel} processes"
        state.run.record(
            chat=mode,
            chat_template=template and hashlib.sha256(template.encode()).hexdigest(),
            device=self.choice.name,
            kernels=self.choice.kernels,
            device_why=self.choice.why,
            tensor_parallel=self.tensor_parallel,
            context_limit=context,
            threads=torch.get_num_threads(),
        )

    def _read_vocabulary(self, state: State) -> None:
        if state.tokenizer is None:
            state.tokenizer = Tokenizer.from_metadata(state.files.main.metadata)

    def _load(self, state: State) -> None:
        if self.threads:
            torch.set_num_threads(self.threads)
        if state.model is not None:
            return
        main, mtp = state.files
        wanted = self.uses_mtp and self.draft != 0 and not state.mtp_off
        self._say(self.choice)
        config = ModelConfig.from_gguf(main)
        cache = self._new_cache(config, torch.device("meta")).nbytes
        state.model = self._model(config, main, mtp if wanted else None, cache)

    def _model(
        self, config: ModelConfig, main: GgufFile, mtp: GgufFile | None, cache: int
    ) -> Model:
        """The model of these files; `cache` are the bytes that a full cache takes beside it."""
        if self.choice.name == "cpu":
            self._check_memory(config, [main, mtp], cache)
        return Model.load(
            main,
            mtp,
            profile=self.profile,
            kernels=self.choice.kernels,
            device=torch.device(self.choice.name),
            beside=cache,
            group=self.group,
        )

    def _check_memory(
        self, config: ModelConfig, files: Sequence[GgufFile | None], cache: int
    ) -> None:
        """Refuse what does not fit before any weight is read."""
        tensors = {
            (file.path, info.name): info.nbytes
            for file in files
            if file is not None
            for info in file.tensors.values()
        }
        given = self.memory
        check_memory(
            weights=sum(tensors.values()),
            cache=cache,
            context=self._largest_context(config),
            per_token=4 * config.cache_growth,
            available=available_bytes() if given is None else round(given * GIB),
        )

    def _empty_cache(self, state: State, config: ModelConfig) -> KVCache:
        """A new cache, or that of the text before, which the graphs of the decode stage know."""
        make = partial(self._new_cache, config, torch.device(self.choice.name))
        if state.kept is None:
            return make()
        return state.kept.cache(make, self._new_cache(config, torch.device("meta")).shape)

    def _new_cache(self, config: ModelConfig, device: torch.device) -> KVCache:
        return KVCache(
            config,
            context=self._largest_context(config),
            draft_max=draft_max(self.draft),
            chunk=self.chunk,
            device=device,
        )

    def _prompt_ids(self, state: State, mode: str) -> list[int]:
        if state.messages:
            return chat.conversation_ids(state.tokenizer, state.messages, chat=mode)
        return chat.prompt_ids(state.tokenizer, state.prompt, chat=mode, system=self.system)

    def _switch_mtp(self, state: State) -> None:
        if self.no_gpu and self.draft != 0:
            state.switch_mtp_off("DS4_NO_GPU (runtime.no_gpu) asks for plain greedy decoding")
        if self.tensor_parallel > 1 and self.draft != 0 and self.uses_mtp:
            state.switch_mtp_off(
                f"tensor parallelism, {self.tensor_parallel} processes share the model"
            )

    def _sampling(self) -> Sampling:
        return Sampling(**{key: self.sampling[key] for key in SAMPLING_KEYS})

    def _say(self, choice: DeviceChoice) -> None:
        """Tell what computes; a plain run on the CPU tells it in its closing table only."""
        if choice.name != "cpu" or self.device != "auto" or self.kernels != "auto" or self.graph:
            print(
                f"device: {choice.name}, {choice.kernels} kernels ({choice.why})", file=sys.stderr
            )

    def _choose_sampling(self, state: State) -> None:
        sampling = self._sampling()
        if sampling.greedy:
            return
        state.sampling, state.identity = sampling, "sampled"
        state.run.record(identity="sampled")
        if (
            self.draft != 0
            and self.uses_mtp
            and not self.sampling["lossless"]
            and not state.mtp_off
        ):
            state.switch_mtp_off(
                "sampling (temperature above 0); sampling.lossless=true drafts and keeps the "
                "distribution"
            )

    def _chat_mode(self, tokenizer: Tokenizer) -> str:
        if self.chat != "auto":
            return self.chat
        return "think" if {USER, ASSISTANT, THINK} <= set(tokenizer.specials) else "raw"

    def _largest_context(self, config: ModelConfig) -> int:
        return self.context or min(config.context_length, LARGEST_DEFAULT_CONTEXT)

    def _context(self, config: ModelConfig, prompt: int) -> int:
        context = self._largest_context(config)
        if context > config.context_length:
            print(
                f"note: runtime.context={context} exceeds the {config.context_length} tokens that "
                "the model was made for; what it writes beyond them may be poor",
                file=sys.stderr,
            )
        if prompt >= context:
            raise Ds4FlowError(
                f"the prompt has {prompt} tokens; with a context of {context} that leaves no room "
                "to generate",
                f"shorten the prompt, or set runtime.context (the model's own is "
                f"{config.context_length})",
            )
        return context


@dataclass
class LoadSynth(LoadGguf):
    """Makes the random weights of a synthetic model where they compute; see `Unwritten`."""

    synth: dict[str, Any] | None

    def __post_init__(self) -> None:
        if self.synth is None:
            raise UsageError("load=synth makes no model up by itself", "use model=synth-flash")
        if self.tensor_parallel > 1:
            raise UsageError(
                f"model=synth-flash is made in one process, not in {self.tensor_parallel}",
                "start it without torchrun",
            )
        super().__post_init__()

    def run(self, state: State) -> None:
        """As `LoadGguf`; the record says that the text means nothing."""
        super().run(state)
        state.run.record(notes=[MEANINGLESS])

    def _model(
        self, config: ModelConfig, main: GgufFile, mtp: GgufFile | None, cache: int
    ) -> Model:
        from ds4flow.synth.unwritten import Unwritten, made_model

        assert self.synth is not None  # __post_init__
        print(f"model: {main.path}, {size(main.size)}; {MEANINGLESS}", file=sys.stderr)
        given = None if self.memory is None else round(self.memory * GIB)
        return made_model(
            Unwritten.flash(self.synth),
            self.choice,
            self.profile,
            fix="use a larger device, a smaller runtime.context, or a smaller model: "
            "model.synth.layers=4 model.synth.experts=16",
            mtp=mtp is not None,
            beside=cache,
            available=given if self.choice.name == "cpu" else None,
        )
