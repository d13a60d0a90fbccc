"""Plain batched decoding of the target: rows that take in prompts and give back answers, as each ends.

A row that ends makes room for the next prompt while the others go on. There is no drafter, no clock and no text here;
what serves users is `serve.engine`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from lilicorr_jax.config import TargetConfig
from lilicorr_jax.decoding.pair import Pair, target_calls
from lilicorr_jax.decoding.prefill import empty_state, prefill_row
from lilicorr_jax.decoding.speculate import Finish, run_blocks
from lilicorr_jax.decoding.verify import Mode

SMALLEST_BUCKET = 64


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How every answer is drawn; temperature 0 takes the likeliest token."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def mode(self) -> Mode:
        if self.temperature == 0:
            return "greedy"
        return "filtered" if self.top_k > 0 or self.top_p < 1 else "temperature"


@dataclass(kw_only=True)
class _Row:
    """A prompt in its row; `job` is the caller's."""

    job: Any
    prompt_length: int
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    finish: int = int(Finish.RUNNING)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A finished answer of `job`: its tokens, with the stop that ended it unless it was cut off by the limit."""

    job: Any
    token_ids: list[int]
    is_truncated: bool


class Decoder:
    """Up to `num_rows` answers at a time: `admit` prompts, then `step` until none is left.

    Args:
        params: the target's.
        context_limit: longest prompt and answer together.
        steps_at_once: tokens of each row in one device program.
    """

    def __init__(
        self,
        target: TargetConfig,
        params: dict,
        *,
        num_rows: int,
        context_limit: int,
        sampling: Sampling = Sampling(),
        steps_at_once: int = 16,
    ):
        self.target, self.context_limit, self.sampling = target, context_limit, sampling
        self.steps_at_once, self.params = steps_at_once, {"target": params}
        pair = Pair(target=target_calls(target))
        self._capacity = context_limit + pair.verify_rows
        self._rows: list[_Row | None] = [None] * num_rows
        self._state = jax.jit(partial(empty_state, pair, num_rows, self._capacity, len(target.eos_ids)))()
        mode = sampling.mode
        self._prefill = jax.jit(partial(prefill_row, pair, mode=mode), donate_argnums=1)
        self._run = jax.jit(
            partial(run_blocks, pair, num_blocks=steps_at_once, mode=mode, skip_idle=jax.default_backend() == "cpu"),
            static_argnames="bucket",
            donate_argnums=1,
        )

    @property
    def num_free(self) -> int:
        return self._rows.count(None)

    @property
    def is_idle(self) -> bool:
        return self.num_free == len(self._rows)

    def admit(self, job: Any, prompt_ids: Sequence[int], max_tokens: int, seed: int = 0) -> None:
        """Takes a prompt into a free row; the answer is at most `max_tokens` long, which must leave room for it."""
        if max_tokens < 1 or len(prompt_ids) + max_tokens > self.context_limit:
            raise ValueError(
                f"An answer of {max_tokens} tokens behind a prompt of {len(prompt_ids)} does not fit a context of "
                f"{self.context_limit}."
            )
        index = self._rows.index(None)
        padded = np.zeros((1, self._bucket(len(prompt_ids), self.context_limit)), np.int32)
        padded[0, : len(prompt_ids)] = prompt_ids
        length = np.array([len(prompt_ids)], np.int32)
        settings = self._settings(max_tokens, seed)
        self._state, first_id, finish = self._prefill(
            self.params, self._state, np.int32(index), padded, length, settings
        )
        row = _Row(job=job, prompt_length=len(prompt_ids), max_tokens=max_tokens)
        row.token_ids, row.finish = jax.device_get(first_id).tolist(), int(finish[0])
        self._rows[index] = row

    def step(self) -> list[Ended]:
        """Decodes every row further and hands on the answers that ended; their rows are free."""
        running = [row for row in self._rows if row is not None and row.finish == Finish.RUNNING]
        if running:
            reach = max(
                row.prompt_length + min(len(row.token_ids) + self.steps_at_once, row.max_tokens) for row in running
            )
            self._state, record = self._run(self.params, self._state, bucket=self._bucket(reach, self._capacity))
            tokens, counts, reasons = jax.device_get((record.token_ids, record.num_committed, record.finish_reason))
            for index, row in enumerate(self._rows):
                if row is not None:
                    row.token_ids += tokens[:, index, 0][counts[:, index] > 0].tolist()
                    row.finish = int(reasons[-1, index])
        return [self._free(index) for index, row in enumerate(self._rows) if row and row.finish != Finish.RUNNING]

    def _free(self, index: int) -> Ended:
        row, self._rows[index] = self._rows[index], None
        assert row is not None
        return Ended(job=row.job, token_ids=row.token_ids, is_truncated=row.finish == Finish.LENGTH)

    def _settings(self, max_tokens: int, seed: int) -> dict[str, np.ndarray]:
        return dict(
            seed=np.array([seed], np.uint32),
            temperature=np.array([self.sampling.temperature], np.float32),
            top_p=np.array([self.sampling.top_p], np.float32),
            top_k=np.array([min(self.sampling.top_k, self.target.vocab_size)], np.int32),
            stop_ids=np.array([self.target.eos_ids], np.int32),
            max_tokens=np.array([max_tokens], np.int32),
        )

    def _bucket(self, length: int, largest: int) -> int:
        """The power of two that covers `length`, or `largest`: few shapes are compiled."""
        return min(max(1 << (length - 1).bit_length(), SMALLEST_BUCKET), largest)
