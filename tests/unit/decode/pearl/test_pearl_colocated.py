"""PEARL on the devices of the target: two copies of a drafter draft a window one after the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from paradraft.core import Draft
from paradraft.decode.batch import Batch
from paradraft.decode.lengths.draft_length import Fixed
from paradraft.decode.pearl.pearl import AheadBatch
from paradraft.decode.pearl.pearl_colocated import CoLocatedDrafter
from paradraft.decode.pearl.remote import RemoteDrafter
from paradraft.drafters.autoregressive import AutoregressiveDrafter
from paradraft.engine.loader import load
from paradraft.models.causal_lm import CausalLM
from paradraft.models.runtime import Runtime
from paradraft.placement import Placement, Stage
from paradraft.sampling_params import Sampling
from paradraft.sources.presets import id_tokenizer, random_model
from tests.conftest import VOCAB, tiny_model
from tests.support.decoding import Varying, answers, decoded, requests, started, target_of
from tests.unit.decode.pearl.test_pearl import CPP, EAGER, PERFECT, POOR, PROMPTS, SAMPLINGS, NoDrafts

CPUS = sorted(os.sched_getaffinity(0))
RUNTIME = Runtime(dtype="float64", compiled=False)
STAGES = (Stage(cpus=(CPUS[0],)), Stage(cpus=(CPUS[-1],)))


def draft_model(seed: int, compiled: bool | None) -> AutoregressiveDrafter:
    return AutoregressiveDrafter(CausalLM(tiny_model(seed).float(), vocab_size=VOCAB, compiled=compiled))


@pytest.mark.parametrize(
    ("gamma", "compiled", "seed"),
    [(2, EAGER, PERFECT), (2, CPP, POOR), (5, EAGER, POOR), (5, CPP, PERFECT), (14, EAGER, PERFECT), (14, CPP, POOR)],
)
def test_text_is_that_of_plain_decoding(gamma: int, compiled: bool | None, seed: int) -> None:
    """Guards both copies, each of which has not read what the other has drafted, in all modes of rows. Every pair of
    settings occurs."""
    target = target_of(CausalLM(tiny_model(1).float(), vocab_size=VOCAB, compiled=compiled))
    asked = requests(PROMPTS, SAMPLINGS, [30, 7, 1, 12, 40], eos_ids=frozenset([17]))
    plain = answers(Batch(target, NoDrafts(), lengths=Fixed(0)), asked)
    for lengths in (Fixed(gamma), Varying(gamma)):
        drafter = CoLocatedDrafter(draft_model(seed, compiled), draft_model(seed, compiled))
        assert answers(AheadBatch(target, drafter, lengths=lengths), asked) == plain


@pytest.mark.parametrize("gamma", [2, 5, 8])
def test_both_copies_draft_what_one_would(gamma: int) -> None:
    """Guards the acceptance: nothing is lost where the second copy goes on; and the first has the longer half."""
    target = target_of(CausalLM(tiny_model(1).float(), vocab_size=VOCAB, compiled=None))
    one, first, second = (draft_model(1, None) for _ in range(3))
    accepted = []
    for drafter in (one, CoLocatedDrafter(first, second)):
        found = decoded(AheadBatch(target, drafter, lengths=Fixed(gamma)), requests([[1, 2, 3]], limits=40))
        accepted.append([generation.accepted for generation in found])
    assert accepted[0] == accepted[1] and max(map(max, accepted[0])) >= gamma - 1
    both = CoLocatedDrafter(first, second)
    started(both, [[1, 2, 3]])
    assert both.propose([gamma]).tokens.shape == (1, gamma)
    assert [sum(lm.passes.values()) for lm in both.models] == [gamma - gamma // 2, gamma // 2]


def test_rows_of_different_lengths() -> None:
    drafter = CoLocatedDrafter(draft_model(1, None), draft_model(1, None))
    alone = draft_model(1, None)
    rows = [[1, 2, 3], [4, 5], [6]]
    for each in (drafter, alone):
        started(each, rows)
    after = Draft.chain(alone.propose([2, 0, 0]).tokens)
    for each in (alone, drafter):
        started(each, rows)
    assert drafter.propose([5, 0, 1], after).tokens.tolist() == alone.propose([5, 0, 1], after).tokens.tolist()


@pytest.mark.parametrize(("name", "draft", "copies"), [("autoregressive", "draft", 2), ("pard", "pard", 1)])
def test_processes_on_the_cpus_of_the_target(family: Path, name: str, draft: str, copies: int) -> None:
    """Guards the places: a window of one pass is drafted on the last stage alone; that all texts are the target's;
    and that nothing is left."""
    target, before = str(family / "target"), {child.pid for child in psutil.Process().children()}
    plain = load(target, runtime=RUNTIME)
    engine = load(
        target,
        drafter=name,
        draft=str(family / draft),
        gamma=5,
        runtime=RUNTIME,
        placement=Placement(target_stages=STAGES),
        kept_rows=2,
    )
    assert isinstance(engine.drafter, CoLocatedDrafter if copies == 2 else RemoteDrafter)
    children = [child for child in psutil.Process().children() if child.pid not in before]
    assert [child.cpu_affinity() for child in children] == [[CPUS[-1]], [CPUS[0]]][:copies]
    for sampling in (Sampling(), Sampling(temperature=0.9, seed=4)):
        texts = ["helloworld", "abc", "T", "helloworldA"]
        found, expected = (
            each.generate(texts, max_new_tokens=30, sampling=sampling, batch_size=2) for each in (engine, plain)
        )
        assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
    engine.close()
    assert not any(child.is_running() for child in children)


def test_a_copy_that_cannot_be_loaded(family: Path) -> None:
    """Guards against a process that is left when the other one cannot load its draft."""
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(ValueError, match="there is no such folder"):
        load(
            str(family / "target"),
            drafter="autoregressive",
            draft=str(family / "nowhere"),
            gamma=4,
            runtime=RUNTIME,
            placement=Placement(target_stages=STAGES),
        )
    assert {child.pid for child in psutil.Process().children()} == before


@pytest.fixture(scope="module")
def even_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are numbers, with two key/value heads."""
    folder = tmp_path_factory.mktemp("even")
    random_model("shape:tiny-target", dtype=RUNTIME.computed_in, device="cpu").save_pretrained(folder)
    id_tokenizer("shape:tiny-target").save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_processes_that_share_each_layer(even_heads: Path) -> None:
    """Guards tensor parallelism: the text, which one process alone says, also with a drafter ahead and in batches."""
    outcome = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
         "--rdzv-endpoint", "localhost:0", "-m", "paradraft", "generate", "--tensor-parallel", "--target",
         str(even_heads), "--drafter", "autoregressive", "--draft", str(even_heads), "--gamma", "4", "--dtype",
         "float64", "--temperature", "0.9", "--prompt", "3 4 5", "--max-new-tokens", "30"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    plain = load(str(even_heads), runtime=RUNTIME)
    told = plain.generate("3 4 5", max_new_tokens=30, sampling=Sampling(temperature=0.9)).text
    assert outcome.stdout.split() == ["3", "4", "5", *told.split()]


@pytest.mark.parametrize(
    ("ranks", "settings", "placement", "message"),
    [
        ("1", {}, {}, "start two or more processes by torchrun"),
        ("2", {"gamma": 3}, {"draft_device": "cpu"}, "leave stages and draft places out"),
        ("2", {}, {"target_stages": STAGES}, "leave stages and draft places out"),
        ("2", {"gamma": "auto"}, {}, "would time itself"),
        ("2", {"lengths": "expected"}, {}, "would time itself"),
        ("3", {}, {}, "num_key_value_heads is 2, which 3 processes cannot share evenly"),
        ("2", {"runtime": Runtime(compiled=True)}, {}, "neither int8, int4 nor --compile"),
    ],
)
def test_tensor_parallelism_that_cannot_be(
    even_heads: Path,
    ranks: str,
    settings: dict[str, object],
    placement: dict[str, object],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards processes against waiting for each other for ever, and weights against being shared out wrongly."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", ranks)
    with pytest.raises(ValueError, match=message):
        load(
            str(even_heads),
            drafter="autoregressive",
            draft=str(even_heads),
            placement=Placement(tensor_parallel=True, **placement),
            **settings,
        )


def test_a_family_without_a_plan(even_heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("transformers.LlamaConfig.base_model_tp_plan", None)
    with pytest.raises(ValueError, match="has no plan of how llama models share their layers"):
        load(str(even_heads), placement=Placement(tensor_parallel=True))
