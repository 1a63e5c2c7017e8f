"""The shipped drafters as other engines read them: whatever is likeliest is drafted, and nothing is forbidden."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import paradraft
from paradraft.models.runtime import Runtime
from paradraft.sources.loading import load_model, load_tokenizer, locate

POCKET = Path(paradraft.__file__).parent / "pocket"
K = 8


def prompts() -> list[str]:
    return [json.loads(line)["prompt"] for line in (POCKET / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]


@cache
def plain_tokens() -> list[list[int]]:
    """The answers of plain decoding to the first prompts."""
    return [answer.tokens for answer in paradraft.load("pocket").generate(prompts()[:8], max_new_tokens=64)]


def drafts_of(model: PreTrainedModel, prompt: list[int], masks: list[int]) -> list[Tensor]:
    """The likeliest tokens after every 16th position of a prompt, and at the masks there.

    One pass reads the prompt once and all masks after it: those of a position see the prompt so far and each other.
    """
    lengths = range(len(prompt), 8, -16)
    tokens = torch.tensor([prompt + masks * len(lengths)])
    ends = torch.tensor([len(prompt)] * len(prompt) + [length for length in lengths for _ in masks])
    positions = torch.tensor([*range(len(prompt)), *(length + i for length in lengths for i in range(len(masks)))])
    is_prompt = torch.arange(len(ends)) < len(prompt)
    sees = (positions[:, None] >= positions) & torch.where(is_prompt, positions < ends[:, None], ends[:, None] == ends)
    drafted = model(tokens, attention_mask=sees[None, None], position_ids=positions[None]).logits[0].argmax(-1)
    groups = drafted[len(prompt) :].view(len(lengths), len(masks))
    return [torch.cat([drafted[n - 1 : n], group]) for n, group in zip(lengths, groups, strict=True)]


@pytest.mark.slow  # weights change less often than code
@torch.no_grad()
@pytest.mark.parametrize("drafter", ["draft", "pard"])
def test_engines_draft_tokens_of_the_text(drafter: str) -> None:
    """Guards the drafters in vLLM, which does not know that some rows of the embedding are no tokens: a draft with one
    is wrong from there on."""
    folder = locate("pocket", drafter)
    model, tokenizer = load_model(folder, Runtime(dtype="float32")), load_tokenizer(folder)
    masks = [model.config.pard_token] * (K - 1) if drafter == "pard" else []
    texts = [tokenizer(prompt)["input_ids"] for prompt in prompts()]
    drafts = [draft for text in texts for draft in drafts_of(model, text, masks)]
    assert len(drafts) > 500
    drafted = torch.stack(drafts)
    no_tokens = (drafted > max(tokenizer.get_vocab().values())).float().mean(0)
    assert no_tokens.max() < 0.005, no_tokens


@pytest.mark.parametrize(("drafter", "least"), [("pard", 4.5), ("eagle_parallel", 2.7), ("ppd:size=24", 1.4)])
def test_shipped_drafters_work_at_once(drafter: str, least: float) -> None:
    """Guards weights that were stored for another target, or another version of the code: they would draft, and hardly
    be accepted."""
    engine = paradraft.load("pocket", drafter=drafter, k=8, lengths="fixed")
    answers = engine.generate(prompts()[:8], max_new_tokens=64)
    assert [answer.tokens for answer in answers] == plain_tokens()
    rounds = sum(answer.stats.rounds for answer in answers)
    assert sum(len(answer.tokens) for answer in answers) / rounds > least
