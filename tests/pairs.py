"""Tiny random models whose drafter is often right, and the target's own text without any cache, the oracle of decoding.

A random drafter never guesses one of 96 tokens. So these have a vocabulary of a handful, in which target and drafter
agree by chance and blocks end in every way, and few layers, which compile fast.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from lilicorr_jax.conversion.checkpoint import abstract_drafter, abstract_target
from lilicorr_jax.models.target import Target
from lilicorr_jax.presets import tiny
from serve.engine import Models, assemble

VOCAB, SEED = 7, 14  # a seed whose greedy texts wander
WIDTH = 160  # one compiled shape for the oracle


TARGET = replace(tiny().target, vocab_size=VOCAB, num_layers=3)
DRAFTER = replace(
    tiny().drafter, vocab_size=VOCAB, mask_id=VOCAB - 1, num_target_layers=3, target_layer_ids=(0, 1)
)  # fmt: skip
RERANKER = tiny().reranker
BASELINES = {  # method: its drafter, of the same weights, and its corrector
    "domino": (replace(DRAFTER, slot_convention="next"), replace(tiny().domino, vocab_size=VOCAB)),
    "dspark": (
        replace(DRAFTER, slot_convention="next", input_rows=DRAFTER.num_slots),
        replace(tiny().dspark, vocab_size=VOCAB, kind="rnn"),
    ),
}


@functools.cache
def tiny_parameters() -> dict:
    """Trees `target`, `drafter` and `reranker` as they would be trained."""
    shapes = abstract_drafter(DRAFTER, RERANKER) | {"target": abstract_target(TARGET)}
    rng = np.random.default_rng(SEED)
    return jax.tree.map(lambda leaf: random_parameter(rng, leaf), shapes)


@functools.cache
def tiny_models() -> Models:
    """Every method of one random pair; `dataclasses.replace` chooses another."""
    return assemble(TARGET, tiny_parameters(), drafter=DRAFTER, corrector=RERANKER, method="dflash")


@functools.cache
def baseline_parameters(method: str) -> dict:
    """The same target and drafter, and the tree of Domino or DSpark."""
    rng = np.random.default_rng(SEED)
    shapes = abstract_drafter(*BASELINES[method])[method]
    shared = {name: tiny_parameters()[name] for name in ("target", "drafter")}
    return shared | {method: jax.tree.map(lambda leaf: random_parameter(rng, leaf), shapes)}


@functools.cache
def baseline_models(method: str) -> Models:
    """Domino or DSpark behind the same drafter, read by another convention."""
    drafter, corrector = BASELINES[method]
    return assemble(TARGET, baseline_parameters(method), drafter=drafter, corrector=corrector, method=method)


def random_parameter(rng: np.random.Generator, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """A matrix that keeps variance, or a vector around one."""
    centre, scale = (1.0, 0.1) if len(leaf.shape) == 1 else (0.0, 1.3 * leaf.shape[0] ** -0.5)
    return jnp.asarray(rng.normal(centre, scale, leaf.shape), leaf.dtype)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random ids of the vocabulary."""
    return tuple(np.random.default_rng([seed, length]).integers(0, VOCAB, length).tolist())


@functools.cache
def plain_text(prompt_ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """The target's greedy text: the whole of it run anew for every token, no cache, no block, no engine."""
    text = list(prompt_ids)
    for _ in range(num_tokens):
        text.append(int(np.argmax(next_logits(text))))
    return tuple(text[len(prompt_ids) :])


def next_logits(text) -> np.ndarray:
    """Logits behind a text."""
    padded = np.zeros((1, WIDTH), np.int32)
    padded[0, : len(text)] = text
    return np.asarray(_logits(padded)[0, len(text) - 1])


@jax.jit
def _logits(token_ids):
    models = tiny_models()
    tree, model = {"params": models.params["target"]}, Target(models.target)
    return model.apply(tree, model.apply(tree, token_ids).hidden, method="unembed")
