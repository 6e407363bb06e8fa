"""Writes budget.json anew for the jax release that runs it.

python -m tests.pallas_kernels.write_budget
"""

import json

import jax

from benchmarks import gpu_target, llama_8b
from tests.pallas_kernels.test_compiled import BUDGET, BUDGET_FILE, CASES, resources

if __name__ == "__main__":
    budget = BUDGET.setdefault(jax.__version__, {})
    for name, case in CASES.items():
        budget[name] = gpu_target.call(resources, case=case)
        print(name, budget[name])
    step = gpu_target.call(llama_8b.decode_step, rows=64)
    name = "llama-3.1-8b decode step, 64 rows"
    budget[name] = {"temporaries": step["temp_bytes"]}
    print(name, budget[name])
    BUDGET_FILE.write_text(json.dumps(BUDGET, indent=2) + "\n")
