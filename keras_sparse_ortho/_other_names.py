"""For rooms that still import these from here."""

from keras_sparse_ortho._checks import other_keywords as other_keywords
from keras_sparse_ortho._foreign_names import public_names as public_names
