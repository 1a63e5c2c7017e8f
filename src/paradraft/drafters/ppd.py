"""PPD: trained prompt tokens in the pass of a target let it guess itself what comes next (Chen et al. 2024).

There is no draft model and no second pass: `paradraft.models.prompt_tokens` says what the target reads.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from paradraft.core import Committed, Draft, Drafter, Drafting, Request
from paradraft.environment import cpu_name
from paradraft.files import write_output
from paradraft.formats.head import Head, read_head
from paradraft.models.causal_lm import CausalLM
from paradraft.models.names import POCKET
from paradraft.models.prompt_tokens import PromptTokens, Shapes
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.ragged import upload
from paradraft.sampling.candidates import Candidates
from paradraft.sampling.sampler import Sampler
from paradraft.sampling.sparse_tree import StateTree, is_accuracy
from paradraft.sources.loading import locate
from paradraft.tree import Tree

PLANS = "plans.json"
"""The file beside a checkpoint that `paradraft plan` writes."""
SIZE = 24
"""Of a pass where nothing is planned."""
MOST_NODES = 512
"""Of a pass."""
MOST_PROMPTS = 16
"""Prompt tokens after a guess."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was found to be fastest on a machine.

    Args:
        machine: what `machine_of` says.
        threads: most threads of a pass.
        rule: the verification rule.
        temperature: at which guesses were counted.
        size: of a pass.
        accuracy: how often guesses are right, by depth and rank.
    """

    machine: str
    threads: int
    rule: str
    temperature: float
    size: int
    accuracy: list[list[float]]

    def __post_init__(self) -> None:
        are_texts = isinstance(self.machine, str) and isinstance(self.rule, str)
        are_numbers = type(self.threads) is type(self.size) is int and isinstance(self.temperature, int | float)
        if not (are_texts and are_numbers and 1 <= self.size <= MOST_NODES and is_accuracy(self.accuracy)):
            raise TypeError(f"a plan of {self}")


def machine_of(lm: CausalLM) -> str:
    """What a plan is for: the CPU or GPU, and the numbers that weights are stored in."""
    name = torch.cuda.get_device_name(lm.device) if lm.device.type == "cuda" else cpu_name()
    return f"{name}, {str(lm.model.dtype).removeprefix('torch.')}"


def plans_for(lm: CausalLM, plans: Sequence[Plan]) -> list[Plan]:
    """The plans for the machine that a model is on, of those with the number of threads next to its own."""
    own = [plan for plan in plans if plan.machine == machine_of(lm)]
    nearest = min((abs(plan.threads - lm.threads) for plan in own), default=0)
    return [plan for plan in own if abs(plan.threads - lm.threads) == nearest]


def read_plans(draft: str) -> list[Plan]:
    """The plans beside a checkpoint; none if nobody has planned.

    Raises:
        ValueError: they cannot be read.
    """
    file = Path(draft) / PLANS
    if not file.is_file():
        return []
    try:
        return [Plan(**plan) for plan in json.loads(file.read_bytes())]
    except (OSError, ValueError, TypeError):
        raise ValueError(f"{str(file)!r} is not what `paradraft plan` writes: delete it, then plan again") from None


def write_plan(draft: str, plan: Plan) -> Path:
    """Adds a plan to those beside a checkpoint, in place of one for the same machine, threads, rule and temperature.

    Raises:
        ValueError: the plans that are there cannot be read, or the folder cannot be written.
    """
    file, made_for = Path(draft) / PLANS, ("machine", "threads", "rule", "temperature")
    others = [each for each in read_plans(draft) if any(getattr(each, key) != getattr(plan, key) for key in made_for)]
    text = json.dumps([asdict(each) for each in [*others, plan]], indent=2) + "\n"
    try:
        write_output(file, text.encode())
    except OSError as error:
        told = f"give the size as ppd:size={plan.size}"
        raise ValueError(f"{str(file)!r} cannot be written ({error.strerror}): {told}") from None
    return file


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the drafter; they decide how large a draft is, in place of a tree and of K, which is `prompts`.

    Args:
        draft: Hugging Face id or folder of the prompt tokens, see `paradraft.formats.head`; "pocket" are the shipped
            ones.
        size: most guesses and prompt tokens of a pass; None takes what `paradraft plan` found best on this machine, or
            `SIZE`.
        prompts: most prompt tokens after a guess, and so most tokens that are guessed in a row.

    Raises:
        ValueError: a number is out of range.
    """

    draft: str
    size: int | None = None
    prompts: int = 3

    def __post_init__(self) -> None:
        for name, most in (("size", MOST_NODES), ("prompts", MOST_PROMPTS)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise ValueError(f"{name}={value}: use 1 to {most}")

    @property
    def tree(self) -> Tree:
        """The largest draft there may be."""
        planned = [] if self.size else read_plans(locate(self.draft, "ppd") if self.draft == POCKET else self.draft)
        size = self.size or max((plan.size for plan in planned), default=SIZE)
        return Tree(budget=size, max_depth=self.prompts)


class PpdDrafter(Drafter):
    """Has the target guess, round by round, what it will be asked in the next.

    A row that joins, and one that comes back after rounds without a draft, begins in state 0. Of several plans for this
    machine, one for the batch's rule is taken, and of these the one with the temperature next to that of its first
    request.

    Args:
        target: whose pass the prompt tokens ride in.
        head: the checkpoint, see `PromptTokens`.
        config: the size of the drafts.

    Raises:
        ValueError: the checkpoint is damaged, or has too few prompt tokens.
    """

    branching = "own"
    depends_on_rounds = True

    def __init__(self, target: Target, head: Head, config: Config) -> None:
        self.tree, self.max_k = config.tree, config.prompts
        self._draw = target.lm.draw
        self._config, self._prompts = config, PromptTokens(target.lm, head, config.prompts)
        plans = [] if config.size else plans_for(target.lm, read_plans(head.name))
        self._plans = [plan for plan in plans if len(plan.accuracy) >= config.prompts]
        if config.size is None and not self._plans:
            fewer = max((len(plan.accuracy) for plan in plans), default=None)
            planned = "nothing is planned" if fewer is None else f"no more than ppd:prompts={fewer} is planned"
            warnings.warn(
                f"{planned} for draft {head.name!r} on this machine: passes have {SIZE} nodes; "
                "`paradraft plan --drafter ppd` finds the best size, ppd:size= sets it",
                stacklevel=2,
            )
        self._choices: dict[int | None, Shapes] = {}
        self._shapes = self._planned("match", 0.0)

    @property
    def trees(self) -> tuple[StateTree, ...]:
        """What is read, by state."""
        return self._shapes.trees

    def use(self, trees: Sequence[StateTree]) -> None:
        """Reads these trees, one for each state, whatever was planned."""
        self._choices = {None: self._prompts.shapes(trees)}
        self._plans = []
        self._shapes = self._choices[None]

    def _planned(self, rule: str, temperature: float) -> Shapes:
        """The trees for requests like these."""
        plans = dict(enumerate(self._plans))
        for_rule = [number for number, plan in plans.items() if plan.rule == rule] or list(plans)
        best = min(for_rule, key=lambda number: abs(plans[number].temperature - temperature), default=None)
        if best not in self._choices:
            size, accuracy = SIZE, None
            if best is not None:
                size, accuracy = plans[best].size, plans[best].accuracy
            self._choices[best] = self._prompts.best(self._config.size or size, accuracy)
        return self._choices[best]

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """Forgets all rows."""
        self._sampler = Sampler(drafting=drafting, device=device, faster=self._draw)
        self._rule = drafting.rule
        self._prompts.start()

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Nothing is known of what comes next."""
        if not self._prompts.states:
            self._shapes = self._planned(self._rule, requests[0].sampling.temperature)
        self._sampler.join(requests)
        self._prompts.join(len(requests))

    def commit(self, new: Committed) -> None:
        """Takes in what the target made of the prompt tokens after the last accepted one."""
        self._sampler.commit(new)
        self._prompts.commit(new.probes)

    def keep(self, rows: Tensor) -> None:
        """Forgets the other rows."""
        self._sampler.keep(rows)
        self._prompts.keep(rows)

    def candidates(self, number: int) -> Candidates:
        """What the target guessed of the next places, as far as it did in any row."""
        return self._sampler.candidates(self._prompts.logits, 0, number)

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """Guesses for rows that want some, and prompt tokens for the next round."""
        device = self._prompts.logits.device
        if not any(lengths):
            return Draft.empty(len(lengths), device)
        return self._prompts.draft(self._shapes, self.candidates(self._shapes.ranks), upload(lengths, device) > 0)


def build(config: Config, target: Target, runtime: Runtime) -> PpdDrafter:
    """Loads the prompt tokens into the target's passes.

    Raises:
        ValueError: there are none, they were trained for another target, or they are fewer than wanted.
    """
    head = read_head(locate(config.draft, "ppd"), "ppd", target.lm.model.config)
    return PpdDrafter(target, head, config)
