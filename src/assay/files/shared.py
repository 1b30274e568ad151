"""Where the recipes and corpora that come with Assay lie.

In an installed package they are beside its code (`assay/shared/…`), in a checkout at its root.
Nothing is copied or written here.
"""

from __future__ import annotations

from pathlib import Path

from assay.errors import InputError

_PACKAGE = Path(__file__).resolve().parent.parent


def shared(name: str) -> Path:
    """The path of a file or folder that comes with Assay, for example `corpora/demo.yaml`.

    Raises InputError when this installation does not carry it.
    """
    for root in (_PACKAGE / "shared", _PACKAGE.parent.parent):
        path = root / name
        if path.exists():
            return path
    raise InputError(f"{name} does not come with this installation of Assay; install the package again")
