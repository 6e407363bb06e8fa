import dataclasses
import math

import numpy as np
import pytest

from jaxkv.host.request import Request, SamplingParams, max_total_tokens

EOS = 2


def make_request(prompt=(5, 6, 7), *, limit=None, text_stop=None, **params):
    sampling = SamplingParams(**params)
    limit = len(prompt) + (sampling.max_tokens or 100) if limit is None else limit
    return Request(
        "r",
        list(prompt),
        sampling,
        max_total_tokens=limit,
        eos_token_ids=(EOS, 9),
        text_stop=text_stop,
    )


def feed(request, *tokens):
    for token in tokens:
        assert request.finish_reason is None
        request.append_token(token)
    return request.finish_reason, request.stop_reason


class StopAfter:
    """Reports `string` when a given token arrives."""

    def __init__(self, token, string="END"):
        self.token, self.string, self.seen = token, string, []

    def append(self, token_id):
        self.seen.append(token_id)
        return self.string if token_id == self.token else None


def test_defaults_are_those_of_the_design():
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "logprobs": None,
        "prompt_logprobs": None,
    }


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", (0, -1, True, 1.5, None)),
        ("temperature", (-0.1, math.nan, math.inf, "1", True, None)),
        ("top_k", (-2, 1.5, True)),
        ("top_p", (0, 0.0, 1.01, -1, math.nan)),
        ("min_p", (-0.01, 1.01, math.nan)),
        ("repetition_penalty", (0, -1, math.inf)),
        ("presence_penalty", (-2.1, 2.1, math.nan)),
        ("frequency_penalty", (-2.1, 2.1, math.nan)),
        ("seed", (-1, 2**32, 1.0, True)),
        ("max_tokens", (0, -1, 1.5, True)),
        ("min_tokens", (-1, True, None)),
        ("stop", ("", ["a", ""], [3], 3)),
        ("stop_token_ids", ([-1], [1.5], [True], 3, "3")),
        ("ignore_eos", (1, None)),
        ("include_stop_str_in_output", (0,)),
        ("skip_special_tokens", ("yes",)),
        ("logprobs", (-1, 21, True)),
        ("prompt_logprobs", (-1, 21, 0.5)),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field, values):
    for value in values:
        with pytest.raises(ValueError, match=field):
            SamplingParams(**{field: value})


def test_the_message_has_the_offending_value():
    with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\], got 1\.5"):
        SamplingParams(top_p=1.5)
    with pytest.raises(ValueError, match="max_tokens must be an integer >= 1, got 0"):
        SamplingParams(max_tokens=0)
    with pytest.raises(ValueError, match=r"logprobs must be .* in \[0, 20\], got 21"):
        SamplingParams(logprobs=21)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", (0, 0.0, 100.0)),
        ("top_k", (-1, 0, 1, 10**6)),
        ("top_p", (1, 1e-9)),
        ("min_p", (0, 1)),
        ("presence_penalty", (-2, 2)),
        ("seed", (0, 2**32 - 1, None)),
        ("max_tokens", (1, None)),
        ("logprobs", (0, 20, None)),
        ("prompt_logprobs", (0, 20, None)),
    ],
)
def test_the_ends_of_a_range_are_allowed(field, values):
    for value in values:
        assert getattr(SamplingParams(**{field: value}), field) == value


def test_stop_is_stored_as_tuples():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)


def test_numbers_of_numpy_are_stored_as_those_of_python():
    params = SamplingParams(
        seed=np.int64(3), temperature=np.float32(0.5), stop_token_ids=np.array([4])
    )
    assert (params.seed, params.temperature, params.stop_token_ids) == (3, 0.5, (4,))
    assert [type(params.seed), type(params.temperature)] == [int, float]


def test_params_are_frozen_and_hashable():
    params = SamplingParams(stop=["a"], stop_token_ids=[1])
    assert hash(params) == hash(SamplingParams(stop=("a",), stop_token_ids=(1,)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2


def test_min_tokens_may_not_exceed_max_tokens():
    assert SamplingParams(min_tokens=16).min_tokens == 16
    assert SamplingParams(min_tokens=17, max_tokens=None).min_tokens == 17
    with pytest.raises(ValueError, match="min_tokens 17 must be at most max_tokens 16"):
        SamplingParams(min_tokens=17)


def test_greedy_decoding_gives_one_output_only():
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy
    with pytest.raises(ValueError, match=r"n must be 1 with greedy .* got 2"):
        SamplingParams(temperature=0, n=2)


def test_a_request_keeps_prompt_and_output_in_one_list():
    request = make_request()
    feed(request, 10, 11)
    assert request.token_ids == [5, 6, 7, 10, 11]
    assert request.prompt_token_ids == [5, 6, 7]
    assert request.output_token_ids == [10, 11]
    assert (request.num_prompt_tokens, request.num_output_tokens) == (3, 2)


@pytest.mark.parametrize("eos", [EOS, 9])
def test_every_eos_id_stops_and_stays_in_the_output(eos):
    request = make_request()
    assert feed(request, 10, eos) == ("stop", None)
    assert request.output_token_ids == [10, eos]


def test_a_users_stop_id_is_the_stop_reason():
    request = make_request(stop_token_ids=[30])
    assert request.stop_token_ids == {EOS, 9, 30}
    assert feed(request, 30) == ("stop", 30)


def test_an_eos_id_that_the_user_lists_too_has_no_stop_reason():
    assert feed(make_request(stop_token_ids=[EOS]), EOS) == ("stop", None)


def test_ignore_eos_covers_all_eos_ids_and_no_stop_id():
    request = make_request(ignore_eos=True, stop_token_ids=[9])
    assert request.stop_token_ids == {9}
    assert feed(request, EOS, EOS, 9) == ("stop", 9)


def test_length_ends_at_max_total_tokens():
    assert feed(make_request(limit=5), 10) == (None, None)
    assert feed(make_request(limit=5), 10, 10) == ("length", None)


def test_a_stop_on_the_last_token_is_a_stop():
    assert feed(make_request(limit=5), 10, EOS) == ("stop", None)


def test_no_stop_acts_within_min_tokens():
    request = make_request(min_tokens=2, stop_token_ids=[30])
    assert feed(request, EOS, 30, EOS) == ("stop", None)
    stop = StopAfter(20)
    request = make_request(min_tokens=2, text_stop=stop)
    assert feed(request, 20, 20, 20) == ("stop", "END")


def test_length_acts_within_min_tokens():
    assert feed(make_request(limit=5, min_tokens=4), 10, EOS) == ("length", None)


def test_text_stop_sees_every_token_and_names_the_string():
    stop = StopAfter(20)
    request = make_request(text_stop=stop)
    assert feed(request, 10, 11, 20) == ("stop", "END")
    assert stop.seen == [10, 11, 20]


def test_a_stop_id_comes_before_a_stop_string():
    stop = StopAfter(30)
    request = make_request(text_stop=stop, stop_token_ids=[30])
    assert feed(request, 30) == ("stop", 30)
    assert stop.seen == []  # the text of a stop id is not part of the output


def test_the_text_of_a_stop_id_is_kept_if_wanted():
    stop = StopAfter(99)
    request = make_request(
        text_stop=stop, stop_token_ids=[30], include_stop_str_in_output=True
    )
    assert feed(request, 30) == ("stop", 30)
    assert stop.seen == [30]


def limit(prompt_len, max_tokens, max_model_len=100, num_blocks=11, block_size=4):
    return max_total_tokens(
        prompt_len,
        max_tokens,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=block_size,
    )


def test_limit_is_the_smallest_of_request_model_and_pool():
    assert limit(10, 5) == 15
    assert limit(10, 25, max_model_len=20) == 20
    assert limit(10, None, max_model_len=20) == 20
    assert limit(10, None) == 41  # 40 slots, and the last token needs none


def test_a_prompt_that_fills_the_pool_may_generate_one_token():
    assert limit(40, 1) == 41
    assert limit(40, None) == 41
    with pytest.raises(ValueError, match="needs 41 slots, but the pool has 40"):
        limit(40, 2)
    with pytest.raises(ValueError, match="needs 41 slots, but the pool has 40"):
        limit(41, None)


def test_b27_a_request_larger_than_the_pool_is_refused_with_the_numbers():
    # The prompt alone is too large; then the prompt fits and its output does not.
    message = r"60 tokens .* max_tokens 1 .* needs 60 slots, but the pool has 40 "
    with pytest.raises(ValueError, match=message):
        limit(60, 1)
    message = r"30 tokens .* max_tokens 20 .* needs 49 slots, .*\(10 blocks of 4\)"
    with pytest.raises(ValueError, match=message):
        limit(30, 20)
    assert limit(30, 20, max_model_len=41) == 41


def test_a_prompt_as_long_as_the_model_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="has 32 tokens, but max_model_len is 32"):
        limit(32, None, max_model_len=32)
    assert limit(31, None, max_model_len=32) == 32


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="the prompt is empty"):
        limit(0, 4)
