"""A new drafter is one file and one line of the registry."""

from pathlib import Path

import pytest

import pronk
import pronk.drafting.from_text
from pronk import LLM, OptionError, SamplingParams
from pronk.drafting.registry import DRAFTERS, REGISTRY, make_drafter

FILE = '''
from collections.abc import Sequence
from dataclasses import dataclass

from pronk.drafting.proposer import DraftContext, Proposer, States
from pronk.sampling.tree import TokenTree


@dataclass(frozen=True)
class Echo(Proposer[States]):
    """Proposes the last token ``times`` times."""

    name = "echo"

    times: int = 3

    def propose(self, contexts: Sequence[DraftContext[States]]) -> list[TokenTree]:
        return [TokenTree.chain([c.tokens[-1]] * (1 + min(self.times, c.max_nodes))) for c in contexts]
'''


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the drafter as a file of the package ``from_text``."""
    (tmp_path / "echo.py").write_text(FILE, encoding="utf-8")
    package = pronk.drafting.from_text
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.setitem(DRAFTERS, "echo", "drafting.from_text.echo:Echo")


@pytest.mark.usefixtures("echo")
def test_a_registered_drafter_is_available_everywhere() -> None:
    drafter = make_drafter("echo(times=2)")
    assert type(drafter) is REGISTRY["echo"] is pronk.Echo  # type: ignore[comparison-overlap]
    llm = LLM(budget="all")
    params = SamplingParams(max_tokens=24)
    plain = llm.generate("a = 1\nb = 1\n", params, drafter="autoregressive")
    found = llm.generate("a = 1\nb = 1\n", params, drafter=drafter)
    assert found.token_ids == plain.token_ids
    assert found.stats.step_compression > 1
    with pytest.raises(OptionError, match=r"expected one of .*echo"):
        make_drafter("ecco")
