"""Faults planted in block tables and moves, each caught by name before it ran."""

import dataclasses
from contextlib import contextmanager

import jax
import numpy as np
import pytest

from jaxkv import Engine, EngineConfig, SamplingParams
from jaxkv.host.block_hash import block_hashes
from jaxkv.testing import scripted_engine, tiny_llama
from tests.helpers import run_engine
from tests.jaxkv.engine.conftest import CONFIG

PARAMS = SamplingParams(max_tokens=20, temperature=0.0)


def make_engine(**changes):
    """Blocks of four; the token that follows n tokens is n; a step is a step."""
    changes = {"async_scheduling": False} | changes
    return scripted_engine(len, dataclasses.replace(CONFIG, **changes))


def table_of(engine, request_id):
    return engine.scheduler.block_tables.table(f"0/{request_id}")


def add(engine, **prompts):
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, PARAMS)


@contextmanager
def caught(engine, message):
    """Expect the next step to fail with this message and to move nothing."""
    moved = []
    names = (
        "dispatch",
        "set_rows",
        "copy_blocks",
        "swap_out",
        "swap_in",
        "poison_blocks",
    )
    for name in names:
        setattr(engine._runner, name, lambda *_, name=name: moved.append(name))
    with pytest.raises(AssertionError, match=message):
        yield
    assert moved == []


@contextmanager
def schedule_changed(engine, change):
    """Let `change` have a look at every schedule before it runs."""
    schedule = engine.scheduler.schedule
    engine.scheduler.schedule = lambda: change(schedule())
    yield
    engine.scheduler.schedule = schedule


def test_a_wrong_entry_of_a_block_table():
    engine = make_engine()
    add(engine, a=[11, 12, 13, 14, 15, 16], b=[21, 22, 23, 24, 25])
    engine.step()
    first, second = table_of(engine, "a")
    table_of(engine, "a")[1] = table_of(engine, "b")[1]
    with caught(
        engine,
        rf"request '0/a' would read position 4, token 15, in block {second + 2}, "
        r"offset 0, but there is position 4, token 25$",
    ):
        engine.step()
    engine = make_engine()
    add(engine, a=[11, 12, 13, 14, 15, 16])
    engine.step()
    table_of(engine, "a")[:] = [second, first]
    with caught(engine, r"position 0, token 11, in block 2, .* position 4, token 15$"):
        engine.step()


def test_a_block_that_was_never_written():
    engine = make_engine()
    add(engine, a=[11, 12, 13, 14, 15])
    engine.step()
    table_of(engine, "a")[0] = 40
    with caught(engine, r"token 11, in block 40, .* there is nothing: never written$"):
        engine.step()


def test_a_released_block():
    engine = make_engine(enable_prefix_caching=False)
    add(engine, a=[11, 12, 13, 14, 15], b=[21, 22, 23, 24])
    engine.step()
    (stale, _) = table_of(engine, "a")
    engine.abort_request("a")
    engine.step()
    table_of(engine, "b")[0] = stale
    with caught(
        engine,
        r"request '0/b' would read position 0, token 21, in block 1, offset 0, but "
        r"there is nothing: released, once position 0, token 11$",
    ):
        engine.step()


def test_a_released_block_that_another_request_has_taken():
    engine = make_engine(enable_prefix_caching=False, num_blocks=7)
    params = dataclasses.replace(PARAMS, max_tokens=3)
    engine.add_request("a", [11, 12, 13, 14, 15], params)
    engine.add_request("b", [21, 22, 23, 24, 25], params)
    engine.step()
    (stale, _) = table_of(engine, "a")
    engine.abort_request("a")
    engine.add_request("c", list(range(31, 44)), params)
    engine.step()
    place = table_of(engine, "c").index(stale)
    table_of(engine, "b")[0] = stale
    with caught(
        engine,
        r"request '0/b' would read position 0, token 21, in block 1, offset 0, but "
        rf"there is position {4 * place}, token {31 + 4 * place}$",
    ):
        engine.step()


def test_the_same_tokens_at_another_position():
    engine = make_engine()
    add(engine, a=[5] * 9)
    engine.step()
    table = table_of(engine, "a")
    table[0], table[1] = table[1], table[0]
    with caught(
        engine,
        "would read position 0, token 5, in block 2, offset 0, but there is position "
        "4, token 5$",
    ):
        engine.step()


def test_the_same_tokens_after_other_tokens():
    engine = make_engine()
    add(engine, a=[1, 2, 3, 4, 9, 9, 9, 9, 9], b=[5, 6, 7, 8, 9, 9, 9, 9, 9])
    engine.step()
    table_of(engine, "b")[1] = table_of(engine, "a")[1]
    with caught(
        engine,
        r"request '0/b' would read position 4, token 9, in block 2, offset 0, but "
        r"there is position 4, token 9, after other tokens or with another salt or",
    ):
        engine.step()


@pytest.mark.parametrize("key", ["cache_salt", "adapter"])
def test_the_same_tokens_with_another_salt_or_adapter(key):
    engine = make_engine()
    engine.add_request("a", [1, 2, 3, 4, 5], PARAMS)
    engine.add_request("b", [1, 2, 3, 4, 5], PARAMS, **{key: "other"})
    engine.step()
    table_of(engine, "b")[0] = table_of(engine, "a")[0]
    with caught(engine, "request '0/b' .* position 0, token 1, after other tokens or"):
        engine.step()


def test_a_block_published_under_a_wrong_digest():
    engine = make_engine()
    pool = engine.scheduler.pool
    publish = pool.publish
    (wrong,) = block_hashes([21, 22, 23, 24], 4, parent=pool.root)
    pool.publish = lambda block_id, digest: publish(block_id, wrong)
    add(engine, a=[11, 12, 13, 14, 15])
    engine.step()
    add(engine, b=[21, 22, 23, 24, 25])
    with caught(
        engine,
        r"request '0/b' would read position 0, token 21, in block 1, offset 0, but "
        r"there is position 0, token 11$",
    ):
        engine.step()


def test_a_block_published_before_it_is_full():
    engine = make_engine()
    add(engine, a=[11, 12, 13])
    engine.step()  # token 3 is known, and not computed yet
    pool = engine.scheduler.pool
    (digest,) = block_hashes([11, 12, 13, 3], 4, parent=pool.root)
    pool.publish(table_of(engine, "a")[0], digest)
    add(engine, b=[11, 12, 13, 3, 99])
    with caught(
        engine,
        r"request '0/b' would read position 3, token 3, in block 1, offset 3, but "
        r"there is nothing: never written$",
    ):
        engine.step()


FORKED = SamplingParams(n=2, max_tokens=20)


def test_a_copy_left_out():
    engine = make_engine()
    engine.add_request("r", [11, 12, 13, 14, 15, 16], FORKED)
    engine.step()
    with (
        schedule_changed(engine, lambda schedule: schedule._replace(copies=())),
        caught(
            engine,
            r"request '1/r' would read position 4, token 15, in block 3, offset 0, but "
            r"there is nothing: never written$",
        ),
    ):
        engine.step()


def test_a_partly_filled_block_shared_instead_of_copied():
    engine = make_engine()
    engine.add_request("r", [11, 12, 13, 14, 15, 16], FORKED)
    engine.step()

    def share(schedule):
        ((source, _),) = schedule.copies
        engine.scheduler.block_tables.table("1/r")[-1] = source
        return schedule._replace(copies=())

    with (
        schedule_changed(engine, share),
        caught(
            engine,
            r"request '1/r' would write position 5, token 16, in block 2, offset 1, "
            r"but there is position 5, token 16",
        ),
    ):
        engine.step()


def test_a_block_handed_out_while_another_request_holds_it():
    engine = make_engine()
    add(engine, a=[11, 12, 13, 14], b=[21, 22, 23, 24, 25])
    engine.step()

    def take(schedule):
        assert len(table_of(engine, "a")) == 2
        table_of(engine, "a")[1] = table_of(engine, "b")[0]
        return schedule

    with (
        schedule_changed(engine, take),
        caught(engine, r"request '0/b' would read position 0, token 21, in block 2"),
    ):
        engine.step()


def test_a_swap_in_to_the_wrong_blocks():
    engine = make_engine(
        num_blocks=8, enable_prefix_caching=False, preemption="swap", swap_space=2**-12
    )
    add(engine, a=[11, 12, 13, 14, 15, 16, 17], b=[21, 22, 23, 24, 25, 26, 27])
    swapped_in = []

    def reverse(schedule):
        swap_ins = [
            swap._replace(block_ids=swap.block_ids[::-1]) for swap in schedule.swap_ins
        ]
        swapped_in.extend(swap_ins)
        return schedule._replace(swap_ins=tuple(swap_ins))

    with (
        schedule_changed(engine, reverse),
        pytest.raises(
            AssertionError,
            match=r"request '0/b' would read position 0, token 21, in block \d, offset "
            r"0, but there is position 8, token 8$",
        ),
    ):
        run_engine(engine, {})
    assert [len(swap.block_ids) for swap in swapped_in] == [3]


def blocks_of(runner, block_id):
    """A block's [kv_heads, block_size, head_dim] in every layer, K and V."""
    return [np.asarray(x[block_id]) for x in jax.tree.leaves(runner._cache)]


def test_free_blocks_hold_nan_and_held_and_cached_ones_do_not(tiny):
    engine = tiny.engine(async_scheduling=False, num_blocks=20)
    engine.add_request("a", list(range(20, 29)), SamplingParams(max_tokens=1))
    engine.add_request("b", list(range(30, 39)), PARAMS)
    engine.step()
    engine.step()
    pool = engine.scheduler.pool
    free = [i for i in range(1, 20) if pool.is_free(i)]
    held = table_of(engine, "b")
    cached = [i for i in range(1, 20) if i not in free and i not in held]
    assert (len(free), len(held), len(cached)) == (14, 3, 2)
    assert 3 in free  # the last, partly filled one of request a
    for block_id in range(20, 64):  # of the same runner, not of this pool
        assert block_id not in free
    for block_id in free:
        assert all(np.isnan(x).all() for x in blocks_of(tiny.runner, block_id))
    for block_id in cached + held[:2]:
        assert not any(np.isnan(x).any() for x in blocks_of(tiny.runner, block_id))
    for x in blocks_of(tiny.runner, held[2]):
        assert not np.isnan(x[:, :2]).any()  # positions 8 and 9
        assert np.isnan(x[:, 2:]).all()


def test_a_block_that_goes_from_hand_to_hand_is_filled_between(tiny):
    engine = tiny.engine(
        async_scheduling=False, num_blocks=6, enable_prefix_caching=False
    )
    engine.add_request("a", list(range(20, 37)), SamplingParams(max_tokens=1))
    engine.step()
    assert engine.stats().held_blocks == 0
    engine.add_request("b", list(range(30, 47)), SamplingParams(max_tokens=2))
    engine.step()
    assert engine.stats().held_blocks == 5
    (*_, last) = table_of(engine, "b")
    for x in blocks_of(tiny.runner, last):
        assert not np.isnan(x[:, :1]).any()
        assert np.isnan(x[:, 1:]).all()


def test_a_step_that_fails_when_blocks_were_moved_leaves_the_shadow_right():
    prompt = [11, 12, 13, 14, 15, 16]
    expected = run_engine(make_engine(), {"r": (prompt, FORKED)})["r"]
    for method in ("copy_blocks", "dispatch"):
        engine = make_engine()
        engine.add_request("r", prompt, FORKED)
        engine.step()
        works = getattr(engine._runner, method)

        def fails(*arguments, works=works):
            works(*arguments)
            raise RuntimeError("lost")

        setattr(engine._runner, method, fails)
        with pytest.raises(RuntimeError, match="lost"):
            engine.step()
        setattr(engine._runner, method, works)
        (output,) = run_engine(engine, {}).values()
        assert output.outputs == expected.outputs


def test_nothing_is_kept_of_requests_that_ended():
    engine = make_engine(
        num_blocks=10, max_num_seqs=2, preemption="swap", swap_space=2**-12
    )
    requests = {f"r{i}": ([i] * 9, PARAMS) for i in range(4)}
    run_engine(engine, requests)
    assert engine.stats().num_swapped_in_bytes > 0
    assert not engine._debugger._needed
    assert not engine._debugger._swapped


def test_eager_warm_up_compiles_the_filling_too():
    params, model_config = tiny_llama(num_hidden_layers=1)
    config = EngineConfig(
        num_blocks=16,
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=2,
        debug_blocks=True,
    )
    engine = Engine.from_params(params, model_config, config)
    # 1 and 2 tokens; setting rows and their history; copying, filling
    assert engine.stats().num_compilations == 6
    run_engine(engine, {"r": ([1, 2, 3], PARAMS)})
    assert engine.stats().num_compilations == 6


def test_without_debug_blocks_nothing_is_watched():
    engine = make_engine(debug_blocks=False)
    assert engine._debugger is None
    add(engine, a=[11, 12, 13, 14, 15])
    engine.step()
    table_of(engine, "a")[0] = 40
    engine.step()
