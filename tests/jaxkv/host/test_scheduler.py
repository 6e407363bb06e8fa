import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from jaxkv.config import NULL_BLOCK
from jaxkv.host.preemption import Preemption
from jaxkv.host.request import Request, SamplingParams, max_total_tokens
from jaxkv.host.schedule import Plan
from jaxkv.host.scheduler import Scheduler
from tests.state_machines import settings_of

EOS = 2


def make_scheduler(num_blocks=33, block_size=4, **overrides):
    limits = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "enable_prefix_caching": False,
    }
    return Scheduler(
        num_blocks=num_blocks, block_size=block_size, **(limits | overrides)
    )


def make_request(scheduler, request_id, prompt, max_tokens=4, **params):
    """A request as the engine makes it; a prompt is its tokens or its length."""
    prompt = list(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt
    limit = max_total_tokens(
        len(prompt),
        max_tokens,
        max_model_len=1000,
        num_blocks=scheduler.pool.num_blocks,
        block_size=scheduler.pool.block_size,
    )
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, **params)
    return Request(
        request_id, prompt, sampling, max_total_tokens=limit, eos_token_ids=[EOS]
    )


def add(scheduler, *args, **kwargs):
    request = make_request(scheduler, *args, **kwargs)
    scheduler.add(request)
    return request


def next_token(token_ids):
    """The "model": greedy, and any change of the tokens changes what follows."""
    return 10 + sum((i + 3) * t for i, t in enumerate(token_ids)) % 1009


def sample(schedule):
    return [
        next_token(r.request.token_ids[: r.start + r.num_tokens])
        if r.num_samples
        else None
        for r in schedule.rows
    ]


def planned(schedule):
    """{request id: (start, number of tokens, whether it samples)}"""
    return {
        r.request.request_id: (r.start, r.num_tokens, r.num_samples)
        for r in schedule.rows
    }


def step(scheduler):
    """One step, checked on the way; returns what was planned."""
    schedule = scheduler.schedule()
    scheduler.check_invariants()
    assert [r.row for r in schedule.rows] == sorted({r.row for r in schedule.rows})
    assert 0 < schedule.num_tokens <= scheduler.max_num_batched_tokens
    for scheduled in schedule.rows:
        end = scheduled.start + scheduled.num_tokens
        assert scheduled.num_samples == (end == len(scheduled.request.token_ids))
    scheduler.commit(schedule, sample(schedule))
    scheduler.check_invariants()
    return planned(schedule)


def drain(scheduler, limit=1000):
    steps = []
    while scheduler.has_unfinished():
        steps.append(step(scheduler))
        assert len(steps) < limit
    assert scheduler.pool.num_available == scheduler.pool.num_blocks - 1
    return steps


def undisturbed(prompt, count):
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


# --- one request ---


def test_a_prompt_runs_in_one_step_and_then_token_by_token():
    scheduler = make_scheduler()
    request = add(scheduler, "a", 6, max_tokens=3)
    assert drain(scheduler) == [
        {"a": (0, 6, True)},
        {"a": (6, 1, True)},
        {"a": (7, 1, True)},
    ]
    assert request.output_token_ids == undisturbed(request.prompt_token_ids, 3)
    assert (request.finish_reason, request.row) == ("length", None)
    assert request.num_computed_tokens == 8  # the last token's K and V are not needed


def test_a_chunk_that_does_not_end_the_prompt_samples_nothing():
    scheduler = make_scheduler(long_prefill_token_threshold=4)
    request = add(scheduler, "a", 10, max_tokens=2)
    assert drain(scheduler) == [
        {"a": (0, 4, False)},
        {"a": (4, 4, False)},
        {"a": (8, 2, True)},
        {"a": (10, 1, True)},
    ]
    assert request.output_token_ids == undisturbed(request.prompt_token_ids, 2)


@pytest.mark.parametrize("chunk", range(1, 10))
def test_chunking_never_changes_the_tokens(chunk):
    scheduler = make_scheduler(long_prefill_token_threshold=chunk)
    request = add(scheduler, "a", 9, max_tokens=3)
    assert len(drain(scheduler)) == -(-9 // chunk) + 2
    assert request.output_token_ids == undisturbed(request.prompt_token_ids, 3)


def test_blocks_are_taken_as_tokens_are_scheduled_and_not_before():
    scheduler = make_scheduler(long_prefill_token_threshold=4)
    request = add(scheduler, "a", 7, max_tokens=3)
    tables = []
    while scheduler.has_unfinished():
        schedule = scheduler.schedule()
        tables.append(list(scheduler.block_tables.table("a")))
        scheduler.commit(schedule, sample(schedule))
    assert tables == [[1], [1, 2], [1, 2], [1, 2, 3]]
    assert request.finish_reason == "length"
    assert scheduler.pool.allocate(scheduler.pool.num_free)[-3:] == [3, 2, 1]


def test_scheduled_runs_ahead_of_computed_until_the_commit():
    scheduler = make_scheduler()
    request = add(scheduler, "a", 6)
    schedule = scheduler.schedule()
    assert (request.num_computed_tokens, request.num_scheduled_tokens) == (0, 6)
    assert request.num_pending_tokens == 1
    scheduler.commit(schedule, [10])
    assert (request.num_computed_tokens, request.num_scheduled_tokens) == (6, 6)
    assert request.num_pending_tokens == 0


def test_wasted_slots_are_those_of_held_blocks_without_a_computed_token():
    scheduler = make_scheduler()
    add(scheduler, "a", 6)
    add(scheduler, "b", 4)
    assert (scheduler.num_held_slots, scheduler.num_wasted_slots) == (0, 0)
    step(scheduler)
    assert (scheduler.num_held_slots, scheduler.num_wasted_slots) == (12, 2)
    step(scheduler)
    assert (scheduler.num_held_slots, scheduler.num_wasted_slots) == (16, 4)


def test_commit_takes_an_array_and_stores_plain_integers():
    scheduler = make_scheduler()
    request = add(scheduler, "a", 2)
    scheduler.commit(scheduler.schedule(), np.array([7], np.int32))
    assert request.output_token_ids == [7]
    assert type(request.output_token_ids[0]) is int


def test_commit_returns_who_got_a_token_and_who_ended():
    scheduler = make_scheduler(max_num_batched_tokens=9)
    ending = add(scheduler, "ending", 2, max_tokens=1)
    going = add(scheduler, "going", 2)
    partial = add(scheduler, "partial", 8)
    schedule = scheduler.schedule()
    assert planned(schedule)["partial"] == (0, 5, False)
    assert scheduler.commit(schedule, [7, 8, 9]) == [ending, going]
    assert (ending.finish_reason, going.finish_reason) == ("length", None)
    assert partial.output_token_ids == []


def test_commit_refuses_a_wrong_number_of_tokens():
    scheduler = make_scheduler()
    add(scheduler, "a", 2)
    with pytest.raises(ValueError, match="2 sampled tokens for 1 rows"):
        scheduler.commit(scheduler.schedule(), [1, 2])


def test_a_failed_step_is_scheduled_again():
    scheduler = make_scheduler(long_prefill_token_threshold=4)
    request = add(scheduler, "a", 6)
    step(scheduler)
    schedule = scheduler.schedule()
    scheduler.discard(schedule)
    scheduler.check_invariants()
    assert (request.num_computed_tokens, request.num_scheduled_tokens) == (4, 4)
    assert scheduler.block_tables.table("a") == [1]
    assert scheduler.schedule() == schedule


# --- rows and order ---


def test_a_request_keeps_its_row_and_the_lowest_free_one_is_taken():
    scheduler = make_scheduler(max_num_seqs=3)
    requests = [
        add(scheduler, name, 2, max_tokens=n)
        for name, n in zip("abc", (9, 1, 9), strict=True)
    ]
    step(scheduler)
    assert [request.row for request in requests] == [0, None, 2]
    later = add(scheduler, "d", 2)
    assert planned(scheduler.schedule()).keys() == {"a", "d", "c"}
    assert [requests[0].row, later.row, requests[2].row] == [0, 1, 2]


def test_no_more_than_max_num_seqs_run():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, 2, max_tokens=3)
    assert step(scheduler).keys() == {"a", "b"}
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert list(drain(scheduler)[-1]) == ["c"]


def test_requests_are_admitted_in_order_and_nobody_is_skipped():
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=40)
    add(scheduler, "a", 8, max_tokens=1)
    add(scheduler, "large", 16, max_tokens=1)
    add(scheduler, "small", 1, max_tokens=1)
    assert [list(planned_) for planned_ in drain(scheduler)] == [
        ["a"],
        ["large", "small"],
    ]


def test_a_second_long_prompt_waits_for_the_first_and_is_not_skipped():
    scheduler = make_scheduler(max_num_batched_tokens=8, long_prefill_token_threshold=4)
    for name, prompt in (("a", 10), ("b", 10), ("c", 1)):
        add(scheduler, name, prompt, max_tokens=1)
    assert drain(scheduler) == [
        {"a": (0, 4, False)},
        {"a": (4, 4, False)},
        {"a": (8, 2, True), "b": (0, 4, False), "c": (0, 1, True)},
        {"b": (4, 4, False)},
        {"b": (8, 2, True)},
    ]


def test_two_partial_prefills_share_the_budget_where_that_is_allowed():
    scheduler = make_scheduler(
        max_num_batched_tokens=8,
        long_prefill_token_threshold=4,
        max_num_partial_prefills=2,
    )
    for name in "abc":
        add(scheduler, name, 8, max_tokens=1)
    assert drain(scheduler) == [
        {"a": (0, 4, False), "b": (0, 4, False)},
        {"a": (4, 4, True), "b": (4, 4, True)},
        {"c": (0, 4, False)},
        {"c": (4, 4, True)},
    ]


@pytest.mark.parametrize(
    ("threshold", "short_starts", "long_ends"),
    [
        # The long prompt takes all that the decodes leave: 6 tokens a step, 2 at last.
        pytest.param(0, 14, 14, id="whole budget"),
        # Part of the budget is left over: the short one runs beside it at once.
        pytest.param(4, 3, 20, id="threshold 4"),
    ],
)
def test_b38_decodes_run_in_every_step_beside_a_long_prompt(
    threshold, short_starts, long_ends
):
    scheduler = make_scheduler(
        max_num_batched_tokens=8, long_prefill_token_threshold=threshold
    )
    decoding = [add(scheduler, name, 2, max_tokens=30) for name in "ab"]
    step(scheduler)
    add(scheduler, "long", 80, max_tokens=1)
    plans = [{}, step(scheduler), step(scheduler)]
    add(scheduler, "short", 2, max_tokens=5)
    plans += [step(scheduler) for _ in range(18)]
    for plan in plans[1:]:
        assert plan["a"][1:] == plan["b"][1:] == (1, True)
    assert [request.num_output_tokens for request in decoding] == [21, 21]
    starts = next(i for i, plan in enumerate(plans) if "short" in plan)
    assert (starts, plans[starts]["short"]) == (short_starts, (0, 2, True))
    long_steps = [i for i, plan in enumerate(plans) if "long" in plan]
    assert long_steps == list(range(1, long_ends + 1))


def test_a_stream_of_short_requests_never_starves_a_long_prompt():
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=4)
    for number in range(4):
        add(scheduler, f"s{number}", 1, max_tokens=3)
    long = add(scheduler, "long", 20, max_tokens=1)
    steps = 0
    while long.finish_reason is None:
        add(scheduler, f"t{steps}", 1, max_tokens=3)
        step(scheduler)
        steps += 1
    # It gets a row when the first ones end, and then at least a token in every step.
    assert steps <= 3 + 20


# --- refusal ---


def test_a_request_id_is_taken_until_the_request_ends():
    scheduler = make_scheduler()
    add(scheduler, "a", 2, max_tokens=1)
    with pytest.raises(ValueError, match="request id 'a' is already in use"):
        add(scheduler, "a", 2)
    drain(scheduler)
    add(scheduler, "a", 2)


def test_b27_what_could_never_fit_is_refused_and_the_next_one_runs():
    scheduler = make_scheduler(num_blocks=11)
    for prompt, max_tokens in ((60, 1), (30, 20)):
        sampling = SamplingParams(max_tokens=max_tokens)
        limit = prompt + max_tokens
        request = Request("a", [5] * prompt, sampling, max_total_tokens=limit)
        needed = rf"needs {limit - 1} slots, but the pool has 40 \(10 blocks of 4\)"
        with pytest.raises(ValueError, match=needed):
            scheduler.add(request)
        assert not scheduler.has_unfinished()
    request = add(scheduler, "b", 4, max_tokens=4)
    drain(scheduler)
    assert request.output_token_ids == undisturbed(request.prompt_token_ids, 4)


def test_a_prompt_that_fills_the_pool_generates_one_token():
    scheduler = make_scheduler(num_blocks=4)
    request = add(scheduler, "a", 12, max_tokens=None)
    assert drain(scheduler) == [{"a": (0, 12, True)}]
    assert (request.num_output_tokens, request.finish_reason) == (1, "length")


def test_without_max_tokens_a_request_ends_where_the_pool_does():
    scheduler = make_scheduler(num_blocks=4)
    request = add(scheduler, "a", 5, max_tokens=None)
    drain(scheduler)
    assert (len(request.token_ids), request.finish_reason) == (13, "length")


def test_a_budget_below_the_rows_is_refused():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens 3 must be .* 4"):
        make_scheduler(max_num_batched_tokens=3)


# --- blocks running out ---


def test_b02_a_prompt_that_does_not_fit_yet_waits_and_owns_nothing():
    scheduler = make_scheduler(num_blocks=5, max_num_batched_tokens=32)
    add(scheduler, "a", 8, max_tokens=1)
    add(scheduler, "b", 12, max_tokens=1)
    assert step(scheduler) == {"a": (0, 8, True)}
    assert step(scheduler) == {"b": (0, 12, True)}
    assert scheduler.num_preemptions == 0


def test_admission_leaves_every_running_request_its_next_block():
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=32)
    add(scheduler, "a", 8, max_tokens=8)  # 2 blocks, and will want a third
    add(scheduler, "b", 8, max_tokens=8)
    assert step(scheduler).keys() == {"a"}
    scheduler = make_scheduler(num_blocks=7, max_num_batched_tokens=32)
    add(scheduler, "a", 8, max_tokens=8)
    add(scheduler, "b", 8, max_tokens=8)
    assert step(scheduler).keys() == {"a", "b"}


def test_admission_reserves_no_block_that_can_never_be_wanted():
    scheduler = make_scheduler(num_blocks=5, max_num_batched_tokens=32)
    add(scheduler, "a", 8, max_tokens=1)
    add(scheduler, "b", 7, max_tokens=2)
    assert step(scheduler).keys() == {"a", "b"}


def test_admission_counts_the_rest_of_a_prompt_that_is_part_way():
    scheduler = make_scheduler(
        num_blocks=5, max_num_batched_tokens=8, long_prefill_token_threshold=4
    )
    add(scheduler, "a", 12, max_tokens=1)
    add(scheduler, "b", 4, max_tokens=2)
    assert [list(plan) for plan in drain(scheduler)] == [
        ["a"],
        ["a"],
        ["a"],
        ["b"],
        ["b"],
    ]
    assert scheduler.num_preemptions == 0


def test_the_latest_request_is_preempted_and_leaves_the_plan():
    scheduler = make_scheduler(num_blocks=7, max_num_batched_tokens=32)
    first = add(scheduler, "first", 7, max_tokens=12)
    last = add(scheduler, "last", 7, max_tokens=12)
    while not last.num_preemptions:
        before = step(scheduler)
    assert first.num_output_tokens == last.num_output_tokens + 1
    assert before == {"first": (12, 1, True)}
    assert (last.row, last.num_computed_tokens, last.num_scheduled_tokens) == (
        None,
        0,
        0,
    )
    assert scheduler.block_tables.table("last") == []
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert scheduler.num_preemptions == 1
    drain(scheduler)
    assert first.num_preemptions == 0
    for request in (first, last):
        expected = undisturbed(request.prompt_token_ids, 12)
        assert request.output_token_ids == expected


def test_a_victim_that_was_planned_already_is_withdrawn():
    # Decodes are planned first: in step 5 "decode" has its token and its block when
    # "long" needs four blocks and finds two.
    scheduler = make_scheduler(
        num_blocks=24, block_size=1, long_prefill_token_threshold=4
    )
    long = add(scheduler, "long", 20, max_tokens=2)
    decode = add(scheduler, "decode", 1, max_tokens=10)
    plans = [step(scheduler) for _ in range(5)]
    assert plans[3] == {"long": (12, 4, False), "decode": (3, 1, True)}
    assert plans[4] == {"long": (16, 4, True)}
    assert (decode.num_preemptions, decode.num_output_tokens) == (1, 4)
    drain(scheduler)
    for request, count in ((long, 2), (decode, 10)):
        expected = undisturbed(request.prompt_token_ids, count)
        assert request.output_token_ids == expected


@pytest.mark.parametrize(
    ("num_blocks", "victim", "resumed"),
    [
        # In step 5 "r" needs 8 blocks, and "late" could give back 3. Where that is
        # enough, the four others take blocks from "r" later on. Where it is not, "r"
        # is admitted again while "late", which arrived after it, still runs.
        pytest.param(61, "late", ["r", "late"], id="5 are left: 3 more will do"),
        pytest.param(60, "r", ["r"], id="4 are left: 3 more are too few"),
    ],
)
def test_nobody_is_preempted_for_less_than_is_needed(num_blocks, victim, resumed):
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        block_size=1,
        max_num_seqs=6,
        long_prefill_token_threshold=8,
    )
    requests = [add(scheduler, f"e{i}", 1, max_tokens=8) for i in range(4)]
    requests.append(add(scheduler, "r", 40, max_tokens=4))
    for _ in range(2):
        step(scheduler)
    requests.append(add(scheduler, "late", 1, max_tokens=20))
    for _ in range(3):
        step(scheduler)
    assert [r.request_id for r in requests if r.num_preemptions] == [victim]
    starts = []
    for plan in drain(scheduler):
        starts += [name for name in plan if plan[name][0] == 0]
    assert starts == resumed


def test_what_is_withdrawn_from_a_plan_goes_back_to_the_budget():
    request = make_request(make_scheduler(), "a", 6)
    request.row = 0
    plan = Plan(8)
    plan.add(request, 5)
    assert (plan.budget, request.num_scheduled_tokens) == (3, 5)
    for _ in range(2):
        plan.withdraw(request)
        assert (plan.budget, request.num_scheduled_tokens) == (8, 0)
    assert plan.schedule().rows == ()


def test_two_requests_that_fit_only_one_at_a_time_both_finish():
    scheduler = make_scheduler(num_blocks=6)
    requests = [add(scheduler, name, 8, max_tokens=12) for name in "ab"]
    steps = drain(scheduler)
    assert [list(plan) for plan in steps] == [["a"]] * 12 + [["b"]] * 12
    assert scheduler.num_preemptions == 0
    for request in requests:
        assert request.finish_reason == "length"


def test_preemption_never_goes_back_and_forth():
    scheduler = make_scheduler(num_blocks=7, max_num_batched_tokens=32)
    requests = [add(scheduler, name, 7, max_tokens=18) for name in "ab"]
    drain(scheduler)
    assert [request.num_preemptions for request in requests] == [0, 1]


def test_preempted_requests_are_resumed_in_order_of_arrival():
    scheduler = make_scheduler(num_blocks=10, max_num_batched_tokens=32)
    requests = [add(scheduler, name, 7, max_tokens=20) for name in "abc"]
    add(scheduler, "d", 1, max_tokens=1)
    started = []
    for plan in drain(scheduler):
        started += [name for name, (start, _, _) in plan.items() if start == 0]
    assert started == ["a", "b", "c", "b", "c", "d"]
    assert [request.num_preemptions for request in requests] == [0, 1, 1]


def test_b34_a_resumed_request_replays_prompt_and_output_before_it_samples():
    scheduler = make_scheduler(
        num_blocks=25, block_size=1, long_prefill_token_threshold=4
    )
    add(scheduler, "x", 2, max_tokens=7)
    add(scheduler, "y", 2, max_tokens=20)
    request = add(scheduler, "r", 6, max_tokens=14, min_tokens=14)
    runs = [[]]  # what was planned for r, one list for each time it was admitted
    while scheduler.has_unfinished():
        plan = step(scheduler)
        if request.num_preemptions == len(runs):
            runs.append([])
        if "r" in plan:
            runs[-1].append(plan["r"])
    prompt = [(0, 4, False), (4, 2, True)]
    assert runs[0] == prompt + [(n, 1, True) for n in range(6, 10)]
    replay = [(0, 4, False), (4, 4, False), (8, 3, True)]  # 6 + 5 tokens are known
    assert runs[1] == [*replay, (11, 1, True)]
    replay = [(0, 4, False), (4, 4, False), (8, 4, False), (12, 1, True)]
    assert runs[2] == replay + [(n, 1, True) for n in range(13, 19)]
    assert request.output_token_ids == undisturbed(request.prompt_token_ids, 14)
    assert request.num_prompt_tokens == 6
    assert request.prompt_token_ids == request.token_ids[:6]


# --- the end of a request ---


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("end", ["length", "stop"])
@pytest.mark.parametrize("num_blocks", [40, 13])
def test_b04_blocks_are_given_back_once_however_a_request_ends(
    block_size, end, num_blocks
):
    scheduler = make_scheduler(num_blocks=num_blocks, block_size=block_size)
    requests = [add(scheduler, name, 4, max_tokens=9) for name in "ab"]
    while scheduler.has_unfinished():
        schedule = scheduler.schedule()
        last = [r.request.num_output_tokens == 8 for r in schedule.rows]
        tokens = [EOS if it and end == "stop" else 10 for it in last]
        scheduler.commit(schedule, tokens)
        scheduler.check_invariants()
    assert [request.finish_reason for request in requests] == [end, end]
    assert scheduler.pool.num_free == num_blocks - 1
    free = scheduler.pool.allocate(num_blocks - 1)
    assert sorted(free) == list(range(1, num_blocks))


def test_an_aborted_request_ends_at_once_waiting_or_running():
    scheduler = make_scheduler(max_num_seqs=1)
    running = add(scheduler, "running", 6)
    waiting = add(scheduler, "waiting", 6)
    step(scheduler)
    for request in (waiting, running):
        assert scheduler.abort(request.request_id) is request
        assert (request.finish_reason, request.stop_reason) == ("abort", None)
        scheduler.check_invariants()
    assert not scheduler.has_unfinished()
    assert scheduler.pool.num_held == 0
    assert running.num_output_tokens == 1


def test_b116_abort_of_an_unknown_or_finished_request_does_nothing():
    scheduler = make_scheduler()
    request = add(scheduler, "a", 2, max_tokens=1)
    drain(scheduler)
    assert scheduler.abort("a") is None
    assert scheduler.abort("never seen") is None
    assert request.finish_reason == "length"


def test_b116_abort_in_the_step_that_would_have_been_the_last():
    scheduler = make_scheduler()
    aborted = add(scheduler, "a", 2, max_tokens=1)
    other = add(scheduler, "b", 2, max_tokens=1)
    schedule = scheduler.schedule()
    assert scheduler.abort("a") is aborted
    assert scheduler.abort("a") is None
    assert scheduler.commit(schedule, [10, 11]) == [other]
    assert (aborted.finish_reason, aborted.output_token_ids) == ("abort", [])
    scheduler.check_invariants()
    assert scheduler.pool.num_free == 32


def test_an_id_used_again_before_the_commit_does_not_get_the_old_ones_token():
    scheduler = make_scheduler()
    add(scheduler, "a", 2)
    schedule = scheduler.schedule()
    scheduler.abort("a")
    again = add(scheduler, "a", 3)
    assert scheduler.commit(schedule, [10]) == []
    assert again.output_token_ids == []
    assert step(scheduler) == {"a": (0, 3, True)}


def test_b116_abort_of_a_preempted_request():
    scheduler = make_scheduler(num_blocks=7, max_num_batched_tokens=32)
    add(scheduler, "first", 7, max_tokens=12)
    last = add(scheduler, "last", 7, max_tokens=12)
    while not last.num_preemptions:
        step(scheduler)
    assert scheduler.abort("last") is last
    scheduler.check_invariants()
    drain(scheduler)


# --- anything in any order ---


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests, steps, failures and aborts on a pool that is always tight."""

    @initialize(
        num_blocks=st.integers(3, 40),
        block_size=st.sampled_from([1, 2]),
        max_num_seqs=st.integers(1, 5),
        spare=st.integers(0, 6),
        partial=st.integers(1, 2),
        threshold=st.integers(0, 3),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.booleans(),
        how=st.sampled_from(["recompute", "swap", "swap", "auto"]),
        num_swap_blocks=st.integers(1, 30),
        lengths=st.lists(st.integers(1, 12), max_size=4),
    )
    def start(
        self,
        num_blocks,
        block_size,
        max_num_seqs,
        spare,
        partial,
        threshold,
        policy,
        caching,
        how,
        num_swap_blocks,
        lengths,
    ):
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare,
            policy=policy,
            enable_prefix_caching=caching,
            max_num_partial_prefills=partial,
            long_prefill_token_threshold=threshold,
            num_swap_blocks=num_swap_blocks,
            # A block of two tokens is swapped in the time that three take.
            preemption=Preemption(how=how, bytes_per_block=1.5 * block_size / 2),
        )
        self.requests = []
        self.searches = {}  # requests of a search: those whose beams live
        self.expected = {}
        self.in_flight = None
        self.slots = {}  # (block, offset): the salt and all tokens up to the slot's
        self.written = {}  # (block, offset): how many resets came before
        self.num_resets = 0
        self.admitted = {}  # by request, likewise
        self.sharing = set()  # requests that waited for others' blocks
        for length in lengths:
            self.add([3] * length, None, 0, None, 1, 0)

    @rule(
        prompt=st.lists(st.integers(3, 4), min_size=1, max_size=14),
        max_tokens=st.sampled_from([None, None, 20, 5, 1]),
        min_tokens=st.integers(0, 1),
        salt=st.sampled_from([None, None, "salt"]),
        n=st.sampled_from([1, 1, 1, 3]),
        priority=st.integers(0, 2),
    )
    def add(self, prompt, max_tokens, min_tokens, salt, n, priority):
        source = None
        for _ in range(n):
            options = {"source": source, "priority": priority}
            added = self.add_one(prompt, max_tokens, min_tokens, salt, **options)
            source = source or added

    def add_one(self, prompt, max_tokens, min_tokens, salt, source, priority):
        name = f"r{len(self.requests)}"
        sampling = {"max_tokens": max_tokens, "min_tokens": min_tokens}
        try:
            request = make_request(self.scheduler, name, prompt, **sampling)
        except ValueError:
            return None  # it could never fit
        request.cache_salt = salt
        request.source = source
        request.priority = priority
        self.scheduler.add(request)
        self.requests.append(request)
        self.expected[name] = list(prompt)
        return request

    @rule(
        prompt=st.lists(st.integers(3, 4), min_size=1, max_size=9),
        width=st.integers(2, 4),
        max_tokens=st.integers(2, 6),
        priority=st.integers(0, 2),
    )
    def add_beams(self, prompt, width, max_tokens, priority):
        names = [f"r{len(self.requests) + i}" for i in range(width)]
        try:
            beams = tuple(
                make_request(self.scheduler, name, prompt, max_tokens) for name in names
            )
            for place, beam in enumerate(beams):
                beam.beams, beam.child, beam.priority = beams, place, priority
            self.scheduler.add(beams[0])
        except ValueError:
            return  # they could never fit
        self.requests += beams
        self.searches[beams] = [beams[0]]
        self.expected |= {beam.request_id: beam.token_ids for beam in beams}

    def branch_all(self, choose):
        """Let the searches go on whose beams have all computed their tokens."""
        for beams, live in self.searches.items():
            if beams[0].finish_reason is not None:
                continue
            if any(b.num_computed_tokens < len(b.token_ids) for b in live):
                continue
            known = [list(self.expected[beam.request_id]) for beam in live]
            at_end = len(known[0]) + 1 >= beams[0].max_total_tokens
            count = 0 if at_end else choose(0, len(beams))
            branches = [(choose(0, len(live) - 1), 3 + i) for i in range(count)]
            now = self.scheduler.branch(live, branches)
            assert len({id(beam) for beam in now}) == count
            for beam, (parent, token) in zip(now, branches, strict=True):
                self.expected[beam.request_id] = [*known[parent], token]
            self.searches[beams] = now
            if not branches:
                assert {beam.finish_reason for beam in beams} == {"stop"}

    def unfinished(self):
        """Requests that the scheduler has: of beams only those that live."""
        idle = {
            beam
            for beams, live in self.searches.items()
            for beam in beams
            if beam not in live
        }
        return [r for r in self.requests if r.finish_reason is None and r not in idle]

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def schedule(self):
        scheduler = self.scheduler
        had_row = {r.request_id: r.row for r in self.requests if r.row is not None}
        decoding = [
            r
            for r in self.requests
            if r.row is not None and len(r.token_ids) == r.num_computed_tokens + 1
        ]
        schedule = scheduler.schedule()
        self.in_flight = schedule
        self.read_slots(schedule, had_row)
        assert bool(schedule.rows) == scheduler.has_unfinished()
        assert schedule.num_tokens <= scheduler.max_num_batched_tokens
        rows = {r.request.request_id: r for r in schedule.rows}
        for request in decoding:
            assert request.row is None or rows[request.request_id].num_samples
        for name, scheduled in rows.items():
            request = scheduled.request
            assert scheduled.row == request.row == had_row.get(name, request.row)
            assert scheduled.start == request.num_computed_tokens
            assert scheduled.num_tokens > 0
            known = self.expected[name]
            assert request.token_ids == known
            end = scheduled.start + scheduled.num_tokens
            assert scheduled.num_samples == (end == len(known))
        running = [r for r in self.requests if r.row is not None]
        partial = [r for r in running if r.num_scheduled_tokens < len(r.token_ids)]
        for priority in range(3):
            equal = [r for r in partial if r.rank[0] == priority]
            assert len(equal) <= scheduler.max_num_partial_prefills
        waiting = [r for r in self.unfinished() if r.row is None]
        cache = scheduler.prefix_cache
        # Those let others pass, and may have to wait for a row then.
        self.sharing |= {
            r for r in waiting if r.source or cache.is_pending(r, cache.find(r))
        }
        never_ran = [
            r
            for r in waiting
            if not any(member.num_preemptions for member in r.unit)
            and r not in self.sharing
        ]
        if never_ran and running and scheduler.policy == "fcfs":
            oldest = min(r.arrival for r in never_ran)
            assert all(r.arrival < oldest for r in running)
        for victim in (r for r in self.requests if r.request_id in had_row):
            if victim.row is None:  # for somebody more urgent, or it gave way itself
                if victim.beams is not None:
                    assert all(beam.row is None for beam in victim.beams)
                others = [r.rank for r in running]
                assert not others or min(others) < victim.rank

    def read_slots(self, schedule, had_row):
        """Check what attention would read; note what the step is going to write."""
        block_size = self.scheduler.pool.block_size
        self.to_write = {}
        self.to_copy = {
            (target, offset): (source, offset)
            for source, target in schedule.copies
            for offset in range(block_size)
            if (source, offset) in self.slots
        }
        assert len({target for _, target in schedule.copies}) == len(schedule.copies)
        self.swapped = {
            swapped: [self.block_content(block) for block in block_ids]
            for swapped, block_ids in schedule.swap_outs
        }
        self.loaded = {
            (block, offset): content
            for swapped, block_ids in schedule.swap_ins
            for block, contents in zip(
                block_ids, self.swapped.get(swapped, swapped.content), strict=True
            )
            for offset, content in contents.items()
            if block != NULL_BLOCK
        }
        by_rank = sorted(schedule.rows, key=lambda row: row.request.rank)
        for scheduled in by_rank:  # who forks comes after its source, if both are new
            request = scheduled.request
            name = request.request_id
            if name not in had_row and request.swapped is None:
                self.admitted[name] = self.num_resets
                if request.source is not None:  # what it forks is as old as that
                    source = request.source.request_id
                    self.admitted[name] = self.admitted[source]
            table = self.scheduler.block_tables.table(name)
            end = scheduled.start + scheduled.num_tokens
            for position in range(end):
                slot = table[position // block_size], position % block_size
                content = request.cache_salt, tuple(request.token_ids[: position + 1])
                if position < scheduled.start:
                    slot = self.to_copy.get(slot, slot)
                    there = self.slots.get(slot), self.written.get(slot)
                    held, num_resets = self.loaded.get(slot, there)
                    assert held == content, f"{request!r} at {position}"
                    assert num_resets >= self.admitted[name]
                else:
                    assert slot not in self.to_write, f"{request!r} at {position}"
                    self.to_write[slot] = content

    def block_content(self, block):
        """{offset: (content, how many resets came before)}"""
        slots = [(block, i) for i in range(self.scheduler.pool.block_size)]
        return {
            slot[1]: (self.slots[slot], self.written[slot])
            for slot in slots
            if slot in self.slots
        }

    @rule()
    def reset(self):
        self.scheduler.reset_prefix_cache()
        self.num_resets += 1
        assert self.scheduler.pool.num_cached == 0

    @precondition(lambda self: self.in_flight is not None)
    @rule(data=st.data())
    def commit(self, data):
        schedule, self.in_flight = self.in_flight, None
        tokens = [
            data.draw(st.integers(EOS, 9)) if scheduled.num_samples else None
            for scheduled in schedule.rows
        ]
        self.commit_tokens(
            schedule, tokens, lambda low, high: data.draw(st.integers(low, high))
        )

    def commit_tokens(self, schedule, tokens, choose):
        self.move_swapped()
        self.slots |= {to: self.slots[slot] for to, slot in self.to_copy.items()}
        self.written |= {to: self.written[slot] for to, slot in self.to_copy.items()}
        self.slots |= self.to_write
        self.written |= dict.fromkeys(self.to_write, self.num_resets)
        expected = []
        for scheduled, token in zip(schedule.rows, tokens, strict=True):
            ended = scheduled.request.finish_reason is not None
            if scheduled.num_samples and scheduled.request.beams is None and not ended:
                self.expected[scheduled.request.request_id].append(token)
                expected.append(scheduled.request)
        assert self.scheduler.commit(schedule, tokens) == expected
        for request in expected:
            sampling = request.sampling_params
            count = request.num_output_tokens
            reason = None
            if request.token_ids[-1] == EOS and count > sampling.min_tokens:
                reason = "stop"
            elif len(request.token_ids) == request.max_total_tokens:
                reason = "length"
            assert request.finish_reason == reason
        self.branch_all(choose)

    def move_swapped(self):
        for swapped, content in self.swapped.items():
            swapped.content = content
        for slot, (content, num_resets) in self.loaded.items():
            self.slots[slot] = content
            self.written[slot] = num_resets

    @precondition(lambda self: self.in_flight is None)
    @rule(count=st.integers(1, 20))
    def run(self, count):
        for _ in range(count):
            self.schedule()
            self.agrees()
            schedule, self.in_flight = self.in_flight, None
            tokens = [
                3 if scheduled.num_samples else None for scheduled in schedule.rows
            ]
            # Searches keep all their beams, which fork from the last one.
            self.commit_tokens(schedule, tokens, lambda low, high: high)

    @precondition(lambda self: self.in_flight is not None)
    @rule(swaps=st.booleans())
    def discard(self, swaps):
        schedule, self.in_flight = self.in_flight, None
        if swaps:  # it failed later
            self.move_swapped()
        self.scheduler.discard(schedule)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.requests))
        known = request in self.unfinished()
        assert self.scheduler.abort(request.request_id) is (request if known else None)

    @invariant()
    def agrees(self):
        scheduler = self.scheduler
        scheduler.check_invariants()
        unfinished = self.unfinished()
        assert scheduler.num_running + scheduler.num_waiting == len(unfinished)
        total = sum(request.num_preemptions for request in self.requests)
        assert scheduler.num_preemptions == total
        for request in unfinished:
            assert request.token_ids == self.expected[request.request_id]
        if self.in_flight is None:
            assert 0 <= scheduler.num_wasted_slots <= scheduler.num_held_slots
            for request in unfinished:
                assert request.num_scheduled_tokens == request.num_computed_tokens

    def teardown(self):
        """Whatever happened, all that is left finishes."""
        if not hasattr(self, "scheduler"):
            return
        if self.in_flight is not None:
            self.scheduler.discard(self.in_flight)
            self.in_flight = None
        for _ in range(300):
            if not self.scheduler.has_unfinished():
                break
            self.run(10)
        assert not self.scheduler.has_unfinished()
        assert self.scheduler.pool.num_held == 0
        assert self.scheduler.swap_space.num_used == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings_of(350, stateful_step_count=30)
