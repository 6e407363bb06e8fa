"""Run a job through SGLang's offline engine, on a GPU."""

# pyright: reportMissingImports=false
# sglang is in the environment of this peer only.

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import harness


class SGLang:
    """An `Engine` whose streams are read in one event loop."""

    def __init__(self, job: harness.Job):
        import sglang

        self.settings: dict[str, Any] = {
            "max_running_requests": job.max_num_seqs,
            "disable_radix_cache": not job.prefix_caching,
        }
        if job.max_num_batched_tokens is not None:
            self.settings["chunked_prefill_size"] = job.max_num_batched_tokens
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._engine = sglang.Engine(
            model_path=job.model, dtype=job.dtype, **self.settings
        )
        self._new: asyncio.Queue[harness.Tokens | BaseException] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self.versions = {"sglang": sglang.__version__}

    def add_request(self, request: harness.Request) -> None:
        """Let a task read the request's stream."""
        task = self._loop.create_task(self._report(self._read(request)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report(self, reading: Coroutine[Any, Any, None]) -> None:
        try:
            await reading
        except Exception as error:  # `step` raises it
            self._new.put_nowait(error)

    async def _read(self, request: harness.Request) -> None:
        stream = await self._engine.async_generate(
            input_ids=request.prompt,
            sampling_params={
                "temperature": 0.0,
                "max_new_tokens": request.max_tokens,
                "ignore_eos": True,
            },
            stream=True,
        )
        num_given = 0
        async for output in stream:
            tokens = output["output_ids"][num_given:]  # cumulative
            num_given += len(tokens)
            self._new.put_nowait(
                harness.Tokens(request.request_id, tokens, time.perf_counter())
            )

    def step(self) -> list[harness.Tokens]:
        """Wait for the next tokens of any request."""
        new = self._loop.run_until_complete(self._new.get())
        if isinstance(new, BaseException):
            raise new
        return [new]

    def close(self) -> None:
        """Stop the engine's processes."""
        self._engine.shutdown()


if __name__ == "__main__":
    harness.main(SGLang)
