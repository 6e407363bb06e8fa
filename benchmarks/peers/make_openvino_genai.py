"""Make an OpenVINO model of a Hugging Face folder: `... MODEL FOLDER`, float32.

What it computes in is chosen when it is loaded.
"""

import subprocess
import sys


def main() -> None:
    """Export with the command of optimum-intel."""
    model, folder = sys.argv[1:]
    command = [sys.executable, "-m", "optimum.commands.optimum_cli"]
    options = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
    subprocess.run(
        [*command, "export", "openvino", "--model", model, *options, folder], check=True
    )


if __name__ == "__main__":
    main()
