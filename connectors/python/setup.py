# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml cannot say: the version is the header's, and the wheel, which has libraries
in it but no module compiled for Python, fits every Python 3 of this platform."""
import re
from pathlib import Path

from setuptools import setup
from setuptools.dist import Distribution
from wheel.bdist_wheel import bdist_wheel

HEADER = Path(__file__).resolve().parent / "kvferry" / "kvferry.h"


def version() -> str:
    numbers = re.findall(r"#define KVF_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)",
                         HEADER.read_text(encoding="utf-8"))
    return ".".join(numbers)


class PlatformWheel(bdist_wheel):
    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class LibraryDistribution(Distribution):
    def has_ext_modules(self):
        return True


setup(version=version(), cmdclass={"bdist_wheel": PlatformWheel}, distclass=LibraryDistribution)
