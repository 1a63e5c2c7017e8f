"""Names of methods for readers: their kind, and the settings that their specs name."""

from __future__ import annotations

from typing import Any

from paradraft.drafters import split_settings
from paradraft.verify import LOSSY, rule_name

LABELS = {
    "hf": "AR", "ar": "AR+", "autoregressive": "VSD", "pard": "PARD", "ngram": "n-gram",
    "hf-assisted": "assisted", "hf-prompt-lookup": "lookup",
    "vllm": "vLLM", "vllm-draft": "vLLM VSD", "vllm-pard": "vLLM PARD", "vllm-ngram": "vLLM n-gram",
}  # fmt: skip
_EVIDENT = ("dtype=", "draft=", "verify=", "lengths=", "target_stages=")
"""Settings whose value says what it is."""
_CPUS = ("target_cpus=", "draft_cpus=")


def label(spec: str, figures: dict[str, Any]) -> str:
    """A method's name for readers: its kind, and the settings that its spec names."""
    name = LABELS.get(figures["method"], figures["method"])
    if figures.get("gamma"):
        name = "PEARL" if figures["method"] == "autoregressive" else f"PEARL + {name}"
    _, settings = split_settings(spec)
    for key in _EVIDENT:
        settings = [setting.removeprefix(key) for setting in settings]
    cpus = [setting for setting in settings if setting.startswith(_CPUS)]
    if cpus:
        settings = [setting for setting in settings if setting not in cpus]
        settings.append("CPUs " + " and ".join(setting.partition("=")[2] for setting in sorted(cpus, reverse=True)))
    is_lossy = rule_name(figures.get("verify") or "match") in LOSSY
    return ", ".join([name, *settings, *["not lossless"] * is_lossy])
