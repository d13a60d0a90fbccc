"""Folders of a tiny random pair with a tokenizer of nine words, for the command lines of `serve`."""

import json
import random
from dataclasses import replace

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lilicorr_jax.conversion.checkpoint import (
    DrafterCheckpoint,
    abstract_drafter,
    abstract_target,
    save_drafter,
    save_target,
)
from lilicorr_jax.conversion.export import save_export
from lilicorr_jax.presets import tiny

END, USER, MASK = "<end>", "<user>", "<mask>"
WORDS = (END, USER, "so", "it", "goes", "round", "and", "on", MASK)
CONTEXT = 80


def random_pair():
    """Few words, so that the drafter is often right by chance and texts often end. No program makes the weights."""
    shared = {"vocab_size": len(WORDS), "max_positions": CONTEXT}
    target = replace(tiny().target, num_layers=2, eos_ids=(WORDS.index(END),), **shared)
    layers = {"num_layers": 1, "num_target_layers": 2, "target_layer_ids": (0,)}
    drafter = replace(tiny().drafter, mask_id=WORDS.index(MASK), **layers, **shared)
    reranker = replace(tiny().reranker, num_layers=1)
    rng = np.random.default_rng(1)

    def random(leaf):
        centre, scale = (1.0, 0.1) if len(leaf.shape) == 1 else (0.0, 1.3 * leaf.shape[0] ** -0.5)
        return rng.normal(centre, scale, leaf.shape).astype(leaf.dtype)

    weights, params = jax.tree.map(random, (abstract_target(target), abstract_drafter(drafter, reranker)))
    return target, weights, DrafterCheckpoint(drafter=drafter, corrector=reranker, params=params)


def save_tokenizer(folder) -> None:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="so"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END, additional_special_tokens=[USER, MASK])
    tokenizer.chat_template = "{% for message in messages %}<user> {{ message.content }} <end> {% endfor %}"
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """`target`, its drafter as `orbax`, as `hf` and, without reranker, as `plain`; `prompts.jsonl`, two categories."""
    root = tmp_path_factory.mktemp("serve")
    target, weights, checkpoint = random_pair()
    save_target(root / "target", target, weights)
    save_tokenizer(root / "target")
    save_export(root / "orbax", checkpoint)
    save_drafter(root / "hf", checkpoint)
    plain = {"drafter": checkpoint.params["drafter"]}
    save_drafter(root / "plain", DrafterCheckpoint(drafter=checkpoint.drafter, corrector=None, params=plain))
    draw = random.Random(0)
    rows = [
        {"id": f"{name}-{i}", "category": name, "turns": [" ".join(draw.choices(WORDS[2:8], k=4 + i)), "and then?"]}
        for name in ("code", "story")
        for i in range(3)
    ]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root
