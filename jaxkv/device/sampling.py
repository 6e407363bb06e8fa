"""From logits to tokens: penalties, truncation, the draw, and log-probabilities.

Every function takes a whole batch and each row brings its own parameters, so rows of
all kinds share one step. Work that no row asks for is skipped at run time by
`lax.cond`, not by another compilation.

Truncation sorts nothing. The k-th largest logit and the nucleus' smallest are found
exactly by bisection over the bits of order-preserving integers: 32 passes over the
logits, where sorting a vocabulary costs several times that on any backend.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

MAX_LOGPROBS = 20
"""Most alternatives returned beside a token."""

MAX_SUPPRESSED = 32
"""Most ids that `min_tokens` can hold back: EOS ids and the user's stop ids."""

PRNG_IMPL = "threefry2x32"
"""Fixed, so that a seed means the same whatever JAX's default is."""


_ARGMAX_TILE = 128


class SamplingInputs(NamedTuple):
    """One line per row; what a request's SamplingParams say, as arrays.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_k: 0 is off.
        keys: Key data of each request's own key, its child folded in.
        positions: Place of the token to draw in its request; folded into the key.
        history: The row's tokens so far, read only if a row has a penalty.
        history_lens: How many of them there are.
        prompt_lens: How many of those are the prompt's.
        suppressed_ids: Ids that may not be drawn; padded with the vocabulary's size.
        wants_logprobs: Whether any row asks for log-probabilities.
    """

    temperature: Float[Array, " rows"]
    top_k: Int32[Array, " rows"]
    top_p: Float[Array, " rows"]
    min_p: Float[Array, " rows"]
    repetition_penalty: Float[Array, " rows"]
    presence_penalty: Float[Array, " rows"]
    frequency_penalty: Float[Array, " rows"]
    keys: UInt32[Array, "rows 2"]
    positions: Int32[Array, " rows"]
    history: Int32[Array, "rows max_model_len"]
    history_lens: Int32[Array, " rows"]
    prompt_lens: Int32[Array, " rows"]
    suppressed_ids: Int32[Array, "rows max_suppressed"]
    wants_logprobs: Bool[Array, ""]


class Logprobs(NamedTuple):
    """Log-probabilities of chosen tokens and of the likeliest ones.

    Attributes:
        chosen: The chosen token's.
        top_ids: The likeliest tokens, best first.
        top: Theirs.
    """

    chosen: Float[Array, " rows"]
    top_ids: Int32[Array, "rows max_logprobs"]
    top: Float[Array, "rows max_logprobs"]


def sample(
    logits: Float[Array, "rows vocab"], inputs: SamplingInputs
) -> tuple[Int32[Array, " rows"], Logprobs]:
    """Choose one token a row.

    In this order: penalties, suppression, temperature, min-p, top-k, top-p, the draw.

    Args:
        logits: float32; -inf where a token may never be chosen.
        inputs: Each row's parameters.

    Returns:
        The tokens, and the log-softmax of the logits as they came in; zeros where
        no row wants log-probabilities.
    """
    # One test for all of it: a branch that hands logits through would copy them.
    vocab = logits.shape[1]
    is_plain = ~(
        _any_penalty(inputs)
        | jnp.any(inputs.suppressed_ids < vocab)
        | jnp.any(inputs.temperature > 0)
    )
    tokens = lax.cond(
        is_plain,
        lambda logits, _: _likeliest(logits),
        _choose,
        logits,
        inputs,
    )
    logprobs = lax.cond(
        inputs.wants_logprobs,
        lambda: token_logprobs(logits, tokens),
        lambda: empty_logprobs(logits.shape[0]),
    )
    return tokens, logprobs


def _choose(
    logits: Float[Array, "rows vocab"], inputs: SamplingInputs
) -> Int32[Array, " rows"]:
    """Choose one token a row, whatever the rows ask for."""
    penalised = lax.cond(
        _any_penalty(inputs), _apply_penalties, lambda logits, _: logits, logits, inputs
    )
    allowed = lax.cond(
        jnp.any(inputs.suppressed_ids < logits.shape[1]),
        _suppress,
        lambda logits, _: logits,
        penalised,
        inputs.suppressed_ids,
    )
    greedy = _likeliest(allowed)
    return lax.cond(
        jnp.any(inputs.temperature > 0),
        lambda: jnp.where(inputs.temperature > 0, _draw(allowed, inputs), greedy),
        lambda: greedy,
    )


def _likeliest(logits: Float[Array, "rows vocab"]) -> Int32[Array, " rows"]:
    """Return each row's argmax, the first of equal ones.

    In two levels, a tile's maximum first: on CPU an argmax carries its index through
    every comparison, which a plain maximum does not, and takes ten times as long.
    """
    rows, vocab = logits.shape
    width = math.gcd(vocab, _ARGMAX_TILE)
    tiles = logits.reshape(rows, vocab // width, width)
    tile = jnp.argmax(jnp.max(tiles, axis=-1), axis=-1).astype(jnp.int32)
    inside = jnp.take_along_axis(tiles, tile[:, None, None], axis=1)[:, 0]
    return tile * width + jnp.argmax(inside, axis=-1).astype(jnp.int32)


def token_logprobs(
    logits: Float[Array, "rows vocab"], tokens: Int32[Array, " rows"]
) -> Logprobs:
    """Return log-softmax of `logits` at `tokens` and at the likeliest tokens."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    top, top_ids = lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[1]))
    missing = MAX_LOGPROBS - top.shape[1]  # a toy vocabulary
    return Logprobs(
        chosen=jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0],
        top_ids=jnp.pad(top_ids.astype(jnp.int32), ((0, 0), (0, missing))),
        top=jnp.pad(top, ((0, 0), (0, missing)), constant_values=-jnp.inf),
    )


def empty_logprobs(rows: int) -> Logprobs:
    """Return zeros shaped like `token_logprobs`' result."""
    return Logprobs(
        chosen=jnp.zeros((rows,), jnp.float32),
        top_ids=jnp.zeros((rows, MAX_LOGPROBS), jnp.int32),
        top=jnp.zeros((rows, MAX_LOGPROBS), jnp.float32),
    )


def _any_penalty(inputs: SamplingInputs) -> Bool[Array, ""]:
    return jnp.any(
        (inputs.repetition_penalty != 1.0)
        | (inputs.presence_penalty != 0.0)
        | (inputs.frequency_penalty != 0.0)
    )


def _apply_penalties(
    logits: Float[Array, "rows vocab"], inputs: SamplingInputs
) -> Float[Array, "rows vocab"]:
    """Penalise what was said.

    Repetition (CTRL, Keskar et al., 2019, section 4.1) counts the prompt too;
    presence and frequency, as OpenAI defines them, count generated tokens only.
    """
    rows, width = inputs.history.shape
    place = jnp.arange(width, dtype=jnp.int32)[None, :]
    is_token = place < inputs.history_lens[:, None]
    is_output = is_token & (place >= inputs.prompt_lens[:, None])
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    zeros = jnp.zeros(logits.shape, jnp.float32)
    seen = zeros.at[row, inputs.history].max(is_token.astype(jnp.float32)) > 0
    counts = zeros.at[row, inputs.history].add(is_output.astype(jnp.float32))

    repetition = inputs.repetition_penalty[:, None]
    penalised = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, penalised, logits)
    logits = logits - inputs.frequency_penalty[:, None] * counts
    return logits - inputs.presence_penalty[:, None] * jnp.minimum(counts, 1.0)


def _suppress(
    logits: Float[Array, "rows vocab"],
    suppressed_ids: Int32[Array, "rows max_suppressed"],
) -> Float[Array, "rows vocab"]:
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return logits.at[row, suppressed_ids].set(-jnp.inf, mode="drop")


def _draw(
    logits: Float[Array, "rows vocab"], inputs: SamplingInputs
) -> Int32[Array, " rows"]:
    """Draw from the truncated distribution, each row with its own key."""
    temperature = jnp.where(inputs.temperature > 0, inputs.temperature, 1.0)
    logits = logits / temperature[:, None]
    logits = lax.cond(
        jnp.any((inputs.top_k > 0) | (inputs.top_p < 1.0) | (inputs.min_p > 0.0)),
        _truncate,
        lambda logits, _: logits,
        logits,
        inputs,
    )

    def draw_row(
        key: jax.Array, position: jax.Array, row_logits: jax.Array
    ) -> jax.Array:
        key = jax.random.wrap_key_data(key, impl=PRNG_IMPL)
        return jax.random.categorical(jax.random.fold_in(key, position), row_logits)

    tokens = jax.vmap(draw_row)(inputs.keys, inputs.positions, logits)
    return tokens.astype(jnp.int32)


def _truncate(
    logits: Float[Array, "rows vocab"], inputs: SamplingInputs
) -> Float[Array, "rows vocab"]:
    """Drop tokens by min-p, then top-k, then top-p; ties at a threshold all stay."""
    best = jnp.max(logits, axis=-1, keepdims=True)
    # log(0) is -inf: min_p 0 keeps everything.
    logits = _keep_at_least(logits, best + jnp.log(inputs.min_p)[:, None])
    logits = lax.cond(
        jnp.any(inputs.top_k > 0),
        _keep_top_k,
        lambda logits, _: logits,
        logits,
        inputs.top_k,
    )
    return lax.cond(
        jnp.any(inputs.top_p < 1.0),
        _keep_top_p,
        lambda logits, _: logits,
        logits,
        inputs.top_p,
    )


def _keep_at_least(
    logits: Float[Array, "rows vocab"], threshold: Float[Array, "rows 1"]
) -> Float[Array, "rows vocab"]:
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def _keep_top_k(
    logits: Float[Array, "rows vocab"], top_k: Int32[Array, " rows"]
) -> Float[Array, "rows vocab"]:
    order = _ordered_bits(logits)
    threshold = _largest_threshold(
        order,
        lambda kept: jnp.sum(kept, axis=-1, dtype=jnp.int32) >= top_k,
    )
    is_off = (top_k <= 0)[:, None]
    return jnp.where(is_off | (order >= threshold), logits, -jnp.inf)


def _keep_top_p(
    logits: Float[Array, "rows vocab"], top_p: Float[Array, " rows"]
) -> Float[Array, "rows vocab"]:
    """Keep the smallest set of likeliest tokens whose mass reaches top_p.

    Nucleus sampling (Holtzman et al., 2020, section 3.1).
    """
    order = _ordered_bits(logits)
    probabilities = jax.nn.softmax(logits, axis=-1)
    threshold = _largest_threshold(
        order,
        lambda kept: jnp.sum(jnp.where(kept, probabilities, 0.0), axis=-1) >= top_p,
    )
    is_off = (top_p >= 1.0)[:, None]
    return jnp.where(is_off | (order >= threshold), logits, -jnp.inf)


def _ordered_bits(x: Float[Array, "rows vocab"]) -> UInt32[Array, "rows vocab"]:
    """Map float32 to uint32 so that the order stays the same; both zeros are equal."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits & sign, ~bits, bits | sign)


def _largest_threshold(
    order: UInt32[Array, "rows vocab"], is_enough
) -> UInt32[Array, "rows 1"]:
    """Find each row's largest t for which the set {order >= t} is enough.

    Args:
        order: Keys to compare.
        is_enough: From a [rows, vocab] mask of kept tokens to one bool a row; once
            false it stays false as the set shrinks.
    """

    def try_bit(index: jax.Array, threshold: jax.Array) -> jax.Array:
        bit = jnp.uint32(1) << (jnp.uint32(31) - index.astype(jnp.uint32))
        candidate = threshold | bit
        return jnp.where(is_enough(order >= candidate)[:, None], candidate, threshold)

    start = jnp.zeros((order.shape[0], 1), jnp.uint32)
    return lax.fori_loop(0, 32, try_bit, start)
