"""Row invariance of every kernel and backend: row i of M rows has the bits of the row alone."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds4flow.cache import KVCache
from ds4flow.gguf import GgufFile
from ds4flow.kernels.cpu.backend import CpuKernels
from ds4flow.kernels.interface import LayerRows
from ds4flow.model.trunk import BACKENDS, Model

M_MAX = 17
START = 250  # row 5 finishes a block of 128 and of 4


def random(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# The gpu backend needs a GPU or an interpreter of its own: test_gpu_values.py. The static one is
# slow on a CPU.
CASES = [
    pytest.param(
        (kernels, name),
        marks=[pytest.mark.slow] if kernels == "static" and name != "tiny-q4k" else [],
        id=f"{kernels}-{name}",
    )
    for kernels in sorted(set(BACKENDS) - {"gpu"})
    for name in ("tiny-f32", "tiny-q4k", "tiny-iq2")
]


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, golden_dir: Path) -> Model:
    kernels, name = request.param
    main = GgufFile.open(golden_dir / f"{name}.gguf")
    mtp = GgufFile.open(golden_dir / f"{name}.mtp-support.gguf")
    return Model.load(main, mtp, profile="official", kernels=kernels)


@pytest.fixture(scope="module")
def rows(model: Model) -> list[LayerRows]:
    """Cache rows filled up to START with a real prefix."""
    cache = KVCache(model.config, context=START + 20, draft_max=16, chunk=64)
    tokens = torch.randint(0, model.config.vocab, (START,), generator=torch.Generator()).tolist()
    for first in range(0, START, 64):
        part = tokens[first : first + 64]
        model.forward(part, cache)
        cache.commit(len(part))
    return cache.layers


def copy(rows: LayerRows) -> LayerRows:
    import copy as copying

    return copying.deepcopy(rows)


def tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in tensors(item)]
    return [torch.tensor(-1 if value is None else value)]


def check(operation, inputs: torch.Tensor) -> None:
    """`operation(rows, start)` on all rows against each row alone at its own position."""
    together = operation(inputs, START)
    for i in range(inputs.shape[0]):
        alone = operation(inputs[i : i + 1], START + i)
        for whole, one in zip(together, alone, strict=True):
            assert torch.equal(whole[i], one[0])


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 7, 8, 9, M_MAX])
def test_matrix_products(model, m):
    for weight in {w.shape: w for w in model.matrices() if len(w.shape) == 2}.values():
        x = random(m, weight.shape[1], seed=m)
        check(lambda part, _, weight=weight: (model.kernels.linear(part, weight),), x)


@pytest.mark.parametrize("m", [2, 5, M_MAX])
def test_hyper_connections(model, m):
    layer, d = model.weights.layers[0], model.config.dim
    streams = random(m, model.config.streams, d, seed=m)
    kernels = model.kernels
    check(lambda part, _: kernels.hc_pre(part, layer.hc_attn, layer.attn_norm), streams)
    check(lambda part, _: (kernels.hc_head(part, model.weights.head.hc, layer.ffn_norm),), streams)
    _, post, comb = kernels.hc_pre(streams, layer.hc_attn, layer.attn_norm)
    block = random(m, d, seed=m + 1)
    together = kernels.hc_post(block, streams, post, comb)
    for i in range(m):
        one = slice(i, i + 1)
        assert torch.equal(
            kernels.hc_post(block[one], streams[one], post[one], comb[one])[0], together[i]
        )


@pytest.mark.parametrize("m", [2, 4, M_MAX])
def test_experts(model, m):
    tokens = torch.randint(0, model.config.vocab, (m,), generator=torch.Generator()).tolist()
    x = random(m, model.config.dim, seed=m)
    for layer in (model.weights.layers[0], model.weights.layers[-1], model.mtp.weights.layer):
        together = model.kernels.moe(x, tokens, layer)
        for i in range(m):
            alone = model.kernels.moe(x[i : i + 1], tokens[i : i + 1], layer)
            assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("m", [2, 4, M_MAX])
@pytest.mark.parametrize("index", [0, 2, 3])
def test_attention_of_each_ratio(model, rows, index, m):
    """Queries, KV rows, compressors, indexer, attention and output, row by row against one call."""
    layer, kernels = model.weights.layers[index], model.kernels
    rope = model.rope(layer.ratio)
    x = random(m, model.config.dim, seed=m)

    def run(part: torch.Tensor, start: int, store: LayerRows) -> list[torch.Tensor]:
        q, low = kernels.queries(part, layer, rope, start)
        kernels.kv_rows(part, layer, rope, store.window, start)
        chosen = None
        if layer.compressor is not None:
            kernels.compress(part, layer.compressor, store.compressed, rope, start, index=False)
        if layer.indexer is not None:
            kernels.compress(part, layer.indexer.compressor, store.index, rope, start, index=True)
            chosen = kernels.index_topk(part, low, layer.indexer, store.index, rope, start)
        heads = kernels.attend(q, layer, store, rope, start, chosen)
        return [q, low, heads, kernels.attention_output(heads, layer)]

    one, many = copy(rows[index]), copy(rows[index])
    together = run(x, START, many)
    for i in range(m):
        alone = run(x[i : i + 1], START + i, one)
        for whole, single in zip(together, alone, strict=True):
            assert torch.equal(whole[i], single[0])
    assert torch.equal(one.window, many.window)
    for left, right in ((one.compressed, many.compressed), (one.index, many.index)):
        if left is not None:
            assert torch.equal(left.values, right.values)
            assert torch.equal(left.scores, right.scores)
            assert torch.equal(left.pool, right.pool)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    m=st.integers(2, M_MAX),
    place=st.integers(0, M_MAX - 1),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    seed=st.integers(0, 2**31),
)
def test_neighbours_never_leak(model, m, place, scale, seed):
    """A row keeps its bits whatever finite values its neighbours hold."""
    place %= m
    layer = model.weights.layers[-1]
    x = random(m, model.config.dim, seed=seed)
    y = random(m, model.config.dim, seed=seed + 1, scale=scale)
    y[place] = x[place]
    for weight in (layer.q_a, layer.kv, layer.moe.router, layer.moe.shared_gate):
        left, right = model.kernels.linear(x, weight), model.kernels.linear(y, weight)
        assert torch.equal(left[place], right[place])


def whole_passes(model: Model, first: int, widths: Iterable[int]) -> None:
    """Logits of passes of these widths after `first` rows, against one row at a time."""
    widths = list(widths)
    end = first + sum(widths)
    tokens = torch.randint(0, model.config.vocab, (end,), generator=torch.Generator()).tolist()
    single = KVCache(model.config, context=end, draft_max=0)
    wide = KVCache(model.config, context=end, draft_max=16)
    for cache in (single, wide):
        for start in range(0, first, 64):
            model.forward(tokens[start : min(start + 64, first)], cache)
            cache.commit(min(64, first - start))
    for width in widths:
        part = tokens[wide.length : wide.length + width]
        got = model.logits(model.forward(part, wide))
        wide.commit(width)
        for i, token in enumerate(part):
            assert torch.equal(got[i], model.logits(model.forward([token], single))[0])
            single.commit(1)


def test_a_whole_pass_equals_single_steps(model):
    """Bit for bit, across blocks of 4 and of 128; the backends of a CPU at every width up to 17."""
    if isinstance(model.kernels, CpuKernels):
        whole_passes(model, 0, range(1, M_MAX + 1))
    else:
        whole_passes(model, 110, (1, 2, 3, 5, 9, M_MAX))


@pytest.mark.slow
def test_a_whole_pass_of_every_width_equals_single_steps(model):
    whole_passes(model, 0, range(1, M_MAX + 1))
