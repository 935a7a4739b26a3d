"""What two workers exchange in a step, counted from the compiled program."""

import keras
import pytest

pytestmark = pytest.mark.jax_only

FORMS = ("dense", "compact", "blocks")


def test_collectives_are_counted_by_their_shapes(updates):
    program = """
      %all-reduce.1 = f32[4,3]{1,0} all-reduce(%a), channel_id=1
      %both = (f32[2]{0}, s32[]) all-reduce-start(%b, %c), channel_id=2
      %g = bf16[8]{0} all-gather(%d), channel_id=3
      %not = f32[100]{0} add(%a, %all-reduce.1)
    """
    assert updates.collectives(program) == {"all-reduce": 48 + 8 + 4, "all-gather": 16}
    with pytest.raises(ValueError, match="in a loop"):
        updates.collectives("%w = (s32[]) while(%x), condition=%c")


def test_live_values_and_blocks_are_a_tenth_of_what_a_dense_model_exchanges(updates):
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    try:
        lines = {form: updates.traffic_measure(form, 320, 0.1, 32, 16) for form in FORMS}
    finally:
        keras.distribution.set_distribution(None)
    totals = {
        form: sum(n for kind, n in line.items() if "-" in kind) for form, line in lines.items()
    }
    kernels = 4 * 4 * 320**2
    assert kernels <= totals["dense"] <= 1.01 * kernels
    assert totals["blocks"] <= 0.12 * totals["dense"]
    assert totals["compact"] <= 0.12 * totals["dense"]
