"""Labels of methods in tables and pictures: their kind, and the settings of their specs.

Long paths of folders are shortened as far as they stay different; `full_paths` lists the full ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from paradraft.drafters import split_settings, traits_of
from paradraft.verify import warning_of

LABELS = {
    "hf": "AR", "ar": "AR+",
    "hf-assisted": "assisted", "hf-prompt-lookup": "lookup",
    "vllm": "vLLM", "vllm-draft": "vLLM VSD", "vllm-pard": "vLLM PARD", "vllm-ngram": "vLLM n-gram",
    "vllm-medusa": "vLLM Medusa", "vllm-eagle": "vLLM EAGLE",
    "llama-cpp": "llama.cpp", "llama-cpp-draft": "llama.cpp VSD",
}  # fmt: skip
"""Labels of the methods that are no drafters; specs may use a label instead of the name."""
_EVIDENT = ("dtype=", "draft=", "verify=", "lengths=", "target_stages=")
"""Settings whose values need no name."""
_CPUS = ("target_cpus=", "draft_cpus=")
_PATHS = ("draft", "prompts", "corpus")
"""Settings that may be paths."""
LONGEST_PATH = 24
"""Characters of a path that fit into a label."""
KEPT_PARTS = 2
"""Least parts kept of a shortened path, the last ones."""


def labels(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The labels of the methods of a result, by their specs."""
    short = _shortened(_paths(methods))
    return {spec: _label(spec, figures, short) for spec, figures in methods.items()}


def full_paths(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """For each shortened path, a line with the full one."""
    return [f"{short}: {path}" for path, short in _shortened(_paths(methods)).items() if short != path]


def _paths(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    pairs = [setting.partition("=") for spec in methods for setting in split_settings(spec)[1]]
    return list(dict.fromkeys(value for key, _, value in pairs if key in _PATHS))


def _shortened(paths: Collection[str]) -> dict[str, str]:
    """Shortened paths: their last parts, as many as it takes to differ; short paths stay.

    >>> for short in _shortened(["/home/me/first/pard/step-400", "/home/me/second/pard/step-400"]).values():
    ...     print(short)
    …/first/pard/step-400
    …/second/pard/step-400
    """
    short = {path: path for path in paths}
    for path in paths:
        parts = path.rstrip("/").split("/")
        for kept in range(KEPT_PARTS, len(parts) if len(path) > LONGEST_PATH else 0):
            end = "/".join(parts[-kept:])
            if not any(other != path and f"/{other}".rstrip("/").endswith(f"/{end}") for other in paths):
                short[path] = f"…/{end}"
                break
    return short


def _label(spec: str, figures: Mapping[str, Any], short: Mapping[str, str]) -> str:
    method = str(figures["method"])
    name = LABELS.get(method) or traits_of(method).label or method
    if figures.get("gamma"):
        name = "PEARL" if traits_of(method).drafts_one_by_one else f"PEARL + {name}"
    settings = []
    for setting in split_settings(spec)[1]:
        key, equals, value = setting.partition("=")
        settings.append(f"{key}{equals}{short.get(value, value) if key in _PATHS else value}")
    for key in _EVIDENT:
        settings = [setting.removeprefix(key) for setting in settings]
    cpus = [setting for setting in settings if setting.startswith(_CPUS)]
    if cpus:
        settings = [setting for setting in settings if setting not in cpus]
        settings.append("CPUs " + " and ".join(setting.partition("=")[2] for setting in sorted(cpus, reverse=True)))
    is_lossy = warning_of(str(figures.get("verify"))) is not None
    return ", ".join([name, *settings, *["not lossless"] * is_lossy])
