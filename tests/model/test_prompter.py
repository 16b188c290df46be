"""A caller's wish made into a prompt, or refused with a sentence."""

from dataclasses import replace

import pytest
import torch

from tests.checkpoints import LOOP_PACK, VOICES, personaplex_directory
from webrtc_duplex.errors import CheckpointError, RequestError
from webrtc_duplex.messages import Prompt
from webrtc_duplex.model.checkpoint import Checkpoint, initial_embedding, open_checkpoint
from webrtc_duplex.model.prompter import Prompter, Wish, wrapped
from webrtc_duplex.model.prompts import GAP_FRAMES
from webrtc_duplex.model.voices import VoiceModel, VoiceShelf, read_voices


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(personaplex_directory(tmp_path_factory.mktemp("personaplex")))


@pytest.fixture(scope="module")
def prompter(checkpoint: Checkpoint) -> Prompter:
    model = VoiceModel(checkpoint.lm, initial_embedding(checkpoint), lambda frames: frames)
    return Prompter(checkpoint, read_voices(checkpoint.directory, model))


@pytest.fixture(scope="module")
def without_prompt(checkpoint: Checkpoint) -> Prompter:
    return Prompter(replace(checkpoint, system_prompt=False, default_text=""), VoiceShelf({}, {}))


def test_the_card_names_voices_and_pieces(prompter: Prompter) -> None:
    card = prompter.card()
    assert (card.voices, card.default_voice, card.takes_text) == (VOICES, VOICES[0], True)
    assert len(card.pieces) == LOOP_PACK["lm"]["text_card"]
    assert card.pieces[:4] == ("", "", "", "")
    assert " a" in card.pieces


def test_voice_and_text_make_the_columns(prompter: Prompter) -> None:
    text = "you are wise"
    tokens = prompter.checkpoint.tokenizer.encode("<system> you are wise <system>")
    columns = prompter.columns(prompter.wish(Prompt(voice="NATM0", text=text)))
    assert columns.embeddings is not None
    start = len(columns.embeddings) + 1 + GAP_FRAMES
    assert columns.tokens[start : start + len(tokens), 0].tolist() == tokens
    assert len(columns) == start + len(tokens) + GAP_FRAMES


def test_each_voice_has_its_own_columns(prompter: Prompter) -> None:
    first, second = (prompter.columns(prompter.wish(Prompt(voice=voice))).embeddings for voice in VOICES)
    assert first is not None and second is not None
    assert not torch.equal(first, second)


def test_an_empty_text_leaves_the_gaps_alone(prompter: Prompter) -> None:
    columns = prompter.columns(prompter.wish(Prompt(text="  ")))
    assert len(columns) == 9 + 2 * GAP_FRAMES
    assert columns.tokens[9:, 0].tolist() == [3] * 12


def test_who_wishes_nothing_gets_the_models_defaults(checkpoint: Checkpoint, prompter: Prompter) -> None:
    ours = Prompter(replace(checkpoint, default_voice="NATM0", default_text="be kind"), prompter.shelf)
    assert ours.wish(Prompt()) == Wish("NATM0", "be kind")
    assert ours.wish(Prompt(text="")) == Wish("NATM0", "")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("  be kind \n", "<system> be kind <system>"),
        ("<system> be kind <system>", "<system> be kind <system>"),
        ("<system> be kind", "<system> <system> be kind <system>"),
    ],
)
def test_a_text_is_wrapped_in_system_tags_once(text: str, wanted: str) -> None:
    assert wrapped(text) == wanted


def test_a_text_longer_than_half_the_window_is_refused_with_both_numbers(prompter: Prompter) -> None:
    wish = prompter.wish(Prompt(text="word " * 10_000))
    with pytest.raises(RequestError, match=r"is \d{5} tokens long, and may be 99: half of the model's window of 199"):
        prompter.columns(wish)


def test_a_text_of_exactly_half_the_window_is_taken(checkpoint: Checkpoint, prompter: Prompter) -> None:
    tokens = len(checkpoint.tokenizer.encode(wrapped("you are wise")))
    for keys, taken in ((2 * tokens, True), (2 * tokens - 1, False)):
        ours = Prompter(replace(checkpoint, lm=replace(checkpoint.lm, keys=keys)), prompter.shelf)
        wish = ours.wish(Prompt(text="you are wise"))
        if taken:
            ours.columns(wish)
        else:
            with pytest.raises(RequestError, match=f"may be {tokens - 1}"):
                ours.columns(wish)


def test_no_text_that_would_be_taken_is_longer_than_the_card_allows(prompter: Prompter) -> None:
    longest = max(range(60), key=lambda token: len(prompter.card().pieces[token]))
    assert len(prompter.card().pieces[longest]) * prompter.max_tokens == prompter.card().max_text_chars


def test_an_unknown_voice_is_refused(prompter: Prompter) -> None:
    with pytest.raises(RequestError, match=r"no voice 'Nobody' \(NATF0, NATM0\)"):
        prompter.columns(prompter.wish(Prompt(voice="Nobody")))


def test_a_default_voice_that_is_not_there_is_a_fault_of_the_checkpoint(checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match="has no voice 'Z', its default"):
        Prompter(replace(checkpoint, default_voice="Z"), VoiceShelf({}, {}))


def test_a_model_without_prompt_starts_on_the_bare_initial_column(without_prompt: Prompter) -> None:
    columns = without_prompt.columns(without_prompt.wish(Prompt()))
    assert columns.tokens.tolist() == [[60] + [2048] * 16]
    assert (without_prompt.card().takes_text, without_prompt.card().voices) == (False, ())


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [(Prompt(text="be kind"), "takes no text prompt"), (Prompt(voice="NATF0"), "one voice and no choice")],
)
def test_a_model_without_prompt_refuses_what_it_cannot_obey(
    without_prompt: Prompter, prompt: Prompt, sentence: str
) -> None:
    with pytest.raises(RequestError, match=sentence):
        without_prompt.wish(prompt)
