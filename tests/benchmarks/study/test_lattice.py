"""What is predicted of decoding is what the engine does: the shipped demo pair on a few held-out prompts."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.study import chain, lattice
from benchmarks.study.measure import with_bigrams
from serve import arms, attribution
from serve.engine import Engine, EngineConfig, Request, load_models

ROOT = Path(__file__).parents[3]
TARGET, EXPORT, PROMPTS = (str(ROOT / "demo" / name) for name in ("target", "export", "heldout.jsonl"))
KINDS = ("argmax", "greedy", "exact")


@pytest.fixture(scope="module")
def drafted():
    """Models, texts at both temperatures, and what is drafted at each place of them."""
    models = load_models(TARGET, EXPORT)
    greedy = lattice.greedy_texts(TARGET, PROMPTS, 3)
    texts = [*greedy, *lattice.sampled_texts(TARGET, greedy, (5,))]
    ways = {kind: arms.ways(models)[kind] for kind in KINDS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lattice, "ANCHOR_STEP", 160)  # one program is enough here
        return models, texts, lattice.draft_everywhere(models, ways, texts)


@pytest.mark.parametrize("kind", ["argmax", "greedy"])
def test_the_engine_decodes_the_predicted_blocks_and_texts(drafted, kind):
    """And says the same of where they died, but for coverage, which it does not know of an argmax."""
    models, texts, found = drafted
    settings = EngineConfig(rows=len(texts), context_limit=256, smallest_bucket=256, trace=True)
    asked = [
        Request(id=str(i), prompt_ids=t.prompt_ids, max_tokens=160, temperature=t.temperature, seed=t.seed)
        for i, t in enumerate(texts)
    ]
    replies = Engine(arms.ways(models)[kind], settings).run(asked)
    for text, drafts, reply in zip(texts, found, replies, strict=True):
        predicted = chain.chain_request(kind, text, drafts.drafts[kind], drafts.pool_ids, drafts.best_ids)
        assert reply.token_ids == text.reply_ids
        assert tuple(block.emitted for block in reply.blocks) == predicted.emitted
        assert len(reply.blocks) < len(text.reply_ids) - 1  # some drafts were right
        causes = [cause if kind == "greedy" or cause != "coverage" else "ranking" for cause in predicted.causes]
        assert list(attribution.causes(reply.token_ids, reply.blocks)) == causes
    assert {text.temperature for text in texts} == {0.0, 1.0}


def test_every_walk_stays_within_the_drafter_s_candidates(drafted):
    _, texts, found = drafted
    np.testing.assert_array_equal(found[0].best_ids, texts[0].reply_ids[1:])  # a greedy reply
    for text, drafts in zip(texts, found, strict=True):
        assert set(drafts.drafts) == {*KINDS, "exact, rows normalised"}
        assert drafts.pool_ids.shape == (text.num_anchors, 15, 8)
        assert np.all(np.diff(drafts.logprobs, axis=-1) <= 0)
        np.testing.assert_array_equal(drafts.drafts["argmax"], drafts.pool_ids[..., 0])
        for draft in drafts.drafts.values():
            assert (drafts.pool_ids == draft[..., None]).any(axis=-1).all()


def test_bigram_walks_join_the_others(drafted):
    _, texts, found = drafted
    joined = with_bigrams(texts[0], found[0], np.zeros((512, 512), np.float32))
    np.testing.assert_array_equal(joined.drafts["bigram 1"], found[0].pool_ids[..., 0])  # no counts, no change
