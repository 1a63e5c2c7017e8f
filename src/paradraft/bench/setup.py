"""Prepares a benchmark: its prompts, its models, each loaded once, and the answerer of each method."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paradraft.bench.baselines import HF, LLAMA_CPP, PEERS, is_llama_cpp, is_vllm, llama_cpp
from paradraft.bench.baselines.llama_cpp import LlamaCppProcess, check_llama_cpp
from paradraft.bench.baselines.vllm import VllmProcess, check_vllm, worker_settings
from paradraft.bench.hardware.roofline import models_of
from paradraft.bench.harness import check_batches
from paradraft.bench.report.summary import OWN_SAMPLING
from paradraft.bench.result import Answerer
from paradraft.bench.spec import AR, Benchmark, Method, TargetKey
from paradraft.bench.synthetic import SyntheticAcceptance, without_ends
from paradraft.core import Drafter
from paradraft.data.prompt_source import DEFAULT, PIPE, RANDOM
from paradraft.data.prompts import as_conversations, first_prompts, texts_of
from paradraft.decode.pearl.channel import launched
from paradraft.drafters import check_draft, is_drafter, takes_draft
from paradraft.drafters.none import NoDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.loader import drafter_processes, load_drafter_in
from paradraft.engine.speculation import Speculation
from paradraft.models.causal_lm import CausalLM
from paradraft.models.names import is_shape
from paradraft.models.target import Target
from paradraft.placement import on_cpus
from paradraft.sampling_params import Sampling
from paradraft.sources.load_plan import LoadPlan
from paradraft.sources.loading import locate, pocket_folder, tokenizer_for
from paradraft.sources.presets import shape_of
from paradraft.sources.target_loading import load_planned

PLAIN = (HF, AR, LLAMA_CPP)
"""Methods without a draft, which can be timed with any weights."""
USUAL = 16
"""Default number of prompts; of a file with fewer, all."""
Answers = Callable[[list[str], int], list[str]]
"""The target's answers to prompts, with at most this many tokens each."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts that all methods answer.

    Args:
        prompts: makes them; some quote the target's own answers to others.
        source: of the prompts, see `paradraft.data.prompts.counted`; None for a task.
        right_share: the share of the answers to all prompts that are right; None where they are not marked.
    """

    count: int
    max_new_tokens: int
    prompts: Callable[[Answers], list[str]]
    name: str = ""
    source: str | None = None
    right_share: Callable[[Sequence[str]], float] | None = None

    @classmethod
    def of(cls, prompts: list[str], max_new_tokens: int, source: str | None = None) -> Workload:
        """A workload of known texts."""
        return cls(count=len(prompts), max_new_tokens=max_new_tokens, prompts=lambda _: prompts, source=source)


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """The form of prompts in a chat."""

    system: str | None = None
    variables: dict[str, Any] = field(default_factory=dict)


def held_out_prompts(
    count: int | None,
    file: Path | None,
    target: str,
    tokenizer: str | None = None,
    *,
    usual: int = USUAL,
    chat: ChatFormat | None = None,
) -> list[str]:
    """The first prompts of a file, in the target's chat template if they are conversations.

    Args:
        count: None for `usual`, or for all where the file has fewer.
        file: see `paradraft.data.prompts`; None for the pocket family's held-out modules.
        chat: the form of a chat; None continues the prompts as they are.

    Raises:
        ValueError: the file cannot be read or has fewer prompts, or the target has no chat template for conversations.
    """
    records = first_prompts(file or pocket_folder("prompts.jsonl"), count, usual)
    records = records if chat is None else as_conversations(records, chat.system)
    variables = {} if chat is None else chat.variables
    return texts_of(records, lambda: tokenizer_for(locate(target, "target"), tokenizer), variables)


def source_of(file: Path | None, target: str) -> str:
    """The source of the prompts of a run: a file, random tokens for a shape, or those of the pocket family."""
    if is_shape(target):
        return RANDOM
    return DEFAULT if file is None else PIPE if file.is_fifo() else str(file)


def prompts_for(
    target: str,
    count: int | None,
    *,
    tokens: int,
    file: Path | None,
    tokenizer: str | None = None,
    chat: ChatFormat | None = None,
) -> list[str]:
    """The prompts of a run: random ones of `tokens` tokens for a shape, which reads no texts, else those of a file.

    Raises:
        ValueError: there is no such shape or file, or a shape is combined with a file or a chat.
    """
    if not is_shape(target):
        return held_out_prompts(count, file, target, tokenizer, chat=chat)
    prompts = random_prompts(target, USUAL if count is None else count, tokens)
    if file is not None:
        raise ValueError(f"--prompts {file}: {target!r} reads no texts, its prompts are random: give --prompt-tokens")
    if chat is not None:
        raise ValueError(f"--chat: {target!r} reads no texts, leave it out")
    return prompts


def random_prompts(shape: str, count: int, tokens: int) -> list[str]:
    """Prompts for a shape: random token ids, written as its tokenizer reads them.

    >>> random_prompts("shape:tiny-target", 2, 3)
    ['49 53 5', '33 65 62']
    """
    if count < 1 or tokens < 1:
        raise ValueError(f"num_prompts={count}, prompt_tokens={tokens}: use at least 1")
    chooser, ids = random.Random(0), shape_of(shape).mask_id
    return [" ".join(str(chooser.randrange(ids)) for _ in range(tokens)) for _ in range(count)]


@dataclass(frozen=True, kw_only=True)
class BenchSetup:
    """Loaded models and answerers of all methods.

    Args:
        models: of each method, by their part.
        targets: by `Method.target_key`.
    """

    answerers: dict[Method, Answerer] = field(default_factory=dict)
    models: dict[Method, dict[str, CausalLM]] = field(default_factory=dict)
    engines: dict[Method, Engine] = field(default_factory=dict)
    targets: dict[TargetKey, Target] = field(default_factory=dict)

    def check(self, prompts: list[str], *, max_new_tokens: int) -> None:
        """Raises ValueError unless the prompts and their answers fit into the targets."""
        for target in self.targets.values():
            Engine(target, NoDrafter(), Speculation(k=1)).check(prompts, max_new_tokens=max_new_tokens)

    def answers(self, method: Method, sampling: Sampling, report: Callable[[str], None]) -> Answers:
        """Answers of the target without a drafter, in the dtype and the batches of a method."""
        engine = Engine(self.targets[method.target_key], NoDrafter(), Speculation(k=1))

        def answer(prompts: list[str], max_new_tokens: int) -> list[str]:
            report(f"asking for {len(prompts)} answers that later prompts quote")
            results = engine.generate(
                prompts, max_new_tokens=max_new_tokens, sampling=sampling, batch_size=method.batch
            )
            return [result.text for result in results]

        return answer


def prepare(benchmark: Benchmark, plans: Mapping[Method, LoadPlan], report: Callable[[str], None]) -> BenchSetup:
    """Loads the models of all methods by their plans, shared ones only once; sends progress to `report`."""
    target, runtime, acceptance = benchmark.target, benchmark.runtime, benchmark.acceptance
    preparation = BenchSetup()
    drafters: dict[tuple[object, ...], Drafter] = {}
    for method in benchmark.methods:
        report(f"loading {target} for {method.spec}")
        with on_cpus(method.placement.target_cpus):
            if method.target_key not in preparation.targets:
                preparation.targets[method.target_key] = load_planned(plans[method])
                if acceptance is not None:
                    without_ends(preparation.targets[method.target_key])
            loaded = preparation.targets[method.target_key]
            speculation = method.speculation
            key = (speculation.drafter, speculation.draft, method.target_key, method.placement)
            if key not in drafters:
                processes = drafter_processes(speculation, method.placement)
                drafters[key] = load_drafter_in(processes, speculation, loaded, plans[method])
            drafter = drafters[key]
        if method.name not in PEERS:
            preparation.engines[method] = method.engine(loaded, drafter)
        if is_llama_cpp(method.name):
            python = benchmark.llama_cpp_python
            settings = llama_cpp.worker_settings(method, target, loaded, python, report)
            preparation.answerers[method] = LlamaCppProcess(
                method.spec, python, settings, loaded, acceptance=acceptance
            )
        elif acceptance is not None and method.name not in PLAIN:
            preparation.answerers[method] = acceptance.answerer(preparation.engines[method])
        elif is_vllm(method.name):
            settings = worker_settings(method, target, loaded, compiled=runtime.compiled is not False)
            preparation.answerers[method] = VllmProcess(method.spec, benchmark.vllm_python, settings, loaded)
        else:
            preparation.answerers[method] = method.answerer(loaded, drafter)
        preparation.models[method] = models_of(loaded.lm, drafter)
    return preparation


def check(benchmark: Benchmark, num_prompts: int) -> None:
    """Raises ValueError for errors that show before anything is loaded."""
    methods, target = benchmark.methods, benchmark.target
    if not methods:
        raise ValueError("methods: name at least one")
    if launched() > 1:
        raise ValueError("a benchmark is one process: start it without torchrun, and place the drafter by draft_device")
    for index, method in enumerate(methods):
        if method in methods[:index]:
            same = methods[methods.index(method)].spec
            raise ValueError(f"methods: {same!r} and {method.spec!r} are the same, name each only once")
    check_batches(methods, num_prompts)
    for method in methods:
        drafter, draft = method.speculation.drafter, method.speculation.draft
        if draft is not None and is_shape(draft):
            shape_of(draft)  # which raises if there is no such shape
        if takes_draft(drafter):
            check_draft(drafter, draft, target)
    _check_sampling(methods, benchmark.sampling)
    _check_acceptance(methods, target, benchmark.acceptance)
    check_vllm(methods, benchmark.sampling, benchmark.runtime)
    check_llama_cpp(methods, target, benchmark.sampling, benchmark.runtime)


def _check_sampling(methods: list[Method], sampling: Sampling) -> None:
    """Raises ValueError for a setting that peers do not have, or have in another form."""
    changed = [name for name, usual in OWN_SAMPLING.items() if getattr(sampling, name) != usual]
    peers = [method.spec for method in methods if method.name in PEERS]
    if changed and peers:
        raise ValueError(f"{changed[0]} is for our own methods: leave it out, or {', '.join(peers)}")


def _check_acceptance(methods: list[Method], target: str, acceptance: SyntheticAcceptance | None) -> None:
    """Raises ValueError unless synthetic acceptance is given exactly where it is needed."""
    for method in methods:
        if method.name in PLAIN:
            continue
        if acceptance is not None:
            if not is_drafter(method.name) and not is_llama_cpp(method.name):
                raise ValueError(
                    f"method {method.spec!r} has verdicts of its own: leave it out of synthetic acceptance"
                )
            acceptance.check(method.spec, method.speculation)
            continue
        for name in (target, method.speculation.draft or ""):
            if is_shape(name):
                advice = "add --synthetic-acceptance, or measure hf and ar alone"
                raise ValueError(
                    f"method {method.spec!r}: {name!r} has random weights, whose drafts are accepted by chance only: "
                    + ("leave this peer out" if method.name in PEERS and not is_llama_cpp(method.name) else advice)
                )
