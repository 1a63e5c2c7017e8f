"""Speculative configurations of vLLM and TensorRT-LLM, with a K by batch size.

vLLM: `num_speculative_tokens_per_batch_size`, a list of [first batch size, last batch size, K], from 1 upwards; larger
batches take the last K (its vllm/v1/spec_decode/dynamic). TensorRT-LLM: `draft_len_schedule`, a mapping from the *last*
batch size to K since its pull request 10860; before, from the first, and not for PARD (12262). Its smallest key must
map to `max_draft_len`, and above the largest key nothing is drafted. Both draft chains only.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from paradraft.drafters import drafter_settings, serving_of, takes_draft

VLLM, SGLANG, TENSORRT, TRANSFORMERS, GGUF = ENGINES = ("vllm", "sglang", "tensorrt-llm", "transformers", "gguf")
Ranges = list[tuple[int, int, int]]
"""First batch size, last batch size, K."""


def ranges(chosen: Mapping[int, int]) -> Ranges:
    """Batch sizes merged into ranges; between two measured ones the K of the larger, which drafts no more than pays.

    >>> ranges({1: 6, 2: 4, 4: 4, 16: 0})
    [(1, 1, 6), (2, 4, 4), (5, 16, 0)]
    """
    merged: Ranges = []
    first = 1
    for last in sorted(chosen):
        if merged and merged[-1][2] == chosen[last]:
            merged[-1] = (merged[-1][0], last, chosen[last])
        else:
            merged.append((first, last, chosen[last]))
        first = last + 1
    return merged


def vllm_fixed(k: int, drafter: str, draft: str) -> dict[str, Any] | None:
    """The value of vLLM's `--speculative-config`; None for k = 0 or if vLLM has no such drafter.

    Args:
        k: tokens drafted per round, at every batch size.
        drafter: paradraft's name, with or without settings.
    """
    serving = serving_of(drafter)
    if not k or serving.vllm is None:
        return None
    model = {"model": draft} if takes_draft(drafter) else {}
    settings = {theirs: drafter_settings(drafter)[ours] for theirs, ours in serving.settings.items()}
    return {"method": serving.vllm, **model, **settings, **serving.options, "num_speculative_tokens": k}


def vllm_config(chosen: Mapping[int, int], drafter: str, draft: str) -> dict[str, Any] | None:
    """As `vllm_fixed`, with a K by batch size; None also for drafters with `one_k`."""
    if serving_of(drafter).one_k:
        return None
    fixed = vllm_fixed(max(chosen.values()), drafter, draft)
    by_size = [list(entry) for entry in ranges(chosen)]
    return None if fixed is None else fixed | {"num_speculative_tokens_per_batch_size": by_size}


def tensorrt_fixed(k: int, drafter: str, draft: str) -> dict[str, Any] | None:
    """TensorRT-LLM's `speculative_config`; None for k = 0 or if it has no such drafter. See `vllm_fixed`."""
    kind = serving_of(drafter).tensorrt
    if not k or kind is None:
        return None
    return {"decoding_type": kind, "max_draft_len": k, "speculative_model": draft}


def tensorrt_config(chosen: Mapping[int, int], drafter: str, draft: str) -> dict[str, Any] | None:
    """As `tensorrt_fixed`, with a K by batch size.

    The first K is the largest that TensorRT-LLM allows, so every K is capped at it.
    """
    schedule_ranges = ranges(chosen)
    most = schedule_ranges[0][2]
    fixed = tensorrt_fixed(most, drafter, draft)
    schedule = {last: min(k, most) for _, last, k in schedule_ranges}
    return None if fixed is None else fixed | {"draft_len_schedule": schedule}


def lines(chosen: Mapping[int, int], drafter: str, draft: str) -> list[str]:
    """Lines to paste: an option of `vllm serve` and a part of TensorRT-LLM's YAML file; or the reason for none."""
    if not max(chosen.values()):
        return ["no chain pays at these batch sizes: serve without speculation"]
    text = []
    if (vllm := vllm_config(chosen, drafter, draft)) is not None:
        text += ["vLLM:", f"  --speculative-config {shlex.quote(json.dumps(vllm))}"]
    if (tensorrt := tensorrt_config(chosen, drafter, draft)) is not None:
        schedule = ", ".join(f"{last}: {k}" for last, k in tensorrt.pop("draft_len_schedule").items())
        text += ["TensorRT-LLM:", "  speculative_config:"]
        text += [f"    {key}: {value}" for key, value in tensorrt.items()]
        text.append(f"    draft_len_schedule: {{{schedule}}}")
    return text or [f"neither vLLM nor TensorRT-LLM has a drafter {drafter!r} whose K changes with the batch size"]
