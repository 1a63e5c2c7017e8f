"""Recorded passes: the same logits as those that they were recorded from, and none that is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import cuda_graphs
from paradraft.models.forward.cuda_graphs import Replays
from tests.conftest import tiny_model
from tests.support.decoding import prefilled
from tests.support.replays import Recorder, replay_compiled, replay_everything


class Forgetful(Recorder):
    """A recording with a copy of some input in it, as a kernel has that was given a number."""

    lost = 0

    def _again(self, run: Callable[[], object]) -> None:
        assert isinstance(run, partial)
        results, decode, inputs = run.args
        given = list(inputs)
        given[self.lost] = vars(self).setdefault("first", given[self.lost].clone())
        run.func(results, decode, given)


class Broken(Recorder):
    """What cannot be recorded, such as a pass that waits for the GPU."""

    def __call__(self, run: Callable[[], object]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")


def prompts(*lengths: int) -> list[list[int]]:
    return [[place % 50 + 1 + row for place in range(length)] for row, length in enumerate(lengths)]


Pair = Callable[..., tuple[CausalLM, CausalLM]]


@pytest.fixture(params=["eager", "compiled"])
def pair(request: pytest.FixtureRequest) -> Pair:
    """Replayed passes, and others."""

    def made(**settings: int) -> tuple[CausalLM, CausalLM]:
        model = tiny_model(5)
        replayed, plain = (
            CausalLM(model, vocab_size=64, compiled=request.param == "compiled", cuda_graphs=graphs, **settings)
            for graphs in (True, False)
        )
        return replayed, plain

    return made


def decode(lm: CausalLM, lengths: tuple[int, ...], widths: list[int]) -> list[Tensor]:
    """The logits of some passes, of which each keeps two tokens, or one."""
    prefilled(lm, prompts(*lengths))
    found = []
    for number, width in enumerate(widths):
        tokens = torch.arange(width * len(lengths)).view(len(lengths), width) * (number + 3) % 60 + 1
        wanted = torch.arange(width - min(width, 3), width).expand(len(lengths), -1)
        found.append(lm.forward(tokens, logit_rows=wanted).logits)
        lm.cache.advance([min(width, 2)] * len(lengths))
    return found


def test_replayed_passes_say_what_others_do(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards tokens, positions and masks of an earlier pass, keys that are written where they were then, results that
    are overwritten, and a cache that was given back."""
    replay_everything(monkeypatch)
    replayed, plain = pair()
    widths = [1, 5, 5, 1, 9, 5, 2, 1, 12, 9, 5, 1] * 3
    for lengths in ((7,), (3, 11, 5), (40,), (2, 2, 60), (7,), (1, 2, 3, 4)):
        for ours, theirs in zip(*(decode(lm, lengths, widths) for lm in (replayed, plain)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    # One, two, eight and sixteen tokens, with as many wanted or three, of one, three and four rows, in two caches and
    # up to two steps of the used part: far less than passes.
    assert 10 < Recorder.recorded < 40


def test_prompts_and_what_came_once_are_not_recorded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory and seconds that recordings take, where nobody replays them."""
    replay_everything(monkeypatch)
    replayed, _ = pair()
    for length in (20, 20, 20):
        prefilled(replayed, prompts(length))
    decode(replayed, (4,), [2, 5, 9, 17])
    assert Recorder.recorded == 0
    decode(replayed, (4,), [2, 5, 9, 17])
    assert Recorder.recorded == 4


def test_only_the_latest_shapes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the memory of a server that meets all batch sizes and lengths."""
    monkeypatch.setattr(cuda_graphs, "MOST", 2)
    replays, recorder = Replays(lambda: recorder), Recorder()
    monkeypatch.setattr(Recorder, "recorded", 0)
    for size in (1, 1, 2, 2, 1, 3, 1, 2, 1):
        inputs = (torch.full((size, 4), 2.0),)
        (result,) = replays(lambda given: (given * 3,), inputs, lambda given=inputs: given)
        assert result.tolist() == [[6.0] * 4] * size
    assert Recorder.recorded == 2, "of one and of two: two was dropped for three, and came again once"
    assert len(replays._recordings) == 2


@pytest.mark.parametrize("lost", [0, 2, 3, 4, 5], ids=["wanted", "tokens", "lengths", "depths", "visible"])
def test_a_recording_with_a_number_in_it_is_found_out(pair: Pair, monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    """Guards the text against the silent mistake of CUDA graphs: the replay of an old position."""
    replay_everything(monkeypatch, Forgetful)
    monkeypatch.setattr(Forgetful, "lost", lost)
    replayed, plain = pair()
    widths = [5, 5, 5, 5]
    with pytest.warns(UserWarning, match="without CUDA graphs: a recording does not do what it recorded"):
        ours = decode(replayed, (7,), widths)
    assert Forgetful.recorded == 1, "and no other is tried"
    for one, other in zip(ours, decode(plain, (7,), widths), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_what_cannot_be_recorded_is_run(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards decoding on a GPU that refuses to record."""
    replay_everything(monkeypatch, Broken)
    replayed, plain = pair()
    with pytest.warns(UserWarning, match="without CUDA graphs: operation not permitted when stream is capturing$"):
        ours = decode(replayed, (7,), [5, 5, 5])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours += decode(replayed, (9,), [5, 5, 5])
    theirs = decode(plain, (7,), [5, 5, 5]) + decode(plain, (9,), [5, 5, 5])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_full_cache_is_not_overrun(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the last slots, where tokens that fill a pass up must not write over others."""
    replay_everything(monkeypatch)
    replayed, plain = pair(capacity=55, width=9)
    found = [decode(lm, (41, 54), [9, 9, 9, 9]) for lm in (replayed, plain)]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one[0], other[0], rtol=1e-9, atol=1e-9)


def test_added_embeddings_are_those_of_the_last_call(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards prompt tokens against a recording that reads the rows of an earlier call."""
    replay_everything(monkeypatch)
    lms = pair()
    for turn in range(3):
        rows = torch.randn(2, 32, generator=torch.Generator().manual_seed(turn), dtype=torch.float64)
        (ids, _) = (lm.add_embeddings(rows.to(lm.model.dtype)) for lm in lms)
        found = []
        for lm in lms:
            prefilled(lm, prompts(7))
            tokens = torch.tensor([[5, ids[0], ids[1]]])
            found.append([lm.forward(tokens).logits for _ in range(3)])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert Recorder.recorded == 3


def test_recorded_passes_are_warmed_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the first answers of a server, which would pay for the recordings."""
    replay_everything(monkeypatch)
    assert pair()[0].warm_up_rounds == 2


def test_a_recording_that_is_wrong_for_one_row_is_found_out() -> None:
    """Guards large batches in bf16, over which one row's error is a small one."""
    expected = torch.randn(16, 3, 64, dtype=torch.bfloat16)
    rounded = expected * (1 + torch.finfo(torch.bfloat16).eps * torch.randn(expected.shape))
    assert cuda_graphs._is_same(rounded.bfloat16(), expected)
    wrong = expected.clone()
    wrong[7, 1] = expected[6, 1] * 0.2 + expected[7, 1] * 0.8
    assert not cuda_graphs._is_same(wrong, expected)


def test_memory_is_given_back_before_a_larger_cache_is_taken(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a GPU against recordings of a cache that is gone, which hold and write its memory."""
    replay_everything(monkeypatch)
    replayed, _ = pair()
    decode(replayed, (4,), [5, 5, 5])
    replays = replayed._compute.replays
    assert replays is not None
    recordings, (results,) = replays._recordings, replays._results
    assert all(one.results[0].data_ptr() == results.data_ptr() for one in recordings.values() if one is not None)
    decode(replayed, (4,), [5])
    assert replays._recordings is recordings
    prefilled(replayed, prompts(3, 4))
    assert not replays._recordings and not replays._results
    decode(replayed, (4, 4), [5, 5, 5])
    assert replays._recordings and replays._results
    replayed.cache.join(1)
    assert not replays._recordings and not replays._results, "where rows join too"


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["compiled"], indirect=True)
def test_nothing_is_compiled_for_a_recording(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against compiling while a GPU records, which fails there: what is recorded must look to `torch.compile` as
    what was run before."""
    replay_compiled(monkeypatch)
    compiled: list[int] = []
    compared = Replays._compared

    def counted(*args: object) -> object:
        before = counters["stats"]["unique_graphs"]
        found = compared(*args)
        compiled.append(counters["stats"]["unique_graphs"] - before)
        return found

    monkeypatch.setattr(Replays, "_compared", counted)
    replayed, plain = pair()
    for lengths in ((7,), (3, 11, 5), (3, 11, 5, 6)):
        ours, theirs = (decode(lm, lengths, [5, 5, 5, 1, 1, 1, 9, 9, 9]) for lm in (replayed, plain))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert compiled == [0] * Recorder.recorded and Recorder.recorded >= 9


def test_there_are_none_on_a_cpu() -> None:
    """Guards CPUs against being asked for graphs."""
    assert cuda_graphs.replays_on(torch.device("cpu")) is None
