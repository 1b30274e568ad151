"""Loading a recipe: YAML 1.2 in, a checked `Recipe` out, and the digest that identifies its learning choices.

Every fault is one sentence that names the file, the dotted key, the value and what is allowed.
Loading takes milliseconds, never imports torch, and looks at no other file.

**What the digest covers.** All keys above `seed`, `seed` included, except `name`, `pins` and the data paths:
two recipes that train the same weights from the same data have one digest wherever their files lie. Of
`start` the kind, `step` and `sha256` count and the local `path` does not, so a recipe whose start is not pinned by
`sha256` is identified less tightly; `plan` and pre-flight say so. Of `data` only `seed` counts: the data
itself is identified by the queue's own digests.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import AliasEvent
from ruamel.yaml.nodes import Node, ScalarNode

from assay.errors import InputError
from assay.files import digest as digests
from assay.files.reading import read_text
from assay.recipe.fields import Conflict, short
from assay.recipe.schema import Recipe, keys_at

LIMIT = 256 << 10  # bytes; a recipe has some four thousand, and the reader needs seconds for a quarter of a million
DEEPEST = 40  # brackets within brackets; a recipe has three
LEARNING = (
    "start",
    "model",
    "data",
    "batch",
    "optimizer",
    "schedule",
    "loss",
    "precision",
    "reduction",
    "seed",
)


def load(path: Path) -> Recipe:
    """The recipe in a YAML file; InputError for every fault of the file or of a value."""
    return from_yaml(read_text(path, "a recipe", LIMIT), str(path))


def from_yaml(text: str, where: str) -> Recipe:
    """The recipe in YAML text; `where` names it in messages."""
    return from_resolved(parse_yaml(text, where), where)


def from_resolved(value: object, where: str) -> Recipe:
    """The recipe in plain data, such as a run's `recipe.json`, checked in full again."""
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: a recipe is a mapping of keys, not {_noun(value)}")
    try:
        return Recipe.model_validate(value)
    except ValidationError as error:
        raise InputError(f"{where}: {sentence(error)}") from None


def resolved(recipe: Recipe) -> dict[str, Any]:
    """Every key with its value as plain JSON data; `from_resolved` of it is the same recipe."""
    return recipe.model_dump(mode="json")


def learning(recipe: Recipe) -> dict[str, Any]:
    """The choices that identify a run: what the recipe digest covers (see the module's docstring)."""
    whole = resolved(recipe)
    chosen = {key: whole[key] for key in LEARNING}
    chosen["data"] = {"seed": recipe.data.seed}
    if isinstance(chosen["start"], dict):
        ((kind, parent),) = chosen["start"].items()
        chosen["start"] = {kind: {key: value for key, value in parent.items() if key != "path"}}
    return chosen


def digest(recipe: Recipe) -> str:
    """SHA-256 of the RFC 8785 JSON of `learning`: the recipe's identity."""
    return digests.digest(digests.canonical(learning(recipe)))


def parse_yaml(text: str, where: str) -> Any:
    """Plain data from YAML 1.2 text: no duplicate keys, anchors, aliases, merges, directives or further documents."""
    if any(line.startswith("%") for line in text.splitlines()):
        raise InputError(f"{where}: a line begins with '%'; recipes are YAML 1.2 without directives: remove the line")
    if _depth(text) > DEEPEST:  # the reader needs seconds to find that out by itself
        raise InputError(f"{where}: it is nested too deeply to be read")
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _PlainComposer
    try:
        return yaml.load(text)
    except YAMLError as error:
        raise InputError(f"{where}: {_yaml_fault(error)}") from None
    except RecursionError:
        raise InputError(f"{where}: it is nested too deeply to be read") from None
    except (ValueError, TypeError, OverflowError, AttributeError, KeyError) as error:
        # ruamel lets these out for scalars it cannot build, such as dates that do not exist or unhashable keys
        problem = str(error).split(";")[0].split(":")[0]
        raise InputError(f"{where}: a value cannot be read as YAML 1.2 ({problem})") from None


def _depth(text: str) -> int:
    """The deepest nesting of brackets and braces, quotes and comments not regarded."""
    steps = (1 if character in "[{" else -1 for character in text if character in "[{]}")
    return max(accumulate(steps), default=0)


class _PlainComposer(Composer):  # type: ignore[misc]  # ruamel ships no usable types
    """Refuses what makes a file mean more than it shows: anchors, aliases and merge keys."""

    def compose_node(self, parent: Node | None, index: int) -> Node:
        event = self.parser.peek_event()
        if isinstance(event, AliasEvent) or getattr(event, "anchor", None) is not None:
            line = event.start_mark.line + 1
            raise InputErrorInYaml(f"line {line}: anchors and aliases are not allowed; write the value out")
        node = super().compose_node(parent, index)
        if isinstance(node, ScalarNode) and node.value == "<<" and not node.style:
            raise InputErrorInYaml(f"line {node.start_mark.line + 1}: '<<' is not allowed; write the keys out")
        return node


class InputErrorInYaml(YAMLError):  # type: ignore[misc]
    """A refusal of ours inside ruamel's machinery; becomes an InputError with the file's name."""


def _yaml_fault(error: YAMLError) -> str:
    problem = getattr(error, "problem", None)
    mark = getattr(error, "problem_mark", None)
    if problem is None:
        return str(error).strip().splitlines()[0] if str(error).strip() else "it is not valid YAML"
    place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    if problem.startswith("found duplicate key"):
        return f"{place}{problem.splitlines()[0].removeprefix('found ')}; each key may appear once"
    return f"{place}it is not valid YAML: {' '.join(problem.split())}"


def sentence(error: ValidationError, whole: type[BaseModel] = Recipe) -> str:
    """One sentence for the first fault of a `whole`; unknown keys come first, because they often cause the others."""
    faults = sorted(error.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden")
    rest = len(faults) - 1
    more = f" (and {rest} more fault{'s' if rest > 1 else ''})" if rest else ""
    return _fault(faults[0], whole) + more


def _fault(fault: Any, whole: type[BaseModel]) -> str:
    place, kind, context = tuple(fault["loc"]), fault["type"], fault.get("ctx", {})
    key = ".".join(str(step) for step in place) or f"the {whole.__name__.lower()}"
    if isinstance(context.get("error"), Conflict):
        return str(context["error"])
    if kind == "extra_forbidden":
        return _unknown(place, whole)
    if kind == "missing":
        return f"{key} is missing and has no default"
    if kind == "invalid_key":
        return f"{key} is not text; every key is"
    return f"{key} is {short(fault['input'])}; {_allowed(kind, context)}"


def _allowed(kind: str, context: Mapping[str, Any]) -> str:
    fixed = {
        "int_type": "an integer is expected",
        "int_parsing_size": "an integer is expected, and a smaller one",
        "float_type": "a number is expected",
        "bool_type": "true or false is expected",
        "string_type": "text is expected",
        "finite_number": "a finite number is expected",
        "tuple_type": "a list is expected",
        "model_type": "a mapping of keys is expected",
        "model_attributes_type": "a mapping of keys is expected",
        "missing": "a value is expected",
        "too_long": "fewer items are expected",
        "too_short": "more items are expected",
    }
    if kind in fixed:
        return fixed[kind]
    if kind == "literal_error":
        return f"allowed are {context['expected'].replace(chr(39), '')}"
    words = {
        "greater_than": "above",
        "greater_than_equal": "of at least",
        "less_than": "below",
        "less_than_equal": "of at most",
    }
    if kind in words:
        bound = next(iter(context.values()))
        return (
            f"a number {words[kind]} {bound:,} is expected"
            if isinstance(bound, int)
            else (f"a number {words[kind]} {bound:g} is expected")
        )
    if "error" in context:
        return str(context["error"])
    return f"this is not allowed ({kind.replace('_', ' ')})"


def _unknown(place: tuple[str | int, ...], whole: type[BaseModel]) -> str:
    *above, last = place
    key = ".".join(str(step) for step in place)
    known = keys_at(tuple(above), whole)
    near = difflib.get_close_matches(str(last), known, n=1, cutoff=0.0)
    best = ".".join([*(str(step) for step in above), near[0]]) if near else None
    hint = f"the nearest known key is {best}; " if best else ""
    return f"{short(key)} is not a known key; {hint}known here: {', '.join(known)}"


def _noun(value: object) -> str:
    if value is None:
        return "nothing"
    return {list: "a list", str: "text", bool: "true or false"}.get(type(value), "a single value")
