"""Where do blocks die? What took a block's first rejected draft, and at which slot.

Pure functions of what a tracing engine records. A block that was kept whole, or that ended the reply, did not die. For
the others the causes are asked in this order, and the first that holds is the block's:

- sampling: at a temperature, the token that the target wrote instead was not its likeliest; no drafter foresees that;
- coverage: the token was not among the K candidates of its slot;
- ranking: it was among them, and another was chosen. A method without a pool chooses among the whole vocabulary.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from serve.report import Request
from serve.request import Block

Cause = Literal["sampling", "coverage", "ranking"]
CAUSES: tuple[Cause, ...] = get_args(Cause)


def causes(token_ids: Sequence[int], blocks: Sequence[Block]) -> tuple[Cause | None, ...]:
    """The cause of each block's death, None for one that did not die.

    Args:
        token_ids: the reply, the prefill's token first.
        blocks: traced; what they emitted follows that token without a gap.

    Raises:
        ValueError: a block has no trace.
    """
    found, written = [], 1
    for block in blocks:
        written += block.emitted
        found.append(cause(block, token_ids[written - 1]))
    return tuple(found)


def cause(block: Block, token_id: int) -> Cause | None:
    """Why this block died; `token_id` is the last that it emitted."""
    if block.trace is None:
        raise ValueError("A block without a trace can't say why it died; ask for EngineConfig.trace.")
    slot = block.accepted  # from 0: the first that was not accepted
    if block.emitted <= block.accepted or block.accepted == block.proposed:
        return None
    if token_id != block.trace.target_best[slot]:
        return "sampling"
    pool = block.trace.candidate_ids
    if pool is not None and token_id not in pool[slot]:
        return "coverage"
    return "ranking"


def by_slot(requests: Sequence[Request], num_slots: int) -> dict[str, list[int]]:
    """Blocks that died at slots 1 to S, by cause.

    Raises:
        ValueError: a request was served without tracing.
    """
    counts = {name: np.zeros(num_slots, np.int64) for name in CAUSES}
    for request in requests:
        if request.causes is None:
            raise ValueError(f"Request {request.id!r} was served without a trace; run serve.bench with --trace.")
        for name, accepted in zip(request.causes, request.accepted_untrimmed, strict=True):
            if name is not None:
                counts[name][accepted] += 1
    return {name: count.tolist() for name, count in counts.items()}


def summarize(requests: Sequence[Request], num_slots: int) -> dict:
    """Blocks in all, those that died by cause and slot, and those that did not: kept whole, or ended with the reply."""
    slots = by_slot(requests, num_slots)
    blocks = sum(len(request.emitted) for request in requests)
    died = {name: sum(counts) for name, counts in slots.items()}
    whole = sum(
        accepted == proposed and emitted > accepted
        for r in requests
        for emitted, accepted, proposed in zip(r.emitted, r.accepted_untrimmed, r.proposed, strict=True)
    )
    ended = blocks - whole - sum(died.values())
    return {"blocks": blocks, **died, "whole": whole, "ended": ended, "slots": slots}
