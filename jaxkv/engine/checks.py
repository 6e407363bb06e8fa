"""Which requests an engine takes: every check that comes before one is queued."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

from jaxkv.config import EngineConfig
from jaxkv.device.sampling import MAX_LOGPROBS, MAX_STOP_IDS
from jaxkv.host.beam_search import BeamSearchParams
from jaxkv.host.request import SamplingParams, check_beams_fit, max_total_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Numbers that an engine works within, all decided.

    Attributes:
        num_token_ids: Ids that can be given and chosen: [0, num_token_ids). Rows of
            the vocabulary beyond are padding.
        kv_bytes_per_token: What one token's K and V take in all layers.
        block_root: What digests of blocks start from.
    """

    num_blocks: int
    max_model_len: int
    vocab_size: int
    num_token_ids: int
    eos_token_ids: tuple[int, ...]
    kv_bytes_per_token: int
    block_root: bytes = b""


class RequestChecks:
    """Checks requests against one engine's limits."""

    def __init__(
        self, limits: EngineLimits, config: EngineConfig, tokenizer: Any | None
    ):
        self._limits = limits
        self._config = config
        self._tokenizer = tokenizer

    def check(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | BeamSearchParams,
    ) -> list[int]:
        """Return the prompt as a list of Python integers.

        Raises:
            ValueError: As `Engine.add_request`.
        """
        if not isinstance(params, SamplingParams | BeamSearchParams):
            raise ValueError(
                "sampling_params must be SamplingParams or BeamSearchParams, got "
                f"{params!r}"
            )
        prompt = _token_ids(prompt_token_ids)
        limit = self.max_total_tokens(len(prompt), params.max_tokens)
        num_token_ids = self._limits.num_token_ids
        outside = [token for token in prompt if not 0 <= token < num_token_ids]
        if outside:
            raise ValueError(
                f"prompt token ids outside the vocabulary of {num_token_ids}: "
                f"{outside[:8]}"
            )
        if isinstance(params, BeamSearchParams):
            self._check_beams(len(prompt), limit, params)
        else:
            self._check_stops(params)
        return prompt

    def _check_beams(
        self, prompt_len: int, max_total_tokens: int, params: BeamSearchParams
    ) -> None:
        check_beams_fit(
            params.beam_width,
            prompt_len,
            max_total_tokens,
            max_num_seqs=self._config.max_num_seqs,
            num_blocks=self._limits.num_blocks,
            block_size=self._config.block_size,
        )
        num_eos = len(self._limits.eos_token_ids)
        needed = min(params.beam_width + num_eos, self._limits.num_token_ids)
        if needed > MAX_LOGPROBS:
            raise ValueError(
                f"beam_width {params.beam_width} and {num_eos} EOS ids need the "
                f"{needed} likeliest tokens of a beam, but a step gives {MAX_LOGPROBS}"
            )

    def _check_stops(self, params: SamplingParams) -> None:
        if params.stop and self._tokenizer is None:
            raise ValueError(f"stop strings {params.stop} need a tokenizer")
        outside = [t for t in params.stop_token_ids if t >= self._limits.vocab_size]
        if outside:
            raise ValueError(
                f"stop_token_ids outside the vocabulary of {self._limits.vocab_size}: "
                f"{outside[:8]}"
            )
        num_stop_ids = len({*params.stop_token_ids, *self._limits.eos_token_ids})
        if params.min_tokens and num_stop_ids > MAX_STOP_IDS:
            raise ValueError(
                f"min_tokens can hold back at most {MAX_STOP_IDS} EOS and stop ids, "
                f"got {num_stop_ids}"
            )

    def max_total_tokens(self, prompt_len: int, max_tokens: int | None) -> int:
        """Return how many tokens such a request may have, prompt and output."""
        return max_total_tokens(
            prompt_len,
            max_tokens,
            max_model_len=self._limits.max_model_len,
            num_blocks=self._limits.num_blocks,
            block_size=self._config.block_size,
        )


def _token_ids(prompt_token_ids: Sequence[int]) -> list[int]:
    """Return the ids as Python integers; numpy's integers are taken too."""
    if isinstance(prompt_token_ids, str | bytes):
        raise ValueError("prompt_token_ids must be token ids, got a string")
    try:
        tokens = list(prompt_token_ids)
        if any(isinstance(token, bool) for token in tokens):
            raise TypeError
        return [operator.index(token) for token in tokens]
    except TypeError:
        raise ValueError(
            f"prompt_token_ids must be a list of integers, got {prompt_token_ids!r:.80}"
        ) from None
