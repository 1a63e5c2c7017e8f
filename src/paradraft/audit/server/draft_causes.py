"""Compares a server's drafts with those of the draft model here, and names the fault that explains a difference.

A server streams the tokens of each pass of the target together, so the length of a chunk shows how many drafted tokens
were accepted. The draft model's tokens at the same position are computed here, in a plain pass of `transformers` over
the whole text; greedily, both must be the same but for near-ties. Where they are not, the same pass is made with each
known fault of engines, one at a time, and the fault that explains the server's chunks is named.

Shape letters: R rounds, N tokens of a pass, K drafted tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from paradraft.audit.server.endpoint import Served

EQUAL = 0.9
"""Least share of rounds that must be as expected; the draft has near-ties too, and engines break them differently."""
EXPLAINED = 0.85
"""Least share of rounds that a fault must explain to be named."""
MOST_ROUNDS = 160
"""Most rounds that are computed here, spread over all answers."""
SCREENED, FINALISTS = 16, 3
"""Each fault is tried on `SCREENED` rounds, half of them unexpected ones, and the best `FINALISTS` faults on all."""
TOKENS_AT_ONCE, ROWS_AT_ONCE = 8192, 32
"""Limits of a pass; each row has a few rows of logits, of 600 kB each where a vocabulary is large."""
NO_WINDOW = 2**20
"""Tokens of a sliding window that is longer than any text."""
FEWEST_LONG = 12
"""Least rounds on either side of the length of training rows for a comparison."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One pass of the target, as the server has streamed it.

    Args:
        prompt: how many tokens of `text` are the prompt.
        text: the tokens before this pass.
        following: the tokens of the answer from this pass on.
    """

    prompt: int
    text: list[int]
    following: list[int]
    accepted: int


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


@dataclass(frozen=True, kw_only=True)
class DraftModel:
    """A draft model, and how an engine should use it.

    Args:
        mask_id: its mask token; None for a model that drafts one token per pass.
        known_ids: ids from there on are padding rows of the embedding.
        special: further ids that an engine could take for the mask, such as the end of a text.
        training_rows: most tokens of the rows that it was trained on; None if unknown.
        is_k_known: whether an engine drafts `k` tokens; else `k` is an upper limit.
    """

    model: PreTrainedModel
    k: int
    mask_id: int | None
    known_ids: int
    special: tuple[int, ...] = ()
    training_rows: int | None = None
    is_k_known: bool = True


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to draft with a model: as it was trained, or with a fault.

    Args:
        mask_id: the token in place of those to draft; None drafts one token per pass.
        shift: offset in rows at which drafts are compared.
        advances: whether the positions of the masks increase.
        forbids: whether padding rows are never drafted.
    """

    mask_id: int | None
    shift: int = 0
    advances: bool = True
    reads_prompt: bool = True
    forbids: bool = True
    changes: dict[str, Any] = field(default_factory=dict)


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


def compare(rounds: Sequence[Round], draft: DraftModel, report: Callable[[str], None]) -> DraftComparison:
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
        draft = replace(draft, k=most)
    rows = draft.model.get_input_embeddings().weight.shape[0]
    if (largest := max(max(each.text) for each in valid)) >= rows:
        raise ValueError(f"the texts hold token {largest}, and the draft has {rows}: is it a draft of this model?")
    notes = []
    if len(valid) < len(kept):
        notes.append(f"{len(kept) - len(valid)} chunks hold more tokens than a round can give, and were left out.")
    report("drafting as the draft does here")
    sound = Mode(mask_id=draft.mask_id)
    expected = _accepted(valid, draft, sound)
    equal = _equal(valid, expected)
    cause = None if equal >= EQUAL else _cause(valid, draft, sound, expected, report)
    if (note := _long_texts(valid, expected, draft)) is not None:
        notes.append(note)
    seen = [each.accepted for each in valid]
    return DraftComparison(
        rounds=len(valid), k=draft.k, length=1 + sum(seen) / len(seen), expected_length=1 + sum(expected) / len(seen),
        by_position=_shares(seen, draft.k), expected_by_position=_shares(expected, draft.k), equal=equal, cause=cause,
        notes=tuple(notes),
    )  # fmt: skip


def _cause(
    rounds: Sequence[Round], draft: DraftModel, sound: Mode, expected: Sequence[int], report: Callable[[str], None]
) -> str:
    """The fault that explains the rounds best, as a clause; or that none does."""
    equal = _equal(rounds, expected)
    sides = [
        [each for each, n in zip(rounds, expected, strict=True) if (each.accepted == n) is same]
        for same in (False, True)
    ]
    some = [each for side in sides for each in side[:: max(1, -(-len(side) // (SCREENED // 2)))]]
    screened: list[tuple[float, str, Mode]] = []
    for name, mode in _faults(draft, sound):
        report(f"drafting with a fault: {name.partition(':')[0]}")
        screened.append((_equal(some, _accepted(some, draft, mode)), name, mode))
    most = max(each.accepted for each in rounds)
    shares = [(_equal(rounds, [0] * len(rounds)), _nothing_accepted(draft))]
    if most:
        fewer = f"fewer tokens: it drafts {most} tokens a round, not {draft.k}: set -k to what it drafts"
        shares.append((_equal(rounds, [min(accepted, most) for accepted in expected]), fewer))
    for _, name, mode in sorted(screened, key=lambda share: -share[0])[:FINALISTS]:
        shares.append((_equal(rounds, _accepted(rounds, draft, mode)), name))
    best = max(share for share, _ in shares)
    words = "; or just as well: ".join(name for share, name in shares if share == best)
    agreement = f"as many tokens are accepted as here in {equal:.0%} of {len(rounds)} rounds"
    if best >= EXPLAINED:
        return f"{agreement}, and in {best:.0%} as many as with this fault: {words}"
    likest = f"; the likest, in {best:.0%} of them: {words}" if best > equal else ""
    return f"{agreement}, and none of the faults that are known explains it{likest}"


def _nothing_accepted(draft: DraftModel) -> str:
    quantized = getattr(draft.model.config, "quantization_config", None) is not None
    return (
        "no drafted token is ever accepted: the engine has not loaded the weights of the draft, "
        + ("whose quantization it does not read" if quantized else "or has taken them apart (quantized, renamed)")
        + ": look at its log, and serve the draft in bfloat16 (or it streams each token by itself, as llama.cpp does, "
        "so that rounds cannot be seen: then leave DRAFT out)"
    )


def _faults(draft: DraftModel, sound: Mode) -> Iterator[tuple[str, Mode]]:
    """Faults of engines, each as a clause and as a way to draft."""
    if draft.mask_id is not None:
        yield "one token a pass: the engine does not draft in parallel, set parallel_drafting", Mode(mask_id=None)
        near = (draft.mask_id - 1, draft.mask_id + 1, 0, draft.model.config.vocab_size - 1)
        others = dict.fromkeys((*draft.special, *near))
        for token in others:
            if token != draft.mask_id and 0 <= token < draft.model.config.vocab_size:
                named = f"the mask token is {token}, not {draft.mask_id}: compare mask_token_id in both configs"
                yield f"wrong mask: {named}", replace(sound, mask_id=token)
        yield "masks at one position: the positions of the masks do not advance", replace(sound, advances=False)
    yield "shift by one: drafts are read a row too early", replace(sound, shift=-1)
    yield "shift by one: drafts are read a row too late", replace(sound, shift=1)
    yield (
        "random rows: ids that are no token are drafted, because rows that only fill the embedding up are random; let "
        "`paradraft export` write the folder",
        replace(sound, forbids=False),
    )
    yield "prompt unread: the draft reads only the answer, not the prompt", replace(sound, reads_prompt=False)
    if getattr(draft.model.config, "quantization_config", None) is None:  # such weights are of the model that has them
        for name, changes in _faults_of_config(draft.model.config):
            yield name, replace(sound, changes=changes)


def _faults_of_config(config: PretrainedConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Faults that a change of the config reproduces, with the same weights."""
    kinds = getattr(config, "layer_types", None)
    if getattr(config, "sliding_window", None) is not None and (kinds is None or "sliding_attention" in kinds):
        yield (
            "sliding window: its layers run as full attention, good up to the window and then not",
            {"sliding_window": NO_WINDOW},
        )
    rope = getattr(config, "rope_parameters", None) or {}
    is_by_kind = bool(rope) and all(isinstance(value, dict) for value in rope.values())  # a rope for each kind of layer
    for theta in (10_000.0, 500_000.0, 1_000_000.0):
        plain = {"rope_type": "default", "rope_theta": theta}
        used = [rope[kind] for kind in set(kinds or ()) if kind in rope] if is_by_kind else [rope]
        if any(plain.items() - each.items() for each in used):
            yield (
                f"wrong rope: the engine rotates with rope_theta={theta:g} and no scaling: compare rope_parameters",
                {"rope_parameters": dict.fromkeys(rope, plain) if is_by_kind else plain},
            )
    if (layers := config.num_hidden_layers) > 1:
        yield (
            "layer off by one: the last layer of the draft is not run",
            {"num_hidden_layers": layers - 1} | ({"layer_types": kinds[: layers - 1]} if kinds else {}),
        )


def _equal(rounds: Sequence[Round], expected: Sequence[int]) -> float:
    """Share of rounds in which as many tokens were accepted as are expected."""
    return sum(each.accepted == count for each, count in zip(rounds, expected, strict=True)) / len(rounds)


def _shares(accepted: Sequence[int], k: int) -> tuple[float, ...]:
    return tuple(sum(count > position for count in accepted) / len(accepted) for position in range(k))


def _long_texts(rounds: Sequence[Round], expected: Sequence[int], draft: DraftModel) -> str | None:
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


@torch.no_grad()
def _accepted(rounds: Sequence[Round], draft: DraftModel, mode: Mode) -> list[int]:
    """Number of drafted tokens that the answers continue with, `[R]`."""
    with _rebuilt(draft.model, mode.changes) as model:
        texts = [each.text if mode.reads_prompt else each.text[each.prompt :] for each in rounds]
        drafts_RK = (
            _one_pass(model, texts, draft, mode) if mode.mask_id is not None else _passes(model, texts, draft, mode)
        )
    accepted = []
    for each, tokens in zip(rounds, drafts_RK, strict=True):
        pairs = zip(tokens, each.following, strict=False)
        accepted.append(
            next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(each.following)))
        )
    return accepted


def _one_pass(model: PreTrainedModel, texts: Sequence[list[int]], draft: DraftModel, mode: Mode) -> list[list[int]]:
    """K tokens from one pass: the text, then masks; the text's last token predicts the first (PARD, section 3.1)."""
    masks = draft.k - 1 + max(mode.shift, 0)
    rows = [[*text, *[mode.mask_id or 0] * masks] for text in texts]
    positions = [
        [*range(len(text)), *(len(text) + (index if mode.advances else 0) for index in range(masks))] for text in texts
    ]
    begin = 0 if mode.shift < 0 else mode.shift
    keep = masks + 1 + max(-mode.shift, 0)
    return [likeliest[begin : begin + draft.k] for likeliest in _likeliest(model, rows, positions, keep, draft, mode)]


def _passes(model: PreTrainedModel, texts: Sequence[list[int]], draft: DraftModel, mode: Mode) -> list[list[int]]:
    grown = [list(text) for text in texts]
    for _ in range(draft.k):
        positions = [list(range(len(text))) for text in grown]
        for text, likeliest in zip(
            grown, _likeliest(model, grown, positions, 1 + max(-mode.shift, 0), draft, mode), strict=True
        ):
            text.append(likeliest[0])
    return [text[len(before) :] for text, before in zip(grown, texts, strict=True)]


def _likeliest(
    model: PreTrainedModel,
    rows: Sequence[list[int]],
    positions: Sequence[list[int]],
    keep: int,
    draft: DraftModel,
    mode: Mode,
) -> list[list[int]]:
    """The likeliest token after each of the last `keep` tokens of each row, `[R, keep]`.

    Rows are padded on the left, masked, so that the logits that are needed are the last.
    """
    tokens_of_row: dict[int, list[int]] = {}
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    while order:
        longest = len(rows[order[-1]])
        at_once = max(1, min(ROWS_AT_ONCE, TOKENS_AT_ONCE // longest))
        some, order = order[-at_once:], order[:-at_once]
        gaps = [longest - len(rows[index]) for index in some]
        tokens = [[0] * gap + rows[index] for gap, index in zip(gaps, some, strict=True)]
        position_ids = [[0] * gap + positions[index] for gap, index in zip(gaps, some, strict=True)]
        mask = [[0] * gap + [1] * (longest - gap) for gap in gaps]
        logits = model(
            torch.tensor(tokens, device=model.device), position_ids=torch.tensor(position_ids, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device), use_cache=False, logits_to_keep=keep,
        ).logits  # fmt: skip
        if mode.forbids:
            logits[..., draft.known_ids :] = -torch.inf
            if draft.mask_id is not None:
                logits[..., draft.mask_id] = -torch.inf
        tokens_of_row |= dict(zip(some, logits.argmax(2).tolist(), strict=True))
    return [tokens_of_row[index] for index in range(len(rows))]


@contextmanager
def _rebuilt(model: PreTrainedModel, changes: dict[str, Any]) -> Iterator[PreTrainedModel]:
    """The model with another config and the same weights."""
    if not changes:
        yield model
        return
    config = copy.deepcopy(model.config)
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.device("meta"):
        other = AutoModelForCausalLM.from_config(
            config, trust_remote_code=False, attn_implementation=model.config._attn_implementation
        )
    own = dict(model.state_dict(keep_vars=True))
    other.load_state_dict({key: value for key, value in own.items() if key in other.state_dict()}, assign=True)
    for name, module in list(other.named_modules()):
        parent, _, last = name.rpartition(".")
        if "rotary_emb" in last:  # computed from the config, and not among the weights
            setattr(other.get_submodule(parent), last, type(module)(config).to(model.device))
    for name, buffer in list(other.named_buffers()):
        if buffer.is_meta:  # nor are these
            parent, _, last = name.rpartition(".")
            other.get_submodule(parent).register_buffer(last, model.get_buffer(name), persistent=False)
    yield other.to(model.dtype).eval()


def special_ids(tokenizer: Any, ends: Collection[int]) -> tuple[int, ...]:
    """Ids that an engine could take for a mask."""
    named = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    return tuple(dict.fromkeys(token for token in (*ends, *named) if token is not None))
