"""PPD, parallel prompt decoding: trained prompt tokens in the target's own pass predict the next tokens (Chen et al.
2024).

There is no draft model and no second pass; see `paradraft.models.prompt_tokens`.
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
from paradraft.traits import INSTEAD, Serving, Traits
from paradraft.tree import Tree

PLANS = "plans.json"
"""The file in a checkpoint's folder that `paradraft plan` writes."""
SIZE = 24
"""Nodes of a pass without a plan."""
MOST_NODES = 512
"""Most nodes of a pass."""
MOST_PROMPTS = 16
"""Most prompt tokens after a guess."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The fastest size on a machine.

    Args:
        machine: see `machine_of`.
        threads: most threads of a pass.
        temperature: of the measurement.
        size: most guesses and prompt tokens of a pass.
        accuracy: of the guesses, by depth and rank.
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
    """The key of a plan: name of the CPU or GPU, and dtype of the weights."""
    name = torch.cuda.get_device_name(lm.device) if lm.device.type == "cuda" else cpu_name()
    return f"{name}, {str(lm.model.dtype).removeprefix('torch.')}"


def plans_for(lm: CausalLM, plans: Sequence[Plan]) -> list[Plan]:
    """The plans for a model's machine whose number of threads is nearest to the model's."""
    own = [plan for plan in plans if plan.machine == machine_of(lm)]
    nearest = min((abs(plan.threads - lm.threads) for plan in own), default=0)
    return [plan for plan in own if abs(plan.threads - lm.threads) == nearest]


def read_plans(draft: str) -> list[Plan]:
    """The plans in a checkpoint's folder; none without a plan file."""
    file = Path(draft) / PLANS
    if not file.is_file():
        return []
    try:
        return [Plan(**plan) for plan in json.loads(file.read_bytes())]
    except (OSError, ValueError, TypeError):
        raise ValueError(f"{str(file)!r} is not what `paradraft plan` writes: delete it, then plan again") from None


def write_plan(draft: str, plan: Plan) -> Path:
    """Writes a plan to a checkpoint's folder; replaces one for the same machine, threads, rule and temperature."""
    file, made_for = Path(draft) / PLANS, ("machine", "threads", "rule", "temperature")
    others = [each for each in read_plans(draft) if any(getattr(each, key) != getattr(plan, key) for key in made_for)]
    text = json.dumps([asdict(each) for each in [*others, plan]], indent=2) + "\n"
    try:
        write_output(file, text.encode())
    except OSError as error:
        fix = f"give the size as ppd:size={plan.size}"
        raise ValueError(f"{str(file)!r} cannot be written ({error.strerror}): {fix}") from None
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
        """The largest possible draft."""
        planned = [] if self.size else read_plans(locate(self.draft, "ppd") if self.draft == POCKET else self.draft)
        size = self.size or max((plan.size for plan in planned), default=SIZE)
        return Tree(budget=size, max_depth=self.prompts)


class PpdDrafter(Drafter):
    """Lets the target predict, in each round, the draft of the next one.

    A row that joins, or that drafts again after rounds without a draft, begins in state 0. Of several plans for this
    machine those for the batch's rule are preferred, and of these the one whose temperature is nearest to that of the
    first request.
    """

    traits = Traits(branching="own", depends_on_rounds=True)
    serving = Serving(refusal=f"vLLM reads no prompt tokens in the target's own pass: {INSTEAD}")

    def __init__(self, target: Target, head: Head, config: Config) -> None:
        self.tree, self.max_k = config.tree, config.prompts
        self._sampling = target.lm.sampling
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
        self._shapes = self._planned(Drafting().rule, 0.0)

    @property
    def trees(self) -> tuple[StateTree, ...]:
        """The tree of each state."""
        return self._shapes.trees

    def use(self, trees: Sequence[StateTree]) -> None:
        """Replaces the planned trees; one per state."""
        self._choices = {None: self._prompts.shapes(trees)}
        self._plans = []
        self._shapes = self._choices[None]

    def _planned(self, rule: str, temperature: float) -> Shapes:
        plans = dict(enumerate(self._plans))
        for_rule = [index for index, plan in plans.items() if plan.rule == rule] or list(plans)
        best = min(for_rule, key=lambda index: abs(plans[index].temperature - temperature), default=None)
        if best not in self._choices:
            size, accuracy = SIZE, None
            if best is not None:
                size, accuracy = plans[best].size, plans[best].accuracy
            self._choices[best] = self._prompts.best(self._config.size or size, accuracy)
        return self._choices[best]

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """See `Drafter`."""
        self._sampler = Sampler(drafting=drafting, device=device, faster=self._sampling)
        self._rule = drafting.rule
        self._prompts.start()

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Adds rows in state 0."""
        if not self._prompts.states:
            self._shapes = self._planned(self._rule, requests[0].sampling.temperature)
        self._sampler.join(requests)
        self._prompts.join(len(requests))

    def commit(self, new: Committed) -> None:
        """Stores the target's states of the prompt tokens after the last accepted node."""
        self._sampler.commit(new)
        self._prompts.commit(new.probes)

    def keep(self, rows: Tensor) -> None:
        """See `Drafter`."""
        self._sampler.keep(rows)
        self._prompts.keep(rows)

    def close(self) -> None:
        """Lets the target's attention be as it was."""
        self._prompts.close()

    def candidates(self, count: int) -> Candidates:
        """The target's predictions of the next tokens, to the largest depth of any row."""
        return self._sampler.candidates(self._prompts.logits, 0, count)

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """Guesses for rows that draft, and prompt tokens for the next round."""
        device = self._prompts.logits.device
        if not any(lengths):
            return Draft.empty(len(lengths), device)
        return self._prompts.draft(self._shapes, self.candidates(self._shapes.ranks), upload(lengths, device) > 0)


def build(config: Config, target: Target, runtime: Runtime) -> PpdDrafter:
    """Loads the prompt tokens."""
    head = read_head(locate(config.draft, "ppd"), "ppd", target.lm.model.config)
    return PpdDrafter(target, head, config)
