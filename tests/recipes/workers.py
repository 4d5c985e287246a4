"""The launcher of the trainings in these tests: what a training imports is imported once, each run forks from there.

torchrun takes ten seconds before the first step. Here a run costs little more than what it computes, and still nothing
of the runs before it is in its processes: no process group, no mesh, no cache of DTensor or of a compiler.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parent


class Run(NamedTuple):
    records: list[list]
    """What each rank wrote to `RECORD`, one JSON value per line."""
    logs: list[str]
    failed: tuple[int, int] | None
    """The rank that failed first and its exit status (negative: the signal that ended it), or None."""


class Workers:
    """The process that forks: `with Workers(folder) as workers: workers.run(...)`.

    Args:
        folder: the current folder of runs that name no other; what Hugging Face caches goes there.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
            "HF_HOME": str(folder / "hf"),
            # Also because a process that has threads must not fork.
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",  # see tests/conftest.py
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def run(
        self,
        name: str,
        *arguments: str,
        processes: int = 1,
        folder: Path | None = None,
        may_fail: bool = False,
        **environment: str,
    ) -> Run:
        """Train by `trn_kernels.recipes.train`.

        Args:
            name: of the run; its records and logs, and what it dumps if no flag says otherwise, are below that name.
            arguments: of the command line.
            folder: the current folder.
            may_fail: a failed run returns.
            environment: more variables. `RECORD` is a file of each rank's own.

        Raises:
            RuntimeError: a process failed; holds the end of its log.
        """
        folder = folder or self.folder
        files = [folder / f"{name}.{rank}" for rank in range(processes)]
        for file in files:
            Path(f"{file}.record").unlink(missing_ok=True)
        request = {
            "files": [str(file) for file in files],
            "arguments": ["--dump_folder", name, *arguments],
            "environment": environment,
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        failed = json.loads(self._process.stdout.readline())
        logs = [Path(f"{file}.log").read_text() for file in files]
        if failed is not None and not may_fail:
            raise RuntimeError(f"{name}: rank {failed[0]} failed\n{logs[failed[0]][-6000:]}")
        records = [Path(f"{file}.record") for file in files]
        lines = [file.read_text().splitlines() if file.exists() else [] for file in records]
        return Run([[json.loads(line) for line in some] for some in lines], logs, failed and tuple(failed))


def _serve() -> None:
    # What the client reads; whatever else is printed goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from trn_kernels.recipes import cpu, train

    cpu.stub_triton()
    cpu.prepare()
    cpu.prepare = lambda: None  # done, for all runs
    import torchtitan.train
    import torchtitan.trainer

    # Rank 0 sleeps two seconds after the last step, for log collectors.
    torchtitan.trainer.time = type("time", (), {"perf_counter": time.perf_counter, "sleep": lambda seconds: None})
    import trn_kernels.overrides.registry  # noqa: F401

    for line in sys.stdin:
        answers.write(json.dumps(_run(train.main, **json.loads(line))) + "\n")
        answers.flush()


def _run(main, files: list[str], arguments: list[str], environment: dict, patience: float = 600):
    """Fork, wait; the first rank that failed and its status, or None."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    ranks = {}
    for rank, file in enumerate(files):
        process = os.fork()
        if process == 0:
            count = len(files)
            environment |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "RECORD": f"{file}.record"}
            _child(main, file, arguments, {key: str(value) for key, value in environment.items()})
        ranks[process] = rank
    end = time.monotonic() + patience
    failed = None
    while ranks:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            rank = ranks.pop(process)
            if status and failed is None:
                failed = rank, os.waitstatus_to_exitcode(status)
                end = min(end, time.monotonic() + 5)  # the others may tell more, or wait for this one forever
        elif time.monotonic() > end:
            for left in ranks:
                os.kill(left, signal.SIGKILL)
            end = float("inf")
        else:
            time.sleep(0.01)
    return failed


def _child(main, file: str, arguments: list[str], environment: dict[str, str]) -> None:
    status = 1
    try:
        os.chdir(os.path.dirname(file))
        target = os.open(f"{file}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.environ.update(environment)
        sys.argv = ["train", *arguments]
        main()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
