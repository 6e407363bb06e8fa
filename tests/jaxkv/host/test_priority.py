"""`policy="priority"`: the more urgent first, and instead of others."""

import pytest

from tests.jaxkv.host.test_prefix_cache import add
from tests.jaxkv.host.test_scheduler import (
    drain,
    make_scheduler,
    sample,
    step,
    undisturbed,
)


def priority_scheduler(**overrides):
    return make_scheduler(policy="priority", **overrides)


def add_urgent(scheduler, request_id, prompt, priority, **options):
    return add(scheduler, request_id, prompt, priority=priority, **options)


def check_outputs(requests):
    for request in requests:
        count = request.num_output_tokens
        expected = undisturbed(request.prompt_token_ids, count)
        assert request.output_token_ids == expected
        assert request.finish_reason == "length"


def test_waiting_requests_are_served_by_priority_and_then_by_arrival():
    scheduler = priority_scheduler(max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 2), ("c", 0), ("d", 1)):
        add_urgent(scheduler, name, [5, 6], priority)
    assert [list(plan) for plan in drain(scheduler)] == [["c"], ["a"], ["d"], ["b"]]


def test_under_fcfs_a_priority_changes_nothing():
    scheduler = make_scheduler(max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0)):
        add_urgent(scheduler, name, [5, 6], priority)
    assert [list(plan) for plan in drain(scheduler)] == [["a"], ["b"]]


@pytest.mark.parametrize("caching", [True, False])
def test_b32_a_full_batch_gives_a_row_to_a_strictly_more_urgent_request(caching):
    scheduler = priority_scheduler(max_num_seqs=2, enable_prefix_caching=caching)
    low = [
        add_urgent(scheduler, name, [i, 6, 7, 8, 9], 10, max_tokens=8)
        for i, name in enumerate("ab")
    ]
    step(scheduler)
    equal = add_urgent(scheduler, "equal", [5], 10, max_tokens=2)
    assert step(scheduler).keys() == {"a", "b"}
    urgent = add_urgent(scheduler, "urgent", [7], 0, max_tokens=2)
    assert step(scheduler).keys() == {"a", "urgent"}
    assert [request.num_preemptions for request in low] == [0, 1]
    drain(scheduler)
    assert scheduler.num_preemptions == 1  # nobody was preempted in turn
    check_outputs([*low, equal, urgent])


def test_a_more_urgent_request_takes_blocks_and_no_more_victims_than_it_needs():
    scheduler = priority_scheduler(num_blocks=12, max_num_batched_tokens=64)
    low = [
        add_urgent(scheduler, name, list(range(10, 17)), 5, max_tokens=6)
        for name in "abc"
    ]
    step(scheduler)
    assert scheduler.pool.num_free == 5
    # It may want 5 blocks, "a", "b" and "c" one more each: 3 are lacking, which is what
    # "c" has and may still want.
    urgent = add_urgent(scheduler, "urgent", list(range(30, 46)), 1, max_tokens=2)
    assert step(scheduler).keys() == {"a", "b", "urgent"}
    assert [request.num_preemptions for request in low] == [0, 0, 1]
    drain(scheduler)
    check_outputs([*low, urgent])


def test_nobody_is_preempted_if_that_would_not_be_enough():
    scheduler = priority_scheduler(num_blocks=10, max_num_batched_tokens=64)
    high = add_urgent(scheduler, "high", list(range(10, 30)), 0, max_tokens=8)
    low = add_urgent(scheduler, "low", list(range(10)), 5, max_tokens=2)
    step(scheduler)
    middle = add_urgent(scheduler, "middle", list(range(40, 64)), 1, max_tokens=2)
    assert step(scheduler).keys() == {"high", "low"}
    drain(scheduler)
    assert scheduler.num_preemptions == 0
    check_outputs([high, low, middle])


def test_b29_a_victim_that_was_planned_in_this_step_leaves_it_whole():
    # "low" decodes and is planned first; "high" needs its blocks for its next tokens.
    scheduler = priority_scheduler(
        num_blocks=24, block_size=1, long_prefill_token_threshold=4
    )
    high = add_urgent(scheduler, "high", list(range(50, 70)), 0, max_tokens=2)
    low = add_urgent(scheduler, "low", [9], 1, max_tokens=10)
    while not low.num_preemptions:
        schedule = scheduler.schedule()
        names = [row.request.request_id for row in schedule.rows]
        if low.num_preemptions:
            assert names == ["high"]
            assert schedule.num_tokens == 4
            assert scheduler.block_tables.table("low") == []
        scheduler.commit(schedule, sample(schedule))
    drain(scheduler)
    check_outputs([high, low])


@pytest.mark.parametrize("is_shared", [True, False])
def test_blocks_that_it_shares_with_a_victim_are_no_gain(is_shared):
    # "head" needs 9 blocks; 3 are free, and the victim has 5 of which it shares 4.
    scheduler = priority_scheduler(
        num_blocks=14, max_num_batched_tokens=80, enable_prefix_caching=True
    )
    high = add_urgent(scheduler, "high", list(range(200, 217)), 0, max_tokens=3)
    prefix = list(range(10, 26))
    low = add_urgent(scheduler, "low", [*prefix, 9], 5, max_tokens=3)
    step(scheduler)
    assert (scheduler.pool.num_free, scheduler.pool.num_held) == (3, 10)
    start = prefix if is_shared else prefix[::-1]
    head = add_urgent(scheduler, "head", [*start, *range(50, 69)], 1, max_tokens=2)
    assert step(scheduler).keys() == {"high", "low"}
    assert low.num_preemptions == 0
    drain(scheduler)
    check_outputs([high, low, head])


def test_an_urgent_prompt_does_not_wait_for_a_less_urgent_one_that_is_part_way():
    scheduler = priority_scheduler(max_num_batched_tokens=8)
    low = add_urgent(scheduler, "low", list(range(10, 50)), 5, max_tokens=2)
    assert step(scheduler) == {"low": (0, 8, False)}
    urgent = add_urgent(scheduler, "urgent", list(range(60, 72)), 0, max_tokens=2)
    other = add_urgent(scheduler, "other", list(range(80, 92)), 0, max_tokens=2)
    assert step(scheduler) == {"urgent": (0, 8, False)}
    # "other" is as urgent, and one prompt of them may be part way.
    assert step(scheduler) == {"urgent": (8, 4, True), "other": (0, 4, False)}
    assert step(scheduler) == {"urgent": (12, 1, True), "other": (4, 7, False)}
    assert step(scheduler) == {"other": (11, 1, True), "low": (8, 7, False)}
    drain(scheduler)
    check_outputs([low, urgent, other])


def test_a_victim_is_less_urgent_though_it_arrived_first():
    scheduler = priority_scheduler(num_blocks=7, max_num_batched_tokens=32)
    low = add_urgent(scheduler, "low", list(range(10, 17)), 3, max_tokens=12)
    high = add_urgent(scheduler, "high", list(range(20, 27)), 2, max_tokens=12)
    drain(scheduler)
    assert (low.num_preemptions > 0, high.num_preemptions) == (True, 0)
    check_outputs([low, high])


def test_equals_never_preempt_each_other_though_one_let_the_other_pass():
    scheduler = priority_scheduler(
        max_num_seqs=2, max_num_batched_tokens=64, enable_prefix_caching=True
    )
    prefix = list(range(10, 19))
    for name in ("leader", "follower"):
        add_urgent(scheduler, name, prefix, 1, max_tokens=6)
    add_urgent(scheduler, "other", [5, 6], 1, max_tokens=6)
    for _ in range(6):
        assert step(scheduler).keys() == {"leader", "other"}
    assert step(scheduler).keys() == {"follower"}
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize(
    ("needed", "victims"),
    [
        pytest.param(9, [0, 0, 1], id="one private block"),
        pytest.param(10, [0, 1, 1], id="two"),
        pytest.param(11, [1, 1, 1], id="all three, and what they share"),
    ],
)
def test_b37_victims_are_chosen_by_what_only_they_hold(needed, victims):
    # Three share five blocks and have one each of their own; 8 of 16 are free.
    scheduler = priority_scheduler(
        num_blocks=17, max_num_batched_tokens=80, enable_prefix_caching=True
    )
    prefix = list(range(10, 30))
    low = [
        add_urgent(scheduler, name, [*prefix, number], 5, max_tokens=3)
        for number, name in enumerate("abc")
    ]
    step(scheduler)
    step(scheduler)
    assert scheduler.pool.num_held == 5 + 3
    prompt = [*range(50, 50 + 4 * needed - 1)]
    urgent = add_urgent(scheduler, "urgent", prompt, 0, max_tokens=2)
    assert "urgent" in step(scheduler)
    drain(scheduler)
    check_outputs([*low, urgent])
    assert [request.num_preemptions for request in low] == victims


@pytest.mark.parametrize("needed", [9, 10])
def test_victims_count_together_what_they_share_with_each_other_only(needed):
    # Two outputs for 25 tokens: 6 blocks shared, one each of its own, 3 blocks free.
    scheduler = priority_scheduler(num_blocks=12, max_num_batched_tokens=64)
    prompt = list(range(10, 35))
    first = add(scheduler, "c0", prompt, priority=5, max_tokens=4)
    second = add(
        scheduler, "c1", prompt, priority=5, max_tokens=4, child=1, source=first
    )
    step(scheduler)
    step(scheduler)
    assert scheduler.pool.num_held == 8
    urgent = add_urgent(scheduler, "urgent", [*range(40, 40 + 4 * needed)], 0)
    assert step(scheduler).keys() == {"urgent"}
    drain(scheduler)
    check_outputs([first, second, urgent])
