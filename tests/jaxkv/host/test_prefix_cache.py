"""Prefix caching in the scheduler: who finds what, and who waits for whom."""

import pytest

from jaxkv.host.block_hash import BlockChain, block_hashes
from jaxkv.host.request import Request, SamplingParams, max_total_tokens
from tests.jaxkv.host.test_scheduler import (
    drain,
    make_scheduler,
    next_token,
    sample,
    step,
    undisturbed,
)

BLOCK_SIZE = 4


@pytest.fixture
def scheduler():
    return make_scheduler(enable_prefix_caching=True, max_num_batched_tokens=64)


def add(
    scheduler,
    request_id,
    prompt,
    max_tokens=1,
    *,
    salt=None,
    adapter=None,
    child=0,
    source=None,
    priority=0,
    **params,
):
    limit = max_total_tokens(
        len(prompt),
        max_tokens,
        max_model_len=1000,
        num_blocks=scheduler.pool.num_blocks,
        block_size=scheduler.pool.block_size,
    )
    request = Request(
        request_id,
        prompt,
        SamplingParams(max_tokens=max_tokens, temperature=0, **params),
        max_total_tokens=limit,
        child=child,
        source=source,
        priority=priority,
        cache_salt=salt,
        adapter=adapter,
    )
    scheduler.add(request)
    return request


def run(scheduler, request_id, prompt, **options):
    """Run one request alone; return it."""
    request = add(scheduler, request_id, prompt, **options)
    drain(scheduler)
    count = request.num_output_tokens
    assert request.output_token_ids == undisturbed(prompt, count)
    return request


def test_a_chain_extended_block_by_block_is_that_of_all_at_once():
    tokens = list(range(19))
    expected = block_hashes(tokens, 4, parent=b"root", salt="s")
    chain = BlockChain(4, b"root", salt="s")
    for num_blocks in (0, 1, 1, 3, 2, 4):
        digests = chain.extend(tokens, num_blocks)
        assert digests[:num_blocks] == expected[:num_blocks]
    assert chain.digests == expected


def test_b16_a_whole_prompt_that_is_known_leaves_its_last_token_to_compute(scheduler):
    prompt = list(range(100, 108))
    assert run(scheduler, "cold", prompt).num_cached_tokens == 0
    assert run(scheduler, "again", prompt).num_cached_tokens == 4
    assert run(scheduler, "longer", [*prompt, 1, 2, 3, 4]).num_cached_tokens == 8
    assert (scheduler.prefix_cache.num_queries, scheduler.prefix_cache.num_hits) == (
        28,
        12,
    )


def test_what_is_found_is_not_computed_again(scheduler):
    prompt = list(range(100, 110))
    run(scheduler, "cold", prompt)
    add(scheduler, "warm", prompt, max_tokens=2)
    assert step(scheduler) == {"warm": (8, 2, True)}


def test_generated_tokens_are_found_in_the_next_turn(scheduler):
    first = run(scheduler, "first", list(range(100, 106)), max_tokens=8)
    # The last of 14 tokens is not computed: 3 blocks are full.
    second = run(scheduler, "second", [*first.token_ids, 50, 51], max_tokens=2)
    assert second.num_cached_tokens == 12


def test_requests_that_arrive_together_compute_a_common_prefix_once(scheduler):
    prefix = list(range(100, 112))
    leader = add(scheduler, "leader", [*prefix, 1], max_tokens=2)
    follower = add(scheduler, "follower", [*prefix, 2, 3], max_tokens=2)
    other = add(scheduler, "other", [7, 8, 9, 10, 11], max_tokens=2)
    assert step(scheduler) == {"leader": (0, 13, True), "other": (0, 5, True)}
    assert step(scheduler)["follower"] == (12, 2, True)
    assert follower.num_cached_tokens == 12
    drain(scheduler)
    for request in (leader, follower, other):
        expected = undisturbed(request.prompt_token_ids, 2)
        assert request.output_token_ids == expected


def test_a_follower_shares_the_blocks_while_both_run(scheduler):
    prefix = list(range(100, 108))
    add(scheduler, "a", [*prefix, 1], max_tokens=9)
    add(scheduler, "b", [*prefix, 2], max_tokens=9)
    step(scheduler)
    step(scheduler)
    tables = [scheduler.block_tables.table(name) for name in "ab"]
    assert tables[0][:2] == tables[1][:2]
    assert tables[0][2] != tables[1][2]
    assert [scheduler.pool.ref_count(block) for block in tables[0]] == [2, 2, 1]


def test_who_waited_for_a_leader_that_is_aborted_computes_it_itself(scheduler):
    prompt = list(range(100, 109))
    add(scheduler, "leader", prompt)
    follower = add(scheduler, "follower", prompt)
    schedule = scheduler.schedule()
    assert [r.request.request_id for r in schedule.rows] == ["leader"]
    scheduler.abort("leader")
    scheduler.commit(schedule, sample(schedule))
    scheduler.check_invariants()
    assert scheduler.pool.num_cached == 0
    assert step(scheduler) == {"follower": (0, 9, True)}
    assert follower.num_cached_tokens == 0


def test_a_failed_step_publishes_nothing(scheduler):
    prompt = list(range(100, 109))
    add(scheduler, "a", prompt)
    schedule = scheduler.schedule()
    scheduler.discard(schedule)
    scheduler.check_invariants()
    scheduler.abort("a")
    assert scheduler.pool.num_cached == 0
    assert run(scheduler, "b", prompt).num_cached_tokens == 0


def test_b08_an_evicted_block_is_not_found():
    scheduler = make_scheduler(num_blocks=5, enable_prefix_caching=True)
    prompt = [100, 101, 102, 103, 104]
    run(scheduler, "p", prompt)
    run(scheduler, "other", list(range(200, 214)), max_tokens=2)
    assert run(scheduler, "again", prompt).num_cached_tokens == 0


def test_b23_the_deepest_block_of_a_chain_goes_first():
    scheduler = make_scheduler(num_blocks=4, enable_prefix_caching=True)
    prompt = list(range(100, 112))
    run(scheduler, "chain", prompt)
    run(scheduler, "one block", [1, 2, 3])
    assert run(scheduler, "again", prompt).num_cached_tokens == 8


def test_b13_other_adapters_and_salts_find_nothing(scheduler):
    prompt = list(range(100, 109))

    def found(name, **keys):
        return run(scheduler, name, prompt, **keys).num_cached_tokens

    assert [found("a", adapter="a"), found("b", adapter="b"), found("none")] == [0] * 3
    assert found("a again", adapter="a") == 8
    assert found("salted", salt="a") == 0
    assert found("both", salt="a", adapter="a") == 0
    assert found("salted again", salt="a") == 8


def test_b15_an_adapter_loaded_again_under_its_name_finds_nothing(scheduler):
    # Its key is one load's, not its name; other weights of the model are a reset.
    prompt = list(range(100, 109))
    assert run(scheduler, "v1", prompt, adapter="ad/1").num_cached_tokens == 0
    assert run(scheduler, "v1 again", prompt, adapter="ad/1").num_cached_tokens == 8
    assert run(scheduler, "v2", prompt, adapter="ad/2").num_cached_tokens == 0
    scheduler.reset_prefix_cache()
    assert run(scheduler, "new", prompt, adapter="ad/1").num_cached_tokens == 0


def test_b26_only_tokens_whose_keys_a_step_has_written_are_published(scheduler):
    request = add(scheduler, "a", [100, 101, 102], max_tokens=4)
    digest = block_hashes([100, 101, 102, next_token([100, 101, 102])], BLOCK_SIZE)
    step(scheduler)  # the fourth token is known now, but not computed
    assert len(request.token_ids) == 4
    assert scheduler.pool.lookup(digest) == []
    failed = scheduler.schedule()
    scheduler.discard(failed)
    assert scheduler.pool.lookup(digest) == []
    step(scheduler)
    assert scheduler.pool.lookup(digest) == scheduler.block_tables.table("a")[:1]


def test_b21_a_request_with_prompt_logprobs_finds_nothing_and_publishes(scheduler):
    prompt = list(range(100, 109))
    for name in ("first", "second"):
        request = run(scheduler, name, prompt, prompt_logprobs=1)
        assert request.num_cached_tokens == 0
    assert scheduler.prefix_cache.num_queries == 0
    assert run(scheduler, "third", prompt).num_cached_tokens == 8


def test_b12_usage_falls_back_after_each_of_many_requests(scheduler):
    for number in range(101):
        run(scheduler, f"r{number}", [number, *range(100, 120)], max_tokens=4)
        assert scheduler.pool.num_held == 0


def test_b06_shared_blocks_count_once(scheduler):
    prompt = list(range(100, 108))
    for name in ("a", "b"):
        add(scheduler, name, [*prompt, 1], max_tokens=4)
    step(scheduler)
    step(scheduler)
    pool = scheduler.pool
    assert (pool.num_held, pool.num_cached, pool.num_free) == (4, 0, 28)
    drain(scheduler)
    # Both computed position 8 to 11; the first to publish keeps the digest.
    assert (pool.num_held, pool.num_cached) == (0, 3)


def test_cached_blocks_are_room_for_whoever_needs_it():
    scheduler = make_scheduler(num_blocks=6, enable_prefix_caching=True)
    run(scheduler, "a", list(range(100, 117)), max_tokens=3)
    assert (scheduler.pool.num_free, scheduler.pool.num_cached) == (1, 4)
    run(scheduler, "b", list(range(200, 217)), max_tokens=3)


def test_a_request_is_admitted_only_if_what_it_found_leaves_room_for_the_rest():
    # 5 blocks; "a" runs with 3 and may want a fourth. What "b" finds is held by nobody,
    # so it takes room too.
    scheduler = make_scheduler(
        num_blocks=6, enable_prefix_caching=True, max_num_batched_tokens=64
    )
    prompt = list(range(100, 105))
    run(scheduler, "cold", prompt)
    add(scheduler, "a", list(range(200, 211)), max_tokens=4)
    add(scheduler, "b", prompt, max_tokens=2)
    assert list(step(scheduler)) == ["a"]
    drain(scheduler)


def test_a_preempted_request_finds_its_own_blocks_again():
    scheduler = make_scheduler(
        num_blocks=8, enable_prefix_caching=True, max_num_batched_tokens=32
    )
    first = add(scheduler, "first", list(range(100, 107)), max_tokens=12)
    last = add(scheduler, "last", list(range(200, 207)), max_tokens=12)
    replays = []
    while scheduler.has_unfinished():
        had_row = last.row is not None
        plan = step(scheduler)
        if last.num_preemptions and not had_row and "last" in plan:
            replays.append(plan["last"])
    assert last.num_preemptions == 1
    assert replays[0][0] > 0  # some of it was still in the cache
    assert last.num_cached_tokens == 0  # counted at the first admission
    for request in (first, last):
        expected = undisturbed(request.prompt_token_ids, 12)
        assert request.output_token_ids == expected


def test_reset_forgets_what_is_cached_and_what_runs(scheduler):
    prompt = list(range(100, 109))
    run(scheduler, "cold", prompt)
    running = add(scheduler, "running", list(range(200, 206)), max_tokens=8)
    waiting = add(scheduler, "waiting", list(range(200, 206)), max_tokens=8)
    step(scheduler)
    scheduler.reset_prefix_cache()
    scheduler.check_invariants()
    assert scheduler.pool.num_cached == 0
    assert scheduler.pool.num_free + scheduler.pool.num_held == 32
    drain(scheduler)
    for request in (running, waiting):
        expected = undisturbed(request.prompt_token_ids, 8)
        assert request.output_token_ids == expected
    assert waiting.num_cached_tokens == 0
    # "waiting" filled three blocks; of what "running" computed nothing is kept.
    assert scheduler.pool.num_cached == 3
    assert run(scheduler, "again", prompt).num_cached_tokens == 0
    assert run(scheduler, "and again", prompt).num_cached_tokens == 8


def test_without_prefix_caching_nothing_is_cached_and_nobody_waits():
    scheduler = make_scheduler(enable_prefix_caching=False, max_num_batched_tokens=64)
    prompt = list(range(100, 109))
    for name in ("a", "b"):
        add(scheduler, name, prompt)
    assert step(scheduler) == {"a": (0, 9, True), "b": (0, 9, True)}
    assert (scheduler.pool.num_free, scheduler.prefix_cache.num_queries) == (32, 0)


def blocks_found(scheduler, token_ids):
    """The blocks that a second request for such a prompt finds, after a first one."""
    assert run(scheduler, "fresh", token_ids).num_cached_tokens == 0
    add(scheduler, "again", token_ids)
    scheduler.schedule()
    return scheduler.block_tables.table("again")[: len(token_ids) // BLOCK_SIZE]


def test_what_is_computed_upon_forgotten_blocks_is_never_found(scheduler):
    running = add(scheduler, "running", list(range(100, 109)), max_tokens=6)
    step(scheduler)
    scheduler.reset_prefix_cache()
    table = scheduler.block_tables.table("running")
    while running.num_computed_tokens < 12:
        step(scheduler)
    stale = table[2]  # filled after the reset
    drain(scheduler)
    assert stale not in blocks_found(scheduler, running.token_ids[:13])


def test_what_a_fork_computes_upon_forgotten_blocks_is_never_found(scheduler):
    prompt = list(range(100, 109))
    first = add(scheduler, "first", prompt, max_tokens=6)
    second = add(scheduler, "second", prompt, max_tokens=6, child=1, source=first)
    step(scheduler)
    scheduler.reset_prefix_cache()
    while second.num_computed_tokens < 12:
        step(scheduler)
        tables = [scheduler.block_tables.table(n) for n in ("first", "second")]
        stale = {table[2] for table in tables if table}
    drain(scheduler)
    assert not stale & set(blocks_found(scheduler, second.token_ids[:13]))


def test_who_computes_everything_anew_after_a_reset_publishes_again():
    scheduler = make_scheduler(
        policy="priority", max_num_seqs=1, enable_prefix_caching=True
    )
    prompt = list(range(100, 109))
    low = add(scheduler, "low", prompt, max_tokens=3, priority=1)
    step(scheduler)
    scheduler.reset_prefix_cache()
    add(scheduler, "urgent", [1, 2], priority=0)
    drain(scheduler)
    assert low.num_preemptions == 1
    assert run(scheduler, "next", prompt).num_cached_tokens == 8
