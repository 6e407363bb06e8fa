"""GGUF tokenizers: the ids of llama.cpp's own test pairs, and errors by name."""

import functools
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from convert.gguf_header import Header
from convert.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    end_of_generation_ids,
    tokenizer_config,
    tokenizer_json,
)
from tests.vocabularies import expected_pairs, tokenizer, vocabulary

NAMES = ("llama-spm", "llama-bpe", "qwen2", "gpt-2")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def header(**tables: Any) -> Header:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in tables.items()}
    return Header(path=Path("tiny.gguf"), metadata=metadata, tensors={})


def build(tables: Header) -> Tokenizer:
    json_text = tokenizer_json(tables)
    assert json_text is not None
    return Tokenizer.from_str(json_text)


def tiny_bpe(**tables: Any) -> Header:
    """Byte-level BPE over a, b and their pair, and two special tokens."""
    defaults = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab", "<s>", "</s>", "<tool>", "Ġ"],
        "token_type": [NORMAL] * 3 + [CONTROL] * 2 + [USER_DEFINED, NORMAL],
        "merges": ["a b"],
        "bos_token_id": 3,
        "eos_token_id": 4,
    }
    return header(**{**defaults, **tables})


def tiny_spm(pieces: dict[str, float], **tables: Any) -> Header:
    """SentencePiece over scored pieces; ids count on after 3 and the 256 bytes."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces]
    special = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    defaults = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_type": special + [NORMAL] * len(pieces),
        "scores": [0.0] * len(special) + list(pieces.values()),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return header(**{**defaults, **tables})


# Against the original tokenizers.


@pytest.mark.parametrize("name", NAMES)
def test_every_text_has_the_ids_of_the_original_tokenizer(name):
    real, pairs = tokenizer(name), expected_pairs(name)
    assert len(pairs) == 46
    for text, ids in pairs:
        assert real.encode(text, add_special_tokens=False).ids == ids, text


def test_smollm_splits_as_starcoder_does():
    """The rule of the two is the same in llama.cpp; only starcoder has test pairs."""
    starcoder = vocabulary("starcoder")
    metadata = {**starcoder.metadata, "tokenizer.ggml.pre": "smollm"}
    real = build(Header(path=starcoder.path, metadata=metadata, tensors={}))
    for text, ids in expected_pairs("starcoder"):
        assert real.encode(text, add_special_tokens=False).ids == ids, text


def test_smollm_takes_every_digit_alone():
    tables = {"tokens": ["1", "2", "12"], "merges": ["1 2"], "token_type": [NORMAL] * 3}
    assert build(tiny_bpe(**tables, pre="smollm")).encode("12").tokens == ["1", "2"]
    assert build(tiny_bpe(**tables, pre="gpt-2")).encode("12").tokens == ["12"]


def test_qwen2_composes_characters_first():
    real = tokenizer("qwen2")
    assert real.encode("e\u0301").ids == real.encode("\u00e9").ids


@pytest.mark.parametrize("name", NAMES)
def test_decoding_gives_the_text_back(name):
    for text, ids in expected_pairs(name):
        assert tokenizer(name).decode(ids) == text


@given(st.text())
def test_any_text_survives_byte_level_and_sentencepiece(text):
    for name in ("gpt-2", "llama-spm"):
        real = tokenizer(name)
        ids = real.encode(text, add_special_tokens=False).ids
        special = {"<|endoftext|>", "<s>", "</s>", "<unk>"}
        if not any(token in text for token in special):
            assert real.decode(ids) == text


@pytest.mark.parametrize(
    ("name", "begin"), [("llama-spm", 1), ("llama-bpe", 128000), ("qwen2", None)]
)
def test_a_beginning_token_is_added_where_the_model_wants_one(name, begin):
    real = tokenizer(name)
    plain = real.encode("Hello", add_special_tokens=False).ids
    expected = plain if begin is None else [begin, *plain]
    assert real.encode("Hello").ids == expected


def test_special_tokens_in_the_text_are_one_token_each_and_skipped_in_decoding():
    real = tokenizer("llama-bpe")
    ids = real.encode("<|start_header_id|>user<|end_header_id|>").ids
    assert ids == [128000, 128006, 882, 128007]
    assert real.decode(ids) == "user"


def test_the_end_of_turn_ends_generation_too():
    assert end_of_generation_ids(vocabulary("llama-bpe")) == (128001, 128009)
    assert end_of_generation_ids(vocabulary("qwen2")) == (151643, 151645)
    assert end_of_generation_ids(vocabulary("llama-spm")) == (2,)


def test_special_tokens_and_template_are_in_the_config():
    config = tokenizer_config(vocabulary("qwen2"))
    assert config["bos_token"] == config["eos_token"] == "<|endoftext|>"
    assert config["chat_template"].startswith("{% for message in messages %}")
    assert tokenizer_config(vocabulary("llama-spm")) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
    }


# SentencePiece by score.


def pieces_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule as it is told: the best pair first, the left one of two."""
    pieces = list((SPACE + text).replace(" ", SPACE))
    while True:
        pairs = [
            (scores.get(a + b), -i)
            for i, (a, b) in enumerate(itertools.pairwise(pieces))
        ]
        best = max((pair for pair in pairs if pair[0] is not None), default=None)
        if best is None:
            return pieces
        i = -best[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


TEXTS = st.text("aeinost -=\nн", max_size=30) | st.text(max_size=15)


@functools.cache
def llama_scores() -> dict[str, float]:
    tables = vocabulary("llama-spm").metadata
    columns = (
        tables[f"tokenizer.ggml.{c}"] for c in ("tokens", "scores", "token_type")
    )
    rows = zip(*columns, strict=True)
    return {token: score for token, score, kind in rows if kind == NORMAL}


def expected_by_score(text: str) -> list[str]:
    expected = []
    for piece in pieces_by_score(text, llama_scores()) if text else []:
        raw = [f"<0x{byte:02X}>" for byte in piece.encode()]
        expected += [piece] if piece in llama_scores() else raw
    return expected


@given(TEXTS)
def test_merges_made_of_scores_give_what_scores_give(text):
    encoding = tokenizer("llama-spm").encode(text, add_special_tokens=False)
    assert encoding.tokens == expected_by_score(text)


@pytest.mark.parametrize("letter", [" ", "-", "=", "\n", "o"])
def test_runs_of_one_character_merge_from_the_left(letter):
    for count in range(1, 70):
        text = letter * count
        encoding = tokenizer("llama-spm").encode(text, add_special_tokens=False)
        assert encoding.tokens == expected_by_score(text)


def test_a_better_score_merges_first():
    pieces = {SPACE: -9.0, "a": -9.0, "b": -9.0, "c": -9.0, "ab": -2.0, "bc": -1.0}
    assert build(tiny_spm(pieces)).encode("abc").tokens == ["<s>", SPACE, "a", "bc"]


def test_the_space_in_front_may_be_left_out():
    pieces = {SPACE: -9.0, "a": -9.0, SPACE + "a": -1.0}
    with_space, without = (
        build(tiny_spm(pieces, add_space_prefix=prefix, add_bos_token=False))
        for prefix in (True, False)
    )
    assert with_space.encode("a a").tokens == [SPACE + "a", SPACE + "a"]
    assert without.encode("a a").tokens == ["a", SPACE + "a"]
    assert with_space.decode(with_space.encode("a a").ids) == "a a"
    assert without.decode(without.encode(" a a").ids) == " a a"


def test_a_space_is_put_in_front_after_each_special_token_too():
    pieces = {SPACE: -9.0, "a": -9.0, SPACE + "a": -1.0}
    real = build(tiny_spm(pieces))
    expected = ["<s>", SPACE + "a", "</s>", SPACE + "a"]
    assert real.encode("a</s>a").tokens == expected


def test_text_that_looks_like_a_byte_token_is_text():
    pieces = {SPACE: -9.0, **dict.fromkeys("<0x41>", -9.0)}
    pieces |= {"<0": -1.0, "<0x": -2.0, "<0x4": -3.0, "<0x41": -4.0}
    encoding = build(tiny_spm(pieces)).encode("<0x41>", add_special_tokens=False)
    assert encoding.tokens == [SPACE, "<0x41", ">"]


def test_unknown_characters_become_bytes():
    real = build(tiny_spm({SPACE: -9.0}))
    ids = real.encode("é", add_special_tokens=False).ids
    assert [real.id_to_token(i) for i in ids] == [SPACE, "<0xC3>", "<0xA9>"]
    assert real.decode(ids) == "é"


# Flags and errors.


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ["ab"]),
        ({"add_bos_token": True}, ["<s>", "ab"]),
        ({"add_eos_token": True}, ["ab", "</s>"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<s>", "ab", "</s>"]),
        ({"pre": "llama-bpe"}, ["<s>", "ab"]),
        ({"pre": "llama3"}, ["<s>", "ab"]),
        ({"pre": "llama-v3", "add_bos_token": False}, ["ab"]),
        ({"pre": "smollm"}, ["ab"]),
    ],
)
def test_begin_and_end_tokens_follow_the_flags(flags, expected):
    assert build(tiny_bpe(**flags)).encode("ab").tokens == expected


def test_only_llama3_takes_a_whole_word_that_its_merges_do_not_reach():
    tables = {"merges": [], "add_bos_token": False}
    assert build(tiny_bpe(**tables, pre="llama-bpe")).encode("ab").tokens == ["ab"]
    assert build(tiny_bpe(**tables, pre="gpt-2")).encode("ab").tokens == ["a", "b"]


def test_user_defined_tokens_match_whole_and_are_not_skipped():
    real = build(tiny_bpe())
    ids = real.encode("a<tool>b</s>").ids
    assert ids == [0, 5, 1, 4]
    assert real.decode(ids) == "a<tool>b"


def test_a_file_without_a_tokenizer_has_none():
    assert tokenizer_json(header()) is None
    assert tokenizer_json(header(model="none")) is None


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (tiny_bpe(model="bert"), "tokenizer model 'bert' is unknown"),
        (tiny_bpe(pre="falcon"), "pre-tokenizer 'falcon' is unknown; known are gpt-2"),
        (header(model="gpt2", tokens=["a"]), "pre-tokenizer 'none' is unknown"),
        (tiny_bpe(tokens=[]), "tokenizer.ggml.tokens is missing"),
        (tiny_bpe(tokens=["a", "b", "a"]), "token 'a' occurs twice"),
        (tiny_bpe(token_type=[1, 1]), "token_type has 2 entries for 7 tokens"),
        (tiny_bpe(merges=["a c"]), "merge 'a c' is not of two tokens"),
        (tiny_bpe(merges=["b a"]), "merge 'b a' is not of two tokens"),
        (tiny_bpe(merges=["ab"]), "merge 'ab' is not of two tokens"),
        (tiny_bpe(add_sep_token=True), "tokenizer.ggml.add_sep_token is set"),
        (tiny_bpe(add_bos_token=True, bos_token_id=99), "bos_token_id is 99"),
        (tiny_spm({"a": 0.0}, scores=None), "needs tokenizer.ggml.scores"),
        (
            header(model="llama", tokens=["a"], scores=[0.0], token_type=[1]),
            "needs all 256 byte tokens, 256 are missing, the first <0x00>",
        ),
        (
            tiny_spm({"a": 0.0}, remove_extra_whitespaces=True),
            "remove_extra_whitespaces is set",
        ),
    ],
)
def test_what_is_not_known_is_an_error(tables, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        tokenizer_json(tables)
    assert str(caught.value).startswith("tiny.gguf: ")
