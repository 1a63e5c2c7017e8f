from __future__ import annotations

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models
from transformers import GenerationConfig, PreTrainedTokenizerFast

from paradraft.text.vocabulary import (
    end_ids,
    free_id,
    of_one_family,
    resize,
    role_ids,
    unsaid_id,
    used_rows,
)
from paradraft.train.init.adaptation import add_mask_token
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer


def with_special(*tokens: str, **roles: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    for role, token in roles.items():
        setattr(tokenizer, role, token)
    return tokenizer


def with_gaps(*ids: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose `len` is less than its largest id and one."""
    inner = Tokenizer(models.WordLevel({f"t{index}": index for index in ids}, unk_token=f"t{ids[0]}"))
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def test_used_rows_are_counted_by_the_largest_id() -> None:
    """Guards tokenizers that skip ids: their `len` is the id of a token in use."""
    tokenizer = with_gaps(0, 1, 5)
    assert (len(tokenizer), used_rows(tokenizer)) == (3, 6)
    assert used_rows(tiny_tokenizer()) == VOCAB


@pytest.mark.parametrize(
    ("rows", "taken", "expected"), [(8, (), 6), (8, (6,), 7), (6, (), 4), (6, (4,), 3), (6, (2, 3, 4), None)]
)
def test_the_free_id_is_behind_the_last_token_or_in_a_gap(rows: int, taken: tuple[int, ...], expected: int) -> None:
    """Guards against a mask token that is a token of the text, or that ends it."""
    assert free_id(with_gaps(0, 1, 5), rows, taken) == expected


def test_a_reserved_token_is_taken_where_no_row_is_free() -> None:
    """Guards Llama 3: a row more than the target has cannot be served by vLLM. Tokens with a role are not reserved,
    and neither are those beyond the embedding."""
    names = ["<|reserved_special_token_0|>", "<|eot|>", "[UNUSED_1]", "<|reserved_special_token_2|>"]
    tokenizer = with_special(*names, "<|reserved_special_token_3|>")
    rows = VOCAB + 5
    assert free_id(tokenizer, rows) == VOCAB + 4
    assert free_id(tokenizer, rows, taken=[VOCAB + 4]) == VOCAB + 3
    tokenizer.pad_token = "<|reserved_special_token_3|>"
    assert free_id(tokenizer, rows) == VOCAB + 3
    tokenizer.chat_template = "{{ messages[0].content }}<|reserved_special_token_2|>"
    assert free_id(tokenizer, rows) == VOCAB + 2
    assert free_id(tokenizer, VOCAB + 2) == VOCAB
    assert free_id(with_special("<|eot|>"), VOCAB + 1) is None


def test_ordinary_words_are_not_reserved() -> None:
    """Control: "unused" as a token of the text, not a special one, is in use."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["unused"])
    assert free_id(tokenizer, VOCAB + 1) is None


def test_all_ends_are_found() -> None:
    """Guards against a mask token that a generation config calls the end of a text, which would then never end."""
    model = tiny_model(1)
    model.config.eos_token_id, model.generation_config.eos_token_id = 3, [4, VOCAB]
    assert end_ids(model) == {3, 4, VOCAB}
    assert add_mask_token(model, tiny_tokenizer()) == VOCAB + 1


def test_training_takes_a_reserved_token_before_it_adds_a_row() -> None:
    """Guards the number of rows that vLLM compares; the control, without reserved tokens, gets a row."""
    for special, expected in (("<|reserved_special_token_0|>", VOCAB), ("<|tool|>", VOCAB + 1)):
        model = tiny_model(6, rows=VOCAB + 1)
        assert add_mask_token(model, with_special(special)) == expected
        assert model.config.vocab_size == max(VOCAB + 1, expected + 1)


NAMES = ("<repo>", "<file>", "<stars>", "<issue>", "<empty>")


def never_said(*names: str, head: torch.Tensor | None = None) -> torch.Tensor:
    """A tied embedding with a row for each of `NAMES`, those of these tokens equal but for rounding, as in SmolLM2."""
    rows = torch.randn(VOCAB + len(NAMES), 32, generator=torch.Generator().manual_seed(5)) if head is None else head
    at = [VOCAB + NAMES.index(name) for name in names]
    rows[at] = rows[at[:1]] * (1 + 0.003 * torch.randn(len(at), 32, generator=torch.Generator().manual_seed(6)))
    return rows


def test_a_special_token_that_is_never_said_is_known_by_its_row() -> None:
    """Guards targets whose embedding has no row to spare, such as SmolLM2: a row more than the target has is refused by
    vLLM. The last one is taken, because whoever gives one a meaning begins with the first."""
    tokenizer, head = with_special(*NAMES), never_said("<file>", "<issue>", "<empty>")
    assert free_id(tokenizer, len(head)) is None
    assert unsaid_id(tokenizer, head) == VOCAB + 4
    assert unsaid_id(tokenizer, head, taken=[VOCAB + 4]) == VOCAB + 3
    tokenizer.pad_token = "<empty>"
    assert unsaid_id(tokenizer, head) == VOCAB + 3
    tokenizer.chat_template = "<issue>{{ messages[0].content }}"
    assert unsaid_id(tokenizer, head) == VOCAB + 1
    assert unsaid_id(tokenizer, head.bfloat16()) == VOCAB + 1


def test_what_may_be_said_is_no_mask() -> None:
    """Control: special tokens with rows of their own were learnt, and forbidding one would change the target's text;
    ordinary tokens are none, whatever their rows; and a model without weights says nothing."""
    assert unsaid_id(with_special(*NAMES), never_said("<file>")) is None
    ordinary = tiny_tokenizer()
    ordinary.add_tokens(list(NAMES))
    assert unsaid_id(ordinary, never_said("<file>", "<issue>")) is None
    assert unsaid_id(with_special(*NAMES), never_said("<file>", "<issue>").to("meta")) is None
    outside = never_said("<file>", "<empty>")[: VOCAB + 4]
    assert unsaid_id(with_special(*NAMES), outside) is None, "its twin has no row"


def test_training_takes_what_is_never_said_and_keeps_the_rows() -> None:
    """Guards the number of rows that vLLM compares, in training without `init-draft` before it."""
    model, tokenizer = tiny_model(6, rows=VOCAB + len(NAMES)), with_special(*NAMES)
    with torch.no_grad():
        never_said("<file>", "<stars>", head=model.get_input_embeddings().weight)
    assert add_mask_token(model, tokenizer) == VOCAB + 2
    assert model.config.vocab_size == VOCAB + len(NAMES)


def test_a_token_with_a_role_in_a_config_is_no_mask() -> None:
    """Guards what only a config knows: Llama 2's filling has a row after the tokenizer's last."""
    model = tiny_model(6)
    model.config.pad_token_id, model.generation_config.decoder_start_token_id = VOCAB, VOCAB + 1
    assert role_ids(model.config, GenerationConfig(eos_token_id=[3, 4])) == {0, 3, 4, VOCAB}
    assert add_mask_token(model, tiny_tokenizer()) == VOCAB + 2


def test_a_row_is_added_behind_all_ids_of_the_tokenizer() -> None:
    """Guards models with fewer rows than their tokenizer has ids: the first new row would stand for a token."""
    model = tiny_model(6, rows=VOCAB)
    assert add_mask_token(model, with_special("<|a|>", "<|b|>")) == VOCAB + 2
    assert model.config.vocab_size == VOCAB + 3


def test_families_share_ids() -> None:
    """Guards against a draft that knows the same words by other numbers; tokens that only one knows are no clash."""
    ours = {"a": 0, "b": 1, "c": 2, "<eos>": 3}
    assert of_one_family(ours, ours | {"<think>": 4})
    assert of_one_family(ours, {"a": 0, "b": 1, "c": 2, "<end>": 3})
    assert not of_one_family(ours, ours | {"b": 5})
    assert not of_one_family(ours, {"x": 4, "y": 5})
    assert not of_one_family(ours, {"<eos>": 3, "x": 0, "y": 1, "z": 2}), "one token in common is no family"


@pytest.mark.parametrize("tied", [True, False])
def test_added_rows_are_never_the_likeliest(tied: bool) -> None:
    """Guards drafts of ids that do not exist: a row of zeros has a logit of 0, which may be the largest."""
    model = tiny_model(7)
    if not tied:
        torch.manual_seed(0)
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB + 8, 32, dtype=torch.float64))
    texts = torch.randint(0, VOCAB, (40, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model(texts).logits[..., :VOCAB]
        resize(model, VOCAB + 30, VOCAB)
        after = model(texts).logits
    assert after.shape[-1] == model.config.vocab_size == VOCAB + 30
    torch.testing.assert_close(after[..., :VOCAB], before)
    added = after[..., VOCAB + 8 :]
    torch.testing.assert_close(added, before.mean(-1, keepdim=True).expand_as(added))
    assert (added.amax(-1) < before.amax(-1)).all()


def test_resizing_there_and_back_changes_nothing() -> None:
    """Guards the rows in use, of the embedding and the head."""
    model = tiny_model(7)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    resize(model, VOCAB + 20, VOCAB)
    resize(model, VOCAB + 8, VOCAB)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
