"""Answers prompts with llama.cpp, for a benchmark: run by the Python of llama.cpp's own environment.

It speaks JSON, one object a line. The first line it reads says what to load, see `Worker`; it answers what is said in
`Worker.told`. Each further line is a request, see `Worker.answer`. What goes wrong is answered with
`{"error": sentence}`, and ends it, as the end of its input does. It imports nothing but the standard library, NumPy
and llama-cpp-python: this library is not installed there.

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
"""Most tokens of one call of `llama_decode`, as llama.cpp has it by default."""
SLOTS = 256
"""llama.cpp rounds its cache up to multiples of it."""
ERROR = 4
"""The level of an error in llama.cpp's log."""


class Row:
    """An answer while it grows.

    Args:
        number: of its sequence in the caches.
        prompt: token ids.
        limit: most tokens of the answer.
    """

    def __init__(self, number: int, prompt: list[int], limit: int) -> None:
        self.number = number
        self.text = list(prompt)
        """Prompt, answer, and while a round lasts its draft."""
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
        """Ends a round: its tokens take the place of the draft. What comes after the end of the answer is cut, and is
        not counted."""
        end = next((i for i, token in enumerate(new, start=1) if token in eos_ids), len(new))
        self.text[len(self.text) - drafted :] = new[:end]
        self.is_done = self.text[-1] in eos_ids or len(self.text) == self.end
        self.accepted.append(min(accepted, end))
        self.drafted.append(drafted)
        self.delivered_s.append(now_s)


class Model:
    """A model of llama.cpp with its cache.

    Args:
        given: `file` (GGUF); where it is not there yet, `source` is rounded to `type` and kept as this file.
        settings: `threads`, `tokens` (ids from here on are never chosen), `forbidden` (nor are these), `batch`
            (sequences), `exact` (attention in float32; else as llama.cpp has it by default, with a cache in float16).
        wanted: most tokens of a sequence whose logits one pass wants.
        api: the module `llama_cpp`.
        log: its log.
    """

    def __init__(self, given: dict[str, Any], settings: dict[str, Any], *, wanted: int, api: Any, log: Log) -> None:
        self._api = api
        self._log = log
        self._settings = settings
        self._wanted = wanted
        if not os.path.exists(given["file"]):
            self._round(given)
        chosen = api.llama_model_default_params()
        chosen.n_gpu_layers = 0
        self._model = api.llama_model_load_from_file(given["file"].encode(), chosen)
        if not self._model:
            raise OSError(f"{given['file']} cannot be loaded{self._log.last}")
        rows = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        if rows < settings["tokens"]:
            raise ValueError(f"{given['file']} knows {rows} tokens, and {settings['tokens']} are asked for")
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
        """Since `start`, those over a prompt included."""

    @property
    def weights(self) -> str:
        """What the numbers of its matrices are, such as "Q8_0"."""
        name = self._api.llama_ftype_name(self._api.llama_model_ftype(self._model)).decode()
        return str(name.split(" - ")[0]).removeprefix("all ")

    @property
    def bytes(self) -> int:
        """What its weights take."""
        return int(self._api.llama_model_size(self._model))

    def start(self, room: int) -> None:
        """Forgets all texts.

        Args:
            room: most tokens of a text from now on.
        """
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

    def read(self, rows: list[Row], wanted: list[int]) -> list[list[int]]:
        """Reads what it does not know yet of some texts, in one pass.

        Args:
            rows: whose texts.
            wanted: for each of them, how many tokens from its end.

        Returns:
            For each row the best next token after each of these.
        """
        entries = []
        for place, (row, count) in enumerate(zip(rows, wanted, strict=True)):
            known, end = self._lengths[row.number], len(row.text)
            entries += [(row.text[i], i, row.number, place if i >= end - count else -1) for i in range(known, end)]
            self._lengths[row.number] = end
        best: list[list[int]] = [[] for _ in rows]
        for start in range(0, len(entries), N_BATCH):
            piece = entries[start : start + N_BATCH]
            places = [place for _, _, _, place in piece if place >= 0]
            for place, token in zip(places, self._decode(piece), strict=True):
                best[place].append(token)
        self.passes += 1
        return best

    def cut(self, row: Row, length: int) -> None:
        """Forgets what comes after so many tokens of a text."""
        if self._lengths[row.number] > length:
            if not self._api.llama_memory_seq_rm(self._memory, row.number, length, -1):
                raise RuntimeError("llama.cpp cannot go back in the cache of this model")
            self._lengths[row.number] = length

    def _decode(self, entries: list[tuple[int, int, int, int]]) -> list[int]:
        """Best next tokens of those entries (token, position, sequence, place) that have a place."""
        tokens, positions, logits = self._fields
        wanted = 0
        for i, (token, position, number, place) in enumerate(entries):
            tokens[i], positions[i], self._sequences[i][0] = token, position, number
            logits[i] = is_wanted = place >= 0
            wanted += is_wanted
        self._batch.n_tokens = len(entries)
        if (code := self._api.llama_decode(self._context, self._batch)) != 0:
            raise RuntimeError(f"llama_decode returned {code}{self._log.last}")
        if not wanted:
            return []
        scores = self._logits(wanted)
        if self._settings["forbidden"]:
            scores[:, self._settings["forbidden"]] = float("-inf")
        found: list[int] = scores.argmax(axis=1).tolist()
        return found

    def _logits(self, count: int) -> Any:
        """The logits of the last call, a view of llama.cpp's own memory."""
        import numpy

        address = ctypes.addressof(self._api.llama_get_logits(self._context).contents)
        if (address, count) not in self._views:
            there = (ctypes.c_float * (count * self._rows)).from_address(address)
            view = numpy.ctypeslib.as_array(there).reshape(count, self._rows)
            self._views[address, count] = view[:, : self._settings["tokens"]]
        return self._views[address, count]

    def _new_context(self, room: int) -> Any:
        api, settings = self._api, self._settings
        chosen = api.llama_context_default_params()
        chosen.n_ctx = room * settings["batch"]
        chosen.n_batch = N_BATCH
        chosen.n_seq_max = settings["batch"]
        # By default it makes room for the logits of a whole batch of tokens.
        chosen.n_outputs_max = self._wanted * settings["batch"]
        chosen.n_threads = chosen.n_threads_batch = settings["threads"]
        if settings["exact"]:
            # Its flash attention rounds to float16 with any cache: logits of tiny models are then off by 0.03.
            chosen.type_k = chosen.type_v = api.GGML_TYPE_F32
            chosen.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context = api.llama_init_from_model(self._model, chosen)
        if not context:
            raise RuntimeError(f"llama.cpp makes no context of {chosen.n_ctx} tokens{self._log.last}")
        return context

    def _round(self, given: dict[str, Any]) -> None:
        api, new = self._api, f"{given['file']}.{os.getpid()}.new"
        chosen = api.llama_model_quantize_default_params()
        chosen.nthread = self._settings["threads"]
        chosen.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{given['type']}")
        try:
            if api.llama_model_quantize(given["source"].encode(), new.encode(), ctypes.byref(chosen)) != 0:
                raise OSError(f"{given['source']} cannot be rounded to {given['type']}{self._log.last}")
            os.replace(new, given["file"])
        finally:
            if os.path.exists(new):
                os.unlink(new)


class Worker:
    """A loaded target, and a draft model if there is one.

    Args:
        given: `target` and `draft` (or null), see `Model`, which has the other settings too, and `k`: tokens drafted
            in a round.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        import llama_cpp

        log = Log(llama_cpp)
        llama_cpp.llama_backend_init()
        self._k = given["k"] if given["draft"] is not None else 0
        self._target = Model(given["target"], given, wanted=self._k + 1, api=llama_cpp, log=log)
        self._models = {"target": self._target}
        if given["draft"] is not None:
            self._models["draft"] = Model(given["draft"], given, wanted=1, api=llama_cpp, log=log)
        self.told = {
            "llama_cpp": f"{llama_cpp.llama_version().decode()}, llama-cpp-python {llama_cpp.__version__}",
            "weights": {part: model.weights for part, model in self._models.items()},
            "weight_bytes": {part: model.bytes for part, model in self._models.items()},
            "cache": "F32" if given["exact"] else "F16",
            "cpu": llama_cpp.llama_print_system_info().decode().strip(" |"),
        }

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers a batch, greedily.

        Args:
            request: `prompts` (rows of token ids), `max_new_tokens`, `eos_ids`, which end an answer, and `drawn`: null,
                or the `rates` and for each row the `numbers` by which drafts are accepted, one for each token of an
                answer, whatever the target says.

        Returns:
            `tokens` of each answer, `total_s`, for each answer and round `accepted`, `drafted` and `delivered_s`,
            `passes` of each model, and `peak_rss_bytes` of this process.
        """
        limit, eos_ids, drawn = request["max_new_tokens"], frozenset(request["eos_ids"]), request["drawn"]
        for model in self._models.values():
            model.start(max(map(len, request["prompts"])) + limit)
        rows = [Row(number, prompt, limit) for number, prompt in enumerate(request["prompts"])]
        left, began_s = list(rows), time.perf_counter()
        while left:
            drafts = self._drafted(left)
            best = self._target.read(left, [len(draft) + 1 for draft in drafts])
            now_s = time.perf_counter() - began_s
            for row, draft, tokens in zip(left, drafts, best, strict=True):
                same = as_drafted(draft, tokens)
                if drawn is not None:
                    same = as_drawn(drawn, row.number, len(row.text) - len(draft) - row.begin, len(draft))
                new = [*draft[:same], tokens[same]]
                row.advance(new, drafted=len(draft), accepted=same, eos_ids=eos_ids, now_s=now_s)
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

    def _drafted(self, rows: list[Row]) -> list[list[int]]:
        """Appends a draft to the text of each row, the likeliest tokens one after the other, and returns it."""
        drafts: list[list[int]] = [[] for _ in rows]
        # The target adds a token of its own.
        depths = [min(self._k, row.end - len(row.text) - 1) for row in rows]
        for step in range(max(depths)):
            growing = [place for place, depth in enumerate(depths) if depth > step]
            best = self._models["draft"].read([rows[place] for place in growing], [1] * len(growing))
            for place, (token,) in zip(growing, best, strict=True):
                drafts[place].append(token)
                rows[place].text.append(token)
        return drafts


def peak_rss_bytes() -> int:
    """Most resident memory of this process. What `getrusage` says begins, on Linux, with that of the parent."""
    with suppress(OSError), open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def as_drafted(draft: list[int], tokens: list[int]) -> int:
    """How many drafted tokens are those that the target would say."""
    return next((i for i, token in enumerate(draft) if token != tokens[i]), len(draft))


def as_drawn(drawn: dict[str, Any], number: int, place: int, depth: int) -> int:
    """How many drafted tokens are accepted by rates, which never rise.

    >>> as_drawn({"rates": [0.9, 0.5, 0.1], "numbers": [[0.95, 0.3]]}, number=0, place=1, depth=3)
    2
    """
    return sum(drawn["numbers"][number][place] < rate for rate in drawn["rates"][:depth])


class Log:
    """What llama.cpp says: errors go to the standard error, and the last one is kept.

    Args:
        api: the module `llama_cpp`.
    """

    def __init__(self, api: Any) -> None:
        self._last = ""
        # Kept, because llama.cpp has nothing but a pointer to it.
        self._callback = api.llama_log_callback(self._hear)
        api.llama_log_set(self._callback, None)

    @property
    def last(self) -> str:
        """The last error, to be put after a sentence."""
        return f": {self._last}" if self._last else ""

    def _hear(self, level: int, text: bytes, _: object) -> None:
        if level == ERROR:
            self._last = text.decode(errors="replace").strip()
            print(self._last, file=sys.stderr)


def main() -> None:
    """Entry point: answers until the input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not stand between the replies

    def say(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    try:
        worker = Worker(json.loads(sys.stdin.readline()))
        say(worker.told)
        for line in sys.stdin:
            say(worker.answer(json.loads(line)))
    except Exception as error:  # whatever happens, the other side must hear of it
        say({"error": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
