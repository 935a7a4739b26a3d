"""A layer of a user, which the package learns of by one call of `register_layer`."""

import keras

import keras_sparse_ortho as kso


class Unregistered(keras.layers.Layer):
    """A Dense in groups: `y[g] = x[g] K[g] + b[g]`, with the features in `groups` parts."""

    kernel_name = "matrices"

    def __init__(self, units, groups, use_bias=True, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.groups = groups
        self.use_bias = use_bias

    def build(self, input_shape):
        inputs = input_shape[-1] // self.groups
        outputs = self.units // self.groups
        self.kernel = self.add_weight(
            shape=(self.groups, inputs, outputs), name=self.kernel_name
        )
        self.bias = None
        if self.use_bias:
            self.bias = self.add_weight(
                shape=(self.units,), initializer="zeros", name="bias"
            )

    def call(self, inputs):
        groups, size, _ = self.kernel.shape
        x = keras.ops.reshape(inputs, (-1, groups, size))
        x = keras.ops.einsum("bgi,gio->bgo", x, self.kernel)
        x = keras.ops.reshape(x, (-1, self.units))
        return x if self.bias is None else x + self.bias

    def get_config(self):
        return {
            **super().get_config(),
            "units": self.units,
            "groups": self.groups,
            "use_bias": self.use_bias,
        }


@keras.saving.register_keras_serializable(package="tests")
class GroupedDense(Unregistered):
    """The layer that is registered."""


class Guessed(Unregistered):
    """A layer that is not registered, whose weight has the name of a kernel."""

    kernel_name = "kernel"


def register():
    """Tells the package of the layer."""
    layout = kso.initializers.KernelLayout(
        inputs=(1,), outputs=(2,), batch=(0,)
    )
    kso.register_layer(
        GroupedDense,
        {"matrices": layout},
        positions="last axis",
        rows="last axis",
        channels="last axis",
        rounding="by kernel",
        by_sample=True,
    )


register()
