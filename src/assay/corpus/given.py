"""What a description names beside its sources: licence records, lists, tokenizer, held-out sets, an earlier index.

Faults in them are found before anything is fetched or read, not after hours of cleaning. It looks at no source.
"""

from __future__ import annotations

from pathlib import Path

from assay.corpus import reserved
from assay.corpus import tokenizer as tokenizers
from assay.corpus.admission import gate
from assay.corpus.description import Description, is_remote
from assay.corpus.duplicates import NearDuplicates
from assay.corpus.stages import held_out
from assay.corpus.tokenizer import Tokenizer
from assay.files.reading import inside, read_bytes


def expect_given(description: Description) -> None:
    """InputError for faulty licence records, lists, local tokenizers, held-out sets and indexes."""
    corpus, folder = description.corpus, description.folder
    reserved.read(corpus.admission.reserved, corpus.pool, folder)
    for source in corpus.sources:
        gate(source, corpus, folder)
    if corpus.tokenizer.path is not None and not is_remote(corpus.tokenizer.path):
        given_tokenizer(description, None)
    if corpus.decontamination is not None:
        held_out(corpus, folder)
    near = corpus.duplicates.near
    if near is not None and near.against is not None:
        NearDuplicates.load(inside(folder, near.against, "duplicates.near.against"))


def given_tokenizer(description: Description, brought: Path | None) -> Tokenizer:
    """The tokenizer of `tokenizer.path`; `brought`: where its file lies when that is remote."""
    corpus = description.corpus
    path, name = brought, str(corpus.tokenizer.path)
    if path is None:
        path = inside(description.folder, corpus.tokenizer.path, "tokenizer.path")
        name = str(path)
    return tokenizers.from_bytes(read_bytes(path, "a tokenizer.json"), corpus.end_of_text, name)
