"""The depth policy against simulated machines: it must find the best depth and keep looking."""

import random

import pytest

from ds4flow.depth import MIN_SAMPLES, WARMING, DepthPolicy


def drive(accept, pass_cost, step_cost, cycles, depth_max=6, seed=0, policy=None):
    """Run the policy on a simulated machine; returns decisions, tokens and seconds."""
    draws = random.Random(seed)
    policy = policy or DepthPolicy(depth_max)
    decisions, tokens, seconds = [], 0, 0.0
    for _ in range(cycles):
        decision = policy.choose(depth_max)
        depth = decision.depth
        accepted = 0
        while accepted < depth and draws.random() < accept(accepted):
            accepted += 1
        verify_s, draft_s = pass_cost(depth + 1), depth * step_cost
        policy.observe(
            drafted=depth, accepted=accepted, steps=depth, draft_s=draft_s, verify_s=verify_s
        )
        decisions.append(decision)
        tokens += accepted + 1
        seconds += verify_s + draft_s
    return decisions, tokens, seconds, policy


def best_fixed(accept, pass_cost, step_cost, depth_max=6):
    def rate(depth):
        reach, total = 1.0, 1.0
        for place in range(depth):
            reach *= accept(place)
            total += reach
        return total / (pass_cost(depth + 1) + depth * step_cost)

    return max(range(depth_max + 1), key=rate), rate


@pytest.mark.parametrize("p", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("slope", [0.02, 0.2, 0.6])
def test_it_comes_close_to_the_best_fixed_depth(p, slope):
    machine = (lambda place: p, lambda width: 1 + slope * (width - 1), 0.05)
    _, tokens, seconds, _ = drive(*machine, cycles=3000)
    best, rate = best_fixed(*machine)
    assert tokens / seconds > 0.93 * rate(best)


def test_it_stops_drafting_where_that_cannot_pay_and_probes_now_and_then():
    decisions, tokens, seconds, _ = drive(lambda _: 0.1, lambda width: float(width), 0.3, 2000)
    late = decisions[200:]
    assert sum(d.depth == 0 for d in late) > 0.97 * len(late)
    assert any(d.why == "probe" for d in late)
    assert tokens / seconds > 0.95  # one token a second is plain greedy here


def test_it_starts_again_when_drafting_begins_to_pay():
    cost = (lambda width: 1 + 0.1 * width, 0.05)
    *_, policy = drive(lambda _: 0.0, *cost, cycles=400)
    assert policy.choose(6).depth <= 1
    decisions, *_ = drive(lambda _: 0.9, *cost, cycles=1500, policy=policy)
    assert decisions[-1].depth >= 3
    assert decisions[-1].why == "best"


def test_one_unlucky_cycle_decides_nothing():
    policy = DepthPolicy(4)
    for _ in range(WARMING + MIN_SAMPLES):
        assert policy.choose(4).depth == 0
        policy.observe(drafted=0, accepted=0, steps=0, draft_s=0.0, verify_s=1.0)
    assert policy.choose(4).depth == 1
    policy.observe(drafted=1, accepted=0, steps=1, draft_s=0.01, verify_s=1.05)
    for _ in range(MIN_SAMPLES - 1):
        assert policy.choose(4).why == "learn"
        policy.observe(drafted=1, accepted=1, steps=1, draft_s=0.01, verify_s=1.05)
    for _ in range(40):
        depth = policy.choose(4).depth
        policy.observe(
            drafted=depth,
            accepted=depth,
            steps=depth,
            draft_s=0.01 * depth,
            verify_s=1 + 0.05 * depth,
        )
    assert policy.choose(4).depth == 4


def test_no_room_means_no_drafts():
    policy = DepthPolicy(4)
    assert policy.choose(0).depth == 0
    for _ in range(50):
        decision = policy.choose(2)
        assert decision.depth <= 2
        policy.observe(
            drafted=decision.depth,
            accepted=decision.depth,
            steps=decision.depth,
            draft_s=0.01,
            verify_s=1.0,
        )


def test_a_gated_cycle_counts_the_steps_it_took():
    policy = DepthPolicy(3, warming=0)
    policy.observe(drafted=0, accepted=0, steps=1, draft_s=0.5, verify_s=1.0)
    assert policy.step.value == 0.5


def test_costs_measured_while_the_machine_was_slow_are_forgotten():
    """Slow at the start, three times faster later: drafting at a cost that never pays must end."""
    speed = {"factor": 3.0}
    machine = (lambda width: speed["factor"] * (1.0 if width == 1 else 1.0 + 0.5 * (width - 1)),)
    *_, policy = drive(lambda _: 0.6, *machine, 0.5, cycles=12)
    speed["factor"] = 1.0
    decisions, *_ = drive(lambda _: 0.6, *machine, 0.5, cycles=600, policy=policy)
    assert sum(d.depth == 0 for d in decisions[100:]) > 0.9 * 500
