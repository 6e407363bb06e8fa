"""Compiles the CPU kernels when the project is built or installed."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = {
    "avx512_bf16": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mfma",
    "avx512": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma",
    "avx2": "-mavx2 -mfma -mf16c",
}


class CpuKernels(BuildHookInterface):
    """Adds `cpu_kernels/lib/*.so`; without a compiler jaxkv works, but slower."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile for every instruction set; called by hatchling."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        folder = root / "cpu_kernels" / "lib"
        shutil.rmtree(folder, ignore_errors=True)
        if sys.platform != "linux" or platform.machine() != "x86_64":
            return
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
        if compiler is None:
            self.app.display_warning("no C++ compiler: CPUs will run slower kernels")
            return
        folder.mkdir()
        try:
            for name, flags in FLAGS.items():
                _compile(compiler, flags, root, folder / f"{name}.so")
        except subprocess.CalledProcessError as error:
            shutil.rmtree(folder)
            self.app.display_warning(f"the CPU kernels were not compiled: {error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"
        build_data["artifacts"].append("cpu_kernels/lib/*.so")


def _compile(compiler: str, flags: str, root: Path, library: Path) -> None:
    import jaxlib

    headers = Path(jaxlib.__file__).parent / "include"
    command = [
        *compiler.split(),
        *["-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-psabi"],
        *["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"],
        *flags.split(),
        "-isystem",
        str(headers),
        str(root / "cpu_kernels" / "src" / "library.cc"),
        "-o",
        str(library),
    ]
    subprocess.run(command, check=True)
