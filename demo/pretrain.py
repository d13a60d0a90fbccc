"""Pretrain the demo target from nothing: `python -m demo.pretrain --output=demo/target`.

Trains the tokenizer, then the model on the corpus's pretraining split, and writes both. A killed run goes on from its
last checkpoint; rows are a function of the seed and the step, so it sees what it would have seen.
"""

import dataclasses
import itertools
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from absl import app, flags, logging
from tokenizers import Tokenizer

from demo import corpus, greedy, rows
from demo import tokenizer as demo_tokenizer
from lilicorr_jax import config
from lilicorr_jax.models.target import Target
from lilicorr_jax.sharding import count_parameters, init_parameters

_OUTPUT = flags.DEFINE_string("output", None, "Folder for the model and its tokenizer.", required=True)
_CHECKPOINTS = flags.DEFINE_string("checkpoints", "/tmp/demo_pretrain", "Folder for checkpoints of the run.")
_STEPS = flags.DEFINE_integer("steps", 3000, "Optimizer steps of about 4,000 tokens.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the corpus and of the initial weights.")
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 4e-3, "Peak rate, after 2 % warm-up; falls to 0 as a cosine.")
_SAVE_EVERY = flags.DEFINE_integer("save_every", 200, "Steps between checkpoints.", lower_bound=1)
_SAMPLE_EVERY = flags.DEFINE_integer("sample_every", 300, "Steps between printed sample replies.", lower_bound=1)

INIT_STD = 0.08  # about 1 / sqrt(width): with 0.02, 75 steps reach a loss of 3.9 instead of 1.3
TOKENIZER_RECORDS = 8000
SAMPLES = dict.fromkeys(corpus.CATEGORIES, 16)  # held-out prompts that watch the run
LONGEST_REPLY = 128


def _matrices(params):
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def optimizer(steps: int, learning_rate: float) -> optax.GradientTransformation:
    """AdamW with decay 0.05 on matrices, clip 1, warm-up and cosine."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, max(1, steps // 50), steps)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=0.05, mask=_matrices),
    )


def loss(target: Target, params, batch: tuple[tuple[jax.Array, jax.Array], ...]) -> jax.Array:
    """Weighted mean cross-entropy of every next token, over rows of several widths."""
    total, weight = 0.0, 0.0
    for token_ids, weights in batch:
        hidden = target.apply({"params": params}, token_ids[:, :-1]).hidden
        logits = target.apply({"params": params}, hidden, method="unembed")
        each = optax.softmax_cross_entropy_with_integer_labels(logits, token_ids[:, 1:])
        total, weight = total + jnp.sum(each * weights[:, 1:]), weight + jnp.sum(weights[:, 1:])
    return total / weight


def make_step(target: Target, update: optax.GradientTransformation):
    """A jitted (state, batch) -> (state, loss)."""

    def step(state, batch):
        params, optimizer_state = state
        value, gradient = jax.value_and_grad(lambda p: loss(target, p, batch))(params)
        change, optimizer_state = update.update(gradient, optimizer_state, params)
        return (optax.apply_updates(params, change), optimizer_state), value

    return jax.jit(step, donate_argnums=0)


def watch(target: Target, params, tokenizer: Tokenizer) -> str:
    """Per category: share of held-out replies that end, that match the written one, and one reply to read."""
    lines = []
    records = corpus.distinct("heldout", seed=1, per_category=SAMPLES)
    prompts = [rows.turn(tokenizer, record.prompt, record.reply)[0] for record in records]
    answers = greedy.replies(target, params, prompts, max_new=LONGEST_REPLY)
    for category in corpus.CATEGORIES:
        mine = [(r, a) for r, a in zip(records, answers, strict=True) if r.category == category]
        texts = [tokenizer.decode(answer) for _, answer in mine]
        ended = sum(answer[-1] in target.config.eos_ids for _, answer in mine) / len(mine)
        exact = sum(text == record.reply for text, (record, _) in zip(texts, mine, strict=True)) / len(mine)
        lines.append(f"  {category}: ended {ended:.0%}, exact {exact:.0%}")
        lines.append(f"    {mine[0][0].prompt!r}\n    -> {texts[0]!r}")
    return "\n".join(lines)


def train(target: Target, tokenizer: Tokenizer, *, steps: int, learning_rate: float, seed: int, folder: Path):
    """Run or resume `steps` optimizer steps; returns the parameters."""
    update = optimizer(steps, learning_rate)
    params = init_parameters(target, jax.random.key(seed), jnp.zeros((1, 8), jnp.int32))
    print(f"{count_parameters(params):,} parameters", file=sys.stderr)
    state = (params, update.init(params))
    step = make_step(target, update)
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        done = manager.latest_step() or 0
        if done:
            state = manager.restore(done, args=ocp.args.StandardRestore(state))
            print(f"going on from step {done} in {folder}", file=sys.stderr)
        began, tokens = time.monotonic(), 0
        stream = itertools.islice(rows.steps(tokenizer, seed=seed), done, steps)
        for number, group in enumerate(stream, done + 1):
            state, value = step(state, tuple((r.token_ids, r.weights) for r in group))
            tokens += sum(r.token_ids.size for r in group)
            if number % 25 == 0 or number == steps:
                rate = tokens / (time.monotonic() - began)
                left = (steps - number) * (time.monotonic() - began) / (number - done)
                print(
                    f"step {number}/{steps} loss {value:.4f} {rate:,.0f} tok/s, {left / 60:.1f} min left",
                    file=sys.stderr,
                )
            if number % _SAMPLE_EVERY.value == 0 or number == steps:
                print(watch(target, state[0], tokenizer), file=sys.stderr)
            if number % _SAVE_EVERY.value == 0 or number == steps:
                manager.save(number, args=ocp.args.StandardSave(state), force=True)
    return state[0]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"Nothing but flags is accepted, got {argv[1]!r}.")
    logging.set_verbosity(logging.WARNING)  # Orbax tells every step of its work
    output = Path(_OUTPUT.value)
    target = Target(dataclasses.replace(config.demo().target, init_std=INIT_STD))
    records = itertools.islice(corpus.records("pretrain", seed=_SEED.value), TOKENIZER_RECORDS)
    tokenizer = demo_tokenizer.train(text for record in records for text in (record.prompt, record.reply))
    demo_tokenizer.write(tokenizer, output, context=target.config.max_positions)
    train(target, tokenizer, steps=_STEPS.value, learning_rate=_LEARNING_RATE.value, seed=_SEED.value,
          folder=Path(_CHECKPOINTS.value).absolute())  # fmt: skip


if __name__ == "__main__":
    app.run(main)
