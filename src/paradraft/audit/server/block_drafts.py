"""Drafts of a block drafter on the target's states, as it was trained or with a fault of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from paradraft.audit.server.rounds import AuditedDraft, Round, accepted_of
from paradraft.core import Committed, Drafting, Request
from paradraft.drafters.dflash import DFlashDrafter
from paradraft.formats.block import BlockSettings
from paradraft.formats.head import Head
from paradraft.formats.path_heads import RANKS
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target


@dataclass(frozen=True, kw_only=True)
class BlockMode:
    """One way to draft.

    Args:
        head: the checkpoint, maybe with other settings.
        offset: by how many tokens the states of the target are moved back.
        reads_prompt: whether states of the prompt are there.
    """

    head: Head
    offset: int = 0
    reads_prompt: bool = True


@dataclass(frozen=True, kw_only=True)
class BlockDraft(AuditedDraft):
    """A block drafter."""

    target: Target
    head: Head
    runtime: Runtime
    _known: dict[tuple[int, ...], dict[int, Tensor]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """See `AuditedDraft`."""
        return len(self.target.lm.model.get_input_embeddings().weight)

    @property
    def is_quantized(self) -> bool:
        """See `AuditedDraft`."""
        return False

    @property
    def sound(self) -> BlockMode:
        """See `AuditedDraft`."""
        return BlockMode(head=self.head)

    @torch.no_grad()
    def accepted(self, rounds: Sequence[Round], mode: BlockMode) -> list[int]:
        """See `AuditedDraft`."""
        drafter, drafts = DFlashDrafter(self.target.lm, mode.head, self.runtime), []
        for answer in _by_answer(rounds):
            states, read = self._states_of(answer[-1], mode), 0
            drafter.start(Drafting(), self.target.device)
            for each in answer:
                tokens = each.text[read:]
                parts = {layer: part[:, read : len(each.text)] for layer, part in states.items()}
                new = Committed(tokens=[tokens], hidden=parts)
                if read:
                    drafter.commit(new)
                else:
                    drafter.join([Request(tokens=each.text)], new)
                drafts.append(drafter.propose([self.k]).tokens[0].tolist())
                read = len(each.text)
        return accepted_of(rounds, drafts)

    def _states_of(self, last: Round, mode: BlockMode) -> dict[int, Tensor]:
        """By layer, the states `[1, N, D]` from which the tokens of a round's text were predicted."""
        key, most = tuple(last.text), self.target.lm.model.config.num_hidden_layers
        if key not in self._known:
            used = BlockSettings.of(self.head).target_layers
            near = {layer + step for layer in used for step in (-1, 0, 1) if 0 <= layer + step <= most}
            self.target.start(hidden_layers=tuple(sorted({*used, *near})))
            self._known[key] = self.target.join([Request(tokens=last.text)]).hidden
        states = {layer: part.clone().roll(mode.offset, 1) for layer, part in self._known[key].items()}
        if not mode.reads_prompt:
            for part in states.values():
                part[:, : last.prompt + 1] = 0
        return states

    def faults(self) -> Iterator[tuple[str, BlockMode]]:
        """See `AuditedDraft`."""
        settings, config, layers = BlockSettings.of(self.head), self.head.config, self.head.config["target_layers"]

        def mode(**entries: object) -> BlockMode:
            return BlockMode(head=replace(self.head, config=config | entries))

        read = "masks drafted all tokens" if settings.anchor_first else "the anchor drafted the first token"
        yield (
            f"layout shifted by one: blocks are read as if {read}: compare sample_from_anchor and block_size",
            mode(anchor_first=not settings.anchor_first),
        )
        seen = "all of their block" if settings.causal else "only what is before them in their block"
        yield f"causal ignored: masks see {seen}: compare is_causal", mode(causal=not settings.causal)
        most = self.target.lm.model.config.num_hidden_layers
        for step in (-1, 1):
            if all(0 <= layer + step <= most for layer in layers):
                where = "before" if step < 0 else "after"
                yield (
                    f"layer ids off by one: states are those of the layers {where} the named ones: compare "
                    "target_layer_ids",
                    mode(target_layers=[layer + step for layer in layers]),
                )
        near = (settings.mask_token_id - 1, settings.mask_token_id + 1, 0, self.rows - 1)
        for token in dict.fromkeys((*self.special, *near)):
            if token != settings.mask_token_id and 0 <= token < self.rows:
                yield (
                    f"wrong mask: the mask token is {token}, not {settings.mask_token_id}: compare mask_token_id",
                    mode(mask_token_id=token),
                )
        for rank, name in zip(RANKS, ("previous-token head", "Markov head", "selector"), strict=True):
            if rank in config:
                without = {key: entry for key, entry in config.items() if key != rank}
                yield (
                    f"its {name} is left out: the engine drafts by another method or runner",
                    BlockMode(head=replace(self.head, config=without)),
                )
        for offset, where in ((1, "early"), (-1, "late")):
            yield (
                f"states shifted by one: those of the target come a token too {where}",
                replace(self.sound, offset=offset),
            )
        yield "prompt unread: states of the prompt are missing", replace(self.sound, reads_prompt=False)
        for theta in (10_000.0, 500_000.0, 1_000_000.0):
            if theta != (rope := settings.sizes["rope_parameters"])["rope_theta"]:
                yield (
                    f"wrong rope: the engine rotates with rope_theta={theta:g}: compare rope_parameters",
                    mode(rope_parameters=rope | {"rope_theta": theta}),
                )
        if (last := settings.layers - 1) > 0:
            kept = {name: part for name, part in self.head.weights.items() if not name.startswith(f"layers.{last}.")}
            yield (
                "layer off by one: the last layer of the draft is not run",
                BlockMode(head=replace(self.head, config=config | {"num_hidden_layers": last}, weights=kept)),
            )


def _by_answer(rounds: Sequence[Round]) -> Iterator[list[Round]]:
    """Rounds in a row whose texts go on with the one before."""
    group: list[Round] = []
    for each in rounds:
        if group and each.text[: len(group[-1].text)] != group[-1].text:
            yield group
            group = []
        group.append(each)
    if group:
        yield group
