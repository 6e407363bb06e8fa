"""Folders of Hugging Face's become checkpoints, bit for bit."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from convert import convert_checkpoint
from jaxkv.engine.checkpoint import load_config, load_params, load_tokenizer
from tests.convert.folders import (
    DTYPES,
    TINY,
    assert_untouched,
    same_bits,
    tiny_tensors,
    write_folder,
    write_tokenizer,
)


def convert(src, dst, **options):
    convert_checkpoint(src, dst, progress=False, **options)
    return load_config(dst), load_params(dst)


def short(tensors):
    return {name.removeprefix("model."): array for name, array in tensors.items()}


def assert_same(params, tensors):
    assert params.keys() == tensors.keys()
    different = [n for n in params if not same_bits(params[n], tensors[n])]
    assert different == []


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_the_numbers_arrive_bit_for_bit(tmp_path, name, num_shards):
    config = TINY | {"torch_dtype": name}
    tensors = tiny_tensors(config, DTYPES[name])
    # NaN payloads, infinities and subnormals are numbers too.
    special = tensors["model.norm.weight"].view(f"u{np.dtype(DTYPES[name]).itemsize}")
    special[:4] = np.iinfo(special.dtype).max, 1, 0, special.dtype.type(0x7C01)
    write_folder(tmp_path / "hf", config, tensors, num_shards)
    model, params = convert(tmp_path / "hf", tmp_path / "out")
    assert model.dtype == name
    assert_same(params, short(tensors))
    assert_untouched(tmp_path, "hf", "out")


def test_a_checkpoint_holds_what_design_says_and_no_more(tmp_path):
    write_folder(tmp_path / "hf")
    write_tokenizer(tmp_path / "hf", eos_token="</s>", bos_token="<s>")
    convert(tmp_path / "hf", tmp_path / "out")
    assert_untouched(
        tmp_path / "out",
        "config.json",
        "generation_config.json",
        "params",
        "tokenizer.json",
        "tokenizer_config.json",
    )
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (
        tmp_path / "hf/tokenizer.json"
    ).read_bytes()


@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_a_dtype_is_cast_to_rounding_to_nearest(tmp_path, stored, target):
    tensors = tiny_tensors(dtype=DTYPES[stored])
    write_folder(tmp_path / "hf", tensors=tensors)
    model, params = convert(tmp_path / "hf", tmp_path / "out", dtype=target)
    assert model.dtype == target
    cast = {name: array.astype(DTYPES[target]) for name, array in tensors.items()}
    assert_same(params, short(cast))


@pytest.mark.parametrize(
    ("stated", "expected"), [("bfloat16", "bfloat16"), (None, "float32")]
)
def test_mixed_dtypes_become_the_one_the_config_states(tmp_path, stated, expected):
    tensors = tiny_tensors(dtype=ml_dtypes.bfloat16)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    write_folder(tmp_path / "hf", TINY | {"torch_dtype": stated}, tensors)
    model, params = convert(tmp_path / "hf", tmp_path / "out")
    assert model.dtype == expected
    assert {array.dtype.name for array in params.values()} == {expected}


def test_one_dtype_in_all_tensors_counts_more_than_a_stated_one(tmp_path):
    write_folder(tmp_path / "hf", TINY | {"torch_dtype": "bfloat16"}, tiny_tensors())
    model, _ = convert(tmp_path / "hf", tmp_path / "out")
    assert model.dtype == "float32"


def test_values_that_the_dtype_cannot_hold_are_an_error(tmp_path):
    tensors = tiny_tensors()
    tensors["model.norm.weight"][3] = 1e5
    write_folder(tmp_path / "hf", tensors=tensors)
    with pytest.raises(
        ValueError, match=r"model.norm.weight has values beyond .*float16"
    ):
        convert(tmp_path / "hf", tmp_path / "out", dtype="float16")
    assert_untouched(tmp_path, "hf")


TIED = TINY | {"tie_word_embeddings": True}


def test_tied_embeddings_are_stored_once(tmp_path):
    tensors = tiny_tensors(TIED)
    write_folder(tmp_path / "without", TIED, tensors)
    model, params = convert(tmp_path / "without", tmp_path / "out1")
    assert model.tie_word_embeddings
    assert_same(params, short(tensors))
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    write_folder(tmp_path / "with", TIED, tensors | head)
    _, params = convert(tmp_path / "with", tmp_path / "out2")
    assert_same(params, short(tensors))


def test_tied_embeddings_stored_as_the_head_are_found(tmp_path):
    tensors = tiny_tensors(TIED)
    stored = dict(tensors)
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    write_folder(tmp_path / "hf", TIED, stored)
    _, params = convert(tmp_path / "hf", tmp_path / "out")
    assert_same(params, short(tensors))


def test_a_tied_head_that_differs_is_an_error(tmp_path):
    tensors = tiny_tensors(TIED)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"][-1, -1] += 1
    write_folder(tmp_path / "hf", TIED, tensors)
    with pytest.raises(
        ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"
    ):
        convert(tmp_path / "hf", tmp_path / "out")


def test_stored_rotary_frequencies_are_ignored(tmp_path):
    tensors = tiny_tensors(dtype=np.float16)
    buffers = {
        "model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
        "model.rotary_emb.inv_freq": np.ones(2, np.float32),
    }
    write_folder(tmp_path / "hf", tensors=tensors | buffers)
    model, params = convert(tmp_path / "hf", tmp_path / "out")
    assert model.dtype == "float16"
    assert_same(params, short(tensors))


def test_a_stale_shard_beside_the_index_is_ignored(tmp_path):
    tensors = write_folder(tmp_path / "hf", num_shards=2)
    stale = {"model.layers.9.extra": np.zeros(3, np.float32)}
    safetensors.numpy.save_file(stale, tmp_path / "hf/model-00003-of-00003.safetensors")
    (tmp_path / "hf/stale.safetensors").write_bytes(b"broken")
    _, params = convert(tmp_path / "hf", tmp_path / "out")
    assert_same(params, short(tensors))


def test_end_of_sequence_ids_of_all_files_are_joined(tmp_path):
    write_folder(tmp_path / "hf", TINY | {"eos_token_id": 5})
    generation = {"eos_token_id": [5, 8, 9], "temperature": 0.6}
    (tmp_path / "hf/generation_config.json").write_text(json.dumps(generation))
    write_tokenizer(tmp_path / "hf", eos_token={"content": "<|end|>", "special": True})
    model, _ = convert(tmp_path / "hf", tmp_path / "out")
    assert model.eos_token_ids == (5, 8, 9, 3)
    copied = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert copied == generation


def test_without_generation_config_the_ids_are_written(tmp_path):
    write_folder(tmp_path / "hf", TINY | {"eos_token_id": [5, 6]})
    convert(tmp_path / "hf", tmp_path / "out")
    written = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert written == {"bos_token_id": 1, "eos_token_id": [5, 6]}


def test_the_eos_token_may_stand_in_the_special_tokens_map(tmp_path):
    write_folder(tmp_path / "hf")
    write_tokenizer(tmp_path / "hf")
    (tmp_path / "hf/special_tokens_map.json").write_text('{"eos_token": "<|end|>"}')
    model, _ = convert(tmp_path / "hf", tmp_path / "out")
    assert model.eos_token_ids == (2, 3)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", "TEMPLATE\n"),
        ("chat_template.json", '{"chat_template": "TEMPLATE\\n"}'),
    ],
)
def test_a_chat_template_in_a_file_of_its_own_is_found(tmp_path, file, content):
    write_folder(tmp_path / "hf")
    write_tokenizer(tmp_path / "hf", chat_template="old")
    (tmp_path / "hf" / file).write_text(content)
    convert(tmp_path / "hf", tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer is not None
    assert tokenizer.chat_template == "TEMPLATE\n"


def test_a_folder_without_tokenizer_converts(tmp_path):
    write_folder(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "out")
    assert load_tokenizer(tmp_path / "out") is None


def test_a_head_dim_that_is_not_hidden_over_heads_converts(tmp_path):
    config = TINY | {"head_dim": 8}
    tensors = write_folder(tmp_path / "hf", config, tiny_tensors(config))
    model, params = convert(tmp_path / "hf", tmp_path / "out")
    assert model.head_dim == 8
    assert params["layers.0.self_attn.q_proj.weight"].shape == (32, 16)
    assert_same(params, short(tensors))


def test_one_progress_bar_counts_the_bytes(tmp_path, capsys):
    write_folder(tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "out")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    # 5200 parameters of 4 bytes are 20.3 KiB
    assert "converting: 100%" in shown.err
    assert "20.3k/20.3k" in shown.err
