"""`Microcontroller`: the limits of `target="micro"`, and what a file takes of them."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from keras_sparse_ortho._checks import as_text, check_integer
from keras_sparse_ortho.export import (
    TARGETS,
    LeanArray,
    arena_of,
    require_micro,
)

MICRO = "micro"
ArenaOf = Callable[[bytes], int]
"""From the bytes of an array to those of the arena that it takes."""


@dataclasses.dataclass(frozen=True)
class MicroFigures:
    """The memory that an array takes on a microcontroller, and its operators.

    Attributes:
        flash: int. Bytes of the array, with `decode_code` where zeros are packed.
        arena: int. Bytes of the arena.
        operators: dict. How often the array has each operator, by the name of LiteRT Micro.
        is_packed: bool. Whether zeros are packed, so that "Decode" is among the operators.
        ram: int or None. With packed zeros, the largest filter that is packed, as for `c_array`.
    """

    flash: int
    arena: int
    operators: Mapping[str, int]
    is_packed: bool = False
    ram: int | None = None


@dataclasses.dataclass(frozen=True)
class Microcontroller:
    """The limits of a device.

    Args:
        max_flash: int or None. The largest array, in bytes.
        max_ram: int or None. The largest arena, in bytes.
        decode_code: int. Bytes of code that a packed array needs in addition.
        arena: callable. Measures the arena of an array.
    """

    max_flash: int | None
    max_ram: int | None
    decode_code: int = 0
    arena: ArenaOf = arena_of

    @property
    def limits(self) -> dict[str, int]:
        """The limits that were given, by the name of the argument."""
        limits = {"max_flash": self.max_flash, "max_ram": self.max_ram}
        return {
            name: limit for name, limit in limits.items() if limit is not None
        }

    def figures(self, content: bytes, file: str) -> MicroFigures:
        """The figures of a file's array, plain or packed: of the one nearest to the limits.

        Within the limits the smallest array counts.

        Args:
            content: bytes. The LiteRT file.
            file: str. Its name, for messages.
        """
        return min(
            self._alternatives(content, file),
            key=lambda figures: (self.reach(figures), figures.flash),
        )

    def _alternatives(
        self, content: bytes, file: str
    ) -> Iterator[MicroFigures]:
        """The plain array, and packed ones of fewer filters until the arena is small enough."""
        yield self._measured(LeanArray(content, file, False, None), None)
        everything = LeanArray(content, file, True, None)
        largest = {
            size.dense_bytes for size in everything.sizes if not size.why_dense
        }
        for ram in sorted(largest, reverse=True):
            array = LeanArray(content, file, True, ram)
            figures = self._measured(array, ram)
            yield figures
            if self.max_ram is None or figures.arena <= self.max_ram:
                return

    def _measured(self, array: LeanArray, ram: int | None) -> MicroFigures:
        is_packed = ram is not None
        flash = len(array.content)
        if is_packed:
            flash += self.decode_code
        arena = check_integer("arena(array)", self.arena(array.content))
        return MicroFigures(flash, arena, array.counts, is_packed, ram)

    @staticmethod
    def figure(figures: MicroFigures, limit: str) -> int:
        """The figure that a limit is about, by the name of the limit."""
        if limit == "max_flash":
            return figures.flash
        return figures.arena

    def reach(self, figures: MicroFigures) -> float:
        """The largest figure as a share of its limit, but 1 for all that are within them."""
        shares = [1.0]
        for name, limit in self.limits.items():
            shares.append(self.figure(figures, name) / limit)
        return max(shares)

    def excess(self, figures: MicroFigures) -> dict[str, int]:
        """By how many bytes each figure is above its limit, by the limit; 0 within it."""
        return {
            name: max(self.figure(figures, name) - limit, 0)
            for name, limit in self.limits.items()
        }


def checked_microcontroller(
    target: str | None,
    *,
    max_flash: int | None,
    max_ram: int | None,
    decode_code: int,
    arena: ArenaOf | None,
    others: Mapping[str, object],
) -> Microcontroller | None:
    """The limits of `target="micro"`; `None` for LiteRT files.

    Args:
        target: As for `shrink`, like the following ones.
        max_flash: int or None.
        max_ram: int or None.
        decode_code: int.
        arena: callable or None.
        others: Limits on files of this machine that were given, by name.

    Raises:
        ValueError: If the arguments do not fit each other.
        ImportError: If nothing can measure an arena.
    """
    if target is None or target in TARGETS:
        settings = {
            "max_flash": max_flash,
            "max_ram": max_ram,
            "decode_code": decode_code or None,
            "arena": arena,
        }
        names, received = _given(settings)
        if names:
            raise ValueError(
                f"For microcontrollers, {names}: give target={MICRO!r} as well; `max_bytes` limits "
                f"other files. Received: {target=}, {received}"
            )
        return None
    if target != MICRO:
        raise ValueError(
            f"`target` must be None, for LiteRT files that are timed on this machine, one of "
            f"{list(TARGETS)}, or {MICRO!r}, for arrays on microcontrollers. "
            f"Received: target={as_text(target)}"
        )
    names, received = _given(others)
    if names:
        raise ValueError(
            f"With target={MICRO!r}, limits are `max_flash` and `max_ram`. About files on this "
            f"machine, so leave out: {names}. Received: target={MICRO!r}, {received}"
        )
    if max_flash is None and max_ram is None:
        raise ValueError(
            f"target={MICRO!r} takes the file of least loss within `max_flash` and `max_ram`: "
            "give one of them, or both. Received: max_flash=None, max_ram=None"
        )
    if max_flash is not None:
        max_flash = check_integer("max_flash", max_flash)
    if max_ram is not None:
        max_ram = check_integer("max_ram", max_ram)
    decode_code = check_integer("decode_code", decode_code, least=0)
    if arena is None:
        require_micro()
        arena = arena_of
    elif not callable(arena):
        raise ValueError(
            "`arena` must be a function from the bytes of an array to the bytes of its arena. "
            f"Received: arena={as_text(arena)}"
        )
    return Microcontroller(max_flash, max_ram, decode_code, arena)


def _given(settings: Mapping[str, object]) -> tuple[str, str]:
    """The names of the arguments that are not `None`, and these as a user writes them."""
    names = []
    texts = []
    for name, value in settings.items():
        if value is not None:
            names.append(f"`{name}`")
            texts.append(f"{name}={as_text(value)}")
    return ", ".join(names), ", ".join(texts)
