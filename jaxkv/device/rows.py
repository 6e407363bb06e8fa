"""What the device keeps of every row from step to step: `RowState`.

A request keeps its row while it runs, so what a step needs of it hardly changes: its
block table grows at the end, its tokens are those that the device chose itself. Only
what is new crosses from the host. The last line of every array belongs to no row:
padding reads and writes there.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxkv.config import NULL_BLOCK
from jaxkv.device.sampling import MAX_STOP_IDS, SamplingInputs


class RowParams(NamedTuple):
    """What the rows' SamplingParams say.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_k: 0 is off.
        keys: Key data of each request's own key, its child folded in.
        prompt_lens: Tokens of the prompt.
        min_lens: Tokens before which no stop id may be chosen.
        stop_ids: Ids that end the row; padded with the vocabulary's size.
    """

    temperature: Float[Array, " rows"]
    top_k: Int32[Array, " rows"]
    top_p: Float[Array, " rows"]
    min_p: Float[Array, " rows"]
    repetition_penalty: Float[Array, " rows"]
    presence_penalty: Float[Array, " rows"]
    frequency_penalty: Float[Array, " rows"]
    keys: UInt32[Array, "rows 2"]
    prompt_lens: Int32[Array, " rows"]
    min_lens: Int32[Array, " rows"]
    stop_ids: Int32[Array, "rows max_stop_ids"]


class RowState(NamedTuple):
    """The rows, each with a line; one line more for padding.

    Attributes:
        block_tables: Their blocks, `NULL_BLOCK` behind the last.
        last_tokens: The last token that was chosen for each.
        history: The tokens of rows with a penalty; of others those that were chosen.
        params: How their tokens are chosen.
    """

    block_tables: Int32[Array, "rows width"]
    last_tokens: Int32[Array, " rows"]
    history: Int32[Array, "rows max_model_len"]
    params: RowParams


def init_rows(
    max_num_seqs: int, table_width: int, max_model_len: int, vocab_size: int
) -> RowState:
    """Make the state of rows that nobody has."""
    lines = max_num_seqs + 1

    def zeros(*shape: int, dtype: Any = jnp.int32) -> jax.Array:
        return jnp.zeros((lines, *shape), dtype)

    ones = jnp.ones((lines,), jnp.float32)
    real = jnp.float32
    return RowState(
        block_tables=jnp.full((lines, table_width), NULL_BLOCK, jnp.int32),
        last_tokens=zeros(),
        history=zeros(max_model_len),
        params=RowParams(
            temperature=zeros(dtype=real),
            top_k=zeros(),
            top_p=ones,
            min_p=zeros(dtype=real),
            repetition_penalty=ones + 0,
            presence_penalty=zeros(dtype=real),
            frequency_penalty=zeros(dtype=real),
            keys=zeros(2, dtype=jnp.uint32),
            prompt_lens=zeros(),
            min_lens=zeros(),
            stop_ids=jnp.full((lines, MAX_STOP_IDS), vocab_size, jnp.int32),
        ),
    )


def set_rows(
    state: RowState,
    rows: Int32[Array, " lines"],
    block_tables: Int32[Array, "lines width"],
    params: RowParams,
) -> RowState:
    """Give rows to other requests.

    Args:
        state: All rows; donate it.
        rows: Those that change; the number of rows pads.
        block_tables: What they hold now.
        params: Theirs.
    """

    def put(whole: jax.Array, lines: jax.Array) -> jax.Array:
        return whole.at[rows].set(lines)

    return state._replace(
        block_tables=put(state.block_tables, block_tables),
        params=jax.tree.map(put, state.params, params),
    )


def set_history(
    state: RowState,
    rows: Int32[Array, " lines"],
    num_tokens: Int32[Array, " lines"],
    history: Int32[Array, "lines max_model_len"],
) -> RowState:
    """Say what the first tokens of rows are; later ones the device chose itself.

    Args:
        state: All rows; donate it.
        rows: Those that change.
        num_tokens: How many tokens are known of each.
        history: These tokens.
    """
    place = jnp.arange(history.shape[1], dtype=jnp.int32)[None, :]
    history = jnp.where(place < num_tokens[:, None], history, state.history[rows])
    return state._replace(history=state.history.at[rows].set(history))


def extend_tables(state: RowState, new_blocks: Int32[Array, "3 blocks"]) -> RowState:
    """Put blocks into tables: (rows, places, block ids); places off the end pad."""
    rows, places, block_ids = new_blocks
    tables = state.block_tables.at[rows, places].set(block_ids, mode="drop")
    return state._replace(block_tables=tables)


def append_tokens(
    state: RowState,
    rows: Int32[Array, " lines"],
    num_tokens: Int32[Array, " lines"],
    tokens: Int32[Array, " lines"],
    is_chosen: Bool[Array, " lines"],
) -> RowState:
    """Note the tokens that rows have just chosen.

    Args:
        state: All rows.
        rows: The row of each line.
        num_tokens: How many tokens it had before.
        tokens: The next one.
        is_chosen: Whether there is one.
    """
    last = len(state.last_tokens)
    row = jnp.where(is_chosen, rows, last)
    return state._replace(
        last_tokens=state.last_tokens.at[row].set(tokens, mode="drop"),
        history=state.history.at[row, num_tokens].set(tokens, mode="drop"),
    )


def sampling_inputs(
    state: RowState,
    rows: Int32[Array, " lines"],
    num_tokens: Int32[Array, " lines"],
    is_sampling: Bool[Array, " lines"],
    wants_logprobs: Bool[Array, ""],
) -> SamplingInputs:
    """Say how lines choose their next tokens; those that do not are greedy."""
    params = jax.tree.map(lambda whole: whole[rows], state.params)
    padding = state.params.stop_ids[-1]
    is_held_back = is_sampling & (num_tokens < params.min_lens)

    def unless_idle(values: jax.Array, neutral: float) -> jax.Array:
        return jnp.where(is_sampling, values, jnp.float32(neutral))

    return SamplingInputs(
        temperature=unless_idle(params.temperature, 0.0),
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=unless_idle(params.repetition_penalty, 1.0),
        presence_penalty=unless_idle(params.presence_penalty, 0.0),
        frequency_penalty=unless_idle(params.frequency_penalty, 0.0),
        keys=params.keys,
        positions=num_tokens,
        histories=rows,
        prompt_lens=params.prompt_lens,
        suppressed_ids=jnp.where(
            is_held_back[:, None], params.stop_ids, padding[None, :]
        ),
        wants_logprobs=wants_logprobs,
    )


def has_stopped(
    state: RowState,
    rows: Int32[Array, " lines"],
    num_tokens: Int32[Array, " lines"],
    tokens: Int32[Array, " lines"],
) -> Bool[Array, " lines"]:
    """Whether a line's next token, behind so many, is one that ends it."""
    is_stop_id = state.params.stop_ids[rows] == tokens[:, None]
    is_past_minimum = num_tokens >= state.params.min_lens[rows]
    return jnp.any(is_stop_id, axis=-1) & is_past_minimum
