"""The compiled operations against the reference backend, and the small functions against torch."""

import copy
from pathlib import Path

import pytest
import torch

from ds4flow.cache import KVCache
from ds4flow.errors import NumericsError
from ds4flow.gguf import GgufFile
from ds4flow.kernels import numerics
from ds4flow.kernels.cpu import CpuKernels, lanes, rows
from ds4flow.kernels.cpu.library import library
from ds4flow.kernels.cpu.linking import entry
from ds4flow.kernels.interface import LayerRows
from ds4flow.kernels.reference import ReferenceKernels
from ds4flow.model.layer import attention
from ds4flow.model.trunk import Model

START = 250
M = 7


# --- small functions, each as a kernel of its own: (x, y, rows, width) ---


def e4m3_rows(x: int, y: int, m: int, width: int, a: int, b: int, c: int, d: int, e: int) -> int:
    lanes.copy(y, x, 4 * m * width)
    for i in range(m):
        rows.round_e4m3(y + 4 * width * i, width)
    return 0


def e2m1_rows(x: int, y: int, m: int, width: int, a: int, b: int, c: int, d: int, e: int) -> int:
    lanes.copy(y, x, 4 * m * width)
    for i in range(m):
        rows.round_e2m1(y + 4 * width * i, width)
    return 0


def hadamard_rows(
    x: int, y: int, m: int, width: int, a: int, b: int, c: int, d: int, e: int
) -> int:
    lanes.copy(y, x, 4 * m * width)
    for i in range(m):
        rows.hadamard(y + 4 * width * i, width)
    return 0


def exp_rows(x: int, y: int, m: int, width: int, a: int, b: int, c: int, d: int, e: int) -> int:
    for at in range(0, 4 * m * width, 64):
        lanes.put_lanes(y + at, lanes.exp(lanes.lanes(x + at)))
    return 0


def softplus_rows(
    x: int, y: int, m: int, width: int, a: int, b: int, c: int, d: int, e: int
) -> int:
    for at in range(0, 4 * m * width, 64):
        lanes.put_lanes(y + at, lanes.softplus(lanes.lanes(x + at)))
    return 0


def apply(function, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    address = library.address(function)
    entry(release=False)(address, x.data_ptr(), y.data_ptr(), *x.shape, 0, 0, 0, 0, 0)
    return y


def spread_out(m: int, width: int, seed: int) -> torch.Tensor:
    """Random rows that differ in size by many powers of two, with exact powers, zeros and ties."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, width, generator=generator)
    x *= torch.exp2(torch.randint(-30, 30, (m, 1), generator=generator).float())
    x[0] = torch.exp2(torch.arange(width) % 20 - 10.0)
    x[1] = 0.0
    x[2] = torch.arange(width) / 8.0 - width / 16.0
    return x


@pytest.mark.parametrize(
    ("function", "wanted"),
    [(e4m3_rows, numerics.fp8_round_trip), (e2m1_rows, numerics.fp4_round_trip)],
)
def test_simulated_quantisation_has_the_reference_bits(function, wanted):
    x = spread_out(50, 192, seed=3)
    assert torch.equal(apply(function, x), wanted(x))


def test_hadamard_is_the_reference_transform():
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(apply(hadamard_rows, x), numerics.hadamard(x), atol=1e-6)
    assert torch.allclose(apply(hadamard_rows, apply(hadamard_rows, x)), x, atol=1e-6)


def test_exponential_is_accurate_and_ignores_the_lane():
    x = torch.linspace(-87.3, 88.2, 16 * 4001).reshape(-1, 16)
    y = apply(exp_rows, x)
    exact = torch.exp(x.double())
    assert float(((y.double() - exact).abs() / exact).max()) <= 3e-7
    assert torch.equal(apply(exp_rows, x.roll(5, 1).contiguous()), y.roll(5, 1))
    special = torch.tensor([[0.0, -200.0, float("-inf"), float("nan"), 1e9] + [1.0] * 11])
    got = apply(exp_rows, special)[0]
    assert got[0] == 1.0
    assert got[1] == 0.0
    assert got[2] == 0.0
    assert torch.isnan(got[3])
    assert 1e38 < float(got[4]) < float("inf")


def test_softplus_is_accurate_down_to_tiny_values():
    x = torch.linspace(-80.0, 80.0, 16 * 2001).reshape(-1, 16)
    exact = torch.log1p(torch.exp(x.double()))
    relative = (apply(softplus_rows, x).double() - exact).abs() / exact
    assert float(relative.max()) <= 1e-6


# --- operations against the reference backend ---


@pytest.fixture(scope="module", params=["tiny-q4k", "tiny-f32"])
def model(request: pytest.FixtureRequest, golden_dir: Path) -> Model:
    main = GgufFile.open(golden_dir / f"{request.param}.gguf")
    return Model.load(main, profile="plain", kernels="reference")


@pytest.fixture(scope="module")
def reference(model: Model) -> ReferenceKernels:
    assert isinstance(model.kernels, ReferenceKernels)
    return model.kernels


@pytest.fixture(scope="module")
def compiled(model: Model) -> CpuKernels:
    kernels = CpuKernels(model.config, model.profile, threads=1)
    kernels.prepare(list(model.matrices()))
    return kernels


@pytest.fixture(scope="module")
def filled(model: Model) -> list[LayerRows]:
    """Cache rows of a random prefix of START tokens, written by the reference."""
    cache = KVCache(model.config, context=START + 20, draft_max=16, chunk=64)
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, model.config.vocab, (START,), generator=generator).tolist()
    for first in range(0, START, 64):
        part = tokens[first : first + 64]
        model.forward(part, cache)
        cache.commit(len(part))
    return cache.layers


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(left: torch.Tensor, right: torch.Tensor, tolerance: float = 2e-6) -> None:
    size = max(float(right.abs().max()), 1.0)
    assert float((left - right).abs().max()) <= tolerance * size


def test_norms_and_hyper_connections(model, reference, compiled):
    config, layer = model.config, model.weights.layers[0]
    streams = noise(M, config.streams, config.dim)
    close(compiled.rms_norm(streams, layer.attn_norm), reference.rms_norm(streams, layer.attn_norm))
    close(compiled.rms_norm(streams, None), reference.rms_norm(streams, None))
    ours = compiled.hc_pre(streams, layer.hc_attn, layer.attn_norm)
    theirs = reference.hc_pre(streams, layer.hc_attn, layer.attn_norm)
    for left, right in zip(ours, theirs, strict=True):
        assert left.shape == right.shape
        close(left, right, 5e-6)
    block = noise(M, config.dim, seed=1)
    close(
        compiled.hc_post(block, streams, *theirs[1:]),
        reference.hc_post(block, streams, *theirs[1:]),
    )
    head = model.weights.head
    close(
        compiled.hc_head(streams, head.hc, head.norm),
        reference.hc_head(streams, head.hc, head.norm),
        5e-6,
    )


@pytest.mark.parametrize("index", [0, 2, 3])
def test_attention_of_each_ratio(model, reference, compiled, filled, index):
    layer = model.weights.layers[index]
    rope = model.rope(layer.ratio)
    x = noise(M, model.config.dim, seed=index)
    results = []
    for kernels in (reference, compiled):
        store = copy.deepcopy(filled[index])
        q, low = kernels.queries(x, layer, rope, START)
        kernels.kv_rows(x, layer, rope, store.window, START)
        chosen = None
        if layer.compressor is not None:
            kernels.compress(x, layer.compressor, store.compressed, rope, START, index=False)
        if layer.indexer is not None:
            kernels.compress(x, layer.indexer.compressor, store.index, rope, START, index=True)
            chosen = kernels.index_topk(x, low, layer.indexer, store.index, rope, START)
        heads = kernels.attend(q, layer, store, rope, START, chosen)
        output = kernels.attention_output(heads, layer)
        buffers = [store.window]
        for lane in (store.compressed, store.index):
            if lane is not None:
                buffers += [lane.values, lane.scores, lane.pool]
        results.append((chosen, [q, low, heads, output, *buffers]))
    (theirs, wanted), (ours, got) = results
    if theirs is not None:
        assert any(choice is not None for choice in theirs)
        for left, right in zip(ours, theirs, strict=True):
            assert (left is None) == (right is None)
            assert left is None or torch.equal(left, right)
    for left, right in zip(got, wanted, strict=True):
        close(left, right, 1e-5)


def test_a_plain_list_of_selected_blocks_is_accepted(model, reference, compiled, filled):
    layer, store = model.weights.layers[2], filled[2]
    rope = model.rope(layer.ratio)
    q = noise(3, model.config.heads, model.config.head_dim)
    chosen = [torch.tensor([0, 7, 30]), None, torch.tensor([61])]
    close(
        compiled.attend(q, layer, store, rope, START - 3, chosen),
        reference.attend(q, layer, store, rope, START - 3, chosen),
        1e-5,
    )


@pytest.mark.parametrize("m", [1, 2, 9])
def test_experts_by_table_and_by_score(model, reference, compiled, m):
    x = noise(m, model.config.dim, seed=m)
    tokens = list(range(5, 5 + m))
    for layer in (model.weights.layers[0], model.weights.layers[-1]):
        close(compiled.moe(x, tokens, layer), reference.moe(x, tokens, layer), 1e-5)


def test_scores_that_are_not_finite_name_the_layer(model, compiled):
    x = noise(2, model.config.dim)
    x[1, 3] = float("nan")
    layer = model.weights.layers[-1]
    with pytest.raises(NumericsError, match=f"layer {layer.index}"):
        compiled.moe(x, [1, 2], layer)


def test_ties_of_the_indexer_go_to_the_smaller_block(model, compiled, filled):
    """Equal keys give equal scores, wherever they lie: the first ones are kept."""
    layer = model.weights.layers[2]
    store = copy.deepcopy(filled[2].index)
    store.pool[:] = store.pool[0].clone()
    store.pool[40] = -store.pool[0]
    rope = model.rope(layer.ratio)
    x, low = noise(5, model.config.dim), noise(5, model.config.q_rank, seed=1)
    for choice in compiled.index_topk(x, low, layer.indexer, store, rope, START):
        assert len(choice) == model.config.top_k
        equal = [block for block in choice.tolist() if block != 40]
        assert equal == list(range(len(equal)))


def test_whole_layers_equal_their_operations_one_by_one(model, compiled, filled):
    """The one call for a layer against the interface's operations, bit for bit."""
    config = model.config
    streams, tokens = noise(3, config.streams, config.dim), [7, 8, 9]
    for index in (0, 2, 3):
        layer, rope = model.weights.layers[index], model.rope(model.weights.layers[index].ratio)
        stores = [copy.deepcopy(filled[index]) for _ in range(2)]
        whole = compiled.layers(streams, tokens, [(layer, stores[0], rope)], START)
        x, post, comb = compiled.hc_pre(streams, layer.hc_attn, layer.attn_norm)
        block = attention(compiled, x, layer, stores[1], rope, START)
        between = compiled.hc_post(block, streams, post, comb)
        x, post, comb = compiled.hc_pre(between, layer.hc_ffn, layer.ffn_norm)
        steps = compiled.hc_post(compiled.moe(x, tokens, layer), between, post, comb)
        assert torch.equal(whole, steps)
        assert torch.equal(stores[0].window, stores[1].window)


def test_exchanged_cache_buffers_are_noticed(model, compiled, filled):
    """Records of cache rows must follow the buffers, not only the object that holds them."""
    config, layer = model.config, model.weights.layers[0]
    streams, rope = noise(1, config.streams, config.dim), model.rope(0)
    store = copy.deepcopy(filled[0])
    first = compiled.layers(streams, [1], [(layer, store, rope)], START)
    old, store.window = store.window, torch.zeros_like(store.window)
    kept = old.clone()
    second = compiled.layers(streams, [1], [(layer, store, rope)], START)
    assert not torch.equal(first, second)
    assert torch.equal(old, kept)
    assert bool(store.window.any())


def test_streams_that_are_not_finite_name_layer_and_position(model, compiled, filled):
    config, layer = model.config, model.weights.layers[0]
    streams = noise(3, config.streams, config.dim)
    streams[2, 1, 5] = float("inf")
    store = copy.deepcopy(filled[0])
    with pytest.raises(NumericsError, match=f"layer 0 .*position {START + 2}"):
        compiled.layers(streams, [1, 2, 3], [(layer, store, model.rope(0))], START)
