"""`python -m train.regenerate`: conversations whose assistant turns the target itself has written.

System, user and tool turns are kept; each assistant turn is answered anew, in order, with the new answers as history.
The answers come from this process (`train.decoder`) or from servers (`train.client`). Output and resume are
`train.journal`'s affair.
"""

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, replace
from pathlib import Path

from lilicorr_jax.chat import prompt_ids
from lilicorr_jax.config import setting
from lilicorr_jax.conversion.checkpoint import load_target
from lilicorr_jax.conversion.tokenizer import load_tokenizer
from lilicorr_jax.flags import flags_from_record, run_main
from train.chat import answer_text
from train.client import Client, ServerConfig
from train.conversations import Conversation, Problem, strict
from train.decoder import Decoder, Ended, Sampling
from train.dialogue import Answer, Dialogue, NoAnswer, Prompt, Regenerated, begin, dialogue
from train.journal import Journal
from train.sources import count_rows, evaluation_prompts, find_splits, read_conversations
from train.tally import Tally

FIXED = ("target", "model", "max_tokens", "temperature", "top_p", "top_k", "seed", "thinking")
"""Flags that decide what an answer says: one output is made with one value of each."""

EXAMPLES = """
python -m train.regenerate --target=models/Qwen3-8B --conversations=prompts.jsonl --output=replies.jsonl
python -m train.regenerate --base_url=http://localhost:8000/v1 --conversations=nvidia/Nemotron-Post-Training-Dataset-v2 --output=replies.jsonl
python -m train.regenerate --base_url=http://a:8000/v1,http://b:8000/v1 --server.concurrency=512 --conversations=nemotron/ --splits=code,math --output=replies.jsonl
"""  # noqa: E501


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """Has the target write every assistant turn of conversations; started again, it asks only for what is missing."""

    conversations: tuple[str, ...] = setting(MISSING, "Files, folders or hub ids of conversations.", "Conversations")
    output: str = setting(MISSING, "File (.jsonl) that finished conversations are appended to.")
    splits: tuple[str, ...] = setting((), "Splits to read; none takes all of a folder but the multilingual ones.")
    limit: int | None = setting(None, "Read so many conversations, evenly from the splits; none takes all.")
    shard: str = setting("0/1", "Which part of how many this process does; parts need outputs of their own.")
    evaluation: tuple[str, ...] = setting((), "Files of prompts that must not be trained on; such rows are left out.")
    strict: bool = setting(False, "Stop at the first bad row or failed conversation.")

    target: str | None = setting(None, "Folder of the target, to answer in this process.", "Who answers")
    base_url: tuple[str, ...] = setting((), "Servers that speak OpenAI's API, such as http://host:8000/v1.")
    model: str | None = setting(None, "The model's name there; none takes the only one.")
    give_up_after: int = setting(100, "Failures in a row after which the run stops.")

    max_tokens: int = setting(
        4096, "Longest answer; a longer one is cut, marked, and ends its conversation.", "Answers"
    )
    temperature: float = setting(0.0, "0 is greedy.")
    top_p: float = setting(1.0, "Nucleus of the target's distribution; 1 keeps all.")
    top_k: int = setting(0, "Tokens kept; 0 keeps all.")
    seed: int = setting(0, "Decides what is drawn where the temperature is not 0.")
    thinking: bool = setting(False, "Let a target that can think do so.")

    rows: int = setting(16, "Answers decoded side by side.", "In this process")
    context_limit: int = setting(8192, "Longest conversation in tokens; the model's own limit if that is shorter.")

    server: ServerConfig = ServerConfig()

    def __post_init__(self):
        if (self.target is None) == (not self.base_url):
            raise ValueError(f"Give --target or --base_url, one of the two; got {self.target} and {self.base_url}.")
        if not self.conversations:
            raise ValueError("--conversations must name at least one source; got none.")
        for name in ("limit", "max_tokens", "rows", "context_limit", "give_up_after"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1; got {value}.")
        if not (self.temperature >= 0 and 0 < self.top_p <= 1 and self.top_k >= 0 and 0 <= self.seed < 2**31):
            raise ValueError(
                "--temperature and --top_k must not be negative, --top_p must lie in (0, 1], --seed in [0, 2**31); got "
                f"{self.temperature}, {self.top_k}, {self.top_p}, {self.seed}."
            )
        self.part()

    def part(self) -> tuple[int, int]:
        """Which part of how many."""
        index, _, count = self.shard.partition("/")
        if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            raise ValueError(f"--shard is a part's number and how many there are, such as 0/8; got {self.shard!r}.")
        return int(index), int(count)


class Job:
    """The conversations that are still to do, and what becomes of each."""

    def __init__(self, config: RegenerateConfig, journal: Journal, tally: Tally):
        self.config, self.journal, self.tally = config, journal, tally
        self._failures_in_a_row = 0

    def todo(self) -> Iterator[Conversation]:
        """Every conversation of this part that is not done, once."""
        config = self.config
        part, num_parts = config.part()
        asked: set[str] = set()
        before = frozenset(self.journal.ends)
        for conversation in read_conversations(
            config.conversations,
            report=self._bad_row,
            splits=config.splits,
            limit=config.limit,
            refused=evaluation_prompts(config.evaluation),
        ):
            key = conversation.key
            if int(key, 16) % num_parts != part or key in before:
                continue
            if key in asked:
                self.tally.skip()
                continue
            asked.add(key)
            yield conversation

    def finish(self, regenerated: Regenerated) -> None:
        self._failures_in_a_row = 0
        self.journal.write(regenerated.record())
        self.tally.advance(regenerated.end, regenerated.num_tokens)

    def fail(self, conversation: Conversation, reason: str) -> None:
        """Notes a conversation without answer; raises ValueError if there were too many, or under --strict."""
        self._failures_in_a_row += 1
        self.journal.write_failure(conversation.id, conversation.key, reason)
        self.tally.problem("failed", f"conversation {conversation.id}: {reason}")
        if self.config.strict:
            raise ValueError(f"Conversation {conversation.id}: {reason}.")
        if self._failures_in_a_row >= self.config.give_up_after:
            raise ValueError(
                f"{self._failures_in_a_row} conversations failed in a row, the last by: {reason}. Mend the cause and "
                "give the same command again; what is done is kept."
            )

    def _bad_row(self, problem: Problem) -> None:
        if self.config.strict:
            strict(problem)
        self.tally.problem("bad rows", str(problem))


def regenerate(config: RegenerateConfig) -> int:
    """Answers all that is not answered yet, and says in one line what was done; returns the exit code."""
    if config.base_url and config.model is None:
        config = replace(config, model=asyncio.run(only_model(config)))
    total = sum(count_rows(split) for split in find_splits(config.conversations, config.splits))
    total = min(total, config.limit or total) // config.part()[1]
    with Journal(Path(config.output), flags_from_record(config), FIXED) as journal:
        with Tally(total, len(journal.ends)) as tally:
            job = Job(config, journal, tally)
            try:
                if config.base_url:
                    asyncio.run(answer_by_servers(job))
                else:
                    answer_here(job)
            except KeyboardInterrupt:
                tally.say("Stopped; the same command goes on from here.")
                return 128 + signal.SIGINT
            finally:
                tally.say(f"{tally.line()}; {config.output} holds {journal.summary()}.")
    return 0


def answer_here(job: Job) -> None:
    """Answers all conversations in this process, as many at a time as there are rows."""
    config = job.config
    tokenizer = load_tokenizer(config.target)
    target, params = load_target(config.target)
    decoder = Decoder(
        target,
        params,
        num_rows=config.rows,
        context_limit=min(config.context_limit, target.max_positions),
        sampling=Sampling(temperature=config.temperature, top_p=config.top_p, top_k=config.top_k),
    )
    turns = Turns(job)
    while True:
        while decoder.num_free and (turn := turns.take()):
            with turns.failing(turn):
                ids, max_tokens = fitted(config, decoder, tokenizer, turn)
                decoder.admit(turn, ids, max_tokens, seed_of(config, turn.conversation, turn.prompt))
        if decoder.is_idle:
            return
        for ended in decoder.step():
            with turns.failing(ended.job):
                turns.put(ended.job, answer_of(tokenizer, ended))


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A conversation under way and what it asks now."""

    conversation: Conversation
    talk: Dialogue
    prompt: Prompt


class Turns:
    """What a decoder is to answer next: turns of conversations under way before new conversations."""

    def __init__(self, job: Job):
        self.job, self._todo = job, job.todo()
        self._waiting: list[Turn] = []

    def take(self) -> Turn | None:
        if self._waiting:
            return self._waiting.pop()
        conversation = next(self._todo, None)
        if conversation is None:
            return None
        talk = dialogue(conversation)
        return Turn(conversation=conversation, talk=talk, prompt=begin(talk))

    def put(self, turn: Turn, answer: Answer) -> None:
        following = turn.talk.send(answer)
        if isinstance(following, Regenerated):
            self.job.finish(following)
        else:
            self._waiting.append(replace(turn, prompt=following))

    @contextmanager
    def failing(self, turn: Turn) -> Iterator[None]:
        """Notes the conversation as failed where a turn has no answer."""
        try:
            yield
        except NoAnswer as error:
            self.job.fail(turn.conversation, str(error))


def fitted(config: RegenerateConfig, decoder: Decoder, tokenizer, turn: Turn) -> tuple[tuple[int, ...], int]:
    """Ids of a prompt, and the longest answer that it leaves room for.

    Raises:
        NoAnswer: the template refuses the conversation, or there is no room.
    """
    try:
        ids = prompt_ids(tokenizer, turn.prompt, thinking=config.thinking, tools=turn.conversation.tools)
    except ValueError as error:
        raise NoAnswer(str(error)) from None
    room = decoder.context_limit - len(ids)
    if room < 1:
        raise NoAnswer(f"a prompt of {len(ids)} tokens leaves no room in a context of {decoder.context_limit}")
    return ids, min(room, config.max_tokens)


def answer_of(tokenizer, ended: Ended) -> Answer:
    """The text of an answer and its very tokens; raises NoAnswer if it is blank."""
    text = answer_text(tokenizer, ended.token_ids)
    reason = "length" if ended.is_truncated else "stop"
    if not text.strip():
        raise NoAnswer(f"the answer is empty (ended by {reason!r})")
    message = {"role": "assistant", "content": text, "finish_reason": reason, "token_ids": ended.token_ids}
    return Answer(message=message, num_tokens=len(ended.token_ids))


async def answer_by_servers(job: Job) -> None:
    """Answers all conversations by servers, as many at a time as the concurrency says."""
    todo = job.todo()  # shared: taking the next one waits for nothing, so no two workers get the same

    async def work() -> None:
        for conversation in todo:
            try:
                job.finish(await converse(job.config, client, conversation))
            except NoAnswer as error:
                job.fail(conversation, str(error))

    async with client_of(job.config) as client:
        await asyncio.gather(*(work() for _ in range(job.config.server.concurrency)))


async def converse(config: RegenerateConfig, client: Client, conversation: Conversation) -> Regenerated:
    talk = dialogue(conversation)
    following: Prompt | Regenerated = begin(talk)
    while not isinstance(following, Regenerated):
        seed = seed_of(config, conversation, following) if config.temperature else None
        following = talk.send(await client.answer(following, conversation.tools, seed))
    return following


def client_of(config: RegenerateConfig) -> Client:
    body = {"model": config.model, "max_tokens": config.max_tokens, "temperature": config.temperature}
    body |= ({"top_p": config.top_p} if config.top_p < 1 else {}) | ({"top_k": config.top_k} if config.top_k else {})
    return Client(config.base_url, config.server, body, thinking=config.thinking)


async def only_model(config: RegenerateConfig) -> str:
    async with client_of(config) as client:
        return await client.only_model()


def seed_of(config: RegenerateConfig, conversation: Conversation, prompt: Prompt) -> int:
    """Another seed for every turn of every conversation, whatever order they come in."""
    return (config.seed + int(conversation.key[:8], 16) + len(prompt)) % 2**31


def main(arguments: list[str] | None = None) -> int:
    return run_main(RegenerateConfig, regenerate, program="train.regenerate", examples=EXAMPLES, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
