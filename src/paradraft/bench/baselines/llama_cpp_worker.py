"""Answers prompts with llama.cpp, for a benchmark: run by the Python of llama.cpp's own environment.

It exchanges JSON, one object per line. The first line it reads has the settings, see `LlamaCppWorker`; the reply is
`LlamaCppWorker.description`. Each further line is a request, see `LlamaCppWorker.answer`. An error is answered with
`{"error": sentence}`, and ends the process, as the end of its input does. It imports nothing but the standard library,
NumPy and llama-cpp-python: this library is not installed there.

Of llama-cpp-python it uses the functions of llama.cpp alone: its class `Llama` is several times slower.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
import time
from contextlib import suppress
from typing import Any

N_BATCH = 2048
"""Most tokens of a call of `llama_decode`; the default of llama.cpp."""
SLOTS = 256
"""llama.cpp rounds the size of its KV cache up to multiples of it."""
ERROR = 4
"""The level of an error in llama.cpp's log."""


class GrowingAnswer:
    """An answer in progress; `sequence` is its id in the KV caches."""

    def __init__(self, sequence: int, prompt: list[int], limit: int) -> None:
        self.sequence = sequence
        self.text = list(prompt)
        """Prompt, answer, and during a round its draft."""
        self.begin, self.end = len(prompt), len(prompt) + limit
        self.is_done = False
        self.accepted: list[int] = []
        self.drafted: list[int] = []
        self.delivered_s: list[float] = []

    @property
    def answer(self) -> list[int]:
        """Its tokens."""
        return self.text[self.begin :]

    def advance(self, new: list[int], *, drafted: int, accepted: int, eos_ids: frozenset[int], now_s: float) -> None:
        """Ends a round: its tokens replace the draft. Tokens after the end of the answer are cut, and not counted."""
        end = next((i for i, token in enumerate(new, start=1) if token in eos_ids), len(new))
        self.text[len(self.text) - drafted :] = new[:end]
        self.is_done = self.text[-1] in eos_ids or len(self.text) == self.end
        self.accepted.append(min(accepted, end))
        self.drafted.append(drafted)
        self.delivered_s.append(now_s)


class Model:
    """A model of llama.cpp with its KV cache.

    Args:
        files: `file` (GGUF); if it is missing, `source` is quantized to `type` and kept as this file.
        settings: `threads`, `tokens` (ids from here on are never chosen), `forbidden` (nor are these), `batch`
            (sequences), `exact` (attention in float32; else the default of llama.cpp, with a cache in float16).
        wanted: most tokens of a sequence whose logits a pass computes.
    """

    def __init__(self, files: dict[str, Any], settings: dict[str, Any], *, wanted: int, api: Any, log: Log) -> None:
        self._api, self._log, self._settings, self._wanted = api, log, settings, wanted
        if not os.path.exists(files["file"]):
            self._round(files)
        parameters = api.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = api.llama_model_load_from_file(files["file"].encode(), parameters)
        if not self._model:
            raise OSError(f"{files['file']} cannot be loaded{self._log.last}")
        rows = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        if rows < settings["tokens"]:
            raise ValueError(f"{files['file']} knows {rows} tokens, and {settings['tokens']} are asked for")
        self._batch = api.llama_batch_init(N_BATCH, 0, 1)
        # Each access to a field would make a new object.
        self._fields = (self._batch.token, self._batch.pos, self._batch.logits)
        self._sequences = [self._batch.seq_id[i] for i in range(N_BATCH)]
        for i in range(N_BATCH):
            self._batch.n_seq_id[i] = 1
        self._context: Any = None
        self._room = 0
        self._lengths: list[int] = []
        self._views: dict[tuple[int, int], Any] = {}
        self._rows = rows
        self.passes = 0
        """Passes since `start`, those over a prompt included."""

    @property
    def weights(self) -> str:
        """The type of its matrices, such as "Q8_0"."""
        name = self._api.llama_ftype_name(self._api.llama_model_ftype(self._model)).decode()
        return str(name.split(" - ")[0]).removeprefix("all ")

    @property
    def bytes(self) -> int:
        """Size of its weights."""
        return int(self._api.llama_model_size(self._model))

    def start(self, room: int) -> None:
        """Clears the KV cache; `room` is the most tokens of a text from now on."""
        api, count = self._api, self._settings["batch"]
        if room > self._room:
            if self._context is not None:
                api.llama_free(self._context)
            self._room = -(-room // SLOTS) * SLOTS
            self._context = self._new_context(self._room)
            self._memory = api.llama_get_memory(self._context)
            self._views.clear()
        api.llama_memory_clear(self._memory, False)
        self._lengths = [0] * count
        self.passes = 0

    def read(self, rows: list[GrowingAnswer], wanted: list[int]) -> list[list[int]]:
        """Reads the tokens of some texts that are not in the KV cache yet, in one pass.

        Args:
            wanted: for each row, the number of tokens at its end whose next token is returned.

        Returns:
            For each row the best next token after each of these.
        """
        entries = []
        for index, (row, count) in enumerate(zip(rows, wanted, strict=True)):
            known, end = self._lengths[row.sequence], len(row.text)
            entries += [(row.text[i], i, row.sequence, index if i >= end - count else -1) for i in range(known, end)]
            self._lengths[row.sequence] = end
        best: list[list[int]] = [[] for _ in rows]
        for start in range(0, len(entries), N_BATCH):
            piece = entries[start : start + N_BATCH]
            indices = [index for _, _, _, index in piece if index >= 0]
            for index, token in zip(indices, self._decode(piece), strict=True):
                best[index].append(token)
        self.passes += 1
        return best

    def cut(self, row: GrowingAnswer, length: int) -> None:
        """Removes the tokens after the first `length` from the KV cache of a text."""
        if self._lengths[row.sequence] > length:
            if not self._api.llama_memory_seq_rm(self._memory, row.sequence, length, -1):
                raise RuntimeError("llama.cpp cannot go back in the cache of this model")
            self._lengths[row.sequence] = length

    def _decode(self, entries: list[tuple[int, int, int, int]]) -> list[int]:
        """Best next tokens of those entries (token, position, sequence, row) that have a row."""
        tokens, positions, logits = self._fields
        wanted = 0
        for i, (token, position, sequence, row) in enumerate(entries):
            tokens[i], positions[i], self._sequences[i][0] = token, position, sequence
            logits[i] = is_wanted = row >= 0
            wanted += is_wanted
        self._batch.n_tokens = len(entries)
        if (code := self._api.llama_decode(self._context, self._batch)) != 0:
            raise RuntimeError(f"llama_decode returned {code}{self._log.last}")
        if not wanted:
            return []
        scores = self._logits(wanted)
        if self._settings["forbidden"]:
            scores[:, self._settings["forbidden"]] = float("-inf")
        best: list[int] = scores.argmax(axis=1).tolist()
        return best

    def _logits(self, count: int) -> Any:
        """The logits of the last call, a view of llama.cpp's own memory."""
        import numpy

        address = ctypes.addressof(self._api.llama_get_logits(self._context).contents)
        if (address, count) not in self._views:
            buffer = (ctypes.c_float * (count * self._rows)).from_address(address)
            view = numpy.ctypeslib.as_array(buffer).reshape(count, self._rows)
            self._views[address, count] = view[:, : self._settings["tokens"]]
        return self._views[address, count]

    def _new_context(self, room: int) -> Any:
        api, settings = self._api, self._settings
        parameters = api.llama_context_default_params()
        parameters.n_ctx = room * settings["batch"]
        parameters.n_batch = N_BATCH
        parameters.n_seq_max = settings["batch"]
        # By default it allocates the logits of a whole batch of tokens.
        parameters.n_outputs_max = self._wanted * settings["batch"]
        parameters.n_threads = parameters.n_threads_batch = settings["threads"]
        if settings["exact"]:
            # Its flash attention rounds to float16 with any cache: logits of tiny models are then off by 0.03.
            parameters.type_k = parameters.type_v = api.GGML_TYPE_F32
            parameters.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context = api.llama_init_from_model(self._model, parameters)
        if not context:
            raise RuntimeError(f"llama.cpp makes no context of {parameters.n_ctx} tokens{self._log.last}")
        return context

    def _round(self, files: dict[str, Any]) -> None:
        api, new = self._api, f"{files['file']}.{os.getpid()}.new"
        parameters = api.llama_model_quantize_default_params()
        parameters.nthread = self._settings["threads"]
        parameters.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{files['type']}")
        try:
            if api.llama_model_quantize(files["source"].encode(), new.encode(), ctypes.byref(parameters)) != 0:
                raise OSError(f"{files['source']} cannot be rounded to {files['type']}{self._log.last}")
            os.replace(new, files["file"])
        finally:
            if os.path.exists(new):
                os.unlink(new)


class LlamaCppWorker:
    """A loaded target, and a draft model if there is one.

    Args:
        settings: `target` and `draft` (or null), see `Model`, which has the other settings too, and `k`: tokens drafted
            per round.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp

        log = Log(llama_cpp)
        llama_cpp.llama_backend_init()
        self._k = settings["k"] if settings["draft"] is not None else 0
        self._target = Model(settings["target"], settings, wanted=self._k + 1, api=llama_cpp, log=log)
        self._models = {"target": self._target}
        if settings["draft"] is not None:
            self._models["draft"] = Model(settings["draft"], settings, wanted=1, api=llama_cpp, log=log)
        self.description = {
            "llama_cpp": f"{llama_cpp.llama_version().decode()}, llama-cpp-python {llama_cpp.__version__}",
            "weights": {part: model.weights for part, model in self._models.items()},
            "weight_bytes": {part: model.bytes for part, model in self._models.items()},
            "cache": "F32" if settings["exact"] else "F16",
            "cpu": llama_cpp.llama_print_system_info().decode().strip(" |"),
        }

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers a batch, greedily.

        Args:
            request: `prompts` (rows of token ids), `max_new_tokens`, `eos_ids`, which end an answer, and `drawn`: null,
                or the `rates` and for each row the `numbers` by which drafts are accepted, one for each token of an
                answer, whatever the target predicts.

        Returns:
            `tokens` of each answer, `total_s`, for each answer and round `accepted`, `drafted` and `delivered_s`,
            `passes` of each model, and `peak_rss_bytes` of this process.
        """
        limit, eos_ids, drawn = request["max_new_tokens"], frozenset(request["eos_ids"]), request["drawn"]
        for model in self._models.values():
            model.start(max(map(len, request["prompts"])) + limit)
        rows = [GrowingAnswer(sequence, prompt, limit) for sequence, prompt in enumerate(request["prompts"])]
        left, began_s = list(rows), time.perf_counter()
        while left:
            drafts = self._drafted(left)
            best = self._target.read(left, [len(draft) + 1 for draft in drafts])
            now_s = time.perf_counter() - began_s
            for row, draft, tokens in zip(left, drafts, best, strict=True):
                accepted = as_drafted(draft, tokens)
                if drawn is not None:
                    accepted = as_drawn(drawn, row.sequence, len(row.text) - len(draft) - row.begin, len(draft))
                new = [*draft[:accepted], tokens[accepted]]
                row.advance(new, drafted=len(draft), accepted=accepted, eos_ids=eos_ids, now_s=now_s)
                for model in self._models.values():
                    model.cut(row, len(row.text) - 1)  # the last token is read in the next round
            left = [row for row in left if not row.is_done]
        total_s = time.perf_counter() - began_s
        return {
            "tokens": [row.answer for row in rows],
            "total_s": total_s,
            "accepted": [row.accepted for row in rows],
            "drafted": [row.drafted for row in rows],
            "delivered_s": [row.delivered_s for row in rows],
            "passes": {part: model.passes for part, model in self._models.items()},
            "peak_rss_bytes": peak_rss_bytes(),
        }

    def _drafted(self, rows: list[GrowingAnswer]) -> list[list[int]]:
        """Appends a draft to the text of each row, the likeliest tokens in a chain, and returns it."""
        drafts: list[list[int]] = [[] for _ in rows]
        # The target adds its own token.
        depths = [min(self._k, row.end - len(row.text) - 1) for row in rows]
        for step in range(max(depths)):
            growing = [index for index, depth in enumerate(depths) if depth > step]
            best = self._models["draft"].read([rows[index] for index in growing], [1] * len(growing))
            for index, (token,) in zip(growing, best, strict=True):
                drafts[index].append(token)
                rows[index].text.append(token)
        return drafts


def peak_rss_bytes() -> int:
    """Most resident memory of this process; on Linux `getrusage` starts with that of the parent."""
    with suppress(OSError), open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def as_drafted(draft: list[int], tokens: list[int]) -> int:
    """Length of the longest prefix of a draft that the target predicts."""
    return next((i for i, token in enumerate(draft) if token != tokens[i]), len(draft))


def as_drawn(drawn: dict[str, Any], row: int, position: int, depth: int) -> int:
    """Number of drafted tokens that are accepted by rates, which never rise.

    >>> as_drawn({"rates": [0.9, 0.5, 0.1], "numbers": [[0.95, 0.3]]}, row=0, position=1, depth=3)
    2
    """
    return sum(drawn["numbers"][row][position] < rate for rate in drawn["rates"][:depth])


class Log:
    """The log of llama.cpp: errors go to standard error, and the last one is kept."""

    def __init__(self, api: Any) -> None:
        self.last = ""
        """The last error, as the end of a sentence."""
        # Kept, because llama.cpp has only a pointer to it.
        self._callback = api.llama_log_callback(self._hear)
        api.llama_log_set(self._callback, None)

    def _hear(self, level: int, text: bytes, _: object) -> None:
        if level == ERROR:
            error = text.decode(errors="replace").strip()
            self.last = f": {error}" if error else ""
            print(error, file=sys.stderr)


def main() -> None:
    """Entry point: answers until the input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not mix with the replies

    def send(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    try:
        worker = LlamaCppWorker(json.loads(sys.stdin.readline()))
        send(worker.description)
        for line in sys.stdin:
            send(worker.answer(json.loads(line)))
    except Exception as error:  # every error must reach the other process
        send({"error": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
