"""What is wrong with a command line, in one sentence: the option, the value that was given, what is expected.

The command-line library says it in three lines, without the value; here its faults become sentences like all
others. It knows no option.
"""

from __future__ import annotations

import re
from typing import Any

import typer

_EXPECTED = {
    "int_parsing": "an integer is expected",
    "int_parsing_size": "a smaller integer is expected",
    "int_from_float": "an integer is expected",
    "float_parsing": "a number is expected",
    "finite_number": "a finite number is expected",
    "greater_than": "a number above {gt:g} is expected",
    "greater_than_equal": "a number of at least {ge:g} is expected",
    "less_than": "a number below {lt:g} is expected",
    "less_than_equal": "a number of at most {le:g} is expected",
}


def is_help(fault: typer.TyperException) -> bool:
    """Whether it is no fault of an option: a group of commands was named alone, which shows its help."""
    return type(fault).__name__ == "NoArgsIsHelpError"  # the library exports no name for it


def sentence(fault: typer.TyperException) -> str:
    """The fault as a sentence; where it is not about a value it says where help is."""
    parameter, context = getattr(fault, "param", None), getattr(fault, "ctx", None)
    # Values are read by pydantic, whose own fault is the cause.
    faults: list[dict[str, Any]] = getattr(fault.__cause__, "errors", list)()
    if parameter is not None and faults:
        first = faults[0]
        wanted = _EXPECTED.get(first["type"], str(first["msg"])).format(**first.get("ctx", {}))
        return f"{_name(parameter)} is {first['input']!r:.80}; {wanted}"
    if type(fault).__name__ == "MissingParameter" and parameter is not None:
        text = f"{_name(parameter)} is missing"
    else:
        text = fault.format_message().replace("(Possible", "(possible").rstrip(".")
        text = re.sub(r"\. Did you mean (.*)\?$", r" (did you mean \1?)", text[:1].lower() + text[1:])
    return f"{text}; see {context.command_path} --help" if context is not None else text


def _name(parameter: Any) -> str:
    return str(parameter.get_error_hint()).replace("'", "")
