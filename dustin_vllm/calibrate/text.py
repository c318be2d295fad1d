# SPDX-License-Identifier: Apache-2.0
"""Windows of text that a pair is calibrated on.

Four kinds, because a selection fails in different ways on each: ``prose`` and ``code`` are
plain excerpts; in ``copy`` a passage from far back comes again; in ``needle`` the end asks for
something that was said once, far back, and answers it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dustin_vllm.calibrate.attention import CalibrationError

KINDS = ("prose", "code", "copy", "needle")
CODE_SUFFIXES = (".py", ".c", ".h", ".cc", ".cpp", ".cu", ".rs", ".go", ".js", ".ts", ".java")
PROSE_SUFFIXES = (".txt", ".md", ".rst")
MAX_FILES = 4000
MAX_CHARACTERS = 64 << 20
MAX_FACT_CHARACTERS = 60
MIN_CONTEXT = 256
_THINGS = ("vault", "north gate", "archive", "observatory", "greenhouse", "boathouse", "library")
_PLACES = ("Lisbon", "Tromsø", "Quito", "Nagoya", "Perth", "Galway", "Oaxaca", "Windhoek")


@dataclass(frozen=True)
class Sources:
    """Text by kind; ``facts`` are (name of a record, [(field, value), ...])."""

    prose: str
    code: str
    facts: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()


@dataclass(frozen=True)
class Window:
    """Tokens, and the numbers of confirmed tokens at which a verification step is looked at.

    ``source``: where in the context the answer stands (needle), [start, end).
    ``answer``: where the end of the window gives it, [start, end).
    """

    kind: str
    tokens: tuple[int, ...]
    positions: tuple[int, ...] = ()
    source: tuple[int, int] = (0, 0)
    answer: tuple[int, int] = (0, 0)


def default_sources() -> Sources:
    """What every Python brings: the language reference as prose, the library's source as code."""
    import textwrap
    from pydoc_data import topics

    modules = (
        argparse_like for argparse_like in sorted(Path(textwrap.__file__).parent.glob("*.py"))
    )
    return Sources(
        prose="\n\n".join(topics.topics[name] for name in sorted(topics.topics)),
        code="\n\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in modules),
    )


def read_sources(paths: Sequence[Path]) -> Sources:
    """Read text files and folders; the suffix says what they are.

    JSON files are records of nested fields whose leaves are ``{"text": value}``; short values
    become questions. Where no prose or no code is given, ``default_sources`` fills in.

    Raises:
        CalibrationError: no such path, or nothing usable in it.
    """
    if not paths:
        return default_sources()
    prose: list[str] = []
    code: list[str] = []
    facts = []
    characters = 0
    for path in _files(paths):
        if characters > MAX_CHARACTERS:
            break
        text = path.read_text(encoding="utf-8", errors="ignore")
        characters += len(text)
        if path.suffix in CODE_SUFFIXES:
            code.append(text)
        elif path.suffix in PROSE_SUFFIXES:
            prose.append(text)
        elif (record := _record(path.stem, text)) is not None:
            facts.append(record)
    if not (prose or code or facts):
        raise CalibrationError(
            f"text={', '.join(map(str, paths))}: no readable text; give files or folders with "
            f"{', '.join(PROSE_SUFFIXES + CODE_SUFFIXES[:2])} or JSON records"
        )
    spare = default_sources()
    return Sources("\n\n".join(prose) or spare.prose, "\n\n".join(code) or spare.code, tuple(facts))


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    known = (*CODE_SUFFIXES, *PROSE_SUFFIXES, ".json")
    for path in paths:
        if path.is_file():
            yield path
        elif path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix in known and p.is_file())
            yield from found[:MAX_FILES]
        else:
            raise CalibrationError(f"text={path}: no such file or folder")


def _record(stem: str, text: str) -> tuple[str, tuple[tuple[str, str], ...]] | None:
    """Name and short facts of a JSON record; None if it has none."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    leaves = list(_leaves(data, ()))
    names = [value for path, value in leaves if path[-1] == "conventional short form"]
    name = names[0] if names and names[0] != "none" else stem
    facts = tuple(
        (" / ".join(path), value)
        for path, value in leaves
        if 3 <= len(value) <= MAX_FACT_CHARACTERS and value.isascii() and value != name
    )
    return (name, facts) if facts else None


def _leaves(data: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if not isinstance(data, dict):
        return
    text = data.get("text")
    if isinstance(text, str) and path:
        yield path, text.strip()
    for key, value in data.items():
        yield from _leaves(value, (*path, str(key)))


class WindowMaker:
    """Draws windows of ``context`` tokens and a step behind it; equal arguments, equal windows.

    Args:
        encode: text to token ids, without special tokens.
        context: tokens of a window before the last verification step's end, >= MIN_CONTEXT.
        gamma: proposed tokens per step.
        max_id: ids from here on are refused (the draft's vocabulary).

    Raises:
        CalibrationError: the context is too short.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        sources: Sources,
        context: int,
        gamma: int,
        max_id: int,
    ) -> None:
        if context < MIN_CONTEXT:
            raise CalibrationError(f"context={context}: too short; use {MIN_CONTEXT} or more")
        self.encode, self.sources = encode, sources
        self.context, self.gamma, self.max_id = context, gamma, max_id

    def windows(self, count: int, per_window: int, seed: int) -> list[Window]:
        """``count`` windows, kinds in turn, with ``per_window`` verification steps each."""
        made = []
        for index in range(count):
            kind = KINDS[index % len(KINDS)]
            rng = random.Random(f"{seed}/{index}/{kind}")
            if kind == "copy":
                made.append(self._copy(rng, per_window))
            elif kind == "needle":
                made.append(self._needle(rng, per_window))
            else:
                tokens = self._excerpt(rng, kind, self.context)
                made.append(Window(kind, tuple(tokens), self._spread(per_window)))
        return made

    def needles(self, count: int, seed: int) -> list[Window]:
        """``count`` needle windows, drawn from another sequence than those of ``windows``."""
        return [self._needle(random.Random(f"{seed}/heads/{i}"), 1) for i in range(count)]

    def _spread(self, per_window: int) -> tuple[int, ...]:
        """Steps over the last quarter of a window, at odd offsets so that blocks are unfilled."""
        first, last = self.context * 3 // 4, self.context - self.gamma - 1
        return _evenly(first, last, per_window)

    def _copy(self, rng: random.Random, per_window: int) -> Window:
        """An excerpt whose end repeats a passage from its first half."""
        length = min(256, self.context // 8)
        tokens = self._excerpt(rng, rng.choice(("prose", "code")), self.context - length)
        start = rng.randrange(self.context // 16, self.context // 2 - length)
        copied = tokens[start : start + length]
        # The first tokens of a copy are not yet recognisable as one.
        first = len(tokens) + min(16, length // 4)
        last = self.context - self.gamma - 1
        return Window("copy", tuple(tokens + copied), _evenly(first, last, per_window))

    def _needle(self, rng: random.Random, per_window: int) -> Window:
        """Text with a fact in it, and at its end a cue and the fact's value."""
        if self.sources.facts and rng.random() < 0.5:
            before, value, after, cue, filler = self._fact(rng)
        else:
            thing = f"{rng.choice(_THINGS)} in {rng.choice(_PLACES)}"
            value = f" {rng.randrange(10_000_000, 99_999_999)}"
            before = f"\n\nNote: the access code of the {thing} is"
            after = ". Keep it in mind.\n\n"
            cue = (
                f"\n\nQuestion: What is the access code of the {thing}?\n"
                f"Answer: the access code of the {thing} is"
            )
            filler = self._excerpt(rng, rng.choice(("prose", "code")), self.context)
        parts = [self._ids(part) for part in (before, value, after, cue)]
        room = self.context - sum(map(len, parts)) - len(parts[1])
        place = rng.randrange(room // 16, room * 3 // 4)
        tokens = filler[:place] + parts[0] + parts[1] + parts[2] + filler[place:room]
        source = place + len(parts[0])
        tokens += parts[3]
        answer = len(tokens)
        size = len(parts[1])
        tokens += parts[1]
        # What follows the answer lets steps start anywhere in it.
        tokens += self._ids(".\n\n" + "The next question is about something else. " * 2)
        tokens = tokens[: answer + size + self.gamma + 1]
        steps = _evenly(answer - 2, answer + size - 2, per_window)
        return Window(
            "needle", tuple(tokens), steps, (source, source + size), (answer, answer + size)
        )

    def _fact(self, rng: random.Random) -> tuple[str, str, str, str, list[int]]:
        """A fact among facts about other records: before, value, after, cue, filler."""
        facts = self.sources.facts
        name, fields = rng.choice(facts)
        field, value = rng.choice(fields)
        filler: list[int] = []
        while len(filler) < self.context:
            other, others = rng.choice(facts)
            if other != name:
                filler += self._ids("".join(f"\n{other} | {f}: {v}" for f, v in others))
        return f"\n{name} | {field}:", f" {value}", "", f"\n\nAgain, {name} | {field}:", filler

    def _excerpt(self, rng: random.Random, kind: str, count: int) -> list[int]:
        """``count`` tokens from a random place, starting at a line."""
        text = self.sources.code if kind == "code" else self.sources.prose
        # No tokenizer of interest makes more than 8 characters of a token on average.
        size = min(len(text), 8 * count + 200)
        start = rng.randrange(max(1, len(text) - size))
        start = text.find("\n", start) + 1 if start else 0
        tokens = self._ids(text[start : start + size])
        if len(tokens) < count:
            raise CalibrationError(
                f"text: {len(tokens)} tokens of {kind}, but a window needs {count}; "
                "give longer text with --text or lower --context"
            )
        return tokens[:count]

    def _ids(self, text: str) -> list[int]:
        ids = self.encode(text)
        if ids and max(ids) >= self.max_id:
            raise CalibrationError(
                f"draft: the target's tokenizer makes token {max(ids)}, but the draft knows only "
                f"{self.max_id} tokens; use a draft of the same family"
            )
        return ids


def _evenly(first: int, last: int, count: int) -> tuple[int, ...]:
    """``count`` different integers (or as many as there are) from first to last."""
    if count == 1 or last <= first:
        return (min(first, last),)
    return tuple(sorted({first + (last - first) * i // (count - 1) for i in range(count)}))
