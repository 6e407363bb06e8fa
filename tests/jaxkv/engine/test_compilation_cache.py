"""Each test in a process of its own: JAX decides about its cache once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import write_tiny_checkpoint

REPOSITORY = Path(__file__).parents[3]

SCRIPT = """
import json, sys
import jax
import jaxkv

counts = {"cache_hits": 0, "cache_misses": 0}

def listen(event, **_):
    name = event.rpartition("/")[2]
    if name in counts:
        counts[name] += 1

jax.monitoring.register_event_listener(listen)
before = jax.config.jax_compilation_cache_dir
if len(sys.argv) > 1:
    options = {"num_blocks": 16, "max_num_seqs": 2, "max_num_batched_tokens": 4}
    llm = jaxkv.LLM(sys.argv[1], use_tqdm=False, **options)
    params = jaxkv.SamplingParams(max_tokens=3, temperature=0.0)
    llm.generate([[1, 2, 3]], params, use_tqdm=False)
print(json.dumps([before, jax.config.jax_compilation_cache_dir, counts]))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


def run(home, *arguments, **environment):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, arguments)],
        env=kept | {"HOME": str(home), "XDG_CACHE_HOME": str(home)} | environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_importing_jaxkv_sets_no_cache_and_writes_nothing(tmp_path):
    before, after, _ = run(tmp_path)
    assert before is after is None
    assert list(tmp_path.iterdir()) == []


def test_a_second_start_compiles_nothing_again(tmp_path, checkpoint):
    before, folder, counts = run(tmp_path, checkpoint)
    assert before is None
    assert Path(folder).is_relative_to(tmp_path / "jaxkv" / "compiled")
    assert counts["cache_misses"] > 3
    assert len(list(Path(folder).glob("*-cache"))) == counts["cache_misses"]
    _, again, second = run(tmp_path, checkpoint)
    assert again == folder
    assert second == {"cache_hits": sum(counts.values()), "cache_misses": 0}


def test_the_users_own_folder_is_kept(tmp_path, checkpoint):
    own = tmp_path / "own"
    home = tmp_path / "home"
    home.mkdir()
    before, after, _ = run(home, checkpoint, JAX_COMPILATION_CACHE_DIR=str(own))
    assert before == after == str(own)
    assert list(own.iterdir())
    assert list(home.iterdir()) == []


def test_a_user_who_wants_no_cache_gets_none(tmp_path, checkpoint):
    _, after, _ = run(tmp_path, checkpoint, JAX_ENABLE_COMPILATION_CACHE="false")
    assert after is None
    assert list(tmp_path.iterdir()) == []
