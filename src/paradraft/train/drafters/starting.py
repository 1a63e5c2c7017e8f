"""Trainings on the target's states that begin with the weights of another drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paradraft.formats.head import TARGET, Head, TargetIdentity, read_checkpoint
from paradraft.formats.path_heads import PREFIXES, RANKS
from paradraft.formats.vocab_map import D2T
from paradraft.sources.loading import locate

if TYPE_CHECKING:
    from paradraft.train.drafters.heads import HeadObjective


def begin_with(objective: HeadObjective, drafter: str, start: str) -> Head:
    """Copies the weights of a checkpoint that match by name and shape; all others keep their initial values.

    Returns:
        The checkpoint.

    Raises:
        ValueError: it cannot be read, is of another target, or has none of these weights or some that are no numbers.
    """
    try:
        head = read_checkpoint(locate(start, drafter))
    except ValueError as error:
        raise ValueError(f"start: {error}") from None
    head.target.check(TargetIdentity.of(objective.target.model.config), start)
    own = objective.state_dict()
    matching = {
        name: own[name] for name, weight in head.weights.items() if name in own and own[name].shape == weight.shape
    }
    if not matching:
        raise ValueError(
            f"start={start!r} has no weights that fit: name a drafter of the same size (layers, heads, prompt tokens)"
        )
    if any(name.startswith("change.") and name not in matching for name in head.weights):
        raise ValueError(f"start={start!r} changes attention: set change_rank={head.config.get('change_rank')}")
    for name, weight in matching.items():
        if not bool(head.weights[name].isfinite().all()):
            raise ValueError(f"start={start!r}: {name} has NaN or infinite numbers: name an earlier checkpoint")
        weight.copy_(head.weights[name])
    return head


def train_only(objective: HeadObjective, part: str, config: dict[str, Any], head: Head, start: str) -> None:
    """Freezes all weights but those of a part; raises ValueError if `head`, the checkpoint `start`, has not all others,
    or other settings than `config`, or has weights that would be lost."""
    for key in config.keys() | head.config.keys():
        if key not in (*RANKS, TARGET) and config.get(key) != head.config.get(key):
            raise ValueError(
                f"head_only=true: start={start!r} has {key}={head.config.get(key)!r} and this recipe "
                f"{config.get(key)!r}: give it the settings of start"
            )
    vocab_map, stored = objective.target.vocab_map, head.weights.get(D2T)
    is_same = stored is None if vocab_map is None else stored is not None and torch.equal(vocab_map.d2t(), stored)
    own = {name for name in objective.state_dict() if not name.startswith(f"{part}.")}
    others = {name for name in head.weights if "." in name and name.split(".")[0] not in PREFIXES.values()}
    if not is_same or own != others:
        raise ValueError(
            f"head_only=true: start={start!r} has another output head or other layers than this recipe: give it the "
            "settings of start, such as draft_vocab_size and head_rank"
        )
    for name, weight in objective.named_parameters():
        weight.requires_grad_(name.startswith(f"{part}."))
