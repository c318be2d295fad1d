# SPDX-License-Identifier: Apache-2.0
"""Samples from real text, and what a policy's output is worth.

Every sample is a prompt of a given number of tokens and is either *free* (greedy decoding, judged
by a text that is known or by what dense verification says) or *forced* (the text's own
continuation is verified, see ``forcing``). The first token of a free output comes from prefill,
which is dense, so answers are several tokens long.

=============  ======  ==========================================================================
task           kind    score of a sample
=============  ======  ==========================================================================
passkey        free    1 if an eight-digit code said once, at a depth that moves through the
                       samples, is repeated, else 0
multikey       free    the same with seven other codes around it
qa             free    token F1 of a value out of factual records against the true value
copy           free    LCS F1 of a passage from far back that is to be said again, word for word
edit           free    LCS F1 of a function from far back that is to be said again, renamed
agreement      free    share of the output before it first differs from the dense one
summary        free    ROUGE-L F1 of a summary against the dense one
continuation   forced  perplexity, KL to dense, share of equal top tokens
drift          forced  the same over a long continuation, per 1024 tokens
=============  ======  ==========================================================================
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dustin_vllm.calibrate.text import Sources

FREE = ("passkey", "multikey", "qa", "copy", "edit", "agreement", "summary")
FORCED = ("continuation", "drift")
TASKS = (*FREE, *FORCED)
BIN = 1024  # tokens over which forced values are averaged
KEYS = 8  # codes in a multikey prompt
PASSAGE = 160  # tokens of a passage that is copied
MAX_FUNCTION = 240  # tokens of a function that is edited
_THINGS = ("cellar", "lighthouse", "workshop", "orchard", "harbour office", "tower", "mill", "barn")
_PLACES = ("Bergen", "Lima", "Osaka", "Cork", "Accra", "Turin", "Dakar", "Riga", "Graz", "Pune")
MIN_NAME = 8  # characters of its name: short ones stand for several functions
_FUNCTION = re.compile(r"^(?=def ([a-z]\w+)\()(.*\n(?:(?:[ \t].*)?\n)+?)(?=\S)", re.M)


class EvalError(ValueError):
    """Options, models or text that cannot be used, with the reason and the fix."""


@dataclass(frozen=True)
class Sample:
    """One prompt.

    Attributes:
        name: unique in a run.
        task: one of ``TASKS``.
        context: tokens of the prompt, as asked for.
        prompt: token ids.
        max_tokens: tokens to generate; the length of ``text`` if that is forced.
        answer: what is right, for tasks that know it.
        text: the continuation that is verified, for forced tasks.
        ends: whether an end-of-sequence token ends the output.
        depth: where in the prompt the wanted passage stands, from 0 to 1.
    """

    name: str
    task: str
    context: int
    prompt: list[int]
    max_tokens: int
    answer: str = ""
    text: list[int] = field(default_factory=list)
    ends: bool = False
    depth: float | None = None


# ---- scores -------------------------------------------------------------------------------


def common_subsequence(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(second) + 1)
    for item in first:
        diagonal = 0
        for place, other in enumerate(second, 1):
            diagonal, row[place] = (
                row[place],
                diagonal + 1 if item == other else max(row[place], row[place - 1]),
            )
    return row[-1]


def lcs_f1(output: Sequence[Any], wanted: Sequence[Any]) -> float:
    """F1 of the longest common subsequence: ROUGE-L when the items are words."""
    if not output or not wanted:
        return float(len(output) == len(wanted))
    return 2 * common_subsequence(output, wanted) / (len(output) + len(wanted))


def words(text: str) -> list[str]:
    """Lower-case words and numbers, as ROUGE takes them."""
    return re.findall(r"[^\W_]+", text.lower())


def token_f1(output: str, wanted: str) -> float:
    """F1 of the words that two short answers share, in any order."""
    first, second = Counter(words(output)), Counter(words(wanted))
    shared = sum((first & second).values())
    if not shared:
        return float(first == second)
    return 2 * shared / (sum(first.values()) + sum(second.values()))


def common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Items before the first difference."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))


def score(
    sample: Sample, output: Sequence[int], dense: Sequence[int], decode: Callable[..., str]
) -> float:
    """What the output of a free task is worth, 0 to 1.

    Args:
        output, dense: token ids under the policy and under dense verification.
        decode: token ids to text.
    """
    if sample.task == "agreement":
        return common_prefix(output, dense) / max(1, len(dense))
    if sample.task == "summary":
        return lcs_f1(words(decode(output)), words(decode(dense)))
    text = decode(output)
    if sample.task in ("passkey", "multikey"):
        found = re.search(r"\d+", text)
        return float(found is not None and found.group() == sample.answer)
    if sample.task == "qa":
        return token_f1(text.strip().split("\n")[0], sample.answer)
    return lcs_f1(text.split(), sample.answer.split())


# ---- samples ------------------------------------------------------------------------------


class Maker:
    """Draws samples; equal arguments, equal samples.

    Args:
        encode: text to token ids, without special tokens.
        decode: token ids to text.
        chat: a user's message in the model's chat template, as text; None: it has none.
        max_id: ids from here on are refused (the draft's vocabulary).
        seed: of everything drawn.
    """

    def __init__(
        self,
        sources: Sources,
        encode: Callable[[str], list[int]],
        decode: Callable[..., str],
        chat: Callable[[str], str] | None,
        max_id: int,
        seed: int,
    ) -> None:
        self.sources, self.decode, self.chat = sources, decode, chat
        self._encode, self.max_id, self.seed = encode, max_id, seed
        self._functions: list[tuple[str, str]] | None = None

    def samples(self, task: str, context: int, count: int, tokens: int) -> list[Sample]:
        """``count`` samples with prompts of ``context`` tokens.

        Args:
            tokens: length of the output of the tasks agreement, continuation and drift.

        Raises:
            EvalError: the text has nothing for the task, or is too short.
        """
        made = []
        for index in range(count):
            rng = random.Random(f"{self.seed}/{task}/{context}/{index}")
            name = f"{task}/{context}/{index}"
            depth = (index + 0.5) / count
            made.append(getattr(self, f"_{task}")(name, rng, context, depth, tokens))
        return made

    def ids(self, text: str) -> list[int]:
        """Token ids, all known to the draft.

        Raises:
            EvalError: one of them is not.
        """
        found = self._encode(text)
        if found and max(found) >= self.max_id:
            raise EvalError(
                f"the tokenizer makes token {max(found)}, but the draft knows only {self.max_id}; "
                "use a draft of the same family"
            )
        return found

    def excerpt(self, rng: random.Random, kind: str, count: int) -> list[int]:
        """``count`` tokens of "prose" or "code" from a random place, from the start of a line."""
        text = self.sources.code if kind == "code" else self.sources.prose
        # No tokenizer of interest makes more than 8 characters of a token on average.
        size = min(len(text), 8 * count + 200)
        start = rng.randrange(max(1, len(text) - size))
        start = text.find("\n", start) + 1 if start else 0
        for characters in (5 * count, size):
            found = self.ids(text[start : start + characters])
            if len(found) >= count:
                return found[:count]
        raise EvalError(
            f"text: {len(found)} tokens of {kind}, but a sample needs {count}; give longer text "
            "with --text, or lower --context"
        )

    def _hide(
        self,
        rng: random.Random,
        kind: str,
        context: int,
        hidden: Sequence[tuple[float, list[int]]],
        end: list[int],
    ) -> list[int]:
        """An excerpt with passages put in at depths, and an end; ``context`` tokens."""
        room = context - len(end) - sum(len(passage) for _, passage in hidden)
        if room < 16:
            raise EvalError(f"context={context}: too short for the task; raise --context")
        filler = self.excerpt(rng, kind, room)
        made, taken = [], 0
        for depth, passage in sorted(hidden, key=lambda item: item[0]):
            place = int(depth * room)
            made += filler[taken:place] + passage
            taken = place
        return made + filler[taken:] + end

    def _passkey(self, name: str, rng: random.Random, context: int, depth: float, _: int) -> Sample:
        return self._codes("passkey", name, rng, context, depth, 1)

    def _multikey(
        self, name: str, rng: random.Random, context: int, depth: float, _: int
    ) -> Sample:
        return self._codes("multikey", name, rng, context, depth, KEYS)

    def _codes(
        self, task: str, name: str, rng: random.Random, context: int, depth: float, count: int
    ) -> Sample:
        every = [f"{thing} in {place}" for thing in _THINGS for place in _PLACES]
        places = rng.sample(every, count)
        codes = [str(rng.randrange(10_000_000, 99_999_999)) for _ in places]
        depths = [depth, *(rng.random() for _ in places[1:])]
        hidden = [
            (where, self.ids(f"\n\nNote: the entry code of the {place} is {code}.\n\n"))
            for where, place, code in zip(depths, places, codes, strict=True)
        ]
        end = self.ids(
            f"\n\nQuestion: What is the entry code of the {places[0]}?\n"
            f"Answer: the entry code of the {places[0]} is"
        )
        prompt = self._hide(rng, rng.choice(("prose", "code")), context, hidden, end)
        size = len(self.ids(f" {codes[0]}")) + 2
        return Sample(name, task, context, prompt, size, codes[0], depth=depth)

    def _qa(self, name: str, rng: random.Random, context: int, depth: float, _: int) -> Sample:
        facts = self.sources.facts
        if len(facts) < 2:
            raise EvalError(
                "task qa: no records in the text; give a folder of JSON records with --text, or "
                "leave the task out"
            )
        about, fields = rng.choice(facts)
        # A value of several words: the first token is not what is measured.
        long = [entry for entry in fields if len(entry[1].split()) > 2] or list(fields)
        field_, value = rng.choice(long)
        wanted = self.ids(f"\n{about} | {field_}: {value}")
        end = self.ids(f"\n\nAgain, {about} | {field_}:")
        room = context - len(wanted) - len(end)
        filler: list[int] = []
        while len(filler) < room:
            other, others = rng.choice(facts)
            if other != about:
                filler += self.ids("".join(f"\n{other} | {key}: {text}" for key, text in others))
        place = int(depth * room)
        prompt = filler[:place] + wanted + filler[place:room] + end
        size = len(self.ids(f" {value}")) + 4
        return Sample(name, "qa", context, prompt, size, value, depth=depth)

    def _copy(self, name: str, rng: random.Random, context: int, depth: float, _: int) -> Sample:
        kind = rng.choice(("prose", "code"))
        length = min(PASSAGE, context // 8)
        passage = self.excerpt(rng, kind, length)
        number = rng.randrange(100, 999)
        head = self.ids(f"\n\n=== Passage {number} ===\n")
        tail = self.ids(f"\n=== End of passage {number} ===\n\n")
        given = max(4, length // 10)
        end = self.ids(f"\n\n=== Passage {number}, once more, word for word ===\n")
        end += passage[:given]
        # Far back: near the end the recent window would give it.
        hidden = [(0.75 * depth, head + passage + tail)]
        prompt = self._hide(rng, kind, context, hidden, end)
        answer = self.decode(passage[given:])
        return Sample(name, "copy", context, prompt, length - given, answer, depth=0.75 * depth)

    def _edit(self, name: str, rng: random.Random, context: int, depth: float, _: int) -> Sample:
        if self._functions is None:
            every = [found.groups() for found in _FUNCTION.finditer(self.sources.code)]
            count = Counter(name for name, _ in every)
            self._functions = [
                (name, function.rstrip() + "\n")
                for name, function in every
                if len(name) >= MIN_NAME and count[name] == 1
                if 200 <= len(function) <= 4 * MAX_FUNCTION
            ]
        if not self._functions:
            raise EvalError("task edit: no functions in the text; give Python code with --text")
        limit = min(MAX_FUNCTION, context // 6)
        for _attempt in range(200):
            old, function = rng.choice(self._functions)
            ids = self.ids("\n\n" + function + "\n\n")
            if len(ids) <= limit:
                break
        else:
            raise EvalError(f"context={context}: too short for task edit; raise --context")
        new = f"{old}_v2"
        changed = re.sub(rf"\b{old}\b", new, function)
        start = f"def {new}("
        end = self.ids(f"\n\n# {old} again, renamed to {new}, otherwise unchanged:\n{start}")
        prompt = self._hide(rng, "code", context, [(0.75 * depth, ids)], end)
        answer = changed.removeprefix(start)
        size = len(self.ids(answer))
        return Sample(name, "edit", context, prompt, size, answer, depth=0.75 * depth)

    def _agreement(
        self, name: str, rng: random.Random, context: int, _: float, tokens: int
    ) -> Sample:
        kind = rng.choice(("prose", "code"))
        return Sample(name, "agreement", context, self.excerpt(rng, kind, context), tokens)

    def _summary(
        self, name: str, rng: random.Random, context: int, _: float, tokens: int
    ) -> Sample:
        asked = "Summarise the text above in a few sentences."
        if self.chat is None:
            start, end = [], self.ids(f"\n\n{asked}\nSummary:")
        else:
            mark = "<<<document>>>"
            before, after = self.chat(f"{mark}\n\n{asked}").split(mark)
            start, end = self.ids(before), self.ids(after)
        room = context - len(start) - len(end)
        prompt = start + self.excerpt(rng, "prose", max(16, room)) + end
        return Sample(name, "summary", context, prompt, min(192, tokens), ends=True)

    def _continuation(
        self, name: str, rng: random.Random, context: int, _: float, tokens: int
    ) -> Sample:
        found = self.excerpt(rng, rng.choice(("prose", "code")), context + tokens)
        prompt, text = found[:context], found[context:]
        return Sample(name, name.split("/")[0], context, prompt, tokens, text=text)

    _drift = _continuation
