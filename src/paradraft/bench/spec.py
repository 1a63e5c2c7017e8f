"""The methods of a benchmark, and the conditions that they share.

A method is written `name` or `name:setting=value:…`, such as `autoregressive:k=3` or
`pard:tree=24:verify=rejection:lengths=expected:batch=4`; a drafter's own settings are among them, as in
`ngram:max_ngram=5`. `hf` is plain `generate` of `transformers` (AR), `ar` is our decoding without a drafter (AR+),
every drafter is a method, and so are the baselines, see `paradraft.bench.baselines`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paradraft.bench.baselines import ASSISTED, CONFIDENCE, HF, LOOKUP, PEERS, is_llama_cpp, transformers
from paradraft.bench.hardware.roofline import models_of, passes_of
from paradraft.bench.hardware.sides import Sides, forwards
from paradraft.bench.labels import LABELS
from paradraft.bench.result import Answerer, BatchResult
from paradraft.bench.synthetic import SyntheticAcceptance
from paradraft.core import Drafter
from paradraft.drafters import (
    branches,
    drafter_class,
    drafter_names,
    drafter_settings,
    is_drafter,
    setting_names,
    split_settings,
    takes_draft,
)
from paradraft.drafters.autoregressive import AutoregressiveDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import AUTO, Speculation, gamma_of
from paradraft.models.runtime import PRECISIONS, QUANTIZED, SHORT, Runtime
from paradraft.models.target import Target
from paradraft.placement import Placement, Stage, cpus_of, stages_of
from paradraft.sampling_params import Sampling
from paradraft.sources.load_plan import HERE
from paradraft.tree import Tree

AR = "ar"
PLACEMENT = ("target_cpus", "draft_cpus", "draft_device", "target_stages")
SETTINGS = ("k", "tree", "verify", "lengths", "gamma", "overlap", *PLACEMENT, "batch", "dtype", "draft", "confidence")
"""All settings of specs, beside those of drafters."""


TargetKey = tuple[str, tuple[int, ...] | None, tuple[Stage, ...] | None]
UNSET = Speculation(lengths="fixed")
"""Defaults of a method: it drafts all K tokens, so that figures of different runs can be compared."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to decode.

    Args:
        spec: as the user wrote it; methods that differ in nothing else are equal.
        name: `ar`, a drafter or a peer.
        speculation: with our own drafter or the one that a peer is like; settings that the method lacks are as in
            `UNSET`.
        confidence: of `hf-assisted`: the draft ends after a token less likely than this.

    Raises:
        ValueError: an unknown method or setting.
    """

    spec: str = field(compare=False)
    name: str
    speculation: Speculation
    dtype: str
    batch: int
    placement: Placement = HERE
    confidence: float | None = None

    @classmethod
    def parse(cls, spec: str, defaults: Speculation = UNSET, *, dtype: str = "float32") -> Method:
        """Reads a method; `defaults` and `dtype` are values of settings that it leaves out."""
        name, settings = split_settings(spec)
        name = next((known for known, label in LABELS.items() if label == name), name)
        known = [AR, *(drafter for drafter in drafter_names() if drafter != "none"), *PEERS]
        if name not in known and (name == "none" or not is_drafter(name)):
            raise ValueError(f"unknown method {name!r}: use some of {', '.join(known)}")
        allowed, option_names = _settings(name), _option_names(name)
        values: dict[str, str] = {}
        for setting in settings:
            key, equals, value = setting.partition("=")
            if not equals or key not in [*allowed, *option_names] or key in values:
                listed = ", ".join([*allowed, *option_names])
                raise ValueError(f"method {spec!r}: settings of {name} are {listed}, each at most once")
            values[key] = value
        if "k" in values and values.get("gamma", "auto") != "auto":
            raise ValueError(f"method {spec!r}: gamma says how many tokens are drafted, leave k out")
        for key in ("k", "tree", "batch"):
            if not values.get(key, "1").isdigit() or int(values.get(key, 1)) < 1:
                raise ValueError(f"method {spec!r}: {key} must be a whole number of at least 1")
        dtype = values.get("dtype", dtype)
        dtype = SHORT.get(dtype, dtype)
        if dtype not in PRECISIONS:
            raise ValueError(f"method {spec!r}: dtype={dtype!r}: use one of {', '.join(PRECISIONS)}")
        if name in (ASSISTED, LOOKUP) and values.get("batch", "1") != "1":
            raise ValueError(f"method {spec!r}: transformers drafts for one prompt at a time, so batch must be 1")
        drafter = PEERS[name].like if name in PEERS else "none" if name == AR else name
        options = [f"{key}={values[key]}" for key in option_names if key in values]
        lengths = values.get("lengths", defaults.lengths)
        fields: dict[str, Any] = {
            "draft": values.get("draft", defaults.draft),
            "k": int(values.get("k", defaults.k)),
            "verify": values.get("verify", defaults.verify),
            "tree": Tree(budget=int(values["tree"])) if "tree" in values else defaults.tree,
            "lengths": UNSET.lengths if lengths == AUTO else lengths,
        }
        own = {key: value for key, value in fields.items() if key in allowed}
        try:
            own |= {"gamma": gamma_of(values.get("gamma")), "overlap": values.get("overlap", UNSET.overlap)}
            speculation = replace(UNSET, drafter=":".join([drafter, *options]), **own)
            target_cpus, draft_cpus = (cpus_of(values.get(name)) for name in PLACEMENT[:2])
            device = values.get("draft_device")
            placement = Placement(
                target_cpus=target_cpus,
                draft_cpus=draft_cpus,
                draft_device=device,
                target_stages=stages_of(values.get("target_stages")),
            )
            placement.check(speculation.gamma)
        except ValueError as error:
            raise ValueError(f"method {spec!r}: {error}") from None
        return cls(
            spec=spec,
            name=name,
            speculation=speculation,
            dtype=dtype,
            batch=int(values.get("batch", 1)),
            placement=placement,
            confidence=_confidence(spec, values.get("confidence", str(CONFIDENCE))) if name == ASSISTED else None,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The values of its settings; `ar` has no `k`, and methods that draft in turn have no `gamma`."""
        tree = self.speculation.tree
        values = {**vars(self), **vars(self.placement), **vars(self.speculation)}
        values["tree"] = None if tree is None else tree.nodes
        stages = values["target_stages"]
        values["target_stages"] = None if stages is None else "/".join(map(str, stages))
        options = {"options": drafter_settings(self.speculation.drafter)} if _option_names(self.name) else {}
        unset = [name for name in ("gamma", *PLACEMENT) if values[name] is None] + ["overlap"] * (
            values["gamma"] is None
        )
        shown = [setting for setting in _settings(self.name) if setting not in unset]
        return {setting: values[setting] for setting in shown} | options

    @property
    def left_out(self) -> frozenset[str]:
        """The settings that it has and its spec does not name."""
        return frozenset(setting for setting in _settings(self.name) if f":{setting}=" not in self.spec)

    @property
    def loaded_dtype(self) -> str:
        """The dtype of the models that are loaded here; llama.cpp quantizes its own weights."""
        return "bfloat16" if is_llama_cpp(self.name) and self.dtype in QUANTIZED else self.dtype

    @property
    def target_key(self) -> TargetKey:
        """Methods with the same key share a loaded target: its dtype and its placement."""
        return self.loaded_dtype, self.placement.target_cpus, self.placement.target_stages

    def engine(self, target: Target, drafter: Drafter) -> Engine:
        """The engine of a method of ours."""
        return Engine(target, drafter, self.speculation, cpus=self.placement.target_cpus)

    def answerer(self, target: Target, drafter: Drafter) -> Answerer:
        """The answerer of a method in this process."""
        if self.name == HF:
            return transformers.plain(target)
        if self.name == LOOKUP:
            return transformers.prompt_lookup(target, k=self.speculation.k)
        if self.name == ASSISTED:
            assert isinstance(drafter, AutoregressiveDrafter) and self.confidence is not None
            return transformers.assisted(target, drafter.lm.model, k=self.speculation.k, confidence=self.confidence)
        return _ours(self.engine(target, drafter))


def _settings(name: str) -> list[str]:
    """The settings of a method's spec."""
    if name in PEERS:
        return list(PEERS[name].settings)
    if name == AR:
        return ["dtype", "batch", "target_cpus", "target_stages"]
    traits = drafter_class(name).traits
    settings = ["k"] * (traits.branching != "own") + ["verify"] * (not traits.needs_drawn)
    settings += ["gamma", "overlap", "draft_cpus", "draft_device"] * traits.can_run_ahead
    settings += ["target_cpus", "target_stages"]
    return ["dtype", "batch", *settings, "lengths", *["tree"] * branches(name), *["draft"] * takes_draft(name)]


def _option_names(name: str) -> list[str]:
    """The settings of the drafter itself."""
    return [] if name == AR or name in PEERS else [key for key in setting_names(name) if key not in SETTINGS]


def _ours(engine: Engine) -> Answerer:
    models = models_of(engine.target.lm, engine.drafter)

    def answer(prompts: list[str], max_new_tokens: int, sampling: Sampling) -> BatchResult:
        results = engine.generate(prompts, max_new_tokens=max_new_tokens, sampling=sampling, batch_size=len(prompts))
        stats = engine.clock.stats
        return BatchResult(
            tokens=[result.tokens for result in results],
            total_s=stats.total_s,
            stats=stats,
            passes=passes_of(models) if engine.speculation.gamma is None else {},
            accepted=[list(result.accepted) for result in results],
            delivered_s=[list(result.delivered_s) for result in results],
            sides=Sides.of(engine.spans, forwards(models, engine.drafter)) if engine.spans else None,
        )

    return answer


def _confidence(spec: str, value: str) -> float:
    try:
        if 0.0 <= float(value) <= 1.0:
            return float(value)
    except ValueError:
        pass
    raise ValueError(f"method {spec!r}: confidence={value!r}: use a number from 0 (draft all k tokens) to 1")


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Methods, and the settings that all of them share.

    Args:
        target: a model or a shape.
        runtime: the device, and all but the dtype, which each method sets.
        acceptance: replaces the verdicts of all methods that draft; then no answer ends before its last token.
        profiled: profile some rounds of each method of ours, after all have been timed.
        vllm_python: the Python of vLLM's environment; None for the default path.
        llama_cpp_python: the same of llama.cpp's.
    """

    target: str
    methods: list[Method]
    sampling: Sampling
    runtime: Runtime
    runs: int
    acceptance: SyntheticAcceptance | None = None
    profiled: bool = False
    vllm_python: Path | None = None
    llama_cpp_python: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values, for a report."""
        return {
            "target": self.target,
            "methods": [method.spec for method in self.methods],
            "runs": self.runs,
            "sampling": asdict(self.sampling),
            "runtime": asdict(self.runtime),
            "synthetic_acceptance": None if self.acceptance is None else self.acceptance.rates,
        }
