"""The manifest of a checkpoint folder: what is in it, and the digests taken while it was written.

A reader trusts the manifest, never the directory listing. Checking a folder against its manifest
needs no torch. Damage is listed, never repaired here.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.checkpoint.tensors import describe_file, state_digest
from assay.errors import AssayError, DataError, InputError
from assay.files.digest import digest_file, is_digest
from assay.files.reading import inside, read_object
from assay.ledger.ledger import FILE as LEDGER_FILE
from assay.ledger.ledger import read

FORMAT = "assay-checkpoint/1"
MANIFEST = "manifest.json"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
CONFIG = "config.json"
RECIPE = "recipe.json"
QUEUE = "queue.jsonl"
SUMS = "SHA256SUMS"  # beside the folders, in the form of `sha256sum`
OUTCOME = "outcome.json"  # of the run, not of a checkpoint

# One file each where one rank wrote them; of several ranks each writes what it owns into a shard.
_SHARD = re.compile(r"(model|optimizer)-(\d{5})-of-(\d{5})\.safetensors")
_TEXT_KEYS = ("run_id", "kind", "phase", "recipe", "order_digest", "weights_sha256", "time")


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's manifest; `files` maps names to (bytes, sha256), `tensors` names to dtype, shape, sha256."""

    folder: Path
    run_id: str
    kind: str
    step: int
    segment: int
    phase: str
    time: str
    recipe: str
    order_digest: str
    weights_sha256: str
    state_sha256: str | None
    ledger: dict[str, Any]
    files: dict[str, dict[str, Any]]
    tensors: dict[str, dict[str, Any]]


def folder_name(step: int, segment: int | None = None) -> str:
    """`step-000400`; with a segment (a step saved again after a recovery) `step-000400-segment-02`."""
    return f"step-{step:06d}" + ("" if segment is None else f"-segment-{segment:02d}")


def shard_name(name: str, rank: int, ranks: int) -> str:
    """`model.safetensors` of a single rank; of several `model-00002-of-00004.safetensors`, counted from one."""
    stem, suffix = name.split(".")
    return name if ranks == 1 else f"{stem}-{rank + 1:05d}-of-{ranks:05d}.{suffix}"


def tensor_files(manifest: Manifest, name: str) -> list[str]:
    """The files that together are `MODEL` or `OPTIMIZER`: one, or all shards; DataError naming what is not listed."""
    path = manifest.folder / MANIFEST
    shards = {file: found for file in manifest.files if (found := _SHARD.fullmatch(file)) and name.startswith(found[1])}
    if not shards:
        if name not in manifest.files:
            raise DataError(f"{path} lists no {name}, which a {manifest.kind} checkpoint has")
        return [name]
    ranks = max(int(found[3]) for found in shards.values())
    wanted = [shard_name(name, rank, ranks) for rank in range(ranks)]
    foreign = sorted((shards.keys() | ({name} & manifest.files.keys())) - set(wanted))
    if foreign:
        raise DataError(f"{path} lists {foreign[0]} beside shards of {ranks} ranks; it is of another checkpoint")
    absent = [file for file in wanted if file not in shards]
    if absent:
        raise DataError(f"{path} lists no {', '.join(absent)} of {ranks} shards")
    return wanted


def weights_pin(manifest: Manifest) -> str:
    """What pins name: the digest of `model.safetensors`, or `weights_sha256` where the model lies in shards."""
    files = tensor_files(manifest, MODEL)
    return str(manifest.files[MODEL]["sha256"]) if files == [MODEL] else manifest.weights_sha256


def encode(manifest: Manifest) -> bytes:
    """The manifest as it is written, last of all files."""
    body = {key: value for key, value in vars(manifest).items() if key != "folder"}
    return (json.dumps({"format": FORMAT, **body}, indent=1, sort_keys=True) + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder; DataError (exit 4) with the fault when it is missing or damaged."""
    path = folder / MANIFEST
    try:
        value = read_object(path, "the manifest of a checkpoint")
        if value.get("format") != FORMAT:
            raise DataError(f"{path}: format is {value.get('format')!r}; {FORMAT!r} is expected")
        good = (
            all(isinstance(value.get(key), str) for key in _TEXT_KEYS)
            and all(type(value.get(key)) is int and value[key] >= 0 for key in ("step", "segment"))
            and all(isinstance(value.get(key), dict) for key in ("ledger", "files", "tensors"))
            and value["kind"] in ("full", "weights")
            and is_digest(value["weights_sha256"])
            and (is_digest(value.get("state_sha256")) if value["kind"] == "full" else value.get("state_sha256") is None)
        )
        if not good:
            raise DataError(f"{path} is damaged: a key is missing or of the wrong type")
        for name, item in value["files"].items():
            inside(folder, name, str(path))
            if not (isinstance(item, dict) and type(item.get("bytes")) is int and is_digest(item.get("sha256"))):
                raise DataError(f"{path} is damaged: the entry of {name!r} has no size and digest")
    except AssayError as fault:
        raise DataError(str(fault)) from None
    fields: dict[str, Any] = {key: value.get(key) for key in Manifest.__dataclass_fields__ if key != "folder"}
    return Manifest(folder, **fields)


def problems(manifest: Manifest, *, tensors: bool = True) -> list[str]:
    """What is wrong with the folder's bytes; with `tensors` the state digest is re-derived as well."""
    found = []
    for name, item in manifest.files.items():
        path = manifest.folder / name
        if not path.is_file():
            found.append(f"{path} is missing")
        elif path.stat().st_size != item["bytes"]:
            found.append(f"{path} has {path.stat().st_size:,} bytes, the manifest says {item['bytes']:,}")
        elif (seen := digest_file(path)) != item["sha256"]:
            found.append(f"{path} {_other_bytes(manifest, name, seen)}")
    if found or not tensors:
        return found
    model, other = _described(manifest, MODEL)
    found += other
    described = dict(model)
    if manifest.kind == "full":
        state, other = _described(manifest, OPTIMIZER)
        found += other
        described |= state
        if state_digest(described) != manifest.state_sha256:
            found.append(f"{manifest.folder}: state_sha256 does not follow from the tensors")
    if state_digest(model) != manifest.weights_sha256:
        found.append(f"{manifest.folder}: weights_sha256 does not follow from the tensors")
    if described != manifest.tensors:
        found.append(f"{manifest.folder}: the manifest lists other tensors than the files hold")
    return found


def _described(manifest: Manifest, name: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The tensors of all files of the model or the optimizer, and which of them lie in two."""
    result: dict[str, dict[str, Any]] = {}
    twice = []
    for file in tensor_files(manifest, name):
        found = describe_file(manifest.folder / file)
        twice += [f"{manifest.folder / file} holds {one!r}, as another shard does" for one in found if one in result]
        result |= found
    return result, twice


def _other_bytes(manifest: Manifest, name: str, seen: str) -> str:
    """How a file of the right size has another digest than the manifest's: exchanged, foreign or damaged."""
    for other, item in manifest.files.items():
        if item["sha256"] == seen:
            return f"has the bytes of {other}"
    if name.endswith(".safetensors"):
        try:
            held = describe_file(manifest.folder / name)
        except DataError:
            held = {}
        odd = [one for one, item in held.items() if manifest.tensors.get(one) != item]
        if len(odd) == len(held) > 1:
            return "is of another checkpoint: it holds none of the tensors that the manifest lists"
    return "is damaged: its digest is not the manifest's"


def lost_lines(run_path: Path, run_id: str) -> str | None:
    """Whether something of this run names a ledger head that the ledger does not have; None when all agree.

    Every manifest carries the head of the ledger at its time, and `outcome.json` the head at the end of the
    last process, so whole lines that are missing at the ledger's end are found although what is left still chains.
    """
    heads: dict[int, tuple[str, str]] = {}
    for path in sorted(run_path.glob(f"*/step-*/{MANIFEST}")):
        try:
            manifest = read_manifest(path.parent)
        except DataError:
            continue  # damage is reported by whoever loads or verifies this folder
        if manifest.run_id == run_id and type(manifest.ledger.get("seq")) is int:
            heads[manifest.ledger["seq"]] = (str(manifest.ledger.get("digest")), path.parent.name)
    with contextlib.suppress(InputError):  # no outcome, or a damaged one, is no witness
        head = read_object(run_path / OUTCOME, "the outcome of the last process").get("ledger")
        if isinstance(head, dict) and type(head.get("seq")) is int:
            heads[head["seq"]] = (str(head.get("digest")), OUTCOME)
    last = -1
    for receipt in read(run_path / LEDGER_FILE):
        last = receipt.seq
        stated, folder = heads.pop(last, (receipt.digest, ""))
        if stated != receipt.digest:
            return f"{folder} names another receipt {last} than {run_path / LEDGER_FILE} holds"
    if heads:
        seq = max(heads)
        return f"{run_path / LEDGER_FILE} ends at receipt {last}, but {heads[seq][1]} was written after receipt {seq}"
    return None
