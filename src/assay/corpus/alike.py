"""Documents by what their token ids say: signatures of them, and a table that finds the most similar one.

Unlike `NearDuplicates` the table holds every document, families of like ones too, is made once and asked in
pieces. Ids compare under one tokenizer only; two spellings of one text are two rows of ids here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.corpus.duplicates import Parameters, Signature, band_hashes, band_weights, shingle_hashes, signatures

STREAM = "token ids, end of text left out"
_BLOCK = 1 << 10  # documents whose bands are hashed at a time: a kilobyte each


def signed(
    ids: NDArray[Any], starts: NDArray[np.int64], stops: NDArray[np.int64], end_of_text: int, parameters: Parameters
) -> tuple[NDArray[np.int64], Signature]:
    """(which of the documents, their signatures [k, permutations]): those with an id besides their end of text.

    The documents are ids[starts:stops]. A document's set is all its runs of `parameters.shingle` ids; one with
    fewer ids is one run.
    """
    texts = stops - (ids[stops - 1] == end_of_text)
    sets = [
        shingle_hashes(ids[begin:end].astype(np.uint64) + np.uint64(1), parameters.shingle)
        for begin, end in zip(starts.tolist(), texts.tolist(), strict=True)
        if end > begin
    ]
    if not sets:
        return np.empty(0, np.int64), np.empty((0, parameters.permutations), np.uint32)
    ends = np.cumsum([0, *map(len, sets)]).astype(np.uint64)
    return np.flatnonzero(texts > starts), signatures(np.concatenate(sets), ends, parameters)


@dataclass(frozen=True)
class Alike:
    """Signatures [documents, permutations] with, band by band, their hashes in order.

    Memory for each document: 4 bytes a permutation and 12 a band, 704 with the default parameters.
    """

    parameters: Parameters
    signatures: Signature
    hashes: list[NDArray[np.uint64]]  # of each band, ascending, [documents]
    rows: list[NDArray[np.uint32]]  # the documents in that order

    @staticmethod
    def of(found: Signature, parameters: Parameters) -> Alike:
        """The table of these signatures."""
        bands = _bands(found, parameters)
        orders = [np.argsort(band, kind="stable").astype(np.uint32) for band in bands]
        return Alike(parameters, found, [band[order] for band, order in zip(bands, orders, strict=True)], orders)

    @property
    def bytes(self) -> int:
        """Memory that the table takes."""
        bands = sum(each.nbytes for each in self.hashes) + sum(each.nbytes for each in self.rows)
        return self.signatures.nbytes + bands

    def find(self, asked: Signature) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each signature [n, permutations] the most similar document, −1 for none, and their equal numbers.

        Only a document that shares a band and reaches the threshold is found; of equals the first.
        """
        best, equal = np.full(len(asked), -1, np.int64), np.zeros(len(asked), np.int64)
        least = self.parameters.threshold * self.parameters.permutations
        bands = _bands(asked, self.parameters)
        low = np.array([np.searchsorted(table, band, "left") for table, band in zip(self.hashes, bands, strict=True)])
        high = np.array([np.searchsorted(table, band, "right") for table, band in zip(self.hashes, bands, strict=True)])
        for row in np.flatnonzero((high > low).any(axis=0)).tolist():
            spans = zip(self.rows, low[:, row].tolist(), high[:, row].tolist(), strict=True)
            candidates = np.unique(np.concatenate([order[first:last] for order, first, last in spans]))
            counts = (self.signatures[candidates] == asked[row]).sum(axis=1)
            at = int(counts.argmax())
            if counts[at] >= least:
                best[row], equal[row] = candidates[at], counts[at]
        return best, equal


def _bands(found: Signature, parameters: Parameters) -> list[NDArray[np.uint64]]:
    """The hashes of each band of signatures: [bands] arrays [documents]."""
    weights = band_weights(parameters)
    result = np.empty((parameters.bands, len(found)), np.uint64)
    for first in range(0, len(found), _BLOCK):
        result[:, first : first + _BLOCK] = band_hashes(found[first : first + _BLOCK], weights).T
    return list(result)
