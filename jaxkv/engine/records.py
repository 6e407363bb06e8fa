"""What the engine keeps of one user's request: its children, text and logprobs."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jaxkv.device.sampling import Logprobs
from jaxkv.engine.outputs import CompletionOutput, ReadOnlyView, RequestOutput
from jaxkv.host.detokenizer import Detokenizer
from jaxkv.host.request import Request, SamplingParams


class RequestRecord:
    """One user's request with its n children, until it is reported as finished."""

    def __init__(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ):
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = params
        self.children: list[Request] = []
        self._num_taken: list[int] = []
        self._detokenizers: list[Detokenizer | None] = []
        self._logprobs: list[list[dict[int, float]]] = []
        self._cumulative: list[float] = []
        self._prompt_logprobs: list[dict[int, float] | None] = [None]

    def add_child(self, request: Request, detokenizer: Detokenizer | None) -> None:
        """Add the next of the n outputs."""
        self.children.append(request)
        self._num_taken.append(0)
        self._detokenizers.append(detokenizer)
        self._logprobs.append([])
        self._cumulative.append(0.0)

    @property
    def arrival(self) -> int:
        """Place in the order of arrival."""
        return self.children[0].arrival

    @property
    def finished(self) -> bool:
        """Whether every child has ended."""
        return all(child.finish_reason is not None for child in self.children)

    def take_tokens(
        self, request: Request, logprobs: Logprobs | None, line: int
    ) -> int:
        """Note what belongs to the tokens that a child just got.

        Args:
            request: The child.
            logprobs: Of a step's output: [steps, lines, ...].
            line: The child's line.

        Returns:
            How many tokens it got.
        """
        count = self.sampling_params.logprobs
        tokens = request.token_ids[
            request.num_prompt_tokens + self._num_taken[request.child] :
        ]
        self._num_taken[request.child] += len(tokens)
        if count is not None:
            assert logprobs is not None, f"no logprobs for {request!r}"
            for step, token in enumerate(tokens):
                of_step = Logprobs(*(array[step] for array in logprobs))
                entry = logprob_entry(of_step, line, token, count)
                self._logprobs[request.child].append(entry)
                self._cumulative[request.child] += entry[token]
        return len(tokens)

    def take_prompt_logprobs(
        self, logprobs: Logprobs, begin: int, start: int, num_tokens: int
    ) -> None:
        """Note the log-probabilities of prompt[start + 1 : start + 1 + num_tokens].

        They lie in the lines from `begin` on. A request that was preempted brings
        some of them again; what is there already stays.
        """
        count = self.sampling_params.prompt_logprobs
        assert count is not None, "prompt logprobs that nobody asked for"
        for offset in range(num_tokens):
            place = start + offset + 1
            if len(self._prompt_logprobs) == place < len(self.prompt_token_ids):
                token = self.prompt_token_ids[place]
                self._prompt_logprobs.append(
                    logprob_entry(logprobs, begin + offset, token, count)
                )

    def output(self) -> RequestOutput:
        """Return a snapshot for the user, or raise what went wrong with its text."""
        for child in self.children:
            if child.error is not None:
                raise child.error
        prompt_logprobs = None
        if self.sampling_params.prompt_logprobs is not None and len(
            self._prompt_logprobs
        ) == len(self.prompt_token_ids):
            prompt_logprobs = self._prompt_logprobs
        return RequestOutput(
            request_id=self.request_id,
            finished=self.finished,
            prompt_token_ids=ReadOnlyView(self.prompt_token_ids),
            num_cached_tokens=self.children[0].num_cached_tokens or 0,
            prompt_logprobs=prompt_logprobs,
            outputs=[self._completion(child) for child in self.children],
        )

    def _completion(self, request: Request) -> CompletionOutput:
        child = request.child
        detokenizer = self._detokenizers[child]
        if detokenizer is not None and request.finish_reason is not None:
            detokenizer.finish()
        has_logprobs = self.sampling_params.logprobs is not None
        return CompletionOutput(
            index=child,
            token_ids=ReadOnlyView(request.token_ids, request.num_prompt_tokens),
            text="" if detokenizer is None else detokenizer.text,
            logprobs=ReadOnlyView(self._logprobs[child]) if has_logprobs else None,
            cumulative_logprob=self._cumulative[child] if has_logprobs else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )


def logprob_entry(
    logprobs: Logprobs, line: int, token: int, count: int
) -> dict[int, float]:
    """Return the `count` likeliest tokens of a line, best first, and `token`.

    Tokens that cannot be (log-probability -inf) are left out, so what is returned is
    finite and can be written as JSON.
    """
    entry = {
        int(top_id): float(top)
        for top_id, top in zip(
            logprobs.top_ids[line, :count], logprobs.top[line, :count], strict=True
        )
        if top > -float("inf")
    }
    entry.setdefault(token, float(logprobs.chosen[line]))
    return entry


def make_detokenizer(
    tokenizer: Any | None, prompt_token_ids: Sequence[int], params: SamplingParams
) -> Detokenizer | None:
    """Return what turns one child's tokens into text; None without a tokenizer."""
    if tokenizer is None:
        return None
    return Detokenizer(
        _decoder(tokenizer, params.skip_special_tokens),
        prompt_token_ids,
        stop=params.stop,
        include_stop_str_in_output=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
    )


def _decoder(tokenizer: Any, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """Return `decode`, told about special tokens where it can be."""
    if "skip_special_tokens" in inspect.signature(tokenizer.decode).parameters:
        return lambda ids: tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens
        )
    return tokenizer.decode
