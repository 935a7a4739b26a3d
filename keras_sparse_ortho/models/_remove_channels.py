"""`remove_channels`: a plain Keras model without the channels that do nothing."""

from typing import Any

import keras

from keras_sparse_ortho._keras_internals import computes_its_graph, graph_ends, leave_graphs
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.models._channels import channel_plan
from keras_sparse_ortho.models._kinds import is_clonable, is_made_from_layers
from keras_sparse_ortho.models._prunable_weights import check_built
from keras_sparse_ortho.models._strip import strip


def remove_channels(model: keras.Model) -> keras.Model:
    """Strips a model, and takes out every channel that does nothing: smaller layers, same outputs.

    A channel whose kernel is 0 is not 0: behind bias, normalization and activation it is a
    constant,

        c = f(b),  or, normalized,  c = f(gamma (b - mean) / sqrt(variance + epsilon) + beta)

    which the next layer multiplies by its kernel and adds up. So the sum goes into the bias of the
    next layer, `b' = b + sum_i c_i sum_taps K_i`, and the channel goes. What goes as well is a
    channel that nothing reads, and one that is computed from constants only; zeros of whichever
    origin count, learnt by `parametrizations.ChannelSoftThreshold` or not.

    Dense, Conv, DepthwiseConv and SeparableConv layers shrink, and with them what stands between:
    BatchNormalization, elementwise activations, pooling, Dropout, padding, Flatten, Reshape that
    leaves channels alone, Concatenate. Where tensors are added, a channel goes if it can go in all
    of them. All channels of the inputs and outputs of the model stay, at least one of every layer,
    and all that a layer of any other class (or a nested model, or a layer with weights that is
    called twice) reads or returns.

    Args:
        model: A built functional or Sequential model, wrapped or plain.

    Returns:
        A new, uncompiled, plain Keras model. Its outputs in inference are those of `model`, but
        for rounding; layers keep their names. A model of a class derived from these stays of this
        class if that takes any layers; if its constructor makes them, of their full size, the
        result is a functional or Sequential model of no class, which can be saved and loaded.

    Raises:
        NotPrunableError: A model that is written as a class, one of a derived class with a `call`
            of its own included, or not built.

    Limits: a convolution with padding adds zeros at the border, where a channel has its constant;
    so constants that are not 0 cannot go into its bias. One of the channels stays then, with a
    kernel that stands for all of them: `sum_i (c_i / c) K_i`. In front of padded DepthwiseConv and
    SeparableConv, and of ZeroPadding, every channel with a constant that is not 0 stays. Constants
    are 0 where the dead convolution has no bias and no normalization behind it, or with `ReLU`
    where they are negative. In further training the means of BatchNormalization move, so
    constants in biases are those of now. Channels must be the last axis.

    Example:

    >>> import keras, numpy as np
    >>> model = keras.Sequential([
    ...     keras.Input((8,)), keras.layers.Dense(6, activation="relu"), keras.layers.Dense(2)])
    >>> kernel, bias = model.layers[0].get_weights()
    >>> kernel[:, :4], bias[:4] = 0, 1  # four channels are 1, whatever the input
    >>> model.layers[0].set_weights([kernel, bias])
    >>> small = remove_channels(model)
    >>> [tuple(layer.kernel.shape) for layer in small.layers]
    [(8, 2), (2, 2)]
    >>> x = np.random.default_rng(0).normal(size=(5, 8))
    >>> bool(np.allclose(small.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-5))
    True

    Reference:

    - Kusupati et al., "Soft Threshold Weight Reparameterization for Learnable Sparsity" (ICML
      2020), arXiv 2002.03231, for thresholds on channels
    """
    check_built(model)
    if not (isinstance(model, keras.Model) and computes_its_graph(model)):
        raise NotPrunableError(
            "Channels can be removed where Keras knows which layer reads which: from functional "
            "models, and Sequential ones with an Input, without a `call` of their own. "
            f"Received: model={model.name!r} of type {type(model).__name__}"
        )
    plain = strip(model)
    if not is_clonable(plain) and not is_made_from_layers(plain):
        plain = _of_no_class(plain)
    plan = channel_plan(plain)

    return _with_small_layers(plain, plan)


def _with_small_layers(model: Any, plan: Any) -> Any:
    """The model on smaller layers, and on the given ones where these stay as they are."""

    def layer_for(layer: Any) -> Any:
        if id(layer) in plan:
            return type(layer).from_config(plan[id(layer)].config)
        if isinstance(layer, keras.Model):
            return _with_small_layers(layer, plan)
        leave_graphs(layer)
        return layer

    small = keras.models.clone_model(model, clone_function=layer_for)
    for old, new in zip(model.layers, small.layers, strict=True):
        if id(old) in plan:
            new.set_weights(plan[id(old)].weights)
    return small


def _of_no_class(model: keras.Model) -> keras.Model:
    """The same layers in a model that is saved with them."""
    inputs, outputs = graph_ends(model)
    if isinstance(model, keras.Sequential):
        return keras.Sequential([inputs, *model.layers], name=model.name)
    return keras.Model(inputs, outputs, name=model.name)
