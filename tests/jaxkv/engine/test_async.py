"""Steps under way: what is dispatched before what is known, and what it costs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxkv import BeamSearchParams, Engine, SamplingParams
from jaxkv.testing import scripted_engine, tiny_llama
from tests.helpers import run_engine
from tests.jaxkv.engine.conftest import CONFIG

EOS = 2
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
ASYNC_SCHEDULING = pytest.mark.parametrize("async_scheduling", [True, False])


def make_engine(next_token=len, eos_token_ids=(EOS,), **changes):
    """Blocks of four; the token that follows n tokens is n, if nothing else is said."""
    config = dataclasses.replace(CONFIG, **changes)
    return scripted_engine(next_token, config, eos_token_ids=eos_token_ids)


def ends_at(length):
    """A model whose `length`-th token is EOS; the others are 100, 101, ..."""
    return lambda tokens: EOS if len(tokens) + 1 == length else 99 + len(tokens)


def watched(engine):
    """The engine's runner notes what it does: ("dispatch", rows) and ("collect",)."""
    events = []
    runner = engine._runner
    dispatch, collect = runner.dispatch, runner.collect

    def note_dispatch(batch, num_steps=1):
        events.append(("dispatch", int((batch.kv_lens > 0).sum())))
        return dispatch(batch, num_steps)

    def note_collect(dispatched):
        events.append(("collect",))
        return collect(dispatched)

    runner.dispatch, runner.collect = note_dispatch, note_collect
    return events


def tokens_of(output):
    return [list(completion.token_ids) for completion in output.outputs]


def check_drained(engine):
    stats = engine.stats()
    assert stats.held_blocks == stats.num_running == stats.num_waiting == 0
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
    free = engine.scheduler.pool.allocate(stats.total_blocks)
    assert sorted(free) == list(range(1, engine.limits.num_blocks))


def test_a_step_is_dispatched_before_the_last_one_is_collected():
    engine = make_engine()
    events = watched(engine)
    engine.add_request("r", [10, 11, 12], dataclasses.replace(GREEDY, max_tokens=3))
    reported = []
    while engine.has_unfinished_requests():
        reported.append([tokens_of(output)[0] for output in engine.step()])
    step, collect = ("dispatch", 1), ("collect",)
    assert events == [step, step, collect, step, collect, collect]
    assert reported == [[], [[3]], [[3, 4]], [[3, 4, 5]]]


def test_in_turns_a_step_is_collected_before_the_next_one_is_dispatched():
    engine = make_engine(async_scheduling=False)
    events = watched(engine)
    engine.add_request("r", [10, 11, 12], dataclasses.replace(GREEDY, max_tokens=3))
    reported = []
    while engine.has_unfinished_requests():
        reported.append([tokens_of(output)[0] for output in engine.step()])
    assert events == [("dispatch", 1), ("collect",)] * 3
    assert reported == [[[3]], [[3, 4]], [[3, 4, 5]]]


@pytest.mark.parametrize("multi_step", [1, 3])
def test_what_ends_by_length_costs_nothing_in_vain(multi_step):
    engine = make_engine(multi_step=multi_step)
    events = watched(engine)
    requests = {
        str(n): ([10] * 3, dataclasses.replace(GREEDY, max_tokens=n)) for n in (1, 2, 5)
    }
    outputs = run_engine(engine, requests)
    assert [len(tokens_of(outputs[str(n)])[0]) for n in (1, 2, 5)] == [1, 2, 5]
    if multi_step == 1:
        dispatched = [event[1] for event in events if event[0] == "dispatch"]
        assert dispatched == [3, 2, 1, 1, 1]
    check_drained(engine)


@ASYNC_SCHEDULING
def test_what_ends_by_eos_costs_at_most_one_row_of_one_step(async_scheduling):
    engine = make_engine(ends_at(7), async_scheduling=async_scheduling)
    events = watched(engine)
    output = run_engine(engine, {"r": ([10] * 4, GREEDY)})["r"]
    assert tokens_of(output) == [[103, 104, EOS]]
    assert output.outputs[0].finish_reason == "stop"
    num_rows = sum(event[1] for event in events if event[0] == "dispatch")
    assert num_rows == 3 + async_scheduling
    check_drained(engine)


@ASYNC_SCHEDULING
@pytest.mark.parametrize("multi_step", [1, 3])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("how", ["length", "stop"])
def test_b04_the_last_slot_is_given_back_once(
    async_scheduling, multi_step, block_size, how
):
    for prompt_len in range(1, 10):
        for num_tokens in range(1, 9):
            length = prompt_len + num_tokens
            engine = make_engine(
                ends_at(length if how == "stop" else 0),
                async_scheduling=async_scheduling,
                multi_step=multi_step,
                block_size=block_size,
                num_blocks=25,
            )
            params = SamplingParams(
                temperature=0.0, max_tokens=num_tokens + 3 * (how == "stop")
            )
            output = run_engine(engine, {"r": ([10] * prompt_len, params)})["r"]
            assert output.outputs[0].finish_reason == how
            assert len(output.outputs[0].token_ids) == num_tokens
            check_drained(engine)


@pytest.mark.parametrize("multi_step", [2, 3, 8])
def test_b51_what_was_computed_behind_the_end_is_neither_said_nor_published(multi_step):
    engine = make_engine(ends_at(9), multi_step=multi_step, num_blocks=12)
    prompt = [10] * 6
    output = run_engine(engine, {"r": (prompt, GREEDY)})["r"]
    assert tokens_of(output) == [[105, 106, EOS]]
    assert engine.stats().generation_tokens == 3
    assert engine.stats().cached_blocks == 2  # the eight tokens before EOS
    ignoring = dataclasses.replace(GREEDY, ignore_eos=True)
    minimum = dataclasses.replace(GREEDY, min_tokens=4)
    for params in (ignoring, minimum):
        output = run_engine(engine, {"r": (prompt, params)})["r"]
        assert tokens_of(output) == [[105, 106, EOS, 108, 109, 110]]


@ASYNC_SCHEDULING
@pytest.mark.parametrize("multi_step", [1, 3])
def test_b141_each_step_takes_the_pools_over_and_nothing_else(
    async_scheduling, multi_step
):
    params, model_config = tiny_llama()
    config = dataclasses.replace(
        CONFIG, async_scheduling=async_scheduling, multi_step=multi_step
    )
    engine = Engine.from_params(params, model_config, config)
    runner = engine._runner
    shapes = [(x.dtype, x.shape) for x in jax.tree.leaves(runner._cache)]
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(runner._cache)]
    batches = []
    dispatch = runner.dispatch

    def checked(batch, num_steps=1):
        donated = jax.tree.leaves((runner._cache, runner._rows))
        batch = jax.tree.map(jnp.asarray, batch)
        batches.append(batch)
        result = dispatch(batch, num_steps)
        assert all(x.is_deleted() for x in donated)
        pools = jax.tree.leaves(runner._cache)
        assert [(x.dtype, x.shape) for x in pools] == shapes
        assert [x.unsafe_buffer_pointer() for x in pools] == places
        return result

    runner.dispatch = checked
    for n in range(3):
        engine.add_request(str(n), [10 + n] * (3 + 4 * n), GREEDY)
    while engine.has_unfinished_requests():
        engine.step()
    assert len(batches) >= 3
    kept = jax.tree.leaves((batches, params, runner._params))
    assert not any(x.is_deleted() for x in kept)


def test_several_steps_in_one_say_the_same_in_fewer_dispatches():
    requests = {
        str(n): ([20 + n] * (n + 1), dataclasses.replace(GREEDY, max_tokens=9 + n))
        for n in range(4)
    }
    found = []
    for multi_step in (1, 4):
        engine = make_engine(multi_step=multi_step, num_blocks=40)
        events = watched(engine)
        outputs = run_engine(engine, requests)
        num_dispatches = sum(event[0] == "dispatch" for event in events)
        found.append(({k: tokens_of(o) for k, o in outputs.items()}, num_dispatches))
        check_drained(engine)
    assert found[0][0] == found[1][0]
    assert found[0][1] == 12
    assert found[1][1] == 4  # the prompts, then 11 tokens


def test_where_blocks_are_short_all_rows_take_part_in_as_many_steps():
    engine = make_engine(multi_step=8, num_blocks=7, block_size=2)
    batches = []
    dispatch = engine._runner.dispatch
    engine._runner.dispatch = lambda batch, num_steps: (
        batches.append(batch),
        dispatch(batch, num_steps),
    )[1]
    params = dataclasses.replace(GREEDY, max_tokens=5)
    requests = {"a": ([10] * 3, params), "b": ([20] * 3, params)}
    outputs = run_engine(engine, requests)
    assert [tokens_of(output) for output in outputs.values()] == [[[3, 4, 5, 6, 7]]] * 2
    # Six blocks; four are taken by the prompts and tokens 3, two more hold 4 and 5.
    assert batches[1].num_samples[:2].tolist() == [3, 3]
    check_drained(engine)


def test_several_steps_in_one_go_on_when_blocks_are_short():
    engine = make_engine(multi_step=8, num_blocks=4, block_size=4)
    params = dataclasses.replace(GREEDY, max_tokens=9)
    outputs = run_engine(engine, {"r": ([10] * 3, params)})
    assert tokens_of(outputs["r"]) == [[3, 4, 5, 6, 7, 8, 9, 10, 11]]
    outputs = run_engine(engine, {"a": ([10] * 3, params), "b": ([20] * 3, params)})
    assert tokens_of(outputs["a"]) == tokens_of(outputs["b"])
    check_drained(engine)


@ASYNC_SCHEDULING
@pytest.mark.parametrize("num_steps_before", range(1, 8))
def test_b116_abort_at_any_step_is_reported_once(async_scheduling, num_steps_before):
    """Also in the very step in which it ends; again, and of unknown ones."""
    engine = make_engine(async_scheduling=async_scheduling)
    engine.add_request("r", [10] * 3, GREEDY)
    engine.add_request("other", [11] * 3, GREEDY)
    outputs = []
    for _ in range(num_steps_before):
        outputs += engine.step()
    for request_id in ("r", "r", "unknown"):
        engine.abort_request(request_id)
    # The name is free at once, and is another request's while the step is under way.
    engine.add_request("r", [12] * 5, GREEDY)
    while engine.has_unfinished_requests():
        outputs += engine.step()
    ended = [output for output in outputs if output.finished]
    old, new = (
        [o for o in ended if o.request_id == "r" and o.prompt_token_ids[0] == first]
        for first in (10, 12)
    )
    assert len(old) == len(new) == 1
    (tokens,) = tokens_of(old[0])
    assert tokens == list(range(3, 3 + len(tokens)))
    was_done = len(tokens) == GREEDY.max_tokens
    assert old[0].outputs[0].finish_reason == ("length" if was_done else "abort")
    assert tokens_of(new[0]) == [[5, 6, 7, 8, 9, 10]]
    assert len([o for o in ended if o.request_id == "other"]) == 1
    check_drained(engine)


def test_nobody_is_preempted_while_a_step_is_under_way():
    """Whoever is about to end makes room without that."""
    engine = make_engine(num_blocks=5, enable_prefix_caching=False)
    short = dataclasses.replace(GREEDY, max_tokens=2)
    engine.add_request("short", [10] * 7, short)
    engine.add_request("long", [11] * 7, GREEDY)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    assert tokens_of(outputs["long"]) == [[7, 8, 9, 10, 11, 12]]
    assert engine.stats().num_preemptions == 0


def test_beams_take_as_many_steps_as_in_turns():
    num_steps = []
    for async_scheduling in (True, False):
        engine = make_engine(async_scheduling=async_scheduling)
        engine.add_request("r", [10] * 3, BeamSearchParams(beam_width=2, max_tokens=6))
        while engine.has_unfinished_requests():
            engine.step()
        num_steps.append(engine.stats().num_steps)
    assert num_steps[0] == num_steps[1]


@pytest.mark.parametrize("method", ["dispatch", "collect", "set_rows"])
@pytest.mark.parametrize("call", range(4))
@pytest.mark.parametrize("multi_step", [1, 3])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_steps_beside_one_that_failed_are_done_again(method, call, multi_step, after):
    """Whether it failed before or after it had done its work."""
    engine = make_engine(multi_step=multi_step)
    prompts = {"a": [10, 11, 12], "b": [20, 21, 22, 23]}
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, GREEDY)
    works = getattr(engine._runner, method)
    calls = iter(range(call + 1))

    def fails(*arguments):
        is_this = next(calls, None) == call
        result = None if is_this and not after else works(*arguments)
        if is_this:
            raise RuntimeError("the device is ill")
        return result

    setattr(engine._runner, method, fails)
    outputs, num_failures = {}, 0
    while engine.has_unfinished_requests():
        try:
            outputs |= {output.request_id: output for output in engine.step()}
        except RuntimeError:
            num_failures += 1
            engine.scheduler.check_invariants()
    assert num_failures == (call < 3 or multi_step == 1)  # so many dispatches
    for request_id, prompt in prompts.items():
        first = len(prompt)
        assert tokens_of(outputs[request_id]) == [list(range(first, first + 6))]
    check_drained(engine)


KINDS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 3, "top_k": 20},
    "penalties": {
        **{"temperature": 0.0, "repetition_penalty": 1.3},
        **{"presence_penalty": 0.4, "frequency_penalty": 0.3},
    },
    "min_tokens": {"temperature": 0.0, "min_tokens": 8},
    "stop ids": {"temperature": 0.0, "stop_token_ids": [*range(0, 128, 9)]},
    "logprobs": {"seed": 5, "logprobs": 4, "prompt_logprobs": 2},
    "n": {"seed": 6, "n": 3, "frequency_penalty": 0.5},
}


@pytest.mark.parametrize("multi_step", [1, 3])
@ASYNC_SCHEDULING
def test_tokens_and_logprobs_are_the_same_in_all_modes(
    tiny, async_scheduling, multi_step
):
    requests = {
        f"{name}{length}": (
            [(7 * length + i) % 128 for i in range(length)],
            SamplingParams(max_tokens=12, **params),
        )
        for name, params in KINDS.items()
        for length in (1, 4, 30)
    }
    expected = {}
    for name, request in requests.items():
        alone = tiny.engine(async_scheduling=False, enable_prefix_caching=False)
        expected |= run_engine(alone, {name: request})
    engine = tiny.engine(async_scheduling=async_scheduling, multi_step=multi_step)
    outputs = run_engine(engine, requests)
    for name, output in outputs.items():
        assert tokens_of(output) == tokens_of(expected[name]), name
        for found, wanted in zip(output.outputs, expected[name].outputs, strict=True):
            assert found.finish_reason == wanted.finish_reason
            assert found.stop_reason == wanted.stop_reason
            check_logprobs(found.logprobs, wanted.logprobs)
        check_logprobs(
            (output.prompt_logprobs or [])[1:],
            (expected[name].prompt_logprobs or [])[1:],
        )


def check_logprobs(found, wanted):
    found, wanted = list(found or ()), list(wanted or ())
    assert len(found) == len(wanted)
    for entry, other in zip(found, wanted, strict=True):
        assert entry == pytest.approx(other, abs=1e-5)
