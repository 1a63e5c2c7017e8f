"""Exports a drafter for a serving engine: vocabulary padded to the target's, and a model card with the launch command.

vLLM and TensorRT-LLM draft in parallel with a PARD model, but ignore its previous-token head. SGLang, `transformers`
and llama.cpp have no mask tokens: they use a PARD model as the ordinary draft model that it still is. vLLM also has
some of the drafters on the target's states, see `paradraft.export.heads`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from paradraft.drafters import serving_of
from paradraft.engine.speculation import Speculation
from paradraft.export.acceptance import MeasuredAcceptance, measured_acceptance
from paradraft.export.block_engines import (
    METHODS,
    NAMES,
    architecture_for,
    check_block,
    check_unscaled,
    launch_block,
    tensorrt_block,
)
from paradraft.export.blocks import with_output_head, write_block_gguf
from paradraft.export.engines import ENGINES, GGUF, SGLANG, TENSORRT, TRANSFORMERS, VLLM, tensorrt_fixed, vllm_fixed
from paradraft.export.gguf import FILE, TYPES, check_can_write, check_dtype, write_gguf
from paradraft.export.heads import ELSEWHERE, check_head, needs_output_head, write_for_vllm
from paradraft.export.vllm import check_name, check_rows_fit
from paradraft.formats.folder import whole_folder, write_model
from paradraft.formats.head import Head, TargetIdentity, is_head, read_checkpoint
from paradraft.formats.pard import CONFIG_KEYS, RANK, declare_masks, declared_mask_id
from paradraft.formats.pard2 import reads_states
from paradraft.formats.published_block import is_published_block, write_published
from paradraft.models.names import POCKET
from paradraft.models.runtime import Runtime
from paradraft.sources.loading import load_config, load_generation_config, load_model, load_tokenizer, locate
from paradraft.text.vocabulary import of_one_family, resize, used_rows
from paradraft.traits import INSTEAD

PARALLEL = (VLLM, TENSORRT)
"""Engines that draft in parallel, in one pass."""
CARD, TENSORRT_FILE = "README.md", "speculative.yaml"


ON_CPUS = "Its tensor parallel size is the target's. At a temperature above 0, compare on GPUs only."
MEASURED_BEFORE = (
    "Its acceptance was measured with the folder it was made of, because only llama.cpp reads the file; the file's "
    "matrices are {}."
)
NEEDS_GPU = "{} drafts blocks on GPUs only; with this folder it was not tried."
OF_ONE_TARGET = "It belongs to this target alone: its weights, not only its shape."


@dataclass(frozen=True, kw_only=True)
class HandoffTask:
    """The arguments of `hand_off`."""

    draft: str
    target: str
    engine: str
    k: int
    prompts: tuple[str, ...]
    max_new_tokens: int
    runtime: Runtime


@dataclass(frozen=True, kw_only=True)
class Handoff:
    """An exported folder.

    Args:
        engine: one of `ENGINES`.
        drafter: how the engine drafts with it: "pard", "medusa", "eagle", "dflash", or "autoregressive" for an ordinary
            draft model.
        launch: the command or code that starts the engine.
        notes: further sentences for the card.
    """

    engine: str
    drafter: str
    k: int
    launch: str
    notes: tuple[str, ...]
    measured: MeasuredAcceptance | None


def hand_off(
    draft: str,
    target: str,
    engine: str,
    out: Path,
    *,
    k: int,
    prompts: Sequence[str],
    max_new_tokens: int,
    runtime: Runtime,
) -> Handoff:
    """Writes a drafter as an engine loads it.

    Args:
        draft: a PARD model, an ordinary draft model, or a drafter on the target's states that the engine supports: a
            folder, a Hugging Face id, or "pocket".
        engine: one of `ENGINES`.
        out: the folder to write; empty or not existing.
        prompts: to measure the acceptance on; empty skips the measurement.
        max_new_tokens: of an answer in the measurement.

    Raises:
        ValueError: the engine cannot serve it, its vocabulary is not the target's, or `out` is not empty.
    """
    if engine not in ENGINES:
        raise ValueError(f"--to {engine}: use one of {', '.join(ENGINES)}")
    if (file := next((path for path in (out, *out.parents) if path.exists() and not path.is_dir()), None)) is not None:
        raise ValueError(f"{str(file)!r} is a file: choose a folder for the drafter")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{str(out)!r} is not empty: delete it, or choose another folder")
    folder, target_folder = locate(draft, "pard"), locate(target, "target")
    task = HandoffTask(
        draft=draft, target=target, engine=engine, k=k, prompts=tuple(prompts), max_new_tokens=max_new_tokens,
        runtime=runtime,
    )  # fmt: skip
    return (_hand_off_head if is_head(folder) else _hand_off_model)(task, folder, target_folder, out)


def _hand_off_head(task: HandoffTask, folder: str, target_folder: str, out: Path) -> Handoff:
    """Exports a drafter on the target's states."""
    head = read_checkpoint(folder)
    drafter = str(head.config["model_type"])
    if serving_of(drafter).vllm in METHODS.values():
        return _hand_off_block(task, head, target_folder, out)
    if task.engine != VLLM:
        raise ValueError(f"{task.draft!r} reads the states of its target, and {ELSEWHERE[task.engine]}: {INSTEAD}")
    check_head(head, task.k)
    check_name(serving_of(drafter).vllm, str(out))
    head.target.check(TargetIdentity.of(load_config(target_folder)), task.draft)
    output_head = None
    if needs_output_head(head):
        output_head = load_model(target_folder, _as_stored(load_config(target_folder))).lm_head.weight.detach()
    with whole_folder(out) as new:
        write_for_vllm(new, head, load_config(target_folder), output_head)
        return _finished(task, new, out, drafter, (OF_ONE_TARGET, ON_CPUS))


def _hand_off_block(task: HandoffTask, head: Head, target_folder: str, out: Path) -> Handoff:
    """Exports a block drafter."""
    drafter, config, engine = str(head.config["model_type"]), load_config(target_folder), task.engine
    if engine not in NAMES:
        raise ValueError(f"--to {engine}: block drafters are written for {', '.join(NAMES)}: {INSTEAD}")
    settings = check_block(head, task.k, engine)
    check_unscaled(target_folder)
    architecture = architecture_for(head, engine)
    head.target.check(TargetIdentity.of(config), task.draft)
    dtype = task.runtime.draft_dtype or "bfloat16"
    if engine == VLLM:
        check_name(METHODS[architecture], str(out))
    if engine == GGUF:
        check_dtype(dtype)
    head = with_output_head(head, target_folder)
    speculative = tensorrt_block(settings, str(out), task.k) if engine == TENSORRT else None
    launch = None if speculative else launch_block(engine, architecture, _served_as(task), str(out), task.k, gguf=FILE)
    with whole_folder(out) as new:
        if engine != GGUF:
            write_published(new, head, architecture, windows=engine == SGLANG)
            notes = (OF_ONE_TARGET, NEEDS_GPU.format(NAMES[engine]))
            return _finished(task, new, out, drafter, notes, launch=launch, speculative=speculative)
        write_block_gguf(
            new / FILE, head, load_tokenizer(target_folder), load_generation_config(target_folder), dtype=dtype
        )  # fmt: skip
        notes = (OF_ONE_TARGET, MEASURED_BEFORE.format(TYPES[dtype]))
        return _finished(task, new, out, drafter, notes, measured=head.name, launch=launch)


def _served_as(task: HandoffTask) -> str:
    """The target in the command that starts the engine."""
    return locate(POCKET, "target") if task.target == POCKET else task.target


def _hand_off_model(task: HandoffTask, folder: str, target_folder: str, out: Path) -> Handoff:
    """Exports a PARD model or an ordinary draft model."""
    draft, target, engine = task.draft, task.target, task.engine
    config, target_config = load_config(folder), load_config(target_folder)
    if is_published_block(config):
        raise ValueError(f"{draft!r} is written for an engine already: export the folder that was trained")
    mask, masks = declared_mask_id(config), getattr(config, "pard_masks", 1)
    if mask is not None and masks > 1 and engine in PARALLEL:
        raise ValueError(
            f"{draft!r} has {masks} mask tokens, and {engine} knows one: train a drafter without distinct_masks"
        )
    tokenizer, draft_tokenizer = load_tokenizer(target_folder), load_tokenizer(folder)
    if not of_one_family(tokenizer.get_vocab(), draft_tokenizer.get_vocab()):
        raise ValueError(f"{draft!r} has another vocabulary than {target!r}, which padding cannot mend: use one family")
    rows = target_config.vocab_size
    check_rows_fit(config, draft_tokenizer, rows, draft=draft, target=target)
    dtype = task.runtime.draft_dtype or _as_stored(config).dtype
    if engine == GGUF:
        check_can_write(config, dtype, draft)
    is_parallel = mask is not None and engine in (*PARALLEL, GGUF)
    drafter = "pard" if is_parallel else "autoregressive"
    if engine == VLLM:
        check_name(serving_of(drafter).vllm, str(out))
    notes = _notes(config, rows, engine, has_masks=mask is not None)
    if engine == GGUF and dtype != (stored := _as_stored(config).dtype):
        notes += (f"Its weights are rounded to {TYPES[dtype]}, from {TYPES[stored]}.",)
    model = load_model(folder, _as_stored(config))
    resize(model, rows, used_rows(draft_tokenizer))
    for key in CONFIG_KEYS:
        if hasattr(model.config, key):
            delattr(model.config, key)
    if mask is not None:
        declare_masks(model.config, mask, masks)
    model.generation_config = load_generation_config(target_folder)
    with whole_folder(out) as new:
        if engine == GGUF:
            write_gguf(new / FILE, model.eval(), tokenizer, dtype=dtype, name=out.name)
        else:
            write_model(new, model.eval(), tokenizer)
        return _finished(task, new, out, drafter, notes)


def _as_stored(config: PretrainedConfig) -> Runtime:
    """CPU and the checkpoint's own dtype, for a model that is loaded only to be rewritten."""
    return Runtime(device="cpu", dtype=str(config.dtype or torch.float32).removeprefix("torch."))


def _finished(
    task: HandoffTask,
    new: Path,
    out: Path,
    drafter: str,
    notes: tuple[str, ...],
    *,
    measured: str | None = None,
    launch: str | None = None,
    speculative: dict[str, Any] | None = None,
) -> Handoff:
    """Measures the exported folder, or the draft `measured` in its place, and writes its card.

    Args:
        launch: the command that starts the engine, see `_launch` for the usual one.
        speculative: the part of TensorRT-LLM's config, by default that of `tensorrt_fixed`.
    """
    engine, k = task.engine, task.k
    done = Handoff(
        engine=engine, drafter=drafter, k=k, notes=notes, launch=launch or _launch(task, drafter, str(out)),
        measured=_measured(measured or str(new / FILE if engine == GGUF else new), drafter, task),
    )  # fmt: skip
    (new / CARD).write_text(card(done, task.draft, task.target), encoding="utf-8")
    if engine == TENSORRT:
        speculative = speculative or tensorrt_fixed(k, drafter, str(out))
        assert speculative is not None
        lines = [f"  {key}: {json.dumps(value)}" for key, value in speculative.items()]
        (new / TENSORRT_FILE).write_text("\n".join(["speculative_config:", *lines, ""]), encoding="utf-8")
    return done


def _measured(draft: str, drafter: str, task: HandoffTask) -> MeasuredAcceptance | None:
    if not task.prompts:
        return None
    return measured_acceptance(
        task.target,
        Speculation(drafter=drafter, draft=draft, k=task.k, lengths="fixed"),
        task.prompts,
        max_new_tokens=task.max_new_tokens,
        runtime=replace(task.runtime, draft_dtype=None if task.engine == GGUF else task.runtime.draft_dtype),
    )


def _notes(config: PretrainedConfig, rows: int, engine: str, *, has_masks: bool) -> tuple[str, ...]:
    notes = []
    if config.vocab_size != rows:
        notes.append(
            f"Its embedding had {config.vocab_size} rows and has {rows} now, as the target's: engines want as many in "
            "both."
        )
    if reads_states(config):
        notes.append("It drafts without the target's states, which only paradraft gives it.")
    if hasattr(config, RANK):
        notes.append("Its head, which tells masks the tokens before them, is left out: only paradraft reads it.")
    if has_masks and engine not in PARALLEL:
        reader = "llama.cpp" if engine == GGUF else engine
        notes.append(f"{reader} has no mask tokens: there it drafts one token a pass, as any draft model.")
    if engine == VLLM:
        notes.append(ON_CPUS)
    return tuple(notes)


def _launch(task: HandoffTask, drafter: str, draft: str) -> str:
    """The command, or for `transformers` the code, that starts the engine."""
    engine, k = task.engine, task.k
    model, folder = shlex.quote(_served_as(task)), shlex.quote(draft)
    if engine == VLLM:
        config = json.dumps(vllm_fixed(k, drafter, draft) or {})
        return f"vllm serve {model} --speculative-config {shlex.quote(config)}"
    if engine == TENSORRT:
        return f"trtllm-serve {model} --config {shlex.quote(f'{draft}/{TENSORRT_FILE}')}"
    if engine == SGLANG:
        return (
            f"python -m sglang.launch_server --model-path {model} --speculative-algorithm STANDALONE "
            f"--speculative-draft-model-path {folder} --speculative-num-steps {k} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {k + 1}"
        )
    if engine == GGUF:
        return (
            f"paradraft generate --target {model} --drafter {drafter} --draft {shlex.quote(f'{draft}/{FILE}')} -k {k}\n"
            f"llama-server -m TARGET.gguf -md {shlex.quote(f'{draft}/{FILE}')} --spec-draft-n-max {k}"
        )
    return (
        f"model.generate(**inputs, assistant_model=AutoModelForCausalLM.from_pretrained({draft!r}), "
        f"num_assistant_tokens={k})"
    )


def card(done: Handoff, draft: str, target: str) -> str:
    """The model card of an exported folder, in Markdown."""
    measured = done.measured
    table = ["Its acceptance was not measured."]
    if measured is not None:
        shares = " ".join(f"{share:.2f}" for share in measured.by_position)
        same = "the same text as without it" if measured.is_lossless else "**other texts than without it**: audit it"
        table = [
            f"Measured in paradraft's own loop, on {measured.prompts} answers, greedily: {same}.",
            "",
            "| | |",
            "|---|---|",
            f"| tokens per pass of the target | {measured.length:.2f} |",
            f"| accepted at position 1, 2, … | {shares} |",
            "",
            "The engine should accept as much. vLLM counts an acceptance length of 1 + accepted / drafts.",
        ]
    tag = "python" if done.engine == TRANSFORMERS else "bash"
    return "\n".join([
        "---", "library_name: paradraft", "pipeline_tag: text-generation",
        f"tags: [speculative-decoding, {done.drafter}, {done.engine}]", "---", "",
        f"# A draft model for {target}, for {done.engine}", "",
        f"Made of `{draft}` by paradraft {version('paradraft')}. It drafts {done.k} tokens a round"
        + serving_of(done.drafter).passes, "",
        f"```{tag}", done.launch, "```", "",
        *table, "",
        *(f"- {note}" for note in done.notes), "",
    ])  # fmt: skip
