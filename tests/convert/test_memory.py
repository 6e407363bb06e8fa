"""Converting and exporting hold about the largest tensor, never the model."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]

# 417 MB of float32 in tensors of at most 33 MB.
CONFIG = {
    "model_type": "llama",
    "vocab_size": 8000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
# The child's own peak, from the kernel: `ru_maxrss` would count the parent before exec.
CHILD = """
import sys
from pathlib import Path

def peak_mb():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1000

import convert
imports = peak_mb()
getattr(convert, sys.argv[1])(sys.argv[2], sys.argv[3], progress=False)
print(imports, peak_mb())
"""


def run(command, src, dst):
    """Run a conversion in a process of its own; return MB, imports and peak."""
    result = subprocess.run(
        [sys.executable, "-c", CHILD, command, str(src), str(dst)],
        cwd=ROOT,
        env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    imports, peak = map(float, result.stdout.split())
    return imports, peak


def write_large_folder(folder):
    """Write the folder tensor by tensor, so that this process stays small as well."""
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes = {"model.embed_tokens.weight": (CONFIG["vocab_size"], hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name in "qkvo":
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (hidden, hidden)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    header, position = {}, 0
    for name, shape in shapes.items():
        end = position + 4 * int(np.prod(shape))
        offsets = [position, end]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        position = end
    raw = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for shape in shapes.values():
            file.write(rng.random(shape, np.float32).tobytes())
    assert position > 400_000_000


@pytest.mark.slow
def test_peak_memory_is_near_the_largest_tensors(tmp_path):
    write_large_folder(tmp_path / "hf")
    # Groups of 34 MB take about four times that in Orbax and its compression, and
    # reading adds a cache of 100 MB; none of it grows with the model.
    imports, peak = run("convert_checkpoint", tmp_path / "hf", tmp_path / "native")
    assert peak - imports < 200, (imports, peak)
    imports, peak = run("export_checkpoint", tmp_path / "native", tmp_path / "exported")
    assert peak - imports < 300, (imports, peak)
    original = (tmp_path / "hf/model.safetensors").stat().st_size
    exported = (tmp_path / "exported/model.safetensors").stat().st_size
    assert abs(exported - original) < 10_000
    shutil.rmtree(tmp_path)  # pytest would keep 1.2 GB for three runs
