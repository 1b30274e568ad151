"""Where a segment ran and with what: command, code, packages, machine, environment.

Written into the start and recovery receipts. Nothing here is a secret: hosts and devices are
salted digests, paths are cut to their last part, and only allow-listed variables are read.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from assay.files.digest import canonical, digest
from assay.run.folder import RunFolder, salted

# Variables that change what the device computes; nothing else of the environment is recorded.
ALLOWED_PREFIXES = ("NCCL_", "CUDA_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "CUBLAS_", "OPENBLAS_")
IMAGE_VARIABLE = "ASSAY_IMAGE"
_SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "AUTH")
_USER_IN_ADDRESS = re.compile(r"://[^/\s]*@")
# An absolute path anywhere in a word: a slash that continues no name, up to what ends a path in a list.
_ABSOLUTE = re.compile(r"(?<![\w.…/-])/+[^\s:,;=|'\"]+")


def provenance(run: RunFolder, command: list[str]) -> dict[str, Any]:
    """Everything about a segment that needs no torch; see `train.numerics` for the rest."""
    return {
        "command": [_plain(run, word) for word in command],
        "code": code_identity(),
        "packages": packages(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "image": os.environ.get(IMAGE_VARIABLE),
        "host": salted(run, platform.node()),
        "environment": {name: _plain(run, value) for name, value in environment().items()},
    }


@functools.cache  # reading every package's metadata takes half a second; a process does not change what it loaded
def packages() -> dict[str, Any]:
    """Every installed package as name==version, sorted, and the digest of that list."""
    names = sorted({f"{item.name}=={item.version}" for item in metadata.distributions()})
    return {"sha256": digest(canonical(names)), "list": names}


@functools.cache  # asked for by every check of a start; the code that a process runs is the one it began with
def code_identity() -> dict[str, Any]:
    """The commit and dirty flag where the code lies in a git checkout, and the digest of every source file.

    The digest covers the names and contents of all Python files of the package; it is what the
    recipe's pin `code` is compared with. Commit and dirty are null outside a checkout.
    """
    root = Path(__file__).resolve().parents[1]
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    # An installed package carries the corpora beside its code, a checkout does not: they are not code that trains.
    names = sorted(path.as_posix() for path in paths if path.parts[0] != "shared")
    source = {name: digest((root / name).read_bytes()) for name in names}
    commit, changes = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--", ".")
    return {
        "sha256": digest(canonical(source)),
        "files": len(source),
        "commit": commit,
        "dirty": None if commit is None or changes is None else bool(changes),
    }


def environment() -> dict[str, str]:
    """Allow-listed variables as they are; what looks like a secret, by name or value, is left out."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(ALLOWED_PREFIXES)
        and not any(word in name.upper() for word in _SECRET_WORDS)
        and not _USER_IN_ADDRESS.search(value)
    }


def _git(root: Path, *arguments: str) -> str | None:
    try:
        # The checkout must be the one that holds this package: a site-packages folder inside
        # somebody's repository would otherwise report that repository's commit.
        tracked = subprocess.run(
            ["git", "-C", str(root), "ls-files", "--error-unmatch", "errors.py"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        if tracked.returncode != 0:
            return None
        answer = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _plain(run: RunFolder, word: str) -> str:
    """The word with `/a/b/c` as `…/c`, wherever an absolute path stands in it, and this host's name as its digest."""
    head, separator, tail = word.rpartition("=")
    if tail.startswith("/") and os.pathsep not in tail:  # one path, which may hold spaces
        word = f"{head}{separator}…/{Path(tail).name}"
    word = _ABSOLUTE.sub(lambda found: f"…/{Path(found[0]).name}", word)
    node = platform.node()
    return re.sub(rf"(?<!\w){re.escape(node)}(?!\w)", salted(run, node), word) if node else word
