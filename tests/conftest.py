"""Fixtures of all rooms: a small project, and the real command in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from small import Project

# How fast an example is drawn or tried says something of the machine's neighbours, not of Assay.
settings.register_profile("assay", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("assay")

# The longest files, longest first: two processes that share the files out should not end up waiting for one of them.
LONG = ("test_many_ranks.py", "test_ranks.py", "test_torture.py", "test_fresh.py", "test_light_rooms.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, the rest in the usual order."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


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
