"""Rows of the networks of packages.py: files, pieces of pictures, faces and speech.

Each function takes whether the rows are to train. The others come from other packages, pictures,
voices and texts.
"""

import functools
import hashlib
import importlib
import inspect
import io
import json
import os
import pathlib
import pkgutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from packages import BEFORE, FETCHED, MAGIKA, PIECE, STEPS, onet

ops = keras.ops

# --- files ----------------------------------------------------------------------------------------

_FILES = 6000  # at most
_FILES_OF_ENDING = 12  # of a package
_SMALLEST, _LARGEST = 16, 5e7  # bytes of a file
_ENDS = 1024  # bytes of its beginning and of its end
_READ = 4096  # bytes of which white space goes
_PADDING = 256


def bytes_of_files(training: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rows of magika, and their types by the files' endings, -1 where these do not say it.

    At most 12 files of each ending of a package; packages are of one side.
    """
    rng = np.random.default_rng(0)
    types_of = _types()
    rows = []
    types = []
    for folder in _folders():
        if (_digest(folder.name) % 2 == 0) == training:
            continue
        for ending, paths in _files_by_ending(folder).items():
            chosen = rng.permutation(len(paths))[:_FILES_OF_ENDING]
            for number in chosen:
                rows.append(_magika_row(paths[number]))
                types.append(types_of.get(ending[1:], -1))
    order = rng.permutation(len(rows))[:_FILES]
    return np.stack(rows)[order], np.array(types)[order]


def _folders() -> list[pathlib.Path]:
    """The folders of installed packages."""
    roots = [pathlib.Path(entry) for entry in sys.path]
    roots += [pathlib.Path("/usr/share"), pathlib.Path("/usr/include")]
    folders = set()
    for root in roots:
        if root.is_dir():
            folders |= {path for path in root.iterdir() if path.is_dir()}
    return sorted(folders)


def _files_by_ending(folder: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    files: dict[str, list[pathlib.Path]] = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.is_symlink():
            continue
        if _SMALLEST <= path.stat().st_size < _LARGEST:
            files.setdefault(path.suffix, []).append(path)
    return files


def _types() -> dict[str, int]:
    """The class of each ending that belongs to one type only, by magika's own list."""
    config = FETCHED / MAGIKA.replace("model.onnx", "config.min.json")
    classes = json.loads(config.read_text())["target_labels_space"]
    table = FETCHED / "magika/config/content_types_kb.min.json"
    types_of: dict[str, list[str]] = {}
    for name, entry in json.loads(table.read_text()).items():
        for ending in entry["extensions"]:
            types_of.setdefault(ending, []).append(name)
    numbers = {}
    for ending, names in types_of.items():
        if len(names) == 1 and names[0] in classes:
            numbers[ending] = classes.index(names[0])
    return numbers


def _digest(name: str) -> int:
    return int(hashlib.sha1(name.encode()).hexdigest(), 16)


def _magika_row(path: pathlib.Path) -> np.ndarray:
    """The beginning and the end of a file, without white space around, as magika reads it."""
    row = np.full(2 * _ENDS, _PADDING, np.int32)
    with path.open("rb") as stream:
        beginning = stream.read(_READ).lstrip()[:_ENDS]
        stream.seek(-min(_READ, path.stat().st_size), os.SEEK_END)
        end = stream.read().rstrip()[-_ENDS:]
    row[: len(beginning)] = np.frombuffer(beginning, np.uint8)
    row[len(row) - len(end) :] = np.frombuffer(end, np.uint8)
    return row


# --- pieces of pictures ---------------------------------------------------------------------------

_TRAINING_PICTURES = (
    "coffee",
    "chelsea",
    "camera",
    "hubble_deep_field",
    "retina",
    "color",
    "page",
    "motorcycle_left",
)
_TEST_PICTURES = ("astronaut", "rocket", "coins", "ihc", "brick")
_PIECES = 500  # of a picture
_PIECES_OF_SMALL = 12
_SMALL = 100  # pixels; such a picture is a face, or none
_PATCHES = 6000  # at most
_MEAN, _SCALE = 127.5, 128  # of the inputs of mtcnn
_GRAY = (0.299, 0.587, 0.114)


def patches(size: int) -> Callable[[bool], np.ndarray]:
    """Rows of mtcnn: pieces of images, a third of them faces as its last network sees it."""
    return functools.partial(_patches, size)


def _patches(size: int, training: bool) -> np.ndarray:
    pieces = _pieces(training)
    is_face = _are_faces(pieces)
    rng = np.random.default_rng(1)
    others = rng.permutation(np.flatnonzero(~is_face))[: 2 * is_face.sum()]
    both = np.concatenate([np.flatnonzero(is_face), others])
    chosen = rng.permutation(both)[:_PATCHES]
    sized = ops.image.resize(pieces[chosen], (size, size), antialias=True)
    return (np.asarray(sized) - _MEAN) / _SCALE


def faces(training: bool) -> np.ndarray:
    """Rows of fer: the pieces of images that O-Net takes for faces, gray, of 64 x 64 pixels."""
    pieces = _pieces(training)
    gray = pieces[_are_faces(pieces)] @ np.array(_GRAY, "float32")
    sized = ops.image.resize(gray[..., None], (64, 64), antialias=True)
    shuffled = np.random.default_rng(2).permutation(np.asarray(sized))
    return 2.0 * (shuffled / 255.0 - 0.5)


def _are_faces(pieces: np.ndarray) -> np.ndarray:
    """Whether O-Net takes a piece for a face."""
    inputs = (pieces - _MEAN) / _SCALE
    *_, answers = onet().predict(inputs, batch_size=256, verbose=0)
    return answers[:, 1] > 0.5


def _pieces(training: bool) -> np.ndarray:
    """Squares of pictures, of 48 x 48 pixels, darker and brighter."""
    from PIL import Image

    rng = np.random.default_rng(0)
    pieces = []
    for picture in _pictures(training):
        shortest = min(picture.size)
        is_small = shortest < _SMALL
        count = _PIECES_OF_SMALL if is_small else _PIECES
        least = 0.7 if is_small else min(0.5, 24 / shortest)
        for _ in range(count):
            side = int(shortest * np.exp(rng.uniform(np.log(least), 0.0)))
            left, top = (rng.integers(size - side + 1) for size in picture.size)
            box = (left, top, left + side, top + side)
            square = picture.resize((48, 48), Image.Resampling.BILINEAR, box)
            brightness = rng.uniform(0.7, 1.1)
            pieces.append(np.asarray(square, "float32") * brightness)
    return np.clip(np.stack(pieces), 0, 255)


def _pictures(training: bool) -> list[Any]:
    """Pictures of scikit-image, of face-recognition to train and of Matplotlib to test."""
    from PIL import Image

    folder = FETCHED / "skimage/data"
    names = _TRAINING_PICTURES if training else _TEST_PICTURES
    files: list[Any] = [next(folder.glob(f"{name}.*")) for name in names]
    files += _more_files(training)
    pictures = [Image.open(file).convert("RGB") for file in files]
    for picture in pictures:
        picture.thumbnail((600, 600))
    small = np.load(folder / "lfw_subset.npy")[0 if training else 1 :: 2]
    gray = (255 * small / small.max()).astype("uint8")
    return pictures + [Image.fromarray(face).convert("RGB") for face in gray]


def _more_files(training: bool) -> Iterator[Any]:
    import matplotlib.cbook

    if not training:
        yield matplotlib.cbook.get_sample_data(
            "grace_hopper.jpg", asfileobj=False
        )
        return
    source = next(FETCHED.glob("face_recognition-*.tar.gz"))
    with tarfile.open(source) as archive:
        for name in archive.getnames():
            if "test_images" in name and name.endswith(".jpg"):
                content = archive.extractfile(name)
                assert content is not None
                yield io.BytesIO(content.read())


# --- speech ---------------------------------------------------------------------------------------

_TRAINING_VOICES = (
    "en-us",
    "de",
    "fr",
    "es",
    "it",
    "pt",
    "pl",
    "ru",
    "cmn",
    "hi",
    "en-gb+f2",
    "de+f3",
    "fr+m5",
)
_TEST_VOICES = (
    "en-gb",
    "nl",
    "sv",
    "cs",
    "tr",
    "fi",
    "ja",
    "en-us+f4",
    "nl+m3",
    "sv+f1",
)
_SENTENCES = (600, 400)  # to train, and to test
_LETTERS = 80  # of a sentence
_LOUD = 0.02  # of a sample of speech
_RATE = 16_000  # samples in a second
_NO_TEXT = ("antigravity", "this", "idlelib")  # they act when they are imported
_TONE = 4000  # samples of a tone


def sounds(training: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rows of silero: speech of espeak-ng with pauses, in noise; other voices and texts to test.

    And whether each piece has speech, which is known before the noise comes.
    """
    rng = np.random.default_rng(int(training))
    texts = _texts()[0 if training else 1 :: 2]
    voices = _TRAINING_VOICES if training else _TEST_VOICES
    rows = []
    is_speech = []
    for _ in range(_SENTENCES[not training]):
        speech = _sentence(rng, voices, texts)
        loudness = 10 ** rng.uniform(-1.5, 0)
        sound = speech * loudness + _noise(len(speech), rng)
        silence = np.zeros(BEFORE, "float32")
        sound = np.concatenate([silence, sound])
        clean = np.concatenate([np.zeros(BEFORE), speech])
        row_length = STEPS * PIECE
        for start in range(0, len(sound) - BEFORE - row_length + 1, row_length):
            starts = start + PIECE * np.arange(STEPS)
            index = starts[:, None] + np.arange(BEFORE + PIECE)
            rows.append(sound[index])
            loudest = np.abs(clean[index[:, BEFORE:]]).max(axis=1)
            is_speech.append(loudest > _LOUD)
    order = rng.permutation(len(rows))
    stacked = np.stack(rows)[order].astype("float32")
    return stacked, np.stack(is_speech)[order].astype(int)


def _texts() -> list[str]:
    """The docstrings of Python's standard library."""
    texts = []
    for module in pkgutil.iter_modules([os.path.dirname(os.__file__)]):
        name = module.name
        if name in _NO_TEXT or name.startswith("_"):
            continue
        text = inspect.getdoc(importlib.import_module(name))
        if text and len(text) > _LETTERS:
            texts.append(text)
    return texts


def _sentence(
    rng: np.random.Generator, voices: tuple[str, ...], texts: list[str]
) -> np.ndarray:
    """A piece of a text, spoken, with a pause in front and behind."""
    voice = rng.choice(voices)
    text = rng.choice(texts)
    start = rng.integers(max(len(text) - _LETTERS, 1))
    speed = rng.integers(110, 240)
    pitch = rng.integers(99)
    speech = _spoken(text[start : start + _LETTERS], voice, speed, pitch)
    before = np.zeros(rng.integers(4000, 24000), "float32")
    after = np.zeros(rng.integers(4000, 24000), "float32")
    return np.concatenate([before, speech, after])


def _spoken(text: str, voice: str, speed: int, pitch: int) -> np.ndarray:
    """A text as espeak-ng says it."""
    from scipy import signal

    command = ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch)]
    command += ["--stdout", "--", text]
    content = subprocess.run(command, capture_output=True, check=True).stdout
    # Whole samples of two bytes behind a header of 44.
    samples = np.frombuffer(content[44 : len(content) // 2 * 2], "<i2") / 32768
    # From 22,050 to 16,000 Hz.
    return signal.resample_poly(samples, 320, 441).astype("float32")


def _noise(count: int, rng: np.random.Generator) -> np.ndarray:
    """Noise whose power falls with a power of the frequency, and sometimes tones."""
    frequencies = 1 + np.arange(count // 2 + 1)
    spectrum = np.fft.rfft(rng.normal(size=count))
    spectrum = spectrum / frequencies ** rng.uniform(0, 1)
    noise = np.fft.irfft(spectrum, count)
    noise /= noise.std()
    if rng.random() < 0.3:
        lowest = rng.uniform(80, 2000)
        steps = rng.integers(0, 8, count // _TONE + 1)
        pitches = np.repeat(lowest * (1 + steps / 12), _TONE)[:count]
        noise += np.sin(2 * np.pi * np.cumsum(pitches) / _RATE)
    return 10 ** rng.uniform(-3.5, -1.2) * noise
