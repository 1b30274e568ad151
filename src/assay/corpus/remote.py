"""Sources on the network, brought whole into the work folder before anything is read.

`OUT.work/remote/` holds what the far side listed and the files. What the hub has at a commit is listed once; a bucket
again when its files are there and when a build goes on, and a change ends the build. What is brought does not depend on
how the network behaved. Nothing is read as documents here.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from assay.corpus import hub, splits
from assay.corpus.description import Corpus, Source, is_remote
from assay.corpus.fetching import FORMAT, PINNED, Far, Listed, Origin, fetched, part_of, receipt_of
from assay.corpus.sources import Brought, endings, pin_broken
from assay.errors import DataError, InputError, MachineError
from assay.files import stores
from assay.files.digest import canonical, digest
from assay.files.publish import publish_file
from assay.files.reading import read_object
from assay.files.retry import Policy, persist

FOLDER, LISTING, README, TOKENIZER = "remote", "listing.json", "README.md", "tokenizer.json"
DEADLINE = 600.0  # seconds that a call may go without success, unless a command says otherwise
_ASKED = 10.0  # seconds for the one question which commit a branch is at
Tell = Callable[[str, int, int | None, str], None]


@dataclass(frozen=True)
class Dataset:
    """The files of a hub data set that config and split of a source stand for."""

    source: Source
    repository: hub.Repository
    revision: str
    settled: bool = True

    @property
    def address(self) -> str:
        """The data set with its commit."""
        return f"{self.repository.address} at {self.revision}"

    def listed(self, folder: Path, policy: Policy) -> Listed:
        """By the README.md of that commit."""
        every = {file.path: file for file in hub.files(self.repository, self.revision, policy)}
        names = sorted(every, key=lambda name: name.encode("utf-8"))
        if self.repository.folder:
            names = [name for name in names if name.startswith(f"{self.repository.folder}/")]
            if (self.source.config, self.source.split) != (None, None):
                raise InputError(
                    f"source {self.source.name!r}: config or split and a folder in {self.source.path} are given; give "
                    "one or the other"
                )
        else:
            readme = b""
            if README in every:
                readme = fetched(self, _far(every[README], README), folder / README, policy).read_bytes()
            names = splits.chosen(self.source, self.address, readme, names)
        wanted = [name for name in names if name.endswith(endings(self.source.format))]
        strip = len(self.repository.folder) + 1 if self.repository.folder else 0
        return Listed(tuple(_far(every[name], name[strip:]) for name in wanted), len(names) - len(wanted))

    def chunks(self, far: Far, offset: int, left: float) -> Iterator[bytes]:
        """From the hub."""
        return hub.chunks(self.repository, self.revision, far.place, offset, left)


@dataclass(frozen=True)
class Model:
    """The tokenizer.json of a model on the hub."""

    repository: hub.Repository
    revision: str
    settled: bool = True

    @property
    def address(self) -> str:
        """The model with its commit."""
        return f"{self.repository.address} at {self.revision}"

    def listed(self, folder: Path, policy: Policy) -> Listed:
        """The one file."""
        for file in hub.files(self.repository, self.revision, policy):
            if file.path == TOKENIZER:
                return Listed((_far(file, TOKENIZER),), one=True)
        raise DataError(f"tokenizer.path: {self.address} holds no {TOKENIZER}; name a model or revision that has one")

    def chunks(self, far: Far, offset: int, left: float) -> Iterator[bytes]:
        """From the hub."""
        return hub.chunks(self.repository, self.revision, far.place, offset, left)


@dataclass(frozen=True)
class Bucket:
    """The objects below a prefix that have one of these endings."""

    store: stores.Store
    prefix: str
    wanted: tuple[str, ...]
    settled: bool = False

    @property
    def address(self) -> str:
        """Bucket and prefix."""
        return f"{self.store.address}/{self.prefix}".rstrip("/")

    def listed(self, folder: Path, policy: Policy) -> Listed:
        """As the store lists it now."""

        def attempt(left: float) -> list[stores.Object]:
            return stores.objects(self.store, self.prefix)

        every = persist(f"the list of {self.address}", attempt, policy)
        if [each.key for each in every] == [self.prefix]:
            return Listed((_object(every[0], every[0].key.rsplit("/", 1)[-1]),), one=True)
        strip = len(self.prefix) + 1 if self.prefix else 0
        found = [_object(each, each.key[strip:]) for each in every if each.key.endswith(self.wanted)]
        return Listed(tuple(found), len(every) - len(found))

    def chunks(self, far: Far, offset: int, left: float) -> Iterator[bytes]:
        """From the store."""
        return stores.chunks(self.store, stores.Object(far.place, far.bytes, far.etag), offset)


@dataclass(frozen=True)
class Remote:
    """What was brought: files by source, the tokenizer's file when it is remote."""

    sources: dict[str, Brought]
    tokenizer: Path | None = None


def expect_pinned(corpus: Corpus) -> None:
    """InputError for an hf:// place without a commit as its revision; the sentence names the commit that it is at now,
    when the hub says so, and nothing is fetched before all are pinned."""
    for source in corpus.sources:
        if source.path.startswith("hf://"):
            where = f"source {source.name!r}"
            _expect_commit(hub.dataset(source.path, where), source.revision, where, "revision")
    path = corpus.tokenizer.path
    if path is not None and path.startswith("hf://"):
        place = hub.model(path, "tokenizer.path")
        _expect_commit(place, corpus.tokenizer.revision, "tokenizer", "tokenizer.revision")


def _expect_commit(place: hub.Repository, revision: str | None, where: str, key: str) -> None:
    if revision is not None and hub.COMMIT.fullmatch(revision):
        return
    now = hub.commit(place, revision, _ASKED)
    name = revision or "main"
    found = f"{name} is {now} now" if now is not None else f"the hub did not say which commit {name} is"
    stated = "null" if revision is None else repr(revision)
    raise InputError(
        f"{where}: {place.address} has the {key} {stated}, which may move; pin the commit, 40 hex digits ({found})"
    )


def bring(corpus: Corpus, work: Path, policy: Policy, tell: Tell) -> Remote:
    """Bring all that is remote into `work`/remote and say where it lies; nothing is done without a remote place.

    Raises InputError, Refused (no access) and DataError (not there, changed since it was listed) at once; MachineError
    when there is not the room; Interrupted (cause network) when a call goes without success to the policy's deadline.
    """
    origins = {source.name: _origin(source, policy.deadline) for source in corpus.sources if is_remote(source.path)}
    path = corpus.tokenizer.path
    mine = _tokenizer_origin(path, corpus.tokenizer.revision, policy.deadline) if path and is_remote(path) else None
    asked = [*((_key(source), origins[source.name]) for source in corpus.sources if source.name in origins)]
    if mine is not None:
        asked.append((digest(canonical(["tokenizer", path, corpus.tokenizer.revision]))[7:31], mine))
    listings = {key: _listing(origin, work / FOLDER / key, policy) for key, origin in asked}
    if mine is not None and len(listings[asked[-1][0]].files) != 1:
        raise DataError(f"tokenizer.path: {mine.address} holds no or several {TOKENIZER}; name the file itself")
    _expect_files(corpus, origins, listings)
    _expect_room(work, [(work / FOLDER / key, listing) for key, listing in listings.items()])
    total = sum(far.bytes for listing in listings.values() for far in listing.files)
    done, brought = 0, dict[str, dict[str, Path]]()
    pinned = {_key(source) for source in corpus.sources if source.sha256 is not None}
    for key, origin in asked:
        if key in brought:
            continue
        brought[key] = {}
        for number, far in enumerate(listings[key].files):
            place = _place(work / FOLDER / key, number, far)

            def moved(here: int, done: int = done) -> None:
                tell("fetch", done + here, total, "bytes")

            fetched(origin, far, place, policy, key in pinned, moved)
            brought[key][far.name] = place
            done += far.bytes
        if not origin.settled and origin.listed(work / FOLDER / key, policy) != listings[key]:
            raise _changed(origin, work / FOLDER / key)
    result = dict[str, Brought]()
    for source in corpus.sources:
        if source.name in origins:
            key = _key(source)
            result[source.name] = _brought(listings[key], brought[key])
            _expect_pin(source, result[source.name], list(brought[key].values()))
    return Remote(result, None if mine is None else next(iter(brought[asked[-1][0]].values())))


def _expect_pin(source: Source, found: Brought, places: list[Path]) -> None:
    """DataError for other bytes than the pinned ones; what nothing else vouched for is fetched anew next time."""
    if source.sha256 in (None, found.digest):
        return
    for place in places:
        if read_object(receipt_of(place), "the receipt of a remote file")["checked"] == PINNED:
            receipt_of(place).unlink()
            place.unlink()
    raise pin_broken(source, found.digest)


def _key(source: Source) -> str:
    """The folder of what a source names; two sources that name the same share it."""
    facts = [FORMAT, source.path, source.config, source.split, source.revision, source.format]
    return digest(canonical(facts))[7:31]


def _origin(source: Source, deadline: float) -> Origin:
    if source.path.startswith("hf://"):
        assert source.revision is not None  # `expect_pinned` was asked before
        return Dataset(source, hub.dataset(source.path, f"source {source.name!r}"), source.revision)
    store, prefix = stores.opened(source.path, deadline)
    return Bucket(store, prefix, endings(source.format))


def _tokenizer_origin(path: str, revision: str | None, deadline: float) -> Origin:
    if path.startswith("hf://"):
        assert revision is not None  # as above
        return Model(hub.model(path, "tokenizer.path"), revision)
    store, prefix = stores.opened(path, deadline)
    return Bucket(store, prefix, (TOKENIZER,))


def _listing(origin: Origin, folder: Path, policy: Policy) -> Listed:
    """What the place held when this build first looked; DataError when it holds something else by now."""
    path = folder / LISTING
    if path.is_file():
        known = _read(path)
        if origin.settled or origin.listed(folder, policy) == known:
            return known
        raise _changed(origin, folder)
    folder.mkdir(parents=True, exist_ok=True)
    listing = origin.listed(folder, policy)
    publish_file(path, canonical({"format": FORMAT, **asdict(listing)}) + b"\n")
    return listing


def _read(path: Path) -> Listed:
    record = read_object(path, "a list of remote files", 1 << 30)
    if record.pop("format", None) != FORMAT:
        raise InputError(f"{path} is of another version; delete its folder and build again")
    return Listed(tuple(Far(**each) for each in record["files"]), record["passed_over"], record["one"])


def _changed(origin: Origin, folder: Path) -> DataError:
    return DataError(
        f"{origin.address} changed after this build listed it; build into another OUT, or delete {folder} to take what "
        "is there now"
    )


def _expect_files(corpus: Corpus, origins: dict[str, Origin], listings: dict[str, Listed]) -> None:
    for source in corpus.sources:
        if source.name in origins and not listings[_key(source)].files:
            raise DataError(
                f"source {source.name!r}: {origins[source.name].address} holds no file that ends with "
                f"{' or '.join(endings(source.format))}; correct `path`, `config`, `split` or `format`"
            )


def _expect_room(work: Path, places: list[tuple[Path, Listed]]) -> None:
    """MachineError when the files that are still to be brought do not fit on the disk."""
    missing = 0
    for folder, listing in places:
        for number, far in enumerate(listing.files):
            place = _place(folder, number, far)
            here = next((p.stat().st_size for p in (place, part_of(place)) if p.is_file()), 0)
            missing += max(0, far.bytes - here)
    free = shutil.disk_usage(work).free
    if missing > free:
        raise MachineError(
            f"{work} has room for {free:,} bytes, but {missing:,} of remote files are still to be brought; make room, "
            "or build on a larger disk"
        )


def _place(folder: Path, number: int, far: Far) -> Path:
    """A name of its own for each file, whatever it is called on the far side; its ending tells how to read it."""
    ending = "".join(Path(far.name.rsplit("/", 1)[-1]).suffixes[-2:])
    return folder / f"{number:06}{ending if len(ending) < 30 else ''}"


def _brought(listing: Listed, files: dict[str, Path]) -> Brought:
    receipts = [read_object(receipt_of(path), "the receipt of a remote file") for path in files.values()]
    return Brought(
        tuple(files.items()),
        tuple(str(receipt["sha256"]) for receipt in receipts),
        listing.passed_over,
        listing.one,
        dict(sorted(Counter(str(receipt["checked"]) for receipt in receipts).items())),
    )


def _far(file: hub.Stated, name: str) -> Far:
    if file.sha256 is not None:
        return Far(name, file.path, file.bytes, "sha256", file.sha256)
    return Far(name, file.path, file.bytes, "git", file.blob)


def _object(found: stores.Object, name: str) -> Far:
    """An ETag of 32 hex digits is an MD5, unless the bucket encrypts by KMS; one in several parts is none."""
    if not name.isprintable():
        raise InputError(f"the name {name!a} of an object is not printable text; rename it")
    md5 = found.etag is not None and len(found.etag) == 32 and all(c in "0123456789abcdef" for c in found.etag)
    return Far(
        name, found.key, found.bytes, "md5" if md5 else "size", found.etag if md5 else None, found.etag
    )  # fmt: skip
