"""`simkit measure`: what it keeps, what it makes of rows, and the models of measured seconds that it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simkit import calibrate, calibrate_user, measure, measure_checks, measure_crew, measure_profile
from simkit.errors import InputError
from simkit.measure import Case, Options, Samples, Skipped
from simkit.measure_machine import Machine, _slug
from simkit.measure_store import Store, quantiles
from simkit.predict import predict, predict_scenario
from simkit.spec import load, profiled
from simkit.spec.scenario import Scenario
from simkit.validate import read_table

HOST = Machine(
    name="box-1t", title="Box, 1 of 2 cores", device="cpu", threads=1, memory_bytes=2.0**34, cache_bytes=2.0**25,
    clock_hz=2.5e9, processors=1, date="2026-01-02", architecture="x86-64",
)  # fmt: skip


def test_quantiles_are_linear_between_order_statistics() -> None:
    # 1..11: the median is the 6th, the 10th percentile the 2nd, the 90th the 10th.
    assert quantiles([11, 1, 10, 2, 9, 3, 8, 4, 7, 5, 6]) == (6, 2, 10)
    with pytest.raises(ValueError, match="no samples"):
        quantiles([])


@pytest.mark.parametrize(
    ("title", "stem"),
    [
        ("AMD EPYC 7763 64-Core Processor", "amd-epyc-7763"),
        ("Intel(R) Xeon(R) CPU E5-2690 v4 @ 2.60GHz", "intel-xeon-e5-2690-v4"),
        ("", "machine"),
    ],
)
def test_a_processor_names_a_file(title: str, stem: str) -> None:
    assert _slug(title) == stem


class FakeSuite:
    """Three cases; the second is interrupted while `interrupts` says so, the third cannot run."""

    TABLE = "kernel"
    TAKES = ("batch",)

    def __init__(self) -> None:
        self.interrupts, self.ran = True, []  # type: ignore[var-annotated]

    def cases(self, host: Machine, options: Options) -> list[Case]:
        def run(name: str) -> Samples:
            if name == "b" and self.interrupts:
                raise KeyboardInterrupt
            if name == "c":
                raise Skipped("too large")
            self.ran.append(name)
            return Samples({"time_s": [3e-3, 1e-3, 2e-3]}, "said")

        fields = {"device": host.name, "op": "gemm", "dtype": "fp32", "batch": 1, "m": 8, "n": 8, "k": 8}
        return [Case(id=name, fields=fields, run=lambda name=name: run(name)) for name in "abc"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSuite:
    suite = FakeSuite()
    monkeypatch.setattr(measure, "suite", lambda name: suite)
    monkeypatch.setattr(measure, "machine", lambda options: HOST)
    monkeypatch.setattr(measure, "versions", lambda device: "torch 9.9")
    monkeypatch.setattr(measure_profile, "versions", lambda device: "torch 9.9")
    return suite


def test_an_interrupt_keeps_what_was_measured_and_the_next_run_goes_on(fake: FakeSuite, tmp_path: Path) -> None:
    options = Options(out=tmp_path)
    first = measure.measure("device", options)
    assert (first.measured, first.kept, first.interrupted) == (1, 0, True)
    table = tmp_path / "tables" / "kernel_box-1t.csv"
    assert [row["id"] for row in read_table(table)] == ["a"]
    fake.interrupts = False
    second = measure.measure("device", options)
    assert (second.measured, second.kept, second.interrupted) == (1, 1, False)
    assert second.skipped == {"c": "too large"}
    assert fake.ran == ["a", "b"]
    rows = read_table(table)
    assert [row["id"] for row in rows] == ["a", "b"]
    assert rows[0]["value"] == "0.002"
    assert (rows[0]["date"], rows[0]["software"], rows[0]["repeats"]) == ("2026-01-02", "torch 9.9", "3")
    assert (float(rows[0]["p10"]), float(rows[0]["p90"])) == pytest.approx((1.2e-3, 2.8e-3))


def test_a_broken_table_is_an_error_and_is_left_alone(fake: FakeSuite, tmp_path: Path) -> None:
    table = tmp_path / "tables" / "kernel_box-1t.csv"
    table.parent.mkdir()
    table.write_text("nonsense\n", encoding="utf-8")
    with pytest.raises(InputError, match="no column metric"):
        measure.measure("device", Options(out=tmp_path))
    assert table.read_text(encoding="utf-8") == "nonsense\n"


def test_a_case_of_several_metrics_is_known_by_its_name(tmp_path: Path) -> None:
    store = Store(tmp_path / "inference_x.csv")
    store.add([{"id": f"llama/1/{metric}", "metric": metric, "value": 0.5} for metric in ("ttft_s", "tpot_s")])
    assert Store(store.path).has("llama/1")
    assert not Store(store.path).has("llama")


def test_a_suite_nobody_wrote() -> None:
    with pytest.raises(InputError, match="did you mean 'links'"):
        measure.suite("link")


# -- what is refused before anything is measured -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../x", "", "a/b", "Box", "-x", "x" * 65, ".x", "x\n"])
@pytest.mark.parametrize("flag", ["name", "link"])
def test_a_name_that_is_no_file_is_refused(flag: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"--{flag} .*is "):
        measure_checks.check(Options(out=tmp_path, **{flag: name}), suite="links", takes=("link",))


def test_names_are_those_that_calibrate_takes() -> None:
    assert measure_checks.STEM.pattern == calibrate_user._STEM.pattern


@pytest.mark.parametrize(
    ("suite", "option", "said"),
    [
        ("device", {"batch": 4}, "--batch = 4 is not for this suite"),
        ("operators", {"ranks": 2}, "--ranks = 2 is not for this suite"),
        ("links", {"seq_len": 8}, "--seq-len = 8 is not"),
        ("train", {"seq_len": 8}, "--seq-len = 8 is not"),
        ("train", {"batch": 0}, "--batch = 0 is out of range"),
        ("inference", {"seq_len": -1}, "--seq-len = -1 is out of range"),
        ("inference", {"model": "a:b"}, "--model = 'a:b' is not"),
        ("links", {"address": ""}, "--address = '' is empty"),
        ("links", {"rate": "0Gb/s"}, "--rate = '0Gb/s' is out of range"),
    ],
)
def test_an_option_of_another_suite_or_range_is_refused(
    suite: str, option: dict[str, Any], said: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    with pytest.raises(InputError, match=said):
        measure.measure(suite, Options(out=tmp_path / "box", **option))
    assert not (tmp_path / "box").exists()


@pytest.mark.parametrize("blocked", [".", "tables", "devices", "links"])
def test_a_folder_that_cannot_be_written_is_refused_before_a_case_runs(
    fake: FakeSuite, blocked: str, tmp_path: Path
) -> None:
    path = tmp_path / "box" / blocked
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match=r"--out .*cannot be written"):
        measure.measure("device", Options(out=tmp_path / "box"))
    assert fake.ran == []
    assert path.read_text(encoding="utf-8") == "mine"


def test_ranks_are_bounded_by_a_number_memory_and_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="--ranks = 100000 is out of range; 2 to"):
        measure_crew.Crew(100_000, "gloo")
    with pytest.raises(InputError, match="2 to 64"):
        measure_crew.Crew(65, "gloo", launch="ssh node{rank}")
    with pytest.raises(InputError, match="too few"):
        measure_crew.Crew(0, "gloo")
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(measure_crew, "MEMINFO", meminfo)
    meminfo.write_text("MemTotal: 9000000 kB\nMemAvailable:   1000000 kB\n", encoding="ascii")
    # 1.024 GB over 320 MB a rank
    assert measure_crew.most_ranks("gloo") == (3, "each needs 320 MB of free memory")
    meminfo.write_text("MemAvailable: 99000000 kB\n", encoding="ascii")
    assert measure_crew.most_ranks("gloo")[0] == 64


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"address": "256.1.1.1"}, "--address = '256.1.1.1' is no address"),
        ({"address": "::z"}, "is no address"),
        ({"address": "192.0.2.1"}, "cannot be listened at"),  # TEST-NET-1 of RFC 5737: nobody's
        ({"launch": "ssh node{"}, "--launch .*cannot be read"),
        ({"launch": "ssh 'node"}, "--launch .*cannot be read"),
    ],
)
def test_an_address_or_a_launch_that_cannot_be_is_refused_at_once(given: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        measure_crew.Crew(2, "gloo", **given)


def test_ranks_that_do_not_meet_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_crew, "MEET_S", 0.3)
    monkeypatch.setattr(measure_crew, "MEET_RANK_S", 0.0)
    crew = measure_crew.Crew(2, "gloo", launch="sh -c 'sleep 60; true'")
    started, popen = [], measure_crew.subprocess.Popen

    def spawn(*words: Any, **how: Any) -> Any:
        started.append(popen(*words, **how))
        return started[-1]

    monkeypatch.setattr(measure_crew.subprocess, "Popen", spawn)
    with pytest.raises(InputError, match="gave no answer to start within 0 s"):
        crew.ask({"op": "all_reduce", "bytes": 4, "repeats": 1})
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


# -- the profile ---------------------------------------------------------------------------------------------------


def _table(path: Path, rows: list[dict[str, Any]]) -> None:
    Store(path).add([{"id": str(i), "source": "test", "metric": "time_s", **row} for i, row in enumerate(rows)])


def _options(tmp_path: Path) -> Options:
    return Options(out=tmp_path)


def test_the_profile_takes_the_fastest_and_fits_a_fraction_of_it(tmp_path: Path) -> None:
    """2 x 512^3 FLOP in 2.68435456 ms are 100 GFLOP/s; 256 MB in 10.24 and 12.8 ms are 25 and 20 GB/s."""
    common = {"device": "box-1t", "dtype": "fp32"}
    products = [{"op": "gemm", "batch": 1, "m": n, "n": n, "k": n, "value": 2.0 * n**3 / 100e9} for n in (512, 1024)]
    products += [{"op": "gemm", "batch": 1, "m": n, "n": n, "k": n, "value": 2.0 * n**3 / 90e9} for n in (256, 768)]
    streams = [{"op": "memory", "bytes": 256_000_000, "value": t} for t in (10.24e-3, 12.8e-3, 12.8e-3)]
    launch = [{"op": "memory", "bytes": 512, "value": 5e-6}]
    eager = [{"op": "memory", "bytes": 4_000_000, "engine": "eager", "value": 405e-6}]
    _table(tmp_path / "tables" / "kernel_box-1t.csv", [common | row for row in products + streams + launch + eager])
    measure_profile.write(HOST, _options(tmp_path), kind="kernel")
    device = load.device("box-1t", profiles=(str(tmp_path),))
    assert device.kind == "cpu"
    assert device.peak_flops["fp32"] == pytest.approx(100e9)
    assert device.memory_Bps == pytest.approx(25e9)
    assert set(device.sources.values()) <= {"measured", "operating-system", "default"}
    assert load.source("measured", profiles=(str(tmp_path),))["date"] == "2026-01-02"
    assert device.calibration["memory"]["fraction"] == pytest.approx(0.8, rel=1e-3)
    assert device.calibration["kernel"]["seconds"] == pytest.approx(5e-6)
    # 400 us for 4 MB, where 20 GB/s would take 200 us
    assert device.calibration["eager"]["elementwise"] == pytest.approx(2.0, rel=1e-3)
    text = Path(device.file).read_bytes()
    calibrate.write_own(calibrate.own(tmp_path / "tables", tmp_path), tmp_path)
    assert Path(device.file).read_bytes() == text


def test_a_link_is_fitted_as_the_ring_that_ran(tmp_path: Path) -> None:
    """t = 2 (n-1) alpha + 2 (n-1)/n S/B with alpha = 100 us, B = 12 MB/s, on a line of 12.5 MB/s."""
    rows = [
        {
            "device": "box-1t", "op": "all_reduce", "dtype": "fp32", "bytes": s, "ranks": n, "gpus_per_node": 1,
            "nics_per_node": 1, "inter": "wire", "algorithm": "ring", "notes": "processor busy 0.100 of the time",
            "value": 2 * (n - 1) * 100e-6 + 2 * (n - 1) / n * s / 12e6,
        }
        for n in (2, 3, 4) for s in (4, 16384, 262144, 1_000_000, 4_000_000)
    ]  # fmt: skip
    _table(tmp_path / "tables" / "collective_box-1t.csv", rows)
    options = Options(out=tmp_path, link="wire", rate="100Mb/s")
    files = measure_profile.write(HOST, options, kind="collective")
    assert tmp_path / "links" / "wire.toml" in files
    link = load.link("wire", profiles=(str(tmp_path),))
    assert link.Bps == 12.5e6
    fit = link.calibration["all_reduce"]
    assert fit["alpha_s"] == pytest.approx(100e-6, rel=0.02)
    assert max(v for k, v in fit.values.items() if k.startswith("Bps")) == pytest.approx(12e6, rel=0.01)
    assert link.calibration["interference"]["seconds_per_second"] == pytest.approx(0.1)
    # Another suite on the same folder does not forget the rate that was given.
    measure_profile.write(HOST, Options(out=tmp_path), kind="collective")
    assert load.link("wire", profiles=(str(tmp_path),)).Bps == 12.5e6


# -- measured seconds as a model -------------------------------------------------------------------------------------


def _two_layers(**more: Any) -> dict[str, Any]:
    return {
        "compute_profile": 1,
        "name": "two",
        "batch": 2,
        "tensors": {"a": [1000, 500], "b": [1000, 500]},
        "ops": [
            {"name": "a", "forward_s": 0.01, "backward_s": 0.03, "tensors": ["a"]},
            {"name": "b", "forward_s": 0.02, "backward_s": 0.02, "tensors": ["b"]},
        ],
        **more,
    }


def _seconds(data: dict[str, Any], **fields: Any) -> float:
    model = profiled.to_model(data)
    given = {"optimizer": "none", "precision": "fp32", "method": "s-sgd", "grad_accum": 1, "model": model.name}
    base = Scenario.of(given | fields)
    return float(predict_scenario(Scenario(values=base.values, network=model), beside=False).iteration_time_s)


def test_one_device_takes_the_sum_of_the_seconds() -> None:
    assert _seconds(_two_layers(), cluster="1x1xx86-cpu", micro_batch=2) == pytest.approx(0.08)
    assert _seconds(_two_layers(), cluster="1x1xx86-cpu", micro_batch=6) == pytest.approx(0.24)
    assert _seconds(_two_layers(time_share=2.0), cluster="1x1xx86-cpu", micro_batch=2) == pytest.approx(0.16)


def test_two_devices_overlap_the_exchange_with_the_rest_of_back_propagation() -> None:
    """2 MB a tensor over 20 MB/s usable take 100 ms each: b leaves at 30 + 20 ms, a after it, at 150 ms: 250 ms."""
    link = "168.421052Mb/s@0us"  # 95 % of the line rate carry payload (`simkit.collectives._law.PRIOR`)
    fields = {"cluster": "2x1xx86-cpu", "inter": link, "algorithm": "ring", "fusion": "none", "micro_batch": 2}
    assert _seconds(_two_layers(), **fields) == pytest.approx(0.250, rel=1e-3)


def test_a_file_of_measured_seconds_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    path.write_text(json.dumps(_two_layers()), encoding="utf-8")
    report = predict(model=str(path), cluster="1x1xx86-cpu", precision="fp32", micro_batch=2, optimizer="none")
    assert report.iteration_time_s == pytest.approx(0.08)
    assert report.facts["params"] == 1_000_000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batc": 1}, "did you mean 'batch'"),
        ({"tensors": {}}, "names no tensors"),
        ({"ops": []}, "is no list of parts"),
        ({"time_share": "two"}, "is no number"),
        ({"ops": [{"name": "a", "backward_s": 0.1, "tensors": ["a"]}]}, "tensors.b.* is trained by no op"),
        ({"ops": [{"name": "a", "tensors": ["c"]}]}, "no known tensor"),
    ],
)
def test_a_broken_profile_is_one_line(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        profiled.to_model(_two_layers(**change), file="two.json")
