"""What strangers wrote is shown as letters: it cannot steer the terminal that it is read on."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from assay.cli import show

STEERING = "\x1b]0;t\x07\x1b[2J\x9b2J\r\x7f\x08\u202e\u2066\u200f\u061c\u2028\ud800"
SHOWN: list[Callable[[str], None]] = [
    lambda text: show.note(text),
    lambda text: show.console().print(text),
    lambda text: show.console().print(text, markup=False, style="dim"),
    lambda text: show.console().print(show.pairs(text, {text: text, "two": [text, text]})),
    lambda text: show.console().print(show.table(text, (text, "b"), [(text, text)])),
    lambda text: show.as_json({text: [text]}),
]


@pytest.mark.parametrize("way", range(len(SHOWN)))
def test_no_letter_that_steers_a_terminal_reaches_it(way: int, capsys: pytest.CaptureFixture[str]) -> None:
    SHOWN[way](f"before{STEERING}after")
    shown = "".join(capsys.readouterr())
    assert not set(shown) & set(STEERING) - set("]0;t[2J")
    assert "before" in shown
    assert "after" in shown


@given(st.text())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_json_says_the_same_with_its_letters_escaped(capsys: pytest.CaptureFixture[str], text: str) -> None:
    show.as_json({"text": text + STEERING})
    out = capsys.readouterr().out
    assert json.loads(out) == {"ok": True, "text": text + STEERING}
    assert out.count("\n") == 1
    out.encode()  # it can be written


def test_what_looks_like_markup_stays_text_and_lines_stay_lines(capsys: pytest.CaptureFixture[str]) -> None:
    text = "[bold]zażółć[/bold] [link=file:///etc]x[/link] :smile:\n\tnext [1, 2)"
    show.console().print(text)
    show.console().print(show.table("", ("", ""), [(text, 1)]))
    out = capsys.readouterr().out
    assert out.startswith(text.expandtabs() + "\n")
    assert "[bold]zażółć[/bold] [link=file:///etc]x[/link] :smile:" in out.splitlines()[2]
