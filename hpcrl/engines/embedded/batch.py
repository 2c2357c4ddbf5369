"""The running batch of a causal LM: rows join, get one token per step, and leave, each as if it were alone.

    RunningRequest      one row
    RunningBatch        the rows that run together
    MAX_PREFILL_TOKENS, MAX_SCORED_TOKENS  the sizes of passes

The KV of a row covers all its tokens but the last; a step runs the model on the last token of every row, samples, and
appends. A row that joins gets its first token from the pass over its prompt; after an update the next step recomputes
the KV of the running rows in the pass that yields their next token. All of it is blocking torch work for one thread;
hpcrl.engines.embedded.engine makes it asynchronous.

Legend: B rows, Q new tokens of a row, W columns, E hidden values, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from hpcrl.engines.base import FinishReason
from hpcrl.engines.embedded.expert_recorder import ExpertHistory, ExpertRecorder
from hpcrl.engines.embedded.grammar import AnswerMatcher, mask_logits
from hpcrl.engines.embedded.kv_cache import PrefixCache, RowKv
from hpcrl.engines.embedded.kv_slots import KvSlots, name_cache_argument, probe_kv_shape
from hpcrl.engines.embedded.sampling import compute_logprobs, find_likeliest, sample_tokens
from hpcrl.errors import EngineError
from hpcrl.weights.model_update import BorrowedWeights, borrow_weights
from hpcrl.weights.stored_tensors import StoredTensors

MAX_PREFILL_TOKENS = 8192
"""Padded tokens in one forward pass over joining rows; more tokens take several passes."""
MAX_SCORED_TOKENS = 1024
"""Tokens in one pass of `compute_logprobs`, which has the logits of all of them."""


@dataclass(eq=False, kw_only=True)
class RunningRequest:
    """A request that is being served."""

    token_ids: list[int]
    """The prompt, then the generated tokens."""
    num_prompt: int
    max_new_tokens: int
    """0: only the KV is computed, and is in `kv` when the row leaves."""
    temperature: float
    seed: int
    stop_token_ids: frozenset[int]
    top_p: float = 1.0
    top_k: int = 0
    top_logprobs: int = 0
    keep_kv_s: float = 0.0
    matcher: AnswerMatcher | None = None
    """The state of its structure."""
    kv: RowKv | None = None
    """Before the row joins: KV to start with. After a row of 0 new tokens has left: its result."""
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    experts: ExpertHistory = field(default_factory=ExpertHistory)
    """The experts of its tokens, in an engine that records them."""
    experts_from: int | None = None
    versions: list[int] = field(default_factory=list)
    remote_prefill: bool = False
    finish_reason: FinishReason | None = None
    failure: EngineError | None = None

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    def accept(self, token_id: int, *, logprob: float, version: int, top: dict[int, float]) -> None:
        """Append a generated token; the row is done at a stop token or at its limit."""
        if not math.isfinite(logprob):
            why = f"version {version} of the weights gives log-probability {logprob}: it is damaged"
            self.failure = EngineError(why)
            return
        self.token_ids.append(token_id)
        if self.matcher is not None:
            self.matcher.accept(token_id)
        self.logprobs.append(logprob)
        if self.top_logprobs:
            self.top.append(top)
        self.versions.append(version)
        if token_id in self.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.versions) >= self.max_new_tokens:
            self.finish_reason = "length"


_Pass = tuple[list[RunningRequest], torch.Tensor]
"""Rows, and the logits of their next tokens."""


class RunningBatch:
    """Rows that are generated together; row i has slot i."""

    def __init__(
        self, model: Any, *, version: int, prefix_bytes: int, stored: StoredTensors, records_experts: bool = False
    ) -> None:
        self.model = model
        self._recorder = ExpertRecorder(model) if records_experts else None
        self._stored = stored
        """The names that versions have for the model's tensors."""
        self.version = version
        self.context_length = int(model.config.max_position_embeddings)
        self.vocabulary_size = int(model.get_input_embeddings().num_embeddings)
        self.rows: list[RunningRequest] = []
        self.num_generated = 0
        self.is_torn = False
        """True if the weights were overwritten while in use: nothing is generated until others are loaded."""
        self._is_intact: Callable[[], bool] = lambda: True
        self._is_stale = False
        """True if the KV of the running rows is of other weights."""
        self._slots = KvSlots(probe_kv_shape(model))
        self._prefixes = PrefixCache(max_bytes=prefix_bytes)
        self._last_B: torch.Tensor | None = None
        """The position in each row whose logits the present pass computes; None for all."""
        model.get_output_embeddings().register_forward_pre_hook(self._select_last)

    @torch.inference_mode()
    def advance(self, joining: list[RunningRequest]) -> list[RunningRequest]:
        """Admit rows, generate one token for every row, and remove and return those that are done."""
        nums_read = {row: len(row.experts) for row in (*self.rows, *joining)}
        was_stale, self._is_stale = self._is_stale, False
        passes = self._recompute_kv() if was_stale else self._continue_rows()
        passes += self._join(joining)
        if not self._weights_are_intact():
            for row, num in nums_read.items():
                row.experts.cut(num)
            return []
        rows = [row for part, _ in passes for row in part]
        if rows:
            self._sample_rows(rows, torch.cat([logits_BV for _, logits_BV in passes]))
        for row in self.rows:
            if row.max_new_tokens == 0:
                row.finish_reason = "length"
        return self._release()

    @torch.inference_mode()
    def drop(self, rows: Iterable[RunningRequest]) -> None:
        """Remove rows before they are done."""
        for row in rows:
            if not row.is_done:
                row.finish_reason = "aborted"
        self._release()

    @torch.inference_mode()
    def compute_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Compute the log-prob of each token after the first, at temperature 1, in passes of limited size."""
        ids_1T = torch.tensor([token_ids], device=self.model.device)
        cache, found = DynamicCache(), [torch.zeros(0)]
        for start in range(0, len(token_ids) - 1, MAX_SCORED_TOKENS):
            end = min(start + MAX_SCORED_TOKENS, len(token_ids) - 1)
            result = self.model(ids_1T[:, start:end], use_cache=True, **{name_cache_argument(self.model): cache})
            logprobs_TV = torch.log_softmax(result.logits[0].float(), dim=-1)
            found.append(logprobs_TV.gather(1, ids_1T[0, start + 1 : end + 1, None])[:, 0].cpu())
        return torch.cat(found).tolist()

    def load(
        self, tensors: Mapping[str, torch.Tensor], *, version: int, is_intact: Callable[[], bool]
    ) -> BorrowedWeights:
        """Use new weights from now on, where they are stored; `finish_load` makes them the model's own.

        `is_intact` returns whether they have not been overwritten; it is called before tokens are sampled.
        A WeightsError changes nothing.
        """
        loan = borrow_weights(self.model, tensors, self._stored)
        self.version, self._is_intact, self.is_torn = version, is_intact, False
        self._prefixes.clear()
        self._slots.wipe()
        self._is_stale = True
        return loan

    def finish_load(self, loan: BorrowedWeights) -> None:
        """Use the model's own memory, into which the weights have been copied."""
        loan.end()
        self._weights_are_intact()
        self._is_intact = lambda: True

    def sleep(self) -> None:
        """Move the weights to host memory, and drop all KV."""
        self._prefixes.clear()
        self._slots.wipe()
        self._is_stale = True
        self.model.to("cpu")
        if self._slots.shape.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Move the weights back to where they compute."""
        self.model.to(self._slots.shape.device)

    def _weights_are_intact(self) -> bool:
        """Return whether everything was computed with weights of one version; if not, another version follows soon."""
        if not self._is_intact():
            self.is_torn = self._is_stale = True
        return not self.is_torn

    def _recompute_kv(self) -> list[_Pass]:
        """Recompute the KV of all rows; the same passes yield the logits of their next tokens."""
        self.rows.sort(key=lambda row: len(row.token_ids), reverse=True)
        return self._prefill_rows(0, {row: row.token_ids for row in self.rows}, dict.fromkeys(self.rows, 0))

    def _continue_rows(self) -> list[_Pass]:
        """Compute the logits of the next tokens of all rows."""
        if not self.rows:
            return []
        ids_B1 = torch.tensor([[row.token_ids[-1]] for row in self.rows])
        columns_B1 = torch.tensor([[len(row.token_ids) - 1] for row in self.rows])
        return [(list(self.rows), self._forward(0, ids_B1, columns_B1))]

    def _join(self, rows: list[RunningRequest]) -> list[_Pass]:
        """Compute the KV of new rows and, in the same passes, the logits of their first tokens."""
        if not rows:
            return []
        known = {row: self._find_known_kv(row) for row in rows}
        starts = {row: len(kv.token_ids) if kv else 0 for row, kv in known.items()}
        new_ids = {row: row.token_ids[starts[row] : None if row.max_new_tokens else -1] for row in rows}
        rows = sorted(rows, key=lambda row: len(new_ids[row]), reverse=True)
        first = len(self.rows)
        self._slots.reserve(num_slots=first + len(rows), num_columns=max(len(row.token_ids) for row in rows))
        for slot, row in enumerate(rows, start=first):
            if (kv := known[row]) is not None:
                self._slots.put(slot, kv.kv_KHTD)
                if kv.experts_TLK is not None:
                    row.experts.add(0, kv.experts_TLK)
            row.kv = None
        self.rows += rows
        return self._prefill_rows(first, {row: new_ids[row] for row in rows}, starts)

    def _find_known_kv(self, row: RunningRequest) -> RowKv | None:
        """Return KV that was handed over by a prefill engine or kept from the trajectory's last turn."""
        if (kv := row.kv) is not None and self._is_usable_kv(row, kv):
            row.remote_prefill = True
            return kv
        return self._prefixes.find_longest(row.token_ids[:-1])

    def _is_usable_kv(self, row: RunningRequest, kv: RowKv) -> bool:
        same = kv.version == self.version and kv.token_ids == row.token_ids[:-1]
        if self._recorder is not None and kv.experts_TLK is None:
            return False
        return same and self._slots.shape.has_shape_of(kv.kv_KHTD)

    def _prefill_rows(
        self, first: int, new_ids: dict[RunningRequest, list[int]], starts: dict[RunningRequest, int]
    ) -> list[_Pass]:
        """Compute the missing tokens of the rows from slot `first`; passes have those rows that generate tokens."""
        rows, passes = list(new_ids), list[_Pass]()
        for start, stop in _prefill_spans([len(ids) for ids in new_ids.values()]):
            span = rows[start:stop]
            logits_BV = self._prefill(first + start, [new_ids[row] for row in span], starts)
            kept = [place for place, row in enumerate(span) if row.max_new_tokens]
            passes.append(([span[place] for place in kept], logits_BV[kept]))
        return passes

    def _prefill(self, first: int, new_ids: list[list[int]], starts: dict[RunningRequest, int]) -> torch.Tensor:
        """Compute the KV of `new_ids`, the missing tokens of the rows from slot `first`, and the logits that follow."""
        Q = max(len(ids) for ids in new_ids)
        ids_BQ = torch.tensor([ids + [0] * (Q - len(ids)) for ids in new_ids])
        starts_B1 = torch.tensor([[starts[row]] for row in self.rows[first : first + len(new_ids)]])
        if (starts_B1 == starts_B1[0]).all():
            starts_B1 = starts_B1[:1]
        last_B = torch.tensor([len(ids) - 1 for ids in new_ids])
        return self._forward(first, ids_BQ, starts_B1 + torch.arange(Q), last_B=last_B)

    def _sample_rows(self, rows: list[RunningRequest], logits_BV: torch.Tensor) -> None:
        """Sample a token for each row; a row fails if its structure allows none."""
        problems = mask_logits(logits_BV, [row.matcher for row in rows])
        logprobs_BV = compute_logprobs(
            logits_BV,
            temperatures=[row.temperature for row in rows],
            top_ps=[row.top_p for row in rows],
            top_ks=[row.top_k for row in rows],
        )
        token_ids, logprobs = sample_tokens(
            logprobs_BV,
            temperatures=[row.temperature for row in rows],
            seeds=[row.seed for row in rows],
            positions=[len(row.token_ids) for row in rows],
        )
        tops = find_likeliest(logprobs_BV, [row.top_logprobs for row in rows])
        for row, token_id, logprob, top, problem in zip(rows, token_ids, logprobs, tops, problems, strict=True):
            row.failure = problem
            if problem is None:
                row.accept(token_id, logprob=logprob, version=self.version, top=top)
        self.num_generated += len(rows)

    def _forward(
        self, first: int, ids_BQ: torch.Tensor, columns_BQ: torch.Tensor, *, last_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the model on new tokens at `columns_BQ`; one row of columns is used for all rows.

        Returns the logits after the token at `last_B` of each row, by default the only one.
        """
        width = int(columns_BQ.max()) + 1
        self._slots.reserve(num_slots=first + len(ids_BQ), num_columns=width)
        device = self._slots.shape.device
        starts = columns_BQ[:, 0].tolist()
        columns_BQ = columns_BQ.to(device)
        mask_B1QW = torch.arange(width, device=device) <= columns_BQ[:, None, :, None]
        cache = self._slots.make_cache(first=first, num_rows=len(ids_BQ), columns_BQ=columns_BQ, width=width)
        self._last_B = None if last_B is None else last_B.to(device)
        try:
            with nullcontext() if self._recorder is None else self._recorder.watch():
                logits_B1V: torch.Tensor = self.model(
                    input_ids=ids_BQ.to(device),
                    position_ids=columns_BQ.clamp(max=self.context_length - 1).expand(len(ids_BQ), -1),
                    attention_mask=mask_B1QW,
                    use_cache=True,
                    **{name_cache_argument(self.model): cache},
                ).logits
        finally:
            self._last_B = None
        if self._recorder is not None:
            nums = [ids_BQ.shape[1]] * len(ids_BQ) if last_B is None else [last + 1 for last in last_B.tolist()]
            self._note_experts(self._recorder, first, starts if len(starts) > 1 else starts * len(nums), nums)
        return logits_B1V[:, -1]

    def _note_experts(self, recorder: ExpertRecorder, first: int, starts: list[int], nums: list[int]) -> None:
        """Note the experts of the last pass, which read this number of tokens of each row."""
        rows = self.rows[first : first + len(nums)]
        experts_BQLK = recorder.read_pass(len(nums))
        for row, start, num, experts_QLK in zip(rows, starts, nums, experts_BQLK, strict=True):
            row.experts.add(start, experts_QLK[:num])

    def _select_last(self, _: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        """Give the output layer only the hidden values that logits are needed of; the model scales and caps these."""
        if self._last_B is None:
            return None
        (hidden_BQE,) = inputs
        return (hidden_BQE[torch.arange(len(hidden_BQE)), self._last_B][:, None],)

    def _release(self) -> list[RunningRequest]:
        """Remove and return the rows that are done; the last rows move into their slots."""
        done = [slot for slot, row in enumerate(self.rows) if row.is_done]
        released = [self.rows[slot] for slot in done]
        for slot in reversed(done):
            self._keep_kv(slot)
            last = self.rows.pop()
            if slot < len(self.rows):
                if not self._is_stale:
                    self._slots.move(source=len(self.rows), target=slot, length=len(last.token_ids) - 1)
                self.rows[slot] = last
        return released

    def _keep_kv(self, slot: int) -> None:
        row = self.rows[slot]
        if row.failure is not None or self._is_stale:
            return
        token_ids = row.token_ids[:-1]
        kv = RowKv(
            token_ids=token_ids,
            kv_KHTD=self._slots.copy_slot(slot, len(token_ids)),
            version=self.version,
            experts_TLK=None if self._recorder is None else row.experts.read(0, len(token_ids)),
        )
        self._prefixes.put(kv, keep_s=row.keep_kv_s)
        if row.max_new_tokens == 0:
            row.kv = kv


def _prefill_spans(num_new: list[int]) -> Iterator[tuple[int, int]]:
    """Cut rows, sorted by falling number of new tokens, into spans of bounded padded size; rows of 0 are left out."""
    count = sum(1 for num in num_new if num > 0)
    start = 0
    while start < count:
        stop = min(count, start + max(1, MAX_PREFILL_TOKENS // num_new[start]))
        yield start, stop
        start = stop
