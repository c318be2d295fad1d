# SPDX-License-Identifier: Apache-2.0
"""Everything a user can get wrong is refused when vLLM builds its configuration."""

from __future__ import annotations

import dataclasses
import json
import logging
from types import SimpleNamespace

import pytest
from conftest import engine_args, write_tiny_qwen2

from dustin_vllm import config
from dustin_vllm.config import ConfigError, DustinConfig, HeadSet


def build(target, draft, dustin, **kw):
    """The configuration that ``LLM`` or ``vllm serve`` would start with."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(**engine_args(target, draft, dustin, **kw)).create_engine_config()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bugdet": 512}, "additional_config.dustin.bugdet is not a setting.*'budget'"),
        ({"budget": -1}, "additional_config.dustin.budget=-1.*greater than or equal to 1"),
        ({"budget": "many"}, "budget='many'"),
        ({"merge": "mix"}, "merge='mix'.*'weighted' or 'split'"),
        ({"lookahead_weight": 1.5}, "lookahead_weight=1.5"),
        ({"wide_layers": [4]}, "wide_layers=\\[4\\]: the target has layers 0..3"),
        ({"wide_layers": [0, 1, 2, 3]}, "wide_layers names every layer; raise budget"),
        ({"wide_layers": [1], "wide_budget": 512}, "wide_budget=512 is below budget=1024"),
        ({"wide_layers": [1], "merge": "split"}, "merge='split' and wide_layers both"),
        ({"fresh_layers": [1, 4]}, r"fresh_layers=\[1, 4\]: the target has layers 0..3"),
        ({"fresh_layers": [1], "wide_layers": [1]}, "fresh_layers and wide_layers both"),
        ({"fresh_layers": [1], "merge": "split"}, "fresh_layers and merge='split' both"),
        ({"budget": 16}, "dustin.budget=16 is less than one unit of 32.*32 or more"),
        ({"budget": 64}, "budget=64.*cannot hold sinks=4 and recent=64.*96 or more"),
        ({"budget": 256, "draft_budget": 300}, "draft_budget=300 exceeds budget=256"),
        (
            {"sparse_verification": False, "draft_budget": None},
            "draft_budget=null selects for nobody; leave out draft_budget",
        ),
        ({"draft_budget": 0}, "dustin.draft_budget=0: must be a number of tokens from 1"),
        ({"draft_budget": "all"}, "draft_budget='all': must be .* 'budget', or null"),
        ({"draft_budget": 64}, "draft_budget=64.*cannot hold.*set draft_budget to 96"),
        ({"granularity": "token"}, "granularity='token' needs a GPU"),
        ({"profile": "no-such-pair"}, "profile='no-such-pair': neither a shipped profile"),
        ({"target_heads": [{"layer": 9}]}, "layer=9, but the model has layers 0..3"),
        ({"target_heads": [{"layer": 1, "heads": [4]}]}, "valid heads are 0..3"),
        ({"draft_heads": [{"layer": 0}, {"layer": 0}]}, "layer=0 is named twice"),
        ({"draft_heads": []}, "draft_heads=\\[\\]: name at least one layer"),
        ({"draft_heads": [{"layer": 0, "head": [1]}]}, "draft_heads.0.head is not a setting"),
    ],
)
def test_wrong_settings_are_refused_at_start(target, draft, settings, message):
    with pytest.raises(ValueError, match=message):
        build(target, draft, settings)


@pytest.mark.parametrize(
    ("settings", "flash", "unit"),
    [
        ({}, 3, 1),
        ({}, 2, 16),
        ({}, None, 16),
        ({"granularity": "block"}, 3, 16),
        ({"policy": "quest"}, 3, 16),
        ({"policy": "history"}, 3, 1),
        ({"granularity": "token"}, 2, 1),  # refused later, with FlashAttention's version
    ],
)
def test_the_unit_is_a_token_where_flash_attention_reads_tokens(monkeypatch, settings, flash, unit):
    from vllm import platforms

    gpu = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True)
    monkeypatch.setattr(platforms, "_current_platform", gpu)
    monkeypatch.setattr(config, "flash_attention_version", lambda: flash)
    assert config._resolve_unit(DustinConfig(**settings), 16) == unit


def test_settings_must_be_an_object(target, draft):
    with pytest.raises(ValueError, match="must be a JSON object"):
        build(target, draft, {}, additional_config={"dustin": [1]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8"),
        ({"enable_lora": True}, "LoRA"),
        ({"scheduler_cls": "some.Scheduler"}, "cache_generated=true, or use --no-enable-prefix"),
    ],
)
def test_unsupported_modes_are_refused_at_start(target, draft, arguments, message):
    with pytest.raises(ValueError, match=message):
        build(target, draft, {}, **arguments)


def test_sliding_window_is_refused_at_start(tmp_path, draft):
    window = write_tiny_qwen2(
        tmp_path / "window",
        layers=4,
        use_sliding_window=True,
        sliding_window=128,
        max_window_layers=0,
    )
    with pytest.raises(ValueError, match="sliding window.*128"):
        build(window, draft, {})


def test_mla_is_refused_at_start(tmp_path, draft):
    mla = tmp_path / "mla"
    mla.mkdir()
    sizes = dict(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        max_position_embeddings=4096,
        first_k_dense_replace=2,
    )
    (mla / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["DeepseekV2ForCausalLM"],
                "model_type": "deepseek_v2",
                "torch_dtype": "float32",
                **sizes,
            }
        )
    )
    with pytest.raises(ValueError, match="MLA"):
        build(mla, draft, {}, block_size=16)


@pytest.mark.parametrize("arguments", [{"runner": "pooling"}, {"convert": "embed"}])
def test_pooling_is_refused_at_start(target, draft, arguments):
    with pytest.raises(ValueError, match="runs as a pooling model"):
        build(target, draft, {}, **arguments)


TEXT = dict(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.mark.parametrize(
    ("family", "architecture", "settings", "message"),
    [
        ("Qwen2Audio", "Qwen2AudioForConditionalGeneration", {"text_config": TEXT}, "multimodal"),
        ("Jamba", "JambaForCausalLM", {**TEXT, "num_experts": 2}, "hybrid"),
        ("Mamba", "MambaForCausalLM", {"hidden_size": 64, "num_hidden_layers": 2}, "hybrid"),
        ("Bloom", "BloomForCausalLM", {"hidden_size": 64, "n_layer": 2, "n_head": 4}, "ALiBi"),
    ],
)
def test_other_kinds_of_models_are_refused_at_start(
    tmp_path, draft, family, architecture, settings, message
):
    import transformers

    settings = dict(settings)
    if "text_config" in settings:
        text = transformers.Qwen2Config(**settings["text_config"])
        settings["text_config"] = text.to_dict()
    if family == "Jamba":
        settings |= {"attn_layer_period": 2, "attn_layer_offset": 1}
    made = getattr(transformers, f"{family}Config")(**{"vocab_size": 512, **settings})
    data = {**made.to_dict(), "architectures": [architecture], "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(data, default=str))
    with pytest.raises(ValueError, match=f"DUSTIN: .*{message}"):
        build(tmp_path, draft, {})


def test_another_draft_backend_is_refused_at_start(target, draft):
    speculative = engine_args(target, draft, {})["speculative_config"]
    speculative["attention_backend"] = "CPU_ATTN"
    with pytest.raises(ValueError, match="attention_backend=CPU_ATTN.*leave it out"):
        build(target, draft, {}, speculative_config=speculative)


@pytest.mark.parametrize(("vocab", "accepted"), [(480, True), (600, False)])
def test_a_draft_vocabulary_must_be_a_prefix_of_the_targets(
    tmp_path, target, draft, vocab, accepted
):
    """As Qwen2.5-0.5B (151936) beside Qwen2.5-72B (152064); only DUSTIN accepts it."""
    small = tmp_path / "small"
    small.mkdir()
    data = json.loads((draft / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**data, "vocab_size": vocab}))
    with pytest.raises(ValueError, match="same vocabulary size"):
        build(target, small, None)
    if accepted:
        assert build(target, small, {}).attention_config.backend.name == "DUSTIN"
        probabilistic = engine_args(target, small, {})["speculative_config"]
        probabilistic["draft_sample_method"] = "probabilistic"
        with pytest.raises(ValueError, match="use greedy drafting"):
            build(target, small, {}, speculative_config=probabilistic)
    else:
        with pytest.raises(ValueError, match="same vocabulary size"):
            build(target, small, {})


def test_resolved_settings(target, draft):
    vllm_config = build(target, draft, {"budget": 200, "lookahead": 70, "recent": 40})
    settings = config.resolve(vllm_config)
    assert (settings.unit, settings.target.budget_units, settings.target.lookahead_units) == (
        32,
        6,
        2,
    )
    assert settings.dilation_tokens == settings.gamma + 1 == 5
    assert settings.target_heads.layers == ((2, (0, 1, 2, 3)),)
    assert settings.draft_heads.layers == ((1, (0, 1, 2, 3)),)
    assert vllm_config.speculative_config.attention_backend.name == "DUSTIN"


def test_wide_layers_have_a_budget_of_their_own(target, draft):
    wide = {"budget": 192, "lookahead": 64, "recent": 40, "wide_layers": [3, 1]}
    settings = config.resolve(build(target, draft, wide))
    assert settings.second_layers == {1, 3}
    assert settings.second == config.LayerGroup("wide", 24, 8)  # four times as much of everything
    assert settings.largest is settings.second
    assert settings.groups == (settings.target, settings.second)
    settings = config.resolve(build(target, draft, {**wide, "wide_budget": 288}))
    assert settings.second == config.LayerGroup("wide", 9, 3)
    assert config.groups_note(settings) == " (layers 1, 3: 9)"
    plain = config.resolve(build(target, draft, {}))
    assert (plain.second, config.groups_note(plain)) == (None, "")


def test_layers_from_the_fresh_one_on_read_what_it_selects(target, draft):
    settings = config.resolve(build(target, draft, {"fresh_layers": [2], "lookahead": 64}))
    assert settings.second_layers == {2, 3}
    assert settings.fresh == config.LayerGroup("fresh", settings.target.budget_units, 0)
    assert settings.merged_groups == (settings.target,)
    assert settings.target_heads.layers == ((2, (0, 1, 2, 3)),)  # layer 2 scores by default
    assert config.groups_note(settings) == " (from layer 2 on by the step's own queries)"
    some = {"fresh_layers": [1], "target_heads": [{"layer": 1, "heads": [3]}]}
    alone = config.resolve(build(target, draft, some))
    assert alone.target_heads.of_layer(1) == alone.target_heads == config.HeadSet(((1, (3,)),))
    other = {"fresh_layers": [3, 1], "target_heads": [{"layer": 1, "heads": [3]}]}
    both = config.resolve(build(target, draft, other))
    assert both.target_heads.layers == ((1, (3,)), (3, (0, 1, 2, 3)))
    assert both.second_layers == {1, 2, 3}
    assert config.groups_note(both) == " (from layer 1, 3 on by the step's own queries)"
    rival = config.resolve(build(target, draft, {"fresh_layers": [2], "policy": "streaming"}))
    assert (rival.fresh, rival.second_layers) == (None, {2, 3})  # ranked as all others are
    assert rival.second.lookahead_units == rival.target.lookahead_units > 0


@pytest.mark.parametrize(("budget", "said"), [(2048, True), (1024, False)])
def test_a_wide_budget_that_no_context_exceeds_is_said_in_the_log(target, draft, budget, said):
    wide = {"budget": 192, "wide_layers": [1], "wide_budget": budget}
    vllm_config = build(target, draft, wide, max_model_len=2048)
    found = config.warnings(vllm_config, config.resolve(vllm_config))
    assert any("nothing will be sparse" in line for line in found) == said


def test_block_size_is_32_unless_the_user_says_otherwise(target, draft):
    assert build(target, draft, {}, block_size=None).cache_config.block_size == 32
    assert config.resolve(build(target, draft, {"recent": 64}, block_size=64)).unit == 64


@pytest.mark.parametrize(
    ("num_layers", "layers"),
    [
        (1, [0]),
        (4, [2]),
        (24, [2, 5, 8, 11, 14, 17, 20, 23]),
        (80, [2, 11, 20, 29, 41, 50, 59, 68]),
    ],
)
def test_default_layers(num_layers, layers):
    assert config.default_layers(num_layers) == layers


def profile_file(path, **changes):
    content = {
        "format": 1,
        "target": "tiny",
        "draft": "tiny",
        "calibrated": False,
        "source": "test",
        "settings": {"budget": 320, "sinks": 8},
        **changes,
    }
    path.write_text(json.dumps(content))
    return str(path)


def test_user_settings_override_a_profile_which_overrides_defaults(tmp_path):
    path = profile_file(tmp_path / "p.json")
    read = config.read_config({"dustin": {"profile": path, "sinks": 2}})
    assert (read.budget, read.sinks, read.recent) == (320, 2, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format=2"),
        ({"settings": {"budgets": 1}}, "settings.budgets is not a setting"),
        ({"settings": {"profile": "x"}}, "settings.profile is not allowed"),
        ({"note": "x"}, "note is not a setting"),
    ],
)
def test_bad_profiles_are_refused(tmp_path, changes, message):
    path = profile_file(tmp_path / "p.json", **changes)
    with pytest.raises(ConfigError, match=message):
        config.read_config({"dustin": {"profile": path}})


def test_corrupted_and_oversized_profiles_are_refused(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        config.load_profile(str(broken))
    broken.write_bytes(b" " * (config.MAX_PROFILE_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        config.load_profile(str(broken))


def test_describe(target, draft):
    shown = config.describe(str(target), str(draft), {"dustin": {"budget": 512}})
    assert shown["budget_units"] == 16
    assert shown["target_scoring_heads"] == {"2": (0, 1, 2, 3)}
    assert (shown["wide_layers"], shown["wide_budget_units"]) == ([], None)
    json.dumps(shown)
    wide = {"budget": 512, "wide_layers": [2]}
    shown = config.describe(str(target), str(draft), {"dustin": wide})
    assert (shown["wide_layers"], shown["wide_budget_units"]) == ([2], 64)
    with pytest.raises(ConfigError, match="budget"):
        config.describe(str(target), str(draft), {"dustin": {"budget": 0}})


def test_every_scoring_head_belongs_to_one_rank():
    heads = HeadSet(((1, (0, 5, 7)), (4, (6, 7))))
    ranks = [heads.of_rank(rank, 4, 2) for rank in range(4)]
    assert [r.layers for r in ranks] == [
        ((1, (0,)),),
        (),
        ((1, (1,)),),
        ((1, (1,)), (4, (0, 1))),
    ]
    assert sum(r.num_heads for r in ranks) == heads.num_heads
    assert heads.of_rank(0, 1, 8) is heads


def shapes(target, draft):
    from transformers import AutoConfig

    return {
        side: dataclasses.asdict(config.ModelShape.of(AutoConfig.from_pretrained(folder)))
        for side, folder in (("target", target), ("draft", draft))
    }


def test_a_profile_is_used_when_the_shapes_match(target, draft, tmp_path, monkeypatch):
    match = shapes(target, draft)
    other = {**match, "target": {**match["target"], "vocab_size": 513}}
    heads = [{"layer": 1}]
    files = {
        name: tmp_path / f"{name}.json"
        for name in ("a-default", "b-calibrated", "c-other", "d-unnamed")
    }
    profile_file(files["a-default"], match=match, settings={"sinks": 9})
    settings = {"budget": 512, "lookahead": 128, "target_heads": heads}
    settings |= {"wide_layers": [1], "wide_budget": 1536}
    profile_file(files["b-calibrated"], match=match, calibrated=True, settings=settings)
    profile_file(files["c-other"], match=other, calibrated=True)
    profile_file(files["d-unnamed"], calibrated=True)
    monkeypatch.setattr(config, "_shipped_profiles", lambda: files)

    def resolved(**dustin):
        return config.resolve(build(target, draft, dustin))

    used = resolved()
    assert used.config.profile == "b-calibrated"
    assert used.target_heads == HeadSet(((1, (0, 1, 2, 3)),))
    assert used.target.lookahead_units == 4
    assert config.profile_note(used.config) == "profile b-calibrated"
    # The user's settings come first; lookahead and wide_budget keep their share of the budget.
    larger = resolved(budget=1024, sinks=2)
    assert (larger.config.budget, larger.config.sinks, larger.config.lookahead) == (1024, 2, 256)
    assert larger.config.wide_budget == 3072
    assert resolved(budget=1024, lookahead=64).config.lookahead == 64
    none = resolved(profile=None)
    assert (none.config.profile, none.config.budget) == (None, 1024)
    assert "no profile" in config.profile_note(none.config)
    del files["b-calibrated"]
    first = resolved()
    assert first.config.sinks == 9
    assert config.profile_note(first.config).endswith("not calibrated: default heads")
    del files["a-default"]
    assert resolved().config.profile is None


def test_a_profile_of_another_pair_is_said_in_the_log(target, draft, tmp_path, caplog):
    match = shapes(target, draft)
    fitting = profile_file(tmp_path / "fitting.json", match=match)
    match["draft"]["heads"] = 16
    other = profile_file(tmp_path / "other.json", match=match)
    vllm_logger = logging.getLogger("vllm")
    vllm_logger.propagate, before = True, vllm_logger.propagate
    try:
        build(target, draft, {"profile": fitting})
        assert "was made for" not in caplog.text
        build(target, draft, {"profile": other})
        assert "was made for tiny + tiny: its draft has 16 heads, this one 4" in caplog.text
    finally:
        vllm_logger.propagate = before


def test_a_wrong_shape_in_a_profile_is_refused(target, draft, tmp_path):
    match = shapes(target, draft)
    match["draft"]["layer"] = 3
    path = profile_file(tmp_path / "p.json", match=match)
    with pytest.raises(ConfigError, match="match.draft.layer=3"):
        config.load_profile(path)


def test_shipped_profiles_are_valid_and_match_one_pair_each():
    """Or none: calibrated ones that measured no better than the defaults have to be named."""
    found = {name: config.load_profile(name) for name in config._shipped_profiles()}
    assert len(found) >= 10
    for name, profile in found.items():
        if profile.match is None:
            assert profile.calibrated, name
            continue
        for side, heads in (("target", "target_heads"), ("draft", "draft_heads")):
            shape = getattr(profile.match, side)
            wanted = config.DustinConfig.model_validate(profile.settings)
            config._resolve_heads(getattr(wanted, heads), heads, shape.layers, shape.heads)
        assert config.match_profile(profile.match) == name
