"""`python -m serve.bench`: acceptance length and speed of block drafting against plain decoding of the same prompts.

Owns the protocol; which arms there are is `serve.arms`'. Every arm is the same engine on the same weights, compiled and
warmed before the clock; arms take turns on each chunk of prompts, in an order that is reversed from chunk to chunk
(A-B-B-A), so that a machine that warms up or slows down favours none; the drafter's prefill is inside the clock, no
cache outlives a request. Definitions are `serve.report`'s. Human tables go to stdout, their last line is one JSON
object, progress goes to stderr.
"""

import contextlib
import dataclasses
import datetime
import itertools
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass

import jax.monitoring
from rich.console import Console
from rich.progress import Progress

from lilicorr_jax import flags
from lilicorr_jax.config import Dtype, setting
from serve import arms, attribution, engine, gap, provenance, report, results, stages, table, workload
from serve.arms import Kind
from serve.request import MAX_SEED

PROGRAM = "serve.bench"
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
EXAMPLES = """
python -m serve.bench --flagfile=serve/flagfiles/demo.flags
python -m serve.bench --flagfile=serve/flagfiles/demo.flags --temperature=0 --num_prompts=10
python -m serve.bench --target=Qwen3-4B --drafter=export --prompts=gsm8k.jsonl --num_prompts=128 --output_dir=runs/gsm8k
python -m serve.bench --target=Qwen3-4B --drafter=runs/dflash/export/hf,runs/domino/export/hf --arms=ar,argmax,greedy \
    --prompts=gsm8k.jsonl --trace=true
python -m serve.bench --stages --preset=qwen3_8b        # what stands behind the drafter, alone; --stages --help
"""
STAGES = "--stages"


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Measures acceptance length and speed of block drafting against plain decoding, on a file of prompts."""

    target: str = setting(MISSING, "Folder of the target, with its tokenizer.", "Models")
    drafter: tuple[str, ...] = setting((), "Folders of drafters: Orbax exports or Hugging Face folders.")
    arms: tuple[Kind, ...] = setting(
        ("ar", "argmax", "greedy", "exact"),
        "Ways of decoding, each by every drafter that has it: plain (ar); the drafter's own likeliest token per slot "
        "(argmax; dflash, lilicorr); with what stands behind it, the likeliest path (greedy; lilicorr, domino, "
        "dspark), the best path (exact; lilicorr), or drawn and verified by rejection (sampled; lilicorr, dspark).",
    )
    dtype: Dtype = setting("float32", "Of activations and weights; texts are held equal in float32.")

    prompts: str = setting(MISSING, 'jsonl file, one {"turns": ["..."]} a line; the first turn is used.', "Workload")
    num_prompts: int | None = setting(None, "Prompts to draw, evenly over categories; none takes all.")
    prompt_seed: int = setting(0, "Decides which prompts are drawn.")
    max_new_tokens: int = setting(2048, "Longest reply; clipped to what the context holds behind each prompt.")
    temperature: tuple[float, ...] = setting((0.0, 1.0), "Temperatures, each with a table of its own.")
    top_p: float = setting(1.0, "Nucleus of the target's distribution at temperatures above 0; 1 keeps all.")
    top_k: int = setting(0, "Tokens kept at temperatures above 0; 0 keeps all.")
    seed: tuple[int, ...] = setting((42, 43, 44), "Seeds of the texts at temperatures above 0; at 0 there is one run.")

    concurrency: int = setting(1, "Requests decoded side by side.", "Run")
    chunk_prompts: int = setting(8, "Prompts that one arm serves before the next takes its turn.")
    blocks_per_dispatch: int = setting(
        engine.EngineConfig.blocks_per_dispatch, "Blocks, or plain steps, in one device program."
    )
    trace: bool = setting(False, "Also say where blocks die: at which slot, and why. Costs some speed.")
    output_dir: str | None = setting(None, "Folder for run.json, requests.jsonl, summary.json and summary.md.")

    def __post_init__(self):
        for name in ("arms", "temperature", "seed", "drafter"):
            values = getattr(self, name)
            if (not values and name != "drafter") or len(set(values)) < len(values):
                raise ValueError(f"--{name} must hold at least one value and none twice; got {values}.")
        for name in ("max_new_tokens", "concurrency", "chunk_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1; got {getattr(self, name)}.")
        if bad := [value for value in self.temperature if not 0 <= value < float("inf")]:
            raise ValueError(f"--temperature must be finite and not negative; got {bad[0]}.")
        if not (0 < self.top_p <= 1 and self.top_k >= 0):
            raise ValueError(
                f"--top_p must lie in (0, 1] and --top_k must not be negative; got {self.top_p} and {self.top_k}."
            )
        if bad := [seed for seed in self.seed if not 0 <= seed <= MAX_SEED]:
            raise ValueError(f"--seed must lie in [0, {MAX_SEED}]; got {bad[0]}.")
        if not self.drafter and self.arms != ("ar",):
            raise ValueError(f"--arms={','.join(self.arms)} drafts; give --drafter, or --arms=ar to decode plainly.")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One arm's go at one chunk of prompts."""

    arm: str
    temperature: float
    seed: int
    chunk: int
    prompts: tuple[workload.Prompt, ...]


def turns(config: BenchConfig, arms: Sequence[str], prompts: Sequence[workload.Prompt]) -> Iterator[Turn]:
    """All turns in their order: on each chunk the arms, every other time from the last to the first."""
    count = itertools.count()
    for temperature in config.temperature:
        for seed in config.seed if temperature > 0 else config.seed[:1]:
            for chunk, group in enumerate(itertools.batched(prompts, config.chunk_prompts)):
                for arm in arms if next(count) % 2 == 0 else arms[::-1]:
                    yield Turn(arm=arm, temperature=temperature, seed=seed, chunk=chunk, prompts=group)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Everything that a run needs in hand: prompts with their ids, and one engine for each arm."""

    config: BenchConfig
    prompts: tuple[workload.Prompt, ...]
    prompt_ids: Mapping[str, tuple[int, ...]]
    arms: tuple[table.Arm, ...]
    engines: Mapping[str, engine.Engine]

    @property
    def context_limit(self) -> int:
        return next(iter(self.engines.values())).context_limit

    def request(self, turn: Turn, prompt: workload.Prompt, **changes) -> engine.Request:
        """What the engine is asked; the same for every arm."""
        ids = self.prompt_ids[prompt.id]
        asked = {
            "id": prompt.id,
            "prompt_ids": ids,
            "max_tokens": min(self.config.max_new_tokens, self.context_limit - len(ids)),
            "temperature": turn.temperature,
            "top_p": self.config.top_p,
            "top_k": self.config.top_k,
            "seed": turn.seed,
        }
        return engine.Request(**(asked | changes))

    def serve(self, turn: Turn) -> list[report.Request]:
        """One turn, on the clock; what the engine sent off beyond the last reply ends before another arm's turn."""
        arm = self.engines[turn.arm]
        replies = arm.run([self.request(turn, prompt) for prompt in turn.prompts])
        while arm.num_pending:
            arm.retire()
        return [self._note(turn, prompt, reply) for prompt, reply in zip(turn.prompts, replies, strict=True)]

    def warm_up(self, arm: str) -> None:
        """Compiles and runs once every shape that the workload can meet, then serves one prompt at each temperature."""
        asked = [
            Turn(arm=arm, temperature=temperature, seed=0, chunk=0, prompts=self.prompts)
            for temperature in self.config.temperature
        ]
        pairs = [(turn, prompt) for turn in asked for prompt in turn.prompts]
        self.engines[arm].warm_up([self.request(*pair, id=str(number)) for number, pair in enumerate(pairs)])
        for turn in asked:
            self.serve(dataclasses.replace(turn, prompts=turn.prompts[:1]))

    def with_gap(self, difference: report.Difference, plain: Mapping[tuple, report.Request]) -> report.Difference:
        """The difference with the target's gap there, from a pass over what stands before it."""
        if None in difference.ids:
            return difference
        request, models = plain[difference.key], self.engines["ar"].models
        params = models.params["target"]
        text = self.prompt_ids[request.id] + request.token_ids[: difference.position]
        found = gap.choice_gap(
            models.target,
            params,
            text,
            difference.ids,
            temperature=request.temperature,
            top_p=self.config.top_p,
            top_k=self.config.top_k,
            seed=request.seed,
        )
        tolerance = gap.tolerance(models.target, params, text, request.temperature)
        return dataclasses.replace(difference, gap=found, tolerance=tolerance)

    def _note(self, turn: Turn, prompt: workload.Prompt, reply: engine.Reply) -> report.Request:
        return report.Request(
            arm=turn.arm,
            temperature=turn.temperature,
            seed=turn.seed,
            id=prompt.id,
            category=prompt.category,
            chunk=turn.chunk,
            prompt_tokens=len(self.prompt_ids[prompt.id]),
            token_ids=tuple(reply.token_ids),
            finish_reason=reply.finish_reason,
            emitted=tuple(block.emitted for block in reply.blocks),
            accepted_untrimmed=tuple(block.accepted for block in reply.blocks),
            proposed=tuple(block.proposed for block in reply.blocks),
            causes=attribution.causes(reply.token_ids, reply.blocks) if self.config.trace else None,
            **dataclasses.asdict(reply.times),
        )


def prepare(config: BenchConfig) -> Bench:
    """Reads prompts and models, and builds one engine for each arm; all hold the same longest text.

    Raises:
        ValueError: something can't be read, doesn't fit together, or a prompt doesn't fit the context.
    """
    prompts = workload.choose(workload.read_prompts(config.prompts), config.num_prompts, config.prompt_seed)
    tokenizer = workload.load_tokenizer(config.target)
    prompt_ids = {prompt.id: workload.templated(tokenizer, prompt.text) for prompt in prompts}
    chosen = arms.choose(arms.load(config.target, config.drafter, config.dtype), config.arms)
    limit = min(models.context_limit for _, models in chosen.values())
    if too_long := [(name, len(ids)) for name, ids in prompt_ids.items() if len(ids) >= limit]:
        raise ValueError(
            f"{len(too_long)} prompts leave no room for a reply in a context of {limit} tokens, the first of them "
            f"{too_long[0][0]!r} with {too_long[0][1]}; take them out of the file."
        )
    longest = min(limit, max(map(len, prompt_ids.values())) + config.max_new_tokens)
    settings = engine.EngineConfig(
        rows=config.concurrency,
        context_limit=longest,
        blocks_per_dispatch=config.blocks_per_dispatch,
        trace=config.trace,
    )
    return Bench(
        config=config,
        prompts=prompts,
        prompt_ids=prompt_ids,
        arms=tuple(arm for arm, _ in chosen.values()),
        engines={name: engine.Engine(models, settings) for name, (_, models) in chosen.items()},
    )


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
    """Seconds of every compilation inside the context, as a list that fills meanwhile."""
    seconds: list[float] = []

    def note(event: str, duration: float, **_):
        if event == COMPILE_EVENT:
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


class Steps:
    """Progress of a known number of steps: a bar on a terminal, elsewhere a line every ten seconds; a context."""

    SECONDS = 10.0

    def __init__(self, console: Console, total: int):
        self._console, self._total, self._done, self._said_s = console, total, 0, 0.0
        self._bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> "Steps":
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    @contextlib.contextmanager
    def one(self, name: str) -> Iterator[None]:
        """The next step, which is done when the context ends."""
        self._bar.update(self._task, description=name)
        if not self._console.is_terminal and time.monotonic() - self._said_s >= self.SECONDS:
            self._said_s = time.monotonic()
            self._console.print(f"step {self._done + 1}/{self._total}: {name}", highlight=False)
        yield
        self._done += 1
        self._bar.advance(self._task)


def measure(bench: Bench, console: Console) -> tuple[list[report.Request], dict[str, list[float]]]:
    """Warms up, then takes all turns.

    Returns:
        The requests as served; and seconds of compilations before the clock (`warm_up`) and inside it (`measured`),
        where there should be none.
    """
    names = [arm.name for arm in bench.arms]
    plan = list(turns(bench.config, names, bench.prompts))
    served = []
    with Steps(console, len(names) + len(plan)) as steps:
        with compilations() as before:
            for arm in names:
                with steps.one(f"compiling {arm}"):
                    bench.warm_up(arm)
        with compilations() as inside:
            for turn in plan:
                with steps.one(f"{turn.arm}, T = {turn.temperature:g}, seed {turn.seed}"):
                    served += bench.serve(turn)
    return served, {"warm_up": before, "measured": inside}


def run(config: BenchConfig) -> int:
    """The whole benchmark; 1 if a text differs from plain decoding's without excuse."""
    folder = results.claim_folder(config.output_dir) if config.output_dir else None
    bench = prepare(config)
    served, compiled = measure(bench, Console(stderr=True))
    plain = {request.key: request for request in served if request.arm == "ar"}
    found = table.rows(served, bench.arms, lambda difference: bench.with_gap(difference, plain))
    origin = origin_of(bench, compiled)
    text = "\n\n".join([preface(bench), table.render(found), *notes(bench, compiled)])
    summary = {"run": origin, "rows": [row.to_json() for row in found], "units": report.UNITS | table.UNITS}
    if folder:
        results.write(folder, run=origin, requests=served, summary=summary, text=text)
    print(text, end="\n\n")
    print(json.dumps(summary, allow_nan=False))
    return 1 if any(row.unexcused for row in found) else 0


def origin_of(bench: Bench, compiled: Mapping[str, list[float]]) -> dict:
    """What has to be known to measure again."""
    config = bench.config
    folders = {"target": config.target} | {arms.label_of(folder): folder for folder in config.drafter}
    return {
        "command": shlex.join(["python", "-m", PROGRAM, *flags.flags_from_record(config)]),
        "config": dataclasses.asdict(config),
        "context_limit_tokens": bench.context_limit,
        "revision": provenance.revision(),
        "versions": provenance.versions(),
        "device": provenance.device(),
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "prompts": {"count": len(bench.prompts), "sha256": workload.digest(bench.prompts)},
        "folders_sha256": {name: provenance.folder_digest(folder) for name, folder in folders.items()}
        if config.output_dir
        else {},
        "compile_s": {name: sum(seconds) for name, seconds in compiled.items()},
        "compilations": {name: len(seconds) for name, seconds in compiled.items()},
    }


def preface(bench: Bench) -> str:
    """What was measured, where and how, in a few lines."""
    config, device = bench.config, provenance.device()
    lengths = [len(ids) for ids in bench.prompt_ids.values()]
    lines = [
        f"{len(bench.prompts)} prompts of {config.prompts} (sha256 {workload.digest(bench.prompts)[:12]}), "
        f"{min(lengths)} to {max(lengths)} tokens in the chat template, first turn, thinking off; "
        f"at most {config.max_new_tokens} new tokens, {bench.context_limit} with the prompt.",
        f"{device['kind']} ({device['platform']}), {config.dtype}, concurrency {config.concurrency}, "
        f"{config.blocks_per_dispatch} blocks per dispatch; arms take turns on chunks of {config.chunk_prompts} "
        "prompts, A-B-B-A; compilation is outside the clock, the drafter's prefill inside.",
        "tau: tokens per verification block, the target's own token included, averaged over blocks, cut at the end of "
        "turn, without the prefill's token. Intervals: bootstrap over prompts.",
    ]
    return "\n\n".join(lines)


def notes(bench: Bench, compiled: Mapping[str, list[float]]) -> list[str]:
    """What the reader must know of this run beside its tables."""
    found = []
    if several := sum(prompt.num_turns > 1 for prompt in bench.prompts):
        found.append(f"{several} conversations have more turns than the first, which were not played.")
    if inside := compiled["measured"]:
        found.append(
            f"COMPILED inside the clock: {len(inside)} programs, {sum(inside):.2f} s; do not trust the speeds above."
        )
    if bench.config.trace:
        found.append("Every block was traced, which costs some speed: take no speed from this run.")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if STAGES in arguments:  # another measurement, with flags of its own
        return stages.main([argument for argument in arguments if argument != STAGES])
    return flags.run_main(BenchConfig, run, program=PROGRAM, examples=EXAMPLES, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
