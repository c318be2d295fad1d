# SPDX-License-Identifier: Apache-2.0
"""Ledger of everything of vLLM that this package changes. Nothing is changed elsewhere.

``apply`` runs when vLLM loads its plugins, in every process, and is idempotent.
``apply_runner_patch`` runs when the backend module is imported, so only in a process that
builds a model with ``--attention-backend DUSTIN``. All patches leave other backends alone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dustin_vllm import compat

logger = logging.getLogger("vllm.dustin_vllm")

BACKEND_NAME = "DUSTIN"
BACKEND_PATH = "dustin_vllm.backend.DustinAttentionBackend"
WORKER_EXTENSION = "dustin_vllm.worker.DustinWorkerExtension"
SCHEDULER = "dustin_vllm.scheduler.DustinScheduler"
ASYNC_SCHEDULER = "dustin_vllm.scheduler.DustinAsyncScheduler"
CPU_BLOCK_SIZE = 32


@dataclass(frozen=True)
class Patch:
    """One change to vLLM."""

    symbol: str
    why: str
    how: str
    upstream: str
    delete_when: str


LEDGER = (
    Patch(
        symbol="vllm.v1.attention.backends.registry.AttentionBackendEnum.DUSTIN",
        why="--attention-backend accepts members of this enum only, and a member added at run "
        "time cannot be unpickled by a spawned process, which unpickles the configuration before "
        "it loads plugins.",
        how="Add the member; give it a __reduce_ex__ that imports this package first.",
        upstream="vLLM #41091 (dynamic names), #40065 (configuration of custom backends)",
        delete_when="vLLM registers backend names from an entry point and pickles them by name.",
    ),
    Patch(
        symbol="vllm.platforms.cpu.CpuPlatform.get_attn_backend_cls",
        why="The CPU platform ignores the chosen backend and returns CPU_ATTN.",
        how="Return our class when DUSTIN is chosen; otherwise call the original.",
        upstream="none filed",
        delete_when="CpuPlatform honours the selected backend.",
    ),
    Patch(
        symbol="vllm.platforms.current_platform.check_and_update_config",
        why="Settings and models must be refused when the server starts, in the front end, and "
        "the draft must use the same backend for its queries to be seen. vLLM has no hook for "
        "a backend to look at the configuration.",
        how="After the original: when DUSTIN is chosen, validate, set the draft's backend, the "
        "worker extension, the scheduler and, on CPU, block size 32.",
        upstream="vLLM #40051, #40065 (both closed)",
        delete_when="An attention backend can take part in configuration.",
    ),
    Patch(
        symbol="vllm.config.vllm.VllmConfig.__post_init__",
        why="A decode step on a GPU takes about as long as the host's part of it, so the host must "
        "work ahead. vLLM can (async scheduling), but 0.26 turns it off for draft models, as its "
        "own draft loop gains nothing; it decides before any hook, and what the user said is "
        "then lost.",
        how="Before the original: on CUDA, when DUSTIN is chosen with a draft model and the user "
        "left async scheduling open, turn it on where the executor supports it.",
        upstream="0.33 turns it on for draft models",
        delete_when="0.33 is the oldest supported version.",
    ),
    Patch(
        symbol="vllm.config.speculative.SpeculativeConfig.verify_equal_vocab_size_if_draft_model",
        why="Qwen2.5-72B has 152064 vocabulary entries and Qwen2.5-0.5B 151936, of one tokenizer: "
        "the rest is padding. vLLM refuses such a pair.",
        how="Keep the error of a draft whose vocabulary is the smaller one, and raise it later "
        "unless DUSTIN is chosen (this check runs before the backend is known).",
        upstream="vLLM #42775 (open), #10913",
        delete_when="vLLM accepts a draft whose vocabulary is a prefix of the target's.",
    ),
    Patch(
        symbol="vllm.config.speculative.SpeculativeConfig._verify_and_get_draft_tp",
        why="Qwen2.5-0.5B has 14 query heads: it cannot be split over 4 or 8 ranks, and vLLM "
        "splits a draft as it splits the target.",
        how="Where the user said nothing and the heads do not divide, answer 1: every rank runs "
        "the whole draft. Without DUSTIN the original error is raised later (this check runs "
        "before the backend is known).",
        upstream="none filed",
        delete_when="vLLM replicates a draft that does not divide.",
    ),
    Patch(
        symbol="vllm.v1.spec_decode.draft_model.DraftModelProposer._raise_if_draft_tp_mismatch",
        why="vLLM refuses draft_tensor_parallel_size=1 beside a split target, and the draft is "
        "built before any other hook sees the proposer.",
        how="When DUSTIN is chosen, make the proposer a DustinProposer, which builds and runs "
        "such a draft in a group of one rank; otherwise call the original.",
        upstream="vLLM #36219 (proposer registry), #5414 (draft TP 1)",
        delete_when="Proposers can be registered and vLLM can run a draft on every rank.",
    ),
    Patch(
        symbol="vllm.v1.engine.input_processor.InputProcessor._validate_params",
        why="A request may ask for dense verification (vllm_xargs), and one that asks for nonsense "
        "must be refused where it arrives, not in a worker.",
        how="When DUSTIN is chosen, check our key first.",
        upstream="none filed",
        delete_when="A plugin can validate the extra arguments that it reads.",
    ),
    Patch(
        symbol="vllm.distributed.parallel_state._TP",
        why="Layers take their share of a model from this global group when they are built, and "
        "logits are gathered over it.",
        how="Replaced by a group of this rank alone while a replicated draft is built or run, and "
        "put back.",
        upstream="vLLM #5414",
        delete_when="A model can be given its group.",
    ),
    Patch(
        symbol="vllm.v1.worker.gpu_model_runner.GPUModelRunner.initialize_metadata_builders",
        why="Metadata builders have no way to the model runner, and request ids, the drafter and "
        "the attention groups are known only there.",
        how="After the original: attach one DustinRuntime to the builders and the drafter.",
        upstream="vLLM #36219 (proposer registry)",
        delete_when="CommonAttentionMetadata carries request ids and proposers can be registered.",
    ),
)


def _wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
    """Replace ``owner.name`` once; refuse when somebody else has replaced it before.

    Raises:
        RuntimeError: the attribute is missing, or another package has patched it.
    """
    current = getattr(owner, name, None)
    if current is None:
        raise RuntimeError(
            f"dustin_vllm: {owner.__name__}.{name} does not exist in this vLLM; supported are "
            f"versions {compat.OLDEST} up to, not including, {compat.FIRST_UNTESTED}"
        )
    function = getattr(current, "__func__", current)
    if getattr(function, "__dustin__", False):
        return
    if not function.__module__.startswith("vllm."):
        raise RuntimeError(
            f"dustin_vllm: {owner.__name__}.{name} is already patched by {function.__module__}; "
            "uninstall that plugin, or list only 'dustin' in VLLM_PLUGINS"
        )
    ours = make(function)
    if not _fits(ours, function):
        raise RuntimeError(
            f"dustin_vllm: {owner.__name__}.{name} takes {inspect.signature(function)} in this "
            f"vLLM, and dustin_vllm expects {inspect.signature(ours)}"
        )
    wrapper = functools.wraps(function)(ours)
    wrapper.__dustin__ = True  # type: ignore[attr-defined]
    kind = type(inspect.getattr_static(owner, name))
    setattr(owner, name, kind(wrapper) if kind in (classmethod, staticmethod) else wrapper)


def _fits(ours: Callable[..., Any], theirs: Callable[..., Any]) -> bool:
    """Whether a wrapper takes what callers of the original pass, by place and by name."""
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken, wanted = (
        [p for p in inspect.signature(function).parameters.values() if p.kind in places]
        for function in (ours, theirs)
    )
    if [p.name for p in taken] != [p.name for p in wanted[: len(taken)]]:
        return False
    try:
        inspect.signature(ours).bind(*[None] * len(wanted))
    except TypeError:
        return False
    return True


_failure: str | None = None


def apply() -> None:
    """Register the backend name and the configuration hook. Idempotent, light.

    A failure must not stop a vLLM that does not use Dustin: it is logged, and raised by
    ``check`` as soon as the backend is chosen.
    """
    global _failure
    try:
        found = compat.vllm_distribution()
        if found is not None and not compat.supported(found[1]):
            raise RuntimeError(
                f"dustin_vllm supports vLLM 0.26 to 0.33, found {found[0]} {found[1]}; install a "
                "supported version: pip install 'dustin-vllm[gpu]' or 'dustin-vllm[cpu]'"
            )
        add_backend_member()
        from vllm.platforms import current_platform

        platform = type(current_platform)
        _wrap(platform, "check_and_update_config", _check_and_update_config)
        if current_platform.is_cpu():
            _wrap(platform, "get_attn_backend_cls", _get_attn_backend_cls)
        from vllm.config import VllmConfig
        from vllm.config.speculative import SpeculativeConfig

        if current_platform.is_cuda():
            _wrap(VllmConfig, "__post_init__", _schedule_ahead)

        _wrap(SpeculativeConfig, "verify_equal_vocab_size_if_draft_model", _verify_vocabulary)
        _wrap(SpeculativeConfig, "_verify_and_get_draft_tp", _replicate_what_does_not_divide)
    except Exception as error:
        _failure = str(error)
        logger.error("dustin_vllm is not available: %s", error)


def check() -> None:
    """Raise what ``apply`` failed with, if it failed.

    Raises:
        RuntimeError: the plugin could not be applied to this vLLM.
    """
    if _failure is not None:
        raise RuntimeError(f"attention backend DUSTIN cannot run: {_failure}")


def add_backend_member(name: str = BACKEND_NAME) -> Any:
    """Make ``AttentionBackendEnum.DUSTIN`` exist in this process and return it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    member = AttentionBackendEnum._member_map_.get(name)
    if member is None:
        import dustin_vllm

        member = compat.add_enum_member(AttentionBackendEnum, name, BACKEND_PATH)
        # Looked up on the instance by pickle and copy.
        member.__reduce_ex__ = lambda protocol: (dustin_vllm._restore_backend, (name,))
    return member


def _get_attn_backend_cls(original: Callable[..., str]) -> Callable[..., str]:
    def get_attn_backend_cls(cls: Any, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        if getattr(selected_backend, "name", None) == BACKEND_NAME:
            return selected_backend.get_path()
        return original(cls, selected_backend, *args, **kwargs)

    return get_attn_backend_cls


def _schedule_ahead(original: Callable[..., None]) -> Callable[..., None]:
    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from dustin_vllm import config

        scheduler = self.scheduler_config
        if scheduler.async_scheduling is None and config.is_active(self):
            from vllm.v1.executor.abstract import Executor

            if Executor.get_class(self).supports_async_scheduling():
                scheduler.async_scheduling = True
        original(self, *args, **kwargs)

    return __post_init__


def _verify_vocabulary(original: Callable[..., Any]) -> Callable[..., Any]:
    def verify_equal_vocab_size_if_draft_model(self: Any) -> Any:
        try:
            return original(self)
        except ValueError as error:
            draft, target = self.draft_model_config, self.target_model_config
            if draft.get_vocab_size() > target.get_vocab_size():
                raise
            self.dustin_vocab_error = str(error)
            return None

    return verify_equal_vocab_size_if_draft_model


_replicated: set[int] = set()  # ids of draft configurations, for the error without DUSTIN


def _replicate_what_does_not_divide(original: Callable[..., int]) -> Callable[..., int]:
    def _verify_and_get_draft_tp(
        target_parallel_config: Any,
        speculative_draft_tensor_parallel_size: int | None,
        draft_hf_config: Any,
    ) -> int:
        asked = speculative_draft_tensor_parallel_size
        chosen = original(target_parallel_config, asked, draft_hf_config)
        heads = getattr(draft_hf_config, "num_attention_heads", 0)
        if asked is None and heads % chosen:
            _replicated.add(id(draft_hf_config))
            return 1
        return chosen

    return _verify_and_get_draft_tp


def _check_and_update_config(original: Callable[..., None]) -> Callable[..., None]:
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        _prepare(cls, vllm_config)

    return check_and_update_config


def _prepare(platform: Any, vllm_config: Any) -> None:
    """Validate, and change in vLLM's configuration only what sparse verification needs."""
    from dustin_vllm import config, metrics

    backend = vllm_config.attention_config.backend
    if getattr(backend, "name", None) != BACKEND_NAME:
        vocab_error = getattr(vllm_config.speculative_config, "dustin_vocab_error", None)
        if vocab_error is not None:
            raise ValueError(vocab_error)
        draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
        if draft is not None and id(draft.hf_config) in _replicated:
            draft.verify_with_parallel_config(vllm_config.parallel_config)  # raises, as vLLM
        additional = vllm_config.additional_config
        if isinstance(additional, dict) and config.KEY in additional and backend is None:
            logger.warning(
                "additional_config has settings for Dustin, but the attention backend is not "
                "DUSTIN; add --attention-backend DUSTIN"
            )
        return
    if not config.is_active(vllm_config):
        config.read_config(vllm_config.additional_config)
        logger.warning(
            "attention backend DUSTIN without a draft model does nothing of its own; add "
            '--speculative-config \'{"method": "draft_model", "model": ..., '
            '"num_speculative_tokens": 4}\''
        )
        return
    speculative = vllm_config.speculative_config
    cache = vllm_config.cache_config
    if vllm_config.device_config.device_type == "cpu" and not cache.user_specified_block_size:
        # Also for the drafter's copy, which shares this object: the original has just put 128.
        cache.block_size = CPU_BLOCK_SIZE
    if vllm_config.model_config is speculative.draft_model_config:
        return  # the rest was checked already
    settings = config.resolve(vllm_config)
    if not getattr(speculative, "dustin_prepared", False):
        # In the front end. Workers copy the configuration they were given, mark included.
        speculative.dustin_prepared = True
        apply_request_patch()
        metrics.expose()
    speculative.attention_backend = backend
    parallel = vllm_config.parallel_config
    if not parallel.worker_extension_cls:
        parallel.worker_extension_cls = WORKER_EXTENSION
    elif parallel.worker_extension_cls != WORKER_EXTENSION:
        if settings.draft_replicated:
            raise config.ConfigError(
                f"worker_extension_cls={parallel.worker_extension_cls}: a draft that every rank "
                "runs whole (draft_tensor_parallel_size=1) needs Dustin's own; leave it out"
            )
        logger.warning(
            "worker_extension_cls=%s is in use; the RPC dustin_stats is not available",
            parallel.worker_extension_cls,
        )
    if cache.enable_prefix_caching and settings.publishes_prompts_only:
        _use_scheduler(vllm_config.scheduler_config)
    for message in config.warnings(vllm_config, settings):
        logger.warning("%s", message)


def _use_scheduler(scheduler: Any) -> None:
    """Choose the scheduler that keeps generated blocks out of the prefix cache."""
    from dustin_vllm import config

    ours = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER
    if scheduler.scheduler_cls not in (None, ours):
        raise config.ConfigError(
            f"scheduler_cls={scheduler.scheduler_cls} would publish approximate KV of generated "
            "tokens to the prefix cache; accept that with dustin.cache_generated=true, or use "
            "--no-enable-prefix-caching"
        )
    scheduler.scheduler_cls = ours


def apply_request_patch() -> None:
    """Check what requests ask of us, in the process that takes them. Idempotent."""
    from vllm.v1.engine.input_processor import InputProcessor

    _wrap(InputProcessor, "_validate_params", _validate_params)


def _validate_params(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.exceptions import VLLMValidationError  # an error 400 of the server

    def _validate_params(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        from dustin_vllm import config

        if config.is_active(self.vllm_config):
            try:
                config.wants_dense(params)
            except ValueError as error:
                raise VLLMValidationError(str(error), parameter="vllm_xargs") from error
        return original(self, params, *args, **kwargs)

    return _validate_params


def apply_proposer_patch() -> None:
    """Make draft-model proposers ours from the start. Idempotent."""
    from vllm.v1.spec_decode.draft_model import DraftModelProposer

    _wrap(DraftModelProposer, "_raise_if_draft_tp_mismatch", _raise_if_draft_tp_mismatch)


def _raise_if_draft_tp_mismatch(original: Callable[..., None]) -> Callable[..., None]:
    def _raise_if_draft_tp_mismatch(self: Any) -> None:
        from dustin_vllm import config

        if config.is_active(self.vllm_config):
            from dustin_vllm.proposer import DustinProposer

            self.__class__ = DustinProposer
            if config.is_replicated(self.vllm_config):
                return
        original(self)

    return _raise_if_draft_tp_mismatch


@contextlib.contextmanager
def tensor_parallel_group(group: Any) -> Iterator[None]:
    """Let ``group`` be vLLM's tensor-parallel group for a while."""
    from vllm.distributed import parallel_state

    usual = parallel_state._TP
    parallel_state._TP = group
    try:
        yield
    finally:
        parallel_state._TP = usual


def apply_runner_patch() -> None:
    """Attach the runtime when a model runner has built its metadata builders. Idempotent."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    _wrap(GPUModelRunner, "initialize_metadata_builders", _initialize_metadata_builders)


def _initialize_metadata_builders(original: Callable[..., None]) -> Callable[..., None]:
    def initialize_metadata_builders(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from dustin_vllm import config, runtime

        if config.is_active(self.vllm_config):
            runtime.attach(self)

    return initialize_metadata_builders
