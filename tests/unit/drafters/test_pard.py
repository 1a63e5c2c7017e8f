from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paradraft.core import Drafter
from paradraft.drafters.autoregressive import AutoregressiveDrafter
from paradraft.drafters.pard import Config, PardDrafter, build
from paradraft.engine.loader import load
from paradraft.models.causal_lm import CausalLM
from paradraft.models.runtime import Runtime
from paradraft.ragged import to_lists
from paradraft.sampling_params import Sampling
from paradraft.sources.loading import load_model
from paradraft.sources.target_loading import load_target
from paradraft.tree import ABSENT, Tree
from tests.conftest import VOCAB, tiny_model
from tests.support.decoding import committed, requests, started
from tests.support.trees import path_to

MASK = VOCAB + 1


def declaring(family: Path, folder: Path, **settings: int) -> str:
    """The PARD model with another config."""
    shutil.copytree(family / "pard", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return str(folder)


def forbidden(lm: CausalLM) -> list[int]:
    """The tokens that are never chosen."""
    return lm.allowed(torch.zeros(VOCAB + 8)).isinf().nonzero()[:, 0].tolist()


def test_a_pard_folder_becomes_its_drafter(family: Path, tmp_path: Path) -> None:
    """Guards the way from a folder to drafts: its weights, its masks, and that these tokens are forbidden on both
    sides, and no others."""
    runtime = Runtime(dtype="float64", compiled=False)
    target = load_target(str(family / "target"), runtime)
    masks = {"mask_token_id": 6, "pard_token": 6, "pard_masks": 2}
    with pytest.warns(UserWarning, match=r": train a drafter without mask_token_id$") as told:
        drafter = build(Config(draft=declaring(family, tmp_path / "pard", **masks)), target, runtime)
    assert len(told) == 2
    target.start(drafter.reserved_tokens)
    assert forbidden(target.lm) == forbidden(drafter.lm) == [6, 7]
    assert (drafter.mask_id, drafter.masks) == (6, 2)
    started(drafter, [[5, 3]])
    model = load_model(str(family / "pard"), runtime)
    with torch.inference_mode():
        logits = model(torch.tensor([[5, 3, 6, 7]])).logits[0, 1:, :VOCAB]
        logits[:, [6, 7]] = -torch.inf
    assert drafter.propose([3]).tokens[0].tolist() == logits.argmax(-1).tolist()


def test_a_pard_folder_is_named_in_what_is_wrong_with_it(family: Path, tmp_path: Path) -> None:
    """Guards messages that a user of several models can act on."""
    runtime = Runtime(compiled=False)
    target = load_target(str(family / "target"), runtime)
    for name, mask in (("outside", 99), ("end", 0)):
        folder = declaring(family, tmp_path / name, mask_token_id=mask, pard_token=mask)
        with pytest.raises(ValueError, match=rf"^{re.escape(folder)}: .*mask token {mask}"):
            build(Config(draft=folder), target, runtime)


def test_pocket_stands_for_the_pard_model(family: Path) -> None:
    """Guards the name "pocket", which stands for another folder in each drafter."""
    runtime = Runtime(compiled=False)
    with pytest.raises(ValueError, match=r"^draft '\S*pocket.pard' splits text into other tokens"):
        build(Config(draft="pocket"), load_target(str(family / "target"), runtime), runtime)


def test_a_mask_that_is_a_text_is_told(family: Path, tmp_path: Path) -> None:
    """Guards against answers that silently lack a word."""
    folder = tmp_path / "pard"
    shutil.copytree(family / "pard", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mask_token_id": 5, "pard_token": 5}))
    with pytest.warns(UserWarning, match="mask token 5 is 'e', which answers can then not contain"):
        load(str(family / "target"), drafter="pard", draft=str(folder), lengths="fixed")


@torch.inference_mode()
def naive_draft(model: torch.nn.Module, text: list[int], masks: list[int]) -> list[int]:
    logits = model(torch.tensor([text + masks])).logits[0, len(text) - 1 :, :VOCAB]
    return logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("number", "masks"),
    [(1, []), (1, [MASK] * 3), (2, [MASK]), (3, [MASK, MASK + 1, MASK + 2]), (3, [MASK, MASK + 1] + [MASK + 2] * 4)],
)
def test_draft_is_one_fresh_pass_over_the_text_and_masks(number: int, masks: list[int]) -> None:
    """Guards against masks or drafted tokens left in the cache, and distinct masks in another order than that of
    training: every draft equals that of a fresh pass."""
    model, k = tiny_model(4), len(masks) + 1
    lm = CausalLM(model, vocab_size=VOCAB, compiled=False, width=12)
    drafter = PardDrafter(lm, MASK, number) if number > 1 else PardDrafter(lm, MASK)
    texts = [[5, 3], [1, 2, 3, 4, 5, 6]]
    started(drafter, texts)
    for new in ([[1], [2, 3, 4]], [[9, 8], [7]], [[4, 4, 4], [6, 5]]):
        assert drafter.propose([k] * 2).tokens.tolist() == [naive_draft(model, text, masks) for text in texts]
        drafter.commit(committed(*new))
        texts = [text + row for text, row in zip(texts, new, strict=True)]


def test_a_mask_that_ends_texts_is_refused(family: Path, tmp_path: Path) -> None:
    """Guards against answers that never end: the mask is forbidden, so that an end with the same id is never chosen.
    Qwen's `<|endoftext|>` invites it."""
    for name, mask in (("first", {"mask_token_id": 0}), ("amd", {"pard_token": 0, "mask_token_id": None})):
        folder = shutil.copytree(family / "pard", tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | mask))
        with pytest.raises(ValueError, match=r"its mask token 0 \(<\|eos\|>\) ends a text \(eos_token_id\)"):
            load(str(family / "target"), drafter="pard", draft=str(folder), lengths="fixed")


def test_no_mask_of_several_ends_texts(family: Path, tmp_path: Path) -> None:
    """Guards all masks of a draft, and all ends of a target."""
    target, folder = (shutil.copytree(family / name, tmp_path / name) for name in ("target", "pard"))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, MASK + 1]}))
    settings = {"mask_token_id": MASK, "pard_token": MASK}
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config | {"pard_masks": 2}))
    with pytest.raises(ValueError, match=f"its mask token {MASK + 1}"):
        load(str(target), drafter="pard", draft=str(folder), lengths="fixed")
    (folder / "config.json").write_text(json.dumps(config))
    load(str(target), drafter="pard", draft=str(folder), lengths="fixed")


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        (1, [(4, 4)]),
        (8, [(11, 4)]),  # the pass is as wide as it may be
        (9, [(8, 0), (4, 4)]),
        (14, [(13, 0), (4, 4)]),
    ],
)
def test_a_draft_is_one_pass_and_no_wider_than_it_must_be(prompt: int, read: list[tuple[int, int]]) -> None:
    """Guards the speed of PARD, which no text shows: a prompt that fits is read in the draft's own pass, and after it
    stand k - 1 masks and no more."""
    lm = CausalLM(tiny_model(4), vocab_size=VOCAB, compiled=False, width=12)
    drafter = PardDrafter(lm, MASK)
    started(drafter, [[5] * prompt])
    assert drafter.propose([4]).tokens.shape == (1, 4)
    assert [(made.tokens, made.logits) for made in lm.passes.elements()] == read


@pytest.mark.parametrize("build", [AutoregressiveDrafter, lambda lm: PardDrafter(lm, MASK)])
def test_side_branches_have_branches_where_the_drafter_knows_what_follows(build: Callable[[CausalLM], Drafter]) -> None:
    """Guards the gain of PARD's trees: masks say what follows a side branch too, for half of what they say after the
    best tokens. An autoregressive drafter has only read its best tokens."""
    model = tiny_model(4)
    with torch.no_grad():
        model.model.norm.weight *= 0.01  # nearly all tokens are as likely as the best
    drafter = build(CausalLM(model, vocab_size=VOCAB, compiled=False, width=12))
    started(drafter, [[5, 3]], tree=Tree(budget=40))
    draft = drafter.propose([3])
    parents = draft.parents[0].tolist()
    firsts = [node for node, parent in enumerate(parents) if parent == ABSENT]
    assert len(parents) == 40
    assert {parent in firsts[1:] for parent in parents if parent != ABSENT} == {
        False,
        drafter.traits.branching == "tree",
    }


@pytest.mark.parametrize("masks", [1, 3])
def test_masks_are_reserved(masks: int) -> None:
    """Guards answers against masks, all of them: the target is told not to choose them while this drafter drafts."""
    lm = CausalLM(tiny_model(4), vocab_size=VOCAB, compiled=False, width=12)
    assert PardDrafter(lm, 60, masks).reserved_tokens == tuple(range(60, 60 + masks))


@pytest.mark.parametrize("joining", [[9], [9] * 30])
def test_rows_that_join_are_read_in_the_next_pass(joining: list[int]) -> None:
    """Guards rows that join between two rounds, and those beside them: every draft equals that of a fresh pass, with
    prompts that fit into the draft's pass and those that do not; and after rows have left."""
    model, k = tiny_model(4), 4
    drafter = PardDrafter(CausalLM(model, vocab_size=VOCAB, compiled=False, width=12), MASK)
    texts = [[5, 3], [1, 2, 3, 4, 5, 6]]
    started(drafter, texts)
    for round_number in range(3):
        if round_number == 1:
            drafter.join(requests([joining]), committed(joining))
            texts.append(list(joining))
        if round_number == 2:
            drafter.keep(torch.tensor([2, 1]))
            texts = [texts[2], texts[1]]
        drafts = drafter.propose([k] * len(texts)).tokens.tolist()
        assert drafts == [naive_draft(model, text, [MASK] * (k - 1)) for text in texts]
        new = [[7 + round_number, row] for row in range(len(texts))]
        drafter.commit(committed(*new))
        texts = [text + tokens for text, tokens in zip(texts, new, strict=True)]


def pard(width: int = 12) -> tuple[PardDrafter, torch.nn.Module]:
    """A drafter and its model."""
    model = tiny_model(4)
    return PardDrafter(CausalLM(model, vocab_size=VOCAB, compiled=False, width=width), MASK), model


@pytest.mark.parametrize("prompts", [([5, 3], [1, 2, 3]), ([5] * 9, [1, 2]), ([5, 3], [6] * 14)])
def test_each_row_is_drafted_as_deep_as_it_wants(prompts: tuple[list[int], ...]) -> None:
    """Guards rows that want shorter drafts than those beside them, and none in some rounds: what was committed
    meanwhile is read before the next draft, once, and in one pass where it fits."""
    (drafter, model), texts = pard(), list(map(list, prompts))
    started(drafter, texts)
    for number, lengths in enumerate([[4, 0], [0, 3], [0, 0], [1, 4], [2, 0], [0, 1], [4, 4]]):
        before = list(drafter.lm.cache.lengths)
        drafts = drafter.propose(lengths).tokens.tolist()
        for row, (length, text) in enumerate(zip(lengths, texts, strict=True)):
            if length:
                assert drafts[row][:length] == naive_draft(model, text, [MASK] * (length - 1))
            assert drafter.lm.cache.lengths[row] == (len(text) if length else before[row])
        new = [[7 + number, row] for row in range(2)]
        drafter.commit(committed(*new))
        texts = [text + tokens for text, tokens in zip(texts, new, strict=True)]


def test_a_row_reads_as_many_masks_as_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the time of a pass: no masks are read for a row beyond its own length, and nothing for one that wants no
    draft."""
    drafter, _ = pard()
    started(drafter, [[5] * 6, [5, 3], [4, 4, 4]])
    read: list[list[list[int]]] = []
    forward = drafter.lm.forward

    def watched(tokens: torch.Tensor, **settings: torch.Tensor) -> object:
        read.append(to_lists(tokens))
        return forward(tokens, **settings)

    monkeypatch.setattr(drafter.lm, "forward", watched)
    drafter.propose([1, 4, 0])
    assert read == [[[5] * 6, [5, 3, MASK, MASK, MASK], []]]


def test_what_is_deep_in_a_tree_reads_the_tokens_before_it() -> None:
    """Guards settings that read the text, far into a deep draft: of tokens that may not come twice none does."""
    model = tiny_model(4)
    with torch.no_grad():
        model.model.norm.weight *= 20  # so sure that trees are deep
    drafter = PardDrafter(CausalLM(model, vocab_size=VOCAB, compiled=False, width=40), MASK)
    repeated = []
    for sampling in (Sampling(), Sampling(presence_penalty=1000.0)):
        started(drafter, [[5, 3]], sampling, tree=Tree(budget=40))
        draft = drafter.propose([20])
        tokens, parents = draft.tokens[0].tolist(), draft.parents[0].tolist()
        ways = [path_to(parents, node) for node in range(len(parents))]
        best = max(ways, key=len)
        assert len(best) > 10, "deeper than the positions that are computed first"
        repeated.append(len(best) - len({tokens[node] for node in best}))
    assert repeated[0] > repeated[1] == 0


@pytest.mark.parametrize(
    ("text", "shared", "known"), [([1, 2, 3, 9, 9], 3, 3), ([1, 2, 3], 3, 2), ([1, 2, 3, 4, 5, 6, 7], 6, 4)]
)
def test_a_row_begins_with_what_was_saved_of_another(text: list[int], shared: int, known: int) -> None:
    """Guards rows that begin like one that has left: they are drafted for as if all had been read, and only the rest
    is, at least the last token; nothing changes in the row beside it."""
    drafter, model = pard()
    started(drafter, [[9, 8], [1, 2, 3, 4, 5]])
    drafter.propose([0, 4])
    drafter.commit(committed([7], [6]))
    saved = drafter.save(1, 4)
    assert saved[0].length == 4
    drafter.join(requests([text]), committed(text))
    drafter.restore(2, saved, shared)
    assert drafter.lm.cache.lengths == [0, 5, known]
    texts = [[9, 8, 7], [1, 2, 3, 4, 5, 6], text]
    assert drafter.propose([4] * 3).tokens.tolist() == [naive_draft(model, row, [MASK] * 3) for row in texts]
