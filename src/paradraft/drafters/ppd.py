"""PPD: trained prompt tokens in the pass of a target let it guess itself what comes next (Chen et al. 2024).

There is no draft model and no second pass. The target reads the last committed token, a tree of guesses, and prompt
tokens after some of them (`paradraft.sampling.sparse_tree` says where). What it makes of the i-th prompt token after
the last accepted guess is a guess of the i-th token after the one that it adds itself. A prompt token may have several
embeddings, its *copies*, each of which sees the copies of its own number alone; their states are averaged.

Shape letters: B rows of a batch, S states, N guesses, Q prompt tokens of a pass or after a node, each copy counted,
P most of them in a chain, E copies, D hidden size, V vocabulary.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from paradraft.core import Committed, Draft, Drafter, Drafting, Probes, Request
from paradraft.environment import cpu_name
from paradraft.files import write_output
from paradraft.formats.head import Head, read_head
from paradraft.models.causal_lm import CausalLM
from paradraft.models.loading import POCKET, locate
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.ragged import upload
from paradraft.sampling.candidates import Candidates
from paradraft.sampling.sampler import Sampler
from paradraft.sampling.sparse_tree import StateTree, best_trees
from paradraft.tree import ABSENT, Tree

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
        rule: the verification rule.
        temperature: at which guesses were counted.
        size: of a pass.
        accuracy: how often guesses are right, by depth and rank.
    """

    machine: str
    rule: str
    temperature: float
    size: int
    accuracy: list[list[float]]

    def __post_init__(self) -> None:
        if not (type(self.size) is int and self.size > 0 and isinstance(self.temperature, int | float)):
            raise TypeError(f"size={self.size!r}, temperature={self.temperature!r}")
        if not is_accuracy(self.accuracy):
            raise TypeError("accuracy is no table of shares")


def machine_of(lm: CausalLM) -> str:
    """What a plan is for: the CPU or GPU, how many threads, and the numbers that weights are stored in."""
    name = torch.cuda.get_device_name(lm.device) if lm.device.type == "cuda" else cpu_name()
    return f"{name}, {lm.threads} threads, {str(lm.model.dtype).removeprefix('torch.')}"


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
    except (OSError, ValueError, TypeError) as error:
        told = str(error).splitlines()[0]
        raise ValueError(f"{str(file)!r} cannot be read ({told}): delete it, or plan again") from None


def write_plan(draft: str, plan: Plan) -> Path:
    """Adds a plan to those beside a checkpoint, in place of one for the same machine, rule and temperature.

    Raises:
        ValueError: the plans that are there cannot be read, or the folder cannot be written.
    """
    file, key = Path(draft) / PLANS, (plan.machine, plan.rule, plan.temperature)
    others = [each for each in read_plans(draft) if (each.machine, each.rule, each.temperature) != key]
    text = json.dumps([asdict(each) for each in [*others, plan]], indent=2) + "\n"
    try:
        write_output(file, text.encode())
    except OSError as error:
        raise ValueError(f"{str(file)!r} cannot be written ({error.strerror}): give the size as ppd:size=") from None
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


class Shapes:
    """The trees of all states as tensors, `[S, …]`, filled up with `ABSENT` to the largest.

    Args:
        trees: by state.
        ids: `[P, E]` of the prompt tokens.
        device: of the tensors.
    """

    def __init__(self, trees: Sequence[StateTree], ids: Tensor, device: torch.device) -> None:
        self.trees = tuple(trees)

        def filled(rows: list[list[int]]) -> Tensor:
            width = max(map(len, rows))
            return upload([row + [ABSENT] * (width - len(row)) for row in rows], device).view(len(rows), width)

        self.depths_SN = filled([[len(path) - 1 for path in tree.guesses] for tree in trees])
        self.ranks_SN = filled([[path[-1] for path in tree.guesses] for tree in trees])
        places = [{path: node for node, path in enumerate(tree.guesses)} for tree in trees]
        self.parents_SN = filled([[place.get(path[:-1], ABSENT) for path in place] for place in places])
        probes = [
            [
                (node - 1, number, copy)
                for node, most in enumerate(tree.prompts)
                for copy in range(ids.shape[1])
                for number in range(most)
            ]
            for tree in trees
        ]
        self.nodes_SQ = filled([[node for node, _, _ in row] for row in probes])
        self.before_SQ = filled(
            [[at - 1 if number else ABSENT for at, (_, number, _) in enumerate(row)] for row in probes]
        )
        self.tokens_SQ = filled([[int(ids[number, copy]) for _, number, copy in row] for row in probes])
        self.guesses, self.probes = [len(tree.guesses) for tree in trees], list(map(len, probes))
        self.ranks = max((path[-1] + 1 for tree in trees for path in tree.guesses), default=1)


class PpdDrafter(Drafter):
    """Has the target guess, round by round, what it will be asked in the next.

    Each row is in a state: how many prompt tokens the target has read after its last accepted token. A row that joins,
    and one that comes back after rounds without a draft, begins in state 0. Of several plans for this machine, one for
    the batch's rule is taken, and of these the one with the temperature next to that of its first request.

    Args:
        target: whose pass the prompt tokens ride in.
        head: the checkpoint: "prompts.embeddings" `[trained, E, D]`; "prompts.weights" `[trained, E]` if they are not
            averaged; in its config "accuracy", see `paradraft.sampling.sparse_tree.Accuracy`.
        config: the size of the drafts.

    Raises:
        ValueError: the checkpoint is damaged, or has too few prompt tokens.
    """

    branching = "own"
    depends_on_rounds = True

    def __init__(self, target: Target, head: Head, config: Config) -> None:
        lm = target.lm
        if head.config.get("is_decoded") is not True:
            raise ValueError(
                f"draft {head.name!r} was trained with settings that are only measured: train it with others"
            )
        trained, copies = head.setting("prompt_tokens", int), head.setting("copies", int)
        if config.prompts > trained:
            raise ValueError(
                f"prompts={config.prompts}: draft {head.name!r} has {trained} prompt tokens, use at most {trained}"
            )
        self.tree, self.max_k = config.tree, config.prompts
        self._config, self._copies, self._lm = config, copies, lm
        if config.size is not None and config.size < copies:
            raise ValueError(f"size={config.size}: each prompt token has {copies} copies, use at least {copies}")
        accuracy = head.config.get("accuracy")
        if not is_accuracy(accuracy, trained):
            raise ValueError(f"draft {head.name!r}: accuracy in its config.json is no table of shares: train it again")
        self._accuracy = accuracy
        embeddings = head.tensor("prompts.embeddings", trained, copies, lm.model.config.hidden_size)
        embeddings = embeddings[: config.prompts]
        self._weights_PE = torch.full((config.prompts, copies), 1 / copies, device=lm.device)
        if "prompts.weights" in head.weights:
            self._weights_PE = head.tensor("prompts.weights", trained, copies)[: config.prompts].to(lm.device).float()
        own = machine_of(lm)
        self._plans = [
            plan for plan in read_plans(head.name) if plan.machine == own and len(plan.accuracy) >= config.prompts
        ]
        if config.size is None and not self._plans:
            warnings.warn(
                f"nothing is planned for draft {head.name!r} on this machine: passes have {max(SIZE, copies)} nodes; "
                "`paradraft plan --drafter ppd` finds the best size, ppd:size= sets it",
                stacklevel=2,
            )
        ids = lm.add_embeddings(embeddings.flatten(0, 1))
        self._ids = torch.tensor(ids).view(config.prompts, copies)
        self._choices: dict[int | None, Shapes] = {}
        self._shapes = self._planned("match", 0.0)

    @property
    def trees(self) -> tuple[StateTree, ...]:
        """What is read, by state."""
        return self._shapes.trees

    def use(self, trees: Sequence[StateTree]) -> None:
        """Reads these trees, one for each state, whatever was planned."""
        self._choices = {None: Shapes(trees, self._ids, self._lm.device)}
        self._plans = []
        self._shapes = self._choices[None]

    def _planned(self, rule: str, temperature: float) -> Shapes:
        """The trees for requests like these."""
        plans = dict(enumerate(self._plans))
        for_rule = [number for number, plan in plans.items() if plan.rule == rule] or list(plans)
        best = min(for_rule, key=lambda number: abs(plans[number].temperature - temperature), default=None)
        if best not in self._choices:
            size = self._config.size or (max(SIZE, self._copies) if best is None else plans[best].size)
            accuracy = self._accuracy if best is None else plans[best].accuracy
            trees = best_trees(accuracy, size, prompts=self._config.prompts, copies=self._copies)
            self._choices[best] = Shapes(trees, self._ids, self._lm.device)
        return self._choices[best]

    def start(self, drafting: Drafting, device: torch.device) -> None:
        """Forgets all rows."""
        self._sampler, self._rule = Sampler(drafting=drafting, device=device), drafting.rule
        self._states: list[int] = []
        dtype = torch.float64 if self._lm.model.dtype == torch.float64 else torch.float32
        self._logits_BPV = torch.empty(0, len(self._weights_PE), self._lm.vocab_size, dtype=dtype, device=device)

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        """Nothing is known of what comes next."""
        if not self._states:
            self._shapes = self._planned(self._rule, requests[0].sampling.temperature)
        self._sampler.join(requests)
        self._states += [0] * len(requests)
        new = self._logits_BPV.new_zeros(len(requests), *self._logits_BPV.shape[1:])
        self._logits_BPV = torch.cat([self._logits_BPV, new])

    def commit(self, new: Committed) -> None:
        """Takes in what the target made of the prompt tokens after the last accepted one."""
        self._sampler.commit(new)
        if new.probes is None or not new.probes[0].shape[1]:
            self._states = [0] * len(self._states)
            return
        tokens_BQ, states_BQD = new.probes
        P, E = self._weights_PE.shape
        which_BQ = tokens_BQ - int(self._ids[0, 0])
        self._states = ((tokens_BQ != ABSENT).sum(1) // E).tolist()
        # States are averaged before the head, which is linear.
        mixing_BQP = torch.nn.functional.one_hot(which_BQ.clamp(min=0) // E, P) * (tokens_BQ != ABSENT)[:, :, None]
        weights_BQ = self._weights_PE.flatten()[which_BQ.clamp(min=0)]
        mixed_BPD = (mixing_BQP * weights_BQ[:, :, None]).to(states_BQD.dtype).mT @ states_BQD
        depth = max(self._states)
        self._logits_BPV[:, :depth] = self._lm.head(mixed_BPD[:, :depth]).to(self._logits_BPV.dtype)

    def keep(self, rows: Tensor) -> None:
        """Forgets the other rows."""
        self._sampler.keep(rows)
        self._states = [self._states[row] for row in rows.tolist()]
        self._logits_BPV = self._logits_BPV[rows]

    def candidates(self, number: int) -> Candidates:
        """What the target guessed of the next places, as far as it did in any row."""
        depth = max(max(self._states), 1)
        return self._sampler.candidates(self._logits_BPV[:, :depth], 0, number)

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        """Guesses for rows that want some, and prompt tokens for the next round."""
        device = self._logits_BPV.device
        if not any(lengths):
            return Draft.empty(len(lengths), device)
        shapes, state_B = self._shapes, upload(self._states, device)
        is_wanted_B1 = upload(lengths, device)[:, None] > 0
        found = self.candidates(shapes.ranks)
        depth = found.tokens.shape[1]
        N, Q = (max(number[state] for state in self._states) for number in (shapes.guesses, shapes.probes))
        depths_BN, ranks_BN = shapes.depths_SN[state_B, :N], shapes.ranks_SN[state_B, :N]
        # Of a node that a state does not have, and of one whose rank there is not, anything may be taken.
        which_BN = (depths_BN * found.tokens.shape[2] + ranks_BN).clamp(min=0, max=found.tokens[0].numel() - 1)
        is_there_BN = is_wanted_B1 & (depths_BN != ABSENT) & (ranks_BN < found.tokens.shape[2])
        is_there_BN &= found.log_probs.flatten(1).gather(1, which_BN) != -torch.inf
        tokens_BN = found.tokens.flatten(1).gather(1, which_BN).masked_fill(~is_there_BN, ABSENT)
        confidence = None
        if found.confidence is not None:
            confidence = found.confidence.gather(1, depths_BN.clamp(min=0, max=depth - 1))
        parts = (shapes.nodes_SQ, shapes.before_SQ, shapes.tokens_SQ)
        nodes_BQ, before_BQ, probes_BQ = (part[state_B, :Q] for part in parts)
        probes = Probes(nodes=nodes_BQ, before=before_BQ, tokens=probes_BQ)
        is_known_BM = torch.nn.functional.pad(is_there_BN, (1, 0), value=True)
        return Draft(
            tokens=tokens_BN,
            parents=shapes.parents_SN[state_B, :N],
            confidence=confidence,
            probes=probes.without(~is_wanted_B1 | ~is_known_BM.gather(1, nodes_BQ + 1)),
        )


def is_accuracy(found: object, depths: int = 1) -> TypeGuard[list[list[float]]]:
    """Whether something is an `Accuracy` of some depths at least."""
    return (
        isinstance(found, list)
        and len(found) >= depths
        and all(isinstance(row, list) and row for row in found)
        and all(type(share) in (int, float) and 0 <= share <= 1 for row in found for share in row)
    )


def build(config: Config, target: Target, runtime: Runtime) -> PpdDrafter:
    """Loads the prompt tokens into the target's passes.

    Raises:
        ValueError: there are none, they were trained for another target, or they are fewer than wanted.
    """
    head = read_head(locate(config.draft, "ppd"), "ppd", target.lm.model.config)
    return PpdDrafter(target, head, config)
