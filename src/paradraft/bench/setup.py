"""What a benchmark runs with: the prompts, the models, each loaded once, and what answers by each method."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paradraft.bench.baselines import HF, LLAMA_CPP, PEERS, is_llama_cpp, is_vllm, llama_cpp
from paradraft.bench.baselines.llama_cpp import LlamaCppProcess, check_llama_cpp
from paradraft.bench.baselines.vllm import VllmProcess, check_vllm, what_to_load
from paradraft.bench.harness import check_batches
from paradraft.bench.result import Answerer
from paradraft.bench.roofline import models_of
from paradraft.bench.spec import AR, Benchmark, Method, TargetKey
from paradraft.bench.summary import OWN_SAMPLING
from paradraft.bench.synthetic import SyntheticAcceptance, without_ends
from paradraft.core import Drafter
from paradraft.data.prompt_source import DEFAULT, PIPE, RANDOM
from paradraft.data.prompts import as_conversations, first_prompts, texts_of
from paradraft.decode.pearl.channel import launched
from paradraft.drafters import check_draft, drafter_names, takes_draft
from paradraft.drafters.none import NoDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.loader import drafter_processes, load_drafter_in, runtime_on
from paradraft.engine.speculation import Speculation
from paradraft.models.causal_lm import CausalLM
from paradraft.models.names import is_shape
from paradraft.models.target import Target
from paradraft.placement import on_cpus
from paradraft.sampling_params import Sampling
from paradraft.sources.loading import locate, pocket_folder, tokenizer_for
from paradraft.sources.presets import shape_of
from paradraft.sources.target_loading import load_target

PLAIN = (HF, AR, LLAMA_CPP)
"""Methods that draft nothing, and can be timed with any weights."""
USUAL = 16
"""Prompts that a benchmark asks by default; all of a file that has fewer."""
Answers = Callable[[list[str], int], list[str]]
"""The target's answers to prompts, with at most so many tokens each."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts that all methods answer.

    Args:
        count: how many there are.
        max_new_tokens: most tokens of an answer.
        prompts: what they are, given what asks the target; some hold its own answers to others.
        name: of the task, if it is one.
        source: where the prompts are from, see `paradraft.data.prompts.counted`; None for a task.
    """

    count: int
    max_new_tokens: int
    prompts: Callable[[Answers], list[str]]
    name: str = ""
    source: str | None = None

    @classmethod
    def of(cls, prompts: list[str], max_new_tokens: int, source: str | None = None) -> Workload:
        """Texts that are known."""
        return cls(count=len(prompts), max_new_tokens=max_new_tokens, prompts=lambda _: prompts, source=source)


@dataclass(frozen=True, kw_only=True)
class Chat:
    """How prompts are asked in a chat.

    Args:
        system: the first message; None for none.
        variables: of the chat template.
    """

    system: str | None = None
    variables: dict[str, Any] = field(default_factory=dict)


def held_out_prompts(
    number: int | None,
    file: Path | None,
    target: str,
    tokenizer: str | None = None,
    *,
    usual: int = USUAL,
    chat: Chat | None = None,
) -> list[str]:
    """The first prompts of a file, conversations as the target reads them; without a file, of the pocket family's
    held-out modules.

    Args:
        number: how many; None for `usual`, or for all where the file has fewer.
        file: see `paradraft.data.prompts`.
        target: who reads them.
        tokenizer: its tokenizer, if it is not the one that comes with it.
        usual: how many where the user has not said it.
        chat: how prompts are asked in a chat; None continues them as they are.

    Raises:
        ValueError: the file cannot be read or has fewer prompts, or conversations are to be asked of a target without
            a chat template.
    """
    records = first_prompts(file or pocket_folder("prompts.jsonl"), number, usual)
    records = records if chat is None else as_conversations(records, chat.system)
    variables = {} if chat is None else chat.variables
    return texts_of(records, lambda: tokenizer_for(locate(target, "target"), tokenizer), variables)


def source_of(file: Path | None, target: str) -> str:
    """Where the prompts of a run are from: a file, random tokens for a shape, or those of the pocket family."""
    if is_shape(target):
        return RANDOM
    return DEFAULT if file is None else PIPE if file.is_fifo() else str(file)


def prompts_for(
    target: str,
    number: int | None,
    *,
    tokens: int,
    file: Path | None,
    tokenizer: str | None = None,
    chat: Chat | None = None,
) -> list[str]:
    """The prompts of a run: random ones of so many tokens for a shape, which reads no texts, else those of a file.

    Without a number there are `USUAL`, or fewer where the file is shorter.

    Raises:
        ValueError: there is no such shape or file, or a shape is to read a file or a chat.
    """
    if not is_shape(target):
        return held_out_prompts(number, file, target, tokenizer, chat=chat)
    found = random_prompts(target, USUAL if number is None else number, tokens)
    if file is not None:
        raise ValueError(f"--prompts {file}: {target!r} reads no texts, its prompts are random: give --prompt-tokens")
    if chat is not None:
        raise ValueError(f"--chat: {target!r} reads no texts, leave it out")
    return found


def random_prompts(shape: str, number: int, tokens: int) -> list[str]:
    """Prompts for a shape: random token ids, written as its tokenizer reads them.

    Raises:
        ValueError: there is no such shape, or a number is below 1.

    >>> random_prompts("shape:tiny-target", 2, 3)
    ['49 53 5', '33 65 62']
    """
    if number < 1 or tokens < 1:
        raise ValueError(f"num_prompts={number}, prompt_tokens={tokens}: use at least 1")
    chooser, ids = random.Random(0), shape_of(shape).mask_id
    return [" ".join(str(chooser.randrange(ids)) for _ in range(tokens)) for _ in range(number)]


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What methods run with.

    Args:
        answerers: what answers by each method.
        models: the models of each method, by their part.
        engines: of the methods that are ours.
        targets: the target in each dtype, and for each set of CPUs; see `Method.target_key`.
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
        """What the target says, without a drafter, in the dtype and the batches of a method."""
        engine = Engine(self.targets[method.target_key], NoDrafter(), Speculation(k=1))

        def answer(prompts: list[str], max_new_tokens: int) -> list[str]:
            report(f"asking for {len(prompts)} answers that later prompts quote")
            found = engine.generate(prompts, max_new_tokens=max_new_tokens, sampling=sampling, batch_size=method.batch)
            return [one.text for one in found]

        return answer


def prepare(benchmark: Benchmark, report: Callable[[str], None]) -> Preparation:
    """Loads what methods need, models that they share only once; tells `report` what is going on.

    Raises:
        ValueError: a model cannot be loaded.
    """
    target, runtime, acceptance = benchmark.target, benchmark.runtime, benchmark.acceptance
    found = Preparation()
    drafters: dict[tuple[object, ...], Drafter] = {}
    for method in benchmark.methods:
        report(f"loading {target} for {method.spec}")
        of_dtype = replace(runtime, dtype=method.loaded_dtype)
        with on_cpus(method.placement.target_cpus):
            place = method.placement
            on_devices = runtime_on(of_dtype, place)
            if method.target_key not in found.targets:
                found.targets[method.target_key] = load_target(target, on_devices, place.target_stages or ())
                if acceptance is not None:
                    without_ends(found.targets[method.target_key])
            loaded = found.targets[method.target_key]
            speculation = method.speculation
            key = (speculation.drafter, speculation.draft, method.target_key, method.placement)
            if key not in drafters:
                processes = drafter_processes(speculation, place)
                drafters[key] = load_drafter_in(processes, speculation, loaded, on_devices)
            drafter = drafters[key]
        if method.name not in PEERS:
            found.engines[method] = method.engine(loaded, drafter)
        if is_llama_cpp(method.name):
            python = benchmark.llama_cpp_python
            given = llama_cpp.what_to_load(method, target, loaded, python, report)
            found.answerers[method] = LlamaCppProcess(method.spec, python, given, loaded, acceptance=acceptance)
        elif acceptance is not None and method.name not in PLAIN:
            found.answerers[method] = acceptance.answerer(found.engines[method])
        elif is_vllm(method.name):
            given = what_to_load(method, target, loaded, compiled=runtime.compiled is not False)
            found.answerers[method] = VllmProcess(method.spec, benchmark.vllm_python, given, loaded)
        else:
            found.answerers[method] = method.answerer(loaded, drafter)
        found.models[method] = models_of(loaded.lm, drafter)
    return found


def check(benchmark: Benchmark, num_prompts: int) -> None:
    """Raises ValueError for what can be known to be wrong before anything is loaded."""
    methods, target = benchmark.methods, benchmark.target
    if not methods:
        raise ValueError("methods: name at least one")
    if launched() > 1:
        raise ValueError("a benchmark is one process: start it without torchrun, and place the drafter by draft_device")
    for place, method in enumerate(methods):
        if method in methods[:place]:
            same = methods[methods.index(method)].spec
            raise ValueError(f"methods: {same!r} and {method.spec!r} are the same, name each only once")
    check_batches(methods, num_prompts)
    for method in methods:
        replace(benchmark.runtime, dtype=method.loaded_dtype)  # it may be one that cannot be had here
        drafter, draft = method.speculation.drafter, method.speculation.draft
        if draft is not None and is_shape(draft):
            shape_of(draft)  # its name may be misspelt
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
    """Raises ValueError unless it is clear what each method will accept."""
    for method in methods:
        if method.name in PLAIN:
            continue
        if acceptance is not None:
            if method.name not in drafter_names() and not is_llama_cpp(method.name):
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
