"""What a user asks for and how far it has come: `SamplingParams` and `Request`.

A `Request` is one child of what a user submitted (n = 1 has child 0 only). It owns
its tokens and decides when it ends; the scheduler owns its blocks, its row and its
counters. Two counters say how far it is, and are equal when no step is under way:

    [0, num_computed_tokens)                     K and V are in the cache
    [num_computed_tokens, num_scheduled_tokens)  planned or dispatched
    [num_scheduled_tokens, num_tokens)           for a later step

A step that is under way may have chosen tokens that the host has not seen yet: the
last num_pending_tokens of num_tokens, behind all of token_ids.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, no_type_check, runtime_checkable

import numpy as np

from jaxkv.host.block_hash import BlockChain
from jaxkv.host.swap_space import SwappedBlocks

FinishReason = Literal["stop", "length", "abort"]
CacheKey = str | bytes | int

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow float32."""

MAX_LOGPROBS = 20


def checked_integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Return `value` as an int in [low, high], or say what is wrong with it."""
    bounds = (
        f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
    )
    message = f"{name} must be {bounds}, got {value!r}"
    if isinstance(value, bool):
        raise ValueError(message)
    try:
        integer = operator.index(value)
    except TypeError:
        raise ValueError(message) from None
    if integer < low or (high is not None and integer > high):
        raise ValueError(message)
    return integer


def checked_real(name: str, value: Any) -> float:
    """Return `value` as a finite float; a bool or a string is not a number."""
    if not isinstance(value, bool | str | bytes):
        try:
            real = float(value)
        except (TypeError, ValueError, OverflowError):
            real = math.nan
        if math.isfinite(real):
            return real
    raise ValueError(f"{name} must be a finite number, got {value!r}")


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Iterable):
        raise ValueError(f"stop must be a string or a list of strings, got {stop!r}")
    strings = tuple(strings)
    for string in strings:
        if not isinstance(string, str):
            raise ValueError(f"stop must hold strings only, got {string!r}")
        if not string:
            raise ValueError(f"stop must not hold an empty string, got {stop!r}")
    return strings


def _stop_token_ids(ids: Any) -> tuple[int, ...]:
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise ValueError(f"stop_token_ids must be a list of token ids, got {ids!r}")
    return tuple(
        checked_integer("every one of stop_token_ids", token, 0) for token in ids
    )


@no_type_check  # it checks its own fields, types included, in tests and elsewhere
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when generation ends.

    Every field is checked on construction; integers and floats of numpy are taken
    and stored as Python's.

    Attributes:
        n: Outputs for one prompt; greedy decoding allows 1 only.
        temperature: 0 is greedy, and so is anything below `GREEDY_BELOW`.
        top_k: Most likely tokens to choose among; 0 (or -1) is off.
        top_p: Smallest probability mass to choose among, in (0, 1].
        min_p: Tokens less likely than min_p times the likeliest are dropped, [0, 1].
        repetition_penalty: In [1e-6, 1e6]; 1 is off. Counts the prompt too.
        presence_penalty: In [-2, 2]; counts generated tokens only.
        frequency_penalty: In [-2, 2]; counts generated tokens only.
        seed: In [0, 2**32); None takes the engine's seed and the arrival number.
        max_tokens: Most tokens to generate; None: to the model's or the pool's limit.
        min_tokens: Tokens generated before any stop condition but length may act.
        stop: Strings that end the text; a lone string is one of them.
        stop_token_ids: Token ids that end generation, besides the model's EOS ids.
        ignore_eos: The model's EOS ids do not end generation; `stop_token_ids` do.
        include_stop_str_in_output: Keep what stopped it, a stop string or the text of
            a stop id, at the end of the text.
        skip_special_tokens: Leave special tokens out of the text.
        logprobs: Log-probabilities of so many likeliest tokens, [0, 20].
        prompt_logprobs: The same for the prompt's tokens.

    Raises:
        ValueError: A field is outside what is said above; the message names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_reals()
        self._check_integers()
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _stop_token_ids(self.stop_token_ids))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens} must be at most max_tokens "
                f"{self.max_tokens}"
            )
        if self.is_greedy and self.n > 1:
            raise ValueError(
                f"n must be 1 with greedy decoding (temperature {self.temperature}), "
                f"got {self.n}"
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_reals(self) -> None:
        for name, allowed, text in (
            ("temperature", lambda x: 0 <= x <= 1e30, "in [0, 1e+30]"),
            ("top_p", lambda x: 0 < x <= 1, "in (0, 1]"),
            ("min_p", lambda x: 0 <= x <= 1, "in [0, 1]"),
            ("repetition_penalty", lambda x: 1e-6 <= x <= 1e6, "in [1e-06, 1e+06]"),
            ("presence_penalty", lambda x: -2 <= x <= 2, "in [-2, 2]"),
            ("frequency_penalty", lambda x: -2 <= x <= 2, "in [-2, 2]"),
        ):
            value = checked_real(name, getattr(self, name))
            # The device sees it as float32, where it must still be what it was.
            if not allowed(value) or not allowed(float(np.float32(value))):
                raise ValueError(f"{name} must be {text}, got {value!r}")
            self._set(name, value)

    def _check_integers(self) -> None:
        for name, low, high in (
            ("n", 1, None),
            ("top_k", -1, None),
            ("min_tokens", 0, None),
            ("seed", 0, 2**32 - 1),
            ("max_tokens", 1, None),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
        ):
            value = getattr(self, name)
            optional = name in ("seed", "max_tokens", "logprobs", "prompt_logprobs")
            if value is not None or not optional:
                self._set(name, checked_integer(name, value, low, high))

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW


def max_total_tokens(
    prompt_len: int,
    max_tokens: int | None,
    *,
    max_model_len: int,
    num_blocks: int,
    block_size: int,
) -> int:
    """Return how many tokens a request may have, prompt and output.

    The last token's K and V are never needed, so the pool's slots plus one is a limit.

    Args:
        prompt_len: Tokens of the prompt.
        max_tokens: Most tokens to generate; None: to the model's or the pool's limit.
        max_model_len: Longest request the model serves.
        num_blocks: Blocks in the pool, the null block included.
        block_size: Tokens a block.

    Raises:
        ValueError: The prompt is empty or leaves no token to generate, or the request
            could not run even if it had the whole pool.
    """
    if prompt_len < 1:
        raise ValueError("the prompt is empty: it must have at least one token")
    if prompt_len >= max_model_len:
        raise ValueError(
            f"the prompt has {prompt_len} tokens, but max_model_len is "
            f"{max_model_len}: there is no room for a generated token"
        )
    slots = (num_blocks - 1) * block_size
    output = 1 if max_tokens is None else max_tokens
    needed = min(prompt_len + output, max_model_len) - 1
    if needed > slots:
        raise ValueError(
            f"a prompt of {prompt_len} tokens with max_tokens {max_tokens} and "
            f"max_model_len {max_model_len} needs {needed} slots, but the pool has "
            f"{slots} ({num_blocks - 1} blocks of {block_size})"
        )
    if max_tokens is None:
        return min(max_model_len, slots + 1)
    return min(prompt_len + max_tokens, max_model_len)


def check_beams_fit(
    beam_width: int,
    prompt_len: int,
    max_total_tokens: int,
    *,
    max_num_seqs: int,
    num_blocks: int,
    block_size: int,
) -> None:
    """Check that a beam search could run if it had everything to itself.

    The beams share the full blocks of the prompt and, at worst, nothing else.

    Raises:
        ValueError: There are too few rows or blocks.
    """
    if beam_width > max_num_seqs:
        raise ValueError(
            f"beam_width {beam_width} needs as many rows, but max_num_seqs is "
            f"{max_num_seqs}"
        )
    shared = prompt_len // block_size
    needed = shared + beam_width * (-(-(max_total_tokens - 1) // block_size) - shared)
    if needed > num_blocks - 1:
        raise ValueError(
            f"beam_width {beam_width} with a prompt of {prompt_len} tokens and up to "
            f"{max_total_tokens - prompt_len} more needs {needed} blocks of "
            f"{block_size}, but the pool has {num_blocks - 1}"
        )


@runtime_checkable
class TextStop(Protocol):
    """Watches the text of one request for its stop strings."""

    def append(self, token_id: int) -> str | None:
        """Take the next generated token; return the stop string it completed.

        Called once for every generated token, but for one that stops by its id and
        whose text is not wanted.
        What is returned within the first min_tokens tokens is ignored, so an
        implementation should not cut its text there either.
        """
        ...


class Request:
    """One child of a user's request: its tokens, and where it stands.

    Attributes:
        request_id: Unique among the scheduler's requests.
        prompt_token_ids: As given; never changed.
        token_ids: Prompt and output in one list, which only grows, but for beams.
        sampling_params: As given.
        child: Which of the user's n outputs.
        source: The request that computes its first tokens for this one too, until this
            one has forked from it.
        num_source_tokens: How many these are.
        beams: All requests of its beam search; None: it is none.
        swapped: What it has in host memory since it was preempted.
        priority: Lower is more urgent, where the scheduler's policy asks for it.
        cache_salt: Its blocks are shared only with requests of the same one.
        adapter: Its blocks are shared only with requests of the same one.
        arrival: Its place in the order of arrival; set by `Scheduler.add`.
        rank: Its place in the order of urgency, least first; set by `Scheduler.add`.
        chain: The digests of its blocks; made by the scheduler.
        num_cached_tokens: Prompt tokens that were found in the prefix cache when it
            was first admitted; None before.
        eos_token_ids: EOS ids that end it; empty with ignore_eos.
        stop_token_ids: Every id that ends it: EOS ids and the user's.
        max_total_tokens: Most tokens it may have, prompt and output.
        text_stop: What watches the text for stop strings, where there are any.
        num_computed_tokens: Tokens whose K and V a committed step has written.
        num_scheduled_tokens: The same, with the steps that are planned or dispatched.
        num_pending_tokens: Tokens that those steps choose for it.
        row: Its line in the batch; None while it does not run.
        admission: Of all times that a request was given a row which was its last; 0:
            it has never had one.
        num_preemptions: How often it lost its blocks.
        finish_reason: None until it ends.
        error: What went wrong with its text, and ended it.
        stop_reason: What stopped it: the user's stop id or stop string; None for EOS.
    """

    __slots__ = (
        "__weakref__",
        "adapter",
        "admission",
        "arrival",
        "beams",
        "cache_salt",
        "chain",
        "child",
        "eos_token_ids",
        "error",
        "finish_reason",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_scheduled_tokens",
        "num_source_tokens",
        "priority",
        "prompt_token_ids",
        "rank",
        "request_id",
        "row",
        "sampling_params",
        "source",
        "stop_reason",
        "stop_token_ids",
        "swapped",
        "text_stop",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        max_total_tokens: int,
        eos_token_ids: Iterable[int] = (),
        child: int = 0,
        source: "Request | None" = None,
        text_stop: TextStop | None = None,
        priority: int = 0,
        cache_salt: CacheKey | None = None,
        adapter: CacheKey | None = None,
    ):
        """Make a request that has not been added to a scheduler yet.

        Args:
            request_id: Unique among the scheduler's requests.
            prompt_token_ids: At least one token id.
            sampling_params: Length and stop conditions are read here, the rest by
                the device.
            max_total_tokens: What the function `max_total_tokens` returned.
            eos_token_ids: The model's EOS ids; left out here if ignore_eos is set.
            child: Which of the user's n outputs.
            source: A request of the same prompt, added before.
            text_stop: Watches the text; required for stop strings to act.
            priority: Lower is more urgent.
            cache_salt: Enters the digests of its blocks.
            adapter: Likewise.
        """
        self.request_id = request_id
        self.prompt_token_ids: list[int] = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.token_ids: list[int] = list(prompt_token_ids)
        self.sampling_params = sampling_params
        self.child = child
        self.source = source
        self.num_source_tokens = self.num_prompt_tokens
        self.beams: Sequence[Request] | None = None
        self.swapped: SwappedBlocks | None = None
        ignore_eos = sampling_params.ignore_eos
        self.eos_token_ids = frozenset(() if ignore_eos else eos_token_ids)
        self.stop_token_ids = self.eos_token_ids.union(sampling_params.stop_token_ids)
        self.max_total_tokens = max_total_tokens
        self.text_stop = text_stop
        self.priority = priority
        self.cache_salt = cache_salt
        self.adapter = adapter
        self.arrival = 0
        self.rank: tuple[int, int, int] = (0, 0, 0)
        self.chain: BlockChain | None = None
        self.num_cached_tokens: int | None = None
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_pending_tokens = 0
        self.row: int | None = None
        self.admission = 0
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.stop_reason: int | str | None = None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens}, "
            f"scheduled={self.num_scheduled_tokens}, row={self.row}, "
            f"finish_reason={self.finish_reason!r})"
        )

    @property
    def unit(self) -> "Sequence[Request]":
        """The requests that are preempted and end together with this one."""
        return (self,) if self.beams is None else self.beams

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens, a new list; the token that stopped it is the last."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """All of its tokens, those that the host has not seen yet among them."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_unscheduled_tokens(self) -> int:
        """How many of its tokens no step has been planned for.

        Nothing follows the last token that it may have, so that one never runs.
        """
        last = self.max_total_tokens - 1
        return min(self.num_tokens, last) - self.num_scheduled_tokens

    def fork(self, source: "Request", token_ids: list[int]) -> None:
        """Begin anew, with the first tokens of another request.

        Args:
            source: Who computes them, or has.
            token_ids: All of its tokens from now on; kept.
        """
        common = 0
        for own, other in zip(token_ids, source.token_ids, strict=False):
            if own != other:
                break
            common += 1
        self.source = source
        self.num_source_tokens = common
        self.token_ids = token_ids
        self.chain = None
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_pending_tokens = 0

    def append_token(self, token_id: int) -> None:
        """Append a generated token and set `finish_reason` if it is the last one.

        In this order: EOS or a stop id, a stop string, the length limit. A stop
        condition does not act within the first min_tokens tokens.
        """
        assert self.finish_reason is None, f"{self!r} has ended, got token {token_id}"
        params = self.sampling_params
        past_minimum = self.num_output_tokens >= params.min_tokens
        self.token_ids.append(token_id)
        stops = past_minimum and token_id in self.stop_token_ids
        matched = None
        # Like a stop string, the text of a stop id is not part of the output.
        is_text = not stops or params.include_stop_str_in_output
        if self.text_stop is not None and is_text:
            try:
                matched = self.text_stop.append(token_id)
            except Exception as error:  # of the user's tokenizer; others go on
                error.add_note(f"while decoding the output of {self!r}")
                self.finish_reason = "abort"
                self.error = error
                return
        if stops:
            self.finish_reason = "stop"
            self.stop_reason = None if token_id in self.eos_token_ids else token_id
        elif past_minimum and matched is not None:
            self.finish_reason = "stop"
            self.stop_reason = matched
        elif len(self.token_ids) >= self.max_total_tokens:
            self.finish_reason = "length"
