"""Which channels of a functional model can go, and what its layers are without them."""

from keras_sparse_ortho.models._channels._analysis import channel_plan as channel_plan
from keras_sparse_ortho.models._channels._rule import Shrunk as Shrunk

__all__ = ["Shrunk", "channel_plan"]
