"""The score of networks that find the ends of exons, and the labels of an annotation."""

import numpy as np
import pytest

pytestmark = pytest.mark.numpy_only


def answers(*rows):
    """Probabilities of no site, an acceptor and a donor, by a letter for each base."""
    classes = {".": 0, "a": 1, "d": 2}
    numbers = [[classes[letter] for letter in row] for row in rows]
    return 0.01 + 0.97 * np.eye(3)[np.array(numbers)]


def test_sites_that_are_kept_missed_and_new(splice_sites):
    wanted = answers("..a..d", "......", "a.....", "d.....")
    given = answers("..a...", "......", "a....d", "a.....")
    kept = splice_sites.sites_kept(wanted, given)
    np.testing.assert_allclose(kept, [2 / 3, 1.0, 2 / 3, 0.0])


def test_unsure_bases_are_no_sites(splice_sites):
    unsure = np.full((1, 4, 3), [0.4, 0.3, 0.3])
    assert not splice_sites.called(unsure).any()


def test_unknown_bases_do_not_count(splice_sites):
    given = answers("a..d")
    labels = np.array([[1, 0, -1, -1]])
    assert splice_sites.f1_of_annotated(given, labels) == 1.0
    labels[0, 2:] = 0
    assert splice_sites.f1_of_annotated(given, labels) == pytest.approx(2 / 3)


def test_sites_of_both_strands(splice_sites, tmp_path):
    """An exon at 3 to 6 of a gene of three: its ends are sites, those of the gene are not."""
    folder = tmp_path / "spliceai/annotations"
    folder.mkdir(parents=True)
    lines = ["#NAME\tCHROM\tSTRAND\tTX_START\tTX_END\tEXON_START\tEXON_END"]
    lines.append("gene\t7\t+\t100\t110\t100,103,108,\t101,106,110,")
    lines.append("other\t7\t-\t100\t110\t100,108,\t104,110,")
    (folder / "test.txt").write_text("\n".join(lines))
    region = splice_sites.Region("", "7", 100, "test")
    plus = splice_sites._sites(region, "+", 10, tmp_path)
    # Acceptors where exons begin, donors at their last base.
    assert [*plus] == [2, 0, 0, 1, 0, 2, 0, 0, 1, 0]
    minus = splice_sites._sites(region, "-", 10, tmp_path)
    assert [*minus] == [0, 0, 0, 1, 0, 0, 0, 0, 2, 0]
