"""Many ranks as whole processes: another number of them at every start, and every way in which one can fail."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small import Project, drive

from assay.ledger.ledger import read
from assay.run import metrics, owner
from assay.run.folder import RunFolder
from assay.run.history import history
from assay.run.status import status

UPDATES = 240
Assay = Callable[..., subprocess.CompletedProcess[str]]


class Started:
    """`assay train` on some ranks, in a process of its own."""

    def __init__(self, recipe: Path, run: Path, ranks: int, *words: str) -> None:
        self.run = run
        self.process = subprocess.Popen(
            [sys.executable, "-m", "assay.cli.main", "train", str(recipe), "--run", str(run), "--ranks", str(ranks),
             *words],
            stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.output = ""

    def wait_for_update(self, update: int) -> None:
        """Until rank 0 reports it."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.output += line
            if line.startswith("update ") and int(line.split()[1].replace(",", "")) >= update:
                return
        raise AssertionError(f"the run ended before it was interrupted: {self.output}")

    def rank(self, number: int) -> int:
        """The process id of a rank."""
        return self.ranks()[number]

    def ranks(self) -> list[int]:
        """Process ids by rank: the children in the order of their start."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        words = {int(child): Path(f"/proc/{child}/cmdline").read_text().split("\0") for child in children}
        by_rank = {int(word[word.index("--rank") + 1]): child for child, word in words.items() if "--rank" in word}
        return [by_rank[number] for number in sorted(by_rank)]

    def insist(self) -> int:
        """Ctrl-C, again and again until the command has left; its exit code."""
        while self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.02)
        return self.ended()

    def ended(self) -> int:
        """The exit code; what is left of the output is read."""
        assert self.process.stderr is not None
        with self.process.stderr:
            self.output += self.process.stderr.read()
        return self.process.wait(120)


def wait_until_gone(processes: list[int]) -> None:
    """Each process has left, within a minute each."""
    for process in processes:
        try:
            handle = os.pidfd_open(process)
        except ProcessLookupError:
            continue
        gone = select.select([handle], [], [], 60)[0]
        os.close(handle)
        assert gone, "a rank outlived its parent"


def outcome(run: Path) -> dict[str, object]:
    return dict(json.loads((run / "outcome.json").read_text()))


def final(run: Path) -> tuple[str | None, dict[int, dict[str, object]]]:
    """The newest state and the standing metrics."""
    told = history(run / "ledger.jsonl")
    newest = max((item for item in told.line if item.kind == "full"), key=lambda item: item.step)
    lines = {u: metrics.comparable(line) for u, line in metrics.by_update(run / "metrics.jsonl").items()}
    return newest.state_sha256, lines


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The recipe and the run that one rank did without interruption."""
    project = Project(tmp_path_factory.mktemp("ranks") / "project", slots=((UPDATES, 60),))
    recipe = project.recipe(
        batch={"micro": 2, "accumulation": 1, "lanes": 4}, schedule__updates=UPDATES, evaluate={"every": None},
        checkpoint={"every": 40, "keep": "all"}, log={"every": 5},
    )  # fmt: skip
    run = project.path / "whole"
    assert drive(recipe, run) == 0
    return recipe, run


def test_a_run_goes_from_four_ranks_to_one_to_two_with_the_bits_of_one(
    whole: tuple[Path, Path], tmp_path: Path, assay: Assay
) -> None:
    """The third part is done by the sharded engine: the number of ranks and the engine are both no learning choices."""
    plain, straight = whole
    sharded = plain.with_name("sharded.yaml")
    sharded.write_text(json.dumps(json.loads(plain.read_text()) | {"runtime": {"device": "cpu", "engine": "fsdp"}}))
    run = tmp_path / "run"
    for recipe, ranks, words in (
        (plain, 4, ["--until", "70"]),
        (plain, 1, ["--start", "resume", "--until", "130"]),
        (sharded, 2, ["--start", "auto"]),
    ):
        done = assay("train", recipe, "--run", run, "--ranks", ranks, *words)
        assert done.returncode == 0, done.stderr
        if ranks > 1:
            assert json.loads(assay("status", run, "--json").stdout)["ranks"] == ranks
    assert final(run) == final(straight)
    told = history(run / "ledger.jsonl")
    assert [one.body["numerics"]["world"] for one in told.segments] == [4, 1, 2]
    assert not told.alarms
    logs = run / "logs" / "segment-01"
    assert sorted(path.name for path in logs.iterdir()) == [f"rank-{rank}.log" for rank in range(4)]


def test_a_number_of_ranks_that_does_not_divide_the_lanes_is_refused(
    whole: tuple[Path, Path], tmp_path: Path, assay: Assay
) -> None:
    recipe, _ = whole
    done = assay("train", recipe, "--run", tmp_path / "run", "--ranks", 3)
    assert done.returncode == 3
    assert "3 ranks cannot run this recipe" in done.stderr
    assert "1, 2, 4 ranks can" in done.stderr
    assert not (tmp_path / "run").exists()
    plan = json.loads(assay("plan", recipe, "--ranks", 3, "--json").stdout)
    assert any("3 ranks cannot run this recipe" in warning for warning in plan["warnings"])


def test_a_run_survives_the_death_of_a_rank_signals_holds_and_the_death_of_its_parent(
    whole: tuple[Path, Path], tmp_path: Path, assay: Assay
) -> None:
    """One run, interrupted four times on two ranks, is the whole run in the end."""
    recipe, straight = whole
    run = tmp_path / "run"

    killed = Started(recipe, run, 2)
    killed.wait_for_update(45)
    ranks = killed.ranks()
    os.kill(ranks[1], signal.SIGKILL)
    assert killed.ended() == 71, killed.output
    wait_until_gone(ranks)
    assert killed.output.count("assay: ") == 1
    assert "rank 1 was killed by SIGKILL" in killed.output
    assert outcome(run)["code"] == 71

    stopped = Started(recipe, run, 2, "--start", "resume")
    stopped.wait_for_update(60)
    assert stopped.insist() == 75, stopped.output
    assert stopped.output.endswith("the state is saved\n")
    assert outcome(run)["cause"] == "signal"

    held = Started(recipe, run, 2, "--start", "resume")
    held.wait_for_update(75)
    owner.stop(RunFolder(run), "tests")  # in this process: a command of its own may start later than the run ends
    assert held.ended() == 75, held.output
    assert outcome(run)["cause"] == "stop"
    owner.release(RunFolder(run), None)

    orphaned = Started(recipe, run, 2, "--start", "resume")
    orphaned.wait_for_update(130)
    ranks = orphaned.ranks()
    orphaned.process.kill()
    assert orphaned.ended() == -signal.SIGKILL
    wait_until_gone(ranks)
    told = history(run / "ledger.jsonl")
    assert [one.outcome for one in told.segments] == ["failed", "interrupted", "interrupted", "interrupted"]
    assert [one.cause for one in told.segments][1:] == ["signal", "stop", "signal"]
    saved = [(item.segment, item.step) for item in told.saved]
    assert len(set(saved)) == len(saved), "each stop saved once"

    assert assay("train", recipe, "--run", run, "--start", "auto").returncode == 0
    assert final(run) == final(straight)
    assert not history(run / "ledger.jsonl").alarms
    assert status(RunFolder(run))["state"] == "ended"


def test_a_signal_before_the_ranks_listen_changes_nothing(whole: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, _ = whole
    early = Started(recipe, tmp_path / "run", 2)
    assert early.process.stderr is not None
    assert "PRE-FLIGHT OK" in next(line for line in early.process.stderr if "PRE-FLIGHT" in line)
    while len(ranks := early.ranks()) < 2:
        pass
    assert early.insist() == 75, early.output
    wait_until_gone(ranks)
    assert early.output == "assay: stopped before training began; no update was made: start it again\n"
    told = outcome(tmp_path / "run")
    assert (told["code"], told["cause"], told["step"]) == (75, "signal", None)
    (stop,) = [one for one in read(tmp_path / "run" / "ledger.jsonl") if one.kind == "interrupted"]
    assert stop.body == {"before_start": True, "cause": "signal"}
    assert told["ledger"] == {"seq": stop.seq, "digest": stop.digest}


def test_a_stop_of_a_run_that_is_starting_is_75_and_one_that_stands_is_3(
    whole: tuple[Path, Path], tmp_path: Path, assay: Assay
) -> None:
    recipe, _ = whole
    run = tmp_path / "run"
    early = Started(recipe, run, 1)
    assert early.process.stderr is not None
    assert "PRE-FLIGHT OK" in next(line for line in early.process.stderr if "PRE-FLIGHT" in line)
    hold = owner.stop(RunFolder(run), "tests")
    assert early.ended() == 75, early.output
    assert early.output.endswith(f"stopped before training began by a stop; lift the hold with: assay release {run}\n")
    told = outcome(run)
    assert (told["code"], told["cause"], told["step"]) == (75, "stop", None)
    newest = list(read(run / "ledger.jsonl"))[-1]
    assert (newest.kind, newest.body) == ("interrupted", {"before_start": True, "cause": "stop"})
    again = assay("train", recipe, "--run", run)
    assert again.returncode == 3, again.stderr
    assert f"is held (stop, since {hold.time})" in again.stderr
    lifted = assay("release", run)
    assert lifted.stdout == f"{run} is released (receipt {newest.seq + 1}, nothing reported yet)\n"


def test_a_rank_that_stands_still_is_a_hang_with_tracebacks(whole: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, _ = whole
    run = tmp_path / "run"
    hanging = Started(recipe, run, 2, "--hang-after", "3")
    hanging.wait_for_update(20)
    ranks = hanging.ranks()
    os.kill(ranks[1], signal.SIGSTOP)
    assert hanging.ended() == 71, hanging.output
    wait_until_gone(ranks)
    assert "hangs: no update for" in hanging.output
    traces = (run / "logs" / "segment-01" / "rank-0.hang").read_text()
    assert "most recent call first" in traces
    assert "loop.py" in traces
    (failed,) = [receipt for receipt in read(run / "ledger.jsonl") if receipt.kind == "failed"]
    assert failed.body["code"] == 71
    assert outcome(run)["code"] == 71


def test_a_rank_that_never_arrives_is_a_hang_too(whole: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, _ = whole
    run = tmp_path / "run"
    hanging = Started(recipe, run, 2, "--hang-after", "1")
    assert hanging.process.stderr is not None
    assert "PRE-FLIGHT OK" in next(line for line in hanging.process.stderr if "PRE-FLIGHT" in line)
    while len(ranks := hanging.ranks()) < 2:
        pass
    os.kill(ranks[1], signal.SIGSTOP)
    assert hanging.ended() == 71, hanging.output
    wait_until_gone(ranks)
    assert "rank 0 hangs: no update for" in hanging.output
    assert "join" in (run / "logs" / "segment-01" / "rank-0.hang").read_text()
    (failed,) = [receipt for receipt in read(run / "ledger.jsonl") if receipt.kind == "failed"]
    assert (failed.body["code"], failed.body["before_start"]) == (71, True)
    assert outcome(run)["code"] == 71


def test_a_fault_of_rank_0_alone_ends_all_with_its_code(whole: tuple[Path, Path], tmp_path: Path) -> None:
    """A ledger that another hand broke is seen by rank 0 alone: all leave with its code and one message."""
    recipe, _ = whole
    run = tmp_path / "run"
    broken = Started(recipe, run, 2)
    broken.wait_for_update(20)
    ranks = broken.ranks()
    with (run / "ledger.jsonl").open("ab") as file:
        file.write(b'{"seq":99}\n')
    assert broken.ended() == 6, broken.output
    wait_until_gone(ranks)
    assert broken.output.count("assay: ") == 1


def test_two_launchers_of_torchs_own_go_on_with_the_same_bits(whole: tuple[Path, Path], tmp_path: Path) -> None:
    """As on two machines: each launcher starts its ranks, torch's rendezvous joins them, the code is in the outcome."""
    recipe, straight = whole
    run = tmp_path / "run"
    assert drive(recipe, run, until="3") == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launchers = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
             "--node-rank", str(node), "--rdzv-backend", "static", "--master-addr", "127.0.0.1",
             "--master-port", str(port), "-m", "--", "assay.train.worker", "--run", str(run), "--recipe", str(recipe),
             "--resume", "--until", "40"],
            stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for node in range(2)
    ]  # fmt: skip
    assert [launcher.wait(240) for launcher in launchers] == [0, 0]
    told = history(run / "ledger.jsonl")
    assert [one.body["numerics"]["world"] for one in told.segments] == [1, 2]
    state, lines = final(run)
    assert state == next(item.state_sha256 for item in history(straight / "ledger.jsonl").saved if item.step == 40)
    assert lines == {update: line for update, line in final(straight)[1].items() if update < 40}
    assert outcome(run)["code"] == 0
