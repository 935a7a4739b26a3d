"""`python -m keras_sparse_ortho`: the command line, see `keras_sparse_ortho.cli`."""

import sys

from keras_sparse_ortho.cli import main

if __name__ == "__main__":
    sys.exit(main())
