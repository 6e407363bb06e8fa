"""Run a job through Hugging Face transformers' `generate`, in padded batches.

Requests go in their order, `BATCH` at a time, padded on the left; a batch runs until
its longest output is done. Each request counts the tokens it asked for, so what a batch
computes beyond that is the cost of padding. There is no prefix caching.
"""

# pyright: reportMissingImports=false
# torch and transformers are in the environment of this peer only.

import time
from typing import Any

import harness

BATCH = 8


class PaddedBatches:
    """The model, and the requests that wait for their batch."""

    def __init__(self, job: harness.Job):
        import torch
        import transformers

        torch.set_num_threads(job.threads)
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            job.model, dtype=getattr(torch, job.dtype), attn_implementation="sdpa"
        ).eval()
        if torch.cuda.is_available():
            self._model = self._model.to("cuda")
        self._model.generation_config.eos_token_id = None  # no output ends early
        self._waiting: list[harness.Request] = []
        self.versions = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        }
        self.settings: dict[str, Any] = {"batch": BATCH, "attention": "sdpa"}

    def add_request(self, request: harness.Request) -> None:
        """Let a request wait for its batch."""
        self._waiting.append(request)

    def step(self) -> list[harness.Tokens]:
        """Run the next batch to its end."""
        batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
        torch = self._torch
        prompts = [request.prompt for request in batch]
        width = max(len(prompt) for prompt in prompts)
        device = self._model.device
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor(
            [[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device
        )
        times: list[float] = []

        def note_time(ids: Any, scores: Any) -> Any:
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=device)

        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max(request.max_tokens for request in batch),
                pad_token_id=0,
                stopping_criteria=[note_time],
            )
        new = []
        for request, row in zip(batch, output[:, width:].tolist(), strict=True):
            tokens = row[: request.max_tokens]
            new.append(harness.Tokens(request.request_id, tokens[:1], times[0]))
            last = times[len(tokens) - 1]
            new.append(harness.Tokens(request.request_id, tokens[1:], last))
        return new

    def close(self) -> None:
        """Nothing to stop: all of it is in this process."""


if __name__ == "__main__":
    harness.main(PaddedBatches)
