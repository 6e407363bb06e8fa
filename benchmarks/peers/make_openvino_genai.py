"""Make an OpenVINO model of a Hugging Face folder: `... MODEL FOLDER`, float32.

What it computes in is chosen when it is loaded.
"""

import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Export with the command of optimum-intel."""
    model, folder = sys.argv[1:]
    command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino"]
    options = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
    subprocess.run([*command, "--model", model, *options, folder], check=True)


if __name__ == "__main__":
    main()
