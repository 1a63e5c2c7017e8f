"""Samples that are measured on; of their texts and prompts nothing is learnt."""

from __future__ import annotations

from paradraft.train.sample import Sample

SHARE, MOST = 20, 64
"""By default one sample in so many is measured on, and at most so many."""
LARGE = 10
"""A text or prompt with more than one in so many of all samples is never kept out."""


def hold_out(samples: list[Sample], wanted: int | None) -> tuple[list[Sample], list[Sample]]:
    """Chooses samples to measure on.

    Samples of one `group` go to the same side; those of a group that is kept out which are not wanted are dropped.
    Where groups are too few for that, or too large, as in a single long text, each sample stands for itself.

    Args:
        samples: all, in the order of the data.
        wanted: how many to measure on; by default one in `SHARE`, at most `MOST`.

    Returns:
        The samples to learn, and those to measure on, of different groups first.

    Raises:
        ValueError: nothing would be left to learn.
    """
    number = min(len(samples) // SHARE, MOST) if wanted is None else wanted
    if number >= len(samples):
        raise ValueError(f"held_out={number} leaves nothing to learn of {len(samples)} samples: hold out fewer")
    chosen = _spread(_groups(samples), number) or _spread([[index] for index in range(len(samples))], number)
    # Each group begins with another of its samples, because texts begin alike.
    ranked = sorted(
        ((place - nth) % len(group), index) for nth, group in enumerate(chosen) for place, index in enumerate(group)
    )
    out = {index for _, index in ranked}
    return (
        [sample for index, sample in enumerate(samples) if index not in out],
        [samples[index] for _, index in ranked[:number]],
    )


def _groups(samples: list[Sample]) -> list[list[int]]:
    """The indices of each group that is not too large."""
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(index)
    return [group for group in groups.values() if len(group) * LARGE <= len(samples)]


def _spread(groups: list[list[int]], number: int) -> list[list[int]]:
    """Groups with at least `number` samples, far from each other in the data: one in `SHARE`, or more if it takes more,
    but not all; none if that is not enough.

    >>> _spread([[0], [1], [2], [3], [4], [5]], 2)
    [[1], [4]]
    >>> _spread([[0, 1, 2], [3, 4, 5], [6, 7, 8]], 2)
    [[3, 4, 5]]
    """
    count = min(number, max(len(groups) // SHARE, 1))
    while count < len(groups):
        chosen = [groups[round((place + 0.5) * len(groups) / count - 0.5)] for place in range(count)]
        found = sum(map(len, chosen))
        if found >= number:
            return chosen
        # As many as it takes if the others are as large; one by one it would take as long as there are groups.
        count = max(count + 1, count * number // max(found, 1))
    return []
