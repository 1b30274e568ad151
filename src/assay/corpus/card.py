"""The data card: `README.md` as the Hugging Face hub reads it, and `croissant.json` beside it.

Both are functions of `evidence.Facts` alone: the same receipt gives the same bytes. Nothing is measured here,
and what nobody measured or stated says so. Texts of other people are shown as text, never as markup.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from assay.corpus.croissant import croissant
from assay.corpus.description import Filters
from assay.corpus.evidence import Facts
from assay.corpus.receipt import ADMITTED, CONTAMINATION, DESCRIPTION, RECEIPT
from assay.corpus.shards import REJECTED
from assay.errors import InputError
from assay.files.publish import publish_new, refuse_existing

CARD, CROISSANT = "README.md", "croissant.json"
NOT_STATED, NOT_MEASURED = "not stated", "not measured"
_MARKUP = frozenset("\\`*_{}[]<>|~$#&")
# https://huggingface.co/docs/hub/repositories-licenses; an SPDX id's own spelling in lower case, except for these.
_HUB_LICENCES = {
    "apache-2.0", "mit", "afl-3.0", "artistic-2.0", "bsl-1.0", "bsd-2-clause", "bsd-3-clause", "bsd-3-clause-clear",
    "c-uda", "cc0-1.0", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0",
    "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0", "cc-by-nd-4.0", "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0",
    "cc-by-nc-sa-2.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0", "cdla-sharing-1.0", "cdla-permissive-1.0",
    "cdla-permissive-2.0", "wtfpl", "ecl-2.0", "epl-1.0", "epl-2.0", "etalab-2.0", "eupl-1.1", "agpl-3.0", "gpl-2.0",
    "gpl-3.0", "lgpl-2.1", "lgpl-3.0", "isc", "lppl-1.3c", "ms-pl", "mpl-2.0", "osl-3.0", "postgresql", "ofl-1.1",
    "ncsa", "unlicense", "zlib",
}  # fmt: skip
_HUB_FAMILIES = {"gfdl-": "gfdl", "odc-by-": "odc-by", "odbl-": "odbl", "pddl-": "pddl"}
_GAPS = re.compile(r"\n{3,}")
_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"),
          (10**8, "10M<n<100M"), (10**9, "100M<n<1B"), (10**10, "1B<n<10B"))  # fmt: skip


def write_card(facts: Facts, folder: Path) -> list[Path]:
    """Write both files into `folder`, which is made if need be; InputError when either exists."""
    paths = [folder / CARD, folder / CROISSANT]
    for path in paths:
        refuse_existing(path)
    contents = card(facts).encode("utf-8"), _as_json(croissant(facts))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, data in zip(paths, contents, strict=True):
            publish_new(path, data)
    except OSError as error:
        raise InputError(f"{folder} cannot be written to: {error.strerror}; choose another folder") from None
    return paths


def card(facts: Facts) -> str:
    """The data card in Markdown, its front matter included."""
    sections = (_head, _contents, _sources, _admission, _duplicates, _held_out, _tokens, _making, _open, _use)
    body = "\n".join("\n".join(section(facts)) + "\n" for section in sections)
    return f"---\n{front_matter(facts)}---\n\n{_GAPS.sub(chr(10) * 2, body)}"


def front_matter(facts: Facts) -> str:
    """YAML for the hub: names in JSON's spelling, which is YAML too, so that no text can become a key."""
    licences = [hub_licence(name) for name in facts.licences]
    known = sorted({one for one in licences if one is not None})
    entries: dict[str, Any] = {
        "pretty_name": facts.receipt["name"],
        "language": sorted({code.split("-")[0] for code in facts.languages}),
    }
    if known and None not in licences:
        entries["license"] = known[0] if len(known) == 1 else known
    else:
        entries["license"] = "other"
        entries["license_name"] = " AND ".join(sorted(facts.licences)) or NOT_STATED
    admitted = facts.receipt["admitted"]
    entries |= {
        "size_categories": [next((name for limit, name in _SIZES if admitted < limit), "10B<n<100B")],
        "task_categories": ["text-generation"],
        "task_ids": ["language-modeling"],
        "tags": ["assay", "croissant", "pretraining", "tokenized"],
        "configs": [{"config_name": "documents", "data_files": ADMITTED}],
    }
    return "".join(f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in entries.items())


def hub_licence(spdx: str) -> str | None:
    """The hub's identifier of a licence, or None where the hub has none."""
    name = spdx.lower().removesuffix("-only").removesuffix("-or-later")
    if name in _HUB_LICENCES:
        return name
    return next((family for begin, family in _HUB_FAMILIES.items() if name.startswith(begin)), None)


def plain(value: object) -> str:
    """Somebody's text as one line of Markdown that shows it and does nothing else; None is `not stated`."""
    if value is None or value == "":
        return NOT_STATED
    text = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    escaped = "".join(f"\\{c}" if c in _MARKUP else c for c in text)
    # A colon or dot that makes an address would become a link of its own; the entity shows the same character.
    return escaped.replace("://", "&#58;//").replace("www.", "www&#46;").replace("@", "&#64;") or NOT_STATED


def _head(facts: Facts) -> Iterable[str]:
    receipt, said = facts.receipt, facts.publication
    shards = len(receipt["shards"]) - 1
    yield f"# {plain(receipt['name'])}\n"
    yield (
        f"A corpus for pretraining language models: {counted(receipt['admitted'], 'document')}, "
        f"{receipt['tokens']:,} tokens from {facts.text_bytes:,} bytes of text ({', '.join(facts.languages)}), in "
        f"{counted(shards, 'training shard')} and a validation shard of token ids. Made with Assay from "
        f"{counted(facts.sources, 'source')}, out of {counted(receipt['documents'], 'document')}; each of "
        f"the {receipt['documents'] - receipt['admitted']:,} that are not in it left by name, with stage and reason.\n"
    )
    yield (
        f"Every figure on this page comes from the corpus's receipt, `{RECEIPT}`, or from a file that the receipt "
        f"names by digest. What nobody measured says “{NOT_MEASURED}”, what nobody stated “{NOT_STATED}”.\n"
    )
    yield from _table(
        ("", ""),
        [
            ("receipt", _code(facts.sha256)),
            ("description", f"{_code(receipt['description'])} (`{DESCRIPTION}`)"),
            ("pool", plain(receipt["pool"])),
            ("licences", ", ".join(f"{plain(name)} ({n:,} documents)" for name, n in facts.licences.items())),
            ("version", plain(said.version)),
            ("creator", plain(said.creator)),
            ("published", plain(said.published)),
            ("address", NOT_STATED if said.url is None else f"<{said.url}>"),
        ],
    )


def _contents(facts: Facts) -> Iterable[str]:
    yield "## What is in it\n"
    columns = ("source", "language", "documents read", "admitted", "rejected", "tokens", "bytes of text", "lossy")
    sources = [
        (plain(name), s["language"], s["documents"], s["admitted"], s["rejected"], s["tokens"], s["text_bytes"],
         s["lossy"])
        for name, s in facts.receipt["by_source"].items()
    ]  # fmt: skip
    yield from _table(columns, sources)
    yield (
        "\nTokens count the end-of-text id of each document; bytes are those of the UTF-8 text after normalisation. "
        "A lossy document is one that the tokenizer does not give back to the letter.\n"
    )
    for each in facts.receipt["lossy_by"]:
        byte = f", first at byte {each['byte']}" if each["byte"] else ""
        yield f"- {plain(each['source'])}: {counted(each['documents'], 'document')}, {plain(each['reason'])}{byte}"
    yield "\n### Languages of the training shards\n"
    mix, documents = facts.receipt["mix"], facts.languages
    rows = [
        (
            name,
            documents[name],
            "none" if mix is None else mix[name],
            found["tokens"],
            found["tokens_share"],
            found["text_bytes"],
            found["text_bytes_share"],
        )
        for name, found in sorted(facts.receipt["by_language"].items())
    ]
    shares = ("share asked for", "tokens", "share of tokens", "bytes of text", "share of bytes")
    yield from _table(("language", "documents (validation too)", *shares), rows)
    yield "\nThe language is the one that the description states for the source" + (
        "; it was not identified document by document."
        if "language" in facts.not_asked
        else ", confirmed for each document (below)."
    )
    target = facts.receipt["target"]
    if target is not None and target["tokens"] is not None:
        short = f"{target['short']:,} of them are missing" if target["short"] else "reached"
        yield f"\nTarget: {target['tokens']:,} training tokens, {short}."


def _sources(facts: Facts) -> Iterable[str]:
    yield "## Sources and their licences\n"
    for source in facts.corpus.sources:
        found, licence = facts.receipt["by_source"][source.name], source.licence
        documents, checked = facts.documents[source.name], found.get("fetched_and_checked_by")
        by_licence = ", ".join(f"{plain(name)}: {counted(n, 'document')}" for name, n in documents.items()) or "none"
        files = [] if licence is None else licence.files
        how, evidence, decision = "one record for the whole source", NOT_STATED, NOT_STATED
        if licence is None:
            how = "no record"
        elif licence.records is not None:
            how, evidence, decision = f"a record for each title ({plain(licence.records)})", "by title", "by title"
        elif licence.spdx is None:
            how = "stated by each document"
        yield f"### {plain(source.name)}\n"
        yield from _table(
            ("", ""),
            [
                ("from", f"{plain(source.path)} ({source.format})"),
                ("revision", plain(found["revision"])),
                ("retrieved", plain(found["retrieved"])),
                ("input", f"{_counted(found['bytes'], 'byte')} in {_counted(found['files'], 'file')}, "
                          f"{_code(found['sha256'])}"),
                *([("fetched and checked by", _fetched(checked))] if checked else []),
                ("admitted by licence", by_licence),
                ("licence record", how),
                ("evidence", evidence if licence is None or licence.evidence is None else plain(licence.evidence)),
                ("decision", decision if licence is None or licence.decision is None else plain(licence.decision)),
                ("attribution", plain(None if licence is None else licence.attribution)),
                ("licence files", ", ".join(plain(f"licences/{name}") for name in files) or "none"),
                *([("refused as a whole", plain(found["refused"]))] if found["refused"] else []),
            ],
        )  # fmt: skip
        yield ""


def _admission(facts: Facts) -> Iterable[str]:
    corpus = facts.corpus
    yield "## What stayed and what left\n"
    rows = [
        (
            stage["stage"],
            stage["in"],
            stage["out"],
            ", ".join(f"{count:,} {plain(reason)}" for reason, count in stage["rejected"].items()) or "none",
        )
        for stage in facts.receipt["stages"]
    ]
    yield from _table(("stage", "in", "out", "rejected"), rows)
    yield f"\nNot asked for, and so {NOT_MEASURED}: {', '.join(facts.not_measured) or 'nothing'}.\n"
    yield f"- Licences that may enter: {', '.join(map(plain, corpus.admission.licences))}."
    lists = counted(len(corpus.admission.reserved), "list") if corpus.admission.reserved else "none was given"
    yield f"- Lists of documents that other pools keep for themselves: {lists}."
    yield f"- Filters: {_filters(corpus.filters)}."
    for source in corpus.sources:
        if source.filters is not None:
            yield f"- Filters of {plain(source.name)} instead: {_filters(source.filters)}."
    method = facts.receipt["methods"].get("language")
    if method is not None:
        yield (
            f"- Language: identified by {_method(method)}; a document leaves that is identified as another one, or "
            f"with a probability below {corpus.language.at_least}."
        )


def _duplicates(facts: Facts) -> Iterable[str]:
    corpus, method = facts.corpus, facts.receipt["methods"].get("near duplicates")
    yield "## Duplicates\n"
    exact = _left(facts, "duplicates") if corpus.duplicates.exact else NOT_MEASURED
    yield f"- Exact duplicates (equal text after normalisation): {exact}."
    if method is None:
        yield f"- Near duplicates: {NOT_MEASURED}."
        return
    near = corpus.duplicates.near
    assert near is not None  # the method is written where it was asked for
    yield f"- Near duplicates: {_left(facts, 'near duplicates')}."
    yield f"- Method: {_method(method)}."
    against = "none" if near.against is None else plain(near.against)
    yield f"- Earlier corpus whose documents count as earlier: {against}."


def _held_out(facts: Facts) -> Iterable[str]:
    method, found = facts.receipt["methods"].get("decontamination"), facts.receipt["held_out"]
    yield "## Held-out text\n"
    if method is None or found is None:
        yield f"Overlap with evaluation sets: {NOT_MEASURED}."
        return
    yield (
        f"Looked for: {counted(found['items'], 'held-out item')}; found: {found['found']:,}; too short to be looked "
        f"for: {found['not_checkable']:,}. Documents taken out for them: {found['documents']:,}. The items themselves "
        f"are kept outside of the corpus; their sets, by digest:\n"
    )
    yield from _table(
        ("set", "items", "sha256"), [(plain(one["name"]), one["items"], _code(one["sha256"])) for one in method["sets"]]
    )
    yield f"\nMethod: {_method({key: value for key, value in method.items() if key != 'sets'})}."


def _tokens(facts: Facts) -> Iterable[str]:
    receipt, corpus = facts.receipt, facts.corpus
    tokenizer, choice = receipt["tokenizer"], corpus.tokenizer
    origin = "trained on the training documents of this corpus (byte-level BPE)"
    seen = "the tokenizer was not trained on it"
    if choice.path is not None:
        seen = f"what the tokenizer was trained on is {NOT_STATED}"
        origin = f"given: {plain(choice.path)}, revision {plain(choice.revision)}"
    yield "## Tokens\n"
    yield from _table(
        ("", ""),
        [
            ("tokenizer", f"{_code(tokenizer['sha256'])} (`tokenizer/tokenizer.json`)"),
            ("origin", origin),
            ("vocabulary", tokenizer["vocabulary"]),
            ("end of text", f"{plain(tokenizer['end_of_text'])}, id {tokenizer['end_of_text_id']}"),
            ("unigram entropy of the training tokens", f"{receipt['unigram_entropy_nats']} nats"),
        ],
    )
    yield "\n### Shards\n"
    rows = [
        (f"`{s['path']}`", facts.split(s), s["documents"], s["tokens"], s["text_bytes"], s["dtype"], _code(s["sha256"]))
        for s in receipt["shards"]
    ]
    columns = ("shard", "split", "documents", "tokens", "bytes of text", "ids as", "sha256 of tokens.bin")
    yield from _table(columns, rows)
    key = "each document for itself" if corpus.validation.key is None else "documents with the same "
    key += "" if corpus.validation.key is None else f"{plain(corpus.validation.key)} stay together"
    yield (
        f"\nValidation: a share of {corpus.validation.fraction} was asked for, chosen by a hash ({key}). It is no "
        f"training data; {seen}."
    )


def _making(facts: Facts) -> Iterable[str]:
    receipt = facts.receipt
    form = "unchanged" if receipt["normalise"] == "none" else f"Unicode {receipt['normalise']}"
    versions = dict(receipt["software"])
    for method in receipt["methods"].values():
        if "library" in method and "version" in method:
            versions[method["library"]] = method["version"]
    yield "## How it was made\n"
    yield f"- Text form: {form}; character tables of Unicode {receipt['unicode']}."
    yield f"- Software: {', '.join(f'{plain(name)} {plain(version)}' for name, version in sorted(versions.items()))}."
    yield f"- Lists by digest: {', '.join(f'`{name}` {_code(sha256)}' for name, sha256 in receipt['files'].items())}."
    yield "- The same inputs, description and software give the same bytes, with any number of worker processes."


def _open(facts: Facts) -> Iterable[str]:
    said, sources = facts.publication, facts.receipt["by_source"]
    yield "## What is not known\n"
    for what in facts.not_measured:
        yield f"- {what.capitalize()}: {NOT_MEASURED}."
    yield f"- Personal data, offensive text, social bias, factual quality of the documents: {NOT_MEASURED}."
    for what, key in (("Revision", "revision"), ("Date of retrieval", "retrieved")):
        silent = [plain(name) for name, source in sources.items() if source[key] is None]
        if silent:
            yield f"- {what} of {', '.join(silent)}: {NOT_STATED}."
    silent = [name for name, value in vars(said).items() if value is None]
    if silent:
        yield f"- The publication's {', '.join(silent)}: {NOT_STATED}."


def _use(facts: Facts) -> Iterable[str]:
    dtype = facts.receipt["shards"][0]["dtype"]
    yield "## Reading and checking it\n"
    yield (
        f"A shard is a folder: `tokens.bin` holds token ids ({dtype}, little endian), `documents.idx` the end of each "
        f"document in tokens (uint64, little endian), `shard.json` the digests. `{ADMITTED}` names each document with "
        f"source, licence and place in its shard; `{CROISSANT}` describes all this for machines (Croissant 1.1).\n"
    )
    shards = " ".join(shard["path"] for shard in facts.receipt["shards"])
    yield f"```console\n$ assay data verify {shards}\n```\n"
    yield f"`{REJECTED}` (what left) and `{CONTAMINATION}` (held-out items found) are the curator's and not published."


def counted(number: int, noun: str) -> str:
    """`1 document`, `2 documents`."""
    return f"{number:,} {noun if number == 1 else noun + 's'}"


def _fetched(checked: dict[str, int]) -> str:
    return ", ".join(f"{plain(how)} ({counted(files, 'file')})" for how, files in checked.items())


def _left(facts: Facts, stage: str) -> str:
    found: dict[str, int] = next(s["rejected"] for s in facts.receipt["stages"] if s["stage"] == stage)
    return f"{counted(sum(found.values()), 'document')} taken out"


def _filters(filters: Filters) -> str:
    most = "no upper bound" if filters.max_chars is None else f"{filters.max_chars:,} at most"
    parts = [f"at least {filters.min_chars:,} characters, {most}"]
    for one in filters.columns:
        asked = one.model_dump(exclude_none=True, exclude={"column"}).items()
        conditions = ", ".join(f"{key.replace('_', ' ')} {plain(value)}" for key, value in asked)
        parts.append(f"column {plain(one.column)} {conditions}")
    return "; ".join(parts)


def _method(method: dict[str, Any]) -> str:
    """A method's parameters in one line, nested ones too."""
    parts = []
    for key, value in method.items():
        if isinstance(value, dict):
            parts += [f"{plain(inner)} = {plain(one)}" for inner, one in value.items()]
        else:
            parts.append(f"{plain(key)} = {plain(value)}")
    return "; ".join(parts)


def _counted(number: int | None, noun: str) -> str:
    return f"{noun}s {NOT_MEASURED}" if number is None else counted(number, noun)


def _code(sha256: str | None) -> str:
    return NOT_MEASURED if sha256 is None else f"`{sha256}`"


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterable[str]:
    """A Markdown table; its cells are Markdown already, columns of numbers stand on the right with commas."""
    cells = [list(row) for row in rows]
    numbers = [bool(cells) and all(isinstance(row[at], int) for row in cells) for at in range(len(columns))]
    yield f"| {' | '.join(columns)} |"
    yield f"|{'|'.join('---:' if number else '---' for number in numbers)}|"
    for row in cells:
        yield f"| {' | '.join(f'{cell:,}' if isinstance(cell, int) else str(cell) for cell in row)} |"


def _as_json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")
