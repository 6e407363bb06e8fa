"""The contract between host and device, and the one jitted step.

`Batch` is all that goes to the device in a step, `StepOutput` all that comes back;
the cache stays there, donated to every step and returned by it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxkv.config import ModelConfig
from jaxkv.device.attention import paged_attention
from jaxkv.device.cache import KVCache, write_kv
from jaxkv.device.llama import Llama, merge, param_shapes
from jaxkv.device.sampling import (
    Logprobs,
    SamplingInputs,
    empty_logprobs,
    sample,
    token_logprobs,
)

_PROMPT_LOGPROBS_TILE = 16


class Batch(NamedTuple):
    """One step's input: the rows' tokens one after another, then padding.

    Padding tokens have id 0, position 0 and a slot in `NULL_BLOCK`; padding rows have
    no queries and kv_len 0.

    Attributes:
        positions: Each token's position in its request, for RoPE; apart from where
            its key lies in the cache.
        slot_mapping: Where each token's K and V are written.
        block_tables: The rows' blocks, for the one layer group there is.
        kv_lens: Tokens each row attends to, this step's included.
        cu_q_lens: Offsets of the rows' tokens.
        sample_indices: For each row the token whose logits choose the next one.
        prompt_targets: The token that follows each one in its prompt, for prompt
            log-probabilities.
        wants_prompt_logprobs: Whether any row asks for those.
        sampling: How each row's token is chosen.
    """

    token_ids: Int32[Array, " tokens"]
    positions: Int32[Array, " tokens"]
    slot_mapping: Int32[Array, " tokens"]
    block_tables: Int32[Array, "rows width"]
    kv_lens: Int32[Array, " rows"]
    cu_q_lens: Int32[Array, " rows+1"]
    sample_indices: Int32[Array, " rows"]
    prompt_targets: Int32[Array, " tokens"]
    wants_prompt_logprobs: Bool[Array, ""]
    sampling: SamplingInputs


class StepOutput(NamedTuple):
    """One step's result.

    Attributes:
        token_ids: The token each row chose; meaningless for rows that do not sample.
        logprobs: Theirs; zeros unless some row wants them.
        prompt_logprobs: One line per token of the batch: of its prompt target; zeros
            unless some row wants them.
    """

    token_ids: Int32[Array, " rows"]
    logprobs: Logprobs
    prompt_logprobs: Logprobs


Step = Callable[[tuple[jax.Array, ...], KVCache, Batch], tuple[StepOutput, KVCache]]


def make_step(
    config: ModelConfig, *, num_token_ids: int, attention_implementation: str
) -> Step:
    """Build the function that runs one step of a model; the engine jits it.

    Args:
        config: The model.
        num_token_ids: Ids from here on are padding of the vocabulary and are never
            chosen.
        attention_implementation: As `paged_attention`'s `implementation`.

    Returns:
        step(params, cache, batch) -> (StepOutput, cache). `params` are flat arrays in
        the order of `param_shapes(config)`. Donate the cache and nothing else.
    """
    names = tuple(param_shapes(config))

    def step(
        params: tuple[jax.Array, ...], cache: KVCache, batch: Batch
    ) -> tuple[StepOutput, KVCache]:
        model = merge(config, dict(zip(names, params, strict=True)))
        hidden, cache = forward(model, cache, batch, attention_implementation)
        logits = _masked_logits(model, hidden[batch.sample_indices], num_token_ids)
        token_ids, logprobs = sample(logits, batch.sampling)
        output = StepOutput(
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=_prompt_logprobs(model, hidden, batch, num_token_ids),
        )
        return output, cache

    return step


def forward(
    model: Llama,
    cache: KVCache,
    batch: Batch,
    attention_implementation: str = "auto",
) -> tuple[Float[Array, "tokens hidden"], KVCache]:
    """Run the decoder over a batch: write each layer's K and V, then attend.

    Returns:
        Hidden states for `model.logits`, and the cache with this step's tokens.
    """

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        nonlocal cache
        cache = write_kv(cache, layer, k, v, batch.slot_mapping)
        out = paged_attention(
            q,
            cache,
            layer,
            block_tables=batch.block_tables,
            kv_lens=batch.kv_lens,
            cu_q_lens=batch.cu_q_lens,
            implementation=attention_implementation,
        )
        assert isinstance(out, jax.Array)
        return out

    return model(batch.token_ids, batch.positions, attend), cache


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
