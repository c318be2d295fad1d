# SPDX-License-Identifier: Apache-2.0
"""Settings: read once from ``--additional-config '{"dustin": {...}}'``, a profile, and defaults.

``DustinConfig`` is what a user writes. ``Settings`` is what the rest of the package reads:
the same, resolved against one vLLM configuration (units, scoring heads, gamma). Both are
immutable. Everything a user can get wrong is refused here, when vLLM builds its
configuration, with the setting, its value and what to write instead.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from dustin_vllm import policies

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "dustin"
MIN_SENSIBLE_BUDGET = 256
MAX_DEFAULT_LAYERS = 8
MAX_PROFILE_BYTES = 1 << 20


class ConfigError(ValueError):
    """A setting or model that Dustin refuses, with the reason and the fix."""


class ScoringLayer(BaseModel):
    """Scoring heads of one layer: global query-head indices, or None for all of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layer: int = Field(ge=0)
    heads: tuple[int, ...] | None = None


class DustinConfig(BaseModel):
    """What a user may set. Lengths are in tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    budget: int = Field(
        1024, ge=1, description="Context tokens a sparse row reads, sinks and recent included."
    )
    draft_budget: int | Literal["budget"] | None = Field(
        "budget",
        description="Context tokens that the draft reads per pass in sparse rows, at most the "
        "budget. None: all.",
    )
    granularity: Literal["auto", "block", "token"] = Field(
        "auto",
        description="Unit of selection: KV-cache blocks or single tokens. auto: tokens where "
        "FlashAttention 3 reads them, else blocks.",
    )
    sinks: int = Field(4, ge=0, description="First tokens that every row reads.")
    recent: int = Field(64, ge=0, description="Last context tokens that every row reads.")
    merge: Literal["fill", "weighted", "split"] = Field(
        "fill",
        description="How lookahead and history scores select. split: lookahead for the first "
        "half of the target's layers, history for the deeper half.",
    )
    lookahead: int | None = Field(
        None,
        ge=0,
        description="fill: tokens chosen by lookahead before history fills up. "
        "None: half the budget.",
    )
    lookahead_weight: float = Field(
        0.25, ge=0, le=1, description="weighted: weight of the lookahead scores."
    )
    wide_layers: tuple[int, ...] = Field(
        (),
        description="Target layers that read a selection of their own, of wide_budget tokens: a "
        "few need more of the context than the others (`dustin calibrate` finds them).",
    )
    wide_budget: int | None = Field(
        None, ge=1, description="Budget of wide_layers. None: four times the budget."
    )
    fresh_layers: tuple[int, ...] = Field(
        (),
        description="Target layers in which the queries of the step itself select what this layer "
        "and the deeper ones up to the next of these read, by those of its heads that "
        "target_heads names, or all. The layers before read what earlier steps and the draft "
        "selected.",
    )
    aggregate: Literal["mean", "max"] = Field(
        "mean", description="How scores of several heads and queries become one."
    )
    dilate_history: bool = Field(
        True, description="Extend history scores forward by gamma + 1 tokens."
    )
    target_heads: tuple[ScoringLayer, ...] | None = Field(
        None, description="Scoring heads of the target. None: every third layer, all heads."
    )
    draft_heads: tuple[ScoringLayer, ...] | None = Field(
        None, description="Scoring heads of the draft. None: every third layer, all heads."
    )
    dense_below: int = Field(
        4096, ge=0, description="Contexts shorter than this are verified densely."
    )
    refresh_interval: int = Field(
        0,
        ge=0,
        description="Verify every n-th step of a sequence densely; 0: never.",
    )
    sample_recovery_every: int = Field(
        0, ge=0, description="Measure attention recovery every n-th verification step; 0: never."
    )
    sparse_verification: bool = Field(
        True,
        description="False: verify densely, and let only the draft read a selection. "
        "Output is then that of vLLM's own speculation.",
    )
    cache_generated: bool = Field(
        False,
        description="Publish the KV cache of generated tokens for other requests, although it is "
        "approximate under sparse verification.",
    )
    verify_kernel: Literal["auto", "flash", "triton", "cuda"] = Field(
        "auto",
        description="Attention kernel of batches that only verify, and of their draft passes: "
        "FlashAttention, or ours in Triton or in CUDA C++ (Hopper; built by nvcc at first use).",
    )
    draft_graphs: bool = Field(
        True,
        description="Capture all draft passes of a verification batch, and the scoring around "
        "them, as one CUDA graph.",
    )
    policy: str = Field(
        "dustin",
        description="For evaluation: what ranks the units of a context, see "
        "dustin_vllm.policies. All but 'dustin' are rivals or controls.",
    )
    policy_seed: int = Field(0, ge=0, description="Of the policy that draws at random.")
    profile: str | None = Field(
        None,
        description="Name of a shipped profile, or the path of a profile file. Left out: the "
        "shipped profile of models of these shapes, if any. None: no profile.",
    )

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, value: str) -> str:
        known = policies.names()
        if value not in known:
            raise ValueError(f"choose among {', '.join(known)}")
        return value

    @field_validator("draft_budget", mode="before")
    @classmethod
    def _check_draft_budget(cls, value: Any) -> Any:
        number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not number and value not in ("budget", None):
            raise ValueError("must be a number of tokens from 1, 'budget', or null for all")
        return value


@dataclass(frozen=True)
class ModelShape:
    """What makes a model the same to Dustin, whatever its folder is called."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int

    @classmethod
    def of(cls, hf_config: Any) -> ModelShape:
        """From a transformers configuration (the text part of it)."""
        heads = hf_config.num_attention_heads
        return cls(
            architecture=(getattr(hf_config, "architectures", None) or [""])[0],
            layers=hf_config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(hf_config, "num_key_value_heads", None) or heads,
            head_dim=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads,
            hidden_size=hf_config.hidden_size,
            vocab_size=hf_config.vocab_size,
        )


@dataclass(frozen=True)
class PairShape:
    """Shapes of a target and its draft: a profile with equal ones is used without being named."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    target: ModelShape
    draft: ModelShape


class Profile(BaseModel):
    """A profile file: settings found for one target/draft pair.

    ``settings`` holds ``DustinConfig`` fields. What a user sets overrides it. ``match``: shapes
    of the pair, by which a shipped profile is found without being named.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1]
    target: str
    draft: str
    calibrated: bool
    source: str
    match: PairShape | None = None
    settings: dict[str, Any]


def _explain(error: ValidationError, where: str, model: type[BaseModel]) -> str:
    """Turn pydantic's report into one line per mistake: setting, value, fix."""
    lines = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"])
        name = f"{where}.{path}" if path else where
        if item["type"] == "extra_forbidden":
            known = list(model.model_fields if len(item["loc"]) == 1 else ScoringLayer.model_fields)
            close = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            lines.append(f"{name} is not a setting ({hint})")
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{name}={item['input']!r}: {message}")
    return "; ".join(lines)


def _parse(model: type[BaseModel], data: Any, where: str) -> Any:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error, where, model)) from None


def _shipped_profiles() -> dict[str, Any]:
    """Files of ``configs/`` by name without ``.json``."""
    return {
        entry.name.removesuffix(".json"): entry
        for entry in resources.files("dustin_vllm.configs").iterdir()
        if entry.name.endswith(".json")
    }


def match_profile(pair: PairShape) -> str | None:
    """Name of the shipped profile of a pair of these shapes, calibrated ones first; or None."""
    matching = [
        (not profile.calibrated, name)
        for name in _shipped_profiles()
        if (profile := load_profile(name)).match == pair
    ]
    return min(matching)[1] if matching else None


def load_profile(name: str) -> Profile:
    """Read a profile by shipped name (a file of ``configs/`` without ``.json``) or by path.

    Raises:
        ConfigError: no such profile, or a file that is not a valid profile.
    """
    shipped = _shipped_profiles()
    where = f"profile {name!r}"
    source = shipped.get(name, Path(name))
    try:
        with source.open("rb") as file:
            raw = file.read(MAX_PROFILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"dustin.profile={name!r}: neither a shipped profile "
            f"({', '.join(sorted(shipped)) or 'none'}) nor a readable file ({error.strerror})"
        ) from None
    if len(raw) > MAX_PROFILE_BYTES:
        raise ConfigError(f"{where}: larger than {MAX_PROFILE_BYTES} bytes; not a profile")
    try:
        data = json.loads(raw)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error})") from None
    profile = _parse(Profile, data, where)
    if "profile" in profile.settings:
        raise ConfigError(f"{where}: settings.profile is not allowed inside a profile")
    _parse(DustinConfig, profile.settings, f"{where} settings")
    return profile


def read_config(additional_config: Any, pair: PairShape | None = None) -> DustinConfig:
    """The user's settings over a profile's over the defaults.

    Args:
        additional_config: vLLM's ``additional_config``; only its "dustin" key is read.
        pair: the models; a shipped profile that matches them is used unless the user sets
            ``profile`` (null: none). ``profile`` of the result names the one used.

    Raises:
        ConfigError: unknown setting, impossible value, or unknown profile.
    """
    data = additional_config.get(KEY, {}) if isinstance(additional_config, dict) else {}
    where = f"additional_config.{KEY}"
    if not isinstance(data, dict):
        raise ConfigError(f"{where}={data!r} must be a JSON object, as in {{'budget': 1024}}")
    config = _parse(DustinConfig, data, where)
    name = config.profile
    if pair is not None and "profile" not in data:
        name = match_profile(pair)
    if name is None:
        return config
    settings = load_profile(name).settings
    if "budget" in settings and "budget" in data:
        # Found as shares of the profile's budget: at another one they keep their share.
        share = config.budget / settings["budget"]
        scaled = {k: settings[k] for k in ("lookahead", "wide_budget") if settings.get(k)}
        settings = {**settings, **{k: round(share * v) for k, v in scaled.items()}}
    return _parse(DustinConfig, {**settings, **data, "profile": name}, where)


def profile_note(config: DustinConfig) -> str:
    """What the log says about the profile that is used."""
    if config.profile is None:
        return "default heads: no profile for this pair"
    if load_profile(config.profile).calibrated:
        return f"profile {config.profile}"
    return f"profile {config.profile}, not calibrated: default heads"


def groups_note(settings: Settings) -> str:
    """What the log says about layers that read a selection of their own."""
    if settings.fresh is not None:
        listed = ", ".join(map(str, sorted(set(settings.config.fresh_layers))))
        return f" (from layer {listed} on by the step's own queries)"
    layers = settings.config.wide_layers
    if not layers:
        return ""
    listed = ", ".join(map(str, sorted(layers)))
    return f" (layers {listed}: {settings.largest.budget_units})"


@dataclass(frozen=True)
class HeadSet:
    """Scoring heads of one model: (layer index, global query-head indices) pairs."""

    layers: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def num_heads(self) -> int:
        """Scoring heads over all layers."""
        return sum(len(heads) for _, heads in self.layers)

    def of_layer(self, layer: int) -> HeadSet:
        """Those of one layer; none if it is not among them."""
        return HeadSet(tuple(entry for entry in self.layers if entry[0] == layer))

    def of_rank(self, rank: int, num_ranks: int, heads_per_rank: int) -> HeadSet:
        """The scoring heads that one tensor-parallel rank holds, by their index there.

        vLLM gives rank r the query heads r * heads_per_rank and on, whether or not key heads
        are replicated. A rank may hold none.
        """
        if num_ranks == 1:
            return self
        first = rank * heads_per_rank
        local = (
            (layer, tuple(h - first for h in heads if 0 <= h - first < heads_per_rank))
            for layer, heads in self.layers
        )
        return HeadSet(tuple((layer, heads) for layer, heads in local if heads))


@dataclass(frozen=True)
class LayerGroup:
    """Layers that read one selection per sequence and step."""

    name: str
    budget_units: int
    lookahead_units: int  # fill: chosen by lookahead before history


@dataclass(frozen=True)
class Settings:
    """Settings resolved against one vLLM configuration. Lengths are in units unless named."""

    config: DustinConfig
    gamma: int
    unit: int
    block_size: int
    dilation_tokens: int
    target: LayerGroup
    draft: LayerGroup | None  # None: it reads everything; with an equal budget, the target's
    target_heads: HeadSet
    draft_heads: HeadSet
    draft_replicated: bool = False  # every tensor-parallel rank runs the whole draft
    # Target layers with a selection of their own: the deeper half (split), wide_layers, or those
    # from the first of fresh_layers on.
    second: LayerGroup | None = None
    second_layers: frozenset[int] = frozenset()
    target_layers: int = 1

    @property
    def publishes_prompts_only(self) -> bool:
        """Whether KV of generated tokens must stay out of the prefix cache."""
        return self.config.sparse_verification and not self.config.cache_generated

    @property
    def group_merge(self) -> str:
        """How one group merges the signals: "weighted", or "fill", of which split is a use."""
        return "weighted" if self.config.merge == "weighted" else "fill"

    @property
    def largest(self) -> LayerGroup:
        """The target's group that reads most: shorter contexts are verified densely."""
        return self.second or self.target  # a second one reads no less

    @property
    def target_units(self) -> float:
        """Units that a sparse row reads in a layer of the target, on average."""
        if self.second is None:
            return self.target.budget_units
        more = self.second.budget_units - self.target.budget_units
        return self.target.budget_units + more * len(self.second_layers) / self.target_layers

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Every group that needs a selection of its own."""
        named = (self.target, self.draft, self.second)
        return tuple(dict.fromkeys(group for group in named if group is not None))

    @property
    def fresh(self) -> LayerGroup | None:
        """The group whose selection is made within a step, by ``fresh_layers``."""
        ours = self.config.policy == "dustin"  # others rank after a step
        return self.second if ours and self.config.fresh_layers else None

    @property
    def merged_groups(self) -> tuple[LayerGroup, ...]:
        """Groups whose selection is made after a step, from both signals."""
        return tuple(group for group in self.groups if group is not self.fresh)


def first_deep_layer(num_layers: int) -> int:
    """Index of the first layer of the deeper half (merge "split")."""
    return num_layers // 2


def default_layers(num_layers: int) -> list[int]:
    """Scoring layers of a model without a profile: every third from the third, 8 at most.

    Several spread layers beat the single best one (docs/results); more than 8 would read a
    noticeable share of a large model's keys.
    """
    layers = list(range(2, num_layers, 3)) or [num_layers - 1]
    if len(layers) > MAX_DEFAULT_LAYERS:
        step = len(layers) / MAX_DEFAULT_LAYERS
        layers = [layers[int(i * step)] for i in range(MAX_DEFAULT_LAYERS)]
    return layers


def _resolve_heads(
    wanted: tuple[ScoringLayer, ...] | None, name: str, num_layers: int, num_heads: int
) -> HeadSet:
    everything = tuple(range(num_heads))
    if wanted is None:
        return HeadSet(tuple((layer, everything) for layer in default_layers(num_layers)))
    if not wanted:
        raise ConfigError(f"dustin.{name}=[]: name at least one layer, or leave it out")
    seen: set[int] = set()
    resolved = []
    for entry in wanted:
        if entry.layer >= num_layers:
            raise ConfigError(
                f"dustin.{name}: layer={entry.layer}, but the model has layers 0..{num_layers - 1}"
            )
        if entry.layer in seen:
            raise ConfigError(f"dustin.{name}: layer={entry.layer} is named twice; merge its heads")
        seen.add(entry.layer)
        heads = everything if entry.heads is None else tuple(sorted(set(entry.heads)))
        bad = [head for head in heads if not 0 <= head < num_heads]
        if bad or not heads:
            raise ConfigError(
                f"dustin.{name}: layer {entry.layer} heads={list(entry.heads or ())}, "
                f"but valid heads are 0..{num_heads - 1}"
            )
        resolved.append((entry.layer, heads))
    return HeadSet(tuple(sorted(resolved)))


def _unsupported(vllm_config: VllmConfig) -> list[str]:
    """Reasons why Dustin refuses this model or mode, each with its fix."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    hf_config = model.hf_text_config
    reasons = []
    if model.use_mla:
        reasons.append("the target uses MLA, whose latent cache Dustin cannot score")
    window = model.get_sliding_window()
    if window is not None and getattr(hf_config, "use_sliding_window", True):
        reasons.append(
            f"the target uses a sliding window (sliding_window={window}): dropping blocks would "
            "move it"
        )
    if getattr(model, "uses_alibi", False):
        reasons.append("the target uses ALiBi, whose bias depends on positions that get compacted")
    if getattr(model, "is_hybrid", False) or getattr(model, "is_attention_free", False):
        reasons.append("the target has layers without a KV cache (hybrid or attention-free)")
    if getattr(model, "is_encoder_decoder", False):
        reasons.append("the target is an encoder-decoder model")
    if model.runner_type == "pooling":
        reasons.append("the target runs as a pooling model; there is nothing to verify")
    if model.is_multimodal_model:
        reasons.append("the target is multimodal, which is not tested")
    if str(vllm_config.cache_config.cache_dtype) not in ("auto", str(model.dtype).split(".")[-1]):
        reasons.append(
            f"kv_cache_dtype={vllm_config.cache_config.cache_dtype}: quantised keys cannot be "
            "scored yet; use --kv-cache-dtype auto"
        )
    if parallel.pipeline_parallel_size > 1:
        reasons.append(
            f"pipeline_parallel_size={parallel.pipeline_parallel_size}: the draft lives on one "
            "stage only; use --tensor-parallel-size instead"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            reasons.append(f"{name}={getattr(parallel, name)}: context parallelism splits the keys")
    if speculative.parallel_drafting:
        reasons.append(
            "speculative_config.parallel_drafting=true: Dustin needs one draft query per token"
        )
    if getattr(speculative, "use_heterogeneous_vocab", False):
        reasons.append("speculative_config.use_heterogeneous_vocab=true is not tested")
    on_cpu = vllm_config.device_config.device_type == "cpu"
    if vllm_config.scheduler_config.async_scheduling and on_cpu:
        reasons.append(
            "async scheduling is on, which hides nothing here; use --no-async-scheduling"
        )
    if vllm_config.lora_config is not None:
        reasons.append("LoRA adapters are not tested; leave out --enable-lora")
    if getattr(vllm_config, "use_v2_model_runner", False):
        reasons.append(
            "model runner V2 has no place for Dustin yet; set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    probabilistic = getattr(speculative, "draft_sample_method", "greedy") == "probabilistic"
    if probabilistic and getattr(speculative, "dustin_vocab_error", None) is not None:
        reasons.append(
            "draft_sample_method=probabilistic with a draft of a smaller vocabulary: the "
            "probabilities do not match the target's; use greedy drafting"
        )
    draft_backend = speculative.attention_backend
    if draft_backend is not None and draft_backend.name != "DUSTIN":
        reasons.append(
            f"speculative_config.attention_backend={draft_backend.name}: lookahead scores need "
            "the draft on DUSTIN too; leave it out"
        )
    return reasons


def other_pair(profile: Profile, pair: PairShape) -> str:
    """How a profile's models differ from a pair in what scoring heads go by; "" if they do not.

    A profile without shapes can only be held against the layers and heads it names.
    """
    if profile.match is not None:
        for side in ("target", "draft"):
            for name in ("layers", "heads", "kv_heads", "head_dim"):
                made, is_ = (getattr(getattr(p, side), name) for p in (profile.match, pair))
                if made != is_:
                    return f"its {side} has {made} {name}, this one {is_}"
    wanted = DustinConfig.model_validate(profile.settings)
    try:
        for side in ("target", "draft"):
            shape = getattr(pair, side)
            heads = getattr(wanted, f"{side}_heads")
            _resolve_heads(heads, f"{side}_heads", shape.layers, shape.heads)
    except ConfigError as error:
        return str(error)
    return ""


def warnings(vllm_config: VllmConfig, settings: Settings) -> list[str]:
    """What is allowed but probably a mistake, for the log at start."""
    found = []
    if settings.config.budget < MIN_SENSIBLE_BUDGET:
        found.append(
            f"dustin.budget={settings.config.budget} is small: below {MIN_SENSIBLE_BUDGET} quality "
            "is known to suffer"
        )
    longest = vllm_config.model_config.max_model_len
    read = settings.largest.budget_units * settings.unit
    if settings.config.wide_layers and read >= longest:
        found.append(
            f"no context of max_model_len={longest} tokens is longer than the budget of "
            f"dustin.wide_layers ({read}): nothing will be sparse; lower wide_budget"
        )
    if settings.config.profile is not None:
        profile = load_profile(settings.config.profile)
        why = other_pair(profile, _pair_of(vllm_config))
        if why:
            found.append(
                f"dustin.profile={settings.config.profile!r} was made for {profile.target} + "
                f"{profile.draft}: {why}; name the profile of this pair or leave it out"
            )
    return found


def is_active(vllm_config: VllmConfig) -> bool:
    """Whether sparse verification can run: DUSTIN chosen, with a draft model.

    Without a draft model, or with another speculative method, the backend behaves as the
    vLLM backend it is built on.
    """
    backend = vllm_config.attention_config.backend
    speculative = vllm_config.speculative_config
    return (
        backend is not None
        and backend.name == "DUSTIN"
        and speculative is not None
        and speculative.method == "draft_model"
    )


REQUEST_KEY = "dustin"  # in a request's vllm_xargs
REQUEST_VALUES = ("sparse", "dense")


def wants_dense(sampling_params: Any) -> bool:
    """Whether a request asks for dense verification.

    Args:
        sampling_params: vLLM's SamplingParams, or None.

    Raises:
        ValueError: the request asks for something else than "sparse" or "dense".
    """
    extra = getattr(sampling_params, "extra_args", None) or {}
    wanted = extra.get(REQUEST_KEY, "sparse")
    if wanted not in REQUEST_VALUES:
        raise ValueError(
            f"vllm_xargs.{REQUEST_KEY}={wanted!r} must be {' or '.join(map(repr, REQUEST_VALUES))}"
        )
    return wanted == "dense"


def is_replicated(vllm_config: VllmConfig) -> bool:
    """Whether every tensor-parallel rank runs the whole draft."""
    draft = vllm_config.speculative_config.draft_parallel_config.tensor_parallel_size
    return draft < vllm_config.parallel_config.tensor_parallel_size


def _pair_of(vllm_config: VllmConfig) -> PairShape:
    target, draft = vllm_config.model_config, vllm_config.speculative_config.draft_model_config
    return PairShape(ModelShape.of(target.hf_text_config), ModelShape.of(draft.hf_text_config))


def resolve(vllm_config: VllmConfig, changes: dict[str, Any] | None = None) -> Settings:
    """Check one vLLM configuration and resolve Dustin's settings against it.

    Args:
        changes: settings that differ from those in the configuration.

    Raises:
        ConfigError: a setting or the model is refused; the message says what to change.
    """
    reasons = _unsupported(vllm_config)
    if reasons:
        raise ConfigError("attention backend DUSTIN: " + "; ".join(reasons))
    speculative = vllm_config.speculative_config
    pair = _pair_of(vllm_config)  # only now: models that are refused need not have heads
    additional = vllm_config.additional_config
    if changes:
        additional = {KEY: {**additional.get(KEY, {}), **changes}}
    config = read_config(additional, pair)
    parallel = vllm_config.parallel_config
    if config.policy not in policies.BUILT_IN and parallel.tensor_parallel_size > 1:
        raise ConfigError(
            f"dustin.policy={config.policy!r} ranks by the heads of one rank; use "
            f"{', '.join(policies.BUILT_IN)}, or tensor_parallel_size=1"
        )
    block_size = vllm_config.cache_config.block_size
    return settings_of(
        config,
        _resolve_unit(config, block_size),
        block_size,
        speculative.num_speculative_tokens,
        pair,
        is_replicated(vllm_config),
    )


def settings_of(
    config: DustinConfig,
    unit: int,
    block_size: int,
    gamma: int,
    pair: PairShape,
    draft_replicated: bool = False,
) -> Settings:
    """What a user's settings mean for a pair of models.

    Args:
        unit: tokens; 1 or block_size.
        gamma: proposed tokens per step.

    Raises:
        ConfigError: a budget cannot hold what is protected, or there are no such heads.
    """
    target_group = _target_group(config, unit)
    if config.policy != "dustin":  # one ranking fills all that is free
        config = config.model_copy(update={"merge": "fill"})
        first = 0 if config.policy == "history" else target_group.budget_units
        target_group = replace(target_group, lookahead_units=first)
    second, second_layers = None, frozenset(config.wide_layers)
    if config.fresh_layers:
        _check_fresh_layers(config, pair.target.layers)
        second_layers = frozenset(range(min(config.fresh_layers), pair.target.layers))
        first = 0 if config.policy == "dustin" else target_group.lookahead_units
        second = replace(target_group, name="fresh", lookahead_units=first)
    elif second_layers:
        second = _wide_group(config, unit, target_group, pair.target.layers)
    if config.merge == "split":
        second_layers = frozenset(range(first_deep_layer(pair.target.layers), pair.target.layers))
        second = replace(target_group, name="deep", lookahead_units=0)
        target_group = replace(target_group, lookahead_units=target_group.budget_units)
    heads = [
        _resolve_heads(wanted, name, shape.layers, shape.heads)
        for wanted, name, shape in (
            (config.target_heads, "target_heads", pair.target),
            (config.draft_heads, "draft_heads", pair.draft),
        )
    ]
    named, everything = dict(heads[0].layers), tuple(range(pair.target.heads))
    heads[0] = HeadSet(
        tuple(sorted({**dict.fromkeys(config.fresh_layers, everything), **named}.items()))
    )
    return Settings(
        config=config,
        gamma=gamma,
        unit=unit,
        block_size=block_size,
        dilation_tokens=gamma + 1 if config.dilate_history else 0,
        target=target_group,
        draft=_draft_group(config, unit, target_group),
        second=second,
        second_layers=second_layers,
        target_layers=pair.target.layers,
        target_heads=heads[0],
        draft_heads=heads[1],
        draft_replicated=draft_replicated,
    )


def _check_layers(name: str, layers: tuple[int, ...], num_layers: int) -> None:
    if any(not 0 <= layer < num_layers for layer in layers):
        raise ConfigError(
            f"dustin.{name}={list(layers)}: the target has layers 0..{num_layers - 1}"
        )


def _check_fresh_layers(config: DustinConfig, num_layers: int) -> None:
    if config.wide_layers or config.merge == "split":
        other = "wide_layers" if config.wide_layers else "merge='split'"
        raise ConfigError(
            f"dustin.fresh_layers and {other} both give layers a selection of their own; leave out "
            "one of them"
        )
    _check_layers("fresh_layers", config.fresh_layers, num_layers)


def _target_group(config: DustinConfig, unit: int) -> LayerGroup:
    lookahead = config.budget // 2 if config.lookahead is None else config.lookahead
    units = _budget_units(config, "budget", config.budget, unit)
    return LayerGroup("target", units, lookahead // unit)


def _wide_group(config: DustinConfig, unit: int, target: LayerGroup, num_layers: int) -> LayerGroup:
    """The group of ``wide_layers``. Lookahead keeps its share of the budget."""
    if config.merge == "split":
        raise ConfigError(
            "dustin.merge='split' and wide_layers both give layers a selection of their own; "
            "leave out one of them"
        )
    _check_layers("wide_layers", config.wide_layers, num_layers)
    if len(set(config.wide_layers)) == num_layers:
        raise ConfigError("dustin.wide_layers names every layer; raise budget instead")
    tokens = 4 * config.budget if config.wide_budget is None else config.wide_budget
    units = _budget_units(config, "wide_budget", tokens, unit)
    if units < target.budget_units:
        raise ConfigError(
            f"dustin.wide_budget={tokens} is below budget={config.budget}; raise it, or leave it "
            "out for four times the budget"
        )
    return LayerGroup("wide", units, target.lookahead_units * units // target.budget_units)


def _draft_group(config: DustinConfig, unit: int, target: LayerGroup) -> LayerGroup | None:
    if config.draft_budget is None:
        if not config.sparse_verification:
            raise ConfigError(
                "dustin.sparse_verification=false with draft_budget=null selects for nobody; "
                "leave out draft_budget"
            )
        return None
    if config.draft_budget == "budget":
        return target
    units = _budget_units(config, "draft_budget", config.draft_budget, unit)
    if units > target.budget_units:
        raise ConfigError(
            f"dustin.draft_budget={config.draft_budget} exceeds budget={config.budget}; "
            "lower it, or leave it out to let the draft read everything"
        )
    if units == target.budget_units:
        return target
    # Lookahead keeps its share of the smaller budget.
    return LayerGroup("draft", units, target.lookahead_units * units // target.budget_units)


def _budget_units(config: DustinConfig, name: str, tokens: int, unit: int) -> int:
    """A budget in whole units; refused when it cannot hold what every row reads."""
    units = tokens // unit
    if units == 0:
        raise ConfigError(
            f"dustin.{name}={tokens} is less than one unit of {unit} tokens; "
            f"set it to {unit} or more"
        )
    protected = -(-config.sinks // unit) + -(-config.recent // unit)
    if protected > units:
        raise ConfigError(
            f"dustin.{name}={tokens} ({units} units of {unit} tokens) cannot hold "
            f"sinks={config.sinks} and recent={config.recent} ({protected} units); set {name} to "
            f"{protected * unit} or more, or lower recent"
        )
    return units


def _resolve_unit(config: DustinConfig, block_size: int) -> int:
    from vllm.platforms import current_platform

    if config.granularity == "token" and current_platform.is_cpu():
        raise ConfigError(
            "dustin.granularity='token' needs a GPU: the CPU backend packs its blocks; "
            "use 'block' or 'auto'"
        )
    if config.granularity != "auto":
        return 1 if config.granularity == "token" else block_size
    ours = config.policy in policies.BUILT_IN  # rivals rank blocks, as their papers do
    by_token = ours and current_platform.is_cuda() and flash_attention_version() == 3
    return 1 if by_token else block_size


def flash_attention_version() -> int | None:
    """The FlashAttention that vLLM uses on this CUDA device; 3 reads pages of one token."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    return get_flash_attn_version()


def describe(
    model: str,
    draft: str | None,
    additional_config: dict[str, Any],
    tensor_parallel_size: int = 1,
) -> dict[str, Any]:
    """Effective settings of a model pair, as ``dustin config`` prints them.

    Raises:
        ConfigError: the pair or a setting is refused.
    """
    from vllm.engine.arg_utils import EngineArgs

    speculative = None
    if draft is not None:
        speculative = {"method": "draft_model", "model": draft, "num_speculative_tokens": 4}
    try:
        vllm_config = EngineArgs(
            model=model,
            attention_backend="DUSTIN",
            speculative_config=speculative,
            additional_config=additional_config,
            tensor_parallel_size=tensor_parallel_size,
        ).create_engine_config()
    except ValidationError as error:  # vLLM wraps what is raised while it builds its configuration
        messages = [item["msg"].removeprefix("Value error, ") for item in error.errors()]
        raise ConfigError("; ".join(messages)) from error
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if not is_active(vllm_config):
        return {"active": False, "settings": read_config(additional_config).model_dump()}
    settings = resolve(vllm_config)
    return {
        "active": True,
        "gamma": settings.gamma,
        "unit_tokens": settings.unit,
        "budget_units": settings.target.budget_units,
        "lookahead_units": settings.target.lookahead_units,
        "draft_budget_units": None if settings.draft is None else settings.draft.budget_units,
        "wide_layers": sorted(settings.config.wide_layers),
        "wide_budget_units": settings.largest.budget_units if settings.config.wide_layers else None,
        "dilation_tokens": settings.dilation_tokens,
        "target_scoring_heads": {str(i): heads for i, heads in settings.target_heads.layers},
        "draft_scoring_heads": {str(i): heads for i, heads in settings.draft_heads.layers},
        "settings": settings.config.model_dump(),
    }
