r"""Run a trace through Hugging Face transformers' padded batches: the bar to beat.

Requests go in the trace's order, eight at a time, padded on the left; a batch runs
until its longest output is done, greedy, float32. Each request counts the tokens it
asked for, so what a batch computes beyond that is the cost of padding. One JSON line
is printed. Loading is not timed, and neither is a first short batch that warms up.

torch is no dependency of ours; this runs in an environment of its own:

    python3.11 -m venv hf-env
    hf-env/bin/pip install torch==2.13.0 transformers==5.24.0 \
        accelerate==1.15.0 gguf==0.19.0
    hf-env/bin/python benchmarks/transformers_baseline.py \
        --gguf SmolLM2-135M-Instruct.Q4_1.gguf \
        --trace benchmarks/traces/dev.json --name mixed

Measure on an idle machine: two threads that share their cores with other work wait
for each other, and one step then takes up to 30 times as long.
"""

# pyright: reportMissingImports=false
# torch and transformers are in that other environment only.

import argparse
import json
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM


def load(path: Path, attention: str) -> torch.nn.Module:
    """Return the model of a GGUF file, dequantised to float32."""
    model = AutoModelForCausalLM.from_pretrained(
        str(path.resolve().parent),
        gguf_file=path.name,
        dtype=torch.float32,
        attn_implementation=attention,
    )
    model.generation_config.eos_token_id = None  # no output ends early
    return model.eval()


def pad_left(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and the mask that hides the padding before each prompt."""
    width = max(len(prompt) for prompt in prompts)
    ids = [[0] * (width - len(p)) + p for p in prompts]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    return torch.tensor(ids), torch.tensor(mask)


@torch.inference_mode()
def run_batch(
    model: torch.nn.Module, prompts: list[list[int]], num_steps: int
) -> list[list[int]]:
    """Return `num_steps` greedy tokens for each prompt, EOS ignored."""
    ids, mask = pad_left(prompts)
    output = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=num_steps,
        pad_token_id=0,
    )
    assert output.shape[1] == ids.shape[1] + num_steps, output.shape
    return output[:, ids.shape[1] :].tolist()


def run_trace(
    model: torch.nn.Module, requests: list[dict], batch_size: int
) -> tuple[dict[str, list[int]], int, float]:
    """Return each request's tokens, the tokens computed in all, and the seconds."""
    tokens = {}
    computed = 0
    start = time.perf_counter()
    for i in range(0, len(requests), batch_size):
        batch = requests[i : i + batch_size]
        num_steps = max(request["max_tokens"] for request in batch)
        outputs = run_batch(model, [request["prompt"] for request in batch], num_steps)
        computed += num_steps * len(batch)
        for request, output in zip(batch, outputs, strict=True):
            tokens[request["id"]] = output[: request["max_tokens"]]
    return tokens, computed, time.perf_counter() - start


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--name", default="mixed", help="which of the file's traces")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    parser.add_argument("--limit", type=int, help="only the first requests (a trial)")
    parser.add_argument(
        "--check", type=Path, help="write the tokens of every request to this file"
    )
    return parser.parse_args()


def main() -> None:
    """Run the trace once and print one JSON line."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    requests = json.loads(args.trace.read_text())["traces"][args.name][: args.limit]
    model = load(args.gguf, args.attention)
    run_batch(model, [requests[0]["prompt"][:16]] * args.batch_size, 4)

    tokens, computed, seconds = run_trace(model, requests, args.batch_size)
    prompt_tokens = sum(len(request["prompt"]) for request in requests)
    output_tokens = sum(len(output) for output in tokens.values())
    if args.check:
        args.check.write_text(json.dumps(tokens, separators=(",", ":")) + "\n")
    print(
        json.dumps(
            {
                "benchmark": "transformers_baseline",
                "trace": args.name,
                "requests": len(requests),
                "batch_size": args.batch_size,
                "threads": args.threads,
                "attention": args.attention,
                "dtype": "float32",
                "transformers": transformers.__version__,
                "torch": torch.__version__,
                "prompt_tokens": prompt_tokens,
                "output_tokens": output_tokens,
                "computed_output_tokens": computed,
                "seconds": round(seconds, 3),
                "output_tokens_per_s": round(output_tokens / seconds, 2),
                "total_tokens_per_s": round(
                    (prompt_tokens + output_tokens) / seconds, 2
                ),
            }
        )
    )


if __name__ == "__main__":
    main()
