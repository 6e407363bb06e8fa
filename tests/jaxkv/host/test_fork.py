"""Several outputs for one prompt: it is computed once and its blocks are shared."""

import pytest

from jaxkv.host.schedule import Plan
from tests.jaxkv.host.test_prefix_cache import add
from tests.jaxkv.host.test_scheduler import (
    drain,
    make_scheduler,
    sample,
    step,
    undisturbed,
)


def add_children(scheduler, n, prompt, max_tokens=9):
    """n requests for one prompt, as the engine adds them."""
    children = []
    for child in range(n):
        request = add(
            scheduler,
            f"c{child}",
            prompt,
            max_tokens=max_tokens,
            child=child,
            source=children[0] if children else None,
        )
        children.append(request)
    return children


def tables_of(scheduler, children):
    return [list(scheduler.block_tables.table(c.request_id)) for c in children]


@pytest.mark.parametrize("caching", [True, False])
def test_b76_full_blocks_are_shared_and_the_partly_filled_one_is_copied(caching):
    scheduler = make_scheduler(enable_prefix_caching=caching)
    children = add_children(scheduler, 3, list(range(100, 106)))
    assert step(scheduler) == {"c0": (0, 6, True)}
    schedule = scheduler.schedule()
    tables = tables_of(scheduler, children)
    assert [table[0] for table in tables] == [1, 1, 1]
    assert scheduler.pool.ref_count(1) == 3
    second = [table[1] for table in tables]
    assert len(set(second)) == 3
    assert schedule.copies == ((second[0], second[1]), (second[0], second[2]))
    # The prompt's last token runs again: its logits are needed, with another key.
    assert [(r.start, r.num_tokens) for r in schedule.rows] == [(6, 1), (5, 1), (5, 1)]
    scheduler.commit(schedule, sample(schedule))
    assert [child.source for child in children] == [None] * 3
    drain(scheduler)
    for child in children:
        expected = undisturbed(child.prompt_token_ids, 9)
        assert child.output_token_ids == expected
    assert scheduler.pool.num_held == 0


def test_no_block_is_copied_where_the_prompts_last_token_begins_one():
    scheduler = make_scheduler()
    children = add_children(scheduler, 2, list(range(100, 109)))
    step(scheduler)
    assert scheduler.schedule().copies == ()
    tables = tables_of(scheduler, children)
    assert tables[0][:2] == tables[1][:2]
    assert tables[0][2] != tables[1][2]


def test_children_wait_until_the_whole_prompt_is_computed_and_let_others_pass():
    scheduler = make_scheduler(long_prefill_token_threshold=4)
    add_children(scheduler, 2, list(range(100, 110)))
    add(scheduler, "other", [1, 2], max_tokens=9)
    assert step(scheduler) == {"c0": (0, 4, False), "other": (0, 2, True)}
    assert step(scheduler) == {"c0": (4, 4, False), "other": (2, 1, True)}
    assert step(scheduler).keys() == {"c0", "other"}
    assert step(scheduler)["c1"] == (9, 1, True)


@pytest.mark.parametrize("caching", [True, False])
def test_children_go_on_when_the_first_one_ends_or_is_aborted(caching):
    prompt = list(range(100, 106))
    for ends_by in ("abort", "length"):
        scheduler = make_scheduler(enable_prefix_caching=caching)
        children = add_children(scheduler, 2, prompt)
        children[0].max_total_tokens = 7 if ends_by == "length" else 15
        step(scheduler)
        if ends_by == "abort":
            scheduler.abort("c0")
        assert children[0].finish_reason == ends_by
        assert step(scheduler)["c1"] == (4 if caching else 0, 2 if caching else 6, True)
        drain(scheduler)
        assert children[1].output_token_ids == undisturbed(prompt, 9)


def test_a_failed_step_copies_again():
    scheduler = make_scheduler()
    children = add_children(scheduler, 2, list(range(100, 106)))
    step(scheduler)
    copies = scheduler.schedule().copies
    assert len(copies) == 1
    # As in the engine: the step raised, perhaps before anything was copied.
    scheduler = make_scheduler()
    children = add_children(scheduler, 2, list(range(100, 106)))
    step(scheduler)
    schedule = scheduler.schedule()
    scheduler.discard(schedule)
    scheduler.check_invariants()
    assert children[1].row is None
    assert scheduler.block_tables.table("c1") == []
    assert len(scheduler.schedule().copies) == 1
    assert children[1].num_preemptions == 0


@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_does_not_copy_from_who_is_preempted_in_the_same_step(caching):
    scheduler = make_scheduler(enable_prefix_caching=caching)
    first, second = children = add_children(scheduler, 2, list(range(100, 106)))
    step(scheduler)
    plan = Plan(16)
    assert scheduler._try_admit(second, plan) is True
    assert plan.copies.keys() == {second}
    scheduler._preempt(first.unit, plan)
    scheduler._running.clear()
    assert (plan.copies, plan.num_tokens, plan.budget) == ({}, {}, 16)
    assert [child.row for child in children] == [None, None]
    scheduler.check_invariants()
    drain(scheduler)
    for child in children:
        expected = undisturbed(child.prompt_token_ids, 9)
        assert child.output_token_ids == expected


def test_a_child_that_is_preempted_leaves_no_copy_in_the_plan_and_replays():
    scheduler = make_scheduler(
        num_blocks=9, max_num_batched_tokens=32, enable_prefix_caching=False
    )
    children = add_children(scheduler, 3, list(range(100, 106)), max_tokens=14)
    while scheduler.has_unfinished():
        schedule = scheduler.schedule()
        scheduler.check_invariants()
        targets = {block for _, block in schedule.copies}
        held = {b for table in tables_of(scheduler, children) for b in table}
        assert targets <= held
        scheduler.commit(schedule, sample(schedule))
    assert scheduler.num_preemptions > 0
    for child in children:
        expected = undisturbed(child.prompt_token_ids, 14)
        assert child.output_token_ids == expected
