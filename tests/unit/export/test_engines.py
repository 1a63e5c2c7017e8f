"""Lines to paste into engines that serve."""

from __future__ import annotations

import json

import pytest
import yaml

from paradraft.export.engines import lines, tensorrt_config, vllm_config

CHOSEN = {1: 6, 2: 4, 4: 4, 8: 2, 16: 0}


def test_vllm_gets_ranges_without_gaps_from_one() -> None:
    """Guards what vLLM refuses: a first range that does not begin at 1, ranges that overlap, a K above the largest."""
    config = vllm_config(CHOSEN, "pard", "folder")
    assert config == {
        "method": "draft_model", "model": "folder", "parallel_drafting": True, "num_speculative_tokens": 6,
        "num_speculative_tokens_per_batch_size": [[1, 1, 6], [2, 4, 4], [5, 8, 2], [9, 16, 0]],
    }  # fmt: skip
    assert vllm_config({4: 2}, "ngram", "-") == {
        "method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1, "num_speculative_tokens": 2,
        "num_speculative_tokens_per_batch_size": [[1, 4, 2]],
    }  # fmt: skip


def test_tensorrt_gets_largest_batch_sizes() -> None:
    """Guards what TensorRT-LLM refuses: a smallest key without `max_draft_len`, and lengths above it."""
    config = tensorrt_config(CHOSEN, "pard", "folder")
    assert config is not None
    assert (config["max_draft_len"], config["draft_len_schedule"]) == (6, {1: 6, 4: 4, 8: 2, 16: 0})
    capped = tensorrt_config({1: 3, 8: 5, 16: 1}, "autoregressive", "folder")
    assert capped is not None
    assert capped["decoding_type"] == "Draft_Target"
    assert (capped["max_draft_len"], capped["draft_len_schedule"]) == (3, {1: 3, 8: 3, 16: 1})


def test_the_lines_are_json_and_yaml() -> None:
    """Guards lines that cannot be pasted."""
    found = lines(CHOSEN, "pard", "my folder/it")
    option = next(line for line in found if "--speculative-config" in line)
    assert json.loads(option.partition("'")[2][:-1]) == vllm_config(CHOSEN, "pard", "my folder/it")
    part = yaml.safe_load("\n".join(found[found.index("TensorRT-LLM:") + 1 :]))
    assert part == {"speculative_config": tensorrt_config(CHOSEN, "pard", "my folder/it")}


@pytest.mark.parametrize(
    ("chosen", "drafter", "said"),
    [
        ({1: 0, 8: 0}, "pard", "without speculation"),
        ({1: 2}, "hydra", "neither vLLM nor TensorRT-LLM"),
        ({1: 2, 4: 1}, "medusa", "'medusa' whose K changes with the batch size"),
    ],
)
def test_nothing_to_paste_is_said(chosen: dict[int, int], drafter: str, said: str) -> None:
    """Guards against an empty answer, and against a configuration that drafts 0 tokens at every batch size."""
    (line,) = lines(chosen, drafter, "folder")
    assert said in line
