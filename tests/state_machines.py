"""How long state machines run: `settings_of`."""

import os

from hypothesis import settings

FACTOR = float(os.environ.get("JAXKV_STATE_MACHINE_FACTOR", "1"))
"""How many times the usual number of examples; `make test-long` sets it."""


def settings_of(max_examples, stateful_step_count):
    """Settings that give the same examples everywhere, however slow the machine."""
    return settings(
        max_examples=max(1, round(max_examples * FACTOR)),
        stateful_step_count=stateful_step_count,
        deadline=None,
        derandomize=True,
    )
