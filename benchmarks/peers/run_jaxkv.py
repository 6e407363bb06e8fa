"""Run a job through this project's engine, from `job.checkpoint`."""

import time
from typing import Any

import harness


class Jaxkv:
    """An `LLM` whose engine is stepped."""

    def __init__(self, job: harness.Job):
        import jax

        import jaxkv

        block_size = 16
        self.settings: dict[str, Any] = {
            "block_size": block_size,
            "num_blocks": 1 - (-job.kv_tokens // block_size),
            "max_num_seqs": job.max_num_seqs,
            "max_num_batched_tokens": job.max_num_batched_tokens or 256,
        }
        self._sampling_params = jaxkv.SamplingParams
        self._engine = jaxkv.LLM(
            job.checkpoint,
            dtype=job.dtype,
            max_model_len=job.longest,
            enable_prefix_caching=job.prefix_caching,
            **self.settings,
        ).engine
        self._num_given: dict[str, int] = {}
        self.versions = {"jax": jax.__version__}

    def add_request(self, request: harness.Request) -> None:
        """Take a request in."""
        params = self._sampling_params(
            max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True
        )
        self._engine.add_request(request.request_id, request.prompt, params)

    def step(self) -> list[harness.Tokens]:
        """Run one step of the engine."""
        outputs = self._engine.step()
        now = time.perf_counter()
        new = []
        for output in outputs:
            tokens = output.outputs[0].token_ids
            given = self._num_given.get(output.request_id, 0)
            new.append(
                harness.Tokens(output.request_id, list(tokens[given:]), now),
            )
            self._num_given[output.request_id] = len(tokens)
        return new

    def close(self) -> None:
        """Nothing to stop: all of it is in this process."""


if __name__ == "__main__":
    harness.main(Jaxkv)
