"""Trimmed drafts: what is counted, which rows are left, and what passes compute with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from paradraft.data.samples import Sample, label_counts
from paradraft.formats.vocab_map import VocabMap
from paradraft.models.runtime import Runtime
from paradraft.sources import reduced_head
from paradraft.sources.load_plan import plan_of
from paradraft.sources.loading import pocket_folder
from paradraft.sources.target_loading import load_lm
from paradraft.train.init.trim import Untrimmed, count, write_trimmed
from tests.conftest import VOCAB, tiny_tokenizer
from tests.support import gguf_files
from tests.support.decoding import empty_rows
from tests.support.packed_models import write_packed
from tests.support.reduced_heads import RUNTIMES
from tests.support.targets import KINDS, read, write_model

ROWS = VOCAB + 8


def logits_of(folder: Path, runtime: Runtime) -> Tensor:
    lm = load_lm(plan_of(str(folder), runtime), VOCAB)
    assert lm.is_native == (runtime.compiled is None)
    empty_rows(lm, 2)
    return lm.forward(torch.tensor([[5, 7, 9], [1, 2, -1]])).logits[:, :2]


def in_bfloat16(folder: Path, **settings: object) -> Path:
    """A folder of a model in bfloat16, as the trimmed one is."""
    write_model(folder, layers=2, **{"hidden_size": 64, "intermediate_size": 64, **settings})
    read(folder).bfloat16().save_pretrained(folder)
    return folder


def trimmed(source: Path, out: Path, ids: list[int]) -> Path:
    """The rows of these ids."""
    draft = Untrimmed.find(str(source))
    write_trimmed(draft, VocabMap(to_target=torch.tensor([draft.row_ids.tolist().index(token) for token in ids])), out)
    return out


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_all_rows_are_the_whole_head(tmp_path: Path, kind: str) -> None:
    """Guards every way of computing, for a head of the embedding's weights and one of other weights: with all rows no
    logit differs in a bit; with some of them none of theirs does in C++."""
    source, some = in_bfloat16(tmp_path / "whole", kind=kind), [0, 3, 7, *range(20, 50, 3), VOCAB - 1]
    assert KINDS["qwen3"].tie_word_embeddings and not KINDS["llama"].tie_word_embeddings
    every, few = (trimmed(source, tmp_path / name, ids) for name, ids in (("all", list(range(ROWS))), ("few", some)))
    for runtime in RUNTIMES.values():
        whole = logits_of(source, runtime)
        assert torch.equal(logits_of(every, runtime), whole), runtime
        if runtime.compiled is None:
            others = ~torch.isin(torch.arange(VOCAB), torch.tensor(some))
            assert torch.equal(logits_of(few, runtime), whole.masked_fill(others, -torch.inf)), runtime


def of_other_rows(model: PreTrainedModel, rows_U: Tensor, vocab_map: VocabMap) -> None:
    """The right map, and the rows next to them."""
    reduced_head.cut_head(model, rows_U.roll(1), vocab_map)


def test_other_rows_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the test above."""
    monkeypatch.setattr("paradraft.train.init.trim.cut_head", of_other_rows)
    with pytest.raises(AssertionError):
        test_all_rows_are_the_whole_head(tmp_path, "llama")


def test_what_is_stored_is_what_other_tools_read(tmp_path: Path) -> None:
    """Guards the format of EAGLE-3's checkpoints: names, dtypes, offsets, and the keys of the config."""
    out = trimmed(in_bfloat16(tmp_path / "whole"), tmp_path / "out", [0, 5, 6, 70])
    stored, config = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    assert stored["d2t"].dtype == torch.int64 and stored["d2t"].tolist() == [0, 4, 4, 67]
    assert stored["t2d"].dtype == torch.bool and stored["t2d"].nonzero().flatten().tolist() == [0, 5, 6, 70]
    assert stored["lm_head.weight"].shape == (4, 64) and stored["lm_head.weight"].dtype == torch.bfloat16
    assert stored["model.embed_tokens.weight"].shape == (ROWS, 64)
    assert (config["vocab_size"], config["draft_vocab_size"], config["tie_word_embeddings"]) == (ROWS, 4, False)
    assert config["dtype"] == "bfloat16"


def test_a_trimmed_draft_can_be_trimmed_again(tmp_path: Path) -> None:
    """Guards ids that are taken for rows the second time, which would draft other tokens."""
    source = in_bfloat16(tmp_path / "whole")
    once = trimmed(source, tmp_path / "once", [0, *range(10, 60, 2)])
    twice, direct = (trimmed(each, tmp_path / f"from-{each.name}", [0, 12, 44]) for each in (once, source))
    assert Untrimmed.find(str(once)).always == [0]
    found, wanted = (load_file(folder / "model.safetensors") for folder in (twice, direct))
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("tied", [True, False])
def test_rows_in_few_bits_become_numbers(tmp_path: Path, tied: bool) -> None:
    """Guards GGUF files: the weights are what the file means, to bfloat16, and the tokenizer is the file's."""
    expected = gguf_files.write_gguf(tmp_path / "m.gguf", gguf_files.tiny_model("qwen3", tied=tied), "Q4_0")
    out = trimmed(tmp_path / "m.gguf", tmp_path / "out", [0, 1, 40, 41])
    stored, meant = load_file(out / "model.safetensors"), expected.state_dict()
    assert torch.equal(stored["lm_head.weight"], meant["lm_head.weight"][[0, 1, 40, 41]].bfloat16())
    assert all(torch.equal(stored[key], meant[key].bfloat16()) for key in meant if key != "lm_head.weight")
    assert Untrimmed.find(str(out)).tokenizer.get_vocab() == gguf_files.tiny_tokenizer().get_vocab()
    assert Untrimmed.find(str(out)).ends == Untrimmed.find(str(tmp_path / "m.gguf")).ends


def test_packed_folders_become_numbers(tmp_path: Path) -> None:
    """Guards GPTQ: the trimmed folder is of numbers, and says nothing of packed weights."""
    expected = write_packed(tmp_path / "packed", gguf_files.tiny_model("llama", tied=False), "gptq")
    out = trimmed(tmp_path / "packed", tmp_path / "out", [0, 1, 40])
    weight = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(load_file(out / "model.safetensors")[weight], expected.state_dict()[weight].bfloat16())
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


def test_a_pard_drafter_stays_one(tmp_path: Path) -> None:
    """Guards what is beside the weights: mask token, trained length, previous-token head, generation config."""
    source = pocket_folder("pard")
    draft = Untrimmed.find(str(source))
    out = trimmed(source, tmp_path / "out", [*range(0, 4088, 3), 4088])
    was, is_now = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
    changed = {"draft_vocab_size", "tie_word_embeddings", "transformers_version"}
    assert {key: value for key, value in was.items() if key not in changed} == {
        key: value for key, value in is_now.items() if key not in changed
    }
    for name in ("previous_token_head/model.safetensors", "generation_config.json", "tokenizer.json"):
        assert (out / name).is_file()
    head, kept = (load_file(folder / "previous_token_head/model.safetensors") for folder in (source, out))
    assert all(torch.equal(head[key], kept[key]) for key in head)
    assert draft.ends == Untrimmed.find(str(out)).ends


def records(count: int) -> list[dict[str, str]]:
    letters = "abcdefghij"
    return [{"prompt": "xyz", "response": letters[i % 10] * (1 + i % 4) + "q"} for i in range(count)]


def write_answers(file: Path, answers: list[dict[str, str]]) -> Path:
    file.write_text("".join(json.dumps(answer) + "\n" for answer in answers), encoding="utf-8")
    return file


def check_counts(draft: Path, file: Path) -> None:
    """Compares counts with the tokens of the responses, one by one, each with an end token."""
    answers = records(40)
    write_answers(file, answers)
    counts, tokenizer = count(Untrimmed.find(str(draft)), [file]), tiny_tokenizer()
    naive = [0] * ROWS
    for answer in answers:
        for token in [*tokenizer(answer["response"])["input_ids"], tokenizer.eos_token_id]:
            naive[token] += 1
    assert (counts.counted + counts.held_out).tolist() == naive
    assert counts.answers == 36 and counts.held_out_tokens == int(counts.held_out.sum()) > 0
    assert counts.tokens + counts.held_out_tokens == sum(naive)


def test_the_answers_tokens_are_counted(tmp_path: Path, family: Path) -> None:
    """Guards prompts that are counted too, missing end tokens, and answers that are lost between the two parts. Both
    parts have the answers of a prompt together, or else they are no new text; here prompts are one group, so that each
    answer is one."""
    check_counts(family / "draft", tmp_path / "answers.jsonl")


def test_counting_prompts_is_caught(tmp_path: Path, family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the test above."""

    def counts(samples: list[Sample], vocab_size: int) -> Tensor:
        return label_counts([replace(each, is_label=[True] * len(each.tokens)) for each in samples], vocab_size)

    monkeypatch.setattr("paradraft.train.init.trim.label_counts", counts)
    with pytest.raises(AssertionError):
        check_counts(family / "draft", tmp_path / "answers.jsonl")


def test_few_answers_are_all_counted(tmp_path: Path, family: Path) -> None:
    """Guards against a tenth of nothing."""
    counts = count(Untrimmed.find(str(family / "draft")), [write_answers(tmp_path / "few.jsonl", records(9))])
    assert (counts.answers, counts.held_out_tokens) == (9, 0)
    assert counts.coverage([0]).held_out is None


def test_end_tokens_and_turns_are_kept(tmp_path: Path) -> None:
    """Guards a draft that can never draft the end of an answer: all end tokens of both configs have a row, whatever the
    counts; a mask token needs none."""
    source = in_bfloat16(tmp_path / "whole")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": 3, "pard_token": 66}))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 4]}))
    draft = Untrimmed.find(str(source))
    assert draft.always == [0, 3, 4, 9]
    counts = torch.arange(ROWS)
    assert VocabMap.of_counts(counts, size=5, always=draft.always).to_target.tolist() == [0, 3, 4, 9, ROWS - 1]
