import dataclasses
import json

import numpy as np
import pytest

from jaxkv import BeamSearchParams, SamplingParams
from jaxkv.testing import scripted_engine
from tests.helpers import dense_greedy, dense_logits, run_engine, token_ids
from tests.jaxkv.engine.conftest import CONFIG, NUM_BLOCKS

pytestmark = pytest.mark.usefixtures("each_mode")

LENGTHS = (1, 3, 4, 5, 17, 33)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def prompts(lengths=LENGTHS, seed=0):
    rng = np.random.default_rng(seed)
    return {f"r{n}": rng.integers(0, 128, n).tolist() for n in lengths}


@pytest.fixture(scope="module")
def expected(tiny):
    """What a decoder without a cache says, in float64."""
    return {
        request_id: dense_greedy(tiny.params, tiny.config, prompt, 12)
        for request_id, prompt in prompts().items()
    }


def greedy_requests():
    return {request_id: (prompt, GREEDY) for request_id, prompt in prompts().items()}


def test_greedy_tokens_of_requests_alone_equal_a_decoder_without_a_cache(
    tiny, expected
):
    for request_id, request in greedy_requests().items():
        outputs = run_engine(tiny.engine(), {request_id: request})
        assert token_ids(outputs) == {request_id: expected[request_id]}


def test_batching_does_not_change_tokens(tiny, expected):
    assert token_ids(run_engine(tiny.engine(), greedy_requests())) == expected


def test_the_order_of_requests_does_not_change_tokens(tiny, expected):
    order = ["r33", "r3", "r17", "r1", "r5", "r4"]
    outputs = run_engine(tiny.engine(), greedy_requests(), order)
    assert token_ids(outputs) == expected


@pytest.mark.parametrize("chunk", range(1, 34))
def test_no_chunk_size_changes_tokens(tiny, expected, chunk):
    engine = tiny.engine(long_prefill_token_threshold=chunk)
    assert token_ids(run_engine(engine, greedy_requests())) == expected


@pytest.mark.parametrize("num_blocks", [13, 16, 20, 24])
def test_preemption_does_not_change_tokens(tiny, expected, num_blocks):
    engine = tiny.engine(num_blocks=num_blocks)
    order = ["r17", "r33", "r5", "r4", "r3", "r1"]
    assert token_ids(run_engine(engine, greedy_requests(), order)) == expected
    assert engine.stats().num_preemptions > 0 or num_blocks > 16
    assert engine.stats().held_blocks == 0


def test_preemption_in_the_middle_of_chunks_does_not_change_tokens(tiny, expected):
    engine = tiny.engine(num_blocks=13, long_prefill_token_threshold=5)
    order = ["r17", "r5", "r33", "r4", "r3", "r1"]
    assert token_ids(run_engine(engine, greedy_requests(), order)) == expected
    assert engine.stats().num_preemptions > 0


def test_two_requests_that_fit_only_one_at_a_time_both_finish(tiny):
    rng = np.random.default_rng(3)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    requests = {f"r{i}": (rng.integers(0, 128, 20).tolist(), params) for i in (0, 1)}
    engine = tiny.engine(num_blocks=11)
    outputs = run_engine(engine, requests)
    for request_id, (prompt, _) in requests.items():
        alone = dense_greedy(tiny.params, tiny.config, prompt, 20)
        assert token_ids(outputs)[request_id] == alone


def test_seeded_requests_repeat_whoever_runs_beside_them(tiny):
    params = SamplingParams(max_tokens=12, seed=7, ignore_eos=True, top_p=0.9)
    requests = {k: (prompt, params) for k, prompt in prompts().items()}
    together = token_ids(run_engine(tiny.engine(), requests))
    chunked = tiny.engine(long_prefill_token_threshold=3, num_blocks=20)
    assert token_ids(run_engine(chunked, requests)) == together
    for request_id, request in requests.items():
        alone = run_engine(tiny.engine(), {request_id: request})
        assert token_ids(alone)[request_id] == together[request_id]


def test_unseeded_requests_repeat_with_the_engine_seed_and_differ_among_each_other(
    tiny,
):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    requests = {f"r{i}": ([5, 6, 7], params) for i in range(3)}
    first = token_ids(run_engine(tiny.engine(), requests))
    assert token_ids(run_engine(tiny.engine(), requests)) == first
    assert token_ids(run_engine(tiny.engine(seed=1), requests)) != first
    assert len({tuple(tokens) for tokens in first.values()}) == 3


def test_b81_n_outputs_differ_repeat_and_start_with_that_of_n_1(tiny):
    params = SamplingParams(n=4, seed=7, max_tokens=8, ignore_eos=True)
    requests = {"r": ([5, 6, 7], params)}
    (output,) = run_engine(tiny.engine(), requests).values()
    texts = [list(completion.token_ids) for completion in output.outputs]
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(text) for text in texts}) == 4
    (again,) = run_engine(tiny.engine(), requests).values()
    assert [list(completion.token_ids) for completion in again.outputs] == texts
    single = {"r": ([5, 6, 7], dataclasses.replace(params, n=1))}
    assert token_ids(run_engine(tiny.engine(), single))["r"] == texts[0]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("prompt_len", [1, 6, 9, 23])  # blocks of 4
def test_n_outputs_share_the_prompts_blocks_and_equal_one(tiny, caching, prompt_len):
    prompt = list(range(30, 30 + prompt_len))
    params = SamplingParams(n=4, top_k=1, max_tokens=9, ignore_eos=True)
    single = tiny.engine(enable_prefix_caching=False)
    expected = token_ids(
        run_engine(single, {"r": (prompt, dataclasses.replace(params, n=1))})
    )["r"]
    engine = tiny.engine(max_num_seqs=4, enable_prefix_caching=caching)
    (output,) = run_engine(engine, {"r": (prompt, params)}).values()
    assert [list(c.token_ids) for c in output.outputs] == [expected] * 4
    # The prompt's full blocks once; the rest of it and what follows four times. The
    # first output is a step ahead of the others, and leaves first.
    shared = (prompt_len - 1) // 4
    before, last = (-(-(prompt_len + n) // 4) - shared for n in (7, 8))
    peak = shared + max(last + 3 * before, 3 * last)
    if prompt_len == 1:  # nothing of it is computed for the others: they go together
        peak = 4 * last
    assert engine.stats().peak_held_blocks == peak


def test_logprobs_are_log_softmax_of_the_raw_logits(tiny):
    params = SamplingParams(
        max_tokens=3,
        temperature=0.0,
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=2,
        repetition_penalty=1.5,
    )
    prompt = prompts()["r17"]
    engine = tiny.engine(long_prefill_token_threshold=5)
    (output,) = run_engine(engine, {"r": (prompt, params)}).values()
    completion = output.outputs[0]
    tokens = prompt + list(completion.token_ids)
    weights = {k: np.asarray(v, np.float64) for k, v in tiny.params.items()}
    logits = dense_logits(weights, tiny.config, tokens)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def check(entry, position, count):
        best = np.argsort(-logprobs[position], kind="stable")[:count].tolist()
        assert list(entry)[:count] == best
        assert set(entry) == {*best, tokens[position + 1]}
        for token, logprob in entry.items():
            assert logprob == pytest.approx(logprobs[position, token], abs=1e-4)

    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 17
    for position in range(16):
        check(output.prompt_logprobs[position + 1], position, 2)
    for index, entry in enumerate(completion.logprobs):
        check(entry, 16 + index, 3)
    assert completion.cumulative_logprob == pytest.approx(
        sum(logprobs[16 + i, tokens[17 + i]] for i in range(3)), abs=1e-4
    )


def test_b82_logprobs_under_top_k_1_can_be_written_as_json(tiny):
    params = SamplingParams(
        max_tokens=4, seed=0, top_k=1, logprobs=5, prompt_logprobs=5, ignore_eos=True
    )
    (output,) = run_engine(tiny.engine(), {"r": ([1, 2, 3], params)}).values()
    entries = [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]
    assert [len(entry) >= 5 for entry in entries] == [True] * 6
    json.dumps(entries, allow_nan=False)


def test_logprobs_are_finite_and_hold_the_chosen_token_even_with_none_asked_for(tiny):
    params = SamplingParams(max_tokens=4, seed=0, top_k=1, logprobs=0, ignore_eos=True)
    (output,) = run_engine(tiny.engine(), {"r": ([1, 2], params)}).values()
    completion = output.outputs[0]
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert list(entry) == [token]
    json.dumps(list(completion.logprobs), allow_nan=False)


def test_top_k_1_is_greedy_and_penalties_see_prompt_and_output(tiny, expected):
    params = SamplingParams(max_tokens=12, top_k=1, seed=3, ignore_eos=True)
    outputs = run_engine(tiny.engine(), {"r5": (prompts()["r5"], params)})
    assert token_ids(outputs)["r5"] == expected["r5"]
    harsh = SamplingParams(
        max_tokens=40, temperature=0.0, ignore_eos=True, repetition_penalty=1e6
    )
    for engine in (tiny.engine(), tiny.engine(num_blocks=14)):
        rivals = {f"x{i}": (prompts()["r17"], GREEDY) for i in range(3)}
        outputs = run_engine(engine, rivals | {"r": (prompts()["r5"], harsh)})
        tokens = prompts()["r5"] + token_ids(outputs)["r"]
        assert len(set(tokens)) == len(set(prompts()["r5"])) + 40


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("ends_by", ["eos", "max_tokens"])
def test_after_the_last_step_every_block_is_free_once(block_size, ends_by):
    engine = scripted_engine(
        lambda tokens: 50 if ends_by == "eos" and len(tokens) == 6 else tokens[-1] + 1,
        dataclasses.replace(CONFIG, block_size=block_size),
        eos_token_ids=(50,),
    )
    outputs = run_engine(engine, {"r": ([1, 2, 3], SamplingParams(max_tokens=6))})
    expected = [4, 5, 6, 7, 8, 9] if ends_by == "max_tokens" else [4, 5, 6, 50]
    assert token_ids(outputs)["r"] == expected
    stats = engine.stats()
    assert stats.free_blocks + stats.cached_blocks == NUM_BLOCKS - 1
    assert stats.total_blocks == NUM_BLOCKS - 1
    pool = engine.scheduler.pool
    assert sorted(pool.allocate(stats.total_blocks)) == list(range(1, NUM_BLOCKS))


def test_a_scripted_engine_sees_every_token_through_its_block_table():
    engine = scripted_engine(
        lambda tokens: sum(tokens) % 1000,
        dataclasses.replace(CONFIG, num_blocks=20, long_prefill_token_threshold=3),
    )
    requests = {k: (prompt, GREEDY) for k, prompt in prompts().items()}
    for request_id, output in run_engine(engine, requests).items():
        tokens = list(prompts()[request_id])
        for _ in range(12):
            tokens.append(sum(tokens) % 1000)
        assert list(output.outputs[0].token_ids) == tokens[-12:]


@pytest.mark.parametrize(
    ("params", "tokens", "finish_reason", "stop_reason"),
    [
        (SamplingParams(max_tokens=9), [4, 5, 6, 7], "stop", None),
        (SamplingParams(max_tokens=2), [4, 5], "length", None),
        (SamplingParams(max_tokens=9, stop_token_ids=[5]), [4, 5], "stop", 5),
        (
            SamplingParams(max_tokens=6, ignore_eos=True),
            [4, 5, 6, 7, 8, 9],
            "length",
            None,
        ),
        (
            SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=[8]),
            [4, 5, 6, 7, 8],
            "stop",
            8,
        ),
    ],
    ids=["eos", "max_tokens", "stop id", "ignore_eos", "ignore_eos and stop id"],
)
def test_finish_reasons(params, tokens, finish_reason, stop_reason):
    engine = scripted_engine(lambda t: t[-1] + 1, CONFIG, eos_token_ids=(7, 11))
    (output,) = run_engine(engine, {"r": ([1, 2, 3], params)}).values()
    completion = output.outputs[0]
    assert completion.token_ids == tokens
    assert (completion.finish_reason, completion.stop_reason) == (
        finish_reason,
        stop_reason,
    )


@pytest.mark.parametrize("eos", [7, 11, 13])
def test_every_eos_id_ends_generation(eos):
    engine = scripted_engine(lambda t: eos, CONFIG, eos_token_ids=(7, 11, 13))
    outputs = run_engine(engine, {"r": ([1], SamplingParams(max_tokens=5))})
    assert token_ids(outputs)["r"] == [eos]


def test_min_tokens_holds_back_eos_and_stop_ids_on_the_device(tiny):
    free = SamplingParams(max_tokens=1, temperature=0.0)
    prompt = prompts()["r5"]
    first = token_ids(run_engine(tiny.engine(), {"r": (prompt, free)}))["r"][0]
    engine = tiny.engine(eos_token_ids=(first,))
    held = SamplingParams(max_tokens=4, min_tokens=3, temperature=0.0)
    outputs = run_engine(engine, {"r": (prompt, held)})
    tokens = token_ids(outputs)["r"]
    assert len(tokens) >= 3
    assert first not in tokens[:3]


def test_max_tokens_none_runs_to_the_end_of_the_pool_or_the_model(tiny):
    params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
    (output,) = run_engine(tiny.engine(num_blocks=6), {"r": ([1, 2], params)}).values()
    assert len(output.outputs[0].token_ids) == 5 * 4 + 1 - 2
    assert output.outputs[0].finish_reason == "length"
    (output,) = run_engine(tiny.engine(), {"r": ([1, 2], params)}).values()
    assert len(output.outputs[0].token_ids) == 126


def test_a_prompt_that_fills_the_pool_can_have_one_token(tiny):
    params = SamplingParams(max_tokens=1, temperature=0.0)
    prompt = prompts([20])["r20"]
    outputs = run_engine(tiny.engine(num_blocks=6), {"r": (prompt, params)})
    assert token_ids(outputs)["r"] == dense_greedy(tiny.params, tiny.config, prompt, 1)


def test_an_aborted_request_is_reported_once_and_leaves_nothing(tiny):
    engine = tiny.engine()
    for request_id, prompt in prompts().items():
        engine.add_request(request_id, prompt, GREEDY)
    engine.step()
    engine.step()
    engine.abort_request("r33")
    engine.abort_request("r33")
    engine.abort_request("nobody")
    reports = [o for o in engine.step() if o.request_id == "r33"]
    assert [o.outputs[0].finish_reason for o in reports] == ["abort"]
    for request_id in prompts():
        engine.abort_request(request_id)
    assert engine.has_unfinished_requests()
    assert {o.outputs[0].finish_reason for o in engine.step()} == {"abort"}
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    assert engine.stats().held_blocks == 0
    assert engine.stats().num_running == engine.stats().num_waiting == 0


def test_abort_of_a_request_with_several_outputs_ends_them_all(tiny):
    engine = tiny.engine()
    engine.add_request("r", [1, 2], SamplingParams(n=3, seed=1, ignore_eos=True))
    engine.step()
    engine.abort_request("r")
    (output,) = engine.step()
    assert [c.finish_reason for c in output.outputs] == ["abort"] * 3
    assert engine.stats().held_blocks == 0


def test_b79_n_outputs_end_at_different_times_for_their_own_reasons(tiny):
    prompt = [5, 6, 7]
    params = SamplingParams(n=3, seed=9, max_tokens=9, ignore_eos=True)
    (output,) = run_engine(tiny.engine(), {"r": (prompt, params)}).values()
    texts = [list(completion.token_ids) for completion in output.outputs]
    stops = [texts[0][0], texts[1][4]]
    assert not set(stops) & {*texts[1][:4], *texts[2]}
    params = dataclasses.replace(params, stop_token_ids=stops)
    engine = tiny.engine()
    engine.add_request("r", prompt, params)
    reports = []
    while engine.has_unfinished_requests():
        reports += engine.step()
    assert [report.finished for report in reports].count(True) == 1
    ends = [
        (len(c.token_ids), c.finish_reason, c.stop_reason) for c in reports[-1].outputs
    ]
    assert ends == [(1, "stop", stops[0]), (5, "stop", stops[1]), (9, "length", None)]
    for steps in range(1, 7):
        engine = tiny.engine()
        engine.add_request("r", prompt, params)
        for _ in range(steps):
            engine.step()
        engine.abort_request("r")
        (output,) = engine.step()
        reasons = [c.finish_reason for c in output.outputs]
        assert "abort" in reasons
        assert set(reasons) <= {"abort", "stop"}
        assert engine.stats().held_blocks == engine.stats().num_running == 0


def test_b116_abort_of_a_swapped_out_request_ends_it_once(tiny):
    engine = tiny.engine(num_blocks=13, preemption="swap", swap_space=2**-12)
    for request_id in ("r17", "r5", "r4", "r33"):
        engine.add_request(request_id, prompts()[request_id], GREEDY)
    reports = []
    while engine.has_unfinished_requests():
        reports += engine.step()
        swapped = [r for r in engine.scheduler._waiting if r.swapped is not None]
        for request in swapped:
            engine.abort_request(request.request_id.split("/")[1])
            engine.abort_request(request.request_id.split("/")[1])
    assert engine.stats().num_swapped_out_bytes > 0
    ended = [o.request_id for o in reports if o.finished]
    assert sorted(ended) == ["r17", "r33", "r4", "r5"]
    assert engine.scheduler.swap_space.num_used == engine.stats().held_blocks == 0


def test_a_failed_step_loses_nothing(monkeypatch):
    engine = scripted_engine(lambda tokens: len(tokens), CONFIG)
    engine.add_request("r", [1, 2, 3], SamplingParams(max_tokens=3))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "_next_token", lambda tokens: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.scheduler.check_invariants()
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].token_ids == [3, 4, 5]


def test_an_abort_before_a_failed_step_is_reported_by_the_next(monkeypatch):
    engine = scripted_engine(lambda tokens: len(tokens), CONFIG)
    for request_id in ("a", "b"):
        engine.add_request(request_id, [1, 2, 3], SamplingParams(max_tokens=3))
    engine.step()
    engine.abort_request("a")
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "_next_token", lambda tokens: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    reports = [o for o in engine.step() if o.request_id == "a"]
    assert [o.outputs[0].finish_reason for o in reports] == ["abort"]


class OddTokenizer:
    """Cannot decode what has the token 13 in it."""

    def encode(self, text):
        return [ord(c) for c in text]

    def decode(self, ids):
        if 13 in ids:
            raise RuntimeError("cannot decode 13")
        return "".join(chr(64 + i % 32) for i in ids)


def run_on(engine):
    """Go on after errors; return the outputs that ended, and the errors."""
    ended, errors = {}, []
    for _ in range(50):
        if not engine.has_unfinished_requests():
            break
        try:
            ended |= {o.request_id: o for o in engine.step() if o.finished}
        except RuntimeError as error:
            errors.append(error)
    return ended, errors


def test_a_request_whose_text_cannot_be_decoded_ends_alone():
    engine = scripted_engine(
        lambda tokens: 13 if tokens[0] == 1 and len(tokens) == 4 else 5,
        CONFIG,
        OddTokenizer(),
    )
    for name, first in (("a", 2), ("x", 1), ("c", 3)):
        engine.add_request(name, [first, 4], SamplingParams(max_tokens=6))
    ended, errors = run_on(engine)
    assert [str(error) for error in errors] == ["cannot decode 13"]
    assert "0/x" in errors[0].__notes__[0]
    assert ended.keys() == {"a", "c"}
    assert [o.outputs[0].token_ids for o in ended.values()] == [[5] * 6] * 2
    assert not engine.has_unfinished_requests()
    assert (engine.stats().held_blocks, engine.stats().num_running) == (0, 0)


def test_a_search_whose_text_cannot_be_decoded_takes_nobodys_report_along():
    engine = scripted_engine(lambda tokens: 13, CONFIG, OddTokenizer())
    engine.add_request("b", [1, 2], BeamSearchParams(beam_width=2, max_tokens=3))
    for name in ("a", "c"):
        params = SamplingParams(max_tokens=3, stop_token_ids=[13])
        engine.add_request(name, [3, 4], params)
    ended, errors = run_on(engine)
    assert [str(error) for error in errors] == ["cannot decode 13"]
    assert ended.keys() == {"a", "c"}
    assert engine.stats().held_blocks == 0


@pytest.mark.parametrize(
    "salt",
    ["\ud800", 10**5000, -(10**5000)],
    ids=["lone surrogate", "large", "negative"],
)
def test_any_salt_will_do(salt):
    engine = scripted_engine(lambda tokens: len(tokens), CONFIG)
    found = []
    for number in range(2):
        engine.add_request(str(number), [1] * 9, SamplingParams(), cache_salt=salt)
        (output,) = run_engine(engine, {}).values()
        found.append(output.num_cached_tokens)
    assert found == [0, 8]


def test_a_schedule_that_cannot_be_made_is_made_again(monkeypatch):
    engine = scripted_engine(lambda tokens: len(tokens), CONFIG)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4))
    engine.step()
    engine.add_request("b", [4, 5, 6], SamplingParams(max_tokens=4))
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler.prefix_cache, "find", lambda request: 1 // 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                engine.step()
            engine.scheduler.check_invariants()
    outputs = run_engine(engine, {})
    assert token_ids(outputs) == {"a": [3, 4, 5, 6], "b": [3, 4, 5, 6]}


def test_every_running_request_gets_a_token_beside_a_long_prefill():
    engine = scripted_engine(
        lambda tokens: 1, dataclasses.replace(CONFIG, max_num_batched_tokens=8)
    )
    long = SamplingParams(max_tokens=40)
    engine.add_request("a", [1], long)
    engine.add_request("b", [1], long)
    engine.step()
    engine.add_request("long", [1] * 80, SamplingParams(max_tokens=1))
    for step in range(3, 17):
        if step == 4:
            engine.add_request("short", [1, 1], SamplingParams(max_tokens=1))
        reported = {output.request_id for output in engine.step()}
        assert {"a", "b"} <= reported


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1, 128], {}, r"outside the vocabulary of 128: \[128\]"),
        ([-1], {}, r"outside the vocabulary of 128: \[-1\]"),
        ([1] * 128, {}, "128 tokens, but max_model_len is 128"),
        ([1] * 129, {}, "129 tokens, but max_model_len is 128"),
        ([1] * 60, {"max_tokens": 40}, "needs 99 slots, but the pool has 40"),
        ("text", {}, "must be token ids, got a string"),
        ([1.5], {}, "must be a list of integers"),
        ([1], {"stop": "x"}, "need a tokenizer"),
        ([1], {"stop_token_ids": [128]}, "stop_token_ids outside the vocabulary"),
        (
            [1],
            {"stop_token_ids": list(range(40)), "min_tokens": 1},
            "hold back at most 32",
        ),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_others_go_on(
    tiny, prompt, params, message
):
    engine = tiny.engine(num_blocks=11)
    with pytest.raises(ValueError, match=message):
        engine.add_request("r", prompt, SamplingParams(**params))
    assert not engine.has_unfinished_requests()
    outputs = run_engine(engine, {"r": ([1, 2, 3, 4], GREEDY)})
    assert len(token_ids(outputs)["r"]) == 12


def test_a_request_id_in_use_is_refused(tiny):
    engine = tiny.engine()
    engine.add_request("r", [1], GREEDY)
    with pytest.raises(ValueError, match="'r' is already in use"):
        engine.add_request("r", [1], GREEDY)
    run_engine(engine, {})
    engine.add_request("r", [1], GREEDY)


def test_outputs_are_snapshots(tiny):
    engine = tiny.engine()
    engine.add_request("r", [1, 2, 3], GREEDY)
    lengths = []
    snapshots = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            snapshots.append(output)
            lengths.append(len(output.outputs[0].token_ids))
    assert lengths == list(range(1, 13))
    assert [len(s.outputs[0].token_ids) for s in snapshots] == lengths
    tokens = snapshots[4].outputs[0].token_ids
    assert tokens == list(snapshots[-1].outputs[0].token_ids)[:5]
    assert tokens[-1] == tokens[4]
    assert tokens[1:3] == list(tokens)[1:3]
    assert not hasattr(tokens, "append")


def test_stats_count_tokens_once_also_after_preemption(tiny):
    engine = tiny.engine(num_blocks=13)
    order = ["r17", "r33", "r5", "r4", "r3", "r1"]
    run_engine(engine, greedy_requests(), order)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.prompt_tokens == sum(LENGTHS)
    assert stats.generation_tokens == 12 * len(LENGTHS)
    assert stats.peak_held_blocks <= 12
    assert stats.free_blocks + stats.cached_blocks + stats.held_blocks == 12


def test_prefix_hits_do_not_change_tokens_and_are_reported(tiny):
    prompt = list(range(20, 43))
    requests = {
        f"r{i}": ([*prompt, i], SamplingParams(max_tokens=9, temperature=0))
        for i in range(4)
    }
    cold = run_engine(tiny.engine(enable_prefix_caching=False), requests)
    engine = tiny.engine()
    warm = run_engine(engine, requests)
    assert token_ids(warm) == token_ids(cold)
    assert [warm[f"r{i}"].num_cached_tokens for i in range(4)] == [0, 20, 20, 20]
    assert [output.num_cached_tokens for output in cold.values()] == [0] * 4
    stats = engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (4 * 24, 3 * 20)
    assert engine.reset_prefix_cache()
    assert engine.stats().cached_blocks == 0
    again = run_engine(engine, requests)
    assert token_ids(again) == token_ids(cold)
    assert again["r0"].num_cached_tokens == 0


def test_b124_cached_tokens_are_those_of_the_prompt_at_its_first_admission(tiny):
    prompt = list(range(20, 33))
    params = SamplingParams(n=3, seed=1, max_tokens=20, ignore_eos=True)
    # So few blocks that the later outputs are preempted and come back.
    engine = tiny.engine(num_blocks=20)
    run_engine(engine, {"cold": (prompt, SamplingParams(max_tokens=1))})
    engine.add_request("r", prompt, params)
    engine.add_request("rival", prompt[::-1], params)
    reported = []
    while engine.has_unfinished_requests():
        reported += [o.num_cached_tokens for o in engine.step() if o.request_id == "r"]
    assert engine.stats().num_preemptions > 0
    assert set(reported) == {12}
    assert engine.stats().prefix_hits == 12
    assert engine.stats().prefix_queries == 3 * 13


def test_b128_live_and_cached_blocks_are_told_apart(tiny):
    engine = tiny.engine()
    rng = np.random.default_rng(0)
    for number in range(48):
        prompt = [number, *rng.integers(0, 128, 3).tolist()]
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        engine.add_request(str(number), prompt, params)
    while engine.has_unfinished_requests():
        engine.step()
        stats = engine.stats()
        counts = (stats.free_blocks, stats.cached_blocks, stats.held_blocks)
        assert sum(counts) == stats.total_blocks == 63
    # One full block each, none of them shared.
    assert counts == (15, 48, 0)
    for number in range(4):
        engine.add_request(str(number), [number] * 9)
    engine.step()
    assert engine.stats().held_blocks > 0
    for number in range(4):
        engine.abort_request(str(number))
    assert (engine.stats().held_blocks, engine.stats().num_running) == (0, 0)


def test_prompt_logprobs_are_the_same_whatever_the_cache_holds(tiny):
    prompt = list(range(20, 29))
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2)
    engine = tiny.engine()
    results = [
        run_engine(engine, {"r": (prompt, params)})["r"].prompt_logprobs
        for _ in range(2)
    ]
    assert len(results[0]) == 9
    assert results[0][0] is None
    assert results[0] == results[1]


def test_salts_and_adapters_keep_requests_apart(tiny):
    engine = tiny.engine()
    prompt = list(range(20, 29))
    found = []
    for number, keys in enumerate(
        [{}, {"cache_salt": "a"}, {"adapter": "a"}, {"cache_salt": "a"}, {}]
    ):
        engine.add_request(str(number), prompt, SamplingParams(max_tokens=1), **keys)
        (output,) = [*engine.step(), *engine.step()]
        found.append(output.num_cached_tokens)
    assert found == [0, 0, 0, 8, 8]
    with pytest.raises(ValueError, match="cache_salt must be a string, bytes or an"):
        engine.add_request("x", prompt, cache_salt=1.5)
    with pytest.raises(ValueError, match=r"priority must be an integer, got 1\.5"):
        engine.add_request("x", prompt, priority=1.5)
    assert not engine.has_unfinished_requests()


def test_priorities_change_the_order_and_no_tokens(tiny, expected):
    engine = tiny.engine(num_blocks=16, policy="priority", max_num_seqs=2)
    outputs = []
    for number, (name, (prompt, params)) in enumerate(greedy_requests().items()):
        engine.add_request(name, prompt, params, priority=-number)
        outputs += engine.step()
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert engine.stats().num_preemptions > 0
    last = {output.request_id: output for output in outputs if output.finished}
    assert token_ids(last) == expected
    assert engine.stats().held_blocks == 0
