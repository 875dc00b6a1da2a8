"""Dimensions and constants of a DeepSeek-V4 model, read from GGUF metadata.

Promise: nothing that changes results is guessed. A key that is missing, contradictory or of another
architecture is reported, all problems at once, before a weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ds4flow.errors import ModelFileError
from ds4flow.gguf import GgufFile

ARCHITECTURE = "deepseek4"
SUPPORT_ARCHITECTURE = "deepseek4_mtp_support"
RATIOS = (0, 4, 128)
SQRT_SOFTPLUS = 4
LARGEST = (1 << 31) - 1
MOST_BLOCKS = 4096
YARN_BETA_FAST, YARN_BETA_SLOW = 32.0, 1.0  # the published defaults of YaRN itself
GET_COMPLETE = "get a file whose converter wrote all keys of this architecture, or add them to it"

T = TypeVar("T")


@dataclass(frozen=True)
class ModelConfig:
    """All dimensions of one model; comments give the paper's names where they differ.

    `ratios`, `clamp` and `clamp_shared` have one entry per trunk layer and one for the MTP block.
    """

    layers: int
    dim: int
    vocab: int
    streams: int  # hyper-connection streams
    sinkhorn: int  # Sinkhorn iterations
    heads: int
    head_dim: int  # also the width of a latent KV row: key and value are one
    rope_dim: int  # rotary channels, the last ones of a row
    q_rank: int
    groups: int  # groups of the output projection
    o_rank: int
    window: int  # positions, the own one included
    ratios: tuple[int, ...]  # compression ratio: 0 (window only), 4 or 128
    index_heads: int
    index_dim: int
    top_k: int  # compressed rows that the indexer selects
    experts: int
    experts_used: int
    experts_shared: int
    expert_dim: int
    hash_layers: int  # the first layers route by token id
    expert_scale: float
    expert_norm: bool
    clamp: tuple[float, ...]  # SwiGLU clamp of the routed experts; 0 = none
    clamp_shared: tuple[float, ...]
    eps: float
    eps_hc: float
    rope_base: float  # layers without compression
    rope_base_compress: float  # layers with compression
    yarn_factor: float  # layers with compression; 1 = no YaRN
    yarn_original: int
    yarn_beta_fast: float
    yarn_beta_slow: float
    context_length: int

    @classmethod
    def from_gguf(cls, file: GgufFile) -> ModelConfig:
        """Read the configuration of a main file.

        The number of trunk layers is `block_count`, less one only if the last block really is an
        MTP block; `nextn_predict_layers` is not consulted. Raises ModelFileError listing every
        problem.
        """
        _check_main(file)
        check_architecture(file)
        return _read(file)

    def ratio(self, layer: int) -> int:
        """Compression ratio of trunk layer `layer`."""
        return self.ratios[layer]

    @property
    def mtp_ratio(self) -> int:
        """Compression ratio of the MTP block: the entry after the trunk's, 0 if there is none."""
        return self.ratios[self.layers] if len(self.ratios) > self.layers else 0

    @property
    def cache_growth(self) -> float:
        """Values of finished rows that one more token adds to the cache, on average."""
        return sum(
            (self.head_dim + (self.index_dim if ratio == 4 else 0)) / ratio
            for ratio in self.ratios[: self.layers]
            if ratio
        )


def check_architecture(file: GgufFile) -> None:
    """Raise ModelFileError unless `file` declares itself to be DeepSeek-V4, main or MTP sidecar."""
    found = file.metadata.get("general.architecture")
    if found == ARCHITECTURE:
        return
    if found is None:
        raise ModelFileError(
            f"{file.path} has no key general.architecture", "give a DeepSeek-V4 GGUF file"
        )
    what = f"{file.path} has the architecture {_short(found)}, not {ARCHITECTURE!r}"
    if isinstance(found, str) and ("dflash" in found or "dspark" in found):
        raise ModelFileError(
            f"{what}: a DSpark drafter, which is not covered", "use the first release's MTP block"
        )
    raise ModelFileError(what, "give a DeepSeek-V4 GGUF file")


def _check_main(file: GgufFile) -> None:
    """Raise ModelFileError for an MTP support file; it lacks nearly all keys of a main file."""
    support = "mtp.0.e_proj.weight" in file.tensors and "token_embd.weight" not in file.tensors
    if support or file.metadata.get("general.architecture") == SUPPORT_ARCHITECTURE:
        raise ModelFileError(
            f"{file.path} is an MTP support file, not a main model",
            "give it as the MTP file and the main model as the model",
        )


def nextn_block(file: GgufFile) -> int | None:
    """Index of the MTP block that a file holds as its last `blk.N`, if it does."""
    last = _Keys(file).count("block_count") - 1
    return last if f"blk.{last}.nextn.eh_proj.weight" in file.tensors else None


def _read(file: GgufFile) -> ModelConfig:
    keys = _Keys(file)
    blocks = keys.count("block_count", most=MOST_BLOCKS)
    layers = blocks - (nextn_block(file) is not None)
    entries = layers + 1
    ratios = keys.ratios(blocks, entries)
    clamp = keys.clamp("swiglu_clamp_exp", layers, entries)
    shared_key = "swiglu_clamp_shexp"
    clamp_shared = keys.clamp(shared_key, layers, entries) if keys.has(shared_key) else clamp
    yarn_factor, yarn_original = keys.yarn()
    indexed = 4 in ratios
    config = ModelConfig(
        layers=layers,
        dim=keys.count("embedding_length"),
        vocab=keys.vocab(),
        streams=keys.count("hyper_connection.count"),
        sinkhorn=keys.count("hyper_connection.sinkhorn_iterations"),
        heads=keys.count("attention.head_count"),
        head_dim=keys.count("attention.key_length"),
        rope_dim=keys.count("rope.dimension_count"),
        q_rank=keys.count("attention.q_lora_rank"),
        groups=keys.count("attention.output_group_count"),
        o_rank=keys.count("attention.output_lora_rank"),
        window=keys.count("attention.sliding_window"),
        ratios=ratios,
        index_heads=keys.count("attention.indexer.head_count") if indexed else 0,
        index_dim=keys.count("attention.indexer.key_length") if indexed else 0,
        top_k=keys.count("attention.indexer.top_k") if indexed else 0,
        experts=keys.count("expert_count"),
        experts_used=keys.count("expert_used_count"),
        experts_shared=keys.count("expert_shared_count"),
        expert_dim=keys.count("expert_feed_forward_length"),
        hash_layers=keys.count("hash_layer_count", least=0),
        expert_scale=keys.real("expert_weights_scale"),
        expert_norm=keys.flag("expert_weights_norm"),
        clamp=clamp,
        clamp_shared=clamp_shared,
        eps=keys.real("attention.layer_norm_rms_epsilon"),
        eps_hc=keys.real("hyper_connection.epsilon"),
        rope_base=keys.real("rope.freq_base"),
        rope_base_compress=keys.real("attention.compress_rope_freq_base"),
        yarn_factor=yarn_factor,
        yarn_original=yarn_original,
        yarn_beta_fast=keys.real("rope.scaling.yarn_beta_fast", YARN_BETA_FAST),
        yarn_beta_slow=keys.real("rope.scaling.yarn_beta_slow", YARN_BETA_SLOW),
        context_length=keys.count("context_length"),
    )
    keys.check_fixed("attention.head_count_kv", 1)
    keys.check_fixed("attention.value_length", config.head_dim)
    keys.check_fixed("expert_gating_func", SQRT_SOFTPLUS)
    keys.check_fixed("expert_group_count", 0, 1)
    keys.check_fixed("leading_dense_block_count", 0)
    if not keys.missing and not keys.wrong:
        keys.wrong += _contradictions(config)
    keys.report()
    return config


def _contradictions(c: ModelConfig) -> list[str]:
    rules = {
        f"{c.heads} heads do not divide into {c.groups} output groups": c.heads % c.groups == 0,
        f"{c.rope_dim} rotary channels must be even and at most {c.head_dim}, a head's width": (
            c.rope_dim % 2 == 0 and c.rope_dim <= c.head_dim
        ),
        f"indexer rows of {c.index_dim} are narrower than {c.rope_dim} rotary channels": (
            not c.index_heads or c.index_dim >= c.rope_dim
        ),
        f"{c.experts_used} experts used of {c.experts}": c.experts_used <= c.experts,
        f"{c.hash_layers} hash-routed layers of {c.layers}": c.hash_layers <= c.layers,
        f"the YaRN factor {c.yarn_factor} is below 1": c.yarn_factor >= 1.0,
        f"the rotary bases {c.rope_base} and {c.rope_base_compress} must be above 1": (
            min(c.rope_base, c.rope_base_compress) > 1.0
        ),
        f"the norm epsilons {c.eps} and {c.eps_hc} must not be negative": min(c.eps, c.eps_hc) >= 0,
    }
    return [text for text, holds in rules.items() if not holds]


class _Keys:
    """Lenient reader of `deepseek4.*` keys that collects what is missing or wrong.

    Producers differ in integer and float widths, and one writes a scalar where another writes an
    array of equal values.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.missing: list[str] = []
        self.wrong: list[str] = []

    def has(self, key: str) -> bool:
        return f"{ARCHITECTURE}.{key}" in self.file.metadata

    def _scalar(self, key: str, convert: Callable[[object], T | None], kind: str, instead: T) -> T:
        """The value of `key`; `instead` after noting a problem, so that reading goes on."""
        if not self.has(key):
            self.missing.append(f"{ARCHITECTURE}.{key}")
            return instead
        value = self.file.metadata[f"{ARCHITECTURE}.{key}"]
        if isinstance(value, list):
            if not value or any(v != value[0] for v in value):
                self.wrong.append(f"{key} is a list without one common value")
                return instead
            value = value[0]
        converted = convert(value)
        if converted is None:
            self.wrong.append(f"{key} is {_short(value)}, not {kind}")
            return instead
        return converted

    def count(self, key: str, least: int = 1, most: int = LARGEST) -> int:
        def convert(value: object) -> int | None:
            number = _integer(value)
            return number if number is not None and least <= number <= most else None

        return self._scalar(key, convert, f"an integer from {least} to {most}", max(least, 1))

    def real(self, key: str, default: float | None = None) -> float:
        if default is not None and not self.has(key):
            return default
        return self._scalar(key, _real, "a finite number", 1.0)

    def flag(self, key: str) -> bool:
        def convert(value: object) -> bool | None:
            return bool(value) if value in (0, 1) else None

        return self._scalar(key, convert, "true or false", True)

    def _array(self, key: str, convert: Callable[[object], T | None]) -> list[T] | None:
        """The elements of `key`, None after noting a problem."""
        if not self.has(key):
            self.missing.append(f"{ARCHITECTURE}.{key}")
            return None
        value = self.file.metadata[f"{ARCHITECTURE}.{key}"]
        values = [convert(v) for v in value] if isinstance(value, list) else [convert(value)]
        good = [v for v in values if v is not None]
        if len(good) < len(values):
            self.wrong.append(f"{key} is {_short(value)}, not a list of numbers")
            return None
        return good

    def ratios(self, blocks: int, entries: int) -> tuple[int, ...]:
        """Compression ratios of the trunk layers and, when present, of the MTP block."""
        key = "attention.compress_ratios"
        values = self._array(key, _integer)
        if values is None:
            return (0,)
        if len(values) < blocks:
            self.wrong.append(f"{key} has {len(values)} entries for {blocks} blocks")
        strange = sorted({v for v in values if v not in RATIOS})
        if strange:
            self.wrong.append(f"{key} has {_short(strange)}; known ratios are 0, 4 and 128")
        return tuple(values[:entries])

    def clamp(self, key: str, layers: int, entries: int) -> tuple[float, ...]:
        """SwiGLU clamps of the trunk layers and the MTP block (the last layer's if it has none)."""
        values = self._array(key, _real)
        if not values:
            if values is not None:
                self.wrong.append(f"{key} is an empty list")
            return (0.0,)
        if not isinstance(self.file.metadata[f"{ARCHITECTURE}.{key}"], list):
            values = values * entries
        if len(values) < layers:
            self.wrong.append(f"{key} has {len(values)} entries for {layers} layers")
        if min(values) < 0:
            self.wrong.append(f"{key} has the negative value {min(values)}")
        values.append(values[-1])
        return tuple(values[:entries])

    def vocab(self) -> int:
        """`vocab_size`, or the length of the token list where a converter left it out."""
        tokens = self.file.metadata.get("tokenizer.ggml.tokens")
        if not self.has("vocab_size") and isinstance(tokens, list) and tokens:
            return len(tokens)
        return self.count("vocab_size")

    def yarn(self) -> tuple[float, int]:
        """YaRN factor and original context; (1, context) only where a file says so itself.

        Without `rope.scaling.type` the compressed layers would silently get other angles, so its
        absence is an error.
        """
        key = "rope.scaling.type"
        kind = self.file.metadata.get(f"{ARCHITECTURE}.{key}")
        if kind == "none":
            return 1.0, self.count("context_length")
        if kind is None:
            self.missing.append(f"{ARCHITECTURE}.{key}")
        elif kind != "yarn":
            self.wrong.append(f"{key} is {_short(kind)}, not 'yarn' or 'none'")
        return self.real("rope.scaling.factor"), self.count("rope.scaling.original_context_length")

    def check_fixed(self, key: str, *allowed: int) -> None:
        """A key that may be absent but, when present, must have a value that is implemented."""
        if not self.has(key):
            return
        value = self._scalar(key, _integer, "an integer", allowed[0])
        if value not in allowed:
            self.wrong.append(f"{key} is {value}; only {' or '.join(map(str, allowed))} is covered")

    def report(self) -> None:
        problems = []
        if self.missing:
            problems.append(f"missing keys: {', '.join(dict.fromkeys(self.missing))}")
        problems += self.wrong
        if problems:
            raise ModelFileError(f"{self.file.path}: {'; '.join(problems)}", GET_COMPLETE)


def _integer(value: object) -> int | None:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _real(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
