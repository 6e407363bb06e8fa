"""Token ids to text, one token at a time, and stop strings found on the way.

A token is not a piece of text: a character may be spread over several tokens, and a
tokenizer may drop a leading space, so tokens are never decoded alone. What is decoded
is a small *window* that moves along:

    window   [ anchor                  | unread                   ]
    decoded  [ base: text settled before | new text ... U+FFFD    ]

The anchor is tokens whose text is settled; it gives the unread ones their context.
Decoders write U+FFFD for bytes that are no character, so text that ends in it may
still become another: an end of U+FFFD stays *unsettled* until something follows, or
until so many tokens have come that only the last few can belong to one character.
Settled text is searched for stop strings, and *shown* up to the longest end that may
be the beginning of one. Both only grow, whatever the tokens are.
"""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
MAX_BROKEN = 3
"""Bytes a character may have before its last, and so tokens, and so U+FFFD."""

FIRST_ANCHOR = 4
MAX_UNREAD = 8
"""Unread tokens before the window moves although it ends in U+FFFD, or in nothing."""


class Detokenizer:
    """The text of one output, and where it must stop.

    The text is what `decode(prompt + output)` has after `decode(prompt)`: without the
    prompt, with the space between them. Two cases that this does not define: where
    the output completes a character that the prompt broke off, the character is the
    output's; and where a decoder takes back text when more tokens come (SentencePiece
    byte tokens that turn out to be no characters), text once shown stands.

    A stop string matches where it is complete first, as if text came one character at
    a time; of several that end at the same place, the longest. So it does not matter
    how the text was cut into tokens. The text ends before the match, or with it.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ):
        """Start after a prompt.

        Args:
            decode: Text of token ids; whether special tokens appear is its affair.
            prompt_token_ids: May be empty; its last few tokens are decoded.
            stop: Strings that end the text.
            include_stop_str_in_output: Keep the stop string that matched.
            min_tokens: A stop string must be completed by a later token than these.

        Raises:
            ValueError: A stop string is empty.
        """
        if not all(stop):
            raise ValueError(f"stop strings must not be empty, got {list(stop)!r}")
        self._decode = decode
        self._stop = tuple(stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._settled = ""
        self._num_shown = 0
        self._finished = False
        self._start_window(prompt_token_ids)

    @property
    def text(self) -> str:
        """What may be shown so far; each value is a prefix of the next."""
        return self._settled[: self._num_shown]

    def append(self, token_id: int) -> str | None:
        """Add one token of output; a special one too, unless it ends the output.

        Returns:
            The stop string that matched, after which the text is final; or None.
        """
        assert not self._finished, "a token after the end of the text"
        self._num_tokens += 1
        self._window.append(token_id)
        return self._settle(self._read_window())

    def finish(self) -> None:
        """End the output: show what was held back, broken characters included.

        Not for an output that a stop string ended, where it changes nothing.
        """
        if not self._finished:
            new = self._match_base(self._decode(self._window))
            if new is None:
                new = self._decode(self._window[self._num_anchor :])
            self._settled += new
            self._num_shown = len(self._settled)
            self._finished = True

    def _start_window(self, prompt_token_ids: Sequence[int]) -> None:
        """Anchor the window on the end of the prompt.

        The anchor must have text: after nothing but special tokens, a tokenizer that
        drops a leading space would drop the output's.
        """
        size = FIRST_ANCHOR
        self._window = list(prompt_token_ids[-size:])
        base = self._decode(self._window) if self._window else ""
        while not base.strip(REPLACEMENT) and size < len(prompt_token_ids):
            size *= 2
            self._window = list(prompt_token_ids[-size:])
            base = self._decode(self._window)
        self._num_anchor = len(self._window)
        self._base = base
        self._whole_base = self._before_broken(len(prompt_token_ids))

    def _before_broken(self, prompt_len: int) -> str:
        """Return the prompt's text before a character that it breaks off."""
        for cut in range(MAX_BROKEN + 1):
            tokens = self._window[: len(self._window) - cut]
            text = self._decode(tokens) if tokens else ""
            is_whole = not text.endswith(REPLACEMENT)
            if is_whole and (text or len(self._window) == prompt_len):
                return text
        return self._base

    def _match_base(self, decoded: str) -> str | None:
        """Return what a decoded window has after the settled text; None: other text."""
        for base in (self._base, self._whole_base):
            if decoded.startswith(base):
                return decoded[len(base) :]
        return None

    def _read_window(self) -> str:
        """Return text that has settled with the last token, and move the window."""
        decoded = self._decode(self._window)
        new = self._match_base(decoded)
        if new is None:
            # Byte tokens take back a character until the next one is complete.
            if decoded.endswith(REPLACEMENT) and self._num_unread < MAX_UNREAD:
                return ""
            new = self._decode(self._window[self._num_anchor :])
            self._anchor(decoded)
            return new
        settled = new.rstrip(REPLACEMENT)
        if self._num_unread > MAX_UNREAD:
            return self._drop_unread(new)
        if settled == new and settled:
            self._anchor(decoded)
        elif settled:
            self._base = self._whole_base = decoded.rstrip(REPLACEMENT)
        return settled

    @property
    def _num_unread(self) -> int:
        return len(self._window) - self._num_anchor

    def _anchor(self, decoded: str) -> None:
        """Let the unread tokens, whose text has settled, be the whole window."""
        unread = self._window[self._num_anchor :]
        base = self._decode(unread)
        if base.endswith(REPLACEMENT) and len(self._window) <= 2 * MAX_UNREAD:
            # They begin inside a character: they need the anchor before them.
            base = decoded
        else:
            self._window = unread
        self._num_anchor = len(self._window)
        self._base = self._whole_base = base

    def _drop_unread(self, new: str) -> str:
        """Settle a window that has not moved for long: empty or broken tokens.

        Keeps as many tokens as a broken character can have, and one.

        Returns:
            The new text, less what may be such a character.
        """
        del self._window[self._num_anchor : -MAX_BROKEN - 1]
        base = self._decode(self._window)
        num_broken = min(_count_broken(new), _count_broken(base), MAX_BROKEN)
        self._base = self._whole_base = base[: len(base) - num_broken]
        return new[: len(new) - num_broken]

    def _settle(self, new: str) -> str | None:
        """Add settled text, look for stop strings that end in it, and show the rest."""
        old = len(self._settled)
        self._settled += new
        if new and self._num_tokens > self._min_tokens:
            matches = (
                (end, -len(stop), stop)
                for stop in self._stop
                if (end := _first_end_after(self._settled, stop, old))
            )
            match = min(matches, default=None)
            if match is not None:
                end, _, stop = match
                kept = end if self._include_stop else end - len(stop)
                self._settled = self._settled[:kept]
                self._num_shown = kept
                self._finished = True
                return stop
        self._num_shown = len(self._settled) - self._num_held()
        return None

    def _num_held(self) -> int:
        """Return the length of the longest end that may begin a stop string."""
        return max(
            (
                size
                for stop in self._stop
                for size in range(1, len(stop))
                if self._settled.endswith(stop[:size])
            ),
            default=0,
        )


def _count_broken(text: str) -> int:
    """Return how many U+FFFD a text ends in."""
    return len(text) - len(text.rstrip(REPLACEMENT))


def _first_end_after(text: str, stop: str, old: int) -> int | None:
    """Return where the first occurrence that ends after position `old` ends."""
    start = text.find(stop, max(0, old - len(stop) + 1))
    return None if start < 0 else start + len(stop)
