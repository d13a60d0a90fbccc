"""The engine: rows of one device state that take in requests, decode in dispatches of blocks, and give replies.

Owns the device state, which request sits in which row, the shapes that are compiled, and the clock of each reply. Which
request comes next, text, and stop strings are its callers' affair.

A dispatch is a fixed number of blocks in one device program. The host reads dispatch k while k + 1 runs, so it knows
lengths only up to k; whatever it sizes, it sizes for the longest that they can be.
"""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from lilicorr_jax.config import setting
from lilicorr_jax.decoding.prefill import empty_state, prefill_row
from lilicorr_jax.decoding.speculate import NO_TOKEN, BlockRecord, Finish, run_blocks
from lilicorr_jax.decoding.verify import Mode
from lilicorr_jax.shapes import Array
from serve.models import Method, Models, assemble, load_models
from serve.request import Block, Reply, Request, Times

__all__ = [
    "Block", "Engine", "EngineConfig", "Event", "Method", "Models", "Reply", "Request", "Times", "assemble",
    "load_models",
]  # fmt: skip

MODES: tuple[Mode, ...] = ("greedy", "temperature", "filtered")
REASONS = {int(Finish.STOP): "stop", int(Finish.LENGTH): "length"}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How much the engine holds and how it dispatches."""

    rows: int = setting(8, "Texts decoded side by side.")
    context_limit: int | None = setting(None, "Longest prompt and reply together; none takes what the models allow.")
    blocks_per_dispatch: int = setting(4, "Blocks in one device program.")
    smallest_bucket: int = setting(64, "Attention and prompts are compiled for lengths of powers of two from here on.")
    max_stop_ids: int = setting(8, "Stop ids that one request may have.")
    trace: bool = setting(False, "Hand on what each block considered.")

    def __post_init__(self):
        for name in ("rows", "blocks_per_dispatch", "smallest_bucket", "max_stop_ids"):
            if getattr(self, name) < 1:
                raise ValueError(f"EngineConfig.{name} must be at least 1; got {getattr(self, name)}.")
        if self.context_limit is not None and self.context_limit < 2:
            raise ValueError(
                f"EngineConfig.context_limit must hold a prompt and a reply, 2 tokens; got {self.context_limit}."
            )


class Event(NamedTuple):
    """News of one request: tokens that it gained, and the whole reply once it has ended."""

    id: str
    token_ids: tuple[int, ...]
    reply: Reply | None


@dataclass(kw_only=True, eq=False)
class _Row:
    """A request in its row, as far as the host has read."""

    request: Request
    max_tokens: int
    sent_s: float
    first_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    pending_blocks: int = 0  # dispatched, not read yet

    @property
    def may_run(self) -> bool:
        """Whether the row can still run once all that is dispatched is done: every block commits at least one token."""
        return len(self.token_ids) + self.pending_blocks < self.max_tokens

    def reach(self, num_blocks: int, verify_rows: int) -> int:
        """Most cache rows that `num_blocks` more blocks may read or write while the row runs."""
        prompt, blocks_before_last = len(self.request.prompt_ids), self.pending_blocks + num_blocks - 1
        longest = prompt + len(self.token_ids) - 1 + blocks_before_last * verify_rows
        return min(longest, prompt + self.max_tokens - 2) + verify_rows

    def gain(self, token_ids: list[int], finish: int, now: float) -> Event:
        """Notes new tokens and, if they were the last, writes the reply."""
        self.token_ids += token_ids
        self.first_s = self.first_s or now
        reply = None
        if finish in REASONS:
            reply = Reply(
                id=self.request.id,
                token_ids=tuple(self.token_ids),
                finish_reason=REASONS[finish],
                blocks=tuple(self.blocks),
                times=Times(sent_s=self.sent_s, first_s=self.first_s, last_s=now),
            )
        return Event(self.request.id, tuple(token_ids), reply)


class Engine:
    """`admit` requests into free rows, `dispatch` blocks, `retire` the oldest dispatch; `run` does all of it.

    Prompt and reply together fill at most the context limit; a request that asks for more is refused. The caches have
    room for the limit and the P rows that a verify pass writes behind the longest text.
    """

    def __init__(self, models: Models, config: EngineConfig = EngineConfig()):
        self.models, self.config = models, config
        self.context_limit = config.context_limit or models.context_limit
        if self.context_limit > models.context_limit:
            raise ValueError(
                f"The engine is asked for a context limit of {self.context_limit} tokens, but its models have "
                f"{models.context_limit} positions; ask for at most that."
            )
        if len(models.target.eos_ids) > config.max_stop_ids:
            raise ValueError(
                f"The target ends its texts with {len(models.target.eos_ids)} ids, but EngineConfig.max_stop_ids is "
                f"{config.max_stop_ids}; raise it."
            )
        self._pair = models.pair()
        self.capacity = self.context_limit + self._pair.verify_rows
        # One row more than is read: if attention's slice is the whole cache, XLA's CPU backend copies it every block.
        self._state = jax.jit(partial(empty_state, self._pair, config.rows, self.capacity + 1, config.max_stop_ids))()
        self._rows: list[_Row | None] = [None] * config.rows
        self._pending: deque[tuple[BlockRecord, tuple[_Row | None, ...]]] = deque()
        self._prefill = jax.jit(partial(prefill_row, self._pair), static_argnames="mode", donate_argnums=1)
        self._run = jax.jit(
            partial(
                run_blocks,
                self._pair,
                num_blocks=config.blocks_per_dispatch,
                trace=config.trace,
                skip_idle=jax.default_backend() == "cpu",
            ),
            static_argnames=("mode", "bucket"),
            donate_argnums=1,
        )

    @property
    def num_free(self) -> int:
        """Rows without a request."""
        return self._rows.count(None)

    @property
    def num_pending(self) -> int:
        """Dispatches not read yet."""
        return len(self._pending)

    def check(self, request: Request) -> None:
        """Raises ValueError if this engine can't serve the request."""
        request.check(self.models.target.vocab_size, self.context_limit, self.config.max_stop_ids)

    def admit(self, requests: Sequence[Request]) -> list[Event]:
        """Prefills requests into free rows and waits for their first tokens, any of which may end its request.

        Raises:
            ValueError: a request can't be served here, its id is in use, or the rows don't suffice; none is admitted.
        """
        self._check_all(requests)
        if len(requests) > self.num_free:
            raise ValueError(f"{len(requests)} requests are to be admitted, but {self.num_free} rows are free.")
        started = [self._start(request) for request in requests]
        return [self._read_first(*one) for one in started]

    def dispatch(self) -> bool:
        """Sends off the next blocks; False if no row can have a use for them."""
        running = [row for row in self._rows if row is not None and row.may_run]
        if not running:
            return False
        num_blocks = self.config.blocks_per_dispatch
        reach = max(row.reach(num_blocks, self._pair.verify_rows) for row in running)
        mode = max((row.request.mode for row in running), key=MODES.index)
        self._state, record = self._run(
            self.models.params, self._state, mode=mode, bucket=self._bucket(reach, self.capacity)
        )
        jax.tree.map(lambda array: array.copy_to_host_async(), record)
        for row in filter(None, self._rows):
            row.pending_blocks += num_blocks
        self._pending.append((record, tuple(self._rows)))
        return True

    def retire(self) -> list[Event]:
        """Waits for the oldest dispatch and hands on what it committed; rows that ended are free afterwards."""
        record, rows = self._pending.popleft()
        record = jax.device_get(record)
        now = time.perf_counter()
        events = []
        for index, row in enumerate(rows):
            if row is None or row is not self._rows[index]:  # ended or cancelled meanwhile
                continue
            row.pending_blocks -= self.config.blocks_per_dispatch
            token_ids = _read_blocks(record, index, row.blocks)
            events.append(self._note(index, row, token_ids, int(record.finish_reason[-1, index]), now))
        return events

    def cancel(self, id: str) -> None:
        """Drops a request: its row is free at once, and nothing of it is reported any more."""
        for index, row in enumerate(self._rows):
            if row is not None and row.request.id == id:
                self._rows[index] = None
                vacant = self._state.finish_reason.at[index].set(Finish.VACANT)
                self._state = self._state.replace(finish_reason=vacant)

    def run(self, requests: Sequence[Request]) -> list[Reply]:
        """Serves all requests, as many at a time as there are rows, and returns their replies in the order asked."""
        self._check_all(requests)
        waiting, replies = deque(requests), {}
        while len(replies) < len(requests):
            events = self.admit([waiting.popleft() for _ in range(min(len(waiting), self.num_free))])
            while self.num_pending < 2 and self.dispatch():
                pass
            if self._pending:
                events += self.retire()
            replies |= {event.id: event.reply for event in events if event.reply}
        while self._pending:  # idle blocks that were under way when the last reply ended
            self.retire()
        return [replies[request.id] for request in requests]

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Compiles and runs once each program that these requests can need, in an idle engine, for clocks to miss."""
        self._check_all(requests)
        if self.num_free < self.config.rows or self._pending:
            raise ValueError("The engine is at work; warm it up before it takes requests.")
        prompts = list({self._prefill_shape(request): request for request in requests}.values())
        for request in prompts * 2:  # again, since a state that a program gave back may be placed as the first was not
            self._state, *_ = self._call_prefill(0, request, max_tokens=1)  # ends at once: the row stays frozen
        longest_text = max(len(request.prompt_ids) + self._max_tokens(request) for request in requests)
        longest = self._bucket(longest_text - 2 + self._pair.verify_rows, self.capacity)
        for bucket in sorted({self._bucket(size, longest) for size in range(1, longest + 1)}):
            for mode in {request.mode for request in requests}:
                self._state, _ = self._run(self.models.params, self._state, mode=mode, bucket=bucket)
        jax.block_until_ready(self._state)

    def _check_all(self, requests: Sequence[Request]) -> None:
        ids = Counter([row.request.id for row in self._rows if row is not None] + [request.id for request in requests])
        if twice := [id for id, count in ids.items() if count > 1]:
            raise ValueError(f"Request ids must be unique among requests in flight; {twice[0]!r} is not.")
        for request in requests:
            self.check(request)

    def _max_tokens(self, request: Request) -> int:
        return request.max_tokens or self.context_limit - len(request.prompt_ids)

    def _bucket(self, length: int, largest: int) -> int:
        """The power of two that covers `length`, or `largest`."""
        return min(max(1 << (length - 1).bit_length(), self.config.smallest_bucket), largest)

    def _prefill_shape(self, request: Request) -> tuple[int, Mode]:
        return self._bucket(len(request.prompt_ids), self.context_limit), request.mode

    def _start(self, request: Request):
        """Sends off a prefill."""
        index = self._rows.index(None)
        row = _Row(request=request, max_tokens=self._max_tokens(request), sent_s=time.perf_counter())
        self._rows[index] = row
        self._state, first_id, finish = self._call_prefill(index, request, row.max_tokens)
        return index, row, first_id, finish

    def _read_first(self, index: int, row: _Row, first_id: Array, finish: Array) -> Event:
        first_id, finish = jax.device_get((first_id, finish))
        return self._note(index, row, first_id.tolist(), int(finish[0]), time.perf_counter())

    def _note(self, index: int, row: _Row, token_ids: list[int], finish: int, now: float) -> Event:
        event = row.gain(token_ids, finish, now)
        if event.reply:
            self._rows[index] = None
        return event

    def _call_prefill(self, index: int, request: Request, max_tokens: int):
        size, mode = self._prefill_shape(request)
        prompt_ids = np.zeros((1, size), np.int32)
        prompt_ids[0, : len(request.prompt_ids)] = request.prompt_ids
        stop_ids = self.models.target.eos_ids if request.stop_ids is None else request.stop_ids
        padded = np.full((1, self.config.max_stop_ids), NO_TOKEN, np.int32)
        padded[0, : len(stop_ids)] = stop_ids
        settings = dict(
            seed=np.array([request.seed], np.uint32),
            temperature=np.array([request.temperature], np.float32),
            top_p=np.array([request.top_p], np.float32),
            top_k=np.array([min(request.top_k, self.models.target.vocab_size)], np.int32),
            stop_ids=padded,
            max_tokens=np.array([max_tokens], np.int32),
        )
        length = np.array([len(request.prompt_ids)], np.int32)
        return self._prefill(self.models.params, self._state, np.int32(index), prompt_ids, length, settings, mode=mode)


def _read_blocks(record: BlockRecord, index: int, blocks: list[Block]) -> list[int]:
    """The tokens that a dispatch committed in one row; appends its blocks to `blocks`."""
    token_ids = []
    for number, emitted in enumerate(record.num_committed[:, index].tolist()):
        if emitted == 0:
            break
        token_ids += record.token_ids[number, index, :emitted].tolist()
        trace = record.trace and jax.tree.map(lambda array, number=number: array[number, index], record.trace)
        blocks.append(
            Block(
                emitted=emitted,
                accepted=int(record.num_accepted[number, index]),
                proposed=int(record.num_proposed[number, index]),
                trace=trace,
            )
        )
    return token_ids
