"""From a prompt to a row that can decode: an empty state, the prompt's pass, and a row's way into a batch."""

import jax
import jax.numpy as jnp

from lilicorr_jax.decoding.noise import Purpose, draw
from lilicorr_jax.decoding.pair import Pair
from lilicorr_jax.decoding.speculate import (
    NO_TOKEN,
    DecodeState,
    Finish,
    finish_reason,
    token_noise,
    tokens_to_stop,
)
from lilicorr_jax.decoding.verify import Mode, target_distribution
from lilicorr_jax.shapes import Array, Int32


def empty_state(pair: Pair, batch: int, capacity: int, num_stop_ids: int) -> DecodeState:
    """A state of vacant rows, with room for `capacity` cached tokens and `num_stop_ids` stop ids each."""

    def filled(value, dtype=jnp.int32):
        return jnp.full(batch, value, dtype)

    drafter = pair.drafter
    return DecodeState(
        anchor_id=filled(0),
        length=filled(0),
        target_cache=pair.target.init_cache(batch, capacity),
        draft_cache=drafter and drafter.init_cache(batch, capacity),
        anchor_feature=drafter and drafter.init_feature(batch),
        seed=filled(0, jnp.uint32),
        temperature=filled(0.0, jnp.float32),
        top_p=filled(1.0, jnp.float32),
        top_k=filled(0),
        stop_ids=jnp.full((batch, num_stop_ids), NO_TOKEN, jnp.int32),
        num_emitted=filled(0),
        max_tokens=filled(1),
        finish_reason=filled(int(Finish.VACANT)),
    )


def prefill(
    pair: Pair,
    params: dict,
    state: DecodeState,
    prompt_ids: Int32[Array, "B T"],
    prompt_length: Int32[Array, "B"],
    *,
    mode: Mode,
) -> DecodeState:
    """Runs whole prompts into the caches of an empty state and draws each row's first token, its anchor.

    Args:
        state: sampling, stops and max_tokens are set; what it has of a text is overwritten.
        prompt_ids: padded to the right with anything; T rows of the caches are written.
        prompt_length: real tokens of each prompt, at least 1.

    The first token counts as emitted, and may itself end the text: `finish_reason` says so.
    """
    start = jnp.zeros_like(prompt_length)
    rows = prompt_ids.shape[1]
    judged = pair.target.run(params, prompt_ids, state.target_cache, start, rows)
    last = (prompt_length - 1)[:, None, None]  # the last real row, not the last row
    logits = pair.target.unembed(params, jnp.take_along_axis(judged.hidden, last, axis=1))  # [B, 1, V]
    state = state.replace(length=prompt_length - 1, target_cache=judged.cache)
    probs = target_distribution(logits, state.temperature, state.top_k, state.top_p, mode)
    first_ids = draw(probs, token_noise(state, 1, Purpose.TARGET))
    one = jnp.ones_like(prompt_length)
    _, reason = finish_reason(one, tokens_to_stop(first_ids, state.stop_ids), state.max_tokens)
    if pair.drafter is not None:
        context, draft_cache = pair.drafter.absorb(params, judged.features, state.draft_cache, start)
        anchor_feature = jnp.take_along_axis(context, last, axis=1)[:, 0]
        state = state.replace(draft_cache=draft_cache, anchor_feature=anchor_feature)
    return state.replace(anchor_id=first_ids[:, 0], length=prompt_length, num_emitted=one, finish_reason=reason)


def insert_row(state: DecodeState, row: Int32[Array, ""], one: DecodeState) -> DecodeState:
    """Writes the one row of `one` over row `row` of `state`; its caches may be shorter."""

    def write(whole, part):
        return jax.lax.dynamic_update_slice(whole, part, (row, *(0,) * (whole.ndim - 1)))

    return jax.tree.map(write, state, one)


def prefill_row(
    pair: Pair,
    params: dict,
    state: DecodeState,
    index: Int32[Array, ""],
    prompt_ids: Int32[Array, "1 T"],
    prompt_length: Int32[Array, "1"],
    settings: dict[str, Array],
    *,
    mode: Mode,
) -> tuple[DecodeState, Int32[Array, "1"], Int32[Array, "1"]]:
    """Prefills one prompt and writes its row into the batch; also the first token and the row's `Finish`.

    Args:
        settings: fields of the row's state: sampling, stop ids, max_tokens.
    """
    one = empty_state(pair, 1, prompt_ids.shape[1], settings["stop_ids"].shape[1]).replace(**settings)
    one = prefill(pair, params, one, prompt_ids, prompt_length, mode=mode)
    return insert_row(state, index, one), one.anchor_id, one.finish_reason
