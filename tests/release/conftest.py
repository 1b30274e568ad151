"""Fixtures of this room: a run trained once a session, and copies of it that a test may damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from trained_run import train


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project of `trained_run.train`; only to be read."""
    return train(tmp_path_factory.mktemp("trained") / "project")


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    """A copy of the project that a test may damage."""
    return Path(shutil.copytree(trained, tmp_path / "project"))
