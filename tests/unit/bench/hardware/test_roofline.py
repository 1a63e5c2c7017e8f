"""The least that a pass takes, counted by hand and by torch, and what is made of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from paradraft.bench.hardware.bandwidth import Speeds
from paradraft.bench.hardware.roofline import Size, added, models_of, plain_passes, reached, total
from paradraft.bench.spec import Method
from paradraft.drafters import takes_draft
from paradraft.engine.loader import load
from paradraft.models.causal_lm import Pass
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import GREEDY
from paradraft.sources.presets import random_model
from tests.conftest import tiny_model
from tests.support.kinds import model_of

CPU = torch.device("cpu")
PROMPT = "helloworld"


class Known(Speeds):
    """Bytes and operations per second that a test can count with."""

    def __init__(self, bytes_per_s: float = 1.0, flops_per_s: float = 1.0) -> None:
        self._known = bytes_per_s, flops_per_s

    def bytes_per_s(self, size_bytes: int) -> float:
        return self._known[0]

    def flops_per_s(self, dtype: torch.dtype) -> float:
        return self._known[1]


def size(name: str = "shape:tiny-target", dtype: torch.dtype = torch.bfloat16) -> Size:
    return Size.of(random_model(name, dtype=dtype, device="cpu"))


def test_bytes_of_a_pass_by_hand() -> None:
    """Guards against an embedding that is read whole, a head that is read while prompts are, and forgotten keys."""
    # Layers: q and o 32 x 32, k and v 32 x 16, gate, up and down 32 x 48, 2 norms. Embedding, head: 104 x 32.
    body = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32
    found = size()
    assert (found.body_bytes, found.head_bytes, found.row_bytes) == (2 * body, 2 * 104 * 32, 2 * 32)
    assert found.kv_bytes == 2 * 2 * 2 * 2 * 8  # layers, keys and values, bytes, heads, head size
    decode = Pass(rows=3, tokens=2, logits=2, context=10)
    assert found.cost(decode, Known()).bytes == 2 * body + 2 * 104 * 32 + 6 * 64 + 3 * 12 * found.kv_bytes
    prefill = Pass(rows=3, tokens=2, logits=0, context=10)
    assert found.last_bytes == 2 * (2 * 32 * 32 + 3 * 32 * 48)  # all products of a layer but keys and values
    unread = found.head_bytes + found.last_bytes
    assert found.cost(decode, Known()).bytes - found.cost(prefill, Known()).bytes == unread


def test_a_token_goes_through_a_few_experts() -> None:
    """Guards the floor of mixtures of experts: with all experts read, passes would be faster than it."""
    few, all_of_them = (
        Size.of(model_of("qwen3_moe", torch.float32, num_experts_per_tok=number, mlp_only_layers=[]))
        for number in (2, 5)
    )
    experts, expert = 3 * 4, 3 * 24 * 32  # those that are left out in 4 layers
    assert all_of_them.body_weights - few.body_weights == experts * expert
    assert all_of_them.body_bytes - few.body_bytes == 4 * experts * expert
    assert all_of_them.last_weights - few.last_weights == 3 * expert
    assert few.last_weights == 2 * 32 * 32 + 5 * 32 + 2 * expert  # queries, output, router


def test_an_untied_head_is_not_read_as_an_embedding() -> None:
    """Guards against models with an output head of their own, which hold an embedding that a pass hardly reads."""
    with torch.device("meta"):
        tied, untied = (tiny_model(0, llama=True), tiny_model(0, llama=True))
    untied.lm_head.weight = torch.nn.Parameter(torch.empty_like(tied.lm_head.weight, device="meta"))
    assert Size.of(untied).weight_bytes == Size.of(tied).weight_bytes
    assert sum(weight.nbytes for weight in untied.parameters()) > Size.of(untied).weight_bytes


def test_operations_of_a_pass_are_those_that_torch_counts() -> None:
    """Guards the count of products against torch's own, on a pass without earlier tokens; attention is counted apart,
    because torch counts tokens that a causal mask hides."""
    model = random_model("shape:pocket-draft", dtype=torch.float32, device="cpu")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 5, dtype=torch.long))
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    found = Size.of(model)
    one = Pass(rows=2, tokens=5, logits=5, context=0)
    attended = 4 * found.attended  # in four layers
    attention = 2 * attended * 2 * (1 + 2 + 3 + 4 + 5)
    assert found.cost(one, Known()).flops == counted + attention
    assert attended == 2 * 4 * 5 * 64
    behind = Pass(rows=2, tokens=5, logits=5, context=100)
    assert found.cost(behind, Known()).flops - found.cost(one, Known()).flops == 2 * attended * 2 * 5 * 100


def test_the_last_layer_is_counted_for_tokens_whose_logits_are_wanted() -> None:
    """Guards a floor that is too high: what the last layer computes of another token than its keys and values, nobody
    reads."""
    model = random_model("shape:pocket-draft", dtype=torch.float32, device="cpu")
    found, config = Size.of(model), model.config
    keys_values = 2 * config.hidden_size * config.num_key_value_heads * config.head_dim
    assert found.last_weights == found.body_weights // config.num_hidden_layers - keys_values
    of_all, of_last, of_none = (
        found.cost(Pass(rows=2, tokens=5, logits=wanted, context=7), Known()).flops for wanted in (5, 1, 0)
    )
    each = found.last_weights + found.head_weights
    assert of_all - of_last == 2 * 2 * (4 * each + (8 + 9 + 10 + 11) * found.attended)
    assert of_last - of_none == 2 * 2 * (each + 12 * found.attended)


def test_the_slower_of_reading_and_multiplying_decides() -> None:
    """Guards against a floor that adds what can happen at the same time, or takes the faster."""
    one, found = Pass(rows=1, tokens=1, logits=1, context=0), size()
    cost = found.cost(one, Known())
    assert found.cost(one, Known(bytes_per_s=2.0, flops_per_s=1e9)).floor_s == cost.bytes / 2
    assert found.cost(one, Known(bytes_per_s=1e9, flops_per_s=2.0)).floor_s == cost.flops / 2
    assert total(Counter({one: 3}), found, Known()).floor_s == 3 * cost.floor_s


@pytest.mark.parametrize(
    ("spec", "tokens", "logits"), [("autoregressive:k=3", 2, 1), ("pard:k=3", 5, 3), ("ngram", 0, 0)]
)
def test_passes_are_those_of_the_answer(family: Path, spec: str, tokens: int, logits: int) -> None:
    """Guards the floor of a round against passes that were not counted, counted for another answer, or counted with
    logits that nobody wants."""
    method = Method.parse(spec, dtype="float64")
    draft = str(family / "pard") if takes_draft(method.name) else None
    engine = load(
        str(family / "target"), drafter=method.name, draft=draft, k=3, runtime=Runtime(dtype="float64"), lengths="fixed"
    )
    answer = method.answerer(engine.target, engine.drafter)
    answer([PROMPT, "a"], 4, GREEDY)
    found = answer([PROMPT], 12, GREEDY)
    assert found.stats is not None
    target = found.passes["target"]
    assert [one for one in target if not one.logits] == [Pass(rows=1, tokens=len(PROMPT) - 1, logits=0, context=0)]
    assert sum(number for one, number in target.items() if one.logits) == found.stats.rounds
    assert sum(one.logits * number for one, number in target.items()) == found.stats.nodes + found.stats.rounds
    assert set(found.passes) == ({"target", "draft"} if draft else {"target"})
    if draft:
        late = [one for one in found.passes["draft"] if one.context > len(PROMPT)]
        assert late
        assert all(one.tokens <= tokens and one.logits <= logits for one in late)


def test_plain_decoding_has_the_passes_that_are_assumed_of_others(family: Path) -> None:
    """Guards the floor of `generate`, which nobody counts: AR+'s, but for where the prompt's last token is read."""
    engine = load(str(family / "target"), runtime=Runtime(dtype="float64"))
    found = Method.parse("ar").answerer(engine.target, engine.drafter)([PROMPT], 12, GREEDY).passes
    sizes = {name: Size.of(lm.model) for name, lm in models_of(engine.target.lm, engine.drafter).items()}
    ours, theirs = (
        total(passes["target"], sizes["target"], Known()) for passes in (found, plain_passes(1, len(PROMPT), 12))
    )
    assert ours.flops == theirs.flops
    target = sizes["target"]
    assert ours.bytes - theirs.bytes == target.body_bytes - target.last_bytes + (len(PROMPT) - 1) * target.kv_bytes


def test_shares_with_and_without_prefill() -> None:
    """Guards against a floor with prefill over a time without it, or the other way round."""
    found = size()
    prompt, decode = Pass(rows=1, tokens=9, logits=0, context=0), Pass(rows=1, tokens=1, logits=1, context=9)
    passes = {"target": Counter({prompt: 1, decode: 4}), "draft": Counter({prompt: 1})}
    speeds = Known(flops_per_s=1e12)
    prompt_s, decode_s = (found.cost(one, speeds).floor_s for one in (prompt, decode))
    figures = reached(passes, {"target": found, "draft": found}, speeds, total_s=1e7, prefill_s=4e6)
    assert figures["floor_s"] == pytest.approx(2 * prompt_s + 4 * decode_s)
    assert figures["share_of_floor"] == pytest.approx(figures["floor_s"] / 1e7)
    assert [figures["floor_of"][name]["passes"] for name in ("target", "draft")] == [4, 0]
    assert figures["decode_share_of_floor"] == pytest.approx((prompt_s + 4 * decode_s) / 6e6)
    assert (
        reached(passes, {"target": found, "draft": found}, speeds, total_s=1.0, prefill_s=None)["decode_floor_s"]
        is None
    )


def test_what_nobody_counted_has_no_floor() -> None:
    """Guards against the floor of half of the answers."""
    passes = plain_passes(1, 3, 2)
    assert added([passes, passes])["target"] == Counter(dict.fromkeys(passes["target"], 2))
    assert added([passes, {}]) == {}
    assert set(reached({}, {}, Known(), total_s=1.0, prefill_s=None).values()) == {None}


def test_speeds_are_the_best_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a floor that a busy moment of the machine made easy to reach."""
    speeds = Speeds(CPU, {4096}, {torch.float32})
    read = iter([5.0, 7.0, 9.0, 6.0])
    monkeypatch.setattr(speeds, "_read", lambda size: next(read))
    rates = iter([3.0, 2.0])  # of float32, which is always among them
    monkeypatch.setattr(speeds, "_multiply", lambda dtype: next(rates))
    speeds.measure()
    speeds.measure()
    assert (speeds.bytes_per_s(4096), speeds.bytes_per_s(10**12), speeds.flops_per_s(torch.float32)) == (9.0, 7.0, 3.0)


def test_speeds_are_plausible() -> None:
    """Guards against units: no computer that runs this reads less than 50 MB or more than 100 TB per second."""
    speeds = Speeds(CPU, {5000, 2**40}, {torch.float32, torch.bfloat16, torch.int8})
    speeds.measure()
    found = speeds.as_json()
    assert list(found["bytes_per_s"]) == ["4096", str(2**20)]
    assert set(found["flops_per_s"]) == {"float32", "bfloat16", "int8"}
    assert all(5e7 < speed < 1e14 for speed in found["bytes_per_s"].values())
    assert 1e6 < speeds.flops_per_s(torch.float32) <= speeds.flops_per_s(torch.bfloat16) < 1e16
    assert speeds.flops_per_s(torch.float32) <= speeds.flops_per_s(torch.int8) < 1e16
