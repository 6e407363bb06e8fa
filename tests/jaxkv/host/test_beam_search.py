import dataclasses
import functools
import itertools
import math
import re

import numpy as np
import pytest

from jaxkv.host.beam_search import (
    BeamSearch,
    BeamSearchParams,
    Continuation,
    Hypothesis,
)

EOS = 0
PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)
EARLY = (True, False, "never")


@functools.cache
def random_model(vocab, seed, scale=2.0):
    """Log-probabilities of the next token, drawn anew for every prefix."""

    @functools.cache
    def logprobs(prefix):
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        logits = rng.normal(scale=scale, size=vocab)
        return (logits - np.logaddexp.reduce(logits)).tolist()

    return logprobs


def table_model(table):
    """Only the tokens in the table have a probability."""
    return lambda prefix: [table[prefix].get(t, -math.inf) for t in range(8)]


def best_first(row, count):
    ids = sorted(range(len(row)), key=lambda token: (-row[token], token))[:count]
    return ids, [row[token] for token in ids]


def run(model, *, eos=(), limit=None, **fields):
    """Search to the end; return the hypotheses and how many steps it took."""
    params = BeamSearchParams(**fields)
    search = BeamSearch(params, frozenset(eos), limit or params.max_tokens)
    beams, steps = [()], 0
    while not search.finished:
        rows = [best_first(model(beam), search.num_candidates) for beam in beams]
        live = search.advance([ids for ids, _ in rows], [values for _, values in rows])
        assert search.finished == (not live)
        assert len(live) <= params.beam_width
        beams = [(*beams[c.parent], c.token_id) for c in live]
        assert len(set(beams)) == len(beams)
        steps += 1
    return search.hypotheses, steps


def as_pairs(hypotheses):
    return [(h.token_ids, h.finish_reason) for h in hypotheses]


def all_outputs(model, vocab, eos, limit, prefix=(), logprob=0.0):
    """Every output there is, with its sum."""
    for token, value in zip(range(vocab), model(prefix), strict=True):
        output, total = (*prefix, token), logprob + value
        if token in eos:
            yield output, total, "stop"
        elif len(output) == limit:
            yield output, total, "length"
        else:
            yield from all_outputs(model, vocab, eos, limit, output, total)


def dense_search(model, vocab, eos, limit, *, width, penalty, early):
    """Beam search over whole rows of the vocabulary, first without an end.

    The levels do not depend on the hypotheses, so all are made, and then the first is
    looked for after which the search may end.
    """
    levels, prefixes = [], {(): 0.0}
    for _ in range(limit):
        scored = {
            (*prefix, token): total + value
            for prefix, total in prefixes.items()
            for token, value in enumerate(model(prefix))
        }
        levels.append(sorted(scored.items(), key=lambda item: item[1], reverse=True))
        open_ones = [item for item in levels[-1] if item[0][-1] not in eos]
        prefixes = dict(open_ones[:width])

    def kept(steps):
        found = [
            (total / len(output) ** penalty, output)
            for level in levels[:steps]
            for output, total in level[:width]
            if output[-1] in eos or len(output) == limit
        ]
        return sorted(found, key=lambda pair: pair[0], reverse=True)[:width]

    for steps in range(1, limit + 1):
        scores = [score for score, _ in kept(steps)]
        live = [total for output, total in levels[steps - 1] if output[-1] not in eos]
        length = limit if early == "never" and penalty > 0 else steps
        full = len(scores) == width
        if not live or (
            full and (early is True or live[0] / length**penalty <= scores[-1])
        ):
            break
    return kept(steps), steps


def test_defaults_are_those_of_the_design():
    assert dataclasses.asdict(BeamSearchParams(beam_width=4, max_tokens=16)) == {
        "beam_width": 4,
        "max_tokens": 16,
        "length_penalty": 1.0,
        "early_stopping": False,
    }


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        (
            "beam_width",
            (0, -1, 1.0, True, None, "2"),
            "beam_width must be an integer >= 1",
        ),
        ("max_tokens", (0, -1, 1.5, True, None), "max_tokens must be an integer >= 1"),
        (
            "length_penalty",
            (math.nan, math.inf, -math.inf, True, "1", None),
            "length_penalty must be a finite number",
        ),
        (
            "early_stopping",
            (None, 0, 1, "always", "Never", np.array(["never"]), ["never"]),
            'early_stopping must be True, False or "never"',
        ),
    ],
)
def test_a_wrong_value_is_refused_with_what_it_was(field, values, message):
    for value in values:
        with pytest.raises(ValueError, match=message) as caught:
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, field: value})
        assert str(caught.value) == f"{message}, got {value!r}"


def test_numbers_of_numpy_are_stored_as_those_of_python():
    params = BeamSearchParams(
        beam_width=np.int32(3),
        max_tokens=np.uint8(4),
        length_penalty=np.float32(0.5),
        early_stopping=np.str_("never"),
    )
    assert dataclasses.astuple(params) == (3, 4, 0.5, "never")
    assert [type(value) for value in dataclasses.astuple(params)] == [
        int,
        int,
        float,
        str,
    ]
    whole = BeamSearchParams(beam_width=1, max_tokens=1, length_penalty=2)
    assert type(whole.length_penalty) is float


def test_params_are_frozen_and_have_keywords_only():
    params = BeamSearchParams(beam_width=1, max_tokens=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.beam_width = 2
    with pytest.raises(TypeError, match="positional"):
        BeamSearchParams(1, 1)


@pytest.mark.parametrize("penalty", [167.0, -167.0, 1e300])
def test_a_length_penalty_whose_powers_overflow_is_refused(penalty):
    with pytest.raises(
        ValueError,
        match=r"max_tokens \*\* length_penalty must be in \[1e-200, 1e\+200\], got "
        rf"max_tokens 16 and length_penalty {re.escape(str(penalty))}",
    ):
        BeamSearchParams(beam_width=1, max_tokens=16, length_penalty=penalty)
    assert BeamSearchParams(beam_width=1, max_tokens=1, length_penalty=penalty)


@pytest.mark.parametrize("penalty", [166.0, -166.0])
def test_scores_are_finite_at_the_largest_length_penalties(penalty):
    worst = {(1,) * n: {1: -3e38} for n in range(16)}
    [hypothesis], _ = run(
        table_model(worst), beam_width=1, max_tokens=16, length_penalty=penalty
    )
    assert math.isfinite(hypothesis.score)
    assert hypothesis.score < 0


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("eos", [(), (0,), (1,), (0, 2)], ids=str)
@pytest.mark.parametrize(("vocab", "limit"), [(3, 1), (3, 3), (4, 3), (3, 4)])
def test_wide_enough_a_search_is_exhaustive(vocab, limit, eos, penalty):
    for early, seed, extra in itertools.product(EARLY, range(2), (0, 5)):
        model = random_model(vocab, seed)
        width = vocab ** (limit - 1) + extra
        found, _ = run(
            model,
            eos=eos,
            beam_width=width,
            max_tokens=limit,
            length_penalty=penalty,
            early_stopping=early,
        )
        expected = sorted(
            (
                Hypothesis(output, total, total / len(output) ** penalty, reason)
                for output, total, reason in all_outputs(model, vocab, eos, limit)
            ),
            key=lambda hypothesis: hypothesis.score,
            reverse=True,
        )[:width]
        assert as_pairs(found) == as_pairs(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours[1:3] == pytest.approx(theirs[1:3], rel=1e-12)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("eos", [(), (3,), (0, 4)], ids=str)
@pytest.mark.parametrize("width", [1, 2, 3, 6])
def test_a_narrow_search_equals_a_dense_one(width, eos, penalty):
    for early, seed, limit in itertools.product(EARLY, range(4), (1, 2, 7)):
        model = random_model(7, seed, scale=1.0)
        found, steps = run(
            model,
            eos=eos,
            beam_width=width,
            max_tokens=limit,
            length_penalty=penalty,
            early_stopping=early,
        )
        expected, expected_steps = dense_search(
            model, 7, eos, limit, width=width, penalty=penalty, early=early
        )
        assert [h.token_ids for h in found] == [output for _, output in expected]
        assert [h.score for h in found] == pytest.approx([s for s, _ in expected])
        assert steps == expected_steps


# Width 2. After two steps there are two hypotheses, but (1, 1) goes on with a better
# score per token; after three, (1, 1, 2) beats the worst only if it could end at 5
# tokens for free.
STOPPING = table_model(
    {
        (): {EOS: -1.0, 1: -1.5, 2: -4.0},
        (1,): {1: -0.25, EOS: -1.0},
        (2,): {1: -4.0},
        (1, 1): {EOS: -0.25, 2: -3.0},
        (1, 1, 2): {3: -0.125},
        (2, 1): {1: -4.0},
        (2, 1, 1): {1: -4.0},
        (1, 1, 2, 3): {EOS: -0.015625},
        (2, 1, 1, 1): {1: -4.0},
    }
)


@pytest.mark.parametrize(
    ("early", "limit", "expected", "expected_steps"),
    [
        (True, 5, [((0,), -1.0, -1.0), ((1, 0), -2.5, -1.25)], 2),
        (False, 5, [((1, 1, 0), -2.0, -2 / 3), ((0,), -1.0, -1.0)], 3),
        ("never", 4, [((1, 1, 0), -2.0, -2 / 3), ((0,), -1.0, -1.0)], 3),
        (
            "never",
            5,
            [((1, 1, 0), -2.0, -2 / 3), ((1, 1, 2, 3, 0), -4.890625, -0.978125)],
            5,
        ),
    ],
)
def test_early_stopping_says_when_enough_hypotheses_are_enough(
    early, limit, expected, expected_steps
):
    found, steps = run(
        STOPPING, eos={EOS}, beam_width=2, max_tokens=limit, early_stopping=early
    )
    assert found == [Hypothesis(*fields, "stop") for fields in expected]
    assert steps == expected_steps


def test_a_live_beam_as_good_as_the_worst_hypothesis_does_not_keep_a_search_going():
    # After two steps the worst hypothesis and the best beam both score -1.
    model = table_model(
        {
            (): {EOS: -0.5, 1: -1.0, 2: -4.0},
            (1,): {EOS: -1.0, 1: -1.0},
            (2,): {1: -4.0},
        }
    )
    found, steps = run(model, eos={EOS}, beam_width=2, max_tokens=9)
    assert [(h.token_ids, h.score) for h in found] == [((0,), -0.5), ((1, 0), -1.0)]
    assert steps == 2


@pytest.mark.parametrize(("penalty", "expected_steps"), [(1.0, 9), (0.0, 1), (-1.0, 1)])
def test_never_looks_ahead_only_where_length_is_favoured(penalty, expected_steps):
    table = {(1,) * n: {1: -0.125} for n in range(1, 9)}
    table[()] = {EOS: -1.0, 1: -1.5}
    _, steps = run(
        table_model(table),
        eos={EOS},
        beam_width=1,
        max_tokens=9,
        length_penalty=penalty,
        early_stopping="never",
    )
    assert steps == expected_steps


def test_never_looks_ahead_to_the_limit_of_this_search_only():
    table = {(1,) * n: {1: -0.125} for n in range(1, 9)}
    table[()] = {EOS: -1.0, 1: -2.5}  # -2.5 / 2 is worse than -1, -2.5 / 9 is not
    fields = {"beam_width": 1, "max_tokens": 9, "early_stopping": "never"}
    assert run(table_model(table), eos={EOS}, **fields)[1] == 9
    assert run(table_model(table), eos={EOS}, limit=2, **fields)[1] == 1


@pytest.mark.parametrize(
    ("penalty", "scores"),
    [
        (-1.0, [-4.0, -9.0]),
        (0.0, [-2.0, -3.0]),
        (0.5, [-2 / math.sqrt(2), -math.sqrt(3)]),
        (1.0, [-1.0, -1.0]),
        (2.0, [-1 / 3, -0.5]),
    ],
)
def test_a_score_is_the_sum_over_tokens_with_the_eos_to_the_penalty(penalty, scores):
    short, long = ((1, 0), -2.0, "stop"), ((2, 2, 2), -3.0, "length")
    model = table_model(
        {
            (): {1: -1.0, 2: -1.0},
            (1,): {EOS: -1.0},
            (2,): {2: -1.0},
            (2, 2): {2: -1.0},
        }
    )
    found, _ = run(model, eos={EOS}, beam_width=2, max_tokens=3, length_penalty=penalty)
    order = [long, short] if penalty > 1 else [short, long]
    assert [
        (h.token_ids, h.cumulative_logprob, h.finish_reason) for h in found
    ] == order
    assert [h.score for h in found] == pytest.approx(scores, rel=1e-15)


def start(width, eos=(), max_tokens=4, **fields):
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, **fields)
    return BeamSearch(params, frozenset(eos), max_tokens)


def test_an_eos_outside_the_best_beam_width_is_dropped():
    search = start(2, eos={EOS})
    live = search.advance([[3, 4, EOS]], [[-0.5, -1.0, -1.25]])
    assert live == [Continuation(0, 3, -0.5), Continuation(0, 4, -1.0)]
    assert search.hypotheses == []
    # Best of its row, but third of all.
    live = search.advance([[5, 6, 7], [EOS, 6, 7]], [[-0.5, -0.75, -9.0], [-0.5] * 3])
    assert live == [Continuation(0, 5, -1.0), Continuation(0, 6, -1.25)]
    assert search.hypotheses == []


def test_an_eos_takes_no_beams_place():
    search = start(2, eos={EOS})
    live = search.advance([[EOS, 3, 4]], [[-0.5, -1.0, -1.25]])
    assert live == [Continuation(0, 3, -1.0), Continuation(0, 4, -1.25)]
    assert search.hypotheses == [Hypothesis((EOS,), -0.5, -0.5, "stop")]


def test_every_eos_id_ends_a_beam_and_none_takes_a_place():
    search = start(2, eos={7, 8, 9})
    assert search.num_candidates == 5
    live = search.advance([[9, 7, 8, 3, 4]], [[-0.5, -1.0, -1.5, -2.0, -2.5]])
    assert search.finished  # two hypotheses, and -2 does not beat -1
    assert live == []
    assert as_pairs(search.hypotheses) == [((9,), "stop"), ((7,), "stop")]

    search = start(3, eos={7, 8})
    live = search.advance([[8, 7, 3, 4, 5]], [[-0.5, -1.0, -1.5, -2.0, -2.5]])
    assert [c.token_id for c in live] == [3, 4, 5]
    assert as_pairs(search.hypotheses) == [((8,), "stop"), ((7,), "stop")]


@pytest.mark.parametrize("eos", [(), (1,), (1, 2, 3)])
def test_num_candidates_is_the_width_and_one_for_each_eos_id(eos):
    assert start(4, eos=eos).num_candidates == 4 + len(eos)


def test_one_token_gives_the_likeliest_tokens():
    search = start(3, eos={EOS}, max_tokens=1)
    live = search.advance([[5, EOS, 2, 1]], [[-0.5, -1.0, -1.5, -2.0]])
    assert (live, search.finished) == ([], True)
    assert search.hypotheses == [
        Hypothesis((5,), -0.5, -0.5, "length"),
        Hypothesis((EOS,), -1.0, -1.0, "stop"),
        Hypothesis((2,), -1.5, -1.5, "length"),
    ]


def test_at_the_limit_what_is_live_competes_with_what_has_finished():
    search = start(2, eos={EOS}, max_tokens=2)
    search.advance([[EOS, 3, 4]], [[-1.0, -1.5, -1.75]])
    search.advance(
        [[5, 6, 7], [5, EOS, 7]], [[-0.25, -9.0, -9.0], [-9.0, -0.125, -9.0]]
    )
    assert search.finished
    assert search.hypotheses == [
        Hypothesis((3, 5), -1.75, -0.875, "length"),
        Hypothesis((4, EOS), -1.875, -0.9375, "stop"),
    ]


def test_fewer_beams_live_where_fewer_exist():
    search = start(6, eos={EOS}, max_tokens=3)
    live = search.advance([[1, 2, EOS]], [[-0.5, -1.0, -2.0]])
    assert [c.token_id for c in live] == [1, 2]
    rows = ([1, 2, EOS], [-0.5, -1.0, -2.0])
    live = search.advance([rows[0]] * 2, [rows[1]] * 2)
    assert [(c.parent, c.token_id, c.cumulative_logprob) for c in live] == [
        (0, 1, -1.0),
        (1, 1, -1.5),
        (0, 2, -1.5),
        (1, 2, -2.0),
    ]
    assert as_pairs(search.hypotheses) == [
        ((1, EOS), "stop"),
        ((2, EOS), "stop"),
        ((EOS,), "stop"),
    ]


def test_a_search_ends_when_nothing_can_go_on():
    search = start(5, eos={0, 1})
    assert search.advance([[1, 0]], [[-0.5, -1.0]]) == []
    assert search.finished
    assert as_pairs(search.hypotheses) == [((1,), "stop"), ((0,), "stop")]


def test_what_has_no_probability_is_no_candidate():
    search = start(3, max_tokens=2)
    live = search.advance([[4, 5, 6]], [[-0.5, -math.inf, math.nan]])
    assert live == [Continuation(0, 4, -0.5)]
    assert search.advance([[4, 5, 6]], [[-math.inf] * 3]) == []
    assert (search.finished, search.hypotheses) == (True, [])


def test_equal_sums_go_to_the_lower_token_id_and_then_to_the_lower_beam():
    search = start(4)
    live = search.advance([[3, 4, 8, 9]], [[-1.0, -1.0, -1.0, -1.0]])
    assert [c.token_id for c in live] == [3, 4, 8, 9]
    rows = [[7, 8], [2, 7], [5, 7], [5, 7]]
    live = search.advance(
        rows, [[-1.0, -2.0], [-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]]
    )
    assert [(c.token_id, c.parent) for c in live] == [(2, 1), (5, 2), (5, 3), (7, 0)]


def test_a_tie_decides_whether_an_eos_counts():
    low, high = start(1, eos={2}), start(1, eos={5})
    low.advance([[2, 3]], [[-1.0, -1.0]])
    assert as_pairs(low.hypotheses) == [((2,), "stop")]
    high.advance([[3, 5]], [[-1.0, -1.0]])
    assert high.hypotheses == []


def test_of_equal_scores_the_hypothesis_found_first_is_better():
    search = start(2, eos={0, 1}, early_stopping="never", length_penalty=0.0)
    search.advance([[1, 3, 4]], [[-1.0, -1.0, -9.0]])
    search.advance([[0, 3, 4]] * 2, [[0.0, 0.0, -9.0]] * 2)
    assert as_pairs(search.hypotheses) == [((1,), "stop"), ((3, 0), "stop")]


def test_sums_are_of_double_precision_whatever_the_rows_are():
    search = start(1, max_tokens=3)
    step = np.full((1, 1), -0.1, np.float32)
    for _ in range(3):
        search.advance(np.full((1, 1), 5, np.int32), step)
    [hypothesis] = search.hypotheses
    assert hypothesis.cumulative_logprob == sum([float(np.float32(-0.1))] * 3)
    assert [type(hypothesis.token_ids[0]), type(hypothesis.score)] == [int, float]


def test_hypotheses_are_a_list_of_the_callers_own():
    search = start(1, max_tokens=1)
    search.advance([[5]], [[-1.0]])
    search.hypotheses.clear()
    assert len(search.hypotheses) == 1


def test_rows_that_are_not_those_of_the_live_beams_are_our_bug():
    search = start(2)
    with pytest.raises(AssertionError, match=r"2 rows of ids and 1 .* for 1 live"):
        search.advance([[1], [2]], [[-1.0]])
    search = start(2, max_tokens=1)
    search.advance([[1]], [[-1.0]])
    with pytest.raises(AssertionError, match="the search is over"):
        search.advance([[1]], [[-1.0]])


@pytest.mark.parametrize("limit", [0, 5])
def test_a_limit_that_the_params_do_not_allow_is_our_bug(limit):
    params = BeamSearchParams(beam_width=1, max_tokens=4)
    with pytest.raises(AssertionError, match=f"max_tokens {limit} of a search"):
        BeamSearch(params, frozenset(), limit)
