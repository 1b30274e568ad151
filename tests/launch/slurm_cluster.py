"""A Slurm of two nodes on this machine, from Debian's packages, under a folder of its own. It needs root."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CONFIG = """
ClusterName=assay
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=3,socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,builtin_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=5
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=main Nodes=one,two Default=YES MaxTime=60 State=UP
"""


@contextmanager
def cluster(folder: Path) -> Iterator[Path]:
    """Run the daemons while the block lasts; gives `slurm.conf`."""
    (folder / "state").mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    with_ports = [socket.socket() for _ in range(3)]
    for one in with_ports:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in with_ports]
    for one in with_ports:
        one.close()
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=socket.gethostname().split(".")[0], folder=folder, ports=ports))
    # --force: the folders above belong to whoever runs the tests.
    names = {"key": key, "socket": folder / "munge.socket", "pid": folder / "munge.pid", "log": folder / "munge.log",
             "seed": folder / "munge.seed"}  # fmt: skip
    munge = ["munged", "--foreground", "--force"]
    munge += [f"--{name}{'' if name == 'socket' else '-file'}={place}" for name, place in names.items()]
    commands = [munge, ["slurmctld", "-D", "-f", str(config)]]
    commands += [["slurmd", "-D", "-f", str(config), "-N", node] for node in ("one", "two")]
    environment = {**os.environ, "SLURM_CONF": str(config)}
    started = []
    try:
        for command in commands:
            started.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL,
                                            stderr=subprocess.DEVNULL))  # fmt: skip
            if command is munge:
                waited(lambda: (folder / "munge.socket").exists())
        waited(lambda: slurm(config, "sinfo", "--noheader", "--Node", "--format=%N %t").split()
               == ["one", "idle", "two", "idle"])  # fmt: skip
        yield config
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(30)


def slurm(config: Path, *words: str) -> str:
    """What one of Slurm's commands prints; nothing while the controller does not answer."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60,
                          env={**os.environ, "SLURM_CONF": str(config)})  # fmt: skip
    return done.stdout


def waited(condition: Callable[[], bool]) -> None:
    """Return when `condition()` is true; it is asked every tenth of a second for five minutes."""
    never = threading.Event()
    for _ in range(3000):
        if condition():
            return
        never.wait(0.1)
    raise AssertionError("it did not come true in five minutes")
