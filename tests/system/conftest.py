"""One project with a sound file of every kind, made once for the tests of this folder."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from bad_inputs import make


@pytest.fixture(scope="session")
def sound_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its path; whoever changes something puts it back or works on a copy."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    path = make(tmp_path_factory.mktemp("sound") / "project").path
    for number, handler in handlers.items():
        signal.signal(number, handler)  # the training in this process took them over
    return path
