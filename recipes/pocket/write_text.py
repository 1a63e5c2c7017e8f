"""Lets the target write the text that the drafts learn from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from paradraft.core import Request
from paradraft.decode.batch import Batch, run
from paradraft.decode.generation import Generation
from paradraft.decode.lengths.draft_length import Fixed
from paradraft.drafters.none import NoDrafter
from paradraft.models.target import Target
from paradraft.sampling_params import Sampling

PROMPT_TOKENS = 64
ANSWER_TOKENS = 256
BATCH = 64


def write_text(
    target: Target, stream: torch.Tensor, file: Path, *, texts: int, temperatures: tuple[float, ...], seed: int
) -> torch.Tensor:
    """Samples continuations of random windows of the training text, with our own batched decoding.

    Batches that a stopped run has finished are found in `file` and not written again.

    Args:
        target: loaded with room for a prompt and its answer.
        stream: `[n]` token ids that prompts are cut from.
        file: where the `[n, PROMPT_TOKENS + ANSWER_TOKENS]` token ids go.
        texts: how many texts.
        temperatures: of the sampling; the texts of a batch take them in turn.
        seed: of prompts and sampling.

    Returns:
        The token ids.
    """
    batches: list[torch.Tensor] = list(torch.load(file).split(BATCH)) if file.exists() else []
    while len(batches) * BATCH < texts:
        first = len(batches) * BATCH
        sampling = tuple(
            Sampling(temperature=temperatures[row % len(temperatures)], seed=seed + row)
            for row in range(first, first + BATCH)
        )
        generator = torch.Generator().manual_seed(seed + first)
        starts = torch.randint(len(stream) - PROMPT_TOKENS, (BATCH,), generator=generator).tolist()
        prompts = torch.stack([stream[start : start + PROMPT_TOKENS] for start in starts])
        requests = [
            Request(id=row, tokens=tokens, sampling=chosen, max_new_tokens=ANSWER_TOKENS)
            for row, (tokens, chosen) in enumerate(zip(prompts.tolist(), sampling, strict=True))
        ]
        generations = list(map(Generation, requests))
        for _ in run(Batch(target, NoDrafter(), lengths=Fixed(0)), generations):
            pass
        answers = torch.tensor([generation.tokens for generation in generations])
        batches.append(torch.cat([prompts, answers], dim=1))
        torch.save(torch.cat(batches), file.with_suffix(".new"))
        os.replace(file.with_suffix(".new"), file)
        print(f"text: {len(batches) * BATCH}/{texts} written", flush=True)
    return torch.cat(batches)[:texts]


def save_jsonl(tokens: torch.Tensor, tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Writes texts as `{"prompt", "response", "finish_reason"}` lines; all were cut by length."""
    with file.open("w", encoding="utf-8") as lines:
        for row in tokens:
            record = {
                "prompt": tokenizer.decode(row[:PROMPT_TOKENS]),
                "response": tokenizer.decode(row[PROMPT_TOKENS:]),
                "finish_reason": "length",
            }
            lines.write(json.dumps(record, ensure_ascii=False) + "\n")
