"""Every example runs by the command in its header, and learns."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NEEDS_TORCH = ("huggingface_bert",)


def command_of(example: Path) -> tuple[dict[str, str], list[str]]:
    """Environment and arguments of the command in an example's docstring (an indented line)."""
    line = re.search(r"^    (.*python examples/\S+\.py.*)$", example.read_text(), re.MULTILINE)
    assert line, f"{example.name} does not say how it is run"
    words = shlex.split(line[1])
    start = words.index("python")
    return dict(word.split("=", 1) for word in words[:start]), words[start + 1 :]


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(
            path,
            id=path.stem,
            marks=[pytest.mark.torch] if path.stem in NEEDS_TORCH else [pytest.mark.default_flags],
        )
        for path in EXAMPLES
    ],
)
def test_an_example_runs_by_the_command_in_its_header(example: Path) -> None:
    settings, arguments = command_of(example)
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **settings},
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("plan: ")
    losses = [float(number) for number in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) >= 10
    assert losses[-1] < 0.9 * losses[0]


def test_there_is_an_example_for_every_door() -> None:
    assert {path.stem for path in EXAMPLES} == {"mlp", "gpt_nnx", "huggingface_bert"}
