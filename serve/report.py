"""What a benchmark may say: every definition of acceptance length, speed and likeness, from per-block records.

Owns definitions, the intervals of the bootstrap, and refusals. Pure functions of `Request` records: the same numbers
follow from a stored `requests.jsonl`. It knows no engine, no clock, and no wording of tables (`serve.table`).

A block is one verification pass that committed at least one token; the prefill, which gives a reply's first token, is
none. Definitions in other tools differ in four ways: whether the target's own token of each block counts ("bonus"),
whether the mean is over blocks or over requests, whether the prefill's token counts, and whether tokens behind an end
of turn count. Each variant has a name in `Summary`; `tau` without suffix counts the bonus, weighs blocks equally, and
leaves out the prefill's token and everything that was cut off.
"""

import dataclasses
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

TEXT_GAP = 1e-4  # two texts may part where the target's two best choices lie closer than this, in float32
LONGEST_RUN = 32  # equal tokens in a row beyond which a reply is degenerate
REPEATED_NGRAM, REPEATED_SHARE = 8, 0.5  # or more than this share of its n-grams occurred before
FLAGGED_SHARE = 0.01  # of degenerate replies, beyond which a headline carries a flag
RESAMPLES, LEVEL = 2000, 0.95


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request as one arm served it; times are seconds on one clock.

    Attributes:
        chunk: requests of one arm with the same chunk were sent together; the time between chunks belongs to no arm.
        token_ids: the reply, the prefill's token first, the end of turn included.
        emitted: tokens that each block added to the reply, after trimming at an end of turn or at the limit.
        accepted_untrimmed: draft tokens that each block's verification accepted, before trimming.
        proposed: draft tokens that each block sent to verification.
        causes: why each block died, see `serve.attribution`; None where nobody looked.
    """

    arm: str
    temperature: float
    seed: int
    id: str
    category: str
    turn: int = 1
    chunk: int = 0
    prompt_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length", "failed"]
    emitted: tuple[int, ...]
    accepted_untrimmed: tuple[int, ...]
    proposed: tuple[int, ...]
    causes: tuple[str | None, ...] | None = None
    sent_s: float
    first_s: float
    last_s: float

    def __post_init__(self):
        blocks = list(zip(self.emitted, self.accepted_untrimmed, self.proposed, strict=True))
        for block in blocks:
            emitted, accepted, proposed = block
            if not (1 <= emitted <= accepted + 1 and 0 <= accepted <= proposed):
                raise ValueError(
                    f"Request {self.id!r} has a block of (emitted, accepted, proposed) = {block}; "
                    "1 <= emitted <= accepted + 1 and accepted <= proposed must hold."
                )
        if self.finish_reason != "failed" and len(self.token_ids) != 1 + sum(self.emitted):
            raise ValueError(
                f"Request {self.id!r} returned {len(self.token_ids)} tokens, but its prefill and blocks account for "
                f"{1 + sum(self.emitted)}; tokens that were cut off must not be counted."
            )
        if not self.sent_s <= self.first_s <= self.last_s:
            raise ValueError(f"Request {self.id!r} has times out of order: {self.sent_s, self.first_s, self.last_s}.")

    @property
    def key(self) -> tuple[str, int, float, int]:
        """What makes two arms' requests the same request."""
        return (self.id, self.turn, self.temperature, self.seed)

    @property
    def accepted(self) -> tuple[int, ...]:
        """Draft tokens among the emitted ones of each block."""
        return tuple(min(a, e) for a, e in zip(self.accepted_untrimmed, self.emitted, strict=True))

    def to_row(self) -> dict:
        """A row of `requests.jsonl`: every field, and what readers would otherwise work out."""
        derived = {
            "completion_tokens": len(self.token_ids),
            "accepted": self.accepted,
            "ttft_s": self.first_s - self.sent_s,
            "e2e_s": self.last_s - self.sent_s,
            "ids_sha256": hashlib.sha256(json.dumps(self.token_ids).encode()).hexdigest(),
        }
        return dataclasses.asdict(self) | derived

    @classmethod
    def from_row(cls, row: dict) -> "Request":
        """The request that `to_row` wrote, after a passage through JSON."""
        values = {name: row[name] for name in cls.__dataclass_fields__ if name in row}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A bootstrap percentile interval of a statistic."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A quantity's distribution over requests."""

    mean: float
    p50: float
    p90: float
    p99: float


def measure(unit: str):
    """A field that holds a number of this unit; it may be None where the number does not exist."""
    return field(metadata={"unit": unit})


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All numbers of one arm at one temperature; None where there is nothing to divide by."""

    requests: int = measure("requests that did not fail")
    failed: int = measure("requests, left out of all rates")
    truncated: int = measure("replies ended by length")
    degenerate: float = measure("share of replies that repeat themselves")
    completion_tokens: int = measure("tokens, the prefill's included")
    blocks: int = measure("verification passes that committed at least one token")
    tau: float | None = measure("tokens per block: emitted / blocks")
    tau_untrimmed: float | None = measure("tokens per block: 1 + accepted before trimming / blocks")
    tau_sglang: float | None = measure("tokens per block: completion tokens / blocks")
    tau_request_mean: float | None = measure("tokens per block: mean over requests, untrimmed")
    tau_draft: float | None = measure("draft tokens per block: accepted / blocks")
    accept_rate: float | None = measure("accepted / proposed draft tokens")
    num_slots: int = measure("draft tokens that a block can propose, B - 1")
    pos_uncond: tuple[float | None, ...] = measure("share of blocks proposing slot i (from 1) that accepted it")
    pos_cond: tuple[float | None, ...] = measure("share of those that also accepted slot i - 1")
    hist: tuple[int, ...] = measure("blocks with exactly j accepted draft tokens, j from 0")
    ttft: Spread | None = measure("s to the first token")
    e2e: Spread | None = measure("s to the last token")
    tpot: Spread | None = measure("s per output token after the first")
    output_tps: float | None = measure("tokens per s, from each chunk's first send to its last reply")
    decode_tps: float | None = measure("tokens per s between a reply's first and last token")

    @property
    def is_flagged(self) -> bool:
        """Whether so many replies repeat themselves that tau and speed must not stand without a warning."""
        return self.degenerate > FLAGGED_SHARE


UNITS = {name: entry.metadata["unit"] for name, entry in Summary.__dataclass_fields__.items()}


def summarize(requests: Sequence[Request], num_slots: int) -> Summary:
    """Every definition, over requests of one arm at one temperature."""
    served = [request for request in requests if request.finish_reason != "failed"]
    emitted = _joined(request.emitted for request in served)
    accepted = _joined(request.accepted for request in served)
    untrimmed = _joined(request.accepted_untrimmed for request in served)
    proposed = _joined(request.proposed for request in served)
    blocks, tokens = len(emitted), sum(len(request.token_ids) for request in served)
    pos_uncond, pos_cond = _by_position(accepted, proposed, num_slots)
    return Summary(
        requests=len(served),
        failed=len(requests) - len(served),
        truncated=sum(request.finish_reason == "length" for request in served),
        degenerate=_ratio(sum(is_degenerate(request.token_ids) for request in served), len(served)) or 0.0,
        completion_tokens=tokens,
        blocks=blocks,
        tau=_ratio(emitted.sum(), blocks),
        tau_untrimmed=_ratio(blocks + untrimmed.sum(), blocks),
        tau_sglang=_ratio(tokens, blocks),
        tau_request_mean=_mean([1 + np.mean(r.accepted_untrimmed) for r in served if r.emitted]),
        tau_draft=_ratio(accepted.sum(), blocks),
        accept_rate=_ratio(accepted.sum(), proposed.sum()),
        num_slots=num_slots,
        pos_uncond=pos_uncond,
        pos_cond=pos_cond,
        hist=tuple(int(np.sum(accepted == j)) for j in range(num_slots + 1)),
        ttft=_spread([r.first_s - r.sent_s for r in served]),
        e2e=_spread([r.last_s - r.sent_s for r in served]),
        tpot=_spread([(r.last_s - r.first_s) / (len(r.token_ids) - 1) for r in served if len(r.token_ids) > 1]),
        output_tps=_ratio(tokens, _busy_seconds(served)),
        decode_tps=_ratio(tokens - len(served), sum(r.last_s - r.first_s for r in served)),
    )


def by_category(requests: Sequence[Request]) -> dict[str, list[Request]]:
    """Requests by category, in alphabetical order."""
    groups = defaultdict(list)
    for request in requests:
        groups[request.category].append(request)
    return dict(sorted(groups.items()))


def tau(requests: Sequence[Request]) -> float | None:
    """Emitted tokens / blocks, the headline (see `Summary.tau`)."""
    served = [request for request in requests if request.finish_reason != "failed"]
    return _ratio(sum(sum(r.emitted) for r in served), sum(len(r.emitted) for r in served))


def tau_interval(requests: Sequence[Request], seed: int = 0) -> Interval | None:
    """`tau` with its interval, resampling prompts (not blocks, and not the seeds of one prompt)."""
    sums = _sums_by_prompt(requests, sorted({request.id for request in requests}))
    if sums[:, 1].sum() == 0:
        return None
    return _interval(sums.sum(axis=0), sums[_resamples(len(sums), seed)].sum(axis=1), _tau_of_sums)


def tau_difference(requests: Sequence[Request], base: Sequence[Request], seed: int = 0) -> Interval | None:
    """`tau(requests) - tau(base)` with its interval; each resample draws the same prompts for both.

    Raises:
        ValueError: the two did not serve the same requests.
    """
    requests, base = paired(requests, base)
    ids = sorted({request.id for request in requests})
    sums = np.concatenate([_sums_by_prompt(requests, ids), _sums_by_prompt(base, ids)], axis=1)  # [prompts, 4]
    if not sums[:, [1, 3]].sum(axis=0).all():
        return None
    drawn = sums[_resamples(len(sums), seed)].sum(axis=1)
    return _interval(sums.sum(axis=0), drawn, lambda s: _tau_of_sums(s[..., :2]) - _tau_of_sums(s[..., 2:]))


def speedup(requests: Sequence[Request], autoregressive: Sequence[Request]) -> float | None:
    """output_tps / output_tps of plain decoding of the same requests in the same run.

    Raises:
        ValueError: the plain arm is missing, or the two did not serve the same requests.
    """
    if not autoregressive:
        raise ValueError("A speed-up needs the plain arm in the same run; got no request of it. Add `ar` to --arms.")
    ours, plain = (summarize(arm, 0).output_tps for arm in paired(requests, autoregressive))
    return None if ours is None or plain is None else ours / plain


def paired(requests: Sequence[Request], base: Sequence[Request]) -> tuple[list[Request], list[Request]]:
    """The requests that failed in neither, in one order.

    Raises:
        ValueError: the two did not serve the same requests, each once.
    """
    ours, theirs = ({request.key: request for request in arm} for arm in (requests, base))
    if ours.keys() != theirs.keys() or len(ours) != len(requests) or len(theirs) != len(base):
        odd = sorted(ours.keys() ^ theirs.keys())[:3] or "a request twice"
        raise ValueError(
            f"Only arms that served the same requests, each once, can be compared; got {len(requests)} and "
            f"{len(base)}, and they differ in {odd}."
        )
    served = [key for key in ours if "failed" not in (ours[key].finish_reason, theirs[key].finish_reason)]
    return [ours[key] for key in served], [theirs[key] for key in served]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where one reply first differs from plain decoding's.

    Attributes:
        position: in the reply, from 0.
        ids: the token of the arm and of plain decoding; None where a reply has ended.
        gap: between the target's two best choices there; None while nobody has looked.
        tolerance: gaps below it excuse the difference.
    """

    key: tuple[str, int, float, int]
    position: int
    ids: tuple[int | None, int | None]
    gap: float | None = None
    tolerance: float = TEXT_GAP

    @property
    def is_excused(self) -> bool:
        return self.gap is not None and None not in self.ids and self.gap < self.tolerance


def differences(requests: Sequence[Request], autoregressive: Sequence[Request]) -> tuple[Difference, ...]:
    """The first difference of every reply that is not plain decoding's, id for id.

    Raises:
        ValueError: the two did not serve the same requests.
    """
    found = []
    for ours, plain in zip(*paired(requests, autoregressive), strict=True):
        if ours.token_ids != plain.token_ids:
            a, b = ours.token_ids, plain.token_ids
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            ids = (a[at] if at < len(a) else None, b[at] if at < len(b) else None)
            found.append(Difference(key=ours.key, position=at, ids=ids))
    return tuple(found)


def is_degenerate(token_ids: Sequence[int]) -> bool:
    """Whether a reply repeats itself: more than 32 equal tokens in a row, or over half of its 8-grams seen before."""
    run = longest = 0
    for index, token in enumerate(token_ids):
        run = run + 1 if index and token == token_ids[index - 1] else 1
        longest = max(longest, run)
    ngrams = [tuple(token_ids[i : i + REPEATED_NGRAM]) for i in range(len(token_ids) - REPEATED_NGRAM + 1)]
    repeated = 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
    return longest > LONGEST_RUN or repeated > REPEATED_SHARE


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (n - 1), which one value does not have."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def _by_position(accepted: np.ndarray, proposed: np.ndarray, num_slots: int) -> tuple[tuple, tuple]:
    """Acceptance at slots 1 to S, unconditional and given the slot before."""
    uncond, cond = [], []
    for slot in range(1, num_slots + 1):
        offered = proposed >= slot
        reached = np.sum(accepted >= slot)
        uncond.append(_ratio(reached, np.sum(offered)))
        cond.append(_ratio(reached, np.sum(offered & (accepted >= slot - 1))))
    return tuple(uncond), tuple(cond)


def _busy_seconds(requests: Sequence[Request]) -> float:
    """Seconds in which the arm was at work: for each chunk, from its first send to its last reply."""
    chunks = defaultdict(list)
    for request in requests:
        chunks[(request.seed, request.chunk)].append(request)
    return sum((max(r.last_s for r in chunk) - min(r.sent_s for r in chunk) for chunk in chunks.values()), 0.0)


def _sums_by_prompt(requests: Sequence[Request], ids: Sequence[str]) -> np.ndarray:
    """(emitted tokens, blocks) of each prompt, int [prompts, 2]."""
    row = {name: index for index, name in enumerate(ids)}
    sums = np.zeros((len(ids), 2), np.int64)
    for request in requests:
        if request.finish_reason != "failed":
            sums[row[request.id]] += (sum(request.emitted), len(request.emitted))
    return sums


def _resamples(count: int, seed: int) -> np.ndarray:
    """Row numbers drawn with replacement, [RESAMPLES, count]."""
    return np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))


def _tau_of_sums(sums: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # a resample of prompts without blocks has no tau
        return sums[..., 0] / sums[..., 1]


def _interval(total: np.ndarray, drawn: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]) -> Interval:
    """The statistic of the sums of all prompts, and its percentiles over the resamples' sums."""
    low, high = np.nanquantile(statistic(drawn), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value=float(statistic(total[None])[0]), low=float(low), high=float(high))


def _joined(lists: Iterable[Sequence[int]]) -> np.ndarray:
    return np.array([value for values in lists for value in values], np.int64)


def _ratio(above, below) -> float | None:
    return float(above / below) if below else None


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    p50, p90, p99 = (float(np.percentile(values, p)) for p in (50, 90, 99))
    return Spread(mean=float(np.mean(values)), p50=p50, p90=p90, p99=p99)
