"""A served block drafts what training computes at its anchor; what a sampled walk hands on is what it drew from."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lilicorr_jax.decoding.propose import lilicorr
from lilicorr_jax.models.fold import fold_for_serving
from tests import served
from tests.served import DRAFTER, PROMPTS, RERANKER, TARGET, S, best_path, greedy_path, models, parameters, trained

pytestmark = pytest.mark.usefixtures("strict_dtypes")


@pytest.fixture(scope="module")
def blocks() -> served.Served:
    return served.serve("lilicorr")


def test_every_block_of_a_ragged_batch_takes_the_path_that_training_computes_at_its_anchor(blocks):
    """Candidates, context row before the anchor, folded reranker, walk: after the prefill and after every ending."""
    served.assert_blocks_are_the_trained_ones(blocks)
    assert len(set(np.asarray(blocks.record.num_committed).ravel())) >= 3, "blocks end in too few ways"
    picks = np.asarray(blocks.record.trace.picks)
    assert set(picks.ravel()) == {0, 1, 2} and not np.all(picks == picks[0])


def test_every_block_of_dflash_is_the_argmax_of_its_slots():
    blocks = served.serve("dflash")
    served.assert_drafts_are_the_likeliest(blocks)
    served.assert_texts_are_the_targets_own(blocks)


@pytest.mark.parametrize("method", ["domino", "dspark"])
def test_every_block_of_a_rollout_drafts_what_training_computes_at_its_anchor(method):
    """Rows of the block, context, folded corrector, tokens before a slot: after the prefill and after every ending."""
    blocks = served.serve(method)
    served.assert_rollouts_are_the_trained_ones(blocks, method)
    served.assert_texts_are_the_targets_own(blocks)
    assert len(set(np.asarray(blocks.record.num_committed).ravel())) >= 3, "blocks end in too few ways"


@pytest.fixture(scope="module")
def proposals(blocks):
    """The first block's proposal by each walk, at temperature 0.7 and with the numbers it drew with."""
    noise = jnp.array(np.random.default_rng(0).random((len(PROMPTS), S)), jnp.float32)

    @served.quick
    def run(params, state):
        def propose(walk):
            drafter = replace(models(), method="lilicorr", proposal=walk).pair().drafter
            states = drafter.draft(params, state.anchor_id, state.draft_cache, state.length, None)
            temperature = jnp.full(len(PROMPTS), 0.7, jnp.float32)
            return drafter.propose(params, states, state.anchor_id, state.anchor_feature, temperature, noise)

        return {walk: propose(walk) for walk in ("greedy", "exact", "sampled")}

    return run(models().params, blocks.state), np.asarray(noise)


@pytest.mark.parametrize(("walk", "path"), [("greedy", greedy_path), ("exact", best_path)])
def test_a_deterministic_walk_proposes_its_path_and_no_distribution(blocks, proposals, walk, path):
    proposal = proposals[0][walk]
    for row, text in enumerate(blocks.texts):
        scores = trained(text, blocks.anchors[row])
        np.testing.assert_array_equal(proposal.picks[row], path(scores.start[0], scores.pair[0]))
    assert proposal.q is None and np.all(np.asarray(proposal.num_proposed) == S)


def test_a_sampled_walk_proposes_with_the_softmax_of_the_rows_that_it_followed(blocks, proposals):
    proposal, noise = proposals[0]["sampled"], proposals[1]
    for row, text in enumerate(blocks.texts):
        scores = trained(text, blocks.anchors[row])
        logits = scores.start[0]
        for slot in range(S):
            q = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
            np.testing.assert_allclose(proposal.q.probs[row, slot], q, atol=2e-5)
            pick = int(np.searchsorted(np.cumsum(q), noise[row, slot], side="right"))
            assert proposal.picks[row, slot] == pick
            logits = scores.pair[0, slot, pick] if slot < S - 1 else None
        np.testing.assert_array_equal(proposal.q.ids[row], scores.candidate_ids[0])
        drafts = np.take_along_axis(scores.candidate_ids[0], np.asarray(proposal.picks[row])[:, None], -1)[:, 0]
        np.testing.assert_array_equal(proposal.draft_ids[row], drafts)


def test_in_bfloat16_the_q_handed_on_is_the_float32_array_that_was_drawn_from(rng):
    """Logits that bfloat16 rounds together; the numbers lie beside the edges of q, where another q draws otherwise."""
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), parameters())
    reranker, drafter = replace(RERANKER, dtype="bfloat16"), replace(DRAFTER, dtype="bfloat16")
    head = jnp.asarray(rng.normal(size=(TARGET.vocab_size, DRAFTER.width)), jnp.bfloat16)
    run = served.quick(lilicorr(drafter, reranker, lambda _, states: states @ head.T, "sampled"))
    folded = served.quick(fold_for_serving, static_argnums=0)(
        reranker, low["reranker"], low["target"]["embed"]["embedding"]
    )
    rows = 64
    states = jnp.asarray(rng.normal(size=(rows, S + 1, DRAFTER.width)), jnp.bfloat16)
    rest = jnp.zeros(rows, jnp.int32), states[:, 0], jnp.full(rows, 0.7, jnp.float32)

    def propose(noise):
        return run({"reranker": folded}, states, *rest, jnp.asarray(noise, jnp.float32))

    first = propose(np.full((rows, S), 0.5))
    edges = np.cumsum(np.asarray(first.q.probs)[:, 0], axis=-1, dtype=np.float32)[:, 0]
    assert first.q.probs.dtype == jnp.float32
    for side, pick in ((-1e-6, 0), (1e-6, 1)):
        noise = np.full((rows, S), 0.5, np.float32)
        noise[:, 0] = edges + side
        again = propose(noise)
        np.testing.assert_array_equal(again.q.probs[:, 0], first.q.probs[:, 0])
        np.testing.assert_array_equal(again.picks[:, 0], pick)
