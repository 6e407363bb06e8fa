"""The examples run, and do what they say."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def own_model():
    return runpy.run_path(str(EXAMPLES / "own_model.py"), run_name="__main__")


def test_own_model_gives_the_same_tokens_with_and_without_a_cache(own_model):
    assert own_model["paged"] == own_model["dense"]
    texts = zip(own_model["prompts"], own_model["paged"], strict=True)
    for prompt, text in texts:
        assert text[: len(prompt)] == prompt
        assert len(text) == len(prompt) + 20
    assert len({tuple(text[-20:]) for text in own_model["paged"]}) == 3


def test_own_model_gives_all_its_blocks_back(own_model):
    pool = own_model["pool"]
    pool.check_invariants()
    assert pool.num_free == pool.num_blocks - 1


def test_own_model_does_so_for_prompts_at_the_edges_of_a_block(own_model):
    params, pool = own_model["params"], own_model["pool"]
    prompts = [[(7 * i + n) % 256 for i in range(n)] for n in (1, 15, 16, 17)]
    paged = own_model["generate_paged"](params, prompts, 3, pool)
    generate_dense = own_model["generate_dense"]
    assert paged == [generate_dense(params, prompt, 3) for prompt in prompts]
    assert pool.num_free == pool.num_blocks - 1


def test_own_model_stays_short():
    assert len((EXAMPLES / "own_model.py").read_text().splitlines()) <= 80
