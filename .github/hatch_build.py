"""Put the module into the wheel a second time, as the stub package that makes it typed (PEP 561).

A build tool takes each file of the project once, so the second time it is a copy from elsewhere.
"""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StubPackageHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self.folder = tempfile.mkdtemp()
        copy = shutil.copy(pathlib.Path(self.root, "tool_dispatcher.py"), self.folder)
        build_data["force_include"][copy] = "tool_dispatcher-stubs/__init__.pyi"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self.folder)
