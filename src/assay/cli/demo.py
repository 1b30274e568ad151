"""`assay demo`: the whole life of a small model, by the commands that a user would type.

Text → shards → queue → plan → training, killed in the middle → resume → evaluation → export →
bundle → verification. A script over the rooms below: every step is the real command in a process.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from assay.cli.options import JsonOption

SLOTS = (("train-00", 110), ("train-01", 130))  # updates of the two slots; the recipe schedules their sum
EPOCHS = 3
KILL_AT = 165  # in slot 1, behind the checkpoint of step 150: some updates must be done again
PROMPTS = ("To change the background of your desktop,", "Aby zmienić")
MARK = "\x1b[36m"


@dataclass
class Stage:
    """The demo's folder and how it talks."""

    folder: Path

    def say(self, text: str) -> None:
        """A heading for people."""
        terminal = sys.stderr.isatty()
        print(f"\n{MARK}{text}\x1b[0m" if terminal else f"\n{text}", file=sys.stderr, flush=True)

    def show(self, *words: str) -> None:
        """The command as a user would type it."""
        print("$ assay " + " ".join(words), file=sys.stderr, flush=True)

    def run(self, *words: str) -> dict[str, Any]:
        """Run `assay … --json` and return its object; a failure ends the demo with that command's code."""
        self.show(*words)
        done = subprocess.run([*_assay(), *words, "--json"], cwd=self.folder, capture_output=True, check=False)
        if done.returncode != 0:
            sys.stderr.buffer.write(done.stderr)
            raise SystemExit(done.returncode)
        facts: dict[str, Any] = json.loads(done.stdout)
        return facts

    def train(self, *words: str) -> subprocess.Popen[bytes]:
        """Start `assay train …` on this terminal."""
        self.show("train", *words)
        return subprocess.Popen([*_assay(), "train", *words], cwd=self.folder, stdout=subprocess.DEVNULL)


def demo_command(
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="A new folder; default: demo, or the next free name")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Show the whole life of a small model

    On real text, on this processor, in about three minutes.
    """
    from assay.cli.show import as_json
    from assay.errors import InputError

    place = folder or _free(Path("demo"))
    if place.exists():
        raise InputError(f"{place} exists already and is never replaced; choose another folder")
    place.mkdir(parents=True)
    began = time.monotonic()
    facts = _life(Stage(place))
    facts["seconds"] = round(time.monotonic() - began, 1)
    if json_:
        as_json({key: value for key, value in facts.items() if key != "proved"})
    else:
        _conclude(place, facts)


def _life(stage: Stage) -> dict[str, Any]:
    """All steps, in order; the figures and what was proved."""
    from assay.files.shared import shared
    from assay.recipe.load import load

    stage.say("1  From text to shards: licences recorded, every document accounted for, validation held out")
    shutil.copytree(shared("corpora"), stage.folder / "corpora")
    shutil.copyfile(shared("recipes/demo.yaml"), stage.folder / "recipe.yaml")
    recipe = load(stage.folder / "recipe.yaml")
    corpus = stage.run("corpus", "build", "corpora/demo.yaml", "data")
    rejected = sum(corpus["rejected"].values())
    entropy = float(corpus["unigram_entropy_nats"])
    _tell(
        f"{corpus['documents']:,} documents in English and Polish: {corpus['admitted']:,} admitted, "
        f"{rejected} rejected by name; {corpus['tokens']:,} tokens, unigram entropy {entropy:.2f} nats"
    )

    stage.say("2  The queue: two slots, append-only, chained")
    batch, seed = str(recipe.global_batch), str(recipe.data.seed)
    queue = "data/queue.jsonl"
    stage.run("data", "create", queue, "--shard", f"data/{SLOTS[0][0]}", "--block", str(recipe.model.block))
    for name, updates in SLOTS:
        words = ("--updates", str(updates), "--epochs", str(EPOCHS), "--global-batch", batch, "--seed", seed)
        slot = stage.run("data", "append", queue, f"data/{name}", *words)
        windows = f"{slot['windows_needed']:,} of {slot['windows_available']:,} windows"
        _tell(f"slot {slot['slot']}: {updates} updates, {windows}")

    stage.say("3  The plan, before anything is spent")
    plan = stage.run("plan", "recipe.yaml")
    _tell(
        f"{plan['parameters']:,} parameters, {plan['updates']} updates of {plan['positions_per_update']:,} positions, "
        f"decay from update {plan['decay_start']}, {len(plan['checkpoints']['full'])} full checkpoints"
    )

    stage.say(f"4  Training, killed without warning after update {KILL_AT}")
    _kill(stage, stage.train("recipe.yaml", "--run", "run"))

    stage.say("5  Resume: from the newest checkpoint that holds, updates done again are compared bit for bit")
    code = stage.train("recipe.yaml", "--run", "run", "--start", "resume").wait()
    if code != 0:
        raise SystemExit(code)

    stage.say("6  Evaluation, export to Hugging Face (reloaded and compared), bundle")
    evaluated = stage.run("evaluate", "run")
    exported = stage.run("export", "run", "export")
    bundle = stage.run("bundle", "run", "bundle")

    stage.say("7  Verification, offline: every claim derived again, from the run and from the bundle alone")
    verified = stage.run("verify", "run")
    bundled = stage.run("verify", "bundle")
    status = stage.run("status", "run")
    return _facts(stage.folder, corpus, evaluated, exported, bundle, verified, bundled, status)


def _facts(
    folder: Path,
    corpus: dict[str, Any],
    evaluated: dict[str, Any],
    exported: dict[str, Any],
    bundle: dict[str, Any],
    verified: dict[str, Any],
    bundled: dict[str, Any],
    status: dict[str, Any],
) -> dict[str, Any]:
    from assay.run import metrics

    lines = list(metrics.updates(folder / "run" / "metrics.jsonl"))
    standing = metrics.by_update(folder / "run" / "metrics.jsonl")
    again = len(lines) - len(standing)
    results = evaluated["results"]["validation"]
    entropy = float(corpus["unigram_entropy_nats"])

    def count(claims: dict[str, Any]) -> str:
        found = [claim["result"] for claim in claims["claims"]]
        return f"{found.count('verified')} claims verified, {found.count('unverifiable')} unverifiable, 0 failed"

    proved = [
        ("it learned", f"validation loss {results['loss']:.2f} against a unigram entropy of {entropy:.2f} nats"),
        ("nothing was lost", f"killed, resumed: {again} updates done again, {status['alarms']} differed from before"),
        ("what it trained on", f"order digest {status['order_digest'][:23]}…, recomputed from queue and seed"),
        ("the run is its ledger", count(verified)),
        ("the bundle stands alone", count(bundled)),
        (
            "the export is the model",
            f"{exported['architecture']}, largest logit difference after a reload {exported['max_logit_difference']:g}",
        ),
    ]
    return {
        "run": str(folder / "run"),
        "loss_first": standing[0]["loss"],
        "loss_last": standing[max(standing)]["loss"],
        "validation_loss": results["loss"],
        "unigram_entropy": entropy,
        "perplexity": results["perplexity"],
        "bits_per_byte": results["bits_per_byte"],
        "bundle": str(folder / "bundle"),
        "recomputed_updates": again,
        "files": bundle["files"],
        "proved": proved,
    }


def _kill(stage: Stage, training: subprocess.Popen[bytes]) -> None:
    """Kill the rank's process (SIGKILL, no clean-up) once update KILL_AT was reported."""
    from assay.run.folder import RunFolder
    from assay.run.owner import owner_process
    from assay.run.status import reported

    run = RunFolder(stage.folder / "run")
    while training.poll() is None:
        step = reported(run.metrics).step if run.metrics.is_file() else None
        if step is not None and step > KILL_AT:
            rank = owner_process(run)
            if rank is not None:
                os.kill(rank, signal.SIGKILL)
                break
        time.sleep(0.1)
    code = training.wait()
    if code != 71:
        raise SystemExit(code or 70)
    _tell("(exit 71, as intended: the demo killed it itself)")


def _conclude(place: Path, facts: dict[str, Any]) -> None:
    """The table of what was proved, a sample, and what to try next."""
    from assay.cli.show import console, table

    out = console()
    out.print()
    out.print(table("What was proved", ("", ""), facts["proved"]))
    out.print()
    out.print("Text that it writes, after " + " and ".join(f"“{prompt}”" for prompt in PROMPTS) + ":")
    for text in _samples(place):
        out.print(f"  {' '.join(text.split())}", markup=False)
    loss, entropy = facts["validation_loss"], facts["unigram_entropy"]
    out.print(
        f"\nLoss {facts['loss_first']:.2f} at the first update, {facts['loss_last']:.2f} at the last; validation loss "
        f"{loss:.2f} (perplexity {facts['perplexity']:.1f}) against {entropy:.2f} nats of unigram entropy. "
        f"{facts['seconds']:.0f} seconds in all."
    )
    out.print("\nTry next:")
    for words in (f"status {place}/run", f"verify {place}/bundle", f"data exposure {place}/run"):
        out.print(f"  {_typed()} {words}")


def _samples(place: Path) -> list[str]:
    """What the model writes after each prompt."""
    from assay.errors import DataError
    from assay.evaluate.material import find_tokenizer
    from assay.evaluate.sample import sample
    from assay.evaluate.subject import decoder, open_subject
    from assay.run.folder import RunFolder

    subject = open_subject(place / "run")
    tokenizer = find_tokenizer(RunFolder(place / "run"))
    if tokenizer is None:
        raise DataError(f"{place}/data holds no tokenizer.json with the digest that the queue names")
    model = decoder(subject.shape, subject.tensors)
    return [sample(model, tokenizer, prompt, 60, seed=1) for prompt in PROMPTS]


def _typed() -> str:
    """What a user types here for this command: its name where the shell finds it, else its path."""
    if shutil.which("assay") is not None:
        return "assay"
    return min(sys.argv[0], os.path.relpath(sys.argv[0]), key=len)


def _assay() -> list[str]:
    return [sys.executable, "-m", "assay.cli.main"]


def _free(path: Path) -> Path:
    number = 2
    free = path
    while free.exists():
        free = path.with_name(f"{path.name}-{number:02d}")
        number += 1
    return free


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
