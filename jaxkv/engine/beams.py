"""What the engine keeps of one beam search: its requests, from step to step."""

from collections.abc import Sequence
from typing import Any

from jaxkv.device.sampling import MAX_LOGPROBS, Logprobs
from jaxkv.engine.outputs import CompletionOutput, ReadOnlyView, RequestOutput
from jaxkv.engine.records import make_detokenizer
from jaxkv.host.beam_search import BeamSearch, BeamSearchParams, Hypothesis
from jaxkv.host.request import Request, SamplingParams
from jaxkv.host.scheduler import Scheduler


class BeamRecord:
    """One user's beam search, until it is reported as finished.

    Each beam is a request of the scheduler. When all that live have computed their
    tokens, the search says which of them go on and with which tokens: a beam goes on
    where it is, and where several continue one, the others fork from it.

    Attributes:
        children: A request for each beam that may live at once.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: BeamSearchParams,
        *,
        max_total_tokens: int,
        eos_token_ids: Sequence[int],
        tokenizer: Any | None,
        **options: Any,
    ):
        """Make the requests; the first is to be added to a scheduler.

        Args:
            request_id: The user's.
            prompt_token_ids: At least one token id.
            params: As given.
            max_total_tokens: Most tokens a beam may have, prompt and output.
            eos_token_ids: The model's; each ends a beam.
            tokenizer: Makes the text; None: there is none.
            **options: For `Request`.
        """
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = SamplingParams(
            temperature=0.0, max_tokens=params.max_tokens, logprobs=MAX_LOGPROBS
        )
        self.children = tuple(
            Request(
                f"{child}/{request_id}",
                prompt_token_ids,
                self.sampling_params,
                max_total_tokens=max_total_tokens,
                child=child,
                **options,
            )
            for child in range(params.beam_width)
        )
        for child in self.children:
            child.beams = self.children
        self._search = BeamSearch(
            params,
            frozenset(eos_token_ids),
            max_total_tokens - len(prompt_token_ids),
        )
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._live = [self.children[0]]
        self._candidates: dict[Request, tuple[list[int], list[float]]] = {}

    @property
    def arrival(self) -> int:
        """Place in the order of arrival."""
        return self.children[0].arrival

    @property
    def finished(self) -> bool:
        """Whether the search is over or was aborted."""
        return self.children[0].finish_reason is not None

    def take_candidates(self, request: Request, logprobs: Logprobs, line: int) -> None:
        """Note the likeliest next tokens of a beam that has computed its last one."""
        count = self._search.num_candidates
        self._candidates[request] = (
            logprobs.top_ids[line, :count].tolist(),
            logprobs.top[line, :count].tolist(),
        )

    def advance(self, scheduler: Scheduler) -> int:
        """Go on with the next tokens, if all beams have computed the last ones.

        Returns:
            How many beams got a token.
        """
        # One that was preempted comes back here when it has computed its tokens again.
        waiting = [r for r in self._live if r.num_computed_tokens < len(r.token_ids)]
        if waiting or len(self._candidates) < len(self._live):
            return 0
        rows = [self._candidates[request] for request in self._live]
        self._candidates.clear()
        continuations = self._search.advance(*zip(*rows, strict=True))
        branches = [(c.parent, c.token_id) for c in continuations]
        num_live = len(self._live)
        self._live = scheduler.branch(self._live, branches)
        return len(branches) or num_live

    def output(self) -> RequestOutput:
        """Return what the search has found, the best first."""
        return RequestOutput(
            request_id=self.request_id,
            finished=self.finished,
            prompt_token_ids=ReadOnlyView(self.prompt_token_ids),
            num_cached_tokens=self.children[0].num_cached_tokens or 0,
            prompt_logprobs=None,
            outputs=[
                self._completion(index, hypothesis)
                for index, hypothesis in enumerate(self._search.hypotheses)
            ],
        )

    def _completion(self, index: int, hypothesis: Hypothesis) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            token_ids=hypothesis.token_ids,
            text=self._text(hypothesis),
            logprobs=None,
            cumulative_logprob=hypothesis.cumulative_logprob,
            finish_reason=hypothesis.finish_reason,
            stop_reason=None,
            score=hypothesis.score,
        )

    def _text(self, hypothesis: Hypothesis) -> str:
        detokenizer = make_detokenizer(
            self._tokenizer, self.prompt_token_ids, self.sampling_params
        )
        if detokenizer is None:
            return ""
        for token_id in hypothesis.token_ids:
            if token_id not in self._eos_token_ids:
                detokenizer.append(token_id)
        detokenizer.finish()
        return detokenizer.text
