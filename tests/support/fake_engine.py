"""A small OpenAI-compatible server with a decoding loop of its own, in which faults are planted by small functions.

Nothing of paradraft decodes here: texts are read again whole in every pass, by plain models of `transformers`. Without
faults it is lossless and drafts as PARD does; each fault is one function in place of another.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODEL = "fake"
EXTENSIONS = ("return_token_ids", "return_tokens_as_token_ids", "top_k", "min_p", "repetition_penalty")
Draw = Callable[[Tensor], int]
"""From logits `[V]` to a token."""
Rows = Callable[[int], Tensor]
"""The target's logits `[V]` after so many of the drafted tokens."""
Rule = Callable[[Rows, list[int], Draw], list[int]]
"""The tokens of a round, from the target's logits, the drafted tokens, and how a token is drawn."""
Propose = Callable[[list[int], int], list[int]]
"""The drafted tokens, from a text and how many tokens of it are the prompt."""


class Plain:
    """A model that tells what follows a text, and remembers it.

    Args:
        model: reads every text whole.
        rows: ids from there on are never told; None tells all rows of the embedding.
    """

    def __init__(self, model: PreTrainedModel, rows: int | None = None) -> None:
        self.model, self.rows = model.eval(), rows
        self._known: dict[tuple[int, ...], Tensor] = {}

    @torch.no_grad()
    def after(self, text: Sequence[int], further: Sequence[int], number: int) -> Tensor:
        """Logits `[V]` after a text and the first `number` of further tokens, all of which one pass reads."""
        wanted = (*text, *further[:number])
        if wanted not in self._known:
            logits = self.model(torch.tensor([[*text, *further]]), use_cache=False).logits[0, :, : self.rows]
            for place in range(len(further) + 1):
                self._known[(*text, *further[:place])] = logits[len(text) - 1 + place].clone()
        return self._known[wanted]


@torch.no_grad()
def pard(
    model: PreTrainedModel,
    mask: int,
    k: int,
    text: list[int],
    prompt: int,
    *,
    rows: int | None = None,
    shift: int = 0,
    same: bool = False,
) -> list[int]:
    """K tokens from one pass over the text and K - 1 masks.

    Args:
        rows: ids from there on are never drafted.
        shift: a fault: rows are read so much later.
        same: a fault: all masks have the position of the first.
    """
    masks = k - 1 + max(shift, 0)
    positions = [*range(len(text)), *(len(text) + (0 if same else place) for place in range(masks))]
    row = torch.tensor([[*text, *[mask] * masks]])
    logits = model(row, position_ids=torch.tensor([positions]), use_cache=False).logits[0, :, :rows]
    first = len(text) - 1 + shift
    return [int(token) for token in logits[first : first + k].argmax(1)]


@torch.no_grad()
def one_by_one(model: PreTrainedModel, k: int, text: list[int], prompt: int, *, rows: int | None = None) -> list[int]:
    """K tokens from K passes."""
    grown = list(text)
    for _ in range(k):
        grown.append(int(model(torch.tensor([grown]), use_cache=False).logits[0, -1, :rows].argmax()))
    return grown[len(text) :]


def nothing(text: list[int], prompt: int) -> list[int]:
    """No draft."""
    return []


def lossless(rows: Rows, drafted: list[int], draw: Draw) -> list[int]:
    """Every token is drawn from the target; drafted ones are kept as long as they are those."""
    found: list[int] = []
    for place, token in enumerate(drafted):
        found.append(draw(rows(place)))
        if found[-1] != token:
            return found
    return [*found, draw(rows(len(drafted)))]


def greedy(logits: Tensor) -> int:
    """The likeliest token."""
    return int(logits.argmax())


@dataclass(kw_only=True)
class Decoding:
    """A loop.

    Args:
        target: whose tokens they are.
        ends: tokens that end a text.
        propose: drafts.
        rule: verifies.
        warmth: what a fault makes of the temperature that is asked for.
        from_place: the place from which on `rule` holds; before it the lossless one does.
    """

    target: Plain
    ends: frozenset[int]
    propose: Propose = nothing
    rule: Rule = lossless
    warmth: Callable[[float], float] = float
    from_place: int = 0

    def rounds(
        self, prompt: list[int], most: int, temperature: float, seed: int
    ) -> Iterator[tuple[list[int], int, list[Tensor]]]:
        """The tokens of each round, how many were drafted for it, and the target's logits that tell them."""
        generator = torch.Generator().manual_seed(seed)
        temperature = self.warmth(temperature)

        def draw(logits: Tensor) -> int:
            if temperature == 0:
                return greedy(logits)
            shares = (logits.double() / temperature).softmax(0)
            return int(torch.multinomial(shares, 1, generator=generator))

        text = list(prompt)
        while len(text) < len(prompt) + most:
            drafted = self.propose(text, len(prompt)) if len(text) > len(prompt) else []  # as vLLM, not at the first
            rows = partial(self.target.after, list(text), drafted)
            rule = self.rule if len(text) - len(prompt) >= self.from_place else lossless
            made = rule(rows, drafted, draw)
            new = self._cut(made, len(prompt) + most - len(text))
            yield new, len(drafted), [self.target.after(text, new, place) for place in range(len(new))]
            text += new
            if new[-1] in self.ends:
                return

    def _cut(self, tokens: list[int], most: int) -> list[int]:
        """Up to the first end, or the limit."""
        for place, token in enumerate(tokens[:most]):
            if token in self.ends:
                return tokens[: place + 1]
        return tokens[:most]


@dataclass(kw_only=True)
class Telling:
    """How answers are written.

    Args:
        knows: parameters beyond OpenAI's.
        most_likeliest: of how many tokens it tells the probabilities at most.
        tells_end: whether the token that ends a text is told.
        tells_prompt: whether the ids of the prompt are told, if they are asked for.
        counts_prompt: whether it is told how many tokens the prompt has.
        tells_logprobs: whether logprobs are told.
        has_id_fields: whether tokens have a field `id`, as llama.cpp's.
        digits: of logprobs; None for all.
        name: of a token.
        lie: what a fault makes of a logprob; it is given the token too.
    """

    knows: tuple[str, ...] = EXTENSIONS
    most_likeliest: int = 20
    tells_end: bool = True
    tells_prompt: bool = True
    counts_prompt: bool = True
    tells_logprobs: bool = True
    has_id_fields: bool = False
    digits: int | None = None
    name: Callable[[int], str] | None = None
    lie: Callable[[int, float], float] = lambda token, logprob: logprob


@dataclass
class _Counted:
    drafts: int = 0
    accepted: int = 0


@dataclass(kw_only=True)
class FakeEngine:
    """A server, from the beginning to the end of a `with` block.

    Args:
        decoding: its loop.
        tokenizer: reads prompts.
        telling: how answers are written.
        read: what it reads of a request's body; None reads as the tokenizer and its chat template do.
        count: how many accepted tokens its metrics count for a round of so many tokens.
        when_together: the loop for requests that are answered while others are; None takes the same one.
        key: which requests need.
        delay_s: how long requests wait for others.
    """

    decoding: Decoding
    tokenizer: PreTrainedTokenizerBase
    telling: Telling = field(default_factory=Telling)
    read: Callable[[dict[str, Any]], list[int]] | None = None
    count: Callable[[list[int]], int] = lambda new: len(new) - 1
    when_together: Decoding | None = None
    key: str | None = None
    delay_s: float = 0.0
    counted: _Counted = field(default_factory=_Counted)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def __enter__(self) -> FakeEngine:
        engine, self._computing, self._waiting = self, threading.Lock(), 0
        self._counting = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self.send(200, "text/plain", engine.metrics().encode())
                else:
                    self.send(200, "application/json", json.dumps({"data": [{"id": MODEL}]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if engine.key is not None and self.headers["Authorization"] != f"Bearer {engine.key}":
                    self.send(401, "application/json", b'{"error": {"message": "no such key"}}')
                elif (told := engine.complaint(body)) is not None:
                    self.send(400, "application/json", json.dumps({"error": {"message": told}}).encode())
                else:
                    events = engine.answer(body, is_chat="chat" in self.path)
                    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
                    self.send(200, "text/event-stream", "".join([*lines, "data: [DONE]\n\n"]).encode())

            def send(self, status: int, kind: str, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """Clients that go are part of the tests."""

        self._http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()

    def complaint(self, body: dict[str, Any]) -> str | None:
        """What it does not take, if there is something."""
        unknown = [name for name in EXTENSIONS if name in body and name not in self.telling.knows]
        if unknown:
            return f"unknown parameter {unknown[0]}"
        asked = int(body.get("top_logprobs", body.get("logprobs")))
        return f"at most {self.telling.most_likeliest} logprobs" if asked > self.telling.most_likeliest else None

    def metrics(self) -> str:
        """Its counters, as vLLM calls them."""
        return (
            f'vllm:spec_decode_num_drafts_total{{engine="0"}} {float(self.counted.drafts)}\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {float(self.counted.accepted)}\n'
        )

    def answer(self, body: dict[str, Any], *, is_chat: bool) -> list[dict[str, Any]]:
        """The events of an answer."""
        self.bodies.append(body)
        with self._counting:
            self._waiting += 1
        time.sleep(self.delay_s)
        with self._computing:
            is_together = self._waiting > 1
            decoding = self.when_together if is_together and self.when_together is not None else self.decoding
            prompt = (self.read or self._read)(body)
            rounds = decoding.rounds(prompt, body["max_tokens"], body["temperature"], body["seed"])
            events = []
            last = None
            for new, drafted, logits in rounds:
                if drafted:
                    self.counted.drafts += 1
                    self.counted.accepted += self.count(new)
                told = new if self.telling.tells_end or new[-1] not in decoding.ends else new[:-1]
                events.append(self._event(told, logits, body, is_chat=is_chat))
                last = new[-1]
        with self._counting:
            self._waiting -= 1
        if body.get("return_token_ids") and self.telling.tells_prompt:
            events[0]["prompt_token_ids"] = prompt
        reason = "stop" if last in decoding.ends else "length"
        ending: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        events.append({"choices": [ending | ({"delta": {}} if is_chat else {"text": ""})]})
        usage = {"prompt_tokens": len(prompt)} if self.telling.counts_prompt else {}
        return [*events, {"choices": [], "usage": usage}]

    def _read(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            write = self.tokenizer.apply_chat_template
            return list(write(body["messages"], add_generation_prompt=True, return_dict=True)["input_ids"])
        prompt = body["prompt"]
        return list(prompt) if isinstance(prompt, list) else list(self.tokenizer(prompt)["input_ids"])

    def _event(self, tokens: list[int], logits: list[Tensor], body: dict[str, Any], *, is_chat: bool) -> dict[str, Any]:
        """The tokens of a round."""
        by_id, likeliest = body.get("return_tokens_as_token_ids"), body.get("top_logprobs", body.get("logprobs"))
        named = (lambda token: f"token_id:{token}") if by_id else (self.telling.name or self._name)
        text = "".join(map(self._name, tokens))
        choice: dict[str, Any] = {"index": 0, "finish_reason": None, "logprobs": None}
        choice |= {"delta": {"content": text}} if is_chat else {"text": text}
        if body.get("return_token_ids"):
            choice["token_ids"] = tokens
        if not self.telling.tells_logprobs:
            return {"choices": [choice]}
        told = [self._told(row, token, likeliest) for row, token in zip(logits, tokens, strict=False)]
        if is_chat or self.telling.has_id_fields:
            choice["logprobs"] = {
                "content": [
                    self._entry(named, token, own)
                    | {"top_logprobs": [self._entry(named, other, value) for other, value in best.items()]}
                    for token, (own, best) in zip(tokens, told, strict=True)
                ]
            }
        else:
            choice["logprobs"] = {
                "tokens": [named(token) for token in tokens],
                "token_logprobs": [own for own, _ in told],
                "top_logprobs": [{named(other): value for other, value in best.items()} for _, best in told],
            }
        return {"choices": [choice]}

    def _entry(self, named: Callable[[int], str], token: int, logprob: float) -> dict[str, Any]:
        found: dict[str, Any] = {"token": named(token), "logprob": logprob}
        return found | ({"id": token} if self.telling.has_id_fields else {})

    def _name(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))

    def _told(self, logits: Tensor, token: int, likeliest: int) -> tuple[float, dict[int, float]]:
        """The logprob of a token, and those of the likeliest."""
        logprobs = logits.double().log_softmax(0)
        best = logprobs.topk(likeliest).indices.tolist() if likeliest else []

        def told(other: int) -> float:
            value = self.telling.lie(other, float(logprobs[other]))
            return value if self.telling.digits is None else round(value, self.telling.digits)

        return told(token), {other: told(other) for other in best}
