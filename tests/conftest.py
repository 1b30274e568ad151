"""Fixtures of all rooms: a small project, and the real command in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small import Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A fresh small project."""
    return Project(tmp_path / "project")


@pytest.fixture
def assay(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The real command in a process of its own, in `tmp_path`, on one thread."""

    def call(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "assay.cli.main", *map(str, words)],
            capture_output=True,
            text=True,
            cwd=options.pop("cwd", tmp_path),
            env={**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})},
            timeout=300,
            check=False,
            **options,
        )

    return call
