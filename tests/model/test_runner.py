"""What keeps rows apart: the rules of the model's state, seen from the engine's side."""

import numpy as np
import pytest
import torch

from tests.small_model import KEYS, Call, assert_same, begin, row_state, small_runner, speech, talk
from webrtc_duplex.errors import RequestError
from webrtc_duplex.messages import Prompt
from webrtc_duplex.model.runner import PersonaPlexRunner, load_runner
from webrtc_duplex.model.streaming import tensors

PAST_WRAP = 2 * KEYS
PROMPT = Prompt(voice="low", text="3 14 15 9", seed=5)


def test_every_state_tensor_has_the_row_as_its_first_axis() -> None:
    runner = small_runner(rows=6)
    sizes = {name: tensor.shape[0] for name, tensor in tensors(runner.state)}
    assert set(sizes.values()) == {7}, "6 rows and the scratch row"
    assert len(sizes) > 20


def test_state_is_allocated_once_and_written_in_place() -> None:
    runner = small_runner(system=True)
    before = {name: tensor.data_ptr() for name, tensor in tensors(runner.state)}
    begin(runner, 1, PROMPT, columns=4)
    talk(runner, 1, speech(3, seed=1))
    begin(runner, 2, PROMPT)
    runner.reset(1)
    assert {name: tensor.data_ptr() for name, tensor in tensors(runner.state)} == before


def test_rows_not_listed_keep_every_bit_also_past_the_wrap() -> None:
    runner = small_runner()
    for row in range(4):
        begin(runner, row, Prompt(seed=row))
    talk(runner, 3, speech(PAST_WRAP, seed=1), others=[2])
    before = row_state(runner, 2), row_state(runner, 0)
    talk(runner, 3, speech(PAST_WRAP, seed=2), others=[1])
    assert_same(row_state(runner, 2), before[0])
    assert_same(row_state(runner, 0), before[1])


def test_a_row_that_joins_prefills_and_leaves_changes_no_other_row() -> None:
    runner = small_runner(system=True)
    begin(runner, 0, PROMPT)
    talk(runner, 0, speech(PAST_WRAP, seed=1))
    before = row_state(runner, 0)
    begin(runner, 1, Prompt(voice="high", text="1 2 3"), columns=3)
    begin(runner, 2, PROMPT)
    runner.reset(1)
    assert_same(row_state(runner, 0), before)


def test_a_reset_row_equals_a_fresh_one_past_the_wrap() -> None:
    used, fresh = small_runner(), small_runner()
    begin(used, 2, Prompt(seed=9))
    talk(used, 2, speech(PAST_WRAP, seed=1))
    used.reset(2)
    assert_same(row_state(used, 2), row_state(fresh, 2))
    for runner in (used, fresh):
        begin(runner, 2, Prompt(seed=4))
    assert talk(used, 2, speech(8, seed=2)).equals(talk(fresh, 2, speech(8, seed=2)))


def test_a_filled_row_reads_whole_windows_and_a_reset_makes_it_fresh_again() -> None:
    runner, fresh = small_runner(), small_runner()
    begin(runner, 1, Prompt(seed=4))
    runner.fill(1)
    talk(runner, 1, speech(1, seed=1))
    assert runner.state.lm.temporal.position[1] == KEYS + 1
    runner.reset(1)
    assert_same(row_state(runner, 1), row_state(fresh, 1))


def test_warm_up_leaves_no_trace() -> None:
    runner = small_runner(system=True)
    for name, tensor in tensors(runner.state):
        assert not tensor[:-1].any(), name


def call_of_row(row: int, others: list[int], rows: int = 15, joining: bool = False) -> Call:
    """The same call in some row among others, at 16 lanes."""
    runner = small_runner(rows=rows, lanes=[16])
    for other in others:
        begin(runner, other, Prompt(seed=100 + other))
    if others:
        talk(runner, others[0], speech(4, seed=50), others=others[1:])
    begin(runner, row, Prompt(seed=7))
    first = talk(runner, row, speech(PAST_WRAP, seed=3)[:9], others)
    if joining:
        begin(runner, others[0], Prompt(seed=1))
        runner.reset(others[1])
        others = others[:1]
    rest = talk(runner, row, speech(PAST_WRAP, seed=3)[9:], others)
    return Call(*(np.concatenate([getattr(part, name) for part in (first, rest)]) for name in ("pcm", "text", "codes")))


def test_a_call_is_the_same_alone_in_any_row_and_among_fourteen_others() -> None:
    alone = call_of_row(0, [])
    assert call_of_row(11, []).equals(alone)
    assert call_of_row(14, list(range(14))).equals(alone)
    assert call_of_row(3, [9, 12, 1]).equals(alone)


def test_a_call_is_the_same_while_neighbours_leave_and_join() -> None:
    assert call_of_row(3, [9, 12, 1], joining=True).equals(call_of_row(0, []))


def test_the_seed_makes_the_call() -> None:
    calls = []
    for seed in (1, 1, 2):
        runner = small_runner()
        begin(runner, 0, Prompt(seed=seed))
        calls.append(talk(runner, 0, speech(6, seed=1)))
    assert calls[0].equals(calls[1])
    assert not calls[0].equals(calls[2])


def test_a_greedy_call_does_not_depend_on_its_seed_nor_on_sampled_neighbours() -> None:
    def greedy(seed: int, others: list[int]) -> Call:
        runner = small_runner(lanes=[4])
        for other in others:
            begin(runner, other, Prompt(seed=other))
        begin(runner, 0, Prompt(seed=seed, text_temperature=0.0, audio_temperature=0.0))
        return talk(runner, 0, speech(6, seed=1), others)

    assert greedy(1, []).equals(greedy(2, []))
    assert greedy(1, []).equals(greedy(1, [2, 3]))


def test_a_lane_count_that_fits_is_chosen_and_rows_beyond_the_last_are_doubled_up_to() -> None:
    runner = small_runner(rows=9, lanes=[2, 4])
    rows = np.arange(9)
    for row in rows:
        begin(runner, int(row), Prompt())
    pcm, text, sound = runner.step(rows, speech(9, seed=1))
    assert pcm.shape == (9, 1920)
    assert text.shape == (9,)
    assert sound.all()


# ---- prompts


def test_prefill_in_any_chunks_leaves_the_same_call() -> None:
    calls = []
    for columns in (1000, 7, 1):
        runner = small_runner(system=True, cache_bytes=0)
        begin(runner, 1, PROMPT, columns)
        calls.append(talk(runner, 1, speech(8, seed=1)))
    assert np.array_equal(calls[0].codes, calls[1].codes)
    assert np.array_equal(calls[0].codes, calls[2].codes)
    assert np.array_equal(calls[0].text, calls[2].text)


def test_prefill_runs_at_most_the_columns_it_was_given() -> None:
    runner = small_runner(system=True)
    columns = runner.load_prompt(PROMPT)
    assert runner.begin(0, PROMPT) == columns
    assert runner.prefill(0, 5) == columns - 5
    assert runner.prefill(0, columns) == 0


def test_a_cached_prompt_joins_at_once_and_is_the_same_call() -> None:
    runner = small_runner(system=True)
    assert runner.begin(0, PROMPT) > 0
    runner.prefill(0, 1000)
    cold_state = row_state(runner, 0)
    cold = talk(runner, 0, speech(PAST_WRAP, seed=1))
    assert runner.begin(2, PROMPT) == 0
    assert_same(row_state(runner, 2), cold_state)
    assert talk(runner, 2, speech(PAST_WRAP, seed=1)).equals(cold)


def test_another_seed_joins_from_the_same_cached_prompt_and_is_another_call() -> None:
    runner = small_runner(system=True)
    begin(runner, 0, PROMPT)
    first = talk(runner, 0, speech(8, seed=1))
    other = Prompt(voice=PROMPT.voice, text=PROMPT.text, seed=PROMPT.seed + 1)
    assert runner.begin(1, other) == 0
    assert not talk(runner, 1, speech(8, seed=1)).equals(first)


def test_the_prompt_cache_is_bounded_and_drops_the_least_recently_used() -> None:
    runner = small_runner(system=True)
    entry = runner.cache.bytes  # the default prompt, from warming up
    texts = ["1 2", "3 4", "5 6"]
    runner = small_runner(system=True, cache_bytes=int(3.5 * entry))
    for text in texts[:2]:
        begin(runner, 0, Prompt(text=text))
    assert runner.begin(0, Prompt(text="1 2")) == 0, "used again, so that 3 4 and the default are older"
    begin(runner, 0, Prompt(text=texts[2]))
    assert runner.cache.bytes <= 3.5 * entry
    assert runner.begin(0, Prompt(text="1 2")) == 0
    assert runner.begin(0, Prompt()) > 0


def test_a_cache_without_room_keeps_nothing_and_every_call_prefills() -> None:
    runner = small_runner(system=True, cache_bytes=0)
    assert runner.cache.bytes == 0
    begin(runner, 0, PROMPT)
    assert runner.begin(1, PROMPT) > 0


def test_without_a_system_prompt_a_call_begins_at_once() -> None:
    runner = small_runner(system=False)
    assert runner.begin(0, Prompt()) == 0


def test_a_begun_row_that_is_reset_forgets_its_prefill() -> None:
    runner, fresh = small_runner(system=True), small_runner(system=True)
    runner.begin(0, PROMPT)
    runner.prefill(0, 5)
    runner.reset(0)
    assert_same(row_state(runner, 0), row_state(fresh, 0))


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (Prompt(text_temperature=-0.1), "text_temperature"),
        (Prompt(audio_temperature=float("nan")), "audio_temperature"),
        (Prompt(audio_temperature=9.0), "audio_temperature"),
        (Prompt(text_top_k=-1), "text_top_k"),
        (Prompt(audio_top_k=257), "audio_top_k"),
        (Prompt(voice="nobody"), "voice"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_the_row_as_it_was(prompt: Prompt, param: str) -> None:
    runner = small_runner()
    begin(runner, 0, Prompt())
    before = row_state(runner, 0)
    with pytest.raises(RequestError) as at_loading:
        runner.load_prompt(prompt)
    with pytest.raises(RequestError) as at_beginning:
        runner.begin(0, prompt)
    assert at_loading.value.param == at_beginning.value.param == param
    assert_same(row_state(runner, 0), before)


# ---- faults


def test_numbers_that_are_not_finite_end_their_row_only() -> None:
    def others_said(poisoned: bool) -> tuple[Call, bool]:
        runner = small_runner(lanes=[4])
        rows = np.array([0, 1, 2])
        for row in rows:
            begin(runner, int(row), Prompt(seed=int(row)))
        said, healthy = [], True
        for index, frame in enumerate(speech(8, seed=1)):
            if poisoned and index == 3:
                runner.state.lm.temporal.rings.layers[1].values.vectors[1, 0, 0, 0] = torch.nan
            pcm, text, sound = runner.step(rows, np.stack([frame] * 3))
            said.append((pcm[::2], text[::2], runner.codes[::2]))
            healthy = healthy and bool(sound[1])
            assert sound[0] and sound[2]
        return Call(*(np.stack(part) for part in zip(*said, strict=True))), healthy

    clean, healthy = others_said(poisoned=False)
    beside_a_fault, healthy_beside = others_said(poisoned=True)
    assert healthy and not healthy_beside
    assert beside_a_fault.equals(clean)


@pytest.mark.parametrize("where", ["encoder", "temporal", "decoder"])
def test_a_fault_is_seen_wherever_it_is_and_a_reset_cures_the_row(where: str) -> None:
    runner, fresh = small_runner(), small_runner()
    begin(runner, 1, Prompt(seed=3))
    talk(runner, 1, speech(3, seed=1))
    state = runner.state
    rings = {
        "encoder": state.mimi.encoder.rings,
        "temporal": state.lm.temporal.rings,
        "decoder": state.mimi.decoder.rings,
    }
    rings[where].layers[0].values.vectors[1, 0, 3, 0] = torch.nan  # a slot that the next frame does not overwrite
    _, _, sound = runner.step(np.array([1]), speech(1, seed=2))
    assert not sound[0]
    runner.reset(1)
    for one in (runner, fresh):
        begin(one, 1, Prompt(seed=3))
    assert talk(runner, 1, speech(5, seed=1)).equals(talk(fresh, 1, speech(5, seed=1)))


# ---- the shipped model


def test_the_tiny_model_speaks_whole_words_and_is_silent_before_it_does() -> None:
    runner = load_runner("tiny", rows=2, device="cpu")
    assert isinstance(runner, PersonaPlexRunner)
    begin(runner, 0, Prompt(seed=1))
    silence = np.zeros((40, 1920), np.int16)
    call = talk(runner, 0, silence)
    words = "".join(runner.card.pieces[token] for token in call.text)
    assert len(words.split()) >= 3, words
    assert np.abs(call.pcm[:2].astype(int)).max() < 1500
    assert np.abs(call.pcm.astype(int)).max() > 3000


def test_echo_returns_each_frame_as_heard_and_says_no_text() -> None:
    runner = load_runner("echo", rows=3, device="cpu")
    assert runner.load_prompt(Prompt()) == runner.begin(1, Prompt()) == 0
    heard = speech(2, seed=1)
    pcm, text, sound = runner.step(np.array([0, 2]), heard)
    assert np.array_equal(pcm, heard)
    assert pcm is not heard
    assert not text.any() and sound.all()
    with pytest.raises(RequestError):
        runner.load_prompt(Prompt(text="be brief"))
