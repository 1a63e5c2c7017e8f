"""A drafter's folder as an engine loads it: its tokens are the target's, and a model card says how to start the engine.

vLLM and TensorRT-LLM draft in parallel with a PARD model, without the head that may stand beside it. SGLang,
`transformers` and llama.cpp have no mask tokens: to them it is an ordinary draft model, which a PARD model still is. Of
drafters on the target's states vLLM has some, see `paradraft.export.heads`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import PretrainedConfig

from paradraft.drafters.none import NoDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load_engine
from paradraft.engine.speculation import Speculation
from paradraft.export.engines import tensorrt_fixed, vllm_fixed
from paradraft.export.gguf import FILE, TYPES, check_can_write, write_gguf
from paradraft.export.heads import ELSEWHERE, INSTEAD, check_head, needs_output_head, write_for_vllm
from paradraft.export.vllm import check_name, check_rows_fit
from paradraft.formats.folder import whole_folder, write_model
from paradraft.formats.head import TargetIdentity, is_head, read_checkpoint
from paradraft.formats.pard import CONFIG_KEYS, RANK, declare_masks, declared_mask_id
from paradraft.models.names import POCKET
from paradraft.models.runtime import Runtime
from paradraft.sources.loading import load_config, load_generation_config, load_model, load_tokenizer, locate
from paradraft.text.vocabulary import of_one_family, resize, used_rows

VLLM, SGLANG, TENSORRT, TRANSFORMERS, GGUF = ENGINES = ("vllm", "sglang", "tensorrt-llm", "transformers", "gguf")
PARALLEL = (VLLM, TENSORRT)
"""Engines that draft all tokens in one pass."""
CARD, TENSORRT_FILE = "README.md", "speculative.yaml"


ON_CPUS = "Its tensor parallel size is the target's. At a temperature above 0, compare on GPUs only."
OF_ONE_TARGET = "It belongs to this target alone: its weights, not only its shape."
HOW = {"pard": " in one pass.", "medusa": ", each by a head of its own.", "eagle": ", one a pass of its layers."}
"""How a drafter drafts the tokens of a round, where it is not one a pass."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be handed off, see `hand_off`."""

    draft: str
    target: str
    engine: str
    k: int
    prompts: tuple[str, ...]
    max_new_tokens: int
    runtime: Runtime


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the exported folder yields in our own loop, greedily.

    Args:
        prompts: how many answers there were.
        length: tokens per pass of the target.
        by_position: for each position of the drafts, the share that is accepted.
        is_lossless: whether all texts are those of plain decoding.
    """

    prompts: int
    length: float
    by_position: tuple[float, ...]
    is_lossless: bool


@dataclass(frozen=True, kw_only=True)
class Handoff:
    """A folder for an engine.

    Args:
        engine: one of `ENGINES`.
        drafter: as what the engine drafts with it: "pard", "medusa", "eagle", or "autoregressive" where an ordinary
            draft model drafts token by token.
        k: tokens drafted per round.
        launch: the command, or the code, that starts it.
        notes: what else whoever serves it should know.
        measured: what it yields; None if it was not measured.
    """

    engine: str
    drafter: str
    k: int
    launch: str
    notes: tuple[str, ...]
    measured: Measured | None


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
        draft: a PARD model, an ordinary draft model, or for vLLM a drafter on the target's states that it has: a
            folder, a Hugging Face id, or "pocket".
        target: whose text it guesses.
        engine: one of `ENGINES`.
        out: the folder to write; it is empty or does not exist.
        k: tokens drafted per round.
        prompts: what the acceptance is measured on; none measures nothing.
        max_new_tokens: most tokens of an answer when it is measured.
        runtime: how it is measured.

    Raises:
        ValueError: the engine cannot serve it, its tokens are not the target's, or `out` holds something.
    """
    if engine not in ENGINES:
        raise ValueError(f"--to {engine}: use one of {', '.join(ENGINES)}")
    if (file := next((path for path in (out, *out.parents) if path.exists() and not path.is_dir()), None)) is not None:
        raise ValueError(f"{str(file)!r} is a file: choose a folder for the drafter")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{str(out)!r} is not empty: delete it, or choose another folder")
    folder, of_target = locate(draft, "pard"), locate(target, "target")
    asked = Asked(
        draft=draft, target=target, engine=engine, k=k, prompts=tuple(prompts), max_new_tokens=max_new_tokens,
        runtime=runtime,
    )  # fmt: skip
    return (_hand_off_head if is_head(folder) else _hand_off_model)(asked, folder, of_target, out)


def _hand_off_head(asked: Asked, folder: str, of_target: str, out: Path) -> Handoff:
    """Writes a drafter that reads the target's states."""
    if asked.engine != VLLM:
        raise ValueError(f"{asked.draft!r} reads the states of its target, and {ELSEWHERE[asked.engine]}: {INSTEAD}")
    head = read_checkpoint(folder)
    drafter = str(head.config["model_type"])
    check_head(head, asked.k)
    check_name(drafter, str(out))
    head.target.check(TargetIdentity.of(load_config(of_target)), asked.draft)
    output_head = None
    if needs_output_head(head):
        output_head = load_model(of_target, _as_stored(load_config(of_target))).lm_head.weight.detach()
    with whole_folder(out) as new:
        write_for_vllm(new, head, load_config(of_target), output_head)
        return _finished(asked, new, out, of_target, drafter, (OF_ONE_TARGET, ON_CPUS))


def _hand_off_model(asked: Asked, folder: str, of_target: str, out: Path) -> Handoff:
    """Writes a PARD model or an ordinary draft model."""
    draft, target, engine = asked.draft, asked.target, asked.engine
    config, wanted = load_config(folder), load_config(of_target)
    mask, masks = declared_mask_id(config), getattr(config, "pard_masks", 1)
    if mask is not None and masks > 1 and engine in PARALLEL:
        raise ValueError(
            f"{draft!r} has {masks} mask tokens, and {engine} knows one: train a drafter without distinct_masks"
        )
    tokenizer, theirs = load_tokenizer(of_target), load_tokenizer(folder)
    if not of_one_family(tokenizer.get_vocab(), theirs.get_vocab()):
        raise ValueError(f"{draft!r} has another vocabulary than {target!r}, which padding cannot mend: use one family")
    rows = wanted.vocab_size
    check_rows_fit(config, theirs, rows, draft=draft, target=target)
    dtype = asked.runtime.draft_dtype or _as_stored(config).dtype
    if engine == GGUF:
        check_can_write(config, dtype, draft)
    is_parallel = mask is not None and engine in (*PARALLEL, GGUF)
    drafter = "pard" if is_parallel else "autoregressive"
    if engine == VLLM:
        check_name(drafter, str(out))
    notes = _notes(config.vocab_size, rows, engine, has_masks=mask is not None, has_head=hasattr(config, RANK))
    if engine == GGUF and dtype != (stored := _as_stored(config).dtype):
        notes += (f"Its weights are rounded to {TYPES[dtype]}, from {TYPES[stored]}.",)
    model = load_model(folder, _as_stored(config))
    resize(model, rows, used_rows(theirs))
    for key in CONFIG_KEYS:
        if hasattr(model.config, key):
            delattr(model.config, key)
    if mask is not None:
        declare_masks(model.config, mask, masks)
    model.generation_config = load_generation_config(of_target)
    with whole_folder(out) as new:
        if engine == GGUF:
            write_gguf(new / FILE, model.eval(), tokenizer, model.generation_config, dtype=dtype, name=out.name)
        else:
            write_model(new, model.eval(), tokenizer)
        return _finished(asked, new, out, of_target, drafter, notes)


def _as_stored(config: PretrainedConfig) -> Runtime:
    """That of a model which is read to be written again."""
    return Runtime(device="cpu", dtype=str(config.dtype or torch.float32).removeprefix("torch."))


def _finished(asked: Asked, new: Path, out: Path, of_target: str, drafter: str, notes: tuple[str, ...]) -> Handoff:
    """Measures what was written, and writes its card."""
    engine, k = asked.engine, asked.k
    served = of_target if asked.target == POCKET else asked.target
    done = Handoff(
        engine=engine, drafter=drafter, k=k, notes=notes, launch=_launch(engine, drafter, served, str(out), k),
        measured=_measure(new, drafter, asked) if asked.prompts else None,
    )  # fmt: skip
    (new / CARD).write_text(card(done, asked.draft, asked.target), encoding="utf-8")
    if engine == TENSORRT:
        (new / TENSORRT_FILE).write_text(_tensorrt_yaml(drafter, str(out), k), encoding="utf-8")
    return done


def _notes(own: int, rows: int, engine: str, *, has_masks: bool, has_head: bool) -> tuple[str, ...]:
    found = []
    if own != rows:
        found.append(f"Its embedding had {own} rows and has {rows} now, as the target's: engines want as many in both.")
    if has_head:
        found.append("Its head, which tells masks the tokens before them, is left out: only paradraft reads it.")
    if has_masks and engine not in PARALLEL:
        reader = "llama.cpp" if engine == GGUF else engine
        found.append(f"{reader} has no mask tokens: there it drafts one token a pass, as any draft model.")
    if engine == VLLM:
        found.append(ON_CPUS)
    return tuple(found)


def _measure(folder: Path, drafter: str, asked: Asked) -> Measured:
    prompts, max_new_tokens = list(asked.prompts), asked.max_new_tokens
    draft, own_dtype = (folder / FILE, None) if asked.engine == GGUF else (folder, asked.runtime.draft_dtype)
    speculation = Speculation(drafter=drafter, draft=str(draft), k=asked.k, lengths="fixed")
    runtime = replace(asked.runtime, width=max(asked.runtime.width, speculation.pass_width), draft_dtype=own_dtype)
    with load_engine(asked.target, speculation, runtime=runtime) as engine:
        answers = engine.generate(prompts, max_new_tokens=max_new_tokens)
        stats = [answer.stats for answer in answers]
        plain = Engine(engine.target, NoDrafter(engine.drafter.reserved_tokens), Speculation(k=1))
        expected = plain.generate(prompts, max_new_tokens=max_new_tokens)
    accepted = [sum(each) for each in zip(*(one.accepted for one in stats), strict=True)]
    drafted = [sum(each) for each in zip(*(one.drafted for one in stats), strict=True)]
    return Measured(
        prompts=len(answers),
        length=sum(one.tokens for one in stats) / sum(one.rounds for one in stats),
        by_position=tuple(kept / made for kept, made in zip(accepted, drafted, strict=True) if made),
        is_lossless=[one.tokens for one in answers] == [one.tokens for one in expected],
    )


def _launch(engine: str, drafter: str, target: str, draft: str, k: int) -> str:
    """What starts an engine."""
    named, folder = shlex.quote(target), shlex.quote(draft)
    if engine == VLLM:
        config = json.dumps(vllm_fixed(k, drafter, draft))
        return f"vllm serve {named} --speculative-config {shlex.quote(config)}"
    if engine == TENSORRT:
        return f"trtllm-serve {named} --config {shlex.quote(f'{draft}/{TENSORRT_FILE}')}"
    if engine == SGLANG:
        return (
            f"python -m sglang.launch_server --model-path {named} --speculative-algorithm STANDALONE "
            f"--speculative-draft-model-path {folder} --speculative-num-steps {k} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {k + 1}"
        )
    if engine == GGUF:
        return (
            f"paradraft generate --target {named} --drafter {drafter} --draft {shlex.quote(f'{draft}/{FILE}')} -k {k}\n"
            f"llama-server -m TARGET.gguf -md {shlex.quote(f'{draft}/{FILE}')} --spec-draft-n-max {k}"
        )
    return (
        f"model.generate(**inputs, assistant_model=AutoModelForCausalLM.from_pretrained({draft!r}), "
        f"num_assistant_tokens={k})"
    )


def _tensorrt_yaml(drafter: str, draft: str, k: int) -> str:
    config = tensorrt_fixed(k, drafter, draft)
    assert config is not None
    lines = [f"  {key}: {json.dumps(value)}" for key, value in config.items()]
    return "\n".join(["speculative_config:", *lines, ""])


def card(done: Handoff, draft: str, target: str) -> str:
    """The card of a folder that was handed off, in Markdown."""
    found = done.measured
    table = ["Its acceptance was not measured."]
    if found is not None:
        shares = " ".join(f"{share:.2f}" for share in found.by_position)
        same = "the same text as without it" if found.is_lossless else "**other texts than without it**: audit it"
        table = [
            f"Measured in paradraft's own loop with these files, on {found.prompts} answers, greedily: {same}.",
            "",
            "| | |",
            "|---|---|",
            f"| tokens per pass of the target | {found.length:.2f} |",
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
        + HOW.get(done.drafter, ", one a pass."), "",
        f"```{tag}", done.launch, "```", "",
        *table, "",
        *(f"- {note}" for note in done.notes), "",
    ])  # fmt: skip
