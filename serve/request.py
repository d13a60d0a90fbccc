"""What is asked of the engine and what it answers, with every field checked before anything reaches the device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Literal

from lilicorr_jax.decoding.speculate import Trace
from lilicorr_jax.decoding.verify import Mode

MAX_SEED = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class Request:
    """One text to continue.

    Attributes:
        id: the reply carries it; unique among the requests in flight.
        prompt_ids: at least one token.
        max_tokens: longest reply; None fills the context.
        temperature: 0 is greedy.
        top_p: smallest set of tokens that holds this mass; 1 keeps all.
        top_k: this many tokens; 0 keeps all.
        seed: of all noise; the same seed gives the same text alone and in any batch.
        stop_ids: tokens that end the reply and are kept in it; None takes the target's end-of-text ids.
    """

    id: str
    prompt_ids: Sequence[int]
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_ids: Sequence[int] | None = None

    def __post_init__(self):
        self._require(len(self.prompt_ids) > 0, "prompt_ids must hold at least one token; got none")
        if self.max_tokens is not None:
            self._require_count("max_tokens", 1)
        self._require_count("top_k", 0)
        self._require_count("seed", 0)
        self._require(self.seed <= MAX_SEED, f"seed must be at most {MAX_SEED}; got {self.seed}")
        self._require(
            _is_number(self.temperature) and 0 <= self.temperature < math.inf,
            f"temperature must be finite and not negative; got {self.temperature!r}",
        )
        self._require(_is_number(self.top_p) and 0 < self.top_p <= 1, f"top_p must lie in (0, 1]; got {self.top_p!r}")

    @property
    def mode(self) -> Mode:
        """The least that must be compiled to sample this request."""
        if self.temperature == 0:
            return "greedy"
        return "filtered" if self.top_k > 0 or self.top_p < 1 else "temperature"

    def check(self, vocab_size: int, context_limit: int, max_stop_ids: int) -> None:
        """Raises ValueError unless an engine with these limits can serve the request."""
        self._require(
            len(self.stop_ids or ()) <= max_stop_ids,
            f"stop_ids may hold at most {max_stop_ids} ids; got {len(self.stop_ids or ())}",
        )
        used = len(self.prompt_ids)
        self._require(
            used < context_limit,
            f"the prompt must be shorter than the context limit of {context_limit} tokens; got {used}",
        )
        self._require(
            self.max_tokens is None or self.max_tokens <= context_limit - used,
            f"max_tokens must be at most {context_limit - used}, what the context limit of {context_limit} leaves "
            f"behind a prompt of {used} tokens; got {self.max_tokens}",
        )
        self._require_tokens("prompt_ids", self.prompt_ids, vocab_size)
        self._require_tokens("stop_ids", self.stop_ids or (), vocab_size)

    def _require(self, claim: bool, problem: str) -> None:
        if not claim:
            raise ValueError(f"Request {self.id!r}: {problem}.")

    def _require_count(self, name: str, lowest: int) -> None:
        value = getattr(self, name)
        self._require(
            _is_whole(value) and value >= lowest, f"{name} must be a whole number of at least {lowest}; got {value!r}"
        )

    def _require_tokens(self, name: str, ids: Sequence[int], vocab_size: int) -> None:
        bad = [i for i in ids if not (_is_whole(i) and 0 <= i < vocab_size)]
        self._require(not bad, f"{name} must lie in the vocabulary [0, {vocab_size}); got {bad[:3]}")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One verification pass that committed something.

    Attributes:
        emitted: tokens that it added to the reply, after trimming at a stop id or at the limit.
        accepted: drafts that the target kept, before trimming.
        proposed: drafts that were judged.
        trace: what the block considered, in an engine that traces; arrays of this row alone.
    """

    emitted: int
    accepted: int
    proposed: int
    trace: Trace | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds on one clock: admitted, first token read, last token read."""

    sent_s: float
    first_s: float
    last_s: float


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What became of a request; `token_ids` starts with the prefill's token, which belongs to no block.

    Replies are equal when they say the same, whenever they said it.
    """

    id: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    blocks: tuple[Block, ...]
    times: Times = field(compare=False)
