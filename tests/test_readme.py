"""The README's code runs, as it stands there."""

import re
from pathlib import Path

import pytest

from tests.checkpoints import write_tiny_checkpoint

README = (Path(__file__).parent.parent / "README.md").read_text()
EXAMPLES = dict(
    re.findall(r"<!-- test: (.*?) -->\n```python\n(.*?)```", README, re.DOTALL)
)


@pytest.mark.parametrize("name", ["llm", "own cache"])
def test_an_example_of_the_readme_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_tiny_checkpoint(tmp_path / "checkpoints" / "llama-1b")
    variables = {}
    exec(compile(EXAMPLES[name], f"README.md: {name}", "exec"), variables)
    if name == "llm":
        out = capsys.readouterr().out
        assert "generation_tokens=" in out
        assert len(variables["answer"].outputs[0].token_ids) > 0
        exec(compile(EXAMPLES["beams"], "README.md: beams", "exec"), variables)
        scores = [h.score for h in variables["output"].outputs]
        assert len(scores) == 4
        assert scores == sorted(scores, reverse=True)
    else:
        assert variables["out"].shape == (20, 4, 64)
        assert variables["pool"].num_free == 31


def test_every_python_example_of_the_readme_is_tested():
    assert README.count("```python") == len(EXAMPLES) == 3
