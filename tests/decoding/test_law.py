"""The joint law of speculated text, against exact enumeration over a target that is a table.

The check itself is shown to see faults: each planted one must fail it.
"""

import functools
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from lilicorr_jax.config import DSparkConfig
from lilicorr_jax.decoding import speculate, verify
from lilicorr_jax.decoding.noise import draw
from lilicorr_jax.decoding.pair import Pair
from lilicorr_jax.decoding.proposal import SparseQ
from lilicorr_jax.decoding.rollout import dspark_rollout
from lilicorr_jax.decoding.schedule import confident_prefix
from lilicorr_jax.decoding.speculate import run_blocks
from lilicorr_jax.decoding.walk import walk
from lilicorr_jax.models.fold import FoldedDSpark
from pallas_kernels.match_walk import Scores
from tests import stubs

pytestmark = pytest.mark.usefixtures("strict_dtypes")

VOCAB, SLOTS, CANDIDATES = 4, 2, 3
TEXTS, TOKENS, TEMPERATURE = 100_000, 4, 0.8
QUICK = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # each program runs once
TABLES = np.random.default_rng(7)
TARGET = TABLES.normal(size=(TOKENS + SLOTS + 1, VOCAB, VOCAB)).astype(np.float32)
DRAFT = TABLES.normal(size=TARGET.shape).astype(np.float32)
SCORES = TABLES.normal(size=(len(TARGET), CANDIDATES, CANDIDATES)).astype(np.float32)
POOL = np.argsort(-DRAFT[:, 0], axis=-1)[:, :CANDIDATES].astype(np.int32)  # candidates of a position


def deterministic(length, anchor_id, temperature, noise):
    """The likeliest draft after the draft before it."""
    ids = []
    for slot in range(SLOTS):
        last = ids[-1] if ids else anchor_id
        ids.append(jnp.argmax(jnp.array(DRAFT)[length + slot, last], axis=-1).astype(jnp.int32))
    return stubs.drafts(jnp.stack(ids, axis=1))


def sparse(length, anchor_id, temperature, noise):
    """A sampled walk through a lattice of three of the four tokens."""
    slots = length[:, None] + 1 + jnp.arange(SLOTS, dtype=jnp.int32)[None, :]
    ids, scores = jnp.array(POOL)[slots], jnp.array(SCORES)[slots]
    picks, q = walk(Scores(scores[:, 0, 0], scores[:, 1:]), "sampled", temperature=temperature, uniforms=noise)
    draft_ids = jnp.take_along_axis(ids, picks[..., None], axis=-1)[..., 0]
    return stubs.drafts(draft_ids, q=SparseQ(ids=ids, probs=q))


def dense(length, anchor_id, temperature, noise):
    """A chain over the whole vocabulary, each draft drawn given the one before it."""
    ids, q = [], []
    for slot in range(SLOTS):
        last = ids[-1] if ids else anchor_id
        q.append(jax.nn.softmax(jnp.array(DRAFT)[length + slot, last], axis=-1))
        ids.append(draw(q[-1], noise[:, slot]))
    return stubs.drafts(jnp.stack(ids, axis=1), q=jnp.stack(q, axis=1))


def short(length, anchor_id, temperature, noise):
    """As dense, but the number of proposed drafts changes from position to position."""
    return dense(length, anchor_id, temperature, noise).replace(num_proposed=length % (SLOTS + 1))


WIDTH, RANK = 3, 5
MARKOV = DSparkConfig(drafter_width=WIDTH, vocab_size=VOCAB, num_slots=SLOTS, rank=RANK, kind="rnn")
STATES = TABLES.normal(size=(len(TARGET), WIDTH)).astype(np.float32)
MIXED = 3 * RANK + 1
FOLDED = {
    name: TABLES.normal(size=shape).astype(np.float32)
    for name, shape in {
        "token_in": (VOCAB, RANK),
        "hidden_kernel": (WIDTH, MIXED),
        "hidden_bias": (MIXED,),
        "token_kernel": (RANK, MIXED),
        "state_kernel": (RANK, 3 * RANK),
        "out_rows": (VOCAB, RANK),
    }.items()
}
# The confidence, in the last column, reads the token before alone: high behind tokens 0 and 2, low behind 1 and 3.
FOLDED["hidden_kernel"][:, -1] = FOLDED["hidden_bias"][-1] = 0
FOLDED["token_kernel"][:, -1] = np.linalg.lstsq(FOLDED["token_in"], np.array([2.0, -2.0, 1.0, -1.0]))[0]
THRESHOLD = 0.5


def rolled(length, anchor_id, **draws):
    """DSpark's rollout over a table of states and logits by position."""
    slots = length[:, None] + jnp.arange(SLOTS, dtype=jnp.int32)[None, :]
    block = jnp.array(DRAFT[:, 0])[slots], jnp.array(STATES)[slots]
    folded = FoldedDSpark(**{name: jnp.array(table) for name, table in FOLDED.items()})
    return dspark_rollout(MARKOV, folded, *block, anchor_id, **draws)


def markov(length, anchor_id, temperature, noise):
    """Every draft of DSpark's recurrence is drawn, and its q dense."""
    drawn = rolled(length, anchor_id, kind="sampled", temperature=temperature, uniforms=noise)
    return stubs.drafts(drawn.draft_ids, q=drawn.q)


def cautious(length, anchor_id, temperature, noise):
    """Drafts from the first of low confidence on are left out; each confidence reads the draft before its own."""
    drawn = rolled(length, anchor_id, kind="sampled", temperature=temperature, uniforms=noise)
    kept = confident_prefix(jax.nn.sigmoid(drawn.confidence), THRESHOLD)
    return stubs.drafts(drawn.draft_ids, kept, drawn.q)


def markov_argmax(length, anchor_id, temperature, noise):
    """DSpark's greedy drafts."""
    return stubs.drafts(rolled(length, anchor_id).draft_ids)


def enumerated_law(filtered: bool) -> np.ndarray:
    """Probability of every text of TOKENS tokens behind anchor 0, in float64."""
    weights = np.exp(TARGET.astype(np.float64) / TEMPERATURE)
    if filtered:  # top-k 3: only the least likely of the four goes
        weights = np.where(weights > weights.min(-1, keepdims=True), weights, 0)
    probs = weights / weights.sum(-1, keepdims=True)
    law = np.zeros((VOCAB,) * TOKENS)
    for text in itertools.product(range(VOCAB), repeat=TOKENS):
        law[text] = np.prod(
            [probs[i, last, token] for i, (last, token) in enumerate(zip((0, *text), text, strict=False))]
        )
    return law


@functools.cache
def sample(script, mode: str = "temperature"):
    """TEXTS texts by speculation, and the accepted drafts of every block that a running row had."""
    pair = Pair(target=stubs.table_target(TARGET), drafter=script and stubs.scripted_drafter(SLOTS, script))
    state = stubs.running_state(
        pair,
        TEXTS,
        temperature=jnp.full(TEXTS, TEMPERATURE, jnp.float32),
        top_k=jnp.full(TEXTS, 3, jnp.int32),
        max_tokens=jnp.full(TEXTS, 1 + TOKENS, jnp.int32),
    )
    _, record = QUICK(partial(run_blocks, pair, {}, num_blocks=TOKENS, mode=mode))(state)
    accepted = np.asarray(record.num_accepted)[np.asarray(record.num_committed) > 0]
    rows = np.moveaxis(np.asarray(record.token_ids), 0, 1)  # [TEXTS, blocks, P]
    return rows[rows >= 0].reshape(TEXTS, TOKENS), accepted


def p_value(texts, filtered: bool = False) -> float:
    """Chi-square of the texts against the enumerated law; texts expected fewer than five times share one cell."""
    expected = enumerated_law(filtered).ravel() * len(texts)
    counts = np.bincount(np.ravel_multi_index(texts.T, (VOCAB,) * TOKENS), minlength=expected.size)
    assert np.all(counts[expected == 0] == 0), "a text outside the target's support"
    rare = expected < 5
    groups = [np.append(cells[~rare], cells[rare].sum()) for cells in (counts, expected)]
    counts, expected = (cells[groups[1] > 0] for cells in groups)
    return stats.chisquare(counts, expected).pvalue


@pytest.mark.parametrize(
    ("script", "mode"),
    [
        *((script, "temperature") for script in (None, deterministic, sparse, dense, short, markov, cautious)),
        (dense, "filtered"),
        (markov, "filtered"),
    ],
)
def test_speculated_text_has_the_targets_joint_law(script, mode):
    texts, accepted = sample(script, mode)
    assert set(accepted) == ({0, 1, 2} if script else {0})
    assert p_value(texts, filtered=mode == "filtered") > 1e-3


@pytest.mark.parametrize("script", [deterministic, markov_argmax])
def test_deterministic_drafts_change_no_token_at_any_temperature(script):
    np.testing.assert_array_equal(sample(script)[0], sample(None)[0])


def share_uniforms(monkeypatch):
    noise = speculate._verify_noise

    def shared(state, slots):
        return noise(state, slots)._replace(residual=noise(state, slots).accept)

    monkeypatch.setattr(speculate, "_verify_noise", shared)


def share_draft_noise(monkeypatch):
    purpose = speculate.Purpose
    same = {"ACCEPT": purpose.DRAFT, "DRAFT": purpose.DRAFT, "RESIDUAL": purpose.RESIDUAL, "TARGET": purpose.TARGET}
    monkeypatch.setattr(speculate, "Purpose", type("Purpose", (), same))


def residual_is_p(monkeypatch):
    def wrong(proposal, probs, num_accepted):
        return jnp.take_along_axis(probs, num_accepted[:, None, None], axis=1)[:, 0]

    monkeypatch.setattr(verify, "next_weights", wrong)


@pytest.mark.parametrize("plant", [share_uniforms, share_draft_noise, residual_is_p])
def test_a_planted_fault_is_seen(monkeypatch, plant):
    plant(monkeypatch)
    assert p_value(sample.__wrapped__(sparse)[0]) < 1e-3


def flat_dense(*block):
    right = dense(*block)
    return right.replace(q=jnp.full_like(right.q, 1 / VOCAB))


def soft_argmax(*block):
    """An argmax draft with the distribution that it was the argmax of."""
    return deterministic(*block).replace(q=dense(*block).q)


def greedy_markov(*block):
    """DSpark's greedy drafts with the q that they were not drawn from."""
    return markov_argmax(*block).replace(q=markov(*block).q)


@pytest.mark.parametrize("script", [flat_dense, soft_argmax, greedy_markov])
def test_a_q_that_was_not_sampled_from_is_seen(script):
    assert p_value(sample(script)[0]) < 1e-3


def looking_ahead(length, anchor_id, temperature, noise):
    """As cautious, but a draft is left out for what the confidence says of the slot behind it, which has read it."""
    right = cautious(length, anchor_id, temperature, noise)
    drawn = rolled(length, anchor_id, kind="sampled", temperature=temperature, uniforms=noise)
    behind = jnp.roll(jax.nn.sigmoid(drawn.confidence), -1, axis=1)
    return right.replace(num_proposed=confident_prefix(behind, THRESHOLD))


def test_a_length_that_depends_on_the_drafts_it_cuts_is_seen():
    assert p_value(sample(looking_ahead)[0]) < 1e-3
