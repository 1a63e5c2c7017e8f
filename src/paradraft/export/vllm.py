"""Builds and checks vLLM's `--speculative-config` before vLLM starts, because vLLM itself reports a draft model that
does not fit minutes later, or never."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from paradraft.drafters import drafter_names, drafter_settings, serving_of, split_settings, takes_draft
from paradraft.engine.speculation import Speculation
from paradraft.export.block_engines import METHODS, check_block, check_k, check_unscaled
from paradraft.export.engines import VLLM, vllm_config, vllm_fixed
from paradraft.export.heads import EAGLE, check_head, is_exported
from paradraft.formats.block import BlockSettings
from paradraft.formats.head import TargetIdentity, is_head, read_checkpoint
from paradraft.formats.pard import declared_mask_id, mask_token_id
from paradraft.formats.published_block import read_block
from paradraft.models.names import POCKET, is_shape
from paradraft.sources.loading import load_config, load_tokenizer, locate
from paradraft.sources.reduced_head import reduced_head
from paradraft.text.vocabulary import of_one_family, used_rows

DEFAULT_PYTHON = Path("build/vllm/bin/python")
"""The Python of the environment that `make vllm` creates."""
MOST_LINE = 4096
"""Bytes of a path."""
NOT_INSTALLED = (
    f"vLLM is not installed: {DEFAULT_PYTHON} does not exist, and vllm is neither a package of this Python nor in the "
    "PATH. Run `make vllm`, or name its Python: --vllm-python."
)
TAKEN_NAMES = ("eagle-", "eagle3", "dflash", "dspark")
"""A draft model whose name contains one of these is taken by vLLM for a head of that kind, whatever its config says,
unless the drafter is EAGLE (vllm/config/speculative.py)."""


class NeedsExportError(ValueError):
    """vLLM can load the drafter only after `paradraft export`."""


def installed_python(named: Path | None) -> Path | None:
    """The Python of vLLM's environment; None if vLLM is not installed.

    Args:
        named: by the user. By default the first that exists of `DEFAULT_PYTHON`, this process's Python where it has a
            package vllm, and the Python that runs the command `vllm` of the PATH.

    Raises:
        ValueError: the Python that the user named does not exist.
    """
    if named is not None and not named.is_file():
        raise ValueError(f"--vllm-python {str(named)!r}: there is no such file; name the Python of vLLM's environment")
    if named is not None or DEFAULT_PYTHON.is_file():
        return named or DEFAULT_PYTHON
    return Path(sys.executable) if find_spec("vllm") is not None else _python_of_command()


def python_to_run(named: Path | None) -> Path:
    """The Python that is to run vLLM, also where it is not installed: named by the user, see `installed_python`."""
    return named or installed_python(None) or DEFAULT_PYTHON


def _python_of_command() -> Path | None:
    """The Python in the first line of the command `vllm`, as pip writes it."""
    command = shutil.which("vllm")
    if command is None:
        return None
    with Path(command).open("rb") as script:
        first = os.fsdecode(script.readline(MOST_LINE)).strip()
    python = Path(first.removeprefix("#!"))
    return python if first.startswith("#!") and python.name.startswith("python") and python.is_file() else None


def intel_openmp(python: Path) -> dict[str, str]:
    """`LD_PRELOAD` with Intel's OpenMP if the environment of `python` has it and it is not preloaded; else nothing.

    Without it, vLLM warns of a significant loss of speed when it speculates on a CPU.
    """
    library, loaded = python.absolute().parent.parent / "lib" / "libiomp5.so", os.environ.get("LD_PRELOAD", "")
    if not library.exists() or "libiomp5" in loaded:
        return {}
    return {"LD_PRELOAD": f"{library}:{loaded}".rstrip(":")}


def speculative_config(
    speculation: Speculation, target: str, chosen: Mapping[int, int] | None = None
) -> dict[str, Any] | None:
    """The value of vLLM's `--speculative-config`; None without a drafter.

    Args:
        chosen: K by batch size, instead of the speculation's K.

    Raises:
        ValueError: vLLM has no such drafter, cannot load its draft model, or K is 0 at every batch size.
    """
    name, _ = split_settings(speculation.drafter)
    if name == "none":
        return None
    if chosen is not None and not max(chosen.values()):
        raise ValueError("no K pays at any batch size of the plan: serve with --drafter none")
    serving = serving_of(speculation.drafter)
    has_model = serving.vllm is not None and takes_draft(name)
    draft = locate(speculation.draft or POCKET, serving.role or name) if has_model else ""
    if chosen is not None and serving.one_k:
        raise ValueError(f"vLLM drafts one K with {name} at every batch size: leave the plan out, and give -k")
    config = (
        vllm_fixed(speculation.k, speculation.drafter, draft)
        if chosen is None
        else vllm_config(chosen, speculation.drafter, draft)
    )
    if config is None:
        able = ", ".join(known for known in drafter_names() if serving_of(known).vllm is not None)
        raise ValueError(f"vLLM has no drafter {name!r}: use {able} or none, or serve with paradraft")
    if has_model:
        if any(value is not None for value in drafter_settings(speculation.drafter).values()):
            raise ValueError(
                f"vLLM knows no settings of {name}: leave out what follows the name in {speculation.drafter!r}"
            )
        check_draft(name, draft, target, config["num_speculative_tokens"])
        config["method"] = _method_of(name, draft)
    return config


def check_draft(name: str, draft: str, target: str, k: int) -> None:
    """Checks that vLLM can draft for a target with a draft model or a drafter on the target's states.

    Args:
        name: of the drafter.

    Raises:
        ValueError: it cannot: a model has no weights; the draft model names no mask token or several, has another
            vocabulary or number of embedding rows, or a name that vLLM misreads; or a drafter on the target's states
            was not exported, or belongs to another target.
    """
    for model in (draft, target):
        if is_shape(model):
            raise ValueError(f"{model!r} has random weights, and vLLM loads models from disk: name a folder or an id")
    if serving_of(name).as_exported:
        _check_head(name, draft, target, k)
    else:
        _check_model(name, draft, target)
    check_name(_method_of(name, draft), draft)


def _method_of(name: str, draft: str) -> str | None:
    """vLLM's method for a drafter that `check_draft` accepts: that of its folder, if it is a block drafter."""
    method = serving_of(name).vllm
    return METHODS[load_config(draft).architectures[0]] if method in METHODS.values() else method


def check_name(method: str | None, draft: str) -> None:
    """Raises ValueError if vLLM would mistake a draft model of a method for another kind by its folder name or Hugging
    Face id."""
    if method != EAGLE and (taken := [word for word in TAKEN_NAMES if word in draft.lower() and word != method]):
        raise ValueError(
            f"{draft!r}: vLLM takes a model with {taken[0]!r} in its name for a head of that kind: give it another name"
        )


def _check_head(name: str, draft: str, target: str, k: int) -> None:
    if serving_of(name).vllm in METHODS.values():
        return _check_block(draft, name, target, k)
    head = read_checkpoint(draft, name)
    check_head(head, k)
    head.target.check(TargetIdentity.of(load_config(target)), draft)
    if not is_exported(head):
        raise NeedsExportError(
            f"{draft!r} lacks what vLLM looks for in it: run `paradraft export {draft} OUT --target {target} --to vllm`"
        )


def _check_block(draft: str, name: str, target: str, k: int) -> None:
    head = read_block(draft, name, load_config(target))
    if is_head(draft):
        check_block(head, k, VLLM)
        check_unscaled(target)
        raise NeedsExportError(
            f"{draft!r} has not vLLM's format: run `paradraft export {draft} OUT --target {target} --to vllm -k {k}`"
        )
    check_k(BlockSettings.of(head), k, draft)


def _check_model(name: str, draft: str, target: str) -> None:
    if is_head(draft):
        raise ValueError(f"{draft!r} is no draft model, it reads the states of its target: name its drafter")
    config, target_config = load_config(draft), load_config(target)
    if (head := reduced_head(draft, config)) is not None:
        raise ValueError(
            f"{draft!r} has an output head for {head.shape[0]} of its {config.vocab_size} tokens, and vLLM reads a "
            "whole one in draft models: serve with paradraft, or train the draft that it was trimmed from"
        )
    if "parallel_drafting" in serving_of(name).options:
        mask_token_id(config, draft)
        if (masks := getattr(config, "pard_masks", 1)) > 1:
            raise ValueError(f"{draft!r} has {masks} mask tokens, and vLLM knows one: train without distinct_masks")
    if not of_one_family(load_tokenizer(target).get_vocab(), load_tokenizer(draft).get_vocab()):
        raise ValueError(f"{draft!r} has another vocabulary than {target!r}: use a draft model of the same family")
    if config.vocab_size != target_config.vocab_size:
        check_rows_fit(config, load_tokenizer(draft), target_config.vocab_size, draft=draft, target=target)
        raise NeedsExportError(
            f"{draft!r} has an embedding of {config.vocab_size} rows and {target!r} one of "
            f"{target_config.vocab_size}, and vLLM wants as many in both: run `paradraft export {draft} OUT --target "
            f"{target} --to vllm`"
        )


def check_rows_fit(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, rows: int, *, draft: str, target: str
) -> None:
    """Raises ValueError if a draft model's tokens need more embedding rows than the target has."""
    mask, used = declared_mask_id(config), used_rows(tokenizer)
    needed = max(used, 0 if mask is None else mask + 1)
    if rows < min(needed, config.vocab_size):
        excess = f"mask token {mask}" if mask is not None and mask >= rows else f"{needed} rows"
        raise ValueError(
            f"{draft!r} uses {excess}, and {target!r} has an embedding of {rows} rows, while engines want as many in "
            "both: train with mask_token_id set to a token of the target that no text holds"
        )
