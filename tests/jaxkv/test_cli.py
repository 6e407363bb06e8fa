import json

import numpy as np
import pytest

from jaxkv.cli import main
from tests.checkpoints import write_tiny_checkpoint
from tests.convert.folders import TINY, tiny_tensors, write_folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("cli") / "checkpoint")


LIMITS = ["--num-blocks", "64", "--max-model-len", "128", "--max-num-seqs", "4"]


def test_generate_prints_every_answer_in_order_and_what_the_cache_did(
    checkpoint, capsys
):
    arguments = ["-p", "first", "-p", "second", "--max-tokens", "5", "--stats"]
    assert main(["generate", str(checkpoint), *arguments, *LIMITS]) == 0
    out = capsys.readouterr().out
    assert out.index("> first") < out.index("> second") < out.index("2 requests")
    # "first" and "second" are 11 byte tokens; 5 more each is one block each.
    assert "2 requests, 11 prompt tokens, 10 generated" in out
    assert "at most 2 of 63 blocks held" in out
    per_token = 2 * 2 * 2 * 4 * 4  # K and V, layers, heads, head_dim, bytes
    assert f"({per_token} bytes a token)" in out
    assert "Contiguous allocation of 128 tokens for each of 2 requests" in out


def test_generate_reads_prompts_from_standard_input(checkpoint, capsys, monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert main(["generate", str(checkpoint), "--max-tokens", "2", *LIMITS]) == 0
    out = capsys.readouterr().out
    assert out.index("> one") < out.index("> two")


def test_generate_with_a_low_bit_cache(checkpoint, capsys):
    options = ["--kv-cache-dtype", "int4:int8", "--kv-cache-rotation"]
    options += ["--kv-cache-skip-layers", "0,0", "--stats"]
    arguments = ["-p", "first", "--max-tokens", "2", *options]
    assert main(["generate", str(checkpoint), *arguments, *LIMITS]) == 0
    heads = 2
    first = heads * (4 * 4 + 4 * 4)
    second = heads * (2 + 2 + 4 + 4)
    assert f"({first + second} bytes a token)" in capsys.readouterr().out


def test_info_says_what_a_token_costs(checkpoint, capsys):
    assert main(["info", str(checkpoint), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kv_bytes_per_token"] == {
        "float32": 128,
        "bfloat16": 64,
        "float16": 64,
        "int8": 64,
        "fp8_e4m3": 64,
        "fp8_e5m2": 64,
        "int4": 32,
        "int4_asymmetric": 48,
    }
    assert facts["tokenizer_token_ids"] == 258
    assert facts["vocab_size"] == 264
    assert facts["chat_template"] is True
    assert main(["info", str(checkpoint)]) == 0
    out = capsys.readouterr().out
    assert "KV cache in float32: 128 bytes a token, 2,048 a block of 16" in out


def test_info_and_convert_say_which_calibrated_scales_there_are(
    checkpoint, tmp_path, capsys
):
    assert main(["info", str(checkpoint)]) == 0
    assert "\n  no calibrated KV scales\n" in capsys.readouterr().out
    tensors = tiny_tensors(TINY | {"num_hidden_layers": 3})
    for layer, k_scale, v_scale in ((0, 0.5, 0.75), (2, 0.0625, 12.0)):
        prefix = f"model.layers.{layer}.self_attn"
        tensors[f"{prefix}.k_scale"] = np.float32([k_scale])
        tensors[f"{prefix}.v_scale"] = np.float32([v_scale])
    write_folder(tmp_path / "hf", TINY | {"num_hidden_layers": 3}, tensors)
    scaled = str(tmp_path / "scaled")
    assert main(["convert", str(tmp_path / "hf"), scaled, "--quiet"]) == 0
    said = "calibrated KV scales for 2 of 3 layers (K 0.0625 to 0.5, V 0.75 to 12)"
    assert capsys.readouterr().out == f"wrote {scaled}, with {said}\n"
    assert main(["info", scaled]) == 0
    out = capsys.readouterr().out
    assert f"\n  {said}\n" in out
    assert "kv_scales" not in out
    assert main(["info", scaled, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kv_scales"] == [[0.5, 0.75], None, [0.0625, 12.0]]


def test_convert_and_export_are_a_round_trip(checkpoint, tmp_path, capsys):
    exported, again = tmp_path / "hf", tmp_path / "again"
    assert main(["export", str(checkpoint), str(exported), "--quiet"]) == 0
    assert main(["convert", str(exported), str(again), "--quiet"]) == 0
    assert capsys.readouterr().out == f"wrote {exported}\nwrote {again}\n"
    assert (again / "config.json").read_text() == (
        checkpoint / "config.json"
    ).read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "nowhere"], "nowhere"),
        (["convert", "nowhere", "there"], "nowhere does not exist"),
        (["generate", "nowhere", "-p", "x"], "nowhere is not a folder"),
        (["generate", "{}", "-p", ""], "the prompt is empty"),
        (["generate", "{}", "-p", "x" * 128], "max_model_len is 128"),
        (["generate", "{}", "-p", "x", "--temperature", "-1"], "temperature must be"),
        (
            ["generate", "{}", "-p", "x", "--kv-cache-dtype", "int2"],
            "kv_cache_dtype must be one of",
        ),
        (
            ["generate", "{}", "-p", "x", "--kv-cache-dtype", "fp8_e4m3_static"],
            "kv_cache_dtype 'fp8_e4m3_static' needs calibrated scales",
        ),
        (["generate", "{}", "-p", "x", "--top-p", "0"], "top_p must be in"),
        (["generate", "{}", "-p", "x", "--max-tokens", "0"], "max_tokens must be"),
        (["generate", "{}", "-p", "x", "--system", "y"], "--system needs --chat"),
        (
            ["generate", "{}", "-p", "x" * 100, "--num-blocks", "4"],
            "but the pool has 48",
        ),
    ],
)
def test_errors_are_one_sentence_without_a_traceback(
    checkpoint, capsys, arguments, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    filled = [argument.format(checkpoint) for argument in arguments]
    if filled[0] == "generate":
        given = set(filled)
        for name, value in zip(LIMITS[::2], LIMITS[1::2], strict=True):
            filled += [] if name in given else [name, value]
    assert main(filled) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    last = captured.err.strip().split("\n")[-1]
    assert last.startswith(f"jaxkv {filled[0]}: ")
    assert message in last
    assert "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [[], ["generate"], ["convert"], ["info"]])
def test_help_is_there_for_every_command(command, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([*command, "--help"])
    assert exit_.value.code == 0
    assert "usage: jaxkv" in capsys.readouterr().out
