"""Near duplicates of a build: signatures piece by piece, then one walk in corpus order, and the index that is kept.

It comes behind decontamination, so that no document stands for others that must not be there itself. The index that
later corpora are compared with holds only what entered. How alike two texts are is `corpus.duplicates`'s to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.corpus import pieces as work
from assay.corpus.description import Corpus
from assay.corpus.duplicates import NearDuplicates, Parameters
from assay.corpus.pieces import Rows, Stage
from assay.corpus.sources import Piece
from assay.corpus.stages import Standing, leave, rejected_row
from assay.errors import InputError
from assay.files.reading import inside

SIGNATURES, SIGNED = "signatures.bin", "signed.parquet"


@dataclass(frozen=True)
class Sign:
    """What a process needs to make the signatures of one piece."""

    parameters: Parameters
    standing: Standing
    stage: Stage
    piece: Piece


def parameters(corpus: Corpus) -> Parameters:
    """How a description wants near duplicates to be found."""
    near = corpus.duplicates.near
    assert near is not None  # only asked for where it is
    return Parameters(near.shingle, near.bands, near.rows, near.threshold, near.seed)


def sign(task: Sign) -> dict[str, Any]:
    """The signatures of one piece: uint32, little endian, a row a document; `worded` tells those that have one."""

    def write(place: Callable[[str], Path]) -> dict[str, Any]:
        index = NearDuplicates(task.parameters)
        signed = 0
        with place(SIGNATURES).open("wb") as file, Rows(place(SIGNED), work.SIGNED) as rows:
            for row in task.standing.rows(task.piece.number, ["id", "file", "position", "text"]):
                signature = index.signature(row.pop("text"))
                if signature is not None:
                    file.write(np.ascontiguousarray(signature, dtype="<u4").tobytes())
                    signed += 1
                rows.add({**row, "worded": signature is not None})
        return {"documents": rows.count, "signed": signed}

    return task.stage.make(task.piece.number, write)


def near_duplicates(
    corpus: Corpus, folder: Path, pieces: list[Piece], signed: Stage, stage: Stage,
    told: Callable[[int], None] = lambda _: None,
) -> None:  # fmt: skip
    """Let every document go that is like an earlier one of this corpus, or one that the index `against` holds."""
    if all(stage.receipt(piece.number) is not None for piece in pieces):
        return
    index = _earlier(corpus, folder)
    seen = 0
    for piece in pieces:
        source = corpus.sources[piece.source].name
        leaving = []
        for row, signature in _signatures(signed, piece, index.parameters):
            if seen % 1024 == 0:
                told(seen)
            seen += 1
            match = index.add_signature(_identity(corpus, piece, row), signature)
            if match is not None:
                evidence = f"similarity {match.similarity:.3f} to {match.identity}"
                leaving.append(rejected_row(row, source, "near duplicates", "near_duplicate", evidence))
        leave(stage, piece, leaving)


def near_index(
    corpus: Corpus, folder: Path, pieces: list[Piece], signed: Stage, entered: Callable[[int], set[int]]
) -> NearDuplicates:
    """What later corpora are compared with: the index `against` and the documents that entered a shard, no others.

    `entered`: the numbers of the documents of a piece that did.
    """
    index = _earlier(corpus, folder)
    for piece in pieces:
        numbers = entered(piece.number)
        for row, signature in _signatures(signed, piece, index.parameters):
            if row["number"] in numbers:
                match = index.add_signature(_identity(corpus, piece, row), signature)
                assert match is None, "a document entered that is like an earlier one"
    return index


def _earlier(corpus: Corpus, folder: Path) -> NearDuplicates:
    """The index that an earlier corpus kept, or an empty one."""
    asked, near = parameters(corpus), corpus.duplicates.near
    assert near is not None  # as above
    if near.against is None:
        return NearDuplicates(asked)
    index = NearDuplicates.load(inside(folder, near.against, "duplicates.near.against"))
    if index.parameters != asked:
        raise InputError(
            f"duplicates.near.against: {near.against} was made with {index.parameters}, but this description asks "
            f"for {asked}; give the same parameters"
        )
    return index


def _identity(corpus: Corpus, piece: Piece, row: dict[str, Any]) -> str:
    """How an index calls a document."""
    return f"{corpus.name}/{corpus.sources[piece.source].name}: {row['id']}"


def _signatures(
    signed: Stage, piece: Piece, asked: Parameters
) -> Iterator[tuple[dict[str, Any], NDArray[np.uint32] | None]]:
    """The documents of a piece with their signatures; None for a text without words."""
    with signed.opened(piece.number, SIGNATURES).open("rb") as file:
        for row in work.rows(signed.opened(piece.number, SIGNED)):
            worded = row.pop("worded")
            data = file.read(4 * asked.permutations) if worded else b""
            yield row, np.frombuffer(data, dtype="<u4").astype(np.uint32) if worded else None
