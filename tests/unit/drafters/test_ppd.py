"""PPD: what the prompt tokens of a pass are worth, against passes of the model's own code over one chain at a time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paradraft.core import Draft, Request
from paradraft.decode.generation import Generation
from paradraft.drafters.ppd import PpdDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.formats.head import read_head
from paradraft.models.runtime import Runtime
from paradraft.probes import Probes
from paradraft.sampling_params import Sampling
from paradraft.tree import ABSENT
from tests.conftest import VOCAB
from tests.support.drafts import draft_of

RUNTIMES = [
    pytest.param(Runtime(dtype="float64", compiled=False), id="eager"),
    pytest.param(Runtime(dtype="float32"), id="C++"),
]
TEXTS = [[5, 6, 7, 5, 6], [9], [3, 1, 4, 1, 5, 9, 2, 6]]


def checkpoint(family: Path, folder: Path, **settings: object) -> str:
    """A copy of the prompt tokens that tests train, with another config."""
    shutil.copytree(str(draft_of(family, "ppd")), folder)
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def loaded(family: Path, runtime: Runtime, settings: str = "") -> Engine:
    draft = draft_of(family, "ppd")
    return load(str(family / "target"), drafter=f"ppd{settings}", draft=draft, runtime=runtime, lengths="fixed")


@torch.no_grad()
def logits_after(engine: Engine, text: list[int], embeddings_PED: Tensor) -> Tensor:
    """`[P, V]` what the model's own code makes of all prompt tokens after a text, copy by copy."""
    model = engine.target.lm.model
    states = []
    for copy in range(embeddings_PED.shape[1]):
        words = model.get_input_embeddings()(torch.tensor([text]))
        vectors = torch.cat([words, embeddings_PED[None, :, copy].to(words.dtype)], dim=1)
        states.append(model.model(inputs_embeds=vectors).last_hidden_state[0, len(text) :])
    logits: Tensor = model.lm_head(torch.stack(states).mean(0))[:, :VOCAB]
    return logits


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_guesses_are_those_of_the_model_after_the_text(family: Path, runtime: Runtime, temperature: float) -> None:
    """Guards prompt tokens that see guesses beside their own, copies of another number or other positions: after every
    round, what is kept of them is what a plain pass over the text and one chain gives."""
    engine = loaded(family, runtime, ":size=26:prompts=4")
    drafter = engine.drafter
    assert isinstance(drafter, PpdDrafter)
    head = read_head(str(draft_of(family, "ppd")), "ppd", engine.target.lm.model.config)
    embeddings = head.weights["prompts.embeddings"][:4]
    assert embeddings.shape[1] == 2
    batch = engine.new_batch()
    sampling = Sampling(temperature=temperature, seed=3)
    asked = [Generation(Request(id=row, tokens=text, sampling=sampling)) for row, text in enumerate(TEXTS)]
    batch.join(asked)
    seen: set[int] = set()
    for _ in range(12):
        batch.step()
        for row, generation in enumerate(asked):
            state = drafter._prompts.states[row]
            text = generation.request.tokens + generation.tokens[:-1]  # the last one is the target's own
            expected = logits_after(engine, text, embeddings)[:state]
            found = drafter._prompts.logits[row, :state, :VOCAB].to(expected.dtype)
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
            seen.add(state)
    assert len(seen) > 1, "rows were in several states"


def test_the_model_is_what_it_was(family: Path) -> None:
    """Guards outputs that change when prompt tokens are loaded, or beside them: plain rounds of the engine with them
    have the same logits to the last bit, and so has a pass with chains."""
    runtime = Runtime(dtype="float32")
    plain, drafted = load(str(family / "target"), runtime=runtime), loaded(family, runtime)
    found = []
    for engine in (plain, drafted):
        batch = engine.new_batch()
        batch.join([Generation(Request(id=row, tokens=text)) for row, text in enumerate(TEXTS)])
        draft = Draft.chain(torch.tensor([[5, 6, 7, 8]] * len(TEXTS)))
        if engine is drafted:
            rows = len(drafted.target.lm.model.get_input_embeddings().weight)
            probes = Probes(
                nodes=torch.tensor([[-1, -1, 2]] * len(TEXTS)),
                before=torch.tensor([[-1, 0, -1]] * len(TEXTS)),
                tokens=torch.tensor([[rows, rows + 2, rows + 1]] * len(TEXTS)),
            )
            draft = Draft(tokens=draft.tokens, parents=draft.parents, probes=probes)
        found.append(engine.target.forward(draft))
    assert torch.equal(found[0].logits, found[1].logits) and found[1].probes is not None
    assert found[1].probes.states is not None and found[1].probes.states.shape[:2] == (3, 3)


@pytest.mark.parametrize("verify", ["match", "rejection"])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_sizes_and_states(family: Path, runtime: Runtime, verify: str) -> None:
    """Guards passes larger than asked for, and drafts that never come to guesses."""
    for settings in (":size=4", ":size=9:prompts=1", ":size=60:prompts=6"):
        draft = draft_of(family, "ppd")
        engine = load(
            str(family / "target"),
            drafter=f"ppd{settings}",
            draft=draft,
            runtime=runtime,
            verify=verify,
            lengths="fixed",
        )
        answer = engine.generate([TEXTS[0]], max_new_tokens=40)[0]
        size = int(settings.split("size=")[1].split(":")[0])
        read = [made.tokens for made in engine.target.lm.passes if made.logits]
        assert max(read) <= size + 1 and sum(answer.stats.drafted) > 0


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_rows_in_different_states_share_a_pass(family: Path, runtime: Runtime) -> None:
    """Guards passes as wide as the most guesses of a row and the most prompt tokens of another together."""
    target, draft = str(family / "target"), draft_of(family, "ppd")
    prompts = [[row + 1, *([row + 2] * row)] for row in range(12)]
    plain = load(target, runtime=runtime).generate(prompts, max_new_tokens=30)
    found = set[int]()
    for size in (7, 30, 120):
        engine = load(target, drafter=f"ppd:size={size}:prompts=6", draft=draft, runtime=runtime, lengths="fixed")
        assert isinstance(engine.drafter, PpdDrafter)
        widths = list[int]()
        forward = engine.target.lm.forward

        def observed(
            tokens: Tensor, *given: Any, forward: Any = forward, widths: list[int] = widths, **named: Any
        ) -> Any:
            widths.append(tokens.shape[1])
            return forward(tokens, *given, **named)

        engine.target.lm.forward = observed  # type: ignore[method-assign]
        answers = engine.generate(prompts, max_new_tokens=30, batch_size=5)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
        assert max(widths) <= size + 1
        trees = engine.drafter.trees
        counts = [(len(tree.guesses), 2 * sum(tree.prompts)) for tree in trees]
        assert all(guesses + probes <= size for guesses, probes in counts)
        found.add(max(guesses for guesses, _ in counts) + max(probes for _, probes in counts) - size)
    assert max(found) > 0  # both at once would not fit


def test_a_draft_that_is_cut_loses_its_probes() -> None:
    """Guards chains after guesses that are no longer there."""
    probes = Probes(
        nodes=torch.tensor([[-1, 0, 0, 1]]),
        before=torch.tensor([[-1, -1, 1, -1]]),
        tokens=torch.tensor([[90, 90, 91, 90]]),
    )
    draft = Draft(tokens=torch.tensor([[5, 6]]), parents=torch.tensor([[-1, 0]]), probes=probes)
    cut = draft.where(torch.tensor([[True, False]]))
    assert cut.tokens.tolist() == [[5]] and cut.probes is not None
    assert cut.probes.tokens.tolist() == [[90, 90, 91, ABSENT]] and cut.probes.nodes.tolist() == [[-1, 0, 0, -1]]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (":prompts=10", "prompts=10: draft '.*' has 9 prompt tokens, use at most 9"),
        (":size=1", "size=1: each prompt token has 2 copies, use at least 2"),
        (":size=0", "size=0: use 1 to 512"),
        (":prompts=17", "prompts=17: use 1 to 16"),
    ],
)
def test_settings_that_do_not_fit(family: Path, settings: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        loaded(family, Runtime(dtype="float64", compiled=False), settings)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"is_decoded": False}, "settings that are only measured"),
        ({"accuracy": [[0.5]]}, "accuracy in its config.json"),
        ({"accuracy": [[2.0]] * 9}, "accuracy in its config.json"),
        ({"prompt_tokens": 8}, "prompts.embeddings has the shape"),
        ({"copies": "2"}, "copies in its config.json is '2'"),
        ({"model_type": "eagle"}, "has the model_type 'eagle'"),
    ],
)
def test_damaged_checkpoints(family: Path, tmp_path: Path, config: dict[str, object], told: str) -> None:
    draft = checkpoint(family, tmp_path / "draft", **config)
    with pytest.raises(ValueError, match=told) as error:
        load(
            str(family / "target"),
            drafter="ppd",
            draft=draft,
            runtime=Runtime(dtype="float64", compiled=False),
            lengths="fixed",
        )
    assert "\n" not in str(error.value)


def test_prompt_tokens_of_other_weights(family: Path) -> None:
    """Guards the text of a target that was tuned after its drafter was trained, and its owner: a warning says so."""
    exact, name = Runtime(dtype="float64", compiled=False), str(family / "draft")
    wanted = load(name, drafter="none", runtime=exact).generate("hello", max_new_tokens=30).tokens
    with pytest.warns(UserWarning, match="was trained for other weights"):
        engine = load(name, drafter="ppd", draft=draft_of(family, "ppd"), runtime=exact, lengths="fixed")
    assert engine.generate("hello", max_new_tokens=30).tokens == wanted
