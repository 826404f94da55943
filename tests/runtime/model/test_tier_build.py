"""How much host memory a tier may be asked to take."""

from __future__ import annotations

import pytest
from ramet.runtime.config import EngineConfig
from ramet.runtime.model import tier_build
from ramet.runtime.protocol.errors import BadInputError


def rows(tmp_path, monkeypatch, limit: str, asked: float) -> int:
    (tmp_path / "max").write_text(limit)
    monkeypatch.setattr(tier_build, "LIMITS", (str(tmp_path / "gone"), str(tmp_path / "max")))
    return tier_build._host_rows(EngineConfig(model_path="m", host_cache_gb=asked), 1 << 20)


@pytest.mark.parametrize("limit", ["max\n", "9223372036854771712\n", f"{1 << 31}\n"])
def test_what_fits_is_taken(tmp_path, monkeypatch, limit):
    assert rows(tmp_path, monkeypatch, limit, 1.0) == 1024


def test_more_than_a_container_may_use_is_refused(tmp_path, monkeypatch):
    with pytest.raises(BadInputError, match=r"this container may use 0\.5 GiB"):
        rows(tmp_path, monkeypatch, f"{1 << 29}\n", 1.0)
    with pytest.raises(BadInputError, match="this machine has"):
        rows(tmp_path, monkeypatch, "max\n", 60000.0)
