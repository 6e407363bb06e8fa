"""A checkpoint written back as a Hugging Face folder is the same checkpoint."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from convert import convert_checkpoint, export_checkpoint
from convert.export import write_huggingface
from jaxkv.engine.checkpoint import load_config, load_params
from tests.convert.folders import (
    DTYPES,
    TINY,
    assert_untouched,
    same_bits,
    tiny_tensors,
    write_folder,
    write_tokenizer,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def convert(src, dst):
    convert_checkpoint(src, dst, progress=False)
    return dst


def export(src, dst, **options):
    export_checkpoint(src, dst, progress=False, **options)
    return dst


def assert_same_checkpoint(left, right):
    """The configs are equal, every other file has the same bytes, every bit is."""
    assert load_config(left) == load_config(right)
    left_params, right_params = load_params(left), load_params(right)
    assert list(left_params) == list(right_params)
    assert all(same_bits(left_params[n], right_params[n]) for n in left_params)
    names = {entry.name for entry in left.iterdir()} - {"params"}
    assert names == {entry.name for entry in right.iterdir()} - {"params"}
    for name in names:
        assert (left / name).read_bytes() == (right / name).read_bytes(), name


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (TINY, "float32"),
        (TINY | {"tie_word_embeddings": True}, "bfloat16"),
        (TINY | {"head_dim": 8, "eos_token_id": [2, 3]}, "float16"),
        (TINY | {"rope_scaling": LLAMA3, "rope_theta": 5e5}, "bfloat16"),
        (TINY | {"rope_scaling": {"type": "linear", "factor": 2}}, "float32"),
    ],
    ids=["llama", "tied_bf16", "head_dim_f16", "llama3_bf16", "linear"],
)
def test_the_round_trip_is_the_identity(tmp_path, config, dtype):
    tensors = tiny_tensors(config, DTYPES[dtype])
    write_folder(tmp_path / "hf", config, tensors)
    native = convert(tmp_path / "hf", tmp_path / "native")
    exported = export(native, tmp_path / "exported")
    written = safetensors.numpy.load_file(exported / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(same_bits(written[name], tensors[name]) for name in tensors)
    assert_same_checkpoint(native, convert(exported, tmp_path / "again"))
    assert_untouched(tmp_path, "hf", "native", "exported", "again")


def test_the_round_trip_keeps_tokenizer_and_generation_settings(tmp_path):
    write_folder(tmp_path / "hf")
    write_tokenizer(tmp_path / "hf", eos_token="<|end|>", chat_template="{{ 'é' }}\n")
    generation = {"eos_token_id": [2, 7], "top_p": 0.9}
    (tmp_path / "hf/generation_config.json").write_text(json.dumps(generation))
    native = convert(tmp_path / "hf", tmp_path / "native")
    assert load_config(native).eos_token_ids == (2, 7, 3)
    exported = export(native, tmp_path / "exported")
    settings = json.loads((exported / "tokenizer_config.json").read_text())
    assert settings == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "chat_template": "{{ 'é' }}\n",
    }
    assert_same_checkpoint(native, convert(exported, tmp_path / "again"))


def test_the_exported_config_is_in_the_form_both_versions_read(tmp_path):
    write_folder(tmp_path / "hf", TINY | {"rope_scaling": LLAMA3})
    export(convert(tmp_path / "hf", tmp_path / "native"), tmp_path / "exported")
    assert json.loads((tmp_path / "exported/config.json").read_text()) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "use_cache": True,
        "rope_theta": 10000.0,
        "rope_scaling": LLAMA3,
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": [2],
    }


def test_shards_start_before_the_limit_and_have_an_index(tmp_path):
    tensors = write_folder(tmp_path / "hf")
    native = convert(tmp_path / "hf", tmp_path / "native")
    # embed_tokens is 2560 bytes, a projection to 24 is 1536.
    write_huggingface(
        native, tmp_path / "exported", max_shard_bytes=4000, progress=False
    )
    index = json.loads((tmp_path / "exported/model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 20800}
    shards = sorted(path.name for path in (tmp_path / "exported").glob("*.safetensors"))
    assert shards == [f"model-{n:05}-of-00007.safetensors" for n in range(1, 8)]
    read = {}
    for shard in shards:
        part = safetensors.numpy.load_file(tmp_path / "exported" / shard)
        assert sum(array.nbytes for array in part.values()) <= 4000
        assert all(index["weight_map"][name] == shard for name in part)
        read |= part
    assert read.keys() == tensors.keys() == index["weight_map"].keys()
    assert_same_checkpoint(native, convert(tmp_path / "exported", tmp_path / "again"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_shard_bytes", [10**6, 3000])
def test_kv_scales_are_exported_and_read_back(tmp_path, dtype, max_shard_bytes):
    config = TINY | {"num_hidden_layers": 3, "intermediate_size": 25}
    scales = {
        "model.layers.0.self_attn.k_proj.k_scale": np.float32(0.1),
        "model.layers.0.self_attn.v_proj.v_scale": np.float32(0.2),
        "model.layers.2.self_attn.k_scale": np.float32(3),
        "model.layers.2.self_attn.v_scale": np.float32(4e-3),
    }
    arrays = {name: np.array([value]) for name, value in scales.items()}
    tensors = tiny_tensors(config, DTYPES[dtype])
    write_folder(tmp_path / "hf", config, tensors | arrays)
    native = convert(tmp_path / "hf", tmp_path / "native")
    exported = tmp_path / "exported"
    write_huggingface(native, exported, max_shard_bytes=max_shard_bytes, progress=False)
    written = {}
    for shard in exported.glob("*.safetensors"):
        written |= safetensors.numpy.load_file(shard)
    first = sorted(exported.glob("*.safetensors"))[0].read_bytes()
    header = json.loads(first[8 : 8 + int.from_bytes(first[:8], "little")])
    # Ahead of parameters of two bytes, of which there may be an odd number.
    assert header["model.layers.0.self_attn.k_scale"]["data_offsets"] == [0, 4]
    assert header["model.layers.2.self_attn.v_scale"]["data_offsets"] == [12, 16]
    for name, value in scales.items():
        name = name.replace("k_proj.", "").replace("v_proj.", "")
        assert same_bits(written.pop(name), np.array([value], np.float32))
    assert written.keys() == tensors.keys()
    assert all(same_bits(written[name], tensors[name]) for name in tensors)
    assert "quantization_config" not in json.loads(
        (exported / "config.json").read_text()
    )
    assert_same_checkpoint(native, convert(exported, tmp_path / "again"))


def test_exported_data_is_aligned(tmp_path):
    write_folder(tmp_path / "hf")
    export(convert(tmp_path / "hf", tmp_path / "native"), tmp_path / "exported")
    raw = (tmp_path / "exported/model.safetensors").read_bytes()
    assert int.from_bytes(raw[:8], "little") % 8 == 0
    assert json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])[
        "__metadata__"
    ] == {"format": "pt", "written_by": "jaxkv export"}


def test_an_earlier_export_is_replaced_when_asked_to(tmp_path):
    for seed in (1, 2):
        write_folder(tmp_path / f"hf{seed}", tensors=tiny_tensors(seed=seed))
        convert(tmp_path / f"hf{seed}", tmp_path / f"native{seed}")
        export(tmp_path / f"native{seed}", tmp_path / "exported", overwrite=True)
        written = safetensors.numpy.load_file(tmp_path / "exported/model.safetensors")
        expected = tiny_tensors(seed=seed)["model.norm.weight"]
        assert np.array_equal(written["model.norm.weight"], expected)
    assert_untouched(tmp_path, "hf1", "hf2", "native1", "native2", "exported")


def test_one_progress_bar_counts_the_bytes(tmp_path, capsys):
    write_folder(tmp_path / "hf")
    native = convert(tmp_path / "hf", tmp_path / "native")
    export_checkpoint(native, tmp_path / "exported")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "exporting: 100%" in shown.err
    assert "20.3k/20.3k" in shown.err


FIXTURES = sorted((Path(__file__).parents[1] / "fixtures/hf").glob("*/config.json"))


@pytest.mark.parametrize("file", FIXTURES, ids=lambda file: file.parent.name)
def test_every_family_and_option_round_trips(tmp_path, file):
    native = convert(file.parent, tmp_path / "native")
    exported = export(native, tmp_path / "exported")
    assert_same_checkpoint(native, convert(exported, tmp_path / "again"))
