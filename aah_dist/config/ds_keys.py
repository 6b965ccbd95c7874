"""Names DeepSpeed 0.19 reads from its JSON.  It ignores unknown ones at the top level and in data_types, and ends
with a traceback for others, so they are checked here."""

TOP_LEVEL_KEYS = frozenset("""
    activation_checkpointing aio autotuning bf16 checkpoint comet comms_logger communication_data_type compile
    csv_monitor data_types dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc dump_state
    flops_profiler fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping
    gradient_predivide_factor log_level memory_breakdown optimizer prescale_gradients
    seq_parallel_communication_data_type steps_per_print tensorboard timers train_batch_size
    train_micro_batch_size_per_gpu vocabulary_size wall_clock_breakdown wandb zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer zero_optimization
""".split())

REFUSED_KEYS = {
    "scheduler": "the learning rate follows train.lr, train.warmup_steps and train.decay_steps",
    "bfloat16": "the section is called bf16",
    "torch_autocast": "autocast mixes types inside the tensor-parallel layers; use bf16",
    "tensor_parallel": "tensor parallelism is set by parallel.tensor_parallel_size",
    "sequence_parallel_size": "sequence parallelism is set by parallel.sequence_parallel",
    "pipeline": "there is no pipeline parallelism",
    "expert_parallel": "the model has no experts",
    "use_data_before_expert_parallelism": "the model has no experts",
    "data_efficiency": "the order of the data is set by train.seed",
    "hybrid_engine": "it is for generating text during training",
    "weight_quantization": "weights are trained unquantized",
    "managed_gradient_accumulation": "the training loop relies on DeepSpeed's accumulation boundary",
}

NESTED_KEYS = {"zero_optimization": frozenset("""
    allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients
    elastic_checkpoint enable_sanity_checks ignore_unused_parameters leaf_module
    legacy_stage1 load_from_fp32_weights log_trace_cache_warnings memory_efficient_linear offload_optimizer
    offload_param overlap_comm override_module_apply parameter_alignment pipeline_loading_checkpoint
    reduce_bucket_size reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory stage
    stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
    stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold
    stage3_module_granularity_threshold stage3_param_persistence_threshold stage3_prefetch_bucket_size
    stage3_use_all_reduce_for_fetch_params sub_group_size use_multi_rank_bucket_allreduce zenflow
    zero_hpz_partition_size zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights
""".split()),
    "bf16": frozenset("bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled "
                      "immediate_grad_update".split()),
    "data_types": frozenset("buffer_dtype grad_accum_dtype keep_in_fp32_modules param_dtype".split())}
