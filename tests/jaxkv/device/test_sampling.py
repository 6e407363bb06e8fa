"""Sampling against numpy: each rule alone, their order, and the draw itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.device import sampling
from jaxkv.device.sampling import MAX_LOGPROBS, SamplingInputs

VOCAB = 16
ROWS = 8
HISTORY = 12
DRAWS = 20_000

sample = jax.jit(sampling.sample)
threshold = jax.jit(sampling._threshold)
draw_by_weight = jax.jit(sampling._draw_by_weight)
float_at = jax.jit(sampling._float_at)


def inputs(rows=ROWS, vocab=VOCAB, histories=(), suppressed=(), **changes):
    """Greedy rows without any option, but for `changes`: one value, or one a row.

    Returns SamplingInputs, and the history that goes with them.
    """
    history = np.full((rows + 2, HISTORY), 7, np.int32)  # 7 behind a row's tokens
    history_of = np.arange(rows, dtype=np.int32)[::-1] + 1
    history_lens, prompt_lens = np.zeros((2, rows), np.int32)
    for row, (prompt, output) in enumerate(histories):
        tokens = [*prompt, *output]
        history[history_of[row], : len(tokens)] = tokens
        history_lens[row], prompt_lens[row] = len(tokens), len(prompt)
    suppressed_ids = np.full((rows, 4), vocab, np.int32)
    for row, ids in enumerate(suppressed):
        suppressed_ids[row, : len(ids)] = ids
    keys = np.stack([key_of(row) for row in range(rows)]) if rows <= 64 else None
    defaults = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "positions": history_lens,
        "keys": keys,
        "wants_logprobs": False,
    }
    values = defaults | changes
    integers = ("top_k", "positions")
    fields = {
        name: jnp.asarray(np.broadcast_to(value, (rows,)), jnp.float32)
        for name, value in values.items()
        if name not in ("keys", "wants_logprobs", *integers)
    }
    for name in integers:
        fields[name] = jnp.asarray(np.broadcast_to(values[name], (rows,)), jnp.int32)
    sampling_inputs = SamplingInputs(
        **fields,
        keys=jnp.asarray(np.broadcast_to(values["keys"], (rows, 2)), jnp.uint32),
        histories=jnp.asarray(history_of),
        prompt_lens=jnp.asarray(prompt_lens),
        suppressed_ids=jnp.asarray(suppressed_ids),
        wants_logprobs=jnp.asarray(values["wants_logprobs"]),
    )
    return sampling_inputs, jnp.asarray(history)


@functools.cache
def key_of(seed):
    key = jax.random.key(seed, impl=sampling.PRNG_IMPL)
    return np.asarray(jax.random.key_data(key))


def random_logits(seed=0, rows=ROWS, vocab=VOCAB):
    rng = np.random.default_rng(seed)
    return (2 * rng.standard_normal((rows, vocab))).astype(np.float32)


def tokens_of(logits, **arguments):
    logits = np.asarray(logits, np.float32)
    tokens, _ = sample(jnp.asarray(logits), *inputs(*logits.shape, **arguments))
    return np.asarray(tokens)


def kept(logits, **arguments):
    """Which tokens survive min-p, top-k and top-p."""
    logits = np.asarray(logits, np.float32)
    least = threshold(jnp.asarray(logits), inputs(*logits.shape, **arguments)[0])
    return (logits >= np.asarray(least)) & ~np.isneginf(logits)


def softmax(logits):
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits, -1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def same_row(row):
    """One row of logits for every row of the batch, padded with -inf."""
    logits = np.full((ROWS, VOCAB), -np.inf, np.float32)
    logits[:, : len(row)] = row
    return logits


# Greedy, and the rows beside it


def test_temperature_zero_takes_the_likeliest_token_of_each_row():
    logits = random_logits()
    np.testing.assert_array_equal(tokens_of(logits), logits.argmax(-1))


@pytest.mark.parametrize("vocab", [384, 257, 200])  # whole tiles, odd, small tiles
def test_of_equally_likely_tokens_the_first_is_taken(vocab):
    logits = np.zeros((4, vocab), np.float32)
    best = [(3, 130), (150, 199), (0, vocab - 1), (127, 128)]
    for row, ids in enumerate(best):
        logits[row, list(ids)] = 1.0
    np.testing.assert_array_equal(tokens_of(logits), [ids[0] for ids in best])
    # Beside a row that draws, the others take another way to the same tokens.
    temperature = np.asarray([0, 0, 0, 1e-3], np.float32)
    tokens = tokens_of(logits, temperature=temperature)
    np.testing.assert_array_equal(tokens[:3], [3, 150, 0])


def test_greedy_gives_ties_to_the_lower_token_id():
    logits = np.zeros((ROWS, VOCAB))
    logits[:, [5, 9, 12]] = 1.0
    np.testing.assert_array_equal(tokens_of(logits), np.full(ROWS, 5))


def test_a_greedy_row_stays_greedy_beside_rows_that_draw_and_ignores_truncation():
    logits = random_logits()
    temperature = np.array([0.0, 5.0] * (ROWS // 2))
    tokens = tokens_of(
        logits, temperature=temperature, top_k=3, top_p=0.5, min_p=0.9, positions=3
    )
    np.testing.assert_array_equal(tokens[::2], logits.argmax(-1)[::2])


# Truncation


@pytest.mark.parametrize("k", [1, 2, 5, VOCAB - 1, VOCAB])
def test_top_k_keeps_the_k_largest_logits(k):
    logits = random_logits()
    ranks = np.argsort(np.argsort(-logits, -1), -1)
    np.testing.assert_array_equal(kept(logits, top_k=k), ranks < k)


@pytest.mark.parametrize("k", [0, -1, VOCAB + 1, 2**31 - 1])
def test_top_k_off_or_beyond_the_vocabulary_keeps_everything(k):
    top_k = np.full(ROWS, k)
    top_k[0] = 1  # a row that truncates, so that the work is not skipped
    keeps = kept(random_logits(), top_k=top_k)
    assert keeps[0].sum() == 1
    assert keeps[1:].all()


def test_top_k_is_each_rows_own():
    top_k = np.arange(1, ROWS + 1)
    keeps = kept(random_logits(), top_k=top_k)
    np.testing.assert_array_equal(keeps.sum(-1), top_k)


def test_top_k_keeps_ties_with_the_kth():
    keeps = kept(same_row([3.0, 1.0, 2.0, 1.0, 0.5]), top_k=3)
    np.testing.assert_array_equal(keeps, np.isin(same_row(range(5)), [0, 1, 2, 3]))


def test_top_k_takes_zero_and_minus_zero_for_a_tie():
    keeps = kept(same_row([-0.0, 0.0, -1.0]), top_k=1)
    np.testing.assert_array_equal(keeps, np.isin(same_row(range(3)), [0, 1]))


def top_p_reference(logits, top_p):
    """Sort, and keep tokens until the mass before a token reaches top_p."""
    keeps = np.zeros(logits.shape, bool)
    for row, probabilities in enumerate(softmax(logits)):
        order = np.argsort(-probabilities, kind="stable")
        before = np.cumsum(probabilities[order]) - probabilities[order]
        keeps[row, order] = before < top_p
    return keeps


@pytest.mark.parametrize("top_p", [1e-30, 1e-6, 0.1, 0.3, 0.5, 0.75, 0.9, 0.99])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p):
    logits = random_logits(seed=1)
    keeps = kept(logits, top_p=top_p)
    np.testing.assert_array_equal(keeps, top_p_reference(logits, top_p))
    assert keeps.any(-1).all()


@pytest.mark.parametrize(
    ("top_p", "count"),
    [(0.4999, 1), (0.5001, 2), (0.7499, 2), (0.7501, 3), (0.8749, 3), (0.8751, 4)],
)
def test_top_p_just_below_and_above_a_sum_of_probabilities(top_p, count):
    logits = same_row(np.log([0.5, 0.25, 0.125, 0.0625, 0.0625]))
    keeps = kept(logits, top_p=top_p)
    expected = count if count < 4 else 5  # the last two are a tie
    np.testing.assert_array_equal(keeps.sum(-1), expected)


def test_top_p_equal_to_a_sum_of_probabilities_needs_no_further_token():
    # Two tokens of exactly one half are a tie; one token of exactly 1 is enough.
    assert (kept(same_row([0.0, 0.0]), top_p=0.5).sum(-1) == 2).all()
    assert (kept(same_row([0.0, -200.0]), top_p=0.999).sum(-1) == 1).all()


def test_top_p_one_keeps_a_row_whole_beside_one_that_truncates():
    top_p = np.ones(ROWS)
    top_p[0] = 0.01
    # So far apart that a part of them has all of the mass, in float32.
    keeps = kept(100 * random_logits(), top_p=top_p)
    assert keeps[0].sum() == 1
    assert keeps[1:].all()


@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.5, 0.9])
def test_min_p_keeps_what_reaches_that_share_of_the_likeliest(min_p):
    logits = random_logits(seed=2)
    probabilities = softmax(logits)
    expected = probabilities >= min_p * probabilities.max(-1, keepdims=True)
    np.testing.assert_array_equal(kept(logits, min_p=min_p), expected)


def test_min_p_one_keeps_the_likeliest_and_min_p_zero_everything():
    min_p = np.array([1.0, 0.0] * (ROWS // 2))
    logits = random_logits()
    keeps = kept(logits, min_p=min_p)
    assert keeps[1::2].all()
    np.testing.assert_array_equal(keeps[::2].sum(-1), 1)
    np.testing.assert_array_equal(keeps[::2].argmax(-1), logits[::2].argmax(-1))


# Order: penalties, suppression, temperature, min-p, top-k, top-p


def drawn(logits, **arguments):
    """The set of tokens drawn in many draws, each at its own position."""
    logits = np.broadcast_to(np.asarray(logits, np.float32), (DRAWS, VOCAB))
    arguments = {"temperature": 1.0, "keys": key_of(0)} | arguments
    return set(tokens_of(logits, positions=1 + np.arange(DRAWS), **arguments).tolist())


def padded(probabilities):
    row = np.full(VOCAB, -np.inf)
    row[: len(probabilities)] = np.log(probabilities)
    return row


def test_top_k_comes_before_top_p():
    # Of all tokens 0.55 takes two, as 0.4 < 0.55; of the best two one, as 4/7 > 0.55.
    row = padded([0.4, 0.3, 0.2, 0.1])
    assert drawn(row, top_p=0.55) == {0, 1}
    assert drawn(row, top_p=0.55, top_k=2) == {0}


def test_min_p_comes_before_top_k_and_top_p():
    # min-p 0.6 leaves 0.4 and 0.3, renormalised to 4/7 and 3/7.
    row = padded([0.4, 0.3, 0.2, 0.1])
    assert drawn(row, min_p=0.6) == {0, 1}
    assert drawn(row, min_p=0.6, top_k=3, top_p=0.55) == {0}


def test_temperature_comes_before_min_p_and_top_p():
    # Squared and renormalised: 16/30, 9/30, 4/30, 1/30.
    row = padded([0.4, 0.3, 0.2, 0.1])
    assert drawn(row, temperature=0.5, min_p=0.6) == {0}
    assert drawn(row, temperature=0.5, top_p=0.53) == {0}
    assert drawn(row, temperature=0.5, top_p=0.54) == {0, 1}
    # Square roots: nearer to each other.
    assert drawn(row, temperature=2.0, min_p=0.6) == {0, 1, 2}


def test_suppression_comes_before_truncation():
    row = padded([0.4, 0.3, 0.2, 0.1])
    suppressed = [[0]] * DRAWS
    assert drawn(row, suppressed=suppressed, top_k=1) == {1}
    assert drawn(row, suppressed=suppressed, top_p=0.49) == {1}
    assert drawn(row, suppressed=suppressed, min_p=0.9) == {1}


def test_penalties_come_before_temperature_and_truncation():
    row = padded([0.4, 0.3, 0.2, 0.1])
    # Presence 1 divides 0.4 by e: 0.147.
    said = {"histories": [([], [0])] * DRAWS, "presence_penalty": 1.0}
    assert drawn(row, top_k=1, **said) == {1}
    assert drawn(row, top_k=3, **said) == {0, 1, 2}
    # After a temperature of 4, token 0 would be the least likely of all four.
    assert drawn(row, top_k=3, temperature=4.0, **said) == {0, 1, 2}


# Penalties


def penalised_reference(logits, prompt, output, repetition, presence, frequency):
    logits = logits.astype(np.float64).copy()
    for token in {*prompt, *output}:
        logits[token] = (
            logits[token] / repetition
            if logits[token] > 0
            else logits[token] * repetition
        )
    for token in set(output):
        logits[token] -= presence + frequency * output.count(token)
    return logits


@jax.jit
def apply_penalties(logits, inputs, history):
    return sampling._apply_penalties(logits, inputs, history[inputs.histories])


HISTORIES = [
    ([], []),
    ([3], []),
    ([], [3]),
    ([0], [1]),
    ([1, 1, 2], [2, 2, 5, 0]),
    ([7, 8, 9, 10], [7, 7, 7, 15]),
    ([15] * 6, [15] * 6),
    ([4, 5], [6]),
]


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"),
    [
        (1.5, 0.0, 0.0),
        (0.5, 0.0, 0.0),
        (1.0, 0.7, 0.0),
        (1.0, 0.0, 0.3),
        (1.2, -0.5, -0.2),
        (1.3, 0.4, 0.6),
    ],
)
def test_penalties_equal_a_loop_over_the_history(repetition, presence, frequency):
    logits = random_logits(seed=3)
    arguments = inputs(
        histories=HISTORIES,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    expected = [
        penalised_reference(row, prompt, output, repetition, presence, frequency)
        for row, (prompt, output) in zip(logits, HISTORIES, strict=True)
    ]
    result = apply_penalties(jnp.asarray(logits), *arguments)
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


def test_the_padding_of_a_history_does_not_count_as_token_zero():
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[:, 0], logits[:, 1] = 2.0, 1.9
    said = {
        "repetition_penalty": 2.0,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
    }
    histories = [([3, 4], [5])] * ROWS
    np.testing.assert_array_equal(tokens_of(logits, histories=histories, **said), 0)
    histories = [([3, 4], [0])] * ROWS
    np.testing.assert_array_equal(tokens_of(logits, histories=histories, **said), 1)


def test_presence_and_frequency_ignore_the_prompt_and_repetition_does_not():
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[:, 2], logits[:, 1] = 2.0, 1.9
    histories = [([2, 2], [])] * ROWS
    for name in ("presence_penalty", "frequency_penalty"):
        tokens = tokens_of(logits, histories=histories, **{name: 1.0})
        np.testing.assert_array_equal(tokens, 2)
    tokens = tokens_of(logits, histories=histories, repetition_penalty=1.5)
    np.testing.assert_array_equal(tokens, 1)


def test_a_row_without_penalties_is_untouched_beside_one_with():
    logits = random_logits(seed=4)
    penalty = np.array([1.5] + [1.0] * (ROWS - 1))
    arguments = inputs(histories=[([1, 2], [3])] * ROWS, repetition_penalty=penalty)
    result = np.asarray(apply_penalties(jnp.asarray(logits), *arguments))
    np.testing.assert_array_equal(result[1:], logits[1:])
    assert (result[0] != logits[0]).sum() == 3


# Suppression and padding


def test_suppressed_ids_are_each_rows_own_and_never_chosen():
    logits = random_logits(seed=5)
    order = np.argsort(-logits, -1)
    suppressed = [order[row, : row % 4].tolist() for row in range(ROWS)]
    expected = [order[row, row % 4] for row in range(ROWS)]
    np.testing.assert_array_equal(tokens_of(logits, suppressed=suppressed), expected)


def test_padding_of_suppressed_ids_holds_nothing_back():
    logits = np.zeros((ROWS, VOCAB))
    logits[:, VOCAB - 1] = 1.0
    tokens = tokens_of(logits, suppressed=[[0]] + [[]] * (ROWS - 1))
    np.testing.assert_array_equal(tokens, VOCAB - 1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 10},
        {"top_p": 0.9999},
        {"min_p": 1e-6},
        {"repetition_penalty": 1.5},
    ],
    ids=str,
)
def test_logits_of_minus_infinity_are_never_drawn(options):
    row = np.zeros(VOCAB)
    row[5:] = -np.inf
    histories = [([1, 9], [3, 12])] * DRAWS
    assert drawn(row, temperature=50.0, histories=histories, **options) == set(range(5))


@pytest.mark.parametrize("options", [{}, {"min_p": 0.5}], ids=str)
def test_nan_is_drawn_no_more_than_what_is_masked(options):
    row = np.full(VOCAB, -np.inf)
    row[[3, 7]] = 0.0
    assert drawn(row, **options) == {3, 7}
    row[5] = np.nan
    assert drawn(row) == {3, 7}
    assert drawn(np.full(VOCAB, -np.inf)) == {0}


# The draw


def test_a_row_draws_the_same_token_whatever_lies_beside_it():
    logits, options = random_logits(seed=6), {"temperature": 2.0, "keys": key_of(7)}
    positions = np.arange(100, 100 + ROWS)
    together = tokens_of(logits, positions=positions, **options)
    for row in (0, 3, ROWS - 1):
        alone = tokens_of(logits[[row]], positions=positions[row], **options)
        assert alone[0] == together[row]
    reverse = tokens_of(logits[::-1], positions=positions[::-1], **options)
    np.testing.assert_array_equal(reverse[::-1], together)
    others = tokens_of(
        logits,
        positions=positions,
        temperature=np.where(np.arange(ROWS) % 2, 2.0, 0.0),
        keys=key_of(7),
        top_k=np.where(np.arange(ROWS) % 2, 0, 3),
        wants_logprobs=True,
    )
    np.testing.assert_array_equal(others[1::2], together[1::2])


def test_other_keys_and_other_positions_draw_otherwise():
    logits, places = np.zeros((DRAWS, VOCAB)), np.arange(DRAWS)
    one = tokens_of(logits, temperature=1.0, keys=key_of(1), positions=places)
    two = tokens_of(logits, temperature=1.0, keys=key_of(2), positions=places)
    later = tokens_of(logits, temperature=1.0, keys=key_of(1), positions=places + DRAWS)
    sigma = np.sqrt(1 / VOCAB / DRAWS)
    for a, b in ((one, two), (one, later), (two, later), (one[1:], one[:-1])):
        assert abs((a == b).mean() - 1 / VOCAB) < 4 * sigma


def test_the_draw_folds_the_position_into_the_key():
    logits = random_logits(seed=8)
    tokens = tokens_of(logits, temperature=1.0, positions=np.arange(ROWS) * 1000)
    for row in range(ROWS):
        key = jax.random.wrap_key_data(key_of(row), impl="threefry2x32")
        # A toy vocabulary is one tile, which the first number has to take.
        _, share = jax.random.uniform(jax.random.fold_in(key, row * 1000), (2,))
        assert tokens[row] == np.searchsorted(softmax(logits[row]).cumsum(), share)


@pytest.mark.parametrize("vocab", [384, 1000, 130])  # whole tiles, a part, nearly none
def test_a_draw_takes_a_tile_by_the_first_number_and_its_token_by_the_second(vocab):
    rng = np.random.default_rng(0)
    weights = rng.random((DRAWS, vocab)).astype(np.float32)
    weights[rng.random(weights.shape) < 0.5] = 0.0
    uniform = rng.random((DRAWS, 2)).astype(np.float32)
    tokens = np.asarray(draw_by_weight(jnp.asarray(weights), jnp.asarray(uniform)))
    width = sampling._TILE
    tiles = np.zeros((DRAWS, -(-vocab // width) * width))
    tiles[:, :vocab] = weights
    tiles = tiles.reshape(DRAWS, -1, width)
    lines = np.arange(DRAWS)
    before = np.concatenate([np.zeros((DRAWS, 1)), tiles.sum(-1).cumsum(-1)], -1)
    inside = np.pad(tiles[lines, tokens // width].cumsum(-1), ((0, 0), (1, 0)))
    for sums, place, share in (
        (before, tokens // width, uniform[:, 0]),
        (inside, tokens % width, uniform[:, 1]),
    ):
        # Up to the rounding of float32 sums.
        target, slack = share * sums[:, -1], 1e-6 * sums[:, -1]
        assert (sums[lines, place] <= target + slack).all()
        assert (target - slack <= sums[lines, place + 1]).all()
    assert (weights[lines, tokens] > 0).all()


@pytest.mark.parametrize("share", [0.0, np.nextafter(np.float32(1), np.float32(0))])
def test_no_token_without_weight_is_drawn_at_either_end(share):
    weights = np.zeros((3, 300), np.float32)
    weights[0, 299] = weights[1, 140] = weights[2, 3] = 1e-30
    uniform = jnp.full((3, 2), share, jnp.float32)
    tokens = draw_by_weight(jnp.asarray(weights), uniform)
    np.testing.assert_array_equal(tokens, [299, 140, 3])


def test_frequencies_of_draws_over_a_whole_vocabulary_are_the_probabilities():
    vocab, draws = 1000, 1 << 18
    rng = np.random.default_rng(1)
    weights = rng.gamma(0.3, size=vocab).astype(np.float32)
    uniform = rng.random((draws, 2)).astype(np.float32)
    tokens = draw_by_weight(jnp.broadcast_to(weights, (draws, vocab)), uniform)
    p = weights.astype(np.float64) / weights.sum(dtype=np.float64)
    counts = np.bincount(np.asarray(tokens), minlength=vocab)
    is_common = p * draws > 10
    expected = np.append(p[is_common], p[~is_common].sum()) * draws
    found = np.append(counts[is_common], counts[~is_common].sum())
    # Chi-squared with n degrees of freedom: its mean is n, its variance 2 n.
    n = len(expected) - 1
    assert abs(((found - expected) ** 2 / expected).sum() - n) < 4 * np.sqrt(2 * n)


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_logits_far_from_zero_are_drawn_like_those_near_it(shift):
    assert drawn(shift + np.zeros(VOCAB)) == set(range(VOCAB))
    row = shift + np.arange(VOCAB)
    assert drawn(row, temperature=1e-3) == {VOCAB - 1}


def test_rare_tokens_are_told_apart():
    """A million tokens share a thousandth: a single float32 could not name them all."""
    vocab, share_of_rare = 1 << 20, 1e-3
    weights = np.full((1, vocab), share_of_rare / vocab, np.float32)
    weights[0, 0] = 1.0
    inside = (np.arange(128, dtype=np.float32) + 0.5) / 128
    uniform = np.stack([np.full(128, 0.9995, np.float32), inside], -1)
    weights = jnp.broadcast_to(jnp.asarray(weights), (128, vocab))
    tokens = np.asarray(draw_by_weight(weights, jnp.asarray(uniform)))
    assert len(set(tokens)) == 128


def test_a_large_vocabulary_gives_a_row_the_same_tokens_in_any_batch():
    logits = random_logits(seed=17, rows=32, vocab=5000)
    options = {"temperature": 1.5, "top_p": 0.97, "keys": key_of(3)}
    positions = np.arange(32)
    together = tokens_of(logits, positions=positions, **options)
    for rows in (1, 2, 5, 16):
        alone = tokens_of(logits[:rows], positions=positions[:rows], **options)
        np.testing.assert_array_equal(alone, together[:rows])


def test_frequencies_of_draws_are_the_probabilities():
    row = np.full(VOCAB, -np.inf)
    row[:7] = [1.0, 0.0, -1.0, 2.0, 0.5, 1.5, -2.0]
    tokens = tokens_of(
        np.broadcast_to(row, (DRAWS, VOCAB)),
        temperature=np.repeat([1.0, 0.7], DRAWS // 2),
        keys=key_of(11),
        positions=np.arange(DRAWS),
    )
    for half, temperature in zip(np.split(tokens, 2), (1.0, 0.7), strict=True):
        p = softmax(row / temperature)
        frequencies = np.bincount(half, minlength=VOCAB) / len(half)
        sigma = np.sqrt(p * (1 - p) / len(half))
        assert (np.abs(frequencies - p) <= 4 * sigma).all(), (frequencies, p)


# Log-probabilities


def log_softmax(logits):
    logits = logits.astype(np.float64)
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def logprobs_of(logits, **arguments):
    arguments = inputs(*logits.shape, wants_logprobs=True, **arguments)
    tokens, logprobs = sample(jnp.asarray(logits), *arguments)
    return np.asarray(tokens), jax.tree.map(np.asarray, logprobs)


def test_logprobs_are_of_the_raw_logits_before_penalties_and_temperature():
    logits = random_logits(seed=9)
    tokens, logprobs = logprobs_of(
        logits,
        temperature=3.0,
        top_k=4,
        histories=HISTORIES,
        presence_penalty=2.0,
        suppressed=[[1]] * ROWS,
    )
    expected = log_softmax(logits)[np.arange(ROWS), tokens]
    np.testing.assert_allclose(logprobs.chosen, expected, rtol=1e-5, atol=1e-6)


def test_top_logprobs_of_a_large_vocabulary_are_the_20_best_in_order():
    logits = random_logits(seed=10, vocab=50)
    best_ids = jnp.asarray(logits.argmax(-1), jnp.int32)
    logprobs = jax.jit(sampling.token_logprobs)(jnp.asarray(logits), best_ids)
    expected = log_softmax(logits)
    best = np.argsort(-expected, -1)[:, :MAX_LOGPROBS]
    assert MAX_LOGPROBS == 20
    np.testing.assert_array_equal(logprobs.top_ids, best)
    np.testing.assert_allclose(
        logprobs.top, np.take_along_axis(expected, best, -1), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(logprobs.chosen, logprobs.top[:, 0])


def test_top_logprobs_of_a_toy_vocabulary_end_in_minus_infinity():
    logits = random_logits(seed=11)
    _, logprobs = logprobs_of(logits)
    expected = log_softmax(logits)
    best = np.argsort(-expected, -1)
    assert logprobs.top.shape == logprobs.top_ids.shape == (ROWS, MAX_LOGPROBS)
    np.testing.assert_array_equal(logprobs.top_ids[:, :VOCAB], best)
    np.testing.assert_allclose(
        logprobs.top[:, :VOCAB],
        np.take_along_axis(expected, best, -1),
        rtol=1e-5,
        atol=1e-6,
    )
    assert np.isneginf(logprobs.top[:, VOCAB:]).all()


def test_logprobs_nobody_wants_are_zeros_and_change_no_token():
    logits = random_logits(seed=12)
    options = {"temperature": 1.0, "positions": np.arange(ROWS)}
    tokens, logprobs = sample(jnp.asarray(logits), *inputs(**options))
    wanted, _ = logprobs_of(logits, **options)
    np.testing.assert_array_equal(tokens, wanted)
    for field in logprobs:
        np.testing.assert_array_equal(field, np.zeros(field.shape))


# Tiles of rows


@pytest.mark.parametrize("rows_at_once", [1, 2, 4])
def test_rows_choose_the_same_in_tiles_as_all_at_once(rows_at_once, monkeypatch):
    rows = 7
    logits = random_logits(seed=13, rows=rows)
    arguments = inputs(
        rows,
        temperature=[0.0, 1.0, 2.0, 0.0, 1.0, 5.0, 0.0],
        top_k=[0, 0, 3, 0, 0, 9, 2],
        top_p=[1.0, 0.8, 1.0, 0.3, 1.0, 0.9, 1.0],
        min_p=[0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0],
        histories=HISTORIES[1:],
        repetition_penalty=[1.0, 1.0, 1.5, 1.0, 3.0, 1.0, 1.0],
        frequency_penalty=[1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0],
        suppressed=[[], [1, 2], [], [int(logits[3].argmax())], [], [], [0]],
        wants_logprobs=True,
    )
    whole = sample(jnp.asarray(logits), *arguments)
    monkeypatch.setattr(sampling, "_TILE_LOGITS", rows_at_once * VOCAB)
    in_tiles = jax.jit(lambda *x: sampling.sample(*x))(jnp.asarray(logits), *arguments)
    jax.tree.map(np.testing.assert_array_equal, in_tiles, whole)


@pytest.mark.parametrize(
    ("rows_at_once", "tile"), [(0.5, 1), (1, 1), (2.9, 2), (3, 3), (6, 4), (7, 7)]
)
def test_tiles_are_as_equal_as_can_be_and_no_larger_than_allowed(
    rows_at_once, tile, monkeypatch
):
    shapes = []

    def function(logits, numbers, scalar):
        shapes.append((logits.shape, numbers.shape, scalar.shape))
        return logits[:, 0] + numbers * scalar

    monkeypatch.setattr(sampling, "_TILE_LOGITS", int(rows_at_once * VOCAB))
    logits, numbers = jnp.ones((7, VOCAB)), jnp.arange(7.0)
    result = sampling._in_tiles(function, logits, numbers, jnp.float32(2.0))
    np.testing.assert_array_equal(result, 1 + 2 * np.arange(7))
    assert shapes[-1] == ((tile, VOCAB), (tile,), ())


# The order of floats


def test_places_hold_the_floats_in_their_order():
    floats = np.array([-np.inf, -1.0, -1e-20, -0.0, 0.0, 1e-20, 1.0, np.inf])
    bits = floats.astype(np.float32).view(np.uint32)
    places = np.where(bits >> 31, ~bits, bits | np.uint32(0x80000000))
    assert (np.diff(places.astype(np.int64)) > 0).all()
    held = np.asarray(float_at(jnp.asarray(places)[:, None]))[:, 0]
    np.testing.assert_array_equal(held.view(np.uint32), bits)


def test_places_before_the_first_float_hold_it_and_those_past_the_last_hold_nan():
    before = jnp.asarray([[0], [1], [0x00400000], [0x007FFFFF]], jnp.uint32)
    assert np.isneginf(float_at(before)).all()
    past = jnp.asarray([[0xFF800001], [0xFFC00000], [0xFFFFFFFF]], jnp.uint32)
    assert np.isnan(float_at(past)).all()
    last = jnp.asarray([[0xFF800000]], jnp.uint32)
    assert np.isposinf(float_at(last)).all()


def test_thresholds_are_exact_on_random_floats():
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 2**32, (ROWS, 512), dtype=np.uint32)
    floats = patterns.view(np.float32)
    floats = np.where(np.abs(floats) >= np.finfo(np.float32).tiny, floats, 1.0)
    kth = 1 + 60 * np.arange(ROWS)
    least = threshold(jnp.asarray(floats), inputs(*floats.shape, top_k=kth)[0])
    expected = np.sort(floats, -1)[np.arange(ROWS), -kth]
    np.testing.assert_array_equal(np.asarray(least)[:, 0], expected)
