"""`assay corpus`: build shards from documents, look at what was built, train a tokenizer.

Parses, calls one function of the room, shows tables or prints JSON. Progress goes to standard error.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from assay.cli.corpus_card import card_command
from assay.cli.options import JsonOption
from assay.cli.progress import progress
from assay.cli.reserve import reserve_command
from assay.cli.show import as_json, console, note, pairs, table

corpus_app = typer.Typer(help="Turn documents into shards", no_args_is_help=True)

CorpusFile = Annotated[Path, typer.Argument(metavar="CORPUS", help="A corpus description, such as corpora/demo.yaml")]
NewFolder = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make; it must not exist")]
BuiltFolder = Annotated[Path, typer.Argument(metavar="OUT", help="A folder that `assay corpus build` made")]
WorkerCount = Annotated[
    int | None,
    typer.Option(min=1, max=1024, metavar="N", help="Processes at a time; default: as many as are of use; same bytes"),
]
Where = Annotated[
    Literal["local", "ray"],
    typer.Option("--on", metavar="ENGINE", help="Who works: local, this machine, or ray, a Ray cluster; same bytes"),
]
Deadline = Annotated[
    float, typer.Option(min=0, max=86400, metavar="SECONDS", help="How long a remote read may go without success")
]


@corpus_app.command("build")
def build_command(
    description: CorpusFile,
    out: NewFolder,
    workers: WorkerCount = None,
    on: Where = "local",
    deadline: Deadline = 600.0,
    json: JsonOption = False,
) -> None:
    """Build shards from documents

    A build that was stopped goes on where it was: its work lies in OUT.work until OUT is there.
    """
    from assay.corpus.build import build
    from assay.corpus.description import load

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: saved, exit code 75
    with progress() as tell:
        receipt = build(load(description), out, tell, workers, on, deadline)
    _warn(receipt)
    _tell_leftover(out)
    if json:
        as_json(receipt)
        return
    screen = console()
    _show_receipt(receipt)
    screen.print(f"\nLook inside:\n  assay corpus show {out}\n  assay corpus show {out} --rejected", markup=False)


@corpus_app.command("show")
def show_command(
    out: BuiltFolder,
    source: Annotated[str | None, typer.Option(metavar="NAME", help="Only documents of this source")] = None,
    rejected: Annotated[bool, typer.Option("--rejected", help="Rejected documents, by reason")] = False,
    reason: Annotated[
        str | None, typer.Option(metavar="REASON", help="Rejected documents of this reason alone")
    ] = None,
    count: Annotated[
        int, typer.Option(min=1, max=10_000, metavar="N", help="Documents to show; of each reason when rejected")
    ] = 5,
    json: JsonOption = False,
) -> None:
    """Show samples and receipt of a corpus

    Texts are decoded from the shards: what is shown is what a model will see. A sample is drawn from the whole corpus
    and is always the same one. Of a rejected document the name, the place and the evidence are kept, not the text.
    """
    from dataclasses import asdict

    from assay.corpus import looking

    receipt = looking.receipt(out)
    if rejected or reason is not None:
        reasons, left = looking.rejected(out, count, source, reason)
        if json:
            as_json({**receipt, "shown": left})
        else:
            _show_rejected(reasons, left)
        return
    samples = looking.samples(out, count, source)
    if json:
        as_json({**receipt, "shown": [asdict(sample) for sample in samples]})
        return
    screen = console()
    for sample in samples:
        name = sample.id if sample.title in (None, sample.id) else f"{sample.id}  “{sample.title}”"
        screen.print(f"{name}  ({sample.source}, {sample.shard}, {sample.tokens:,} tokens)", markup=False)
        screen.print(sample.text + "\n", markup=False, style="dim")
    if not samples:
        screen.print("No document was admitted" + (f" from {source}" if source else "") + ".\n")
    _show_receipt(receipt)


def _show_rejected(reasons: dict[tuple[str, str], int], left: list[dict[str, Any]]) -> None:
    """Samples under their reason, then how many there are of each."""
    screen = console()
    if not reasons:
        screen.print("No document was rejected.")
        return
    for (stage, reason), documents in reasons.items():
        shown = [each for each in left if (each["stage"], each["reason"]) == (stage, reason)]
        more = "" if len(shown) == documents else f", {len(shown):,} of them:"
        screen.print(
            f"{stage}: {reason}  ({documents:,} document{'s' * (documents != 1)}{more})", markup=False, style="bold"
        )
        for each in shown:
            place = f"{each['file']}: {each['position']}"
            name = each["id"] if each["id"] is not None else place
            screen.print(f"  {name}  ({each['source']}, {place})", markup=False)
            screen.print(f"    {each['evidence']}", markup=False, style="dim")
        screen.print()
    by_reason = [(stage, reason, documents) for (stage, reason), documents in reasons.items()]
    screen.print(table("Rejected, by stage and reason", ("stage", "reason", "documents"), by_reason))


@corpus_app.command("tokenizer")
def tokenizer_command(
    description: CorpusFile,
    out: NewFolder,
    workers: WorkerCount = None,
    on: Where = "local",
    deadline: Deadline = 600.0,
    json: JsonOption = False,
) -> None:
    """Train the tokenizer of a corpus alone

    On its training documents, never on validation: the same bytes as `assay corpus build` makes.
    """
    from assay.corpus.build import build_tokenizer
    from assay.corpus.description import load

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as above
    with progress() as tell:
        facts = build_tokenizer(load(description), out, tell, workers, on, deadline)
    _tell_leftover(out)
    if json:
        as_json(facts)
        return
    shown = {"documents": facts["documents"], "admitted": facts["admitted"], **facts["tokenizer"]}
    console().print(pairs(f"Tokenizer in {out}", shown))


corpus_app.command("card")(card_command)
corpus_app.command("reserve")(reserve_command)


def _warn(receipt: dict[str, Any]) -> None:
    for name, facts in receipt["by_source"].items():
        if facts["refused"] is not None:
            note(f"source {name} was refused with its {facts['documents']:,} documents; {facts['refused']}")
    target = receipt["target"]
    if target is not None and target["short"]:
        note(f"the target of {target['tokens']:,} tokens is not reached: {target['short']:,} are missing")


def _tell_leftover(out: Path) -> None:
    """Say that the work folder is still there; what was built is whole."""
    from assay.corpus.pieces import SUFFIX

    work = out.with_name(out.name + SUFFIX)
    if work.exists():
        note(f"{out} is complete, but its work folder {work} could not be removed; delete it")


def _show_receipt(receipt: dict[str, Any]) -> None:
    screen = console()
    stages = [
        (stage["stage"], stage["in"], stage["out"], ", ".join(f"{n:,} {why}" for why, n in stage["rejected"].items()))
        for stage in receipt["stages"]
    ]
    screen.print(table(f"Corpus {receipt['name']}", ("stage", "in", "out", "rejected"), stages))
    sources = [
        (name, s["language"], s["documents"], s["admitted"], s["rejected"], s["tokens"], s["text_bytes"], s["lossy"])
        for name, s in receipt["by_source"].items()
    ]
    columns = ("source", "language", "documents", "admitted", "rejected", "tokens", "bytes of text", "lossy")
    screen.print()
    screen.print(table("", columns, sources))
    shards = [(s["path"], s["documents"], s["tokens"], s["text_bytes"], s["sha256"]) for s in receipt["shards"]]
    screen.print()
    screen.print(table("", ("shard", "documents", "tokens", "bytes of text", "sha256 of tokens.bin"), shards))
    _show_mix(receipt)
    _show_lossy(receipt)
    tokenizer = receipt["tokenizer"]
    facts = {
        "vocabulary": tokenizer["vocabulary"],
        "tokenizer": tokenizer["sha256"],
        "unigram entropy of the training tokens": f"{receipt['unigram_entropy_nats']} nats",
    }
    screen.print()
    screen.print(pairs("", facts))


def _show_mix(receipt: dict[str, Any]) -> None:
    """Languages in tokens and, beside, in bytes, where there are several or a mix or target was asked for."""
    languages, mix, target = receipt["by_language"], receipt["mix"], receipt["target"]
    if len(languages) < 2 and mix is None and target is None:
        return
    rows = [
        (
            name,
            "none" if mix is None else mix[name],
            f["tokens"],
            f["tokens_share"],
            f["text_bytes"],
            f["text_bytes_share"],
        )
        for name, f in languages.items()
    ]
    columns = ("language", "share asked for", "tokens", "share of tokens", "bytes of text", "share of bytes")
    console().print()
    console().print(table("Training shards by language", columns, rows))


def _show_lossy(receipt: dict[str, Any]) -> None:
    """Documents that decoding does not give back, by source, reason and first byte that differs."""
    if not receipt["lossy_by"]:
        return
    rows = [(each["source"], each["reason"], each["byte"], each["documents"]) for each in receipt["lossy_by"]]
    console().print()
    console().print(table("Lossy when decoded", ("source", "reason", "first byte", "documents"), rows))
