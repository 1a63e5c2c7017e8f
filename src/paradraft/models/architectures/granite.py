"""Granite: Llama with multipliers of embeddings, attention, residuals and logits."""

from __future__ import annotations

from paradraft.models.architectures import DecoderSpec

SPECS = {"granite": DecoderSpec(logits_scale="logits_scaling")}
