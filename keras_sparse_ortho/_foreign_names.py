"""The table of guesses: names of other packages and what users try, with the step to take here.

`STEPS` is the only table. Its guesses stand as they are typed:

    STR                   a name in the package or in a room, or an attribute of our objects
    SparsityReport.save   an attribute of objects of this class alone
    LiteRTModel(...)      a call of such an object; too many arguments by position
    SparsityReport[...]   an entry of such an object
    amount=               a keyword argument of any function
    RigL(alpha=)          a keyword argument of this function alone
    mode='fp16'           a value of an argument

Upper case, underscores and hyphens do not matter. The error names the first of several steps that
fits: one that begins with an argument in backticks fits the functions with this argument.

Rooms and objects ask the table in `Room` and `Answering`, functions in `_checks.other_keywords`,
and errors about a value by `for_value`.
"""

import functools
import importlib
import re
import sys
import types
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

_PACKAGE = "keras_sparse_ortho"
_ROOMS_OF_EXTRAS = ("export", "shrinking", "tfmot")

_GRADUAL = (
    "parametrize(model, MagnitudeMask(schedules.Cubic(density))), and callbacks.UpdateMasks() "
    "in `fit`"
)
_LEARNT = "parametrize(model, SoftThreshold()), and callbacks.TargetDensity(density) in `fit`"
_MASKS = "{w.path: w.mask for w in prunable_weights(model)}"
_INTEGERS = "quantize_aware(model) in training; export_litert(model, path, mode='int8') for a file"
_FILE = "export_litert(model, path)"
_ONNX = "strip(model), and `export` of Keras with format='onnx'"
_ONE_SHOT = "prune(model, density)"
_BY_DATA = 'prune(model, density, score="obs", data=rows)'
_CHANNELS = (
    "narrow(model, 0.5, data=rows) for a trained model, or remove_channels(model) after training "
    "with ChannelSoftThreshold()"
)
_SHARES = "`budget` of prune and sparsify: 'uniform', 'er', 'erk', or a dict by weight"
_RUN = "`predict`; it takes any number of rows"
_SCORE = "`predict`, and compare its outputs with the labels"
_FALL = "schedules.Cubic(density), or a subclass of schedules.Schedule with its own `at`"
_TRAIN = "`fit` of the model; callbacks.UpdateMasks() and the others go into its callbacks"
_KERAS = "the one of Keras; it works with sparse models"
_DISTILL = "recovery.distill(student, teacher, rows)"
_LOOP = "callbacks.UpdateMasks().update(step) in an optax loop; see docs/custom_loops.md"
_STRAIGHT = (
    "parametrize(model, parametrizations.StraightThroughTopK(), density)"
)
_METHODS = "prune for a trained model, sparsify from the first step, parametrize while it trains"
_WHOLE = "structure=calibration.Channels()"
_PLAIN = "`include` and `exclude` of prune, sparsify and parametrize"
_OF_LAYER = "{w.path: w.mask for w in prunable_weights(layer)}"
_FRACTION = "`density`. It is the fraction that stays: 0.1 to prune 90%"
_SCHEDULE = "`schedule`. It is a Schedule, or the density of every step"
_BEGIN = "`begin_step`. It is a step, or a fraction of the run such as 0.1"
_END = "`end_step`. It is a step, or a fraction of the run such as 0.7"
_ROWS = ("`representative_data`", "`data`", "`x`")
_TYPE = ("`mode`", "`weights`", _INTEGERS)
_LABELS = "`data`. Labels go into it: (x, y)"
_STEERED = (
    "callbacks.TargetDensity(density) in `fit`; a threshold learns its density"
)
_WRAPPED = "`parametrization`: FixedMask(density), or MagnitudeMask(schedule)"


# Guesses, separated by spaces, and the step to take.
STEPS: tuple[tuple[str, str | tuple[str, ...]], ...] = (
    # --- names: TensorFlow Model Optimization
    ("prune_low_magnitude GMP gradual_pruning magnitude_pruning", _GRADUAL),
    ("magnitude_pruner magnitude_prune gradual_magnitude_pruning", _GRADUAL),
    (
        "strip_pruning remove remove_masks remove_mask squash_mask finalize",
        "strip(model)",
    ),
    ("make_permanent strip_clustering strip_masks unwrap bake", "strip(model)"),
    (
        "prune_scope",
        "keras.saving.load_model(path), after `import keras_sparse_ortho`",
    ),
    (
        "load load_model",
        "keras.saving.load_model(path), after `import keras_sparse_ortho`",
    ),
    ("PolynomialDecay", "schedules.Cubic(density), or schedules.Polynomial"),
    (
        "polynomial_schedule agp_pruner",
        "schedules.Cubic(density), or schedules.Polynomial",
    ),
    ("ConstantSparsity ConstantDensity", "schedules.Constant(density)"),
    ("PruningSchedule", "schedules.Schedule"),
    ("UpdatePruningStep pruning_callback", "callbacks.UpdateMasks()"),
    (
        "PruningSummaries SparsityLogger log_sparsity",
        "callbacks.DensityLogger()",
    ),
    ("PruningPolicy prune_for_latency_on_xnnpack layer_filter", _PLAIN),
    ("quantize_model quantize_apply qat prepare_qat", "quantize_aware(model)"),
    (
        "quantize_annotate quantize_annotate_layer",
        "quantize_aware(model, exclude=...)",
    ),
    (
        "quantize_annotate_model quantize_scope quantize_wrapper",
        "quantize_aware(model)",
    ),
    ("cluster cluster_weights clustering", "quantize_aware(model, 'int4')"),
    # --- names: torch.nn.utils.prune, torchao, Torch-Pruning
    ("l1_unstructured", 'prune(model, density, budget="uniform")'),
    ("unstructured global_unstructured global_pruning sparsify_", _ONE_SHOT),
    ("prune_model one_shot sparsify_model make_sparse", _ONE_SHOT),
    (
        "random_unstructured",
        "prune(model, score=saliency.random(model, density))",
    ),
    (
        "random_pruning random_prune",
        "prune(model, score=saliency.random(model, density))",
    ),
    ("ln_structured prune_channels prune_filters filter_pruning", _CHANNELS),
    (
        "structured_pruning channel_pruning dependency_graph meta_pruner",
        _CHANNELS,
    ),
    (
        "group_norm_pruner bn_scale_pruner network_slimming slim dep_graph",
        _CHANNELS,
    ),
    (
        "random_structured",
        "sparsify(model, density, structure=Block(rows, cols))",
    ),
    (
        "custom_from_mask apply_mask set_mask set_masks",
        "apply_masks(model, {path: mask})",
    ),
    ("is_pruned", "report(model).density < 1"),
    ("BasePruningMethod PruningContainer pruner", _ONE_SHOT),
    ("weight_norm_sparsifier base_sparsifier", _ONE_SHOT),
    (
        "semi_sparse_weight semi_sparse_weight_config",
        'prune(model, structure="2:4")',
    ),
    (
        "sparse_24 two_four n_of_m n_m nm_sparsity NxM",
        'structure="2:4", or NByM(n, m)',
    ),
    (
        "block_sparse block_sparsity block_sparse_weight_config",
        'structure="32x32", or Block',
    ),
    ("quantize int8_weight_only int8_weight_only_config qat_config", _INTEGERS),
    (
        "int4_weight_only int4_weight_only_config post_training_quant_config",
        _INTEGERS,
    ),
    (
        "quantization_aware_training_config static_quant_config quantizer",
        _INTEGERS,
    ),
    ("to_int8 int8 int4 ptq dynamic_quant_config quantize_dynamic", _INTEGERS),
    # --- names: neural-compressor, llm-compressor, papers
    (
        "weight_pruning_config prepare_pruning prepare_compression prune_config",
        _GRADUAL,
    ),
    (
        "SparseGPT sparse_gpt_modifier obc optimal_brain_surgeon exact_obs",
        _BY_DATA,
    ),
    ("wanda_sparsifier wanda_pruning_modifier obs_pruner obs", _BY_DATA),
    ("wanda", 'prune(model, density, score="wanda", data=rows)'),
    ("gptq gptq_modifier awq smooth_quant", _INTEGERS),
    ("STR soft_threshold_reparameterization learned_threshold", _LEARNT),
    ("learnt_thresholds TargetSparsity prune_to_sparsity cs", _LEARNT),
    ("STE straight_through", _STRAIGHT),
    (
        "eoi ExactOrthogonalInit orthogonal_sparse",
        "initializers.ExactOrthogonal(density)",
    ),
    ("ai approx_isometry", "initializers.ApproximateIsometry(density)"),
    (
        "dst dynamic_sparse_training srigl",
        "callbacks.RigL((x, y)), or callbacks.SET()",
    ),
    ("lottery_ticket imp iterative_magnitude_pruning rewind", _GRADUAL),
    ("movement_pruning top_kast ac_dc", _LEARNT),
    (
        "knowledge_distillation distillation_config distiller distill_model",
        _DISTILL,
    ),
    ("fine_tune retrain recover train", _TRAIN),
    ("low_rank svd factorize", "parametrize(model, LowRankSoftThreshold())"),
    (
        "sparse_dense sparse_linear sparse_layer",
        "layers.BlockSparseDense, or PrunableLayer",
    ),
    (
        "sparse_conv sparse_conv_2d",
        "layers.BlockSparseConv2D, or PrunableLayer",
    ),
    # --- names: jaxpruner
    ("wrap_optax create_updater_from_config base_updater", _LOOP),
    ("post_gradient_update pre_forward_update instant_sparsify", _LOOP),
    ("global_magnitude_pruning", _GRADUAL),
    ("ste_magnitude_pruning ste_random_pruning", _STRAIGHT),
    (
        "saliency_pruning global_saliency_pruning",
        'prune(model, density, score="snip", data)',
    ),
    ("static_random_sparse", "sparsify(model, density, initializer='random')"),
    ("no_pruning", "nothing: a Keras model is dense until it is sparsified"),
    ("algorithms api", _METHODS),
    ("sparse_state", "prunable_weights(model): masks belong to the model"),
    (
        "sparsity_distributions custom_sparsity_map",
        _SHARES,
    ),
    ("sparsity_schedules periodic_schedule", _FALL),
    ("one_shot_schedule", _ONE_SHOT),
    ("no_update_schedule", "parametrizations.FixedMask(density)"),
    ("summarize_sparsity sparsity_summary summary", "print(report(model))"),
    ("sparsity_distribution layer_sparsity sparsity_types", _SHARES),
    ("periodic_update_schedule one_shot_update_schedule", "schedules.Schedule"),
    # --- names: Keras and scikit-learn
    ("fit compile train_model fit_transform", _TRAIN),
    ("save save_model", "`save` of the model, as model.save('model.keras')"),
    ("evaluate score", "`evaluate` of the model"),
    ("predict", "`predict` of the model"),
    (
        "clone_model early_stopping model_checkpoint tensor_board csv_logger",
        _KERAS,
    ),
    ("learning_rate_scheduler reduce_lr_on_plateau", _KERAS),
    (
        "Dense Conv1D Conv2D Conv3D LSTM GRU Embedding MultiHeadAttention",
        _KERAS,
    ),
    (
        "sequential Model Input EinsumDense DepthwiseConv2D SeparableConv2D",
        _KERAS,
    ),
    (
        "Orthogonal orthogonal_initializer",
        "initializers.ExactOrthogonal(density)",
    ),
    (
        "glorot_uniform he_normal random_normal",
        "initializers.RandomSparse(density)",
    ),
    (
        "Cosine OneCycle one_cycle_lr CosineDecay cosine_annealing exponential",
        _FALL,
    ),
    (
        "exponential_decay step_decay piecewise Sigmoid inverse_time_decay",
        _FALL,
    ),
    # --- names: what a model or file is asked for
    ("sparsity", "1 - report(model).density"),
    ("get_sparsity sparsity_of measure_sparsity", "1 - report(model).density"),
    ("density get_density", "report(model).density"),
    (
        "flops get_flops count_flops",
        "report(model).flops, and report(model).sparse_flops",
    ),
    (
        "count_params num_params n_params",
        "report(model).params, or `count_params` of Keras",
    ),
    ("masks mask get_masks get_mask", _MASKS),
    ("export_tflite to_tflite tflite convert_to_tflite TFLiteConverter", _FILE),
    ("to_litert litert export_model convert_tflite save_tflite", _FILE),
    ("export(...)", _FILE),
    ("export_onnx to_onnx onnx export_openvino openvino", _ONNX),
    ("export_c to_c to_c_array c_code", "export.c_array(file, path)"),
    (
        "evaluate_litert run_litert predict_litert interpreter",
        "load_litert(file).predict(x)",
    ),
    ("load_tflite open_litert", "load_litert(file)"),
    ("benchmark time_litert bench latency", "export.latencies(files)"),
    (
        "compress compress_model smallest auto_compress",
        "shrink(model, data, path)",
    ),
    ("singular_values spectrum", "analysis.jacobian_singular_values(model, x)"),
    (
        "calibrate batch_norm_calibration reset_bn",
        "restore_statistics(model, data)",
    ),
    ("analyze stats statistics compare", "report(model)"),
    ("sensitivity_analysis sensitivity_scan", "sensitivity(model, data)"),
    ("allocate set_density", _SHARES),
    ("is_sparse", "report(model).density < 1"),
    # --- attributes of our objects
    (
        "kernel_mask mask_kernel weight_mask pruning_mask pruning_vars",
        _OF_LAYER,
    ),
    (
        "PrunableLayer.mask PrunableLayer.masks PrunableLayer.get_mask",
        _OF_LAYER,
    ),
    ("PrunableLayer.density", "prunable_weights(layer)[0].density"),
    ("PrunableLayer.sparsity", "1 - prunable_weights(layer)[0].density"),
    (
        "kernel_orig weight_orig raw_kernel",
        "`raw_value` of prunable_weights(layer)[0]",
    ),
    ("SparsityReport.sparsity", "1 - report.density"),
    ("SparsityReport[...]", "{row.path: row for row in report.rows}"),
    (
        "SparsityReport.weights SparsityReport.layers SparsityReport.kernels",
        "report.rows",
    ),
    (
        "to_pandas to_dataframe to_df as_dataframe",
        'pandas.DataFrame(x.to_dict()["weights"])',
    ),
    (
        "SparsityReport.save SparsityReport.write",
        "`to_csv`, or `to_dict` for JSON",
    ),
    ("SparsityReport.to_json", "json.dumps(report.to_dict())"),
    (
        "SparsityReport.summary SparsityReport.show SparsityReport.print",
        "print(report)",
    ),
    ("ShrinkReport.summary ExportReport.summary Plan.summary", "print(x)"),
    ("ExportReport.size ExportReport.file_size", "`bytes`"),
    ("LiteRTModel(...)", _RUN),
    ("LiteRTModel.run LiteRTModel.invoke LiteRTModel.call", _RUN),
    (
        "predict_on_batch set_tensor get_tensor allocate_tensors resize_tensor_input",
        _RUN,
    ),
    ("LiteRTModel.predict_proba LiteRTModel.transform", _RUN),
    (
        "LiteRTModel.evaluate LiteRTModel.score LiteRTModel.test_on_batch",
        _SCORE,
    ),
    (
        "get_input_details LiteRTModel.input_shape LiteRTModel.input_details",
        "`inputs`",
    ),
    ("get_output_details LiteRTModel.output_details", "`output_names`"),
    ("Budget.sparsity Budget.sparsities", "1 - budget[path] for each path"),
    ("Budget.densities Budget.to_dict", "dict(budget)"),
    ("PrunableWeight.sparsity", "1 - weight.density"),
    ("PrunableWeight.name", "`path`"),
    ("PrunableWeight.numpy PrunableWeight.kernel", "`value`"),
    ("Plan.apply Plan.run", "models.apply(model, plan)"),
    ("Row.name", "`path`"),
    ("Row.sparsity", "1 - row.density"),
    # --- keywords
    (
        "amount= ratio= pruning_ratio= rate= fraction= keep_ratio=",
        (_FRACTION, _SCHEDULE),
    ),
    ("final_density= target_density=", (_FRACTION, _SCHEDULE)),
    ("density=", _SCHEDULE),
    (
        "criterion= method= importance_scores= importance= saliency=",
        ("`score`", "`initializer`"),
    ),
    ("pruning_method= algorithm= ranking=", ("`score`", "`initializer`")),
    (
        "skip= skip_layers= exclude_layers= ignore= ignored_layers= frozen=",
        "`exclude`",
    ),
    ("excluded_op_names= exclude_types= blacklist=", "`exclude`"),
    (
        "layers= scope= target= targets= include_layers= op_names= modules=",
        "`include`",
    ),
    ("parameters= tensors_to_prune= params= kernels= whitelist=", "`include`"),
    (
        "global_pruning= scope_global= distribution= sparsity_distribution=",
        "`budget`",
    ),
    ("sparsity_distribution_fn= layer_densities= densities=", "`budget`"),
    (
        "block_size= block= sparsity_m_by_n= sparsity_type= pattern= nm=",
        "`structure`",
    ),
    ("structured= prune_n_low= n= m= granularity= blocks=", "`structure`"),
    ("block_pooling_type= dim=", "`structure`"),
    ("gain=", "initializer=initializers.ExactOrthogonal(gain=...)"),
    ("schedule= pruning_schedule= scheduler=", (_SCHEDULE, _GRADUAL)),
    (
        "iterations= iterative_steps= num_iterations= steps_per_prune= n_iter=",
        _GRADUAL,
    ),
    ("epochs=", (_END, _GRADUAL)),
    ("steps= end= end_epoch= t_end= total_steps= num_steps= stop_step=", _END),
    ("begin= begin_epoch= start= start_step= start_epoch=", _BEGIN),
    ("max_iter=", ("`epochs`", _END)),
    (
        "delta_t= delta= update_freq= update_frequency= freq= interval= every=",
        "`frequency`",
    ),
    ("update_interval= pruning_frequency= period=", "`frequency`"),
    (
        "alpha= zeta= drop_fraction= prune_rate= death_rate= drop_rate=",
        "`fraction`",
    ),
    ("growth= epsilon=", "`fraction`"),
    ("random_state= rng= rng_seed= random_seed= key= rngs=", "`seed`"),
    ("masks= mask=", "apply_masks(model, masks)"),
    ("quantize= quantization= dtype= precision= bits= n_bits=", _TYPE),
    ("num_bits= weight_bits= w_bits= optimizations= int8= route=", _TYPE),
    ("activation_bits= a_bits=", "`activations`"),
    (
        "representative_dataset= calibration_data= calibration_dataset= calib_data=",
        _ROWS,
    ),
    (
        "calib_dataloader= dataset= train_data= rows= dataloader= x= inputs=",
        _ROWS,
    ),
    ("validation_data= val_data= x_train= training_data=", _ROWS),
    ("labels= y= y_true= targets_data=", _LABELS),
    ("target_size= max_size= size_limit= max_kb=", "`max_bytes`"),
    ("time_limit= time_budget= max_time= budget_minutes=", "`minutes`"),
    (
        "max_accuracy_drop= accuracy_drop= max_loss= accuracy_loss=",
        "`max_drop`",
    ),
    ("max_latency= latency= target_latency=", "`max_ms`"),
    ("file= filename= filepath= output= output_path= out=", "`path`"),
    ("num_threads= n_jobs= n_threads=", "`threads`"),
    ("lr= rate_of_learning=", "`learning_rate`"),
    ("teacher_model= dense=", "`teacher`"),
    ("student_model= sparse=", "`student`"),
    (
        "temperature=",
        "none: `distill` compares logits, which need no temperature",
    ),
    ("SoftThreshold(density=) ChannelSoftThreshold(density=)", _STEERED),
    ("SoftThreshold(sparsity=) ChannelSoftThreshold(sparsity=)", _STEERED),
    (
        "LowRankSoftThreshold(density=) LowRankSoftThreshold(sparsity=)",
        _STEERED,
    ),
    ("PrunableLayer(density=) PrunableLayer(sparsity=)", _WRAPPED),
    # --- arguments by position
    (
        "UpdateMasks(...)",
        "UpdateMasks() in the callbacks of `fit`, which gives it the model",
    ),
    (
        "DensityLogger(...)",
        "DensityLogger() in the callbacks of `fit`, which gives it the model",
    ),
    ("RigL(...)", "RigL((x, y)): one source of batches"),
    ("sensitivity(...)", "sensitivity(model, (x, y))"),
    ("shrink(...)", "shrink(model, (x, y), path)"),
    ("narrow(...)", "narrow(model, widths, data=x)"),
    ("predict(verbose=)", "none: a file prints nothing"),
    (
        "predict(batch_size=)",
        "none: `export_litert(batch_size=)` puts the rows of a call into the file",
    ),
    ("distill(...)", "distill(student, teacher, x), which needs no labels"),
    (
        "restore_statistics(...)",
        "restore_statistics(model, x), which needs no labels",
    ),
    # --- values
    ("mode='int8'", "mode='int8'"),  # in capitals
    ("mode='float16'", "mode='float16'"),
    ("mode='float32'", "mode='float32'"),
    ("mode='int4'", "mode='int4'"),
    ("mode='dynamic_int4'", "mode='dynamic_int4'"),
    (
        "mode='fp16' mode='half' mode='f16' mode='float16_quantization'",
        "mode='float16'",
    ),
    ("mode='fp32' mode='float' mode='f32' mode='none'", "mode='float32'"),
    (
        "mode='full_int8' mode='full_integer' mode='integer' mode='static_int8'",
        "mode='int8'",
    ),
    (
        "mode='i8' mode='uint8' mode='8bit' mode='int8_static' mode='w8a8'",
        "mode='int8'",
    ),
    (
        "mode='dynamic' mode='int8_dynamic' mode='dynamic_range'",
        "mode='dynamic_int8'",
    ),
    ("mode='weight_only' mode='int8_weight_only'", "mode='dynamic_int8'"),
    (
        "mode='i4' mode='4bit' mode='w4' mode='int4_weight_only'",
        "mode='dynamic_int4'",
    ),
    ("mode='smallest' mode='size'", "mode='small'"),
    ("mode='fastest' mode='speed' mode='latency'", "mode='fast'"),
    ("mode='sparse'", "mode='float32+sp'"),
    ("structure='channels' structure='channel' structure='filters'", _WHOLE),
    ("structure='structured' structure='filter' structure='rows'", _WHOLE),
    ("structure='blocks' structure='block'", 'structure="32x32"'),
    ("structure='unstructured'", "structure=None"),
    ("structure='n:m' structure='semi_structured'", 'structure="2:4"'),
    (
        "metric='accuracy' metric='acc' metric='top1'",
        "no `metric`, and data=(x, labels)",
    ),
    (
        "metric='mse' metric='mae' metric='r2' metric='loss'",
        'metric="closeness"',
    ),
    ("score='l1' score='weights' score='l2' score='abs'", 'score="magnitude"'),
    ("score='sparsegpt' score='obc' score='hessian'", 'score="obs"'),
    ("score='random'", "score=saliency.random(model, density)"),
    ("score='gradient' score='sensitivity' score='taylor'", 'score="snip"'),
    (
        "budget='global' budget='magnitude'",
        "prune(model, density), which ranks all kernels",
    ),
    ("budget='layerwise' budget='local' budget='constant'", 'budget="uniform"'),
    (
        "densities='erk' densities='er' densities='uniform'",
        "budgets.erk(model, density)",
    ),
    ("storage='dense' storage='mask'", 'storage="masked"'),
    (
        "storage='csr' storage='sparse' storage='coo' storage='bcoo'",
        'storage="compact"',
    ),
    ("storage='block' storage='bsr'", 'storage="blocks"'),
    ("inference_input_type=int8", 'text: inference_input_type="int8"'),
    ("inference_input_type=uint8", 'text: inference_input_type="uint8"'),
    ("inference_output_type=int8", 'text: inference_output_type="int8"'),
    ("inference_output_type=uint8", 'text: inference_output_type="uint8"'),
    ("weights='8' weights=8 weights='w8'", 'weights="int8"'),
    ("weights='4' weights=4 weights='w4'", 'weights="int4"'),
)


def folded(guess: str) -> str:
    return re.sub(r"[-_ ]", "", guess).lower()


@functools.cache
def _steps_by_guess() -> dict[str, tuple[str, ...]]:
    """The table by single guesses. Most programs never ask for it."""
    by_guess = {}
    for guesses, step in STEPS:
        steps = (step,) if isinstance(step, str) else step
        by_guess.update(dict.fromkeys(map(folded, guesses.split()), steps))
    return by_guess


def step_for(*guesses: str, arguments: Collection[str] = ()) -> str | None:
    """The step for the first of some guesses that the table knows and that fits.

    Args:
        guesses: Keys of the table, the most special one first.
        arguments: Arguments of the function that was called.
    """
    for guess in guesses:
        for step in _steps_by_guess().get(folded(guess), ()):
            argument = re.match(r"`(\w+)`", step)
            if (
                argument is None
                or argument[1] in arguments
                or not guess.endswith("=")
            ):
                return step
    return None


def for_value(argument: str, value: Any) -> str:
    """A sentence with the value to give in place of a foreign one, or no text."""
    if isinstance(value, str | int):
        typed = repr(value)
    else:  # a dtype, of TensorFlow or NumPy
        typed = str(getattr(value, "name", getattr(value, "__name__", "")))
    step = step_for(f"{argument}={typed}")
    return "" if step is None else f" Use {step}."


def unknown_attribute(owner: Any, name: str) -> AttributeError:
    """The error of an object that has no such attribute: the step to take, if the table has one."""
    kinds = [kind.__name__ for kind in type(owner).__mro__]
    text = f"'{kinds[0]}' object has no attribute {name!r}"
    if not name.startswith("_"):
        step = step_for(*(f"{kind}.{name}" for kind in kinds), name)
        text = text if step is None else f"{text}. Use: {step}"
    return AttributeError(text)


def not_callable(owner: Any) -> TypeError:
    """The error of an object that users of other packages call."""
    name = type(owner).__name__
    return TypeError(
        f"{name!r} object is not callable. Use: {step_for(f'{name}(...)')}"
    )


def not_subscriptable(owner: Any) -> TypeError:
    """The error of an object that users of other packages ask for an entry."""
    name = type(owner).__name__
    return TypeError(
        f"{name!r} object is not subscriptable. Use: {step_for(f'{name}[...]')}"
    )


def unknown_path(path: Any, known: Iterable[str]) -> KeyError:
    """The error of a table by weight that is asked for a layer, or for another name."""
    listed = ", ".join(repr(one) for one in known)
    return KeyError(f"Weights are named by path: {listed}. Received: {path!r}")


def answer(*names: str) -> None:
    """Makes modules, the package or rooms, answer names of other packages."""
    for name in names:
        sys.modules[name].__class__ = Room


class Room(types.ModuleType):
    """The package or a room: it lists its public names, and answers names of other packages.

    `_FILES` of a room lists the names that load when they are used, each with its file.
    """

    def __dir__(self) -> list[str]:
        public = [*self.__all__, *vars(self).get("_ROOMS", ())]
        return sorted(
            {*public, *(name for name in vars(self) if name.startswith("__"))}
        )

    if not TYPE_CHECKING:  # else every name would exist for a type checker

        def __getattr__(self, name: str) -> Any:
            file = vars(self).get("_FILES", {}).get(name)
            if file is not None:
                module = importlib.import_module(f"{self.__name__}.{file}")
                return getattr(module, name)
            text = f"module {self.__name__!r} has no attribute {name!r}"
            step = (
                None
                if name.startswith("_")
                else _room_with(name) or step_for(name)
            )
            if step is None:
                raise AttributeError(text)
            text = f"{text}. In keras_sparse_ortho use: {step}"
            # `from room import name` asks here first. Python replaces an AttributeError by one
            # that says no more than "cannot import name", and `hasattr` takes no ImportError: so
            # the error must be that of who asks, which only the stack shows.
            asking = sys._getframe(1).f_globals.get("__name__")
            raise (
                ImportError(text)
                if asking == "importlib._bootstrap"
                else AttributeError(text)
            )

        def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
            short = self.__name__.removeprefix(f"{_PACKAGE}.")
            step = (
                step_for(f"{short}(...)")
                or f"one of its functions: {', '.join(self.__all__)}"
            )
            raise TypeError(
                f"module {self.__name__!r} is not callable. Use: {step}"
            )


class Answering:
    """A base of objects that answer attributes of other packages' objects."""

    if not TYPE_CHECKING:  # else every attribute would exist for a type checker

        def __getattr__(self, name: str) -> NoReturn:
            kind = type(self)
            # A property that has failed: raise its own error.
            if hasattr(kind, name):
                return object.__getattribute__(self, name)
            raise unknown_attribute(self, name)


def _load_rooms() -> None:
    """Loads the rooms that need no extra, so that their names are known, too."""
    later = vars(sys.modules[_PACKAGE]).get("_LOADED_LATER", ())
    for room in later:
        if room not in _ROOMS_OF_EXTRAS:
            importlib.import_module(f"{_PACKAGE}.{room}")


def _room_with(name: str) -> str | None:
    """The public name of a room, with the room, that is meant by a name."""
    _load_rooms()
    meant = None
    for path, room in [*sys.modules.items()]:
        if not path.startswith(f"{_PACKAGE}.") or "._" in path:
            continue
        public: Sequence[str] = vars(room).get("__all__", ())
        for known in public:
            full = f"{path.removeprefix(f'{_PACKAGE}.')}.{known}"
            if known == name:
                return full
            if folded(known) == folded(name):
                meant = meant or full
    return meant
