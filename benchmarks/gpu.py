"""The cost of training on a GPU: steps of an MLP, `fit` of Transformers, a sweep.

python benchmarks/gpu.py [options]
"""

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from blocks import live, mebibytes, mlp, seconds_of
from keras import ops
from networks import VOCABULARY, gpt2, vision_transformer
from record import last_of_each, markdown, sentences
from runner import (
    Measurement,
    Run,
    Setting,
    beside_first,
    grid,
    main,
    wall_and_cpu,
)
from training import crossentropy, training_pass

import keras_sparse_ortho as kso
from keras_sparse_ortho._backend import value_and_gradients
from keras_sparse_ortho.layers import (
    BlockGrid,
    BlockOperands,
    product_by_token,
    set_block_products,
)

L = keras.layers
GATHERED = "gathered"
KEYS = ("device", "backend", "policy", "width", "batch", "density", "rival")
FORMS = {
    "live": ("live", ".4f"),
    "state_mib": ("state [MiB]", ".1f"),
    "ms": ("step [ms]", ".3f"),
    "ratio": ("ratio", ".3f"),
    "peak_mib": ("peak [MiB]", ".0f"),
    "first_s": ("first [s]", ".1f"),
}
ERRORS = {
    "outputs": ("outputs", ".1e"),
    "inputs_gradient": ("gradient of inputs", ".1e"),
    "blocks_gradient": ("gradient of blocks", ".1e"),
}
HEADER = ["device", "backend", "dtypes", "width", "batch", "density", "kernels"]
Step = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Rival:
    """A model that is trained beside others.

    Args:
        kernels: `"dense"`, `"masked"`, or the side of its blocks.
        products: How products with live blocks are computed.
        share: The part of the units that it has.
    """

    kernels: str | int
    products: str = GATHERED
    share: float = 1.0


@dataclasses.dataclass(frozen=True)
class Trained:
    """A rival that is ready to be trained: its steps, and what is known before they are timed."""

    steps: Step
    known: Run


class Gpu(Measurement):
    """Training on a GPU: dense, masked and on live blocks, in float32 and bfloat16.

        KERAS_BACKEND=jax   python benchmarks/gpu.py --minutes 12
        KERAS_BACKEND=torch python benchmarks/gpu.py --minutes 12

    JAX or torch, in this order, until the minutes are over; each result is written as soon as it is
    there. Without a GPU nothing is measured, but for `--quick`, which tries the script on any
    device, with kernels by their interpreters.

    `check`: the largest difference between fused products and gathered ones, of outputs and both
    gradients, each relative to the largest value.

    `step`: an MLP of four layers of one width by Adam, on one batch that is on the device; nothing
    is read back within a sample: what is timed is the device. All models train in turn. Rivals are
    the dense model, the same again, whose ratio to the first is the noise, the model with fixed
    masks, a narrower dense one of the same count of weights, and the model on live blocks of each
    size, by gathers and by fused kernels (`layers.set_block_products`). `mixed_bfloat16` multiplies
    in bfloat16 and keeps weights and moments in float32. Products in float32 may use TF32.

    `fit`: a decoder like GPT-2 and a vision transformer in mixed bfloat16, by `fit` with data from
    the host: dense, masked, narrower, and on live blocks of each size.

    `sweep`: `prune` of the MLP by the score `obs` on calibration data, which is one pass over the
    layers with the solver in each.

    State is weights, masks, places of blocks, and moments. The peak of a step is that of its
    compiled program on JAX, and the most that torch had allocated; that of `fit` on JAX is the most
    of the process so far, so its models come from the smallest to the largest.
    """

    page = lines = "gpu"
    resumes = False
    settings = {
        "minutes": Setting(12.0, "no part begins later than this"),
        "parts": Setting(
            ["check", "step", "fit", "sweep"],
            choices=["check", "step", "fit", "sweep"],
        ),
        "policies": Setting(
            ["mixed_bfloat16", "float32"], quick=["mixed_bfloat16"]
        ),
        "widths": Setting([4096], quick=[64]),
        "batches": Setting([1024, 4096, 128], quick=[8]),
        "blocks": Setting([32, 64, 128], quick=[16]),
        "density": Setting(0.1, quick=0.25),
        "rounds": Setting(7, quick=1),
        "steps": Setting(20, "training steps in one sample", quick=1),
        "models": Setting(
            ["decoder", "vit"], choices=["decoder", "vit"], quick=["decoder"]
        ),
        "model_width": Setting(1024, "of decoder and vit", quick=64),
        "model_depth": Setting(6, quick=1),
        "model_batch": Setting(32, quick=2),
        "model_density": Setting(0.125, quick=0.25),
        "tokens": Setting(256, quick=16),
        "rows": Setting(4096, "of calibration data", quick=32),
    }

    def runs(self) -> list[Run]:
        given = self.given
        name, is_gpu = device()
        if not is_gpu and not given.quick:
            backend = keras.backend.backend()
            print(
                f"{backend} sees no GPU, but {name}: nothing is measured",
                flush=True,
            )
            return []
        start = {"device": [name], "backend": [keras.backend.backend()]}
        lists = {
            "check": grid(
                part=["check"],
                **start,
                width=given.widths,
                batch=given.batches[:1],
                policy=given.policies,
                density=[given.density],
            ),
            # All policies of the first batch before the next one.
            "step": grid(
                part=["step"],
                **start,
                width=given.widths,
                batch=given.batches,
                policy=given.policies,
                density=[given.density],
            ),
            "fit": grid(
                part=["fit"],
                **start,
                model=given.models,
                width=[given.model_width],
                batch=[given.model_batch],
                policy=["mixed_bfloat16"],
                density=[given.model_density],
            ),
            "sweep": grid(
                part=["sweep"],
                **start,
                width=given.widths,
                batch=[given.rows],
                policy=["float32"],
                density=[given.density],
            ),
        }
        return [run for part in given.parts for run in lists[part]]

    def measure(self) -> None:
        """Makes the runs in turn, as long as there is time."""
        self._end = time.monotonic() + 60 * self.given.minutes
        super().measure()

    def run(self, which: Run) -> Iterator[Run]:
        if time.monotonic() > self._end:
            print(f"no time is left for {which}", flush=True)
            return
        # `clear_session` sets another.
        keras.config.set_dtype_policy(which["policy"])
        keras.utils.set_random_seed(0)
        part = getattr(self, which["part"])
        yield from part(which)
        keras.utils.clear_session()

    def rivals(self, density: float) -> dict[str, Rival]:
        """By title, what is trained; those first that matter most if time is short."""
        rivals = {"dense": Rival("dense"), "dense again": Rival("dense")}
        for products in (self.kernels(), GATHERED):
            for size in self.given.blocks:
                title = (
                    f"{'blocks' if products == GATHERED else 'fused'} {size}"
                )
                rivals[title] = Rival(size, products)
        if self.kernels() == GATHERED:
            print("kernels for live blocks are not available here", flush=True)
        rivals["masked"] = Rival("masked")
        rivals["dense, as many weights"] = Rival(
            "dense", share=math.sqrt(density)
        )
        return rivals

    @functools.cache  # noqa: B019, one measurement lives as long as the script
    def kernels(self) -> str:
        """The name of fused products on this device; gathered ones where there are none."""
        _, is_gpu = device()
        products = "fused" if is_gpu else "interpreted"
        try:
            set_block_products(products)
        except (ImportError, ValueError) as error:
            print(error, flush=True)
            return GATHERED
        set_block_products(GATHERED)
        return products

    def check(self, which: Run) -> Iterator[Run]:
        """A line for each size of blocks: by how much fused products differ from gathered ones."""
        if self.kernels() == GATHERED:
            return
        width, batch = which["width"], which["batch"]
        dtype = keras.DTypePolicy(which["policy"]).compute_dtype
        rng = np.random.default_rng(0)
        x, weight = (
            tensor_of(rng.standard_normal((batch, width)), dtype)
            for _ in range(2)
        )
        for size in self.given.blocks:
            grid_of_blocks = BlockGrid.for_density(
                width, width, (size, size), which["density"]
            )
            pattern = grid_of_blocks.draw_pattern(0)
            slots = grid_of_blocks.slots_of(pattern)
            blocks = rng.standard_normal(grid_of_blocks.blocks_shape)
            places = [ops.convert_to_tensor(v) for v in (pattern, slots)]
            operands = functools.partial(BlockOperands, grid_of_blocks)
            values = [
                products_of(
                    operands, x, tensor_of(blocks, dtype), places, weight, kind
                )
                for kind in (GATHERED, self.kernels())
            ]
            names = ("outputs", "inputs_gradient", "blocks_gradient")
            errors = {
                name: float(
                    np.abs(fused - gathered).max() / np.abs(gathered).max()
                )
                for name, gathered, fused in zip(names, *values, strict=True)
            }
            yield {"rival": f"fused {size}", **errors}

    def step(self, which: Run) -> Iterator[Run]:
        """A line for each rival: steps of an MLP."""
        given = self.given
        trained = {}
        for title, rival in self.rivals(which["density"]).items():
            try:
                trained[title] = self.mlp_of(rival, which)
            except kso.errors.DensityError as error:
                print(
                    f"width {which['width']}: no {title}: {error}", flush=True
                )
        passes = {title: one.steps for title, one in trained.items()}
        times = beside_first(wall_and_cpu(passes, given.rounds))
        dense_count = trained["dense"].known["count"]
        for title, figures in times.items():
            known = dict(trained[title].known)
            yield {
                "rival": title,
                "live": known.pop("count") / dense_count,
                **known,
                "ms": 1e3 * figures["wall"] / given.steps,
                "ratio": figures["wall_ratio"],
            }

    def mlp_of(self, rival: Rival, which: Run) -> Trained:
        """An MLP that has trained for the first time."""
        width = 16 * round(rival.share * which["width"] / 16)
        batch, steps = which["batch"], self.given.steps
        model = mlp(width, rival.kernels, which["density"])
        optimizer = keras.optimizers.Adam(1e-4)
        optimizer.build(model.trainable_variables)
        rng = np.random.default_rng(0)
        x, y = (
            ops.convert_to_tensor(
                rng.standard_normal((batch, width), "float32")
            )
            for _ in range(2)
        )
        state = mebibytes([*model.variables, *optimizer.variables])
        known = {"count": live(model), "state_mib": state}
        stepper = {"jax": on_jax, "torch": on_torch}[which["backend"]]
        set_block_products(rival.products)
        try:
            run, first = stepper(model, optimizer, x, y, steps)
        finally:
            set_block_products(GATHERED)
        # torch reads the choice in each step.
        run = chosen(run, rival.products)
        return Trained(run, known | first)

    def fit(self, which: Run) -> Iterator[Run]:
        """A line for each rival: `fit` of a Transformer, one model after the other."""
        rivals = self.rivals(which["density"])
        # The peak of the process only grows.
        for title in sorted(rivals, key=lambda title: _order(rivals[title])):
            yield {"rival": title} | self.fit_of(rivals[title], which)
            keras.utils.clear_session()

    def fit_of(self, rival: Rival, which: Run) -> Run:
        """The time of a step in `fit`, and that of the first call."""
        given = self.given
        keras.config.set_dtype_policy(which["policy"])
        dense = self.transformer(which["model"], rival.share)
        model = dense
        if rival.kernels == "masked":
            model = kso.sparsify(
                dense, which["density"], "uniform", exclude="head", seed=0
            )
        elif rival.kernels != "dense":
            like = kso.Block(rival.kernels, rival.kernels)
            options = {"structure": like, "storage": "blocks", "seed": 0}
            model = kso.sparsify(
                dense, which["density"], "uniform", exclude="head", **options
            )
        count = live(model)
        is_jax = which["backend"] == "jax"
        model.compile(
            keras.optimizers.Adam(1e-4), crossentropy(), jit_compile=is_jax
        )
        batch, steps = which["batch"], given.steps
        x, y = self.data(which["model"], batch * steps)
        run = training_pass(model, x, y, batch)
        reset_peak()
        set_block_products(rival.products)
        try:
            first = seconds_of(run)
            times = wall_and_cpu({0: run}, given.rounds, warm_up=0)
        finally:
            set_block_products(GATHERED)
        wall, _ = times[0]
        state = mebibytes([*model.variables, *model.optimizer.variables])
        return {
            "count": count,
            "state_mib": state,
            "ms": 1e3 * wall / steps,
            "first_s": first,
            "peak_mib": peak_mib(),
        }

    def transformer(self, name: str, share: float) -> keras.Model:
        """A decoder or a vision transformer, of a part of the units."""
        given = self.given
        heads = max(1, given.model_width // 64)
        width = heads * round(share * given.model_width / heads)
        if name == "vit":
            side = 8 * math.isqrt(given.tokens)
            options = {"width": width, "depth": given.model_depth}
            options |= {"heads": heads, "patch": 8}
            return vision_transformer((side, side, 3), 10, options)
        tokens = keras.Input((given.tokens,), dtype="int32")
        x = L.Embedding(VOCABULARY, width, name="words")(tokens)
        x = gpt2(width, given.model_depth, given.tokens, heads)(x)
        return keras.Model(tokens, L.Dense(VOCABULARY, name="head")(x))

    def data(self, name: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Random samples on the host, and their labels."""
        rng = np.random.default_rng(0)
        if name == "vit":
            side = 8 * math.isqrt(self.given.tokens)
            x = rng.standard_normal((count, side, side, 3), dtype="float32")
            return x, rng.integers(0, 10, count)
        tokens = (count, self.given.tokens)
        x = rng.integers(0, VOCABULARY, tokens, dtype="int32")
        return x, rng.integers(0, VOCABULARY, tokens)

    def sweep(self, which: Run) -> Iterator[Run]:
        """One line: `prune` with the solver, on calibration data."""
        width = which["width"]
        rng = np.random.default_rng(0)
        x = rng.standard_normal((which["batch"], width), dtype="float32")
        model = mlp(width, "dense", 1.0)
        prune = functools.partial(
            kso.prune, model, which["density"], score="obs", data=x
        )
        first = seconds_of(prune)
        again = seconds_of(prune)
        yield {"rival": "obs", "first_s": first, "ms": 1e3 * again}

    def report(self, lines: list[Run]) -> str:
        of_part: dict[str, list[Run]] = {
            part: [] for part in ("check", "step", "fit", "sweep")
        }
        for line in lines:
            of_part[line.get("part", "step")].append(line)
        about = sentences(
            """
            MLP of four layers of one width, Adam, on one batch that is on the device. Medians of
            samples in turn; ratios to the dense model. `dense again` is the noise. Products in
            float32 may use TF32. State: weights, masks, places of blocks, and moments. `blocks` are
            computed by gathers, `fused` ones by kernels; "first" compiles.
            """
        )
        text = "# A training step on a GPU\n\n" + about
        text += table(of_part["step"], KEYS, HEADER)
        if of_part["fit"]:
            keys = (*KEYS[:3], "model", *KEYS[3:])
            header = [*HEADER[:3], "model", *HEADER[3:]]
            text += "\n## A step in `fit`, with data from the host\n\n"
            text += table(beside_dense(of_part["fit"], keys), keys, header)
        if of_part["sweep"]:
            text += "\n## `prune` with the solver, on calibration data\n\n"
            text += table(of_part["sweep"], KEYS, HEADER)
        if of_part["check"]:
            text += "\n## Fused products beside gathered ones\n\n"
            text += table(of_part["check"], KEYS, HEADER, ERRORS)
        return text


def tensor_of(values: np.ndarray, dtype: str) -> Any:
    """Values on the device."""
    return ops.cast(ops.convert_to_tensor(values.astype("float32")), dtype)


def products_of(
    operands: Callable[..., BlockOperands],
    x: Any,
    blocks: Any,
    places: list[Any],
    weight: Any,
    products: str,
) -> list[np.ndarray]:
    """The outputs and both gradients of their weighted sum, as float32 on the host."""

    def total(values: list[Any]) -> Any:
        outputs = product_by_token(values[0], operands(values[1], *places))
        return ops.sum(ops.cast(outputs * weight, "float32"))

    set_block_products(products)
    try:
        outputs = product_by_token(x, operands(blocks, *places))
        _, gradients = value_and_gradients(total, [x, blocks])
    finally:
        set_block_products(GATHERED)
    tensors = [outputs, *gradients]
    return [
        ops.convert_to_numpy(ops.cast(tensor, "float32")) for tensor in tensors
    ]


def table(
    lines: list[Run],
    keys: tuple[str, ...],
    header: list[str],
    forms: dict[str, tuple[str, str]] = FORMS,
) -> str:
    """The last line of each case as a row."""
    rows = []
    for case, line in last_of_each(lines, *keys).items():
        cells = [
            f"{line[name]:{form}}" if line.get(name) is not None else ""
            for name, (_, form) in forms.items()
        ]
        rows.append([*map(str, case), *cells])
    titles = [title for title, _ in forms.values()]
    return markdown([*header, *titles], rows)


def beside_dense(lines: list[Run], keys: tuple[str, ...]) -> list[Run]:
    """Lines with their ratios to the dense model, where that was measured, too."""
    last = last_of_each(lines, *keys)
    compared = []
    for (*case, _), line in last.items():
        dense = last.get((*case, "dense"))
        ratios = {}
        if dense is not None:
            ratios["live"] = line["count"] / dense["count"]
            ratios["ratio"] = line["ms"] / dense["ms"]
        compared.append(line | ratios)
    return compared


def _order(rival: Rival) -> float:
    """Models by their size: narrow, on blocks, dense, masked."""
    if rival.share < 1:
        return 0
    if isinstance(rival.kernels, int):
        return 1 + (rival.products == GATHERED)
    return 3 + (rival.kernels == "masked")


def chosen(run: Step, products: str) -> Step:
    """A function that runs with products of one kind."""

    def steps() -> None:
        set_block_products(products)
        try:
            run()
        finally:
            set_block_products(GATHERED)

    return steps


# --- devices --------------------------------------------------------------------------------------


def device() -> tuple[str, bool]:
    """The name of the device, and whether it is a GPU; sets how products in float32 are taken."""
    if keras.backend.backend() == "torch":
        import torch

        torch.set_float32_matmul_precision("high")
        is_gpu = torch.cuda.is_available()
        return (torch.cuda.get_device_name() if is_gpu else "cpu"), is_gpu
    import jax

    jax.config.update("jax_default_matmul_precision", "tensorfloat32")
    first = jax.devices()[0]
    return first.device_kind, first.platform == "gpu"


def reset_peak() -> None:
    """Forgets the most that torch had allocated; JAX has no such function."""
    if keras.backend.backend() == "torch":
        import torch

        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()


def peak_mib() -> float | None:
    """The most memory that was allocated on the GPU; `None` without one."""
    if keras.backend.backend() == "torch":
        import torch

        if not torch.cuda.is_available():
            return None
        return torch.cuda.max_memory_allocated() / 2**20
    import jax

    statistics = jax.devices()[0].memory_stats() or {}
    peak = statistics.get("peak_bytes_in_use")
    return None if peak is None else peak / 2**20


def on_jax(
    model: Any, optimizer: Any, x: Any, y: Any, steps: int
) -> tuple[Step, Run]:
    """A function that trains some steps, and waits for them; seconds and peak of the first step."""
    import jax

    def loss(trainable: list, rest: list, x: Any, y: Any) -> tuple:
        outputs, rest = model.stateless_call(trainable, rest, x, training=True)
        return jax.numpy.mean((outputs.astype("float32") - y) ** 2), rest

    def step(state: tuple, x: Any, y: Any) -> tuple:
        trainable, rest, slots = state
        gradient = jax.grad(loss, has_aux=True)
        gradients, rest = gradient(trainable, rest, x, y)
        trainable, slots = optimizer.stateless_apply(
            slots, gradients, trainable
        )
        return trainable, rest, slots

    parts = (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables,
    )
    state = tuple([variable.value for variable in part] for part in parts)
    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(state, x, y).compile()
    state = jax.block_until_ready(compiled(state, x, y))
    first = {"first_s": time.perf_counter() - start}
    memory = compiled.memory_analysis()
    if memory is not None:
        used = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        used += memory.output_size_in_bytes - memory.alias_size_in_bytes
        first["peak_mib"] = used / 2**20

    def run() -> None:
        nonlocal state
        for _ in range(steps):
            state = compiled(state, x, y)
        jax.block_until_ready(state)

    return run, first


def on_torch(
    model: Any, optimizer: Any, x: Any, y: Any, steps: int
) -> tuple[Step, Run]:
    """A function that trains some steps, and waits for them; seconds and peak of the first step."""
    import torch

    variables = model.trainable_variables

    def step() -> None:
        loss = torch.mean((model(x, training=True).float() - y) ** 2)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            optimizer.apply(
                [variable.value.grad for variable in variables], variables
            )

    def run() -> None:
        for _ in range(steps):
            step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    reset_peak()
    start = time.perf_counter()
    run()
    first = {"first_s": time.perf_counter() - start}
    peak = peak_mib()
    if peak is not None:
        # Other models stay on the device; this one's weights and moments are in `before`.
        state = mebibytes([*model.variables, *optimizer.variables])
        first["peak_mib"] = peak - before / 2**20 + state
    return run, first


if __name__ == "__main__":
    main(Gpu)
