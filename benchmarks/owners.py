"""Networks that their owners ship as Keras files: birds by their songs, and peptides.

Each has a builder, which takes the folder of the packages, and rows. Songs are made up, so that
files can be compared with the network, and nothing more. Peptides are those of the package.
"""

import csv
import functools
import pathlib
from typing import Any

import h5py
import keras
import numpy as np

layers, ops = keras.layers, keras.ops

BIRDNET = "birdnet-stm32"
"""`git clone https://github.com/birdnet-team/birdnet-stm32`, into the folder of the packages."""

# --- birds ----------------------------------------------------------------------------------------

_RATE = 22050  # samples in a second
_SAMPLES = 3 * _RATE
_WINDOW = 512
_FRAMES = 256
_MELS = 64
_BRANCHES = 3  # of the compression
_SONGS = (2000, 1000)  # to train, and to test


class AudioFrontendLayer(keras.layers.Layer):
    """Mel bands of a spectrogram, compressed piece by piece, as birdnet-stm32 computes them."""

    def __init__(self, **config: Any) -> None:
        super().__init__(name=config["name"])
        self.mel_mixer = layers.Conv2D(_MELS, 1, use_bias=False)
        one_by_one = functools.partial(layers.DepthwiseConv2D, 1)
        self._pwl_k0_dw = one_by_one(use_bias=False)
        self._pwl_shift_dws = [one_by_one() for _ in range(_BRANCHES)]
        self._pwl_k_dws = [one_by_one(use_bias=False) for _ in range(_BRANCHES)]

    def build(self, shape: Any) -> None:
        bins = 8 * -(-shape[1] // 8)  # the owner pads to multiples of 8
        self._padding = bins - shape[1]
        self.mel_mixer.build((None, 1, _FRAMES, bins))
        for layer in (self._pwl_k0_dw, *self._pwl_shift_dws, *self._pwl_k_dws):
            layer.build((None, 1, _FRAMES, _MELS))

    def call(self, spectrogram: Any) -> Any:
        # In front of the transposition: TensorFlow 2.21 with oneDNN fuses a padding of channels
        # with the convolution behind it, and then does not pad.
        x = ops.pad(spectrogram, ((0, 0), (0, self._padding), (0, 0), (0, 0)))
        x = ops.transpose(x, (0, 3, 2, 1))
        mel = ops.relu(self.mel_mixer(x))
        y = self._pwl_k0_dw(mel)
        branches = zip(self._pwl_shift_dws, self._pwl_k_dws, strict=True)
        for shift, slope in branches:
            y = y + slope(ops.relu(shift(mel)))
        return ops.transpose(y, (0, 3, 2, 1))


def birdnet(folder: pathlib.Path) -> keras.Model:
    """A hundred birds by three seconds of sound: depthwise convolutions, adds and ReLU6."""
    return keras.models.load_model(
        folder / BIRDNET / "checkpoints/birdnet_stm32n6_100.keras",
        custom_objects={"AudioFrontendLayer": AudioFrontendLayer},
        compile=False,
    )


def songs(training: bool) -> np.ndarray:
    """Spectrograms of made-up songs in noise; those to test have other tones and other noise."""
    rng = np.random.default_rng(int(training))
    rows = [
        _spectrogram(_song(rng, training)) for _ in range(_SONGS[not training])
    ]
    return np.stack(rows)[..., None].astype("float32")


def _song(rng: np.random.Generator, training: bool) -> np.ndarray:
    """Syllables of one bird, repeated, in colored noise."""
    sound = np.zeros(_SAMPLES)
    start = rng.uniform(0.0, 0.5)
    while start < 2.9:
        syllable = _syllable(rng, training)
        for _ in range(rng.integers(1, 8)):
            first = int(start * _RATE)
            piece = syllable[: _SAMPLES - first]
            sound[first : first + len(piece)] += piece
            start += 1.2 * len(syllable) / _RATE
            if start >= 2.9:
                break
        start += rng.uniform(0.05, 0.6)
    frequencies = 1 + np.arange(_SAMPLES // 2 + 1)
    color = frequencies ** rng.uniform(0.2, 1.0 if training else 0.8)
    noise = np.fft.irfft(
        np.fft.rfft(rng.normal(size=_SAMPLES)) / color, _SAMPLES
    )
    return sound + 10 ** rng.uniform(-3.0, -1.0) * noise / noise.std()


def _syllable(rng: np.random.Generator, training: bool) -> np.ndarray:
    """A tone that glides and trembles, with overtones."""
    seconds = rng.uniform(0.04, 0.35)
    t = np.arange(int(seconds * _RATE)) / _RATE
    low, high = rng.uniform(1200, 8000, 2)
    if training:
        pitch = low + (high - low) * t / seconds
    else:  # down and up again
        pitch = low + (high - low) * np.abs(2 * t / seconds - 1)
    pitch = pitch + rng.uniform(0, 400) * np.sin(
        2 * np.pi * rng.uniform(5, 60) * t
    )
    phase = 2 * np.pi * np.cumsum(pitch) / _RATE
    tone = sum(
        rng.uniform(0, 1) ** 2 / (k + 1) * np.sin((k + 1) * phase)
        for k in range(3)
    )
    envelope = np.sin(np.pi * t / seconds) ** rng.uniform(0.3, 2.0)
    return rng.uniform(0.1, 1.0) * envelope * tone


def _spectrogram(sound: np.ndarray) -> np.ndarray:
    """Magnitudes between 0 and 1, as the owner computes them: `(257, 256)`."""
    padded = np.pad(sound, _WINDOW // 2)
    step = _SAMPLES // _FRAMES
    first = step * np.arange(_FRAMES)[:, None]
    frames = padded[first + np.arange(_WINDOW)]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_WINDOW) / _WINDOW)
    magnitudes = np.abs(np.fft.rfft(frames * window)).T
    lowest = magnitudes.min()
    return (magnitudes - lowest) / (magnitudes.max() - lowest + 1e-10)


# --- peptides -------------------------------------------------------------------------------------

_ALLELE = "HLA-A*02:01"
_LENGTH = 9  # amino acids
_ALPHABET = "ACDEFGHIKLMNPQRSTVWYX"
_SURE = 0.9  # of the letter itself; the others share the rest
_WEAKEST = 50000.0  # nM, an affinity of 0
_PEPTIDES = 6000  # at most


def mhcnuggets(folder: pathlib.Path) -> keras.Model:
    """How well nine amino acids bind to a protein of the immune system: an LSTM."""
    model = keras.Sequential(
        [
            keras.Input((_LENGTH, len(_ALPHABET))),
            layers.LSTM(64, name="lstm_1"),
            layers.Dense(64, "tanh", name="dense_1"),
            layers.Dense(1, "sigmoid", name="dense_2"),
        ],
        name="mhcnuggets",
    )
    file = folder / "mhcnuggets/saves/production/HLA-A02:01_BA.h5"
    with h5py.File(file) as groups:
        for layer in model.layers:
            stored = groups[layer.name][layer.name]
            layer.set_weights(
                [stored[w.name + ":0"][()] for w in layer.weights]
            )
    return model


def peptides(
    training: bool, folder: pathlib.Path
) -> tuple[np.ndarray, np.ndarray]:
    """Peptides that were measured, and whether they bind; to train, those of other proteins.

    The label is of the network's protein, and -1 where it was measured for others alone.
    """
    file = folder / "mhcnuggets/data/production/mhcI/curated_training_data.csv"
    affinities: dict[str, float] = {}
    others: set[str] = set()
    with file.open(newline="") as lines:
        for line in csv.DictReader(lines):
            peptide = line["peptide"]
            if len(peptide) != _LENGTH or set(peptide) - set(_ALPHABET):
                continue
            if line["mhc"] != _ALLELE:
                others.add(peptide)
            elif line["measurement_type"] == "quantitative":
                strength = max(float(line["IC50(nM)"]), 1.0)
                affinities[peptide] = 1 - np.log(strength) / np.log(_WEAKEST)
    chosen = sorted(others - set(affinities)) if training else [*affinities]
    order = np.random.default_rng(int(training)).permutation(len(chosen))
    chosen = [chosen[k] for k in order[:_PEPTIDES]]
    binds = [
        int(affinities[peptide] > 0.5) if peptide in affinities else -1
        for peptide in chosen
    ]
    letters = np.array([[*peptide] for peptide in chosen])
    is_letter = letters[..., None] == np.array([*_ALPHABET])
    unsure = (1.0 - _SURE) / (len(_ALPHABET) - 1)
    rows = np.where(is_letter, _SURE, unsure).astype("float32")
    return rows, np.array(binds)
