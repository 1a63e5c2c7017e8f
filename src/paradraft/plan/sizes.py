"""`paradraft plan` for PPD: the best size of a pass on this machine, and the tree of its prompt tokens.

The accuracy of each rank is counted in the target's own answers to held-out prompts: rounds with prompt tokens after
the last committed token and no guesses, whose predictions are compared with the tokens that follow. Then rounds of
every size are timed, and the size with the most tokens per second is chosen (Chen et al. 2024, section 4,
"Hardware-awareness").

Two predictions are reported: accuracies multiplied along each path, and answers [replayed](replay.py). The second one
decides.

Shape letters: B rows of a batch, P prompt tokens, R ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from paradraft.bench.harness import measure, summarize
from paradraft.bench.report.folding import FoldingTable, columns
from paradraft.bench.spec import AR, Method
from paradraft.core import Committed, Drafting, Request
from paradraft.decode.generation import Generation
from paradraft.drafters import drafter_config, split_settings
from paradraft.drafters.none import NoDrafter
from paradraft.drafters.ppd import Plan, PpdDrafter, machine_of
from paradraft.engine.engine import Engine
from paradraft.engine.loader import check_memory, resolve
from paradraft.engine.request import requests_of
from paradraft.engine.speculation import Speculation
from paradraft.environment import describe_machine
from paradraft.formats.head import Head, TargetIdentity, read_checkpoint
from paradraft.models.architectures import head_size
from paradraft.models.names import POCKET
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.plan.costs import measure_rounds
from paradraft.plan.replay import RANKS, UNKNOWN, Ranks, accuracy_of, random_trees, replayed, static_trees
from paradraft.plan.steadiness import Watch
from paradraft.plan.task import PlannedAnswers
from paradraft.sampling.sparse_tree import StateTree, best_trees, rate
from paradraft.sources.load_plan import Checkpoint, LoadPlan
from paradraft.sources.loading import locate
from paradraft.sources.target_loading import load_planned
from paradraft.verify import warning_of

SIZES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Default sizes."""
RANDOM = 10
"""Number of random trees per size, whose mean is reported."""
Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class SizeTask(PlannedAnswers):
    """Sizes of passes in tokens, in rising order. At least two prompts: the first half calibrates, the other checks."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.prompts) < 2:
            raise ValueError("one prompt: half of the prompts calibrate and the others check, give at least 2")

    @property
    def calibrating(self) -> list[str]:
        """The prompts on whose answers right guesses are counted."""
        return self.prompts[: len(self.prompts) // 2]

    @property
    def checking(self) -> list[str]:
        """The prompts on which rounds are timed and predictions are checked."""
        return self.prompts[len(self.prompts) // 2 :]

    def of_size(self, size: int) -> Speculation:
        """The speculation with another size."""
        name, settings = split_settings(self.speculation.drafter)
        kept = [setting for setting in settings if not setting.startswith("size=")]
        return replace(self.speculation, drafter=":".join([name, f"size={size}", *kept]), tree=None, lengths="fixed")


class Observer(PpdDrafter):
    """Drafts nothing, and records its guesses of the next tokens."""

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """Clears all records."""
        super().start(drafting, device)
        self._requests: list[int] = []
        self._lengths: list[int] = []
        self.notes: dict[int, list[tuple[int, list[list[int]]]]] = {}
        """By request id and round: committed length, and guesses `[P, R]` of the tokens at the positions after it."""

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """See `Drafter`."""
        super().join(requests, prompt)
        self._requests += [request.id for request in requests]
        self._lengths += [len(request.tokens) for request in requests]

    def commit(self, new: Committed) -> None:
        """Records the guesses."""
        super().commit(new)
        self._lengths = [length + len(tokens) for length, tokens in zip(self._lengths, new.tokens, strict=True)]
        guesses = self.candidates(RANKS).tokens.tolist()
        for row, request in enumerate(self._requests):
            if self._prompts.states[row]:
                self.notes.setdefault(request, []).append((self._lengths[row], guesses[row]))

    def keep(self, rows: torch.Tensor) -> None:
        """See `Drafter`."""
        super().keep(rows)
        self._requests = [self._requests[row] for row in rows.tolist()]
        self._lengths = [self._lengths[row] for row in rows.tolist()]


def count_ranks(task: SizeTask, target: Target, head: Head, prompts: int) -> list[list[Ranks]]:
    """Ranks of the right guesses of the next `prompts` tokens, by answer and round (one per token except the last)."""
    size = prompts * head.setting("copies", int)
    observer = Observer(target, head, _config(task, size))
    observer.use([StateTree(guesses=(), prompts=(prompts,))] * (prompts + 1))
    engine = Engine(target, observer, task.of_size(size))
    answers: list[list[Ranks]] = []
    for request in requests_of(target, task.calibrating, task.max_new_tokens, task.sampling):
        batch = engine.new_batch()
        generation = Generation(request)
        with engine.in_round():
            batch.join([generation])
            while not batch.is_finished:
                batch.step()
        text = request.tokens + generation.tokens
        answers.append([])
        for length, guesses in observer.notes.get(request.id, ()):
            after = text[length : length + prompts]
            ranks = [_rank(guess, token) for guess, token in zip(guesses, after, strict=False)]
            if ranks:
                answers[-1].append((*ranks, *(UNKNOWN,) * (prompts - len(ranks))))
    return answers


def _rank(guesses: list[int], token: int) -> int:
    return guesses.index(token) if token in guesses else RANKS


def run_size_plan(task: SizeTask, runtime: Runtime, *, check_runs: int, report: Report) -> dict[str, Any]:
    """Calibrates, times, chooses, and optionally checks the choice.

    Args:
        check_runs: runs of the benchmark on other prompts that checks the choice; 0 for none.

    Returns:
        JSON values: `machine`, `arguments`, `accuracy`, `sizes` with their predictions, `chosen`, `plan` for
        `paradraft.drafters.ppd`, `checked`, and `steadiness` of the machine.

    Raises:
        ValueError: a model cannot be loaded, or the prompts do not fit into it.
    """
    config = _config(task, max(task.sizes))
    head = read_checkpoint(locate(task.speculation.draft or POCKET, "ppd"), "ppd")
    copies = head.setting("copies", int)
    load_plan = _load_plan(task, max(*task.sizes, config.prompts * copies), runtime)
    runtime = load_plan.runtime
    report(f"loading {task.target}")
    target = load_planned(load_plan)
    head.target.check(TargetIdentity.of(target.lm.model.config), head.name)
    sizes = [size for size in task.sizes if size >= copies]
    if not sizes:
        raise ValueError(f"sizes up to {max(task.sizes)}: each prompt token has {copies} copies, plan larger ones")
    plain = Engine(target, NoDrafter(), Speculation())
    watch = Watch(plain, task.prompts[0], task.sampling)
    watch.look()
    report("counting right guesses")
    answers = count_ranks(task, target, head, config.prompts)
    accuracy = accuracy_of(answers)
    trees = {size: best_trees(accuracy, size, prompts=config.prompts, copies=copies) for size in sizes}
    drafters = {size: PpdDrafter(target, head, replace(config, size=size)) for size in sizes}
    for size, drafter in drafters.items():
        drafter.use(trees[size])
    plain_s, seconds = _time_rounds(task, plain, drafters, config.prompts, report)
    watch.look()
    rows = [_row(trees[size], size, config.prompts, copies, answers, seconds[size], plain_s) for size in sizes]
    best = max(rows, key=lambda row: row["speedup"])
    chosen = best["size"]
    plan = Plan(
        machine=machine_of(target.lm), threads=target.lm.threads, rule=task.speculation.verify,
        temperature=task.sampling.temperature, size=chosen, accuracy=accuracy,
    )  # fmt: skip
    checked = _check(task, target, drafters[chosen], best, runtime, check_runs, report) if check_runs else None
    watch.look()
    return {
        "machine": describe_machine(runtime.device),
        "arguments": task.as_json(runtime),
        "memory_bytes": memory_of(target, head, chosen),
        "places": sum(map(len, answers)),
        "accuracy": accuracy,
        "plain_round_ms": 1e3 * plain_s,
        "sizes": rows,
        "chosen": chosen,
        "speedup": best["speedup"],
        "lossless": warning_of(task.speculation.verify) is None,
        "plan": asdict(plan),
        "checked": checked,
        "steadiness": watch.as_json(),
    }


def _time_rounds(
    task: SizeTask, plain: Engine, drafters: dict[int, PpdDrafter], prompts: int, report: Report
) -> tuple[float, dict[int, float]]:
    """Seconds of a plain round, and of rounds by size."""
    engines: dict[str, tuple[Engine, tuple[int, ...]]] = {"plain": (plain, (0,))}
    for size, drafter in drafters.items():
        engines[str(size)] = Engine(plain.target, drafter, task.of_size(size)), (prompts,)
    costs = measure_rounds(
        engines, task.checking, batch=1, max_new_tokens=task.max_new_tokens, sampling=task.sampling, report=report
    )
    return costs["plain"].rounds[0].total_s, {size: costs[str(size)].rounds[prompts].total_s for size in drafters}


def _row(
    trees: list[StateTree],
    size: int,
    prompts: int,
    copies: int,
    answers: Sequence[Sequence[Ranks]],
    round_s: float,
    plain_s: float,
) -> dict[str, Any]:
    """Trees and predictions of a size, as JSON values."""
    accuracy, length = accuracy_of(answers), replayed(trees, answers)
    return {
        "size": size,
        "guesses": [len(tree.guesses) for tree in trees],
        "prompts": [sum(tree.prompts) for tree in trees],
        "tokens_per_pass": length,
        "tokens_per_pass_if_independent": rate(trees, accuracy),
        "tokens_per_pass_static": replayed(static_trees(accuracy, size, prompts, copies), answers),
        "tokens_per_pass_random": statistics.mean(
            replayed(random_trees(size, prompts, copies, seed), answers) for seed in range(RANDOM)
        ),
        "round_ms": 1e3 * round_s,
        "speedup": length / round_s * plain_s,
    }


def memory_of(target: Target, head: Head, size: int) -> dict[str, int]:
    """Bytes of the model, of the prompt tokens in its dtype, and of a pass's additions to plain decoding.

    The additions are keys and values, and peak activations: float32, at most those of a layer and the logits.
    """
    model = target.lm.model
    config, width = model.config, model.dtype.itemsize
    prompts = sum(weight.numel() for name, weight in head.weights.items() if name.startswith("prompts.")) * width
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size(config) * width
    attention = (config.num_attention_heads + 2 * config.num_key_value_heads) * head_size(config)
    layer = 2 * config.hidden_size + attention + 2 * config.intermediate_size
    return {
        "model": sum(weight.numel() * weight.dtype.itemsize for weight in model.parameters()),
        "prompt_tokens": prompts,
        "keys_and_values": size * cached,
        "activations": size * 4 * (layer + target.lm.vocab_size),
    }


def _load_plan(task: SizeTask, size: int, runtime: Runtime) -> LoadPlan:
    plan = resolve(Checkpoint.find(task.target), [task.of_size(size)], runtime)
    check_memory(plan)
    return plan


def _config(task: SizeTask, size: int) -> Any:
    return drafter_config(task.of_size(size).drafter, task.speculation.draft)


def _check(
    task: SizeTask,
    target: Target,
    drafter: PpdDrafter,
    best: dict[str, Any],
    runtime: Runtime,
    runs: int,
    report: Report,
) -> dict[str, float]:
    """Benchmarks the choice on the other prompts, and the relative errors of its predictions."""
    plain = Method.parse(f"{AR}:batch=1", Speculation(), dtype=runtime.dtype)
    speculation = task.of_size(best["size"])
    chosen = Method.parse(f"{speculation.drafter}:batch=1", speculation, dtype=runtime.dtype)
    answerers = {plain: plain.answerer(target, NoDrafter()), chosen: chosen.answerer(target, drafter)}
    measured = measure(
        answerers, task.checking, max_new_tokens=task.max_new_tokens, sampling=task.sampling, runs=runs,
        device=target.lm.device, report=report,
    )  # fmt: skip
    speeds = {result.method: statistics.median(result.tokens_per_s) for result in measured}
    length = summarize(measured, task.sampling)[chosen.spec]["acceptance_length"]
    return {
        "tokens_per_pass": length,
        "speedup": speeds[chosen] / speeds[plain],
        "length_error": best["tokens_per_pass"] / length - 1,
        "speedup_error": best["speedup"] / (speeds[chosen] / speeds[plain]) - 1,
    }


def table(result: dict[str, Any], title: str) -> FoldingTable:
    """A table of all sizes, with the chosen one marked."""
    legend = (
        "size: nodes of a pass, > the fastest · length: tokens per pass of the target, predicted; if ranks were "
        "independent; static: with as many prompt tokens after every guess; random: in the mean of random trees · "
        "round: ms · vs AR+: predicted, against plain decoding"
    )
    names = ("guesses", "prompt tokens", "length", "if independent", "static", "random", "round", "vs AR+")
    rows = FoldingTable(title, columns("size", *names), legend=[legend])
    for row in result["sizes"]:
        rows.add_row(
            ("> " if row["size"] == result["chosen"] else "  ") + str(row["size"]),
            "/".join(map(str, row["guesses"])),
            "/".join(map(str, row["prompts"])),
            f"{row['tokens_per_pass']:.2f}",
            f"{row['tokens_per_pass_if_independent']:.2f}",
            f"{row['tokens_per_pass_static']:.2f}",
            f"{row['tokens_per_pass_random']:.2f}",
            f"{row['round_ms']:.2f}",
            f"{row['speedup']:.2f}x",
        )
    return rows
