"""The DeepSpeed JSON completed from the run configuration, and its refusals."""

import copy
import json
from pathlib import Path

import pytest
from refusals import error_of

from aah_dist.config import ds_keys
from aah_dist.config.deepspeed import (
    build_ds_config,
    find_ds_config,
    offloads_optimizer,
    precision,
    read_ds_config,
    zero_stage,
)
from aah_dist.config.load import load_config
from aah_dist.config.validate import Layout

pytestmark = pytest.mark.usefixtures("frozen_demo")

LAYOUT = Layout(tp=2, dp=2, accumulation=2, world_size=4)
CONFIG = load_config(str(Path(__file__).parent / "config" / "demo.yaml"))
NAMES = {"zero1": ("bf16", 1), "zero2": ("bf16", 2), "zero3": ("bf16", 3), "zero2_offload": ("bf16", 2),
         "zero2_fp32": ("fp32", 2)}


@pytest.mark.parametrize("name", NAMES)
def test_shipped_files(name):
    ds = read_ds_config(f"ds_configs/{name}.json")
    before = copy.deepcopy(ds)
    built = build_ds_config(ds, CONFIG, LAYOUT)
    assert ds == before
    assert (precision(built), zero_stage(built)) == NAMES[name]
    assert built["zero_optimization"]["overlap_comm"] is False
    assert built["train_batch_size"] == 16 and built["train_micro_batch_size_per_gpu"] == 4
    assert built["gradient_accumulation_steps"] == 2 and built["gradient_clipping"] == 1.0
    params = built["optimizer"]["params"]
    assert built["optimizer"]["type"] == "AdamW"
    assert (params["lr"], params["betas"], params["eps"], params["weight_decay"]) == (2e-3, [0.9, 0.95], 1e-8, 0.1)
    assert offloads_optimizer(built) == (name == "zero2_offload")
    assert params.get("torch_adam", False) == (name != "zero2_offload")
    assert built["steps_per_print"] > 10**9 and built["wall_clock_breakdown"] is False
    if NAMES[name][0] == "bf16":
        assert built["data_types"]["grad_accum_dtype"] == "fp32" and built["communication_data_type"] == "fp32"
    else:
        assert "communication_data_type" not in built


def test_there_are_no_other_shipped_files():
    assert {path.stem for path in (Path(__file__).parents[1] / "ds_configs").iterdir()} == set(NAMES)


def test_bf16_gets_fp32_accumulation_and_communication_unless_asked_otherwise():
    ds = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    built = build_ds_config(ds, CONFIG, LAYOUT)
    assert built["data_types"] == {"grad_accum_dtype": "fp32"} and built["communication_data_type"] == "fp32"
    own = build_ds_config({**ds, "data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "bf16"}, CONFIG,
                          LAYOUT)
    assert own["data_types"] == {"grad_accum_dtype": "bf16"} and own["communication_data_type"] == "bf16"


def test_equal_values_and_auto_are_accepted():
    ds = {"train_batch_size": 16, "gradient_clipping": "auto", "gradient_accumulation_steps": 2,
          "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.95], "eps": "auto",
                                                   "torch_adam": False}}}
    built = build_ds_config(ds, CONFIG, LAYOUT)
    assert built["gradient_clipping"] == 1.0
    assert built["optimizer"]["params"] == {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1,
                                            "torch_adam": False}
    assert (precision(built), zero_stage(built)) == ("fp32", 0)


@pytest.mark.parametrize("ds, parts", [
    ({"train_batch_size": 8}, ["train_batch_size is 8", "train.global_batch_size is 16"]),
    ({"train_micro_batch_size_per_gpu": 1}, ["train_micro_batch_size_per_gpu is 1", "train.micro_batch_size is 4"]),
    ({"gradient_accumulation_steps": 4}, ["gradient_accumulation_steps is 4", "accumulation is 2"]),
    ({"gradient_clipping": 0.5}, ["gradient_clipping is 0.5", "train.clip is 1.0"]),
    ({"optimizer": {"params": {"lr": 1}}}, ["optimizer.params.lr is 1", "train.lr is 0.002"]),
    ({"optimizer": {"params": {"betas": [0.9, 0.999]}}}, ["optimizer.params.betas is [0.9, 0.999]",
                                                          "[train.beta1, train.beta2] is [0.9, 0.95]"]),
    ({"optimizer": {"params": {"eps": 1}}}, ["optimizer.params.eps is 1", "train.eps is 1e-08"]),
    ({"optimizer": {"params": {"weight_decay": 0}}}, ["optimizer.params.weight_decay is 0",
                                                        "train.weight_decay is 0.1"]),
    ({"optimizer": {"type": "Lamb"}}, ["optimizer.type is Lamb", "AdamW"]),
    ({"optimizer": {"params": 3}}, ["optimizer.params is 3"]),
    ({"scheduler": {"type": "WarmupLR"}}, ["scheduler", "train.warmup_steps"]),
    ({"tensor_parallel": {"autotp_size": 2}}, ["tensor_parallel", "parallel.tensor_parallel_size"]),
    ({"data_efficiency": {}}, ["data_efficiency", "train.seed"]),
    ({"gradient_allreduce_op": "sum"}, ["gradient_allreduce_op is sum", "mean"]),
    ({"bf16": {"enabled": True}}, ["bf16", "stage 0", "norm", "1, 2 or 3"]),
    ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}, ["bf16", "stage 0"]),
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, "zero_optimization": {"stage": 2}},
     ["bf16.bf16_master_weights_and_grads", "fp32"]),
    ({"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}, ["fp16.enabled", "bf16"]),
    ({"zero_optimisation": {"stage": 2}}, ["zero_optimisation", "nearest is zero_optimization"]),
    ({"gradient_cliping": 1}, ["gradient_cliping", "nearest is gradient_clipping"]),
    ({"zero_optimization": {"stag": 2}}, ["zero_optimization.stag", "nearest is stage"]),
    ({"zero_optimization": {"cpu_offload": True}}, ["zero_optimization.cpu_offload", "offload"]),
    ({"bf16": {"enable": True}}, ["bf16.enable ", "nearest is enabled"]),
    ({"data_types": {"grad_accum_type": "fp32"}}, ["data_types.grad_accum_type", "nearest is grad_accum_dtype"]),
    ({"zero_optimization": {"stage": 4}}, ["zero_optimization.stage is 4"]),
    ({"zero_optimization": {"stage": True}}, ["zero_optimization.stage is True"]),
    ({"zero_optimization": {"stage": "2"}}, ["zero_optimization.stage is '2'"]),
    ({"zero_optimization": True}, ["zero_optimization is True", "object"]),
    ({"bf16": True}, ["bf16 is True", "object"]),
])
def test_refusals(ds, parts):
    text = error_of(build_ds_config, ds, CONFIG, LAYOUT)
    for part in ["ds_config", *parts]:
        assert part in text


@pytest.mark.parametrize("content, parts", [
    ("{", ["not valid JSON"]),
    ("[1]", ["holds list"]),
    ('{"bf16": {"enabled": true, "enabled": false}}', ["gives enabled twice"]),
])
def test_files_that_cannot_be_read(tmp_path, content, parts):
    (tmp_path / "x.json").write_text(content)
    text = error_of(read_ds_config, tmp_path / "x.json")
    for part in ["x.json", *parts]:
        assert part in text


def test_missing_files_name_the_nearest():
    assert "ds_configs/zero4.json does not exist; the nearest is ds_configs/zero" in error_of(find_ds_config,
                                                                                              "ds_configs/zero4.json")


def test_files_are_found_from_here_then_from_the_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_ds_config("ds_configs/zero2.json").parent.parent == Path(__file__).parents[1]
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / "ds_configs/zero2.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    assert zero_stage(read_ds_config("ds_configs/zero2.json")) == 1


def test_known_keys_are_those_of_the_installed_deepspeed(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    deprecated = {"cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"}
    assert ds_keys.NESTED_KEYS["zero_optimization"] == zero - deprecated
    assert ds_keys.NESTED_KEYS["bf16"] == set(DeepSpeedBF16Config.model_fields)


@pytest.mark.parametrize("name", NAMES)
def test_deepspeed_accepts_what_is_built(name, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    # Without a process group DeepSpeed takes this process for the whole job.
    alone = Layout(tp=1, dp=1, accumulation=4, world_size=1)
    accepted = DeepSpeedConfig(build_ds_config(read_ds_config(f"ds_configs/{name}.json"), CONFIG, alone))
    assert (accepted.train_batch_size, accepted.gradient_accumulation_steps) == (16, 4)
    assert accepted.zero_optimization_stage == NAMES[name][1]
    assert accepted.bfloat16_config.enabled == (NAMES[name][0] == "bf16")


@pytest.mark.parametrize("ds, words", [
    ({"bf16": {"enabled": "yes"}, "zero_optimization": {"stage": 2}}, "bf16.enabled is 'yes'; it must be true"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "needs an nvme_path"),
])
def test_half_given_sections(ds, words):
    assert words in error_of(build_ds_config, ds, CONFIG, LAYOUT)


def test_deepspeeds_own_schema_is_asked_before_a_run():
    from aah_dist.training.engine import check_engine_config

    ds = build_ds_config({"zero_optimization": {"stage": 2, "reduce_bucket_size": "big"}}, CONFIG, LAYOUT)
    assert "ds_config zero_optimization.reduce_bucket_size is 'big'" in error_of(check_engine_config, ds)
