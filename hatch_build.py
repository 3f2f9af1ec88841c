"""Compile the kernels for an installation or a wheel.

Without a compiler, pronk is installed without them: it can load no model then, and says so.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface[Any]):
    """Build hook that compiles the kernels and adds their two libraries to the wheel.

    ``make wheels`` sets ``PRONK_LIBRARY`` to compiled kernels, possibly of another platform, and
    ``PRONK_WHEEL_TAG`` to the tag of their wheel. An empty ``PRONK_LIBRARY`` builds a wheel without
    kernels. ``PRONK_KERNELS=native`` compiles only the instruction sets of this processor, as
    ``make demo`` does.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Put the libraries into the package's folder (editable installation) or into the wheel."""
        if self.target_name != "wheel":
            return
        build = _load(Path(self.root) / "src" / "pronk" / "kernels" / "build.py")
        given = os.environ.get("PRONK_LIBRARY")
        if given == "":
            return
        if given:
            library = Path(given)
        else:
            library = Path(self.root) / "src" / "pronk" / "kernels" / build.library_name()
            sys.stderr.write("Compiling pronk's kernels (a minute or two) ...\n")
            try:
                build.build(library, native=os.environ.get("PRONK_KERNELS") == "native")
            except build.BuildError as error:
                for file in (library, build.suffix_library(library)):
                    file.unlink(missing_ok=True)
                self.app.display_warning(
                    f"pronk is installed without its kernels: {error}. Install a C++ compiler "
                    "(Debian: apt install g++) and pronk again."
                )
                return
        if version != "editable":
            for file in (library, build.suffix_library(library)):
                build_data["force_include"][str(file)] = f"pronk/kernels/{file.name}"
            build_data["pure_python"] = False
            build_data["tag"] = os.environ.get("PRONK_WHEEL_TAG") or f"py3-none-{_platform()}"


def _platform() -> str:
    """Return the wheel tag of this machine's platform."""
    from packaging.tags import platform_tags  # noqa: PLC0415 - hatchling brings it

    return next(iter(platform_tags()))


def _load(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("pronk_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pronk_build"] = module
    spec.loader.exec_module(module)
    return module
