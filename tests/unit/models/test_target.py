from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paradraft import ragged
from paradraft.core import Draft, TargetOut, Verdict
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import FINAL_NORM
from paradraft.models.target import Target
from paradraft.ragged import from_lists
from paradraft.tree import ABSENT
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer
from tests.support.decoding import requests, target_of


def target(**settings: int) -> Target:
    return target_of(CausalLM(tiny_model(1), vocab_size=VOCAB, compiled=False, **settings))


def test_every_batch_begins_another_cache() -> None:
    """Guards two batches on one cache: the older one is told that it has ended, also after many; rows that join one
    that is under way begin nothing."""
    ours = target()
    seen = [ours.starts]
    for _ in range(3):
        ours.start()
        seen.append(ours.starts)
        for _ in range(2):
            ours.join(requests([[5, 6]]))
            assert ours.starts == seen[-1]
    assert len(set(seen)) == 4


def test_prompts_are_as_long_as_the_capacity_at_most() -> None:
    """Guards against prompts that overrun the cache; who is refused has not joined."""
    ours = target(capacity=20)
    ours.start()
    with pytest.raises(ValueError, match="21 tokens, the model has room for 20"):
        ours.join(requests([[1], [1] * 21]))
    assert ours.lm.cache.lengths == []
    ours.join(requests([[1] * 20]))
    assert ours.lm.cache.lengths == [19]


def test_what_was_read_is_told() -> None:
    """Guards drafters that read the prompts: in order, as they were asked, and with a row for each."""
    ours = target()
    ours.start()
    assert ours.join(requests([[5, 6, 7], [8]])).tokens == [[5, 6, 7], [8]]
    assert ours.join(requests([[0]])).tokens == [[0]]


@pytest.mark.parametrize("shared", [1, 3, 6])
def test_states_after_a_kept_row_are_those_of_the_whole_prompt(shared: int) -> None:
    """Guards drafters that read states: of a prompt that begins as a kept row, the first token that is not shared was
    predicted from the state of the last one that is, which no cache of keys and values holds."""
    ours, prompts = target(), [[5, 6, 7, 5, 6, 7, 9, 10], [1, 2, 3]]
    ours.start(hidden_layers=(FINAL_NORM, 1))
    whole = ours.join(requests(prompts))
    saved = ours.lm.cache.save(0, 7)
    ours.start(hidden_layers=(FINAL_NORM, 1))
    begun = ours.join(requests(prompts), [(saved, shared), None])
    assert ours.lm.cache.lengths == [7, 2]
    for layer in (FINAL_NORM, 1):
        torch.testing.assert_close(begun.hidden[layer][0, shared:], whole.hidden[layer][0, shared:])
        torch.testing.assert_close(begun.hidden[layer][1, :3], whole.hidden[layer][1, :3])
        assert not begun.hidden[layer][0, :shared].any() and whole.hidden[layer][0, 1:shared].all()


def test_rows_that_join_go_on_from_their_own_last_token() -> None:
    """Guards the roots: those of rows that were there already, that join, and that are ordered anew."""
    ours, texts = target(), [[5, 6, 7], [8]]
    ours.start()
    ours.join(requests(texts))
    for more in ([9, 10], [11], None):
        draft = Draft.chain(torch.tensor([[1, 2]] * len(texts)))
        out = ours.forward(draft)
        paths = [[0], *([] for _ in texts[1:])]
        verdict = Verdict.of(draft, paths, range(20, 20 + len(texts)))
        new = ours.commit(verdict, out)
        assert new.tokens == verdict.tokens and new.hidden == {}
        texts = ragged.joined(texts, verdict.tokens)
        if more is not None:
            ours.join(requests([more]))
            texts.append(more)
        else:
            ours.keep(torch.tensor([3, 1, 0]))
            texts = [texts[row] for row in (3, 1, 0)]
        logits = ours.forward(Draft.empty(len(texts), ours.device)).logits
        for row, text in enumerate(texts):
            fresh = ours.lm.model(torch.tensor([text])).logits[0, -1, :VOCAB]
            torch.testing.assert_close(logits[row, 0], fresh, rtol=1e-10, atol=1e-10)


def test_hidden_states_are_those_from_which_each_token_was_predicted() -> None:
    """Guards drafters that read the target's states: the next token's state is that of the last accepted node. States
    of layers that only the rule reads stay in the pass."""
    ours = target()
    ours.start(hidden_layers=(1, -1), of_rule=(2, -1))
    ours.join(requests([[5, 6], [7, 8]]))
    draft = Draft(tokens=torch.tensor([[1, 2, 3]] * 2), parents=torch.tensor([[-1, -1, 1]] * 2))
    out = ours.forward(draft)
    assert {layer: state.shape[:2] for layer, state in out.hidden.items()} == dict.fromkeys((1, -1, 2), (2, 4))
    states = torch.arange(8.0).view(2, 4, 1)  # of the root and of three nodes
    drawn = [[2, 0, 3, 9], [9, 0, 0, 0]]
    verdict = replace(Verdict.of(draft, [[1, 2], []], [9, 9]), drawn=drawn)
    new = ours.commit(verdict, TargetOut(logits=out.logits, hidden={1: states, 2: states, -1: -states}))
    assert set(new.hidden) == {1, -1}
    assert new.drawn is drawn
    there = from_lists(new.tokens) != ABSENT
    assert new.tokens == [[2, 3, 9], [9]]
    assert new.hidden[1][there].flatten().tolist() == [0.0, 2.0, 3.0, 4.0]
    assert new.hidden[-1][there].flatten().tolist() == [0.0, -2.0, -3.0, -4.0]


def test_reserved_tokens_are_those_of_this_batch() -> None:
    """Guards one target of two drafters; what the model itself suppresses stays forbidden."""
    ours = target()
    ours.lm.forbid([3])
    for reserved in ([5, 6], [VOCAB + 3], [7], []):
        ours.start(reserved)
        ours.join(requests([[1, 2]]))
        logits = ours.forward(Draft.empty(1, ours.device)).logits[0, 0]
        assert {3, *reserved} - {VOCAB + 3} == set((logits == -torch.inf).nonzero().flatten().tolist())


def test_a_pass_reads_the_last_committed_token_and_the_draft() -> None:
    """Guards the first round, whose root is the prompt's last token, and drafters that look for hidden states: a pass
    returns those of the layers that were asked for, which are none."""
    ours = target()
    ours.start()
    ours.join(requests([[5, 6, 7]]))
    out = ours.forward(Draft.chain(torch.tensor([[3, 2]])))
    with torch.inference_mode():
        expected = ours.lm.model(torch.tensor([[5, 6, 7, 3, 2]])).logits[:, 2:, :VOCAB]
    torch.testing.assert_close(out.logits, expected, rtol=1e-10, atol=1e-10)
    assert out.hidden == {}


def test_end_tokens_are_found_wherever_a_model_names_them() -> None:
    """Guards answers that never end: one id, several, or none; 0 is an id. As for `generate`, the generation config
    alone says so: a model's config counts where it was made into a generation config, when the model was loaded."""
    model = tiny_model(1)
    tokenizer = tiny_tokenizer()
    target = Target(CausalLM(model, vocab_size=VOCAB, compiled=False), tokenizer)
    assert target.tokenizer is tokenizer
    for generation, config, found in [
        (7, 3, {7}), ([7, 0], 3, {7, 0}), (None, 3, set()), (None, [3, 4], set()), (0, 3, {0}), (None, None, set()),
    ]:  # fmt: skip
        model.generation_config.eos_token_id, model.config.eos_token_id = generation, config
        assert target.eos_ids == found


def test_states_are_returned_of_the_layers_that_are_asked_for() -> None:
    """Guards drafters that read the target: those of the prompt, of the root and of each node; nothing by default."""
    ours, prompt = target(), requests([[5, 6, 7]])
    draft = Draft(tokens=torch.tensor([[1, 2]]), parents=torch.tensor([[-1, -1]]))
    for layers in ((), (1, -1)):
        ours.start((), layers)
        read, hidden = ours.join(prompt).hidden, ours.forward(draft).hidden
        assert tuple(read) == tuple(hidden) == layers
    for node in (1, 2):
        text = torch.tensor([[5, 6, 7, node]])
        whole = ours.lm.model(text, output_hidden_states=True).hidden_states[1]
        torch.testing.assert_close(hidden[1][:, [0, node]], whole[:, 2:], rtol=1e-10, atol=1e-10)
        # A token is predicted from the state of the token before it, and the first one from none.
        torch.testing.assert_close(read[1][:, 1:], whole[:, :2], rtol=1e-10, atol=1e-10)
        assert not read[1][:, 0].any()


def test_rows_begin_with_what_was_saved_of_others() -> None:
    """Guards prompts that begin like a row that has left: the rest is read behind it, at least the last token, and
    rows beside it, that are there or that join too, are as they would be."""
    ours = target()
    ours.start()
    ours.join(requests([[4, 4], [1, 2, 3, 4, 5]]))
    saved = ours.lm.cache.save(1, 9)
    ours.keep(torch.tensor([0]))
    texts = [[4, 4], [5, 6], [1, 2, 3, 9, 8, 7], [1, 2], [1, 2, 3, 4, 5, 6]]
    before = ours.lm.passes.copy()
    told = ours.join(requests(texts[1:]), [None, (saved, 3), (saved, 2), (saved, 5)])
    assert told.tokens == texts[1:]
    assert ours.lm.cache.lengths == [len(text) - 1 for text in texts]
    assert max(made.tokens for made in ours.lm.passes - before) == 2, "only what no row had is read"
    logits = ours.forward(Draft.empty(len(texts), ours.device)).logits
    for row, text in enumerate(texts):
        fresh = ours.lm.model(torch.tensor([text])).logits[0, -1, :VOCAB]
        torch.testing.assert_close(logits[row, 0], fresh, rtol=1e-10, atol=1e-10)
    before = ours.lm.passes.copy()
    ours.join(requests([[1, 2, 3, 4]]), [(saved, 4)])
    assert ours.lm.cache.lengths[-1] == 3 and ours.lm.passes == before, "the last token is read in the next round"


@pytest.mark.parametrize("compiled", [False, True])
def test_the_likeliest_tokens_of_a_pass(compiled: bool) -> None:
    """Guards drafters that learn from passes in C++ and by torch: tokens after every node, refused ones too, without
    those that may not be chosen; prompts tell none."""
    ours = target_of(CausalLM(tiny_model(1).float(), vocab_size=VOCAB, compiled=compiled))
    assert ours.lm.is_native == compiled
    ours.start(reserved_tokens=[7], likeliest=3)
    assert ours.join(requests([[5, 6], [8]])).likeliest is None
    draft = Draft(tokens=torch.tensor([[4, 9], [3, ABSENT]]), parents=torch.tensor([[-1, -1], [-1, 0]]))
    out = ours.forward(draft)
    known = ours.commit(Verdict.of(draft, [[1], []], [2, 2]), out).likeliest
    assert known is not None and (known.read, known.parents) == draft.lists
    for row, nodes in ((0, 3), (1, 2)):
        best = out.logits[row, :nodes].topk(3)
        assert known.tokens[row][:nodes] == best.indices.tolist()
        assert known.logits[row][:nodes] == best.values.tolist()
        assert all(7 not in tokens for tokens in known.tokens[row][:nodes])
    ours.start()
    ours.join(requests([[5, 6]]))
    assert ours.forward(Draft.empty(1, ours.device)).likeliest is None
