"""A real Slurm on this machine's loopback, with GPUs that are only names.

It needs no accounting, no cgroups and nothing in /etc: ``srun`` is wrapped, because the executor
plugin takes the variable that names the configuration out of the environment of a job's step.
"""

import contextlib
import getpass
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

FAKE_GPUS = ("/dev/null", "/dev/zero", "/dev/full")
"""Slurm counts a GPU by a device file, and opens none."""

_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "squeue", "scancel", "scontrol")

MISSING = [name for name in _PROGRAMS if shutil.which(name) is None]

SECONDS_TO_DIE = 20
"""Between SIGTERM and SIGKILL."""

CONFIGURATION = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MinJobAge=300
KillWait={seconds_to_die}
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 RealMemory=200000 Gres=gpu:fake:{gpus} State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """One node with three fake GPUs; every user command below is Slurm's own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self.programs = folder / "bin"
        """To be the first folder in which programs are looked for."""

    def start(self) -> None:
        for name in ("state", "spool", "bin"):
            (self._folder / name).mkdir()
        host = platform.node().split(".")[0]
        self._write(
            "gres.conf",
            "".join(f"NodeName={host} Name=gpu Type=fake File={file}\n" for file in FAKE_GPUS),
        )
        self._write(
            "slurm.conf",
            CONFIGURATION.format(
                host=host,
                user=getpass.getuser(),
                folder=self._folder,
                ports=_free_ports(2),
                seconds_to_die=SECONDS_TO_DIE,
                gpus=len(FAKE_GPUS),
            ),
        )
        srun = self._write(
            "bin/srun",
            f'#!/bin/sh\nSLURM_CONF={self._folder}/slurm.conf exec {shutil.which("srun")} "$@"\n',
        )
        srun.chmod(0o755)
        self._folder.chmod(0o755)
        key = self._folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        self._call(
            "munged",
            "--force",
            f"--key-file={key}",
            f"--socket={self._folder}/munge.socket",
            f"--pid-file={self._folder}/munged.pid",
            f"--log-file={self._folder}/munged.log",
            f"--seed-file={self._folder}/munge.seed",
        )
        self._call("slurmctld")
        self._call("slurmd")
        for _ in range(60):
            with contextlib.suppress(subprocess.CalledProcessError):
                if self._call("sinfo", "-h", "-o", "%t") == "idle":
                    return
            time.sleep(0.5)
        raise AssertionError(self._call("sinfo", "-N", "-o", "%N %t %E"))

    def stop(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self._call("scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}")
        for daemon in ("slurmd", "slurmctld", "munged"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                os.kill(int((self._folder / f"{daemon}.pid").read_text()), signal.SIGTERM)

    def job_of(self, process: int) -> str:
        """Return the number of the job that a process belongs to."""
        content = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace")
        variables = dict(line.split("=", 1) for line in content.split("\0") if "=" in line)
        return variables["SLURM_JOB_ID"]

    def cancel(self, job: str) -> None:
        self._call("scancel", job)

    def end_by_time_limit(self, job: str) -> None:
        """Let a job's time be over: its limit counts in minutes, its end does not.

        On a busy machine Slurm has refused it of a job that had just begun: then a second later.
        """
        for seconds_left in range(10, -1, -1):
            try:
                self._call("scontrol", "update", f"JobId={job}", "EndTime=now")
            except subprocess.CalledProcessError as error:
                if not seconds_left:
                    raise AssertionError(error.stderr) from error
                time.sleep(1)
            else:
                return

    def requeue(self, job: str) -> None:
        """What preemption does to a job that may be requeued."""
        self._call("scontrol", "requeue", job)

    def is_idle(self) -> bool:
        """Whether no job waits, runs or ends."""
        return not self._call("squeue", "-h")

    def _write(self, name: str, text: str) -> Path:
        path = self._folder / name
        path.write_text(text)
        return path

    def _call(self, *command: str) -> str:
        done = subprocess.run(
            command,
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return done.stdout.strip()


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
