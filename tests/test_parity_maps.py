"""How many layers group their heads even against odd: what bf16 products do to the controller, and fp64 does not.

Under bf16 all similarities of level 0 round to 1, so that the forced split starts from heads 0 and 1 and deals out the
others in turn, whatever the features are (AAH-v3, trap N1).  The published runs show such maps in most layers.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from aah_dist.config.schema import AahConfig, ModelConfig
from aah_dist.control.controller import Controller
from aah_dist.control.settings import Settings
from aah_dist.model.context import StepContext
from aah_dist.parallel import device as devices
from aah_dist.parallel import launch, topology
from aah_dist.training.statistics import StatisticsBuffer

CPU = torch.device("cpu")
VOCABULARY = 512
LAYERS, HEAD_SIZE, LENGTH = 8, 128, 1024


@pytest.fixture(scope="module", params=[8, 12], ids="H{}".format)
def sums(request: pytest.FixtureRequest) -> Iterator[np.ndarray]:
    """Statistics of one forward of the untrained model over random tokens, float64 [layers, heads, columns]."""
    from megatron.core import parallel_state

    from aah_dist.model.gpt import build_gpt

    launch._export(0, 1, 0, 1, "127.0.0.1", launch.free_port())
    launch.form_process_group("gloo", 1.0)
    topology.form_groups(1, 1.0)
    devices.make_portable(CPU, 0)
    heads = request.param
    model = ModelConfig(num_layers=LAYERS, hidden_size=HEAD_SIZE * heads, num_heads=heads, ffn_hidden_size=256,
                        seq_length=LENGTH, init="paper")
    context = StepContext(seed=5, windows=np.full((LAYERS, heads), LENGTH))
    gpt = build_gpt(model, VOCABULARY, context, tp_rank=0, tp_size=1, sequence_parallel=False, recompute=False,
                    dtype=torch.float32, seed=5, device=CPU)
    buffer = StatisticsBuffer(LAYERS, heads, slice(None), 1, CPU, seed=5, entropy_rows=64, length=LENGTH)
    buffer.begin(0)
    context.statistics = buffer
    tokens = torch.randint(0, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        gpt(tokens, torch.arange(LENGTH)[None], None, labels=tokens)
    yield buffer.reduce()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def parity_layers(sums: np.ndarray, precision: str) -> int:
    """Layers whose first map is 0, 1, 0, 1, ..."""
    heads = sums.shape[1]
    settings = Settings(aah=AahConfig(policy="adaptive", control_precision=precision), layers=LAYERS, heads=heads,
                        units=heads, length=LENGTH, windows=(128, 256, 512, 1024), head_blocks=1, seed=5)
    maps = Controller(settings).decide(1, sums).maps
    return int((maps == np.arange(heads) % 2).all(1).sum())


def test_bf16_products_group_even_against_odd(sums: np.ndarray):
    assert parity_layers(sums, "reference_bf16") >= LAYERS / 2


def test_fp64_groups_by_the_features(sums: np.ndarray):
    assert parity_layers(sums, "fp64") <= 1
