"""Answer a few prompts at once with a converted checkpoint, and say what it took.

    python examples/demo.py CHECKPOINT

It is `jaxkv generate --chat --stats` with prompts of its own.
"""

import sys

from jaxkv.cli import main

PROMPTS = [
    "What is the capital of France?",
    "Write two sentences about the sea.",
    "Explain in one paragraph what a cache is.",
    "List three things to pack for a hike.",
    "What is 12 times 3?",
]

if __name__ == "__main__":
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    options = ["--chat", "--stats", "--max-tokens", "96", "--max-num-seqs", "8"]
    limits = ["--num-blocks", "512", "--max-model-len", "2048"]
    sys.exit(main(["generate", sys.argv[1], *prompts, *options, *limits]))
