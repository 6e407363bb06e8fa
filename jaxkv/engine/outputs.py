"""What the engine hands to its users: outputs of requests, and statistics."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from jaxkv.host.request import FinishReason


class ReadOnlyView[T](Sequence[T]):
    """A part of a list that only grows, as it was when the view was made.

    It copies nothing, so handing out all tokens after every step stays cheap. It
    equals a list or tuple with the same items.
    """

    __slots__ = ("_items", "_start", "_stop")

    def __init__(self, items: list[T], start: int = 0):
        self._items = items
        self._start = start
        self._stop = len(items)

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        places = range(self._start, self._stop)[index]
        if isinstance(places, range):
            return [self._items[place] for place in places]
        return self._items[places]

    def __iter__(self) -> Iterator[T]:
        return (self._items[place] for place in range(self._start, self._stop))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | tuple | ReadOnlyView):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it equals lists, which have none

    def __repr__(self) -> str:
        return repr(list(self))


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One of a request's n outputs, as far as it has come.

    Attributes:
        index: Which of the n.
        token_ids: Generated tokens, the one that stopped it included.
        text: Their text; it only grows from one step to the next. Text that may turn
            out to be part of a stop string, and incomplete characters, are held back
            until that is settled. Empty without a tokenizer.
        logprobs: For each generated token, the asked-for number of likeliest tokens
            and the token itself, with their log-probabilities; None if not asked for.
        cumulative_logprob: Sum over the generated tokens; None without logprobs, except
            of a beam search.
        finish_reason: None until it ends.
        stop_reason: The user's stop id or stop string that ended it.
        score: Of a beam search: cumulative_logprob over the number of generated tokens
            to the power of length_penalty.
    """

    index: int
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[dict[int, float]] | None
    cumulative_logprob: float | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    score: float | None = None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A request as far as it has come.

    Attributes:
        finished: Whether all n outputs have ended.
        num_cached_tokens: Prompt tokens that were not computed but found in the cache.
        prompt_logprobs: One entry per prompt token, the first None; None if not asked
            for or not complete yet.
        outputs: In the order of their index; of a beam search the hypotheses, best
            first.
    """

    request_id: str
    finished: bool
    prompt_token_ids: Sequence[int]
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, float] | None] | None
    outputs: list[CompletionOutput]


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot of an engine; the names are API.

    Attributes:
        total_blocks: num_blocks - 1: the null block is nobody's.
        peak_held_blocks: Most that were held at once.
        num_waiting: Requests without a row, swapped out or not.
        num_swapped: Those of them whose K and V are in host memory.
        num_preemptions: Since the engine was made, as all counts below.
        num_swapped_out_bytes: K and V copied to host memory.
        num_swapped_in_bytes: K and V copied back.
        prefix_queries: Prompt tokens looked up in the prefix cache.
        prefix_hits: Prompt tokens found there.
        prompt_tokens: Prompt tokens of finished prefills, once a request.
        generation_tokens: Generated tokens.
        num_compilations: Functions compiled: steps, and what moves blocks and rows.
        compile_seconds: Wall time that took; part of the step's time when lazy.
        num_steps: Steps run; several in one count each.
        step_seconds: Wall time inside `step`.
        device_seconds: The part of it that went into dispatching and waiting for
            results; with `async_scheduling` the device works in the rest of it too.
    """

    total_blocks: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    peak_held_blocks: int
    num_running: int
    num_waiting: int
    num_swapped: int
    num_preemptions: int
    num_swapped_out_bytes: int
    num_swapped_in_bytes: int
    prefix_queries: int
    prefix_hits: int
    prompt_tokens: int
    generation_tokens: int
    num_compilations: int
    compile_seconds: float
    num_steps: int
    step_seconds: float
    device_seconds: float
