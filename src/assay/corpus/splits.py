"""Which files of a hub data set a config and split are, by the `configs:` of its README.md.

The hub's rules (https://huggingface.co/docs/hub/datasets-manual-configuration): patterns in which `*` stays in its
folder and `**` does not, relative to the config's `data_dir`. Nothing is guessed: what the README does not state is not
known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from assay.corpus.description import Source
from assay.errors import DataError, InputError
from assay.recipe.load import parse_yaml

_SHOWN = 20
_LONGEST = 1_000  # letters of a pattern
_HIDDEN = re.compile(r"(^|/)(\.|__)")


def chosen(source: Source, where: str, readme: bytes, names: Sequence[str]) -> list[str]:
    """The names (in their order) that `source.config` and `source.split` stand for.

    Without `configs:` in the README and with both null: all. Raises InputError with the known names for a config or
    split that is missing or has to be named, DataError for a pattern without files or a README that is no such.
    """
    configs = _configs(where, readme)
    if not configs:
        if (source.config, source.split) != (None, None):
            raise InputError(
                f"source {source.name!r}: {where} states no `configs:` in its README.md, so config and split "
                "name nothing; leave both null to take all its files, or name a folder in `path`"
            )
        return list(names)
    config = _one(source, where, "config", source.config, {c["config_name"]: c for c in configs}, _default(configs))
    splits = _splits(where, config)
    if splits is None:
        if source.split is not None:
            raise InputError(f"source {source.name!r}: {where} states no splits for this config; leave `split` null")
        patterns: list[str] = ["**"]
    else:
        patterns = _one(source, where, "split", source.split, splits, None)
    base = str(config.get("data_dir") or "").strip("/")
    taken = set[str]()
    for pattern in patterns:
        whole = "/".join(part for part in (base, pattern.strip("/")) if part not in ("", "."))
        if len(whole) > _LONGEST:
            raise DataError(f"{where}: a pattern of its README.md has {len(whole):,} letters; name another revision")
        try:
            found = {name for name in names if matches(whole, name)}
        except ValueError as fault:
            raise DataError(
                f"{where}: {whole!r} of its README.md is no pattern: {fault}; name another revision"
            ) from None
        if not found:
            raise DataError(f"source {source.name!r}: {where}: no file matches {whole!r} of its README.md")
        taken |= found
    return [name for name in names if name in taken]


def matches(pattern: str, name: str) -> bool:
    """Whether a path matches; hidden parts (`.x`, `__x`) only where the pattern has such parts itself.

    Time: the product of the two lengths at most, for a stranger wrote the pattern. ValueError for one that is none.
    """
    if _HIDDEN.search(name) and not _HIDDEN.search(pattern):
        return False
    steps = _steps(pattern)
    states = _reached(steps, {0})
    for letter in name:
        taken = {at if steps[at].loops else at + 1 for at in states if at < len(steps) and steps[at].takes(letter)}
        states = _reached(steps, taken)
        if not states:
            return False
    return len(steps) in states


@dataclass(frozen=True)
class _Step:
    """A place in a pattern: it takes a letter and is left, or `loops`; one that `skips` may be passed with the next."""

    takes: Callable[[str], bool]
    loops: bool = False
    skips: bool = False


@lru_cache(maxsize=64)
def _steps(pattern: str) -> list[_Step]:
    """A glob: `**/` any folders, `**` anything, `*` and `?` not across folders, `[…]` a set."""
    steps: list[_Step] = []
    for part in re.findall(r"\*\*/|\*\*|\*|\?|\[[!^]?\]?[^\]/]*\]|.", pattern, re.DOTALL):
        if part == "**/":
            steps += [_Step(lambda letter: True, loops=True, skips=True), _Step("/".__eq__)]
        elif part == "**":
            steps.append(_Step(lambda letter: True, loops=True))
        elif part in "*?":
            steps.append(_Step("/".__ne__, loops=part == "*"))
        elif len(part) > 2:
            steps.append(_Step(_set(part[1:-1])))
        else:
            steps += [_Step(letter.__eq__) for letter in part]
    return steps


def _reached(steps: list[_Step], states: set[int]) -> set[int]:
    """The states and all that are reached from them for nothing."""
    waiting = list(states)
    while waiting:
        at = waiting.pop()
        step = steps[at] if at < len(steps) else None
        free = [] if step is None else [at + 1] * step.loops + [at + 2] * step.skips
        new = [each for each in free if each not in states]
        states.update(new)
        waiting += new
    return states


def _set(inner: str) -> Callable[[str], bool]:
    """The letters of `[inner]`, with ranges such as a-z; `!` or `^` in front: all others."""
    negated = inner[0] in "!^" and len(inner) > 1
    rest, ranges = inner[1:] if negated else inner, list[tuple[str, str]]()
    while rest:
        wide = len(rest) > 2 and rest[1] == "-"
        low, high = rest[0], rest[2 if wide else 0]
        if low > high:
            raise ValueError(f"the range {low}-{high} is the wrong way round")
        ranges.append((low, high))
        rest = rest[3 if wide else 1 :]
    return lambda letter: negated != any(low <= letter <= high for low, high in ranges)


def _configs(where: str, readme: bytes) -> list[dict[str, Any]]:
    """The `configs:` of the front matter; empty when there is none."""
    lines = readme.decode("utf-8", "replace").lstrip("\ufeff").splitlines()
    ends = [number for number, line in enumerate(lines) if line.rstrip() == "---"]
    if len(ends) < 2 or ends[0] != 0:
        return []
    try:
        value = parse_yaml("\n".join(lines[1 : ends[1]]), f"{where}: README.md")
    except InputError as fault:
        raise DataError(f"{fault}; name a revision whose README.md can be read") from None
    configs = value.get("configs") if isinstance(value, dict) else None
    if configs is None:
        return []
    if not isinstance(configs, list) or not configs or not all(isinstance(each, dict) for each in configs):
        raise DataError(f"{where}: `configs:` of its README.md is no list of configs; name another revision")
    return [{**each, "config_name": str(each.get("config_name", "default"))} for each in configs]


def _default(configs: list[dict[str, Any]]) -> str | None:
    """The config that is meant when none is named."""
    marked = [each["config_name"] for each in configs if each.get("default") is True]
    if len(marked) == 1:
        return str(marked[0])
    return "default" if any(each["config_name"] == "default" for each in configs) else None


def _splits(where: str, config: dict[str, Any]) -> dict[str, list[str]] | None:
    """Patterns by split; None when none are stated. Files without a split are `train`, as on the hub."""
    stated = config.get("data_files")
    if stated is None:
        return None
    if isinstance(stated, dict):
        return {str(split): _texts(where, paths) for split, paths in stated.items()}
    if isinstance(stated, list) and stated and all(isinstance(each, dict) for each in stated):
        splits = dict[str, list[str]]()
        for each in stated:
            splits.setdefault(str(each.get("split", "train")), []).extend(_texts(where, each.get("path")))
        return splits
    return {"train": _texts(where, stated)}


def _texts(where: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise DataError(f"{where}: `data_files` of its README.md are no patterns; name another revision")
    return texts


def _one(source: Source, where: str, key: str, asked: str | None, known: dict[Any, Any], default: str | None) -> Any:
    """The asked one of the known ones; without one the default, or the only one."""
    name = (
        asked
        if asked is not None
        else default
        if default is not None
        else next(iter(known))
        if len(known) == 1
        else None
    )
    if name not in known:
        said = f"{key} is {asked!r}" if asked is not None else f"{key} is null, and there are several"
        raise InputError(f"source {source.name!r}: {said}; {where} has {shortly(known)}")
    return known[name]


def shortly(names: Iterable[Any]) -> str:
    """Names for a message, not all of very many."""
    texts = [str(name) for name in names]
    return ", ".join(texts[:_SHOWN]) + (f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else "")
