# SPDX-License-Identifier: Apache-2.0
"""An upper bound: the true attention of the queries that are to come.

No engine can know them. Here the text to come is known (``dustin eval`` feeds a continuation),
and the queries that the scoring heads made of it under dense verification were recorded. Units
are ranked by the attention that the next gamma + 1 of them put on the context.
"""

from __future__ import annotations

import torch

from dustin_vllm.policies import Policy, Step, head_logits

RECORD_KEY = "dustin_forced"  # in a request's extra arguments: the name of its continuation

records: dict[str, torch.Tensor] = {}
"""By continuation: [N, H, D], the scoring heads' queries at position prompt + i."""


class Oracle(Policy):
    """See the module.

    Raises:
        RuntimeError: nothing was recorded for a sequence.
    """

    def unit_scores(self, step: Step) -> torch.Tensor:
        rows, tokens = step.shape
        unit, width = self.settings.unit, self.settings.gamma + 1
        scores = torch.zeros(rows, tokens // unit, device=step.queries.device)
        key_heads, scales = self.runtime.scoring_heads()
        for index, (row, context) in enumerate(zip(step.rows, step.contexts, strict=True)):
            extra = row.request.sampling_params.extra_args or {}
            recorded = records.get(extra.get(RECORD_KEY, ""))
            if recorded is None:
                raise RuntimeError(
                    "policy 'oracle' needs a known continuation; run it by dustin eval"
                )
            first = context - row.prompt_tokens
            queries = recorded[first : first + width]
            if not len(queries):  # the text ends here: nothing will be verified
                continue
            keys = self.runtime.scoring_keys(step.block_tables[index], 0, context)
            logits = head_logits(queries.to(keys), keys, key_heads) * scales[:, None, None]
            mass = logits.softmax(-1).sum((0, 1))[: context // unit * unit]
            scores[index, : context // unit] = mass.view(-1, unit).sum(1)
        return scores


POLICY = Oracle
