"""Options of `exact_orthogonal` that are unknown, mutually exclusive, or removed."""

import pytest

from keras_sparse_ortho.orthogonal import Block, exact_orthogonal

pytestmark = pytest.mark.numpy_only


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"taps": "middle"}, r'`taps` must be "center" or "shift". Received: taps='),
        ({"start": None}, r'`start` must be "covering" or "published". Received: start=None'),
        ({"taps": "shift", "structure": Block(1, 2)}, r"needs taps=\"center\". Received: taps="),
    ],
)
def test_unknown_and_mutually_exclusive_options(options, message):
    with pytest.raises(ValueError, match=message):
        exact_orthogonal((3, 3, 8, 16), 0.5, **options)
