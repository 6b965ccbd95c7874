"""The FLOP counters: decoding of instructions, parsers of what the profilers write, and the tables made of them."""

import struct
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import REPOSITORY

from aah_dist.attention.reference import dense_attention
from aah_dist.bench import callgrind, flops, flops_workload, instructions, nsight
from aah_dist.config.schema import ConfigError, ModelConfig
from aah_dist.parallel import device as devices
from aah_dist.training.flops import forward_flops_per_sample, training_flops_per_token

needs_objdump = pytest.mark.skipif(instructions.missing() is not None, reason="needs objdump on x86-64")
needs_valgrind = pytest.mark.skipif(callgrind.missing() is not None, reason="needs valgrind, cc and objdump")


@pytest.mark.parametrize("instruction, expected", [
    ("vfmadd231ps %ymm0,%ymm1,%ymm2", 16), ("vfmadd132pd (%rax),%ymm1,%ymm2", 8), ("vfnmadd213ps %xmm0,%xmm1,%xmm2", 8),
    ("vfmsub231ps %zmm0,%zmm1,%zmm2{%k1}", 32), ("vfmaddsub132ps %ymm0,%ymm1,%ymm2", 16),
    ("vfmadd231ss %xmm0,%xmm1,%xmm2", 2), ("vfnmsub231sd (%rax),%xmm1,%xmm2", 2),
    ("vfmadd231ph %zmm0,%zmm1,%zmm2", 64), ("vdpbf16ps %zmm0,%zmm1,%zmm2", 64),
    ("mulps  %xmm1,%xmm0", 4), ("addpd  %xmm1,%xmm0", 2), ("addss  (%rdi),%xmm0", 1), ("divsd  %xmm1,%xmm0", 1),
    ("vmulps (%rax),%ymm1,%ymm2", 8), ("vsubpd %zmm0,%zmm1,%zmm2", 8), ("vsqrtps %ymm0,%ymm1", 8),
    ("vaddsubps %ymm0,%ymm1,%ymm2", 8), ("haddps %xmm0,%xmm0", 4), ("vdivss %xmm0,%xmm1,%xmm2", 1),
    ("fmul   %st(1),%st", 1), ("faddp  %st,%st(1)", 1), ("fadds  (%rax)", 1), ("fdivrl (%rax)", 1), ("fsqrt", 1),
    ("vmaxps %ymm0,%ymm1,%ymm2", 0), ("vcmpltps %ymm0,%ymm1,%ymm2", 0), ("cvtsi2sd %rax,%xmm0", 0),
    ("vroundps $0x0,%ymm0,%ymm1", 0), ("vrsqrtps %ymm0,%ymm1", 0), ("vxorps %ymm0,%ymm1,%ymm2", 0),
    ("vmovups (%rax),%ymm1", 0), ("vbroadcastss (%rax),%ymm1", 0), ("add    %rax,%rbx", 0), ("sub    $0x8,%rsp", 0),
    ("mul    %rcx", 0), ("fld    %st(0)", 0), ("fldcw  (%rsp)", 0), ("paddd  %xmm0,%xmm1", 0), ("nop", 0), ("", 0),
])
def test_flops_of_an_instruction(instruction: str, expected: int):
    assert instructions.flops(instruction) == expected


OBJDUMP = """
/tmp/code.bin:     file format binary


Disassembly of section .data:

0000000000000000 <.data>:
   0:\tvfmadd231ps %ymm0,%ymm1,%ymm2
   5:\tnop
  10:\tnop
  20:\t(bad)
  21:\tnop
  40:\taddss  %xmm1,%xmm0
  44:\tmulps  %xmm1,%xmm0
  60:\tret
"""


def test_only_the_start_of_a_slot_counts():
    assert dict(instructions.slots(OBJDUMP)) == {0: "vfmadd231ps %ymm0,%ymm1,%ymm2", 2: "addss  %xmm1,%xmm0", 3: "ret"}


def elf(code: bytes, address: int) -> bytes:
    """The smallest ELF file whose code is loaded at `address`; a segment of data comes first."""
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0,
                                                                  0, 0)
    offset = 64 + 2 * 56
    data = struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, 64, 64, 4096)
    text = struct.pack("<IIQQQQQQ", 1, 5, offset, address, address, len(code), len(code), 4096)
    return head + data + text + code


@needs_objdump
def test_decoding_reads_the_bytes_at_an_address(tmp_path: Path):
    file = tmp_path / "code.so"
    # vfmadd231ps; two bytes of data that are no instruction's start; mulps; the last instruction of the file
    file.write_bytes(elf(bytes.fromhex("c4e275b8d0" "0f0b" "0f59c1" "c3"), 0x5000))
    (tmp_path / "text").write_text("no program")
    path = str(file)
    asked = [(path, 0x5000), (path, 0x5007), (path, 0x500a), (path, 0x500b), (path, 0x4fff), (path, 0x20),
             ("???", 0x5000), (str(tmp_path / "text"), 0), (str(tmp_path / "absent"), 0)]
    found = instructions.decode(asked)
    assert {key: text.split()[0] for key, text in found.items()} == {
        (path, 0x5000): "vfmadd231ps", (path, 0x5007): "mulps", (path, 0x500a): "ret"}
    assert [instructions.flops(text) for text in found.values()] == [16, 4, 0]
    assert instructions.decode([("???", 1)]) == {}


# Two functions of two files; the second calls the first 3 times, 12 instructions that were counted where they ran.
DUMP = """# callgrind format
version: 1
creator: callgrind-3.19.0
pid: 4242
cmd:  python -m workload
part: 2

desc: Timerange: Basic block 1183033 - 4424995
desc: Trigger: Client Request: causal.forward

positions: instr
events: Ir
summary: 40


ob=/lib/a.so
fl=???
fn=kernel
0x1000 12
0x1004 3

ob=/lib/b.so
fl=x.c
fn=caller
0x1000 5
cob=/lib/a.so
cfi=???
cfn=kernel
calls=3 0x1000
0x1006 15
fi=y.h
0x1006 13
fe=x.c
0x1000 7

totals: 40
"""


def test_a_callgrind_dump_is_read_by_file_and_address():
    name, executed = callgrind.parse_dump(DUMP, "dump.2")
    assert name == "causal.forward"
    assert executed == {("/lib/a.so", 0x1000): 12, ("/lib/a.so", 0x1004): 3, ("/lib/b.so", 0x1000): 12,
                        ("/lib/b.so", 0x1006): 13}
    end = DUMP.replace("Client Request: causal.forward", "Program termination")
    assert callgrind.parse_dump(end, "dump")[0] is None


@pytest.mark.parametrize("text, said", [
    (DUMP.replace("positions: instr", "positions: line"), "no instruction addresses"),
    (DUMP.replace("events: Ir", "events: Ir Dr"), "no instruction addresses"),
    (DUMP.replace("totals: 40\n", ""), "lists 40 instructions and says it has None"),
    (DUMP.replace("0x1004 3\n", ""), "lists 37 instructions and says it has 40"),
])
def test_a_dump_that_is_not_whole_is_refused(text: str, said: str):
    with pytest.raises(ConfigError, match=said):
        callgrind.parse_dump(text, "dump.2")


def test_too_little_decoded_is_no_figure():
    executed = Counter({("a", 1): 900, ("a", 2): 100})
    found = callgrind.count(executed, {("a", 1): 16})
    assert (found.flops, found.instructions, found.decoded, found.share) == (14400, 1000, 900, 0.9)
    assert callgrind.checked("causal", found) is found
    with pytest.raises(ConfigError, match=r"range causal: 10.0% of 1,000 executed instructions could be decoded"):
        callgrind.checked("causal", callgrind.count(executed, {("a", 2): 1}))
    with pytest.raises(ConfigError, match="range causal"):
        callgrind.checked("causal", callgrind.count(Counter(), {}))


PROGRAM = """
void range_begin(void);
void range_end(const char *name);

int main(void) {
    volatile float x[4] = {1, 2, 3, 4};
    for (int i = 0; i < 50; i++) x[0] += 1.0f;
    range_begin();
    for (int i = 0; i < 1000; i++) { x[0] += 1.0f; x[1] *= 1.5f; }
    range_end("first");
    range_begin();
    for (int i = 0; i < 10; i++) x[2] /= 3.0f;
    range_end("second");
    return 0;
}
"""


@needs_valgrind
def test_ranges_of_a_real_program_are_counted(tmp_path: Path):
    """2000 and 10 scalar operations; what runs outside the ranges is left out."""
    (tmp_path / "program.c").write_text(PROGRAM)
    marks = Path(callgrind.__file__).with_name("callgrind_marks.c")
    subprocess.run(["cc", "-O1", "-o", str(tmp_path / "program"), str(tmp_path / "program.c"), str(marks)], check=True)
    callgrind.run([str(tmp_path / "program")], tmp_path, {})
    found = callgrind.counts(tmp_path)
    assert {name: count.flops for name, count in found.items()} == {"first": 2000, "second": 10}
    assert all(count.share > 0.99 for count in found.values())
    with pytest.raises(ConfigError, match="valgrind ended with code 1"):
        callgrind.run([sys.executable, "-c", "raise SystemExit(1)"], tmp_path, {})


@needs_valgrind
def test_marks_do_nothing_outside_valgrind(tmp_path: Path):
    ran = []
    with callgrind.Marks(str(callgrind.compile_marks(tmp_path))).range("name"):
        ran.append(1)
    assert ran and not list(tmp_path.glob("dump*"))


def test_what_is_missing_is_one_sentence(tmp_path: Path):
    """Nothing on the path: what to install is named, and the exit code is that of misuse."""
    run = subprocess.run([sys.executable, "-m", "aah_dist.bench.flops", "--device", "cpu"], cwd=REPOSITORY,
                         capture_output=True, text=True, check=False,
                         env={"PATH": str(tmp_path), "PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu"})
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.strip() == ("error: valgrind was not found; counting instructions needs it (apt-get install "
                                  "valgrind).")


# The pages below are synthetic: written by hand in the form that Nsight Compute's documentation and published reports
# have (names, units, a row for each kernel).  None was recorded on a GPU.
RANGE = "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"


def page(kernels: list[tuple[str, str, dict[str, str]]], drop: tuple[str, ...] = (), rename: dict | None = None,
         unit: str = "inst") -> str:
    """kernels: (range, name, values by metric); 0 where no value is given."""
    metrics = [metric for metric in [*nsight.CORES, *(f"{name}.sum" for name in nsight.TENSOR)] if metric not in drop]
    head = ["ID", "Process ID", RANGE, "Kernel Name", *((rename or {}).get(metric, metric) for metric in metrics)]
    units = ["", "", "", "", *(unit if "inst" in metric else "" for metric in metrics)]
    rows = [["0", "77", f'1 "<default domain>:{where}:none:none:none:none:none:none"', kernel,
             *(values.get(metric, "0") for metric in metrics)] for where, kernel, values in kernels]
    quoted = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in [head, units, *rows]]
    return "\n".join(["==PROF== Connected to process 77", *quoted, "==PROF== Disconnected"]) + "\n"


BF16 = f"{nsight.BF16}.sum"
FFMA, HFMA = (f"smsp__sass_thread_inst_executed_op_{op}_pred_on.sum" for op in ("ffma", "hfma"))
KERNELS = [("causal.forward", "flash<float, 128>", {BF16: "4,000,000", FFMA: "1,000", HFMA: "10"}),
           ("causal.forward", "combine", {BF16: "96", "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum": "7"}),
           ("eighth.forward", "window_kernel", {BF16: "512", "sm__ops_path_tensor_src_tf32_dst_fp32.sum": "8"})]
NAMES = ["causal.forward", "eighth.forward"]


def test_a_page_of_nsight_compute_is_summed_by_range():
    found = nsight.counts(page(KERNELS), NAMES)
    assert found["causal.forward"] == nsight.Count(2, 2 * 1000 + 4 * 10 + 7, 4_000_096)
    assert found["eighth.forward"] == nsight.Count(1, 0, 520) and found["eighth.forward"].flops == 520


def test_parts_stand_in_for_a_tensor_metric_but_do_not_add_to_it():
    half = page(KERNELS, rename={BF16: f"{nsight.BF16}_sparsity_off.sum"})
    assert nsight.counts(half, NAMES)["causal.forward"].tensor == 4_000_096
    fp16 = "sm__ops_path_tensor_src_fp16_dst_fp32.sum"
    both = page([(where, name, values | {fp16: values[BF16]}) for where, name, values in KERNELS],
                rename={fp16: f"{nsight.BF16}_sparsity_off.sum"})
    assert nsight.counts(both, NAMES)["causal.forward"].tensor == 4_000_096


@pytest.mark.parametrize("text, said", [
    (page(KERNELS, drop=(BF16,)), r"no sm__ops_path_tensor_src_bf16_dst_fp32.sum; without the tensor-core pipe"),
    (page([*KERNELS[:2], ("eighth.forward", "scalar", {FFMA: "9"})]), r"range eighth.forward: .* is 0 over 1 kernels"),
    (page(KERNELS[:2]), "no kernel in range eighth.forward"),
    (page([*KERNELS, ("other", "copy", {})]), "kernel copy is in 0 of the counted NVTX ranges"),
    (page(KERNELS, drop=(FFMA,)), "lacks smsp__sass_thread_inst_executed_op_ffma_pred_on.sum"),
    (page([*KERNELS[:2], ("eighth.forward", "k", {BF16: "n/a"})]), "kernel k has 'n/a' for sm__ops_path_tensor"),
    (page(KERNELS, unit="Kinst"), "in 'Kinst'"),
    (page(KERNELS).replace("Start/Stop_Range", "Range"), "names no NVTX ranges"),
    (page(KERNELS).replace(',"8","0"\n', "\n"), "rows of unequal length"),
    (page([]), "no raw page"),
    ("==ERROR== ERR_NVGPUCTRPERM\n", "no raw page of Nsight Compute with kernels in it"),
    ('"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n' + '"0","k","m","inst","1"\n' * 3, "no raw page"),
])
def test_a_page_without_the_whole_count_is_refused(text: str, said: str):
    with pytest.raises(ConfigError, match=said):
        nsight.counts(text, NAMES)


def test_the_command_line_asks_for_tensor_cores_and_every_range():
    arguments = Namespace(device="cuda", heads=12, length=4096, size=128)
    command = flops.nsight_command(arguments, "out.csv")
    names = flops_workload.range_names(flops_workload.cases(12, 4096))
    assert [command[i + 1] for i, word in enumerate(command) if word == "--nvtx-include"] == names
    assert len(names) == len(set(names)) == 1 + 2 * 9 and not any("/" in name for name in names)
    metrics = command[command.index("--metrics") + 1].split(",")
    assert metrics == [*nsight.CORES, nsight.TENSOR_PATTERN]
    assert all(word in command for word in ("--nvtx", "--csv", "--page", "--print-units", "--log-file"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_command_is_printed_and_nothing_measured():
    run = subprocess.run([sys.executable, "-m", "aah_dist.bench.flops", "--device", "cuda"], cwd=REPOSITORY,
                         capture_output=True, text=True, check=False)
    assert run.returncode == 1
    said, _, command = run.stdout.partition("\n\n")
    assert said.startswith("Nothing was measured: ") and command.startswith("ncu --target-processes all --nvtx ")
    assert "|" not in run.stdout.replace(nsight.TENSOR_PATTERN, "")


def test_a_setting_below_one_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["flops", "--heads", "0"])
    with pytest.raises(ConfigError, match=r"--heads is 0; it must be at least 1\."):
        flops.parse()


@pytest.fixture
def work() -> flops_workload.Workload:
    return flops_workload.Workload(12, 48, 8, torch.device("cpu"))


def test_every_range_is_marked_once(work: flops_workload.Workload):
    marked, open_now = [], []

    @contextmanager
    def mark(name: str):
        assert not open_now
        marked.append(name)
        open_now.append(name)
        yield
        open_now.pop()

    work.count(list(flops.PARTS), mark, warm=False)
    assert marked == flops_workload.range_names(work.rows)
    assert all(tensor.grad is not None for tensor in (*work.qkv, work.x, work.attended))


def test_every_case_computes_the_attention_of_its_windows(work: flops_workload.Workload):
    """The dense mask and the library's causal attention give what their rows say, so the ratios compare like with
    like."""
    q, k, v = work.qkv
    for row in work.rows:
        expected = dense_attention(q, k, v, row.windows, 8**-0.5, 0.0, None)
        torch.testing.assert_close(work.attention(row)(), expected, msg=row.name)
    assert len({row.windows for row in work.rows}) == 6


def test_a_range_for_the_profilers_holds_until_its_kernels_end(monkeypatch: pytest.MonkeyPatch):
    """Process-wide (start/end), because backward kernels are launched by another thread; no calls at all on CPU."""
    said = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: said.append("wait"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_start", lambda name: said.append(name) or 5)
    monkeypatch.setattr(torch.cuda.nvtx, "range_end", lambda number: said.append(number))
    with devices.annotate("eighth.forward", torch.device("cpu")):
        pass
    assert not said
    with devices.annotate("eighth.forward", torch.device("cuda", 0)):
        said.append("work")
    assert said == ["wait", "eighth.forward", "work", "wait", 5]


def test_timing_leaves_out_the_warm_up(work: flops_workload.Workload):
    found = work.time(2)
    assert list(found) == [*(row.name for row in work.rows), flops_workload.REST]
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in found.values())


def test_other_head_counts_leave_the_plans_out():
    assert [row.name for row in flops_workload.cases(2, 4)] == ["causal", "full_attention", "eighth", "eighth_mask"]
    assert flops_workload.cases(2, 4)[2].windows == (1, 1)


def test_table_puts_the_figures_side_by_side():
    arguments = Namespace(heads=2, length=8)
    names = ("causal", "full_attention", "eighth", "eighth_mask")
    counted = ((10, 30), (11, 30), (2, 8), (20, 40))
    measured = {f"{name}.{way}": value for name, values in zip(names, counted, strict=True)
                for way, value in zip(("forward", "backward"), values, strict=True)}
    measured |= {"rest.forward": 20.0, "rest.backward": 40.0}
    seconds = {"causal": [1.0, 2.0, 4.0], "full_attention": [1.0, 2.0, 4.0], "eighth": [0.5, 0.5, 3.0],
               "eighth_mask": [2.0, 6.0, 8.0], "rest": [1.0, 2.0, 4.0]}
    lines = flops.table(arguments, measured, seconds).splitlines()
    assert lines[3] == "| causal attention of the library | 1.000 | 1.000 | 1.000 | 1.000 | 1.000 | 1.000 | 1.000 |"
    # W = 1: 8 of 36 pairs; (2 + 8) / 40; 2 / 10; (10 + 60) / 100; medians of .5, .25, .75 and of .75, .625, .875
    assert lines[5] == "| all T/8 | 0.125 | 0.222 | 0.250 | 0.200 | 0.700 | 0.500 | 0.750 |"
    assert lines[6].startswith("| all T/8 by a dense mask | 0.125 | 0.222 | 1.500 | 2.000 | 1.200 | 2.000 | ")


def test_a_counter_that_is_wrong_about_a_known_product_gives_no_figures():
    exact = 2 * 256**3
    assert "1.0400" in flops.check({"check": 1.04 * exact}, "cpu")
    for wrong in (0.5, 0.94, 1.06):
        with pytest.raises(ConfigError, match="no figures are given"):
            flops.check({"check": wrong * exact}, "cpu")


@pytest.mark.parametrize("activation, kv_heads", [("gelu", 3), ("swiglu", 1)])
def test_model_flops_by_counting(activation: str, kv_heads: int):
    """Every multiply-add of a forward pass at T 7, one at a time, under windows that differ by layer and head."""
    model = ModelConfig(num_layers=2, hidden_size=12, num_heads=3, num_kv_heads=kv_heads, ffn_hidden_size=20,
                        seq_length=7, activation=activation)
    windows, vocabulary, t = np.array([[1, 3, 7], [2, 7, 6]]), 11, 7
    matrices = [(12, 12 + 2 * 4 * kv_heads), (12, 12), (20, 12), *[(12, 20)] * (2 if activation == "swiglu" else 1)]
    counted = sum(1 for _ in range(t) for _ in range(12) for _ in range(vocabulary))
    for layer in windows:
        counted += sum(1 for _ in range(t) for rows, columns in matrices for _ in range(rows) for _ in range(columns))
        for window in layer:
            read = sum(1 for i in range(t) for j in range(t) if i - window < j <= i)
            counted += 2 * read * 4  # scores and weighted values, D = 4 each
    assert forward_flops_per_sample(model, vocabulary, windows) == 2 * counted
    assert training_flops_per_token(model, vocabulary, windows) == pytest.approx(6 * counted / t)
