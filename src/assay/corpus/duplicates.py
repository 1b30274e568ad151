"""Near duplicates: MinHash signatures by rensa, bands of them to find who is alike, kept between builds.

The same texts in the same order have the same matches on every machine; an index says which arithmetic made it
and is refused by another. It decides nothing else: who leaves, and exact duplicates, are the pipeline's.
"""

from __future__ import annotations

import json
import sys
from array import array
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.corpus.words import STREAM, numbers
from assay.errors import DataError, InputError
from assay.files.digest import digest, digest_file
from assay.files.publish import publish_folder
from assay.files.reading import parse_json, read_bytes, read_object

FORMAT = "assay-duplicates/1"
HEADER = "duplicates.json"
SIGNATURES = "signatures.bin"
IDENTITIES = "identities.jsonl"
_LIMIT = 1 << 38
_BLOCK = 1 << 10  # signatures in one array
_FREE = 0xFFFFFFFF
_ODD, _SPREAD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_PROBE = "The quick brown fox jumps over the lazy dog, and zażółć gęślą jaźń is said of geese by nobody at all."

Signature = NDArray[np.uint32]


@dataclass(frozen=True)
class Parameters:
    """How documents are compared.

    `shingle`: words in a row that make one element of a document's set. `bands` × `rows`: the length of a
    signature; documents of similarity s share a band with the probability 1 − (1 − s^rows)^bands, here 0.95 at 0.80
    and 0.9999 at 0.90. `threshold`: the estimated similarity from which a document is a near duplicate.
    """

    shingle: int = 5
    bands: int = 16
    rows: int = 8
    threshold: float = 0.75
    seed: int = 1

    def __post_init__(self) -> None:
        for name, most in (("shingle", 100), ("bands", 256), ("rows", 64)):  # as in a description
            if not 1 <= getattr(self, name) <= most:
                raise InputError(
                    f"near duplicates: {name} is {getattr(self, name)}, at least 1 and at most {most} is expected"
                )
        if not 0 < self.threshold <= 1:
            raise InputError(f"near duplicates: threshold is {self.threshold}; above 0 and at most 1 is expected")
        if not 0 <= self.seed < 1 << 64:
            raise InputError(f"near duplicates: seed is {self.seed}; 0 to 2^64 - 1 is expected")

    @property
    def permutations(self) -> int:
        """The numbers in a signature."""
        return self.bands * self.rows

    def recall(self, similarity: float) -> float:
        """The probability that two documents of this similarity share a band: 1 − (1 − s^rows)^bands."""
        return float(1 - (1 - similarity**self.rows) ** self.bands)


@dataclass(frozen=True)
class Match:
    """The earlier document that a text is like, and their estimated Jaccard similarity in steps of 1 / permutations."""

    identity: str
    similarity: float


class NearDuplicates:
    """An index of documents by what they say. A document's set: all runs of `shingle` words of its stream.

    Memory for each kept document with the default parameters: 512 bytes of signature, 171 to 341 of bands, 60 and
    the length for the identity: below 1,000 with identities of up to 70 letters. Only documents that are
    like no earlier one are kept, so that the earliest of a family stands for it.
    """

    def __init__(self, parameters: Parameters | None = None) -> None:
        self.parameters = parameters or Parameters()
        self._identities: list[str] = []
        self._blocks: list[Signature] = []
        self._weights = band_weights(self.parameters)
        # Open addressing with linear steps: at the place of a band's hash its document, and a mark to tell bands by.
        self._documents = array("I", [_FREE]) * (1 << 10)
        self._marks = array("I", [0]) * (1 << 10)

    def __len__(self) -> int:
        return len(self._identities)

    @property
    def bytes(self) -> int:
        """Memory that the kept documents take: signatures, bands and identities."""
        rows = sum(block.nbytes for block in self._blocks) + 2 * self._documents.itemsize * len(self._documents)
        return rows + sum(8 + sys.getsizeof(identity) for identity in self._identities)

    def add(self, identity: str, text: str) -> Match | None:
        """The most similar kept document at or above the threshold; None: there is none, and this one is kept.

        Of equally similar ones the earliest is named.
        A text with fewer words than a shingle is one shingle; a text without words is like none and not kept.
        """
        return self.add_signature(identity, self.signature(text))

    def signature(self, text: str) -> Signature | None:
        """The MinHash signature [permutations] of a text; None for a text without words. Workers may make it."""
        hashes = shingle_hashes(numbers(text), self.parameters.shingle)
        if not len(hashes):
            return None
        return _signature(hashes, self.parameters)

    def add_signature(self, identity: str, signature: Signature | None) -> Match | None:
        """`add` for a text whose signature was made elsewhere."""
        if signature is None:
            return None
        hashes = self._band_hashes(signature)
        candidates = self._alike(hashes)
        if candidates:
            rows = np.stack([self._row(number) for number in candidates])
            equal = (rows == signature).sum(axis=1)
            best = int(equal.argmax())  # the first of equals, and candidates ascend
            similarity = int(equal[best]) / self.parameters.permutations
            if similarity >= self.parameters.threshold:
                return Match(self._identities[candidates[best]], similarity)
        self._keep(identity, signature, hashes)
        return None

    def save(self, path: Path) -> None:
        """Publish the index as the new folder `path`: header, signatures (uint32, little endian), identities."""
        rows = (self._row(number).astype("<u4").tobytes() for number in range(len(self)))
        with publish_folder(path) as folder:
            with (folder / SIGNATURES).open("wb") as file:
                file.writelines(rows)
            names = "".join(json.dumps(name, ensure_ascii=False) + "\n" for name in self._identities)
            (folder / IDENTITIES).write_bytes(names.encode("utf-8"))
            sums = {name: digest_file(folder / name) for name in (IDENTITIES, SIGNATURES)}
            header = {"format": FORMAT, "documents": len(self), **method(self.parameters), "sha256": sums}
            (folder / HEADER).write_bytes((json.dumps(header, indent=1, ensure_ascii=False) + "\n").encode("utf-8"))

    @classmethod
    def load(cls, path: Path) -> NearDuplicates:
        """An index that was saved, ready to be added to.

        Raises InputError when it cannot be read, DataError when its bytes are not those it names or when this
        installation would make other signatures.
        """
        header = read_object(path / HEADER, "the header of an index of near duplicates")
        parameters = _parameters(header, path / HEADER)
        ours = method(parameters)
        if header.get("format") != FORMAT or header.get("stream") != STREAM or header.get("probe") != ours["probe"]:
            raise DataError(
                f"{path / HEADER}: the index was made by {header.get('library')} {header.get('version')} with another "
                f"arithmetic than {ours['library']} {ours['version']} here; use that version, or build the index anew"
            )
        sums = header.get("sha256")
        parts: dict[str, bytes] = {}
        for name in (IDENTITIES, SIGNATURES):
            parts[name] = read_bytes(path / name, "a part of an index of near duplicates", _LIMIT)
            if not isinstance(sums, dict) or sums.get(name) != digest(parts[name]):
                raise DataError(
                    f"{path / name} is not the file that {HEADER} names; restore it, or build the index anew"
                )
        rows = np.frombuffer(parts[SIGNATURES], dtype="<u4").reshape(-1, parameters.permutations)
        names = [parse_json(line, str(path / IDENTITIES)) for line in parts[IDENTITIES].split(b"\n") if line]
        if not len(rows) == len(names) == header.get("documents"):
            raise DataError(f"{path / HEADER} names {header.get('documents')} documents, but {len(rows)} are there")
        index = cls(parameters)
        for identity, row in zip(names, rows, strict=True):
            index._keep(identity, row, index._band_hashes(row))
        return index

    def _row(self, number: int) -> Signature:
        row: Signature = self._blocks[number // _BLOCK][number % _BLOCK]
        return row

    def _band_hashes(self, signatures: Signature) -> NDArray[np.uint64]:
        return band_hashes(signatures, self._weights)

    def _alike(self, hashes: NDArray[np.uint64]) -> list[int]:
        """The kept documents that share a band, ascending."""
        found: set[int] = set()
        last = len(self._documents) - 1
        for value in hashes.tolist():
            place, mark = (value >> 32) & last, value & 0xFFFFFFFF
            while (number := self._documents[place]) != _FREE:
                if self._marks[place] == mark:
                    found.add(number)
                place = (place + 1) & last
        return sorted(found)

    def _keep(self, identity: str, signature: Signature, hashes: NDArray[np.uint64]) -> None:
        """Hold a document that is like no earlier one."""
        number = len(self._identities)
        if number % _BLOCK == 0:
            self._blocks.append(np.empty((_BLOCK, self.parameters.permutations), dtype=np.uint32))
        self._blocks[-1][number % _BLOCK] = signature
        self._identities.append(identity)
        if 4 * (number + 1) * self.parameters.bands > 3 * len(self._documents):
            self._grow(number)
        self._enter(number, hashes.tolist())

    def _grow(self, documents: int) -> None:
        """Double the table and enter the documents so far anew."""
        size = 2 * len(self._documents)
        self._documents, self._marks = array("I", [_FREE]) * size, array("I", [0]) * size
        for first in range(0, documents, _BLOCK):
            block = self._blocks[first // _BLOCK][: documents - first]
            for number, values in enumerate(self._band_hashes(block).tolist(), start=first):
                self._enter(number, values)

    def _enter(self, number: int, values: list[int]) -> None:
        """Put a document where each of its bands' hashes leads."""
        last = len(self._documents) - 1
        for value in values:
            place = (value >> 32) & last
            while self._documents[place] != _FREE:
                place = (place + 1) & last
            self._documents[place] = number
            self._marks[place] = value & 0xFFFFFFFF


def method(parameters: Parameters) -> dict[str, Any]:
    """What a match depends on, for headers and receipts; `probe` is the digest of a known text's signature."""
    probe = _signature(shingle_hashes(numbers(_PROBE), parameters.shingle), parameters)
    return {
        "parameters": {**asdict(parameters), "threshold": str(parameters.threshold), "seed": str(parameters.seed)},
        "stream": STREAM,
        "library": "rensa RMinHash",
        "version": version("rensa"),
        "probe": digest(probe.astype("<u4").tobytes()),
    }


def shingle_hashes(stream: NDArray[np.uint64], shingle: int) -> NDArray[np.uint64]:
    """64-bit hashes of all runs of `shingle` words; fewer words are one run.

    A run is Σ v_i B^(shingle - 1 - i) modulo 2^64 over its words' numbers, and then mixed.
    """
    length = min(shingle, len(stream))
    if not length:
        return stream
    runs = len(stream) - length + 1
    total = stream[:runs]
    for step in range(1, length):
        total = total * _ODD + stream[step : step + runs]
    return (total ^ (total >> np.uint64(32))) * _SPREAD


def band_weights(parameters: Parameters) -> NDArray[np.uint64]:
    """The odd factors [bands, rows] that a band's hash is made with."""
    names = [f"{band}x{row}" for band in range(parameters.bands) for row in range(parameters.rows)]
    return numbers(" ".join(names)).reshape(parameters.bands, parameters.rows) | np.uint64(1)


def band_hashes(signatures: Signature, weights: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash for each band of signatures [..., permutations]: [..., bands]."""
    bands = signatures.reshape(*signatures.shape[:-1], *weights.shape)
    sums: NDArray[np.uint64] = (bands * weights).sum(axis=-1, dtype=np.uint64)
    return (sums ^ (sums >> np.uint64(32))) * _SPREAD


def signatures(hashes: NDArray[np.uint64], ends: NDArray[np.uint64], parameters: Parameters) -> Signature:
    """Of sets one after another in `hashes`, set i being [ends[i], ends[i + 1]), none empty: [sets, permutations].

    A signature is the minima of the hashes under each of the permutations that the seed gives.
    """
    try:
        from rensa import RMinHash
    except ImportError:
        raise InputError("near duplicates need rensa; install the extra: assay[corpus]") from None
    rows = RMinHash.digest_matrix_from_flat_token_hashes(
        hashes, ends, parameters.permutations, parameters.seed
    ).to_rows()
    return np.array(rows, dtype=np.uint32)


def _signature(hashes: NDArray[np.uint64], parameters: Parameters) -> Signature:
    row: Signature = signatures(hashes, np.array([0, len(hashes)], dtype=np.uint64), parameters)[0]
    return row


def _parameters(header: dict[str, Any], path: Path) -> Parameters:
    """The parameters that a header states."""
    given = header.get("parameters")
    names = {field.name for field in fields(Parameters)}
    if not isinstance(given, dict) or set(given) != names:
        raise InputError(f"{path}: 'parameters' must hold exactly {', '.join(sorted(names))}; build the index anew")
    try:
        numbers = {name: int(given[name]) for name in names - {"threshold"}}
        return Parameters(**numbers, threshold=float(given["threshold"]))
    except (TypeError, ValueError):
        raise InputError(f"{path}: 'parameters' holds what is no number; build the index anew") from None
