"""EAGLE against the plain way: the trees of EAGLE-2, and layers that read as vLLM's do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralForCausalLM

from paradraft.core import Request
from paradraft.decode.generation import Generation
from paradraft.drafters.eagle import EagleDrafter
from paradraft.drafters.parts.draft_layers import mistral_like
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.formats.head import read_checkpoint
from paradraft.models.runtime import Runtime
from paradraft.sampling import expansion
from paradraft.tree import ABSENT, Tree
from tests.conftest import VOCAB
from tests.support.drafts import PROMPTS as TRAINED_ON
from tests.support.drafts import draft_of, train_head

PROMPTS = [[5, 6, 7, 5, 6], [9], [3, 1, 4, 1, 5, 9, 2, 6]]


def loaded(family: Path, *, width: int = 64) -> Engine:
    runtime = Runtime(dtype="float64", compiled=False, width=width)
    engine = load(
        str(family / "target"), drafter="eagle", draft=draft_of(family, "eagle"), k=4, runtime=runtime, lengths="fixed"
    )
    assert isinstance(engine.drafter, EagleDrafter)
    body: Any = engine.drafter.layers.lm.model.model
    with torch.no_grad():
        body.norm.weight.mul_(5)  # surer than after a second of training, so that trees are deep
    return engine


def proposed(engine: Engine, prompts: list[list[int]], lengths: list[int], tree: Tree) -> list[set[tuple[int, ...]]]:
    """The paths of each row's draft."""
    batch = Engine(engine.target, engine.drafter, Speculation(k=4, tree=tree, lengths="fixed")).new_batch()
    batch.join([Generation(Request(id=row, tokens=prompt)) for row, prompt in enumerate(prompts)])
    draft = batch.drafter.propose(lengths)
    found = []
    for tokens, parents in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*(() if parent == ABSENT else paths[parent]), token))
        assert len(set(paths)) == len(paths) or ABSENT in tokens
        found.append({path for path in paths if ABSENT not in path})
    return found


def plain(engine: Engine, prompt: list[int], k: int, budget: int, widest: int, number: int) -> set[tuple[int, ...]]:
    """The same of one prompt, path by path."""
    drafter = engine.drafter
    assert isinstance(drafter, EagleDrafter)

    def log_probs_after(path: tuple[int, ...]) -> torch.Tensor:
        batch = Engine(engine.target, drafter, Speculation(k=4, lengths="fixed")).new_batch()
        batch.join([Generation(Request(tokens=prompt))])
        states = drafter.layers.outputs([k])
        for token in path:
            states = drafter.layers.step(torch.tensor([[token]]), states)
        return engine.target.lm.head(states)[0, 0].log_softmax(-1)

    values: dict[tuple[int, ...], float] = {(): 0.0}
    level: list[tuple[int, ...]] = [()]
    for _ in range(k):
        new: dict[tuple[int, ...], float] = {}
        for path in sorted(level, key=lambda path: -values[path])[:widest]:
            best = log_probs_after(path)[:VOCAB].topk(number)
            for token, log_prob in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                new[(*path, token)] = values[path] + log_prob
        values |= new
        level = list(new)
    del values[()]
    return set(sorted(values, key=lambda path: -values[path])[:budget])


@pytest.mark.parametrize(("budget", "expanded", "width"), [(7, 10, 64), (12, 3, 64), (5, 10, 12), (1, 10, 64)])
def test_a_grown_tree_holds_the_likeliest_paths(
    family: Path, budget: int, expanded: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards nodes that are read after the wrong ones, which only acceptance would show; also in a batch, beside a row
    that drafts nothing, and where a pass has room for few nodes."""
    monkeypatch.setattr(expansion, "EXPANDED", expanded)
    engine = loaded(family, width=width)
    widest, number = min(budget, expanded, max(width // 4, 1)), min(budget, expanded)
    expected = [plain(engine, prompt, 4, budget, widest, number) for prompt in PROMPTS]
    for lengths in ([4, 4, 4], [4, 0, 4]):
        found = proposed(engine, PROMPTS, lengths, Tree(budget=budget))
        assert found == [paths if length else set() for paths, length in zip(expected, lengths, strict=True)]
    assert any(len(path) > 1 for paths in expected for path in paths) or budget == 1


def test_side_branches_are_read_after_their_own_tokens(family: Path) -> None:
    """Guards trees of fixed paths: after each of four first tokens its own three likeliest, not those of the best."""
    engine = loaded(family)
    shape = Tree(paths=tuple((first, *second) for first in range(4) for second in ((), (0,), (1,), (2,))))
    found = proposed(engine, PROMPTS, [4] * 3, shape)
    for prompt, paths in zip(PROMPTS, found, strict=True):
        everything = plain(engine, prompt, 2, VOCAB + 4 * VOCAB, 4, VOCAB)
        firsts = {path for path in paths if len(path) == 1}
        assert len(firsts) == 4 and len(paths) == 16 and paths <= everything
    endings = [{path[1] for path in paths if len(path) == 2} for paths in found]
    assert max(map(len, endings)) > 3, "control: all branches end alike"


@pytest.fixture(scope="module")
def as_in_vllm(family: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A drafter that is trained `for_vllm`."""
    folder = tmp_path_factory.mktemp("eagle")
    train_head(family, "eagle", folder / "for_vllm", for_vllm=True)
    return str(folder / "for_vllm")


def drafting(family: Path, draft: str, **given: Any) -> Engine:
    runtime = Runtime(dtype="float64", compiled=False)
    return load(str(family / "target"), drafter="eagle", draft=draft, k=4, runtime=runtime, **given)


def by_hand(engine: Engine, draft: str, text: list[int], k: int) -> list[int]:
    """The tokens that vLLM drafts after a text, with `transformers`: token i + 1 is read beside the target's last state
    of token i, at position i; then each drafted token beside what the layer returned before it."""
    target: Any = engine.target.lm.model
    head = read_checkpoint(draft, "eagle")
    config = mistral_like(target.config, 1)
    layer: Any = MistralForCausalLM(config).double().eval().model
    weights = {name: weight.double() for name, weight in head.weights.items()}
    layer.load_state_dict(weights, strict=False)
    states = target.model(torch.tensor([text])).last_hidden_state[:, :-1]
    read, drafted = text[1:], []
    for _ in range(k):
        both = torch.cat([target.model.embed_tokens(torch.tensor([read])), states], dim=-1)
        returned = layer(inputs_embeds=both @ weights["fc.weight"].T).last_hidden_state[:, -1:]
        drafted.append(int(target.lm_head(returned)[0, 0, :VOCAB].argmax()))
        read, states = [*read, drafted[-1]], torch.cat([states, returned], dim=1)
    return drafted


def test_layers_for_vllm_read_what_vllm_reads(family: Path, as_in_vllm: str) -> None:
    """Guards acceptance in vLLM, which never reads a text's first token, has no bias, and Mistral's layers."""
    engine = drafting(family, as_in_vllm)
    assert "fc.bias" not in read_checkpoint(as_in_vllm).weights
    for prompt in ([5, 6], [5, 6, 7, 5, 6], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]):
        batch = engine.new_batch()
        batch.join([Generation(Request(tokens=prompt))])
        assert batch.drafter.propose([4]).tokens[0].tolist() == by_hand(engine, as_in_vllm, prompt, 4)
    other = drafting(family, str(draft_of(family, "eagle")))
    assert other.drafter.layers.lm.model.config.model_type == "qwen3", "only theirs are Mistral's"


def test_a_prompt_of_one_token_has_nothing_to_be_read(family: Path, as_in_vllm: str) -> None:
    """Guards rows for which there is no state yet, beside others: they draft nothing, and not anything."""
    engine = drafting(family, as_in_vllm)
    batch = engine.new_batch()
    batch.join([Generation(Request(id=row, tokens=prompt)) for row, prompt in enumerate(([9], [5, 6, 7], [1]))])
    drafted = batch.drafter.propose([4, 4, 4]).tokens.tolist()
    assert drafted[0] == drafted[2] == [ABSENT] * 4
    assert drafted[1] == by_hand(engine, as_in_vllm, [5, 6, 7], 4)
    for tree in (None, 9):
        answers = drafting(family, as_in_vllm, tree=tree).generate([[9], [5, 6, 7], [1]], max_new_tokens=20)
        plain = load(str(family / "target"), runtime=Runtime(dtype="float64", compiled=False))
        assert [one.tokens for one in answers] == [
            one.tokens for one in plain.generate([[9], [5, 6, 7], [1]], max_new_tokens=20)
        ]
        assert all(sum(one.stats.drafted) for one in answers if len(one.tokens) > 2), "later rounds draft"


def test_kept_rows_draft_the_same(family: Path, as_in_vllm: str) -> None:
    """Guards caches that lack one token of the text: the next turn would be read beside states of other tokens, which
    only acceptance shows."""
    kept, fresh = drafting(family, as_in_vllm, kept_rows=2), drafting(family, as_in_vllm)
    accepted = 0
    for text in TRAINED_ON:
        talk = kept.target.tokenizer(text)["input_ids"]
        for turn in range(6):
            one, other = (engine.generate([list(talk)], max_new_tokens=9)[0] for engine in (kept, fresh))
            assert one.tokens == other.tokens and one.accepted == other.accepted
            accepted += sum(one.accepted) if turn else 0
            # Now and then it goes on otherwise from somewhere within the text that is kept.
            talk = [*talk[: -2 * turn], 1 + turn, *one.tokens] if turn % 2 else [*talk, *one.tokens]
    assert accepted, "else nothing is shown"
