"""From logits to tokens: penalties, truncation, the draw, and log-probabilities.

Every function takes a whole batch and each row brings its own parameters, so rows of
all kinds share one step. Work that no row asks for is skipped at run time by
`lax.cond`, not by another compilation.

Truncation sorts nothing. The k-th largest logit and the nucleus' smallest are found
exactly by bisection over the bits of order-preserving integers: 32 passes over the
logits, where sorting a vocabulary costs several times that on any backend.

The logits of a large batch are large, so whatever is made of them is made for a tile of
rows at a time; and what a rule drops is said by a threshold, not by other logits.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxkv.device.top_k import largest

MAX_LOGPROBS = 20
"""Most alternatives returned beside a token."""

MAX_STOP_IDS = 32
"""Most ids of a row that the device knows to end it: EOS ids and the user's."""

PRNG_IMPL = "threefry2x32"
"""Fixed, so that a seed means the same whatever JAX's default is."""

_TILE = 128
"""Numbers of a row that are looked at together."""

_TILE_LOGITS = 2**21
"""Most logits worked on at once: 8 MiB, which is 16 rows of Llama 3's vocabulary."""


class SamplingInputs(NamedTuple):
    """One line per row; what a request's SamplingParams say, as arrays.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_k: 0 is off.
        keys: Key data of each request's own key, its child folded in.
        positions: Place of the token to draw in its request: folded into the key, and
            how many tokens came before.
        histories: The row's line in the `history` that is read if it has a penalty.
        prompt_lens: How many tokens before are the prompt's.
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
    histories: Int32[Array, " rows"]
    prompt_lens: Int32[Array, " rows"]
    suppressed_ids: Int32[Array, "rows max_stop_ids"]
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
    logits: Float[Array, "rows vocab"],
    inputs: SamplingInputs,
    history: Int32[Array, "histories max_model_len"],
) -> tuple[Int32[Array, " rows"], Logprobs]:
    """Choose one token a row.

    In this order: penalties, suppression, temperature, min-p, top-k, top-p, the draw.

    Args:
        logits: float32; -inf where a token may never be chosen.
        inputs: Each row's parameters.
        history: Tokens so far, of which `inputs.histories` says whose they are.

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
        lambda logits, inputs: _in_tiles(
            functools.partial(_choose, history), logits, inputs
        ),
        logits,
        inputs,
    )
    logprobs = lax.cond(
        inputs.wants_logprobs,
        lambda: _in_tiles(token_logprobs, logits, tokens),
        lambda: empty_logprobs(logits.shape[0]),
    )
    return tokens, logprobs


def _in_tiles[Result](
    function: Callable[..., Result], logits: Float[Array, "rows vocab"], *others
) -> Result:
    """Call a function of rows for a tile of rows at a time.

    Args:
        function: From the rows' arrays to others of as many rows.
        logits: Its first argument; their number decides about the tiles.
        *others: Pytrees of arrays with a line per row, or of scalars for all of them.
    """
    rows, vocab = logits.shape
    num_tiles = math.ceil(rows / max(1, _TILE_LOGITS // vocab))
    tile = math.ceil(rows / num_tiles)
    if tile == rows:
        return function(logits, *others)

    def one_tile(index: jax.Array, result: Result) -> Result:
        # The last tile may repeat rows, which is harmless. Gathers and scatters, no
        # slices: a GPU's host computes those' offsets, and would wait for every tile.
        start = jnp.minimum(index * tile, rows - tile)
        lines = start + jnp.arange(tile, dtype=jnp.int32)

        def part_of(whole: jax.Array) -> jax.Array:
            return whole if whole.ndim == 0 else whole[lines]

        return jax.tree.map(
            lambda whole, part: whole.at[lines].set(part),
            result,
            function(*jax.tree.map(part_of, (logits, *others))),
        )

    shapes = jax.eval_shape(function, logits, *others)
    result = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return lax.fori_loop(0, math.ceil(rows / tile), one_tile, result)


def _choose(
    history: Int32[Array, "histories max_model_len"],
    logits: Float[Array, "rows vocab"],
    inputs: SamplingInputs,
) -> Int32[Array, " rows"]:
    """Choose one token a row, whatever the rows ask for."""
    penalised = lax.cond(
        _any_penalty(inputs),
        lambda: _apply_penalties(logits, inputs, history[inputs.histories]),
        lambda: logits,
    )
    allowed = _suppress(penalised, inputs.suppressed_ids)
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
    width = math.gcd(vocab, _TILE)
    tiles = logits.reshape(rows, vocab // width, width)
    tile = jnp.argmax(jnp.max(tiles, axis=-1), axis=-1).astype(jnp.int32)
    inside = jnp.take_along_axis(tiles, tile[:, None, None], axis=1)[:, 0]
    return tile * width + jnp.argmax(inside, axis=-1).astype(jnp.int32)


def token_logprobs(
    logits: Float[Array, "rows vocab"], tokens: Int32[Array, " rows"]
) -> Logprobs:
    """Return log-softmax of `logits` at `tokens` and at the likeliest tokens."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    top, top_ids = largest(logprobs, min(MAX_LOGPROBS, logits.shape[1]))
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
    logits: Float[Array, "rows vocab"],
    inputs: SamplingInputs,
    history: Int32[Array, "rows max_model_len"],
) -> Float[Array, "rows vocab"]:
    """Penalise what was said.

    Repetition (CTRL, Keskar et al., 2019, section 4.1) counts the prompt too;
    presence and frequency, as OpenAI defines them, count generated tokens only.
    """
    rows, vocab = logits.shape
    place = jnp.arange(history.shape[1], dtype=jnp.int32)[None, :]
    is_token = place < inputs.positions[:, None]
    is_output = is_token & (place >= inputs.prompt_lens[:, None])
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]

    said = jnp.take_along_axis(logits, history, axis=1)
    repetition = inputs.repetition_penalty[:, None]
    said = jnp.where(said > 0, said / repetition, said * repetition)
    # Ids of `vocab` are dropped; a token said twice is written twice, the same.
    ids = jnp.where(is_token, history, vocab)
    logits = logits.at[row, ids].set(said, mode="drop")

    counts = jnp.zeros(logits.shape, jnp.float32)
    counts = counts.at[row, history].add(is_output.astype(jnp.float32))
    logits = logits - inputs.frequency_penalty[:, None] * counts
    return logits - inputs.presence_penalty[:, None] * jnp.minimum(counts, 1.0)


def _suppress(
    logits: Float[Array, "rows vocab"],
    suppressed_ids: Int32[Array, "rows max_stop_ids"],
) -> Float[Array, "rows vocab"]:
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return logits.at[row, suppressed_ids].set(-jnp.inf, mode="drop")


def _draw(
    logits: Float[Array, "rows vocab"], inputs: SamplingInputs
) -> Int32[Array, " rows"]:
    """Draw from the truncated distribution, each row with its own key."""
    temperature = jnp.where(inputs.temperature > 0, inputs.temperature, 1.0)
    logits = logits / temperature[:, None]
    threshold = lax.cond(
        jnp.any((inputs.top_k > 0) | (inputs.top_p < 1.0) | (inputs.min_p > 0.0)),
        lambda: _threshold(logits, inputs),
        lambda: jnp.full((logits.shape[0], 1), -jnp.inf, logits.dtype),
    )
    # A NaN takes part no more than what is masked. If nothing does, token 0 is drawn.
    is_kept = (logits >= threshold) & (logits > -jnp.inf)
    best = jnp.max(logits, axis=-1, keepdims=True, where=is_kept, initial=-jnp.inf)
    weights = jnp.where(is_kept, jnp.exp(logits - best), 0.0)

    def uniform(key: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key, impl=PRNG_IMPL)
        return jax.random.uniform(jax.random.fold_in(key, position), (2,), jnp.float32)

    return _draw_by_weight(weights, jax.vmap(uniform)(inputs.keys, inputs.positions))


def _draw_by_weight(
    weights: Float[Array, "rows vocab"], uniform: Float[Array, "rows 2"]
) -> Int32[Array, " rows"]:
    """Choose tokens in proportion to their weights: first a tile, then one of it.

    By inverting cumulative sums, with two numbers from [0, 1) a row. Noise for every
    token, as in `jax.random.categorical`, takes many times as long on a CPU, and a
    single number of 23 bits could not tell rare tokens apart.
    """
    rows, vocab = weights.shape
    tiles = jnp.pad(weights, ((0, 0), (0, -vocab % _TILE))).reshape(rows, -1, _TILE)
    tile = _invert(jnp.sum(tiles, axis=-1), uniform[:, 0])
    inside = jnp.take_along_axis(tiles, tile[:, None, None], axis=1)[:, 0]
    return tile * _TILE + _invert(inside, uniform[:, 1])


def _invert(
    weights: Float[Array, "rows width"], share: Float[Array, " rows"]
) -> Int32[Array, " rows"]:
    """Return the first place up to which a row has more than a share of its weight.

    Never one without weight, whatever the sums' rounding says.
    """
    sums = jnp.cumsum(weights, axis=-1)
    is_beyond = (sums > share[:, None] * sums[:, -1:]) & (weights > 0)
    place = jnp.where(
        jnp.any(is_beyond, axis=-1),
        jnp.argmax(is_beyond, axis=-1),
        jnp.argmax(weights, axis=-1),
    )
    return place.astype(jnp.int32)


def _threshold(
    logits: Float[Array, "rows vocab"], inputs: SamplingInputs
) -> Float[Array, "rows 1"]:
    """Find the smallest logits that min-p, then top-k, then top-p keep.

    Ties at a threshold all stay. It is -inf where everything does.
    """
    best = jnp.max(logits, axis=-1, keepdims=True)
    # log(0) is -inf: min_p 0 keeps everything.
    threshold = best + jnp.log(inputs.min_p)[:, None]
    threshold = lax.cond(
        jnp.any(inputs.top_k > 0),
        lambda: jnp.maximum(threshold, _top_k_threshold(logits, inputs.top_k)),
        lambda: threshold,
    )
    return lax.cond(
        jnp.any(inputs.top_p < 1.0),
        lambda: jnp.maximum(
            threshold, _top_p_threshold(logits, inputs.top_p, threshold)
        ),
        lambda: threshold,
    )


def _keep_at_least(
    logits: Float[Array, "rows vocab"], threshold: Float[Array, "rows 1"]
) -> Float[Array, "rows vocab"]:
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def _top_k_threshold(
    logits: Float[Array, "rows vocab"], top_k: Int32[Array, " rows"]
) -> Float[Array, "rows 1"]:
    # In float32, which counts exactly up to 2^24: half the time of int32 on a CPU.
    enough = top_k.astype(jnp.float32)
    threshold = _largest_threshold(
        logits,
        lambda kept: jnp.sum(kept, axis=-1, dtype=jnp.float32) >= enough,
    )
    return jnp.where((top_k > 0)[:, None], threshold, -jnp.inf)


def _top_p_threshold(
    logits: Float[Array, "rows vocab"],
    top_p: Float[Array, " rows"],
    threshold: Float[Array, "rows 1"],
) -> Float[Array, "rows 1"]:
    """Find the smallest of the likeliest tokens whose mass reaches top_p.

    Nucleus sampling (Holtzman et al., 2020, section 3.1), where tokens below
    `threshold` have no mass.
    """
    probabilities = jax.nn.softmax(_keep_at_least(logits, threshold), axis=-1)
    nucleus = _largest_threshold(
        logits,
        lambda kept: jnp.sum(jnp.where(kept, probabilities, 0.0), axis=-1) >= top_p,
    )
    return jnp.where((top_p < 1.0)[:, None], nucleus, -jnp.inf)


def _largest_threshold(
    logits: Float[Array, "rows vocab"], is_enough
) -> Float[Array, "rows 1"]:
    """Find each row's largest t for which the set {logits >= t} is enough.

    Args:
        logits: What to compare.
        is_enough: From a [rows, vocab] mask of kept tokens to one bool a row; once
            false it stays false as the set shrinks.

    Returns:
        The thresholds; -inf where not even everything is enough.
    """

    def try_bit(index: jax.Array, threshold: jax.Array) -> jax.Array:
        bit = jnp.uint32(1) << (jnp.uint32(31) - index.astype(jnp.uint32))
        candidate = threshold | bit
        kept = logits >= _float_at(candidate)
        return jnp.where(is_enough(kept)[:, None], candidate, threshold)

    start = jnp.zeros((logits.shape[0], 1), jnp.uint32)
    return _float_at(lax.fori_loop(0, 32, try_bit, start))


def _float_at(place: UInt32[Array, "rows 1"]) -> Float[Array, "rows 1"]:
    """Return the float32 at a place in their order.

    Places up to -inf's all hold -inf; those beyond inf's hold NaN, which nothing
    reaches.
    """
    sign, minus_inf = jnp.uint32(0x80000000), jnp.uint32(0x007FFFFF)
    place = jnp.maximum(place, minus_inf)
    bits = jnp.where(place >= sign, place ^ sign, ~place)
    return lax.bitcast_convert_type(bits, jnp.float32)
