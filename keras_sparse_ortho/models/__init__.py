"""Whole models: listing their kernels, rewriting and stripping them."""

from typing import TYPE_CHECKING

from keras_sparse_ortho.models._apply import apply, carry_out
from keras_sparse_ortho.models._at_density import (
    DensityGap,
    density_gap,
    model_gap,
    warn_of_gap,
    warn_unless_at_density,
    watch_saving,
)
from keras_sparse_ortho.models._channel_classes import ChannelClasses
from keras_sparse_ortho.models._channel_graph import ChannelGraph, flattened
from keras_sparse_ortho.models._channel_rules import (
    CHANNEL_RULES,
    ChannelCall,
    ChannelRule,
    ChannelTensor,
    Constants,
    Grouped,
    Linear,
    MakeRule,
    Mask,
    Scales,
    Shape,
    SmallerLayer,
    SmallerOperation,
    Tied,
    Tracer,
    activated,
    add_channel_rules,
    bias_of,
    count_of,
    elementwise,
    for_single_inputs,
    has_borders,
    identity_sources,
    last_axis,
    limit_of,
    passes_channels,
    register_channel_rule,
    smaller_layer,
    value_of,
    with_scaled_bias,
    without_tiny,
)
from keras_sparse_ortho.models._convert import convert
from keras_sparse_ortho.models._flops import (
    PositionRule,
    input_specs,
    kernel_positions,
    last_axis_positions,
    pixels,
)
from keras_sparse_ortho.models._origin import origin_of
from keras_sparse_ortho.models._output_kinds import (
    UNKNOWN,
    OutputKind,
    output_kinds,
    output_names,
)
from keras_sparse_ortho.models._places import places_to_wrap
from keras_sparse_ortho.models._plan import LayerChange, Plan
from keras_sparse_ortho.models._prunable_weights import (
    check_built,
    is_of_tf_keras,
    never_called,
    prunable_weights,
    refuse_unfit,
    weights_of,
)
from keras_sparse_ortho.models._result_checks import ResultChecks
from keras_sparse_ortho.models._rewrite import rewrite
from keras_sparse_ortho.models._same_function import SameFunction
from keras_sparse_ortho.models._stateless_loss import (
    StatelessLoss,
    check_labels,
)
from keras_sparse_ortho.models._strip import strip
from keras_sparse_ortho.models._verb import verb
from keras_sparse_ortho.storages import Target

if TYPE_CHECKING:
    from keras_sparse_ortho.models._channel_groups import (
        ChannelGroup,
        ChannelGroups,
        channel_groups,
    )
    from keras_sparse_ortho.models._remove_channels import remove_channels
    from keras_sparse_ortho.models._shapes_without import shapes_without

_FILES = {
    "ChannelGroup": "_channel_groups",
    "ChannelGroups": "_channel_groups",
    "channel_groups": "_channel_groups",
    "remove_channels": "_remove_channels",
    "shapes_without": "_shapes_without",
}

__all__ = [
    "ChannelCall",
    "ChannelGroup",
    "ChannelGroups",
    "ChannelRule",
    "LayerChange",
    "Plan",
    "Target",
    "apply",
    "channel_groups",
    "convert",
    "kernel_positions",
    "prunable_weights",
    "register_channel_rule",
    "remove_channels",
    "strip",
]
