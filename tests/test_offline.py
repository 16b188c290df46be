"""`webrtc-duplex offline`: from recordings to recordings, by the runner that serves calls."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.checkpoints import VOICES, personaplex_directory
from webrtc_duplex.audio import FRAME_S, FRAME_SAMPLES, Pcm
from webrtc_duplex.errors import EngineError, RequestError
from webrtc_duplex.messages import ModelCard, Prompt
from webrtc_duplex.model.wav import read_wav, to_pcm, write_wav
from webrtc_duplex.offline import Conversation, Job, Progress, Word, add_offline_command, converse, read_manifest, words


class Counting:
    """A runner whose row answers each frame with its number since `begin`, and says that number as its token."""

    def __init__(self, rows: int, faults: tuple[int, ...] = ()) -> None:
        self.rows = rows
        self.card = ModelCard("counting", (), None, True, 100, tuple(f" {n}" for n in range(100)))
        self.codes: NDArray[np.int64] = np.zeros((0, 8), np.int64)
        self.lanes: list[int] = []
        self.begun: list[tuple[int, Prompt]] = []
        self._faults = faults
        self._next: dict[int, int] = {}
        self._left: dict[int, int] = {}

    def load_prompt(self, prompt: Prompt) -> int:
        if prompt.voice == "Nobody":
            raise RequestError("the model has no voice 'Nobody'")
        return 3

    def begin(self, row: int, prompt: Prompt) -> int:
        self.begun.append((row, prompt))
        self._left[row] = 3
        return 3

    def prefill(self, row: int, columns: int) -> int:
        self._left[row] -= min(2, columns)
        if self._left[row] <= 0:
            self._next[row] = 0
        return max(0, self._left[row])

    def reset(self, row: int) -> None:
        self._next.pop(row)

    def fill(self, row: int) -> None:
        raise AssertionError("nobody measures here")

    def step(self, rows: NDArray[np.int64], pcm: Pcm) -> tuple[Pcm, NDArray[np.int64], NDArray[np.bool_]]:
        self.lanes.append(len(rows))
        numbers = np.array([self._next[row] for row in rows.tolist()])
        for row in rows.tolist():
            self._next[row] += 1
        self.codes = np.repeat(numbers[:, None], 8, axis=1)
        said = np.repeat(numbers[:, None], FRAME_SAMPLES, axis=1).astype(np.int16)
        return said, numbers, ~np.isin(numbers, self._faults)


def recording(path: Path, samples: int) -> Path:
    write_wav(path, np.arange(samples).astype(np.int16))
    return path


def job(path: Path, voice: str | None = None) -> Job:
    return Job(path, None, path.with_suffix(".json"), Prompt(voice=voice))


def run(*arguments: str | Path | int) -> int:
    parser = argparse.ArgumentParser()
    add_offline_command(parser.add_subparsers(required=True))
    options = parser.parse_args(["offline", *map(str, arguments)])
    return int(options.run(options))


# ---- the loop


def test_the_answer_is_as_long_as_the_recording_and_frames_stand_side_by_side(tmp_path: Path) -> None:
    ((_, call),) = converse([job(recording(tmp_path / "a.wav", 2 * FRAME_SAMPLES + 5))], Counting(1))
    assert isinstance(call, Conversation)
    assert len(call.answer) == 2 * FRAME_SAMPLES + 5
    assert call.answer[::FRAME_SAMPLES].tolist() == [0, 1, 2]
    assert (call.tokens, [codes[7] for codes in call.codes]) == ([0, 1, 2], [0, 1, 2])


def test_as_many_calls_run_at_once_as_there_are_rows_and_the_next_takes_a_free_one(tmp_path: Path) -> None:
    lengths = (1, 3, 2, 2)
    jobs = [job(recording(tmp_path / f"{n}.wav", frames * FRAME_SAMPLES)) for n, frames in enumerate(lengths)]
    runner = Counting(2)
    stepped: list[int] = []
    outcomes = list(converse(jobs, runner, stepped.append))
    assert runner.lanes == [2, 2, 2, 1, 1]
    assert sum(stepped) == sum(lengths)
    assert [row for row, _ in runner.begun] == [0, 1, 0, 0]
    for done, call in outcomes:
        assert isinstance(call, Conversation)
        assert call.tokens == list(range(lengths[int(done.input.stem)]))


def test_each_call_is_asked_with_its_own_prompt(tmp_path: Path) -> None:
    jobs = [job(recording(tmp_path / f"{name}.wav", 10), voice=name) for name in ("A", "B")]
    runner = Counting(1)
    list(converse(jobs, runner))
    assert [prompt.voice for _, prompt in runner.begun] == ["A", "B"]


def test_a_call_that_cannot_begin_takes_nobody_along(tmp_path: Path) -> None:
    good = job(recording(tmp_path / "good.wav", 3 * FRAME_SAMPLES))
    bad = [job(tmp_path / "missing.wav"), job(recording(tmp_path / "voice.wav", 10), voice="Nobody")]
    outcomes = {done.input.stem: outcome for done, outcome in converse([bad[0], good, bad[1]], Counting(2))}
    assert isinstance(outcomes["missing"], RequestError) and isinstance(outcomes["voice"], RequestError)
    assert isinstance(outcomes["good"], Conversation)


def test_numbers_that_are_not_finite_end_that_call_and_its_row_goes_on(tmp_path: Path) -> None:
    jobs = [job(recording(tmp_path / f"{n}.wav", frames * FRAME_SAMPLES)) for n, frames in enumerate((4, 2))]
    outcomes = [outcome for _, outcome in converse(jobs, Counting(1, faults=(2,)))]
    assert isinstance(outcomes[0], EngineError) and "not finite at 0.16 s" in outcomes[0].message
    assert isinstance(outcomes[1], Conversation) and outcomes[1].tokens == [0, 1]


def test_words_begin_with_a_space_and_last_to_the_end_of_their_last_piece() -> None:
    pieces = ("", " hel", "lo", ",", " world", " ")
    said = words([0, 1, 2, 3, 0, 5, 4], pieces)
    assert said == [Word("hello,", FRAME_S, 4 * FRAME_S), Word("world", 6 * FRAME_S, 7 * FRAME_S)]


# ---- manifests


def test_a_manifest_names_paths_from_its_own_folder_and_prompts_of_its_own(tmp_path: Path) -> None:
    line = {"input": "a.wav", "output": "out/a.wav", "instructions": "be kind", "seed": 7, "text_temperature": 0}
    (tmp_path / "list.jsonl").write_text(json.dumps(line) + "\n\n" + json.dumps({"input": "b.wav", "text": "b.json"}))
    first, second = read_manifest(tmp_path / "list.jsonl", Prompt(voice="NATF0", seed=1))
    assert first.input == tmp_path / "a.wav" and first.output == tmp_path / "out" / "a.wav" and first.text is None
    assert first.prompt == Prompt(voice="NATF0", text="be kind", seed=7, text_temperature=0)
    assert second.prompt == Prompt(voice="NATF0", seed=1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "names no input"),
        ("{", r"list\.jsonl:1 is no JSON"),
        ('{"output": "a.wav"}', r'list\.jsonl:1 must be a table with an "input"'),
        ('{"input": "a.wav", "output": "b.wav"}\n{"input": "a.wav"}', r"list\.jsonl:2 asks for nothing"),
        (
            '{"input": "a.wav", "output": "b.wav", "voise": "A"}',
            "says 'voise', which is neither a path nor of a prompt",
        ),
        ('{"input": "a.wav", "output": "b.wav", "seed": "A"}', "seed cannot be 'A'"),
    ],
)
def test_a_manifest_that_is_wrong_is_refused_with_its_line(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "list.jsonl").write_text(text)
    with pytest.raises(RequestError, match=sentence):
        read_manifest(tmp_path / "list.jsonl", Prompt())


def test_a_missing_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot read .*list\.jsonl"):
        read_manifest(tmp_path / "list.jsonl", Prompt())


# ---- the bar


def test_the_bar_tells_share_sound_and_speed() -> None:
    moments = iter([0.0, 2.0, 2.0])
    bar = Progress(100, lambda: next(moments))
    bar.advance(50)
    assert bar.line() == f"[{'#' * 20}{' ' * 20}]  50%  4.0 of 8.0 s  2.0 x real time "


# ---- the whole, with a PersonaPlex directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return personaplex_directory(tmp_path_factory.mktemp("personaplex"))


@pytest.fixture
def spoken(tmp_path: Path) -> Path:
    noise = np.random.default_rng(0).normal(0, 3000, 12 * FRAME_SAMPLES - 100)
    write_wav(tmp_path / "in.wav", noise.astype(np.int16))
    return tmp_path / "in.wav"


def test_one_call_is_written_as_sound_words_tokens_and_codes(directory: Path, spoken: Path, tmp_path: Path) -> None:
    output, text = tmp_path / "made" / "out.wav", tmp_path / "made" / "out.json"
    asked = ("--voice", VOICES[1], "--prompt", "be kind", "--seed", "3", "--tokens")
    assert run("--model", directory, "--input", spoken, "--output", output, "--text", text, *asked) == 0
    assert len(read_wav(output)) == 12 * FRAME_SAMPLES - 100
    told = json.loads(text.read_text())
    assert told["prompt"]["voice"] == VOICES[1] and told["prompt"]["text"] == "be kind" and told["prompt"]["seed"] == 3
    assert len(told["tokens"]) == len(told["codes"]) == 12 and {len(codes) for codes in told["codes"]} == {8}
    assert told["text"].split() == [chunk["text"] for chunk in told["chunks"]]
    for chunk in told["chunks"]:
        start, end = chunk["timestamp"]
        assert 0 <= start < end <= 12 * FRAME_S


def test_a_call_of_a_manifest_is_what_it_is_alone(directory: Path, spoken: Path, tmp_path: Path) -> None:
    longer = recording(tmp_path / "longer.wav", 20 * FRAME_SAMPLES)
    lines = [
        {"input": str(path), "output": f"{n}.wav", "seed": seed, "voice": voice}
        for n, (path, seed, voice) in enumerate(
            [(longer, 1, VOICES[0]), (spoken, 2, VOICES[1]), (spoken, 3, VOICES[0])]
        )
    ]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert run("--model", directory, "--manifest", tmp_path / "list.jsonl", "--rows", 2) == 0
    alone = ("--input", spoken, "--output", tmp_path / "alone.wav", "--seed", 2, "--voice", VOICES[1])
    assert run("--model", directory, *alone) == 0
    np.testing.assert_array_equal(to_pcm(read_wav(tmp_path / "1.wav")), to_pcm(read_wav(tmp_path / "alone.wav")))
    assert not np.array_equal(to_pcm(read_wav(tmp_path / "1.wav")), to_pcm(read_wav(tmp_path / "2.wav")))


def test_a_bad_call_is_told_and_the_exit_code_says_so(
    directory: Path, spoken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"input": "missing.wav", "output": "a.wav"}, {"input": str(spoken), "output": "b.wav"}]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert run("--model", directory, "--manifest", tmp_path / "list.jsonl") == 1
    assert "missing.wav: No such file" in capsys.readouterr().err
    assert (tmp_path / "b.wav").exists()


def test_an_answer_that_cannot_be_written_is_told_and_takes_nobody_along(
    directory: Path, spoken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    places = ["folder", f"{spoken.name}/under.wav", "b.wav"]
    lines = [{"input": str(spoken), "output": place} for place in places]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert run("--model", directory, "--manifest", tmp_path / "list.jsonl") == 1
    told = capsys.readouterr().err
    assert told.count("cannot write") == 2 and "Is a directory" in told
    assert (tmp_path / "b.wav").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "name an --input"),
        (("--input", "a.wav", "--output", "b.wav", "--rows", "0"), "rows must be between 1 and"),
        (("--input", "a.wav", "--output", "b.wav", "--device", "gpu"), "device must be cpu"),
        (("--input", "a.wav"), "the command line asks for nothing"),
        (("--input", "a.wav", "--output", "b.wav", "--model", "echo"), "echo has nothing of its own to say"),
    ],
)
def test_a_command_line_that_is_wrong_is_refused(arguments: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        run(*arguments)
