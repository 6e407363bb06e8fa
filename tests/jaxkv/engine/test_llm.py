import itertools

import numpy as np
import pytest

from jaxkv import LLM, SamplingParams
from tests.checkpoints import write_tiny_checkpoint

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    checkpoint = write_tiny_checkpoint(tmp_path_factory.mktemp("llm") / "checkpoint")
    return LLM(
        checkpoint,
        num_blocks=64,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        warmup="lazy",
        debug_blocks=True,
    )


@pytest.fixture(autouse=True)
def nothing_is_left(llm):
    yield
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.stats().held_blocks == 0


def tokens_of(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_a_prompt_may_be_text_or_ids_alone_or_in_a_list(llm):
    text = "hello"
    ids = llm.tokenizer.encode(text)
    expected = tokens_of(llm.generate(text, GREEDY, use_tqdm=False))
    assert len(expected) == 1
    assert len(expected[0]) == 8
    for prompts in (ids, [text], [ids], [ids, text], [tuple(ids)]):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        count = 2 if prompts == [ids, text] else 1
        assert tokens_of(outputs) == expected * count
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = ["a" * 100, "b", "c" * 30, "d", "e" * 5, "f"]
    params = [
        SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True)
        for n in (3, 9, 1, 5, 2, 7)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [3, 9, 1, 5, 2, 7]
    decoded = [llm.tokenizer.decode(list(o.prompt_token_ids)) for o in outputs]
    assert decoded == prompts


def test_the_text_is_the_decoded_tokens_and_streams_to_the_same(llm):
    (output,) = llm.generate("hello", GREEDY, use_tqdm=False)
    completion = output.outputs[0]
    prompt = llm.tokenizer.encode("hello")
    everything = llm.tokenizer.decode(prompt + list(completion.token_ids))
    assert everything == "hello" + completion.text
    texts = [o.outputs[0].text for o in llm.stream("hello", GREEDY)]
    assert texts[-1] == completion.text
    for shorter, longer in itertools.pairwise(texts):
        assert longer.startswith(shorter)


def test_a_stop_string_ends_the_text_before_it_streamed_or_not(llm):
    params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)
    text = llm.generate("hello", params, use_tqdm=False)[0].outputs[0].text
    plain = [c for c in text if c != "\ufffd"]
    stop = plain[4]
    params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True, stop=stop)
    (output,) = llm.generate("hello", params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    streamed = [o.outputs[0].text for o in llm.stream("hello", params)]
    assert streamed[-1] == completion.text
    assert not any(stop in part for part in streamed)
    kept = SamplingParams(
        max_tokens=40,
        seed=5,
        ignore_eos=True,
        stop=stop,
        include_stop_str_in_output=True,
    )
    (output,) = llm.generate("hello", kept, use_tqdm=False)
    assert output.outputs[0].text == text[: text.index(stop) + 1]


def test_chat_uses_the_template_and_answers_one_or_several_conversations(llm):
    messages = [{"role": "user", "content": "hi"}]
    prompt = llm.encode_chat(messages)
    assert prompt[0] == 256
    assert llm.tokenizer.decode(prompt) == "user: hi\nassistant: "
    (answer,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert tokens_of([answer]) == tokens_of(llm.generate([prompt], GREEDY, False))
    assert tokens_of(llm.chat([messages, messages], GREEDY, False)) == tokens_of(
        [answer, answer]
    )


def test_the_padding_of_the_vocabulary_is_never_drawn_and_never_accepted(llm):
    params = SamplingParams(max_tokens=64, temperature=100.0, seed=1, ignore_eos=True)
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    drawn = {token for tokens in tokens_of(outputs) for token in tokens}
    assert len(drawn) > 40
    assert max(drawn) <= 257
    with pytest.raises(ValueError, match=r"outside the vocabulary of 258: \[258\]"):
        llm.generate([[258]], GREEDY)


def test_nothing_starts_if_any_prompt_is_wrong(llm):
    before = llm.engine.stats()
    with pytest.raises(ValueError, match="prompt 1: the prompt is empty"):
        llm.generate(["fine", []], GREEDY)
    with pytest.raises(ValueError, match="prompt 2: the prompt has 256 tokens"):
        llm.stream(["fine", "fine", "x" * 256], GREEDY)
    with pytest.raises(ValueError, match="1 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(ValueError, match="role"):
        llm.chat([{"content": "hi"}], GREEDY)
    assert llm.engine.stats() == before


def test_closing_a_stream_aborts_what_is_left(llm):
    stream = llm.stream(["hello", "world"], GREEDY)
    next(stream)
    stream.close()
    assert llm.engine.stats().num_running == 0
    llm.engine.step()  # reports the aborts


def test_a_progress_bar_counts_requests(llm, capsys):
    llm.generate(["a", "b"], GREEDY)
    assert "2/2" in capsys.readouterr().err


def test_a_folder_that_is_no_checkpoint_and_a_field_that_is_none(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        LLM(tmp_path)
    with pytest.raises(TypeError, match="blocks"):
        LLM(tmp_path, blocks=3)


def test_streams_read_in_turns_and_a_call_inside_a_stream_all_end(llm):
    expected = tokens_of(llm.generate(["hello", "world"], GREEDY, use_tqdm=False))
    hello, world = llm.stream("hello", GREEDY), llm.stream("world", GREEDY)
    last = [None, None]
    for last[0], last[1] in zip(hello, world, strict=True):
        pass
    assert tokens_of(last) == expected
    outer = []
    for output in llm.stream("hello", GREEDY):
        outer.append(output)
        if len(outer) == 3:
            inner = llm.generate("world", GREEDY, use_tqdm=False)
    assert tokens_of([outer[-1], *inner]) == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (b"hello", "prompts must be a text"),
        (None, "prompts must be a text"),
        ({"a": 1}, "prompts must be a text"),
        (["a", None], "prompt 1 must be a text or a list of token ids, got None"),
        ([[1, 2], 3], "prompt 1 must be a text or a list of token ids, got 3"),
        ("bad \udcff", "not valid Unicode"),
    ],
)
def test_prompts_of_a_wrong_kind_are_named(llm, prompts, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, GREEDY)


def test_numpy_prompts_are_taken_and_wrong_sampling_params_are_not(llm):
    ids = llm.tokenizer.encode("hello")
    outputs = llm.generate([np.array(ids), np.array(ids)], GREEDY, use_tqdm=False)
    assert tokens_of(outputs) == 2 * tokens_of(llm.generate(ids, GREEDY, False))
    for wrong in ({"max_tokens": 2}, [None], "x"):
        with pytest.raises(ValueError, match="sampling_params must be"):
            llm.generate(["a"], wrong)
    for wrong in (None, []):
        with pytest.raises(ValueError, match="messages must be"):
            llm.chat(wrong, GREEDY)
