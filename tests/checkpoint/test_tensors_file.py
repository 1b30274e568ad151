"""Checkpoint files are safetensors, made of their tensors' bytes alone, and proved by an independent digest."""

from __future__ import annotations

import ast
import hashlib
import resource
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import rfc8785
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import assay
from assay.checkpoint import manifest as manifests
from assay.checkpoint import tensors
from assay.checkpoint.load import load
from assay.checkpoint.manifest import problems, read_manifest
from assay.checkpoint.save import Facts, raw, save, tensor_digests
from assay.errors import DataError, MachineError, VerificationError

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8, torch.bool)  # fmt: skip
ORDER = "sha256:" + "0" * 64


def every_dtype() -> dict[str, torch.Tensor]:
    """Tensors of every type and of odd shapes: a matrix, a scalar, an empty one, a transposed one, NaN inside."""
    torch.manual_seed(1)
    made = {str(dtype).removeprefix("torch."): (torch.randn(3, 5) * 9).to(dtype) for dtype in DTYPES}
    made |= {f"scalar.{name}": tensor[0, 0].clone() for name, tensor in made.items()}
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    return made | {"empty": torch.empty(0, 4), "turned": torch.randn(4, 3).T, "special": special, "ż": torch.ones(1)}


def facts(step: int = 6, segment: int = 1) -> Facts:
    return Facts("run", step, segment, "stable", "2026-11-30T10:00:00Z", "r", ORDER, {"seq": 1, "digest": "d"})


RNG = bytes(torch.Generator().get_state().numpy()).hex()
STATE = f'{{"step": 6, "order_digest": "{ORDER}", "rng": {{"cpu": "{RNG}"}}, "recent": []}}'.encode()
DOCUMENTS = {"state.json": STATE, "recipe.json": b"{}", "config.json": b"{}"}


def saved(parent: Path, step: int = 6, segment: int = 1, scale: float = 1.0) -> manifests.Manifest:
    """A full checkpoint of two small tensors."""
    parent.mkdir(exist_ok=True)
    model = {"b.weight": torch.arange(6.0).reshape(2, 3) * scale, "a.weight": torch.ones(2, dtype=torch.bfloat16)}
    state = {"optimizer.b.weight.momentum": torch.zeros(2, 3), "optimizer.a.weight.step": torch.tensor(3.0)}
    return save(parent, facts(step, segment), model, state, DOCUMENTS, {})


def test_the_library_reads_every_type_bit_for_bit(tmp_path: Path) -> None:
    made = every_dtype()
    written = tensors.write(tmp_path / "file", {name: raw(tensor) for name, tensor in made.items()})
    back = load_file(tmp_path / "file")
    assert back.keys() == made.keys()
    for name, tensor in made.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        same = back[name].contiguous().reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(*same), name
    data = (tmp_path / "file").read_bytes()
    assert (written.bytes, written.sha256) == (len(data), "sha256:" + hashlib.sha256(data).hexdigest())
    assert tensors.describe_file(tmp_path / "file") == written.tensors == tensor_digests(made)


def test_the_same_tensors_give_the_same_bytes_in_whatever_order(tmp_path: Path) -> None:
    made = {name: raw(tensor) for name, tensor in every_dtype().items()}
    tensors.write(tmp_path / "one", made)
    tensors.write(tmp_path / "two", dict(reversed(made.items())))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    with safe_open(tmp_path / "one", "pt") as file:
        assert file.metadata() is None
    with pytest.raises(FileExistsError):
        tensors.write(tmp_path / "one", made)


def independent_state_digest(*files: Path) -> str:
    """`state_sha256` as the contract words it, from the library's reading and the RFC's form."""
    kinds = {torch.float32: "F32", torch.bfloat16: "BF16"}
    described = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                tensor = opened.get_tensor(name)
                content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                described[name] = {
                    "dtype": kinds[tensor.dtype],
                    "shape": list(tensor.shape),
                    "sha256": "sha256:" + hashlib.sha256(content).hexdigest(),
                }
    return "sha256:" + hashlib.sha256(rfc8785.dumps(described)).hexdigest()


def test_the_state_digest_is_that_of_the_contract(tmp_path: Path) -> None:
    manifest = saved(tmp_path)
    model, optimizer = manifest.folder / "model.safetensors", manifest.folder / "optimizer.safetensors"
    assert manifest.weights_sha256 == independent_state_digest(model)
    assert manifest.state_sha256 == independent_state_digest(model, optimizer)
    assert saved(tmp_path / "other").state_sha256 == manifest.state_sha256
    assert saved(tmp_path / "third", scale=2.0).state_sha256 != manifest.state_sha256


def test_sha256sum_agrees_and_gains_a_line_a_file(tmp_path: Path) -> None:
    saved(tmp_path)
    saved(tmp_path, step=12, scale=3.0)
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    named = {line.split("  ")[1] for line in (tmp_path / "SHA256SUMS").read_text().splitlines()}
    assert named == {str(path.relative_to(tmp_path)) for path in tmp_path.glob("step-*/*")}


def test_a_step_saved_again_by_a_later_segment_keeps_the_older_folder(tmp_path: Path) -> None:
    first, second = saved(tmp_path), saved(tmp_path, segment=2)
    assert (first.folder.name, second.folder.name) == ("step-000006", "step-000006-segment-02")
    assert first.state_sha256 == second.state_sha256
    assert not problems(first)
    assert not problems(second)


def test_one_digest_never_stands_under_two_steps(tmp_path: Path) -> None:
    weights = {"a": torch.ones(3)}
    first = save(tmp_path, facts(6), weights, None, {}, {})
    taken = {first.weights_sha256: 6}
    save(tmp_path, facts(6, segment=2), weights, None, {}, taken)  # the same step again is no lie
    with pytest.raises(VerificationError, match="step 7 have the digest of step 6"):
        save(tmp_path, facts(7), weights, None, {}, taken)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000006", "step-000006-segment-02"]


@pytest.mark.parametrize("limit", [0, 100, 260, 700, 2000])
def test_a_disk_that_fills_in_the_middle_leaves_nothing_of_the_new_and_all_of_the_old(
    tmp_path: Path, limit: int
) -> None:
    saved(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(MachineError, match=r"could not be written: .*; what was saved before stands"):
            save(tmp_path, facts(12), {"a": torch.ones(9, 9), "b": torch.ones(900)}, {}, DOCUMENTS, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not problems(read_manifest(tmp_path / "step-000006"))


def faults_of(folder: Path) -> str:
    """What a load says about a folder."""
    with pytest.raises(DataError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_sound_checkpoint_loads_and_every_flipped_byte_is_found(tmp_path: Path) -> None:
    folder = saved(tmp_path).folder
    assert load(folder).optimizer["optimizer.a.weight.step"].item() == 3.0
    for name in [*read_manifest(folder).files]:
        path = folder / name
        whole = path.read_bytes()
        for at in np.linspace(0, len(whole) - 1, 5).astype(int).tolist():
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            assert "is damaged" in faults_of(folder)
        path.write_bytes(whole[:-1])
        assert f"has {len(whole) - 1:,} bytes" in faults_of(folder)
        path.write_bytes(whole)
        path.rename(folder / "away")
        assert "is missing" in faults_of(folder)
        (folder / "away").rename(path)
    assert not problems(read_manifest(folder))


def test_a_manifest_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    folder = saved(tmp_path).folder
    path = folder / "manifest.json"
    text = path.read_text()
    for wrong in (
        "", "{", "[]", "\0", text.replace("assay-checkpoint/1", "assay-checkpoint/2"), text.replace("full", "half"),
        text.replace('"step": 6', '"step": -6'), text.replace('"step": 6', '"step": true'),
        text.replace("model.safetensors", "../model.safetensors"), text.replace("model.safetensors", "/etc/passwd"),
        text.replace('"model.safetensors"', '"gone.safetensors"'), text.replace("sha256:", "sha512:"),
        text.replace('"bytes"', '"size"'), text[: len(text) // 2],
    ):  # fmt: skip
        path.write_text(wrong)
        assert str(folder) in faults_of(folder)
    path.unlink()
    assert "does not exist" in faults_of(folder)


def test_files_and_manifest_forged_together_are_one_sentence_too(tmp_path: Path) -> None:
    folder = saved(tmp_path).folder
    sound = {path: path.read_bytes() for path in folder.iterdir()}
    for name, content in (
        ("model.safetensors", b"x" * 9), ("model.safetensors", b""), ("model.safetensors", b"\xff" * 64),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]"), ("optimizer.safetensors", b"\x08" + b"\0" * 15),
        ("state.json", b""), ("state.json", b"{}"), ("state.json", b"[]"), ("state.json", b"\xff"),
        ("state.json", STATE.replace(b": 6", b": 7")),
        *(("state.json", STATE.replace(RNG.encode(), other.encode())) for other in (
            "zz" + RNG[2:], RNG[:-1], RNG[:-2], RNG + "00", "ff" * (len(RNG) // 2), ""
        )),
        ("state.json", STATE.replace(b"[]", b'[{"update": 9}]')),
        ("state.json", STATE.replace(b'"rng"', b'"nrg"')),
        *(("state.json", STATE[:-1] + b', "spikes": %s}' % spikes) for spikes in (
            b"[]", b"{}", b'{"norms": 1, "skipped": 0}', b'{"norms": ["1"], "skipped": 0}',
            b'{"norms": [-1.0], "skipped": 0}', b'{"norms": [1e999], "skipped": 0}', b'{"norms": [true], "skipped": 0}',
            b'{"norms": [1%s], "skipped": 0}' % (b"0" * 400), b'{"norms": [1.0]}', b'{"norms": [], "skipped": -1}',
            b'{"norms": [], "skipped": "0"}',
        )),
    ):  # fmt: skip
        for path, old in sound.items():
            path.write_bytes(old)
        (folder / name).write_bytes(content)
        files = {one: {"bytes": (folder / one).stat().st_size, "sha256": "sha256:" + hashlib.sha256(
            (folder / one).read_bytes()).hexdigest()} for one in read_manifest(folder).files}  # fmt: skip
        forged = manifests.Manifest(**{**vars(read_manifest(folder)), "files": files})
        (folder / "manifest.json").write_bytes(manifests.encode(forged))
        assert str(folder) in faults_of(folder)


@pytest.mark.parametrize("header", [
    b"", b"{", b"[]", b"\xff", b'{"a": 1}', b'{"a": {}}', b'{"a": {"dtype": "F32", "shape": [1]}}',
    b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
    b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
    b'{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [true, 4]}}',
])  # fmt: skip
def test_a_header_that_describes_no_bytes_of_the_file_is_named(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(DataError, match="file"):
        tensors.describe_file(path)
    path.write_bytes((1 << 62).to_bytes(8, "little") + header)
    with pytest.raises(DataError, match="header does not fit"):
        tensors.describe_file(path)


def test_nothing_on_any_path_unpickles() -> None:
    """No source file of Assay names pickle or a loader that unpickles; safetensors and JSON are all there is."""
    root = Path(assay.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name.split(".")[0] for alias in node.names} | {(getattr(node, "module", "") or "")}
                banned = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
                assert not names & banned, path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in {("torch", "load"), ("torch", "save")}, path
                if node.value.id == "np" and node.attr == "load":
                    raise AssertionError(f"{path} uses np.load")
