"""The page of ``pronk bench --report``: complete, self-contained, escaped, reproducible."""

import re
import sys
import xml.etree.ElementTree as ET
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pronk.base.errors import OptionError
from pronk.lab.bench.document import (
    ALL,
    SOUND,
    Document,
    Failure,
    Figures,
    Latency,
    ModelResult,
    PassCost,
    Range,
    Split,
)
from pronk.lab.bench.plots import draw_plots
from pronk.lab.bench.report import check_report, write_report
from pronk.lab.bench.tables import result_sentence

TASKS = {"code": 1.25, "edit": 1.7, "chat": 0.8, "math": 1.0}
METHODS = {
    "autoregressive": 1.0,
    "prompt_lookup": 1.5,
    "lookahead(window=5, ngram=4, guesses=5)": 1.21,
    "recycling": 1.36,
    "jacobi": 0.74,
    "draft_model": 1.004,
    "openvino": 1.02,
    "openvino_prompt_lookup": 1.23,
    "transformers_prompt_lookup": 0.61,
}
PEERS = ("openvino", "transformers")
VOID = {"meta", "img", "source"}


def make_figures(method: str, task: str, temperature: float, gain: float) -> Figures:
    """Return plausible figures of a 1 B model on two cores."""
    engine = next((peer for peer in PEERS if method.startswith(peer)), "pronk")
    plain = method == "autoregressive"
    weight = 1.0 if plain else TASKS.get(task, 1.1 if task == ALL else 1.02)
    speed = gain * (1 if plain else weight * (0.86 if temperature else 1))
    asked = 48 if task in {ALL, SOUND} else 12
    common: dict[str, Any] = {
        "failures": (Failure("code/7", "the worker ended: out of memory"),)
        if method == "jacobi" and task in {"code", ALL}
        else (),
        "tokens": 128 * asked,
        "tokens_per_second": Range(19.5 * speed, 0.7),
        "speedup": Range(speed, 0.0 if plain else 0.03 + 0.02 * weight),
        "decode_speedup": Range(speed * 1.03, 0.02),
        "ttft": Range(0.182, 0.004),
        "peak_memory": 2_310_000_000,
        "repeated": 0.42 if not temperature else 0.07,
        "degenerated": 4,
    }
    if engine != "pronk":
        same = {} if temperature else {"same": asked - 5, "compared": asked, "near_ties": 4}
        return Figures(task, method, engine, temperature, asked, asked, **common, **same)
    s = 1.0 if plain else 1 + speed * 0.75
    accepted = (
        () if plain else tuple(0.62 * weight**0.5 * 0.78**w * (speed / 1.5) for w in range(8))
    )
    own: dict[str, Any] = {
        "over_floor": 1.34,
        "steps": int(128 * asked / s),
        "S": s,
        "alpha": None if plain else min(0.9, 0.5 * speed),
        "drafted": 0 if plain else 9000,
        "accepted": 0 if plain else 4100,
        "acceptance": accepted,
        "rows_per_pass": 1.0 if plain else 4 + 9 * abs(gain - 1),
        "cost_coefficient": None if plain else 0.012,
        "expected_speedup": None if plain else speed * 1.09,
        "verify_cost": 1.0 if plain else 1.21,
        "itl": Latency(0.03, 0.05, 0.0912),
        "split": Split(
            0.0 if plain else 0.04 + 0.1 * abs(1 - gain), 0.8, 0.16 - 0.1 * abs(1 - gain)
        ),
    }
    if not plain:
        own |= {"same": asked, "compared": asked, "near_ties": 0}
    return Figures(
        task, method, "pronk", temperature, asked - (method == "jacobi"), asked, **common, **own
    )


def make_model(**changes: Any) -> ModelResult:
    tasks = (*TASKS, ALL, SOUND)
    values: dict[str, Any] = {
        "name": "inflated/tiny-code-1b",
        "parameters": 1_100_000_000,
        "pass_bytes": 2_070_000_000,
        "kv_bytes_per_token": 22528,
        "dtype": "bfloat16",
        "weights": "int4 in groups of 32",
        "weight_bits": 5.0,
        "kv_dtype": "bfloat16",
        "context": 2048,
        "methods": tuple(METHODS),
        "kernels": "avx512_bf16",
        "inflated": {"source": "bundled/tiny-code", "hidden_size": 256, "parameters": 9_669_440},
        "bandwidth": Range(43.1e9, 1.9e9),
        "pass_cost": tuple(
            PassCost(n, 0.049 + 0.0009 * n, 1 + 0.018 * n) for n in (1, 2, 4, 8, 16, 32, 64)
        ),
        "peers": {
            "openvino": {"version": "2026.3", "settings": "LATENCY, bf16, 2 threads"},
            "llama_cpp": {"missing": "expected the command llama-server, found none"},
        },
        "skipped": (Failure("chat/3", "2,310 tokens; with 128 more the model's context is 1920"),),
        "figures": tuple(
            make_figures(m, task, t, gain)
            for task in tasks
            for t in (0.0, 0.8)
            for m, gain in METHODS.items()
        ),
    }
    return ModelResult(**{**values, **changes})


def make_document(*models: ModelResult, **changes: Any) -> Document:
    values: dict[str, Any] = {
        "started": "2026-11-21T09:30:00Z",
        "arguments": {
            "model": ["tiny-code-1b"],
            "seed": 7,
            "repeats": 3,
            "suite": ["code", "edit", "chat", "math"],
        },
        "versions": {"pronk": "0.1.0", "python": "3.11.9", "torch": "2.13.0"},
        "hardware": {"processor": "Xeon 8481C", "cores": 2, "threads": 2, "memory": 25_000_000_000},
        "degenerate_above": 0.5,
        "interrupted": False,
        "models": models or (make_model(),),
    }
    return Document(**{**values, **changes})


def test_report_begins_with_the_result(tmp_path: Path) -> None:
    text = write_report(make_document(), tmp_path).read_text()
    sentence = (
        "inflated/tiny-code-1b: prompt_lookup has 1.65 ± 0.05 times the speed of plain decoding "
        "at temperature 0, over 48 prompts."
    )
    assert f'<h1>pronk bench</h1>\n<p class="result">{sentence}</p>' in text


def test_a_result_without_a_faster_drafter_says_so() -> None:
    slow = pick(make_model(), method={"autoregressive", "jacobi"}, temperature={0.0})
    assert "no drafter is faster than plain decoding; jacobi has 0.81" in result_sentence(slow)
    plain = pick(make_model(), method={"autoregressive"})
    assert "no drafter was measured" in result_sentence(plain)


def test_bars_of_equal_tasks_are_shown_once() -> None:
    model = pick(make_model(), task={"code", ALL, SOUND}, temperature={0.0})
    every = next(iter(draw_plots(model))).light
    only = tuple(
        replace(f, task=task)
        for task in (ALL, SOUND, "code")
        for f in model.figures
        if f.task == ALL
    )
    once = next(iter(draw_plots(replace(model, figures=only)))).light
    assert [every.count(name) for name in ("all tasks", "without loops")] == [1, 1]
    assert [once.count(name) for name in ("all tasks", "without loops")] == [1, 0]


def bare(figures: Figures) -> Figures:
    """Return figures without values, as when no prompt finished."""
    failures = (Failure("a/1", "it went wrong"),)
    return Figures(
        figures.task,
        figures.method,
        figures.engine,
        figures.temperature,
        0,
        figures.asked,
        failures,
    )


def pick(model: ModelResult, **wanted: Any) -> ModelResult:
    kept = (
        f
        for f in model.figures
        if all(getattr(f, name) in values for name, values in wanted.items())
    )
    return replace(model, figures=tuple(kept))


class Page(HTMLParser):
    """An HTML parser that checks well-formedness."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        assert len({name for name, _ in attrs}) == len(attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def values(self, name: str) -> list[str]:
        return [value for _, attribute, value in self.attributes if attribute == name]


def render(document: Document, folder: Path) -> tuple[str, Page]:
    pytest.importorskip("matplotlib")
    text = write_report(document, folder).read_text(encoding="utf-8")
    return text, Page(text)


def few(model: ModelResult) -> ModelResult:
    """Keep four methods, three tasks and one temperature, so that the plots are drawn faster."""
    methods = {"autoregressive", "prompt_lookup", "jacobi", "openvino"}
    return pick(model, method=methods, task={"code", ALL, SOUND}, temperature={0.0})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Page]:
    """Return the page of a complete benchmark."""
    return render(make_document(), tmp_path_factory.mktemp("whole"))


def images(page: Page) -> list[str]:
    """Return the SVG files of the page."""
    found = [*page.values("src"), *page.values("srcset")]
    assert all(url.startswith("data:image/svg+xml;base64,") for url in found)
    return [b64decode(url.partition(",")[2]).decode() for url in found]


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    document = make_document(few(make_model()), few(make_model(name="second")))
    text, page = render(document, tmp_path / "new" / "folder")
    assert images(page)
    assert not page.values("href") + page.values("id")
    assert not re.findall(r"url\(|@import", text)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _, _ in page.attributes}
    assert "<script" not in text
    assert ("meta", "content", "width=device-width, initial-scale=1") in page.attributes
    assert len(text.encode()) < 2_500_000


def test_plots_have_a_light_and_a_dark_theme(whole: tuple[str, Page]) -> None:
    page = whole[1]
    plots = images(page)
    assert len(plots) == 2 * (2 + 1)
    light = plots[: len(plots) // 2]
    dark = plots[len(plots) // 2 :]
    assert all(one != other for one, other in zip(light, dark, strict=True))
    assert all(ET.fromstring(plot).tag.endswith("svg") for plot in plots)
    assert page.values("media") == ["(prefers-color-scheme: dark)"] * (len(plots) // 2)
    assert [label for label in page.values("alt") if label.startswith("Speed-up, greedy;")]
    assert (
        sum(
            "prompt_lookup" in plot and "speed relative to plain decoding" in plot for plot in plots
        )
        == 4
    )


def test_contents_of_the_page(whole: tuple[str, Page]) -> None:
    page = whole[1]
    for part in (
        "without loops",
        (
            "Real acceptance, simulated size: the function is that of bundled/tiny-code (9.7 M "
            "parameters)"
        ),
        "the worker ended: out of memory",
        "2,310 tokens; with 128 more the model's context is 1920",
        "LATENCY, bf16, 2 threads",
        "expected the command llama-server, found none",
        "code, edit, chat, math",
        "30.0 91.2",
        "47/48",
    ):
        assert part in page.text, part
    assert "Interrupted" not in page.text


def test_interruptions_are_reported(tmp_path: Path) -> None:
    document = make_document(few(make_model()), interrupted=True)
    assert "Interrupted: stopped before its end" in render(document, tmp_path)[1].text


def test_markup_in_names_is_escaped(tmp_path: Path) -> None:
    evil = '<script>alert("$x$ & \\alpha^2")</script>'
    model = make_model(
        name=evil,
        figures=tuple(
            replace(f, method=evil, task=f"{evil}{f.task}")
            for f in pick(make_model(), method={"jacobi"}).figures
        )
        + tuple(replace(f, method=evil) for f in pick(make_model(), method={"jacobi"}).figures),
        skipped=(Failure(evil, evil),),
        peers={evil: {evil: evil}},
        inflated={"source": evil},
    )
    text, page = render(
        make_document(model, arguments={evil: evil}, hardware={"processor": evil}), tmp_path
    )
    assert "<script" not in text
    assert evil in page.text
    assert any("&lt;script&gt;" in plot for plot in images(page))


def test_special_characters_in_names(tmp_path: Path) -> None:
    names = ("a$b$c_1", "日本語\U0001f407", "bell\x07\udc80", "tab\tnew\nline")
    figures = tuple(
        replace(f, method=name)
        for name in names
        for f in pick(make_model(), method={"recycling"}, temperature={0.0}).figures
    )
    plots = images(render(make_document(make_model(figures=figures)), tmp_path)[1])
    for name in (">a$b$c_1</text>", ">日本語\U0001f407</text>", "tab new line</text>"):
        assert any(name in plot for plot in plots)


def test_the_page_is_reproducible(tmp_path: Path) -> None:
    document = make_document(few(make_model()))
    assert render(document, tmp_path / "a")[0] == render(document, tmp_path / "b")[0]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "model",
    [
        make_model(figures=(), pass_cost=(), bandwidth=None, peers={}, skipped=(), inflated=None),
        make_model(figures=tuple(bare(f) for f in few(make_model()).figures)),
        pick(make_model(), method={"autoregressive"}),
        pick(make_model(), method={"recycling"}, task={ALL}, temperature={0.0}),
        pick(make_model(), method={"openvino"}, task={"code"}),
        few(make_model(pass_cost=(), bandwidth=None)),
        few(
            make_model(pass_cost=(PassCost(1, 0.05, 1.0),), bandwidth=Range(0.0, 0.0), pass_bytes=0)
        ),
        make_model(
            figures=tuple(
                replace(
                    f,
                    speedup=Range(0.0, 0.0),
                    decode_speedup=Range(0.0, 0.0),
                    tokens_per_second=Range(0.0, 0.0),
                )
                for f in few(make_model()).figures
            )
        ),
        make_model(
            figures=tuple(
                replace(f, split=None, S=None, ttft=None) for f in few(make_model()).figures
            )
        ),
    ],
    ids="nothing failed plain one peer no-cost no-floor zero sparse".split(),
)
def test_missing_values_are_left_out(model: ModelResult, tmp_path: Path) -> None:
    page = render(make_document(model), tmp_path)[1]
    assert model.name in page.text
    assert not re.search(r"\b(None|nan|inf)\b", page.text)


def test_no_model(tmp_path: Path) -> None:
    assert "No model was measured." in render(replace(make_document(), models=()), tmp_path)[1].text


def test_many_methods_and_tasks(tmp_path: Path) -> None:
    figures = tuple(
        make_figures(method, task, 0.8, gain)
        for task in (*(f"{'a very long task ' * 8}{i}" for i in range(10)), ALL)
        for method, gain in {
            "autoregressive": 1.0,
            **{f"{'long_' * 40}{i}": 0.6 + 0.1 * i for i in range(11)},
        }.items()
    )
    text, page = render(make_document(make_model(figures=figures)), tmp_path)
    assert len(text.encode()) < 2_500_000
    assert all(
        len(label) < 60
        for plot in images(page)
        for label in re.findall(r"<text[^>]*>([^<]*)", plot)
    )


def test_missing_matplotlib_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        OptionError,
        match=r"report: expected matplotlib, found none; run pip install '\.\[report\]' in a clone "
        r"of pronk$",
    ):
        write_report(make_document(), tmp_path / "page")
    assert not (tmp_path / "page").exists()


def test_the_page_is_written_completely_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    document = make_document(make_model(figures=()))
    page = write_report(document, tmp_path)
    page.write_text("old", encoding="utf-8")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(OptionError, match="No space left on device"):
            write_report(document, tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["index.html"]
    assert page.read_text(encoding="utf-8") == "old"
    assert write_report(document, tmp_path) == page
    assert "pronk bench" in page.read_text(encoding="utf-8")


def test_a_file_as_folder_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    message = (
        r"report: expected to write .*file/index\.html, found: Not a directory; the result is in "
    )
    with pytest.raises(OptionError, match=message) as error:
        write_report(make_document(make_model(figures=())), tmp_path / "file")
    page = Path(str(error.value).partition("; the result is in ")[2])
    assert "pronk bench" in page.read_text(encoding="utf-8")


def test_the_folder_is_checked_beforehand(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    check_report(tmp_path / "new" / "page")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "page"):
        with pytest.raises(OptionError, match="report: expected a folder that can be written"):
            check_report(folder)
