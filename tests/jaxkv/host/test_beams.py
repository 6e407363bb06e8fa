"""Beams in the scheduler: branches, forks, and who waits for whom."""

import pytest

from jaxkv.host.request import Request, SamplingParams
from tests.jaxkv.host.test_prefix_cache import add
from tests.jaxkv.host.test_scheduler import (
    drain,
    make_scheduler,
    planned,
    sample,
    undisturbed,
)


def make_beams(name, prompt, width, max_tokens, priority=0):
    beams = tuple(
        Request(
            f"{name}{child}",
            prompt,
            SamplingParams(max_tokens=max_tokens, temperature=0),
            max_total_tokens=len(prompt) + max_tokens,
            child=child,
            priority=priority,
        )
        for child in range(width)
    )
    for beam in beams:
        beam.beams = beams
    return beams


def run_step(scheduler):
    schedule = scheduler.schedule()
    scheduler.check_invariants()
    scheduler.commit(schedule, sample(schedule))
    return schedule


def test_branches_stay_where_they_are_or_fork():
    scheduler = make_scheduler(max_num_batched_tokens=32)
    beams = make_beams("b", list(range(100, 106)), width=3, max_tokens=9)
    scheduler.add(beams[0])
    assert planned(run_step(scheduler)) == {"b0": (0, 6, True)}
    assert scheduler.schedule().rows == ()  # nothing is known to run
    live = scheduler.branch([beams[0]], [(0, 7), (0, 8), (0, 9)])
    assert live == list(beams)
    assert [beam.token_ids[6:] for beam in live] == [[7], [8], [9]]
    schedule = run_step(scheduler)
    assert planned(schedule) == {f"b{i}": (6, 1, True) for i in range(3)}
    tables = [list(scheduler.block_tables.table(f"b{i}")) for i in range(3)]
    # The full block is shared, the other one copied.
    assert tables == [[1, 2], [1, 3], [1, 4]]
    assert schedule.copies == ((2, 3), (2, 4))
    # The second goes on twice; the first and third end, and one of them is its fork.
    live = scheduler.branch(live, [(1, 11), (1, 12)])
    assert live == [beams[1], beams[0]]
    assert [beam.token_ids[6:] for beam in live] == [[8, 11], [8, 12]]
    schedule = run_step(scheduler)
    assert planned(schedule) == {"b0": (7, 1, True), "b1": (7, 1, True)}
    assert schedule.copies == ((3, scheduler.block_tables.table("b0")[1]),)
    assert scheduler.branch(live, []) == []
    assert {beam.finish_reason for beam in beams} == {"stop"}
    assert (scheduler.has_unfinished(), scheduler.pool.num_held) == (False, 0)


def test_a_fork_waits_for_nobody_who_waits_for_its_search():
    # "c1" comes first and needs more room than the search leaves: it waits until that
    # ends, and the search cannot end without its fork.
    scheduler = make_scheduler(
        num_blocks=16,
        block_size=1,
        long_prefill_token_threshold=3,
        max_num_partial_prefills=2,
        max_num_batched_tokens=32,
    )
    prompt = list(range(100, 110))
    first = add(scheduler, "c0", prompt, max_tokens=2)
    second = add(scheduler, "c1", prompt, max_tokens=2, child=1, source=first)
    beams = make_beams("b", [5, 6], width=2, max_tokens=4)
    scheduler.add(beams[0])
    run_step(scheduler)
    scheduler.abort("c0")
    scheduler.pool.allocate(6)  # somebody else has these
    live = scheduler.branch([beams[0]], [(0, 7), (0, 8)])
    assert planned(scheduler.schedule()).keys() == {"b0", "b1"}
    assert second.row is None
    assert len(live) == 2


def test_a_fork_takes_the_row_of_whoever_is_less_urgent():
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=32)
    beams = make_beams("b", [5, 6, 7], width=2, max_tokens=4)
    scheduler.add(beams[0])
    later = add(scheduler, "later", [8, 9], max_tokens=4)
    run_step(scheduler)
    assert later.row is not None
    live = scheduler.branch([beams[0]], [(0, 7), (0, 8)])
    assert planned(run_step(scheduler)).keys() == {"b0", "b1"}
    assert later.num_preemptions == 1
    scheduler.branch(live, [])
    drain(scheduler)
    assert later.output_token_ids == undisturbed([8, 9], 4)


@pytest.mark.parametrize("caching", [True, False])
def test_beams_are_preempted_together_and_one_computes_what_they_share(caching):
    scheduler = make_scheduler(
        policy="priority",
        max_num_seqs=3,
        enable_prefix_caching=caching,
        max_num_batched_tokens=32,
    )
    prompt = list(range(100, 109))
    beams = make_beams("b", prompt, width=2, max_tokens=6, priority=1)
    scheduler.add(beams[0])
    run_step(scheduler)
    live = scheduler.branch([beams[0]], [(0, 7), (0, 8)])
    run_step(scheduler)
    live = scheduler.branch(live, [(1, 9), (1, 10)])
    for name in ("x", "y"):
        add(scheduler, name, [5, 6], max_tokens=2, priority=0)
    assert planned(run_step(scheduler)).keys() == {"x", "y"}
    assert [beam.row for beam in beams] == [None, None]
    scheduler.check_invariants()
    while scheduler.num_running != 2 or beams[1].num_computed_tokens < 11:
        run_step(scheduler)
    assert [beam.num_computed_tokens for beam in beams] == [11, 11]
    tables = [scheduler.block_tables.table(f"b{i}") for i in range(2)]
    assert tables[0][:2] == tables[1][:2]
    assert tables[0][2] != tables[1][2]
    assert [beam.token_ids[9:] for beam in live] == [[8, 9], [8, 10]]
    scheduler.branch(live, [])
    assert scheduler.pool.num_held == 0


@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_that_is_preempted_in_the_step_that_admits_it_copies_nothing(caching):
    scheduler = make_scheduler(
        policy="priority",
        max_num_seqs=2,
        enable_prefix_caching=caching,
        max_num_batched_tokens=32,
    )
    prompt = list(range(100, 106))
    beams = make_beams("b", prompt, width=2, max_tokens=6, priority=5)
    scheduler.add(beams[0])
    run_step(scheduler)
    scheduler.branch([beams[0]], [(0, 7), (0, 8)])
    urgent = add(scheduler, "urgent", [5, 6, 7, 8, 9], max_tokens=2, priority=0)
    schedule = scheduler.schedule()
    scheduler.check_invariants()
    assert planned(schedule) == {"urgent": (0, 5, True)}
    assert schedule.copies == ()
    assert [beam.row for beam in beams] == [None, None]
    scheduler.commit(schedule, sample(schedule))
    assert urgent.row is not None


def test_a_search_that_lost_its_rows_does_not_come_back_in_the_same_step():
    scheduler = make_scheduler(
        max_num_seqs=2, enable_prefix_caching=True, max_num_batched_tokens=32
    )
    searches = [
        make_beams(name, list(range(base, base + 6)), width=2, max_tokens=6)
        for name, base in (("b", 100), ("c", 200))
    ]
    for beams in searches:
        scheduler.add(beams[0])
    run_step(scheduler)
    for beams in searches:
        scheduler.branch([beams[0]], [(0, 7), (0, 8)])
    assert planned(run_step(scheduler)).keys() == {"b0", "b1"}
    assert [beam.row for beam in searches[1]] == [None, None]
    assert searches[1][0].num_preemptions == 1


def test_abort_of_one_beam_ends_the_search():
    for stage in range(3):
        scheduler = make_scheduler(max_num_batched_tokens=32)
        beams = make_beams("b", [5, 6, 7], width=2, max_tokens=4)
        scheduler.add(beams[0])
        if stage > 0:
            run_step(scheduler)
            scheduler.branch([beams[0]], [(0, 7), (0, 8)])
        if stage > 1:
            run_step(scheduler)
        assert scheduler.abort("b0") is beams[0]
        assert {beam.finish_reason for beam in beams} == {"abort"}
        assert (scheduler.has_unfinished(), scheduler.pool.num_held) == (False, 0)
        scheduler.check_invariants()


def test_a_search_that_could_never_fit_is_refused():
    scheduler = make_scheduler(num_blocks=6)
    beams = make_beams("b", list(range(100, 106)), width=4, max_tokens=5)
    with pytest.raises(ValueError, match="needs 9 blocks of 4, but the pool has 5"):
        scheduler.add(beams[0])
    beams = make_beams("b", [5], width=5, max_tokens=2)
    with pytest.raises(ValueError, match="beam_width 5 needs as many rows"):
        scheduler.add(beams[0])
    assert not scheduler.has_unfinished()
