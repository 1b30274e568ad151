"""Croissant 1.1 metadata of a corpus: its files by digest, its documents as records, where they come from.

Follows https://docs.mlcommons.org/croissant/docs/croissant-spec-1.1.html, with PROV-O for provenance and the RAI
vocabulary where there is a fact to state. What is not known is left out or null, never made up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from assay.corpus.evidence import Facts
from assay.corpus.receipt import ADMITTED, DESCRIPTION, RECEIPT, TOKENIZER
from assay.files.digest import PREFIX

CONFORMS_TO = "http://mlcommons.org/croissant/1.1"
_JSON_LINES, _JSON, _BYTES = "application/jsonlines", "application/json", "application/octet-stream"
_WIDTHS = {"uint16": 2, "uint32": 4}
_SPLITS = {"train": "TrainingSplit", "validation": "ValidationSplit"}
_TERMS = (
    "annotation arrayShape citeAs column containedIn equivalentProperty excludes extract field fileProperty fileObject "
    "fileSet format includes isArray isLiveDataset jsonPath key md5 parentField path recordSet references regex "
    "readLines repeated replace samplingRate sdVersion separator source subField transform unArchive value"
)
# The specification's appendix 1, with the namespaces that are used besides.
CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "prov": "http://www.w3.org/ns/prov#",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **{term: f"cr:{term}" for term in _TERMS.split()},
}
# Fields of the list of documents, as `build` writes it.
_DOCUMENTS = (
    ("id", "Text", "The document's id in its source"),
    ("source", "Text", "The name of its source"),
    ("file", "Text", "The file of the source that held it"),
    ("position", "Integer", "Its line or row in that file, from 1"),
    ("title", "Text", "Its title, null where the source states none"),
    ("licence", "Text", "Its licence, an SPDX id"),
    ("shard", "Text", "The shard that holds its tokens"),
    ("start", "Integer", "Its first token in tokens.bin"),
    ("stop", "Integer", "The token behind its last one, which is the end of text"),
    ("text_bytes", "Integer", "UTF-8 bytes of its text after normalisation"),
    ("lossy", "Boolean", "Whether decoding its tokens does not give the text back to the letter"),
)


def croissant(facts: Facts) -> dict[str, Any]:
    """The JSON-LD of a corpus; paths are relative to the corpus's folder."""
    receipt, said = facts.receipt, facts.publication
    entries: dict[str, Any] = {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "name": receipt["name"],
        "description": _description(facts),
        "conformsTo": CONFORMS_TO,
        "citeAs": f"@misc{{{_key(receipt['name'])}, title = {{{receipt['name']}}}, note = {{corpus receipt "
        f"{facts.sha256}}}}}",
        "license": [_licence(name) for name in facts.licences],
        "inLanguage": list(facts.languages),
        "keywords": ["language model pretraining", "tokenized text", "Assay"],
        "url": said.url,
        "creator": None if said.creator is None else {"@type": "sc:Organization", "name": said.creator},
        "datePublished": said.published,
        "version": said.version,
        "isLiveDataset": False,
        **_responsible(facts),
        "prov:wasDerivedFrom": list(_origins(facts)),
        "prov:wasGeneratedBy": list(_activities(facts)),
        "distribution": list(_files(facts)),
        "recordSet": [_documents(), _shards(facts), _sources(facts), _stages(facts), *_rejections(facts)],
    }
    return {key: value for key, value in entries.items() if value is not None}


def _description(facts: Facts) -> str:
    receipt = facts.receipt
    return (
        f"A corpus for pretraining language models: {receipt['admitted']:,} documents, {receipt['tokens']:,} tokens, "
        f"{facts.text_bytes:,} bytes of text, from {facts.sources:,} sources, as token ids in shards. "
        f"Figures come from the corpus's receipt, {RECEIPT} ({facts.sha256})."
    )


def _files(facts: Facts) -> Iterable[dict[str, Any]]:
    """The files that the receipt names by digest, the receipt itself, and no list of what was rejected."""
    receipt = facts.receipt
    yield _file(RECEIPT, facts.sha256, _JSON, "What the build read, admitted, rejected and wrote")
    yield _file(DESCRIPTION, receipt["files"][DESCRIPTION], "application/yaml", "What the corpus was asked to be")
    yield _file(ADMITTED, receipt["files"][ADMITTED], _JSON_LINES, "Every document with source, licence and place")
    yield _file(f"{TOKENIZER}/tokenizer.json", receipt["tokenizer"]["sha256"], _JSON, "The tokenizer")
    for shard in receipt["shards"]:
        name, size = f"{shard['path']}/tokens.bin", shard["tokens"] * _WIDTHS[shard["dtype"]]
        about = f"Token ids, {shard['dtype']}, little endian: {shard['tokens']:,} of {shard['documents']:,} documents"
        yield {**_file(name, shard["sha256"], _BYTES, about), "contentSize": f"{size} B"}
    for name, sha256 in receipt["licences"].items():
        kind = "text/markdown" if name.endswith(".md") else "text/plain"
        yield _file(name, sha256, kind, "Licence or attribution that goes along with the text")


def _file(name: str, sha256: str, kind: str, about: str) -> dict[str, Any]:
    return {
        "@type": "cr:FileObject",
        "@id": quote(name),
        "name": name,
        "description": about,
        "contentUrl": quote(name),
        "encodingFormat": kind,
        "sha256": sha256.removeprefix(PREFIX),
    }


def _documents() -> dict[str, Any]:
    fields = [
        {
            **_field("documents", name, kind, about),
            "source": {"fileObject": {"@id": quote(ADMITTED)}, "extract": {"column": name}},
        }
        for name, kind, about in _DOCUMENTS
    ]
    return {
        "@type": "cr:RecordSet",
        "@id": "documents",
        "name": "documents",
        "description": "Every admitted document and where its tokens stand. The text is decoded from the shard.",
        "key": [{"@id": "documents/source"}, {"@id": "documents/id"}],
        "field": fields,
    }


def _shards(facts: Facts) -> dict[str, Any]:
    rows = [
        {
            "name": shard["path"],
            "split": f"cr:{_SPLITS[facts.split(shard)]}",
            "file": f"{shard['path']}/tokens.bin",
            "sha256": shard["sha256"],
            "tokens": shard["tokens"],
            "documents": shard["documents"],
            "text_bytes": shard["text_bytes"],
            "dtype": shard["dtype"],
        }
        for shard in facts.receipt["shards"]
    ]
    about = {
        "name": "Folder of the shard",
        "split": "Training or validation",
        "file": "Its token ids",
        "sha256": "Digest of that file",
        "tokens": "Token ids, ends of text included",
        "documents": "Documents",
        "text_bytes": "UTF-8 bytes of their text after normalisation",
        "dtype": "Type of an id, little endian",
    }
    made = _inline("shards", "The shards; windows for training are cut from each as one stream.", about, rows, "name")
    made["field"][1]["dataType"] = ["sc:Text", "cr:Split"]
    return made


def _sources(facts: Facts) -> dict[str, Any]:
    rows = []
    for source in facts.corpus.sources:
        found, licence = facts.receipt["by_source"][source.name], source.licence
        rows.append(
            {
                "name": source.name,
                "from": source.path,
                "language": source.language,
                "revision": found["revision"],
                "retrieved": found["retrieved"],
                "sha256": found["sha256"],
                "licence": None if licence is None else licence.spdx,
                "evidence": None if licence is None else licence.evidence,
                "decision": None if licence is None else licence.decision,
                "attribution": None if licence is None else licence.attribution,
                "documents": found["documents"],
                "admitted": found["admitted"],
                "tokens": found["tokens"],
                "text_bytes": found["text_bytes"],
            }
        )
    about = {
        "name": "Name of the source",
        "from": "Where the build found it: inside the description's folder, or an address",
        "language": "Language of its documents, as the description states it",
        "revision": "Which version it is; null: not stated",
        "retrieved": "When it was retrieved; null: not stated",
        "sha256": "Digest of the bytes that were read; null: not measured",
        "licence": "Licence of the whole source; null: stated by title or document, see documents",
        "evidence": "How the licence is known",
        "decision": "Who may enter and why",
        "attribution": "Who is to be named",
        "documents": "Documents read",
        "admitted": "Documents in the corpus",
        "tokens": "Their tokens",
        "text_bytes": "UTF-8 bytes of their text",
    }
    return _inline("sources", "The sources with licence, revision and what was admitted.", about, rows, "name")


def _stages(facts: Facts) -> dict[str, Any]:
    rows = [{"stage": one["stage"], "in": one["in"], "out": one["out"]} for one in facts.receipt["stages"]]
    about = {"stage": "Name of the stage", "in": "Documents before it", "out": "Documents after it"}
    asked = "What each stage of the build left in, in their order; a stage that is not here was not asked for."
    return _inline("stages", asked, about, rows, "stage")


def _rejections(facts: Facts) -> Iterable[dict[str, Any]]:
    """How many documents left, by stage and reason; no such record set where none left."""
    rows = [
        {"stage": stage["stage"], "reason": reason, "documents": count}
        for stage in facts.receipt["stages"]
        for reason, count in stage["rejected"].items()
    ]
    about = {"stage": "Stage at which they left", "reason": "Why", "documents": "How many left"}
    if rows:
        yield _inline("rejections", "How many documents left at which stage and why.", about, rows, "stage", "reason")


def _inline(
    name: str, about: str, fields: Mapping[str, str], rows: Sequence[Mapping[str, Any]], *keys: str
) -> dict[str, Any]:
    """A record set whose records stand in the metadata. A field's type is that of its values; all null: text."""

    def kind(field: str) -> str:
        values = [row[field] for row in rows if row[field] is not None]
        if values and all(isinstance(value, bool) for value in values):
            return "Boolean"
        return "Integer" if values and all(isinstance(value, int) for value in values) else "Text"

    return {
        "@type": "cr:RecordSet",
        "@id": name,
        "name": name,
        "description": about,
        "key": [{"@id": f"{name}/{key}"} for key in keys],
        "field": [_field(name, field, kind(field), text) for field, text in fields.items()],
        "data": [{f"{name}/{field}": row[field] for field in fields} for row in rows],
    }


def _field(records: str, name: str, kind: str, about: str) -> dict[str, Any]:
    return {
        "@type": "cr:Field",
        "@id": f"{records}/{name}",
        "name": name,
        "description": about,
        "dataType": f"sc:{kind}",
    }


def _origins(facts: Facts) -> Iterable[dict[str, Any]]:
    """The sources that something was admitted from, as entities of PROV-O."""
    for source in facts.corpus.sources:
        found = facts.receipt["by_source"][source.name]
        if not found["admitted"]:
            continue
        entity: dict[str, Any] = {
            "@type": "prov:Entity",
            "@id": f"source/{source.name}",
            "prov:label": source.name,
            "version": found["revision"],
            "license": [_licence(name) for name in facts.documents[source.name]],
            "sha256": None if found["sha256"] is None else found["sha256"].removeprefix(PREFIX),
        }
        if source.licence is not None and source.licence.attribution is not None:
            entity["prov:wasAttributedTo"] = {"@type": "prov:Agent", "prov:label": source.licence.attribution}
        if found["retrieved"] is not None:
            entity["prov:wasGeneratedBy"] = {
                "@type": "prov:Activity",
                "prov:label": "retrieval",
                "prov:endedAtTime": found["retrieved"],
            }
        yield {key: value for key, value in entity.items() if value is not None}


def _activities(facts: Facts) -> Iterable[dict[str, Any]]:
    """The stages of the build as activities, with the library that did the work where one is named."""
    for stage in facts.receipt["stages"]:
        method = facts.receipt["methods"].get(stage["stage"], {})
        agent = {"@type": "prov:SoftwareAgent", "prov:label": f"{method.get('library')} {method.get('version')}"}
        yield {
            "@type": "prov:Activity",
            "@id": f"stage/{quote(stage['stage'])}",
            "prov:label": stage["stage"],
            "description": f"{stage['out']:,} of {stage['in']:,} documents stayed",
            **({"prov:wasAssociatedWith": agent} if "library" in method else {}),
        }


def _responsible(facts: Facts) -> dict[str, Any]:
    """Properties of the RAI vocabulary for which the receipt holds a fact."""
    receipt = facts.receipt
    dates = {source["retrieved"] for source in receipt["by_source"].values() if source["admitted"]}
    form = "left as it was" if receipt["normalise"] == "none" else f"normalised to Unicode {receipt['normalise']}"
    steps = [f"text {form} (character tables of Unicode {receipt['unicode']})"]
    for stage in receipt["stages"]:
        left = ", ".join(f"{count:,} {reason}" for reason, count in stage["rejected"].items()) or "none"
        steps.append(f"{stage['stage']}: {stage['in']:,} documents in, {stage['out']:,} out, rejected: {left}")
    return {
        "rai:dataCollection": "Documents of named sources, each admitted under a licence record with evidence and a "
        f"decision: {', '.join(name for name, s in receipt['by_source'].items() if s['admitted'])}",
        "rai:dataCollectionTimeFrame": None if None in dates else sorted(dates),
        "rai:dataPreprocessingProtocol": steps,
        "rai:dataLimitations": [f"{what}: not measured" for what in facts.not_measured] or None,
        "rai:dataBiases": ["not measured"],
        "rai:personalSensitiveInformation": ["not measured"],
    }


def _licence(name: str) -> str:
    """The address of a licence's text where SPDX has one, and its name as stated otherwise."""
    known = name.isascii() and not name.startswith("LicenseRef-") and " " not in name
    return f"https://spdx.org/licenses/{quote(name)}" if known else name


def _key(name: str) -> str:
    """A BibTeX key of a corpus's name."""
    return "".join(c for c in name if c.isascii() and c.isalnum()) or "corpus"
