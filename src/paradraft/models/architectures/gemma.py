"""Gemma 3: norms before and after attention and MLP, windows with another rotary embedding, scaled embeddings."""

from __future__ import annotations

from paradraft.models.architectures import DecoderSpec

SPECS = {
    "gemma3_text": DecoderSpec(
        activation="hidden_activation",
        softcap="final_logit_softcapping",
        norm_offset=1.0,
        norms=4,
        has_rope_by_type=True,
    )
}
