"""A tiny family that can write JSON: its tokens are bytes and parts of texts, and two of them end answers."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.conftest import tiny_model
from tests.support.small_tokenizers import END, byte_level

VOCAB = 268
"""Token ids of the tokenizer; the embedding has eight more rows."""
MASK = VOCAB + 2
ENDS = (263, 267)
"""<|im_end|> and <|eos|>."""
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def write(root: Path) -> None:
    """Writes the folders `target`, and `pard`, which has the target's weights, disturbed, so that some drafts are
    accepted."""
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    assert (len(tokenizer), tokenizer.convert_tokens_to_ids(END)) == (VOCAB, ENDS[0])
    for name in ("target", "pard"):
        model = tiny_model(3, rows=VOCAB + 8)
        model.config.max_position_embeddings = 256
        model.config.eos_token_id = model.generation_config.eos_token_id = list(ENDS)
        if name == "pard":
            model.config.pard_token = model.config.mask_token_id = MASK
            model.config.spd_type = "pard"
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
