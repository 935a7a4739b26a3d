"""Models of every structure that whole-model functions are tested with."""

import collections
import functools

import keras

import keras_sparse_ortho as kso

L = keras.layers
register = keras.saving.register_keras_serializable(package="tests")
SHAPE = (8, 8, 3)


@register
class WithZeros(L.Layer):
    """Adds three channels of zeros behind those of one image."""

    def call(self, inputs):
        zeros = keras.ops.zeros((1, *inputs.shape[1:-1], 3))
        return keras.ops.concatenate([inputs, zeros], axis=-1)

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], input_shape[-1] + 3)


def sequential():
    return keras.Sequential(
        [
            keras.Input(SHAPE),
            L.Conv2D(8, 3, activation="relu"),
            L.BatchNormalization(),
            L.Flatten(),
            L.Dense(16, activation="relu"),
            L.Dense(4, name="head"),
        ]
    )


def residual():
    inputs = keras.Input(SHAPE)
    x = L.Conv2D(8, 3, padding="same")(inputs)
    y = L.BatchNormalization()(x)
    y = L.SeparableConv2D(8, 3, padding="same")(L.ReLU()(y))
    x = L.Add()([x, y]) * 2.0  # an operation, no layer
    return keras.Model(
        inputs, L.Dense(4, name="head")(L.GlobalAveragePooling2D()(x))
    )


def nested_and_shared():
    """One layer in two models, which Keras itself can clone, but not load from a file."""
    encoder = keras.Sequential(
        [L.Dense(12, activation="tanh"), L.Dense(12)], name="encoder"
    )
    inputs = keras.Input(SHAPE)
    x = L.Dense(12, name="lift")(L.Flatten()(inputs))
    shared = L.Dense(12, name="shared")
    inner_in = keras.Input((12,))
    inner = keras.Model(inner_in, encoder(shared(inner_in)), name="inner")
    x = shared(inner(inner(x)))
    return keras.Model(inputs, L.Dense(4, name="head")(x))


@register
class Block(L.Layer):
    """A layer written as a class, that holds layers."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.hidden = [L.Dense(units, activation="tanh"), L.Dense(units)]
        self.norm = L.LayerNormalization()

    def build(self, input_shape):
        for layer in self.hidden:
            layer.build(input_shape)
            input_shape = (*input_shape[:-1], self.units)
        self.norm.build(input_shape)

    def call(self, inputs):
        for layer in self.hidden:
            inputs = layer(inputs)
        return self.norm(inputs)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def composite():
    inputs = keras.Input(SHAPE)
    x = Block(12)(L.Flatten()(inputs))
    return keras.Model(inputs, L.Dense(4, name="head")(x))


def recurrent_and_attention():
    inputs = keras.Input(SHAPE)
    x = L.Reshape((8, 24))(inputs)
    x = L.Bidirectional(L.LSTM(6, return_sequences=True))(x)
    x = L.MultiHeadAttention(3, 4)(x, x)
    x = L.TimeDistributed(L.Dense(6))(x)
    return keras.Model(inputs, L.Dense(4, name="head")(L.GRU(6)(x)))


class Written(keras.Model):
    """A model written as a class: layers in attributes, lists and dicts, and a nested model."""

    units, head = 12, functools.partial(L.Dense, 4, name="head")

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.flatten = L.Flatten()
        self.first = L.Dense(self.units, activation="relu")
        self.blocks = [L.Dense(self.units), Block(self.units)]
        self.heads = {"main": self.head()}
        self.inner = keras.Sequential([L.Dense(self.units)], name="inner")

    def call(self, inputs):
        x = self.first(self.flatten(inputs))
        for block in self.blocks:
            x = block(x)
        return self.heads["main"](self.inner(x))


def written():
    model = Written()
    model(keras.ops.zeros((1, *SHAPE)))
    return model


class Holding(L.Layer):
    """Calls the layers in its list, which have equal inputs, one after the other."""

    def __init__(self, *inner, **kwargs):
        super().__init__(**kwargs)
        self.inner = list(inner)

    def build(self, input_shape):
        for layer in self.inner:
            layer.build(input_shape)

    def call(self, x):
        for layer in self.inner:
            x = layer(x)
        return x


class EmbeddingHead(Holding):
    """Projects by a layer of its own, and by an embedding that it is given."""

    def __init__(self, embedding, **kwargs):
        super().__init__(
            L.Dense(embedding.output_dim, name="project"), **kwargs
        )
        self.embedding = embedding

    def call(self, x):
        return keras.ops.matmul(
            super().call(x), keras.ops.transpose(self.embedding.embeddings)
        )


# --- functional and Sequential models with a class of their own, as all of keras-hub are ----------


@register
class Mixing(Holding):
    """A block whose configuration does not make it again: only the backbone's does."""

    def __init__(self, width, **kwargs):
        super().__init__(L.Dense(width, name="inner"), **kwargs)

    def call(self, x):
        return x + super().call(x)

    def get_config(self):
        return {**super().get_config(), "wide": self.inner[0].units}


@register
class ReverseHead(EmbeddingHead):
    """Its configuration does not say which embedding it reads."""


class OfWidth:
    """The configuration of a model that its constructor makes by width and name."""

    def get_config(self):
        return {"name": self.name, "width": self.width}

    @classmethod
    def from_config(cls, config):
        return cls(**config)


@register
class Backbone(OfWidth, keras.Model):
    """Keeps its layers, and tensors of its graph, in attributes."""

    def __init__(self, width=16, **kwargs):
        embedding = L.Embedding(50, width, name="embedding")
        blocks = [Mixing(width, name="mixing"), L.Dense(width)]
        ids = keras.Input((6,), dtype="int32", name="ids")
        x, levels = embedding(ids), {}
        for block in blocks:
            x = block(x)
            levels[block.name] = x
        super().__init__(inputs={"ids": ids}, outputs=x, **kwargs)
        self.width, self.levels = width, levels
        self._embedding, self.blocks = embedding, blocks
        # In the graph only inside another layer, as OPT's embedding.
        self.mixer = blocks[0].inner[0]

    @property
    def embedding(self):
        return self._embedding


@register
class Task(keras.Model):
    """A model on a backbone, tied to its embedding, with a preprocessor."""

    def __init__(self, backbone, preprocessor=None, **kwargs):
        head, inputs = (
            ReverseHead(backbone.embedding, name="head"),
            backbone.input,
        )
        super().__init__(
            inputs=inputs, outputs=head(backbone(inputs)), **kwargs
        )
        self.backbone, self.preprocessor, self.head = (
            backbone,
            preprocessor,
            head,
        )

    def get_config(self):
        backbone = keras.saving.serialize_keras_object(self.backbone)
        return {"name": self.name, "backbone": backbone}

    @classmethod
    def from_config(cls, config):
        backbone = keras.saving.deserialize_keras_object(config["backbone"])
        return cls(backbone, name=config["name"])


@register
class Stack(keras.Sequential):
    """A class that adds methods only."""

    def halved(self, x):
        return self(x) / 2


@register
class Tower(OfWidth, keras.Sequential):
    """Its constructor makes the layers, which know their input when it is called."""

    def __init__(self, width=8, **kwargs):
        super().__init__(
            [L.Dense(width), L.ReLU(), L.Dense(6, name="out")], **kwargs
        )
        self.width, self.first, self.parts = (
            width,
            self.layers[0],
            {"out": [self.layers[-1]]},
        )

    def call(self, inputs, training=None, mask=None):
        return inputs + super().call(inputs, training=training, mask=mask)


@register
class WithStep(keras.Model):
    """A class that adds methods only: its constructor takes inputs and outputs."""

    def train_step(self, *args, **kwargs):
        self.steps = getattr(self, "steps", 0) + 1
        return super().train_step(*args, **kwargs)


def task(preprocessor=None):
    return Task(Backbone(name="bone"), preprocessor)


def stack():
    return Stack(
        [keras.Input((6,)), Tower(name="tower"), L.Dense(3, name="head")]
    )


def with_step():
    inputs = keras.Input((6,))
    return WithStep(
        inputs, L.Dense(4, name="out")(L.Dense(8, name="hidden")(inputs))
    )


# --- layers that calls build, or that are made late ----------------------------------------------


@register
class Tokens(L.Layer):
    """Of keras.io: no `build`, no names, no `get_config`; integers come in."""

    def __init__(self, count=50, dim=16, **kwargs):
        super().__init__(**kwargs)
        self.tokens, self.positions = (
            L.Embedding(count, dim),
            L.Embedding(8, dim),
        )

    def call(self, x):
        return self.tokens(x) + self.positions(
            keras.ops.arange(0, keras.ops.shape(x)[-1])
        )


@register
class Unnamed(Holding):
    """With a `build`; the layers have no names."""

    def __init__(self, **kwargs):
        super().__init__(L.Dense(16), L.Dense(16), **kwargs)


@register
class HalfBuilt(Unnamed):
    """Its `build` leaves the layers to their own calls."""

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(), name="scale", initializer="ones")

    def call(self, x):
        return super().call(x) * self.scale


@register
class Projection(L.Layer):
    """Makes a layer in its `build`."""

    def build(self, input_shape):
        self.inner = L.Dense(16)
        self.inner.build(input_shape)

    def call(self, x):
        return self.inner(x)


@register
class HoldsProjection(Holding):
    """Holds a layer that makes a layer in its `build`, as Gemma does."""

    def __init__(self, **kwargs):
        super().__init__(Projection(name="projection"), **kwargs)


def built_late():
    ids = keras.Input((6,), dtype="int32")
    x = Tokens()(ids)
    for kind in (Unnamed, HalfBuilt, Projection, HoldsProjection):
        x = kind()(x)
    return keras.Model(ids, L.Dense(2)(x))


@register
class Late(keras.Model):
    """Written as a class: nested models, a list, and a layer that is made in `build`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        x = keras.Input((16,))
        self.encoder = keras.Model(x, L.Dense(12)(Unnamed()(x)))
        self.towers = [keras.Sequential([L.Dense(8)]), Projection()]

    def build(self, input_shape):
        self.head = L.Dense(3)
        self.towers[0].build((None, 12))
        self.towers[1].build((None, 8))
        self.head.build((None, 16))

    def call(self, x):
        x = self.encoder(x)
        for tower in self.towers:
            x = tower(x)
        return self.head(x)


# --- layers that are held in several places -------------------------------------------------------


def halves(base, at_the_top):
    """An embedding that is handed to two parts, and may stand in the model as well."""

    class Half(base):
        def __init__(self, embedding, **kwargs):
            super().__init__(**kwargs)
            self.embedding = embedding
            self.out = L.Dense(8, name="out")

        def call(self, ids):
            return self.out(self.embedding(ids))

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            embedding = L.Embedding(50, 16, name="embedding")
            self.enc, self.dec = (
                Half(embedding, name="enc"),
                Half(embedding, name="dec"),
            )
            if at_the_top:
                self.embedding = embedding

        def call(self, ids):
            return self.enc(ids) + self.dec(ids)

    return Net()


class Aliases(keras.Model):
    """Calls its layers by other names than those that they are made by."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (
            L.Dense(12, name=name) for name in "abc"
        )
        self._chain = [self.first]
        self._table = {"second": (self.second,)}
        self._pair = collections.namedtuple("Pair", "first second")(
            self.third, None
        )

    def call(self, x):
        for layer in self._chain:
            x = layer(x)
        return self._pair.first(self._table["second"][0](x))


class Concealed(keras.Model):
    """Calls layers from a function, which Keras does not look into; one is in no attribute."""

    def __init__(self):
        super().__init__()
        self.first = first = L.Dense(12, name="a")
        second = L.Dense(4, name="b")
        self._layers.append(second)
        self.chain = lambda x: second(first(x))

    def call(self, x):
        return self.chain(x)


@register
class TiedHead(EmbeddingHead):
    """Its configuration has the embedding that it reads."""

    def get_config(self):
        config = super().get_config()
        return {
            **config,
            "embedding": keras.saving.serialize_keras_object(self.embedding),
        }

    @classmethod
    def from_config(cls, config):
        embedding = keras.saving.deserialize_keras_object(
            config.pop("embedding")
        )
        return cls(embedding, **config)


def tied():
    ids = keras.Input((6,), dtype="int32")
    embedding = L.Embedding(50, 16, name="embedding")
    hidden = L.Dense(16, name="hidden")(embedding(ids))
    return keras.Model(ids, TiedHead(embedding, name="head")(hidden))


@register
class Growing(Holding):
    """Its configuration makes another layer than it is."""

    def __init__(self, count=1, **kwargs):
        super().__init__(
            *[L.Dense(12, name=f"inner_{k}") for k in range(count)], **kwargs
        )

    def get_config(self):
        return {**super().get_config(), "count": 2}


def growing():
    inputs = keras.Input((6,))
    return keras.Model(
        inputs, L.Dense(4, name="head")(Growing(name="grows")(inputs))
    )


MODELS = {
    f.__name__: f
    for f in (
        sequential,
        residual,
        nested_and_shared,
        composite,
        recurrent_and_attention,
        written,
    )
}

# For tests that trace or differentiate the whole network: on JAX one is enough in every run.
HEAVY = ("composite", "recurrent_and_attention")


def wrappers(model):
    """All wrappers in a model, however deep."""
    return [
        layer
        for layer in model._flatten_layers(include_self=False)
        if isinstance(layer, kso.PrunableLayer)
    ]
