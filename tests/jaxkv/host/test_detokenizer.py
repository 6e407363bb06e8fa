"""Streaming text: whatever is shown is final, and it all adds up to the whole."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from jaxkv.host.detokenizer import Detokenizer
from tests.vocabularies import tokenizer

FAMILY = "👩‍👩‍👧‍👦"
HARD_TEXTS = {
    "emoji": "I 😀 you 🦙🦙!",
    "hangul": "한국어 테스트, 안녕하세요",
    "combining marks": "e\u0301 a\u0300\u0323 \u0e01\u0e33",
    "zwj family": f"a {FAMILY}{FAMILY} b",
    "khmer": "កាន់តែពិសេសអាច",
    "leading space": "  two spaces,\n\n and lines \t",
    "true replacement": "a \ufffd b\ufffd\ufffd c",
    "rare characters in a row": "😀\ufffd千𝕏\u2060🏳️‍🌈x",
}


def characters(ids: list[int]) -> str:
    """A tokenizer of one character a token."""
    return "".join(map(chr, ids))


def stream(detokenizer: Detokenizer, ids) -> tuple[str, str | None, list[str]]:
    """Append all; return the final text, the stop string, and what was shown when."""
    shown, matched = [], None
    for token_id in ids:
        matched = detokenizer.append(token_id)
        shown.append(detokenizer.text)
        if matched is not None:
            break
    detokenizer.finish()
    shown.append(detokenizer.text)
    for before, after in itertools.pairwise(shown):
        assert after.startswith(before)
    return detokenizer.text, matched, shown


def stream_text(text: str, **options) -> tuple[str, str | None, list[str]]:
    return stream(Detokenizer(characters, [], **options), map(ord, text))


def stream_pieces(pieces: list[str], **options) -> tuple[str, str | None, list[str]]:
    """Stream with a tokenizer whose token i is `pieces[i]`."""

    def decode(ids: list[int]) -> str:
        return "".join(pieces[i] for i in ids)

    return stream(Detokenizer(decode, [], **options), range(len(pieces)))


def raw_bytes(ids: list[int]) -> str:
    """A tokenizer of one byte a token, that decodes as byte-level BPE does."""
    return bytes(ids).decode("utf-8", errors="replace")


def encode(real: Tokenizer, text: str) -> list[int]:
    return real.encode(text, add_special_tokens=False).ids


# Characters over several tokens.


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm"])
@pytest.mark.parametrize("text", HARD_TEXTS.values(), ids=HARD_TEXTS.keys())
@pytest.mark.parametrize("prompt", ["", "Hi", "x 😀", "<s><s>"])
def test_streamed_text_is_the_decoded_text_after_the_prompt(name, text, prompt):
    real = tokenizer(name)
    prompt_ids, ids = encode(real, prompt), encode(real, text)
    final, _, _ = stream(Detokenizer(real.decode, prompt_ids), ids)
    assert final == real.decode(prompt_ids + ids)[len(real.decode(prompt_ids)) :]


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm"])
def test_a_broken_character_is_never_shown_while_it_may_be_completed(name):
    real = tokenizer(name)
    ids = encode(real, f"{FAMILY} 🦙한")
    _, _, shown = stream(Detokenizer(real.decode, encode(real, "x")), ids)
    assert not any("\ufffd" in text for text in shown)


def test_each_character_is_shown_as_soon_as_it_is_complete():
    ids = list("a😀b".encode())
    _, _, shown = stream(Detokenizer(raw_bytes, []), ids)
    assert shown == ["a", "a", "a", "a", "a😀", "a😀b", "a😀b"]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_cut_off_by_the_end_is_flushed_once(cut):
    ids = [*b"ab ", *"😀".encode()[:cut]]
    detokenizer = Detokenizer(raw_bytes, [])
    for token_id in ids:
        detokenizer.append(token_id)
    assert detokenizer.text == "ab "
    detokenizer.finish()
    detokenizer.finish()
    assert detokenizer.text == raw_bytes(ids) == "ab \ufffd"


def test_a_true_replacement_character_is_shown_with_the_next_token():
    text = "a\ufffdb"
    _, _, shown = stream_text(text)
    assert shown == ["a", "a", "a\ufffdb", "a\ufffdb"]


def test_bytes_that_are_no_characters_are_not_held_back_for_ever():
    ids = [0x80] * 100
    detokenizer = Detokenizer(raw_bytes, [])
    lags = []
    for count, token_id in enumerate(ids, 1):
        detokenizer.append(token_id)
        lags.append(count - len(detokenizer.text))
    assert max(lags) <= 8
    detokenizer.finish()
    assert detokenizer.text == "\ufffd" * 100


@pytest.mark.parametrize("count", range(20, 30))
def test_a_character_is_completed_after_a_long_run_of_broken_bytes(count):
    ids = [0x80] * count + list("😀!".encode())
    final, _, _ = stream(Detokenizer(raw_bytes, []), ids)
    assert final == "\ufffd" * count + "😀!"


def test_bytes_of_sentencepiece_that_are_no_characters_leave_the_text_before_them():
    real = tokenizer("llama-spm")
    emoji = [real.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()]
    hi = encode(real, "hi")
    final, _, _ = stream(Detokenizer(real.decode, hi), [*emoji, emoji[0], *hi])
    assert final == "😀\ufffd hi"


# The prompt.


def test_the_prompt_is_never_in_the_text():
    final, _, _ = stream(Detokenizer(characters, [*map(ord, "prompt")]), [ord("x")])
    assert final == "x"


def test_the_space_between_prompt_and_output_is_kept():
    real = tokenizer("llama-spm")
    prompt, world = encode(real, "Hello"), encode(real, "world")
    assert real.decode(world) == "world"
    assert stream(Detokenizer(real.decode, prompt), world)[0] == " world"
    assert stream(Detokenizer(real.decode, []), world)[0] == "world"


def test_the_space_is_kept_after_a_prompt_that_ends_in_special_tokens():
    real = tokenizer("llama-spm")
    world = encode(real, "world")
    prompt = encode(real, "Hello") + [real.token_to_id("</s>")] * 9
    assert stream(Detokenizer(real.decode, prompt), world)[0] == " world"


@pytest.mark.parametrize("broken", [1, 2, 3])
@pytest.mark.parametrize("before", ["", "ab", "한"])
def test_a_character_that_the_prompt_breaks_off_belongs_to_the_output(broken, before):
    whole = "😀".encode()
    prompt = [*before.encode(), *whole[:broken]]
    final, _, _ = stream(Detokenizer(raw_bytes, prompt), [*whole[broken:], ord("c")])
    assert final == "😀c"


@pytest.mark.parametrize("broken", [1, 2, 3])
def test_sentencepiece_too_completes_a_character_of_the_prompt(broken):
    real = tokenizer("llama-spm")
    whole = [real.token_to_id(f"<0x{byte:02X}>") for byte in "千😀千".encode()]
    prompt, output = whole[: 3 + broken], whole[3 + broken :]
    final, _, _ = stream(Detokenizer(real.decode, prompt), output)
    assert final == "😀千"


def test_a_true_replacement_character_of_the_prompt_stays_the_prompts():
    prompt = list("ab\ufffd".encode())
    final, _, _ = stream(Detokenizer(raw_bytes, prompt), list(b"cd"))
    assert final == "cd"


def test_a_replacement_character_before_many_empty_tokens_stays_the_prompts():
    def decode(ids: list[int]) -> str:
        return raw_bytes([i for i in ids if i < 256])

    prompt = list("ab\ufffd".encode())
    final, _, _ = stream(Detokenizer(decode, prompt), [*[256] * 20, ord("c")])
    assert final == "c"


def test_special_tokens_are_as_decode_has_them():
    real = tokenizer("gpt-2")
    end = real.token_to_id("<|endoftext|>")
    ids = [*encode(real, "one"), end, *encode(real, " two"), end]

    def with_special(ids):
        return real.decode(ids, skip_special_tokens=False)

    assert stream(Detokenizer(real.decode, [end]), ids)[0] == "one two"
    final, _, _ = stream(Detokenizer(with_special, [end]), ids)
    assert final == "one<|endoftext|> two<|endoftext|>"


@pytest.mark.parametrize("filler", [b"", b"\x80"], ids=["empty", "broken"])
def test_only_a_small_window_is_decoded(filler):
    """Also where tokens add nothing for long, or nothing but broken characters."""
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        pieces = [filler if i == 256 else bytes([i]) for i in ids]
        return b"".join(pieces).decode("utf-8", errors="replace")

    ids = [*b"abc", *[256] * 200, *"d😀e".encode(), *b"x" * 200]
    final, _, _ = stream(Detokenizer(decode, [*b"prompt" * 50]), ids)
    broken = "\ufffd" * 200 if filler else ""
    assert final == f"abc{broken}d😀e" + "x" * 200
    assert longest <= 20


def test_a_broken_character_before_many_empty_tokens_is_shown_once():
    def decode(ids: list[int]) -> str:
        return raw_bytes([i for i in ids if i < 256])

    ids = [*b"a\xf0", *[256] * 20, *b"bc"]
    final, _, _ = stream(Detokenizer(decode, [*b"x"]), ids)
    assert final == "a\ufffdbc"


@given(st.lists(st.integers(0, 50256), max_size=40), st.text(max_size=8), st.data())
def test_any_byte_level_tokens_stream_to_what_they_decode_to(ids, prompt, data):
    real = tokenizer("gpt-2")
    split = data.draw(st.lists(st.integers(188, 255), max_size=6))  # single bytes
    ids = split + ids
    prompt_ids = encode(real, f"{prompt}.")
    final, _, _ = stream(Detokenizer(real.decode, prompt_ids), ids)
    assert final == real.decode(prompt_ids + ids)[len(real.decode(prompt_ids)) :]


@given(st.text(max_size=30), st.text(max_size=8))
def test_any_text_of_sentencepiece_streams_to_what_it_decodes_to(text, prompt):
    real = tokenizer("llama-spm")
    prompt_ids, ids = encode(real, prompt), encode(real, text)
    final, _, _ = stream(Detokenizer(real.decode, prompt_ids), ids)
    assert final == real.decode(prompt_ids + ids)[len(real.decode(prompt_ids)) :]


@given(st.lists(st.integers(0, 31999) | st.integers(3, 258), max_size=40))
def test_any_sentencepiece_tokens_stream_to_text_that_only_grows(ids):
    real = tokenizer("llama-spm")
    final, _, _ = stream(Detokenizer(real.decode, [1]), ids)
    whole = real.decode([1, *ids])
    if "\ufffd" not in whole:
        assert final == whole


@given(
    st.lists(st.sampled_from(b"a\x80\x98\x9f\xe5\xf0\xff"), max_size=60),
    st.integers(0, 10),
)
def test_any_bytes_stream_to_what_they_decode_to(data, prompt_size):
    prompt, ids = [*data[:prompt_size], ord(".")], data[prompt_size:]
    final, _, _ = stream(Detokenizer(raw_bytes, prompt), ids)
    assert final == raw_bytes(prompt + ids)[len(raw_bytes(prompt)) :]


# Stop strings.


def test_the_beginning_of_a_stop_string_is_never_shown():
    pieces = ["ABC", "DEF", "G", "HI", "J", "K"]
    final, matched, shown = stream_pieces(pieces, stop=["DEFGHIJ"])
    assert (final, matched) == ("ABC", "DEFGHIJ")
    assert set(shown) == {"ABC"}


def test_a_near_miss_is_shown_at_once():
    _, matched, shown = stream_pieces(["ABC", "DEF", "X"], stop=["DEFGHIJ"])
    assert matched is None
    assert shown == ["ABC", "ABC", "ABCDEFX", "ABCDEFX"]


def test_a_near_miss_that_begins_the_stop_string_again_holds_only_that():
    _, _, shown = stream_text("aaab", stop=["aac"])
    assert shown == ["", "", "a", "aaab", "aaab"]


def test_held_text_is_shown_at_the_end():
    detokenizer = Detokenizer(characters, [], stop=["DEFG"])
    for letter in "ABCDEF":
        detokenizer.append(ord(letter))
    assert detokenizer.text == "ABC"
    detokenizer.finish()
    assert detokenizer.text == "ABCDEF"


def test_a_stop_string_in_the_middle_of_a_token_cuts_the_token():
    assert stream_pieces(["one", " two\n\nthree"], stop=["\n\n"])[0] == "one two"


def test_the_stop_string_is_kept_where_asked_for():
    final, matched, _ = stream_pieces(
        ["one", " two\n", "\nthree"], stop=["\n\n"], include_stop_str_in_output=True
    )
    assert (final, matched) == ("one two\n\n", "\n\n")


def test_nothing_follows_a_stop_string():
    detokenizer = Detokenizer(characters, [], stop=["b"])
    assert [detokenizer.append(ord(letter)) for letter in "ab"] == [None, "b"]
    detokenizer.finish()
    assert detokenizer.text == "a"
    with pytest.raises(AssertionError, match="after the end"):
        detokenizer.append(ord("c"))


@pytest.mark.parametrize("stop", [["ab", "abc"], ["abc", "ab"]])
@pytest.mark.parametrize("pieces", [["xabcd"], ["xa", "bcd"], ["x", "a", "b", "c"]])
def test_of_a_stop_string_and_its_prefix_the_prefix_matches(stop, pieces):
    final, matched, _ = stream_pieces(pieces, stop=stop)
    assert (final, matched) == ("x", "ab")


def test_the_stop_string_that_is_complete_first_matches():
    assert stream_text("a bcde", stop=["bcde", "cd"])[:2] == ("a b", "cd")
    assert stream_pieces(["a bcde"], stop=["bcde", "cd"])[:2] == ("a b", "cd")


def test_of_stop_strings_that_end_together_the_longest_matches():
    assert stream_text("abcd", stop=["c", "bc"])[:2] == ("a", "bc")


def test_a_stop_string_does_not_match_in_or_across_the_prompt():
    prompt = [*map(ord, "stop st")]
    detokenizer = Detokenizer(characters, prompt, stop=["stop"])
    assert stream(detokenizer, map(ord, "op!"))[:2] == ("op!", None)


def test_a_stop_string_of_split_characters_matches():
    ids = list("a🦙b🦙🦙c".encode())
    final, matched, _ = stream(Detokenizer(raw_bytes, [], stop=["🦙🦙"]), ids)
    assert (final, matched) == ("a🦙b", "🦙🦙")


def test_a_stop_string_before_a_broken_character_matches_at_once():
    pieces = [b"a", b"\nb\xf0", b"\x9f\x98\x80"]

    def decode(ids: list[int]) -> str:
        return b"".join(pieces[i] for i in ids).decode("utf-8", errors="replace")

    detokenizer = Detokenizer(decode, [], stop=["\n"])
    assert [detokenizer.append(i) for i in range(2)] == [None, "\n"]


def test_stop_strings_complete_within_min_tokens_do_not_match():
    options = {"stop": ["b"], "min_tokens": 3}
    assert stream_text("abcdbe", **options)[:2] == ("abcd", "b")
    assert stream_text("abbbbb", **options)[:2] == ("abb", "b")


def test_a_stop_string_may_begin_within_min_tokens():
    assert stream_text("abcd", stop=["bcd"], min_tokens=3)[:2] == ("a", "bcd")


def test_an_empty_stop_string_is_an_error():
    with pytest.raises(ValueError, match=re.escape("got ['a', '']")):
        Detokenizer(characters, [], stop=["a", ""])


def expected_stop(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """Read the text one character at a time, keeping nothing in mind."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(
    st.lists(st.text("abé😀", max_size=4), max_size=8),
    st.lists(st.text("abé😀", min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_the_text_does_not_depend_on_how_it_is_cut_into_tokens(pieces, stop, include):
    options = {"stop": stop, "include_stop_str_in_output": include}
    expected = expected_stop("".join(pieces), stop, include)
    final, matched, shown = stream_pieces(pieces, **options)
    assert (final, matched) == expected
    ids = "".join(pieces).encode()
    by_bytes = stream(Detokenizer(raw_bytes, [], **options), ids)
    assert by_bytes[:2] == expected
    assert all(expected[0].startswith(text) for text in shown)
