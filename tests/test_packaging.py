"""The wheel, installed where nothing of the repository is in reach, is the whole program."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

import fourfold
from fourfold.cli.quickstart import PROMPTS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


class Installed:
    """A virtual environment with the wheel in it, and an empty directory to work in."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.wheel = build_wheel(directory / "source")
        self.bin = directory / "env" / "bin"
        self.work = directory / "work"
        self.work.mkdir()
        python = [sys.executable, "-m"]
        call(*python, "venv", "--without-pip", str(directory / "env"), cwd=directory)
        target = ["--python", str(self.bin / "python")]
        options = ["--quiet", "--no-deps", "--no-index"]
        call(*python, "pip", *target, "install", *options, str(self.wheel), cwd=directory)
        (site_packages,) = (directory / "env" / "lib").glob("python*/site-packages")
        # The libraries of this environment, so that none is downloaded; a directory named in a
        # .pth file comes after the environment's own, and its own .pth files are not read.
        (site_packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(self, *words: str) -> str:
        return call(str(self.bin / words[0]), *words[1:], cwd=self.work)


def build_wheel(source: Path) -> Path:
    """From a copy: the build writes beside what it reads."""
    source.mkdir()
    without_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "fourfold", source / "fourfold", ignore=without_caches)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist"]
    call(sys.executable, "-m", "pip", "wheel", *options, ".", cwd=source)
    (wheel,) = (source / "dist").iterdir()
    return wheel


def call(*command: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("packaging"))


def test_the_installed_package_says_its_version(installed: Installed) -> None:
    assert installed.wheel.name == f"fourfold-{fourfold.__version__}-py3-none-any.whl"
    code = "import fourfold; print(fourfold.__version__, fourfold.__file__)"
    version, file = installed.run("python", "-c", code).split()
    assert version == fourfold.__version__
    assert Path(file).is_relative_to(installed.directory / "env")
    code = "from importlib.metadata import version; print(version('fourfold'))"
    assert installed.run("python", "-c", code).strip() == fourfold.__version__


def test_the_installed_command_lists_its_verbs(installed: Installed) -> None:
    output = installed.run("fourfold", "--help")
    assert all(verb in output for verb in ("train", "generate", "plan", "quickstart"))


def test_every_file_of_the_package_is_in_the_wheel(installed: Installed) -> None:
    ours = {
        str(file.relative_to(ROOT / "fourfold"))
        for file in (ROOT / "fourfold").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert {"py.typed", "theme.js", "serve/playground.html", "plan/published_runs.csv"} <= ours
    code = (
        "import fourfold, pathlib; base = pathlib.Path(fourfold.__file__).parent\n"
        "for file in base.rglob('*'): print(file.relative_to(base))"
    )
    missing = ours - set(installed.run("python", "-c", code).splitlines())
    assert not missing, "not in the wheel; see [tool.setuptools.package-data]"


@pytest.mark.slow
def test_the_quickstart_runs_far_from_the_repository(installed: Installed) -> None:
    small = {
        "Model.hidden_size": 32,
        "Model.num_layers": 1,
        "Engine.max_steps": 1,
        "Engine.test_iters": 1,
        "Engine.eval_iters": 1,
        "Generation.max_dec_len": 4,
    }
    overrides = [word for key, value in small.items() for word in ("-o", f"{key}={value}")]
    output = installed.run("fourfold", "quickstart", "--max-mb", "2", *overrides)
    assert all(prompt in output for prompt in PROMPTS)
    assert (installed.work / "runs" / "quickstart" / "output" / "loss_curve.png").exists()


def test_the_config_in_the_repository_is_the_one_shipped() -> None:
    link = ROOT / "configs" / "gpt" / "quickstart.yaml"
    assert link.resolve() == ROOT / "fourfold" / "cli" / "quickstart.yaml"
    assert not Path(os.readlink(link)).is_absolute()


def test_every_extra_that_is_named_exists() -> None:
    texts = [*(ROOT / "fourfold").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    named = {
        extra for file in texts for extra in re.findall(r"fourfold\[(\w+)\]", file.read_text())
    }
    assert "serve" in named
    assert named <= EXTRAS.keys()


def test_what_setup_installs_is_pinned_by_version_alone() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+", pin) for pin in pins)
    pinned = {plain_name(pin) for pin in pins}
    wanted = [*PROJECT["dependencies"], *EXTRAS["dev"], *EXTRAS["docs"]]
    assert {plain_name(requirement) for requirement in wanted} <= pinned


def plain_name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


def test_the_change_log_begins_with_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert next(name for name in headings if name != "Unreleased") == fourfold.__version__


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert text.lstrip().startswith("Apache License\n")
    sections = re.findall(r"^   (\d)\. ", text, re.MULTILINE)
    assert sections == [str(number) for number in range(1, 10)]
    assert "END OF TERMS AND CONDITIONS" in text and "limitations under the License." in text
