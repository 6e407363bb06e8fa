"""The contract between host and device, and the one jitted step.

`Batch` is all that goes to the device in a step, `StepOutput` all that comes back. The
cache and the state of the rows stay there, donated to every step and returned by it; so
the next step can be dispatched before the host has seen what the last one chose.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxkv.config import NULL_BLOCK, ModelConfig
from jaxkv.device.attention import paged_attention
from jaxkv.device.cache import KVCache, LayerKV, write_kv
from jaxkv.device.llama import DecoderLayer, Llama, merge, param_shapes
from jaxkv.device.rows import (
    RowState,
    append_tokens,
    extend_tables,
    has_stopped,
    sampling_inputs,
)
from jaxkv.device.sampling import Logprobs, empty_logprobs, sample, token_logprobs

GPU_COMPILER_OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
    "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
}
"""Compile steps for GPUs with these: XLA's defaults, and loops.

So all of a step is one CUDA graph. By default a branch that holds a loop is not in it:
the host waits until the device gets there, reads which branch it is, and starts that. A
step has three such, all behind its layers, so a dispatch would take as long as a step.
"""

_PROMPT_LOGPROBS_TILE = 16


class Tokens(NamedTuple):
    """What the decoder runs over: the tokens of its lines one after another.

    Padding tokens have id 0, position 0 and a slot in `NULL_BLOCK`; padding lines have
    kv_len 0, and no queries, or one that attends to nothing.

    Attributes:
        positions: Each token's position in its request, for RoPE; apart from where
            its key lies in the cache.
        slot_mapping: Where each token's K and V are written.
        block_tables: The lines' blocks, for the one layer group there is.
        kv_lens: Tokens each line attends to, this step's included.
        cu_q_lens: Offsets of the lines' tokens.
    """

    token_ids: Int32[Array, " tokens"]
    positions: Int32[Array, " tokens"]
    slot_mapping: Int32[Array, " tokens"]
    block_tables: Int32[Array, "lines width"]
    kv_lens: Int32[Array, " lines"]
    cu_q_lens: Int32[Array, " lines+1"]


class Batch(NamedTuple):
    """One step's input: for each row that takes part a line, then padding.

    Padding is as in `Tokens`, whose fields are not said again here.

    Attributes:
        rows: The row of each line; of padding the one behind all rows.
        pending_places: For each line where among the tokens the last one goes that
            was chosen for its row, and that the host may not know; off the end: it
            brings all its tokens.
        new_blocks: For `extend_tables`.
        sample_indices: For each line the token whose logits choose the next one.
        num_samples: Tokens to choose for each line: 0, 1, or of several steps in one
            as many as it takes part in.
        prompt_targets: The token that follows each one in its prompt, for prompt
            log-probabilities.
        wants_prompt_logprobs: Whether any line asks for those.
        wants_logprobs: Whether any asks for log-probabilities of what it chooses.
    """

    rows: Int32[Array, " lines"]
    token_ids: Int32[Array, " tokens"]
    pending_places: Int32[Array, " lines"]
    positions: Int32[Array, " tokens"]
    slot_mapping: Int32[Array, " tokens"]
    new_blocks: Int32[Array, "3 blocks"]
    kv_lens: Int32[Array, " lines"]
    cu_q_lens: Int32[Array, " lines+1"]
    sample_indices: Int32[Array, " lines"]
    num_samples: Int32[Array, " lines"]
    prompt_targets: Int32[Array, " tokens"]
    wants_prompt_logprobs: Bool[Array, ""]
    wants_logprobs: Bool[Array, ""]


class StepOutput(NamedTuple):
    """The result of one step, or of several in one.

    Attributes:
        token_ids: The token each line chose in each step; meaningless for lines that
            do not sample, or have stopped.
        logprobs: Theirs; zeros unless some line wants them.
        prompt_logprobs: Of the first step one line per token of the batch: of its
            prompt target; zeros unless some line wants them.

    On the host what nobody wants is None.
    """

    token_ids: Int32[Array, "steps lines"]
    logprobs: Logprobs | None
    prompt_logprobs: Logprobs | None


Step = Callable[
    [tuple[jax.Array, ...], KVCache, RowState, Batch],
    tuple[StepOutput, KVCache, RowState],
]


def make_step(
    config: ModelConfig,
    *,
    num_token_ids: int,
    attention_implementation: str,
    num_steps: int = 1,
) -> Step:
    """Build the function that runs one step of a model; the engine jits it.

    Args:
        config: The model.
        num_token_ids: Ids from here on are padding of the vocabulary and are never
            chosen.
        attention_implementation: As `paged_attention`'s `implementation`.
        num_steps: Decoding steps that it runs as one. With more than one the batch
            has as many tokens as lines, one each.

    Returns:
        step(params, cache, rows, batch) -> (StepOutput, cache, rows). `params` are flat
        arrays in the order of `param_shapes(config)`. Donate the cache and the rows
        and nothing else.
    """
    names = tuple(param_shapes(config))

    def step(
        params: tuple[jax.Array, ...], cache: KVCache, rows: RowState, batch: Batch
    ) -> tuple[StepOutput, KVCache, RowState]:
        model = merge(config, dict(zip(names, params, strict=True)))
        rows = extend_tables(rows, batch.new_blocks)
        tokens = _first_tokens(batch, rows)
        hidden, cache = forward(model, cache, tokens, attention_implementation)
        choose = functools.partial(_choose, model, batch, num_token_ids)
        chosen, rows = choose(
            hidden[batch.sample_indices], rows, batch.kv_lens, batch.num_samples > 0
        )
        prompt_logprobs = _prompt_logprobs(model, hidden, batch, num_token_ids)
        if num_steps == 1:
            token_ids, logprobs = jax.tree.map(lambda array: array[None], chosen)
            return StepOutput(token_ids, logprobs, prompt_logprobs), cache, rows

        def goes_on(
            index: jax.Array, last: jax.Array, is_running: jax.Array
        ) -> jax.Array:
            """Whether lines run in a step, by the last tokens before it."""
            num_before = batch.kv_lens + index - 1
            has_ended = has_stopped(rows, batch.rows, num_before, last)
            return is_running & ~has_ended & (batch.num_samples > index)

        def go_on(carry: tuple) -> tuple:
            index, cache, rows, chosen, is_running = carry
            last = chosen[0][index - 1]
            kv_lens = jnp.where(is_running, batch.kv_lens + index, 0)
            tokens = _next_tokens(batch, rows, cache.block_size, last, kv_lens)
            hidden, cache = forward(model, cache, tokens, attention_implementation)
            new, rows = choose(hidden, rows, kv_lens, is_running)
            chosen = jax.tree.map(lambda all, x: all.at[index].set(x), chosen, new)
            is_running = goes_on(index + 1, new[0], is_running)
            return index + 1, cache, rows, chosen, is_running

        # A line may have ended before: by a token that the host had not seen yet.
        is_pending = batch.pending_places < len(batch.token_ids)
        is_running = ~is_pending | goes_on(
            jnp.int32(0), tokens.token_ids, batch.num_samples > 0
        )
        first = jnp.int32(1)
        is_running = goes_on(first, chosen[0], is_running)
        chosen = jax.tree.map(
            lambda first: (
                jnp.zeros((num_steps, *first.shape), first.dtype).at[0].set(first)
            ),
            chosen,
        )
        _, cache, rows, (token_ids, logprobs), _ = lax.while_loop(
            lambda carry: (carry[0] < num_steps) & jnp.any(carry[-1]),
            go_on,
            (first, cache, rows, chosen, is_running),
        )
        return StepOutput(token_ids, logprobs, prompt_logprobs), cache, rows

    return step


def _first_tokens(batch: Batch, rows: RowState) -> Tokens:
    """Complete a batch with what only the device has."""
    last = rows.last_tokens[batch.rows]
    return Tokens(
        token_ids=batch.token_ids.at[batch.pending_places].set(last, mode="drop"),
        positions=batch.positions,
        slot_mapping=batch.slot_mapping,
        block_tables=rows.block_tables[batch.rows],
        kv_lens=batch.kv_lens,
        cu_q_lens=batch.cu_q_lens,
    )


def _next_tokens(
    batch: Batch,
    rows: RowState,
    block_size: int,
    token_ids: Int32[Array, " lines"],
    kv_lens: Int32[Array, " lines"],
) -> Tokens:
    """Return what runs after a decoding step: the tokens that it chose.

    Args:
        batch: Of the first step: a token a line.
        rows: All rows.
        block_size: Of the cache.
        token_ids: The tokens chosen last.
        kv_lens: How many each line has with that one; 0: it does not go on, and is
            padding from now on.
    """
    tables = rows.block_tables[batch.rows]
    positions = jnp.maximum(kv_lens - 1, 0)
    places = (positions // block_size)[:, None]
    block_ids = jnp.take_along_axis(tables, places, axis=1)[:, 0]
    slots = block_ids * block_size + positions % block_size
    return Tokens(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=jnp.where(kv_lens > 0, slots, NULL_BLOCK * block_size),
        block_tables=tables,
        kv_lens=kv_lens,
        cu_q_lens=batch.cu_q_lens,
    )


def _choose(
    model: Llama,
    batch: Batch,
    num_token_ids: int,
    hidden: Float[Array, "lines hidden"],
    rows: RowState,
    num_tokens: Int32[Array, " lines"],
    is_sampling: Bool[Array, " lines"],
) -> tuple[tuple[Int32[Array, " lines"], Logprobs], RowState]:
    """Choose the next tokens of lines that have so many, and note them."""
    hidden = jnp.where(is_sampling[:, None], hidden, 0.0)  # as in `forward`
    logits = _masked_logits(model, hidden, num_token_ids)
    inputs = sampling_inputs(
        rows, batch.rows, num_tokens, is_sampling, batch.wants_logprobs
    )
    token_ids, logprobs = sample(logits, inputs, rows.history)
    rows = append_tokens(rows, batch.rows, num_tokens, token_ids, is_sampling)
    return (token_ids, logprobs), rows


def forward(
    model: Llama,
    cache: KVCache,
    tokens: Tokens,
    attention_implementation: str = "auto",
) -> tuple[Float[Array, "tokens hidden"], KVCache]:
    """Run the decoder over tokens: write each layer's K and V, then attend.

    Returns:
        Hidden states for `model.logits`, and the cache with this step's tokens.
    """

    # Traced once for all layers that are alike; XLA inlines the calls.
    @jax.jit
    def run_layer(
        layer: DecoderLayer,
        kv: LayerKV,
        x: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        tokens: Tokens,
    ) -> tuple[jax.Array, LayerKV]:
        cache = KVCache(layers=(kv,))

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            nonlocal cache
            cache = write_kv(cache, 0, k, v, tokens.slot_mapping)
            out = paged_attention(
                q,
                cache,
                0,
                block_tables=tokens.block_tables,
                kv_lens=tokens.kv_lens,
                cu_q_lens=tokens.cu_q_lens,
                implementation=attention_implementation,
            )
            assert isinstance(out, jax.Array)
            return out

        return layer(x, cos, sin, attend), cache.layers[0]

    x, cos, sin = model.embed(tokens.token_ids, tokens.positions)
    # Products of zeros cost nothing on a CPU, and zeros they stay up to the last layer.
    is_padding = tokens.slot_mapping // cache.block_size == NULL_BLOCK
    x = jnp.where(is_padding[:, None], 0.0, x)
    layers = []
    for layer, kv in zip(model.layers, cache.layers, strict=True):
        x, kv = run_layer(layer, kv, x, cos, sin, tokens)
        layers.append(kv)
    return model.norm(x), KVCache(layers=tuple(layers))


def _masked_logits(
    model: Llama, hidden: Float[Array, "samples hidden"], num_token_ids: int
) -> Float[Array, "samples vocab"]:
    logits = model.logits(hidden)
    if num_token_ids < logits.shape[1]:
        is_padding = jnp.arange(logits.shape[1]) >= num_token_ids
        logits = jnp.where(is_padding[None, :], -jnp.inf, logits)
    return logits


def _prompt_logprobs(
    model: Llama,
    hidden: Float[Array, "tokens hidden"],
    batch: Batch,
    num_token_ids: int,
) -> Logprobs:
    """Log-probabilities of the prompt targets, a tile of tokens at a time.

    A tile at a time because logits of a whole prefill would be large.
    """
    tokens = hidden.shape[0]
    tile = min(_PROMPT_LOGPROBS_TILE, tokens)

    def one_tile(index: jax.Array, result: Logprobs) -> Logprobs:
        # Slices clamp at the end: the last tile may repeat tokens, which is harmless.
        start = jnp.minimum(index * tile, tokens - tile)
        logits = _masked_logits(
            model, lax.dynamic_slice_in_dim(hidden, start, tile), num_token_ids
        )
        targets = lax.dynamic_slice_in_dim(batch.prompt_targets, start, tile)
        return jax.tree.map(
            lambda whole, part: lax.dynamic_update_slice_in_dim(
                whole, part, start, axis=0
            ),
            result,
            token_logprobs(logits, targets),
        )

    def all_tiles() -> Logprobs:
        num_tiles = (batch.cu_q_lens[-1] + tile - 1) // tile
        return lax.fori_loop(jnp.int32(0), num_tiles, one_tile, empty_logprobs(tokens))

    # A loop of no iterations would not do: where one tile holds all tokens its body is
    # loop-invariant, and XLA moves it out of the loop.
    return lax.cond(
        batch.wants_prompt_logprobs, all_tiles, lambda: empty_logprobs(tokens)
    )
