"""Every page in a real Chromium: figures drawn, silent console, nothing from the network, no sideways scrolling."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason="the extra `plot` is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from simkit.cli import main  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]

JOB = [
    "--model",
    "resnet-50",
    "--cluster",
    "8x4x2080ti",
    "--inter",
    "10gbe",
    "--precision",
    "fp32",
    "--micro-batch",
    "64",
]
TABLE = (
    "id,source,model,cluster,inter,precision,micro_batch,metric,value\n"
    "a,lab one,resnet-50,1x1x2080ti,,fp32,64,samples_per_s,250\n"
    "b,lab two,resnet-50,2x4x2080ti,10gbe,fp32,64,samples_per_s,1300\n"
    "c,lab two,resnet-50,8x4x2080ti,10gbe,fp32,64,iteration_time_s,0.45\n"
)
PAGES = {
    "predict": (["predict", *JOB], 3),
    "compare": (["compare", *JOB, "--method", "s-sgd,power-sgd,acp-sgd"], 3),
    "trace": (["trace", *JOB], 2),
    "count": (["count", "llama2-7b"], 1),
    "validate": (["validate", "table.csv"], 2),
    "map": (["map", "--cluster", "4x3080", "--model", "gpt2", "--bandwidth", "1Gb/s", "--micro-batches", "4,9"], 1),
}
WIDTHS = {"wide": (1440, "light"), "narrow": (375, "dark")}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # Chromium refuses its sandbox to root, which is who runs tests in a container.
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "table.csv").write_text(TABLE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, (arguments, _) in PAGES.items():
            assert main([*arguments, "--html", f"{name}.html", "--quiet"]) == 0
    return folder


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page(browser: Any, pages: Path, name: str, width: str) -> None:
    pixels, scheme = WIDTHS[width]
    context = browser.new_context(viewport={"width": pixels, "height": 900}, color_scheme=scheme, offline=True)
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if re.match("(https?|wss?):", request.url) else None)
    page.goto((pages / f"{name}.html").as_uri())
    page.wait_for_selector(".plotly-graph-div .main-svg")
    page.wait_for_timeout(300)

    figures = page.locator(".plotly-graph-div")
    assert figures.count() == PAGES[name][1]
    for index in range(figures.count()):
        box = figures.nth(index).bounding_box()
        assert box["width"] <= pixels
        assert box["height"] >= 120
        drawn = ".bars path, .scatterlayer path, .treemaplayer path, .heatmaplayer image"
        assert figures.nth(index).locator(drawn).count() > 0
    assert page.evaluate("document.documentElement.scrollWidth") <= pixels
    assert page.locator("h1").count() == 1
    assert page.locator("h2").count() >= figures.count()
    assert page.title()
    alts = page.eval_on_selector_all("[role=img]", "all => all.map(e => e.getAttribute('aria-label'))")
    assert len(alts) == figures.count()
    assert all(len(alt) > 20 for alt in alts)
    assert _contrast(page) >= 4.5
    assert said == []
    context.close()


def _contrast(page: Any) -> float:
    """The least contrast (WCAG 2.1, section 1.4.3) of axis and legend texts against the page's background."""
    found = page.evaluate(
        """() => [getComputedStyle(document.body).backgroundColor,
                  ...[...document.querySelectorAll('.xtick text, .ytick text, .legendtext, .xtitle')]
                     .map(e => getComputedStyle(e).fill)]"""
    )
    paper, *inks = [tuple(float(x) for x in re.findall(r"[\d.]+", color)[:3]) for color in found]

    def luminance(color: tuple[float, ...]) -> float:
        linear = [c / 255 / 12.92 if c / 255 <= 0.03928 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    pairs = [sorted((luminance(ink), luminance(paper))) for ink in inks]
    return min(((high + 0.05) / (low + 0.05) for low, high in pairs), default=21.0)


def test_a_map_is_drawn_as_a_picture(tmp_path: Path) -> None:
    """In a process of its own: the driver of these tests does not share its loop."""
    picture = tmp_path / "map.png"
    code = f"import sys; from simkit.cli import main; sys.exit(main({[*PAGES['map'][0], '--png', str(picture)]!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    head = picture.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    assert int.from_bytes(head[16:20], "big") == 1100


def test_a_picture_goes_to_a_folder_that_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PAGES["map"][0], "--png", str(tmp_path / "none" / "map.png")]) == 2
    assert "folder" in capsys.readouterr().err
