"""The head that tells masks the tokens before them: how it is trained, and that decoding does the same."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paradraft.core import Request
from paradraft.data.samples import Sample
from paradraft.decode.generation import Generation
from paradraft.drafters.pard import PardDrafter
from paradraft.drafters.parts.path_heads.previous_token import PreviousTokenHead
from paradraft.engine.loader import load
from paradraft.formats.pard import PREVIOUS_TOKEN_HEAD
from paradraft.models.output_head import sizes_of
from paradraft.models.runtime import Runtime
from paradraft.sampling.candidates import Candidates
from paradraft.train.drafters import pard
from paradraft.train.drafters.pard_recipe import PardRecipe
from paradraft.train.init.init_draft import make
from paradraft.train.init.init_from import PretrainedSibling
from paradraft.train.objectives.batch import Drop, TrainingBatch, collate
from paradraft.train.objectives.objective import Objective, corrected
from paradraft.train.objectives.rows import attention_mask
from paradraft.train.run import setup
from tests.conftest import VOCAB, tiny_tokenizer
from tests.support.kinds import model_of

WIDTH, RANK = 6, 4


def batch_of(groups: list[list[int]], *, k: int = 5, r: float = 0.8) -> TrainingBatch:
    """Rows of random texts of these lengths, the first tokens of which are a prompt."""
    generator = torch.Generator().manual_seed(len(groups))
    samples = [
        [
            Sample(
                tokens=torch.randint(1, VOCAB, (length,), generator=generator).tolist(),
                is_label=[place > 2 for place in range(length)],
            )
            for length in lengths
        ]
        for lengths in groups
    ]
    seeds = [[torch.Generator().manual_seed(length) for length in lengths] for lengths in groups]
    return collate(samples, Drop(k=k, r=r, r_min=0.2, mask_id=VOCAB + 1), seeds)


def chains(batch: TrainingBatch) -> list[tuple[int, list[int]]]:
    """For each row that is not filling its group, and the rows of its chain up to itself, masks alone."""
    found = []
    for group in range(len(batch.tokens)):
        row_at = {
            (int(place), int(depth)): row
            for row, (place, depth, document) in enumerate(
                zip(batch.text_indices[group], batch.depths[group], batch.documents[group], strict=True)
            )
            if document >= 0
        }
        for (place, depth), row in row_at.items():
            found.append((group, [row_at[place - depth + step, step] for step in range(1, depth + 1)] or [-1 - row]))
    return found


@pytest.mark.parametrize("groups", [[[12, 9], [15]], [[7]], [[4], [20], [6, 5]]])
def test_each_mask_is_corrected_after_its_own_chain(groups: list[list[int]]) -> None:
    """Guards memories of another chain, sample or group, and embeddings of another token."""
    batch = batch_of(groups)
    torch.manual_seed(3)
    head = PreviousTokenHead(WIDTH, RANK)
    torch.nn.init.normal_(head.correction.weight)
    embeddings = torch.randn(*batch.texts.tokens.shape, WIDTH)
    hidden = torch.randn(*batch.tokens.shape, WIDTH)
    found = corrected(head, hidden, batch, embeddings)
    seen = 0
    for group, rows in chains(batch):
        if rows[0] < 0:  # a real token
            assert torch.equal(found[group, -1 - rows[0]], hidden[group, -1 - rows[0]])
            continue
        memory = None
        for row in rows:
            before = embeddings[group, batch.text_indices[group, row]]
            memory = head.remember(head.state(hidden[group, row]) + head.token(before), memory)
        torch.testing.assert_close(found[group, rows[-1]], hidden[group, rows[-1]] + head.correction(memory))
        seen += 1
    assert seen == int((batch.depths > 0).sum())
    assert torch.equal(found[batch.documents < 0], hidden[batch.documents < 0])


def test_a_new_head_changes_nothing() -> None:
    batch = batch_of([[9], [6]])
    hidden = torch.randn(*batch.tokens.shape, WIDTH)
    embeddings = torch.randn(*batch.texts.tokens.shape, WIDTH)
    assert torch.equal(corrected(PreviousTokenHead(WIDTH, RANK), hidden, batch, embeddings), hidden)


def test_an_ordinary_draft_has_no_masks_to_correct() -> None:
    batch = batch_of([[9]], k=1)
    hidden = torch.randn(*batch.tokens.shape, WIDTH)
    assert corrected(PreviousTokenHead(WIDTH, RANK), hidden, batch, torch.randn(1, 8, WIDTH)) is hidden


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_ids_that_are_no_tokens_are_not_corrected(family: Path, tmp_path: Path, lora: dict[str, int] | None) -> None:
    """Guards drafts of engines that do not know the head: a mask that it alone holds down, they would draft."""
    recipe = recipe_for(family, tmp_path / "out", lora=lora)
    objective = setup.prepare(recipe, pard.build, torch.device("cpu"), processes=1).trainee.objective
    assert isinstance(objective, Objective) and objective.previous is not None
    model = objective.model
    assert model.config.pard_token in objective.unused
    told, untold = torch.randn(2, 7, model.config.hidden_size)
    found, corrected, plain = (
        objective._logits(torch.cat([told, untold], dim=1)), model.lm_head(told), model.lm_head(untold)
    )  # fmt: skip
    used = [token for token in range(model.config.vocab_size) if token not in objective.unused]
    assert len(used) > model.config.vocab_size / 2
    torch.testing.assert_close(found[:, used], corrected[:, used])
    torch.testing.assert_close(found.softmax(1)[:, objective.unused], plain.softmax(1)[:, objective.unused])
    found[:, objective.unused].sum().backward()
    assert any(weight.grad is not None and weight.grad.any() for weight in model.parameters())


def recipe_for(family: Path, out: Path, **settings: object) -> PardRecipe:
    data = out.parent / "data.txt"
    data.write_text("helloworld" * 6, encoding="utf-8")
    return PardRecipe.model_validate({
        "model": str(family / "pard"), "data": [data], "out": out, "steps": 4, "samples_per_step": 2, "max_length": 24,
        "bf16": False, "device": "cpu", "held_out": 0, "warmup_steps": 1, "k": 4, "previous_token_rank": RANK,
    } | settings)  # fmt: skip


def trained(recipe: PardRecipe) -> pard.PardTrainee:
    """A trainee whose weights are random numbers that bf16 can store."""
    trainee = setup.prepare(recipe, pard.build, torch.device("cpu"), processes=1).trainee
    assert isinstance(trainee, pard.PardTrainee)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trainee.objective.parameters():
            size = parameter.std().nan_to_num(0.1).clamp(min=0.1)
            parameter += 0.2 * size * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter.bfloat16())
        if (head := trainee.objective.previous) is not None:  # which begins as no correction
            head.correction.weight.copy_(torch.randn(head.correction.weight.shape, generator=generator).bfloat16())
    trainee.save(recipe.out, trainee.objective.state_dict())
    return trainee


def predicted(objective: Objective, batch: TrainingBatch) -> torch.Tensor:
    """The likeliest token of each row, as it is trained."""
    assert objective.previous is not None
    with torch.no_grad():
        hidden = objective.model.model(
            input_ids=batch.tokens, attention_mask=attention_mask(batch.rows, objective.model),
            position_ids=batch.positions,
        ).last_hidden_state  # fmt: skip
        embeddings = objective.model.get_input_embeddings()(batch.texts.tokens)
        logits = objective.model.lm_head(corrected(objective.previous, hidden, batch, embeddings))
        return logits[..., :VOCAB].argmax(-1)


@pytest.mark.parametrize("compiled", [False, True])
def test_decoding_computes_what_is_trained(family: Path, tmp_path: Path, compiled: bool) -> None:
    """Guards a head that decoding applies to other states, tokens or memories than training does: it would lose
    acceptance and nothing else."""
    trainee = trained(recipe_for(family, tmp_path / "out"))
    runtime = Runtime(dtype="float32", compiled=compiled)
    engine = load(
        str(family / "target"), drafter="pard", draft=str(tmp_path / "out"), k=4, runtime=runtime, lengths="fixed"
    )
    batch = engine.new_batch()
    without = 0
    for prompt in ([5], [7, 9, 11, 13, 2], [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]):
        batch.clear()
        batch.join([Generation(Request(tokens=prompt))])
        draft = batch.drafter.propose([4]).tokens[0].tolist()
        text = Sample(tokens=prompt + draft, is_label=[True] * (len(prompt) + 4))
        rows = trainee.collate([[text]], [[torch.Generator()]])
        found = predicted(trainee.objective, rows)
        is_after = (rows.positions - rows.depths == len(prompt) - 1) & (rows.documents >= 0)
        depths = rows.depths[is_after].tolist()
        assert found[is_after].tolist() == [draft[depth] for depth in depths]
        batch.clear()
        batch.join([Generation(Request(tokens=prompt))])
        drafter = batch.drafter
        assert isinstance(drafter, PardDrafter) and drafter._path_head is not None
        head, drafter._path_head = drafter._path_head, None
        without += drafter.propose([4]).tokens[0].tolist() != draft
        drafter._path_head = head
    assert without  # or it would show nothing


@pytest.mark.parametrize("rank", [0, RANK])
def test_a_draft_temperature_divides_all_logits(family: Path, tmp_path: Path, rank: int) -> None:
    """Guards a head that reads the states before they are divided, or corrects them too much: also what masks predict
    must be divided, and nothing else of it change."""
    found = []
    for temperature in (1.0, 0.5):
        settings = {"previous_token_rank": rank, "draft_temperature": temperature}
        trained(recipe_for(family, tmp_path / f"{temperature}", **settings))
        runtime = Runtime(dtype="float32", compiled=False)
        engine = load(
            str(family / "target"),
            drafter="pard",
            draft=str(tmp_path / f"{temperature}"),
            k=4,
            runtime=runtime,
            lengths="fixed",
        )
        batch = engine.new_batch()
        batch.join([Generation(Request(tokens=[5, 6, 7]))])
        drafter = batch.drafter
        assert isinstance(drafter, PardDrafter)
        seen: list[torch.Tensor] = []
        draws = drafter._sampler.candidates_at

        def look(
            logits: torch.Tensor, *rest: object, seen: list[torch.Tensor] = seen, draws: Any = draws
        ) -> Candidates:
            seen.append(logits[..., :VOCAB])
            found: Candidates = draws(logits, *rest)
            return found

        drafter._sampler.candidates_at = look  # type: ignore[method-assign]  # to see what it is given
        drafter.propose([4])
        found.append(torch.cat(seen, dim=1))
    assert found[0].shape[1] == 4
    torch.testing.assert_close(found[1], found[0] / 0.5, rtol=1e-4, atol=1e-3)


def test_a_head_is_kept_made_and_left_out(family: Path, tmp_path: Path) -> None:
    """Guards `previous_token_rank` of a model that has a head."""
    first = trained(recipe_for(family, tmp_path / "first"))
    assert (tmp_path / "first" / PREVIOUS_TOKEN_HEAD).exists()

    def head_of(**settings: object) -> PreviousTokenHead | None:
        recipe = recipe_for(family, tmp_path / "next", model=str(tmp_path / "first"), **settings)
        trainee = setup.prepare(recipe, pard.build, torch.device("cpu"), processes=1).trainee
        assert isinstance(trainee.objective, Objective)
        return trainee.objective.previous

    kept = head_of(previous_token_rank=None)
    assert kept is not None and first.objective.previous is not None
    for name, weight in first.objective.previous.state_dict().items():
        torch.testing.assert_close(kept.state_dict()[name], weight)
    new = head_of(previous_token_rank=3)
    assert new is not None and new.rank == 3 and not new.correction.weight.any()
    assert head_of(previous_token_rank=0) is None and head_of(k=1, previous_token_rank=None) is None


def test_engines_that_do_not_know_the_head_load_the_folder(family: Path, tmp_path: Path) -> None:
    """Guards weights of the head among the model's own, which `transformers` would warn of and vLLM refuse."""
    trained(recipe_for(family, tmp_path / "out"))
    plain = load(str(tmp_path / "out"), runtime=Runtime(dtype="float32", compiled=False))
    assert math.isfinite(plain.target.lm.model.lm_head.weight.sum().item())
    # vLLM and TensorRT-LLM read every file of weights that lies beside the config.
    assert [file.name for file in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]
    assert (tmp_path / "out" / PREVIOUS_TOKEN_HEAD).exists()


def test_a_new_draft_of_one_with_a_head_keeps_it(family: Path, tmp_path: Path) -> None:
    """Guards `init-draft` of a PARD drafter: a config that tells of a head, and no head."""
    trained(recipe_for(family, tmp_path / "first"))
    make(str(family / "target"), tmp_path / "fitted", PretrainedSibling(name=str(tmp_path / "first")))
    one, two = ((tmp_path / folder / PREVIOUS_TOKEN_HEAD).read_bytes() for folder in ("first", "fitted"))
    assert one == two
    again = recipe_for(family, tmp_path / "again", model=str(tmp_path / "fitted"), previous_token_rank=None)
    assert trained(again).objective.previous is not None


@pytest.mark.parametrize("damage", ["missing", "cut", "other", "infinite", "rank 0", "rank 10000"])
def test_a_damaged_head_is_one_line(family: Path, tmp_path: Path, damage: str) -> None:
    trained(recipe_for(family, tmp_path / "out"))
    file = tmp_path / "out" / PREVIOUS_TOKEN_HEAD
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-9])
    elif damage == "infinite":
        weights = load_file(file)
        weights["memory.weight"][0, 0] = math.nan
        save_file(weights, file)
    elif damage.startswith("rank"):
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        config["pard_previous_token_rank"] = int(damage.split()[1])
        (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    else:
        file.write_bytes((tmp_path / "out" / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=f"{PREVIOUS_TOKEN_HEAD} cannot be read .*train it again") as raised:
        load(str(family / "target"), drafter="pard", draft=str(tmp_path / "out"), k=4, lengths="fixed")
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("kind", ["granite", "gemma3_text", "olmo2"])
@torch.no_grad()
def test_every_norm_can_cool_a_drafter(kind: str) -> None:
    """Guards norms that multiply by 1 + weight, and logits that are divided again."""
    model, tokens = model_of(kind), torch.tensor([[5, 3, 8]])
    before = model(tokens).logits
    pard.cool(model, None, 0.5)
    torch.testing.assert_close(model(tokens).logits, before / 0.5, rtol=1e-5, atol=1e-5)


def test_squeezed_logits_are_neither_cooled_nor_corrected(tmp_path: Path) -> None:
    """Guards drafts of Gemma models with a softcap: a correction of a state is no sum of logits there."""
    model = model_of("gemma3_text with a softcap", torch.float32)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    for setting in ("previous_token_rank=6", "draft_temperature=0.5"):
        name, value = setting.split("=")
        recipe = PardRecipe.model_validate(
            {"model": str(tmp_path), "data": ["d"], "out": "o", "steps": 1, name: float(value)}
        )
        with pytest.raises(ValueError, match=rf"{setting}: this model squeezes its logits \(final_logit_softcapping=4"):
            pard.drafter_skeleton(recipe, tiny_tokenizer(), "cpu")


def test_sizes_are_what_the_modules_make() -> None:
    """Guards heads that begin as if Gemma's embeddings were not scaled, and its norms multiplied by almost nothing."""
    model, tokens = model_of("gemma3_text"), torch.arange(VOCAB + 8)
    embeddings, states = sizes_of(model)
    made = model.model.embed_tokens(tokens)
    assert embeddings == pytest.approx(made.square().mean().sqrt().item(), rel=1e-5)
    weight = model.model.norm.weight
    assert states == pytest.approx((1 + weight).square().mean().sqrt().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"draft_temperature": 1e-40}, "draft_temperature"), ({"previous_token_rank": 10**20}, "previous_token_rank")],
)
def test_settings_out_of_range(family: Path, tmp_path: Path, settings: dict[str, object], told: str) -> None:
    """Guards weights that are all infinite, and numbers that no tensor can have."""
    with pytest.raises(ValueError, match=told):
        recipe_for(family, tmp_path / "out", **settings)


def test_the_head_is_in_the_estimate(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a head that takes the memory before it is known that it fits."""
    monkeypatch.setattr("paradraft.train.memory.free_bytes", lambda device: 2.0**28)
    with pytest.raises(ValueError, match=r"this recipe needs .* GiB"):
        setup.prepare(
            recipe_for(family, tmp_path / "out", previous_token_rank=2**14),
            pard.build,
            torch.device("cpu"),
            processes=1,
        )
