"""Answers prompts with vLLM, for a benchmark: run by the Python of vLLM's own environment.

It exchanges JSON, one object per line. The first line it reads has the settings, see `VllmWorker`; the reply is
`{"vllm": version}`. Each further line is a request, see `VllmWorker.answer`. An error is answered with
`{"error": sentence}`, and ends the process, as the end of its input does. It imports nothing but the standard library
and vLLM: this library is not installed there.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from contextlib import suppress
from typing import Any

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "KMP_BLOCKTIME": "5",
}
"""Environment variables, unless the user has set them: one process, 1 GiB of KV cache, no log, no telemetry, and
threads that sleep 5 ms after their work, as vLLM sets it for its worker processes."""
COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted",
}


class VllmWorker:
    """A loaded vLLM.

    Args:
        settings: `model` (folder or id), `dtype`, `capacity` (most tokens of prompt and answer), `batch`
            (prompts answered together), `compiled`, and `speculative` (vLLM's `speculative_config`, or null).
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        import vllm

        self.version = vllm.__version__
        self._drafts = settings["speculative"] is not None
        self._llm = vllm.LLM(
            model=settings["model"],
            dtype=settings["dtype"],
            max_model_len=settings["capacity"],
            max_num_seqs=settings["batch"],
            speculative_config=settings["speculative"],
            enforce_eager=not settings["compiled"],
            # Otherwise a prompt of an earlier run would not be read again.
            enable_prefix_caching=False,
            generation_config="vllm",
            disable_log_stats=not self._drafts,
        )
        self._loggers = self._llm.llm_engine.logger_manager
        self._switch_counters(on=False)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers a batch, greedily.

        Args:
            request: `prompts` (rows of token ids), `max_new_tokens`, `eos_ids`, which end an answer, and
                `count`: whether to answer once more, untimed, with the counters of drafts on.

        Returns:
            `tokens` of each answer, `total_s`, `peak_rss_bytes` of this process, and if it counts
            `drafts` (a list with their number) and `accepted` (tokens, by position) of this batch.
        """
        import vllm

        sampling = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=request["max_new_tokens"],
            ignore_eos=True,
            stop_token_ids=request["eos_ids"],
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": row} for row in request["prompts"]]
        began_s = time.perf_counter()
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        total_s = time.perf_counter() - began_s
        reply = {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "total_s": total_s,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if request["count"]:
            self._switch_counters(on=True)
            before = self._counters()
            self._llm.generate(prompts, sampling, use_tqdm=False)
            after = self._counters()
            self._switch_counters(on=False)
            reply |= {key: [now - then for now, then in zip(after[key], before[key], strict=True)] for key in after}
        return reply

    def _switch_counters(self, *, on: bool) -> None:
        """Counting takes time in every step, so it is off while the clock runs."""
        engine = self._llm.llm_engine
        engine.logger_manager = self._loggers if on else None
        with suppress(AttributeError):  # of vLLM 0.32; another version may not stop counting
            parts = (engine, engine.output_processor, engine.engine_core.engine_core.scheduler)
            for part in parts if self._drafts else ():
                part.log_stats = on

    def _counters(self) -> dict[str, list[int]]:
        """Since the start, by name."""
        metrics = {COUNTERS[metric.name]: metric for metric in self._llm.get_metrics() if metric.name in COUNTERS}
        return {"drafts": [metrics["drafts"].value], "accepted": list(metrics["accepted"].values)}


def main() -> None:
    """Entry point: answers until the input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM writes its log to standard output, where the replies go
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)

    def send(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    try:
        worker = VllmWorker(json.loads(sys.stdin.readline()))
        send({"vllm": worker.version})
        for line in sys.stdin:
            send(worker.answer(json.loads(line)))
    except Exception as error:  # every error must reach the other process
        send({"error": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
