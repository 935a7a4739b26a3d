"""SpliceAI, which finds the ends of exons in DNA, with human DNA of Debian's packages.

`apt-get install hisat2 augustus-doc` has the DNA; the package of the network says where its exons
end, which labels the rows that test.
"""

import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import keras
import numpy as np

CONTEXT = 10_000  # bases around a row's own, half on each side
PIECE = 5_000  # bases that a row answers
_CALLED = 0.5  # least probability of a site
_BASES = "ACGT"
_NONE, _ACCEPTOR, _DONOR = range(3)
_BATCH = 4
_LENGTH = 1_000_000  # bases of a region at most


class Region(NamedTuple):
    """A piece of a chromosome.

    Attributes:
        file: str. Its FASTA file.
        chromosome: str, as in the annotation.
        start: int. The number of bases before it.
        assembly: str. The annotation that fits; empty where none is known to fit.
    """

    file: str
    chromosome: str = ""
    start: int = 0
    assembly: str = ""


_EXAMPLES = "/usr/share/doc/augustus"
TRAINING = (
    Region("/usr/share/doc/hisat2/examples/reference/22_20-21M.fa"),
    Region(f"{_EXAMPLES}/tutorial/data/chr3.42M.fa"),
)
TEST = (
    Region(
        f"{_EXAMPLES}/tutorial-cgp/data/genomes/hg38.fa",
        chromosome="16",
        start=186_963,
        assembly="grch38",
    ),
    Region(f"{_EXAMPLES}/tutorial/data/chr4.103M.fa"),
)


def spliceai(folder: pathlib.Path) -> keras.Model:
    """For each base the probabilities of no site, an acceptor and a donor: dilated convolutions."""
    file = folder / "spliceai/models/spliceai1.h5"
    shipped = keras.models.load_model(file, compile=False)
    bases = keras.Input((CONTEXT + PIECE, len(_BASES)), name="bases")
    model = keras.models.clone_model(shipped, input_tensors=[bases])
    model.set_weights(shipped.get_weights())
    return model


def pieces(
    training: bool, folder: pathlib.Path
) -> tuple[np.ndarray, np.ndarray]:
    """Pieces of both strands, and the site of each of their bases: -1 where that is unknown.

    Pieces in which the network calls no site, and the annotation has none, are left out.
    """
    model = spliceai(folder)
    rows = []
    labels = []
    for region in TRAINING if training else TEST:
        for row, sites in _pieces_of(region, folder):
            rows.append(row)
            labels.append(sites)
    stacked = np.stack(rows)
    sites = np.stack(labels)
    answers = model.predict(stacked, batch_size=_BATCH, verbose=0)
    is_used = called(answers).any(axis=1) | (sites > _NONE).any(axis=1)
    order = np.random.default_rng(0).permutation(np.flatnonzero(is_used))
    return stacked[order], sites[order]


def _pieces_of(
    region: Region, folder: pathlib.Path
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The pieces of a region, on both strands, with unknown bases beyond its ends."""
    lines = pathlib.Path(region.file).read_text().splitlines()
    sequence = "".join(lines[1:]).upper()
    letters = np.array([*sequence[:_LENGTH]])
    bases = (letters[:, None] == np.array([*_BASES])).astype("float32")
    for strand in ("+", "-"):
        sites = np.full(len(bases), -1)
        if region.assembly:
            sites = _sites(region, strand, len(bases), folder)
        if strand == "-":
            # The complement: A and T, C and G change places.
            bases = bases[::-1, ::-1]
            sites = sites[::-1]
        margin = CONTEXT // 2
        padded = np.pad(bases, ((margin, margin), (0, 0)))
        for start in range(0, len(bases) - PIECE + 1, PIECE):
            row = padded[start : start + CONTEXT + PIECE]
            yield row, sites[start : start + PIECE]


def _sites(
    region: Region, strand: str, length: int, folder: pathlib.Path
) -> np.ndarray:
    """The sites of a strand of a region, by the position in the region."""
    sites = np.full(length, _NONE)
    annotation = folder / f"spliceai/annotations/{region.assembly}.txt"
    for line in annotation.read_text().splitlines()[1:]:
        _, chromosome, gene_strand, _, _, starts, ends = line.split("\t")
        if (chromosome, gene_strand) != (region.chromosome, strand):
            continue
        # The first exon begins with the gene, and the last one ends with it.
        firsts = [int(start) for start in starts.split(",") if start][1:]
        lasts = [int(end) - 1 for end in ends.split(",") if end][:-1]
        low, high = _ACCEPTOR, _DONOR
        if strand == "-":
            low, high = _DONOR, _ACCEPTOR
        for positions, site in ((firsts, low), (lasts, high)):
            places = np.array(positions, int) - region.start
            inside = (places >= 0) & (places < length)
            sites[places[inside]] = site
    return sites


def called(answers: np.ndarray) -> np.ndarray:
    """Whether a base is called a site, of each row's bases; a third kind is that of its class."""
    return answers[..., _ACCEPTOR:].max(axis=-1) >= _CALLED


def sites_kept(wanted: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """The F1 of the sites that a network calls beside those of the dense one, for each row.

    Args:
        wanted: array `(rows, bases, 3)`. The dense network's probabilities.
        answers: array of the same shape.
    """
    wanted_sites = _calls(wanted)
    sites = _calls(answers)
    right = np.sum((sites == wanted_sites) & (sites > _NONE), axis=1)
    count = np.sum(sites > _NONE, axis=1) + np.sum(wanted_sites > _NONE, axis=1)
    return np.where(count > 0, 2.0 * right / np.maximum(count, 1), 1.0)


def _calls(answers: np.ndarray) -> np.ndarray:
    """The site that is called of each base, `_NONE` for most."""
    sites = _ACCEPTOR + np.argmax(answers[..., _ACCEPTOR:], axis=-1)
    return np.where(called(answers), sites, _NONE)


def f1_of_annotated(answers: np.ndarray, labels: np.ndarray) -> float:
    """The F1 of all sites that are called, beside the annotated ones."""
    is_known = labels >= 0
    sites = _calls(answers)[is_known]
    wanted = labels[is_known]
    right = np.sum((sites == wanted) & (sites > _NONE))
    count = np.sum(sites > _NONE) + np.sum(wanted > _NONE)
    return float(2.0 * right / count)
