# SPDX-License-Identifier: Apache-2.0
"""What changes KV under the same weights, as vLLM's ModelConfig has it: for the connector and for
the secondary tier."""
from pathlib import Path
from typing import Any, List, Optional

from kvferry import identity


class Unsupported(Exception):
    """This engine's KV is not stored: why, in one line. The engine runs on without."""


def parts(model: Any) -> List[Any]:
    """Nothing of hf_config is in it: models write into that while they are loaded, in the workers
    only, and both sides must come to the same."""
    overrides = getattr(model, "hf_overrides", None) or {}
    if callable(overrides):
        raise Unsupported("hf_overrides is a function, of which nobody can tell what it changes")
    name = str(getattr(model, "hf_config_path", None) or model.model)
    files = identity.configs(Path(name)) if Path(name).is_dir() else {}
    source = files or [name, str(getattr(model, "revision", None))]
    length = model.max_model_len if identity.has_long_factors({**files, "": overrides}) else 0
    quantization = [str(model.quantization), str(getattr(model, "quantization_config", None))]
    return [source, overrides, str(model.dtype), quantization, length]


def folder(model: Any) -> Optional[Path]:
    """The local folder of the model, where there is one."""
    path = Path(str(model.model))
    return path if path.is_dir() else None
