"""How long a step takes, as arithmetic: `StepTime`."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A model of a device: everything adds up, nothing overlaps.

    The defaults are for Llama-3.1-8B in bfloat16 on an H100: 16.06 GB of weights and a
    token's 131,072 bytes of K and V are read at 80 % of 3.35 TB/s, and 16.06 GFLOP a
    token, 524,288 FLOP a query and key, are computed at 500 and 400 TFLOP/s.

    Attributes:
        fixed: Seconds for a step that has any row.
        per_token: Seconds for each token that is computed.
        per_kv_token: Seconds for each token that a row attends to, its own included.
        per_pair: Seconds for each query and key of attention.
        kv_bytes: K and V of a token, in bytes.
        bandwidth: Bytes a second between device and host, in either direction.
    """

    fixed: float = 6e-3
    per_token: float = 32e-6
    per_kv_token: float = 49e-9
    per_pair: float = 1.3e-9
    kv_bytes: int = 131_072
    bandwidth: float = 16e9

    def row(self, start: int, num_tokens: int) -> float:
        """Return the seconds for a row that computes tokens from `start` on."""
        if num_tokens == 0:
            return 0.0
        pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        return (
            self.per_token * num_tokens
            + self.per_kv_token * (start + num_tokens)
            + self.per_pair * pairs
        )

    def move(self, num_tokens: int) -> float:
        """Return the seconds for the K and V of so many slots, one way."""
        return self.kv_bytes * num_tokens / self.bandwidth

    def step(self, rows: Iterable[tuple[int, int]], num_moved: int = 0) -> float:
        """Return the seconds for a step.

        Args:
            rows: (start, num_tokens) of each.
            num_moved: Slots whose K and V move, those out and those in.
        """
        computing = [self.row(start, count) for start, count in rows if count]
        return (
            (self.fixed if computing else 0.0) + sum(computing) + self.move(num_moved)
        )

    def prefill_rate(self, budget: int) -> float:
        """Return tokens a second of one prompt in a full step, as engines measure."""
        return budget / self.step([(0, budget)])
