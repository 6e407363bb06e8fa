"""The state of the rows against the same in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import NULL_BLOCK
from jaxkv.device.rows import (
    RowParams,
    append_tokens,
    extend_tables,
    has_stopped,
    init_rows,
    sampling_inputs,
    set_history,
    set_rows,
)
from jaxkv.device.sampling import MAX_STOP_IDS

ROWS, WIDTH, MAX_LEN, VOCAB = 4, 3, 12, 50
NOBODY = ROWS


@pytest.fixture
def state():
    return init_rows(ROWS, WIDTH, MAX_LEN, VOCAB)


def ints(*values):
    return jnp.asarray(values, jnp.int32)


def random_params(rng, lines):
    def reals(low, high):
        return jnp.asarray(rng.uniform(low, high, lines), jnp.float32)

    stop_ids = np.full((lines, MAX_STOP_IDS), VOCAB, np.int32)
    stop_ids[:, :2] = rng.integers(0, VOCAB, (lines, 2))
    return RowParams(
        temperature=reals(0.5, 2),
        top_k=jnp.asarray(rng.integers(0, 9, lines), jnp.int32),
        top_p=reals(0.1, 1),
        min_p=reals(0, 1),
        repetition_penalty=reals(1.1, 2),
        presence_penalty=reals(0.1, 1),
        frequency_penalty=reals(0.1, 1),
        keys=jnp.asarray(rng.integers(0, 2**32, (lines, 2)), jnp.uint32),
        prompt_lens=jnp.asarray(rng.integers(1, 5, lines), jnp.int32),
        min_lens=jnp.asarray(rng.integers(5, 9, lines), jnp.int32),
        stop_ids=jnp.asarray(stop_ids),
    )


def lines_of(params, lines):
    return jax.tree.map(lambda array: np.asarray(array)[list(lines)], params)


def test_rows_that_are_set_are_what_was_given_and_others_stay(state):
    params = random_params(np.random.default_rng(0), 3)
    tables = jnp.asarray([[3, 4, 0], [5, 0, 0], [6, 7, 8]], jnp.int32)
    # A row set twice in a call is given the same twice; padding goes to nobody's line.
    new = set_rows(state, ints(2, 0, NOBODY), tables, params)
    assert new.block_tables[2].tolist() == [3, 4, NULL_BLOCK]
    assert new.block_tables[0].tolist() == [5, NULL_BLOCK, NULL_BLOCK]
    jax.tree.map(
        np.testing.assert_array_equal,
        lines_of(new.params, [2, 0]),
        lines_of(params, [0, 1]),
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        lines_of(new.params, [1, 3]),
        lines_of(state.params, [1, 3]),
    )
    assert (new.block_tables[jnp.asarray([1, 3])] == NULL_BLOCK).all()


def test_new_blocks_are_put_at_their_places_and_padding_nowhere(state):
    blocks = jnp.asarray([[1, 3, NOBODY], [0, 2, WIDTH], [9, 8, 0]], jnp.int32)
    tables = extend_tables(state, blocks).block_tables
    expected = np.zeros((ROWS + 1, WIDTH), np.int32)
    expected[1, 0], expected[3, 2] = 9, 8
    np.testing.assert_array_equal(tables, expected)


def test_tokens_are_appended_to_rows_that_choose_and_to_no_others(state):
    state = append_tokens(
        state,
        ints(3, 1, 2, NOBODY),
        ints(4, 0, 7, 0),
        ints(40, 41, 42, 43),
        jnp.asarray([True, True, False, False]),
    )
    assert state.last_tokens.tolist() == [0, 41, 0, 40, 0]
    expected = np.zeros((ROWS + 1, MAX_LEN), np.int32)
    expected[3, 4], expected[1, 0] = 40, 41
    np.testing.assert_array_equal(state.history, expected)


def test_a_history_that_is_set_keeps_what_was_chosen_behind_it(state):
    """The host may not know yet what a step under way has chosen."""
    rows, chosen = ints(1), jnp.asarray([True])
    for place, token in enumerate([20, 21, 22]):
        state = append_tokens(state, rows, ints(place), ints(token), chosen)
    history = np.zeros((1, MAX_LEN), np.int32)
    history[0, :2] = 30, 31
    state = set_history(state, rows, ints(2), jnp.asarray(history))
    assert state.history[1, :4].tolist() == [30, 31, 22, 0]


def test_lines_sample_by_their_rows_params_and_idle_ones_are_greedy(state):
    params = random_params(np.random.default_rng(1), 2)
    state = set_rows(state, ints(2, 0), jnp.zeros((2, WIDTH), jnp.int32), params)
    is_sampling = jnp.asarray([True, False, False])
    inputs = sampling_inputs(
        state, ints(0, 2, NOBODY), ints(9, 9, 0), is_sampling, jnp.asarray(False)
    )
    for name in ("temperature", "repetition_penalty", "presence_penalty"):
        neutral = 1.0 if name.startswith("repetition") else 0.0
        wanted = [np.asarray(getattr(params, name))[1], neutral, neutral]
        np.testing.assert_array_equal(getattr(inputs, name), np.float32(wanted))
    for name in ("top_k", "top_p", "min_p", "keys", "prompt_lens"):
        found = np.asarray(getattr(inputs, name))[:2]
        np.testing.assert_array_equal(found, np.asarray(getattr(params, name))[::-1])
    assert inputs.positions.tolist() == [9, 9, 0]
    assert inputs.histories.tolist() == [0, 2, NOBODY]


@pytest.mark.parametrize(("num_tokens", "is_free"), [(6, False), (7, True), (8, True)])
def test_stop_ids_are_held_back_and_end_nothing_before_the_minimum(
    state, num_tokens, is_free
):
    params = random_params(np.random.default_rng(2), 1)
    stop_ids = np.full((1, MAX_STOP_IDS), VOCAB, np.int32)
    stop_ids[0, :2] = 11, 12
    params = params._replace(min_lens=ints(7), stop_ids=jnp.asarray(stop_ids))
    state = set_rows(state, ints(1), jnp.zeros((1, WIDTH), jnp.int32), params)
    rows = ints(1, 1, NOBODY)
    lengths = ints(num_tokens, num_tokens, num_tokens)
    inputs = sampling_inputs(
        state, rows, lengths, jnp.asarray([True, False, True]), jnp.asarray(False)
    )
    held_back = [sorted({*ids.tolist()} - {VOCAB}) for ids in inputs.suppressed_ids]
    assert held_back == [[] if is_free else [11, 12], [], []]
    stopped = has_stopped(state, rows, lengths, ints(12, 13, 12))
    assert stopped.tolist() == [is_free, False, False]
