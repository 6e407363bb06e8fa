"""Run a job through OpenVINO GenAI's continuous batching.

`job.model` is a folder that `make_openvino_genai.py` wrote.
"""

# pyright: reportMissingImports=false
# openvino is in the environment of this peer only.

import time
from typing import Any

import harness


class OpenVINO:
    """A `ContinuousBatchingPipeline` on the CPU."""

    def __init__(self, job: harness.Job):
        import numpy as np
        import openvino
        import openvino_genai

        self._array = np.array
        self._genai = openvino_genai
        self._tensor = openvino.Tensor
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = job.max_num_seqs
        scheduler.max_num_batched_tokens = job.max_num_batched_tokens or 256
        scheduler.num_kv_blocks = -(-job.kv_tokens // 32)  # a block has 32 tokens
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = job.prefix_caching
        precision = {"float32": "f32", "bfloat16": "bf16"}[job.dtype]
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": job.threads,
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            job.model, scheduler, "CPU", properties
        )
        self._handles: dict[str, Any] = {}
        self._num_left: dict[str, int] = {}
        self._num_requests = 0
        self.versions = {"openvino_genai": openvino_genai.__version__}
        self.settings = {
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "num_kv_blocks": scheduler.num_kv_blocks,
            **properties,
        }

    def add_request(self, request: harness.Request) -> None:
        """Take a request in."""
        config = self._genai.GenerationConfig(
            max_new_tokens=request.max_tokens, ignore_eos=True, do_sample=False
        )
        prompt = self._tensor(self._array([request.prompt], dtype="int64"))
        self._handles[request.request_id] = self._pipeline.add_request(
            self._num_requests, prompt, config
        )
        self._num_left[request.request_id] = request.max_tokens
        self._num_requests += 1

    def step(self) -> list[harness.Tokens]:
        """Run one step of the pipeline."""
        self._pipeline.step()
        now = time.perf_counter()
        new = []
        for name, handle in list(self._handles.items()):
            while self._num_left[name] and handle.can_read():
                (output,) = handle.read().values()
                new.append(harness.Tokens(name, output.generated_ids, now))
                self._num_left[name] -= len(output.generated_ids)
            if not self._num_left[name]:
                del self._handles[name], self._num_left[name]
        return new

    def close(self) -> None:
        """Nothing to stop: all of it is in this process."""


if __name__ == "__main__":
    harness.main(OpenVINO)
