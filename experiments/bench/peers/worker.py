"""A worker process, as the harness sees it."""

import contextlib
import json
import os
import queue
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

from experiments.bench.peers.protocol import OVER_MEMORY

ROOT = Path(__file__).parents[3]
GIB = 2**30


class WorkerError(RuntimeError):
    """A worker said that it cannot, took too long, or ended; one line says which."""


class Worker:
    """A process that answers requests, ended at the end of the block.

    Args:
        python: of its environment.
        module: what it runs, below `experiments.bench.peers.workers`.
        max_bytes: memory after which it ends itself.
        timeout: seconds that one answer may take.
    """

    def __init__(self, python: Path, module: str, *, max_bytes: int, timeout: float):
        self.timeout, self.max_bytes = timeout, max_bytes
        self._errors = tempfile.TemporaryFile("w+")
        place = f"experiments.bench.peers.workers.{module}"
        environment = {**os.environ, "PEERS_MAX_BYTES": str(max_bytes), "JAX_PLATFORMS": "cpu"}
        environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        self.process = subprocess.Popen(
            [str(python), "-m", place], cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """One request and its answer.

        Raises:
            WorkerError: the worker could not, did not answer in time, or is not there any more.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
            self.process.stdin.flush()
            line = self._lines.get(timeout=self.timeout)
        except queue.Empty:
            self.close()
            raise WorkerError(f"no answer within {self.timeout:g} s") from None
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerError(self._why())
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def _why(self) -> str:
        status = self.process.wait()
        if status == OVER_MEMORY:
            return f"needs more than {self.max_bytes / GIB:.1f} GiB"
        if status == -9:
            return "killed by the operating system, as where memory is out"
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return f"ended with status {status}: {(lines or ['nothing said'])[-1][:200]}"

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def close(self) -> None:
        """End the process."""
        if self.alive:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        for file in (self.process.stdin, self.process.stdout):
            assert file is not None
            with contextlib.suppress(BrokenPipeError):
                file.close()
        self._errors.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
