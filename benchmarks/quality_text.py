"""The text that quality is measured on: a novel, from a package that carries it.

"Botchan (Master Darling)" by Natsume Soseki, translated by Yasotaro Morri, 1919;
Project Gutenberg's eBook 8868, in the public domain. The source package of
`sentencepiece` has it among its tests.
"""

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "sentencepiece"
VERSION = "0.2.3"
NAME = (
    "Botchan, by Natsume Soseki, translated by Yasotaro Morri (1919), from the source "
    f"package of {PACKAGE} {VERSION}"
)
MEMBER = f"{PACKAGE}-{VERSION}/test/botchan.txt"
SHA256 = "464bd5300c24fce16fcc4555d4231a57632caae4d0090ad6aa92854a3b227ba7"
_START = "*** START OF THIS PROJECT GUTENBERG EBOOK"
_END = "*** END OF THIS PROJECT GUTENBERG EBOOK"


def fetch(folder: Path) -> Path:
    """Download the source package unless the text is there; return the text's file.

    Raises:
        ValueError: The file is not the one that the figures were made with.
    """
    path = folder / Path(MEMBER).name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            source_only = ["--no-binary", PACKAGE, "--dest", scratch]
            subprocess.run(
                [*pip, *source_only, f"{PACKAGE}=={VERSION}"],
                check=True,
                stdout=sys.stderr,
            )
            (archive,) = Path(scratch).glob("*.tar.gz")
            with tarfile.open(archive) as members:
                source = members.extractfile(MEMBER)
                assert source is not None, f"{MEMBER} is no file"
                partial = Path(scratch) / "partial.txt"
                partial.write_bytes(source.read())
            partial.rename(path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise ValueError(f"{path} has SHA-256 {found}, expected {SHA256}")
    return path


def read(path: Path) -> str:
    """Return a file's text, line ends as on Unix, without what the publisher adds.

    Raises:
        ValueError: It is not UTF-8; names it.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    marks = {
        mark: place
        for place, line in enumerate(lines)
        for mark in (_START, _END)
        if line.startswith(mark)
    }
    begin, end = marks.get(_START, -1) + 1, marks.get(_END, len(lines))
    return "\n".join(lines[begin:end]) + "\n"
