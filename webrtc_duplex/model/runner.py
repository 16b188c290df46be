"""The model as the engine knows it: numpy in, numpy out; owns weights and state, and what runs them (`graphs.py`)."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from webrtc_duplex.audio import FRAME_SAMPLES, Pcm
from webrtc_duplex.errors import RequestError
from webrtc_duplex.messages import ModelCard, Prompt
from webrtc_duplex.model.checkpoint import Checkpoint, load_lm, load_mimi, open_checkpoint, voice_model
from webrtc_duplex.model.echo import EchoRunner
from webrtc_duplex.model.graphs import Lanes, make_runs, parts
from webrtc_duplex.model.hub import find_checkpoint
from webrtc_duplex.model.memory import MemoryPlan, available_bytes, plan_memory
from webrtc_duplex.model.mimi import LATENTS
from webrtc_duplex.model.personaplex import PersonaPlex, Thought
from webrtc_duplex.model.prompter import Prompter, Wish
from webrtc_duplex.model.prompts import PromptColumns
from webrtc_duplex.model.sampling import asked
from webrtc_duplex.model.streaming import NO_HINTS, Hints, RowImage, zero_row
from webrtc_duplex.model.voices import read_voices

logger = logging.getLogger(__name__)

KV_DTYPES = {"auto": None, "int8": torch.int8}
"""What the language model's keys and values are kept in, by the names of the setting; auto: as the weights."""

PROMPT_CACHE_BYTES = 1 << 30


class Prompts(Protocol):
    """What the runner asks of `prompter.Prompter`."""

    def card(self) -> ModelCard: ...
    def wish(self, prompt: Prompt) -> Wish: ...
    def columns(self, wish: Wish) -> PromptColumns: ...


@dataclass(slots=True)
class Opening:
    """A row whose prompt is being prefilled."""

    wish: Wish
    columns: PromptColumns
    done: int = 0

    @property
    def left(self) -> int:
        return len(self.columns) - self.done


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A row as its prompt left it, before anything of the call itself (its seed, its first choice)."""

    columns: PromptColumns
    temporal: RowImage
    decoder: RowImage
    thought: Thought
    """Of the last column, for one lane: what the call's first tokens are chosen from."""

    @property
    def bytes(self) -> int:
        thought = self.thought.hidden.nbytes + self.thought.text_logits.nbytes
        return self.temporal.bytes + self.decoder.bytes + thought


class PromptCache:
    """Rows after prefill by wish: at most so many bytes, the least recently used goes first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[Wish, Prefilled] = OrderedDict()

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self._entries.values())

    def get(self, wish: Wish) -> Prefilled | None:
        if wish in self._entries:
            self._entries.move_to_end(wish)
        return self._entries.get(wish)

    def put(self, wish: Wish, entry: Prefilled) -> None:
        """Keep it, unless it alone is too large."""
        self._entries[wish] = entry
        self._entries.move_to_end(wish)
        while self.bytes > self._limit:
            self._entries.popitem(last=False)


class PersonaPlexRunner:
    """The engine's model interface around a duplex model.

    A row's way: `begin` makes it fresh and, where the prompt is in the cache, lets it join at once; else `prefill` runs
    the prompt in chunks. Then `step` lists it at every tick. All state is allocated here, once.
    """

    def __init__(
        self,
        model: PersonaPlex,
        prompts: Prompts,
        rows: int,
        cache_bytes: int = PROMPT_CACHE_BYTES,
        lane_counts: Sequence[int] | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.rows = rows
        self.card = prompts.card()
        self.codes = np.zeros((0, 8), np.int64)
        """Codes that the last step's rows said, [n, 8]; for who writes them down."""
        self._model = model
        self._prompts = prompts
        self.state = model.allocate(rows, kv_dtype)
        self._ages = np.zeros((rows + 1, 2), np.int64)  # columns and frames of each row
        self._hot = np.zeros(rows + 1, np.bool_)  # whether the row's call is sampled, not greedy
        self._wide = np.zeros(rows + 1, np.bool_)  # whether its text may be any token, not one of the top k
        self._openings: dict[int, Opening] = {}
        self.cache = PromptCache(cache_bytes)
        with torch.inference_mode():
            self._lanes, self._prompting = make_runs(model, self.state, rows, lane_counts)
        self._warm_up()

    def load_prompt(self, prompt: Prompt) -> int:
        """Check what the prompt asks for; returns its columns. Raises RequestError or CheckpointError."""
        asked(prompt, self._model.lm.config.sampling)
        wish = self._prompts.wish(prompt)
        cached = self.cache.get(wish)
        return len(cached.columns if cached else self._prompts.columns(wish))

    @torch.inference_mode()
    def begin(self, row: int, prompt: Prompt) -> int:
        """Make the row a fresh one of this call; returns the columns left to prefill, 0 where the cache had them."""
        sampling = asked(prompt, self._model.lm.config.sampling)
        wish = self._prompts.wish(prompt)
        cached = self.cache.get(wish)
        opening = None if cached else Opening(wish, self._prompts.columns(wish))
        self.reset(row)
        self.state.lm.sampler.set_row(row, prompt.seed, sampling)
        self._hot[row] = max(sampling.text_temperature, sampling.audio_temperature) > 0
        self._wide[row] = sampling.text_top_k == 0
        if cached:
            self._ages[row] = len(cached.columns), 1
            cached.temporal.put(self.state.lm.temporal, row, len(cached.columns))
            cached.decoder.put(self.state.mimi.decoder, row, LATENTS)
            self._prompting.open(cached.columns, cached.thought, row)
            return 0
        assert opening is not None
        self._openings[row] = opening
        return opening.left

    @torch.inference_mode()
    def prefill(self, row: int, columns: int) -> int:
        """Run at most so many more columns of the row's prompt; returns the columns left."""
        opening = self._openings[row]
        count = min(columns, opening.left)
        hidden = self._prompting.prefill(opening.columns, row, opening.done, count)
        opening.done += count
        self._ages[row] = opening.done, 1
        if not opening.left:
            del self._openings[row]
            self._end_prompt(row, opening, hidden)
        return opening.left

    @torch.inference_mode()
    def reset(self, row: int) -> None:
        """Make the row equal a fresh one. What it never used is fresh already and is not touched."""
        columns, frames = self._ages[row].tolist()
        zero_row(self.state.lm, row, columns)
        zero_row(self.state.mimi, row, LATENTS * frames)
        self._openings.pop(row, None)
        self._ages[row] = 0
        self._hot[row] = self._wide[row] = False

    def fill(self, row: int) -> None:
        """Make a row as expensive as one whose windows are full, for who measures; reset it afterwards."""
        lm, mimi = self.state.lm, self.state.mimi
        columns = lm.temporal.rings.capacity
        frames = max(mimi.encoder.rings.capacity, mimi.decoder.rings.capacity)
        self._ages[row] = columns, frames
        lm.temporal.position[row] = columns
        mimi.encoder.position[row] = mimi.decoder.position[row] = LATENTS * frames

    @torch.inference_mode()
    def step(self, rows: NDArray[np.int64], pcm: Pcm) -> tuple[Pcm, NDArray[np.int64], NDArray[np.bool_]]:
        """One frame of the listed rows [n]: pcm int16 [n, 1920] -> pcm int16 [n, 1920], text [n], sound [n]."""
        count = len(rows)
        self._ages[rows] += 1
        columns, frames = self._ages[rows].max(axis=0).tolist()
        greedy, every_token = not self._hot[rows].any(), bool(self._wide[rows].any())
        hints = Hints(lanes=count, greedy=greedy, every_token=every_token, columns=columns, frames=frames)
        said = self._lanes_for(count).step(rows, pcm, hints)
        pcm_out, text, self.codes, sound = (part[:count].numpy().copy() for part in parts(said))
        return pcm_out, text, sound

    def _end_prompt(self, row: int, opening: Opening, hidden: Tensor) -> None:
        """Keep the row for the next call with this prompt, and let this one choose its first tokens."""
        self._model.say_last(opening.columns, row, self.state)
        columns, thought = opening.columns, self._model.lm.consider(hidden)
        entry = Prefilled(
            columns=columns,
            temporal=RowImage.take(self.state.lm.temporal, row, len(columns)),
            decoder=RowImage.take(self.state.mimi.decoder, row, LATENTS),
            thought=thought,
        )
        self.cache.put(opening.wish, entry)
        self._prompting.open(columns, thought, row)

    def _lanes_for(self, count: int) -> Lanes:
        return next(self._lanes[size] for size in self._lanes if size >= count)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Step every number of lanes once with no row, and prefill the default prompt in the scratch row."""
        for count in self._lanes:
            self._lanes[count].step(np.zeros(0, np.int64), np.zeros((0, FRAME_SAMPLES), np.int16), NO_HINTS)
        self.prefill(self.rows, self.begin(self.rows, Prompt()))


def load_runner(model: str, rows: int, device: str, kv_dtype: str = "auto") -> PersonaPlexRunner | EchoRunner:
    """Load `echo`, `tiny`, the directory of a checkpoint or a hub id, for so many rows.

    Raises CheckpointError with what is wrong with it, also where it would not fit into memory (before it is loaded),
    and RequestError for a device that is not there.
    """
    if model == "echo":
        return EchoRunner(rows)
    chosen = Placement.choose(model, device, kv_dtype)
    checkpoint, where, plan = chosen.checkpoint, chosen.device, chosen.plan()
    logger.info("memory of %s for %d rows: %s", checkpoint.name, rows, plan)
    plan.require(rows, available_bytes(where))
    if where.type == "cuda":
        torch.cuda.set_device(where.index or 0)  # where kernels are launched and graphs are captured
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    else:
        torch.set_num_threads(1)  # the other cores are the servers'; and a call's bits must not depend on their number
    prompter = Prompter(checkpoint, read_voices(checkpoint.directory, voice_model(checkpoint)))
    personaplex = PersonaPlex(load_lm(checkpoint, where, chosen.dtype), load_mimi(checkpoint, where))
    return PersonaPlexRunner(personaplex, prompter, rows, kv_dtype=chosen.kv_dtype)


def rows_in_memory(model: str, device: str, kv_dtype: str = "auto") -> int:
    """How many rows of this model fit into the memory that is free; raises CheckpointError if none does."""
    chosen = Placement.choose(model, device, kv_dtype)
    plan, available = chosen.plan(), available_bytes(chosen.device)
    plan.require(1, available)
    return plan.rows_in(available)


@dataclass(frozen=True, slots=True)
class Placement:
    """A checkpoint, where it is to run, and in which numbers."""

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype | None

    @classmethod
    def choose(cls, model: str, device: str, kv_dtype: str) -> Self:
        """Raises CheckpointError or RequestError."""
        where = _device(device)
        checkpoint = open_checkpoint(find_checkpoint(model))
        dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
        return cls(checkpoint, where, dtype, KV_DTYPES[kv_dtype])

    def plan(self) -> MemoryPlan:
        """What it will need of memory."""
        return plan_memory(self.checkpoint.lm, self.checkpoint.mimi, self.device, self.dtype, self.kv_dtype)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RequestError(f"a device is cpu, cuda or cuda:N, not {name!r}", param="device") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RequestError(f"there is no {name} here: torch sees {torch.cuda.device_count()} GPUs", param="device")
    return device
