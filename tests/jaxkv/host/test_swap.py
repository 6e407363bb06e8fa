"""Preempted requests whose blocks go to host memory and come back."""

import pytest

from jaxkv.config import NULL_BLOCK
from jaxkv.host.preemption import Preemption
from tests.jaxkv.host.test_prefix_cache import add
from tests.jaxkv.host.test_scheduler import (
    drain,
    make_scheduler,
    planned,
    sample,
    undisturbed,
)

BLOCK_SIZE = 4


def swap_scheduler(how="swap", num_swap_blocks=16, **overrides):
    limits = {"num_blocks": 7, "max_num_batched_tokens": 32}
    preemption = Preemption(how=how)
    return make_scheduler(
        preemption=preemption, num_swap_blocks=num_swap_blocks, **(limits | overrides)
    )


def run_step(scheduler):
    """One step, its swaps carried out; returns the schedule."""
    schedule = scheduler.schedule()
    scheduler.check_invariants()
    for swapped, block_ids in schedule.swap_outs:
        swapped.content = block_ids
    scheduler.commit(schedule, sample(schedule))
    scheduler.check_invariants()
    return schedule


def two_requests(scheduler, max_tokens=12):
    """Two of which one loses its blocks to the other."""
    return [
        add(scheduler, name, list(range(base, base + 7)), max_tokens=max_tokens)
        for name, base in (("first", 100), ("last", 200))
    ]


def run_until(scheduler, condition):
    schedule = None
    while not condition():
        schedule = run_step(scheduler)
    return schedule


def check_outputs(scheduler, requests):
    while scheduler.has_unfinished():
        run_step(scheduler)
    for request in requests:
        count = request.num_output_tokens
        assert request.output_token_ids == undisturbed(request.prompt_token_ids, count)
        assert request.finish_reason == "length"
    assert scheduler.swap_space.num_used == 0
    assert scheduler.pool.num_held == 0


def test_a_victim_goes_on_where_it_was():
    scheduler = swap_scheduler()
    first, last = two_requests(scheduler)
    schedule = run_until(scheduler, lambda: last.num_preemptions)
    (swap,) = schedule.swap_outs
    num_computed = swap.swapped.num_tokens
    assert num_computed == len(last.token_ids) - 1
    assert (swap.swapped.first, swap.swapped.num_blocks) == (0, len(swap.block_ids))
    assert len(swap.block_ids) == -(-num_computed // BLOCK_SIZE)
    assert (scheduler.num_swapped, scheduler.num_waiting) == (1, 1)
    schedule = run_until(scheduler, lambda: last.row is not None)
    assert planned(schedule) == {"last": (num_computed, 1, True)}
    (swap_in,) = schedule.swap_ins
    assert swap_in.swapped is swap.swapped
    assert (
        list(swap_in.block_ids)
        == scheduler.block_tables.table("last")[: len(swap_in.block_ids)]
    )
    assert scheduler.num_swapped == 0
    check_outputs(scheduler, [first, last])
    assert scheduler.num_preemptions == 1


def test_b135_blocks_are_read_before_their_next_holder_gets_them():
    scheduler = swap_scheduler()
    _, last = two_requests(scheduler)
    table = []
    while not last.num_preemptions:
        table = list(scheduler.block_tables.table("last"))
        schedule = run_step(scheduler)
    (swap,) = schedule.swap_outs
    assert list(swap.block_ids) == table
    # The first request got one of them in this very step.
    assert set(table) & set(scheduler.block_tables.table("first"))


@pytest.mark.parametrize("num_swap_blocks", [0, 2])
def test_b40_nothing_is_swapped_without_room_for_all_of_it(num_swap_blocks):
    scheduler = swap_scheduler(num_swap_blocks=num_swap_blocks)
    requests = two_requests(scheduler)
    schedule = run_until(scheduler, lambda: requests[1].num_preemptions)
    assert schedule.swap_outs == ()
    assert scheduler.swap_space.num_used == 0
    schedule = run_until(scheduler, lambda: requests[1].row is not None)
    assert planned(schedule)["last"][0] == 0
    check_outputs(scheduler, requests)


@pytest.mark.parametrize(
    ("prefill_rate", "swaps"), [pytest.param(9.0, False), pytest.param(7.0, True)]
)
def test_auto_takes_the_faster_way(prefill_rate, swaps):
    # 12 tokens in 3 blocks: 3 * 2 * 0.25 s there and back.
    scheduler = swap_scheduler()
    scheduler.preemption = Preemption(
        how="auto", bytes_per_block=1, swap_bandwidth=4, prefill_rate=prefill_rate
    )
    requests = two_requests(scheduler)
    schedule = run_until(scheduler, lambda: requests[1].num_preemptions)
    assert requests[1].num_output_tokens == 6  # so 12 are computed
    assert bool(schedule.swap_outs) is swaps
    check_outputs(scheduler, requests)


def test_blocks_that_others_hold_are_not_swapped_and_found_again():
    scheduler = swap_scheduler(enable_prefix_caching=True, num_blocks=8)
    prompt = list(range(100, 109))
    first = add(scheduler, "first", prompt, max_tokens=16)
    run_step(scheduler)
    last = add(scheduler, "last", [*prompt[:8], 7], max_tokens=16)
    # Both are at a block's end, so that all that the victim had is in the cache.
    schedule = run_until(scheduler, lambda: last.num_preemptions)
    assert (schedule.swap_outs, last.swapped) == ((), None)
    shared = scheduler.block_tables.table("first")[:2]
    schedule = run_until(scheduler, lambda: last.swapped)
    ((swapped, (taken,)),) = schedule.swap_outs
    assert (swapped.first, swapped.num_blocks, swapped.num_tokens) == (3, 1, 16)
    assert taken not in shared
    assert scheduler.block_tables.table("first")[-1] == taken
    schedule = run_until(scheduler, lambda: last.row is not None)
    assert planned(schedule)["last"] == (16, 1, True)
    assert scheduler.block_tables.table("last")[:2] == shared
    check_outputs(scheduler, [first, last])


def test_what_is_left_in_the_cache_is_copied_when_it_is_taken():
    scheduler = swap_scheduler(enable_prefix_caching=True)
    first, last = requests = two_requests(scheduler)
    table = []
    while not last.num_preemptions:
        table = list(scheduler.block_tables.table("last"))
        schedule = run_step(scheduler)
    # 12 tokens: the third block, the deepest, goes to the first request.
    ((swapped, block_ids),) = schedule.swap_outs
    assert (swapped.first, block_ids) == (2, (table[2],))
    assert scheduler.pool.num_cached == 2
    schedule = run_until(scheduler, lambda: first.num_computed_tokens == 17)
    ((shallower, block_ids),) = schedule.swap_outs
    assert (shallower.first, block_ids) == (1, (table[1],))
    assert list(last.swapped) == [shallower, swapped]
    assert scheduler.swap_space.num_used == 2
    schedule = run_until(scheduler, lambda: last.row is not None)
    table = scheduler.block_tables.table("last")
    assert schedule.swap_ins == ((shallower, (table[1],)), (swapped, (table[2],)))
    assert planned(schedule) == {"last": (12, 1, True)}
    check_outputs(scheduler, requests)


def test_blocks_that_one_step_takes_are_copied_as_one():
    scheduler = swap_scheduler(enable_prefix_caching=True, num_blocks=9)
    _, last = requests = two_requests(scheduler, max_tokens=16)
    run_until(scheduler, lambda: last.num_preemptions)
    table = list(scheduler.block_tables.table("first"))
    scheduler.abort("first")
    add(scheduler, "long", list(range(300, 329)), max_tokens=1)
    scheduler._waiting.rotate(1)  # and first, for once
    scheduler._waiting[0].rank = (0, -1, 0)
    swapped = last.swapped
    schedule = run_step(scheduler)
    assert planned(schedule) == {"long": (0, 29, True)}
    ((taken, block_ids),) = schedule.swap_outs
    assert taken.end == swapped.first
    assert len(block_ids) == taken.num_blocks > 1
    assert not set(table) & set(block_ids)
    check_outputs(scheduler, requests[1:])


def test_what_is_in_the_prefix_cache_by_then_is_not_copied_back():
    scheduler = swap_scheduler(enable_prefix_caching=True)
    _, last = requests = two_requests(scheduler)
    run_until(scheduler, lambda: last.swapped and last.swapped.first == 1)
    shallower, swapped = last.swapped
    # The same tokens come by and are computed by somebody else.
    scheduler.abort("first")
    add(scheduler, "again", last.token_ids[:9], max_tokens=1)
    scheduler._waiting.rotate(1)  # first, for once
    schedule = run_until(scheduler, lambda: last.row is not None)
    table = scheduler.block_tables.table("last")
    assert schedule.swap_ins == ((shallower, (NULL_BLOCK,)), (swapped, (table[2],)))
    assert planned(schedule)["last"] == (12, 1, True)
    check_outputs(scheduler, requests[1:])


def test_nothing_is_copied_back_if_all_of_it_is_in_the_prefix_cache():
    scheduler = swap_scheduler(enable_prefix_caching=True)
    _, last = two_requests(scheduler)
    run_until(scheduler, lambda: last.num_preemptions)
    assert last.swapped.num_tokens == 12  # three full blocks
    scheduler.abort("first")
    add(scheduler, "again", last.token_ids[:13], max_tokens=1)
    scheduler._waiting.rotate(1)
    schedule = run_until(scheduler, lambda: last.row is not None)
    assert schedule.swap_ins == ()
    assert scheduler.swap_space.num_used == 0
    assert planned(schedule)["last"] == (12, 1, True)
    check_outputs(scheduler, [last])


def test_a_victim_recomputes_from_what_is_found_if_shared_blocks_are_gone():
    scheduler = swap_scheduler(enable_prefix_caching=True, num_blocks=8)
    prompt = list(range(100, 109))
    first = add(scheduler, "first", prompt, max_tokens=16)
    run_step(scheduler)
    last = add(scheduler, "last", [*prompt[:8], 7], max_tokens=16)
    run_until(scheduler, lambda: last.swapped)
    assert last.swapped.first == 3
    scheduler.abort("first")
    other = scheduler.pool.allocate(7)
    scheduler.pool.release(other)
    assert last.swapped.first == 2  # nobody keeps those before, which were shared
    schedule = run_until(scheduler, lambda: last.row is not None)
    assert schedule.swap_ins == ()
    assert planned(schedule)["last"][0] == 0
    assert first.finish_reason == "abort"
    check_outputs(scheduler, [last])


def test_what_came_back_is_found_by_others_again():
    scheduler = swap_scheduler(enable_prefix_caching=True)
    _, last = requests = two_requests(scheduler)
    run_until(scheduler, lambda: last.num_preemptions)
    run_until(scheduler, lambda: last.row is not None)
    table = scheduler.block_tables.table("last")
    found = scheduler.prefix_cache.find(last)
    assert found == table[: len(found)]
    assert len(found) == (len(last.token_ids) - 1) // BLOCK_SIZE
    check_outputs(scheduler, requests)


def test_a_reset_forgets_what_is_in_host_memory():
    scheduler = swap_scheduler(enable_prefix_caching=True)
    _, last = requests = two_requests(scheduler)
    run_until(scheduler, lambda: last.num_preemptions)
    scheduler.reset_prefix_cache()
    assert (scheduler.num_swapped, scheduler.swap_space.num_used) == (0, 0)
    schedule = run_until(scheduler, lambda: last.row is not None)
    assert planned(schedule)["last"][0] == 0
    check_outputs(scheduler, requests)


def test_stale_blocks_that_came_back_are_not_published():
    scheduler = swap_scheduler(enable_prefix_caching=True)
    _, last = requests = two_requests(scheduler)
    run_step(scheduler)
    scheduler.reset_prefix_cache()
    run_until(scheduler, lambda: last.num_preemptions)
    run_until(scheduler, lambda: last.row is not None)
    run_step(scheduler)
    assert scheduler.pool.lookup(last.chain.digests) == []
    check_outputs(scheduler, requests)


def test_b137_abort_at_any_moment_of_a_swap_gives_everything_back():
    for _ in range(13):
        for moment in ("out", "waiting", "in", "back"):
            scheduler = swap_scheduler(enable_prefix_caching=True)
            first, last = two_requests(scheduler)
            while not last.num_preemptions:
                schedule = scheduler.schedule()
                if moment == "out" and last.num_preemptions:
                    scheduler.abort("last")
                scheduler.commit(schedule, sample(schedule))
            if moment == "waiting":
                scheduler.abort("last")
            while last.finish_reason is None:
                schedule = scheduler.schedule()
                if moment == "in" and last.row is not None:
                    scheduler.abort("last")
                for swapped, block_ids in schedule.swap_outs:
                    swapped.content = block_ids
                scheduler.commit(schedule, sample(schedule))
                if moment == "back" and last.row is not None:
                    scheduler.abort("last")
            assert scheduler.swap_space.num_used == 0
            assert last.finish_reason == "abort"
            check_outputs(scheduler, [first])


@pytest.mark.parametrize("swapped_out", [True, False])
def test_a_failed_step_swaps_out_again_or_recomputes(swapped_out):
    scheduler = swap_scheduler()
    _, last = requests = two_requests(scheduler)
    while not last.num_preemptions:
        schedule = scheduler.schedule()
        if last.num_preemptions:
            for swapped, block_ids in schedule.swap_outs:
                swapped.content = block_ids if swapped_out else None
            scheduler.discard(schedule)
        else:
            scheduler.commit(schedule, sample(schedule))
    assert (last.swapped is not None) is swapped_out
    check_outputs(scheduler, requests)


def test_a_failed_step_keeps_what_was_to_come_back():
    scheduler = swap_scheduler()
    _, last = requests = two_requests(scheduler)
    run_until(scheduler, lambda: last.num_preemptions)
    swapped = last.swapped
    while last.row is None:
        schedule = scheduler.schedule()
        if last.row is None:
            scheduler.commit(schedule, sample(schedule))
    scheduler.discard(schedule)
    scheduler.check_invariants()
    assert (last.row, last.swapped) == (None, swapped)
    assert scheduler.swap_space.num_used == swapped.num_blocks
    assert run_step(scheduler).swap_ins[0].swapped is swapped
    assert last.num_preemptions == 1
    check_outputs(scheduler, requests)
    drain(scheduler)


def test_after_a_failed_step_nobody_waits_for_what_was_to_come_back():
    scheduler = swap_scheduler(enable_prefix_caching=True)
    first, last = two_requests(scheduler)
    run_until(scheduler, lambda: last.num_preemptions)
    while last.row is None:
        schedule = scheduler.schedule()
        if last.row is None:
            scheduler.commit(schedule, sample(schedule))
    assert schedule.swap_ins
    scheduler.discard(schedule)
    scheduler.check_invariants()
    scheduler.abort("last")
    again = add(scheduler, "again", last.token_ids[:9], max_tokens=3)
    check_outputs(scheduler, [first, again])
