"""Run a job through Hugging Face transformers' continuous batching."""

# pyright: reportMissingImports=false
# torch and transformers are in the environment of this peer only.

from typing import Any

import harness

BLOCK = 32


class ContinuousBatching:
    """The model with its manager, whose thread computes."""

    def __init__(self, job: harness.Job):
        import torch
        import transformers

        torch.set_num_threads(job.threads)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            job.model, dtype=getattr(torch, job.dtype), attn_implementation="sdpa"
        ).eval()
        if torch.cuda.is_available():
            model = model.to("cuda")
        self.settings: dict[str, Any] = {
            "page_size": BLOCK,
            "num_blocks": -(-job.kv_tokens // BLOCK),
            "max_batch_tokens": job.max_num_batched_tokens or 512,
            "max_requests_per_batch": job.max_num_seqs,
            "allow_block_sharing": job.prefix_caching,
        }
        self._manager = model.init_continuous_batching(
            transformers.GenerationConfig(do_sample=False, eos_token_id=-1),
            transformers.ContinuousBatchingConfig(**self.settings),
        )
        self._manager.start()
        self.versions = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        }

    def add_request(self, request: harness.Request) -> None:
        """Hand a request to the manager."""
        self._manager.add_request(
            request.prompt,
            request_id=request.request_id,
            max_new_tokens=request.max_tokens,
            record_timestamps=True,
        )

    def step(self) -> list[harness.Tokens]:
        """Wait for a request to end."""
        output = self._manager.get_result(timeout=1)
        if output is None:
            if not self._manager.is_running():
                raise RuntimeError("the manager of continuous batching has stopped")
            return []
        if output.error is not None:
            raise RuntimeError(f"{output.request_id}: {output.error}")
        name, tokens, times = (
            output.request_id,
            output.generated_tokens,
            output.timestamps,
        )
        return [
            harness.Tokens(name, tokens[:1], times[0]),
            harness.Tokens(name, tokens[1:], times[-1]),
        ]

    def close(self) -> None:
        """Stop the manager's thread."""
        self._manager.stop(block=True)


if __name__ == "__main__":
    harness.main(ContinuousBatching)
