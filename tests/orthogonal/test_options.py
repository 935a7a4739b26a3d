"""Options of `exact_orthogonal` that are unknown or exclude each other."""

import pytest

from keras_sparse_ortho.orthogonal import Block, exact_orthogonal

pytestmark = pytest.mark.numpy_only


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"taps": "middle"}, r'`taps` must be "center", "shift" or "cascade". Received: taps='),
        ({"norms": "unit"}, r'`norms` must be None or "equal". Received: norms=\'unit\''),
        ({"start": None}, r'`start` must be "covering" or "published". Received: start=None'),
        ({"taps": "shift", "center_density": 0.3}, r"are for taps=\"center\". Received: taps="),
        ({"taps": "shift", "structure": Block(1, 2)}, r"are for taps=\"center\". Received: taps="),
        ({"taps": "cascade", "rotations": [(0, 1, 0.5)]}, r"A cascade draws its own rotations"),
        ({"norms": "equal", "rotations": [(0, 1, 0.5)]}, r"chooses angles itself.*Received"),
        ({"norms": "equal", "structure": Block(1, 2)}, r"chooses angles itself.*Received"),
        ({"norms": "equal", "start": "published"}, r"chooses angles itself.*start='published'"),
    ],
)
def test_options_that_are_unknown_or_exclude_each_other(options, message):
    with pytest.raises(ValueError, match=message):
        exact_orthogonal((3, 3, 8, 16), 0.5, **options)
