"""A source or destination that will not do: one sentence, and nothing half written."""

import itertools
import logging
import os
import subprocess
import threading
import time

import ml_dtypes
import numpy as np
import pytest

import convert.export
import convert.writer
from convert import convert_checkpoint, export_checkpoint
from jaxkv.engine.checkpoint import load_config, load_params
from tests.convert.folders import (
    TINY,
    assert_untouched,
    tiny_tensors,
    write_folder,
    write_tokenizer,
)


def refuse(tmp_path, message, src="hf", **options):
    """Assert that the conversion fails with a sentence and leaves nothing."""
    before = sorted(entry.name for entry in tmp_path.iterdir())
    with pytest.raises(ValueError, match=message) as caught:
        convert_checkpoint(tmp_path / src, tmp_path / "out", progress=False, **options)
    assert "\n" not in str(caught.value)
    assert_untouched(tmp_path, *before)


def test_a_missing_source(tmp_path):
    refuse(tmp_path, r"hf does not exist")


def test_a_source_that_is_neither_file_nor_folder(tmp_path):
    os.mkfifo(tmp_path / "hf")
    refuse(tmp_path, r"hf is neither a file nor a folder")


def test_a_file_that_is_no_gguf(tmp_path):
    (tmp_path / "hf").write_bytes(b"x")
    refuse(tmp_path, r"hf is neither a Hugging Face folder nor a .gguf file")


def test_an_unknown_dtype(tmp_path):
    write_folder(tmp_path / "hf")
    refuse(tmp_path, r"dtype must be one of .*, got 'int8'", dtype="int8")


def test_a_folder_without_config(tmp_path):
    write_folder(tmp_path / "hf")
    (tmp_path / "hf/config.json").unlink()
    refuse(tmp_path, r"hf is not a Hugging Face folder: it has no config.json")


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "", '{"a": ' * 100_000],
    ids=["cut_short", "list", "empty", "deep"],
)
def test_a_config_that_is_no_object(tmp_path, text):
    write_folder(tmp_path / "hf")
    (tmp_path / "hf/config.json").write_text(text)
    refuse(tmp_path, r"hf/config.json (is not readable JSON|holds a list)")


def test_a_byte_order_mark_before_the_config_is_skipped(tmp_path):
    write_folder(tmp_path / "hf")
    file = tmp_path / "hf/config.json"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    convert_checkpoint(tmp_path / "hf", tmp_path / "out", progress=False)
    assert load_config(tmp_path / "out").vocab_size == 40


def test_a_converted_checkpoint_as_the_source(tmp_path):
    write_folder(tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "done", progress=False)
    refuse(tmp_path, r"done is a converted checkpoint already", src="done")


def test_an_unknown_config_key(tmp_path):
    write_folder(tmp_path / "hf", TINY | {"embedding_multiplier": 12.0})
    refuse(
        tmp_path, r"hf/config.json: unknown key 'embedding_multiplier' \(value 12.0\)"
    )


def test_a_missing_shard(tmp_path):
    write_folder(tmp_path / "hf", num_shards=3)
    (tmp_path / "hf/model-00001-of-00003.safetensors").write_bytes(b"not looked at")
    (tmp_path / "hf/model-00002-of-00003.safetensors").unlink()
    (tmp_path / "hf/model-00003-of-00003.safetensors").unlink()
    (tmp_path / "hf/model-00003-of-00003.safetensors").mkdir()
    refuse(
        tmp_path,
        r"shards that are missing: model-00002-of-00003.safetensors; model-00003-of",
    )


def test_a_truncated_shard(tmp_path):
    write_folder(tmp_path / "hf", num_shards=2)
    shard = tmp_path / "hf/model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    refuse(tmp_path, r"model-00002-of-00002.safetensors is truncated: its header asks")


def test_no_weights_at_all(tmp_path):
    write_folder(tmp_path / "hf")
    (tmp_path / "hf/model.safetensors").unlink()
    refuse(
        tmp_path, r"hf has neither model.safetensors nor model.safetensors.index.json$"
    )
    (tmp_path / "hf/pytorch_model.bin").write_bytes(b"")
    refuse(tmp_path, r"; pytorch_model.bin are pickles, which are not read")
    (tmp_path / "hf/model-00001-of-00002.safetensors").write_bytes(b"")
    refuse(tmp_path, r"; model-00001-of-00002.safetensors cannot be read without the")


def test_a_directory_in_place_of_the_weights(tmp_path):
    write_folder(tmp_path / "hf")
    (tmp_path / "hf/model.safetensors").unlink()
    (tmp_path / "hf/model.safetensors").mkdir()
    refuse(tmp_path, r"hf/model.safetensors is a directory")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{}", r"index.json has no weight_map"),
        ('{"weight_map": {}}', r"index.json has no weight_map"),
        ('{"weight_map": {"a": "../x"}}', r"a lies in '../x', not a file name"),
        ('{"weight_map": {"a": 3}}', r"a lies in 3, not a file name"),
        (
            '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}',
            r"a is not in model-00001-of-00002.safetensors; .* is not listed there",
        ),
    ],
)
def test_an_index_that_does_not_fit_its_shards(tmp_path, index, message):
    write_folder(tmp_path / "hf", num_shards=2)
    (tmp_path / "hf/model.safetensors.index.json").write_text(index)
    refuse(tmp_path, message)


def test_tensors_that_do_not_fit_the_config(tmp_path):
    tensors = tiny_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(16, np.float32)
    tensors["norm.weight"] = np.zeros(16, np.float32)
    tensors["model.norm.weight"] = np.zeros(17, np.float32)
    write_folder(tmp_path / "hf", tensors=tensors)
    with pytest.raises(ValueError, match=r"do not fit the config") as caught:
        convert_checkpoint(tmp_path / "hf", tmp_path / "out", progress=False)
    message = str(caught.value)
    assert "layers.1.mlp.up_proj.weight is missing" in message
    assert "model.layers.0.self_attn.q_proj.bias is not a tensor of this" in message
    assert "; norm.weight is not a tensor of this model" in message
    assert "model.norm.weight has shape [17], the config asks for [16]" in message
    assert_untouched(tmp_path, "hf")


def test_an_untied_model_without_head(tmp_path):
    tensors = tiny_tensors()
    del tensors["lm_head.weight"]
    write_folder(tmp_path / "hf", tensors=tensors)
    refuse(
        tmp_path, r"hf: the tensors do not fit the config: lm_head.weight is missing$"
    )


def test_tensors_of_a_dtype_that_is_no_parameters(tmp_path):
    tensors = tiny_tensors()
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    write_folder(tmp_path / "hf", tensors=tensors)
    refuse(tmp_path, r"model.layers.0.mlp.up_proj.weight has dtype float8_e4m3fn")


def test_a_tokenizer_without_tokenizer_json(tmp_path):
    write_folder(tmp_path / "hf")
    (tmp_path / "hf/tokenizer.model").write_bytes(b"x")
    refuse(
        tmp_path, r"hf has tokenizer.model but no tokenizer.json: transformers makes"
    )


def test_a_broken_tokenizer(tmp_path):
    write_folder(tmp_path / "hf")
    (tmp_path / "hf/tokenizer.json").write_text("{}")
    refuse(tmp_path, r"hf/tokenizer.json is not a tokenizer.json")


def test_a_chat_template_that_is_no_text(tmp_path):
    write_folder(tmp_path / "hf")
    (tmp_path / "hf/chat_template.jinja").write_bytes(b"\xff")
    refuse(tmp_path, r"hf/chat_template.jinja is not UTF-8")


def test_a_generation_config_with_a_wrong_id(tmp_path):
    write_folder(tmp_path / "hf")
    (tmp_path / "hf/generation_config.json").write_text('{"eos_token_id": ["x"]}')
    refuse(tmp_path, r"generation_config.json: eos_token_id has the value \['x'\]")


def test_a_destination_that_exists(tmp_path):
    write_folder(tmp_path / "hf")
    (tmp_path / "out").mkdir()
    refuse(tmp_path, r"out exists already; --overwrite replaces it")
    refuse(tmp_path, r"out exists already", src="no such source")


@pytest.mark.parametrize("kind", ["file", "strangers", "huggingface", "extra"])
def test_overwriting_never_removes_what_we_did_not_write(tmp_path, kind):
    write_folder(tmp_path / "hf")
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("precious")
    elif kind == "strangers":
        out.mkdir()
        (out / "thesis.tex").write_text("precious")
    elif kind == "huggingface":
        write_folder(out)
    else:
        convert_checkpoint(tmp_path / "hf", out, progress=False)
        (out / "notes.txt").write_text("precious")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    message = (
        "is a file; the" if kind == "file" else "holds more than what this command"
    )
    refuse(tmp_path, rf"out {message}", overwrite=True)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_overwriting_replaces_a_checkpoint_and_an_empty_folder(tmp_path):
    (tmp_path / "out").mkdir()
    for seed in (1, 2):
        tensors = tiny_tensors(seed=seed)
        write_folder(tmp_path / f"hf{seed}", tensors=tensors)
        convert_checkpoint(
            tmp_path / f"hf{seed}", tmp_path / "out", overwrite=True, progress=False
        )
        params = load_params(tmp_path / "out")
        assert np.array_equal(params["norm.weight"], tensors["model.norm.weight"])
    assert_untouched(tmp_path, "hf1", "hf2", "out")


def test_a_failed_overwrite_leaves_the_old_checkpoint(tmp_path):
    tensors = write_folder(tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "out", progress=False)
    write_folder(tmp_path / "bad", tensors=tensors | {"lm_head.weight": np.zeros(3)})
    refuse(tmp_path, r"lm_head.weight has dtype float64", src="bad", overwrite=True)
    tensors["model.norm.weight"][0] = 1e30
    write_folder(tmp_path / "large", tensors=tensors)
    refuse(
        tmp_path,
        r"large: .*norm.weight has values beyond",
        src="large",
        dtype="float16",
        overwrite=True,
    )
    assert load_config(tmp_path / "out").dtype == "float32"


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch, error):
    write_folder(tmp_path / "hf")
    write_tokenizer(tmp_path / "hf")

    def fail(*_args, **_options):
        raise error

    monkeypatch.setattr(convert.writer.ocp.partial, "finalize", fail)
    with pytest.raises(type(error)):
        convert_checkpoint(tmp_path / "hf", tmp_path / "a/b/out", progress=False)
    assert_untouched(tmp_path, "hf")


def test_a_save_that_fails_in_a_thread_is_one_sentence(tmp_path, monkeypatch, capfd):
    write_folder(tmp_path / "hf")
    before = threading.excepthook, logging.getLogger("absl").filters[:]

    def die():
        logging.getLogger("absl").error("lost")
        time.sleep(0.2)
        (tmp_path / "lasted").touch()
        raise OSError("lost")

    def fail(*_args, **_options):
        threading.Thread(target=die).start()
        raise TypeError("disk full\ntrace\n")

    monkeypatch.setattr(convert.writer.ocp.partial, "save", fail)
    with pytest.raises(OSError, match=r"/out could not be written: disk full$"):
        convert_checkpoint(tmp_path / "hf", tmp_path / "out", progress=False)
    assert_untouched(tmp_path, "hf", "lasted")
    assert capfd.readouterr().err == ""
    assert (threading.excepthook, logging.getLogger("absl").filters) == before


def test_a_destination_taken_while_we_wrote_is_kept(tmp_path, monkeypatch):
    write_folder(tmp_path / "hf")
    finalize = convert.writer.ocp.partial.finalize

    def finalize_late(path):
        finalize(path)
        (tmp_path / "out").mkdir()
        (tmp_path / "out/theirs").write_text("")

    monkeypatch.setattr(convert.writer.ocp.partial, "finalize", finalize_late)
    with pytest.raises(ValueError, match=r"out exists already"):
        convert_checkpoint(tmp_path / "hf", tmp_path / "out", progress=False)
    assert_untouched(tmp_path, "hf", "out")
    assert_untouched(tmp_path / "out", "theirs")


def test_leftovers_of_a_killed_process_do_not_stand_in_the_way(tmp_path):
    write_folder(tmp_path / "hf")
    dead = subprocess.Popen(["true"])
    dead.wait()
    kept = [
        f".out.incomplete-{os.getppid()}",
        ".out.incomplete-x",
        ".out2.incomplete-9",
    ]
    gone = [f".out.incomplete-{pid}" for pid in (os.getpid(), dead.pid, 10**30)]
    for name in kept + gone:
        (tmp_path / name).mkdir()
        (tmp_path / name / "params").write_text("")
    convert_checkpoint(tmp_path / "hf", tmp_path / "out", progress=False)
    assert_untouched(tmp_path, "hf", "out", *kept)


def test_a_destination_in_folders_that_do_not_exist_yet(tmp_path):
    write_folder(tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "a/b/out", progress=False)
    assert load_config(tmp_path / "a/b/out").vocab_size == 40


def test_an_export_of_something_else(tmp_path):
    write_folder(tmp_path / "hf")
    with pytest.raises(ValueError, match=r"hf/config.json is not of a converted"):
        export_checkpoint(tmp_path / "hf", tmp_path / "out", progress=False)
    with pytest.raises(ValueError, match=r"none is not a folder"):
        export_checkpoint(tmp_path / "none", tmp_path / "out", progress=False)
    assert_untouched(tmp_path, "hf")


def test_an_export_to_a_place_that_is_taken(tmp_path):
    write_folder(tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "done", progress=False)
    with pytest.raises(ValueError, match=r"hf exists already; --overwrite replaces it"):
        export_checkpoint(tmp_path / "done", tmp_path / "hf", progress=False)
    with pytest.raises(ValueError, match=r"done holds more than what this command"):
        export_checkpoint(
            tmp_path / "done", tmp_path / "done", overwrite=True, progress=False
        )
    # The same names as an export's, but not from one.
    with pytest.raises(ValueError, match=r"hf holds more than what this command"):
        export_checkpoint(
            tmp_path / "done", tmp_path / "hf", overwrite=True, progress=False
        )
    export_checkpoint(tmp_path / "done", tmp_path / "out", progress=False)
    (tmp_path / "out/README.md").write_text("precious")
    with pytest.raises(ValueError, match=r"out holds more than what this command"):
        export_checkpoint(
            tmp_path / "done", tmp_path / "out", overwrite=True, progress=False
        )
    assert_untouched(tmp_path, "hf", "done", "out")


def test_an_export_cut_short_leaves_nothing(tmp_path, monkeypatch):
    write_folder(tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "done", progress=False)
    iterate = convert.export.iterate_params

    def cut_short(path, config):
        yield from itertools.islice(iterate(path, config), 3)
        raise OSError("disk gone")

    monkeypatch.setattr(convert.export, "iterate_params", cut_short)
    with pytest.raises(OSError, match=r"disk gone"):
        export_checkpoint(tmp_path / "done", tmp_path / "out", progress=False)
    assert_untouched(tmp_path, "hf", "done")


def test_a_folder_of_another_architecture(tmp_path):
    config = TINY | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    write_folder(tmp_path / "hf", config)
    refuse(tmp_path, r"model_type 'mamba' is not supported; known are \['llama'")
