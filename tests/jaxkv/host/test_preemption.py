import math

import pytest

from jaxkv.host.block_pool import BlockPool
from jaxkv.host.block_tables import BlockTables
from jaxkv.host.preemption import Preemption, choose_victims, units_of
from jaxkv.host.request import Request, SamplingParams


@pytest.mark.parametrize(
    ("gains", "shortfall", "expected"),
    [
        pytest.param([1, 1, 1], 1, [0], id="the first goes first"),
        pytest.param([1, 1, 1], 2, [0, 1], id="as many as needed"),
        pytest.param([0, 1, 1], 1, [1], id="no blocks of its own: no victim"),
        pytest.param([1, 3, 1], 3, [1], id="no more victims than useful"),
        pytest.param([1, 3, 1], 4, [0, 1], id="both are needed"),
        pytest.param([1, 2, 3], 5, [1, 2], id="the first is spared"),
        pytest.param([2, 1, 3], 5, [0, 2], id="of two that may be spared the later"),
        pytest.param([1, 1, 1], 4, [], id="nobody loses blocks for nothing"),
        pytest.param([], 1, [], id="nobody is there"),
    ],
)
def test_choice_of_victims(gains, shortfall, expected):
    candidates = range(len(gains))
    chosen = choose_victims(
        candidates, lambda chosen: sum(gains[i] for i in chosen) >= shortfall
    )
    assert chosen == expected


def test_a_candidate_is_not_looked_at_when_it_need_not_be():
    asked = set()

    def is_enough(chosen):
        asked.update(chosen)
        return len(chosen) == 2

    choose_victims(range(50), is_enough)
    assert asked == {0, 1}


COSTS = {"bytes_per_block": 8e6, "swap_bandwidth": 16e9, "prefill_rate": 16_000}


@pytest.mark.parametrize(
    ("how", "num_blocks", "num_tokens", "swaps", "seconds"),
    [
        # 1 ms a block there and back, and a token in 62.5 us: 16 of them in 1 ms.
        pytest.param("auto", 10, 161, True, 0.01, id="swap is faster"),
        pytest.param("auto", 10, 159, False, 159 / 16_000, id="recompute is faster"),
        pytest.param("auto", 10, 160, False, 0.01, id="equal: recompute"),
        pytest.param("swap", 10, 1, True, 0.01, id="swap alone"),
        pytest.param("recompute", 1, 999, False, 999 / 16_000, id="recompute alone"),
    ],
)
def test_the_faster_way_back_is_taken(how, num_blocks, num_tokens, swaps, seconds):
    preemption = Preemption(how=how, **COSTS)
    assert preemption.swaps(num_blocks, num_tokens) is swaps
    assert math.isclose(preemption.work_lost(num_blocks, num_tokens), seconds)


def make_running(block_tables, lengths, priorities=None):
    running = []
    for arrival, num_tokens in enumerate(lengths):
        request = Request(f"r{arrival}", [1], SamplingParams(), max_total_tokens=9)
        request.rank = ((priorities or [0] * 9)[arrival], arrival, 0)
        request.num_computed_tokens = num_tokens
        block_tables.grow(request.request_id, num_tokens)
        running.append(request)
    return running


def victims_in_order(block_tables, running, how="recompute"):
    units = Preemption(how=how).by_work_lost(units_of(running), block_tables)
    return [unit[0].request_id for unit in units]


def test_who_loses_least_for_a_block_goes_first_and_then_the_latest():
    block_tables = BlockTables(BlockPool(40, 4))
    # 4, 3, 2.5, 4 and 3 tokens a block.
    running = make_running(block_tables, [8, 3, 5, 4, 6])
    assert victims_in_order(block_tables, running) == ["r2", "r4", "r1", "r3", "r0"]
    # Swapping takes the same for every block.
    expected = ["r4", "r3", "r2", "r1", "r0"]
    assert victims_in_order(block_tables, running, how="swap") == expected


def test_priority_comes_before_work_lost():
    block_tables = BlockTables(BlockPool(40, 4))
    running = make_running(block_tables, [8, 3, 5], priorities=[1, 1, 0])
    assert victims_in_order(block_tables, running) == ["r1", "r0", "r2"]


def test_shared_blocks_are_neither_gained_nor_lost():
    block_tables = BlockTables(BlockPool(40, 4))
    (first,) = make_running(block_tables, [12])
    _, second = make_running(block_tables, [0, 0])
    block_tables.adopt("r1", block_tables.table("r0")[:2])
    block_tables.grow("r1", 9)
    second.num_computed_tokens = 9
    assert block_tables.reclaimable(["r0"]) == block_tables.reclaimable(["r1"]) == 1
    assert block_tables.reclaimable(["r0", "r1"]) == 4
    # "r0" would lose the 4 tokens of its last block, "r1" the one of its own.
    assert victims_in_order(block_tables, [first, second]) == ["r1", "r0"]


def test_who_gives_nothing_back_comes_last():
    block_tables = BlockTables(BlockPool(40, 4))
    running = make_running(block_tables, [8, 8, 0])
    block_tables.adopt("r2", block_tables.table("r0"))
    assert victims_in_order(block_tables, running) == ["r1", "r2", "r0"]
