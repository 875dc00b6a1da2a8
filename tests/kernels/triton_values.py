"""The Triton kernels against the reference kernels, in Triton's interpreter or on a GPU.

Not collected by itself: the interpreter and the compiler cannot share a process, so
`test_gpu_values.py` runs this file in one with TRITON_INTERPRET=1, and `tools/gpu_check.sh` without
it on a GPU. Equal bits of a row in any company are checked beside the values, because the
interpreter can be wrong in the same way for every row.
"""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ds4flow.cache import KVCache
from ds4flow.errors import ModelFileError
from ds4flow.gguf import GgufFile
from ds4flow.graph import DecodeGraph
from ds4flow.kernels.gpu.backend import GpuKernels
from ds4flow.kernels.gpu.launch import interpreting
from ds4flow.kernels.gpu.pack import TYPES, pack
from ds4flow.kernels.gpu.static import StaticKernels
from ds4flow.kernels.interface import LayerRows
from ds4flow.kernels.reference import ReferenceKernels
from ds4flow.kernels.sharded import sharded_kernels
from ds4flow.model.layer import layer_forward
from ds4flow.model.profile import PROFILES
from ds4flow.model.rope import Rope
from ds4flow.model.shard import Shard
from ds4flow.model.trunk import Model
from ds4flow.model.weights import HeadWeights, TrunkWeights
from ds4flow.quants import QTensor
from ds4flow.synth.presets import FLASH
from ds4flow.synth.rehearsal import Synthesis

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
SMALL = replace(
    FLASH,
    layers=3,
    dim=256,
    vocab=1100,
    heads=4,
    head_dim=128,
    q_rank=64,
    groups=2,
    o_rank=32,
    window=32,
    ratios=(0, 4, 128, 0),
    index_heads=4,
    index_dim=64,
    top_k=5,
    experts=6,
    experts_used=2,
    expert_dim=256,
    hash_layers=1,
    sinkhorn=4,
    clamp=(0.5,) * 4,
    clamp_shared=(0.0,) * 4,
)
TINY = replace(
    SMALL,
    dim=128,
    heads=2,
    q_rank=32,
    index_heads=2,
    experts=4,
    expert_dim=32,
    streams=2,
    sinkhorn=2,
)
"""For whole layers, which are slow in the interpreter."""
PAIRS = {name: (GpuKernels(TINY, p), ReferenceKernels(TINY, p)) for name, p in PROFILES.items()}
OURS = GpuKernels(SMALL, PROFILES["official"])
REFERENCE = ReferenceKernels(SMALL, PROFILES["official"])
DEVICE = OURS.device
if interpreting():
    OURS.columns = 128  # fewer, wider programs; a column's bits do not depend on it (tested below)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight(kind: str, *shape: int, seed: int = 0) -> QTensor:
    if kind == "BF16":
        return QTensor("w", kind, shape, random(*shape, seed=seed, scale=0.1).bfloat16())
    return Synthesis(SMALL, "q2", CPU, seed).matrix(kind, *shape)


def up(x: torch.Tensor) -> torch.Tensor:
    return x.to(DEVICE)


def close(ours: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-6) -> None:
    ours = ours.cpu()
    assert ours.shape == wanted.shape
    assert bool(torch.isfinite(wanted).all())
    assert float((ours - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


def test_the_kernels_run_where_they_should():
    assert DEVICE.type == ("cpu" if interpreting() else "cuda")


@pytest.mark.parametrize("kind", TYPES)
def test_planes_hold_the_stored_bytes(kind):
    w = weight(kind, 3, 512)
    planes = pack(w, DEVICE)
    parts = {id(t): t for t in (planes.codes, planes.scales, planes.factors)}
    assert sum(t.numel() * t.element_size() for t in parts.values()) == w.nbytes


@pytest.mark.parametrize("kind", TYPES)
def test_products_of_every_type(kind):
    """Values for M = 1, 3 and 16, and the bits of a row alone, in other places and among others."""
    w = weight(kind, 40, 256, seed=1)
    x = random(16, 256, seed=2)
    wanted = (x.double() @ w.float().double().T).float()
    whole = OURS.linear(up(x), w)
    close(whole, wanted)
    some = OURS.linear(up(x)[[4, 9, 2]], w)
    assert torch.equal(some, whole[[4, 9, 2]])
    assert torch.equal(OURS.linear(up(x)[9:10], w)[0], whole[9])


@pytest.mark.slow
@pytest.mark.parametrize("columns", [16, 64])
@pytest.mark.parametrize("kind", TYPES)
def test_products_of_every_width_and_tile(kind, columns, monkeypatch):
    """More rows than a tile, all M up to 17, ragged tiles of columns, rows long enough to be
    split."""
    w = weight(kind, 72, 1024, seed=3)
    x = random(17, 1024, seed=4)
    wide = OURS.linear(up(x), w)
    close(wide, (x.double() @ w.float().double().T).float())
    monkeypatch.setattr(OURS, "columns", columns)
    monkeypatch.setattr("ds4flow.kernels.gpu.base.LAUNCHES", 1)
    unsplit = OURS.linear(up(x), w)
    for m in (1, 2, 3, 16):
        assert torch.equal(OURS.linear(up(x)[:m], w), unsplit[:m])
    close(unsplit, wide.cpu())


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_a_row_has_its_bits_in_every_number_of_rows(kind):
    """M = 1..16, the row first, last and in between."""
    w = weight(kind, 24, 256, seed=7)
    x = random(16, 256, seed=8)
    whole = OURS.linear(up(x), w)
    for m in range(1, 17):
        first = (5 * m) % (17 - m)
        assert torch.equal(OURS.linear(up(x)[first : first + m], w), whole[first : first + m])


def test_long_rows_are_split_at_fixed_places():
    w = weight("F16", 24, 2048)
    x = random(3, 2048, seed=5)
    whole = OURS.linear(up(x), w)
    close(whole, (x.double() @ w.float().double().T).float())
    assert torch.equal(OURS.linear(up(x)[1:2], w)[0], whole[1])


def test_grouped_products_are_those_of_each_group():
    w, x = weight("Q8_0", 2 * 40, 64), random(3, 128)
    got = OURS._product(up(x), w, 2)
    dense = w.float()
    wanted = torch.cat((x[:, :64] @ dense[:40].T, x[:, 64:] @ dense[40:].T), dim=1)
    close(got, wanted)


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32", "Q8_0"])
def test_embedding_rows(kind):
    table = weight(kind, 20, 64)
    assert torch.equal(OURS.embed(table, [3, 19, 0]).cpu(), table.rows([3, 19, 0]))


def test_types_that_are_not_covered_are_refused_by_name():
    bad = QTensor("blk.0.odd", "Q5_0", (4, 32), torch.zeros(4, 22, dtype=torch.uint8))
    with pytest.raises(ModelFileError, match=r"blk\.0\.odd is stored as Q5_0"):
        OURS.prepare([bad])
    with pytest.raises(ModelFileError, match="embeddings"):
        OURS.embed(weight("Q2_K", 4, 256), [1])


# --- layers --------------------------------------------------------------------------------------


def moe_case(mix: str, hashed: bool):
    config = replace(SMALL, expert_dim=32) if mix == "q8" else SMALL
    layer = Synthesis(config, mix, CPU, 6).layer(0 if hashed else 2, 0, hashed=hashed)
    return layer, random(3, SMALL.dim, seed=7), [5, 1099, 5]


@pytest.mark.parametrize(("mix", "hashed"), [("q2", False), ("q8", True)])
def test_experts(mix, hashed):
    expert_case(mix, hashed)


def test_every_mxfp4_value_and_the_ends_of_its_exponents():
    """All sixteen codes, and the exponents at which the scale is subnormal."""
    data = torch.zeros(4, 17, dtype=torch.uint8)
    data[:, 1:] = torch.arange(16, dtype=torch.uint8) * 17
    data[:, 0] = torch.tensor([0, 1, 2, 130], dtype=torch.uint8)
    w = QTensor("w", "MXFP4", (4, 32), data)
    got = OURS.linear(up(torch.eye(32)), w).cpu().T
    assert torch.equal(got[2:], w.float()[2:])
    if interpreting():  # a GPU may take subnormal products for zero
        assert torch.equal(got[:2], w.float()[:2])


def test_a_part_of_a_weight_is_split_as_the_whole(monkeypatch):
    """Rows long enough to be split: rows shared as queries are, groups as the output's are."""
    monkeypatch.setattr("ds4flow.kernels.gpu.base.LAUNCHES", 8)
    monkeypatch.setattr(OURS, "columns", 16)
    x, w = random(2, 2048, seed=3), weight("F16", 48, 2048, seed=4)
    whole, wide = OURS._product(up(x), w, 1), OURS._product(up(x).repeat(1, 2), w, 2)
    lone = [OURS._product(up(x), half(w, i), 1) for i in range(2)]
    monkeypatch.setattr(OURS, "shares", 2)
    parts = [OURS._product(up(x), half(w, i), 1, 1) for i in range(2)]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert not torch.equal(torch.cat(lone, dim=1), whole)  # or nothing would have been shown
    groups = [OURS._product(up(x), half(w, i), 1, 2) for i in range(2)]
    assert torch.equal(torch.cat(groups, dim=1), wide)


def half(w: QTensor, i: int) -> QTensor:
    rows = w.shape[0] // 2
    data = w.data[i * rows : (i + 1) * rows]
    return replace(w, name=f"half {i}", shape=(rows, *w.shape[1:]), data=data)


class Alone:
    """A group whose other processes are not there: only what one computes is looked at."""

    rank, world = 0, 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x]


def test_the_parts_of_two_processes_are_those_of_one():
    """Bits of the query rows, of the attended heads' projection and of each expert."""
    config = replace(SMALL, heads=4, groups=2, experts=6, expert_dim=32)
    layer = Synthesis(config, "q8", CPU, 6).layer(2, 0, hashed=False)
    trunk = Synthesis(config, "q8", CPU, 7)
    rope = Rope(config, compressed=False, exact=False)
    x, heads = random(3, config.dim, seed=8), random(3, config.heads, config.head_dim, seed=9)
    wanted_q, _ = OURS.queries(up(x), layer, rope, 5)
    wanted_o = OURS._grouped(up(heads), layer)
    ids, _ = OURS.route(up(x), [1, 2, 3], layer)
    wanted_parts = OURS._expert_parts(up(x), ids, layer)
    q, o, parts = [], [], torch.full_like(wanted_parts, torch.nan)
    for rank in range(2):
        shard = Shard(config, rank, 2)
        whole = TrunkWeights(layer.q_a, layer.q_a, HeadWeights(trunk.hyper(head=True), x), (layer,))
        mine = shard.trunk(whole).layers[0]
        ours = sharded_kernels("gpu", PROFILES["official"], Alone(rank), shard, DEVICE)
        ours.columns = OURS.columns
        q.append(ours.queries(up(x), mine, rope, 5)[0])
        o.append(ours._grouped(up(heads)[:, 2 * rank : 2 * rank + 2], mine))
        own = (ids // 3 == rank)[..., None]
        parts = torch.where(own, ours.own_parts(up(x), ids, mine), parts)
    assert torch.equal(torch.cat(q, dim=1), wanted_q)
    assert torch.equal(torch.cat(o, dim=1), wanted_o)
    assert torch.equal(parts, wanted_parts)


@pytest.mark.slow
@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("mix", ["q2", "q4", "q8", "mxfp4"])
def test_experts_of_every_mix(mix, hashed):
    expert_case(mix, hashed)


def expert_case(mix: str, hashed: bool) -> None:
    """Values, and the bits of a row alone."""
    layer, x, tokens = moe_case(mix, hashed)
    whole = OURS.moe(up(x), tokens, layer)
    close(whole, REFERENCE.moe(x, tokens, layer), 1e-5)
    assert torch.equal(OURS.moe(up(x)[1:2], tokens[1:2], layer)[0], whole[1])


def test_only_chosen_experts_are_read():
    """Experts that no row chose hold NaN here; reading one would show."""
    layer, x, tokens = moe_case("q8", hashed=False)
    x = x[:2]
    ids, _ = OURS.route(up(x), tokens[:2], layer)
    wanted = OURS.moe(up(x), tokens[:2], layer)
    chosen = set(ids.flatten().tolist())
    assert len(chosen) < SMALL.experts
    stacks = {}
    for name in ("gate", "up", "down"):
        stack = getattr(layer.moe, name)
        data = stack.data.clone()
        for expert in set(range(SMALL.experts)) - chosen:
            data[expert] = 0xFF  # factors become NaN
        stacks[name] = replace(stack, data=data)
    poisoned = replace(layer, moe=replace(layer.moe, **stacks))
    assert torch.equal(OURS.moe(up(x), tokens[:2], poisoned), wanted)


def test_routing_ties_go_to_the_lower_id_and_nan_is_not_hidden():
    layer, x, tokens = moe_case("q8", hashed=False)
    same = layer.moe.router.data.clone()
    same[:] = same[0]
    flat = replace(layer.moe, router=replace(layer.moe.router, data=same), bias=torch.zeros(6))
    ids, weights = OURS.route(up(x), tokens, replace(layer, moe=flat))
    assert ids.tolist() == [[0, 1]] * 3
    assert torch.allclose(weights.cpu(), torch.full((3, 2), SMALL.expert_scale / 2))
    x[1, 7] = torch.nan
    _, weights = OURS.route(up(x), tokens, layer)
    assert bool(torch.isnan(weights[1]).all())
    assert bool(torch.isfinite(weights[[0, 2]]).all())


def test_hyper_connections():
    synth = Synthesis(SMALL, "q2", CPU, 8)
    hyper, head = synth.hyper(head=False), synth.hyper(head=True)
    hyper = replace(hyper, scale=torch.tensor([0.5, 0.25, 1.5]))
    streams, norm = random(3, 4, SMALL.dim, seed=9), random(SMALL.dim, seed=10)
    ours = OURS.hc_pre(up(streams), hyper, norm)
    wanted = REFERENCE.hc_pre(streams, hyper, norm)
    for left, right in zip(ours, wanted, strict=True):
        close(left, right, 5e-6)
    close(OURS.hc_head(up(streams), head, norm), REFERENCE.hc_head(streams, head, norm), 5e-6)
    block = random(3, SMALL.dim, seed=11)
    mixed = OURS.hc_post(up(block), up(streams), *ours[1:])
    close(mixed, REFERENCE.hc_post(block, streams, *wanted[1:]))


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("profile", ["official"])
def test_a_whole_layer(ratio, profile):
    """Output and cache rows of 3 rows that finish blocks of 4 and 128; then row by row, bit for
    bit."""
    layer_case(ratio, profile, 3, 126)


def test_the_capacity_of_the_cache_changes_no_bit_and_costs_no_read():
    """A layer that selects, in a cache for 280 tokens and in one for 800 whose rows beyond the
    text hold NaN, where a read would show."""
    kernels, reference = PAIRS["official"]
    if interpreting():
        kernels.columns = 128
    config = replace(TINY, ratios=(4, 0), layers=1)
    layer = Synthesis(TINY, "q8", CPU, 12).layer(2, 4, hashed=False)
    rope = Rope(TINY, compressed=True, exact=False)
    streams, found = random(3, 2, TINY.dim, seed=13), []
    for context in (280, 800):
        rows = KVCache(config, context=context, draft_max=15, chunk=16).layers[0]
        for at in range(62, 126, 16):
            layer_forward(
                reference, random(16, 2, TINY.dim, seed=at), [0] * 16, layer, rows, rope, at
            )
        rows = moved(rows)
        for part in (rows.compressed, rows.index):
            part.pool[126 // 4 :] = torch.nan
        found.append(layer_forward(kernels, up(streams), [0, 1, 2], layer, rows, rope, 126))
    assert bool(torch.isfinite(found[0]).all())
    assert torch.equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize(("start", "m"), [(0, 1), (0, 5), (18, 2), (251, 5), (119, 16)])
@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("profile", ["plain", "official"])
def test_a_whole_layer_everywhere(ratio, profile, start, m):
    layer_case(ratio, profile, m, start)


def layer_case(ratio: int, profile: str, m: int, start: int) -> None:
    ours, reference = PAIRS[profile]
    if interpreting():
        ours.columns = 128
    config = replace(TINY, ratios=(ratio, 0), layers=1)
    layer = Synthesis(TINY, "q8", CPU, 12).layer(2, ratio, hashed=False)
    rope = Rope(TINY, compressed=bool(ratio), exact=PROFILES[profile].exact_angles)
    cache = KVCache(config, context=280, draft_max=15, chunk=16)
    tokens = list(range(m))
    for at in range(max(0, start - 140), start, 16):  # a past made by the reference
        past = random(min(16, start - at), 2, TINY.dim, seed=at)
        layer_forward(reference, past, [0] * len(past), layer, cache.layers[0], rope, at)
    rows = cache.layers[0]
    mine, alone = moved(rows), moved(rows)
    streams = random(m, 2, TINY.dim, seed=13)
    wanted = layer_forward(reference, streams, tokens, layer, rows, rope, start)
    whole = layer_forward(ours, up(streams), tokens, layer, mine, rope, start)
    close(whole, wanted, 2e-5)
    for left, right in zip(buffers(mine), buffers(rows), strict=True):
        close(left, right, 2e-5)
    for i in range(m):
        part = up(streams[i : i + 1])
        one = layer_forward(ours, part, tokens[i : i + 1], layer, alone, rope, start + i)
        assert torch.equal(one[0], whole[i])
    for left, right in zip(buffers(mine), buffers(alone), strict=True):
        assert torch.equal(left, right)


def moved(rows: LayerRows) -> LayerRows:
    """A copy on the device."""
    rows = copy.deepcopy(rows)
    rows.window = up(rows.window)
    for part in (rows.compressed, rows.index):
        if part is not None:
            part.values, part.scores = up(part.values), up(part.scores)
            part.pool = up(part.pool)
    return rows


def buffers(rows: LayerRows) -> list[torch.Tensor]:
    parts = [rows.window]
    for part in (rows.compressed, rows.index):
        if part is not None:
            parts += [part.values, part.scores, part.pool]
    return parts


def test_selection_takes_the_best_and_the_lower_block_on_ties():
    """Against a stable sort, with many exact ties (zeros of both signs) and scores of both
    signs."""
    from ds4flow.kernels.gpu import attention

    capacity, top = 40, 5
    scores = random(5, capacity, seed=14)
    scores[1] = 0.0
    scores[1, ::2] = -0.0
    scores[2] = scores[2].round()
    scores[3] = -scores[3].abs()
    scores[4, 20:] = 3.0
    chosen = torch.zeros(5, top, dtype=torch.int32, device=DEVICE)
    counts = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    position = torch.tensor(
        [4 * capacity - 6], device=DEVICE
    )  # row i sees (154 + i + 1) // 4 blocks
    attention.select_blocks[(5,)](
        up(scores), chosen, counts, position, capacity, RATIO=4, TOP=top, BLOCK=32
    )
    for i in range(5):
        visible = (int(position) + i + 1) // 4
        order = torch.sort(scores[i, :visible], descending=True, stable=True).indices[:top]
        assert chosen[i].tolist() == torch.sort(order).values.tolist()
        assert int(counts[i]) == top


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of a row of NaN
def test_argmax_and_top2():
    logits = random(5, 3000, seed=15)
    logits[1, [17, 2050, 2999]] = 9.0
    logits[2, 5] = torch.nan
    logits[3, 5] = torch.inf
    logits[4] = torch.nan
    best = OURS.top2(up(logits))
    wanted = StaticKernels(SMALL, PROFILES["plain"], CPU).top2(logits)
    assert best.token[:2].tolist() == wanted.token[:2].tolist()
    assert int(best.token[1]) == 17
    assert torch.equal(best.top[:2].cpu(), wanted.top[:2])
    assert torch.equal(best.gap[:2].cpu(), wanted.gap[:2].float())
    assert float(best.gap[1]) == 0.0
    assert best.bad.tolist() == [0, 0, 1, 1, 3000]
    assert 0 <= int(best.token.min()) <= int(best.token.max()) < 3000  # no padding lane wins


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-q4k", "tiny-iq2"])
def test_a_golden_model_through_the_decode_graph(name, golden_dir: Path):
    """Cycles on the Triton kernels equal those on torch operations: tokens, acceptance, gaps."""
    main = GgufFile.open(golden_dir / f"{name}.gguf")
    mtp = GgufFile.open(golden_dir / f"{name}.mtp-support.gguf")
    model = Model.load(main, mtp, profile="plain")
    prompt = [int(t) for t in torch.randint(0, 320, (30,), generator=torch.Generator())]
    results = []
    for kernels in ("gpu", "reference"):
        cache = KVCache(model.config, context=60, draft_max=2)  # filled by the reference
        streams = model.forward(prompt, cache)
        model.mtp.follow(prompt, 0, None, streams, cache)
        cache.commit(len(prompt))
        token = int(model.logits(streams[-1:]).argmax())
        runner = Model.load(main, mtp, profile="plain", kernels=kernels)
        if kernels == "gpu":
            runner.kernels.columns = 128
            cache.layers, cache.mtp = [moved(rows) for rows in cache.layers], moved(cache.mtp)
        graph = DecodeGraph(runner, cache)
        graph.start(token, streams[-1])
        results.append([graph.cycle(width) for width in (2, 1)])
    for left, right in zip(*results, strict=True):
        assert left[:3] == right[:3]
        assert left.accepted == right.accepted
        assert left.gaps == pytest.approx(right.gaps, abs=1e-3)


@pytest.mark.skipif(interpreting(), reason="graphs are captured on a GPU only")
@pytest.mark.parametrize("widths", [(0,), (1,), (2,), (2, 0, 1, 2, 1, 0)], ids=str)
def test_a_captured_graph_does_what_its_eager_twin_does(widths, golden_dir: Path) -> None:
    """Cycles, records and cache bits, over several replays, and again over the cleared cache."""
    model = golden_on(golden_dir, "gpu", DEVICE)
    captured, twin = replayed(model, widths, eager=False), replayed(model, widths, eager=True)
    assert captured[0] == "graph"
    assert captured[1:] == twin[1:]
    assert captured[1] == captured[2]


def golden_on(golden_dir: Path, kernels: str, device: torch.device) -> Model:
    main = GgufFile.open(golden_dir / "tiny-q4k.gguf")
    mtp = GgufFile.open(golden_dir / "tiny-q4k.mtp-support.gguf")
    return Model.load(main, mtp, profile="plain", kernels=kernels, device=device)


def replayed(model: Model, widths: tuple[int, ...], *, eager: bool) -> tuple:
    """Mode, and cycles with the cache's digests of the same text twice through one graph."""
    cache = KVCache(model.config, context=60, draft_max=2, device=model.device)
    graph, found = DecodeGraph(model, cache, eager=eager), []
    for _ in range(2):
        cache.clear()
        streams = model.forward([5, 9, 200, 31, 7], cache)
        model.mtp.follow([5, 9, 200, 31, 7], 0, None, streams, cache)
        cache.commit(5)
        graph.start(int(model.logits(streams[-1:]).argmax()), streams[-1])
        cycles = [graph.cycle(widths[i % len(widths)]) for i in range(8)]
        found.append((cycles, cache.state_hash()))
    return graph.mode, *found
