"""Beam search in the engine: against one that keeps no cache, and under pressure."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxkv import BeamSearchParams, Engine, EngineConfig, SamplingParams
from jaxkv.testing import tiny_llama
from tests.helpers import dense_logits, run_engine, token_ids

SCORE_TOLERANCE = 1e-4  # of sums of float32 log-probabilities


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


class DenseBeamSearch:
    """Beam search by the book, recomputing every beam from its first token."""

    def __init__(self, params, config):
        self.weights = {name: np.asarray(x, np.float64) for name, x in params.items()}
        self.config = config
        self.known = {}

    def logprobs(self, tokens):
        if tokens not in self.known:
            logits = dense_logits(self.weights, self.config, list(tokens))[-1]
            self.known[tokens] = log_softmax(logits)
        return self.known[tokens]

    def search(self, prompt, params, eos_token_ids):
        beams, done = [(0.0, ())], []
        width, penalty = params.beam_width, params.length_penalty
        for count in range(1, params.max_tokens + 1):
            candidates = []
            for total, tokens in beams:
                logprobs = self.logprobs((*prompt, *tokens))
                candidates += [
                    (total + x, (*tokens, t)) for t, x in enumerate(logprobs)
                ]
            candidates.sort(key=lambda c: -c[0])
            ends = [
                (total / count**penalty, tokens)
                for total, tokens in candidates[:width]
                if tokens[-1] in eos_token_ids or count == params.max_tokens
            ]
            done = sorted([*done, *ends], key=lambda c: -c[0])[:width]
            beams = [c for c in candidates if c[1][-1] not in eos_token_ids][:width]
            if len(done) == width and (
                params.early_stopping or beams[0][0] / count**penalty <= done[-1][0]
            ):
                break
        return done


@pytest.fixture(scope="module")
def dense(tiny):
    return DenseBeamSearch(tiny.params, tiny.config)


def prompt_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, 128, length).tolist()


def check(output, expected):
    assert [list(c.token_ids) for c in output.outputs] == [list(t) for _, t in expected]
    scores = [c.score for c in output.outputs]
    np.testing.assert_allclose(scores, [s for s, _ in expected], atol=SCORE_TOLERANCE)


EOS = (7, 30, 64, 90)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("prompt_len", [1, 4, 6, 9, 23])  # blocks of 4
@pytest.mark.parametrize(
    "params",
    [
        BeamSearchParams(beam_width=1, max_tokens=7),
        BeamSearchParams(beam_width=2, max_tokens=6, early_stopping=True),
        BeamSearchParams(beam_width=3, max_tokens=9, length_penalty=0.0),
        BeamSearchParams(beam_width=4, max_tokens=9, length_penalty=1.7),
    ],
    ids=str,
)
def test_hypotheses_equal_a_search_without_a_cache(
    tiny, dense, caching, prompt_len, params
):
    engine = tiny.engine(enable_prefix_caching=caching, eos_token_ids=EOS)
    prompt = prompt_of(prompt_len)
    (output,) = run_engine(engine, {"r": (prompt, params)}).values()
    check(output, dense.search(prompt, params, EOS))
    assert output.finished
    for completion in output.outputs:
        count = len(completion.token_ids)
        score = completion.cumulative_logprob / count**params.length_penalty
        assert completion.score == score
        ends = completion.token_ids[-1] in EOS
        assert completion.finish_reason == ("stop" if ends else "length")
    stats = engine.stats()
    assert (stats.held_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert stats.prompt_tokens == prompt_len


def test_a_beam_for_every_output_finds_the_best_of_all():
    params, config = tiny_llama(vocab_size=4)
    limits = {"num_blocks": 64, "block_size": 2, "max_model_len": 16}
    engine = Engine.from_params(
        params,
        config,
        EngineConfig(
            max_num_seqs=16, max_num_batched_tokens=16, warmup="lazy", **limits
        ),
    )
    beams = BeamSearchParams(beam_width=16, max_tokens=3)
    (output,) = run_engine(engine, {"r": ([1, 2, 3], beams)}).values()
    dense = DenseBeamSearch(params, config)
    every = []
    for tokens in itertools.product(range(4), repeat=3):
        total = sum(
            dense.logprobs((1, 2, 3, *tokens[:i]))[token]
            for i, token in enumerate(tokens)
        )
        every.append((total / 3, tokens))
    check(output, sorted(every, reverse=True)[:16])


def test_searches_and_requests_side_by_side_give_what_they_give_alone(tiny, dense):
    greedy = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    requests = {
        "b0": (prompt_of(9), BeamSearchParams(beam_width=3, max_tokens=8)),
        "g0": (prompt_of(13, 1), greedy),
        "b1": (prompt_of(6, 2), BeamSearchParams(beam_width=2, max_tokens=9)),
        "g1": (prompt_of(9), greedy),
        "b2": (prompt_of(22, 3), BeamSearchParams(beam_width=4, max_tokens=5)),
    }
    alone = token_ids(run_engine(tiny.engine(), {k: requests[k] for k in ("g0", "g1")}))
    outputs = run_engine(tiny.engine(max_num_seqs=8), requests)
    for request_id, (prompt, params) in requests.items():
        if isinstance(params, BeamSearchParams):
            expected = dense.search(prompt, params, tiny.config.eos_token_ids)
            check(outputs[request_id], expected)
        else:
            assert token_ids(outputs)[request_id] == alone[request_id]


def test_two_searches_that_want_all_rows_both_finish(tiny, dense):
    # With 4 rows, one search's beams would wait for the rows of the other's.
    params = BeamSearchParams(beam_width=4, max_tokens=6)
    requests = {f"b{i}": (prompt_of(5 + i, i), params) for i in range(3)}
    outputs = run_engine(tiny.engine(max_num_seqs=4), requests)
    for request_id, (prompt, _) in requests.items():
        expected = dense.search(prompt, params, tiny.config.eos_token_ids)
        check(outputs[request_id], expected)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("num_blocks", [14, 16, 18])
def test_preemption_does_not_change_hypotheses(
    tiny, dense, caching, policy, num_blocks
):
    params = BeamSearchParams(beam_width=3, max_tokens=14)
    greedy = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    engine = tiny.engine(
        num_blocks=num_blocks,
        max_num_seqs=6,
        enable_prefix_caching=caching,
        policy=policy,
        preemption="swap",
        swap_space=2**-12,
    )
    prompts = {"g0": prompt_of(9, 5), "b0": prompt_of(6), "b1": prompt_of(5, 7)}
    engine.add_request("g0", prompts["g0"], greedy, 1)
    engine.add_request("b0", prompts["b0"], params, 2)
    engine.step()
    engine.step()
    engine.add_request("b1", prompts["b1"], params, 0)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
    for request_id in ("b0", "b1"):
        expected = dense.search(prompts[request_id], params, tiny.config.eos_token_ids)
        check(outputs[request_id], expected)
    if policy == "priority" or num_blocks > 14:
        assert engine.stats().num_preemptions > 0
    if (
        policy == "fcfs"
    ):  # only beams were preempted, and what they share is not swapped
        assert engine.stats().num_swapped_out_bytes == 0
    assert engine.stats().held_blocks == 0


def test_beams_share_all_blocks_but_the_last_ones(tiny, monkeypatch):
    engine = tiny.engine()
    params = BeamSearchParams(beam_width=4, max_tokens=4, length_penalty=0.0)
    engine.add_request("b", prompt_of(21), params)
    held = []
    dispatch = engine._dispatch

    def observe(schedule):
        references = engine.scheduler.block_tables.num_references
        held.append((references, engine.scheduler.pool.num_held))
        return dispatch(schedule)

    monkeypatch.setattr(engine, "_dispatch", observe)
    while engine.has_unfinished_requests():
        engine.step()
    # The prompt; then its 5 full blocks are held once, and one for each beam.
    assert held == [(6, 6)] + 3 * [(4 * 6, 5 + 4)]
    assert engine.stats().peak_held_blocks == 5 + 4


def test_an_aborted_search_is_reported_once_and_leaves_nothing(tiny):
    for steps in range(6):
        engine = tiny.engine()
        params = BeamSearchParams(beam_width=4, max_tokens=9)
        engine.add_request("b", prompt_of(9), params)
        for _ in range(steps):
            assert engine.step() == []
        engine.abort_request("b")
        (output,) = engine.step()
        assert (output.request_id, output.finished) == ("b", True)
        assert not engine.has_unfinished_requests()
        assert engine.stats().held_blocks == 0
        engine.abort_request("b")


def test_a_failed_step_does_not_change_hypotheses(tiny, dense, monkeypatch):
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    prompt = prompt_of(10)
    expected = dense.search(prompt, params, tiny.config.eos_token_ids)
    for failing in range(1, 8):
        engine = tiny.engine()
        engine.add_request("b", prompt, params)
        outputs, step = [], 0
        while engine.has_unfinished_requests():
            step += 1
            with monkeypatch.context() as patch:
                if step == failing:
                    patch.setattr(engine._runner, "dispatch", lambda *_: 1 // 0)
                    with pytest.raises(ZeroDivisionError):
                        engine.step()
                else:
                    outputs += engine.step()
        check(outputs[-1], expected)


@pytest.mark.parametrize(
    ("params", "prompt_len", "message"),
    [
        (
            BeamSearchParams(beam_width=5, max_tokens=4),
            3,
            "beam_width 5 needs as many rows, but max_num_seqs is 4",
        ),
        (
            BeamSearchParams(beam_width=4, max_tokens=70),
            22,
            r"beam_width 4 with a prompt of 22 tokens and up to 70 more needs 77 "
            "blocks of 4, but the pool has 63",
        ),
        (
            BeamSearchParams(beam_width=2, max_tokens=70),
            128,
            "the prompt has 128 tokens, but max_model_len is 128",
        ),
    ],
)
def test_a_search_that_could_never_fit_is_refused(tiny, params, prompt_len, message):
    engine = tiny.engine()
    with pytest.raises(ValueError, match=message):
        engine.add_request("b", prompt_of(prompt_len), params)
    assert not engine.has_unfinished_requests()


def test_more_beams_than_a_step_gives_candidates_for_are_refused(tiny):
    engine = tiny.engine(max_num_seqs=32)
    params = BeamSearchParams(beam_width=20, max_tokens=2)
    message = "beam_width 20 and 1 EOS ids need the 21 likeliest tokens .* gives 20"
    with pytest.raises(ValueError, match=message):
        engine.add_request("b", [1], params)


def test_the_text_of_a_hypothesis_leaves_the_eos_out(tiny):
    class Letters:
        def encode(self, text):
            return [ord(c) - 32 for c in text]

        def decode(self, ids):
            return "".join(chr(32 + i) for i in ids)

    engine = tiny.engine(tokenizer=Letters(), eos_token_ids=EOS)
    params = BeamSearchParams(beam_width=4, max_tokens=9, length_penalty=0.0)
    (output,) = run_engine(engine, {"b": (prompt_of(6), params)}).values()
    reasons = {c.finish_reason for c in output.outputs}
    assert "stop" in reasons
    for completion in output.outputs:
        ids = list(completion.token_ids)
        ids = ids[:-1] if completion.finish_reason == "stop" else ids
        assert completion.text == Letters().decode(ids)


def test_the_length_limit_of_the_model_ends_a_search(tiny, dense):
    params = BeamSearchParams(beam_width=2, max_tokens=50)
    prompt = prompt_of(125)  # of at most 128 tokens
    (output,) = run_engine(tiny.engine(), {"b": (prompt, params)}).values()
    shorter = dataclasses.replace(params, max_tokens=3)
    check(output, dense.search(prompt, shorter, tiny.config.eos_token_ids))
