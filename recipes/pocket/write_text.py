"""Lets the target write the text that the drafts learn from."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROMPT_TOKENS = 64
ANSWER_TOKENS = 256
BATCH = 128


@torch.inference_mode()
def write_text(
    target: PreTrainedModel, stream: torch.Tensor, file: Path, *, texts: int, temperature: float, seed: int
) -> torch.Tensor:
    """Samples continuations of random windows of the training text, a batch at a time.

    Batches that a stopped run has finished are found in `file` and not written again.

    Args:
        target: in evaluation mode, in the dtype to sample with.
        stream: `[n]` token ids that prompts are cut from.
        file: where the `[n, PROMPT_TOKENS + ANSWER_TOKENS]` token ids go.
        texts: how many texts.
        temperature: of the sampling.
        seed: of prompts and sampling.

    Returns:
        The token ids.
    """
    batches: list[torch.Tensor] = list(torch.load(file).split(BATCH)) if file.exists() else []
    while len(batches) * BATCH < texts:
        generator = torch.Generator().manual_seed(seed + len(batches))
        torch.manual_seed(seed + len(batches))
        starts = torch.randint(len(stream) - PROMPT_TOKENS, (BATCH,), generator=generator).tolist()
        prompts = torch.stack([stream[start : start + PROMPT_TOKENS] for start in starts]).to(target.device)
        answers = target.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=ANSWER_TOKENS,
            min_new_tokens=ANSWER_TOKENS,
        )
        batches.append(answers.cpu())
        torch.save(torch.cat(batches), file)
        print(f"text: {len(batches) * BATCH}/{texts} written", flush=True)
    return torch.cat(batches)


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
