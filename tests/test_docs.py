"""What the pages say is so: commands run, links lead somewhere, quoted messages are in the code."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from helpers.clone import Clone, clone_with_a_run
from helpers.commands import ROOT, SHELLS, blocks_of, fences, look_over

from fourfold.config import load_config
from fourfold.errors import ConfigError

DOCS = sorted((ROOT / "docs").glob("*.md"))
CHINESE = sorted((ROOT / "docs/zh").glob("*.md"))
EXAMPLES = sorted((ROOT / "examples").rglob("README*.md"))
TOP = sorted(ROOT.glob("*.md"))
WITH_COMMANDS = [page for page in [*DOCS, *EXAMPLES] if blocks_of(page)]

# What a page takes for granted beside a clone in which the quickstart has run.
CORPUS = "runs/quickstart/corpus.jsonl"
TOKENIZER = "runs/quickstart/tokenizer.json"
PREPARE = f"fourfold data prepare --input {CORPUS} --tokenizer {TOKENIZER} --output-prefix"
# A run of GPT-2, which the quickstart is not, and the same as a directory of Hugging Face.
GPT2 = (
    "fourfold train -c configs/gpt/quickstart_gpt2.yaml "
    "-o Data.dataset.input_dir=runs/quickstart/data "
    f"-o Global.tokenizer={TOKENIZER} -o Engine.save_load.output_dir=runs/first"
)
AS_HF = f"fourfold convert runs/first gpt2 --to hf --tokenizer {TOKENIZER}"
SINGLE = "configs/gpt/single/configs_345m_single_card.yaml"
BEFORE = {
    "docs/checkpoints.md": ["mkdir output && mv runs/quickstart/output/step_2 output/step_2000"],
    "docs/convert.md": [GPT2, AS_HF, "rm -r data", f"{PREPARE} data/x"],
    "docs/data_files.md": [f"{PREPARE} data/x", f"{PREPARE} data/y"],
    "docs/data_mixtures.md": [
        f"{PREPARE} a",
        f"{PREPARE} b",
        "cp configs/gpt/quickstart.yaml run.yaml",
    ],
    "docs/data_prepare.md": [
        "mkdir wiki books",
        f"cp {CORPUS} wiki/a.jsonl",
        "gzip -c configs/gpt/quickstart.yaml > books/a.txt.gz",
    ],
    "docs/evaluation.md": [
        "cp configs/gpt/quickstart.yaml config.yaml",
        "head -c 3000 configs/gpt/quickstart.yaml > wiki.valid.raw",
    ],
    "docs/generation.md": [f"fourfold train -c {SINGLE}"],
    "examples/gpt/README.md": ["cp ../../runs/quickstart/corpus.jsonl single/my_text.jsonl"],
    "examples/gpt/single/README.md": [
        "cp -r ../../../data .",
        "cp README.md my_text.txt",
        "python run_pretrain.py -c configs_345m_single_card.yaml",
    ],
    "examples/gpt/hybrid_parallel/README.md": ["cp -r ../../../data ."],
    "examples/gpt-3/static/README.md": ["cp -r ../../../data ."],
    "examples/gpt-3/dygraph/README.md": ["cp -r ../../../data ."],
}
# Eight ranks, models of 175 billion parameters, vocabularies of 50,304 rows, compiled graphs, or
# what the README has too: seconds each, not moments.
SLOW = {
    "docs/index.md",
    "docs/launching.md",
    "docs/memory.md",
    "docs/mup.md",
    "docs/parallelism.md",
    "docs/performance.md",
    "docs/planning.md",
    "docs/quickstart.md",
    "docs/throughput.md",
    "examples/gpt-3/dygraph/README.md",
    "examples/gpt-3/static/README.md",
    "examples/gpt/hybrid_parallel/README.md",
    "examples/gpt/single/README.md",
}
# A line of a page that could be typed; it must then stand in a block that is run.
TYPED = re.compile(r"^ *(\$ )?(fourfold [a-z]+ -|torchrun -|make [a-z]+$|pip install )")


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def marked(page: Path) -> Any:
    marks = [pytest.mark.slow] if page_name(page) in SLOW else []
    return pytest.param(page, marks=marks, id=page_name(page))


@pytest.mark.parametrize("page", [marked(page) for page in WITH_COMMANDS])
def test_commands_run(page: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    blocks = blocks_of(page)
    for block in blocks:
        if block.needs:
            look_over(block.commands, page.parent if page in EXAMPLES else ROOT)
    run = [command for block in blocks if not block.needs for command in block.commands]
    if not run:
        return
    shutil.copytree(clone_with_a_run(tmp_path_factory), tmp_path / "clone")
    clone = Clone(tmp_path / "clone")
    if page in EXAMPLES:
        clone.run(f"cd {page.parent.relative_to(ROOT)}")
    for command in [*BEFORE.get(page_name(page), []), *run]:
        clone.run(command)


@pytest.mark.parametrize("page", [*DOCS, *EXAMPLES, *TOP], ids=page_name)
def test_commands_stand_in_blocks_that_are_run(page: Path) -> None:
    lines = page.read_text().splitlines()
    fenced = {
        number
        for start, kind, content in fences(lines)
        if kind in SHELLS
        for number in range(start, start + len(content) + 2)
    }
    loose = [
        f"{page_name(page)}:{number + 1}: {line}"
        for number, line in enumerate(lines)
        if TYPED.match(line) and number not in fenced
    ]
    assert not loose, "mark the block as bash; if it cannot run here, add <!-- needs: why -->"


@pytest.mark.parametrize("page", [*DOCS, *EXAMPLES, *TOP], ids=page_name)
def test_python_on_the_pages_calls_what_there_is(page: Path) -> None:
    """What it imports exists, and what it calls has the arguments that are named."""
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M):
        names: dict[str, Any] = {}
        nodes = list(ast.walk(ast.parse(block)))
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fourfold"):
                exec(ast.unparse(node), names)
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in names:
                called = eval(ast.unparse(node.func), names)
                keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg}
                inspect.signature(called).bind(*node.args, **keywords)


@pytest.mark.parametrize("page", [*DOCS, *CHINESE, *EXAMPLES, *TOP], ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [target for target in relative_links(page) if not leads_somewhere(page, target)]
    assert not broken
    if page in DOCS:
        outside = [target for target in relative_links(page) if target.startswith("../")]
        assert not outside, "the site has only docs/; name files outside it without a link"


def relative_links(page: Path) -> list[str]:
    text = "\n".join(line for line in page.read_text().splitlines() if not line.startswith("    "))
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)|<img [^>]*src=\"([^\"]+)\"", text)
    flat = [one or other for one, other in targets]
    return [target for target in flat if "://" not in target and not target.startswith("mailto:")]


def leads_somewhere(page: Path, target: str) -> bool:
    path, _, heading = target.partition("#")
    file = page.parent / path if path else page
    if not file.exists():
        return False
    return not heading or heading in headings(file)


def headings(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {re.sub(r" +", "-", title.strip()) for title in kept}


def test_the_site_has_every_page_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    pages = list(leaves(config["nav"]))
    # The Chinese README is made a page of the site by docs/.hooks.py.
    files = [str(page.relative_to(ROOT / "docs")) for page in [*DOCS, *CHINESE]]
    assert sorted(pages) == sorted([*files, "zh/index.md"])


@pytest.mark.parametrize("page", CHINESE, ids=page_name)
def test_chinese_pages_have_the_commands_and_headings_of_the_english_ones(page: Path) -> None:
    english = ROOT / "docs" / page.name
    kinds = [
        [(kind, content) for _, kind, content in fences(file.read_text().splitlines())]
        for file in (page, english)
    ]
    assert kinds[0] == kinds[1]
    levels = [re.findall(r"^#+ ", file.read_text(), re.M) for file in (page, english)]
    assert levels[0] == levels[1]
    rows = [re.findall(r"^\|.*\d.*$", file.read_text(), re.M) for file in (page, english)]
    assert [re.findall(r"[\d.]+", row) for row in rows[0]] == [
        re.findall(r"[\d.]+", row) for row in rows[1]
    ]


def leaves(nav: Any) -> Any:
    """The files of a navigation tree, from first to last."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav if isinstance(nav, list) else nav.values():
            yield from leaves(part)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without a warning."""
    pytest.importorskip("material", reason="pip install 'fourfold[docs]'")
    directory = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return directory


def test_pages_of_the_site_need_nothing_from_elsewhere(site: Path) -> None:
    """Whatever they load or link to on the site is there."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(DOCS)
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r'<(?:script|img|link)\b[^>]*?\b(?:src|href)="([^"]+)"', text)
        links = re.findall(r'<a\b[^>]*?\bhref="([^"]+)"', text)
        assert loaded and not [one for one in loaded if re.match(r"(https?:)?//", one)]
        if page.name == "404.html":  # shown at any address, so its links begin at the root
            continue
        for target in [*loaded, *links]:
            path = re.split(r"[#?]", target)[0]
            if path and ":" not in path:
                found = (page.parent / path).resolve()
                assert found.is_file() or (found / "index.html").is_file(), (page, target)


def test_a_reader_changes_the_language(site: Path) -> None:
    def switch(page: str) -> dict[str, str]:
        text = (site / page / "index.html").read_text()
        found = re.findall(r'<a href="([^"]+)" hreflang="(\w+)" class="md-select__link">', text)
        return {language: target for target, language in found}

    assert switch("") == {"en": "./", "zh": "zh/"}
    assert switch("quickstart")["zh"] == "../zh/quickstart/"
    assert switch("zh/quickstart")["en"] == "../../quickstart/"
    assert switch("serving") == {"en": "./", "zh": "../zh/"}
    chinese = (site / "zh/index.html").read_text()
    assert 'href="quickstart/"' in chinese and 'href="../serving/"' in chinese
    assert 'src="../images/quickstart.svg"' in chinese and '<html lang="zh"' in chinese
    assert (
        "简体中文"
        not in re.findall(
            r'<nav class="md-tabs".*?</nav>', (site / "index.html").read_text(), re.S
        )[0]
    )


def test_the_site_links_to_where_the_clone_came_from() -> None:
    hooks = runpy.run_path(str(ROOT / "docs/.hooks.py"))
    for origin, address in {
        "https://host.example/some/one.git": "https://host.example/some/one",
        "https://me:secret@host.example/one": "https://host.example/one",
        "git@host.example:some/one.git": "https://host.example/some/one",
        "ssh://git@host.example:2222/some/one.git": "https://host.example/some/one",
        "/home/me/one": None,
        "../one.git": None,
        "file:///home/me/one": None,
        "": None,
    }.items():
        assert hooks["web_address"](origin) == address


@pytest.mark.slow
def test_pictures_show_what_was_recorded(tmp_path: Path) -> None:
    script = ROOT / "docs/images/draw_pictures.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True)
    drawn = sorted(tmp_path.iterdir())
    assert len(drawn) == 5
    for picture in drawn:
        texts = [file.read_text() for file in (picture, script.parent / picture.name)]
        numbers, rest = zip(*(split_numbers(text) for text in texts))
        assert rest[0] == rest[1], f"{picture.name}: make docs-pictures"
        np.testing.assert_allclose(*numbers, atol=0.01, err_msg="make docs-pictures")


def split_numbers(text: str) -> tuple[list[float], str]:
    pattern = re.compile(r"(?<![#\w])-?\d+\.\d+")
    return [float(found) for found in pattern.findall(text)], pattern.sub("?", text)


@pytest.mark.parametrize("picture", sorted((ROOT / "docs/images").glob("*.svg")), ids=page_name)
def test_pictures_are_whole_and_load_nothing(picture: Path) -> None:
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    text = picture.read_text()
    assert not re.search(r"""href="(?!#)|url\((?!#)|@import|<script""", text)


def test_messages_of_the_troubleshooting_page_are_in_the_code(tmp_path: Path) -> None:
    """A message is quoted in a heading; … stands for what the code fills in."""
    quoted = re.findall(r"^### `(.+)`$", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    assert len(quoted) >= 25
    code = "\n".join(plain_text(file) for file in (ROOT / "fourfold").rglob("*.py"))
    shown = config_problems(tmp_path)
    unknown = [
        message
        for message in quoted
        if not all(piece.strip(" ;") in code for piece in message.split("…"))
        and not re.search(".*".join(map(re.escape, message.split("…"))), shown)
    ]
    assert unknown == []


def plain_text(file: Path) -> str:
    """Source with strings that are continued on the next line joined."""
    return re.sub(r'"\s*\n\s*f?"', "", file.read_text())


def config_problems(directory: Path) -> str:
    """Messages that are put together of keys and words, as a user sees them."""
    file = directory / "wrong.yaml"
    file.write_text("Distributed: {mp_degree: 5}\nData: {dataset: {max_seq_len: 4096}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    return str(caught.value)


@pytest.mark.parametrize("name", ["docs/tour.md", "docs/design.md", "CONTRIBUTING.md"])
def test_files_that_are_named_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    named = re.findall(r"`((?:fourfold|tests|docs|configs|benchmarks)/[\w./-]+)`", text)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_functions_the_tour_names_are_in_the_files_it_names() -> None:
    """A row of a table of the tour: file, then the names to look for in it."""
    rows = re.findall(
        r"^\| `(fourfold/[\w./]+\.py)` \| (.+?) \|", (ROOT / "docs/tour.md").read_text(), re.M
    )
    assert len(rows) >= 20
    missing = [
        f"{file}: {name}"
        for file, names in rows
        for name in re.findall(r"`([\w.]+)`", names)
        if name.split(".")[-1] not in (ROOT / file).read_text()
    ]
    assert not missing
