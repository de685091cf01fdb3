"""What each reader makes of a file: right rows, every line or event accounted for, bad input in one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from fake_measurements import NEW, OLD, Trace, nccl_log

from simkit.errors import InputError
from simkit.readers import Asked, Read, Source, detect, files, read

ASKED = Asked(device="a100-sxm4-80gb", link="nvlink3")


def accounted(found: Read) -> Read:
    assert found.total == found.used + sum(found.skipped.values())
    return found


# -- nccl-tests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("test", "op"),
    [("all_reduce", "all_reduce"), ("all_gather", "all_gather"), ("reduce_scatter", "reduce_scatter"),
     ("alltoall", "all_to_all"), ("sendrecv", "send_recv"), ("broadcast", "broadcast")],
)  # fmt: skip
def test_sizes_times_and_ranks_of_a_log(test: str, op: str, tmp_path: Path) -> None:
    found = accounted(read(nccl_log(tmp_path / "x.log", test, ranks=4, least=2**20, most=2**22), ASKED))
    assert [r["bytes"] for r in found.rows] == ["1048576", "2097152", "4194304"]
    assert {(r["op"], r["ranks"], r["device"], r["intra"], r["dtype"]) for r in found.rows} == {
        (op, "4", "a100-sxm4-80gb", "nvlink3", "fp32")
    }
    moved = {"all_reduce": 1.5, "broadcast": 1.0, "sendrecv": 1.0}.get(test, 0.75)
    assert float(found.rows[0]["value"]) == pytest.approx(20e-6 + moved * 2**20 / 200e9, rel=1e-3)


def test_a_line_as_printed(tmp_path: Path) -> None:
    """One line by hand: 8 GPUs of one host, 1 MiB in 35.1 us are 29.87 GB/s, times 1.75 52.28 GB/s."""
    text = nccl_log(tmp_path / "x.log", least=8, most=4).read_text(encoding="utf-8")
    line = "  1048576   262144   float   sum   -1   35.10   29.87   52.28   0   34.92   30.03   52.55   N/A"
    (tmp_path / "y.log").write_text(text.replace("# Out of bounds", line + "\n# Out of bounds"), encoding="utf-8")
    found = read(tmp_path / "y.log", ASKED)
    assert [(r["bytes"], float(r["value"])) for r in found.rows] == [("1048576", pytest.approx(35.1e-6))]


def test_old_columns_launchers_and_hosts(tmp_path: Path) -> None:
    path = nccl_log(tmp_path / "x.log", ranks=16, hosts=2, columns=OLD, prefix="[1,0]<stdout>:", least=2**20)
    asked = Asked(device="a100-sxm4-80gb", link="ib-hdr", nics_per_node=8)
    row = read(path, asked).rows[0]
    assert (row["inter"], row["ranks"], row["gpus_per_node"], row["nics_per_node"]) == ("ib-hdr", "16", "8", "8")
    assert "intra" not in row


def test_ranks_and_test_follow_from_the_figures_where_nothing_says_them(tmp_path: Path) -> None:
    for test, op, ranks in (("all_reduce", "all_reduce", 6), ("reduce_scatter", "reduce_scatter", 8),
                            ("sendrecv", "send_recv", 0), ("all_reduce", "all_reduce", 2)):  # fmt: skip
        listed = ranks == 2 or not ranks
        path = nccl_log(tmp_path / "run.log", test, ranks=ranks or 4, announce=False, list_ranks=listed)
        rows = read(path, ASKED).rows
        assert {(r["op"], r["ranks"]) for r in rows} == {(op, str(ranks or 4))}
        assert len(rows) > 20


def test_what_looks_alike_needs_a_name(tmp_path: Path) -> None:
    path = nccl_log(tmp_path / "run.log", "all_gather", announce=False)
    with pytest.raises(InputError, match="name the file like all_gather_perf"):
        read(path, ASKED)
    assert read(path.rename(tmp_path / "all_gather_perf.log"), ASKED).rows[0]["op"] == "all_gather"


def test_two_tests_in_one_log_keep_their_ranks(tmp_path: Path) -> None:
    one = nccl_log(tmp_path / "a.log", ranks=8, least=2**20, most=2**21).read_text(encoding="utf-8")
    two = nccl_log(tmp_path / "b.log", "all_gather", ranks=4, least=2**20, most=2**21).read_text(encoding="utf-8")
    (tmp_path / "c.log").write_text(one + two, encoding="utf-8")
    found = accounted(read(tmp_path / "c.log", ASKED))
    assert [(r["op"], r["ranks"]) for r in found.rows] == [("all_reduce", "8")] * 2 + [("all_gather", "4")] * 2


def test_bad_lines_are_counted_with_their_reason(tmp_path: Path) -> None:
    path = nccl_log(tmp_path / "x.log", least=2**20, most=2**24)
    lines = path.read_text(encoding="utf-8").splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("1048576"))
    lines[at] = lines[at][:30]
    lines[at + 1] = lines[at + 1].replace("  0  ", "  37  ", 1)
    cells = lines[at + 2].split()
    cells[5] = f"{float(cells[5]) * 2:.2f}"
    lines[at + 2] = "  ".join(cells)
    path.write_text("\n".join(lines), encoding="utf-8")
    found = accounted(read(path, ASKED))
    assert len(found.rows) == 2
    reasons = " ".join(found.skipped)
    for words in ("cut off", "wrong results (37", "is not the printed algbw"):
        assert words in reasons


def test_a_log_without_out_of_place_figures_takes_those_in_place(tmp_path: Path) -> None:
    path = nccl_log(tmp_path / "x.log", "alltoall", least=2**20, most=2**20)
    assert len(read(nccl_log(path, "alltoall", in_place=False, least=2**20, most=2**20), ASKED).rows) == 1
    text = path.read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith("1048576")).split()
    swapped = "  ".join([*row[:5], *row[9:], *row[5:9]])
    path.write_text(text.replace("  ".join(row), swapped), encoding="utf-8")
    assert len(read(path, ASKED).rows) == 1


def test_one_rank_moves_nothing(tmp_path: Path) -> None:
    text = nccl_log(tmp_path / "x.log", ranks=2).read_text(encoding="utf-8").replace("Rank  1", "Rank  0")
    (tmp_path / "x.log").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="nothing moves"):
        read(tmp_path / "x.log", ASKED)


# -- torch.profiler --------------------------------------------------------------------------------------------------


def test_products_attention_and_streams_of_a_trace(tmp_path: Path) -> None:
    bf16 = "c10::BFloat16"
    trace = Trace()
    for seconds in (3e-3, 1e-3, 2e-3):
        trace.mm(4096, 1024, 8192, seconds)
    trace.call("aten::addmm", [[512], [64, 256], [256, 512]], [bf16] * 3, "gemm", 1e-4)
    trace.call("aten::bmm", [[16, 64, 32], [16, 32, 128]], ["c10::Half"] * 2, "gemm", 1e-4)
    trace.call("aten::linear", [[8, 128, 256], [1024, 256], []], ["float", "float", ""], "sm80_xmma_gemm_tf32f32", 1e-4)
    causal = ["", "", "", "0.", "True", "False"]
    trace.call("aten::_scaled_dot_product_flash_attention", [[2, 32, 1024, 128], [2, 8, 1024, 128], [2, 8, 1024, 128]],
               [bf16] * 3, "flash_fwd", 2e-4, concrete=causal)  # fmt: skip
    trace.call("aten::add", [[1000, 1000], [1000], []], [bf16, "float", "Scalar"], "elementwise", 1e-5, linked=False)
    trace.call("aten::copy_", [[1000, 1000], [1000, 1000]], [bf16, "float"], "elementwise", 1e-5)
    found = accounted(read(trace.write(tmp_path / "t.json.gz"), Asked()))
    rows = [{k: v for k, v in r.items() if k in ("op", "dtype", "batch", "m", "n", "k", "heads", "kv_heads", "head_dim",
                                                  "q_len", "kv_len", "bytes")} for r in found.rows]  # fmt: skip
    assert rows == [
        {"op": "gemm", "dtype": "bf16", "m": "4096", "n": "1024", "k": "8192"},
        {"op": "gemm", "dtype": "bf16", "m": "64", "n": "512", "k": "256"},
        {"op": "gemm", "dtype": "fp16", "batch": "16", "m": "64", "n": "128", "k": "32"},
        {"op": "gemm", "dtype": "tf32", "m": "1024", "n": "1024", "k": "256"},
        {"op": "attention_prefill", "dtype": "bf16", "batch": "2", "heads": "32", "kv_heads": "8", "head_dim": "128",
         "q_len": "1024", "kv_len": "1024"},
        # Reads 1e6 of 2 and 1e3 of 4 bytes, writes 1e6 of 2; then reads 4e6 and writes 2e6.
        {"op": "memory", "bytes": "4004000"},
        {"op": "memory", "bytes": "6000000"},
    ]  # fmt: skip
    assert float(found.rows[0]["value"]) == pytest.approx(2e-3)
    assert {r["device"] for r in found.rows} == {"a100-sxm4-80gb"}


def test_kernels_of_one_operator_are_added_up(tmp_path: Path) -> None:
    trace = Trace()
    trace.mm(64, 64, 65536, 1e-4)
    split = dict(trace.events[-1], name="splitKreduce", dur=20.0)
    trace.events.append(split)
    found = accounted(read(trace.write(tmp_path / "t.json"), Asked()))
    assert float(found.rows[0]["value"]) == pytest.approx(1.2e-4)


def test_collectives_of_a_trace_take_the_shortest_call(tmp_path: Path) -> None:
    trace = Trace()
    for seconds in (5e-3, 2e-3, 3e-3):
        trace.collective("allreduce", 10**8, 10**8, 8, seconds)
    trace.collective("_allgather_base", 10**6, 8 * 10**6, 8, 1e-3, on_kernel=False)
    trace.collective("_reduce_scatter_base", 16 * 10**6, 10**6, 16, 1e-3)
    asked = Asked(link="ib-hdr")
    rows = accounted(read(trace.write(tmp_path / "t.json"), asked)).rows
    got = [(r["op"], r["bytes"], r["ranks"], r.get("intra"), r.get("inter")) for r in rows]
    assert sorted(got) == [
        ("all_gather", "16000000", "8", "ib-hdr", None),
        ("all_reduce", "200000000", "8", "ib-hdr", None),
        ("reduce_scatter", "32000000", "16", None, "ib-hdr"),
    ]
    seconds = {r["op"]: float(r["value"]) for r in rows}
    assert seconds["all_reduce"] == pytest.approx(2e-3)


def test_ranks_of_a_group_on_several_nodes(tmp_path: Path) -> None:
    trace = Trace(devices=8)
    trace.collective("allreduce", 10**8, 10**8, 4, 1e-3, members="[0, 8, 16, 24]")
    trace.collective("allreduce", 10**8, 10**8, 4, 1e-3, members="[0, 1, ...]")
    found = accounted(read(trace.write(tmp_path / "t.json"), ASKED))
    assert [(r["ranks"], r["gpus_per_node"]) for r in found.rows] == [("4", "1")]
    assert any("which nodes" in reason for reason in found.skipped)


def test_what_no_table_holds_is_skipped_with_its_reason(tmp_path: Path) -> None:
    bf16 = "c10::BFloat16"
    trace = Trace()
    trace.mm(64, 64, 64, 1e-5)
    trace.call("aten::embedding", [[100, 8], [4]], ["float", "long int"], "index", 1e-5)
    trace.call("aten::_scaled_dot_product_flash_attention", [[1, 8, 64, 64]] * 3, [bf16] * 3, "flash", 1e-5,
               concrete=["", "", "", "0.", "False", "False"])  # fmt: skip
    trace.call("aten::_scaled_dot_product_flash_attention", [[1, 8, 64, 64]] * 3, [bf16] * 3, "flash", 1e-5)
    trace.call("aten::mm", [], [], "gemm", 1e-5)
    trace.add("kernel", "graphed", 1.0, 5.0, 0, {"device": 0, "correlation": 999999})
    trace.add("python_function", "f", 1.0, 5.0, 1)
    trace.events.append({"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}})
    found = accounted(read(trace.write(tmp_path / "t.json"), Asked()))
    assert len(found.rows) == 1
    said = " | ".join(found.skipped)
    for words in ("aten::embedding has no row", "without a causal mask", "does not say whether its mask", "CUDA graph",
                  "shapes are not", "python_function", "no event with a duration"):  # fmt: skip
        assert words in said


def test_paces_of_launching(tmp_path: Path) -> None:
    trace = Trace()
    for _ in range(40):
        trace.call("aten::mul", [[64], [64]], ["float", "float"], "tiny", 2e-6)
    facts = read(trace.write(tmp_path / "t.json"), Asked()).facts
    assert facts["kernel_s"] == pytest.approx(2e-6)
    assert facts["host_kernel_s"] == pytest.approx(10e-6)


# -- tables ----------------------------------------------------------------------------------------------------------


def table(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_columns_as_people_name_them(tmp_path: Path) -> None:
    text = "M,N,K,Data Type,Latency (us),colour\n4096,4096,4096,bfloat16,500,red\n"
    found = accounted(read(table(tmp_path / "g.csv", text), ASKED))
    row = found.rows[0]
    assert (row["op"], row["m"], row["dtype"], float(row["value"])) == ("gemm", "4096", "bf16", pytest.approx(5e-4))
    assert found.left_out == ["colour"]


def test_rates_become_times(tmp_path: Path) -> None:
    """2 x 4096^3 FLOP at 200 TFLOP/s; an all-reduce over 8 moves 1.75 times its size at the bus bandwidth."""
    gemm = read(table(tmp_path / "g.csv", "m,n,k,dtype,tflops\n4096,4096,4096,fp16,200\n"), ASKED).rows[0]
    assert float(gemm["value"]) == pytest.approx(2 * 4096**3 / 200e12)
    text = "collective,size_mib,gpus,busbw_GBps\nall-reduce,64,8,150\nAllGather,64,8,150\n"
    rows = read(table(tmp_path / "c.csv", text), ASKED).rows
    assert [r["op"] for r in rows] == ["all_reduce", "all_gather"]
    assert float(rows[0]["value"]) == pytest.approx(1.75 * 64 * 2**20 / 150e9)
    assert rows[0]["intra"] == "nvlink3"


def test_our_own_tables_pass_as_they_are(tmp_path: Path) -> None:
    text = "id,op,dtype,m,n,k,device,metric,value\na,gemm,bf16,64,64,64,h100-sxm5-80gb,time_s,1e-5\n"
    text += "b,gemm,bf16,64,64,64,h100-sxm5-80gb,mfu,0.5\nc,gemm,bf16,64,64,64,,time_s,-1\nd,gemm\n"
    found = accounted(read(table(tmp_path / "kernel_x.csv", text), ASKED))
    assert [r["id"] for r in found.rows] == ["a"]
    assert sum(found.skipped.values()) == 3


def test_lines_that_lack_something(tmp_path: Path) -> None:
    text = "op,m,n,k,size,ranks,time_us\ngemm,64,64,64,,,1\ngemm,64,,64,,,1\nall_reduce,,,,100,,1\nfft,,,,1,1,1\n"
    text += "gemm,64,64,64,,,fast\n,,,,,,\ngemm,64,64,64,,\n"
    found = accounted(read(table(tmp_path / "x.csv", text), ASKED))
    assert len(found.rows) == 1
    said = " | ".join(found.skipped)
    for words in ("gemm without n", "all_reduce without ranks", "op fft", "time is no positive number", "blank",
                  "another number of cells"):  # fmt: skip
        assert words in said


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"hello\n", "no known format"),
        ("b.bin", bytes(range(256)), "not UTF-8"),
        ("c.json.gz", gzip.compress(b'{"traceEvents": []}', mtime=0)[:20], "cut off gzip"),
        ("d.json", b'{"traceEvents": [{"ph": "X"', "no valid JSON"),
        ("e.json", b'{"traceEvents": {"ph": 1}}', "no list of events"),
        ("f.json", b'{"schema": "1.1.0-chakra", "nodes": []}', "execution trace"),
        ("g.json", b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "mm", "ts": 1, "dur": 2}]}', "no kernel"),
        ("h.csv", b"a,b\n1,2\n", "no column that tells a time"),
        ("i.csv", b'm,n,k,time_us\n"1,2,3\n', "no valid CSV"),
        ("j.log", ("# " + NEW + "\n").encode(), "no measurement"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=said) as caught:
        read(tmp_path / name, ASKED)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


def test_a_device_without_a_profile_must_be_named(tmp_path: Path) -> None:
    trace = Trace(device="Unheard Of GPU")
    trace.mm(64, 64, 64, 1e-5)
    path = trace.write(tmp_path / "t.json")
    with pytest.raises(InputError, match="--device"):
        read(path, Asked())
    assert read(path, ASKED).rows[0]["device"] == "a100-sxm4-80gb"


def test_files_of_folders(tmp_path: Path) -> None:
    log = nccl_log(tmp_path / "a.log")
    (tmp_path / "notes.md").write_text("x", encoding="utf-8")
    assert files([tmp_path, log]) == [log]
    with pytest.raises(InputError, match="missing"):
        files([tmp_path / "missing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no file of measurements"):
        files([tmp_path / "empty"])


def test_each_format_is_told_by_its_own_reader(tmp_path: Path) -> None:
    trace = Trace()
    trace.mm(64, 64, 64, 1e-5)
    made = {
        "kineto": trace.write(tmp_path / "t.json.gz"),
        "nccl-tests": nccl_log(tmp_path / "a.log"),
        "tables": table(tmp_path / "g.csv", "m,n,k,time_us\n1,2,3,4\n"),
    }
    assert {key: detect(Source(path)) for key, path in made.items()} == {key: key for key in made}


def test_a_trace_of_the_host_alone_is_refused_in_words(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)
    with profile:
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    profile.export_chrome_trace(str(tmp_path / "t.json"))
    assert any(e.get("cat") == "cpu_op" for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"])
    with pytest.raises(InputError, match="no kernel of a GPU"):
        read(tmp_path / "t.json", Asked())
