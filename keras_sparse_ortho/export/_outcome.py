"""`RouteOutcome`: what became of one route."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RouteOutcome:
    """The figures of one route of an export, taken or not.

    Attributes:
        route: Its name, such as "dynamic_int8+1x16".
        reason: None if the file verified; otherwise why there is none.
        bytes: Size of the file.
        gzip_bytes: Its size under gzip, level 6; None where it was not asked for.
        zstd_bytes: Its size under zstandard, level 12; likewise.
        error: Difference from Keras in the route's measure.
        max_abs_diff: Largest difference from Keras.
        mean_abs_diff: Mean difference.
        xnnpack: Whether the file verified with XNNPACK, the interpreter's default.
        plain: Whether it verified without XNNPACK.
        load_bytes: By how much loading the file raised the peak of the process' memory.
        setting: What the file's record says of XNNPACK, and `load_litert` does: the faster of the
            two where both verified and were timed.
        latency_ms: Median time of one call with that setting; None where it was not measured.
        default_ms: The same with XNNPACK, as a default interpreter runs it.
        threads: Threads of the interpreter in that measurement.
        batch_size: Rows of one call.
        encoded: Tensors that this package encoded sparsely.
        kept: Weights of Dense layers that it left dense, each with the reason.
    """

    route: str
    batch_size: int
    reason: str | None = None
    bytes: int | None = None
    gzip_bytes: int | None = None
    zstd_bytes: int | None = None
    error: float | None = None
    max_abs_diff: float | None = None
    mean_abs_diff: float | None = None
    xnnpack: bool = False
    plain: bool = False
    setting: bool = True
    load_bytes: int | None = None
    latency_ms: float | None = None
    default_ms: float | None = None
    threads: int = 1
    encoded: tuple[str, ...] = ()
    kept: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def verified(self) -> bool:
        """Whether there is a file that runs and agrees with Keras."""
        return self.reason is None
