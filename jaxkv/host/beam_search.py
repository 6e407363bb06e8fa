"""Beam search: which beams live, which have finished, and what a search keeps.

A *beam* is one partial output and the sum of its tokens' log-probabilities. Every
step each live beam offers its likeliest next tokens; of all these *candidates* the
best `beam_width` that do not end go on, and those that end become *hypotheses*. All
live beams have the same number of tokens.

Nothing is padded: where fewer than `beam_width` different beams exist (the first
step, a tiny vocabulary) fewer live, so a search with beam_width >= vocab **
(max_tokens - 1) is exhaustive. `BeamSearch` knows no request, block or row.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, no_type_check

from jaxkv.host.request import checked_integer, checked_real

_LARGEST_POWER = 1e200
"""Length penalties whose largest power, or its inverse, is greater are refused, so
that every score is a finite number."""


@no_type_check  # it checks its own fields, types included, in tests and elsewhere
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How many beams a search has, how hypotheses are scored, and when it ends.

    Every field is checked on construction; integers and floats of numpy are taken
    and stored as Python's.

    Attributes:
        beam_width: Beams that live at once, and hypotheses that are kept.
        max_tokens: Most tokens to generate, the EOS counted.
        length_penalty: A hypothesis of n generated tokens scores its cumulative
            log-probability over n ** length_penalty: above 0 favours long ones, 0
            compares plain sums, below 0 favours short ones.
        early_stopping: When a search with beam_width hypotheses ends. True: at once.
            False: when the best live beam, scored as if it ended now, does not beat
            the worst hypothesis. "never": the same, but with a length_penalty above
            0 it is scored as if it ended at the length limit for free, so nothing
            better is missed.

    Raises:
        ValueError: A field is outside what is said above; the message names it.
    """

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = checked_integer(name, getattr(self, name), 1)
            object.__setattr__(self, name, value)
        penalty = checked_real("length_penalty", self.length_penalty)
        object.__setattr__(self, "length_penalty", penalty)
        early = self.early_stopping
        if not isinstance(early, bool):
            if not isinstance(early, str) or early != "never":
                raise ValueError(
                    f'early_stopping must be True, False or "never", got {early!r}'
                )
            object.__setattr__(self, "early_stopping", "never")
        exponent = abs(penalty) * math.log(self.max_tokens)
        if exponent > math.log(_LARGEST_POWER):
            raise ValueError(
                f"max_tokens ** length_penalty must be in [1e-200, 1e+200], got "
                f"max_tokens {self.max_tokens} and length_penalty {penalty}"
            )


class Hypothesis(NamedTuple):
    """One finished output.

    Attributes:
        token_ids: The generated tokens, with the EOS that ended them.
        cumulative_logprob: The sum of their log-probabilities.
        score: What hypotheses are compared by.
        finish_reason: "stop" if the last token is an EOS, else "length".
    """

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: Literal["stop", "length"]


class Continuation(NamedTuple):
    """A beam of the next step: a beam of this one and the token it takes.

    Attributes:
        parent: Index of the beam it continues; one parent may have several.
        token_id: The token it takes.
        cumulative_logprob: That of the beam with this token.
    """

    parent: int
    token_id: int
    cumulative_logprob: float


class BeamSearch:
    """One search: its live beams and the hypotheses it has found.

    What it finds is what Hugging Face's `generate` finds with `num_beams` and
    `num_return_sequences` of beam_width. Sums are of float64. Of candidates with equal
    sums the lower token id is better, then the lower beam index; of hypotheses with
    equal scores the one found first is.
    """

    def __init__(
        self, params: BeamSearchParams, eos_token_ids: frozenset[int], max_tokens: int
    ):
        """Start with one beam of no tokens.

        Args:
            params: As the user gave them.
            eos_token_ids: Every one of them ends a beam.
            max_tokens: Most tokens a beam may have here, at most `params.max_tokens`:
                the model's length may leave room for fewer.
        """
        assert 1 <= max_tokens <= params.max_tokens, (
            f"max_tokens {max_tokens} of a search with {params}"
        )
        self._params = params
        self._eos_token_ids = eos_token_ids
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        self._hypotheses: list[Hypothesis] = []

    @property
    def num_candidates(self) -> int:
        """How many of each beam's likeliest tokens `advance` needs to see.

        Less suffices of a vocabulary that has less.
        """
        # What goes on is among the beam_width best of its row that are no EOS, and at
        # most len(eos_token_ids) of a row are. What ends is among the beam_width best
        # of all candidates, so among the beam_width best of its row.
        return self._params.beam_width + len(self._eos_token_ids)

    @property
    def finished(self) -> bool:
        """Whether no beam lives; `advance` may not be called then."""
        return not self._beams

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """The best so far, best first, at most beam_width; a new list.

        Fewer at the end only if no more outputs exist that have a probability.
        """
        return list(self._hypotheses)

    def advance(
        self,
        top_ids: Sequence[Sequence[int]],
        top_logprobs: Sequence[Sequence[float]],
    ) -> list[Continuation]:
        """Take each live beam's likeliest next tokens and choose the next live beams.

        Args:
            top_ids: A row for each live beam, in the order in which `advance` returned
                them: its `num_candidates` likeliest tokens.
            top_logprobs: Their log-probabilities over the whole vocabulary. An entry
                of -inf, or one that is not a number, is no candidate.

        Returns:
            The next live beams, best first; none when the search is over.
        """
        candidates = self._candidates(top_ids, top_logprobs)
        width = self._params.beam_width
        self._num_tokens += 1
        at_limit = self._num_tokens == self._max_tokens
        # An EOS that is not among the best beam_width of all candidates is dropped.
        self._add_hypotheses(
            candidate
            for candidate in candidates[:width]
            if at_limit or candidate.token_id in self._eos_token_ids
        )
        live = [
            candidate
            for candidate in candidates
            if not at_limit and candidate.token_id not in self._eos_token_ids
        ][:width]
        if live and self._may_stop(live[0].cumulative_logprob):
            live = []
        self._beams = [
            (self._token_ids(continuation), continuation.cumulative_logprob)
            for continuation in live
        ]
        return live

    def _candidates(
        self,
        top_ids: Sequence[Sequence[int]],
        top_logprobs: Sequence[Sequence[float]],
    ) -> list[Continuation]:
        """Return the best of all rows, best first: all that `advance` can need."""
        rows = len(self._beams)
        assert rows > 0, "the search is over"
        assert len(top_ids) == len(top_logprobs) == rows, (
            f"{len(top_ids)} rows of ids and {len(top_logprobs)} of log-probabilities "
            f"for {rows} live beams"
        )
        # Plain tuples, since there are beam_width ** 2 or more of them.
        keys = [
            (-(cumulative_logprob + float(logprob)), int(token_id), parent)
            for parent, (_, cumulative_logprob) in enumerate(self._beams)
            for token_id, logprob in zip(
                top_ids[parent], top_logprobs[parent], strict=True
            )
            if logprob > -math.inf  # not so for a NaN either
        ]
        keys.sort()
        # A row has each EOS once, so beam_width of these are no EOS if so many exist.
        count = self._params.beam_width * (1 + len(self._eos_token_ids))
        return [
            Continuation(parent, token, -key) for key, token, parent in keys[:count]
        ]

    def _token_ids(self, continuation: Continuation) -> tuple[int, ...]:
        return (*self._beams[continuation.parent][0], continuation.token_id)

    def _score(self, cumulative_logprob: float, num_tokens: int) -> float:
        return cumulative_logprob / num_tokens**self._params.length_penalty

    def _add_hypotheses(self, ended: Iterable[Continuation]) -> None:
        for continuation in ended:
            is_eos = continuation.token_id in self._eos_token_ids
            cumulative_logprob = continuation.cumulative_logprob
            self._hypotheses.append(
                Hypothesis(
                    token_ids=self._token_ids(continuation),
                    cumulative_logprob=cumulative_logprob,
                    score=self._score(cumulative_logprob, self._num_tokens),
                    finish_reason="stop" if is_eos else "length",
                )
            )
        # Stable: of equal scores the earlier one stays ahead.
        self._hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self._hypotheses[self._params.beam_width :]

    def _may_stop(self, best_live: float) -> bool:
        params = self._params
        if len(self._hypotheses) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        # A sum only falls, and a penalty above 0 then raises its score with every
        # token; without one, a beam never scores better than now.
        may_wait = params.early_stopping == "never" and params.length_penalty > 0
        num_tokens = self._max_tokens if may_wait else self._num_tokens
        return self._score(best_live, num_tokens) <= self._hypotheses[-1].score
