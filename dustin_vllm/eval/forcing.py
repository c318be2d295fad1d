# SPDX-License-Identifier: Apache-2.0
"""Teacher forcing inside the engine: a known continuation is verified in place of drafts.

Perplexity and KL under sparse verification need the target's logits for a text that is given.
So for a request that names a continuation,

* the draft model drafts as always, and its queries score as always, but what is proposed is the
  continuation's next tokens,
* after the target has run, its logits are measured, and all tokens of the continuation that
  were verified are accepted, plus the next.

Every step thus verifies gamma + 1 known tokens, sparsely if the policy says so, and leaves the
approximate keys and values behind that sparse verification leaves. The draft's own next pass
writes the keys of what was accepted, as usual. Runs in the worker, without async scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from dustin_vllm.policies import oracle

KEY = oracle.RECORD_KEY
TOP = 512  # most likely tokens of the dense model that are told apart in the KL


@dataclass
class Dense:
    """The dense model's distributions at all N positions of all continuations; position i predicts
    token i.

    ``ids`` [N, TOP] int32 and ``log_probs`` [N, TOP] fp32: the most likely tokens; ``rest``: [N]
    log of what remains; ``top``: [N] int64, the most likely token.
    """

    ids: torch.Tensor
    log_probs: torch.Tensor
    rest: torch.Tensor
    top: torch.Tensor

    @classmethod
    def empty(cls, positions: int, vocabulary: int, device: torch.device) -> Dense:
        """Room for so many positions."""
        shape = (positions, min(TOP, vocabulary))
        return cls(
            ids=torch.zeros(shape, dtype=torch.int32, device=device),
            log_probs=torch.zeros(shape, device=device),
            rest=torch.zeros(positions, device=device),
            top=torch.zeros(positions, dtype=torch.int64, device=device),
        )

    def record(self, positions: torch.Tensor, log_probs: torch.Tensor) -> None:
        """Keep what is needed of [k, V] log probabilities."""
        top = log_probs.topk(self.ids.shape[1], dim=-1)
        self.ids[positions] = top.indices.int()
        self.log_probs[positions] = top.values
        self.rest[positions] = log_rest(top.values)
        self.top[positions] = log_probs.argmax(-1)  # among equals not always topk's first

    def divergence(self, positions: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
        """KL(dense || sparse) in nats over TOP + 1 events: the dense model's most likely tokens,
        and any other. A lower bound of the KL over all tokens, close to it: the rest is rare.

        Args:
            positions: [k] int64.
            log_probs: [k, V] fp32, sparse.

        Returns:
            [k] fp32.
        """
        found = log_probs.gather(1, self.ids[positions].long())
        wanted, rest = self.log_probs[positions], self.rest[positions]
        total = (wanted.exp() * (wanted - found)).sum(-1)
        return (total + rest.exp() * (rest - log_rest(found))).clamp(min=0)


def log_rest(log_probs: torch.Tensor) -> torch.Tensor:
    """[..., TOP] log probabilities to [...] log of one minus their sum, bounded below."""
    return torch.log((1 - log_probs.exp().sum(-1)).clamp(min=1e-12))


@dataclass
class Measured:
    """Per position that was measured: the continuation, the position, and values on the device."""

    names: list[str] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sparse: list[bool] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)  # [k, 3]: nll, KL, same top token


class Forcing:
    """Hooks of one model runner.

    Args:
        runner: vLLM's model runner, with a DustinRuntime.
        texts: continuations by name, as token ids.
        with_queries: record the oracle's queries, too.
    """

    def __init__(self, runner: Any, texts: dict[str, list[int]], with_queries: bool) -> None:
        if runner.use_async_scheduling:
            raise RuntimeError("teacher forcing needs async_scheduling=False")
        self.runner = runner
        self.texts = texts
        self._offsets: dict[str, int] = {}
        total = 0
        for name, text in texts.items():
            self._offsets[name] = total
            total += len(text)
        vocabulary = runner.model_config.get_vocab_size()
        self.dense = Dense.empty(total, vocabulary, runner.device)
        self.recording = True  # dense distributions, until ``take``
        self.recording_queries = with_queries
        self.measured = Measured()
        self.accepted = {"rows": 0, "tokens": 0}  # of verifications that are not forced
        self._proposed: dict[str, int] = {}  # by request: tokens of the text proposed
        self._done: dict[str, int] = {}  # by request: tokens of the text accepted
        self._sample, self._propose = runner._sample, runner.drafter.propose
        runner._sample = self.sample
        runner.drafter.propose = self.propose

    def _name(self, request_id: str) -> str | None:
        params = self.runner.requests[request_id].sampling_params
        return (params.extra_args or {}).get(KEY)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        """In place of ``GPUModelRunner._sample``."""
        runtime = self.runner.dustin
        request_ids = self.runner.input_batch.req_ids
        counts = [0] * len(request_ids)
        if spec_decode_metadata is not None:
            counts = list(spec_decode_metadata.num_draft_tokens)
        self._done.clear()
        accepted: dict[int, list[int]] = {}
        logit_rows: list[int] = []
        places: list[int] = []
        wanted: list[int] = []
        begin = 0  # a request's logits: one row for each draft, one for the token after
        for index, (request_id, row) in enumerate(zip(request_ids, runtime.rows, strict=True)):
            first_row = begin
            begin += counts[index] + 1
            name = self._name(request_id)
            if name is None or not row.samples:
                continue
            first = len(row.request.output_token_ids)
            right = min(counts[index], self._proposed.get(request_id, 0))
            tokens = self.texts[name][first : first + right + 1]
            count = len(tokens)
            wanted += tokens
            logit_rows += range(first_row, first_row + count)
            places += range(self._offsets[name] + first, self._offsets[name] + first + count)
            self.measured.names += [name] * count
            self.measured.positions += range(first, first + count)
            self.measured.sparse += [row.dense is None] * count
            accepted[index] = tokens
            self._done[request_id] = first + count
        if accepted:
            self._measure(logits[logit_rows], places, wanted)
        if self.recording_queries:
            self._record_queries()
        self._proposed.clear()
        output = self._sample(logits, spec_decode_metadata)
        sampled = output.sampled_token_ids
        free = [i for i, count in enumerate(counts) if count and i not in accepted]
        self.accepted["rows"] += len(free)
        self.accepted["tokens"] += int((sampled[free] >= 0).sum()) if free else 0
        if accepted:
            forced = torch.full((len(accepted), sampled.shape[1]), -1, dtype=sampled.dtype)
            for place, tokens in enumerate(accepted.values()):
                forced[place, : len(tokens)] = torch.tensor(tokens)
            sampled[list(accepted)] = forced.to(sampled.device)
        return output

    def _measure(self, logits: torch.Tensor, places: list[int], tokens: list[int]) -> None:
        log_probs = logits.float().log_softmax(-1)
        positions = torch.tensor(places, device=logits.device)
        wanted = torch.tensor(tokens, device=logits.device)
        if self.recording:
            self.dense.record(positions, log_probs)
        nll = -log_probs.gather(1, wanted[:, None])[:, 0]
        kl = self.dense.divergence(positions, log_probs)
        same = log_probs.argmax(-1) == self.dense.top[positions]
        self.measured.values.append(torch.stack([nll, kl, same.float()], dim=1))

    def _record_queries(self) -> None:
        """Keep the scoring heads' queries of accepted tokens, by position after the prompt."""
        rows, queries = self.runner.dustin.verification_queries()
        for index, kept in zip(rows, queries, strict=True):
            row = self.runner.dustin.rows[index]
            name = self._name(self.runner.input_batch.req_ids[index])
            if name is None:
                continue
            if name not in oracle.records:
                shape = (len(self.texts[name]), *kept.shape[1:])
                oracle.records[name] = kept.new_zeros(shape)
            record = oracle.records[name]
            width = min(len(kept), row.seq_len - row.context)
            end = row.seq_len - row.prompt_tokens  # positions after the prompt, of this step too
            first = max(0, end - width)
            last = min(end, len(record))
            if first < last:
                record[first:last] = kept[len(kept) - (end - first) :][: last - first]

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """In place of ``DustinProposer.propose``."""
        drafts = self._propose(*args, **kwargs)
        rows: list[int] = []
        tokens: list[list[int]] = []
        for index, request_id in enumerate(self.runner.input_batch.req_ids):
            if request_id not in self._done:
                continue
            text, first = self.texts[self._name(request_id) or ""], self._done[request_id]
            ahead = text[first : first + drafts.shape[1]]
            self._proposed[request_id] = len(ahead)
            rows.append(index)
            tokens.append(ahead + [0] * (drafts.shape[1] - len(ahead)))
        if rows:
            drafts = drafts.clone()
            drafts[rows] = torch.tensor(tokens, dtype=drafts.dtype, device=drafts.device)
        return drafts

    def take(self) -> dict[str, dict[str, Any]]:
        """What was measured since the last call.

        ``forced``, by continuation: ``position``, ``sparse``, ``nll``, ``kl``, ``same``, one
        entry a position. ``accepted``: ``rows`` that verified drafts and the ``tokens`` that
        they got, without those that were forced.
        """
        measured, self.measured = self.measured, Measured()
        accepted, self.accepted = self.accepted, {"rows": 0, "tokens": 0}
        values = torch.cat(measured.values).cpu().tolist() if measured.values else []
        taken: dict[str, dict[str, list[Any]]] = {}
        for name, position, sparse, (nll, kl, same) in zip(
            measured.names, measured.positions, measured.sparse, values, strict=True
        ):
            entry = taken.setdefault(
                name, {"position": [], "sparse": [], "nll": [], "kl": [], "same": []}
            )
            entry["position"].append(position)
            entry["sparse"].append(sparse)
            entry["nll"].append(nll)
            entry["kl"].append(kl)
            entry["same"].append(same)
        return {"forced": taken, "accepted": accepted}


# ---- called in the worker, by LLM.collective_rpc ------------------------------------------


def install(worker: Any, texts: dict[str, list[int]], with_queries: bool) -> None:
    """Hook into a worker's runner, and record what a dense run of the continuations says.

    See ``Forcing``.
    """
    oracle.records.clear()
    worker.model_runner.dustin_forcing = Forcing(worker.model_runner, texts, with_queries)


def take(worker: Any) -> dict[str, dict[str, Any]]:
    """``Forcing.take`` of a worker. What was recorded so far stays what dense means."""
    forcing: Forcing = worker.model_runner.dustin_forcing
    forcing.recording = forcing.recording_queries = False
    return forcing.take()


def reconfigure(worker: Any, changes: dict[str, Any]) -> None:
    """``DustinRuntime.reconfigure`` of a worker."""
    worker.model_runner.dustin.reconfigure(changes)
