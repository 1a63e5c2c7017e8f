"""Compares a server's drafts with those of the draft model here, and names the fault that explains a difference.

A server streams the tokens of each pass of the target together, so the length of a chunk shows how many drafted tokens
were accepted. The draft's tokens at the same position are computed here; greedily, both must be the same but for
near-ties. Where they are not, they are computed with each known fault of engines, one at a time, and the fault that
explains the server's chunks is named.

Shape letters: R rounds, N tokens of a pass, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paradraft.audit.server.endpoint import Served
from paradraft.audit.server.rounds import AuditedDraft, Round

EQUAL = 0.9
"""Least share of rounds that must be as expected; the draft has near-ties too, and engines break them differently."""
EXPLAINED = 0.85
"""Least share of rounds that a fault must explain to be named."""
MOST_ROUNDS = 160
"""Most rounds that are computed here, spread over all answers."""
SCREENED, FINALISTS = 16, 3
"""Each fault is tried on `SCREENED` rounds, half of them unexpected ones, and the best `FINALISTS` faults on all."""
FEWEST_LONG = 12
"""Least rounds on either side of the length of training rows for a comparison."""


@dataclass(frozen=True, kw_only=True)
class DraftComparison:
    """Drafting of a server, compared with that of the draft model here.

    Args:
        length: acceptance length: accepted tokens plus 1, per pass of the target.
        expected_length: the same by the draft model here.
        by_position: for each position, the share of rounds in which the server has accepted it.
        expected_by_position: the same by the draft model here.
        equal: share of rounds in which as many tokens were accepted as are expected.
        cause: of a difference, as a clause; None if there is none.
    """

    rounds: int
    k: int
    length: float
    expected_length: float
    by_position: tuple[float, ...]
    expected_by_position: tuple[float, ...]
    equal: float
    cause: str | None
    notes: tuple[str, ...] = ()

    def with_note(self, note: str) -> DraftComparison:
        """A copy with one more note."""
        return replace(self, notes=(*self.notes, note))


def rounds_of(served: Served, prompt: list[int]) -> list[Round]:
    """The rounds of a greedy answer: its chunks but the first, before any draft, and the last, which may be cut."""
    rounds = []
    start = served.steps[0] if served.steps else 0
    for size in served.steps[1:-1]:
        rounds.append(
            Round(
                prompt=len(prompt), text=prompt + served.tokens[:start], following=served.tokens[start:],
                accepted=size - 1,
            )
        )  # fmt: skip
        start += size
    return rounds


def compare(rounds: Sequence[Round], draft: AuditedDraft, report: Callable[[str], None]) -> DraftComparison:
    """Compares the rounds of a server with the draft model here, and names the cause of a difference.

    Raises:
        ValueError: no chunk can be a round.
    """
    kept = rounds[:: max(1, -(-len(rounds) // MOST_ROUNDS))]
    valid = [each for each in kept if each.accepted <= draft.k]
    if not valid:
        raise ValueError(
            f"the server's chunks hold more than the {draft.k + 1} tokens of a round: let it send each pass by itself, "
            "or say with -k how many tokens it drafts"
        )
    most = max(each.accepted for each in valid)
    if most and not draft.is_k_known:
        draft = draft.with_k(most)
    if (largest := max(max(each.text) for each in valid)) >= draft.rows:
        raise ValueError(
            f"the texts hold token {largest}, and the draft has {draft.rows}: is it a draft of this model?"
        )
    notes = []
    if len(valid) < len(kept):
        notes.append(f"{len(kept) - len(valid)} chunks hold more tokens than a round can give, and were left out.")
    report("drafting as the draft does here")
    expected = draft.accepted(valid, draft.sound)
    equal = _equal(valid, expected)
    cause = None if equal >= EQUAL else _cause(valid, draft, expected, report)
    if (note := _long_texts(valid, expected, draft)) is not None:
        notes.append(note)
    seen = [each.accepted for each in valid]
    return DraftComparison(
        rounds=len(valid), k=draft.k, length=1 + sum(seen) / len(seen), expected_length=1 + sum(expected) / len(seen),
        by_position=_shares(seen, draft.k), expected_by_position=_shares(expected, draft.k), equal=equal, cause=cause,
        notes=tuple(notes),
    )  # fmt: skip


def _cause(rounds: Sequence[Round], draft: AuditedDraft, expected: Sequence[int], report: Callable[[str], None]) -> str:
    """The fault that explains the rounds best, as a clause; or that none does."""
    equal = _equal(rounds, expected)
    sides = [
        [each for each, n in zip(rounds, expected, strict=True) if (each.accepted == n) is same]
        for same in (False, True)
    ]
    some = [each for side in sides for each in side[:: max(1, -(-len(side) // (SCREENED // 2)))]]
    screened: list[tuple[float, str, Any]] = []
    for name, mode in draft.faults():
        report(f"drafting with a fault: {name.partition(':')[0]}")
        screened.append((_equal(some, draft.accepted(some, mode)), name, mode))
    most = max(each.accepted for each in rounds)
    shares = [(_equal(rounds, [0] * len(rounds)), _nothing_accepted(is_quantized=draft.is_quantized))]
    if most:
        fewer = f"fewer tokens: it drafts {most} tokens a round, not {draft.k}: set -k to what it drafts"
        shares.append((_equal(rounds, [min(accepted, most) for accepted in expected]), fewer))
    for _, name, mode in sorted(screened, key=lambda share: -share[0])[:FINALISTS]:
        shares.append((_equal(rounds, draft.accepted(rounds, mode)), name))
    best = max(share for share, _ in shares)
    words = "; or just as well: ".join(name for share, name in shares if share == best)
    agreement = f"as many tokens are accepted as here in {equal:.0%} of {len(rounds)} rounds"
    if best >= EXPLAINED:
        return f"{agreement}, and in {best:.0%} as many as with this fault: {words}"
    likest = f"; the likest, in {best:.0%} of them: {words}" if best > equal else ""
    return f"{agreement}, and none of the faults that are known explains it{likest}"


def _nothing_accepted(*, is_quantized: bool) -> str:
    return (
        "no drafted token is ever accepted: the engine has not loaded the weights of the draft, "
        + ("whose quantization it does not read" if is_quantized else "or has taken them apart (quantized, renamed)")
        + ": look at its log, and serve the draft in bfloat16 (or it streams each token by itself, as llama.cpp does, "
        "so that rounds cannot be seen: then leave DRAFT out)"
    )


def _equal(rounds: Sequence[Round], expected: Sequence[int]) -> float:
    """Share of rounds in which as many tokens were accepted as are expected."""
    return sum(each.accepted == count for each, count in zip(rounds, expected, strict=True)) / len(rounds)


def _shares(accepted: Sequence[int], k: int) -> tuple[float, ...]:
    return tuple(sum(count > position for count in accepted) / len(accepted) for position in range(k))


def _long_texts(rounds: Sequence[Round], expected: Sequence[int], draft: AuditedDraft) -> str | None:
    """A sentence, if the draft is worse beyond the length of its training rows."""
    most = draft.training_rows
    if most is None:
        return None
    sides = [
        [n for each, n in zip(rounds, expected, strict=True) if (len(each.text) > most) is far] for far in (False, True)
    ]
    if min(map(len, sides)) < FEWEST_LONG:
        return None
    near, far = (sum(side) / len(side) for side in sides)
    if far > 0.6 * near:
        return None
    return (
        f"Texts are longer than the {most} tokens of the rows that the draft was trained on: up to there {near:.2f} "
        f"drafted tokens are accepted a round, beyond {far:.2f}. Train on longer rows (max_length)."
    )


def special_ids(tokenizer: Any, ends: Collection[int]) -> tuple[int, ...]:
    """Ids that an engine could take for a mask."""
    named = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    return tuple(dict.fromkeys(token for token in (*ends, *named) if token is not None))
