"""The handbook holds: every command in it parses, every link in it leads somewhere, its script does what it says.

Commands are parsed by the real application, in this process, without being run. Outputs are not compared.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from assay.cli.commands import app
from assay.ledger.ledger import Ledger

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\$ )?\s*(?:\.venv/bin/)?assay (?!: )(.*)$")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
SHELL = {"|", "||", "&&", ";", ">", ">>", "<", "2>/dev/null"}


def fenced_commands(text: str) -> Iterator[str]:
    """The words behind `assay` of every command line in fenced blocks, continuation lines joined."""
    for _, block in FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if found := COMMAND.match(line):
                yield found[1]


def mentioned_commands(text: str) -> Iterator[str]:
    """The words behind `assay` of every command named inside a line."""
    yield from re.findall(r"`assay ([^`]+)`", FENCE.sub("", text))


def words(command: str) -> list[str]:
    """The command's own words: comments, pipes and redirections are the shell's."""
    result = shlex.split(command, comments=True)
    return result[: next((at for at, word in enumerate(result) if word in SHELL), len(result))]


def parse(command: str) -> dict[str, Any]:
    """The parameters that the application would run with; a usage error when it would not."""
    at: Any = typer.main.get_command(app)
    rest = words(command)
    while hasattr(at, "commands"):
        assert rest, f"assay {command} names no command"
        if rest[0] not in at.commands and hasattr(at, "default"):
            rest.insert(0, at.default)
        assert rest[0] in at.commands, f"assay {command}: there is no command {rest[0]!r}"
        at = at.commands[rest.pop(0)]
    params: dict[str, Any] = at.make_context(at.name, rest).params
    return params


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_fenced_block_parses(page: Path) -> None:
    for command in fenced_commands(page.read_text(encoding="utf-8")):
        if "…" not in command:
            parse(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_named_in_the_text_exists(page: Path) -> None:
    for command in mentioned_commands(page.read_text(encoding="utf-8")):
        at: Any = typer.main.get_command(app)
        for word in words(command):
            if not hasattr(at, "commands"):
                known = {option for parameter in at.params for option in parameter.opts}
                assert not word.startswith("--") or word in known, f"assay {command}: {word}"
                continue
            assert word in at.commands or hasattr(at, "default"), f"assay {command}: there is no command {word!r}"
            at = at.commands.get(word) or at.commands[at.default]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_something(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target} is not there"


def test_the_readme_names_every_command_that_exists() -> None:
    """And so no command is added without a word about it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        for full in [f"{name} {inner}" for inner in getattr(command, "commands", ())] or [name]:
            assert re.search(rf"`(assay )?{full}\b", text), f"README.md does not name assay {full}"


def every_command() -> Iterator[tuple[str, Any]]:
    """All commands and groups of the application, by their full names."""
    waiting: list[tuple[str, Any]] = [("assay", typer.main.get_command(app))]
    while waiting:
        name, command = waiting.pop()
        yield name, command
        waiting += [(f"{name} {inner}", one) for inner, one in getattr(command, "commands", {}).items()]


STYLED = list(every_command())


@pytest.mark.parametrize(("name", "command"), STYLED, ids=[name for name, _ in STYLED])
def test_help_texts_are_of_one_style(name: str, command: Any) -> None:
    """Short helps fit beside their names; options and arguments begin with a capital and end without a stop."""
    assert name == "assay" or not command.get_short_help_str(45).endswith("..."), f"{name}: the short help is cut"
    for parameter in command.params:
        if parameter.name == "help":
            continue
        text = parameter.help
        assert text, f"{name}: {parameter.name} has no help"
        assert text[0].isupper(), f"{name}: the help of {parameter.name} is {text!r}"
        assert not text.endswith("."), f"{name}: the help of {parameter.name} ends with a full stop"
        if "--json" in parameter.opts:
            assert text == "Print one JSON object on standard output", name
        elif parameter.param_type_name == "argument" or not parameter.is_flag:
            assert parameter.metavar == parameter.metavar.upper(), f"{name}: {parameter.name}"


def test_help_and_version_import_nothing_heavy() -> None:
    """`assay --help` answers at once: what only commands need is imported by commands."""
    heavy = {"numpy", "pydantic", "rich", "torch", "ruamel", "cryptography", "rfc8785"}
    for option, words_seen in (("--help", "Commands:"), ("--version", "assay ")):
        code = (
            "import sys; from assay.cli.commands import app\n"
            f"try: app([{option!r}])\n"
            "except SystemExit: pass\n"
            "print(sorted({name.split('.')[0] for name in sys.modules}), file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert words_seen in done.stdout
        assert not heavy & set(re.findall(r"'(\w+)'", done.stderr)), done.stderr


def test_the_commands_are_found_and_a_wrong_one_is_seen() -> None:
    """The tests above are not empty, and they would see a promise that does not hold."""
    found = [command for page in PAGES for command in fenced_commands(page.read_text(encoding="utf-8"))]
    assert len(found) > 40
    assert parse("data batches q --seed 1 --global-batch 16 --expect f.json  # a comment")["seed"] == 1
    with pytest.raises(AssertionError, match="there is no command 'teleport'"):
        parse("teleport run")
    with pytest.raises(Exception, match="No such option: --fast"):
        parse("train recipe.yaml --run run --fast")


@pytest.mark.parametrize("damage", ["none", "edited", "swapped", "last line removed"])
def test_the_script_for_outside_readers_checks_the_chain_without_assay(tmp_path: Path, damage: str) -> None:
    page = (ROOT / "docs" / "outside-reader.md").read_text(encoding="utf-8")
    (script,) = [block for language, block in FENCE.findall(page) if language == "python" and "ledger.jsonl" in block]
    assert "assay" not in script
    assert len([line for line in script.splitlines() if line.strip()]) <= 12
    ledger = Ledger.create(tmp_path / "ledger.jsonl", "the-run")
    ledger.append("run.created", {"run_id": "the-run"})
    for step in range(4):
        ledger.append("alarm", {"step": step})
    (tmp_path / "bundle.json").write_text(json.dumps({"head": ledger.head}), encoding="utf-8")
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    if damage == "edited":
        lines[2] = lines[2].replace(b'"step":1', b'"step":9')
    elif damage == "swapped":
        lines[2], lines[3] = lines[3], lines[2]
    elif damage == "last line removed":
        lines.pop()
    ledger.path.write_bytes(b"".join(lines))
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    if damage == "none":
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"5 receipts chain; head {ledger.head['digest']}\n"
    else:
        assert done.returncode != 0
        assert "does not chain" in done.stderr or "the end is missing" in done.stderr
