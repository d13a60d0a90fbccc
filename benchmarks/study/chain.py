"""Acceptance without decoding: drafts at every place of a reply, then the chain of blocks.

Decoding is lossless, so the text that a drafter's blocks commit is known beforehand: the target's greedy reply or, at a
temperature, the reply that plain decoding draws with the same seed, if the drafts are deterministic. Given what is
drafted behind each of its tokens, which blocks would have been drafted, and how long they are, follows by walking: a
block at an anchor is cut where its draft leaves the reply, and the next anchor stands there. NumPy alone.

A text's places are counted from its first reply token, the prefill's: place a is an anchor, slot s = 1..S of its block
speaks for place a + s, and the last place ends the reply.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serve.attribution import Cause
from serve.report import Request


@dataclass(frozen=True, kw_only=True)
class Text:
    """A held-out prompt with the target's reply, its end of turn included."""

    id: str
    category: str
    prompt_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]
    temperature: float = 0.0
    seed: int = 0

    @property
    def num_anchors(self) -> int:
        """Places with a place behind them."""
        return len(self.reply_ids) - 1


def gold_tokens(text: Text, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """What each slot at each anchor should be, [A, S], and whether the reply goes that far, [A, S]."""
    reply = np.array(text.reply_ids)
    place = np.arange(text.num_anchors)[:, None] + np.arange(1, num_slots + 1)[None, :]
    exists = place < len(reply)
    return np.where(exists, reply[np.minimum(place, len(reply) - 1)], -1), exists


def leading_run(flags: np.ndarray) -> np.ndarray:
    """True up to, and not including, the first False of the last axis."""
    return np.logical_and.accumulate(flags, axis=-1)


def walk_chain(is_right: np.ndarray) -> list[tuple[int, int]]:
    """The blocks that decoding would make, as (anchor, tokens emitted).

    Args:
        is_right: whether the draft of a slot is the reply's token, [A, S]; False behind the reply's end.
    """
    num_anchors = len(is_right)
    accepted = leading_run(is_right).sum(axis=1)
    blocks, anchor = [], 0
    while anchor < num_anchors:
        emitted = min(int(accepted[anchor]) + 1, num_anchors - anchor)
        blocks.append((anchor, emitted))
        anchor += emitted
    return blocks


def chain_request(
    arm: str,
    text: Text,
    draft_ids: np.ndarray,
    candidate_ids: np.ndarray | None = None,
    best_ids: np.ndarray | None = None,
) -> Request:
    """The reply as decoding with these drafts would have served it, without times.

    Args:
        draft_ids: of every anchor, [A, S].
        candidate_ids: the pool of every slot, [A, S, K]; with it, why each block died is noted.
        best_ids: the target's likeliest token behind every anchor, [A]; None where that is the reply itself.
    """
    num_slots = draft_ids.shape[1]
    gold, exists = gold_tokens(text, num_slots)
    is_right = (draft_ids == gold) & exists
    blocks = walk_chain(is_right)
    accepted = [min(int(leading_run(is_right[anchor]).sum()), emitted) for anchor, emitted in blocks]
    causes = None
    if candidate_ids is not None:
        best = np.array(text.reply_ids[1:]) if best_ids is None else best_ids
        causes = tuple(
            _cause(anchor + length, gold[anchor, length], candidate_ids[anchor, length], best)
            if length < min(num_slots, emitted)
            else None
            for (anchor, emitted), length in zip(blocks, accepted, strict=True)
        )
    return Request(
        arm=arm,
        temperature=text.temperature,
        seed=text.seed,
        id=text.id,
        category=text.category,
        prompt_tokens=len(text.prompt_ids),
        token_ids=text.reply_ids,
        finish_reason="stop",
        emitted=tuple(emitted for _, emitted in blocks),
        accepted_untrimmed=tuple(accepted),
        proposed=(num_slots,) * len(blocks),
        causes=causes,
        sent_s=0.0,
        first_s=0.0,
        last_s=0.0,
    )


def _cause(place: int, gold_id: int, pool: np.ndarray, best_ids: np.ndarray) -> Cause:
    """Why a block died whose last accepted token stands at `place`, in the order of `serve.attribution`."""
    if gold_id != best_ids[place]:
        return "sampling"
    return "ranking" if gold_id in pool else "coverage"


def slot_curves(texts: Sequence[Text], drafts: Sequence[np.ndarray], pools: Sequence[np.ndarray]) -> dict:
    """Shares by slot over all anchors that have the slot; the end of turn is counted apart.

    Args:
        drafts: of every text, [A, S].
        pools: the drafter's K likeliest tokens of every slot, best first, of every text, [A, S, K].

    Returns:
        `inside` and `end`, each with `slots` (how many there were) and the shares `coverage` (gold among the K),
        `oracle` (it and all before it), `top1`, `selected` (the draft), `accepted` (it and all before it); over slots.
    """
    num_slots = drafts[0].shape[1]
    sums = {name: {key: np.zeros(num_slots, np.int64) for key in SHARES} for name in ("inside", "end")}
    slots = {name: np.zeros(num_slots, np.int64) for name in sums}
    for text, draft, pool in zip(texts, drafts, pools, strict=True):
        gold, exists = gold_tokens(text, num_slots)
        is_end = np.arange(text.num_anchors)[:, None] + np.arange(1, num_slots + 1)[None, :] == text.num_anchors
        flags = slot_flags(gold, exists, draft, pool)
        for name, where in (("inside", exists & ~is_end), ("end", is_end)):
            slots[name] += where.sum(axis=0)
            for key, flag in flags.items():
                sums[name][key] += (flag & where).sum(axis=0)
    return {
        name: {"slots": slots[name].tolist()}
        | {
            key: [float(a / b) if b else None for a, b in zip(sums[name][key], slots[name], strict=True)]
            for key in SHARES
        }
        for name in sums
    }


SHARES = ("coverage", "oracle", "top1", "selected", "accepted")


def slot_flags(gold: np.ndarray, exists: np.ndarray, draft: np.ndarray, pool: np.ndarray) -> dict[str, np.ndarray]:
    """What is true of each slot at each anchor, by the names of `SHARES`, each [A, S]."""
    is_covered = (pool == gold[..., None]).any(axis=-1) & exists
    is_selected = (draft == gold) & exists
    return {
        "coverage": is_covered,
        "oracle": leading_run(is_covered),
        "top1": (pool[..., 0] == gold) & exists,
        "selected": is_selected,
        "accepted": leading_run(is_selected),
    }
