"""Phi 3."""

from __future__ import annotations

from paradraft.models.architectures import DecoderSpec

SPECS = {"phi3": DecoderSpec(is_fused=True)}
