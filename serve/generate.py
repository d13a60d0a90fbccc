"""`python -m serve.generate`: one reply, streamed block by block, with the number of tokens that each block brought.

The reply goes to stdout and nothing else does, so that it can be piped. On a terminal each block is followed by its
number of tokens, `[4]`; stderr has all numbers at the end. Compilation is outside the clock.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass

from lilicorr_jax import flags
from lilicorr_jax.config import Dtype, setting
from serve import workload
from serve.engine import Engine, EngineConfig, Event, Method, Reply, Request, load_models
from serve.models import ProposalKind
from serve.stream import TextStream

PROGRAM = "serve.generate"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
EXAMPLES = """
python -m serve.generate --target=demo/target --drafter=demo/export --prompt="Sort: pear, fig, apple"
python -m serve.generate --target=demo/target --method=ar --prompt="Sort: pear, fig, apple"
python -m serve.generate --target=demo/target --drafter=demo/export --proposal=exact --temperature=1 --prompt=Hello
"""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Streams one reply to a prompt and shows how many tokens each verification block brought."""

    target: str = setting(MISSING, "Folder of the target, with its tokenizer.", "Models")
    drafter: str | None = setting(None, "Folder of the drafter: an Orbax export or a Hugging Face folder.")
    method: Method = setting(
        "lilicorr",
        "The drafter's likeliest tokens (dflash), coherent ones (lilicorr, domino, dspark), or no drafts (ar).",
    )
    proposal: ProposalKind = setting("greedy", "How a corrector drafts; exact is lilicorr's, sampled also dspark's.")
    dtype: Dtype | None = setting(None, "Of activations and weights; none takes the target's.")

    prompt: str = setting(MISSING, "What the user says; it is put into the target's chat template.", "Text")
    max_new_tokens: int = setting(512, "Longest reply; clipped to what the context holds behind the prompt.")
    temperature: float = setting(0.0, "0 is greedy.")
    top_p: float = setting(1.0, "Nucleus of the target's distribution; 1 keeps all.")
    top_k: int = setting(0, "Tokens kept; 0 keeps all.")
    seed: int = setting(0, "The same seed gives the same text, whatever the method drafts.")

    def __post_init__(self):
        if not self.prompt.strip():
            raise ValueError(f"--prompt must hold a visible character; got {self.prompt!r}.")
        if self.max_new_tokens < 1:
            raise ValueError(f"--max_new_tokens must be at least 1; got {self.max_new_tokens}.")
        if self.drafter is None and self.method != "ar":
            raise ValueError(f"--method={self.method} drafts; give --drafter, or --method=ar to decode plainly.")


def prepare(config: GenerateConfig) -> tuple[Engine, Request, TextStream]:
    """An engine for this one reply, compiled; what it is asked; and where its tokens become text."""
    tokenizer = workload.load_tokenizer(config.target)
    prompt_ids = workload.templated(tokenizer, config.prompt)
    models = load_models(
        config.target, config.drafter, method=config.method, proposal=config.proposal, dtype=config.dtype
    )
    request = Request(
        id="prompt",
        prompt_ids=prompt_ids,
        max_tokens=max(1, min(config.max_new_tokens, models.context_limit - len(prompt_ids))),
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=config.seed,
    )
    longest = min(models.context_limit, len(prompt_ids) + config.max_new_tokens)
    # One bucket, one program: a single reply would not win back what several take to compile.
    settings = EngineConfig(rows=1, context_limit=longest, smallest_bucket=longest, blocks_per_dispatch=1)
    engine = Engine(models, settings)
    engine.warm_up([request])
    return engine, request, TextStream(tokenizer)


def events(engine: Engine, request: Request) -> Iterator[Event]:
    """The prefill's token, then one event for each block, while the next block is under way."""
    (event,) = engine.admit([request])
    yield event
    while event.reply is None:
        while engine.num_pending < 2 and engine.dispatch():
            pass
        for event in engine.retire():
            yield event


def stream(engine: Engine, request: Request, text: TextStream, out) -> Reply:
    """Writes the reply to the text file `out` as it comes, and returns it."""
    shows_blocks = out.isatty()
    reply = None
    for number, event in enumerate(events(engine, request)):
        out.write(text.push(event.token_ids))
        if shows_blocks and number > 0:  # the prefill's token belongs to no block
            out.write(f"{DIM}[{len(event.token_ids)}]{PLAIN}")
        out.flush()
        reply = event.reply
    out.write(text.flush() + "\n")
    assert reply is not None
    return reply


def summary(reply: Reply) -> str:
    """All blocks, then tau and speed, in two lines."""
    emitted = [block.emitted for block in reply.blocks]
    tau = f"{sum(emitted) / len(emitted):.2f}" if emitted else "-"
    seconds = reply.times.last_s - reply.times.sent_s
    num_tokens = len(reply.token_ids)
    return (
        f"tokens per block: {' '.join(map(str, emitted)) or '-'}\n"
        f"tau {tau} tokens per block (the target's own token included), {num_tokens} tokens in {len(emitted)} blocks "
        f"and {seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s, ended by {reply.finish_reason}"
    )


def run(config: GenerateConfig) -> None:
    """Reads, compiles, streams, sums up."""
    reply = stream(*prepare(config), sys.stdout)
    print(summary(reply), file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    return flags.run_main(GenerateConfig, run, program=PROGRAM, examples=EXAMPLES, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
