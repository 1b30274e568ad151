"""`assay evaluate` says what an independent count says, pins it, and never replaces a result."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from prose import BLOCK, MODEL, Prose, prose, texts
from safetensors.torch import load_file

from assay.checkpoint.manifest import read_manifest
from assay.cli.main import main
from assay.corpus.tokenizer import decode
from assay.data.shard import MANIFEST, TEXT_BYTES, Shard, Source, open_shard, write_shard
from assay.errors import DataError, InputError, NumbersError
from assay.evaluate.perplexity import measure
from assay.evaluate.sample import sample
from assay.evaluate.subject import decoder, open_subject
from assay.files.digest import digest, digest_file
from assay.ledger.ledger import read
from assay.model.decoder import Decoder
from assay.model.initial import build, empty
from assay.recipe.schema import Model
from assay.run.metrics import read as metrics

Command = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Prose:
    return prose(tmp_path_factory.getbasetemp())


@pytest.fixture
def mine(trained: Prose, tmp_path: Path) -> Prose:
    """A copy of the project that a test may write into."""
    shutil.copytree(trained.path, tmp_path / "prose")
    return Prose(tmp_path / "prose", trained.tokenizer)


@pytest.fixture
def assay(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command with --json in this process and returns its one object, with the exit code in it."""

    def run(*words: object) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["assay", *map(str, words), "--json"])
        with pytest.raises(SystemExit) as ended:
            main()
        value = json.loads(capsys.readouterr().out)
        assert value["ok"] is not bool(ended.value.code)
        return {"exit": ended.value.code or 0, **value}

    return run


def losses(model: Decoder, shard: Shard) -> torch.Tensor:
    """Nats of the targets 1, 2, … of the shard, one window after another, in float64."""
    ids = torch.from_numpy(shard.ids.astype("int64"))
    found = []
    for start in range(0, len(ids) - BLOCK, BLOCK):
        window = ids[start : start + BLOCK + 1]
        with torch.no_grad():
            logits = model.logits(model(window[None, :-1]))[0].double()
        found.append(F.cross_entropy(logits, window[1:], reduction="none"))
    return torch.cat(found)


def last(run: Path, kind: str) -> dict[str, Any]:
    return [one.body for one in read(run / "ledger.jsonl") if one.kind == kind][-1]


def test_loss_perplexity_and_bits_per_byte_are_those_of_an_independent_count(mine: Prose, assay: Command) -> None:
    answer = assay("evaluate", mine.run)
    found = answer["results"]["validation"]
    subject = open_subject(mine.run)
    model = empty(Model.model_validate(MODEL))
    model.load_state_dict(load_file(mine.run / "checkpoints" / "step-000012" / "model.safetensors"))
    each = losses(model, mine.validation)

    assert (answer["step"], answer["weights_sha256"]) == (12, subject.weights_sha256)
    assert found["shard"] == digest_file(mine.validation.path / "tokens.bin")
    assert found["positions"] == len(each) == found["windows"] * BLOCK
    assert found["loss"] == pytest.approx(each.mean().item(), abs=1e-6)
    assert found["perplexity"] == math.exp(found["loss"])
    # The bytes by decoding: whole documents are the pieces between ends of text that were predicted throughout.
    ids = mine.validation.ids.tolist()
    ends = [place + 1 for place, one in enumerate(ids) if one == mine.tokenizer.end_of_text and place <= len(each)]
    nats = each[ends[0] - 1 : ends[-1] - 1].sum().item()
    written = "".join(decode(mine.tokenizer, ids[start:stop]) for start, stop in pairwise(ends))
    assert any(len(character.encode()) > 1 for character in written)
    counts = found["bits_per_byte_counts"]
    assert counts["text_bytes"] == len(written.encode())
    assert counts["documents"] == [1, len(ends)]
    assert counts["positions"] == ends[-1] - ends[0]
    assert counts["nats"] == pytest.approx(nats, rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(written.encode()), rel=1e-6)


def test_it_is_the_validation_loss_that_training_saw(trained: Prose) -> None:
    seen = [line["validation_loss"] for line in metrics(trained.run / "metrics.jsonl") if "validation_loss" in line]
    subject = open_subject(trained.run)
    measured = measure(decoder(subject.shape, subject.tensors), trained.validation)
    assert len(seen) == 1
    assert measured.loss == pytest.approx(seen[0], abs=1e-6)


def test_result_and_receipt_are_pinned_and_a_repeat_that_agrees_adds_nothing(mine: Prose, assay: Command) -> None:
    first = assay("evaluate", mine.run)
    file = mine.run / "evaluations" / "step-000012-validation.json"
    body = last(mine.run, "evaluation")
    kept = json.loads(file.read_text())
    assert first["file"] == body["file"] == "evaluations/step-000012-validation.json"
    assert body["sha256"] == digest(file.read_bytes())
    assert (
        (body["step"], body["weights_sha256"])
        == (kept["step"], kept["weights_sha256"])
        == (12, first["weights_sha256"])
    )
    assert body["shard"] == mine.validation.sha256
    for key in ("loss", "perplexity", "bits_per_byte"):
        assert isinstance(body[key], str)
        assert float(body[key]) == kept["results"][key] == first["results"]["validation"][key]
    assert str(mine.path) not in (mine.run / "ledger.jsonl").read_text() + file.read_text()

    before = (mine.run / "ledger.jsonl").read_bytes(), file.read_bytes()
    again = assay("evaluate", mine.run)
    assert (again["added"], again["receipt"], again["file"]) == (False, first["receipt"], first["file"])
    assert before == ((mine.run / "ledger.jsonl").read_bytes(), file.read_bytes())
    assert assay("evaluate", mine.run, "--step", 6)["file"] == "evaluations/step-000006-validation.json"


def test_another_shard_gets_a_file_of_its_own(mine: Prose, assay: Command) -> None:
    first = assay("evaluate", mine.run)
    other = assay("evaluate", mine.run, "--data", mine.path / "data" / "train")
    assert other["file"] == "evaluations/step-000012-validation-2.json"
    assert other["results"]["validation"]["loss"] != first["results"]["validation"]["loss"]
    assert assay("evaluate", mine.run, "--data", mine.path / "data" / "train")["receipt"] == other["receipt"]
    assert assay("evaluate", mine.run)["receipt"] == first["receipt"]


def test_a_result_without_its_receipt_gets_one_and_a_changed_one_is_exit_6(mine: Prose, assay: Command) -> None:
    first = assay("evaluate", mine.run)
    file = mine.run / first["file"]
    lines = (mine.run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (mine.run / "ledger.jsonl").write_bytes(b"".join(lines[:-1]))  # killed between file and receipt
    data = file.read_bytes()
    again = assay("evaluate", mine.run)
    assert (again["added"], file.read_bytes()) == (True, data)
    assert last(mine.run, "evaluation")["sha256"] == digest(data)

    file.write_bytes(data.replace(b'"windows"', b'"windows" '))
    refused = assay("evaluate", mine.run)
    assert refused["exit"] == 6
    assert f"not the file that receipt {again['receipt']}" in refused["error"]


def test_outside_a_run_nothing_is_kept(mine: Prose, tmp_path: Path, assay: Command) -> None:
    inside = assay("evaluate", mine.run)
    assert assay("evaluate", mine.run / "checkpoints" / "step-000012")["receipt"] == inside["receipt"]
    shutil.copytree(mine.run / "checkpoints" / "step-000012", tmp_path / "alone")
    outside = assay("evaluate", tmp_path / "alone", "--data", mine.validation.path)
    assert (outside["file"], outside["receipt"]) == (None, None)
    assert outside["results"] == inside["results"]
    refused = assay("evaluate", tmp_path / "alone")
    assert (refused["exit"], "--data" in refused["error"]) == (2, True)


def test_what_cannot_be_measured_is_said(mine: Prose, tmp_path: Path, assay: Command) -> None:
    shard = tmp_path / "bare"
    shutil.copytree(mine.validation.path, shard)
    manifest = json.loads((shard / MANIFEST).read_text())
    del manifest["sha256"][TEXT_BYTES]
    (shard / MANIFEST).write_text(json.dumps(manifest))
    found = assay("evaluate", mine.run, "--data", shard)["results"]["validation"]
    assert found["loss"] > 0
    assert (found["bits_per_byte"], found["bits_per_byte_counts"]) == (None, None)
    assert "not measured" in found["bits_per_byte_note"]
    assert last(mine.run, "evaluation")["bits_per_byte"] is None

    manifest["tokenizer"] = "sha256:" + "0" * 64
    (shard / MANIFEST).write_text(json.dumps(manifest))
    assert assay("evaluate", mine.run, "--data", shard)["exit"] == 2
    manifest["tokenizer"] = mine.tokenizer.digest
    (shard / MANIFEST).write_text(json.dumps(manifest))
    (shard / "tokens.bin").write_bytes((shard / "tokens.bin").read_bytes()[::-1])
    assert assay("evaluate", mine.run, "--data", shard)["exit"] == 4
    assert assay("evaluate", mine.run, "--step", 5)["exit"] == 4
    assert assay("evaluate", tmp_path)["exit"] == 2
    assert assay("evaluate", tmp_path / "nothing")["exit"] == 2


def test_damage_is_passed_over_and_named(mine: Prose) -> None:
    newest = mine.run / "checkpoints" / "step-000012"
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    subject = open_subject(mine.run)
    assert subject.step == 9  # the weights checkpoint
    assert subject.weights_sha256 == read_manifest(mine.run / "weights" / "step-000009").weights_sha256
    assert "model.safetensors is damaged" in subject.passed_over[0]
    with pytest.raises(DataError, match="damaged"):
        open_subject(mine.run, 12)
    # Another checkpoint of this run, whole in itself, in the newest one's place: the receipt tells.
    shutil.rmtree(newest)
    shutil.copytree(mine.run / "checkpoints" / "step-000006", newest)
    with pytest.raises(DataError, match="not the one that receipt"):
        open_subject(mine.run, 12)
    with pytest.raises(DataError, match="not the one that receipt"):
        open_subject(newest)
    assert open_subject(mine.run).step == 9


def test_a_model_that_knows_nothing_has_the_loss_of_its_vocabulary(trained: Prose, tmp_path: Path) -> None:
    model = build(Model.model_validate(MODEL | {"logit_cap": 0}), seed=0)
    with torch.no_grad():
        model.embedding.weight.zero_()
    measured = measure(model, trained.validation)
    assert measured.loss == pytest.approx(math.log(MODEL["vocabulary"]), abs=1e-6)
    assert measured.perplexity == pytest.approx(MODEL["vocabulary"], rel=1e-6)
    assert measured.whole is not None
    bits = math.log2(MODEL["vocabulary"]) * measured.whole.positions / measured.whole.text_bytes
    assert measured.whole.bits_per_byte == pytest.approx(bits, rel=1e-6)
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    with pytest.raises(NumbersError, match="not finite"):
        measure(model, trained.validation)


def test_the_cut_ends_of_a_shard_are_left_out_of_the_bytes(tmp_path: Path) -> None:
    """Ends that fall on a window's edge, one before and one after it."""
    shape = Model.model_validate(MODEL | {"vocabulary": 16, "block": 4})
    for lengths, documents, positions in (
        ([3, 4, 5], [1, 2], 4),  # targets 1 to 8: the last document, tokens 7 to 11, is cut
        ([3, 4, 2], [1, 3], 6),  # token 8 is the last target and ends the last document
        ([3, 4, 3], [1, 2], 4),  # token 8 is the last target, token 9 would end the last document
        ([9], None, 0),
        ([1, 8], [1, 2], 8),
    ):
        path = tmp_path / "-".join(map(str, lengths))
        texts = [torch.tensor([5] * (length - 1) + [0]).numpy() for length in lengths]
        shard = write_shard(
            path, texts, vocabulary=16, tokenizer="none", end_of_text=0, pool="base",
            sources=[Source("x", 0, sum(lengths))], text_bytes=[10 * length for length in lengths],
        )  # fmt: skip
        measured = measure(build(shape, seed=1), shard)
        if documents is None:
            assert (measured.whole, "not measured" in str(measured.unmeasured)) == (None, True)
            continue
        assert measured.whole is not None
        assert [measured.whole.first, measured.whole.stop] == documents
        assert measured.whole.positions == positions == sum(lengths[slice(*documents)])
        assert measured.whole.text_bytes == 10 * positions
    with pytest.raises(InputError, match="vocabulary"):
        measure(build(shape.model_copy(update={"vocabulary": 8}), seed=1), open_shard(path))


def test_a_masked_model_sees_the_documents_that_training_showed_it(trained: Prose) -> None:
    model = build(Model.model_validate(MODEL | {"document_mask": True}), seed=4)
    plain = build(Model.model_validate(MODEL), seed=4)
    masked = measure(model, trained.validation)
    assert masked.positions == measure(plain, trained.validation).positions
    assert masked.loss != measure(plain, trained.validation).loss


def test_text_is_drawn_by_seed(trained: Prose) -> None:
    subject = open_subject(trained.run)
    model = decoder(subject.shape, subject.tensors)
    prompt = texts()[1][:40]

    def draw(temperature: float, seed: int, tokens: int = 50) -> str:
        return sample(model, trained.tokenizer, prompt, tokens, temperature, seed)

    assert draw(0.8, 1).startswith(prompt)
    assert draw(0.8, 1) == draw(0.8, 1) != draw(0.8, 2)
    assert draw(0.0, 1) == draw(0.0, 2)
    assert draw(0.8, 1, 0) == prompt
    # The likeliest token, by hand: the ids begin with the end of text.
    ids = [trained.tokenizer.end_of_text, *trained.tokenizer.inner.encode(prompt).ids]
    with torch.no_grad():
        following = int(model.logits(model(torch.tensor([ids[-BLOCK:]])))[0, -1, :400].argmax())
    assert draw(0.0, 0, 1) == decode(trained.tokenizer, [*ids[1:], following])
