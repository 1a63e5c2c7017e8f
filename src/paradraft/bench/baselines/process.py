"""Runs another engine in another process, by the Python of its environment: it is never imported here.

The process loads its models once and answers requests over pipes, a JSON object per line, so that its answers can take
turns with those of our own methods. It measures its own times, so the pipes are not in them.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, ClassVar, Self

from paradraft.bench.result import Answerer, BatchResult
from paradraft.bench.spec import Method
from paradraft.models.target import Target
from paradraft.sampling_params import Sampling
from paradraft.text.tokenization import encode_prompt
from paradraft.wording import number_of


class EngineProcess:
    """The process of an engine; an `Answerer` while it is entered as a context.

    Args:
        python: the Python of the engine's environment.
        settings: of the worker, and `threads`: of the CPU.
        target: ours, for its tokenizer.
        patience_s: timeout of loading, and of a batch.
    """

    engine: ClassVar[str]
    """Its name in messages."""
    key: ClassVar[str]
    """The key of its version in the description."""
    worker: ClassVar[str]
    """The script that its Python runs."""
    description: dict[str, Any]
    """The worker's first reply, after loading."""
    _process: subprocess.Popen[str]

    def __init__(
        self,
        spec: str,
        python: Path,
        settings: dict[str, Any],
        target: Target,
        *,
        patience_s: float,
        environment: Mapping[str, str],
    ) -> None:
        self.spec = spec
        self._python = python
        self._settings = settings
        self._target = target
        self._patience_s = patience_s
        self._environment = environment
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `__exit__`
        self._replies: queue.Queue[str] = queue.Queue()

    def __call__(self, prompts: list[str], max_new_tokens: int, sampling: Sampling) -> BatchResult:
        """Answers a batch, as an `Answerer`.

        Raises:
            ValueError: the process has ended, is silent, or gives an invalid reply.
        """
        raise NotImplementedError

    @property
    def version(self) -> str:
        """Version of the engine, once it is loaded."""
        return str(self.description[self.key])

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for a result: name, version and threads of the engine, and the rest of its description."""
        further = {key: value for key, value in self.description.items() if key != self.key}
        return {"name": self.engine, "version": self.version, "threads": self._settings["threads"], **further}

    def __enter__(self) -> Self:
        """Starts the process and waits until it is loaded.

        Raises:
            ValueError: it cannot be started or cannot load.
        """
        try:
            self._process = subprocess.Popen(
                # Isolated: neither our modules nor those beside the script may stand in for its own.
                [self._python, "-I", self.worker],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**os.environ, "OMP_NUM_THREADS": str(self._settings["threads"]), **self._environment},
                encoding="utf-8",
            )
        except OSError as error:
            raise ValueError(f"method {self.spec!r}: {str(self._python)!r} cannot be run ({error.strerror})") from None
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.description = self._ask(self._settings, (self.key,))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):  # the last request was never read
            self._process.stdin.close()
        self._end()
        self._process.stdout.close()
        self._log.close()

    def _answers(self, prompts: list[str], request: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
        """Requests answers to prompts; the reply must have these keys beside the tokens."""
        rows = [encode_prompt(prompt, self._target.tokenizer) for prompt in prompts]
        reply = self._ask({"prompts": rows, **request}, ("tokens", *keys))
        if len(reply["tokens"]) != len(rows):
            answers = len(reply["tokens"])
            raise ValueError(
                f"method {self.spec!r}: {self.engine} gave {number_of(answers, 'answer')} to "
                f"{number_of(len(rows), 'prompt')}"
            )
        return reply

    def _end(self) -> int:
        """Waits for the exit code; kills a process that does not end by itself."""
        try:
            return self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._replies.put(line)
        except ValueError:  # closed at the end, or not UTF-8
            pass
        self._replies.put("")

    def _ask(self, message: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
        """Sends a message and waits for the reply, which must have these keys."""
        assert self._process.stdin is not None
        try:
            with suppress(BrokenPipeError):  # it has ended, and may have said why
                print(json.dumps(message), file=self._process.stdin, flush=True)
            line = self._replies.get(timeout=self._patience_s)
        except queue.Empty:
            self._process.kill()
            raise ValueError(
                f"method {self.spec!r}: {self.engine} has said nothing for {self._patience_s:.0f} s{self._last_words()}"
            ) from None
        if not line:
            code = self._end()
            raise ValueError(
                f"method {self.spec!r}: {self.engine}'s process ended with code {code}{self._last_words()}"
            )
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict) or not ("error" in reply or all(key in reply for key in keys)):
            raise ValueError(
                f"method {self.spec!r}: {self.engine}'s process says what is no reply: {line.strip()[:80]!r}"
            )
        if "error" in reply:
            raise ValueError(f"method {self.spec!r}: {self.engine}: {reply['error']}")
        return reply

    def _last_words(self) -> str:
        """The last line of its standard error, as the end of a sentence."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")


def without_engine(
    methods: Sequence[Method], is_its: Callable[[str], bool], python: Path | None, not_installed: str
) -> tuple[list[Method], dict[str, str]]:
    """Leaves out methods that need an engine where it is not installed.

    Args:
        python: the Python of its environment; None where there is none.

    Returns:
        The methods that can run, and for each of the others the sentence.

    Raises:
        ValueError: nothing is left.
    """
    specs = [method.spec for method in methods if is_its(method.name)]
    if not specs or python is not None:
        return list(methods), {}
    left = [method for method in methods if not is_its(method.name)]
    if not left:
        raise ValueError(f"methods: only {', '.join(specs)}, but {not_installed}")
    return left, dict.fromkeys(specs, not_installed)


@contextmanager
def running(answerers: Iterable[Answerer], report: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """Starts the processes of those answerers that have one, and ends them afterwards.

    Yields:
        The versions of the engines, by their keys.

    Raises:
        ValueError: an engine cannot be loaded.
    """
    versions = {}
    with ExitStack() as processes:
        for answerer in answerers:
            if isinstance(answerer, EngineProcess):
                report(f"loading {answerer.engine} for {answerer.spec}")
                versions[answerer.key] = processes.enter_context(answerer).version
        yield versions
