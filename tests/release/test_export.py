"""What leaves for Hugging Face is loaded again and computes the same; what comes back has the same digest."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prose import BLOCK, MODEL, Prose, prose, recipe
from safetensors.torch import load_file, save_file
from small import drive
from transformers import AutoModelForCausalLM, AutoTokenizer

from assay.checkpoint.save import Facts, document, save
from assay.cli.main import main
from assay.corpus import tokenizer as tokenizers
from assay.corpus.tokenizer import decode
from assay.data.batches import validation_windows
from assay.errors import InputError, VerificationError
from assay.evaluate.hugging_face import INDEX, WEIGHTS, expect_equal, read_model
from assay.evaluate.subject import decoder, open_subject
from assay.files.digest import digest_file
from assay.files.publish import leftovers
from assay.ledger.ledger import read
from assay.model import interchange
from assay.model.initial import build
from assay.recipe.schema import Model
from assay.release.export import compare_tokenizer, export, windows
from assay.release.importing import import_hugging_face
from assay.run.folder import RunFolder

Command = Callable[..., dict[str, Any]]
PLAIN = {"qk_norm": False, "value_residual": False, "logit_cap": 0}
SHAPES = {
    "LlamaForCausalLM": PLAIN | {"tie_embeddings": False, "rope_theta": 500_000.0},
    "Qwen3ForCausalLM": PLAIN | {"qk_norm": True},
    "AssayForCausalLM": {"document_mask": True},
}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Prose:
    return prose(tmp_path_factory.getbasetemp())


@pytest.fixture
def mine(trained: Prose, tmp_path: Path) -> Prose:
    """A copy of the project that a test may write into."""
    shutil.copytree(trained.path, tmp_path / "prose")
    return Prose(tmp_path / "prose", trained.tokenizer)


@pytest.fixture(autouse=True)
def _modules_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers copies modelling files into a cache and imports them from there: into this test's folder."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))


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


def checkpoint(parent: Path, changes: Mapping[str, Any]) -> Path:
    """A weights checkpoint outside of a run, far from its initial values."""
    shape = Model.model_validate(MODEL | changes)
    model = build(shape, seed=1)
    generator = torch.Generator().manual_seed(2)
    tensors = {
        name: one.detach() + 0.1 * torch.randn(one.shape, generator=generator) for name, one in model.named_parameters()
    }
    facts = Facts("elsewhere", 7, 1, "constant", "2026-11-30T00:00:00Z", "none", "none", {})
    return save(parent, facts, tensors, None, {"config.json": document(shape.model_dump(mode="json"))}, {}).folder


def changed(folder: Path, **keys: Any) -> None:
    """Change keys of config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def nothing_left(*folders: Path) -> None:
    for folder in folders:
        assert not folder.exists()
        assert leftovers(folder.parent) == []


def test_a_run_leaves_with_tokenizer_and_receipt_and_comes_back_with_the_same_digest(
    mine: Prose, tmp_path: Path, assay: Command
) -> None:
    out = tmp_path / "out"
    answer = assay("export", mine.run, out)
    assert answer["architecture"] == "AssayForCausalLM"
    assert 0 <= answer["max_logit_difference"] <= 1e-4
    assert 0 <= answer["max_logit_difference_float64"] <= 1e-9
    assert answer["compared"] == "the validation shard"
    assert answer["files"] == {path.name: digest_file(path) for path in out.iterdir()}
    assert sorted(answer["files"]) == [
        "config.json", "generation_config.json", "model.safetensors", "modeling_assay.py", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip

    ids = torch.from_numpy(validation_windows(mine.validation, BLOCK, 3, 5).astype("int64"))
    theirs = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype=torch.float32)
    subject = open_subject(mine.run)
    ours = decoder(subject.shape, subject.tensors)
    with torch.no_grad():
        assert (theirs(ids).logits - ours.logits(ours(ids))).abs().max() <= 1e-4
    tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    text = decode(mine.tokenizer, ids.flatten().tolist()) + " żółć ✓"
    assert tokenizer(text)["input_ids"] == mine.tokenizer.inner.encode(text).ids
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == theirs.config.eos_token_id == mine.tokenizer.end_of_text
    prompt = torch.tensor([[mine.tokenizer.end_of_text, *tokenizer(text[:20])["input_ids"]]])
    assert theirs.generate(prompt, max_new_tokens=4, do_sample=False).shape[1] > prompt.shape[1]

    receipt = list(read(mine.run / "ledger.jsonl"))[-1]
    assert (receipt.kind, receipt.seq) == ("export", answer["receipt"])
    body = receipt.body
    assert (body["step"], body["weights_sha256"]) == (12, subject.weights_sha256)
    assert (body["files"], body["architecture"]) == (answer["files"], answer["architecture"])
    assert float(body["max_logit_difference"]) == answer["max_logit_difference"]
    assert body["modelling_file"] == digest_file(interchange.MODELLING_FILE) == digest_file(out / "modeling_assay.py")
    assert body["converter"] == digest_file(Path(interchange.__file__))
    assert str(tmp_path) not in (mine.run / "ledger.jsonl").read_text()

    back = assay("import", "hf", out, mine.path / "back")
    assert back["weights_sha256"] == subject.weights_sha256
    assert back["architecture"] == "AssayForCausalLM"
    assert 0 <= back["max_logit_difference"] <= 1e-4
    assert assay("evaluate", out, "--data", mine.validation.path)["weights_sha256"] == subject.weights_sha256


def test_a_run_starts_from_what_was_imported(mine: Prose, tmp_path: Path, assay: Command) -> None:
    assay("export", mine.run, tmp_path / "out", "--step", 9)
    back = assay("import", "hf", tmp_path / "out", mine.path / "back", "--block", 16)
    assert back["model"] == Model.model_validate(MODEL | {"block": 16}).model_dump(mode="json")
    start = {"init_from": {"path": "back", "sha256": back["files"]["model.safetensors"]}}
    begun = recipe(mine.path, "second", start=start, pins={"config": back["files"]["config.json"]})
    assert assay("preflight", begun, "--run", mine.path / "second")["ok"] is True
    assert drive(begun, mine.path / "second", until="1") == 0
    (started,) = [one.body for one in read(mine.path / "second" / "ledger.jsonl") if one.kind == "start"]
    assert (started["mode"], started["step"], started["evidence"]["source_run"]) == ("init-from", 0, "imported")
    assert started["evidence"]["weights_sha256"] == open_subject(mine.run, 9).weights_sha256


@pytest.mark.parametrize("architecture", SHAPES)
def test_each_shape_leaves_as_its_class_and_comes_back(tmp_path: Path, architecture: str) -> None:
    subject = open_subject(checkpoint(tmp_path, SHAPES[architecture]))
    done = export(subject, tmp_path / "out")
    assert (done.architecture, done.receipt, done.tokenizer, done.compared) == (architecture, None, None, "random ids")
    own = architecture == "AssayForCausalLM"
    assert ("modeling_assay.py" in done.files) is own
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=own)
    assert type(theirs).__name__ == architecture
    back = import_hugging_face(tmp_path / "out", tmp_path / "back")
    assert (back.architecture, back.shape) == (architecture, subject.shape)
    assert back.manifest.weights_sha256 == subject.weights_sha256
    assert open_subject(tmp_path / "back").weights_sha256 == subject.weights_sha256


def test_tokenizers_of_native_shapes_are_read_by_transformers(mine: Prose, tmp_path: Path) -> None:
    """Transformers has its own ideas of a Llama's and a Qwen3's tokenizer; ours must win."""
    for kind, changes in list(SHAPES.items())[:2]:
        subject = open_subject(checkpoint(tmp_path / kind, changes))
        done = export(replace(subject, run=RunFolder(mine.run)), tmp_path / f"out-{kind}")
        assert done.tokenizer == mine.tokenizer.digest
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / f"out-{kind}")
        text = "Zażółć gęślą jaźń, don't  press\nEnter 12345"
        assert tokenizer(text)["input_ids"] == mine.tokenizer.inner.encode(text).ids


def test_a_tokenizer_that_gives_other_ids_is_refused(mine: Prose, tmp_path: Path) -> None:
    export(open_subject(mine.run), tmp_path / "out")
    compared = windows(open_subject(mine.run))
    compare_tokenizer(tmp_path / "out", mine.tokenizer, compared)
    other = tokenizers.train(["an other text " * 50 + "of few words"], 270, "<|endoftext|>")
    (tmp_path / "out" / "tokenizer.json").write_bytes(other)
    with pytest.raises(VerificationError, match="that are not the"):
        compare_tokenizer(tmp_path / "out", mine.tokenizer, compared)


def test_bfloat16_is_the_rounded_model_and_only_that(tmp_path: Path) -> None:
    subject = open_subject(checkpoint(tmp_path, SHAPES["LlamaForCausalLM"]))
    done = export(subject, tmp_path / "out", "bfloat16")
    assert done.difference <= 1e-4
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {one.dtype for one in written.values()} == {torch.bfloat16}
    _, back = read_model(tmp_path / "out")
    assert all(torch.equal(back[name], one.bfloat16().float()) for name, one in subject.tensors.items())
    with pytest.raises(InputError, match="--dtype"):
        export(subject, tmp_path / "other", "float16")


def test_an_export_that_computes_otherwise_is_refused_and_leaves_nothing(
    mine: Prose, tmp_path: Path, assay: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered = tmp_path / "altered" / "modeling_assay.py"
    altered.parent.mkdir()
    text = interchange.MODELLING_FILE.read_text()
    assert "torch.cat((-second, first), dim=-1)" in text
    altered.write_text(text.replace("torch.cat((-second, first), dim=-1)", "torch.cat((second, -first), dim=-1)"))
    monkeypatch.setattr(interchange, "MODELLING_FILE", altered)
    before = (mine.run / "ledger.jsonl").read_bytes()
    refused = assay("export", mine.run, tmp_path / "out")
    assert (refused["exit"], "logits differ" in refused["error"]) == (6, True)
    altered.write_text("raise ValueError('not a model')\n")
    refused = assay("export", mine.run, tmp_path / "out")
    assert (refused["exit"], "cannot be loaded by transformers" in refused["error"]) == (6, True)
    nothing_left(tmp_path / "out")
    assert (mine.run / "ledger.jsonl").read_bytes() == before


def test_bounds_are_the_contracts_and_nan_is_beyond_them() -> None:
    for dtype, bound in ((torch.float32, 1e-4), (torch.float64, 1e-9)):
        expect_equal(bound, dtype, "it")
        for difference in (bound * 1.01, float("nan")):
            with pytest.raises(VerificationError, match="logits differ"):
                expect_equal(difference, dtype, "it")


def test_what_stands_is_never_replaced_and_a_broken_ledger_is_found_first(
    mine: Prose, tmp_path: Path, assay: Command
) -> None:
    (tmp_path / "taken").mkdir()
    assert assay("export", mine.run, tmp_path / "taken")["exit"] == 2
    assert assay("export", mine.run, tmp_path / "out", "--step", 5)["exit"] == 4
    assert assay("export", tmp_path / "nothing", tmp_path / "out")["exit"] == 2
    data = (mine.run / "ledger.jsonl").read_bytes()
    (mine.run / "ledger.jsonl").write_bytes(data.replace(b'"step":6', b'"step":7', 1))
    assert assay("export", mine.run, tmp_path / "out")["exit"] == 6
    nothing_left(tmp_path / "out")


def test_a_place_that_cannot_be_written_is_a_fault_of_the_machine(llama: Path, tmp_path: Path, assay: Command) -> None:
    (tmp_path / "file").write_text("")
    for words in (("export", tmp_path / "from" / "step-000007"), ("import", "hf", llama)):
        answer = assay(*words, tmp_path / "file" / "out")
        assert (answer["exit"], "could not be written" in answer["error"]) == (71, True)


@pytest.mark.parametrize(
    "odd",
    [{"pad_token_id": 99_999}, {"initializer_range": "wide"}, {"layer_types": ["full_attention"]}, {"id2label": 5}],
    ids=lambda odd: next(iter(odd)),
)
def test_what_transformers_cannot_read_is_one_sentence(
    llama: Path, tmp_path: Path, assay: Command, odd: dict[str, Any]
) -> None:
    changed(llama, **odd)
    answer = assay("import", "hf", llama, tmp_path / "back")
    assert (answer["exit"], "cannot be loaded by transformers" in answer["error"]) == (6, True)
    nothing_left(tmp_path / "back")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A Hugging Face folder of a Llama shape."""
    export(open_subject(checkpoint(tmp_path / "from", SHAPES["LlamaForCausalLM"])), tmp_path / "llama")
    return tmp_path / "llama"


def test_sharded_weights_come_in(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / WEIGHTS)
    whole = import_hugging_face(llama, tmp_path / "whole")
    (llama / WEIGHTS).unlink()
    names = sorted(tensors)
    index = {name: f"model-0000{1 + (place > 5)}-of-00002.safetensors" for place, name in enumerate(names)}
    for file in set(index.values()):
        save_file(
            {name: tensors[name] for name in names if index[name] == file}, llama / file, metadata={"format": "pt"}
        )
    (llama / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    parts = import_hugging_face(llama, tmp_path / "parts")
    assert parts.manifest.weights_sha256 == whole.manifest.weights_sha256
    source = json.loads((tmp_path / "parts" / "source.json").read_text())
    assert source["files"][INDEX] == digest_file(llama / INDEX)

    (llama / INDEX).write_text(json.dumps({"weight_map": index | {names[0]: "../elsewhere.safetensors"}}))
    with pytest.raises(InputError, match="leaves its folder"):
        import_hugging_face(llama, tmp_path / "bad")
    (llama / INDEX).write_text(json.dumps({"weight_map": index | {names[0]: index[names[-1]]}}))
    with pytest.raises(InputError, match="the index says"):
        import_hugging_face(llama, tmp_path / "bad")
    (llama / INDEX).write_text(json.dumps({"weight_map": []}))
    with pytest.raises(InputError, match="weight_map"):
        import_hugging_face(llama, tmp_path / "bad")
    (llama / INDEX).write_text(json.dumps({"weight_map": index}))
    (llama / index[names[0]]).unlink()
    with pytest.raises(InputError, match="is missing"):
        import_hugging_face(llama, tmp_path / "bad")
    nothing_left(tmp_path / "bad")


def test_what_cannot_be_represented_is_refused_in_one_sentence(llama: Path, tmp_path: Path, assay: Command) -> None:
    weights, config = (llama / WEIGHTS).read_bytes(), (llama / "config.json").read_text()
    tensors = load_file(llama / WEIGHTS)
    bad = tmp_path / "bad"

    def refused(words: str) -> None:
        answer = assay("import", "hf", llama, bad)
        assert answer["exit"] == 2, answer
        assert words in answer["error"], answer
        nothing_left(bad)
        (llama / WEIGHTS).write_bytes(weights)
        (llama / "config.json").write_text(config)

    changed(llama, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4})
    refused("rope")
    changed(llama, model_type="mamba")
    refused("model_type")
    changed(llama, head_dim=64)
    refused("head_dim")
    (llama / "config.json").write_text("{")
    refused("not valid JSON")
    (llama / WEIGHTS).write_bytes(weights[:-5])
    refused("not a whole safetensors file")
    save_file({name: one for name, one in tensors.items() if "q_proj" not in name}, llama / WEIGHTS)
    refused("q_proj")
    save_file(tensors | {"model.norm.weight": torch.full((32,), float("inf"))}, llama / WEIGHTS)
    refused("not finite")
    save_file(tensors | {"model.norm.weight": torch.full((32,), 0.1, dtype=torch.float64)}, llama / WEIGHTS)
    refused("float64")
    (llama / WEIGHTS).rename(llama / "pytorch_model.bin")
    answer = assay("import", "hf", llama, bad)
    assert (answer["exit"], "pickle" in answer["error"]) == (2, True)
    (llama / "pytorch_model.bin").unlink()
    assert "neither" in assay("import", "hf", llama, bad)["error"]
    (llama / WEIGHTS).write_bytes(weights)
    assert assay("import", "hf", llama, bad, "--block", 33)["exit"] == 2
    assert assay("import", "hf", llama / "config.json", bad)["exit"] == 2
    assert assay("import", "hf", tmp_path / "from" / "step-000007", bad)["exit"] == 2
    nothing_left(bad)


def test_code_of_a_foreign_folder_is_never_run(tmp_path: Path, assay: Command) -> None:
    export(open_subject(checkpoint(tmp_path / "from", SHAPES["AssayForCausalLM"])), tmp_path / "out")
    (tmp_path / "out" / "modeling_assay.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    changed(
        tmp_path / "out", auto_map={"AutoModelForCausalLM": "modeling_assay.Evil", "AutoConfig": "modeling_assay.E"}
    )
    assert assay("import", "hf", tmp_path / "out", tmp_path / "back")["ok"] is True
    assert not (tmp_path / "ran").exists()
