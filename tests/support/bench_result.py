"""A benchmark's result, as `paradraft bench --json` writes it, without running one."""

from __future__ import annotations

from typing import Any


def figures(method: str, **given: Any) -> dict[str, Any]:
    """The figures of one method: of ours, unless told otherwise."""
    shown = {
        "method": method, "k": 4, "tree": None, "verify": "match", "lengths": "fixed", "batch": 1, "dtype": "float32",
        "draft": None, "confidence": None, "tokens_per_s": {"median": 123.4, "runs": [120.5, 123.4, 131.25]},
        "speedup_vs_hf": 2.0, "speedup_vs_ar": 1.5, "speedup_vs_fastest_ar": 1.25, "baseline": "ar",
        "fastest_baseline": "ar", "acceptance_length": 2.345, "acceptance_length_first_32": 1.875,
        "acceptance_per_position": [0.9, 0.625], "accepted_share_of_rounds": [0.75, 0.512345],
        "prefill_s": 0.5, "draft_s": 1.0, "verify_s": 2.0, "other_s": 0.5, "total_s": 4.0, "identical_to_ar": True,
        "differing_prompts": [], "distinct_4grams": 0.25, "tokens": 512, "peak_rss_bytes": 3 * 2**28,
    }  # fmt: skip
    return {**shown, **given}


UNTOLD = dict.fromkeys(("prefill_s", "draft_s", "verify_s", "other_s"))
"""What peers do not tell."""
LENGTHS = (
    "acceptance_length", "acceptance_length_first_32", "acceptance_per_position", "accepted_share_of_rounds",
)  # fmt: skip
PLAIN = UNTOLD | dict.fromkeys(LENGTHS)


def ahead() -> dict[str, Any]:
    """A result with a method that drafts ahead too."""
    given = result()
    sides = {
        "forwards": {"target": 3, "draft": 6}, "busy": {"target": 0.625, "draft": 0.8125},
        "median_ms": {"round": 2.5, "target": 1.5, "draft": 2.0, "transport": 0.1, "rest": 0.5},
    }  # fmt: skip
    given["methods"]["pard:gamma=4"] = figures("pard", gamma=4, sides=sides)
    given["timeline"] = {
        "pard:gamma=4": [["target", 0.0, 1.5], ["draft", 0.1, 2.0], ["target", 2.5, 4.0], ["draft", 2.6, 4.6]]
    }
    return given


def result(**given: Any) -> dict[str, Any]:
    """A result of four methods."""
    shown = {
        "machine": {
            "date": "2026-11-21T12:00:00+00:00", "cpu": "A <fast> CPU & more", "cpu_capability": "AVX2", "cores": 2,
            "threads": 2, "memory_bytes": 2**34, "gpu": None, "system": "Linux", "python": "3.11.7",
            "versions": {"paradraft": "0.1.0", "torch": "2.13.0"}, "load_average": 0.25,
            "command": ["python", "paradraft", "bench", "--methods", "hf,ar", "--prompts", "my prompts.jsonl"],
        },
        "arguments": {
            "target": "pocket", "num_prompts": 2, "max_new_tokens": 64, "runs": 3, "sampling": {"temperature": 0.0},
        },
        "methods": {
            "hf": figures("hf", **PLAIN),
            "ar": figures("ar", acceptance_length=1.0, acceptance_per_position=[], accepted_share_of_rounds=[]),
            "pard:k=4": figures("pard"),
            "vllm-pard:k=4": figures("vllm-pard", **UNTOLD),
        },
        "answers": {},
        "example": {
            "prompt": "def f():\n",
            "answers": {"ar": [["x", 0], [" =", 0]], "pard:k=4": [["x", 1], [" =\n", 2], [" 1", 0]]},
        },
        "skipped": {},
    }  # fmt: skip
    return {**shown, **given}
