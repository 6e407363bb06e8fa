"""`LLM`: a converted checkpoint with an engine around it, for use in a few lines."""

import collections
import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tqdm

from jaxkv.config import EngineConfig
from jaxkv.engine.checkpoint import load_config, load_params, load_tokenizer
from jaxkv.engine.compilation_cache import use_compilation_cache
from jaxkv.engine.engine import Engine
from jaxkv.engine.outputs import RequestOutput
from jaxkv.host.beam_search import BeamSearchParams
from jaxkv.host.request import SamplingParams

Prompt = str | Sequence[int]
Params = SamplingParams | BeamSearchParams


class LLM:
    """Generates with a converted checkpoint.

    Attributes:
        engine: The engine; its `stats()` say what the cache did.
        model_config: The checkpoint's config.
        tokenizer: The checkpoint's tokenizer; None if it has none.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        use_tqdm: bool = True,
        **engine_config: Any,
    ):
        """Restore a checkpoint and make an engine for it.

        What is compiled is kept in the user's cache folder, if JAX was not told
        otherwise: see `use_compilation_cache`.

        Args:
            checkpoint: A folder that `jaxkv convert` wrote.
            use_tqdm: Show a progress bar while steps are compiled.
            **engine_config: Fields of `EngineConfig`.

        Raises:
            ValueError: The folder is not a converted checkpoint, or a field is wrong.
            TypeError: A field does not exist.
        """
        config = EngineConfig(**engine_config)
        use_compilation_cache()
        self.model_config = load_config(checkpoint)
        self.tokenizer = load_tokenizer(checkpoint)
        params = load_params(checkpoint, self.model_config, dtype=config.dtype)
        self.engine = Engine.from_params(
            params, self.model_config, config, self.tokenizer, use_tqdm
        )
        self._calls = itertools.count()
        self._inboxes: dict[str, collections.deque[RequestOutput]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for every prompt, all at once.

        Args:
            prompts: A text or a list of token ids, or a list of either.
            sampling_params: One for all prompts or one for each; None: the defaults.
            use_tqdm: Show a progress bar.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            ValueError: Something is wrong with a prompt; nothing was started.
        """
        token_ids = self._encode_prompts(prompts)
        params = _sampling_params(sampling_params, len(token_ids))
        return self._finish(token_ids, params, use_tqdm)

    def _finish(
        self,
        token_ids: list[list[int]],
        params: Sequence[Params],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Run all prompts to the end, with a progress bar."""
        finished: dict[str, RequestOutput] = {}
        request_ids: list[str] = []
        with tqdm.tqdm(
            total=len(token_ids), desc="Requests", unit="req", disable=not use_tqdm
        ) as bar:
            for output in self._run(token_ids, params, request_ids):
                if output.finished:
                    finished[output.request_id] = output
                    seconds = max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(
                        f"{_num_tokens(finished.values()) / seconds:.1f} output tok/s",
                        refresh=False,
                    )
                    bar.update()
        return [finished[request_id] for request_id in request_ids]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Generate for every prompt and yield outputs as they grow.

        Text and tokens are cumulative. The request_id of prompt i is "{call}-{i}",
        where `call` counts the calls of this LLM. Closing the iterator early aborts
        what is left.

        Raises:
            ValueError: As `generate`, at the call.
        """
        token_ids = self._encode_prompts(prompts)
        params = _sampling_params(sampling_params, len(token_ids))
        return self._run(token_ids, params, [])

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Search for the likeliest outputs of every prompt.

        Args:
            prompts: As for `generate`.
            params: One for all prompts or one for each.
            use_tqdm: Show a progress bar.

        Returns:
            One output per prompt, in the order of the prompts; its `outputs` are the
            hypotheses, at most beam_width, best first, with their `score`.

        Raises:
            ValueError: Something is wrong with a prompt, or the beams could never fit
                into the rows or blocks; nothing was started.
        """
        token_ids = self._encode_prompts(prompts)
        beams = _one_for_each("params", params, BeamSearchParams, len(token_ids))
        return self._finish(token_ids, beams, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, with the checkpoint's chat template.

        Args:
            messages: A list of {"role": ..., "content": ...}, or a list of such lists.
            sampling_params: As for `generate`.
            use_tqdm: Show a progress bar.
            add_generation_prompt: End each prompt with the opening of an answer.

        Raises:
            ValueError: There is no tokenizer or no template, or a message does not
                fit it; nothing was started.
        """
        if not isinstance(messages, Sequence) or not messages:
            raise ValueError(
                f"messages must be a list of messages or of such lists, got "
                f"{messages!r:.80}"
            )
        is_single = isinstance(messages[0], Mapping)
        conversations: Any = [messages] if is_single else messages
        prompts = [
            self.encode_chat(conversation, add_generation_prompt)
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the token ids of a conversation in the checkpoint's chat template.

        Raises:
            ValueError: There is no tokenizer or no template, or a message does not
                fit it.
        """
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer, and this checkpoint has none")
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt)
        # The template writes the special tokens out itself.
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _encode_prompts(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        """Return each prompt's token ids, whatever form they came in."""
        if isinstance(prompts, str):
            return [self._encode(0, prompts)]
        if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
            raise ValueError(
                "prompts must be a text, a list of token ids, or a list of either, got "
                f"{prompts!r:.80}"
            )
        several: list[Any] = list(prompts)
        if several and all(_is_integer(item) for item in several):
            several = [several]
        return [self._encode(index, prompt) for index, prompt in enumerate(several)]

    def _encode(self, index: int, prompt: Any) -> list[int]:
        if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
            raise ValueError(
                f"prompt {index} must be a text or a list of token ids, got "
                f"{prompt!r:.80}"
            )
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ValueError(
                "a text prompt needs a tokenizer, and this checkpoint has none: give "
                "token ids"
            )
        return self.tokenizer.encode(prompt)

    def _run(
        self,
        prompts: list[list[int]],
        params: Sequence[Params],
        request_ids: list[str],
    ) -> Iterator[RequestOutput]:
        """Check everything, queue everything, and return an iterator over the rest."""
        for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            try:
                self.engine.check_request(prompt, param)
            except ValueError as error:
                where = f"prompt {index}: " if len(prompts) > 1 else ""
                raise ValueError(f"{where}{error}") from None
        call = next(self._calls)
        request_ids += [f"{call}-{index}" for index in range(len(prompts))]
        return self._steps(prompts, params, request_ids)

    def _steps(
        self,
        prompts: list[list[int]],
        params: Sequence[Params],
        request_ids: list[str],
    ) -> Iterator[RequestOutput]:
        unfinished = set(request_ids)
        inbox: collections.deque[RequestOutput] = collections.deque()
        with contextlib.ExitStack() as cleanup:
            for request_id, prompt, param in zip(
                request_ids, prompts, params, strict=True
            ):
                self.engine.add_request(request_id, prompt, param)
                cleanup.callback(self.engine.abort_request, request_id)
                self._inboxes[request_id] = inbox
                cleanup.callback(self._inboxes.pop, request_id)
            while unfinished:
                if not inbox:
                    self._step()
                while inbox:
                    output = inbox.popleft()
                    if output.finished:
                        unfinished.discard(output.request_id)
                    yield output

    def _step(self) -> None:
        """Run one step and put each output where its call will look for it.

        Several calls may be under way at once, in one thread: streams that are read
        in turns, or a `generate` inside the loop over a stream.
        """
        assert self.engine.has_unfinished_requests(), "requests were lost"
        for output in self.engine.step():
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                inbox.append(output)


def _sampling_params(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    """Return one SamplingParams per prompt."""
    params = SamplingParams() if sampling_params is None else sampling_params
    return _one_for_each("sampling_params", params, SamplingParams, count)


def _one_for_each[T](
    name: str, params: T | Sequence[T], kind: type[T], count: int
) -> Sequence[T]:
    """Return parameters of one kind, one per prompt."""
    if isinstance(params, kind):
        return [params] * count
    if not isinstance(params, Sequence) or not all(
        isinstance(one, kind) for one in params
    ):
        raise ValueError(
            f"{name} must be a {kind.__name__} or a list of them, got {params!r:.80}"
        )
    if len(params) != count:
        raise ValueError(
            f"{len(params)} {name} for {count} prompts: give one, or one for each"
        )
    return params


def _is_integer(item: Any) -> bool:
    return isinstance(item, int | np.integer) and not isinstance(item, bool)


def _num_tokens(outputs: Any) -> int:
    return sum(len(c.token_ids) for output in outputs for c in output.outputs)
